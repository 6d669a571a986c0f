# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The density of atoms on the CPU; threads share planes of the map, or atoms for the gradient.

An atom's voxels are taken in rows along z. The part of a row inside of the atom's sphere is computed
beforehand, in float64 whatever the map has: squares in float32 take voxels at the border of a sphere for
the wrong side. Along a row a Gaussian is exp2(-(q + c t²)), where q, a Schur complement in the two other
coordinates, is a sum of squares. If t is the same for all rows of a plane, as for isotropic atoms unless
the cell's axes b and c are oblique, both factors are curves that are computed once for a plane, or an
atom: the inner loop has no exponential, and compares a voxel's number with the ends of its row. Map and
gradient are summed in an order that doesn't depend on the number of threads.

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
    /* One copy: it rounds alike for all that call it, and has the registers to itself. */
    #define FUNCTION static __attribute__((noinline, noclone))
    #if defined(__AVX512F__)
    #define BYTES 64
    #elif defined(__AVX__)
    #define BYTES 32
    #else
    #define BYTES 16
    #endif
    #define LANES_OF(real) ((Py_ssize_t)(BYTES / sizeof(real)))
    #define VECTOR(type) __attribute__((vector_size(BYTES), aligned(sizeof(type)), may_alias))
    #define MASK(integer, condition) ((integer)(condition))
    #define AS(type, v) ((type)(v))
    #else
    #define INLINE static inline
    #define FUNCTION static
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
    static const unsigned int fusedops_numbers_float[16] =
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static const unsigned long long fusedops_numbers_double[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    #define ONES ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u
    static const unsigned int fusedops_kept[32] = {ONES, ONES};
    static const double fusedops_zeros[8] = {0};

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

    /* inside: for each row of a plane the first voxel in the sphere, and the number of voxels in sphere and
       box; padded to whole vectors of rows.
       discs: for each plane of a box the first row that may meet the sphere and the number of them, and the
       same of voxels along z. */
    FUNCTION void fusedops_inside(
        Py_ssize_t rows, double y, double dx, double z, const double *m, double square,
        double low, double high, double *first, double *length) {
        /* Numbers: for all that a compiler knows, the stores below might change m. */
        double over = 1 / m[1], xx = m[2] * dx * dx, xy = 2 * m[3] * dx, yy = m[4];
        double from = z - m[5] * dx, slope = m[6];
        for (Py_ssize_t r = 0; r < (rows + 7) / 8 * 8; r++) {
            double dy = y + (double)r, along = xx + dy * (xy + yy * dy);
            double left = square - along, half = sqrt((left > 0 ? left : 0) * over);
            double middle = from - slope * dy;
            double begin = ceil(middle - half), end = floor(middle + half);
            first[r] = begin > low ? begin : low;
            length[r] = left < 0 ? 0 : (end < high ? end : high) - first[r] + 1;
        }
    }
    static void fusedops_discs(
        Py_ssize_t planes, double x, double y, double z, const double *m, double square,
        const double *box, double *out, Py_ssize_t pitch) {
        double apart = m[3] / m[4], xx = m[2] - m[3] * apart, over_y = 1 / m[4], over_z = 1 / m[1];
        double slope = m[5], low_y = box[0], high_y = box[1], low_z = box[2], high_z = box[3];
        double *ys = out, *rows = ys + pitch, *zs = rows + pitch, *counts = zs + pitch;
        square *= 1 + 1e-12;
        for (Py_ssize_t p = 0; p < (planes + 7) / 8 * 8; p++) {
            double dx = x + (double)p, left = square - xx * dx * dx, some = left > 0 ? left : 0;
            double half = sqrt(some * over_y) + 1e-6, centre = y - apart * dx;
            double begin = ceil(centre - half), end = floor(centre + half);
            ys[p] = begin > low_y ? begin : low_y;
            rows[p] = left < 0 ? 0 : (end < high_y ? end : high_y) - ys[p] + 1;
            half = sqrt(some * over_z) + 1e-6;
            centre = z - slope * dx;
            begin = ceil(centre - half); end = floor(centre + half);
            zs[p] = begin > low_z ? begin : low_z;
            counts[p] = (end < high_z ? end : high_z) - zs[p] + 1;
        }
    }
    /* A disc, the part of a plane in a sphere: its first row and voxel, and the numbers of them, in the
       atom's box and in the map, whose rows and voxels may go around the cell several times. Of each row,
       the first voxel that is inside, counted from the disc's, and their number.
       Distances from the atom: x of the plane, y of row 0, z of voxel 0, where `centre` is the row, maybe
       between two, nearest to the atom, and square a row's squared distance there; yy and zz are factors. */
    typedef struct {
        Py_ssize_t row, rows, column, columns, y, ny, z, nz;
        void *first, *count;
        double x, from_y, from_z, centre, square, yy, zz;
    } fusedops_disc;
    /* Gaussians at a time: as many as most form factors have. Their sums stay in registers if there are 32. */
    #define TOGETHER 5
    /* curves: for every Gaussian norm · exp2(-rate (a + c s²)) for s = start, start + 1, ..., padded to whole
       vectors; without norms these are 1.
       tables: write weights of rows times y and squared distances after the weights, in tables of G rows.
       ends: first and count of a disc's rows, as integers of a voxel's size.
       part: the rows of a disc with voxels in the vector from voxel k on, or more of them; it looks where
       a vector has so few voxels that most rows may end before.
       apart: whether a vector that goes around the cell is two, the first of which may begin in the row
       before, and the second end in the row after.
       draw: add to the map the sum of Gaussians, weights of rows times scales times curves along z.
       contract: of each Gaussian sum values times weights over rows, with factors 1, y and the squared
       distance, tables of G rows each; multiply by the curve along z, and add the terms that gradients
       need to five vectors; and, where another curve is given, the same with it to five more. */
    #define SUM(vector, i) (*(vector *)(sums + (i) * (64 / sizeof(*sums))))
    #define DEFINE_CURVES(real, integer, number, vector, integers) \\
    FUNCTION void fusedops_curves_##real( \\
        real *out, Py_ssize_t pitch, Py_ssize_t n, Py_ssize_t G, double start, double a, double c, \\
        const double *norms, const double *rates) { \\
        vector lane = *(const vector *)fusedops_lanes_##real + (real)start; \\
        for (Py_ssize_t g = 0; g < G; g++, out += pitch) { \\
            real own = (real)(rates[g] * a), slope = (real)(rates[g] * c); \\
            real norm = norms ? (real)norms[g] : 1; \\
            for (Py_ssize_t k = 0; k < n; k += LANES_OF(real)) { \\
                vector s = lane + (real)k; \\
                *(vector *)(out + k) = norm * fusedops_exp2_##real(-(own + slope * (s * s))); \\
            } \\
        } \\
    } \\
    FUNCTION void fusedops_tables_##real( \\
        real *weights, Py_ssize_t most, Py_ssize_t rows, Py_ssize_t G, double y, double centre, \\
        double yy) { \\
        vector lane = *(const vector *)fusedops_lanes_##real; \\
        for (Py_ssize_t r = 0; r < rows; r += LANES_OF(real)) { \\
            vector at = lane + (real)(y + (double)r), apart = lane + (real)((double)r - centre); \\
            vector square = (real)yy * apart * apart; \\
            for (Py_ssize_t g = 0; g < G; g++) { \\
                real *own = weights + g * most + r; \\
                vector weight = *(const vector *)own; \\
                *(vector *)(own + G * most) = weight * at; \\
                *(vector *)(own + 2 * G * most) = weight * square; \\
            } \\
        } \\
    } \\
    static void fusedops_ends_##real( \\
        const fusedops_disc *disc, const double *first, const double *length, double z) { \\
        integer *begin = (integer *)disc->first, *count = (integer *)disc->count; \\
        for (Py_ssize_t r = 0; r < disc->rows; r++) { \\
            begin[r] = (integer)(first[r] - z); \\
            count[r] = (integer)(length[r] > 0 ? length[r] : 0); \\
        } \\
    } \\
    INLINE void fusedops_part_##real( \\
        const fusedops_disc *disc, Py_ssize_t k, Py_ssize_t *from, Py_ssize_t *past) { \\
        const integer *first = (const integer *)disc->first, *count = (const integer *)disc->count; \\
        Py_ssize_t r = 0, end = disc->rows; \\
        if (k && disc->columns - k <= 4) { \\
            while (r < end && first[r] + count[r] <= k) r++; \\
            while (r < end && first[end - 1] + count[end - 1] <= k) end--; \\
        } \\
        *from = r; *past = end; \\
    } \\
    INLINE integers fusedops_first_##real(Py_ssize_t count) { \\
        const char *kept = (const char *)fusedops_kept + 64; \\
        return *(const integers *)(kept - count * (Py_ssize_t)sizeof(real)); \\
    } \\
    INLINE int fusedops_apart_##real(Py_ssize_t ny, Py_ssize_t nz, Py_ssize_t y) { \\
        return nz >= LANES_OF(real) && 0 < y && y + 1 < ny; \\
    } \\
    INLINE void fusedops_draw_rows_##real( \\
        const int whole, const Py_ssize_t N, real *plane, const fusedops_disc *disc, Py_ssize_t k, \\
        Py_ssize_t z, const real *weights, Py_ssize_t most, const vector *curves) { \\
        const number *begin = (const number *)disc->first, *count = (const number *)disc->count; \\
        integers lane = *(const integers *)fusedops_numbers_##real + (number)k; \\
        Py_ssize_t ny = disc->ny, nz = disc->nz, r, past, y; \\
        integers first = fusedops_first_##real(whole ? LANES_OF(real) : nz - z); \\
        fusedops_part_##real(disc, k, &r, &past); \\
        for (y = disc->y + r; y >= ny;) y -= ny; \\
        for (real *to = plane + y * nz; r < past; r++) { \\
            vector sum = weights[r] * curves[0]; \\
            for (Py_ssize_t g = 1; g < N; g++) sum += weights[g * most + r] * curves[g]; \\
            integers own = AS(integers, sum) & MASK(integers, lane - begin[r] < count[r]); \\
            if (whole) *(vector *)(to + z) += AS(vector, own); \\
            else if (fusedops_apart_##real(ny, nz, y)) { \\
                *(vector *)(to + z) += AS(vector, own & first); \\
                *(vector *)(to + z - nz) += AS(vector, own & ~first); \\
            } else for (Py_ssize_t l = 0, at = z; l < LANES_OF(real); l++) { \\
                to[at] += ((real *)&own)[l]; \\
                at = at + 1 < nz ? at + 1 : 0; \\
            } \\
            to += nz; \\
            if (++y == ny) { y = 0; to = plane; } \\
        } \\
    } \\
    INLINE void fusedops_draw_some_##real( \\
        const Py_ssize_t N, real *plane, const fusedops_disc *disc, const real *weights, \\
        Py_ssize_t most, const real *curves, Py_ssize_t pitch, const real *scales) { \\
        vector own[TOGETHER]; \\
        Py_ssize_t z = disc->z, nz = disc->nz; \\
        for (Py_ssize_t k = 0; k < disc->columns; k += LANES_OF(real)) { \\
            for (Py_ssize_t g = 0; g < N; g++) \\
                own[g] = scales[g] * *(const vector *)(curves + g * pitch + k); \\
            if (z + LANES_OF(real) <= nz) \\
                fusedops_draw_rows_##real(1, N, plane, disc, k, z, weights, most, own); \\
            else fusedops_draw_rows_##real(0, N, plane, disc, k, z, weights, most, own); \\
            for (z += LANES_OF(real); z >= nz;) z -= nz; \\
        } \\
    } \\
    FUNCTION void fusedops_draw_##real( \\
        real *plane, const fusedops_disc *disc, Py_ssize_t G, const real *weights, Py_ssize_t most, \\
        const real *curves, Py_ssize_t pitch, const real *scales) { \\
        Py_ssize_t g = 0; \\
        for (; g + TOGETHER <= G; g += TOGETHER) fusedops_draw_some_##real( \\
            TOGETHER, plane, disc, weights + g * most, most, curves + g * pitch, pitch, scales + g); \\
        for (; g < G; g++) fusedops_draw_some_##real( \\
            1, plane, disc, weights + g * most, most, curves + g * pitch, pitch, scales + g); \\
    } \\
    INLINE void fusedops_terms_##real( \\
        vector e, vector one, vector ys, vector yys, vector z, vector square, real x, real *sums) { \\
        vector all = e * one; \\
        SUM(vector, 0) += all; SUM(vector, 1) += x * all; SUM(vector, 2) += e * ys; \\
        SUM(vector, 3) += z * all; SUM(vector, 4) += e * yys + square * all; \\
    } \\
    INLINE void fusedops_contract_rows_##real( \\
        const int whole, const Py_ssize_t N, const real *plane, const fusedops_disc *disc, \\
        Py_ssize_t k, Py_ssize_t z, const real *weights, Py_ssize_t most, Py_ssize_t table, \\
        const real *curves, const real *bent, Py_ssize_t pitch, const real *scales, real *sums, \\
        real *more, Py_ssize_t distance) { \\
        const number *begin = (const number *)disc->first, *count = (const number *)disc->count; \\
        integers lane = *(const integers *)fusedops_numbers_##real + (number)k; \\
        Py_ssize_t ny = disc->ny, nz = disc->nz, r, past, y; \\
        integers first = fusedops_first_##real(whole ? LANES_OF(real) : nz - z); \\
        vector one[TOGETHER], ys[TOGETHER], yys[TOGETHER]; \\
        for (Py_ssize_t g = 0; g < N; g++) \\
            one[g] = ys[g] = yys[g] = *(const vector *)fusedops_zeros; \\
        fusedops_part_##real(disc, k, &r, &past); \\
        for (y = disc->y + r; y >= ny;) y -= ny; \\
        for (const real *from = plane + y * nz; r < past; r++) { \\
            integers bits; \\
            if (whole) bits = AS(integers, *(const vector *)(from + z)); \\
            else if (fusedops_apart_##real(ny, nz, y)) \\
                bits = (AS(integers, *(const vector *)(from + z)) & first) \\
                    | (AS(integers, *(const vector *)(from + z - nz)) & ~first); \\
            else for (Py_ssize_t l = 0, at = z; l < LANES_OF(real); l++) { \\
                ((real *)&bits)[l] = from[at]; \\
                at = at + 1 < nz ? at + 1 : 0; \\
            } \\
            vector own = AS(vector, bits & MASK(integers, lane - begin[r] < count[r])); \\
            for (Py_ssize_t g = 0; g < N; g++) { \\
                const real *factors = weights + g * most + r; \\
                one[g] += factors[0] * own; \\
                ys[g] += factors[table] * own; \\
                yys[g] += factors[2 * table] * own; \\
            } \\
            from += nz; \\
            if (++y == ny) { y = 0; from = plane; } \\
        } \\
        vector at = *(const vector *)fusedops_lanes_##real + (real)(disc->from_z + (double)k); \\
        vector square = (real)disc->zz * at * at + (real)disc->square; \\
        real x = (real)disc->x; \\
        for (Py_ssize_t g = 0; g < N; g++) { \\
            fusedops_terms_##real( \\
                scales[g] * *(const vector *)(curves + g * pitch + k), one[g], ys[g], yys[g], at, \\
                square, x, sums + g * distance); \\
            if (bent) fusedops_terms_##real( \\
                scales[g] * *(const vector *)(bent + g * pitch + k), one[g], ys[g], yys[g], at, \\
                square, x, more + g * distance); \\
        } \\
    } \\
    INLINE void fusedops_contract_some_##real( \\
        const Py_ssize_t N, const real *plane, const fusedops_disc *disc, const real *weights, \\
        Py_ssize_t most, Py_ssize_t table, const real *curves, const real *bent, Py_ssize_t pitch, \\
        const real *scales, real *sums, real *more, Py_ssize_t distance) { \\
        Py_ssize_t z = disc->z, nz = disc->nz; \\
        for (Py_ssize_t k = 0; k < disc->columns; k += LANES_OF(real)) { \\
            if (z + LANES_OF(real) <= nz) fusedops_contract_rows_##real( \\
                1, N, plane, disc, k, z, weights, most, table, curves, bent, pitch, scales, sums, \\
                more, distance); \\
            else fusedops_contract_rows_##real( \\
                0, N, plane, disc, k, z, weights, most, table, curves, bent, pitch, scales, sums, \\
                more, distance); \\
            for (z += LANES_OF(real); z >= nz;) z -= nz; \\
        } \\
    } \\
    FUNCTION void fusedops_contract_##real( \\
        const real *plane, const fusedops_disc *disc, Py_ssize_t G, const real *weights, \\
        Py_ssize_t most, const real *curves, const real *bent, Py_ssize_t pitch, \\
        const real *scales, real *sums, real *more, Py_ssize_t distance) { \\
        Py_ssize_t g = 0; \\
        for (; g + TOGETHER <= G; g += TOGETHER) fusedops_contract_some_##real( \\
            TOGETHER, plane, disc, weights + g * most, most, G * most, curves + g * pitch, \\
            bent ? bent + g * pitch : bent, pitch, scales + g, sums + g * distance, \\
            more + g * distance, distance); \\
        for (; g < G; g++) fusedops_contract_some_##real( \\
            1, plane, disc, weights + g * most, most, G * most, curves + g * pitch, \\
            bent ? bent + g * pitch : bent, pitch, scales + g, sums + g * distance, \\
            more + g * distance, distance); \\
    }
    DEFINE_CURVES(float, int, unsigned int, fusedops_floats, fusedops_ints)
    DEFINE_CURVES(double, long long, unsigned long long, fusedops_doubles, fusedops_longs)
    """
    void curves_float "fusedops_curves_float"(
        float* out, Py_ssize_t pitch, Py_ssize_t n, Py_ssize_t G, double start, double a, double c,
        const double* norms, const double* rates,
    ) noexcept nogil
    void curves_double "fusedops_curves_double"(
        double* out, Py_ssize_t pitch, Py_ssize_t n, Py_ssize_t G, double start, double a, double c,
        const double* norms, const double* rates,
    ) noexcept nogil
    ctypedef struct Disc "fusedops_disc":
        Py_ssize_t row
        Py_ssize_t rows
        Py_ssize_t column
        Py_ssize_t columns
        Py_ssize_t y
        Py_ssize_t ny
        Py_ssize_t z
        Py_ssize_t nz
        void* first
        void* count
        double x
        double from_y
        double from_z
        double centre
        double square
        double yy
        double zz
    void inside "fusedops_inside"(
        Py_ssize_t rows, double y, double dx, double z, const double* metric, double square,
        double low, double high, double* first, double* length,
    ) noexcept nogil
    void discs "fusedops_discs"(
        Py_ssize_t planes, double x, double y, double z, const double* metric, double square,
        const double* box, double* out, Py_ssize_t pitch,
    ) noexcept nogil
    void tables_float "fusedops_tables_float"(
        float* weights, Py_ssize_t most, Py_ssize_t rows, Py_ssize_t G, double y, double centre,
        double yy,
    ) noexcept nogil
    void tables_double "fusedops_tables_double"(
        double* weights, Py_ssize_t most, Py_ssize_t rows, Py_ssize_t G, double y, double centre,
        double yy,
    ) noexcept nogil
    void ends_float "fusedops_ends_float"(
        const Disc* disc, const double* first, const double* length, double z
    ) noexcept nogil
    void ends_double "fusedops_ends_double"(
        const Disc* disc, const double* first, const double* length, double z
    ) noexcept nogil
    void draw_float "fusedops_draw_float"(
        float* plane, const Disc* disc, Py_ssize_t G, const float* weights, Py_ssize_t most,
        const float* curves, Py_ssize_t pitch, const float* scales,
    ) noexcept nogil
    void draw_double "fusedops_draw_double"(
        double* plane, const Disc* disc, Py_ssize_t G, const double* weights, Py_ssize_t most,
        const double* curves, Py_ssize_t pitch, const double* scales,
    ) noexcept nogil
    void contract_float "fusedops_contract_float"(
        const float* plane, const Disc* disc, Py_ssize_t G, const float* weights, Py_ssize_t most,
        const float* curves, const float* bent, Py_ssize_t pitch, const float* scales, float* sums,
        float* more, Py_ssize_t distance,
    ) noexcept nogil
    void contract_double "fusedops_contract_double"(
        const double* plane, const Disc* disc, Py_ssize_t G, const double* weights, Py_ssize_t most,
        const double* curves, const double* bent, Py_ssize_t pitch, const double* scales,
        double* sums, double* more, Py_ssize_t distance,
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
    # The most slabs of planes of the map, and slabs for every thread: the curves of an atom are computed anew
    # in each. Their number changes no bit.
    SLABS = 32
    SHARED = 8
    # The most columns of voxels along an axis by which atoms are sorted.
    COLUMNS = 64

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
    Py_ssize_t extents_row
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
    const long long* order
    const void* cotangent
    void* dxyz
    void* db
    void* doccupancy
    void* damplitudes
    void* dwidths
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
    const Grid* grid, const Atom* atom, double dx, double* first, double* length
) noexcept nogil:
    """Find the parts of a plane's rows inside of an atom's sphere; return the number of rows."""
    cdef Py_ssize_t rows = atom.high[1] - atom.low[1] + 1
    inside(
        rows, atom.low[1] - atom.at[1], dx, atom.at[2], grid.metric, atom.square, atom.low[2],
        atom.high[2], first, length,
    )
    return rows


cdef inline void find_discs(
    const Grid* grid, const Atom* atom, double* extents, Py_ssize_t most
) noexcept nogil:
    """Write where the discs of all planes of an atom's box are."""
    cdef double box[4]
    box[0], box[1], box[2], box[3] = atom.low[1], atom.high[1], atom.low[2], atom.high[2]
    discs(
        atom.high[0] - atom.low[0] + 1, atom.low[0] - atom.at[0], atom.at[1], atom.at[2],
        grid.metric, atom.square, box, extents + 2 * most, most,
    )


