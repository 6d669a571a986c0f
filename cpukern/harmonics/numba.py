"""Wigner D matrices on the CPU in Numba, and their derivatives, sixty-four edges at a time.

kernels.pyx has the same steps. The numbers of a tile are lanes of the rows of
one scratch array, at places that the compiler knows, so that it vectorizes by itself.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from cpukern.jit import inlined, jit
from fusedops._frame.registry import register
from fusedops._host.threads import in_parallel
from fusedops.harmonics.op import matrix_size, places, recursion

# Edges of a tile, and tiles that pay for handing a share to another thread.
_LANES, _GRAIN = 64, 4
# Rows of scratch: the unit vector, the sign of y and the length; the tangents of the unit vector
# and of the length's logarithm; 1 / (1 + y); powers m of 1 + y and of its inverse; one; the
# gradient by the unit vector, and its tangent.
_X, _Y, _Z, _TURNED, _LENGTH, _DX, _DY, _DZ, _ALONG, _INVERSE, _UP, _DOWN, _ONE = (
    _LANES * k for k in range(13)
)
_GX, _GY, _GZ, _HX, _HY, _HZ = (_LANES * k for k in range(13, 19))
# P and Q of a degree, P0 and Q0 of the degree before, and derivatives; the sums over degrees.
_P, _DP, _DDP, _P0, _DP0, _DDP0, _Q, _DQ, _DDQ, _Q0, _DQ0, _DDQ0 = (
    _LANES * k for k in range(19, 31)
)
_LOW, _HIGH = 31 * _LANES, 37 * _LANES
# Cotangents or elements of a quadruple (±n, ±m).
_A, _B, _C, _D = (_LANES * k for k in range(43, 47))
_ROWS = 47

_fused = inlined(fastmath={"contract"})


@_fused
def _read(s, vectors, first):
    """Read vectors of a tile; a vector of length zero is the axis, infinitely long."""
    for t in range(_LANES):
        e = min(first + t, len(vectors) - 1)
        x, y, z = np.float64(vectors[e, 0]), np.float64(vectors[e, 1]), np.float64(vectors[e, 2])
        largest = max(abs(x), abs(y), abs(z))
        none = x == 0 and y == 0 and z == 0
        largest = 1.0 if none else largest
        x, y, z = x / largest, y / largest, z / largest
        length = 1.0 if none else math.sqrt(x * x + y * y + z * z)
        x, y, z = x / length, 1.0 if none else y / length, z / length
        turned = 1.0 if y >= 0 else -1.0
        s[_X + t], s[_Y + t], s[_Z + t] = x, turned * y, turned * z
        s[_TURNED + t] = turned
        s[_LENGTH + t] = math.inf if none else length * largest
        s[_ONE + t] = s[_UP + t] = s[_DOWN + t] = 1
        s[_INVERSE + t] = 1 / (1 + turned * y)
    for at in range(_GX, _HZ + _LANES):
        s[at] = 0


@_fused
def _read_directions(s, directions, first):
    for t in range(_LANES):
        e = min(first + t, len(directions) - 1)
        x = np.float64(directions[e, 0])
        y, z = s[_TURNED + t] * directions[e, 1], s[_TURNED + t] * directions[e, 2]
        inner = s[_X + t] * x + s[_Y + t] * y + s[_Z + t] * z
        s[_ALONG + t] = inner / s[_LENGTH + t]
        s[_DX + t] = (x - s[_X + t] * inner) / s[_LENGTH + t]
        s[_DY + t] = (y - s[_Y + t] * inner) / s[_LENGTH + t]
        s[_DZ + t] = (z - s[_Z + t] * inner) / s[_LENGTH + t]


@_fused
def _raise(s, re, im, dre, dim):
    """Set powers of ρ, row k + 1 for power k, and their tangents."""
    re[:2], im[:2], dre[:2], dim[:2] = 0, 0, 0, 0
    re[1] = 1
    for k in range(1, len(re) - 1):
        for t in range(_LANES):
            a, b, x, z = re[k, t], im[k, t], s[_X + t], s[_Z + t]
            re[k + 1, t], im[k + 1, t] = a * z - b * x, a * x + b * z
            dx, dz = s[_DX + t], s[_DZ + t]
            dre[k + 1, t], dim[k + 1, t] = k * (a * dz - b * dx), k * (a * dx + b * dz)


@_fused
def _begin(s, start, m):
    """Set P = p h^m and Q = q h^-m, h = 1 + y, and derivatives; a degree before, all are zero."""
    for t in range(_LANES):
        p, q, inverse = start[0] * s[_UP + t], start[1] * s[_DOWN + t], s[_INVERSE + t]
        s[_P + t], s[_DP + t], s[_DDP + t] = p, m * p * inverse, m * (m - 1) * p * inverse**2
        s[_Q + t], s[_DQ + t], s[_DDQ + t] = q, -m * q * inverse, m * (m + 1) * q * inverse**2
    for t in range(3 * _LANES):
        s[_P0 + t] = s[_Q0 + t] = 0
    for at in range(_LOW, _A):
        s[at] = 0


@_fused
def _advance(s, step, P, P0, b):
    """Go on to the next degree, of P or of Q."""
    a, c = step[0], step[2]
    for t in range(_LANES):
        f = a * s[_Y + t] + b
        p, dp, ddp = s[P + t], s[P + _LANES + t], s[P + 2 * _LANES + t]
        s[P + t] = f * p - c * s[P0 + t]
        s[P + _LANES + t] = f * dp + a * p - c * s[P0 + _LANES + t]
        s[P + 2 * _LANES + t] = f * ddp + 2 * a * dp - c * s[P0 + 2 * _LANES + t]
        s[P0 + t], s[P0 + _LANES + t], s[P0 + 2 * _LANES + t] = p, dp, ddp


@_fused
def _make(s, re, im, dre, dim, low, high, moving):
    """Set a quadruple's elements, or their tangents."""
    for t in range(_LANES):
        if moving:
            p, q = s[_DP + t] * s[_DY + t], s[_DQ + t] * s[_DY + t]
            a = p * re[low, t] + s[_P + t] * dre[low, t]
            b = p * im[low, t] + s[_P + t] * dim[low, t]
            c = q * re[high, t] + s[_Q + t] * dre[high, t]
            d = q * im[high, t] + s[_Q + t] * dim[high, t]
        else:
            a, b = s[_P + t] * re[low, t], s[_P + t] * im[low, t]
            c, d = s[_Q + t] * re[high, t], s[_Q + t] * im[high, t]
        s[_A + t], s[_B + t], s[_C + t], s[_D + t] = a + c, d - b, d + b, a - c


