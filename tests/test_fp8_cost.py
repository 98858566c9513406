"""What fp8 would cost, measured on wider states, is what it costs on a cache that is stored so."""

import pytest
import torch

from medusa_k25 import fp8_cost
from medusa_k25.cache import Cache, CacheWriter
from medusa_k25.data.windows import documents_of
from medusa_k25.fp8_cost import argmax_agreement, head_costs, rounded
from medusa_k25.heads import Speculator
from medusa_k25.replay import answer_ranks
from tests.test_decode import fitted_heads, vocabulary_of
from tests.tiny import cache_of

DRAFT_SIZE = 300


@pytest.fixture(scope="module")
def wide(tiny_llama, tmp_path_factory):
    return cache_of(tiny_llama, tmp_path_factory.mktemp("fp8") / "wide", num_documents=40, shard_tokens=300)


@pytest.fixture(scope="module")
def narrow(wide, tiny_llama, tmp_path_factory):
    """The same documents, stored as fp8."""
    path = tmp_path_factory.mktemp("fp8") / "narrow"
    with CacheWriter.open(path, tiny_llama, "float8_e4m3fn", "test") as writer:
        for document in wide.documents:
            hidden_MD, positions_M = wide.states(document)
            facts = ("id", "group", "prompt_length", "finish_reason", "sampling", "dtype", "label", "origin")
            writer.add(
                token_ids_T=wide.token_ids(document),
                loss_mask_T=wide.loss_mask(document),
                hidden_MD=hidden_MD,
                positions_M=positions_M,
                **{name: getattr(document, name) for name in facts},
            )
    return Cache.open(path, tiny_llama)


def test_rounded_states_are_those_of_an_fp8_cache(wide, narrow):
    for one, other in zip(wide.documents, narrow.documents, strict=True):
        assert torch.equal(rounded(wide.states(one)[0]), narrow.states(other)[0])


def test_agreement_is_that_of_the_two_caches(wide, narrow, tiny_llama, monkeypatch):
    lm_head_VD = tiny_llama.lm_head.float()
    wide_N, narrow_N = (
        torch.cat([cache.states(document)[0] @ lm_head_VD.T for document in cache.documents]).argmax(dim=1)
        for cache in (wide, narrow)
    )
    agreement, positions = argmax_agreement(wide, tiny_llama.lm_head)
    assert positions == len(wide_N) == wide.num_states
    assert agreement == pytest.approx(float((wide_N == narrow_N).float().mean()))
    assert 0.8 < agreement < 1
    monkeypatch.setattr(fp8_cost, "MOST_PRODUCTS", 0)
    monkeypatch.setattr(fp8_cost, "LEAST_POSITIONS", 60)
    agreement, positions = argmax_agreement(wide, tiny_llama.lm_head)
    assert positions == 60 and 0.8 < agreement <= 1


def test_heads_lose_what_they_lose_on_the_fp8_cache(wide, narrow, tiny_llama, monkeypatch):
    vocabulary = vocabulary_of(tiny_llama, DRAFT_SIZE)
    heads = fitted_heads(tiny_llama, wide, DRAFT_SIZE)
    lm_head_MD = vocabulary.rows(tiny_llama.lm_head).float()
    first_NK = [
        torch.cat(answer_ranks(Speculator(heads, vocabulary, lm_head_MD), cache, documents_of(cache, "heldout"))) == 0
        for cache in (wide, narrow)
    ]
    costs = head_costs(wide, documents_of(wide, "heldout"), Speculator(heads, vocabulary, lm_head_MD))
    assert len(costs) == heads.num_heads
    for k, cost in enumerate(costs):
        stored_N, rounded_N = (first[:, k] for first in first_NK)
        assert cost.hits == int(stored_N.sum()) > 0
        assert cost.gained == int((rounded_N & ~stored_N).sum())
        assert cost.lost == int((stored_N & ~rounded_N).sum())
        answers = len(documents_of(wide, "heldout"))
        assert cost.labels == answers * (23 - k)  # 24 tokens an answer; head k + 1 skips the root and k more
        assert cost.points == pytest.approx(100 * float(rounded_N.sum() - stored_N.sum()) / cost.labels)
    assert sum(cost.gained + cost.lost for cost in costs) > 0

    monkeypatch.setattr(fp8_cost, "MOST_PRODUCTS", 0)
    monkeypatch.setattr(fp8_cost, "LEAST_POSITIONS", 50)
    few = head_costs(wide, documents_of(wide, "heldout"), Speculator(heads, vocabulary, lm_head_MD))
    assert [cost.labels for cost in few] == [2 * (23 - k) for k in range(heads.num_heads)]
    assert head_costs(wide, [], Speculator(heads, vocabulary, lm_head_MD))[0].labels == 0
