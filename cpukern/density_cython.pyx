# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The density of atoms on the CPU; threads share planes of the map, or atoms for the gradient.

An atom's voxels are taken in rows along z. The part of a row inside of the atom's sphere is computed
beforehand, so the inner loop tests nothing. Along a row a Gaussian is exp2(-(q + c t²)), where q, a
Schur complement in the two other coordinates, is a sum of squares. If t is the same for all rows of a
plane, as for isotropic atoms unless the cell's axes b and c are oblique, both factors are curves that
are computed once for a plane, and the inner loop has no exponential. Map and gradient are summed in an
order that doesn't depend on the number of threads.
"""

from libc.math cimport ceil, floor, isfinite, sqrt
from libc.string cimport memset

from cpukern._cpu cimport Share, in_shares
from cpukern.arrays cimport elements, of, room

# Explicit vectors; without GNU C a vector is one number.
cdef extern from *:
    """
    #include <math.h>
    #include <string.h>
    #if defined(__GNUC__)
    /* Vectors larger than the processor's are only passed between inline functions. */
    #pragma GCC diagnostic ignored "-Wpsabi"
    #define INLINE static inline __attribute__((always_inline))
    #define LANES_OF(real) ((Py_ssize_t)(64 / sizeof(real)))
    #define VECTOR(type) __attribute__((vector_size(64), aligned(sizeof(type)), may_alias))
    #define MASK(integer, condition) ((integer)(condition))
    #define AS(type, v) ((type)(v))
    #else
    #define INLINE static inline
    #define LANES_OF(real) ((Py_ssize_t)1)
    #define VECTOR(type)
    #define MASK(integer, condition) (-(integer)(condition))
    #define AS(type, v) type##_of(v)
    #endif
    typedef float fusedops_floats VECTOR(float);
    typedef double fusedops_doubles VECTOR(double);
    typedef unsigned int fusedops_ints VECTOR(unsigned int);
    typedef unsigned long long fusedops_longs VECTOR(unsigned long long);
    #if !defined(__GNUC__)
    static inline float fusedops_floats_of(unsigned int i) { float f; memcpy(&f, &i, 4); return f; }
    static inline unsigned int fusedops_ints_of(float f) { unsigned int i; memcpy(&i, &f, 4); return i; }
    static inline double fusedops_doubles_of(unsigned long long i)
        { double f; memcpy(&f, &i, 8); return f; }
    static inline unsigned long long fusedops_longs_of(double f)
        { unsigned long long i; memcpy(&i, &f, 8); return i; }
    #endif
    static const float fusedops_lanes_float[16] =
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static const double fusedops_lanes_double[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    #define ONES ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u
    static const unsigned int fusedops_kept[32] = {ONES, ONES};

    /* 2^x for x <= 0. Adding a large number leaves the integer part in the lowest bits, from which it
       goes into the exponent; the rest, at most a half, goes into a minimax polynomial. */
    static inline fusedops_floats fusedops_exp2_float(fusedops_floats x) {
        fusedops_ints kept = MASK(fusedops_ints, x > -126.0f);
        fusedops_floats y = x + 12582912.0f, f = x - (y - 12582912.0f);
        fusedops_floats p = f * 0.000154614449f + 0.0013400428f;
        p = p * f + 0.00961805694f;
        p = p * f + 0.0555032715f;
        p = p * f + 0.240226507f;
        p = p * f + 0.693147182f;
        p = p * f + 1.0f;
        return AS(fusedops_floats, (AS(fusedops_ints, p) + (AS(fusedops_ints, y) << 23)) & kept);
    }
    static inline fusedops_doubles fusedops_exp2_double(fusedops_doubles x) {
        fusedops_longs kept = MASK(fusedops_longs, x > -1022.0);
        fusedops_doubles y = x + 6755399441055744.0, f = x - (y - 6755399441055744.0);
        fusedops_doubles p = f * 4.4558179083360645e-10 + 7.074194297288521e-09;
        p = p * f + 1.0178057087733941e-07;
        p = p * f + 1.3215432535912375e-06;
        p = p * f + 1.5252733841556773e-05;
        p = p * f + 0.00015403530463724353;
        p = p * f + 0.001333355814640647;
        p = p * f + 0.009618129107587256;
        p = p * f + 0.055504108664821625;
        p = p * f + 0.24022650695910158;
        p = p * f + 0.6931471805599453;
        p = p * f + 1.0;
        return AS(fusedops_doubles, (AS(fusedops_longs, p) + (AS(fusedops_longs, y) << 52)) & kept);
    }

    /* row: the sum of all Gaussians on a row of voxels, padded to whole vectors.
       moments: sums over rows of one Gaussian times the values, times 1, y, z, y², z², yz. */
    #define DEFINE(real, vector) \\
    static void fusedops_row_##real( \\
        real *out, Py_ssize_t n, Py_ssize_t G, const real *q, const real *t, const real *c, \\
        const real *norm) { \\
        vector lane = *(const vector *)fusedops_lanes_##real; \\
        for (Py_ssize_t k = 0; k < n; k += LANES_OF(real)) { \\
            vector sum = lane - lane, at = lane + (real)k; \\
            for (Py_ssize_t g = 0; g < G; g++) { \\
                vector x = at + t[g]; \\
                sum += norm[g] * fusedops_exp2_##real(-(q[g] + c[g] * x * x)); \\
            } \\
            *(vector *)(out + k) = sum; \\
        } \\
    } \\
    static void fusedops_moments_##real( \\
        Py_ssize_t rows, const Py_ssize_t *n, const real *values, Py_ssize_t pitch, const real *q, \\
        const real *t, Py_ssize_t G, real c, real norm, const real *y, const real *z, \\
        double *sums) { \\
        vector lane = *(const vector *)fusedops_lanes_##real; \\
        vector s = lane - lane, sy = s, sz = s, szz = s, syy = s, syz = s; \\
        for (Py_ssize_t r = 0; r < rows; r++) \\
            for (Py_ssize_t k = 0; k < n[r]; k += LANES_OF(real)) { \\
                vector at = lane + (real)k, x = at + t[r * G]; \\
                vector e = norm * fusedops_exp2_##real(-(q[r * G] + c * x * x)); \\
                e = e * *(const vector *)(values + r * pitch + k); \\
                vector ez = e * (at + z[r]), ey = e * y[r]; \\
                s += e; sy += ey; sz += ez; szz += ez * (at + z[r]); syy += ey * y[r]; \\
                syz += ez * y[r]; \\
            } \\
        for (Py_ssize_t l = 0; l < LANES_OF(real); l++) { \\
            sums[0] += ((real *)&s)[l]; sums[1] += ((real *)&sy)[l]; \\
            sums[2] += ((real *)&sz)[l]; sums[3] += ((real *)&syy)[l]; \\
            sums[4] += ((real *)&szz)[l]; sums[5] += ((real *)&syz)[l]; \\
        } \\
    }
    DEFINE(float, fusedops_floats)
    DEFINE(double, fusedops_doubles)

    /* curve: scale · exp2(-(a + b s + c s²)) for s = start, start + 1, ..., padded to whole vectors.
       inside: for each row of a plane the first voxel in the sphere, the number of voxels in sphere and
       box, and the squared distance from the z axis; padded to whole vectors of rows.
       sum: add the sum of all Gaussians, weights times curves, to a row of the map, in whole vectors
       with zeros beyond the sphere, as far as the row has room. add_plane: the same for all rows of a
       plane that `inside` found; they may go around the cell several times.
       read_plane: copy the rows of a plane that `inside` found, with zeros beyond the sphere, up to a
       whole vector.
       contract: sum one Gaussian's weights times values over rows, with factors 1, y and the squared
       distance from the z axis; multiply by the curve along z, and add the terms that gradients need
       to five vectors. block: the same for V vectors of a row; of one, two rows are summed at a time, so
       that six sums hide each other's latency. */
    #define SUM(vector, i) (*(vector *)(sums + (i) * (64 / sizeof(*sums))))
    #define DEFINE_CURVES(real, vector, integers) \\
    static void fusedops_curve_##real( \\
        real *out, Py_ssize_t n, real start, real a, real b, real c, real scale) { \\
        vector lane = *(const vector *)fusedops_lanes_##real; \\
        for (Py_ssize_t k = 0; k < n; k += LANES_OF(real)) { \\
            vector s = lane + (start + (real)k); \\
            *(vector *)(out + k) = scale * fusedops_exp2_##real(-(a + s * (b + c * s))); \\
        } \\
    } \\
    INLINE void fusedops_sum_##real( \\
        real *to, Py_ssize_t n, Py_ssize_t room, Py_ssize_t G, const real *weights, \\
        Py_ssize_t rows, const real *curves, Py_ssize_t pitch) { \\
        Py_ssize_t k = 0, l; \\
        for (; k < n; k += LANES_OF(real)) { \\
            vector sum = weights[0] * *(const vector *)(curves + k); \\
            for (Py_ssize_t g = 1; g < G; g++) \\
                sum += weights[g * rows] * *(const vector *)(curves + g * pitch + k); \\
            Py_ssize_t left = n - k < LANES_OF(real) ? n - k : LANES_OF(real); \\
            if (k + LANES_OF(real) <= room) { \\
                const char *kept = (const char *)fusedops_kept + sizeof(vector); \\
                integers own = *(const integers *)(kept - left * sizeof(real)); \\
                *(vector *)(to + k) += AS(vector, AS(integers, sum) & own); \\
            } else for (l = 0; l < left; l++) to[k + l] += ((real *)&sum)[l]; \\
        } \\
    } \\
    INLINE void fusedops_plane_##real( \\
        real *plane, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y, Py_ssize_t rows, \\
        const double *first, const double *length, Py_ssize_t low, Py_ssize_t G, \\
        const real *weights, Py_ssize_t most, const real *curves, Py_ssize_t pitch) { \\
        for (Py_ssize_t r = 0; r < rows; r++, y = y + 1 < ny ? y + 1 : 0) { \\
            Py_ssize_t n = (Py_ssize_t)length[r], begin = (Py_ssize_t)first[r], z = begin; \\
            if (n <= 0) continue; \\
            while (z < 0) z += nz; \\
            while (z >= nz) z -= nz; \\
            const real *here = curves + (begin - low); \\
            real *to = plane + y * nz; \\
            Py_ssize_t take = n < nz - z ? n : nz - z; \\
            fusedops_sum_##real(to + z, take, nz - z, G, weights + r, most, here, pitch); \\
            for (; take < n; take += nz) fusedops_sum_##real( \\
                to, n - take < nz ? n - take : nz, nz, G, weights + r, most, here + take, pitch); \\
        } \\
    } \\
    static void fusedops_add_plane_##real( \\
        real *plane, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y, Py_ssize_t rows, \\
        const double *first, const double *length, Py_ssize_t low, Py_ssize_t G, \\
        const real *weights, Py_ssize_t most, const real *curves, Py_ssize_t pitch) { \\
        if (G == 5) fusedops_plane_##real( \\
            plane, ny, nz, y, rows, first, length, low, 5, weights, most, curves, pitch); \\
        else fusedops_plane_##real( \\
            plane, ny, nz, y, rows, first, length, low, G, weights, most, curves, pitch); \\
    } \\
    static void fusedops_inside_##real( \\
        Py_ssize_t rows, double y, double dx, double z, const double *m, double square, \\
        double low, double high, double *first, double *length, real *squares) { \\
        /* Numbers: for all that a compiler knows, the stores below might change m. */ \\
        double over = 1 / m[1], xx = m[2] * dx * dx, xy = 2 * m[3] * dx, yy = m[4]; \\
        double from = z - m[5] * dx, slope = m[6]; \\
        for (Py_ssize_t r = 0; r < (rows + 7) / 8 * 8; r++) { \\
            double dy = y + (double)r, along = xx + dy * (xy + yy * dy); \\
            double left = square - along, half = sqrt((left > 0 ? left : 0) * over); \\
            double middle = from - slope * dy; \\
            double begin = ceil(middle - half), end = floor(middle + half); \\
            first[r] = begin > low ? begin : low; \\
            length[r] = left < 0 ? 0 : (end < high ? end : high) - first[r] + 1; \\
            squares[r] = (real)along; \\
        } \\
    } \\
    static void fusedops_read_plane_##real( \\
        const real *plane, const real *end, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y, \\
        Py_ssize_t rows, const double *first, const double *length, Py_ssize_t low, Py_ssize_t n, \\
        real *values, Py_ssize_t pitch) { \\
        vector lane = *(const vector *)fusedops_lanes_##real; \\
        Py_ssize_t z = (low % nz + nz) % nz, whole = (n + LANES_OF(real) - 1) / LANES_OF(real), k; \\
        whole *= LANES_OF(real); \\
        for (Py_ssize_t r = 0; r < rows; r++, y = y + 1 < ny ? y + 1 : 0, values += pitch) { \\
            const real *given = plane + y * nz + z; \\
            Py_ssize_t from = (Py_ssize_t)first[r] - low, past = from + (Py_ssize_t)length[r]; \\
            int straight = z + n <= nz && given + whole <= end; \\
            if (straight) for (k = 0; k < whole; k += LANES_OF(real)) { \\
                integers after = MASK(integers, lane >= (real)(from - k)); \\
                integers own = after & MASK(integers, lane < (real)(past - k)); \\
                integers bits = AS(integers, *(const vector *)(given + k)); \\
                *(vector *)(values + k) = AS(vector, bits & own); \\
            } else { \\
                Py_ssize_t at = (z + from) % nz; \\
                memset(values, 0, (size_t)whole * sizeof(real)); \\
                for (k = from; k < past; k++, at = at + 1 < nz ? at + 1 : 0) \\
                    values[k] = plane[y * nz + at]; \\
            } \\
        } \\
    } \\
    INLINE void fusedops_block_##real( \\
        Py_ssize_t V, Py_ssize_t rows, const real *values, Py_ssize_t pitch, const real *weights, \\
        const real *by_y, const real *by_square, const real *curve, real x, real start, real c, \\
        real *sums) { \\
        vector lane = *(const vector *)fusedops_lanes_##real, zero = lane - lane; \\
        vector one[2] = {zero, zero}, ys[2] = {zero, zero}, squares[2] = {zero, zero}; \\
        Py_ssize_t pair = 3 - V, next = V == 2 ? LANES_OF(real) : pitch, r = 0; \\
        for (; r + pair <= rows; r += pair) \\
            for (Py_ssize_t v = 0; v < 2; v++) { \\
                vector own = *(const vector *)(values + r * pitch + v * next); \\
                Py_ssize_t at = V == 2 ? r : r + v; \\
                one[v] += weights[at] * own; ys[v] += by_y[at] * own; \\
                squares[v] += by_square[at] * own; \\
            } \\
        if (V == 1) { \\
            if (r < rows) { \\
                vector own = *(const vector *)(values + r * pitch); \\
                one[0] += weights[r] * own; ys[0] += by_y[r] * own; \\
                squares[0] += by_square[r] * own; \\
            } \\
            one[0] += one[1]; ys[0] += ys[1]; squares[0] += squares[1]; \\
        } \\
        for (Py_ssize_t v = 0; v < V; v++) { \\
            vector z = lane + (start + (real)(v * LANES_OF(real))); \\
            vector e = *(const vector *)(curve + v * LANES_OF(real)), all = e * one[v]; \\
            SUM(vector, 0) += all; SUM(vector, 1) += x * all; SUM(vector, 2) += e * ys[v]; \\
            SUM(vector, 3) += z * all; \\
            SUM(vector, 4) += e * squares[v] + c * z * z * all; \\
        } \\
    } \\
    static void fusedops_contract_##real( \\
        Py_ssize_t rows, const real *values, Py_ssize_t pitch, const real *weights, \\
        const real *y, const real *square, const real *curve, Py_ssize_t n, real x, real start, \\
        real c, real *by_y, real *sums) { \\
        real *by_square = by_y + (rows + LANES_OF(real)) / LANES_OF(real) * LANES_OF(real); \\
        Py_ssize_t k = 0, two = 2 * LANES_OF(real); \\
        for (Py_ssize_t r = 0; r < rows; r++) { \\
            by_y[r] = weights[r] * y[r]; by_square[r] = weights[r] * square[r]; \\
        } \\
        for (; k + LANES_OF(real) < n; k += two, values += two, curve += two) \\
            fusedops_block_##real( \\
                2, rows, values, pitch, weights, by_y, by_square, curve, x, start + (real)k, c, sums); \\
        if (k < n) fusedops_block_##real( \\
            1, rows, values, pitch, weights, by_y, by_square, curve, x, start + (real)k, c, sums); \\
    }
    DEFINE_CURVES(float, fusedops_floats, fusedops_ints)
    DEFINE_CURVES(double, fusedops_doubles, fusedops_longs)
    """
    void curve_float "fusedops_curve_float"(
        float* out, Py_ssize_t n, float start, float a, float b, float c, float scale
    ) noexcept nogil
    void curve_double "fusedops_curve_double"(
        double* out, Py_ssize_t n, double start, double a, double b, double c, double scale
    ) noexcept nogil
    void add_plane_float "fusedops_add_plane_float"(
        float* plane, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y, Py_ssize_t rows,
        const double* first, const double* length, Py_ssize_t low, Py_ssize_t G,
        const float* weights, Py_ssize_t most, const float* curves, Py_ssize_t pitch,
    ) noexcept nogil
    void add_plane_double "fusedops_add_plane_double"(
        double* plane, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y, Py_ssize_t rows,
        const double* first, const double* length, Py_ssize_t low, Py_ssize_t G,
        const double* weights, Py_ssize_t most, const double* curves, Py_ssize_t pitch,
    ) noexcept nogil
    void inside_float "fusedops_inside_float"(
        Py_ssize_t rows, double y, double dx, double z, const double* metric, double square,
        double low, double high, double* first, double* length, float* squares,
    ) noexcept nogil
    void inside_double "fusedops_inside_double"(
        Py_ssize_t rows, double y, double dx, double z, const double* metric, double square,
        double low, double high, double* first, double* length, double* squares,
    ) noexcept nogil
    void read_plane_float "fusedops_read_plane_float"(
        const float* plane, const float* end, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y,
        Py_ssize_t rows, const double* first, const double* length, Py_ssize_t low, Py_ssize_t n,
        float* values, Py_ssize_t pitch,
    ) noexcept nogil
    void contract_float "fusedops_contract_float"(
        Py_ssize_t rows, const float* values, Py_ssize_t pitch, const float* weights,
        const float* y, const float* square, const float* curve, Py_ssize_t n, float x, float start,
        float c, float* by_y, float* sums,
    ) noexcept nogil
    void read_plane_double "fusedops_read_plane_double"(
        const double* plane, const double* end, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y,
        Py_ssize_t rows, const double* first, const double* length, Py_ssize_t low, Py_ssize_t n,
        double* values, Py_ssize_t pitch,
    ) noexcept nogil
    void contract_double "fusedops_contract_double"(
        Py_ssize_t rows, const double* values, Py_ssize_t pitch, const double* weights,
        const double* y, const double* square, const double* curve, Py_ssize_t n, double x, double start,
        double c, double* by_y, double* sums,
    ) noexcept nogil
    void row_float "fusedops_row_float"(
        float* out, Py_ssize_t n, Py_ssize_t G, const float* q, const float* t, const float* c,
        const float* norm,
    ) noexcept nogil
    void row_double "fusedops_row_double"(
        double* out, Py_ssize_t n, Py_ssize_t G, const double* q, const double* t,
        const double* c, const double* norm,
    ) noexcept nogil
    void moments_float "fusedops_moments_float"(
        Py_ssize_t rows, const Py_ssize_t* n, const float* values, Py_ssize_t pitch,
        const float* q, const float* t, Py_ssize_t G, float c, float norm, const float* y,
        const float* z, double* sums,
    ) noexcept nogil
    void moments_double "fusedops_moments_double"(
        Py_ssize_t rows, const Py_ssize_t* n, const double* values, Py_ssize_t pitch,
        const double* q, const double* t, Py_ssize_t G, double c, double norm, const double* y,
        const double* z, double* sums,
    ) noexcept nogil

cdef enum:
    # Numbers in a vector of float32, to which rows are padded.
    LANES = 16
    # Numbers of a Gaussian: norm, c, Schur complement xx, xy, yy, and slopes of its centre by x and y.
    NUMBERS = 7
    # Slabs of planes of the map, whatever the number of threads.
    SLABS = 32

cdef double PI = 3.141592653589793
cdef double LOG2_E = 1.4426950408889634

ctypedef fused real:
    float
    double

# The grid: the metric |w|² in voxels, split by a Schur complement as for a Gaussian, and the largest
# radius.
cdef struct Grid:
    Py_ssize_t nx
    Py_ssize_t ny
    Py_ssize_t nz
    double step[9]
    double metric[7]
    double largest

# An atom's box in voxels, which may lie outside of the grid and be larger, the atom's position, also in
# voxels, and its squared radius.
cdef struct Atom:
    Py_ssize_t low[3]
    Py_ssize_t high[3]
    double at[3]
    double square
    bint usable


cdef void schur(const double* form, double* numbers) noexcept nogil:
    """Split a form xx, yy, zz, xy, xz, yz into c (z + u x + v y)² and a form in x and y."""
    numbers[1] = form[2]
    numbers[5] = form[4] / form[2]
    numbers[6] = form[5] / form[2]
    numbers[2] = form[0] - form[4] * numbers[5]
    numbers[3] = form[3] - form[4] * numbers[6]
    numbers[4] = form[1] - form[5] * numbers[6]


cdef void in_voxels(const double* step, const double* P, double* form) noexcept nogil:
    """Write stepᵀ P step, both as xx, yy, zz, xy, xz, yz."""
    cdef int i, j, k, n
    cdef double a[9]
    cdef double full[9]
    full[0], full[4], full[8] = P[0], P[1], P[2]
    full[1] = full[3] = P[3]
    full[2] = full[6] = P[4]
    full[5] = full[7] = P[5]
    for i in range(3):
        for j in range(3):
            a[3 * i + j] = 0
            for k in range(3):
                a[3 * i + j] += full[3 * i + k] * step[3 * k + j]
    for n in range(6):
        i = n if n < 3 else (0 if n < 5 else 1)
        j = n if n < 3 else (1 if n == 3 else 2)
        form[n] = 0
        for k in range(3):
            form[n] += step[3 * k + i] * a[3 * k + j]


cdef double invert(const double* M, double* inverse) noexcept nogil:
    """Write the inverse of a symmetric matrix xx, yy, zz, xy, xz, yz, and return its determinant."""
    cdef double det
    cdef int n
    inverse[0] = M[1] * M[2] - M[5] * M[5]
    inverse[1] = M[0] * M[2] - M[4] * M[4]
    inverse[2] = M[0] * M[1] - M[3] * M[3]
    inverse[3] = M[4] * M[5] - M[3] * M[2]
    inverse[4] = M[3] * M[5] - M[4] * M[1]
    inverse[5] = M[3] * M[4] - M[0] * M[5]
    det = M[0] * inverse[0] + M[3] * inverse[3] + M[4] * inverse[4]
    for n in range(6):
        inverse[n] = inverse[n] / det
    return det


cdef double gaussian(
    const real* b, bint anisotropic, double amplitude, double width, double* P
) noexcept nogil:
    """Write the form P of a Gaussian, Å⁻², as xx, yy, zz, xy, xz, yz, and return its norm."""
    cdef double M[6]
    cdef double det
    cdef int n
    if anisotropic:
        for n in range(6):
            M[n] = 2 * PI * PI * b[n] + (0.25 * width if n < 3 else 0)
        det = invert(M, P)
        for n in range(6):
            P[n] = PI * PI * P[n]
        return amplitude * PI * sqrt(PI / det)
    memset(P, 0, 6 * sizeof(double))
    P[0] = P[1] = P[2] = 4 * PI * PI / (width + b[0])
    return amplitude * P[0] / PI * sqrt(P[0] / PI)


cdef bint positive(const real* b, bint anisotropic, double least) noexcept nogil:
    """Return whether the sharpest Gaussian has a positive width in every direction."""
    cdef double m[6]
    cdef double second
    cdef int n
    if not anisotropic:
        return least + b[0] > 0
    for n in range(6):
        m[n] = 8 * PI * PI * b[n] + (least if n < 3 else 0)
    second = m[0] * m[1] - m[3] * m[3]
    return m[0] > 0 and second > 0 and (
        m[2] * second - m[0] * m[5] * m[5] - m[1] * m[4] * m[4] + 2 * m[3] * m[4] * m[5] > 0
    )


cdef void set_atom(
    const Grid* grid, const double* to_grid, const real* x, const real* b,
    bint anisotropic, double occupancy, const double* amplitudes, const double* widths,
    Py_ssize_t G, double radius, double slack, Atom* atom, real* numbers,
) noexcept nogil:
    """Write an atom's data for the loops over voxels; an atom without density gets an empty box."""
    cdef double total = occupancy + x[0] + x[1] + x[2] + radius, least = widths[0], reach, norm
    cdef double P[6]
    cdef double form[6]
    cdef double found[NUMBERS]
    cdef Py_ssize_t size, g
    cdef int d, n
    memset(atom, 0, sizeof(Atom))
    for d in range(3):
        atom.high[d] = -1
    for n in range(6 if anisotropic else 1):
        total = total + b[n]
    for g in range(G):
        total = total + amplitudes[g] + widths[g]
        least = min(least, widths[g])
    if not isfinite(total) or not 0 <= radius <= grid.largest:
        return
    if not positive(b, anisotropic, least):
        return
    atom.usable = True
    atom.square = radius * radius * (1 + slack)
    for d in range(3):
        size = grid.nx if d == 0 else grid.ny if d == 1 else grid.nz
        reach = 0
        for n in range(3):
            atom.at[d] += to_grid[3 * d + n] * x[n]
            reach += to_grid[3 * d + n] * to_grid[3 * d + n]
        atom.at[d] -= floor(atom.at[d] / size) * size
        # An atom so far away that no digit of its position in the cell is left may be anywhere.
        if not 0 <= atom.at[d] <= size:
            atom.at[d] = 0
        reach = radius * sqrt(reach) * (1 + slack)
        atom.low[d] = <Py_ssize_t>ceil(atom.at[d] - reach)
        atom.high[d] = <Py_ssize_t>floor(atom.at[d] + reach)
    for g in range(G):
        norm = gaussian(b, anisotropic, amplitudes[g], widths[g], P)
        in_voxels(grid.step, P, form)
        schur(form, found)
        found[0] = norm
        for n in range(1, 5):
            found[n] = LOG2_E * found[n]
        for n in range(NUMBERS):
            numbers[n * G + g] = <real>found[n]