@jit
def _find(spots, center, row, m, n, plus, minus):
    """Set which lanes, signs, factors and elements belong together in a quadruple; count them."""
    count, factor = 0, 1 - 2 * ((n + m) % 2)
    for i, j, value in ((n, m, _A), (n, -m, _B), (-n, m, _C), (-n, -m, _D)):
        # Order zero has one sign.
        if (value >= _C and n == 0) or (value in (_B, _D) and m == 0):
            continue
        spots[count] = value, plus if j >= 0 else minus, 1, center + i * row + j
        count += 1
        if n > m:
            spots[count] = value, plus if i >= 0 else minus, factor, center + j * row + i
            count += 1
    return count


@jit
def _put(s, spots, count, out, first):
    """Write the elements of a quadruple."""
    for k in range(count):
        value, sign, factor, at = spots[k]
        for t in range(min(_LANES, len(out) - first)):
            out[first + t, at] = factor * s[sign + t] * s[value + t]


@jit
def _take(s, spots, count, g, first):
    """Add up the cotangents of a quadruple's elements."""
    for at in range(_A, _D + _LANES):
        s[at] = 0
    for k in range(count):
        value, sign, factor, at = spots[k]
        for t in range(_LANES):
            e = min(first + t, len(g) - 1)
            s[value + t] += factor * s[sign + t] * g[e, at]


@_fused
def _weigh(s):
    """Add a quadruple's cotangents to the sums over degrees."""
    for t in range(_LANES):
        a, b, c, d = s[_A + t], s[_B + t], s[_C + t], s[_D + t]
        re, im, Re, Im = a + d, c - b, a - d, b + c
        for k in range(3):
            p, q = s[_P + k * _LANES + t], s[_Q + k * _LANES + t]
            s[_LOW + 2 * k * _LANES + t] += p * re
            s[_LOW + (2 * k + 1) * _LANES + t] += p * im
            s[_HIGH + 2 * k * _LANES + t] += q * Re
            s[_HIGH + (2 * k + 1) * _LANES + t] += q * Im


@_fused
def _collect(s, w, k, re, im, dre, dim):
    """Add the gradient of the part of ρ^k, and the gradient's tangent."""
    at, below = k + 1, k
    for t in range(_LANES):
        u, v, dy = k * s[w + t], k * s[w + _LANES + t], s[_DY + t]
        du, dv = s[w + 2 * _LANES + t], s[w + 3 * _LANES + t]
        s[_GY + t] += du * re[at, t] + dv * im[at, t]
        s[_GZ + t] += u * re[below, t] + v * im[below, t]
        s[_GX + t] += v * re[below, t] - u * im[below, t]
        ddu, ddv = s[w + 4 * _LANES + t] * dy, s[w + 5 * _LANES + t] * dy
        s[_HY + t] += ddu * re[at, t] + ddv * im[at, t] + du * dre[at, t] + dv * dim[at, t]
        du, dv = k * du * dy, k * dv * dy
        a, b, da, db = re[below, t], im[below, t], dre[below, t], dim[below, t]
        s[_HZ + t] += du * a + u * da + dv * b + v * db
        s[_HX + t] += dv * a + v * da - du * b - u * db


