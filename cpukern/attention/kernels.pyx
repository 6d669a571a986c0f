# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Triangle attention on the CPU, by blocks of queries and keys that stay in near caches.

A row's keys, values and their transposes are packed once, padded with zeros to whole tiles of a
product, so that a product has no remainder; then its queries come in blocks. The forward keeps a
running maximum of logits, and scales earlier sums whenever it grows. The backward computes the logits
again, and shares of the softmax from the saved logarithm of their sum. It sums shares times their
cotangents: the output, which may be rounded to 16 bits, is not read. A missing key is a pattern of bits
that keeps nothing of its logit, beside one that is put there.

All rows add to the bias's gradient. Consecutive rows share a sum, as many as the sizes alone say, and
the sums are added in their order, so that the number of threads changes no bit.
"""

from libc.math cimport INFINITY, log
from libc.string cimport memcpy, memset

from cpukern._cpu cimport Share, in_shares
from cpukern.arrays cimport of, room, whole_lines
from cpukern.vectors cimport real

# Explicit vectors; without GNU C a vector is one number.
cdef extern from *:
    """
    #include <float.h>
    #include <string.h>
    #if defined(__GNUC__)
    /* Vectors larger than the processor's are only passed between inline functions. */
    #pragma GCC diagnostic ignored "-Wpsabi"
    #define INLINE static inline __attribute__((always_inline))
    #define FUNCTION static __attribute__((noinline))
    /* ROWS: the rows of a product's tile, for whose sums there are registers.
       LARGER: the larger of two, lane by lane; b where either is NaN. */
    #if defined(__AVX512F__)
    #include <immintrin.h>
    #define BYTES 64
    #define ROWS 8
    #define LARGER_float(a, b) ((fusedops_floats)_mm512_max_ps((__m512)(a), (__m512)(b)))
    #define LARGER_double(a, b) ((fusedops_doubles)_mm512_max_pd((__m512d)(a), (__m512d)(b)))
    #elif defined(__AVX__)
    #include <immintrin.h>
    #define BYTES 32
    #define ROWS 4
    #define LARGER_float(a, b) ((fusedops_floats)_mm256_max_ps((__m256)(a), (__m256)(b)))
    #define LARGER_double(a, b) ((fusedops_doubles)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
    #else
    #define BYTES 16
    #define ROWS 4
    #define CHOSEN(integers, c, a, b) (((integers)(a) & (integers)(c)) | ((integers)(b) & ~(integers)(c)))
    #define LARGER_float(a, b) ((fusedops_floats)CHOSEN(fusedops_ints, (a) > (b), a, b))
    #define LARGER_double(a, b) ((fusedops_doubles)CHOSEN(fusedops_longs, (a) > (b), a, b))
    #endif
    #define LANES(real) ((Py_ssize_t)(BYTES / sizeof(real)))
    #define VECTOR(type) __attribute__((vector_size(BYTES), aligned(sizeof(type)), may_alias))
    #define AS(type, v) ((type)(v))
    #else
    #define INLINE static inline
    #define FUNCTION static
    #define BYTES sizeof(double)
    #define ROWS 4
    #define LARGER_float(a, b) ((a) > (b) ? (a) : (b))
    #define LARGER_double(a, b) ((a) > (b) ? (a) : (b))
    #define LANES(real) ((Py_ssize_t)1)
    #define VECTOR(type)
    #define AS(type, v) type##_of(v)
    #endif
    /* The columns of a product's tile. */
    #define COLUMNS(real) (2 * LANES(real))
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

    /* 2^x, zero below the normal numbers; a NaN stays one. Adding a large number leaves the exponent in the
       lowest bits; the rest, at most a half, goes into a polynomial. */
    INLINE fusedops_floats fusedops_exp2_float(fusedops_floats x) {
        fusedops_floats least = {0}, y, f, p;
        x = LARGER_float(least - 127.0f, x);
        y = x + 12583039.0f;
        f = x - (y - 12583039.0f);
        p = f * 0.000154614449f + 0.0013400428f;
        p = p * f + 0.00961805694f;
        p = p * f + 0.0555032715f;
        p = p * f + 0.240226507f;
        p = p * f + 0.693147182f;
        p = p * f + 1.0f;
        return p * AS(fusedops_floats, AS(fusedops_ints, y) << 23);
    }
    INLINE fusedops_doubles fusedops_exp2_double(fusedops_doubles x) {
        fusedops_doubles least = {0}, y, f, p;
        x = LARGER_double(least - 1023.0, x);
        y = x + 6755399441056767.0;
        f = x - (y - 6755399441056767.0);
        p = f * 4.4558179083360645e-10 + 7.074194297288521e-09;
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
        return p * AS(fusedops_doubles, AS(fusedops_longs, y) << 52);
    }

    #define LOG2E 1.4426950408889634
    #define LARGEST_float FLT_MAX
    #define LARGEST_double DBL_MAX
    #define AT(vector, place) (*(vector *)(place))
    /* product: c (rows, columns) = a b, or c + a b if it `adds`, with a (rows, n) of any strides. Columns of
       b and c come in strips of a tile's width, which in b begin `strip` numbers apart.
       top: turn a query's products with keys into its logits, and return the largest so far.
       weigh: turn them into exponentials, relative to the largest so far, and add these to the total. Return
       the factor by which earlier sums change.
       share: turn logits into exponentials relative to the largest; add these to the total, and these times
       their cotangents d to the mean.
       slope: divide exponentials by their total, turn cotangents of these shares into those of logits, and add
       the latter to dbias if given.
       The bias has n numbers; other logits, up to `columns`, are missing. */
    #define DEFINE(real, vector, integer, integers) \\
    INLINE void fusedops_tile_##real(const int parts, int adds, const real *a, Py_ssize_t row, \\
            Py_ssize_t step, const real *b, Py_ssize_t b_step, Py_ssize_t n, real *c, \\
            Py_ssize_t c_step) { \\
        vector none = {0}, total[ROWS][2]; \\
        for (int r = 0; r < ROWS; r++) \\
            for (int p = 0; p < parts; p++) \\
                total[r][p] = adds ? AT(vector, c + r * c_step + p * LANES(real)) : none; \\
        for (Py_ssize_t i = 0; i < n; i++) { \\
            vector x[2]; \\
            for (int p = 0; p < parts; p++) x[p] = AT(const vector, b + i * b_step + p * LANES(real)); \\
            for (int r = 0; r < ROWS; r++) { \\
                real factor = a[r * row + i * step]; \\
                for (int p = 0; p < parts; p++) total[r][p] += factor * x[p]; \\
            } \\
        } \\
        for (int r = 0; r < ROWS; r++) \\
            for (int p = 0; p < parts; p++) \\
                AT(vector, c + r * c_step + p * LANES(real)) = total[r][p]; \\
    } \\
    FUNCTION void fusedops_product_##real(int adds, const real *a, Py_ssize_t row, Py_ssize_t step, \\
            const real *b, Py_ssize_t b_step, Py_ssize_t strip, Py_ssize_t n, real *c, \\
            Py_ssize_t c_step, Py_ssize_t rows, Py_ssize_t columns) { \\
        for (Py_ssize_t j = 0; j < columns; j += COLUMNS(real), b += strip) \\
            for (Py_ssize_t i = 0; i < rows; i += ROWS) \\
                if (columns - j > LANES(real)) \\
                    fusedops_tile_##real(2, adds, a + i * row, row, step, b, b_step, n, \\
                                         c + i * c_step + j, c_step); \\
                else \\
                    fusedops_tile_##real(1, adds, a + i * row, row, step, b, b_step, n, \\
                                         c + i * c_step + j, c_step); \\
    } \\
    INLINE vector fusedops_logits_##real(vector s, vector bias, const integer *kept, const real *missing) { \\
        s += bias; \\
        return AS(vector, (AS(integers, s) & AT(const integers, kept)) | AT(const integers, missing)); \\
    } \\
    INLINE vector fusedops_edge_##real(const real *bias, Py_ssize_t n) { \\
        real edge[BYTES / sizeof(real)] = {0}; \\
        if (n > 0) memcpy(edge, bias, (n < LANES(real) ? n : LANES(real)) * sizeof(real)); \\
        return AT(vector, edge); \\
    } \\
    INLINE real fusedops_sum_##real(vector x) { \\
        real lanes[BYTES / sizeof(real)]; \\
        memcpy(lanes, &x, LANES(real) * sizeof(real)); \\
        for (int l = 1; l < LANES(real); l++) lanes[0] += lanes[l]; \\
        return lanes[0]; \\
    } \\
    FUNCTION real fusedops_top_##real(real *s, const real *bias, Py_ssize_t n, Py_ssize_t columns, \\
            const integer *kept, const real *missing, real most) { \\
        vector none = {0}, top[2] = {none + most, none + most}, x, b; \\
        real lanes[BYTES / sizeof(real)]; \\
        for (Py_ssize_t i = 0; i < columns; i += COLUMNS(real)) \\
            for (int p = 0; p < 2; p++) { \\
                Py_ssize_t at = i + p * LANES(real); \\
                if (at + LANES(real) <= n) b = AT(const vector, bias + at); \\
                else b = fusedops_edge_##real(bias + at, n - at); \\
                x = fusedops_logits_##real(AT(const vector, s + at), b, kept + at, missing + at); \\
                AT(vector, s + at) = x; \\
                top[p] = LARGER_##real(x, top[p]); \\
            } \\
        top[0] = LARGER_##real(top[0], top[1]); \\
        memcpy(lanes, top, LANES(real) * sizeof(real)); \\
        most = lanes[0]; \\
        for (int l = 1; l < LANES(real); l++) most = lanes[l] > most ? lanes[l] : most; \\
        return most; \\
    } \\
    FUNCTION real fusedops_weigh_##real(real *s, const real *bias, Py_ssize_t n, Py_ssize_t columns, \\
            const integer *kept, const real *missing, real *largest, real *total) { \\
        vector none = {0}, sum[2] = {none, none}, x; \\
        real most = fusedops_top_##real(s, bias, n, columns, kept, missing, *largest), factor; \\
        for (Py_ssize_t i = 0; i < columns; i += COLUMNS(real)) \\
            for (int p = 0; p < 2; p++) { \\
                Py_ssize_t at = i + p * LANES(real); \\
                x = fusedops_exp2_##real((real)LOG2E * (AT(const vector, s + at) - most)); \\
                AT(vector, s + at) = x; \\
                sum[p] += x; \\
            } \\
        x = fusedops_exp2_##real(none + (real)LOG2E * (*largest - most)); \\
        memcpy(&factor, &x, sizeof(real)); \\
        *total = *total * factor + fusedops_sum_##real(sum[0] + sum[1]); \\
        *largest = most; \\
        return factor; \\
    } \\
    FUNCTION void fusedops_share_##real(real *s, const real *d, Py_ssize_t columns, real most, \\
            real *total, real *mean) { \\
        vector none = {0}, sum = none, along = none, x; \\
        for (Py_ssize_t i = 0; i < columns; i += LANES(real)) { \\
            x = fusedops_exp2_##real((real)LOG2E * (AT(const vector, s + i) - most)); \\
            AT(vector, s + i) = x; \\
            sum += x; \\
            along += x * AT(const vector, d + i); \\
        } \\
        *total += fusedops_sum_##real(sum); \\
        *mean += fusedops_sum_##real(along); \\
    } \\
    FUNCTION void fusedops_slope_##real(real *s, real *d, Py_ssize_t n, Py_ssize_t columns, \\
            const integer *kept, real total, real mean, real *dbias) { \\
        real factor = 1 / total; \\
        for (Py_ssize_t i = 0; i < columns; i += LANES(real)) { \\
            vector x = AT(const vector, s + i) * factor; \\
            AT(vector, s + i) = x; \\
            x *= AT(const vector, d + i) - mean; \\
            x = AS(vector, AS(integers, x) & AT(const integers, kept + i)); \\
            AT(vector, d + i) = x; \\
            if (dbias && i + LANES(real) <= n) AT(vector, dbias + i) += x; \\
            else if (dbias) for (Py_ssize_t l = i; l < n; l++) dbias[l] += d[l]; \\
        } \\
    }
    DEFINE(float, fusedops_floats, unsigned int, fusedops_ints)
    DEFINE(double, fusedops_doubles, unsigned long long, fusedops_longs)
    """
    enum:
        ROWS
    Py_ssize_t lanes_float "LANES(float)"
    Py_ssize_t lanes_double "LANES(double)"
    void product_float "fusedops_product_float"(
        bint adds, const float* a, Py_ssize_t row, Py_ssize_t step, const float* b, Py_ssize_t b_step,
        Py_ssize_t strip, Py_ssize_t n, float* c, Py_ssize_t c_step, Py_ssize_t rows,
        Py_ssize_t columns) noexcept nogil
    void product_double "fusedops_product_double"(
        bint adds, const double* a, Py_ssize_t row, Py_ssize_t step, const double* b,
        Py_ssize_t b_step, Py_ssize_t strip, Py_ssize_t n, double* c, Py_ssize_t c_step,
        Py_ssize_t rows, Py_ssize_t columns) noexcept nogil
    float weigh_float "fusedops_weigh_float"(
        float* s, const float* bias, Py_ssize_t n, Py_ssize_t columns, const unsigned int* kept,
        const float* missing, float* largest, float* total) noexcept nogil
    double weigh_double "fusedops_weigh_double"(
        double* s, const double* bias, Py_ssize_t n, Py_ssize_t columns,
        const unsigned long long* kept, const double* missing, double* largest,
        double* total) noexcept nogil
    float top_float "fusedops_top_float"(
        float* s, const float* bias, Py_ssize_t n, Py_ssize_t columns, const unsigned int* kept,
        const float* missing, float most) noexcept nogil
    double top_double "fusedops_top_double"(
        double* s, const double* bias, Py_ssize_t n, Py_ssize_t columns,
        const unsigned long long* kept, const double* missing, double most) noexcept nogil
    void share_float "fusedops_share_float"(
        float* s, const float* d, Py_ssize_t columns, float most, float* total,
        float* mean) noexcept nogil
    void share_double "fusedops_share_double"(
        double* s, const double* d, Py_ssize_t columns, double most, double* total,
        double* mean) noexcept nogil
    void slope_float "fusedops_slope_float"(
        float* s, float* d, Py_ssize_t n, Py_ssize_t columns, const unsigned int* kept,
        float total, float mean, float* dbias) noexcept nogil
    void slope_double "fusedops_slope_double"(
        double* s, double* d, Py_ssize_t n, Py_ssize_t columns, const unsigned long long* kept,
        double total, double mean, double* dbias) noexcept nogil
    const float LARGEST_float
    const double LARGEST_double

cdef enum:
    # A block's queries and keys: multiples of a tile's rows and columns.
    QUERIES = 32
    KEYS = 256
    # The queries of an item of the forward.
    SPAN = 256

# An array (B, N, Q, H, D) by strides in numbers, the last axis contiguous; NULL if it is missing. The bias
# has no rows.
cdef struct Edges:
    void* at
    Py_ssize_t batch
    Py_ssize_t row
    Py_ssize_t edge
    Py_ssize_t head

cdef struct Call:
    Edges q
    Edges k
    Edges v
    Edges bias
    Edges out
    Edges dout
    Edges dq
    Edges dk
    Edges dv
    void* dbias
    void* lse
    const unsigned char* mask
    Py_ssize_t batch
    Py_ssize_t rows
    Py_ssize_t queries
    Py_ssize_t keys
    Py_ssize_t heads
    Py_ssize_t channels
    # Keys and channels, padded to whole tiles.
    Py_ssize_t key_room
    Py_ssize_t width
    # The sums to which a head's rows add, and their memory.
    Py_ssize_t parts
    void* sums
    double scale
    double absent
    char* scratch
    Py_ssize_t size


cdef inline Py_ssize_t lanes_of(real like) noexcept nogil:
    return lanes_float if real is float else lanes_double


cdef inline Py_ssize_t blocks(Py_ssize_t n, Py_ssize_t size) noexcept nogil:
    return (n + size - 1) // size


cdef inline Py_ssize_t whole(Py_ssize_t n, Py_ssize_t size) noexcept nogil:
    return blocks(n, size) * size


cdef inline real* edge(
    const Edges* x, Py_ssize_t b, Py_ssize_t n, Py_ssize_t i, Py_ssize_t h, real like
) noexcept nogil:
    return <real*>x.at + b * x.batch + n * x.row + i * x.edge + h * x.head


cdef inline void product(
    bint adds, const real* a, Py_ssize_t row, Py_ssize_t step, const real* b, Py_ssize_t b_step,
    Py_ssize_t strip, Py_ssize_t n, real* c, Py_ssize_t c_step, Py_ssize_t rows, Py_ssize_t columns,
) noexcept nogil:
    if real is float:
        product_float(adds, a, row, step, b, b_step, strip, n, c, c_step, whole(rows, ROWS), columns)
    else:
        product_double(adds, a, row, step, b, b_step, strip, n, c, c_step, whole(rows, ROWS), columns)


cdef inline real* taken(char** scratch, Py_ssize_t numbers, real like) noexcept nogil:
    """Return the next numbers of the scratch memory."""
    cdef real* found = <real*>scratch[0]
    scratch[0] += whole_lines(numbers * sizeof(real))
    return found


cdef inline void pack(
    const Edges* x, Py_ssize_t b, Py_ssize_t n, Py_ssize_t first, Py_ssize_t count, Py_ssize_t rows,
    Py_ssize_t h, Py_ssize_t channels, Py_ssize_t width, real factor, real* to,
) noexcept nogil:
    """Write a head's edges times a factor as rows (rows, width); zeros in others than `count`."""
    cdef Py_ssize_t i, d
    cdef const real* own
    for i in range(rows):
        memset(to + i * width, 0, width * sizeof(real))
        if i < count:
            own = edge(x, b, n, first + i, h, factor)
            for d in range(channels):
                to[i * width + d] = factor * own[d]


