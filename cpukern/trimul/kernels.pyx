# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The steps of a triangle multiplicative update between its products, on the CPU.

x and the output have channels last, in rows; the products take channels first, in planes of
positions. Loops over planes run along positions, and only BLAS transposes. Statistics are in
float64, and a mean is subtracted in two parts, so a large mean costs no digits. A kernel takes a
block of positions and adds its sums over the block to `sums`. bfloat16 arrives as its bits, and is
computed in float32, the type of masks, weights and biases; so are sums over a row or a tile.
"""

from libc.math cimport sqrt
from libc.string cimport memcpy

from cpukern.vectors cimport exponential, real

cdef enum:
    LANES = 16
    POSITIONS = 512
    ROWS = 64

ctypedef unsigned short bfloat16

# The types of arrays; kernels compute in `real`.
ctypedef fused scalar:
    bfloat16
    float
    double

# The type of sums within a row or a tile: float for bfloat16, or else double.
ctypedef fused total:
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


cdef inline total folded(total* lanes) noexcept nogil:
    """Return the sum of lanes, by halves: additions one after another would wait for each other."""
    cdef Py_ssize_t l
    for l in range(8):
        lanes[l] += lanes[l + 8]
    for l in range(4):
        lanes[l] += lanes[l + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


cdef inline total sum_in(const scalar* x, Py_ssize_t n, total* lanes) noexcept nogil:
    cdef total found
    cdef Py_ssize_t k, l
    for l in range(LANES):
        lanes[l] = 0
    for k in range(n // LANES):
        for l in range(LANES):
            lanes[l] += get(x, k * LANES + l, lanes[l])
    found = folded(lanes)
    for k in range(n - n % LANES, n):
        found += get(x, k, found)
    return found


cdef inline double sum_of(const scalar* x, Py_ssize_t n) noexcept nogil:
    cdef float single[LANES]
    cdef double wide[LANES]
    if scalar is bfloat16:
        return sum_in(x, n, single)
    else:
        return sum_in(x, n, wide)


cdef inline real centred(const scalar* x, Py_ssize_t at, real mean, real rest) noexcept nogil:
    """Return a number less the mean, which is a sum of two."""
    return (get(x, at, mean) - mean) - rest


cdef inline total squares_in(
    const scalar* x, Py_ssize_t n, real mean, real rest, total* lanes
) noexcept nogil:
    cdef total found, v
    cdef Py_ssize_t k, l
    for l in range(LANES):
        lanes[l] = 0
    for k in range(n // LANES):
        for l in range(LANES):
            v = centred(x, k * LANES + l, mean, rest)
            lanes[l] += v * v
    found = folded(lanes)
    for k in range(n - n % LANES, n):
        v = centred(x, k, mean, rest)
        found += v * v
    return found


cdef inline double squares_of(
    const scalar* x, Py_ssize_t n, real mean, real rest
) noexcept nogil:
    """Return the sum of squares of x less its mean."""
    cdef float single[LANES]
    cdef double wide[LANES]
    if scalar is bfloat16:
        return squares_in(x, n, mean, rest, single)
    else:
        return squares_in(x, n, mean, rest, wide)


cdef inline void row_statistics(
    const scalar* x, Py_ssize_t rows, Py_ssize_t columns, double eps,
    real* mean, real* rest, real* scale,
) noexcept nogil:
    """Write every row's mean as a sum of two, and 1 over the standard deviation.

    One loop after the other: within one, rows don't wait for each other.
    """
    cdef Py_ssize_t r
    cdef double exact
    cdef double squares[ROWS]
    for r in range(rows):
        exact = sum_of(x + r * columns, columns) / columns
        mean[r] = <real>exact
        rest[r] = <real>(exact - mean[r])
    for r in range(rows):
        squares[r] = squares_of(x + r * columns, columns, mean[r], rest[r])
    for r in range(rows):
        scale[r] = <real>(1 / sqrt(squares[r] / columns + eps))


def normalize_rows(
    const scalar[:, ::1] x,            # IN   (n, C)
    const real[::1] weight,          # IN   (C,)
    const real[::1] bias,            # IN   (C,)
    double eps,
    scalar[:, ::1] out,                # OUT  (n, C)
):
    cdef Py_ssize_t C = x.shape[1], t, r, c, at, rows
    cdef const scalar* row
    cdef const real* w = &weight[0]
    cdef const real* b = &bias[0]
    cdef scalar* to
    cdef real mean[ROWS]
    cdef real rest[ROWS]
    cdef real scale[ROWS]
    with nogil:
        for t in range((x.shape[0] + ROWS - 1) // ROWS):
            at = t * ROWS
            rows = min(<Py_ssize_t>ROWS, x.shape[0] - at)
            row_statistics(&x[at, 0], rows, C, eps, mean, rest, scale)
            for r in range(rows):
                row = &x[at + r, 0]
                to = &out[at + r, 0]
                for c in range(C):
                    put(to, c, centred(row, c, mean[r], rest[r]) * scale[r] * w[c] + b[c])


cdef inline void plane_statistics_in(
    const scalar* planes, Py_ssize_t step, Py_ssize_t channels, Py_ssize_t n, double eps,
    real* mean, real* rest, real* scale, total* sums,
) noexcept nogil:
    cdef Py_ssize_t c, p
    cdef const scalar* plane
    cdef total v
    for p in range(n):
        sums[p] = 0
    for c in range(channels):
        plane = planes + c * step
        for p in range(n):
            sums[p] += get(plane, p, sums[p])
    for p in range(n):
        v = sums[p] / channels
        mean[p] = <real>v
        rest[p] = <real>(v - mean[p])
        sums[p] = 0
    for c in range(channels):
        plane = planes + c * step
        for p in range(n):
            v = centred(plane, p, mean[p], rest[p])
            sums[p] += v * v
    for p in range(n):
        scale[p] = <real>(1 / sqrt(<double>sums[p] / channels + eps))


cdef inline void plane_statistics(
    const scalar* planes, Py_ssize_t step, Py_ssize_t channels, Py_ssize_t n, double eps,
    real* mean, real* rest, real* scale,
) noexcept nogil:
    """Write every position's mean over the channels, as a sum of two, and 1 over the deviation."""
    cdef float single[POSITIONS]
    cdef double wide[POSITIONS]
    if scalar is bfloat16:
        plane_statistics_in(planes, step, channels, n, eps, mean, rest, scale, single)
    else:
        plane_statistics_in(planes, step, channels, n, eps, mean, rest, scale, wide)


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
    cdef real w, b
    cdef real mean[POSITIONS]
    cdef real rest[POSITIONS]
    cdef real scale[POSITIONS]
    with nogil:
        for t in range(o.shape[0] * tiles_of(o.shape[2])):
            tile = find_tile(t, o.shape[2])
            planes = &o[tile.batch, 0, tile.plane]
            plane_statistics(planes, step, o.shape[1], tile.n, eps, mean, rest, scale)
            for c in range(o.shape[1]):
                plane = planes + c * step
                to = &out[c, tile.row]
                w = weight[c]
                b = bias[c]
                for p in range(tile.n):
                    put(to, p, centred(plane, p, mean[p], rest[p]) * scale[p] * w + b)


