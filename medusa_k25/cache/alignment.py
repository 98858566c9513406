"""Are the states of a cache what they claim to be? Three questions, answered from the text alone:

1. Does lm_head(h_t) predict x_{t+1}, rather than x_t or x_{t+2}?
2. Was the final norm applied exactly once?
3. Does the text follow the states' first choice as often as they themselves say it should? Greedy text does so always,
   and text sampled at a temperature as often as the mean of the highest probability. The states of an earlier layer, of
   another revision, or of a text that the target did not write are too sure of themselves.

Letters: N sampled positions, W those of sampled text, D hidden, V vocab, B rows of a block of lm_head, C candidates.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_k25.cache.check import MAX_DOCUMENTS, spread

if TYPE_CHECKING:
    from medusa_k25.cache.reader import Cache
    from medusa_k25.target import Target

OTHER_NORM_SCORES = 2**23  # lm_head products spent on one norm more or less: all positions of a small vocabulary
BLOCK_ELEMENTS = 2**24  # of lm_head that are in fp32 at a time
RMS_RANGE = (0.9, 1.05)  # of h / weight: below 1 by eps where the states are small, else 1 up to rounding
FIRST_CHOICE_SLACK = 0.05  # bf16 text and fp8 states take 2 to 3% of the first choices away [measured]


@dataclass(frozen=True)
class SelfCheck:
    """How well lm_head(h_t) agrees with the text, at sampled answer positions whose neighbours differ."""

    positions: int
    agreement: float  # share of positions where the argmax is x_{t+1}, the contract
    agreement_with_current: float  # where it is x_t
    agreement_with_second: float  # where it is x_{t+2}
    agreement_other_norm: float  # where it is x_{t+1} with one final norm taken off (added, if RMS says it is missing)
    expected_agreement: float | None  # by the states themselves, at the text's temperature; None: that is not known
    rms_low: float  # RMS(h / weight), lowest and highest: 1 after the final norm
    rms_high: float


@dataclass(frozen=True)
class Sample:
    """Positions of answers: states that read x_t, and the text around them."""

    states_ND: Tensor  # fp32
    tokens_N3: Tensor  # int64: x_t, x_{t+1}, x_{t+2}
    temperature_N: Tensor  # at which x_{t+1} was drawn, 0: greedy, NaN: not known
    top_p_N: Tensor


@dataclass(frozen=True)
class Scores:
    ranks_NC: Tensor  # int64: how many tokens of the vocabulary score above each candidate; 0: it is the argmax
    peak_N: Tensor  # the highest probability at the given temperature


def score(states_ND: Tensor, lm_head_VD: Tensor, tokens_NC: Tensor, temperature_N: Tensor) -> Scores:
    """What lm_head says of each candidate and of its own first choice.

    Goes over lm_head a block at a time, so that neither its fp32 copy nor [N, V] logits exist.
    """
    norms_N = states_ND.norm(dim=1)
    rows_NCD = lm_head_VD[tokens_NC].float()
    # a candidate must not lose against itself, or a tie, by the rounding of another order of summation
    own_NC = torch.einsum("nd,ncd->nc", states_ND, rows_NCD) + 1e-5 * norms_N[:, None] * rows_NCD.norm(dim=2)
    ranks_NC = torch.zeros_like(tokens_NC)
    warm = temperature_N.nonzero().flatten()  # the first choice of greedy text has probability 1
    heat_W1 = temperature_N[warm, None]
    highest_W, total_W = (torch.full((len(warm),), -torch.inf) for _ in range(2))  # of logits / temperature; as log-sum
    for block_BD in lm_head_VD.split(max(1, BLOCK_ELEMENTS // lm_head_VD.shape[1])):
        logits_NB = states_ND @ block_BD.float().T
        for c in range(tokens_NC.shape[1]):
            ranks_NC[:, c] += (logits_NB > own_NC[:, c, None]).sum(dim=1, dtype=torch.int32)  # half the time of int64
        if len(warm):
            logits_WB = logits_NB[warm] / heat_W1
            highest_W = torch.maximum(highest_W, logits_WB.amax(dim=1))
            total_W = torch.logaddexp(total_W, logits_WB.logsumexp(dim=1))
    peak_N = torch.ones(len(states_ND))
    peak_N[warm] = (highest_W - total_W).exp()
    return Scores(ranks_NC, peak_N)


def rms_of(states_ND: Tensor, weight_D: Tensor) -> Tensor:
    """RMS(h / weight) of each state, 1 after the final norm. Nothing passes a zero weight: it is left out."""
    passed_D = weight_D != 0
    return (states_ND[:, passed_D] / weight_D[passed_D]).square().mean(dim=1).sqrt()


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


def number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


def sample_answers(cache: "Cache", max_positions: int, max_documents: int) -> Sample:
    """The same positions every time; x_{t+1} is an answer's token and differs from its neighbours, because a token that
    repeats itself cannot tell a shift. ValueError if there is no such position.
    """
    sampled = spread(len(cache.documents), min(max_documents, max_positions))
    labels = 0
    states, tokens, temperatures, top_ps = [], [], list[float](), list[float]()
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
            temperatures.append(number(document.sampling.get("temperature"), math.nan))
            top_ps.append(number(document.sampling.get("top_p"), 1.0))
    if not states:
        why = "repeats one token" if labels else "is empty"
        raise ValueError(
            f"{cache.path}: the alignment of states and tokens cannot be checked, every sampled answer {why} "
            f"({len(cache.documents)} documents, {labels} labels with a state); capture answers of two tokens or more"
        )
    return Sample(torch.cat(states), torch.stack(tokens), torch.tensor(temperatures), torch.tensor(top_ps))


def unlike_its_own_text(sample: Sample, scores: Scores) -> tuple[float | None, bool]:
    """(how often x_{t+1} should be the states' first choice, whether it is so much less or more often).

    None: no document says at which temperature it was sampled. Then x_{t+1} has to be the first choice at least as
    often as at temperature 1, above which nobody serves.
    """
    known_N = sample.temperature_N.isfinite()
    known = bool(known_N.any())
    # where x_t itself is the first choice the sample, whose neighbours differ, never has it
    used_N = (scores.ranks_NC[:, 0] != 0) & (known_N | (not known))
    if not used_N.any():
        return None, False
    peak_N, hits_N = scores.peak_N[used_N], (scores.ranks_NC[used_N, 1] == 0).float()
    # under top-p what is left of the vocabulary shares the rest
    highest_N = (peak_N / sample.top_p_N[used_N]).clamp(max=1) if known else torch.ones_like(peak_N)
    variance = peak_N.clamp(0.05, 0.95).mul(1 - peak_N.clamp(0.05, 0.95)).mean() / len(peak_N)
    slack = FIRST_CHOICE_SLACK + 4 * variance.sqrt()
    wrong = bool(hits_N.mean() < peak_N.mean() - slack or hits_N.mean() > highest_N.mean() + slack)
    return (float(peak_N.mean()) if known else None), wrong


def renumbered(tokens_N: Sequence[int], choices_N: Sequence[int]) -> bool:
    """Whether the states' first choices follow the text one to one without being its tokens: another numbering.

    Each occurrence is told by the others of its kind, in both directions.
    """

    def told(keys: Sequence[int], values: Sequence[int]) -> float:
        of_key: dict[int, Counter[int]] = {}
        for key, value in zip(keys, values, strict=True):
            of_key.setdefault(key, Counter())[value] += 1
        right = total = 0
        for key, value in zip(keys, values, strict=True):
            others = of_key[key] - Counter([value])
            if others:
                total += 1
                right += others[value] == max(others.values())
        return right / total if total >= 20 else 0.0

    return told(tokens_N, choices_N) >= 0.7 and told(choices_N, tokens_N) >= 0.7


def first_choices(states_ND: Tensor, lm_head_VD: Tensor) -> list[int]:
    """The argmax over the vocabulary at each position."""
    best_N, choice_N = torch.full((len(states_ND),), -torch.inf), torch.zeros(len(states_ND), dtype=torch.long)
    size = max(1, BLOCK_ELEMENTS // lm_head_VD.shape[1])
    for number, block_BD in enumerate(lm_head_VD.split(size)):
        value_N, index_N = (states_ND @ block_BD.float().T).max(dim=1)
        better_N = value_N > best_N
        choice_N = torch.where(better_N, index_N + number * size, choice_N)
        best_N = torch.where(better_N, value_N, best_N)
    return choice_N.tolist()


@torch.no_grad()
def self_check(
    cache: "Cache", target: "Target", max_positions: int = 512, max_documents: int = MAX_DOCUMENTS
) -> SelfCheck:
    """Check that lm_head(h_t) predicts x_{t+1} as well as the text's sampling says, and that the final norm was applied
    exactly once.

    Holds for greedy and for sampled text of the target. ValueError names the convention that the data seems to have.
    """
    sample = sample_answers(cache, max_positions, max_documents)
    states_ND, tokens_N3 = sample.states_ND, sample.tokens_N3
    weight_D = target.norm_weight.float()
    rms_N = rms_of(states_ND, weight_D)
    low, high = RMS_RANGE
    normed = bool(((rms_N >= low) & (rms_N <= high)).float().mean() >= 0.95)
    few = spread(len(states_ND), max(128, OTHER_NORM_SCORES // target.vocab_size))
    if normed:
        # if h = norm(norm(z)), then h / weight is norm(z) up to a positive factor a token, which no ranking sees
        divisor_D = weight_D.where(weight_D != 0, torch.inf)  # nothing passes a zero weight
        other, other_ND = "the final norm was applied twice", states_ND[few] / divisor_D
    else:
        mean_square_N1 = states_ND[few].square().mean(dim=1, keepdim=True)
        other = "the final norm is missing (pre-norm states)"
        other_ND = states_ND[few] * (mean_square_N1 + target.norm_eps).rsqrt() * weight_D
    scores = score(
        torch.cat([states_ND, other_ND]),
        target.lm_head,
        torch.cat([tokens_N3, tokens_N3[few]]),
        torch.cat([sample.temperature_N.nan_to_num(1.0), torch.zeros(len(few))]),
    )
    ranks_N3, other_N3 = scores.ranks_NC.split([len(states_ND), len(few)])
    own_scores = Scores(ranks_N3, scores.peak_N[: len(states_ND)])

    hits_3 = (ranks_N3 == 0).float().mean(dim=0).tolist()
    expected, unlike = unlike_its_own_text(sample, own_scores)
    report = SelfCheck(
        positions=len(states_ND),
        agreement=hits_3[1],
        agreement_with_current=hits_3[0],
        agreement_with_second=hits_3[2],
        agreement_other_norm=float((other_N3[:, 1] == 0).float().mean()),
        expected_agreement=expected,
        rms_low=float(rms_N.min()),
        rms_high=float(rms_N.max()),
    )
    aligned = normed and predicts(ranks_N3, 1) and not far_better(other_N3[:, 1], ranks_N3[few, 1])
    if aligned and not unlike:
        return report

    if aligned:
        seems = (
            "states of an unknown layer, or of another revision of the target, or a text that it did not write so: the "
            f"text should be the states' first choice {float(own_scores.peak_N.mean()):.1%} of the time"
        )
    else:
        seems = convention(ranks_N3, other_N3, "" if normed else "states are not scaled by this final norm", other)
        if not seems and renumbered(tokens_N3[:, 1].tolist(), first_choices(states_ND, target.lm_head)):
            seems = "token ids of another tokenizer (the states know the text, but number it otherwise)"
    rounded = sum(document.dtype == "bfloat16" for document in cache.documents)
    if rounded and cache.manifest.engine.endswith("float32"):
        seems = (
            f"{seems or 'no known convention'}. Or it is only rounding: {rounded:,} of {len(cache.documents):,} texts "
            "were generated in bfloat16, the states computed in float32, and a target of random weights then often "
            "chooses other tokens; generate with generate.dtype=float32, or capture with capture.compute_dtype=bfloat16"
        )
    raise ValueError(
        f"{cache.path}: states and tokens are not aligned as expected (argmax(lm_head(h_t)) is x_{{t+1}}, h_t after "
        "the final norm). The data seems to have: "
        f"{seems or 'no known convention; an unknown layer, another target, or another text?'}. "
        f"At {report.positions} positions h_t predicts "
        f"x_t {hits_3[0]:.1%}, x_{{t+1}} {hits_3[1]:.1%}, x_{{t+2}} {hits_3[2]:.1%} of the time, and "
        f"x_{{t+1}} {report.agreement_other_norm:.1%} as if {other}; RMS(h / weight) is {report.rms_low:.3g} to "
        f"{report.rms_high:.3g}, expected 1. Capture again, or open it with the target that it was made with "
        f"({cache.manifest.target['name']})"
    )


def convention(ranks_N3: Tensor, other_N3: Tensor, norm: str, other: str) -> str:
    """What the states seem to be, if with or without one norm (`other`) they predict a token near x_t; else ""."""
    shifts = ("labels are shifted by -1 (h_t predicts x_t)", "", "labels are shifted by +1 (h_t predicts x_{t+2})")
    readings = [
        (float(ranks_NC[:, offset].double().log1p().mean()), predicts(ranks_NC, offset), name, shifts[offset])
        for ranks_NC, name in ((other_N3, other), (ranks_N3, norm))
        for offset in range(3)
    ]
    _, fits, name, shift = min(readings, key=lambda reading: reading[0])
    return " and ".join(filter(None, (name, shift))) if fits else ""
