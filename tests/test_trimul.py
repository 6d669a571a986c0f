"""The triangle multiplicative update, on the reference and the kernels."""

from __future__ import annotations

import itertools
import math
import operator
import re
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

import fusedops
import guarded
from fusedops import triangle_multiplicative_update
from fusedops._frame import registry
from fusedops.samples import pair
from fusedops.testing import TOLERANCE, error
from fusedops.trimul.op import ARRAYS, trimul, trimul_vjp, warn_of_parts
from places import EXACT, FILLING, HAS_TORCH, available, interpreted, needs_linux, needs_torch

if HAS_TORCH:
    import torch

pytestmark = interpreted


DIRECTIONS = ("outgoing", "incoming")
GATES = ("output", "hidden")
DTYPES = ("float32", "float64")


@pytest.fixture(params=DIRECTIONS)
def direction(request):
    return request.param


@pytest.fixture(params=GATES)
def gate(request):
    return request.param


class Problem(NamedTuple):
    """The arrays of an update by name, its other arguments, and a cotangent of it."""

    arrays: dict[str, Any]
    options: dict[str, Any]
    cotangent: Any

    @property
    def given(self):
        return [name for name, array in self.arrays.items() if array is not None]

    def but(self, *, cotangent=None, **changes):
        """Return the problem with other arrays and options."""
        arrays = {name: changes.pop(name, array) for name, array in self.arrays.items()}
        cotangent = self.cotangent if cotangent is None else cotangent
        return Problem(arrays, {**self.options, **changes}, cotangent)

    def mapped(self, function):
        """Return the problem with a function applied to every array."""
        arrays = {n: None if a is None else function(a) for n, a in self.arrays.items()}
        return Problem(arrays, self.options, function(self.cotangent))

    def astype(self, dtype):
        return self.mapped(lambda array: array.astype(dtype))


# Choices of the optional arrays.
VARIANTS = {
    "all": {"biases": True, "mask": False},
    "alphafold 3": {"biases": False, "mask": True},
    "bare": {"biases": False, "mask": None, "norms": False},
}


def problem(
    shape=(2, 5, 6, 7),
    *,
    direction="outgoing",
    gate="output",
    dtype="float64",
    seed=0,
    mask=False,
    biases=True,
    **options,
):
    """Return an update (B, N, C, H), by default with every array."""
    rng = np.random.default_rng(seed)
    arrays = pair(*shape, rng, gate=gate, mask=mask, biases=biases, **options)
    cotangent = rng.normal(size=arrays["x"].shape)
    return Problem(arrays, {"direction": direction, "gate": gate}, cotangent).astype(dtype)


def tensor(array):
    return torch.from_numpy(array)


def evaluate(place, p, **options):
    """Return the update, an array."""
    arrays = {n: a for n, a in p.arrays.items() if a is not None}
    if place[0] == "torch":
        arrays = {n: tensor(a) for n, a in arrays.items()}
    options = {**p.options, **options, "backend": place[1]}
    return np.asarray(triangle_multiplicative_update(**arrays, **options))


def leaves_of(p):
    return [tensor(p.arrays[name]).requires_grad_() for name in p.given]


def function_of(p, backend=None, **options):
    """Return the update as a function of the tensors of the arrays that are given."""

    def function(*leaves, **more):
        arrays = dict(zip(p.given, leaves, strict=True))
        options_ = {**p.options, **options, **more, "backend": backend}
        return triangle_multiplicative_update(**arrays, **options_)

    return function


def solve(place, p, **options):
    """Return the update and the gradients of the given arrays, as arrays."""
    if place[0] == "numpy":
        arrays = {n: a for n, a in p.arrays.items() if a is not None}
        options = {**p.options, **options, "backend": place[1]}
        out, pullback = triangle_multiplicative_update.vjp(**arrays, **options)
        return [out, *pullback(p.cotangent)]
    leaves = leaves_of(p)
    out = function_of(p, place[1], **options)(*leaves)
    gradients = torch.autograd.grad(out, leaves, tensor(p.cotangent))
    return [np.asarray(result.detach()) for result in (out, *gradients)]


def eager(arrays, direction="outgoing", gate="output", eps=1e-5):
    """Return the update by the formula of AlphaFold's supplement, in torch."""
    H = arrays["p_out_weight"].shape[1]

    def linear(name, x):
        return torch.nn.functional.linear(x, arrays[f"{name}_weight"], arrays[f"{name}_bias"])

    def norm(name, x):
        # The third derivative of torch's own layer_norm is wrong.
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        x = (x - mean) / (var + eps).sqrt()
        weight, bias = arrays[f"{name}_weight"], arrays[f"{name}_bias"]
        x = x if weight is None else x * weight
        return x if bias is None else x + bias

    z = norm("norm_in", arrays["x"])
    ab = torch.sigmoid(linear("g_in", z)) * linear("p_in", z)
    if arrays["mask"] is not None:
        ab = ab * arrays["mask"][..., None]
    a, b = ab[..., :H], ab[..., H:]
    terms = "bikh,bjkh->bijh" if direction == "outgoing" else "bkih,bkjh->bijh"
    o = norm("norm_out", torch.einsum(terms, a, b))
    g = torch.sigmoid(linear("g_out", z))
    return linear("p_out", o * g) if gate == "hidden" else g * linear("p_out", o)


