"""SO(2) convolutions of messages in the frames of their edges, and the gates that follow them.

Where orders lie in m-major rows, the convolution and its gradient, its public op, the gate and its
derivatives, and its public op.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, Protocol, get_args, overload

import numpy as np

from fusedops._frame.arrays import (
    ArrayT,
    added,
    allows_tf32,
    cast,
    namespace,
    sigmoid,
    widened,
    zeros,
)
from fusedops._frame.check import device_of, dtype_name, one_of, promoted, size
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName
from fusedops.wigner import m_major_order
from fusedops.wigner.rows import message_rows

#: The arguments that have the weights of orders 0, 1, ….
WEIGHTS = tuple(f"weight_m{m}" for m in range(9))
Layout = Literal["m", "l"]
LAYOUTS = get_args(Layout)
#: The precisions of products; None is "float32", or "tf32" where torch's switch allows it.
Precision = Literal["float32", "ieee", "tf32", "bf16"]
PRECISIONS = (None, *get_args(Precision))


@functools.lru_cache(maxsize=64)
def orders(lmax: int, mmax: int) -> list[tuple[slice, slice]]:
    """Return for every order m its m-major rows, and the rows of its radial functions.

    An order has one function for each degree, which +m and -m share.
    """
    found, row, function = [], 0, 0
    for m in range(mmax + 1):
        degrees = lmax + 1 - m
        rows = degrees if m == 0 else 2 * degrees
        found.append((slice(row, row + rows), slice(function, function + degrees)))
        row, function = row + rows, function + degrees
    return found


def weights_of(a: Any) -> list[Any]:
    """Return the weights of a call, by order."""
    given = [getattr(a, name) for name in WEIGHTS]
    return [weight for weight in given if weight is not None]


def columns(rows: slice, channels: int) -> slice:
    """Return the place of rows where an edge's rows lie one after the other."""
    return slice(rows.start * channels, rows.stop * channels)


def _matrix(weight: Any, m: int) -> Any:
    """Return the real matrix of an order's product, which for m > 0 is complex."""
    if m == 0:
        return weight
    xp, half = namespace(weight), weight.shape[0] // 2
    real, imaginary = weight[:half], weight[half:]
    lines = [real, -imaginary], [imaginary, real]
    return xp.concatenate([xp.concatenate(line, axis=1) for line in lines])


