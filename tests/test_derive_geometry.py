"""Restraints of geometry that a structure gives itself, of good and bad models."""

from __future__ import annotations

import numpy as np
import pytest

import fusedops
from fusedops.restraints import derive_geometry, find_contacts
from structures import pdb

pytest.importorskip("gemmi")


def rows(columns, structure):
    """Return each restraint's atoms' names with its ideal and sigma."""
    names = [label.rpartition(" ")[2] for label in structure.labels]
    return {
        " ".join([names[i] for i in index]): pair
        for index, *pair in zip(
            columns["indices"], columns["ideals"], columns["sigmas"], strict=True
        )
    }


def test_means_over_alike_atoms(load):
    # Two molecules are C-C-O, and a bond's ideal and sigma are of both; the third is another.
    structure = load(
        pdb(
            "LIG 1 C1 0 0 0 C2 1.5 0 0 O3 1.5 1.4 0",
            "LIG 2 C4 9 0 0 C5 10.6 0 0 O6 10.6 1.4 0",
            "XYZ 3 C7 19 0 0 C8 20.3 0 0",
        )
    )
    found = derive_geometry(structure)
    bonds = rows(found.columns["bonds"], structure)
    assert list(bonds) == ["C1 C2", "C2 O3", "C4 C5", "C5 O6", "C7 C8"]
    want = [*2 * [[1.55, 0.05], [1.4, 0.02]], [1.3, 0.02]]
    np.testing.assert_allclose(list(bonds.values()), want)
    angles = rows(found.columns["angles"], structure)
    assert list(angles) == ["C1 C2 O3", "C4 C5 O6"]
    np.testing.assert_allclose(list(angles.values()), 2 * [[90, 2]])
    assert len(found.columns["chirals"]["indices"]) == 0
    np.testing.assert_array_equal(
        found.columns["b_pairs"]["indices"], found.columns["bonds"]["indices"]
    )
    assert not found.skipped
    assert not found.warnings


@pytest.mark.parametrize("x", [0.9, -0.9])
def test_chiral_centres_and_hydrogens(load, x):
    ends = f"N2 {x} 0.9 0.9 C3 {x} -0.9 -0.9 O4 {-x} 0.9 -0.9 H5 {-0.7 * x} -0.6 0.6"
    structure = load(pdb(f"LIG 1 C1 0 0 0 {ends}"))
    found = derive_geometry(structure)
    (volume,) = found.columns["chirals"]["ideals"]
    restraints = fusedops.Restraints(chirals=found.columns["chirals"])
    model, mirrored = (structure.xyz * [side, 1, 1] for side in (1, -1))
    at_ideal, off = (fusedops.geometry_nll(xyz, restraints)[3] for xyz in (model, mirrored))
    assert off - at_ideal == pytest.approx((2 * volume / 0.2) ** 2 / 2)
    assert len(found.columns["bonds"]["indices"]) == 4
    assert len(found.columns["b_pairs"]["indices"]) == 3


def test_alternatives_share_atoms_but_no_restraint(load):
    structure = load(pdb("LIG 1 C1 0 0 0 C2.A 1.5 0 0 C2.B 1.4 0.6 0 O3.A 1.5 1.4 0 O3.B 1 1.8 0"))
    found = derive_geometry(structure)
    assert set(rows(found.columns["bonds"], structure)) == {
        *("C1 C2.A", "C1 C2.B", "C2.A O3.A", "C2.B O3.B")
    }
    assert set(rows(found.columns["angles"], structure)) == {"C1 C2.A O3.A", "C1 C2.B O3.B"}


def test_a_main_alternative_without_a_label(load):
    """Its atoms aren't common to all, and only those without another are."""
    structure = load(pdb("LIG 1 C1 0 0 0 C2 1.5 0 0 C2.B 1.4 0.6 0 O3 1.5 1.4 0 O3.B 1 1.8 0"))
    found = derive_geometry(structure)
    bonds = found.columns["bonds"]
    assert set(rows(bonds, structure)) == {"C1 C2", "C1 C2.B", "C2 O3", "C2.B O3.B"}
    assert set(rows(found.columns["angles"], structure)) == {"C1 C2 O3", "C1 C2.B O3.B"}
    near = find_contacts(structure, bonds["indices"])["indices"].tolist()
    assert not near


def test_no_atom_is_lost_unsaid(load):
    """Residues without bonds, bonds to images, atoms at one place and of no occupancy."""
    cell = "CRYST1   12.000   12.000   12.000  90.00  90.00  90.00 P 1           1\n"
    text = pdb(
        "LIG 1 C1 0 0 0 C2 1.5 0 0 C3 1.5 0 0", "HOH 2 O 6 6 6", "XYZ 3 O1 11.5 6 0 O2 0.9 6 0"
    )
    structure = load(cell + text.replace("  1.00 10.00", "  0.00 10.00"))
    found = derive_geometry(structure)
    assert set(rows(found.columns["bonds"], structure)) == {"C1 C2", "C1 C3"}
    assert found.skipped == {"HOH": 1, "XYZ": 1}
    assert sorted(found.warnings) == [
        "1 bonds to images in the crystal have no restraints",
        "1 pairs of atoms at one place have no restraints",
    ]


def test_an_atom_far_from_its_residue_is_told(load):
    structure = load(pdb("LIG 1 C1 0 0 0 C2 1.5 0 0 C3 9 0 0", "HOH 2 O 6 6 6"))
    found = derive_geometry(structure)
    assert found.warnings == ["1 atoms without bonds have no restraints: A/LIG 1 C3"]
    assert found.skipped == {"HOH": 1}
    structure = load(pdb("LIG 1 C1 0 0 0 C2 1.5 0 0 C3 9 0 0 C4 0 9 0"))
    (warning,) = derive_geometry(structure).warnings
    assert warning == "2 atoms without bonds have no restraints: A/LIG 1 C3 and others"


@pytest.mark.parametrize(
    ("lengths", "group", "atoms", "images"),
    [
        # An atom on an axis is bonded to images that are as far as the atoms.
        ((20, 22, 24), "P 1 2 1", "C1 0 3 0 C2 1.5 3 0", 1),
        ((20, 22, 24), "P 1 2 1", "C2 1.5 3 0 C1 0 3 0", 1),
        ((20, 20, 24), "P 4", "C1 0 0 3 C2 1.5 0 3", 3),
        ((20, 22, 24), "P 1 2 1", "C1 0 3 0 C2 0 4.5 0", 0),
        ((20, 20, 24), "P 4", "C1 0 0 3 C2 0 0 4.5", 0),
        ((3, 22, 24), "P 1", "C1 0 3 0 C2 1.5 3 0", 1),
    ],
)
def test_bonds_to_images_as_far_as_atoms(load, lengths, group, atoms, images):
    a, b, c = lengths
    cell = f"CRYST1{a:9.3f}{b:9.3f}{c:9.3f}  90.00  90.00  90.00 {group}\n"
    found = derive_geometry(load(cell + pdb(f"LIG 1 {atoms}")))
    assert len(found.columns["bonds"]["indices"]) == 1
    of_images = [f"{images} bonds to images in the crystal have no restraints"]
    assert found.warnings == (of_images if images else [])


def test_a_structure_without_bonds(load):
    found = derive_geometry(load(pdb("HOH 1 O 0 0 0", "HOH 2 O 5 0 0")))
    assert found.skipped == {"HOH": 2}
    restraints = fusedops.Restraints(**found.columns, num_atoms=2)
    assert restraints.counts == (0, 0, 0, 0, 0, 0)