def expected(p):
    """Return the update and the gradients of the given arrays, by torch's autograd in float64."""
    wide = p.astype("float64")
    leaves = leaves_of(wide)
    arrays = {**wide.arrays, **dict(zip(p.given, leaves, strict=True))}
    out = eager(arrays, **p.options)
    gradients = torch.autograd.grad(out, leaves, tensor(wide.cotangent))
    return [result.detach().numpy() for result in (out, *gradients)]


def same(got, want):
    np.testing.assert_array_equal(got, want, strict=True)


def close(got, want, dtype=None, terms=8192):
    """Compare with a reference by the matrix's tolerance for updates of few channels."""
    dtype = str(got.dtype) if dtype is None else dtype
    assert error(got, want) <= TOLERANCE[dtype] * terms**0.5 / 8


def relative(got, want):
    """Return the norm of the error over the reference's norm."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / (np.linalg.norm(want) or 1.0)


@needs_torch
@pytest.mark.interpreted_slow(dtype="float64")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_and_gradients_are_those_of_alphafolds_formula(
    place, direction, gate, variant, dtype
):
    p = problem(direction=direction, gate=gate, dtype=dtype, **VARIANTS[variant])
    for name, got, want in zip(["out", *p.given], solve(place, p), expected(p), strict=True):
        assert got.dtype == dtype, name
        close(got, want)


@pytest.mark.parametrize("name", ARRAYS)
def test_gradients_are_what_differences_say(direction, gate, name):
    p = problem((1, 3, 4, 3), direction=direction, gate=gate)
    place = "numpy", "numpy"
    gradient = solve(place, p)[1 + [*ARRAYS].index(name)]
    step = 1e-5
    want = np.zeros_like(gradient)
    for index in np.ndindex(gradient.shape):
        moved = []
        for sign in (1, -1):
            array = p.arrays[name].copy()
            array[index] += sign * step
            moved.append(np.vdot(p.cotangent, evaluate(place, p.but(**{name: array}))))
        want[index] = (moved[0] - moved[1]) / (2 * step)
    # Differences err by the square of the step, and by roundings over the step.
    assert error(gradient, want) < 1e-7


@needs_torch
@pytest.mark.parametrize("variant", VARIANTS)
def test_second_derivatives_are_those_of_the_eager_formula(torch_backend, gate, variant):
    p = problem((1, 4, 5, 6), gate=gate, **VARIANTS[variant])
    found = []
    for ours in (True, False):
        leaves = leaves_of(p)
        cotangent = tensor(p.cotangent).requires_grad_()
        if ours:
            out = function_of(p, torch_backend)(*leaves)
        else:
            out = eager({**p.arrays, **dict(zip(p.given, leaves, strict=True))}, **p.options)
        first = torch.autograd.grad(out, leaves, cotangent, create_graph=True)
        along = sum((gradient.sin() ** 2).sum() for gradient in first)
        found.append(torch.autograd.grad(along, [*leaves, cotangent], allow_unused=True))
    for got, want in zip(*found, strict=True):
        if want is None:
            assert got is None or not got.any()
        else:
            # LayerNorms' divisions are squared.
            close(got.numpy(), want.numpy(), terms=1e6)


@needs_torch
def test_third_derivatives(torch_backend):
    p = problem((1, 3, 4, 5))
    rng = np.random.default_rng(1)
    along = [tensor(rng.normal(size=p.arrays["x"].shape)) for _ in range(2)]
    found = []
    for ours in (True, False):
        leaves = leaves_of(p)
        if ours:
            out = function_of(p, torch_backend)(*leaves)
        else:
            out = eager({**p.arrays, **dict(zip(p.given, leaves, strict=True))}, **p.options)
        (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
        (second,) = torch.autograd.grad((first * along[0]).sum(), leaves[0], create_graph=True)
        found.append(torch.autograd.grad((second * along[1]).sum(), leaves))
    for got, want in zip(*found, strict=True):
        close(got.numpy(), want.numpy(), terms=1e6)


@needs_torch
def test_a_gradient_that_depends_on_nothing_has_none_itself(torch_backend):
    """With gate="hidden", the last bias's gradient is a sum of the cotangent."""
    p = problem(gate="hidden")
    leaves = leaves_of(p)
    at, x = p.given.index("p_out_bias"), leaves[0]
    out = function_of(p, torch_backend)(*leaves)
    first = torch.autograd.grad(out.sum(), [x, leaves[at]], create_graph=True)
    (both,) = torch.autograd.grad(first[0].square().sum() + first[1].sum(), x, retain_graph=True)
    (alone,) = torch.autograd.grad(first[0].square().sum(), x, retain_graph=True)
    assert torch.equal(both, alone)
    (nothing,) = torch.autograd.grad(first[1].sum(), x, allow_unused=True)
    assert nothing is None or not nothing.any()


def test_incoming_is_outgoing_of_what_is_transposed(place, gate):
    """Left and right are exchanged, too: x_ij ↔ x_ji turns l_ik r_jk into r_ki l_kj."""
    p = problem((2, 5, 6, 7), gate=gate)

    def exchanged(array):
        left, right = np.split(array, 2)
        return np.concatenate([right, left])

    def transposed(array):
        return np.ascontiguousarray(array.swapaxes(1, 2))

    halves = ("p_in_weight", "p_in_bias", "g_in_weight", "g_in_bias")
    other = p.but(
        direction="incoming",
        x=transposed(p.arrays["x"]),
        mask=transposed(p.arrays["mask"]),
        cotangent=transposed(p.cotangent),
        **{name: exchanged(p.arrays[name]) for name in halves},
    )
    back = {"out": transposed, "x": transposed, "mask": transposed}
    back |= dict.fromkeys(halves, exchanged)
    names = ["out", *p.given]
    for name, one, two in zip(names, solve(place, p), solve(place, other), strict=True):
        close(back.get(name, lambda array: array)(two), one)


