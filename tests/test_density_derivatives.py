"""First and second derivatives of the density, by atoms and by form factors.

The oracle is a direct sum over atoms, images and voxels, which torch differentiates in float64.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from fusedops import Lattice, gaussian_density
from fusedops.samples import atoms_in
from fusedops.testing import TOLERANCE, error
from places import HAS_TORCH, available, interpreted, needs_torch, needs_triton

if HAS_TORCH:
    import torch

pytestmark = interpreted

NAMES = ("xyz", "b", "occupancy", "amplitudes", "widths")
CELLS = {
    "triclinic": ([[6.0, 2.0, -3.0], [0.0, 5.0, 2.0], [0.0, 0.0, 5.0]], (8, 7, 6), 2.1),
    "orthogonal": (np.diag([6.0, 7.0, 8.0]), (9, 10, 11), 2.3),
    "monoclinic": ([[6.0, 0.0, -2.0], [0.0, 7.0, 0.0], [0.0, 0.0, 6.0]], (9, 10, 8), 2.4),
    "of one voxel": ([[6.0, 2.0, -3.0], [0.0, 5.0, 2.0], [0.0, 0.0, 5.0]], (1, 1, 1), 7.0),
}


@pytest.fixture(params=[False, True], ids=["iso", "aniso"])
def anisotropic(request):
    return request.param


class Problem(NamedTuple):
    """Atoms, the tangents of their arrays, and a cotangent of their map."""

    atoms: tuple[np.ndarray, ...]
    tangents: tuple[np.ndarray, ...]
    radius: np.ndarray
    lattice: Lattice
    cotangent: np.ndarray

    def astype(self, dtype: str) -> Problem:
        one, other = ([a.astype(dtype) for a in arrays] for arrays in self[:2])
        return Problem(one, other, self.radius.astype(dtype), self.lattice, self[4].astype(dtype))


def problem(name="triclinic", count=3, gaussians=5, *, anisotropic=False, seed=0) -> Problem:
    """Return atoms of which one Gaussian has no electrons."""
    cell, shape, radius = CELLS[name]
    rng = np.random.default_rng(seed)
    *atoms, amplitudes, widths = atoms_in(np.array(cell), count, rng, anisotropic=anisotropic)
    columns = np.arange(gaussians) % 5
    amplitudes, widths = amplitudes[:, columns], widths[:, columns]
    if gaussians > 1:
        amplitudes[:1, 1] = 0
    atoms = [*atoms, amplitudes, widths]
    tangents = [rng.normal(size=a.shape) for a in atoms]
    if anisotropic:
        # U is about a fiftieth of B.
        tangents[1] *= 0.02
    radii = rng.uniform(0.7, 1.0, count) * radius
    return Problem(atoms, tangents, radii, Lattice(cell, shape), rng.normal(size=shape))


def direct(p: Problem) -> Any:
    """Return the density as a function of tensors, with the voxels of every atom held fixed."""
    step = torch.tensor(p.lattice.step)
    shape = torch.tensor(p.lattice.shape)
    start, radius = torch.from_numpy(p.atoms[0]), torch.from_numpy(p.radius)
    images = torch.tensor(list(itertools.product(range(-4, 5), repeat=3)))
    voxels = torch.cartesian_prod(*map(torch.arange, p.lattice.shape)).reshape(-1, 3)
    places = (voxels[:, None] + images * shape).double() @ step.T
    inside = (places - start[:, None, None]).norm(dim=-1) <= radius[:, None, None] * (1 + 5e-6)
    inside = [row.nonzero().T for row in inside]
    eye, rows = torch.eye(3).double(), torch.tensor([[0, 3, 4], [3, 1, 5], [4, 5, 2]])

    def function(xyz, b, occupancy, amplitudes, widths):
        rho = torch.zeros(len(voxels), dtype=torch.float64)
        for i, (voxel, image) in enumerate(inside):
            w = places[voxel, image] - xyz[i]
            U = b[i] / (8 * torch.pi**2) * eye if b.ndim == 1 else b[i][rows]
            for A, B in zip(amplitudes[i], widths[i], strict=True):
                M = (B * eye + 8 * torch.pi**2 * U) / 4
                q = torch.pi**2 * torch.einsum("vi,ij,vj->v", w, torch.linalg.inv(M), w)
                norm = occupancy[i] * A * torch.pi**1.5 / torch.linalg.det(M).sqrt()
                rho = rho.index_add(0, voxel, norm * torch.exp(-q))
        return rho.reshape(p.lattice.shape)

    return function


def function_of(p: Problem, backend: str | None = None, **options: Any) -> Any:
    radius = torch.from_numpy(p.radius)

    def function(*arrays):
        return gaussian_density(*arrays, p.lattice, radius=radius, backend=backend, **options)

    return function


def leaves_of(arrays: Any) -> list[Any]:
    return [torch.tensor(a, requires_grad=True) for a in arrays]


def first_of(p: Problem, function: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Return leaves, the cotangent, and the gradients."""
    leaves, cotangent = leaves_of(p.atoms), torch.tensor(p.cotangent, requires_grad=True)
    return leaves, cotangent, torch.autograd.grad(function(*leaves), leaves, cotangent, **options)


