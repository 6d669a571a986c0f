"""Triangle attention: its mathematics, and its own arguments."""

from __future__ import annotations

import numpy as np
import pytest

import fusedops
from contract import EXAMPLES, compare, derivatives, evaluate, leaves_of, same, solve
from fusedops import triangle_attention
from fusedops._catalogue import Problem
from fusedops.attention import op
from fusedops.attention.examples import present, rows
from fusedops.testing import CASES, check, error
from places import HAS_TORCH, interpreted, needs_torch, needs_triton

if HAS_TORCH:
    import torch

#: The op and its leaves.
(PLAIN,) = (example for example in EXAMPLES if example.name == "attention")


def plain(q, k, v, bias, mask=None, scale=None):
    """Return attention by einsum, with logits of all rows."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * np.einsum("bnqhd,bnkhd->bnhqk", q, k) + bias[:, None]
    if mask is not None:
        logits = np.where(mask[:, :, None, None], logits, -1e9)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnhqk,bnkhd->bnqhd", shares / shares.sum(-1, keepdims=True), v)


def test_the_reference_is_the_formula():
    compare(triangle_attention, plain, [(1, 1, 1, 1, 1, 1), (2, 3, 5, 40, 1, 16)])


def problem(*shape, mask=None):
    """Return attention with random cotangents, whose arrays a test may change."""
    dout = np.random.default_rng(1).normal(size=(*shape[:3], *shape[4:]))
    return Problem(PLAIN, {**rows(np.random.default_rng(0), *shape), "mask": mask}, (dout,))


def expected(p):
    """Return the reference of float64, and gradients."""
    return solve(("numpy", "numpy"), p.astype("float64"))


def test_any_number_that_is_not_zero_is_a_key(backend):
    p = problem(2, 3, 4, 6, 2, 3, mask=present(np.random.default_rng(1), 2, 3, 6))
    mask, place = p.arguments["mask"], ("numpy", backend)
    for kind, value in (("i4", -3), ("f4", 1e-30), ("u1", 255), ("f8", 0.5)):
        other = mask.astype(kind) * np.array(value, kind)
        same(evaluate(place, p.but(mask=other)), evaluate(place, p))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_without_keys_has_the_mean_of_its_values(backend, dtype):
    """Its other gradients are zero, and values of missing keys have none in other rows."""
    mask = np.ones((1, 3, 300), bool)
    mask[0, 1] = mask[0, 2, 7:] = False
    p = problem(1, 3, 5, 300, 2, 4, mask=mask).astype(dtype)
    out, dq, dk, dv, _ = solve(("numpy", backend), p)
    mean = p.arguments["v"][0, 1].mean(0)
    assert error(out[0, 1], np.broadcast_to(mean, out[0, 1].shape)) < 1e-5
    assert not dq[0, 1].any()
    assert not dk[0, 1].any()
    assert not dk[0, 2, 7:].any()
    assert not dv[0, 2, 7:].any()
    each = p.cotangents[0][0, 1].sum(0) / 300
    assert error(dv[0, 1], np.broadcast_to(each, dv[0, 1].shape)) < 1e-5


def test_logits_may_be_far_from_zero(backend):
    """Also by blocks: the largest is in the first, in the last, or beside keys at -∞."""
    p = problem(1, 2, 3, 600, 1, 4)
    bias = p.arguments["bias"]
    bias += 700.0
    bias[..., 0, 5] += 900.0
    bias[..., 1, 590] += 900.0
    bias[..., 2, :280] = -np.inf
    found = solve(("numpy", backend), p)
    for got, want in zip(found, expected(p), strict=True):
        assert error(got, want) < (1e-11 if got is found[0] else 1e-9)
    np.testing.assert_allclose(found[0][:, :, 0], p.arguments["v"][:, :, 5])


@interpreted
@pytest.mark.interpreted_slow(dtype="float32")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_masks_by_a_large_bias(place, dtype, masked):
    """All keys of a query have the same bias, beside which the denominator's logarithm is lost."""
    mask = np.ones((1, 3, 300), bool)
    mask[0, 1] = mask[0, 2, 40:] = False
    p = problem(1, 3, 6, 300, 1, 4, mask=mask if masked else None).astype(dtype)
    p.arguments["q"][:, :, :5] = 0
    for query, value in enumerate((-1e9, -1000001000.0, -2e38, np.finfo(dtype).min, 1e30)):
        p.arguments["bias"][..., query, :] = value
    for got, want in zip(solve(place, p), expected(p), strict=True):
        assert error(got, want) < 2e-5


@pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_query_of_which_all_logits_are_infinite_has_no_softmax(place, dtype):
    """Its output and its derivatives are NaN, as the definition's; -∞ beside the lowest is none."""
    mask = np.ones((1, 3, 70), bool)
    mask[0, 1, 50:] = mask[0, 2] = False
    p = problem(1, 3, 4, 70, 2, 4, mask=mask).astype(dtype)
    bias = p.arguments["bias"]
    bias[..., 1, 0, :] = bias[..., 0, 1, 40:] = -np.inf
    bias[..., 0, 1, :40] = np.finfo(dtype).min
    want = expected(p)
    assert np.isnan(want[0][0, 0, 0, 1]).all()
    for got, wanted in zip(solve(place, p), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_nan_stays_in_its_row_and_query(backend):
    p = problem(1, 3, 4, 20, 2, 4).astype("float32")
    p.arguments["q"][0, 1, 2, 0, 3] = np.nan
    missing = np.isnan(evaluate(("numpy", backend), p)[0])
    assert missing[0, 1, 2, 0].all()
    assert missing.sum() == 4


def test_missing_keys_may_hold_anything(backend):
    """Padding may be NaN in keys: its logits are replaced, not multiplied by zero."""
    mask = np.ones((1, 3, 20), bool)
    mask[0, :, 15:] = False
    p = problem(1, 3, 4, 20, 2, 4, mask=mask)
    want = evaluate(("numpy", backend), p)
    p.arguments["k"][0, :, 15:] = np.nan
    same(evaluate(("numpy", backend), p), want)


def test_the_definition_takes_rows_in_parts(monkeypatch):
    """Derivatives of second order too, with an array of one part's logits at a time."""
    p, found = problem(2, 5, 4, 6, 2, 3), []
    for memory in (2**28, 1):
        monkeypatch.setattr(op, "_MEMORY", memory)
        found.append(expected(p) + (derivatives(p, "torch", 2) if HAS_TORCH else []))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@needs_torch
def test_cotangents_of_the_denominator():
    """Direct calls of the primitive differentiate its second output too."""
    leaves = leaves_of(problem(1, 2, 3, 4, 2, 3))
    mask = torch.tensor(present(np.random.default_rng(0), 1, 2, 4))
    assert torch.autograd.gradcheck(
        lambda *arrays: tuple(op.attention(*arrays, mask, 0.7)), leaves, fast_mode=True
    )


@needs_torch
def test_masks_of_a_batch():
    """Under torch.vmap each call has its own mask; gradients too."""
    q, bias = torch.randn(3, 1, 2, 4, 1, 3).double(), torch.randn(1, 1, 4, 4).double()
    masks = torch.rand(3, 1, 2, 4) > 0.4

    def loss(q, mask):
        return fusedops.triangle_attention(q, q, q, bias, mask).sin().sum()

    for function in (loss, torch.func.grad(loss)):
        want = torch.stack([function(*each) for each in zip(q, masks, strict=True)])
        torch.testing.assert_close(torch.vmap(function)(q, masks), want)
        torch.testing.assert_close(torch.vmap(function)(q, masks.double()), want)
        alone = torch.stack([function(q[0], mask) for mask in masks])
        got = torch.vmap(function, (None, -1))(q[0], masks.movedim(0, -1))
        torch.testing.assert_close(got, alone)
        assert len(torch.vmap(function)(q[:0], masks[:0])) == 0


@needs_torch
def test_a_mask_has_no_gradient():
    mask = torch.ones(1, 2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="triangle_attention: mask requires grad; it is a const"):
        triangle_attention(*leaves_of(problem(1, 2, 3, 4, 2, 3)), mask=mask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": np.inf}, "scale is inf; it should be a finite number"),
        ({"k": np.ones((1, 2, 0, 2, 3))}, r"k has shape .*, K > 0"),
        ({"q": np.ones((2, 3, 2, 3))}, r"q has shape .*\(B, N, Q, H, D\), D > 0"),
        ({"bias": np.ones((1, 2, 4, 3))}, r"bias has shape .*be \(1, 2, 3, 4\)"),
        ({"mask": np.ones((1, 2, 3))}, r"mask has shape .*be \(1, 2, 4\)"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    """The contract and test_errors.py try others."""
    with pytest.raises(ValueError, match=f"triangle_attention: {message}"):
        triangle_attention(**problem(1, 2, 3, 4, 2, 3).arguments | changes)


def test_the_bias_of_many_threads_has_the_same_bits(exact, several_threads):
    """Also of more rows than there are sums, and of fewer."""
    for size in ((1, 45, 5, 7, 1, 3), (2, 3, 5, 7, 2, 3)):
        found = []
        for threads in (1, 3):
            fusedops.set_num_threads(threads)
            several_threads.clear()
            try:
                found.append(solve(("numpy", exact), problem(*size))[4])
            finally:
                fusedops.set_num_threads(None)
            assert set(several_threads) == {threads}
        same(*found)


@pytest.fixture
def halved(monkeypatch):
    """Have products of any size be made of halves, in Triton's interpreter."""
    from gpukern.attention import triton as kernels
    from gpukern.precision import EMULATED

    monkeypatch.setattr(kernels, "of_float32", lambda device: EMULATED)
    monkeypatch.setattr(kernels, "_LEAST", 0)
    return kernels


@needs_triton
@interpreted
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.primitive.family == "attention"], ids=str
)
def test_products_of_halves_agree_with_the_reference(case, halved):
    check(case, "torch", "triton", "float32", alone=False)


#: Parts of arrays, with a factor and a summand.
CHANGES = {
    "none": [],
    "queries of one key": [
        ("bias", np.s_[:, :, :20, 1:], 1, -60),
        ("dout", np.s_[:, :, :20], 100, 0),
    ],
    "large logits": [("q", ..., 12, 0)],
    "values apart from zero": [("v", ..., 1, 5)],
    "small": [
        ("q", ..., 1e-6, 0),
        ("k", ..., 1e-3, 0),
        ("v", ..., 1e-10, 0),
        ("dout", ..., 1e-9, 0),
    ],
    "zeros": [
        *((name, np.s_[:, row], 0, 0) for name, row in (("q", 0), ("k", 1))),
        *((name, np.s_[:, :, ::step], 0, 0) for name, step in (("v", 5), ("dout", 3))),
    ],
    "cotangents of three decades": [
        ("dout", ..., 10 ** np.random.default_rng(2).uniform(-3, 0, (1, 3, 40, 2, 1)), 0)
    ],
}


@needs_triton
@interpreted
@pytest.mark.parametrize("change", CHANGES)
def test_halves_err_at_most_twice_as_much_as_float32(change, halved):
    """In norm; float32's own error is that of torch, or its unit."""
    p = problem(1, 3, 40, 70, 2, 16)
    arrays = p.arguments | {"dout": p.cotangents[0]}
    for name, part, factor, summand in CHANGES[change]:
        arrays[name][part] = arrays[name][part] * factor + summand
    mask = present(np.random.default_rng(3), 1, 3, 70) if change == "none" else None
    p = p.but(mask=mask).astype("float32")
    given = *leaves_of(p), None if mask is None else torch.tensor(mask), 1.0
    call = halved._Call(op.attention.Arguments(*given), torch.tensor(p.cotangents[0]))
    assert call.scales.all(), "halves serve all heads"
    found, by_torch = (solve(("torch", name), p) for name in ("triton", "torch"))
    for at, (ours, plain, exact) in enumerate(zip(found, by_torch, expected(p), strict=True)):
        off, own = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (ours, plain))
        # A dq near zero has larger errors, as docs/backends.md says.
        least = 5e-4 if change == "queries of one key" and at == 1 else 2.0**-23
        assert off <= 2 * max(own, least), (off, own)


