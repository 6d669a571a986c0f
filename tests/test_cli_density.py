"""The ``fusedops density`` command and the maps behind it, run in this process."""

import gzip
import json
import math
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import fusedops
from fusedops import cli, maps
from fusedops._frame import limits, registry
from fusedops.structure import StructureError, read_structure

gemmi = pytest.importorskip("gemmi")
pytest.importorskip("rich")

UBIQUITIN = str(files("fusedops") / "data/1ubi.pdb")
CELL = "CRYST1   12.000   14.000   10.000  90.00 {beta:6.2f}  90.00 {group:11s}   1\n"
ATOMS = (
    "ATOM      1  C1  GOL A   1       1.000   2.000   3.000  1.00 20.00           C\n"
    "{aniso}"
    "ATOM      2  H1 AGOL A   1       2.500   2.100   4.100  0.40 35.00           H\n"
    "ATOM      3  H1 BGOL A   1       2.600   1.900   3.600  0.60 25.00           H\n"
    "HETATM    4 ZN    ZN A   2       8.100   9.000   4.500  0.50 30.00          {zinc:4s}\n"
)
ANISO = "ANISOU    1  C1  GOL A   1     2500   3500   1500    400   -300    700       C\n"


def pdb(group="P 1", beta=90.0, aniso="", zinc="ZN  "):
    head = CELL.format(beta=beta, group=group) if group else ""
    return head + ATOMS.format(aniso=aniso, zinc=zinc)


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns exit code, stdout and stderr."""

    def run(*args):
        code = cli.main(["density", *map(str, args)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def load(tmp_path):
    """Return a function that reads a structure from text."""

    def load(text, name="x.pdb"):
        (tmp_path / name).write_text(text)
        return read_structure(tmp_path / name)

    return load


def read_map(path):
    ccp4 = gemmi.read_ccp4_map(str(path))
    return ccp4, ccp4.grid.array.copy()


def start_of(ccp4):
    return [ccp4.header_i32(word) for word in (5, 6, 7)]


def direct(structure, hkl, electron=False):
    """Return structure factors by gemmi's direct summation."""
    kind = gemmi.StructureFactorCalculatorE if electron else gemmi.StructureFactorCalculatorX
    calculator = kind(structure.gemmi.cell)
    model = structure.gemmi[0]
    return np.array([calculator.calculate_sf_from_model(model, h) for h in hkl.tolist()])


def of_map(ccp4, hkl, blur):
    """Return structure factors by a Fourier transform of a map, as if it weren't blurred."""
    cell, rho = ccp4.grid.unit_cell, ccp4.grid.array
    F = np.fft.fftn(rho.astype(np.float64))[tuple(-hkl.T)] * (cell.volume / rho.size)
    return F * np.exp(blur / 4 * cell.calculate_1_d2_array(hkl))


def r_factor(found, expected):
    return abs(abs(found) - abs(expected)).sum() / abs(expected).sum()


