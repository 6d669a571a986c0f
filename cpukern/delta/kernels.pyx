# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The gated delta rule on the CPU, two tokens at a time.

The columns of a head's state (K, V) don't depend on each other. The forward takes a tile of columns,
which stays in a near cache, through all tokens of a sequence: one pass over the tile writes a pair of
tokens, and reads what the next pair's keys and queries find. The second token of a pair follows from
the first by the products of their keys and queries. Decays go into a factor of the whole tile. The
backward takes a tile of rows of the transposed state, so that sums over values are sums of rows. It
first keeps every C-th state; then, from the last chunk of C tokens to the first, it computes the chunk's
states again and goes back through its tokens, one after the other. A unit of the backward is a sequence
and a head of q, whose gradients it alone adds to.
"""

from libc.math cimport exp
from libc.string cimport memcpy, memset

from cpukern._cpu cimport Share, in_shares
from cpukern.arrays cimport of, room, whole_lines, within

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define INLINE static inline __attribute__((always_inline))
    #if defined(__AVX512F__)
    #define BYTES 64
    #elif defined(__AVX__)
    #define BYTES 32
    #else
    #define BYTES 16
    #endif
    #define LANES(real) ((Py_ssize_t)(BYTES / sizeof(real)))
    #define VECTOR(real) __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias))
    typedef float fusedops_part_float __attribute__((vector_size(16), may_alias));
    typedef double fusedops_part_double __attribute__((vector_size(16), may_alias));
    #define PART(real) fusedops_part_##real
    #define fusedops_prefetch(at) __builtin_prefetch(at)
    #define SUM_float(x) ((x[0] + x[2]) + (x[1] + x[3]))
    #define SUM_double(x) (x[0] + x[1])
    #else
    #define INLINE static inline
    #define BYTES 16
    #define LANES(real) ((Py_ssize_t)1)
    #define VECTOR(real)
    #define PART(real) real
    #define fusedops_prefetch(at) ((void)(at))
    #define SUM_float(x) x
    #define SUM_double(x) x
    #endif
    /* Vectors side by side, for whose sums there are registers. */
    #define PARTS 4
    #define AT(real, row, i) (*(fusedops_##real##s *)((real *)(row) + (i)))
    #define PASSED tile, step, keys, columns, now, coming

    /* Two tokens, or one: their rows, and numbers with the names of `_Chunk` in fusedops/delta/op.py, of
       which `since` and `rest` take the tile's factor in. */
    typedef struct {
        void *q[2], *k[2], *v[2], *u[2], *missed[2], *out[2];
        double since[2], rest[2], beta[2], overlap, attention[2][2], scale;
    } fusedops_pair;

    /* dot: the dot product of n numbers.
       turn: write the pair `now` into a tile of columns if it `writes`, and find the values that `coming`
       misses and writes if it `reads`, with 2 its outputs too; a turn that doesn't write finds all. Only
       one that doesn't read lets the tile decay. Rows of the tile begin `step` numbers apart.
       advance: write a token into rows of the transposed state; `decayed` gets the rows before.
       reverse: pull a token's cotangents back through these rows, and return the cotangent of g. */
    #define DEFINE(real, vector) \\
    typedef real vector VECTOR(real); \\
    INLINE real fusedops_sum_##real(vector x) { \\
        PART(real) total = ((const PART(real) *)&x)[0]; \\
        for (int i = 1; i < BYTES / 16; i++) total += ((const PART(real) *)&x)[i]; \\
        return SUM_##real(total); \\
    } \\
    INLINE real fusedops_dot_##real(const real *x, const real *y, Py_ssize_t n) { \\
        vector total = {0}; \\
        Py_ssize_t i = 0; \\
        for (; i + LANES(real) <= n; i += LANES(real)) \\
            total += *(const vector *)(x + i) * *(const vector *)(y + i); \\
        real rest = fusedops_sum_##real(total); \\
        for (; i < n; i++) rest += x[i] * y[i]; \\
        return rest; \\
    } \\
    INLINE void fusedops_pass_##real(int tokens, int writes, int reads, real *tile, \\
            Py_ssize_t step, Py_ssize_t keys, Py_ssize_t columns, const fusedops_pair *now, \\
            const fusedops_pair *coming) { \\
        /* Two tokens have twice as many sums. */ \\
        const int parts = PARTS / tokens; \\
        const real decay = now->since[tokens - 1], overlap = coming->overlap; \\
        real *k[2], *to_k[2], *to_q[2], rest[2], since[2], across[2], beta[2], attention[2][2]; \\
        for (int t = 0; t < tokens; t++) { \\
            k[t] = now->k[t], to_k[t] = coming->k[t], to_q[t] = coming->q[t]; \\
            rest[t] = now->rest[t], since[t] = coming->since[t], beta[t] = coming->beta[t]; \\
            across[t] = coming->scale * coming->since[t]; \\
            for (int o = 0; o <= t; o++) attention[t][o] = coming->attention[t][o]; \\
        } \\
        for (Py_ssize_t c = 0; c < columns; c += parts * LANES(real)) { \\
            vector none = {0}, s[PARTS], u[2][PARTS], known[2][PARTS], read[2][PARTS]; \\
            for (int t = 0; t < tokens; t++) \\
                for (int p = 0; p < parts; p++) { \\
                    if (writes) u[t][p] = rest[t] * AT(real, now->u[t], c + p * LANES(real)); \\
                    known[t][p] = read[t][p] = none; \\
                } \\
            for (Py_ssize_t i = 0; i < keys; i++) { \\
                vector *row = &AT(real, tile, i * step + c); \\
                for (int p = 0; p < parts; p++) { \\
                    s[p] = row[p]; \\
                    if (!reads) s[p] *= decay; \\
                } \\
                for (int t = 0; writes && t < tokens; t++) \\
                    for (int p = 0; p < parts; p++) s[p] += k[t][i] * u[t][p]; \\
                for (int p = 0; writes && p < parts; p++) row[p] = s[p]; \\
                for (int t = 0; reads && t < tokens; t++) { \\
                    for (int p = 0; p < parts; p++) known[t][p] += to_k[t][i] * s[p]; \\
                    for (int p = 0; reads > 1 && p < parts; p++) read[t][p] += to_q[t][i] * s[p]; \\
                } \\
            } \\
            for (int t = 0; reads && t < tokens; t++) \\
                for (int p = 0; p < parts; p++) { \\
                    Py_ssize_t at = c + p * LANES(real); \\
                    vector missed = AT(real, coming->v[t], at) - since[t] * known[t][p], out; \\
                    if (t) missed -= overlap * u[0][p]; \\
                    AT(real, coming->missed[t], at) = missed; \\
                    AT(real, coming->u[t], at) = u[t][p] = beta[t] * missed; \\
                    if (reads > 1) { \\
                        out = across[t] * read[t][p] + attention[t][0] * u[0][p]; \\
                        if (t) out += attention[t][t] * u[t][p]; \\
                        AT(real, coming->out[t], at) = out; \\
                    } \\
                } \\
        } \\
    } \\
    INLINE void fusedops_turn_##real(int tokens, int writes, int reads, real *tile, \\
            Py_ssize_t step, Py_ssize_t keys, Py_ssize_t columns, const fusedops_pair *now, \\
            const fusedops_pair *coming) { \\
        /* The compiler makes a loop for each. */ \\
        if (tokens == 1 && writes) fusedops_pass_##real(1, 1, 0, PASSED); \\
        else if (tokens == 1) fusedops_pass_##real(1, 0, 2, PASSED); \\
        else if (!writes) fusedops_pass_##real(2, 0, 2, PASSED); \\
        else if (!reads) fusedops_pass_##real(2, 1, 0, PASSED); \\
        else if (reads == 1) fusedops_pass_##real(2, 1, 1, PASSED); \\
        else fusedops_pass_##real(2, 1, 2, PASSED); \\
    } \\
    INLINE void fusedops_advance_##real(real *state, real *decayed, Py_ssize_t rows, Py_ssize_t n, \\
            real decay, const real *key, const real *u) { \\
        for (Py_ssize_t j = 0; j < rows; j++) \\
            for (Py_ssize_t i = 0; i < n; i += LANES(real)) { \\
                vector s = decay * *(vector *)(state + j * n + i); \\
                *(vector *)(decayed + j * n + i) = s; \\
                *(vector *)(state + j * n + i) = s + u[j] * *(const vector *)(key + i); \\
            } \\
    } \\
    INLINE real fusedops_reverse_##real(real *dstate, const real *decayed, Py_ssize_t rows, \\
            Py_ssize_t n, real decay, real beta, real scale, const real *query, const real *key, \\
            const real *u, const real *missed, const real *dout, real *dv, real *dbeta, \\
            real *dquery, real *dkey) { \\
        real shared = 0; \\
        vector none = {0}, dgate[PARTS], k[PARTS], dq[PARTS], dk[PARTS]; \\
        *dbeta = 0; \\
        for (Py_ssize_t j = 0; j < rows; j++) { \\
            real *row = dstate + j * n, factor = scale * dout[j]; \\
            vector total = none; \\
            for (Py_ssize_t i = 0; i < n; i += LANES(real)) { \\
                vector d = *(vector *)(row + i) + factor * *(const vector *)(query + i); \\
                *(vector *)(row + i) = d; \\
                total += d * *(const vector *)(key + i); \\
            } \\
            real du = fusedops_sum_##real(total); \\
            dv[j] = beta * du; \\
            *dbeta += du * missed[j]; \\
            shared += u[j] * dout[j]; \\
        } \\
        for (int p = 0; p < PARTS; p++) dgate[p] = none; \\
        for (Py_ssize_t i = 0; i < n; i += PARTS * LANES(real)) { \\
            for (int p = 0; p < PARTS; p++) { \\
                k[p] = *(const vector *)(key + i + p * LANES(real)); \\
                dq[p] = shared * k[p]; \\
                dk[p] = none; \\
            } \\
            for (Py_ssize_t j = 0; j < rows; j++) \\
                for (int p = 0; p < PARTS; p++) { \\
                    Py_ssize_t at = j * n + i + p * LANES(real); \\
                    vector s = *(const vector *)(decayed + at), *row = (vector *)(dstate + at); \\
                    vector d = *row, e = d - dv[j] * k[p]; \\
                    *row = decay * e; \\
                    dgate[p] += s * e; \\
                    dq[p] += dout[j] * s; \\
                    dk[p] += u[j] * d; \\
                    dk[p] -= dv[j] * s; \\
                } \\
            for (int p = 0; p < PARTS; p++) { \\
                *(vector *)(dquery + i + p * LANES(real)) = scale * dq[p]; \\
                *(vector *)(dkey + i + p * LANES(real)) = dk[p]; \\
            } \\
        } \\
        for (int p = 1; p < PARTS; p++) dgate[0] += dgate[p]; \\
        return fusedops_sum_##real(dgate[0]); \\
    }
    DEFINE(float, fusedops_floats)
    DEFINE(double, fusedops_doubles)
    """
    enum:
        PARTS
    Py_ssize_t lanes_float "LANES(float)"
    Py_ssize_t lanes_double "LANES(double)"
    ctypedef struct Pair "fusedops_pair":
        void* q[2]
        void* k[2]
        void* v[2]
        void* u[2]
        void* missed[2]
        void* out[2]
        double since[2]
        double rest[2]
        double beta[2]
        double overlap
        double attention[2][2]
        double scale
    void prefetch "fusedops_prefetch"(const void* at) noexcept nogil
    float dot_float "fusedops_dot_float"(const float* x, const float* y, Py_ssize_t n) noexcept nogil
    double dot_double "fusedops_dot_double"(
        const double* x, const double* y, Py_ssize_t n) noexcept nogil
    void turn_float "fusedops_turn_float"(
        int tokens, bint writes, int reads, float* tile, Py_ssize_t step, Py_ssize_t keys,
        Py_ssize_t columns, const Pair* now, const Pair* coming) noexcept nogil
    void turn_double "fusedops_turn_double"(
        int tokens, bint writes, int reads, double* tile, Py_ssize_t step, Py_ssize_t keys,
        Py_ssize_t columns, const Pair* now, const Pair* coming) noexcept nogil
    void advance_float "fusedops_advance_float"(
        float* state, float* decayed, Py_ssize_t rows, Py_ssize_t n, float decay, const float* key,
        const float* u) noexcept nogil
    void advance_double "fusedops_advance_double"(
        double* state, double* decayed, Py_ssize_t rows, Py_ssize_t n, double decay,
        const double* key, const double* u) noexcept nogil
    float reverse_float "fusedops_reverse_float"(
        float* dstate, const float* decayed, Py_ssize_t rows, Py_ssize_t n, float decay, float beta,
        float scale, const float* query, const float* key, const float* u, const float* missed,
        const float* dout, float* dv, float* dbeta, float* dquery, float* dkey) noexcept nogil
    double reverse_double "fusedops_reverse_double"(
        double* dstate, const double* decayed, Py_ssize_t rows, Py_ssize_t n, double decay,
        double beta, double scale, const double* query, const double* key, const double* u,
        const double* missed, const double* dout, double* dv, double* dbeta, double* dquery,
        double* dkey) noexcept nogil