def second_of(p: Problem, function: Any, along: Any = NAMES, by: Any = NAMES) -> list[Any]:
    """Return the second derivatives along some of the tangents, and the derivative of the map."""
    leaves, cotangent, first = first_of(p, function, create_graph=True)
    chosen = [NAMES.index(name) for name in along]
    tangents = [torch.from_numpy(p.tangents[at]) for at in chosen]
    by = [*(leaves[NAMES.index(name)] for name in by), cotangent]
    chosen = [first[at] for at in chosen]
    found = torch.autograd.grad(chosen, by, tangents, allow_unused=True, materialize_grads=True)
    return [a.detach().numpy() for a in found]


@functools.cache
def wanted(of: Any, *given: Any, dtype: str = "float64", **options: Any) -> list[Any]:
    """Return derivatives of the direct sum, which all backends share."""
    p = problem(**options).astype(dtype).astype("float64")
    return of(p, direct(p), *given)


def near(got: Any, want: Any, dtype: str = "float64") -> None:
    """Compare with a reference; derivatives cancel, so that many roundings count."""
    for one, other in zip(got, want, strict=True):
        assert error(one, other) <= TOLERANCE[dtype] * 64


def gradients_of(p: Problem, function: Any) -> list[Any]:
    return [a.numpy() for a in first_of(p, function)[2]]


def gradients(place: Any, p: Problem, **options: Any) -> list[Any]:
    """Return the gradients by all five arrays."""
    if place[0] == "torch":
        return gradients_of(p, function_of(p, place[1], **options))
    _, pullback = gaussian_density.vjp(
        *p.atoms, p.lattice, radius=p.radius, wrt=NAMES, backend=place[1], **options
    )
    return list(pullback(p.cotangent))


@needs_torch
@pytest.mark.parametrize("gaussians", [1, 5, 7])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_a_direct_sum(quick, name, gaussians, anisotropic):
    options = {"name": name, "gaussians": gaussians, "anisotropic": anisotropic}
    for dtype in ("float64", "float32"):
        got = gradients(quick, problem(**options).astype(dtype))
        assert {a.dtype.name for a in got} == {dtype}
        near(got, wanted(gradients_of, dtype=dtype, **options), dtype)


@needs_triton
def test_gradients_when_interpreted(anisotropic):
    p = problem(count=2, gaussians=2, anisotropic=anisotropic)
    near(gradients(available("torch", "triton"), p), gradients(("numpy", "numpy"), p))


