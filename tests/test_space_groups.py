"""Space groups of structure files: their names, and the copies that they make."""

from __future__ import annotations

import numpy as np
import pytest

from fusedops import maps
from fusedops.restraints import find_contacts
from fusedops.scaling import solvent_mask
from fusedops.structure import StructureError
from structures import SMALL

gemmi = pytest.importorskip("gemmi")

CELL = "CRYST1   20.000   22.000   24.000  80.00 100.00  95.00 {:10s}  1\n"
ATOM = "ATOM      1  CA  ALA A   1       1.000   2.000   3.000  1.00 20.00           C  \n"


@pytest.mark.parametrize(("name", "copies"), [("P 1", 1), ("A 1", 2), ("C 1", 2), ("F 1", 4)])
def test_a_centred_cell_has_all_its_copies(name, copies, load):
    """gemmi takes each group of number 1 for P 1."""
    structure = load(CELL.format(name) + ATOM)
    atoms, grid = maps.scattering_atoms(structure).blurred(20), maps.crystal_grid(structure, 0.5)
    density = maps.density_map(atoms, grid)
    total = density.grid.array.mean() * grid.cell.volume
    assert total == pytest.approx(6 * copies, rel=1e-3)
    mask = solvent_mask(structure, grid)
    for move in maps.centring(grid.spacegroup):
        shift = np.multiply(move, mask.shape).astype(int).tolist()
        np.testing.assert_array_equal(np.roll(mask, shift, (0, 1, 2)), mask)
        rolled = np.roll(density.grid.array, shift, (0, 1, 2))
        np.testing.assert_allclose(rolled, density.grid.array, atol=1e-5)
    of_one = maps.MapGrid(grid.cell, gemmi.SpaceGroup("P 1"), grid.shape)
    alone = solvent_mask(load(CELL.format("P 1") + ATOM), of_one)
    assert (mask == 0).sum() == copies * (alone == 0).sum()


COLUMNS = "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id"
COLUMNS += " label_seq_id Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv"


def mmcif(more="", B="20"):
    lengths = "".join(f"_cell.length_{axis} 30\n" for axis in "abc")
    angles = "".join(f"_cell.angle_{angle} 90\n" for angle in ("alpha", "beta", "gamma"))
    columns = "".join(f"_atom_site.{name}\n" for name in COLUMNS.split())
    return f"data_x\n{lengths}{angles}{more}\nloop_\n{columns}ATOM 1 O O . HOH A 1 1 2 3 1 {B}\n"


@pytest.mark.parametrize(
    "tag",
    [
        "_symmetry.space_group_name_H-M 'P 21 21 21'",
        "_space_group.name_H-M_alt 'P 21 21 21'",
        "_space_group.name_Hall 'P 2ac 2ab'",
    ],
)
def test_a_space_group_has_a_name_in_several_places(tag, load):
    structure = load(mmcif(f"{tag}\n_space_group.IT_number 19"), "x.cif")
    assert maps.crystal_grid(structure, 1.0).spacegroup.hm == "P 21 21 21"
    assert len(structure.gemmi.cell.images) == 3


@pytest.mark.parametrize("tag", ["_symmetry.Int_Tables_number", "_space_group.IT_number"])
def test_a_number_alone_is_no_space_group(tag, load):
    with pytest.raises(StructureError, match=r"x\.cif: its space group has the number 19, and no"):
        maps.crystal_grid(load(mmcif(f"{tag} 19"), "x.cif"), 1.0)
    for number in ("1", "'1'", "?"):
        grid = maps.crystal_grid(load(mmcif(f"{tag} {number}"), "x.cif"), 1.0)
        assert grid.spacegroup.hm == "P 1"
    for name in ("H-M_alt", "Hall"):
        structure = load(mmcif(f"_space_group.name_{name} 'X 9'"), "x.cif")
        with pytest.raises(StructureError, match="the space group 'X 9' is unknown"):
            maps.crystal_grid(structure, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (mmcif(B="?"), r"x.cif: A/HOH 1 O has no B \(_atom_site.B_iso_or_equiv\)"),
        (mmcif(B="."), "A/HOH 1 O has no B"),
        (mmcif().replace("_atom_site.B_iso_or_equiv\n", "").replace(" 20\n", "\n"), "has no B"),
        (
            mmcif("_atom_site_anisotrop.B[1][1] 0.3"),
            r"it has _atom_site_anisotrop.B\[1\]\[1\]; it should have _atom_site_anisotrop.U",
        ),
        (SMALL.replace("aniso_U", "aniso_B"), "it has _atom_site_aniso_B_11; it should have"),
    ],
)
def test_a_b_that_is_not_read_is_an_error(text, message, load):
    structure = load(text, "x.cif")
    with pytest.raises(StructureError, match=message):
        maps.scattering_atoms(structure)


MOVED = """\
CRYST1   30.000   30.000   30.000  90.00  90.00  90.00 P 1           1
MTRIX1   1  1.000000  0.000000  0.000000        8.00000
MTRIX2   1  0.000000  1.000000  0.000000        0.00000
MTRIX3   1  0.000000  0.000000  1.000000        0.00000
"""


def test_contacts_with_copies_by_ncs_are_half_of_all_neighbours(load):
    """gemmi lists a pair once, from the end of the atom that comes first."""
    water = "HETATM{:5d}  O   HOH A{:4d}    {:8.3f}   0.000   0.000  1.00 20.00           O  \n"
    for places in ((0, 10), (10, 0)):
        rows = [water.format(n, n, x) for n, x in enumerate(places, 1)]
        contacts = find_contacts(load(MOVED + "".join(rows)), np.empty((0, 2), int))
        # The atom at 10 Å has the copy of the other at 8 Å.
        far = places.index(10)
        assert contacts["indices"].tolist() == [[far, 1 - far]]
        assert contacts["weights"].tolist() == [0.5]
