# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Rotations into the frames of edges and back on the CPU, one end of an edge at a time.

All that is wanted of an end is done while its rows are in the nearest cache. Where nodes are summed,
ends are taken by node, from the sorted lists, so that every sum has one owner: first all targets, then
all sources. Otherwise they are taken by edge, in short runs of targets and then sources. The caller
cuts both into shares that don't depend on the number of threads, which so changes no bit.
"""

from cython.parallel cimport prange, threadid
from libc.string cimport memcpy, memset

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define fusedops_prefetch(at) __builtin_prefetch(at)
    #else
    #define fusedops_prefetch(at) ((void)(at))
    #endif
    """
    void prefetch "fusedops_prefetch"(const void* at) noexcept nogil

cdef enum:
    # Rows that are combined together, numbers that are summed side by side.
    MOST = 5
    LANES = 16
    # Edges whose targets, and then sources, are taken together.
    RUN = 16

ctypedef fused real:
    float
    double

# Steps are in elements. places: for every degree, where its kept elements begin and the steps to the
# next row of the message and of the node, in the matrices and then in their gradient. own: the rows
# of the message that every degree keeps.
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
    const long long* places
    const long long* own


cdef inline Py_ssize_t within(Py_ssize_t value, Py_ssize_t count) noexcept nogil:
    """Whatever an index says, it is within the array."""
    return min(max(value, <Py_ssize_t>0), count - 1)