cdef inline Py_ssize_t wrapped(Py_ssize_t at, Py_ssize_t size) noexcept nogil:
    # Loops, since a division takes longer than a row, and boxes seldom exceed the grid.
    if at < 0:
        at = at + size
    elif at >= size:
        at = at - size
    return at if 0 <= at < size else (at % size + size) % size


cdef inline Py_ssize_t rows_inside(
    const Grid* grid, const Atom* atom, double dx, double* first, double* length, real* squares
) noexcept nogil:
    """Find the parts of a plane's rows inside of an atom's sphere; return the number of rows."""
    cdef Py_ssize_t rows = atom.high[1] - atom.low[1] + 1
    cdef double y = atom.low[1] - atom.at[1]
    if real is float:
        inside_float(
            rows, y, dx, atom.at[2], grid.metric, atom.square, atom.low[2], atom.high[2], first,
            length, squares,
        )
    else:
        inside_double(
            rows, y, dx, atom.at[2], grid.metric, atom.square, atom.low[2], atom.high[2], first,
            length, squares,
        )
    return rows


cdef inline void set_row(
    const real* numbers, Py_ssize_t G, double dx, double dy, double z, real* q, real* t
) noexcept nogil:
    """Write q and the first t of all Gaussians on the row at (dx, dy) that begins at z."""
    cdef Py_ssize_t g
    cdef real x = <real>dx, y = <real>dy
    for g in range(G):
        q[g] = x * (x * numbers[2 * G + g] + 2 * y * numbers[3 * G + g]) + (
            y * y * numbers[4 * G + g]
        )
        t[g] = <real>z + x * numbers[5 * G + g] + y * numbers[6 * G + g]


