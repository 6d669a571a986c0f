"""Triangle attention on the GPU, by blocks of queries and keys whose logits stay in registers.

The forward goes through a row's keys with a running maximum. The backward has three kernels, each
of which makes the logits again: for dq along keys, for dk and dv along queries, and for dbias along
rows, whose logits share a block of the bias. So each gradient is a sum of one program, or of a few
parts in their order.

Operations, times B·N·H·Q·K·D: forward 4, and 6, 8 and 4 for dq, for dk with dv, and for dbias; one
exponential for every logit and kernel. Arrays beside the arguments: lse and two like it, parts of
dbias, and four scales for every head of a row.

A number of float32 is split into two of float16 where it is loaded or made, as in
`gpukern.products`, but all vectors of a head in a row have one scale, which a kernel finds ahead,
and lower halves are not times 2¹¹: then all products are added up in place. Heads whose vectors
halves don't hold are left to a second launch, of six products of bfloat16 (`gpukern.precision`),
whose other programs end at once.

Two warps make products of 64 rows, since asynchronous instructions, which take four, would take a
computed factor from registers, to which the assembler of CUDA 12 writes too early
(https://github.com/triton-lang/triton/pull/11781).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedops._frame.check import promoted
from fusedops._frame.registry import register
from fusedops.attention.op import MISSING, attention, attention_vjp
from gpukern.launch import (
    Launcher,
    begin_vectors,
    is_small,
    kernel_of_any_size,
    power,
    processors,
    wide,
)
from gpukern.precision import EMULATED, of_float32
from gpukern.products import row_scaling

_LOG2E = tl.constexpr(math.log2(math.e))
_MISSING = tl.constexpr(MISSING)
# Strides are counted in vectors of so many numbers where all are multiples of it.
_UNIT = 8
# Halves hold a number to 2⁻³⁹ of a head's largest, so that vectors within so many powers of two
# of it keep 24 binary digits.
_REACH = tl.constexpr(15)
# Shares fill the range of float16 times 2¹⁴, and cotangents of logits times 2⁻¹⁶ over the length of
# vectors, as a product of scaled ones is at most 2³⁰ times that length.
_RAISE, _FALL = tl.constexpr(2.0**14), tl.constexpr(2.0**-16)
# Most cotangents of logits are far below that bound, so that their lower halves are raised.
_RISE = tl.constexpr(2048)
# Mask entries that a program looks at together.
_LOOK = tl.constexpr(1024)
# Programs for dbias that a processor has at a time, the most parts of its sum, and the rows whose
# time a part takes to store.
_TOGETHER, _MOST_PARTS, _PART = 4, 4, 2
# The fewest logits whose products repay the scales of halves.
_LEAST = 1 << 24
# The longest vectors of heads for whose tiles every GPU has shared memory.
_LONGEST = 256

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Tile(NamedTuple):
    """Queries, keys, warps and stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int


# By precision, longest vectors of heads, and kernel; of others, programs take less.
_TILES = {
    "16 bits": {
        64: {
            "forward": Tile(64, 64, 2, 3),
            "queries": Tile(32, 32, 1, 3),
            "keys": Tile(32, 32, 1, 3),
            "bias": Tile(64, 64, 4, 3),
        },
    },
    "halves": {
        32: {
            "forward": Tile(64, 32, 2, 3),
            "queries": Tile(64, 32, 2, 3),
            "keys": Tile(16, 64, 2, 3),
            "bias": Tile(32, 64, 2, 2),
        },
        64: {
            "forward": Tile(64, 16, 2, 3),
            "queries": Tile(64, 16, 2, 2),
            "keys": Tile(16, 32, 2, 3),
            "bias": Tile(32, 32, 2, 1),
        },
    },
    EMULATED: {
        32: {
            "forward": Tile(64, 32, 2, 2),
            "queries": Tile(64, 32, 2, 2),
            "keys": Tile(16, 64, 2, 2),
            "bias": Tile(64, 32, 2, 2),
        },
        64: dict.fromkeys(("forward", "queries", "keys", "bias"), Tile(32, 32, 2, 2)),
    },
}


@triton.jit
def _at(x, batch, n, head, by_batch, by_row, by_head, UNIT: tl.constexpr):
    """Return where a head of a row begins."""
    return x + (batch * by_batch + n * by_row + head * by_head) * UNIT


