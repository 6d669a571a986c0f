"""Planarity restraint on the GPU: two launches for value and gradient, of any mixture of sizes.

The first takes BLOCK planes a program, one to a lane: it gathers each plane's atoms twice (moments,
distances), solves the eigenproblem in float64 registers between, and writes by owner. An atom in
exactly one plane gets its gradient there and then; any other is summed by the second launch from
its own rows of a scratch array, in a fixed order, and so is the value. No atomics, no host
synchronisation, the same bits every time.

Bytes, once each: xyz, index, slot, 1/σ² and plane_ptr in, gradient out.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._frame.registry import register
from fusedops.planarity.eigenvector import NO_PLANE
from gpukern.atoms import atom, coordinates
from gpukern.launch import Launcher, kernel_of_any_size, wide

# Planes and warps of a program of the first launch; atoms and warps of one of the second.
_BLOCK, _WARPS = 32, 1
_ATOMS, _ATOM_WARPS = 128, 4
# Atoms whose loads are in flight together.
_UNROLL = 3
# Block sums that the second launch adds up at a time. Beside MANY atoms it takes fewer, since the
# sum's registers would slow down the atoms' programs.
_SUM, _SUM_BESIDE, _MANY = 2048, 1024, 2**20
_TINY = tl.constexpr(NO_PLANE)


@triton.jit
def _weight(weight, own, entry, active, PER_ATOM: tl.constexpr):
    """Return 1/σ² of entries: their own, or their plane's."""
    if PER_ATOM:
        own = tl.load(weight + entry, mask=active, other=0.0)
    return own


@triton.jit
def _inverse(x):
    """Return 1 / x within float32's range: two steps of Newton's method beat a division."""
    y = (1.0 / x.to(tl.float32)).to(tl.float64)
    y += y * (1 - x * y)
    return y + y * (1 - x * y)


@triton.jit
def _newton(xx, xy, xz, yy, yz, zz):
    """Return the smallest eigenpair of covariances of trace 1, and whether it was found.

    `newton_eigenpair` of cpukern/planarity/kernels.pyx proves that a pair found is the smallest.
    """
    minors = (yy * zz - yz * yz) + (xx * zz - xz * xz) + (xx * yy - xy * xy)
    determinant = xx * (yy * zz - yz * yz) + xy * (xz * yz - xy * zz) + xz * (xy * yz - xz * yy)
    safe = tl.where(minors > 1e-9, minors, 1.0)
    # The characteristic polynomial rises and is concave up to its smallest root, so that Newton's
    # method from 0 climbs to it monotonically; a slope in float32 serves.
    value = determinant * _inverse(safe)
    for _ in tl.static_range(4):
        slope = ((3 * value - 2) * value + safe).to(tl.float32)
        rise = ((value - 1) * value + safe) * value - determinant
        value -= rise * (1.0 / tl.where(slope == 0, 1.0, slope)).to(tl.float64)
    # adj(C - value) is a multiple of n nᵀ: its column with the largest diagonal is n.
    ax = xx - value
    ay = yy - value
    az = zz - value
    pxx = ay * az - yz * yz
    pyy = ax * az - xz * xz
    pzz = ax * ay - xy * xy
    pxy = xz * yz - xy * az
    pxz = xy * yz - xz * ay
    pyz = xy * xz - yz * ax
    first = (pxx >= pyy) & (pxx >= pzz)
    second = pyy >= pzz
    x = tl.where(first, pxx, tl.where(second, pxy, pxz))
    y = tl.where(first, pxy, tl.where(second, pyy, pyz))
    z = tl.where(first, pxz, tl.where(second, pyz, pzz))
    square = x * x + y * y + z * z
    known = square > 1e-30
    square = tl.where(known, square, 1.0)
    scale = tl.rsqrt(square.to(tl.float32)).to(tl.float64)
    scale *= 1.5 - 0.5 * square * scale * scale
    scale *= 1.5 - 0.5 * square * scale * scale
    x *= scale
    y *= scale
    z *= scale
    # One step of Newton's method on the pair itself: n -= (C - rho)⁺ (C n - rho n).
    cx = xx * x + xy * y + xz * z
    cy = xy * x + yy * y + yz * z
    cz = xz * x + yz * y + zz * z
    rho = cx * x + cy * y + cz * z
    rx = cx - rho * x
    ry = cy - rho * y
    rz = cz - rho * z
    product = minors - 2 * rho + 3 * rho * rho
    trace = 1 - 3 * rho
    usable = known & (product > 1e-9) & (trace > 0)
    scale = _inverse(tl.where(usable, product, 1.0))
    spread = trace + rho
    dx = ((spread - xx) * rx - xy * ry - xz * rz) * scale
    dy = ((spread - yy) * ry - xy * rx - yz * rz) * scale
    dz = ((spread - zz) * rz - xz * rx - yz * ry) * scale
    moved = dx * dx + dy * dy + dz * dz
    value = rho - (rx * dx + ry * dy + rz * dz)
    found = usable & (moved < 1e-12 * product)
    x -= dx
    y -= dy
    z -= dz
    scale = 1.5 - 0.5 * (x * x + y * y + z * z)
    return x * scale, y * scale, z * scale, value, found


