"""The density of atoms on the GPU: a program per atom, which walks over the planes of its box.

A program takes some pairs of a row and of four voxels along z, which lie together in memory where
the grid allows, and walks along x with them, from the first plane where one of them is in the
sphere to the last: all that depends on y and z is computed before. A form
is written as c (x + u y + v z)² and a rest. Where the cell has right angles, an isotropic atom's
Gaussians are products of factors, and no exponential of the voxels is left in the loop. Additions
to the map are atomic, in an order that changes from run to run; torch's own operations serve where
it is asked for deterministic algorithms. A gradient is written by its atom's program alone.

Tangents of atoms change a Gaussian by a factor, a polynomial of second degree. One kernel adds such
products to the derivative of the map, and one sums moments with and without the factor, Gaussian by
Gaussian, for second derivatives and for gradients by form factors. For isotropic atoms one kernel
does both in one pass, unless gradients by form factors are wanted.

Bytes are few: atoms and map once. For an atom of V voxels and G Gaussians the map takes V atomic
additions and about V · (G + 5) operations, the gradient about V · (3 G + 12); other cells and
anisotropic atoms take V · G exponentials too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._frame.check import promoted
from fusedops._frame.registry import register
from fusedops.density import Lattice
from fusedops.density.op import ORDERED, SLACK, clamped, clamping, repeated
from fusedops.density.op import density as definition
from fusedops.density.op import density_vjp_vjp as derivative
from gpukern.launch import Launcher, kernel_of_any_size, wide

# Voxels that a program takes at a time, and its warps; and atoms whose radius it finds.
_VOXELS, _WARPS = 128, 1
_ATOMS = 128

_PI = tl.constexpr(3.141592653589793)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SLACK = tl.constexpr(SLACK)


@triton.jit
def _finite(x):
    return x - x == 0


@triton.jit
def _inverse(m):
    """Return the inverse of a symmetric matrix xx, yy, zz, xy, xz, yz, and its determinant."""
    a, b, c, d, e, f = m
    A, B, C = b * c - f * f, a * c - e * e, a * b - d * d
    D, E, F = e * f - d * c, d * f - e * b, d * e - a * f
    det = a * A + d * D + e * E
    return _scaled(1 / det, (A, B, C, D, E, F)), det


@triton.jit
def _scaled(factor, six):
    found = ()
    for i in tl.static_range(6):
        found = found + (six[i] * factor,)
    return found


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
def _nine(pointer):
    found = ()
    for n in tl.static_range(9):
        found = found + (tl.load(pointer + n),)
    return found


@triton.jit
def _atom(
    order, xyz, b, occupancy, amplitudes, widths, radius, to_grid, measures, nx, ny, nz, start,
    planes, G: tl.constexpr, ANISOTROPIC: tl.constexpr, QUAD: tl.constexpr, PAIRS: tl.constexpr,
    FLOAT: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Return the program's atom, whether it has a density, its space, its pairs, and the first.

    The space is its squared radius, the metric, and its box; and the map's sizes, its first plane
    and its end, and the size of a plane, both in fours. The box is the vector from the atom to its
    first plane, that plane, the number of planes behind it, and the atom's place along y and z with
    the first and last voxels there.
    """
    n = tl.program_id(0).to(tl.int64)
    if order is not None:
        n = tl.load(order + tl.program_id(0)).to(tl.int64)
        n = tl.minimum(tl.maximum(n, 0), tl.num_programs(0) - 1)
    x = tl.load(xyz + 3 * n).to(tl.float64)
    y = tl.load(xyz + 3 * n + 1).to(tl.float64)
    z = tl.load(xyz + 3 * n + 2).to(tl.float64)
    r = tl.load(radius + n).to(tl.float64)
    # Finite numbers times zero, and a number that isn't finite otherwise.
    total = 0 * tl.load(occupancy + n).to(FLOAT)
    least = tl.load(widths + n * G).to(FLOAT)
    for g in tl.static_range(G):
        width = tl.load(widths + n * G + g).to(FLOAT)
        total += 0 * width + 0 * tl.load(amplitudes + n * G + g).to(FLOAT)
        least = tl.minimum(least, width)
    if ANISOTROPIC:
        m = ()
        for i in tl.static_range(6):
            u = tl.load(b + 6 * n + i).to(tl.float64)
            total += 0 * u.to(FLOAT)
            m = m + (u * (8 * _PI * _PI) + (least.to(tl.float64) if i < 3 else 0.0),)
        second = m[0] * m[1] - m[3] * m[3]
        third = m[2] * second - m[0] * m[5] * m[5] - m[1] * m[4] * m[4] + 2 * m[3] * m[4] * m[5]
        usable = (m[0] > 0) & (second > 0) & (third > 0)
    else:
        own = tl.load(b + n).to(FLOAT)
        total += 0 * own
        usable = least + own > 0
    t = _nine(to_grid)
    ax = t[0] * x + t[1] * y + t[2] * z
    ay = t[3] * x + t[4] * y + t[5] * z
    az = t[6] * x + t[7] * y + t[8] * z
    usable = usable & _finite(ax) & _finite(ay) & _finite(az)
    usable = usable & (total == 0) & (r >= 0) & (r <= tl.load(measures + 9))
    r = tl.where(usable, r, -1.0)
    ax, low_x, high_x = _axis(ax, r, measures + 6, nx, usable)
    ay, low_y, high_y = _axis(ay, r, measures + 7, ny, usable)
    az, low_z, high_z = _axis(az, r, measures + 8, nz, usable)
    # An atom that doesn't reach the map has no rows.
    first = _around(low_x - start, low_x - start, low_x - start, nx)
    high_y = tl.where((first < planes) | (first + high_x - low_x >= nx), high_y, low_y - 1)
    limit, begin_x = (r * r * (1 + _SLACK)).to(FLOAT), (low_x - ax).to(FLOAT)
    box = (begin_x, low_x, high_x - low_x, ay, az, low_y, high_y, low_z, high_z)
    count = _fours(box, QUAD)[1]
    pair = tl.arange(0, PAIRS)[None, :]
    row = pair // count
    size = tl.cast(ny, INDEX) * (nz // QUAD)
    space = (limit, _six(measures, FLOAT), box, nx, ny, nz, start, planes * size, size)
    return n, usable, space, (high_y - low_y + 1) * count, (row, pair - row * count)


@triton.jit
def _axis(at, r, scale, size, usable):
    """Return an atom's place along an axis of the grid, and the first and last voxel it reaches."""
    at = tl.where(usable, at, 0.0)
    at = at - tl.floor(at / size) * size
    reach = r * tl.load(scale) * (1 + _SLACK)
    low = tl.where(usable, tl.ceil(at - reach), 0.0).to(tl.int32)
    high = tl.where(usable, tl.floor(at + reach), -1.0).to(tl.int32)
    return at, low, high


@triton.jit
def _gaussian(
    b, amplitudes, widths, to_grid, n, g,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, FLOAT: tl.constexpr, BARE: tl.constexpr = False,
):  # fmt: skip
    """Return a Gaussian's norm, its form in Å⁻², and, if anisotropic, its form in voxels.

    A bare Gaussian is of one electron.
    """
    # Inverting a matrix loses digits.
    width = tl.load(widths + n * G + g).to(tl.float64 if ANISOTROPIC else FLOAT)
    if BARE:
        norm = tl.full((), 1.0, tl.float64 if ANISOTROPIC else FLOAT)
    else:
        norm = tl.load(amplitudes + n * G + g).to(tl.float64 if ANISOTROPIC else FLOAT)
    if ANISOTROPIC:
        m, u = (), ()
        for i in tl.static_range(6):
            u = u + (tl.load(b + 6 * n + i).to(tl.float64) * (2 * _PI * _PI),)
            m = m + (u[i] + (0.25 * width if i < 3 else 0.0),)
        inverse, det = _inverse(m)
        norm = norm * _PI * tl.sqrt(_PI / det)
        P = _scaled(_PI * _PI, inverse)
        return norm, P, _form(u, 0.25 * width, _nine(to_grid), det)
    else:
        c = 1 / (width + tl.load(b + n).to(FLOAT)) * (4 * _PI * _PI)
        norm = norm * c / _PI * tl.sqrt(c / _PI)
        P = (c, c, c, 0.0 * c, 0.0 * c, 0.0 * c)
        return norm, P, P


@triton.jit
def _form(u, width, t, det):
    """Return c, yy, yz, zz, u, v of a Gaussian's form π² M⁻¹ in voxels.

    The form is c (x + u y + v z)² + yy y² + 2 yz y z + zz z². M is u and a width on the diagonal,
    and has the determinant given; t turns Å to voxels. The rest without x is the inverse of M's
    part for y and z.
    """
    t, zero = _transposed(t), 0.0 * width
    voxels = _turned(t, u)
    metric = _turned(t, (zero + 1, zero + 1, zero + 1, zero, zero, zero))
    m = ()
    for i in tl.static_range(6):
        m = m + (voxels[i] + width * metric[i],)
    part = m[1] * m[2] - m[5] * m[5]
    share, volume = 1 / part, _determinant(t)
    rest = share * (_PI * _PI)
    return (
        part * (_PI * _PI) / (det * volume * volume),
        rest * m[2],
        -rest * m[5],
        rest * m[1],
        (m[4] * m[5] - m[3] * m[2]) * share,
        (m[3] * m[5] - m[4] * m[1]) * share,
    )


@triton.jit
def _determinant(s):
    x, y, z = s[4] * s[8] - s[5] * s[7], s[5] * s[6] - s[3] * s[8], s[3] * s[7] - s[4] * s[6]
    return s[0] * x + s[1] * y + s[2] * z


@triton.jit
def _wrapped(at, size):
    """Return an index within the grid for an index that may be cells away, on either side."""
    return ((at % size) + size) % size


@triton.jit
def _six(pointer, FLOAT: tl.constexpr):
    found = ()
    for n in tl.static_range(6):
        found = found + (tl.load(pointer + n).to(FLOAT),)
    return found


@triton.jit
def _floats(numbers, FLOAT: tl.constexpr):
    found = ()
    for n in tl.static_range(6):
        found = found + (numbers[n].to(FLOAT),)
    return found


@triton.jit
def _rest(form, y, z):
    """Return the part of a form that doesn't depend on x."""
    return y * (form[1] * y + 2 * form[2] * z) + form[3] * z * z


@triton.jit
def _fours(box, QUAD: tl.constexpr):
    """Return the first four voxels of a box along z, and the number of them, at least one."""
    first = _fours_up_to(box[7], QUAD)
    return first, tl.maximum(_fours_up_to(box[8], QUAD) - first + 1, 1)


@triton.jit
def _pairs(
    pair, space, UPRIGHT: tl.constexpr, QUAD: tl.constexpr, PAIRS: tl.constexpr,
    FLOAT: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Return the next pairs, and voxels of these, and the planes where any is in the sphere.

    They are the parts of vectors along y and z, and what follows from these: the shift along x, the
    squared distance, the same less the limit, and the place in a plane of the map. The planes are
    the first and the last, counted in the box, and the first one's place in the map.
    """
    limit, metric, box, nx, ny, nz, start, _end, size = space
    begin_x, low_x, behind, ay, az, low_y, high_y, low_z, high_z = box
    row, column = pair
    fours, count = _fours(box, QUAD)
    y, four = low_y + row, fours + column
    z = four * QUAD + tl.arange(0, QUAD)[:, None]
    begin_z = (fours * QUAD - az).to(FLOAT) + (column * QUAD).to(FLOAT)
    dy = (low_y - ay).to(FLOAT) + row.to(FLOAT)
    dz = begin_z + tl.arange(0, QUAD)[:, None].to(FLOAT)
    at = _around(y, low_y, high_y, ny).to(INDEX) * (nz // QUAD)
    at += _around(four, fours, fours + count - 1, nz // QUAD)
    flat = _rest(metric, dy, dz)
    # The box may end before the sphere does.
    live = (y <= high_y) & (z >= low_z) & (z <= high_z)
    beyond = tl.where(live, flat - limit, float("inf"))
    # The point of a pair that is nearest to the x axis bounds all of it. Rounding must not lose a
    # voxel; each is tested later.
    middle = 0.5 * QUAD - 0.5
    foot = 0.0 * dy if UPRIGHT else -metric[2] / metric[3] * dy
    nearest = tl.maximum(tl.minimum(foot, begin_z + 2 * middle), begin_z)
    left = limit - _rest(metric, dy, nearest)
    half = tl.sqrt(tl.maximum(left, 0.0) * (1 / metric[0])) * (1 + _SLACK) + 0.01
    some = (left >= 0) & (y <= high_y)
    if UPRIGHT:
        shift = 0.0
        most = tl.max(tl.where(some, half, float("-inf")))
        low, high = tl.maximum(tl.ceil(-begin_x - most), 0.0), tl.floor(most - begin_x)
    else:
        shift = metric[4] * dy + metric[5] * dz
        half += tl.abs(metric[5]) * middle
        centre = -begin_x - metric[4] * dy - metric[5] * (begin_z + middle)
        low = tl.max(tl.where(some, half - centre, float("-inf")))
        low = tl.maximum(tl.ceil(-low), 0.0)
        high = tl.floor(tl.max(tl.where(some, centre + half, -1.0)))
    low = tl.minimum(low, (behind + 1).to(FLOAT)).to(tl.int32)
    high = tl.maximum(tl.minimum(high, behind.to(FLOAT)), -1.0).to(tl.int32)
    place = low_x + low - start
    place = _around(place, place, place, nx).to(INDEX) * size
    column += PAIRS % count
    turns = column >= count
    row += PAIRS // count + turns.to(tl.int32)
    pair = row, tl.where(turns, column - count, column)
    return pair, dy, dz, shift, flat, beyond, at, low, tl.minimum(high, behind), place


@triton.jit
def _around(at, low, high, size):
    """Return indices within the grid for indices from low to high."""
    found = tl.where(at < 0, at + size, tl.where(at >= size, at - size, at))
    # Divisions take longer, and few boxes exceed the cell.
    if (low < -size) | (high >= 2 * size):
        found = _wrapped(at, size)
    return found


@triton.jit
def _x(k, space, FLOAT: tl.constexpr):
    """Return a plane's place, counted from the atom, and squared distance at right angles."""
    dx = space[2][0] + k.to(FLOAT)
    return dx, space[1][0] * dx * dx


@triton.jit
def _plane(
    dx, along, shift, flat, beyond, at, place, space, QUAD: tl.constexpr, UPRIGHT: tl.constexpr
):
    """Return whether voxels are in the sphere, whether any of a pair is, places, and distances."""
    if UPRIGHT:
        inside = beyond <= -along
        some = tl.min(beyond, axis=0, keep_dims=True) <= -along
    else:
        along = space[1][0] * (dx + shift) * (dx + shift)
        inside = beyond + along <= 0
        some = tl.min(beyond + along, axis=0, keep_dims=True) <= 0
    lane = tl.arange(0, QUAD)[:, None]
    four = at + place
    there = some & (four < space[7]) & (lane < QUAD)
    return inside, there, four.to(tl.int64) * QUAD + lane, flat + along


@triton.jit
def _next(place, space):
    """Return the place of the plane behind one."""
    nx, size = space[3], space[8]
    return tl.where(place + size < nx * size, place + size, 0)


@triton.jit
def _fours_up_to(z, QUAD: tl.constexpr):
    """Return the number of the last four voxels that begin at z or before."""
    return z >> 2 if QUAD == 4 else z


@triton.jit
def _parts(
    norms, rates, forms, dy, dz, flat,
    COUNT: tl.constexpr, ANISOTROPIC: tl.constexpr, UPRIGHT: tl.constexpr,
):  # fmt: skip
    """Return the parts of Gaussians that don't depend on x: factors, or exponents and shifts."""
    parts, shifts = (), ()
    for g in tl.static_range(COUNT):
        if UPRIGHT and not ANISOTROPIC:
            parts = parts + (norms[g] * tl.exp2(-rates[g] * flat),)
        elif ANISOTROPIC:
            parts = parts + (_rest(forms[g], dy, dz) * _LOG2_E,)
            shifts = shifts + (forms[g][4] * dy + forms[g][5] * dz,)
    return parts, shifts


@triton.jit
def _density(
    norms, rates, forms, parts, shifts, dx, s, along,
    g: tl.constexpr, ANISOTROPIC: tl.constexpr, UPRIGHT: tl.constexpr, BARE: tl.constexpr = False,
):  # fmt: skip
    """Return a Gaussian's density where x is dx from the atom and the squared distance is s.

    A bare anisotropic Gaussian is without its norm.
    """
    if UPRIGHT and not ANISOTROPIC:
        return tl.exp2(-rates[g] * along) * parts[g]
    elif ANISOTROPIC:
        t = dx + shifts[g]
        e = tl.exp2(-(parts[g] + (forms[g][0] * _LOG2_E) * t * t))
        return e if BARE else norms[g] * e
    else:
        return norms[g] * tl.exp2(-rates[g] * s)


@triton.jit
def _nothing(PAIRS: tl.constexpr, FLOAT: tl.constexpr):
    """Return ten sums of zero: over voxels times 1, w, and w wᵀ as xx, yy, zz, xy, xz, yz."""
    m = tl.zeros((PAIRS,), FLOAT)
    return m, m, m, m, m, m, m, m, m, m


@triton.jit
def _with_lines(m, line, dy, dz):
    """Add to ten sums those over x, times 1, x and x², of lines at dy and dz."""
    one, x, xx = line
    y, z = one * dy, one * dz
    return (
        m[0] + tl.sum(one, axis=0),
        m[1] + tl.sum(x, axis=0),
        m[2] + tl.sum(y, axis=0),
        m[3] + tl.sum(z, axis=0),
        m[4] + tl.sum(xx, axis=0),
        m[5] + tl.sum(y * dy, axis=0),
        m[6] + tl.sum(z * dz, axis=0),
        m[7] + tl.sum(x * dy, axis=0),
        m[8] + tl.sum(x * dz, axis=0),
        m[9] + tl.sum(y * dz, axis=0),
    )


@triton.jit
def _plus(sums, others):
    found = ()
    for i in tl.static_range(len(sums)):
        found = found + (sums[i] + others[i],)
    return found


@triton.jit
def _cartesian(m, step):
    """Return ten sums over the pairs, for w in Å: the first, a vector, and six elements."""
    sums = ()
    for i in tl.static_range(10):
        # Triton 3.5 finds no layout for a sum of one axis here.
        sums = sums + (_sum(tl.sum(m[i][None, :], axis=1)),)
    ww = (sums[4], sums[5], sums[6], sums[7], sums[8], sums[9])
    w = _turned_vector(step, (sums[1], sums[2], sums[3]))
    return sums[0], w, _turned(_transposed(step), ww)


def _splat(
    order, xyz, b, occupancy, amplitudes, widths, radius, steps, to_grid, measures, out,
    nx, ny, nz, start, planes,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, UPRIGHT: tl.constexpr, QUAD: tl.constexpr,
    PAIRS: tl.constexpr, FLOAT: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Add an atom to the map."""
    n, _usable, space, pairs, pair = _atom(
        order, xyz, b, occupancy, amplitudes, widths, radius, to_grid, measures, nx, ny, nz, start,
        planes, G, ANISOTROPIC, QUAD, PAIRS, FLOAT, INDEX,
    )  # fmt: skip
    occ = tl.load(occupancy + n).to(FLOAT)
    norms, rates, forms = (), (), ()
    for g in tl.static_range(G):
        norm, P, form = _gaussian(b, amplitudes, widths, to_grid, n, g, G, ANISOTROPIC, FLOAT)
        norms = norms + (norm.to(FLOAT) * occ,)
        rates = rates + ((P[0] * _LOG2_E).to(FLOAT),)
        forms = forms + (_floats(form, FLOAT),)
    first = 0
    while first < pairs:
        pair, dy, dz, shift, flat, beyond, at, k, last, place = _pairs(
            pair, space, UPRIGHT, QUAD, PAIRS, FLOAT, INDEX
        )
        parts, shifts = _parts(norms, rates, forms, dy, dz, flat, G, ANISOTROPIC, UPRIGHT)
        while k <= last:
            dx, along = _x(k, space, FLOAT)
            inside, there, to, s = _plane(
                dx, along, shift, flat, beyond, at, place, space, QUAD, UPRIGHT
            )
            value = tl.zeros((QUAD, PAIRS), FLOAT)
            for g in tl.static_range(G):
                value += _density(
                    norms, rates, forms, parts, shifts, dx, s, along, g,
                    ANISOTROPIC, UPRIGHT,
                )  # fmt: skip
            tl.atomic_add(out + to, tl.where(inside, value, 0.0), mask=there, sem="relaxed")
            k += 1
            place = _next(place, space)
        first += PAIRS


def _splat_vjp(
    order, xyz, b, occupancy, amplitudes, widths, radius, steps, to_grid, measures,
    dmap, dxyz, db, doccupancy,
    nx, ny, nz, start, planes,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, UPRIGHT: tl.constexpr, QUAD: tl.constexpr,
    PAIRS: tl.constexpr, FLOAT: tl.constexpr, INDEX: tl.constexpr,
    WANT_XYZ: tl.constexpr, WANT_B: tl.constexpr, WANT_OCCUPANCY: tl.constexpr,
):  # fmt: skip
    """Write an isotropic atom's gradients, from moments of its Gaussians times the cotangent."""
    n, usable, space, pairs, pair = _atom(
        order, xyz, b, occupancy, amplitudes, widths, radius, to_grid, measures, nx, ny, nz, start,
        planes, G, ANISOTROPIC, QUAD, PAIRS, FLOAT, INDEX,
    )  # fmt: skip
    occ = tl.load(occupancy + n).to(tl.float64)
    step = _nine(steps)
    norms, rates, forms = (), (), ()
    for g in tl.static_range(G):
        norm, P, form = _gaussian(b, amplitudes, widths, to_grid, n, g, G, ANISOTROPIC, FLOAT)
        norms = norms + (norm.to(FLOAT),)
        rates = rates + ((P[0] * _LOG2_E).to(FLOAT),)
        forms = forms + (_floats(form, FLOAT),)
    m = tl.zeros((PAIRS,), FLOAT)
    mx, my, mz, mb = m, m, m, m
    first = 0
    while first < pairs:
        pair, dy, dz, shift, flat, beyond, at, k, last, place = _pairs(
            pair, space, UPRIGHT, QUAD, PAIRS, FLOAT, INDEX
        )
        parts, shifts = _parts(norms, rates, forms, dy, dz, flat, G, ANISOTROPIC, UPRIGHT)
        # Sums over x, with the Gaussians' weights 1, r, and r² times the squared distance.
        one = tl.zeros((QUAD, PAIRS), FLOAT)
        sharp, by_dx, bent = one, one, one
        while k <= last:
            dx, along = _x(k, space, FLOAT)
            inside, there, to, s = _plane(
                dx, along, shift, flat, beyond, at, place, space, QUAD, UPRIGHT
            )
            value = tl.load(dmap + to, mask=there, other=0.0)
            value = tl.where(inside, value.to(FLOAT), 0.0)
            sum_0 = tl.zeros((QUAD, PAIRS), FLOAT)
            sum_1, sum_2 = sum_0, sum_0
            for g in tl.static_range(G):
                if UPRIGHT:
                    factor = tl.exp2(-rates[g] * along)
                    e = parts[g]
                else:
                    factor = 1.0
                    e = _density(
                        norms, rates, forms, parts, shifts, dx, s, along, g,
                        ANISOTROPIC, UPRIGHT,
                    )  # fmt: skip
                sum_0 += factor * e
                sum_1 += (factor * rates[g]) * e
                # 1 / (B + b) is proportional to the rate.
                if WANT_B:
                    sum_2 += (factor * rates[g] * rates[g]) * e
            one += value * sum_0
            sum_1 *= value
            sharp += sum_1
            by_dx += sum_1 * dx
            if WANT_B:
                bent += (value * sum_2) * s
            k += 1
            place = _next(place, space)
        m += tl.sum(one, axis=0)
        mx += tl.sum(by_dx, axis=0)
        my += tl.sum(sharp * dy, axis=0)
        mz += tl.sum(sharp * dz, axis=0)
        mb += tl.sum(bent - (1.5 * _LOG2_E) * sharp, axis=0)
        first += PAIRS
    # An atom without a density has no gradient. Rates have log₂e in them.
    if WANT_XYZ:
        w = _turned_vector(step, (_sum(mx), _sum(my), _sum(mz)))
        for i in tl.static_range(3):
            by_x = tl.where(usable, 2 * occ * w[i] / _LOG2_E, 0.0)
            tl.store(dxyz + 3 * n + i, by_x.to(FLOAT))
    if WANT_B:
        by_b = occ * _sum(mb) / (4 * _PI * _PI * _LOG2_E * _LOG2_E)
        tl.store(db + n, tl.where(usable, by_b, 0.0).to(FLOAT))
    if WANT_OCCUPANCY:
        tl.store(doccupancy + n, tl.where(usable, _sum(m), 0.0).to(FLOAT))


def _anisotropic_vjp(
    order, xyz, b, occupancy, amplitudes, widths, radius, steps, to_grid, measures,
    dmap, dxyz, db, doccupancy,
    nx, ny, nz, start, planes,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, UPRIGHT: tl.constexpr, QUAD: tl.constexpr,
    PAIRS: tl.constexpr, FLOAT: tl.constexpr, INDEX: tl.constexpr,
    WANT_XYZ: tl.constexpr, WANT_B: tl.constexpr, WANT_OCCUPANCY: tl.constexpr,
):  # fmt: skip
    """Write an anisotropic atom's gradients, from moments of each Gaussian times the cotangent."""
    n, usable, space, pairs, pair = _atom(
        order, xyz, b, occupancy, amplitudes, widths, radius, to_grid, measures, nx, ny, nz, start,
        planes, G, ANISOTROPIC, QUAD, PAIRS, FLOAT, INDEX,
    )  # fmt: skip
    occ = tl.load(occupancy + n).to(tl.float64)
    norms, forms, wholes = (), (), ()
    none = tl.zeros((PAIRS,), FLOAT)
    for g in tl.static_range(G):
        norm, _, form = _gaussian(b, amplitudes, widths, to_grid, n, g, G, ANISOTROPIC, FLOAT)
        norms, forms = norms + (norm.to(FLOAT),), forms + (_floats(form, FLOAT),)
        wholes = wholes + (none,)
    slopes, squares = (none, none, none), (none, none, none, none, none, none)
    first = 0
    while first < pairs:
        pair, dy, dz, shift, flat, beyond, at, k, last, place = _pairs(
            pair, space, UPRIGHT, QUAD, PAIRS, FLOAT, INDEX
        )
        parts, shifts = _parts(norms, (), forms, dy, dz, flat, G, ANISOTROPIC, UPRIGHT)
        zero = tl.zeros((QUAD, PAIRS), FLOAT)
        sums = ()
        for _g in tl.static_range(G):
            sums = sums + ((zero, zero, zero),)
        while k <= last:
            dx, along = _x(k, space, FLOAT)
            inside, there, to, _s = _plane(
                dx, along, shift, flat, beyond, at, place, space, QUAD, UPRIGHT
            )
            value = tl.load(dmap + to, mask=there, other=0.0)
            value = tl.where(inside, value.to(FLOAT), 0.0)
            added = ()
            for g in tl.static_range(G):
                t = dx + shifts[g]
                tt = t * t
                e = value * tl.exp2(-(parts[g] + (forms[g][0] * _LOG2_E) * tt))
                added = added + ((sums[g][0] + e, sums[g][1] + e * t, sums[g][2] + e * tt),)
            sums = added
            k += 1
            place = _next(place, space)
        # P w of a line is c t (1, u, v) and a part along y and z that is linear in z.
        line, lines, added = (none, none, none), (none, none, none, none, none, none), ()
        q = tl.arange(0, QUAD)[:, None].to(FLOAT)
        y, z = tl.sum(tl.where(q == 0, dy, 0.0), axis=0), tl.sum(tl.where(q == 0, dz, 0.0), axis=0)
        for g in tl.static_range(G):
            c, yy, yz, zz, u, v = forms[g]
            e, et, ett = sums[g]
            one, by_q = norms[g] * tl.sum(e, axis=0), norms[g] * tl.sum(e * q, axis=0)
            by_qq, t = norms[g] * tl.sum(e * (q * q), axis=0), norms[g] * c * tl.sum(et, axis=0)
            tq, tt = norms[g] * c * tl.sum(et * q, axis=0), norms[g] * c * c * tl.sum(ett, axis=0)
            at_y, at_z = yy * y + yz * z, yz * y + zz * z
            own_y, own_z = at_y * one + yz * by_q, at_z * one + zz * by_q
            ty, tz = at_y * t + yz * tq, at_z * t + zz * tq
            qy, qz = at_y * by_q + yz * by_qq, at_z * by_q + zz * by_qq
            xy, xz = u * tt + ty, v * tt + tz
            line = (line[0] + t, line[1] + u * t + own_y, line[2] + v * t + own_z)
            lines = (
                lines[0] + tt,
                lines[1] + u * (xy + ty) + at_y * own_y + yz * qy,
                lines[2] + v * (xz + tz) + at_z * own_z + zz * qz,
                lines[3] + xy,
                lines[4] + xz,
                lines[5] + v * xy + u * tz + at_z * own_y + zz * qy,
            )
            added = added + (wholes[g] + one,)
        wholes, slopes = added, _plus(slopes, line)
        if WANT_B:
            squares = _plus(squares, lines)
        first += PAIRS
    whole = none
    for g in tl.static_range(G):
        c, yy, yz, zz, u, v = forms[g]
        whole += wholes[g]
        half = 0.5 * wholes[g]
        squares = (
            squares[0] - half * c,
            squares[1] - half * (yy + c * u * u),
            squares[2] - half * (zz + c * v * v),
            squares[3] - half * (c * u),
            squares[4] - half * (c * v),
            squares[5] - half * (yz + c * u * v),
        )
    inverse = _nine(to_grid)
    total = _sum(whole)
    by_x = _turned_vector(
        _transposed(inverse), (2 * _sum(slopes[0]), 2 * _sum(slopes[1]), 2 * _sum(slopes[2]))
    )
    # An atom without a density has no gradient.
    if WANT_XYZ:
        for i in tl.static_range(3):
            tl.store(dxyz + 3 * n + i, tl.where(usable, occ * by_x[i], 0.0).to(FLOAT))
    if WANT_B:
        sums = ()
        for i in tl.static_range(6):
            sums = sums + (_sum(squares[i]),)
        by_b = _turned(inverse, sums)
        for i in tl.static_range(6):
            own = (2 if i < 3 else 4) * occ * by_b[i]
            tl.store(db + 6 * n + i, tl.where(usable, own, 0.0).to(FLOAT))
    if WANT_OCCUPANCY:
        tl.store(doccupancy + n, tl.where(usable, total, 0.0).to(FLOAT))


@triton.jit
def _largest_eigenvalue(u, own):
    """Return the largest eigenvalue of symmetric matrices xx, yy, zz, xy, xz, yz.

    In units of p around the mean, e³ - 3 e is the determinant (Smith, 1961). With e = 1 + d the
    largest has d³ + 3 d² = c, to which Newton's method falls from the root without the cube.
    """
    m = ()
    for i in tl.static_range(6):
        m = m + (tl.load(u + i, mask=own, other=0.0).to(tl.float64),)
    mean = (m[0] + m[1] + m[2]) / 3
    x, y, z = m[0] - mean, m[1] - mean, m[2] - mean
    p = tl.sqrt((x * x + y * y + z * z + 2 * (m[3] * m[3] + m[4] * m[4] + m[5] * m[5])) / 6)
    safe = tl.where(p > 0, p, 1.0)
    form = _scaled(1 / safe, (x, y, z, m[3], m[4], m[5]))
    x, y, z, xy, xz, yz = form
    determinant = x * (y * z - yz * yz) - xy * (xy * z - xz * yz) + xz * (xy * yz - xz * y)
    c = tl.minimum(tl.maximum(2 + determinant, 0.0), 4.0)
    d = tl.sqrt(c / 3)
    for _ in tl.static_range(4):
        d -= (d * (d + 3) - c / tl.where(d > 0, d, 1.0)) / (3 * d + 6)
    return mean + p * (1 + d)


def _reach(
    b, widths, radius, count, N_SIGMA: tl.constexpr, G: tl.constexpr, ANISOTROPIC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write how far atoms reach."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = n < count
    widest = tl.load(widths + n * G, mask=own, other=1.0)
    for g in tl.static_range(1, G):
        width = tl.load(widths + n * G + g, mask=own, other=1.0)
        widest = tl.where((width > widest) | (width != width), width, widest)
    square = widest.to(tl.float64) / (8 * _PI * _PI)
    if ANISOTROPIC:
        square += _largest_eigenvalue(b + 6 * n, own)
    else:
        square += tl.load(b + n, mask=own, other=1.0).to(tl.float64) / (8 * _PI * _PI)
    quarters = tl.ceil(N_SIGMA / 0.25 * tl.sqrt(tl.where(square < 1e-6, 1e-6, square)))
    reach = tl.where(quarters < 8, 2.0, 0.25 * quarters)
    tl.store(radius + n, reach.to(radius.dtype.element_ty), mask=own)


@triton.jit
def _tangent(pointer, at):
    """Return an element of a tangent, zero where there is no tangent."""
    if pointer is None:
        return tl.full((), 0.0, tl.float64)
    else:
        return tl.load(pointer + at).to(tl.float64)


@triton.jit
def _trace(P, Q):
    """Return the trace of a product of symmetric matrices."""
    return P[0] * Q[0] + P[1] * Q[1] + P[2] * Q[2] + 2 * (P[3] * Q[3] + P[4] * Q[4] + P[5] * Q[5])


@triton.jit
def _product(P, w):
    return (
        P[0] * w[0] + P[3] * w[1] + P[4] * w[2],
        P[3] * w[0] + P[1] * w[1] + P[5] * w[2],
        P[4] * w[0] + P[5] * w[1] + P[2] * w[2],
    )


@triton.jit
def _full(P):
    return P[0], P[3], P[4], P[3], P[1], P[5], P[4], P[5], P[2]


@triton.jit
def _transposed(s):
    return s[0], s[3], s[6], s[1], s[4], s[7], s[2], s[5], s[8]


@triton.jit
def _slope(P, ddxyz, ddb, ddwidths, n, g, G: tl.constexpr, ANISOTROPIC: tl.constexpr):
    """Return beta, gamma and nu of a Gaussian's change, over its value: beta·w + w·gamma w - nu.

    See `_vjp_vjp_formula` of fusedops/density/op.py.
    """
    width = 0.25 * _tangent(ddwidths, n * G + g)
    M = ()
    for i in tl.static_range(6):
        if ANISOTROPIC:
            own = _tangent(ddb, 6 * n + i) * (2 * _PI * _PI)
            M = M + (own + width if i < 3 else own,)
        else:
            own = width + 0.25 * _tangent(ddb, n)
            M = M + (own if i < 3 else 0.0 * own,)
    t = (_tangent(ddxyz, 3 * n), _tangent(ddxyz, 3 * n + 1), _tangent(ddxyz, 3 * n + 2))
    Pt = _product(P, t)
    gamma = _scaled(1 / (_PI * _PI), _turned(_full(P), M))
    return (2 * Pt[0], 2 * Pt[1], 2 * Pt[2]), gamma, _trace(P, M) / (2 * _PI * _PI)


@triton.jit
def _change(
    b, occupancy, amplitudes, widths, ddxyz, ddb, ddoccupancy, ddamplitudes, ddwidths, to_grid,
    step, n, g, G: tl.constexpr, ANISOTROPIC: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Return p, q and S of a Gaussian's change p + q·w + w·S w, for w in voxels."""
    _, P, _ = _gaussian(b, amplitudes, widths, to_grid, n, g, G, ANISOTROPIC, FLOAT, True)
    beta, gamma, nu = _slope(P, ddxyz, ddb, ddwidths, n, g, G, ANISOTROPIC)
    occ = tl.load(occupancy + n).to(tl.float64)
    A = tl.load(amplitudes + n * G + g).to(tl.float64)
    share = occ * A
    p = _tangent(ddoccupancy, n) * A + occ * _tangent(ddamplitudes, n * G + g) - share * nu
    q = (
        (share * (step[0] * beta[0] + step[3] * beta[1] + step[6] * beta[2])).to(FLOAT),
        (share * (step[1] * beta[0] + step[4] * beta[1] + step[7] * beta[2])).to(FLOAT),
        (share * (step[2] * beta[0] + step[5] * beta[1] + step[8] * beta[2])).to(FLOAT),
    )
    return p.to(FLOAT), q, _floats(_scaled(share, _turned(step, gamma)), FLOAT)


@triton.jit
def _along_x(p, q, S, dy, dz):
    """Return the first two coefficients of a change, a polynomial in x."""
    c0 = p + q[1] * dy + q[2] * dz + S[1] * dy * dy + S[2] * dz * dz + 2 * S[5] * dy * dz
    return c0, q[0] + 2 * (S[3] * dy + S[4] * dz)


def _splat_change(
    order, xyz, b, occupancy, amplitudes, widths, radius, steps, to_grid, measures,
    ddxyz, ddb, ddoccupancy, ddamplitudes, ddwidths, out,
    nx, ny, nz, start, planes,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, UPRIGHT: tl.constexpr, QUAD: tl.constexpr,
    PAIRS: tl.constexpr, FLOAT: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Add an atom's change along tangents to the map's."""
    n, _usable, space, pairs, pair = _atom(
        order, xyz, b, occupancy, amplitudes, widths, radius, to_grid, measures, nx, ny, nz, start,
        planes, G, ANISOTROPIC, QUAD, PAIRS, FLOAT, INDEX,
    )  # fmt: skip
    step = _nine(steps)
    norms, rates, forms, ps, qs, Ss = (), (), (), (), (), ()
    for g in tl.static_range(G):
        norm, P, form = _gaussian(b, amplitudes, widths, to_grid, n, g, G, ANISOTROPIC, FLOAT, True)
        p, q, S = _change(
            b, occupancy, amplitudes, widths, ddxyz, ddb, ddoccupancy, ddamplitudes, ddwidths,
            to_grid, step, n, g, G, ANISOTROPIC, FLOAT,
        )  # fmt: skip
        norms, rates = norms + (norm.to(FLOAT),), rates + ((P[0] * _LOG2_E).to(FLOAT),)
        forms, ps, qs, Ss = forms + (_floats(form, FLOAT),), ps + (p,), qs + (q,), Ss + (S,)
    first = 0
    while first < pairs:
        pair, dy, dz, shift, flat, beyond, at, k, last, place = _pairs(
            pair, space, UPRIGHT, QUAD, PAIRS, FLOAT, INDEX
        )
        parts, shifts = _parts(norms, rates, forms, dy, dz, flat, G, ANISOTROPIC, UPRIGHT)
        starts, slopes = (), ()
        for g in tl.static_range(G):
            c0, c1 = _along_x(ps[g], qs[g], Ss[g], dy, dz)
            starts, slopes = starts + (c0,), slopes + (c1,)
        while k <= last:
            dx, along = _x(k, space, FLOAT)
            inside, there, to, s = _plane(
                dx, along, shift, flat, beyond, at, place, space, QUAD, UPRIGHT
            )
            value = tl.zeros((QUAD, PAIRS), FLOAT)
            for g in tl.static_range(G):
                value += (starts[g] + dx * (slopes[g] + Ss[g][0] * dx)) * _density(
                    norms, rates, forms, parts, shifts, dx, s, along, g,
                    ANISOTROPIC, UPRIGHT,
                )  # fmt: skip
            tl.atomic_add(out + to, tl.where(inside, value, 0.0), mask=there, sem="relaxed")
            k += 1
            place = _next(place, space)
        first += PAIRS


def _isotropic_second(
    order, xyz, b, occupancy, amplitudes, widths, radius, steps, to_grid, measures,
    ddxyz, ddb, ddoccupancy, ddamplitudes, ddwidths, dmap,
    dxyz, db, doccupancy, out,
    nx, ny, nz, start, planes,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, UPRIGHT: tl.constexpr, QUAD: tl.constexpr,
    PAIRS: tl.constexpr, FLOAT: tl.constexpr, INDEX: tl.constexpr, CONTRACTS: tl.constexpr,
):  # fmt: skip
    """Add an isotropic atom's change to the map's, and write the gradients of the map's change.

    With t the tangent of xyz, a Gaussian e with P = r changes by d = p + q t·w + u w·w times e.
    """
    n, usable, space, pairs, pair = _atom(
        order, xyz, b, occupancy, amplitudes, widths, radius, to_grid, measures, nx, ny, nz, start,
        planes, G, ANISOTROPIC, QUAD, PAIRS, FLOAT, INDEX,
    )  # fmt: skip
    step = _nine(steps)
    occ = tl.load(occupancy + n).to(tl.float64)
    t = (_tangent(ddxyz, 3 * n), _tangent(ddxyz, 3 * n + 1), _tangent(ddxyz, 3 * n + 2))
    v = _turned_vector(_transposed(step), t)
    vx, vy, vz = v[0].to(FLOAT), v[1].to(FLOAT), v[2].to(FLOAT)
    norms, rates, forms, rs, ps, qs, us, os = (), (), (), (), (), (), (), ()
    for g in tl.static_range(G):
        norm, P, form = _gaussian(b, amplitudes, widths, to_grid, n, g, G, ANISOTROPIC, FLOAT, True)
        _beta, gamma, nu = _slope(P, ddxyz, ddb, ddwidths, n, g, G, ANISOTROPIC)
        A, tA = tl.load(amplitudes + n * G + g).to(tl.float64), _tangent(ddamplitudes, n * G + g)
        r, share = P[0].to(tl.float64), occ * A
        p = _tangent(ddoccupancy, n) * A + occ * tA - share * nu
        norms, rates = norms + (norm.to(FLOAT),), rates + ((P[0] * _LOG2_E).to(FLOAT),)
        forms, rs, ps = forms + (_floats(form, FLOAT),), rs + (r.to(FLOAT),), ps + (p.to(FLOAT),)
        qs, us = qs + ((2 * share * r).to(FLOAT),), us + ((share * gamma[0]).to(FLOAT),)
        own = ((tA - A * nu).to(FLOAT), (2 * A * r).to(FLOAT), (A * gamma[0]).to(FLOAT))
        os = os + (own,)
    mx = tl.zeros((QUAD, PAIRS), FLOAT)
    my, mz, mt, mb, mo = mx, mx, mx, mx, mx
    first = 0
    while first < pairs:
        pair, dy, dz, shift, flat, beyond, at, k, last, place = _pairs(
            pair, space, UPRIGHT, QUAD, PAIRS, FLOAT, INDEX
        )
        parts, shifts = _parts(norms, rates, forms, dy, dz, flat, G, ANISOTROPIC, UPRIGHT)
        along_yz = vy * dy + vz * dz
        # A sum over x, which is multiplied by y and z once.
        sharp = tl.zeros((QUAD, PAIRS), FLOAT)
        while k <= last:
            dx, along = _x(k, space, FLOAT)
            inside, there, to, s = _plane(
                dx, along, shift, flat, beyond, at, place, space, QUAD, UPRIGHT
            )
            moved = vx * dx + along_yz
            change = tl.zeros((QUAD, PAIRS), FLOAT)
            by_w, by_t, by_b, by_o = change, change, change, change
            for g in tl.static_range(G):
                e = _density(
                    norms, rates, forms, parts, shifts, dx, s, along, g,
                    ANISOTROPIC, UPRIGHT,
                )  # fmt: skip
                d = ps[g] + qs[g] * moved + us[g] * s
                change += e * d
                if CONTRACTS:
                    steep = rs[g] * d
                    by_w += e * (steep - us[g])
                    by_t += e * qs[g]
                    by_b += e * (
                        steep * (rs[g] * s - 2.5) + (rs[g] * ps[g] + us[g] * (1.5 - rs[g] * s))
                    )
                    by_o += e * (os[g][0] + os[g][1] * moved + os[g][2] * s)
            if CONTRACTS:
                value = tl.load(dmap + to, mask=there, other=0.0)
                value = tl.where(inside, value.to(FLOAT), 0.0)
                sharp += value * by_w
                mx += value * by_w * dx
                mt += value * by_t
                mb += value * by_b
                mo += value * by_o
            if out is not None:
                change = tl.where(inside, change, 0.0)
                tl.atomic_add(out + to, change, mask=there, sem="relaxed")
            k += 1
            place = _next(place, space)
        if CONTRACTS:
            my += sharp * dy
            mz += sharp * dz
        first += PAIRS
    # An atom without a density has no gradient.
    if dxyz is not None:
        w, whole = _turned_vector(step, (_sum(mx), _sum(my), _sum(mz))), _sum(mt)
        for i in tl.static_range(3):
            by_x = tl.where(usable, 2 * w[i] - whole * t[i], 0.0)
            tl.store(dxyz + 3 * n + i, by_x.to(FLOAT))
    if db is not None:
        by_width = tl.where(usable, _sum(mb) / (4 * _PI * _PI), 0.0)
        tl.store(db + n, by_width.to(FLOAT))
    if doccupancy is not None:
        tl.store(doccupancy + n, tl.where(usable, _sum(mo), 0.0).to(FLOAT))


def _contract(
    order, xyz, b, occupancy, amplitudes, widths, radius, steps, to_grid, measures,
    ddxyz, ddb, ddoccupancy, ddamplitudes, ddwidths, dmap,
    dxyz, db, doccupancy, damplitudes, dwidths,
    nx, ny, nz, start, planes,
    G: tl.constexpr, ANISOTROPIC: tl.constexpr, UPRIGHT: tl.constexpr, QUAD: tl.constexpr,
    PAIRS: tl.constexpr, FLOAT: tl.constexpr, INDEX: tl.constexpr, CHANGING: tl.constexpr,
):  # fmt: skip
    """Write an atom's gradients, of the map or of its change, from moments of every Gaussian."""
    n, usable, space, pairs, pair = _atom(
        order, xyz, b, occupancy, amplitudes, widths, radius, to_grid, measures, nx, ny, nz, start,
        planes, G, ANISOTROPIC, QUAD, PAIRS, FLOAT, INDEX,
    )  # fmt: skip
    occ = tl.load(occupancy + n).to(tl.float64)
    step = _nine(steps)
    zero = occ * 0.0
    total, by_x = zero, (zero, zero, zero)
    by_b = (zero, zero, zero, zero, zero, zero)
    for group in tl.static_range(G):
        norm, P, form = _gaussian(
            b, amplitudes, widths, to_grid, n, group, G, ANISOTROPIC, FLOAT, True
        )
        norms, rates = (norm.to(FLOAT),), ((P[0] * _LOG2_E).to(FLOAT),)
        forms = (_floats(form, FLOAT),)
        if CHANGING:
            p, q, S = _change(
                b, occupancy, amplitudes, widths, ddxyz, ddb, ddoccupancy, ddamplitudes, ddwidths,
                to_grid, step, n, group, G, ANISOTROPIC, FLOAT,
            )  # fmt: skip
        m, u = _nothing(PAIRS, FLOAT), _nothing(PAIRS, FLOAT)
        first, following = 0, pair
        while first < pairs:
            following, dy, dz, shift, flat, beyond, at, k, last, place = _pairs(
                following, space, UPRIGHT, QUAD, PAIRS, FLOAT, INDEX
            )
            parts, shifts = _parts(norms, rates, forms, dy, dz, flat, 1, ANISOTROPIC, UPRIGHT)
            if CHANGING:
                c0, c1 = _along_x(p, q, S, dy, dz)
            # Sums over x, which are multiplied by y and z once.
            one = tl.zeros((QUAD, PAIRS), FLOAT)
            by_dx, by_xx, ones, bys_dx, bys_xx = one, one, one, one, one
            while k <= last:
                dx, along = _x(k, space, FLOAT)
                inside, there, to, s = _plane(
                    dx, along, shift, flat, beyond, at, place, space, QUAD, UPRIGHT
                )
                value = tl.load(dmap + to, mask=there, other=0.0)
                value = tl.where(inside, value.to(FLOAT), 0.0)
                e = value * _density(
                    norms, rates, forms, parts, shifts, dx, s, along, 0,
                    ANISOTROPIC, UPRIGHT,
                )  # fmt: skip
                one += e
                by_dx += e * dx
                by_xx += e * (dx * dx)
                if CHANGING:
                    e = e * (c0 + dx * (c1 + S[0] * dx))
                    ones += e
                    bys_dx += e * dx
                    bys_xx += e * (dx * dx)
                k += 1
                place = _next(place, space)
            m = _with_lines(m, (one, by_dx, by_xx), dy, dz)
            if CHANGING:
                u = _with_lines(u, (ones, bys_dx, bys_xx), dy, dz)
            first += PAIRS
        A = tl.load(amplitudes + n * G + group).to(tl.float64)
        share = occ * A
        whole, w, ww = _cartesian(m, step)
        if CHANGING:
            beta, gamma, nu = _slope(P, ddxyz, ddb, ddwidths, n, group, G, ANISOTROPIC)
            z = _trace(gamma, ww) - nu * whole
            z += beta[0] * w[0] + beta[1] * w[1] + beta[2] * w[2]
            tA, tocc = _tangent(ddamplitudes, n * G + group), _tangent(ddoccupancy, n)
            bent, gw = _bent(P, gamma, ww, _product(P, w), beta, whole), _product(gamma, w)
            wholes, v, vv = _cartesian(u, step)
            Pw, K = _product(P, v), _turned(_full(P), vv)
        else:
            z, tA, tocc, wholes = zero, A, occ, whole
            Pw, K = _product(P, w), _turned(_full(P), ww)
        moved, bends = (), ()
        for i in tl.static_range(6):
            own = K[i] - 0.5 * wholes * P[i]
            if CHANGING:
                bends = bends + (own - share * bent[i],)
            else:
                bends = bends + (share * own,)
        for i in tl.static_range(3):
            if CHANGING:
                moved = moved + (by_x[i] + 2 * Pw[i] - share * (whole * beta[i] + 2 * gw[i]),)
            else:
                moved = moved + (by_x[i] + 2 * share * Pw[i],)
        by_x = moved
        by_width = (bends[0] + bends[1] + bends[2]) / (4 * _PI * _PI)
        sums = ()
        for i in tl.static_range(6):
            own = (2 if i < 3 else 4) * bends[i] if ANISOTROPIC else by_width
            sums = sums + (by_b[i] + own,)
        by_b = sums
        total += tA * whole + A * z
        # An atom without a density has no gradient.
        if damplitudes is not None:
            by_amplitude = tl.where(usable, tocc * whole + occ * z, 0.0)
            tl.store(damplitudes + n * G + group, by_amplitude.to(FLOAT))
        if dwidths is not None:
            tl.store(dwidths + n * G + group, tl.where(usable, by_width, 0.0).to(FLOAT))
    if dxyz is not None:
        for i in tl.static_range(3):
            tl.store(dxyz + 3 * n + i, tl.where(usable, by_x[i], 0.0).to(FLOAT))
    if db is not None:
        for i in tl.static_range(6 if ANISOTROPIC else 1):
            to = db + (6 * n + i if ANISOTROPIC else n)
            tl.store(to, tl.where(usable, by_b[i], 0.0).to(FLOAT))
    if doccupancy is not None:
        tl.store(doccupancy + n, tl.where(usable, total, 0.0).to(FLOAT))


@triton.jit
def _turned_vector(s, w):
    """Return s w for the nine elements of s."""
    return (
        s[0] * w[0] + s[1] * w[1] + s[2] * w[2],
        s[3] * w[0] + s[4] * w[1] + s[5] * w[2],
        s[6] * w[0] + s[7] * w[1] + s[8] * w[2],
    )


@triton.jit
def _bent(P, gamma, ww, Pw, beta, one):
    """Return Pw betaᵀ / 2 + P ww gamma, and its transpose, - one gamma / 2."""
    f, columns = _full(gamma), ()
    for j in tl.static_range(3):
        column = _product(P, _product(ww, (f[j], f[3 + j], f[6 + j])))
        columns = columns + (
            (
                column[0] + 0.5 * Pw[0] * beta[j],
                column[1] + 0.5 * Pw[1] * beta[j],
                column[2] + 0.5 * Pw[2] * beta[j],
            ),
        )
    c0, c1, c2 = columns[0], columns[1], columns[2]
    return (
        2 * c0[0] - 0.5 * one * gamma[0],
        2 * c1[1] - 0.5 * one * gamma[1],
        2 * c2[2] - 0.5 * one * gamma[2],
        c0[1] + c1[0] - 0.5 * one * gamma[3],
        c0[2] + c2[0] - 0.5 * one * gamma[4],
        c1[2] + c2[1] - 0.5 * one * gamma[5],
    )


@triton.jit
def _sum(tile):
    return tl.sum(tile).to(tl.float64)


_ALIGNED = {4: ("out", "dmap"), 1: ()}


def _launchers(kernel: Any, registers: int | None = None) -> dict[int, Launcher]:
    """Return launchers by the number of voxels loaded together."""
    return {
        quad: Launcher(kernel_of_any_size(kernel, names), _WARPS, registers)
        for quad, names in _ALIGNED.items()
    }


# A limit of registers lets more programs run at a time. Gradients then spill only sums of the outer
# loop.
_forward, _backward = _launchers(_splat, 80), _launchers(_splat_vjp, 96)
_forward_anisotropic = _launchers(_splat, 96)
_backward_anisotropic = _launchers(_anisotropic_vjp, 128)
_forward_change, _backward_apiece = _launchers(_splat_change), _launchers(_contract)
_isotropic = _launchers(_isotropic_second)


def _count(xyz, to_grid, ranks, counts, N, nx, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Count the atoms of bins along x, and write each atom's rank in its bin."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    to = counts + _bin(xyz, to_grid, n, N, nx, BINS)
    tl.store(ranks + n, tl.atomic_add(to, 1, mask=n < N, sem="relaxed"), mask=n < N)


def _place(xyz, to_grid, ranks, counts, order, N, nx, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the numbers of atoms at the places that bins and ranks give."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + tl.arange(0, BINS))
    first = tl.gather(tl.cumsum(count) - count, _bin(xyz, to_grid, n, N, nx, BINS), 0)
    tl.store(order + first + tl.load(ranks + n, mask=n < N, other=0), n, mask=n < N)


@triton.jit
def _bin(xyz, to_grid, n, N, nx, BINS: tl.constexpr):
    """Return the bins along x of atoms, the first one's for those at no place."""
    share = tl.zeros(n.shape, tl.float32)
    for i in tl.static_range(3):
        x = tl.load(xyz + 3 * n + i, mask=n < N, other=0.0).to(tl.float32)
        share += x * (tl.load(to_grid + i) / nx).to(tl.float32)
    share -= tl.floor(share)
    share = tl.where(_finite(share), share, 0.0)
    return tl.minimum((share * BINS).to(tl.int32), BINS - 1)


# Bins of the cell along x, and atoms of a program that sorts.
_BINS, _BLOCK = 1024, 256
_reaching = Launcher(kernel_of_any_size(_reach), 4)
_counting = Launcher(kernel_of_any_size(_count), 4)
_placing = Launcher(kernel_of_any_size(_place), 4)


def _write_order(xyz: Any, lattice: Lattice, order: Any) -> None:
    """Write an order of atoms along x, in which the map around them stays in cache."""
    N, xyz, to_grid = len(xyz), xyz.contiguous(), lattice.tensors_here().to_grid
    counts = torch.zeros(_BINS + N, dtype=torch.int32, device=xyz.device)
    arrays, sizes = (xyz, to_grid, counts[_BINS:], counts), (N, lattice.nx)
    programs, key = -(-N // _BLOCK), (xyz.device, xyz.dtype, wide(*sizes))
    _counting(programs, key, *arrays, *sizes, _BINS, _BLOCK)
    _placing(programs, key, *arrays, order, *sizes, _BINS, _BLOCK)


def _layout(a: Any, order: Any, *grids: Any) -> Any:
    """Return arrays, sizes and constants that all kernels take, and the voxels loaded together."""
    lattice = a.lattice
    xyz, b, occupancy = (array.contiguous() for array in (a.xyz, a.b, a.occupancy))
    constants = [array.contiguous() for array in (a.amplitudes, a.widths, a.radius)]
    aligned = all([grid is None or grid.data_ptr() % 16 == 0 for grid in grids])
    quad = 4 if lattice.nz % 4 == 0 and aligned else 1
    anisotropic = b.ndim == 2
    kind = tl.float64 if promoted((xyz, b, occupancy)) == torch.float64 else tl.float32
    cell = lattice.tensors_here()
    cell = cell.step, cell.to_grid, cell.measures
    given = order, xyz, b, occupancy, *constants, *cell
    shape = constants[0].shape[1], anisotropic, not lattice.skewed, quad
    sizes = *lattice.grid, lattice.start, lattice.stop - lattice.start
    index = tl.int32 if math.prod(lattice.grid) // quad < 2**31 else tl.int64
    return given, sizes, (*shape, _VOXELS // quad, kind, index), quad


@register("atom_radius", "triton")
def atom_radius(a: Any, y: Any) -> None:
    b, widths, n_sigma = a
    count, gaussians = widths.shape
    if not count:
        return
    constants = n_sigma, gaussians, b.ndim == 2, _ATOMS
    key = b.device, b.dtype, widths.dtype, wide(count), *constants
    arrays = b.contiguous(), widths.contiguous(), y.radius
    _reaching(-(-count // _ATOMS), key, *arrays, count, *constants)


@register("gaussian_density", "triton")
def gaussian_density(a: Any, y: Any) -> None:
    xyz, out = a.xyz, y.map
    order, formula = y.order, torch.are_deterministic_algorithms_enabled()
    if order is None and len(xyz) >= ORDERED and not formula:
        # Without a gradient, too, sorting takes less time than it saves.
        order = torch.empty(len(xyz), dtype=torch.int64, device=xyz.device)
    if order is not None:
        _write_order(xyz, a.lattice, order)
    if out is None:
        return
    if formula:
        out.copy_(definition.formula(a)[0])
        return
    # Atomic sums in 16 bits would lose digits that float32 keeps.
    if a.clamp:
        a, _ = clamped(a)
        xyz, order = a.xyz, None if order is None else repeated(order, len(a.xyz))
    total = out.zero_() if out.itemsize > 2 else torch.zeros_like(out, dtype=torch.float32)
    if len(xyz):
        launcher = _forward_anisotropic if a.b.ndim == 2 else _forward
        _launch(launcher, a, _layout(a, order, total), (total,))
    if total is not out:
        out.copy_(total)


def _launch(launcher: Any, a: Any, layout: Any, arrays: Any, *last: Any) -> None:
    """Launch a kernel on arrays and the constants of a layout, with further ones."""
    given, sizes, constants, quad = layout
    arrays, constants = (*given, *arrays), (*constants, *last)
    key = a.xyz.device, *[getattr(a, "dtype", None) for a in arrays], wide(*sizes), *constants
    launcher[quad](len(a.xyz), key, *arrays, *sizes, *constants)


@register("gaussian_density_vjp", "triton")
@clamping
def gaussian_density_vjp(a: Any, y: Any) -> None:
    if not len(a.xyz):
        return
    dmap = a.dmap.contiguous()
    layout = _layout(a, a.order, dmap)
    *outputs, damplitudes, dwidths = y
    if damplitudes is not None or dwidths is not None:
        _launch(_backward_apiece, a, layout, (*[None] * 5, dmap, *y), False)
        return
    arrays = dmap, *[a.xyz if out is None else out for out in outputs]
    launcher = _backward_anisotropic if a.b.ndim == 2 else _backward
    _launch(launcher, a, layout, arrays, *[out is not None for out in outputs])


@register("gaussian_density_vjp_vjp", "triton")
def gaussian_density_vjp_vjp(a: Any, y: Any) -> None:
    *gradients, ddmap = y
    total = ddmap
    if ddmap is not None and torch.are_deterministic_algorithms_enabled():
        ddmap.copy_(derivative.formula(a)[5])
        total = None
    elif ddmap is not None:
        # Atomic sums in 16 bits would lose digits that float32 keeps.
        wide_enough = ddmap.itemsize > 2
        total = ddmap.zero_() if wide_enough else torch.zeros_like(ddmap, dtype=torch.float32)
    contracts = any([gradient is not None for gradient in gradients])
    if len(a.xyz) and (contracts or total is not None):
        dmap = a.dmap.contiguous()
        layout = _layout(a, a.order, dmap, total)
        given = a.ddxyz, a.ddb, a.ddoccupancy, a.ddamplitudes, a.ddwidths
        tangents = [tangent if tangent is None else tangent.contiguous() for tangent in given]
        if a.b.ndim == 1 and y.damplitudes is None and y.dwidths is None:
            arrays = *tangents, dmap, y.dxyz, y.db, y.doccupancy, total
            _launch(_isotropic, a, layout, arrays, contracts)
        else:
            if total is not None:
                _launch(_forward_change, a, layout, (*tangents, total))
            if contracts:
                _launch(_backward_apiece, a, layout, (*tangents, dmap, *gradients), True)
    if total is not None and total is not ddmap:
        ddmap.copy_(total)