def test_gradients_are_what_differences_say(quick, anisotropic):
    p = problem("orthogonal", 2, anisotropic=anisotropic)
    # With this radius no voxel is near a sphere's surface.
    p = p._replace(radius=np.full(2, 1.9))
    for at, gradient in enumerate(gradients(quick, p)):
        want = np.zeros_like(gradient)
        for index in np.ndindex(gradient.shape):
            sides = []
            for step in (1e-5, -1e-5):
                arrays = [a.copy() for a in p.atoms]
                arrays[at][index] += step
                rho = gaussian_density(*arrays, p.lattice, radius=p.radius, backend="numpy")
                sides.append(np.vdot(p.cotangent, rho))
            want[index] = (sides[0] - sides[1]) / 2e-5
        # Differences err by the square of the step.
        assert error(gradient, want) < 1e-7


@needs_torch
@pytest.mark.parametrize("gaussians", [1, 5, 7])
@pytest.mark.parametrize("name", CELLS)
def test_second_derivatives_are_those_of_a_direct_sum(torch_backend, name, gaussians, anisotropic):
    options = {"name": name, "gaussians": gaussians, "anisotropic": anisotropic}
    p = problem(**options)
    near(second_of(p, function_of(p, torch_backend)), wanted(second_of, **options))


@needs_torch
@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_along_one_tangent(torch_backend, name, anisotropic):
    options = {"name": "monoclinic", "anisotropic": anisotropic}
    p = problem(**options)
    got = second_of(p, function_of(p, torch_backend), (name,))
    near(got, wanted(second_of, (name,), **options))


@needs_torch
@pytest.mark.parametrize("by", [NAMES[:3], NAMES[:1], NAMES[2:4], ()], ids=" ".join)
def test_second_derivatives_by_some_arrays(torch_backend, by, anisotropic):
    p = problem(anisotropic=anisotropic)
    along = NAMES[:3]
    got = second_of(p, function_of(p, torch_backend), along, by)
    near(got, wanted(second_of, along, by, anisotropic=anisotropic))


@needs_triton
@pytest.mark.parametrize("along", [NAMES[:3], NAMES], ids=["atoms", "all"])
def test_second_derivatives_when_interpreted(along, anisotropic):
    p = problem("monoclinic", 2, 2, anisotropic=anisotropic)
    got = second_of(p, function_of(p, available("torch", "triton")[1]), along, along)
    near(got, second_of(p, direct(p), along, along))


@needs_torch
def test_second_derivatives_in_float32(torch_backend, anisotropic):
    p = problem(anisotropic=anisotropic).astype("float32")
    got = second_of(p, function_of(p, torch_backend))
    assert {a.dtype.name for a in got} == {"float32"}
    want = wanted(second_of, dtype="float32", anisotropic=anisotropic)
    near(got, want, "float32")


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_derivatives_in_sixteen_bits(torch_backend, dtype, anisotropic):
    """Form factors keep the 32 bits of theirs, and so do their gradients."""
    p = problem(anisotropic=anisotropic).astype("float32")
    kind = getattr(torch, dtype)
    arrays = [torch.from_numpy(a) for a in p.atoms]
    arrays = [a.to(kind) if at < 3 else a for at, a in enumerate(arrays)]
    tangents = [torch.from_numpy(t).to(a.dtype) for t, a in zip(p.tangents, arrays, strict=True)]
    cotangent = torch.from_numpy(p.cotangent).to(kind)
    wide = Problem(
        tuple(a.double().numpy() for a in arrays),
        tuple(t.double().numpy() for t in tangents),
        p.radius.astype("float64"),
        p.lattice,
        cotangent.double().numpy(),
    )
    leaves = [a.requires_grad_() for a in arrays]
    rho = function_of(p, torch_backend)(*leaves)
    first = torch.autograd.grad(rho, leaves, cotangent, create_graph=True)
    second = torch.autograd.grad(first, leaves, tangents)
    for found, want in (
        (first, [a.detach().numpy() for a in first_of(wide, direct(wide))[2]]),
        (second, second_of(wide, direct(wide))[:-1]),
    ):
        assert [a.dtype for a in found] == [kind] * 3 + [torch.float32] * 2
        near([a.detach().double().numpy() for a in found], want, dtype)


