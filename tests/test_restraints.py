"""Planes from restraint CIFs and monomer libraries."""

import gzip

import numpy as np
import pytest

from fusedops.restraints import read_monomers, read_restraints
from fusedops.structure import StructureError, planar_groups
from structures import pdb

pytest.importorskip("gemmi")

COLUMNS = "comp_id plane_id atom_id dist_esd"


def cif(rows, columns=COLUMNS, name="LIG"):
    """Return a restraint CIF with rows of planes."""
    names = "".join(f"_chem_comp_plane_atom.{column}\n" for column in columns.split())
    return f"data_comp_list\n_chem_comp.id {name}\ndata_comp_{name}\nloop_\n{names}{rows}\n"


def plane(atoms, sigma=0.02, name="plan-1", component="LIG"):
    return "".join(f"{component} {name} {atom} {sigma}\n" for atom in atoms.split())


@pytest.fixture
def restraints(tmp_path):
    """Return a function that reads restraints from text."""

    def read(text, name="lig.cif"):
        (tmp_path / name).write_text(text)
        return read_restraints(tmp_path / name)

    return read


class TestReading:
    def test_components_and_planes(self, restraints):
        rows = (
            plane('C1 C2 "O5\'" N') + plane("C1 C2 C3 C4", 0.01, "p2") + plane("A B", 1, "q", "X")
        )
        # Unknown sigmas are the default.
        rows += plane("C", "?", "q", "X") + plane("D", ".", "q", "X")
        assert restraints(cif(rows)) == {
            "LIG": {
                "plan-1": dict.fromkeys(["C1", "C2", "O5'", "N"], 0.02),
                "p2": dict.fromkeys(["C1", "C2", "C3", "C4"], 0.01),
            },
            "X": {"q": {"A": 1.0, "B": 1.0, "C": 0.02, "D": 0.02}},
        }

    def test_no_column_of_sigmas(self, restraints):
        found = restraints(cif("LIG p A\nLIG p B\n", "comp_id plane_id atom_id"))
        assert found == {"LIG": {"p": {"A": 0.02, "B": 0.02}}}

    def test_a_component_without_planes(self, restraints):
        text = "data_comp_GOL loop_ _chem_comp_bond.comp_id _chem_comp_bond.value_dist GOL 1.5\n"
        assert restraints(text) == {"GOL": {}}

    def test_gzip(self, tmp_path):
        (tmp_path / "x.cif.gz").write_bytes(gzip.compress(cif(plane("A B")).encode()))
        assert set(read_restraints(tmp_path / "x.cif.gz")["LIG"]["plan-1"]) == {"A", "B"}

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "the file is empty"),
            ("nothing", "can't be read as restraints: line 1"),
            ("data_x\n_a.b 1\n", "it holds no restraints; it should have _chem_comp_plane_atom"),
            (
                "data_x loop_ _chem_comp_atom.comp_id _chem_comp_atom.atom_id LIG C1\n",
                "entries of the Chemical Component Dictionary lack",
            ),
            (cif(plane("C1", 0)), "dist_esd of LIG plan-1 C1 is '0'; it should be a positive"),
            (cif(plane("C1", "x")), "dist_esd of LIG plan-1 C1 is 'x'; it should be a positive"),
            (cif("p A\n", "plane_id atom_id"), "goes with comp_id and plane_id, which it lacks"),
        ],
    )
    def test_refusals(self, restraints, text, reason):
        with pytest.raises(StructureError) as error:
            restraints(text)
        assert reason in str(error.value)
        assert "lig.cif: " in str(error.value)
        assert "\n" not in str(error.value)


class TestPlanes:
    def test_hydrogens_and_absent_atoms_are_left_out(self, load, restraints):
        known = restraints(cif(plane("C1 C2 C3 C4 N5 H1 C9")))
        found = planar_groups(load(pdb("LIG 1 C1 C2 H1 C3 C4 N5")), restraints=known)
        ((indices, sigmas),) = found.groups
        np.testing.assert_array_equal(indices, [[0, 1, 3, 4, 5]])
        np.testing.assert_array_equal(sigmas, [0.02])
        assert found.labels == [["A/LIG 1 plan-1"]]
        assert not found.skipped

    def test_three_atoms_are_no_plane(self, load, restraints):
        known = restraints(cif(plane("C1 C2 C3 C4")))
        found = planar_groups(load(pdb("LIG 1 C1 C2 C3")), restraints=known)
        assert found.count == 0
        assert found.skipped == {"LIG": 1}

    def test_a_component_without_planes_is_not_skipped(self, load):
        found = planar_groups(load(pdb("LIG 1 C1 C2 C3")), restraints={"LIG": {}})
        assert (found.count, found.skipped) == (0, {})

    def test_alternatives(self, load, restraints):
        known = restraints(cif(plane("C1 C2 C3 C4")))
        found = planar_groups(load(pdb("LIG 1 C1 C2 C3 C4.A C4.B")), restraints=known)
        np.testing.assert_array_equal(found.groups[0][0], [[0, 1, 2, 3], [0, 1, 2, 4]])
        assert found.labels == [["A/LIG 1 plan-1 alt A", "A/LIG 1 plan-1 alt B"]]

    def test_they_replace_a_side_chain_and_leave_the_end_of_a_chain(self, load, restraints):
        structure = load(pdb("ASN 1 CA C O OXT CB CG OD1 ND2"))
        usual = planar_groups(structure)
        assert usual.labels == [["A/ASN 1 C-terminus", "A/ASN 1 amide"]]
        rows = plane("CG CB ND2 OD1", 0.05, component="ASN")
        rows += plane("OXT O C CA", 0.05, "again", "ASN")
        found = planar_groups(structure, restraints=restraints(cif(rows)))
        assert found.labels == [["A/ASN 1 C-terminus", "A/ASN 1 plan-1"]]
        np.testing.assert_array_equal(found.groups[0][1], [0.02, 0.05])

    def test_atoms_with_sigmas_of_their_own(self, load):
        sigmas = {"C1": 0.01, "C2": 0.02, "C3": 0.03, "C4": 0.04}
        text = pdb("LIG 1 C1 C2 C3 C4", "ASN 2 CB CG OD1 ND2")
        found = planar_groups(load(text), restraints={"LIG": {"p": sigmas}}, sigma=0.1)
        np.testing.assert_array_equal(found.groups[0][1], [[*sigmas.values()], [0.1] * 4])

    @pytest.mark.parametrize("sigma", [0, -1, np.nan, np.inf])
    def test_a_bad_sigma(self, load, sigma):
        with pytest.raises(ValueError, match=r"sigma: .* should be a positive number, in Å"):
            planar_groups(load(pdb("LIG 1 C1")), sigma=sigma)


class TestLibrary:
    def test_what_is_looked_up(self, load, tmp_path):
        (tmp_path / "l").mkdir()
        (tmp_path / "p").mkdir()
        (tmp_path / "l/LIG.cif").write_text(
            cif(plane("C1 C2 C3 C4") + plane("A", component="OTHER"))
        )
        (tmp_path / "p/PHE.cif").write_text("nothing")
        structure = load(pdb("LIG 1 C1 C2 C3 C4", "PHE 2 CA", "XYZ 3 C1"))
        assert set(read_monomers(tmp_path, structure)) == {"LIG"}

    def test_a_missing_folder(self, load, tmp_path):
        with pytest.raises(StructureError, match="none: there is no such folder"):
            read_monomers(tmp_path / "none", load(pdb("LIG 1 C1")))
