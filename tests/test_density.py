"""The Gaussian density and its lattice, on the reference and the kernels."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedops
import guarded
from fusedops import Lattice, gaussian_density
from fusedops.density import atom_radius, bad_atoms
from fusedops.density.op import COMPONENTS, SLACK, clamped, density
from fusedops.density.plan import MOST_VOXELS
from fusedops.samples import atoms_in
from fusedops.testing import TOLERANCE, error
from places import (
    EXACT,
    FILLING,
    HAS_TORCH,
    available,
    interpreted,
    needs_linux,
    needs_torch,
    needs_triton,
)

if HAS_TORCH:
    import torch

pytestmark = interpreted


@pytest.fixture(params=[False, True], ids=["iso", "aniso"])
def anisotropic(request):
    return request.param


class Problem(NamedTuple):
    """The arguments of a density, and a cotangent of it."""

    xyz: Any
    b: Any
    occupancy: Any
    amplitudes: Any
    widths: Any
    radius: Any
    cell: Any
    shape: tuple[int, ...]
    cotangent: Any

    @property
    def leaves(self):
        return self[:3]

    @property
    def atoms(self):
        return self[:5]

    def of(self, rows):
        """Return the problem of some of the atoms."""
        return Problem(*(a[rows] for a in self[:6]), *self[6:])


CELLS = {
    "orthogonal": (np.diag([6.0, 7.0, 8.0]), (9, 10, 11), 2.3),
    "triclinic": ([[6.0, 2.0, -3.0], [0.0, 5.0, 2.0], [0.0, 0.0, 5.0]], (8, 7, 6), 2.1),
    "very skewed": ([[4.0, 14.5, -9.3], [0.0, 4.0, 7.7], [0.0, 0.0, 4.0]], (7, 6, 8), 1.8),
    "left-handed": ([[0.3, 5.0, -2.0], [6.0, -1.0, 0.5], [1.0, 2.0, 5.5]], (8, 7, 6), 2.2),
    "smaller than the sphere": (np.diag([3.0, 3.3, 2.9]), (6, 7, 5), 4.0),
    "skewed and smaller": ([[3.0, 1.0, -1.4], [0.0, 3.0, 5.1], [0.0, 0.0, 2.8]], (6, 5, 7), 4.0),
    "thin": (np.diag([3.0, 12.0, 4.0]), (5, 18, 6), 2.5),
    "thinner": ([[1.5, 0.3, 0.0], [0.0, 1.2, 0.2], [0.0, 0.0, 9.0]], (2, 1, 20), 4.0),
    "of one voxel": ([[6.0, 2.0, -3.0], [0.0, 5.0, 2.0], [0.0, 0.0, 5.0]], (1, 1, 1), 7.0),
}


def problem(name="triclinic", count=4, *, anisotropic=False, dtype="float64", seed=0):
    """Return atoms in and around a cell, each with a random radius."""
    cell, shape, radius = CELLS[name]
    cell = np.array(cell)
    rng = np.random.default_rng(seed)
    atoms = atoms_in(cell, count, rng, anisotropic=anisotropic)
    arrays = (*atoms, rng.uniform(0.7, 1.0, count) * radius)
    arrays = [array.astype(dtype) for array in arrays]
    return Problem(*arrays, cell, shape, rng.normal(size=shape).astype(dtype))


def brute_vectors(p):
    """Return vectors (N, V, K, 3) from the atoms to all voxels of K cells."""
    voxels = [np.arange(n) / n for n in p.shape]
    voxels = np.stack(np.meshgrid(*voxels, indexing="ij"), -1).reshape(-1, 1, 3)
    reach = p.radius.max(initial=0) * np.linalg.norm(np.linalg.inv(p.cell), axis=1)
    far = [range(-math.ceil(k) - 1, math.ceil(k) + 2) for k in reach]
    cells = np.array(list(itertools.product(*far)))
    atoms = np.linalg.solve(p.cell, p.xyz.astype(np.float64).T).T
    apart = voxels - atoms[:, None, None]
    return (apart - np.rint(apart) + cells) @ p.cell.T


def brute(p):
    """Return the map, by a sum over all atoms, voxels and cells."""
    b, occupancy, amplitudes, widths, radius = (a.astype(np.float64) for a in p[1:6])
    rho = np.zeros(math.prod(p.shape))
    for i, w in enumerate(brute_vectors(p)):
        inside = np.linalg.norm(w, axis=-1) <= radius[i] * (1 + 5e-6)
        for A, B in zip(amplitudes[i], widths[i], strict=True):
            M = (B * np.eye(3) + 8 * np.pi**2 * symmetric(b[i])) / 4
            q = np.pi**2 * np.einsum("vki,ij,vkj->vk", w, np.linalg.inv(M), w)
            norm = occupancy[i] * A * np.pi**1.5 / np.linalg.det(M) ** 0.5
            rho += np.where(inside, norm * np.exp(-np.where(inside, q, 0.0)), 0.0).sum(1)
    return rho.reshape(p.shape)


def symmetric(b):
    """Return an atom's U (3, 3), from B or from six components."""
    if np.ndim(b) == 0:
        return b / (8 * np.pi**2) * np.eye(3)
    U = np.zeros((3, 3))
    for value, (i, j) in zip(b, COMPONENTS, strict=True):
        U[i, j] = U[j, i] = value
    return U


def tensor(array):
    return torch.from_numpy(array)


def evaluate(place, p, **options):
    """Return the map, an array."""
    arrays = [tensor(a) for a in p[:6]] if place[0] == "torch" else p[:6]
    options = {"cell": p.cell, "grid_shape": p.shape, "radius": arrays[5], **options}
    return np.asarray(gaussian_density(*arrays[:5], **options, backend=place[1]))


def function_of(p, backend=None, **options):
    """Return the density as a function of the tensors that have a gradient."""
    constants = [tensor(a) for a in p[3:6]]
    lattice = Lattice(p.cell, p.shape)

    def function(*leaves, **more):
        return gaussian_density(
            *leaves,
            *constants[:2],
            lattice,
            radius=constants[2],
            backend=backend,
            **options,
            **more,
        )

    return function


def leaves_of(p):
    return [tensor(array).requires_grad_() for array in p.leaves]


def solve(place, p, **options):
    """Return the map and the gradients, as arrays."""
    if place[0] == "numpy":
        out, pullback = gaussian_density.vjp(
            *p.atoms, p.cell, p.shape, radius=p.radius, backend=place[1], **options
        )
        return [out, *pullback(p.cotangent)]
    leaves = leaves_of(p)
    out = function_of(p, place[1], **options)(*leaves)
    return [
        np.asarray(result.detach())
        for result in (out, *torch.autograd.grad(out, leaves, tensor(p.cotangent)))
    ]


def same(got, want):
    np.testing.assert_array_equal(got, want, strict=True)


def close(got, want, dtype=None, terms=64):
    """Compare with a reference by the matrix's tolerance for sums of that many products."""
    dtype = str(got.dtype) if dtype is None else dtype
    assert error(got, want) <= TOLERANCE[dtype] * max(1.0, terms**0.5 / 8)


def agree(place, got, want):
    assert got.dtype == want.dtype
    (same if place[1] in EXACT else close)(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CELLS)
def test_maps_by_brute_force(quick, name, anisotropic, dtype):
    p = problem(name, anisotropic=anisotropic, dtype=dtype)
    got = evaluate(quick, p)
    assert (got.dtype, got.shape) == (dtype, p.shape)
    want = brute_of(name, anisotropic, dtype)
    assert np.count_nonzero(want) == np.count_nonzero(got)
    close(got, want, terms=terms_of(name))


@functools.cache
def brute_of(name, anisotropic, dtype):
    return brute(problem(name, anisotropic=anisotropic, dtype=dtype))


def terms_of(name):
    """Return the number of roundings, many where vectors are differences of long edges."""
    return 4096 if name == "very skewed" else 64


@needs_triton
@pytest.mark.parametrize("name", ["triclinic", "skewed and smaller"])
def test_maps_when_interpreted(name, anisotropic):
    p = problem(name, 2, anisotropic=anisotropic)
    close(evaluate(available("torch", "triton"), p), brute(p))


@needs_triton
@pytest.mark.parametrize("count", [1, 700])
def test_atoms_are_sorted_along_x_when_interpreted(count):
    from gpukern.density.triton import gaussian_density as kernel

    xyz = np.random.default_rng(0).normal(size=(count, 3)) * 50
    xyz[5:6], xyz[7:8], xyz[9:10] = np.nan, np.inf, 0
    p = problem("skewed and smaller", count)
    atoms = [tensor(array) for array in (xyz, *p.atoms[1:], np.zeros(count))]
    a = density.Arguments(*atoms, Lattice(p.cell, p.shape), 0)
    order = torch.full((count,), -1)
    kernel(a, density.Outputs(None, order))
    assert sorted(order.tolist()) == list(range(count))
    along = np.linalg.solve(p.cell, xyz.T)[0] % 1
    along = along[order.numpy()]
    assert np.diff(along[np.isfinite(along)]).min(initial=0) > -1 / 1000


