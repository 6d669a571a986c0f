# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The steps around the products of an SO(2) convolution, and gates, on the CPU.

All loops run along channels, or the numbers of an order and sign, in short runs where values between
two loops are to stay in registers or the nearest cache.
"""

from cpukern._cpu cimport Share, in_shares
from cpukern.vectors cimport exponential, real

cdef enum:
    LANES = 64

# Rows of an edge; `step` is the distance to the next edge's.
cdef struct Rows:
    char* at
    Py_ssize_t step

cdef struct Gates:
    Rows gates
    Rows x
    Rows dout
    Rows ddgates
    Rows ddx
    Rows rows_out
    Rows ddout
    Rows gates_out
    const long long* rows
    const long long* starts
    Py_ssize_t edges
    Py_ssize_t lmax
    Py_ssize_t channels
    int order


def scale(
    const real[:, :, :] x,         # IN   (n, signs, length), numbers without gaps
    const real[:, :] radial,       # IN   (n, length), or None for ones
    real[:, :, :] out,             # OUT  (signs, n, length); a third has the sums of two signs
):
    cdef Py_ssize_t e, s, i, n = x.shape[2], signs = x.shape[1]
    cdef const real* row
    cdef const real* factor
    cdef real* to
    cdef real* plus
    cdef real* minus
    if x.shape[0] == 0 or n == 0:
        return
    with nogil:
        for e in range(x.shape[0]):
            for s in range(signs):
                row, to = &x[e, s, 0], &out[s, e, 0]
                if radial is None:
                    for i in range(n):
                        to[i] = row[i]
                else:
                    factor = &radial[e, 0]
                    for i in range(n):
                        to[i] = row[i] * factor[i]
            if out.shape[0] > signs:
                plus, minus, to = &out[0, e, 0], &out[1, e, 0], &out[2, e, 0]
                for i in range(n):
                    to[i] = plus[i] + minus[i]


cdef inline void pulled_back(
    const real* row, const real* more, const real* x, const real* factor, real* dx, real* dradial,
    bint add, Py_ssize_t n
) noexcept nogil:
    """Pull the sum of two runs back through a product with factors."""
    cdef Py_ssize_t i
    if dradial != NULL:
        if add and more != NULL:
            for i in range(n):
                dradial[i] = dradial[i] + (row[i] + more[i]) * x[i]
        elif add:
            for i in range(n):
                dradial[i] = dradial[i] + row[i] * x[i]
        elif more != NULL:
            for i in range(n):
                dradial[i] = (row[i] + more[i]) * x[i]
        else:
            for i in range(n):
                dradial[i] = row[i] * x[i]
    if dx != NULL:
        if factor != NULL and more != NULL:
            for i in range(n):
                dx[i] = (row[i] + more[i]) * factor[i]
        elif factor != NULL:
            for i in range(n):
                dx[i] = row[i] * factor[i]
        elif more != NULL:
            for i in range(n):
                dx[i] = row[i] + more[i]
        else:
            for i in range(n):
                dx[i] = row[i]


def unscale(
    const real[:, :] plus,         # IN   (n, length), numbers without gaps
    const real[:, :] minus,        # IN   the same of the other sign, or None
    const real[:, :] shared,       # IN   added to both, or None
    const real[:, :, :] x,         # IN   (n, signs, length), or None
    const real[:, :] radial,       # IN   (n, length), or None for ones
    real[:, :, :] dx,              # OUT  (n, signs, length), or None
    real[:, :] dradial,            # OUT  (n, length), or None
):
    cdef Py_ssize_t e, s, n = plus.shape[1], signs = 1 if minus is None else 2
    if plus.shape[0] == 0 or n == 0:
        return
    with nogil:
        for e in range(plus.shape[0]):
            for s in range(signs):
                pulled_back(
                    &minus[e, 0] if s else &plus[e, 0],
                    NULL if shared is None else &shared[e, 0],
                    NULL if dradial is None else &x[e, s, 0],
                    NULL if radial is None else &radial[e, 0],
                    NULL if dx is None else &dx[e, s, 0],
                    NULL if dradial is None else &dradial[e, 0],
                    s == 1, n,
                )


cdef inline const real* given(const real* of_type, const Rows* rows, Py_ssize_t e) noexcept nogil:
    return <const real*>rows.at + e * rows.step if rows.at != NULL else NULL


cdef inline void logistic(const real* g, Py_ssize_t n, real* s) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        s[i] = <real>1.0 / (<real>1.0 + exponential(-g[i]))


cdef inline void first_row(
    const Gates* call, const real* x, const real* g, const real* u, Py_ssize_t n,
    real* rows_out, real* ddout, int order
) noexcept nogil:
    """Put degree 0 of some channels through SiLU."""
    cdef real s[LANES]
    cdef real slope, first
    cdef Py_ssize_t i
    logistic(x, n, s)
    for i in range(n):
        slope = s[i] * (<real>1.0 - s[i])
        first = s[i] + x[i] * slope
        if order == 0:
            rows_out[i] = x[i] * s[i]
        elif order == 1:
            if rows_out != NULL:
                rows_out[i] = g[i] * first
        else:
            if rows_out != NULL:
                rows_out[i] = (
                    u[i] * g[i] * slope * (<real>2.0 + x[i] * (<real>1.0 - <real>2.0 * s[i]))
                    if u != NULL else <real>0.0
                )
            if ddout != NULL:
                ddout[i] = u[i] * first if u != NULL else <real>0.0


cdef inline void one_gate(
    const Gates* call, Py_ssize_t l, Py_ssize_t c, Py_ssize_t n, const real* gates, const real* x,
    const real* g, const real* v, const real* u, real* rows_out, real* ddout, real* gates_out,
    int order
) noexcept nogil:
    """Put a degree's rows of some channels through their gates."""
    cdef real s[LANES]
    cdef real pulled[LANES]
    cdef real pushed[LANES]
    cdef real slope[LANES]
    cdef Py_ssize_t i, k, r
    cdef Py_ssize_t C = call.channels
    logistic(gates, n, s)
    for i in range(n):
        pulled[i] = pushed[i] = <real>0.0
        slope[i] = s[i] * (<real>1.0 - s[i])
    for k in range(call.starts[l], call.starts[l + 1]):
        r = call.rows[k] * C + c
        if order == 0:
            for i in range(n):
                rows_out[r + i] = x[r + i] * s[i]
        elif order == 1:
            if rows_out != NULL:
                for i in range(n):
                    rows_out[r + i] = g[r + i] * s[i]
            if gates_out != NULL:
                for i in range(n):
                    pulled[i] += x[r + i] * g[r + i]
        else:
            if rows_out != NULL:
                if v != NULL:
                    for i in range(n):
                        rows_out[r + i] = v[i] * slope[i] * g[r + i]
                else:
                    for i in range(n):
                        rows_out[r + i] = <real>0.0
            if ddout != NULL:
                for i in range(n):
                    ddout[r + i] = u[r + i] * s[i] if u != NULL else <real>0.0
                if v != NULL:
                    for i in range(n):
                        ddout[r + i] = ddout[r + i] + v[i] * slope[i] * x[r + i]
            if gates_out != NULL:
                for i in range(n):
                    pulled[i] += x[r + i] * g[r + i]
                if u != NULL:
                    for i in range(n):
                        pushed[i] += u[r + i] * g[r + i]
    if order > 0 and gates_out != NULL:
        for i in range(n):
            if order == 1:
                gates_out[i] = slope[i] * pulled[i]
            else:
                gates_out[i] = slope[i] * pushed[i]
                if v != NULL:
                    gates_out[i] += v[i] * slope[i] * (<real>1.0 - <real>2.0 * s[i]) * pulled[i]


