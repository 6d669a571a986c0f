"""The dynamic convolution's mathematics and arguments, on the reference and the kernels."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import textwrap
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fusedops
from fusedops._frame import registry
from fusedops.testing import TOLERANCE, error
from places import EXACT, HAS_TORCH, SERVE_TENSORS, interpreted, needs_torch, needs_triton

if HAS_TORCH:
    import torch

pytestmark = interpreted


class Problem(NamedTuple):
    """The arguments of a convolution, and the cotangents of its outputs."""

    x: Any
    kernels: Any
    initial_state: Any
    bias: Any
    cotangent: Any
    final_cotangent: Any
    cu_seqlens: Any
    activation: str | None

    @property
    def options(self):
        names = ("initial_state", "bias", "cu_seqlens", "activation")
        return {name: getattr(self, name) for name in names}

    @property
    def spans(self):
        """Return the row and the tokens of every sequence."""
        if self.cu_seqlens is None:
            return [(b, slice(0, self.x.shape[1])) for b in range(len(self.x))]
        return [(0, slice(*edges)) for edges in itertools.pairwise(self.cu_seqlens.tolist())]


class Results(NamedTuple):
    """The outputs, and the gradients by the names of their arguments."""

    out: Any
    final_state: Any
    x: Any
    kernels: Any
    initial_state: Any
    bias: Any


def problem(
    seed=0,
    B=2,
    T=9,
    D=3,
    W=4,
    *,
    static=False,
    state=True,
    bias=True,
    lengths=None,
    activation="silu",
    dtype="float64",
):
    rng = np.random.default_rng(seed)
    cu_seqlens, count = None, B
    if lengths is not None:
        B, T, count = 1, sum(lengths), len(lengths)
        cu_seqlens = np.cumsum([0, *lengths])
    shapes = (
        (B, T, D),
        (D, W) if static else (B, T, D, W),
        (count, D, W) if state else None,
        (D,) if bias else None,
        (B, T, D),
        (count, D, W),
    )
    arrays = [None if s is None else rng.normal(size=s).astype(dtype) for s in shapes]
    return Problem(*arrays, cu_seqlens, activation)


@st.composite
def problems(draw, **fixed):
    """Yield sequences shorter than the taps, a little longer, and as long as a kernel's chunk."""
    length = st.one_of(st.integers(0, 9), st.integers(60, 70))
    choices = {
        "seed": st.integers(0, 999),
        "B": st.integers(1, 3),
        "T": length,
        "D": st.one_of(st.integers(1, 5), st.integers(15, 34)),
        "W": st.integers(1, 8),
        "static": st.booleans(),
        "state": st.booleans(),
        "bias": st.booleans(),
        "lengths": st.one_of(st.none(), st.lists(length, min_size=1, max_size=4)),
        "activation": st.sampled_from([None, "silu"]),
        "dtype": st.sampled_from(["float32", "float64"]),
    }
    return problem(**{n: fixed[n] if n in fixed else draw(s) for n, s in choices.items()})


def given_problems(examples, **fixed):
    def decorate(test):
        test = given(problems(**fixed))(test)
        return settings(derandomize=True, deadline=None, max_examples=examples)(test)

    return decorate


def tensor(array):
    return None if array is None else torch.from_numpy(array)


def solve(place, p):
    """Return the outputs and the gradients, as arrays."""
    framework, backend = place
    options = {**p.options, "output_final_state": True, "backend": backend}
    if framework == "numpy":
        outputs, pullback = fusedops.dynamic_conv.vjp(p.x, p.kernels, **options)
        gradients = pullback(p.cotangent, p.final_cotangent)
    else:
        arrays = [a if a is None else tensor(a).requires_grad_() for a in p[:4]]
        options.update(initial_state=arrays[2], bias=arrays[3])
        outputs = fusedops.dynamic_conv(*arrays[:2], **options)
        leaves = [array for array in arrays if array is not None]
        cotangents = tensor(p.cotangent), tensor(p.final_cotangent)
        gradients = [g.numpy() for g in torch.autograd.grad(outputs, leaves, cotangents)]
        outputs = [out.detach().numpy() for out in outputs]
    gradients = iter(gradients)
    return Results(*outputs, *[None if array is None else next(gradients) for array in p[:4]])


def same(got, want):
    np.testing.assert_array_equal(got, want, strict=True)


# The sum of roundings of products of about 1 to 10, which may cancel.
ROUNDING = {"float64": 1e-12, "float32": 4e-6}


def close(got, want):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    size = max(1, np.abs(want).max(initial=0))
    assert np.abs(got - want).max(initial=0) <= ROUNDING[str(got.dtype)] * size


def agree(place, got, want):
    (same if place[1] in EXACT else close)(got, want)


@needs_torch
@given_problems(25, lengths=None, dtype="float64")
def test_the_formula_by_unfolding(quick, p):
    leaves = [None if array is None else tensor(array).requires_grad_() for array in p[:4]]
    x, kernels, state, bias = leaves
    B, T, D = x.shape
    W = kernels.shape[-1]
    past = x.new_zeros(B, W, D) if state is None else state.mT
    inputs = torch.cat([past, x], 1)
    windows = inputs[:, 1:].unfold(1, W, 1) if T else x.new_zeros(B, 0, D, W)
    h = (windows * kernels).sum(-1)
    h = h if bias is None else h + bias
    out = h if p.activation is None else torch.nn.functional.silu(h)
    final = inputs[:, T:].mT
    value = (out * tensor(p.cotangent)).sum() + (final * tensor(p.final_cotangent)).sum()
    gradients = torch.autograd.grad(value, [a for a in leaves if a is not None])
    results = [result for result in solve(quick, p) if result is not None]
    for got, want in zip(results, (out, final, *gradients), strict=True):
        close(got, want.detach().numpy())


@needs_torch
@pytest.mark.parametrize("W", [1, 2, 4, 7])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_static_kernels_are_a_depthwise_convolution(quick, W, activation):
    p = problem(W=W, T=11, static=True, state=False, activation=activation)
    x, kernels, bias = (tensor(a).requires_grad_() for a in (p.x, p.kernels, p.bias))
    padded = torch.nn.functional.pad(x.mT, (W - 1, 0))
    h = torch.nn.functional.conv1d(padded, kernels[:, None], bias, groups=3).mT
    out = h if activation is None else torch.nn.functional.silu(h)
    want = torch.autograd.grad(out, (x, kernels, bias), tensor(p.cotangent))
    got = solve(quick, p._replace(final_cotangent=np.zeros_like(p.final_cotangent)))
    close(got.out, out.detach().numpy())
    for name, gradient in zip(("x", "kernels", "bias"), want, strict=True):
        close(getattr(got, name), gradient.numpy())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_silu_of_large_numbers(place, dtype):
    """Where exp overflows, or is lost beside 1, there is neither a NaN nor a warning."""
    largest = float(np.finfo(dtype).max)
    h = np.array([-largest, -1e4, -745, -100, -88, -30, -1e-30, 0, 1e-30, 30, 88, 745, largest])
    p = problem(B=1, T=1, D=len(h), W=1, bias=False, state=False, dtype=dtype)
    cotangents = {"cotangent": np.ones_like(p.x), "final_cotangent": 0 * p.final_cotangent}
    got = solve(
        place, p._replace(x=h.astype(dtype)[None, None], kernels=1 + 0 * p.kernels, **cotangents)
    )
    e = np.exp(-np.abs(h))
    sigmoid, rest = np.where(h < 0, e, 1) / (1 + e), np.where(h < 0, 1, e) / (1 + e)
    # Numbers near the smallest normal one may lose their digits.
    near = {"rtol": TOLERANCE[dtype], "atol": 1e4 * np.finfo(dtype).tiny}
    np.testing.assert_allclose(got.out[0, 0], h * sigmoid, **near)
    np.testing.assert_allclose(got.x[0, 0], sigmoid * (1 + h * rest), **near)


