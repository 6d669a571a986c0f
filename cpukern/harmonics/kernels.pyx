# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Wigner D matrices on the CPU and their derivatives, sixteen edges at a time, one to a lane.

Pair after pair of orders goes through all its degrees, in float64, and elements are rounded once:
`fusedops.harmonics.op.recursion` has the formulas and names. With u(v) = v / |v|, a function of u has
the gradient (g - u (u·g)) / |v| by v.
"""

from libc.math cimport INFINITY, fabs, sqrt
from libc.string cimport memset

from cpukern._cpu cimport Share, in_shares
from cpukern.arrays cimport elements, of, room, whole_lines

cdef enum:
    LANES = 16

ctypedef fused real:
    float
    double

# A tile of edges: unit vectors (x, |y|, ±z), with `turned` the sign of y; their tangents, and
# `along`, the tangent of the length's logarithm; the gradient by unit vectors, and the gradient's
# tangent.
cdef struct Tile:
    Py_ssize_t count
    Py_ssize_t edge[LANES]
    double x[LANES]
    double y[LANES]
    double z[LANES]
    double turned[LANES]
    double length[LANES]
    double dx[LANES]
    double dy[LANES]
    double dz[LANES]
    double along[LANES]
    double gx[LANES]
    double gy[LANES]
    double gz[LANES]
    double hx[LANES]
    double hy[LANES]
    double hz[LANES]

# Powers of ρ, real and imaginary, and their tangents, in rows of lanes. Power -1 comes first; only
# zeros are multiplied with it.
cdef struct Powers:
    double* re
    double* im
    double* dre
    double* dim

# For orders n ≥ m: P and Q and their first and second derivatives by y, of a degree and (0) of the
# degree before; sums over degrees of the cotangents of their products with parts of powers.
cdef struct Pair:
    double P[LANES]
    double Q[LANES]
    double dP[LANES]
    double dQ[LANES]
    double ddP[LANES]
    double ddQ[LANES]
    double P0[LANES]
    double Q0[LANES]
    double dP0[LANES]
    double dQ0[LANES]
    double ddP0[LANES]
    double ddQ0[LANES]
    double re[LANES]
    double im[LANES]
    double Re[LANES]
    double Im[LANES]
    double dre[LANES]
    double dim[LANES]
    double dRe[LANES]
    double dIm[LANES]
    double ddre[LANES]
    double ddim[LANES]
    double ddRe[LANES]
    double ddIm[LANES]

# The arguments of a call; steps are in elements. For each degree, `origins` has the place of the
# matrix's (0, 0), and `rows` the step to the next row; cotangents and tangents lie alike. Arrays
# that aren't wanted or given are NULL.
cdef struct Call:
    Py_ssize_t edges
    Py_ssize_t lmax
    Py_ssize_t matrix
    const long long* origins
    const long long* rows
    const double* starts
    const double* steps
    const void* vectors
    Py_ssize_t vectors_step
    const void* directions
    Py_ssize_t directions_step
    const void* cotangents
    Py_ssize_t cotangents_step
    void* matrices
    void* dvectors
    char* scratch
    Py_ssize_t scratch_row
    Py_ssize_t powers_size


cdef inline void read(
    const Tile* tile, const real* vectors, Py_ssize_t step, double* x, double* y, double* z
) noexcept nogil:
    cdef Py_ssize_t t
    for t in range(LANES):
        x[t] = vectors[tile.edge[t] * step]
        y[t] = vectors[tile.edge[t] * step + 1]
        z[t] = vectors[tile.edge[t] * step + 2]


cdef inline void read_vectors(const real* vectors, Py_ssize_t step, Tile* tile) noexcept nogil:
    """Read vectors; a vector of length zero is the axis, infinitely long."""
    cdef Py_ssize_t t
    cdef double x, y, z, largest, square, length
    cdef double[LANES] scale
    read(tile, vectors, step, tile.x, tile.y, tile.z)
    for t in range(LANES):
        scale[t] = 1
    # In float64 the squares of float32 neither overflow nor vanish.
    if real is double:
        for t in range(LANES):
            largest = max(max(fabs(tile.x[t]), fabs(tile.y[t])), fabs(tile.z[t]))
            scale[t] = 1.0 if largest == 0 else largest
            tile.x[t], tile.y[t] = tile.x[t] / scale[t], tile.y[t] / scale[t]
            tile.z[t] = tile.z[t] / scale[t]
    for t in range(LANES):
        x, y, z = tile.x[t], tile.y[t], tile.z[t]
        square = x * x + y * y + z * z
        y = 1.0 if square == 0 else y
        length = 1.0 if square == 0 else sqrt(square)
        tile.length[t] = INFINITY if square == 0 else length * scale[t]
        # The inverse of an infinite length is NaN.
        length = 1 / length + 0 * square
        tile.turned[t] = 1.0 if y >= 0 else -1.0
        tile.x[t] = x * length
        tile.y[t] = tile.turned[t] * y * length
        tile.z[t] = tile.turned[t] * z * length


cdef inline void read_directions(
    const real* directions, Py_ssize_t step, Tile* tile
) noexcept nogil:
    cdef Py_ssize_t t
    cdef double x, y, z, inner
    read(tile, directions, step, tile.dx, tile.dy, tile.dz)
    for t in range(LANES):
        x, y, z = tile.dx[t], tile.turned[t] * tile.dy[t], tile.turned[t] * tile.dz[t]
        inner = tile.x[t] * x + tile.y[t] * y + tile.z[t] * z
        tile.along[t] = inner / tile.length[t]
        tile.dx[t] = (x - tile.x[t] * inner) / tile.length[t]
        tile.dy[t] = (y - tile.y[t] * inner) / tile.length[t]
        tile.dz[t] = (z - tile.z[t] * inner) / tile.length[t]


cdef inline void raise_to_powers(
    const Tile* tile, Py_ssize_t most, bint moving, const Powers* powers
) noexcept nogil:
    cdef Py_ssize_t t, k, at
    for t in range(LANES):
        powers.re[t] = powers.im[t] = powers.im[LANES + t] = 0
        powers.re[LANES + t] = 1
        if moving:
            powers.dre[t] = powers.dim[t] = powers.dre[LANES + t] = powers.dim[LANES + t] = 0
    for k in range(1, most + 1):
        at = k * LANES
        for t in range(LANES):
            powers.re[at + LANES + t] = powers.re[at + t] * tile.z[t] - powers.im[at + t] * tile.x[t]
            powers.im[at + LANES + t] = powers.re[at + t] * tile.x[t] + powers.im[at + t] * tile.z[t]
        if moving:
            for t in range(LANES):
                powers.dre[at + LANES + t] = k * (
                    powers.re[at + t] * tile.dz[t] - powers.im[at + t] * tile.dx[t]
                )
                powers.dim[at + LANES + t] = k * (
                    powers.re[at + t] * tile.dx[t] + powers.im[at + t] * tile.dz[t]
                )


cdef inline void begin(
    const double* start, Py_ssize_t m, const double* inverse, const double* up, const double* down,
    int order, Pair* pair
) noexcept nogil:
    """Set P = p h^m and Q = q h^-m, h = 1 + y, and derivatives; a degree before, all are zero."""
    cdef Py_ssize_t t
    for t in range(LANES):
        pair.P[t], pair.Q[t] = start[0] * up[t], start[1] * down[t]
        pair.P0[t] = pair.Q0[t] = 0
    if order > 0:
        for t in range(LANES):
            pair.dP[t], pair.dQ[t] = m * pair.P[t] * inverse[t], -m * pair.Q[t] * inverse[t]
            pair.dP0[t] = pair.dQ0[t] = 0
            pair.re[t] = pair.im[t] = pair.Re[t] = pair.Im[t] = 0
            pair.dre[t] = pair.dim[t] = pair.dRe[t] = pair.dIm[t] = 0
    if order > 1:
        for t in range(LANES):
            pair.ddP[t] = (m - 1) * pair.dP[t] * inverse[t]
            pair.ddQ[t] = -(m + 1) * pair.dQ[t] * inverse[t]
            pair.ddP0[t] = pair.ddQ0[t] = 0
            pair.ddre[t] = pair.ddim[t] = pair.ddRe[t] = pair.ddIm[t] = 0


cdef inline void advance(
    const double* step, const double* y, int order, Pair* pair
) noexcept nogil:
    """Go on to the next degree, with as many derivatives."""
    cdef Py_ssize_t t
    cdef double a = step[0], b = step[1], c = step[2], P, Q, dP, dQ
    for t in range(LANES):
        P, Q = pair.P[t], pair.Q[t]
        pair.P[t] = (a * y[t] - b) * P - c * pair.P0[t]
        pair.Q[t] = (a * y[t] + b) * Q - c * pair.Q0[t]
        pair.P0[t], pair.Q0[t] = P, Q
        if order > 0:
            dP, dQ = pair.dP[t], pair.dQ[t]
            pair.dP[t] = (a * y[t] - b) * dP + a * P - c * pair.dP0[t]
            pair.dQ[t] = (a * y[t] + b) * dQ + a * Q - c * pair.dQ0[t]
            pair.dP0[t], pair.dQ0[t] = dP, dQ
            if order > 1:
                P, Q = pair.ddP[t], pair.ddQ[t]
                pair.ddP[t] = (a * y[t] - b) * P + 2 * a * dP - c * pair.ddP0[t]
                pair.ddQ[t] = (a * y[t] + b) * Q + 2 * a * dQ - c * pair.ddQ0[t]
                pair.ddP0[t], pair.ddQ0[t] = P, Q


cdef inline void write(
    const Tile* tile, real* out, Py_ssize_t matrix, const real* value, const double* sign
) noexcept nogil:
    """Write a number of every edge."""
    cdef Py_ssize_t t
    if tile.count == LANES:
        for t in range(LANES):
            out[t * matrix] = value[t] * <real>sign[t]
    else:
        for t in range(tile.count):
            out[t * matrix] = value[t] * <real>sign[t]


cdef inline void write_four(
    const Tile* tile, real* out, Py_ssize_t matrix, Py_ssize_t row, Py_ssize_t m, Py_ssize_t n,
    const double* plus, const double* minus, const Powers* low, const Powers* high,
    const Pair* pair, bint moving
) noexcept nogil:
    """Write the elements (±n, ±m) and (±m, ±n) of a degree, or their tangents."""
    cdef Py_ssize_t t
    cdef double re, im, Re, Im
    cdef real[LANES] A, B, C, D
    for t in range(LANES):
        if moving:
            re = pair.dP[t] * tile.dy[t] * low.re[t] + pair.P[t] * low.dre[t]
            im = pair.dP[t] * tile.dy[t] * low.im[t] + pair.P[t] * low.dim[t]
            Re = pair.dQ[t] * tile.dy[t] * high.re[t] + pair.Q[t] * high.dre[t]
            Im = pair.dQ[t] * tile.dy[t] * high.im[t] + pair.Q[t] * high.dim[t]
        else:
            re, im = pair.P[t] * low.re[t], pair.P[t] * low.im[t]
            Re, Im = pair.Q[t] * high.re[t], pair.Q[t] * high.im[t]
        A[t], B[t] = <real>(re + Re), <real>(Im - im)
        C[t], D[t] = <real>(Im + im), <real>(re - Re)
    write(tile, out + n * row + m, matrix, A, plus)
    if n > 0:
        write(tile, out - n * row + m, matrix, C, plus)
    if m > 0:
        write(tile, out + n * row - m, matrix, B, minus)
        write(tile, out - n * row - m, matrix, D, minus)
    if n == m:
        return
    if (n + m) % 2:
        for t in range(LANES):
            A[t], B[t], C[t], D[t] = -A[t], -B[t], -C[t], -D[t]
    write(tile, out + m * row + n, matrix, A, plus)
    write(tile, out + m * row - n, matrix, C, minus)
    if m > 0:
        write(tile, out - m * row + n, matrix, B, plus)
        write(tile, out - m * row - n, matrix, D, minus)


cdef inline void load_lines(
    const Call* call, const Tile* tile, const real* g, real* lines
) noexcept nogil:
    """Copy a tile's cotangents, row by row as they lie, to a line of lanes for each element."""
    cdef Py_ssize_t t, l, i, j
    cdef const real* row
    cdef real* line
    for t in range(LANES):
        line = lines + t
        for l in range(call.lmax + 1):
            row = g + tile.edge[t] * call.cotangents_step + call.origins[l] - l * call.rows[l] - l
            for i in range(2 * l + 1):
                for j in range(2 * l + 1):
                    line[j * LANES] = row[j]
                line += (2 * l + 1) * LANES
                row += call.rows[l]


