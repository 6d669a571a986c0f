# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Rotations into the frames of edges and back on the CPU, one end of an edge at a time.

All outputs for an end are computed while its rows are in the nearest cache. If there are sums over a
node's edges, ends are taken by node, from the sorted lists, so that every sum has one owner: first all
targets, then all sources. Otherwise ends are taken by edge, in short runs of targets and then sources.
No share splits a sum, so the thread count changes no bit.
"""

from libc.string cimport memcpy, memset

from cpukern._cpu cimport Share, in_shares
from cpukern.arrays cimport elements, of, room, whole_lines

# Explicit vectors, because compilers don't find loops that keep several sums in registers. Without
# GNU C a vector is one number.
cdef extern from *:
    """
    #if defined(__GNUC__) && defined(__AVX__)
    #include <immintrin.h>
    #define fusedops_fence() _mm_sfence()
    #define PAST_CACHE 1
    #define STORE_PAST_CACHE(to, v) _mm256_stream_ps((float *)(to), *(__m256 *)&(v))
    #else
    #define fusedops_fence() ((void)0)
    #define PAST_CACHE 0
    #define STORE_PAST_CACHE(to, v) ((void)0)
    #endif
    #if defined(__GNUC__)
    #define INLINE static inline __attribute__((always_inline))
    #define VECTOR(real) __attribute__((vector_size(32), aligned(sizeof(real)), may_alias))
    #define LANES(real) ((Py_ssize_t)(32 / sizeof(real)))
    #define fusedops_prefetch(at) __builtin_prefetch(at)
    #else
    #define INLINE static inline
    #define VECTOR(real)
    #define LANES(real) ((Py_ssize_t)1)
    #define fusedops_prefetch(at) ((void)(at))
    #endif

    /* sums: write sums of K rows times factors to J rows of out, or add them (keep).
       dots: add the dot products of one row with J others to out.
       Both prefetch the rows `ahead`, line by line as they go: many prefetches at once would wait for
       each other, and the loop for them. */
    #define DEFINE(real, vector, sums, dots) \\
    typedef real vector VECTOR(real); \\
    INLINE void sums(int keep, int J, Py_ssize_t K, const real *rows, const Py_ssize_t *at, \\
        const real *factors, Py_ssize_t f_out, Py_ssize_t f_in, real *out, \\
        const Py_ssize_t *out_at, Py_ssize_t n, Py_ssize_t ahead, Py_ssize_t odd_ahead, \\
        int past) { \\
        Py_ssize_t c = 0, i; int j; \\
        for (; c + LANES(real) <= n; c += LANES(real)) { \\
            vector total[5]; \\
            for (j = 0; j < J; j++) { \\
                if (keep) total[j] = *(vector *)(out + out_at[j] + c); \\
                else total[j] = factors[j * f_out] * *(const vector *)(rows + at[0] + c); \\
            } \\
            for (i = keep ? 0 : 1; i < K; i++) { \\
                vector v = *(const vector *)(rows + at[i] + c); \\
                if (keep) fusedops_prefetch(rows + at[i] + c + (i & 1 ? odd_ahead : ahead)); \\
                for (j = 0; j < J; j++) total[j] += factors[j * f_out + i * f_in] * v; \\
            } \\
            for (j = 0; j < J; j++) { \\
                real *to = out + out_at[j] + c; \\
                if (PAST_CACHE && past) STORE_PAST_CACHE(to, total[j]); \\
                else *(vector *)to = total[j]; \\
            } \\
        } \\
        for (; c < n; c++) for (j = 0; j < J; j++) { \\
            real sum = keep ? out[out_at[j] + c] : 0; \\
            for (i = 0; i < K; i++) sum += factors[j * f_out + i * f_in] * rows[at[i] + c]; \\
            out[out_at[j] + c] = sum; \\
        } \\
    } \\
    INLINE void dots(int J, const real *one, const real *rows, Py_ssize_t n, real scale, \\
        real *out, Py_ssize_t step, Py_ssize_t ahead) { \\
        vector total[5]; Py_ssize_t c, d, half; int j; \\
        for (j = 0; j < J; j++) for (d = 0; d < LANES(real); d++) ((real *)&total[j])[d] = 0; \\
        for (c = 0; c + LANES(real) <= n; c += LANES(real)) { \\
            vector v = *(const vector *)(one + c); \\
            if (ahead) fusedops_prefetch(one + c + ahead); \\
            for (j = 0; j < J; j++) total[j] += v * *(const vector *)(rows + j * n + c); \\
        } \\
        for (j = 0; j < J; j++) { \\
            real lane[LANES(real)], rest = 0; \\
            for (d = 0; d < LANES(real); d++) lane[d] = ((real *)&total[j])[d]; \\
            for (half = LANES(real) / 2; half; half /= 2) \\
                for (d = 0; d < half; d++) lane[d] += lane[d + half]; \\
            for (d = c; d < n; d++) rest += one[d] * rows[j * n + d]; \\
            out[j * step] += scale * (lane[0] + rest); \\
        } \\
    }
    DEFINE(float, fusedops_floats, fusedops_sums_float, fusedops_dots_float)
    DEFINE(double, fusedops_doubles, fusedops_sums_double, fusedops_dots_double)
    """
    void sums_float "fusedops_sums_float"(
        bint keep, int J, Py_ssize_t K, const float* rows, const Py_ssize_t* at,
        const float* factors, Py_ssize_t f_out, Py_ssize_t f_in, float* out,
        const Py_ssize_t* out_at, Py_ssize_t n, Py_ssize_t ahead, Py_ssize_t odd_ahead,
        bint past,
    ) noexcept nogil
    void sums_double "fusedops_sums_double"(
        bint keep, int J, Py_ssize_t K, const double* rows, const Py_ssize_t* at,
        const double* factors, Py_ssize_t f_out, Py_ssize_t f_in, double* out,
        const Py_ssize_t* out_at, Py_ssize_t n, Py_ssize_t ahead, Py_ssize_t odd_ahead,
        bint past,
    ) noexcept nogil
    void dots_float "fusedops_dots_float"(
        int J, const float* one, const float* rows, Py_ssize_t n, float scale, float* out,
        Py_ssize_t step, Py_ssize_t ahead,
    ) noexcept nogil
    void dots_double "fusedops_dots_double"(
        int J, const double* one, const double* rows, Py_ssize_t n, double scale, double* out,
        Py_ssize_t step, Py_ssize_t ahead,
    ) noexcept nogil
    void prefetch "fusedops_prefetch"(const void* at) noexcept nogil
    void fence "fusedops_fence"() noexcept nogil

cdef enum:
    # Edges whose targets, and then sources, are taken together; bytes of a cache line.
    RUN = 16
    LINE = 64
    # The size of arrays that no cache holds.
    LARGE = 1 << 23
    # Shares of the work, for any number of threads.
    SHARES = 256

ctypedef fused real:
    float
    double

# Steps are in elements. places: for every degree the offset of its first kept element, and the steps to
# the next row of the message and of the node; first in the matrices, then in their gradient. own: every
# degree's rows of the message.
cdef struct Layout:
    Py_ssize_t edges
    Py_ssize_t nodes
    Py_ssize_t channels
    Py_ssize_t ends
    Py_ssize_t degrees
    Py_ssize_t orders
    Py_ssize_t message_rows
    Py_ssize_t edge_step
    Py_ssize_t matrix
    bint past
    const long long* places
    const long long* own


cdef inline Py_ssize_t within(Py_ssize_t value, Py_ssize_t count) noexcept nogil:
    """Clip an index to the array, so that a wrong one can't lead out of it."""
    return min(max(value, <Py_ssize_t>0), count - 1)