cdef inline bint set_disc(
    const Grid* grid, const Atom* atom, Py_ssize_t x, double* extents, Py_ssize_t most, Disc* disc,
    const real* like,
) noexcept nogil:
    """Set the disc of a plane, with ends of its rows for a map `like` one; return whether there is any."""
    cdef const double* form = grid.metric
    cdef const double* own = extents + 2 * most + x - atom.low[0]
    cdef double y = own[0], z = own[2 * most], apart = form[3] / form[4]
    disc.rows, disc.columns = <Py_ssize_t>own[most], <Py_ssize_t>own[3 * most]
    if disc.rows <= 0 or disc.columns <= 0:
        return False
    disc.row, disc.column = <Py_ssize_t>y - atom.low[1], <Py_ssize_t>z - atom.low[2]
    disc.y, disc.z = wrapped(<Py_ssize_t>y, grid.ny), wrapped(<Py_ssize_t>z, grid.nz)
    disc.ny, disc.nz = grid.ny, grid.nz
    disc.x = x - atom.at[0]
    disc.from_y = y - atom.at[1]
    disc.from_z = z - atom.at[2] + form[5] * disc.x
    disc.centre = -(disc.from_y + apart * disc.x)
    disc.square = (form[2] - form[3] * apart) * disc.x * disc.x
    disc.yy, disc.zz = form[4], form[1]
    disc.first, disc.count = extents + 6 * most, extents + 7 * most
    inside(
        disc.rows, disc.from_y, disc.x, atom.at[2], form, atom.square, atom.low[2], atom.high[2],
        extents, extents + most,
    )
    if real is float:
        ends_float(disc, extents, extents + most, z)
    else:
        ends_double(disc, extents, extents + most, z)
    return True


