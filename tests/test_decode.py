"""The project's signature: decoding equals greedy text, and its counts equal replay's, to the integer."""

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_k25.data.labels import IGNORE
from medusa_k25.data.windows import answers_of
from medusa_k25.heads import HEADS, DraftVocabulary, Embeddings, ResidualHeads, Speculator
from medusa_k25.ngram.beside import Beside
from medusa_k25.ngram.table import AnswersTable
from medusa_k25.replay import Acceptance, answer_ranks, replay
from medusa_k25.serving import decode
from medusa_k25.serving.decode import Drafter, prove, sampled, speculative_decode, verify
from medusa_k25.target import TargetModel
from medusa_k25.tree import Tree
from tests.tiny import cache_of, greedy_answer, random_prompts

K = 3
TREE = Tree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 2]])


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_k25"])
def served(request, tmp_path_factory):
    """(target, model, cache of greedy answers, end ids, heads fitted to that text)."""
    target = request.getfixturevalue(request.param)
    model = target.load_model(torch.float32)
    end_ids = tuple(greedy_answer(model, random_prompts(1)[0], [])[10:11])  # so that answers end at different places
    cache = cache_of(target, tmp_path_factory.mktemp(request.param) / "cache", num_documents=14, end_ids=end_ids)
    assert {document.finish_reason for document in cache.documents} == {"stop", "length"}
    return target, model, cache, end_ids, fitted_heads(target, cache)


def vocabulary_of(target, draft_size=None):
    return DraftVocabulary.most_frequent(torch.arange(target.vocab_size, 0, -1), draft_size)


def fitted_heads(target, cache, draft_size=None, kind="residual", **options):
    torch.manual_seed(0)
    vocabulary = vocabulary_of(target, draft_size)
    heads = HEADS[kind](target.hidden_size, num_heads=K, draft_vocab_size=len(vocabulary), **options)
    embed = Embeddings(target.embeddings)
    lm_head_MD = vocabulary.rows(target.lm_head).float()
    heads.init_lm_heads(lm_head_MD)
    answers = [a for d in cache.documents for a in answers_of(cache, d, K)]
    hidden_ND, future_NK = torch.cat([h for h, _ in answers]), torch.cat([f for _, f in answers])
    labels_KN = vocabulary.to_draft(future_NK[:, 1:]).T
    optimizer = torch.optim.Adam(heads.parameters(), lr=3e-2)
    for _ in range(25):
        lm_head = heads.with_lm_head(lm_head_MD, lambda lm_head: lm_head)
        logits_KNM = heads(hidden_ND, future_NK[:, :-1], embed) @ lm_head.mT
        optimizer.zero_grad()
        cross_entropy(logits_KNM.flatten(0, 1), labels_KN.flatten(), ignore_index=IGNORE).backward()
        optimizer.step()
    return heads


def drafter_of(target, heads, tree, draft_size=None):
    vocabulary = vocabulary_of(target, draft_size)
    return Drafter(Speculator.of(heads, vocabulary, target), tree)


@pytest.mark.parametrize("draft_size", [None, 300])
@pytest.mark.parametrize("tree", [Tree([]), Tree.chain(K), TREE], ids=["plain", "chain", "tree"])
def test_output_is_greedy_and_counts_are_replays(served, tree, draft_size):
    target, model, cache, end_ids, heads = served
    drafter = drafter_of(target, heads, tree, draft_size)
    proof = prove(model, end_ids, drafter, cache, cache.documents)
    assert proof.other_output == []
    assert proof.other_counts == []
    assert proof.decoded == proof.replayed
    if tree is TREE:
        assert proof.decoded.length > 1.3  # the equality would say little if nothing were accepted


