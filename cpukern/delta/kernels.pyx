# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The gated delta rule on the CPU, one token after the other.

The columns of a head's state (K, V) don't depend on each other. The forward takes a tile of columns,
which stays in the nearest cache, through all tokens of a sequence: one pass over the tile writes a
token, and reads what the next token's key and query find. The backward takes a tile of rows of the
transposed state, so that sums over values are sums of rows. It first keeps every C-th state; then, from
the last chunk of C tokens to the first, it computes the chunk's states again and goes back through its
tokens. A unit of the backward is a sequence and a head of q, whose gradients it alone adds to.
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
    #define SUM_float(x) ((x[0] + x[2]) + (x[1] + x[3]))
    #define SUM_double(x) (x[0] + x[1])
    #else
    #define INLINE static inline
    #define BYTES 16
    #define LANES(real) ((Py_ssize_t)1)
    #define VECTOR(real)
    #define PART(real) real
    #define SUM_float(x) x
    #define SUM_double(x) x
    #endif
    /* Vectors side by side, for whose sums there are registers: each reads a key once for all of them. */
    #define PARTS 4
    #define PASSED tile, step, keys, decay, key, u, next_key, next_query, known, read

    /* dot: the dot product of n numbers.
       turn: write a token into a tile of columns, and sum its rows times the next key (`reads` is 1), and
       times the next query, too (2), or do one of the two. Rows begin `step` numbers apart.
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
    INLINE void fusedops_pass_##real(int writes, int reads, real *tile, Py_ssize_t step, \\
            Py_ssize_t keys, real decay, const real *key, const real *u, const real *next_key, \\
            const real *next_query, real *known, real *read) { \\
        vector none = {0}, written[PARTS], by_key[PARTS], by_query[PARTS]; \\
        for (int p = 0; p < PARTS; p++) { \\
            written[p] = *(const vector *)(u + p * LANES(real)); \\
            by_key[p] = by_query[p] = none; \\
        } \\
        for (Py_ssize_t i = 0; i < keys; i++, tile += step) \\
            for (int p = 0; p < PARTS; p++) { \\
                vector *row = (vector *)(tile + p * LANES(real)), s = *row; \\
                if (writes) *row = s = decay * s + key[i] * written[p]; \\
                if (reads) by_key[p] += next_key[i] * s; \\
                if (reads > 1) by_query[p] += next_query[i] * s; \\
            } \\
        for (int p = 0; reads && p < PARTS; p++) { \\
            *(vector *)(known + p * LANES(real)) = by_key[p]; \\
            *(vector *)(read + p * LANES(real)) = by_query[p]; \\
        } \\
    } \\
    INLINE void fusedops_turn_##real(int writes, int reads, real *tile, Py_ssize_t step, \\
            Py_ssize_t keys, real decay, const real *key, const real *u, const real *next_key, \\
            const real *next_query, real *known, real *read) { \\
        /* The compiler makes a loop for each. */ \\
        if (writes && reads > 1) fusedops_pass_##real(1, 2, PASSED); \\
        else if (writes && reads) fusedops_pass_##real(1, 1, PASSED); \\
        else if (writes) fusedops_pass_##real(1, 0, PASSED); \\
        else fusedops_pass_##real(0, 2, PASSED); \\
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
    float dot_float "fusedops_dot_float"(const float* x, const float* y, Py_ssize_t n) noexcept nogil
    double dot_double "fusedops_dot_double"(
        const double* x, const double* y, Py_ssize_t n) noexcept nogil
    void turn_float "fusedops_turn_float"(
        bint writes, int reads, float* tile, Py_ssize_t step, Py_ssize_t keys, float decay,
        const float* key, const float* u, const float* next_key, const float* next_query,
        float* known, float* read) noexcept nogil
    void turn_double "fusedops_turn_double"(
        bint writes, int reads, double* tile, Py_ssize_t step, Py_ssize_t keys, double decay,
        const double* key, const double* u, const double* next_key, const double* next_query,
        double* known, double* read) noexcept nogil
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
    """Return the columns of a tile."""
    return PARTS * (lanes_float if real is float else lanes_double)


