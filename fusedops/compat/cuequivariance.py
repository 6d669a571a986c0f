r"""cuEquivariance's functions of pair representations, with its arguments.

::

    -from cuequivariance_torch import triangle_attention, triangle_multiplicative_update
    +from fusedops.compat.cuequivariance import triangle_attention, triangle_multiplicative_update

`register` puts them in the place of the package, for Boltz, OpenFold 3, Protenix and others. They
run on any device of torch, for any number of residues. The update and triangle attention are ours;
attention of tokens is torch's ``scaled_dot_product_attention``, for so many samples at a time that
their logits stay small.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Sequence
from typing import Any

import fusedops._frame.needs_torch

import torch
from torch.nn import functional as F

import fusedops
from fusedops._frame.arrays import allows_tf32
from fusedops._frame.check import (
    at_least_one,
    device_of,
    dtype_name,
    is_tensor,
    no_derivative,
    of_shape,
    one_of,
    refuse,
    same_device,
)
from fusedops.attention.op import MISSING
from fusedops.compat._packages import Package
from fusedops.compat.causal_conv1d import need_float, need_integers, need_tensor
from fusedops.nn import autocast_precision
from fusedops.pairs import absent_keys, autocasts, by_torch, expanded, in_parts

__all__ = [
    "TriMulPrecision",
    "attention_pair_bias",
    "mask_to_kv_lengths",
    "register",
    "triangle_attention",
    "triangle_multiplicative_update",
    "unregister",
]

#: The most bytes of logits, their softmax and gradients at one time.
_MEMORY = 2**31


class TriMulPrecision(enum.IntEnum):
    """Precisions of products, by cuEquivariance's names and numbers.

    TF32x3 adds three products of TF32, which gives nearly float32's digits; "float32" serves it.

    Attributes
    ----------
    NONE, DEFAULT, TF32, TF32x3, IEEE, MXFP8, BFLOAT16
        The members. MXFP8 is refused.

    References
    ----------
    cuEquivariance 0.13, ``cuequivariance_torch.TriMulPrecision``.

    Examples
    --------
    >>> from fusedops.compat.cuequivariance import TriMulPrecision
    >>> TriMulPrecision.TF32.value
    1
    """

    NONE = -1
    DEFAULT = 0
    TF32 = 1
    TF32x3 = 2
    IEEE = 3
    MXFP8 = 4
    BFLOAT16 = 5


#: Our precision by cuEquivariance's names, in small letters.
_PRECISIONS = {
    "none": None,
    "default": None,
    "tf32": "tf32",
    "tf32x3": "float32",
    "ieee": "ieee",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
}


def _precision(given: Any, x: torch.Tensor, weights: Sequence[Any]) -> str | None:
    """Return the precision that we call by another name."""
    name = given
    if isinstance(given, enum.Enum):
        # cuEquivariance's own members are of another class.
        name = given.name
    elif isinstance(given, int) and not isinstance(given, bool):
        name = {member.value: member.name for member in TriMulPrecision}.get(given)
    if given is not None and (not isinstance(name, str) or name.lower() not in _PRECISIONS):
        should = "None, a TriMulPrecision, or one of " + ", ".join(_PRECISIONS)
        raise ValueError(
            f"triangle_multiplicative_update: precision is {given!r}; it should be {should}"
        )
    found = None if given is None else _PRECISIONS[str(name).lower()]
    if found is None and (asked := autocast_precision(x, weights)) is not None:
        return asked
    if found is None and x.is_cuda and x.dtype == torch.float32 and allows_tf32():
        return "tf32"
    return found


def triangle_multiplicative_update(
    x: torch.Tensor,
    direction: str = "outgoing",
    mask: torch.Tensor | None = None,
    norm_in_weight: torch.Tensor | None = None,
    norm_in_bias: torch.Tensor | None = None,
    p_in_weight: torch.Tensor | None = None,
    p_in_bias: torch.Tensor | None = None,
    g_in_weight: torch.Tensor | None = None,
    g_in_bias: torch.Tensor | None = None,
    norm_out_weight: torch.Tensor | None = None,
    norm_out_bias: torch.Tensor | None = None,
    p_out_weight: torch.Tensor | None = None,
    p_out_bias: torch.Tensor | None = None,
    g_out_weight: torch.Tensor | None = None,
    g_out_bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    precision: TriMulPrecision | str | int | None = None,
) -> torch.Tensor:
    r"""Return the triangle multiplicative update of a pair representation.

    .. math:: \mathrm{out}_{ij} = p\Bigl(\sum_k l_{ik} \odot r_{jk}\Bigr) \odot g_{ij}

    in short; see `fusedops.triangle_multiplicative_update`, which has the other arguments.

    Parameters
    ----------
    x : tensor (..., N, N, C), float32, float64, bfloat16 or float16
        The pair representation.
    direction, mask, norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias
        As of `fusedops.triangle_multiplicative_update`.
    norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias, eps
        As of `fusedops.triangle_multiplicative_update`.
    precision : TriMulPrecision, str or int, optional
        The precision to which a product may round its factors: a member of this module's enum or
        of cuEquivariance's, or its name in any case; "bf16", "bfloat16" and "fp16" too. By default
        that of x; of float32 that of autocast where it is on, or else on a GPU TF32 if
        ``torch.backends.cuda.matmul.allow_tf32``.

    Returns
    -------
    tensor (..., N, N, D)
        In the dtype of x.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape, device or value; the message names it. A
        projection or its gate that isn't given is refused, where cuEquivariance draws random
        numbers; "mxfp8" is refused.

    References
    ----------
    cuEquivariance 0.13, ``cuequivariance_torch.triangle_multiplicative_update``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.cuequivariance import TriMulPrecision, triangle_multiplicative_update
    >>> x, square = torch.randn(5, 5, 4), torch.randn(4, 4)
    >>> given = {f"{name}_in_weight": torch.randn(8, 4) for name in "pg"}
    >>> given |= {f"{name}_out_weight": square for name in "pg"}
    >>> triangle_multiplicative_update(x, **given, precision=TriMulPrecision.IEEE).shape
    torch.Size([5, 5, 4])
    """
    # Any, as type checkers don't know how many weights there are.
    op: Any = fusedops.triangle_multiplicative_update
    weights = (
        *(norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias),
        *(norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias),
    )
    return op(x, direction, mask, *weights, eps, _precision(precision, x, weights))


def _check(op: str, name: str, value: Any, first: str, like: Any, mixed: bool = False) -> None:
    """Raise unless an argument is a float tensor on a first one's device, and of its dtype too."""
    need_float(op, name, value)
    same_device(op, name, device_of(value), first, device_of(like))
    if value.dtype != like.dtype and not mixed:
        was, should = (f"dtype {dtype_name(x.dtype)}" for x in (value, like))
        refuse(TypeError, op, name, f"has {was}", f"have {should}, as {first} has")


