"""Predictors on texts: what a row holds, heads beside a lookup, trees of all sizes."""

from dataclasses import replace

import pytest
import torch

from medusa_k25.acceptance import (
    CorpusAndOwnText,
    Evaluation,
    Evaluator,
    HeadsBesideLookup,
    HeadsTree,
    Replayed,
    Share,
    accuracy,
    drawn,
    has_label,
    product_growth,
    some_of,
    tree_sizes,
)
from medusa_k25.data.texts import Text, texts_of_cache
from medusa_k25.data.windows import documents_of, future_of, runs_of
from medusa_k25.metrics import MISS
from medusa_k25.ngram.beside import Beside
from medusa_k25.ngram.corpus import choose_corpus
from medusa_k25.ngram.engine import Corpus, EngineNgram
from medusa_k25.ngram.table import AnswersTable
from medusa_k25.replay import Acceptance, grow, walk, walk_all
from medusa_k25.tree import Growth
from tests.tiny import cache_of

K = 3


def made_up(seed: int, count: int, states: int = 30) -> tuple[list[Text], dict[Text, torch.Tensor]]:
    """Texts, two of a document, and ranks of their labels that are small mostly and never beyond an answer's end."""
    generator = torch.Generator().manual_seed(seed)
    texts, ranks = [], {}
    for i in range(count):
        S = states + i
        ids_T = torch.randint(0, 9, (S + 3,), generator=generator, dtype=torch.int32)
        text = Text(ids_T, 2, f"document {seed}-{i // 2}", f"topic {i % 3}", None, 0.0)
        ranks_SK = (torch.rand(S, K, generator=generator) ** 2 * 5).long()
        ranks_SK[~has_label(text, K)] = MISS
        texts.append(text)
        ranks[text] = ranks_SK
    return texts, ranks


def evaluator_of(*num_nodes: int) -> Evaluator:
    return Evaluator(num_nodes, 8, 4, 10_000, None, 1, 1024, None)


def evaluate(evaluator: Evaluator, replayed: Replayed, ranks: dict[Text, torch.Tensor]) -> Evaluation:
    return evaluator.run(replayed, evaluator.predictors([], replayed, ranks), ranks)


@pytest.fixture(scope="module")
def replayed_and_ranks():
    (heldout, ranks), (calibration, more) = made_up(1, 9), made_up(2, 12)
    return Replayed(heldout, calibration), ranks | more


def test_a_row_is_the_walk_of_each_answer(replayed_and_ranks):
    replayed, ranks = replayed_and_ranks
    looping = replace(replayed.heldout[0], ids_T=torch.tensor([1, 1] + [5, 6] * 20, dtype=torch.int32))
    replayed = Replayed([looping, *replayed.heldout[1:]], replayed.calibration)
    ranks = {**ranks, looping: torch.zeros(looping.num_states, K, dtype=torch.long)}
    heads = HeadsTree("heads", Growth.by_count(ranks[looping], 3, 5), ranks)
    row = replayed.row(heads, 3)
    walks = [walk(heads.tree(3).accepted(ranks[text]).tolist()) for text in replayed.heldout]
    assert row.every == sum(walks, Acceptance())
    assert row.without_loops == sum(walks[1:], Acceptance())
    assert row.without_loops.length < row.every.length
    assert row.without_loops_interval[1] < row.interval[1]
    assert row.calibration.answers == len(replayed.calibration)
    assert row.tree == heads.tree(3)


def test_predictors_that_need_texts_alone_are_evaluated_without_heads(replayed_and_ranks):
    replayed, _ = replayed_and_ranks
    train, _ = made_up(3, 4)
    evaluator = evaluator_of(5, 2)
    predictors = evaluator.predictors(train, replayed)
    evaluation = evaluator.run(replayed, predictors)
    names = ["n-gram lookup", "suffix lookup", "SGLang's NGRAM", "training answers", "training answers + own text"]
    assert [(row.predictor, row.num_nodes, row.tree) for row in evaluation.rows] == [
        (name, n, None) for name in names for n in (2, 5)
    ]
    assert [each.name for each in evaluator.predictors([], replayed)] == names[:3]  # nothing to make a corpus of
    corpus = Corpus([text.answer_T for text in choose_corpus(train, replayed.calibration, 10_000)])
    for n in (2, 5):
        accepted = EngineNgram("", corpus).accepted(replayed.heldout, n)
        assert evaluation.row("training answers", n).every == walk_all(accepted).acceptance
    (both,) = [predictor for predictor in predictors if isinstance(predictor, CorpusAndOwnText)]
    assert {*both.calibration} <= {*replayed.calibration}  # how drafts are shared is chosen on it alone
    assert evaluation.accuracy_KR == evaluation.labels_K == evaluation.trees == []
    assert evaluation.answers == 9