NUMBERS = {
    "Inf": np.inf,
    "-Inf": -np.inf,
    "NaN": np.nan,
    "huge": 1e12,
    "tiny": 1e-30,
}


@needs_triton
@interpreted
@pytest.mark.parametrize("number", NUMBERS)
def test_heads_that_halves_do_not_serve(number, halved, monkeypatch):
    """A number that halves don't hold beside others leaves its head to products of float32."""
    for name in ("q", "k", "v", "dout"):
        p = problem(1, 3, 17, 40, 2, 16).astype("float32")
        vector = (p.arguments | {"dout": p.cotangents[0]})[name][0, 1, 3, 1]
        vector[slice(None) if number == "tiny" else 5] = NUMBERS[number]
        found = solve(("torch", "triton"), p)
        with monkeypatch.context() as patch:
            patch.setattr(halved, "of_float32", lambda device: "ieee")
            want = solve(("torch", "triton"), p)
        if name != "dout":
            # The head's own results are those of float32, which all others resemble.
            for ours, plain in zip(found[:-1], want[:-1], strict=True):
                same(ours[0, 1, :, 1], plain[0, 1, :, 1])
        for ours, plain in zip(found, want, strict=True):
            scale = np.abs(np.nan_to_num(plain, posinf=0, neginf=0)).max()
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "of_value", "of_gradient"),
    [
        ("float32", 2e-6, 2e-6),
        ("halves", 2e-6, 2e-6),
        ("float16", 1e-3, 2e-3),
        ("bfloat16", 8e-3, 1.2e-2),
    ],
)
@pytest.mark.parametrize(
    ("shape", "ending"),
    [
        ((2, 7, 200, 264, 2, 32), False),
        ((1, 6, 136, 136, 4, 32), True),
        ((1, 3, 75, 333, 1, 24), False),
        ((1, 3, 70, 90, 2, 128), True),
    ],
)
def test_blocks_of_a_gpu(shape, ending, dtype, of_value, of_gradient, monkeypatch):
    """Rows that end early, have holes, or no key, beside NumPy in float64."""
    rng, scale = np.random.default_rng(0), None
    if dtype == "halves":
        from gpukern.attention import triton as kernels

        monkeypatch.setattr(kernels, "_LEAST", 0)
        # Another scale makes another kind of call, whose plan isn't there.
        dtype, scale = "float32", 0.25
    B, N, _, K, _, _ = shape
    mask = np.arange(K) < rng.integers(K // 3, K, (B, N, 1))
    mask[:, 1] = rng.uniform(size=(B, K)) < 0.7
    mask[:, 2] = False
    kind = getattr(torch, dtype)
    leaves = {}
    for name, x in rows(rng, *shape, ending=ending).items():
        # Around ending nodes, views of columns.
        whole = torch.tensor(x.swapaxes(1, 2).copy() if ending and x.ndim == 5 else x)
        whole = whole.to("cuda", kind)
        leaves[name] = (whole.transpose(1, 2) if whole.ndim == 5 and ending else whole).detach()
        leaves[name].requires_grad_()
    out = triangle_attention(**leaves, mask=torch.tensor(mask).cuda(), scale=scale)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, tuple(leaves.values()), dout)
    exact = {name: x.detach().double().cpu().numpy() for name, x in leaves.items()}
    value, pullback = triangle_attention.vjp(**exact, mask=mask, scale=scale)
    assert error(out.detach().double().cpu().numpy(), value) < of_value
    for one, want in zip(got, pullback(dout.double().cpu().numpy()), strict=True):
        off = one.double().cpu().numpy() - want
        assert np.linalg.norm(off) < of_gradient * np.linalg.norm(want)
