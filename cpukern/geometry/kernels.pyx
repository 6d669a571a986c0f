# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Restraints of geometry on the CPU: blocks of one kind, and then the rows of every atom.

A restraint writes a row for each of its atoms, and an atom sums its own rows. No two threads add to
the same sum, so the thread count changes no bit. Every term is computed in float64.
"""

from libc.math cimport M_PI, M_PI_2, cos, exp, fabs, fmax, log1p, sin, sqrt, tanh

from cpukern._cpu cimport Share, in_shares
from cpukern.arrays cimport elements, of, room

import numpy as np

from fusedops._host.memory import empty
from fusedops.geometry import op

cdef enum:
    BLOCK = 64
    BONDS = 0
    ANGLES = 1
    TORSIONS = 2
    CHIRALS = 3
    CONTACTS = 4
    B_PAIRS = 5
    ALL = 6

cdef double BOND_EPS = op.BOND_EPS, CONTACT_EPS = op.CONTACT_EPS
cdef double SHORTEST = op.SHORTEST, STRAIGHT = op.STRAIGHT
cdef double EITHER_HAND = op.EITHER_HAND, NO_HAND = op.NO_HAND
# Cosine and sine of the usual parts of a turn.
cdef double[7] STEP_COS = [1, 1, -1, -0.5, 0, cos(0.4 * M_PI), 0.5]
cdef double[7] STEP_SIN = [0, 0, 0, sqrt(0.75), 1, sin(0.4 * M_PI), sqrt(0.75)]
cdef object UINT8 = np.dtype(np.uint8)

ctypedef fused real:
    float
    double

# A restraint's term, its derivatives by a coordinate q, the gradient of q by its atoms, and the
# gradient's derivative along a tangent. fusedops/geometry/op.py has the formulas.
cdef struct Term:
    double f
    double f1
    double f2
    double[12] G
    double[12] turn

cdef struct Call:
    const void* xyz
    const void* b
    const void* dnlls
    const void* ddxyz
    const void* ddb
    bint second
    Py_ssize_t atoms
    Py_ssize_t first_block
    Py_ssize_t[7] block
    Py_ssize_t[7] restraint
    Py_ssize_t[7] entry
    const int* index
    const double* ideal
    const double* weight
    const double* phase
    const int* period
    const double* log_odds
    const int* image
    const double* operations
    Py_ssize_t images
    const long long* entry_ptr
    const int* entries
    bint rows_xyz
    bint rows_b
    void* spill
    double* partial
    void* dxyz
    void* db


cdef inline double dot(const double* a, const double* b) noexcept nogil:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


cdef inline void minus(double* out, const double* a, const double* b) noexcept nogil:
    out[0] = a[0] - b[0]
    out[1] = a[1] - b[1]
    out[2] = a[2] - b[2]


cdef inline void cross(double* out, const double* a, const double* b) noexcept nogil:
    out[0] = a[1] * b[2] - a[2] * b[1]
    out[1] = a[2] * b[0] - a[0] * b[2]
    out[2] = a[0] * b[1] - a[1] * b[0]


cdef inline void direction(
    double* u, double* turn, const double* r, const double* w, double d
) noexcept nogil:
    """Write the direction of r, of length d, and the direction's derivative along w."""
    cdef double along, inverse = 1 / d
    cdef int i
    for i in range(3):
        u[i] = r[i] * inverse
    if w != NULL:
        along = dot(u, w)
        for i in range(3):
            turn[i] = (w[i] - u[i] * along) * inverse


cdef inline double arccos(double c) noexcept nogil:
    """Return the angle of a cosine by the rational functions of fdlibm, without a call."""
    cdef bint near = fabs(c) < 0.5
    cdef double z = c * c if near else 0.5 * (1 - fabs(c)), s = c if near else sqrt(z)
    cdef double p = 3.47933107596021167570e-05, q = 7.70381505559019352791e-02
    p = 7.91534994289814532176e-04 + z * p
    p = -4.00555345006794114027e-02 + z * p
    p = 2.01212532134862925881e-01 + z * p
    p = -3.25565818622400915405e-01 + z * p
    p = 1.66666666666666657415e-01 + z * p
    q = -6.88283971605453293030e-01 + z * q
    q = 2.02094576023350569471 + z * q
    q = -2.40339491173441421878 + z * q
    s += s * z * p / (1 + z * q)
    return M_PI_2 - s if near else 2 * s if c > 0 else M_PI - 2 * s


