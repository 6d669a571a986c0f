"""The density of atoms on the GPU: a program per atom, which walks over the planes of its box.

A tile is rows by z, in fours that lie together in memory where the grid allows. Where an isotropic
atom's Gaussians are products of a factor of the row and one along z, exponentials are computed for
these alone. The map is added to atomically, in an order that changes from run to run; where torch is
asked for deterministic algorithms its own serve. The gradient is the program's own.

Bytes are few: atoms and map once. For an atom of V voxels and G Gaussians the map takes V atomic
additions and about V · (G + 10) operations, the gradient about V · (5 G + 20).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._check import promoted
from fusedops._registry import register
from fusedops.density import SLACK, Lattice, Scatterers
from fusedops.density import density as definition
from gpukern.launch import Launcher, kernel_of_any_size, wide

# Rows of a tile, voxels of a row of it, and warps of a program.
_ROWS, _LANES, _WARPS = 16, 32, 1
_ROWS_BACK = 8

_PI = tl.constexpr(3.141592653589793)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SLACK = tl.constexpr(SLACK)


@triton.jit
def _finite(x):
    return x - x == 0


@triton.jit
def _inverse(a, b, c, d, e, f):
    """Return the inverse of a symmetric matrix xx, yy, zz, xy, xz, yz, and its determinant."""
    A, B, C = b * c - f * f, a * c - e * e, a * b - d * d
    D, E, F = e * f - d * c, d * f - e * b, d * e - a * f
    det = a * A + d * D + e * E
    return (A / det, B / det, C / det, D / det, E / det, F / det), det


@triton.jit
def _turned(s, P):
    """Return sᵀ P s, both forms as xx, yy, zz, xy, xz, yz, for the nine elements of s."""
    columns = ()
    for j in tl.static_range(3):
        x, y, z = s[j], s[3 + j], s[6 + j]
        columns = columns + (
            (
                P[0] * x + P[3] * y + P[4] * z,
                P[3] * x + P[1] * y + P[5] * z,
                P[4] * x + P[5] * y + P[2] * z,
            ),
        )
    c0, c1, c2 = columns[0], columns[1], columns[2]
    return (
        s[0] * c0[0] + s[3] * c0[1] + s[6] * c0[2],
        s[1] * c1[0] + s[4] * c1[1] + s[7] * c1[2],
        s[2] * c2[0] + s[5] * c2[1] + s[8] * c2[2],
        s[0] * c1[0] + s[3] * c1[1] + s[6] * c1[2],
        s[0] * c2[0] + s[3] * c2[1] + s[6] * c2[2],
        s[1] * c2[0] + s[4] * c2[1] + s[7] * c2[2],
    )


@triton.jit
def _schur(m):
    """Return c, xx, xy, yy, u, v of a form: c (z + u x + v y)² + xx x² + 2 xy x y + yy y²."""
    u, v = m[4] / m[2], m[5] / m[2]
    return m[2], m[0] - m[4] * u, m[3] - m[4] * v, m[1] - m[5] * v, u, v


@triton.jit
def _nine(pointer):
    found = ()
    for n in tl.static_range(9):
        found = found + (tl.load(pointer + n),)
    return found


@triton.jit
def _atom(
    xyz, b, occupancy, amplitudes, widths, radius, to_grid, farthest, n, nx, ny, nz,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, QUAD: tl.constexpr,
):  # fmt: skip
    """Return whether an atom has a density, its place in voxels, the squared radius, and its box."""
    x = tl.load(xyz + 3 * n).to(tl.float64)
    y = tl.load(xyz + 3 * n + 1).to(tl.float64)
    z = tl.load(xyz + 3 * n + 2).to(tl.float64)
    r = tl.load(radius + n).to(tl.float64)
    total = x + y + z + r + tl.load(occupancy + n).to(tl.float64)
    least = tl.load(widths + n * G).to(tl.float64)
    for g in tl.static_range(G):
        width = tl.load(widths + n * G + g).to(tl.float64)
        total += width + tl.load(amplitudes + n * G + g).to(tl.float64)
        least = tl.minimum(least, width)
    if ANISOTROPIC:
        m = ()
        for i in tl.static_range(6):
            u = tl.load(b + 6 * n + i).to(tl.float64)
            total += u
            m = m + (u * (8 * _PI * _PI) + (least if i < 3 else 0.0),)
        second = m[0] * m[1] - m[3] * m[3]
        third = m[2] * second - m[0] * m[5] * m[5] - m[1] * m[4] * m[4] + 2 * m[3] * m[4] * m[5]
        usable = (m[0] > 0) & (second > 0) & (third > 0)
    else:
        own = tl.load(b + n).to(tl.float64)
        total += own
        usable = least + own > 0
    usable = usable & _finite(total) & (r >= 0)
    r = tl.where(usable, tl.minimum(r, tl.load(farthest)), -1.0)
    t = _nine(to_grid)
    ax, low_x, high_x = _axis(x, y, z, t[0], t[1], t[2], r, nx, usable)
    ay, low_y, high_y = _axis(x, y, z, t[3], t[4], t[5], r, ny, usable)
    az, low_z, high_z = _axis(x, y, z, t[6], t[7], t[8], r, nz, usable)
    crowded = (high_x - low_x + 1 > nx) | (high_y - low_y + 1 > ny) | (high_z - low_z + 1 > nz)
    # The first four that the box meets.
    fours = tl.floor(low_z.to(tl.float64) / QUAD).to(tl.int32)
    square = r * r * (1 + _SLACK)
    return usable, crowded, square, ax, ay, az, low_x, high_x, low_y, high_y, fours, high_z


@triton.jit
def _axis(x, y, z, a, b, c, r, size, usable):
    """Return an atom's place along an axis, in voxels of the grid, and those that it reaches."""
    at = tl.where(usable, a * x + b * y + c * z, 0.0)
    at = at - tl.floor(at / size) * size
    reach = r * tl.sqrt(a * a + b * b + c * c) * (1 + _SLACK)
    low = tl.where(usable, tl.ceil(at - reach), 0.0).to(tl.int32)
    high = tl.where(usable, tl.floor(at + reach), -1.0).to(tl.int32)
    return at, low, high


