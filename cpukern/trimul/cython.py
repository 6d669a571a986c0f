"""The triangle update by the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpukern import isa
from cpukern.products import BITS
from cpukern.trimul import update
from fusedops._frame.registry import register

_trimul = isa.load("trimul")
# bfloat16 arrives as uint16, its bits; masks, biases and norms then are float32.
_TYPES = {np.uint16: "bfloat16|float", np.float32: "float|float", np.float64: "double|double"}
_trimul_of = {
    np.dtype(dtype): SimpleNamespace(
        **{kernel: getattr(_trimul, kernel)[types] for kernel in update.KERNELS}
    )
    for dtype, types in _TYPES.items()
}


def _run(pass_: Callable[..., None], a: Any, y: Any, tensors: bool) -> None:
    if a.x.dtype == BITS and not update.takes_bits(a):
        update.in_float32(pass_, _trimul_of[np.dtype(np.float32)], a, y)
    else:
        pass_(_trimul_of[a.x.dtype], a, y, tensors=tensors)


@register("triangle_multiplicative_update", "cython", bfloat16=True, tensors=True)
def triangle_multiplicative_update(a: Any, y: Any, *, tensors: bool = False) -> None:
    _run(update.forward, a, y, tensors)


@register("triangle_multiplicative_update_vjp", "cython", bfloat16=True, tensors=True)
def triangle_multiplicative_update_vjp(a: Any, y: Any, *, tensors: bool = False) -> None:
    _run(update.backward, a, y, tensors)