@triton.jit
def _load(x, local, stride, D: tl.constexpr, HEAD: tl.constexpr, UNIT: tl.constexpr):
    """Load vectors of D numbers."""
    d = tl.arange(0, HEAD)
    at = x + local.to(tl.int64)[:, None] * stride * UNIT + d[None, :]
    if D == HEAD:
        return tl.load(at)
    return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _store(x, value, row, index, live, head, length, H, D: tl.constexpr, HEAD: tl.constexpr):
    """Store vectors in an array (rows, length, H, D)."""
    d = tl.arange(0, HEAD)
    at = x + ((row * length + index)[:, None] * H + head) * D + d[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit
def _factor(x, TYPE: tl.constexpr, PRECISION: tl.constexpr, scale=1.0, RISE: tl.constexpr = 1):
    """Return a product's factor twice, or the halves of scaled numbers, the lower times RISE."""
    if PRECISION == "halves":
        x = x.to(tl.float32) * scale
        hi = x.to(tl.float16)
        return hi, ((x - hi.to(tl.float32)) * RISE).to(tl.float16)
    else:
        factor = x.to(TYPE)
        return factor, factor


@triton.jit
def _turned(x):
    hi, low = x
    return tl.trans(hi), tl.trans(low)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr, RISE: tl.constexpr = 1):
    """Return a product, of halves from the smallest part on; the lower half of a is times RISE."""
    a_hi, a_low = a
    b_hi, b_low = b
    if PRECISION == "halves":
        total = tl.dot(a_low, b_hi)
        if RISE != 1:
            total *= 1 / RISE
        return tl.dot(a_hi, b_hi, tl.dot(a_hi, b_low, total))
    else:
        return tl.dot(a_hi, b_hi, input_precision=PRECISION)


@triton.jit
def _inverse(power):
    """Return the inverse of a power of two."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _scales(scales, head):
    """Return the scales of a head of q, k, v and dout, and whether halves serve it."""
    if scales is None:
        return 1.0, 1.0, 1.0, 1.0, True
    else:
        at = scales + 4 * head
        q, k, v, o = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        return q, k, v, o, tl.minimum(tl.minimum(q, k), tl.minimum(v, o)) > 0


@triton.jit
def _unscaled(factor, a, b, PRECISION: tl.constexpr):
    """Return a factor for products of vectors that were scaled."""
    if PRECISION == "halves":
        return _inverse(a) * _inverse(b) * factor
    else:
        return factor


@triton.jit
def _scale(
    x, length, batch, n, head, by_batch, by_row, by_vector, by_head, D: tl.constexpr,
    HEAD: tl.constexpr, VECTORS: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Return the scale of a head's halves, or zero where these would lose digits of a vector."""
    x = _at(x, batch, n, head, by_batch, by_row, by_head, UNIT)
    INFINITE: tl.constexpr = 0x7F800000
    most = tl.zeros([VECTORS], tl.int32)
    least = most + INFINITE
    for step in range(tl.cdiv(length, VECTORS) if STEPS is None else STEPS):
        index = tl.minimum(step * VECTORS + tl.arange(0, VECTORS), length - 1)
        value = _load(x, index, by_vector, D, HEAD, UNIT).to(tl.float32)
        bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        most = tl.maximum(most, bits)
        least = tl.minimum(least, tl.where(bits == 0, INFINITE, bits))
    largest, smallest = tl.max(most, 0), tl.min(least, 0)
    exponent = largest >> 23
    # From 2⁻⁶⁰ to 2⁴¹, so that products of three scales are in the range of float32.
    near = (exponent >= 67) & (exponent <= 168) & (exponent - (smallest >> 23) <= _REACH)
    scale, _ = row_scaling(largest.to(tl.float32, bitcast=True))
    return tl.where(near | (largest == 0), scale, 0.0)


