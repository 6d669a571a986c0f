"""Layers between the ops of equivariant networks: values, and first derivatives by features.

`layer_silu` stands between the linear layers of radial functions. Layers of nodes begin with
`degree_norm`, where all rows of a degree have one weight, and `row_linear` multiplies each row by
a matrix. Derivatives of higher order, and by weights, are the formulas'.
"""

from __future__ import annotations

from typing import Any

from fusedops._frame.arrays import (
    cast,
    namespace,
    silu,
    silu_slopes,
    standardized,
    standardized_back,
    widened,
    zeros,
)
from fusedops._frame.check import promoted
from fusedops._frame.primitive import Primitive


def _normalized(w: Any) -> tuple[Any, Any, Any]:
    """Return standardized rows (E, C), one over their deviation, and rows with weight and bias."""
    unit, scale = standardized(w.x, w.eps)
    return unit, scale, unit * w.weight + w.bias


def _layer_formula(a: Any) -> tuple[Any]:
    """Define SiLU of a layer's normalized rows."""
    return (cast(silu(_normalized(widened(a))[2]), a.x),)


def _layer_vjp_formula(a: Any) -> tuple[Any]:
    """Return the cotangent of x."""
    w = widened(a)
    unit, scale, h = _normalized(w)
    return (cast(standardized_back(w.dout * silu_slopes(h)[0] * w.weight, unit, scale), a.x),)


def _layer_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    if wanted.weight is not None or wanted.bias is not None:
        return NotImplemented
    found = layer_silu_vjp(a.x, a.weight, a.bias, dy.out, a.eps)
    return found.dx, None, None


_LAYER = {"x": "(E, C)", "weight": "(C)", "bias": "(C)"}
layer_silu_vjp = Primitive(
    "layer_silu_vjp",
    family="networks",
    arrays={**_LAYER, "dout": "(E, C)"},
    static={"eps": float},
    outputs={"dx": "like x"},
    formula=_layer_vjp_formula,
)
layer_silu = Primitive(
    "layer_silu",
    family="networks",
    arrays=_LAYER,
    static={"eps": float},
    outputs={"out": "like x"},
    formula=_layer_formula,
    pullback=_layer_pullback,
)


def _by_degree(rows: Any, lmax: int) -> Any:
    """Return the row of each degree (lmax + 1, C) for every order of it."""
    return rows[[l for l in range(lmax + 1) for _ in range(2 * l + 1)]]


def _scaled(a: Any) -> tuple[Any, Any, Any]:
    """Return features (N, M, C), the first row less its mean, a node's scale, and rows' shares.

    A row's share is its part in the mean square.
    """
    first = a.x[:, :1] - a.x[:, :1].mean(-1)[:, :, None]
    x = namespace(a.x).concatenate([first, a.x[:, 1:]], axis=1)
    shares = (a.balance / x.shape[2])[:, None]
    return x, ((x * x * shares).sum(1).sum(1) + a.eps) ** -0.5, shares


def _degree_formula(a: Any) -> tuple[Any]:
    """Define the features of nodes, normalized by degree, with a bias of their first row."""
    w = widened(a)
    x, scale, _ = _scaled(w)
    y = x * scale[:, None, None] * _by_degree(w.weight, a.lmax)
    first = y[:, :1] + w.bias
    if w.more is not None:
        first = first + w.more[:, None]
    return (cast(namespace(y).concatenate([first, y[:, 1:]], axis=1), a.x),)


def _degree_vjp_formula(a: Any) -> tuple[Any]:
    """Return the cotangent of x."""
    w = widened(a)
    x, scale, shares = _scaled(w)
    g = w.dout * _by_degree(w.weight, a.lmax)
    along = (g * x).sum(1).sum(1) * scale**3
    dx = g * scale[:, None, None] - x * shares * along[:, None, None]
    first = dx[:, :1] - dx[:, :1].mean(-1)[:, :, None]
    return (cast(namespace(x).concatenate([first, dx[:, 1:]], axis=1), a.x),)


