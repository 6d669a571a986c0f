"""Slabs of a map: planes that are drawn alone, and gradients that add up to the whole map's."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from contract import same, tensor
from densities import (
    NAMES,
    agree,
    all_close,
    close,
    evaluate,
    function_of,
    problem,
    solve,
)
from fusedops import Lattice, gaussian_density
from places import EXACT, HAS_TORCH, available, interpreted, needs_torch, needs_triton

if HAS_TORCH:
    import torch

pytestmark = interpreted

#: Cells, with the planes at which their maps are cut: some slabs are empty, and one has one plane.
CUTS = {
    "orthogonal": (0, 1, 5, 5, 9),
    "triclinic": (0, 3, 8),
    "very skewed": (0, 2, 7),
    "skewed and smaller": (0, 0, 1, 6),
    "thinner": (0, 1, 2, 2),
}
LATTICE = Lattice(np.diag([10.0, 20.0, 30.0]), (8, 10, 12))


def of_slab(place, p, lattice, **options):
    """Return the map and the gradients by all atoms' arrays, for the slab's part of a cotangent."""
    cotangent = p.cotangent[lattice.start : lattice.stop]
    return solve(place, p, NAMES, cell=lattice, cotangent=cotangent, **options)


def check(place, name, p, **options):
    want, *gradients = of_slab(place, p, p.lattice, **options)
    ends = zip(CUTS[name], CUTS[name][1:], strict=False)
    found = [of_slab(place, p, p.lattice.slab(*planes), **options) for planes in ends]
    got, *parts = zip(*found, strict=True)
    (same if place[1] in EXACT else close)(np.concatenate(got), want)
    all_close([sum(part) for part in parts], gradients)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CUTS)
def test_slabs_are_the_map_in_parts(quick, name, anisotropic, dtype):
    check(quick, name, problem(name, 5, anisotropic=anisotropic, dtype=dtype))


def test_slabs_of_widened_gaussians(quick, anisotropic):
    p = problem("triclinic", 3, anisotropic=anisotropic)
    p.b[1] -= np.eye(6)[0] if anisotropic else 40.0
    check(quick, "triclinic", p, on_bad="clamp")


@pytest.mark.parametrize("planes", [9, 17, 33, 65])
def test_a_slab_leaves_memory_after_it_alone(quick, planes):
    """However many planes a thread takes at a time, the last may have fewer."""
    p = problem("orthogonal")._replace(shape=(70, 3, 4))
    room = np.full(p.shape, np.nan)
    out = tensor(room)[:planes] if quick[0] == "torch" else room[:planes]
    evaluate(quick, p, cell=p.lattice.slab(0, planes), grid_shape=None, out=out)
    agree(quick, room[:planes], evaluate(quick, p)[:planes])
    assert np.isnan(room[planes:]).all()


@needs_triton
def test_a_grid_of_many_voxels_when_interpreted():
    n = 2048
    lattice = Lattice(np.diag([1.0, 1.1, 1.2]) * n, (n, n, n)).slab(n - 1, n)
    atoms = (
        np.array([[-0.7, n * 1.1 - 0.3, 0.2]]), np.array([20.0]), np.array([1.0]),
        np.array([[3.0, 1.0]]), np.array([[10.0, 2.0]]),
    )  # fmt: skip
    atoms = [array.astype(np.float32) for array in atoms]
    near = np.ix_([0], np.arange(-4, 4), np.arange(-4, 4))
    cotangent = np.zeros(lattice.shape, np.float32)
    cotangent[near] = np.random.default_rng(0).standard_normal((1, 8, 8))
    want, pullback = gaussian_density.vjp(*atoms, lattice, radius=2.5, wrt=NAMES, backend="numpy")
    leaves = [tensor(array).requires_grad_() for array in atoms]
    out = gaussian_density(*leaves, lattice, radius=2.5, backend=available("torch", "triton")[1])
    found = torch.autograd.grad(out, leaves, tensor(cotangent))
    assert np.count_nonzero(want[near]) == np.count_nonzero(want) == out.count_nonzero()
    close(out.detach().numpy()[near], want[near])
    all_close([got.numpy() for got in found], pullback(cotangent), terms=1000)


def test_only_atoms_that_reach_a_slab_have_gradients(quick, anisotropic):
    # One atom on plane 0, whose sphere has planes 7, 8, 0, 1 and 2, and one on plane 4.
    xyz, radius = np.array([[0.0, 1.0, 1.0], [4 * 6 / 9, 1.0, 1.0]]), np.full(2, 1.5)
    p = problem("orthogonal", 2, anisotropic=anisotropic)._replace(xyz=xyz, radius=radius)
    for ends, reached in {(0, 2): (1, 0), (2, 7): (1, 1), (3, 7): (0, 1), (7, 9): (1, 0)}.items():
        out, *gradients = of_slab(quick, p, p.lattice.slab(*ends))
        assert out.any()
        for gradient in gradients:
            assert [bool(row.any()) for row in gradient] == list(map(bool, reached))


def test_a_slab_says_what_it_is():
    slab = LATTICE.slab(2, 5)
    assert repr(slab) == "Lattice(8 × 10 × 12 voxels, planes 2 to 4, on cpu)"
    assert (slab.shape, slab.grid) == ((3, 10, 12), LATTICE.grid)
    assert slab.largest_radius == LATTICE.measures[9]
    # Planes are counted in the cell.
    assert repr(slab.slab(0, 8)) == repr(LATTICE)
    assert slab.slab(7, 8).shape == (1, 10, 12)
    for other in (pickle.loads(pickle.dumps(slab)), copy.deepcopy(slab)):
        assert (other.kind, repr(other)) == (slab.kind, repr(slab))
    if HAS_TORCH:
        for there in (LATTICE.to("meta").slab(2, 5), slab.to("meta")):
            assert repr(there) == repr(slab).replace("cpu", "meta")
            assert there.step.device.type == "meta"


BAD = {
    "no int": ((0.5, 3), "start is a float; it should be an int"),
    "negative": ((-1, 3), "start is -1; it should be at least 0"),
    "beyond": ((9, 9), "start is 9; it should be at most 8, nx"),
    "too far": ((2, 9), "stop is 9; it should be from 2, start, to 8, nx"),
    "backwards": ((3, 2), "stop is 2; it should be from 3, start, to 8, nx"),
}


@pytest.mark.parametrize("name", BAD)
def test_planes_that_are_none_are_refused(name):
    ends, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=f"^Lattice.slab: {message}"):
        LATTICE.slab(*ends)


def test_the_grid_of_a_slab_is_the_cells():
    p, place = problem(), ("numpy", "numpy")
    slab = p.lattice.slab(1, 3)
    evaluate(place, p, cell=slab)
    with pytest.raises(ValueError, match=r"grid_shape is \(2, 7, 6\); the Lattice has \(8, 7, 6\)"):
        evaluate(place, p, cell=slab, grid_shape=slab.shape)
    with pytest.raises(ValueError, match="out"):
        evaluate(place, p, cell=slab, out=np.empty(p.shape))


@needs_torch
def test_compiled_code_draws_slabs():
    p = problem("triclinic", 3)
    run = function_of(p, lattice=p.lattice.slab(2, 5), on_bad="skip")
    torch._dynamo.reset()
    atoms = [tensor(array) for array in p.atoms]
    close(torch.compile(run, backend="eager", fullgraph=True)(*atoms).numpy(), run(*atoms).numpy())
