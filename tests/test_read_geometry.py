"""Restraints of geometry from a monomer library, of good and bad models."""

from __future__ import annotations

import numpy as np
import pytest

import fusedops
from fusedops.restraints import derive_geometry, find_contacts, read_geometry
from fusedops.structure import StructureError
from structures import pdb

pytest.importorskip("gemmi")


def loop(category, columns, rows):
    names = "".join(f"_{category}.{column}\n" for column in columns.split())
    return f"loop_\n{names}{rows.strip()}\n"


def monomer(name, atoms, bonds="", angles="", torsions="", chirals="", group="peptide"):
    """Return the file of a component; rows are without its name."""

    def table(category, columns, rows):
        rows = "\n".join(f"{name} {row}" for row in rows.strip().splitlines())
        return loop(f"chem_comp_{category}", f"comp_id {columns}", rows) if rows else ""

    return (
        "data_comp_list\n"
        + loop("chem_comp", "id three_letter_code name group", f"{name} {name} x {group}")
        + f"data_comp_{name}\n"
        + table("atom", "atom_id type_symbol type_energy", atoms)
        + table("bond", "atom_id_1 atom_id_2 type value_dist value_dist_esd", bonds)
        + table("angle", "atom_id_1 atom_id_2 atom_id_3 value_angle value_angle_esd", angles)
        + table(
            "tor", "id atom_id_1 atom_id_2 atom_id_3 atom_id_4 value_angle value_angle_esd period",
            torsions,
        )
        + table("chir", "id atom_id_centre atom_id_1 atom_id_2 atom_id_3 volume_sign", chirals)
    )  # fmt: skip


ATOMS = "N N NH1\nCA C CH1\nC C C\nO O O\nCB C CH3"
BONDS = "N CA single 1.46 0.01\nCA C single 1.53 0.02\nC O double 1.23 0.02\nCA CB single 1.52 0"
ANGLES = "N CA C 111.0 2.7\nCA C O 120.5 1.7\nN CA CB 110.0 2.0\nC CA CB 110.5 1.5"
ALA = monomer("ALA", ATOMS, BONDS, ANGLES, "sp3 O C CA CB 60 10 3", "c1 CA N C CB negativ")
PRO = monomer("PRO", ATOMS, BONDS, ANGLES)


def link(name, omega):
    return (
        f"data_link_{name}\n"
        + loop(
            "chem_link_bond",
            "link_id atom_1_comp_id atom_id_1 atom_2_comp_id atom_id_2 type value_dist "
            "value_dist_esd",
            f"{name} 1 C 2 N single 1.337 0.011",
        )
        + loop(
            "chem_link_tor",
            "link_id id atom_1_comp_id atom_id_1 atom_2_comp_id atom_id_2 atom_3_comp_id atom_id_3 "
            "atom_4_comp_id atom_id_4 value_angle value_angle_esd period",
            f"{name} psi 1 N 1 CA 1 C 2 N 160 30 2\n{name} omega 1 CA 1 C 2 N 2 CA {omega} 5 0",
        )
    )


# gemmi takes peptides of atoms on a line for cis.
LINKS = (
    "data_link_list\n"
    + loop(
        "chem_link",
        "id comp_id_1 mod_id_1 group_comp_1 comp_id_2 mod_id_2 group_comp_2 name",
        "TRANS . . peptide . . peptide TRANS\nCIS . . peptide . . peptide CIS",
    )
    + link("TRANS", 180)
    + link("CIS", 0)
)


@pytest.fixture
def library(tmp_path):
    """Return a function that makes a library's folder of files by path."""

    def make(**files):
        for path, text in {"links_and_mods": LINKS, "a/ALA": ALA, "p/PRO": PRO, **files}.items():
            file = tmp_path / "library" / f"{path}.cif"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "library"

    return make


def residue(name, number, atoms="N CA C O CB 1.6 -1.4 0.5"):
    return f"{name} {number} {atoms}"


