"""What a rank drafts with: the tree as the engine's tensors, and the heads with what they share of the target.

Plain torch: the engine passes in its lm_head, its embeddings and its collectives.

Letters: N requests, n tree nodes, K heads, C choices of a head, D hidden, V vocabulary, M draft vocabulary, R rows of a
rank, W ranks; at a depth of the tree P drafters and C nodes, S numbers of a state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from medusa_k25.heads.embeddings import unit_rms
from medusa_k25.metrics import ordered_topk
from medusa_k25.serving.formats import ServedHeads
from medusa_k25.tree import Topology, Tree


@dataclass(frozen=True)
class Drafts:
    """Of every node, the root first: its token int64 [N, n], and where it was asked for, the logarithm of what the head
    gave it among the draft vocabulary, fp32 [N, n], 0 for the root."""

    tokens_Nn: Tensor
    log_p_Nn: Tensor | None


class EngineTree:
    """A tree as verification takes it, for up to `max_requests` requests that all verify the same one.

    links: next_token_Nn is a node's first child, next_sibling_Nn the next child of its parent, -1 where there is none.
    """

    def __init__(self, tree: Topology, max_requests: int, device: torch.device | str):
        n = tree.num_nodes
        first_child_n = [children[0] if children else -1 for children in tree.children]
        sibling_n = [-1] * n
        for children in tree.children:
            for node, following in pairwise(children):
                sibling_n[node] = following
        self.num_nodes = n
        self.depths_n = tree.depths_n.to(device)
        self.mask_nn = tree.mask_nn.to(device)
        # the kernels want contiguous rows, one a request; slices of these cost no kernel a pass
        self.next_token_Nn = torch.tensor(first_child_n, device=device).repeat(max_requests, 1)
        self.next_sibling_Nn = torch.tensor(sibling_n, device=device).repeat(max_requests, 1)
        self.index_Nn = torch.arange(max_requests * n, device=device).view(max_requests, n)

    def full_mask(self, lengths: list[int]) -> Tensor:
        """`full_mask` where all requests verify this tree."""
        return full_mask(self.mask_nn.expand(len(lengths), -1, -1), lengths)

    def tree_mask(self, num_requests: int) -> Tensor:
        """The tree's part alone, request by request, bool, flat."""
        return self.mask_nn.repeat(num_requests, 1, 1).flatten()


class Part:
    """A part of the drafted tree that a pass may verify: the nodes in it, the root first, and itself as a tree.

    depths: how many nodes it has at each depth below the root.
    """

    def __init__(self, whole: Tree, kept: Sequence[int], max_requests: int, device: torch.device | str):
        """kept: numbers of nodes of `whole` but the root, every node's parent among them."""
        nodes = [0, *sorted(kept)]
        place = {node: at for at, node in enumerate(nodes)}
        part = Topology([-1, *(place[whole.parents[node]] for node in nodes[1:])])
        self.num_nodes = part.num_nodes
        self.depths = torch.bincount(part.depths_n).tolist()[1:]
        self.nodes_s = torch.tensor(nodes, device=device)
        self.tree = EngineTree(part, max_requests, device)


