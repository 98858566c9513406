"""vLLM's connector that writes hidden states, for a CPU: the stock one copies them from a GPU on a stream of its own.

Paths, contents and locks of the files are the stock one's.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Copied:
    """Stands for the CUDA event of a copy to the host: here there is nothing to wait for."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: PendingSave) -> None:
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + offsets).flatten()
        tensors = {
            # a copy: the blocks go to another request while the file is written
            "hidden_states": extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone(),
            "token_ids": pending.token_ids.clone(),
        }
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        copied: Any = Copied()
        lock = self._lock_fds.pop(pending.req_id, None)
        future = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_copy_events[pending.req_id] = copied
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