def test_without_the_last_gate_left_and_right_need_not_be_exchanged(quick):
    p = problem()
    for name in ("g_out_weight", "g_out_bias"):
        p.arrays[name][:] = 0.0
    x, mask = (np.ascontiguousarray(p.arrays[n].swapaxes(1, 2)) for n in ("x", "mask"))
    got = evaluate(quick, p.but(direction="incoming", x=x, mask=mask))
    close(got, evaluate(quick, p))


def test_batches_are_apart(quick, direction):
    p = problem((3, 4, 5, 6), direction=direction)
    whole = evaluate(quick, p)
    for b in range(3):
        alone = p.but(x=p.arrays["x"][b : b + 1], mask=p.arrays["mask"][b : b + 1])
        close(evaluate(quick, alone), whole[b : b + 1], terms=64)


# dtype, precision, and the largest error there may be, relative, by norms.
PRECISION = [
    ("float32", None, 1e-6),
    ("float32", "float32", 1e-6),
    ("float32", "ieee", 1e-6),
    ("float32", "tf32", 1e-3),
    ("float32", "bf16", 5e-3),
    ("float32", "fp16", 1e-3),
    # Two roundings, of o too.
    ("bfloat16", None, 8e-3),
    ("float16", None, 1e-3),
    ("bfloat16", "ieee", 5e-3),
    ("float16", "tf32", 1e-3),
]
INPUTS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "large mean": lambda rng, shape: 1e3 + rng.normal(size=shape),
    "Cauchy": lambda rng, shape: np.clip(2 * rng.standard_cauchy(shape), -6e4, 6e4),
}


@needs_torch
@pytest.mark.interpreted_slow(inputs="Cauchy")
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(("dtype", "precision", "limit"), PRECISION)
def test_errors_are_as_small_as_they_should_be(
    any_torch_backend, gate, inputs, dtype, precision, limit
):
    """Gradients may have twice the error."""
    interpreted = any_torch_backend == "triton"
    if interpreted and "bf16" in (precision, "bf16" if dtype == "bfloat16" else None):
        # The interpreter cuts off what a GPU rounds.
        limit *= 2
    shape = 1, 7 if interpreted else 12, 32, 32
    p = problem(shape, gate=gate, mask=True, biases=False)
    rng = np.random.default_rng(0)
    p = p.but(x=INPUTS[inputs](rng, p.arrays["x"].shape))
    kind = getattr(torch, dtype)
    leaves = [leaf.detach().to(kind).requires_grad_() for leaf in leaves_of(p)]
    out = function_of(p, any_torch_backend, precision=precision)(*leaves)
    cotangent = tensor(p.cotangent).to(kind)
    gradients = torch.autograd.grad(out, leaves, cotangent)
    rounded = {n: t.detach().double().numpy() for n, t in zip(p.given, leaves, strict=True)}
    want = expected(p.but(**rounded, cotangent=cotangent.double().numpy()))
    results = [t.detach().double().numpy() for t in (out, *gradients)]
    assert all(np.isfinite(result).all() for result in results)
    assert relative(results[0], want[0]) < limit
    for name, got, gradient in zip(p.given, results[1:], want[1:], strict=True):
        assert relative(got, gradient) < 2 * limit, name


@needs_torch
def test_a_gate_keeps_its_digits(any_torch_backend, gate):
    """It keeps eleven bits beside factors in bfloat16, which has eight, near zero, too."""
    rng = np.random.default_rng(0)
    N, C, H = 4, 16, 16
    p = problem((1, N, C, H), gate=gate, dtype="float32")
    ends = {"norm_out_weight": np.zeros(H), "norm_out_bias": np.ones(H)}
    ends |= {"p_out_weight": np.eye(C, H), "p_out_bias": np.zeros(C)}
    ends |= {"g_out_weight": np.zeros((C, C)), "g_out_bias": rng.uniform(-18, 4, C)}
    p = p.but(**{name: end.astype("f4") for name, end in ends.items()})
    out = function_of(p, any_torch_backend, precision="bf16")(*leaves_of(p)).detach().numpy()
    want = 1 / (1 + np.exp(-p.arrays["g_out_bias"].astype("f8")))
    np.testing.assert_allclose(out, np.broadcast_to(want, out.shape), rtol=5e-4)


def test_numbers_of_any_size(quick):
    """Heavy tails, constants and zeros give finite results wherever float64 does."""
    p = problem((1, 5, 6, 8), dtype="float32")
    x = p.arrays["x"]
    x[0, 0], x[0, 1], x[0, 2, :, 0], x[0, 3, 3] = 0.0, 1e4, 1e12, 1e-30
    got, *gradients = solve(quick, p)
    want, *others = solve(("numpy", "numpy"), p.astype("float64"))
    assert all(np.isfinite(array).all() for array in (got, *gradients, want, *others))
    # A large constant leaves nothing but its mean's rounding.
    close(got, want)


