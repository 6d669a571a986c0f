# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Dynamic causal convolution on the CPU, a chunk of one sequence's tokens at a time.

The inputs that a token's taps read lie in a ring of rows, one for each position, that stays in the
nearest cache; the backward has a second ring for the inputs' cotangents. Every row of memory is read
once and written once, except that the backward reads the W - 1 tokens after a chunk again. A chunk
owns its tokens' rows. Tokens whose channels don't lie side by side, as in arrays (B, D, T), are first
transposed into a tile in cache, a chunk at a time. Sums over tokens have a float64 partial sum for each
group of chunks, added in order, so the thread count changes no bit. bfloat16 arrives as its bits, and is
computed in float32.
"""

from libc.float cimport DBL_MAX, FLT_MAX
from libc.string cimport memcpy, memset

from cpukern._cpu cimport Share, in_shares
from cpukern.arrays cimport of, room, whole_lines, within
from cpukern.vectors cimport exponential, real

cdef extern from *:
    """
    #if defined(__AVX512BW__) && defined(__GNUC__) && !defined(__clang__)
    #define TRANSPOSES 1
    /* Transpose N rows of N numbers, 64 bytes each: interleave rows i and i + N / 2, log2(N) times. */
    #define TRANSPOSE(NAME, NUMBER, INTEGER, N)                                                     \\
        typedef NUMBER NAME##_row __attribute__((vector_size(64), aligned(2), may_alias));          \\
        typedef INTEGER NAME##_order __attribute__((vector_size(64)));                              \\
        static inline void NAME(                                                                    \\
            const NUMBER *source, Py_ssize_t step, NUMBER *target, Py_ssize_t row                   \\
        ) {                                                                                         \\
            NAME##_row rows[N], next[N];                                                            \\
            NAME##_order low, high;                                                                 \\
            _Pragma("GCC unroll 32")                                                                \\
            for (int i = 0; i < N; i++) {                                                           \\
                low[i] = i / 2 + i % 2 * N;                                                         \\
                high[i] = low[i] + N / 2;                                                           \\
                rows[i] = *(const NAME##_row *)(source + i * step);                                 \\
            }                                                                                       \\
            _Pragma("GCC unroll 8")                                                                 \\
            for (int passed = 1; passed < N; passed *= 2) {                                         \\
                _Pragma("GCC unroll 16")                                                            \\
                for (int i = 0; i < N / 2; i++) {                                                   \\
                    next[2 * i] = __builtin_shuffle(rows[i], rows[i + N / 2], low);                 \\
                    next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + N / 2], high);            \\
                }                                                                                   \\
                _Pragma("GCC unroll 32")                                                            \\
                for (int i = 0; i < N; i++) rows[i] = next[i];                                      \\
            }                                                                                       \\
            _Pragma("GCC unroll 32")                                                                \\
            for (int i = 0; i < N; i++) *(NAME##_row *)(target + i * row) = rows[i];                \\
        }
    TRANSPOSE(transpose_bits, unsigned short, short, 32)
    TRANSPOSE(transpose_singles, float, int, 16)
    #else
    #define TRANSPOSES 0
    #define transpose_bits(source, step, target, row)
    #define transpose_singles(source, step, target, row)
    #endif
    """
    bint TRANSPOSES
    void transpose_bits(
        const unsigned short* source, Py_ssize_t step, unsigned short* target, Py_ssize_t row
    ) noexcept nogil
    void transpose_singles(
        const float* source, Py_ssize_t step, float* target, Py_ssize_t row) noexcept nogil

cdef enum:
    BLOCK = 64

ctypedef unsigned short bfloat16

# The types of arrays, and the types that kernels compute in.
ctypedef fused scalar:
    bfloat16
    float
    double

# Strides are in elements; `c` stands for the cotangent, or forward for the residual.
cdef struct Layout:
    Py_ssize_t tokens
    Py_ssize_t channels
    Py_ssize_t width
    Py_ssize_t ring_mask
    Py_ssize_t chunk
    Py_ssize_t chunks_per_sequence
    Py_ssize_t sequences
    const long long* chunks
    const long long* starts
    Py_ssize_t x_batch
    Py_ssize_t x_token
    Py_ssize_t x_channel
    Py_ssize_t k_batch
    Py_ssize_t k_token
    Py_ssize_t c_batch
    Py_ssize_t c_token
    Py_ssize_t c_channel
    bint static_kernels
    bint silu

# Tokens `first` to `last` of a sequence, which has the tokens `begin` to `end` of a row of the batch.
cdef struct Chunk:
    Py_ssize_t sequence
    Py_ssize_t batch
    Py_ssize_t begin
    Py_ssize_t end
    Py_ssize_t first
    Py_ssize_t last


cdef inline Chunk find_chunk(const Layout* layout, Py_ssize_t c) noexcept nogil:
    cdef Chunk found
    if layout.chunks != NULL:
        # Clip the chunk to the arrays, whatever `chunks` and `starts` hold.
        found.sequence = within(layout.chunks[2 * c], 0, layout.sequences - 1)
        found.batch = 0
        found.begin = within(layout.starts[found.sequence], 0, layout.tokens)
        found.end = within(layout.starts[found.sequence + 1], found.begin, layout.tokens)
        found.first = within(layout.chunks[2 * c + 1], found.begin, found.end)
    else:
        found.sequence = found.batch = c // layout.chunks_per_sequence
        found.begin = 0
        found.end = layout.tokens
        found.first = layout.chunk * (c % layout.chunks_per_sequence)
    found.last = min(found.first + layout.chunk, found.end)
    return found


cdef inline float from_bits(bfloat16 value) noexcept nogil:
    cdef unsigned int bits = <unsigned int>value << 16
    cdef float single
    memcpy(&single, &bits, 4)
    return single


cdef inline bfloat16 to_bits(float value) noexcept nogil:
    """Round to nearest, ties to even; every NaN becomes a quiet one."""
    cdef unsigned int bits
    memcpy(&bits, &value, 4)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return <bfloat16>(bits if value == value else 0x7FC0)


cdef inline void widen(
    const scalar* source, Py_ssize_t step, real* target, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t d
    for d in range(n):
        if scalar is bfloat16:
            target[d] = from_bits(source[d * step])
        else:
            target[d] = <real>source[d * step]


cdef inline void narrow(
    const real* source, scalar* target, Py_ssize_t step, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t d
    for d in range(n):
        if scalar is bfloat16:
            target[d * step] = to_bits(<float>source[d])
        else:
            target[d * step] = <scalar>source[d]


cdef inline void convolve(
    const real* k, const real* ring, Py_ssize_t at, Py_ssize_t mask, Py_ssize_t channels,
    Py_ssize_t width, real* h,
) noexcept nogil:
    """h[d] = Σ_w k[d, w] ring[at + w, d]; inlining with a constant width unrolls the loop."""
    cdef real total
    cdef Py_ssize_t d, w
    for d in range(channels):
        total = 0
        for w in range(width):
            total = total + k[d * width + w] * ring[((at + w) & mask) * channels + d]
        h[d] = total


cdef void convolve_row(
    const real* k, const real* ring, Py_ssize_t at, Py_ssize_t mask, Py_ssize_t channels,
    Py_ssize_t width, real* h,
) noexcept nogil:
    cdef Py_ssize_t d, w, low, n
    cdef const real* inputs
    cdef const real* taps
    cdef real[BLOCK] total
    if width == 1:
        convolve(k, ring, at, mask, channels, 1, h)
    elif width == 2:
        convolve(k, ring, at, mask, channels, 2, h)
    elif width == 3:
        convolve(k, ring, at, mask, channels, 3, h)
    elif width == 4:
        convolve(k, ring, at, mask, channels, 4, h)
    else:
        low = 0
        while low < channels:
            n = min(<Py_ssize_t>BLOCK, channels - low)
            for d in range(n):
                total[d] = 0
            for w in range(width):
                inputs = ring + ((at + w) & mask) * channels + low
                taps = k + low * width + w
                for d in range(n):
                    total[d] += taps[d * width] * inputs[d]
            for d in range(n):
                h[low + d] = total[d]
            low += BLOCK


cdef inline void pull_inputs(
    const real* k, const real* v, Py_ssize_t at, Py_ssize_t mask, Py_ssize_t channels,
    Py_ssize_t width, real* ring,
) noexcept nogil:
    """ring[at + w, d] += v[d] k[d, w] for at most four taps; the last tap's row is new.

    The taps are copied to a local array first: in a single loop no compiler sees that the rows are
    separate memory.
    """
    cdef real[4 * BLOCK] taps
    cdef Py_ssize_t low = 0, d, w, n
    cdef real* row
    while low < channels:
        n = min(<Py_ssize_t>BLOCK, channels - low)
        for d in range(n):
            for w in range(width):
                taps[w * BLOCK + d] = k[(low + d) * width + w]
        for w in range(width):
            row = ring + ((at + w) & mask) * channels + low
            if w < width - 1:
                for d in range(n):
                    row[d] += v[low + d] * taps[w * BLOCK + d]
            else:
                for d in range(n):
                    row[d] = v[low + d] * taps[w * BLOCK + d]
        low += BLOCK


cdef void pull_inputs_row(
    const real* k, const real* v, Py_ssize_t at, Py_ssize_t mask, Py_ssize_t channels,
    Py_ssize_t width, real* ring,
) noexcept nogil:
    cdef Py_ssize_t d, w
    cdef real* row
    if width == 1:
        pull_inputs(k, v, at, mask, channels, 1, ring)
    elif width == 2:
        pull_inputs(k, v, at, mask, channels, 2, ring)
    elif width == 3:
        pull_inputs(k, v, at, mask, channels, 3, ring)
    elif width == 4:
        pull_inputs(k, v, at, mask, channels, 4, ring)
    else:
        for w in range(width - 1):
            row = ring + ((at + w) & mask) * channels
            for d in range(channels):
                row[d] += v[d] * k[d * width + w]
        row = ring + ((at + width - 1) & mask) * channels
        for d in range(channels):
            row[d] = v[d] * k[d * width + width - 1]


cdef inline void pull_kernels(
    const real* v, const real* ring, Py_ssize_t at, Py_ssize_t mask, Py_ssize_t channels,
    Py_ssize_t width, real* dk,
) noexcept nogil:
    """dk[d, w] = v[d] ring[at + w, d]"""
    cdef Py_ssize_t d, w
    for d in range(channels):
        for w in range(width):
            dk[d * width + w] = v[d] * ring[((at + w) & mask) * channels + d]


cdef void pull_kernels_row(
    const real* v, const real* ring, Py_ssize_t at, Py_ssize_t mask, Py_ssize_t channels,
    Py_ssize_t width, real* dk,
) noexcept nogil:
    if width == 1:
        pull_kernels(v, ring, at, mask, channels, 1, dk)
    elif width == 2:
        pull_kernels(v, ring, at, mask, channels, 2, dk)
    elif width == 3:
        pull_kernels(v, ring, at, mask, channels, 3, dk)
    elif width == 4:
        pull_kernels(v, ring, at, mask, channels, 4, dk)
    else:
        pull_kernels(v, ring, at, mask, channels, width, dk)


cdef const scalar* in_tile(
    const scalar* rows, Py_ssize_t token, Py_ssize_t channel, Py_ssize_t first, Py_ssize_t last,
    Py_ssize_t channels, char* tile,
) noexcept nogil:
    """Return where token 0 would lie, once tokens `first` to `last` lie in a tile, side by side."""
    # Tokens and channels that are transposed together, a line of cache each.
    cdef Py_ssize_t square = 64 // sizeof(scalar)
    cdef Py_ssize_t low = 0, high, t, d, i, stop
    cdef scalar* target = <scalar*>tile - first * channels
    cdef bint full
    while low < channels:
        high = min(low + square, channels)
        t = first
        while t < last:
            # Squares begin where lines of memory do, if rows do.
            stop = min(t + square - t % square, last)
            full = TRANSPOSES and token == 1 and stop - t == square and high - low == square
            if scalar is float:
                if full:
                    transpose_singles(
                        rows + low * channel + t, channel, target + t * channels + low, channels)
            elif scalar is bfloat16:
                if full:
                    transpose_bits(
                        rows + low * channel + t, channel, target + t * channels + low, channels)
            else:
                full = False
            if not full:
                for i in range(t, stop):
                    for d in range(low, high):
                        target[i * channels + d] = rows[d * channel + i * token]
            t = stop
        low = high
    return target


cdef inline void load_input(
    const Layout* layout, const Chunk* chunk, const scalar* x, const scalar* state, Py_ssize_t p,
    real* ring,
) noexcept nogil:
    """Put the input at position p into its row: a token, or the state before the first token."""
    cdef Py_ssize_t d, channels = layout.channels
    cdef real* row = ring + ((p - chunk.begin + layout.width) & layout.ring_mask) * channels
    if p >= chunk.begin:
        widen(x + chunk.batch * layout.x_batch + p * layout.x_token, 1, row, channels)
    elif state == NULL:
        for d in range(channels):
            row[d] = 0
    else:
        state = state + chunk.sequence * channels * layout.width + layout.width + p - chunk.begin
        widen(state, layout.width, row, channels)


cdef inline void preactivation(
    const real* k, const real* ring, Py_ssize_t at, Py_ssize_t mask, Py_ssize_t channels,
    Py_ssize_t width, const real* bias, real* h,
) noexcept nogil:
    cdef Py_ssize_t d
    convolve_row(k, ring, at, mask, channels, width, h)
    if bias != NULL:
        for d in range(channels):
            h[d] += bias[d]


cdef inline real largest(real like) noexcept nogil:
    return <real>FLT_MAX if real is float else <real>DBL_MAX


cdef inline void activate(real* h, Py_ssize_t channels) noexcept nogil:
    """Replace h by h σ(h): by 0 where h has overflowed to -∞."""
    cdef real bound = largest(<real>0)
    cdef Py_ssize_t d
    for d in range(channels):
        h[d] = (-bound if h[d] < -bound else h[d]) / (<real>1.0 + exponential(-h[d]))


cdef inline void pull_activation(real* v, real* h, Py_ssize_t channels) noexcept nogil:
    """Multiply v by the derivative of h σ(h): by its limits where h has overflowed."""
    cdef real bound = largest(<real>0), s
    cdef Py_ssize_t d
    for d in range(channels):
        s = <real>1.0 / (<real>1.0 + exponential(-h[d]))
        h[d] = -bound if h[d] < -bound else bound if h[d] > bound else h[d]
        v[d] *= s * (<real>1.0 + h[d] * (<real>1.0 - s))


cdef void forward_chunk(
    const Layout* layout, Chunk chunk, const scalar* x, const scalar* kernels, const scalar* state,
    const scalar* bias, const scalar* residual, scalar* out, scalar* final_state, real* scratch,
    char* tiles,
) noexcept nogil:
    cdef Py_ssize_t channels = layout.channels, width = layout.width, mask = layout.ring_mask
    cdef Py_ssize_t t, w, p, d
    cdef Layout tiled = layout[0]
    cdef real* ring = scratch
    cdef real* h = ring + (mask + 1) * channels
    cdef real* wide_bias = h + channels
    cdef real* added = wide_bias + channels
    cdef real* wide = added + channels
    cdef const real* k = wide
    cdef const scalar* source
    if layout.x_channel != 1:
        x = in_tile(x + chunk.batch * layout.x_batch, layout.x_token, layout.x_channel,
                    max(chunk.first - width + 1, chunk.begin), chunk.last, channels, tiles)
        tiles += (layout.chunk + 2 * width) * channels * <Py_ssize_t>sizeof(scalar)
        tiled.x_batch = 0
        tiled.x_token = channels
    if layout.c_channel != 1:
        residual = in_tile(
            residual + chunk.batch * layout.c_batch, layout.c_token, layout.c_channel, chunk.first,
            chunk.last, channels, tiles)
        tiled.c_batch = 0
        tiled.c_token = channels
    layout = &tiled
    for p in range(chunk.first - width + 1, chunk.first):
        load_input(layout, &chunk, x, state, p, ring)
    if layout.static_kernels:
        widen(kernels, 1, wide, channels * width)
    if bias != NULL:
        widen(bias, 1, wide_bias, channels)
    for t in range(chunk.first, chunk.last):
        load_input(layout, &chunk, x, state, t, ring)
        if out == NULL:
            continue
        if not layout.static_kernels:
            source = kernels + chunk.batch * layout.k_batch + t * layout.k_token
            if scalar is real:
                k = source
            else:
                widen(source, 1, wide, channels * width)
        preactivation(k, ring, t - chunk.begin + 1, mask, channels, width,
                      wide_bias if bias != NULL else NULL, h)
        if layout.silu:
            activate(h, channels)
        if residual != NULL:
            widen(residual + chunk.batch * layout.c_batch + t * layout.c_token, 1, added, channels)
            for d in range(channels):
                h[d] += added[d]
        narrow(h, out + (chunk.batch * layout.tokens + t) * channels, 1, channels)
    if final_state != NULL and chunk.last == chunk.end:
        final_state = final_state + chunk.sequence * channels * width
        for w in range(width):
            narrow(ring + ((chunk.end - chunk.begin + w) & mask) * channels, final_state + w,
                   width, channels)


cdef inline void store_cotangent(
    const Layout* layout, const Chunk* chunk, Py_ssize_t p, const scalar* final_cotangent,
    real* ring, real* spare, scalar* dx, scalar* dstate,
) noexcept nogil:
    """Write the cotangent of the input at position p, if this chunk owns it."""
    cdef Py_ssize_t d, channels = layout.channels, width = layout.width
    cdef Py_ssize_t kept = p - chunk.end + width
    cdef real* row = ring + ((p - chunk.begin + width) & layout.ring_mask) * channels
    if p < chunk.first and (p >= chunk.begin or chunk.first != chunk.begin):
        return
    if final_cotangent != NULL and kept >= 0:
        widen(final_cotangent + chunk.sequence * channels * width + kept, width, spare, channels)
        for d in range(channels):
            row[d] += spare[d]
    if p >= chunk.begin:
        if dx != NULL:
            narrow(row, dx + (chunk.batch * layout.tokens + p) * channels, 1, channels)
    elif dstate != NULL:
        dstate = dstate + chunk.sequence * channels * width + width + p - chunk.begin
        narrow(row, dstate, width, channels)


cdef void backward_chunk(
    const Layout* layout, Chunk chunk, const scalar* x, const scalar* kernels, const scalar* state,
    const scalar* bias, const scalar* cotangent, const scalar* final_cotangent, scalar* dx,
    scalar* dk, scalar* dstate, double* dk_sum, double* dbias_sum, real* scratch,
    char* tiles,
) noexcept nogil:
    cdef Py_ssize_t channels = layout.channels, width = layout.width, mask = layout.ring_mask
    cdef bint wants_inputs = dx != NULL or dstate != NULL
    cdef Py_ssize_t stop = min(chunk.last + width - 1, chunk.end) if wants_inputs else chunk.last
    cdef Py_ssize_t t, p, d, w, at
    cdef Layout tiled = layout[0]
    cdef real* ring = scratch
    cdef real* cotangents = ring + (mask + 1) * channels
    cdef real* v = cotangents + (mask + 1) * channels
    cdef real* h = v + channels
    cdef real* wide_bias = h + channels
    cdef real* wide = wide_bias + channels
    cdef real* products = wide + channels * width
    cdef const real* k = wide
    cdef const real* inputs
    cdef const scalar* source
    cdef scalar* target
    cdef double* sums
    if layout.x_channel != 1:
        x = in_tile(x + chunk.batch * layout.x_batch, layout.x_token, layout.x_channel,
                    max(chunk.first - width + 1, chunk.begin), stop, channels, tiles)
        tiles += (layout.chunk + 2 * width) * channels * <Py_ssize_t>sizeof(scalar)
        tiled.x_batch = 0
        tiled.x_token = channels
    if layout.c_channel != 1:
        cotangent = in_tile(
            cotangent + chunk.batch * layout.c_batch, layout.c_token, layout.c_channel, chunk.first,
            stop, channels, tiles)
        tiled.c_batch = 0
        tiled.c_token = channels
    layout = &tiled
    for p in range(chunk.first - width + 1, chunk.first):
        load_input(layout, &chunk, x, state, p, ring)
    if wants_inputs:
        for d in range((mask + 1) * channels):
            cotangents[d] = 0
    if layout.static_kernels:
        widen(kernels, 1, wide, channels * width)
    if bias != NULL:
        widen(bias, 1, wide_bias, channels)
    for t in range(chunk.first, stop):
        at = t - chunk.begin + 1
        load_input(layout, &chunk, x, state, t, ring)
        source = cotangent + chunk.batch * layout.c_batch + t * layout.c_token
        widen(source, 1, v, channels)
        if not layout.static_kernels:
            source = kernels + chunk.batch * layout.k_batch + t * layout.k_token
            if scalar is real:
                k = source
            elif wants_inputs or layout.silu:
                widen(source, 1, wide, channels * width)
        if layout.silu:
            preactivation(k, ring, at, mask, channels, width,
                          wide_bias if bias != NULL else NULL, h)
            pull_activation(v, h, channels)
        if wants_inputs:
            pull_inputs_row(k, v, at, mask, channels, width, cotangents)
            store_cotangent(
                layout, &chunk, t - width + 1, final_cotangent, cotangents, h, dx, dstate)
        if t >= chunk.last:
            continue
        if dk != NULL:
            target = dk + (chunk.batch * layout.tokens + t) * channels * width
            if scalar is real:
                pull_kernels_row(v, ring, at, mask, channels, width, target)
            else:
                pull_kernels_row(v, ring, at, mask, channels, width, products)
                narrow(products, target, 1, channels * width)
        if dk_sum != NULL:
            for w in range(width):
                inputs = ring + ((at + w) & mask) * channels
                sums = dk_sum + w * channels
                for d in range(channels):
                    sums[d] += <double>v[d] * inputs[d]
        if dbias_sum != NULL:
            for d in range(channels):
                dbias_sum[d] += v[d]
    if wants_inputs:
        for p in range(stop - width + 1, chunk.last):
            store_cotangent(layout, &chunk, p, final_cotangent, cotangents, h, dx, dstate)
        if dstate != NULL and chunk.first == chunk.begin:
            # No tap of a token reads the oldest input.
            dstate = dstate + chunk.sequence * channels * width
            for d in range(channels):
                dstate[d * width] = 0


cdef struct Step:
    const void* x
    void* state
    const void* kernels
    const void* bias
    const void* residual
    const long long* slots
    const long long* positions
    void* out
    char* scratch
    Py_ssize_t row
    Py_ssize_t tokens
    Py_ssize_t channels
    Py_ssize_t width
    Py_ssize_t length
    Py_ssize_t states
    Py_ssize_t x_batch
    Py_ssize_t x_token
    Py_ssize_t x_channel
    Py_ssize_t k_batch
    Py_ssize_t k_token
    Py_ssize_t r_batch
    Py_ssize_t r_token
    Py_ssize_t r_channel
    Py_ssize_t s_batch
    Py_ssize_t s_channel
    Py_ssize_t s_tap
    bint silu


cdef inline void step_row(
    const Step* call, Py_ssize_t b, Py_ssize_t slot, Py_ssize_t position, const scalar* x,
    scalar* state, const scalar* kernels, const scalar* bias, const scalar* residual, scalar* out,
    real* scratch,
) noexcept nogil:
    """Convolve the tokens of a row with its state, and shift them in.

    `position` is a token's place in a circular buffer, or -1.
    """
    cdef Py_ssize_t channels = call.channels, width = call.width, length = call.length
    cdef Py_ssize_t tokens = call.tokens, s_channel = call.s_channel, s_tap = call.s_tap
    cdef Py_ssize_t t, d, w, l
    cdef real* row
    cdef real* ring = scratch
    cdef real* taps = ring + width * channels
    cdef real* h = taps + channels
    x += b * call.x_batch
    kernels += b * call.k_batch
    state += slot * call.s_batch
    out += b * tokens * channels
    for w in range(width - 1):
        l = length - width + 1 + w
        if position >= 0:
            l = (position + l) % length
        widen(state + l * s_tap, s_channel, ring + w * channels, channels)
    for t in range(tokens):
        widen(x + t * call.x_token, call.x_channel,
              ring + (t + width - 1) % width * channels, channels)
        for d in range(channels):
            h[d] = 0
        for w in range(width):
            widen(kernels + t * call.k_token + w, width, taps, channels)
            row = ring + (t + w) % width * channels
            for d in range(channels):
                h[d] += taps[d] * row[d]
        if bias != NULL:
            widen(bias, 1, taps, channels)
            for d in range(channels):
                h[d] += taps[d]
        if call.silu:
            activate(h, channels)
        if residual != NULL:
            widen(residual + b * call.r_batch + t * call.r_token, call.r_channel, taps, channels)
            for d in range(channels):
                h[d] += taps[d]
        narrow(h, out + t * channels, 1, channels)
    if position < 0:
        for d in range(channels):
            for l in range(length - tokens):
                state[d * s_channel + l * s_tap] = state[d * s_channel + (l + tokens) * s_tap]
    for t in range(max(tokens - length, <Py_ssize_t>0), tokens):
        l = (position + t) % length if position >= 0 else length - tokens + t
        for d in range(channels):
            state[d * s_channel + l * s_tap] = x[t * call.x_token + d * call.x_channel]


cdef inline Py_ssize_t ring_rows(Py_ssize_t width) noexcept nogil:
    """Return the number of rows in a ring for so many taps: a power of two."""
    cdef Py_ssize_t rows = 1
    while rows < width:
        rows *= 2
    return rows


cdef void set_layout(
    Layout* layout, const scalar[:, :, :] x, const scalar[:, :, :, :] kernels,
    bint static_kernels, const long long[:, ::1] chunks, const long long[::1] starts,
    Py_ssize_t chunk, bint silu,
) noexcept:
    cdef Py_ssize_t item = sizeof(scalar)
    layout.tokens = x.shape[1]
    layout.channels = x.shape[2]
    layout.width = kernels.shape[3]
    layout.ring_mask = ring_rows(layout.width) - 1
    layout.x_batch = x.strides[0] // item
    layout.x_token = x.strides[1] // item
    layout.x_channel = x.strides[2] // item if layout.channels > 1 else 1
    layout.c_channel = 1
    layout.k_batch = kernels.strides[0] // item
    layout.k_token = kernels.strides[1] // item
    layout.static_kernels = static_kernels
    layout.silu = silu
    layout.chunk = chunk
    layout.chunks_per_sequence = (layout.tokens + chunk - 1) // chunk
    layout.chunks = NULL
    layout.starts = NULL
    if chunks is not None:
        layout.chunks = &chunks[0, 0]
        layout.starts = &starts[0]
        layout.sequences = starts.shape[0] - 1


# The arguments of a call. Shares get a pointer to a struct with typed pointers to arrays, so each type
# has a function of its own. Scratch has a row of bytes for every thread. `sums` has a row of numbers for
# every group of chunks: W * D for the kernels and D for the bias, if they are wanted.
cdef struct Pass:
    Layout layout
    Py_ssize_t count
    Py_ssize_t group
    Py_ssize_t row
    Py_ssize_t tiles
    const void* x
    const void* kernels
    const void* state
    const void* bias
    const void* cotangent
    const void* final_cotangent
    void* out
    void* final_state
    void* dkernels
    void* dstate
    double* sums
    Py_ssize_t sums_row
    bint sums_kernels
    bint sums_bias
    char* scratch

cdef void set_pass(
    Pass* call, const scalar[:, :, :] x, const scalar[:, :, :, :] kernels,
    const scalar[:, :, ::1] state, const scalar[::1] bias, bint static_kernels, bint silu,
    const long long[:, ::1] chunks, const long long[::1] starts, Py_ssize_t count,
    Py_ssize_t chunk,
) noexcept:
    cdef Py_ssize_t channels = x.shape[2], width = kernels.shape[3]
    set_layout(&call.layout, x, kernels, static_kernels, chunks, starts, chunk, silu)
    call.count = count
    call.x = &x[0, 0, 0]
    call.kernels = &kernels[0, 0, 0, 0]
    call.state = &state[0, 0, 0] if state is not None else NULL
    call.bias = &bias[0] if bias is not None else NULL


cdef void set_cotangent(Pass* call, const scalar[:, :, :] cotangent) noexcept:
    """Set the second array of tokens."""
    cdef Layout* layout = &call.layout
    call.cotangent = &cotangent[0, 0, 0]
    layout.c_batch = cotangent.strides[0] // <Py_ssize_t>sizeof(scalar)
    layout.c_token = cotangent.strides[1] // <Py_ssize_t>sizeof(scalar)
    if layout.channels > 1:
        layout.c_channel = cotangent.strides[2] // <Py_ssize_t>sizeof(scalar)


cdef void set_scratch(Pass* call, const scalar[:, :, :] x) noexcept:
    """Set the bytes of a thread's scratch: tiles, where arrays need them, come after numbers."""
    cdef const Layout* layout = &call.layout
    cdef Py_ssize_t channels = layout.channels, width = layout.width
    call.tiles = whole_lines(
        channels * (2 * ring_rows(width) + 3 + 2 * width) * (8 if scalar is double else 4)
    )
    call.row = call.tiles + whole_lines(
        ((layout.x_channel != 1) + (layout.c_channel != 1)) * (layout.chunk + 2 * width)
        * channels * <Py_ssize_t>sizeof(scalar)
    )


