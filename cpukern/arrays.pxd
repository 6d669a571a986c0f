"""Scratch memory for the compiled kernels, and arrays without memoryviews.

A memoryview is a Python object and takes 0.1 µs: many of them cost more than the work of a small call.
A packed argument's class knows the dtypes of its arrays, so these are read through plain buffers.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize


cdef inline void* elements(object array, Py_ssize_t size) except? NULL:
    """Return the address of a contiguous array's elements, after a check of their size in bytes.

    The caller must hold the array while its elements are read.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS)
    PyBuffer_Release(&view)
    if view.itemsize != size:
        raise ValueError(f"elements of {view.itemsize} bytes; they should have {size}")
    return view.buf


cdef inline bytearray room(Py_ssize_t size):
    """Return uninitialized memory."""
    return PyByteArray_FromStringAndSize(NULL, size)


cdef inline char* of(bytearray memory) noexcept:
    return PyByteArray_AS_STRING(memory)


cdef inline Py_ssize_t whole_lines(Py_ssize_t size) noexcept nogil:
    """Round a number of bytes up to whole cache lines, to keep threads apart."""
    return (size + 63) // 64 * 64


cdef inline Py_ssize_t within(Py_ssize_t value, Py_ssize_t low, Py_ssize_t high) noexcept nogil:
    """Return a number clipped to a range, such as a place that an index names in an array."""
    return min(max(value, low), high)