def measure(
    q, k, v, dout, scales,
    N, H, Q, K,
    q_batch, q_row, q_query, q_head, k_batch, k_row, k_key, k_head, v_batch, v_row, v_key, v_head,
    o_batch, o_row, o_query, o_head,
    D: tl.constexpr, HEAD: tl.constexpr, VECTORS: tl.constexpr, UNIT: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Find scales for the halves of each array's heads."""
    program = tl.program_id(0)
    which, head = program % 4, (program // 4 % H).to(tl.int64)
    row = (program // 4 // H).to(tl.int64)
    batch, n = row // N, row % N
    scale = 1.0
    if which == 0:
        scale = _scale(
            q, Q, batch, n, head, q_batch, q_row, q_query, q_head, D, HEAD, VECTORS, UNIT, STEPS
        )
    if which == 1:
        scale = _scale(
            k, K, batch, n, head, k_batch, k_row, k_key, k_head, D, HEAD, VECTORS, UNIT, STEPS
        )
    if which == 2:
        scale = _scale(
            v, K, batch, n, head, v_batch, v_row, v_key, v_head, D, HEAD, VECTORS, UNIT, STEPS
        )
    if dout is not None:
        if which == 3:
            scale = _scale(
                dout, Q, batch, n, head, o_batch, o_row, o_query, o_head,
                D, HEAD, VECTORS, UNIT, STEPS,
            )  # fmt: skip
    tl.store(scales + program, scale)


@triton.jit
def _missing(mask, m_key, K):
    """Return the first key that a row lacks, K if it lacks none, and the logit of missing keys.

    The logit is zero in a row without a key.
    """
    first, there, look = 0 * K + K, tl.zeros([_LOOK], tl.int32), 0 * K
    while look < K:
        key = tl.minimum(look + tl.arange(0, _LOOK), K - 1)
        present = tl.load(mask + m_key.to(tl.int64) * key)
        first = tl.minimum(first, tl.min(tl.where(present, K, key)))
        there |= present.to(tl.int32)
        look += _LOOK
    return first, tl.where(tl.max(there) == 0, 0.0, _MISSING)


@triton.jit
def _attend(
    start, K, q, k, v, bias, mask, missing, state, k_key, v_key, m_key,
    scale, k_scale, v_scale, D: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr,
    UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Add some keys to a running softmax; in the tail, some don't exist."""
    m, total, out = state
    key = start + tl.arange(0, KEYS)
    inside = key < K
    if TAIL:
        key = tl.minimum(key, K - 1)
    kt = _factor(_load(k, key, k_key, D, HEAD, UNIT), TYPE, PRECISION, k_scale)
    s = _dot(q, _turned(kt), PRECISION) * scale + tl.load(bias + key[None, :]).to(tl.float32)
    if MASKED:
        s = tl.where(tl.load(mask + m_key.to(tl.int64) * key)[None, :], s, missing)
    if TAIL:
        s = tl.where(inside[None, :], s, float("-inf"))
    larger = tl.maximum(m, tl.max(s, 1))
    # Rows of which all logits are -inf so far.
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    # Differences first: one rounding for a product less a large number would not leave zero.
    p = tl.exp2((s - shift[:, None]) * _LOG2E)
    rest = tl.exp2((m - shift) * _LOG2E)
    vt = _factor(_load(v, key, v_key, D, HEAD, UNIT), TYPE, PRECISION, v_scale)
    out = out * rest[:, None] + _dot(_factor(p, TYPE, PRECISION, _RAISE), vt, PRECISION)
    return larger, total * rest + tl.sum(p, 1), out


def forward(
    q, k, v, bias, mask, scales, out, lse,
    N, H, Q, K,
    q_batch, q_row, q_query, q_head, k_batch, k_row, k_key, k_head, v_batch, v_row, v_key, v_head,
    b_batch, b_head, b_query, m_batch, m_row, m_key,
    SCALE: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    program, tiles = tl.program_id(0), tl.cdiv(Q, QUERIES)
    head = (program // tiles % H).to(tl.int64)
    row = (program // (tiles * H)).to(tl.int64)
    batch, n = row // N, row % N
    q_scale, k_scale, v_scale, _, serve = _scales(scales, row * H + head)
    if scales is not None:
        if serve != (PRECISION == "halves"):
            return
    scale = _unscaled(SCALE, q_scale, k_scale, PRECISION)
    index = program % tiles * QUERIES + tl.arange(0, QUERIES)
    query, live = tl.minimum(index, Q - 1), index < Q
    q = _at(q, batch, n, head, q_batch, q_row, q_head, UNIT)
    k = _at(k, batch, n, head, k_batch, k_row, k_head, UNIT)
    v = _at(v, batch, n, head, v_batch, v_row, v_head, UNIT)
    bias += (batch * b_batch + head * b_head) * UNIT
    bias += b_query.to(tl.int64) * query[:, None] * UNIT
    first, missing = 0 * K + K, 0.0
    if mask is not None:
        mask += batch * m_batch + n * m_row
        first, missing = _missing(mask, m_key, K)
    qs = _factor(_load(q, query, q_query, D, HEAD, UNIT), TYPE, PRECISION, q_scale)
    least = tl.full([QUERIES], float("-inf"), tl.float32)
    state = least, tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, HEAD], tl.float32)
    whole = K // KEYS
    # Masks are mostly of rows that end early, so that blocks before need none.
    clean = first // KEYS if STEPS is None else 0
    if STEPS is None:
        for step in range(clean):
            state = _attend(
                step * KEYS, K, qs, k, v, bias, mask, missing, state, k_key, v_key, m_key,
                scale, k_scale, v_scale, D, HEAD, KEYS, UNIT, TYPE, PRECISION, False, False,
            )  # fmt: skip
    if mask is not None or STEPS is not None:
        for step in range(whole - clean if STEPS is None else STEPS):
            state = _attend(
                (clean + step) * KEYS, K, qs, k, v, bias, mask, missing, state, k_key, v_key, m_key,
                scale, k_scale, v_scale,
                D, HEAD, KEYS, UNIT, TYPE, PRECISION, mask is not None, False,
            )  # fmt: skip
    if whole * KEYS < K:
        state = _attend(
            whole * KEYS, K, qs, k, v, bias, mask, missing, state, k_key, v_key, m_key,
            scale, k_scale, v_scale, D, HEAD, KEYS, UNIT, TYPE, PRECISION, mask is not None, True,
        )  # fmt: skip
    m, total, sums = state
    if PRECISION == "halves":
        sums *= _inverse(v_scale) / _RAISE
    if out is not None:
        _store(out, sums / total[:, None], row, query, live, head, Q, H, D, HEAD)
    if lse is not None:
        tl.store(lse + (row * H + head) * Q + query, m + tl.log(total), mask=live)


@triton.jit
def _shares(x, PRECISION: tl.constexpr):
    """Return powers of two, for halves at most one.

    They may be more far from zero, where logits are rounded otherwise than in the forward.
    """
    if PRECISION == "halves":
        return tl.minimum(tl.exp2(x), 1.0, tl.PropagateNan.ALL)
    else:
        return tl.exp2(x)


@triton.jit
def _slope(
    start, K, q, k, v, bias, mask, missing, dout, lse, delta, state, k_key, v_key, m_key,
    scale, k_scale, v_scale, fall, D: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr,
    UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Add some keys' shares, cotangents of their logits, and their part of that of queries."""
    total, rest, dq = state
    key = start + tl.arange(0, KEYS)
    there = key < K
    if TAIL:
        key = tl.minimum(key, K - 1)
    kt = _factor(_load(k, key, k_key, D, HEAD, UNIT), TYPE, PRECISION, k_scale)
    s = _dot(q, _turned(kt), PRECISION) * scale + tl.load(bias + key[None, :]).to(tl.float32)
    vt = _factor(_load(v, key, v_key, D, HEAD, UNIT), TYPE, PRECISION, v_scale)
    slope = _dot(dout, _turned(vt), PRECISION) * fall - delta[:, None]
    if MASKED:
        present = tl.load(mask + m_key.to(tl.int64) * key)
        s = tl.where(present[None, :], s, missing)
    if TAIL:
        s = tl.where(there[None, :], s, float("-inf"))
    p = _shares((s - lse[:, None]) * _LOG2E, PRECISION)
    ds = p * slope
    rest += tl.sum(ds, 1)
    if MASKED:
        there &= present
    if MASKED or TAIL:
        ds = tl.where(there[None, :], ds, 0.0)
    ds = _factor(ds, TYPE, PRECISION, RISE=_RISE)
    return total + tl.sum(p, 1), rest, dq + _dot(ds, kt, PRECISION, _RISE)


def queries(
    q, k, v, bias, mask, dout, scales, out, lse, delta, shift, dq,
    N, H, Q, K,
    q_batch, q_row, q_query, q_head, k_batch, k_row, k_key, k_head, v_batch, v_row, v_key, v_head,
    b_batch, b_head, b_query, m_batch, m_row, m_key, o_batch, o_row, o_query, o_head,
    SCALE: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Find dq, products of outputs with their cotangents, and logarithms of the sums of shares.

    A sum is one, unless the logarithm of the softmax's denominator is lost in `lse` beside large
    logits.
    """
    program, tiles = tl.program_id(0), tl.cdiv(Q, QUERIES)
    head = (program // tiles % H).to(tl.int64)
    row = (program // (tiles * H)).to(tl.int64)
    batch, n = row // N, row % N
    q_scale, k_scale, v_scale, o_scale, serve = _scales(scales, row * H + head)
    if scales is not None:
        if serve != (PRECISION == "halves"):
            return
    scale = _unscaled(SCALE, q_scale, k_scale, PRECISION)
    fall: tl.constexpr = _FALL / HEAD if PRECISION == "halves" else 1.0
    index = program % tiles * QUERIES + tl.arange(0, QUERIES)
    query, live = tl.minimum(index, Q - 1), index < Q
    q = _at(q, batch, n, head, q_batch, q_row, q_head, UNIT)
    k = _at(k, batch, n, head, k_batch, k_row, k_head, UNIT)
    v = _at(v, batch, n, head, v_batch, v_row, v_head, UNIT)
    dout = _at(dout, batch, n, head, o_batch, o_row, o_head, UNIT)
    bias += (batch * b_batch + head * b_head) * UNIT
    bias += b_query.to(tl.int64) * query[:, None] * UNIT
    first, missing = 0 * K + K, 0.0
    if mask is not None:
        mask += batch * m_batch + n * m_row
        first, missing = _missing(mask, m_key, K)
    do = _load(dout, query, o_query, D, HEAD, UNIT)
    d = tl.arange(0, HEAD)
    y = out + ((row * Q + query)[:, None] * H + head) * D + d[None, :]
    y = tl.load(y, mask=(d < D)[None, :], other=0.0)
    sums = tl.sum(do.to(tl.float32) * y.to(tl.float32), 1)
    at = (row * H + head) * Q + query
    qs = _factor(_load(q, query, q_query, D, HEAD, UNIT), TYPE, PRECISION, q_scale)
    less = sums
    if PRECISION == "halves":
        # A query's own scale, as its cotangents of logits have.
        o_scale, o_inverse = row_scaling(tl.max(tl.abs(do.to(tl.float32)), 1))
        less = sums * o_scale * (v_scale * fall)
        do = _factor(do, TYPE, PRECISION, o_scale[:, None])
    else:
        do = _factor(do, TYPE, PRECISION)
    denominator = tl.load(lse + at)
    none = tl.zeros([QUERIES], tl.float32)
    state = none, none, tl.zeros([QUERIES, HEAD], tl.float32)
    whole = K // KEYS
    clean = first // KEYS if STEPS is None else 0
    if STEPS is None:
        for step in range(clean):
            state = _slope(
                step * KEYS, K, qs, k, v, bias, mask, missing, do, denominator, less, state,
                k_key, v_key, m_key, scale, k_scale, v_scale, fall,
                D, HEAD, KEYS, UNIT, TYPE, PRECISION, False, False,
            )  # fmt: skip
    if mask is not None or STEPS is not None:
        for step in range(whole - clean if STEPS is None else STEPS):
            state = _slope(
                (clean + step) * KEYS, K, qs, k, v, bias, mask, missing, do, denominator, less,
                state, k_key, v_key, m_key, scale, k_scale, v_scale, fall,
                D, HEAD, KEYS, UNIT, TYPE, PRECISION, mask is not None, False,
            )  # fmt: skip
    if whole * KEYS < K:
        state = _slope(
            whole * KEYS, K, qs, k, v, bias, mask, missing, do, denominator, less, state,
            k_key, v_key, m_key, scale, k_scale, v_scale, fall,
            D, HEAD, KEYS, UNIT, TYPE, PRECISION, mask is not None, True,
        )  # fmt: skip
    total, rest, found = state
    if PRECISION == "halves":
        found *= (o_inverse * (_inverse(k_scale) * _inverse(v_scale) / fall))[:, None]
    # Cotangents of a query's logits add up to zero, but for other roundings here than in `out`.
    rest /= total
    if PRECISION == "halves":
        rest *= o_inverse * (_inverse(v_scale) / fall)
    sums += rest
    # The logarithm's own approximation is not as exact near one.
    more = total - 1
    log2 = tl.where(tl.abs(more) < 2.0**-10, (more - more * more / 2) * _LOG2E, tl.log2(total))
    tl.store(shift + at, log2, mask=live)
    tl.store(delta + at, sums, mask=live)
    if dq is not None:
        found *= (SCALE / total)[:, None]
        _store(dq, found, row, query, live, head, Q, H, D, HEAD)


@triton.jit
def _gather(
    start, Q, k, v, there, missing, q, bias, dout, lse, delta, shift, state, q_query, o_query,
    scale, q_scale, v_scale, o_scale, fall, D: tl.constexpr, HEAD: tl.constexpr,
    QUERIES: tl.constexpr, UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, SUMS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Add the part of some queries to the cotangents of keys and values."""
    sums, values = state
    query = start + tl.arange(0, QUERIES)
    inside = query < Q
    if TAIL:
        query = tl.minimum(query, Q - 1)
    qs = _factor(_load(q, query, q_query, D, HEAD, UNIT), TYPE, PRECISION, q_scale)
    s = _dot(k, _turned(qs), PRECISION) * scale + tl.load(bias + query[None, :]).to(tl.float32)
    if MASKED:
        s = tl.where(there[:, None], s, missing)
    if TAIL:
        s = tl.where(inside[None, :], s, float("-inf"))
    p = (s - tl.load(lse + query)[None, :]) * _LOG2E - tl.load(shift + query)[None, :]
    p = _shares(p, PRECISION)
    do = _factor(_load(dout, query, o_query, D, HEAD, UNIT), TYPE, PRECISION, o_scale)
    values += _dot(_factor(p, TYPE, PRECISION, _RAISE), do, PRECISION)
    if SUMS:
        less = tl.load(delta + query)
        if PRECISION == "halves":
            less = less * o_scale * (v_scale * fall)
        ds = p * (_dot(v, _turned(do), PRECISION) * fall - less[None, :])
        if MASKED:
            ds = tl.where(there[:, None], ds, 0.0)
        ds = _factor(ds, TYPE, PRECISION, RISE=_RISE)
        sums += _dot(ds, qs, PRECISION, _RISE)
    return sums, values


@triton.jit
def _gather_all(
    Q, k, v, there, missing, q, bias, dout, lse, delta, shift, q_query, o_query,
    scale, q_scale, v_scale, o_scale, fall, KEYS: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr,
    QUERIES: tl.constexpr, UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, SUMS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Return the cotangents of keys, over the scale, and of values."""
    state = tl.zeros([KEYS, HEAD], tl.float32), tl.zeros([KEYS, HEAD], tl.float32)
    whole = Q // QUERIES
    for step in range(whole if STEPS is None else STEPS):
        state = _gather(
            step * QUERIES, Q, k, v, there, missing, q, bias, dout, lse, delta, shift, state,
            q_query, o_query, scale, q_scale, v_scale, o_scale, fall,
            D, HEAD, QUERIES, UNIT, TYPE, PRECISION, MASKED, SUMS, False,
        )  # fmt: skip
    if whole * QUERIES < Q:
        state = _gather(
            whole * QUERIES, Q, k, v, there, missing, q, bias, dout, lse, delta, shift, state,
            q_query, o_query, scale, q_scale, v_scale, o_scale, fall,
            D, HEAD, QUERIES, UNIT, TYPE, PRECISION, MASKED, SUMS, True,
        )  # fmt: skip
    return state


def keys(
    q, k, v, bias, mask, dout, scales, lse, delta, shift, dk, dv,
    N, H, Q, K,
    q_batch, q_row, q_query, q_head, k_batch, k_row, k_key, k_head, v_batch, v_row, v_key, v_head,
    b_batch, b_head, b_key, m_batch, m_row, m_key, o_batch, o_row, o_query, o_head,
    SCALE: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Find dk and dv, with logits of keys by queries, and so with the transpose of the bias."""
    program, tiles = tl.program_id(0), tl.cdiv(K, KEYS)
    head = (program // tiles % H).to(tl.int64)
    row = (program // (tiles * H)).to(tl.int64)
    batch, n = row // N, row % N
    q_scale, k_scale, v_scale, o_scale, serve = _scales(scales, row * H + head)
    if scales is not None:
        if serve != (PRECISION == "halves"):
            return
    scale = _unscaled(SCALE, q_scale, k_scale, PRECISION)
    fall: tl.constexpr = _FALL / HEAD if PRECISION == "halves" else 1.0
    index = program % tiles * KEYS + tl.arange(0, KEYS)
    key, live = tl.minimum(index, K - 1), index < K
    q = _at(q, batch, n, head, q_batch, q_row, q_head, UNIT)
    k = _at(k, batch, n, head, k_batch, k_row, k_head, UNIT)
    v = _at(v, batch, n, head, v_batch, v_row, v_head, UNIT)
    dout = _at(dout, batch, n, head, o_batch, o_row, o_head, UNIT)
    bias += (batch * b_batch + head * b_head) * UNIT
    bias += b_key.to(tl.int64) * key[:, None] * UNIT
    of_row = (row * H + head) * Q
    lse, delta, shift = lse + of_row, delta + of_row, shift + of_row
    ks = _factor(_load(k, key, k_key, D, HEAD, UNIT), TYPE, PRECISION, k_scale)
    vs = _factor(_load(v, key, v_key, D, HEAD, UNIT), TYPE, PRECISION, v_scale)
    there, missing = live, 0.0
    if mask is None:
        sums, values = _gather_all(
            Q, ks, vs, there, missing, q, bias, dout, lse, delta, shift, q_query, o_query,
            scale, q_scale, v_scale, o_scale, fall,
            KEYS, D, HEAD, QUERIES, UNIT, TYPE, PRECISION, False, dk is not None, STEPS,
        )  # fmt: skip
    else:
        mask += batch * m_batch + n * m_row
        there = tl.load(mask + m_key.to(tl.int64) * key)
        _, missing = _missing(mask, m_key, K)
        # Most blocks lack no key.
        if tl.min(there.to(tl.int32)) == 0:
            sums, values = _gather_all(
                Q, ks, vs, there, missing, q, bias, dout, lse, delta, shift, q_query, o_query,
                scale, q_scale, v_scale, o_scale, fall,
                KEYS, D, HEAD, QUERIES, UNIT, TYPE, PRECISION, True, dk is not None, STEPS,
            )  # fmt: skip
        else:
            sums, values = _gather_all(
                Q, ks, vs, there, missing, q, bias, dout, lse, delta, shift, q_query, o_query,
                scale, q_scale, v_scale, o_scale, fall,
                KEYS, D, HEAD, QUERIES, UNIT, TYPE, PRECISION, False, dk is not None, STEPS,
            )  # fmt: skip
    if PRECISION == "halves":
        values *= _inverse(o_scale) / _RAISE
        sums *= _inverse(o_scale) * _inverse(q_scale) / fall
        sums *= _inverse(v_scale)
    if dk is not None:
        _store(dk, sums * SCALE, row, key, live, head, K, H, D, HEAD)
    if dv is not None:
        _store(dv, values, row, key, live, head, K, H, D, HEAD)


@triton.jit
def _serve_all(scales, rows, by_row):
    """Return whether halves serve all arrays of some rows' heads."""
    least, look = tl.full([_LOOK], 1.0, tl.float32), 0 * rows
    while look < 4 * rows:
        at = tl.minimum(look + tl.arange(0, _LOOK), 4 * rows - 1)
        least = tl.minimum(least, tl.load(scales + at.to(tl.int64) // 4 * by_row + at % 4))
        look += _LOOK
    return tl.min(least, 0) > 0


def bias(
    q, k, v, bias, mask, dout, scales, lse, delta, shift, dbias,
    N, H, Q, K, B, parts,
    q_batch, q_row, q_query, q_head, k_batch, k_row, k_key, k_head, v_batch, v_row, v_key, v_head,
    b_batch, b_head, b_query, m_batch, m_row, m_key, o_batch, o_row, o_query, o_head,
    SCALE: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Sum dbias over some rows."""
    program, across, down = tl.program_id(0), tl.cdiv(K, KEYS), tl.cdiv(Q, QUERIES)
    first, begin = program // across % down * QUERIES, program % across * KEYS
    which = (program // (across * down)).to(tl.int64)
    rows = tl.cdiv(N, parts)
    head, batch, n = which % H, which // H % B, which // (B * H) * rows
    if scales is not None:
        scales += 4 * ((batch * N + n) * H + head)
        if _serve_all(scales, tl.minimum(rows, N - n), H * 4) != (PRECISION == "halves"):
            return
    index = first + tl.arange(0, QUERIES)
    there = begin + tl.arange(0, KEYS)
    query, key = tl.minimum(index, Q - 1), tl.minimum(there, K - 1)
    q = _at(q, batch, n, head, q_batch, q_row, q_head, UNIT)
    k = _at(k, batch, n, head, k_batch, k_row, k_head, UNIT)
    v = _at(v, batch, n, head, v_batch, v_row, v_head, UNIT)
    dout = _at(dout, batch, n, head, o_batch, o_row, o_head, UNIT)
    bias += (batch * b_batch + head * b_head) * UNIT
    bias += b_query.to(tl.int64) * query[:, None] * UNIT + key[None, :]
    b = tl.load(bias).to(tl.float32)
    if mask is not None:
        mask += batch * m_batch + n * m_row + m_key.to(tl.int64) * key
    at = ((batch * N + n) * H + head) * Q + query
    sums = tl.zeros([QUERIES, KEYS], tl.float32)
    for step in range(tl.minimum(rows, N - n) if STEPS is None else STEPS):
        q_scale, k_scale, v_scale, o_scale, _ = _scales(scales, H.to(tl.int64) * step)
        scale = _unscaled(SCALE, q_scale, k_scale, PRECISION)
        rise = _unscaled(1.0, v_scale, o_scale, PRECISION)
        qs = _load(q + q_row.to(tl.int64) * step * UNIT, query, q_query, D, HEAD, UNIT)
        ks = _load(k + k_row.to(tl.int64) * step * UNIT, key, k_key, D, HEAD, UNIT)
        vs = _load(v + v_row.to(tl.int64) * step * UNIT, key, v_key, D, HEAD, UNIT)
        do = _load(dout + o_row.to(tl.int64) * step * UNIT, query, o_query, D, HEAD, UNIT)
        qs, ks = _factor(qs, TYPE, PRECISION, q_scale), _factor(ks, TYPE, PRECISION, k_scale)
        vs, do = _factor(vs, TYPE, PRECISION, v_scale), _factor(do, TYPE, PRECISION, o_scale)
        own = at + (H * Q).to(tl.int64) * step
        s = _dot(qs, _turned(ks), PRECISION) * scale + b
        slope = _dot(do, _turned(vs), PRECISION) * rise - tl.load(delta + own)[:, None]
        p = (s - tl.load(lse + own)[:, None]) * _LOG2E - tl.load(shift + own)[:, None]
        ds = tl.exp2(p) * slope
        if mask is not None:
            ds = tl.where(tl.load(mask + m_row.to(tl.int64) * step)[None, :], ds, 0.0)
        sums += ds
    to = dbias + (which * Q + query)[:, None] * K + key[None, :]
    inside = (index < Q)[:, None] & (there < K)[None, :]
    tl.store(to, sums.to(dbias.dtype.element_ty), mask=inside)


_KERNELS = {function.__name__: function for function in (measure, forward, queries, keys, bias)}


@functools.cache
def _launcher(name: str, vectors: bool, warps: int, stages: int) -> Launcher:
    """Return the launcher of a kernel; for vectors all arrays but the mask begin with one."""
    parameters = [*inspect.signature(_KERNELS[name]).parameters]
    pointers = {*parameters[: parameters.index("N")]} - {"mask"} if vectors else ()
    return Launcher(kernel_of_any_size(_KERNELS[name], pointers), warps, stages=stages)


def _vectors(x: Any) -> Any:
    """Return an array whose last axis is contiguous, a copy if it isn't."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Call:
    """The arrays, sizes and types of a call."""

    def __init__(self, a: Any, *dout: Any) -> None:
        self.B, self.N, self.Q, self.H, self.D = a.q.shape
        self.K, self.mask = a.k.shape[2], a.mask
        self.size = power(self.D, 16)
        self.arrays = [_vectors(x) for x in (a.q, a.k, a.v, a.bias, *dout)]
        dtype = promoted(a[:3])
        # The interpreter multiplies the bits of bfloat16.
        dot = dtype if a.q.is_cuda or dtype != torch.bfloat16 else torch.float32
        self.constants, self.type = (a.scale, self.D, self.size), _TYPES[dot]
        self.narrow, self.precisions, self.scales = dtype.itemsize == 2, ("ieee",), None
        if dtype == torch.float32:
            plain = of_float32(a.q.device) if a.q.is_cuda else "ieee"
            self.precisions = (plain,)
            if self._repays(a.q.device):
                self.precisions = "halves", plain
                self._measure()

    def _repays(self, device: Any) -> bool:
        """Return whether products of halves take less time."""
        logits = self.B * self.N * self.H * self.Q * self.K
        fast = of_float32(device) == EMULATED and not is_small(device)
        # In the products of short vectors, errors of halves don't average out.
        return fast and self.D >= 8 and self.size <= 64 and logits >= _LEAST

    def _measure(self) -> None:
        """Find the scales of halves."""
        q, k, v, _, *dout = self.arrays
        heads = self.B * self.N * self.H
        self.scales = torch.empty((heads, 4), dtype=torch.float32, device=q.device)
        unit, strides = self.in_units([x.stride()[:-1] for x in (q, k, v, *(dout or (q,)))])
        arrays = q, k, v, *(dout or (None,)), self.scales
        given = self.N, self.H, self.Q, self.K, *strides
        vectors = 4096 // self.size
        steps = None if q.is_cuda else -(-max(self.Q, self.K) // vectors)
        constants = self.D, self.size, vectors, unit, steps
        dtypes = [None if x is None else x.dtype for x in arrays]
        key = q.device, *dtypes, wide(*given), *constants
        launcher = _launcher("measure", unit == _UNIT and begin_vectors(arrays), 4, 3)
        launcher(4 * heads, key, *arrays, *given, *constants)

    def in_units(self, strides: Any) -> tuple[int, list[int]]:
        """Return the largest unit of which all strides are multiples, and strides in it."""
        even = not self.D % _UNIT and not any([n % _UNIT for each in strides for n in each])
        unit = _UNIT if even else 1
        return unit, [n // unit for each in strides for n in each]

    def tile(self, name: str, precision: str) -> Tile:
        size, vectors = self.size, self.B * self.N * self.H * max(self.Q, self.K)
        if precision == EMULATED and vectors < 64 * _TOGETHER * processors(self.arrays[0].device):
            # Smaller tiles are on more processors.
            size = max(size, 64)
        for longest, tiles in _TILES.get("16 bits" if self.narrow else precision, {}).items():
            if size <= longest:
                return tiles[name]
        side, warps = (32, 2) if size <= 64 else (16, 1)
        return Tile(side, side, warps, 1)

    def heads(self, length: int, side: str) -> Callable[[Tile], int]:
        """Return the programs of a tile for all heads of all rows."""
        heads = self.B * self.N * self.H
        return lambda tile: heads * -(-length // getattr(tile, side))

    def launch(self, name: str, programs: Callable[[Tile], int], made: Any, *integers: int) -> None:
        """Launch a kernel, once for heads that halves serve, and once for others."""
        for precision in self.precisions:
            tile = self.tile(name, precision)
            self._launch(name, programs(tile), tile, precision, made, *integers)

    def _launch(
        self, name: str, programs: int, tile: Tile, precision: str, made: Any, *integers: int
    ) -> None:
        q, k, v, bias, *dout = self.arrays
        strides = [x.stride()[:-1] for x in self.arrays]
        unit, _ = self.in_units(strides)
        mask = (0, 0, 0) if self.mask is None else [unit * n for n in self.mask.stride()]
        strides.insert(4, mask)
        arrays = q, k, v, bias, self.mask, *dout, self.scales, *made
        given = self.N, self.H, self.Q, self.K, *integers
        given += tuple([n // unit for each in strides for n in each])
        steps = None
        if not q.is_cuda:
            # The interpreter can't turn a number of a kernel into one of Python.
            steps = self.K // tile.keys
            if integers:
                steps = self.N // integers[-1]
            elif name == "keys":
                steps = self.Q // tile.queries
        constants = *self.constants, *tile[:2], unit, self.type, precision, steps
        dtypes = [None if array is None else array.dtype for array in arrays]
        key = q.device, *dtypes, wide(*given), *constants
        vectors = unit == _UNIT and begin_vectors([x for x in arrays if x is not self.mask])
        launcher = _launcher(name, vectors, tile.warps, tile.stages)
        launcher(programs, key, *arrays, *given, *constants)


def _serves(primitive: Any, a: Any, y: Any) -> bool:
    """Return whether kernels serve a call; fill the outputs of others by the formula."""
    if a.q.numel() and a.q.shape[-1] <= _LONGEST and promoted(a[:3]) != torch.float64:
        return True
    for made, value in zip(y, primitive.formula(a), strict=True):
        if made is not None:
            made.copy_(value)
    return False


@register("triangle_attention", "triton")
def triangle_attention(a: Any, y: Any) -> None:
    if _serves(attention, a, y):
        call = _Call(a)
        call.launch("forward", call.heads(call.Q, "queries"), y)


@register("triangle_attention_vjp", "triton")
def triangle_attention_vjp(a: Any, y: Any) -> None:
    if not _serves(attention_vjp, a, y):
        return
    call = _Call(a, a.dout)
    out, lse = a.out.contiguous(), a.lse.contiguous()
    delta, shift = torch.empty_like(lse), torch.empty_like(lse)
    call.launch("queries", call.heads(call.Q, "queries"), (out, lse, delta, shift, y.dq))
    if y.dbias is not None:
        _bias_gradient(call, (lse, delta, shift), y.dbias)
    if y.dk is not None or y.dv is not None:
        # The kernel of dk and dv takes numbers of neighbouring queries together.
        call.arrays[3] = call.arrays[3].swapaxes(2, 3).contiguous()
        call.launch("keys", call.heads(call.K, "keys"), (lse, delta, shift, y.dk, y.dv))


def _bias_gradient(call: _Call, given: tuple[Any, ...], dbias: Any) -> None:
    def tiles(tile: Tile) -> int:
        return call.B * call.H * -(-call.Q // tile.queries) * -(-call.K // tile.keys)

    count = tiles(call.tile("bias", call.precisions[0]))
    rows = _rows_of_parts(count, call.N, processors(dbias.device))
    while call.N % rows and not dbias.is_cuda:
        rows += 1
    parts = -(-call.N // rows)
    made = dbias if parts == 1 else given[0].new_empty((parts, *dbias.shape))
    call.launch("bias", lambda tile: parts * tiles(tile), (*given, made), call.B, parts)
    if parts > 1:
        dbias.copy_(made.sum(0))


@functools.cache
def _rows_of_parts(tiles: int, rows: int, processors: int) -> int:
    """Return how many rows of each tile a program sums, so that programs end together."""
    there = _TOGETHER * processors

    def time(parts: int) -> int:
        return -(-tiles * parts // there) * (-(-rows // parts) + _PART)

    return -(-rows // min(range(1, min(rows, _MOST_PARTS) + 1), key=time))
