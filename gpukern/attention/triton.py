"""Triangle attention on the GPU, by blocks of queries and keys whose logits stay in registers.

The forward goes through a row's keys with a running maximum. The backward has three kernels, each
of which makes the logits again: for dq along keys, for dk and dv along queries, and for dbias along
rows, whose logits share a block of the bias. So each gradient is a sum of one program, or of a few
parts in their order.

Operations, times B·N·H·Q·K·D: forward 4, and 6, 8 and 4 for dq, for dk with dv, and for dbias; one
exponential for every logit and kernel. Arrays beside the arguments: lse and two like it, and parts
of dbias. Two warps make products of 64 rows, since asynchronous instructions, which take four,
would take a computed factor from registers, to which the assembler of CUDA 12 writes too early
(https://github.com/triton-lang/triton/pull/11781).
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedops._frame.check import promoted
from fusedops._frame.registry import register
from fusedops.attention.op import MISSING, attention, attention_vjp
from gpukern.launch import Launcher, begin_vectors, kernel_of_any_size, power, processors, wide
from gpukern.precision import of_float32

_LOG2E = tl.constexpr(math.log2(math.e))
_MISSING = tl.constexpr(MISSING)
# Strides are counted in vectors of so many numbers where all are multiples of it.
_UNIT = 8
# Mask entries that a program looks at together.
_LOOK = tl.constexpr(1024)
# Programs for dbias that a processor has at a time, the most parts of its sum, and the rows whose
# time a part takes to store.
_TOGETHER, _MOST_PARTS, _PART = 4, 4, 2
# The longest vectors of heads for whose tiles every GPU has shared memory.
_LONGEST = 256

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Tile(NamedTuple):
    """Queries, keys, warps and stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel, for heads of up to 64 numbers of 16 bits; of others, programs take less.
_TILES = {
    "forward": Tile(64, 64, 2, 3),
    "queries": Tile(32, 32, 1, 3),
    "keys": Tile(32, 32, 1, 3),
    "bias": Tile(64, 64, 4, 3),
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
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


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
    SCALE: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr,
    UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Add some keys to a running softmax; in the tail, some don't exist."""
    m, total, out = state
    key = start + tl.arange(0, KEYS)
    inside = key < K
    if TAIL:
        key = tl.minimum(key, K - 1)
    kt = _load(k, key, k_key, D, HEAD, UNIT).to(TYPE)
    s = _dot(q, tl.trans(kt), PRECISION) * SCALE + tl.load(bias + key[None, :]).to(tl.float32)
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
    vt = _load(v, key, v_key, D, HEAD, UNIT).to(TYPE)
    out = out * rest[:, None] + _dot(p.to(TYPE), vt, PRECISION)
    return larger, total * rest + tl.sum(p, 1), out


def forward(
    q, k, v, bias, mask, out, lse,
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
    qs = _load(q, query, q_query, D, HEAD, UNIT).to(TYPE)
    least = tl.full([QUERIES], float("-inf"), tl.float32)
    state = least, tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, HEAD], tl.float32)
    whole = K // KEYS
    # Masks are mostly of rows that end early, so that blocks before need none.
    clean = first // KEYS if STEPS is None else 0
    if STEPS is None:
        for step in range(clean):
            state = _attend(
                step * KEYS, K, qs, k, v, bias, mask, missing, state, k_key, v_key, m_key,
                SCALE, D, HEAD, KEYS, UNIT, TYPE, PRECISION, False, False,
            )  # fmt: skip
    if mask is not None or STEPS is not None:
        for step in range(whole - clean if STEPS is None else STEPS):
            state = _attend(
                (clean + step) * KEYS, K, qs, k, v, bias, mask, missing, state, k_key, v_key, m_key,
                SCALE, D, HEAD, KEYS, UNIT, TYPE, PRECISION, mask is not None, False,
            )  # fmt: skip
    if whole * KEYS < K:
        state = _attend(
            whole * KEYS, K, qs, k, v, bias, mask, missing, state, k_key, v_key, m_key,
            SCALE, D, HEAD, KEYS, UNIT, TYPE, PRECISION, mask is not None, True,
        )  # fmt: skip
    m, total, sums = state
    if out is not None:
        _store(out, sums / total[:, None], row, query, live, head, Q, H, D, HEAD)
    if lse is not None:
        tl.store(lse + (row * H + head) * Q + query, m + tl.log(total), mask=live)


