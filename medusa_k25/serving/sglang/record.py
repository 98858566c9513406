"""Recording: a server that is started with MEDUSA_K25_RECORD=DIR writes the states of requests as a cache.

    MEDUSA_K25_RECORD           the cache's folder, on the server's own disk
    MEDUSA_K25_RECORD_ALL       1: every request; otherwise those that ask for it
    MEDUSA_K25_RECORD_STORAGE   answers (default): from an answer's last prompt token to its last but one; or all
    MEDUSA_K25_RECORD_DTYPE     float32, bfloat16 or float8_e4m3fn; default: the model's own
    MEDUSA_K25_RECORD_GB        memory for states that are not on disk, default 8

A request asks for it with the sampling parameter custom_params={"medusa_k25": true}, or an object of what its document
is to say about itself (`recorder.Mark`). An engine's `rid` names a document that has no id.

The target's forward pass is asked for the states after the final norm of all its rows (`recording`), and gives the
caller inside the engine what that had asked for, as before. All tensor-parallel ranks ask for the same states, so that
they run the same graphs; the first one writes.
"""

import logging
import multiprocessing.util
import os
import pkgutil
import signal
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import psutil
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from medusa_k25.cache.manifest import STORAGE_DTYPES
from medusa_k25.cache.writer import CacheWriter
from medusa_k25.serving.sglang.graphs import RUNNER, capture_states
from medusa_k25.serving.sglang.recorder import Recorder, Settings
from medusa_k25.serving.sglang.recording import KEY, Recording, Rows
from medusa_k25.target import Target
from medusa_k25.target_builders import find_checkpoint

logger = logging.getLogger(__name__)

SPECULATION = (None, "NGRAM", "MEDUSA")  # whose accepted rows are known here
SHARD_TOKENS = 32768
EXIT_S = 30.0  # that a server's end may take

_recording: Recording | None = None  # of this process; None: not a scheduler, or not yet


