"""Restraints of geometry on the CPU in Numba, with the Cython kernel's order of work.

A restraint writes a row for each of its atoms, and an atom sums its own rows. Each block of
restraints has a partial sum, so the thread count changes no bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cpukern.jit import inlined, jit
from fusedops._frame.registry import register
from fusedops._host.memory import empty
from fusedops._host.threads import in_parallel
from fusedops.geometry.op import BOND_EPS, CONTACT_EPS, EITHER_HAND, NO_HAND, SHORTEST, STRAIGHT
from fusedops.geometry.plan import B_PAIRS, CONTACTS, KINDS

_BLOCK = 64
# Blocks of restraints that are worth handing to another thread.
_GRAIN = 128
_BONDS, _ANGLES, _TORSIONS, _CHIRALS = range(4)

# Each function for a kind returns f, f1 and f2 of the atoms x, and writes the gradient of q into G,
# and its derivative along v into turn. fusedops/geometry/op.py has the formulas.


@inlined
def _dot(a, b):
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


@inlined
def _cross(a, b):
    return (
        a[1] * b[2] - a[2] * b[1],
        a[2] * b[0] - a[0] * b[2],
        a[0] * b[1] - a[1] * b[0],
    )


@inlined
def _between(x, i, j):
    """Return the vector from atom i to atom j."""
    return (x[j, 0] - x[i, 0], x[j, 1] - x[i, 1], x[j, 2] - x[i, 2])


@inlined
def _direction(r, w, eps):
    """Return the length of r, its direction, and the direction's derivative along w."""
    d = math.sqrt(_dot(r, r) + eps)
    u = (r[0] / d, r[1] / d, r[2] / d)
    along = _dot(u, w)
    turn = ((w[0] - u[0] * along) / d, (w[1] - u[1] * along) / d, (w[2] - u[2] * along) / d)
    return d, u, turn


@jit
def _bond(x, v, ideal, weight, G, turn):
    d, u, du = _direction(_between(x, 0, 1), _between(v, 0, 1), BOND_EPS)
    for i in range(3):
        G[0, i], G[1, i] = -u[i], u[i]
        turn[0, i], turn[1, i] = -du[i], du[i]
    z = d - ideal
    return 0.5 * weight * z * z, weight * z, weight


@inlined
def _moved(R, o, x):
    """Return the second atom in its place by the operation o of R, from the first one."""
    return (
        R[o, 0] * x[1, 0] + R[o, 1] * x[1, 1] + R[o, 2] * x[1, 2] - x[0, 0],
        R[o, 4] * x[1, 0] + R[o, 5] * x[1, 1] + R[o, 6] * x[1, 2] - x[0, 1],
        R[o, 8] * x[1, 0] + R[o, 9] * x[1, 1] + R[o, 10] * x[1, 2] - x[0, 2],
    )


@jit
def _contact(x, v, ideal, weight, R, o, G, turn):
    r = _moved(R, o, x)
    r = (r[0] + R[o, 3], r[1] + R[o, 7], r[2] + R[o, 11])
    if ideal < 0 or _dot(r, r) + CONTACT_EPS >= ideal * ideal:
        # Its rows are zero without G and turn.
        return 0.0, 0.0, 0.0
    d, u, du = _direction(r, _moved(R, o, v), CONTACT_EPS)
    for i in range(3):
        G[0, i], turn[0, i] = -u[i], -du[i]
        G[1, i] = R[o, i] * u[0] + R[o, 4 + i] * u[1] + R[o, 8 + i] * u[2]
        turn[1, i] = R[o, i] * du[0] + R[o, 4 + i] * du[1] + R[o, 8 + i] * du[2]
    overlap = ideal - d
    square = weight * overlap * overlap
    return square * overlap * overlap, -4 * square * overlap, 12 * square


