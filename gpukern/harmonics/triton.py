"""Wigner D matrices and their derivatives on the GPU: a program has a tile of edges.

`fusedops.harmonics.op.recursion` has the formulas. Every lane evaluates them for a pair of orders
n ≥ m, degree by degree, in float64. Matrices are written contiguously: the parts of an element come
from the lane of its orders. A lane reads the cotangents of its pair, eight elements, from the
nearest cache. With u(v) = v / |v|, a function of u has the gradient (g - u (u·g)) / |v| by v.

Bytes, once each: the vectors in, and the matrices out; for a derivative, their cotangents in.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fusedops._frame.registry import register
from fusedops.harmonics.op import (
    matrices,
    matrices_vjp,
    matrices_vjp_vjp,
    matrix_size,
    places,
    recursion,
)
from gpukern.launch import Launcher, kernel_of_any_size, power, wide

# The largest degree with a thread for an edge, and the edges and warps of a program then.
_OWN, _EDGES, _OWN_WARPS = 2, 32, 1
# For higher degrees: the lanes of a program, its warps, and the elements that it writes at once.
_LANES, _WARPS, _COLUMNS = 256, 4, 128
# The largest degree with a lane for a pair of orders; plain torch serves higher degrees.
_MOST = 15


@triton.jit
def _units(edge_vec, e, live, row, column):
    """Return vectors' unit vectors, turned into y ≥ 0, the sign of y, and lengths.

    A vector of length zero is the axis, infinitely long.
    """
    at = edge_vec + e * row
    x = tl.load(at, mask=live, other=0.0).to(tl.float64)
    y = tl.load(at + column, mask=live, other=0.0).to(tl.float64)
    z = tl.load(at + 2 * column, mask=live, other=0.0).to(tl.float64)
    turned = tl.where(y < 0, -1.0, 1.0).to(tl.float64)
    scale = tl.full(x.shape, 1.0, tl.float64)
    if edge_vec.dtype.element_ty == tl.float64:
        # The squares of narrower floats neither overflow nor vanish in float64.
        scale = tl.maximum(tl.maximum(tl.abs(x), tl.abs(y)), tl.abs(z))
        scale = tl.where(scale == 0, 1.0, scale)
        x = x / scale
        y = y / scale
        z = z / scale
    square = x * x + y * y + z * z
    none = square == 0
    length = tl.where(none, 1.0, tl.sqrt(square))
    y = tl.where(none, 1.0, y)
    # The inverse of an infinite length is NaN.
    inverse = 1 / length + 0 * square
    length = tl.where(none, float("inf"), length * scale)
    return x * inverse, turned * y * inverse, turned * z * inverse, turned, length


@triton.jit
def _times(ar, ai, br, bi):
    return ar * br - ai * bi, ar * bi + ai * br


@triton.jit
def _directions(ddedge_vec, e, live, row, column, x, y, z, turned, length):
    """Return the tangents along directions of unit vectors, and of the logarithms of lengths."""
    at = ddedge_vec + e * row
    dx = tl.load(at, mask=live, other=0.0).to(tl.float64)
    dy = tl.load(at + column, mask=live, other=0.0).to(tl.float64) * turned
    dz = tl.load(at + 2 * column, mask=live, other=0.0).to(tl.float64) * turned
    inner = x * dx + y * dy + z * dz
    inverse = 1 / length
    dx = (dx - x * inner) * inverse
    dy = (dy - y * inner) * inverse
    dz = (dz - z * inner) * inverse
    return dx, dy, dz, inner * inverse


@triton.jit
def _raised(x, z, k, zero, LEVELS: tl.constexpr):
    """Return the powers k, k - 1 and k - 2 of z + i x; 1 for a negative power."""
    re, im = zero + 1, zero
    ar, ai = z, x
    least = tl.maximum(k - 2, 0)
    for level in tl.static_range(LEVELS):
        br, bi = _times(re, im, ar, ai)
        odd = (least & (1 << level)) != 0
        re = tl.where(odd, br, re)
        im = tl.where(odd, bi, im)
        ar, ai = _times(ar, ai, ar, ai)
    br, bi = _times(re, im, z, x)
    br = tl.where(k >= 2, br, 1.0)
    bi = tl.where(k >= 2, bi, 0.0)
    cr, ci = _times(br, bi, z, x)
    cr = tl.where(k >= 1, cr, 1.0)
    ci = tl.where(k >= 1, ci, 0.0)
    return cr, ci, br, bi, re, im


@triton.jit
def _starts(y, n, m, zero, LMAX: tl.constexpr):
    """Return P and Q of degree n, and 1 / (1 + y)."""
    # The square of p is a binomial coefficient over a power of 4.
    square = tl.full(n.shape, 1.0, tl.float64)
    inverse = 1 / (1 + y)
    up, down = zero + 1, zero + 1
    for i in range(1, LMAX + 1):
        square = tl.where(i <= n, square * (2 * i - 1) / (2 * i), square)
        square = tl.where(i <= m, square * (n - i + 1) / (n + i), square)
        up = tl.where(i <= m, up * (1 + y), up)
        down = tl.where(i <= m, down * inverse, down)
    start = tl.sqrt(tl.where((m == 0) & (n > 0), 2 * square, square))
    p = tl.where((n + m) % 2 == 0, start, -start)
    q = tl.where(m == 0, 0.0, tl.where(n % 2 == 0, start, -start))
    return p * up, q * down, inverse


@triton.jit
def _load(g, l, i, j, row, column, mask, PACKED: tl.constexpr):
    """Load elements of orders i and j of degree l, in float64."""
    if PACKED:
        at = (l * (4 * l * l - 1) // 3 + (l + i) * (2 * l + 1) + l + j) * column
    else:
        at = (l * l + l + i) * row + (l * l + l + j) * column
    if len(mask.shape) == 1:
        found = tl.load(g + at, mask=mask, other=0.0)
    else:
        # In one row: a compiler that finds no order in addresses takes edges for neighbours.
        at = tl.reshape(g + at, (mask.numel,))
        found = tl.load(at, mask=tl.reshape(mask, (mask.numel,)), other=0.0)
        found = tl.reshape(found, mask.shape)
    return found.to(tl.float64)


@triton.jit
def _quadruple(g, l, n, m, row, column, plus, minus, live, PACKED: tl.constexpr):
    """Load cotangents of elements (±n, ±m) and (±m, ±n), as weights of the parts of powers."""
    live = live & (n <= l)
    a = plus * _load(g, l, n, m, row, column, live, PACKED)
    b = minus * _load(g, l, n, -m, row, column, live & (m > 0), PACKED)
    c = plus * _load(g, l, -n, m, row, column, live & (n > 0), PACKED)
    d = minus * _load(g, l, -n, -m, row, column, live & (m > 0), PACKED)
    live = live & (n != m)
    sign = 1 - 2 * ((n + m) % 2)
    a += sign * plus * _load(g, l, m, n, row, column, live, PACKED)
    b += sign * plus * _load(g, l, -m, n, row, column, live & (m > 0), PACKED)
    c += sign * minus * _load(g, l, m, -n, row, column, live, PACKED)
    d += sign * minus * _load(g, l, -m, -n, row, column, live & (m > 0), PACKED)
    return a + d, c - b, a - d, b + c


@triton.jit
def _write(
    out, re, im, Re, Im, l, turned, live, LMAX: tl.constexpr, PACKED: tl.constexpr,
    EDGES: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the block of degree l, made of the parts of the pairs."""
    low = tl.reshape(tl.join(re, im), (EDGES, 2 * PAIRS))
    high = tl.reshape(tl.join(Re, Im), (EDGES, 2 * PAIRS))
    width = 2 * l + 1
    begin = 0
    while begin < width * width:
        at = begin + tl.arange(0, COLUMNS)[None, :]
        i = at // width - l
        j = at % width - l
        inside = at < width * width
        rows = tl.abs(i)
        columns = tl.abs(j)
        n = tl.maximum(rows, columns)
        m = tl.minimum(rows, columns)
        mirrored = rows < columns
        # Whether the order ±n is negative, and whether the order ±m is.
        of_n = tl.where(mirrored, j, i) < 0
        of_m = tl.where(mirrored, i, j) < 0
        crossed = of_n != of_m
        index = tl.where(inside, n * (n + 1) + 2 * m + crossed.to(tl.int32), 0)
        index = tl.broadcast_to(index, (EDGES, COLUMNS))
        a = tl.gather(low, index, 1)
        b = tl.gather(high, index, 1)
        value = tl.where(crossed & of_m, -a, a) + tl.where(of_n & of_m, -b, b)
        negative = mirrored & ((n + m) % 2 != 0)
        # The half turn changes columns' signs.
        other = (turned < 0) & ((l % 2 != 0) == (j >= 0))
        value = tl.where(negative != other, -value, value).to(out.dtype.element_ty)
        if PACKED:
            place = l * (4 * l * l - 1) // 3 + at
        else:
            place = (l * l + l + i) * ((LMAX + 1) * (LMAX + 1)) + l * l + l + j
        tl.store(out + place, value, mask=live & inside)
        begin += COLUMNS