cdef inline void bond(
    Term* t, const double* x, const double* v, bint derive, double ideal, double weight
) noexcept nogil:
    cdef double[3] r, w
    cdef double z
    cdef int i
    minus(r, x + 3, x)
    z = sqrt(dot(r, r) + BOND_EPS) - ideal
    t.f = 0.5 * weight * z * z
    if not derive:
        return
    if v != NULL:
        minus(w, v + 3, v)
    direction(t.G + 3, t.turn + 3, r, w if v != NULL else NULL, z + ideal)
    t.f1 = weight * z
    t.f2 = weight
    for i in range(3):
        t.G[i] = -t.G[3 + i]
        t.turn[i] = -t.turn[3 + i]


cdef inline void contact(
    Term* t, const double* x, const double* v, bint derive, double ideal, double weight,
    const double* operation
) noexcept nogil:
    """`operation` has three rows (R, t); NULL is the identity."""
    cdef double[3] r, w, u, turn
    cdef double overlap, square, d
    cdef int i
    if operation == NULL:
        minus(r, x + 3, x)
    else:
        for i in range(3):
            r[i] = dot(operation + 4 * i, x + 3) + operation[4 * i + 3] - x[i]
    square = dot(r, r) + CONTACT_EPS
    if ideal < 0 or square >= ideal * ideal:
        t.f = t.f1 = t.f2 = 0
        for i in range(6):
            t.G[i] = t.turn[i] = 0
        return
    d = sqrt(square)
    overlap = ideal - d
    square = weight * overlap * overlap
    t.f = square * overlap * overlap
    if not derive:
        return
    t.f1 = -4 * square * overlap
    t.f2 = 12 * square
    if v != NULL:
        minus(w, v + 3, v)
        if operation != NULL:
            for i in range(3):
                w[i] = dot(operation + 4 * i, v + 3) - v[i]
    turn[0] = turn[1] = turn[2] = 0
    direction(u, turn, r, w if v != NULL else NULL, d)
    for i in range(3):
        t.G[i] = -u[i]
        t.turn[i] = -turn[i]
        t.G[3 + i] = u[i]
        t.turn[3 + i] = turn[i]
    if operation == NULL:
        return
    for i in range(3):
        t.G[3 + i] = operation[i] * u[0] + operation[4 + i] * u[1] + operation[8 + i] * u[2]
        t.turn[3 + i] = (
            operation[i] * turn[0] + operation[4 + i] * turn[1] + operation[8 + i] * turn[2]
        )


cdef inline void angle(
    Term* t, const double* x, const double* v, bint derive, double ideal, double weight
) noexcept nogil:
    cdef double[3] a, b, da, db
    cdef double aa, bb, c, cosine, square, sine, z, along_a, along_b, dc
    cdef int i
    minus(a, x, x + 3)
    minus(b, x + 6, x + 3)
    aa = dot(a, a)
    bb = dot(b, b)
    if aa < SHORTEST * SHORTEST or bb < SHORTEST * SHORTEST:
        aa = bb = 1
        for i in range(3):
            a[i] = b[i] = 0
    aa = 1 / sqrt(aa)
    bb = 1 / sqrt(bb)
    for i in range(3):
        a[i] = a[i] * aa
        b[i] = b[i] * bb
    c = dot(a, b)
    cosine = -STRAIGHT if c < -STRAIGHT else STRAIGHT if c > STRAIGHT else c
    z = arccos(cosine) - ideal
    t.f = 0.5 * weight * z * z
    if not derive:
        return
    square = 1 - cosine * cosine
    sine = sqrt(square)
    t.f1 = -weight * z / sine
    t.f2 = weight * (1 - z * cosine / sine) / square
    if fabs(c) > STRAIGHT or (dot(a, a) == 0 and dot(b, b) == 0):
        t.f1 = t.f2 = 0
    for i in range(3):
        t.G[i] = (b[i] - c * a[i]) * aa
        t.G[6 + i] = (a[i] - c * b[i]) * bb
        t.G[3 + i] = -t.G[i] - t.G[6 + i]
    if v == NULL:
        return
    minus(da, v, v + 3)
    minus(db, v + 6, v + 3)
    along_a = dot(a, da) * aa
    along_b = dot(b, db) * bb
    for i in range(3):
        da[i] = da[i] * aa - a[i] * along_a
        db[i] = db[i] * bb - b[i] * along_b
    dc = dot(da, b) + dot(a, db)
    for i in range(3):
        t.turn[i] = (db[i] - dc * a[i] - c * da[i]) * aa - t.G[i] * along_a
        t.turn[6 + i] = (da[i] - dc * b[i] - c * db[i]) * bb - t.G[6 + i] * along_b
        t.turn[3 + i] = -t.turn[i] - t.turn[6 + i]