cdef inline void pack_columns(
    const Edges* x, Py_ssize_t b, Py_ssize_t n, Py_ssize_t count, Py_ssize_t columns, Py_ssize_t h,
    Py_ssize_t channels, real* to,
) noexcept nogil:
    """Write a head's edges as columns, in strips (channels, a tile's columns); zeros beyond `count`."""
    cdef Py_ssize_t i, d, wide = 2 * lanes_of(to[0])
    cdef const real* own
    cdef real* column
    for i in range(columns):
        column = to + i // wide * wide * channels + i % wide
        own = NULL if i >= count else edge(x, b, n, i, h, to[0])
        for d in range(channels):
            column[d * wide] = 0 if own == NULL else own[d]


cdef inline void pack_mask(
    const Call* call, Py_ssize_t b, Py_ssize_t n, real* kept, real* missing
) noexcept nogil:
    """Write the bits that a key keeps of a logit, all or none, and the logit of a missing key."""
    cdef Py_ssize_t i
    cdef const unsigned char* mask = NULL
    cdef bint some = call.mask == NULL
    if not some:
        mask = call.mask + (b * call.rows + n) * call.keys
        for i in range(call.keys):
            some |= mask[i] != 0
    for i in range(call.key_room):
        memset(kept + i, 0, sizeof(real))
        missing[i] = 0
        if i >= call.keys:
            missing[i] = -<real>INFINITY
        elif mask == NULL or mask[i]:
            memset(kept + i, 255, sizeof(real))
        elif some:
            # A row without keys counts logits from zero.
            missing[i] = <real>call.absent