@triton.jit
def _rotate(app, aqq, apq, arp, arq, vxp, vyp, vzp, vxq, vyq, vzq):
    """Zero apq by a Jacobi rotation; r is the third axis, the v are eigenvector columns."""
    zero = apq == 0
    theta = (aqq - app) / tl.where(zero, 1.0, 2 * apq)
    t = tl.where(theta >= 0, 1.0, -1.0) / (tl.abs(theta) + tl.sqrt(theta * theta + 1))
    t = tl.where(zero, 0.0, t)
    c = 1 / tl.sqrt(t * t + 1)
    s = t * c
    return (
        app - t * apq, aqq + t * apq, c * arp - s * arq, s * arp + c * arq,
        c * vxp - s * vxq, c * vyp - s * vyq, c * vzp - s * vzq,
        s * vxp + c * vxq, s * vyp + c * vyq, s * vzp + c * vzq,
    )  # fmt: skip


@triton.jit
def _jacobi(xx, xy, xz, yy, yz, zz):
    """Return the smallest eigenpairs of any covariances; zero vectors where there is no plane."""
    zero = tl.zeros_like(xx)
    ux, uy, uz = zero + 1, zero, zero
    vx, vy, vz = zero, zero + 1, zero
    wx, wy, wz = zero, zero, zero + 1
    for _ in range(8):
        xx, yy, xz, yz, ux, uy, uz, vx, vy, vz = _rotate(xx, yy, xy, xz, yz, ux, uy, uz, vx, vy, vz)
        xy = zero
        xx, zz, xy, yz, ux, uy, uz, wx, wy, wz = _rotate(xx, zz, xz, xy, yz, ux, uy, uz, wx, wy, wz)
        xz = zero
        yy, zz, xy, xz, vx, vy, vz, wx, wy, wz = _rotate(yy, zz, yz, xy, xz, vx, vy, vz, wx, wy, wz)
        yz = zero
    low = tl.minimum(tl.minimum(xx, yy), zz)
    high = tl.maximum(tl.maximum(xx, yy), zz)
    middle = xx + yy + zz - low - high
    planar = middle > high * _TINY
    first = xx == low
    second = yy == low
    x = tl.where(first, ux, tl.where(second, vx, wx))
    y = tl.where(first, uy, tl.where(second, vy, wy))
    z = tl.where(first, uz, tl.where(second, vz, wz))
    return tl.where(planar, x, 0.0), tl.where(planar, y, 0.0), tl.where(planar, z, 0.0), low


