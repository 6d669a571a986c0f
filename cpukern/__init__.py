"""CPU kernels: the Cython/OpenMP and the Numba ones, one file an op, and the rules they share."""
