"""The ``fusedops density`` command and the maps behind it, run in this process."""

import functools
import gzip
import io
import math
import struct
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import fusedops
from fusedops import cli, mapfiles, maps
from fusedops._host import limits
from fusedops.structure import StructureError, planar_groups, read_structure
from structures import SMALL, sums_of_small

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


@pytest.fixture(autouse=True)
def _folder(folder):
    pass


@pytest.fixture
def run(run):
    """Run the command; the map is x.map unless ``--out`` names another file."""
    return functools.partial(run, "density", "--out", "x.map")


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
    @pytest.mark.parametrize("electron", [False, True])
    @pytest.mark.parametrize("small", [False, True])
    @pytest.mark.parametrize(
        ("group", "beta"), [("P 1", 101.0), ("P 1 21 1", 101.0), ("C 2 2 21", 90.0)]
    )
    def test_structure_factors_of_mixed_atoms(self, told, load, group, beta, small, electron):
        text = pdb(group, beta, ANISO)
        if small:  # so that atoms reach across several cells
            text = text.replace("12.000   14.000   10.000", " 5.000    5.600    4.800")
        structure = load(text)
        options = ["--electron"] if electron else []
        report = told("x.pdb", "--n-sigma", 6, *options)
        ccp4, rho = read_map("x.map")
        hkl = gemmi.make_miller_array(ccp4.grid.unit_cell, ccp4.grid.spacegroup, 1.8)
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
    def test_the_map_lies_on_the_atoms(self, told, load, dummy):
        head = CELL.format(beta=90, group="P 1").replace("12.0", " 1.0").replace("14.0", " 1.0")
        head = head.replace("10.0", " 1.0") if dummy else ""
        structure = load(head + pdb(None))
        report = told("x.pdb", "--out", "x.mrc", "--spacing", 0.4)
        assert report["spacegroup"] is None
        ccp4, rho = read_map("x.mrc")
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

    def test_a_margin_makes_a_box_of_a_crystal(self, told, load):
        load(pdb("P 1 21 1", 101.0))
        report = told("x.pdb", "--margin", 9, "--blur", 0)
        assert report["spacegroup"] is None
        assert report["start"] == [-16, -15, -12]
        assert report["integral"] == pytest.approx(22, rel=1e-3)


class TestTheCommand:
    def test_text(self, run, load):
        load(pdb("P 1 21 1", 101.0, zinc="ZN2+"))
        code, text, err = run("x.pdb", "--out", "x.ccp4", "--spacing", 0.8)
        assert (code, err) == (0, "")
        lines = text.splitlines()
        assert lines[0] == "4 atoms (1 charged ones as neutral), X-rays, unit e/Å³"
        assert lines[1] == "spacing 0.8 Å, blur 25.9385 Å², radius 5 Å at most"
        assert lines[2].startswith("cell of P 1 21 1, 12.00 x 14.00 x 10.00 Å: ")
        assert lines[2].endswith("MB of memory")
        assert " electrons in all, by " in lines[3]
        assert lines[-1] == "wrote x.ccp4"

    def test_the_file_holds_what_the_op_returns(self, told, load):
        structure = load(pdb(None))
        options = ["--margin", 8, "--radius", 3, "--blur", 4, "--backend", "numpy"]
        report = told("x.pdb", *options)
        assert report["backend"] == "numpy"
        _, rho = read_map("x.map")
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

    def test_parts_add_up(self, run, load, monkeypatch):
        load(pdb("P 1 21 1", 101.0, ANISO))
        run("x.pdb", "--out", "one.map")
        monkeypatch.setattr(cli.density, "_STEP", 1)
        run("x.pdb", "--out", "more.map")
        one, more = (read_map(name)[1] for name in ("one.map", "more.map"))
        np.testing.assert_allclose(more, one, atol=1e-6 * one.max())

    def test_mmcif_and_gzip(self, run, load, tmp_path):
        load(pdb(None)).write("x.cif.gz", read_structure(tmp_path / "x.pdb").xyz)
        assert gzip.decompress((tmp_path / "x.cif.gz").read_bytes()).startswith(b"data_")
        for name, out in (("x.pdb", "a.map"), ("x.cif.gz", "b.map")):
            assert run(name, "--out", out)[0] == 0
        a, b = ((tmp_path / name).read_bytes() for name in ("a.map", "b.map"))
        # The second label has the model's name.
        assert a[:304] + a[384:] == b[:304] + b[384:]