class TestTheMapIsRight:
    def test_structure_factors_of_ubiquitin(self, run, tmp_path):
        code, out, err = run(UBIQUITIN, "--out", tmp_path / "x.ccp4", "--json")
        assert (code, err) == (0, "")
        report = json.loads(out)
        # Atoms of B = 0 need a blur of 8π² 0.5² / 1.1.
        assert report["blur_angstrom2"] == pytest.approx(17.945, abs=1e-3)
        structure = read_structure(UBIQUITIN)
        ccp4, _ = read_map(tmp_path / "x.ccp4")
        hkl = gemmi.make_miller_array(ccp4.grid.unit_cell, ccp4.grid.spacegroup, 2.0)
        assert len(hkl) > 4000
        expected = direct(structure, hkl)
        found = of_map(ccp4, hkl, report["blur_angstrom2"])
        # The measured 0.0035 % come from the cutoff: n_sigma = 5 leaves next to nothing.
        assert r_factor(found, expected) < 1e-4
        assert abs(found - expected).sum() / abs(expected).sum() < 1e-4
        # Had the command not blurred, atoms would fall between voxels.
        atoms = maps.scattering_atoms(structure).blurred(2.0)
        sharp = maps.density_map(atoms, maps.crystal_grid(structure, 0.5))
        assert r_factor(of_map(sharp, hkl, 2.0), expected) > 5e-3

    @pytest.mark.parametrize("electron", [False, True])
    @pytest.mark.parametrize("small", [False, True])
    @pytest.mark.parametrize(
        ("group", "beta"), [("P 1", 101.0), ("P 1 21 1", 101.0), ("C 2 2 21", 90.0)]
    )
    def test_structure_factors_of_mixed_atoms(
        self, run, load, tmp_path, group, beta, small, electron
    ):
        text = pdb(group, beta, ANISO)
        if small:  # so that atoms reach across several cells
            text = text.replace("12.000   14.000   10.000", " 5.000    5.600    4.800")
        structure = load(text)
        options = ["--electron"] if electron else []
        code, out, _ = run(
            tmp_path / "x.pdb", "--out", tmp_path / "x.map", "--n-sigma", 6, "--json", *options
        )
        assert code == 0
        ccp4, rho = read_map(tmp_path / "x.map")
        hkl = gemmi.make_miller_array(ccp4.grid.unit_cell, ccp4.grid.spacegroup, 1.8)
        report = json.loads(out)
        expected = direct(structure, hkl, electron)
        found = of_map(ccp4, hkl, report["blur_angstrom2"])
        # Measured: 1e-6, the rounding of 32 bits; four standard deviations give 1e-5.
        assert abs(found - expected).sum() / abs(expected).sum() < 4e-6
        (f000,) = direct(structure, np.zeros((1, 3), dtype=int), electron)
        assert report["integral"] == pytest.approx(f000.real, rel=1e-6)

        assert list(rho.shape) == report["shape"]
        assert report["spacegroup"] == ccp4.grid.spacegroup.xhm() == group
        symmetric = ccp4.grid.clone()
        symmetric.symmetrize_avg()
        np.testing.assert_allclose(symmetric.array, rho, atol=1e-5 * rho.max())

    def test_an_atom_on_a_special_position_counts_by_its_occupancy(self, load):
        # An atom on the twofold axis has half of its occupancy in the file.
        text = pdb("P 1 2 1").splitlines(keepends=True)
        text[-1] = text[-1].replace("   8.100   9.000   4.500", "   0.000   9.000   0.000")
        structure = load("".join(text))
        atoms = maps.scattering_atoms(structure)
        ccp4 = maps.density_map(atoms, maps.crystal_grid(structure, 0.5))
        electrons = ccp4.grid.array.sum() * ccp4.grid.unit_cell.volume / ccp4.grid.point_count
        assert electrons == pytest.approx(30 + 2 * (6 + 1), rel=1e-3)


class TestAtoms:
    def test_isotropic(self, load):
        atoms = maps.scattering_atoms(load(pdb()))
        np.testing.assert_array_equal(atoms.b, [20, 35, 25, 30])
        np.testing.assert_array_equal(atoms.occupancy, [1, 0.4, 0.6, 0.5])
        np.testing.assert_allclose(atoms.amplitudes.sum(1), [6, 1, 1, 30], rtol=1e-3)
        assert (atoms.widths[:, -1] == 0).all()
        assert atoms.least_b == 20
        np.testing.assert_array_equal(atoms.blurred(7).b, [27, 42, 32, 37])

    def test_anisotropic_and_isotropic_ones_are_all_given_as_U(self, load):
        atoms = maps.scattering_atoms(load(pdb(aniso=ANISO)))
        np.testing.assert_allclose(atoms.b[0], [0.25, 0.35, 0.15, 0.04, -0.03, 0.07])
        np.testing.assert_allclose(atoms.b[1], 35 / (8 * np.pi**2) * np.array([1, 1, 1, 0, 0, 0]))
        U = np.array([[0.25, 0.04, -0.03], [0.04, 0.35, 0.07], [-0.03, 0.07, 0.15]])
        assert atoms.least_b == pytest.approx(8 * np.pi**2 * np.linalg.eigvalsh(U)[0])
        assert atoms.blurred(5).least_b == pytest.approx(atoms.least_b + 5)

    def test_they_are_in_the_order_of_the_file(self, load):
        lines = pdb(None).splitlines(keepends=True)
        # gemmi puts the atoms of a residue together.
        turned = [lines[i] for i in (0, 3, 1, 2)]
        structure = load("".join(f"{x[:6]}{k:5d}{x[11:]}" for k, x in enumerate(turned)))
        assert maps.scattering_atoms(structure).b.tolist() == [20, 30, 35, 25]
        np.testing.assert_array_equal(structure.xyz[1], [8.1, 9.0, 4.5])

    def test_electron_form_factors(self, load):
        structure = load(pdb())
        atoms = maps.scattering_atoms(structure, electron=True)
        carbon = gemmi.Element("C").c4322
        np.testing.assert_array_equal(atoms.amplitudes[0], carbon.a)
        np.testing.assert_array_equal(atoms.widths[0], carbon.b)

    def test_charges_are_counted_and_left_out(self, load):
        atoms = maps.scattering_atoms(load(pdb(zinc="ZN2+")))
        assert atoms.charged == 1
        np.testing.assert_array_equal(
            atoms.amplitudes, maps.scattering_atoms(load(pdb())).amplitudes
        )

    def test_copies_that_the_file_leaves_out(self, load):
        turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
        rows = zip(turn, (1.0, 2.0, 3.0), strict=True)
        matrix = "".join(
            f"MTRIX{k}   2{''.join(f'{x:10.6f}' for x in row)}     {shift:10.5f}\n"
            for k, (row, shift) in enumerate(rows, 1)
        )
        one = maps.scattering_atoms(load(pdb(aniso=ANISO)))
        two = maps.scattering_atoms(load(matrix + pdb(aniso=ANISO)))
        assert len(two.labels) == len(two.b) == len(two.widths) == 2 * len(one.xyz)
        np.testing.assert_allclose(two.xyz[4:], one.xyz @ turn.T + [1, 2, 3])
        np.testing.assert_allclose(two.b[4], [0.35, 0.25, 0.15, -0.04, -0.07, -0.03], atol=1e-9)
        np.testing.assert_allclose(two.b[5:], one.b[1:], atol=1e-9)

    @pytest.mark.parametrize(
        ("zinc", "reason"),
        [(" X", "A/ZN 2 ZN is of an unknown element"), ("OG", "no form factor of Og for X-rays")],
    )
    def test_elements_without_form_factors(self, load, zinc, reason):
        with pytest.raises(StructureError, match=reason):
            maps.scattering_atoms(load(pdb(zinc=zinc)))