cdef inline void take_tokens(
    const Call* call, Span span, Py_ssize_t head, Py_ssize_t first, Py_ssize_t n, real* tile,
    Py_ssize_t step, real* known, real* u, real* missed, const Tokens* out, real* kept,
) noexcept nogil:
    """Take n columns of a state through all tokens of a sequence.

    Where `kept` is given, it gets the tile before every chunk, and every token has rows in u and
    missed. Otherwise `out` may be given.
    """
    cdef Py_ssize_t width = width_of(tile[0]), keys = call.keys, following, t, l
    cdef Py_ssize_t own = head // (call.value_heads // call.heads)
    cdef real* read = known + width
    cdef real* q
    cdef real* k
    cdef real* v
    cdef real* row
    cdef real* next_q
    cdef real* next_k
    cdef real decay = 1, beta, both, scale = <real>call.scale
    cdef int reads
    for t in range(span.begin - 1, span.end):
        following = min(t + 1, span.end - 1)
        if following < span.begin:
            break
        next_q = row_of(&call.q, span.batch, following, own, decay)
        next_k = row_of(&call.k, span.batch, following, own, decay)
        k = next_k
        if t >= span.begin:
            q = row_of(&call.q, span.batch, t, own, decay)
            k = row_of(&call.k, span.batch, t, own, decay)
            v = row_of(&call.v, span.batch, t, head, decay) + first
            decay = <real>exp(row_of(&call.g, span.batch, t, head, decay)[0])
            beta = row_of(&call.beta, span.batch, t, head, decay)[0]
            if kept != NULL and t > span.begin:
                u += width
                missed += width
            for l in range(n):
                missed[l] = v[l] - decay * known[l]
                u[l] = beta * missed[l]
            for l in range(n, width):
                u[l] = 0
            if out != NULL and out.at != NULL:
                both = dot_float(q, k, keys) if real is float else dot_double(q, k, keys)
                row = row_of(out, span.batch, t, head, decay) + first
                for l in range(n):
                    row[l] = scale * (decay * read[l] + both * u[l])
            if kept != NULL and (t - span.begin) % call.chunk == 0:
                memcpy(kept, tile, keys * width * sizeof(real))
                kept += keys * width
        # The first pass writes nothing, and the last one reads nothing.
        reads = 0 if t + 1 == span.end else 1 if kept != NULL and t >= span.begin else 2
        if real is float:
            turn_float(t >= span.begin, reads, tile, step, keys, decay, k, u, next_k, next_q, known,
                       read)
        else:
            turn_double(t >= span.begin, reads, tile, step, keys, decay, k, u, next_k, next_q,
                        known, read)


cdef void forward_tile(
    const Call* call, Py_ssize_t sequence, Py_ssize_t slot, Py_ssize_t head, Py_ssize_t first,
    real* scratch,
) noexcept nogil:
    """Take the columns of a state from `first` on through all tokens of a sequence."""
    cdef Py_ssize_t width = width_of(scratch[0]), step = width
    cdef Py_ssize_t n = min(width, call.values - first), keys = call.keys
    cdef Span span = find_span(call, sequence)
    cdef real* known = scratch
    cdef real* u = known + 2 * width
    cdef real* missed = u + width
    cdef real* tile = missed + width
    cdef bint in_place = call.first.at == call.last.at and call.first.value == 1
    memset(scratch, 0, 4 * width * sizeof(real))
    # For one token a copy of the state would cost more than the token.
    in_place = in_place and call.last.at != NULL and n == width and span.end - span.begin == 1
    if in_place:
        tile = <real*>call.last.at + slot * call.last.sequence + head * call.last.head + first
        step = call.last.key
    else:
        memset(tile, 0, keys * width * sizeof(real))
        move_state(&call.first, slot, head, first, keys, n, tile, width, 1, True)
    take_tokens(call, span, head, first, n, tile, step, known, u, missed, &call.out, <real*>NULL)
    if not in_place:
        move_state(&call.last, slot, head, first, keys, n, tile, width, 1, False)


