"""The ``fusedops planarity`` command, run in this process."""

import csv
import functools
import io
import json
import re
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import fusedops
from fusedops.structure import planar_groups, read_structure
from structures import pdb
from test_structure import FLAT

pytest.importorskip("gemmi")
pytest.importorskip("rich")

UBIQUITIN = str(files("fusedops") / "data/1ubi.pdb")
# An adenosine, with N6 lifted by half an Å, a hydrogen, and a water.
LIFTED = FLAT["A"].replace("N6 3.24 -1.87 4.71", "N6 3.65 -1.85 4.43")
AMP = pdb(f"AMP 500 {LIFTED} H2 1.38 -4.60 1.80", "HOH 501 O 9 9 9")
ADENINE = ["N9", "C8", "N7", "C5", "C6", "N6", "N1", "C2", "N3", "C4", "H2", "H8"]
AMP_CIF = (
    "data_comp_AMP\nloop_\n_chem_comp_plane_atom.comp_id\n_chem_comp_plane_atom.plane_id\n"
    "_chem_comp_plane_atom.atom_id\n_chem_comp_plane_atom.dist_esd\n"
    + "".join(f"AMP plan-1 {atom} 0.02\n" for atom in ADENINE)
)


@pytest.fixture(autouse=True)
def _no_library(monkeypatch):
    monkeypatch.delenv("CLIBD_MON", raising=False)


@pytest.fixture
def run(run):
    return functools.partial(run, "planarity")


@pytest.fixture(scope="module")
def ubiquitin():
    return read_structure(UBIQUITIN)


@pytest.fixture
def bent(ubiquitin, tmp_path):
    """Write ubiquitin with CZ of PHE 45 lifted by 0.9 Å out of its ring."""
    xyz = ubiquitin.xyz.copy()
    ring = [i for i, label in enumerate(ubiquitin.labels) if label.startswith("A/PHE 45 C")]
    zeta = ubiquitin.labels.index("A/PHE 45 CZ")
    sides = xyz[ring[-3]] - xyz[ring[-1]], xyz[ring[-2]] - xyz[ring[-1]]
    normal = np.cross(*sides)
    xyz[zeta] += 0.9 * normal / np.linalg.norm(normal)
    path = tmp_path / "bent.pdb"
    ubiquitin.write(path, xyz)
    return path


def best_plane_z(xyz):
    """Return |d|/0.02 by a singular value decomposition."""
    centred = xyz - xyz.mean(axis=0)
    return abs(centred @ np.linalg.svd(centred)[2][2]) / 0.02


def test_table(run, bent):
    code, out, err = run(bent, "--top", 3)
    assert code == 0
    assert err == ""
    assert "The worst planes: 3" in out
    first = next(line for line in out.splitlines() if "A/" in line)
    assert first.split()[:7] == ["A/PHE", "45", "ring", "PHE", "45", "CZ", "7"]
    assert sum("A/" in line for line in out.splitlines()) == 3
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines()[-7:])
    assert lines["planes"] == "103 of 428 atoms among 683"
    assert lines["waters"] == "81"
    assert f"by {cli_backend()}" in lines["NLL"]


def test_summary(run, told, ubiquitin, tmp_path):
    """The numbers of validation programs, over all atoms of all planes; an atom counts once."""
    bent, xyz = tmp_path / "x.pdb", ubiquitin.xyz.copy()
    # CA of residue 8 is in the peptide planes before and after it.
    xyz[ubiquitin.labels.index("A/LEU 8 CA")] += 0.9
    ubiquitin.write(bent, xyz)
    structure = read_structure(bent)
    groups = planar_groups(structure).groups
    planes = [plane for indices, _ in groups for plane in indices]
    z = [best_plane_z(structure.xyz[plane]) for plane in planes]
    every = np.concatenate(z)
    above = [plane[each > 4] for plane, each in zip(planes, z, strict=True)]
    expected = {
        "rmsd_angstrom": pytest.approx(0.02 * np.sqrt(np.mean(every**2))),
        "rmsz": pytest.approx(np.sqrt(np.mean(every**2))),
        "planes_above_4_sigma": sum(len(each) > 0 for each in above),
        "atoms_above_4_sigma": len(np.unique(np.concatenate(above))),
    }
    assert told(bent)["summary"] == expected
    assert expected["planes_above_4_sigma"] == 2
    assert 3 < expected["atoms_above_4_sigma"] < len(np.concatenate(above))
    out = run(bent)[1]
    rms = np.sqrt(np.mean(every**2))
    assert f"rmsd from planes  {0.02 * rms:.4f} Å\n" in out
    assert f"rmsZ              {rms:.2f}\n" in out
    assert f"above 4σ          2 planes, {expected['atoms_above_4_sigma']} atoms\n" in out