@pytest.mark.interpreted_slow(hidden_row=3)
@pytest.mark.parametrize("hidden_row", [0, 3])
def test_a_row_that_is_masked_altogether(place, direction, gate, hidden_row):
    """A masked row's o is zero, and LayerNorm turns it into the bias."""
    p = problem(direction=direction, gate=gate, dtype="float32")
    mask = np.ones_like(p.arrays["mask"])
    mask[:, hidden_row] = mask[:, :, hidden_row] = 0.0
    p = p.but(mask=mask)
    out, *gradients = solve(place, p)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    a = {name: array if array is None else array.astype("f8") for name, array in p.arrays.items()}
    x = a["x"][:, hidden_row]
    n = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    n = n * a["norm_in_weight"] + a["norm_in_bias"]
    s = 1 / (1 + np.exp(-(n @ a["g_out_weight"].T + a["g_out_bias"])))
    o = a["norm_out_bias"]
    if gate == "output":
        want = (o @ a["p_out_weight"].T + a["p_out_bias"]) * s
    else:
        want = (o * s) @ a["p_out_weight"].T + a["p_out_bias"]
    close(out[:, hidden_row], want)


def test_everything_masked(place, gate):
    p = problem(gate=gate, dtype="float32")
    p = p.but(mask=np.zeros_like(p.arrays["mask"]))
    for got, want in zip(
        solve(place, p), solve(("numpy", "numpy"), p.astype("float64")), strict=True
    ):
        close(got, want)


MASKS = {
    "(N, N)": (5, 5),
    "(1, N, N)": (1, 5, 5),
    "(B, N, 1)": (2, 5, 1),
    "(B, 1, N)": (2, 1, 5),
    "(N, 1)": (5, 1),
    "(N,)": (5,),
    "()": (),
    "(1, 1, 1)": (1, 1, 1),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks_broadcast(quick, shape):
    """A broadcast mask's gradient is a sum over the broadcast axes."""
    p = problem()
    mask = np.random.default_rng(3).uniform(0.5, 1.5, shape)
    full = np.broadcast_to(mask, (2, 5, 5)).copy()
    at = 1 + p.given.index("mask")
    spread, whole = solve(quick, p.but(mask=mask)), solve(quick, p.but(mask=full))
    want = whole.pop(at)
    got = spread.pop(at)
    assert got.shape == shape
    padded = (1,) * (3 - len(shape)) + shape
    axes = tuple(i for i, n in enumerate(padded) if n == 1)
    close(np.asarray(got), want.sum(axes, keepdims=True).reshape(shape))
    for one, two in zip(spread, whole, strict=True):
        close(one, two, terms=64)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 2), (2, 0)], ids=str)
def test_any_number_of_leading_dimensions(quick, lead):
    """Values and gradients are those of a flat batch; a further call has a plan."""
    p = problem((math.prod(lead), 4, 6, 3))
    led = {
        "x": p.arrays["x"].reshape(*lead, 4, 4, 6),
        "mask": p.arrays["mask"].reshape(*lead, 4, 4),
    }
    q = p.but(**led, cotangent=p.cotangent.reshape(led["x"].shape))
    want = solve(quick, p)
    # Products of BLAS depend on where arrays lie in memory, by a rounding.
    agree = same if quick[1] in EXACT else close
    for _ in range(2):
        got = solve(quick, q)
        assert got[0].shape == q.arrays["x"].shape
        for name, one, two in zip(["x", *p.given], got, want, strict=True):
            assert one.shape == q.arrays[name].shape
            agree(one.reshape(two.shape), two)
    out = np.empty_like(got[0])
    evaluate(quick, q, out=out if quick[0] == "numpy" else tensor(out))
    agree(out, got[0])


@pytest.mark.parametrize(
    "shape", [(4, 4), (1, 4), (3, 4, 4), (3, 1, 4), (2, 1, 4, 4), (1, 1, 1, 1)]
)
def test_masks_broadcast_to_leading_dimensions(quick, shape):
    p = problem((6, 4, 6, 3))
    mask = np.random.default_rng(3).uniform(0.5, 1.5, shape)
    full = np.broadcast_to(mask, (2, 3, 4, 4)).copy()
    x, cotangent = (a.reshape(2, 3, 4, 4, 6) for a in (p.arrays["x"], p.cotangent))
    q = p.but(x=x, mask=mask, cotangent=cotangent)
    want = solve(quick, p.but(mask=full.reshape(6, 4, 4)))
    for name, one, two in zip(["x", *p.given], solve(quick, q), want, strict=True):
        if name == "mask":
            axes = tuple(i for i, n in enumerate((1,) * (4 - len(shape)) + shape) if n == 1)
            two = two.reshape(full.shape).sum(axes, keepdims=True)
        assert one.shape == q.arrays[name].shape
        close(one.reshape(-1), two.reshape(-1), terms=64)


@pytest.mark.parametrize("kind", ["bool", "int8", "uint8", "int32", "int64"])
def test_masks_of_integers(quick, kind):
    p = problem(mask=True)
    mask = p.arrays["mask"] * (2 if kind != "bool" else 1)
    p, whole = p.but(mask=mask), p.but(mask=mask.astype(kind))
    same(evaluate(quick, whole), evaluate(quick, p))
    if quick[0] == "numpy":
        # NumPy gives a mask of integers a gradient, too.
        for got, want in zip(solve(quick, whole), solve(quick, p), strict=True):
            same(got, want)
    else:
        leaves = [tensor(whole.arrays[n]).requires_grad_(n != "mask") for n in p.given]
        others = [leaf for leaf in leaves if leaf.requires_grad]
        out = function_of(p, quick[1])(*leaves)
        got = torch.autograd.grad(out, others, tensor(p.cotangent))
        want = [g for n, g in zip(p.given, solve(quick, p)[1:], strict=True) if n != "mask"]
        for one, two in zip(got, want, strict=True):
            same(one.numpy(), two)