@triton.jit
def _gaussian(b, amplitudes, widths, step, n, g, G: tl.constexpr, ANISOTROPIC: tl.constexpr):
    """Return a Gaussian's norm, its form in Å⁻², and what `_schur` makes of that in voxels."""
    width = tl.load(widths + n * G + g).to(tl.float64)
    norm = tl.load(amplitudes + n * G + g).to(tl.float64)
    if ANISOTROPIC:
        m = ()
        for i in tl.static_range(6):
            u = tl.load(b + 6 * n + i).to(tl.float64) * (2 * _PI * _PI)
            m = m + (u + (0.25 * width if i < 3 else 0.0),)
        inverse, det = _inverse(m[0], m[1], m[2], m[3], m[4], m[5])
        norm = norm * _PI / tl.sqrt(det / _PI)
        P = ()
        for i in tl.static_range(6):
            P = P + (inverse[i] * (_PI * _PI),)
    else:
        c = 1 / (width + tl.load(b + n).to(tl.float64)) * (4 * _PI * _PI)
        norm = norm * c / _PI * tl.sqrt(c / _PI)
        P = (c, c, c, 0.0 * c, 0.0 * c, 0.0 * c)
    return norm, P, _schur(_turned(step, P))


@triton.jit
def _metric(step):
    one = step[0] * 0.0 + 1.0
    return _schur(_turned(step, (one, one, one, 0.0 * one, 0.0 * one, 0.0 * one)))


@triton.jit
def _wrapped(at, size):
    """Return an index of the grid for one that may be cells away, on either side."""
    return ((at % size) + size) % size


