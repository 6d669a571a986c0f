"""Bulk solvent, and the scale of structure factors to amplitudes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fusedops import maps, restraints
from fusedops.crystal import structure_factors
from fusedops.scaling import Scale, fit_scale, k_mask, k_total, read_amplitudes, solvent_mask
from fusedops.structure import StructureError, planar_groups, read_structure
from structures import SMALL, pdb, sums_of_small

gemmi = pytest.importorskip("gemmi")

CRYSTALS = {
    "P 1": (30, 32, 34, 70, 80, 95),
    "P 1 21 1": (30, 32, 34, 90, 100, 90),
    "P 1 1 21": (30, 32, 34, 90, 90, 100),
    "P 21 21 21": (30, 32, 34, 90, 90, 90),
    "P 41 21 2": (30, 30, 34, 90, 90, 90),
    "P 31 2 1": (30, 30, 34, 90, 90, 120),
    "R 3:R": (30, 30, 30, 70, 70, 70),
    "P 61": (30, 30, 34, 90, 90, 120),
    "P 2 3": (30, 30, 30, 90, 90, 90),
}


def crystal(name, resolution=3.0):
    """Return a grid, Miller indices, scattering vectors, and structure factors by chance."""
    cell, group = gemmi.UnitCell(*CRYSTALS[name]), gemmi.SpaceGroup(name)
    grid = maps.MapGrid(cell, group, (48, 48, 48))
    hkl = gemmi.make_miller_array(cell, group, resolution)
    s = hkl @ np.linalg.inv(grid.matrix)
    F = np.random.default_rng(0).normal(size=(2, len(hkl), 2)) @ [1, 1j]
    return grid, hkl, s, *F * [[100], [60]] * np.exp(-5 * (s * s).sum(1))


def symmetric(grid):
    """Return a U that all operations of the space group leave as it is."""
    A = grid.matrix
    turns = [A @ np.divide(op.rot, 24) @ np.linalg.inv(A) for op in grid.spacegroup.operations()]
    U = np.random.default_rng(1).normal(0, 0.05, (3, 3))
    U = np.mean([turn @ (U + U.T) @ turn.T for turn in turns], axis=0)
    return U[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]


@pytest.mark.parametrize("name", CRYSTALS)
def test_a_fit_finds_the_scale(name):
    grid, hkl, s, F_calc, F_mask = crystal(name)
    U_aniso = symmetric(grid)
    F_model = k_total(s, 0.3, U_aniso) * (F_calc + k_mask(s, 0.4, 60.0) * F_mask)
    found = fit_scale(abs(F_model), F_calc, hkl, grid, F_mask)
    # gemmi takes amplitudes in 32 bits.
    assert [found.k_overall, found.k_sol, found.B_sol] == pytest.approx([0.3, 0.4, 60], rel=1e-5)
    np.testing.assert_allclose(found.U_aniso, U_aniso, atol=1e-6)


def test_the_scales_are_their_definitions():
    s, U = (
        np.random.default_rng(0).normal(0, 0.2, (5, 3)),
        np.array([0.1, 0.2, 0.3, 0.04, 0.05, 0.06]),
    )
    matrix = U[[[0, 3, 4], [3, 1, 5], [4, 5, 2]]]
    want = [2 * np.exp(-2 * np.pi**2 * x @ matrix @ x) for x in s]
    np.testing.assert_allclose(k_total(s, 2.0, U), want)
    np.testing.assert_allclose(k_mask(s, 0.4, 60), [0.4 * np.exp(-60 * x @ x / 4) for x in s])


@pytest.mark.parametrize("B_sol", [46, np.uint8(46), np.array(46, np.uint8)], ids=repr)
def test_a_parameter_may_be_an_integer(B_sol):
    s = np.array([[0.0, 0.1, 0.0]])
    np.testing.assert_allclose(k_mask(s, 0.35, B_sol), k_mask(s, 0.35, 46.0), rtol=1e-12)


def test_scales_of_tensors_have_gradients():
    torch = pytest.importorskip("torch")
    s = torch.randn(5, 3, dtype=torch.float64) / 4
    k, U, k_sol, B_sol = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True)
        for x in (2.0, [0.1, 0.2, 0.3, 0.04, 0.05, 0.06], 0.4, 60.0)
    )
    assert torch.autograd.gradcheck(lambda *a: k_total(s, *a), (k, U))
    assert torch.autograd.gradcheck(lambda *a: k_mask(s, *a), (k_sol, B_sol))
    plain, U0 = s.numpy(), U.detach().numpy()
    want, of_mask = k_total(plain, 2.0, U0), k_mask(plain, 0.4, 60.0)
    np.testing.assert_allclose(k_total(s, k, U).detach(), want)
    # Vectors of NumPy's, or a list of them, with any parameter that is a tensor.
    for vectors in (plain, plain.tolist()):
        for parameters in ((k, U), (2.0, U), (k, U0), (2.0, [*U])):
            np.testing.assert_allclose(k_total(vectors, *parameters).detach(), want)
        for parameters in ((k_sol, B_sol), (0.4, B_sol), (k_sol, 60.0)):
            np.testing.assert_allclose(k_mask(vectors, *parameters).detach(), of_mask)
        np.testing.assert_array_equal(k_total(vectors, 2.0, U0), want)
        np.testing.assert_array_equal(k_mask(vectors, 0.4, 60.0), of_mask)
    assert torch.autograd.gradcheck(lambda *a: k_total(plain, *a), (k, U))


def test_parameters_may_be_arrays_without_dimensions_beside_a_tensor():
    torch = pytest.importorskip("torch")
    s, U = torch.randn(5, 3, requires_grad=True), [0.1, 0.2, 0.3, 0.04, 0.05, 0.06]
    pairs = [
        (k_mask(s, np.array(0.4), np.array(60.0)), k_mask(s, 0.4, 60.0)),
        (k_mask(s, np.array([[0.4]]), np.array([60.0])), k_mask(s, 0.4, 60.0)),
        (k_total(s, np.array(2.0), [*map(np.array, U)]), k_total(s, 2.0, U)),
        (k_total(s.detach().numpy(), np.array(2.0), torch.tensor(U)), k_total(s, 2.0, U)),
    ]
    for got, want in pairs:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want)
    for got, want in pairs[:2]:
        gradients = (torch.autograd.grad(found.sum(), s)[0] for found in (got, want))
        torch.testing.assert_close(*gradients)


def test_data_without_solvent():
    grid, hkl, s, F_calc, F_mask = crystal("P 1 21 1")
    observed = k_total(s, 2.0, symmetric(grid)) * abs(F_calc - k_mask(s, 0.1, 30.0) * F_mask)
    found = fit_scale(observed, F_calc, hkl, grid, F_mask)
    without = fit_scale(observed, F_calc, hkl, grid)
    assert (found.k_sol, found.B_sol) == (without.k_sol, without.B_sol) == (0, 0)
    assert found.k_overall == without.k_overall == pytest.approx(2.0, rel=0.1)


def test_reflections_that_are_not_observed_do_not_count():
    grid, hkl, s, F_calc, F_mask = crystal("P 21 21 21")
    scale = Scale(2.0, np.array([0.1, 0.05, 0, 0, 0, 0]), 0.35, 46.0)
    F_model = F_calc + k_mask(s, scale.k_sol, scale.B_sol) * F_mask
    observed = abs(F_model) * k_total(s, scale.k_overall, scale.U_aniso)
    free = np.arange(len(hkl)) % 20 == 0
    # Structure factors of these needn't be known either.
    observed[free] = F_calc[free] = np.nan
    found = fit_scale(observed, F_calc, hkl, grid, F_mask)
    assert found.k_overall == pytest.approx(2.0, rel=1e-5)


def test_a_fit_of_any_unit_and_of_lists():
    grid, hkl, s, F_calc, F_mask = crystal("P 21 21 21")
    observed = abs(F_calc + k_mask(s, 0.4, 60.0) * F_mask)
    for unit, unit_calc in ((1e30, 1), (1, 1e30), (1e30, 1e30), (1e-30, 1e-30), (1e200, 1e200)):
        given = observed * unit, F_calc * unit_calc, hkl, grid, F_mask * unit_calc
        found = fit_scale(*given)
        assert found.k_overall == pytest.approx(unit / unit_calc, rel=1e-5)
        assert [found.k_sol, found.B_sol] == pytest.approx([0.4, 60], rel=1e-5)
    lists = fit_scale(*(x if x is grid else x.tolist() for x in given))
    assert (lists.k_overall, lists.k_sol) == (found.k_overall, found.k_sol)


def test_a_mask_of_zeros_is_no_solvent():
    grid, hkl, _, F_calc, F_mask = crystal("P 21 21 21")
    observed = abs(F_calc)
    observed[::20] = np.nan
    for mask in (0 * F_mask, F_mask * np.isnan(observed)):
        found, without = (fit_scale(observed, F_calc, hkl, grid, m) for m in (mask, None))
        assert (found.k_sol, found.B_sol) == (0, 0)
        assert found.k_overall == without.k_overall == pytest.approx(1, rel=1e-5)


def test_refusals_of_scales():
    with pytest.raises(ValueError, match=r"k_mask: s has shape \(3,\); it should be \(M, 3\)"):
        k_mask(np.zeros(3), 0.35, 46.0)
    with pytest.raises(ValueError, match=r"k_total: s has shape \(5,\); it should be \(M, 3\)"):
        k_total(np.zeros(5), 1.0, np.zeros(6))
    with pytest.raises(ValueError, match="k_total: U_aniso has 3 numbers; it should have 6"):
        k_total(np.zeros((5, 3)), 1.0, np.zeros(3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: k_mask(s, None, 46.0), TypeError, "k_mask: k_sol "),
        (
            lambda s: k_mask(s, "a", 46.0),
            TypeError,
            "k_mask: k_sol has dtype .*; it should be a real",
        ),
        (
            lambda s: k_mask(s, 1 + 1j, 46.0),
            TypeError,
            "k_mask: k_sol has dtype complex128; it should",
        ),
        (
            lambda s: k_mask(s, 0.35, [1.0, 2.0]),
            ValueError,
            r"k_mask: B_sol has shape \(2,\); it shou",
        ),
        (
            lambda s: k_mask(s, np.ones(5), 46.0),
            ValueError,
            r"k_mask: k_sol has shape \(5,\); it shou",
        ),
        (lambda s: k_total(s, None, np.zeros(6)), TypeError, "k_total: k_overall "),
        (
            lambda s: k_total(s, 1.0, None),
            TypeError,
            "k_total: U_aniso is None; it should be an array",
        ),
        (
            lambda s: k_total(s, 1.0, 0.1),
            TypeError,
            "k_total: U_aniso is 0.1; it should be an array",
        ),
        (
            lambda s: k_total(s, 1.0, "abcdef"),
            TypeError,
            r"k_total: U_aniso\[0\] has dtype .*; it sho",
        ),
        (
            lambda s: k_total(s, 1.0, np.zeros((6, 2))),
            ValueError,
            r"k_total: U_aniso\[0\] has shape ",
        ),
    ],
)
def test_refusals_of_parameters(call, error, message):
    with pytest.raises(error, match=message):
        call(np.full((5, 3), 0.1))


def test_refusals_of_a_fit():
    grid, hkl, s, F_calc, F_mask = crystal("P 2 3")
    observed = abs(F_calc)
    with pytest.raises(ValueError, match=r"F_mask is up to .* times F_calc; it should be less th"):
        fit_scale(observed, F_calc, hkl, grid, 1e30 * F_mask)

    def fails(match, observed=observed, F_calc=F_calc, hkl=hkl, grid=grid, **more):
        with pytest.raises(more.pop("error", ValueError), match=f"fit_scale: {match}"):
            fit_scale(observed, F_calc, hkl, grid, **more)

    bad = np.where(np.arange(len(hkl)) == 7, np.nan, 1.0)
    fails(r"F_calc\[7\] is \(?nan.*; it should be finite", F_calc=F_calc * bad)
    fails(r"F_mask\[7\] is \(?nan.*; it should be finite", F_mask=F_mask * bad)
    fails(r"observed\[0\] is inf; it should be finite", observed=np.inf * observed)
    fails(r"observed has shape \(3,\); it should be \(\d+,\), as hkl", observed=observed[:3])
    with pytest.raises(ValueError, match=r"hkl has shape \(\d+,\); it should be \(M, 3\)"):
        fit_scale(observed, F_calc, hkl[:, 0], grid)
    fails("observed has 0 amplitudes; it should have at least 4", np.nan * observed, F_mask=F_mask)
    fails("observed has 0 amplitudes; it should have at least 2", np.nan * observed)
    fails("F_calc is zero everywhere; it should have other values", F_calc=0 * F_calc)
    fails("observed is zero everywhere; it should have other values", 0 * observed)
    fails(r"observed\[0\] is -.*; it should not be negative", -observed)
    whole = r"hkl\[0\] is \[.*\]; it should be whole numbers"
    for bad in (hkl + 0.4, hkl * np.nan, np.where(hkl, hkl, 1e10)):
        fails(whole, hkl=bad)
    real = "observed has dtype complex128; it should be real numbers"
    fails(real, F_calc, error=TypeError)
    fails(
        "F_calc has dtype <U.*; it should be complex numbers",
        F_calc=hkl[:, 0].astype(str),
        error=TypeError,
    )
    fails("grid is of a box; it should be of a crystal", grid=maps.box_grid(s, 0.5, 1.0))


CELL = "CRYST1   20.000   22.000   24.000  90.00 100.00  90.00 P 1 21 1\n"


def masked(load, *residues, header="", xyz=None, change=str):
    structure = load(CELL + header + change(pdb(*residues)))
    grid = maps.crystal_grid(structure, 0.5)
    return solvent_mask(structure, grid, xyz), grid


def test_a_mask_leaves_out_atoms_and_their_images(load):
    mask, grid = masked(load, "LIG 1 C1 5 5 5")
    assert set(np.unique(mask)) == {0, 1}
    voxels = np.stack(np.indices(mask.shape), -1) / mask.shape
    x = np.linalg.inv(grid.matrix) @ [5, 5, 5]
    apart = np.stack([voxels - image for image in (x, x * [-1, 1, -1] + [0, 0.5, 0])])
    distance = np.linalg.norm((apart - np.rint(apart)) @ grid.matrix.T, axis=-1).min(0)
    # The probe leaves the atom's radius, 1.7 to 1.8 Å, and the shrinkage takes 0.2 Å less.
    assert not mask[distance < 1.7].any()
    assert mask[distance > 2.5].all()
    # A mask covers the cell, so its structure factors have the symmetry of the crystal.
    F = structure_factors(mask, np.array([[1, 2, 3], [-1, 2, -3]]), grid.matrix)
    assert abs(F[0] - F[1]) < 1e-3 * abs(F[0])


def test_who_takes_up_room(load):
    empty, _ = masked(load, "LIG 1 H1 5 5 5")
    assert empty.all()
    empty, _ = masked(load, "LIG 1 C1 5 5 5", change=lambda text: text.replace("  1.00", "  0.00"))
    assert empty.all()
    one, _ = masked(load, "LIG 1 C1.A 5 5 5")
    two, _ = masked(load, "LIG 1 C1.A 5 5 5 C1.B 9 5 5")
    assert (1 - two).sum() == pytest.approx(2 * (1 - one).sum(), rel=0.1)
    unknown, _ = masked(load, "XYZ 1 C1 5 5 5")
    np.testing.assert_array_equal(unknown, one)
    # A copy by strict non-crystallographic symmetry, which the file leaves out.
    copied = (
        "MTRIX1   1  1.000000  0.000000  0.000000        4.00000\n"
        "MTRIX2   1  0.000000  1.000000  0.000000        0.00000\n"
        "MTRIX3   1  0.000000  0.000000  1.000000        0.00000\n"
    )
    copies, _ = masked(load, "LIG 1 C1 5 5 5", header=copied)
    np.testing.assert_array_equal(copies, two)
    moved, _ = masked(load, "LIG 1 C1 0 0 0", header=copied, xyz=[[5, 5, 5]])
    np.testing.assert_array_equal(moved, two)


def test_refusals_of_a_mask(load):
    def unknown(text):
        return text.replace("           C", "           X")

    with pytest.raises(StructureError, match="A/LIG 1 C1 is of an unknown element"):
        masked(load, "LIG 1 C1 5 5 5", change=unknown)
    with pytest.raises(ValueError, match=r"xyz has shape \(2, 3\); it should be \(1, 3\)"):
        masked(load, "LIG 1 C1 5 5 5", xyz=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"xyz\[0\] is \[nan, nan, nan\]; it should be fin"):
        masked(load, "LIG 1 C1 5 5 5", xyz=np.full((1, 3), np.nan))
    structure = load(pdb("LIG 1 C1 5 5 5"))
    with pytest.raises(ValueError, match="grid is of a box; it should be of a crystal"):
        solvent_mask(structure, maps.box_grid(structure.xyz, 0.5, 2.0))


@pytest.mark.parametrize("spacing", [0, -1.0, np.nan, np.inf, "1"])
def test_refusals_of_a_spacing(load, spacing):
    """gemmi takes NaN for an empty grid, and never ends with infinity."""
    structure = load(CELL + pdb("LIG 1 C1 5 5 5"))
    atoms = maps.scattering_atoms(structure)
    for name, call in {
        "crystal_grid": lambda: maps.crystal_grid(structure, spacing),
        "box_grid": lambda: maps.box_grid(structure.xyz, spacing, 2.0),
        "needed_blur": lambda: atoms.needed_blur(spacing),
    }.items():
        with pytest.raises(ValueError, match=f"{name}: spacing is .*; it should be a positive num"):
            call()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"margin": -3.0}, ValueError, "margin is -3.0; it should be a number of at least 0"),
        ({"margin": np.nan}, ValueError, "margin is nan"),
        ({"margin": np.inf}, ValueError, "margin is inf"),
        ({"margin": "3"}, TypeError, "margin is a str"),
        ({"xyz": [[0, 0, 0], [0, np.nan, 0]]}, ValueError, r"xyz\[1\] is .*nan.* should be finite"),
        ({"xyz": [[0, 0, 1e12]]}, ValueError, r"xyz\[0\] is .* within 1,000,000"),
        ({"xyz": np.zeros((0, 3))}, ValueError, "xyz has no atoms"),
        ({"xyz": np.zeros(3)}, ValueError, r"xyz has shape \(3,\)"),
        ({"xyz": [["a", "b", "c"]]}, TypeError, "xyz has dtype <U1"),
    ],
)
def test_refusals_of_a_box(given, error, message):
    """A box of a negative size would be a grid, too."""
    assert maps.box_grid([[0, 0, 0]], 0.5, 0.0).shape == (1, 1, 1)
    with pytest.raises(error, match=f"^box_grid: {message}"):
        maps.box_grid(**{"xyz": np.zeros((2, 3)), "spacing": 0.5, "margin": 2.0, **given})


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("crystal_grid", lambda path: maps.crystal_grid(path, 1.0)),
        ("scattering_atoms", maps.scattering_atoms),
        ("solvent_mask", lambda path: solvent_mask(path, None)),
        ("planar_groups", planar_groups),
        ("derive_geometry", restraints.derive_geometry),
        ("read_geometry", lambda path: restraints.read_geometry(".", path)),
        ("read_monomers", lambda path: restraints.read_monomers(".", path)),
        ("find_contacts", lambda path: restraints.find_contacts(path, [[0, 1]])),
    ],
)
def test_a_path_is_no_structure(name, call):
    with pytest.raises(
        TypeError, match=f"^{name}: structure is a str; it should be a Structure, as"
    ):
        call("x.pdb")


def test_refusals_of_a_grid_and_of_a_folder(load):
    structure = load(pdb("LIG 1 C1 5 5 5"))
    with pytest.raises(TypeError, match="solvent_mask: grid is a tuple; it should be a MapGrid"):
        solvent_mask(structure, (8, 8, 8))
    with pytest.raises(TypeError, match="fit_scale: grid is a NoneType; it should be a MapGrid"):
        fit_scale(np.ones(9), np.ones(9), np.zeros((9, 3), int), None)
    for read in (restraints.read_geometry, restraints.read_monomers):
        with pytest.raises(
            TypeError, match=f"{read.__name__}: folder is a NoneType; it should be a"
        ):
            read(None, structure)


CORE = """data_x
_cell_length_a 5
_cell_length_b 6
_cell_length_c 7
_cell_angle_alpha 90
_cell_angle_beta 100
_cell_angle_gamma 90
_symmetry_space_group_name_H-M 'P 21/c'
loop_
_refln_index_h
_refln_index_k
_refln_index_l
_refln_F_squared_calc
_refln_F_squared_meas
_refln_F_squared_sigma
_refln_observed_status
 1 0  0 9.0 100.0(4) 4.0 o
 0 2  0 9.0 -0.5     1.0 <
