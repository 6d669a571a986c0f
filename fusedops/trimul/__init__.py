"""The triangle multiplicative update of pair representations."""

from fusedops.trimul.op import Direction, triangle_multiplicative_update

__all__ = [
    "Direction",
    "triangle_multiplicative_update",
]