cdef inline void take(
    const real* line, const double* sign, double factor, double* total
) noexcept nogil:
    """Add a number of every edge."""
    cdef Py_ssize_t t
    for t in range(LANES):
        total[t] += factor * sign[t] * line[t]


cdef inline void take_four(
    const real* lines, Py_ssize_t row, Py_ssize_t m, Py_ssize_t n, const double* plus,
    const double* minus, int order, Pair* pair
) noexcept nogil:
    """Add the cotangents of the elements that `write_four` writes to the sums over degrees."""
    cdef Py_ssize_t t
    cdef double re, im, Re, Im, sign = -1.0 if (n + m) % 2 else 1.0
    cdef double[LANES] A, B, C, D
    for t in range(LANES):
        A[t] = B[t] = C[t] = D[t] = 0
    take(lines + (n * row + m) * LANES, plus, 1.0, A)
    if n > 0:
        take(lines + (-n * row + m) * LANES, plus, 1.0, C)
    if m > 0:
        take(lines + (n * row - m) * LANES, minus, 1.0, B)
        take(lines + (-n * row - m) * LANES, minus, 1.0, D)
    if n != m:
        take(lines + (m * row + n) * LANES, plus, sign, A)
        take(lines + (m * row - n) * LANES, minus, sign, C)
        if m > 0:
            take(lines + (-m * row + n) * LANES, plus, sign, B)
            take(lines + (-m * row - n) * LANES, minus, sign, D)
    for t in range(LANES):
        re, im, Re, Im = A[t] + D[t], C[t] - B[t], A[t] - D[t], B[t] + C[t]
        pair.re[t] += pair.P[t] * re
        pair.im[t] += pair.P[t] * im
        pair.Re[t] += pair.Q[t] * Re
        pair.Im[t] += pair.Q[t] * Im
        pair.dre[t] += pair.dP[t] * re
        pair.dim[t] += pair.dP[t] * im
        pair.dRe[t] += pair.dQ[t] * Re
        pair.dIm[t] += pair.dQ[t] * Im
        if order > 1:
            pair.ddre[t] += pair.ddP[t] * re
            pair.ddim[t] += pair.ddP[t] * im
            pair.ddRe[t] += pair.ddQ[t] * Re
            pair.ddIm[t] += pair.ddQ[t] * Im