@triton.jit
def _distance(x, y, z, step):
    wx = x * step[0] + y * step[1] + z * step[2]
    wy = x * step[3] + y * step[4] + z * step[5]
    wz = x * step[6] + y * step[7] + z * step[8]
    return wx * wx + wy * wy + wz * wz


@triton.jit
def _nearest(inside, images, x, y, z, ax, ay, az, step):
    """Leave only voxels no image of which is nearer; of two alike, the first counts."""
    own = _distance(x - ax, y - ay, z - az, step)
    for i in range(7):
        a = tl.load(images + 3 * i)
        b = tl.load(images + 3 * i + 1)
        c = tl.load(images + 3 * i + 2)
        inside = inside & (_distance((x + a) - ax, (y + b) - ay, (z + c) - az, step) >= own)
        inside = inside & (_distance((x - a) - ax, (y - b) - ay, (z - c) - az, step) > own)
    return inside


def _splat(
    xyz, b, occupancy, amplitudes, widths, radius, steps, to_grid, images, farthest, out,
    nx, ny, nz,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, SEPARABLE: tl.constexpr, QUAD: tl.constexpr,
    ROWS: tl.constexpr, FOURS: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Add an atom to the map."""
    n = tl.program_id(0).to(tl.int64)
    usable, crowded, square, ax, ay, az, low_x, high_x, low_y, high_y, fours, high_z = _atom(
        xyz, b, occupancy, amplitudes, widths, radius, to_grid, farthest, n, nx, ny, nz, G,
        ANISOTROPIC, QUAD,
    )  # fmt: skip
    occ = tl.load(occupancy + n).to(FLOAT)
    step = _nine(steps)
    c, xx, xy, yy, u, v = _metric(step)
    c, u, v = c.to(FLOAT), u.to(FLOAT), v.to(FLOAT)
    norms, forms = (), ()
    for g in tl.static_range(G):
        norm, _, form = _gaussian(b, amplitudes, widths, step, n, g, G, ANISOTROPIC)
        norms = norms + (norm.to(FLOAT) * occ,)
        forms = forms + (form,)
    lane = tl.arange(0, QUAD)[None, None, :]
    row = tl.arange(0, ROWS)[:, None, None]
    while fours * QUAD <= high_z:
        four = fours + tl.arange(0, FOURS)[None, :, None]
        z = four * QUAD + lane
        dz = (fours * QUAD - az).to(FLOAT) + (z - fours * QUAD).to(FLOAT)
        in_row = _wrapped(four, nz // QUAD)
        y0 = low_y
        while y0 <= high_y:
            y = y0 + row
            dy = (y0 - ay).to(FLOAT) + row.to(FLOAT)
            x = low_x
            while x <= high_x:
                dx = x - ax
                along = (xx * dx * dx).to(FLOAT) + dy * (
                    (2 * xy * dx).to(FLOAT) + yy.to(FLOAT) * dy
                )
                if SEPARABLE:
                    t = dz + u * dx.to(FLOAT)
                else:
                    t = dz + u * dx.to(FLOAT) + v * dy
                inside = (along + c * t * t <= square.to(FLOAT)) & (y <= high_y)
                if crowded:
                    inside = _nearest(inside, images, x, y, z, ax, ay, az, step)
                value = tl.zeros((ROWS, FOURS, QUAD), FLOAT)
                for g in tl.static_range(G):
                    value += _density(norms[g], forms[g], dx, dy, dz, SEPARABLE, FLOAT)
                there = tl.max(inside.to(tl.int32), axis=2, keep_dims=True) > 0
                place = (_wrapped(x, nx).to(tl.int64) * ny + _wrapped(y, ny)) * (nz // QUAD)
                place = (place + in_row) * QUAD + lane
                there = there & (lane < QUAD)
                tl.atomic_add(out + place, tl.where(inside, value, 0.0), mask=there, sem="relaxed")
                x += 1
            y0 += ROWS
        fours += FOURS


@triton.jit
def _density(norm, form, dx, dy, dz, SEPARABLE: tl.constexpr, FLOAT: tl.constexpr):
    """Return a Gaussian on rows of a plane: norm · exp(-(c t² + q))."""
    c = (form[0] * _LOG2_E).to(FLOAT)
    x = dx.to(FLOAT)
    q = (form[1] * dx * dx * _LOG2_E).to(FLOAT) + dy * (
        (2 * form[2] * dx * _LOG2_E).to(FLOAT) + (form[3] * _LOG2_E).to(FLOAT) * dy
    )
    t = dz + form[4].to(FLOAT) * x
    if SEPARABLE:
        return (norm * tl.exp2(-q)) * tl.exp2(-c * t * t)
    else:
        t += form[5].to(FLOAT) * dy
        return norm * tl.exp2(-(q + c * t * t))


def _splat_vjp(
    xyz, b, occupancy, amplitudes, widths, radius, steps, to_grid, images, farthest, cotangent,
    on_xyz, on_b, on_occupancy,
    nx, ny, nz,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, SEPARABLE: tl.constexpr, QUAD: tl.constexpr,
    ROWS: tl.constexpr, FOURS: tl.constexpr, FLOAT: tl.constexpr,
    WANT_XYZ: tl.constexpr, WANT_B: tl.constexpr, WANT_OCCUPANCY: tl.constexpr,
):  # fmt: skip
    """Write an atom's gradients, from moments of its Gaussians times the cotangent."""
    n = tl.program_id(0).to(tl.int64)
    usable, crowded, square, ax, ay, az, low_x, high_x, low_y, high_y, begin, high_z = _atom(
        xyz, b, occupancy, amplitudes, widths, radius, to_grid, farthest, n, nx, ny, nz, G,
        ANISOTROPIC, QUAD,
    )  # fmt: skip
    occ = tl.load(occupancy + n).to(tl.float64)
    step = _nine(steps)
    c, xx, xy, yy, u, v = _metric(step)
    c, u, v = c.to(FLOAT), u.to(FLOAT), v.to(FLOAT)
    lane = tl.arange(0, QUAD)[None, None, :]
    row = tl.arange(0, ROWS)[:, None, None]
    zero = square * 0.0
    total, by_x, by_y, by_z = zero, zero, zero, zero
    by_b = (zero, zero, zero, zero, zero, zero)
    # All Gaussians together where sums of them are all that is wanted; otherwise one by one.
    for group in tl.static_range(G if ANISOTROPIC else 1):
        m = tl.zeros((ROWS, FOURS, QUAD), FLOAT)
        mx, my, mz, mb, mxx, myy, mzz, mxy, mxz, myz = m, m, m, m, m, m, m, m, m, m
        norms, forms, weights = (), (), ()
        for g in tl.static_range(1 if ANISOTROPIC else G):
            norm, P, form = _gaussian(b, amplitudes, widths, step, n, group + g, G, ANISOTROPIC)
            norms = norms + (norm.to(FLOAT),)
            forms = forms + (form,)
            weights = weights + (P[0],)
        fours = begin
        while fours * QUAD <= high_z:
            four = fours + tl.arange(0, FOURS)[None, :, None]
            z = four * QUAD + lane
            dz = (fours * QUAD - az).to(FLOAT) + (z - fours * QUAD).to(FLOAT)
            in_row = _wrapped(four, nz // QUAD)
            y0 = low_y
            while y0 <= high_y:
                y = y0 + row
                dy = (y0 - ay).to(FLOAT) + row.to(FLOAT)
                x = low_x
                while x <= high_x:
                    dx = x - ax
                    along = (xx * dx * dx).to(FLOAT) + dy * (
                        (2 * xy * dx).to(FLOAT) + yy.to(FLOAT) * dy
                    )
                    if SEPARABLE:
                        t = dz + u * dx.to(FLOAT)
                    else:
                        t = dz + u * dx.to(FLOAT) + v * dy
                    s = along + c * t * t
                    inside = (s <= square.to(FLOAT)) & (y <= high_y)
                    if crowded:
                        inside = _nearest(inside, images, x, y, z, ax, ay, az, step)
                    there = tl.max(inside.to(tl.int32), axis=2, keep_dims=True) > 0
                    place = (_wrapped(x, nx).to(tl.int64) * ny + _wrapped(y, ny)) * (nz // QUAD)
                    place = (place + in_row) * QUAD + lane
                    value = tl.load(cotangent + place, mask=there & (lane < QUAD), other=0.0)
                    value = tl.where(inside, value.to(FLOAT), 0.0)
                    if ANISOTROPIC:
                        e = value * _density(norms[0], forms[0], dx, dy, dz, SEPARABLE, FLOAT)
                        m += e
                        x32 = dx.to(FLOAT)
                        mx += e * x32
                        my += e * dy
                        mz += e * dz
                        if WANT_B:
                            mxx += e * (x32 * x32)
                            myy += e * (dy * dy)
                            mzz += e * (dz * dz)
                            mxy += e * (x32 * dy)
                            mxz += e * x32 * dz
                            myz += e * dy * dz
                    else:
                        sharp = tl.zeros((ROWS, FOURS, QUAD), FLOAT)
                        whole, bend = sharp, sharp
                        for g in tl.static_range(G):
                            e = _density(norms[g], forms[g], dx, dy, dz, SEPARABLE, FLOAT)
                            weight = weights[g].to(FLOAT)
                            whole += e
                            sharp += weight * e
                            # 1 / (B + b) is c / 4π².
                            if WANT_B:
                                bend += weight * weight * e
                        m += value * whole
                        if WANT_XYZ:
                            mx += value * sharp * dx.to(FLOAT)
                            my += value * sharp * dy
                            mz += value * sharp * dz
                        if WANT_B:
                            mb += value * (bend * s - 1.5 * sharp)
                    x += 1
                y0 += ROWS
            fours += FOURS
        if ANISOTROPIC:
            _, P, _ = _gaussian(b, amplitudes, widths, step, n, group, G, ANISOTROPIC)
            own = _sum(m)
            total += own
            a, d, e = _sum(mx), _sum(my), _sum(mz)
            wx = step[0] * a + step[1] * d + step[2] * e
            wy = step[3] * a + step[4] * d + step[5] * e
            wz = step[6] * a + step[7] * d + step[8] * e
            by_x += 2 * (P[0] * wx + P[3] * wy + P[4] * wz)
            by_y += 2 * (P[3] * wx + P[1] * wy + P[5] * wz)
            by_z += 2 * (P[4] * wx + P[5] * wy + P[2] * wz)
            if WANT_B:
                second = (_sum(mxx), _sum(myy), _sum(mzz), _sum(mxy), _sum(mxz), _sum(myz))
                turned = (
                    step[0], step[3], step[6], step[1], step[4], step[7], step[2], step[5], step[8]
                )  # fmt: skip
                full = (P[0], P[3], P[4], P[3], P[1], P[5], P[4], P[5], P[2])
                second = _turned(full, _turned(turned, second))
                sums = ()
                for i in tl.static_range(6):
                    part = (2 if i < 3 else 4) * (second[i] - 0.5 * own * P[i])
                    sums = sums + (by_b[i] + part,)
                by_b = sums
        else:
            total = _sum(m)
            a, d, e = _sum(mx), _sum(my), _sum(mz)
            by_x = 2 * (step[0] * a + step[1] * d + step[2] * e)
            by_y = 2 * (step[3] * a + step[4] * d + step[5] * e)
            by_z = 2 * (step[6] * a + step[7] * d + step[8] * e)
            by_b = (_sum(mb) / (4 * _PI * _PI), zero, zero, zero, zero, zero)
    if WANT_XYZ:
        tl.store(on_xyz + 3 * n, tl.where(usable, occ * by_x, 0.0))
        tl.store(on_xyz + 3 * n + 1, tl.where(usable, occ * by_y, 0.0))
        tl.store(on_xyz + 3 * n + 2, tl.where(usable, occ * by_z, 0.0))
    if WANT_B:
        for i in tl.static_range(6 if ANISOTROPIC else 1):
            to = on_b + (6 * n + i if ANISOTROPIC else n)
            tl.store(to, tl.where(usable, occ * by_b[i], 0.0))
    if WANT_OCCUPANCY:
        tl.store(on_occupancy + n, tl.where(usable, total, 0.0))


@triton.jit
def _sum(tile):
    return tl.sum(tl.sum(tl.sum(tile, axis=2), axis=1), axis=0).to(tl.float64)


_ALIGNED = {4: ("out", "cotangent"), 1: ()}
_forward = {q: Launcher(kernel_of_any_size(_splat, names), _WARPS) for q, names in _ALIGNED.items()}
_backward = {
    q: Launcher(kernel_of_any_size(_splat_vjp, names), _WARPS) for q, names in _ALIGNED.items()
}


def _layout(arrays: Any, lattice: Lattice, scatterers: Scatterers, grid: Any, rows: int) -> Any:
    """Return contiguous arrays, sizes and constants that both kernels take, and how z is cut."""
    xyz, b, occupancy = (array.contiguous() for array in arrays)
    constants = [array.contiguous() for array in scatterers.tensors_here()]
    quad = 4 if lattice.nz % 4 == 0 and grid.data_ptr() % 16 == 0 else 1
    anisotropic = b.ndim == 2
    kind = tl.float64 if promoted(arrays) == torch.float64 else tl.float32
    given = xyz, b, occupancy, *constants, *lattice.tensors_here()
    shape = constants[0].shape[1], anisotropic, not (anisotropic or lattice.oblique), quad
    return given, lattice.shape, (*shape, rows, _LANES // quad, kind), quad


@register("gaussian_density", "triton")
def gaussian_density(
    xyz: Any, b: Any, occupancy: Any, lattice: Lattice, scatterers: Scatterers, out: Any
) -> None:
    if torch.are_deterministic_algorithms_enabled():
        out.copy_(definition.formula(xyz, b, occupancy, lattice, scatterers)[0])
        return
    # Atomic sums of 16 bits would lose what float32 keeps.
    total = out.zero_() if out.itemsize > 2 else torch.zeros_like(out, dtype=torch.float32)
    if len(xyz):
        given, sizes, constants, quad = _layout(
            (xyz, b, occupancy), lattice, scatterers, total, _ROWS
        )
        arrays = *given, total
        key = xyz.device, *[a.dtype for a in arrays], wide(*sizes), *constants
        _forward[quad](len(xyz), key, *arrays, *sizes, *constants)
    if total is not out:
        out.copy_(total)


@register("gaussian_density_vjp", "triton")
def gaussian_density_vjp(
    xyz: Any,
    b: Any,
    occupancy: Any,
    cotangent: Any,
    lattice: Lattice,
    scatterers: Scatterers,
    on_xyz: Any,
    on_b: Any,
    on_occupancy: Any,
) -> None:
    if not len(xyz):
        return
    cotangent = cotangent.contiguous()
    given, sizes, constants, quad = _layout(
        (xyz, b, occupancy), lattice, scatterers, cotangent, _ROWS_BACK
    )
    outputs = on_xyz, on_b, on_occupancy
    wanted = tuple([out is not None for out in outputs])
    arrays = (*given, cotangent, *(xyz if out is None else out for out in outputs))
    key = xyz.device, *[a.dtype for a in arrays], wide(*sizes), *constants, wanted
    _backward[quad](len(xyz), key, *arrays, *sizes, *constants, *wanted)
