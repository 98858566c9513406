"""SGLang's NGRAM algorithm, as far as it decides what is drafted: answers that stand ready, and the own answer.

A server looks the last tokens up in two places and drafts a tree from each; a pass verifies both in one tree.
- The external corpus: answers that it has read at its start. Its suffixes are found in a suffix automaton there, in a
  suffix array here.
- What it has generated since: a trie of the last TRIE_DEPTH tokens before every pass. Of a prompt it holds no more than
  the tokens just before the answer.

In both, every suffix of the context that is found is an anchor, the longest first. From each the tree grows breadth
first along what followed there, what followed most lately first, until its budget of nodes is used up; a long match
grows narrow, a short one wide. This is `--speculative-ngram-match-type BFS`, the default, with the default breadths and
depth (0.5.23). Two things are left out: the trie forgets nothing (SGLang's takes 10 M nodes, some 550K tokens), and
nodes that are unused only because corpus and own text draft the same do not count as drafts of the padding token.

Letters: T tokens, N tokens of the corpus with their separators, S states of one answer.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from medusa_k25.data.texts import Text

TRIE_DEPTH = 18  # --speculative-ngram-max-trie-depth: tokens that are looked up
MIN_BREADTH, MAX_BREADTH = 1, 10  # --speculative-ngram-min-bfs-breadth, -max-bfs-breadth
BREADTH_STEP = (MAX_BREADTH - MIN_BREADTH) / (TRIE_DEPTH - 1)  # a token of the match, or of the draft, narrows by it
PADDING = 0  # the token of the nodes that a tree leaves unused: below the root, and accepted like any other
SEPARATOR = -1
MAX_DRAFTS = 63  # 64 nodes
NOWHERE = 255  # the place of a token that is not drafted

Suffixes = tuple[int, int, int]  # (start, stop, depth): a range of sorted suffixes whose first `depth` tokens are one
Children = Callable[[Any], Iterable[tuple[int, Any]]]  # node -> (token, child), the latest first
DraftTree = list[dict[int, int]]  # of each node the place of its children by token; the root's place is 0


def draft_tree(anchors: Iterable[tuple[Any, int]], children_of: Children, budget: int) -> DraftTree:
    """The tree of at most `budget` drafts that grows from `anchors`, (node, length of the match) each.

    A place is also a rank: the first b drafts are the tree that a budget of b would have grown.
    """
    tree: DraftTree = [{}]
    for anchor, matched in anchors:
        queue = deque([(0, (TRIE_DEPTH - 1 - matched) * BREADTH_STEP + MIN_BREADTH, anchor)])
        while queue and len(tree) <= budget:
            parent, breadth, node = queue.popleft()
            for token, child in islice(children_of(node), max(1, int(breadth))):
                if len(tree) > budget:
                    break
                place = tree[parent].get(token)
                if place is None:
                    place = tree[parent][token] = len(tree)
                    tree.append({})
                queue.append((place, breadth - BREADTH_STEP, child))
    return tree


def places_of(tree: DraftTree, tokens: Iterable[int]) -> list[int]:
    """The places of the drafts that equal `tokens`, from the root down to the last that does."""
    places, node = [], 0
    for token in tokens:
        child = tree[node].get(token)
        if child is None:
            break
        node = child
        places.append(node)
    return places


class Corpus:
    """The answers that a server reads at its start, one after the other: the later one counts as the more recent.

    Raises ValueError when there is none.
    """

    def __init__(self, answers: Sequence[Tensor]):
        """answers: token ids, int [T] each."""
        if not answers:
            raise ValueError("a corpus needs answers, got none; capture or generate more conversations")
        self.num_tokens = sum(map(len, answers)) + len(answers) - 1  # as SGLang counts them, separators included
        # the end is padded, so that every token of the corpus can be asked for what follows it
        ids_N = np.full(self.num_tokens + TRIE_DEPTH + MAX_DRAFTS + 1, SEPARATOR, dtype=np.int32)
        stop = 0
        for answer_T in answers:
            ids_N[stop : stop + len(answer_T)] = answer_T.numpy()
            stop += len(answer_T) + 1
        order_N = suffix_order(ids_N, TRIE_DEPTH + MAX_DRAFTS + 1)
        first_N = ids_N[order_N]
        self._starts = np.searchsorted(first_N, np.arange(first_N[-1] + 2)).tolist()  # where each token's begin
        self._ids_N, self._order_N = ids_N, order_N
        self._id, self._suffix = ids_N.data, order_N.data  # memoryviews: faster for one number at a time
        self._children_of_many: dict[Suffixes, list[tuple[int, Suffixes]]] = {}
        self._places: WeakKeyDictionary[Text, np.ndarray] = WeakKeyDictionary()

    def _child(self, node: Suffixes, token: int) -> Suffixes | None:
        start, stop, depth = node
        ids, suffix = self._id, self._suffix
        places = range(start, stop)
        left = start + bisect_left(places, token, key=lambda place: ids[suffix[place] + depth])
        if left == stop or ids[suffix[left] + depth] != token:
            return None
        right = start + bisect_right(places, token, lo=left - start, key=lambda place: ids[suffix[place] + depth])
        return left, right, depth + 1

    def children(self, node: Suffixes) -> Sequence[tuple[int, Suffixes]]:
        """(token, node) of what followed, that of the latest occurrence first: at most MAX_BREADTH."""
        start, stop, depth = node
        if stop - start == 1:
            token = self._id[self._suffix[start] + depth]
            return () if token == SEPARATOR else ((token, (start, stop, depth + 1)),)
        found = self._children_of_many.get(node)
        if found is None:
            positions = self._order_N[start:stop]
            following = self._ids_N[positions + depth]
            starts = np.flatnonzero(np.diff(following, prepend=SEPARATOR - 1))
            stops = np.append(starts[1:], stop - start)
            latest = np.argsort(-np.maximum.reduceat(positions, starts))[: MAX_BREADTH + 1]
            tokens, starts, stops = following[starts[latest]], starts[latest] + start, stops[latest] + start
            found = [
                (token, (first, last, depth + 1))
                for token, first, last in zip(tokens.tolist(), starts.tolist(), stops.tolist(), strict=True)
                if token != SEPARATOR
            ][:MAX_BREADTH]
            if stop - start > 8:  # few others are ever asked for twice
                self._children_of_many[node] = found
        return found

    def places(self, text: Text, budget: int) -> np.ndarray:
        """uint8 [S, at least budget]: the place of the text's d-th next token in the tree that state s drafts.

        A state drafts the tokens whose places are not beyond its budget. Kept for as long as the text is.
        """
        places_SB = self._places.get(text)
        if places_SB is None or places_SB.shape[1] < budget:
            self._places[text] = places_SB = self._find_places(text, budget)
        return places_SB

    def _find_places(self, text: Text, budget: int) -> np.ndarray:
        ids, begin = text.ids_T.tolist(), text.start
        places_SB = np.full((text.num_states, budget), NOWHERE, dtype=np.uint8)
        matches: list[Suffixes] = []  # the suffix of 1, 2, .. tokens, as far as they are found
        for position in range(max(0, begin + 1 - TRIE_DEPTH), len(ids) - 1):
            matches = self._advanced(matches, ids[position])
            if position >= begin:
                tree = draft_tree(self._anchors(matches), self.children, budget)
                found = places_of(tree, islice(ids, position + 1, position + 1 + budget))
                if not found and ids[position + 1] == PADDING and len(tree) <= budget:
                    found = [len(tree)]
                places_SB[position - begin, : len(found)] = found
        return places_SB

    def _advanced(self, matches: Sequence[Suffixes], token: int) -> list[Suffixes]:
        """The suffixes after one more token."""
        if token + 1 >= len(self._starts) or self._starts[token] == self._starts[token + 1]:
            return []
        longer = [(self._starts[token], self._starts[token + 1], 1)]
        for match in matches[: TRIE_DEPTH - 1]:
            child = self._child(match, token)
            if child is None:
                break
            longer.append(child)
        return longer

    def _anchors(self, matches: Sequence[Suffixes]) -> Iterable[tuple[Suffixes, int]]:
        """The longest first. Suffixes that occur equally often occur in the same places: one state of the automaton."""
        count = 0
        for match in reversed(matches):
            start, stop, depth = match
            if stop - start != count:
                count = stop - start
                yield match, depth


def suffix_order(ids_N: np.ndarray, depth: int) -> np.ndarray:
    """int32 [N]: the positions in the order of the first `depth` tokens from there, by prefix doubling."""
    N = len(ids_N)
    order_N = np.argsort(ids_N, kind="stable")
    key_N, sorted_to = ids_N.astype(np.int64), 1
    while True:
        rank_N = np.empty(N, dtype=np.int64)
        rank_N[order_N] = np.cumsum(np.diff(key_N[order_N], prepend=key_N[order_N[0]]) != 0)
        if sorted_to >= depth or rank_N[order_N[-1]] == N - 1:
            return order_N.astype(np.int32)
        key_N = rank_N * (N + 1)
        key_N[:-sorted_to] += rank_N[sorted_to:] + 1
        order_N = np.argsort(key_N, kind="stable")
        sorted_to *= 2


class Trie:
    """What the server has generated since its start. A node is a dict of its children, the latest touched last."""

    def __init__(self) -> None:
        self.root: dict[int, Any] = {}
        self.matches: list[dict[int, Any] | None] = []  # the suffix of 1, 2, .. tokens, None where it is not known

    def insert(self, tail: Sequence[int]) -> None:
        """Every suffix of the last TRIE_DEPTH tokens."""
        for start in range(len(tail)):
            node = self.root
            for token in tail[start:]:
                child = node.pop(token, None)
                node[token] = node = {} if child is None else child

    def begin(self, tail: Sequence[int]) -> None:
        """Look a new request's context up."""
        self.matches = []
        for length in range(1, len(tail) + 1):
            node: dict[int, Any] | None = self.root
            for token in tail[-length:]:
                node = None if node is None else node.get(token)
            self.matches.append(node)

    def advance(self, tokens: Iterable[int]) -> None:
        """Extend the matches. A suffix that was unknown stays so, although it may have been inserted since."""
        for token in tokens:
            longer = [None if node is None else node.get(token) for node in self.matches[: TRIE_DEPTH - 1]]
            self.matches = [self.root.get(token), *longer]

    def anchors(self) -> Iterable[tuple[dict[int, Any], int]]:
        for length in range(len(self.matches), 0, -1):
            if node := self.matches[length - 1]:
                yield node, length

    @staticmethod
    def children(node: dict[int, Any]) -> Iterable[tuple[int, dict[int, Any]]]:
        return reversed(node.items())


