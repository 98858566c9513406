"""Heads, and beside their tree what followed the last tokens before: one policy for replay, decoding and the engine.

A pass has n nodes, the root included. Where the last tokens stood before, in the own prompt and answer or in a table
of answers, it verifies the tree of n - c nodes and below it c nodes of what followed there; elsewhere the tree of n
nodes. What followed is walked down the smaller tree as long as a child carries the token: so nothing is there twice,
and the c nodes come below the node where that walk ends.

The own text is searched for its last 4 tokens, then 3, then 2, the latest place first. What followed there and
reaches the end of the text goes on periodically, as a loop does. The table wins where it knows more of the last tokens.

Of the text only what really follows matters: a pass of which the smaller tree accepts b drafts, and a tokens of the
continuation are right, accepts b + clamp(a - b, 0, c). For a < b the walk leaves the true path inside the tree; else it
goes b steps along it, and the c nodes go on from there.

Letters: N requests or positions, L tokens known of a request, T tokens, S states of an answer, K heads, n nodes,
W tokens of a continuation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medusa_k25.data.texts import Text
from medusa_k25.ngram.lookup import joined, ngram_matches, of_states
from medusa_k25.ngram.table import AnswersTable
from medusa_k25.tree import Topology, Tree

LONGEST, SHORTEST = 4, 2  # tokens that are looked up
MOST_CHAIN = 6  # nodes of a pass that a continuation may take from the heads' tree


@dataclass(frozen=True, eq=False)
class Beside:
    """The two trees, and where the continuation comes from.

    tree: T_n; smaller: T_(n - c), whose paths are all in it. shortest: tokens that must have matched for the smaller
    one to be verified, of `longest` that are looked up. table: None for the own text alone.
    """

    tree: Tree
    smaller: Tree
    shortest: int
    longest: int = LONGEST
    table: AnswersTable | None = None

    def __post_init__(self) -> None:
        if not {*self.smaller.paths} < {*self.tree.paths}:
            raise ValueError("the tree beside which a continuation is drafted must be a smaller part of the whole tree")
        if not SHORTEST <= self.shortest <= self.longest <= LONGEST:
            raise ValueError(
                f"matches of {self.shortest} to {self.longest} tokens, expected {SHORTEST} to {LONGEST} at most"
            )
        if self.table is not None and self.table.room < self.reach:
            raise ValueError(
                f"the table of answers ends {self.table.room} tokens behind a match, drafting takes {self.reach}"
            )

    @property
    def chain(self) -> int:
        """c: nodes that a continuation takes from the heads' tree."""
        return self.tree.num_nodes - self.smaller.num_nodes

    @property
    def reach(self) -> int:
        """Tokens of a continuation that are drafted at most: down the smaller tree, and on."""
        return self.smaller.depth + self.chain

    @property
    def depth(self) -> int:
        """Drafts on the longest path that a pass may verify."""
        return max(self.tree.depth, self.reach)

    def continuation(self, ids: Sequence[int]) -> list[int] | None:
        """The plain form of `continuations`: `reach` tokens for a text that ends with the root; None: no match."""
        T = len(ids)
        match, next = 0, 0
        for n in range(min(self.longest, T - 1), SHORTEST - 1, -1):
            ends = [stop for stop in range(n, T) if list(ids[stop - n : stop]) == list(ids[T - n :])]
            if ends:
                match, next = n, ends[-1]
                break
        if self.table is not None:
            backwards = [ids[T - i] if i <= T else -1 for i in range(1, self.longest + 1)]
            in_table, at = (int(value) for value in self.table.lookup(torch.tensor([backwards])))
            if in_table > match and in_table >= self.shortest:
                return self.table.tokens_T[at : at + self.reach].tolist()
        return [ids[next + i % (T - next)] for i in range(self.reach)] if match >= self.shortest else None

    def merged(self, tokens: Sequence[int], ids: Sequence[int]) -> tuple[Topology, list[int]]:
        """What a pass verifies: the nodes, and the token of each. tokens: of the whole tree; ids: of the text so far,
        the root last."""
        continuation = self.continuation(ids)
        if continuation is None:
            return self.tree, list(tokens)
        kept = [tokens[node] for node in part_of(self.tree, self.smaller)]
        node, walked = 0, 0
        while child := next((each for each in self.smaller.children[node] if kept[each] == continuation[walked]), None):
            node, walked = child, walked + 1
        n = self.smaller.num_nodes
        parents = [*self.smaller.parents, node, *range(n, n + self.chain - 1)]
        return Topology(parents), kept + continuation[walked : walked + self.chain]

    def accepted(self, texts: Sequence[Text], ranks: Sequence[Tensor]) -> list[Tensor]:
        """For every text the drafts that a pass accepts at each state, int64 [S]; ranks: of its labels, [S, K]."""
        found = looked_up(texts, self.table, self.reach, self.longest)
        return [
            accepted_beside(
                self.tree.accepted(ranks_SK), self.smaller.accepted(ranks_SK), *each, self.chain, self.shortest
            )
            for ranks_SK, each in zip(ranks, found, strict=True)
        ]


def part_of(tree: Tree, smaller: Tree) -> list[int]:
    """The numbers that the smaller tree's nodes have in the whole one, in their order."""
    number = {path: node for node, path in enumerate(tree.paths, start=1)}
    return [0, *(number[path] for path in smaller.paths)]