@pytest.mark.parametrize("name", ["x", "kernels", "cotangent"])
@given_problems(30, state=True, bias=True)
def test_a_bad_number_reaches_nothing_but_its_window(quick, name, p):
    """It reaches later tokens forward, and earlier ones backward, of its sequence and channel."""
    spans = [(s, b, t.start, t.stop) for s, (b, t) in enumerate(p.spans) if t.start < t.stop]
    assume(spans)
    dynamic = p.kernels.ndim == 4
    assume(dynamic or name != "kernels")
    rng = np.random.default_rng(0)
    s, b, low, high = spans[rng.integers(len(spans))]
    t, d, W = rng.integers(low, high), rng.integers(p.x.shape[2]), p.kernels.shape[-1]
    spoilt = getattr(p, name).copy()
    spoilt[b, t, d] = np.nan
    got, want = solve(quick, p._replace(**{name: spoilt})), solve(quick, p)

    lost = slice(t, min(t + W, high) if name == "x" else t + 1)
    bent = p.activation is not None
    reached = Results(*[np.zeros(array.shape, bool) for array in want])
    reached.out[b, lost, d] = name != "cotangent"
    reached.final_state[s, d] = name == "x"
    reached.x[b, max(low, t - W + 1) : lost.stop, d] = name != "x" or bent
    reached.kernels[(b, lost, d) if dynamic else d] = name != "kernels" or bent
    reached.initial_state[s, d] = name != "x" or bent
    reached.bias[d] = name == "cotangent" or bent
    for after, before, there in zip(got, want, reached, strict=True):
        same(after[~there], before[~there])
    assert np.isnan(got.out[b, lost, d]).all() == (name != "cotangent")


@given_problems(20, state=True, bias=False, activation=None, dtype="float64")
def test_linear_in_the_inputs_and_in_the_kernels(quick, p):
    rng = np.random.default_rng(1)
    other = p._replace(x=rng.normal(size=p.x.shape), initial_state=-p.initial_state[:, ::-1])
    both = p._replace(
        x=3 * p.x - 0.7 * other.x, initial_state=3 * p.initial_state - 0.7 * other.initial_state
    )
    one, two, sum_of_both = solve(quick, p), solve(quick, other), solve(quick, both)
    close(sum_of_both.out, 3 * one.out - 0.7 * two.out)
    close(sum_of_both.final_state, 3 * one.final_state - 0.7 * two.final_state)
    close(sum_of_both.kernels, 3 * one.kernels - 0.7 * two.kernels)
    other = p._replace(kernels=rng.normal(size=p.kernels.shape))
    both = p._replace(kernels=3 * p.kernels - 0.7 * other.kernels)
    close(solve(quick, both).out, 3 * one.out - 0.7 * solve(quick, other).out)


@given_problems(20, state=True, bias=False, activation=None, dtype="float64")
def test_the_gradient_is_the_transpose(quick, p):
    r = solve(quick, p)
    along, along_final = np.vdot(p.cotangent, r.out), np.vdot(p.final_cotangent, r.final_state)
    back = np.vdot(r.x, p.x) + np.vdot(r.initial_state, p.initial_state)
    size = np.linalg.norm(p.cotangent) * np.linalg.norm(r.out)
    size += np.linalg.norm(p.final_cotangent) * np.linalg.norm(r.final_state)
    assert abs(along - np.vdot(r.kernels, p.kernels)) <= 1e-14 * size
    assert abs(along + along_final - back) <= 1e-14 * size


def part(p, s):
    """Return the problem of one sequence alone."""
    b, tokens = p.spans[s]

    def row(array):
        return None if array is None else array[s : s + 1]

    return p._replace(
        x=p.x[b : b + 1, tokens],
        kernels=p.kernels if p.kernels.ndim == 2 else p.kernels[b : b + 1, tokens],
        initial_state=row(p.initial_state),
        cotangent=p.cotangent[b : b + 1, tokens],
        final_cotangent=row(p.final_cotangent),
        cu_seqlens=None,
    )


def own(p, s, results):
    """Return one sequence's share of all results, in the order of Results."""
    b, tokens = p.spans[s]
    gradient = results.initial_state
    return [
        results.out[b : b + 1, tokens],
        results.final_state[s : s + 1],
        results.x[b : b + 1, tokens],
        results.kernels[b : b + 1, tokens] if p.kernels.ndim == 4 else None,
        None if gradient is None else gradient[s : s + 1],
    ]


@given_problems(60)
def test_every_sequence_is_computed_as_if_alone(quick, p):
    """Sequences may be packed or in a batch; gradients of shared arguments are sums over them."""
    together = solve(quick, p)
    alone = [solve(quick, part(p, s)) for s in range(len(p.spans))]
    for s, results in enumerate(alone):
        for got, want in zip(own(p, s, together), results, strict=False):
            if got is not None:
                agree(quick, got, want)
    if p.x.dtype == np.float64 and p.kernels.ndim == 2:
        close(together.kernels, sum(r.kernels for r in alone))
    if p.x.dtype == np.float64 and p.bias is not None:
        close(together.bias, sum(r.bias for r in alone))


@needs_triton
def test_packed_sequences_equal_each_alone_when_interpreted():
    place = ("torch", "triton")
    p = problem(lengths=[0, 2, 5, 1])
    together = solve(place, p)
    for s in range(4):
        for got, want in zip(own(p, s, together), solve(place, part(p, s)), strict=False):
            close(got, want)


def all_but(kept, array):
    """Return a copy of an array with NaN in all elements but the kept ones."""
    if array is None:
        return None
    spoilt = np.full_like(array, np.nan)
    spoilt[kept] = array[kept]
    return spoilt


@given_problems(30)
def test_nothing_crosses_a_boundary(quick, p):
    """NaN in all other sequences changes no bit of a sequence's own results."""
    want = solve(quick, p)
    for s, tokens in enumerate(p.spans):
        alone = p._replace(
            x=all_but(tokens, p.x),
            kernels=p.kernels if p.kernels.ndim == 2 else all_but(tokens, p.kernels),
            initial_state=all_but(s, p.initial_state),
            cotangent=all_but(tokens, p.cotangent),
            final_cotangent=all_but(s, p.final_cotangent),
        )
        for one, other in zip(own(p, s, solve(quick, alone)), own(p, s, want), strict=True):
            if one is not None:
                same(one, other)


@given_problems(20, state=True)
def test_no_tap_reads_the_oldest_input_of_a_state(quick, p):
    state = p.initial_state.copy()
    state[..., 0] = np.nan
    got, want = solve(quick, p._replace(initial_state=state)), solve(quick, p)
    same(got.out, want.out)
    same(got.x, want.x)
    same(got.kernels, want.kernels)
    for s, (_, tokens) in enumerate(p.spans):
        if tokens.start < tokens.stop:
            same(got.final_state[s], want.final_state[s])
            assert not got.initial_state[s, :, 0].any()
        else:
            same(got.final_state[s], state[s])
            same(got.initial_state[s], p.final_cotangent[s])


def in_chunks(place, p, edges, arrays=None):
    """Return the convolution of one chunk after the other, and the last state."""
    framework, backend = place
    x, kernels, state, bias = arrays or [tensor(a) if framework == "torch" else a for a in p[:4]]
    outs = []
    for low, high in itertools.pairwise(edges):
        out, state = fusedops.dynamic_conv(
            x[:, low:high],
            kernels if kernels.ndim == 2 else kernels[:, low:high],
            initial_state=state,
            bias=bias,
            output_final_state=True,
            activation=p.activation,
            backend=backend,
        )
        outs.append(out)
    return outs, state


def check_chunks(place, p, edges):
    want = solve(place, p)
    outs, state = in_chunks(place, p, edges)
    agree(place, np.concatenate(outs, 1), want.out)
    same(np.asarray(state), want.final_state)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("T", "size"), [(2, 1), (9, 3), (9, 4)])
