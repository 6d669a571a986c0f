"""Layouts of arrays for compiled kernels of several ops."""

from __future__ import annotations

from typing import Any


def laid_out(array: Any, contiguous: int) -> Any:
    """Return an array with its last `contiguous` axes contiguous, copied if they aren't."""
    if array is None or array.flags.c_contiguous:
        return array
    step = array.itemsize
    for axis in range(array.ndim - 1, -1, -1):
        inner = array.ndim - axis <= contiguous
        if array.strides[axis] != step if inner else array.strides[axis] % array.itemsize:
            return array.copy(order="C")
        step *= array.shape[axis]
    return array
