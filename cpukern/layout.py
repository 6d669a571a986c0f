"""Layouts of arrays for kernels of several ops."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np


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


def clear(outputs: Iterable[Any]) -> None:
    """Fill the outputs that are wanted with zeros, the sums of nothing."""
    for array in outputs:
        if array is not None:
            array[...] = 0


def as_rows(array: Any, row: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return C-contiguous rows of one shape; no rows for None."""
    if array is None:
        return np.empty((0, *row), dtype)
    leading = array.shape[: array.ndim - len(row)]
    return np.ascontiguousarray(array).reshape(math.prod(leading), *row)
