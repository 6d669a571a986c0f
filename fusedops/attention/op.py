"""Triangle attention: along each row of a pair representation, with a bias that all rows share.

The definition of value and gradient, some rows at a time, and the public op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from fusedops._frame.arrays import (
    ArrayT,
    cast,
    contiguous,
    detached,
    namespace,
    recomputed,
    widened,
    zeros,
)
from fusedops._frame.check import accumulator, dtype_name, no_derivative, real, refuse
from fusedops._frame.kinds import Made
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName

#: The logit of a missing key in a row that has others. A row that has none counts logits from
#: zero: in float32 the sum of its exponentials would be lost beside this number.
MISSING = -1e9
# The most bytes of the logits of a part of the rows, of which the definition has a few copies.
_MEMORY = 2**28


def _heads(x: Any) -> Any:
    """Return (B, N, Q, H, D) as contiguous (B, N, H, Q, D), or the reverse.

    Products of views may round otherwise.
    """
    return contiguous(x.swapaxes(2, 3))


def _transposed(x: Any) -> Any:
    return x.swapaxes(-1, -2)


def _softmax(q: Any, k: Any, bias: Any, mask: Any, scale: float) -> tuple[Any, Any]:
    """Return the softmax over keys (B, N, H, Q, K), and the logarithm of its denominator."""
    xp = namespace(q)
    logits = scale * (_heads(q) @ _transposed(_heads(k))) + bias[:, None]
    if mask is not None:
        present = mask[:, :, None, None]
        missing = MISSING * cast(present.any(-1)[..., None], logits)
        logits = xp.where(present, logits, missing)
    largest = detached(xp.amax(logits, -1))[..., None]
    shares = xp.exp(logits - largest)
    total = shares.sum(-1)[..., None]
    return shares / total, (xp.log(total) + largest)[..., 0]


def _attended(q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: float) -> tuple[Any, Any]:
    shares, lse = _softmax(q, k, bias, mask, scale)
    return _heads(shares @ _heads(v)), lse


def _pulled_back(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: float, dout: Any, dlse: Any
) -> tuple[Any, ...]:
    """Return the cotangents of q, k, v and the bias, by some rows."""
    shares, _ = _softmax(q, k, bias, mask, scale)
    dout = _heads(dout)
    dshares = dout @ _transposed(_heads(v))
    slope = dshares - (shares * dshares).sum(-1)[..., None]
    if dlse is not None:
        slope = slope + dlse[..., None]
    dlogits = shares * slope
    if mask is not None:
        dlogits = namespace(q).where(mask[:, :, None, None], dlogits, 0.0)
    dq, dk = scale * dlogits @ _heads(k), scale * _transposed(dlogits) @ _heads(q)
    dv = _transposed(shares) @ dout
    return *map(_heads, (dq, dk, dv)), dlogits.sum(1)


def _in_parts(stage: Callable[..., Any], a: Any, *more: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the results of a stage for some rows after the other."""
    B, N, Q, H, _ = a.q.shape
    row = B * H * Q * a.k.shape[2] * a.q.itemsize
    step = max(1, _MEMORY // max(1, row))
    for low in range(0, max(N, 1), step):
        q, k, v, mask, *rest = (
            None if x is None else x[:, low : low + step] for x in (a.q, a.k, a.v, a.mask, *more)
        )
        yield recomputed(stage, a.q)(q, k, v, a.bias, mask, a.scale, *rest)


def _wide(a: Any) -> Any:
    """Return the arguments with floats in the definition's dtype."""
    return widened(a._replace(mask=None))._replace(mask=a.mask)


def _formula(a: Any) -> tuple[Any, ...]:
    """Define the sums of values, and the logarithms of the softmax's denominators."""
    parts = zip(*_in_parts(_attended, _wide(a)), strict=True)
    out, lse = (namespace(a.q).concatenate(part, 1) for part in parts)
    return cast(out, a.q), cast(lse, accumulator(a.q))


def _gradients(a: Any, dlse: Any) -> tuple[Any, ...]:
    w = _wide(a)
    dlse = None if dlse is None else cast(dlse, w.q)
    *by_rows, dbias = zip(*_in_parts(_pulled_back, w, w.dout, dlse), strict=True)
    found = [*(namespace(a.q).concatenate(part, 1) for part in by_rows), sum(dbias)]
    return tuple([cast(dx, x) for dx, x in zip(found, (a.q, a.k, a.v, a.bias), strict=True)])


def _vjp_formula(a: Any) -> tuple[Any, ...]:
    """Return the cotangents of q, k, v and the bias.

    Compute the softmax anew and leave `out` and `lse` alone, so that torch can differentiate it.
    """
    return _gradients(a, None)


def _pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    q, k, v, bias, mask, scale = a
    dout = zeros(q, tuple(q.shape)) if dy.out is None else dy.out
    if dy.lse is not None:
        # `lse` is internal: only direct calls of the primitive reach here.
        made = attention_vjp.Arguments(q, k, v, bias, None, None, dout, mask, scale)
        return _gradients(made, dy.lse)
    return Call(attention_vjp, q, k, v, bias, y.out, y.lse, dout, mask, scale, out=wanted)


_ARRAYS = {
    "q": "(B, N, Q, H, D), D > 0",
    "k": "(B, N, K, H, D), K > 0",
    "v": "(B, N, K, H, D)",
    "bias": "(B, H, Q, K)",
}
_MASK = {"mask": "(B, N, K), integers, optional"}
_LSE = "(B, N, H, Q)"

attention_vjp = Primitive(
    "triangle_attention_vjp",
    family="attention",
    arrays={**_ARRAYS, "out": "(B, N, Q, H, D)", "lse": _LSE, "dout": "(B, N, Q, H, D)"},
    constants=_MASK,
    static={"scale": float},
    outputs={f"d{name}": f"like {name}" for name in _ARRAYS},
    formula=_vjp_formula,
)
attention = Primitive(
    "triangle_attention",
    family="attention",
    arrays=_ARRAYS,
    constants=_MASK,
    static={"scale": float},
    outputs={"out": "like q", "lse": f"{_LSE} summed of q"},
    formula=_formula,
    pullback=_pullback,
    saves=("out", "lse"),
)


def _present(mask: Any) -> Any:
    return mask != 0


@op(attention)
def triangle_attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    bias: ArrayT,
    mask: ArrayT | None = None,
    *,
    scale: float | None = None,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return attention along each row of a pair representation, with a bias that all rows share.

    .. math:: \mathrm{out}_{nq} = \sum_k \mathrm{softmax}_k(l_{nqk}) \, v_{nk}, \quad
              l_{nqk} = \begin{cases} s \, q_{nq} \cdot k_{nk} + b_{qk} & m_{nk} \ne 0 \\
              -10^9 & \text{otherwise} \end{cases}

    for every head. A row without any key has the mean of its values. A query has no softmax where
    b is −∞ for all keys of its row: its output and its derivatives are NaN, as in torch.

    Parameters
    ----------
    q : array or tensor (B, N, Q, H, D), float32 or float64; in torch bfloat16 and float16 too
        The queries of N rows, dimensionless like all arrays here; D > 0.
    k, v : array or tensor (B, N, K, H, D)
        The keys and the values of the rows; K > 0.
    bias : array or tensor (B, H, Q, K)
        b, the same for all rows: the logits of triangles' third edges.
    mask : array or tensor (B, N, K), bool, any integer or any float, optional
        m: zero where a key is missing. It has no gradient.
    scale : float, optional
        s; by default :math:`D^{-1/2}`.

    Returns
    -------
    array or tensor (B, N, Q, H, D)
        In the dtype of q; sums are of float32 or better.

    Raises
    ------
    ValueError
        If the mask requires a gradient.

    Notes
    -----
    q, k, v and bias have gradients, of any order in torch, and logits of missing keys have none.
    All arrays may have any strides: around ending nodes, q, k and v are ``x.transpose(1, 2)`` of
    those around starting nodes, and so is the result, without a copy. The kernels keep no logits:
    they go through blocks of keys with a running maximum, and save the logarithm of the softmax's
    denominator for the backward, which computes the logits again. The definition, which also
    serves derivatives from the second on, computes the logits of some rows at a time.

    References
    ----------
    Jumper et al., Nature 596 (2021) 583, supplementary algorithms 13 and 14; Dao,
    "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
    arXiv:2307.08691 (2023). Missing keys as in cuEquivariance and Boltz.

    Examples
    --------
    Logits are the bias alone, so that each query weights the two keys of its row by 3 : 1:

    >>> import numpy as np, fusedops
    >>> q = k = np.zeros((1, 1, 2, 1, 4))
    >>> v = np.array([0.0, 8.0]).reshape(1, 1, 2, 1, 1) + k
    >>> bias = np.log([[3.0, 1.0], [1.0, 3.0]]).reshape(1, 1, 2, 2)
    >>> fusedops.triangle_attention(q, k, v, bias)[0, 0, :, 0, 0].round(6).tolist()
    [2.0, 6.0]
    >>> mask = np.array([[[True, False]]])
    >>> fusedops.triangle_attention(q, k, v, bias, mask)[0, 0, :, 0, 0].tolist()
    [0.0, 0.0]
    """
    name = "triangle_attention"
    if mask is not None:
        no_derivative(name, "mask", mask)
        if dtype_name(mask.dtype) != "bool":
            mask = Made(_present, mask)  # type: ignore[assignment]
    scale = float(q.shape[-1] ** -0.5) if scale is None else real(name, "scale", scale)
    if not math.isfinite(scale):
        refuse(ValueError, name, "scale", f"is {scale}", "be a finite number")
    return to_run((q, k, v, bias, mask, scale), "out")
