"""How fast acceptance is replayed, beside the plain loops: python -m bench.replay

Made-up ranks and lookups, as likely to be right as those of small heads, over a million tokens (--tokens) in answers of
1,024: no model is needed. Every row runs in turns with its plain loop, on a part of the text where that is slow, and
both must give the same counts. Times are for the whole text; ratios per token.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from medusa_k25.acceptance import Replayed, tree_sizes
from medusa_k25.data.texts import Text
from medusa_k25.metrics import MISS
from medusa_k25.ngram.engine import Corpus, EngineNgram
from medusa_k25.ngram.lookup import Lookup
from medusa_k25.replay import Acceptance, Resampling, grow, grow_where_walks_stop, walk, walk_all
from medusa_k25.tree import Path, Tree

ANSWER, K, WIDTH = 1024, 4, 10


@dataclass(frozen=True)
class Row:
    """`fast` on all texts; `plain`, its oracle, on the first `share` of them. Both take a number of texts."""

    name: str
    fast: Callable[[int], Any]
    plain: Callable[[int], Any] | None
    share: float


def seconds(work: Callable[[int], Any], count: int) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work(count)
    return time.perf_counter() - start, result


def show(row: Row, num_texts: int) -> None:
    took, result = seconds(row.fast, num_texts)
    if row.plain is None:
        print(f"{row.name:44} {took:8.2f} s", flush=True)
        return
    some = max(1, round(num_texts * row.share))
    plain, expected = seconds(row.plain, some)
    if some < num_texts:
        result = row.fast(some)
    assert result == expected, f"{row.name}: {result} is not the plain loop's {expected}"
    ratio = plain / some / (took / num_texts)
    print(f"{row.name:44} {took:8.2f} s {plain / some * num_texts:10.1f} s {ratio:8.1f} x", flush=True)


def made_up_ranks(num_texts: int) -> list[Tensor]:
    """Head k's label has rank r with a probability of 0.29 / sqrt(k) / (r + 1); none lies beyond an answer's end."""
    generator = torch.Generator().manual_seed(0)
    cuts = (0.29 / (torch.arange(WIDTH) + 1)).cumsum(0)
    ahead_SK = torch.arange(ANSWER)[:, None] + torch.arange(1, K + 1)
    ranks = []
    for _ in range(num_texts):
        uniform_SK = torch.rand(ANSWER, K, generator=generator) * torch.arange(1, K + 1).sqrt()
        ranks_SK = torch.searchsorted(cuts, uniform_SK)
        ranks.append(torch.where((ranks_SK >= WIDTH) | (ahead_SK > ANSWER), MISS, ranks_SK))
    return ranks


def plain_accepted(paths: set[Path], ranks: list[list[int]]) -> list[int]:
    accepted = []
    for row in ranks:
        length = 0
        while length < K and tuple(row[: length + 1]) in paths:
            length += 1
        accepted.append(length)
    return accepted


def plain_replay(ranks: list[Tensor], tree: Tree) -> Acceptance:
    paths = set(tree.paths)
    return sum((walk(plain_accepted(paths, ranks_SK.tolist())) for ranks_SK in ranks), Acceptance())


def plain_counts(ranks: list[Tensor], most_nodes: int) -> tuple[Path, ...]:
    counts: dict[Path, int] = {}
    for ranks_SK in ranks:
        for row in ranks_SK.tolist():
            for depth in range(1, K + 1):
                if row[depth - 1] >= WIDTH:
                    break
                path = tuple(row[:depth])
                counts[path] = counts.get(path, 0) + 1
    return tuple(sorted(counts, key=lambda path: (-counts[path], len(path), path))[: most_nodes - 1])


def replay_rows(num_texts: int) -> list[Row]:
    ranks = made_up_ranks(num_texts)
    growth = grow(ranks[:50], 64, WIDTH)
    tree = growth.tree(64)
    accepted = [tree.accepted(ranks_SK) for ranks_SK in ranks]
    passes = walk_all(accepted)
    draws = Resampling([str(i // 5) for i in range(num_texts)])
    texts = [Text(torch.zeros(ANSWER + 1), 0, str(i // 5), None, None, None) for i in range(num_texts)]
    of_texts = dict(zip(texts, ranks, strict=True))
    replayed = Replayed(texts[: num_texts // 2], texts[num_texts // 2 :])

    return [
        Row(
            "walk of what is accepted",
            lambda count: walk_all(accepted[:count]).acceptance,
            lambda count: sum((walk(accepted_S.tolist()) for accepted_S in accepted[:count]), Acceptance()),
            1.0,
        ),
        Row(
            "replay of a tree of 64 nodes",
            lambda count: walk_all(list(tree.accepted(torch.cat(ranks[:count])).split(ANSWER))).acceptance,
            lambda count: plain_replay(ranks[:count], tree),
            0.1,
        ),
        Row(
            "trees of 2 to 64 nodes, replayed on half each",
            lambda _: tree_sizes("joint", growth, of_texts, replayed),
            None,
            1.0,
        ),
        Row(
            "best trees of 2 to 64 nodes",
            lambda count: grow(ranks[:count], 64, WIDTH).paths,
            lambda count: plain_counts(ranks[:count], 64),
            0.1,
        ),
        Row("the same where walks stop", lambda count: grow_where_walks_stop(ranks[:count], 64, WIDTH), None, 1.0),
        Row("1,000 draws of 5,000 documents", lambda count: Resampling([str(i) for i in range(5000)]), None, 1.0),
        Row("an interval", lambda count: draws.interval(passes, 64), None, 1.0),
    ]


def made_up_texts(num_texts: int) -> list[Text]:
    """Tokens as common as words are; half of every text are stretches of another text or of itself, as phrases are."""
    generator = torch.Generator().manual_seed(0)
    source_N = (2**14 ** torch.rand(num_texts * ANSWER, generator=generator)).int()
    ids_N = source_N.clone()
    for start in range(0, len(ids_N) - 16, 16):
        # from the source, so that the phrases come from few places
        first = int(torch.randint(min(start + 16, 1 << 16), (), generator=generator))
        ids_N[start : start + 8] = source_N[first : first + 8]
    return [Text(ids_T, 32, str(i), None, None, 0.0) for i, ids_T in enumerate(ids_N.split(ANSWER))]


def plain_lookup(texts: Sequence[Text], num_drafts: int, longest: int) -> list[list[int]]:
    """A table of the n-grams so far, asked at every token."""
    found = []
    for text in texts:
        ids, accepted = text.ids_T.tolist(), []
        latest: dict[tuple[int, ...], int] = {}
        for root in range(len(ids) - 1):
            grams = [tuple(ids[root + 1 - n : root + 1]) for n in range(1, min(longest, root + 1) + 1)]
            if root >= text.start:
                start = next((latest[gram] for gram in reversed(grams) if gram in latest), root + 1)
                draft, truth = ids[start : root + 1][:num_drafts], ids[root + 1 :]
                pairs = zip(draft, truth, strict=False)
                accepted.append(next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(truth))))
            latest |= dict.fromkeys(grams, root + 1)
        found.append(accepted)
    return found


def lookup_rows(num_texts: int) -> list[Row]:
    texts = made_up_texts(num_texts)
    half = num_texts // 2
    answers = [text.answer_T for text in texts[half:]]
    corpus = Corpus(answers)

    def of(predictor: Lookup | EngineNgram, count: int) -> list[list[int]]:
        fresh = [replace(text) for text in texts[:count]]  # a corpus remembers what it has drafted for a text
        return [accepted_S.tolist() for accepted_S in predictor.accepted(fresh, 9)]

    def engine(corpus_drafts: int, count: int) -> list[list[int]]:
        return of(EngineNgram("", corpus, corpus_drafts), max(1, count // 10))

    ngrams = Lookup("n-gram lookup", 4)
    return [
        Row("n-gram lookup", lambda count: of(ngrams, count), lambda count: plain_lookup(texts[:count], 8, 4), 0.1),
        Row("suffix lookup", lambda count: of(Lookup("suffix lookup", None), count), None, 1.0),
        Row(f"a corpus of {corpus.num_tokens:,} tokens", lambda count: Corpus(answers).num_tokens, None, 1.0),
        Row("SGLang's NGRAM, a tenth: 8 of the corpus", lambda count: engine(8, count), None, 1.0),
        Row("SGLang's NGRAM, a tenth: 8 of the own text", lambda count: engine(0, count), None, 1.0),
        Row("SGLang's NGRAM, a tenth: 4 and 4", lambda count: engine(4, count), None, 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    options = parser.parse_args()
    num_texts = max(50, options.tokens // ANSWER)
    tokens = f"{num_texts * ANSWER:,} tokens, {torch.get_num_threads()} threads"
    print(f"{tokens:44} {'here':>10} {'plain loop':>12} {'ratio':>10}")
    for row in [*replay_rows(num_texts), *lookup_rows(num_texts)]:
        show(row, num_texts)


if __name__ == "__main__":
    main()