@pytest.mark.parametrize("missing", ["held-out", "calibration"])
def test_a_split_without_text_is_refused(replayed_and_ranks, missing):
    replayed, _ = replayed_and_ranks
    heldout, calibration = ([] if missing == split else replayed.heldout for split in ("held-out", "calibration"))
    with pytest.raises(ValueError, match=f"the {missing} split holds no answer of two tokens or more"):
        Replayed(heldout, calibration)


def test_a_tree_has_no_more_nodes_than_calibration_text_has_paths(replayed_and_ranks):
    replayed, ranks = replayed_and_ranks
    always_right = {text: torch.where(has_label(text, K), 0, MISS) for text in ranks}
    evaluation = evaluate(evaluator_of(4, 9), replayed, always_right)
    assert {row.num_nodes for row in evaluation.rows if row.predictor == "heads, tree"} == {4}
    assert {row.num_nodes for row in evaluation.rows if row.predictor == "n-gram lookup"} == {4, 9}
    assert {tree.num_nodes for tree in evaluation.trees} == {2, 3, 4}
    with pytest.raises(ValueError, match="a tree of 9 nodes needs 8 paths, .* only 3 were ever right: .* at most 4 "):
        grow([always_right[text] for text in replayed.calibration], 64, 8).tree(9)


def test_whole_conversations_are_replayed_up_to_a_number_of_tokens(replayed_and_ranks):
    texts = list(replayed_and_ranks[0].heldout)
    assert some_of(texts, None) == some_of(texts, sum(text.num_states for text in texts)) == texts
    for most in (1, 60, 150):
        some = some_of(texts, most)
        documents = {text.document for text in some}
        assert some == [text for text in texts if text.document in documents]
        assert sum(text.num_states for text in some) <= most or len(documents) == 1
    assert {*some_of(texts, 60)} <= {*some_of(texts, 150)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([1], 1, 1024, None), r"num_nodes=\[1\]: a pass verifies 2 to 64"),
        (([2.5], 1, 1024, None), r"num_nodes=\[2.5\]"),
        (([], 1, 1024, None), r"num_nodes=\[\]"),
        (([4], 1.5, 1024, None), "evaluate.batch=1.5: expected a whole number"),
        (([4], 1, 0, None), "evaluate.context=0: expected a whole number"),
        (([4], 1, None, "hot"), "evaluate.temperature=hot: expected a number"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(given, message):
    num_nodes, *place = given
    with pytest.raises(ValueError, match=message):
        Evaluator(num_nodes, 8, 4, 10_000, None, *place)


def test_a_size_can_be_fixed_where_a_predictor_has_it(replayed_and_ranks):
    replayed, ranks = replayed_and_ranks
    rows = evaluate(evaluator_of(2, 9), replayed, ranks).rows
    assert evaluator_of(2, 9).judged(rows) == rows
    judged = Evaluator([2, 9], 8, 4, 10_000, None, 1, 1024, None, judged_nodes=9).judged(rows)
    sizes = {
        name: {row.num_nodes for row in judged if row.predictor == name} for name in ("heads, tree", "heads, chain")
    }
    assert sizes == {"heads, tree": {9}, "heads, chain": {2, 3, 4}}


def test_the_drawn_tree_counts_what_passes_accept(replayed_and_ranks):
    replayed, ranks = replayed_and_ranks
    tree = HeadsTree("heads", grow([ranks[text] for text in replayed.calibration], 9, 8), ranks)
    passes = replayed.passes(tree, 9)
    shape = drawn(tree.tree(9), passes, replayed.heldout, ranks)
    accepted = passes.acceptance.accepted
    for depth in (1, 2, 3):
        total = sum(s for path, s in zip(shape.paths, shape.shares, strict=True) if len(path) == depth)
        assert total == pytest.approx(sum(n for d, n in accepted.items() if d >= depth) / passes.acceptance.passes)


def test_trees_of_all_sizes_are_those_of_their_rows(replayed_and_ranks):
    replayed, ranks = replayed_and_ranks
    evaluation = evaluate(evaluator_of(2, 9, 33), replayed, ranks)
    for n in (2, 9, 33):
        row = evaluation.row("heads, tree", n)
        (size,) = [size for size in evaluation.trees if (size.chosen, size.num_nodes) == ("joint", n)]
        assert (size.heldout, size.calibration) == (row.every.length, row.calibration.length)
        assert row.tree is not None and (size.depth, size.width) == (row.tree.depth, row.tree.width)
    growth = product_growth(ranks, replayed.calibration, 64, 8)
    by_product = tree_sizes("product", growth, ranks, replayed, [2, 9])
    assert by_product == [size for size in evaluation.trees if size.chosen == "product" and size.num_nodes in (2, 9)]


def test_the_product_takes_the_accuracies_of_calibration_text(replayed_and_ranks):
    replayed, ranks = replayed_and_ranks
    growth = product_growth(ranks, replayed.calibration, 64, 8)
    hits, labels = 0, 0
    for text in replayed.calibration:
        for s in range(text.num_states - 1):  # where head 2 has a label
            hits += int(ranks[text][s, 1] == 1)
            labels += 1
    by_path = dict(zip(growth.paths, growth.shares, strict=True))
    assert by_path[0, 1] / by_path[0,] == pytest.approx(hits / labels)


def test_labels_exist_within_the_answer(tiny_llama, tmp_path):
    cache = cache_of(tiny_llama, tmp_path / "cache", num_documents=12, turns=2)
    runs = [run for document in documents_of(cache, "heldout") for run in runs_of(cache, document)]
    texts = texts_of_cache(cache, "heldout")
    assert texts
    for text, run in zip(texts, runs, strict=True):
        assert has_label(text, 4).equal(future_of(cache, run, 4)[:, 1:] >= 0)


def test_accuracy_counts_labels_that_exist():
    text = Text(torch.arange(6, dtype=torch.int32), 1, "a", None, None, 0.0)  # four states
    ranks = {text: torch.tensor([[0, 2, 0], [1, 0, MISS], [MISS, 0, MISS], [0, MISS, MISS]])}
    hits_KR, labels_K = accuracy(ranks, [text], (1, 2, 3))
    assert labels_K.tolist() == [4, 3, 2]
    assert hits_KR.tolist() == [[2, 3, 3], [2, 2, 3], [1, 1, 1]]


def test_heads_beside_a_lookup_are_the_policy_that_decoding_follows(replayed_and_ranks):
    replayed, ranks = replayed_and_ranks
    train, _ = made_up(3, 4)
    predictors = evaluator_of(9).predictors(train, replayed, ranks)
    table = AnswersTable.build([text.answer_T for text in choose_corpus(train, replayed.calibration, 10_000)], 9)
    both, with_answers = (each for each in predictors if isinstance(each, HeadsBesideLookup))
    assert (both.name, with_answers.name) == ("heads + n-gram lookup", "heads + lookup + training answers")
    some = replayed.heldout
    for predictor, source in ((both, None), (with_answers, table)):
        growth = predictor.heads.growth
        for nodes, share in ((9, Share(4, 2)), (5, Share(1, 3)), (7, Share(6, 2))):
            beside = Beside(growth.tree(nodes), growth.tree(nodes - share.chain), share.shortest, table=source)
            expected = beside.accepted(some, [ranks[text] for text in some])
            found = predictor.accepted_with(share, some, nodes)
            assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    assert walk_all(both.accepted_with(Share(4, 2), some, 9)) != walk_all(
        with_answers.accepted_with(Share(4, 2), some, 9)
    )
    assert not [p for p in evaluator_of(9).predictors([], replayed, ranks) if p.name == with_answers.name]


def test_how_a_pass_is_split_is_chosen_on_calibration_text(replayed_and_ranks):
    replayed, ranks = replayed_and_ranks

    def looked_up(right_from: int) -> dict[Text, tuple[torch.Tensor, torch.Tensor]]:
        """Matches of 0 to 4 tokens at random; those of `right_from` or more are right."""
        found, generator = {}, torch.Generator().manual_seed(0)
        for text in ranks:
            matched_S = torch.randint(0, 5, (text.num_states,), generator=generator)
            found[text] = (torch.where(matched_S >= right_from, 4, 0), matched_S)
        return found

    heads = HeadsTree("heads", grow([ranks[text] for text in replayed.calibration], 9, 4), ranks)
    useful = HeadsBesideLookup("both", heads, looked_up(3), replayed.calibration)
    assert useful.share(9).chain == 4
    assert useful.share(2) == Share(1, 3)  # beside the root alone: what is wrong costs the tree
    assert replayed.row(useful, 9).every.length > replayed.row(heads, 9).every.length
    useless = HeadsBesideLookup("both", heads, looked_up(9), replayed.calibration)
    assert useless.share(2) == Share(0, 2)
    assert replayed.row(useless, 2).every == replayed.row(heads, 2).every
    # whatever held-out text would have liked
    mixed = looked_up(9) | {text: looked_up(1)[text] for text in replayed.heldout}
    assert HeadsBesideLookup("both", heads, mixed, replayed.calibration).share(2) == Share(0, 2)
