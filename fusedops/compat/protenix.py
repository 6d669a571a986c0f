r"""Protenix's modules of the triangle update: OpenFold's, without biases.

::

    -from protenix.model.triangular.triangular import (
    +from fusedops.compat.protenix import (
         TriangleMultiplicationIncoming,
         TriangleMultiplicationOutgoing,
     )
"""

from __future__ import annotations

from fusedops.compat import openfold

__all__ = [
    "TriangleMultiplicationIncoming",
    "TriangleMultiplicationOutgoing",
    "TriangleMultiplicativeUpdate",
]


class TriangleMultiplicativeUpdate(openfold.TriangleMultiplicativeUpdate):
    _bias = False


class TriangleMultiplicationOutgoing(openfold.TriangleMultiplicationOutgoing):
    _bias = False


class TriangleMultiplicationIncoming(openfold.TriangleMultiplicationIncoming):
    _bias = False
