"""Reading structures, finding their planar groups and writing them back."""

import gzip
import io
import os
import re
import sys
from collections import Counter
from importlib.resources import files

import numpy as np
import pytest

from fusedops import plane_deviations
from fusedops.flatness import flatness, flattened
from fusedops.structure import (
    Structure,
    StructureError,
    _hybrid36,
    planar_groups,
    read_structure,
)
from structures import pdb

UBIQUITIN = files("fusedops") / "data/1ubi.pdb"

# Coordinates from the ribosome 6zu5 (CC0), Å from the first atom.
FLAT = {
    "A": "C1' 0.00 0.00 0.00 N9 0.81 -0.20 1.21 C8 1.32 0.79 2.01 N7 2.01 0.35 3.02 "
    "C5 1.97 -1.02 2.87 C6 2.51 -2.06 3.62 N6 3.24 -1.87 4.71 N1 2.30 -3.32 3.22 "
    "C2 1.56 -3.53 2.13 N3 1.00 -2.63 1.33 C4 1.24 -1.38 1.76",
    "C": "C1' 0.00 0.00 0.00 N1 0.53 -1.14 0.78 C2 0.50 -2.42 0.23 O2 0.03 -2.59 -0.90 "
    "N3 0.98 -3.46 0.93 C4 1.49 -3.27 2.13 N4 1.94 -4.34 2.78 C5 1.54 -1.99 2.73 "
    "C6 1.06 -0.96 2.02",
    "G": "C1' 0.00 0.00 0.00 N9 -0.14 0.00 -1.46 C8 -0.49 -1.06 -2.22 N7 -0.50 -0.79 -3.49 "
    "C5 -0.12 0.52 -3.56 C6 0.06 1.36 -4.67 O6 -0.11 1.11 -5.86 N1 0.47 2.62 -4.30 "
    "C2 0.67 3.03 -3.02 N2 1.06 4.29 -2.88 N3 0.53 2.26 -1.98 C4 0.13 1.03 -2.31",
    "U": "C1' 0.00 0.00 0.00 N1 0.00 -1.39 -0.51 C2 0.17 -1.56 -1.86 O2 0.31 -0.66 -2.64 "
    "N3 0.17 -2.84 -2.30 C4 0.02 -3.95 -1.54 O4 0.05 -5.04 -2.11 C5 -0.14 -3.72 -0.16 "
    "C6 -0.14 -2.48 0.29",
    "TRP": "CB 0.00 0.00 0.00 CG 1.18 0.61 0.69 CD1 1.43 1.94 0.89 CD2 2.30 -0.09 1.24 "
    "NE1 2.61 2.11 1.55 CE2 3.17 0.88 1.78 CE3 2.64 -1.43 1.34 CZ2 4.36 0.54 2.40 "
    "CZ3 3.81 -1.77 1.96 CH2 4.66 -0.79 2.48",
}
RING = "CB CG CD1 CD2 CE1 CE2 CZ"


def names_in(base):
    """Return the atoms of a base of `FLAT`, without coordinates."""
    return " ".join(re.findall(r"[A-Z][\w']*", FLAT[base]))


def names(structure, found):
    """Return the planes as a dict from label to the names of their atoms."""
    return {
        label: " ".join(structure.labels[i].split(" ", 2)[2] for i in plane)
        for (indices, _), labels in zip(found.groups, found.labels, strict=True)
        for plane, label in zip(indices, labels, strict=True)
    }


def planes_of(structure):
    return names(structure, planar_groups(structure))


BACKBONE = "N CA C O"


@pytest.fixture(scope="module")
def ubiquitin():
    pytest.importorskip("gemmi")
    return read_structure(UBIQUITIN)


