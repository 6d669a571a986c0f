"""The triangle multiplicative update: its formula, its options, and what kernels may touch.

The matrix and the contract compare kernels, derivatives, transforms and layouts with the reference.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings

import numpy as np
import pytest

from contract import (
    EXAMPLES,
    all_agree,
    as_framework,
    close,
    evaluate,
    function_of,
    leaves_of,
    same,
    solve,
    tensor,
)
from fusedops import triangle_multiplicative_update
from fusedops._frame import registry
from fusedops.trimul.examples import update
from fusedops.trimul.op import ARRAYS, trimul, warn_of_parts
from places import HAS_TORCH, interpreted, needs_torch

if HAS_TORCH:
    import torch

pytestmark = interpreted

REFERENCE = "numpy", "numpy"
DIRECTIONS = ("outgoing", "incoming")
GATES = ("output", "hidden")
TRIANGLE = next(example for example in EXAMPLES if example.name == "triangle")


@pytest.fixture(params=DIRECTIONS)
def direction(request):
    return request.param


@pytest.fixture(params=GATES)
def gate(request):
    return request.param


def problem(size=(2, 5, 6, 7), dtype="float64", **options):
    """Return an update (B, N, C, H), by default with every array; all arrays are leaves."""
    options = {"direction": "outgoing", "gate": "output", "mask": False, "biases": True, **options}
    make = functools.partial(update, **options)
    return dataclasses.replace(TRIANGLE, make=make, leaves=tuple(ARRAYS)).of(size, dtype)


def eager(direction, gate, eps=1e-5, **a):
    """Return the update by the formula of AlphaFold's supplement, in torch."""
    F = torch.nn.functional

    def linear(name, x):
        return F.linear(x, a[f"{name}_weight"], a.get(f"{name}_bias"))

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], a.get(f"{name}_weight"), a.get(f"{name}_bias"), eps)

    z = norm("norm_in", a["x"])
    sides = linear("g_in", z).sigmoid() * linear("p_in", z)
    if "mask" in a:
        sides = sides * a["mask"][..., None]
    terms = "bikh,bjkh->bijh" if direction == "outgoing" else "bkih,bkjh->bijh"
    o = norm("norm_out", torch.einsum(terms, *sides.chunk(2, -1)))
    g = linear("g_out", z).sigmoid()
    return linear("p_out", o * g) if gate == "hidden" else g * linear("p_out", o)


def expected(p):
    """Return the update and the gradients of the given arrays, by torch's autograd in float64."""
    p = p.astype("float64")
    arguments, leaves = as_framework("torch", p), leaves_of(p)
    arguments.pop("precision", None)
    out = eager(**{**arguments, **dict(zip(p.leaves, leaves, strict=True))})
    gradients = torch.autograd.grad(out, leaves, tensor(p.cotangents[0]))
    return [result.detach().numpy() for result in (out, *gradients)]


def relative(got, want):
    """Return the norm of the error over the reference's norm."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)


# Choices of the optional arrays.
VARIANTS = {
    "all": {},
    "alphafold 3": {"biases": False, "mask": True},
    "bare": {"biases": False, "mask": None, "norms": False},
}


@needs_torch
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reference", [REFERENCE, ("torch", "torch")], ids="-".join)
def test_value_and_gradients_are_those_of_alphafolds_formula(reference, direction, gate, variant):
    p = problem(direction=direction, gate=gate, **VARIANTS[variant])
    all_agree(p, None, solve(reference, p), expected(p))


@needs_torch
@pytest.mark.interpreted_slow(eps=1.0)
@pytest.mark.parametrize("eps", [1e-12, 1e-3, 1.0])
def test_eps(place, eps):
    p = problem((1, 4, 6, 7)).but(eps=np.float32(eps))
    all_agree(p, None, solve(place, p), expected(p))


@needs_torch
def test_a_gradient_that_depends_on_nothing_has_none_itself(torch_backend):
    """With gate="hidden", the last bias's gradient is a sum of the cotangent."""
    p = problem(gate="hidden")
    arguments = as_framework("torch", p)
    x, bias = (arguments[name].requires_grad_() for name in ("x", "p_out_bias"))
    out = p.op(**arguments, backend=torch_backend)
    first = torch.autograd.grad(out.sum(), [x, bias], create_graph=True)
    (both,) = torch.autograd.grad(first[0].square().sum() + first[1].sum(), x, retain_graph=True)
    (alone,) = torch.autograd.grad(first[0].square().sum(), x, retain_graph=True)
    assert torch.equal(both, alone)
    (nothing,) = torch.autograd.grad(first[1].sum(), x, allow_unused=True)
    assert nothing is None or not nothing.any()


