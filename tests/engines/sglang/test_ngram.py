"""What NGRAM drafts and accepts, with an external corpus and without: replay against SGLang's own code and server."""

from collections.abc import Sequence

import pytest
import torch

from medusa_k25.data.texts import Text
from medusa_k25.ngram_engine import MAX_BREADTH, MIN_BREADTH, TRIE_DEPTH, Corpus, EngineNgram

SEPARATOR = -(2**31)


def text_of(ids: Sequence[int], start: int) -> Text:
    return Text(torch.tensor(ids, dtype=torch.int32), start, "", None, None, 0.0)


def accepted_by_sglang(
    texts: Sequence[Text], corpus: Sequence[Sequence[int]], nodes: int, budget: int, shared: bool
) -> list[list[int]]:
    """The accepted drafts of every pass, from the C++ classes that NGRAMWorker drafts with, called as it calls them."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    engine = NgramCorpus(
        max_trie_depth=TRIE_DEPTH,
        min_bfs_breadth=MIN_BREADTH,
        max_bfs_breadth=MAX_BREADTH,
        draft_token_num=nodes,
        external_sam_budget=budget,
        capacity=200_000,
    )
    if budget:
        engine.load_external_corpus_named(
            "answers", [([SEPARATOR] if i else []) + list(answer) for i, answer in enumerate(corpus)]
        )
    counts = []
    for number, text in enumerate(texts):
        if not shared:
            engine.reset()
        ids, root, accepted = text.ids_T.tolist(), text.start, []
        while root < len(ids) - 1:
            tail = ids[max(0, root + 1 - TRIE_DEPTH) : root + 1]
            tokens, mask = engine.batch_get([str(number)], [tail], [root + 1])
            paths = {
                tuple(int(tokens[j]) for j in range(nodes) if row[j])[1:] for row in mask.reshape(nodes, nodes).tolist()
            }
            following = ids[root + 1 :]
            count = max(len(path) for path in paths if list(path) == following[: len(path)])
            engine.batch_put([tail])
            engine.synchronize()
            accepted.append(count)
            root += min(count + 1, len(following))
        counts.append(accepted)
        engine.erase_match_state([str(number)])
    return counts


def visited(accepted_S: torch.Tensor) -> list[int]:
    state, counts = 0, []
    while state < len(accepted_S):
        counts.append(int(accepted_S[state]))
        state += counts[-1] + 1
    return counts


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("nodes", "budget"), [(2, 0), (9, 0), (9, 3), (9, 8), (33, 20)])
@pytest.mark.parametrize("vocabulary", [2, 6, 40])
def test_every_pass_of_random_text_is_that_of_sglangs_code(vocabulary, nodes, budget, shared):
    generator = torch.Generator().manual_seed(vocabulary * nodes + budget)

    def random_ids() -> list[int]:
        """Short phrases that come again, in places repeated at once."""
        length = int(torch.randint(20, 120, (), generator=generator))
        ids = torch.randint(1, 1 + vocabulary, (length,), generator=generator).tolist()
        for _ in range(length // 8):
            source, target, size, times = torch.randint(1, 19, (4,), generator=generator).tolist()
            ids[target * 5 : target * 5 + size] = ids[source : source + size] * (times % 3)
        return ids

    corpus = [random_ids() for _ in range(12)]
    texts = [text_of(random_ids() + corpus[i][:20] + random_ids(), 1 + 7 * i) for i in range(8)]
    predictor = EngineNgram("", Corpus([torch.tensor(ids) for ids in corpus]), budget, shared)
    ours = [visited(accepted_S) for accepted_S in predictor.accepted(texts, nodes)]
    theirs = accepted_by_sglang(texts, corpus, nodes, budget, shared)
    assert ours == theirs
    assert max(map(max, theirs)) > 0
