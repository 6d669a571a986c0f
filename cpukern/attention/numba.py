"""Triangle attention on the CPU in Numba, one query after the other.

A row's keys and values are copied once, also transposed: all sums are then sums of rows, in near
caches. A backward computes the logits again. Consecutive rows share a sum for the bias's gradient,
and the sums are added in their order, so the thread count changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cpukern.attention.parts import parts_of
from cpukern.jit import inlined, jit
from cpukern.layout import as_rows, clear
from fusedops._frame.registry import register
from fusedops._host.threads import in_parallel
from fusedops.attention.op import MISSING

# Products of a query's and a key's channels that are worth handing to another thread.
_GRAIN = 1 << 16

_fused = inlined(fastmath={"contract"})


@_fused
def _combine(factors, rows, out):
    """Write the sum of rows, each times its factor."""
    out[:] = 0
    whole = len(rows) // 4 * 4
    for i in range(0, whole, 4):
        a, b, c, d = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
        for j in range(len(out)):
            out[j] += (a * rows[i, j] + b * rows[i + 1, j]) + (
                c * rows[i + 2, j] + d * rows[i + 3, j]
            )
    for i in range(whole, len(rows)):
        for j in range(len(out)):
            out[j] += factors[i] * rows[i, j]


@_fused
def _add_outer(out, factors, row, factor):
    """Add the row times every factor to the rows of `out`."""
    for i in range(len(out)):
        a = factor * factors[i]
        for j in range(len(row)):
            out[i, j] += a * row[j]


@inlined()
def _copy(edges, h, rows, columns):
    """Write a head of edges (K, H, D) as rows (K, D), and as columns (D, K)."""
    for k in range(len(edges)):
        for d in range(edges.shape[2]):
            rows[k, d] = edges[k, h, d]
            columns[d, k] = edges[k, h, d]


@_fused
def _take_logits(products, scale, bias, mask, n):
    """Turn products with keys into logits; a row without keys counts from zero."""
    for k in range(len(products)):
        products[k] = scale * products[k] + bias[k]
    if len(mask):
        missing = products.dtype.type(MISSING if mask[n].any() else 0)
        for k in range(len(products)):
            products[k] = products[k] if mask[n, k] else missing


@jit
def _attend(low, high, q, k, v, bias, mask, scale, out, lse):
    """Attend with heads `low` to `high` of all rows."""
    K, H, D, dtype = k.shape[1], k.shape[2], k.shape[3], q.dtype
    rows, columns = np.empty((K, D), dtype), np.empty((D, K), dtype)
    shares, found = np.empty(K, dtype), np.empty(D, dtype)
    for item in range(low, high):
        n, h = item // H, item % H
        b = n // (len(q) // len(bias))
        _copy(k[n], h, rows, columns)
        for i in range(K):
            for d in range(D):
                rows[i, d] = v[n, i, h, d]
        for i in range(q.shape[1]):
            _combine(q[n, i, h], columns, shares)
            _take_logits(shares, scale, bias[b, h, i], mask, n)
            largest, total = shares[0], 0.0
            for j in range(K):
                largest = max(largest, shares[j])
            for j in range(K):
                shares[j] = math.exp(shares[j] - largest)
                total += shares[j]
            if len(lse):
                lse[n, h, i] = math.log(total) + largest
            if len(out):
                _combine(shares, rows, found)
                for d in range(D):
                    out[n, i, h, d] = found[d] / total


@jit
def _pull_back(low, high, q, k, v, bias, mask, scale, dout, dq, dk, dv, sums):
    """Pull back to parts `low` to `high` of all heads' rows."""
    K, H, D, dtype = k.shape[1], k.shape[2], k.shape[3], q.dtype
    B, parts = len(bias), sums.shape[2]
    N = len(q) // B
    keys, key_columns = np.empty((K, D), dtype), np.empty((D, K), dtype)
    values, value_columns = np.empty((K, D), dtype), np.empty((D, K), dtype)
    dkeys, dvalues = np.empty((K, D), dtype), np.empty((K, D), dtype)
    shares, slopes, found = np.empty(K, dtype), np.empty(K, dtype), np.empty(D, dtype)
    for item in range(low, high):
        b, h, part = item // parts // H, item // parts % H, item % parts
        total = sums[b, h, part]
        total[:] = 0
        for n in range(b * N + N * part // parts, b * N + N * (part + 1) // parts):
            _copy(k[n], h, keys, key_columns)
            _copy(v[n], h, values, value_columns)
            dkeys[:] = 0
            dvalues[:] = 0
            for i in range(q.shape[1]):
                _combine(q[n, i, h], key_columns, shares)
                _take_logits(shares, scale, bias[b, h, i], mask, n)
                _combine(dout[n, i, h], value_columns, slopes)
                # The logarithm of the denominator is lost beside large logits.
                largest, denominator, mean = shares[0], 0.0, 0.0
                for j in range(K):
                    largest = max(largest, shares[j])
                for j in range(K):
                    shares[j] = math.exp(shares[j] - largest)
                    denominator += shares[j]
                for j in range(K):
                    shares[j] /= denominator
                    mean += shares[j] * slopes[j]
                for j in range(K):
                    kept = len(mask) == 0 or mask[n, j]
                    slopes[j] = shares[j] * (slopes[j] - mean) if kept else 0
                if total.shape[0]:
                    for j in range(K):
                        total[i, j] += slopes[j]
                if len(dq):
                    _combine(slopes, keys, found)
                    for d in range(D):
                        dq[n, i, h, d] = scale * found[d]
                _add_outer(dkeys, slopes, q[n, i, h], scale)
                _add_outer(dvalues, shares, dout[n, i, h], dtype.type(1))
            for j in range(K):
                for d in range(D):
                    if len(dk):
                        dk[n, j, h, d] = dkeys[j, d]
                    if len(dv):
                        dv[n, j, h, d] = dvalues[j, d]


def _arguments(a: Any) -> tuple[Any, ...]:
    """Return the rows of q, k and v, the bias, the mask and the scale."""
    edges = (as_rows(x, x.shape[2:], x.dtype) for x in (a.q, a.k, a.v))
    mask = as_rows(a.mask, a.k.shape[2:3], bool)
    return (*edges, np.ascontiguousarray(a.bias), mask, a.q.dtype.type(a.scale))


def _in_parallel(work: Callable[[int, int], None], items: int, a: Any) -> None:
    in_parallel(work, items, 1 + _GRAIN * items // max(a.q.size * a.k.shape[2], 1))


@register("triangle_attention", "numba")
def triangle_attention(a: Any, y: Any) -> None:
    if not a.q.size:
        return
    batch, rows, queries, heads, channels = a.q.shape
    out = as_rows(y.out, (queries, heads, channels), a.q.dtype)
    lse = as_rows(y.lse, (heads, queries), a.q.dtype)
    arguments = (*_arguments(a), out, lse)
    _in_parallel(lambda low, high: _attend(low, high, *arguments), batch * rows * heads, a)


@register("triangle_attention_vjp", "numba")
def triangle_attention_vjp(a: Any, y: Any) -> None:
    if not a.q.size:
        # Sums over no rows, or no queries.
        clear(y)
        return
    batch, _, queries, heads, _ = a.q.shape
    shape = (queries, a.k.shape[2]) if y.dbias is not None else (0, 0)
    sums = np.empty((batch, heads, parts_of(a), *shape), a.q.dtype)
    given = (*_arguments(a), as_rows(a.dout, a.q.shape[2:], a.q.dtype))
    pairs = zip((y.dq, y.dk, y.dv), (a.q, a.k, a.v), strict=True)
    outputs = (as_rows(dx, x.shape[2:], x.dtype) for dx, x in pairs)
    arguments = (*given, *outputs, sums)
    _in_parallel(
        lambda low, high: _pull_back(low, high, *arguments), batch * heads * parts_of(a), a
    )
    if y.dbias is not None:
        y.dbias[...] = sums[:, :, 0]
        for part in range(1, parts_of(a)):
            y.dbias[...] += sums[:, :, part]
