"""The triangle update by the compiled kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cpukern import isa, trimul
from fusedops._frame.registry import register

_trimul = isa.load("trimul_cython")
_REAL = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
_trimul_of = {
    dtype: SimpleNamespace(**{kernel: getattr(_trimul, kernel)[name] for kernel in trimul.KERNELS})
    for dtype, name in _REAL.items()
}


@register("triangle_multiplicative_update", "cython", tensors=True)
def triangle_multiplicative_update(a: Any, y: Any, *, tensors: bool = False) -> None:
    trimul.forward(_trimul_of[a.x.dtype], a, y, tensors=tensors)


@register("triangle_multiplicative_update_vjp", "cython", tensors=True)
def triangle_multiplicative_update_vjp(a: Any, y: Any, *, tensors: bool = False) -> None:
    trimul.backward(_trimul_of[a.x.dtype], a, y, tensors=tensors)
