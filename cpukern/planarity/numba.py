"""Planarity restraint on the CPU in Numba: one plane at a time, with the Cython kernel's formulas.

Each block of planes has a partial sum, and each gradient has one thread that writes it, so the
thread count changes no bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cpukern.jit import jit
from fusedops._frame.registry import register
from fusedops._host.memory import together
from fusedops._host.threads import in_parallel
from fusedops.planarity.eigenvector import NO_PLANE
from fusedops.planarity.plan import MOST_ATOMS, blocks, constant, flat, inverse_square, is_scattered

# Blocks of planes that are worth handing to another thread.
_GRAIN = 1024


@jit
def _newton_eigenpair(C):
    """Return the smallest eigenpair of a covariance of trace 1 as (x, y, z, value, found).

    The Cython kernel's `newton_eigenpair` has the proof that a pair `found` is the smallest.
    """
    xx, xy, xz, yy, yz, zz = C
    minors = (yy * zz - yz * yz) + (xx * zz - xz * xz) + (xx * yy - xy * xy)
    determinant = xx * (yy * zz - yz * yz) + xy * (xz * yz - xy * zz) + xz * (xy * yz - xz * yy)
    # The characteristic polynomial rises and is concave up to its smallest root, so Newton's
    # method climbs from 0 to this root monotonically.
    value = determinant / minors
    for _ in range(4):
        value -= (((value - 1) * value + minors) * value - determinant) / (
            (3 * value - 2) * value + minors
        )
    # adj(C - value) is a multiple of n nᵀ: its column with the largest diagonal is along n.
    ax, ay, az = xx - value, yy - value, zz - value
    pxx, pyy, pzz = ay * az - yz * yz, ax * az - xz * xz, ax * ay - xy * xy
    pxy, pxz, pyz = xz * yz - xy * az, xy * yz - xz * ay, xy * xz - yz * ax
    if pxx >= pyy and pxx >= pzz:
        x, y, z = pxx, pxy, pxz
    elif pyy >= pzz:
        x, y, z = pxy, pyy, pyz
    else:
        x, y, z = pxz, pyz, pzz
    scale = 1 / math.sqrt(x * x + y * y + z * z)
    x, y, z = x * scale, y * scale, z * scale
    # One step of Newton's method on the pair itself: n -= (C - rho)⁺ (C n - rho n).
    cx, cy, cz = xx * x + xy * y + xz * z, xy * x + yy * y + yz * z, xz * x + yz * y + zz * z
    rho = cx * x + cy * y + cz * z
    rx, ry, rz = cx - rho * x, cy - rho * y, cz - rho * z
    product = minors - 2 * rho + 3 * rho * rho
    trace = 1 - 3 * rho
    spread = trace + rho
    dx = ((spread - xx) * rx - xy * ry - xz * rz) / product
    dy = ((spread - yy) * ry - xy * rx - yz * rz) / product
    dz = ((spread - zz) * rz - xz * rx - yz * ry) / product
    moved = dx * dx + dy * dy + dz * dz
    value = rho - (rx * dx + ry * dy + rz * dz)
    found = moved < 1e-12 * product and product > 1e-9 and trace > 0
    x, y, z = x - dx, y - dy, z - dz
    scale = 1.5 - 0.5 * (x * x + y * y + z * z)
    return x * scale, y * scale, z * scale, value, found


@jit
def _jacobi_eigenpair(C):
    """Return the smallest eigenpair of any finite covariance; a zero vector without a plane."""
    a = np.empty((3, 3))
    a[0, 0], a[0, 1], a[0, 2], a[1, 1], a[1, 2], a[2, 2] = C
    a[1, 0], a[2, 0], a[2, 1] = a[0, 1], a[0, 2], a[1, 2]
    v = np.eye(3)
    for _ in range(12):
        if a[0, 1] == 0 and a[0, 2] == 0 and a[1, 2] == 0:
            break
        for p, q, r in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
            if a[p, q] == 0:
                continue
            theta = (a[q, q] - a[p, p]) / (2 * a[p, q])
            t = (1.0 if theta >= 0 else -1.0) / (abs(theta) + math.sqrt(theta * theta + 1))
            c = 1 / math.sqrt(t * t + 1)
            s = t * c
            a[p, p] -= t * a[p, q]
            a[q, q] += t * a[p, q]
            a[p, q] = a[q, p] = 0.0
            left, right = a[r, p], a[r, q]
            a[r, p] = a[p, r] = c * left - s * right
            a[r, q] = a[q, r] = s * left + c * right
            for k in range(3):
                left, right = v[k, p], v[k, q]
                v[k, p] = c * left - s * right
                v[k, q] = s * left + c * right
    low = high = 0
    for k in range(1, 3):
        if a[k, k] < a[low, low]:
            low = k
        if a[k, k] >= a[high, high]:
            high = k
    middle = a[0, 0] + a[1, 1] + a[2, 2] - a[low, low] - a[high, high]
    if middle > NO_PLANE * a[high, high]:
        return v[0, low], v[1, low], v[2, low], a[low, low]
    return 0.0, 0.0, 0.0, a[low, low]


@jit
def _coordinates(xyz, i):
    """Return the coordinates of atom i in float64, or NaN if the atom doesn't exist."""
    if 0 <= i < len(xyz):
        return float(xyz[i, 0]), float(xyz[i, 1]), float(xyz[i, 2])
    return math.nan, math.nan, math.nan


