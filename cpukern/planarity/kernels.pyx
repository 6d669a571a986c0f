# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Planarity restraint on the CPU: sixteen planes of one size at a time, one to a vector lane.

A block is gathered once into scratch and fitted in float64. An atom in exactly one plane gets its
gradient from this plane, any other atom from the sum over its own rows of `spill`. No two threads
add to the same sum, so the thread count changes no bit.
"""

from libc.math cimport NAN, fabs, log, sqrt
from libc.string cimport memset

from cpukern._cpu cimport Share, in_shares
from cpukern.arrays cimport elements, of, room

import numpy as np

from fusedops._host.memory import empty, together

cdef enum:
    LANES = 16
    X = 0
    Y = LANES
    Z = 2 * LANES
    W = 3 * LANES
    T = 4 * LANES
    ROW = 5 * LANES

ctypedef fused real:
    float
    double

ctypedef fused integer:
    int
    long long

cdef struct Eigenpair:
    double x
    double y
    double z
    double value
    bint found

# The result of the fit, one plane to a lane: C and its eigenvalue are scaled to a trace of 1.
cdef struct Block:
    int planes
    int atoms
    Py_ssize_t start[LANES]
    double total_weight[LANES]
    double scale[LANES]
    double xx[LANES]
    double xy[LANES]
    double xz[LANES]
    double yy[LANES]
    double yz[LANES]
    double zz[LANES]
    double nx[LANES]
    double ny[LANES]
    double nz[LANES]
    double value[LANES]


cdef inline Eigenpair newton_eigenpair(
    double xx, double xy, double xz, double yy, double yz, double zz
) noexcept nogil:
    """Find the smallest eigenpair of a covariance of trace 1; not `found` if that is hard.

    With r = C n - rho n, C - rho is [0 rᵀ; r B] in a basis of n and its plane, tr B = `trace` and
    det B = `product` + |r|². If both are positive, so are B's eigenvalues, of which the smaller is
    g ≥ product / trace. C's eigenvalues interlace with rho + B's: λ₁ ≤ rho and λ₂ ≥ rho + g, so n
    belongs to the smallest (for the largest `product` is positive too, but `trace` is not). As
    |r| ≤ |d|, |d|² < 1e-12 product leaves the step an error of |r| |d|² / g < 1e-18; rounding adds
    ε / g.
    """
    cdef Eigenpair pair
    cdef double minors, determinant, value, ax, ay, az, pxx, pyy, pzz, pxy, pxz, pyz
    cdef double x, y, z, scale, cx, cy, cz, rho, rx, ry, rz, trace, product, dx, dy, dz, moved
    cdef bint first, second
    minors = (yy * zz - yz * yz) + (xx * zz - xz * xz) + (xx * yy - xy * xy)
    determinant = (
        xx * (yy * zz - yz * yz) + xy * (xz * yz - xy * zz) + xz * (xy * yz - xz * yy)
    )
    # The characteristic polynomial rises and is concave up to its smallest root, so Newton's method
    # climbs from 0 to this root monotonically.
    value = determinant / minors
    value -= (((value - 1) * value + minors) * value - determinant) / (
        (3 * value - 2) * value + minors)
    value -= (((value - 1) * value + minors) * value - determinant) / (
        (3 * value - 2) * value + minors)
    value -= (((value - 1) * value + minors) * value - determinant) / (
        (3 * value - 2) * value + minors)
    value -= (((value - 1) * value + minors) * value - determinant) / (
        (3 * value - 2) * value + minors)
    # adj(C - value) is a multiple of n nᵀ: its column with the largest diagonal is along n.
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
    x = pxx if first else (pxy if second else pxz)
    y = pxy if first else (pyy if second else pyz)
    z = pxz if first else (pyz if second else pzz)
    scale = 1 / sqrt(x * x + y * y + z * z)
    x = x * scale
    y = y * scale
    z = z * scale
    # One step of Newton's method on the pair itself: n -= (C - rho)⁺ (C n - rho n).
    cx = xx * x + xy * y + xz * z
    cy = xy * x + yy * y + yz * z
    cz = xz * x + yz * y + zz * z
    rho = cx * x + cy * y + cz * z
    rx = cx - rho * x
    ry = cy - rho * y
    rz = cz - rho * z
    trace = 1 - 3 * rho
    product = minors - 2 * rho + 3 * rho * rho
    scale = 1 / product
    dx = ((trace + rho - xx) * rx - xy * ry - xz * rz) * scale
    dy = ((trace + rho - yy) * ry - xy * rx - yz * rz) * scale
    dz = ((trace + rho - zz) * rz - xz * rx - yz * ry) * scale
    moved = dx * dx + dy * dy + dz * dz
    x = x - dx
    y = y - dy
    z = z - dz
    scale = 1.5 - 0.5 * (x * x + y * y + z * z)
    pair.x = x * scale
    pair.y = y * scale
    pair.z = z * scale
    pair.value = rho - (rx * dx + ry * dy + rz * dz)
    pair.found = (moved < 1e-12 * product) & (product > 1e-9) & (trace > 0)
    return pair


cdef inline void rotate(double* a, double* v, int p, int q, int r) noexcept nogil:
    """Zero a[p, q] of the symmetric `a` by a Jacobi rotation, and rotate the columns of `v` too."""
    cdef double apq = a[3 * p + q], theta, t, c, s, left, right
    cdef int k
    if apq == 0:
        return
    theta = (a[4 * q] - a[4 * p]) / (2 * apq)
    t = (1 if theta >= 0 else -1) / (fabs(theta) + sqrt(theta * theta + 1))
    c = 1 / sqrt(t * t + 1)
    s = t * c
    a[4 * p] -= t * apq
    a[4 * q] += t * apq
    a[3 * p + q] = a[3 * q + p] = 0
    left = a[3 * r + p]
    right = a[3 * r + q]
    a[3 * r + p] = a[3 * p + r] = c * left - s * right
    a[3 * r + q] = a[3 * q + r] = s * left + c * right
    for k in range(3):
        left = v[3 * k + p]
        right = v[3 * k + q]
        v[3 * k + p] = c * left - s * right
        v[3 * k + q] = s * left + c * right


cdef Eigenpair jacobi_eigenpair(
    double xx, double xy, double xz, double yy, double yz, double zz, double no_plane
) noexcept nogil:
    """Find the smallest eigenpair of any finite covariance; a zero vector without a plane."""
    cdef double[9] a
    cdef double[9] v
    cdef int sweep, low = 0, high = 0, k
    cdef double middle
    cdef Eigenpair pair
    a[0] = xx
    a[4] = yy
    a[8] = zz
    a[1] = a[3] = xy
    a[2] = a[6] = xz
    a[5] = a[7] = yz
    for k in range(9):
        v[k] = 0
    v[0] = v[4] = v[8] = 1
    for sweep in range(12):
        if fabs(a[1]) + fabs(a[2]) + fabs(a[5]) == 0:
            break
        rotate(a, v, 0, 1, 2)
        rotate(a, v, 0, 2, 1)
        rotate(a, v, 1, 2, 0)
    for k in range(1, 3):
        if a[4 * k] < a[4 * low]:
            low = k
        if a[4 * k] >= a[4 * high]:
            high = k
    middle = a[0] + a[4] + a[8] - a[4 * low] - a[4 * high]
    pair.found = middle > no_plane * a[4 * high]
    pair.x = v[low] if pair.found else 0
    pair.y = v[3 + low] if pair.found else 0
    pair.z = v[6 + low] if pair.found else 0
    pair.value = a[4 * low]
    return pair


cdef void fit_block(
    const real* xyz,
    Py_ssize_t atoms,
    const int* index,
    const double* weight,
    bint per_atom,
    bint weighted,
    const long long* plane_ptr,
    Py_ssize_t first,
    int planes,
    double* scratch,
    double no_plane,
    Block* block,
) noexcept nogil:
    """Gather a block's atoms into `scratch` as x, y, z from the centroid, and fit their planes.

    Atom a has a row, `scratch[ROW * a:]`: LANES values each of x, y, z, 1/σ² and a spare one.
    """
    cdef int n = <int>(plane_ptr[first + 1] - plane_ptr[first])
    cdef double[LANES] total, sx, sy, sz, xx, xy, xz, yy, yz, zz, nx, ny, nz, value
    cdef double[LANES] scale
    cdef bint[LANES] found
    cdef double share, trace, ox, oy, oz
    cdef double* row
    cdef Eigenpair pair
    cdef Py_ssize_t plane, i
    cdef int a, l
    block.planes = planes
    block.atoms = n
    for l in range(LANES):
        # A short block repeats its last plane in the remaining lanes.
        plane = first + (l if l < planes else planes - 1)
        block.start[l] = plane_ptr[plane]
        # Relative to the plane's first atom: a large distance to the origin would cost digits.
        ox = oy = oz = NAN
        i = index[block.start[l]]
        if 0 <= i < atoms:
            ox = xyz[3 * i]
            oy = xyz[3 * i + 1]
            oz = xyz[3 * i + 2]
        for a in range(n):
            row = scratch + ROW * a + l
            i = index[block.start[l] + a]
            if 0 <= i < atoms:
                row[X] = xyz[3 * i] - ox
                row[Y] = xyz[3 * i + 1] - oy
                row[Z] = xyz[3 * i + 2] - oz
            else:
                row[X] = row[Y] = row[Z] = NAN
            row[W] = weight[block.start[l] + a] if per_atom else weight[plane]
    for l in range(LANES):
        total[l] = sx[l] = sy[l] = sz[l] = 0
        xx[l] = xy[l] = xz[l] = yy[l] = yz[l] = zz[l] = 0
    for a in range(n):
        row = scratch + ROW * a
        for l in range(LANES):
            share = row[W + l] if weighted else 1
            total[l] += share
            sx[l] += share * row[X + l]
            sy[l] += share * row[Y + l]
            sz[l] += share * row[Z + l]
    for l in range(LANES):
        sx[l] = sx[l] / total[l]
        sy[l] = sy[l] / total[l]
        sz[l] = sz[l] / total[l]
    for a in range(n):
        row = scratch + ROW * a
        for l in range(LANES):
            share = row[W + l] if weighted else 1
            row[X + l] = row[X + l] - sx[l]
            row[Y + l] = row[Y + l] - sy[l]
            row[Z + l] = row[Z + l] - sz[l]
            xx[l] += share * row[X + l] * row[X + l]
            xy[l] += share * row[X + l] * row[Y + l]
            xz[l] += share * row[X + l] * row[Z + l]
            yy[l] += share * row[Y + l] * row[Y + l]
            yz[l] += share * row[Y + l] * row[Z + l]
            zz[l] += share * row[Z + l] * row[Z + l]
    for l in range(LANES):
        trace = xx[l] + yy[l] + zz[l]
        scale[l] = 1 / trace
        pair = newton_eigenpair(
            xx[l] * scale[l], xy[l] * scale[l], xz[l] * scale[l],
            yy[l] * scale[l], yz[l] * scale[l], zz[l] * scale[l])
        nx[l] = pair.x
        ny[l] = pair.y
        nz[l] = pair.z
        value[l] = pair.value
        found[l] = pair.found
    for l in range(LANES):
        trace = xx[l] + yy[l] + zz[l]
        # NaN and Inf fail this test, and so do atoms that all coincide.
        if not (trace > 0 and trace * 0 == 0 and scale[l] * 0 == 0):
            nx[l] = ny[l] = nz[l] = value[l] = scale[l] = 0
            xx[l] = xy[l] = xz[l] = yy[l] = yz[l] = zz[l] = 0
            for a in range(n):
                row = scratch + ROW * a + l
                row[X] = row[Y] = row[Z] = 0
        elif not found[l]:
            pair = jacobi_eigenpair(
                xx[l] * scale[l], xy[l] * scale[l], xz[l] * scale[l],
                yy[l] * scale[l], yz[l] * scale[l], zz[l] * scale[l], no_plane)
            nx[l] = pair.x
            ny[l] = pair.y
            nz[l] = pair.z
            value[l] = pair.value
    for l in range(LANES):
        block.total_weight[l] = total[l]
        block.scale[l] = scale[l]
        block.xx[l] = xx[l] * scale[l]
        block.xy[l] = xy[l] * scale[l]
        block.xz[l] = xz[l] * scale[l]
        block.yy[l] = yy[l] * scale[l]
        block.yz[l] = yz[l] * scale[l]
        block.zz[l] = zz[l] * scale[l]
        block.nx[l] = nx[l]
        block.ny[l] = ny[l]
        block.nz[l] = nz[l]
        block.value[l] = value[l]


cdef inline void write_row(
    real* out, real* spill, const int* index, const int* slot, Py_ssize_t atoms, Py_ssize_t entry,
    double x, double y, double z,
) noexcept nogil:
    cdef Py_ssize_t i = index[entry]
    cdef real* row
    if i < 0 or i >= atoms:
        return
    row = out + 3 * i if slot[entry] < 0 else spill + 3 * <Py_ssize_t>slot[entry]
    row[0] = <real>x
    row[1] = <real>y
    row[2] = <real>z


cdef double block_nll(
    Block* block, double* scratch, bint weighted,
    const int* index, const int* slot, Py_ssize_t atoms, real* gradient, real* spill,
) noexcept nogil:
    """Return Σ ½ (d/σ)² over a fitted block; write its rows of `gradient`, if given."""
    cdef int n = block.atoms
    cdef double[LANES] mean, square, nx, ny, nz
    cdef double total = 0, d, g
    cdef double* row
    cdef int a, l
    for l in range(LANES):
        mean[l] = square[l] = 0
        nx[l] = block.nx[l]
        ny[l] = block.ny[l]
        nz[l] = block.nz[l]
    for a in range(n):
        row = scratch + ROW * a
        for l in range(LANES):
            d = row[X + l] * nx[l] + row[Y + l] * ny[l] + row[Z + l] * nz[l]
            row[T + l] = row[W + l] * d
            mean[l] += row[T + l]
            square[l] += row[T + l] * d
    for l in range(block.planes):
        total += 0.5 * square[l]
    if gradient != NULL:
        for l in range(LANES):
            # About a weighted centroid the sum is zero up to rounding.
            mean[l] = 0 if weighted else mean[l] / n
        for l in range(block.planes):
            for a in range(n):
                g = scratch[ROW * a + T + l] - mean[l]
                write_row(gradient, spill, index, slot, atoms, block.start[l] + a,
                          g * nx[l], g * ny[l], g * nz[l])
    return total


cdef void block_gradient_vjp(
    Block* block, double* scratch, bint weighted, double no_plane, const real* dgradient,
    const int* index, const int* slot, Py_ssize_t atoms, real* out, real* spill,
) noexcept nogil:
    """Pull a cotangent of the gradient back through a fitted block, with the normal's rotation.

    With s = v·n, t = w (s - mean s) and g = w d - mean(w d), the sum Σ v·(g n) is Σ t d. So n has
    the cotangent q = Σ t r + g v, and the differential -(C - λ)⁺ dC n.
    """
    cdef int n = block.atoms
    cdef double nx, ny, nz, d, s, t, g, mean, mean_s, sum_t, qx, qy, qz, trace, product, along
    cdef double px, py, pz, xx, xy, xz, yy, yz, zz, share, direct
    cdef const real* v
    cdef real[3] nothing
    cdef double* row
    cdef Py_ssize_t i
    cdef int a, l
    nothing[0] = nothing[1] = nothing[2] = 0
    for l in range(block.planes):
        nx = block.nx[l]
        ny = block.ny[l]
        nz = block.nz[l]
        mean = mean_s = sum_t = qx = qy = qz = 0
        for a in range(n):
            row = scratch + ROW * a + l
            i = index[block.start[l] + a]
            v = dgradient + 3 * i if 0 <= i < atoms else nothing
            row[T] = v[0] * nx + v[1] * ny + v[2] * nz if nx * nx + ny * ny + nz * nz > 0 else 0
            mean_s += row[T]
            mean += row[W] * (row[X] * nx + row[Y] * ny + row[Z] * nz)
        mean = 0 if weighted else mean / n
        mean_s = 0 if weighted else mean_s / n
        for a in range(n):
            row = scratch + ROW * a + l
            i = index[block.start[l] + a]
            v = dgradient + 3 * i if 0 <= i < atoms else nothing
            g = row[W] * (row[X] * nx + row[Y] * ny + row[Z] * nz) - mean
            t = row[W] * (row[T] - mean_s)
            row[T] = t
            sum_t += t
            qx += t * row[X] + g * v[0]
            qy += t * row[Y] + g * v[1]
            qz += t * row[Z] + g * v[2]
        # p = (C - λ)⁺ q. A = C - λ has the null vector n; its pseudo-inverse on the plane is
        # (tr A - A) / (½ (tr² A - tr A²)), or A / tr² A if the two lower eigenvalues are equal.
        xx = block.xx[l] - block.value[l]
        yy = block.yy[l] - block.value[l]
        zz = block.zz[l] - block.value[l]
        xy = block.xy[l]
        xz = block.xz[l]
        yz = block.yz[l]
        along = qx * nx + qy * ny + qz * nz
        qx = qx - along * nx
        qy = qy - along * ny
        qz = qz - along * nz
        trace = xx + yy + zz
        product = (yy * zz - yz * yz) + (xx * zz - xz * xz) + (xx * yy - xy * xy)
        px = xx * qx + xy * qy + xz * qz
        py = xy * qx + yy * qy + yz * qz
        pz = xz * qx + yz * qy + zz * qz
        if product > no_plane * trace * trace:
            px = (trace * qx - px) / product
            py = (trace * qy - py) / product
            pz = (trace * qz - pz) / product
        elif trace > no_plane:
            px = px / (trace * trace)
            py = py / (trace * trace)
            pz = pz / (trace * trace)
        else:
            px = py = pz = 0
        for a in range(n):
            row = scratch + ROW * a + l
            share = row[W] if weighted else 1
            d = row[X] * nx + row[Y] * ny + row[Z] * nz
            s = share * block.scale[l]
            direct = (
                row[T] - share / block.total_weight[l] * sum_t
                - s * (px * row[X] + py * row[Y] + pz * row[Z])
            )
            write_row(out, spill, index, slot, atoms, block.start[l] + a,
                      direct * nx - s * d * px, direct * ny - s * d * py, direct * nz - s * d * pz)


# The arguments of a call. Shares get a pointer to a struct with typed pointers to arrays, so each type
# has a function of its own. Scratch has a row for every thread.
cdef struct Call:
    const void* xyz
    const void* dgradient
    Py_ssize_t atoms
    const int* index
    const double* weight
    bint per_atom
    bint weighted
    const long long* plane_ptr
    const long long* block_ptr
    const int* slot
    void* out
    void* spill
    double* scratch
    Py_ssize_t scratch_row
    double no_plane
    double* partial
    const int* reduced
    const long long* reduced_ptr
    const int* summed


cdef void reduce_rows(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    """Sum the rows of every atom not in exactly one plane; an atom in no plane has none."""
    cdef const Call* call = <const Call*>given
    cdef const real* spill = <const real*>call.spill
    cdef real* out = <real*>call.out
    cdef Py_ssize_t r, k, i
    cdef const real* row
    cdef real x, y, z
    for r in range(begin, end):
        i = call.reduced[r]
        if i < call.atoms:
            x = 0
            y = 0
            z = 0
            for k in range(call.reduced_ptr[r], call.reduced_ptr[r + 1]):
                row = spill + 3 * <Py_ssize_t>call.summed[k]
                x = x + row[0]
                y = y + row[1]
                z = z + row[2]
            out[3 * i] = x
            out[3 * i + 1] = y
            out[3 * i + 2] = z


cdef double one_block(
    const real* xyz, const real* dgradient, Py_ssize_t atoms, const int* index,
    const double* weight, bint per_atom, bint weighted, const long long* plane_ptr,
    Py_ssize_t first, int planes, const int* slot, real* out, real* spill, double* scratch,
    double no_plane,
) noexcept nogil:
    cdef Block block
    fit_block(xyz, atoms, index, weight, per_atom, weighted, plane_ptr, first, planes, scratch,
              no_plane, &block)
    if dgradient == NULL:
        return block_nll(&block, scratch, weighted, index, slot, atoms, out, spill)
    block_gradient_vjp(&block, scratch, weighted, no_plane, dgradient, index, slot, atoms, out, spill)
    return 0


cdef void some_blocks(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Call* call = <const Call*>given
    cdef Py_ssize_t b
    for b in range(begin, end):
        call.partial[b] = one_block(
            <const real*>call.xyz, <const real*>call.dgradient, call.atoms, call.index,
            call.weight, call.per_atom, call.weighted, call.plane_ptr, call.block_ptr[b],
            <int>(call.block_ptr[b + 1] - call.block_ptr[b]), call.slot, <real*>call.out,
            <real*>call.spill, call.scratch + thread * call.scratch_row, call.no_plane)


def planarity(
    const real[:, ::1] xyz,            # IN   (N, 3)
    const real[:, ::1] dgradient,      # IN   (N, 3), or None for value and gradient
    planes,                            # IN   `fusedops.Planes`
    bint weighted,
    double no_plane,                   # IN   share of variance below which a group has no plane
    real[:, ::1] out,                  # OUT  (N, 3), or None for no gradient
    int threads,
):
    """Return Σ ½ (d/σ)² and write its gradient, or that gradient's vector-Jacobian product."""
    cdef Py_ssize_t i, atoms = xyz.shape[0], bound = planes.bound, scratch_row = ROW * planes.largest
    cdef Py_ssize_t blocks = len(planes.block_ptr) - 1, others = len(planes.reduced)
    cdef real* rows = &out[0, 0] if out is not None and atoms else NULL
    cdef double total = 0
    cdef Call call
    cdef bytearray spill = room(3 * planes.spill * sizeof(real) if rows != NULL else 0)
    cdef bytearray scratch = room(threads * scratch_row * sizeof(double))
    cdef bytearray partial = room(blocks * sizeof(double))
    call.xyz = &xyz[0, 0] if atoms else NULL
    call.dgradient = &dgradient[0, 0] if dgradient is not None and atoms else NULL
    call.atoms = atoms
    call.index = <const int*>elements(planes.index, 4)
    call.weight = <const double*>elements(planes.weight, 8)
    call.per_atom = planes.per_atom
    call.weighted = weighted
    call.plane_ptr = <const long long*>elements(planes.plane_ptr, 8)
    call.block_ptr = <const long long*>elements(planes.block_ptr, 8)
    call.slot = <const int*>elements(planes.slot, 4)
    call.out = rows
    call.spill = of(spill)
    call.scratch = <double*>of(scratch)
    call.scratch_row = scratch_row
    call.no_plane = no_plane
    call.partial = <double*>of(partial)
    call.reduced = <const int*>elements(planes.reduced, 4)
    call.reduced_ptr = <const long long*>elements(planes.reduced_ptr, 8)
    call.summed = <const int*>elements(planes.summed, 4)
    with nogil:
        in_shares(<Share>some_blocks[real], &call, blocks, threads)
        if rows != NULL:
            in_shares(<Share>reduce_rows[real], &call, others, threads)
            for i in range(3 * bound, 3 * atoms):
                rows[i] = 0
        for i in range(blocks):
            total += call.partial[i]
    return total


