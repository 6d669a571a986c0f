# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The steps of a triangle multiplicative update between its products, on the CPU.

x and the output have channels last, in rows; the products take channels first, in planes of positions.
Loops over planes run along positions, and only BLAS transposes. Statistics are in float64, so a large
mean costs no digits. A kernel takes a block of positions and adds its sums over the block to `sums`. bfloat16 arrives as its
bits, and is computed in float32, the type of masks, weights and biases.
"""

from libc.math cimport sqrt
from libc.string cimport memcpy

from cpukern.vectors cimport exponential, real

cdef enum:
    LANES = 16
    POSITIONS = 512

ctypedef unsigned short bfloat16

# The types of arrays; kernels compute in `real`.
ctypedef fused scalar:
    bfloat16
    float
    double

# The positions of a tile: in the planes of one member of the batch, and in rows of all members.
cdef struct Tile:
    Py_ssize_t batch
    Py_ssize_t plane
    Py_ssize_t row
    Py_ssize_t n


cdef inline real get(const scalar* x, Py_ssize_t at, real like) noexcept nogil:
    """Return a number in the type of `like`."""
    cdef unsigned int bits
    cdef float single
    if scalar is bfloat16:
        bits = <unsigned int>x[at] << 16
        memcpy(&single, &bits, 4)
        return <real>single
    else:
        return <real>x[at]


cdef inline void put(scalar* x, Py_ssize_t at, real value) noexcept nogil:
    """Write a number, to bfloat16 rounded to nearest, ties to even; every NaN is a quiet one."""
    cdef unsigned int bits
    cdef float single
    if scalar is bfloat16:
        single = <float>value
        memcpy(&bits, &single, 4)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        x[at] = <bfloat16>(bits if single == single else 0x7FC0)
    else:
        x[at] = <scalar>value


cdef inline Py_ssize_t tiles_of(Py_ssize_t size) noexcept nogil:
    return (size + POSITIONS - 1) // POSITIONS


cdef inline Tile find_tile(Py_ssize_t t, Py_ssize_t size) noexcept nogil:
    cdef Tile tile
    cdef Py_ssize_t tiles = tiles_of(size)
    tile.batch = t // tiles
    tile.plane = POSITIONS * (t % tiles)
    tile.row = tile.batch * size + tile.plane
    tile.n = min(<Py_ssize_t>POSITIONS, size - tile.plane)
    return tile


cdef inline real logistic(real x) noexcept nogil:
    return <real>1.0 / (<real>1.0 + exponential(-x))


cdef inline double folded(double* lanes) noexcept nogil:
    """Return the sum of lanes, by halves: additions one after another would wait for each other."""
    cdef Py_ssize_t l
    for l in range(8):
        lanes[l] += lanes[l + 8]
    for l in range(4):
        lanes[l] += lanes[l + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


cdef inline double sum_of(const scalar* x, Py_ssize_t n) noexcept nogil:
    cdef double lanes[LANES]
    cdef double total
    cdef Py_ssize_t k, l
    for l in range(LANES):
        lanes[l] = 0
    for k in range(n // LANES):
        for l in range(LANES):
            lanes[l] += get(x, k * LANES + l, lanes[l])
    total = folded(lanes)
    for k in range(n - n % LANES, n):
        total += get(x, k, total)
    return total


cdef inline double squares_of(const scalar* x, Py_ssize_t n, double mean) noexcept nogil:
    """Return the sum of squares of x less its mean."""
    cdef double lanes[LANES]
    cdef double total, v
    cdef Py_ssize_t k, l
    for l in range(LANES):
        lanes[l] = 0
    for k in range(n // LANES):
        for l in range(LANES):
            v = get(x, k * LANES + l, mean) - mean
            lanes[l] += v * v
    total = folded(lanes)
    for k in range(n - n % LANES, n):
        v = get(x, k, mean) - mean
        total += v * v
    return total


def normalize_rows(
    const scalar[:, ::1] x,            # IN   (n, C)
    const real[::1] weight,          # IN   (C,)
    const real[::1] bias,            # IN   (C,)
    double eps,
    scalar[:, ::1] out,                # OUT  (n, C)
):
    cdef Py_ssize_t C = x.shape[1], r, c
    cdef const scalar* row
    cdef const real* w = &weight[0]
    cdef const real* b = &bias[0]
    cdef scalar* to
    cdef double mean, scale
    with nogil:
        for r in range(x.shape[0]):
            row = &x[r, 0]
            to = &out[r, 0]
            mean = sum_of(row, C) / C
            scale = 1 / sqrt(squares_of(row, C, mean) / C + eps)
            for c in range(C):
                put(to, c, <real>((get(row, c, mean) - mean) * scale) * w[c] + b[c])


cdef inline void statistics(
    const scalar* planes, Py_ssize_t step, Py_ssize_t channels, Py_ssize_t n, double eps,
    double* mean, double* scale,
) noexcept nogil:
    """Write every position's mean over the channels, and 1 over the standard deviation."""
    cdef Py_ssize_t c, p
    cdef const scalar* plane
    cdef double v
    for p in range(n):
        mean[p] = 0
        scale[p] = 0
    for c in range(channels):
        plane = planes + c * step
        for p in range(n):
            mean[p] += get(plane, p, mean[p])
    for p in range(n):
        mean[p] /= channels
    for c in range(channels):
        plane = planes + c * step
        for p in range(n):
            v = get(plane, p, mean[p]) - mean[p]
            scale[p] += v * v
    for p in range(n):
        scale[p] = 1 / sqrt(scale[p] / channels + eps)