cdef inline void curve(
    real* out, Py_ssize_t n, double start, double a, double b, double c, double scale
) noexcept nogil:
    if real is float:
        curve_float(out, n, <float>start, <float>a, <float>b, <float>c, <float>scale)
    else:
        curve_double(out, n, start, a, b, c, scale)


cdef inline void set_curves(
    const Atom* atom, const real* numbers, Py_ssize_t G, double dx, double scale, Py_ssize_t most,
    Py_ssize_t pitch, real* weights, real* curves,
) noexcept nogil:
    """Write both factors of all Gaussians on a plane: one for each row, and one along z."""
    cdef Py_ssize_t g
    for g in range(G):
        curve(
            weights + g * most, atom.high[1] - atom.low[1] + 1, atom.low[1] - atom.at[1],
            dx * dx * numbers[2 * G + g], 2 * dx * numbers[3 * G + g], numbers[4 * G + g],
            scale * numbers[g],
        )
        curve(
            curves + g * pitch, atom.high[2] - atom.low[2] + 1,
            atom.low[2] - atom.at[2] + dx * numbers[5 * G + g], 0, 0, numbers[G + g], 1,
        )


cdef inline void set_plane(
    const Grid* grid, const Atom* atom, const real* numbers, Py_ssize_t G, Py_ssize_t x,
    double scale, bint first, Py_ssize_t most, Py_ssize_t pitch, real* weights, real* curves,
    real* middle, real* along_x,
) noexcept nogil:
    """Do the same as `set_curves`; at right angles, reuse the factors that planes of an atom share."""
    cdef Py_ssize_t g, r, plane = x - atom.low[0]
    if grid.metric[3] != 0 or grid.metric[5] != 0:
        set_curves(atom, numbers, G, x - atom.at[0], scale, most, pitch, weights, curves)
        return
    if first:
        set_curves(atom, numbers, G, 0, scale, most, pitch, middle, curves)
        for g in range(G):
            curve(
                along_x + g * most, atom.high[0] - atom.low[0] + 1, atom.low[0] - atom.at[0],
                0, 0, numbers[2 * G + g], 1,
            )
    for g in range(G):
        for r in range(atom.high[1] - atom.low[1] + 1):
            weights[g * most + r] = along_x[g * most + plane] * middle[g * most + r]