@triton.jit
def _pulled(re, im, dre, dim, k, ar, ai, br, bi):
    """Return the gradient by x, y and z of Re((re - i im) ρ^k), from powers k and k - 1 of ρ."""
    return k * (im * br - re * bi), dre * ar + dim * ai, k * (re * br + im * bi)


@triton.jit
def _turned(re, im, dre, dim, ddre, ddim, k, ar, ai, br, bi, cr, ci, dx, dy, dz):
    """Return the tangent of the gradient that `_pulled` returns."""
    # First for moving weights, which are functions of y, and then for moving powers.
    hx, hy, hz = _pulled(dre * dy, dim * dy, ddre * dy, ddim * dy, k, ar, ai, br, bi)
    dar, dai = _times(br, bi, dz, dx)
    dbr, dbi = _times(cr, ci, dz, dx)
    sx, sy, sz = _pulled(re, im, dre, dim, k, k * dar, k * dai, (k - 1) * dbr, (k - 1) * dbi)
    return hx + sx, hy + sy, hz + sz


@triton.jit
def _total(one, two):
    """Return sums over pairs."""
    return tl.sum(one + two, 1)[:, None]


@triton.jit
def _finish(
    dedge_vec, e, live, x, y, z, turned, length, dx, dy, dz, along, gx, gy, gz, hx, hy, hz,
    MOVING: tl.constexpr,
):  # fmt: skip
    """Write gradients by vectors, or (MOVING) their tangents along directions."""
    inner = x * gx + y * gy + z * gz
    if MOVING:
        hx -= along * gx + inner * dx
        hy -= along * gy + inner * dy
        hz -= along * gz + inner * dz
        inner = x * hx + y * hy + z * hz + gx * dx + gy * dy + gz * dz
        gx, gy, gz = hx, hy, hz
    at = dedge_vec + e * 3
    inverse = 1 / length
    own = dedge_vec.dtype.element_ty
    tl.store(at, ((gx - x * inner) * inverse).to(own), mask=live)
    tl.store(at + 1, (turned * (gy - y * inner) * inverse).to(own), mask=live)
    tl.store(at + 2, (turned * (gz - z * inner) * inverse).to(own), mask=live)


