# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The density of atoms on the CPU; threads share planes of the map, or atoms for the gradient.

An atom's voxels are taken in rows along z. The part of a row inside of the atom's sphere is computed
beforehand, so the inner loop tests nothing. Along a row a Gaussian is exp2(-(q + c t²)), where q, a
Schur complement in the two other coordinates, is a sum of squares. If t is the same for all rows of a
plane, as for isotropic atoms unless the cell's axes b and c are oblique, both factors are curves that
are computed once for a plane, and the inner loop has no exponential. Map and gradient are summed in an
order that doesn't depend on the number of threads.

Tangents of atoms change a Gaussian by a factor, a polynomial of second degree. The map's derivative sums
such products, and second derivatives by atoms follow from moments with and without the factor.
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

    /* row: the sum of all Gaussians on a row of voxels, padded to whole vectors. Where d is given, a
       Gaussian is multiplied by d0 + d1 z + d2 z², at z, z + step, ...
       moments: sums over rows of one Gaussian times the values, times 1, y, z, y², z², yz; and where
       d is given, the same sums with d as another factor. */
    #define DEFINE(real, vector) \\
    INLINE void fusedops_any_row_##real( \\
        real *out, Py_ssize_t n, Py_ssize_t G, const real *q, const real *t, const real *c, \\
        const real *norm, real z, real step, const real *d) { \\
        vector lane = *(const vector *)fusedops_lanes_##real; \\
        for (Py_ssize_t k = 0; k < n; k += LANES_OF(real)) { \\
            vector sum = lane - lane, at = lane + (real)k, w = step * at + z; \\
            for (Py_ssize_t g = 0; g < G; g++) { \\
                vector x = at + t[g]; \\
                vector e = norm[g] * fusedops_exp2_##real(-(q[g] + c[g] * x * x)); \\
                if (d) e = e * (d[g] + w * (d[G + g] + w * d[2 * G + g])); \\
                sum += e; \\
            } \\
            *(vector *)(out + k) = sum; \\
        } \\
    } \\
    static void fusedops_row_##real( \\
        real *out, Py_ssize_t n, Py_ssize_t G, const real *q, const real *t, const real *c, \\
        const real *norm, real z, real step, const real *d) { \\
        if (d) fusedops_any_row_##real(out, n, G, q, t, c, norm, z, step, d); \\
        else fusedops_any_row_##real(out, n, G, q, t, c, norm, z, step, NULL); \\
    } \\
    INLINE void fusedops_spread_##real(const real *from, Py_ssize_t count, double *sums) { \\
        for (Py_ssize_t i = 0; i < count; i++) \\
            for (Py_ssize_t l = 0; l < LANES_OF(real); l++) \\
                sums[i] += from[i * LANES_OF(real) + l]; \\
    } \\
    INLINE void fusedops_any_moments_##real( \\
        Py_ssize_t rows, const Py_ssize_t *n, const real *values, Py_ssize_t pitch, const real *q, \\
        const real *t, Py_ssize_t G, real c, real norm, const real *y, const real *z, \\
        real step, const real *d, Py_ssize_t pitch_d, double *sums) { \\
        vector lane = *(const vector *)fusedops_lanes_##real, zero = lane - lane; \\
        vector s[6] = {zero, zero, zero, zero, zero, zero}; \\
        vector u[6] = {zero, zero, zero, zero, zero, zero}; \\
        for (Py_ssize_t r = 0; r < rows; r++) \\
            for (Py_ssize_t k = 0; k < n[r]; k += LANES_OF(real)) { \\
                vector at = lane + (real)k, x = at + t[r * G], w = step * at + z[r]; \\
                vector e = norm * fusedops_exp2_##real(-(q[r * G] + c * x * x)); \\
                e = e * *(const vector *)(values + r * pitch + k); \\
                vector ez = e * w, ey = e * y[r]; \\
                s[0] += e; s[1] += ey; s[2] += ez; s[3] += ey * y[r]; s[4] += ez * w; \\
                s[5] += ez * y[r]; \\
                if (d) { \\
                    const real *own = d + r * pitch_d; \\
                    e = e * (own[0] + w * (own[G] + w * own[2 * G])); \\
                    ez = e * w; ey = e * y[r]; \\
                    u[0] += e; u[1] += ey; u[2] += ez; u[3] += ey * y[r]; u[4] += ez * w; \\
                    u[5] += ez * y[r]; \\
                } \\
            } \\
        fusedops_spread_##real((const real *)s, 6, sums); \\
        if (d) fusedops_spread_##real((const real *)u, 6, sums + 6); \\
    } \\
    static void fusedops_moments_##real( \\
        Py_ssize_t rows, const Py_ssize_t *n, const real *values, Py_ssize_t pitch, const real *q, \\
        const real *t, Py_ssize_t G, real c, real norm, const real *y, const real *z, \\
        real step, const real *d, Py_ssize_t pitch_d, double *sums) { \\
        if (d) fusedops_any_moments_##real( \\
            rows, n, values, pitch, q, t, G, c, norm, y, z, step, d, pitch_d, sums); \\
        else fusedops_any_moments_##real( \\
            rows, n, values, pitch, q, t, G, c, norm, y, z, step, NULL, 0, sums); \\
    }
    DEFINE(float, fusedops_floats)
    DEFINE(double, fusedops_doubles)

    /* curve: scale · exp2(-(a + c s²)) for s = start, start + 1, ..., padded to whole vectors.
       inside: for each row of a plane the first voxel in the sphere, the number of voxels in sphere and
       box, and the squared distance from the z axis; padded to whole vectors of rows.
       sum: add the sum of all Gaussians, weights times curves, to a row of the map, in whole vectors
       with zeros beyond the sphere, as far as the row has room. add_plane: the same for all rows of a
       plane that `inside` found; they may go around the cell several times.
       read_plane: copy the rows of a plane that `inside` found, with zeros beyond the sphere, up to a
       whole vector.
       contract: sum one Gaussian's weights times values over rows, with factors 1, y and the squared
       distance from the z axis; multiply by the curve along z, and add the terms that gradients need
       to five vectors; and, where another curve is given, the same with it to five more. block: the same for V vectors of a row; of one, two rows are summed at a time, so
       that six sums hide each other's latency. */
    #define SUM(vector, i) (*(vector *)(sums + (i) * (64 / sizeof(*sums))))
    #define DEFINE_CURVES(real, vector, integers) \\
    static void fusedops_curve_##real( \\
        real *out, Py_ssize_t n, real start, real a, real c, real scale) { \\
        vector lane = *(const vector *)fusedops_lanes_##real; \\
        for (Py_ssize_t k = 0; k < n; k += LANES_OF(real)) { \\
            vector s = lane + (start + (real)k); \\
            *(vector *)(out + k) = scale * fusedops_exp2_##real(-(a + c * s * s)); \\
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
        else if (G == 10) fusedops_plane_##real( \\
            plane, ny, nz, y, rows, first, length, low, 10, weights, most, curves, pitch); \\
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
    INLINE void fusedops_terms_##real( \\
        vector e, vector one, vector ys, vector squares, vector z, real x, real c, real *sums) { \\
        vector all = e * one; \\
        SUM(vector, 0) += all; SUM(vector, 1) += x * all; SUM(vector, 2) += e * ys; \\
        SUM(vector, 3) += z * all; \\
        SUM(vector, 4) += e * squares + c * z * z * all; \\
    } \\
    INLINE void fusedops_block_##real( \\
        Py_ssize_t V, Py_ssize_t rows, const real *values, Py_ssize_t pitch, const real *weights, \\
        const real *by_y, const real *by_square, const real *curve, const real *bent, real x, \\
        real start, real c, real *sums, real *more) { \\
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
            Py_ssize_t k = v * LANES_OF(real); \\
            fusedops_terms_##real( \\
                *(const vector *)(curve + k), one[v], ys[v], squares[v], z, x, c, sums); \\
            if (bent) fusedops_terms_##real( \\
                *(const vector *)(bent + k), one[v], ys[v], squares[v], z, x, c, more); \\
        } \\
    } \\
    static void fusedops_contract_##real( \\
        Py_ssize_t rows, const real *values, Py_ssize_t pitch, const real *weights, \\
        const real *y, const real *square, const real *curve, const real *bent, Py_ssize_t n, \\
        real x, real start, real c, real *by_y, real *sums, real *more) { \\
        real *by_square = by_y + (rows + LANES_OF(real)) / LANES_OF(real) * LANES_OF(real); \\
        Py_ssize_t k = 0, two = 2 * LANES_OF(real); \\
        for (Py_ssize_t r = 0; r < rows; r++) { \\
            by_y[r] = weights[r] * y[r]; by_square[r] = weights[r] * square[r]; \\
        } \\
        for (; k + LANES_OF(real) < n; k += two, values += two) \\
            fusedops_block_##real( \\
                2, rows, values, pitch, weights, by_y, by_square, curve + k, bent ? bent + k : bent, \\
                x, start + (real)k, c, sums, more); \\
        if (k < n) fusedops_block_##real( \\
            1, rows, values, pitch, weights, by_y, by_square, curve + k, bent ? bent + k : bent, x, \\
            start + (real)k, c, sums, more); \\
    }
    DEFINE_CURVES(float, fusedops_floats, fusedops_ints)
    DEFINE_CURVES(double, fusedops_doubles, fusedops_longs)
    """
    void curve_float "fusedops_curve_float"(
        float* out, Py_ssize_t n, float start, float a, float c, float scale
    ) noexcept nogil
    void curve_double "fusedops_curve_double"(
        double* out, Py_ssize_t n, double start, double a, double c, double scale
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
        const float* y, const float* square, const float* curve, const float* bent, Py_ssize_t n,
        float x, float start, float c, float* by_y, float* sums, float* more,
    ) noexcept nogil
    void read_plane_double "fusedops_read_plane_double"(
        const double* plane, const double* end, Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y,
        Py_ssize_t rows, const double* first, const double* length, Py_ssize_t low, Py_ssize_t n,
        double* values, Py_ssize_t pitch,
    ) noexcept nogil
    void contract_double "fusedops_contract_double"(
        Py_ssize_t rows, const double* values, Py_ssize_t pitch, const double* weights,
        const double* y, const double* square, const double* curve, const double* bent, Py_ssize_t n,
        double x, double start, double c, double* by_y, double* sums, double* more,
    ) noexcept nogil
    void row_float "fusedops_row_float"(
        float* out, Py_ssize_t n, Py_ssize_t G, const float* q, const float* t, const float* c,
        const float* norm, float z, float step, const float* d,
    ) noexcept nogil
    void row_double "fusedops_row_double"(
        double* out, Py_ssize_t n, Py_ssize_t G, const double* q, const double* t,
        const double* c, const double* norm, double z, double step, const double* d,
    ) noexcept nogil
    void moments_float "fusedops_moments_float"(
        Py_ssize_t rows, const Py_ssize_t* n, const float* values, Py_ssize_t pitch,
        const float* q, const float* t, Py_ssize_t G, float c, float norm, const float* y,
        const float* z, float step, const float* d, Py_ssize_t pitch_d, double* sums,
    ) noexcept nogil
    void moments_double "fusedops_moments_double"(
        Py_ssize_t rows, const Py_ssize_t* n, const double* values, Py_ssize_t pitch,
        const double* q, const double* t, Py_ssize_t G, double c, double norm, const double* y,
        const double* z, double step, const double* d, Py_ssize_t pitch_d, double* sums,
    ) noexcept nogil

cdef enum:
    # Numbers in a vector of float32, to which rows are padded.
    LANES = 16
    # Numbers of a Gaussian: norm, c, Schur complement xx, xy, yy, and slopes of its centre by x and y.
    NUMBERS = 7
    # Numbers of a Gaussian's change: those of a polynomial p + q·w + w·S w in the frame, for p, q and S.
    # Where Gaussians are products of curves, w is in voxels, and S is the one number S / metric.
    CHANGE = 10
    # Sums over voxels of a Gaussian times 1, w and w wᵀ; and times its change, 1, w and w wᵀ.
    MOMENTS = 20
    # Slabs of planes of the map, whatever the number of threads.
    SLABS = 32

# Where a symmetric matrix xx, yy, zz, xy, xz, yz has its nine elements.
cdef int[9] AT = [0, 3, 4, 3, 1, 5, 4, 5, 2]

cdef double PI = 3.141592653589793
cdef double LOG2_E = 1.4426950408889634

ctypedef fused real:
    float
    double

# The grid: the metric |w|² in voxels, split by a Schur complement as for a Gaussian, and the largest
# radius. The map has some of the cell's nx planes, from `start` on. `step` is a product of `frame`,
# orthonormal, and a lower triangular matrix of `edges`: in the frame's coordinates the vectors of a plane
# have one x, of a row one y, and in no cell are they small differences of large numbers.
cdef struct Grid:
    Py_ssize_t nx
    Py_ssize_t ny
    Py_ssize_t nz
    Py_ssize_t start
    Py_ssize_t planes
    double step[9]
    double frame[9]
    double edges[6]
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


# The arguments of a call. Shares get a pointer to a struct with typed pointers to arrays, so each type
# has a function of its own. Scratch has a row for every thread.
cdef struct Tangents:
    const double* xyz
    const double* b
    const double* occupancy
    const double* amplitudes
    const double* widths

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
    bint separable
    bint bare
    Atom* atoms
    double* numbers
    # The change of every Gaussian along tangents; NULL without tangents.
    Tangents along
    void* changes

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
    const long long* listed
    const long long* pointers
    Py_ssize_t thickness
    void* out
    Scratch scratch

cdef struct SplatVjp:
    const SetUp* given
    const void* cotangent
    void* on_xyz
    void* on_b
    void* on_occupancy
    void* on_amplitudes
    void* on_widths
    Scratch scratch


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
    Py_ssize_t G, double radius, double slack, bint bare, Atom* atom, double* numbers,
) noexcept nogil:
    """Write an atom's data for the loops over voxels; an atom without density gets an empty box.

    Bare Gaussians are of one electron.
    """
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
    for d in range(3):
        for n in range(3):
            atom.at[d] += to_grid[3 * d + n] * x[n]
        if not isfinite(atom.at[d]):
            return
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
            reach += to_grid[3 * d + n] * to_grid[3 * d + n]
        atom.at[d] -= floor(atom.at[d] / size) * size
        # An atom so far away that no digit of its position in the cell is left may be anywhere.
        if not 0 <= atom.at[d] <= size:
            atom.at[d] = 0
        reach = radius * sqrt(reach) * (1 + slack)
        atom.low[d] = <Py_ssize_t>ceil(atom.at[d] - reach)
        atom.high[d] = <Py_ssize_t>floor(atom.at[d] + reach)
    # An atom that doesn't reach the map has no voxels.
    size = wrapped(atom.low[0] - grid.start, grid.nx)
    if size >= grid.planes and size + atom.high[0] - atom.low[0] < grid.nx:
        atom.high[0] = atom.low[0] - 1
        return
    for g in range(G):
        norm = gaussian(b, anisotropic, 1 if bare else amplitudes[g], widths[g], P)
        in_voxels(grid.step, P, form)
        schur(form, found)
        found[0] = norm
        for n in range(1, 5):
            found[n] = LOG2_E * found[n]
        for n in range(NUMBERS):
            numbers[n * G + g] = found[n]


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
    const double* numbers, Py_ssize_t G, double x, double y, double z, real* q, real* t
) noexcept nogil:
    """Write q and the first t of all Gaussians on the row at (x, y) that begins at z.

    In cells far from right angles both are small differences of large numbers.
    """
    cdef Py_ssize_t g
    for g in range(G):
        q[g] = <real>(
            x * (x * numbers[2 * G + g] + 2 * y * numbers[3 * G + g]) + y * y * numbers[4 * G + g]
        )
        t[g] = <real>(z + x * numbers[5 * G + g] + y * numbers[6 * G + g])


cdef inline void set_changes(
    const real* change, Py_ssize_t G, double dx, double dy, real* d
) noexcept nogil:
    """Write the changes of all Gaussians on the frame's row at (dx, dy): d0 + d1 z + d2 z²."""
    cdef Py_ssize_t g
    cdef real x = <real>dx, y = <real>dy
    cdef const real* own
    for g in range(G):
        own = change + CHANGE * g
        d[g] = own[0] + x * (own[1] + x * own[4] + 2 * y * own[7]) + y * (own[2] + y * own[5])
        d[G + g] = own[3] + 2 * (x * own[8] + y * own[9])
        d[2 * G + g] = own[6]