def lanes():
    """Return the number of planes in a block."""
    return LANES


# Planes in the order given: the atoms of all, where each plane's begin, the first atom of each, and
# 1/σ² of planes or of entries.
cdef struct Given:
    int* atoms
    int* start
    int* first
    double* weight
    bint per_atom
    Py_ssize_t planes
    Py_ssize_t entries
    int bound
    # The distance from the first to the last atom, summed over planes.
    long long span
    double constant


cdef bint read_indices(
    Given* to, const integer* index, Py_ssize_t planes, Py_ssize_t n, long long num_atoms
) noexcept nogil:
    """Append the atoms of planes, and return whether all of them are below `num_atoms`."""
    cdef int* atoms = to.atoms + to.entries
    cdef Py_ssize_t p, a, k
    cdef bint good = True
    cdef int first, final, last = 0
    for k in range(planes * n):
        good &= (index[k] >= 0) & (index[k] < num_atoms)
        atoms[k] = <int>index[k]
        last = max(last, atoms[k])
    if not good:
        return False
    if planes:
        to.bound = max(to.bound, last + 1)
    for p in range(planes):
        first = final = atoms[p * n]
        for a in range(1, n):
            first = min(first, atoms[p * n + a])
            final = max(final, atoms[p * n + a])
        to.span += final - first
        to.first[to.planes + p] = first
        to.start[to.planes + p] = <int>(to.entries + p * n)
    return True