cdef inline void torsion(
    Term* t, const double* x, const double* v, bint derive, const double* phase, double kappa,
    int period, double log_odds
) noexcept nogil:
    """`phase` has the ideal's cosine and sine."""
    cdef double[3] one, two, three, m, n, P, Q, done, dtwo, dthree, dm, dn, other, dP, dQ
    cdef double mm, nn, bb, b, c, s, norm, turned_c, turned_s, step_c, step_s, odds, th
    cdef double j, k, stretch, dj, dk, inner
    cdef bint flat
    cdef int i
    minus(one, x + 3, x)
    minus(two, x + 6, x + 3)
    minus(three, x + 9, x + 6)
    cross(m, one, two)
    cross(n, two, three)
    mm = dot(m, m)
    nn = dot(n, n)
    bb = dot(two, two)
    flat = mm * nn < SHORTEST * SHORTEST
    if flat:
        mm = nn = bb = 1
    b = sqrt(bb)
    s = 0 if flat else b * dot(one, n)
    c = 1 if flat else dot(m, n)
    norm = 1 / sqrt(s * s + c * c)
    # Cosine and sine of the deviation from the nearest of the ideals: its cosine is the largest.
    turned_c = (c * phase[0] + s * phase[1]) * norm
    turned_s = (s * phase[0] - c * phase[1]) * norm
    c = turned_c
    s = turned_s
    if period > 1:
        step_c = STEP_COS[period] if period < 7 else cos(2 * M_PI / period)
        step_s = STEP_SIN[period] if period < 7 else sin(2 * M_PI / period)
        for i in range(1, period):
            inner = turned_c * step_c + turned_s * step_s
            turned_s = turned_s * step_c - turned_c * step_s
            turned_c = inner
            if turned_c > c:
                c = turned_c
                s = turned_s
    odds = 2 * kappa * c + log_odds
    t.f = kappa * (1 - c)
    th = 1
    # Beyond this the rest is below rounding.
    if not odds > 40:
        th = tanh(0.5 * odds)
        t.f -= fmax(-odds, 0) + log1p(exp(-fabs(odds)))
    if not derive:
        return
    t.f1 = 0 if flat else kappa * s * th
    t.f2 = 0 if flat else kappa * (c * th - kappa * s * s * (1 - th * th))
    j = dot(one, two) / bb
    k = dot(three, two) / bb
    for i in range(3):
        P[i] = b * m[i] / mm
        Q[i] = b * n[i] / nn
        inner = j * P[i] + k * Q[i]
        t.G[i] = -P[i]
        t.G[3 + i] = P[i] + inner
        t.G[6 + i] = -inner - Q[i]
        t.G[9 + i] = Q[i]
    if v == NULL:
        return
    minus(done, v + 3, v)
    minus(dtwo, v + 6, v + 3)
    minus(dthree, v + 9, v + 6)
    cross(dm, done, two)
    cross(other, one, dtwo)
    for i in range(3):
        dm[i] += other[i]
    cross(dn, dtwo, three)
    cross(other, two, dthree)
    for i in range(3):
        dn[i] += other[i]
    stretch = dot(two, dtwo) / bb
    dj = (dot(done, two) + dot(one, dtwo)) / bb - 2 * j * stretch
    dk = (dot(dthree, two) + dot(three, dtwo)) / bb - 2 * k * stretch
    mm = 1 / mm
    nn = 1 / nn
    for i in range(3):
        dP[i] = b * dm[i] * mm + P[i] * (stretch - 2 * dot(m, dm) * mm)
        dQ[i] = b * dn[i] * nn + Q[i] * (stretch - 2 * dot(n, dn) * nn)
        inner = dj * P[i] + j * dP[i] + dk * Q[i] + k * dQ[i]
        t.turn[i] = -dP[i]
        t.turn[3 + i] = dP[i] + inner
        t.turn[6 + i] = -inner - dQ[i]
        t.turn[9 + i] = dQ[i]