def test_a_mask_is_used_in_the_dtype_of_x(quick):
    p = problem(dtype="float32")
    mask = np.random.default_rng(0).uniform(size=(2, 5, 5))
    got = solve(quick, p.but(mask=mask))
    want = solve(quick, p.but(mask=mask.astype("f4")))
    for name, one, two in zip(["out", *p.given], got, want, strict=True):
        # Autograd casts the gradient back; NumPy's has no way to.
        assert name == "mask" or one.dtype == np.float32
        same(one.astype("f4"), two)


LIMITS = (1, 3000, 20_000, 10**12)
SMALL_PARTS = "ignore:triangle_multiplicative_update. max_memory is:RuntimeWarning"


@pytest.mark.interpreted_slow(gate="output")
@pytest.mark.filterwarnings(SMALL_PARTS)
def test_parts_are_equal_to_the_whole(place, direction, gate):
    """`max_memory` changes the number of steps, and results by roundings only."""
    # A part on a GPU has eight lines.
    interpreted = place[1] == "triton"
    shape = (1, 9, 4, 3) if interpreted else (2, 21, 6, 7)
    p = problem(shape, direction=direction, gate=gate, dtype="float32")
    whole = solve(place, p)
    for limit in LIMITS[:1] if interpreted else LIMITS:
        for got, want in zip(solve(place, p, max_memory=limit), whole, strict=True):
            assert got.dtype == want.dtype
            close(got, want)