cdef inline void sums_of(
    bint keep, int J, Py_ssize_t K, const real* rows, const Py_ssize_t* at, const real* factors,
    Py_ssize_t f_out, Py_ssize_t f_in, real* out, const Py_ssize_t* out_at, Py_ssize_t n,
    Py_ssize_t ahead, Py_ssize_t odd_ahead, bint past,
) noexcept nogil:
    if real is float:
        sums_float(
            keep, J, K, rows, at, factors, f_out, f_in, out, out_at, n, ahead, odd_ahead, past
        )
    else:
        sums_double(
            keep, J, K, rows, at, factors, f_out, f_in, out, out_at, n, ahead, odd_ahead, past
        )


cdef void sums(
    bint keep, Py_ssize_t J, Py_ssize_t K, const real* rows, const Py_ssize_t* at,
    const real* factors, Py_ssize_t f_out, Py_ssize_t f_in, real* out, const Py_ssize_t* out_at,
    Py_ssize_t n, Py_ssize_t ahead, Py_ssize_t odd_ahead, bint past,
) noexcept nogil:
    """Take rows of out in groups of constant size; in low degrees the terms are constant too."""
    cdef Py_ssize_t some
    while J > 0:
        if J == 5 and K == 5 and keep:
            some = 5
            sums_of(
                True, 5, 5, rows, at, factors, f_out, f_in, out, out_at, n, ahead, odd_ahead, 0
            )
        elif J == 5 and K == 5:
            some = 5
            sums_of(False, 5, 5, rows, at, factors, f_out, f_in, out, out_at, n, 0, 0, past)
        elif J >= 5:
            some = 5
            sums_of(
                keep, 5, K, rows, at, factors, f_out, f_in, out, out_at, n, ahead, odd_ahead,
                past,
            )
        elif J >= 3:
            some = 3
            sums_of(
                keep, 3, K, rows, at, factors, f_out, f_in, out, out_at, n, ahead, odd_ahead,
                past,
            )
        else:
            some = 1
            sums_of(
                keep, 1, K, rows, at, factors, f_out, f_in, out, out_at, n, ahead, odd_ahead,
                past,
            )
        J = J - some
        ahead = odd_ahead = 0
        factors = factors + some * f_out
        out_at = out_at + some