cdef inline const real* padded(
    const real* row, Py_ssize_t keys, Py_ssize_t n, real* copy
) noexcept nogil:
    """Return a row of n numbers: the same, or a copy whose rest is zero."""
    if keys == n:
        return row
    memcpy(copy, row, keys * sizeof(real))
    return copy


cdef inline void add_row(
    real* total, const real* row, Py_ssize_t n, bint first
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        total[i] = row[i] if first else total[i] + row[i]


cdef inline Py_ssize_t padded_keys(Py_ssize_t keys, real like) noexcept nogil:
    cdef Py_ssize_t width = width_of(like)
    return (keys + width - 1) // width * width


cdef inline Py_ssize_t backward_room(const Call* call, real like) noexcept nogil:
    """Return the numbers of scratch that `backward_rows` takes."""
    cdef Py_ssize_t n = padded_keys(call.keys, like), width = width_of(like), chunk = call.chunk
    cdef Py_ssize_t chunks = (call.tokens + chunk - 1) // chunk
    return 4 * n + width * (3 + n * (2 + chunk) + call.keys * (1 + chunks) + 2 * call.tokens)


cdef void backward_rows(
    const Call* call, Py_ssize_t sequence, Py_ssize_t head, Py_ssize_t first, real* scratch,
) noexcept nogil:
    """Pull back through the rows of the transposed state from `first` on."""
    cdef Py_ssize_t width = width_of(scratch[0]), n = padded_keys(call.keys, scratch[0])
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
    cdef real* sums = dkey + n
    cdef real* own_dv = sums + 2 * width
    cdef real* state = own_dv + width
    cdef real* dstate = state + width * n
    cdef real* columns = dstate + width * n
    cdef real* kept = columns + keys * width
    cdef real* decayed = kept + chunks * keys * width
    cdef real* u = decayed + chunk * width * n
    cdef real* missed = u + tokens * width
    cdef real* dv
    cdef const real* q
    cdef const real* k
    cdef const real* dout
    cdef real decay, beta, dbeta, dg, scale = <real>call.scale
    memset(scratch, 0, (4 * n + width * (3 + 2 * n + keys)) * sizeof(real))
    move_state(&call.first, sequence, head, first, keys, rows, columns, width, 1, True)
    take_tokens(call, span, head, first, rows, columns, width, sums, u, missed, NULL, kept)
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
    cdef Py_ssize_t width = width_of(given[0])
    cdef Py_ssize_t item, sequence, slot, head, first, t
    cdef real* out
    for item in range(begin, end):
        sequence = item // (call.tiles * call.value_heads)
        head = item // call.tiles % call.value_heads
        first = item % call.tiles * width
        slot = sequence
        if call.slots != NULL:
            slot = call.slots[sequence]
            if slot < 0 or slot >= call.states:
                for t in range(call.tokens):
                    out = row_of(&call.out, sequence, t, head, given[0]) + first
                    memset(out, 0, min(width, call.values - first) * sizeof(real))
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
    """Read and write states, token by token."""
    cdef Call call
    cdef real like = 0
    cdef Py_ssize_t width = width_of(like)
    set_call(&call, q, k, v, g, beta, state, scale, starts)
    call.out, call.last = tokens_of(out), states_of(last)
    call.tiles = (call.values + width - 1) // width
    if slots is not None:
        call.slots = &slots[0]
        call.states = state.shape[0]
    call.row = whole_lines((call.keys + 4) * width * sizeof(real))
    cdef bytearray scratch = room(threads * call.row)
    call.scratch = of(scratch)
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
    cdef bytearray scratch = room(threads * call.row)
    call.scratch = of(scratch)
    with nogil:
        in_shares(<Share>some_backward[real], &call, sequences * call.heads, threads)
