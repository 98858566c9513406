"""Two tiny targets with real code paths: a Llama and a miniature of Kimi-K2.5."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# the models are tiny: a second thread would only wait for the first, on a busy machine for long
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from safetensors.torch import save_file

from medusa_k25 import target_builders
from medusa_k25.target import Target
from medusa_k25.target_builders import TINY_VOCAB_SIZE, tiny_tokenizer

LONGEST = ("test_ranks", "test_training", "test_launch", "test_tracking", "test_wheel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: of two workers none is left with one of them while the other has nothing to do."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_of_a_run() -> Iterator[None]:
    """A strategy started in this process leaves its rank and port in the environment, for every process after it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def write_tiny_llama(folder: Path, tied: bool = False, seed: int = 0) -> Path:
    """A random Llama with D=64, V=512, 2 layers, norm weights far from 1, and the tokenizer of tiny_k25."""
    D, inner, key_value = 64, 128, 32
    shapes = {"model.embed_tokens": (TINY_VOCAB_SIZE, D), "model.norm": (D,)}
    for layer in (f"model.layers.{i}" for i in range(2)):
        shapes |= {f"{layer}.input_layernorm": (D,), f"{layer}.post_attention_layernorm": (D,)}
        shapes |= {f"{layer}.self_attn.{name}_proj": (D, D) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (key_value, D) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, D) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (D, inner)
    if not tied:
        shapes["lm_head"] = (TINY_VOCAB_SIZE, D)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.weight": 0.5 + 1.5 * torch.rand(shape, generator=generator)
        if "norm" in name
        else 0.3 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    tokenizer = tiny_tokenizer()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": D,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": TINY_VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    save_file({name: t.bfloat16() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.open(write_tiny_llama(tmp_path_factory.mktemp("llama") / "tiny-llama"))


@pytest.fixture(scope="session")
def tiny_k25(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return target_builders.tiny_k25(home=str(tmp_path_factory.mktemp("home")))
