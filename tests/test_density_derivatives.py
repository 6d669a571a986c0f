"""First and second derivatives of the density, by atoms and by form factors, as direct sums say."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from contract import tensor
from densities import (
    CELLS,
    NAMES,
    all_close,
    direct,
    function_of,
    leaves_of,
    problem,
    solve,
    too_sharp,
)
from fusedops import gaussian_density
from places import HAS_TORCH, interpreted, needs_torch

if HAS_TORCH:
    import torch

pytestmark = interpreted

#: Cells and numbers of Gaussians; kernels take Gaussians by fours.
ATOMS = [*((name, 5) for name in CELLS), ("triclinic", 1), ("triclinic", 7)]
atoms = pytest.mark.parametrize(("name", "gaussians"), ATOMS)


def terms_of(name):
    """Return the number of roundings, many where vectors are differences of long edges."""
    return 4000 * (64 if name == "very skewed" else 1)


@needs_torch
@atoms
def test_gradients_are_those_of_a_direct_sum(quick, name, gaussians, anisotropic):
    for dtype in ("float64", "float32"):
        p = problem(name, 4, gaussians, anisotropic=anisotropic, dtype=dtype)
        want = direct_gradients(name, gaussians, anisotropic, dtype)
        for names in (NAMES, NAMES[:3]):
            gradients = solve(quick, p, names)[1:]
            assert {a.dtype.name for a in gradients} == {dtype}
            all_close(gradients[:3], want[:3], terms=terms_of(name))
            all_close(gradients[3:], want[3 : len(names)], terms=64 * 4000)


@functools.cache
def direct_gradients(name, gaussians, anisotropic, dtype):
    p = problem(name, 4, gaussians, anisotropic=anisotropic, dtype=dtype).astype("float64")
    leaves = leaves_of(p, NAMES)
    found = torch.autograd.grad(direct(p)(*leaves), leaves, tensor(p.cotangent))
    return [a.numpy() for a in found]


def tangents_of(p, anisotropic):
    """Return tangents of all arrays; U is about a fiftieth of B."""
    rng = np.random.default_rng(1)
    scales = 1, 0.02 if anisotropic else 1, 1, 1, 1
    return [s * rng.normal(size=a.shape) for s, a in zip(scales, p.atoms, strict=True)]


def second_of(p, function, tangents, along=NAMES, by=NAMES):
    """Return the second derivatives along some of the tangents, and the derivative of the map."""
    leaves, cotangent = leaves_of(p, NAMES), tensor(p.cotangent.copy()).requires_grad_()
    first = torch.autograd.grad(function(*leaves), leaves, cotangent, create_graph=True)
    chosen = [NAMES.index(name) for name in along]
    found = torch.autograd.grad(
        [first[at] for at in chosen],
        [*(leaves[NAMES.index(name)] for name in by), cotangent],
        [tensor(tangents[at]) for at in chosen],
        allow_unused=True,
        materialize_grads=True,
    )
    return [a.detach().numpy() for a in found]


@functools.cache
def direct_second(name, gaussians, anisotropic, along=NAMES, by=NAMES):
    p = problem(name, 3, gaussians, anisotropic=anisotropic)
    return second_of(p, direct(p), tangents_of(p, anisotropic), along, by)


@needs_torch
@atoms
def test_second_derivatives_are_those_of_a_direct_sum(torch_backend, name, gaussians, anisotropic):
    p = problem(name, 3, gaussians, anisotropic=anisotropic)
    got = second_of(p, function_of(p, torch_backend), tangents_of(p, anisotropic))
    all_close(got, direct_second(name, gaussians, anisotropic), terms=64 * 4000)


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_form_factors_beside_sixteen_bits_keep_theirs(dtype, anisotropic):
    """And so do their gradients, of both orders."""
    p = problem(count=3, anisotropic=anisotropic, dtype="float32")
    kind = getattr(torch, dtype)
    arrays = [tensor(a).to(kind if at < 3 else torch.float32) for at, a in enumerate(p.atoms)]
    tangents = [
        tensor(t).to(a.dtype) for t, a in zip(tangents_of(p, anisotropic), arrays, strict=True)
    ]
    cotangent = tensor(p.cotangent).to(kind)
    rounded = [a.double().numpy() for a in arrays]
    wide = p.astype("float64")._replace(
        **dict(zip(NAMES, rounded, strict=True)), cotangent=cotangent.double().numpy()
    )
    leaves = [a.requires_grad_() for a in arrays]
    first = torch.autograd.grad(function_of(p)(*leaves), leaves, cotangent, create_graph=True)
    second = torch.autograd.grad(first, leaves, tangents)
    wanted = solve(("numpy", "numpy"), wide, NAMES)[1:]
    twice = second_of(wide, direct(wide), [t.double().numpy() for t in tangents])[:-1]
    for found, want in ((first, wanted), (second, twice)):
        assert [a.dtype for a in found] == [kind] * 3 + [torch.float32] * 2
        all_close([a.detach().double().numpy() for a in found], want, dtype, terms=64 * 4000)


@needs_torch
def test_atoms_that_are_left_out_have_derivatives_of_zero(torch_backend, anisotropic):
    """Each of five atoms has a number that isn't finite in another array."""
    p = problem(count=10, anisotropic=anisotropic)
    for at, name in enumerate(NAMES):
        getattr(p, name)[2 * at] = math.nan
    tangents, fewer = tangents_of(p, anisotropic), p.of(slice(1, None, 2))
    kept = [tangent[1::2] for tangent in tangents]
    with pytest.warns(RuntimeWarning, match="5 of 10 atoms are left out"):
        *found, ddmap = second_of(p, function_of(p, torch_backend, on_bad="skip"), tangents)
    *want, ddmap_of_fewer = second_of(fewer, function_of(fewer, torch_backend), kept)
    assert not any(array[::2].any() for array in found)
    all_close([*(array[1::2] for array in found), ddmap], [*want, ddmap_of_fewer])