def test_prefill_in_chunks(place, T, size, state):
    p = problem(T=T, state=state)
    check_chunks(place, p, [0, *range(size, T, size), T])


@given_problems(40, lengths=None)
def test_prefill_in_chunks_of_any_sizes(quick, p):
    T, W = p.x.shape[1], p.kernels.shape[-1]
    rng = np.random.default_rng(T)
    size = rng.choice([1, 3, W])
    check_chunks(quick, p, [0, *range(size, T, size), T])
    check_chunks(quick, p, [0, *sorted(rng.integers(0, T + 1, 4).tolist()), T])


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_gradients_through_chunks(torch_backend, size, static, state):
    p = problem(static=static, state=state, T=10)
    arrays = [None if a is None else tensor(a).requires_grad_() for a in p[:4]]
    place = ("torch", torch_backend)
    outs, final = in_chunks(place, p, [0, *range(size, 10, size), 10], arrays)
    gradients = torch.autograd.grad(
        (torch.cat(outs, 1), final),
        [a for a in arrays if a is not None],
        (tensor(p.cotangent), tensor(p.final_cotangent)),
    )
    want = [gradient for gradient in solve(place, p)[2:] if gradient is not None]
    for got, gradient in zip(gradients, want, strict=True):
        close(got.numpy(), gradient)