@needs_torch
def test_third_derivatives_are_those_of_a_direct_sum(torch_backend, anisotropic):
    p, found = problem(count=2, gaussians=2, anisotropic=anisotropic), []
    for function in (function_of(p, torch_backend), direct(p)):
        leaves, cotangent, first = first_of(p, function, create_graph=True)
        tangents = [torch.tensor(t, requires_grad=True) for t in p.tangents]
        by = [*leaves, cotangent]
        second = torch.autograd.grad(first, by, tangents, create_graph=True)
        along = sum(a.sin().sum() for a in second)
        found.append([a.numpy() for a in torch.autograd.grad(along, [*by, *tangents])])
    near(*found)


@needs_torch
def test_gradcheck(torch_backend, anisotropic):
    p = problem("orthogonal", 1, 2, anisotropic=anisotropic)
    p = p._replace(radius=np.full(1, 1.9))
    function, leaves = function_of(p, torch_backend), leaves_of(p.atoms)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@needs_torch
@pytest.mark.parametrize("spoilt", NAMES)
def test_atoms_that_are_left_out_have_derivatives_of_zero(torch_backend, spoilt, anisotropic):
    p = problem(count=4, anisotropic=anisotropic)
    p.atoms[NAMES.index(spoilt)][1] = math.nan
    kept = np.arange(4) != 1
    fewer = Problem(
        [a[kept] for a in p.atoms], [t[kept] for t in p.tangents], p.radius[kept], *p[3:]
    )
    with pytest.warns(RuntimeWarning, match="1 of 4 atoms are left out"):
        *second, ddmap = second_of(p, function_of(p, torch_backend, on_bad="skip"))
    with pytest.warns(RuntimeWarning, match="1 of 4 atoms are left out"):
        first = gradients(("torch", torch_backend), p, on_bad="skip")
    *wanted, want = second_of(fewer, function_of(fewer, torch_backend))
    near([ddmap], [want])
    for found, others in (
        (second, wanted),
        (first, gradients(("torch", torch_backend), fewer)),
    ):
        for got, other in zip(found, others, strict=True):
            assert not got[1].any()
            near([got[kept]], [other])


def clamped(anisotropic):
    """Return a problem with Gaussians that are too sharp, in one direction or in all."""
    p = problem("orthogonal", 3, anisotropic=anisotropic)
    if anisotropic:
        p.atoms[1][:, :3] -= [[0.8, 0.1, 0.0], [0.8, 0.8, 0.0], [2.0, 2.0, 2.0]]
    else:
        p.atoms[1][:] = 0.2, -20.0, -99.0
    # With this radius no voxel is near a sphere's surface.
    return p._replace(radius=np.full(3, 1.9))


def test_gradients_of_raised_widths_are_what_differences_say(quick, anisotropic):
    p = clamped(anisotropic)

    def value(arrays):
        options = {"radius": p.radius, "on_bad": "clamp", "backend": "numpy"}
        return np.vdot(p.cotangent, gaussian_density(*arrays, p.lattice, **options))

    for at, gradient in enumerate(gradients(quick, p, on_bad="clamp")):
        want = np.zeros_like(gradient)
        for index in np.ndindex(gradient.shape):
            sides = []
            for step in (1e-5, -1e-5):
                arrays = [a.copy() for a in p.atoms]
                arrays[at][index] += step
                sides.append(value(arrays))
            want[index] = (sides[0] - sides[1]) / 2e-5
        # Differences err by the square of the step, and Gaussians of 0.4 Å² are sharp.
        assert error(gradient, want) < 1e-6


@needs_torch
def test_second_derivatives_of_raised_widths(torch_backend, anisotropic):
    p = clamped(anisotropic)
    function, leaves = function_of(p, torch_backend, on_bad="clamp"), leaves_of(p.atoms)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@needs_torch
