"""Which rows of an engine's forward passes are states of which request, and when they count.

Rows of a prefill and of plain decoding are copied to the host behind the pass, on its own stream, because a replayed
graph would overwrite them; of a verify pass only the accepted rows are, once they are known. A row counts when the
engine has committed the token that it read, so drafts that failed, steps after the end and retracted tokens never do.

Requests, batches and outputs are the engine's (SGLang's Req, ScheduleBatch, LogitsProcessorOutput), but nothing of it
is imported.

Letters: M rows with a state, D hidden, R requests, W most tokens that a verify pass accepts.
"""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medusa_k25.serving.sglang.recorder import Mark, Recorder, Request

logger = logging.getLogger(__name__)

KEY = "medusa_k25"  # in a request's custom_params, in the server's internal state, on a forward pass's output


@dataclass
class Rows:
    """States of a forward pass on their way to the host."""

    requests: list[tuple[Any, int | None, int]] = field(default_factory=list)
    """(the engine's request, position of its first row or None: of the last token before this pass, rows)"""
    nodes_MD: Tensor | None = None  # of a verify pass, on the device, until it is known which rows count
    slots: list[int] = field(default_factory=list)  # the requests' places in the batch of a verify pass
    hidden_MD: Tensor | None = None  # on the host, when `copied`
    copied: Any = None  # an event, or None: nothing to wait for

    def copy(self, hidden_MD: Tensor) -> None:
        """Start to copy rows, selected in the order of the requests, to the host."""
        if hidden_MD.device.type == "cpu":
            self.hidden_MD = hidden_MD  # selecting has copied them
            return
        self.hidden_MD = torch.empty(hidden_MD.shape, dtype=hidden_MD.dtype, pin_memory=True)
        self.hidden_MD.copy_(hidden_MD, non_blocking=True)
        self.copied = torch.get_device_module(hidden_MD.device).Event()
        self.copied.record()