cdef inline void collect(
    const double* re, const double* im, const double* dre, const double* dim, const double* ddre,
    const double* ddim, Py_ssize_t k, const Powers* power, const Powers* below, bint moving,
    Tile* tile
) noexcept nogil:
    """Add the gradient of Re(w ρ^k), w = re - i im a function of y, and the gradient's tangent."""
    cdef Py_ssize_t t
    cdef double u, v, du, dv
    for t in range(LANES):
        u, v = k * re[t], k * im[t]
        tile.gy[t] += dre[t] * power.re[t] + dim[t] * power.im[t]
        tile.gz[t] += u * below.re[t] + v * below.im[t]
        tile.gx[t] += v * below.re[t] - u * below.im[t]
        if moving:
            tile.hy[t] += (ddre[t] * power.re[t] + ddim[t] * power.im[t]) * tile.dy[t]
            tile.hy[t] += dre[t] * power.dre[t] + dim[t] * power.dim[t]
            du, dv = k * dre[t] * tile.dy[t], k * dim[t] * tile.dy[t]
            tile.hz[t] += du * below.re[t] + u * below.dre[t] + dv * below.im[t] + v * below.dim[t]
            tile.hx[t] += dv * below.re[t] + v * below.dre[t] - du * below.im[t] - u * below.dim[t]