cdef inline void edges(
    const real* of_type, const Gates* call, Py_ssize_t begin, Py_ssize_t end, int order
) noexcept nogil:
    cdef Py_ssize_t e, l, c, at, n, C = call.channels
    cdef const real* gates
    cdef const real* x
    cdef const real* g
    cdef const real* v
    cdef const real* u
    cdef real* rows_out
    cdef real* ddout
    cdef real* gates_out
    for e in range(begin, end):
        gates, x = given(of_type, &call.gates, e), given(of_type, &call.x, e)
        g, v = given(of_type, &call.dout, e), given(of_type, &call.ddgates, e)
        u = given(of_type, &call.ddx, e)
        rows_out = <real*>given(of_type, &call.rows_out, e)
        ddout = <real*>given(of_type, &call.ddout, e)
        gates_out = <real*>given(of_type, &call.gates_out, e)
        c = 0
        while c < C:
            n = min(<Py_ssize_t>LANES, C - c)
            first_row(
                call, x + c, g + c if g != NULL else NULL, u + c if u != NULL else NULL, n,
                rows_out + c if rows_out != NULL else NULL,
                ddout + c if ddout != NULL else NULL, order,
            )
            for l in range(1, call.lmax + 1):
                at = (l - 1) * C + c
                one_gate(
                    call, l, c, n, gates + at, x, g, v + at if v != NULL else NULL, u, rows_out,
                    ddout, gates_out + at if gates_out != NULL else NULL, order,
                )
            c += LANES