-1 0  2 9.0 25.0     1.0 x
 0 0 -4 9.0 ?        ?   o
"""
MACRO = CORE.replace("_refln_", "_refln.").replace("_cell_", "_cell.").replace("observed_", "")
MACRO = MACRO.replace("F_squared_meas", "F_meas_au").replace("F_squared_sigma", "F_meas_sigma_au")


def amplitudes(tmp_path, text):
    (tmp_path / "x.cif").write_text(text)
    return read_amplitudes(tmp_path / "x.cif")


def test_amplitudes_of_small_molecules(tmp_path):
    found = amplitudes(tmp_path, "data_empty\n" + CORE)
    np.testing.assert_array_equal(found.hkl, [[1, 0, 0], [0, 2, 0], [-1, 0, 2], [0, 0, -4]])
    np.testing.assert_array_equal(found.F, [10, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(found.sigma, [0.2, np.nan, np.nan, np.nan])
    assert found.negative == 1
    assert not found.free.any()
    assert found.cell.a == 5
    text = "\n".join(line for line in CORE.splitlines() if not line.startswith("_cell"))
    assert amplitudes(tmp_path, text).cell is None
    assert found.cell.parameters == (5, 6, 7, 90, 100, 90)
    assert found.spacegroup.hm == "P 1 21/c 1"


def test_amplitudes_of_macromolecules(tmp_path):
    found = amplitudes(tmp_path, "data_empty\n" + MACRO.replace(" <\n", " f\n"))
    np.testing.assert_array_equal(found.F, [100, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(found.sigma, [4, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(found.free, [False, True, False, False])
    assert found.negative == 1
    for sigma in ("0.0", "-4.0"):
        none = amplitudes(tmp_path, MACRO.replace("4.0", sigma))
        np.testing.assert_array_equal([none.F[0], none.sigma[0]], [100, np.nan])
    # Amplitudes are preferred, if with a sigma, and need no status.
    text = MACRO.replace("F_squared_calc", "F_squared_meas").replace("_refln.status\n", "")
    text = re.sub(r" [ox<]\n", "\n", text)
    np.testing.assert_array_equal(amplitudes(tmp_path, text).F, [100, np.nan, 25, np.nan])


@pytest.mark.parametrize("change", [str.lower, str.upper])
def test_names_and_statuses_have_any_case_and_quotes(tmp_path, change):
    def other(text):
        text = re.sub(r"_refln[_.]\S+", lambda found: change(found[0]), text)
        return re.sub(r"\b([oxf])\n", lambda found: f"'{change(found[1])}'\n", text)

    for text in (CORE, MACRO.replace(" <\n", " f\n")):
        want, found = amplitudes(tmp_path, text), amplitudes(tmp_path, other(text))
        assert np.isnan(found.F[2])
        for name in ("hkl", "F", "sigma", "free"):
            np.testing.assert_array_equal(getattr(found, name), getattr(want, name))


def test_amplitudes_without_values_hide_no_intensities(tmp_path):
    columns = "_refln.F_meas_au\n_refln.F_meas_sigma_au\n_refln.intensity_meas\n"
    text = MACRO.partition("loop_")[0] + "loop_\n_refln.index_h\n_refln.index_k\n_refln.index_l\n"
    rows = "1 0 0 ? ? 100.0 4.0\n0 2 0 ? ? 25.0 1.0\n"
    found = amplitudes(tmp_path, f"{text}{columns}_refln.intensity_sigma\n{rows}")
    np.testing.assert_array_equal(found.F, [10, 5])
    np.testing.assert_array_equal(found.sigma, [0.2, 0.1])


def test_refusals_of_amplitudes(tmp_path):
    with pytest.raises(StructureError, match=r"x\.cif: can't be read as .*: it has no reflections"):
        amplitudes(tmp_path, "data_x\n_cell_length_a 5\n")
    empty = "data_rxsf\nloop_ _refln.index_h _refln.index_k _refln.index_l _refln.F_meas_au\n"
    with pytest.raises(StructureError, match=r"x\.cif: can't be read as .*(empty|no reflections)"):
        amplitudes(tmp_path, empty)
    with pytest.raises(StructureError, match=r"a f_squared_meas is ten, which is no number"):
        amplitudes(tmp_path, CORE.replace("100.0(4)", "ten"))
    text = CORE.replace("F_squared_meas", "F_squared_other")
    with pytest.raises(StructureError, match="have no measured value, but index_h, index_k, "):
        amplitudes(tmp_path, text)
    with pytest.raises(StructureError, match=r"x\.cif: can't be read as reflections: "):
        amplitudes(tmp_path, "no CIF at all")
    with pytest.raises(StructureError, match=r"its reflections have no _refln\.index_k"):
        amplitudes(tmp_path, MACRO.replace("index_k", "index_other"))
    with pytest.raises(StructureError, match=r"x\.cif: can't be read as reflections: .*\?"):
        amplitudes(tmp_path, MACRO.replace(" 1 0  0 ", " ? 0  0 "))
    with pytest.raises(StructureError, match=r"an index_h is 1e\+11 in size, beyond 32 bits"):
        amplitudes(tmp_path, MACRO.replace(" 1 0  0 ", " 100000000000 0  0 "))
    with pytest.raises(StructureError, match="No such file"):
        read_amplitudes(tmp_path / "absent.cif")


def test_a_small_molecule_is_scaled_to_its_reflections(tmp_path):
    """One core CIF has the model and squared amplitudes, from sums over atoms by gemmi."""
    path = tmp_path / "x.cif"
    path.write_text(SMALL)
    structure = read_structure(path)
    grid = maps.crystal_grid(structure, 0.25)
    hkl = gemmi.make_miller_array(grid.cell, grid.spacegroup, 0.8)
    s, U_aniso = hkl @ np.linalg.inv(grid.matrix), np.array([0.01, 0.02, -0.005, 0, 0.003, 0])
    squares = np.square(k_total(s, 3.0, U_aniso) * abs(sums_of_small(hkl)))
    rows = [f"{h} {k} {l} {F2:.6f} 1.0\n" for (h, k, l), F2 in zip(hkl, squares, strict=True)]
    columns = ["index_h", "index_k", "index_l", "F_squared_meas", "F_squared_sigma"]
    path.write_text(SMALL + "loop_\n" + "".join(f"_refln_{c}\n" for c in columns) + "".join(rows))

    atoms, found = maps.scattering_atoms(read_structure(path)), read_amplitudes(path)
    np.testing.assert_array_equal(found.hkl, hkl)
    assert found.cell == grid.cell
    blur = atoms.needed_blur(0.25)
    rho = maps.density_map(atoms.blurred(blur), grid).grid.array
    F_calc = structure_factors(np.array(rho), found.hkl, grid.matrix, blur=blur)
    scale = fit_scale(found.F, F_calc, found.hkl, grid)
    # The map is drawn to four sigma.
    assert scale.k_overall == pytest.approx(3.0, rel=1e-3)
    np.testing.assert_allclose(scale.U_aniso, U_aniso, atol=1e-4)