def with_header(source, target, words):
    """Copy a map with other words in its header: ints, or floats."""
    content = bytearray(Path(source).read_bytes())
    for word, value in words.items():
        content[4 * word - 4 : 4 * word] = struct.pack(
            "<i" if isinstance(value, int) else "<f", value
        )
    Path(target).write_bytes(content)


class TestLike:
    """Maps on the grid of another map."""

    @pytest.fixture
    def target(self, run, load):
        """Return a function that writes a map, x.map, and the model of it, x.pdb."""

        def write(group="P 1 21 1", *options):
            load(pdb(group, 101.0 if group in ("P 1", "P 1 21 1") else 90.0))
            code, _, err = run("x.pdb", *options)
            assert (code, err) == (0, "")
            return read_map("x.map")

        return write

    def like(self, told, target="x.map"):
        return told("x.pdb", "--out", "y.map", "--like", target), *read_map("y.map")

    @pytest.mark.parametrize("group", ["P 1 21 1", "C 2 2 21", None])
    def test_the_map_itself(self, told, target, group):
        expected, rho = target(group)
        report, found, again = self.like(told)
        np.testing.assert_allclose(again, rho, atol=1e-5 * rho.max())
        assert report["correlation"] == pytest.approx(1)
        assert found.grid.unit_cell == expected.grid.unit_cell
        assert found.grid.spacegroup == expected.grid.spacegroup
        assert start_of(found) == start_of(expected) == report["start"]
        assert (group is None) == any(start_of(found))
        assert bytes(found.ccp4_header[:76]) == bytes(expected.ccp4_header[:76])

    @pytest.mark.parametrize("numbers", [20, 7])
    def test_the_correlation(self, told, run, target, numbers):
        """Voxels without a number don't count."""
        ccp4, rho = target()
        assert rho.shape[2] == 20
        noisy = 3 * rho + 0.3 * np.random.default_rng(0).standard_normal(rho.shape) - 1
        ccp4.grid.array[:] = np.where(np.arange(20) < numbers, noisy, np.nan)
        ccp4.write_ccp4_map("x.map")
        report, _, again = self.like(told)
        pair = again[..., :numbers].ravel(), ccp4.grid.array[..., :numbers].ravel()
        expected = np.corrcoef(*pair)[0, 1]
        assert 0.1 < expected < 0.95
        assert report["correlation"] == pytest.approx(expected, abs=1e-6)
        out = run("x.pdb", "--out", "y.map", "--like", "x.map")[1]
        assert f"correlation with x.map: {expected:.4f}\n" in out

    def test_a_constant_map_has_no_correlation(self, told, target):
        ccp4, _ = target()
        ccp4.grid.array[:] = 1
        ccp4.write_ccp4_map("x.map")
        assert self.like(told)[0]["correlation"] is None

    @pytest.mark.parametrize("group", ["P 1", "P 1 21 1"])
    def test_a_part_of_the_cell(self, told, target, group):
        ccp4, rho = target(group)
        low, high = gemmi.Fractional(-0.2, 0.5, 0.1), gemmi.Fractional(0.3, 1.4, 0.6)
        box = gemmi.FractionalBox()
        box.minimum, box.maximum = low, high
        ccp4.set_extent(box)
        ccp4.write_ccp4_map("part.map")
        report, found, part = self.like(told, target="part.map")
        assert start_of(found) == start_of(ccp4) == report["start"]
        assert found.header_i32(8) == rho.shape[0] > part.shape[0] == report["shape"][0]
        np.testing.assert_allclose(part, ccp4.grid.array, atol=1e-5 * rho.max())
        assert report["correlation"] == pytest.approx(1)
        # gemmi puts the part where it was.
        found.setup(math.nan, gemmi.MapSetup.NoSymmetry)
        there = np.isfinite(found.grid.array)
        assert there.sum() == part.size
        np.testing.assert_allclose(found.grid.array[there], rho[there], atol=1e-5 * rho.max())

    def test_axes_in_another_order(self, told, target, tmp_path):
        _, rho = target("P 1")
        nx, ny, nz = rho.shape
        # The file's columns are z, its rows x, its sections y.
        words = {1: nz, 2: nx, 3: ny, 17: 3, 18: 1, 19: 2}
        with_header("x.map", "turned.map", words)
        content = bytearray((tmp_path / "turned.map").read_bytes())
        data = np.ascontiguousarray(rho.transpose(1, 0, 2)).tobytes()
        content[-len(data) :] = data
        (tmp_path / "turned.map").write_bytes(content)
        report, _, again = self.like(told, target="turned.map")
        assert report["correlation"] == pytest.approx(1)
        np.testing.assert_allclose(again, rho, atol=1e-5 * rho.max())

    def test_the_origin_of_an_mrc_file(self, told, target):
        _, rho = target(None)
        words = {5: 0, 6: 0, 7: 0, 50: -2.75, 51: -3.0, 52: 1.125}
        with_header("x.map", "em.map", words)
        _, found, again = self.like(told, target="em.map")
        assert [found.header_float(word) for word in (50, 51, 52)] == [-2.75, -3.0, 1.125]
        moved = read_structure("x.pdb")
        moved.write("x.pdb", moved.xyz - [-2.75, -3.0, 1.125])
        with_header("x.map", "zero.map", {5: 0, 6: 0, 7: 0})
        _, _, expected = self.like(told, target="zero.map")
        np.testing.assert_allclose(again, expected, atol=0.01 * rho.max())

    def test_a_map_of_the_cell_without_symmetry_holds_all_copies(self, told, target):
        _, rho = target()
        with_header("x.map", "p1.map", {23: 1})
        report, _, again = self.like(told, target="p1.map")
        assert report["spacegroup"] == "P 1 21 1"
        np.testing.assert_allclose(again, rho, atol=1e-5 * rho.max())

    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            ({11: 0.0}, "its header has the cell 0, 14, 10"),
            ({8: 0}, "it should have a cell"),
            ({23: 4, 9: 27}, "27, 20 voxels don't go with its space group P 1 21 1"),
            ({25: 1}, "its header has a skew transformation"),
            ({11: 13.0}, "its unit cell, 13, 14, 10, 90, 101, 90, isn't that of"),
            ({5: 2, 50: 7.0}, "by NSTART and at 7, 0, 0 Å by ORIGIN; they should agree"),
            ({53: 0}, "Not a CCP4 map"),
        ],
    )
    def test_headers_that_are_refused(self, refused, target, words, reason):
        target()
        with_header("x.map", "bad.map", words)
        refused("x.pdb --out y.map --like bad.map", reason, "bad.map")

    @pytest.mark.parametrize(
        ("options", "reason"),
        [("--out x.map", "it is the input"), ("--out y.map --radius 1", "x.map: spacing 0.")],
    )
    def test_refusals(self, refused, target, options, reason):
        target()
        refused(f"x.pdb --like x.map {options}", reason)


