"""GPU kernels in Triton, one file an op; importing the package registers them all."""

from gpukern import conv, density, planarity, scatter, trimul, wigner

__all__ = ["conv", "density", "planarity", "scatter", "trimul", "wigner"]
