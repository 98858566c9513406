"""A real engine on the CPU, in float32, on one thread."""

import os

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when sglang is imported

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from medusa_k25.target import Target

DEFAULTS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "enable_multimodal": False,  # the miniature of Kimi-K2.5 has no image processor
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "random_seed": 0,
    "log_level": "error",
}


class EngineDied(KeyboardInterrupt):
    """Like the interrupt of a user, so that no event loop keeps it to itself."""


@contextmanager
def running_engine(target: Target, **arguments: Any) -> Iterator[Any]:
    """An `sglang.Engine` that serves `target` and is shut down at the end, whatever happens.

    `arguments` replace DEFAULTS. Raises RuntimeError when a process of the engine dies; its traceback was printed then.
    """
    import sglang

    before = signal.getsignal(signal.SIGQUIT)
    engine = None
    try:
        settings = DEFAULTS | {"model_path": str(target.path), "custom_sigquit_handler": _died} | arguments
        engine = sglang.Engine(**settings)
        engine.tokenizer_manager.signal_handler_class = _Signals  # takes over with the first request
        yield engine
    except EngineDied as error:
        raise RuntimeError("a process of the engine died: see its traceback above") from error
    finally:
        if engine is not None:
            engine.shutdown()
        signal.signal(signal.SIGQUIT, before)


def _died(number: int, frame: FrameType | None) -> None:
    """In place of SGLang's handler, with which a dying process of the engine ends this one."""
    raise EngineDied


class _Signals:
    def __init__(self, tokenizer_manager: Any):
        self.manager = tokenizer_manager

    def sigterm_handler(self) -> None:
        self.manager.gracefully_exit = True

    def running_phase_sigquit_handler(self) -> None:
        raise EngineDied
