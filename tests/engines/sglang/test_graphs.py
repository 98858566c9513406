"""Passes of each size get an attention backend and graphs of their own. On stand-ins: no CPU captures CUDA graphs."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_k25.serving.sglang.graphs import capture_parts


class Graphs:
    """A graph runner, which knows what it was made for."""

    def __init__(self, model_runner: Any, **made_for: Any):
        if model_runner.full_at == made_for["speculative_num_draft_tokens"]:
            raise RuntimeError("CUDA out of memory")
        self.made_for = made_for


@dataclass
class ModelRunner:
    spec: Any
    device: str = "cuda"
    full_at: int | None = None
    attn_backend: Any = "backend of the whole tree"
    init_new_workspace: bool = False
    decode_cuda_graph_runner: Any = None
    asked: list[int] = field(default_factory=list)

    def _get_attention_backend(self, init_new_workspace: bool) -> str:
        assert init_new_workspace
        self.init_new_workspace = True
        self.asked.append(self.spec.speculative_num_draft_tokens)
        return f"backend of {self.spec.speculative_num_draft_tokens}"


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What SGLang holds of the server's settings, which a capture changes for a while."""
    from sglang.srt import runtime_context

    held = SimpleNamespace(speculative_num_draft_tokens=9, speculative_num_steps=3)
    context = SimpleNamespace(override=lambda name, **values: vars(held).update(values))
    monkeypatch.setattr(runtime_context, "get_spec", lambda: held)
    monkeypatch.setattr(runtime_context, "get_context", lambda: context)
    return held


def test_each_size_is_captured_as_it_will_be_used(spec: Any) -> None:
    runner = ModelRunner(spec)
    runner.decode_cuda_graph_runner = whole = Graphs(runner, speculative_num_draft_tokens=9)
    captured = capture_parts(runner, [1, 4, 9])
    assert captured.keys() == {1, 4, 9} and runner.asked == [4, 1]
    for size in (4, 1):
        assert captured[size].runner.made_for == {
            "attn_backend": f"backend of {size}",
            "speculative_num_steps": 3,
            "speculative_num_draft_tokens": size,
        }
    assert (spec.speculative_num_draft_tokens, runner.init_new_workspace) == (9, False)
    captured[4].use(runner)
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("backend of 4", captured[4].runner)
    captured[9].use(runner)
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("backend of the whole tree", whole)


def test_without_graphs_each_size_has_its_backend(spec: Any) -> None:
    captured = capture_parts(ModelRunner(spec), [1, 9])
    assert (captured[1].attn_backend, captured[1].runner) == ("backend of 1", None)
    assert capture_parts(ModelRunner(spec, device="cpu"), [1, 9]) == {}


def test_without_memory_it_is_said_what_to_do(spec: Any) -> None:
    runner = ModelRunner(spec, full_at=4)
    runner.decode_cuda_graph_runner = Graphs(runner, speculative_num_draft_tokens=9)
    with pytest.raises(RuntimeError, match=r"passes of 4 tokens beside those of 9 .*lower --mem-fraction-static"):
        capture_parts(runner, [1, 4, 9])
    assert (spec.speculative_num_draft_tokens, runner.init_new_workspace) == (9, False)