cdef inline void dots_of(
    int J, const real* one, const real* rows, Py_ssize_t n, real scale, real* out, Py_ssize_t step,
    Py_ssize_t ahead,
) noexcept nogil:
    if real is float:
        dots_float(J, one, rows, n, scale, out, step, ahead)
    else:
        dots_double(J, one, rows, n, scale, out, step, ahead)


cdef void dots(
    Py_ssize_t J, const real* one, const real* rows, Py_ssize_t n, real scale, real* out,
    Py_ssize_t step, Py_ssize_t ahead,
) noexcept nogil:
    cdef Py_ssize_t some
    while J > 0:
        if J >= 5:
            some = 5
            dots_of(5, one, rows, n, scale, out, step, ahead)
        elif J >= 3:
            some = 3
            dots_of(3, one, rows, n, scale, out, step, ahead)
        else:
            some = 1
            dots_of(1, one, rows, n, scale, out, step, ahead)
        J = J - some
        ahead = 0
        rows = rows + some * n
        out = out + some * step


cdef void one_end(
    const Layout* layout, Py_ssize_t e, Py_ssize_t ahead, Py_ssize_t node, Py_ssize_t h, real scale,
    const real* x, const real* message, const real* wigner, real* dx, real* dmessage,
    real* dwigner, real* factors, Py_ssize_t* offsets,
) noexcept nogil:
    """Compute all outputs for an end, and prefetch the rows of the edge `ahead`."""
    cdef Py_ssize_t C = layout.channels, slot = layout.ends - 1 - h
    cdef Py_ssize_t first = node * layout.degrees * layout.degrees * C
    cdef Py_ssize_t* own_offsets = offsets + 2 * layout.degrees
    cdef Py_ssize_t l, i, j, size, kept
    cdef const long long* place
    cdef const long long* summed
    cdef const long long* own
    cdef Py_ssize_t next = (ahead - e) * layout.message_rows * layout.ends * C
    i = 0
    while i < layout.matrix:
        prefetch(wigner + ahead * layout.edge_step + i)
        if dwigner != NULL:
            prefetch(dwigner + ahead * layout.matrix + i)
        i += LINE // <Py_ssize_t>sizeof(real)
    wigner = wigner + e * layout.edge_step
    if dwigner != NULL:
        dwigner = dwigner + e * layout.matrix
        if h == 0:
            memset(dwigner, 0, layout.matrix * sizeof(real))
    for l in range(layout.degrees):
        size = 2 * l + 1
        kept = min(size, layout.orders)
        place = layout.places + 3 * l
        summed = place + 3 * layout.degrees
        own = layout.own + l * layout.orders
        for i in range(kept):
            own_offsets[i] = ((e * layout.message_rows + own[i]) * layout.ends + slot) * C
            for j in range(size):
                factors[i * size + j] = scale * wigner[place[0] + i * place[1] + j * place[2]]
        for j in range(size):
            offsets[j] = first + (l * l + j) * C
        if dmessage != NULL:
            sums(
                False, kept, size, x, offsets, factors, size, 1, dmessage, own_offsets, C, 0, 0,
                layout.past,
            )
        # If the message is read twice, each time prefetches one half of the next rows.
        if dx != NULL:
            sums(
                True, size, kept, message, own_offsets, factors, 1, size, dx, offsets, C,
                next if dwigner == NULL else 0, next, 0,
            )
        if dwigner != NULL:
            for i in range(kept):
                dots(
                    size, message + own_offsets[i], x + offsets[0], C, scale,
                    dwigner + summed[0] + i * summed[1], summed[2],
                    next if dx == NULL or i % 2 == 0 else 0,
                )


