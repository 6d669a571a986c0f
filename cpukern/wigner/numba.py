"""Rotations into the frames of edges and back on the CPU in Numba, one end of an edge at a time.

All outputs for an end are computed while its message is in the cache. If there are sums over a
node's edges, ends are taken by node, so that one thread owns a node's sum. An edge's target comes
before its source, so neither the thread count nor the choice of outputs changes a bit.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cpukern.jit import inlined, jit
from cpukern.so2.numba import STEPS
from cpukern.vectors_numba import fetch
from cpukern.wigner.factors import with_factors
from fusedops._frame.registry import register
from fusedops._host.threads import in_parallel
from fusedops.wigner.rows import degree_of, degrees

# Edges whose targets, and then sources, are taken together if there are no sums over nodes.
_CHUNK = 16
# Shares of the nodes, with about equal numbers of edges; an upper limit for threads.
_SHARES = 256
# Elements of matrices times channels that are worth handing to another thread.
_GRAIN = 1 << 18

# Inlined, since a call passes every field of its arrays and costs more than a short row.
# Products may fuse with sums: every addition has one product, so there is one way to fuse.
_fused = inlined(fastmath={"contract"})
# Sums over channels may be reordered into vectors; NaNs stay NaNs.
_reordered = inlined(fastmath={"contract", "reassoc"})


@_fused
def _add_one(out, o, keep, w, at, rows, index, k):
    a, p = w[at], index[k]
    for c in range(out.shape[1]):
        out[o, c] = (out[o, c] if keep else out.dtype.type(0)) + a * rows[p, c]


@_fused
def _add_two(out, o, w, at, step, rows, index, k):
    a, b = w[at], w[at + step]
    p, q = index[k], index[k + 1]
    for c in range(out.shape[1]):
        out[o, c] = out[o, c] + a * rows[p, c] + b * rows[q, c]


@_fused
def _add_four(out, o, w, at, step, rows, index, k):
    a, b, c, d = w[at], w[at + step], w[at + 2 * step], w[at + 3 * step]
    p, q, r, s = index[k], index[k + 1], index[k + 2], index[k + 3]
    for i in range(out.shape[1]):
        total = out[o, i] + a * rows[p, i] + b * rows[q, i]
        out[o, i] = total + c * rows[r, i] + d * rows[s, i]


@jit
def _combine(out, outs, out_count, keep, w, out_step, step, rows, index, count):
    """Write (or add, to `keep`) sums of an odd number of rows[index] times w to out[outs]."""
    for i in range(out_count):
        at = i * out_step
        _add_one(out, outs[i], keep, w, at, rows, index, 0)
        if count & 2:
            _add_two(out, outs[i], w, at + step, step, rows, index, 1)
        for k in range(1 + (count & 2), count, 4):
            _add_four(out, outs[i], w, at + k * step, step, rows, index, k)


@_reordered
def _dot(row, r, rows, p):
    total = row.dtype.type(0)
    for c in range(row.shape[1]):
        total += row[r, c] * rows[p, c]
    return total


@_reordered
def _two_dots(row, r, rows, p):
    first = second = row.dtype.type(0)
    for c in range(row.shape[1]):
        first += row[r, c] * rows[p, c]
        second += row[r, c] * rows[p + 1, c]
    return first, second


@inlined()
def _within(index, count):
    return min(max(index, 0), count - 1)


@jit
def _ends(
    h_low,
    h_high,
    node_cuts,
    cuts,
    orders,
    nodes,
    N,
    places,
    own,
    scale,
    base,
    x,
    message,
    wigner,
    dx,
    dmessage,
    dwigner,
    low,
    high,
):
    ends, E = nodes.shape
    lmax, mmax = len(own) - 1, own.shape[1] // 2
    R = (lmax + 1) ** 2
    M = R - (lmax - mmax) * (lmax - mmax + 1)
    line = 64 // wigner.itemsize
    w = np.empty((2 * lmax + 1) * (2 * mmax + 1), wigner.dtype)
    x_rows = np.empty(2 * lmax + 1, np.int64)
    rows = np.empty(2 * mmax + 1, np.int64)
    for part in range(low, high):
        for h in range(h_low, h_high):
            slot = ends - 1 - h
            if h == 0 and len(dx):
                w[0] = 1
                for r in range(node_cuts[h, part] * R, node_cuts[h, part + 1] * R):
                    rows[0] = min(r, len(base) - 1)
                    _add_one(dx, r, False, w, 0, base, rows, 0)
            for at in range(cuts[h, part], cuts[h, part + 1]):
                e = _within(orders[h, at], E)
                n = _within(nodes[h, e], N)
                ahead = _within(orders[h, min(at + 1, orders.shape[1] - 1)], E)
                fetch(wigner, ahead, line)
                fetch(dwigner, ahead, line)
                if h == 0 and len(dwigner):
                    for i in range(dwigner.shape[1]):
                        dwigner[e, i] = 0
                for l in range(lmax + 1):
                    size, kept = 2 * l + 1, 2 * min(l, mmax) + 1
                    start, step_k, step_j = places[l, 0], places[l, 1], places[l, 2]
                    for j in range(size):
                        x_rows[j] = n * R + l * l + j
                    for k in range(kept):
                        rows[k] = (e * M + own[l, k]) * ends + slot
                        next_row = (ahead * M + own[l, k]) * ends + slot
                        fetch(message, next_row, line)
                        fetch(dmessage, next_row, line)
                        for j in range(size):
                            w[k * size + j] = scale * wigner[e, start + k * step_k + j * step_j]
                    if len(dmessage):
                        _combine(dmessage, rows, kept, False, w, size, 1, x, x_rows, size)
                    if len(dx):
                        _combine(dx, x_rows, size, True, w, 1, size, message, rows, kept)
                    if len(dwigner):
                        for k in range(kept):
                            i = start + k * step_k
                            dwigner[e, i] += scale * _dot(message, rows[k], x, x_rows[0])
                            for j in range(1, size, 2):
                                a, b = _two_dots(message, rows[k], x, x_rows[j])
                                dwigner[e, i + j * step_j] += scale * a
                                dwigner[e, i + (j + 1) * step_j] += scale * b


@functools.lru_cache(maxsize=64)
def _places(lmax: int, mmax: int, way: str, dense: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the layout of every degree's matrix, and the degree's m-major rows.

    The layout is the offset of the first element that is kept, the step to the next m-major row,
    and the step to the next l-major row.
    """
    places = np.empty((lmax + 1, 3), np.int64)
    m_major = np.zeros((lmax + 1, 2 * mmax + 1), np.int64)
    packed = 0
    for l, (rows, kept, own) in enumerate(degrees(lmax, mmax)):
        size = 2 * l + 1
        stride = (lmax + 1) ** 2 if dense else size
        step_k, step_j = (1, stride) if way == "back" else (stride, 1)
        corner = rows.start * (stride + 1) if dense else packed
        places[l] = corner + kept[0] * step_k, step_k, step_j
        m_major[l, : len(own)] = own
        packed += size * size
    return places, m_major