cdef inline void finish(const Tile* tile, real* out, bint moving) noexcept nogil:
    """Write the gradients by vectors, or (moving) their tangents along directions."""
    cdef Py_ssize_t t
    cdef double x, y, z, gx, gy, gz, hx, hy, hz, inner, turned
    for t in range(tile.count):
        x, y, z, turned = tile.x[t], tile.y[t], tile.z[t], tile.turned[t]
        gx, gy, gz = tile.gx[t], tile.gy[t], tile.gz[t]
        if moving:
            inner = x * gx + y * gy + z * gz
            hx = tile.hx[t] - tile.along[t] * gx - inner * tile.dx[t]
            hy = tile.hy[t] - tile.along[t] * gy - inner * tile.dy[t]
            hz = tile.hz[t] - tile.along[t] * gz - inner * tile.dz[t]
            inner = x * hx + y * hy + z * hz
            inner += gx * tile.dx[t] + gy * tile.dy[t] + gz * tile.dz[t]
            gx, gy, gz = hx, hy, hz
        else:
            inner = x * gx + y * gy + z * gz
        out[3 * t] = <real>((gx - x * inner) / tile.length[t])
        out[3 * t + 1] = <real>(turned * ((gy - y * inner) / tile.length[t]))
        out[3 * t + 2] = <real>(turned * ((gz - z * inner) / tile.length[t]))


