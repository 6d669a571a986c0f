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
from cpukern.arrays cimport of, room, whole_lines

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
    /* Vectors side by side, for whose sums there are registers. */
    #define PARTS 2
    #define PASSED tile, step, keys, decay, key, u, next_key, next_query, known, read

    /* dot: the dot product of n numbers.
       turn: write a token into a tile of columns, and sum its rows times the next key and query, or
       do one of the two. Rows begin `step` numbers apart.
       advance: write a token into rows of the transposed state; `decayed`, if any, gets the rows before.
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
                if (reads) by_query[p] += next_query[i] * s; \\
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
        if (writes && reads) fusedops_pass_##real(1, 1, PASSED); \\
        else if (writes) fusedops_pass_##real(1, 0, PASSED); \\
        else fusedops_pass_##real(0, 1, PASSED); \\
    } \\
    INLINE void fusedops_advance_##real(real *state, Py_ssize_t rows, Py_ssize_t n, real decay, \\
            real beta, const real *key, const real *v, real *missed, real *u, real *decayed) { \\
        for (Py_ssize_t j = 0; j < rows; j++, state += n) { \\
            missed[j] = v[j] - decay * fusedops_dot_##real(state, key, n); \\
            u[j] = beta * missed[j]; \\
            for (Py_ssize_t i = 0; i < n; i += LANES(real)) { \\
                vector s = decay * *(vector *)(state + i); \\
                if (decayed) *(vector *)(decayed + j * n + i) = s; \\
                *(vector *)(state + i) = s + u[j] * *(const vector *)(key + i); \\
            } \\
        } \\
    } \\
    INLINE real fusedops_reverse_##real(real *dstate, const real *decayed, Py_ssize_t rows, \\
            Py_ssize_t n, real decay, real beta, real scale, const real *query, const real *key, \\
            const real *u, const real *missed, const real *dout, real *dv, real *dbeta, \\
            real *dquery, real *dkey) { \\
        real shared = 0; \\
        vector dgate = {0}; \\
        *dbeta = 0; \\
        for (Py_ssize_t j = 0; j < rows; j++) { \\
            real *row = dstate + j * n, factor = scale * dout[j]; \\
            vector total = {0}; \\
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
        for (Py_ssize_t i = 0; i < n; i += LANES(real)) { \\
            vector k = *(const vector *)(key + i), dq = shared * k, dk = {0}; \\
            for (Py_ssize_t j = 0; j < rows; j++) { \\
                vector s = *(const vector *)(decayed + j * n + i), *row = (vector *)(dstate + j * n + i); \\
                vector d = *row, e = d - dv[j] * k; \\
                *row = decay * e; \\
                dgate += s * e; \\
                dq += dout[j] * s; \\
                dk += u[j] * d; \\
                dk -= dv[j] * s; \\
            } \\
            *(vector *)(dquery + i) = scale * dq; \\
            *(vector *)(dkey + i) = dk; \\
        } \\
        return fusedops_sum_##real(dgate); \\
    }
    DEFINE(float, fusedops_floats)
    DEFINE(double, fusedops_doubles)
    """
    enum:
        BYTES
        PARTS
    Py_ssize_t lanes_float "LANES(float)"
    Py_ssize_t lanes_double "LANES(double)"
    float dot_float "fusedops_dot_float"(const float* x, const float* y, Py_ssize_t n) noexcept nogil
    double dot_double "fusedops_dot_double"(
        const double* x, const double* y, Py_ssize_t n) noexcept nogil
    void turn_float "fusedops_turn_float"(
        bint writes, bint reads, float* tile, Py_ssize_t step, Py_ssize_t keys, float decay,
        const float* key, const float* u, const float* next_key, const float* next_query,
        float* known, float* read) noexcept nogil
    void turn_double "fusedops_turn_double"(
        bint writes, bint reads, double* tile, Py_ssize_t step, Py_ssize_t keys, double decay,
        const double* key, const double* u, const double* next_key, const double* next_query,
        double* known, double* read) noexcept nogil
    void advance_float "fusedops_advance_float"(
        float* state, Py_ssize_t rows, Py_ssize_t n, float decay, float beta, const float* key,
        const float* v, float* missed, float* u, float* decayed) noexcept nogil
    void advance_double "fusedops_advance_double"(
        double* state, Py_ssize_t rows, Py_ssize_t n, double decay, double beta, const double* key,
        const double* v, double* missed, double* u, double* decayed) noexcept nogil
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
    Py_ssize_t rows
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


cdef inline Py_ssize_t within(Py_ssize_t value, Py_ssize_t low, Py_ssize_t high) noexcept nogil:
    return min(max(value, low), high)


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


cdef void forward_tile(
    const Call* call, Py_ssize_t sequence, Py_ssize_t slot, Py_ssize_t head, Py_ssize_t first,
    real* scratch,
) noexcept nogil:
    """Take the columns of a state from `first` on through all tokens of a sequence."""
    cdef Py_ssize_t width = PARTS * (lanes_float if real is float else lanes_double)
    cdef Py_ssize_t n = min(width, call.values - first), keys = call.keys
    cdef Py_ssize_t own = head // (call.value_heads // call.heads), t, l, following
    cdef Span span = find_span(call, sequence)
    cdef real* u = scratch
    cdef real* known = u + width
    cdef real* read = known + width
    cdef real* tile = read + width
    cdef Py_ssize_t step = width
    cdef real* q
    cdef real* k
    cdef real* v
    cdef real* out
    cdef real* next_q
    cdef real* next_k
    cdef real decay = 1, beta, both, scale = <real>call.scale
    cdef bint in_place = call.first.at == call.last.at and call.first.value == 1
    memset(scratch, 0, 3 * width * sizeof(real))
    # For one token a copy of the state would cost more than the token.
    in_place = in_place and call.last.at != NULL and n == width and span.end - span.begin == 1
    if in_place:
        tile = <real*>call.last.at + slot * call.last.sequence + head * call.last.head + first
        step = call.last.key
    else:
        memset(tile, 0, keys * width * sizeof(real))
        move_state(&call.first, slot, head, first, keys, n, tile, width, 1, True)
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
            both = dot_float(q, k, keys) if real is float else dot_double(q, k, keys)
            for l in range(n):
                u[l] = beta * (v[l] - decay * known[l])
            if call.out.at != NULL:
                out = row_of(&call.out, span.batch, t, head, decay) + first
                for l in range(n):
                    out[l] = scale * (decay * read[l] + both * u[l])
        # The first pass writes nothing, and the last one reads nothing.
        if real is float:
            turn_float(t >= span.begin, t + 1 < span.end, tile, step, keys, decay, k, u, next_k,
                       next_q, known, read)
        else:
            turn_double(t >= span.begin, t + 1 < span.end, tile, step, keys, decay, k, u, next_k,
                        next_q, known, read)
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


cdef inline void advance(
    const Call* call, Span span, Py_ssize_t t, Py_ssize_t head, Py_ssize_t own, Py_ssize_t first,
    Py_ssize_t rows, Py_ssize_t n, real* copy, real* state, real* missed, real* u, real* decayed,
) noexcept nogil:
    """Write a token into rows of the transposed state."""
    cdef real decay = <real>exp(row_of(&call.g, span.batch, t, head, state[0])[0])
    cdef real beta = row_of(&call.beta, span.batch, t, head, decay)[0]
    cdef const real* v = row_of(&call.v, span.batch, t, head, decay) + first
    cdef const real* k = padded(row_of(&call.k, span.batch, t, own, decay), call.keys, n, copy)
    if real is float:
        advance_float(state, rows, n, decay, beta, k, v, missed, u, decayed)
    else:
        advance_double(state, rows, n, decay, beta, k, v, missed, u, decayed)


cdef inline Py_ssize_t whole_vectors(Py_ssize_t keys, real like) noexcept nogil:
    cdef Py_ssize_t lanes = lanes_float if real is float else lanes_double
    return (keys + lanes - 1) // lanes * lanes


cdef inline Py_ssize_t backward_room(const Call* call, real like) noexcept nogil:
    """Return the numbers of scratch that `backward_rows` takes."""
    cdef Py_ssize_t n = whole_vectors(call.keys, like), chunk = call.chunk
    cdef Py_ssize_t chunks = (call.tokens + chunk - 1) // chunk
    return 4 * n + call.rows * (n * (2 + chunks + chunk) + 2 * chunk + 1)


cdef void backward_rows(
    const Call* call, Py_ssize_t sequence, Py_ssize_t head, Py_ssize_t first, real* scratch,
) noexcept nogil:
    """Pull back through the rows of the transposed state from `first` on."""
    cdef Py_ssize_t rows = min(call.rows, call.values - first), keys = call.keys
    cdef Py_ssize_t n = whole_vectors(keys, scratch[0]), chunk = call.chunk, tile = rows * n
    cdef Py_ssize_t group = call.value_heads // call.heads, own = head // group, c, i, t, begin, end
    cdef Span span = find_span(call, sequence)
    cdef Py_ssize_t chunks = (span.end - span.begin + chunk - 1) // chunk
    cdef bint begins = first == 0, begins_group = begins and head % group == 0
    cdef real* query_copy = scratch
    cdef real* key_copy = query_copy + n
    cdef real* dquery = key_copy + n
    cdef real* dkey = dquery + n
    cdef real* state = dkey + n
    cdef real* dstate = state + tile
    cdef real* kept = dstate + tile
    cdef real* decayed = kept + chunks * tile
    cdef real* u = decayed + chunk * tile
    cdef real* missed = u + chunk * rows
    cdef real* own_dv = missed + chunk * rows
    cdef real* dv
    cdef const real* q
    cdef const real* k
    cdef const real* dout
    cdef real decay, beta, dbeta, dg, scale = <real>call.scale
    memset(scratch, 0, (4 * n + 2 * tile) * sizeof(real))
    move_state(&call.first, sequence, head, first, keys, rows, state, 1, n, True)
    for c in range(chunks):
        memcpy(kept + c * tile, state, tile * sizeof(real))
        if c < chunks - 1:
            begin = span.begin + c * chunk
            for t in range(begin, begin + chunk):
                advance(call, span, t, head, own, first, rows, n, key_copy, state, missed, u,
                        <real*>NULL)
    move_state(&call.last, sequence, head, first, keys, rows, dstate, 1, n, True)
    for c in range(chunks - 1, -1, -1):
        begin = span.begin + c * chunk
        end = min(begin + chunk, span.end)
        memcpy(state, kept + c * tile, tile * sizeof(real))
        for t in range(begin, end):
            i = t - begin
            advance(call, span, t, head, own, first, rows, n, key_copy, state, missed + i * rows,
                    u + i * rows, decayed + i * tile)
        for t in range(end - 1, begin - 1, -1):
            i = t - begin
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
                    dstate, decayed + i * tile, rows, n, decay, beta, scale, q, k, u + i * rows,
                    missed + i * rows, dout, dv, &dbeta, dquery, dkey)
            else:
                dg = reverse_double(
                    dstate, decayed + i * tile, rows, n, decay, beta, scale, q, k, u + i * rows,
                    missed + i * rows, dout, dv, &dbeta, dquery, dkey)
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
    cdef Py_ssize_t width = PARTS * (lanes_float if real is float else lanes_double)
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
                first += call.rows


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
    cdef Py_ssize_t width = PARTS * (lanes_float if real is float else lanes_double)
    set_call(&call, q, k, v, g, beta, state, scale, starts)
    call.out, call.last = tokens_of(out), states_of(last)
    call.tiles = (call.values + width - 1) // width
    if slots is not None:
        call.slots = &slots[0]
        call.states = state.shape[0]
    call.row = whole_lines((call.keys + 3) * width * sizeof(real))
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
    Py_ssize_t rows,                 # IN   values that are taken together
    int threads,
):
    """Pull cotangents back, token by token."""
    cdef Call call
    cdef real like = 0
    set_call(&call, q, k, v, g, beta, state, scale, starts)
    call.out, call.last = tokens_of(dout), states_of(dlast)
    call.dq, call.dk, call.dv = tokens_of(dq), tokens_of(dk), tokens_of(dv)
    call.dg, call.dbeta, call.dfirst = tokens_of(dg), tokens_of(dbeta), states_of(dstate)
    call.chunk, call.rows = chunk, rows
    call.row = whole_lines(backward_room(&call, like) * sizeof(real))
    cdef bytearray scratch = room(threads * call.row)
    call.scratch = of(scratch)
    with nogil:
        in_shares(<Share>some_backward[real], &call, sequences * call.heads, threads)