def full_mask(mask_Nnn: Tensor, lengths: list[int]) -> Tensor:
    """For requests of `lengths` tokens: rows over the past and the tree, request by request, bool, flat.

    Request i has n rows of lengths[i] + n: every node sees the past, its ancestors and itself.
    """
    n = mask_Nnn.shape[1]
    mask = torch.ones(sum(n * (length + n) for length in lengths), dtype=torch.bool, device=mask_Nnn.device)
    start = 0
    for mask_nn, length in zip(mask_Nnn, lengths, strict=True):
        stop = start + n * (length + n)
        mask[start:stop].view(n, length + n)[:, length:] = mask_nn
        start = stop
    return mask


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel group: this rank's number, how many there are, their two collectives a round, and those of
    the rare rounds in which something is switched, on the host."""

    rank: int
    size: int
    all_gather: Callable[[Tensor], Tensor]  # [...] -> [W, ...]
    all_reduce: Callable[[Tensor], None]  # sums in place
    from_first: Callable[[Any], Any] = lambda word: word  # what rank 0 says
    from_all: Callable[[Any], list[Any]] = lambda word: [word]


@dataclass(frozen=True)
class Shard:
    """A matrix over the target's vocabulary as a rank holds it: row i of weight_RD stands for token first + i.

    The ranks' shards hold every token once.
    """

    weight_RD: Tensor
    first: int


class EngineHeads:
    """The heads, with what they multiply and look up; every rank ends with the same drafts, in one collective a round.

    Heads that read the state alone draft all at once. Each rank multiplies a share of the rows of lm_head, and an
    all_gather puts the ranks' best tokens together. Shared without a draft vocabulary these are the target's own rows,
    not copied. A draft vocabulary's rows, and own lm_heads, are spread evenly: frequent tokens have low ids, so the
    target's own split would leave ranks idle.

    Heads that read tokens need the root's embedding before that, which one rank holds; those that read the path would
    need a collective at every depth. So every rank holds all rows of the draft vocabulary, of lm_head and, for the
    path, of the embeddings, and drafts alone; the one collective is the all_reduce that brings the root's embedding.
    A draft vocabulary of 32,768 tokens of Kimi-K2.5 takes 0.47 GB in bf16 for each of the two on every rank. One rank
    alone copies lm_head's rows of a draft vocabulary and nothing else.
    """

    def __init__(
        self,
        served: ServedHeads,
        tree: Tree,
        lm_head: Shard,
        embeddings: Shard | None,
        ranks: Ranks,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        """`embeddings`: None for heads that read the state alone."""
        self.ranks, self.dtype = ranks, dtype
        token_ids_M = served.vocabulary.token_ids_M
        M, W = len(token_ids_M), ranks.size
        self.heads = served.heads
        lm_heads, self.heads.lm_heads = self.heads.lm_heads, None
        self.heads = self.heads.to(device, dtype).requires_grad_(False)
        self.levels = [level.to(device) for level in tree.levels(by_path=self.heads.reads == "path")]
        self.width = tree.width
        # of every node but the root, for heads that draft at once: whose choice it is, and which
        self.head_n = torch.tensor([len(path) - 1 for path in tree.paths], dtype=torch.long, device=device)
        self.rank_n = torch.tensor([path[-1] for path in tree.paths], dtype=torch.long, device=device)

        self.spread = W > 1 and self.heads.reads == "state"
        own = slice(ranks.rank * M // W, (ranks.rank + 1) * M // W) if self.spread else slice(M)
        token_ids_R = token_ids_M[own]
        if lm_heads is not None:
            self.lm_head = lm_heads.weight.detach()[: tree.depth, own].to(device, dtype)  # [K, R, D]
        elif M < served.vocabulary.vocab_size or (W > 1 and not self.spread):
            rows_MD = self._rows(lm_head, token_ids_M)
            self.lm_head = rows_MD[own].clone() if self.spread else rows_MD
        else:
            self.lm_head = lm_head.weight_RD
            token_ids_R = lm_head.first + torch.arange(len(lm_head.weight_RD))
        self.token_ids_R = token_ids_R.to(device)

        self.embeddings = embeddings
        self.embeddings_MD: Tensor | None = None  # of the draft vocabulary, where the target's own are not all here
        if self.heads.reads == "path" and W > 1:
            assert embeddings is not None
            self.embeddings_MD = self._rows(embeddings, token_ids_M)

    def _rows(self, shard: Shard, token_ids_M: Tensor) -> Tensor:
        """The target's rows [M, D] of the draft vocabulary, put together from all ranks."""
        rows_M = token_ids_M.to(shard.weight_RD.device) - shard.first
        mine_M = (rows_M >= 0) & (rows_M < len(shard.weight_RD))
        weight_MD = shard.weight_RD.new_zeros(len(rows_M), shard.weight_RD.shape[1])
        weight_MD[mine_M] = shard.weight_RD[rows_M[mine_M]]
        if self.ranks.size > 1:
            self.ranks.all_reduce(weight_MD)  # all others hold zeros there, so the sum is exact
        return weight_MD

    @torch.no_grad()
    def draft(self, hidden_ND: Tensor, root_N: Tensor, with_log_p: bool = False) -> Drafts:
        """hidden_ND: the state at the last accepted token; root_N: the token that the target chose after it."""
        root_N, hidden_ND, root_ND = root_N.long(), hidden_ND.to(self.dtype), None
        tokens, log_p = [root_N[:, None]], [torch.zeros(len(root_N), 1, device=root_N.device)]
        if self.levels and self.heads.reads != "state":
            hidden_ND, root_ND = self._state_and_root(hidden_ND, root_N)
        if self.levels and self.heads.reads == "path":
            assert root_ND is not None
            drafted = self._down_the_tree(hidden_ND, root_ND, with_log_p)
        else:
            drafted = [self._at_once(hidden_ND, root_ND, with_log_p)] if self.levels else []
        for tokens_NC, log_p_NC in drafted:
            tokens.append(tokens_NC)
            log_p += [] if log_p_NC is None else [log_p_NC]
        return Drafts(torch.cat(tokens, dim=1), torch.cat(log_p, dim=1) if with_log_p else None)

    def _state_and_root(self, hidden_ND: Tensor, root_N: Tensor) -> tuple[Tensor, Tensor]:
        """The state and the root's embedding, [N, D] each: the same on all ranks, to the bit.

        The ranks' own states may differ in the last bits, as the sums of their all_reduce may: where they draft alone,
        a draft that is another on one rank would make it verify another tree. So all take rank 0's.
        """
        assert self.embeddings is not None
        weight_RD = self.embeddings.weight_RD
        row_N = root_N - self.embeddings.first
        if self.ranks.size == 1:
            return hidden_ND, self._embedded(weight_RD[row_N])
        both_ND = hidden_ND.new_zeros(len(hidden_ND), 2 * hidden_ND.shape[1])
        if self.ranks.rank == 0:
            both_ND[:, : hidden_ND.shape[1]] = hidden_ND
        if len(weight_RD):  # of a small vocabulary the last ranks hold nothing
            mine_N = (row_N >= 0) & (row_N < len(weight_RD))
            both_ND[:, hidden_ND.shape[1] :] = weight_RD[row_N.clamp(0, len(weight_RD) - 1)] * mine_N[:, None]
        self.ranks.all_reduce(both_ND)
        hidden_ND, root_ND = both_ND.chunk(2, dim=1)
        return hidden_ND, self._embedded(root_ND)

    def _embedded(self, rows: Tensor) -> Tensor:
        """As heads read them: see `heads.embeddings.Embeddings`."""
        return unit_rms(rows).to(self.dtype)

    def _at_once(self, hidden_ND: Tensor, root_ND: Tensor | None, with_log_p: bool) -> tuple[Tensor, Tensor | None]:
        """Tokens of all nodes but the root, [N, n - 1], and the logarithms of their probabilities: one product with
        lm_head for all heads that the tree needs."""
        state_NS, features = self.heads.start(hidden_ND), []
        for k in range(1, len(self.levels) + 1):
            feature_ND, state_NS = self.heads.step(k, state_NS, root_ND if self.heads.needs_token(k) else None)
            features.append(feature_ND)
        logits_NKR = (torch.stack(features) @ self.lm_head.mT).transpose(0, 1)
        values, rows = ordered_topk(logits_NKR, min(self.width, len(self.token_ids_R)))
        values, ids = values.float(), self.token_ids_R[rows]
        total_NK1 = logits_NKR.float().logsumexp(dim=-1, keepdim=True) if with_log_p else values[..., :0]
        if self.spread:
            values, ids, total_NK1 = self._from_all_ranks(values, ids, total_NK1)
            by_id = ids.argsort(dim=-1)  # the lower id first among equal logits, as on one rank
            values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
            best = values.sort(dim=-1, descending=True, stable=True).indices[..., : self.width]
            values, ids = values.gather(-1, best), ids.gather(-1, best)
        log_p_NKC = values - total_NK1 if with_log_p else None
        return tuple(each if each is None else each[:, self.head_n, self.rank_n] for each in (ids, log_p_NKC))  # type: ignore[return-value]

    def _from_all_ranks(self, values: Tensor, ids: Tensor, total_NK1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates [N, K, W * C] of all ranks, and the logsumexp over all ranks' tokens, in one collective."""
        missing = self.width - values.shape[-1]  # a rank with fewer rows than the tree is wide
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        values = torch.cat([values, total_NK1], dim=-1)
        ids = torch.nn.functional.pad(ids, (0, values.shape[-1] - ids.shape[-1]))
        packed = torch.stack([values.view(torch.int32), ids.int()])
        values_W, ids_W = self.ranks.all_gather(packed.contiguous()).unbind(dim=1)
        values_W = values_W.view(torch.float32)
        total_NK1 = values_W[..., self.width :].logsumexp(dim=0)
        values_W, ids_W = (each[..., : self.width].movedim(0, -2).flatten(-2) for each in (values_W, ids_W))
        return values_W, ids_W.long(), total_NK1

    def _down_the_tree(
        self, hidden_ND: Tensor, root_ND: Tensor, with_log_p: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """(tokens, logarithms of their probabilities) [N, C] of the nodes at every depth, each head once for all
        drafters of all requests."""
        N = len(hidden_ND)
        state_NPS, embedded_NCD = self.heads.start(hidden_ND)[:, None], root_ND[:, None]
        drafted: list[tuple[Tensor, Tensor | None]] = []
        for k, level in enumerate(self.levels, start=1):
            state_QS, token_QD = state_NPS[:, level.above_P].flatten(0, 1), embedded_NCD[:, level.nodes_P].flatten(0, 1)
            feature_QD, state_QS = self.heads.step(k, state_QS, token_QD)
            state_NPS = state_QS.unflatten(0, (N, -1))
            lm_head_MD = self.lm_head if self.lm_head.ndim == 2 else self.lm_head[k - 1]
            logits_QM = feature_QD @ lm_head_MD.T
            values_QR, rows_QR = ordered_topk(logits_QM, level.width)
            rows_NC = rows_QR.unflatten(0, (N, -1))[:, level.drafter_C, level.rank_C]
            tokens_NC, log_p_NC = self.token_ids_R[rows_NC], None
            if with_log_p:
                log_p_QR = values_QR.float() - logits_QM.float().logsumexp(dim=-1, keepdim=True)
                log_p_NC = log_p_QR.unflatten(0, (N, -1))[:, level.drafter_C, level.rank_C]
            drafted.append((tokens_NC, log_p_NC))
            if k < len(self.levels):
                embedded_NCD = self._embedded(self._embedding_rows(rows_NC, tokens_NC))
        return drafted

    def _embedding_rows(self, rows_NC: Tensor, tokens_NC: Tensor) -> Tensor:
        """[N, C, D] of drafts, given by their place in the draft vocabulary and by their token."""
        if self.embeddings_MD is not None:
            return self.embeddings_MD[rows_NC]
        assert self.embeddings is not None
        return self.embeddings.weight_RD[tokens_NC]