@jit
def _fit(xyz, index, plane_ptr, p, weight, per_atom, weighted, r, w):
    """Gather plane p's atoms, relative to the centroid, into r and 1/σ² into w; return the fit.

    `scale` is the factor that gives the covariance trace 1. The fit is zero without a plane.
    """
    start = plane_ptr[p]
    n = plane_ptr[p + 1] - start
    # Relative to the plane's first atom: a large distance to the origin would cost digits.
    ox, oy, oz = _coordinates(xyz, index[start])
    cx = cy = cz = total = 0.0
    for a in range(n):
        w[a] = weight[start + a] if per_atom else weight[p]
        share = w[a] if weighted else 1.0
        x, y, z = _coordinates(xyz, index[start + a])
        r[a, 0], r[a, 1], r[a, 2] = x - ox, y - oy, z - oz
        cx += share * r[a, 0]
        cy += share * r[a, 1]
        cz += share * r[a, 2]
        total += share
    cx, cy, cz = cx / total, cy / total, cz / total
    xx = xy = xz = yy = yz = zz = 0.0
    for a in range(n):
        share = w[a] if weighted else 1.0
        x, y, z = r[a, 0] - cx, r[a, 1] - cy, r[a, 2] - cz
        r[a, 0], r[a, 1], r[a, 2] = x, y, z
        xx += share * x * x
        xy += share * x * y
        xz += share * x * z
        yy += share * y * y
        yz += share * y * z
        zz += share * z * z
    trace = xx + yy + zz
    scale = 1 / trace
    if not (trace > 0 and trace < math.inf and scale < math.inf):
        r[:n] = 0.0
        return 0.0, 0.0, 0.0, 0.0, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, total
    C = (xx * scale, xy * scale, xz * scale, yy * scale, yz * scale, zz * scale)
    x, y, z, value, found = _newton_eigenpair(C)
    if not found:
        x, y, z, value = _jacobi_eigenpair(C)
    return x, y, z, value, C, scale, total


@jit
def _write(out, spill, index, slot, entry, x, y, z):
    i = index[entry]
    if i < 0 or i >= len(out):
        return
    if slot[entry] < 0:
        out[i, 0], out[i, 1], out[i, 2] = x, y, z
    else:
        j = slot[entry]
        spill[j, 0], spill[j, 1], spill[j, 2] = x, y, z


@jit
def _nll_blocks(
    low,
    high,
    xyz,
    index,
    weight,
    plane_ptr,
    block_ptr,
    slot,
    per_atom,
    weighted,
    largest,
    partial,
    wanted,
    out,
    spill,
):
    r = np.empty((largest, 3))
    w = np.empty(largest)
    for b in range(low, high):
        partial[b] = 0.0
        for p in range(block_ptr[b], block_ptr[b + 1]):
            start = plane_ptr[p]
            n = plane_ptr[p + 1] - start
            x, y, z, _, _, _, _ = _fit(xyz, index, plane_ptr, p, weight, per_atom, weighted, r, w)
            mean = 0.0
            for a in range(n):
                d = r[a, 0] * x + r[a, 1] * y + r[a, 2] * z
                partial[b] += 0.5 * w[a] * d * d
                w[a] *= d
                mean += w[a]
            mean = 0.0 if weighted else mean / n
            if wanted:
                for a in range(n):
                    g = w[a] - mean
                    _write(out, spill, index, slot, start + a, g * x, g * y, g * z)