cdef inline void set_rows(
    const double* numbers, Py_ssize_t G, double x, double* parts
) noexcept nogil:
    """Write the parts of all Gaussians' exponents on a plane that its rows share."""
    cdef Py_ssize_t g
    for g in range(G):
        parts[g] = x * x * numbers[2 * G + g]
        parts[G + g] = 2 * x * numbers[3 * G + g]
        parts[2 * G + g] = x * numbers[5 * G + g]


cdef inline void set_row(
    const double* numbers, const double* parts, Py_ssize_t G, double y, double z, real* q, real* t
) noexcept nogil:
    """Write q and the first t of all Gaussians on a plane's row at y that begins at z.

    In cells far from right angles both are small differences of large numbers.
    """
    cdef Py_ssize_t g
    for g in range(G):
        q[g] = <real>(parts[g] + y * (parts[G + g] + y * numbers[4 * G + g]))
        t[g] = <real>(z + parts[2 * G + g] + y * numbers[6 * G + g])


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
    const Grid* grid, const Disc* disc, const real* change, const real* weights,
    const real* curve, real* turned, real* bent,
) noexcept nogil:
    """Split the change of a Gaussian W · C on a plane into a product turned · C and a W · bent."""
    cdef Py_ssize_t r, k
    cdef real y = <real>disc.from_y, z = <real>disc.from_z, centre = <real>-disc.centre
    cdef real base = change[0] + <real>disc.x * (change[1] - <real>grid.metric[5] * change[3])
    cdef real square = <real>disc.square, yy = <real>disc.yy, zz = <real>disc.zz
    for r in range(disc.rows):
        turned[r] = weights[r] * (
            base + (y + r) * change[2] + (square + yy * (centre + r) * (centre + r)) * change[4]
        )
    for k in range(disc.columns):
        bent[k] = curve[k] * (z + k) * (change[3] + (z + k) * change[4] * zz)


