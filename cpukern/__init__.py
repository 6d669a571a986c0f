"""CPU kernels: the Cython and the Numba ones, one file an op, and the rules they share."""
