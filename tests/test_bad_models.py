"""A refinement's parts say what they leave out of a model that lacks atoms, or has odd ones."""

from __future__ import annotations

import numpy as np
import pytest

import fusedops
from fusedops import maps
from fusedops.restraints import derive_geometry, find_contacts
from fusedops.scaling import solvent_mask
from fusedops.structure import StructureError, planar_groups
from structures import pdb

pytest.importorskip("gemmi")

CELL = "CRYST1   30.000   22.000   24.000  90.00 100.00  90.00 P 1 21 1\n"
RING = "CB 0 1.5 0 CG 0 3 0 CD1 1.2 3.7 0 CD2 -1.2 3.7 0 CE1 1.2 5.1 0 CE2 -1.2 5.1 0 CZ 0 5.8 0"


@pytest.fixture
def bad(load):
    """A phenylalanine without CZ, an unknown residue, and a water whose occupancy is zero."""
    text = pdb(
        f"PHE 1 {RING.replace(' CZ 0 5.8 0', '')}", "XYZ 2 C1 9 0 0 C2 10.5 0 0", "HOH 3 O 13.4 0 0"
    )
    head, _, tail = text.rpartition("  1.00 10.00")
    return load(f"{CELL}{head}  0.00 10.00{tail}")


def test_planes(bad):
    found = planar_groups(bad)
    assert (found.count, found.incomplete) == (0, ["A/PHE 1 ring"])
    assert (found.skipped, found.waters) == ({"XYZ": 1}, 1)


def test_geometry(bad):
    found = derive_geometry(bad)
    assert found.skipped == {"HOH": 1}
    # The ring's bonds but two, and the unknown residue's.
    assert len(found.columns["bonds"]["indices"]) == 5 + 1
    bonds = found.columns["bonds"]["indices"]
    contacts = find_contacts(bad, bonds, bad.xyz)
    water = len(bad.xyz) - 1
    assert water not in contacts["indices"]


def test_density_and_mask(bad):
    atoms, grid = maps.scattering_atoms(bad).blurred(20.0), maps.crystal_grid(bad, 0.8)
    with_water, without = (
        fusedops.gaussian_density(
            *(atoms.xyz[n], atoms.b[n], atoms.occupancy[n], atoms.amplitudes[n], atoms.widths[n]),
            fusedops.Lattice(grid.matrix, grid.shape),
        )
        for n in (slice(None), slice(-1))
    )
    np.testing.assert_array_equal(with_water, without)
    x, y, z = np.rint(np.linalg.inv(grid.matrix) @ bad.xyz[-1] * grid.shape).astype(int)
    assert solvent_mask(bad, grid)[x, y, z] == 1
    x, y, z = np.rint(np.linalg.inv(grid.matrix) @ bad.xyz[1] * grid.shape).astype(int)
    assert solvent_mask(bad, grid)[x, y, z] == 0


def test_an_unknown_element_is_refused(load):
    text = CELL + pdb("LIG 1 C1 0 0 0 C2 1.5 0 0").replace("           C", "           X")
    structure = load(text)
    with pytest.raises(StructureError, match="A/LIG 1 C1 is of an unknown element"):
        maps.scattering_atoms(structure)
    with pytest.raises(StructureError, match="A/LIG 1 C1 is of an unknown element"):
        solvent_mask(structure, maps.crystal_grid(structure, 0.8))


@pytest.mark.parametrize(
    ("column", "text", "reason"),
    [
        (54, "   nan", "the occupancy of A/LIG 1 C1 is nan; it should be finite"),
        (60, "   inf", "the B of A/LIG 1 C1 is inf; it should be finite"),
        (60, "   B.0", "line 2 has '   B.0' for B; it should be a number"),
    ],
)
def test_numbers_that_are_none(load, column, text, reason):
    head, line = (CELL + pdb("LIG 1 C1 0 0 0")).splitlines()
    with pytest.raises(StructureError, match=reason):
        maps.scattering_atoms(load(f"{head}\n{line[:column]}{text}{line[column + 6 :]}\n"))