def rows(columns, structure, *names):
    """Return restraints as atoms' labels with further columns."""
    found = [[structure.labels[i].partition("/")[2] for i in row] for row in columns["indices"]]
    return [
        (" ".join(atoms), *values)
        for atoms, *values in zip(found, *[columns[name].tolist() for name in names], strict=True)
    ]


def test_residues_and_links(load, library):
    structure = load(pdb(residue("ALA", 1), "PRO 2 N CA C O CB 5.4 -1.4 0.5", "ALA 3 N CA C O"))
    found = read_geometry(library(), structure)
    bonds = rows(found.columns["bonds"], structure, "ideals", "sigmas")
    assert ("ALA 1 N ALA 1 CA", 1.46, 0.01) in bonds
    assert ("ALA 1 C PRO 2 N", 1.337, 0.011) in bonds
    assert len(bonds) == 3 * 3 + 2
    # Two of the bonds to CB have no sigma.
    assert found.unusable == {"bonds": 2}
    assert ("ALA 1 N ALA 1 CA ALA 1 C", 111.0, 2.7) in rows(
        found.columns["angles"], structure, "ideals", "sigmas"
    )
    torsions = found.columns["torsions"]
    assert rows(torsions, structure, "ideals", "sigmas", "periods", "opposite") == [
        ("ALA 1 O ALA 1 C ALA 1 CA ALA 1 CB", 60.0, 10.0, 3, 0.0),
        ("ALA 1 CA ALA 1 C PRO 2 N PRO 2 CA", 180.0, 5.0, 1, 0.05),
        ("PRO 2 CA PRO 2 C ALA 3 N ALA 3 CA", 180.0, 5.0, 1, 0.0005),
    ]
    ((atoms, ideal, sigma),) = rows(found.columns["chirals"], structure, "ideals", "sigmas")
    assert atoms == "ALA 1 CA ALA 1 N ALA 1 C ALA 1 CB"
    assert -3 < ideal < -2
    assert sigma == 0.2
    np.testing.assert_array_equal(
        found.columns["b_pairs"]["indices"], found.columns["bonds"]["indices"]
    )
    # The third residue lacks its CB.
    assert found.missing == ["A/ALA 3/CB"]
    assert not found.skipped
    restraints = fusedops.Restraints(**found.columns, num_atoms=len(structure.xyz))
    nlls = fusedops.geometry_nll(structure.xyz, restraints, np.full(len(structure.xyz), 20.0))
    assert np.isfinite(nlls).all()


def test_alternatives_and_atoms_of_no_occupancy(load, library):
    text = pdb("ALA 1 N CA.A CA.B 1.1 0.3 0 C O CB 1.6 -1.4 0.5").replace(
        "  1.00 10.00", "  0.00 10.00"
    )
    structure = load(text)
    found = read_geometry(library(), structure)
    bonds = [row[0] for row in rows(found.columns["bonds"], structure)]
    assert bonds.count("ALA 1 C ALA 1 O") == 1
    for alternative in "AB":
        assert f"ALA 1 N ALA 1 CA.{alternative}" in bonds
    assert len(bonds) == 5


def test_a_main_alternative_without_a_label(load, library):
    """Its restraints are of its own atoms and of common ones."""
    text = pdb("ALA 1 N CA C C.B 1.1 0.3 0.2 O CB 1.6 -1.4 0.5 CB.B 1.7 -1.5 0.6")
    structure = load(text)
    angles = [
        row[0] for row in rows(read_geometry(library(), structure).columns["angles"], structure)
    ]
    around = [set(angle.split()) & {"C", "C.B", "CB", "CB.B"} for angle in angles]
    assert {"C", "CB"} in around
    assert {"C.B", "CB.B"} in around
    assert {"C", "CB.B"} not in around
    assert {"C.B", "CB"} not in around


def test_residues_at_one_place_lack_no_atom_that_they_share(load, library):
    first = "ALA 1 N CA C O CB.A 1.6 -1.4 0.5"
    structure = load(pdb(first, "PRO 1 CB.B -2.2 -1.4 0.6", "PRO 2 N CA C"))
    found = read_geometry(library(), structure)
    bonds = {row[0] for row in rows(found.columns["angles"], structure)}
    assert "ALA 1 N ALA 1 CA PRO 1 CB.B" in bonds
    assert found.missing == ["A/PRO 2/O", "A/PRO 2/CB"]