cdef bint read_sigmas(
    Given* to, const double* sigma, bint by_atom, Py_ssize_t planes, Py_ssize_t n,
    double half_log_2pi,
) noexcept nogil:
    """Append 1/σ², and return whether all are finite and positive."""
    cdef Py_ssize_t count = planes * n if by_atom else planes, k, a
    # σ of a plane counts for each of its atoms, and is repeated where others have one for each.
    cdef Py_ssize_t copies = 1 if by_atom else n
    cdef Py_ssize_t rows = copies if to.per_atom else 1
    cdef double* weight = to.weight + (to.entries if to.per_atom else to.planes)
    cdef double w, same = 0, total = 0, last = 1
    cdef bint good = True
    for k in range(count):
        w = 1 / sigma[k]
        w = w * w
        good &= (sigma[k] > 0) & (w > 0) & (w * 0 == 0)
        for a in range(rows):
            weight[k * rows + a] = w
    for k in range(count):
        if sigma[k] != last:
            total += same * log(last)
            last = sigma[k]
            same = 0
        same += 1
    total += same * log(last)
    to.constant += copies * (total + count * half_log_2pi)
    return good


cdef void sort_planes(
    const Given* planes, Py_ssize_t largest, int* at, int* by_first, int* by_size, int* order
) noexcept nogil:
    """Write the order of planes by size, then first atom, by counting twice."""
    cdef Py_ssize_t q, r
    cdef int i, n
    memset(at, 0, (planes.bound + 1) * sizeof(int))
    memset(by_size, 0, (largest + 2) * sizeof(int))
    for q in range(planes.planes):
        at[planes.first[q] + 1] += 1
        by_size[planes.start[q + 1] - planes.start[q] + 1] += 1
    for i in range(planes.bound):
        at[i + 1] += at[i]
    for n in range(largest + 1):
        by_size[n + 1] += by_size[n]
    for q in range(planes.planes):
        i = planes.first[q]
        by_first[at[i]] = <int>q
        at[i] += 1
    for r in range(planes.planes):
        q = by_first[r]
        n = planes.start[q + 1] - planes.start[q]
        order[by_size[n]] = <int>q
        by_size[n] += 1