@pytest.mark.interpreted_slow(direction="incoming")
def test_small_parts_are_warned_of_once_with_what_would_do(place, direction):
    """A user should not have to guess why a call takes long."""
    if place[1] in ("numpy", "torch"):
        pytest.skip("has no parts")
    shape = (1, 9, 3, 18) if place[1] == "triton" else (1, 70, 3, 20)
    p = problem(shape, direction=direction, dtype="float32")
    warn_of_parts.cache_clear()

    def numbers(limit):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            solve(place, p, max_memory=limit)
        own = [w for w in found if "max_memory" in str(w.message)]
        assert all(w.category is RuntimeWarning and str(limit) in str(w.message) for w in own)
        return [int(re.search(r"at least (\d+)$", str(w.message))[1]) for w in own]

    enough = numbers(100)
    # Forward and backward warn once each.
    assert len(enough) == len(set(enough)) == 2
    assert numbers(100) == []
    assert numbers(max(enough)) == []
    assert len(numbers(min(enough) * 7 // 8)) == 2


EMPTY = [(0, 3, 4, 5), (1, 0, 4, 5), (0, 0, 1, 1), (2, 1, 1, 1)]


@pytest.mark.parametrize("precision", [None, "fp16"])
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_nothing_and_next_to_nothing(place, direction, gate, shape, precision):
    if precision and 0 not in shape:
        pytest.skip("rounded to 16 bits")
    dtype = "float32" if precision else "float64"
    p = problem(shape, direction=direction, gate=gate, dtype=dtype).but(precision=precision)
    want = solve(("numpy", "numpy"), p)
    for name, got, expected in zip(["out", *p.given], solve(place, p), want, strict=True):
        shape_of = p.cotangent.shape if name == "out" else p.arrays[name].shape
        assert got.shape == shape_of
        close(got, expected)
        assert got.size == 0 or 0 not in shape or not got.any()


def test_eps(quick):
    p = problem()
    for eps in (1e-12, 1e-3, 1, np.float32(0.1)):
        got = evaluate(quick, p, eps=eps)
        if HAS_TORCH:
            arrays = {n: tensor(a) for n, a in p.arrays.items()}
            close(got, eager(arrays, **p.options, eps=float(eps)).numpy())
    assert not np.array_equal(evaluate(quick, p, eps=1.0), evaluate(quick, p))


MIXED = [
    {"x": "float64"},
    {"x": "float32", "p_in_weight": "float64", "norm_out_bias": "float64"},
    {"g_out_weight": "float64", "mask": "float64"},
    {"g_in_weight": "float64", "p_in_bias": "float64"},
]


@pytest.mark.parametrize("dtypes", MIXED, ids=lambda d: "-".join(d))
def test_arrays_of_several_dtypes(place, dtypes):
    """The result has the dtype of x, and each gradient its array's."""
    p = problem(dtype="float32")
    p = p.but(**{n: p.arrays[n].astype(dtype) for n, dtype in dtypes.items()})
    p = p.but(cotangent=p.cotangent.astype(p.arrays["x"].dtype))
    results = solve(place, p)
    want = solve(("numpy", "numpy"), p.astype("float64"))
    assert results[0].dtype == p.arrays["x"].dtype
    for name, got, gradient in zip(p.given, results[1:], want[1:], strict=True):
        if place[0] == "torch" or name != "mask":
            assert got.dtype == p.arrays[name].dtype
        close(got, gradient, "float32")
    close(results[0], want[0], "float32")


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_with_weights_of_float32(any_torch_backend, gate, dtype):
    kind = getattr(torch, dtype)
    p = problem((1, 5, 8, 8), gate=gate)
    leaves = [
        leaf.detach().to(kind if name == "x" else torch.float32).requires_grad_()
        for name, leaf in zip(p.given, leaves_of(p), strict=True)
    ]
    out = function_of(p, any_torch_backend)(*leaves)
    assert out.dtype == kind
    cotangent = tensor(p.cotangent).to(kind)
    gradients = torch.autograd.grad(out, leaves, cotangent)
    rounded = {n: t.detach().double().numpy() for n, t in zip(p.given, leaves, strict=True)}
    want = expected(p.but(**rounded, cotangent=cotangent.double().numpy()))
    limit = 5e-3 if dtype == "bfloat16" else 1e-3
    if any_torch_backend == "triton" and dtype == "bfloat16":
        # The interpreter cuts off what a GPU rounds.
        limit *= 2
    assert relative(out.detach().double().numpy(), want[0]) < limit
    for leaf, got, gradient in zip(leaves, gradients, want[1:], strict=True):
        assert got.dtype == leaf.dtype
        # Over only eight channels, errors average out less.
        assert relative(got.double().numpy(), gradient) < 4 * limit


@needs_torch
def test_expanded_tensors_and_cotangents(any_torch_backend):
    """One weight serves all channels, and `.sum().backward()` expands a cotangent."""
    p = problem()
    place = "torch", any_torch_backend
    leaves = leaves_of(p)
    at = p.given.index("norm_in_weight")
    one = tensor(np.array([1.25])).requires_grad_()
    spread = [*leaves[:at], one.expand(6), *leaves[at + 1 :]]
    leaves[at] = one
    got = torch.autograd.grad(function_of(p, any_torch_backend)(*spread).sum(), leaves)
    want = solve(place, p.but(norm_in_weight=np.full(6, 1.25), cotangent=np.ones((2, 5, 5, 6))))
    for i, (mine, other) in enumerate(zip(got, want[1:], strict=True)):
        close(mine.numpy(), other.sum(keepdims=True) if i == at else other)


def arguments():
    """Return the arguments of a call with every array, by name."""
    return problem().arrays


def shaped(*shape):
    return np.ones(shape)


# B, N, C, H are 2, 5, 6, 7.
BAD = {
    "x of rank 2": (
        {"x": shaped(5, 6)},
        ValueError,
        r"x has shape \(5, 6\); it should be \(\.\.\., N, N, C\), C > 0",
    ),
    "x of rank 5 not square": (
        {"x": shaped(2, 3, 5, 4, 6)},
        ValueError,
        r"x has shape \(2, 3, 5, 4, 6\); it should be \(\.\.\., N, N, C\)",
    ),
    "x of rank 5 of no channels": (
        {"x": shaped(2, 3, 5, 5, 0)},
        ValueError,
        r"x has shape \(2, 3, 5, 5, 0\); it should be \(\.\.\., N, N, C\), C > 0",
    ),
    "mask with a mask": (
        {"x": shaped(1, 2, 5, 5, 6), "mask": np.ma.masked_array(np.ones((1, 2, 5, 5)), mask=True)},
        TypeError,
        "mask is a masked array, whose mask would be ignored",
    ),
    "mask of another rank": (
        {"x": shaped(2, 3, 5, 5, 6)},
        ValueError,
        r"mask has shape \(2, 5, 5\); it should broadcast to \(2, 3, 5, 5\)",
    ),
    "x not square": (
        {"x": shaped(2, 5, 4, 6)},
        ValueError,
        r"x has shape \(2, 5, 4, 6\); it should be \(B, N, N, C\)",
    ),
    "x of no channels": (
        {"x": shaped(2, 5, 5, 0)},
        ValueError,
        r"x has shape \(2, 5, 5, 0\); it should be \(B, N, N, C\), C > 0",
    ),
    "mask of complex numbers": (
        {"mask": np.ones((2, 5, 5), complex)},
        TypeError,
        "mask has dtype complex128; it should be bool, an integer, float32 or float64",
    ),
    "mask of others": (
        {"mask": shaped(2, 4, 5)},
        ValueError,
        r"mask has shape \(2, 4, 5\); it should broadcast to \(2, 5, 5\)",
    ),
    "mask of residues": ({"mask": shaped(2, 5)}, ValueError, r"mask has shape \(2, 5\); it should"),
    "mask with channels": (
        {"mask": shaped(2, 5, 5, 1)},
        ValueError,
        r"mask has shape \(2, 5, 5, 1\); it should broadcast to \(2, 5, 5\)",
    ),
    "p_in of an odd number": (
        {"p_in_weight": shaped(13, 6)},
        ValueError,
        r"p_in_weight has shape \(13, 6\); it should be \(2 \* H, 6\), H > 0",
    ),
    "p_in of no channels": (
        {"p_in_weight": shaped(0, 6)},
        ValueError,
        r"p_in_weight has shape \(0, 6\); it should be \(2 \* H, 6\), H > 0",
    ),
    "p_in of another C": (
        {"p_in_weight": shaped(14, 5)},
        ValueError,
        r"p_in_weight has shape \(14, 5\); it should be \(2 \* H, 6\)",
    ),
    "p_in and no one else of another H": (
        {"p_in_weight": shaped(16, 6)},
        ValueError,
        r"p_in_bias has shape \(14,\); it should be \(16,\)",
    ),
    "the other gate's weights": (
        {"gate": "hidden"},
        ValueError,
        r"g_out_weight has shape \(6, 6\); it should be \(7, 6\)",
    ),
    "direction": ({"direction": "both"}, ValueError, "direction is 'both'; it should be one of ou"),
    "gate": ({"gate": None}, ValueError, "gate is None; it should be one of output, hidden"),
    "precision": (
        {"precision": "fp8"},
        ValueError,
        "precision is 'fp8'; it should be one of None, float32, ieee, tf32, bf16, fp16",
    ),
    "precision of float64": (
        {"precision": "tf32"},
        ValueError,
        "precision is 'tf32'; with float64 it should be None or 'ieee'",
    ),
    "eps of none": ({"eps": 0.0}, ValueError, r"eps is 0\.0; it should be a positive number"),
    "eps negative": ({"eps": -1e-5}, ValueError, "eps is -1e-05; it should be a positive number"),
    "eps NaN": ({"eps": math.nan}, ValueError, "eps is nan; it should be a positive number"),
    "eps infinite": ({"eps": math.inf}, ValueError, "eps is inf; it should be a positive number"),
    "eps beyond floats": (
        {"eps": 10**400},
        ValueError,
        "update: eps is beyond the largest float; ",
    ),
    "eps a text": ({"eps": "1e-5"}, ValueError, "eps is '1e-5'; it should be a positive number"),
    "no memory": ({"max_memory": 0}, ValueError, "max_memory is 0; it should be at least 1"),
    "memory owed": ({"max_memory": -1}, ValueError, "max_memory is -1; it should be at least 1"),
    "memory a float": ({"max_memory": 1e9}, TypeError, "max_memory is a float; it should be an in"),
}
SHAPES = {
    "norm_in_weight": "(6,)",
    "norm_in_bias": "(6,)",
    "p_in_bias": "(14,)",
    "g_in_weight": "(14, 6)",
    "g_in_bias": "(14,)",
    "norm_out_weight": "(7,)",
    "norm_out_bias": "(7,)",
    "p_out_weight": "(D, 7), D > 0",
    "p_out_bias": "(6,)",
    "g_out_weight": "([6G], 6)",
    "g_out_bias": "([6G],)",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    changes, kind, message = BAD[name]
    op = triangle_multiplicative_update
    for function in (op, op.vjp, op.explain):
        if name == "triton" and function is op.explain:
            continue
        with pytest.raises(kind, match=message):
            function(**{**arguments(), **changes})


@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_says_its_name_and_shape(name):
    array = arguments()[name]
    should = SHAPES[name].replace("(", r"\(").replace(")", r"\)")
    # Fewer rows of the last projection are an output of another width, to which its bias must fit.
    shorter = [] if name == "p_out_weight" else [array[1:]]
    for wrong in (*shorter, array[None], array[..., :0], array.sum()):
        message = f"update: {name} has shape .*; it should be {should}"
        with pytest.raises(ValueError, match=message):
            triangle_multiplicative_update(**{**arguments(), name: wrong})
    for wrong in (array.astype(int), array.astype(complex), array > 0):
        message = f"update: {name} has dtype .*; it should be float32 or float64"
        with pytest.raises(TypeError, match=message):
            triangle_multiplicative_update(**{**arguments(), name: wrong})


@pytest.mark.parametrize("name", ["p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight"])
def test_a_weight_that_is_missing_says_its_name(name):
    with pytest.raises(TypeError, match=f"update: {name} is None; it should be an array"):
        triangle_multiplicative_update(**{**arguments(), name: None})


@pytest.mark.parametrize(
    ("given", "resolved"), [(None, "float32"), ("ieee", "ieee"), ("tf32", "tf32"), ("bf16", "bf16")]
)
@pytest.mark.usefixtures("fresh_plans")
def test_kernels_are_told_what_the_call_asks_for(given, resolved, monkeypatch):
    """Kernels get the arrays, the mask broadcast in the dtype of x, and resolved options."""
    pytest.importorskip("numba")
    told = []

    def kernel(a, y):
        told.append((*a, *y))
        y.out[...] = 3.0
        if y.hidden is not None:
            y.hidden[...] = 4.0

    monkeypatch.setitem(registry._kernels, (trimul.name, "numba"), kernel)
    monkeypatch.setattr(registry, "_chosen", {})
    p = problem(mask=True, dtype="float32")
    arrays = {**p.arrays, "mask": p.arrays["mask"][0, :1].astype(bool)}
    options = {"precision": given, "max_memory": 77, "backend": "numba"}
    assert (triangle_multiplicative_update(**arrays, **options) == 3).all()
    triangle_multiplicative_update.vjp(**arrays, **options)
    for args, kept in zip(told, (False, True), strict=True):
        assert len(args) == 14 + 5 + 2
        assert (args[1].shape, args[1].dtype) == ((2, 5, 5), np.float32)
        assert args[14:19] == ("outgoing", "output", resolved, 1e-5, 77)
        # o is kept only for a gradient.
        assert (args[20] is not None) == kept
        assert not kept or (args[20].shape, args[20].dtype) == ((2, 7, 5, 5), np.float32)


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
    seen = []

    def formula(a):
        seen.append(a.precision)
        return genuine(a)

    genuine = trimul.formula
    monkeypatch.setattr(trimul, "formula", formula)
    monkeypatch.setattr(registry, "_chosen", {})
    p = problem((1, 2, 3, 4))
    tensors = {
        n: tensor(a).to(getattr(torch, x if n == "x" else weights)) for n, a in p.arrays.items()
    }
    out = triangle_multiplicative_update(**tensors, backend="torch")
    assert seen == [resolved]
    assert out.dtype == tensors["x"].dtype


@needs_torch
def test_what_is_kept_for_the_backward(any_torch_backend):
    """The arrays and o are kept, with the mask as a view."""
    p = problem()
    leaves = leaves_of(p)
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function_of(p, any_torch_backend)(*leaves)
    known = {leaf.data_ptr() for leaf in leaves}
    new = [t for t in saved if t.data_ptr() not in known]
    assert [tuple(t.shape) for t in new] == [(2, 7, 5, 5)]


@needs_torch
def test_kernels_may_be_told_o_or_not(any_torch_backend, direction, gate):
    p = problem(direction=direction, gate=gate)
    static = direction, gate, "ieee", 1e-5, 0
    arrays = [tensor(a) for a in p.arrays.values()]
    cotangent = tensor(p.cotangent)
    _, o = trimul.formula(trimul.Arguments(*arrays, *static))
    with fusedops.use_backend(any_torch_backend):
        told = trimul_vjp(*arrays, o, cotangent, *static)
        found = trimul_vjp(*arrays, None, cotangent, *static)
    for got, want in zip(found, told, strict=True):
        close(got.numpy(), want.numpy())


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
            outputs = [(o, cotangent), (out, tensor(p.cotangent))][: 1 + both]
            values, cotangents = zip(*outputs, strict=True)
            found.append(torch.autograd.grad(values, leaves, cotangents, allow_unused=True))
        for got, want in zip(*found, strict=True):
            if want is None:
                assert not got.any()
            else:
                close(got.numpy(), want.numpy())


def compiled(function):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, dynamic=True), counter


@needs_torch
@pytest.mark.parametrize("mask", ["bool", "float", "row"])
def test_compile_without_breaks_or_recompiling(mask):
    """Code compiled once serves proteins of any length, in batches of any size."""

    def function(x, mask, *weights):
        arrays = dict(zip(ARRAYS, (1.5 * x, mask, *weights), strict=True))
        out = triangle_multiplicative_update(**arrays, direction="incoming", max_memory=10**9)
        return out.sin() + triangle_multiplicative_update(**arrays, precision="ieee", eps=1e-3)

    fast, counter = compiled(function)
    frames = []
    # torch.compile would keep equal sizes equal, so the first ones differ.
    for B, N in ((2, 9), (3, 11), (5, 4)):
        p = problem((B, N, 6, 7), mask=mask == "bool")
        values = tensor(p.arrays["mask"])
        values = {"bool": values.bool(), "float": values, "row": values[:, :, :1]}[mask]
        found = []
        for f in (fast, function):
            leaves = leaves_of(p)
            leaves[1] = values.clone().requires_grad_(mask != "bool")
            out = f(*leaves)
            found.append([out, *torch.autograd.grad(out.sum(), [*leaves[:1], *leaves[2:]])])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
        detached = [leaf.detach() for leaf in leaves]
        torch.testing.assert_close(fast(*detached), function(*detached))
        frames.append(counter.frame_count)
    # Numbers like eps make the first compilation start over.
    assert len(set(frames)) == 1


GUARDED = """
import numpy as np
from fusedops.samples import pair
from fusedops.trimul.op import trimul, trimul_vjp
from guarded import fill, guarded


for shape in SHAPES:
    for at_the_end, dtype, gate, direction in CALLS:
        rng = np.random.default_rng(0)
        arrays = pair(*shape, rng, gate=gate, mask=False, biases=True).values()
        arrays = [guarded(a.astype(dtype), at_the_end) for a in arrays]
        static = direction, gate, "ieee", 1e-5, 0
        a = trimul.Arguments(*arrays, *static)
        want = trimul.formula(a)
        outputs = [guarded(np.full(w.shape, np.nan, dtype), at_the_end) for w in want]
        fill(trimul, a, outputs)
        g = guarded(rng.normal(size=arrays[0].shape).astype(dtype), at_the_end)
        back = trimul_vjp.Arguments(*arrays, guarded(want[1], at_the_end), g, *static)
        want += trimul_vjp.formula(back)
        outputs += [guarded(np.full(a.shape, np.nan, dtype), at_the_end) for a in arrays]
        fill(trimul_vjp, back, outputs[2:])
        for got, value in zip(outputs, want, strict=True):
            # Of one residue the mask has next to no cotangent, a difference of larger numbers.
            limit = (1e-4 if dtype == "f4" else 1e-11) * (abs(value).max() + 0.1)
            np.testing.assert_allclose(got, value, rtol=0, atol=limit)
"""


@needs_linux
@pytest.mark.parametrize("place", FILLING, ids="-".join)
def test_kernels_touch_nothing_beyond_their_arrays(place):
    available(*place)
    shapes = [(1, 3, 5, 7), (2, 1, 9, 8), (1, 17, 4, 3), (1, 2, 40, 33)]
    calls = list(itertools.product((True, False), ("f4", "f8"), GATES, DIRECTIONS))
    if place[1] == "triton":
        # Half of the calls cover every combination of any three choices.
        calls = [call for call in calls if sum(map(operator.eq, call, calls[0])) % 2]
        shapes = shapes[:1]
    guarded.run(place, GUARDED, SHAPES=shapes, CALLS=calls)