def test_unknown_residues_are_skipped(load, library):
    structure = load(pdb(residue("ALA", 1), "XYZ 2 N CA C O", "XYZ B1 C1 C2"))
    found = read_geometry(library(), structure)
    assert found.skipped == {"XYZ": 2}
    assert found.columns["bonds"]["indices"].max() < 5
    assert repr(found).endswith("; 2 residues skipped)")


def test_atoms_that_the_file_repeats_are_told(load, library):
    atoms = "N CA C O CB.A 1.6 -1.4 0.5 CB.B 1.6 -1.4 0.6 CB.A 1.6 -1.3 0.7 CA 1.2 0 0"
    structure = load(pdb(residue("ALA", 1, atoms), residue("ALA", "B1")))
    found = read_geometry(library(), structure)
    assert found.warnings == [
        f"A/ALA 1 {atom} is there again, and has no restraints" for atom in ("CB.A", "CA")
    ]
    assert {6, 7}.isdisjoint(found.columns["bonds"]["indices"].ravel())


def test_without_links(load, library):
    folder = library()
    (folder / "links_and_mods.cif").unlink()
    found = read_geometry(folder, load(pdb(residue("ALA", 1), "ALA 2 N CA C O")))
    assert len(found.columns["bonds"]["indices"]) == 6
    assert "ignoring link 'CIS' as it is not in the monomer library" in found.warnings[0]


@pytest.mark.parametrize(
    ("record", "far"),
    [
        # Operations, none because older files have none, and the same one.
        ("SSBOND   1 XYZ A    1    XYZ B    2                          1555   2656  2.0", True),
        ("SSBOND   1 XYZ A    1    XYZ B    2", True),
        ("SSBOND   1 XYZ A    1    XYZ B    2                          1555   1555  2.0", False),
        ("SSBOND   1 XYZ A    1    XYZ A    1                          1555   2555  2.0", True),
    ],
)
def test_links_to_images_have_no_restraints(load, library, record, far):
    """The atoms of such a link may be at opposite ends of the model."""
    cell = "CRYST1   30.000   30.000   30.000  90.00  90.00  90.00 P 1 2 1       2\n"
    second = "29 2 29 SG 28 2 29" if far else "-1 2 1 SG -2 2 1"
    atoms = pdb("XYZ 1 CB 1 2 1 SG 1.5 3 1", f"XYZ B2 CB {second}")
    folder = library(
        **{
            "x/XYZ": monomer("XYZ", "CB C CH2\nSG S SH1", "CB SG single 1.8 0.02"),
            "links_and_mods": "data_link_list\n"
            + loop(
                "chem_link",
                "id comp_id_1 mod_id_1 group_comp_1 comp_id_2 mod_id_2 group_comp_2 name",
                "SS XYZ . . XYZ . . SS",
            )
            + "data_link_SS\n"
            + loop(
                "chem_link_bond",
                "link_id atom_1_comp_id atom_id_1 atom_2_comp_id atom_id_2 type value_dist "
                "value_dist_esd",
                "SS 1 SG 2 SG single 2.0 0.02",
            )
            + loop(
                "chem_link_angle",
                "link_id atom_1_comp_id atom_id_1 atom_2_comp_id atom_id_2 atom_3_comp_id "
                "atom_id_3 value_angle value_angle_esd",
                "SS 1 CB 1 SG 2 SG 104 2",
            ),
        }
    )
    structure = load(cell + record + "\n" + atoms)
    found = read_geometry(folder, structure)
    counts = [len(found.columns[kind]["indices"]) for kind in ("bonds", "angles")]
    other = "A/XYZ 1" if record.count("A ") == 2 else "B/XYZ 2"
    if far:
        assert counts == [2, 0]
        assert found.warnings[-1] == (
            f"the link of A/XYZ 1 SG and an image of {other} SG has no restraints"
        )
    else:
        assert counts == [3, 1]
        assert not any("image" in warning for warning in found.warnings)
    fusedops.Restraints(**found.columns, num_atoms=4)


