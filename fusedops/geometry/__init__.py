"""Restraints of a model's geometry: bonds, angles, torsions, chirality, contacts and B factors."""

from fusedops.geometry.op import geometry_nll
from fusedops.geometry.plan import Restraints

__all__ = [
    "Restraints",
    "geometry_nll",
]
