"""The triangle multiplicative update of pair representations."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from fusedops._frame.arrays import (
    ArrayT,
    cast,
    contiguous,
    namespace,
    recomputed,
    sigmoid,
    standardized,
    standardized_back,
    wide,
    widened,
    zeros,
)
from fusedops._frame.check import (
    dtype_name,
    one_of,
    positive,
    promoted,
    size,
    warn,
)
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName

Direction = Literal["outgoing", "incoming"]
Gate = Literal["output", "hidden"]
Precision = Literal["float32", "ieee", "tf32", "bf16", "fp16"]
DIRECTIONS, GATES = get_args(Direction), get_args(Gate)
PRECISIONS = (None, *get_args(Precision))

#: The default precision of 16-bit floats.
_OWN = {"bfloat16": "bf16", "float16": "fp16"}

#: The op's arrays, in the order of its signature.
ARRAYS = {
    "x": "(*B, N, N, C), C > 0",
    "mask": "(*B, N, N), optional, integers, broadcast",
    "norm_in_weight": "(C), optional",
    "norm_in_bias": "(C), optional",
    "p_in_weight": "(2 * H, C), H > 0",
    "p_in_bias": "(2 * H), optional",
    "g_in_weight": "(2 * H, C)",
    "g_in_bias": "(2 * H), optional",
    "norm_out_weight": "(H), optional",
    "norm_out_bias": "(H), optional",
    "p_out_weight": "(D, H), D > 0",
    "p_out_bias": "(D), optional",
    "g_out_weight": "(G, C)",
    "g_out_bias": "(G), optional",
}
_WEIGHTS = [name for name in ARRAYS if name not in ("x", "mask")]
#: The arrays that a model learns, each optional here.
Weights: Any = namedtuple("Weights", _WEIGHTS, defaults=[None] * len(_WEIGHTS))  # type: ignore[misc]


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    y = x @ weight.T
    return y if bias is None else y + bias


def _linear_back(dy: Any, x: Any) -> tuple[Any, Any]:
    """Return the cotangents of weight and bias."""
    rows, columns = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return rows.T @ columns, rows.sum(0)


def _planes(a: Any) -> Any:
    """Return (B, N, N, H) as contiguous (B, H, N, N), for the products."""
    # Not by moveaxis: torch.vmap has no rule for it.
    return contiguous(a.swapaxes(2, 3).swapaxes(1, 2))


def _pairs(o: Any) -> Any:
    """Return (B, H, N, N) as (B, N, N, H), the inverse of `_planes`."""
    return o.swapaxes(1, 2).swapaxes(2, 3)


def _sides(a: Any) -> tuple[Any, Any]:
    """Return left and right (B, H, N, N)."""
    both = _gated(a)
    H = both.shape[-1] // 2
    return _planes(both[..., :H]), _planes(both[..., H:])


def _gated(a: Any) -> Any:
    """Return projections of the normalized x times their gates and the mask."""
    xn = _affine(standardized(a.x, a.eps)[0], a.norm_in_weight, a.norm_in_bias)
    gate = sigmoid(_linear(xn, a.g_in_weight, a.g_in_bias))
    both = _linear(xn, a.p_in_weight, a.p_in_bias) * gate
    return both if a.mask is None else both * a.mask[..., None]


def _sides_back(a: Any, dboth: Any, dlogits: Any) -> dict[str, Any]:
    """Return the cotangents of x, the mask and the weights that the normalized x meets, by name.

    They follow from the cotangents of `_gated` and of the last gate's logits.
    """
    y, scale = standardized(a.x, a.eps)
    xn = _affine(y, a.norm_in_weight, a.norm_in_bias)
    p = _linear(xn, a.p_in_weight, a.p_in_bias)
    s = sigmoid(_linear(xn, a.g_in_weight, a.g_in_bias))
    dp = dboth * s
    ds = dp * p
    dmask = ds.sum(-1)
    if a.mask is not None:
        dp, ds = dp * a.mask[..., None], ds * a.mask[..., None]
    dg = ds * (1 - s)
    dxn = dp @ a.p_in_weight + dg @ a.g_in_weight + dlogits @ a.g_out_weight
    dy = dxn if a.norm_in_weight is None else dxn * a.norm_in_weight
    found = {"x": standardized_back(dy, y, scale), "mask": dmask}
    found |= {"norm_in_weight": (dxn * y).sum((0, 1, 2)), "norm_in_bias": dxn.sum((0, 1, 2))}
    found["p_in_weight"], found["p_in_bias"] = _linear_back(dp, xn)
    found["g_in_weight"], found["g_in_bias"] = _linear_back(dg, xn)
    found["g_out_weight"], found["g_out_bias"] = _linear_back(dlogits, xn)
    return found


def _product(left: Any, right: Any, direction: str) -> Any:
    """Return o (B, H, N, N)."""
    if direction == "outgoing":
        return left @ right.swapaxes(-1, -2)
    return left.swapaxes(-1, -2) @ right


def _product_back(do: Any, left: Any, right: Any, direction: str) -> tuple[Any, Any]:
    """Return the cotangents of left and right."""
    if direction == "outgoing":
        return do @ right, do.swapaxes(-1, -2) @ left
    return right @ do.swapaxes(-1, -2), left @ do


def _end(a: Any, o: Any) -> Any:
    """Return the output for x and o."""
    xn = _affine(standardized(a.x, a.eps)[0], a.norm_in_weight, a.norm_in_bias)
    on = _affine(standardized(_pairs(o), a.eps)[0], a.norm_out_weight, a.norm_out_bias)
    s = sigmoid(_linear(xn, a.g_out_weight, a.g_out_bias))
    if a.gate == "output":
        return _linear(on, a.p_out_weight, a.p_out_bias) * s
    return _linear(on * s, a.p_out_weight, a.p_out_bias)


def _end_back(a: Any, o: Any, dout: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the cotangents of o, of the gate's logits, and of the end's weights by name."""
    xn = _affine(standardized(a.x, a.eps)[0], a.norm_in_weight, a.norm_in_bias)
    y, scale = standardized(_pairs(o), a.eps)
    on = _affine(y, a.norm_out_weight, a.norm_out_bias)
    s = sigmoid(_linear(xn, a.g_out_weight, a.g_out_bias))
    if a.gate == "output":
        dp, gated = dout * s, on
        ds = dout * _linear(on, a.p_out_weight, a.p_out_bias)
        don = dp @ a.p_out_weight
    else:
        dp, gated = dout, on * s
        dgated = dout @ a.p_out_weight
        ds, don = dgated * on, dgated * s
    dy = don if a.norm_out_weight is None else don * a.norm_out_weight
    found = {"norm_out_weight": (don * y).sum((0, 1, 2)), "norm_out_bias": don.sum((0, 1, 2))}
    found["p_out_weight"], found["p_out_bias"] = _linear_back(dp, gated)
    return _planes(standardized_back(dy, y, scale)), ds * s * (1 - s), found


