"""The most bytes that tensors take at once, on any device: what CUDA counts by itself, a CPU does not."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the storages of `tensors`, and of every tensor made inside, for as long as they live. `peak`: the most.

    Scratch memory inside of an operation is not seen, and a file that is mapped into memory is none.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, int] = {}
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or storage.nbytes() == 0 or not storage.resizable():
            return
        self.known[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.known.pop(key, 0)


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
