"""The steps around the products of an SO(2) convolution, and gates, on the CPU in Numba."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpukern.jit import inlined, jit
from cpukern.so2 import convolution
from cpukern.vectors_numba import sigmoid
from fusedops._frame.registry import register
from fusedops._host.threads import in_parallel

# Numbers of features that are worth waking a thread for.
_GRAIN = 1 << 15


@jit
def _scale(x, radial, out):
    edges, signs, length = x.shape
    for e in range(edges):
        for s in range(signs):
            for i in range(length):
                out[s, e, i] = x[e, s, i] if radial is None else x[e, s, i] * radial[e, i]
        if len(out) > signs:
            for i in range(length):
                out[2, e, i] = out[0, e, i] + out[1, e, i]


@jit
def _unscale(plus, minus, shared, x, radial, dx, dradial):
    edges, length = plus.shape
    for e in range(edges):
        for s in range(1 if minus is None else 2):
            for i in range(length):
                h = plus[e, i]
                if minus is not None and s:
                    h = minus[e, i]
                if shared is not None:
                    h += shared[e, i]
                if dradial is not None:
                    before = dradial[e, i] if s else h * 0
                    dradial[e, i] = before + h * x[e, s, i]
                if dx is not None:
                    dx[e, s, i] = h if radial is None else h * radial[e, i]


@inlined()
def _slopes(x):
    """Return σ(x), and the first two derivatives of x σ(x)."""
    s = sigmoid(x)
    slope = s * (1 - s)
    return s, s + x * slope, slope * (2 + x * (1 - 2 * s))


@jit
def _gated(
    gates, x, dout, ddgates, ddx, rows, starts, rows_out, ddout, gates_out, order, low, high
):
    """Evaluate the gate's value (order 0) or a derivative; an array without edges is none."""
    C = x.shape[2]
    zero = x.dtype.type(0)
    for e in range(low, high):
        for c in range(C):
            s, first, second = _slopes(x[e, 0, c])
            if order == 0:
                rows_out[e, 0, c] = x[e, 0, c] * s
            elif order == 1:
                if len(rows_out):
                    rows_out[e, 0, c] = dout[e, 0, c] * first
            else:
                u = ddx[e, 0, c] if len(ddx) else zero
                if len(rows_out):
                    rows_out[e, 0, c] = u * dout[e, 0, c] * second
                if len(ddout):
                    ddout[e, 0, c] = u * first
        for l in range(1, len(starts) - 1):
            for c in range(C):
                at = (l - 1) * C + c
                s = sigmoid(gates[e, at])
                slope = s * (1 - s)
                v = ddgates[e, at] * slope if len(ddgates) else zero
                pulled = pushed = zero
                for k in range(starts[l], starts[l + 1]):
                    r = rows[k]
                    if order == 0:
                        rows_out[e, r, c] = x[e, r, c] * s
                        continue
                    g = dout[e, r, c]
                    pulled += x[e, r, c] * g
                    if order == 1:
                        if len(rows_out):
                            rows_out[e, r, c] = g * s
                        continue
                    u = ddx[e, r, c] if len(ddx) else zero
                    pushed += u * g
                    if len(rows_out):
                        rows_out[e, r, c] = v * g
                    if len(ddout):
                        ddout[e, r, c] = u * s + v * x[e, r, c]
                if len(gates_out) and order == 1:
                    gates_out[e, at] = slope * pulled
                elif len(gates_out):
                    gates_out[e, at] = slope * pushed + v * (1 - 2 * s) * pulled


def _present(array: Any, like: Any) -> Any:
    """Return an array with contiguous rows, or one without edges for None."""
    if array is None:
        return np.empty((0, *like.shape[1:]), like.dtype)
    return np.ascontiguousarray(array)


#: The steps around products.
STEPS = SimpleNamespace(scale=_scale, unscale=_unscale)


@register("so2_convolution", "numba", tensors=True)
def so2_convolution(a: Any, y: Any, *, tensors: bool = False) -> None:
    convolution.forward(STEPS, a, y, tensors=tensors)


@register("so2_convolution_vjp", "numba", tensors=True)
def so2_convolution_vjp(a: Any, y: Any, *, tensors: bool = False) -> None:
    convolution.backward(STEPS, a, y, tensors=tensors)


def _run(
    gates: Any, x: Any, dout: Any, ddgates: Any, ddx: Any, rows: Any, starts: Any,
    rows_out: Any, ddout: Any, gates_out: Any, order: int,
) -> None:  # fmt: skip
    dout, ddx, rows_out, ddout = (_present(g, x) for g in (dout, ddx, rows_out, ddout))
    ddgates, gates_out = _present(ddgates, gates), _present(gates_out, gates)
    work = functools.partial(
        _gated, np.ascontiguousarray(gates), np.ascontiguousarray(x), dout, ddgates, ddx, rows,
        starts, rows_out, ddout, gates_out, order,
    )  # fmt: skip
    in_parallel(work, len(x), max(1, _GRAIN // max(x.shape[1] * x.shape[2], 1)))


@register("gate_activation", "numba")
def gate_activation(a: Any, y: Any) -> None:
    convolution.gated(_run, a, (None, None, None), (y.out, None, None), 0)


@register("gate_activation_vjp", "numba")
def gate_activation_vjp(a: Any, y: Any) -> None:
    convolution.gated(_run, a, (a.dout, None, None), (y.dx, None, y.dgates), 1)


@register("gate_activation_vjp_vjp", "numba")
def gate_activation_vjp_vjp(a: Any, y: Any) -> None:
    convolution.gated(_run, a, (a.dout, a.ddgates, a.ddx), (y.dx, y.ddout, y.dgates), 2)
