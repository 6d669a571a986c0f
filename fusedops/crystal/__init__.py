"""Maps of crystals: their symmetry, and their structure factors.

Both are linear in the map, so each has its adjoint for a gradient, and derivatives of every order.
"""

from fusedops.crystal.factors import structure_factors
from fusedops.crystal.plan import Reflections
from fusedops.crystal.symmetry import symmetrize

__all__ = ["Reflections", "structure_factors", "symmetrize"]