def gate_planes(
    const scalar[:, :, :] values,      # IN   (S, K, B P)
    const real[:, :] value_bias,     # IN   (S, K)
    const scalar[:, :, :] gates,       # IN   (S, K, B P)
    const real[:, :] gate_bias,      # IN   (S, K)
    const real[::1] mask,            # IN   (B P,)
    scalar[:, :, :, :] out,            # OUT  (B, S, K, P)
):
    cdef Py_ssize_t t, s, c, p
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
            for s in range(out.shape[1]):
                for c in range(out.shape[2]):
                    v = &values[s, c, tile.row]
                    g = &gates[s, c, tile.row]
                    to = &out[tile.batch, s, c, tile.plane]
                    by = value_bias[s, c]
                    bg = gate_bias[s, c]
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


cdef inline void add_columns_in(
    const scalar* x, Py_ssize_t columns, Py_ssize_t rows, double* sums, total* lanes
) noexcept nogil:
    cdef Py_ssize_t c, r, l
    for c in range(columns // LANES):
        for l in range(LANES):
            lanes[l] = 0
        for r in range(rows):
            for l in range(LANES):
                lanes[l] += get(x, r * columns + c * LANES + l, lanes[l])
        for l in range(LANES):
            sums[c * LANES + l] += lanes[l]
    for c in range(columns - columns % LANES, columns):
        lanes[0] = 0
        for r in range(rows):
            lanes[0] += get(x, r * columns + c, lanes[0])
        sums[c] += lanes[0]


cdef inline void add_columns(
    const scalar* x, Py_ssize_t columns, Py_ssize_t rows, double* sums
) noexcept nogil:
    """Add the sums of a tile's columns."""
    cdef float single[LANES]
    cdef double wide[LANES]
    if scalar is bfloat16:
        add_columns_in(x, columns, rows, sums, single)
    else:
        add_columns_in(x, columns, rows, sums, wide)


def gate_rows_back(
    const scalar[:, ::1] dout,         # IN   (n, C)
    scalar[:, ::1] values,             # IN, OUT (n, C): the values before the gate; their cotangent
    const real[::1] value_bias,      # IN   (C,)
    scalar[:, ::1] gates,              # IN, OUT (n, C)
    const real[::1] gate_bias,       # IN   (C,)
    double[:, ::1] sums,             # IN, OUT (2, C), of both cotangents
):
    cdef Py_ssize_t C = values.shape[1], r, c, rows
    cdef const scalar* by
    cdef scalar* v
    cdef scalar* g
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
            rows = r % ROWS + 1
            if rows == ROWS or r == values.shape[0] - 1:
                add_columns(&values[r + 1 - rows, 0], C, rows, &sums[0, 0])
                add_columns(&gates[r + 1 - rows, 0], C, rows, &sums[1, 0])


def gate_planes_back(
    const scalar[:, :, :, :] dout,     # IN   (B, S, K, P)
    scalar[:, :, :] values,            # IN, OUT (S, K, B P): the values before the gate; their cotangent
    const real[:, :] value_bias,     # IN   (S, K)
    scalar[:, :, :] gates,             # IN, OUT (S, K, B P)
    const real[:, :] gate_bias,      # IN   (S, K)
    const real[::1] mask,            # IN   (B P,)
    double[::1] dmask,               # IN, OUT (B P,), or empty if it isn't wanted
    double[:, :, :] sums,            # IN, OUT (2, S, K), of both cotangents
):
    cdef Py_ssize_t t, side, c, p
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
            for side in range(dout.shape[1]):
                for c in range(dout.shape[2]):
                    by = &dout[tile.batch, side, c, tile.plane]
                    v = &values[side, c, tile.row]
                    g = &gates[side, c, tile.row]
                    bv = value_bias[side, c]
                    bg = gate_bias[side, c]
                    if dmask.shape[0]:
                        dm = &dmask[tile.row]
                        for p in range(tile.n):
                            s = logistic(get(g, p, bg) + bg)
                            dm[p] += get(by, p, s) * (get(v, p, s) + bv) * s
                    for p in range(tile.n):
                        s = logistic(get(g, p, bg) + bg)
                        d = get(by, p, s) * m[p] * s
                        ds = d * (get(v, p, s) + bv)
                        put(v, p, d)
                        put(g, p, ds * (<real>1.0 - s))
                    sums[0, side, c] += sum_of(v, tile.n)
                    sums[1, side, c] += sum_of(g, tile.n)


cdef inline void planes_back_in(
    const scalar* planes, Py_ssize_t step, const scalar* dout, Py_ssize_t stride,
    const real* weight, Py_ssize_t channels, Py_ssize_t n, const real* mean, const real* rest,
    const real* scale, real* all, real* along, double* dweight, double* dbias,
    total* totals, total* alongs, total* product,
) noexcept nogil:
    """Add the cotangents of weight and bias, and write two means over every position's channels."""
    cdef Py_ssize_t c, p
    cdef const scalar* plane
    cdef const scalar* by
    cdef total w, d
    for p in range(n):
        totals[p] = 0
        alongs[p] = 0
    for c in range(channels):
        plane = planes + c * step
        by = dout + c * stride
        w = weight[c]
        for p in range(n):
            d = get(by, p, w)
            product[p] = d * (centred(plane, p, mean[p], rest[p]) * scale[p])
            totals[p] += w * d
            alongs[p] += w * product[p]
        dweight[c] += sum_of(product, n)
        dbias[c] += sum_of(by, n)
    for p in range(n):
        all[p] = <real>(totals[p] / channels)
        along[p] = <real>(alongs[p] / channels)


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
    cdef real mean[POSITIONS]
    cdef real rest[POSITIONS]
    cdef real scale[POSITIONS]
    cdef real all[POSITIONS]
    cdef real along[POSITIONS]
    cdef float single[3 * POSITIONS]
    cdef double wide[3 * POSITIONS]
    cdef real w, d
    with nogil:
        for t in range(o.shape[0] * tiles_of(o.shape[2])):
            tile = find_tile(t, o.shape[2])
            planes = &o[tile.batch, 0, tile.plane]
            plane_statistics(planes, step, o.shape[1], tile.n, eps, mean, rest, scale)
            by = &dout[0, tile.row]
            if scalar is bfloat16:
                planes_back_in(
                    planes, step, by, dout.shape[1], &weight[0], o.shape[1], tile.n, mean, rest,
                    scale, all, along, &sums[0, 0], &sums[1, 0], single, single + POSITIONS,
                    single + 2 * POSITIONS,
                )
            else:
                planes_back_in(
                    planes, step, by, dout.shape[1], &weight[0], o.shape[1], tile.n, mean, rest,
                    scale, all, along, &sums[0, 0], &sums[1, 0], wide, wide + POSITIONS,
                    wide + 2 * POSITIONS,
                )
            for c in range(do.shape[1]):
                plane = planes + (first + c) * step
                by = &dout[first + c, tile.row]
                to = &do[tile.batch, c, tile.plane]
                w = weight[first + c]
                for p in range(tile.n):
                    d = w * get(by, p, w) - all[p]
                    d = d - centred(plane, p, mean[p], rest[p]) * scale[p] * along[p]
                    put(to, p, scale[p] * d)


cdef inline void add_weights_in(
    const scalar* x, const scalar* dy, Py_ssize_t columns, Py_ssize_t rows, const real* mean,
    const real* rest, const real* scale, double* sums, total* lanes,
) noexcept nogil:
    cdef Py_ssize_t c, r, l, at
    for c in range(columns // LANES):
        for l in range(LANES):
            lanes[l] = 0
        for r in range(rows):
            for l in range(LANES):
                at = r * columns + c * LANES + l
                lanes[l] += get(dy, at, mean[r]) * (centred(x, at, mean[r], rest[r]) * scale[r])
        for l in range(LANES):
            sums[c * LANES + l] += lanes[l]
    for c in range(columns - columns % LANES, columns):
        lanes[0] = 0
        for r in range(rows):
            at = r * columns + c
            lanes[0] += get(dy, at, mean[r]) * (centred(x, at, mean[r], rest[r]) * scale[r])
        sums[c] += lanes[0]


cdef inline void row_means_in(
    const scalar* row, const real* w, const scalar* dy, Py_ssize_t C, real mean, real rest,
    real scale, real* all, real* along, total* totals, total* alongs,
) noexcept nogil:
    """Write the mean of the cotangent of a standardized row, and its share along the row."""
    cdef Py_ssize_t c, k, l
    cdef total v
    for l in range(LANES):
        totals[l] = 0
        alongs[l] = 0
    for k in range(C // LANES):
        for l in range(LANES):
            c = k * LANES + l
            v = get(dy, c, w[c]) * w[c]
            totals[l] += v
            alongs[l] += v * centred(row, c, mean, rest)
    for c in range(C - C % LANES, C):
        v = get(dy, c, w[c]) * w[c]
        totals[0] += v
        alongs[0] += v * centred(row, c, mean, rest)
    all[0] = <real>(folded(totals) / C)
    along[0] = <real>(folded(alongs) / C * scale * scale)


def normalize_rows_back(
    const scalar[:, ::1] x,            # IN   (n, C)
    const real[::1] weight,          # IN   (C,)
    double eps,
    const scalar[:, ::1] dout,         # IN   (n, C), one part of the cotangent of y
    scalar[:, ::1] dx,                 # IN, OUT (n, C): the other part; then the cotangent of x
    double[:, ::1] sums,             # IN, OUT (2, C), of the cotangents of weight and bias
):
    cdef Py_ssize_t C = x.shape[1], t, first, r, c, rows
    cdef const real* w = &weight[0]
    cdef const scalar* one
    cdef scalar* to
    cdef real mean[ROWS]
    cdef real rest[ROWS]
    cdef real scale[ROWS]
    cdef real all[ROWS]
    cdef real along[ROWS]
    cdef real d
    cdef float single[2 * LANES]
    cdef double wide[2 * LANES]
    with nogil:
        for t in range((x.shape[0] + ROWS - 1) // ROWS):
            first = t * ROWS
            rows = min(<Py_ssize_t>ROWS, x.shape[0] - first)
            row_statistics(&x[first, 0], rows, C, eps, mean, rest, scale)
            for r in range(rows):
                one = &dout[first + r, 0]
                to = &dx[first + r, 0]
                for c in range(C):
                    put(to, c, get(to, c, w[c]) + get(one, c, w[c]))
            one = &x[first, 0]
            to = &dx[first, 0]
            add_columns(to, C, rows, &sums[1, 0])
            if scalar is bfloat16:
                add_weights_in(one, to, C, rows, mean, rest, scale, &sums[0, 0], single)
            else:
                add_weights_in(one, to, C, rows, mean, rest, scale, &sums[0, 0], wide)
            for r in range(rows):
                one = &x[first + r, 0]
                to = &dx[first + r, 0]
                if scalar is bfloat16:
                    row_means_in(
                        one, w, to, C, mean[r], rest[r], scale[r], &all[r], &along[r],
                        single, single + LANES,
                    )
                else:
                    row_means_in(
                        one, w, to, C, mean[r], rest[r], scale[r], &all[r], &along[r],
                        wide, wide + LANES,
                    )
            for r in range(rows):
                one = &x[first + r, 0]
                to = &dx[first + r, 0]
                for c in range(C):
                    d = get(to, c, w[c]) * w[c] - all[r]
                    put(to, c, scale[r] * (d - centred(one, c, mean[r], rest[r]) * along[r]))