# The dtypes of x and of weights, precision, and the largest error there may be, by norms.
PRECISION = [
    ("float32", "float32", None, 1e-6),
    ("float32", "float32", "float32", 1e-6),
    ("float32", "float32", "ieee", 1e-6),
    ("float32", "float32", "tf32", 1e-3),
    ("float32", "float32", "bf16", 5e-3),
    ("float32", "float32", "fp16", 1e-3),
    # Two roundings, of o too.
    ("bfloat16", "bfloat16", None, 8e-3),
    ("float16", "float16", None, 1e-3),
    ("bfloat16", "float32", None, 8e-3),
    ("float16", "float32", None, 1e-3),
    ("bfloat16", "bfloat16", "ieee", 5e-3),
    ("float16", "float16", "tf32", 1e-3),
]
INPUTS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "large mean": lambda rng, shape: 1e3 + rng.normal(size=shape),
    "Cauchy": lambda rng, shape: np.clip(2 * rng.standard_cauchy(shape), -6e4, 6e4),
}


@needs_torch
@pytest.mark.interpreted_slow(inputs="Cauchy", gate="hidden")
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(("dtype", "weights", "precision", "limit"), PRECISION)
def test_errors_are_as_small_as_they_should_be(
    any_torch_backend, gate, inputs, dtype, weights, precision, limit
):
    """Gradients may have twice the error."""
    interpreted = any_torch_backend == "triton"
    if interpreted and (precision == "bf16" or (precision, dtype) == (None, "bfloat16")):
        # The interpreter cuts off what a GPU rounds.
        limit *= 2
    size = 1, 7 if interpreted else 12, 32, 32
    p = problem(size, gate=gate, mask=True, biases=False)
    x = INPUTS[inputs](np.random.default_rng(0), p.arguments["x"].shape)
    # Of a large eps a wrong scale of o in fp16 shows.
    p = p.but(x=x, eps=0.3)
    leaves = {
        name: leaf.detach().to(getattr(torch, dtype if name == "x" else weights)).requires_grad_()
        for name, leaf in zip(p.leaves, leaves_of(p), strict=True)
    }
    given = {**as_framework("torch", p), **leaves, "precision": precision}
    out = p.op(**given, backend=any_torch_backend)
    cotangent = tensor(p.cotangents[0]).to(out.dtype)
    gradients = torch.autograd.grad(out, [*leaves.values()], cotangent)
    rounded = p.but(**{name: leaf.detach().double().numpy() for name, leaf in leaves.items()})
    want = expected(dataclasses.replace(rounded, cotangents=(cotangent.double().numpy(),)))
    assert relative(out.detach().double(), want[0]) < limit
    for (name, leaf), got, gradient in zip(leaves.items(), gradients, want[1:], strict=True):
        assert got.dtype == leaf.dtype
        assert relative(got.double(), gradient) < 2 * limit, name


@needs_torch
def test_a_gate_keeps_its_digits(any_torch_backend, gate):
    """It keeps eleven bits beside factors in bfloat16, which has eight, near zero, too."""
    rng = np.random.default_rng(0)
    N, C, H = 4, 16, 16
    p = problem((1, N, C, H), gate=gate)
    ends = {"norm_out_weight": np.zeros(H), "norm_out_bias": np.ones(H)}
    ends |= {"p_out_weight": np.eye(C, H), "p_out_bias": np.zeros(C)}
    ends |= {"g_out_weight": np.zeros((C, C)), "g_out_bias": rng.uniform(-18, 4, C)}
    (out,) = evaluate(("torch", any_torch_backend), p.but(**ends, precision="bf16").astype("f4"))
    want = 1 / (1 + np.exp(-ends["g_out_bias"].astype("f4").astype("f8")))
    np.testing.assert_allclose(out, np.broadcast_to(want, out.shape), rtol=5e-4)


