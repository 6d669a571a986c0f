r"""OpenFold 3's modules of the triangle update: OpenFold's, of which only the fused have biases.

::

    -from openfold3.core.model.layers.triangular_multiplicative_update import (
    +from fusedops.compat.openfold3 import (
         TriangleMultiplicationIncoming,
         TriangleMultiplicationOutgoing,
     )
"""

from __future__ import annotations

from fusedops.compat.openfold import (
    FusedTriangleMultiplicationIncoming,
    FusedTriangleMultiplicationOutgoing,
    FusedTriangleMultiplicativeUpdate,
)
from fusedops.compat.protenix import (
    TriangleMultiplicationIncoming,
    TriangleMultiplicationOutgoing,
    TriangleMultiplicativeUpdate,
)

__all__ = [
    "FusedTriangleMultiplicationIncoming",
    "FusedTriangleMultiplicationOutgoing",
    "FusedTriangleMultiplicativeUpdate",
    "TriangleMultiplicationIncoming",
    "TriangleMultiplicationOutgoing",
    "TriangleMultiplicativeUpdate",
]