class TestUbiquitin:
    @pytest.fixture
    def found(self, ubiquitin):
        return planar_groups(ubiquitin)

    def test_atoms_are_those_of_the_file_in_its_order(self, ubiquitin):
        lines = [
            line
            for line in UBIQUITIN.read_text().splitlines()
            if line.startswith(("ATOM", "HETATM"))
        ]
        xyz = [[float(line[k : k + 8]) for k in (30, 38, 46)] for line in lines]
        np.testing.assert_array_equal(ubiquitin.xyz, xyz)
        assert ubiquitin.xyz.dtype == np.float64
        assert ubiquitin.labels == [
            f"{line[21]}/{line[17:20].strip()} {line[22:26].strip()} {line[12:16].strip()}"
            for line in lines
        ]

    def test_planes_are_those_of_the_sequence(self, found, ubiquitin):
        sequence = Counter(
            name
            for line in UBIQUITIN.read_text().splitlines()
            if line.startswith("SEQRES")
            for name in line[19:].split()
        )
        assert sequence.total() == 76
        kinds = Counter(label.split()[-1] for labels in found.labels for label in labels)
        assert kinds == {
            "peptide": 75,
            "C-terminus": 1,
            "guanidinium": sequence["ARG"],
            "amide": sequence["ASN"] + sequence["GLN"],
            "carboxylate": sequence["ASP"] + sequence["GLU"],
            "ring": sequence["HIS"] + sequence["PHE"] + sequence["TYR"] + sequence["TRP"],
        }
        assert kinds["ring"] == 4
        assert found.count == 103
        assert found.waters == 81
        assert found.skipped == {}
        for indices, sigmas in found.groups:
            assert (indices.dtype, sigmas.dtype) == (np.int64, np.float64)
            assert sigmas.tolist() == [0.02] * len(indices)
        deviations = plane_deviations(ubiquitin.xyz, found.groups)
        assert max(abs(d).max() for d in deviations) < 0.06

    def test_labels_name_the_atoms(self, found, ubiquitin):
        planes = names(ubiquitin, found)
        assert planes["A/LEU 8 - A/THR 9 peptide"] == "CA C O N CA"
        assert planes["A/PHE 45 ring"] == RING
        assert planes["A/TYR 59 ring"] == f"{RING} OH"
        assert planes["A/HIS 68 ring"] == "CB CG ND1 CD2 CE1 NE2"
        assert planes["A/ARG 42 guanidinium"] == "CD NE CZ NH1 NH2"
        assert planes["A/ASN 25 amide"] == "CB CG OD1 ND2"
        assert planes["A/GLN 2 amide"] == "CG CD OE1 NE2"
        assert planes["A/ASP 21 carboxylate"] == "CB CG OD1 OD2"
        assert planes["A/GLU 16 carboxylate"] == "CG CD OE1 OE2"
        assert planes["A/GLY 76 C-terminus"] == "CA C O OXT"


@pytest.mark.parametrize("name", FLAT)
def test_every_atom_of_a_real_ring_or_base_is_in_its_plane(load, name):
    structure = load(pdb(f"{name} 7 {FLAT[name]}"))
    found = planar_groups(structure)
    ((indices, _),) = found.groups
    assert indices.tolist() == [list(range(len(structure.xyz)))]
    assert found.labels == [[f"A/{name} 7 {'ring' if name == 'TRP' else 'base'}"]]
    (deviations,) = plane_deviations(structure.xyz, found.groups)
    assert abs(deviations).max() < 0.05