@kernel_of_any_size
def _kernel(
    edge_vec, dmatrices, ddedge_vec, out, dedge_vec,
    edges, v_row, v_column, g_edge, g_row, g_column, t_row, t_column,
    LMAX: tl.constexpr, PACKED: tl.constexpr, MOVING: tl.constexpr, WEIGHED: tl.constexpr,
    WRITTEN: tl.constexpr, SIZE: tl.constexpr, EDGES: tl.constexpr, PAIRS: tl.constexpr,
    LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)[:, None]
    live = e < edges
    x, y, z, turned, length = _units(edge_vec, e, live, v_row, v_column)
    dx, dy, dz, along = x, y, z, x
    if MOVING:
        dx, dy, dz, along = _directions(
            ddedge_vec, e, live, t_row, t_column, x, y, z, turned, length
        )
    FLOAT: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    pair = tl.arange(0, PAIRS)[None, :]
    n = ((tl.sqrt_rn((8 * pair + 1).to(tl.float32)) - 1) * 0.5).to(tl.int32)
    m = pair - n * (n + 1) // 2
    zero = tl.zeros([EDGES, PAIRS], tl.float64)
    ar, ai, br, bi, cr, ci = _raised(x, z, n - m, zero, LEVELS)
    Ar, Ai, Br, Bi, Cr, Ci = _raised(x, z, n + m, zero, LEVELS)
    P, Q, inverse = _starts(y, n, m, zero, LMAX)
    P0, Q0 = zero, zero
    if MOVING or WEIGHED:
        dP, dQ = m * P * inverse, -m * Q * inverse
        dP0, dQ0 = zero, zero
    if MOVING and WEIGHED:
        ddP, ddQ = (m - 1) * dP * inverse, -(m + 1) * dQ * inverse
        ddP0, ddQ0 = zero, zero
        ddre, ddim, ddRe, ddIm = zero, zero, zero, zero
    if WEIGHED:
        re, im, Re, Im, dre, dim, dRe, dIm = zero, zero, zero, zero, zero, zero, zero, zero
    if WRITTEN and not PACKED:
        # Zeros around the blocks.
        nothing = tl.zeros([EDGES, COLUMNS], out.dtype.element_ty)
        for begin in range(0, SIZE, COLUMNS):
            at = begin + tl.arange(0, COLUMNS)[None, :]
            tl.store(out + e * SIZE + at, nothing, mask=live & (at < SIZE))
        tl.debug_barrier()
    below = tl.zeros([1, PAIRS], tl.float64)
    for l in range(0, LMAX + 1):
        # Only pairs with a degree below l go on to l.
        follows = l > n
        root = tl.sqrt(tl.where(follows, (l * l - n * n) * (l * l - m * m), 1).to(tl.float64))
        divisor = tl.maximum(l - 1, 1)
        over = 1 / (root * divisor)
        a = (2 * l - 1) * l * divisor * over
        b = (2 * l - 1) * n * m * over
        c = l * below * over
        below = tl.where(follows, root, 0.0)
        if MOVING and WEIGHED:
            p = (a * y - b) * ddP + 2 * a * dP - c * ddP0
            q = (a * y + b) * ddQ + 2 * a * dQ - c * ddQ0
            ddP0 = tl.where(follows, ddP, 0.0)
            ddQ0 = tl.where(follows, ddQ, 0.0)
            ddP = tl.where(follows, p, ddP)
            ddQ = tl.where(follows, q, ddQ)
        if MOVING or WEIGHED:
            p = (a * y - b) * dP + a * P - c * dP0
            q = (a * y + b) * dQ + a * Q - c * dQ0
            dP0 = tl.where(follows, dP, 0.0)
            dQ0 = tl.where(follows, dQ, 0.0)
            dP = tl.where(follows, p, dP)
            dQ = tl.where(follows, q, dQ)
        p = (a * y - b) * P - c * P0
        q = (a * y + b) * Q - c * Q0
        P0 = tl.where(follows, P, 0.0)
        Q0 = tl.where(follows, Q, 0.0)
        P = tl.where(follows, p, P)
        Q = tl.where(follows, q, Q)
        if WEIGHED:
            plus = tl.where(l % 2 != 0, turned, 1.0)
            minus = tl.where(l % 2 == 0, turned, 1.0)
            low, cross, high, Cross = _quadruple(
                dmatrices + e * g_edge, l, n, m, g_row, g_column, plus, minus, live, PACKED
            )
            re += P * low
            im += P * cross
            Re += Q * high
            Im += Q * Cross
            dre += dP * low
            dim += dP * cross
            dRe += dQ * high
            dIm += dQ * Cross
            if MOVING:
                ddre += ddP * low
                ddim += ddP * cross
                ddRe += ddQ * high
                ddIm += ddQ * Cross
        if WRITTEN:
            if MOVING:
                p = dP * dy
                q = dQ * dy
                sr, si = _times(br, bi, dz, dx)
                Sr, Si = _times(Br, Bi, dz, dx)
                sr = p * ar + (n - m) * P * sr
                si = p * ai + (n - m) * P * si
                Sr = q * Ar + (n + m) * Q * Sr
                Si = q * Ai + (n + m) * Q * Si
                # Degree 0 has no tangent, not even a NaN.
                sr = tl.where(l > 0, sr, 0.0)
                Sr = tl.where(l > 0, Sr, 0.0)
            else:
                sr, si, Sr, Si = P * ar, P * ai, Q * Ar, Q * Ai
            _write(
                out + e * SIZE, sr.to(FLOAT), si.to(FLOAT), Sr.to(FLOAT), Si.to(FLOAT), l, turned,
                live, LMAX, PACKED, EDGES, PAIRS, COLUMNS,
            )  # fmt: skip
    if WEIGHED:
        sx, sy, sz = _pulled(re, im, dre, dim, n - m, ar, ai, br, bi)
        Sx, Sy, Sz = _pulled(Re, Im, dRe, dIm, n + m, Ar, Ai, Br, Bi)
        gx, gy, gz = _total(sx, Sx), _total(sy, Sy), _total(sz, Sz)
        hx, hy, hz = gx, gy, gz
        if MOVING:
            sx, sy, sz = _turned(
                re, im, dre, dim, ddre, ddim, n - m, ar, ai, br, bi, cr, ci, dx, dy, dz
            )
            Sx, Sy, Sz = _turned(
                Re, Im, dRe, dIm, ddRe, ddIm, n + m, Ar, Ai, Br, Bi, Cr, Ci, dx, dy, dz
            )
            hx, hy, hz = _total(sx, Sx), _total(sy, Sy), _total(sz, Sz)
        _finish(
            dedge_vec, e, live, x, y, z, turned, length, dx, dy, dz, along, gx, gy, gz, hx, hy, hz,
            MOVING,
        )  # fmt: skip


