# A function that does items `begin` to `end` of a call; threads are numbered from 0.
ctypedef void (*Share)(
    const void* call, Py_ssize_t begin, Py_ssize_t end, int thread
) noexcept nogil

cdef void in_shares(
    Share work, const void* call, Py_ssize_t items, int threads
) noexcept nogil