@jit
def _vjp_blocks(
    low,
    high,
    xyz,
    dgradient,
    index,
    weight,
    plane_ptr,
    block_ptr,
    slot,
    per_atom,
    weighted,
    largest,
    out,
    spill,
):
    r = np.empty((largest, 3))
    v = np.empty((largest, 3))
    w = np.empty(largest)
    t = np.empty(largest)
    for b in range(low, high):
        for p in range(block_ptr[b], block_ptr[b + 1]):
            start = plane_ptr[p]
            n = plane_ptr[p + 1] - start
            x, y, z, value, C, scale, total = _fit(
                xyz, index, plane_ptr, p, weight, per_atom, weighted, r, w
            )
            mean = mean_s = sum_t = qx = qy = qz = 0.0
            planar = x * x + y * y + z * z > 0
            for a in range(n):
                i = index[start + a]
                for k in range(3):
                    v[a, k] = dgradient[i, k] if planar and 0 <= i < len(xyz) else 0.0
                t[a] = v[a, 0] * x + v[a, 1] * y + v[a, 2] * z
                mean_s += t[a]
                mean += w[a] * (r[a, 0] * x + r[a, 1] * y + r[a, 2] * z)
            mean = 0.0 if weighted else mean / n
            mean_s = 0.0 if weighted else mean_s / n
            for a in range(n):
                g = w[a] * (r[a, 0] * x + r[a, 1] * y + r[a, 2] * z) - mean
                t[a] = w[a] * (t[a] - mean_s)
                sum_t += t[a]
                qx += t[a] * r[a, 0] + g * v[a, 0]
                qy += t[a] * r[a, 1] + g * v[a, 1]
                qz += t[a] * r[a, 2] + g * v[a, 2]
            px, py, pz = _pseudo_solve(C, value, x, y, z, qx, qy, qz)
            for a in range(n):
                share = w[a] if weighted else 1.0
                s = share * scale
                d = s * (r[a, 0] * x + r[a, 1] * y + r[a, 2] * z)
                along = (
                    t[a] - share / total * sum_t - s * (px * r[a, 0] + py * r[a, 1] + pz * r[a, 2])
                )
                _write(
                    out,
                    spill,
                    index,
                    slot,
                    start + a,
                    along * x - d * px,
                    along * y - d * py,
                    along * z - d * pz,
                )


@jit
def _pseudo_solve(C, value, x, y, z, qx, qy, qz):
    """Return (C - λ)⁺ q by the formula of `fusedops.planarity.eigenvector.pseudo_solve`."""
    xx, xy, xz, yy, yz, zz = C
    xx, yy, zz = xx - value, yy - value, zz - value
    along = qx * x + qy * y + qz * z
    qx, qy, qz = qx - along * x, qy - along * y, qz - along * z
    trace = xx + yy + zz
    product = (yy * zz - yz * yz) + (xx * zz - xz * xz) + (xx * yy - xy * xy)
    px = xx * qx + xy * qy + xz * qz
    py = xy * qx + yy * qy + yz * qz
    pz = xz * qx + yz * qy + zz * qz
    if product > NO_PLANE * trace * trace:
        return (
            (trace * qx - px) / product,
            (trace * qy - py) / product,
            (trace * qz - pz) / product,
        )
    if trace > NO_PLANE:
        square = trace * trace
        return px / square, py / square, pz / square
    return 0.0, 0.0, 0.0


@jit
def _reduce(low, high, spill, reduced, reduced_ptr, summed, out):
    for row in range(low, high):
        i = reduced[row]
        if i < len(out):
            for k in range(3):
                total = out.dtype.type(0)
                for j in range(reduced_ptr[row], reduced_ptr[row + 1]):
                    total += spill[summed[j], k]
                out[i, k] = total


def _reduce_rows(planes: Any, spill: np.ndarray, out: np.ndarray) -> None:
    in_parallel(
        lambda low, high: _reduce(
            low, high, spill, planes.reduced, planes.reduced_ptr, planes.summed, out
        ),
        len(planes.reduced),
        8 * _GRAIN,
    )
    out[planes.bound :] = 0


@register("planarity_nll", "numba")
def planarity_nll(a: Any, y: Any) -> None:
    xyz, planes, fit = a
    nll, gradient = y
    wanted = gradient is not None
    partial = np.empty(len(planes.block_ptr) - 1)
    out = gradient if wanted else np.empty((0, 3), xyz.dtype)
    spill = np.empty((planes.spill if wanted else 0, 3), xyz.dtype)
    in_parallel(
        lambda low, high: _nll_blocks(
            low,
            high,
            xyz,
            planes.index,
            planes.weight,
            planes.plane_ptr,
            planes.block_ptr,
            planes.slot,
            bool(planes.per_atom),
            fit == "weighted",
            planes.largest,
            partial,
            wanted,
            out,
            spill,
        ),
        len(partial),
        _GRAIN,
    )
    if nll is not None:
        nll[...] = planes.constant[0] + np.sum(partial)
    if wanted:
        _reduce_rows(planes, spill, gradient)