@needs_triton
def test_many_atoms_are_sorted_without_a_gradient_too(monkeypatch):
    from gpukern.density import triton as kernels

    sorts = []
    write = kernels._write_order

    def note(*given):
        sorts.append(given)
        write(*given)

    monkeypatch.setattr(kernels, "_write_order", note)
    monkeypatch.setattr(kernels, "ORDERED", 5)
    p = problem("triclinic", 7)
    close(evaluate(available("torch", "triton"), p), brute(p))
    assert len(sorts) == 1


def eager(p):
    """Return the density as autograd sees it, with the voxels of every atom held fixed."""
    vectors = tensor(brute_vectors(p))
    start, *_, amplitudes, widths, radius = (tensor(a) for a in p[:6])
    inside = vectors.norm(dim=-1) <= radius[:, None, None] * (1 + 5e-6)

    def function(xyz, b, occupancy):
        w = vectors - (xyz - start)[:, None, None]
        if b.ndim == 1:
            U = b[:, None, None] / (8 * torch.pi**2) * torch.eye(3).double()
        else:
            U = b[:, [[0, 3, 4], [3, 1, 5], [4, 5, 2]]]
        M = (widths[..., None, None] * torch.eye(3) + 8 * torch.pi**2 * U[:, None]) / 4
        q = torch.pi**2 * torch.einsum("avki,agij,avkj->agvk", w, torch.linalg.inv(M), w)
        norm = occupancy[:, None] * amplitudes * torch.pi**1.5 / torch.linalg.det(M).sqrt()
        value = norm[..., None, None] * torch.exp(-q) * inside[:, None]
        return value.sum((0, 1, 3)).reshape(p.shape)

    return function


@needs_torch
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_autograd(quick, name, anisotropic):
    for dtype in ("float64", "float32"):
        p = problem(name, anisotropic=anisotropic, dtype=dtype)
        want = eager_gradients(name, anisotropic, dtype)
        for got, gradient in zip(solve(quick, p)[1:], want, strict=True):
            assert got.dtype == dtype
            close(got, gradient.numpy(), terms=4000 * terms_of(name) / 64)


@functools.cache
def eager_gradients(name, anisotropic, dtype):
    p = problem(name, anisotropic=anisotropic, dtype=dtype)
    wide = Problem(*(a.astype(np.float64) for a in p[:7]), p.shape, p.cotangent)
    leaves = leaves_of(wide)
    return torch.autograd.grad(eager(wide)(*leaves), leaves, tensor(p.cotangent).double())


@needs_triton
@pytest.mark.parametrize("name", ["triclinic", "skewed and smaller"])
def test_gradients_when_interpreted(name, anisotropic):
    p = problem(name, 2, anisotropic=anisotropic)
    want = solve(("numpy", "numpy"), p)
    for got, expected in zip(solve(available("torch", "triton"), p), want, strict=True):
        close(got, expected, terms=4000)


# With these radii no voxel is near a sphere's surface.
@pytest.mark.parametrize(("name", "radius"), [("orthogonal", 1.9), ("skewed and smaller", 4.05)])
def test_gradients_are_what_differences_say(quick, name, radius, anisotropic):
    p = problem(name, 2, anisotropic=anisotropic)
    p = p._replace(radius=np.full(2, radius))
    _, *gradients = solve(quick, p)
    step = 1e-5
    for at, gradient in enumerate(gradients):
        want = np.zeros_like(gradient)
        for index in np.ndindex(gradient.shape):
            moved = []
            for sign in (1, -1):
                arrays = [a.copy() for a in p.leaves]
                arrays[at][index] += sign * step
                moved.append(np.vdot(p.cotangent, evaluate(quick, p._replace(**named(arrays)))))
            want[index] = (moved[0] - moved[1]) / (2 * step)
        # Differences err by the square of the step.
        assert error(gradient, want) < 1e-7


def named(leaves):
    return dict(zip(("xyz", "b", "occupancy"), leaves, strict=True))


@needs_torch
def test_second_derivatives_are_those_of_the_eager_formula(torch_backend, anisotropic):
    p = problem("skewed and smaller", anisotropic=anisotropic)
    found = []
    for function in (function_of(p, torch_backend), eager(p)):
        leaves = leaves_of(p)
        cotangent = tensor(p.cotangent).requires_grad_()
        first = torch.autograd.grad(function(*leaves), leaves, cotangent, create_graph=True)
        along = sum((gradient.sin() ** 2).sum() for gradient in first)
        found.append(torch.autograd.grad(along, [*leaves, cotangent]))
    for got, want in zip(*found, strict=True):
        close(got.numpy(), want.numpy(), terms=4000)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("whole", [False, True], ids=["in the cell", "outside of it"])
def test_a_voxel_at_the_very_end_of_the_radius_is_inside(place, dtype, whole):
    """The grid's steps are no binary numbers, and their rounding must not matter."""
    shape, steps = (12, 13, 14), 3
    cell = np.diag(np.array(shape) * 0.1)
    corner = np.array([[4, 5, 6]]) + whole * np.array([[-12, 26, 14]])
    atoms = [0.1 * corner, np.array([1.0]), np.array([1.0]), np.ones((1, 1)), np.ones((1, 1))]
    arrays = [np.asarray(a, dtype) for a in (*atoms, [0.1 * steps])]
    p = Problem(*arrays, cell, shape, None)
    grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1) - [4, 5, 6]
    inside = (grid**2).sum(-1) <= steps**2
    assert inside.sum() == 123
    same(evaluate(place, p) > 0, inside)


# Cells for kernels with curves for an atom, for a plane, or none.
BORDERS = {
    "right-angled": np.diag([30.0, 31.0, 32.0]),
    "with b and c at right angles": np.array([[30.0, 0, 0], [7.0, 31.0, 0], [-5.0, 0, 32.0]]),
    "oblique": np.array([[30.0, 4.0, -3.0], [0, 31.0, 6.0], [0, 0, 32.0]]),
}


@functools.cache
def at_borders(name):
    """Return atoms, each alone, whose spheres end within 1e-7 of a voxel, and squares (N, V).

    Squares are of v - x, over squared radii with the share by which they may be larger.
    """
    cell, shape, rng = BORDERS[name], (37, 38, 39), np.random.default_rng(0)
    corners = np.stack(np.meshgrid(*[np.arange(3) / 3] * 3, indexing="ij"), -1).reshape(-1, 3)
    images = rng.integers(-2, 3, corners.shape)
    xyz = ((corners + images + rng.uniform(0, 0.05, corners.shape)) @ cell.T).astype(np.float32)
    voxels = np.stack(np.meshgrid(*[np.arange(n) / n for n in shape], indexing="ij"), -1)
    apart = voxels.reshape(-1, 3) - np.linalg.solve(cell, xyz.T.astype(np.float64)).T[:, None]
    square = (((apart - np.rint(apart)) @ cell.T) ** 2).sum(-1)
    chosen = [rng.choice(row[(row > 9.0) & (row < 16.0)]) for row in square]
    # Rounding puts the voxel on either side.
    radius = np.sqrt(np.array(chosen) / (1 + SLACK)).astype(np.float32)
    square /= radius.astype(np.float64)[:, None] ** 2 * (1 + SLACK)
    ones = np.ones(len(xyz), np.float32)
    atoms = xyz, 20 * ones, ones, ones[:, None], 60 * ones[:, None]
    return Problem(*atoms, radius, cell, shape, None), square


@pytest.mark.parametrize("name", BORDERS)
def test_spheres_end_where_they_do_in_float64(quick, name):
    """Squares in float32 would take every third of these voxels for the wrong side."""
    p, square = at_borders(name)
    inside = square <= 1
    near = inside & (square > 1 - 1e-6)
    assert 5 < near.any(1).sum() < len(p.xyz) - 5
    for dtype in ("float32", "float64"):
        cast = Problem(*(a.astype(dtype) for a in p[:6]), p.cell, p.shape, None)
        same(evaluate(quick, cast) != 0, inside.any(0).reshape(p.shape))
        # Beyond all spheres no gradient meets a voxel; at their ends it meets each.
        beyond, ends = (
            solve(quick, cast._replace(cotangent=g.reshape(p.shape).astype(dtype)))[3]
            for g in (~inside.any(0), near.any(0))
        )
        same(beyond, np.zeros_like(beyond))
        values = (np.pi / 20) ** 1.5 * np.exp(-(np.pi**2) / 20 * p.radius.astype(float) ** 2)
        np.testing.assert_allclose(ends, near.sum(1) * values, rtol=1e-4)


