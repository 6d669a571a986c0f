"""Products of matrices on the CPU: NumPy's BLAS of arrays, oneDNN of the memory of torch's tensors.

Torch brings oneDNN, which compiles its products for the processor: OpenBLAS serves a processor that
is newer than itself as one of 2013, and has no products of bfloat16.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from fusedops._host.threads import blas_on_one_thread, in_parallel, openmp_on_one_thread

#: The dtype of bfloat16's bits.
BITS = np.dtype(np.uint16)


def widened(array: Any) -> Any:
    """Return an array of bfloat16's bits in float32, and any other as it is."""
    if array is None or array.dtype != BITS:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def assign(target: np.ndarray, values: np.ndarray) -> None:
    """Write numbers to an array, rounded where it holds bfloat16's bits."""
    if target.dtype == BITS:
        torch = sys.modules["torch"]
        _tensor(target).copy_(torch.from_numpy(np.ascontiguousarray(values)))
    else:
        target[...] = values


class ByNumpy:
    """Products by NumPy."""

    #: Whether a product that is returned takes less time than one that fills an array.
    allocates = False

    @staticmethod
    def dot(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Fill `out`, whose rows may lie apart, with a product, or return it."""
        # NumPy's dot needs contiguous outputs.
        return a.dot(b) if out is None else np.matmul(a, b, out=out)

    @staticmethod
    def prepared(
        b: np.ndarray, rows: int, bias: np.ndarray | None = None
    ) -> Callable[[np.ndarray], np.ndarray]:
        """Return the function that multiplies a matrix of about so many rows by `b`."""
        return lambda a: a.dot(b) if bias is None else a.dot(b) + bias

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` with products of batches."""
        np.matmul(a, b, out=out)

    @staticmethod
    def close(a: np.ndarray) -> np.ndarray:
        """Return a matrix as products like it: without gaps between its rows, if they need that."""
        return a

    @staticmethod
    def alone() -> contextlib.AbstractContextManager[Any]:
        """Return a context in which products start no threads."""
        return contextlib.nullcontext()


class InFloat32(ByNumpy):
    """Products of float32 by oneDNN."""

    allocates = True

    @staticmethod
    def dot(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if not (a.size and b.size):
            # oneDNN refuses empty matrices.
            return ByNumpy.dot(a, b, out)
        torch = sys.modules["torch"]
        a, b = InFloat32.close(a), InFloat32.close(b)
        # oneDNN is slow with a transposed first factor, so transpose the product instead, unless
        # its sums are short.
        turned = (
            not a.flags.c_contiguous
            and a.shape[1] >= _LONG
            and (b.flags.f_contiguous or 4 * b.size <= a.size)
        )
        if turned:
            a, b = np.ascontiguousarray(b.T), a.T
        found = torch.ops.mkldnn._linear_pointwise(
            torch.from_numpy(a), torch.from_numpy(b.T), None, "none", [], ""
        )
        if turned:
            found = found.t()
        if out is None:
            return found.contiguous().numpy()
        torch.from_numpy(out).copy_(found)
        return out

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        if math.prod(out.shape[-2:]) * a.shape[-1] < _LARGE:
            ByNumpy.matmul(a, b, out)
            return
        for at in np.ndindex(out.shape[:-2]):
            InFloat32.dot(a[at], b[at], out[at])

    @staticmethod
    def close(a: np.ndarray) -> np.ndarray:
        # oneDNN may use its slow reference for an array with gaps.
        return a if a.flags.forc else np.ascontiguousarray(a)

    @staticmethod
    def prepared(
        b: np.ndarray, rows: int, bias: np.ndarray | None = None
    ) -> Callable[[np.ndarray], np.ndarray]:
        if not b.size:
            return ByNumpy.prepared(b, rows, bias)
        torch = sys.modules["torch"]
        # In oneDNN's own layout, so that no product converts it again.
        laid_out = torch.ops.mkldnn._reorder_linear_weight(torch.from_numpy(b.T), rows)
        # oneDNN ignores the strides of a bias.
        added = None if bias is None else torch.from_numpy(np.ascontiguousarray(bias))
        multiply = torch.ops.mkldnn._linear_pointwise

        def by(a: np.ndarray) -> np.ndarray:
            return multiply(torch.from_numpy(a), laid_out, added, "none", [], "").numpy()

        return by

    @staticmethod
    def alone() -> contextlib.AbstractContextManager[Any]:
        return openmp_on_one_thread()


class InBfloat16(ByNumpy):
    """Products of bfloat16's bits by torch; a product that is returned is float32."""

    @staticmethod
    def dot(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        torch = sys.modules["torch"]
        if out is None:
            return torch.mm(_tensor(a), _tensor(b)).float().numpy()
        torch.mm(_tensor(a), _tensor(b), out=_tensor(out))
        return out

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        if a.ndim > 3:
            for some in zip(a, b, out, strict=True):
                InBfloat16.matmul(*some)
        else:
            torch = sys.modules["torch"]
            torch.bmm(_tensor(a), _tensor(b), out=_tensor(out))

    @staticmethod
    def alone() -> contextlib.AbstractContextManager[Any]:
        return openmp_on_one_thread()


#: The fewest multiplications of a batched product that are faster in oneDNN than in NumPy.
_LARGE = 1 << 21
#: The fewest multiplications of a projection that repay a call of oneDNN.
_WORTH = 1 << 22
#: The fewest terms of a sum that repay a transposed product.
_LONG = 256


def of_tensors(dtype: np.dtype, work: int) -> type[ByNumpy]:
    """Return the products of matrices that are tensors' memory, of so many multiplications."""
    if dtype == BITS:
        return InBfloat16
    worth = dtype == np.float32 and work >= _WORTH
    return InFloat32 if worth and _keeps_float32() else ByNumpy


@functools.cache
def has_bfloat16() -> bool:
    """Return whether torch has fast products of bfloat16 here, as far as oneDNN tells."""
    # Without oneDNN, torch's own products serve.
    supported = getattr(sys.modules["torch"].ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


def share_groups(by: type[ByNumpy], groups: int, share: Callable[[int, int], None]) -> None:
    """Call ``share(low, high)`` on threads' parts of groups; products of several start no threads.

    A single group's products may have all threads.
    """
    several = groups > 1

    def part(low: int, high: int) -> None:
        # Each thread has NumPy's error state, and OpenMP's number of threads, of its own.
        alone = by.alone() if several else contextlib.nullcontext()
        with np.errstate(all="ignore"), alone:
            share(low, high)

    with blas_on_one_thread() if several else contextlib.nullcontext():
        in_parallel(part, groups, 1)


def _keeps_float32() -> bool:
    """Return whether oneDNN is there, and may not round factors of float32."""
    torch = sys.modules["torch"]
    there = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not there or not torch.backends.mkldnn.is_available():
        return False
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:
        # Before torch 2.9 one setting was for all.
        return torch.get_float32_matmul_precision() == "highest"
    return matmul.fp32_precision in ("none", "ieee")


def _tensor(bits: np.ndarray) -> Any:
    torch = sys.modules["torch"]
    return torch.from_numpy(bits).view(torch.bfloat16)
