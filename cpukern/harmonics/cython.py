"""Wigner D matrices of edges by the compiled kernels."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cpukern import isa
from cpukern.layout import laid_out
from fusedops._frame.registry import register
from fusedops._host.threads import threads_for
from fusedops.harmonics.op import matrix_size, places, recursion

_harmonics = isa.load("harmonics")
_matrices_of = {
    np.dtype(np.float32): _harmonics.matrices["float"],
    np.dtype(np.float64): _harmonics.matrices["double"],
}
# Elements of matrices that pay for waking a thread.
_GRAIN = 1 << 14


@functools.lru_cache(maxsize=16)
def _constants(lmax: int, layout: str) -> tuple[Any, ...]:
    return *places(lmax, layout), *recursion(lmax), lmax


def _run(a: Any, dmatrices: Any, ddedge_vec: Any, matrices: Any, dedge_vec: Any) -> None:
    count, size = len(a.edge_vec), math.prod(matrix_size(a.lmax, a.layout == "packed"))
    if dmatrices is not None:
        dmatrices = laid_out(dmatrices, dmatrices.ndim - 1).reshape(count, size)
    if ddedge_vec is not None:
        ddedge_vec = laid_out(ddedge_vec, 1).reshape(count, 3)
    _matrices_of[a.edge_vec.dtype](
        laid_out(a.edge_vec, 1),
        dmatrices,
        ddedge_vec,
        *_constants(a.lmax, a.layout),
        None if matrices is None else matrices.reshape(count, size),
        dedge_vec,
        threads_for(count * (a.lmax + 1) ** 3, _GRAIN),
    )


@register("wigner_d", "cython")
def wigner_d(a: Any, y: Any) -> None:
    _run(a, None, None, y.matrices, None)


@register("wigner_d_vjp", "cython")
def wigner_d_vjp(a: Any, y: Any) -> None:
    _run(a, a.dmatrices, None, None, y.dedge_vec)


@register("wigner_d_vjp_vjp", "cython")
def wigner_d_vjp_vjp(a: Any, y: Any) -> None:
    # The derivative by matrices alone needs no cotangent of matrices.
    dmatrices = None if y.dedge_vec is None else a.dmatrices
    _run(a, dmatrices, a.ddedge_vec, y.ddmatrices, y.dedge_vec)
