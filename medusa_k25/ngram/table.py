"""What followed the last tokens in answers that stand ready: one continuation for every 2, 3 and 4 tokens in a row.

The answers lie in one array of tokens. For every n-gram that enough tokens follow in its answer, the table knows one
position behind it: of all its occurrences the one whose continuation is the most frequent, token after token. A lookup
is a binary search by hash and a comparison with the tokens themselves, so it never finds what is not there; it runs
on any device and never waits for it.

Letters: T tokens of all answers, N lookups, P positions of one length of n-gram.
"""

from collections.abc import Sequence
from copy import copy
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTHS = (2, 3, 4)  # of n-grams
FACTOR = -7046029254386353131  # odd, 64 bits: 2**64 over the golden ratio. Products wrap
MAX_TOKENS = 2**31 - 1  # positions are int32


class AnswersTable:
    """tokens_T: int32. positions: by the length of the n-gram int32 [P], where the token behind each stands.

    Each position must have its n tokens before it; no n-gram has two. They are kept in the order of their `hashes`,
    int64 [P].
    """

    def __init__(self, tokens_T: Tensor, positions: dict[int, Tensor]):
        self.tokens_T = tokens_T
        self.positions, self.hashes = dict[int, Tensor](), dict[int, Tensor]()
        for n, positions_P in positions.items():
            at_P = positions_P.long()
            # the last token first, as `lookup` gets them
            hash_P = reduce(mixed, (tokens_T[at_P - i] for i in range(1, n + 1)), torch.zeros_like(at_P))
            # of two n-grams with one hash the search finds the first only
            self.hashes[n], order_P = hash_P.sort(stable=True)
            self.positions[n] = positions_P[order_P]

    @property
    def num_entries(self) -> int:
        return sum(len(positions_P) for positions_P in self.positions.values())

    @property
    def nbytes(self) -> int:
        """In memory: 12 bytes an n-gram, 4 a token."""
        return sum(each.nbytes for each in (self.tokens_T, *self.hashes.values(), *self.positions.values()))

    @property
    def room(self) -> int:
        """How many tokens there are from every position on, at least."""
        return len(self.tokens_T) - max(int(each_P.max()) for each_P in self.positions.values() if len(each_P))

    def to(self, device: torch.device | str) -> "AnswersTable":
        """The same table there. Moved, not built again: that would take several times its memory for a while."""
        moved = copy(self)
        moved.tokens_T = self.tokens_T.to(device)
        moved.positions = {n: positions_P.to(device) for n, positions_P in self.positions.items()}
        moved.hashes = {n: hash_P.to(device) for n, hash_P in self.hashes.items()}
        return moved

    def lookup(self, backwards_Nn: Tensor) -> tuple[Tensor, Tensor]:
        """(length of the longest n-gram that is there, position behind it), int64 [N] each; length 0: none.

        backwards_Nn: the last tokens of a text, the last one first, as many as the longest n-gram to look up;
        negative where the text has no more.
        """
        longest = backwards_Nn.shape[1]
        match_N = torch.zeros_like(backwards_Nn[:, 0], dtype=torch.int64)
        next_N = torch.zeros_like(match_N)
        hashes = list(accumulate(backwards_Nn.unbind(dim=1), mixed, initial=match_N))
        for n, positions_P in self.positions.items():
            if n > longest or not len(positions_P):
                continue
            entry_N = torch.searchsorted(self.hashes[n], hashes[n]).clamp(max=len(positions_P) - 1)
            at_N = positions_P[entry_N].long()
            before_Nn = self.tokens_T[at_N[:, None] - torch.arange(1, n + 1, device=at_N.device)]
            same_N = (before_Nn == backwards_Nn[:, :n]).all(dim=1)
            match_N = torch.where(same_N, n, match_N)
            next_N = torch.where(same_N, at_N, next_N)
        return match_N, next_N

    @classmethod
    def build(cls, answers: Sequence[Tensor], ahead: int) -> "AnswersTable":
        """answers: ids, int32 [A] each. Only n-grams that `ahead` tokens or more follow in their answer are known.

        Of an n-gram's occurrences those are kept that go on with the token that most of them go on with (of equally
        many the one that stands last), and so on up to `ahead` tokens; of those that are left the last.
        ValueError where no answer is long enough.
        """
        lengths = [len(answer_A) for answer_A in answers]
        shortest = min(LENGTHS)
        if not any(length >= shortest + ahead for length in lengths):
            raise ValueError(
                f"no answer has the {shortest + ahead} tokens that a table of answers needs: {shortest} to look up and "
                f"{ahead} to draft; give more answers, or longer ones"
            )
        if sum(lengths) > MAX_TOKENS:
            raise ValueError(f"{sum(lengths):,} tokens of answers, a table holds {MAX_TOKENS:,}; lower corpus_tokens")
        tokens_T = np.concatenate([answer_A.numpy() for answer_A in answers]).astype(np.int32)
        stop_T = np.repeat(np.cumsum(lengths), lengths)
        start_T = np.repeat(np.cumsum(lengths) - lengths, lengths)
        position_T = np.arange(len(tokens_T))
        positions = {}
        for n in LENGTHS:
            position_P = position_T[(position_T >= start_T + n) & (position_T + ahead <= stop_T)]
            grams = (tokens_T[position_P - i] for i in range(1, n + 1))
            hash_P = reduce(mixed, grams, np.zeros(len(position_P), dtype=np.int64))
            chosen = most_frequent(tokens_T, position_P, hash_P, ahead)
            positions[n] = torch.from_numpy(chosen.astype(np.int32))
        return cls(torch.from_numpy(tokens_T), positions)