cdef inline void some_nodes(
    const Layout* layout, Py_ssize_t low, Py_ssize_t high, Py_ssize_t h, real scale,
    const long long* pointers, Py_ssize_t listed, const long long* order, const real* base,
    const real* x, const real* message, const real* wigner, real* dx, real* dmessage,
    real* dwigner, real* factors, Py_ssize_t* offsets,
) noexcept nogil:
    """Do the ends of the edges of nodes low to high; without lists, node n has only edge n."""
    cdef Py_ssize_t rows = layout.degrees * layout.degrees * layout.channels
    cdef Py_ssize_t n, at, begin, end, e, ahead
    for n in range(low, high):
        if h == 0:
            if base != NULL:
                memcpy(dx + n * rows, base + n * rows, rows * sizeof(real))
            else:
                memset(dx + n * rows, 0, rows * sizeof(real))
        begin = n
        end = min(n + 1, layout.edges)
        if pointers != NULL:
            begin = end = 0
            if n < listed:
                begin = max(<Py_ssize_t>pointers[n], <Py_ssize_t>0)
                end = min(<Py_ssize_t>pointers[n + 1], layout.edges)
        for at in range(begin, end):
            e = at
            ahead = within(at + 1, layout.edges)
            if order != NULL:
                e = within(order[at], layout.edges)
                ahead = within(order[ahead], layout.edges)
            one_end(
                layout, e, ahead, within(n, layout.nodes), h, scale, x, message, wigner,
                dx + (n - within(n, layout.nodes)) * rows, dmessage, dwigner, factors, offsets,
            )


cdef inline void some_edges(
    const Layout* layout, Py_ssize_t low, Py_ssize_t high, real scale, const long long* target,
    const long long* source, const real* x, const real* message, const real* wigner,
    real* dmessage, real* dwigner, real* factors, Py_ssize_t* offsets,
) noexcept nogil:
    cdef Py_ssize_t first, last, h, e, node
    first = low
    while first < high:
        last = min(first + RUN, high)
        for h in range(layout.ends):
            for e in range(first, last):
                node = e
                if target != NULL:
                    node = target[e] if h == 0 else source[e]
                one_end(
                    layout, e, min(e + 1, layout.edges - 1), within(node, layout.nodes), h, scale,
                    x, message, wigner, <real*>NULL, dmessage, dwigner, factors, offsets,
                )
        first = last


# The arguments of a call. Shares get a pointer to a struct with typed pointers to arrays, so each type
# has a function of its own. Scratch has a row of bytes for every thread. `summed` nodes have sums over
# the edges in the lists of one end.
cdef struct Call:
    Layout layout
    double scale
    const long long* target
    const long long* source
    Py_ssize_t end
    Py_ssize_t summed
    const long long* pointers
    Py_ssize_t listed
    const long long* order
    const void* base
    const void* x
    const void* message
    const void* wigner
    void* dx
    void* dmessage
    void* dwigner
    char* factors
    Py_ssize_t factors_row
    char* offsets
    Py_ssize_t offsets_row


cdef Py_ssize_t first_node(const Call* call, Py_ssize_t share) noexcept nogil:
    """Return the first node of a share; shares have about equal numbers of edges."""
    cdef Py_ssize_t low = 0, high = call.listed, middle
    cdef long long mark
    if call.listed <= 0 or share == 0 or share == SHARES:
        return call.summed * share // SHARES
    mark = call.pointers[call.listed] * share // SHARES
    while low < high:
        middle = (low + high) // 2
        if call.pointers[middle] < mark:
            low = middle + 1
        else:
            high = middle
    return min(low, call.summed)