ctypedef fused real:
    float
    double

# Arrays by strides in elements; the last axis of tokens is contiguous. A missing array is NULL.
cdef struct Tokens:
    void* at
    Py_ssize_t batch
    Py_ssize_t token
    Py_ssize_t head

cdef struct States:
    void* at
    Py_ssize_t sequence
    Py_ssize_t head
    Py_ssize_t key
    Py_ssize_t value

cdef struct Call:
    Tokens q
    Tokens k
    Tokens v
    Tokens g
    Tokens beta
    Tokens out
    States first
    States last
    Tokens dq
    Tokens dk
    Tokens dv
    Tokens dg
    Tokens dbeta
    States dfirst
    Py_ssize_t tokens
    Py_ssize_t heads
    Py_ssize_t value_heads
    Py_ssize_t keys
    Py_ssize_t values
    Py_ssize_t columns
    Py_ssize_t tiles
    Py_ssize_t chunk
    Py_ssize_t states
    const long long* starts
    const long long* slots
    double scale
    char* scratch
    Py_ssize_t row

# The tokens of a sequence, in a row of the batch.
cdef struct Span:
    Py_ssize_t batch
    Py_ssize_t begin
    Py_ssize_t end


cdef inline Span find_span(const Call* call, Py_ssize_t sequence) noexcept nogil:
    cdef Span span
    span.batch = sequence
    span.begin = 0
    span.end = call.tokens
    if call.starts != NULL:
        # Clipped to the arrays, whatever `starts` holds.
        span.batch = 0
        span.begin = within(call.starts[sequence], 0, call.tokens)
        span.end = within(call.starts[sequence + 1], span.begin, call.tokens)
    return span