def dweight_of(dmatrix: Any, m: int) -> Any:
    """Return the cotangent of a weight for the cotangent of its `_matrix`."""
    if m == 0:
        return dmatrix
    half, width = (n // 2 for n in dmatrix.shape)
    upper, lower = dmatrix[:half], dmatrix[half:]
    parts = upper[:, :width] + lower[:, width:], lower[:, :width] - upper[:, width:]
    return namespace(dmatrix).concatenate(parts)


def by_order(x: Any, radial: Any, lmax: int, mmax: int) -> Iterator[Any]:
    """Yield every order's part of messages, times its radial functions, as (E, numbers)."""
    E, _, C = x.shape
    for m, (rows, functions) in enumerate(orders(lmax, mmax)):
        signs, degrees = 1 if m == 0 else 2, lmax + 1 - m
        part = x[:, rows].reshape(E, signs, degrees, C)
        if radial is not None:
            part = part * radial[:, columns(functions, C)].reshape(E, 1, degrees, C)
        yield part.reshape(E, signs * degrees * C)


def _formula(a: Any) -> tuple[Any, Any]:
    """Define the convolution: a product for every order."""
    *arrays, lmax, G, _ = a
    dtype, w = promoted(arrays), widened(a)
    x, weights, bias, radial = w.message, weights_of(w), w.bias, w.radial
    mmax, D = len(weights) - 1, (weights[0].shape[0] - G) // (lmax + 1)
    parts = list(by_order(x, radial, lmax, mmax))
    gates, weights[0] = parts[0] @ weights[0][:G].T, weights[0][G:]
    products = [
        part @ _matrix(weight, m).T
        for m, (part, weight) in enumerate(zip(parts, weights, strict=True))
    ]
    if bias is not None:
        gates, products[0] = gates + bias[:G], products[0] + bias[G:]
    out = namespace(x).concatenate(products, axis=1)
    out = out.reshape(x.shape[0], message_rows(lmax, mmax), D)
    return cast(out, dtype), cast(gates, dtype) if G else None


def _vjp_formula(a: Any) -> tuple[Any, ...]:
    """Return the cotangents of all arrays."""
    *arrays, lmax, _, _ = a
    w = widened(a)
    x, weights, bias, radial = w.message, weights_of(w), w.bias, w.radial
    dout, dgates = w.dout, w.dgates
    mmax, xp, (E, M, C) = len(weights) - 1, namespace(x), x.shape
    dproducts = list(by_order(dout, None, lmax, mmax))
    if dgates is not None:
        dproducts[0] = xp.concatenate([dgates, dproducts[0]], axis=1)
    parts = by_order(x, radial, lmax, mmax)
    dweights = [
        dweight_of(g.T @ part, m) for m, (g, part) in enumerate(zip(dproducts, parts, strict=True))
    ]
    dweights += [None] * (len(WEIGHTS) - len(weights))
    dparts = [
        g @ _matrix(weight, m) for m, (g, weight) in enumerate(zip(dproducts, weights, strict=True))
    ]
    dmessage = xp.concatenate(dparts, axis=1).reshape(E, M, C)
    dradial = None
    if radial is not None:
        both = dmessage * x
        folded = [
            both[:, rows].reshape(E, 1 if m == 0 else 2, lmax + 1 - m, C).sum(1)
            for m, (rows, _) in enumerate(orders(lmax, mmax))
        ]
        dradial = xp.concatenate(folded, axis=1).reshape(radial.shape)
        scaled = list(by_order(dmessage, radial, lmax, mmax))
        dmessage = xp.concatenate(scaled, axis=1).reshape(E, M, C)
    dbias = None if bias is None else dproducts[0].sum(0)
    return tuple(
        None if dx is None else cast(dx, array)
        for dx, array in zip((dmessage, *dweights, dbias, dradial), arrays, strict=False)
    )


def _pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    *arrays, lmax, G, precision = a
    dout, dgates = dy
    if dout is not None and (dgates is not None or not G):
        return Call(so2_vjp, *arrays, dout, dgates, lmax, G, precision, out=wanted)
    E, first = a.message.shape[0], a.weight_m0.shape[0]
    if dout is None:
        rows = message_rows(lmax, len(weights_of(a)) - 1)
        dout = zeros(dgates, (E, rows, (first - G) // (lmax + 1)))
    else:
        dgates = zeros(dout, (E, G))
    return so2_vjp(*arrays, dout, dgates, lmax, G, precision, out=wanted)


def _vjp_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    """Pull back through the partial derivatives of a form that is linear in each of its factors.

    The gradient has the derivatives of :math:`T = \\langle g, f(x, r, W) \\rangle` by x, r and W.
    With a derivative's cotangent in the place of its factor, T's derivatives by the other factors
    are their cotangents. The bias goes with the weights, and is zero beside another cotangent.
    """
    *arrays, dout, dgates, lmax, G, precision = a
    last = len(arrays) - 1
    weights = range(1, last)
    terms = []
    for at in (0, last):
        if dy[at] is not None:
            term = [*arrays[: last - 1], None, arrays[last]]
            term[at] = dy[at]
            terms.append((term, {at}))
    if any(dy[at] is not None for at in weights):
        term = [*arrays[: last - 1], dy.dbias, arrays[last]]
        for at in weights[:-1]:
            if arrays[at] is not None:
                given = dy[at]
                term[at] = namespace(arrays[at]).zeros_like(arrays[at]) if given is None else given
        terms.append((term, set(weights)))
    found: list[Any] = [None] * len(wanted)
    for term, held in terms:
        pulled: list[Any] = [None] * len(arrays)
        slots = [
            None if at in held or at == last - 1 else want
            for at, want in enumerate(wanted[: last + 1])
        ]
        if any(slots):
            pulled = so2_vjp(*term, dout, dgates, lmax, G, precision, out=slots)
        pushed: Any = None, None
        if any(wanted[last + 1 :]):
            pushed = so2(*term, lmax, G, precision, out=wanted[last + 1 :])
        found = [added(one, two) for one, two in zip(found, (*pulled, *pushed), strict=True)]
    return tuple(found)


def _sizes(a: Any) -> tuple[int, ...]:
    """Return G, D, M, R, and the rows and columns of all weights."""
    lmax, G, C, mmax = a.lmax, a.gate_channels, a.message.shape[2], len(weights_of(a)) - 1
    D = (a.weight_m0.shape[0] - G) // (lmax + 1)
    shapes = []
    for m in range(len(WEIGHTS)):
        degrees = max(lmax + 1 - m, 0)
        shapes += [degrees * D + G if m == 0 else 2 * degrees * D, degrees * C]
    return G, D, message_rows(lmax, mmax), orders(lmax, mmax)[-1][1].stop * C, *shapes


_ARRAYS = {
    "message": "(E, M, C)",
    "weight_m0": "(O0, I0)",
    **{name: f"(O{m}, I{m}), optional" for m, name in enumerate(WEIGHTS) if m},
    "bias": "(O0), optional",
    "radial": "(E, R), optional",
}
_SIZES: dict[str, Any] = {
    ", ".join(["G, D, M, R", *[f"O{m}, I{m}" for m in range(len(WEIGHTS))]]): _sizes
}
_STATIC: dict[str, type] = {"lmax": int, "gate_channels": int, "precision": str}
so2_vjp = Primitive(
    "so2_convolution_vjp",
    family="so2",
    arrays={**_ARRAYS, "dout": "(E, M, D)", "dgates": "(E, G), optional"},
    static=_STATIC,
    sizes=_SIZES,
    outputs={f"d{name}": f"like {name}" for name in _ARRAYS},
    formula=_vjp_formula,
    pullback=_vjp_pullback,
)
so2 = Primitive(
    "so2_convolution",
    family="so2",
    arrays=_ARRAYS,
    static=_STATIC,
    sizes=_SIZES,
    outputs={
        "out": f"(E, M, D) of {', '.join(_ARRAYS)}",
        "gates": f"(E, G) of {', '.join(_ARRAYS)} with G",
    },
    formula=_formula,
    pullback=_pullback,
    read_for={"message": (*WEIGHTS, "radial")},
)


def _message_degree(name: str, argument: str, array: Any, mmax: int) -> int:
    """Return lmax of m-major rows with orders up to mmax."""
    lmax = mmax
    while message_rows(lmax, mmax) < array.shape[1]:
        lmax += 1
    if message_rows(lmax, mmax) != array.shape[1]:
        least, step = message_rows(mmax, mmax), 2 * mmax + 1
        raise ValueError(
            f"{name}: {argument} has shape {tuple(array.shape)}; it should be (E, M, C) with M = "
            f"{least} + {step} k rows for any k ≥ 0, as orders are up to {mmax}"
        )
    return lmax


class _Convolution(Protocol):
    @overload
    def __call__(
        self,
        message: ArrayT,
        weight_m0: ArrayT,
        *weights: ArrayT | None,
        bias: ArrayT | None = ...,
        radial: ArrayT | None = ...,
        precision: Precision | None = ...,
        out: ArrayT | None = ...,
        backend: BackendName | None = ...,
        **by_name: ArrayT | None,
    ) -> ArrayT: ...
    @overload
    def __call__(
        self,
        message: ArrayT,
        weight_m0: ArrayT,
        *weights: ArrayT | None,
        bias: ArrayT | None = ...,
        radial: ArrayT | None = ...,
        gate_channels: int,
        precision: Precision | None = ...,
        out: ArrayT | None = ...,
        backend: BackendName | None = ...,
        **by_name: ArrayT | None,
    ) -> Any: ...


@op(so2, overloads=_Convolution)  # type: ignore[type-abstract]
def so2_convolution(
    message: Any,
    weight_m0: Any,
    weight_m1: Any | None = None,
    weight_m2: Any | None = None,
    weight_m3: Any | None = None,
    weight_m4: Any | None = None,
    weight_m5: Any | None = None,
    weight_m6: Any | None = None,
    weight_m7: Any | None = None,
    weight_m8: Any | None = None,
    *,
    bias: Any | None = None,
    radial: Any | None = None,
    gate_channels: int = 0,
    precision: Precision | None = None,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> Any:
    r"""Return the SO(2) convolution of messages: a product of matrices for every order m.

    .. math:: (\gamma \,\|\, y_0) = W_0 (r_0 \odot x_0) + b, \quad
              y_{+m} + i \, y_{-m} = (R_m + i I_m) \, \bigl(r_m \odot (x_{+m} + i \, x_{-m})\bigr)

    with :math:`x_{\pm m}` the :math:`(l_\mathrm{max} + 1 - m) C` numbers of a message's rows of
    order ±m, one degree after the other. A turn about the edge multiplies :math:`x_{+m} + i x_{-m}`
    by a phase, and :math:`y_{+m} + i y_{-m}` by the same.

    Parameters
    ----------
    message : array or tensor (E, M, C), float32 or float64; in torch bfloat16 and float16 too
        x, the features of the edges in their frames, m-major, as `node_to_edge_wigner_permute`
        returns them. M gives lmax, beside mmax, which is the number of weights less one. All arrays
        are dimensionless.
    weight_m0 : array or tensor (G + (lmax + 1) D, (lmax + 1) C)
        :math:`W_0`: the rows of the gates, then D rows for every degree.
    weight_m1, weight_m2, weight_m3, weight_m4 : array or tensor, optional
        (2 (lmax + 1 - m) D, (lmax + 1 - m) C): :math:`R_m` above :math:`I_m`, for every order m
        from 1 to mmax.
    weight_m5, weight_m6, weight_m7, weight_m8 : array or tensor, optional
        The same.
    bias : array or tensor (G + (lmax + 1) D,), optional
        b.
    radial : array or tensor (E, Σ (lmax + 1 - m) C), optional
        r, functions of the edge's length: for every order C numbers for each of its degrees, which
        multiply the rows of both +m and -m. Ones if not given.
    gate_channels : int
        G, the number of gates γ.
    precision : {None, "float32", "ieee", "tf32", "bf16"}
        The lowest precision to which a product of float32 on a GPU may round its factors, in the
        backward too; sums are float32. None means "float32", or "tf32" where torch's switch allows
        it. "float32" has the digits and the range of float32: large products are sums of products
        of their factors' halves in float16, see :doc:`/backends`. "ieee" multiplies in float32
        itself, by cuBLAS. The CPU computes as "ieee" in any case. TF32 keeps 10 bits of a factor's
        fraction, bfloat16 7.

    Returns
    -------
    out : array or tensor (E, M, D)
        y, m-major, in the dtype to which the arguments promote; accumulated in float32 or better.
    gates : array or tensor (E, G)
        γ; only with `gate_channels`, or the result is y alone.

    Notes
    -----
    All arrays have gradients of any order: the convolution is linear in each of its factors, so the
    same kernels compute its derivatives. On a GPU products read and write rows where they lie,
    without a copy. On a CPU scaled messages stay in the cache, and a complex product is three real
    ones: errors of y₊ and y₋ are relative to x₊ and x₋ together. ``so2_convolution.vjp`` returns
    gradients for the arrays that were given, in the order of the signature. Autocast changes no
    dtypes. With "ieee" or "tf32" torch's switch is set while a product is launched, for other
    threads too.

    References
    ----------
    Passaro and Zitnick, ICML 2023 (eSCN); in fairchem's UMA the weights are called ``fc_m0``, and
    ``so2_m_conv[m - 1].fc``.

    Examples
    --------
    One channel, lmax = mmax = 1. The weight of order 1 is i, a quarter of a turn:

    >>> import numpy as np, fusedops
    >>> message = np.array([[[1.0], [2.0], [3.0], [4.0]]])  # (0, 0), (1, 0), (1, 1), (1, -1)
    >>> weights = np.array([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]), np.array([[0.0], [1.0]])
    >>> out, gates = fusedops.so2_convolution(message, *weights, gate_channels=1)
    >>> gates.tolist(), out[0].ravel().tolist()
    ([[3.0]], [2.0, 1.0, -4.0, 3.0])
    """
    name = "so2_convolution"
    given: tuple[Any, ...] = (
        *(weight_m0, weight_m1, weight_m2, weight_m3, weight_m4, weight_m5, weight_m6),
        *(weight_m7, weight_m8),
    )
    mmax = sum(weight is not None for weight in given) - 1
    for m, weight in enumerate(given[: mmax + 1]):
        if weight is None:
            raise TypeError(
                f"{name}: {WEIGHTS[m]} is None; it should be an array, as a larger order has one"
            )
    lmax = _message_degree(name, "message", message, mmax)
    channels = size(name, "gate_channels", gate_channels)
    rest = weight_m0.shape[0] - channels
    if rest < 0 or rest % (lmax + 1):
        raise ValueError(
            f"{name}: weight_m0 has shape {tuple(weight_m0.shape)} with gate_channels {channels}; "
            f"it should have {channels} + {lmax + 1} k rows for any k ≥ 0, D = k for each degree"
        )
    one_of(name, "precision", precision, PRECISIONS)
    arrays: tuple[Any, ...] = message, *given, bias, radial
    if precision not in (None, "ieee") and "float64" in [
        dtype_name(array.dtype) for array in arrays if array is not None
    ]:
        raise ValueError(
            f"{name}: precision is {precision!r}; with float64 it should be None or 'ieee'"
        )
    if precision is None:
        on_gpu = device_of(message).startswith("cuda")
        precision = "tf32" if on_gpu and allows_tf32() else "float32"
    arguments = *arrays, lmax, channels, precision
    return to_run(arguments, ("out", "gates") if channels else "out")


def rows_by_degree(lmax: int, mmax: int, layout: str) -> list[np.ndarray]:
    """Return the rows of every degree, in m-major or in l-major order."""
    order = m_major_order(lmax, mmax)
    order = order if layout == "m" else np.sort(order)
    degree = np.sqrt(order).astype(np.int64)
    return [np.flatnonzero(degree == l) for l in range(lmax + 1)]


def _degree_of_rows(a: Any) -> np.ndarray:
    """Return the degree of every row."""
    found = np.empty(a.x.shape[1], np.int64)
    for l, rows in enumerate(rows_by_degree(a.lmax, a.mmax, a.layout)):
        found[rows] = l
    return found


def _opened(a: Any) -> tuple[Any, Any, Any, list[int]]:
    """Return σ(g) and its derivatives for every row but the first, and the rows' gates."""
    E, _, C = a.x.shape
    of = (_degree_of_rows(a)[1:] - 1).tolist()
    s = sigmoid(a.gates).reshape(E, a.lmax, C)[:, of]
    return s, s * (1 - s), s * (1 - s) * (1 - 2 * s), of


def _by_gate(a: Any, terms: Any, of: list[int]) -> Any:
    """Return sums over the rows of each degree but the first, (E, lmax C)."""
    xp, E = namespace(terms), a.x.shape[0]
    rows = np.array(of, np.int64)
    sums = [terms[:, np.flatnonzero(rows == l).tolist()].sum(1) for l in range(a.lmax)]
    return xp.concatenate(sums, axis=1) if sums else zeros(terms, (E, 0))


def _silu(x: Any) -> tuple[Any, Any, Any]:
    """Return x σ(x) and its first two derivatives."""
    s = sigmoid(x)
    slope = s * (1 - s)
    return x * s, s + x * slope, slope * (2 + x * (1 - 2 * s))


def _gate_formula(a: Any) -> tuple[Any]:
    """Define the gated features."""
    w = widened(a)
    first, s = _silu(w.x[:, :1])[0], _opened(w)[0]
    out = namespace(w.x).concatenate([first, w.x[:, 1:] * s], axis=1)
    return (cast(out, promoted((a.gates, a.x))),)


def _gate_vjp_formula(a: Any) -> tuple[Any, Any]:
    """Return the cotangents of gates and x."""
    w = widened(a)
    x, g = w.x, w.dout
    s, slope, _, of = _opened(w)
    dgates = _by_gate(a, slope * x[:, 1:] * g[:, 1:], of)
    dx = namespace(x).concatenate([g[:, :1] * _silu(x[:, :1])[1], g[:, 1:] * s], axis=1)
    return cast(dgates, a.gates), cast(dx, a.x)


def _gate_vjp_vjp_formula(a: Any) -> tuple[Any, Any, Any]:
    """Return the cotangents of gates, x and dout; v and u are the cotangents of dgates and dx."""
    w = widened(a)
    x, g, v, u = w.x, w.dout, w.ddgates, w.ddx
    E, M, C = x.shape
    s, slope, bend, of = _opened(w)
    v = zeros(x, (E, a.lmax, C)) if v is None else v.reshape(E, a.lmax, C)
    u, v = zeros(x, (E, M, C)) if u is None else u, v[:, of]
    _, first, second = _silu(x[:, :1])
    rows = slice(1, None)
    dgates = _by_gate(a, slope * u[:, rows] * g[:, rows] + bend * v * x[:, rows] * g[:, rows], of)
    concatenate = namespace(x).concatenate
    dx = concatenate([u[:, :1] * g[:, :1] * second, v * slope * g[:, rows]], axis=1)
    ddout = concatenate([u[:, :1] * first, u[:, rows] * s + v * slope * x[:, rows]], axis=1)
    return cast(dgates, a.gates), cast(dx, a.x), cast(ddout, a.dout)


def _gate_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    return Call(gate_vjp, a.gates, a.x, dy.out, a.lmax, a.mmax, a.layout, out=wanted)


def _gate_vjp_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    static = a.lmax, a.mmax, a.layout
    return Call(gate_vjp_vjp, a.gates, a.x, a.dout, *dy, *static, out=wanted)


_GATED = {"gates": "(E, G)", "x": "(E, M, C)"}
_GATE_STATIC: dict[str, type] = {"lmax": int, "mmax": int, "layout": str}
_GATE_SIZES: dict[str, Any] = {
    "G": lambda a: a.lmax * a.x.shape[2],
    "M": lambda a: message_rows(a.lmax, a.mmax),
}
gate_vjp_vjp = Primitive(
    "gate_activation_vjp_vjp",
    family="so2",
    arrays={
        **_GATED,
        "dout": "(E, M, C)",
        "ddgates": "(E, G), optional",
        "ddx": "(E, M, C), optional",
    },
    static=_GATE_STATIC,
    sizes=_GATE_SIZES,
    outputs={"dgates": "like gates", "dx": "like x", "ddout": "like dout"},
    formula=_gate_vjp_vjp_formula,
)
gate_vjp = Primitive(
    "gate_activation_vjp",
    family="so2",
    arrays={**_GATED, "dout": "(E, M, C)"},
    static=_GATE_STATIC,
    sizes=_GATE_SIZES,
    outputs={"dgates": "like gates", "dx": "like x"},
    formula=_gate_vjp_formula,
    pullback=_gate_vjp_pullback,
)
gate = Primitive(
    "gate_activation",
    family="so2",
    arrays=_GATED,
    static=_GATE_STATIC,
    sizes=_GATE_SIZES,
    outputs={"out": "like x of gates, x"},
    formula=_gate_formula,
    pullback=_gate_pullback,
)


@op(gate)
def gate_activation(
    gates: ArrayT,
    x: ArrayT,
    *,
    mmax: int | None = None,
    layout: Layout = "m",
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return features after SiLU for degree 0, and after gates for all other degrees.

    .. math:: \mathrm{out}_{e, 0, c} = x_{e, 0, c} \, \sigma(x_{e, 0, c}), \quad
              \mathrm{out}_{e, r, c} = x_{e, r, c} \, \sigma(g_{e, (l_r - 1) C + c})

    with σ the logistic function, and :math:`l_r` the degree of row r: a degree's rows share a gate
    for each channel, so that the result turns as x does.

    Parameters
    ----------
    gates : array or tensor (E, lmax · C), float32 or float64; in torch bfloat16 and float16 too
        g, the gates of degree 1, then of degree 2, and so on, before σ, dimensionless like `x`.
    x : array or tensor (E, M, C)
        The features of edges or nodes.
    mmax : int, optional
        The largest order ``|m|`` of the rows, at most lmax; lmax if not given. M gives lmax.
    layout : {"m", "l"}
        The order of the rows: m-major (`fusedops.wigner.m_major_order`), or by degree, and by order
        within a degree.

    Returns
    -------
    array or tensor (E, M, C)
        In the dtype to which the arguments promote; computed in float32 or better.

    Notes
    -----
    Both arrays have gradients of any order in torch, and of the first in NumPy; value, first and
    second derivative have kernels. Autocast changes no dtypes.

    References
    ----------
    Weiler et al., "3D Steerable CNNs", NeurIPS 2018; the shapes follow fairchem's
    ``GateActivation``, with and without ``m_prime``.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> x = np.array([[[0.0], [2.0], [4.0], [6.0]]])  # lmax = 1, one channel
    >>> fusedops.gate_activation(np.array([[0.0]]), x)[0].ravel().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    name = "gate_activation"
    one_of(name, "layout", layout, LAYOUTS)
    if mmax is None:
        lmax = 0
        while message_rows(lmax, lmax) < x.shape[1]:
            lmax += 1
        if message_rows(lmax, lmax) != x.shape[1]:
            raise ValueError(
                f"{name}: x has shape {tuple(x.shape)}; it should be (E, (lmax + 1)², C), or have "
                "the rows of mmax"
            )
        mmax = lmax
    else:
        mmax = size(name, "mmax", mmax, bits=30)
        lmax = _message_degree(name, "x", x, mmax)
    return to_run((gates, x, lmax, mmax, layout), "out")
