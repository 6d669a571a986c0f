"""GPU kernels in Triton, one file an op; importing the package registers them all."""

from gpukern import conv, planarity, wigner

__all__ = ["conv", "planarity", "wigner"]