def test_numbers_of_any_size(quick):
    """Heavy tails, constants and zeros give finite results wherever float64 does."""
    p = problem((1, 5, 6, 8), "float32")
    x = p.arguments["x"]
    x[0, 0], x[0, 1], x[0, 2, :, 0], x[0, 3, 3] = 0.0, 1e4, 1e12, 1e-30
    got, *gradients = solve(quick, p)
    want, *others = solve(REFERENCE, p.astype("float64"))
    assert all(np.isfinite(array).all() for array in (*gradients, want, *others))
    # A large constant leaves nothing but its mean's rounding.
    close(p, got, want.astype("f4"))


@pytest.mark.interpreted_slow(direction="incoming")
@pytest.mark.parametrize("hidden", ["a row", "all"])
def test_edges_that_are_masked(place, direction, gate, hidden):
    """A masked row's o is zero, and LayerNorm turns it into the bias."""
    p = problem(direction=direction, gate=gate, dtype="float32")
    mask = np.ones_like(p.arguments["mask"])
    some = slice(3, 4) if hidden == "a row" else slice(None)
    mask[:, some] = mask[:, :, some] = 0.0
    p = p.but(mask=mask)
    want = solve(REFERENCE, p.astype("float64"))
    for got, expected in zip(solve(place, p), want, strict=True):
        close(p, got, expected.astype("f4"))


#: Leading dimensions, and the shape of a mask.
LEADING = [
    *(((2,), mask) for mask in ((5, 5), (1, 5, 5), (2, 5, 1), (2, 1, 5), (5, 1), (5,), ())),
    *(((2, 3), mask) for mask in ((5, 5), (1, 5), (3, 5, 5), (3, 1, 5), (2, 1, 5, 5))),
    *((lead, (*lead, 5, 5)) for lead in ((), (3,), (2, 3), (2, 1, 2), (2, 0))),
    *((lead, (1,) * (len(lead) + 2)) for lead in ((2,), (2, 3))),
]


@pytest.mark.parametrize(("lead", "shape"), LEADING, ids=str)
def test_any_number_of_leading_dimensions_and_masks_that_broadcast(quick, lead, shape):
    """Values and gradients are those of a flat batch; a further call has a plan."""
    p = problem((math.prod(lead), 5, 6, 3))
    mask = np.random.default_rng(3).uniform(0.5, 1.5, shape)
    full = np.broadcast_to(mask, (*lead, 5, 5))
    flat = solve(quick, p.but(mask=full.reshape(p.arguments["mask"].shape).copy()))
    p = p.but(x=p.arguments["x"].reshape(*lead, 5, 5, 6), mask=mask)
    p = dataclasses.replace(p, cotangents=(p.cotangents[0].reshape(p.arguments["x"].shape),))
    out = np.empty_like(p.arguments["x"])
    evaluate(quick, p, out=out if quick[0] == "numpy" else tensor(out))
    for results in (solve(quick, p), solve(quick, p), [out]):
        for name, got, want in zip(["x", *p.leaves], results, flat, strict=False):
            if name == "mask":
                # A sum over the broadcast axes.
                padded = (1,) * (full.ndim - len(shape)) + shape
                axes = tuple(i for i, n in enumerate(padded) if n == 1)
                want = want.reshape(full.shape).sum(axes, keepdims=True)
            assert got.shape == p.arguments[name].shape
            close(p, got.reshape(-1), want.reshape(-1))


@pytest.mark.parametrize("kind", ["bool", "int8", "uint8", "int32", "int64"])
def test_masks_of_integers(quick, kind):
    """NumPy gives a mask of integers a gradient, too."""
    p = problem(mask=True)
    p = p.but(mask=p.arguments["mask"] * (2 if kind != "bool" else 1))
    whole = p.but(mask=p.arguments["mask"].astype(kind))
    if quick[0] == "torch":
        constant = dataclasses.replace(TRIANGLE, leaves=tuple(n for n in ARRAYS if n != "mask"))
        p, whole = (dataclasses.replace(each, example=constant) for each in (p, whole))
    for got, want in zip(solve(quick, whole), solve(quick, p), strict=True):
        same(got, want)


SMALL_PARTS = "ignore:triangle_multiplicative_update. max_memory is:RuntimeWarning"


