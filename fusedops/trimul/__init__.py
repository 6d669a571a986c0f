"""The triangle multiplicative update of pair representations."""

from fusedops.trimul.op import Direction as Direction
from fusedops.trimul.op import Gate as Gate
from fusedops.trimul.op import Precision as Precision
from fusedops.trimul.op import triangle_multiplicative_update

__all__ = [
    "triangle_multiplicative_update",
]