def test_no_atoms_have_no_derivatives(any_torch_backend, anisotropic):
    p = problem(count=0, anisotropic=anisotropic)
    *found, ddmap = second_of(p, function_of(p, any_torch_backend))
    assert [a.shape for a in found] == [a.shape for a in p.atoms]
    assert not ddmap.any()


def test_the_pullback_returns_the_gradients_that_wrt_names():
    p = problem()
    arguments = {**dict(zip(NAMES, p.atoms, strict=True)), "cell": p.lattice, "radius": p.radius}
    every = dict(zip(NAMES, gradients(("numpy", None), p), strict=True))
    for wrt in (None, NAMES, ("widths",), ("occupancy", "xyz"), ()):
        _, pullback = gaussian_density.vjp(**arguments, wrt=wrt)
        found = pullback(p.cotangent)
        names = NAMES[:3] if wrt is None else [name for name in NAMES if name in wrt]
        for name, got in zip(names, found, strict=True):
            near([got], [every[name]])
    for wrong in ("xyz", ("xyz", "radius"), ("x",)):
        with pytest.raises(ValueError, match=r"density\.vjp: wrt is .*; it should be a sequence"):
            gaussian_density.vjp(**arguments, wrt=wrong)


def test_a_gradient_has_the_dtype_of_its_form_factors():
    p = problem().astype("float32")
    arrays = [*p.atoms[:4], p.atoms[4].astype("float64")]
    _, pullback = gaussian_density.vjp(*arrays, p.lattice, radius=p.radius, wrt=NAMES)
    found = pullback(p.cotangent)
    assert [a.dtype for a in found] == [a.dtype for a in arrays]


@needs_torch
@pytest.mark.parametrize("name", NAMES)
def test_maps_of_many_of_an_array(torch_backend, name):
    p, at = problem(count=2), NAMES.index(name)
    arrays = [torch.from_numpy(a) for a in p.atoms]
    many = torch.stack([arrays[at], 1.1 * arrays[at]])
    function = function_of(p, torch_backend, on_bad="skip")

    def of(array):
        return function(*(array if n == name else a for n, a in zip(NAMES, arrays, strict=True)))

    def gradient(array):
        return torch.func.grad(lambda array: of(array).square().sum())(array)

    for mapped in (of, gradient):
        for got, array in zip(torch.vmap(mapped)(many), many, strict=True):
            assert torch.equal(got, mapped(array))


@needs_torch
def test_the_rules_radius_names_the_array_that_is_mapped():
    p = problem(count=2)
    xyz, b, *others = (torch.from_numpy(a) for a in p.atoms)
    mapped = torch.stack([others[2]] * 2)
    message = "gaussian_density: widths is what torch.vmap maps over"
    with pytest.raises(TypeError, match=message):
        torch.vmap(
            lambda widths: gaussian_density(xyz, b, *others[:2], widths, p.lattice, on_bad="skip")
        )(mapped)


@needs_torch
def test_second_derivatives_may_be_mapped(torch_backend, anisotropic):
    """Each row of a Hessian is a product with a unit vector."""
    p = problem(count=2, anisotropic=anisotropic)
    function, cotangent = function_of(p, torch_backend, on_bad="skip"), torch.tensor(p.cotangent)
    arrays = [torch.from_numpy(a) for a in p.atoms]

    def gradient(xyz):
        return torch.func.grad(lambda x: (function(x, *arrays[1:]) * cotangent).sum())(xyz)

    hessian = torch.func.jacrev(gradient)(arrays[0]).reshape(6, 6)
    for row in range(6):
        tangent = np.eye(6)[row].reshape(2, 3)
        q = p._replace(tangents=[tangent, *p.tangents[1:]])
        near([hessian[row].numpy()], [second_of(q, direct(q), ["xyz"], ["xyz"])[0].ravel()])