def normalize_planes(
    const scalar[:, :, :] o,           # IN   (B, H, P)
    const real[::1] weight,          # IN   (H,)
    const real[::1] bias,            # IN   (H,)
    double eps,
    scalar[:, ::1] out,                # OUT  (H, B P)
):
    cdef Py_ssize_t step = o.strides[1] // <Py_ssize_t>sizeof(scalar), t, c, p
    cdef Tile tile
    cdef const scalar* planes
    cdef const scalar* plane
    cdef scalar* to
    cdef double mean[POSITIONS]
    cdef double scale[POSITIONS]
    cdef real y
    with nogil:
        for t in range(o.shape[0] * tiles_of(o.shape[2])):
            tile = find_tile(t, o.shape[2])
            planes = &o[tile.batch, 0, tile.plane]
            statistics(planes, step, o.shape[1], tile.n, eps, mean, scale)
            for c in range(o.shape[1]):
                plane = planes + c * step
                to = &out[c, tile.row]
                for p in range(tile.n):
                    y = <real>((get(plane, p, mean[p]) - mean[p]) * scale[p])
                    put(to, p, y * weight[c] + bias[c])


def gate_planes(
    const scalar[:, ::1] values,       # IN   (K, B P)
    const real[::1] value_bias,      # IN   (K,)
    const scalar[:, ::1] gates,        # IN   (K, B P)
    const real[::1] gate_bias,       # IN   (K,)
    const real[::1] mask,            # IN   (B P,)
    scalar[:, :, :, :] out,            # OUT  (B, S, K / S, P)
):
    cdef Py_ssize_t sides = out.shape[1], channels = out.shape[2], t, c, p
    cdef Tile tile
    cdef const scalar* v
    cdef const scalar* g
    cdef const real* m
    cdef scalar* to
    cdef real by, bg
    with nogil:
        for t in range(out.shape[0] * tiles_of(out.shape[3])):
            tile = find_tile(t, out.shape[3])
            m = &mask[tile.row]
            for c in range(sides * channels):
                v = &values[c, tile.row]
                g = &gates[c, tile.row]
                to = &out[tile.batch, c // channels, c % channels, tile.plane]
                by = value_bias[c]
                bg = gate_bias[c]
                for p in range(tile.n):
                    put(to, p, (get(v, p, by) + by) * logistic(get(g, p, bg) + bg) * m[p])


def gate_rows(
    scalar[:, ::1] values,             # IN, OUT (n, C)
    const real[::1] value_bias,      # IN   (C,)
    const scalar[:, ::1] gates,        # IN   (n, C)
    const real[::1] gate_bias,       # IN   (C,)
):
    cdef Py_ssize_t C = values.shape[1], r, c
    cdef scalar* v
    cdef const scalar* g
    cdef const real* bv = &value_bias[0]
    cdef const real* bg = &gate_bias[0]
    with nogil:
        for r in range(values.shape[0]):
            v = &values[r, 0]
            g = &gates[r, 0]
            for c in range(C):
                put(v, c, (get(v, c, bv[c]) + bv[c]) * logistic(get(g, c, bg[c]) + bg[c]))


def gate_rows_back(
    const scalar[:, ::1] dout,         # IN   (n, C)
    scalar[:, ::1] values,             # IN, OUT (n, C): the values before the gate; their cotangent
    const real[::1] value_bias,      # IN   (C,)
    scalar[:, ::1] gates,              # IN, OUT (n, C)
    const real[::1] gate_bias,       # IN   (C,)
    double[:, ::1] sums,             # IN, OUT (2, C), of both cotangents
):
    cdef Py_ssize_t C = values.shape[1], r, c
    cdef const scalar* by
    cdef scalar* v
    cdef scalar* g
    cdef double* dvalues = &sums[0, 0]
    cdef double* dgates = &sums[1, 0]
    cdef const real* bv = &value_bias[0]
    cdef const real* bg = &gate_bias[0]
    cdef real s, d, ds
    with nogil:
        for r in range(values.shape[0]):
            by = &dout[r, 0]
            v = &values[r, 0]
            g = &gates[r, 0]
            for c in range(C):
                s = logistic(get(g, c, bg[c]) + bg[c])
                d = get(by, c, s)
                ds = d * (get(v, c, s) + bv[c])
                put(v, c, d * s)
                put(g, c, ds * s * (<real>1.0 - s))
            for c in range(C):
                dvalues[c] += get(v, c, dvalues[c])
                dgates[c] += get(g, c, dgates[c])


def gate_planes_back(
    const scalar[:, :, :, :] dout,     # IN   (B, S, K / S, P)
    scalar[:, ::1] values,             # IN, OUT (K, B P): the values before the gate; their cotangent
    const real[::1] value_bias,      # IN   (K,)
    scalar[:, ::1] gates,              # IN, OUT (K, B P)
    const real[::1] gate_bias,       # IN   (K,)
    const real[::1] mask,            # IN   (B P,)
    double[::1] dmask,               # OUT  (B P,)
    double[:, :, :] sums,            # IN, OUT (2, S, K / S), of both cotangents
):
    cdef Py_ssize_t sides = dout.shape[1], channels = dout.shape[2], t, c, p
    cdef Tile tile
    cdef const scalar* by
    cdef const real* m
    cdef scalar* v
    cdef scalar* g
    cdef double* dm
    cdef real bv, bg, s, d, ds
    with nogil:
        for t in range(dout.shape[0] * tiles_of(dout.shape[3])):
            tile = find_tile(t, dout.shape[3])
            m = &mask[tile.row]
            dm = &dmask[tile.row]
            for p in range(tile.n):
                dm[p] = 0
            for c in range(sides * channels):
                by = &dout[tile.batch, c // channels, c % channels, tile.plane]
                v = &values[c, tile.row]
                g = &gates[c, tile.row]
                bv = value_bias[c]
                bg = gate_bias[c]
                for p in range(tile.n):
                    s = logistic(get(g, p, bg) + bg)
                    d = get(by, p, s)
                    ds = d * (get(v, p, s) + bv)
                    dm[p] += ds * s
                    put(v, p, d * m[p] * s)
                    put(g, p, ds * m[p] * s * (<real>1.0 - s))
                sums[0, c // channels, c % channels] += sum_of(v, tile.n)
                sums[1, c // channels, c % channels] += sum_of(g, tile.n)


def normalize_planes_back(
    const scalar[:, :, :] o,           # IN   (B, H, P)
    const real[::1] weight,          # IN   (H,)
    double eps,
    const scalar[:, ::1] dout,         # IN   (H, B P)
    Py_ssize_t first,                # IN   the first channel in do
    scalar[:, :, :] do,                # OUT  (B, K, P)
    double[:, ::1] sums,             # IN, OUT (2, H), of the cotangents of weight and bias
):
    cdef Py_ssize_t step = o.strides[1] // <Py_ssize_t>sizeof(scalar), t, c, p
    cdef Tile tile
    cdef const scalar* planes
    cdef const scalar* plane
    cdef const scalar* by
    cdef scalar* to
    cdef double mean[POSITIONS]
    cdef double scale[POSITIONS]
    cdef double total[POSITIONS]
    cdef double along[POSITIONS]
    cdef double product[POSITIONS]
    cdef double w, d
    with nogil:
        for t in range(o.shape[0] * tiles_of(o.shape[2])):
            tile = find_tile(t, o.shape[2])
            planes = &o[tile.batch, 0, tile.plane]
            statistics(planes, step, o.shape[1], tile.n, eps, mean, scale)
            for p in range(tile.n):
                total[p] = 0
                along[p] = 0
            for c in range(o.shape[1]):
                plane = planes + c * step
                by = &dout[c, tile.row]
                w = weight[c]
                for p in range(tile.n):
                    d = get(by, p, w)
                    product[p] = d * ((get(plane, p, w) - mean[p]) * scale[p])
                    total[p] += w * d
                    along[p] += w * product[p]
                sums[0, c] += sum_of(product, tile.n)
                sums[1, c] += sum_of(by, tile.n)
            for p in range(tile.n):
                total[p] /= o.shape[1]
                along[p] *= scale[p] / o.shape[1]
            for c in range(do.shape[1]):
                plane = planes + (first + c) * step
                by = &dout[first + c, tile.row]
                to = &do[tile.batch, c, tile.plane]
                w = weight[first + c]
                for p in range(tile.n):
                    d = w * get(by, p, w) - total[p]
                    d -= (get(plane, p, w) - mean[p]) * along[p]
                    put(to, p, <real>(scale[p] * d))


def normalize_rows_back(
    const scalar[:, ::1] x,            # IN   (n, C)
    const real[::1] weight,          # IN   (C,)
    double eps,
    const scalar[:, ::1] dout,         # IN   (n, C), one part of the cotangent of y
    scalar[:, ::1] dx,                 # IN, OUT (n, C): the other part; then the cotangent of x
    double[:, ::1] sums,             # IN, OUT (2, C), of the cotangents of weight and bias
):
    cdef Py_ssize_t C = x.shape[1], r, c, k, l
    cdef const scalar* row
    cdef const scalar* one
    cdef const real* w = &weight[0]
    cdef scalar* to
    cdef double* dweight = &sums[0, 0]
    cdef double* dbias = &sums[1, 0]
    cdef double mean, scale, y, v, d, total, along
    cdef double totals[LANES]
    cdef double alongs[LANES]
    with nogil:
        for r in range(x.shape[0]):
            row = &x[r, 0]
            one = &dout[r, 0]
            to = &dx[r, 0]
            mean = sum_of(row, C) / C
            scale = 1 / sqrt(squares_of(row, C, mean) / C + eps)
            for k in range(LANES):
                totals[k] = 0
                alongs[k] = 0
            for c in range(C):
                put(to, c, get(to, c, w[c]) + get(one, c, w[c]))
            for c in range(C):
                y = (get(row, c, mean) - mean) * scale
                d = get(to, c, mean)
                dweight[c] += d * y
                dbias[c] += d
            for k in range(C // LANES):
                for l in range(LANES):
                    c = k * LANES + l
                    v = get(to, c, mean) * w[c]
                    totals[l] += v
                    alongs[l] += v * (get(row, c, mean) - mean)
            for c in range(C - C % LANES, C):
                v = get(to, c, mean) * w[c]
                totals[0] += v
                alongs[0] += v * (get(row, c, mean) - mean)
            total = folded(totals) / C
            along = folded(alongs) * scale * scale / C
            for c in range(C):
                d = get(to, c, mean) * w[c] - total - (get(row, c, mean) - mean) * along
                put(to, c, <real>(scale * d))