cdef inline Powers row_of(const Powers* powers, Py_ssize_t k) noexcept nogil:
    cdef Powers row
    row.re, row.im = powers.re + (k + 1) * LANES, powers.im + (k + 1) * LANES
    row.dre, row.dim = powers.dre + (k + 1) * LANES, powers.dim + (k + 1) * LANES
    return row


cdef inline void one_tile(
    const Call* call, const real* g, real* out, real* dvectors, Tile* tile, const Powers* powers,
    real* lines, int order, bint moving
) noexcept nogil:
    cdef Py_ssize_t t, l, m, n, center
    cdef const double* start = call.starts
    cdef const double* step = call.steps
    cdef const double* plus
    cdef const double* minus
    cdef Powers low, high, below_low, below_high
    cdef Pair pair
    cdef double[LANES] one, inverse, up, down
    if g != NULL:
        load_lines(call, tile, g, lines)
    for t in range(LANES):
        one[t] = up[t] = down[t] = 1
        tile.gx[t] = tile.gy[t] = tile.gz[t] = tile.hx[t] = tile.hy[t] = tile.hz[t] = 0
        inverse[t] = 1 / (1 + tile.y[t])
    for m in range(call.lmax + 1):
        for n in range(m, call.lmax + 1):
            low, high = row_of(powers, n - m), row_of(powers, n + m)
            begin(start, m, inverse, up, down, order, &pair)
            start += 2
            for l in range(n, call.lmax + 1):
                # The half turn changes columns' signs.
                plus = &tile.turned[0] if l % 2 else &one[0]
                minus = &one[0] if l % 2 else &tile.turned[0]
                # Degree 0 has no tangent, not even a NaN.
                if out != NULL and (l > 0 or not moving):
                    write_four(
                        tile, out + call.origins[l], call.matrix, call.rows[l], m, n, plus, minus,
                        &low, &high, &pair, moving,
                    )
                if g != NULL:
                    center = LANES * (l * (4 * l * l - 1) // 3 + 2 * l * (l + 1))
                    take_four(lines + center, 2 * l + 1, m, n, plus, minus, order, &pair)
                advance(step, tile.y, order, &pair)
                step += 3
            if g != NULL:
                below_low, below_high = row_of(powers, n - m - 1), row_of(powers, n + m - 1)
                collect(
                    pair.re, pair.im, pair.dre, pair.dim, pair.ddre, pair.ddim, n - m, &low,
                    &below_low, moving, tile,
                )
                collect(
                    pair.Re, pair.Im, pair.dRe, pair.dIm, pair.ddRe, pair.ddIm, n + m, &high,
                    &below_high, moving, tile,
                )
        for t in range(LANES):
            up[t], down[t] = up[t] * (1 + tile.y[t]), down[t] * inverse[t]
    if dvectors != NULL:
        finish(tile, dvectors, moving)


cdef void shares(
    const real* of_type, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Call* call = <const Call*>of_type
    cdef const real* g = <const real*>call.cotangents
    cdef const real* directions = <const real*>call.directions
    cdef Py_ssize_t number, first, t
    cdef real* out
    cdef real* dvectors
    cdef real* lines
    cdef Tile tile
    cdef Powers powers
    powers.re = <double*>(call.scratch + thread * call.scratch_row)
    powers.im = powers.re + call.powers_size
    powers.dre = powers.im + call.powers_size
    powers.dim = powers.dre + call.powers_size
    lines = <real*>(powers.dim + call.powers_size)
    for number in range(begin, end):
        first = number * LANES
        tile.count = min(<Py_ssize_t>LANES, call.edges - first)
        for t in range(LANES):
            tile.edge[t] = min(first + t, call.edges - 1)
        out = dvectors = NULL
        if call.matrices != NULL:
            out = <real*>call.matrices + first * call.matrix
            # Zeros around the blocks.
            memset(out, 0, tile.count * call.matrix * sizeof(real))
        if call.dvectors != NULL:
            dvectors = <real*>call.dvectors + 3 * first
        read_vectors(<const real*>call.vectors, call.vectors_step, &tile)
        if directions != NULL:
            read_directions(directions, call.directions_step, &tile)
        raise_to_powers(&tile, 2 * call.lmax, directions != NULL, &powers)
        # Constant orders, so that the compiler makes a loop for each.
        if directions != NULL:
            one_tile(call, g, out, dvectors, &tile, &powers, lines, 2 if g != NULL else 1, True)
        elif g != NULL:
            one_tile(call, g, out, dvectors, &tile, &powers, lines, 1, False)
        else:
            one_tile(call, g, out, dvectors, &tile, &powers, lines, 0, False)


def matrices(
    # IN: None where there is nothing; contiguous in the last axis
    const real[:, :] edge_vec,
    const real[:, :] dmatrices,
    const real[:, :] ddedge_vec,
    # IN: int64 (lmax + 1,), then float64
    origins,
    rows,
    starts,
    steps,
    Py_ssize_t lmax,
    # OUT
    real[:, ::1] out,
    real[:, ::1] dvectors,
    int threads,
):
    cdef Call call
    cdef Py_ssize_t powers = (2 * lmax + 2) * LANES, blocks
    cdef bytearray scratch
    call.edges = edge_vec.shape[0]
    if call.edges == 0:
        return
    call.powers_size = powers
    call.scratch_row = 4 * powers * sizeof(double)
    if dmatrices is not None:
        blocks = (lmax + 1) * (2 * lmax + 1) * (2 * lmax + 3) // 3
        call.scratch_row += blocks * LANES * sizeof(real)
    scratch = room(threads * call.scratch_row + 64)
    call.scratch = <char*>whole_lines(<Py_ssize_t>of(scratch))
    call.lmax = lmax
    call.origins = <const long long*>elements(origins, 8)
    call.rows = <const long long*>elements(rows, 8)
    call.starts = <const double*>elements(starts, 8)
    call.steps = <const double*>elements(steps, 8)
    call.vectors = &edge_vec[0, 0]
    call.vectors_step = edge_vec.strides[0] // <Py_ssize_t>sizeof(real)
    call.directions = call.cotangents = call.matrices = call.dvectors = NULL
    call.matrix = call.directions_step = call.cotangents_step = 0
    if ddedge_vec is not None:
        call.directions = &ddedge_vec[0, 0]
        call.directions_step = ddedge_vec.strides[0] // <Py_ssize_t>sizeof(real)
    if dmatrices is not None:
        call.cotangents = &dmatrices[0, 0]
        call.cotangents_step = dmatrices.strides[0] // <Py_ssize_t>sizeof(real)
    if out is not None:
        call.matrices = &out[0, 0]
        call.matrix = out.shape[1]
    if dvectors is not None:
        call.dvectors = &dvectors[0, 0]
    with nogil:
        in_shares(<Share>shares[real], &call, (call.edges + LANES - 1) // LANES, threads)
