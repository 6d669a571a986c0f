"""The Gaussian density and its lattice, on the reference and the kernels."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedops
from contract import same, tensor
from densities import (
    BOXES,
    CELLS,
    NAMES,
    Problem,
    agree,
    all_close,
    atoms_of,
    close,
    evaluate,
    function_of,
    leaves_of,
    problem,
    solve,
    summed,
    too_sharp,
)
from fusedops import Lattice, gaussian_density
from fusedops._frame import registry
from fusedops.density import atom_radius, bad_atoms
from fusedops.density import op as density_op
from fusedops.density.op import COMPONENTS, SLACK, clamped, density, reach
from fusedops.density.plan import MOST_VOXELS
from fusedops.samples import atoms_in
from fusedops.testing import error
from places import (
    EXACT,
    HAS_TORCH,
    available,
    interpreted,
    needs_torch,
    needs_triton,
)
from test_contract import compiled

if HAS_TORCH:
    import torch

pytestmark = interpreted

#: Where a test is of checks or of the definition, which all backends share.
ANYWHERE = ("numpy", None)


def matrix_of(b):
    """Return an atom's U (3, 3), from B or from six components."""
    if np.ndim(b) == 0:
        return b / (8 * np.pi**2) * np.eye(3)
    return np.asarray(b)[[[0, 3, 4], [3, 1, 5], [4, 5, 2]]]


def components_of(matrices):
    return np.stack([matrices[..., i, j] for i, j in COMPONENTS], -1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CELLS)
def test_maps_are_direct_sums(quick, name, anisotropic, dtype):
    p = problem(name, anisotropic=anisotropic, dtype=dtype)
    got, want = evaluate(quick, p), direct_map(name, anisotropic, dtype)
    assert (got.dtype, got.shape) == (dtype, p.shape)
    assert np.count_nonzero(want) == np.count_nonzero(got)
    # Vectors are differences of long edges, or images are many, and so are roundings.
    close(got, want, terms=4096 if name == "very skewed" or name in BOXES else 64)


@functools.cache
def direct_map(name, anisotropic, dtype):
    return summed(problem(name, anisotropic=anisotropic, dtype=dtype))


@needs_triton
@pytest.mark.parametrize("count", [1, 700])
def test_atoms_are_sorted_along_x_when_interpreted(count):
    from gpukern.density.triton import gaussian_density as kernel

    xyz = np.random.default_rng(0).normal(size=(count, 3)) * 50
    xyz[5:6], xyz[7:8], xyz[9:10] = np.nan, np.inf, 0
    p = problem("skewed and smaller", count)
    atoms = [tensor(array) for array in (xyz, *p.atoms[1:], np.zeros(count))]
    order = torch.full((count,), -1)
    kernel(density.Arguments(*atoms, p.lattice, 0), density.Outputs(None, order))
    assert sorted(order.tolist()) == list(range(count))
    along = (np.linalg.solve(p.cell, xyz.T)[0] % 1)[order.numpy()]
    assert np.diff(along[np.isfinite(along)]).min(initial=0) > -1 / 1000


# Ends of spheres.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("whole", [False, True], ids=["in the cell", "outside of it"])
def test_a_voxel_at_the_very_end_of_the_radius_is_inside(place, dtype, whole):
    """The grid's steps are no binary numbers, and their rounding must not matter."""
    shape, steps = (12, 13, 14), 3
    corner = np.array([[4, 5, 6]]) + whole * np.array([[-12, 26, 14]])
    atoms = [0.1 * corner, np.ones(1), np.ones(1), np.ones((1, 1)), np.ones((1, 1))]
    arrays = [np.asarray(a, dtype) for a in (*atoms, [0.1 * steps])]
    p = Problem(*arrays, np.diag(np.array(shape) * 0.1), shape, None)
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
    return Problem(*atoms, radius, cell, shape, np.zeros(shape)), square


@pytest.mark.parametrize("name", BORDERS)
def test_spheres_end_where_they_do_in_float64(quick, name):
    """Squares in float32 would take every third of these voxels for the wrong side."""
    p, square = at_borders(name)
    inside = square <= 1
    near = inside & (square > 1 - 1e-6)
    assert 5 < near.any(1).sum() < len(p.xyz) - 5
    values = (np.pi / 20) ** 1.5 * np.exp(-(np.pi**2) / 20 * p.radius.astype(float) ** 2)
    for dtype in ("float32", "float64"):
        cast = p.astype(dtype)
        same(evaluate(quick, cast) != 0, inside.any(0).reshape(p.shape))
        # Beyond all spheres no gradient meets a voxel; at their ends it meets each.
        beyond, ends = (
            solve(quick, cast, cotangent=g.reshape(p.shape).astype(dtype))[3]
            for g in (~inside.any(0), near.any(0))
        )
        same(beyond, np.zeros_like(beyond))
        np.testing.assert_allclose(ends, near.sum(1) * values, rtol=1e-4)


