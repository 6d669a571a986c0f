"""Memory of large CPU arrays, used again.

Fresh pages come from the operating system at a fraction of the speed of memory: for a large result
that takes longer than what a kernel does with it. So the memory of a large array that nobody holds
any longer goes into a pool, from which the next one of about its size is made.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

#: Arrays below this many bytes are left to NumPy, whose allocator reuses their memory.
SMALL = 2**22

#: The most bytes that are kept while nobody holds them.
KEPT = 2**30

_ALIGNMENT = 64
_free: list[np.ndarray] = []
_lock = threading.Lock()
# An array may die anywhere, inside of `_take` too, so that this takes no lock.
_returned: deque[np.ndarray] = deque()


def _start_anew() -> None:
    """Forget a pool that another thread may have been at work on when this process was forked."""
    global _lock
    _lock = threading.Lock()
    _free.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


class _Lease:
    """The base of the first array on a block of memory, which goes when the last view does."""

    def __init__(self, block: np.ndarray) -> None:
        self.block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        _returned.append(self.block)
        if _lock.acquire(blocking=False):
            _collect()
            _lock.release()


def empty_of(shape: Any, dtype: np.dtype) -> Callable[..., np.ndarray]:
    """Return what makes arrays of a shape."""
    return empty if math.prod(shape) * dtype.itemsize >= SMALL else np.empty


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
        _collect()
        for i in reversed(range(len(_free))):
            if size <= _free[i].size <= size + size // 4:
                return _free.pop(i)
    try:
        return np.empty(size, np.uint8)
    except MemoryError:
        with _lock:
            _free.clear()
        return np.empty(size, np.uint8)


def _collect() -> None:
    """Keep what was given back, and let go of what has waited longest."""
    while _returned:
        _free.append(_returned.popleft())
    while sum(block.size for block in _free) > KEPT:
        del _free[0]


def release() -> None:
    """Let go of all memory that nobody holds."""
    with _lock:
        _collect()
        _free.clear()