class TestResolution:
    @pytest.mark.parametrize(("resolution", "spacing"), [(1.5, 0.5), (2.4, 0.8), (9, 3.0)])
    def test_spacing_and_blur_follow(self, told, resolution, spacing):
        report = told(UBIQUITIN, "--resolution", resolution)
        assert report["spacing_angstrom"] == pytest.approx(spacing)
        assert report["blur_angstrom2"] == pytest.approx(8 * np.pi**2 * spacing**2 / 1.1)
        ccp4, _ = read_map("x.map")
        assert max(ccp4.grid.spacing) <= spacing


def labels_of(ccp4):
    return [ccp4.header_str(57 + 20 * k).rstrip() for k in range(ccp4.header_i32(56))]


class TestLabels:
    @pytest.mark.parametrize("electron", [False, True])
    def test_where_the_map_is_from(self, run, load, electron):
        load(pdb(), "x.pdb")
        options = ["--electron"] if electron else []
        run("x.pdb", "--spacing", 0.4, *options)
        ccp4, _ = read_map("x.map")
        assert labels_of(ccp4) == [
            f"fusedops {fusedops.__version__} density",
            "model x.pdb",
            f"4 atoms, {'electrons, unit 1/A^2' if electron else 'X-rays, unit e/A^3'}",
            f"spacing 0.4 A, blur 0 A^2, radius {4.75 if electron else 4.5} A at most",
        ]

    def test_names_that_do_not_fit(self, run, load):
        name = "Ä" + "x" * 200 + ".pdb"
        load(pdb(), name)
        assert run(name)[0] == 0
        ccp4, _ = read_map("x.map")
        assert labels_of(ccp4)[1] == "model ?" + "x" * 73
        assert ccp4.header_str(77, 80).isascii()

    def test_too_many(self):
        with pytest.raises(ValueError, match="lines: 11; there should be at most 10"):
            mapfiles.set_labels(None, ["x"] * 11)


