"""Layers of networks: kernels beside the formulas, and these beside torch's functions."""

import numpy as np
import pytest

from fusedops import use_backend
from fusedops._catalogue import Case
from fusedops._networks import (
    degree_norm,
    degree_norm_vjp,
    layer_silu,
    layer_silu_vjp,
    row_linear,
    row_linear_vjp,
)
from fusedops.testing import check, error
from places import interpreted, needs_torch, needs_triton

pytestmark = interpreted


def cases():
    def add(name, primitive, *shapes, static):
        def make():
            rng = np.random.default_rng(0)
            return tuple(shape and rng.normal(size=shape) for shape in shapes), static

        found.append(Case(name, primitive, make))

    found = []
    for E, C in ((37, 24), (300, 128), (3, 130), (2, 12), (0, 5)):
        arrays = (E, C), (C,), (C,)
        add(f"{E}-{C}", layer_silu, *arrays, static=(1e-5,))
        add(f"{E}-{C}", layer_silu_vjp, *arrays, (E, C), static=(1e-5,))
    for N, lmax, C in ((5, 2, 24), (3, 0, 5), (2, 3, 130), (4, 6, 8), (0, 1, 3)):
        x, weight = (N, (lmax + 1) ** 2, C), (lmax + 1, C)
        static = np.linspace(0.1, 0.2, (lmax + 1) ** 2), lmax, 1e-5
        for more in (None, (N, C)):
            name = f"{N}-{lmax}-{C}{'-more' * bool(more)}"
            add(name, degree_norm, x, weight, (C,), more, static=static)
        add(f"{N}-{lmax}-{C}", degree_norm_vjp, x, weight, x, static=static)
    for N, M, H, C, G in ((7, 4, 6, 10, 12), (3, 1, 5, 2, 0), (40, 9, 16, 8, 8), (0, 4, 3, 3, 3)):
        out, weight, gates = (N, M, H), (M, H, C), (G, C) if G else None
        for bias in (True, False):
            shapes = (H,) if bias else None, gates, (G,) if G and bias else None
            name = f"{N}-{M}-{G}{'-bias' * bias}"
            add(name, row_linear, (N, M, C), weight, *shapes, static=())
        add(f"{N}-{M}-{G}", row_linear_vjp, weight, gates, out, (N, G) if G else None, static=())
        if G:
            add(f"{N}-{M}-gates", row_linear_vjp, weight, gates, None, (N, G), static=())
    return found


CASES = cases()
#: Optional arrays that the first case of a primitive lacks.
EMPTY = {layer_silu: 0, degree_norm: 1, row_linear: 0}


@needs_torch
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_and_formulas(case, backend, dtype):
    check(case, "torch", backend, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_a_gpu(case, dtype):
    check(case, "torch", "triton", dtype, "cuda")


def given(case):
    """Return tensors in float64 for a case, without arrays that are left out, and its rest."""
    import torch

    arrays, static = case.make()
    static = [torch.tensor(s) if isinstance(s, np.ndarray) else s for s in static]
    return [torch.tensor(a) for a in arrays if a is not None], static


@needs_torch
def test_silu_of_normalized_rows_is_torchs():
    import torch

    (x, weight, bias), (eps,) = given(CASES[0])
    h = torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, eps)
    expected = torch.nn.functional.silu(h)
    assert error(layer_silu(x, weight, bias, eps).out, expected) < 1e-14


@needs_torch
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("primitive", [layer_silu, degree_norm, row_linear], ids=lambda p: p.name)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_derivatives(primitive, backend):
    """By all arrays, of first and second order, forward and backward."""
    import torch

    own = [case for case in CASES if case.primitive is primitive]
    arrays, static = given(next(case for case in own if all(a is not None for a in case.make()[0])))
    arrays = [a.requires_grad_() for a in arrays]

    def function(*arrays):
        with use_backend(backend):
            return [out for out in primitive(*arrays, *static) if out is not None]

    options = {"fast_mode": True}
    assert torch.autograd.gradcheck(function, arrays, check_forward_ad=True, **options)
    assert torch.autograd.gradgradcheck(function, arrays, **options)
    # Where no weight has a gradient, the gradient is a kernel's.
    names = zip(primitive.arrays, arrays, strict=True)
    features = [a if name in ("x", "more") else a.detach() for name, a in names]
    assert torch.autograd.gradcheck(function, features, check_forward_ad=True, **options)
    assert torch.autograd.gradgradcheck(function, features, **options)


@needs_triton
@pytest.mark.parametrize(
    "primitive", [layer_silu_vjp, degree_norm_vjp, row_linear_vjp], ids=lambda p: p.name
)
def test_rows_are_read_where_they_lie(primitive):
    import torch

    arrays, static = given(next(case for case in CASES if case.primitive is primitive))
    expected = primitive(*arrays, *static).dx

    def spread(a):
        wide = torch.full((a.shape[0], 2, *a.shape[1:]), torch.nan, dtype=a.dtype)
        wide[:, 1] = a
        return wide[:, 1]

    with use_backend("triton"):
        found = primitive(*[spread(a) for a in arrays], *static).dx
        columns = primitive(*[a.mT.contiguous().mT if a.ndim > 1 else a for a in arrays], *static)
    assert error(found, expected) < 1e-13
    assert error(columns.dx, expected) < 1e-13


@needs_torch
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("primitive", [layer_silu, degree_norm, row_linear], ids=lambda p: p.name)
def test_features_of_fewer_bits_than_weights(primitive, backend):
    import torch

    (x, *weights), static = given(next(case for case in CASES if case.primitive is primitive))
    expected = primitive(x.bfloat16().double(), *weights, *[None] * EMPTY[primitive], *static).out
    x = x.bfloat16().requires_grad_()
    weights = [weight.float() for weight in weights]
    with use_backend(backend):
        found = primitive(x, *weights, *[None] * EMPTY[primitive], *static).out
        found.double().square().sum().backward()
    assert error(found.detach().double(), expected) < 0.01
    assert x.grad.dtype == torch.bfloat16