cdef Py_ssize_t count_entries(const Given* given, int alone, int* count) noexcept nogil:
    """Count the entries of every atom, and return how many atoms have `alone` entries."""
    cdef Py_ssize_t k, found = 0
    memset(count, 0, given.bound * sizeof(int))
    for k in range(given.entries):
        count[given.atoms[k]] += 1
    for k in range(given.bound):
        found += count[k] == alone
    return found


cdef void write_planes(
    const Given* given, const int* order, int* index, double* weight, long long* plane_ptr
) noexcept nogil:
    cdef Py_ssize_t r, q, k, e = 0
    for r in range(given.planes):
        q = order[r]
        plane_ptr[r] = e
        if not given.per_atom:
            weight[r] = given.weight[q]
        for k in range(given.start[q], given.start[q + 1]):
            index[e] = given.atoms[k]
            if given.per_atom:
                weight[e] = given.weight[k]
            e += 1
    plane_ptr[given.planes] = e


cdef Py_ssize_t write_blocks(
    const int* ends, Py_ssize_t largest, long long* block_ptr
) noexcept nogil:
    """Write where blocks of planes of one size begin, if asked for, and return their number.

    Planes of n atoms end before plane ends[n].
    """
    cdef Py_ssize_t n, p = 0, blocks = 0
    for n in range(largest + 1):
        while p < ends[n]:
            if block_ptr != NULL:
                block_ptr[blocks] = p
            blocks += 1
            p = min(p + LANES, <Py_ssize_t>ends[n])
    if block_ptr != NULL:
        block_ptr[blocks] = p
    return blocks