@jit
def _angle(x, v, ideal, weight, second, G, turn):
    a, b = _between(x, 1, 0), _between(x, 1, 2)
    aa, bb = _dot(a, a), _dot(b, b)
    short = aa < SHORTEST * SHORTEST or bb < SHORTEST * SHORTEST
    if short:
        aa = bb = 1.0
        a = b = (0.0, 0.0, 0.0)
    aa, bb = 1 / math.sqrt(aa), 1 / math.sqrt(bb)
    a = (a[0] * aa, a[1] * aa, a[2] * aa)
    b = (b[0] * bb, b[1] * bb, b[2] * bb)
    c = _dot(a, b)
    cosine = -STRAIGHT if c < -STRAIGHT else STRAIGHT if c > STRAIGHT else c
    square = 1 - cosine * cosine
    sine = math.sqrt(square)
    z = math.acos(cosine) - ideal
    f1 = -weight * z / sine
    f2 = weight * (1 - z * cosine / sine) / square
    if short or abs(c) > STRAIGHT:
        f1 = f2 = 0.0
    for i in range(3):
        G[0, i], G[2, i] = (b[i] - c * a[i]) * aa, (a[i] - c * b[i]) * bb
        G[1, i] = -G[0, i] - G[2, i]
    if second:
        da, db = _between(v, 1, 0), _between(v, 1, 2)
        along_a, along_b = _dot(a, da) * aa, _dot(b, db) * bb
        da = (da[0] * aa - a[0] * along_a, da[1] * aa - a[1] * along_a, da[2] * aa - a[2] * along_a)
        db = (db[0] * bb - b[0] * along_b, db[1] * bb - b[1] * along_b, db[2] * bb - b[2] * along_b)
        dc = _dot(da, b) + _dot(a, db)
        for i in range(3):
            turn[0, i] = (db[i] - dc * a[i] - c * da[i]) * aa - G[0, i] * along_a
            turn[2, i] = (da[i] - dc * b[i] - c * db[i]) * bb - G[2, i] * along_b
            turn[1, i] = -turn[0, i] - turn[2, i]
    return 0.5 * weight * z * z, f1, f2


@inlined
def _product_along(a, b, da, db):
    """Return the derivative of a cross product."""
    one, two = _cross(da, b), _cross(a, db)
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]


@jit
def _torsion(x, v, ideal, kappa, period, log_odds, second, G, turn):
    one, two, three = _between(x, 0, 1), _between(x, 1, 2), _between(x, 2, 3)
    m, n = _cross(one, two), _cross(two, three)
    mm, nn, bb = _dot(m, m), _dot(n, n), _dot(two, two)
    flat = mm * nn < SHORTEST * SHORTEST
    if flat:
        mm = nn = bb = 1.0
    b = math.sqrt(bb)
    turns = 2 * math.pi / period
    z = (0.0 if flat else math.atan2(b * _dot(one, n), _dot(m, n))) - ideal
    z -= turns * np.rint(z / turns)
    c, s = math.cos(z), math.sin(z)
    odds = 2 * kappa * c + log_odds
    t = math.tanh(0.5 * odds)
    f = kappa * (1 - c)
    # Beyond this the rest is below rounding.
    if not odds > 40:
        f -= max(-odds, 0.0) + math.log1p(math.exp(-abs(odds)))
    f1 = 0.0 if flat else kappa * s * t
    f2 = 0.0 if flat else kappa * (c * t - kappa * s * s * (1 - t * t))
    j, k = _dot(one, two) / bb, _dot(three, two) / bb
    for i in range(3):
        P, Q = b * m[i] / mm, b * n[i] / nn
        inner = j * P + k * Q
        G[0, i], G[1, i], G[2, i], G[3, i] = -P, P + inner, -inner - Q, Q
    if second:
        done, dtwo, dthree = _between(v, 0, 1), _between(v, 1, 2), _between(v, 2, 3)
        dm = _product_along(one, two, done, dtwo)
        dn = _product_along(two, three, dtwo, dthree)
        stretch = _dot(two, dtwo) / bb
        dj = (_dot(done, two) + _dot(one, dtwo)) / bb - 2 * j * stretch
        dk = (_dot(dthree, two) + _dot(three, dtwo)) / bb - 2 * k * stretch
        longer_m, longer_n = stretch - 2 * _dot(m, dm) / mm, stretch - 2 * _dot(n, dn) / nn
        for i in range(3):
            P, Q = -G[0, i], G[3, i]
            dP, dQ = b * dm[i] / mm + P * longer_m, b * dn[i] / nn + Q * longer_n
            inner = dj * P + j * dP + dk * Q + k * dQ
            turn[0, i], turn[1, i], turn[2, i], turn[3, i] = -dP, dP + inner, -inner - dQ, dQ
    return f, f1, f2