def test_sigma(told, bent):
    """Ten times the sigma: a tenth of every Z, and the same distances."""
    usual, wide = (told(bent, *more) for more in ([], ["--sigma", 0.2]))
    assert wide["summary"]["rmsz"] == pytest.approx(usual["summary"]["rmsz"] / 10)
    assert wide["summary"]["rmsd_angstrom"] == usual["summary"]["rmsd_angstrom"]
    for a, b in zip(usual["planes"], wide["planes"], strict=True):
        assert b["z"] == pytest.approx(a["z"] / 10)
    assert wide["nll"] != pytest.approx(usual["nll"], rel=0.01)


def stdin(content):
    stream = io.BytesIO(content)
    stream.name = "<stdin>"
    return io.TextIOWrapper(stream)


class TestStandardInput:
    @pytest.mark.parametrize("name", ["x.pdb", "x.cif", "x.cif.gz"])
    def test_the_format_is_recognized(self, told, ubiquitin, tmp_path, monkeypatch, name):
        ubiquitin.write(tmp_path / name, ubiquitin.xyz)
        expected = told(tmp_path / name)
        monkeypatch.setattr(sys, "stdin", stdin((tmp_path / name).read_bytes()))
        report = told("-")
        assert report["planes"] == expected["planes"]
        assert report["nll"] == expected["nll"]

    def test_flatten(self, run, tmp_path, monkeypatch):
        pytest.importorskip("scipy")
        monkeypatch.setattr(sys, "stdin", stdin(Path(UBIQUITIN).read_bytes()))
        assert run("-", "--flatten", tmp_path / "flat.pdb")[0] == 0
        assert len(read_structure(tmp_path / "flat.pdb").xyz) == 683

    @pytest.mark.parametrize(
        ("stream", "reason"),
        [(stdin(b""), "<stdin>: the file is empty"), (None, "-: stdin is closed")],
    )
    def test_one_without_a_model(self, refused, monkeypatch, stream, reason):
        monkeypatch.setattr(sys, "stdin", stream)
        refused("-", reason)


class TestRestraints:
    @pytest.fixture
    def amp(self, tmp_path):
        path = tmp_path / "amp.pdb"
        path.write_text(AMP)
        return path

    @pytest.fixture
    def cif(self, tmp_path):
        path = tmp_path / "AMP.cif"
        path.write_text(AMP_CIF)
        return path

    def test_without_a_file_the_ligand_is_skipped(self, run, told, amp):
        report, (code, out, err) = told(amp), run(amp)
        assert (report["counts"]["skipped"], report["planes"]) == ({"AMP": 1}, [])
        assert (code, err) == (0, "")
        assert "planes            0 of 0 atoms among 13\n" in out
        assert "rmsd" not in out
        assert "skipped           1 AMP: planes not known; --restraints or" in out

    @pytest.mark.parametrize("own", [{}, {"N6": 0.2}])
    def test_with_a_file(self, told, amp, tmp_path, own):
        """The plane has ten atoms and hydrogens, with the sigmas of the file."""
        sigmas = dict.fromkeys(ADENINE, 0.02) | own
        rows = "".join(f"AMP plan-1 {atom} {sigma}\n" for atom, sigma in sigmas.items())
        (tmp_path / "own.cif").write_text(AMP_CIF.partition("AMP plan")[0] + rows)
        report = told(amp, "--restraints", tmp_path / "own.cif")
        assert report["counts"]["skipped"] == {}
        (plane,) = report["planes"]
        z = best_plane_z(read_structure(amp).xyz[1:11]) * 0.02
        z /= [sigmas[atom] for atom in ADENINE[:10]]
        assert (plane["plane"], plane["atoms"]) == ("A/AMP 500 plan-1", 10)
        assert plane["worst_atom"] == f"A/AMP 500 {ADENINE[z.argmax()]}"
        assert (plane["worst_atom"] == "A/AMP 500 N6") == (not own)
        assert plane["z"] == pytest.approx(z.max())
        assert report["summary"]["rmsz"] == pytest.approx(np.sqrt(np.mean(z**2)))

    def test_from_a_library(self, told, amp, cif, tmp_path, monkeypatch):
        """A library is found by option or by environment; a file comes before it."""
        (tmp_path / "lib/a").mkdir(parents=True)
        (tmp_path / "lib/a/AMP.cif").write_text(AMP_CIF.replace(" 0.02", " 0.2"))
        library, file = ("--monomers", tmp_path / "lib"), ("--restraints", cif)
        named, own, both = (told(amp, *args)["planes"] for args in (library, file, library + file))
        monkeypatch.setenv("CLIBD_MON", str(tmp_path / "lib"))
        assert told(amp)["planes"] == named
        assert both == own
        assert own[0]["z"] == pytest.approx(10 * named[0]["z"])

    def test_sigma_leaves_planes_of_a_file_alone(self, told, amp, cif):
        args = ["--restraints", cif]
        one, two = (told(amp, *args, *s) for s in ([], ["--sigma", 1]))
        assert one["planes"] == two["planes"]

    def test_standard_residues_keep_their_planes_beside_a_library(self, told, tmp_path):
        """A library's files of standard residues aren't even opened."""
        (tmp_path / "p").mkdir()
        (tmp_path / "p/PHE.cif").write_text("nothing")
        expected, found = (
            told(UBIQUITIN, *more)["planes"] for more in ([], ["--monomers", tmp_path])
        )
        assert found == expected

    def test_flatten(self, told, amp, cif, tmp_path):
        pytest.importorskip("scipy")
        out = tmp_path / "flat.pdb"
        report = told(amp, "--restraints", cif, "--flatten", out)
        before, after = report["flatten"]["worst_z"]
        assert after < 0.5 < 4 < before


