# cython: language_level=3
"""Asks the CPU which instruction set level it, and its operating system, support."""

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #endif
    static int fusedops_level(void) {
    #ifdef FUSEDOPS_X86_64_LEVELS
        __builtin_cpu_init();
        if (__builtin_cpu_supports("x86-64-v4")) return 4;
        if (__builtin_cpu_supports("x86-64-v3")) return 3;
        if (__builtin_cpu_supports("x86-64-v2")) return 2;
        return 1;
    #else
        return 0;
    #endif
    }
    static int fusedops_openmp(void) {
    #ifdef _OPENMP
        return omp_get_num_procs() > 0;
    #else
        return 0;
    #endif
    }
    """
    int fusedops_level()
    int fusedops_openmp()


def x86_64_level():
    """Return N for x86-64-vN, or 0 where this build has a single, baseline module."""
    return fusedops_level()


def has_openmp():
    """Return whether the kernels were built with OpenMP; its runtime loads with this module."""
    return bool(fusedops_openmp())
