"""CPU kernels in Cython and Numba, a folder for each family of ops, and the rules they share."""