cdef inline void curves(
    real* out, Py_ssize_t pitch, Py_ssize_t n, Py_ssize_t G, double start, double a, double c,
    const double* norms, const double* rates,
) noexcept nogil:
    if real is float:
        curves_float(out, pitch, n, G, start, a, c, norms, rates)
    else:
        curves_double(out, pitch, n, G, start, a, c, norms, rates)


cdef inline void set_tables(
    real* weights, Py_ssize_t most, Py_ssize_t rows, Py_ssize_t G, double y, double centre, double yy
) noexcept nogil:
    if real is float:
        tables_float(weights, most, rows, G, y, centre, yy)
    else:
        tables_double(weights, most, rows, G, y, centre, yy)


cdef inline bint upright(const Grid* grid) noexcept nogil:
    """Return whether all planes of an isotropic atom have the same curves."""
    return grid.metric[3] == 0 and grid.metric[5] == 0


cdef inline void set_plane(
    const Grid* grid, const Atom* atom, const double* numbers, Py_ssize_t G, const Disc* disc,
    Py_ssize_t x, double share, bint first, Py_ssize_t most, Py_ssize_t pitch, real* weights,
    real* along_z, real* along_x, real* scales,
) noexcept nogil:
    """Write factors of a disc's Gaussians: for rows, along z, and of all; reuse what planes share."""
    cdef Py_ssize_t g
    cdef const double* form = grid.metric
    cdef const double* rates = numbers + G
    if not upright(grid):
        curves(
            weights + disc.row, most, disc.rows, G, -disc.centre, disc.square / disc.zz,
            disc.yy / disc.zz, numbers, rates,
        )
        curves(
            along_z + disc.column, pitch, disc.columns, G, disc.from_z, 0, 1, <const double*>NULL,
            rates,
        )
        for g in range(G):
            scales[g] = <real>share
        return
    if first:
        curves(
            weights, most, atom.high[1] - atom.low[1] + 1, G, atom.low[1] - atom.at[1], 0,
            form[4] / form[1], numbers, rates,
        )
        curves(
            along_z, pitch, atom.high[2] - atom.low[2] + 1, G, atom.low[2] - atom.at[2], 0, 1,
            <const double*>NULL, rates,
        )
        curves(
            along_x, most, atom.high[0] - atom.low[0] + 1, G, atom.low[0] - atom.at[0], 0,
            form[2] / form[1], <const double*>NULL, rates,
        )
    for g in range(G):
        scales[g] = <real>share * along_x[g * most + x - atom.low[0]]