@pytest.mark.interpreted_slow(gate="hidden", limit=1)
@pytest.mark.filterwarnings(SMALL_PARTS)
@pytest.mark.parametrize("limit", [1, 3000, 20_000, 10**12])
def test_parts_add_up_to_the_whole(place, direction, gate, limit):
    """`max_memory` changes the number of steps, and results by roundings only."""
    # A part on a GPU has eight lines.
    size = (1, 9, 4, 3) if place[1] == "triton" else (2, 21, 6, 7)
    p = problem(size, "float32", direction=direction, gate=gate)
    want = solve(REFERENCE, p.astype("float64"))
    for got, expected in zip(solve(place, p.but(max_memory=limit)), want, strict=True):
        close(p, got, expected.astype("f4"))


@pytest.mark.interpreted_slow(direction="incoming")
def test_small_parts_are_warned_of_once_with_what_would_do(place, direction, monkeypatch):
    """A user should not have to guess why a call takes long."""
    if place[1] in ("numpy", "torch"):
        pytest.skip("has no parts")
    if place[1] == "triton":
        # The parts are found before any kernel runs.
        for module in ("forward", "backward", "products"):
            monkeypatch.setattr(f"gpukern.trimul.{module}.launch", lambda *_, **how: None)
    p = problem((1, 70, 3, 20), "float32", direction=direction)
    warn_of_parts.cache_clear()

    def numbers(limit):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            solve(place, p.but(max_memory=limit))
        own = [w for w in found if "max_memory" in str(w.message)]
        assert all(w.category is RuntimeWarning and str(limit) in str(w.message) for w in own)
        return [int(re.search(r"at least (\d+)$", str(w.message))[1]) for w in own]

    enough = numbers(100)
    # Forward and backward warn once each.
    assert len(enough) == len(set(enough)) == 2
    assert numbers(100) == []
    assert numbers(max(enough)) == []
    assert len(numbers(min(enough) * 7 // 8)) == 2


@pytest.mark.parametrize("size", [(0, 3, 4, 5), (1, 0, 4, 5), (0, 0, 1, 1)], ids=str)
def test_nothing_in_fp16(place, gate, size):
    """Its exponent depends on N; there is nothing of which a gradient isn't zero."""
    p = problem(size, "float32", gate=gate).but(precision="fp16")
    out, *gradients = solve(place, p)
    assert out.shape == p.arguments["x"].shape
    assert not any(gradient.any() for gradient in gradients)


MIXED = [
    {"x": "float64"},
    {"p_in_weight": "float64", "norm_out_bias": "float64", "mask": "float64"},
    {"g_in_weight": "float64", "p_in_bias": "float64", "g_out_weight": "float64"},
]


@pytest.mark.parametrize("dtypes", MIXED, ids=lambda d: "-".join(d))
def test_arrays_of_several_dtypes(place, dtypes):
    """The result has the dtype of x, and each gradient its array's."""
    p = problem(dtype="float32")
    p = p.but(**{n: p.arguments[n].astype(dtype) for n, dtype in dtypes.items()})
    kind = p.arguments["x"].dtype
    p = dataclasses.replace(p, cotangents=(p.cotangents[0].astype(kind),))
    want = solve(REFERENCE, p.astype("float64"))
    for name, got, expected in zip(["x", *p.leaves], solve(place, p), want, strict=True):
        if place[0] == "torch" or name != "mask":
            assert got.dtype == p.arguments[name].dtype
        close(p, got.astype("f4"), expected.astype("f4"))


@needs_torch
def test_one_number_serves_all_channels(any_torch_backend):
    """The contract's layouts leave broadcast arrays out, as LayerNorm leaves roundings of them."""
    p = problem()
    arguments = as_framework("torch", p) | {"backend": any_torch_backend}
    one = torch.full((1,), 1.25, dtype=torch.float64)
    got, want = (
        p.op(**{**arguments, "norm_in_weight": weight}).numpy()
        for weight in (one.expand(6), one.repeat(6))
    )
    close(p, got, want)


def shaped(*shape):
    return np.ones(shape)


# B, N, C, H are 2, 5, 6, 7. The contract and test_errors.py try other wrong arguments.
BAD = {
    r"x has shape \(5, 6\); it should be \(\.\.\., N, N, C\), C > 0": {"x": shaped(5, 6)},
    r"x has shape \(2, 3, 5, 4, 6\); it should be \(\.": {"x": shaped(2, 3, 5, 4, 6)},
    r"x has shape \(2, 5, 4, 6\); it should be \(B, N, N, C\)": {"x": shaped(2, 5, 4, 6)},
    r"x has shape \(2, 5, 5, 0\); it should be \(B, N, N, C\), C > 0": {"x": shaped(2, 5, 5, 0)},
    "mask is a masked array, whose mask would be ignored": {
        "x": shaped(1, 2, 5, 5, 6),
        "mask": np.ma.masked_array(np.ones((1, 2, 5, 5)), mask=True),
    },
    r"mask has shape \(2, 5, 5\); it should broadcast to \(2, 3, 5": {"x": shaped(2, 3, 5, 5, 6)},
    r"mask has shape \(2, 5\); it should broadcast to \(2, 5, 5\)": {"mask": shaped(2, 5)},
    r"mask has shape \(2, 5, 5, 1\); it should broadcast": {"mask": shaped(2, 5, 5, 1)},
    r"p_in_weight has shape \(13, 6\); it should be \(2 \* H": {"p_in_weight": shaped(13, 6)},
    r"p_in_weight has shape \(0, 6\); it should be .*, H > 0": {"p_in_weight": shaped(0, 6)},
    r"p_in_bias has shape \(14,\); it should be \(16,\)": {"p_in_weight": shaped(16, 6)},
    r"p_out_weight has shape \(0, 7\); it should be .*, D > 0": {"p_out_weight": shaped(0, 7)},
    r"g_out_weight has shape \(6, 6\); it should be \(7, 6\)": {"gate": "hidden"},
    "direction is 'both'; it should be one of outgoing, incoming": {"direction": "both"},
    "gate is None; it should be one of output, hidden": {"gate": None},
    "precision is 'fp8'; it should be one of None, float32, ieee, tf32, b": {"precision": "fp8"},
    "precision is 'tf32'; with float64 it should be None or 'ieee'": {"precision": "tf32"},
    r"eps is 0\.0; it should be a positive number": {"eps": 0.0},
    "eps is inf; it should be a positive number": {"eps": math.inf},
    "max_memory is 0; it should be at least 1": {"max_memory": 0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_names_the_argument(message):
    op = triangle_multiplicative_update
    for function in (op, op.vjp, op.explain):
        with pytest.raises((TypeError, ValueError), match=message):
            function(**{**problem().arguments, **BAD[message]})


@pytest.mark.parametrize(
    ("given", "resolved"), [(None, "float32"), ("ieee", "ieee"), ("tf32", "tf32"), ("bf16", "bf16")]
)
@pytest.mark.usefixtures("fresh_plans")
def test_kernels_are_told_what_the_call_asks_for(given, resolved, monkeypatch):
    """Kernels get the arrays, the mask broadcast in the dtype of x, and resolved options."""
    pytest.importorskip("numba")
    told = []

    def kernel(a, y):
        told.append((a, y))
        y.out[...] = 3.0

    monkeypatch.setitem(registry._kernels, (trimul.name, "numba"), kernel)
    monkeypatch.setattr(registry, "_chosen", {})
    p = problem(mask=True, dtype="float32")
    mask = p.arguments["mask"][0, :1].astype(bool)
    p = p.but(mask=mask, precision=given, max_memory=77)
    assert (evaluate(("numpy", "numba"), p)[0] == 3).all()
    p.op.vjp(**p.arguments, backend="numba")
    for (a, y), kept in zip(told, (False, True), strict=True):
        assert (a.mask.shape, a.mask.dtype) == ((2, 5, 5), np.float32)
        assert a[len(ARRAYS) :] == ("outgoing", "output", resolved, 1e-5, 77)
        # o is kept only for a gradient.
        assert (y.hidden is not None) == kept
    assert (y.hidden.shape, y.hidden.dtype) == ((2, 7, 5, 5), np.float32)


@needs_torch
@pytest.mark.parametrize(
    ("x", "weights", "resolved"),
    [
        ("float64", "float64", "ieee"),
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bf16"),
        ("bfloat16", "float32", "bf16"),
        ("float16", "float32", "fp16"),
        ("float16", "float64", "ieee"),
    ],
)
@pytest.mark.usefixtures("fresh_plans")
def test_the_precision_of_a_call_that_names_none(x, weights, resolved, monkeypatch):
    seen, genuine = [], trimul.formula
    tensors = {n: tensor(a) for n, a in problem((1, 2, 3, 4)).arguments.items() if n in ARRAYS}
    monkeypatch.setattr(trimul, "formula", lambda a: seen.append(a.precision) or genuine(a))
    monkeypatch.setattr(registry, "_chosen", {})
    given = {n: t.to(getattr(torch, x if n == "x" else weights)) for n, t in tensors.items()}
    assert triangle_multiplicative_update(**given, backend="torch").dtype == given["x"].dtype
    assert seen == [resolved]


@needs_torch
def test_what_is_kept_for_the_backward(any_torch_backend):
    """The arrays and o are kept, with the mask as a view."""
    p = problem()
    leaves, saved = leaves_of(p), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function_of(p, any_torch_backend)(*leaves)
    known = {leaf.data_ptr() for leaf in leaves}
    assert [tuple(t.shape) for t in saved if t.data_ptr() not in known] == [(2, 7, 5, 5)]


@needs_torch
def test_o_has_a_gradient_too(torch_backend, direction):
    """The registered op returns o, and so its callers may differentiate it."""
    p = problem(direction=direction)
    static = direction, "output", "ieee", 1e-5, 0
    cotangent = tensor(np.random.default_rng(0).normal(size=(2, 7, 5, 5)))
    operator = torch.ops.fusedops.triangle_multiplicative_update
    for both in (False, True):
        found = []
        for registered in (True, False):
            leaves = leaves_of(p)
            if registered:
                out, o = operator(*leaves, *static, [True, True], torch_backend)
            else:
                out, o = trimul.formula(trimul.Arguments(*leaves, *static))
            outputs = [(o, cotangent), (out, tensor(p.cotangents[0]))][: 1 + both]
            values, by = zip(*outputs, strict=True)
            found.append(torch.autograd.grad(values, leaves, by, materialize_grads=True))
        for got, want in zip(*found, strict=True):
            close(p, got.numpy(), want.numpy())


@needs_torch
@pytest.mark.parametrize("mask", ["bool", "row"])
def test_compile_without_recompiling(mask):
    """The contract compiles one call with a mask of floats, and its gradients."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def function(x, mask, *weights):
        arrays = dict(zip(ARRAYS, (1.5 * x, mask, *weights), strict=True))
        out = triangle_multiplicative_update(**arrays, direction="incoming", max_memory=10**9)
        return out.sin() + triangle_multiplicative_update(**arrays, precision="ieee", eps=1e-3)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    frames = set()
    # torch.compile would keep equal sizes equal, so the first ones differ.
    for B, N in ((2, 9), (3, 11), (5, 4)):
        x, values, *weights = leaves_of(problem((B, N, 6, 7), mask=mask == "bool"))
        values = values.detach().bool() if mask == "bool" else values[:, :, :1]
        torch.testing.assert_close(*(f(x, values, *weights) for f in (fast, function)))
        frames.add(counter.frame_count)
    # Numbers like eps make the first compilation start over.
    assert len(frames) == 1


@pytest.mark.parametrize("backend", ["cython", "numba", "torch"])
def test_sums_beyond_float16_have_gradients(backend):
    """They are float32's in the forward, and normalized; those that float16 holds are infinite."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    C = H = 8
    x = torch.randn(1, 64, 64, C).half()
    weights = {
        "p_in_weight": 20 * torch.randn(2 * H, C),
        "g_in_weight": torch.randn(2 * H, C),
        "p_out_weight": torch.randn(C, H) / 2,
        "g_out_weight": torch.randn(C, C) / 2,
        "p_in_bias": torch.full((2 * H,), 80.0),
    }

    def gradients(dtype, backend):
        given = {n: w.half().to(dtype).requires_grad_() for n, w in weights.items()}
        out = triangle_multiplicative_update(x.to(dtype), **given, backend=backend)
        out.double().square().mean().backward()
        return [w.grad.double() for w in given.values()]

    for found, want in zip(
        gradients(torch.float16, backend), gradients(torch.float64, "torch"), strict=True
    ):
        assert ((found - want).norm() / want.norm()) < 0.05
