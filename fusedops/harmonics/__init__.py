"""Wigner D matrices of real spherical harmonics, for the rotations that turn edges to an axis."""

from fusedops.harmonics.op import wigner_d, wigner_d_of

__all__ = [
    "wigner_d",
    "wigner_d_of",
]
