"""Functions for compiled kernels that become vector code in a loop."""

from libc.math cimport INFINITY
from libc.string cimport memcpy

# The types that kernels compute in.
ctypedef fused real:
    float
    double


cdef inline real exponential(real x) noexcept nogil:
    """e^x to two units in the last place, in vector code; infinite from 88 (709) on."""
    cdef real n, r, scale, value
    cdef bint fits
    cdef int single
    cdef long long wide
    # Constants are cast: a bare one is a double, and would make the expression double.
    if real is float:
        fits = not x > <float>88.0
        x = min(max(x, <float>-87.0), <float>88.0)
        n = (x * <float>1.44269504 + <float>12582912.0) - <float>12582912.0
        r = x - n * <float>0.693359375 + n * <float>2.12194440e-4
        value = <float>(1 / 5040.0)
        value = value * r + <float>(1 / 720.0)
        value = value * r + <float>(1 / 120.0)
        value = value * r + <float>(1 / 24.0)
        value = value * r + <float>(1 / 6.0)
        value = value * r + <float>0.5
        value = value * r + <float>1.0
        value = value * r + <float>1.0
        # A NaN can't become an int; `value` carries it.
        single = (<int>(n if n > <float>-127.0 else <float>-127.0) + 127) << 23
        memcpy(&scale, &single, 4)
    else:
        fits = not x > 709.0
        x = min(max(x, -708.0), 709.0)
        n = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
        r = x - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10
        value = 1 / 6227020800.0
        value = value * r + 1 / 479001600.0
        value = value * r + 1 / 39916800.0
        value = value * r + 1 / 3628800.0
        value = value * r + 1 / 362880.0
        value = value * r + 1 / 40320.0
        value = value * r + 1 / 5040.0
        value = value * r + 1 / 720.0
        value = value * r + 1 / 120.0
        value = value * r + 1 / 24.0
        value = value * r + 1 / 6.0
        value = value * r + 0.5
        value = value * r + 1
        value = value * r + 1
        wide = <long long>(<int>(n if n > -1023.0 else -1023.0) + 1023) << 52
        memcpy(&scale, &wide, 8)
    return value * scale if fits else <real>INFINITY