def test_refusals(load, library, tmp_path):
    structure = load(pdb(residue("XYZ", 1)))
    with pytest.raises(StructureError, match="there is no such folder; it should be a monomer lib"):
        read_geometry(tmp_path / "absent", structure)
    with pytest.raises(StructureError, match="it has no description of XYZ; it should have one"):
        read_geometry(library(), structure)
    with pytest.raises(StructureError, match=r"ALA\.cif: can't be read as a monomer: "):
        read_geometry(library(**{"a/ALA": "nothing"}), load(pdb(residue("ALA", 1))))


CELL = "CRYST1    9.000   10.000   11.000  90.00 100.00  90.00 P 1 21 1      2\n"


def test_contacts_of_a_crystal_count_once(load):
    """Half of the repulsion of the model's atoms with all others of the crystal."""
    rng = np.random.default_rng(0)
    places = " ".join(
        f"C{k} {x:.2f} {y:.2f} {z:.2f}" for k, (x, y, z) in enumerate(rng.uniform(0, 6, (7, 3)))
    )
    structure = load(CELL + pdb(f"LIG 1 {places}"))
    bonds = np.array([[0, 1], [1, 2], [2, 3], [3, 4]])
    # The list serves other coordinates too.
    contacts = find_contacts(structure, bonds, structure.xyz + 3.0, within=7.0)
    contacts["sigmas"] = np.ones(len(contacts["indices"]))
    restraints = fusedops.Restraints(contacts=contacts)
    cell = structure.gemmi.cell
    orth, frac = (np.array(t.mat.tolist()) for t in (cell.orth, cell.frac))
    x = structure.xyz + 3.0
    total = 0.0
    for turn, shift in ((np.eye(3), [0, 0, 0]), (np.diag([-1, 1, -1]), [0, 0.5, 0])):
        for cells in np.ndindex(5, 5, 5):
            moved = (x @ frac.T @ turn + shift + np.array(cells) - 2) @ orth.T
            d = np.linalg.norm(moved[:, None] - x, axis=-1)
            if np.allclose(moved, x):
                d[abs(np.subtract.outer(range(7), range(7))) == 0] = 9
                for i in range(5):
                    for j in range(5):
                        d[i, j] = 9 if abs(i - j) < 4 else d[i, j]
            total += 0.5 * (np.maximum(0, 3.4 - d) ** 4 / 4).sum()
    constant = contacts["weights"].sum() * 0.5 * np.log(2 * np.pi)
    found = fusedops.geometry_nll(x, restraints)[4] - constant
    assert found == pytest.approx(total, rel=1e-5)


def test_who_has_no_contact(load):
    text = pdb("LIG 1 C1 0 0 0 O2 2 0 0 H3 1 1 0 N4.A 2 2 0 N4.B 2 2.5 0 C5 0 2 0")
    # The last atom has no occupancy.
    head, _, tail = text.rpartition("  1.00 10.00")
    structure = load(f"{head}  0.00 10.00{tail}")
    found = find_contacts(structure, np.array([[0, 0]])[:0], within=3.5)
    near = rows(found, structure, "distances", "weights", "images")
    carbon, oxygen, nitrogen = 1.7, 1.52, 1.55
    want = {"LIG 1 C1 LIG 1 O2": carbon + oxygen}
    for alternative in "AB":
        want[f"LIG 1 C1 LIG 1 N4.{alternative}"] = carbon + nitrogen
        want[f"LIG 1 O2 LIG 1 N4.{alternative}"] = 2.85
    assert {atoms: distance for atoms, distance, *_ in near} == pytest.approx(want)
    assert all(others == [1.0, -1] for _, _, *others in near)