cdef inline void change_product(
    const Grid* grid, const Atom* atom, const real* change, double dx, const real* squares,
    const real* weights, const real* curve, real* turned, real* bent,
) noexcept nogil:
    """Split the change of a Gaussian W · C on a plane into a product turned · C and a W · bent."""
    cdef Py_ssize_t r, k
    cdef real y = <real>(atom.low[1] - atom.at[1])
    cdef real z = <real>(atom.low[2] - atom.at[2] + dx * grid.metric[5])
    cdef real base = change[0] + <real>dx * (change[1] - <real>grid.metric[5] * change[3])
    for r in range(atom.high[1] - atom.low[1] + 1):
        turned[r] = weights[r] * (base + (y + r) * change[2] + squares[r] * change[4])
    for k in range(atom.high[2] - atom.low[2] + 1):
        bent[k] = curve[k] * (z + k) * (
            change[3] + (z + k) * change[4] * <real>grid.metric[1]
        )


cdef inline void curve(
    real* out, Py_ssize_t n, double start, double a, double c, double scale
) noexcept nogil:
    if real is float:
        curve_float(out, n, <float>start, <float>a, <float>c, <float>scale)
    else:
        curve_double(out, n, start, a, c, scale)


cdef inline void set_curves(
    const Atom* atom, const double* numbers, Py_ssize_t G, double dx, double scale, Py_ssize_t most,
    Py_ssize_t pitch, real* weights, real* curves,
) noexcept nogil:
    """Write both factors of all Gaussians on a plane: one for each row, and one along z."""
    cdef Py_ssize_t g
    cdef double apart
    for g in range(G):
        # A square and a rest, since rounding would spoil a sum of terms of both signs.
        apart = dx * numbers[3 * G + g] / numbers[4 * G + g]
        curve(
            weights + g * most, atom.high[1] - atom.low[1] + 1, atom.low[1] - atom.at[1] + apart,
            dx * (dx * numbers[2 * G + g] - apart * numbers[3 * G + g]), numbers[4 * G + g],
            scale * numbers[g],
        )
        curve(
            curves + g * pitch, atom.high[2] - atom.low[2] + 1,
            atom.low[2] - atom.at[2] + dx * numbers[5 * G + g], 0, numbers[G + g], 1,
        )


