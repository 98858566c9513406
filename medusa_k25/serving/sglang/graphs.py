"""CUDA graphs that return states.

A graph returns the states after the final norm only if it was captured so. SGLang captures with what users may ask of
the server (`--return-hidden-states-mode`), and n-gram lookup's verify passes, which MEDUSA shares, ask for none. So the
runners of prefill and verify graphs are told, as they are made, to capture all states; what users may ask for stays as
the operator said.
"""

from typing import Any

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