@_fused
def _finish(s, out, first, moving):
    """Write the gradients by vectors, or (moving) their tangents along directions."""
    for t in range(min(_LANES, len(out) - first)):
        x, y, z, length = s[_X + t], s[_Y + t], s[_Z + t], s[_LENGTH + t]
        gx, gy, gz = s[_GX + t], s[_GY + t], s[_GZ + t]
        inner = x * gx + y * gy + z * gz
        if moving:
            dx, dy, dz, along = s[_DX + t], s[_DY + t], s[_DZ + t], s[_ALONG + t]
            hx = s[_HX + t] - along * gx - inner * dx
            hy = s[_HY + t] - along * gy - inner * dy
            hz = s[_HZ + t] - along * gz - inner * dz
            inner = x * hx + y * hy + z * hz + gx * dx + gy * dy + gz * dz
            gx, gy, gz = hx, hy, hz
        out[first + t, 0] = (gx - x * inner) / length
        out[first + t, 1] = s[_TURNED + t] * ((gy - y * inner) / length)
        out[first + t, 2] = s[_TURNED + t] * ((gz - z * inner) / length)


@jit
def _tiles(
    vectors, directions, g, out, dvectors, origins, rows, starts, steps, lmax, moving, low, high
):
    s, spots = np.zeros(_ROWS * _LANES), np.zeros((8, 4), np.int64)
    re, im, dre, dim = np.zeros((4, 2 * lmax + 2, _LANES))
    for tile in range(low, high):
        first = tile * _LANES
        _read(s, vectors, first)
        if moving:
            _read_directions(s, directions, first)
        _raise(s, re, im, dre, dim)
        # Zeros around the blocks.
        out[first : first + _LANES] = 0
        pair = step = 0
        for m in range(lmax + 1):
            for n in range(m, lmax + 1):
                _begin(s, starts[pair], m)
                pair += 1
                for l in range(n, lmax + 1):
                    # The half turn changes columns' signs.
                    plus, minus = (_TURNED, _ONE) if l % 2 else (_ONE, _TURNED)
                    count = _find(spots, origins[l], rows[l], m, n, plus, minus)
                    # Degree 0 has no tangent, not even a NaN.
                    if len(out) and (l or not moving):
                        _make(s, re, im, dre, dim, n - m + 1, n + m + 1, moving)
                        _put(s, spots, count, out, first)
                    if len(g):
                        _take(s, spots, count, g, first)
                        _weigh(s)
                    _advance(s, steps[step], _P, _P0, -steps[step, 1])
                    _advance(s, steps[step], _Q, _Q0, steps[step, 1])
                    step += 1
                if len(g):
                    _collect(s, _LOW, n - m, re, im, dre, dim)
                    _collect(s, _HIGH, n + m, re, im, dre, dim)
            for t in range(_LANES):
                s[_UP + t] *= 1 + s[_Y + t]
                s[_DOWN + t] *= s[_INVERSE + t]
        _finish(s, dvectors, first, moving)


@functools.lru_cache(maxsize=16)
def _constants(lmax: int, layout: str) -> tuple[Any, ...]:
    return *places(lmax, layout), *recursion(lmax), lmax


def _run(a: Any, dmatrices: Any, ddedge_vec: Any, matrices: Any, dedge_vec: Any) -> None:
    dtype, count = a.edge_vec.dtype, len(a.edge_vec)
    size = math.prod(matrix_size(a.lmax, a.layout == "packed"))

    def rows(array: Any, width: int) -> np.ndarray:
        """Return an array as rows; no rows for None."""
        if array is None:
            return np.empty((0, width), dtype)
        return np.ascontiguousarray(array).reshape(count, width)

    arrays = (
        rows(a.edge_vec, 3),
        rows(ddedge_vec, 3),
        rows(dmatrices, size),
        rows(matrices, size),
        rows(dedge_vec, 3),
    )
    constants = *_constants(a.lmax, a.layout), ddedge_vec is not None
    work = functools.partial(_tiles, *arrays, *constants)
    in_parallel(work, -(-count // _LANES), _GRAIN)


@register("wigner_d", "numba")
def wigner_d(a: Any, y: Any) -> None:
    _run(a, None, None, y.matrices, None)


@register("wigner_d_vjp", "numba")
def wigner_d_vjp(a: Any, y: Any) -> None:
    _run(a, a.dmatrices, None, None, y.dedge_vec)


@register("wigner_d_vjp_vjp", "numba")
def wigner_d_vjp_vjp(a: Any, y: Any) -> None:
    # The derivative by matrices alone needs no cotangent of matrices.
    dmatrices = None if y.dedge_vec is None else a.dmatrices
    _run(a, dmatrices, a.ddedge_vec, y.ddmatrices, y.dedge_vec)
