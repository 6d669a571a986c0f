"""Convolutions with generated kernels by Numba."""

from __future__ import annotations

from typing import Any

from cpukern.conv import numba as conv
from cpukern.generated import blocks
from fusedops._frame.registry import register


@register("dynamic_conv_generated", "numba", tensors=True)
def dynamic_conv_generated(a: Any, y: Any, *, tensors: bool = False) -> None:
    blocks.forward(conv.dynamic_conv, a, y, tensors=tensors)


@register("dynamic_conv_generated_vjp", "numba", tensors=True)
def dynamic_conv_generated_vjp(a: Any, y: Any, *, tensors: bool = False) -> None:
    blocks.backward(conv.dynamic_conv_vjp, a, y, tensors=tensors)
