"""GPU kernels in Triton, one file an op; importing the package registers them all."""

from gpukern import conv, planarity

__all__ = ["conv", "planarity"]
