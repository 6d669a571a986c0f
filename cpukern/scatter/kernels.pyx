# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Structured scatter and gather on the CPU; one thread owns each part of the map.

A part has a list of the planes that reach it, in the order of the cubes. Every element is summed in
this order, whatever the parts and the threads. Elements with indices outside of the part are skipped,
so no index can lead out of the map.
"""

from libc.string cimport memset

from cpukern._cpu cimport Share, in_shares
from cpukern.arrays cimport elements

# `restrict` tells the compiler that cubes and map don't overlap, so that loops become vector code.
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
    /* Explicit vectors: runs are short, and compilers turn plain copies into calls. */
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
    """Find the runs of a cube's rows, and their least and largest offsets.

    A row is a run of its first `split` elements and a run of the others, as in a row that wraps
    around; a row of more runs has no split.
    """
    cdef Py_ssize_t j, k, begin
    cdef const integer* at
    low[0] = high[0] = places[0]
    for j in range(rows):
        at = places + j * length
        begin = length
        if not is_run(at, length):
            begin = 1
            while is_run(at + begin - 1, 2):
                begin = begin + 1
            if not is_run(at + begin, length - begin):
                begin = 0
        first[j] = at[0]
        second[j] = at[begin] if begin < length else 0
        split[j] = begin
        if begin > 0:
            # Either end of a run may be the least: its numbers may wrap around their dtype.
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
    """Find the first and the last part that a plane reaches; return whether it lies in the map.

    A plane that leaves the map reaches no part, so its offsets are never used.
    """
    cdef unsigned long long begin = <unsigned long long>start + <unsigned long long>low
    cdef unsigned long long end = <unsigned long long>start + <unsigned long long>high
    # The sum of two negative numbers may overflow 64 bits.
    cdef bint leaves = (start < 0 and low < 0) or begin >= size or end >= size
    span[0] = 0 if leaves else <int>(begin >> bits)
    span[1] = -1 if leaves else <int>(end >> bits)
    return not leaves


# The arguments of a call. Shares get a pointer to a struct with typed pointers to arrays, so each type
# has a function of its own.
cdef struct Survey:
    const void* wa
    const void* wbwc
    unsigned long long size
    int bits
    Py_ssize_t cubes
    Py_ssize_t nx
    Py_ssize_t ny
    Py_ssize_t nz
    long long* first
    long long* second
    int* split
    long long* low
    long long* high
    int* spans
    long long* ends
    Py_ssize_t shares
    Py_ssize_t parts

cdef struct Fill:
    const int* spans
    int bits
    Py_ssize_t cubes
    Py_ssize_t nx
    long long* at
    Py_ssize_t shares
    Py_ssize_t parts
    long long* planes

cdef struct Move:
    bint back
    bint wide
    const void* wa
    const void* wbwc
    const long long* planes
    const long long* pointers
    Py_ssize_t part
    const long long* first
    const long long* second
    const int* split
    Py_ssize_t nx
    Py_ssize_t ny
    Py_ssize_t nz
    void* cubes
    void* grid
    Py_ssize_t size


cdef void some_surveys(
    const integer* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef Survey* call = <Survey*>given
    cdef const integer* wa = <const integer*>call.wa
    cdef Py_ssize_t cubes = call.cubes, nx = call.nx, ny = call.ny, s, c, i
    cdef long long* ends
    cdef int* span
    for s in range(begin, end):
        ends = call.ends + 2 * s * call.parts
        for c in range(cubes * s // call.shares, cubes * (s + 1) // call.shares):
            one_cube(
                <const integer*>call.wbwc + c * ny * call.nz, ny, call.nz, call.first + c * ny,
                call.second + c * ny, call.split + c * ny, call.low + c, call.high + c,
            )
            for i in range(nx):
                span = call.spans + 2 * (c * nx + i)
                if one_span(
                    wa[c * nx + i], call.low[c], call.high[c], call.size, call.bits, span
                ):
                    ends[span[0]] += 1
                    ends[call.parts + span[1]] += 1


def survey(
    # IN: a part has 2**bits elements, and a thread a share of the cubes
    const integer[:, ::1] wa,
    const integer[:, :, ::1] wbwc,
    unsigned long long size,
    int bits,
    # OUT
    long long[:, ::1] first,
    long long[:, ::1] second,
    int[:, ::1] split,
    long long[::1] low,
    long long[::1] high,
    int[:, :, ::1] spans,
    # IN, OUT, of zeros: the number of each share's planes that begin, and that end, in a part
    long long[:, :, ::1] ends,
):
    cdef Survey call
    call.wa = &wa[0, 0]
    call.wbwc = &wbwc[0, 0, 0]
    call.size = size
    call.bits = bits
    call.cubes = wbwc.shape[0]
    call.nx = wa.shape[1]
    call.ny = wbwc.shape[1]
    call.nz = wbwc.shape[2]
    call.first = &first[0, 0]
    call.second = &second[0, 0]
    call.split = &split[0, 0]
    call.low = &low[0]
    call.high = &high[0]
    call.spans = &spans[0, 0, 0]
    call.ends = &ends[0, 0, 0]
    call.shares = ends.shape[0]
    call.parts = ends.shape[2]
    with nogil:
        in_shares(<Share>some_surveys[integer], &call, call.shares, <int>call.shares)


cdef void some_fills(
    const void* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Fill* call = <const Fill*>given
    cdef Py_ssize_t cubes = call.cubes, nx = call.nx, s, c, i, p
    cdef const int* span
    cdef long long* at
    for s in range(begin, end):
        at = call.at + s * call.parts
        for c in range(cubes * s // call.shares, cubes * (s + 1) // call.shares):
            for i in range(nx):
                span = call.spans + 2 * (c * nx + i)
                for p in range(span[0] >> call.bits, (span[1] >> call.bits) + 1):
                    call.planes[at[p]] = c * nx + i
                    at[p] += 1


def fill(
    # IN: parts are joined by 2**bits
    const int[:, :, ::1] spans,
    int bits,
    # IN, overwritten: the positions in the list of each share's planes that reach a part
    long long[:, ::1] at,
    # OUT
    long long[::1] planes,
):
    cdef Fill call
    call.spans = &spans[0, 0, 0]
    call.bits = bits
    call.cubes = spans.shape[0]
    call.nx = spans.shape[1]
    call.at = &at[0, 0]
    call.shares = at.shape[0]
    call.parts = at.shape[1]
    call.planes = &planes[0] if planes.shape[0] else NULL
    with nogil:
        in_shares(&some_fills, &call, call.shares, <int>call.shares)


cdef inline void one_run(
    bint back, Py_ssize_t place, Py_ssize_t low, Py_ssize_t high, Py_ssize_t length, real* cubes,
    real* grid,
) noexcept nogil:
    """Add a run of a cube to the map at an offset, or copy it from there, between low and high."""
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
        # Planes are in the order of their offsets, which the processor's own prefetches don't follow.
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


cdef void some_parts(
    const real* given, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Move* call = <const Move*>given
    cdef Py_ssize_t p, low, high, count
    cdef const long long* planes
    for p in range(begin, end):
        low = p * call.part
        high = min(low + call.part, call.size)
        planes = call.planes + call.pointers[p]
        count = call.pointers[p + 1] - call.pointers[p]
        if call.wide:
            one_part(
                call.back, low, high, planes, count, <const long long*>call.wa,
                <const long long*>call.wbwc, call.first, call.second, call.split, call.nx, call.ny,
                call.nz, <real*>call.cubes, <real*>call.grid,
            )
        else:
            one_part(
                call.back, low, high, planes, count, <const int*>call.wa, <const int*>call.wbwc,
                call.first, call.second, call.split, call.nx, call.ny, call.nz, <real*>call.cubes,
                <real*>call.grid,
            )


def move(
    # IN: whether this is a gather; whether indices have 64 bits; the indices
    bint back,
    bint wide,
    wa,
    wbwc,
    # IN: the planes that reach every part, int64 both; and runs, int64, int64 and int32
    planes,
    pointers,
    Py_ssize_t part,
    first,
    second,
    split,
    # cubes IN and grid OUT, or for a gather the reverse; the input may be read-only
    const real[:, :, :, ::1] cubes,
    const real[::1] grid,
    int threads,
):
    cdef Move call
    cdef Py_ssize_t parts = len(pointers) - 1
    call.back = back
    call.wide = wide
    call.wa = elements(wa, 8 if wide else 4)
    call.wbwc = elements(wbwc, 8 if wide else 4)
    call.planes = <const long long*>elements(planes, 8)
    call.pointers = <const long long*>elements(pointers, 8)
    call.part = part
    call.first = <const long long*>elements(first, 8)
    call.second = <const long long*>elements(second, 8)
    call.split = <const int*>elements(split, 4)
    call.nx = cubes.shape[1]
    call.ny = cubes.shape[2]
    call.nz = cubes.shape[3]
    call.cubes = <void*>&cubes[0, 0, 0, 0]
    call.grid = <void*>&grid[0]
    call.size = grid.shape[0]
    with nogil:
        in_shares(<Share>some_parts[real], &call, parts, threads)
