"""Memory of large CPU arrays, used again.

Fresh pages come from the operating system at a fraction of the speed of memory: for an array as
large as a map, that takes longer than what a kernel does with it. So the memory of a large array
that nobody holds any longer goes into a pool, from which the next one of about its size is made.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

#: Arrays below this many bytes are left to NumPy, whose allocator reuses their memory.
SMALL = 2**22

#: The most bytes that are kept while nobody holds them.
KEPT = 2**30

_ALIGNMENT = 64
_free: list[np.ndarray] = []
_lock = threading.RLock()


class _Lease:
    """The base of the first array on a block of memory, which goes when the last view does."""

    def __init__(self, block: np.ndarray) -> None:
        self.block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        _give_back(self.block)


def empty(shape: Any, dtype: np.dtype) -> np.ndarray:
    """Return a new array like `numpy.empty`, of used memory if it is large."""
    size = math.prod(shape) * dtype.itemsize
    if size < SMALL:
        return np.empty(shape, dtype)
    array = np.asarray(_Lease(_take(size + _ALIGNMENT)))
    start = -array.ctypes.data % _ALIGNMENT
    return array[start : start + size].view(dtype).reshape(shape)


def _take(size: int) -> np.ndarray:
    """Return a block of at least `size` bytes, and not many more: the one given back last."""
    with _lock:
        for i in reversed(range(len(_free))):
            if size <= _free[i].size <= size + size // 4:
                return _free.pop(i)
    return np.empty(size, np.uint8)


def _give_back(block: np.ndarray) -> None:
    """Keep a block, and let go of those that have waited longest."""
    if block.size > KEPT:
        return
    with _lock:
        _free.append(block)
        while sum(b.size for b in _free) > KEPT:
            del _free[0]