@jit
def _chiral(x, v, ideal, weight, second, G, turn):
    arms = _between(x, 0, 1), _between(x, 0, 2), _between(x, 0, 3)
    G[0] = 0.0
    for k in range(3):
        area = _cross(arms[(k + 1) % 3], arms[(k + 2) % 3])
        for i in range(3):
            G[k + 1, i] = area[i]
            G[0, i] -= area[i]
    volume = arms[0][0] * G[1, 0] + arms[0][1] * G[1, 1] + arms[0][2] * G[1, 2]
    sign = 1.0
    z = volume - ideal
    if ideal == 0:
        box = _dot(arms[0], arms[0]) * _dot(arms[1], arms[1]) * _dot(arms[2], arms[2])
        z = abs(volume) - EITHER_HAND
        sign = -1.0 if volume < 0 else 1.0
        if volume * volume <= NO_HAND * NO_HAND * box:
            sign = 0.0
    if second:
        w = _between(v, 0, 1), _between(v, 0, 2), _between(v, 0, 3)
        turn[0] = 0.0
        for k in range(3):
            p, q = (k + 1) % 3, (k + 2) % 3
            area = _product_along(arms[p], arms[q], w[p], w[q])
            for i in range(3):
                turn[k + 1, i] = area[i]
                turn[0, i] -= area[i]
    return 0.5 * weight * z * z, weight * z * sign, weight * sign * sign


@jit
def _gathered(array, index, r, x):
    """Copy the rows of a restraint's atoms into x, and return whether all of them exist."""
    for k in range(index.shape[1]):
        atom = index[r, k]
        if atom < 0 or atom >= len(array):
            return False
        for i in range(3):
            x[k, i] = array[atom, i]
    return True


@jit
def _clear(spill, r):
    for k in range(spill.shape[1]):
        for i in range(3):
            spill[r, k, i] = 0.0


@jit
def _blocks(
    low,
    high,
    xyz,
    ddxyz,
    kind,
    second,
    scale,
    wanted,
    index,
    ideal,
    weight,
    period,
    log_odds,
    image,
    operations,
    partial,
    spill,
):
    """Write the partial sums of blocks of one kind, whose arrays begin with it, and its rows."""
    x, v = np.zeros((4, 3)), np.zeros((4, 3))
    G, turn = np.zeros((4, 3)), np.zeros((4, 3))
    size = index.shape[1]
    for block in range(low, high):
        total = 0.0
        for r in range(block * _BLOCK, min((block + 1) * _BLOCK, len(index))):
            known = kind != CONTACTS or 0 <= image[r] < len(operations)
            known = known and _gathered(xyz, index, r, x)
            if not known or (second and not _gathered(ddxyz, index, r, v)):
                if wanted:
                    _clear(spill, r)
                continue
            if kind == _BONDS:
                f, f1, f2 = _bond(x, v, ideal[r], weight[r], G, turn)
            elif kind == _ANGLES:
                f, f1, f2 = _angle(x, v, ideal[r], weight[r], second, G, turn)
            elif kind == _TORSIONS:
                f, f1, f2 = _torsion(
                    x, v, ideal[r], weight[r], period[r], log_odds[r], second, G, turn
                )
            elif kind == _CHIRALS:
                f, f1, f2 = _chiral(x, v, ideal[r], weight[r], second, G, turn)
            else:
                f, f1, f2 = _contact(x, v, ideal[r], weight[r], operations, image[r], G, turn)
            if f1 == 0 and f2 == 0:
                total += 0.0 if second else f
                if wanted:
                    _clear(spill, r)
                continue
            push = 0.0
            if second:
                for k in range(size):
                    for i in range(3):
                        push += G[k, i] * v[k, i]
                f = f1 * push
            if wanted:
                for k in range(size):
                    for i in range(3):
                        row = f1 * G[k, i]
                        if second:
                            row = f2 * push * G[k, i] + f1 * turn[k, i]
                        spill[r, k, i] = scale * row
            total += f
        partial[block] = total


@jit
def _b_blocks(low, high, b, ddb, second, scale, wanted, index, weight, partial, spill):
    for block in range(low, high):
        total = 0.0
        for r in range(block * _BLOCK, min((block + 1) * _BLOCK, len(index))):
            i, j = index[r]
            z = w = 0.0
            if 0 <= i < len(b) and 0 <= j < len(b):
                z = float(b[j]) - float(b[i])
                w = float(ddb[j]) - float(ddb[i]) if second else 0.0
            total += weight[r] * z * w if second else 0.5 * weight[r] * z * z
            if wanted:
                row = scale * weight[r] * (w if second else z)
                spill[r, 0], spill[r, 1] = -row, row
        partial[block] = total