def test_no_radius_reaches_a_voxel_that_is_met(quick):
    p = Problem(
        np.array([[1.0, 2.0, 3.0], [4.2, 1.1, 1.1]]),
        np.full(2, 20.0),
        np.ones(2),
        np.ones((2, 1)),
        np.ones((2, 1)),
        np.zeros(2),
        np.diag([6.0, 7.0, 8.0]),
        (6, 7, 8),
        None,
    )
    got = evaluate(quick, p)
    assert np.argwhere(got).tolist() == [[1, 2, 3]]
    close(got, brute(p))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["smaller than the sphere", "skewed and smaller"])
def test_a_cell_is_its_supercell_folded(quick, name, anisotropic, dtype):
    """An atom alone in 7 x 7 x 7 cells meets no image, and sees copies of the cotangent."""
    p = problem(name, 2, anisotropic=anisotropic, dtype=dtype)
    p = p._replace(radius=p.radius * 0.8)
    many = p._replace(
        cell=7 * p.cell,
        shape=tuple(7 * n for n in p.shape),
        cotangent=np.tile(p.cotangent, (7, 7, 7)),
    )
    wide = many.cell / many.shape
    reach = 2 * p.radius.max() * np.linalg.norm(np.linalg.inv(wide), axis=1)
    assert (reach + 1 < many.shape).all()
    assert (reach > p.shape).all()
    out, *gradients = solve(quick, p)
    apart, *others = solve(quick, many)
    folded = apart.reshape([n for size in p.shape for n in (7, size)]).sum((0, 2, 4))
    close(out, folded)
    for got, want in zip(gradients, others, strict=True):
        close(got, want, terms=4000)


@pytest.mark.parametrize("backend", EXACT)
def test_planes_that_an_atom_meets_again(backend, anisotropic, several_threads):
    """The number of threads changes no bit where boxes go around the cell several times."""
    available("numpy", backend)
    p = problem("thinner", 9, anisotropic=anisotropic)
    try:
        fusedops.set_num_threads(1)
        want = solve(("numpy", backend), p)
        for count in (2, 3, 16):
            fusedops.set_num_threads(count)
            for got, expected in zip(solve(("numpy", backend), p), want, strict=True):
                same(got, expected)
            assert count in several_threads
    finally:
        fusedops.set_num_threads(None)


def test_a_large_box_is_taken_in_parts(monkeypatch, anisotropic):
    """The formula computes a few planes of an atom at a time, or many atoms."""
    p = problem("triclinic", 3, anisotropic=anisotropic)
    for framework in ["numpy"] + ["torch"] * HAS_TORCH:
        place = framework, framework
        want = solve(place, p)
        with monkeypatch.context() as patch:
            patch.setattr("fusedops.density.op._CHUNK", 1000)
            for got, expected in zip(solve(place, p), want, strict=True):
                close(got, expected, terms=4000)


@pytest.mark.parametrize("name", ["orthogonal", "triclinic"])
def test_the_integral_is_the_number_of_electrons(quick, name, anisotropic):
    cell = 2.0 * np.array(CELLS[name][0])
    shape = tuple(int(n) for n in np.ceil(np.linalg.norm(cell, axis=0) / 0.45))
    atoms = atoms_in(cell, 2, np.random.default_rng(0), anisotropic=anisotropic)
    p = Problem(*atoms, np.full(2, 5.5), cell, shape, None)
    total = evaluate(quick, p).sum() * np.linalg.det(cell) / math.prod(shape)
    # Density is cut off beyond five standard deviations.
    assert abs(total / (p.occupancy * p.amplitudes.sum(1)).sum() - 1) < 2e-5


@pytest.mark.parametrize("name", ["orthogonal", "very skewed", "skewed and smaller"])
def test_atoms_may_move_by_edges_of_the_cell(quick, name, anisotropic):
    p = problem(name, anisotropic=anisotropic)
    edges = np.random.default_rng(1).integers(-3, 4, p.xyz.shape)
    moved = p._replace(xyz=p.xyz + edges @ p.cell.T)
    for got, want in zip(solve(quick, moved), solve(quick, p), strict=True):
        # Shifting rounds coordinates once more, by a few Å times 1e-16.
        close(got, want, terms=6400)


@pytest.mark.parametrize("name", ["triclinic", "skewed and smaller"])
def test_atoms_that_move_by_voxels_move_the_map(quick, name, anisotropic):
    p = problem(name, anisotropic=anisotropic)
    steps = np.array([2, -1, 3])
    moved = p._replace(xyz=p.xyz + p.cell @ (steps / p.shape))
    close(evaluate(quick, moved), np.roll(evaluate(quick, p), steps, (0, 1, 2)), terms=6400)


def test_turning_everything_changes_nothing(quick, anisotropic):
    p = problem("very skewed", anisotropic=anisotropic)
    turn, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(3, 3)))
    b = p.b
    if anisotropic:
        turned = [turn @ symmetric(U) @ turn.T for U in b]
        b = np.array([[U[i, j] for i, j in COMPONENTS] for U in turned])
    other = p._replace(xyz=p.xyz @ turn.T, b=b, cell=turn @ p.cell)
    one, two = solve(quick, p), solve(quick, other)
    close(two[0], one[0], terms=6400)
    close(two[1], one[1] @ turn.T, terms=640_000)
    close(two[3], one[3], terms=640_000)


@pytest.mark.parametrize("name", ["orthogonal", "skewed and smaller"])
def test_an_isotropic_atom_is_an_anisotropic_one(quick, name):
    p = problem(name)
    U = np.zeros((len(p.b), 6))
    U[:, :3] = p.b[:, None] / (8 * np.pi**2)
    iso, aniso = solve(quick, p), solve(quick, p._replace(b=U))
    for got, want in zip((aniso[0], aniso[1], aniso[3]), (iso[0], iso[1], iso[3]), strict=True):
        close(got, want, terms=4000)
    # dU/dB is the unit matrix over 8π².
    close(aniso[2][:, :3].sum(1) / (8 * np.pi**2), iso[2], terms=4000)


def test_the_order_of_atoms_changes_roundings_alone(quick, anisotropic):
    p = problem("triclinic", 12, anisotropic=anisotropic)
    order = np.random.default_rng(0).permutation(12)
    one, other = solve(quick, p), solve(quick, p.of(order))
    close(other[0], one[0])
    for got, want in zip(other[1:], one[1:], strict=True):
        agree(quick, got, want[order])


def test_linear_in_occupancy(quick, anisotropic):
    p = problem(anisotropic=anisotropic)
    other = np.random.default_rng(5).normal(size=len(p.occupancy))
    one, two = (evaluate(quick, p._replace(occupancy=o)) for o in (p.occupancy, other))
    mixed = p._replace(occupancy=3 * p.occupancy - 0.7 * other)
    close(evaluate(quick, mixed), 3 * one - 0.7 * two, terms=640)
    gradient = solve(quick, p)[3]
    close(np.array(gradient @ other), np.array(np.vdot(p.cotangent, two)), terms=4000)


def test_the_map_of_atoms_is_the_sum_of_their_maps(quick, anisotropic):
    p = problem("very skewed", anisotropic=anisotropic)
    alone = [evaluate(quick, p.of([i])) for i in range(len(p.b))]
    close(evaluate(quick, p), sum(alone))
    assert all(map_of.any() for map_of in alone)


def test_no_atoms(place, anisotropic):
    p = problem(anisotropic=anisotropic, count=0)
    out, *gradients = solve(place, p)
    same(out, np.zeros(p.shape))
    assert [g.shape for g in gradients] == [(0, 3), (0, 6) if anisotropic else (0,), (0,)]
    same(evaluate(place, p, radius=None), np.zeros(p.shape))


def test_atoms_far_away_hurt_nobody(quick):
    """A coordinate too large for any digit may put the atom anywhere, but within the map."""
    p = problem("orthogonal")
    p.xyz[0], p.xyz[2] = 1e30, -1e100
    got = evaluate(quick, p)
    assert np.isfinite(got).all()
    assert all(np.isfinite(g).all() for g in solve(quick, p))


def test_radius_may_be_a_number_or_a_rule(quick, anisotropic):
    p = problem(anisotropic=anisotropic)
    full = evaluate(quick, p._replace(radius=np.full(4, 1.75)))
    for radius in (1.75, np.float32(1.75), np.full(4, 1.75, "f4")):
        if isinstance(radius, np.ndarray) and quick[0] == "torch":
            radius = tensor(radius)
        same(evaluate(quick, p, radius=radius), full)
    for n_sigma in (4.0, 2, 5.5):
        radius = atom_radius(p.b, p.widths, n_sigma=n_sigma)
        want = evaluate(quick, p._replace(radius=radius))
        same(evaluate(quick, p, radius=None, n_sigma=n_sigma), want)
    same(evaluate(quick, p, radius=None), evaluate(quick, p, radius=None, n_sigma=4.0))


def rule(mean_square, n_sigma):
    return np.clip(np.ceil(n_sigma * np.sqrt(mean_square) / 0.25) * 0.25, 2.0, None)