cdef inline real* row_of(
    const Tokens* x, Py_ssize_t batch, Py_ssize_t token, Py_ssize_t head, real like
) noexcept nogil:
    return <real*>x.at + batch * x.batch + token * x.token + head * x.head


cdef inline void move_state(
    const States* states, Py_ssize_t sequence, Py_ssize_t head, Py_ssize_t value, Py_ssize_t keys,
    Py_ssize_t values, real* tile, Py_ssize_t key_step, Py_ssize_t value_step, bint load,
) noexcept nogil:
    """Load a tile of a state, or store it; a missing state leaves the tile's zeros."""
    cdef Py_ssize_t i, j
    cdef real* row
    cdef real* own
    if states.at == NULL:
        return
    for i in range(keys):
        row = (<real*>states.at + sequence * states.sequence + head * states.head
               + i * states.key + value * states.value)
        own = tile + i * key_step
        if states.value == 1 and value_step == 1:
            memcpy(own if load else row, row if load else own, values * sizeof(real))
        else:
            for j in range(values):
                if load:
                    own[j * value_step] = row[j * states.value]
                else:
                    row[j * states.value] = own[j * value_step]


cdef inline Py_ssize_t width_of(real like) noexcept nogil:
    """Return the columns that one token passes over at once."""
    return PARTS * (lanes_float if real is float else lanes_double)


