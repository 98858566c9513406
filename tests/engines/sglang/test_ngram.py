"""What NGRAM drafts and accepts, with an external corpus and without: replay against SGLang's own code and server."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_k25.cache import Cache
from medusa_k25.data.splits import SPLITS, Split
from medusa_k25.data.texts import Text, texts_of_cache
from medusa_k25.ngram.engine import MAX_BREADTH, MIN_BREADTH, TRIE_DEPTH, Corpus, EngineNgram
from medusa_k25.replay import Resampling, walk_all
from medusa_k25.serving.ngram_corpus import CORPUS_FILE, make_corpus, write_corpus
from medusa_k25.target import Target

RUN = Path(__file__).parents[3] / "runs" / "smol_4heads"  # `make heads`
SEPARATOR = -(2**31)
NODES = 9


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


def served(
    target: Target, asked: Sequence[Text], engine: Callable[..., Any], fresh: bool, **more: Any
) -> list[tuple[list[int], int]]:
    """(answer, verify passes) of each prompt, one request after the other. fresh: forgets each before the next."""
    arguments = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": NODES, "max_running_requests": 2}
    arguments |= {"speculative_ngram_capacity": 1_000_000}  # the default takes 1.9 GB
    found = []
    with engine(target, **arguments, **more) as running:
        for text in asked:
            if fresh:
                forget(running)
            parameters = {"temperature": 0, "max_new_tokens": len(text.answer_T)}
            row = running.generate(input_ids=text.ids_T[: text.start].tolist(), sampling_params=parameters)
            found.append((row["output_ids"], row["meta_info"]["spec_verify_ct"]))
    return found


def forget(running: Any) -> None:
    """Empty the trie. A server refuses while it is still tidying up after the last request."""
    deadline = time.monotonic() + 30
    while not running.flush_cache().success:
        assert time.monotonic() < deadline, "the server refuses to flush its cache"
        time.sleep(0.05)


def compare(name: str, answers: list[tuple[list[int], int]], asked: Sequence[Text], predictor: EngineNgram) -> None:
    """The answers are the greedy ones that the cache holds, and every request took the passes that replay says."""
    passes = walk_all(predictor.accepted(asked, NODES))
    assert [ids for ids, _ in answers] == [text.answer_T.tolist() for text in asked]
    counts = [count for _, count in answers]
    measured = sum(text.num_states for text in asked) / sum(counts)
    low, high = Resampling([text.document for text in asked]).interval(passes, NODES)
    print(f"{name}: {measured:.4f} in SGLang, {passes.acceptance.length:.4f} replayed ({low:.3f} to {high:.3f})")
    assert low < measured < high
    assert counts == passes.by_text()[1].tolist()


@pytest.fixture(scope="module")
def texts(smollm2: Target) -> dict[Split, list[Text]]:
    cache = Cache.open(RUN / "cache", smollm2)
    return {split: texts_of_cache(cache, split) for split in SPLITS}


@pytest.fixture(scope="module")
def asked(texts: dict[Split, list[Text]]) -> list[Text]:
    """The first 33 tokens of greedy float32 answers of the target."""
    assert len(texts["heldout"]) >= 20
    return [replace(text, ids_T=text.ids_T[: text.start + 33]) for text in texts["heldout"][:20]]


def test_a_server_with_the_exported_corpus_counts_what_was_replayed(
    smollm2: Target, texts: dict[Split, list[Text]], asked: list[Text], engine: Callable[..., Any], tmp_path: Path
) -> None:
    tokenizer = smollm2.load_tokenizer()
    made = make_corpus(texts, tokenizer, 10_000_000, {NODES: 1.0})
    write_corpus(tmp_path, made, "smollm2", 10_000_000, "the demo")
    given = {
        "speculative_ngram_external_corpus_path": str(tmp_path / CORPUS_FILE),
        "speculative_ngram_external_sam_budget": made.corpus_drafts,
        "speculative_ngram_external_corpus_max_tokens": made.tokens,  # one more, and SGLang would refuse it
    }
    answers = served(smollm2, asked, engine, fresh=True, **given)
    read = [tokenizer.encode(json.loads(line), add_special_tokens=False) for line in made.lines]
    corpus = Corpus([torch.tensor(ids) for ids in read])
    compare("corpus and own text", answers, asked, EngineNgram("", corpus, made.corpus_drafts))


def test_a_server_without_a_corpus_counts_what_was_replayed(
    smollm2: Target, asked: list[Text], engine: Callable[..., Any]
) -> None:
    asked = asked[:10]
    answers = served(smollm2, asked, engine, fresh=False)
    compare("all answers so far", answers, asked, EngineNgram("", None, 0, shared=True))