cdef void some_forward(
    const scalar* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Pass* call = <const Pass*>given
    cdef const Layout* layout = &call.layout
    cdef char* scratch = call.scratch + thread * call.row
    cdef Py_ssize_t c
    for c in range(begin, end):
        if scalar is double:
            forward_chunk(
                layout, find_chunk(layout, c), <const scalar*>call.x, <const scalar*>call.kernels,
                <const scalar*>call.state, <const scalar*>call.bias,
                <const scalar*>call.cotangent, <scalar*>call.out, <scalar*>call.final_state,
                <double*>scratch, scratch + call.tiles)
        else:
            forward_chunk(
                layout, find_chunk(layout, c), <const scalar*>call.x, <const scalar*>call.kernels,
                <const scalar*>call.state, <const scalar*>call.bias,
                <const scalar*>call.cotangent, <scalar*>call.out, <scalar*>call.final_state,
                <float*>scratch, scratch + call.tiles)


cdef void some_backward(
    const scalar* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    """Pull back groups of chunks."""
    cdef const Pass* call = <const Pass*>given
    cdef const Layout* layout = &call.layout
    cdef char* scratch = call.scratch + thread * call.row
    cdef double* sums
    cdef double* dk_sum = NULL
    cdef double* db_sum = NULL
    cdef Py_ssize_t c, g
    for g in range(begin, end):
        sums = call.sums + g * call.sums_row
        memset(sums, 0, call.sums_row * sizeof(double))
        if call.sums_kernels:
            dk_sum = sums
            sums += layout.width * layout.channels
        if call.sums_bias:
            db_sum = sums
        for c in range(g * call.group, min((g + 1) * call.group, call.count)):
            if scalar is double:
                backward_chunk(
                    layout, find_chunk(layout, c), <const scalar*>call.x,
                    <const scalar*>call.kernels, <const scalar*>call.state,
                    <const scalar*>call.bias, <const scalar*>call.cotangent,
                    <const scalar*>call.final_cotangent, <scalar*>call.out,
                    <scalar*>call.dkernels, <scalar*>call.dstate, dk_sum, db_sum,
                    <double*>scratch, scratch + call.tiles)
            else:
                backward_chunk(
                    layout, find_chunk(layout, c), <const scalar*>call.x,
                    <const scalar*>call.kernels, <const scalar*>call.state,
                    <const scalar*>call.bias, <const scalar*>call.cotangent,
                    <const scalar*>call.final_cotangent, <scalar*>call.out,
                    <scalar*>call.dkernels, <scalar*>call.dstate, dk_sum, db_sum,
                    <float*>scratch, scratch + call.tiles)


cdef void add_up(
    const Pass* call, Py_ssize_t groups, scalar* dkernels, scalar* dbias
) noexcept nogil:
    """Write the sums over all groups, in their order."""
    cdef Py_ssize_t channels = call.layout.channels, width = call.layout.width, g, i, w
    cdef double* sums = call.sums
    for g in range(1, groups):
        for i in range(call.sums_row):
            sums[i] += sums[g * call.sums_row + i]
    if call.sums_kernels:
        for w in range(width):
            narrow(sums, dkernels + w, width, channels)
            sums += channels
    if call.sums_bias:
        narrow(sums, dbias, 1, channels)


cdef void some_steps(
    const scalar* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Step* call = <const Step*>given
    cdef const scalar* x = <const scalar*>call.x
    cdef scalar* state = <scalar*>call.state
    cdef const scalar* kernels = <const scalar*>call.kernels
    cdef const scalar* bias = <const scalar*>call.bias
    cdef const scalar* residual = <const scalar*>call.residual
    cdef scalar* out = <scalar*>call.out
    cdef char* scratch = call.scratch + thread * call.row
    cdef Py_ssize_t b, slot, position, row = call.tokens * call.channels
    for b in range(begin, end):
        slot = b
        position = -1
        if call.slots != NULL:
            slot = call.slots[b]
            if slot < 0 or slot >= call.states:
                memset(out + b * row, 0, row * sizeof(scalar))
                continue
        if call.positions != NULL:
            position = call.positions[b] % call.length
            if position < 0:
                position += call.length
        if scalar is double:
            step_row(
                call, b, slot, position, x, state, kernels, bias, residual, out, <double*>scratch)
        else:
            step_row(
                call, b, slot, position, x, state, kernels, bias, residual, out, <float*>scratch)


def forward(
    const scalar[:, :, :] x,             # IN   (B, T, D), any strides
    const scalar[:, :, :, :] kernels,    # IN   (B, T, D, W) of these, or static ones (1, 1, D, W)
    const scalar[:, :, ::1] state,       # IN   (S, D, W), or None
    const scalar[::1] bias,              # IN   (D,), or None
    bint static_kernels,
    bint silu,
    const long long[:, ::1] chunks,      # IN   (C, 2) of packed sequences, or None
    const long long[::1] starts,         # IN   (S + 1,), or None
    Py_ssize_t count,                    # IN   C, also for a dense batch; at least 1
    Py_ssize_t chunk,                    # IN   tokens of a chunk
    const scalar[:, :, :] residual,      # IN   (B, T, D), any strides, or None
    scalar[:, :, ::1] out,               # OUT  (B, T, D), or None
    scalar[:, :, ::1] final_state,       # OUT  (S, D, W) of sequences with tokens, or None
    int threads,
):
    """Convolve, and keep every sequence's last W inputs."""
    cdef Pass call
    set_pass(&call, x, kernels, state, bias, static_kernels, silu, chunks, starts, count, chunk)
    call.cotangent = NULL
    if residual is not None:
        set_cotangent(&call, residual)
    set_scratch(&call, x)
    cdef bytearray scratch = room(threads * call.row)
    call.scratch = of(scratch)
    call.out = &out[0, 0, 0] if out is not None else NULL
    call.final_state = &final_state[0, 0, 0] if final_state is not None else NULL
    with nogil:
        in_shares(<Share>some_forward[scalar], &call, count, threads)


def backward(
    const scalar[:, :, :] x,                  # IN   (B, T, D), any strides
    const scalar[:, :, :, :] kernels,         # IN   (B, T, D, W) of these, or static (1, 1, D, W)
    const scalar[:, :, ::1] state,            # IN   (S, D, W), or None
    const scalar[::1] bias,                   # IN   (D,), or None
    bint static_kernels,
    bint silu,
    const long long[:, ::1] chunks,           # IN   (C, 2) of packed sequences, or None
    const long long[::1] starts,              # IN   (S + 1,), or None
    Py_ssize_t count,                         # IN   C, also for a dense batch; at least 1
    Py_ssize_t chunk,                         # IN   tokens of a chunk
    const scalar[:, :, :] cotangent,          # IN   (B, T, D), any strides
    const scalar[:, :, ::1] final_cotangent,  # IN   (S, D, W), or None
    scalar[:, :, ::1] dx,                     # OUT  (B, T, D), or None
    scalar[:, :, :, ::1] dkernels,            # OUT  as `kernels`, or None
    scalar[:, :, ::1] dstate,                 # OUT  (S, D, W) of sequences with tokens, or None
    scalar[::1] dbias,                        # OUT  (D,), or None
    Py_ssize_t group,                         # IN   chunks that share a sum over tokens
    int threads,
):
    """Pull cotangents back."""
    cdef Pass call
    cdef Py_ssize_t groups = (count + group - 1) // group
    set_pass(&call, x, kernels, state, bias, static_kernels, silu, chunks, starts, count, chunk)
    cdef scalar* dkernels_at = &dkernels[0, 0, 0, 0] if dkernels is not None else NULL
    cdef scalar* dbias_at = &dbias[0] if dbias is not None else NULL
    call.sums_kernels = static_kernels and dkernels_at != NULL
    call.sums_bias = dbias_at != NULL
    call.sums_row = call.layout.channels * (
        call.layout.width * call.sums_kernels + call.sums_bias
    )
    cdef bytearray sums = room(groups * call.sums_row * sizeof(double))
    call.sums = <double*>of(sums)
    set_cotangent(&call, cotangent)
    set_scratch(&call, x)
    cdef bytearray scratch = room(threads * call.row)
    call.scratch = of(scratch)
    call.final_cotangent = &final_cotangent[0, 0, 0] if final_cotangent is not None else NULL
    call.out = &dx[0, 0, 0] if dx is not None else NULL
    call.dkernels = NULL if static_kernels else dkernels_at
    call.dstate = &dstate[0, 0, 0] if dstate is not None else NULL
    call.group = group
    with nogil:
        in_shares(<Share>some_backward[scalar], &call, groups, threads)
        add_up(&call, groups, dkernels_at, dbias_at)


def step(
    const scalar[:, :, :] x,            # IN   (B, T, D), any strides
    scalar[:, :, :] state,              # IN, OUT (N, D, L), any strides
    const scalar[:, :, :, ::1] kernels, # IN   (B, T, D, W), or 1 for B or T where they are shared
    const scalar[::1] bias,             # IN   (D,), or None
    const scalar[:, :, :] residual,     # IN   (B, T, D), any strides, or None
    const long long[::1] slots,         # IN   (B,), or None
    const long long[::1] positions,     # IN   (B,), or None
    bint silu,
    scalar[:, :, ::1] out,              # OUT  (B, T, D)
    int threads,
):
    """Convolve tokens with states, and shift them in."""
    cdef Py_ssize_t item = sizeof(scalar)
    cdef Step call
    call.x = &x[0, 0, 0]
    call.kernels = &kernels[0, 0, 0, 0]
    call.bias = &bias[0] if bias is not None else NULL
    call.slots = &slots[0] if slots is not None else NULL
    call.positions = &positions[0] if positions is not None else NULL
    call.out = &out[0, 0, 0]
    call.tokens = x.shape[1]
    call.channels = x.shape[2]
    call.width = kernels.shape[3]
    call.states = state.shape[0]
    call.length = state.shape[2]
    call.state = &state[0, 0, 0] if call.states and call.length else NULL
    call.row = whole_lines((call.width + 2) * call.channels * (8 if scalar is double else 4))
    cdef bytearray scratch = room(threads * call.row)
    call.scratch = of(scratch)
    call.x_batch = x.strides[0] // item
    call.x_token = x.strides[1] // item
    call.x_channel = x.strides[2] // item
    call.k_batch = kernels.strides[0] // item if kernels.shape[0] > 1 else 0
    call.k_token = kernels.strides[1] // item if kernels.shape[1] > 1 else 0
    call.residual = NULL
    if residual is not None:
        call.residual = &residual[0, 0, 0]
        call.r_batch = residual.strides[0] // item
        call.r_token = residual.strides[1] // item
        call.r_channel = residual.strides[2] // item
    call.s_batch = state.strides[0] // item
    call.s_channel = state.strides[1] // item
    call.s_tap = state.strides[2] // item
    call.silu = silu
    with nogil:
        in_shares(<Share>some_steps[scalar], &call, x.shape[0], threads)