@triton.jit
def _own_quadruple(
    g, l: tl.constexpr, n: tl.constexpr, m: tl.constexpr, row, column, turned, live,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Return the weights of `_quadruple`, for orders that the compiler knows."""
    SIGN: tl.constexpr = 1 - 2 * ((n + m) % 2)
    # The half turn turns either the columns of orders m ≥ 0, or the columns of m < 0.
    plus = _load(g, l, n, m, row, column, live, PACKED)
    a, b, c, d = plus, plus * 0, plus * 0, plus * 0
    if n > m:
        a += SIGN * _load(g, l, m, n, row, column, live, PACKED)
    if n > 0:
        c = _load(g, l, -n, m, row, column, live, PACKED)
    if m > 0:
        b = _load(g, l, n, -m, row, column, live, PACKED)
        d = _load(g, l, -n, -m, row, column, live, PACKED)
    if l % 2 == 1:
        a *= turned
        c *= turned
    else:
        b *= turned
        d *= turned
    if n > m:
        mirrored = SIGN * _load(g, l, m, -n, row, column, live, PACKED)
        if l % 2 == 1:
            c += mirrored
        else:
            c += turned * mirrored
        if m > 0:
            mirrored = SIGN * _load(g, l, -m, n, row, column, live, PACKED)
            other = SIGN * _load(g, l, -m, -n, row, column, live, PACKED)
            if l % 2 == 1:
                b += turned * mirrored
                d += other
            else:
                b += mirrored
                d += turned * other
    return a + d, c - b, a - d, b + c


@triton.jit
def _advanced(
    y, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, P, dP, ddP, P0, dP0, ddP0,
    ORDER: tl.constexpr,
):  # fmt: skip
    """Return a function and its derivatives of the next degree, and then of this degree."""
    f = A * y + B
    after, dafter, ddafter = f * P - C * P0, dP, ddP
    if ORDER > 0:
        dafter = f * dP + A * P - C * dP0
    if ORDER > 1:
        ddafter = f * ddP + 2 * A * dP - C * ddP0
    return after, dafter, ddafter, P, dP, ddP


@triton.jit
def _own_pair(
    g, live, turned, y, inverse, up, down, re_of, im_of, dx, dy, dz, g_row, g_column,
    m: tl.constexpr, n: tl.constexpr, STARTS: tl.constexpr, STEPS: tl.constexpr,
    LMAX: tl.constexpr, PACKED: tl.constexpr, MOVING: tl.constexpr, WEIGHED: tl.constexpr,
    WRITTEN: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Return a pair's quadruples of all degrees, its gradient, and the gradient's tangent."""
    LOW: tl.constexpr = n - m
    HIGH: tl.constexpr = n + m
    PAIR: tl.constexpr = m * (LMAX + 1) + n
    ORDER: tl.constexpr = (1 if MOVING else 0) + (1 if WEIGHED else 0)
    # Powers are numbered from -1 on.
    ar, ai, br, bi = re_of[LOW + 1], im_of[LOW + 1], re_of[LOW], im_of[LOW]
    Ar, Ai, Br, Bi = re_of[HIGH + 1], im_of[HIGH + 1], re_of[HIGH], im_of[HIGH]
    P, Q = STARTS[2 * PAIR] * up, STARTS[2 * PAIR + 1] * down
    dP, dQ = m * P * inverse, -m * Q * inverse
    ddP, ddQ = (m - 1) * dP * inverse, -(m + 1) * dQ * inverse
    zero = y * 0
    P0, Q0, dP0, dQ0, ddP0, ddQ0 = zero, zero, zero, zero, zero, zero
    re, im, Re, Im, dre, dim, dRe, dIm = zero, zero, zero, zero, zero, zero, zero, zero
    ddre, ddim, ddRe, ddIm = zero, zero, zero, zero
    if MOVING:
        mr, mi = _times(br, bi, dz, dx)
        Mr, Mi = _times(Br, Bi, dz, dx)
    parts = ()
    for l in tl.static_range(n, LMAX + 1):
        if WEIGHED:
            low, cross, high, Cross = _own_quadruple(
                g, l, n, m, g_row, g_column, turned, live, PACKED
            )
            re += P * low
            im += P * cross
            Re += Q * high
            Im += Q * Cross
            dre += dP * low
            dim += dP * cross
            dRe += dQ * high
            dIm += dQ * Cross
            if MOVING:
                ddre += ddP * low
                ddim += ddP * cross
                ddRe += ddQ * high
                ddIm += ddQ * Cross
        if WRITTEN:
            if MOVING:
                sr = dP * dy * ar + LOW * P * mr
                si = dP * dy * ai + LOW * P * mi
                Sr = dQ * dy * Ar + HIGH * Q * Mr
                Si = dQ * dy * Ai + HIGH * Q * Mi
                # Degree 0 has no tangent, not even a NaN.
                if l == 0:
                    sr = tl.zeros(y.shape, tl.float64)
                    Sr = sr
            else:
                sr, si, Sr, Si = P * ar, P * ai, Q * Ar, Q * Ai
            parts = parts + (
                (sr + Sr).to(FLOAT),
                (Si - si).to(FLOAT),
                (Si + si).to(FLOAT),
                (sr - Sr).to(FLOAT),
            )
        P, dP, ddP, P0, dP0, ddP0 = _advanced(
            y, STEPS[3 * (PAIR * (LMAX + 1) + l)], -STEPS[3 * (PAIR * (LMAX + 1) + l) + 1],
            STEPS[3 * (PAIR * (LMAX + 1) + l) + 2], P, dP, ddP, P0, dP0, ddP0, ORDER,
        )  # fmt: skip
        Q, dQ, ddQ, Q0, dQ0, ddQ0 = _advanced(
            y, STEPS[3 * (PAIR * (LMAX + 1) + l)], STEPS[3 * (PAIR * (LMAX + 1) + l) + 1],
            STEPS[3 * (PAIR * (LMAX + 1) + l) + 2], Q, dQ, ddQ, Q0, dQ0, ddQ0, ORDER,
        )  # fmt: skip
    gx, gy, gz, hx, hy, hz = zero, zero, zero, zero, zero, zero
    if WEIGHED:
        sx, sy, sz = _pulled(re, im, dre, dim, LOW, ar, ai, br, bi)
        gx, gy, gz = _pulled(Re, Im, dRe, dIm, HIGH, Ar, Ai, Br, Bi)
        gx += sx
        gy += sy
        gz += sz
        if MOVING:
            BELOW_LOW: tl.constexpr = LOW - 1 if LOW > 1 else 0
            BELOW_HIGH: tl.constexpr = HIGH - 1 if HIGH > 1 else 0
            cr, ci = re_of[BELOW_LOW], im_of[BELOW_LOW]
            Cr, Ci = re_of[BELOW_HIGH], im_of[BELOW_HIGH]
            sx, sy, sz = _turned(
                re, im, dre, dim, ddre, ddim, LOW, ar, ai, br, bi, cr, ci, dx, dy, dz
            )
            hx, hy, hz = _turned(
                Re, Im, dRe, dIm, ddRe, ddIm, HIGH, Ar, Ai, Br, Bi, Cr, Ci, dx, dy, dz
            )
            hx += sx
            hy += sy
            hz += sz
    return parts, gx, gy, gz, hx, hy, hz


@triton.jit
def _gathered(parts, turned, SOURCES: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows of elements, which `SOURCES` describes as `_sources` does."""
    LEVELS: tl.constexpr = WIDTH.bit_length() - 1
    EDGES: tl.constexpr = turned.shape[0]
    zero = parts[0] * 0
    rows = ()
    for k in tl.static_range(WIDTH):
        if SOURCES[k] < 0:
            rows = rows + (tl.zeros_like(zero),)
        elif SOURCES[k] % 4 == 0:
            rows = rows + (parts[SOURCES[k] // 4],)
        elif SOURCES[k] % 4 == 1:
            rows = rows + (turned * parts[SOURCES[k] // 4],)
        elif SOURCES[k] % 4 == 2:
            rows = rows + (-parts[SOURCES[k] // 4],)
        else:
            rows = rows + (-turned * parts[SOURCES[k] // 4],)
    for _level in tl.static_range(LEVELS):
        joined = ()
        for k in tl.static_range(len(rows) // 2):
            joined = joined + (tl.join(rows[k], rows[k + len(rows) // 2]),)
        rows = joined
    return tl.reshape(rows[0], (EDGES, WIDTH))


@kernel_of_any_size
def _own_kernel(
    edge_vec, dmatrices, ddedge_vec, out, dedge_vec,
    edges, v_row, v_column, g_edge, g_row, g_column, t_row, t_column,
    LMAX: tl.constexpr, PACKED: tl.constexpr, MOVING: tl.constexpr, WEIGHED: tl.constexpr,
    WRITTEN: tl.constexpr, SIZE: tl.constexpr, EDGES: tl.constexpr, WIDTH: tl.constexpr,
    STARTS: tl.constexpr, STEPS: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    live = e < edges
    x, y, z, turned, length = _units(edge_vec, e, live, v_row, v_column)
    dx, dy, dz, along = x, y, z, x
    if MOVING:
        dx, dy, dz, along = _directions(
            ddedge_vec, e, live, t_row, t_column, x, y, z, turned, length
        )
    FLOAT: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    zero = tl.zeros([EDGES], tl.float64)
    re_of, im_of = (zero, zero + 1), (zero, zero)
    for k in tl.static_range(2 * LMAX):
        re, im = _times(re_of[k + 1], im_of[k + 1], z, x)
        re_of = re_of + (re,)
        im_of = im_of + (im,)
    inverse = 1 / (1 + y)
    up, down = zero + 1, zero + 1
    gx, gy, gz, hx, hy, hz = zero, zero, zero, zero, zero, zero
    parts = ()
    for m in tl.static_range(LMAX + 1):
        for n in tl.static_range(m, LMAX + 1):
            own, sx, sy, sz, tx, ty, tz = _own_pair(
                dmatrices + e * g_edge, live, turned, y, inverse, up, down, re_of, im_of,
                dx, dy, dz, g_row, g_column,
                m, n, STARTS, STEPS, LMAX, PACKED, MOVING, WEIGHED, WRITTEN, FLOAT,
            )  # fmt: skip
            parts = parts + own
            gx += sx
            gy += sy
            gz += sz
            hx += tx
            hy += ty
            hz += tz
        up *= 1 + y
        down *= inverse
    if WRITTEN:
        rows = _gathered(parts, turned.to(FLOAT), SOURCES, WIDTH)
        at = tl.arange(0, WIDTH)[None, :]
        place = out + e[:, None] * SIZE + at
        tl.store(place, rows.to(out.dtype.element_ty), mask=live[:, None] & (at < SIZE))
    if WEIGHED:
        _finish(
            dedge_vec, e, live, x, y, z, turned, length, dx, dy, dz, along, gx, gy, gz, hx, hy, hz,
            MOVING,
        )  # fmt: skip


_launch = Launcher(_kernel, _WARPS)
_launch_own = Launcher(_own_kernel, _OWN_WARPS)


@functools.cache
def _tables(lmax: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the numbers of `recursion`, by m, n and l from 0 to lmax."""
    starts, steps = np.zeros((lmax + 1,) * 2 + (2,)), np.zeros((lmax + 1,) * 3 + (3,))
    pairs = [(m, n) for m in range(lmax + 1) for n in range(m, lmax + 1)]
    first, then = map(iter, recursion(lmax))
    for m, n in pairs:
        starts[m, n] = next(first)
        for l in range(n, lmax + 1):
            steps[m, n, l] = next(then)
    return tuple(starts.ravel().tolist()), tuple(steps.ravel().tolist())


@functools.cache
def _sources(lmax: int, packed: bool) -> tuple[int, ...]:
    """Return, for each element of a row, its part of a quadruple, times 4; -1 for zero.

    1 is added where the half turn changes the element's sign, and 2 where the element is negated.
    """
    size = math.prod(matrix_size(lmax, packed))
    found = np.full(power(size), -1)
    origins, rows = places(lmax, "packed" if packed else "dense")
    unit = 0
    for m in range(lmax + 1):
        for n in range(m, lmax + 1):
            for l in range(n, lmax + 1):
                for k, (i, j) in enumerate(((n, m), (n, -m), (-n, m), (-n, -m))):
                    # Order zero has one sign.
                    if (k >= 2 and not n) or (k % 2 and not m):
                        continue
                    for row, column, sign in ((i, j, 0), (j, i, 2 * ((n + m) % 2))):
                        turned = (l % 2 == 1) == (column >= 0)
                        at = origins[l] + row * rows[l] + column
                        found[at] = 4 * (4 * unit + k) + sign + turned
                unit += 1
    return tuple(found.tolist())


def _run(a: Any, dmatrices: Any, ddedge_vec: Any, out: Any, dedge_vec: Any) -> None:
    edge_vec, lmax, packed = a.edge_vec, a.lmax, a.layout == "packed"
    count = edge_vec.shape[0]
    if not count:
        return
    moving, weighed, written = ddedge_vec is not None, dmatrices is not None, out is not None
    # Any tensor stands for a tensor that isn't touched.
    g = dmatrices if weighed else edge_vec
    t = ddedge_vec if moving else edge_vec
    strides = *edge_vec.stride(), *g.stride()[:2], g.stride()[-1], *t.stride()
    size = math.prod(matrix_size(lmax, packed))
    out = out if written else dedge_vec
    dedge_vec = dedge_vec if weighed else out
    constants: tuple[Any, ...] = lmax, packed, moving, weighed, written, size
    if lmax <= _OWN:
        launch, tile = _launch_own, _EDGES
        constants += tile, power(size), *_tables(lmax), _sources(lmax, packed)
    else:
        pairs = power((lmax + 1) * (lmax + 2) // 2)
        launch, tile = _launch, max(1, _LANES // pairs)
        constants += tile, pairs, (2 * lmax - 2).bit_length(), _COLUMNS
    key = (
        *(tensor.dtype for tensor in (edge_vec, g, t, out, dedge_vec)), edge_vec.device,
        wide(count, *strides), *constants[:6],
    )  # fmt: skip
    launch(-(-count // tile), key, edge_vec, g, t, out, dedge_vec, count, *strides, *constants)


def _by_formula(primitive: Any, a: Any, y: Any) -> None:
    with torch.no_grad():
        for slot, value in zip(y, primitive.formula(a), strict=True):
            if slot is not None:
                slot.copy_(value)


@register("wigner_d", "triton")
def wigner_d(a: Any, y: Any) -> None:
    if a.lmax > _MOST:
        _by_formula(matrices, a, y)
    else:
        _run(a, None, None, y.matrices, None)


@register("wigner_d_vjp", "triton")
def wigner_d_vjp(a: Any, y: Any) -> None:
    if a.lmax > _MOST:
        _by_formula(matrices_vjp, a, y)
    else:
        _run(a, a.dmatrices, None, None, y.dedge_vec)


@register("wigner_d_vjp_vjp", "triton")
def wigner_d_vjp_vjp(a: Any, y: Any) -> None:
    if a.lmax > _MOST:
        _by_formula(matrices_vjp_vjp, a, y)
    else:
        # The derivative by matrices alone needs no cotangent of matrices.
        dmatrices = None if y.dedge_vec is None else a.dmatrices
        _run(a, dmatrices, a.ddedge_vec, y.ddmatrices, y.dedge_vec)