cdef inline void chiral(
    Term* t, const double* x, const double* v, bint derive, double ideal, double weight
) noexcept nogil:
    cdef double[9] arm, darm
    cdef double[3] other
    cdef double volume, box, z, sign = 1
    cdef int i, k
    for k in range(3):
        minus(arm + 3 * k, x + 3 * (k + 1), x)
    for k in range(3):
        cross(t.G + 3 * (k + 1), arm + 3 * ((k + 1) % 3), arm + 3 * ((k + 2) % 3))
    volume = dot(arm, t.G + 3)
    z = volume - ideal
    if ideal == 0:
        box = dot(arm, arm) * dot(arm + 3, arm + 3) * dot(arm + 6, arm + 6)
        sign = -1 if volume < 0 else 1
        z = sign * volume - EITHER_HAND
        if volume * volume <= NO_HAND * NO_HAND * box:
            sign = 0
    t.f = 0.5 * weight * z * z
    if not derive:
        return
    t.f1 = weight * z * sign
    t.f2 = weight * sign * sign
    for i in range(3):
        t.G[i] = -t.G[3 + i] - t.G[6 + i] - t.G[9 + i]
    if v == NULL:
        return
    for k in range(3):
        minus(darm + 3 * k, v + 3 * (k + 1), v)
    for k in range(3):
        cross(t.turn + 3 * (k + 1), darm + 3 * ((k + 1) % 3), arm + 3 * ((k + 2) % 3))
        cross(other, arm + 3 * ((k + 1) % 3), darm + 3 * ((k + 2) % 3))
        for i in range(3):
            t.turn[3 * (k + 1) + i] += other[i]
    for i in range(3):
        t.turn[i] = -t.turn[3 + i] - t.turn[6 + i] - t.turn[9 + i]


cdef inline int atoms_of(int kind) noexcept nogil:
    return 4 if kind == TORSIONS or kind == CHIRALS else 3 if kind == ANGLES else 2


cdef inline double restraint(
    const Call* call, const int kind, Py_ssize_t at, double scale, real* rows
) noexcept nogil:
    """Return a restraint's term, or its derivative along the tangents; write its rows, if given."""
    cdef int size = atoms_of(kind), width = 1 if kind == B_PAIRS else 3, k, i
    cdef const int* index = call.index + call.entry[kind] + size * at
    cdef const real* arrays = <const real*>(call.b if kind == B_PAIRS else call.xyz)
    cdef const real* tangents = <const real*>(call.ddb if kind == B_PAIRS else call.ddxyz)
    cdef double[12] x, v
    cdef const double* along = v if call.second else NULL
    cdef bint derive = call.second or rows != NULL
    cdef bint known = kind != CONTACTS or 0 <= call.image[at] < call.images
    cdef double ideal = call.ideal[call.restraint[kind] + at], push = 0
    cdef double weight = call.weight[call.restraint[kind] + at]
    cdef Py_ssize_t atom
    cdef Term t
    for k in range(size):
        atom = index[k]
        if not known or atom < 0 or atom >= call.atoms:
            if rows != NULL:
                for i in range(size * width):
                    rows[i] = 0
            return 0
        for i in range(width):
            x[width * k + i] = arrays[width * atom + i]
        if call.second:
            for i in range(width):
                v[width * k + i] = tangents[width * atom + i] if tangents != NULL else 0
    if kind == BONDS:
        bond(&t, x, along, derive, ideal, weight)
    elif kind == ANGLES:
        angle(&t, x, along, derive, ideal, weight)
    elif kind == TORSIONS:
        torsion(
            &t, x, along, derive, call.phase + 2 * at, weight, call.period[at], call.log_odds[at])
    elif kind == CHIRALS:
        chiral(&t, x, along, derive, ideal, weight)
    elif kind == CONTACTS:
        contact(
            &t, x, along, derive, ideal, weight,
            call.operations + 12 * <Py_ssize_t>call.image[at] if call.image[at] else NULL)
    else:
        t.f1 = weight * (x[1] - x[0])
        t.f = 0.5 * t.f1 * (x[1] - x[0])
        t.f2 = weight
        t.G[0] = -1
        t.G[1] = 1
        t.turn[0] = t.turn[1] = 0
    if along == NULL:
        if rows != NULL:
            for i in range(size * width):
                rows[i] = <real>(scale * t.f1 * t.G[i])
        return t.f
    for i in range(size * width):
        push += t.G[i] * v[i]
    if rows != NULL:
        for i in range(size * width):
            rows[i] = <real>(scale * (t.f2 * push * t.G[i] + t.f1 * t.turn[i]))
    return t.f1 * push