cdef inline real dot(const real* x, const real* y, Py_ssize_t n) noexcept nogil:
    if real is float:
        return dot_float(x, y, n)
    else:
        return dot_double(x, y, n)


cdef inline void prefetch_row(const real* row, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(0, n * <Py_ssize_t>sizeof(real), 64):
        prefetch(<const char*>row + i)


cdef inline Py_ssize_t whole(Py_ssize_t n, real like) noexcept nogil:
    """Round columns up to whole passes."""
    cdef Py_ssize_t width = width_of(like)
    return (n + width - 1) // width * width


cdef inline real* padded(real* row, Py_ssize_t keys, Py_ssize_t n, real* copy) noexcept nogil:
    """Return a row of n numbers: the same, or a copy whose rest is zero."""
    if keys == n:
        return row
    memcpy(copy, row, keys * sizeof(real))
    return copy


cdef inline void set_pair(
    Pair* pair, const Call* call, Span span, Py_ssize_t head, Py_ssize_t first, Py_ssize_t n,
    Py_ssize_t t, Py_ssize_t tokens, double factor, const Tokens* out, real* spare,
) noexcept nogil:
    """Describe columns `first` to `first + n` of the tokens from t on, one or two.

    At the end of a sequence the second one may be missing, and writes nothing.
    """
    cdef Py_ssize_t own = head // (call.value_heads // call.heads), keys = call.keys, m, o, at
    cdef Py_ssize_t width = whole(n, spare[0]), last = span.end - 1
    cdef double decay
    cdef real* q
    cdef real* k
    cdef real* v
    pair.scale = call.scale
    for m in range(tokens):
        at = min(t + m, last)
        q = row_of(&call.q, span.batch, at, own, spare[0])
        k = row_of(&call.k, span.batch, at, own, spare[0])
        v = row_of(&call.v, span.batch, at, head, spare[0]) + first
        pair.q[m], pair.k[m], pair.v[m] = q, k, padded(v, n, width, spare + m * width)
        pair.out[m] = spare + (2 + m) * width
        decay, pair.beta[m] = 1, 0
        if t + m <= last:
            decay = exp(row_of(&call.g, span.batch, at, head, spare[0])[0])
            pair.beta[m] = row_of(&call.beta, span.batch, at, head, spare[0])[0]
            if out != NULL and n == width:
                pair.out[m] = row_of(out, span.batch, at, head, spare[0]) + first
        factor *= decay
        pair.since[m], pair.rest[m] = factor, 1
        for o in range(m):
            pair.rest[o] = decay
            pair.overlap = decay * dot(k, <real*>pair.k[o], keys)
        for o in range(m + 1 if out != NULL else 0):
            pair.attention[m][o] = call.scale * dot(q, <real*>pair.k[o], keys) * pair.rest[o]
        # Rows of tokens lie far apart, where the processor doesn't prefetch by itself.
        at = t + tokens + m
        if at <= last:
            prefetch_row(row_of(&call.k, span.batch, at, own, spare[0]), keys)
            prefetch_row(row_of(&call.v, span.batch, at, head, spare[0]) + first, n)
            if out != NULL:
                prefetch_row(row_of(&call.q, span.batch, at, own, spare[0]), keys)
                prefetch_row(row_of(out, span.batch, at, head, spare[0]) + first, n)


cdef inline void take_tokens(
    const Call* call, Span span, Py_ssize_t head, Py_ssize_t first, Py_ssize_t n, real* tile,
    Py_ssize_t step, real* spare, real* u, real* missed, const Tokens* out, real* kept,
) noexcept nogil:
    """Take n columns of a state through all tokens of a sequence, two at once.

    Where `kept` is given, it gets the state before every chunk, and every token has rows in u and
    missed. Otherwise `out` may be given.
    """
    cdef Py_ssize_t width = whole(n, tile[0]), keys = call.keys, t = span.begin, m, i
    cdef Py_ssize_t tokens = min(2, span.end - span.begin)
    cdef Pair pairs[2]
    cdef Pair* now = pairs
    cdef Pair* coming = pairs + 1
    # The state is the tile times a factor, into which decays go.
    cdef double factor = 1
    cdef int reads
    memset(pairs, 0, sizeof(pairs))
    # The first turn writes nothing, and the last one reads nothing.
    while tokens and t < span.end + tokens:
        reads = 0 if t >= span.end else 1 if out == NULL else 2
        if t > span.begin:
            factor = now.since[tokens - 1] if reads else 1
            # The tile stays in the range of a float.
            if not 1e-10 < factor < 1e10:
                for i in range(keys * width):
                    tile[i] *= <real>factor
                factor = 1
            for m in range(tokens):
                now.rest[m] /= factor
        if reads:
            set_pair(coming, call, span, head, first, n, t, tokens, factor, out, spare)
            for m in range(tokens):
                coming.u[m], coming.missed[m] = u + m * width, missed + m * width
        if real is float:
            turn_float(tokens, t > span.begin, reads, tile, step, keys, width, now, coming)
        else:
            turn_double(tokens, t > span.begin, reads, tile, step, keys, width, now, coming)
        if out != NULL and n < width:
            for m in range(min(tokens, span.end - t)):
                memcpy(row_of(out, span.batch, t + m, head, tile[0]) + first, coming.out[m],
                       n * sizeof(real))
        if kept != NULL:
            if reads and (t - span.begin) % call.chunk == 0:
                for i in range(keys * width):
                    kept[i] = <real>factor * tile[i]
                kept += keys * width
            u += tokens * width
            missed += tokens * width
        now, coming = coming, now
        t += tokens


cdef void forward_tile(
    const Call* call, Py_ssize_t sequence, Py_ssize_t slot, Py_ssize_t head, Py_ssize_t first,
    real* scratch,
) noexcept nogil:
    """Take the columns of a state from `first` on through all tokens of a sequence."""
    cdef Py_ssize_t n = min(call.columns, call.values - first), keys = call.keys
    cdef Py_ssize_t width = whole(n, scratch[0]), step = width
    cdef Span span = find_span(call, sequence)
    cdef real* u = scratch + 4 * width
    cdef real* missed = u + 2 * width
    cdef real* tile = missed + 2 * width
    cdef const Tokens* out = NULL
    cdef bint in_place = call.first.at == call.last.at and call.first.value == 1
    memset(scratch, 0, 2 * width * sizeof(real))
    # For one token a copy of the state would cost more than the token.
    in_place = in_place and call.last.at != NULL and n == width and span.end - span.begin == 1
    if in_place:
        tile = <real*>call.last.at + slot * call.last.sequence + head * call.last.head + first
        step = call.last.key
    else:
        memset(tile, 0, keys * width * sizeof(real))
        move_state(&call.first, slot, head, first, keys, n, tile, width, 1, True)
    if call.out.at != NULL:
        out = &call.out
    take_tokens(call, span, head, first, n, tile, step, scratch, u, missed, out, <real*>NULL)
    if not in_place:
        move_state(&call.last, slot, head, first, keys, n, tile, width, 1, False)


cdef inline void add_row(
    real* total, const real* row, Py_ssize_t n, bint first
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        total[i] = row[i] if first else total[i] + row[i]


cdef inline Py_ssize_t backward_room(const Call* call, real like) noexcept nogil:
    """Return the numbers of scratch that `backward_rows` takes."""
    cdef Py_ssize_t n = whole(call.keys, like), width = width_of(like), chunk = call.chunk
    cdef Py_ssize_t chunks = (call.tokens + chunk - 1) // chunk
    return 4 * n + width * (7 + n * (2 + chunk) + call.keys * (1 + chunks) + 2 * call.tokens)


cdef void backward_rows(
    const Call* call, Py_ssize_t sequence, Py_ssize_t head, Py_ssize_t first, real* scratch,
) noexcept nogil:
    """Pull back through the rows of the transposed state from `first` on."""
    cdef Py_ssize_t width = width_of(scratch[0]), n = whole(call.keys, scratch[0])
    cdef Py_ssize_t rows = min(width, call.values - first), keys = call.keys, chunk = call.chunk
    cdef Py_ssize_t group = call.value_heads // call.heads, own = head // group
    cdef Py_ssize_t c, i, j, t, begin, end, tile = rows * n
    cdef Span span = find_span(call, sequence)
    cdef Py_ssize_t tokens = span.end - span.begin, chunks = (tokens + chunk - 1) // chunk
    cdef bint begins = first == 0, begins_group = begins and head % group == 0
    cdef real* query_copy = scratch
    cdef real* key_copy = query_copy + n
    cdef real* dquery = key_copy + n
    cdef real* dkey = dquery + n
    cdef real* spare = dkey + n
    cdef real* own_dv = spare + 4 * width
    cdef real* state = own_dv + width
    cdef real* dstate = state + width * n
    cdef real* columns = dstate + width * n
    cdef real* kept = columns + keys * width
    cdef real* decayed = kept + chunks * keys * width
    cdef real* u = decayed + chunk * width * n
    # The last pair has two rows, even if its second token is missing.
    cdef real* missed = u + (tokens + 1) * width
    cdef real* dv
    cdef const real* q
    cdef const real* k
    cdef const real* dout
    cdef real decay, beta, dbeta, dg, scale = <real>call.scale
    memset(scratch, 0, (4 * n + width * (5 + 2 * n + keys)) * sizeof(real))
    move_state(&call.first, sequence, head, first, keys, rows, columns, width, 1, True)
    take_tokens(call, span, head, first, rows, columns, width, spare, u, missed, NULL, kept)
    move_state(&call.last, sequence, head, first, keys, rows, dstate, 1, n, True)
    for c in range(chunks - 1, -1, -1):
        begin = span.begin + c * chunk
        end = min(begin + chunk, span.end)
        for i in range(keys):
            for j in range(rows):
                state[j * n + i] = kept[(c * keys + i) * width + j]
        for t in range(begin, end):
            decay = <real>exp(row_of(&call.g, span.batch, t, head, scale)[0])
            k = padded(row_of(&call.k, span.batch, t, own, scale), keys, n, key_copy)
            i = t - span.begin
            if real is float:
                advance_float(state, decayed + (t - begin) * tile, rows, n, decay, k, u + i * width)
            else:
                advance_double(state, decayed + (t - begin) * tile, rows, n, decay, k, u + i * width)
        for t in range(end - 1, begin - 1, -1):
            i = t - span.begin
            decay = <real>exp(row_of(&call.g, span.batch, t, head, scale)[0])
            beta = row_of(&call.beta, span.batch, t, head, scale)[0]
            q = padded(row_of(&call.q, span.batch, t, own, scale), keys, n, query_copy)
            k = padded(row_of(&call.k, span.batch, t, own, scale), keys, n, key_copy)
            dout = row_of(&call.out, span.batch, t, head, scale) + first
            dv = own_dv
            if call.dv.at != NULL:
                dv = row_of(&call.dv, span.batch, t, head, scale) + first
            if real is float:
                dg = reverse_float(
                    dstate, decayed + (t - begin) * tile, rows, n, decay, beta, scale, q, k,
                    u + i * width, missed + i * width, dout, dv, &dbeta, dquery, dkey)
            else:
                dg = reverse_double(
                    dstate, decayed + (t - begin) * tile, rows, n, decay, beta, scale, q, k,
                    u + i * width, missed + i * width, dout, dv, &dbeta, dquery, dkey)
            if call.dq.at != NULL:
                add_row(row_of(&call.dq, span.batch, t, own, scale), dquery, keys, begins_group)
            if call.dk.at != NULL:
                add_row(row_of(&call.dk, span.batch, t, own, scale), dkey, keys, begins_group)
            if call.dg.at != NULL:
                add_row(row_of(&call.dg, span.batch, t, head, scale), &dg, 1, begins)
            if call.dbeta.at != NULL:
                add_row(row_of(&call.dbeta, span.batch, t, head, scale), &dbeta, 1, begins)
    move_state(&call.dfirst, sequence, head, first, keys, rows, dstate, 1, n, False)


cdef void some_forward(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    """Take tiles of columns through their sequences."""
    cdef const Call* call = <const Call*>given
    cdef Py_ssize_t item, sequence, slot, head, first, t
    cdef real* out
    for item in range(begin, end):
        sequence = item // (call.tiles * call.value_heads)
        head = item // call.tiles % call.value_heads
        first = item % call.tiles * call.columns
        slot = sequence
        if call.slots != NULL:
            slot = call.slots[sequence]
            if slot < 0 or slot >= call.states:
                for t in range(call.tokens):
                    out = row_of(&call.out, sequence, t, head, given[0]) + first
                    memset(out, 0, min(call.columns, call.values - first) * sizeof(real))
                continue
        forward_tile(call, sequence, slot, head, first, <real*>(call.scratch + thread * call.row))


cdef void some_backward(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    """Pull back through sequences, with the heads of v that share a head of q."""
    cdef const Call* call = <const Call*>given
    cdef Py_ssize_t group = call.value_heads // call.heads, item, head, first
    for item in range(begin, end):
        for head in range(item % call.heads * group, (item % call.heads + 1) * group):
            first = 0
            while first < call.values:
                backward_rows(call, item // call.heads, head, first,
                              <real*>(call.scratch + thread * call.row))
                first += width_of(given[0])


cdef Tokens tokens_of(const real[:, :, :, :] x) noexcept:
    cdef Tokens found
    memset(&found, 0, sizeof(found))
    if x is not None:
        found.at = <void*>&x[0, 0, 0, 0]
        found.batch = x.strides[0] // <Py_ssize_t>sizeof(real)
        found.token = x.strides[1] // <Py_ssize_t>sizeof(real)
        found.head = x.strides[2] // <Py_ssize_t>sizeof(real)
    return found


cdef States states_of(const real[:, :, :, :] x) noexcept:
    cdef States found
    memset(&found, 0, sizeof(found))
    if x is not None:
        found.at = <void*>&x[0, 0, 0, 0]
        found.sequence = x.strides[0] // <Py_ssize_t>sizeof(real)
        found.head = x.strides[1] // <Py_ssize_t>sizeof(real)
        found.key = x.strides[2] // <Py_ssize_t>sizeof(real)
        found.value = x.strides[3] // <Py_ssize_t>sizeof(real)
    return found


cdef void set_call(
    Call* call, const real[:, :, :, :] q, const real[:, :, :, :] k, const real[:, :, :, :] v,
    const real[:, :, :, :] g, const real[:, :, :, :] beta, const real[:, :, :, :] state,
    double scale, const long long[::1] starts,
) noexcept:
    memset(call, 0, sizeof(Call))
    call.q, call.k, call.v = tokens_of(q), tokens_of(k), tokens_of(v)
    call.g, call.beta = tokens_of(g), tokens_of(beta)
    call.first = states_of(state)
    call.tokens, call.heads, call.keys = q.shape[1], q.shape[2], q.shape[3]
    call.value_heads, call.values = v.shape[2], v.shape[3]
    call.scale = scale
    if starts is not None:
        call.starts = &starts[0]


def forward(
    const real[:, :, :, :] q,        # IN   (B, T, H, K), contiguous keys
    const real[:, :, :, :] k,        # IN   (B, T, H, K), contiguous keys
    const real[:, :, :, :] v,        # IN   (B, T, HV, V), contiguous values
    const real[:, :, :, :] g,        # IN   (B, T, HV, 1)
    const real[:, :, :, :] beta,     # IN   (B, T, HV, 1)
    const real[:, :, :, :] state,    # IN   (S, HV, K, V), any strides, or None
    double scale,
    const long long[::1] starts,     # IN   (S + 1,), or None
    const long long[::1] slots,      # IN   (B,), or None
    real[:, :, :, :] out,            # OUT  (B, T, HV, V), or None
    real[:, :, :, :] last,           # OUT  (S, HV, K, V), or None; `state` itself in a step
    Py_ssize_t sequences,
    int threads,
):
    """Read and write states, a pair of tokens after the other."""
    cdef Call call
    set_call(&call, q, k, v, g, beta, state, scale, starts)
    call.out, call.last = tokens_of(out), states_of(last)
    # More columns to a pair of tokens cost less for each, and tiles still stay in the second cache.
    call.columns = 512 // <Py_ssize_t>sizeof(real)
    call.tiles = (call.values + call.columns - 1) // call.columns
    if slots is not None:
        call.slots = &slots[0]
        call.states = state.shape[0]
    call.row = whole_lines((call.keys + 8) * call.columns * sizeof(real))
    cdef bytearray scratch = room(threads * call.row + 64)
    call.scratch = <char*>whole_lines(<Py_ssize_t>of(scratch))
    with nogil:
        in_shares(<Share>some_forward[real], &call, sequences * call.value_heads * call.tiles,
                  threads)


def backward(
    const real[:, :, :, :] q,        # IN   (B, T, H, K), contiguous keys
    const real[:, :, :, :] k,        # IN   (B, T, H, K), contiguous keys
    const real[:, :, :, :] v,        # IN   (B, T, HV, V), contiguous values
    const real[:, :, :, :] g,        # IN   (B, T, HV, 1)
    const real[:, :, :, :] beta,     # IN   (B, T, HV, 1)
    const real[:, :, :, :] state,    # IN   (S, HV, K, V), any strides, or None
    double scale,
    const long long[::1] starts,     # IN   (S + 1,), or None
    const real[:, :, :, :] dout,     # IN   (B, T, HV, V), contiguous values
    const real[:, :, :, :] dlast,    # IN   (S, HV, K, V), any strides, or None
    real[:, :, :, :] dq,             # OUT  as q, or None, and so on
    real[:, :, :, :] dk,
    real[:, :, :, :] dv,
    real[:, :, :, :] dg,
    real[:, :, :, :] dbeta,
    real[:, :, :, :] dstate,
    Py_ssize_t sequences,
    Py_ssize_t chunk,                # IN   tokens between states that are kept
    int threads,
):
    """Pull cotangents back, token by token."""
    cdef Call call
    cdef real like = 0
    set_call(&call, q, k, v, g, beta, state, scale, starts)
    call.out, call.last = tokens_of(dout), states_of(dlast)
    call.dq, call.dk, call.dv = tokens_of(dq), tokens_of(dk), tokens_of(dv)
    call.dg, call.dbeta, call.dfirst = tokens_of(dg), tokens_of(dbeta), states_of(dstate)
    call.chunk = chunk
    call.row = whole_lines(backward_room(&call, like) * sizeof(real))
    cdef bytearray scratch = room(threads * call.row + 64)
    call.scratch = <char*>whole_lines(<Py_ssize_t>of(scratch))
    with nogil:
        in_shares(<Share>some_backward[real], &call, sequences * call.heads, threads)
