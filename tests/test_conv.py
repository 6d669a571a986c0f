"""The dynamic convolution's mathematics and arguments, on the reference and the kernels."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref

import numpy as np
import pytest

import contract
import fusedops
from contract import same
from fusedops._catalogue import Problem
from fusedops.testing import TOLERANCE, error
from places import HAS_TORCH, interpreted, needs_torch, needs_triton
from processes import python

if HAS_TORCH:
    import torch

pytestmark = interpreted


#: The ops and their leaves.
CONVOLUTION, GENERATED = (
    next(example for example in contract.EXAMPLES if example.name == name)
    for name in ("conv-packed", "generated")
)


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
    given, count = {"activation": activation, "output_final_state": True}, B
    if lengths is not None:
        B, T, count = 1, sum(lengths), len(lengths)
        given["cu_seqlens"] = np.cumsum([0, *lengths])
    given |= {
        "x": rng.normal(size=(B, T, D)),
        "kernels": rng.normal(size=(D, W) if static else (B, T, D, W)),
        "initial_state": rng.normal(size=(count, D, W)),
        "bias": rng.normal(size=D),
    }
    cotangents = rng.normal(size=(B, T, D)), rng.normal(size=(count, D, W))
    left_out = {"initial_state": state, "bias": bias}
    p = Problem(CONVOLUTION, given, cotangents).astype(dtype)
    return p.but(**{name: None for name, kept in left_out.items() if not kept})


def tensor(array):
    return None if array is None else torch.from_numpy(array)


def solve(place, p):
    """Return the outputs, and the gradients by the names of their arguments."""
    return dict(zip(("out", "final_state", *p.leaves), contract.solve(place, p), strict=True))


#: The reference.
FORMULA = "numpy", "numpy"


def convolution(
    x,
    kernels,
    *,
    initial_state=None,
    bias=0.0,
    residual=0.0,
    cu_seqlens=None,
    activation=None,
    output_final_state=False,
):
    """Return the convolution, one token after the other, and the last W inputs."""
    W, h, finals = kernels.shape[-1], np.empty(x.shape), []
    spans = [(b, slice(0, x.shape[1])) for b in range(len(x))]
    if cu_seqlens is not None:
        starts = getattr(cu_seqlens, "cu_seqlens", cu_seqlens).tolist()
        spans = [(0, slice(*edges)) for edges in itertools.pairwise(starts)]
    for s, (b, tokens) in enumerate(spans):
        past = np.zeros((W, x.shape[2])) if initial_state is None else initial_state[s].T
        inputs = np.concatenate([past, x[b, tokens]])
        for t in range(tokens.start, tokens.stop):
            read = inputs[t - tokens.start + 1 :][:W].T
            h[b, t] = ((kernels if kernels.ndim == 2 else kernels[b, t]) * read).sum(-1)
        finals.append(inputs[-W:].T)
    h += bias
    out = residual + (h if activation is None else h / (1 + np.exp(-h)))
    return (out, np.stack(finals)) if output_final_state else out


def test_the_formula():
    choices = {"activation": (None, "silu"), "output_final_state": (False, True)}
    contract.compare(fusedops.dynamic_conv, convolution, **choices)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_silu_of_large_numbers(place, dtype):
    """Where exp overflows, or is lost beside 1, there is neither a NaN nor a warning."""
    largest = float(np.finfo(dtype).max)
    h = np.array([-largest, -1e4, -745, -100, -88, -30, -1e-30, 0, 1e-30, 30, 88, 745, largest])
    p = problem(B=1, T=1, D=len(h), W=1, bias=False, state=False, dtype=dtype).of_ones()
    p = p.but(x=h.astype(dtype)[None, None], kernels=np.ones_like(p.arguments["kernels"]))
    p.cotangents[1][:] = 0
    got = solve(place, p)
    e = np.exp(-np.abs(h))
    sigmoid, rest = np.where(h < 0, e, 1) / (1 + e), np.where(h < 0, 1, e) / (1 + e)
    # Numbers near the smallest normal one may lose their digits.
    near = {"rtol": TOLERANCE[dtype], "atol": 1e4 * np.finfo(dtype).tiny}
    np.testing.assert_allclose(got["out"][0, 0], h * sigmoid, **near)
    np.testing.assert_allclose(got["x"][0, 0], sigmoid * (1 + h * rest), **near)


#: Sequences shorter than the taps, longer, and longer than a kernel's chunk of tokens.
PROBLEMS = [
    {},
    {"T": 3, "W": 8, "static": True, "activation": None},
    {"T": 70, "D": 17, "W": 5, "static": True, "state": False, "bias": False},
    {"lengths": (2, 0, 66, 7), "D": 33},
    {"lengths": (65, 1), "D": 2, "W": 1, "static": True},
    {"lengths": (9, 63), "W": 3, "bias": False, "activation": None},
]


@pytest.mark.parametrize("name", ["x", "kernels", "cotangent", "initial_state"])
@pytest.mark.parametrize("options", PROBLEMS)
def test_a_bad_number_reaches_nothing_but_what_depends_on_it(quick, options, name):
    """Later tokens forward and earlier ones backward; no tap reads the oldest input of a state."""
    p = problem(**options)
    array = p.cotangents[0] if name == "cotangent" else p.arguments[name]
    rng = np.random.default_rng(0)
    if array is None:
        pytest.skip("there is no such array")
    # A factor of zero would hide what a number reaches.
    shown = p if "initial_state" in p.leaves else p.but(initial_state=p.cotangents[1])
    for _ in range(3):
        index = *(rng.integers(size) for size in array.shape[:-1]), 0
        results = []
        for place, q, numbers in ((quick, p, (0.0, np.nan)), (FORMULA, shown, (0.0, 2.0))):
            for number in numbers:
                other = array.copy()
                other[index] += number
                changed = q.but(**{name: other})
                if name == "cotangent":
                    changed = dataclasses.replace(q, cotangents=(other, q.cotangents[1]))
                results.append(solve(place, changed))
        for of, want in results[0].items():
            got, one, two = (found[of] for found in results[1:])
            same(got[one == two], want[one == two])
            assert name != "x" or np.isnan(got[one != two]).all()


def step(place, *arrays, **options):
    """Return the step's result for x, a state and kernels, as an array; it updates the state."""
    if place[0] == "torch":
        arrays = map(tensor, arrays)
        options = {n: tensor(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    return np.asarray(fusedops.dynamic_conv_step(*arrays, backend=place[1], **options))


def test_a_state_of_one_row_may_have_any_stride(backend):
    state = np.ones((3, 4))
    fusedops.dynamic_conv_step(np.full((1, 3), 2.0), state[None], np.ones((3, 4)), backend=backend)
    same(state[:, -1], np.full(3, 2.0))


@pytest.mark.parametrize(
    ("count", "length", "circular"),
    [(1, 4, False), (1, 3, False), (3, 7, False), (5, 3, False), (2, 5, True), (6, 4, True)],
)
def test_a_step_of_paged_states(place, count, length, circular):
    """Padding may have any position, and no sum of a large one overflows."""
    rng = np.random.default_rng(count)
    B, D, W, N = 4, 8, 4, 7
    x, residual = rng.normal(size=(2, B, count, D))
    state, bias = rng.normal(size=(N, D, length)), rng.normal(size=D)
    kernels = rng.normal(size=(B, count, D, W))
    slots = np.array([5, -1, 0, 3], np.int32)
    positions = np.array([3, -2, 1000, 2**63 - 2]) if circular else None
    if count % 2:
        x, state = channels_first(x), channels_first(state)
    options = {"bias": bias, "residual": residual, "slots": slots}
    after = state.copy()
    turned = None if positions is None else positions % length
    want = step(FORMULA, x, after, kernels, **options, positions=turned)
    got = step(place, x, state, kernels, **options, positions=positions)
    contract.close(problem(), got, want)
    same(state, after)


def test_the_activation_of_a_sum_beyond_the_largest_float_has_its_limit(place):
    """In float32, where float64 has finite results; a positive sum is infinite."""
    values = np.array([3e38, 1.0])
    x = np.tile(values, (1, 3, 1)).astype("f4")
    kernels = np.broadcast_to(np.array([[-1.0, -2.0], [1.0, 2.0]], "f4"), (1, 3, 2, 2)).copy()
    state, weight = np.zeros((1, 2, 2), "f4"), kernels.reshape(3, 4)[:1].T.copy()
    hidden, dout = np.ones((1, 3, 1), "f4"), np.full((1, 3, 2), 1e-3, "f4")
    for example, arguments in (
        (CONVOLUTION, {"x": x, "kernels": kernels}),
        (CONVOLUTION, {"x": x, "kernels": kernels[0, 0].copy()}),
        (GENERATED, {"x": x, "hidden": hidden, "weight": weight}),
    ):
        p = Problem(example, arguments | {"activation": "silu"}, (dout,))
        want = contract.solve(FORMULA, p.astype("float64"))
        assert all(np.isfinite(each).all() for each in want)
        for got, each in zip(contract.solve(place, p), want, strict=True):
            np.testing.assert_allclose(got, each, rtol=1e-5)
        if place[0] == "torch":
            leaves = contract.leaves_of(p)
            out = contract.function_of(p, place[1])(*leaves)
            first = torch.autograd.grad(out, leaves, tensor(dout), create_graph=True)
            bent = torch.autograd.grad(sum(1e-3 * one.sum() for one in first), leaves)
            assert all(one.isfinite().all() for one in bent)
    got = step(place, x[:, 0], state, kernels[:, 0], activation="silu")
    assert got.ravel()[0] == 0


def test_a_state_may_be_wider_than_the_tokens(place):
    """A float64 state takes float32 tokens, and wider kernels don't change a state's dtype."""
    p, narrow = problem(T=3), problem(T=3, dtype="float32")
    x = narrow.arguments["x"]
    for wide, kernels in ((p, narrow.arguments["kernels"]), (narrow, p.arguments["kernels"])):
        state = wide.arguments["initial_state"].copy()
        given = p.but(x=x, kernels=kernels, initial_state=state.copy())
        cotangents = narrow.cotangents[0], wide.cotangents[1]
        want = solve(place, dataclasses.replace(given, cotangents=cotangents))
        for t in range(3):
            options = {"bias": p.arguments["bias"], "activation": "silu"}
            out = step(place, x[:, t], state, kernels[:, t], **options)
            contract.agree(p, place[1], out, want["out"][:, t])
        same(state, want["final_state"])


@needs_triton
@pytest.mark.parametrize("lengths", [(5, 0, 66, 64, 0), (0, 0)], ids=str)
def test_boundaries_that_the_host_never_reads(lengths):
    """The list of chunks has as many as there can be; the others do nothing in Triton's kernels."""
    p = problem(D=2, lengths=lengths)
    starts = torch.tensor(p.arguments["cu_seqlens"])
    unread = fusedops.Sequences.on_device(starts, num_tokens=int(starts[-1]))
    read = fusedops.Sequences(starts)
    assert (unread.num_sequences, unread.num_tokens) == (read.num_sequences, read.num_tokens)
    same(unread.cu_seqlens, read.cu_seqlens)
    same(unread.chunks[: len(read.chunks)], read.chunks)
    assert (unread.chunks[len(read.chunks) :, 1] == read.num_tokens).all()
    results = (contract.solve(("torch", "triton"), p.but(cu_seqlens=cu)) for cu in (unread, read))
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


@pytest.mark.interpreted_slow(dtype="float64", T=(40, 96))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("T", "D", "W", "lengths"),
    [(72, 40, 4, None), (70, 33, 5, None), (40, 8, 1, None), (96, 32, 4, (17, 0, 66, 13))],
    ids=["squares", "edges", "one tap", "packed"],
)
def test_channels_may_come_before_tokens(place, T, D, W, lengths, dtype):
    """Tokens and cotangents (B, D, T) are read where they lie, and give the same bits."""
    p = problem(T=T, D=D, W=W, lengths=lengths, dtype=dtype)
    want = contract.solve(place, p)
    turned = p.but(x=channels_first(p.arguments["x"]))
    cotangents = channels_first(p.cotangents[0]), p.cotangents[1]
    for q in (turned, *(dataclasses.replace(q, cotangents=cotangents) for q in (p, turned))):
        contract.all_agree(p, place[1], contract.solve(place, q), want)


@needs_torch
def test_no_gradient_keeps_a_residual():
    x, kernels = torch.ones(1, 4, 2, requires_grad=True), torch.ones(2, 3)
    residual = torch.ones(1, 4, 2)
    gone = weakref.ref(residual)
    out = fusedops.dynamic_conv(x, kernels, residual=residual)
    del residual
    assert gone() is None
    out.sum().backward()


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
    kinds = dtypes[0], np.promote_types(dtypes[0], dtypes[2])
    p = p.but(**{n: p.arguments[n].astype(d) for n, d in zip(p.leaves, dtypes, strict=True)})
    cotangents = tuple(c.astype(kind) for c, kind in zip(p.cotangents, kinds, strict=True))
    p = dataclasses.replace(p, cotangents=cotangents)
    got, want = (contract.solve(quick, q) for q in (p, p.astype("float64")))
    for value, reference, dtype in zip(got, want, (*kinds, *dtypes), strict=True):
        assert value.dtype == dtype
        assert error(value, reference) <= TOLERANCE["float32"]


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


SHAPES = {"x": (2, 5, 3), "kernels": (2, 5, 3, 4)}
PACKED = {"x": (1, 10, 3), "kernels": (1, 10, 3, 4)}
BAD = {
    "kernels of rank 3": (
        {**SHAPES, "kernels": (5, 3, 4)},
        r"kernels has shape \(5, 3, 4\); it should be \(3, W\) or \(2, 5, 3, W\)",
    ),
    "no taps": ({**SHAPES, "kernels": (3, 0)}, r"kernels has shape \(3, 0\); .*, W > 0"),
    "starts late": ({**PACKED, "cu_seqlens": [1, 10]}, r"cu_seqlens\[0\] is 1; it should be 0"),
    "starts below": ({**PACKED, "cu_seqlens": [-1, 10]}, r"cu_seqlens\[0\] is -1"),
    "ends early": ({**PACKED, "cu_seqlens": [0, 9]}, "ends at 9; it should end at 10"),
    "ends late": ({**PACKED, "cu_seqlens": [0, 11]}, "ends at 11; it should end at 10"),
    "no sequence": ({**PACKED, "cu_seqlens": [0]}, "cu_seqlens ends at 0"),
    "decreasing": (
        {**PACKED, "cu_seqlens": [0, 4, 3, 2, 10]},
        r"cu_seqlens\[2\] is 3; it should be at least 4, the one before",
    ),
    "far too long": ({**PACKED, "cu_seqlens": [0, 2**62]}, "it should end at 10"),
    "a batch packed": (
        {**SHAPES, "cu_seqlens": [0, 5]},
        r"x has shape \(2, 5, 3\); with cu_seqlens it should be \(1, T, D\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_shapes_and_boundaries_that_do_not_fit_are_named(name):
    given, message = BAD[name]
    arrays = {n: v if n == "cu_seqlens" else np.ones(v) for n, v in given.items()}
    kinds = [arrays]
    if HAS_TORCH:
        kinds.append({n: torch.tensor(v) for n, v in arrays.items()})
    for kind in kinds:
        with pytest.raises(ValueError, match=message):
            fusedops.dynamic_conv(**kind)


BAD_STEP = {
    "state has 4 inputs of a sequence; it should have at least 5": {"kernels": np.ones((3, 6))},
    "positions has dtype float64; it should": {"positions": np.ones(2)},
    "positions has -2; it should be at least 0": {"positions": np.array([3, -2])},
    "positions is given; state should then have inputs": {
        "state": np.ones((2, 3, 0)),
        "kernels": np.ones((3, 1)),
        "positions": np.array([0, 1]),
    },
    "kernels has shape .3, 0.; it should be .*, W > 0": {"kernels": np.ones((3, 0))},
    "kernels has shape .*2, 5, 3, 4": {"kernels": np.ones((2, 5, 3, 4))},
    "residual has shape .2, 1, 3.; it should be .2, 3.": {"residual": np.ones((2, 1, 3))},
    "state has shape": {"state": np.ones((1, 3, 4))},
    "out has shape .2, 1, 3.; it should be": {"out": np.empty((2, 1, 3))},
}


@pytest.mark.parametrize("message", BAD_STEP)
def test_bad_input_leaves_the_state_as_it_was(message):
    given = {"x": np.full((2, 3), 2.0), "state": np.ones((2, 3, 4)), "kernels": np.ones((3, 4))}
    given |= BAD_STEP[message]
    with pytest.raises((TypeError, ValueError), match=f"dynamic_conv_step: {message}"):
        fusedops.dynamic_conv_step(**given)
    assert (given["state"] == 1).all()


@needs_torch
def test_the_first_call_of_all_may_be_compiled():
    code = """
    import fusedops, torch
    function = torch.compile(lambda x, k: fusedops.dynamic_conv(x, k), backend="aot_eager")
    assert function(torch.ones(1, 3, 2), torch.ones(2, 1)).sum() == 6
    """
    python(code)


KINDS = [list, tuple, np.int32, np.int64, *([torch.int32, torch.int64] if HAS_TORCH else [])]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_sequences_are_a_copy_of_any_kind_of_cu_seqlens(kind):
    starts = kind([0, 3, 3, 10]) if kind in (list, tuple) else np.array([0, 3, 3, 10])
    if kind not in (list, tuple):
        starts = starts.astype(kind) if kind in (np.int32, np.int64) else tensor(starts).to(kind)
    sequences = fusedops.Sequences(starts)
    assert (sequences.num_sequences, sequences.num_tokens, sequences.device) == (3, 10, "cpu")
    p = problem(lengths=[3, 0, 7])
    x, kernels, boundaries = (p.arguments[name] for name in ("x", "kernels", "cu_seqlens"))
    if HAS_TORCH and isinstance(starts, torch.Tensor):
        x, kernels = tensor(x), tensor(kernels)
    want = np.asarray(fusedops.dynamic_conv(x, kernels, cu_seqlens=boundaries))
    same(np.asarray(fusedops.dynamic_conv(x, kernels, cu_seqlens=starts)), want)
    if not isinstance(starts, (list, tuple)):
        starts[1:3] = 8
        assert (np.asarray(fusedops.dynamic_conv(x, kernels, cu_seqlens=starts)) != want).any()
    same(np.asarray(fusedops.dynamic_conv(x, kernels, cu_seqlens=sequences)), want)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("W", [2, 7])
def test_an_infinite_static_tap_reaches_no_token_that_it_does_not_serve(place, W):
    """The first tap's gradient ends where the last token's first input does."""
    p = problem(B=1, T=9, D=2, W=W, static=True, state=False, bias=False, activation=None)
    p.arguments["kernels"][1, 0] = np.inf
    dx = solve(place, p)["x"]
    assert np.isfinite(dx[:, 10 - W :]).all()
    assert np.isfinite(dx[..., 0]).all()


@needs_torch
def test_inside_a_transform_nothing_is_written_without_a_word():
    x, kernels, out = torch.rand(1, 5, 3), torch.rand(3, 4), torch.zeros(1, 5, 3)

    def fills(y):
        with torch.no_grad():
            fusedops.dynamic_conv(x, kernels, out=out)
        return y.sum()

    with pytest.raises(RuntimeError, match="in-place operation"):
        torch.func.grad(fills)(torch.ones(2))
    assert not out.any()


@needs_torch
@pytest.mark.parametrize("activation", [None, "silu"])
def test_second_derivatives_of_sixteen_bits_round_once(activation):
    p = problem(B=1, T=20, D=3, W=4, activation=activation)
    half = [tensor(p.arguments[n]).bfloat16().requires_grad_() for n in ("x", "kernels")]
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


def test_a_pullback_without_cotangents_returns_zeros():
    x, kernels = np.ones((1, 4, 3)), np.ones((3, 2))
    _, pullback = fusedops.dynamic_conv.vjp(x, kernels, output_final_state=True)
    for found, array in zip(pullback(None, None), (x, kernels), strict=True):
        np.testing.assert_array_equal(found, np.zeros_like(array))
        assert found.dtype == array.dtype


@pytest.mark.parametrize(
    ("slots", "positions", "message"),
    [
        ([1, 1], None, "slots has 1 twice"),
        ([0, 7], None, "slots has 7; it should be below 4"),
        ([0, 1], [4, -2], "positions has -2; it should be at least 0"),
    ],
)
def test_a_compiled_step_checks_its_slots(slots, positions, message):
    torch = pytest.importorskip("torch")

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def step(x, state, kernels, slots, positions):
        options = {"slots": slots, "positions": positions}
        return fusedops.dynamic_conv_step(x, state, kernels, **options)

    def run(slots, positions):
        positions = None if positions is None else torch.tensor(positions)
        given = torch.ones(2, 3), torch.zeros(4, 3, 4), torch.ones(3, 4), torch.tensor(slots)
        return step(*given, positions)

    run([0, 2], None if positions is None else [0, 3])
    with pytest.raises(ValueError, match=message):
        run(slots, positions)


def test_an_output_that_a_subclass_shares_is_refused():
    torch = pytest.importorskip("torch")

    class Own(torch.Tensor):
        """A tensor of a program's own class."""

    x, kernels = torch.randn(1, 50, 6).as_subclass(Own), torch.randn(6, 4)
    for given, out in ((x, x), (x, x.as_subclass(torch.Tensor)), (x.as_subclass(torch.Tensor), x)):
        with pytest.raises(ValueError, match="out shares memory with x; it should not"):
            fusedops.dynamic_conv(given, kernels, out=out)