def _degree_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    if wanted.weight is not None or wanted.bias is not None:
        return NotImplemented
    static = a.balance, a.lmax, a.eps
    dx = None if wanted.x is None else degree_norm_vjp(a.x, a.weight, dy.out, *static).dx
    return dx, None, None, None if wanted.more is None else cast(dy.out[:, 0], a.more)


_NODES = {"x": "(N, M, C)", "weight": "(L, C)"}
_BALANCE = {"balance": "(M)"}
_STATIC: dict[str, type] = {"lmax": int, "eps": float}
_SIZES: dict[str, Any] = {"M": lambda a: (a.lmax + 1) ** 2, "L": lambda a: a.lmax + 1}
degree_norm_vjp = Primitive(
    "degree_norm_vjp",
    family="networks",
    arrays={**_NODES, "dout": "(N, M, C)"},
    constants=_BALANCE,
    static=_STATIC,
    sizes=_SIZES,
    outputs={"dx": "like x"},
    formula=_degree_vjp_formula,
)
degree_norm = Primitive(
    "degree_norm",
    family="networks",
    arrays={**_NODES, "bias": "(C)", "more": "(N, C), optional"},
    constants=_BALANCE,
    static=_STATIC,
    sizes=_SIZES,
    outputs={"out": "like x"},
    formula=_degree_formula,
    pullback=_degree_pullback,
)


def _linear_formula(a: Any) -> tuple[Any, Any]:
    """Define the products of every row with its matrix, and of the first row with the gates'."""
    w, dtype = widened(a), promoted((a.x, a.weight))
    rows = w.x.swapaxes(0, 1) @ w.weight.swapaxes(1, 2)
    if w.bias is not None:
        rows = namespace(rows).concatenate([rows[:1] + w.bias, rows[1:]], axis=0)
    gates = None
    if w.gate_weight is not None:
        gates = w.x[:, 0] @ w.gate_weight.T
        gates = cast(gates if w.gate_bias is None else gates + w.gate_bias, dtype)
    return cast(rows.swapaxes(0, 1), dtype), gates


def _linear_vjp_formula(a: Any) -> tuple[Any]:
    """Return the cotangent of x."""
    w = widened(a)
    dx = None
    if w.dout is not None:
        dx = (w.dout.swapaxes(0, 1) @ w.weight).swapaxes(0, 1)
    if w.dgates is not None:
        first = w.dgates @ w.gate_weight
        if dx is None:
            dx = zeros(first, (len(first), len(w.weight), first.shape[1]))
        first = (dx[:, 0] + first)[:, None]
        dx = namespace(dx).concatenate([first, dx[:, 1:]], axis=1)
    given = [array for array in (a.weight, a.dout, a.dgates) if array is not None]
    return (cast(dx, promoted(given)),)


def _linear_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    if any([want is not None for want in wanted[1:]]):
        return NotImplemented
    found = row_linear_vjp(a.weight, a.gate_weight, dy.out, dy.gates)
    return cast(found.dx, a.x), None, None, None, None


_GATED = {"weight": "(M, H, C)", "gate_weight": "(G, C), optional"}
row_linear_vjp = Primitive(
    "row_linear_vjp",
    family="networks",
    arrays={**_GATED, "dout": "(N, M, H), optional", "dgates": "(N, G), optional"},
    static={},
    outputs={"dx": "(N, M, C) of weight, dout, dgates"},
    formula=_linear_vjp_formula,
)
row_linear = Primitive(
    "row_linear",
    family="networks",
    arrays={
        "x": "(N, M, C)",
        "weight": "(M, H, C)",
        "bias": "(H), optional",
        "gate_weight": "(G, C), optional",
        "gate_bias": "(G), optional",
    },
    static={},
    sizes={"G": lambda a: 0 if a.gate_weight is None else a.gate_weight.shape[0]},
    outputs={"out": "(N, M, H) of x, weight", "gates": "(N, G) of x, weight with G"},
    formula=_linear_formula,
    pullback=_linear_pullback,
)