cdef inline real lowest(real like) noexcept nogil:
    """Return the lowest number: all logits of a block may be -∞, and -∞ less -∞ is none."""
    return -LARGEST_float if real is float else -LARGEST_double


cdef void forward_span(
    const Call* call, Py_ssize_t b, Py_ssize_t h, Py_ssize_t n, Py_ssize_t begin, char* scratch,
    real like,
) noexcept nogil:
    """Attend to a row, from queries `begin` to the end of their span."""
    cdef Py_ssize_t D = call.channels, width = call.width, wide = 2 * lanes_of(like)
    cdef Py_ssize_t first, count, block, columns, t, j, i, d
    cdef real* keys = taken(&scratch, call.key_room * D, like)
    cdef real* values = taken(&scratch, call.key_room * width, like)
    cdef real* kept = taken(&scratch, call.key_room, like)
    cdef real* missing = taken(&scratch, call.key_room, like)
    cdef real* q = taken(&scratch, QUERIES * width, like)
    cdef real* s = taken(&scratch, QUERIES * KEYS, like)
    cdef real* sums = taken(&scratch, QUERIES * width, like)
    cdef real largest[QUERIES]
    cdef real total[QUERIES]
    cdef real factor
    cdef const real* bias
    cdef real* own
    pack_columns(&call.k, b, n, call.keys, call.key_room, h, D, keys)
    pack(&call.v, b, n, 0, call.keys, call.key_room, h, D, width, <real>1, values)
    pack_mask(call, b, n, kept, missing)
    for t in range(blocks(min(<Py_ssize_t>SPAN, call.queries - begin), QUERIES)):
        first = begin + t * QUERIES
        count = min(<Py_ssize_t>QUERIES, call.queries - first)
        pack(&call.q, b, n, first, count, QUERIES, h, D, width, <real>call.scale, q)
        for i in range(QUERIES):
            largest[i] = lowest(like)
            total[i] = 0
        for j in range(blocks(call.keys, KEYS)):
            block = j * KEYS
            columns = min(<Py_ssize_t>KEYS, call.key_room - block)
            product(False, q, width, 1, keys + block * D, wide, wide * D, D, s, KEYS, count, columns)
            for i in range(count):
                bias = edge(&call.bias, b, 0, first + i, h, like) + block
                if real is float:
                    factor = weigh_float(
                        s + i * KEYS, bias, call.keys - block, columns,
                        <const unsigned int*>(kept + block), missing + block, &largest[i], &total[i])
                else:
                    factor = weigh_double(
                        s + i * KEYS, bias, call.keys - block, columns,
                        <const unsigned long long*>(kept + block), missing + block, &largest[i],
                        &total[i])
                if block and factor != 1:
                    for d in range(width):
                        sums[i * width + d] *= factor
            product(block > 0, s, KEYS, 1, values + block * width, width, wide, columns, sums, width,
                    count, width)
        for i in range(count):
            if call.out.at != NULL:
                own = edge(&call.out, b, n, first + i, h, like)
                for d in range(D):
                    own[d] = sums[i * width + d] / total[i]
            if call.lse != NULL:
                own = <real*>call.lse + ((b * call.rows + n) * call.heads + h) * call.queries + first
                own[i] = <real>(log(total[i]) + largest[i])