cdef void edge_shares(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Call* call = <const Call*>given
    cdef Py_ssize_t edges = call.layout.edges
    some_edges(
        &call.layout, edges * begin // SHARES, edges * end // SHARES, <real>call.scale, call.target,
        call.source, <const real*>call.x, <const real*>call.message, <const real*>call.wigner,
        <real*>call.dmessage, <real*>call.dwigner,
        <real*>(call.factors + thread * call.factors_row),
        <Py_ssize_t*>(call.offsets + thread * call.offsets_row),
    )
    fence()


cdef void node_shares(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Call* call = <const Call*>given
    some_nodes(
        &call.layout, first_node(call, begin), first_node(call, end), call.end, <real>call.scale,
        call.pointers, call.listed, call.order, <const real*>call.base, <const real*>call.x,
        <const real*>call.message, <const real*>call.wigner, <real*>call.dx,
        <real*>call.dmessage, <real*>call.dwigner,
        <real*>(call.factors + thread * call.factors_row),
        <Py_ssize_t*>(call.offsets + thread * call.offsets_row),
    )
    fence()


def rotate(
    # IN: None if absent
    const real[:, :, ::1] base,
    const real[:, :, ::1] x,
    const real[:, :, ::1] message,
    const real[:, :, :] wigner,
    # IN: int64, the fields of `Edges`, or all None
    source,
    target,
    by_source,
    source_ptr,
    by_target,
    target_ptr,
    # IN: int64, (2, degrees, 3) and (degrees, orders)
    places,
    own,
    Py_ssize_t degrees,
    Py_ssize_t orders,
    Py_ssize_t message_rows,
    Py_ssize_t ends,
    Py_ssize_t channels,
    double scale,
    # OUT
    real[:, :, ::1] dx,
    real[:, :, ::1] dmessage,
    real[:, :, ::1] dwigner,
    int threads,
):
    cdef Call call
    cdef Layout* layout = &call.layout
    cdef Py_ssize_t widest = 2 * degrees - 1, edges = wigner.shape[0], h
    call.factors_row = whole_lines(widest * widest * sizeof(real))
    call.offsets_row = whole_lines(4 * degrees * sizeof(Py_ssize_t))
    cdef bytearray scratch = room(threads * (call.factors_row + call.offsets_row))
    call.factors = of(scratch)
    call.offsets = call.factors + threads * call.factors_row
    call.scale = scale
    call.target = call.source = call.pointers = call.order = NULL
    call.listed = 0
    if target is not None:
        call.target = <const long long*>elements(target, 8)
        call.source = <const long long*>elements(source, 8)
        edges = min(edges, len(source), len(target), len(by_source), len(by_target))
    call.base = &base[0, 0, 0] if base is not None else NULL
    call.x = &x[0, 0, 0] if x is not None else NULL
    call.message = &message[0, 0, 0] if message is not None else NULL
    call.wigner = &wigner[0, 0, 0]
    call.dx = &dx[0, 0, 0] if dx is not None else NULL
    call.dmessage = &dmessage[0, 0, 0] if dmessage is not None else NULL
    call.dwigner = &dwigner[0, 0, 0] if dwigner is not None else NULL
    layout.edges = edges
    layout.nodes = x.shape[0] if x is not None else dx.shape[0]
    layout.channels = channels
    layout.ends = ends
    layout.degrees = degrees
    layout.orders = orders
    layout.message_rows = message_rows
    layout.edge_step = wigner.strides[0] // <Py_ssize_t>sizeof(real)
    layout.matrix = wigner.shape[1] * wigner.shape[2]
    # Large aligned outputs are written past the cache, whose contents they would only replace.
    layout.past = (
        dmessage is not None
        and dmessage.shape[0] * dmessage.shape[1] * dmessage.shape[2] >= LARGE
        and <size_t>call.dmessage % LINE == 0
        and channels * sizeof(real) % LINE == 0
    )
    layout.places = <const long long*>elements(places, 8)
    layout.own = <const long long*>elements(own, 8)
    if dx is None:
        with nogil:
            in_shares(<Share>edge_shares[real], &call, SHARES, threads)
        return
    call.summed = dx.shape[0]
    for h in range(ends):
        call.end = h
        if target is not None:
            pointers, order = (target_ptr, by_target) if h == 0 else (source_ptr, by_source)
            call.pointers = <const long long*>elements(pointers, 8)
            call.order = <const long long*>elements(order, 8)
            call.listed = len(pointers) - 1
        with nogil:
            in_shares(<Share>node_shares[real], &call, SHARES, threads)
