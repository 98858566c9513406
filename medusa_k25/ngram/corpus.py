"""Which answers a server's external corpus gets when it cannot take them all: those that calibration text repeats.

An answer is worth the 3-grams that it shares with calibration answers, each counted as often as they use it and only
for the first answer that brings it, per token. Letters: A answers, T tokens.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from medusa_k25.data.texts import Text
from medusa_k25.ngram.engine import Corpus, EngineNgram
from medusa_k25.replay import walk_all

GRAM = 3
SPLITS_TRIED = 8


def choose_corpus(train: Sequence[Text], calibration: Sequence[Text], max_tokens: int) -> list[Text]:
    """Answers of `train` for a corpus of at most `max_tokens`, in the order in which a server should read them.

    Greedily the one that is worth most beside those already chosen; what is worth nothing more comes after, by its
    worth alone. The best goes last: of two continuations a server drafts that which it has read later.
    Raises ValueError where a split is empty or no answer fits.
    """
    for split, texts in (("train", train), ("calibration", calibration)):
        if not texts:
            raise ValueError(f"there is no answer in the {split} split to choose a corpus; give more conversations")
    base = 1 + max(int(text.answer_T.max()) for text in (*train, *calibration))
    if base**GRAM >= 2**63:
        raise ValueError(f"token id {base - 1:,} is too large: expected ids of a vocabulary, below 2,097,152")
    used, count = np.unique(np.concatenate([grams(text.answer_T, base) for text in calibration]), return_counts=True)
    found_A = [places_in(used, grams(text.answer_T, base)) for text in train]
    alone_A = [count[found].sum() / len(text.answer_T) for found, text in zip(found_A, train, strict=True)]

    left = count.copy()  # what a 3-gram is still worth
    heap = [(-worth, answer) for answer, worth in enumerate(alone_A) if worth]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        _, answer = heapq.heappop(heap)
        worth = left[found_A[answer]].sum() / len(train[answer].answer_T)
        if heap and worth < -heap[0][0]:  # it was worth more before the last ones were chosen
            if worth:
                heapq.heappush(heap, (-worth, answer))
        elif worth:
            left[found_A[answer]] = 0
            order.append(answer)
    chosen = {*order}
    order += sorted((answer for answer in range(len(train)) if answer not in chosen), key=lambda a: -alone_A[a])

    fitting, tokens = [], -1  # a separator between two answers counts as a token
    for answer in order:
        if tokens + 1 + len(train[answer].answer_T) <= max_tokens:
            fitting.append(train[answer])
            tokens += 1 + len(train[answer].answer_T)
    if not fitting:
        shortest = min(len(text.answer_T) for text in train)
        raise ValueError(f"no answer fits a corpus of {max_tokens:,} tokens: the shortest has {shortest:,}; allow more")
    return fitting[::-1]


def grams(ids_T: Tensor, base: int) -> np.ndarray:
    """The 3-grams of an answer as numbers, int64 [T - 2]. base: more than any id."""
    ids = ids_T.numpy().astype(np.int64)
    return (ids[: 1 - GRAM] * base + ids[1:-1]) * base + ids[GRAM - 1 :]


def places_in(sorted_U: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Where in sorted_U the distinct values are that it holds. Cheap for few values in a long sorted_U."""
    values = np.unique(values)
    places = np.searchsorted(sorted_U, values)
    inside = places < len(sorted_U)
    return places[inside][sorted_U[places[inside]] == values[inside]]


def best_corpus_drafts(corpus: Corpus, calibration: Sequence[Text], num_nodes: int) -> int:
    """How many of a pass's drafts the corpus should choose, the own text choosing the rest: what needs fewest passes.

    Tried are all splits of up to SPLITS_TRIED drafts, and as many of more.
    """
    drafts = num_nodes - 1
    tried = sorted({max(1, round(drafts * i / SPLITS_TRIED)) for i in range(1, SPLITS_TRIED + 1)})

    def passes(corpus_drafts: int) -> int:
        return walk_all(EngineNgram("", corpus, corpus_drafts).accepted(calibration, num_nodes)).acceptance.passes

    return min(tried, key=passes)
