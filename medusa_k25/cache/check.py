"""Are the states of a cache what they claim to be?

Letters: T tokens, M rows with a state, N sampled positions, D hidden, V vocab, C candidate tokens a position.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from medusa_k25.cache.reader import Cache
    from medusa_k25.target import Target

MAX_DOCUMENTS = 256  # read for a sample
OTHER_NORM_SCORES = 2**23  # lm_head products spent on one norm more or less: all positions of a small vocabulary
SURPRISE_LOGITS = 2**24  # that exist at a time
BLOCK_ELEMENTS = 2**24  # of lm_head that are in fp32 at a time
RMS_RANGE = (0.9, 1.05)  # of h / weight: below 1 by eps where the states are small, else 1 up to rounding


def document_fault(
    ids_T: Tensor, mask_T: Tensor, hidden_MD: Tensor, positions_M: Tensor, hidden_size: int, vocab_size: int
) -> str | None:
    """What is wrong with a document (expected, got, fix), or None.

    A state may be missing only before an answer's last prompt token and at the document's final token.
    """
    T, M = len(ids_T), len(positions_M)
    if mask_T.shape != (T,) or ids_T.dim() != 1:
        return f"loss mask has shape {list(mask_T.shape)}, token ids {list(ids_T.shape)}; expected one flag a token"
    if T and not (0 <= ids_T.min() and ids_T.max() < vocab_size):
        t = int(((ids_T < 0) | (ids_T >= vocab_size)).nonzero()[0])
        return (
            f"token id {int(ids_T[t])} at position {t}, expected 0 to {vocab_size - 1}; "
            "tokenise with the target's own tokenizer"
        )
    if not mask_T[1:].any():
        return "the loss mask marks no token to predict; mark the answer's tokens, or leave the document out"
    if hidden_MD.shape != (M, hidden_size):
        return (
            f"hidden has shape {list(hidden_MD.shape)}, expected {[M, hidden_size]} (a row a position, D of the "
            "target); states of another length than their tokens come from prefix caching: switch it off"
        )
    if M and not (0 <= positions_M.min() and positions_M.max() < T):
        return f"positions run from {int(positions_M.min())} to {int(positions_M.max())}, expected 0 to {T - 1}"
    if not (positions_M[1:] > positions_M[:-1]).all():
        return "positions are not strictly increasing; sort them, and store a position once"
    stored_T = torch.zeros(T, dtype=torch.bool)
    stored_T[positions_M] = True
    last_answer_token = int(mask_T.nonzero()[-1])
    may_lack_T = torch.arange(T) < last_answer_token
    may_lack_T[:-1] &= ~mask_T[1:]
    may_lack_T[-1] = True
    if not (stored_T | may_lack_T).all():
        lacking = (~(stored_T | may_lack_T)).nonzero().flatten()
        return (
            f"{len(lacking)} positions lack a state, the first is {int(lacking[0])} of {T}; only positions before an "
            "answer's last prompt token and the final one may: capture it again without prefix caching"
        )
    finite_M = torch.isfinite(hidden_MD).all(dim=1)
    if not finite_M.all():
        bad = positions_M[~finite_M]
        return f"{len(bad)} states hold NaN or Inf, the first at position {int(bad[0])}; capture it in a wider dtype"
    return None


def spread(n: int, count: int) -> list[int]:
    """At most `count` of the numbers 0 .. n-1, evenly spread."""
    return torch.linspace(0, n - 1, min(n, count)).round().long().tolist() if n else []


def check_sample(cache: "Cache", max_rows: int = 512) -> None:
    """ValueError if sampled states are not finite, or token ids of sampled documents are out of range. Fast."""
    for index in spread(len(cache.documents), MAX_DOCUMENTS):
        document = cache.documents[index]
        where = f"{cache.path}: document {document.id!r} (shard {document.shard})"
        ids_T = cache.token_ids(document)
        if not (0 <= ids_T.min() and ids_T.max() < cache.vocab_size):
            raise ValueError(
                f"{where} has token ids from {int(ids_T.min())} to {int(ids_T.max())}, expected 0 to "
                f"{cache.vocab_size - 1}; the shard is damaged: remove its line from the index and capture again"
            )
        rows = spread(document.row_stop - document.row_start, 1 + max_rows // min(len(cache.documents), MAX_DOCUMENTS))
        for row in (document.row_start + row for row in rows):
            if not torch.isfinite(cache.read_rows(document.shard, row, row + 1)).all():
                raise ValueError(
                    f"{where} holds NaN or Inf in row {row}; "
                    "the shard is damaged: remove its line from the index and capture again"
                )


def verify(cache: "Cache") -> Iterator[list[str]]:
    """Read everything; yields the faults of one shard after the other (an empty list: it is sound)."""
    seen: set[str] = set()
    for shard, documents in groupby(cache.documents, key=lambda document: document.shard):
        faults = []
        with cache.shard_path(shard).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != cache.shard_sha256(shard):
                faults.append(f"{cache.shard_path(shard)} has changed since it was written: its sha256 differs")
        for document in documents:
            fault = document_fault(
                cache.token_ids(document),
                cache.loss_mask(document),
                *cache.states(document),
                cache.hidden_size,
                cache.vocab_size,
            )
            if fault is None and document.id in seen:
                fault = "stored twice"
            seen.add(document.id)
            if fault is not None:
                faults.append(f"document {document.id!r}: {fault}")
        yield faults


@dataclass(frozen=True)
class SelfCheck:
    """How well lm_head(h_t) agrees with the text, at sampled answer positions whose neighbours differ."""

    positions: int
    agreement: float  # share of positions where the argmax is x_{t+1}, the contract
    agreement_with_current: float  # where it is x_t
    agreement_with_second: float  # where it is x_{t+2}
    agreement_other_norm: float  # where it is x_{t+1} with one final norm taken off (added, if RMS says it is missing)
    rms_low: float  # RMS(h / weight), lowest and highest: 1 after the final norm
    rms_high: float


def ranks(states_ND: Tensor, lm_head_VD: Tensor, tokens_NC: Tensor) -> Tensor:
    """How many tokens of the vocabulary lm_head scores above each candidate, int64 [N, C]; 0: it is the argmax.

    Goes over lm_head a block at a time, so that neither its fp32 copy nor [N, V] logits exist.
    """
    norms_N = states_ND.norm(dim=1)
    rows_NCD = lm_head_VD[tokens_NC].float()
    # a candidate must not lose against itself, or a tie, by the rounding of another order of summation
    own_NC = torch.einsum("nd,ncd->nc", states_ND, rows_NCD) + 1e-5 * norms_N[:, None] * rows_NCD.norm(dim=2)
    ranks_NC = torch.zeros_like(tokens_NC)
    for block_BD in lm_head_VD.split(max(1, BLOCK_ELEMENTS // lm_head_VD.shape[1])):
        logits_NB = states_ND @ block_BD.float().T
        for c in range(tokens_NC.shape[1]):
            ranks_NC[:, c] += (logits_NB > own_NC[:, c, None]).sum(dim=1, dtype=torch.int32)  # half the time of int64
    return ranks_NC


def far_better(ranks_N: Tensor, other_N: Tensor) -> bool:
    """Whether one way to read the states explains the text far better than another, at the same positions.

    By hits, which settles greedy text in a few positions; or by the gain in log-rank, four standard errors from none.
    The true ordering has the lowest expected log-rank for text sampled at any temperature, and unlike a likelihood it
    does not reward states that are only scaled up.
    """
    hits, other_hits = (ranks_N == 0).float().mean(), (other_N == 0).float().mean()
    gain_N = other_N.double().log1p() - ranks_N.double().log1p()
    return bool(hits >= 0.5 and hits >= 2 * other_hits) or bool(gain_N.sum() > 4 * gain_N.square().sum().sqrt())


def predicts(ranks_N3: Tensor, offset: int) -> bool:
    """Whether the states predict the token at this offset from x_t far better than its neighbours."""
    return all(far_better(ranks_N3[:, offset], ranks_N3[:, other]) for other in range(3) if other != offset)


def sample_answers(cache: "Cache", max_positions: int) -> tuple[Tensor, Tensor]:
    """States fp32 [N, D] that read x_t and the tokens [x_t, x_{t+1}, x_{t+2}] int64 [N, 3] around them.

    The same positions every time; x_{t+1} is an answer's token and differs from its neighbours, because a token that
    repeats itself cannot tell a shift. ValueError if there is no such position.
    """
    sampled = spread(len(cache.documents), min(MAX_DOCUMENTS, max_positions))
    labels = 0
    states, tokens = [], []
    for index in sampled:
        document = cache.documents[index]
        ids_T = cache.token_ids(document).long()
        positions_M = cache.positions(document)
        rows = (positions_M + 2 < len(ids_T)).nonzero().flatten()
        tokens_R3 = torch.stack([ids_T[positions_M[rows] + offset] for offset in range(3)], dim=1)
        answer_R = cache.loss_mask(document)[positions_M[rows] + 1]
        labels += int(answer_R.sum())
        usable = (answer_R & (tokens_R3[:, 1:] != tokens_R3[:, :-1]).all(dim=1)).nonzero().flatten()
        for i in spread(len(usable), max(1, max_positions // len(sampled))):
            row = document.row_start + int(rows[usable[i]])
            states.append(cache.read_rows(document.shard, row, row + 1).float())
            tokens.append(tokens_R3[usable[i]])
    if not states:
        why = "repeats one token" if labels else "is empty"
        raise ValueError(
            f"{cache.path}: the alignment of states and tokens cannot be checked, every sampled answer {why} "
            f"({len(cache.documents)} documents, {labels} labels with a state); capture answers of two tokens or more"
        )
    return torch.cat(states), torch.stack(tokens)


@torch.no_grad()
def self_check(cache: "Cache", target: "Target", max_positions: int = 512) -> SelfCheck:
    """Check that lm_head(h_t) predicts x_{t+1} and that the final norm was applied exactly once.

    Holds for greedy and for sampled text of the target. ValueError names the convention that the data seems to have.
    """
    states_ND, tokens_N3 = sample_answers(cache, max_positions)
    weight_D = target.norm_weight.float()
    weight_D = weight_D.where(weight_D != 0, torch.inf)  # nothing passes a zero weight: leave it out below, too
    rms_N = (states_ND / weight_D).square().sum(dim=1).div(weight_D.isfinite().sum()).sqrt()
    low, high = RMS_RANGE
    normed = bool(((rms_N >= low) & (rms_N <= high)).float().mean() >= 0.95)
    few = spread(len(states_ND), max(128, OTHER_NORM_SCORES // target.vocab_size))
    if normed:
        # if h = norm(norm(z)), then h / weight is norm(z) up to a positive factor a token, which no ranking sees
        other, other_ND = "the final norm was applied twice", states_ND[few] / weight_D
    else:
        mean_square_N1 = states_ND[few].square().mean(dim=1, keepdim=True)
        other = "the final norm is missing (pre-norm states)"
        other_ND = states_ND[few] * (mean_square_N1 + target.norm_eps).rsqrt() * target.norm_weight.float()
    all_ranks = ranks(torch.cat([states_ND, other_ND]), target.lm_head, torch.cat([tokens_N3, tokens_N3[few]]))
    ranks_N3, other_N3 = all_ranks.split([len(states_ND), len(few)])

    hits_3 = (ranks_N3 == 0).float().mean(dim=0).tolist()
    report = SelfCheck(
        positions=len(states_ND),
        agreement=hits_3[1],
        agreement_with_current=hits_3[0],
        agreement_with_second=hits_3[2],
        agreement_other_norm=float((other_N3[:, 1] == 0).float().mean()),
        rms_low=float(rms_N.min()),
        rms_high=float(rms_N.max()),
    )
    if normed and predicts(ranks_N3, 1) and not far_better(other_N3[:, 1], ranks_N3[few, 1]):
        return report

    shifts = ("labels are shifted by -1 (h_t predicts x_t)", "", "labels are shifted by +1 (h_t predicts x_{t+2})")
    readings = [
        (float(ranks_NC[:, offset].double().log1p().mean()), predicts(ranks_NC, offset), norm, shifts[offset])
        for ranks_NC, norm in (
            (other_N3, other),
            (ranks_N3, "" if normed else "states are not scaled by this final norm"),
        )
        for offset in range(3)
    ]
    _, fits, norm, shift = min(readings, key=lambda reading: reading[0])
    seems = " and ".join(filter(None, (norm, shift))) if fits else "no known convention; another target, layer or text?"
    raise ValueError(
        f"{cache.path}: states and tokens are not aligned as expected (argmax(lm_head(h_t)) is x_{{t+1}}, h_t after "
        f"the final norm). The data seems to have: {seems}. At {report.positions} positions h_t predicts "
        f"x_t {hits_3[0]:.1%}, x_{{t+1}} {hits_3[1]:.1%}, x_{{t+2}} {hits_3[2]:.1%} of the time, and "
        f"x_{{t+1}} {report.agreement_other_norm:.1%} as if {other}; RMS(h / weight) is {report.rms_low:.3g} to "
        f"{report.rms_high:.3g}, expected 1. Capture again, or open it with the target that it was made with "
        f"({cache.manifest.target['name']})"
    )


@torch.no_grad()
def surprise(cache: "Cache", target: "Target", temperature: float) -> tuple[float, float]:
    """(how much more an answer's tokens surprise lm_head(h_t) than it expects, the standard error), nats a token.

    That is -log p(x_{t+1}) less the entropy of p at a temperature above 0: 0 on average for text that was drawn from p,
    less for text of a lower temperature. States of a layer before the last, or of another revision of the target, pass
    `self_check` when they are similar enough; but they are as sure as the right ones, and right less often.
    """
    states_ND, tokens_N3 = sample_answers(cache, max(64, min(512, SURPRISE_LOGITS // target.vocab_size)))
    blocks = target.lm_head.split(max(1, BLOCK_ELEMENTS // target.hidden_size))
    logits_NV = torch.cat([states_ND @ block_BD.float().T for block_BD in blocks], dim=1)
    logp_NV = (logits_NV / temperature).log_softmax(dim=1)
    p_NV = logp_NV.exp()
    entropy_N = -(p_NV * logp_NV).sum(dim=1)
    variance_N = (p_NV * logp_NV.square()).sum(dim=1) - entropy_N.square()
    more_N = -logp_NV.gather(1, tokens_N3[:, 1:2]).squeeze(1) - entropy_N
    return float(more_N.mean()), float(variance_N.clamp(min=0).sum().sqrt() / len(more_N))