@register("planarity_gradient_vjp", "numba")
def planarity_gradient_vjp(a: Any, y: Any) -> None:
    xyz, planes, out = a.xyz, a.planes, y.dxyz
    spill = np.empty((planes.spill, 3), xyz.dtype)
    in_parallel(
        lambda low, high: _vjp_blocks(
            low,
            high,
            xyz,
            a.dgradient,
            planes.index,
            planes.weight,
            planes.plane_ptr,
            planes.block_ptr,
            planes.slot,
            bool(planes.per_atom),
            a.fit == "weighted",
            planes.largest,
            out,
            spill,
        ),
        len(planes.block_ptr) - 1,
        _GRAIN,
    )
    _reduce_rows(planes, spill, out)


@jit
def _order(index, n, start, bound):
    """Return the planes' order by size, then first atom, by counting twice."""
    planes = len(n)
    first = np.empty(planes, np.int32)
    at, by_size = np.zeros(bound + 1, np.int32), np.zeros(n.max() + 2, np.int32)
    for p in range(planes):
        first[p] = index[start[p] : start[p] + n[p]].min()
        at[first[p] + 1] += 1
        by_size[n[p] + 1] += 1
    for i in range(bound):
        at[i + 1] += at[i]
    for i in range(len(by_size) - 1):
        by_size[i + 1] += by_size[i]
    by_first, order = np.empty(planes, np.int32), np.empty(planes, np.int32)
    for p in range(planes):
        by_first[at[first[p]]] = p
        at[first[p]] += 1
    for p in by_first:
        order[by_size[n[p]]] = p
        by_size[n[p]] += 1
    return order


@jit
def _write_planes(given, sigma, per_atom, start, order, plane_ptr, index, weight):
    """Write the planes in order."""
    for r in range(len(order)):
        p, e = order[r], plane_ptr[r]
        if not per_atom:
            weight[r] = (1 / sigma[p]) ** 2
        for a in range(plane_ptr[r + 1] - e):
            index[e + a] = given[start[p] + a]
            if per_atom:
                weight[e + a] = (1 / sigma[start[p] + a]) ** 2


@jit
def _write_slots(count, alone, index, slot, reduced, reduced_ptr, summed):
    """Write the atoms without `alone` entries, a row for each of their entries, and their rows."""
    r = place = row = 0
    for i in range(len(count)):
        n = count[i]
        count[i] = -1
        if n != alone:
            reduced[r], reduced_ptr[r], count[i] = i, place, place
            place += n
            r += 1
    reduced_ptr[r] = place
    for e in range(len(index)):
        place = count[index[e]]
        slot[e] = -1
        if place >= 0:
            slot[e], summed[place], count[index[e]] = row, row, place + 1
            row += 1


@register("planes", "numba")
def packing(groups: list[tuple[np.ndarray, np.ndarray]], num_atoms: int) -> dict[str, Any] | None:
    """Return the fields and sizes of `Planes`, or None if there are none or a value is bad."""
    given, n, sigma = flat(groups)
    planes, entries = len(n), len(given)
    if not (planes and entries < MOST_ATOMS and inverse_square(sigma).min() > 0):
        return None
    if given.min() < 0 or given.max() >= num_atoms:
        return None
    per_atom = len(sigma) == entries
    start = np.cumsum(n) - n
    total = constant(n, sigma)
    order = _order(given, n, start, given.max() + 1)
    n = n[order]
    count = np.bincount(given)
    # No atom has a negative number of entries.
    alone = -1 if is_scattered(given, np.append(start, entries)) else 1
    rows = int(np.count_nonzero(count != alone))
    spill = entries - (len(count) - rows)
    int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
    index, slot, reduced, summed, weight, plane_ptr, reduced_ptr = together(
        (entries, int32),
        (entries, int32),
        (rows, int32),
        (spill, int32),
        (len(sigma), sigma.dtype),
        (planes + 1, int64),
        (rows + 1, int64),
    )
    plane_ptr[0] = 0
    np.cumsum(n, out=plane_ptr[1:])
    _write_planes(given, sigma, per_atom, start, order, plane_ptr, index, weight)
    _write_slots(count, alone, index, slot, reduced, reduced_ptr, summed)
    return {
        "index": index,
        "weight": weight,
        "plane_ptr": plane_ptr,
        "block_ptr": blocks(n),
        "slot": slot,
        "reduced": reduced,
        "reduced_ptr": reduced_ptr,
        "summed": summed,
        "constant": total,
        "bound": len(count),
        "largest": int(n.max()),
        "rows": rows,
        "spill": spill,
        "per_atom": int(per_atom),
        "num_planes": planes,
        "num_entries": entries,
    }