@jit
def _reduce(low, high, spill, b_spill, first_b, entry_ptr, entries, dxyz, db):
    """Sum the rows of atoms."""
    for atom in range(low, high):
        x = y = z = b = 0.0
        for place in range(entry_ptr[atom], entry_ptr[atom + 1]):
            entry = entries[place]
            if entry >= first_b:
                if len(db):
                    b += b_spill[entry - first_b]
            elif len(dxyz):
                x += spill[entry, 0]
                y += spill[entry, 1]
                z += spill[entry, 2]
        if len(dxyz):
            dxyz[atom, 0], dxyz[atom, 1], dxyz[atom, 2] = x, y, z
        if len(db):
            db[atom] = b


def _run(a: Any, dnlls: Any, sums: Any, dxyz: Any, db: Any, second: bool = False) -> None:
    """Write sums of terms, and the rows that a cotangent of sums adds to atoms."""
    xyz, b, r = a.xyz, a.b, a.restraints
    ddxyz, ddb = (a.ddxyz, a.ddb) if second else (xyz, b)
    first_b = len(r.index) - 2 * r.num_b_pairs
    spill = empty((0 if dxyz is None else first_b, 3), xyz.dtype)
    b_spill = empty((0 if db is None else len(r.index) - first_b,), xyz.dtype)
    totals = np.zeros(6) if second else r.constant.copy()
    first = entry = 0
    for kind, (of, count) in enumerate(zip(KINDS.values(), r.counts, strict=True)):
        here, span = slice(first, first + count), slice(entry, entry + count * of.atoms)
        first, entry = here.stop, span.stop
        wanted = (db if kind == B_PAIRS else dxyz) is not None
        missing = kind == B_PAIRS and b is None
        if not count or missing or (sums is None and not wanted):
            continue
        index, weight = r.index[span].reshape(count, of.atoms), r.weight[here]
        scale = 0.0 if dnlls is None else float(dnlls[kind])
        partial = np.empty(-(-count // _BLOCK))
        if kind == B_PAIRS:
            along = np.zeros_like(b) if ddb is None else ddb
            rows: Any = b_spill.reshape(-1, 2)
            work = _sharing(
                _b_blocks, b, along, second, scale, wanted, index, weight, partial, rows
            )
        else:
            along = np.zeros_like(xyz) if ddxyz is None else ddxyz
            rows = spill[span if wanted else slice(0)].reshape(-1, of.atoms, 3)
            work = _sharing(
                _blocks,
                *(xyz, along, kind, second, scale, wanted, index, r.ideal[here], weight),
                *(r.period, r.log_odds, r.image, r.operations, partial, rows),
            )
        in_parallel(work, len(partial), _GRAIN)
        totals[kind] += np.sum(partial)
    if sums is not None:
        sums[...] = totals
    bound = min(r.bound, len(xyz))
    out = np.empty((0, 3), xyz.dtype) if dxyz is None else dxyz
    b_out = np.empty(0, xyz.dtype) if db is None else db
    if len(out) or len(b_out):
        work = _sharing(_reduce, spill, b_spill, first_b, r.entry_ptr, r.entries, out, b_out)
        in_parallel(work, bound, 8 * _GRAIN)
    out[bound:] = 0
    b_out[bound:] = 0


def _sharing(work: Any, *shared: Any) -> Any:
    """Return a function of a share, whose other arguments all shares have."""
    return lambda low, high: work(low, high, *shared)


@register("geometry_nll", "numba")
def geometry_nll(a: Any, y: Any) -> None:
    if y.nlls is not None:
        _run(a, None, y.nlls, None, None)


@register("geometry_nll_vjp", "numba")
def geometry_nll_vjp(a: Any, y: Any) -> None:
    _run(a, a.dnlls, None, y.dxyz, y.db)


@register("geometry_nll_vjp_vjp", "numba")
def geometry_nll_vjp_vjp(a: Any, y: Any) -> None:
    _run(a, a.dnlls, y.ddnlls, y.dxyz, y.db, second=True)