cdef inline void unpack(
    const Edges* x, Py_ssize_t b, Py_ssize_t n, Py_ssize_t first, Py_ssize_t count, Py_ssize_t h,
    Py_ssize_t channels, Py_ssize_t width, real factor, const real* rows,
) noexcept nogil:
    """Write rows times a factor into a head's edges."""
    cdef Py_ssize_t i, d
    cdef real* own
    for i in range(count):
        own = edge(x, b, n, first + i, h, factor)
        for d in range(channels):
            own[d] = factor * rows[i * width + d]


cdef void backward_row(
    const Call* call, Py_ssize_t b, Py_ssize_t h, Py_ssize_t n, real* dbias, char* scratch,
) noexcept nogil:
    """Pull cotangents back to a row, and add those of its logits to `dbias` (Q, K), if given."""
    cdef real like = 0
    cdef Py_ssize_t D = call.channels, width = call.width, wide = 2 * lanes_of(like)
    cdef Py_ssize_t first, count, block, columns, t, j, i, d
    cdef real* keys = taken(&scratch, call.key_room * D, like)
    cdef real* values = taken(&scratch, call.key_room * D, like)
    cdef real* key_rows = taken(&scratch, call.key_room * width, like)
    cdef real* dk = taken(&scratch, call.key_room * width, like)
    cdef real* dv = taken(&scratch, call.key_room * width, like)
    cdef real* kept = taken(&scratch, call.key_room, like)
    cdef real* missing = taken(&scratch, call.key_room, like)
    cdef real* q = taken(&scratch, QUERIES * width, like)
    cdef real* dout = taken(&scratch, QUERIES * width, like)
    cdef real* dq = taken(&scratch, QUERIES * width, like)
    cdef real* shares = taken(&scratch, QUERIES * call.key_room, like)
    cdef real* slopes = taken(&scratch, QUERIES * call.key_room, like)
    cdef real largest[QUERIES]
    cdef real mean[QUERIES]
    cdef real total[QUERIES]
    cdef const real* bias
    cdef real* row
    cdef real* s
    cdef real* slope
    pack_columns(&call.k, b, n, call.keys, call.key_room, h, D, keys)
    pack_columns(&call.v, b, n, call.keys, call.key_room, h, D, values)
    pack(&call.k, b, n, 0, call.keys, call.key_room, h, D, width, <real>1, key_rows)
    pack_mask(call, b, n, kept, missing)
    memset(dk, 0, call.key_room * width * sizeof(real))
    memset(dv, 0, call.key_room * width * sizeof(real))
    for t in range(blocks(call.queries, QUERIES)):
        first = t * QUERIES
        count = min(<Py_ssize_t>QUERIES, call.queries - first)
        pack(&call.q, b, n, first, count, QUERIES, h, D, width, <real>call.scale, q)
        pack(&call.dout, b, n, first, count, QUERIES, h, D, width, <real>1, dout)
        memset(mean, 0, sizeof(mean))
        memset(total, 0, sizeof(total))
        for i in range(QUERIES):
            largest[i] = lowest(like)
        for j in range(blocks(call.keys, KEYS)):
            block = j * KEYS
            columns = min(<Py_ssize_t>KEYS, call.key_room - block)
            s, slope = shares + QUERIES * block, slopes + QUERIES * block
            product(False, q, width, 1, keys + block * D, wide, wide * D, D, s, columns, count, columns)
            product(False, dout, width, 1, values + block * D, wide, wide * D, D, slope, columns, count,
                    columns)
            for i in range(count):
                bias = edge(&call.bias, b, 0, first + i, h, like) + block
                if real is float:
                    largest[i] = top_float(
                        s + i * columns, bias, call.keys - block, columns,
                        <const unsigned int*>(kept + block), missing + block, largest[i])
                else:
                    largest[i] = top_double(
                        s + i * columns, bias, call.keys - block, columns,
                        <const unsigned long long*>(kept + block), missing + block, largest[i])
        for j in range(blocks(call.keys, KEYS)):
            block = j * KEYS
            columns = min(<Py_ssize_t>KEYS, call.key_room - block)
            s, slope = shares + QUERIES * block, slopes + QUERIES * block
            for i in range(count):
                if real is float:
                    share_float(s + i * columns, slope + i * columns, columns, largest[i], &total[i],
                                &mean[i])
                else:
                    share_double(s + i * columns, slope + i * columns, columns, largest[i], &total[i],
                                 &mean[i])
        for i in range(count):
            mean[i] /= total[i]
        for j in range(blocks(call.keys, KEYS)):
            block = j * KEYS
            columns = min(<Py_ssize_t>KEYS, call.key_room - block)
            s, slope = shares + QUERIES * block, slopes + QUERIES * block
            for i in range(count):
                row = NULL if dbias == NULL else dbias + (first + i) * call.keys + block
                if real is float:
                    slope_float(
                        s + i * columns, slope + i * columns, call.keys - block, columns,
                        <const unsigned int*>(kept + block), total[i], mean[i], row)
                else:
                    slope_double(
                        s + i * columns, slope + i * columns, call.keys - block, columns,
                        <const unsigned long long*>(kept + block), total[i], mean[i], row)
            if call.dq.at != NULL:
                product(block > 0, slope, columns, 1, key_rows + block * width, width, wide, columns, dq,
                        width, count, width)
            if call.dk.at != NULL:
                product(True, slope, 1, columns, q, width, wide, count, dk + block * width, width,
                        columns, width)
            if call.dv.at != NULL:
                product(True, s, 1, columns, dout, width, wide, count, dv + block * width, width,
                        columns, width)
        if call.dq.at != NULL:
            unpack(&call.dq, b, n, first, count, h, D, width, <real>call.scale, dq)
    if call.dk.at != NULL:
        unpack(&call.dk, b, n, 0, call.keys, h, D, width, <real>1, dk)
    if call.dv.at != NULL:
        unpack(&call.dv, b, n, 0, call.keys, h, D, width, <real>1, dv)


