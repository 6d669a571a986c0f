"""The planarity restraint: how far groups of atoms are from their best planes."""

from fusedops.planarity.op import planarity_nll, plane_deviations
from fusedops.planarity.plan import FITS as FITS
from fusedops.planarity.plan import Fit as Fit
from fusedops.planarity.plan import Planes

__all__ = [
    "Planes",
    "planarity_nll",
    "plane_deviations",
]