class TestMtz:
    def read(self, path):
        mtz = gemmi.read_mtz_file(str(path))
        assert mtz.column_labels() == ["H", "K", "L", "FC", "PHIC"]
        assert [column.type for column in mtz.columns] == list("HHHFP")
        hkl, (amplitude, phase) = mtz.make_miller_array(), mtz.array[:, 3:].T
        return mtz, hkl, amplitude * np.exp(1j * np.radians(phase.astype(np.float64)))

    @pytest.mark.parametrize(
        ("option", "number", "most"), [("--resolution", 2, 1e-4), ("--spacing", 1, 0.01)]
    )
    def test_ubiquitin(self, told, option, number, most):
        """To 2 Å, or to the limit of the grid."""
        report = told(UBIQUITIN, option, number, "--mtz", "x.mtz")
        limit = number if option == "--resolution" else 2 * max(read_map("x.map")[0].grid.spacing)
        assert report["resolution_angstrom"] == pytest.approx(limit)
        mtz, hkl, found = self.read("x.mtz")
        assert mtz.spacegroup.xhm() == "P 21 21 21"
        every = gemmi.make_miller_array(mtz.cell, mtz.spacegroup, limit)
        assert {tuple(h) for h in hkl.tolist()} == {tuple(h) for h in every.tolist()}
        assert len(hkl) == report["reflections"] == mtz.nreflections
        expected = direct(read_structure(UBIQUITIN), hkl)
        # Measured to 2 Å: 0.006 %, of the cutoff; with the blur left in it would be half of it all.
        assert r_factor(found, expected) < most
        assert abs(found - expected).sum() / abs(expected).sum() < 2 * most
        assert mtz.history[:2] == [f"fusedops {fusedops.__version__} density", "model 1ubi.pdb"]
        assert mtz.resolution_high() == pytest.approx(limit, abs=0.01)

    @pytest.mark.parametrize("electron", [False, True])
    @pytest.mark.parametrize("margin", [None, 9])
    def test_phases_are_by_the_origin_of_the_model(self, run, load, electron, margin):
        structure = load(pdb("P 1 21 1", 101.0, ANISO))
        options = ["--electron"] * electron + (["--margin", margin] if margin else [])
        args = ["--mtz", "x.mtz", "--n-sigma", 6]
        assert run("x.pdb", *args, "--resolution", 2, *options)[0] == 0
        mtz, hkl, found = self.read("x.mtz")
        assert (mtz.spacegroup.xhm() == "P 1") == (margin is not None)
        if margin:
            structure.gemmi.spacegroup_hm = "P 1"
        structure.gemmi.cell = mtz.cell
        structure.gemmi.setup_cell_images()
        expected = direct(structure, hkl, electron)
        assert abs(found - expected).sum() / abs(expected).sum() < 1e-3

    def test_of_a_part(self, run, load):
        """Structure factors are of the whole cell, even if the map is of a part."""
        load(pdb("P 1 21 1", 101.0))
        run("x.pdb", "--mtz", "x.mtz")
        ccp4, _ = read_map("x.map")
        box = gemmi.FractionalBox()
        box.minimum, box.maximum = gemmi.Fractional(0, 0, 0), gemmi.Fractional(0.3, 0.3, 0.3)
        ccp4.set_extent(box)
        ccp4.write_ccp4_map("part.map")
        run("x.pdb", "--out", "y.map", "--mtz", "y.mtz", "--like", "part.map")
        (_, hkl, expected), (_, again, found) = (self.read(name) for name in ("x.mtz", "y.mtz"))
        np.testing.assert_array_equal(hkl, again)
        np.testing.assert_allclose(found, expected, atol=1e-3 * abs(expected).max())