def mixed(hash_N: Any, token_N: Any) -> Any:
    """The hash, int64 [N], of an n-gram and the token before it, from the n-gram's: 0 of none. Of torch or NumPy."""
    return hash_N * FACTOR + token_N + 1


def most_frequent(tokens_T: np.ndarray, position_P: np.ndarray, gram_P: np.ndarray, ahead: int) -> np.ndarray:
    """One position for each distinct gram, as `AnswersTable.build` chooses it, in ascending order."""
    order_P = np.lexsort((position_P, gram_P))
    position_P, gram_P = position_P[order_P], gram_P[order_P]
    done = []
    for step in range(ahead):
        alone_P = starts_run(gram_P) & ends_run(gram_P)
        done.append(position_P[alone_P])
        position_P, gram_P = position_P[~alone_P], gram_P[~alone_P]
        token_P = tokens_T[position_P + step]
        order_P = np.lexsort((position_P, token_P, gram_P))
        position_P, gram_P, token_P = position_P[order_P], gram_P[order_P], token_P[order_P]
        starts_P = starts_run(gram_P, token_P)
        first, last = np.flatnonzero(starts_P), np.flatnonzero(ends_run(gram_P, token_P))
        # the last of each gram's runs, by length and then by its last position, is kept
        order = np.lexsort((position_P[last], last - first, gram_P[first]))
        kept = order[ends_run(gram_P[first][order])]
        keeps_P = np.isin(np.cumsum(starts_P) - 1, kept)
        position_P, gram_P = position_P[keeps_P], gram_P[keeps_P]
    return np.sort(np.concatenate([*done, position_P[ends_run(gram_P)]]))


def starts_run(*columns_P: np.ndarray) -> np.ndarray:
    """bool [P]: where a column differs from the place before; at the first."""
    starts_P = np.ones(len(columns_P[0]), dtype=bool)
    starts_P[1:] = np.any([column_P[1:] != column_P[:-1] for column_P in columns_P], axis=0)
    return starts_P


def ends_run(*columns_P: np.ndarray) -> np.ndarray:
    """bool [P]: where a column differs from the place behind; at the last."""
    return starts_run(*(column_P[::-1] for column_P in columns_P))[::-1]