cdef void draw_separable(
    const Grid* grid, Py_ssize_t low, Py_ssize_t high, const Atom* atom, const double* numbers,
    const real* change, double share, Py_ssize_t G, real* out, real* scratch, double* extents,
    Py_ssize_t most, Py_ssize_t pitch,
) noexcept nogil:
    """Add an isotropic atom to planes low to high, if its factors are curves."""
    # Of a product's change, one part is of rows, and one part is along z.
    cdef Py_ssize_t products = G if change == NULL else 2 * G
    cdef Py_ssize_t x, plane, g
    cdef real* weights = scratch
    cdef real* along_z = weights + products * most
    cdef real* along_x = along_z + products * pitch
    cdef real* scales = along_x + G * most
    cdef real* plain = along_z + (products - G) * pitch
    cdef Disc disc
    cdef bint fresh = True
    for x in range(atom.low[0], atom.high[0] + 1):
        plane = wrapped(x - grid.start, grid.nx)
        if plane < low or plane >= high:
            continue
        if fresh:
            find_discs(grid, atom, extents, most)
        if not set_disc(grid, atom, x, extents, most, &disc, out):
            continue
        set_plane(
            grid, atom, numbers, G, &disc, x, share, fresh, most, pitch, weights, plain, along_x,
            scales,
        )
        fresh = False
        for g in range(products - G):
            scales[G + g] = scales[g]
            change_product(
                grid, &disc, change + CHANGE * g, weights + g * most + disc.row,
                plain + g * pitch + disc.column, weights + (G + g) * most + disc.row,
                along_z + g * pitch + disc.column,
            )
        if real is float:
            draw_float(
                out + plane * grid.ny * grid.nz, &disc, products, weights + disc.row, most,
                along_z + disc.column, pitch, scales,
            )
        else:
            draw_double(
                out + plane * grid.ny * grid.nz, &disc, products, weights + disc.row, most,
                along_z + disc.column, pitch, scales,
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
    cdef real* q = values + pitch
    cdef real* t = q + G
    cdef real* d = NULL
    cdef real* c = t + 4 * G
    cdef real* norm = c + G
    cdef double at[3]
    cdef real* to
    memset(out + low * grid.ny * grid.nz, 0, (high - low) * grid.ny * grid.nz * sizeof(real))
    for n in range(count):
        atom = atoms + listed[n]
        own = numbers + listed[n] * NUMBERS * G
        share = occupancy[listed[n]] if changes == NULL else 1
        if changes != NULL:
            change = changes + listed[n] * CHANGE * G
            d = t + G
        if separable:
            draw_separable(
                grid, low, high, atom, own, change, share, G, out, scratch, extents, most, pitch
            )
            continue
        for g in range(G):
            norm[g], c[g] = <real>own[g], <real>own[G + g]
        for x in range(atom.low[0], atom.high[0] + 1):
            plane = wrapped(x - grid.start, grid.nx)
            if plane < low or plane >= high:
                continue
            dx = x - atom.at[0]
            rows = rows_inside(grid, atom, dx, extents, extents + most)
            set_rows(own, G, dx, extents + 2 * most)
            for r in range(rows):
                y = atom.low[1] + r
                first = <Py_ssize_t>extents[r]
                length = <Py_ssize_t>extents[most + r]
                if length <= 0:
                    continue
                to = out + (plane * grid.ny + wrapped(y, grid.ny)) * grid.nz
                z = wrapped(first, grid.nz)
                set_row(
                    own, extents + 2 * most, G, y - atom.at[1], first - atom.at[2], q, t
                )
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


cdef inline void contract(
    const real* plane, const Disc* disc, Py_ssize_t G, const real* weights, Py_ssize_t most,
    const real* along_z, const real* bent, Py_ssize_t pitch, const real* scales, real* sums,
    real* more, Py_ssize_t distance,
) noexcept nogil:
    if real is float:
        contract_float(
            plane, disc, G, weights, most, along_z, bent, pitch, scales, sums, more, distance
        )
    else:
        contract_double(
            plane, disc, G, weights, most, along_z, bent, pitch, scales, sums, more, distance
        )


cdef void contract_separable(
    const Grid* grid, const Atom* atom, const double* numbers, const real* change, Py_ssize_t G,
    const real* cotangent, real* scratch, double* extents, Py_ssize_t most, Py_ssize_t pitch,
    double* moments,
) noexcept nogil:
    """Write the moments of an isotropic atom if its factors are curves."""
    cdef Py_ssize_t x, g, r, plane
    cdef Py_ssize_t lanes = 64 // <Py_ssize_t>sizeof(real), distance = MOMENTS // 2 * lanes
    cdef const real* here
    cdef const real* other
    cdef int i, part
    cdef real* weights = scratch
    cdef real* along_z = weights + 3 * G * most
    cdef real* along_x = along_z + G * pitch
    cdef real* sums = along_x + G * most
    cdef real* turned = sums + G * distance
    cdef real* bent = turned + 3 * G * most
    cdef real* scales = bent + G * pitch
    cdef double s[5]
    cdef double* m
    cdef Disc disc
    cdef bint fresh = True
    memset(sums, 0, G * distance * sizeof(real))
    for x in range(atom.low[0], atom.high[0] + 1):
        plane = wrapped(x - grid.start, grid.nx)
        if plane >= grid.planes:
            continue
        if fresh:
            find_discs(grid, atom, extents, most)
        if not set_disc(grid, atom, x, extents, most, &disc, cotangent):
            continue
        here = cotangent + plane * grid.ny * grid.nz
        set_plane(
            grid, atom, numbers, G, &disc, x, 1, fresh, most, pitch, weights, along_z, along_x,
            scales,
        )
        if not upright(grid):
            set_tables(
                weights + disc.row, most, disc.rows, G, disc.from_y, disc.centre, disc.yy
            )
        elif fresh:
            set_tables(
                weights, most, atom.high[1] - atom.low[1] + 1, G, atom.low[1] - atom.at[1],
                atom.at[1] - atom.low[1], disc.yy,
            )
        fresh = False
        other = NULL
        if change != NULL:
            other = bent
            for g in range(G):
                change_product(
                    grid, &disc, change + CHANGE * g, weights + g * most + disc.row,
                    along_z + g * pitch + disc.column, turned + g * most, bent + g * pitch,
                )
            set_tables(turned, most, disc.rows, G, disc.from_y, disc.centre, disc.yy)
            contract(
                here, &disc, G, turned, most, along_z + disc.column, <const real*>NULL, pitch,
                scales, sums + 5 * lanes, sums, distance,
            )
        contract(
            here, &disc, G, weights + disc.row, most, along_z + disc.column, other, pitch, scales,
            sums, sums + 5 * lanes, distance,
        )
    for g in range(G):
        for part in range(1 if change == NULL else 2):
            # 1, x, y, z and |w|², with z relative to the point of the row nearest to the atom.
            for i in range(5):
                s[i] = 0
                for r in range(lanes):
                    s[i] += sums[g * distance + (5 * part + i) * lanes + r]
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
        rows_inside(grid, atom, dx, extents, extents + most)
        set_rows(numbers, G, dx, extents + 2 * most)
        rows = 0
        for r in range(atom.high[1] - atom.low[1] + 1):
            y = atom.low[1] + r
            dy = y - atom.at[1]
            first = <Py_ssize_t>extents[r]
            length = <Py_ssize_t>extents[most + r]
            if length <= 0:
                continue
            set_row(
                numbers, extents + 2 * most, G, dy, first - atom.at[2], q + rows * G, t + rows * G
            )
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

    See `_vjp_vjp_formula` of fusedops/density/op.py.
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
    const SetUp* call, Py_ssize_t n, const double* moments, void* dxyz, void* db,
    void* doccupancy, void* damplitudes, void* dwidths, const real* given,
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
            (<real*>damplitudes)[G * n + g] = 0
            (<real*>dwidths)[G * n + g] = 0
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
        (<real*>damplitudes)[G * n + g] = <real>(toccupancy * one[0] + occupancy * z)
        (<real*>dwidths)[G * n + g] = <real>(trace(K) / (4 * PI * PI))
    for i in range(3):
        (<real*>dxyz)[3 * n + i] = <real>sum_x[i]
    for i in range(bs):
        (<real*>db)[bs * n + i] = <real>sum_b[i]
    (<real*>doccupancy)[n] = <real>total


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
            own.extents + thread * own.extents_row, own.most, own.pitch,
        )


