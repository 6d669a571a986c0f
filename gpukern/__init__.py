"""GPU kernels in Triton, one file an op."""
