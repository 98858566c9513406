"""The sizes of the model that serves, as far as a pass costs them: from its config.json alone, no weights needed.

Letters: D hidden, V vocabulary.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_ITEM_BYTES = 2  # keys and values in bf16
SCALE_BYTES = 2  # bf16, one a group of quantised weights
# Experts under names that are not read here: their sizes would be taken for those of a dense model.
OTHER_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True)
class Served:
    """Bytes are those of the whole model, over all GPUs, as the checkpoint stores them."""

    hidden_size: int
    vocab_size: int
    layers: int
    moe_layers: int  # 0: a dense model
    experts: int  # of one layer, those that every token reads not counted
    active_experts: int  # of them, for one token
    fixed_bytes: int  # what every pass reads: attention, shared experts, dense layers, router, lm_head
    expert_bytes: int  # one expert of one layer
    embedding_bytes: int  # a table of which a pass reads a few rows; 0 where it is the lm_head
    fixed_parameters: int
    expert_parameters: int  # of one expert of one layer
    kv_bytes_per_token: int  # keys and values of all layers
    kv_shares: int  # into how many shares tensor parallelism can cut them; 1: every rank reads them all

    @property
    def allreduces(self) -> int:
        """Of a pass under tensor parallelism: one behind attention and one behind the MLP of every layer."""
        return 2 * self.layers

    @property
    def weight_bytes(self) -> int:
        """All that a GPU machine must hold, and a move to another one must carry."""
        return self.fixed_bytes + self.moe_layers * self.experts * self.expert_bytes + self.embedding_bytes

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with."""
        return self.fixed_parameters + self.moe_layers * self.active_experts * self.expert_parameters

    def woken_experts(self, tokens: float) -> float:
        """Expected experts of one layer that a pass over `tokens` tokens reads, if every token chose independently.

        An upper bound: tokens of one text agree more than that.
        """
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.active_experts / self.experts) ** tokens)

    def routed_bytes(self, tokens: float) -> float:
        return self.moe_layers * self.woken_experts(tokens) * self.expert_bytes

    def kv_bytes_of_rank(self, gpus: int) -> float:
        """Of one token of context, read by one of `gpus` ranks."""
        return self.kv_bytes_per_token / min(self.kv_shares, max(gpus, 1))

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Served":
        """From a Hugging Face config.json as a mapping: DeepSeek-V3's and Kimi's layout, or a dense one like Llama's.

        ValueError names every size that it lacks, and what is laid out otherwise.
        """
        text = config.get("text_config") or config
        if other := [key for key in OTHER_EXPERTS if text.get(key)]:
            raise ValueError(f"config.json has {other[0]}={text[other[0]]}: only n_routed_experts is known here")
        size = _Sizes(text)
        D, V, layers = size["hidden_size"], size["vocab_size"], size["num_hidden_layers"]
        heads = size["num_attention_heads"]
        stored = _Stored(text, config)
        latent = bool(text.get("kv_lora_rank"))
        if latent:
            nope, rope, value = size["qk_nope_head_dim"], size["qk_rope_head_dim"], size["v_head_dim"]
            kv_rank, q_rank = size["kv_lora_rank"], text.get("q_lora_rank")
            query = heads * (nope + rope)
            queries = q_rank * (D + query) if q_rank else D * query
            keys = D * (kv_rank + rope) + kv_rank * heads * (nope + value)
            attention = queries + keys + heads * value * D
            kv_items, kv_shares = kv_rank + rope, 1
        else:
            kv_heads = text.get("num_key_value_heads") or heads
            head = text.get("head_dim") or D // heads
            attention = 2 * D * head * (heads + kv_heads)
            kv_items, kv_shares = 2 * kv_heads * head, kv_heads
        experts = text.get("n_routed_experts") or 0
        moe_layers = layers - (text.get("first_k_dense_replace") or 0) if experts else 0
        if experts and text.get("moe_layer_freq", 1) != 1:
            raise ValueError(f"config.json has moe_layer_freq={text['moe_layer_freq']}: only 1 is known here")
        dense_layers = layers - moe_layers
        dense = 3 * D * size["intermediate_size"] if dense_layers else 0
        expert = 3 * D * size["moe_intermediate_size"] if experts else 0
        active_experts = size["num_experts_per_tok"] if experts else 0
        shared = expert * (text.get("n_shared_experts") or 0)
        size.require_all()

        lm_head, router = V * D, moe_layers * experts * D
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        fixed_bytes = (
            layers * stored.bytes("self_attn.o_proj", attention)
            + dense_layers * stored.bytes("mlp.up_proj", dense)
            + moe_layers * stored.bytes("mlp.shared_experts.up_proj", shared)
            + stored.item * (router + lm_head)  # neither is ever quantised
        )
        return cls(
            hidden_size=D,
            vocab_size=V,
            layers=layers,
            moe_layers=moe_layers,
            experts=experts,
            active_experts=active_experts,
            fixed_bytes=fixed_bytes,
            expert_bytes=stored.bytes("mlp.experts.0.up_proj", expert),
            embedding_bytes=0 if tied else stored.item * V * D,
            fixed_parameters=layers * attention + dense_layers * dense + moe_layers * shared + router + lm_head,
            expert_parameters=expert,
            kv_bytes_per_token=CACHE_ITEM_BYTES * kv_items * layers,
            kv_shares=kv_shares,
        )