def _shares(ptr: np.ndarray, edges: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts of shares of the nodes, and of their edges in the list, within bounds."""
    marks = edges * np.arange(1, _SHARES) // _SHARES
    node_cuts = np.concatenate([[0], np.searchsorted(ptr, marks).clip(max=nodes), [nodes]])
    cuts = ptr[node_cuts.clip(max=len(ptr) - 1)].clip(0, edges)
    cuts[-1] = edges
    return node_cuts, cuts


def _rows(array: Any, width: int, dtype: Any, ends: int = 1) -> np.ndarray:
    """Return C-contiguous rows, with separate rows for each end; no rows for None."""
    if array is None:
        return np.empty((0, width), dtype)
    return np.ascontiguousarray(array).reshape(math.prod(array.shape[:-1]) * ends, width)


@register("edge_wigner", "numba")
def edge_wigner(a: Any, y: Any) -> None:
    with_factors(_rotate, STEPS, a, y)


def _rotate(a: Any, y: Any) -> None:
    base, x, message, wigner, _, edges, mmax, way, scale = a
    dx, dmessage, dwigner, _ = y
    dtype = wigner.dtype
    places, own = _places(degree_of(wigner), mmax, way, wigner.ndim == 3)
    ends = 2 if way == "forth" else 1
    C = x.shape[2] if x is not None else message.shape[2] // ends
    N = min([len(array) for array in (x, dx) if array is not None])
    nodes = np.arange(len(wigner))[None]
    if edges is not None:
        nodes = np.stack([edges.target, edges.source][:ends])
    nodes = np.ascontiguousarray(nodes[:, : len(wigner) if N else 0])
    E = nodes.shape[1]
    if edges is None or dx is None:
        orders = np.stack([np.arange(E)] * ends)
        cuts = node_cuts = np.stack([np.append(np.arange(0, E, _CHUNK), E)] * ends)
        phases = [(0, ends)]
    else:
        lists = [(edges.by_target, edges.target_ptr), (edges.by_source, edges.source_ptr)][:ends]
        orders = np.stack([order[:E] for order, _ in lists])
        shares = [_shares(ptr, orders.shape[1], len(dx)) for _, ptr in lists]
        node_cuts, cuts = (np.stack(found) for found in zip(*shares, strict=True))
        # All targets first: a node may be the source of edges into nodes of other shares.
        phases = [(h, h + 1) for h in range(ends)]
    matrix = math.prod(wigner.shape[1:])
    arguments = (
        node_cuts,
        cuts,
        orders,
        nodes,
        N,
        places,
        own,
        dtype.type(scale),
        np.zeros((1, C), dtype) if base is None else _rows(base, C, dtype),
        _rows(x, C, dtype),
        _rows(message, C, dtype, ends),
        np.ascontiguousarray(wigner).reshape(-1, matrix),
        _rows(dx, C, dtype),
        _rows(dmessage, C, dtype, ends),
        np.empty((0, matrix), dtype) if dwigner is None else dwigner.reshape(-1, matrix),
    )
    parts = cuts.shape[1] - 1
    grain = 1 + _GRAIN * parts // max(wigner.size * C, 1)
    for phase in phases:
        in_parallel(functools.partial(_ends, *phase, *arguments), parts, grain)
