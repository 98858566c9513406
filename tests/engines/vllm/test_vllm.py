"""vLLM loads the vllm export, its greedy text is the target's, and its counters are replay's, to the integer."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from medusa_k25.cache import Document
from medusa_k25.heads import DraftVocabulary, ResidualHeads, Speculator
from medusa_k25.replay import answer_ranks, replay
from medusa_k25.serving.formats import ServedHeads, export_heads
from medusa_k25.tree import Tree
from tests.engines.vllm.conftest import Demo, Serve

TREE = Tree([[0], [1], [0, 0]])  # vLLM takes no tree: it must not mind one
LIMIT = 40  # answers cut here have known tokens beyond the cut, which vLLM's drafts are held against too


def texts(demo: Demo, documents: Sequence[Document]) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts, answers) of documents with one answer each."""
    ids = [demo.cache.token_ids(document).tolist() for document in documents]
    pairs = [(one[: d.prompt_length], one[d.prompt_length :]) for one, d in zip(ids, documents, strict=True)]
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def ranks_of(demo: Demo, served: ServedHeads, documents: Sequence[Document]) -> list[Tensor]:
    heads = served.heads.float()
    lm_head_MD = served.vocabulary.rows(demo.target.lm_head).float()
    return answer_ranks(Speculator(heads, served.vocabulary, lm_head_MD), demo.cache, documents)


def counts_of_cut(ranks: Sequence[Tensor], chain: Tree, limit: int) -> tuple[int, list[int]]:
    """(passes, accepted by position) of answers cut at `limit` tokens, drafts beyond the cut counted as vLLM does."""
    passes, accepted = 0, [0] * chain.depth
    for ranks_SK in ranks:
        accepted_S, state = chain.accepted(ranks_SK).tolist(), 0
        while state + 1 < limit:  # prefill emitted the first token
            passes += 1
            for position in range(accepted_S[state]):
                accepted[position] += 1
            state += accepted_S[state] + 1
    return passes, accepted


def whole_vocabulary(demo: Demo) -> DraftVocabulary:
    V = demo.target.vocab_size
    return DraftVocabulary(torch.arange(V), V)


@pytest.mark.parametrize("kind", ["draft vocabulary", "whole vocabulary", "own lm_heads"])
def test_greedy_text_and_counters_are_the_targets_and_replays(
    demo: Demo, serve: Serve, tmp_path: Path, kind: str
) -> None:
    heads, vocabulary, options = demo.checkpoint.heads, demo.checkpoint.vocabulary, {}
    assert isinstance(heads, ResidualHeads)
    assert len(vocabulary) < demo.target.vocab_size
    if kind == "draft vocabulary":
        options = {"model_loader_extra_config": {"enable_weights_track": False}}
    elif kind == "whole vocabulary":
        vocabulary = whole_vocabulary(demo)
    else:  # over the draft vocabulary, which is then exported over the whole one; no biases either
        own = ResidualHeads(
            heads.hidden_size, heads.num_heads, bias=False, own_lm_head=True, draft_vocab_size=len(vocabulary)
        )
        own.init_lm_heads(vocabulary.rows(demo.target.lm_head).float())
        own.heads.load_state_dict({k: t for k, t in heads.heads.state_dict().items() if k.endswith("weight")})
        heads = own
    served = export_heads(tmp_path, heads, vocabulary, TREE, torch.bfloat16, {}, "vllm", demo.target.lm_head)
    chain = Tree.chain(heads.num_heads)

    long = [d for d in demo.heldout if d.length - d.prompt_length > LIMIT + chain.depth][:20]
    assert len(long) == 20
    prompts, answers = texts(demo, long)
    batches = [(prompts, LIMIT)]
    whole = [*long[:12], *(d for d in demo.heldout if d.finish_reason == "stop")][:20]
    whole_prompts, whole_answers = texts(demo, whole)
    assert len(whole) == 20
    if kind == "draft vocabulary":  # once is enough: it takes twice as long
        batches.append((whole_prompts, max(map(len, whole_answers))))
    cut, *rest = serve(demo.target, tmp_path, batches, options)

    assert cut.answers == [answer[:LIMIT] for answer in answers]
    assert (cut.drafts, cut.accepted) == counts_of_cut(ranks_of(demo, served, long), chain, LIMIT)
    assert cut.accepted[0] > 0

    for full in rest:
        assert full.answers == whole_answers
        replayed = replay(ranks_of(demo, served, whole), chain)
        assert full.drafts == replayed.passes
        known = [sum(n for a, n in replayed.accepted.items() if a > position) for position in range(chain.depth)]
        # what vLLM counts beyond it are drafts of an answer's last pass that go beyond the answer's end
        beyond = [counted - replay for counted, replay in zip(full.accepted, known, strict=True)]
        assert all(0 <= more <= len(whole) for more in beyond)