class _Sizes:
    """Sizes out of a config, those that it lacks collected for one message."""

    def __init__(self, text: Mapping[str, Any]):
        self.text, self.lacking = text, list[str]()

    def __getitem__(self, key: str) -> int:
        value = self.text.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.lacking.append(f"{key} (it says {value!r})")
            return 1
        return value

    def require_all(self) -> None:
        if self.lacking:
            raise ValueError(f"config.json: expected sizes above 0 for {', '.join(self.lacking)}")


class _Stored:
    """How many bytes a checkpoint takes for a layer's weights, by the quantization_config of its config.json."""

    def __init__(self, text: Mapping[str, Any], config: Mapping[str, Any]):
        dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
        self.item = ITEM_BYTES.get(dtype.removeprefix("torch."), 2)
        quantised = text.get("quantization_config") or config.get("quantization_config")
        self.ignored: list[str] = []
        self.weight_bytes: float | None = None  # of one quantised weight; None: none is
        if not quantised:
            return
        method = quantised.get("quant_method")
        groups = list((quantised.get("config_groups") or {}).values())
        if method == "compressed-tensors" and len(groups) == 1:
            weights = groups[0]["weights"]
            scale = SCALE_BYTES / weights["group_size"] if weights.get("group_size") else 0
            self.weight_bytes = weights["num_bits"] / 8 + scale
            self.ignored = list(quantised.get("ignore") or [])
        elif method == "fp8":
            self.weight_bytes = 1.0
            self.ignored = list(quantised.get("modules_to_not_convert") or [])
        else:
            raise ValueError(
                f"config.json: quantised by {method!r} in {len(groups)} groups; known here: compressed-tensors in one "
                "group, fp8"
            )

    def bytes(self, module: str, parameters: int) -> int:
        """Of `parameters` weights in the module of a layer that `module` names, such as mlp.experts.0.up_proj."""
        name = f"model.layers.0.{module}"
        skipped = any(
            re.match(entry[3:], name) if entry.startswith("re:") else entry and entry in name for entry in self.ignored
        )
        if self.weight_bytes is None or skipped:
            return self.item * parameters
        return round(self.weight_bytes * parameters)


# The public config.json, so that planning needs no checkpoint.
KIMI_K25_NAME = "moonshotai/Kimi-K2.5"
KIMI_K25_CONFIG: dict[str, Any] = {
    "model_type": "kimi_k25",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "hidden_size": 7168,
        "vocab_size": 163840,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
            # only the routed experts are quantised
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
        },
    },
}
KIMI_K25 = Served.of_config(KIMI_K25_CONFIG)
