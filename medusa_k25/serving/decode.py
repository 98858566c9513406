"""Reference decoding: draft a tree, verify it in one pass of the target, keep what the target would have said.

Slow and plain on purpose: it is what a serving engine must equal, and what replay is held against. Lossless: at every
node the target chooses its own next token (greedily or by sampling) and the walk goes on while a draft carries it.

Letters: T tokens, N states to draft from, n tree nodes, V vocabulary, D hidden, K heads, M draft vocabulary; at a depth
of the tree P drafters, Q of all N states, R choices of each, C nodes, S numbers of a state.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from medusa_k25.cache import Cache, Document
from medusa_k25.data.texts import Text
from medusa_k25.heads import Speculator
from medusa_k25.metrics import topk_ids
from medusa_k25.ngram.beside import Beside
from medusa_k25.replay import Acceptance, answer_ranks, replay, walk_all
from medusa_k25.target import TargetModel
from medusa_k25.tree import Topology, Tree

Choose = Callable[[Tensor], int]  # logits [V] -> token id


def greedy(logits_V: Tensor) -> int:
    """The most likely token; the lowest id when several are equally likely."""
    return int(topk_ids(logits_V[None], 1))


def sampled(temperature: float, top_p: float = 1.0, generator: torch.Generator | None = None) -> Choose:
    """Sampling at `temperature` (> 0) from the smallest set of tokens whose probability reaches `top_p`."""
    if temperature <= 0 or not 0 < top_p <= 1:
        raise ValueError(f"expected temperature > 0 and 0 < top_p <= 1, got {temperature} and {top_p}")

    def choose(logits_V: Tensor) -> int:
        probabilities_V, ids_V = (logits_V.float() / temperature).softmax(-1).sort(descending=True, stable=True)
        before_V = probabilities_V.cumsum(-1) - probabilities_V
        probabilities_V[before_V >= top_p] = 0
        return int(ids_V[torch.multinomial(probabilities_V, 1, generator=generator)])

    return choose


class Drafter:
    """Heads with what they draft with, and a tree: fills the tree's nodes from one hidden state, depth by depth."""

    def __init__(self, speculator: Speculator, tree: Tree):
        tree.refuse_unless_fits(speculator.heads.num_heads, len(speculator.vocabulary))
        self.speculator, self.tree = speculator, tree
        self.levels = tree.levels(by_path=speculator.heads.reads == "path")

    def draft(self, hidden_D: Tensor, root: int) -> list[int]:
        """Token of every node; node 0 is the root."""
        tokens_1n, _ = self.draft_all(hidden_D[None], torch.tensor([root]))
        return tokens_1n[0].tolist()

    @torch.no_grad()
    def draft_all(self, hidden_ND: Tensor, root_N: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [N, n] of every node from many states at once, node 0 the root, and how sure the heads are of them.

        The latter is float32 [N, n]: the log softmax probability over the draft vocabulary of a node's draft, which the
        heads give it below the drafts on its path; 0 for the root.
        """
        heads, lm_head_MD = self.speculator.heads, self.speculator.lm_head_MD

        def drafts(lm_head: Tensor) -> tuple[Tensor, Tensor]:
            return self._drafts(hidden_ND, root_N, lm_head.expand(heads.num_heads, -1, -1))

        return heads.with_lm_head(lm_head_MD, drafts)

    def _drafts(self, hidden_ND: Tensor, root_N: Tensor, lm_head_KMD: Tensor) -> tuple[Tensor, Tensor]:
        heads, vocabulary, embed = self.speculator.heads, self.speculator.vocabulary, self.speculator.embed
        N, hidden_ND = len(hidden_ND), hidden_ND.to(lm_head_KMD.device, lm_head_KMD.dtype)
        state_NPS = heads.start(hidden_ND)[:, None]
        tokens_NC = root_N.long().to(hidden_ND.device)[:, None]
        tokens, log_ps = [tokens_NC], [torch.zeros(N, 1, device=hidden_ND.device)]
        for k, (level, lm_head_MD) in enumerate(zip(self.levels, lm_head_KMD, strict=False), start=1):
            token_QD = None
            if heads.needs_token(k):
                assert embed is not None
                token_QD = embed(tokens_NC[:, level.nodes_P]).to(hidden_ND.dtype).flatten(0, 1)
            feature_QD, state_QS = heads.step(k, state_NPS[:, level.above_P].flatten(0, 1), token_QD)
            state_NPS = state_QS.unflatten(0, (N, -1))
            logits_QM = feature_QD @ lm_head_MD.T
            ids_QR = topk_ids(logits_QM, level.width)
            log_p_QR = (logits_QM.gather(1, ids_QR) - logits_QM.logsumexp(dim=1, keepdim=True)).float()
            ids_NC, log_p_NC = (
                each_QR.unflatten(0, (N, -1))[:, level.drafter_C, level.rank_C] for each_QR in (ids_QR, log_p_QR)
            )
            tokens_NC = vocabulary.to_target(ids_NC)
            tokens.append(tokens_NC)
            log_ps.append(log_p_NC)
        return torch.cat(tokens, dim=1), torch.cat(log_ps, dim=1)


@dataclass(frozen=True)
class Decoded:
    answer_ids: list[int]
    acceptance: Acceptance


@torch.no_grad()
def speculative_decode(
    target: TargetModel,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    end_ids: Sequence[int],
    choose: Choose = greedy,
    beside: Beside | None = None,
) -> Decoded:
    """One answer to `prompt_ids`, ending with an end token or after `max_new_tokens`.

    beside: what is drafted beside the drafter's tree, which must be its whole one; None: nothing.
    """
    assert beside is None or beside.tree == drafter.tree
    cache = DynamicCache(config=target.model.config.get_text_config())
    hidden_TD = target.hidden(torch.tensor([prompt_ids], device=target.device), past_key_values=cache, use_cache=True)[
        0
    ]
    hidden_D = hidden_TD[-1]
    answer = [choose(target.logits(hidden_D))]
    passes, histogram = 0, dict[int, int]()

    while answer[-1] not in end_ids and len(answer) < max_new_tokens:
        tokens = drafter.draft(hidden_D, answer[-1])
        topology: Topology = drafter.tree
        if beside is not None:
            topology, tokens = beside.merged(tokens, [*prompt_ids, *answer])
        past = len(prompt_ids) + len(answer) - 1  # the root itself is not in the cache yet
        hidden_nD = verify(target, topology, tokens, past, cache)
        logits_nV = target.logits(hidden_nD)

        kept, accepted, node = [0], 0, 0
        while True:
            answer.append(choose(logits_nV[node]))
            drafted = accepted_child(topology, tokens, node, answer[-1])
            accepted += drafted is not None
            if drafted is None or answer[-1] in end_ids or len(answer) == max_new_tokens:
                break
            kept.append(node := drafted)
        hidden_D = hidden_nD[node]
        compact(cache, past, kept)
        passes += 1
        histogram[accepted] = histogram.get(accepted, 0) + 1

    # like replay, an answer of one token counts as none: it needed no pass
    acceptance = Acceptance(int(passes > 0), passes, len(answer) - 1, histogram)
    return Decoded(answer, acceptance)


def accepted_child(topology: Topology, tokens: Sequence[int], node: int, token: int) -> int | None:
    """The acceptance rule: the child of `node` that carries `token`, which the target chose there; None: no draft does.

    `token` does not depend on the drafts, so neither does the distribution of the output, however it was chosen.
    """
    return next((child for child in topology.children[node] if tokens[child] == token), None)


def verify(target: TargetModel, topology: Topology, tokens: Sequence[int], past: int, cache: DynamicCache) -> Tensor:
    """Hidden states [n, D] of all nodes in one pass; `cache` holds `past` tokens before it and past + n after it."""
    n = topology.num_nodes
    # every node sees the past, its ancestors and itself
    mask_nT = torch.cat([torch.ones(n, past, dtype=torch.bool), topology.mask_nn], dim=1)
    return target.hidden(
        torch.tensor([tokens], device=target.device),
        attention_mask=mask_nT[None, None].to(target.device),
        position_ids=(past + topology.depths_n)[None].to(target.device),
        past_key_values=cache,
        use_cache=True,
    )[0]


def compact(cache: DynamicCache, past: int, kept: Sequence[int]) -> None:
    """Keep of the nodes that were appended after `past` tokens only those on the accepted path, in its order."""
    for layer in cache.layers:
        for name in ("keys", "values"):
            states = getattr(layer, name)  # [1, heads, past + n, head size]
            setattr(layer, name, torch.cat([states[:, :, :past], states[:, :, [past + node for node in kept]]], dim=2))


@dataclass(frozen=True)
class Proof:
    """Decoding held against the target's greedy text (in the cache) and against replay's counts, answer by answer."""

    prompts: int
    tokens: int
    other_output: list[str]  # ids of the documents whose text differs
    other_counts: list[str]  # ids of the documents whose counters differ from replay's
    decoded: Acceptance
    replayed: Acceptance
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.other_output and not self.other_counts

    def __str__(self) -> str:
        same = self.prompts - len(self.other_output)
        lines = [
            f"{same} of {self.prompts} answers equal greedy decoding token for token ({self.tokens:,} tokens)",
            f"passes: {self.decoded.passes} decoded, {self.replayed.passes} replayed; accepted drafts a pass: "
            f"{self.decoded.accepted} decoded, {self.replayed.accepted} replayed",
            f"acceptance length {self.decoded.length:.4f} decoded, {self.replayed.length:.4f} replayed; "
            f"{self.decoded.passes_saved:.1%} of the passes saved",
        ]
        for what, ids in (("output", self.other_output), ("counts", self.other_counts)):
            if ids:
                lines.append(f"other {what}: {', '.join(ids)}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds, "acceptance_length": self.decoded.length}


def prove(
    target: TargetModel,
    end_ids: Sequence[int],
    drafter: Drafter,
    cache: Cache,
    documents: Sequence[Document],
    beside: Beside | None = None,
) -> Proof:
    """Decode the prompt of every document, up to the length of its answer: one that no end token ends was cut there.

    They must hold one answer each, which `target` gave greedily in fp32.
    """
    other_output, other_counts, tokens = [], [], 0
    decoded, replayed = Acceptance(), Acceptance()
    began = time.perf_counter()
    bar = tqdm(documents, desc="decode", unit="prompt")
    for document in bar:
        if document.sampling["mode"] != "greedy" or document.dtype != "float32":
            raise ValueError(
                f"document {document.id} is {document.sampling['mode']} {document.dtype} text: the proof is for greedy "
                "float32 text; generate it with generate.heldout_dtype=float32 and generate.temperature=0"
            )
        ids_T, start = cache.token_ids(document), document.prompt_length
        prompt_ids, answer_ids = ids_T[:start].tolist(), ids_T[start:].tolist()
        result = speculative_decode(target, drafter, prompt_ids, len(answer_ids), end_ids, beside=beside)
        ranks = answer_ranks(drafter.speculator, cache, [document])
        if beside is None:
            expected = replay(ranks, drafter.tree)
        else:
            texts = [Text(ids_T, start, document.id, None, None, None)] * len(ranks)  # none of an answer of one token
            expected = walk_all(beside.accepted(texts, ranks)).acceptance
        tokens += len(result.answer_ids)
        decoded, replayed = decoded + result.acceptance, replayed + expected
        if result.answer_ids != answer_ids:
            other_output.append(document.id)
        elif result.acceptance != expected:
            other_counts.append(document.id)
        bar.set_postfix(acceptance=f"{decoded.length:.2f}", differing=len(other_output) + len(other_counts))
    seconds = time.perf_counter() - began
    return Proof(len(documents), tokens, other_output, other_counts, decoded, replayed, seconds)
