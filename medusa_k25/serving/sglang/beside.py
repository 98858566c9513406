"""What a pass verifies of each request where a continuation is drafted beside the heads' tree; see `ngram.beside`.

Plain torch of fixed shapes, which waits for no device. The tokens known of every request lie in a buffer of the device,
a row for each place of the server's request pool: written when a prompt was read, and after every pass.

Letters: N requests, n nodes of a pass, m of the smaller tree, c of the chain, P places of the pool, L tokens of a row,
W tokens of a continuation or accepted at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_k25.ngram.beside import Beside, continuations, part_of
from medusa_k25.serving.sglang.drafting import EngineTree


@dataclass(frozen=True)
class Verified:
    """One tree a request: tokens, depths and links int64 [N, n], as `EngineTree` has them for all; mask bool."""

    tokens_Nn: Tensor
    depths_Nn: Tensor
    mask_Nnn: Tensor
    next_token_Nn: Tensor
    next_sibling_Nn: Tensor


class EngineBeside:
    def __init__(self, beside: Beside, num_places: int, row: int, vocab_size: int, device: torch.device | str):
        """row: tokens that a request may have, with those that a pass adds."""
        self.beside, self.vocab_size, self.device = beside, vocab_size, device
        self.table = None if beside.table is None else beside.table.to(device)
        self.history_PL = torch.zeros(num_places, row, dtype=torch.int32, device=device)
        self.whole, self.smaller = EngineTree(beside.tree, 1, device), EngineTree(beside.smaller, 1, device)
        self.part_m = torch.tensor(part_of(beside.tree, beside.smaller), device=device)
        c = beside.chain
        self.ahead_c = torch.arange(c, device=device)
        self.below_cc = torch.ones(c, c, dtype=torch.bool, device=device).tril()

    @property
    def nbytes(self) -> int:
        return self.history_PL.nbytes + (0 if self.table is None else self.table.nbytes)

    def begin(self, place_N: Tensor, row: int, ids: Sequence[int]) -> None:
        """A request's whole ids, when its prompt was read. row: its number in place_N.

        What stands for an image may be no token: it is taken for the last one, for it must not be drafted as it is.
        """
        ids_T = torch.tensor(ids).clamp(max=self.vocab_size - 1).int()
        if torch.device(self.device).type != "cpu":  # a copy from pageable memory would wait for the pass to end
            ids_T = ids_T.pin_memory()
        ids_T = ids_T.to(self.device, non_blocking=True)
        self.history_PL[:, : len(ids_T)].index_copy_(0, place_N[row : row + 1].long(), ids_T[None])

    def extend(self, place_N: Tensor, known_N: Tensor, tokens_NW: Tensor) -> None:
        """Write tokens behind the known_N of each request; what lies beyond its length is not read."""
        at_NW = known_N.long()[:, None] + torch.arange(tokens_NW.shape[1], device=tokens_NW.device)
        self.history_PL[place_N.long()[:, None], at_NW] = tokens_NW.int()

    def verified(self, tokens_Nn: Tensor, place_N: Tensor, lengths_N: Tensor, longest: int) -> Verified:
        """tokens_Nn: of the whole tree; lengths_N: tokens known of each request, the root included; longest: of these,
        for the host to know how much of the rows is to be searched."""
        beside, whole, smaller = self.beside, self.whole, self.smaller
        N, n, m = len(tokens_Nn), whole.num_nodes, smaller.num_nodes
        tokens_Nn = tokens_Nn.long()
        history_NL = self.history_PL[:, :longest][place_N.long()]
        found_N, ahead_NW = continuations(
            history_NL, lengths_N.long(), self.table, beside.shortest, beside.longest, beside.reach
        )
        kept_Nm = tokens_Nn[:, self.part_m]
        # a node is on the continuation's way where its token and those of all above it, below the root, are
        wrong_Nm = (kept_Nm != ahead_NW[:, (smaller.depths_n - 1).clamp(min=0)]) & (smaller.depths_n > 0)
        walked_Nm = ~(wrong_Nm[:, None] & smaller.mask_nn).any(dim=2)
        nodes_m = torch.arange(m, device=tokens_Nn.device)
        deepest_N = torch.where(walked_Nm, smaller.depths_n * m + nodes_m, -1).amax(dim=1)
        end_N1, depth_N1 = (deepest_N % m)[:, None], (deepest_N // m)[:, None]

        links_Nc = (m + 1 + self.ahead_c).expand(N, -1)
        first_Nm = smaller.next_token_Nn.expand(N, -1)
        next_token_Nn = torch.cat([first_Nm.scatter(1, end_N1, m), links_Nc], dim=1)
        next_token_Nn[:, -1] = -1
        # the first node of the chain is the first child of where the walk ended
        siblings_Nc = torch.full_like(links_Nc, -1).contiguous()
        siblings_Nc[:, :1] = first_Nm.gather(1, end_N1)
        mask_Nnn = torch.zeros(N, n, n, dtype=torch.bool, device=tokens_Nn.device)
        mask_Nnn[:, :m, :m] = smaller.mask_nn
        mask_Nnn[:, m:, :m] = smaller.mask_nn[end_N1]
        mask_Nnn[:, m:, m:] = self.below_cc
        found_N1 = found_N[:, None]
        tokens_both = torch.cat([kept_Nm, ahead_NW.gather(1, depth_N1 + self.ahead_c)], dim=1)
        depths_both = torch.cat([smaller.depths_n.expand(N, -1), depth_N1 + 1 + self.ahead_c], dim=1)
        siblings_both = torch.cat([smaller.next_sibling_Nn.expand(N, -1), siblings_Nc], dim=1)
        return Verified(
            torch.where(found_N1, tokens_both, tokens_Nn),
            torch.where(found_N1, depths_both, whole.depths_n),
            torch.where(found_N1[:, :, None], mask_Nnn, whole.mask_nn),
            torch.where(found_N1, next_token_Nn, whole.next_token_Nn),
            torch.where(found_N1, siblings_both, whole.next_sibling_Nn),
        )
