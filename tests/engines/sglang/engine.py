"""A real engine on the CPU, in float32, on one thread."""

import os

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # read when sglang is imported

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


@contextmanager
def serving(target: Target, log: Path, **arguments: Any) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`python -m sglang.launch_server` in a process of its own: (its address, the process)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target.path), "--port", str(port)]
    for name, value in (DEFAULTS | {"log_level": "info"} | arguments).items():
        if value is not False and name != "enable_multimodal":
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
