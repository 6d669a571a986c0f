"""The memory of tensors that torch's operations return."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Allocated(TorchDispatchMode):
    """Counts the bytes of storages that operations return, but of those given."""

    def __init__(self, given):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in given}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        return out

    def free(self, key, size):
        self.known.discard(key)
        self.now -= size


def peak(run, *given):
    """Return the most bytes at one time that a function allocates beside given tensors."""
    with _Allocated(given) as memory:
        run()
    return memory.peak