cdef inline void add_plane(
    real* plane, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y, Py_ssize_t rows, const double* first,
    const double* length, Py_ssize_t low, Py_ssize_t G, const real* weights, Py_ssize_t most,
    const real* curves, Py_ssize_t pitch,
) noexcept nogil:
    if real is float:
        add_plane_float(
            plane, ny, nz, y, rows, first, length, low, G, weights, most, curves, pitch
        )
    else:
        add_plane_double(
            plane, ny, nz, y, rows, first, length, low, G, weights, most, curves, pitch
        )


cdef void some_planes(
    const Grid* grid, Py_ssize_t low, Py_ssize_t high, const long long* listed, Py_ssize_t count,
    const Atom* atoms, const real* numbers, bint separable, const real* occupancy, Py_ssize_t G,
    real* out, real* scratch, double* extents, Py_ssize_t most, Py_ssize_t pitch,
) noexcept nogil:
    """Write planes low to high of the map, from the list of their atoms."""
    cdef Py_ssize_t n, plane, x, y, z, r, rows, first, length, k, take, done
    cdef const Atom* atom
    cdef const real* own
    cdef double dx
    cdef real share
    cdef real* values = scratch
    cdef real* squares = values + pitch
    cdef real* q = squares + most
    cdef real* t = q + G
    cdef real* weights = q
    cdef real* curves = weights + G * most
    cdef real* middle = curves + G * pitch
    cdef real* along_x = middle + G * most
    cdef real* to
    cdef bint fresh
    memset(out + low * grid.ny * grid.nz, 0, (high - low) * grid.ny * grid.nz * sizeof(real))
    for n in range(count):
        atom = atoms + listed[n]
        own = numbers + listed[n] * NUMBERS * G
        share = occupancy[listed[n]]
        fresh = True
        for x in range(atom.low[0], atom.high[0] + 1):
            plane = wrapped(x, grid.nx)
            if plane < low or plane >= high:
                continue
            dx = x - atom.at[0]
            if separable:
                set_plane(
                    grid, atom, own, G, x, share, fresh, most, pitch, weights, curves, middle,
                    along_x,
                )
                fresh = False
            rows = rows_inside(grid, atom, dx, extents, extents + most, squares)
            if separable:
                add_plane(
                    out + plane * grid.ny * grid.nz, grid.ny, grid.nz,
                    wrapped(atom.low[1], grid.ny), rows, extents, extents + most, atom.low[2], G,
                    weights, most, curves, pitch,
                )
                continue
            for r in range(rows):
                y = atom.low[1] + r
                first = <Py_ssize_t>extents[r]
                length = <Py_ssize_t>extents[most + r]
                if length <= 0:
                    continue
                to = out + (plane * grid.ny + wrapped(y, grid.ny)) * grid.nz
                z = wrapped(first, grid.nz)
                set_row(own, G, dx, y - atom.at[1], first - atom.at[2], q, t)
                if real is float:
                    row_float(values, length, G, q, t, own + G, own)
                else:
                    row_double(values, length, G, q, t, own + G, own)
                done = 0
                while done < length:
                    take = min(length - done, grid.nz - z)
                    for k in range(take):
                        to[z + k] += share * values[done + k]
                    done = done + take
                    z = 0