cdef inline void fetch(const real* at) noexcept nogil:
    """Begin to read what comes next, which in an order of edges the processor can't foresee."""
    prefetch(at)
    # Lines hold eight of the wider numbers.
    if sizeof(real) == 8:
        prefetch(at + LANES // 2)


cdef inline void combine_some(
    real* out, bint keep, const real* rows, const Py_ssize_t* offsets, const real* factors,
    Py_ssize_t step, Py_ssize_t count, Py_ssize_t n, Py_ssize_t ahead, Py_ssize_t out_ahead,
) noexcept nogil:
    """Write or add the sum of rows times factors; a loop per count that is known when inlined."""
    cdef Py_ssize_t[MOST] row
    cdef real[MOST] factor
    cdef real[LANES] lanes
    cdef real total
    cdef Py_ssize_t c = 0, k, d
    for k in range(count):
        row[k] = offsets[k]
        factor[k] = factors[k * step]
    while c + LANES <= n:
        # One line after the other: many at a time would wait for each other, and this for them.
        if out_ahead:
            fetch(<const real*>out + c + out_ahead)
        for d in range(LANES):
            lanes[d] = out[c + d] if keep else <real>0
        for k in range(count):
            if ahead:
                fetch(rows + row[k] + c + ahead)
            for d in range(LANES):
                lanes[d] = lanes[d] + factor[k] * rows[row[k] + c + d]
        for d in range(LANES):
            out[c + d] = lanes[d]
        c += LANES
    for d in range(c, n):
        total = out[d] if keep else <real>0
        for k in range(count):
            total = total + factor[k] * rows[row[k] + d]
        out[d] = total


cdef void combine(
    real* out, bint keep, const real* rows, const Py_ssize_t* offsets, const real* factors,
    Py_ssize_t step, Py_ssize_t count, Py_ssize_t n, Py_ssize_t ahead, Py_ssize_t out_ahead,
) noexcept nogil:
    cdef Py_ssize_t some
    while count > 0:
        some = 1
        if count >= 5:
            some = 5
            combine_some(out, keep, rows, offsets, factors, step, 5, n, ahead, out_ahead)
        elif count >= 3:
            some = 3
            combine_some(out, keep, rows, offsets, factors, step, 3, n, ahead, out_ahead)
        else:
            combine_some(out, keep, rows, offsets, factors, step, 1, n, ahead, out_ahead)
        keep = True
        out_ahead = 0
        offsets = offsets + some
        factors = factors + some * step
        count = count - some


cdef inline void dot_some(
    const real* one, const real* rows, Py_ssize_t count, Py_ssize_t n, real scale, real* out,
    Py_ssize_t step, Py_ssize_t ahead,
) noexcept nogil:
    """Add products of one row with others, n apart, to out; sums run in lanes, in a fixed order."""
    cdef real[MOST * LANES] lanes
    cdef Py_ssize_t c = 0, k, d, half, whole = n - n % LANES
    for d in range(count * LANES):
        lanes[d] = 0
    while c < whole:
        if ahead:
            fetch(one + c + ahead)
        for k in range(count):
            for d in range(LANES):
                lanes[k * LANES + d] = lanes[k * LANES + d] + one[c + d] * rows[k * n + c + d]
        c += LANES
    for k in range(count):
        for c in range(whole, n):
            d = k * LANES + c - whole
            lanes[d] = lanes[d] + one[c] * rows[k * n + c]
        half = LANES // 2
        while half:
            for d in range(k * LANES, k * LANES + half):
                lanes[d] = lanes[d] + lanes[d + half]
            half = half // 2
        out[k * step] = out[k * step] + scale * lanes[k * LANES]


cdef void dots(
    const real* one, const real* rows, Py_ssize_t count, Py_ssize_t n, real scale, real* out,
    Py_ssize_t step, Py_ssize_t ahead,
) noexcept nogil:
    cdef Py_ssize_t some
    while count > 0:
        some = 1
        if count >= 5:
            some = 5
            dot_some(one, rows, 5, n, scale, out, step, ahead)
        elif count >= 3:
            some = 3
            dot_some(one, rows, 3, n, scale, out, step, ahead)
        else:
            dot_some(one, rows, 1, n, scale, out, step, ahead)
        ahead = 0
        rows = rows + some * n
        out = out + some * step
        count = count - some


cdef void one_end(
    const Layout* layout, Py_ssize_t e, Py_ssize_t ahead, Py_ssize_t node, Py_ssize_t h, real scale,
    const real* x, const real* message, const real* wigner, real* on_x, real* on_message,
    real* on_wigner, real* factors, Py_ssize_t* offsets,
) noexcept nogil:
    """Do all that is wanted of an end, and begin to read what that of the edge `ahead` needs."""
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
        fetch(wigner + ahead * layout.edge_step + i)
        if on_wigner != NULL:
            fetch(<const real*>on_wigner + ahead * layout.matrix + i)
        i += LANES
    wigner = wigner + e * layout.edge_step
    if on_wigner != NULL:
        on_wigner = on_wigner + e * layout.matrix
        if h == 0:
            memset(on_wigner, 0, layout.matrix * sizeof(real))
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
        if on_message != NULL:
            for i in range(kept):
                combine(
                    on_message + own_offsets[i], False, x, offsets, factors + i * size, 1, size, C,
                    0, next,
                )
        if on_wigner != NULL:
            for i in range(kept):
                dots(
                    message + own_offsets[i], x + offsets[0], size, C, scale,
                    on_wigner + summed[0] + i * summed[1], summed[2], next,
                )
        if on_x != NULL:
            for j in range(size):
                combine(
                    on_x + offsets[j], True, message, own_offsets, factors + j, size, kept, C,
                    next if on_wigner == NULL and j == 0 else 0, 0,
                )


cdef inline void some_nodes(
    const Layout* layout, Py_ssize_t low, Py_ssize_t high, Py_ssize_t h, real scale,
    const long long* pointers, Py_ssize_t listed, const long long* order, const real* base,
    const real* x, const real* message, const real* wigner, real* on_x, real* on_message,
    real* on_wigner, real* factors, Py_ssize_t* offsets,
) noexcept nogil:
    """Take the ends of the edges of nodes low to high; without lists, node n has edge n alone."""
    cdef Py_ssize_t rows = layout.degrees * layout.degrees * layout.channels
    cdef Py_ssize_t n, at, begin, end, e, ahead
    for n in range(low, high):
        if h == 0:
            if base != NULL:
                memcpy(on_x + n * rows, base + n * rows, rows * sizeof(real))
            else:
                memset(on_x + n * rows, 0, rows * sizeof(real))
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
                on_x + (n - within(n, layout.nodes)) * rows, on_message, on_wigner, factors, offsets,
            )


