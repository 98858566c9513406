"""CUDA graphs that return states.

A graph returns the states after the final norm only if it was captured so. SGLang captures with what users may ask of
the server (`--return-hidden-states-mode`), and n-gram lookup's verify passes, which MEDUSA shares, ask for none. So the
runners of prefill and verify graphs are told, as they are made, to capture all states; what users may ask for stays as
the operator said.

A graph is of one number of nodes, and so is what an attention backend prepares for it. A server whose rounds verify
parts of the tree has a backend and graphs for each size, as SGLang's own adaptive EAGLE does.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

RUNNER = "sglang.srt.model_executor.runner.base_runner.BaseRunner.__init__"


def capture_states(result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After BaseRunner.__init__, before graphs are captured."""
    if not runner.model_runner.is_draft_worker:
        runner.return_hidden_states_mode = type(runner.return_hidden_states_mode).FULL
        runner.enable_return_hidden_states = True


def capture_states_for_medusa(result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    """The same, on servers that speculate with MEDUSA."""
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm == "MEDUSA":
        capture_states(result, runner)


@dataclass(frozen=True)
class Captured:
    """runner: of the graphs, None where the server has none."""

    attn_backend: Any
    runner: Any

    def use(self, model_runner: Any) -> None:
        model_runner.attn_backend, model_runner.decode_cuda_graph_runner = self.attn_backend, self.runner


def capture_parts(model_runner: Any, sizes: Iterable[int]) -> dict[int, Captured]:
    """By number of nodes; {} on a CPU, where attention takes any number. Called when the whole tree's graphs exist.

    The pool of keys and values was sized before: RuntimeError with what to do where no memory is left.
    """
    if str(model_runner.device) == "cpu":
        return {}
    from sglang.srt.runtime_context import get_context, get_spec

    name, spec = "medusa_k25.capture_parts", get_spec()
    whole, steps = spec.speculative_num_draft_tokens, spec.speculative_num_steps
    runner = model_runner.decode_cuda_graph_runner
    captured = {whole: Captured(model_runner.attn_backend, runner)}
    for size in sorted({*sizes} - {whole}, reverse=True):  # larger graphs first: smaller ones reuse their memory
        before = model_runner.init_new_workspace
        get_context().override(name, speculative_num_draft_tokens=size)
        try:
            backend = model_runner._get_attention_backend(init_new_workspace=True)
            graphs = runner and type(runner)(
                model_runner, attn_backend=backend, speculative_num_steps=steps, speculative_num_draft_tokens=size
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"MEDUSA: no memory for the passes of {size} tokens beside those of {whole} ({error}); lower "
                "--mem-fraction-static, or leave out what needs them: MEDUSA_K25_CONTROL and exports with a rule"
            ) from error
        finally:
            model_runner.init_new_workspace = before
            get_context().override(name, speculative_num_draft_tokens=whole)
        captured[size] = Captured(backend, graphs)
        logger.info("MEDUSA: passes of %d tokens have their own attention backend and graphs", size)
    return captured
