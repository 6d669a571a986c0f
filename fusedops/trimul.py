"""The triangle multiplicative update of pair representations.

One file, from top to bottom: the definition of value and gradient, and the public op. The kernels
are in ``cpukern/trimul_*`` and ``gpukern/trimul/``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusedops._frame.arrays import ArrayT, cast, namespace, recomputed, sigmoid, wide
from fusedops._frame.check import (
    dtype_name,
    is_tensor,
    one_of,
    positive,
    promoted,
    size,
    warn,
)
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Primitive

DIRECTIONS = ("outgoing", "incoming")
GATES = ("output", "hidden")
PRECISIONS = (None, "ieee", "tf32", "bf16", "fp16")

#: What a call without precision asks for.
_OWN = {"bfloat16": "bf16", "float16": "fp16"}

#: The arrays of the op, in its order.
ARRAYS = {
    "x": "(B, N, N, C), C > 0",
    "mask": "(B?, N?, N?), optional, bool",
    "norm_in_weight": "(C), optional",
    "norm_in_bias": "(C), optional",
    "p_in_weight": "(2 * H, C), H > 0",
    "p_in_bias": "(2 * H), optional",
    "g_in_weight": "(2 * H, C)",
    "g_in_bias": "(2 * H), optional",
    "norm_out_weight": "(H), optional",
    "norm_out_bias": "(H), optional",
    "p_out_weight": "(C, H)",
    "p_out_bias": "(C), optional",
    "g_out_weight": "(G, C)",
    "g_out_bias": "(G), optional",
}


def _standardized(x: Any, eps: float) -> tuple[Any, Any]:
    """Return x less its mean over the last axis and over its deviation, and 1 over that."""
    centred = x - x.mean(-1)[..., None]
    # The mean is as good as x is large; what is left of it is found among small numbers.
    centred = centred - centred.mean(-1)[..., None]
    scale = (((centred * centred).mean(-1) + eps) ** -0.5)[..., None]
    return centred * scale, scale


def _standardized_back(on_y: Any, y: Any, scale: Any) -> Any:
    """Return the cotangent of x, of which y and the scale were made."""
    along = (on_y * y).mean(-1)[..., None]
    return scale * (on_y - on_y.mean(-1)[..., None] - y * along)


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _linear(x: Any, weight: Any, bias: Any) -> Any:
    y = x @ weight.T
    return y if bias is None else y + bias


def _linear_back(on_y: Any, x: Any) -> tuple[Any, Any]:
    """Return the cotangents of weight and bias."""
    rows, columns = on_y.reshape(-1, on_y.shape[-1]), x.reshape(-1, x.shape[-1])
    return rows.T @ columns, rows.sum(0)


def _planes(a: Any) -> Any:
    """Return (B, N, N, H) as (B, H, N, N), in memory too, as products want it."""
    # Not by moveaxis, for which torch.vmap has no rule.
    a = a.swapaxes(2, 3).swapaxes(1, 2)
    return a.contiguous() if is_tensor(a) else np.ascontiguousarray(a)


def _pairs(o: Any) -> Any:
    """Return (B, H, N, N) as (B, N, N, H), the inverse of `_planes`."""
    return o.swapaxes(1, 2).swapaxes(2, 3)


def _sides(
    x: Any, mask: Any, w: Any, b: Any, p_w: Any, p_b: Any, g_w: Any, g_b: Any, eps: float
) -> tuple[Any, Any]:
    """Return left and right (B, H, N, N)."""
    xn = _affine(_standardized(x, eps)[0], w, b)
    a = _linear(xn, p_w, p_b) * sigmoid(_linear(xn, g_w, g_b))
    a = a if mask is None else a * mask[..., None]
    H = a.shape[-1] // 2
    return _planes(a[..., :H]), _planes(a[..., H:])


def _sides_back(
    x: Any,
    mask: Any,
    w: Any,
    b: Any,
    p_w: Any,
    p_b: Any,
    g_w: Any,
    g_b: Any,
    on_left: Any,
    on_right: Any,
    on_xn: Any,
    eps: float,
) -> tuple[Any, ...]:
    """Return the cotangents of what made left, right, and another use of the normalized x."""
    xp = namespace(x)
    y, scale = _standardized(x, eps)
    xn = _affine(y, w, b)
    p, s = _linear(xn, p_w, p_b), sigmoid(_linear(xn, g_w, g_b))
    on_a = xp.concatenate([_pairs(side) for side in (on_left, on_right)], axis=-1)
    on_mask = (on_a * p * s).sum(-1)
    on_a = on_a if mask is None else on_a * mask[..., None]
    on_p, on_g = on_a * s, on_a * p * s * (1 - s)
    on_xn = on_xn + on_p @ p_w + on_g @ g_w
    on_y = on_xn if w is None else on_xn * w
    return (
        _standardized_back(on_y, y, scale),
        on_mask,
        (on_xn * y).sum((0, 1, 2)),
        on_xn.sum((0, 1, 2)),
        *_linear_back(on_p, xn),
        *_linear_back(on_g, xn),
    )


def _product(left: Any, right: Any, direction: str) -> Any:
    """Return o (B, H, N, N)."""
    if direction == "outgoing":
        return left @ right.swapaxes(-1, -2)
    return left.swapaxes(-1, -2) @ right


def _product_back(on_o: Any, left: Any, right: Any, direction: str) -> tuple[Any, Any]:
    """Return the cotangents of left and right."""
    if direction == "outgoing":
        return on_o @ right, on_o.swapaxes(-1, -2) @ left
    return right @ on_o.swapaxes(-1, -2), left @ on_o


def _end(
    x: Any,
    o: Any,
    w_in: Any,
    b_in: Any,
    w: Any,
    b: Any,
    p_w: Any,
    p_b: Any,
    g_w: Any,
    g_b: Any,
    eps: float,
    gate: str,
) -> Any:
    """Return the output, from x and o."""
    xn = _affine(_standardized(x, eps)[0], w_in, b_in)
    on = _affine(_standardized(_pairs(o), eps)[0], w, b)
    s = sigmoid(_linear(xn, g_w, g_b))
    if gate == "output":
        return _linear(on, p_w, p_b) * s
    return _linear(on * s, p_w, p_b)


def _end_back(
    x: Any,
    o: Any,
    w_in: Any,
    b_in: Any,
    w: Any,
    b: Any,
    p_w: Any,
    p_b: Any,
    g_w: Any,
    g_b: Any,
    cotangent: Any,
    eps: float,
    gate: str,
) -> tuple[Any, ...]:
    """Return the cotangents of the normalized x, of o, and of w to g_b."""
    xn = _affine(_standardized(x, eps)[0], w_in, b_in)
    y, scale = _standardized(_pairs(o), eps)
    on = _affine(y, w, b)
    s = sigmoid(_linear(xn, g_w, g_b))
    if gate == "output":
        on_p, gated = cotangent * s, on
        on_s = cotangent * _linear(on, p_w, p_b)
        on_on = on_p @ p_w
    else:
        on_p, gated = cotangent, on * s
        on_gated = cotangent @ p_w
        on_s, on_on = on_gated * on, on_gated * s
    on_g = on_s * s * (1 - s)
    on_y = on_on if w is None else on_on * w
    return (
        on_g @ g_w,
        _planes(_standardized_back(on_y, y, scale)),
        (on_on * y).sum((0, 1, 2)),
        on_on.sum((0, 1, 2)),
        *_linear_back(on_p, gated),
        *_linear_back(on_g, xn),
    )


def _widened(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays in the one dtype that the definition computes in."""
    arrays = [wide(array) for array in arrays]
    dtype = promoted(arrays)
    return [array if array is None else cast(array, dtype) for array in arrays]