def step(place, x, state, kernels, **options):
    """Return the step's result for arrays, as an array; the state is the framework's."""
    if place[0] == "torch":
        x, kernels = tensor(x), tensor(kernels)
        options = {n: tensor(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    return np.asarray(fusedops.dynamic_conv_step(x, state, kernels, backend=place[1], **options))


@given_problems(25, lengths=None, state=True)
def test_steps_equal_the_convolution(quick, p):
    T = min(p.x.shape[1], 9)
    p = p._replace(x=p.x[:, :T].copy(), cotangent=p.cotangent[:, :T].copy())
    p = p if p.kernels.ndim == 2 else p._replace(kernels=p.kernels[:, :T].copy())
    want = solve(quick, p)
    state = p.initial_state.copy()
    kept = tensor(state) if quick[0] == "torch" else state
    for t in range(T):
        kernels = p.kernels if p.kernels.ndim == 2 else p.kernels[:, t]
        options = {"bias": p.bias, "activation": p.activation}
        x = p.x[:, t] if t % 2 else p.x[:, t : t + 1]
        out = step(quick, x, kept, kernels, **options)
        assert out.shape == x.shape
        agree(quick, out.reshape(want.out[:, t].shape), want.out[:, t])
    same(state, want.final_state)


VIEWS = {
    "slice": lambda cache: cache[1, 1:3, 2:7, 3:7],
    "transpose": lambda cache: cache[1, 1:3, 2:6, 3:8].swapaxes(1, 2),
    "strided": lambda cache: cache[1, ::3, :9:2, 1::2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("static", [False, True])
def test_a_state_is_updated_where_it_lies(place, view, static):
    """A state may lie in a cache of many, whose other elements stay."""
    view = VIEWS[view]
    p = problem(T=3, D=5, static=static)
    cache, alone = np.full((3, 4, 9, 8), 7.0), p.initial_state.copy()
    view(cache)[...] = alone
    whole, other = (tensor(a) if place[0] == "torch" else a for a in (cache, alone))
    for t in range(3):
        kernels = p.kernels if static else p.kernels[:, t]
        options = {"bias": p.bias, "activation": "silu"}
        out = step(place, p.x[:, t], view(whole), kernels, **options)
        same(out, step(place, p.x[:, t], other, kernels, **options))
        same(view(cache), alone)
    view(cache)[...] = 7.0
    assert (cache == 7.0).all()


def test_a_state_may_be_stored_backwards(backend):
    p = problem(T=1)
    state = p.initial_state.copy()
    stored = state[::-1, ::-1, ::-1].copy()
    arguments = {"kernels": p.kernels[:, 0], "backend": backend}
    view = stored[::-1, ::-1, ::-1]
    same(
        fusedops.dynamic_conv_step(p.x, view, **arguments),
        fusedops.dynamic_conv_step(p.x, state, **arguments),
    )
    same(view, state)


def test_a_state_of_one_row_may_have_any_stride(backend):
    state = np.ones((3, 4))
    fusedops.dynamic_conv_step(np.full((1, 3), 2.0), state[None], np.ones((3, 4)), backend=backend)
    same(state[:, -1], np.full(3, 2.0))


def shifted(x, state, kernels, bias, position):
    """Return the convolution of a sequence's tokens (T, D), and its state afterwards, in loops."""
    (count, D), length, width = x.shape, state.shape[1], kernels.shape[-1]
    place = (lambda p: (position + p) % length) if position is not None else None
    history = {p: state[:, p if place is None else place(p)] for p in range(-length, 0)}
    history |= {t: x[t] for t in range(count)}
    out, after = np.zeros((count, D)), state.copy()
    for t in range(count):
        taps = kernels if kernels.ndim == 2 else kernels[t]
        for w in range(width):
            out[t] += taps[:, w] * history[t + w - width + 1]
    for p in range(count - length, count):
        after[:, (p - count) if place is None else place(p)] = history[p]
    return out + bias, after


@pytest.mark.parametrize("layout", ["tokens first", "channels first"])
@pytest.mark.parametrize(
    ("count", "length", "circular"),
    [(1, 4, False), (1, 3, False), (3, 7, False), (5, 3, False), (2, 5, True), (6, 4, True)],
)
def test_a_step_of_paged_states_equals_loops(place, count, length, circular, layout):
    """Slots, several tokens and circular buffers do what the loop over one sequence does."""
    rng = np.random.default_rng(count)
    B, D, W, N = 4, 8, 4, 7
    x, state, bias = (
        rng.normal(size=(B, count, D)),
        rng.normal(size=(N, D, length)),
        rng.normal(size=D),
    )
    kernels, bias = rng.normal(size=(B, count, D, W)), rng.normal(size=D)
    slots = np.array([5, -1, 0, 3], np.int32)
    # Padding may have any position, and no sum of a large one may overflow.
    positions = np.array([3, -2, 1000, 2**63 - 2]) if circular else None
    if layout == "channels first":
        x = x.swapaxes(1, 2).copy().swapaxes(1, 2)
        state = state.swapaxes(1, 2).copy().swapaxes(1, 2)
    want, after = np.zeros(x.shape), state.copy()
    for b, slot in enumerate(slots):
        if slot >= 0:
            position = None if positions is None else int(positions[b])
            want[b], after[slot] = shifted(x[b], state[slot], kernels[b], bias, position)
    options = {"bias": bias, "slots": slots, "positions": positions}
    kept = tensor(state) if place[0] == "torch" else state
    out = step(place, x, kept, kernels, **options)
    close(out, want)
    same(np.asarray(kept), after)


def test_the_activation_of_a_sum_beyond_the_largest_float_has_its_limit(place):
    """In float32, where float64 has finite results; a positive sum is infinite."""
    values = np.array([3e38, 1.0])
    x = np.tile(values, (1, 3, 1)).astype("f4")
    kernels = np.broadcast_to(np.array([[-1.0, -2.0], [1.0, 2.0]], "f4"), (1, 3, 2, 2)).copy()
    state, weight = np.zeros((1, 2, 2), "f4"), kernels.reshape(3, 4)[:1].T.copy()
    hidden, dout = np.ones((1, 3, 1), "f4"), np.full((1, 3, 2), 1e-3, "f4")
    for op, arguments in (
        (fusedops.dynamic_conv, (x, kernels)),
        (fusedops.dynamic_conv, (x, kernels[0, 0].copy())),
        (fusedops.dynamic_conv_generated, (x, hidden, weight)),
    ):
        found = []
        for backend, dtype in ((place, "f4"), (("numpy", "numpy"), "f8")):
            given = [array.astype(dtype) for array in arguments]
            options = {"activation": "silu", "backend": backend[1]}
            if backend[0] == "numpy":
                out, pullback = op.vjp(*given, **options)
                found.append([out, *pullback(dout.astype(dtype))])
                continue
            leaves = [tensor(array).requires_grad_() for array in given]
            out = op(*leaves, **options)
            got = torch.autograd.grad(out, leaves, tensor(dout), create_graph=True)
            found.append([array.detach().numpy() for array in (out, *got)])
            bent = torch.autograd.grad(sum(1e-3 * one.sum() for one in got), leaves)
            assert all(one.isfinite().all() for one in bent)
        for got, want in zip(*found, strict=True):
            assert np.isfinite(want).all()
            np.testing.assert_allclose(got, want, rtol=1e-5)
    got = step(
        place,
        x[:, 0],
        tensor(state) if place[0] == "torch" else state,
        kernels[:, 0],
        activation="silu",
    )
    assert np.asarray(got).ravel().tolist()[0] == 0


def test_a_state_may_be_wider_than_the_tokens(place):
    """A float64 state takes float32 tokens, and wider kernels don't change a state's dtype."""
    p = problem(T=3)
    narrow = p.x.astype("f4"), p.kernels.astype("f4")
    for state_dtype, kernels in (("f8", narrow[1]), ("f4", p.kernels)):
        state = p.initial_state.astype(state_dtype)
        kept = tensor(state) if place[0] == "torch" else state
        want = p._replace(x=narrow[0], kernels=kernels, initial_state=state.copy())
        want = solve(place, want._replace(final_cotangent=p.final_cotangent.astype(state_dtype)))
        for t in range(3):
            options = {"bias": p.bias, "activation": "silu"}
            out = step(place, narrow[0][:, t], kept, kernels[:, t], **options)
            agree(place, out, want.out[:, t])
        same(state, want.final_state)


def test_a_step_fills_out(place):
    p = problem(T=1)
    state, other = p.initial_state.copy(), p.initial_state.copy()
    x, kernels, out = p.x[:, 0], p.kernels[:, 0], np.empty((2, 3))
    arrays = (x, state, kernels, out)
    if place[0] == "torch":
        arrays = [tensor(a) for a in arrays]
        other = tensor(other)
    x, kept, kernels, filled = arrays
    options = {"activation": "swish", "backend": place[1]}
    assert fusedops.dynamic_conv_step(x, kept, kernels, out=filled, **options) is filled
    same(out, np.asarray(fusedops.dynamic_conv_step(x, other, kernels, **options)))
    same(state, np.asarray(other))


@needs_triton
@pytest.mark.parametrize("lengths", [(5, 0, 130, 64, 0), (1,), (0, 0), (63, 65)], ids=str)
def test_boundaries_that_the_host_never_reads(lengths):
    """The list of chunks has as many as there can be; the others do nothing in Triton's kernels."""
    p = problem(D=2, lengths=lengths)
    starts = torch.tensor(p.cu_seqlens)
    unread = fusedops.Sequences.on_device(starts, num_tokens=int(starts[-1]))
    read = fusedops.Sequences(starts)
    assert (unread.num_sequences, unread.num_tokens) == (read.num_sequences, read.num_tokens)
    same(unread.cu_seqlens, read.cu_seqlens)
    same(unread.chunks[: len(read.chunks)], read.chunks)
    assert (unread.chunks[len(read.chunks) :, 1] == read.num_tokens).all()
    results = (solve(("torch", "triton"), p._replace(cu_seqlens=cu)) for cu in (unread, read))
    for got, want in zip(*results, strict=True):
        same(got, want)


@needs_torch
def test_boundaries_that_the_host_never_reads_stay_inside():
    unread = fusedops.Sequences.on_device(torch.tensor([3, 90, -5, 70, 500]), num_tokens=100)
    same(unread.cu_seqlens, np.array([0, 90, 90, 90, 100]))
    assert (unread.chunks[:, 1] <= 100).all()


def channels_first(array):
    """Return a view (B, T, D) of an array that lies in memory as (B, D, T)."""
    return array.swapaxes(1, 2).copy().swapaxes(1, 2)


@pytest.mark.interpreted_slow(dtype="float64")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("T", "D", "W", "lengths"),
    [(72, 40, 4, None), (70, 33, 5, None), (40, 8, 1, None), (96, 32, 4, (17, 0, 66, 13))],
    ids=["squares", "edges", "one tap", "packed"],
)
def test_channels_may_come_before_tokens(place, T, D, W, lengths, dtype):
    """Tokens and cotangents (B, D, T) are read where they lie, and give the same bits."""
    p = problem(T=T, D=D, W=W, lengths=lengths, dtype=dtype)
    want = solve(place, p)
    turned = p._replace(x=channels_first(p.x), cotangent=channels_first(p.cotangent))
    for q in (turned, turned._replace(x=p.x), turned._replace(cotangent=p.cotangent)):
        for got, value in zip(solve(place, q), want, strict=True):
            agree(place, got, value)


@pytest.mark.parametrize(
    ("T", "D", "lengths"),
    [(72, 32, None), (70, 5, None), (73, 8, (3, 0, 70))],
    ids=["squares", "edges", "packed"],
)
@pytest.mark.parametrize("layout", [np.copy, channels_first], ids=["BTD", "BDT"])
def test_a_residual_is_added_after_the_activation(place, T, D, lengths, layout):
    framework, backend = place
    p = problem(T=T, D=D, lengths=lengths)
    residual = layout(np.random.default_rng(1).normal(size=p.x.shape))
    given = {"cu_seqlens": p.cu_seqlens, "activation": "silu", "backend": backend}
    want = p.x, p.kernels, residual
    if framework == "torch":
        want = [tensor(array) for array in want]
    x, kernels, more = want
    out = fusedops.dynamic_conv(x, kernels, residual=more, **given)
    close(np.asarray(out), np.asarray(fusedops.dynamic_conv(x, kernels, **given)) + residual)
    twice = fusedops.dynamic_conv(x, kernels, residual=x, **given)
    close(np.asarray(twice), np.asarray(fusedops.dynamic_conv(x, kernels, **given)) + p.x)


@needs_torch
def test_the_cotangent_of_a_residual_is_that_of_the_result(torch_backend):
    """Also in later passes, which repeat the first one's call, and where nothing else is asked."""
    p = problem()
    x, kernels = (tensor(array).requires_grad_() for array in (p.x, p.kernels))
    options = {"activation": "silu", "backend": torch_backend}
    for seed in range(3):
        residual = torch.randn(x.shape, dtype=torch.float32, requires_grad=True)
        cotangent = tensor(np.random.default_rng(seed).normal(size=p.x.shape))
        out = fusedops.dynamic_conv(x, kernels, residual=residual, **options)
        *found, dresidual = torch.autograd.grad(out, (x, kernels, residual), cotangent)
        plain = fusedops.dynamic_conv(x, kernels, **options)
        want = torch.autograd.grad(plain, (x, kernels), cotangent)
        assert all(map(torch.equal, (*found, dresidual), (*want, cotangent.float())))
        arrays = x.detach(), kernels.detach()
        alone = fusedops.dynamic_conv(*arrays, residual=residual, **options)
        (dresidual,) = torch.autograd.grad(alone, residual, cotangent, create_graph=True)
        assert torch.equal(dresidual, cotangent.float())


def test_a_final_state_alone_leaves_a_residual_no_cotangent_but_zeros(backend):
    p = problem()
    out, pullback = fusedops.dynamic_conv.vjp(
        p.x, p.kernels, residual=p.x, output_final_state=True, backend=backend
    )
    *_, dresidual = pullback(None, np.ones_like(out[1]))
    assert np.array_equal(dresidual, np.zeros_like(p.x))


@needs_torch
def test_no_gradient_keeps_a_residual():
    x, kernels = torch.ones(1, 4, 2, requires_grad=True), torch.ones(2, 3)
    residual = torch.ones(1, 4, 2)
    gone = weakref.ref(residual)
    out = fusedops.dynamic_conv(x, kernels, residual=residual)
    del residual
    assert gone() is None
    out.sum().backward()


def test_a_residual_of_a_step(place):
    """Padding has none; a residual of another number of tokens is refused."""
    framework, backend = place
    rng = np.random.default_rng(0)
    x, residual, state = (rng.normal(size=shape) for shape in ((3, 2, 4), (3, 2, 4), (5, 4, 3)))
    slots = np.array([4, -1, 0])
    of = np.copy if framework == "numpy" else lambda array: tensor(array.copy())
    x, residual, kernels, slots, own, other = map(
        of, (x, residual, rng.normal(size=(4, 3)), slots, state, state)
    )
    given = {"slots": slots, "activation": "silu", "backend": backend}
    message = r"residual has shape \(3, 4\); it should be \(3, 2, 4\)"
    with pytest.raises(ValueError, match=message):
        fusedops.dynamic_conv_step(x, own, kernels, residual=residual[:, 0], **given)
    same(np.asarray(own), state)
    out = fusedops.dynamic_conv_step(x, own, kernels, residual=residual, **given)
    want = np.asarray(fusedops.dynamic_conv_step(x, other, kernels, **given))
    same(np.asarray(own), np.asarray(other))
    close(np.asarray(out), want + np.asarray(residual) * (np.asarray(slots) >= 0)[:, None, None])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_broadcast_arrays(backend, activation):
    """Kernels are shared by tokens, rows by a batch, and a cotangent of ones is expanded."""
    p = problem(T=70, static=True, activation=activation)
    spread = p._replace(
        x=np.broadcast_to(p.x[:1], p.x.shape),
        kernels=np.broadcast_to(p.kernels, (*p.x.shape, 4)),
        initial_state=np.broadcast_to(p.initial_state[:1], p.initial_state.shape),
        bias=np.broadcast_to(p.bias[:1], p.bias.shape),
        cotangent=np.broadcast_to(1.0, p.x.shape),
        final_cotangent=np.broadcast_to(1.0, p.initial_state.shape),
    )
    place = ("numpy", backend)
    copies = Problem(*(a.copy() for a in spread[:6]), None, activation)
    for got, want in zip(solve(place, spread), solve(place, copies), strict=True):
        agree(place, got, want)
    agree(place, solve(place, spread).out, solve(place, copies._replace(kernels=p.kernels)).out)


@needs_torch
def test_heads_of_a_projection(torch_backend):
    """Tokens and kernels are slices and views of one product, as in a model."""
    B, T, D, W = 2, 9, 3, 4
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(B, T, D * (W + 2), generator=generator, dtype=torch.float64)
    wide.requires_grad_()
    x, kernels = wide[..., D : 2 * D], wide[..., 2 * D :].unflatten(-1, (D, W))
    channels_first = x.detach().mT.contiguous().mT
    options = {"activation": "silu", "backend": torch_backend}
    out = fusedops.dynamic_conv(x, kernels, **options)
    (gradient,) = torch.autograd.grad(out.square().sum(), wide)
    copies = [a.detach().clone(memory_format=torch.contiguous_format) for a in (x, kernels)]
    for array in copies:
        array.requires_grad_()
    want = fusedops.dynamic_conv(*copies, **options)
    dx, dkernels = torch.autograd.grad(want.square().sum(), copies)
    agree((None, torch_backend), out.detach().numpy(), want.detach().numpy())
    agree((None, torch_backend), gradient[..., D : 2 * D].numpy(), dx.numpy())
    agree((None, torch_backend), gradient[..., 2 * D :].numpy(), dkernels.flatten(2).numpy())
    assert not gradient[..., :D].any()
    out = fusedops.dynamic_conv(channels_first, copies[1].detach(), **options)
    agree((None, torch_backend), out.numpy(), want.detach().numpy())


DTYPES = [
    ("f4", "f4", "f4", "f4"),
    ("f4", "f8", "f4", "f4"),
    ("f8", "f4", "f4", "f4"),
    ("f4", "f4", "f8", "f4"),
    ("f4", "f4", "f4", "f8"),
]


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_the_result_has_the_dtype_of_x(quick, dtypes):
    """Sums are of float32 or better for every dtype of the result."""
    p = problem()
    mixed = [a.astype(dtype) for a, dtype in zip(p[:4], dtypes, strict=True)]
    final = np.promote_types(dtypes[0], dtypes[2])
    cotangents = p.cotangent.astype(dtypes[0]), p.final_cotangent.astype(final)
    got = solve(quick, Problem(*mixed, *cotangents, None, "silu"))
    wide = [array.astype("f8") for array in (*mixed, *cotangents)]
    want = solve(quick, Problem(*wide, None, "silu"))
    for value, reference, dtype in zip(got, want, (dtypes[0], final, *dtypes), strict=True):
        assert value.dtype == dtype
        assert error(value, reference) <= TOLERANCE["float32"]


SIXTEEN = ["bfloat16", "float16"]
MIXED = [
    ("bfloat16", "float32", None, None),
    ("float32", "bfloat16", None, None),
    ("bfloat16", "bfloat16", "float32", None),
    ("bfloat16", "bfloat16", None, "float32"),
    ("bfloat16", "float16", None, None),
    ("float16", "float16", "float16", "float64"),
]


def tensors_of(p, dtypes):
    return [
        None if dtype is None else tensor(a).to(getattr(torch, dtype)).requires_grad_()
        for a, dtype in zip(p[:4], dtypes, strict=True)
    ]


@needs_torch
@pytest.mark.parametrize("dtypes", MIXED, ids=lambda d: "-".join(map(str, d)))
def test_the_result_has_the_dtype_of_the_tensor_x(torch_backend, dtypes):
    """Every gradient has its tensor's dtype; x and the old state promote to the new state's."""
    tensors = tensors_of(problem(), dtypes)
    x, kernels, state, bias = tensors
    out, final = fusedops.dynamic_conv(
        x, kernels, initial_state=state, bias=bias, output_final_state=True, backend=torch_backend
    )
    present = [a for a in tensors if a is not None]
    assert out.dtype == x.dtype
    assert final.dtype == (x.dtype if state is None else torch.promote_types(x.dtype, state.dtype))
    gradients = torch.autograd.grad(out.sum() + final.sum(), present)
    assert [g.dtype for g in gradients] == [a.dtype for a in present]
    assert all(g.isfinite().all() for g in gradients)


@needs_torch
@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_sixteen_bits_are_float32_rounded_once(torch_backend, activation, dtype):
    """Both values and gradients are rounded once."""
    dtype = getattr(torch, dtype)
    p = problem(T=70, D=5)
    narrow = [tensor(array).to(dtype) for array in p[:6]]
    results = []
    for arrays in (narrow, [array.float() for array in narrow]):
        leaves = [array.requires_grad_() for array in arrays[:4]]
        x, kernels, state, bias = leaves
        options = {"initial_state": state, "bias": bias, "output_final_state": True}
        options.update(activation=activation, backend=torch_backend)
        outputs = fusedops.dynamic_conv(x, kernels, **options)
        gradients = torch.autograd.grad(outputs, leaves, arrays[4:])
        results.append([a.detach() for a in (*outputs, *gradients)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got, want.to(dtype))


@needs_torch
def test_every_bfloat16_is_rounded_to_even(torch_backend):
    """Multiply all bfloat16 numbers by taps that put a fourth of the products halfway."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    # NumPy warns where it meets a signaling NaN.
    x = bits.where(bits == bits, torch.nan).reshape(1, 64, 1024)
    for tap in (1.0, 1.5, 1.0078125, 2.0**-10):
        kernels = torch.full((1024, 1), tap, dtype=torch.bfloat16)
        with np.errstate(over="ignore"):
            got = fusedops.dynamic_conv(x, kernels, backend=torch_backend)
        want = (x.float() * kernels[:, 0].float()).bfloat16()
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@needs_torch
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_steps_of_sixteen_bits(torch_backend, dtype):
    p = problem(T=5)
    x, kernels, state, bias = (tensor(a).to(getattr(torch, dtype)) for a in p[:4])
    options = {"bias": bias, "activation": "silu", "backend": torch_backend}
    want, final = fusedops.dynamic_conv(
        x, kernels, initial_state=state, output_final_state=True, **options
    )
    for t in range(5):
        out = fusedops.dynamic_conv_step(x[:, t], state, kernels[:, t], **options)
        assert torch.equal(out, want[:, t])
    assert torch.equal(state, final)


X, KERNELS = np.ones((2, 5, 3)), np.ones((2, 5, 3, 4))


def frozen(array):
    array.flags.writeable = False
    return array


def test_out_shares_no_memory_with_the_state():
    state = np.ones((2, 3, 4))
    out = state.reshape(-1)[6:12].reshape(2, 3)
    with pytest.raises(ValueError, match="dynamic_conv_step: out shares memory with state"):
        fusedops.dynamic_conv_step(X[:, 0], state, KERNELS[:, 0], out=out)
    assert (state == 1).all()


@needs_torch
@pytest.mark.parametrize("written", ["state", "out"])
@pytest.mark.parametrize("backend", SERVE_TENSORS)
def test_autograd_notices_what_is_written_in_place(backend, written):
    """Writing to a tensor that another backward needs gives an error, not a wrong gradient."""
    state, out = torch.ones(2, 3, 4), torch.ones(2, 3)
    weight = torch.ones((), requires_grad=True)
    loss = (weight * {"state": state, "out": out}[written]).sum()
    x, kernels = torch.ones(2, 3), torch.ones(3, 4)
    fusedops.dynamic_conv_step(x, state, kernels, out=out, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


TOKENS = np.ones((1, 10, 3))
PACKED = {"x": TOKENS, "kernels": np.ones((1, 10, 3, 4))}
BAD = {
    "x of rank 2": ({"x": X[0]}, ValueError, r"x has shape \(5, 3\); it should be \(B, T, D\)"),
    "x of rank 4": ({"x": X[None]}, ValueError, r"x has shape \(1, 2, 5, 3\)"),
    "kernels of rank 1": ({"kernels": KERNELS[0, 0, 0]}, ValueError, r"kernels has shape \(4,\)"),
    "kernels of rank 3": (
        {"kernels": KERNELS[0]},
        ValueError,
        r"kernels has shape \(5, 3, 4\); it should be \(3, W\) or \(2, 5, 3, W\)",
    ),
    "kernels of another B": ({"kernels": KERNELS[:1]}, ValueError, r"should be \(2, 5, 3, W\)"),
    "kernels of another T": ({"kernels": KERNELS[:, :4]}, ValueError, r"shape \(2, 4, 3, 4\)"),
    "kernels of another D": ({"kernels": KERNELS[:, :, 1:]}, ValueError, r"shape \(2, 5, 2, 4\)"),
    "static of another D": (
        {"kernels": np.ones((4, 3))},
        ValueError,
        r"kernels has shape \(4, 3\); it should be \(3, W\)",
    ),
    "no taps": ({"kernels": KERNELS[..., :0]}, ValueError, r"it should be \(2, 5, 3, W\), W > 0"),
    "no static taps": ({"kernels": np.ones((3, 0))}, ValueError, r"kernels has shape \(3, 0\)"),
    "bias of another D": ({"bias": np.ones(4)}, ValueError, r"bias has shape \(4,\); it .* \(3,\)"),
    "bias of rank 2": ({"bias": np.ones((1, 3))}, ValueError, r"bias has shape \(1, 3\)"),
    "bias a number": ({"bias": 1.0}, ValueError, r"bias has shape \(\)"),
    "state of another B": (
        {"initial_state": np.ones((3, 3, 4))},
        ValueError,
        r"initial_state has shape \(3, 3, 4\); it should be \(2, 3, 4\)",
    ),
    "state of another W": ({"initial_state": np.ones((2, 3, 3))}, ValueError, "initial_state has"),
    "state transposed": ({"initial_state": np.ones((2, 4, 3))}, ValueError, "initial_state has"),
    "state of the batch": (
        {**PACKED, "cu_seqlens": [0, 5, 10], "initial_state": np.ones((1, 3, 4))},
        ValueError,
        r"initial_state has shape \(1, 3, 4\); it should be \(2, 3, 4\)",
    ),
    "starts late": ({**PACKED, "cu_seqlens": [1, 10]}, ValueError, r"cu_seqlens\[0\] is 1; it sho"),
    "starts below": ({**PACKED, "cu_seqlens": [-1, 10]}, ValueError, r"cu_seqlens\[0\] is -1"),
    "ends early": ({**PACKED, "cu_seqlens": [0, 9]}, ValueError, "ends at 9; it should end at 10"),
    "ends late": ({**PACKED, "cu_seqlens": [0, 11]}, ValueError, "ends at 11; it should end at 10"),
    "no sequence": ({**PACKED, "cu_seqlens": [0]}, ValueError, "cu_seqlens ends at 0"),
    "decreasing": (
        {**PACKED, "cu_seqlens": [0, 4, 3, 2, 10]},
        ValueError,
        r"cu_seqlens\[2\] is 3; it should be at least 4, the one before",
    ),
    "float": ({**PACKED, "cu_seqlens": [0.0, 10.0]}, TypeError, "cu_seqlens has dtype float64"),
    "bool": ({**PACKED, "cu_seqlens": [False, True]}, TypeError, "cu_seqlens has dtype bool"),
    "lengths": ({**PACKED, "cu_seqlens": 10}, ValueError, r"cu_seqlens has shape \(\)"),
    "rank 2": ({**PACKED, "cu_seqlens": [[0, 10]]}, ValueError, r"cu_seqlens has shape \(1, 2\)"),
    "empty": ({**PACKED, "cu_seqlens": np.array([], int)}, ValueError, r"cu_seqlens has .*\(0,\)"),
    "a batch packed": (
        {"cu_seqlens": [0, 5]},
        ValueError,
        r"x has shape \(2, 5, 3\); with cu_seqlens it should be \(1, T, D\)",
    ),
    "activation": ({"activation": "gelu"}, ValueError, "activation is 'gelu'; it should be one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    changes, kind, message = BAD[name]
    arguments = {"x": X, "kernels": KERNELS, **changes}
    before = copy.deepcopy(arguments)
    for function in (
        fusedops.dynamic_conv, fusedops.dynamic_conv.vjp, fusedops.dynamic_conv.explain,
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            function(**arguments)
    for argument, value in before.items():
        np.testing.assert_array_equal(arguments[argument], value)


STATE = np.ones((2, 3, 4))
BAD_STEP = {
    "x of rank 1": ({"x": np.ones(3)}, ValueError, r"x has shape \(3,\); it should be \(B, D\) or"),
    "x of integers": ({"x": np.ones((2, 3), int)}, TypeError, "x has dtype int64"),
    "x wider": (
        {"state": np.ones((2, 3, 4), "f4")},
        TypeError,
        "state has dtype float32; it shoul",
    ),
    "kernels of rank 4": ({"kernels": KERNELS}, ValueError, r"kernels has shape \(2, 5, 3, 4\)"),
    "kernels of another B": ({"kernels": np.ones((1, 3, 4))}, ValueError, "kernels has shape"),
    "a state too short": (
        {"kernels": np.ones((3, 6))},
        ValueError,
        "state has 4 inputs of a sequence; it should have at least 5, one fewer than kernels have",
    ),
    "float slots": ({"slots": np.ones(2)}, TypeError, "slots has dtype float64; it should be int"),
    "slots of another B": (
        {"slots": np.array([0])},
        ValueError,
        r"slots has shape \(1,\); it should",
    ),
    "a slot too many": (
        {"slots": np.array([0, 2])},
        ValueError,
        "slots has 2; it should be below 2",
    ),
    "a slot twice": ({"slots": np.array([1, 1])}, ValueError, "slots has 1 twice; every sequence"),
    "float positions": ({"positions": np.ones(2)}, TypeError, "positions has dtype float64; it sh"),
    "a negative position": (
        {"positions": np.array([3, -2])},
        ValueError,
        "positions has -2; it should be at least 0, the number of tokens before",
    ),
    "no room for positions": (
        {"state": np.ones((2, 3, 0)), "kernels": np.ones((3, 1)), "positions": np.array([0, 1])},
        ValueError,
        "positions is given; state should then have inputs",
    ),
    "no taps": ({"kernels": np.ones((3, 0))}, ValueError, "it should be .*, W > 0"),
    "bias": ({"bias": np.ones(2)}, ValueError, r"bias has shape \(2,\); it should be \(3,\)"),
    "state of another B": ({"state": np.ones((1, 3, 4))}, ValueError, "state has shape"),
    "state a list": ({"state": np.ones((2, 3, 4)).tolist()}, TypeError, "state is a list; it sho"),
    "no state": ({"state": None}, TypeError, "state is None; it should be an array"),
    "state of integers": ({"state": np.ones((2, 3, 4), int)}, TypeError, "state has dtype int64"),
    "state frozen": ({"state": frozen(np.ones((2, 3, 4)))}, ValueError, "state is read-only"),
    "state expanded": (
        {"state": np.lib.stride_tricks.as_strided(np.ones(4), (2, 3, 4), (0, 0, 8))},
        ValueError,
        "state overlaps itself; it should have memory for every element",
    ),
    "x of the state": (
        {"x": STATE[..., 0], "state": STATE},
        ValueError,
        "x shares memory with state; it should not",
    ),
    "kernels of the state": ({"kernels": STATE, "state": STATE}, ValueError, "kernels shares mem"),
    "out": ({"out": np.empty((2, 1, 3))}, ValueError, r"out has shape \(2, 1, 3\); it should be"),
    "activation": ({"activation": "relu"}, ValueError, "activation is 'relu'; it should be one of"),
    "backend": ({"backend": "cuda"}, ValueError, "backend is 'cuda'; it should be one of triton"),
    "triton": ({"backend": "triton"}, fusedops.BackendUnavailable, "it takes torch tensors"),
}


@pytest.mark.parametrize("name", BAD_STEP)
def test_bad_input_leaves_the_state_as_it_was(name):
    changes, kind, message = BAD_STEP[name]
    arguments = {"x": np.full((2, 3), 2.0), "state": np.ones((2, 3, 4)), "kernels": np.ones((3, 4))}
    arguments.update(changes)
    before = copy.deepcopy(arguments["state"])
    with pytest.raises(kind, match=message):
        fusedops.dynamic_conv_step(**arguments)
    np.testing.assert_array_equal(arguments["state"], before)


BAD_SEQUENCES = {
    "floats": ([0.0, 5], TypeError, "cu_seqlens has dtype float32; it should be int32 or int64"),
    "decreasing": ([0, 6, 5], ValueError, r"cu_seqlens\[2\] is 5; it should be at least 6"),
}


@needs_torch
@pytest.mark.parametrize("name", BAD_SEQUENCES)
def test_bad_tensors_of_sequences_are_named(name):
    cu_seqlens, kind, message = BAD_SEQUENCES[name]
    with pytest.raises(kind, match=message):
        fusedops.dynamic_conv(
            torch.ones(1, 5, 3), torch.ones(3, 4), cu_seqlens=torch.tensor(cu_seqlens)
        )


@needs_torch
@pytest.mark.parametrize("kind", ["bfloat16", "meta"])
def test_sequences_that_cannot_be_read_name_the_argument(kind):
    cu_seqlens = torch.tensor([0, 5]).to(torch.bfloat16 if kind == "bfloat16" else kind)
    with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
        fusedops.dynamic_conv(torch.ones(1, 5, 3), torch.ones(3, 4), cu_seqlens=cu_seqlens)


@needs_torch
def test_bad_states_of_tensors():
    x, kernels = torch.full((2, 3), 2.0), torch.ones(3, 4)
    whole = torch.ones(2, 3, 4)
    bad = (
        (np.ones((2, 3, 4), "f4"), TypeError, "state is a NumPy array; it should be a torch"),
        (torch.ones(3, 4).expand(2, 3, 4), ValueError, "state overlaps itself"),
        (torch.ones(2, 3, 4, device="meta"), ValueError, "state is on meta; it should be on cpu"),
        (whole.half(), TypeError, "state has dtype float16; it should hold float32"),
        (whole.bfloat16(), TypeError, "state has dtype bfloat16; it should hold float32"),
    )
    for state, kind, message in bad:
        with pytest.raises(kind, match=message):
            fusedops.dynamic_conv_step(x, state, kernels)
    with pytest.raises(TypeError, match="state has dtype float16; it should hold bfloat16"):
        fusedops.dynamic_conv_step(x.bfloat16(), whole.half(), kernels)


@needs_torch
@pytest.mark.parametrize("name", ["x", "state", "kernels", "bias"])
def test_a_step_has_no_gradient(torch_backend, name):
    arrays = {"x": torch.ones(2, 3), "state": torch.zeros(2, 3, 4), "kernels": torch.ones(3, 4)}
    arrays["bias"] = torch.ones(3)
    arrays[name].requires_grad_()
    with pytest.raises(RuntimeError, match="dynamic_conv_step has no gradient: it updates state"):
        fusedops.dynamic_conv_step(**arrays, backend=torch_backend)
    assert not arrays["state"].any()
    with torch.no_grad():
        out = fusedops.dynamic_conv_step(**arrays, backend=torch_backend)
    assert out.tolist() == [[2.0] * 3] * 2
    assert not out.requires_grad


def leaves_of(p):
    return [tensor(array).requires_grad_() for array in p[:4]]


def of_leaves(p, backend=None):
    """Return the convolution as a function of x, kernels, initial state and bias."""

    def function(x, kernels, state, bias):
        options = {"cu_seqlens": p.cu_seqlens, "activation": p.activation, "backend": backend}
        return fusedops.dynamic_conv(
            x, kernels, initial_state=state, bias=bias, output_final_state=True, **options
        )

    return function


@needs_torch
def test_a_loss_of_the_final_state_alone(torch_backend):
    p = problem(T=3, W=5)
    leaves = leaves_of(p)
    _, final = of_leaves(p, torch_backend)(*leaves)
    (final * tensor(p.final_cotangent)).sum().backward()
    x, kernels, state, bias = (leaf.grad for leaf in leaves)
    same(x.numpy(), p.final_cotangent[..., 2:].swapaxes(1, 2))
    same(state[..., 3:].numpy(), p.final_cotangent[..., :2])
    assert not state[..., :3].any()
    assert not kernels.any()
    assert not bias.any()


def compiled(function):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, dynamic=True), counter


@needs_torch
@pytest.mark.parametrize("fill", [False, True])
def test_a_compiled_step_updates_the_state(fill):
    def function(x, state, kernels, bias, out):
        options = {"bias": bias, "activation": "silu", "out": out}
        return 2 * fusedops.dynamic_conv_step(x, state, kernels, **options)

    fast, counter = compiled(function)
    p = problem(T=4)
    x, kernels, state, bias = (tensor(a) for a in p[:4])
    other = state.clone()
    outs = [torch.empty(2, 3, dtype=x.dtype) if fill else None for _ in range(2)]
    for t in range(4):
        want = function(x[:, t], other, kernels[:, t], bias, outs[0])
        got = fast(x[:, t], state, kernels[:, t], bias, outs[1])
        torch.testing.assert_close(got, want)
        assert torch.equal(state, other)
    if fill:
        assert torch.equal(*outs)
    assert counter.frame_count == 1


@needs_torch
@pytest.mark.usefixtures("fresh_plans")
def test_a_compiled_step_asks_for_its_backend_when_it_runs():
    fast, counter = compiled(fusedops.dynamic_conv_step)
    p = problem(T=1)
    x, kernels, state = (tensor(a) for a in p[:3])
    asked = []
    genuine = registry.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "choose", lambda r: asked.append(r.forced) or genuine(r))
        fast(x[:, 0], state, kernels[:, 0])
        with fusedops.use_backend("numpy"):
            fast(x[:, 0], state, kernels[:, 0])
    assert asked == [None, "numpy"]
    assert counter.frame_count == 1


@needs_torch
def test_the_first_call_of_all_may_be_compiled():
    code = """
    import fusedops, torch
    function = torch.compile(lambda x, k: fusedops.dynamic_conv(x, k), backend="aot_eager")
    assert function(torch.ones(1, 3, 2), torch.ones(2, 1)).sum() == 6
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True)


def test_a_step_has_no_vjp():
    with pytest.raises(TypeError, match="dynamic_conv_step has no gradient: it updates state"):
        fusedops.dynamic_conv_step.vjp(X[:, 0], np.ones((2, 3, 4)), KERNELS[:, 0])


@pytest.mark.parametrize("backend", EXACT)
def test_the_number_of_threads_changes_no_step(backend, several_threads):
    p = problem(B=40, T=1, D=40)
    results = []
    try:
        for threads in (1, 2, 16):
            fusedops.set_num_threads(threads)
            several_threads.clear()
            state = p.initial_state.copy()
            options = {"bias": p.bias, "activation": "silu"}
            results.append((step((None, backend), p.x, state, p.kernels[:, 0], **options), state))
            assert set(several_threads) == {threads}
    finally:
        fusedops.set_num_threads(None)
    for out, state in results[1:]:
        same(out, results[0][0])
        same(state, results[0][1])


def test_sequences_say_what_they_hold():
    sequences = fusedops.Sequences(np.array([0, 3, 3, 10], np.int32))
    assert (sequences.num_sequences, sequences.num_tokens) == (3, 10)
    assert sequences.device == "cpu"
    assert (fusedops.Sequences([0]).num_sequences, fusedops.Sequences([0]).num_tokens) == (0, 0)


def test_sequences_are_a_copy():
    p = problem(lengths=[3, 0, 7])
    starts = p.cu_seqlens.copy()
    sequences = fusedops.Sequences(starts)
    want = fusedops.dynamic_conv(p.x, p.kernels, cu_seqlens=starts)
    starts[1:3] = 8
    same(fusedops.dynamic_conv(p.x, p.kernels, cu_seqlens=sequences), want)
    assert (fusedops.dynamic_conv(p.x, p.kernels, cu_seqlens=starts) != want).any()


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, fusedops.Sequences])
def test_every_kind_of_cu_seqlens(kind):
    p = problem(lengths=[3, 0, 7])
    want = fusedops.dynamic_conv(p.x, p.kernels, cu_seqlens=p.cu_seqlens)
    starts = np.array([0, 3, 3, 10], kind) if kind in (np.int32, np.int64) else kind([0, 3, 3, 10])
    same(fusedops.dynamic_conv(p.x, p.kernels, cu_seqlens=starts), want)


@needs_torch
def test_a_tensor_of_sequences_is_read_anew():
    p = problem(lengths=[3, 0, 7])
    x, kernels, starts = tensor(p.x), tensor(p.kernels), tensor(p.cu_seqlens).int()
    sequences = fusedops.Sequences(starts)
    before = fusedops.dynamic_conv(x, kernels, cu_seqlens=starts)
    starts[1:3] = 8
    after = fusedops.dynamic_conv(x, kernels, cu_seqlens=starts)
    moved = problem(lengths=[8, 0, 2])
    assert torch.equal(after, fusedops.dynamic_conv(x, kernels, cu_seqlens=moved.cu_seqlens))
    assert torch.equal(before, fusedops.dynamic_conv(x, kernels, cu_seqlens=sequences))
    assert not torch.equal(before, after)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("W", [2, 4, 7])
def test_an_infinite_static_tap_reaches_no_token_that_it_does_not_serve(place, W):
    """The first tap's gradient ends where the last token's first input does."""
    p = problem(B=1, T=9, D=2, W=W, static=True, state=False, bias=False, activation=None)
    p.kernels[1, 0] = np.inf
    got = solve(place, p)
    assert np.isfinite(got.x[:, 10 - W :]).all()
    assert np.isfinite(got.x[..., 0]).all()


def test_a_state_that_overlaps_itself_is_refused():
    memory = np.zeros(64)
    for strides in ((24, 8, 8), (32, 0, 8), (8, 32, 8)):
        state = np.lib.stride_tricks.as_strided(memory, (2, 3, 4), strides)
        with pytest.raises(ValueError, match="state overlaps itself"):
            fusedops.dynamic_conv_step(np.ones((2, 3)), state, np.ones((3, 4)))
    assert not memory.any()


@pytest.mark.parametrize("end", [10**13, 2**62])
def test_sequences_far_too_long_are_refused_before_anything_is_made_of_them(end):
    with pytest.raises(ValueError, match="it should end at 5"):
        fusedops.dynamic_conv(np.ones((1, 5, 3)), np.ones((3, 4)), cu_seqlens=[0, end])
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] is -9"):
        fusedops.Sequences([0, 2**63 - 1, -9, 5])