class TestWithoutACell:
    @pytest.mark.parametrize("dummy", [False, True])
    def test_the_map_lies_on_the_atoms(self, run, load, tmp_path, dummy):
        head = CELL.format(beta=90, group="P 1").replace("12.0", " 1.0").replace("14.0", " 1.0")
        head = head.replace("10.0", " 1.0") if dummy else ""
        structure = load(head + pdb(None))
        out = tmp_path / "x.mrc"
        code, text, err = run(tmp_path / "x.pdb", "--out", out, "--json", "--spacing", 0.4)
        assert (code, err) == (0, "")
        report = json.loads(text)
        assert report["spacegroup"] is None
        ccp4, rho = read_map(out)
        assert start_of(ccp4) == report["start"]
        np.testing.assert_allclose(ccp4.grid.unit_cell.parameters[:3], 0.4 * np.array(rho.shape))
        # The box reaches as far as atoms do, up to a multiple of the spacing.
        reach, start = report["largest_radius_angstrom"], np.array(report["start"])
        gap = structure.xyz.min(0) - 0.4 * start
        assert (gap >= reach).all()
        assert (gap < reach + 0.4).all()
        gap = 0.4 * (start + rho.shape - 1) - structure.xyz.max(0)
        assert (gap >= reach - 1e-9).all()
        peak = 0.4 * (start + np.unravel_index(rho.argmax(), rho.shape))
        assert np.abs(peak - structure.xyz[3]).max() <= 0.2 + 1e-6
        assert report["integral"] == pytest.approx(6 + 1 + 15, rel=1e-3)

    def test_gemmi_finds_the_atoms_where_they_are(self, load, tmp_path, run):
        structure = load(pdb(None))
        run(tmp_path / "x.pdb", "--out", tmp_path / "x.map")
        ccp4, _ = read_map(tmp_path / "x.map")
        ccp4.setup(math.nan)
        density = [ccp4.grid.tricubic_interpolation(gemmi.Position(*x)) for x in structure.xyz]
        assert np.argmax(density) == 3
        assert min(density) > 0.1

    def test_a_margin_makes_a_box_of_a_crystal(self, run, load, tmp_path):
        load(pdb("P 1 21 1", 101.0))
        code, out, _ = run(
            tmp_path / "x.pdb", "--out", tmp_path / "x.map", "--margin", 9, "--json", "--blur", 0
        )
        assert code == 0
        report = json.loads(out)
        assert report["spacegroup"] is None
        assert report["start"] == [-16, -15, -12]
        assert report["integral"] == pytest.approx(22, rel=1e-3)