cdef inline void read_row(
    const Grid* grid, Py_ssize_t x, Py_ssize_t y, Py_ssize_t first,
    Py_ssize_t length, const real* cotangent, real* values,
) noexcept nogil:
    """Copy a row of the map, wrapped around the cell."""
    cdef const real* given = cotangent + (
        wrapped(x, grid.nx) * grid.ny + wrapped(y, grid.ny)
    ) * grid.nz
    cdef Py_ssize_t z = wrapped(first, grid.nz), done = 0, take, k
    while done < length:
        take = min(length - done, grid.nz - z)
        for k in range(take):
            values[done + k] = given[z + k]
        done = done + take
        z = 0


cdef inline void read_plane(
    const real* plane, const real* end, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y,
    Py_ssize_t rows, const double* first, const double* length, Py_ssize_t low, Py_ssize_t n,
    real* values, Py_ssize_t pitch,
) noexcept nogil:
    if real is float:
        read_plane_float(plane, end, ny, nz, y, rows, first, length, low, n, values, pitch)
    else:
        read_plane_double(plane, end, ny, nz, y, rows, first, length, low, n, values, pitch)


cdef inline void contract(
    Py_ssize_t rows, const real* values, Py_ssize_t pitch, const real* weights, const real* y,
    const real* square, const real* curve, Py_ssize_t n, double x, double start, double c,
    real* by_y, real* sums,
) noexcept nogil:
    if real is float:
        contract_float(
            rows, values, pitch, weights, y, square, curve, n, <float>x, <float>start, <float>c,
            by_y, sums,
        )
    else:
        contract_double(
            rows, values, pitch, weights, y, square, curve, n, x, start, c, by_y, sums
        )