@triton.jit
def _fit(
    xyz, index, weight, start, n, plane, most, atoms, row_stride, column_stride,
    WEIGHTED: tl.constexpr, PER_ATOM: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Fit planes: return an origin, the centroid from there, normal, covariance of trace 1.

    The origin is an atom, since far coordinates would cost digits, and the heaviest atom: its own
    share of the trace bounds the terms that cancel when the moments are centred.
    """
    live = n > 0
    first = start
    if WEIGHTED and PER_ATOM:
        heaviest = tl.zeros(n.shape, tl.float64)
        a = 0
        while a < most:
            for _repeat in tl.static_range(UNROLL):
                w = _weight(weight, heaviest, start + a, a < n, PER_ATOM)
                first = tl.where(w > heaviest, start + a, first)
                heaviest = tl.maximum(heaviest, w)
                a += 1
    i, inside = atom(index, first, live, atoms)
    ox, oy, oz = coordinates(xyz, i, inside, row_stride, column_stride, float("nan"))
    zero = tl.zeros_like(ox)
    ox = tl.where(live, ox, 0.0)
    oy = tl.where(live, oy, 0.0)
    oz = tl.where(live, oz, 0.0)
    own = zero
    if not PER_ATOM:
        own = tl.load(weight + plane, mask=live, other=0.0)
    total, sx, sy, sz = zero, zero, zero, zero
    sum_w, wx, wy, wz = zero, zero, zero, zero
    xx, xy, xz, yy, yz, zz = zero, zero, zero, zero, zero, zero
    a = 0
    while a < most:
        for _repeat in tl.static_range(UNROLL):
            active = a < n
            i, inside = atom(index, start + a, active, atoms)
            x, y, z = coordinates(xyz, i, inside, row_stride, column_stride, float("nan"))
            x = tl.where(active, x - ox, 0.0)
            y = tl.where(active, y - oy, 0.0)
            z = tl.where(active, z - oz, 0.0)
            w = _weight(weight, own, start + a, active, PER_ATOM)
            share = tl.where(active, 1.0, 0.0).to(tl.float64)
            if WEIGHTED:
                share = tl.where(active, w, 0.0)
            total += share
            sx += share * x
            sy += share * y
            sz += share * z
            xx += share * x * x
            xy += share * x * y
            xz += share * x * z
            yy += share * y * y
            yz += share * y * z
            zz += share * z * z
            sum_w += w
            wx += w * x
            wy += w * y
            wz += w * z
            a += 1
    total = tl.where(live, total, 1.0)
    if WEIGHTED:
        scale = 1 / total
    else:
        scale = _inverse(total)
    cx = sx * scale
    cy = sy * scale
    cz = sz * scale
    xx -= sx * cx
    xy -= sx * cy
    xz -= sx * cz
    yy -= sy * cy
    yz -= sy * cz
    zz -= sz * cz
    trace = xx + yy + zz
    # NaN and Inf fail this, and so do atoms that are all in one point.
    usable = live & (trace > 0) & (trace < float("inf"))
    scale = tl.where(usable, 1 / tl.where(usable, trace, 1.0), 0.0)
    usable = usable & (scale < float("inf"))
    scale = tl.where(usable, scale, 0.0)
    # A covariance that is easy to solve stands in where a plane has none.
    xx = tl.where(usable, xx * scale, 0.6)
    xy = tl.where(usable, xy * scale, 0.0)
    xz = tl.where(usable, xz * scale, 0.0)
    yy = tl.where(usable, yy * scale, 0.4)
    yz = tl.where(usable, yz * scale, 0.0)
    zz = tl.where(usable, zz * scale, 0.0)
    nx, ny, nz, value, found = _newton(xx, xy, xz, yy, yz, zz)
    if tl.min(found.to(tl.int32)) == 0:
        jx, jy, jz, low = _jacobi(xx, xy, xz, yy, yz, zz)
        nx = tl.where(found, nx, jx)
        ny = tl.where(found, ny, jy)
        nz = tl.where(found, nz, jz)
        value = tl.where(found, value, low)
    nx = tl.where(usable, nx, 0.0)
    ny = tl.where(usable, ny, 0.0)
    nz = tl.where(usable, nz, 0.0)
    mean = zero
    if PER_ATOM and not WEIGHTED:
        # The mean of w d is zero with one weight for all, and about the weighted centroid.
        mx = wx - sum_w * cx
        my = wy - sum_w * cy
        mz = wz - sum_w * cz
        mean = tl.where(usable, mx * nx + my * ny + mz * nz, 0.0) / total
    return (
        ox, oy, oz, cx, cy, cz, nx, ny, nz, value, xx, xy, xz, yy, yz, zz,
        scale, total, own, mean, usable,
    )  # fmt: skip


@triton.jit
def _write(out, spill, slot, entry, i, mask, x, y, z):
    """Store the rows of atoms i: into the output, or into the spilled rows of a shared atom."""
    j = tl.load(slot + entry, mask=mask, other=-1)
    alone = mask & (j < 0)
    shared = mask & (j >= 0)
    at = out + 3 * i.to(tl.int64)
    tl.store(at, x, mask=alone)
    tl.store(at + 1, y, mask=alone)
    tl.store(at + 2, z, mask=alone)
    at = spill + 3 * j.to(tl.int64)
    tl.store(at, x, mask=shared)
    tl.store(at + 1, y, mask=shared)
    tl.store(at + 2, z, mask=shared)


@kernel_of_any_size
def _nll_kernel(
    xyz, index, weight, plane_ptr, slot, out, spill, partial, planes, atoms,
    row_stride, column_stride,
    WEIGHTED: tl.constexpr, PER_ATOM: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    plane = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = plane < planes
    start = tl.load(plane_ptr + plane, mask=there, other=0)
    n = tl.load(plane_ptr + plane + 1, mask=there, other=0) - start
    most = tl.max(n)
    ox, oy, oz, cx, cy, cz, nx, ny, nz, _, _, _, _, _, _, _, _, _, own, mean, usable = _fit(
        xyz, index, weight, start, n, plane, most, atoms, row_stride, column_stride,
        WEIGHTED, PER_ATOM, UNROLL,
    )  # fmt: skip
    total = tl.zeros_like(mean)
    a = 0
    while a < most:
        for _repeat in tl.static_range(UNROLL):
            active = a < n
            i, inside = atom(index, start + a, active, atoms)
            x, y, z = coordinates(xyz, i, inside, row_stride, column_stride, float("nan"))
            d = (x - ox - cx) * nx + (y - oy - cy) * ny + (z - oz - cz) * nz
            d = tl.where(active & usable, d, 0.0)
            w = _weight(weight, own, start + a, active, PER_ATOM)
            total += 0.5 * w * d * d
            if WANTED:
                g = w * d - mean
                _write(out, spill, slot, start + a, i, inside, g * nx, g * ny, g * nz)
            a += 1
    tl.store(partial + program, tl.sum(total))


@kernel_of_any_size
def _gradient_vjp_kernel(
    xyz, vector, index, weight, plane_ptr, slot, out, spill, planes, atoms,
    row_stride, column_stride, vector_row, vector_column,
    WEIGHTED: tl.constexpr, PER_ATOM: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    # The formulas are derived at fusedops.planarity.op._gradient_vjp_formula.
    plane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = plane < planes
    start = tl.load(plane_ptr + plane, mask=there, other=0)
    n = tl.load(plane_ptr + plane + 1, mask=there, other=0) - start
    most = tl.max(n)
    (
        ox, oy, oz, cx, cy, cz, nx, ny, nz, value, xx, xy, xz, yy, yz, zz,
        scale, total, own, mean, usable,
    ) = _fit(
        xyz, index, weight, start, n, plane, most, atoms, row_stride, column_stride,
        WEIGHTED, PER_ATOM, UNROLL,
    )  # fmt: skip
    planar = usable & (nx * nx + ny * ny + nz * nz > 0)
    mean_s = tl.zeros_like(mean)
    if not WEIGHTED:
        a = 0
        while a < most:
            for _repeat in tl.static_range(UNROLL):
                active = planar & (a < n)
                i, inside = atom(index, start + a, active, atoms)
                vx, vy, vz = coordinates(vector, i, inside, vector_row, vector_column, float("nan"))
                mean_s += tl.where(inside, vx * nx + vy * ny + vz * nz, 0.0)
                a += 1
        mean_s = mean_s / total
    sum_t, qx, qy, qz = (
        tl.zeros_like(mean), tl.zeros_like(mean), tl.zeros_like(mean), tl.zeros_like(mean),
    )  # fmt: skip
    a = 0
    while a < most:
        for _repeat in tl.static_range(UNROLL):
            active = planar & (a < n)
            i, inside = atom(index, start + a, active, atoms)
            x, y, z = coordinates(xyz, i, inside, row_stride, column_stride, float("nan"))
            vx, vy, vz = coordinates(vector, i, inside, vector_row, vector_column, float("nan"))
            x = tl.where(inside, x - ox - cx, 0.0)
            y = tl.where(inside, y - oy - cy, 0.0)
            z = tl.where(inside, z - oz - cz, 0.0)
            vx = tl.where(inside, vx, 0.0)
            vy = tl.where(inside, vy, 0.0)
            vz = tl.where(inside, vz, 0.0)
            w = _weight(weight, own, start + a, active, PER_ATOM)
            g = w * (x * nx + y * ny + z * nz) - mean
            t = tl.where(inside, w * (vx * nx + vy * ny + vz * nz - mean_s), 0.0)
            sum_t += t
            qx += t * x + g * vx
            qy += t * y + g * vy
            qz += t * z + g * vz
            a += 1
    # p = (C - λ)⁺ q; fusedops.planarity.eigenvector.pseudo_solve has the formula.
    xx -= value
    yy -= value
    zz -= value
    along = qx * nx + qy * ny + qz * nz
    qx -= along * nx
    qy -= along * ny
    qz -= along * nz
    trace = xx + yy + zz
    product = (yy * zz - yz * yz) + (xx * zz - xz * xz) + (xx * yy - xy * xy)
    regular = product > trace * _TINY * trace
    single = trace > _TINY
    px = xx * qx + xy * qy + xz * qz
    py = xy * qx + yy * qy + yz * qz
    pz = xz * qx + yz * qy + zz * qz
    by_product = 1 / tl.where(regular, product, 1.0)
    by_square = tl.where(single, 1 / tl.where(single, trace * trace, 1.0), 0.0)
    px = tl.where(regular, (trace * qx - px) * by_product, px * by_square)
    py = tl.where(regular, (trace * qy - py) * by_product, py * by_square)
    pz = tl.where(regular, (trace * qz - pz) * by_product, pz * by_square)
    a = 0
    while a < most:
        for _repeat in tl.static_range(UNROLL):
            active = a < n
            i, inside = atom(index, start + a, active, atoms)
            read = inside & planar
            x, y, z = coordinates(xyz, i, read, row_stride, column_stride, float("nan"))
            vx, vy, vz = coordinates(vector, i, read, vector_row, vector_column, float("nan"))
            x = tl.where(read, x - ox - cx, 0.0)
            y = tl.where(read, y - oy - cy, 0.0)
            z = tl.where(read, z - oz - cz, 0.0)
            w = _weight(weight, own, start + a, active, PER_ATOM)
            share = tl.full(mean.shape, 1.0, tl.float64)
            if WEIGHTED:
                share = w
            t = tl.where(read, w * (vx * nx + vy * ny + vz * nz - mean_s), 0.0)
            turn = share * scale
            d = turn * (x * nx + y * ny + z * nz)
            along = t - share / total * sum_t - turn * (px * x + py * y + pz * z)
            along = tl.where(read, along, 0.0)
            _write(
                out, spill, slot, start + a, i, inside,
                along * nx - d * px, along * ny - d * py, along * nz - d * pz,
            )  # fmt: skip
            a += 1


@kernel_of_any_size
def _reduce_kernel(
    out, spill, reduced, reduced_ptr, summed, nll, partial, constant, atoms, parts, rows, bound,
    VALUE: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Sum the rows, if any, of every other atom; the first program sums the value meanwhile."""
    program = tl.program_id(0)
    if VALUE and program == 0:
        lane = tl.arange(0, SUM)
        total = tl.zeros([SUM], tl.float64)
        at = 0
        while at < parts:
            total += tl.load(partial + at + lane, mask=at + lane < parts, other=0.0)
            at += SUM
        tl.store(nll, tl.sum(total) + tl.load(constant))
    else:
        row = (program - VALUE).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        listed = row < rows
        i = tl.load(reduced + row, mask=listed, other=0).to(tl.int64)
        # After the listed atoms come atoms that no plane has an index for.
        i = tl.where(listed, i, bound + row - rows)
        start = tl.load(reduced_ptr + row, mask=listed, other=0)
        n = tl.load(reduced_ptr + row + 1, mask=listed, other=0) - start
        x = tl.zeros([BLOCK], tl.float64)
        y = tl.zeros([BLOCK], tl.float64)
        z = tl.zeros([BLOCK], tl.float64)
        most = tl.max(n)
        j = 0
        while j < most:
            # Most shared atoms lie in two planes.
            for _repeat in tl.static_range(2):
                shared = tl.load(summed + start + j, mask=j < n, other=0).to(tl.int64)
                at = spill + 3 * shared
                x += tl.load(at, mask=j < n, other=0.0).to(tl.float64)
                y += tl.load(at + 1, mask=j < n, other=0.0).to(tl.float64)
                z += tl.load(at + 2, mask=j < n, other=0.0).to(tl.float64)
                j += 1
        owned = i < atoms
        tl.store(out + 3 * i, x, mask=owned)
        tl.store(out + 3 * i + 1, y, mask=owned)
        tl.store(out + 3 * i + 2, z, mask=owned)


_nll = Launcher(_nll_kernel, _WARPS)
_gradient_vjp = Launcher(_gradient_vjp_kernel, _WARPS)
_reduce = Launcher(_reduce_kernel, _ATOM_WARPS)


def _key(xyz: Any, strides: tuple[int, ...], *flags: Any) -> tuple[Any, ...]:
    return xyz.dtype, xyz.device, wide(xyz.shape[0], *strides), *flags


def _spill(xyz: Any, planes: Any) -> Any:
    """Return memory for the rows of shared atoms, of the digits that the gradient has at most."""
    dtype = torch.float64 if xyz.dtype == torch.float64 else torch.float32
    return xyz.new_empty(3 * planes.spill, dtype=dtype)


@register("planarity_nll", "triton")
def planarity_nll(a: Any, y: Any) -> None:
    xyz, planes, fit = a
    nll, gradient = y
    p = planes.tensors_here()
    atoms, strides = xyz.shape[0], xyz.stride()
    weighted, per_atom = fit == "weighted", bool(planes.per_atom)
    value, wanted = nll is not None, gradient is not None
    programs = -(-planes.num_planes // _BLOCK)
    rows = planes.rows if wanted else 0
    others = rows + max(0, atoms - planes.bound) if wanted else 0
    partial = xyz.new_empty(programs, dtype=torch.float64)
    spill = _spill(xyz, planes) if wanted else partial
    out = gradient if wanted else partial
    if programs:
        _nll(
            programs, _key(xyz, strides, weighted, per_atom, wanted),
            xyz, p.index, p.weight, p.plane_ptr, p.slot, out, spill, partial, planes.num_planes,
            atoms, *strides, weighted, per_atom, wanted, _BLOCK, _UNROLL,
        )  # fmt: skip
    if others or value:
        sums = _SUM_BESIDE if others > _MANY else _SUM
        _reduce(
            -(-others // _ATOMS) + value, _key(xyz, strides, value, wanted, sums),
            out, spill, p.reduced, p.reduced_ptr, p.summed, nll if value else partial, partial,
            p.constant, atoms, programs, rows, planes.bound, value, _ATOMS, sums,
        )  # fmt: skip


@register("planarity_gradient_vjp", "triton")
def planarity_gradient_vjp(a: Any, y: Any) -> None:
    xyz, dgradient, planes, fit = a
    out = y.dxyz
    p = planes.tensors_here()
    atoms, strides = xyz.shape[0], (*xyz.stride(), *dgradient.stride())
    weighted, per_atom = fit == "weighted", bool(planes.per_atom)
    programs = -(-planes.num_planes // _BLOCK)
    others = planes.rows + max(0, atoms - planes.bound)
    spill = _spill(xyz, planes)
    if programs:
        _gradient_vjp(
            programs, _key(xyz, strides, weighted, per_atom, dgradient.dtype),
            xyz, dgradient, p.index, p.weight, p.plane_ptr, p.slot, out, spill, planes.num_planes,
            atoms, *strides, weighted, per_atom, _BLOCK, _UNROLL,
        )  # fmt: skip
    if others:
        _reduce(
            -(-others // _ATOMS), _key(xyz, strides, False, True, _SUM),
            out, spill, p.reduced, p.reduced_ptr, p.summed, spill, spill, p.constant, atoms,
            0, planes.rows, planes.bound, False, _ATOMS, _SUM,
        )  # fmt: skip