cdef void some_pull_backs(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const SplatVjp* call = <const SplatVjp*>given
    cdef const SetUp* set_up = call.given
    cdef const Scratch* own = &call.scratch
    cdef Py_ssize_t G = set_up.gaussians, i, n
    cdef const double* numbers
    cdef const real* change = NULL
    cdef real* scratch = <real*>own.numbers + thread * own.row
    cdef double* extents = own.extents + thread * own.extents_row
    cdef double* moments = own.moments + thread * own.moments_row
    for i in range(begin, end):
        n = call.order[i]
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
            set_up, n, moments, call.dxyz, call.db, call.doccupancy, call.damplitudes,
            call.dwidths, given,
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
    Scratch* scratch, Py_ssize_t row, Py_ssize_t item, Py_ssize_t G, int threads
):
    """Give every thread a row of numbers, and extents and parts of rows, in whole lines of the cache.

    All are zeros, because lanes without a voxel are computed too, and old numbers there may be denormal, and
    slow.
    """
    scratch.extents_row = 8 * scratch.most + padded(3 * G)
    cdef Py_ssize_t extents = threads * scratch.extents_row * sizeof(double)
    scratch.row = padded(row)
    cdef bytearray memory = room(extents + threads * scratch.row * item + 64)
    memset(of(memory), 0, len(memory))
    cdef char* begin = <char*>of(memory)
    begin += -<Py_ssize_t>begin & 63
    scratch.extents = <double*>begin
    scratch.numbers = begin + extents
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