cdef void pull_back_separable(
    const Grid* grid, const Atom* atom, const real* numbers, double b, double occupancy,
    const double* widths, Py_ssize_t G, const real* cotangent, real* on_x, real* on_b,
    real* on_occupancy, real* scratch, double* extents, Py_ssize_t most, Py_ssize_t pitch,
) noexcept nogil:
    """Write an isotropic atom's gradients if its factors are curves."""
    cdef Py_ssize_t x, g, r, rows, begin, stop, low, n, lanes = 64 // <Py_ssize_t>sizeof(real)
    cdef double left, half, centre
    cdef const double* m = grid.metric
    cdef const real* end = cotangent + grid.nx * grid.ny * grid.nz
    cdef int i
    cdef double dx, c
    cdef real* weights = scratch
    cdef real* curves = weights + G * most
    cdef real* ys = curves + G * pitch
    cdef real* squares = ys + most
    cdef real* sums = squares + most
    cdef real* middle = sums + 5 * G * lanes
    cdef real* along_x = middle + G * most
    cdef real* by_y = along_x + G * most
    cdef real* values = by_y + 2 * most
    cdef double s[5]
    cdef double sum_x[3]
    cdef double sum_b = 0, total = 0
    memset(sums, 0, 5 * G * lanes * sizeof(real))
    memset(sum_x, 0, sizeof(sum_x))
    rows = atom.high[1] - atom.low[1] + 1
    for r in range(rows):
        ys[r] = <real>(atom.low[1] + r - atom.at[1])
    for x in range(atom.low[0], atom.high[0] + 1):
        dx = x - atom.at[0]
        set_plane(
            grid, atom, numbers, G, x, 1, x == atom.low[0], most, pitch, weights, curves, middle,
            along_x,
        )
        rows_inside(grid, atom, dx, extents, extents + most, squares)
        # Only rows that meet the sphere, and the voxels between their ends, or one more.
        left = atom.square - (m[2] - m[3] * m[3] / m[4]) * dx * dx
        if left < 0:
            continue
        half = sqrt(left / m[4]) + 1e-6
        centre = atom.at[1] - m[3] / m[4] * dx
        begin = max(<Py_ssize_t>ceil(centre - half) - atom.low[1], 0)
        stop = min(<Py_ssize_t>floor(centre + half) - atom.low[1] + 1, rows)
        half = sqrt(left / m[1]) + 1e-6
        centre = atom.at[2] - m[5] * dx
        low = max(<Py_ssize_t>ceil(centre - half), atom.low[2])
        n = min(<Py_ssize_t>floor(centre + half), atom.high[2]) - low + 1
        if begin >= stop or n <= 0:
            continue
        read_plane(
            cotangent + wrapped(x, grid.nx) * grid.ny * grid.nz, end, grid.ny, grid.nz,
            wrapped(atom.low[1] + begin, grid.ny), stop - begin, extents + begin,
            extents + most + begin, low, n, values, pitch,
        )
        for g in range(G):
            contract(
                stop - begin, values, pitch, weights + g * most + begin, ys + begin,
                squares + begin, curves + g * pitch + low - atom.low[2], n, dx,
                low - atom.at[2] + dx * grid.metric[5], grid.metric[1], by_y, sums + 5 * g * lanes,
            )
    for g in range(G if atom.usable else 0):
        # 1, x, y, z and |w|², with z relative to the point of the row nearest to the atom.
        for i in range(5):
            s[i] = 0
            for r in range(lanes):
                s[i] += sums[(5 * g + i) * lanes + r]
        s[3] -= grid.metric[5] * s[1]
        c = 4 * PI * PI / (widths[g] + b)
        total = total + s[0]
        sum_b = sum_b + (c * s[4] - 1.5 * s[0]) / (widths[g] + b)
        for i in range(3):
            sum_x[i] += 2 * c * (
                grid.step[3 * i] * s[1] + grid.step[3 * i + 1] * s[2] + grid.step[3 * i + 2] * s[3]
            )
    for i in range(3):
        on_x[i] = <real>(occupancy * sum_x[i]) if atom.usable else 0
    on_b[0] = <real>(occupancy * sum_b) if atom.usable else 0
    on_occupancy[0] = <real>total


cdef void pull_back(
    const Grid* grid, const Atom* atom, const real* numbers, const real* b, bint anisotropic,
    double occupancy, const double* amplitudes, const double* widths, Py_ssize_t G,
    const real* cotangent, real* on_x, real* on_b, real* on_occupancy, real* scratch,
    double* extents, Py_ssize_t* lengths, Py_ssize_t most, Py_ssize_t pitch, double* moments,
) noexcept nogil:
    """Write an atom's gradients, from moments of every Gaussian times the cotangent."""
    cdef Py_ssize_t x, y, g, r, rows, first, length
    cdef int i, j, n
    cdef double dx, dy, trace
    cdef real* q = scratch
    cdef real* t = q + most * G
    cdef real* ys = t + most * G
    cdef real* zs = ys + most
    cdef real* values = zs + most
    cdef double s[6]
    cdef double P[6]
    cdef double W[9]
    cdef double Pw[3]
    cdef double PW[9]
    cdef double total = 0
    cdef double sum_x[3]
    cdef double sum_b[6]
    cdef double* m
    memset(moments, 0, 10 * G * sizeof(double))
    memset(sum_x, 0, sizeof(sum_x))
    memset(sum_b, 0, sizeof(sum_b))
    for x in range(atom.low[0], atom.high[0] + 1):
        dx = x - atom.at[0]
        rows_inside(grid, atom, dx, extents, extents + most, zs)
        rows = 0
        for r in range(atom.high[1] - atom.low[1] + 1):
            y = atom.low[1] + r
            dy = y - atom.at[1]
            first = <Py_ssize_t>extents[r]
            length = <Py_ssize_t>extents[most + r]
            if length <= 0:
                continue
            set_row(numbers, G, dx, dy, first - atom.at[2], q + rows * G, t + rows * G)
            ys[rows] = <real>dy
            zs[rows] = <real>(first - atom.at[2])
            lengths[rows] = length
            memset(
                values + rows * pitch + length // LANES * LANES, 0, LANES * sizeof(real)
            )
            read_row(grid, x, y, first, length, cotangent, values + rows * pitch)
            rows = rows + 1
        for g in range(G):
            memset(s, 0, sizeof(s))
            if real is float:
                moments_float(
                    rows, lengths, values, pitch, q + g, t + g, G, numbers[G + g], numbers[g], ys,
                    zs, s,
                )
            else:
                moments_double(
                    rows, lengths, values, pitch, q + g, t + g, G, numbers[G + g], numbers[g], ys,
                    zs, s,
                )
            # 1, x, y, z, xx, yy, zz, xy, xz, yz.
            m = moments + 10 * g
            m[0] += s[0]
            m[1] += dx * s[0]
            m[2] += s[1]
            m[3] += s[2]
            m[4] += dx * dx * s[0]
            m[5] += s[3]
            m[6] += s[4]
            m[7] += dx * s[1]
            m[8] += dx * s[2]
            m[9] += s[5]
    for g in range(G if atom.usable else 0):
        m = moments + 10 * g
        gaussian(b, anisotropic, amplitudes[g], widths[g], P)
        total = total + m[0]
        for i in range(3):
            W[i] = 0
            for j in range(3):
                W[i] += grid.step[3 * i + j] * m[1 + j]
        Pw[0] = P[0] * W[0] + P[3] * W[1] + P[4] * W[2]
        Pw[1] = P[3] * W[0] + P[1] * W[1] + P[5] * W[2]
        Pw[2] = P[4] * W[0] + P[5] * W[1] + P[2] * W[2]
        for i in range(3):
            sum_x[i] += 2 * Pw[i]
        # Second moments in Å².
        squares(grid.step, m + 4, W)
        if not anisotropic:
            trace = W[0] + W[1] + W[2]
            sum_b[0] += (P[0] * trace - 1.5 * m[0]) / (widths[g] + b[0])
            continue
        squares_of(P, W, PW)
        for n in range(6):
            sum_b[n] += (2 if n < 3 else 4) * (PW[n] - 0.5 * m[0] * P[n])
    for i in range(3):
        on_x[i] = <real>(occupancy * sum_x[i]) if atom.usable else 0
    for n in range(6 if anisotropic else 1):
        on_b[n] = <real>(occupancy * sum_b[n]) if atom.usable else 0
    on_occupancy[0] = <real>total