class TestTheCommand:
    def test_text(self, run, load, tmp_path):
        load(pdb("P 1 21 1", 101.0, zinc="ZN2+"))
        out = tmp_path / "x.ccp4"
        code, text, err = run(tmp_path / "x.pdb", "--out", out, "--spacing", 0.8)
        assert (code, err) == (0, "")
        lines = text.splitlines()
        assert lines[0].startswith("4 atoms, 1 charged ones as neutral, up to 5 Å far, B + 25.9 Å²")
        assert lines[1].startswith("cell of P 1 21 1, 12.00 x 14.00 x 10.00 Å: ")
        assert "MB of memory" in lines[1]
        assert "e/Å³" in lines[2]
        assert lines[-1] == f"wrote {out}"

    def test_the_file_holds_what_the_op_returns(self, run, load, tmp_path):
        structure = load(pdb(None))
        options = ["--margin", 8, "--radius", 3, "--blur", 4, "--backend", "numpy"]
        code, out, _ = run(tmp_path / "x.pdb", "--out", tmp_path / "x.map", "--json", *options)
        assert code == 0
        report = json.loads(out)
        assert report["backend"] == "numpy"
        _, rho = read_map(tmp_path / "x.map")
        atoms = maps.scattering_atoms(structure)
        expected = fusedops.gaussian_density(
            structure.xyz - 0.5 * np.array(report["start"]),
            atoms.b + 4,
            atoms.occupancy,
            atoms.amplitudes,
            atoms.widths,
            np.diag(0.5 * np.array(rho.shape)),
            rho.shape,
            radius=3.0,
        )
        # Coordinates are rounded to 32 bits, and a voxel at the rim may change sides.
        off = abs(rho - expected) > 1e-5 * expected.max()
        assert off.mean() < 1e-3
        assert rho.max() == pytest.approx(expected.max(), rel=1e-5)

    def test_parts_add_up(self, run, load, tmp_path, monkeypatch):
        load(pdb("P 1 21 1", 101.0, ANISO))
        run(tmp_path / "x.pdb", "--out", tmp_path / "one.map")
        monkeypatch.setattr(cli.density, "_STEP", 1)
        run(tmp_path / "x.pdb", "--out", tmp_path / "more.map")
        one, more = (read_map(tmp_path / name)[1] for name in ("one.map", "more.map"))
        np.testing.assert_allclose(more, one, atol=1e-6 * one.max())

    def test_a_bar_shows_on_a_terminal_and_leaves_stdout_alone(
        self, run, load, tmp_path, monkeypatch
    ):
        load(pdb())
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        code, out, err = run(tmp_path / "x.pdb", "--out", tmp_path / "x.map", "--json")
        assert code == 0
        assert "placing atoms" in err
        json.loads(out)

    def test_mmcif_and_gzip(self, run, load, tmp_path):
        load(pdb(None)).write(tmp_path / "x.cif.gz", read_structure(tmp_path / "x.pdb").xyz)
        assert gzip.decompress((tmp_path / "x.cif.gz").read_bytes()).startswith(b"data_")
        for name, out in (("x.pdb", "a.map"), ("x.cif.gz", "b.map")):
            assert run(tmp_path / name, "--out", tmp_path / out)[0] == 0
        assert (tmp_path / "a.map").read_bytes() == (tmp_path / "b.map").read_bytes()

    @pytest.mark.parametrize("group", ["P 1 21 1", None])
    def test_picture(self, run, load, tmp_path, group):
        pytest.importorskip("matplotlib")
        load(pdb(group, 101.0))
        picture = tmp_path / "x.png"
        code, out, err = run(
            tmp_path / "x.pdb", "--out", tmp_path / "x.map", "--picture", picture, "--electron"
        )
        assert (code, err) == (0, "")
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 20_000
        assert f"and {picture}" in out


