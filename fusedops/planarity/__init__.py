"""The planarity restraint: how far groups of atoms are from their best planes."""

from fusedops.planarity.op import planarity_nll, plane_deviations
from fusedops.planarity.plan import FITS, Fit, Planes

__all__ = [
    "FITS",
    "Fit",
    "Planes",
    "planarity_nll",
    "plane_deviations",
]
