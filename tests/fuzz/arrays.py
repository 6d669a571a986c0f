"""Arrays of every layout, and the fields that all ops' strategies share."""

from __future__ import annotations

import functools
import sys
import tempfile
from typing import Any

import numpy as np
from hypothesis import strategies as st

#: Sizes: empty, one, odd, prime, and around the widths of vectors and chunks.
SMALL = (0, 1, 2, 3, 5, 8)
MEDIUM = (0, 1, 2, 3, 4, 5, 7, 8, 11, 16, 17, 31, 33)

#: Layouts of the same elements; "repeated" has a stride of zero, which makes all rows equal.
LAYOUTS = (
    "plain",
    "fortran",
    "reversed",
    "strided",
    "unaligned",
    "readonly",
    "repeated",
    "mapped",
    "field",
    "inner",
)
TENSOR_LAYOUTS = ("plain", "fortran", "strided", "repeated", "inner", "negative", "parameter")

#: "mixed" is a dtype of its own for every array.
DTYPES = ("float64", "float32", "bfloat16", "float16", "mixed")
NUMPY_DTYPES = ("float64", "float32")


def common() -> dict[str, Any]:
    """Return the fields of a description that every op has."""
    return {
        "seed": st.integers(0, 2**32 - 1),
        "dtype": st.sampled_from(DTYPES),
        "layout": st.sampled_from(LAYOUTS),
        "tensor_layout": st.sampled_from(TENSOR_LAYOUTS),
        "index": st.sampled_from(("int64", "int32")),
        "packed": st.booleans(),
        "values": st.sampled_from(("normal", "normal", "normal", "whole", "zero", "small", "big")),
        "threads": st.sampled_from((1, 1, 1, 1, 1, 1, 1, 3)),
    }


def repeated(array: np.ndarray) -> np.ndarray:
    """Return an array whose rows are all the first one."""
    return np.repeat(array[:1], len(array), 0) if array.ndim else array


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """Return a copy of an array in a layout, in memory of its own."""
    if layout == "repeated" and array.ndim:
        return np.broadcast_to(array[:1].copy(), array.shape)
    if layout == "fortran":
        return np.array(array, order="F")
    if layout == "reversed":
        back = (slice(None, None, -1),) * array.ndim
        return np.array(array[back], order="C")[back]
    if layout == "unaligned":
        memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
        found = memory.view(array.dtype).reshape(array.shape)
    elif layout == "mapped" and array.nbytes:
        # Mode "c" copies on write, so that mappings of one file share nothing.
        found = np.memmap(_empty_file(), array.dtype, "c", shape=array.shape)
    elif layout == "field":
        found = np.zeros(array.shape, [("before", "u1"), ("value", array.dtype)])["value"]
    elif layout == "strided":
        found = np.zeros(tuple(2 * n + 1 for n in array.shape), array.dtype)
        found = found[(slice(1, None, 2),) * array.ndim]
    elif layout == "inner":
        found = np.zeros(tuple(n + 2 for n in array.shape), array.dtype)
        found = found[(slice(1, -1),) * array.ndim]
    else:
        found = np.empty(array.shape, array.dtype)
    found[...] = array
    if layout == "readonly":
        found.flags.writeable = False
    return found


@functools.cache
def _empty_file() -> Any:
    file = tempfile.TemporaryFile()  # noqa: SIM115, it stays open
    file.truncate(1 << 24)
    return file


def tensor(array: np.ndarray, dtype: Any, layout: str, device: str = "cpu") -> Any:
    """Return a tensor of the same elements; None keeps the array's dtype."""
    torch = sys.modules["torch"]
    made = torch.tensor(np.ascontiguousarray(array), dtype=dtype, device=device)
    made = made.reshape(array.shape)
    if layout == "repeated" and array.ndim:
        return made[:1].expand(made.shape)
    if layout == "fortran":
        axes = tuple(reversed(range(array.ndim)))
        return made.permute(axes).contiguous().permute(axes)
    if layout == "negative" and made.is_floating_point():
        return torch._neg_view(-made)
    if layout == "parameter" and made.is_floating_point():
        return torch.nn.Parameter(made, requires_grad=False)
    if layout in ("strided", "inner"):
        more, step = (1, 2) if layout == "strided" else (2, 1)
        found = made.new_zeros([step * n + more for n in array.shape])
        for axis, n in enumerate(array.shape):
            found = found[(slice(None),) * axis + (slice(1, step * n + 1, step),)]
        return found.copy_(made)
    return made