cdef void squares(const double* step, const double* form, double* out) noexcept nogil:
    """Write step S stepᵀ, both as xx, yy, zz, xy, xz, yz."""
    cdef double turned[9]
    cdef int i, j
    for i in range(3):
        for j in range(3):
            turned[3 * i + j] = step[3 * j + i]
    in_voxels(turned, form, out)


cdef void squares_of(const double* P, const double* form, double* out) noexcept nogil:
    """Write P S P, all as xx, yy, zz, xy, xz, yz."""
    cdef double full[9]
    full[0], full[4], full[8] = P[0], P[1], P[2]
    full[1] = full[3] = P[3]
    full[2] = full[6] = P[4]
    full[5] = full[7] = P[5]
    in_voxels(full, form, out)


cdef Grid grid_of(shape, const double* step, double largest):
    cdef Grid grid
    cdef double unit[6]
    cdef double form[6]
    cdef int i
    grid.nx, grid.ny, grid.nz = shape
    for i in range(9):
        grid.step[i] = step[i]
    grid.largest = largest
    for i in range(6):
        unit[i] = i < 3
    in_voxels(grid.step, unit, form)
    schur(form, grid.metric)
    return grid


# The arguments of a call. Shares get a pointer to a struct with typed pointers to arrays, so each type
# has a function of its own. Scratch has a row for every thread.
cdef struct SetUp:
    Grid grid
    const double* to_grid
    const void* xyz
    Py_ssize_t count
    const void* b
    Py_ssize_t bs
    const void* occupancy
    const double* amplitudes
    const double* widths
    Py_ssize_t gaussians
    const double* radius
    double slack
    Atom* atoms
    void* numbers

cdef struct Scratch:
    void* numbers
    Py_ssize_t row
    double* extents
    Py_ssize_t* lengths
    double* moments
    Py_ssize_t moments_row
    Py_ssize_t most
    Py_ssize_t pitch

cdef struct Splat:
    const SetUp* given
    bint separable
    const long long* listed
    const long long* pointers
    Py_ssize_t thickness
    void* out
    Scratch scratch

cdef struct SplatVjp:
    const SetUp* given
    bint separable
    const void* cotangent
    void* on_xyz
    void* on_b
    void* on_occupancy
    Scratch scratch