def accepted_beside(
    whole_N: Tensor, smaller_N: Tensor, right_N: Tensor, match_N: Tensor, chain: int, shortest: int
) -> Tensor:
    """Drafts that passes accept, int64 [N]: `whole_N` and `smaller_N` by the trees; see `looked_up` for the others."""
    beside_N = smaller_N + (right_N - smaller_N).clamp(0, chain)
    return torch.where(match_N >= shortest, beside_N, whole_N)


def looked_up(
    texts: Sequence[Text], table: AnswersTable | None, reach: int, longest: int = LONGEST
) -> list[tuple[Tensor, Tensor]]:
    """For every text at each state how many of `reach` tokens of the continuation are right, and how many tokens have
    matched (fewer than SHORTEST: there is none), int64 [S] each."""
    if not texts:
        return []
    ids_N, begin_N, end_N = joined(texts)
    next_N, match_N = ngram_matches(ids_N, end_N, longest)
    root_N = np.arange(len(ids_N))
    matches = match_N >= SHORTEST
    right_N = right_from(ids_N, end_N, np.flatnonzero(matches), reach, ids_N, next_N, root_N + 1 - next_N)
    match_N = np.where(matches, match_N, 0)
    if table is not None:
        place_Nn = root_N[:, None] - np.arange(longest)
        backwards_Nn = np.where(place_Nn >= begin_N[:, None], ids_N[place_Nn.clip(min=0)], -1)
        in_table_N, at_N = (found.numpy() for found in table.lookup(torch.from_numpy(backwards_Nn)))
        wins_N = in_table_N > match_N
        tokens_T, never = table.tokens_T.numpy(), np.full(len(ids_N), reach)
        known_N = right_from(ids_N, end_N, np.flatnonzero(wins_N), reach, tokens_T, at_N, never)
        right_N, match_N = np.where(wins_N, known_N, right_N), np.where(wins_N, in_table_N, match_N)
    return list(zip(of_states(texts, right_N), of_states(texts, match_N), strict=True))


def right_from(
    ids_N: np.ndarray,
    end_N: np.ndarray,
    roots: np.ndarray,
    reach: int,
    source_T: np.ndarray,
    next_N: np.ndarray,
    period_N: np.ndarray,
) -> np.ndarray:
    """How many tokens of source_T from next_N on, in periods, equal those behind the root, int64 [N]; 0 elsewhere."""
    right_N = np.zeros(len(ids_N), dtype=np.int64)
    for i in range(reach):
        roots = roots[roots + 1 + i < end_N[roots]]
        roots = roots[source_T[next_N[roots] + i % period_N[roots]] == ids_N[roots + 1 + i]]
        right_N[roots] = i + 1
    return right_N


def own_matches(history_NL: Tensor, lengths_N: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Where each request's last tokens stood before: (how many of them, the position behind), int64 [N] each.

    history_NL: ids, of which request i's first lengths_N[i] are known; the last one of them is the root. The longest
    match counts, of at most `longest` tokens, and of equally long ones the latest. Nothing waits for the device.
    """
    N, L = history_NL.shape
    place_L = torch.arange(L, device=history_NL.device)
    run_NL = (place_L < lengths_N[:, None] - 1).expand(N, L).contiguous()
    match_NL = torch.zeros_like(history_NL)
    for i in range(longest):
        at_N = lengths_N[:, None] - 1 - i
        last_N1 = history_NL.gather(1, at_N.clamp(min=0).long())
        same_NL = (history_NL[:, : L - i] == last_N1) & (at_N >= 0)
        run_NL[:, i:] &= same_NL
        run_NL[:, :i] = False
        match_NL += run_NL
    best_N = (match_NL * L + place_L).amax(dim=1).long()
    return best_N // L, best_N % L + 1


def continuations(
    history_NL: Tensor, lengths_N: Tensor, table: AnswersTable | None, shortest: int, longest: int, reach: int
) -> tuple[Tensor, Tensor]:
    """(whether there is a match of `shortest` tokens or more, bool [N]; the `reach` tokens that followed there, int64
    [N, W], anything where there is none). history_NL, lengths_N: see `own_matches`."""
    match_N, next_N = own_matches(history_NL, lengths_N, longest)
    ahead_W = torch.arange(reach, device=history_NL.device)
    next_N = next_N.minimum(lengths_N - 1)  # where nothing matches, too, it lies inside
    source_NW = next_N[:, None] + ahead_W % (lengths_N - next_N)[:, None]
    tokens_NW = history_NL.gather(1, source_NW).long()
    if table is not None:
        match_N = torch.where(match_N >= SHORTEST, match_N, 0)
        at_Nn = lengths_N[:, None] - 1 - torch.arange(longest, device=history_NL.device)
        backwards_Nn = history_NL.gather(1, at_Nn.clamp(min=0)).masked_fill(at_Nn < 0, -1)
        in_table_N, at_N = table.lookup(backwards_Nn)
        known_NW = table.tokens_T[at_N[:, None] + ahead_W].long()
        tokens_NW = torch.where((in_table_N > match_N)[:, None], known_NW, tokens_NW)
        match_N = match_N.maximum(in_table_N)
    return match_N >= shortest, tokens_NW