THYMINE = "C1' N1 C2 O2 N3 C4 O4 C5 C7 C6"
RINGS = [" ".join(f"{name}.{alt}" for name in RING.split()) for alt in "AB"]
#: Residues, and their planes: labels, or also the atoms.
RESIDUES = {
    "DNA and thymine": (
        [*(f"D{base} {k} {names_in(base)}" for k, base in enumerate("ACGU", 1)),
         f"DT 5 {THYMINE}", f"T 6 {THYMINE}"],
        [*(f"A/D{base} {k} base: {names_in(base)}" for k, base in enumerate("ACGU", 1)),
         f"A/DT 5 base: {THYMINE}", f"A/T 6 base: {THYMINE}"],
    ),
    "bonds matter, numbers don't": (
        [f"ALA {k} {BACKBONE}" for k in (1, 2, 5)],
        ["A/ALA 1 - A/ALA 2 peptide", "A/ALA 2 - A/ALA 5 peptide"],
    ),
    "a gap": ([f"ALA 1 {BACKBONE}", "UNK 2 CB", f"ALA 3 {BACKBONE}"], []),
    "two chains": ([f"ALA A1 {BACKBONE}", f"ALA B2 {BACKBONE}"], []),
    "insertion codes": (
        [f"ALA 8 {BACKBONE}", f"GLY 8A {BACKBONE}", f"SER 9 {BACKBONE}"],
        ["A/ALA 8 - A/GLY 8A peptide", "A/GLY 8A - A/SER 9 peptide"],
    ),
    "a plane for each conformer": (
        ["PHE 4 CB CG.A CG.B CD1.A CD1.B CD2.A CD2.B CE1.A CE1.B CE2.A CE2.B CZ.A CZ.B"],
        ["A/PHE 4 ring alt A: CB CG.A CD1.A CD2.A CE1.A CE2.A CZ.A",
         "A/PHE 4 ring alt B: CB CG.B CD1.B CD2.B CE1.B CE2.B CZ.B"],
    ),
    "a conformer that lacks an atom": (
        ["ASN 4 CB CG.A CG.B OD1.A OD1.B ND2.B"], ["A/ASN 4 amide alt B: CB CG.B OD1.B ND2.B"]
    ),
    "alternatives elsewhere in the residue": (
        ["ASP 4 N CA.A CA.B CB CG OD1 OD2 HB.A HB.B"], ["A/ASP 4 carboxylate: CB CG OD1 OD2"]
    ),
    "a peptide never mixes conformers": (
        ["ALA 1 N CA.A CA.B C.A C.B O.A O.B", "ALA 2 N CA.A CA.B CA.C C O"],
        ["A/ALA 1 - A/ALA 2 peptide alt A: CA.A C.A O.A N CA.A",
         "A/ALA 1 - A/ALA 2 peptide alt B: CA.B C.B O.B N CA.B"],
    ),
    "one conformer is bonded": (
        ["ALA 1 N CA C.A C.B 2.47 9 0 O.A O.B 2.47 8 0", f"ALA 2 {BACKBONE}"],
        ["A/ALA 1 - A/ALA 2 peptide alt A"],
    ),
    # In crambin, 1ejg, atoms of two residues at one position are listed under the first, without an
    # alternative.
    "an atom listed for both belongs to both": (
        [f"THR 1 {BACKBONE}", "PRO 2 N CA.A C.A O.A CB.A",
         "SER 2 CA.B 5.0 0.1 0 C.B 6.27 0.1 0 O.B 6.27 1.3 0 OG.B 5.0 -1 0",
         "GLU 3 N 7.6 0 0 CA 8.8 0 0 C 10.07 0 0 O 10.07 1.2 0"],
        ["A/THR 1 - A/PRO 2 peptide alt A: CA C O N CA.A",
         "A/THR 1 - A/SER 2 peptide alt B: CA C O N CA.B",
         "A/PRO 2 - A/GLU 3 peptide alt A: CA.A C.A O.A N CA",
         "A/SER 2 - A/GLU 3 peptide alt B: CA.B C.B O.B N CA"],
    ),
    "an atom of its own comes first": (
        [f"THR 1 {BACKBONE}", "PRO 2 N CA.A", "SER 2 N.B 3.8 0.1 0 CA.B 5.0 0.1 0"],
        ["A/THR 1 - A/PRO 2 peptide alt A: CA C O N CA.A",
         "A/THR 1 - A/SER 2 peptide alt B: CA C O N.B CA.B"],
    ),
    "a shared backbone counts once": (
        [f"LEU 1 {BACKBONE} CB.A", "ILE 1 CB.B",
         "GLY 2 N 3.8 0 0 CA 5.0 0 0 C 6.27 0 0 O 6.27 1 0"],
        ["A/LEU 1 - A/GLY 2 peptide"],
    ),
    "two side chains": (
        [f"PHE 1 {RINGS[0]}", f"TYR 1 {RINGS[1]} OH.B"],
        [f"A/PHE 1 ring alt A: {RINGS[0]}", f"A/TYR 1 ring alt B: {RINGS[1]} OH.B"],
    ),
    "side chains never mix": (
        [f"PHE 1 {RINGS[0]}", f"TYR 1 {RINGS[1]}"], [f"A/PHE 1 ring alt A: {RINGS[0]}"]
    ),
    "molecules under one number lend nothing": (
        [f"PHE 1 {RING}", "TYR 1 CB CG CD1 CD2 CE1 CE2 OH"], [f"A/PHE 1 ring: {RING}"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESIDUES)
def test_planes_of_residues(load, name):
    residues, planes = RESIDUES[name]
    found = planes_of(load(pdb(*residues)))
    with_atoms = any(":" in plane for plane in planes)
    found = [f"{label}: {atoms}" if with_atoms else label for label, atoms in found.items()]
    assert sorted(found) == sorted(planes)


def test_modified_nucleotides_and_incomplete_bases_have_no_plane(load):
    uracil = names_in("U")
    bases = f"PSU 1 {uracil}", f"U 2 {uracil.replace(' O4', '')}", "U 3 P"
    found = planar_groups(load(pdb(*bases)))
    assert (found.groups, found.labels, found.skipped) == ([], [], {"PSU": 1})
    assert found.incomplete == ["A/U 2 base", "A/U 3 base"]


def test_conformers_that_lack_atoms_are_listed(load):
    whole, lacking = f"PHE 1 {RING}", f"PHE 2 {RING.replace(' CZ', '')}"
    # A's atoms are all there; B lacks an atom, of which only A has an alternative.
    partly = f"PHE 3 {RINGS[0]} CB.B CG.B"
    shared = f"PHE 4 {RING.replace(' CZ', ' CZ.A CZ.B')}"
    found = planar_groups(load(pdb(whole, lacking, partly, shared, "ALA 5 N CA")))
    assert found.incomplete == ["A/PHE 2 ring", "A/PHE 3 ring alt B"]
    assert [label for group in found.labels for label in group] == [
        *("A/PHE 1 ring", "A/PHE 3 ring alt A", "A/PHE 4 ring alt A", "A/PHE 4 ring alt B")
    ]


@pytest.mark.parametrize(("distance", "planes"), [(1.99, 1), (2.01, 0)])
def test_the_limit_of_a_bond(load, distance, planes):
    second = f"ALA 2 N {2.47 + distance} 0 0 CA {3.7 + distance} 0 0"
    assert planar_groups(load(pdb(f"ALA 1 {BACKBONE}", second))).count == planes


def test_incomplete_peptides_are_left_out(load):
    for missing in BACKBONE.split():
        first = " ".join(name for name in BACKBONE.split() if name != missing)
        found = planar_groups(load(pdb(f"ALA 1 {first}", f"ALA 2 {BACKBONE}")))
        assert found.count == (missing == "N")


def test_modified_residues_belong_to_the_chain(load):
    text = pdb(
        f"ALA 1 {BACKBONE}",
        f"MSE 2 {BACKBONE} CB CG SE CE",
        f"XYZ 3 {BACKBONE} OXT",
        f"XYZ 9 {BACKBONE} OXT CB",
    ).replace("ATOM  ", "HETATM")
    structure = load(text[: text.rindex("HETATM")])
    assert list(planes_of(structure)) == [
        "A/XYZ 3 C-terminus",
        "A/XYZ 9 C-terminus",
        "A/ALA 1 - A/MSE 2 peptide",
        "A/MSE 2 - A/XYZ 3 peptide",
        "A/XYZ 3 - A/XYZ 9 peptide",
    ]
    assert planar_groups(structure).skipped == {}


def test_waters_ligands_and_ions_are_counted(load):
    others = "HOH 1 O", "DOD 2 O", "HOH 3 O.A O.B", "MG 4 MG", "MG 5 MG", "GOL 6 C1 O1", "CA 7 CA"
    found = planar_groups(load(pdb(*others, "GLU 8 N CA C O OXT CB CG CD OE1 OE2")))
    assert found.waters == 3
    assert found.skipped == {"MG": 2, "GOL": 1, "CA": 1}
    assert found.labels == [["A/GLU 8 C-terminus", "A/GLU 8 carboxylate"]]


@pytest.mark.parametrize("name", ["moved.pdb", "moved.cif"])
def test_residues_whose_atoms_are_listed_in_turns(load, tmp_path, name):
    text = pdb("ASP 22 CB.A CG.A OD1.A OD2.A", "ASN 22 CB.B CG.B OD1.B ND2.B")
    lines = text.splitlines(keepends=True)
    turns = (lines[i] for i in (0, 4, 1, 5, 2, 6, 3, 7))
    structure = load("".join(f"{line[:6]}{k:5d}{line[11:]}" for k, line in enumerate(turns)))
    assert [label.removeprefix("A/") for label in structure.labels] == [
        "ASP 22 CB.A", "ASN 22 CB.B", "ASP 22 CG.A", "ASN 22 CG.B",
        "ASP 22 OD1.A", "ASN 22 OD1.B", "ASP 22 OD2.A", "ASN 22 ND2.B",
    ]  # fmt: skip
    assert planes_of(structure) == {
        "A/ASP 22 carboxylate alt A": "CB.A CG.A OD1.A OD2.A",
        "A/ASN 22 amide alt B": "CB.B CG.B OD1.B ND2.B",
    }
    moved = structure.xyz + np.arange(24.0).reshape(8, 3)
    structure.write(tmp_path / name, moved)
    back = read_structure(tmp_path / name)
    by_label = dict(zip(back.labels, back.xyz, strict=True))
    np.testing.assert_allclose([by_label[x] for x in structure.labels], moved, atol=1e-9)


def test_serial_numbers_past_99999():
    assert _hybrid36(b"99999") == 99_999
    assert _hybrid36(b"A0000") == 100_000
    assert _hybrid36(b"A000Z") == 100_035
    assert _hybrid36(b"*****") == 0


MMCIF = """data_test
#
_entry.id test
_citation.title 'kept as it is'
loop_
_atom_site.group_PDB
_atom_site.id
_atom_site.type_symbol
_atom_site.label_atom_id
_atom_site.label_alt_id
_atom_site.label_comp_id
_atom_site.label_asym_id
_atom_site.label_seq_id
_atom_site.pdbx_PDB_ins_code
_atom_site.Cartn_x
_atom_site.Cartn_y
_atom_site.Cartn_z
_atom_site.auth_seq_id
_atom_site.auth_asym_id
_atom_site.pdbx_PDB_model_num
_atom_site.extra
ATOM 1 C CG . ASP A 1 ? 0.0 0.0 0.00012 7 X 1 a
ATOM 2 C CB . ASP A 1 ? 1.0 0.0 0.0 7 X 1 b
ATOM 3 O OD1 . ASP A 1 ? 0.0 1.0 0.0 7 X 1 c
ATOM 4 O OD2 . ASP A 1 ? -1.0 0.0 0.0 7 X 1 d
ATOM 5 C CG . ASP A 1 ? 5.0 5.0 5.0 7 X 2 e
"""


class TestMmcif:
    def test_first_model_with_author_names(self, load):
        structure = load(MMCIF, "x.cif")
        assert planes_of(structure) == {"X/ASP 7 carboxylate": "CB CG OD1 OD2"}
        assert structure.xyz.shape == (4, 3)

    def test_writing_changes_the_coordinates_that_moved_and_nothing_else(self, load, tmp_path):
        structure = load(MMCIF, "x.cif")
        xyz = structure.xyz.copy()
        xyz[1] += [0.25, 0, 0]
        structure.write(tmp_path / "moved.cif", xyz)
        written = (tmp_path / "moved.cif").read_text().replace("#", "").split()
        expected = MMCIF.replace("CB . ASP A 1 ? 1.0", "CB . ASP A 1 ? 1.250")
        assert written == expected.replace("#", "").split()

    def test_the_name_of_the_file_does_not_matter(self, load):
        for content, name in ((MMCIF, "x.pdb"), (UBIQUITIN.read_text(), "x.cif"), (MMCIF, "x")):
            assert len(load(content, name).xyz) > 0
        assert len(load(gzip.compress(MMCIF.encode()), "x.cif").xyz) == 4


class TestWriting:
    def test_only_the_columns_that_moved_change(self, ubiquitin, tmp_path):
        xyz = ubiquitin.xyz.copy()
        xyz[1:3] += [0.5, -100.0, 0.001]
        ubiquitin.write(tmp_path / "moved.pdb", xyz)
        before = UBIQUITIN.read_text().splitlines()
        after = (tmp_path / "moved.pdb").read_text().splitlines()
        assert len(before) == len(after)
        changed = [(b, a) for b, a in zip(before, after, strict=True) if a != b]
        assert len(changed) == 2
        assert all(b[:30] + b[54:] == a[:30] + a[54:] for b, a in changed)
        np.testing.assert_allclose(read_structure(tmp_path / "moved.pdb").xyz, xyz, atol=1e-9)

    @pytest.mark.parametrize("name", ["x.pdb", "x.ent.gz", "x.cif", "x.mmcif", "x.CIF.gz"])
    def test_every_format_reads_back(self, ubiquitin, tmp_path, name):
        ubiquitin.write(tmp_path / name, ubiquitin.xyz + 1)
        assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith("gz")
        back = read_structure(tmp_path / name)
        np.testing.assert_allclose(back.xyz, ubiquitin.xyz + 1, atol=1e-9)
        # The structure itself stays.
        assert ubiquitin.gemmi[0][0][0][0].pos.tolist() == ubiquitin.xyz[0].tolist()
        assert back.labels == ubiquitin.labels
        assert planar_groups(back).labels == planar_groups(ubiquitin).labels
        back.write(tmp_path / "again.pdb", ubiquitin.xyz)
        again = read_structure(tmp_path / "again.pdb")
        np.testing.assert_allclose(again.xyz, ubiquitin.xyz, atol=1e-9)

    def test_other_models_stay(self, load, tmp_path):
        model = pdb(f"ALA 1 {BACKBONE}")
        text = "".join(f"MODEL {k:8d}\n{model}ENDMDL\n" for k in (1, 2)) + "END\n"
        structure = load(text)
        assert structure.xyz.shape == (4, 3)
        structure.write(tmp_path / "moved.pdb", structure.xyz + 1)
        assert (tmp_path / "moved.pdb").read_text().partition("MODEL        2")[2] == (
            text.partition("MODEL        2")[2]
        )
        structure.write(tmp_path / "moved.cif", structure.xyz + 1)
        other = read_structure(tmp_path / "moved.cif").gemmi[1]
        positions = [atom.pos.tolist() for chain in other for residue in chain for atom in residue]
        np.testing.assert_allclose(positions, structure.xyz)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("x.xyz", "name it .pdb"),
            ("x.gz", "name it .pdb"),
            ("none/x.pdb", "there is no folder"),
            ("taken.pdb", "is a folder"),
        ],
    )
    def test_a_name_that_cannot_be_written(self, ubiquitin, tmp_path, name, reason):
        (tmp_path / "taken.pdb").mkdir()
        for attempt in (
            lambda path: ubiquitin.check_writable(path),
            lambda path: ubiquitin.write(path, ubiquitin.xyz),
        ):
            with pytest.raises(StructureError, match=reason) as error:
                attempt(tmp_path / name)
            assert name in str(error.value)

    def test_a_read_only_folder(self, ubiquitin, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        with pytest.raises(StructureError, match="no permission"):
            ubiquitin.check_writable(tmp_path / "x.pdb")

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ("7 X ", "7 XX ", "chain name 'XX'"),
            ("7 X ", "70001 X ", "residue number 70001"),
            (". ASP ", ". A1LU6 ", "residue name 'A1LU6'"),
        ],
    )
    def test_what_pdb_cannot_hold(self, load, tmp_path, old, new, reason):
        structure = load(MMCIF.replace(old, new), "x.cif")
        with pytest.raises(StructureError, match=reason):
            structure.check_writable(tmp_path / "x.pdb")
        with pytest.raises(StructureError, match=reason):
            structure.write(tmp_path / "x.pdb", structure.xyz)
        assert not (tmp_path / "x.pdb").exists()
        structure.check_writable(tmp_path / "y.cif")

    def test_too_many_atoms_for_pdb(self, load, tmp_path):
        head, _, _ = MMCIF.partition("ATOM")
        rows = (f"ATOM {k} O O . HOH A . ? 1 2 3 {k // 10} A 1 x" for k in range(1, 100_001))
        structure = load(head + "\n".join(rows) + "\n", "x.cif")
        with pytest.raises(StructureError, match="100,000 atoms"):
            structure.check_writable(tmp_path / "x.pdb.gz")

    def test_a_coordinate_too_long_for_pdb(self, ubiquitin, tmp_path):
        xyz = ubiquitin.xyz.copy()
        xyz[3, 1] = -1000.0
        with pytest.raises(StructureError, match="a coordinate doesn't fit"):
            ubiquitin.write(tmp_path / "x.pdb", xyz)
        assert list(tmp_path.iterdir()) == []
        ubiquitin.write(tmp_path / "x.cif", xyz)
        np.testing.assert_allclose(read_structure(tmp_path / "x.cif").xyz, xyz, atol=1e-9)

    def test_bad_coordinates(self, ubiquitin, tmp_path):
        with pytest.raises(ValueError, match="shape"):
            ubiquitin.write(tmp_path / "x.pdb", ubiquitin.xyz[1:])
        with pytest.raises(ValueError, match="not finite"):
            ubiquitin.write(tmp_path / "x.pdb", ubiquitin.xyz * np.nan)
        assert list(tmp_path.iterdir()) == []