cdef void shares(
    const real* of_type, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil:
    cdef const Gates* call = <const Gates*>of_type
    # Constant orders, so that the compiler makes a loop for each.
    if call.order == 0:
        edges(of_type, call, begin, end, 0)
    elif call.order == 1:
        edges(of_type, call, begin, end, 1)
    else:
        edges(of_type, call, begin, end, 2)


cdef Rows none() noexcept:
    cdef Rows rows
    rows.at, rows.step = NULL, 0
    return rows


def gated(
    # IN: None where there is nothing; contiguous but for the first axis
    const real[:, :] gates,
    const real[:, :, :] x,
    const real[:, :, :] dout,
    const real[:, :] ddgates,
    const real[:, :, :] ddx,
    const long long[::1] rows,
    const long long[::1] starts,
    # OUT: None where nothing is wanted
    real[:, :, ::1] rows_out,
    real[:, :, ::1] ddout,
    real[:, ::1] gates_out,
    int order,
    int threads,
):
    cdef Gates call
    cdef Py_ssize_t one = sizeof(real)
    call.edges, call.channels, call.lmax = x.shape[0], x.shape[2], starts.shape[0] - 2
    call.order = order
    if call.edges == 0 or call.channels == 0:
        return
    call.rows, call.starts = &rows[0], &starts[0]
    call.gates = call.dout = call.ddgates = call.ddx = none()
    call.rows_out = call.ddout = call.gates_out = none()
    call.x.at, call.x.step = <char*>&x[0, 0, 0], x.strides[0] // one
    if call.lmax:
        call.gates.at, call.gates.step = <char*>&gates[0, 0], gates.strides[0] // one
        if ddgates is not None:
            call.ddgates.at, call.ddgates.step = <char*>&ddgates[0, 0], ddgates.strides[0] // one
        if gates_out is not None:
            call.gates_out.at, call.gates_out.step = <char*>&gates_out[0, 0], gates_out.shape[1]
    if dout is not None:
        call.dout.at, call.dout.step = <char*>&dout[0, 0, 0], dout.strides[0] // one
    if ddx is not None:
        call.ddx.at, call.ddx.step = <char*>&ddx[0, 0, 0], ddx.strides[0] // one
    if rows_out is not None:
        call.rows_out.at = <char*>&rows_out[0, 0, 0]
        call.rows_out.step = rows_out.shape[1] * rows_out.shape[2]
    if ddout is not None:
        call.ddout.at = <char*>&ddout[0, 0, 0]
        call.ddout.step = ddout.shape[1] * ddout.shape[2]
    with nogil:
        in_shares(<Share>shares[real], &call, call.edges, threads)