@triton.jit
def _slope(
    start, K, q, k, v, bias, mask, missing, dout, lse, delta, state, k_key, v_key, m_key,
    SCALE: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr,
    UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Add some keys' shares, and their part of the cotangent of queries."""
    total, dq = state
    key = start + tl.arange(0, KEYS)
    there = key < K
    if TAIL:
        key = tl.minimum(key, K - 1)
    kt = _load(k, key, k_key, D, HEAD, UNIT).to(TYPE)
    s = _dot(q, tl.trans(kt), PRECISION) * SCALE + tl.load(bias + key[None, :]).to(tl.float32)
    vt = _load(v, key, v_key, D, HEAD, UNIT).to(TYPE)
    slope = _dot(dout, tl.trans(vt), PRECISION) - delta[:, None]
    if MASKED:
        present = tl.load(mask + m_key.to(tl.int64) * key)
        s = tl.where(present[None, :], s, missing)
    if TAIL:
        s = tl.where(there[None, :], s, float("-inf"))
    p = tl.exp2((s - lse[:, None]) * _LOG2E)
    ds = p * slope
    if MASKED:
        there &= present
    if MASKED or TAIL:
        ds = tl.where(there[None, :], ds, 0.0)
    return total + tl.sum(p, 1), dq + _dot(ds.to(TYPE), kt, PRECISION)


def queries(
    q, k, v, bias, mask, dout, out, lse, delta, factor, dq,
    N, H, Q, K,
    q_batch, q_row, q_query, q_head, k_batch, k_row, k_key, k_head, v_batch, v_row, v_key, v_head,
    b_batch, b_head, b_query, m_batch, m_row, m_key, o_batch, o_row, o_query, o_head,
    SCALE: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Find dq, a factor for cotangents of outputs, and their products with outputs.

    The factor is one over the sum of a query's shares. It is one too, unless the logarithm of the
    softmax's denominator is lost in `lse` beside large logits.
    """
    program, tiles = tl.program_id(0), tl.cdiv(Q, QUERIES)
    head = (program // tiles % H).to(tl.int64)
    row = (program // (tiles * H)).to(tl.int64)
    batch, n = row // N, row % N
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
    qs, do = _load(q, query, q_query, D, HEAD, UNIT).to(TYPE), do.to(TYPE)
    denominator = tl.load(lse + at)
    state = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, HEAD], tl.float32)
    whole = K // KEYS
    clean = first // KEYS if STEPS is None else 0
    if STEPS is None:
        for step in range(clean):
            state = _slope(
                step * KEYS, K, qs, k, v, bias, mask, missing, do, denominator, sums, state,
                k_key, v_key, m_key, SCALE, D, HEAD, KEYS, UNIT, TYPE, PRECISION, False, False,
            )  # fmt: skip
    if mask is not None or STEPS is not None:
        for step in range(whole - clean if STEPS is None else STEPS):
            state = _slope(
                (clean + step) * KEYS, K, qs, k, v, bias, mask, missing, do, denominator, sums,
                state, k_key, v_key, m_key,
                SCALE, D, HEAD, KEYS, UNIT, TYPE, PRECISION, mask is not None, False,
            )  # fmt: skip
    if whole * KEYS < K:
        state = _slope(
            whole * KEYS, K, qs, k, v, bias, mask, missing, do, denominator, sums, state,
            k_key, v_key, m_key,
            SCALE, D, HEAD, KEYS, UNIT, TYPE, PRECISION, mask is not None, True,
        )  # fmt: skip
    total, found = state
    tl.store(factor + at, 1 / total, mask=live)
    tl.store(delta + at, sums / total, mask=live)
    if dq is not None:
        found *= (SCALE / total)[:, None]
        _store(dq, found, row, query, live, head, Q, H, D, HEAD)


@triton.jit
def _gather(
    start, Q, k, v, there, missing, q, bias, dout, lse, delta, factor, state, q_query, o_query,
    SCALE: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr,
    UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
    SUMS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Add the part of some queries to the cotangents of keys and values."""
    sums, values = state
    query = start + tl.arange(0, QUERIES)
    inside = query < Q
    if TAIL:
        query = tl.minimum(query, Q - 1)
    qs = _load(q, query, q_query, D, HEAD, UNIT).to(TYPE)
    s = _dot(k, tl.trans(qs), PRECISION) * SCALE + tl.load(bias + query[None, :]).to(tl.float32)
    if MASKED:
        s = tl.where(there[:, None], s, missing)
    if TAIL:
        s = tl.where(inside[None, :], s, float("-inf"))
    p = tl.exp2((s - tl.load(lse + query)[None, :]) * _LOG2E)
    do = _load(dout, query, o_query, D, HEAD, UNIT).to(tl.float32)
    do = (do * tl.load(factor + query)[:, None]).to(TYPE)
    values += _dot(p.to(TYPE), do, PRECISION)
    if SUMS:
        slope = _dot(v, tl.trans(do), PRECISION) - tl.load(delta + query)[None, :]
        ds = p * slope
        if MASKED:
            ds = tl.where(there[:, None], ds, 0.0)
        sums += _dot(ds.to(TYPE), qs, PRECISION)
    return sums, values


@triton.jit
def _gather_all(
    Q, k, v, there, missing, q, bias, dout, lse, delta, factor, q_query, o_query,
    KEYS: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, HEAD: tl.constexpr,
    QUERIES: tl.constexpr, UNIT: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr, SUMS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Return the cotangents of keys, over the scale, and of values."""
    state = tl.zeros([KEYS, HEAD], tl.float32), tl.zeros([KEYS, HEAD], tl.float32)
    whole = Q // QUERIES
    for step in range(whole if STEPS is None else STEPS):
        state = _gather(
            step * QUERIES, Q, k, v, there, missing, q, bias, dout, lse, delta, factor, state,
            q_query, o_query,
            SCALE, D, HEAD, QUERIES, UNIT, TYPE, PRECISION, MASKED, SUMS, False,
        )  # fmt: skip
    if whole * QUERIES < Q:
        state = _gather(
            whole * QUERIES, Q, k, v, there, missing, q, bias, dout, lse, delta, factor, state,
            q_query, o_query,
            SCALE, D, HEAD, QUERIES, UNIT, TYPE, PRECISION, MASKED, SUMS, True,
        )  # fmt: skip
    return state


def keys(
    q, k, v, bias, mask, dout, lse, delta, factor, dk, dv,
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
    index = program % tiles * KEYS + tl.arange(0, KEYS)
    key, live = tl.minimum(index, K - 1), index < K
    q = _at(q, batch, n, head, q_batch, q_row, q_head, UNIT)
    k = _at(k, batch, n, head, k_batch, k_row, k_head, UNIT)
    v = _at(v, batch, n, head, v_batch, v_row, v_head, UNIT)
    dout = _at(dout, batch, n, head, o_batch, o_row, o_head, UNIT)
    bias += (batch * b_batch + head * b_head) * UNIT
    bias += b_key.to(tl.int64) * key[:, None] * UNIT
    of_row = (row * H + head) * Q
    lse, delta, factor = lse + of_row, delta + of_row, factor + of_row
    ks = _load(k, key, k_key, D, HEAD, UNIT).to(TYPE)
    vs = _load(v, key, v_key, D, HEAD, UNIT).to(TYPE)
    there, missing = live, 0.0
    if mask is None:
        sums, values = _gather_all(
            Q, ks, vs, there, missing, q, bias, dout, lse, delta, factor, q_query, o_query,
            KEYS, SCALE, D, HEAD, QUERIES, UNIT, TYPE, PRECISION, False, dk is not None, STEPS,
        )  # fmt: skip
    else:
        mask += batch * m_batch + n * m_row
        there = tl.load(mask + m_key.to(tl.int64) * key)
        _, missing = _missing(mask, m_key, K)
        # Most blocks lack no key.
        if tl.min(there.to(tl.int32)) == 0:
            sums, values = _gather_all(
                Q, ks, vs, there, missing, q, bias, dout, lse, delta, factor, q_query, o_query,
                KEYS, SCALE, D, HEAD, QUERIES, UNIT, TYPE, PRECISION, True, dk is not None, STEPS,
            )  # fmt: skip
        else:
            sums, values = _gather_all(
                Q, ks, vs, there, missing, q, bias, dout, lse, delta, factor, q_query, o_query,
                KEYS, SCALE, D, HEAD, QUERIES, UNIT, TYPE, PRECISION, False, dk is not None, STEPS,
            )  # fmt: skip
    if dk is not None:
        _store(dk, sums * SCALE, row, key, live, head, K, H, D, HEAD)
    if dv is not None:
        _store(dv, values, row, key, live, head, K, H, D, HEAD)


def bias(
    q, k, v, bias, mask, dout, lse, delta, factor, dbias,
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
        qs = _load(q + q_row.to(tl.int64) * step * UNIT, query, q_query, D, HEAD, UNIT).to(TYPE)
        ks = _load(k + k_row.to(tl.int64) * step * UNIT, key, k_key, D, HEAD, UNIT).to(TYPE)
        vs = _load(v + v_row.to(tl.int64) * step * UNIT, key, v_key, D, HEAD, UNIT).to(TYPE)
        own = at + (H * Q).to(tl.int64) * step
        do = _load(dout + o_row.to(tl.int64) * step * UNIT, query, o_query, D, HEAD, UNIT).to(TYPE)
        s = _dot(qs, tl.trans(ks), PRECISION) * SCALE + b
        # Hopper's product takes dout as it was loaded, so that the factor comes after.
        slope = _dot(do, tl.trans(vs), PRECISION) * tl.load(factor + own)[:, None]
        slope -= tl.load(delta + own)[:, None]
        ds = tl.exp2((s - tl.load(lse + own)[:, None]) * _LOG2E) * slope
        if mask is not None:
            ds = tl.where(tl.load(mask + m_row.to(tl.int64) * step)[None, :], ds, 0.0)
        sums += ds
    to = dbias + (which * Q + query)[:, None] * K + key[None, :]
    inside = (index < Q)[:, None] & (there < K)[None, :]
    tl.store(to, sums.to(dbias.dtype.element_ty), mask=inside)


_KERNELS = {function.__name__: function for function in (forward, queries, keys, bias)}


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
        precision = of_float32(a.q.device) if dtype == torch.float32 else "ieee"
        self.constants, self.types = (a.scale, self.D, self.size), (_TYPES[dot], precision)
        self.narrow = dtype.itemsize == 2 and self.size <= 64

    def tile(self, name: str) -> Tile:
        if self.narrow:
            return _TILES[name]
        side, warps = (32, 2) if self.size <= 64 else (16, 1)
        return Tile(side, side, warps, 1)

    def programs(self, length: int, each: int) -> int:
        """Return the programs for all heads of all rows."""
        return self.B * self.N * self.H * -(-length // each)

    def launch(self, name: str, programs: int, tile: Tile, made: Any, *integers: int) -> None:
        strides = [x.stride()[:-1] for x in self.arrays]
        even = not self.D % _UNIT and not any([n % _UNIT for each in strides for n in each])
        unit = _UNIT if even else 1
        strides.insert(
            4, (0, 0, 0) if self.mask is None else [unit * n for n in self.mask.stride()]
        )
        q, k, v, bias, *dout = self.arrays
        arrays = q, k, v, bias, self.mask, *dout, *made
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
        constants = *self.constants, *tile[:2], unit, *self.types, steps
        dtypes = [None if array is None else array.dtype for array in arrays]
        key = q.device, *dtypes, wide(*given), *constants
        vectors = even and begin_vectors([x for x in arrays if x is not self.mask])
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
        tile = call.tile("forward")
        call.launch("forward", call.programs(call.Q, tile.queries), tile, y)


@register("triangle_attention_vjp", "triton")
def triangle_attention_vjp(a: Any, y: Any) -> None:
    if not _serves(attention_vjp, a, y):
        return
    call = _Call(a, a.dout)
    out, lse = a.out.contiguous(), a.lse.contiguous()
    delta, factor = torch.empty_like(lse), torch.empty_like(lse)
    tile = call.tile("queries")
    programs = call.programs(call.Q, tile.queries)
    call.launch("queries", programs, tile, (out, lse, delta, factor, y.dq))
    if y.dbias is not None:
        _bias_gradient(call, (lse, delta, factor), y.dbias)
    if y.dk is not None or y.dv is not None:
        # The kernel of dk and dv takes numbers of neighbouring queries together.
        call.arrays[3] = call.arrays[3].swapaxes(2, 3).contiguous()
        tile = call.tile("keys")
        programs = call.programs(call.K, tile.keys)
        call.launch("keys", programs, tile, (lse, delta, factor, y.dk, y.dv))


def _bias_gradient(call: _Call, given: tuple[Any, ...], dbias: Any) -> None:
    tile = call.tile("bias")
    tiles = call.B * call.H * -(-call.Q // tile.queries) * -(-call.K // tile.keys)
    rows = _rows_of_parts(tiles, call.N, processors(dbias.device))
    while call.N % rows and not dbias.is_cuda:
        rows += 1
    parts = -(-call.N // rows)
    made = dbias if parts == 1 else given[0].new_empty((parts, *dbias.shape))
    call.launch("bias", parts * tiles, tile, (*given, made), call.B, parts)
    if parts > 1:
        dbias.copy_(made.sum(0))


@functools.cache
def _rows_of_parts(tiles: int, rows: int, processors: int) -> int:
    """Return how many rows of each tile a program sums, so that programs end together."""
    there = _TOGETHER * processors

    def time(parts: int) -> int:
        return -(-tiles * parts // there) * (-(-rows // parts) + _PART)

    return -(-rows // min(range(1, min(rows, _MOST_PARTS) + 1), key=time))