cdef void write_slots(
    const Given* given, const int* index, int alone, int* count, int* slot, int* reduced,
    long long* reduced_ptr, int* summed,
) noexcept nogil:
    """Write the atoms without `alone` entries, a row for each of their entries, and their rows.

    `reduced` and `summed` have room for an element more.
    """
    cdef Py_ssize_t i, e, r = 0
    cdef int n, place = 0, row = 0
    cdef bint kept
    # Without branches, since atoms in one plane and others may alternate at random.
    for i in range(given.bound):
        n = count[i]
        reduced[r] = <int>i
        reduced_ptr[r] = place
        count[i] = -1 if n == alone else place
        place += 0 if n == alone else n
        r += n != alone
    reduced_ptr[r] = place
    for e in range(given.entries):
        i = count[index[e]]
        kept = i >= 0
        slot[e] = row if kept else -1
        summed[i if kept else place] = row
        count[index[e]] = <int>i + kept
        row += kept


cdef dense(array, dtype):
    flags = array.flags
    if array.dtype == dtype and flags.c_contiguous and flags.aligned:
        return array
    return np.array(array, dtype, order="C")


cdef object UINT8 = np.dtype(np.uint8), INT32 = np.dtype(np.int32)
cdef object INT64 = np.dtype(np.int64), FLOAT64 = np.dtype(np.float64)


