"""Convolutions with generated kernels by Numba."""

from __future__ import annotations

from typing import Any

from cpukern import conv_numba, generated
from fusedops._frame.registry import register


@register("dynamic_conv_generated", "numba", tensors=True)
def dynamic_conv_generated(a: Any, y: Any, *, tensors: bool = False) -> None:
    generated.forward(conv_numba.dynamic_conv, a, y, tensors=tensors)


@register("dynamic_conv_generated_vjp", "numba", tensors=True)
def dynamic_conv_generated_vjp(a: Any, y: Any, *, tensors: bool = False) -> None:
    generated.backward(conv_numba.dynamic_conv_vjp, a, y, tensors=tensors)