@pytest.mark.parametrize("n_sigma", [1.0, 4.0, 6.3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_rule_of_radii(dtype, n_sigma):
    """The rule takes the largest eigenvalue of U if given; NumPy and torch agree."""
    rng = np.random.default_rng(0)
    widths = rng.uniform(0, 60, (200, 4)).astype(dtype)
    b = rng.uniform(-0.5, 1, 200) ** 3 * 150
    factor = 0.5 * rng.normal(size=(200, 3, 3))
    U = factor @ factor.transpose(0, 2, 1) * rng.uniform(0, 1, (200, 1, 1)) ** 2
    # U of spheres, of ellipsoids of revolution, and of flat ellipsoids.
    U[:5] = np.eye(3) * rng.uniform(0, 1, (5, 1, 1))
    U[5:10] = np.diag([0.3, 0.3, 0.9])
    U[10:15] = np.diag([0.9, 0.3, 0.9])
    U[15:20] = 0.0
    six = np.stack([U[:, i, j] for i, j in COMPONENTS], 1)
    for values, mean_square in (
        (b.astype(dtype), b / (8 * np.pi**2)),
        (six.astype(dtype), np.linalg.eigvalsh(U)[:, -1]),
    ):
        want = rule(np.maximum(widths.max(1) / (8 * np.pi**2) + mean_square, 1e-6), n_sigma)
        got = atom_radius(values, widths, n_sigma=n_sigma)
        assert got.dtype == dtype
        same(got, want.astype(dtype))
        assert len(set(got.tolist())) > 5 or n_sigma == 1
        if HAS_TORCH:
            same(atom_radius(tensor(values), tensor(widths), n_sigma=n_sigma).numpy(), got)


@pytest.mark.parametrize("name", ["triclinic", "smaller than the sphere"])
def test_three_sigma_are_the_radius_of_torchref(quick, name, anisotropic):
    """The map is a sum within 3 σ of the widest Gaussian, in steps of 0.25 Å and at least 2 Å."""
    p = problem(name, anisotropic=anisotropic)
    largest = [np.linalg.eigvalsh(symmetric(b))[-1] for b in p.b]
    sigma = np.sqrt(p.widths.max(1) / (8 * np.pi**2) + largest)
    want = brute(p._replace(radius=np.clip(0.25 * np.ceil(3 * sigma / 0.25), 2, 7)))
    assert error(evaluate(quick, p, radius=None, n_sigma=3), want) < 1e-6


def test_a_wide_atom_is_whole(quick):
    """B of several hundred Å² needs more than 7 Å, which would cut a tenth off."""
    p = problem("orthogonal", 2)._replace(b=np.array([600.0, 900.0]))
    total = evaluate(quick, p, radius=None).sum() * np.linalg.det(p.cell) / math.prod(p.shape)
    assert total == pytest.approx((p.occupancy * p.amplitudes.sum(1)).sum(), rel=2e-3)


def spoilt(argument, atom, value, *, anisotropic=False):
    p = problem("orthogonal", 5, anisotropic=anisotropic)
    getattr(p, argument)[atom] = value
    return p


NAN, INF = math.nan, math.inf
# The argument, the atom, its bad value, and the error's message.
BAD_ATOMS = {
    "xyz NaN": ("xyz", (2, 1), NAN, r"xyz\[2\] is \[.*, nan, .*\]; it should be finite"),
    "xyz infinite": ("xyz", (0, 0), -INF, r"xyz\[0\] is \[-inf, .*\]; it should be finite"),
    "b NaN": ("b", 3, NAN, r"b\[3\] is .*nan.*; it should be finite"),
    "b infinite": ("b", 3, INF, r"b\[3\] is .*inf.*; it should be finite"),
    "occupancy NaN": ("occupancy", 1, NAN, r"occupancy\[1\] is nan; it should be finite"),
    "occupancy infinite": ("occupancy", 1, INF, r"occupancy\[1\] is inf; it should be finite"),
    "amplitude NaN": ("amplitudes", (4, 1), NAN, r"amplitudes\[4\] is \[.*nan.*\]; .* be finite"),
    "width infinite": ("widths", (4, 0), INF, r"widths\[4\] is \[inf, .*\]; it should be finite"),
    "radius NaN": ("radius", 2, NAN, r"radius\[2\] is nan; it should be finite"),
    "radius infinite": ("radius", 2, INF, r"radius\[2\] is inf; it should be finite"),
    "radius negative": ("radius", 2, -1.0, r"radius\[2\] is -1\.0; it should be at least 0"),
}
ISO_ALONE = {
    "b too negative": ("b", 1, -1.0, r"b\[1\] is -1\.0; it should be larger than minus each of"),
    "b of no width": ("b", 1, 0.0, r"b\[1\] is 0\.0; it should be larger than minus each of the"),
    "width too negative": ("widths", (1, 2), -99.0, r"b\[1\] is .*; it should be larger than min"),
}
PAIR = [0.1, 0.1, 0.1, 0.2, 0.0, 0.0]
ANISO_ALONE = {
    "U negative": ("b", (1, 0), -2.0, r"b\[1\] is \[-2\.0, .*\]; it should be positive definite"),
    "U of nothing": ("b", 1, 0.0, r"b\[1\] is \[0\.0, .*\]; it should be positive definite toget"),
    "U with a negative eigenvalue": ("b", 1, PAIR, r"b\[1\] is .*; it should be positive definit"),
    "U with two of them": (
        "b",
        1,
        [0.1, 0.1, 0.1, 0.2, 0.2, 0.2 + 1e-9],
        "b.*; it should be positive definite together with each of the atom's widths",
    ),
    "U NaN off the diagonal": ("b", (1, 4), NAN, r"b\[1\] is \[.*nan.*\]; it should be finite"),
}
SPOILT = [
    pytest.param(*case, kind, id=f"{'aniso' if kind else 'iso'}-{name}")
    for kind, cases in ((False, BAD_ATOMS | ISO_ALONE), (True, BAD_ATOMS | ANISO_ALONE))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("argument", "at", "value", "message", "anisotropic"), SPOILT)
def test_an_atom_without_a_density_is_named(argument, at, value, message, anisotropic):
    p = spoilt(argument, at, value, anisotropic=anisotropic)
    assert np.flatnonzero(bad_atoms(*p[:6])).tolist() == [np.ravel(at)[0]]
    out = np.full(p.shape, 7.0)
    with pytest.raises(ValueError, match=f"gaussian_density: {message}"):
        gaussian_density(*p.atoms, p.cell, p.shape, radius=p.radius, out=out)
    assert (out == 7).all()
    if argument not in ("radius", "amplitudes", "xyz", "occupancy"):
        # The error names the bad argument, not the radius that the rule made of it.
        with pytest.raises(ValueError, match=f"gaussian_density: {message}"):
            gaussian_density(*p.atoms, p.cell, p.shape)
    if HAS_TORCH:
        for leaves in ([tensor(a) for a in p.leaves], leaves_of(p)):
            with pytest.raises(ValueError, match=f"gaussian_density: {message}"):
                function_of(p)(*leaves)


@pytest.mark.parametrize(("argument", "at", "value", "message", "anisotropic"), SPOILT)
def test_an_atom_without_a_density_may_be_left_out(
    argument, at, value, message, anisotropic, quick
):
    """The atom adds nothing to the map, and its gradient is zero."""
    p = spoilt(argument, at, value, anisotropic=anisotropic)
    kept = np.arange(5) != np.ravel(at)[0]
    with pytest.warns(RuntimeWarning, match=f"1 of 5 atoms are left out; of the first, {message}"):
        out, *gradients = solve(quick, p, on_bad="skip")
    want, *others = solve(quick, p.of(kept))
    agree(quick, out, want)
    for got, other in zip(gradients, others, strict=True):
        agree(quick, got[kept], other)
        assert not got[~kept].any()


def test_an_atom_whose_place_in_the_grid_overflows_is_named(quick, anisotropic):
    p = spoilt("xyz", (2, 1), 1.7e308, anisotropic=anisotropic)
    message = r"xyz\[2\] is \[.*, 1\.7e\+308, .*\]; it should be so near to the cell"
    with pytest.raises(ValueError, match=f"gaussian_density: {message}"):
        evaluate(quick, p)
    with pytest.warns(RuntimeWarning, match=f"1 of 5 atoms are left out; of the first, {message}"):
        out, *gradients = solve(quick, p, on_bad="skip")
    kept = np.arange(5) != 2
    agree(quick, out, evaluate(quick, p.of(kept)))
    assert [bool(gradient[2].any()) for gradient in gradients] == [False] * 3


def test_the_warning_counts_and_points_at_the_caller():
    p = problem("orthogonal", 5)
    p.b[1] = p.occupancy[3] = np.nan
    lattice = Lattice(p.cell, p.shape)
    # The second call is of a known kind, which has a plan.
    for _ in range(2):
        with pytest.warns(RuntimeWarning) as caught:
            gaussian_density(*p.atoms, lattice, on_bad="skip")
        assert len(caught) == 1
        told = str(caught[0].message)
        assert told.startswith("gaussian_density: 2 of 5 atoms are left out; of the")
        assert caught[0].filename == __file__


def test_no_warning_without_a_bad_atom():
    p = problem("orthogonal", 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = gaussian_density(*p.atoms, p.cell, p.shape, radius=p.radius, on_bad="skip")
    same(got, gaussian_density(*p.atoms, p.cell, p.shape, radius=p.radius))


def too_sharp(name="triclinic", *, anisotropic=False, dtype="float64"):
    """Return a problem of wide atoms, and of atoms whose widths are negative in some directions."""
    p = problem(name, 5, anisotropic=anisotropic, dtype=dtype)
    if anisotropic:
        p.b[:3, :3] -= np.array([[0.8, 0.1, 0.0], [0.8, 0.8, 0.0], [2.0, 2.0, 2.0]], dtype)
        p.b[3] = 0
    else:
        # All Gaussians of the third and the fourth are too sharp, or only its constant.
        p.b[:4] = -2, -30, -99, 0
    return p


def widened(b, width):
    """Return B (3, 3) of a Gaussian, with eigenvalues of at least 0.4 Å²."""
    values, vectors = np.linalg.eigh(8 * np.pi**2 * symmetric(b) + width * np.eye(3))
    return vectors * np.maximum(values, 0.4) @ vectors.T


def brute_of_widened(p):
    """Return the map, where every Gaussian is an atom of its own."""
    rho = np.zeros(p.shape)
    for i, g in np.ndindex(p.widths.shape):
        own, wide = p.of([i]), widened(p.b[i].astype(np.float64), float(p.widths[i, g]))
        b = np.array([[wide[j, k] for j, k in COMPONENTS]]) / (8 * np.pi**2)
        amplitudes, widths = own.amplitudes[:, [g]], np.zeros((1, 1))
        rho += brute(own._replace(b=b, amplitudes=amplitudes, widths=widths))
    return rho


@pytest.mark.interpreted_slow(dtype="float64", name="triclinic")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["triclinic", "smaller than the sphere"])
def test_sharp_gaussians_are_widened_to_a_least_width(place, name, anisotropic, dtype):
    p = too_sharp(name, anisotropic=anisotropic, dtype=dtype)
    # Where U is far from zero, rounding it moves an eigenvalue of 0.005 Å².
    terms = 1 << 20 if dtype == "float32" else 4096
    close(evaluate(place, p, on_bad="clamp"), brute_of_widened(p), dtype, terms=terms)
    with pytest.raises(ValueError, match=r"b\[0\] is .*; it should be "):
        evaluate(place, p, on_bad="raise")


def test_gradients_of_widened_gaussians(quick, anisotropic):
    """They are as differences say; the width of a clamped isotropic Gaussian is constant."""
    p = too_sharp("orthogonal", anisotropic=anisotropic)
    p = p._replace(radius=np.full(5, 1.9))
    _, *gradients = solve(quick, p, on_bad="clamp")
    step = 1e-6
    for at, gradient in enumerate(gradients):
        want = np.zeros_like(gradient)
        for index in np.ndindex(gradient.shape):
            moved = []
            for sign in (1, -1):
                arrays = [a.copy() for a in p.leaves]
                arrays[at][index] += sign * step
                rho = evaluate(quick, p._replace(**named(arrays)), on_bad="clamp")
                moved.append(np.vdot(p.cotangent, rho))
            want[index] = (moved[0] - moved[1]) / (2 * step)
        assert error(gradient, want) < 1e-6
    assert not gradients[1][2].any()
    assert gradients[1][0].any()


@pytest.mark.interpreted_slow(dtype="float64")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_of_widened_gaussians_are_the_references(place, anisotropic, dtype):
    p = too_sharp(anisotropic=anisotropic, dtype=dtype)
    wide = Problem(*(a.astype(np.float64) for a in p[:7]), p.shape, p.cotangent)
    want = solve(("numpy", "numpy"), wide, on_bad="clamp")
    for got, expected in zip(solve(place, p, on_bad="clamp"), want, strict=True):
        assert got.dtype == dtype
        close(got, expected, terms=1 << 24 if dtype == "float32" else 1 << 16)


@needs_torch
def test_widening_copies_no_list_to_a_gpu(anisotropic):
    """Neither a CUDA graph nor a tape can hold such a copy."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        names: set[str] = set()  # noqa: RUF012

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.name())
            return function(*args, **(kwargs or {}))

    p = too_sharp(anisotropic=anisotropic)
    arrays = [tensor(array) for array in p[:6]]
    call = density.Arguments(*arrays, Lattice(p.cell, p.shape), 1)
    with Calls() as calls:
        wide, back = clamped(call)
        back(*wide[:5])
    assert "aten::where.self" in calls.names
    assert "aten::lift_fresh" not in calls.names


@needs_torch
def test_second_derivatives_of_widened_gaussians(torch_backend, anisotropic):
    p = too_sharp(anisotropic=anisotropic)
    leaves = [leaf[:3].detach().requires_grad_() for leaf in leaves_of(p)]
    function = function_of(p.of(slice(3)), torch_backend, on_bad="clamp")
    # Gradients are linear in the voxels' cotangents, so three sums of voxels do for hundreds.
    weights = tensor(np.random.default_rng(0).normal(size=(3, *p.shape)) / 3**0.5)

    def sums(*leaves):
        return (weights * function(*leaves)).sum((1, 2, 3))

    assert torch.autograd.gradgradcheck(sums, leaves, eps=1e-6, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("argument", ["xyz", "b", "occupancy", "radius"])
def test_clamping_hides_no_other_fault(quick, argument, anisotropic):
    p = too_sharp(anisotropic=anisotropic)
    getattr(p, argument)[1] = np.nan
    with pytest.raises(ValueError, match=rf"{argument}\[1\] is .*; it should be finite"):
        evaluate(quick, p, on_bad="clamp")


def test_clamping_changes_no_wide_atom(quick, anisotropic):
    p = problem(anisotropic=anisotropic)
    p.widths[:, -1] = 0.5
    for got, want in zip(solve(quick, p, on_bad="clamp"), solve(quick, p), strict=True):
        agree(quick, got, want)


@needs_torch
def test_compiled_code_clamps_and_leaves_other_bad_atoms_out(torch_backend, anisotropic):
    p = too_sharp(anisotropic=anisotropic)
    function = function_of(p, torch_backend, on_bad="clamp")
    leaves = leaves_of(p)
    want = torch.autograd.grad(function(*leaves).sum(), leaves)
    fast, counter = compiled(function)
    found = torch.autograd.grad(fast(*leaves).sum(), leaves)
    assert counter.frame_count == 1
    for got, expected in zip(found, want, strict=True):
        close(got.numpy(), expected.numpy(), terms=4000)
    p.amplitudes[1, 2] = math.nan
    kept = [0, 2, 3, 4]
    alone = function_of(p.of(kept), torch_backend, on_bad="clamp")(*(x[kept] for x in leaves))
    close(fast(*leaves).detach().numpy(), alone.detach().numpy())


@needs_torch
@pytest.mark.parametrize(
    ("argument", "value"), [("b", -np.inf), ("amplitudes", np.nan), ("widths", np.nan)]
)
def test_clamping_revives_no_part_of_a_broken_atom(torch_backend, anisotropic, argument, value):
    """Nobody looks at values under vmap; the atom has a sharp Gaussian beside the broken one."""
    p = too_sharp(anisotropic=anisotropic)
    getattr(p, argument).reshape(5, -1)[3, 0] = value
    leaves, kept = leaves_of(p), [0, 1, 2, 4]
    rho = torch.vmap(function_of(p, torch_backend, on_bad="clamp"))(*(x[None] for x in leaves))[0]
    alone = [x[kept] for x in leaves]
    want = function_of(p.of(kept), torch_backend, on_bad="clamp")(*alone)
    close(rho.detach().numpy(), want.detach().numpy())
    for found in torch.autograd.grad((rho**2).sum(), leaves):
        assert found.isfinite().all()
        assert not found[3].any()


@needs_torch
def test_second_derivatives_of_atoms_that_are_left_out(torch_backend, anisotropic):
    p = spoilt("occupancy", 1, np.nan, anisotropic=anisotropic)
    kept = np.arange(5) != 1
    found = []
    for q in (p, p.of(kept)):
        leaves = leaves_of(q)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = function_of(q, torch_backend, on_bad="skip")(*leaves)
        first = torch.autograd.grad(out, leaves, tensor(p.cotangent), create_graph=True)
        along = sum(gradient.square().sum() for gradient in first)
        found.append(torch.autograd.grad(along, leaves))
    for got, want in zip(*found, strict=True):
        assert not got[1].any()
        close(got[kept].numpy(), want.numpy(), terms=4000)


def test_a_lattice_serves_many_calls(quick, anisotropic):
    p = problem("very skewed", anisotropic=anisotropic)
    lattice = Lattice(p.cell, p.shape)
    for seed in range(2):
        q = problem("very skewed", anisotropic=anisotropic, seed=seed)
        want = evaluate(quick, q)
        same(evaluate(quick, q, cell=lattice, grid_shape=None), want)
        same(evaluate(quick, q, cell=lattice, grid_shape=list(p.shape)), want)
        same(evaluate(quick, q, cell=p.cell.tolist(), grid_shape=np.array(p.shape)), want)
        same(evaluate(quick, q, cell=np.asfortranarray(p.cell)), want)
        if HAS_TORCH:
            same(evaluate(quick, q, cell=tensor(p.cell)), want)


def test_a_lattice_is_a_copy():
    p = problem()
    cell = p.cell.copy()
    lattice = Lattice(cell, p.shape)
    cell[:] = 1
    same(evaluate(("numpy", None), p, cell=lattice), evaluate(("numpy", None), p))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(-1, 1), min_size=9, max_size=9),
    st.lists(st.tuples(st.permutations(range(3)), st.floats(-1e4, 1e4)), max_size=3),
    st.sampled_from([1e-12, 1e-3, 1.0, 1e5, 1e200]),
)
def test_every_cell_is_a_lattice_or_refused(numbers, shears, scale):
    """A lattice has finite numbers, and a largest radius whose box has the most voxels."""
    cell = np.reshape(numbers, (3, 3)) * scale
    for (to, by, _), shear in shears:
        cell[:, to] += shear * cell[:, by]
    with contextlib.suppress(ValueError):
        lattice = Lattice(cell, (3, 4, 5))
        assert all(np.isfinite(array).all() for array in lattice.arrays())
        box = (2 * lattice.largest_radius * np.linalg.norm(lattice.to_grid, axis=1) + 1).prod()
        assert MOST_VOXELS * (1 - 1e-5) < box <= MOST_VOXELS


FLAT = {
    "a shear of ten millions": [[1.0, 1e7, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "two shears": [[9.0, 1e7, -3e6], [0.0, 8.0, 1e6], [0.0, 0.0, 7.0]],
    "nearly flat": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0 + 1e-13]],
}


@pytest.mark.parametrize("name", FLAT)
def test_a_cell_whose_positions_lose_their_digits_is_refused(name):
    p, message = problem(), "Lattice: cell is .*; it should be finite, with a volume of at least"
    with pytest.raises(ValueError, match=message):
        Lattice(FLAT[name], p.shape)
    with pytest.raises(ValueError, match=message):
        gaussian_density(*p.atoms, FLAT[name], p.shape)


# Thin cells, and radii, whose boxes have few voxels or too many.
BOXES = {
    "thin along x": (np.diag([0.02, 5.0, 6.0]), (1, 8, 9), 2.2),
    "thin along y": (np.diag([5.0, 0.02, 6.0]), (8, 1, 9), 2.2),
    "thin along z": (np.diag([5.0, 6.0, 0.02]), (8, 9, 1), 2.2),
    "one plane": (np.diag([6.0, 5.0, 4.0]), (1, 7, 8), 13.0),
    "one row": (np.diag([6.0, 5.0, 4.0]), (1, 1, 8), 19.0),
}
TOO_LARGE = {
    "a point": (np.diag([1e-9, 1e-9, 1e-9]), (3, 2, 4), 2.2),
    "thin": (np.diag([1e-7, 6.0, 7.0]), (4, 8, 9), 2.2),
    "a sphere of kilometres": (CELLS["triclinic"][0], (8, 7, 6), 1e13),
    "a sphere beyond float32": (np.diag([6.0, 7.0, 8.0]), (6, 7, 8), 1e300),
}


def boxed(cell, shape, radius, anisotropic):
    atoms = atoms_in(np.array(cell), 2, np.random.default_rng(0), anisotropic=anisotropic)
    cotangent = np.random.default_rng(1).normal(size=shape)
    return Problem(*atoms, np.array([radius, 0.8 * radius]), np.array(cell), shape, cotangent)


@pytest.mark.parametrize("name", BOXES)
def test_boxes_that_go_around_the_cell_many_times(quick, name, anisotropic):
    p = boxed(*BOXES[name], anisotropic)
    out, *gradients = solve(quick, p)
    close(out, brute(p), terms=4096)
    for got, want in zip(gradients, solve(("numpy", "numpy"), p)[1:], strict=True):
        close(got, want, terms=1 << 20)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_an_atom_of_too_many_voxels_is_bad(place, name, anisotropic):
    p = boxed(*TOO_LARGE[name], anisotropic)
    message = r"radius\[0\] is .*; it should be at most [0-9.e+-]*, where its box has 2²⁷ voxels"
    with pytest.raises(ValueError, match=message):
        evaluate(place, p)
    p.radius[1] = Lattice(p.cell, p.shape).largest_radius / 1e4
    with pytest.warns(RuntimeWarning, match=f"1 of 2 atoms are left out; of the first, {message}"):
        out, *gradients = solve(place, p, on_bad="skip")
    alone, *others = solve(place, p.of([1]))
    agree(place, out, alone)
    for gradient, other in zip(gradients, others, strict=True):
        assert not gradient[0].any()
        agree(place, gradient[1:], other)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_largest_radius_has_a_density(place, dtype, monkeypatch):
    """Every backend draws the line between the same two radii."""
    monkeypatch.setattr("fusedops.density.plan.MOST_VOXELS", 500)
    p = problem("triclinic", 2, dtype=dtype)
    lattice = Lattice(p.cell, p.shape)
    largest = lattice.largest_radius
    p.radius[:] = largest, np.nextafter(p.radius.dtype.type(largest), np.inf)
    with pytest.warns(RuntimeWarning, match=r"1 of 2 atoms are left out; .* radius\[1\]"):
        out = evaluate(place, p, cell=lattice, grid_shape=None, on_bad="skip")
    close(out, brute(p.of([0])), terms=4096)


BAD_LATTICES = {
    "cell of another shape": (np.eye(4), (4, 5, 6), ValueError, r"cell has shape \(4, 4\); it sh"),
    "six numbers": ([10, 10, 10, 90, 90, 90], (4, 5, 6), ValueError, r"cell has shape \(6,\)"),
    "no cell": (None, (4, 5, 6), TypeError, "cell is None; it should be an array"),
    "a flat cell": (np.diag([1.0, 1.0, 0.0]), (4, 5, 6), ValueError, "cell is .*; it should be fi"),
    "a NaN": (np.diag([1.0, NAN, 1.0]), (4, 5, 6), ValueError, "cell is .*; it should be finite"),
    "an infinite edge": (np.diag([1.0, INF, 1.0]), (4, 5, 6), ValueError, "cell is .*; it should"),
    "a shear of nothing": (
        np.ones((3, 3)),
        (4, 5, 6),
        ValueError,
        "cell is .*; it should be finite",
    ),
    "dependent edges": (
        np.arange(1.0, 10.0).reshape(3, 3),
        (4, 5, 6),
        ValueError,
        "cell is .*; it should be finite, with a volume",
    ),
    "an edge of kilometres": (
        np.eye(3) * 1e13,
        (4, 5, 6),
        ValueError,
        "cell is .*; its edges shou",
    ),
    "an edge of nothing": (
        np.eye(3) * 1e-13,
        (4, 5, 6),
        ValueError,
        "cell is .*; its edges should",
    ),
    "beyond floats": (
        [[10**400, 0, 0], [0, 1, 0], [0, 0, 1]],
        (4, 5, 6),
        ValueError,
        "cell has a number beyond",
    ),
    "a complex cell": (
        np.eye(3) * 1j,
        (4, 5, 6),
        TypeError,
        "cell has dtype complex128; it should",
    ),
    "a cell of objects": (
        [[1j, None, 2]] * 3,
        (4, 5, 6),
        TypeError,
        "cell .* should be of real num",
    ),
    "a text": ("abc", (4, 5, 6), ValueError, r"cell has shape \(\); it should be \(3, 3\)"),
    "texts": (
        [["1", "0", "0"]] * 3,
        (4, 5, 6),
        TypeError,
        "cell has dtype <U1; it should be of rea",
    ),
    "ragged rows": (
        [[1, 0, 0], [0, 1], [0, 0, 1]],
        (4, 5, 6),
        ValueError,
        "cell is ragged; it should be an array",
    ),
    "two sizes": (np.eye(3), (4, 5), ValueError, r"grid_shape is \(4, 5\); it should be three si"),
    "four sizes": (np.eye(3), (4, 5, 6, 7), ValueError, r"grid_shape is \(4, 5, 6, 7\); it shoul"),
    "no voxels": (np.eye(3), (4, 0, 6), ValueError, r"grid_shape is \(4, 0, 6\); its sizes shoul"),
    "a negative size": (np.eye(3), (4, -5, 6), ValueError, "grid_shape is -5; it should be at lea"),
    "a float size": (np.eye(3), (4, 5.0, 6), TypeError, "grid_shape is a float; it should be an i"),
    "a number of voxels": (np.eye(3), 120, TypeError, "grid_shape is a int; it should be three si"),
}


@pytest.mark.parametrize("name", BAD_LATTICES)
def test_bad_lattices_name_the_argument(name):
    cell, shape, kind, message = BAD_LATTICES[name]
    p = problem()
    # A remembered lattice that compares equal must not let a bad one through.
    gaussian_density(*p.atoms, np.eye(3), (4, 5, 6))
    with pytest.raises(kind, match=f"Lattice: {message}"):
        Lattice(cell, shape)
    with pytest.raises(kind, match=f"(Lattice|gaussian_density): {message}"):
        gaussian_density(*p.atoms, cell, shape)


@needs_torch
def test_a_tensor_may_be_a_cell():
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        got = Lattice(torch.diag(torch.tensor([6, 7, 8])).to(dtype), (4, 5, 6))
        same(got.measures, Lattice(np.diag([6.0, 7.0, 8.0]), (4, 5, 6)).measures)
    with pytest.raises(TypeError, match="Lattice: cell has dtype complex64; it should be of real"):
        Lattice(torch.eye(3, dtype=torch.complex64), (4, 5, 6))


def test_a_radius_by_the_rule_has_a_positive_n_sigma():
    for wrong in (0, -1.0, math.nan, math.inf, "4", 10**400):
        with pytest.raises(ValueError, match=r"atom_radius: n_sigma is .*should be a "):
            atom_radius(np.ones(2), np.ones((2, 1)), n_sigma=wrong)


def arguments():
    p = problem()
    return {
        **dict(zip(("xyz", "b", "occupancy", "amplitudes", "widths"), p.atoms, strict=True)),
        "cell": p.cell,
        "grid_shape": p.shape,
    }


ONES = np.ones(4)
FLOATS = "it should be float32 or float64, in native byte order"
BAD = {
    "xyz of rank 1": ({"xyz": ONES}, ValueError, r"xyz has shape \(4,\); it should be \(N, 3\)"),
    "xyz transposed": ({"xyz": np.ones((3, 4))}, ValueError, r"xyz has shape \(3, 4\); it should "),
    "b a number": ({"b": 20.0}, ValueError, r"b has shape \(\); it should be \(4,\)"),
    "b of other atoms": ({"b": np.ones(5)}, ValueError, r"b has shape \(5,\); it should be \(4,\)"),
    "b of five": ({"b": np.ones((4, 5))}, ValueError, r"b has shape \(4, 5\); it should be \(4, 6"),
    "b of matrices": ({"b": np.ones((4, 3, 3))}, ValueError, r"b has shape \(4, 3, 3\); it should"),
    "occupancy a number": (
        {"occupancy": 1.0},
        ValueError,
        r"occupancy has shape \(\); it should b",
    ),
    "occupancy of others": (
        {"occupancy": np.ones(3)},
        ValueError,
        r"occupancy has shape \(3,\); i",
    ),
    "occupancy of bool": ({"occupancy": ONES > 0}, TypeError, "occupancy has dtype bool"),
    "amplitudes of one atom": (
        {"amplitudes": np.ones((1, 5))},
        ValueError,
        r"amplitudes has shape \(1, 5\); it should be \(4, G\)",
    ),
    "amplitudes of rank 1": (
        {"amplitudes": ONES},
        ValueError,
        r"amplitudes has shape \(4,\); it s",
    ),
    "no Gaussians": (
        {"amplitudes": np.ones((4, 0)), "widths": np.ones((4, 0))},
        ValueError,
        r"amplitudes has shape \(4, 0\); it should be \(4, G\), G > 0",
    ),
    "widths of other Gaussians": (
        {"widths": np.ones((4, 4))},
        ValueError,
        r"widths has shape \(4, 4\); it should be \(4, 5\)",
    ),
    "no grid_shape": (
        {"grid_shape": None},
        TypeError,
        "grid_shape is None; it should be given, un",
    ),
    "another grid_shape": (
        {"cell": Lattice(np.eye(3), (4, 5, 6)), "grid_shape": (4, 5, 7)},
        ValueError,
        r"grid_shape is \(4, 5, 7\); the Lattice has \(4, 5, 6\)",
    ),
    "a grid_shape beside a Lattice that is none": (
        {"cell": Lattice(np.eye(3), (4, 5, 6)), "grid_shape": 4},
        TypeError,
        "grid_shape is a int; it should be three sizes",
    ),
    "radius of others": (
        {"radius": np.ones(5)},
        ValueError,
        r"radius has shape \(5,\); it should ",
    ),
    "radius a text": (
        {"radius": "3"},
        TypeError,
        "radius has dtype <U1; it should be float32 or f",
    ),
    "radius negative": (
        {"radius": -2.0},
        ValueError,
        r"radius\[0\] is -2\.0; it should be at leas",
    ),
    "radius NaN": ({"radius": math.nan}, ValueError, r"radius\[0\] is nan; it should be finite"),
    "radius infinite": ({"radius": math.inf}, ValueError, r"radius\[0\] is inf; it should be fi"),
    "radius beyond floats": (
        {"radius": 10**400},
        ValueError,
        "density: radius is beyond the large",
    ),
    "n_sigma beyond floats": (
        {"n_sigma": 10**400},
        ValueError,
        "density: n_sigma is beyond the la",
    ),
    "n_sigma of none": ({"n_sigma": 0}, ValueError, "n_sigma is 0; it should be a positive number"),
    "n_sigma negative": ({"n_sigma": -4.0}, ValueError, r"n_sigma is -4\.0; it should be a positi"),
    "n_sigma infinite": (
        {"n_sigma": math.inf},
        ValueError,
        "n_sigma is inf; it should be a positi",
    ),
    "n_sigma a text": ({"n_sigma": "4"}, ValueError, "n_sigma is '4'; it should be a positive num"),
    "on_bad": (
        {"on_bad": "ignore"},
        ValueError,
        "on_bad is 'ignore'; it should be one of raise, s",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    changes, kind, message = BAD[name]
    for function in (gaussian_density, gaussian_density.vjp, gaussian_density.explain):
        with pytest.raises(kind, match=message):
            function(**{**arguments(), **changes})


@needs_torch
@pytest.mark.parametrize("name", ["radius", "cell"])
def test_a_constant_that_requires_grad_is_refused(name):
    given = {**arguments(), "radius": ONES}
    tensors = {n: tensor(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires grad; it is a constant, pass x.detach"):
        gaussian_density(**tensors)


@needs_torch
def test_a_lattice_of_a_cell_that_requires_grad_is_refused():
    with pytest.raises(ValueError, match="Lattice: cell requires grad; it is a constant"):
        Lattice((5 * torch.eye(3)).requires_grad_(), (4, 4, 4))


@needs_torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", ["radius", "cell"])
def test_a_constant_that_has_a_tangent_is_refused(name):
    given = {**arguments(), "radius": ONES}
    tensors = {n: tensor(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}
    constant = tensors.pop(name)

    def density(constant):
        return gaussian_density(**tensors, **{name: constant})

    refused = pytest.raises(ValueError, match=f"{name} has a tangent; it is a constant")
    with torch.autograd.forward_ad.dual_level(), refused:
        density(torch.autograd.forward_ad.make_dual(constant, constant))
    with pytest.raises(ValueError, match=f"{name} has a tangent; it is a constant"):
        torch.func.jvp(density, (constant,), (constant,))


@needs_torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_lattice_of_a_cell_that_has_a_tangent_is_refused():
    cell = 5 * torch.eye(3)
    refused = pytest.raises(ValueError, match="Lattice: cell has a tangent; it is a constant")
    with torch.autograd.forward_ad.dual_level(), refused:
        Lattice(torch.autograd.forward_ad.make_dual(cell, cell), (4, 4, 4))


DTYPES = ("float32", "float64")


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=4)), ids="-".join)
def test_the_map_has_the_dtype_to_which_its_arrays_promote(quick, dtypes, anisotropic):
    """Every gradient has its array's dtype, and the form factors' dtype changes neither."""
    p = problem(anisotropic=anisotropic)
    kinds = (*dtypes[:3], *dtypes[3:] * 3)
    arrays = [a.astype(k) for a, k in zip(p[:6], kinds, strict=True)]
    wide = np.result_type(*dtypes[:3])
    p = Problem(*arrays, *p[6:8], p.cotangent.astype(wide))
    out, *gradients = solve(quick, p)
    assert out.dtype == wide
    if wide == np.float32:
        # Constants are rounded to the dtype of the map.
        p = Problem(*(a.astype(wide) for a in p[:6]), *p[6:])
    close(out, brute(p))
    want = solve(("numpy", "numpy"), Problem(*(a.astype("f8") for a in p[:7]), *p[7:]))[1:]
    for got, array, gradient in zip(gradients, p.leaves, want, strict=True):
        assert got.dtype == array.dtype
        close(got, gradient, terms=4000)


@needs_torch
@pytest.mark.interpreted_slow(dtype="bfloat16", anisotropic=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_radii_of_sixteen_bits(any_torch_backend, dtype, anisotropic):
    """The rule's radii, and one number for all atoms, agree with an array of radii."""
    kind = getattr(torch, dtype)
    p = problem(anisotropic=anisotropic)
    tensors = [tensor(a).to(kind) for a in p.atoms]
    arrays = [t.double().numpy() for t in tensors]
    for radius in (None, 1.7):
        got = gaussian_density(*tensors, p.cell, p.shape, radius=radius, backend=any_torch_backend)
        far = atom_radius(arrays[1], arrays[4]) if radius is None else np.full(4, radius)
        close(got.double().numpy(), brute(Problem(*arrays, far, *p[6:])), dtype)


@needs_torch
def test_the_rules_radius_is_a_constant_for_transforms(torch_backend, anisotropic):
    p = problem(anisotropic=anisotropic)

    def total(*arrays):
        constants = map(tensor, p[3:5])
        rho = gaussian_density(*arrays, *constants, p.cell, p.shape, backend=torch_backend)
        return rho.sum()

    leaves = leaves_of(p)
    want = torch.autograd.grad(total(*leaves), leaves)
    got = torch.func.grad(total, argnums=(0, 1, 2))(*map(tensor, p.leaves))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@needs_torch
def test_a_map_for_each_of_many_models(torch_backend, anisotropic):
    """torch.vmap can't check atoms, so a call must ask to leave bad ones out."""
    p = problem(anisotropic=anisotropic)
    arrays = [tensor(array) for array in p.leaves]
    moved = torch.stack([arrays[0], arrays[0] + 0.3])
    with pytest.raises(TypeError, match="on_bad is 'raise', which has to look at the atoms; insi"):
        torch.vmap(function_of(p, torch_backend), (0, None, None))(moved, *arrays[1:])
    function = function_of(p, torch_backend, on_bad="skip")
    maps = torch.vmap(function, (0, None, None))(moved, *arrays[1:])
    for got, xyz in zip(maps, moved, strict=True):
        assert torch.equal(got, function(xyz, *arrays[1:]))


def compiled(function):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, dynamic=True), counter


@needs_torch
def test_what_compiled_code_cannot_do_says_so():
    p = problem()
    arrays = [tensor(a) for a in p.atoms]
    lattice = Lattice(p.cell, p.shape)
    # Dynamo wraps the TypeError in one of its own.
    fast, _ = compiled(lambda *a: gaussian_density(*a, lattice, on_bad="raise"))
    with pytest.raises((TypeError, RuntimeError), match="it should be 'skip'"):
        fast(*arrays)


GUARDED = """
import numpy as np
from fusedops import Lattice
from fusedops.density.op import density, density_vjp, density_vjp_vjp
from fusedops.samples import atoms_in
from guarded import fill, guarded


for at_the_end in (True, False):
    for cell, shape, radius, dtype in CELLS:
        for anisotropic in (False, True):
            rng = np.random.default_rng(0)
            cell = np.array(cell)
            atoms = atoms_in(cell, 5, rng, anisotropic=anisotropic)
            # At a corner, outside of the cell, beyond all digits, and of no place at all.
            xyz = atoms[0]
            xyz[0], xyz[1], xyz[2], xyz[3, 1] = 0.0, cell @ [1, 2, -3], 1e30, np.nan
            arrays = [guarded(a.astype(dtype), at_the_end) for a in (*atoms, np.full(5, radius))]
            g = guarded(rng.normal(size=shape).astype(dtype), at_the_end)
            lattice = Lattice(cell, shape)
            a = density.Arguments(*arrays, lattice, 0)
            b = density_vjp.Arguments(*arrays[:5], g, arrays[5], None, lattice, 0)
            tangents = [guarded(np.ones_like(array), at_the_end) for array in arrays[:5]]
            c = density_vjp_vjp.Arguments(*b[:6], *tangents, *b[6:-1])
            for primitive, given in ((density, a), (density_vjp, b), (density_vjp_vjp, c)):
                outputs = [
                    None if d is None else guarded(np.full(d[0], np.nan, dtype), at_the_end)
                    for d in primitive.describe(given)
                ]
                fill(primitive, given, outputs)
                for out in outputs:
                    assert out is None or np.isfinite(out).all()
"""


@needs_linux
@pytest.mark.parametrize("place", FILLING, ids="-".join)
def test_kernels_touch_nothing_beyond_their_arrays(place):
    available(*place)
    cells = [
        (np.array(cell).tolist(), shape, radius, dtype)
        for cell, shape, radius in CELLS.values()
        for dtype in ("f4", "f8")
    ]
    guarded.run(place, GUARDED, CELLS=cells[2:4] if place[1] == "triton" else cells)


UBIQUITIN = Path(fusedops.__file__).parent / "data" / "1ubi.pdb"


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_are_those_of_gemmi(backend, anisotropic, dtype):
    """Compare ubiquitin's maps, without symmetry, where each atom has gemmi's radius.

    gemmi computes in float32, with an exponential that is good to 8e-6 of each Gaussian. It agrees
    to 1e-5 as a whole, and to 3e-5 of the largest value at the nitrogens, whose Gaussians of 18
    electrons and constant of -11.5 are each that much off. What it cuts off is a hundredth of that,
    so that it doesn't matter on which side of a radius a voxel falls.
    """
    gemmi = pytest.importorskip("gemmi")
    structure = gemmi.read_structure(str(UBIQUITIN))
    structure.spacegroup_hm = "P 1"
    atoms = [cra.atom for cra in structure[0].all()]
    for atom in atoms:
        # An atom without B would make its form factor's constant a point.
        atom.b_iso = atom.b_iso or 5.0
    rng = np.random.default_rng(0)
    b = np.array([atom.b_iso for atom in atoms])
    if anisotropic:
        factor = 0.15 * rng.normal(size=(len(atoms), 3, 3))
        U = factor @ factor.transpose(0, 2, 1) + 0.1 * np.eye(3)
        b = np.stack([U[:, i, j] for i, j in COMPONENTS], 1).astype(np.float32)
        for atom, values in zip(atoms, b, strict=True):
            atom.aniso = gemmi.SMat33f(*values.tolist())
    calculator = gemmi.DensityCalculatorX()
    calculator.d_min, calculator.rate, calculator.cutoff = 2.2, 1.5, 1e-7
    calculator.set_grid_cell_and_spacegroup(structure)
    calculator.put_model_density_on_grid(structure[0])
    want = np.array(calculator.grid, copy=False)
    coefficients = np.array([atom.element.it92.get_coefs() for atom in atoms])
    p = Problem(
        np.array([atom.pos.tolist() for atom in atoms]),
        b,
        np.array([atom.occ for atom in atoms]),
        np.concatenate([coefficients[:, :4], coefficients[:, 8:]], 1),
        np.concatenate([coefficients[:, 4:8], np.zeros((len(atoms), 1))], 1),
        np.array([calculator.estimate_radius(atom) for atom in atoms]),
        np.array(structure.cell.orth.mat.tolist()),
        want.shape,
        None,
    )
    p = Problem(*(a.astype(dtype) for a in p[:6]), *p[6:])
    got = evaluate(("numpy", backend), p)
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)
    assert error(got, want) < 3e-5
    # A missing atom would fail the test.
    assert error(got - evaluate(("numpy", backend), p.of([0])), want) > 1e-2


def test_sheared_cells_cost_no_digits(quick, anisotropic):
    """Far from right angles, vectors are small differences of many long steps."""
    cell = np.array([[6.0, 14.0, 0.0], [0.0, 6.0, -13.0], [0.0, 0.0, 6.0]])
    shape, rng = (3, 6, 1), np.random.default_rng(12577)
    arrays = list(atoms_in(cell, 2, rng, anisotropic=anisotropic))
    # A sharp atom, with large exponents; in one direction, the others being wide.
    arrays[1][1] -= 0.6 * np.eye(6)[0] if anisotropic else 41.0
    arrays = [a.astype(np.float32) for a in (*arrays, np.full(2, 4.0), rng.normal(size=shape))]
    p = Problem(*arrays[:6], cell, shape, arrays[6])
    wide = Problem(*(a.astype(np.float64) for a in p[:7]), shape, p.cotangent.astype(np.float64))
    want = solve(("numpy", "numpy"), wide, on_bad="clamp")
    for got, expected in zip(solve(quick, p, on_bad="clamp"), want, strict=True):
        assert error(got, expected) < 1e-5
