"""Bulk solvent, and the scale of structure factors to amplitudes."""

from __future__ import annotations

import numpy as np
import pytest

from fusedops import maps
from fusedops.crystal import structure_factors
from fusedops.scaling import Scale, fit_scale, k_mask, k_total, solvent_mask
from fusedops.structure import StructureError
from structures import pdb

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


def test_scales_of_tensors_have_gradients():
    torch = pytest.importorskip("torch")
    s = torch.randn(5, 3, dtype=torch.float64) / 4
    k, U, k_sol, B_sol = (
        torch.tensor(x, dtype=torch.float64, requires_grad=True)
        for x in (2.0, [0.1, 0.2, 0.3, 0.04, 0.05, 0.06], 0.4, 60.0)
    )
    assert torch.autograd.gradcheck(lambda *a: k_total(s, *a), (k, U))
    assert torch.autograd.gradcheck(lambda *a: k_mask(s, *a), (k_sol, B_sol))
    given = s.numpy(), *[x.detach().numpy() for x in (k, U)]
    np.testing.assert_allclose(k_total(s, k, U).detach(), k_total(*given))


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


def test_refusals_of_a_fit():
    grid, hkl, s, F_calc, F_mask = crystal("P 2 3")
    observed = abs(F_calc)

    def fails(match, observed=observed, F_calc=F_calc, grid=grid, **more):
        with pytest.raises(ValueError, match=match):
            fit_scale(observed, F_calc, hkl, grid, **more)

    bad = np.where(np.arange(len(hkl)) == 7, np.nan, 1.0)
    fails(r"F_calc\[7\] is \(?nan.*; it should be finite", F_calc=F_calc * bad)
    fails(r"F_mask\[7\] is \(?nan.*; it should be finite", F_mask=F_mask * bad)
    fails(r"observed\[0\] is inf; it should be finite", observed=np.inf * observed)
    fails(r"observed has shape \(3,\); it should be \(\d+,\), as hkl", observed=observed[:3])
    fails("observed has 0 amplitudes; it should have at least 4", np.nan * observed, F_mask=F_mask)
    fails("observed has 0 amplitudes; it should have at least 2", np.nan * observed)
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
    with pytest.raises(ValueError, match=r"xyz has shape \(2, 3\); it should be finite, of shape"):
        masked(load, "LIG 1 C1 5 5 5", xyz=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"xyz has shape \(1, 3\); it should be finite, of shape"):
        masked(load, "LIG 1 C1 5 5 5", xyz=np.full((1, 3), np.nan))
    structure = load(pdb("LIG 1 C1 5 5 5"))
    with pytest.raises(ValueError, match="grid is of a box; it should be of a crystal"):
        solvent_mask(structure, maps.box_grid(structure.xyz, 0.5, 2.0))
