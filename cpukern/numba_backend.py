"""Registers the Numba kernels: importing a kernel's module does."""

from cpukern import (
    conv_numba,
    density_numba,
    planarity_numba,
    scatter_numba,
    trimul_numba,
    wigner_numba,
)

__all__ = [
    "conv_numba",
    "density_numba",
    "planarity_numba",
    "scatter_numba",
    "trimul_numba",
    "wigner_numba",
]