def cli_backend():
    return fusedops.planarity_nll.explain(np.zeros((3, 3)), [([[0, 1, 2]], [0.02])]).backend


def test_json_holds_everything(told, bent):
    report = told(bent)
    assert report["counts"] == {
        "planes": 103, "atoms": 683, "atoms_in_planes": 428, "waters": 81, "skipped": {},
        "incomplete": [],
    }  # fmt: skip
    assert set(report["seconds"]) == {"read", "find_planes", "value_and_gradient"}
    assert report["backend"] == cli_backend()

    planes = report["planes"]
    assert len(planes) == 103
    assert [p["z"] for p in planes] == sorted((p["z"] for p in planes), reverse=True)
    structure = read_structure(bent)
    found = planar_groups(structure)
    for (indices, _), labels in zip(found.groups, found.labels, strict=True):
        for plane, label in zip(indices, labels, strict=True):
            z = best_plane_z(structure.xyz[plane])
            (entry,) = (p for p in planes if p["plane"] == label)
            assert entry["atoms"] == len(plane)
            assert entry["z"] == pytest.approx(z.max())
            assert abs(entry["deviation_angstrom"]) == pytest.approx(0.02 * z.max())
            assert entry["rms_angstrom"] == pytest.approx(0.02 * np.sqrt(np.mean(z**2)))
            assert entry["worst_atom"] == structure.labels[plane[z.argmax()]]
    per_atom = np.log(0.02) + 0.5 * np.log(2 * np.pi)
    atoms = sum(indices.size for indices, _ in found.groups)
    chi2 = sum(p["atoms"] * (p["rms_angstrom"] / 0.02) ** 2 for p in planes)
    assert report["nll"] == pytest.approx(0.5 * chi2 + atoms * per_atom)


def test_csv_holds_the_same_planes(run, told, bent):
    planes = told(bent)["planes"]
    code, out, err = run(bent, "--csv")
    assert code == 0
    assert "103 of 428 atoms" in err
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [{k: str(v) for k, v in plane.items()} for plane in planes] == rows


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_top_limits_machine_output_too(run, form):
    _, out, _ = run(UBIQUITIN, form, "--top", 4)
    planes = json.loads(out)["planes"] if form == "--json" else out.splitlines()[1:]
    assert len(planes) == 4


def test_fits_and_backends_agree(told):
    expected = told(UBIQUITIN)
    for options in (["--fit", "weighted"], ["--backend", "numpy"]):
        report = told(UBIQUITIN, *options)
        assert report["nll"] == pytest.approx(expected["nll"], rel=1e-9)
    assert report["backend"] == "numpy"


