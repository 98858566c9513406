"""What a rank drafts with: the tree as the engine's tensors, and the heads with this rank's share of lm_head.

Plain torch: the engine passes in its lm_head and its collectives.

Letters: N requests, n tree nodes, K heads, C choices of a head, D hidden, V vocabulary, M draft vocabulary, R rows of a
rank, W ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from medusa_k25.metrics import ordered_topk
from medusa_k25.serving.formats import ServedHeads
from medusa_k25.tree import Tree


class EngineTree:
    """A tree as verification takes it, for up to `max_requests` requests that all verify the same one.

    links: next_token_Nn is a node's first child, next_sibling_Nn the next child of its parent, -1 where there is none.
    """

    def __init__(self, tree: Tree, max_requests: int, device: torch.device | str):
        n = tree.num_nodes
        first_child_n = [children[0] if children else -1 for children in tree.children]
        sibling_n = [-1] * n
        for children in tree.children:
            for node, following in pairwise(children):
                sibling_n[node] = following
        self.num_nodes = n
        self.depths_n = tree.depths_n.to(device)
        self.mask_nn = tree.mask_nn.to(device)
        self.head_of_node = torch.tensor([len(path) - 1 for path in tree.paths], dtype=torch.long, device=device)
        self.choice_of_node = torch.tensor([path[-1] for path in tree.paths], dtype=torch.long, device=device)
        # the kernels want contiguous rows, one a request; slices of these cost no kernel a pass
        self.next_token_Nn = torch.tensor(first_child_n, device=device).repeat(max_requests, 1)
        self.next_sibling_Nn = torch.tensor(sibling_n, device=device).repeat(max_requests, 1)
        self.index_Nn = torch.arange(max_requests * n, device=device).view(max_requests, n)

    def fill(self, root_N: Tensor, choices_NKC: Tensor) -> Tensor:
        """Tokens of all nodes, int64 [N, n]: the root, then each node's choice of its head."""
        drafts = choices_NKC[:, self.head_of_node, self.choice_of_node]
        return torch.cat([root_N.long()[:, None], drafts], dim=1)

    def full_mask(self, lengths: list[int]) -> Tensor:
        """For requests of `lengths` tokens: rows over the past and the tree, request by request, bool, flat.

        Request i has n rows of lengths[i] + n: every node sees the past, its ancestors and itself.
        """
        n = self.num_nodes
        mask = torch.ones(sum(n * (length + n) for length in lengths), dtype=torch.bool, device=self.mask_nn.device)
        start = 0
        for length in lengths:
            stop = start + n * (length + n)
            mask[start:stop].view(n, length + n)[:, length:] = self.mask_nn
            start = stop
        return mask

    def tree_mask(self, num_requests: int) -> Tensor:
        """The tree's part alone, request by request, bool, flat."""
        return self.mask_nn.repeat(num_requests, 1, 1).flatten()


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel group: this rank's number, how many there are, and their two collectives."""

    rank: int
    size: int
    all_gather: Callable[[Tensor], Tensor]  # [...] -> [W, ...]
    all_reduce: Callable[[Tensor], None]  # sums in place


@dataclass(frozen=True)
class LmHeadShard:
    """The target's lm_head as a rank holds it: row i of weight_RD stands for token first + i."""

    weight_RD: Tensor
    first: int


class EngineHeads:
    """The heads, with the rows of their lm_head that this rank multiplies; every rank ends with the same drafts.

    Shared without a draft vocabulary these are the target's own rows, not copied. A draft vocabulary's rows, and own
    lm_heads, are spread evenly: frequent tokens have low ids, so the target's own split would leave ranks idle.
    """

    def __init__(
        self,
        served: ServedHeads,
        width: int,
        shard: LmHeadShard,
        ranks: Ranks,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        """`width`: choices that the tree takes of a head."""
        self.ranks, self.width = ranks, width
        token_ids_M = served.vocabulary.token_ids_M
        M, W = len(token_ids_M), ranks.size
        own = slice(ranks.rank * M // W, (ranks.rank + 1) * M // W)
        self.heads = served.heads
        lm_heads, self.heads.lm_heads = self.heads.lm_heads, None
        self.heads = self.heads.to(device, dtype).requires_grad_(False)
        if lm_heads is not None:
            self.lm_head = lm_heads.weight.detach()[:, own].to(device, dtype)  # [K, R, D]
            token_ids_R = token_ids_M[own]
        elif M == served.vocabulary.vocab_size:
            self.lm_head = shard.weight_RD
            token_ids_R = shard.first + torch.arange(len(shard.weight_RD))
        else:
            self.lm_head = self._rows(shard, token_ids_M)[own].clone()
            token_ids_R = token_ids_M[own]
        self.token_ids_R = token_ids_R.to(device)

    def _rows(self, shard: LmHeadShard, token_ids_M: Tensor) -> Tensor:
        """The target's rows [M, D] of the draft vocabulary, put together from all ranks."""
        rows_M = token_ids_M.to(shard.weight_RD.device) - shard.first
        mine_M = (rows_M >= 0) & (rows_M < len(shard.weight_RD))
        weight_MD = shard.weight_RD.new_zeros(len(rows_M), shard.weight_RD.shape[1])
        weight_MD[mine_M] = shard.weight_RD[rows_M[mine_M]]
        if self.ranks.size > 1:
            self.ranks.all_reduce(weight_MD)  # all others hold zeros there, so the sum is exact
        return weight_MD

    @torch.no_grad()
    def choices(self, hidden_ND: Tensor, root_N: Tensor) -> Tensor:
        """The C best tokens of every head, best first, int64 [N, K, C].

        hidden_ND: the state at the last accepted token; root_N: the token that the target chose after it.
        """
        K = self.heads.num_heads
        features_KND = self.heads(hidden_ND.to(self.lm_head.dtype), root_N.long()[:, None].expand(-1, K))
        logits_NKR = (features_KND @ self.lm_head.mT).transpose(0, 1)
        values, rows = ordered_topk(logits_NKR, min(self.width, len(self.token_ids_R)))
        ids = self.token_ids_R[rows]
        if self.ranks.size == 1:
            return ids
        values, ids = self._from_all_ranks(values.float(), ids)
        by_id = ids.argsort(dim=-1)  # the lower id first among equal logits, as on one rank
        values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
        best = values.sort(dim=-1, descending=True, stable=True).indices[..., : self.width]
        return ids.gather(-1, best)

    def _from_all_ranks(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates [N, K, W * C] of all ranks in one collective."""
        missing = self.width - values.shape[-1]  # a rank with fewer rows than the tree is wide
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        ids = torch.nn.functional.pad(ids, (0, missing))
        packed = torch.stack([values.view(torch.int32), ids.int()])
        values_W, ids_W = self.ranks.all_gather(packed.contiguous()).unbind(dim=1)
        return values_W.view(torch.float32).movedim(0, -2).flatten(-2), ids_W.movedim(0, -2).flatten(-2).long()