def test_no_radius_reaches_a_voxel_that_is_met(quick):
    one = np.ones((2, 1))
    xyz = np.array([[1.0, 2.0, 3.0], [4.2, 1.1, 1.1]])
    atoms = xyz, np.full(2, 20.0), one[:, 0], one, one, np.zeros(2)
    p = Problem(*atoms, np.diag([6.0, 7.0, 8.0]), (6, 7, 8), None)
    got = evaluate(quick, p)
    assert np.argwhere(got).tolist() == [[1, 2, 3]]
    assert got[1, 2, 3] == pytest.approx((4 * np.pi / 21) ** 1.5, rel=1e-12)


# Identities.


@pytest.mark.parametrize("backend", EXACT)
def test_planes_that_an_atom_meets_again(backend, anisotropic, several_threads):
    """The number of threads changes no bit where boxes go around the cell several times."""
    place, p = available("numpy", backend), problem("thinner", 9, anisotropic=anisotropic)
    found = []
    try:
        for count in (1, 2, 3, 16):
            fusedops.set_num_threads(count)
            found.append(solve(place, p))
            assert count in several_threads
    finally:
        fusedops.set_num_threads(None)
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            same(got, want)


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=needs_torch)])
def test_a_large_box_is_taken_in_parts(monkeypatch, framework, anisotropic):
    """The formula computes a few planes of an atom at a time, or many atoms."""
    place, p = (framework, framework), problem("triclinic", 3, anisotropic=anisotropic)
    want = solve(place, p)
    monkeypatch.setattr("fusedops.density.op._CHUNK", 1000)
    all_close(solve(place, p), want)


def test_atoms_far_away_hurt_nobody(quick):
    """A coordinate too large for any digit may put the atom anywhere, but within the map."""
    p = problem("orthogonal")
    p.xyz[0], p.xyz[2] = 1e30, -1e100
    assert all(np.isfinite(array).all() for array in solve(quick, p))


# Radii.


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=needs_torch)])
def test_radius_may_be_a_number_or_a_rule(framework, anisotropic):
    place, p = (framework, None), problem(anisotropic=anisotropic)
    full = evaluate(place, p._replace(radius=np.full(4, 1.75)))
    narrow = np.full(4, 1.75, "f4")
    for radius in (1.75, np.float32(1.75), tensor(narrow) if framework == "torch" else narrow):
        same(evaluate(place, p, radius=radius), full)
    for n_sigma in ({"n_sigma": 2}, {"n_sigma": 5.5}, {}):
        want = evaluate(place, p._replace(radius=atom_radius(p.b, p.widths, **n_sigma)))
        same(evaluate(place, p, radius=None, **n_sigma), want)


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
    U[5:10], U[10:15], U[15:20] = np.diag([0.3, 0.3, 0.9]), np.diag([0.9, 0.3, 0.9]), 0.0
    # Flat ones in any direction, whose two large eigenvalues rounding makes one.
    turn, _ = np.linalg.qr(rng.normal(size=(80, 3, 3)))
    U[20:100] = (turn * [0.9, 0.9, 0.1]) @ turn.transpose(0, 2, 1) * rng.uniform(0, 1, (80, 1, 1))
    for values, mean_square in (
        (b.astype(dtype), b / (8 * np.pi**2)),
        (components_of(U).astype(dtype), np.linalg.eigvalsh(U)[:, -1]),
    ):
        square = np.maximum(widths.max(1) / (8 * np.pi**2) + mean_square, 1e-6)
        want = np.clip(np.ceil(n_sigma * np.sqrt(square) / 0.25) * 0.25, 2.0, None)
        got = atom_radius(values, widths, n_sigma=n_sigma)
        same(got, want.astype(dtype))
        assert len(set(got.tolist())) > 5 or n_sigma == 1
        if HAS_TORCH:
            tensors = tensor(values), tensor(widths)
            same(atom_radius(*tensors, n_sigma=n_sigma).numpy(), got)
            strided = [t.repeat_interleave(2, 0)[::2] for t in tensors]
            strided[0][0] = strided[1][1, 3] = math.nan
            with fusedops.use_backend("triton"):
                (by_kernel,) = reach(*strided, n_sigma)
            assert by_kernel[:2].isnan().all()
            same(by_kernel[2:].numpy(), got[2:])


