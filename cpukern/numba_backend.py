"""Registers the Numba kernels: importing a kernel's module does."""

from cpukern import planarity_numba

__all__ = ["planarity_numba"]