def _formula(a: Any) -> tuple[Any, Any]:
    """Return the update and o, the definition of both."""
    w = _widened(a[:14])
    o = _product(*_sides(*[*w[:8], a.eps]), a.direction)
    out = _end(*[w[0], o, *w[2:4], *w[8:], a.eps, a.gate])
    return cast(out, a.x), cast(o, a.x)


def in_parts(
    sizes: Sequence[int], need: Callable[..., int], limit: int, *stages: Sequence[int]
) -> list[int]:
    """Return parts of every size that `need` no more than a limit, or the smallest that there are.

    The first size is divided first, which costs nothing, then what makes the most room. A stage is
    of parts that are not divided before all others are as small as it says; the last are the
    smallest.
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
    """Say once that a limit leaves room for small parts alone, and what would leave enough."""
    warn(
        f"triangle_multiplicative_update: max_memory is {limit}, which leaves room for small parts "
        f"alone, that take long; it should be at least {enough}"
    )


def slices(n: int, step: int) -> list[slice]:
    """Return slices of at most so many of n."""
    return [slice(low, min(low + step, n)) for low in range(0, n, max(step, 1))]


def _vjp_formula(a: Any) -> tuple[Any, ...]:
    r"""Return the cotangents of all arrays.

    A normalized vector :math:`\hat y = (y - \mathrm{mean}\, y) r` with the cotangent v gives y the
    cotangent :math:`r (v - \mathrm{mean}\, v - \hat y \, \mathrm{mean}(v \hat y))`. That o is
    computed anew, whatever `hidden` is, lets derivatives find the way through it.
    """
    return _gradients(a, a.dout, None)


def _gradients(a: Any, dout: Any, dhidden: Any) -> tuple[Any, ...]:
    arrays, direction, gate, eps = a[:14], a.direction, a.gate, a.eps
    *w, g, on_o_too = _widened((*arrays, dout, dhidden))

    def run(stage: Any, *args: Any) -> Any:
        return recomputed(stage, w[0])(*args)

    left, right = run(_sides, *w[:8], eps)
    o = _product(left, right, direction)
    on_xn, on_o, *ends = run(_end_back, w[0], o, *w[2:4], *w[8:], g, eps, gate)
    on_o = on_o if on_o_too is None else on_o + on_o_too
    on_sides = _product_back(on_o, left, right, direction)
    bars = (*run(_sides_back, *w[:8], *on_sides, on_xn, eps), *ends)
    return tuple(
        None if array is None else cast(bar, array) for bar, array in zip(bars, arrays, strict=True)
    )


def _pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    dout = namespace(a.x).zeros_like(a.x) if dy.out is None else dy.out
    if dy.hidden is not None:
        # `hidden` is internal: only direct calls of the primitive reach here.
        return _gradients(a, dout, dy.hidden)
    return trimul_vjp.to_run(*a[:14], y.hidden, dout, *a[14:], out=wanted)


_SIZES: dict[str, Any] = {
    "G": lambda a: a.x.shape[3] if a.gate == "output" else a.p_in_weight.shape[0] // 2
}
STATIC = {"direction": str, "gate": str, "precision": str, "eps": float, "max_memory": int}

trimul = Primitive(
    "triangle_multiplicative_update",
    family="trimul",
    arrays=ARRAYS,
    static=STATIC,
    sizes=_SIZES,
    outputs={"out": "like x", "hidden": "(B, H, N, N)"},
    formula=_formula,
    pullback=_pullback,
    saves=("hidden",),
    sixteen_bits=True,
)
trimul_vjp = Primitive(
    "triangle_multiplicative_update_vjp",
    family="trimul",
    arrays={**ARRAYS, "hidden": "(B, H, N, N)", "dout": "(B, N, N, C)"},
    static=STATIC,
    sizes=_SIZES,
    outputs={f"d{name}": f"like {name}" for name in ARRAYS},
    formula=_vjp_formula,
    sixteen_bits=True,
)


@op(trimul)
def triangle_multiplicative_update(
    x: ArrayT,
    direction: str = "outgoing",
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
    precision: str | None = None,
    gate: str = "output",
    *,
    max_memory: int | None = None,
    out: ArrayT | None = None,
    backend: str | None = None,
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

    over the channels: C of x, H of o.

    Parameters
    ----------
    x : array or tensor (B, N, N, C), float32 or float64; in torch bfloat16 and float16 too
        The pair representation; no units, as all that follows.
    direction : {"outgoing", "incoming"}
        Over which edges of a triangle the sum goes.
    mask : array or tensor that broadcasts to (B, N, N), bool or any float, optional
        m. Used in the dtype of x.
    norm_in_weight, norm_in_bias : array or tensor (C,), optional
        w and b of the LayerNorm of x: 1 and 0 if not given.
    p_in_weight, p_in_bias : array or tensor (2H, C), and (2H,), optional
        The projections :math:`W_p` and :math:`b_p`, left above right.
    g_in_weight, g_in_bias : array or tensor (2H, C), and (2H,), optional
        Their gates :math:`W_g` and :math:`b_g`.
    norm_out_weight, norm_out_bias : array or tensor (H,), optional
        w and b of the LayerNorm of o: 1 and 0 if not given.
    p_out_weight, p_out_bias : array or tensor (C, H), and (C,), optional
        The projection :math:`V_p` and :math:`c_p`.
    g_out_weight, g_out_bias : array or tensor (C, C), and (C,), optional
        Its gate :math:`V_g` and :math:`c_g`; with ``gate="hidden"``, (H, C) and (H,).
    eps : float
        ε, positive.
    precision : {None, "ieee", "tf32", "bf16", "fp16"}
        The least precision that factors of a product are rounded to; sums are float32 or better.
        None is "ieee" for float32 and float64, and that of x for 16 bits. On the CPU products are
        always those of "ieee". With float64 no other is allowed.
    gate : {"output", "hidden"}
        What the last gate multiplies: the output, as in AlphaFold, OpenFold, Boltz and
        cuEquivariance; or the normalized o, as in the gpu-mode TriMul problem.
    max_memory : int, optional
        The most bytes that forward or backward may use besides arguments, results and the memory
        of x, mask and weights in the dtype and layout that kernels take, for which they are done
        in parts: what is kept between products, and on the CPU the blocks that are between two.
        With less than parts of a sensible size need, smaller ones are used that take longer, of
        which a RuntimeWarning tells once with the number that would do; with less than the
        smallest need, these. NumPy and plain torch have no parts.

    Returns
    -------
    array or tensor (B, N, N, C)
        In the dtype of x.

    Notes
    -----
    Any N, C and H; the arrays may have different dtypes. Gradients go to every array. Of what is
    computed only o is kept for the backward; second derivatives, by torch alone, are formed in
    plain torch. `triangle_multiplicative_update.vjp` returns gradients for the arrays that were
    given, in the order of the signature; that of a mask is by its values, false or true too. Under
    autocast dtypes are left as they are. A row that is masked altogether is no special case: the
    LayerNorm of zeros is its bias.

    References
    ----------
    Jumper et al., Nature 596 (2021) 583, supplementary algorithms 11 and 12; Abramson et al.,
    Nature 630 (2024) 493, supplementary algorithms 12 and 13. Names and order of the arguments are
    those of cuEquivariance, which stacks left and right in this way.

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
    if max_memory is None:
        limit = 0
    else:
        limit = size(name, "max_memory", max_memory)
        if limit == 0:
            raise ValueError(f"{name}: max_memory is 0; it should be positive, or None")
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
    elif precision is None:
        precision = _OWN.get(dtype_name(x.dtype), "ieee")
    return to_run((x, mask, *weights, direction, gate, precision, eps, limit), "out")