def test_the_rule_asks_for_the_calls_backend(monkeypatch):
    """In a first call and in a later one: on a GPU a kernel finds the radii."""
    asked, p = [], problem()

    def radius(*given):
        asked.append(registry.forced(None))
        return by_rule(*given)

    by_rule = density_op._radius
    monkeypatch.setattr(density_op, "_radius", radius)
    for _ in range(2):
        gaussian_density(*p.atoms, p.cell, p.shape, backend="numpy")
    gaussian_density.explain(*p.atoms, p.cell, p.shape, backend="numpy")
    assert asked == ["numpy"] * 3


@needs_torch
@pytest.mark.interpreted_slow(dtype="bfloat16", anisotropic=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_radii_of_sixteen_bits(any_torch_backend, dtype, anisotropic):
    """The rule's radii, and one number for all atoms, agree with an array of radii."""
    p = problem(anisotropic=anisotropic)
    tensors = [tensor(a).to(getattr(torch, dtype)) for a in p.atoms]
    arrays = [t.double().numpy() for t in tensors]
    for radius in (None, 1.7):
        got = gaussian_density(*tensors, p.cell, p.shape, radius=radius, backend=any_torch_backend)
        far = atom_radius(arrays[1], arrays[4]) if radius is None else np.full(4, radius)
        close(got.double().numpy(), summed(Problem(*arrays, far, *p[6:])), dtype)


@needs_torch
def test_the_rules_radius_is_a_constant_for_transforms(anisotropic):
    p = problem(anisotropic=anisotropic)
    function, leaves = function_of(p, radius=None), leaves_of(p)
    want = torch.autograd.grad(function(*leaves).sum(), leaves)
    got = torch.func.grad(lambda *a: function(*a).sum(), argnums=(0, 1, 2))(*map(tensor, p[:3]))
    assert all(map(torch.equal, got, want))


# Atoms without a density.


NAN, INF = math.nan, math.inf
PAIR = [0.1, 0.1, 0.1, 0.2, 0.0, 0.0]
POSITIVE = "it should be positive definite together with each of the atom's widths"
# The argument, the place in it beside the atom, a bad value, and the error's message.
BAD_ATOMS = {
    "xyz NaN": ("xyz", 1, NAN, r"\[.*, nan, .*\]; it should be finite"),
    "xyz infinite": ("xyz", 0, -INF, r"\[-inf, .*\]; it should be finite"),
    "xyz that overflows": ("xyz", 1, 1.7e308, r"\[.*, 1\.7e\+308, .*\]; it should be so near to"),
    "b NaN": ("b", ..., NAN, ".*nan.*; it should be finite"),
    "b infinite": ("b", ..., INF, ".*inf.*; it should be finite"),
    "occupancy NaN": ("occupancy", ..., NAN, "nan; it should be finite"),
    "occupancy infinite": ("occupancy", ..., INF, "inf; it should be finite"),
    "amplitude NaN": ("amplitudes", 1, NAN, r"\[.*nan.*\]; it should be finite"),
    "width infinite": ("widths", 0, INF, r"\[inf, .*\]; it should be finite"),
    "radius NaN": ("radius", ..., NAN, "nan; it should be finite"),
    "radius infinite": ("radius", ..., INF, "inf; it should be finite"),
    "radius negative": ("radius", ..., -1.0, r"-1\.0; it should be at least 0"),
}
ISO_ALONE = {
    "b too negative": ("b", ..., -1.0, r"-1\.0; it should be larger than minus each of the atom"),
    "b of no width": ("b", ..., 0.0, r"0\.0; it should be larger than minus each of the atom"),
    "width too negative": ("widths", 2, -99.0, "[0-9.]*; it should be larger than minus each"),
}
ANISO_ALONE = {
    "U negative": ("b", 0, -2.0, rf"\[-2\.0, .*\]; {POSITIVE}"),
    "U of nothing": ("b", ..., 0.0, rf"\[0\.0, .*\]; {POSITIVE}"),
    "U with a negative eigenvalue": ("b", ..., PAIR, f".*; {POSITIVE}"),
    "U with two of them": ("b", ..., [*PAIR[:4], 0.2, 0.2 + 1e-9], f".*; {POSITIVE}"),
    "U NaN off the diagonal": ("b", 4, NAN, r"\[.*nan.*\]; it should be finite"),
}
CASES = {False: BAD_ATOMS | ISO_ALONE, True: BAD_ATOMS | ANISO_ALONE}


def spoil(p, argument, atom, at, value):
    getattr(p, argument)[atom, at] = value


@pytest.mark.parametrize(
    ("name", "anisotropic"), [(name, kind) for kind, cases in CASES.items() for name in cases]
)
def test_an_atom_without_a_density_is_named(name, anisotropic):
    p = problem("orthogonal", 5, anisotropic=anisotropic)
    argument, at, value, should = CASES[anisotropic][name]
    spoil(p, argument, 2, at, value)
    assert np.flatnonzero(bad_atoms(*p[:6], lattice=p.lattice)).tolist() == [2]
    named = "b" if argument == "widths" and "minus" in should else argument
    refused = functools.partial(
        pytest.raises, ValueError, match=rf"gaussian_density: {named}\[2\] is {should}"
    )
    out = np.full(p.shape, 7.0)
    # Clamping hides nothing but sharp Gaussians.
    for on_bad in ("raise", "clamp")[: 1 + (name in BAD_ATOMS)]:
        with refused():
            evaluate(ANYWHERE, p, out=out, on_bad=on_bad)
    assert (out == 7).all()
    if argument in ("b", "widths"):
        # The error names the bad argument, not the radius that the rule made of it.
        with refused():
            evaluate(ANYWHERE, p, radius=None)
    if HAS_TORCH:
        for leaves in ([tensor(a) for a in p[:3]], leaves_of(p)):
            with refused():
                function_of(p)(*leaves)


def test_atoms_without_a_density_may_be_left_out(quick, anisotropic):
    """They add nothing to the map, and their gradients are zero."""
    cases = list(CASES[anisotropic].values())
    p = problem("orthogonal", 2 * len(cases), anisotropic=anisotropic)
    for row, case in enumerate(cases):
        spoil(p, case[0], 2 * row, *case[1:3])
    told = rf"{len(cases)} of {len(p.b)} atoms are left out; of the first, xyz\[0\] is \[.*nan"
    with pytest.warns(RuntimeWarning, match=told):
        out, *gradients = solve(quick, p, NAMES, on_bad="skip")
    want, *others = solve(quick, p.of(slice(1, None, 2)), NAMES)
    agree(quick, out, want)
    for got, other in zip(gradients, others, strict=True):
        agree(quick, got[1::2], other)
        assert not got[::2].any()


def test_the_warning_counts_and_points_at_the_caller():
    p = problem("orthogonal", 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gaussian_density(*p.atoms, p.lattice, on_bad="skip")
    p.b[1] = p.occupancy[3] = np.nan
    # The second call is of a known kind, which has a plan.
    for _ in range(2):
        with pytest.warns(RuntimeWarning) as caught:
            gaussian_density(*p.atoms, p.lattice, on_bad="skip")
        (one,) = caught
        assert str(one.message).startswith("gaussian_density: 2 of 5 atoms are left out; of the")
        assert one.filename == __file__


TOO_LARGE = {
    "a point": (np.diag([1e-9, 1e-9, 1e-9]), (3, 2, 4), 2.2),
    "thin": (np.diag([1e-7, 6.0, 7.0]), (4, 8, 9), 2.2),
    "a sphere of kilometres": (CELLS["triclinic"][0], (8, 7, 6), 1e13),
    "a sphere beyond float32": (np.diag([6.0, 7.0, 8.0]), (6, 7, 8), 1e300),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_an_atom_of_too_many_voxels_is_bad(place, name, anisotropic):
    p = atoms_of(*TOO_LARGE[name], anisotropic=anisotropic)
    message = r"radius\[0\] is .*; it should be at most [0-9.e+-]*, where its box has 2²⁷ voxels"
    with pytest.raises(ValueError, match=message):
        evaluate(place, p)
    p.radius[1] = p.lattice.largest_radius / 1e4
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
    lattice = p.lattice
    largest = lattice.largest_radius
    p.radius[:] = largest, np.nextafter(p.radius.dtype.type(largest), np.inf)
    with pytest.warns(RuntimeWarning, match=r"1 of 2 atoms are left out; .* radius\[1\]"):
        out = evaluate(place, p, cell=lattice, grid_shape=None, on_bad="skip")
    close(out, summed(p.of([0])), terms=4096)


# Gaussians that are too sharp; test_density_derivatives.py has their derivatives.


@functools.cache
def summed_of_widened(name, anisotropic, dtype):
    """Return the map, where every Gaussian is an atom of its own, of B of at least 0.4 Å²."""
    p = too_sharp(name, anisotropic=anisotropic, dtype=dtype)
    rho = np.zeros(p.shape)
    for i, g in np.ndindex(p.widths.shape):
        B = 8 * np.pi**2 * matrix_of(p.b[i].astype(np.float64)) + p.widths[i, g] * np.eye(3)
        values, vectors = np.linalg.eigh(B)
        wide = vectors * np.maximum(values, 0.4) @ vectors.T
        own = p.of([i])._replace(b=components_of(wide[None]) / (8 * np.pi**2))
        rho += summed(own._replace(amplitudes=own.amplitudes[:, [g]], widths=np.zeros((1, 1))))
    return rho


@pytest.mark.interpreted_slow(dtype="float64", name="triclinic")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["triclinic", "smaller than the sphere"])
def test_sharp_gaussians_are_widened_to_a_least_width(place, name, anisotropic, dtype):
    p = too_sharp(name, anisotropic=anisotropic, dtype=dtype)
    # Where U is far from zero, rounding it moves an eigenvalue of 0.005 Å².
    terms = 1 << 20 if dtype == "float32" else 4096
    want = summed_of_widened(name, anisotropic, dtype)
    close(evaluate(place, p, on_bad="clamp"), want, dtype, terms=terms)
    with pytest.raises(ValueError, match=r"b\[0\] is .*; it should be "):
        evaluate(place, p, on_bad="raise")


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
    call = density.Arguments(*map(tensor, p[:6]), p.lattice, 1)
    with Calls() as calls:
        wide, back = clamped(call)
        back(*wide[:5])
    assert "aten::where.self" in calls.names
    assert "aten::lift_fresh" not in calls.names


@needs_torch
@pytest.mark.parametrize(
    ("argument", "value"), [("b", -np.inf), ("amplitudes", np.nan), ("widths", np.nan)]
)
def test_clamping_revives_no_part_of_a_broken_atom(anisotropic, argument, value):
    """Nobody looks at values under vmap; the atom has a sharp Gaussian beside the broken one."""
    p = too_sharp(anisotropic=anisotropic)
    getattr(p, argument).reshape(5, -1)[3, 0] = value
    leaves, kept = leaves_of(p), [0, 1, 2, 4]
    rho = torch.vmap(function_of(p, on_bad="clamp"))(*(x[None] for x in leaves))[0]
    want = evaluate(ANYWHERE, p.of(kept), on_bad="clamp")
    close(rho.detach().numpy(), want)
    for found in torch.autograd.grad((rho**2).sum(), leaves):
        assert found.isfinite().all()
        assert not found[3].any()


# Transforms and compiled code.


@needs_torch
def test_atoms_that_nobody_can_look_at():
    """A call under torch.vmap, or in compiled code, must ask to leave bad ones out."""
    p = problem()
    arrays, function = [tensor(array) for array in p[:3]], function_of(p, on_bad="raise")
    with pytest.raises(TypeError, match="on_bad is 'raise', which has to look at the atoms; insi"):
        torch.vmap(function, (0, None, None))(arrays[0][None], *arrays[1:])
    # Dynamo wraps the TypeError in one of its own.
    with pytest.raises((TypeError, RuntimeError), match="it should be 'skip'"):
        compiled(function, dynamic=True)[0](*arrays)


@needs_torch
def test_compiled_code_clamps_and_leaves_other_bad_atoms_out(anisotropic):
    p = too_sharp(anisotropic=anisotropic)
    function, leaves = function_of(p, on_bad="clamp"), leaves_of(p)
    fast, counter = compiled(function, dynamic=True)
    found, want = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (fast, function))
    assert counter.frame_count == 1
    all_close([a.numpy() for a in found], [a.numpy() for a in want])
    p.amplitudes[1, 2] = math.nan
    want = evaluate(ANYWHERE, p.of([0, 2, 3, 4]), on_bad="clamp")
    close(fast(*leaves).detach().numpy(), want)


# Lattices.


def test_a_lattice_is_a_copy_and_serves_many_calls(quick, anisotropic):
    p = problem("very skewed", anisotropic=anisotropic)
    cell = p.cell.copy()
    lattice = Lattice(cell, p.shape)
    cell[:] = 1
    for seed in range(2):
        q = problem("very skewed", anisotropic=anisotropic, seed=seed)
        want = evaluate(quick, q)
        same(evaluate(quick, q, cell=lattice, grid_shape=None), want)
        same(evaluate(quick, q, cell=lattice, grid_shape=list(p.shape)), want)
        same(evaluate(quick, q, cell=p.cell.tolist(), grid_shape=np.array(p.shape)), want)
        same(evaluate(quick, q, cell=np.asfortranarray(p.cell)), want)
        if HAS_TORCH:
            same(evaluate(quick, q, cell=tensor(p.cell)), want)


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


FINITE, VOLUME = "cell is .*; it should be finite", "cell is .*; it should be finite, with a volume"
BAD_CELLS = {
    "another shape": (np.eye(4), r"cell has shape \(4, 4\); it should be \(3, 3\)"),
    "six numbers": ([10, 10, 10, 90, 90, 90], r"cell has shape \(6,\)"),
    "flat": (np.diag([1.0, 1.0, 0.0]), VOLUME),
    "a NaN": (np.diag([1.0, NAN, 1.0]), FINITE),
    "an infinite edge": (np.diag([1.0, INF, 1.0]), FINITE),
    "all ones": (np.ones((3, 3)), FINITE),
    "dependent edges": (np.arange(1.0, 10.0).reshape(3, 3), VOLUME),
    "a shear of ten millions": ([[1.0, 1e7, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], VOLUME),
    "two shears": ([[9.0, 1e7, -3e6], [0.0, 8.0, 1e6], [0.0, 0.0, 7.0]], VOLUME),
    "nearly flat": ([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0 + 1e-13]], VOLUME),
    "an edge of kilometres": (np.eye(3) * 1e13, "cell is .*; its edges should"),
    "an edge of nothing": (np.eye(3) * 1e-13, "cell is .*; its edges should"),
    "beyond floats": ([[10**400, 0, 0], [0, 1, 0], [0, 0, 1]], "cell has a number beyond"),
}
BAD_GRIDS = {
    "two sizes": ((4, 5), r"grid_shape is \(4, 5\); it should be three sizes"),
    "four sizes": ((4, 5, 6, 7), r"grid_shape is \(4, 5, 6, 7\); it should be three sizes"),
    "no voxels": ((4, 0, 6), r"grid_shape is \(4, 0, 6\); its sizes should be positive"),
    "a negative size": ((4, -5, 6), "grid_shape is -5; it should be at least"),
    "a float size": ((4, 5.0, 6), "grid_shape is a float; it should be an int"),
}
BAD_LATTICES = {name: (cell, (4, 5, 6), message) for name, (cell, message) in BAD_CELLS.items()}
BAD_LATTICES |= {name: (np.eye(3), shape, message) for name, (shape, message) in BAD_GRIDS.items()}


@pytest.mark.parametrize("name", BAD_LATTICES)
def test_bad_lattices_name_the_argument(name):
    """test_errors.py passes junk."""
    cell, shape, message = BAD_LATTICES[name]
    p = problem()
    # A remembered lattice that compares equal must not let a bad one through.
    gaussian_density(*p.atoms, np.eye(3), (4, 5, 6))
    kind = TypeError if name == "a float size" else ValueError
    with pytest.raises(kind, match=f"Lattice: {message}"):
        Lattice(cell, shape)
    with pytest.raises(kind, match=f"(Lattice|gaussian_density): {message}"):
        gaussian_density(*p.atoms, cell, shape)


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64"])
def test_a_tensor_may_be_a_cell(dtype):
    got = Lattice(torch.diag(torch.tensor([6, 7, 8])).to(getattr(torch, dtype)), (4, 5, 6))
    same(got.measures, Lattice(np.diag([6.0, 7.0, 8.0]), (4, 5, 6)).measures)


@needs_torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_cell_and_a_radius_are_constants():
    p, cell = problem(), 5 * torch.eye(3)
    with pytest.raises(ValueError, match="Lattice: cell requires grad; it is a constant"):
        Lattice(cell.clone().requires_grad_(), (4, 4, 4))
    atoms, radius = [tensor(array) for array in p.atoms], tensor(p.radius)
    for name, call, constant in (
        ("Lattice: cell", lambda cell: Lattice(cell, (4, 4, 4)), cell),
        ("density: cell", lambda cell: gaussian_density(*atoms, cell, p.shape), cell),
        ("density: radius", lambda r: gaussian_density(*atoms, p.lattice, radius=r), radius),
    ):
        message = f"{name} has a tangent; it is a constant"
        refused = functools.partial(pytest.raises, ValueError, match=message)
        with torch.autograd.forward_ad.dual_level(), refused():
            call(torch.autograd.forward_ad.make_dual(constant, constant))
        if "density" in name:
            with refused():
                torch.func.jvp(call, (constant,), (constant,))


# Wrong arguments that the generated tests don't try.


def test_a_radius_by_the_rule_has_a_positive_n_sigma():
    for wrong in (0, -1.0, math.nan, math.inf, "4", 10**400):
        with pytest.raises(ValueError, match=r"atom_radius: n_sigma is .*should be a "):
            atom_radius(np.ones(2), np.ones((2, 1)), n_sigma=wrong)


NO_GAUSSIANS = {"amplitudes": np.ones((4, 0)), "widths": np.ones((4, 0))}
OTHER = Lattice(np.eye(3), (4, 5, 6))
BAD = {
    "no Gaussians": (NO_GAUSSIANS, r"amplitudes has shape \(4, 0\); it should be \(4, G\), G > 0"),
    "no grid_shape": ({"grid_shape": None}, "grid_shape is None; it should be given, unless"),
    "a number beside a Lattice": (
        {"cell": OTHER, "grid_shape": 4},
        "grid_shape is a int; it should be three sizes",
    ),
    "radius NaN": ({"radius": math.nan}, r"radius\[0\] is nan; it should be finite"),
    "n_sigma of none": ({"n_sigma": 0}, "n_sigma is 0; it should be a positive number"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    p, (changes, message) = problem(), BAD[name]
    given = {**dict(zip(NAMES, p.atoms, strict=True)), "cell": p.cell, "grid_shape": p.shape}
    for function in (gaussian_density, gaussian_density.vjp, gaussian_density.explain):
        with pytest.raises((TypeError, ValueError), match=message):
            function(**{**given, **changes})


DTYPES = ("float32", "float64")


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=needs_torch)])
@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=4)), ids="-".join)
def test_the_map_has_the_dtype_to_which_its_arrays_promote(framework, dtypes):
    """Every gradient has its array's dtype, and the form factors' dtype changes neither."""
    p = problem()
    wide = np.result_type(*dtypes[:3])
    kinds = (*dtypes[:3], *dtypes[3:] * 3)
    arrays = [a.astype(k) for a, k in zip(p[:6], kinds, strict=True)]
    q = Problem(*arrays, *p[6:8], p.cotangent.astype(wide))
    out, *gradients = solve((framework, None), q, NAMES)
    assert out.dtype == wide
    # Constants are rounded to the dtype of the map.
    rounded = q.astype("float32" if wide == np.float32 else "float64")
    close(out, summed(rounded))
    want = solve(("numpy", "numpy"), q.astype("float64"), NAMES)[1:]
    for got, array, gradient in zip(gradients, q.atoms, want, strict=True):
        assert got.dtype == array.dtype
        # Form factors are rounded to the dtype of the map.
        close(got, gradient, "float32" if wide == np.float32 else None, terms=4000)


# Precision.


def test_sheared_cells_cost_no_digits(quick, anisotropic):
    """Far from right angles, vectors are small differences of many long steps."""
    cell = np.array([[6.0, 14.0, 0.0], [0.0, 6.0, -13.0], [0.0, 0.0, 6.0]])
    shape, rng = (3, 6, 1), np.random.default_rng(12577)
    arrays = list(atoms_in(cell, 2, rng, anisotropic=anisotropic))
    # A sharp atom, with large exponents; in one direction, the others being wide.
    arrays[1][1] -= 0.6 * np.eye(6)[0] if anisotropic else 41.0
    p = Problem(*arrays, np.full(2, 4.0), cell, shape, rng.normal(size=shape)).astype("float32")
    want = solve(("numpy", "numpy"), p.astype("float64"), on_bad="clamp")
    for got, expected in zip(solve(quick, p, on_bad="clamp"), want, strict=True):
        assert error(got, expected) < 1e-5