def clamped(anisotropic):
    # With this radius no voxel is near a sphere's surface.
    return too_sharp("orthogonal", anisotropic=anisotropic)._replace(radius=np.full(5, 1.9))


@needs_torch
def test_derivatives_of_raised_widths(torch_backend, anisotropic):
    p = clamped(anisotropic)
    function, leaves = function_of(p, torch_backend, on_bad="clamp"), leaves_of(p, NAMES)
    # Of a clamped isotropic Gaussian the width is constant.
    (db,) = torch.autograd.grad(function(*leaves).square().sum(), leaves[1])
    assert not db[2].any()
    assert db[0].any()
    assert torch.autograd.gradcheck(function, leaves, atol=1e-6, rtol=1e-5, fast_mode=True)
    few = p.of(slice(3))
    function = function_of(few, torch_backend, on_bad="clamp")
    assert torch.autograd.gradgradcheck(function, leaves_of(few, NAMES), fast_mode=True)


def test_the_pullback_returns_the_gradients_that_wrt_names():
    p = problem()
    given = {**dict(zip(NAMES, p.atoms, strict=True)), "cell": p.lattice, "radius": p.radius}
    every = dict(zip(NAMES, solve(("numpy", None), p, NAMES)[1:], strict=True))
    for wrt in (None, NAMES, ("widths",), ("occupancy", "xyz"), ()):
        _, pullback = gaussian_density.vjp(**given, wrt=wrt)
        names = NAMES[:3] if wrt is None else [name for name in NAMES if name in wrt]
        all_close(pullback(p.cotangent), [every[name] for name in names])
    for wrong in ("xyz", ("xyz", "radius"), ("x",), iter(NAMES), 5):
        with pytest.raises(ValueError, match=r"density\.vjp: wrt is .*; it should be a sequence"):
            gaussian_density.vjp(**given, wrt=wrong)


@needs_torch
def test_the_rules_radius_names_the_array_that_is_mapped():
    p = problem(count=2)
    *arrays, widths = map(tensor, p.atoms)
    message = "gaussian_density: widths is what torch.vmap maps over"
    with pytest.raises(TypeError, match=message):
        torch.vmap(lambda widths: gaussian_density(*arrays, widths, p.lattice, on_bad="skip"))(
            torch.stack([widths] * 2)
        )