class Recording:
    """Recording in one scheduler process. `recorder` is None on the ranks that only compute what the first one writes.

    What fails in here is logged and ends the recording, never the server.
    """

    def __init__(self, everything: bool, hidden_size: int, vocab_size: int, recorder: Recorder | None) -> None:
        self.everything = everything
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.recorder = recorder
        self.failed = False
        # of the engine's requests that ask and have begun; None: it is not recorded
        self.requests: weakref.WeakKeyDictionary[Any, Request | None] = weakref.WeakKeyDictionary()

    @contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever it is: the server has users
            logger.exception("recording has failed and ends here; the server goes on")
            self.failed = True
            if self.recorder is not None:
                for request in list(self.requests.values()):
                    if request is not None:
                        self.recorder.drop(request, "recording has failed")

    def asks(self, req: Any) -> bool:
        """Whether a request of the engine wants to be recorded; the same on all ranks."""
        marks = req.sampling_params.custom_params
        return self.everything or (isinstance(marks, dict) and marks.get(KEY) not in (None, False))

    def begin(self, req: Any) -> Request | None:
        """A request that asks comes to its first prefill; None, and counted, where it cannot be recorded."""
        assert self.recorder is not None
        mark, id = Mark(), req.rid
        try:
            marks = req.sampling_params.custom_params
            if isinstance(marks, dict) and marks.get(KEY) not in (None, False):
                mark = Mark.parse(marks[KEY])
                id = mark.id or id
        except ValueError as error:
            self.recorder.count(f"unreadable mark ({error})"[:200], id)
            return None
        if req.multimodal_inputs is not None or max(req.origin_input_ids, default=0) >= self.vocab_size:
            self.recorder.count("images", id)
            return None
        if req.lora_id is not None or req.input_embeds is not None or vars(req).get("beam_group") is not None:
            self.recorder.count("an adapter, embeddings or beam search: not plain text of the target", id)
            return None
        request = self.recorder.begin(mark, id, len(req.origin_input_ids))
        if request is not None:
            # an engine forgets a request that is aborted while it waits, without another pass
            weakref.finalize(req, self.recorder.drop, request, "aborted").atexit = False
        return request

    def take(self, batch: Any, output: Any) -> None:
        """The rows of a pass that matter go to the host, or wait for the end of the verify pass; with `output`."""
        facts = vars(output)  # the last two came with 0.5.21 and 0.5.23
        hidden_MD = facts["hidden_states"] if facts.get("last_hidden_states") is None else facts["last_hidden_states"]
        subset = facts.get("hidden_states_token_indices") is not None
        if hidden_MD is None or hidden_MD.shape[-1] != self.hidden_size or subset:
            raise RuntimeError(
                f"the engine gave states {None if hidden_MD is None else list(hidden_MD.shape)}, expected one row of "
                f"{self.hidden_size} a token"
            )
        rows, selected = Rows(), []
        if batch.forward_mode.is_target_verify():
            for slot, req in enumerate(batch.reqs):
                if self.requests.get(req) is not None:
                    rows.requests.append((req, None, 0))
                    rows.slots.append(slot)
            rows.nodes_MD = hidden_MD
        elif batch.forward_mode.is_extend():
            decoding = batch.decoding_reqs or []  # of a batch that mixes both
            offset = 0
            for req, prefix, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
                decodes = any(req is other for other in decoding)
                if req not in self.requests and not decodes and self.asks(req) and not req.output_ids:
                    self.requests[req] = self.begin(req)
                if (request := self.requests.get(req)) is not None:
                    start, stop = request.wanted(prefix, prefix + length)
                    if start < stop:
                        rows.requests.append((req, None if decodes else start, stop - start))
                        selected.append(hidden_MD[offset + start - prefix : offset + stop - prefix])
                offset += length
        else:
            for row, req in enumerate(batch.reqs):
                if self.requests.get(req) is not None:
                    rows.requests.append((req, None, 1))
                    selected.append(hidden_MD[row : row + 1])
        if rows.requests:
            if selected:
                rows.copy(torch.cat(selected))
            setattr(output, KEY, rows)

    def accept(self, output: Any, accepted_RW: Tensor) -> None:
        """A verify pass is over; accepted_RW [batch, W] are the rows of its accepted tokens, -1 after the last."""
        rows: Rows | None = getattr(output, KEY, None)
        if rows is None or rows.nodes_MD is None:
            return
        slots_R = torch.tensor(rows.slots, device=accepted_RW.device)
        rows.copy(rows.nodes_MD[accepted_RW[slots_R].clamp(min=0).flatten().long()])
        rows.requests = [(req, None, accepted_RW.shape[1]) for req, _, _ in rows.requests]
        rows.nodes_MD = None

    def keep(self, rows: Rows, lengths: list[int]) -> None:
        """The engine has committed what it wants of a pass; `lengths`: of each request's output before."""
        assert self.recorder is not None and rows.hidden_MD is not None
        if rows.copied is not None:
            rows.copied.synchronize()
        offset = 0
        for (req, start, count), length in zip(rows.requests, lengths, strict=True):
            rows_MD = rows.hidden_MD[offset : offset + count]
            offset += count
            request = self.requests.get(req)
            if request is None:
                continue
            if start is None:
                start = len(req.origin_input_ids) + length - 1
                rows_MD = rows_MD[: len(req.output_ids) - length]
            self.recorder.keep(request, start, rows_MD)

    def finish(self, req: Any) -> None:
        """The engine has ended a request; nothing happens for one that is not recorded, or ended before."""
        assert self.recorder is not None
        request = self.requests.pop(req, None)
        if request is None:
            return
        reason = req.finished_reason.to_json()["type"]
        if reason not in ("stop", "length"):
            self.recorder.drop(request, "aborted")
            return
        parameters = req.sampling_params
        greedy = parameters.top_k == 1  # what the engine makes of temperature 0
        sampling = {
            "mode": "greedy" if greedy else "sampled",
            "temperature": 0.0 if greedy else float(parameters.temperature),
            "top_p": 1.0 if greedy else float(parameters.top_p),
        }
        self.recorder.finish(request, req.origin_input_ids, req.output_ids_through_stop, reason, sampling)