cdef inline void set_plane(
    const Grid* grid, const Atom* atom, const double* numbers, Py_ssize_t G, Py_ssize_t x,
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
                0, numbers[2 * G + g], 1,
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
    const Atom* atoms, const double* numbers, bint separable, const real* occupancy,
    const real* changes, Py_ssize_t G, real* out, real* scratch, double* extents, Py_ssize_t most,
    Py_ssize_t pitch,
) noexcept nogil:
    """Write planes low to high of the map, or of its change, from the list of their atoms."""
    cdef Py_ssize_t n, plane, x, y, z, r, g, rows, first, length, k, take, done
    cdef const Atom* atom
    cdef const double* own
    cdef const real* change = NULL
    cdef double dx
    cdef real share
    cdef real* values = scratch
    cdef real* squares = values + pitch
    cdef real* q = squares + most
    cdef real* t = q + G
    cdef real* d = NULL
    cdef real* c = t + 4 * G
    cdef real* norm = c + G
    cdef double at[3]
    # Of a product's change, one part is of rows, and one part is along z.
    cdef Py_ssize_t products = G if changes == NULL else 2 * G
    cdef real* weights = q
    cdef real* curves = weights + products * most
    cdef real* middle = curves + products * pitch
    cdef real* along_x = middle + G * most
    cdef real* to
    cdef bint fresh
    memset(out + low * grid.ny * grid.nz, 0, (high - low) * grid.ny * grid.nz * sizeof(real))
    for n in range(count):
        atom = atoms + listed[n]
        own = numbers + listed[n] * NUMBERS * G
        share = occupancy[listed[n]] if changes == NULL else 1
        if changes != NULL:
            change = changes + listed[n] * CHANGE * G
            d = t + G
        for g in range(0 if separable else G):
            norm[g], c[g] = <real>own[g], <real>own[G + g]
        fresh = True
        for x in range(atom.low[0], atom.high[0] + 1):
            plane = wrapped(x - grid.start, grid.nx)
            if plane < low or plane >= high:
                continue
            dx = x - atom.at[0]
            if separable:
                set_plane(
                    grid, atom, own, G, x, share, fresh, most, pitch, weights,
                    curves + (products - G) * pitch, middle, along_x,
                )
                fresh = False
            rows = rows_inside(grid, atom, dx, extents, extents + most, squares)
            if separable:
                for g in range(products - G):
                    change_product(
                        grid, atom, change + CHANGE * g, dx, squares, weights + g * most,
                        curves + (G + g) * pitch, weights + (G + g) * most, curves + g * pitch,
                    )
                add_plane(
                    out + plane * grid.ny * grid.nz, grid.ny, grid.nz,
                    wrapped(atom.low[1], grid.ny), rows, extents, extents + most, atom.low[2],
                    products, weights, most, curves, pitch,
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
                in_frame(grid.edges, dx, y - atom.at[1], first - atom.at[2], at)
                if changes != NULL:
                    set_changes(change, G, at[0], at[1], d)
                if real is float:
                    row_float(
                        values, length, G, q, t, c, norm, <float>at[2], <float>grid.edges[5], d
                    )
                else:
                    row_double(values, length, G, q, t, c, norm, at[2], grid.edges[5], d)
                done = 0
                while done < length:
                    take = min(length - done, grid.nz - z)
                    for k in range(take):
                        to[z + k] += share * values[done + k]
                    done = done + take
                    z = 0


cdef inline void read_row(
    const Grid* grid, Py_ssize_t plane, Py_ssize_t y, Py_ssize_t first,
    Py_ssize_t length, const real* cotangent, real* values,
) noexcept nogil:
    """Copy a row of the map, wrapped around the cell."""
    cdef const real* given = cotangent + (plane * grid.ny + wrapped(y, grid.ny)) * grid.nz
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
    const real* square, const real* curve, const real* bent, Py_ssize_t n, double x, double start,
    double c, real* by_y, real* sums, real* more,
) noexcept nogil:
    if real is float:
        contract_float(
            rows, values, pitch, weights, y, square, curve, bent, n, <float>x, <float>start,
            <float>c, by_y, sums, more,
        )
    else:
        contract_double(
            rows, values, pitch, weights, y, square, curve, bent, n, x, start, c, by_y, sums, more
        )