def _need_mask(op: str, mask: Any, like: str, other: torch.Tensor) -> None:
    """Raise unless a mask is a tensor on the device of another argument."""
    need_tensor(op, "mask", mask)
    same_device(op, "mask", device_of(mask), like, device_of(other))


def _rows_at_once(q: torch.Tensor, keys: int) -> int:
    """Return how many rows of q (B, R, H, Q, D) attention takes at one time."""
    batch, _, heads, queries, _ = q.shape
    # The bias of a row, the logits and their softmax, and their gradients; torch computes 16 bits
    # in float32 where it has no kernel.
    arrays = 6 if torch.is_grad_enabled() else 4
    row = arrays * batch * heads * queries * keys * max(4, q.element_size())
    return max(1, _MEMORY // max(1, row))


def _statistics(q: Any, k: Any, bias: Any, present: Any = None, *, scale: float | None) -> Any:
    """Return the logarithm of the softmax's denominator, and the maximum that it leaves out."""
    accumulator = torch.promote_types(q.dtype, torch.float32)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    logits = factor * (q.to(accumulator) @ k.to(accumulator).mT) + bias
    if present is not None:
        logits = torch.where(present, logits, MISSING)
    maximum = logits.amax(-1, keepdim=True)
    return torch.cat([(logits - maximum).logsumexp(-1, keepdim=True), maximum], -1).float()


def _attended(q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: float | None) -> Any:
    """Return attention by our op; rows with a bias of their own go to it as batches of one row."""
    batch, rows = q.shape[:2]
    own = bias.shape[1] != 1
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    mask = None if mask is None else mask[:, :, 0, 0]
    if own:
        q, k, v = (x.flatten(0, 1).unsqueeze(1) for x in (q, k, v))
        mask = None if mask is None else mask.flatten(0, 1).unsqueeze(1)
    bias = bias.flatten(0, 1) if own else bias[:, 0]
    out = fusedops.triangle_attention(q, k, v, bias, mask, scale=scale)
    return (out.squeeze(1).unflatten(0, (batch, rows)) if own else out).transpose(2, 3)


def mask_to_kv_lengths(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of keys of each row, from a mask that is true for the first ones.

    Parameters
    ----------
    mask : tensor (B, N, 1, 1, K) or (N, 1, 1, K), bool or any number
        Which keys are present.

    Returns
    -------
    tensor (B, N, 1, 1, 1), int32
        The `kv_lengths` of `triangle_attention`.

    Raises
    ------
    TypeError, ValueError
        If the mask is no tensor, has another shape, or lacks a key before one that is present.

    References
    ----------
    cuEquivariance 0.13, ``cuequivariance_torch.mask_to_kv_lengths``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.cuequivariance import mask_to_kv_lengths
    >>> mask_to_kv_lengths(torch.tensor([[1, 1, 0], [0, 0, 0]]).view(2, 1, 1, 3)).flatten().tolist()
    [2, 0]
    """
    op = "mask_to_kv_lengths"
    need_tensor(op, "mask", mask)
    present = mask[(None,) * (5 - mask.ndim)].bool()
    of_shape(op, "mask", present, ("B", "N", 1, 1, "K"))
    lengths = present.sum(-1, keepdim=True, dtype=torch.int32)
    if not torch.equal(present, torch.arange(mask.shape[-1], device=mask.device) < lengths):
        refuse(ValueError, op, "mask", "has a missing key before others", "be padded at the end")
    return lengths


def triangle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Return attention along each row of a pair representation, with a bias that all rows share.

    .. math:: \mathrm{out}_{nq} = \sum_k \mathrm{softmax}_k(l_{nqk}) \, v_{nk}, \quad
              l_{nqk} = \begin{cases} s \, q_{nq} \cdot k_{nk} + b_{qk} & m_{nk} \ne 0 \\
              -10^9 & \text{otherwise} \end{cases}

    for every head. A row of which the mask has no key has the mean of its values; for K = 0, and
    where `kv_lengths` is 0, out is zero.

    Parameters
    ----------
    q : tensor (B, N, H, Q, D) or (N, H, Q, D), float32, float64, bfloat16 or float16
        Queries.
    k, v : tensor (B, N, H, K, D) or (N, H, K, D)
        Keys and values, in the dtype of q.
    bias : tensor (B, 1, H, Q, K) or (1, H, Q, K), any float
        b, rounded to the dtype of q; also one for each row, (B, N, H, Q, K).
    mask : tensor (B, N, 1, 1, K) or (N, 1, 1, K), bool or any number, optional
        m; has no gradient.
    scale : float or tensor (), optional
        s; :math:`1 / \sqrt D` by default; has no gradient.
    return_aux : bool
        Whether to return two results besides, which have no gradient.
    kv_lengths : tensor (B, N, 1, 1, 1), int32 or int64, optional
        The number of keys of each row, in place of a mask; K at most counts. Where it is 0, all
        results are.

    Returns
    -------
    out : tensor (B, N, H, Q, D)
        In the dtype of q, with B = 1 for four axes too, as in cuEquivariance.
    lse, max : tensor (B, N, H, Q, 1), float32
        With `return_aux`: :math:`\log \sum_k \exp(l_{nqk} - \max_k l_{nqk})`, and the maximum.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device, or mask and `kv_lengths` are both
        given; the message names it.

    Notes
    -----
    `fusedops.triangle_attention` computes the result, a result of `return_aux` torch: there logits
    take 2 GiB at most, or one row's. Autocast changes nothing.

    References
    ----------
    cuEquivariance 0.13, ``cuequivariance_torch.triangle_attention``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.cuequivariance import triangle_attention
    >>> q = k = v = torch.randn(1, 5, 2, 5, 8)
    >>> triangle_attention(q, k, v, torch.randn(1, 1, 2, 5, 5)).shape
    torch.Size([1, 5, 2, 5, 8])
    """
    op = "triangle_attention"
    for name, value in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        _check(op, name, value, "q", q, mixed=value is bias)
    q, k, v = (x[None] if x.ndim == 4 else x for x in (q, k, v))
    of_shape(op, "q", q, ("B", "N", "H", "Q", "D"))
    batch, rows, heads, queries, channels = q.shape
    of_shape(op, "k", k, (batch, rows, heads, "K", channels))
    keys = k.shape[3]
    of_shape(op, "v", v, (batch, rows, heads, keys, channels))
    shared = bias.ndim < 4 or bias.shape[-4] == 1
    shape = batch, 1 if shared else rows, heads, queries, keys
    bias = expanded(op, bias.to(q.dtype), shape, "bias")
    if kv_lengths is not None:
        if mask is not None:
            refuse(ValueError, op, "kv_lengths", "is given with mask", "be None, or mask should")
        need_integers(op, "kv_lengths", kv_lengths, (batch, rows, 1, 1, 1), q, "q")
        empty = kv_lengths <= 0
        mask = torch.arange(keys, device=q.device) < kv_lengths
    if mask is not None:
        _need_mask(op, mask, "q", q)
        mask = expanded(op, mask.detach() != 0, (batch, rows, 1, 1, keys))
    if is_tensor(scale):
        of_shape(op, "scale", scale, ())
        no_derivative(op, "scale", scale)
        scale = float(scale)
    if keys and q.numel():
        out = _attended(q, k, v, bias, mask, scale)
    else:  # zeros, with a graph
        out = ((q @ k.mT + bias) @ v).to(q.dtype)
    if kv_lengths is not None:
        out = out.masked_fill(empty, 0.0)
    if not return_aux:
        return out
    if not keys:
        was = f"has shape {tuple(k.shape)}"
        refuse(ValueError, op, "k", was, "have keys, whose maximum return_aux asks for")
    given = [q, k, bias] if mask is None else [q, k, bias, mask]
    statistics = functools.partial(_statistics, scale=scale)
    own, asked = None if shared else 1, autocasts(q)
    plain = torch.autocast(q.device.type, enabled=False) if asked else contextlib.nullcontext()
    with torch.no_grad(), plain:
        found = in_parts(statistics, (1, 1, own, 1), _rows_at_once(q, keys), *given)
    if kv_lengths is not None:
        found = found.masked_fill(empty, 0.0)
    lse, largest = found.split(1, -1)
    return out, lse, largest


def attention_pair_bias(
    single_repr: torch.Tensor,
    pair_repr: torch.Tensor,
    mask: torch.Tensor | None,
    num_heads: int,
    w_ln_a: torch.Tensor | None,
    b_ln_a: torch.Tensor | None,
    w_proj_q: torch.Tensor,
    b_proj_q: torch.Tensor | None,
    w_proj_k: torch.Tensor,
    w_proj_v: torch.Tensor,
    w_proj_g: torch.Tensor,
    w_proj_o: torch.Tensor,
    w_proj_z: torch.Tensor | None = None,
    b_proj_o: torch.Tensor | None = None,
    b_proj_z: torch.Tensor | None = None,
    w_ln_z: torch.Tensor | None = None,
    b_ln_z: torch.Tensor | None = None,
    inf: float = 1e6,
    eps: float = 1e-5,
    attn_scale: float | None = None,
    return_z_proj: bool = False,
    is_cached_z_proj: bool = False,
    *,
    b_proj_k: torch.Tensor | None = None,
    b_proj_v: torch.Tensor | None = None,
    w_ln_q: torch.Tensor | None = None,
    b_ln_q: torch.Tensor | None = None,
    w_ln_k: torch.Tensor | None = None,
    b_ln_k: torch.Tensor | None = None,
    b_proj_g: torch.Tensor | None = None,
    norm_kind: str = "layer_norm",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Return gated attention of tokens to each other, with a bias of their pair representation.

    .. math:: n = \mathrm{norm}(a), \quad (q, k, v)_i = W_{q,k,v} n_i + c_{q,k,v}, \quad
              b_{ij} = W_z \, \mathrm{norm}(z_{ij}) + c_z

    .. math:: \mathrm{out}_i = W_o \Bigl(\sigma(W_g n_i + c_g) \odot \sum_j
              \mathrm{softmax}_j\bigl(s \, q_i \cdot k_j + b_{ij} - (1 - m_j) \, \infty\bigr)
              \, v_j\Bigr) + c_o

    where q, k, v and b have H heads, and M samples of tokens may share one pair representation.

    Parameters
    ----------
    single_repr : tensor (B * M, N, C), float32, float64, bfloat16 or float16
        a.
    pair_repr : tensor (B, N, N, Z), or (B, H, N, N) with `is_cached_z_proj`
        z, or b.
    mask : tensor (B, N) or (B * M, N), bool or any number, optional
        m, one where a token is there and zero where it is missing; has no gradient if it is bool. A
        sample without tokens is treated as one with all.
    num_heads : int
        H.
    w_ln_a, b_ln_a, w_ln_z, b_ln_z : tensor (C,), (C,), (Z,) and (Z,), optional
        Weights and biases of the norms of a and z; ones and zeros by default.
    w_proj_q, w_proj_k, w_proj_v, w_proj_g : tensor (H * D, C)
        W of queries, keys, values and gate; `b_proj_q`, `b_proj_k`, `b_proj_v` and `b_proj_g`
        (H * D,) are their c, without which it is zero.
    w_proj_o : tensor (C, H * D)
        W of the output, with `b_proj_o` (C,).
    w_proj_z : tensor (H, Z), optional
        W of the bias, with `b_proj_z` (H,); unused with `is_cached_z_proj`.
    b_proj_q, b_proj_o, b_proj_z, b_proj_k, b_proj_v, b_proj_g : tensor, optional
        See above.
    inf : float
        The bias of a missing token, without its sign; half of the dtype's largest number at most.
    eps : float
        ε of the norms.
    attn_scale : float, optional
        s; :math:`1 / \sqrt D` by default.
    return_z_proj, is_cached_z_proj : bool
        Whether to return b, and whether `pair_repr` is b.
    w_ln_q, b_ln_q, w_ln_k, b_ln_k : tensor (H * D,), optional
        Weights and biases of norms of q and k over all heads; without both of them there is none.
    norm_kind : {"layer_norm", "rms_norm"}
        All norms; a norm by the root of the mean square has no biases.

    Returns
    -------
    out : tensor (B * M, N, C)
        In the dtype of a, or of autocast.
    z_proj : tensor (B, H, N, N), or None
        b, with `return_z_proj`.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape, device or value; the message names it.

    References
    ----------
    Abramson et al., Nature 630 (2024) 493, supplementary algorithm 24; names from cuEquivariance
    0.13, ``cuequivariance_torch.attention_pair_bias``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.cuequivariance import attention_pair_bias
    >>> a, z, square = torch.randn(2, 5, 4), torch.randn(1, 5, 5, 3), torch.randn(4, 4)
    >>> given = dict.fromkeys(["w_ln_a", "b_ln_a", "b_proj_q"])
    >>> given |= {f"w_proj_{name}": square for name in "qkvgo"}
    >>> out, bias = attention_pair_bias(
    ...     a, z, None, 2, **given, w_proj_z=torch.randn(2, 3), return_z_proj=True
    ... )
    >>> out.shape, bias.shape
    (torch.Size([2, 5, 4]), torch.Size([1, 2, 5, 5]))
    """
    op = "attention_pair_bias"
    at_least_one(op, num_heads=num_heads)
    one_of(op, "norm_kind", norm_kind, ("layer_norm", "rms_norm"))

    def check(name: str, value: Any, *shape: int | str) -> None:
        _check(op, name, value, "single_repr", single_repr, mixed=mixed)
        of_shape(op, name, value, shape)

    need_tensor(op, "single_repr", single_repr)
    mixed = autocasts(single_repr)
    check("single_repr", single_repr, "B * M", "N", "C")
    total, tokens, channels = single_repr.shape
    check("w_proj_q", w_proj_q, "H * D", channels)
    inner = w_proj_q.shape[0]
    if inner % num_heads:
        was, should = f"has {inner} rows", f"have a multiple of num_heads, {num_heads}"
        refuse(ValueError, op, "w_proj_q", was, should)
    for name, weight in (("w_proj_k", w_proj_k), ("w_proj_v", w_proj_v), ("w_proj_g", w_proj_g)):
        check(name, weight, inner, channels)
    check("w_proj_o", w_proj_o, channels, inner)
    optional: list[tuple[str, Any, int]] = [
        *(("w_ln_a", w_ln_a, channels), ("b_ln_a", b_ln_a, channels)),
        *(("b_proj_q", b_proj_q, inner), ("b_proj_k", b_proj_k, inner)),
        *(("b_proj_v", b_proj_v, inner), ("b_proj_g", b_proj_g, inner)),
        *(("w_ln_q", w_ln_q, inner), ("b_ln_q", b_ln_q, inner)),
        *(("w_ln_k", w_ln_k, inner), ("b_ln_k", b_ln_k, inner)),
        ("b_proj_o", b_proj_o, channels),
    ]
    if is_cached_z_proj:
        check("pair_repr", pair_repr, "B", num_heads, tokens, tokens)
    else:
        check("pair_repr", pair_repr, "B", tokens, tokens, "Z")
        width = pair_repr.shape[-1]
        check("w_proj_z", w_proj_z, num_heads, width)
        optional += [("w_ln_z", w_ln_z, width), ("b_ln_z", b_ln_z, width)]
        optional += [("b_proj_z", b_proj_z, num_heads)]
    for name, value, size in optional:
        if value is not None:
            check(name, value, size)
            if norm_kind == "rms_norm" and name.startswith("b_ln"):
                refuse(ValueError, op, name, "is given", "be None, as norm_kind is 'rms_norm'")
    batch = pair_repr.shape[0]
    if batch == 0 or total % batch:
        was, should = f"has {total} samples", f"have a multiple of pair_repr's, {batch}"
        refuse(ValueError, op, "single_repr", was, should)
    samples = total // batch

    def normalized(x: Any, weight: Any, bias: Any) -> Any:
        if norm_kind == "rms_norm":
            return F.rms_norm(x, x.shape[-1:], weight, eps)
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def by_heads(x: Any) -> Any:
        return x.unflatten(-1, (num_heads, -1)).unflatten(0, (batch, samples)).transpose(2, 3)

    n = normalized(single_repr, w_ln_a, b_ln_a)
    q, k = F.linear(n, w_proj_q, b_proj_q), F.linear(n, w_proj_k, b_proj_k)
    if w_ln_q is not None or b_ln_q is not None:
        q = normalized(q, w_ln_q, b_ln_q)
    if w_ln_k is not None or b_ln_k is not None:
        k = normalized(k, w_ln_k, b_ln_k)
    v = F.linear(n, w_proj_v, b_proj_v)
    z_proj = pair_repr
    if w_proj_z is not None and not is_cached_z_proj:
        z_proj = F.linear(normalized(pair_repr, w_ln_z, b_ln_z), w_proj_z, b_proj_z)
        z_proj = z_proj.permute(0, 3, 1, 2).contiguous()
    # A norm of q or k has a dtype of its own under autocast.
    given: list[torch.Tensor] = [by_heads(x.to(v.dtype)) for x in (q, k, v)]
    if mask is not None:
        _need_mask(op, mask, "single_repr", single_repr)
        if mask.shape not in ((batch, tokens), (total, tokens)):
            should = f"be ({batch}, {tokens}) or ({total}, {tokens})"
            refuse(ValueError, op, "mask", f"has shape {tuple(mask.shape)}", should)
        # A bias on all keys of a sample would only cost its logits digits.
        absent, _ = absent_keys(mask, v.dtype)
        absent = absent.reshape(batch, mask.shape[0] // batch, 1, 1, tokens)
        given.append(absent.expand(batch, samples, 1, 1, tokens))
    missing = -min(inf, torch.finfo(v.dtype).max / 2)

    def attended(q: Any, k: Any, v: Any, absent: Any = None) -> Any:
        return by_torch(q, k, v, z_proj.unsqueeze(1), absent, missing, scale=attn_scale)

    o = in_parts(attended, (1,) * len(given), _rows_at_once(given[0], tokens), *given)
    gate = F.linear(n, w_proj_g, b_proj_g).sigmoid()
    out = F.linear(gate * o.transpose(2, 3).flatten(3).flatten(0, 1), w_proj_o, b_proj_o)
    return out, z_proj if return_z_proj else None


_FUNCTIONS = (
    "attention_pair_bias",
    "mask_to_kv_lengths",
    "triangle_attention",
    "triangle_multiplicative_update",
)
_PRECISION = {"TriMulPrecision": TriMulPrecision}
PACKAGE = Package(
    "cuequivariance_torch",
    "cuequivariance-torch",
    "0.13.0",
    {
        "cuequivariance_torch": _FUNCTIONS,
        "cuequivariance_torch.primitives": (),
        "cuequivariance_torch.primitives.triangle": _FUNCTIONS,
        "cuequivariance_ops_torch": tuple(f for f in _FUNCTIONS if f != "mask_to_kv_lengths"),
        "cuequivariance_ops_torch.triangle_attention": ("triangle_attention",),
    },
    globals(),
    constants={
        "cuequivariance_torch": _PRECISION,
        "cuequivariance_torch.primitives.triangle": _PRECISION,
        "cuequivariance_ops_torch": _PRECISION,
        # OpenFold 3 computes attention of so few residues itself.
        "cuequivariance_ops_torch.triangle_attention": {"CUEQ_TRIATTN_FALLBACK_THRESHOLD": 0},
    },
)


def register(*, replace: bool = False) -> None:
    """Put our functions in the place of ``cuequivariance_torch`` from now on.

    Call it in every process, before the package is imported, and before OpenFold 3, which looks for
    it once. Programs that import the package, such as Boltz and Protenix, then get our four
    functions and `TriMulPrecision`, on any device, whether the package is installed or not;
    ``cuequivariance_ops_torch`` has them too. All else in these packages is missing meanwhile, such
    as equivariant products. `fusedops.compat.swaps` counts calls. A second call changes nothing.

    Parameters
    ----------
    replace : bool
        Whether to replace an imported package. Modules that imported its functions by name call
        ours then, as with `fusedops.compat.causal_conv1d.register`.

    Raises
    ------
    RuntimeError
        If the package is imported already, and `replace` is False.

    Notes
    -----
    A program's own conditions stay: without a GPU Boltz's prediction doesn't call the package, and
    OpenFold 3 doesn't for heads of more than 32 channels in float32.

    Examples
    --------
    >>> import fusedops.compat.cuequivariance
    >>> fusedops.compat.cuequivariance.register()
    >>> from cuequivariance_torch.primitives.triangle import triangle_attention
    >>> triangle_attention.__wrapped__.__module__
    'fusedops.compat.cuequivariance'
    >>> fusedops.compat.cuequivariance.unregister()
    """
    PACKAGE.register(replace)


def unregister() -> None:
    """Give programs the ``cuequivariance_torch`` that there was before `register`, or none.

    Functions that a program has imported by name since then stay ours. Without `register` before,
    nothing changes.

    Examples
    --------
    >>> import fusedops.compat.cuequivariance
    >>> fusedops.compat.cuequivariance.unregister()
    """
    PACKAGE.unregister()
