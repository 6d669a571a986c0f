"""The density of atoms on the CPU in Numba, along lines of voxels in z.

A line meets an atom's sphere in an interval. Displacements from the atom to the voxels of many
lines are stored one after the other, so that exponentials run in whole SIMD vectors. One thread
owns each slab of planes of the map, and sums it in the order of the atoms; one thread owns each
atom's gradient. So the thread count changes no bit.

Tangents of atoms change a Gaussian by a factor, a polynomial of second degree. The map's derivative
sums such products, and second derivatives by atoms follow from moments with and without the factor.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from cpukern.jit import inlined, jit
from cpukern.scatter.numba import in_shares
from cpukern.vectors_numba import RAMP, add_run, copy_run, write_ramp
from fusedops._frame.registry import register
from fusedops._host.threads import get_num_threads, in_parallel
from fusedops.density.op import SLACK, clamped, clamping, tangents_of

# Exponentials that are worth handing to another thread.
_GRAIN = 1 << 14
# Atoms whose Gaussians are worth handing to another thread.
_ATOMS = 1 << 10
# Voxels of a batch: with their displacements they fit into the first-level cache.
_BATCH = 1024
# A batch is padded to a multiple of this, at least four SIMD vectors.
_BLOCK = 32
# Bytes of a slab, which should fit into the second-level cache.
_SLAB = 1 << 19
# Slabs for every thread, for even shares.
_SLABS = 4

_fused = {"fastmath": {"contract"}, "error_model": "numpy", "forceinline": True}
# Sums over voxels may be reordered into vectors.
_reordered = inlined(fastmath={"contract", "reassoc"})


def _polynomial(degree: int, dtype: Any) -> tuple[Any, ...]:
    """Return coefficients of 2^x for |x| <= 1/2, the highest first."""
    fitted = np.polynomial.Chebyshev.interpolate(np.exp2, degree, domain=[-0.5, 0.5])
    return tuple(fitted.convert(kind=np.polynomial.Polynomial).coef[::-1].astype(dtype))


# Accurate to 2e-8 and 1.5e-15, as exponents are anyway.
_SINGLE, _DOUBLE = _polynomial(6, np.float32), _polynomial(10, np.float64)


def _exp2(x):
    """Return 2^x for x <= 0, without branches and calls, which would prevent vector code."""


@overload(_exp2, jit_options=_fused)
def _exp2_of(x):
    def single(x):
        a, b, c, d, e, f, g = _SINGLE
        x = max(x, np.float32(-126))
        n = np.int32(x - np.float32(0.5))
        x -= np.float32(n)
        value = (((((a * x + b) * x + c) * x + d) * x + e) * x + f) * x + g
        return value * np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)

    def double(x):
        a, b, c, d, e, f, g, h, i, j, k = _DOUBLE
        x = max(x, -1022.0)
        n = np.int64(np.int32(x - 0.5))
        x -= np.float64(n)
        value = (((((a * x + b) * x + c) * x + d) * x + e) * x + f) * x + g
        value = (((value * x + h) * x + i) * x + j) * x + k
        return value * np.int64((n + 1023) << 52).view(np.float64)

    return single if x == numba.types.float32 else double


@jit
def _is_good(xyz, b, occupancy, amplitudes, widths, radius, largest):
    """Return whether an atom has a density: the negation of `fusedops.density.bad_atoms`."""
    total = occupancy
    for x in xyz:
        total += x
    for x in b:
        total += x
    least = math.inf
    for g in range(len(widths)):
        total += np.float64(widths[g]) + amplitudes[g]
        least = min(least, np.float64(widths[g]))
    if not (math.isfinite(total) and 0 <= radius <= largest):
        return False
    if len(b) == 1:
        return least + b[0] > 0
    scale = 8 * math.pi**2
    x, y, z = least + scale * b[0], least + scale * b[1], least + scale * b[2]
    d, e, f = scale * b[3], scale * b[4], scale * b[5]
    second = x * y - d * d
    third = z * second - x * f * f - y * e * e + 2 * d * e * f
    return x > 0 and second > 0 and third > 0


@jit
def _set_up(
    low,
    high,
    xyz,
    b,
    occupancy,
    amplitudes,
    widths,
    radius,
    to_grid,
    measures,
    shape,
    planes,
    bare,
    at,
    box,
    sizes,
    square,
    share,
    forms,
):
    """Write atoms' positions, in voxels, their boxes and Gaussians.

    The box is empty of a bad atom, and of one that doesn't reach the map's `planes`, the first and
    their number. `sizes` are the numbers of voxels in a plane of the box and in the box. Bare
    Gaussians are of one electron.
    """
    for a in range(low, high):
        reach, share[a] = np.float64(radius[a]), occupancy[a]
        at[a], box[a, :, 0], box[a, :, 1], sizes[a], forms[a] = 0, 0, -1, 0, 0
        square[a] = 0
        if not _is_good(xyz[a], b[a], share[a], amplitudes[a], widths[a], reach, measures[9]):
            share[a] = 0
            continue
        square[a] = reach * reach * (1 + SLACK)
        for d in range(3):
            x = to_grid[d, 0] * xyz[a, 0] + to_grid[d, 1] * xyz[a, 1] + to_grid[d, 2] * xyz[a, 2]
            if not math.isfinite(x):
                share[a] = math.nan
                break
            x -= math.floor(x / shape[d]) * shape[d]
            far = reach * measures[6 + d] * (1 + SLACK)
            at[a, d] = x
            box[a, d, 0], box[a, d, 1] = math.ceil(x - far), math.floor(x + far)
        if math.isnan(share[a]):
            share[a], box[a, :, 0], box[a, :, 1] = 0, 0, -1
            continue
        extent, first = box[a, 0, 1] - box[a, 0, 0] + 1, (box[a, 0, 0] - planes[0]) % shape[0]
        if not planes[1] or (first >= planes[1] and first + extent <= shape[0]):
            box[a, 0, 1] = box[a, 0, 0] - 1
            continue
        sizes[a, 0] = (box[a, 1, 1] - box[a, 1, 0] + 1) * (box[a, 2, 1] - box[a, 2, 0] + 1)
        sizes[a, 1] = extent * sizes[a, 0]
        for g in range(widths.shape[1]):
            amplitude = 1.0 if bare else np.float64(amplitudes[a, g])
            if b.shape[1] == 1:
                c = 4 * math.pi**2 / (np.float64(widths[a, g]) + b[a, 0])
                forms[a, g, 0] = amplitude * (c / math.pi) * math.sqrt(c / math.pi)
                forms[a, g, 1] = c
                continue
            width, scale = np.float64(widths[a, g]), 2 * math.pi**2
            xx, yy, zz, xy, xz, yz = (
                width / 4 + scale * b[a, 0],
                width / 4 + scale * b[a, 1],
                width / 4 + scale * b[a, 2],
                scale * b[a, 3],
                scale * b[a, 4],
                scale * b[a, 5],
            )
            pxx, pxy, pxz = yy * zz - yz * yz, xz * yz - xy * zz, xy * yz - xz * yy
            det = xx * pxx + xy * pxy + xz * pxz
            forms[a, g, 0] = amplitude * math.pi * math.sqrt(math.pi / det)
            c = math.pi**2 / det
            forms[a, g, 1] = c * pxx
            forms[a, g, 2] = c * (xx * zz - xz * xz)
            forms[a, g, 3] = c * (xx * yy - xy * xy)
            forms[a, g, 4] = c * pxy
            forms[a, g, 5] = c * pxz
            forms[a, g, 6] = c * (xy * xz - xx * yz)


@inlined()
def _square(x, y, z):
    return x * x + y * y + z * z


@inlined()
def _along(corner, d, along):
    return corner[0] + d * along[0], corner[1] + d * along[1], corner[2] + d * along[2]


@inlined()
def _intersect(corner, across, along, z, first, last, square, low, high):
    """Write the first and the last voxel inside of the sphere for every line of z of a plane.

    There are no branches, so lines run in vectors.
    """
    share = 1 / _square(*along)
    for j in range(len(low)):
        line = _along(corner, j, across)
        middle = -share * (line[0] * along[0] + line[1] * along[1] + line[2] * along[2])
        left = square - _square(*_along(line, middle, along))
        # Keep voxels at the sphere despite rounding; an exact test follows.
        half = math.sqrt(max(left * share, 0.0)) + 1e-6
        begin = max(math.ceil(z + middle - half), first)
        end = min(math.floor(z + middle + half), last)
        low[j] = begin + (not _square(*_along(line, begin - z, along)) <= square)
        high[j] = end - (not _square(*_along(line, end - z, along)) <= square)


@jit
def _add_plane(plane, own, at, box, square, step, shape, spans, w, lines, voxels, count):
    """Append the voxels and the lines of a plane of an atom's box; return their numbers.

    It is plane `own` of the map. A line is (first voxel of the row, first z, voxels); it may go
    around the cell several times.
    """
    down, across, along = (
        (step[0, 0], step[1, 0], step[2, 0]),
        (step[0, 1], step[1, 1], step[2, 1]),
        (step[0, 2], step[1, 2], step[2, 2]),
    )
    first = box[1, 0]
    corner = _along(_along((0.0, 0.0, 0.0), plane - at[0], down), first - at[1], across)
    lows, highs = spans[0, : box[1, 1] - first + 1], spans[1, : box[1, 1] - first + 1]
    _intersect(corner, across, along, at[2], box[2, 0], box[2, 1], square, lows, highs)
    rows, row = own * shape[1], first % shape[1]
    for j in range(len(lows)):
        low, high = lows[j], highs[j]
        line = _along(corner, j, across)
        if low <= high:
            for k in range(low, high + 1, RAMP):
                x, y, z = _along(line, k - at[2], along)
                write_ramp(w[0], voxels + k - low, x, along[0])
                write_ramp(w[1], voxels + k - low, y, along[1])
                write_ramp(w[2], voxels + k - low, z, along[2])
            n = high - low + 1
            if not 0 <= low < shape[2]:
                low %= shape[2]
            lines[count, 0], lines[count, 1], lines[count, 2] = (rows + row) * shape[2], low, n
            count += 1
            voxels += n
        row = row + 1 if row + 1 < shape[1] else 0
    return voxels, count


@jit
def _product(A, B, out):
    """Write the product of matrices (3, 3)."""
    for i in range(3):
        for j in range(3):
            out[i, j] = A[i, 0] * B[0, j] + A[i, 1] * B[1, j] + A[i, 2] * B[2, j]


@jit
def _write_matrix(row, out):
    """Write a symmetric matrix, from one element of a diagonal, or xx, yy, zz, xy, xz, yz."""
    out[:] = 0
    for i in range(3):
        out[i, i] = row[i] if len(row) > 1 else row[0]
    if len(row) > 1:
        out[0, 1] = out[1, 0] = row[3]
        out[0, 2] = out[2, 0] = row[4]
        out[1, 2] = out[2, 1] = row[5]


@jit
def _trace(A):
    return A[0, 0] + A[1, 1] + A[2, 2]


@jit
def _slope(P, xyz, b, width, beta, gamma, work):
    """Write a Gaussian's change along tangents, over its value: beta·w + w·gamma w - nu; return nu.

    See `_vjp_vjp_formula` of fusedops/density/op.py.
    """
    _write_matrix(b, gamma)
    gamma *= 0.25 if len(b) == 1 else 2 * math.pi**2
    for i in range(3):
        gamma[i, i] += width / 4
        beta[i] = 2 * (P[i, 0] * xyz[0] + P[i, 1] * xyz[1] + P[i, 2] * xyz[2])
    _product(P, gamma, work)
    nu = _trace(work) / (2 * math.pi**2)
    _product(work, P, gamma)
    gamma /= math.pi**2
    return nu


@jit
def _set_changes(low, high, box, occupancy, forms, amplitudes, along, changes):
    """Write the polynomials p + q·w + w·S w by which tangents change Gaussians: p, q and S."""
    P, gamma, work, beta = np.empty((3, 3)), np.empty((3, 3)), np.empty((3, 3)), np.empty(3)
    xyz, b, toccupancy, tamplitudes, twidths = along
    for a in range(low, high):
        if box[a, 0, 1] < box[a, 0, 0]:
            continue
        for g in range(forms.shape[1]):
            _write_matrix(forms[a, g, 1:], P)
            nu = _slope(P, xyz[a], b[a], twidths[a, g], beta, gamma, work)
            share = occupancy[a] * amplitudes[a, g]
            plain = toccupancy[a] * amplitudes[a, g] + occupancy[a] * tamplitudes[a, g]
            change = changes[a, g]
            change[0], change[1:4] = plain - share * nu, share * beta
            change[4] = share * gamma[0, 0]
            if len(change) > 5:
                change[5], change[6] = share * gamma[1, 1], share * gamma[2, 2]
                change[7], change[8] = share * gamma[0, 1], share * gamma[0, 2]
                change[9] = share * gamma[1, 2]


@inlined()
def _polynomial_of(change, dtype):
    """Return a change in the working precision, with twice the elements off the diagonal of S."""
    p, qx, qy, qz = dtype(change[0]), dtype(change[1]), dtype(change[2]), dtype(change[3])
    if len(change) == 5:
        u = dtype(change[4])
        return p, qx, qy, qz, u, u, u, u, u, u
    a, b, c = dtype(change[4]), dtype(change[5]), dtype(change[6])
    d, e, f = dtype(2 * change[7]), dtype(2 * change[8]), dtype(2 * change[9])
    return p, qx, qy, qz, a, b, c, d, e, f


@jit
def _evaluate(w, voxels, scale, forms, changes, atom, value):
    """Write sums of an atom's Gaussians at displacements w, times their changes if not None."""
    dtype = value.dtype.type
    n = -(-voxels // _BLOCK) * _BLOCK
    x, y, z, value = w[0, :n], w[1, :n], w[2, :n], value[:n]
    value[:] = 0
    for i in range(len(forms)):
        form = forms[i]
        norm, (a, b, c, d, e, f) = dtype(scale * form[0]), _exponents(form, dtype)
        if changes is not None:
            _add_changed(x, y, z, form, changes[atom, i], value)
        elif len(form) == 2:
            for m in range(n):
                value[m] += norm * _exp2(a * _square(x[m], y[m], z[m]))
        else:
            for m in range(n):
                value[m] += norm * _exp2(_form(x[m], y[m], z[m], a, b, c, d, e, f))


@jit
def _add_changed(x, y, z, form, change, value):
    dtype = value.dtype.type
    norm, (a, b, c, d, e, f) = dtype(form[0]), _exponents(form, dtype)
    p, qx, qy, qz, sa, sb, sc, sd, se, sf = _polynomial_of(change, dtype)
    if len(form) == 2:
        for m in range(len(value)):
            square = _square(x[m], y[m], z[m])
            factor = p + qx * x[m] + qy * y[m] + qz * z[m] + sa * square
            value[m] += norm * _exp2(a * square) * factor
    else:
        for m in range(len(value)):
            factor = p + qx * x[m] + qy * y[m] + qz * z[m]
            factor += _form(x[m], y[m], z[m], sa, sb, sc, sd, se, sf)
            value[m] += norm * _exp2(_form(x[m], y[m], z[m], a, b, c, d, e, f)) * factor


@jit
def _add_moments(w, voxels, g, forms, changes, atom, moments):
    """Add sums over displacements w of exponentials times g times 1, w, and w·w or w wᵀ.

    With changes, there are the same sums with a Gaussian's change as another factor.
    """
    dtype = g.dtype.type
    n = -(-voxels // _BLOCK) * _BLOCK
    g[voxels:n] = 0
    x, y, z, g = w[0, :n], w[1, :n], w[2, :n], g[:n]
    for i in range(len(forms)):
        if changes is None:
            own = _moments(x, y, z, g, forms[i], dtype)
            for k in range(moments.shape[2]):
                moments[i, 0, k] += own[k]
        else:
            own, changed = _changed_moments(x, y, z, g, forms[i], changes[atom, i], dtype)
            for k in range(moments.shape[2]):
                moments[i, 0, k] += own[k]
                moments[i, 1, k] += changed[k]


@_reordered
def _moments(x, y, z, g, form, dtype):
    a, b, c, d, e, f = _exponents(form, dtype)
    s = sx = sy = sz = sxx = syy = szz = sxy = sxz = syz = dtype(0)
    if len(form) == 2:
        for m in range(len(g)):
            square = _square(x[m], y[m], z[m])
            t = g[m] * _exp2(a * square)
            s += t
            sx += t * x[m]
            sy += t * y[m]
            sz += t * z[m]
            sxx += t * square
    else:
        for m in range(len(g)):
            t = g[m] * _exp2(_form(x[m], y[m], z[m], a, b, c, d, e, f))
            s += t
            tx, ty, tz = t * x[m], t * y[m], t * z[m]
            sx += tx
            sy += ty
            sz += tz
            sxx += tx * x[m]
            syy += ty * y[m]
            szz += tz * z[m]
            sxy += tx * y[m]
            sxz += tx * z[m]
            syz += ty * z[m]
    return s, sx, sy, sz, sxx, syy, szz, sxy, sxz, syz


@_reordered
def _changed_moments(x, y, z, g, form, change, dtype):
    a, b, c, d, e, f = _exponents(form, dtype)
    p, qx, qy, qz, sa, sb, sc, sd, se, sf = _polynomial_of(change, dtype)
    s = sx = sy = sz = sxx = syy = szz = sxy = sxz = syz = dtype(0)
    u = ux = uy = uz = uxx = uyy = uzz = uxy = uxz = uyz = dtype(0)
    if len(form) == 2:
        for m in range(len(g)):
            square = _square(x[m], y[m], z[m])
            t = g[m] * _exp2(a * square)
            s += t
            sx += t * x[m]
            sy += t * y[m]
            sz += t * z[m]
            sxx += t * square
            t *= p + qx * x[m] + qy * y[m] + qz * z[m] + sa * square
            u += t
            ux += t * x[m]
            uy += t * y[m]
            uz += t * z[m]
            uxx += t * square
    else:
        for m in range(len(g)):
            t = g[m] * _exp2(_form(x[m], y[m], z[m], a, b, c, d, e, f))
            s += t
            tx, ty, tz = t * x[m], t * y[m], t * z[m]
            sx += tx
            sy += ty
            sz += tz
            sxx += tx * x[m]
            syy += ty * y[m]
            szz += tz * z[m]
            sxy += tx * y[m]
            sxz += tx * z[m]
            syz += ty * z[m]
            factor = p + qx * x[m] + qy * y[m] + qz * z[m]
            t *= factor + _form(x[m], y[m], z[m], sa, sb, sc, sd, se, sf)
            u += t
            tx, ty, tz = t * x[m], t * y[m], t * z[m]
            ux += tx
            uy += ty
            uz += tz
            uxx += tx * x[m]
            uyy += ty * y[m]
            uzz += tz * z[m]
            uxy += tx * y[m]
            uxz += tx * z[m]
            uyz += ty * z[m]
    own = s, sx, sy, sz, sxx, syy, szz, sxy, sxz, syz
    return own, (u, ux, uy, uz, uxx, uyy, uzz, uxy, uxz, uyz)


@inlined()
def _exponents(form, dtype):
    """Return -log2(e) P in the working precision; one element of it for an isotropic atom."""
    scale = -1 / math.log(2)
    if len(form) == 2:
        a = dtype(scale * form[1])
        return a, a, a, a, a, a
    return (
        dtype(scale * form[1]),
        dtype(scale * form[2]),
        dtype(scale * form[3]),
        dtype(2 * scale * form[4]),
        dtype(2 * scale * form[5]),
        dtype(2 * scale * form[6]),
    )


@numba.njit(**_fused)
def _form(x, y, z, a, b, c, d, e, f):
    return x * (a * x + d * y + e * z) + y * (b * y + f * z) + c * z * z


@jit
def _slabs(
    low,
    high,
    slab,
    ptr,
    atoms,
    at,
    box,
    square,
    occupancy,
    forms,
    changes,
    step,
    shape,
    planes,
    most,
    out,
):
    w, value = np.zeros((3, most), out.dtype), np.zeros(most, out.dtype)
    spans, lines = np.empty((2, most), np.int64), np.empty((most, 3), np.int64)
    size = shape[1] * shape[2]
    for s in range(low, high):
        first, last = s * slab, min((s + 1) * slab, planes[1])
        out[first * size : last * size] = 0
        for i in range(ptr[s], ptr[s + 1]):
            a = atoms[i]
            voxels = count = 0
            for plane in range(box[a, 0, 0], box[a, 0, 1] + 1):
                own = (plane - planes[0]) % shape[0]
                if first <= own < last:
                    voxels, count = _add_plane(
                        plane,
                        own,
                        at[a],
                        box[a],
                        square[a],
                        step,
                        shape,
                        spans,
                        w,
                        lines,
                        voxels,
                        count,
                    )
                if voxels < _BATCH and plane < box[a, 0, 1]:
                    continue
                _evaluate(w, voxels, occupancy[a], forms[a], changes, a, value)
                v = 0
                for line in range(count):
                    row, z, n = lines[line, 0], lines[line, 1], lines[line, 2]
                    while n > 0:
                        m = min(n, shape[2] - z)
                        add_run(out, row + z, value, v, m)
                        v, n, z = v + m, n - m, 0
                voxels = count = 0


@jit
def _atoms(
    low,
    high,
    at,
    box,
    square,
    occupancy,
    forms,
    changes,
    step,
    shape,
    planes,
    most,
    amplitudes,
    along,
    dmap,
    dxyz,
    db,
    doccupancy,
    damplitudes,
    dwidths,
):
    w, g = np.zeros((3, most), dmap.dtype), np.zeros(most, dmap.dtype)
    spans, lines = np.empty((2, most), np.int64), np.empty((most, 3), np.int64)
    isotropic = forms.shape[2] == 2
    moments = np.empty((forms.shape[1], 2, 5 if isotropic else 10))
    x, b = np.empty(3), np.empty(1 if isotropic else 6)
    dA, dB = np.empty(forms.shape[1]), np.empty(forms.shape[1])
    work = np.empty((6, 3, 3))
    for a in range(low, high):
        moments[:] = 0
        voxels = count = 0
        for plane in range(box[a, 0, 0], box[a, 0, 1] + 1):
            own = (plane - planes[0]) % shape[0]
            if own < planes[1]:
                voxels, count = _add_plane(
                    plane,
                    own,
                    at[a],
                    box[a],
                    square[a],
                    step,
                    shape,
                    spans,
                    w,
                    lines,
                    voxels,
                    count,
                )
            if voxels < _BATCH and plane < box[a, 0, 1]:
                continue
            v = 0
            for line in range(count):
                row, z, n = lines[line, 0], lines[line, 1], lines[line, 2]
                while n > 0:
                    m = min(n, shape[2] - z)
                    copy_run(g, v, dmap, row + z, m)
                    v, n, z = v + m, n - m, 0
            _add_moments(w, voxels, g, forms[a], changes, a, moments)
            voxels = count = 0
        x[:], b[:], dA[:], dB[:], total = 0, 0, 0, 0, 0.0
        if box[a, 0, 0] <= box[a, 0, 1]:
            total = _gradients(
                a,
                forms[a],
                occupancy[a],
                amplitudes[a],
                along,
                moments,
                work,
                x,
                b,
                dA,
                dB,
            )
        if len(dxyz):
            dxyz[a] = x
        if len(db):
            db[a] = b
        if len(doccupancy):
            doccupancy[a] = total
        if len(damplitudes):
            damplitudes[a] = dA
        if len(dwidths):
            dwidths[a] = dB


@jit
def _gradients(a, forms, occupancy, amplitudes, along, moments, work, x, b, dA, dB):
    """Write an atom's gradients from its moments, and return the gradient by occupancy."""
    total = 0.0
    P, gamma, second, K, bent, spare = work[0], work[1], work[2], work[3], work[4], work[5]
    beta = np.empty(3)
    bent[:] = 0
    for g in range(len(forms)):
        A = amplitudes[g]
        share = occupancy * A
        own = moments[g]
        own *= forms[g, 0]
        one, w, z, tA, tocc = own[0, 0], own[0, 1:4], 0.0, A, occupancy
        ones, ws, factor = one, w, share
        _write_matrix(forms[g, 1:], P)
        _write_second(own[0, 4:], second)
        if along is not None:
            xyz, tb, toccupancy, tamplitudes, twidths = along
            nu = _slope(P, xyz[a], tb[a], twidths[a, g], beta, gamma, spare)
            tA, tocc, z = tamplitudes[a, g], toccupancy[a], -nu * one
            _product(P, second, spare)
            _product(spare, gamma, bent)
            for i in range(3):
                Pw = P[i, 0] * w[0] + P[i, 1] * w[1] + P[i, 2] * w[2]
                gw = gamma[i, 0] * w[0] + gamma[i, 1] * w[1] + gamma[i, 2] * w[2]
                x[i] -= share * (one * beta[i] + 2 * gw)
                z += beta[i] * w[i]
                for j in range(3):
                    z += gamma[i, j] * second[i, j]
                    bent[i, j] += 0.5 * Pw * beta[j] - 0.25 * one * gamma[i, j]
            _write_second(own[1, 4:], second)
            ones, ws, factor = own[1, 0], own[1, 1:4], 1.0
        _product(P, second, spare)
        _product(spare, P, K)
        for i in range(3):
            x[i] += 2 * factor * (P[i, 0] * ws[0] + P[i, 1] * ws[1] + P[i, 2] * ws[2])
            for j in range(3):
                spare[i, j] = factor * (K[i, j] - 0.5 * ones * P[i, j])
                spare[i, j] -= share * (bent[i, j] + bent[j, i])
        dA[g], dB[g] = tocc * one + occupancy * z, _trace(spare) / (4 * math.pi**2)
        total += tA * one + A * z
        if len(b) == 1:
            b[0] += dB[g]
            continue
        for i in range(3):
            b[i] += 2 * spare[i, i]
        b[3] += 4 * spare[0, 1]
        b[4] += 4 * spare[0, 2]
        b[5] += 4 * spare[1, 2]
    return total


@jit
def _write_second(moments, out):
    """Write sums of w wᵀ; of isotropic Gaussians the trace is enough, and is all there is."""
    _write_matrix(moments, out)
    if len(moments) == 1:
        out /= 3


@jit
def _bin(box, size, start, slab, ends, atoms):
    """Count the atoms of every slab in `ends`, or list the atoms from these positions on.

    The slabs begin with plane `start`; of those that make up the cell, the map has the first ones.
    """
    slabs = -(-size // slab)
    for a in range(len(box)):
        count = min(box[a, 0, 1] - box[a, 0, 0] + 1, size)
        if count <= 0:
            continue
        first = (box[a, 0, 0] - start) % size
        last = first + count - 1
        own = first // slab
        # Wrap around the cell at most once.
        stop = min(last, size - 1) // slab + 1 + max(0, min((last - size) // slab + 1, own))
        for s in range(own, stop):
            s = s if s < slabs else s - slabs
            if s >= len(ends):
                continue
            if len(atoms):
                atoms[ends[s]] = a
            ends[s] += 1


def _prepare(
    a: Any, bare: bool, along: tuple[np.ndarray, ...] | None = None
) -> tuple[tuple[Any, ...], tuple[Any, ...], np.ndarray]:
    """Return atoms, the lattice with the size of a thread's buffers, and the cost of each atom."""
    lattice, b = a.lattice, a.b if a.b.ndim == 2 else a.b[:, None]
    arrays = a.xyz, b, a.occupancy, a.amplitudes, a.widths, a.radius
    given = [np.ascontiguousarray(array) for array in arrays]
    count, gaussians = given[4].shape
    at, box, sizes = np.empty((count, 3)), np.empty((count, 3, 2), np.int64), np.empty((count, 2))
    square, share = np.empty((2, count))
    forms = np.empty((count, gaussians, 1 + b.shape[1]))
    planes = lattice.start, lattice.stop - lattice.start
    lattice_of = lattice.to_grid, lattice.measures, lattice.grid, planes
    arguments = *given, *lattice_of, bare, at, box, sizes, square, share, forms
    in_parallel(lambda low, high: _set_up(low, high, *arguments), count, _ATOMS)
    changes = None
    if along is not None:
        changes = np.empty((count, gaussians, 5 if b.shape[1] == 1 else 10))
        amplitudes = np.array(a.amplitudes, np.float64, order="C")
        further = box, share, forms, amplitudes, along, changes
        in_parallel(lambda low, high: _set_changes(low, high, *further), count, _ATOMS)
    most = int(_BATCH + sizes[:, 0].max(initial=0) + _BLOCK)
    # A sphere fills half of its box.
    costs = 0.5 * gaussians * sizes[:, 1]
    return (
        (at, box, square, share, forms, changes),
        (lattice.step, lattice.grid, planes, most),
        costs,
    )


def _splat(a: Any, prepared: Any, out: np.ndarray) -> None:
    """Write the map, or its derivative along tangents."""
    if not out.size:
        return
    atoms, space, costs = prepared
    planes, ring = len(out), (atoms[1], a.lattice.nx, a.lattice.start)
    slab = max(1, min(_SLAB // out[0].nbytes, planes // (_SLABS * get_num_threads())))
    slabs = -(-planes // slab)
    counts = np.zeros(slabs, np.int64)
    _bin(*ring, slab, counts, np.empty(0, np.int64))
    ptr = np.concatenate([[0], np.cumsum(counts)])
    listed = np.empty(ptr[-1], np.int64)
    _bin(*ring, slab, ptr[:-1].copy(), listed)
    # Clearing a voxel costs a 16th of an exponential.
    ends = ptr * (costs.sum() / max(len(listed), 1))
    ends += np.arange(slabs + 1) * (slab * out[0].size / 16)
    arguments = slab, ptr, listed, *atoms, *space, out.reshape(-1)
    in_shares(lambda low, high: _slabs(low, high, *arguments), ends, _GRAIN)


def _pull_back(a: Any, prepared: Any, along: Any, outputs: Any) -> None:
    """Write the gradients by atoms, of the map or of its derivative along tangents."""
    atoms, space, costs = prepared
    dtype, (count, gaussians) = a.dmap.dtype, a.widths.shape
    shapes = (3,), (6 if a.b.ndim == 2 else 1,), (), (gaussians,), (gaussians,)
    given = [
        np.empty((0, *shape), dtype) if out is None else out.reshape(count, *shape)
        for out, shape in zip(outputs, shapes, strict=True)
    ]
    # A copy, since read-only arrays have types of their own, for which all would be compiled again.
    amplitudes = np.array(a.amplitudes, np.float64, order="C")
    g = np.ascontiguousarray(a.dmap).reshape(-1)
    arguments = *atoms, *space, amplitudes, along, g, *given
    ends = np.concatenate([[0], np.cumsum(costs)])
    in_shares(lambda low, high: _atoms(low, high, *arguments), ends, _GRAIN)


@register("gaussian_density", "numba")
def gaussian_density(a: Any, y: Any) -> None:
    if y.map is not None:
        _splat(a, _prepare(clamped(a)[0] if a.clamp else a, bare=False), y.map)


@register("gaussian_density_vjp", "numba")
@clamping
def gaussian_density_vjp(a: Any, y: Any) -> None:
    _pull_back(a, _prepare(a, bare=True), None, y)


@register("gaussian_density_vjp_vjp", "numba")
def gaussian_density_vjp_vjp(a: Any, y: Any) -> None:
    *gradients, ddmap = y
    tangents = tangents_of(a)
    # For kernels b has two dimensions.
    tangents = tangents._replace(b=tangents.b if a.b.ndim == 2 else tangents.b[:, None])
    along = tuple(map(np.ascontiguousarray, tangents))
    prepared = _prepare(a, True, along)
    if ddmap is not None:
        _splat(a, prepared, ddmap)
    if any([gradient is not None for gradient in gradients]):
        _pull_back(a, prepared, along, gradients)