cdef void some_forward(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    """Attend to spans of queries: head after head, while their edges are in a cache."""
    cdef const Call* call = <const Call*>given
    cdef Py_ssize_t spans = blocks(call.queries, SPAN), item, of_row
    cdef real like = 0
    for item in range(begin, end):
        of_row = item // (spans * call.heads)
        forward_span(call, of_row // call.rows, item % call.heads, of_row % call.rows,
                     item // call.heads % spans * SPAN, call.scratch + thread * call.size, like)


cdef void some_backward(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    """Pull back to parts of a head's rows, each with a sum of its own for the bias."""
    cdef const Call* call = <const Call*>given
    cdef Py_ssize_t item, part, of_head, n
    cdef real* dbias
    for item in range(begin, end):
        of_head, part = item // call.parts, item % call.parts
        dbias = NULL
        if call.dbias != NULL:
            dbias = <real*>call.sums + item * call.queries * call.keys
            memset(dbias, 0, call.queries * call.keys * sizeof(real))
        for n in range(call.rows * part // call.parts, call.rows * (part + 1) // call.parts):
            backward_row(call, of_head // call.heads, of_head % call.heads, n, dbias,
                         call.scratch + thread * call.size)


cdef void some_sums(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    """Add all parts of a head to the first, which is then the bias's gradient."""
    cdef const Call* call = <const Call*>given
    cdef Py_ssize_t item, of_head, part, k, size = call.queries * call.keys
    cdef const real* own
    cdef real* to
    for item in range(begin, end):
        of_head = item // call.queries
        to = <real*>call.dbias + item * call.keys
        own = <real*>call.sums + of_head * call.parts * size + item % call.queries * call.keys
        memcpy(to, own, call.keys * sizeof(real))
        for part in range(1, call.parts):
            for k in range(call.keys):
                to[k] += own[part * size + k]


cdef Edges edges_of(const real[:, :, :, :, :] x) noexcept:
    cdef Edges found
    memset(&found, 0, sizeof(found))
    if x is not None:
        found.at = <void*>&x[0, 0, 0, 0, 0]
        found.batch = x.strides[0] // <Py_ssize_t>sizeof(real)
        found.row = x.strides[1] // <Py_ssize_t>sizeof(real)
        found.edge = x.strides[2] // <Py_ssize_t>sizeof(real)
        found.head = x.strides[3] // <Py_ssize_t>sizeof(real)
    return found


cdef void set_call(
    Call* call, const real[:, :, :, :, :] q, const real[:, :, :, :, :] k,
    const real[:, :, :, :, :] v, const real[:, :, :, :] bias, const unsigned char[:, :, ::1] mask,
    double scale, double absent,
) noexcept:
    cdef real like = 0
    memset(call, 0, sizeof(Call))
    call.q, call.k, call.v = edges_of(q), edges_of(k), edges_of(v)
    call.bias.at = <void*>&bias[0, 0, 0, 0]
    call.bias.batch = bias.strides[0] // <Py_ssize_t>sizeof(real)
    call.bias.head = bias.strides[1] // <Py_ssize_t>sizeof(real)
    call.bias.edge = bias.strides[2] // <Py_ssize_t>sizeof(real)
    call.batch, call.rows, call.queries = q.shape[0], q.shape[1], q.shape[2]
    call.heads, call.channels, call.keys = q.shape[3], q.shape[4], k.shape[2]
    call.key_room = whole(call.keys, max(2 * lanes_of(like), <Py_ssize_t>ROWS))
    call.width = whole(call.channels, lanes_of(like))
    call.scale, call.absent = scale, absent
    if mask is not None:
        call.mask = &mask[0, 0, 0]


def forward(
    const real[:, :, :, :, :] q,             # IN   (B, N, Q, H, D), contiguous channels
    const real[:, :, :, :, :] k,             # IN   (B, N, K, H, D), contiguous channels
    const real[:, :, :, :, :] v,             # IN   (B, N, K, H, D), contiguous channels
    const real[:, :, :, :] bias,             # IN   (B, H, Q, K), contiguous keys
    const unsigned char[:, :, ::1] mask,     # IN   (B, N, K), or None
    double scale,
    double absent,                           # IN   the logit of a missing key
    real[:, :, :, :, :] out,                 # OUT  (B, N, Q, H, D), or None
    real[:, :, :, ::1] lse,                  # OUT  (B, N, H, Q), or None
    int threads,
):
    """Attend to rows, by blocks of queries and keys."""
    cdef Call call
    cdef Py_ssize_t numbers
    set_call(&call, q, k, v, bias, mask, scale, absent)
    call.out = edges_of(out)
    if lse is not None:
        call.lse = &lse[0, 0, 0, 0]
    numbers = call.key_room * (call.channels + call.width + 2) + QUERIES * (2 * call.width + KEYS)
    # Each of the seven arrays begins with a cache line.
    call.size = whole_lines(numbers * sizeof(real)) + 7 * 64
    cdef bytearray scratch = room(threads * call.size + 64)
    call.scratch = <char*>whole_lines(<Py_ssize_t>of(scratch))
    with nogil:
        in_shares(<Share>some_forward[real], &call,
                  call.batch * call.heads * call.rows * blocks(call.queries, SPAN), threads)


def backward(
    const real[:, :, :, :, :] q,             # IN   as in forward, and so on
    const real[:, :, :, :, :] k,
    const real[:, :, :, :, :] v,
    const real[:, :, :, :] bias,
    const unsigned char[:, :, ::1] mask,
    double scale,
    double absent,
    const real[:, :, :, :, :] dout,          # IN   (B, N, Q, H, D), contiguous channels
    real[:, :, :, :, :] dq,                  # OUT  as q, or None, and so on
    real[:, :, :, :, :] dk,
    real[:, :, :, :, :] dv,
    real[:, :, :, ::1] dbias,
    real[:, :, :, :, ::1] sums,              # OUT  (B, H, parts, Q, K), for dbias
    int threads,
):
    """Pull cotangents back to all arrays, row by row."""
    cdef Call call
    cdef Py_ssize_t numbers
    set_call(&call, q, k, v, bias, mask, scale, absent)
    call.dout = edges_of(dout)
    call.dq, call.dk, call.dv = edges_of(dq), edges_of(dk), edges_of(dv)
    call.parts = sums.shape[2]
    if dbias is not None:
        call.dbias, call.sums = &dbias[0, 0, 0, 0], &sums[0, 0, 0, 0, 0]
    numbers = call.key_room * (2 * call.channels + 3 * call.width + 2)
    numbers += QUERIES * (3 * call.width + 2 * call.key_room)
    # Each of the twelve arrays begins with a cache line.
    call.size = whole_lines(numbers * sizeof(real)) + 12 * 64
    cdef bytearray scratch = room(threads * call.size + 64)
    call.scratch = <char*>whole_lines(<Py_ssize_t>of(scratch))
    with nogil:
        in_shares(<Share>some_backward[real], &call, call.batch * call.heads * call.parts, threads)
        if call.dbias != NULL:
            in_shares(<Share>some_sums[real], &call, call.batch * call.heads * call.queries, threads)