class EngineNgram:
    """The predictor: SGLang with `--speculative-algorithm NGRAM`.

    corpus_drafts: of how many drafts of a pass the corpus has the choosing (`--speculative-ngram-external-sam-budget`);
    the own text has the rest. None: of all. shared: all texts, one after the other, fill one trie, as the requests of a
    server do; else the trie is empty at the start of each, as after a restart.
    """

    def __init__(self, name: str, corpus: Corpus | None, corpus_drafts: int | None = None, shared: bool = False):
        if corpus is None and corpus_drafts != 0:
            raise ValueError(f"{name}: expected corpus_drafts=0 where there is no corpus, got {corpus_drafts}")
        self.name, self.corpus, self.corpus_drafts, self.shared = name, corpus, corpus_drafts, shared

    def accepted(self, texts: Sequence[Text], num_nodes: int) -> list[Tensor]:
        """For every text the drafts accepted at each of its states, int64 [S], with `num_nodes` - 1 drafts a pass.

        The trie holds what was in the context at earlier passes, so it depends on where they were: where it has a
        part, only the states that this walk comes by are filled in, the others are 0.
        """
        drafts = num_nodes - 1
        if drafts > MAX_DRAFTS:
            raise ValueError(f"expected at most {MAX_DRAFTS + 1} nodes, got {num_nodes}")
        of_corpus = drafts if self.corpus_drafts is None else min(self.corpus_drafts, drafts)
        trie, accepted = Trie(), []
        for text in texts:
            known_S = torch.zeros(text.num_states, dtype=torch.long)
            if of_corpus and self.corpus is not None:
                places_SB = self.corpus.places(text, of_corpus)
                known_S = torch.from_numpy((places_SB <= of_corpus).sum(axis=1))
            if of_corpus < drafts:
                if not self.shared:
                    trie = Trie()
                known_S = walk_trie(text, trie, known_S, drafts - of_corpus)
            accepted.append(known_S)
        return accepted


def walk_trie(text: Text, trie: Trie, known_S: Tensor, budget: int) -> Tensor:
    """int64 [S]: what passes accept that may also accept the known_S drafts of the corpus; 0 where none is."""
    ids, known = text.ids_T.tolist(), known_S.tolist()
    accepted_S = torch.zeros_like(known_S)
    root = text.start
    trie.begin(ids[max(0, root + 1 - TRIE_DEPTH) : root + 1])
    while root < len(ids) - 1:
        tree = draft_tree(trie.anchors(), trie.children, budget)
        found = len(places_of(tree, islice(ids, root + 1, root + 1 + budget)))
        # unused nodes are drafts of the padding token
        if found == 0 and ids[root + 1] == PADDING and len(tree) <= budget:
            found = 1
        accepted = max(found, known[root - text.start])
        accepted_S[root - text.start] = accepted
        trie.insert(ids[max(0, root + 1 - TRIE_DEPTH) : root + 1])
        following = ids[root + 1 : root + 2 + accepted]
        trie.advance(following)
        root += len(following)
    return accepted_S
