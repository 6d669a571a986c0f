"""Products of matrices on the CPU: NumPy's BLAS of arrays, oneDNN of the memory of torch's tensors.

Torch brings oneDNN, which compiles its products for the processor: OpenBLAS serves a processor that
is newer than itself as one of 2013, and has no products of bfloat16.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from fusedops._frame.threads import openmp_on_one_thread

#: A product of two matrices: ``dot(a, b, out)`` fills `out`, or returns a new array.
Dot = Callable[..., np.ndarray]


def by_numpy(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return a.dot(b, out=out)


def by_onednn(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    torch = sys.modules["torch"]
    found = torch.ops.mkldnn._linear_pointwise(
        torch.from_numpy(a), torch.from_numpy(b.T), None, "none", [], ""
    ).numpy()
    if out is None:
        return found
    out[...] = found
    return out


def of_tensors(dtype: np.dtype) -> Dot:
    """Return the product of matrices that are tensors' memory."""
    return by_onednn if dtype == np.float32 and _has_float32() else by_numpy


def on_one_thread(dot: Dot) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which products by torch stay on the calling thread."""
    return contextlib.nullcontext() if dot is by_numpy else openmp_on_one_thread()


def _has_float32() -> bool:
    """Return whether oneDNN is there, and may not round factors of float32."""
    torch = sys.modules["torch"]
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return False
    return torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")
