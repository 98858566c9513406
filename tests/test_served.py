"""What a pass reads of the model that serves, against figures computed by hand."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_k25.costs.served import KIMI_K25, KIMI_K25_CONFIG, Served

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 576,
    "vocab_size": 49152,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}


def test_kimi_k25_reads_what_its_public_config_says() -> None:
    assert KIMI_K25.fixed_bytes == pytest.approx(21.1e9, rel=0.002)
    assert KIMI_K25.expert_bytes == pytest.approx(24.8e6, rel=0.002)
    assert KIMI_K25.routed_bytes(1) == pytest.approx(11.9e9, rel=0.002)
    assert KIMI_K25.weight_bytes == pytest.approx(594e9, rel=0.002)  # "about 600 GB"
    assert KIMI_K25.active_parameters == pytest.approx(32e9, rel=0.02)  # as its makers say
    assert KIMI_K25.allreduces == 122
    assert KIMI_K25.kv_bytes_per_token == KIMI_K25.kv_bytes_of_rank(8) == (512 + 64) * 2 * 61


@pytest.mark.parametrize(("tokens", "woken"), [(1, 8), (4, 31), (5, 38), (8, 60), (16, 110), (64, 284)])
def test_tokens_wake_experts(tokens: int, woken: int) -> None:
    assert round(KIMI_K25.woken_experts(tokens)) == woken


@given(st.floats(1, 1e4), st.floats(0.01, 100))
def test_more_tokens_wake_more_experts_but_never_all(tokens: float, more: float) -> None:
    fewer, woken = KIMI_K25.woken_experts(tokens), KIMI_K25.woken_experts(tokens + more)
    assert 8 <= fewer + 1e-9 and fewer <= woken <= min(384, 8 * (tokens + more))


def test_a_dense_model() -> None:
    served = Served.of_config(SMOLLM2)
    attention, mlp = 2 * 576 * 64 * (9 + 3), 3 * 576 * 1536
    assert served.fixed_parameters == 30 * (attention + mlp) + 49152 * 576
    assert served.fixed_parameters == pytest.approx(134.5e6, rel=0.001)
    assert served.fixed_bytes == served.weight_bytes == 2 * served.fixed_parameters
    assert served.routed_bytes(7) == served.moe_layers == served.experts == served.embedding_bytes == 0
    assert served.kv_bytes_per_token == 2 * 2 * 3 * 64 * 30
    assert served.kv_bytes_of_rank(2) == served.kv_bytes_per_token / 2
    assert served.kv_bytes_of_rank(8) == served.kv_bytes_per_token / 3  # ranks share 3 heads
    assert served.kv_bytes_of_rank(0) == served.kv_bytes_per_token  # a CPU


def test_what_is_quantised_is_smaller() -> None:
    plain = copy.deepcopy(KIMI_K25_CONFIG)
    del plain["text_config"]["quantization_config"]
    plain["text_config"]["dtype"] = "float32"
    whole = Served.of_config(plain)
    assert whole.expert_bytes == 4 * 3 * 7168 * 2048
    assert whole.fixed_bytes == 2 * KIMI_K25.fixed_bytes
    eighth = copy.deepcopy(SMOLLM2) | {"quantization_config": {"quant_method": "fp8"}}
    served = Served.of_config(eighth)
    assert served.fixed_bytes == served.fixed_parameters + 49152 * 576  # all but the lm_head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None, "intermediate_size": 0}, r"hidden_size \(it says None\), intermediate_size \(it says 0"),
        ({"num_experts": 8}, "num_experts=8: only n_routed_experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        ({"n_routed_experts": 4}, "moe_intermediate_size .*, num_experts_per_tok"),
    ],
)
def test_a_config_that_says_too_little_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Served.of_config(SMOLLM2 | changes)
