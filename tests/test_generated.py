"""Convolutions with generated kernels: their mathematics, their memory, and their own arguments."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import fusedops
from contract import EXAMPLES, compare, solve
from cpukern.generated import blocks as on_cpu
from fusedops.testing import error
from places import HAS_TORCH, available, interpreted, needs_torch, needs_triton

if HAS_TORCH:
    import torch

pytestmark = interpreted

#: Sequences that are empty, of one token, shorter than the kernel, and longer than a block.
PACKED = [0, 0, 1, 3, 3, 40, 70]


#: Convolutions of dense sequences, and of packed ones.
GENERATED = [example for example in EXAMPLES if example.op is fusedops.dynamic_conv_generated]


def problem(T=70, D=5, W=4, H=3, sequences=2, cu_seqlens=None):
    dense, packed = GENERATED
    if cu_seqlens is None:
        return dense.of((sequences, T, D, W, H))
    return packed.of((len(cu_seqlens) - 1, T, D, W, H)).but(cu_seqlens=np.array(cu_seqlens))


def sample(*sizes, **options):
    p = problem(*sizes, **options)
    return {name: p.arguments[name] for name in p.leaves}


def with_stored_kernels(x, hidden, weight, bias=0.0, conv_bias=None, **options):
    """Return the convolution with kernels that are stored, of which test_conv.py has a formula."""
    kernels = (np.einsum("bth,rh->btr", hidden, weight) + bias).reshape(*x.shape, -1)
    return fusedops.dynamic_conv(x, kernels, bias=conv_bias, **options, backend="numpy")


def test_the_formula():
    choices = {"activation": (None, "silu"), "output_final_state": (False, True)}
    compare(fusedops.dynamic_conv_generated, with_stored_kernels, **choices)


@pytest.mark.parametrize("cu_seqlens", [None, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("W", [1, 3, 19])
def test_blocks_of_tokens_change_nothing_but_roundings(exact, W, cu_seqlens, monkeypatch):
    """A kernel may be wider than a block, whose state then comes from several blocks before."""
    p = problem(70, 3, W, 4, cu_seqlens=cu_seqlens)
    whole = solve(("numpy", "numpy"), p)
    monkeypatch.setattr(on_cpu, "_FEW", 6)
    monkeypatch.setattr(on_cpu, "_CACHED", 6)
    for got, want in zip(solve(("numpy", exact), p), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * abs(want).max())


def test_kernels_are_never_stored(exact):
    """Neither forward nor backward needs half of the memory of kernels."""
    B, T, D, W, H = 1, 16_000, 64, 16, 4
    given = sample(T, D, W, H, sequences=B)
    stored = 8 * B * T * D * W
    op = fusedops.dynamic_conv_generated
    op.vjp(**sample(3, 2, 2, 2), backend=exact)[1](np.ones((2, 3, 2)))
    fusedops.set_num_threads(2)
    tracemalloc.start()
    try:
        out, pullback = op.vjp(**given, backend=exact)
        forward = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        pullback(np.ones_like(out))
        backward = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        fusedops.set_num_threads(None)
    assert 0 < forward < stored / 2
    assert backward < stored / 2


@needs_torch
@pytest.mark.parametrize("backend", ["cython", "torch", pytest.param("triton", marks=needs_triton)])
def test_mixed_dtypes_are_those_of_the_layer_and_the_convolution(backend):
    """As under autocast: a layer in bfloat16 whose kernels meet x in float32."""
    available("torch", backend)
    given = {n: torch.tensor(a, dtype=torch.float32) for n, a in sample(9).items()}
    narrow = {n: given[n].bfloat16() for n in ("hidden", "weight", "bias")}
    both = [
        fusedops.dynamic_conv_generated(**(given | narrow), backend=backend),
        fusedops.dynamic_conv_generated(
            **(given | {n: a.float() for n, a in narrow.items()}), backend="torch"
        ),
    ]
    assert both[0].dtype == torch.float32
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)


def twice(backend, given, **options):
    """Return second derivatives by all arrays."""
    leaves = list(given.values())
    out = fusedops.dynamic_conv_generated(**given, **options, backend=backend)
    first = torch.autograd.grad(out.double().sin().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(d.double().sin().sum() for d in first), leaves)


@needs_torch
@pytest.mark.parametrize("wide", ["x", "hidden", "weight", "conv_bias"])
def test_second_derivatives_of_mixed_dtypes(torch_backend, wide):
    given = {n: torch.tensor(a).float().double().requires_grad_() for n, a in sample(9).items()}
    mixed = {
        n: a.detach().to(a.dtype if n == wide else torch.float32).requires_grad_()
        for n, a in given.items()
    }
    for got, want, name in zip(
        twice(torch_backend, mixed, activation="silu"),
        twice("torch", given, activation="silu"),
        given,
        strict=True,
    ):
        assert got.dtype == mixed[name].dtype
        # Gradients of narrow arrays are rounded to float32, as are those of the first order.
        assert error(got.detach().numpy(), want.numpy()) < 1e-4


@needs_torch
@pytest.mark.parametrize("empty", [{"sequences": 0}, {"T": 0}], ids=["sequences", "tokens"])
def test_second_derivatives_without_tokens_are_zero(torch_backend, empty):
    given = {n: torch.tensor(a, requires_grad=True) for n, a in sample(**empty).items()}
    for got, array in zip(twice(torch_backend, given), given.values(), strict=True):
        assert got.shape == array.shape
        assert not got.any()


@needs_triton
@pytest.mark.parametrize("cu_seqlens", [None, [0, 0, 1, 3, 3, 20]], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_of_the_kernels_cotangents_change_nothing_but_roundings(
    cu_seqlens, dtype, monkeypatch
):
    from gpukern.generated import triton as generated

    kind = getattr(torch, dtype)
    given = {n: torch.tensor(a).to(kind) for n, a in sample(20, cu_seqlens=cu_seqlens).items()}
    found = []
    for parts, few in ((1, 0), (3, 0), (3, 1 << 20)):
        monkeypatch.setattr(generated, "_PARTS", parts)
        monkeypatch.setattr(generated, "_FEW", few)
        leaves = {name: a.clone().requires_grad_() for name, a in given.items()}
        sequences = None if cu_seqlens is None else fusedops.Sequences(cu_seqlens)
        out = fusedops.dynamic_conv_generated(**leaves, cu_seqlens=sequences, backend="triton")
        found.append(torch.autograd.grad(out.float().sin().sum(), list(leaves.values())))
    for gradients in found[1:]:
        for got, want in zip(gradients, found[0], strict=True):
            # Sums over tokens have other parts.
            unit = max(torch.finfo(kind).eps, 4 * torch.finfo(torch.float32).eps)
            assert (got - want).abs().max() <= unit * want.abs().max()


@needs_triton
def test_wide_kernels_and_float64_are_stored_on_a_gpu(monkeypatch):
    from gpukern.generated import triton as generated

    monkeypatch.setattr(generated, "_Call", None)
    given = {n: torch.tensor(a) for n, a in sample(9).items()}
    wide = {n: torch.tensor(a, dtype=torch.float32) for n, a in sample(9, 2, 17).items()}
    for arrays in (given, wide):
        got, want = (
            fusedops.dynamic_conv_generated(**arrays, backend=name) for name in ("triton", "numpy")
        )
        assert error(got.numpy(), want.numpy()) < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.ones((11, 3))}, r"weight has shape \(11, 3\); it should be \(5 \* W, 3\)"),
        ({"weight": np.ones((0, 3))}, r"weight has shape \(0, 3\); .*W > 0"),
        ({"x": np.ones((2, 70, 0))}, r"x has shape \(2, 70, 0\); .*D > 0"),
    ],
    ids=["rows", "no taps", "no channels"],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=f"dynamic_conv_generated: {message}"):
        fusedops.dynamic_conv_generated(**(sample() | change))


@needs_triton
def test_a_thread_of_hopper_finds_all_taps_of_eight_channels():
    """In a product, threads j of four have columns 8 i + 2 j and 8 i + 2 j + 1."""
    from fusedops.generated.op import generated
    from gpukern.generated.triton import _Call

    D, W, H = 128, 4, 3
    rows = torch.arange(float(D * W))
    x, hidden = torch.zeros(1, 1, D), torch.zeros(1, 1, H)
    a = generated.Arguments(x, hidden, rows[:, None].repeat(1, H), rows, None, None, None, "none")
    call = _Call(a)
    call.order(True, True)
    packed = call.packed_bias.view(D // 32, W, 4, 4, 2)
    for j in range(4):
        channels = packed[:, :, :, j].reshape(D // 32, W, 8) // W
        first = 32 * torch.arange(D // 32) + 8 * j
        assert (channels == (first[:, None] + torch.arange(8))[:, None]).all()
    assert (packed % W == torch.arange(W)[:, None, None, None]).all()
    assert (call.packed == call.packed_bias[:, None]).all()
    assert (call.by_tap == rows.view(D, W).T.reshape(-1, 1)).all()