class TestPicture:
    @pytest.fixture
    def drawn(self, run, load, monkeypatch):
        """Return a function that runs the command and returns its figure, and the map."""
        pytest.importorskip("matplotlib")

        def draw(text, *options):
            load(text)
            figures = []
            monkeypatch.setattr(cli.pictures, "save_picture", lambda path, f: figures.append(f))
            code, _, err = run("x.pdb", "--picture", "x.png", *options)
            assert (code, err) == (0, "")
            return figures[0], read_map("x.map")[1]

        return draw

    @pytest.mark.parametrize("beta", [90.0, 120.0])
    @pytest.mark.parametrize("cuts", [[], ["z=0.25"], ["x=1A", "y=0", "y=3.5Å", "z=1"]])
    def test_nothing_is_clipped(self, drawn, beta, cuts):
        options = [word for cut in cuts for word in ("--slice", cut)]
        figure, _ = drawn(pdb("P 1 21 1", beta), *options)
        figure.draw_without_rendering()
        for artist in (*figure.axes, figure._suptitle, *figure.legends):
            box = artist.get_tightbbox()
            assert all(map(figure.bbox.containsx, (box.x0, box.x1))), artist
            assert all(map(figure.bbox.containsy, (box.y0, box.y1))), artist
        ends = [panel.transData.transform([(0, 0), (1, 1)]) for panel in figure.axes[:-1]]
        scales = np.ptp(ends, axis=1)
        np.testing.assert_allclose(scales, scales[0, 0], rtol=1e-3)
        boxes = [axes.get_tightbbox() for axes in figure.axes]
        for k, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:k])

    def test_one_scale_and_contours(self, drawn):
        from matplotlib.contour import QuadContourSet

        figure, rho = drawn(pdb("P 1 21 1", 101.0), "--slice", "y=9A", "--slice", "z=0.5")
        panels = figure.axes[:-1]
        cuts = [rho[:, round(9 / 14 * rho.shape[1])], rho[:, :, rho.shape[2] // 2]]
        for panel, cut in zip(panels, cuts, strict=True):
            (image,) = panel.images
            np.testing.assert_array_equal(image.get_array(), cut.T)
            assert image.norm.vmin == min(map(np.min, cuts))
            assert image.norm.vmax == max(map(np.max, cuts))
            (contour,) = (c for c in panel.collections if isinstance(c, QuadContourSet))
            levels = rho.mean() + np.array([1, 2, 3]) * rho.std()
            np.testing.assert_allclose(contour.levels, levels, rtol=1e-4)
        title = "x.pdb, X-rays; spacing 0.5 Å, blur 0 Å², radius 4.5 Å at most"
        assert figure.get_suptitle() == title
        # The plane of voxels that is nearest to 9 Å.
        assert [panel.get_title() for panel in panels] == ["b = 8.9 Å", "c = 5.0 Å"]

    def test_a_contour_is_where_the_density_is(self, drawn):
        """The zinc is at the same place in the picture as in the model, in an oblique cell."""
        # In the middle, so that no contour crosses an edge.
        text = pdb("P 1", 120.0).replace("8.100   9.000   4.500", "3.400   9.000   4.300")
        figure, _ = drawn(text, "--slice", "y=9A")
        (panel, _) = figure.axes
        x, z = (
            panel.transData.inverted()
            .transform(
                panel.collections[0]
                .get_transform()
                .transform(np.concatenate(panel.collections[0].get_paths()[2].to_polygons()))
            )
            .mean(axis=0)
        )
        assert (x, z) == pytest.approx((3.4, 4.3), abs=0.2)

    @pytest.mark.parametrize("name", ["$a$.pdb", "a\nb.pdb", "x" * 200 + ".pdb", "n\udce9.pdb"])
    def test_odd_names(self, run, load, tmp_path, name):
        pytest.importorskip("matplotlib")
        load(pdb(), "x.pdb").write(name, read_structure(tmp_path / "x.pdb").xyz)
        code, out, err = run(name, "--picture", "x.png")
        assert (code, err) == (0, "")
        assert "and x.png" in out
        assert Path("x.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_printed_is_short(load):
    structure = load(pdb(aniso=ANISO))
    assert repr(structure) == f"Structure({structure.path!r}, 4 atoms)"
    assert repr(maps.scattering_atoms(structure)) == "ScatteringAtoms(4 atoms, U, 0 charged)"
    assert repr(planar_groups(structure)) == "PlanarGroups(0 planes, 0 waters, 2 skipped)"


class TestSmallMolecules:
    @pytest.mark.parametrize("name", ["x.cif", "x.res.gz"])
    def test_structure_factors(self, told, tmp_path, name):
        """Cell, symmetry, elements, occupancy and U give gemmi's sums; Zn is on an inversion."""
        text = SMALL.encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
        report = told(name, "--n-sigma", 6, "--spacing", 0.25)
        assert (report["atoms"], report["spacegroup"]) == (4, "P 1 21/c 1")
        ccp4, _ = read_map("x.map")
        hkl = gemmi.make_miller_array(ccp4.grid.unit_cell, ccp4.grid.spacegroup, 0.9)
        sums = sums_of_small(hkl)
        found = of_map(ccp4, hkl, report["blur_angstrom2"])
        # Measured: 6e-7, the rounding of 32 bits.
        assert abs(found - sums).sum() / np.abs(sums).sum() < 4e-6

    def test_as_a_structure(self, load, tmp_path):
        structure = load(SMALL, "x.cif")
        assert structure.labels == ["C1", "Zn1", "O1", "H1"]
        for name in ("y.cif", "y.pdb"):
            structure.write(name, structure.xyz + 1)
            moved = read_structure(tmp_path / name).xyz
            np.testing.assert_allclose(moved, structure.xyz + 1, atol=6e-4)  # the digits of a PDB

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ("0.04 1.0", "? 1.0", "the B of H1 is nan; it should be finite"),
            ("_cell_length_b 7.5\n", "", "no unit cell, which fractional coordinates need"),
            ("-x,-y,-z\n", "x,y,-z+1/3\n", "the space group 'x,y,z; -x,y+1/2,-z+1/2; x,y,-z+1/3"),
            ("0.3 0.4 0.1", "? 0.4 0.1", "the coordinates of O1 are not finite numbers"),
            ("H1 H", "H1 Qq", "H1 is of an unknown element"),
        ],
    )
    def test_what_lacks_is_told(self, refused, tmp_path, old, new, reason):
        assert old in SMALL
        (tmp_path / "x.cif").write_text(SMALL.replace(old, new))
        refused("x.cif", reason)


@pytest.mark.parametrize(
    ("method", "options", "noted"),
    [
        ("ELECTRON MICROSCOPY", [], True),
        ("ELECTRON CRYSTALLOGRAPHY", [], True),
        ("ELECTRON MICROSCOPY", ["--electron"], False),
        ("X-RAY DIFFRACTION", [], False),
    ],
)
def test_a_model_by_electrons_asks_for_their_form_factors(run, load, method, options, noted):
    load(f"EXPDTA    {method}\n{pdb()}")
    code, _, err = run("x.pdb", *options)
    note = f"is from {method.lower()} and gets form factors for X-rays; --electron takes"
    assert code == 0
    assert (note in err) == noted
    assert err.count("\n") == noted


def test_standard_input(run, load, monkeypatch):
    load(pdb())
    run("x.pdb")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pdb().encode())))
    assert run("-", "--out", "y.map")[0] == 0
    (one, rho), (two, again) = (read_map(name) for name in ("x.map", "y.map"))
    np.testing.assert_array_equal(rho, again)
    assert (labels_of(one)[1], labels_of(two)[1]) == ("model x.pdb", "model stdin")


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


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"blur": math.nan}, ValueError, "write_mtz: blur is nan; it should be a finite number"),
        ({"blur": -1.0}, ValueError, "write_mtz: blur is -1.0; it should be a finite number"),
        ({"resolution": math.nan}, ValueError, "write_mtz: resolution is nan"),
        ({"spacing": 2.0}, ValueError, "write_mtz: grid has shape .*; it should be the map's"),
        ({"resolution": 100.0}, StructureError, "x.mtz: its cell has no reflections to 100"),
    ],
)
def test_an_mtz_that_would_hold_nothing_is_an_error(changes, kind, message, load, tmp_path):
    structure = load(pdb())
    grid = maps.crystal_grid(structure, 1.0)
    ccp4 = maps.density_map(maps.scattering_atoms(structure).blurred(50.0), grid)
    given = {"resolution": 4.5, "blur": 50.0, **changes}
    if "spacing" in given:
        grid = maps.crystal_grid(structure, given.pop("spacing"))
    with pytest.raises(kind, match=message):
        mapfiles.write_mtz(tmp_path / "x.mtz", ccp4, grid, **given)
    assert not (tmp_path / "x.mtz").exists()
