"""What the compiled kernels share: scratch memory, and arrays without a memoryview each.

A memoryview is a Python object, which takes 0.1 µs: with many arrays that is more than small calls
do. The arrays of a packed argument, whose dtypes its class knows, are read through a buffer alone.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize


cdef inline void* elements(object array, Py_ssize_t size) except? NULL:
    """Return where the elements of so many bytes of a contiguous array begin.

    Who calls holds the array while they are read.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS)
    PyBuffer_Release(&view)
    if view.itemsize != size:
        raise ValueError(f"elements of {view.itemsize} bytes; they should have {size}")
    return view.buf


cdef inline bytearray room(Py_ssize_t size):
    """Return memory that holds anything."""
    return PyByteArray_FromStringAndSize(NULL, size)


cdef inline char* of(bytearray memory) noexcept:
    return PyByteArray_AS_STRING(memory)


cdef inline Py_ssize_t whole_lines(Py_ssize_t size) noexcept nogil:
    """Return a number of bytes up to a multiple of a cache line, for threads to keep apart."""
    return (size + 63) // 64 * 64