cdef inline Py_ssize_t columns(Py_ssize_t size) noexcept nogil:
    """Return the number of voxels along an axis for which atoms are sorted together."""
    return 8 + size // COLUMNS


cdef void sort_atoms(const SetUp* call, long long* order) noexcept nogil:
    """Order atoms by columns of the grid along z: neighbours find the map in the cache."""
    cdef long long at[(COLUMNS + 1) * (COLUMNS + 1) + 1]
    cdef Py_ssize_t n, key, wide = columns(call.grid.nx), deep = columns(call.grid.ny)
    cdef Py_ssize_t rows = call.grid.ny // deep + 1, keys = (call.grid.nx // wide + 1) * rows
    cdef const Atom* atom
    cdef int part
    memset(at, 0, (keys + 1) * sizeof(long long))
    for part in range(2):
        for n in range(call.count):
            atom = call.atoms + n
            key = 0
            if atom.usable:
                key = <Py_ssize_t>atom.at[0] // wide * rows + <Py_ssize_t>atom.at[1] // deep
            if part == 0:
                at[key + 1] += 1
            else:
                order[at[key]] = n
                at[key] += 1
        for key in range(keys if part == 0 else 0):
            at[key + 1] += at[key]


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
    cdef Py_ssize_t most_slabs = min(SLABS, SHARED * threads)
    cdef Py_ssize_t slab = (given.grid.planes + most_slabs - 1) // most_slabs
    cdef Py_ssize_t slabs = (given.grid.planes + slab - 1) // slab
    cdef long long pointers[SLABS + 1]
    with nogil:
        count_listed(&given, slab, slabs, pointers)
    cdef bytearray lists = room(pointers[slabs] * sizeof(long long))
    cdef long long* listed = <long long*>of(lists)
    cdef bytearray own = scratch_of(
        scratch, pitch + (G + 2) * most + products * (most + pitch + 1), sizeof(real), G, threads
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
    real[:, ::1] dxyz,
    db,
    real[::1] doccupancy,
    real[:, ::1] damplitudes,
    real[:, ::1] dwidths,
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
        scratch,
        most * (7 * G + 2 + pitch) + (2 * G + 1) * pitch + G * (MOMENTS // 2 * LANES + 1),
        sizeof(real), G, threads,
    )
    cdef bytearray lengths = room(threads * most * sizeof(Py_ssize_t))
    scratch.lengths = <Py_ssize_t*>of(lengths)
    scratch.moments_row = (MOMENTS * G + 7) // 8 * 8
    cdef bytearray moments = room(threads * scratch.moments_row * sizeof(double))
    scratch.moments = <double*>of(moments)
    cdef bytearray unwanted = room(given.count * (4 + given.bs + 2 * G) * sizeof(real))
    cdef real* spare = <real*>of(unwanted)
    cdef bytearray sorted_atoms = room(given.count * sizeof(long long))
    cdef long long* order = <long long*>of(sorted_atoms)
    call.given = &given
    call.order = order
    call.cotangent = &cotangent[0, 0, 0]
    call.dxyz = &dxyz[0, 0] if dxyz is not None else spare
    spare += 3 * given.count
    call.db = elements(db, sizeof(real)) if db is not None else spare
    spare += given.bs * given.count
    call.doccupancy = &doccupancy[0] if doccupancy is not None else spare
    spare += given.count
    call.damplitudes = &damplitudes[0, 0] if damplitudes is not None else spare
    spare += G * given.count
    call.dwidths = &dwidths[0, 0] if dwidths is not None else spare
    with nogil:
        sort_atoms(&given, order)
        in_shares(<Share>some_pull_backs[real], &call, given.count, threads)
