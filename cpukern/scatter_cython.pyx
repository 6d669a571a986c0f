# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Structured scatter and gather on the CPU: a part of the map at a time, which one thread owns.

The planes that reach a part come in a list, in the order of the cubes: that is the order in which
every element is summed, whatever the parts and the threads. What an index says outside of the part is
left alone, so that no index can lead out of the map.
"""

from cython.parallel cimport prange
from libc.string cimport memset

# Vectors, where the compiler is told that cubes and map don't overlap.
cdef extern from *:
    """
    #if defined(_MSC_VER)
    #define RESTRICT __restrict
    #else
    #define RESTRICT restrict
    #endif
    #if defined(__GNUC__)
    #define fusedops_prefetch(at) __builtin_prefetch(at)
    #else
    #define fusedops_prefetch(at) ((void)(at))
    #endif
    /* Explicit vectors, because a run is short, and because compilers make calls of plain copies. */
    #if defined(__GNUC__)
    #define TAKE(real, lanes, work) { \\
        typedef real vector __attribute__(( \\
            vector_size(lanes * sizeof(real)), aligned(sizeof(real)), may_alias)); \\
        for (; k + lanes <= n; k += lanes) { \\
            vector *o = (vector *)(to + k); const vector *i = (const vector *)(from + k); work; \\
        } \\
    }
    #else
    #define TAKE(real, lanes, work)
    #endif
    #define DEFINE_RUN(real, name, work) \\
    static inline void name(real *RESTRICT to, const real *RESTRICT from, Py_ssize_t n) { \\
        Py_ssize_t k = 0; \\
        TAKE(real, 16, work) TAKE(real, 4, work) \\
        for (; k < n; k++) { real *o = to + k; const real *i = from + k; work; } \\
    }
    DEFINE_RUN(float, fusedops_add_float, *o += *i)
    DEFINE_RUN(double, fusedops_add_double, *o += *i)
    DEFINE_RUN(float, fusedops_copy_float, *o = *i)
    DEFINE_RUN(double, fusedops_copy_double, *o = *i)
    #define DEFINE_RUNS(integer, name) \\
    static inline int name(const integer *RESTRICT at, Py_ssize_t n) { \\
        unsigned integer first = at[0], other = 0; \\
        for (Py_ssize_t k = 1; k < n; k++) \\
            other |= (unsigned integer)at[k] ^ (first + (unsigned integer)k); \\
        return other == 0; \\
    }
    DEFINE_RUNS(int, fusedops_is_run_int)
    DEFINE_RUNS(long long, fusedops_is_run_long)
    """
    void prefetch "fusedops_prefetch"(const void* at) noexcept nogil
    void add_float "fusedops_add_float"(float* to, const float* rows, Py_ssize_t n) noexcept nogil
    void add_double "fusedops_add_double"(
        double* to, const double* rows, Py_ssize_t n
    ) noexcept nogil
    void copy_float "fusedops_copy_float"(float* to, const float* rows, Py_ssize_t n) noexcept nogil
    void copy_double "fusedops_copy_double"(
        double* to, const double* rows, Py_ssize_t n
    ) noexcept nogil
    bint is_run_int "fusedops_is_run_int"(const int* at, Py_ssize_t n) noexcept nogil
    bint is_run_long "fusedops_is_run_long"(const long long* at, Py_ssize_t n) noexcept nogil

ctypedef fused real:
    float
    double

ctypedef fused integer:
    int
    long long

cdef inline bint is_run(const integer* at, Py_ssize_t n) noexcept nogil:
    if integer is int:
        return is_run_int(at, n)
    else:
        return is_run_long(at, n)


cdef inline void add(real* to, const real* rows, Py_ssize_t n) noexcept nogil:
    if real is float:
        add_float(to, rows, n)
    else:
        add_double(to, rows, n)


cdef inline void copy(real* to, const real* rows, Py_ssize_t n) noexcept nogil:
    if real is float:
        copy_float(to, rows, n)
    else:
        copy_double(to, rows, n)


cdef inline void widen(long long place, long long* low, long long* high) noexcept nogil:
    low[0] = min(low[0], place)
    high[0] = max(high[0], place)


cdef void one_cube(
    const integer* places, Py_ssize_t rows, Py_ssize_t length, long long* first,
    long long* second, int* split, long long* low, long long* high,
) noexcept nogil:
    """Find the runs of a cube's rows, and between which places they lie.

    A row is a run of its first `split` elements and one of the others, such as a row that wraps
    around has; a row of more runs has no split.
    """
    cdef Py_ssize_t j, k, begin
    cdef const integer* at
    low[0] = high[0] = places[0]
    for j in range(rows):
        at = places + j * length
        begin = length
        if not is_run(at, length):
            begin = 1
            while at[begin] == at[begin - 1] + 1:
                begin = begin + 1
            if not is_run(at + begin, length - begin):
                begin = 0
        first[j] = at[0]
        second[j] = at[begin] if begin < length else 0
        split[j] = begin
        if begin > 0:
            # Both ends of a run are either: its numbers may wrap around their dtype.
            widen(at[0], low, high)
            widen(at[begin - 1], low, high)
            widen(at[begin % length], low, high)
            widen(at[length - 1], low, high)
        else:
            for k in range(length):
                widen(at[k], low, high)


cdef inline bint one_span(
    long long start, long long low, long long high, unsigned long long size, int bits, int* span
) noexcept nogil:
    """Find the first and the last part that a plane reaches; return whether it leaves the map.

    Such a plane reaches no part, so that what comes of its numbers is none.
    """
    cdef unsigned long long begin = <unsigned long long>start + <unsigned long long>low
    cdef unsigned long long end = <unsigned long long>start + <unsigned long long>high
    # The sum of two numbers below zero may be none of 64 bits.
    cdef bint leaves = (start < 0 and low < 0) or begin >= size or end >= size
    span[0] = 0 if leaves else <int>(begin >> bits)
    span[1] = -1 if leaves else <int>(end >> bits)
    return leaves


def survey(
    # IN: a part has 2**bits elements, and a thread a share of the cubes
    const integer[:, ::1] wa,
    const integer[:, :, ::1] wbwc,
    unsigned long long size,
    int bits,
    # OUT: and whether all elements lie in the map
    long long[:, ::1] first,
    long long[:, ::1] second,
    int[:, ::1] split,
    long long[::1] low,
    long long[::1] high,
    int[:, :, ::1] spans,
    # OUT, of zeros: of how many planes of a share a part is the first, and the last
    long long[:, :, ::1] ends,
):
    cdef Py_ssize_t cubes = wbwc.shape[0], ny = wbwc.shape[1], nz = wbwc.shape[2]
    cdef Py_ssize_t nx = wa.shape[1], shares = ends.shape[0], leaving = 0, s, c, i
    for s in prange(shares, num_threads=shares, schedule="static", nogil=True):
        for c in range(cubes * s // shares, cubes * (s + 1) // shares):
            one_cube(
                &wbwc[c, 0, 0], ny, nz, &first[c, 0], &second[c, 0], &split[c, 0], &low[c],
                &high[c],
            )
            for i in range(nx):
                if one_span(wa[c, i], low[c], high[c], size, bits, &spans[c, i, 0]):
                    leaving += 1
                else:
                    ends[s, 0, spans[c, i, 0]] += 1
                    ends[s, 1, spans[c, i, 1]] += 1
    return leaving == 0


def fill(
    # IN: parts are joined by 2**bits
    const int[:, :, ::1] spans,
    int bits,
    # IN and spoiled: where the planes of every share that reach a part go
    long long[:, ::1] at,
    # OUT
    long long[::1] planes,
):
    cdef Py_ssize_t cubes = spans.shape[0], nx = spans.shape[1], shares = at.shape[0], s, c, i, p
    for s in prange(shares, num_threads=shares, schedule="static", nogil=True):
        for c in range(cubes * s // shares, cubes * (s + 1) // shares):
            for i in range(nx):
                for p in range(spans[c, i, 0] >> bits, (spans[c, i, 1] >> bits) + 1):
                    planes[at[s, p]] = c * nx + i
                    at[s, p] += 1


cdef inline void one_run(
    bint back, Py_ssize_t place, Py_ssize_t low, Py_ssize_t high, Py_ssize_t length, real* cubes,
    real* grid,
) noexcept nogil:
    """Add a run of a cube to the map at a place, or copy it from there, between low and high."""
    cdef Py_ssize_t begin = max(low - place, <Py_ssize_t>0), end = min(high - place, length)
    if begin >= end:
        return
    if back:
        copy(cubes + begin, grid + place + begin, end - begin)
    else:
        add(grid + place + begin, cubes + begin, end - begin)


cdef void one_part(
    bint back, Py_ssize_t low, Py_ssize_t high, const long long* planes, Py_ssize_t count,
    const integer* wa, const integer* wbwc, const long long* first, const long long* second,
    const int* split, Py_ssize_t nx, Py_ssize_t ny, Py_ssize_t nz, real* cubes, real* grid,
) noexcept nogil:
    """Scatter into the elements low to high of the map, or gather (back) from them."""
    cdef Py_ssize_t at, row, j, k, place, begin
    cdef real* elements
    cdef real* ahead
    if not back:
        memset(grid + low, 0, (high - low) * sizeof(real))
    for at in range(count):
        elements = cubes + planes[at] * ny * nz
        # What the processor doesn't foresee, because planes follow each other by their places.
        ahead = cubes + planes[min(at + 2, count - 1)] * ny * nz
        place = wa[planes[at]]
        row = planes[at] // nx * ny
        for j in range(ny):
            prefetch(ahead + j * nz)
            begin = split[row + j]
            if begin > 0:
                one_run(back, place + first[row + j], low, high, begin, elements, grid)
                if begin < nz:
                    one_run(
                        back, place + second[row + j], low, high, nz - begin, elements + begin, grid
                    )
            else:
                for k in range(nz):
                    one_run(
                        back, place + wbwc[(row + j) * nz + k], low, high, 1, elements + k, grid
                    )
            elements = elements + nz


def move(
    # IN: whether cubes are written and the map is read; the planes that reach every part; and runs
    bint back,
    const integer[:, ::1] wa,
    const integer[:, :, ::1] wbwc,
    const long long[::1] planes,
    const long long[::1] pointers,
    Py_ssize_t part,
    const long long[:, ::1] first,
    const long long[:, ::1] second,
    const int[:, ::1] split,
    # IN and OUT, or OUT and IN: the former may be read-only
    const real[:, :, :, ::1] cubes,
    const real[::1] grid,
    int threads,
):
    cdef Py_ssize_t parts = pointers.shape[0] - 1, p, size = grid.shape[0]
    cdef Py_ssize_t nx = cubes.shape[1], ny = cubes.shape[2], nz = cubes.shape[3]
    for p in prange(parts, num_threads=threads, schedule="dynamic", nogil=True):
        one_part(
            back, p * part, min((p + 1) * part, size), &planes[pointers[p]],
            pointers[p + 1] - pointers[p], &wa[0, 0], &wbwc[0, 0, 0], &first[0, 0],
            &second[0, 0], &split[0, 0], nx, ny, nz, <real*>&cubes[0, 0, 0, 0], <real*>&grid[0],
        )
