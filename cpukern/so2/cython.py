"""SO(2) convolutions and gates by the compiled kernels."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpukern import isa
from cpukern.so2 import convolution
from fusedops._frame.registry import register
from fusedops._host.threads import threads_for

_so2 = isa.load("so2")
_REAL = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
#: The steps around products, by dtype.
STEPS = {
    dtype: SimpleNamespace(
        scale=_so2.scale[name], unscale=_so2.unscale[name], gated=_so2.gated[name]
    )
    for dtype, name in _REAL.items()
}
# Numbers of features that are worth waking a thread for.
_GRAIN = 1 << 15


@register("so2_convolution", "cython", tensors=True)
def so2_convolution(a: Any, y: Any, *, tensors: bool = False) -> None:
    convolution.forward(STEPS[a.message.dtype], a, y, tensors=tensors)


@register("so2_convolution_vjp", "cython", tensors=True)
def so2_convolution_vjp(a: Any, y: Any, *, tensors: bool = False) -> None:
    convolution.backward(STEPS[a.message.dtype], a, y, tensors=tensors)


def _gated(a: Any, *arguments: Any) -> None:
    E, M, C = a.x.shape
    threads = threads_for(E, max(1, _GRAIN // max(M * C, 1)))
    kernel = functools.partial(STEPS[a.x.dtype].gated, threads=threads)
    convolution.gated(kernel, a, *arguments)


@register("gate_activation", "cython")
def gate_activation(a: Any, y: Any) -> None:
    _gated(a, (None, None, None), (y.out, None, None), 0)


@register("gate_activation_vjp", "cython")
def gate_activation_vjp(a: Any, y: Any) -> None:
    _gated(a, (a.dout, None, None), (y.dx, None, y.dgates), 1)


@register("gate_activation_vjp_vjp", "cython")
def gate_activation_vjp_vjp(a: Any, y: Any) -> None:
    _gated(a, (a.dout, a.ddgates, a.ddx), (y.dx, y.ddout, y.dgates), 2)
