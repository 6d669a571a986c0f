"""The triangle multiplicative update of pair representations."""

from fusedops.trimul.op import Direction, Gate, Precision, triangle_multiplicative_update

__all__ = [
    "Direction",
    "Gate",
    "Precision",
    "triangle_multiplicative_update",
]
