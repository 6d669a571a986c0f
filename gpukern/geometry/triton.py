"""Restraints of geometry on the GPU: one launch for all terms, and one for sums and atoms.

In the first, every program has restraints of one kind, one to a lane, in float64. A restraint
writes a row for each of its atoms; in the second launch an atom sums its rows, in a fixed order. No
atomics, no host synchronisation, the same bits every time.

Bytes, once each: xyz, index, ideal, weight and entries in, gradient out; rows out and in again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._frame.registry import register
from fusedops.geometry.op import BOND_EPS, CONTACT_EPS, EITHER_HAND, NO_HAND, SHORTEST, STRAIGHT
from fusedops.geometry.plan import KINDS
from gpukern.atoms import atom, coordinates
from gpukern.launch import Launcher, kernel_of_any_size, wide

# Restraints and warps of a program of the first launch; atoms and warps of one of the second.
_BLOCK, _WARPS = 64, 2
_ATOMS, _ATOM_WARPS = 128, 4
# Partial sums that the second launch adds up at a time.
_SUM = 1024
_BOND_EPS, _CONTACT_EPS = tl.constexpr(BOND_EPS), tl.constexpr(CONTACT_EPS)
_SHORT, _STRAIGHT = tl.constexpr(SHORTEST**2), tl.constexpr(STRAIGHT)
_EITHER_HAND, _NO_HAND = tl.constexpr(EITHER_HAND), tl.constexpr(NO_HAND**2)

# fusedops/geometry/op.py has the formulas. f is a term, f1 and f2 are its derivatives by a
# coordinate q, `push` is the derivative of q along tangents v, and each atom has a row of the
# gradient of q, and its derivative along v.


@triton.jit
def _dot(ax, ay, az, bx, by, bz):
    return ax * bx + ay * by + az * bz


@triton.jit
def _cross(ax, ay, az, bx, by, bz):
    return ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx


@triton.jit
def _cross_along(ax, ay, az, bx, by, bz, dax, day, daz, dbx, dby, dbz):
    """Return the derivative of a cross product."""
    x, y, z = _cross(dax, day, daz, bx, by, bz)
    p, q, r = _cross(ax, ay, az, dbx, dby, dbz)
    return x + p, y + q, z + r


@triton.jit
def _store(
    spill, entry, there, inside, scale, f1, f2, push, x, y, z, dx, dy, dz, SECOND: tl.constexpr
):  # fmt: skip
    """Store rows of the gradient, or of its derivative."""
    if SECOND:
        x = f2 * push * x + f1 * dx
        y = f2 * push * y + f1 * dy
        z = f2 * push * z + f1 * dz
    else:
        x *= f1
        y *= f1
        z *= f1
    at = spill + 3 * entry
    tl.store(at, tl.where(inside, scale * x, 0.0), mask=there)
    tl.store(at + 1, tl.where(inside, scale * y, 0.0), mask=there)
    tl.store(at + 2, tl.where(inside, scale * z, 0.0), mask=there)


@triton.jit
def _pairs(
    xyz, ddxyz, row, column, vrow, vcolumn, index, entry, ideal, weight, image, operations, spill,
    there, atoms, images, scale, CONTACTS: tl.constexpr, SECOND: tl.constexpr,
    WANTED: tl.constexpr,
):  # fmt: skip
    """Bonds, or contacts with images of second atoms."""
    i, inside = atom(index, entry, there, atoms)
    j, other = atom(index, entry + 1, there, atoms)
    inside = inside & other
    if CONTACTS:
        of = tl.load(image, mask=there, other=0)
        known = (of >= 0) & (of < images)
        inside = inside & known
    px, py, pz = coordinates(xyz, i, inside, row, column, 0.0)
    x, y, z = coordinates(xyz, j, inside, row, column, 0.0)
    ux, uy, uz = tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x)
    if SECOND:
        vpx, vpy, vpz = coordinates(ddxyz, i, inside, vrow, vcolumn, 0.0)
        ux, uy, uz = coordinates(ddxyz, j, inside, vrow, vcolumn, 0.0)
    if CONTACTS:
        at = operations + 12 * tl.where(known, of, 0).to(tl.int64)
        xx = tl.load(at)
        xy = tl.load(at + 1)
        xz = tl.load(at + 2)
        yx = tl.load(at + 4)
        yy = tl.load(at + 5)
        yz = tl.load(at + 6)
        zx = tl.load(at + 8)
        zy = tl.load(at + 9)
        zz = tl.load(at + 10)
        mx = xx * x + xy * y + xz * z + tl.load(at + 3)
        my = yx * x + yy * y + yz * z + tl.load(at + 7)
        mz = zx * x + zy * y + zz * z + tl.load(at + 11)
        x, y, z = mx, my, mz
        if SECOND:
            mx = xx * ux + xy * uy + xz * uz
            my = yx * ux + yy * uy + yz * uz
            mz = zx * ux + zy * uy + zz * uz
            ux, uy, uz = mx, my, mz
    x -= px
    y -= py
    z -= pz
    square = _dot(x, y, z, x, y, z)
    if CONTACTS:
        apart = (ideal < 0) | (square + _CONTACT_EPS >= ideal * ideal)
        d = tl.sqrt(tl.where(apart, 1.0, square + _CONTACT_EPS))
        x = tl.where(apart, 0.0, x)
        y = tl.where(apart, 0.0, y)
        z = tl.where(apart, 0.0, z)
        overlap = tl.where(apart, 0.0, ideal - d)
        square = weight * overlap * overlap
        f = square * overlap * overlap
        f1 = -4 * square * overlap
        f2 = 12 * square
    else:
        d = tl.sqrt(square + _BOND_EPS)
        f1 = weight * (d - ideal)
        f = 0.5 * f1 * (d - ideal)
        f2 = weight
    x = x / d
    y = y / d
    z = z / d
    push = tl.zeros_like(x)
    dx, dy, dz = push, push, push
    if SECOND:
        ux -= vpx
        uy -= vpy
        uz -= vpz
        push = _dot(x, y, z, ux, uy, uz)
        dx = (ux - x * push) / d
        dy = (uy - y * push) / d
        dz = (uz - z * push) / d
        f = f1 * push
    if WANTED:
        _store(
            spill, entry, there, inside, scale, f1, f2, push, -x, -y, -z, -dx, -dy, -dz, SECOND
        )  # fmt: skip
        if CONTACTS:
            mx = xx * x + yx * y + zx * z
            my = xy * x + yy * y + zy * z
            mz = xz * x + yz * y + zz * z
            x, y, z = mx, my, mz
            mx = xx * dx + yx * dy + zx * dz
            my = xy * dx + yy * dy + zy * dz
            mz = xz * dx + yz * dy + zz * dz
            dx, dy, dz = mx, my, mz
        _store(
            spill, entry + 1, there, inside, scale, f1, f2, push, x, y, z, dx, dy, dz, SECOND
        )  # fmt: skip
    return tl.where(inside, f, 0.0)


@triton.jit
def _arccos(c):
    """Return the angle of a cosine that is not too near to ±1."""
    x = tl.abs(c)
    # Abramowitz & Stegun 4.4.46, within 2e-8, and then a step of Newton's method.
    near = -0.0012624911
    near = near * x + 0.0066700901
    near = near * x - 0.0170881256
    near = near * x + 0.0308918810
    near = near * x - 0.0501743046
    near = near * x + 0.0889789874
    near = near * x - 0.2145988016
    near = near * x + 1.5707963050
    near = near * tl.sqrt(1 - x)
    near += (tl.cos(near) - x) / tl.sin(near)
    return tl.where(c < 0, 3.141592653589793 - near, near)


@triton.jit
def _angles(
    xyz, ddxyz, row, column, vrow, vcolumn, index, entry, ideal, weight, spill, there, atoms, scale,
    SECOND: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    i, inside = atom(index, entry, there, atoms)
    j, there_j = atom(index, entry + 1, there, atoms)
    k, there_k = atom(index, entry + 2, there, atoms)
    inside = inside & there_j & there_k
    ax, ay, az = coordinates(xyz, i, inside, row, column, 0.0)
    x, y, z = coordinates(xyz, j, inside, row, column, 0.0)
    bx, by, bz = coordinates(xyz, k, inside, row, column, 0.0)
    ax -= x
    ay -= y
    az -= z
    bx -= x
    by -= y
    bz -= z
    aa = _dot(ax, ay, az, ax, ay, az)
    bb = _dot(bx, by, bz, bx, by, bz)
    short = (aa < _SHORT) | (bb < _SHORT)
    aa = tl.where(short, 0.0, 1 / tl.sqrt(tl.where(short, 1.0, aa)))
    bb = tl.where(short, 0.0, 1 / tl.sqrt(tl.where(short, 1.0, bb)))
    ax *= aa
    ay *= aa
    az *= aa
    bx *= bb
    by *= bb
    bz *= bb
    c = _dot(ax, ay, az, bx, by, bz)
    # A constant alone would have 32 bits.
    most = tl.zeros_like(c) + _STRAIGHT
    cosine = tl.where(c > most, most, tl.where(c < -most, -most, c))
    flat = short | (tl.abs(c) > most)
    square = 1 - cosine * cosine
    sine = tl.sqrt(square)
    deviation = _arccos(cosine) - ideal
    f = 0.5 * weight * deviation * deviation
    f1 = tl.where(flat, 0.0, -weight * deviation / sine)
    f2 = tl.where(flat, 0.0, weight * (1 - deviation * cosine / sine) / square)
    gx = (bx - c * ax) * aa
    gy = (by - c * ay) * aa
    gz = (bz - c * az) * aa
    hx = (ax - c * bx) * bb
    hy = (ay - c * by) * bb
    hz = (az - c * bz) * bb
    push = tl.zeros_like(c)
    dgx, dgy, dgz, dhx, dhy, dhz = push, push, push, push, push, push
    if SECOND:
        dax, day, daz = coordinates(ddxyz, i, inside, vrow, vcolumn, 0.0)
        x, y, z = coordinates(ddxyz, j, inside, vrow, vcolumn, 0.0)
        dbx, dby, dbz = coordinates(ddxyz, k, inside, vrow, vcolumn, 0.0)
        dax = (dax - x) * aa
        day = (day - y) * aa
        daz = (daz - z) * aa
        dbx = (dbx - x) * bb
        dby = (dby - y) * bb
        dbz = (dbz - z) * bb
        along_a = _dot(ax, ay, az, dax, day, daz)
        along_b = _dot(bx, by, bz, dbx, dby, dbz)
        dax -= ax * along_a
        day -= ay * along_a
        daz -= az * along_a
        dbx -= bx * along_b
        dby -= by * along_b
        dbz -= bz * along_b
        push = _dot(dax, day, daz, bx, by, bz) + _dot(ax, ay, az, dbx, dby, dbz)
        dgx = (dbx - push * ax - c * dax) * aa - gx * along_a
        dgy = (dby - push * ay - c * day) * aa - gy * along_a
        dgz = (dbz - push * az - c * daz) * aa - gz * along_a
        dhx = (dax - push * bx - c * dbx) * bb - hx * along_b
        dhy = (day - push * by - c * dby) * bb - hy * along_b
        dhz = (daz - push * bz - c * dbz) * bb - hz * along_b
        f = f1 * push
    if WANTED:
        _store(
            spill, entry, there, inside, scale, f1, f2, push, gx, gy, gz, dgx, dgy, dgz, SECOND
        )  # fmt: skip
        _store(
            spill, entry + 1, there, inside, scale, f1, f2, push, -gx - hx, -gy - hy, -gz - hz,
            -dgx - dhx, -dgy - dhy, -dgz - dhz, SECOND,
        )  # fmt: skip
        _store(
            spill, entry + 2, there, inside, scale, f1, f2, push, hx, hy, hz, dhx, dhy, dhz, SECOND
        )  # fmt: skip
    return tl.where(inside, f, 0.0)


@triton.jit
def _quad(array, index, entry, there, atoms, row, column):
    """Load three vectors between four atoms, the first atom's, and whether all atoms exist."""
    i, inside = atom(index, entry, there, atoms)
    j, there_j = atom(index, entry + 1, there, atoms)
    k, there_k = atom(index, entry + 2, there, atoms)
    m, there_m = atom(index, entry + 3, there, atoms)
    inside = inside & there_j & there_k & there_m
    px, py, pz = coordinates(array, i, inside, row, column, 0.0)
    ax, ay, az = coordinates(array, j, inside, row, column, 0.0)
    bx, by, bz = coordinates(array, k, inside, row, column, 0.0)
    cx, cy, cz = coordinates(array, m, inside, row, column, 0.0)
    return px, py, pz, ax, ay, az, bx, by, bz, cx, cy, cz, inside