@pytest.mark.parametrize("smaller", [Tree([]), Tree([[0], [1], [0, 0], [0, 0, 0]])], ids=["root", "tree"])
def test_a_continuation_beside_the_tree_decodes_as_it_replays(served, smaller):
    """From a table of half of the answers: the other half finds little there, and in its own text."""
    target, model, cache, end_ids, heads = served
    drafter, documents = drafter_of(target, heads, TREE), cache.documents[:6]
    answers = [cache.token_ids(document)[document.prompt_length :] for document in documents[::2]]
    beside = Beside(TREE, smaller, 2, table=AnswersTable.build(answers, 12))
    proof = prove(model, end_ids, drafter, cache, documents, beside)
    assert proof.holds
    assert proof.decoded == proof.replayed
    assert proof.decoded != prove(model, end_ids, drafter, cache, documents).decoded
    assert max(proof.decoded.accepted) > K  # deeper than any head


@pytest.mark.parametrize("options", [{"bias": False}, {"own_lm_head": True}], ids=str)
@pytest.mark.parametrize("draft_size", [None, 300])
def test_heads_of_every_option_decode_as_they_replay(served, draft_size, options):
    target, model, cache, end_ids, _ = served
    heads = fitted_heads(target, cache, draft_size, **options)
    drafter = drafter_of(target, heads, TREE, draft_size)
    proof = prove(model, end_ids, drafter, cache, cache.documents)
    assert proof.holds
    assert proof.decoded == proof.replayed
    assert proof.decoded.length > 1.3
    if heads.own_lm_head:  # each head's lm_head is its own: with the others' the counts are other ones
        with torch.no_grad():
            heads.lm_heads.weight.copy_(heads.lm_heads.weight.roll(1, dims=0))
        ranks = answer_ranks(drafter.speculator, cache, cache.documents)
        assert replay(ranks, TREE) != proof.decoded


@st.composite
def trees(draw):
    paths = {()}
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(sorted(path for path in paths if len(path) < K)))
        paths.add((*parent, draw(st.integers(0, 3))))
    return Tree(paths)


@pytest.mark.parametrize("served", ["tiny_llama"], indirect=True)
@pytest.mark.parametrize(("kind", "own"), [*((kind, False) for kind in HEADS), ("recurrent", True)])
def test_heads_of_every_type_decode_as_they_replay_in_any_tree(served, kind, own):
    target, model, cache, end_ids, _ = served
    heads = fitted_heads(target, cache, 300, kind, own_lm_head=own)

    @settings(deadline=None, max_examples=4, derandomize=True, phases=[Phase.explicit, Phase.generate])
    @example(TREE)
    @given(trees())
    def decoded_as_replayed(tree):
        drafter = drafter_of(target, heads, tree, 300)
        proof = prove(model, end_ids, drafter, cache, cache.documents[:5])
        assert proof.holds
        assert proof.decoded == proof.replayed
        assert proof.decoded.length > 1.3 or tree != TREE

    decoded_as_replayed()


def test_proof_fails_when_decoding_differs(served):
    """Another tree than replay's, and end ids that stop too early: both must be noticed."""
    target, model, cache, end_ids, heads = served
    drafter = drafter_of(target, heads, TREE)
    document = max(cache.documents, key=lambda d: d.length - d.prompt_length)
    third = int(cache.token_ids(document)[document.prompt_length + 3])
    assert prove(model, [*end_ids, third], drafter, cache, [document]).other_output == [document.id]
    untrained = drafter_of(target, ResidualHeads(target.hidden_size, K), TREE)
    ranks = answer_ranks(drafter.speculator, cache, cache.documents)
    proof = prove(model, end_ids, untrained, cache, cache.documents)
    assert proof.holds
    assert proof.decoded != replay(ranks, TREE)


V, STEPS, PROMPT = 4, 3, [1, 3, 2]


@pytest.fixture(scope="module")
def tiny_vocabulary():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    return TargetModel(LlamaForCausalLM(config))


def exact_distribution(model, prompt_ids, temperature, top_p):
    """Probability of every answer of STEPS tokens."""
    answers = torch.cartesian_prod(*[torch.arange(V)] * STEPS)
    ids = torch.cat([torch.tensor(prompt_ids).expand(len(answers), -1), answers], dim=1)
    logits = model.logits(model.hidden(ids))[:, len(prompt_ids) - 1 : -1] / temperature
    probabilities = logits.softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
    kept = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    kept = kept / kept.sum(-1, keepdim=True)
    return kept.gather(-1, answers[..., None])[..., 0].prod(-1)