def test_skipped_residues_have_no_contacts_of_bonded_atoms(load, library):
    """Contacts would push the atoms of a residue apart that no bond holds."""
    residues = "ALA 1 N CA C O", "XYZ 2 N CA C O 6.3 1.5 0", "ALA 3 N CA C O"
    waters = "HOH B4 O 0 1.6 0", "HOH B5 O 0 3.1 0"
    structure = load(pdb(*residues, *waters))
    bonds = read_geometry(library(), structure).columns["bonds"]["indices"]
    assert not np.isin(bonds, range(4, 8)).any()
    near = rows(find_contacts(structure, bonds), structure)
    chain = [[2, 4], [4, 5], [5, 6], [6, 7], [6, 8]]
    assert near == rows(find_contacts(structure, np.concatenate([bonds, chain])), structure)
    near = [row[0] for row in near]
    assert "XYZ 2 CA ALA 3 CA" not in near
    assert "ALA 1 N XYZ 2 CA" in near
    # Waters are no further than bonded atoms.
    assert {"ALA 1 N HOH 4 O", "HOH 4 O HOH 5 O"} <= set(near)


def test_links_to_images_are_no_contacts(load):
    cell = "CRYST1   30.000   30.000   30.000  90.00  90.00  90.00 P 1 2 1       2\n"
    text = cell + pdb("XYZ 1 CB 2 2 1 SG 1 3 0", "XYZ B2 CB 28 4 1 SG 29 3 3")
    bonds = np.array([[0, 1], [2, 3]])
    own = "SSBOND   1 XYZ A    1    XYZ A    1                          1555   2555  2.0\n"
    other = "SSBOND   1 XYZ A    1    XYZ B    2                          1555   1455  3.6\n"
    pairs = {}
    for records in ("", own, other):
        structure = load(records + text)
        found = rows(find_contacts(structure, bonds, within=4.5), structure)
        pairs[records] = {atoms for (atoms,) in found}
    assert pairs[""] - pairs[own] == {"XYZ 1 SG XYZ 1 SG"}
    assert pairs[""] - pairs[other] == {"XYZ 1 SG XYZ 2 SG"}
    assert "XYZ 1 CB XYZ 1 SG" in pairs[own]


def test_an_atom_on_a_special_position_does_not_meet_itself(load):
    cell = CELL.replace("P 1 21 1 ", "P 1 2 1  ")
    structure = load(cell + pdb("LIG 1 C1 0 1 0 C2 0 4 3"))
    found = find_contacts(structure, np.empty((0, 2), int), within=9.5)
    own = found["indices"][:, 0] == found["indices"][:, 1]
    operations = found["operations"][found["images"][own]]
    x = structure.xyz[found["indices"][own, 0]]
    moved = np.einsum("nij,nj->ni", operations[:, :, :3], x) + operations[:, :, 3]
    assert len(x) > 2
    assert np.linalg.norm(moved - x, axis=1).min() > 5


@pytest.mark.parametrize(("place", "weight"), [("2 1 2", 1.0), ("0 4.2 0", 0.5)])
def test_contacts_of_an_atom_on_a_special_position_count_once(load, place, weight):
    """The cell has two contacts of an atom beside the axis, and one of an atom on it."""
    cell = CELL.replace("P 1 21 1 ", "P 1 2 1  ")
    for atoms in (f"C1 0 1 0 C2 {place}", f"C1 {place} C2 0 1 0"):
        structure = load(cell + pdb(f"LIG 1 {atoms}"))
        contacts = find_contacts(structure, np.empty((0, 2), int), within=3.5)
        first, second = contacts["indices"].T
        assert contacts["weights"][first != second].sum() == weight


def test_bonds_of_an_atom_on_a_special_position_are_no_contacts(load):
    cell = CELL.replace("P 1 21 1 ", "P 1 2 1  ")
    atoms = "C1 0 1 0 C2 1.2 1.5 0 C3 2.2 0.4 0 C4 3.4 1.2 0"
    structure = load(cell + pdb(f"LIG 1 {atoms}"))
    bonds = np.array([[0, 1], [1, 2], [2, 3]])
    contacts = find_contacts(structure, bonds, within=4.6)
    near = {tuple(sorted(pair)) for pair in contacts["indices"].tolist()}
    # Two bonds join C2 and its image, three C2 and that of C3, and four C3 and its image.
    assert near == {(1, 3), (2, 2), (2, 3), (3, 3)}