@triton.jit
def _torsions(
    xyz, ddxyz, row, column, vrow, vcolumn, index, entry, phase, kappa, period, log_odds, spill,
    there, atoms, scale, SECOND: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    px, py, pz, ax, ay, az, bx, by, bz, cx, cy, cz, inside = _quad(
        xyz, index, entry, there, atoms, row, column
    )
    cx -= bx
    cy -= by
    cz -= bz
    bx -= ax
    by -= ay
    bz -= az
    ax -= px
    ay -= py
    az -= pz
    mx, my, mz = _cross(ax, ay, az, bx, by, bz)
    nx, ny, nz = _cross(bx, by, bz, cx, cy, cz)
    mm = _dot(mx, my, mz, mx, my, mz)
    nn = _dot(nx, ny, nz, nx, ny, nz)
    bb = _dot(bx, by, bz, bx, by, bz)
    flat = mm * nn < _SHORT
    mm = tl.where(flat, 1.0, mm)
    nn = tl.where(flat, 1.0, nn)
    bb = tl.where(flat, 1.0, bb)
    b = tl.sqrt(bb)
    sine = tl.where(flat, 0.0, b * _dot(ax, ay, az, nx, ny, nz))
    cosine = tl.where(flat, 1.0, _dot(mx, my, mz, nx, ny, nz))
    norm = tl.sqrt(sine * sine + cosine * cosine)
    # The deviation's cosine and sine, by the nearest of the ideals: it has the largest cosine.
    ideal_c = tl.load(phase, mask=there, other=1.0) / norm
    ideal_s = tl.load(phase + 1, mask=there, other=0.0) / norm
    turned_c = cosine * ideal_c + sine * ideal_s
    turned_s = sine * ideal_c - cosine * ideal_s
    turn = 6.283185307179586 / period.to(tl.float64)
    step_c = tl.cos(turn)
    step_s = tl.sin(turn)
    c = turned_c
    s = turned_s
    most = tl.max(period)
    at = 1
    while at < most:
        x = turned_c * step_c + turned_s * step_s
        turned_s = turned_s * step_c - turned_c * step_s
        turned_c = x
        nearer = (turned_c > c) & (at < period)
        c = tl.where(nearer, turned_c, c)
        s = tl.where(nearer, turned_s, s)
        at += 1
    odds = 2 * kappa * c + log_odds
    e = tl.exp(-tl.abs(odds))
    t = tl.where(odds < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    f = kappa * (1 - c) - tl.where(odds < 0, -odds, 0.0) - tl.log(1 + e)
    f1 = tl.where(flat, 0.0, kappa * s * t)
    f2 = tl.where(flat, 0.0, kappa * (c * t - kappa * s * s * 4 * e / ((1 + e) * (1 + e))))
    j = _dot(ax, ay, az, bx, by, bz) / bb
    k = _dot(cx, cy, cz, bx, by, bz) / bb
    over_m = b / mm
    over_n = b / nn
    gx = over_m * mx
    gy = over_m * my
    gz = over_m * mz
    hx = over_n * nx
    hy = over_n * ny
    hz = over_n * nz
    push = tl.zeros_like(c)
    dgx, dgy, dgz, dhx, dhy, dhz = push, push, push, push, push, push
    dix, diy, diz = push, push, push
    if SECOND:
        px, py, pz, dax, day, daz, dbx, dby, dbz, dcx, dcy, dcz, _ = _quad(
            ddxyz, index, entry, there, atoms, vrow, vcolumn
        )
        dcx -= dbx
        dcy -= dby
        dcz -= dbz
        dbx -= dax
        dby -= day
        dbz -= daz
        dax -= px
        day -= py
        daz -= pz
        dmx, dmy, dmz = _cross_along(ax, ay, az, bx, by, bz, dax, day, daz, dbx, dby, dbz)
        dnx, dny, dnz = _cross_along(bx, by, bz, cx, cy, cz, dbx, dby, dbz, dcx, dcy, dcz)
        stretch = _dot(bx, by, bz, dbx, dby, dbz) / bb
        dj = _dot(dax, day, daz, bx, by, bz) + _dot(ax, ay, az, dbx, dby, dbz)
        dk = _dot(dcx, dcy, dcz, bx, by, bz) + _dot(cx, cy, cz, dbx, dby, dbz)
        dj = dj / bb - 2 * j * stretch
        dk = dk / bb - 2 * k * stretch
        longer_m = stretch - 2 * _dot(mx, my, mz, dmx, dmy, dmz) / mm
        longer_n = stretch - 2 * _dot(nx, ny, nz, dnx, dny, dnz) / nn
        dgx = over_m * dmx + gx * longer_m
        dgy = over_m * dmy + gy * longer_m
        dgz = over_m * dmz + gz * longer_m
        dhx = over_n * dnx + hx * longer_n
        dhy = over_n * dny + hy * longer_n
        dhz = over_n * dnz + hz * longer_n
        dix = dj * gx + j * dgx + dk * hx + k * dhx
        diy = dj * gy + j * dgy + dk * hy + k * dhy
        diz = dj * gz + j * dgz + dk * hz + k * dhz
        # The tangents' inner product with the four rows, by differences of neighbours.
        push = (
            _dot(gx, gy, gz, dax, day, daz)
            + _dot(hx, hy, hz, dcx, dcy, dcz)
            - j * _dot(gx, gy, gz, dbx, dby, dbz)
            - k * _dot(hx, hy, hz, dbx, dby, dbz)
        )
        f = f1 * push
    if WANTED:
        ix = j * gx + k * hx
        iy = j * gy + k * hy
        iz = j * gz + k * hz
        _store(
            spill, entry, there, inside, scale, f1, f2, push, -gx, -gy, -gz, -dgx, -dgy, -dgz,
            SECOND,
        )  # fmt: skip
        _store(
            spill, entry + 1, there, inside, scale, f1, f2, push, gx + ix, gy + iy, gz + iz,
            dgx + dix, dgy + diy, dgz + diz, SECOND,
        )  # fmt: skip
        _store(
            spill, entry + 2, there, inside, scale, f1, f2, push, -ix - hx, -iy - hy, -iz - hz,
            -dix - dhx, -diy - dhy, -diz - dhz, SECOND,
        )  # fmt: skip
        _store(
            spill, entry + 3, there, inside, scale, f1, f2, push, hx, hy, hz, dhx, dhy, dhz, SECOND
        )  # fmt: skip
    return tl.where(inside, f, 0.0)


@triton.jit
def _chirals(
    xyz, ddxyz, row, column, vrow, vcolumn, index, entry, ideal, weight, spill, there, atoms, scale,
    SECOND: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    px, py, pz, ax, ay, az, bx, by, bz, cx, cy, cz, inside = _quad(
        xyz, index, entry, there, atoms, row, column
    )
    ax -= px
    ay -= py
    az -= pz
    bx -= px
    by -= py
    bz -= pz
    cx -= px
    cy -= py
    cz -= pz
    gx, gy, gz = _cross(bx, by, bz, cx, cy, cz)
    hx, hy, hz = _cross(cx, cy, cz, ax, ay, az)
    kx, ky, kz = _cross(ax, ay, az, bx, by, bz)
    volume = _dot(ax, ay, az, gx, gy, gz)
    either = ideal == 0
    box = _dot(ax, ay, az, ax, ay, az) * _dot(bx, by, bz, bx, by, bz)
    box *= _dot(cx, cy, cz, cx, cy, cz)
    flat = volume * volume <= _NO_HAND * box
    sign = tl.where(flat, 0.0, tl.where(volume < 0, -1.0, 1.0))
    sign = tl.where(either, sign, 1.0).to(tl.float64)
    deviation = tl.where(either, tl.abs(volume) - _EITHER_HAND, volume - ideal)
    f = 0.5 * weight * deviation * deviation
    f1 = weight * deviation * sign
    f2 = weight * sign * sign
    push = tl.zeros_like(volume)
    dgx, dgy, dgz, dhx, dhy, dhz = push, push, push, push, push, push
    dkx, dky, dkz = push, push, push
    if SECOND:
        px, py, pz, dax, day, daz, dbx, dby, dbz, dcx, dcy, dcz, _ = _quad(
            ddxyz, index, entry, there, atoms, vrow, vcolumn
        )
        dax -= px
        day -= py
        daz -= pz
        dbx -= px
        dby -= py
        dbz -= pz
        dcx -= px
        dcy -= py
        dcz -= pz
        dgx, dgy, dgz = _cross_along(bx, by, bz, cx, cy, cz, dbx, dby, dbz, dcx, dcy, dcz)
        dhx, dhy, dhz = _cross_along(cx, cy, cz, ax, ay, az, dcx, dcy, dcz, dax, day, daz)
        dkx, dky, dkz = _cross_along(ax, ay, az, bx, by, bz, dax, day, daz, dbx, dby, dbz)
        push = _dot(gx, gy, gz, dax, day, daz) + _dot(hx, hy, hz, dbx, dby, dbz)
        push += _dot(kx, ky, kz, dcx, dcy, dcz)
        f = f1 * push
    if WANTED:
        _store(
            spill, entry, there, inside, scale, f1, f2, push,
            -gx - hx - kx, -gy - hy - ky, -gz - hz - kz,
            -dgx - dhx - dkx, -dgy - dhy - dky, -dgz - dhz - dkz, SECOND,
        )  # fmt: skip
        _store(
            spill, entry + 1, there, inside, scale, f1, f2, push, gx, gy, gz, dgx, dgy, dgz, SECOND
        )  # fmt: skip
        _store(
            spill, entry + 2, there, inside, scale, f1, f2, push, hx, hy, hz, dhx, dhy, dhz, SECOND
        )  # fmt: skip
        _store(
            spill, entry + 3, there, inside, scale, f1, f2, push, kx, ky, kz, dkx, dky, dkz, SECOND
        )  # fmt: skip
    return tl.where(inside, f, 0.0)


@triton.jit
def _b_pairs(
    b, ddb, stride, vstride, index, entry, weight, to, there, atoms, scale,
    SECOND: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    i, inside = atom(index, entry, there, atoms)
    j, other = atom(index, entry + 1, there, atoms)
    inside = inside & other
    i = i.to(tl.int64)
    j = j.to(tl.int64)
    z = tl.load(b + j * stride, mask=inside, other=0.0).to(tl.float64)
    z -= tl.load(b + i * stride, mask=inside, other=0.0).to(tl.float64)
    row = weight * z
    f = 0.5 * row * z
    if SECOND:
        w = tl.load(ddb + j * vstride, mask=inside, other=0.0).to(tl.float64)
        w -= tl.load(ddb + i * vstride, mask=inside, other=0.0).to(tl.float64)
        f = row * w
        row = weight * w
    if WANTED:
        tl.store(to, -scale * row, mask=there)
        tl.store(to + 1, scale * row, mask=there)
    return tl.where(inside, f, 0.0)


@triton.jit
def _scale(dnlls, WANTED: tl.constexpr):
    """Return a kind's cotangent, which nothing needs without rows."""
    if WANTED:
        scale = tl.load(dnlls).to(tl.float64)
    else:
        scale = tl.full((), 0.0, tl.float64)
    return scale


@kernel_of_any_size
def _terms_kernel(
    xyz, b, dnlls, ddxyz, ddb, index, ideal, weight, phase, period, log_odds, image, operations,
    spill, partial, atoms, images, first, n0, n1, n2, n3, n4, n5, row, column, stride, vrow,
    vcolumn, vstride, dstride,
    SECOND: tl.constexpr, ROWS: tl.constexpr, B_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) + first
    # The kind of this program, its first program, and all its restraints' places.
    angles = (n0 + BLOCK - 1) // BLOCK
    torsions = angles + (n1 + BLOCK - 1) // BLOCK
    chirals = torsions + (n2 + BLOCK - 1) // BLOCK
    contacts = chirals + (n3 + BLOCK - 1) // BLOCK
    b_pairs = contacts + (n4 + BLOCK - 1) // BLOCK
    lane = tl.arange(0, BLOCK).to(tl.int64)
    entry_1 = 2 * n0.to(tl.int64)
    entry_2 = entry_1 + 3 * n1.to(tl.int64)
    entry_3 = entry_2 + 4 * n2.to(tl.int64)
    entry_4 = entry_3 + 4 * n3.to(tl.int64)
    entry_5 = entry_4 + 2 * n4.to(tl.int64)
    if program < angles:
        r = program * BLOCK + lane
        there = r < n0
        scale = _scale(dnlls, ROWS)
        f = _pairs(
            xyz, ddxyz, row, column, vrow, vcolumn, index, 2 * r,
            tl.load(ideal + r, mask=there, other=0.0), tl.load(weight + r, mask=there, other=0.0),
            image, operations, spill, there, atoms, images, scale, False, SECOND, ROWS,
        )  # fmt: skip
        tl.store(partial + program, tl.sum(f))
    elif program < torsions:
        r = (program - angles) * BLOCK + lane
        there = r < n1
        scale = _scale(dnlls + dstride, ROWS)
        at = n0 + r
        f = _angles(
            xyz, ddxyz, row, column, vrow, vcolumn, index, entry_1 + 3 * r,
            tl.load(ideal + at, mask=there, other=0.0), tl.load(weight + at, mask=there, other=0.0),
            spill, there, atoms, scale, SECOND, ROWS,
        )  # fmt: skip
        tl.store(partial + program, tl.sum(f))
    elif program < chirals:
        r = (program - torsions) * BLOCK + lane
        there = r < n2
        scale = _scale(dnlls + 2 * dstride, ROWS)
        at = n0 + n1 + r
        f = _torsions(
            xyz, ddxyz, row, column, vrow, vcolumn, index, entry_2 + 4 * r, phase + 2 * r,
            tl.load(weight + at, mask=there, other=0.0),
            tl.load(period + r, mask=there, other=1), tl.load(log_odds + r, mask=there, other=0.0),
            spill, there, atoms, scale, SECOND, ROWS,
        )  # fmt: skip
        tl.store(partial + program, tl.sum(f))
    elif program < contacts:
        r = (program - chirals) * BLOCK + lane
        there = r < n3
        scale = _scale(dnlls + 3 * dstride, ROWS)
        at = n0 + n1 + n2 + r
        f = _chirals(
            xyz, ddxyz, row, column, vrow, vcolumn, index, entry_3 + 4 * r,
            tl.load(ideal + at, mask=there, other=0.0), tl.load(weight + at, mask=there, other=0.0),
            spill, there, atoms, scale, SECOND, ROWS,
        )  # fmt: skip
        tl.store(partial + program, tl.sum(f))
    elif program < b_pairs:
        r = (program - contacts) * BLOCK + lane
        there = r < n4
        scale = _scale(dnlls + 4 * dstride, ROWS)
        at = n0 + n1 + n2 + n3 + r
        f = _pairs(
            xyz, ddxyz, row, column, vrow, vcolumn, index, entry_4 + 2 * r,
            tl.load(ideal + at, mask=there, other=0.0), tl.load(weight + at, mask=there, other=0.0),
            image + r, operations, spill, there, atoms, images, scale, True, SECOND, ROWS,
        )  # fmt: skip
        tl.store(partial + program, tl.sum(f))
    else:
        r = (program - b_pairs) * BLOCK + lane
        there = r < n5
        scale = _scale(dnlls + 5 * dstride, B_ROWS)
        at = n0 + n1 + n2 + n3 + n4 + r
        f = _b_pairs(
            b, ddb, stride, vstride, index, entry_5 + 2 * r,
            tl.load(weight + at, mask=there, other=0.0), spill + 3 * entry_5 + 2 * r,
            there, atoms, scale, SECOND, B_ROWS,
        )  # fmt: skip
        tl.store(partial + program, tl.sum(f))


@triton.jit
def _write(at, value, mask):
    """Store float64, by way of float32 in 16 bits, to which there is no direct way."""
    if at.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    tl.store(at, value, mask=mask)


@kernel_of_any_size
def _atoms_kernel(
    out, b_out, spill, entry_ptr, entries, sums, partial, constant, atoms, bound, first_b,
    p0, p1, p2, p3, p4, p5,
    VALUE: tl.constexpr, CONSTANT: tl.constexpr, ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Sum the rows of atoms; the first six programs sum the terms of a kind meanwhile.

    The partial sums of kind k end before p(k).
    """
    program = tl.program_id(0)
    if VALUE and program < 6:
        begin = p0 - p0
        end = p0
        begin = tl.where(program == 1, p0, begin)
        end = tl.where(program == 1, p1, end)
        begin = tl.where(program == 2, p1, begin)
        end = tl.where(program == 2, p2, end)
        begin = tl.where(program == 3, p2, begin)
        end = tl.where(program == 3, p3, end)
        begin = tl.where(program == 4, p3, begin)
        end = tl.where(program == 4, p4, end)
        begin = tl.where(program == 5, p4, begin)
        end = tl.where(program == 5, p5, end)
        lane = tl.arange(0, SUM)
        terms = tl.zeros([SUM], tl.float64)
        while begin < end:
            terms += tl.load(partial + begin + lane, mask=begin + lane < end, other=0.0)
            begin += SUM
        total = tl.sum(terms)
        if CONSTANT:
            total += tl.load(constant + program)
        tl.store(sums + program, total)
    else:
        i = (program - 6 * VALUE).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        listed = (i < bound) & (i < atoms)
        start = tl.load(entry_ptr + i, mask=listed, other=0)
        n = tl.load(entry_ptr + i + 1, mask=listed, other=0) - start
        x = tl.zeros([BLOCK], tl.float64)
        y = tl.zeros([BLOCK], tl.float64)
        z = tl.zeros([BLOCK], tl.float64)
        b = tl.zeros([BLOCK], tl.float64)
        most = tl.max(n)
        j = 0
        while j < most:
            entry = tl.load(entries + start + j, mask=j < n, other=0).to(tl.int64)
            if ROWS:
                own = (j < n) & (entry < first_b)
                at = spill + 3 * entry
                x += tl.load(at, mask=own, other=0.0).to(tl.float64)
                y += tl.load(at + 1, mask=own, other=0.0).to(tl.float64)
                z += tl.load(at + 2, mask=own, other=0.0).to(tl.float64)
            if B_ROWS:
                own = (j < n) & (entry >= first_b)
                at = spill + 2 * first_b.to(tl.int64) + entry
                b += tl.load(at, mask=own, other=0.0).to(tl.float64)
            j += 1
        owned = i < atoms
        if ROWS:
            _write(out + 3 * i, x, owned)
            _write(out + 3 * i + 1, y, owned)
            _write(out + 3 * i + 2, z, owned)
        if B_ROWS:
            _write(b_out + i, b, owned)


_terms = Launcher(_terms_kernel, _WARPS)
_atoms = Launcher(_atoms_kernel, _ATOM_WARPS)


def _run(a: Any, sums: Any, dxyz: Any, db: Any, second: bool = False) -> None:
    """Write sums of terms, and the rows that a cotangent of sums adds to atoms."""
    xyz, b, restraints = a.xyz, a.b, a.restraints
    r, counts, atoms = restraints.tensors_here(), list(restraints.counts), len(a.xyz)
    if b is None:
        counts[5] = 0
    value, rows, b_rows = sums is not None, dxyz is not None, db is not None
    dnlls = a.dnlls if rows or b_rows else xyz
    ddxyz, ddb, dtype = xyz, xyz if b is None else b, torch.float32
    if second:
        ddxyz = torch.zeros_like(xyz) if a.ddxyz is None else a.ddxyz
        ddb = torch.zeros_like(ddb) if a.ddb is None else a.ddb
    if xyz.dtype == torch.float64:
        dtype = torch.float64
    b = xyz if b is None else b
    ends, programs, first_b = [], 0, 0
    for of, count in zip(KINDS.values(), counts, strict=True):
        programs += -(-count // _BLOCK)
        first_b += of.atoms * count
        ends.append(programs)
    first_b -= 2 * counts[5]
    partial = xyz.new_empty(programs, dtype=torch.float64)
    size = 3 * first_b + 2 * counts[5] if rows or b_rows else 0
    spill = xyz.new_empty(size, dtype=dtype)
    # Sums need all kinds; gradients by xyz or b alone, their own.
    first = 0 if value or rows else ends[4]
    last = ends[5] if value or b_rows else ends[4]
    strides = (*xyz.stride(), b.stride(0), *ddxyz.stride(), ddb.stride(0), dnlls.stride(0))
    if last > first:
        dtypes = [array.dtype for array in (xyz, b, dnlls, ddxyz, ddb, spill)]
        key = (*dtypes, xyz.device, wide(atoms, *strides), wide(*counts), second, rows, b_rows)
        _terms(
            last - first, key,
            xyz, b, dnlls, ddxyz, ddb, r.index, r.ideal, r.weight, r.phase, r.period, r.log_odds,
            r.image, r.operations, spill, partial, atoms, len(r.operations), first, *counts,
            *strides, second, rows, b_rows, _BLOCK,
        )  # fmt: skip
    blocks = 6 * value + (-(-atoms // _ATOMS) if rows or b_rows else 0)
    if blocks:
        out, b_out, to = (spill if y is None else y for y in (dxyz, db, sums))
        dtypes = [array.dtype for array in (out, b_out, spill, to)]
        key = (*dtypes, xyz.device, wide(atoms, first_b), value, second, rows, b_rows)
        _atoms(
            blocks, key,
            out, b_out, spill, r.entry_ptr, r.entries, to, partial, r.constant, atoms,
            restraints.bound, first_b, *ends, value, not second, rows, b_rows, _ATOMS, _SUM,
        )  # fmt: skip


@register("geometry_nll", "triton")
def geometry_nll(a: Any, y: Any) -> None:
    if y.nlls is not None:
        _run(a, y.nlls, None, None)


@register("geometry_nll_vjp", "triton")
def geometry_nll_vjp(a: Any, y: Any) -> None:
    _run(a, None, y.dxyz, y.db)


@register("geometry_nll_vjp_vjp", "triton")
def geometry_nll_vjp_vjp(a: Any, y: Any) -> None:
    _run(a, y.ddnlls, y.dxyz, y.db, second=True)