def _formula(a: Any) -> tuple[Any, Any]:
    """Define the update and o."""
    w = widened(a)
    o = _product(*_sides(w), w.direction)
    return cast(_end(w, o), a.x), cast(o, a.x)


def in_parts(
    sizes: Sequence[int], need: Callable[..., int], limit: int, *stages: Sequence[int]
) -> list[int]:
    """Return a part's length along each axis, such that `need` of the lengths is within a limit.

    Halve the first length first, which costs no time; then the length whose half saves the most.
    A stage is the least length along each axis; all lengths reach one stage before any goes on to
    the next. Return the last stage if even that needs more than the limit.
    """
    parts = list(sizes)
    for least in stages:
        while limit and need(*parts) > limit:
            halves = [
                [*parts[:at], max(-(-n // 2), least[at]), *parts[at + 1 :]]
                for at, n in enumerate(parts)
                if n > least[at]
            ]
            if not halves:
                break
            free = parts[0] > least[0]
            parts = halves[0] if free else min(halves, key=lambda half: need(*half))
    return parts


@functools.lru_cache(maxsize=256)
def warn_of_parts(limit: int, enough: int) -> None:
    """Warn once that a limit leaves room for small parts only, and name one that is enough."""
    warn(
        f"triangle_multiplicative_update: max_memory is {limit}, which leaves room only for small "
        f"parts, which take long; it should be at least {enough}"
    )


def slices(n: int, step: int) -> list[slice]:
    """Return slices of at most `step` elements that cover n."""
    return [slice(low, min(low + step, n)) for low in range(0, n, max(step, 1))]


def _vjp_formula(a: Any) -> tuple[Any, ...]:
    r"""Return the cotangents of all arrays.

    A normalized vector :math:`\hat y = (y - \mathrm{mean}\, y) r` with the cotangent v gives y the
    cotangent :math:`r (v - \mathrm{mean}\, v - \hat y \, \mathrm{mean}(v \hat y))`. Compute o
    anew and leave `hidden` alone, so that torch can differentiate through o.
    """
    return _gradients(a, None)


def _gradients(a: Any, dhidden: Any) -> tuple[Any, ...]:
    w = widened(a._replace(hidden=None))

    def run(stage: Any, *args: Any) -> Any:
        return recomputed(stage, w.x)(*args)

    left, right = run(_sides, w)
    o = _product(left, right, w.direction)
    do, dlogits, ends = run(_end_back, w, o, w.dout)
    do = do if dhidden is None else do + cast(wide(dhidden), do)
    dsides = [_pairs(side) for side in _product_back(do, left, right, w.direction)]
    dboth = namespace(w.x).concatenate(dsides, axis=-1)
    return _like(a, ARRAYS, ends | run(_sides_back, w, dboth, dlogits))


def _like(a: Any, names: Iterable[str], found: dict[str, Any]) -> tuple[Any, ...]:
    """Return the cotangents of some arguments in their dtypes; None for one not given."""
    likes = [getattr(a, name) for name in names]
    return tuple(
        [None if a is None else cast(found[name], a) for name, a in zip(names, likes, strict=True)]
    )


def _pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    dout = zeros(a.x, (*a.x.shape[:3], len(a.p_out_weight))) if dy.out is None else dy.out
    arrays, static = a[: len(ARRAYS)], a[len(ARRAYS) :]
    if dy.hidden is not None:
        # `hidden` is internal: only direct calls of the primitive reach here.
        return _gradients(trimul_vjp.Arguments(*arrays, None, dout, *static), dy.hidden)
    return Call(trimul_vjp, *arrays, y.hidden, dout, *static, out=wanted)


_SIZES: dict[str, Any] = {
    "G": lambda a: a.p_out_weight.shape[0] if a.gate == "output" else a.p_in_weight.shape[0] // 2
}
STATIC = {"direction": str, "gate": str, "precision": str, "eps": float, "max_memory": int}

trimul = Primitive(
    "triangle_multiplicative_update",
    family="trimul",
    arrays=ARRAYS,
    static=STATIC,
    # Sums that float16 would hold as infinite are computed anew: their normalized values are small.
    sizes={**_SIZES, "kept": lambda a: dtype_name(a.x.dtype) != "float16"},
    outputs={"out": "(*B, N, N, D) as x", "hidden": "(*B, H, N, N) with kept"},
    formula=_formula,
    pullback=_pullback,
    saves=("hidden",),
)
trimul_vjp = Primitive(
    "triangle_multiplicative_update_vjp",
    family="trimul",
    arrays={**ARRAYS, "hidden": "(*B, H, N, N), optional", "dout": "(*B, N, N, D)"},
    static=STATIC,
    sizes=_SIZES,
    outputs={f"d{name}": f"like {name}" for name in ARRAYS},
    formula=_vjp_formula,
)


def _sides_formula(a: Any) -> tuple[Any]:
    """Return left and right of a rectangle of pairs, apart for each of several ranks."""
    both = _gated(widened(a))
    both = both.reshape(*both.shape[:3], a.parts, both.shape[3] // a.parts)
    return (cast(both.swapaxes(0, 3).swapaxes(1, 3).swapaxes(2, 4), a.x),)


def _end_formula(a: Any) -> tuple[Any]:
    """Return the output for x and o, which is given times `scale`."""
    w = widened(a)
    return (cast(_end(w, w.o / a.scale), a.x),)


def _end_vjp_formula(a: Any) -> tuple[Any, ...]:
    w = widened(a)
    do, dlogits, found = _end_back(w, w.o / a.scale, w.dout)
    return cast(do / a.scale, a.o), cast(dlogits, a.x), *_like(a, _AFTER, found)


def _sides_vjp_formula(a: Any) -> tuple[Any, ...]:
    w = widened(a)
    found = _sides_back(w, contiguous(_pairs(w.dsides)), w.dlogits)
    return _like(a, (*_SIDES, *_GATE), found)


# The stages before and after the products, for any rectangle of pairs. `fusedops.distributed`
# exchanges planes between them: each of P ranks gets Q of the R channels of left and right.
_NORM = {"norm_in_weight": "(C), optional", "norm_in_bias": "(C), optional"}
_SIDES = {
    "x": "(B, L, M, C), C > 0",
    "mask": "(B, L, M), optional",
    **_NORM,
    "p_in_weight": "(R, C)",
    "p_in_bias": "(R), optional",
    "g_in_weight": "(R, C)",
    "g_in_bias": "(R), optional",
}
_AFTER = {
    "norm_out_weight": "(H), optional",
    "norm_out_bias": "(H), optional",
    "p_out_weight": "(C, H)",
    "p_out_bias": "(C), optional",
}
_GATE = {"g_out_weight": "(G, C)", "g_out_bias": "(G), optional"}
_END = {"x": "(B, L, M, C), C > 0", "o": "(B, H, L, M)", **_NORM, **_AFTER, **_GATE}
_OF_END: dict[str, Any] = {
    "family": "trimul",
    "static": {"gate": str, "precision": str, "scale": float, "eps": float},
    "sizes": {"G": lambda a: a.x.shape[3] if a.gate == "output" else a.o.shape[1]},
}
sides = Primitive(
    "triangle_sides",
    family="trimul",
    arrays=_SIDES,
    static={"parts": int, "precision": str, "eps": float},
    sizes={"P, Q": lambda a: (a.parts, a.p_in_weight.shape[0] // a.parts)},
    outputs={"sides": "(P, B, Q, L, M) as x"},
    formula=_sides_formula,
)
sides_vjp = Primitive(
    "triangle_sides_vjp",
    family="trimul",
    arrays={**_SIDES, **_GATE, "dsides": "(B, R, L, M)", "dlogits": "(B, L, M, G)"},
    static={"precision": str, "eps": float},
    outputs={f"d{name}": f"like {name}" for name in (*_SIDES, *_GATE)},
    formula=_sides_vjp_formula,
)
end = Primitive(
    "triangle_end", arrays=_END, outputs={"out": "like x"}, formula=_end_formula, **_OF_END
)
end_vjp = Primitive(
    "triangle_end_vjp",
    arrays={**_END, "dout": "(B, L, M, C)"},
    outputs={
        "do": "like o",
        "dlogits": "(B, L, M, G) as x",
        **{f"d{name}": f"like {name}" for name in _AFTER},
    },
    formula=_end_vjp_formula,
    **_OF_END,
)


@op(trimul, sharded="fusedops.distributed.dtensors")
def triangle_multiplicative_update(
    x: ArrayT,
    direction: Direction = "outgoing",
    mask: ArrayT | None = None,
    norm_in_weight: ArrayT | None = None,
    norm_in_bias: ArrayT | None = None,
    p_in_weight: ArrayT | None = None,
    p_in_bias: ArrayT | None = None,
    g_in_weight: ArrayT | None = None,
    g_in_bias: ArrayT | None = None,
    norm_out_weight: ArrayT | None = None,
    norm_out_bias: ArrayT | None = None,
    p_out_weight: ArrayT | None = None,
    p_out_bias: ArrayT | None = None,
    g_out_weight: ArrayT | None = None,
    g_out_bias: ArrayT | None = None,
    eps: float = 1e-5,
    precision: Precision | None = None,
    gate: Gate = "output",
    *,
    max_memory: int | None = None,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return the triangle multiplicative update of a pair representation.

    .. math:: n = \mathrm{LN}(x), \quad (l, r)_{ij}
              = m_{ij} \, (W_p n_{ij} + b_p) \odot \sigma(W_g n_{ij} + b_g)

    .. math:: o_{ij} = \sum_k l_{ik} \odot r_{jk} \ \text{(outgoing)}, \quad
              o_{ij} = \sum_k l_{ki} \odot r_{kj} \ \text{(incoming)}

    .. math:: \mathrm{out}_{ij} = (V_p \, \mathrm{LN}(o_{ij}) + c_p)
              \odot \sigma(V_g n_{ij} + c_g) \ \text{(gate="output")}

    .. math:: \mathrm{out}_{ij} = V_p \bigl(\mathrm{LN}(o_{ij})
              \odot \sigma(V_g n_{ij} + c_g)\bigr) + c_p \ \text{(gate="hidden")}

    with σ the logistic function, l and r the first and the second half of 2H channels, and

    .. math:: \mathrm{LN}(y) = \frac{y - \mathrm{mean}(y)}{\sqrt{\mathrm{var}(y) + \varepsilon}}
              \odot w + b

    over the channels: C for x, H for o.

    Parameters
    ----------
    x : array or tensor (..., N, N, C), float32 or float64; in torch bfloat16 and float16 too
        The pair representation, dimensionless like all arrays here, with any number of leading
        dimensions.
    direction : {"outgoing", "incoming"}
        The edges of a triangle that the sum runs over.
    mask : array or tensor that broadcasts to (..., N, N), bool, any integer or any float, optional
        m, cast to the dtype of x.
    norm_in_weight, norm_in_bias : array or tensor (C,), optional
        w and b of the LayerNorm of x: 1 and 0 if not given.
    p_in_weight, p_in_bias : array or tensor (2H, C), and (2H,), optional
        The projections :math:`W_p` and :math:`b_p`, left above right.
    g_in_weight, g_in_bias : array or tensor (2H, C), and (2H,), optional
        Their gates :math:`W_g` and :math:`b_g`.
    norm_out_weight, norm_out_bias : array or tensor (H,), optional
        w and b of the LayerNorm of o: 1 and 0 if not given.
    p_out_weight, p_out_bias : array or tensor (D, H), and (D,), optional
        The projection :math:`V_p` and :math:`c_p`.
    g_out_weight, g_out_bias : array or tensor (D, C), and (D,), optional
        Its gate :math:`V_g` and :math:`c_g`; with ``gate="hidden"``, (H, C) and (H,).
    eps : float
        ε, positive.
    precision : {None, "float32", "ieee", "tf32", "bf16", "fp16"}
        The lowest precision to which a product may round its factors; sums are float32 or better.
        None means "float32" for float32, "ieee" for float64, and the precision of x for 16 bits;
        float64 allows no other than "ieee". "float32" has the digits and the range of float32: on
        GPUs of data centers products are sums of products of their factors' halves in float16, or
        of parts in bfloat16, see :doc:`/backends`. "ieee" multiplies in float32 itself. The CPU
        computes as with "ieee", but for "bf16" of arrays that are all bfloat16.
    gate : {"output", "hidden"}
        The factor of the last gate: the output, as in AlphaFold, OpenFold, Boltz and
        cuEquivariance; or the normalized o, as in the gpu-mode TriMul problem.
    max_memory : int, optional
        The most bytes of intermediate results that are there at one time, in a forward and in a
        backward. They do not include arguments and results (o, which a backward needs, is a result
        of the forward), nor copies of x, mask and weights in the dtype and layout that kernels
        take, nor on a CPU the float32 copies of results in bfloat16, nor bytes that an allocator
        adds. To stay below, the work is done in parts, on a GPU by channels and lines. There a
        backward keeps left, right and the cotangent of o, so that it needs at least three times
        the bytes of o in the dtype of products. A limit that only small, slow parts meet gives a
        RuntimeWarning once, with a sufficient number; a limit that even the smallest parts exceed
        is exceeded by these. NumPy and plain torch ignore the limit.

    Returns
    -------
    array or tensor (..., N, N, D)
        In the dtype of x. D is C in AlphaFold and the programs that follow it.

    Notes
    -----
    N, C, H and D are arbitrary. On a GPU, if D is not C, the update is computed again for every C
    channels of the output. The arrays may have different dtypes. Every array gets a gradient. Only
    o is kept for the backward. Second derivatives exist for tensors only, in plain torch.
    ``triangle_multiplicative_update.vjp`` returns gradients for the arrays that were given, in the
    order of the signature; a mask gets the gradient by its values, also of integers. Autocast
    changes no dtypes. A fully masked row is no special case: the LayerNorm of zeros is its bias.

    x may be a DTensor sharded by batch, by rows, by columns, or by several of these on a mesh; the
    result has its placements. Then a mask is placed like x, weights are plain or Replicate, and
    plain weights get this rank's part of their gradient: see `fusedops.distributed`. `max_memory`
    limits no shard of rows or columns.

    References
    ----------
    Jumper et al., Nature 596 (2021) 583, supplementary algorithms 11 and 12; Abramson et al.,
    Nature 630 (2024) 493, supplementary algorithms 12 and 13. Names and order of the arguments, and
    left stacked above right, follow cuEquivariance.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> rng = np.random.default_rng(0)
    >>> B, N, C, H = 1, 5, 4, 3
    >>> x = rng.normal(size=(B, N, N, C))
    >>> weights = {
    ...     "p_in_weight": rng.normal(size=(2 * H, C)),
    ...     "g_in_weight": rng.normal(size=(2 * H, C)),
    ...     "p_out_weight": rng.normal(size=(C, H)),
    ...     "g_out_weight": rng.normal(size=(C, C)),
    ... }
    >>> fusedops.triangle_multiplicative_update(x, "incoming", **weights).shape
    (1, 5, 5, 4)
    >>> out, pullback = fusedops.triangle_multiplicative_update.vjp(x, **weights)
    >>> [gradient.shape for gradient in pullback(np.ones_like(out))]
    [(1, 5, 5, 4), (6, 4), (6, 4), (4, 3), (4, 4)]
    """
    name = "triangle_multiplicative_update"
    one_of(name, "direction", direction, DIRECTIONS)
    one_of(name, "gate", gate, GATES)
    one_of(name, "precision", precision, PRECISIONS)
    eps = positive(name, "eps", eps)
    limit = 0 if max_memory is None else size(name, "max_memory", max_memory, least=1)
    weights: tuple[Any, ...] = (
        *(norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias),
        *(norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias),
    )
    if dtype_name(promoted([x, *weights])) == "float64":
        if precision not in (None, "ieee"):
            raise ValueError(
                f"{name}: precision is {precision!r}; with float64 it should be None or 'ieee'"
            )
        precision = "ieee"
    used = precision or _OWN.get(dtype_name(x.dtype), "float32")
    return to_run((x, mask, *weights, direction, gate, used, eps, limit), "out")
