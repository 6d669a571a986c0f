"""GPU kernels in Triton, one file an op; importing the package registers them all."""

from gpukern import planarity

__all__ = ["planarity"]