@needs_torch
def test_tensors_without_memory():
    x, kernels, state = (torch.ones(s, device="meta") for s in ((2, 3), (3, 4), (2, 3, 4)))
    step = fusedops.dynamic_conv_step(x, state, kernels, backend="torch")
    assert step.shape == x.shape
    out = torch.ones(2, 1, 3, device="meta")
    assert fusedops.dynamic_conv(x[:, None], kernels, out=out, backend="torch") is out


@needs_torch
def test_inside_a_transform_nothing_is_written_without_a_word():
    x, kernels, state = torch.rand(1, 5, 3), torch.rand(3, 4), torch.zeros(1, 3, 4)
    out = torch.zeros(1, 5, 3)

    def fills(y):
        with torch.no_grad():
            fusedops.dynamic_conv(x, kernels, out=out)
        return y.sum()

    def steps(y):
        return fusedops.dynamic_conv_step(y, state, kernels).sum()

    with pytest.raises(RuntimeError, match="in-place operation"):
        torch.func.grad(fills)(torch.ones(2))
    with pytest.raises(RuntimeError, match="dynamic_conv_step has no gradient"):
        torch.func.grad(steps)(torch.ones(1, 3))
    assert not out.any()
    assert not state.any()


@needs_torch
@pytest.mark.parametrize("backend", SERVE_TENSORS)
def test_a_state_whose_memory_is_the_negative_of_it_is_refused(backend):
    x, kernels = torch.rand(1, 3), torch.rand(3, 4)
    state = torch.complex(torch.rand(1, 3, 4), torch.rand(1, 3, 4)).conj().imag
    assert state.is_neg()
    with pytest.raises(ValueError, match="a tensor to write to is a negative view"):
        fusedops.dynamic_conv_step(x, state, kernels, backend=backend)


@needs_torch
@pytest.mark.parametrize("activation", [None, "silu"])
def test_second_derivatives_of_sixteen_bits_round_once(activation):
    p = problem(B=1, T=20, D=3, W=4, activation=activation)
    half = [tensor(a).bfloat16().requires_grad_() for a in (p.x, p.kernels)]
    full = [a.detach().double().requires_grad_() for a in half]
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(a.shape, generator=generator).bfloat16() for a in half]
    second = []
    for arrays in (half, full):
        out = fusedops.dynamic_conv(*arrays, activation=activation)
        weight = vectors[0].to(out.dtype)
        first = torch.autograd.grad(out, arrays, weight, create_graph=True)
        along = [vector.to(arrays[0].dtype) for vector in vectors]
        second.append(torch.autograd.grad(first, arrays, along))
    for a, b in zip(*second, strict=True):
        assert error(a.double().numpy(), b.numpy()) < TOLERANCE["bfloat16"]
