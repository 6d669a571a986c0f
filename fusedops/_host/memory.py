"""A pool that reuses the memory of large CPU arrays.

The operating system hands out fresh pages at a fraction of the speed of memory: for a large result
they take longer than the kernel that fills them. So when nobody holds a large array any longer, its
memory goes into a pool, and the next array of about its size takes it from there.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np

#: Arrays below this many bytes are left to NumPy, whose allocator reuses their memory.
SMALL = 2**22

_ALIGNMENT = 64
_free: list[np.ndarray] = []
_lock = threading.Lock()
# An array may die anywhere, even inside of `_take`, so its block goes here without the lock.
_returned: deque[np.ndarray] = deque()


def _start_anew() -> None:
    """Forget the pool after a fork, since another thread may have been changing it."""
    global _lock
    _lock = threading.Lock()
    _free.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


class _Lease:
    """The base of the first array on a block; it dies with the last view and returns the block."""

    def __init__(self, block: np.ndarray) -> None:
        self.block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        # Without the lock, which an interrupt would leave held: nothing raises from here. The next
        # large array has the oldest blocks freed.
        waiting = sum([block.size for block in list(_returned)])
        if waiting + self.block.size <= limit():
            _returned.append(self.block)


def empty_of(shape: Any, dtype: np.dtype) -> Callable[..., np.ndarray]:
    """Return the function that allocates arrays of a shape."""
    return empty if math.prod(shape) * dtype.itemsize >= SMALL else np.empty


def empty(shape: Any, dtype: np.dtype) -> np.ndarray:
    """Return a new array like `numpy.empty`, with the pool's memory if it is large."""
    size = math.prod(shape) * dtype.itemsize
    if size < SMALL:
        return np.empty(shape, dtype)
    array = np.asarray(_Lease(_take(size + _ALIGNMENT)))
    start = -array.ctypes.data % _ALIGNMENT
    return array[start : start + size].view(dtype).reshape(shape)


def together(*parts: tuple[int, np.dtype]) -> list[np.ndarray]:
    """Return new arrays of these lengths and dtypes, with the pool's memory if all are large.

    They share a block: arrays that live and die together are large together.
    """
    sizes = [length * dtype.itemsize for length, dtype in parts]
    if sum(sizes) < SMALL:
        return [np.empty(length, dtype) for length, dtype in parts]
    starts = [0, *accumulate([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes])]
    block = empty((starts[-1],), np.dtype(np.uint8))
    return [
        block[start : start + size].view(dtype)
        for start, size, (_, dtype) in zip(starts, sizes, parts, strict=False)
    ]


def _take(size: int) -> np.ndarray:
    """Return a block of `size` bytes or a little more: the last one returned, or a new one."""
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
    """Move returned blocks into the pool, and free the oldest ones beyond the limit."""
    while _returned:
        _free.append(_returned.popleft())
    while sum(block.size for block in _free) > limit():
        del _free[0]


@functools.cache
def limit() -> int:
    """Return the most bytes that the pool keeps."""
    asked = os.environ.get("FUSEDOPS_POOL_BYTES")
    if not asked:
        return 2**30
    if not (asked.isascii() and asked.isdigit()):
        raise ValueError(f"FUSEDOPS_POOL_BYTES is {asked!r}; it should be a number of bytes, or 0")
    return int(asked)


def pooled() -> int:
    """Return the bytes that the pool keeps now."""
    with _lock:
        _collect()
        return sum(block.size for block in _free)


def release_memory() -> int:
    """Give the memory of large CPU arrays that nobody holds any longer back to the system.

    It is kept for the next arrays, up to ``FUSEDOPS_POOL_BYTES`` of the environment, by default
    2³⁰. Memory on a GPU is torch's: see ``torch.cuda.empty_cache``.

    Returns
    -------
    int
        The bytes given back.

    Raises
    ------
    ValueError
        If ``FUSEDOPS_POOL_BYTES`` is not a number of bytes.

    Examples
    --------
    >>> import fusedops
    >>> freed = fusedops.release_memory()
    >>> fusedops.release_memory()
    0
    """
    freed = pooled()
    with _lock:
        _free.clear()
    return freed