def scale(matrix, shift=(0, 0, 0)):
    """Return SCALE records."""
    return "".join(
        f"SCALE{k + 1}    {x:10.6f}{y:10.6f}{z:10.6f}     {t:10.5f}\n"
        for k, ((x, y, z), t) in enumerate(zip(matrix, shift, strict=True))
    )


def test_a_cell_may_be_shifted(load):
    cell = "CRYST1    8.000   10.000   12.500  90.00  90.00  90.00 P 1 2 1       2\n"
    to_cell = np.diag([1 / 8, 1 / 10, 1 / 12.5])
    atoms = "ION 1 C1 {} 3 {}", "ION 2 C2 {} 5 {}"
    places = (1, 2), (4.2, 6.6)
    found = []
    for records, x, z in (("", 0, 0), (scale(to_cell, (0.25, 0, 0.1)), 2, 1.25)):
        text = [a.format(p - x, q - z) for a, (p, q) in zip(atoms, places, strict=True)]
        structure = load(cell + records + pdb(*text))
        contacts = find_contacts(structure, np.empty((0, 2), int), within=7.5)
        operations = np.concatenate([np.eye(3, 4)[None], contacts["operations"]])
        first, second = structure.xyz[contacts["indices"]].swapaxes(0, 1)
        turns, shifts = np.split(operations[contacts["images"] + 1], [3], axis=2)
        moved = np.einsum("nij,nj->ni", turns, second) + shifts[:, :, 0]
        found.append(sorted(np.linalg.norm(moved - first, axis=1)))
    assert len(found[0]) > 5
    assert found[1] == pytest.approx(found[0], abs=1e-3)


def test_a_cell_that_is_turned_is_refused(load):
    cell = "CRYST1    8.000   10.000   12.500  90.00  90.00  90.00 P 1 2 1       2\n"
    turned = scale([[0, -1 / 8, 0], [1 / 10, 0, 0], [0, 0, 1 / 12.5]])
    structure = load(cell + turned + pdb("ION 1 C1 1 3 2"))
    with pytest.raises(
        StructureError, match=r"x\.pdb: its matrices .* turn the unit cell; a should"
    ):
        find_contacts(structure, np.empty((0, 2), int))
    with pytest.raises(StructureError, match="turn the unit cell"):
        derive_geometry(structure)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"xyz": np.zeros((1, 3))}, ValueError, r"xyz has shape \(1, 3\); it should be \(2, 3\)"),
        (
            {"xyz": [[0, 0, 0], [0, np.nan, 0]]},
            ValueError,
            r"xyz\[1\] is .*nan.*; it should be fini",
        ),
        (
            {"xyz": [[0, 1e30, 0], [0, 0, 0]]},
            ValueError,
            r"xyz\[0\] is .*; it should be finite, and",
        ),
        ({"xyz": "12"}, TypeError, "xyz"),
        ({"bonds": None}, TypeError, "bonds is None"),
        ({"bonds": np.array([[0.0, 1.5]])}, TypeError, "bonds has dtype float64"),
        ({"bonds": np.array([[0, 1, 1]])}, ValueError, r"bonds has shape \(1, 3\)"),
        (
            {"bonds": np.array([[0, 1], [0, 2]])},
            IndexError,
            r"bonds\[1\] is \[0, 2\]; .* from 0 to 1",
        ),
        ({"bonds": np.array([[0, -1]])}, IndexError, r"bonds\[0\] is \[0, -1\]; .* from 0 to 1"),
        ({"within": np.nan}, ValueError, "within is nan"),
        ({"within": -1.0}, ValueError, "within is -1"),
        ({"within": np.inf}, ValueError, "within is inf"),
        ({"within": 1e3}, ValueError, "within is 1000.0; it should be at most 50"),
        ({"within": "6"}, ValueError, "within is .6.; it should be a positive number"),
    ],
)
def test_refusals_of_contacts(load, given, error, message):
    structure = load(pdb("LIG 1 C1 0 0 0 C2 3 0 0"))
    with pytest.raises(error, match=f"^find_contacts: {message}"):
        find_contacts(structure, **{"bonds": np.empty((0, 2), int), **given})