cdef void contract_separable(
    const Grid* grid, const Atom* atom, const double* numbers, const real* change, Py_ssize_t G,
    const real* cotangent, real* scratch, double* extents, Py_ssize_t most, Py_ssize_t pitch,
    double* moments,
) noexcept nogil:
    """Write the moments of an isotropic atom if its factors are curves."""
    cdef Py_ssize_t x, plane, g, r, rows, begin, stop, low, n, first
    cdef Py_ssize_t lanes = 64 // <Py_ssize_t>sizeof(real)
    cdef double left, half, centre
    cdef const double* form = grid.metric
    cdef const real* end = cotangent + grid.planes * grid.ny * grid.nz
    cdef int i, part
    cdef double dx, start
    cdef real* weights = scratch
    cdef real* curves = weights + G * most
    cdef real* ys = curves + G * pitch
    cdef real* squares = ys + most
    cdef real* sums = squares + most
    cdef real* middle = sums + MOMENTS // 2 * G * lanes
    cdef real* along_x = middle + G * most
    cdef real* by_y = along_x + G * most
    cdef real* turned = by_y + 2 * most
    cdef real* bent = turned + most
    cdef real* values = bent + pitch
    cdef real* own
    cdef double s[5]
    cdef double* m
    cdef bint fresh = True
    memset(sums, 0, MOMENTS // 2 * G * lanes * sizeof(real))
    rows = atom.high[1] - atom.low[1] + 1
    for r in range(rows):
        ys[r] = <real>(atom.low[1] + r - atom.at[1])
    for x in range(atom.low[0], atom.high[0] + 1):
        plane = wrapped(x - grid.start, grid.nx)
        if plane >= grid.planes:
            continue
        dx = x - atom.at[0]
        set_plane(
            grid, atom, numbers, G, x, 1, fresh, most, pitch, weights, curves, middle, along_x
        )
        fresh = False
        rows_inside(grid, atom, dx, extents, extents + most, squares)
        # Only rows that meet the sphere, and the voxels between their ends, or one more.
        left = atom.square - (form[2] - form[3] * form[3] / form[4]) * dx * dx
        if left < 0:
            continue
        half = sqrt(left / form[4]) + 1e-6
        centre = atom.at[1] - form[3] / form[4] * dx
        begin = max(<Py_ssize_t>ceil(centre - half) - atom.low[1], 0)
        stop = min(<Py_ssize_t>floor(centre + half) - atom.low[1] + 1, rows)
        half = sqrt(left / form[1]) + 1e-6
        centre = atom.at[2] - form[5] * dx
        low = max(<Py_ssize_t>ceil(centre - half), atom.low[2])
        n = min(<Py_ssize_t>floor(centre + half), atom.high[2]) - low + 1
        if begin >= stop or n <= 0:
            continue
        first, start = low - atom.low[2], low - atom.at[2] + dx * form[5]
        read_plane(
            cotangent + plane * grid.ny * grid.nz, end, grid.ny, grid.nz,
            wrapped(atom.low[1] + begin, grid.ny), stop - begin, extents + begin,
            extents + most + begin, low, n, values, pitch,
        )
        for g in range(G):
            own = sums + MOMENTS // 2 * g * lanes
            if change != NULL:
                change_product(
                    grid, atom, change + CHANGE * g, dx, squares, weights + g * most,
                    curves + g * pitch, turned, bent,
                )
                contract(
                    stop - begin, values, pitch, turned + begin, ys + begin, squares + begin,
                    curves + g * pitch + first, <const real*>NULL, n, dx, start, form[1], by_y,
                    own + 5 * lanes, own,
                )
            contract(
                stop - begin, values, pitch, weights + g * most + begin, ys + begin,
                squares + begin, curves + g * pitch + first,
                <const real*>NULL if change == NULL else bent + first, n, dx, start, form[1],
                by_y, own, own + 5 * lanes,
            )
    for g in range(G):
        for part in range(1 if change == NULL else 2):
            # 1, x, y, z and |w|², with z relative to the point of the row nearest to the atom.
            for i in range(5):
                s[i] = 0
                for r in range(lanes):
                    s[i] += sums[(MOMENTS // 2 * g + 5 * part + i) * lanes + r]
            s[3] -= grid.metric[5] * s[1]
            m = moments + MOMENTS * g + MOMENTS // 2 * part
            m[0] = s[0]
            for i in range(3):
                m[1 + i] = (
                    grid.step[3 * i] * s[1] + grid.step[3 * i + 1] * s[2]
                    + grid.step[3 * i + 2] * s[3]
                )
                # The isotropic derivatives need no more than the trace.
                m[4 + i] = s[4] / 3
                m[7 + i] = 0


cdef void contract_rows(
    const Grid* grid, const Atom* atom, const double* numbers, const real* change, Py_ssize_t G,
    const real* cotangent, real* scratch, double* extents, Py_ssize_t* lengths, Py_ssize_t most,
    Py_ssize_t pitch, double* moments,
) noexcept nogil:
    """Write the moments of any atom."""
    cdef Py_ssize_t x, plane, y, g, r, rows, first, length
    cdef int i, j, part
    cdef double dx, dy
    cdef double at[3]
    cdef real* q = scratch
    cdef real* t = q + most * G
    cdef real* ys = t + most * G
    cdef real* zs = ys + most
    cdef real* turned = zs + most
    cdef real* values = turned + (0 if change == NULL else 3 * most * G)
    cdef real* d = NULL
    cdef double s[12]
    cdef double w[3]
    cdef double ww[6]
    cdef double* m
    memset(moments, 0, MOMENTS * G * sizeof(double))
    for x in range(atom.low[0], atom.high[0] + 1):
        plane = wrapped(x - grid.start, grid.nx)
        if plane >= grid.planes:
            continue
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
            in_frame(grid.edges, dx, dy, first - atom.at[2], at)
            if change != NULL:
                set_changes(change, G, at[0], at[1], turned + 3 * rows * G)
            ys[rows] = <real>at[1]
            zs[rows] = <real>at[2]
            lengths[rows] = length
            memset(
                values + rows * pitch + length // LANES * LANES, 0, LANES * sizeof(real)
            )
            read_row(grid, plane, y, first, length, cotangent, values + rows * pitch)
            rows = rows + 1
        for g in range(G):
            memset(s, 0, sizeof(s))
            if change != NULL:
                d = turned + g
            if real is float:
                moments_float(
                    rows, lengths, values, pitch, q + g, t + g, G, <float>numbers[G + g],
                    <float>numbers[g], ys, zs, <float>grid.edges[5], d, 3 * G, s,
                )
            else:
                moments_double(
                    rows, lengths, values, pitch, q + g, t + g, G, numbers[G + g], numbers[g], ys,
                    zs, grid.edges[5], d, 3 * G, s,
                )
            for part in range(1 if change == NULL else 2):
                # 1, x, y, z, xx, yy, zz, xy, xz, yz.
                m = moments + MOMENTS * g + MOMENTS // 2 * part
                i = 6 * part
                dx = grid.edges[0] * (x - atom.at[0])
                m[0] += s[i]
                m[1] += dx * s[i]
                m[2] += s[i + 1]
                m[3] += s[i + 2]
                m[4] += dx * dx * s[i]
                m[5] += s[i + 3]
                m[6] += s[i + 4]
                m[7] += dx * s[i + 1]
                m[8] += dx * s[i + 2]
                m[9] += s[i + 5]
    for g in range(G):
        for part in range(1 if change == NULL else 2):
            m = moments + MOMENTS * g + MOMENTS // 2 * part
            for i in range(3):
                w[i] = 0
                for j in range(3):
                    w[i] += grid.frame[3 * i + j] * m[1 + j]
            squares(grid.frame, m + 4, ww)
            for i in range(3):
                m[1 + i] = w[i]
            for i in range(6):
                m[4 + i] = ww[i]


cdef inline double trace_of(const double* P, const double* Q) noexcept nogil:
    """Return the trace of a product of symmetric matrices."""
    return P[0] * Q[0] + P[1] * Q[1] + P[2] * Q[2] + 2 * (
        P[3] * Q[3] + P[4] * Q[4] + P[5] * Q[5]
    )


cdef inline void product(const double* P, const double* w, double* out) noexcept nogil:
    out[0] = P[0] * w[0] + P[3] * w[1] + P[4] * w[2]
    out[1] = P[3] * w[0] + P[1] * w[1] + P[5] * w[2]
    out[2] = P[4] * w[0] + P[5] * w[1] + P[2] * w[2]


cdef double slope(
    const double* P, const double* t, const double* tb, bint anisotropic, double twidth,
    double* beta, double* gamma,
) noexcept nogil:
    """Write a Gaussian's change along tangents, over its value: beta·w + w·gamma w - nu; return nu.

    See `_vjp_vjp_formula` of fusedops/density.py.
    """
    cdef double M[6]
    cdef int n
    for n in range(6):
        M[n] = 0.25 * twidth if n < 3 else 0
        if anisotropic:
            M[n] += 2 * PI * PI * tb[n]
        elif n < 3:
            M[n] += 0.25 * tb[0]
    product(P, t, beta)
    for n in range(3):
        beta[n] *= 2
    squares_of(P, M, gamma)
    for n in range(6):
        gamma[n] /= PI * PI
    return trace_of(P, M) / (2 * PI * PI)


cdef void write_gradients(
    const SetUp* call, Py_ssize_t n, const double* moments, void* on_xyz, void* on_b,
    void* on_occupancy, void* on_amplitudes, void* on_widths, const real* given,
) noexcept nogil:
    """Write an atom's gradients, from the moments of its Gaussians times the cotangent."""
    cdef Py_ssize_t G = call.gaussians, bs = call.bs, g
    cdef bint usable = call.atoms[n].usable, changing = call.changes != NULL
    cdef const real* b = <const real*>call.b + bs * n
    cdef double occupancy = (<const real*>call.occupancy)[n], toccupancy = occupancy
    cdef double A, tA, z, share, nu, total = 0
    cdef double P[6]
    cdef double K[6]
    cdef double beta[3]
    cdef double gamma[6]
    cdef double Pw[3]
    cdef double gw[3]
    cdef double sum_x[3]
    cdef double sum_b[6]
    cdef const double* one
    cdef const double* ones
    cdef int i, j
    memset(sum_x, 0, sizeof(sum_x))
    memset(sum_b, 0, sizeof(sum_b))
    if changing:
        toccupancy = call.along.occupancy[n]
    for g in range(G):
        if not usable:
            (<real*>on_amplitudes)[G * n + g] = 0
            (<real*>on_widths)[G * n + g] = 0
            continue
        A = tA = call.amplitudes[G * n + g]
        share = occupancy * A
        gaussian(b, bs == 6, 1, call.widths[G * n + g], P)
        one = ones = moments + MOMENTS * g
        z = 0
        if changing:
            tA = call.along.amplitudes[G * n + g]
            ones = one + MOMENTS // 2
            nu = slope(
                P, call.along.xyz + 3 * n, call.along.b + bs * n, bs == 6,
                call.along.widths[G * n + g], beta, gamma,
            )
            z = trace_of(gamma, one + 4) - nu * one[0]
            for i in range(3):
                z = z + beta[i] * one[1 + i]
        product(P, ones + 1, Pw)
        squares_of(P, ones + 4, K)
        for i in range(3):
            sum_x[i] += 2 * Pw[i] * (1 if changing else share)
        for i in range(6):
            K[i] = (K[i] - 0.5 * ones[0] * P[i]) * (1 if changing else share)
        if changing:
            product(P, one + 1, Pw)
            product(gamma, one + 1, gw)
            for i in range(3):
                sum_x[i] -= share * (one[0] * beta[i] + 2 * gw[i])
            bend(P, gamma, one + 4, Pw, beta, one[0], share, K)
        for i in range(bs):
            sum_b[i] += (2 if i < 3 else 4) * K[i] if bs == 6 else trace(K) / (4 * PI * PI)
        total = total + tA * one[0] + A * z
        (<real*>on_amplitudes)[G * n + g] = <real>(toccupancy * one[0] + occupancy * z)
        (<real*>on_widths)[G * n + g] = <real>(trace(K) / (4 * PI * PI))
    for i in range(3):
        (<real*>on_xyz)[3 * n + i] = <real>sum_x[i]
    for i in range(bs):
        (<real*>on_b)[bs * n + i] = <real>sum_b[i]
    (<real*>on_occupancy)[n] = <real>total


cdef inline double trace(const double* K) noexcept nogil:
    return K[0] + K[1] + K[2]


cdef inline void bend(
    const double* P, const double* gamma, const double* ww, const double* Pw, const double* beta,
    double one, double share, double* K,
) noexcept nogil:
    """Subtract share (Pw betaᵀ / 2 + P ww gamma, and its transpose, - one gamma / 2)."""
    cdef double left[9]
    cdef double column[3]
    cdef double row[3]
    cdef int i, j, n
    for j in range(3):
        # ww times column j of gamma.
        for i in range(3):
            column[i] = gamma[AT[3 * i + j]]
        product(ww, column, row)
        product(P, row, column)
        for i in range(3):
            left[3 * i + j] = 0.5 * Pw[i] * beta[j] + column[i]
    for n in range(6):
        i = n if n < 3 else (0 if n < 5 else 1)
        j = n if n < 3 else (1 if n == 3 else 2)
        K[n] -= share * (left[3 * i + j] + left[3 * j + i] - 0.5 * one * gamma[n])


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
    grid.nx, grid.ny, grid.nz, grid.start, grid.planes = shape
    for i in range(9):
        grid.step[i] = step[i]
    grid.largest = largest
    for i in range(6):
        unit[i] = i < 3
    in_voxels(grid.step, unit, form)
    schur(form, grid.metric)
    set_frame(&grid)
    return grid


cdef void set_frame(Grid* grid) noexcept nogil:
    """Split the grid's steps, from the last: by Gram and Schmidt, into xx, yx, yy, zx, zy, zz."""
    cdef double along, rest[3]
    cdef int i, j, k
    for j in range(2, -1, -1):
        for i in range(3):
            rest[i] = grid.step[3 * i + j]
        for k in range(2, j, -1):
            along = 0
            for i in range(3):
                along = along + grid.step[3 * i + j] * grid.frame[3 * i + k]
            grid.edges[k * (k + 1) // 2 + j] = along
            for i in range(3):
                rest[i] = rest[i] - along * grid.frame[3 * i + k]
        along = sqrt(rest[0] * rest[0] + rest[1] * rest[1] + rest[2] * rest[2])
        grid.edges[j * (j + 1) // 2 + j] = along
        for i in range(3):
            grid.frame[3 * i + j] = rest[i] / along


cdef inline void in_frame(
    const double* edges, double x, double y, double z, double* found
) noexcept nogil:
    """Write the frame's coordinates of a vector in voxels."""
    found[0] = edges[0] * x
    found[1] = edges[1] * x + edges[2] * y
    found[2] = edges[3] * x + edges[4] * y + edges[5] * z


cdef void set_change(const SetUp* call, Py_ssize_t n, real* change) noexcept nogil:
    """Write the polynomials by which tangents change an atom's Gaussians."""
    cdef Py_ssize_t G = call.gaussians, bs = call.bs, g
    cdef const real* b = <const real*>call.b + bs * n
    cdef double occupancy = (<const real*>call.occupancy)[n], share, nu
    cdef double P[6]
    cdef double beta[3]
    cdef double gamma[6]
    cdef double form[6]
    cdef int i, j
    cdef const double* axes = call.grid.step
    if not call.separable:
        axes = call.grid.frame
    for g in range(G):
        gaussian(b, bs == 6, 1, call.widths[G * n + g], P)
        nu = slope(
            P, call.along.xyz + 3 * n, call.along.b + bs * n, bs == 6,
            call.along.widths[G * n + g], beta, gamma,
        )
        share = occupancy * call.amplitudes[G * n + g]
        change[CHANGE * g] = <real>(
            call.along.occupancy[n] * call.amplitudes[G * n + g]
            + occupancy * call.along.amplitudes[G * n + g] - share * nu
        )
        in_voxels(axes, gamma, form)
        for i in range(3):
            nu = 0
            for j in range(3):
                nu = nu + axes[3 * j + i] * beta[j]
            change[CHANGE * g + 1 + i] = <real>(share * nu)
        for i in range(6):
            change[CHANGE * g + 4 + i] = <real>(share * form[i])
        if call.separable:
            change[CHANGE * g + 4] = <real>(share * gamma[0])


cdef void some_atoms(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const SetUp* call = <const SetUp*>given
    cdef Py_ssize_t G = call.gaussians, n
    for n in range(begin, end):
        set_atom(
            &call.grid, call.to_grid, <const real*>call.xyz + 3 * n,
            <const real*>call.b + call.bs * n, call.bs == 6, (<const real*>call.occupancy)[n],
            call.amplitudes + G * n, call.widths + G * n, G, call.radius[n], call.slack, call.bare,
            call.atoms + n, call.numbers + NUMBERS * G * n,
        )
        if call.changes != NULL and call.atoms[n].usable:
            set_change(call, n, <real*>call.changes + CHANGE * G * n)


cdef void some_slabs(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Splat* call = <const Splat*>given
    cdef const SetUp* set_up = call.given
    cdef const Scratch* own = &call.scratch
    cdef Py_ssize_t s
    for s in range(begin, end):
        some_planes(
            &set_up.grid, s * call.thickness, min((s + 1) * call.thickness, set_up.grid.planes),
            call.listed + call.pointers[s], call.pointers[s + 1] - call.pointers[s],
            set_up.atoms, set_up.numbers, set_up.separable,
            <const real*>set_up.occupancy, <const real*>set_up.changes, set_up.gaussians,
            <real*>call.out, <real*>own.numbers + thread * own.row,
            own.extents + 2 * thread * own.most, own.most, own.pitch,
        )


cdef void some_pull_backs(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const SplatVjp* call = <const SplatVjp*>given
    cdef const SetUp* set_up = call.given
    cdef const Scratch* own = &call.scratch
    cdef Py_ssize_t G = set_up.gaussians, n
    cdef const double* numbers
    cdef const real* change = NULL
    cdef real* scratch = <real*>own.numbers + thread * own.row
    cdef double* extents = own.extents + 2 * thread * own.most
    cdef double* moments = own.moments + thread * own.moments_row
    for n in range(begin, end):
        numbers = set_up.numbers + NUMBERS * G * n
        if set_up.changes != NULL:
            change = <const real*>set_up.changes + CHANGE * G * n
        if set_up.separable:
            contract_separable(
                &set_up.grid, set_up.atoms + n, numbers, change, G, <const real*>call.cotangent,
                scratch, extents, own.most, own.pitch, moments,
            )
        else:
            contract_rows(
                &set_up.grid, set_up.atoms + n, numbers, change, G, <const real*>call.cotangent,
                scratch, extents, own.lengths + thread * own.most, own.most, own.pitch, moments,
            )
        write_gradients(
            set_up, n, moments, call.on_xyz, call.on_b, call.on_occupancy, call.on_amplitudes,
            call.on_widths, given,
        )


cdef Py_ssize_t padded(Py_ssize_t extent) noexcept nogil:
    """Return a number of voxels up to a whole vector, and one more."""
    return (extent // LANES + 2) * LANES


cdef bytearray set_up(
    SetUp* call, Scratch* scratch, shape, step, to_grid, measures,
    const real[:, ::1] xyz, b, const real[::1] occupancy, amplitudes, widths, radius,
    double slack, bint separable, bint bare, tangents, int threads,
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
    call.separable = separable
    call.bare = bare
    cdef Py_ssize_t gaussians = call.count * call.gaussians
    cdef bytearray memory = room(
        call.count * sizeof(Atom) + NUMBERS * gaussians * sizeof(double)
        + (0 if tangents is None else CHANGE * gaussians * sizeof(real))
    )
    call.atoms = <Atom*>of(memory)
    call.numbers = <double*>(call.atoms + call.count)
    call.changes = NULL
    if tangents is not None:
        call.changes = call.numbers + NUMBERS * gaussians
        call.along.xyz = <const double*>elements(tangents[0], 8)
        call.along.b = <const double*>elements(tangents[1], 8)
        call.along.occupancy = <const double*>elements(tangents[2], 8)
        call.along.amplitudes = <const double*>elements(tangents[3], 8)
        call.along.widths = <const double*>elements(tangents[4], 8)
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
    const SetUp* call, const Atom* atom, Py_ssize_t slab, Py_ssize_t slabs, Py_ssize_t* first
) noexcept nogil:
    """Return the number of slabs that an atom reaches, from the first on and wrapped around."""
    cdef Py_ssize_t apart, planes = call.grid.nx, start = call.grid.start
    if atom.high[0] < atom.low[0]:
        return 0
    first[0] = wrapped(atom.low[0] - start, planes) // slab
    if atom.high[0] - atom.low[0] + slab >= planes:
        return slabs
    apart = wrapped(atom.high[0] - start, planes) // slab - first[0]
    return (apart if apart >= 0 else apart + slabs) + 1


cdef void count_listed(
    const SetUp* call, Py_ssize_t slab, Py_ssize_t slabs, long long* pointers
) noexcept nogil:
    """Write the start of every slab's atoms in the list.

    The map has the first `slabs` of the slabs that make up the cell from `start` on.
    """
    cdef Py_ssize_t n, k, s, first = 0, all_slabs = (call.grid.nx + slab - 1) // slab
    for k in range(slabs + 1):
        pointers[k] = 0
    for n in range(call.count):
        for k in range(slabs_reached(call, call.atoms + n, slab, all_slabs, &first)):
            s = (first + k) % all_slabs
            if s < slabs:
                pointers[s + 1] += 1
    for k in range(slabs):
        pointers[k + 1] += pointers[k]


cdef void list_atoms(
    const SetUp* call, Py_ssize_t slab, Py_ssize_t slabs, const long long* pointers,
    long long* listed,
) noexcept nogil:
    """List the atoms that reach every slab, in their order."""
    cdef long long at[SLABS]
    cdef Py_ssize_t n, k, s, first = 0, all_slabs = (call.grid.nx + slab - 1) // slab
    for s in range(slabs):
        at[s] = pointers[s]
    for n in range(call.count):
        for k in range(slabs_reached(call, call.atoms + n, slab, all_slabs, &first)):
            s = (first + k) % all_slabs
            if s < slabs:
                listed[at[s]] = n
                at[s] += 1


def splat(
    # IN: the grid's shape with the map's first plane and number of planes; a lattice, of float64; b (N,)
    # or (N, 6); and of float64 (N, G), (N, G), (N,); and None, or tangents of the five arrays of atoms,
    # of float64, along which `out` is the map's derivative
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
    tangents,
    # OUT
    real[:, :, ::1] out,
):
    cdef SetUp given
    cdef Splat call
    cdef Scratch* scratch = &call.scratch
    cdef bytearray atoms = set_up[real](
        &given, scratch, shape, step, to_grid, measures, xyz, b, occupancy, amplitudes,
        widths, radius, slack, separable, tangents is not None, tangents, threads,
    )
    cdef Py_ssize_t G = given.gaussians, most = scratch.most, pitch = scratch.pitch
    cdef Py_ssize_t products = G if tangents is None else 2 * G
    cdef Py_ssize_t slab = (given.grid.planes + SLABS - 1) // SLABS
    cdef Py_ssize_t slabs = (given.grid.planes + slab - 1) // slab
    cdef long long pointers[SLABS + 1]
    with nogil:
        count_listed(&given, slab, slabs, pointers)
    cdef bytearray lists = room(pointers[slabs] * sizeof(long long))
    cdef long long* listed = <long long*>of(lists)
    cdef bytearray own = scratch_of(
        scratch, pitch + most + 2 * G * most + products * (most + pitch), sizeof(real), threads
    )
    call.given = &given
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
    tangents,
    const real[:, :, ::1] cotangent,
    # OUT: in the shapes of xyz, b, occupancy, amplitudes and widths; an output that is None is computed
    # anyway, at no cost
    real[:, ::1] on_xyz,
    on_b,
    real[::1] on_occupancy,
    real[:, ::1] on_amplitudes,
    real[:, ::1] on_widths,
):
    cdef SetUp given
    cdef SplatVjp call
    cdef Scratch* scratch = &call.scratch
    cdef bytearray atoms = set_up[real](
        &given, scratch, shape, step, to_grid, measures, xyz, b, occupancy, amplitudes,
        widths, radius, slack, separable, True, tangents, threads,
    )
    cdef Py_ssize_t G = given.gaussians, most = scratch.most, pitch = scratch.pitch
    cdef bytearray own = scratch_of(
        scratch, most * (5 * G + 5 + pitch) + (G + 1) * pitch + MOMENTS // 2 * G * LANES,
        sizeof(real), threads,
    )
    cdef bytearray lengths = room(threads * most * sizeof(Py_ssize_t))
    scratch.lengths = <Py_ssize_t*>of(lengths)
    scratch.moments_row = (MOMENTS * G + 7) // 8 * 8
    cdef bytearray moments = room(threads * scratch.moments_row * sizeof(double))
    scratch.moments = <double*>of(moments)
    cdef bytearray unwanted = room(given.count * (4 + given.bs + 2 * G) * sizeof(real))
    cdef real* spare = <real*>of(unwanted)
    call.given = &given
    call.cotangent = &cotangent[0, 0, 0]
    call.on_xyz = &on_xyz[0, 0] if on_xyz is not None else spare
    spare += 3 * given.count
    call.on_b = elements(on_b, sizeof(real)) if on_b is not None else spare
    spare += given.bs * given.count
    call.on_occupancy = &on_occupancy[0] if on_occupancy is not None else spare
    spare += given.count
    call.on_amplitudes = &on_amplitudes[0, 0] if on_amplitudes is not None else spare
    spare += G * given.count
    call.on_widths = &on_widths[0, 0] if on_widths is not None else spare
    with nogil:
        in_shares(<Share>some_pull_backs[real], &call, given.count, threads)
