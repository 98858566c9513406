"""Targets, their greedy text by transformers, and engines to compare it with."""

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from medusa_k25 import target_builders
from medusa_k25.metrics import topk_ids
from medusa_k25.prompts import load_prompts
from medusa_k25.target import Target, TargetModel
from tests.conftest import write_tiny_llama
from tests.engines.sglang.engine import running_engine

Prompts = Sequence[Sequence[int]]


@pytest.fixture(scope="session")
def engine() -> Callable[..., AbstractContextManager[Any]]:
    """engine(target, **server arguments), a context manager: see `running_engine`."""
    return running_engine


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """Converted before by `make heads`."""
    return target_builders.smollm2()


@pytest.fixture(scope="session")
def tiny_k25(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return target_builders.tiny_k25(home=str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.open(write_tiny_llama(tmp_path_factory.mktemp("llama") / "tiny-llama"))


@pytest.fixture(scope="session")
def prompts_of() -> Callable[[Target, int], list[list[int]]]:
    return _prompts


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[list[int]]]:
    """greedy(target, prompts, limit=...): the answers of transformers in float32, end token included, kept for all."""
    importlib.import_module("sglang.srt.utils.hf_transformers")  # teaches older transformers Kimi-K2.5
    models: dict[str, TargetModel] = {}
    answers: dict[tuple[str, tuple[int, ...], int, bool], list[int]] = {}

    def answer_all(target: Target, prompts: Prompts, limit: int, past_the_end: bool = False) -> list[list[int]]:
        """`past_the_end`: `limit` tokens each, as with ignore_eos."""
        model = models.setdefault(target.name, target.load_model(torch.float32))
        end_ids = () if past_the_end else target.end_ids
        keys = [(target.name, tuple(prompt), limit, past_the_end) for prompt in prompts]
        for key in keys:
            if key not in answers:
                answers[key] = _greedy_answer(model, key[1], end_ids, limit)
        return [answers[key] for key in keys]

    return answer_all


def _greedy_answer(model: TargetModel, prompt: Sequence[int], end_ids: Sequence[int], limit: int) -> list[int]:
    cache, unread, answer = DynamicCache(), list(prompt), list[int]()
    while len(answer) < limit and not (answer and answer[-1] in end_ids):
        hidden_TD = model.hidden(torch.tensor([unread]), past_key_values=cache)[0]
        logits_V = model.logits(hidden_TD[-1:])[0]
        best, second = logits_V.topk(2).values.tolist()
        # a batch of other sizes sums in another order
        assert best - second > 1e-4, (
            f"two tokens are nearly tied after {len(answer)} of this answer: ask another prompt"
        )
        unread = [int(topk_ids(logits_V[None], 1))]
        answer += unread
    return answer


def _prompts(target: Target, count: int) -> list[list[int]]:
    """Questions in SmolLM2's chat format; random ids of 3 to 11 tokens for targets with random weights."""
    if target.name != "smollm2":
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(3, 490, (3 + i % 9,), generator=generator).tolist() for i in range(count)]
    tokenizer = target.load_tokenizer()
    questions = load_prompts("package")[:count]
    return [tokenizer.apply_chat_template(q.messages, add_generation_prompt=True, return_dict=False) for q in questions]