def packing(groups, long long num_atoms, double half_log_2pi, long long scattered):
    """Return the fields and sizes of `Planes` of groups, or None if a value is bad.

    `fusedops.planarity.plan.packing` is the definition.
    """
    cdef Py_ssize_t planes = 0, entries = 0, largest = 0, n, p, shared, blocks, weights
    cdef int alone
    cdef bint good, narrow, by_atom, per_atom = False
    cdef const void* rows
    cdef const double* sigmas
    cdef Given given
    arrays = []
    for index, sigma in groups:
        index = dense(index, INT32 if index.dtype == INT32 else INT64)
        arrays.append((index, dense(sigma, FLOAT64)))
        p, n = index.shape
        planes += p
        entries += p * n
        largest = max(largest, n if p else 0)
        per_atom = per_atom or sigma.ndim == 2
    if entries >= 0x7fffffff:
        return None

    weights = entries if per_atom else planes
    block = empty((8 * weights + 4 * (entries + 4 * planes + largest + 3),), UINT8)
    given.weight = <double*>elements(block, 1)
    given.atoms = <int*>(given.weight + weights)
    given.start = given.atoms + entries
    given.first = given.start + planes + 1
    cdef int* order = given.first + planes
    cdef int* ends = order + 2 * planes
    given.per_atom = per_atom
    given.planes = given.entries = given.bound = 0
    given.span = 0
    given.constant = 0
    for index, sigma in arrays:
        p, n = index.shape
        narrow = index.dtype == INT32
        by_atom = sigma.ndim == 2
        rows = elements(index, 4 if narrow else 8)
        sigmas = <const double*>elements(sigma, 8)
        with nogil:
            if narrow:
                good = read_indices(&given, <const int*>rows, p, n, num_atoms)
            else:
                good = read_indices(&given, <const long long*>rows, p, n, num_atoms)
            good &= read_sigmas(&given, sigmas, by_atom, p, n, half_log_2pi)
        if not good:
            return None
        given.planes += p
        given.entries += p * n
    given.start[planes] = <int>entries

    cdef bytearray counts = room((given.bound + 1) * sizeof(int))
    cdef int* count = <int*>of(counts)
    with nogil:
        sort_planes(&given, largest, count, order + planes, ends, order)
        blocks = write_blocks(ends, largest, NULL)
        # No atom has a negative number of entries.
        alone = -1 if given.span > scattered * planes else 1
        n = count_entries(&given, alone, count)
    shared = entries - n
    n = given.bound - n
    index, weight, plane_ptr, block_ptr, slot, reduced, reduced_ptr, summed = together(
        (entries, INT32), (weights, FLOAT64), (planes + 1, INT64), (blocks + 1, INT64),
        (entries, INT32), (n + 1, INT32), (n + 1, INT64), (shared + 1, INT32),
    )
    cdef int* to_index = <int*>elements(index, 4)
    cdef double* to_weight = <double*>elements(weight, 8)
    cdef long long* to_plane = <long long*>elements(plane_ptr, 8)
    cdef long long* to_block = <long long*>elements(block_ptr, 8)
    cdef int* to_slot = <int*>elements(slot, 4)
    cdef int* to_reduced = <int*>elements(reduced, 4)
    cdef long long* to_row = <long long*>elements(reduced_ptr, 8)
    cdef int* to_summed = <int*>elements(summed, 4)
    with nogil:
        write_planes(&given, order, to_index, to_weight, to_plane)
        write_blocks(ends, largest, to_block)
        write_slots(&given, to_index, alone, count, to_slot, to_reduced, to_row, to_summed)
    return {
        "index": index,
        "weight": weight,
        "plane_ptr": plane_ptr,
        "block_ptr": block_ptr,
        "slot": slot,
        "reduced": reduced[:n],
        "reduced_ptr": reduced_ptr,
        "summed": summed[:shared],
        "constant": np.array([given.constant]),
        "bound": given.bound,
        "largest": largest,
        "rows": n,
        "spill": shared,
        "per_atom": int(per_atom),
        "num_planes": planes,
        "num_entries": entries,
    }