cdef void some_atoms(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const SetUp* call = <const SetUp*>given
    cdef Py_ssize_t G = call.gaussians, n
    for n in range(begin, end):
        set_atom(
            &call.grid, call.to_grid, <const real*>call.xyz + 3 * n,
            <const real*>call.b + call.bs * n, call.bs == 6, (<const real*>call.occupancy)[n],
            call.amplitudes + G * n, call.widths + G * n, G, call.radius[n], call.slack,
            call.atoms + n, <real*>call.numbers + NUMBERS * G * n,
        )


cdef void some_slabs(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Splat* call = <const Splat*>given
    cdef const SetUp* set_up = call.given
    cdef const Scratch* own = &call.scratch
    cdef Py_ssize_t s
    for s in range(begin, end):
        some_planes(
            &set_up.grid, s * call.thickness, min((s + 1) * call.thickness, set_up.grid.nx),
            call.listed + call.pointers[s], call.pointers[s + 1] - call.pointers[s],
            set_up.atoms, <const real*>set_up.numbers, call.separable,
            <const real*>set_up.occupancy, set_up.gaussians, <real*>call.out,
            <real*>own.numbers + thread * own.row, own.extents + 2 * thread * own.most, own.most,
            own.pitch,
        )


cdef void some_pull_backs(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const SplatVjp* call = <const SplatVjp*>given
    cdef const SetUp* set_up = call.given
    cdef const Scratch* own = &call.scratch
    cdef Py_ssize_t G = set_up.gaussians, bs = set_up.bs, n
    cdef const real* numbers
    cdef const real* b
    cdef real occupancy
    cdef real* on_x
    cdef real* on_b
    cdef real* on_occupancy
    cdef real* scratch = <real*>own.numbers + thread * own.row
    cdef double* extents = own.extents + 2 * thread * own.most
    for n in range(begin, end):
        numbers = <const real*>set_up.numbers + NUMBERS * G * n
        b = <const real*>set_up.b + bs * n
        occupancy = (<const real*>set_up.occupancy)[n]
        on_x = <real*>call.on_xyz + 3 * n
        on_b = <real*>call.on_b + bs * n
        on_occupancy = <real*>call.on_occupancy + n
        if call.separable:
            pull_back_separable(
                &set_up.grid, set_up.atoms + n, numbers, b[0], occupancy, set_up.widths + G * n,
                G, <const real*>call.cotangent, on_x, on_b, on_occupancy, scratch, extents,
                own.most, own.pitch,
            )
        else:
            pull_back(
                &set_up.grid, set_up.atoms + n, numbers, b, bs == 6, occupancy,
                set_up.amplitudes + G * n, set_up.widths + G * n, G,
                <const real*>call.cotangent, on_x, on_b, on_occupancy, scratch, extents,
                own.lengths + thread * own.most, own.most, own.pitch,
                own.moments + thread * own.moments_row,
            )


cdef Py_ssize_t padded(Py_ssize_t extent) noexcept nogil:
    """Return a number of voxels up to a whole vector, and one more."""
    return (extent // LANES + 2) * LANES


cdef bytearray set_up(
    SetUp* call, Scratch* scratch, shape, step, to_grid, measures,
    const real[:, ::1] xyz, b, const real[::1] occupancy, amplitudes, widths, radius,
    double slack, int threads,
):
    """Prepare every atom for the loops over voxels; return the memory that holds the results."""
    cdef Py_ssize_t most = 1, row = 1, n
    cdef const Atom* atom
    call.grid = grid_of(
        shape, <const double*>elements(step, 8), (<const double*>elements(measures, 8))[9]
    )
    call.to_grid = <const double*>elements(to_grid, 8)
    call.xyz = &xyz[0, 0]
    call.count = xyz.shape[0]
    call.b = elements(b, sizeof(real))
    call.bs = b.size // call.count
    call.occupancy = &occupancy[0]
    call.amplitudes = <const double*>elements(amplitudes, 8)
    call.widths = <const double*>elements(widths, 8)
    call.gaussians = widths.shape[1]
    call.radius = <const double*>elements(radius, 8)
    call.slack = slack
    cdef bytearray memory = room(
        call.count * (sizeof(Atom) + NUMBERS * call.gaussians * sizeof(real))
    )
    call.atoms = <Atom*>of(memory)
    call.numbers = call.atoms + call.count
    with nogil:
        in_shares(<Share>some_atoms[real], call, call.count, threads)
        for n in range(call.count):
            atom = call.atoms + n
            most = max(most, atom.high[0] - atom.low[0] + 1, atom.high[1] - atom.low[1] + 1)
            row = max(row, atom.high[2] - atom.low[2] + 1)
    scratch.most = padded(most)
    scratch.pitch = padded(row)
    return memory


cdef bytearray scratch_of(
    Scratch* scratch, Py_ssize_t row, Py_ssize_t item, int threads
):
    """Give every thread a row of numbers, and extents; all zeros.

    Zeros, because lanes without a voxel are computed too, and old numbers there may be denormal, and
    slow.
    """
    cdef Py_ssize_t extents = threads * 2 * scratch.most * sizeof(double)
    cdef bytearray memory = room(extents + threads * row * item)
    memset(of(memory), 0, len(memory))
    scratch.extents = <double*>of(memory)
    scratch.numbers = of(memory) + extents
    scratch.row = row
    return memory


cdef inline Py_ssize_t slabs_reached(
    const Atom* atom, Py_ssize_t planes, Py_ssize_t slab, Py_ssize_t slabs, Py_ssize_t* first
) noexcept nogil:
    """Return the number of slabs that an atom reaches, from the first on and wrapped around."""
    cdef Py_ssize_t apart
    if atom.high[0] < atom.low[0]:
        return 0
    first[0] = wrapped(atom.low[0], planes) // slab
    if atom.high[0] - atom.low[0] + slab >= planes:
        return slabs
    apart = wrapped(atom.high[0], planes) // slab - first[0]
    return (apart if apart >= 0 else apart + slabs) + 1


cdef void count_listed(
    const SetUp* call, Py_ssize_t slab, Py_ssize_t slabs, long long* pointers
) noexcept nogil:
    """Write the start of every slab's atoms in the list."""
    cdef Py_ssize_t n, k, first = 0
    for k in range(slabs + 1):
        pointers[k] = 0
    for n in range(call.count):
        for k in range(slabs_reached(call.atoms + n, call.grid.nx, slab, slabs, &first)):
            pointers[(first + k) % slabs + 1] += 1
    for k in range(slabs):
        pointers[k + 1] += pointers[k]


cdef void list_atoms(
    const SetUp* call, Py_ssize_t slab, Py_ssize_t slabs, const long long* pointers,
    long long* listed,
) noexcept nogil:
    """List the atoms that reach every slab, in their order."""
    cdef long long at[SLABS]
    cdef Py_ssize_t n, k, s, first = 0
    for s in range(slabs):
        at[s] = pointers[s]
    for n in range(call.count):
        for k in range(slabs_reached(call.atoms + n, call.grid.nx, slab, slabs, &first)):
            s = (first + k) % slabs
            listed[at[s]] = n
            at[s] += 1


def splat(
    # IN: a lattice, of float64; b (N,) or (N, 6); and of float64 (N, G), (N, G), (N,)
    shape,
    step,
    to_grid,
    measures,
    const real[:, ::1] xyz,
    b,
    const real[::1] occupancy,
    amplitudes,
    widths,
    radius,
    double slack,
    bint separable,
    int threads,
    # OUT
    real[:, :, ::1] out,
):
    cdef SetUp given
    cdef Splat call
    cdef Scratch* scratch = &call.scratch
    cdef bytearray atoms = set_up[real](
        &given, scratch, shape, step, to_grid, measures, xyz, b, occupancy, amplitudes,
        widths, radius, slack, threads,
    )
    cdef Py_ssize_t G = given.gaussians, most = scratch.most, pitch = scratch.pitch
    cdef Py_ssize_t slab = (given.grid.nx + SLABS - 1) // SLABS
    cdef Py_ssize_t slabs = (given.grid.nx + slab - 1) // slab
    cdef long long pointers[SLABS + 1]
    with nogil:
        count_listed(&given, slab, slabs, pointers)
    cdef bytearray lists = room(pointers[slabs] * sizeof(long long))
    cdef long long* listed = <long long*>of(lists)
    cdef bytearray own = scratch_of(
        scratch, pitch + most + (3 * most + pitch) * G, sizeof(real), threads
    )
    call.given = &given
    call.separable = separable
    call.listed = listed
    call.pointers = pointers
    call.thickness = slab
    call.out = &out[0, 0, 0]
    with nogil:
        list_atoms(&given, slab, slabs, pointers, listed)
        in_shares(<Share>some_slabs[real], &call, slabs, threads)


def splat_vjp(
    # IN: as for `splat`
    shape,
    step,
    to_grid,
    measures,
    const real[:, ::1] xyz,
    b,
    const real[::1] occupancy,
    amplitudes,
    widths,
    radius,
    double slack,
    bint separable,
    int threads,
    const real[:, :, ::1] cotangent,
    # OUT: in the shapes of xyz, b and occupancy; an output that is None is computed anyway, at no cost
    real[:, ::1] on_xyz,
    on_b,
    real[::1] on_occupancy,
):
    cdef SetUp given
    cdef SplatVjp call
    cdef Scratch* scratch = &call.scratch
    cdef bytearray atoms = set_up[real](
        &given, scratch, shape, step, to_grid, measures, xyz, b, occupancy, amplitudes,
        widths, radius, slack, threads,
    )
    cdef Py_ssize_t G = given.gaussians, most = scratch.most, pitch = scratch.pitch
    cdef bytearray own = scratch_of(
        scratch, most * (4 * G + 4 + pitch) + G * (pitch + 5 * LANES), sizeof(real), threads
    )
    cdef bytearray lengths = room(threads * most * sizeof(Py_ssize_t))
    scratch.lengths = <Py_ssize_t*>of(lengths)
    scratch.moments_row = (10 * G + 7) // 8 * 8
    cdef bytearray moments = room(threads * scratch.moments_row * sizeof(double))
    scratch.moments = <double*>of(moments)
    cdef bytearray unwanted = room(given.count * (4 + given.bs) * sizeof(real))
    cdef real* spare = <real*>of(unwanted)
    call.given = &given
    call.separable = separable
    call.cotangent = &cotangent[0, 0, 0]
    call.on_xyz = &on_xyz[0, 0] if on_xyz is not None else spare
    spare += 3 * given.count
    call.on_b = elements(on_b, sizeof(real)) if on_b is not None else spare
    spare += given.bs * given.count
    call.on_occupancy = &on_occupancy[0] if on_occupancy is not None else spare
    with nogil:
        in_shares(<Share>some_pull_backs[real], &call, given.count, threads)