cdef inline void some_edges(
    const Layout* layout, Py_ssize_t low, Py_ssize_t high, real scale, const long long* target,
    const long long* source, const real* x, const real* message, const real* wigner,
    real* on_message, real* on_wigner, real* factors, Py_ssize_t* offsets,
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
                    x, message, wigner, <real*>NULL, on_message, on_wigner, factors, offsets,
                )
        first = last


def rotate(
    # IN: None where there is nothing; shares of nodes, of targets and of sources, or of edges
    const real[:, :, ::1] base,
    const real[:, :, ::1] x,
    const real[:, :, ::1] message,
    const real[:, :, :] wigner,
    const long long[::1] source,
    const long long[::1] target,
    const long long[::1] by_source,
    const long long[::1] source_pointers,
    const long long[::1] by_target,
    const long long[::1] target_pointers,
    const long long[:, ::1] shares,
    const long long[:, :, ::1] places,
    const long long[:, ::1] own,
    Py_ssize_t ends,
    Py_ssize_t edges,
    Py_ssize_t channels,
    Py_ssize_t message_rows,
    double scale,
    # OUT
    real[:, :, ::1] on_x,
    real[:, :, ::1] on_message,
    real[:, ::1] on_wigner,
    # Scratch, a row for every thread
    real[:, ::1] factors,
    Py_ssize_t[:, ::1] offsets,
):
    cdef Layout layout
    cdef const real* bases = &base[0, 0, 0] if base is not None else NULL
    cdef const real* inputs = &x[0, 0, 0] if x is not None else NULL
    cdef const real* messages = &message[0, 0, 0] if message is not None else NULL
    cdef const real* matrices = &wigner[0, 0, 0]
    cdef real* sums = &on_x[0, 0, 0] if on_x is not None else NULL
    cdef real* sent = &on_message[0, 0, 0] if on_message is not None else NULL
    cdef real* on_matrices = &on_wigner[0, 0] if on_wigner is not None else NULL
    cdef const long long* targets = &target[0] if target is not None else NULL
    cdef const long long* sources = &source[0] if source is not None else NULL
    cdef const long long* pointers
    cdef const long long* order
    cdef Py_ssize_t threads = factors.shape[0], part, parts = shares.shape[1] - 1, h, listed
    layout.edges = edges
    layout.nodes = x.shape[0] if x is not None else on_x.shape[0]
    layout.channels = channels
    layout.ends = ends
    layout.degrees = own.shape[0]
    layout.orders = own.shape[1]
    layout.message_rows = message_rows
    layout.edge_step = wigner.strides[0] // <Py_ssize_t>sizeof(real)
    layout.matrix = wigner.shape[1] * wigner.shape[2]
    layout.places = &places[0, 0, 0]
    layout.own = &own[0, 0]
    with nogil:
        if sums == NULL:
            for part in prange(parts, num_threads=threads, schedule="dynamic"):
                some_edges(
                    &layout, shares[0, part], shares[0, part + 1], <real>scale, targets, sources,
                    inputs, messages, matrices, sent, on_matrices,
                    &factors[threadid(), 0], &offsets[threadid(), 0],
                )
        else:
            for h in range(ends):
                pointers = order = NULL
                listed = 0
                if targets != NULL:
                    if h == 0:
                        pointers = &target_pointers[0]
                        order = &by_target[0]
                        listed = target_pointers.shape[0] - 1
                    else:
                        pointers = &source_pointers[0]
                        order = &by_source[0]
                        listed = source_pointers.shape[0] - 1
                for part in prange(parts, num_threads=threads, schedule="dynamic"):
                    some_nodes(
                        &layout, shares[h, part], shares[h, part + 1], h, <real>scale, pointers,
                        listed, order, bases, inputs, messages, matrices, sums, sent, on_matrices,
                        &factors[threadid(), 0], &offsets[threadid(), 0],
                    )