SHAPES = {"chain": Tree.chain(2), "tree": Tree([[0], [1], [0, 0], [0, 1], [1, 0]])}


def sampled_answers(model, tree, temperature, top_p, samples=700):
    """(how often each answer of STEPS tokens came, acceptance) of speculative sampling."""
    vocabulary = DraftVocabulary(torch.arange(V), V)
    drafter = Drafter(Speculator(ResidualHeads(16, 2), vocabulary, model.model.lm_head.weight), tree)
    choose = sampled(temperature, top_p, torch.Generator().manual_seed(2))
    counts = torch.zeros(V**STEPS)
    acceptance = Acceptance()
    for _ in range(samples):
        result = speculative_decode(model, drafter, PROMPT, STEPS, [], choose)
        counts[sum(token * V ** (STEPS - 1 - i) for i, token in enumerate(result.answer_ids))] += 1
        acceptance += result.acceptance
    return counts, acceptance


def p_value(counts, probabilities):
    """Of the chi-square test that `counts` were drawn from `probabilities`; 0 where something impossible came."""
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    likely, rest = expected >= 5, (expected > 0) & (expected < 5)  # the test wants 5 or more in every cell
    observed = torch.cat([counts[likely], counts[rest].sum()[None]]).double()
    wanted = torch.cat([expected[likely], expected[rest].sum()[None]]).double()
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("tree", SHAPES.values(), ids=SHAPES)
def test_sampling_is_lossless(tiny_vocabulary, tree, temperature):
    counts, acceptance = sampled_answers(tiny_vocabulary, tree, temperature, top_p=0.95)
    probabilities = exact_distribution(tiny_vocabulary, PROMPT, temperature, top_p=0.95)
    assert 0.001 < (probabilities == 0).float().mean() < 0.9  # top-p forbids some answers, and leaves many
    assert p_value(counts, probabilities) > 1e-3
    assert acceptance.length > 1.05


def test_the_same_draws_give_the_same_answers_with_and_without_drafts(tiny_vocabulary):
    """One draw a token, whatever was drafted: so sampling with drafts is sampling without them, token for token."""
    plain, _ = sampled_answers(tiny_vocabulary, Tree([]), 1.0, top_p=0.95, samples=40)
    for tree in SHAPES.values():
        counts, _ = sampled_answers(tiny_vocabulary, tree, 1.0, top_p=0.95, samples=40)
        assert torch.equal(counts, plain)


def accept_the_best_draft(tree, tokens, node, token):
    return tree.children[node][0] if tree.children[node] else None


def states_of_the_node_before(*arguments):
    return verify(*arguments).roll(1, dims=0)


@pytest.mark.parametrize("tree", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("name", "broken"), [("accepted_child", accept_the_best_draft), ("verify", states_of_the_node_before)]
)
def test_the_sampling_test_sees_a_broken_rule(tiny_vocabulary, monkeypatch, tree, name, broken):
    monkeypatch.setattr(decode, name, broken)
    counts, _ = sampled_answers(tiny_vocabulary, tree, 1.0, top_p=0.95)
    assert p_value(counts, exact_distribution(tiny_vocabulary, PROMPT, 1.0, top_p=0.95)) < 1e-6


def test_impossible_sampling_is_refused():
    with pytest.raises(ValueError, match="temperature > 0"):
        sampled(0.0)
    with pytest.raises(ValueError, match="top_p"):
        sampled(1.0, 0.0)


def test_a_tree_that_does_not_fit_the_heads_is_refused(tiny_vocabulary):
    vocabulary = DraftVocabulary(torch.arange(V), V)
    with pytest.raises(ValueError, match="2 heads"):
        Drafter(Speculator(ResidualHeads(16, 2), vocabulary, tiny_vocabulary.model.lm_head.weight), Tree.chain(3))
