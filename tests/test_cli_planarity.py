"""The ``fusedops planarity`` command, run in this process."""

import csv
import io
import json
import os
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest

import fusedops
from fusedops import cli
from fusedops._frame import registry
from fusedops.structure import planar_groups, read_structure

pytest.importorskip("gemmi")
pytest.importorskip("rich")

UBIQUITIN = str(files("fusedops") / "data/1ubi.pdb")
LIGAND = (
    "HETATM    1  C1  GOL A   1       1.000   2.000   3.000  1.00  0.00           C\n"
    "HETATM    2  O   HOH A   2       4.000   2.000   3.000  1.00  0.00           O\n"
)


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns exit code, stdout and stderr."""

    def run(*args):
        code = cli.main(["planarity", *map(str, args)])
        return code, *capsys.readouterr()

    return run


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
    assert "The 3 worst planes" in out
    first = next(line for line in out.splitlines() if "A/" in line)
    assert first.split()[:5] == ["A/PHE", "45", "ring", "7", first.split()[4]]
    assert "PHE 45 CZ" in first
    assert sum("A/" in line for line in out.splitlines()) == 3
    assert "103 planes of 428 atoms among 683; skipped 81 waters" in out
    assert f"by {cli_backend()}" in out


def cli_backend():
    return fusedops.planarity_nll.explain(np.zeros((3, 3)), [([[0, 1, 2]], [0.02])]).backend


def test_json_holds_everything(run, bent):
    code, out, err = run(bent, "--json")
    assert code == 0
    assert err == ""
    report = json.loads(out)
    assert report["counts"] == {
        "planes": 103, "atoms": 683, "atoms_in_planes": 428, "waters": 81, "skipped": {},
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


def test_csv_holds_the_same_planes(run, bent):
    _, out, _ = run(bent, "--json")
    planes = json.loads(out)["planes"]
    code, out, err = run(bent, "--csv")
    assert code == 0
    assert "103 planes" in err
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [{k: str(v) for k, v in plane.items()} for plane in planes] == rows


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_top_limits_machine_output_too(run, form):
    _, out, _ = run(UBIQUITIN, form, "--top", 4)
    planes = json.loads(out)["planes"] if form == "--json" else out.splitlines()[1:]
    assert len(planes) == 4


def test_fits_and_backends_agree(run):
    expected = json.loads(run(UBIQUITIN, "--json")[1])
    for options in (["--fit", "weighted"], ["--backend", "numpy"]):
        report = json.loads(run(UBIQUITIN, "--json", *options)[1])
        assert report["nll"] == pytest.approx(expected["nll"], rel=1e-9)
    assert report["backend"] == "numpy"


def test_a_structure_without_planes(run, tmp_path):
    path = tmp_path / "ligand.pdb"
    path.write_text(LIGAND)
    code, out, err = run(path)
    assert code == 0
    assert err == ""
    assert "0 planes of 0 atoms among 2; skipped 1 waters, 1 GOL" in out
    assert json.loads(run(path, "--json")[1])["planes"] == []


class TestFlatten:
    @pytest.fixture(autouse=True)
    def _scipy(self):
        pytest.importorskip("scipy")

    def test_planes_become_flat_and_the_rest_stays(self, run, bent, tmp_path):
        out = tmp_path / "flat.cif.gz"
        code, text, err = run(bent, "--flatten", out, "--json")
        assert code == 0
        assert err == ""
        report = json.loads(text)
        flat = report["flatten"]
        assert flat["file"] == str(out)
        assert 1 <= flat["steps"] <= 20
        before, after = read_structure(bent), read_structure(out)
        assert flat["nll"][0] == report["nll"]
        assert flat["worst_z"][0] == report["planes"][0]["z"] > 20
        assert flat["worst_z"][1] < 1

        again = json.loads(run(out, "--json")[1])
        assert again["nll"] == pytest.approx(flat["nll"][1], abs=1)
        assert again["nll"] < report["nll"] - 100
        assert again["planes"][0]["z"] == pytest.approx(flat["worst_z"][1], abs=0.1)
        shift = np.linalg.norm(after.xyz - before.xyz, axis=1)
        assert shift.max() == pytest.approx(flat["largest_shift_angstrom"], abs=2e-3)
        inside = np.unique(np.concatenate([i.ravel() for i, _ in planar_groups(before).groups]))
        assert np.delete(shift, inside).max() == 0

    def test_the_tether_holds_and_steps_are_counted(self, run, bent, tmp_path):
        def flatten(*options):
            _, out, _ = run(bent, "--flatten", tmp_path / "flat.pdb", "--json", *options)
            return json.loads(out)["flatten"]

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

    def test_the_table_tells_about_it(self, run, bent, tmp_path):
        code, out, err = run(bent, "--flatten", tmp_path / "flat.pdb")
        assert (code, err) == (0, "")
        assert "steps in" in out
        assert f"wrote {tmp_path / 'flat.pdb'}" in out

    def test_a_bar_shows_on_a_terminal_and_leaves_stdout_alone(
        self, run, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        code, out, err = run(UBIQUITIN, "--flatten", tmp_path / "flat.pdb", "--json")
        assert code == 0
        assert "flattening" in err
        json.loads(out)

    @pytest.mark.parametrize("out", ["none/flat.pdb", "flat.xyz", "."])
    def test_a_bad_name_is_told_before_any_work(self, run, tmp_path, monkeypatch, out):
        monkeypatch.setattr(cli.planarity, "planar_groups", None)
        refused(run(UBIQUITIN, "--flatten", tmp_path / out), str(tmp_path))


def refused(result, reason):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("fusedops: ")
    assert reason in err


class TestRefusals:
    @pytest.mark.parametrize("options", [[], ["--json"], ["--csv"], ["--flatten", "x.pdb"]])
    def test_a_bad_file(self, run, tmp_path, options):
        broken = tmp_path / "broken.pdb"
        broken.write_bytes(b"nothing\n")
        refused(run(broken, *options), f"{broken}: neither PDB nor mmCIF")
        refused(run(tmp_path / "none.cif", *options), "none.cif: No such file")

    def test_a_backend_that_cannot_serve(self, run):
        refused(run(UBIQUITIN, "--backend", "torch"), "torch it takes torch tensors")

    def test_an_unknown_backend_in_the_environment(self, run, monkeypatch):
        # The environment is read once a process, so this process must read it again.
        monkeypatch.setattr(registry, "_from_environment", registry._from_environment.__wrapped__)
        monkeypatch.setenv("FUSEDOPS_BACKEND", "abacus")
        refused(run(UBIQUITIN), "abacus")

    @pytest.mark.parametrize(
        ("package", "options", "extra"),
        [("gemmi", [], "structure"), ("rich", [], "cli"), ("scipy", ["--flatten", "x.pdb"], "cli")],
    )
    def test_a_missing_package(self, run, monkeypatch, package, options, extra):
        monkeypatch.setitem(sys.modules, package, None)
        refused(
            run(UBIQUITIN, *options),
            f'{package} is not installed: pip install "fusedops[{extra}]"',
        )

    def test_json_needs_no_rich(self, run, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich", None)
        assert run(UBIQUITIN, "--json")[0] == 0

    @pytest.mark.parametrize(
        "options",
        [
            [],
            [UBIQUITIN, "--top", "0"],
            [UBIQUITIN, "--top", "many"],
            [UBIQUITIN, "--steps", "0"],
            [UBIQUITIN, "--tether", "-1"],
            [UBIQUITIN, "--tether", "nan"],
            [UBIQUITIN, "--fit", "best"],
            [UBIQUITIN, "--backend", "abacus"],
            [UBIQUITIN, "--json", "--csv"],
        ],
    )
    def test_usage(self, capsys, options):
        with pytest.raises(SystemExit) as end:
            cli.main(["planarity", *options])
        assert end.value.code == 2
        assert "usage: fusedops planarity" in capsys.readouterr().err


@pytest.mark.parametrize("top", ["1", "999"])
def test_a_reader_that_has_seen_enough(top):
    script = "import sys; from fusedops.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "planarity", UBIQUITIN, "--json", "--top", top]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
