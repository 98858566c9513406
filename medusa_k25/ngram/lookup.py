"""Prompt lookup: what followed the last tokens when they stood earlier in the own prompt and answer is drafted again.

No training, no second text: the predictor that heads have to beat. The drafts are a chain.

Letters: T tokens of one text, N of all texts one after the other, S states of one answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medusa_k25.data.texts import Text


@dataclass(frozen=True)
class Lookup:
    """Drafts what followed the latest earlier occurrence of the longest suffix that occurred earlier.

    A suffix ends with the root. longest: its greatest length (n-gram lookup); None: any (suffix lookup).
    """

    name: str
    longest: int | None

    def __post_init__(self) -> None:
        if self.longest is not None and self.longest < 1:
            raise ValueError(f"{self.name}: expected to look up at least 1 token, got longest={self.longest}")

    def accepted(self, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        """For every text the drafts accepted at each of its states, int64 [S], with `num_nodes` - 1 drafts a pass."""
        return [accepted_S for accepted_S, _ in self.accepted_and_matches(texts, num_nodes)]

    def accepted_and_matches(self, texts: Sequence[Text], num_nodes: int) -> list[tuple[Tensor, Tensor]]:
        """For every text the accepted drafts and the length of the suffix that was found (0: no draft), int64 [S]."""
        if not texts:
            return []
        ids_N, begin_N, end_N = joined(texts)
        if self.longest is None:
            begins = np.unique(begin_N)
            found = [suffix_matches(text.ids_T.tolist()) for text in texts]
            next_N = np.concatenate([next_T + begin for (next_T, _), begin in zip(found, begins, strict=True)])
            match_N = np.concatenate([match_T for _, match_T in found])
        else:
            next_N, match_N = ngram_matches(ids_N, end_N, self.longest)
        accepted_N = drafts_accepted(ids_N, end_N, next_N, match_N, num_nodes - 1)
        return list(zip(of_states(texts, accepted_N), of_states(texts, match_N), strict=True))


def joined(texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, where the text of each position begins, where it ends), [N] each: of all texts, one after the other."""
    lengths = [len(text.ids_T) for text in texts]
    stops = np.cumsum(lengths)
    ids_N = np.concatenate([text.ids_T.numpy() for text in texts])
    return ids_N, np.repeat(stops - lengths, lengths), np.repeat(stops, lengths)


def of_states(texts: Sequence[Text], values_N: np.ndarray) -> list[Tensor]:
    """Of values at every position as the root those of each text's states, [S] each."""
    values, stop = [], 0
    for text in texts:
        first, stop = stop + text.start, stop + len(text.ids_T)
        values.append(torch.from_numpy(values_N[first : stop - 1]))
    return values


def ngram_matches(ids_N: np.ndarray, end_N: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """(position after the match, its length) at every position as the root, int64 [N] each; length 0: no match.

    end_N: where the text of each position ends; a match lies in the same text.
    """
    N = len(ids_N)
    next_N, match_N = np.zeros(N, dtype=np.int64), np.zeros(N, dtype=np.int64)
    # the number of the n-gram that ends at a position: the same number, the same n tokens of the same text
    _, token_N = np.unique(ids_N, return_inverse=True)
    _, token_N = np.unique(end_N * (int(token_N.max()) + 1) + token_N, return_inverse=True)
    gram_N = token_N
    for n in range(1, longest + 1):
        order_N = np.argsort(gram_N, kind="stable")
        again = np.flatnonzero(np.diff(gram_N[order_N]) == 0)
        next_N[order_N[again + 1]] = order_N[again] + 1
        match_N[order_N[again + 1]] = n
        # one that reaches into the text before has tokens of both: it occurs once, and is no match
        _, gram_N = np.unique(np.append(-1, gram_N[:-1]) * N + token_N, return_inverse=True)
    return next_N, match_N


def suffix_matches(ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(position after the match, its length) at every position of one text as the root, int64 [T] each."""
    T = len(ids)
    next_T, match_T = np.zeros(T, dtype=np.int64), np.zeros(T, dtype=np.int64)
    latest: dict[int, int] = {}
    pairs: dict[tuple[int, int], list[int]] = {}  # where both tokens have stood before, by their last
    after, match = 0, 0
    for root, token in enumerate(ids):
        if match and ids[after] == token:
            # No match is longer than the last one and this token; a later one of that length would have been the last.
            after, match = after + 1, match + 1
        else:
            pair = (ids[root - 1] if root else -1, token)
            if candidates := pairs.get(pair):
                match = 2
                while longer := [j for j in candidates if j >= match and ids[j - match] == ids[root - match]]:
                    candidates, match = longer, match + 1
                after = candidates[-1] + 1
            else:
                after, match = (latest[token] + 1, 1) if token in latest else (0, 0)
        next_T[root], match_T[root] = after, match
        latest[token] = root
        if root:
            pairs.setdefault((ids[root - 1], token), []).append(root)
    return next_T, match_T


def drafts_accepted(
    ids_N: np.ndarray, end_N: np.ndarray, next_N: np.ndarray, match_N: np.ndarray, num_drafts: int
) -> np.ndarray:
    """How many tokens from next_N on equal those after the root, int64 [N]: at most `num_drafts`, all known by then."""
    accepted_N = np.zeros_like(next_N)
    roots = np.flatnonzero(match_N)
    for draft in range(num_drafts):
        drafted, true = next_N[roots] + draft, roots + 1 + draft
        known = (drafted <= roots) & (true < end_N[roots])  # what comes after the root is not known yet
        roots = roots[known][ids_N[drafted[known]] == ids_N[true[known]]]
        accepted_N[roots] = draft + 1
    return accepted_N