def test_without_gemmi(monkeypatch):
    monkeypatch.setitem(sys.modules, "gemmi", None)
    with pytest.raises(ImportError, match=r'pip install "gemmi>=0\.7\.3"'):
        read_structure(UBIQUITIN)
    empty = Structure("x.pdb", np.empty((0, 3)), [], None, np.empty(0, np.int64), b"", "PDB")
    with pytest.raises(ImportError, match=r'pip install "gemmi>=0\.7\.3"'):
        planar_groups(empty)


def test_coordinates_that_are_not_finite_are_not_flat(ubiquitin):
    """A plane without a place has distances of zero."""
    pytest.importorskip("scipy")
    planes, xyz = planar_groups(ubiquitin), ubiquitin.xyz.copy()
    assert flatness(ubiquitin, planes, xyz.tolist()).rmsz == flatness(ubiquitin, planes).rmsz
    xyz[3] = np.nan
    with pytest.raises(ValueError, match=r"^flatness: xyz\[3\] is .*nan.* should be finite"):
        flatness(ubiquitin, planes, xyz)
    with pytest.raises(ValueError, match=r"^flattened: xyz\[3\] is .*nan.* should be finite"):
        flattened(xyz, planes.groups)
    for tether in (np.nan, -1.0):
        with pytest.raises(ValueError, match=r"^flattened: tether is .* at least 0"):
            flattened(ubiquitin.xyz, planes.groups, tether=tether)


def test_no_more_steps_are_taken_than_asked_for(ubiquitin):
    pytest.importorskip("scipy")
    planes = planar_groups(ubiquitin).groups
    for most in (0, 1, 2):
        xyz, steps = flattened(ubiquitin.xyz, planes, steps=most)
        assert steps == most
        assert (xyz == ubiquitin.xyz).all() == (most == 0)
    with pytest.raises(ValueError, match=r"^flattened: steps is -1; it should be at least 0"):
        flattened(ubiquitin.xyz, planes, steps=-1)


@pytest.mark.parametrize(
    ("source", "was"), [(None, "a NoneType"), (io.StringIO("CRYST1"), "in text mode")]
)
def test_a_source_that_is_no_file_is_named(source, was):
    with pytest.raises(TypeError, match=f"path is {was}; it should be a path, or a file opened"):
        read_structure(source)