def refused(result, reason):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("fusedops: ")
    assert reason in err


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (["--out", "x.png"], "x.png: name it .ccp4, .map or .mrc"),
            (["--out", "none/x.map"], "there is no folder"),
            (["--out", "x.map", "--picture", "x.map"], "Matplotlib can't draw into such a file"),
            (["--out", "x.map", "--picture", "none/x.png"], "there is no folder"),
        ],
    )
    def test_a_bad_name_is_told_before_any_work(self, run, tmp_path, monkeypatch, options, reason):
        pytest.importorskip("matplotlib")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(cli.density, "read_structure", None)
        refused(run(UBIQUITIN, *options), reason)

    def test_a_bad_file(self, run, tmp_path):
        refused(run(tmp_path / "none.cif", "--out", tmp_path / "x.map"), "none.cif: No such file")

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (["--backend", "torch"], "torch it takes torch tensors"),
            (["--margin", "2"], "--margin 2: atoms reach"),
            (["--blur", "0"], "A/ARG 42 C has no density: its B is 0.0 Å²"),
            (["--spacing", "0.01"], "make the spacing larger"),
            (["--spacing", "0.01", "--margin", "99"], "make the spacing larger"),
        ],
    )
    def test_nothing_is_written(self, run, tmp_path, monkeypatch, options, reason):
        monkeypatch.setattr(maps, "available_memory", lambda: 10**9)
        code, _, err = run(UBIQUITIN, "--out", tmp_path / "x.map", *options)
        assert code == 2
        assert reason in err
        assert list(tmp_path.iterdir()) == []

    def test_a_disk_that_is_full(self, run, load, tmp_path, monkeypatch):
        load(pdb())

        def full(self, path):
            Path(path).write_bytes(b"half")
            raise RuntimeError("Failed to write")

        monkeypatch.setattr(gemmi.Ccp4Map, "write_ccp4_map", full)
        code, _, err = run(tmp_path / "x.pdb", "--out", tmp_path / "x.map")
        assert code == 2
        assert "x.map: Failed to write" in err
        assert [path.name for path in tmp_path.iterdir()] == ["x.pdb"]

    @pytest.mark.parametrize(
        ("group", "reason"),
        [("P 9 9 9", "space group 'P 9 9 9' is unknown"), ("P 4", "doesn't go with the unit cell")],
    )
    def test_a_space_group_that_cannot_be(self, run, load, tmp_path, group, reason):
        load(pdb(group))
        refused(run(tmp_path / "x.pdb", "--out", tmp_path / "x.map"), reason)

    def test_an_unknown_backend_in_the_environment(self, run, load, tmp_path, monkeypatch):
        load(pdb())
        monkeypatch.setattr(registry, "_from_environment", registry._from_environment.__wrapped__)
        monkeypatch.setenv("FUSEDOPS_BACKEND", "abacus")
        code, _, err = run(tmp_path / "x.pdb", "--out", tmp_path / "x.map")
        assert code == 2
        assert "abacus" in err

    @pytest.mark.parametrize(
        ("package", "options", "extra"),
        [("gemmi", [], "structure"), ("matplotlib", ["--picture", "x.png"], "cli")],
    )
    def test_a_missing_package(self, run, monkeypatch, package, options, extra):
        monkeypatch.setitem(sys.modules, package, None)
        refused(
            run(UBIQUITIN, "--out", "x.map", *options),
            f'{package} is not installed: pip install "fusedops[{extra}]"',
        )

    @pytest.mark.parametrize(
        "options",
        [
            [],
            [UBIQUITIN],
            [UBIQUITIN, "--out", "x.map", "--spacing", "0"],
            [UBIQUITIN, "--out", "x.map", "--spacing", "nan"],
            [UBIQUITIN, "--out", "x.map", "--radius", "3", "--n-sigma", "4"],
            [UBIQUITIN, "--out", "x.map", "--margin", "-1"],
            [UBIQUITIN, "--out", "x.map", "--backend", "abacus"],
        ],
    )
    def test_usage(self, capsys, options):
        with pytest.raises(SystemExit) as end:
            cli.main(["density", *options])
        assert end.value.code == 2
        err = capsys.readouterr().err
        assert err.startswith("fusedops density: ")
        assert err.count("\n") == 1


class TestMemory:
    def test_what_linux_says(self, tmp_path):
        (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   5 kB\n")
        assert limits._system_memory(tmp_path / "meminfo") == 5120
        assert limits._system_memory(tmp_path / "none") is None

    def test_what_a_container_has_left(self, tmp_path):
        assert limits._cgroup_memory(tmp_path) is None
        for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "inactive_file 50\n")):
            (tmp_path / f"memory.{name}").write_text(text)
        assert limits._cgroup_memory(tmp_path) == 350
        (tmp_path / "memory.max").write_text("max\n")
        assert limits._cgroup_memory(tmp_path) is None

    def test_unknown_memory_refuses_nothing(self, monkeypatch):
        monkeypatch.setattr(limits, "_system_memory", lambda: None)
        monkeypatch.setattr(limits, "_cgroup_memory", lambda: None)
        maps.check_memory(1e15)