cdef inline double one_block(
    const Call* call, const int kind, Py_ssize_t block, real* spill
) noexcept nogil:
    """Return the sum of a block's terms, and write its rows."""
    cdef Py_ssize_t at = BLOCK * (block - call.block[kind]), b_entry = call.entry[B_PAIRS]
    cdef Py_ssize_t last = min(at + BLOCK, call.restraint[kind + 1] - call.restraint[kind])
    cdef Py_ssize_t entry = call.entry[kind] + atoms_of(kind) * at
    cdef bint wanted = call.rows_b if kind == B_PAIRS else call.rows_xyz
    cdef double scale = (<const real*>call.dnlls)[kind] if call.dnlls != NULL else 0
    cdef int step = atoms_of(kind) * (1 if kind == B_PAIRS else 3)
    cdef double total = 0
    spill += 2 * b_entry + entry if kind == B_PAIRS else 3 * entry
    while at < last:
        total += restraint[real](call, kind, at, scale, spill if wanted else NULL)
        spill += step
        at += 1
    return total


cdef void some_blocks(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Call* call = <const Call*>given
    cdef real* spill = <real*>call.spill
    cdef Py_ssize_t block
    for block in range(begin + call.first_block, end + call.first_block):
        # A kind is a constant here, for which the compiler makes loops of their own.
        if block < call.block[ANGLES]:
            call.partial[block] = one_block[real](call, BONDS, block, spill)
        elif block < call.block[TORSIONS]:
            call.partial[block] = one_block[real](call, ANGLES, block, spill)
        elif block < call.block[CHIRALS]:
            call.partial[block] = one_block[real](call, TORSIONS, block, spill)
        elif block < call.block[CONTACTS]:
            call.partial[block] = one_block[real](call, CHIRALS, block, spill)
        elif block < call.block[B_PAIRS]:
            call.partial[block] = one_block[real](call, CONTACTS, block, spill)
        else:
            call.partial[block] = one_block[real](call, B_PAIRS, block, spill)


cdef void some_atoms(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    """Sum the rows of atoms."""
    cdef const Call* call = <const Call*>given
    cdef Py_ssize_t atom, entry, b_entry = call.entry[B_PAIRS]
    cdef const real* spill = <const real*>call.spill
    cdef const real* row
    cdef real* dxyz = <real*>call.dxyz
    cdef real* db = <real*>call.db
    cdef double x, y, z, b
    cdef long long place
    for atom in range(begin, end):
        x = y = z = b = 0
        for place in range(call.entry_ptr[atom], call.entry_ptr[atom + 1]):
            entry = call.entries[place]
            if entry >= b_entry:
                if db != NULL:
                    b += spill[2 * b_entry + entry]
            elif dxyz != NULL:
                row = spill + 3 * entry
                x += row[0]
                y += row[1]
                z += row[2]
        if dxyz != NULL:
            dxyz[3 * atom] = <real>x
            dxyz[3 * atom + 1] = <real>y
            dxyz[3 * atom + 2] = <real>z
        if db != NULL:
            db[atom] = <real>b


def geometry(
    const real[:, ::1] xyz,            # IN   (N, 3)
    const real[::1] b,                 # IN   (N,), or None
    const real[::1] dnlls,             # IN   (6,), or None without gradients
    const real[:, ::1] ddxyz,          # IN   (N, 3), or None for zeros
    const real[::1] ddb,               # IN   (N,), or None for zeros
    restraints,                        # IN   `fusedops.Restraints`
    bint second,                       # IN   whether to take derivatives along ddxyz and ddb
    real[::1] sums,                    # OUT  (6,), or None
    real[:, ::1] dxyz,                 # OUT  (N, 3), or None
    real[::1] db,                      # OUT  (N,), or None
    int grain,
    threads_for,
):
    """Write sums of terms, and the rows that a cotangent of sums adds to atoms."""
    cdef Call call
    cdef Py_ssize_t atoms = xyz.shape[0], blocks, bound, i
    cdef int kind
    cdef double total
    cdef const double* constant = <const double*>elements(restraints.constant, 8)
    call.atoms = atoms
    call.second = second
    call.xyz = &xyz[0, 0] if atoms else NULL
    call.b = &b[0] if b is not None and atoms else NULL
    call.dnlls = &dnlls[0] if dnlls is not None else NULL
    call.ddxyz = &ddxyz[0, 0] if ddxyz is not None and atoms else NULL
    call.ddb = &ddb[0] if ddb is not None and atoms else NULL
    call.dxyz = &dxyz[0, 0] if dxyz is not None and atoms else NULL
    call.db = &db[0] if db is not None and atoms else NULL
    call.rows_xyz = call.dxyz != NULL
    call.rows_b = call.db != NULL
    call.block[0] = call.restraint[0] = call.entry[0] = 0
    for kind, i in enumerate(restraints.counts):
        if kind == B_PAIRS and b is None:
            i = 0
        call.block[kind + 1] = call.block[kind] + (i + BLOCK - 1) // BLOCK
        call.restraint[kind + 1] = call.restraint[kind] + i
        call.entry[kind + 1] = call.entry[kind] + i * atoms_of(kind)
    call.index = <const int*>elements(restraints.index, 4)
    call.ideal = <const double*>elements(restraints.ideal, 8)
    call.weight = <const double*>elements(restraints.weight, 8)
    call.phase = <const double*>elements(restraints.phase, 8)
    call.period = <const int*>elements(restraints.period, 4)
    call.log_odds = <const double*>elements(restraints.log_odds, 8)
    call.image = <const int*>elements(restraints.image, 4)
    call.operations = <const double*>elements(restraints.operations, 8)
    call.images = len(restraints.operations)
    call.entry_ptr = <const long long*>elements(restraints.entry_ptr, 8)
    call.entries = <const int*>elements(restraints.entries, 4)
    # Sums need all kinds; gradients by xyz or b alone, their own.
    call.first_block = 0 if sums is not None or call.rows_xyz else call.block[B_PAIRS]
    blocks = call.block[ALL if sums is not None or call.rows_b else B_PAIRS]
    bound = min(<Py_ssize_t>restraints.bound, atoms)
    i = 2 * call.entry[B_PAIRS] + call.entry[ALL] if call.rows_xyz or call.rows_b else 0
    spill = empty((i * sizeof(real),), UINT8)
    cdef bytearray partial = room(call.block[ALL] * sizeof(double))
    call.spill = elements(spill, 1)
    call.partial = <double*>of(partial)
    cdef int threads = threads_for(blocks - call.first_block, grain)
    with nogil:
        in_shares(<Share>some_blocks[real], &call, blocks - call.first_block, threads)
        if call.rows_xyz or call.rows_b:
            in_shares(<Share>some_atoms[real], &call, bound, threads)
            for i in range(bound, atoms):
                if call.dxyz != NULL:
                    dxyz[i, 0] = dxyz[i, 1] = dxyz[i, 2] = 0
                if call.db != NULL:
                    db[i] = 0
        if sums is not None:
            for kind in range(ALL):
                total = 0 if second else constant[kind]
                for i in range(call.block[kind], call.block[kind + 1]):
                    total += call.partial[i]
                sums[kind] = <real>total