@pytest.mark.parametrize("count", [1, 22])
def test_planes_that_lack_atoms_are_named(run, told, tmp_path, count):
    """The ring of a phenylalanine needs more than CG; the text has 20 of them, the JSON all."""
    atoms = "ATOM  {:5}  CG  PHE A{:4}    {:8.3f}   2.000   3.000  1.00  0.00           C\n"
    path = tmp_path / "x.pdb"
    path.write_text("".join(atoms.format(k, k, 9.0 * k) for k in range(1, count + 1)))
    names = [f"A/PHE {k} ring" for k in range(1, count + 1)]
    assert told(path)["counts"]["incomplete"] == names
    more = ", 2 more (all with --json)" * (count > 20)
    line = f"incomplete        {', '.join(names[:20])}{more}: atoms are missing; left out\n"
    assert line in run(path)[1]


class TestFlatten:
    @pytest.fixture(autouse=True)
    def _scipy(self):
        pytest.importorskip("scipy")

    def test_planes_become_flat_and_the_rest_stays(self, told, bent, tmp_path):
        out = tmp_path / "flat.cif.gz"
        report = told(bent, "--flatten", out)
        flat = report["flatten"]
        assert flat["file"] == str(out)
        assert 1 <= flat["steps"] <= 20
        before, after = read_structure(bent), read_structure(out)
        assert flat["nll"][0] == report["nll"]
        assert flat["worst_z"][0] == report["planes"][0]["z"] > 20
        assert flat["worst_z"][1] < 1

        again = told(out)
        assert again["nll"] == pytest.approx(flat["nll"][1], abs=1)
        assert again["nll"] < report["nll"] - 100
        assert again["planes"][0]["z"] == pytest.approx(flat["worst_z"][1], abs=0.1)
        shift = np.linalg.norm(after.xyz - before.xyz, axis=1)
        assert shift.max() == pytest.approx(flat["largest_shift_angstrom"], abs=2e-3)
        inside = np.unique(np.concatenate([i.ravel() for i, _ in planar_groups(before).groups]))
        assert np.delete(shift, inside).max() == 0

    def test_the_tether_holds_and_steps_are_counted(self, told, bent, tmp_path):
        def flatten(*options):
            return told(bent, "--flatten", tmp_path / "flat.pdb", *options)["flatten"]

        loose, tight = flatten("--tether", 1), flatten("--tether", 1e5)
        assert tight["largest_shift_angstrom"] < 0.1 * loose["largest_shift_angstrom"]
        assert tight["nll"][1] > loose["nll"][1]
        assert flatten("--steps", 1)["steps"] == 1

    def test_the_result_is_the_minimum(self, run, bent, tmp_path):
        run(bent, "--flatten", tmp_path / "flat.cif", "--steps", 500, "--tether", 100)
        start, end = read_structure(bent).xyz, read_structure(tmp_path / "flat.cif").xyz
        groups = planar_groups(read_structure(bent)).groups
        _, pullback = fusedops.planarity_nll.vjp(end, groups)
        # The file rounds to 0.001 Å, which changes gradients by about 0.001 / 0.02².
        np.testing.assert_allclose(pullback(1.0)[0] + 100 * (end - start), 0, atol=8)

    def test_value_and_gradient_of_the_minimised_function_agree(
        self, run, bent, tmp_path, monkeypatch
    ):
        checked = []

        def check(function, start, **options):
            rng = np.random.default_rng(0)
            x = start + 0.01 * rng.standard_normal(start.shape)
            direction = rng.standard_normal(start.shape)
            slope = function(x)[1] @ direction
            step = 1e-5 * direction
            assert slope == pytest.approx(
                (function(x + step)[0] - function(x - step)[0]) / 2e-5, rel=1e-5
            )
            assert function(start)[1] @ (x - start) != pytest.approx(slope)
            checked.append(function(x)[0])
            return OptimizeResult(x=x, nit=0)

        from scipy.optimize import OptimizeResult

        monkeypatch.setattr("scipy.optimize.minimize", check)
        run(bent, "--flatten", tmp_path / "flat.pdb", "--tether", 1e4)
        assert len(checked) == 1


def test_tables_need_no_rich(run, tmp_path, monkeypatch):
    """A table in plain columns, with the line about a flattened structure."""
    pytest.importorskip("scipy")
    monkeypatch.setitem(sys.modules, "rich", None)
    code, out, err = run(UBIQUITIN, "--top", 2, "--flatten", tmp_path / "flat.pdb")
    assert (code, err) == (0, "")
    assert "A/ARG 74 guanidinium" in out
    assert "steps in" in out
    assert f"wrote {tmp_path / 'flat.pdb'}" in out