def install(environment: Mapping[str, str] = os.environ) -> None:
    """Hook recording into the engine; called in each of its processes. ValueError for impossible settings."""
    settings = Settings.read(environment)
    try:  # here, not when a scheduler has loaded all weights
        settings.folder.mkdir(parents=True, exist_ok=True)
        (settings.folder / f"writable.{os.getpid()}.tmp").touch()
        (settings.folder / f"writable.{os.getpid()}.tmp").unlink()
    except OSError as error:
        raise ValueError(
            f"MEDUSA_K25_RECORD={settings.folder}: {error.strerror}; name a folder that the server may write to"
        ) from None

    def start(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        global _recording
        _recording = _start(settings, scheduler)

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    runner = "sglang.srt.model_executor.runner"
    hooks: list[tuple[str, Callable[..., Any], HookType]] = [
        (f"{scheduler}.__init__", start, HookType.AFTER),
        (f"{scheduler}.process_batch_result", _process, HookType.AROUND),
        (f"{scheduler}.get_internal_state", _report, HookType.AFTER),
        ("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", _forward, HookType.AROUND),
        # the registry replaces a function in all modules that have imported it by name, and for those that will
        ("sglang.srt.speculative.eagle_utils.eagle_sample", _accept, HookType.AFTER),
        (RUNNER, capture_states, HookType.AFTER),
        (f"{runner}.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info", _full_verify, HookType.AFTER),
        ("sglang.srt.utils.common.kill_process_tree", _end_schedulers, HookType.BEFORE),
    ]
    for name, hook, kind in hooks:
        pkgutil.resolve_name(name)  # the registry would only log that a name is missing
        HookRegistry.register(name, hook, kind)


def _start(settings: Settings, scheduler: Any) -> Recording:
    """Open the cache, on the rank that writes. ValueError, and no server, where recording would be wrong."""
    arguments = scheduler.server_args
    refused = {
        "--pp-size": arguments.pp_size > 1,
        "--attn-cp-size": arguments.attn_cp_size > 1,
        "--disaggregation-mode": arguments.disaggregation_mode not in (None, "null"),
        "--dllm-algorithm": arguments.dllm_algorithm is not None,
        f"--speculative-algorithm {arguments.speculative_algorithm}": arguments.speculative_algorithm
        not in SPECULATION,
    }
    if wrong := [name for name, given in refused.items() if given]:
        raise ValueError(
            f"recording (MEDUSA_K25_RECORD) does not work with {', '.join(wrong)}; start the server without"
        )
    runner = scheduler.tp_worker.model_runner
    target = Target.open(find_checkpoint(arguments.model_path))
    dtype = str(runner.dtype).removeprefix("torch.")
    ranks = _ranks(scheduler)
    recorder = None
    if ranks.attn_tp_rank == 0:
        import sglang

        dp_rank = ranks.attn_dp_rank or ranks.dp_rank or 0  # of data-parallel attention, or of whole replicas
        writer = CacheWriter.open(
            settings.folder,
            target,
            settings.storage_dtype or (dtype if dtype in STORAGE_DTYPES else "float32"),
            f"sglang {sglang.__version__}, {dtype}",
            writer=f"record-{dp_rank}",
        )
        recorder = Recorder(writer, dtype, settings.storage, settings.memory, SHARD_TOKENS)
        _close_at_exit(recorder)
        logger.info(
            "recording %s to %s (%s positions, %s, %d documents are there)",
            "every request" if settings.everything else "requests that ask for it",
            settings.folder,
            settings.storage,
            writer.manifest.storage_dtype,
            len(writer.ids),
        )
    return Recording(settings.everything, target.hidden_size, target.vocab_size, recorder)


def _ranks(scheduler: Any) -> Any:
    """Where this process stands among the others; SGLang 0.5.20 keeps it on the scheduler."""
    if "ps" in vars(scheduler):
        return scheduler.ps
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _close_at_exit(recorder: Recorder) -> None:
    """A scheduler that ends, and one that is told to end, writes what it has finished."""
    multiprocessing.util.Finalize(None, recorder.close, args=(EXIT_S,), exitpriority=100)

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around TpModelWorker.forward_batch_generation"""
    recording = _recording
    if (
        recording is None
        or recording.failed
        or worker.is_draft_worker
        or batch is None
        or batch.forward_mode.is_idle()
        or not any(recording.asks(req) for req in batch.reqs)
    ):
        return original(worker, batch, *args, **kwargs)
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        get_required_capture_hidden_mode,
        get_server_return_hidden_states_mode,
    )

    asked = kwargs.get("capture_hidden_mode")
    if asked is None:
        mode = max(batch.return_hidden_states_mode, get_server_return_hidden_states_mode())
        asked = get_required_capture_hidden_mode(mode, batch.spec_info)
    kwargs["capture_hidden_mode"] = CaptureHiddenMode.FULL
    result = original(worker, batch, *args, **kwargs)
    output = result.logits_output
    if recording.recorder is not None:
        with recording.guard():
            recording.take(batch, output)
    if asked == CaptureHiddenMode.NULL:
        output.hidden_states = None
    elif asked == CaptureHiddenMode.LAST and batch.forward_mode.is_extend() and output.hidden_states is not None:
        ends = torch.tensor(batch.extend_lens, device=output.hidden_states.device).cumsum(0) - 1
        output.hidden_states = output.hidden_states[ends]
    return result


def _accept(result: Any, verify_input: Any, batch: Any, output: Any, *args: Any, **kwargs: Any) -> None:
    """After the `eagle_sample` of a speculative worker, whose third result are the accepted rows."""
    if _recording is not None and not _recording.failed:
        with _recording.guard():
            _recording.accept(output, result[2])


def _process(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Around Scheduler.process_batch_result, which commits tokens and ends requests"""
    recording = _recording
    if recording is None or recording.recorder is None or recording.failed:
        return original(scheduler, batch, result)
    output = getattr(result, "logits_output", None)
    rows: Rows | None = getattr(output, KEY, None)
    lengths = [] if rows is None else [len(req.output_ids) for req, _, _ in rows.requests]
    value = original(scheduler, batch, result)
    with recording.guard():
        if rows is not None:
            recording.keep(rows, lengths)
            delattr(output, KEY)
        for req in batch.reqs:
            if req.finished():
                recording.finish(req)
    return value


def _report(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After Scheduler.get_internal_state: what /server_info tells the client that replays"""
    if _recording is not None and _recording.recorder is not None:
        result.internal_state[KEY] = _recording.recorder.status() | {"failed": _recording.failed}


def _full_verify(spec_info: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    if isinstance(spec_info, NgramVerifyInput):
        spec_info.capture_hidden_mode = CaptureHiddenMode.FULL
    return spec_info


def _end_schedulers(parent_pid: int | None = None, *args: Any, **kwargs: Any) -> None:
    """Before a server kills its processes: schedulers may end by themselves first, and write what they have."""
    if parent_pid == os.getpid():
        children = psutil.Process().children(recursive=True)
        schedulers = [child for child in children if child.name().startswith("sglang::sched")]
        for child in schedulers:
            child.terminate()
        psutil.wait_procs(schedulers, EXIT_S)
