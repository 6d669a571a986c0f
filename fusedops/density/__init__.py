"""The density of atoms on a periodic grid: sums of Gaussians, added straight to the map."""

from fusedops.density.op import OnBad as OnBad
from fusedops.density.op import atom_radius, bad_atoms, gaussian_density
from fusedops.density.plan import CellLike, Lattice

__all__ = [
    "CellLike",
    "Lattice",
    "atom_radius",
    "bad_atoms",
    "gaussian_density",
]
