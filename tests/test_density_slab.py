"""Slabs of a map: planes that are drawn alone, and gradients that add up to the whole map's."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from fusedops import Lattice, gaussian_density
from places import EXACT, HAS_TORCH, available, interpreted, needs_torch, needs_triton
from test_density import agree, close, evaluate, leaves_of, problem, same, tensor

if HAS_TORCH:
    import torch

pytestmark = interpreted

NAMES = ("xyz", "b", "occupancy", "amplitudes", "widths")
#: Cells, with the planes at which their maps are cut: some slabs are empty, and one has one plane.
CUTS = {
    "orthogonal": (0, 1, 5, 5, 9),
    "triclinic": (0, 3, 8),
    "very skewed": (0, 2, 7),
    "skewed and smaller": (0, 0, 1, 6),
    "thinner": (0, 1, 2, 2),
}
cells = pytest.mark.parametrize("name", CUTS)


@pytest.fixture(params=[False, True], ids=["iso", "aniso"])
def anisotropic(request):
    return request.param


def slabs_of(name, p):
    lattice = Lattice(p.cell, p.shape)
    return [lattice.slab(*ends) for ends in zip(CUTS[name], CUTS[name][1:], strict=False)]


def solve(place, p, lattice, **options):
    """Return the map and the gradients by all atoms' arrays, for the slab's part of a cotangent."""
    cotangent = p.cotangent[lattice.start : lattice.stop]
    options = {"backend": place[1], **options}
    if place[0] == "numpy":
        out, pullback = gaussian_density.vjp(
            *p.atoms, lattice, radius=p.radius, wrt=NAMES, **options
        )
        return [out, *pullback(cotangent)]
    leaves = [tensor(array).requires_grad_() for array in p.atoms]
    out = gaussian_density(*leaves, lattice, radius=tensor(p.radius), **options)
    found = (out, *torch.autograd.grad(out, leaves, tensor(cotangent)))
    return [np.asarray(array.detach()) for array in found]


def check(place, name, p, **options):
    want, *gradients = solve(place, p, Lattice(p.cell, p.shape), **options)
    found = [solve(place, p, slab, **options) for slab in slabs_of(name, p)]
    got = np.concatenate([out for out, *_ in found])
    (same if place[1] in EXACT else close)(got, want)
    for parts, gradient in zip(
        zip(*[own for _, *own in found], strict=True), gradients, strict=True
    ):
        close(sum(parts), gradient, terms=4000)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@cells
def test_slabs_are_the_map_in_parts(quick, name, anisotropic, dtype):
    check(quick, name, problem(name, 5, anisotropic=anisotropic, dtype=dtype))


@pytest.mark.parametrize("planes", [9, 17, 33, 65])
def test_a_slab_leaves_memory_after_it_alone(quick, planes):
    """However many planes a thread takes at a time, the last may have fewer."""
    p = problem("orthogonal")._replace(shape=(70, 3, 4))
    room = np.full(p.shape, np.nan)
    out = tensor(room)[:planes] if quick[0] == "torch" else room[:planes]
    slab = Lattice(p.cell, p.shape).slab(0, planes)
    evaluate(quick, p, cell=slab, grid_shape=None, out=out)
    agree(quick, room[:planes], evaluate(quick, p)[:planes])
    assert np.isnan(room[planes:]).all()


@needs_triton
@pytest.mark.parametrize("name", ["orthogonal", "skewed and smaller"])
def test_slabs_when_interpreted(name, anisotropic):
    check(available("torch", "triton"), name, problem(name, 2, anisotropic=anisotropic))


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
    for got, gradient in zip(found, pullback(cotangent), strict=True):
        close(got.numpy(), gradient, terms=1000)


def test_slabs_of_widened_gaussians(quick, anisotropic):
    p = problem("triclinic", 3, anisotropic=anisotropic)
    p.b[1] -= np.eye(6)[0] if anisotropic else 40.0
    check(quick, "triclinic", p, on_bad="clamp")


@needs_torch
def test_second_derivatives_of_slabs_add_up(torch_backend, anisotropic):
    p = problem("skewed and smaller", 3, anisotropic=anisotropic)
    cotangent = tensor(p.cotangent).requires_grad_()

    def products(lattice):
        """Return products of the Hessian with a vector, and the derivative by the cotangent."""
        leaves = leaves_of(p)
        out = gaussian_density(
            *leaves,
            *map(tensor, p[3:5]),
            lattice,
            radius=tensor(p.radius),
            backend=torch_backend,
        )
        own = cotangent[lattice.start : lattice.stop]
        first = torch.autograd.grad(out, leaves, own, create_graph=True)
        along = sum((g * (1 + torch.arange(g.numel()).reshape(g.shape))).sum() for g in first)
        return torch.autograd.grad(along, [*leaves, cotangent])

    found = [products(slab) for slab in slabs_of("skewed and smaller", p)]
    for parts, want in zip(
        zip(*found, strict=True), products(Lattice(p.cell, p.shape)), strict=True
    ):
        close(sum(parts).numpy(), want.numpy(), terms=4000)


def test_only_atoms_that_reach_a_slab_have_gradients(quick, anisotropic):
    p = problem("orthogonal", 2, anisotropic=anisotropic)
    # One atom on plane 0, whose sphere has planes 7, 8, 0, 1 and 2, and one on plane 4.
    xyz, radius = np.array([[0.0, 1.0, 1.0], [4 * 6 / 9, 1.0, 1.0]]), np.full(2, 1.5)
    p = p._replace(xyz=xyz, radius=radius)
    lattice = Lattice(p.cell, p.shape)
    for ends, reached in {(0, 2): (1, 0), (2, 7): (1, 1), (3, 7): (0, 1), (7, 9): (1, 0)}.items():
        out, *gradients = solve(quick, p, lattice.slab(*ends))
        assert out.any()
        for gradient in gradients:
            found = [bool(row.any()) for row in gradient]
            assert found == list(map(bool, reached))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_slab_without_planes(place, dtype, anisotropic):
    p = problem(anisotropic=anisotropic, dtype=dtype)
    out, *gradients = solve(place, p, Lattice(p.cell, p.shape).slab(3, 3))
    assert (out.shape, out.dtype) == ((0, 7, 6), dtype)
    for gradient, array in zip(gradients, p.atoms, strict=True):
        same(gradient, np.zeros_like(array))


def test_a_slab_says_what_it_is():
    lattice = Lattice(np.diag([10.0, 20.0, 30.0]), (8, 10, 12))
    slab = lattice.slab(2, 5)
    assert repr(slab) == "Lattice(8 × 10 × 12 voxels, planes 2 to 4, on cpu)"
    assert (slab.shape, slab.grid, slab.largest_radius) == (
        (3, 10, 12),
        lattice.grid,
        lattice.measures[9],
    )
    # Planes are counted in the cell.
    assert repr(slab.slab(0, 8)) == repr(lattice)
    assert slab.slab(7, 8).shape == (1, 10, 12)
    for other in (pickle.loads(pickle.dumps(slab)), copy.deepcopy(slab)):
        assert (other.kind, repr(other)) == (slab.kind, repr(slab))


@needs_torch
def test_a_slab_stays_on_its_device():
    lattice = Lattice(np.diag([10.0, 20.0, 30.0]), (8, 10, 12))
    for slab in (lattice.to("meta").slab(2, 5), lattice.slab(2, 5).to("meta")):
        assert repr(slab) == "Lattice(8 × 10 × 12 voxels, planes 2 to 4, on meta)"
        assert slab.step.device.type == "meta"


BAD = {
    "no int": ((0.5, 3), TypeError, "start is a float; it should be an int"),
    "negative": ((-1, 3), ValueError, "start is -1; it should be at least 0"),
    "beyond": ((9, 9), ValueError, "start is 9; it should be at most 8, nx"),
    "too far": ((2, 9), ValueError, "stop is 9; it should be from 2, start, to 8, nx"),
    "backwards": ((3, 2), ValueError, "stop is 2; it should be from 3, start, to 8, nx"),
}


@pytest.mark.parametrize("name", BAD)
def test_planes_that_are_none_are_refused(name):
    ends, kind, message = BAD[name]
    with pytest.raises(kind, match=f"^Lattice.slab: {message}"):
        Lattice(np.diag([10.0, 20.0, 30.0]), (8, 10, 12)).slab(*ends)


def test_the_grid_of_a_slab_is_the_cells():
    p = problem()
    slab = Lattice(p.cell, p.shape).slab(1, 3)
    evaluate(("numpy", "numpy"), p, cell=slab)
    with pytest.raises(ValueError, match=r"grid_shape is \(2, 7, 6\); the Lattice has \(8, 7, 6\)"):
        evaluate(("numpy", "numpy"), p, cell=slab, grid_shape=slab.shape)
    with pytest.raises(ValueError, match="out"):
        evaluate(("numpy", "numpy"), p, cell=slab, out=np.empty(p.shape))


@needs_torch
def test_compiled_code_draws_slabs(torch_backend):
    p = problem("triclinic", 3)
    slab = Lattice(p.cell, p.shape).slab(2, 5)

    def run(*atoms):
        return gaussian_density(
            *atoms, slab, radius=tensor(p.radius), on_bad="skip", backend=torch_backend
        )

    torch._dynamo.reset()
    atoms = [tensor(array) for array in p.atoms]
    close(torch.compile(run, backend="eager", fullgraph=True)(*atoms).numpy(), run(*atoms).numpy())
