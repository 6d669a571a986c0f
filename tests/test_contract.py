"""The promises of every op, tested with the examples of contract.py.

Each promise is written once, for all ops and all places that serve them. test_updates.py has the
promises that only ops make which update a state and have no gradient.
"""

from __future__ import annotations

import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import fusedops
from contract import (
    EXAMPLES,
    TRACED,
    UNPACKED,
    UPDATES,
    agree,
    all_agree,
    as_framework,
    capture,
    close,
    derivatives,
    evaluate,
    function_of,
    leaves_of,
    named,
    of_primitives,
    registered,
    requests,
    same,
    solve,
    tensor,
    total,
    tuple_of,
    unaligned,
    updated,
)
from fusedops._catalogue import typical
from fusedops._frame.packed import Packed
from fusedops.testing import CASES, TOLERANCE
from places import (
    EXACT,
    HAS_TORCH,
    PLACES,
    QUICK,
    SERVE_ARRAYS,
    SERVE_TENSORS,
    available,
    needs_torch,
)

if HAS_TORCH:
    import torch

pytestmark = pytest.mark.filterwarnings(
    # Triton's interpreter computes both sides of a select in NumPy, which warns of the unused one.
    "ignore::RuntimeWarning:triton|interpreter",
    "ignore:.*torch.jit:DeprecationWarning",
)

ARRAYS = [("numpy", name) for name in SERVE_ARRAYS]
TENSORS = [("torch", name) for name in SERVE_TENSORS] if HAS_TORCH else []
#: A backend with kernels and the formula, for promises that the bridge keeps.
BRIDGED = [place for place in TENSORS if place[1] in ("cython", "torch")]
#: The same, with Triton's kernels.
SOME_TENSORS = [place for place in TENSORS if place[1] in ("cython", "torch", "triton")]
SHOULD = "; it should be"
every_example = pytest.mark.parametrize("example", EXAMPLES, ids=str)
every_call = pytest.mark.parametrize("example", [*EXAMPLES, *UPDATES], ids=str)
with_out = pytest.mark.parametrize("example", [e for e in EXAMPLES if e.takes_out], ids=str)
#: An example of every op, for promises that the bridge keeps for all its calls.
every_op = pytest.mark.parametrize("example", {e.op: e for e in EXAMPLES}.values(), ids=str)
TRACED_OF_OP = {example.op: example for example in TRACED}


def at(places, examples=EXAMPLES):
    """Parametrize a test by examples, each in the places that serve it."""
    return pytest.mark.parametrize(
        ("example", "place"),
        [pytest.param(e, place, id=f"{e}-{'-'.join(place)}") for e in examples for place in places],
        indirect=["place"],
    )


# In the interpreter, one call for each way in which a kernel reads and sums is enough.
few = pytest.mark.interpreted_slow(
    example=(
        *("planarity-weighted", "conv", "conv-packed-static", "forth-packed", "back", "degree"),
        *("scatter", "gather", "density-iso", "triangle-hidden", "delta", "geometry"),
        *("attention-masked", "conv-step", "delta-step"),
    )
)


def small(example, place, dtype="float64"):
    """Return a small problem: the interpreter takes seconds for a kernel's milliseconds."""
    return example.problem("tiny" if place[1] == "triton" else "small", dtype)


# Layouts in memory.


def frozen(array):
    array = np.array(array)
    array.flags.writeable = False
    return array


def broadcast(array):
    """Return a view of an array in which all rows are the first."""
    first = array[:1].copy()
    return np.lib.stride_tricks.as_strided(first, array.shape, (0, *first.strides[1:]))


LAYOUTS = {
    "slice": lambda a: np.repeat(a, 2, -1)[..., ::2],
    "half": lambda a: np.concatenate([a, a], -1)[..., a.shape[-1] :],
    "transpose": lambda a: np.ascontiguousarray(a.T).T,
    "first-last": lambda a: np.moveaxis(np.moveaxis(a, 0, -1).copy(), -1, 0),
    "rows-apart": lambda a: np.repeat(a, 3, 0)[1::3],
    "broadcast": broadcast,
}
# Tensors can't have these layouts.
ARRAY_LAYOUTS = {
    "reversed": lambda a: a[..., ::-1].copy()[..., ::-1],
    "upside-down": lambda a: a[::-1].copy()[::-1],
    "read-only": frozen,
    "unaligned": unaligned,
}


def laid_out(layout):
    return lambda a: layout(a) if a.ndim and a.size else a


@at(QUICK, [*EXAMPLES, *UNPACKED, *UPDATES])
def test_arrays_are_read_where_they_lie(example, place, aligned):
    """Results have the bits of contiguous copies' results, and the arrays stay unchanged."""
    p = example.problem("medium")
    layouts = LAYOUTS | (ARRAY_LAYOUTS if place[0] == "numpy" else {})
    if example in UPDATES:
        # test_updates.py has states that can't be written.
        layouts = {n: a for n, a in layouts.items() if n not in ("broadcast", "read-only")}
    if not example.exact:
        # Of equal rows LayerNorm leaves roundings; test_trimul.py expands one weight.
        layouts.pop("broadcast")
    for layout in layouts:
        lay_out = laid_out(layouts[layout])
        # Broadcasting a row would change the indices.
        mapped = p.floats_mapped if layout == "broadcast" else p.mapped
        views, copies = mapped(lay_out), mapped(lambda a, lay_out=lay_out: lay_out(a).copy())
        with named(layout):
            all_agree(p, place[1], solve(place, views), solve(place, copies))
            for name, array in copies.arguments.items():
                if isinstance(array, np.ndarray) and name not in p.op.primitive.mutates:
                    same(views.arguments[name], array)
    assert aligned


@few
@pytest.mark.parametrize("shift", range(2))
@at([place for place in PLACES if place[1] == "triton"])
def test_arrays_are_read_where_they_lie_when_interpreted(example, place, shift):
    """Give each array another layout, in two assignments."""
    p = example.problem()
    layouts = itertools.islice(itertools.cycle(LAYOUTS.values()), shift, None)
    views, copies = p, p
    for name in p.example.floats:
        view = laid_out(next(layouts))(p.arguments[name])
        views, copies = views.but(**{name: view}), copies.but(**{name: view.copy()})
    all_agree(p, place[1], solve(place, views), solve(place, copies))


@few
@at(SOME_TENSORS)
def test_expanded_cotangents(example, place):
    """Cotangents are expanded, as `.sum().backward()` makes them."""
    p = small(example, place)
    leaves = leaves_of(p)
    value = sum(out.sum() for out in tuple_of(function_of(p, place[1])(*leaves)))
    got = [gradient.numpy() for gradient in torch.autograd.grad(value, leaves)]
    want = solve(place, p.of_ones())[-len(leaves) :]
    all_agree(p, place[1], got, want)


@few
@at(SOME_TENSORS)
def test_a_tensor_whose_memory_is_the_negative_of_it(example, place):
    """It is of no known kind, though its sizes and strides are."""
    p = small(example, place)
    want = evaluate(place, p)
    negative = [torch._neg_view(-tensor(p.arguments[name])) for name in p.leaves]
    assert all(leaf.is_neg() for leaf in negative)
    got = tuple_of(function_of(p, place[1])(*negative))
    all_agree(p, place[1], [out.numpy() for out in got], want)


# Values.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@at(ARRAYS)
def test_numpy_and_torch_and_every_run_give_the_same_bits(example, place, dtype):
    p = example.problem("medium", dtype)
    want = solve(place, p)
    for again in (place, *[("torch", place[1])] * HAS_TORCH):
        for got, expected in zip(solve(again, p), want, strict=True):
            (same if example.exact else partial(close, p))(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@at([("numpy", name) for name in EXACT], [*EXAMPLES, *UNPACKED, *UPDATES])
def test_the_number_of_threads_changes_no_bit(
    example, place, dtype, several_threads, two_threads_for_blas
):
    """Where BLAS computes products, roundings may differ, but not in another thread of Python."""
    p, results = example.problem("large", dtype), []
    try:
        for threads in (1, 2, 3, 16, 2):
            fusedops.set_num_threads(threads)
            several_threads.clear()
            results.append(solve(place, p.mapped(np.copy)))
            assert set(several_threads) == {threads} or not example.exact
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(solve, place, p.mapped(np.copy)).result()
            for got, want in zip(elsewhere, results[-1], strict=True):
                same(got, want)
    finally:
        fusedops.set_num_threads(None)
    for result in results[1:]:
        all_agree(p, place[1], result, results[0])
    for got, want in zip(results[0], solve(("numpy", "numpy"), p), strict=True):
        # Large examples have sums of more terms.
        close(p, got, want, times=8)


@few
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@at(TENSORS, [e for e in EXAMPLES if e.exact])
def test_sixteen_bits_are_rounded_once(example, place, dtype):
    """Sums are of float32 or better, and results have the dtype of the arguments.

    Products of the triangle, of the delta rule in chunks and of attention are of 16 bits on tensor
    cores; test_trimul.py, test_delta.py and test_attention.py check their errors.
    """
    kind = getattr(torch, dtype)
    narrow_products = place[1] == "triton" and example.op in (
        fusedops.gated_delta_rule,
        fusedops.triangle_attention,
    )
    p = small(example, place)
    narrow = {
        name: tensor(p.arguments[name]).to(kind).requires_grad_(name in p.leaves)
        for name in example.floats
    }
    outs = tuple_of(p.op(**{**as_framework("torch", p), **narrow}, backend=place[1]))
    cotangents = [tensor(c).to(out.dtype) for c, out in zip(p.cotangents, outs, strict=True)]
    gradients = torch.autograd.grad(outs, [narrow[name] for name in p.leaves], cotangents)
    wide = {name: array.detach().double().numpy() for name, array in narrow.items()}
    exact = p.but(**wide)
    exact = type(p)(example, exact.arguments, tuple(c.double().numpy() for c in cotangents))
    for got, want in zip((*outs, *gradients), solve(("numpy", "numpy"), exact), strict=True):
        # The losses of planarity and geometry are float32, and so are states of the delta rule.
        of_float32 = {"delta": outs[1:], "geometry": outs, "geometry-without-b": outs}
        sums = got.ndim == 0 or any(got is out for out in of_float32.get(example.name, ()))
        assert got.dtype == (torch.float32 if sums else kind)
        # Triton's interpreter cuts bfloat16 off where a GPU rounds.
        cut = place[1] == "triton" and dtype == "bfloat16"
        unit = torch.finfo(got.dtype).eps * (1.0 if cut else 0.5)
        # Subnormal numbers of float16 have half of their last place as an absolute error.
        tiny = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
        off = np.abs(got.detach().double().numpy() - want)
        rounded = 8 * TOLERANCE["float32"] * np.abs(want).max(initial=0)
        if narrow_products:
            rounded = 4 * unit * np.abs(want).max(initial=0)
        assert (off <= 1.01 * unit * np.abs(want) + rounded + tiny).all()


@few
@pytest.mark.interpreted_slow(dtype="float16")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@at(SOME_TENSORS)
def test_autocast_leaves_dtypes_alone(example, place, dtype):
    """Values and gradients equal a call's outside of autocast."""
    kind = getattr(torch, dtype)
    p = small(example, place)
    arguments = as_framework("torch", p)
    found = []
    for enabled in (False, True):
        floats = {n: arguments[n].to(kind).requires_grad_(n in p.leaves) for n in example.floats}
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert (torch.eye(3) @ torch.eye(3)).dtype == (torch.float32, torch.bfloat16)[enabled]
            outs = tuple_of(p.op(**{**arguments, **floats}, backend=place[1]))
            value = sum(out.sum() for out in outs)
            gradients = torch.autograd.grad(value, [floats[name] for name in p.leaves])
        assert all(gradient.dtype == kind for gradient in gradients)
        found.append([*outs, *gradients])
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        if example.exact:
            assert torch.equal(got, want)
        else:
            close(p, got.detach().float().numpy(), want.detach().float().numpy())


# Derivatives.


@needs_torch
@every_example
def test_derivatives_are_what_differences_say(example):
    """Differences check the formulas in torch up to the third derivative of a sum of squares."""
    p = example.problem("tiny")
    function, loss = function_of(p, "torch"), total(p, "torch")
    # Slow examples take seconds along single coordinates, so use random directions.
    fast = example.slow
    assert torch.autograd.gradcheck(function, leaves_of(p), fast_mode=fast)
    assert torch.autograd.gradgradcheck(function, leaves_of(p), fast_mode=fast)

    def gradients(*leaves):
        return torch.autograd.grad(loss(*leaves), leaves, create_graph=True)

    assert torch.autograd.gradgradcheck(gradients, leaves_of(p), fast_mode=True)


@at([place for place in TENSORS if place[1] in ("numpy", "torch")])
def test_leaves_may_depend_on_each_other(example, place):
    """A path from one array to another counts once, in derivatives of both orders.

    The bridge follows it, whatever backend has kernels; only plain torch has no need of a bridge.
    """
    p = example.problem("tiny")
    loss = total(p, place[1])

    def chained(*leaves):
        given = [leaves[0]]
        for leaf in leaves[1:]:
            given.append(leaf * (1 + given[-1].mean().tanh() / 8))
        return loss(*given)

    assert torch.autograd.gradcheck(chained, leaves_of(p), fast_mode=True)
    assert torch.autograd.gradgradcheck(chained, leaves_of(p), fast_mode=True)


@pytest.fixture
def nans_in_new_memory():
    """Have torch fill memory with NaN before anything is written there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nans_in_new_memory")
@at([place for place in TENSORS if place[1] not in ("numpy", "triton")])
def test_second_derivatives_by_some_leaves_read_no_new_memory(example, place):
    """A backward by some arrays keeps of others no more than their shapes."""
    p = example.problem("tiny")
    loss = total(p, place[1])

    def second(asked, wanted):
        leaves = leaves_of(p)
        given = [leaf if ask else leaf.detach() for leaf, ask in zip(leaves, asked, strict=True)]
        some = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        gradients = torch.autograd.grad(loss(*given), some, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), some)

    every = [True] * len(p.leaves)
    for wanted in asked_for(len(p.leaves)):
        for got, want in zip(second(wanted, wanted), second(every, wanted), strict=True):
            close(p, got, want, times=64)


@needs_torch
@every_example
def test_batched_cotangents(example):
    """`is_grads_batched` gives every row what a pass of its own gives, of both orders."""
    p = example.problem()
    function, leaves = function_of(p), leaves_of(p)
    outs = tuple_of(function(*leaves))
    rng = np.random.default_rng(0)

    def compared(outs):
        batch = [tensor(rng.normal(size=(3, *out.shape))) for out in outs]
        options = {"retain_graph": True, "allow_unused": True}
        got = torch.autograd.grad(outs, leaves, batch, is_grads_batched=True, **options)
        for at, row in enumerate(zip(*batch, strict=True)):
            want = torch.autograd.grad(outs, leaves, row, **options)
            for one, other in zip(got, want, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one[at], other)

    compared(outs)
    gradients = torch.autograd.grad(
        outs, leaves, [torch.ones_like(out) for out in outs], create_graph=True
    )
    # A linear op's gradient depends on its cotangent alone.
    again = [gradient for gradient in gradients if gradient.requires_grad]
    if again:
        compared(again)


@pytest.mark.interpreted_slow(
    example=("forth-packed", "degree", "scatter", "gather", "density-iso", "triangle-hidden")
)
@at([place for place in TENSORS if place[1] != "torch"])
def test_derivatives_are_those_of_the_formula(example, place):
    """The test above compares the formula with differences."""
    p = example.problem("tiny")
    order = 2 if place[1] == "triton" else 3
    for got, want in zip(*(derivatives(p, b, order) for b in (place[1], "torch")), strict=True):
        # Every order differentiates the roundings of the one before.
        close(p, got, want, times=64)


def asked_for(count):
    """Return masks: all proper subsets of few arrays; of many, single ones and all but one."""
    if count <= 4:
        return list(itertools.product([True, False], repeat=count))[1:-1]
    one = [tuple(at == number for at in range(count)) for number in range(count)]
    return one + [tuple(not ask for ask in asked) for asked in one]


@needs_torch
@pytest.mark.parametrize("example", [*EXAMPLES, *UNPACKED], ids=str)
def test_no_derivative_is_left_out_silently(example):
    """Every array of floats that requires grad has a gradient, or an error names it."""
    p = example.problem("tiny")
    arrays = {n: a for n, a in p.arguments.items() if isinstance(a, np.ndarray)}
    for name in [n for n, a in arrays.items() if a.dtype.kind == "f"]:
        leaf = tensor(arrays[name].copy()).requires_grad_()
        given = {**as_framework("torch", p), name: leaf}
        if name in p.leaves or name in p.op.by_request:
            outs = tuple_of(p.op(**given))
            assert torch.autograd.grad(outs, leaf, tuple(map(tensor, p.cotangents)))[0].any()
        else:
            with pytest.raises(ValueError, match=f"{name} requires grad; it is a constant"):
                p.op(**given)


@few
@at([place for place in TENSORS if place[1] != "numpy"])
def test_gradients_of_some_of_the_arrays(example, place):
    """A gradient asked for alone has the same bits as among all."""
    p = small(example, place)
    count = len(p.leaves)
    want = solve(place, p)[-count:]
    choices = asked_for(count)
    for asked in choices[:: 1 if place[1] != "triton" else 5]:
        leaves = [leaf.requires_grad_(ask) for leaf, ask in zip(leaves_of(p), asked, strict=True)]
        outs = tuple_of(function_of(p, place[1])(*leaves))
        some = list(itertools.compress(leaves, asked))
        got = torch.autograd.grad(outs, some, tuple(map(tensor, p.cotangents)))
        for one, other in zip(got, itertools.compress(want, asked), strict=True):
            agree(p, place[1], one.numpy(), other)


@at(ARRAYS)
def test_the_pullback_returns_gradients_of_the_arrays_given(example, place):
    p = example.problem()
    for left_out in ((), *itertools.combinations(example.optional, 1), example.optional):
        fewer = p.but(**dict.fromkeys(left_out))
        given = [fewer.arguments[name] for name in fewer.leaves]
        out, pullback = p.op.vjp(**fewer.arguments, wrt=fewer.leaves, backend=place[1])
        gradients = pullback(*p.cotangents)
        assert [gradient.shape for gradient in gradients] == [array.shape for array in given]
        others = (*tuple_of(out), *p.cotangents, *given)
        assert not any(np.shares_memory(one, other) for one in gradients for other in others)
    for number, cotangent in enumerate(p.cotangents):
        for wrong in (np.ones((2, *cotangent.shape)), np.ones(cotangent.size + 1), 1.0):
            if np.shape(wrong) == cotangent.shape:
                continue
            cotangents = [None] * number + [wrong] + [None] * (len(p.cotangents) - number - 1)
            with pytest.raises(ValueError, match=r"the cotangent has shape .*; it should be"):
                pullback(*cotangents)


@at(ARRAYS)
def test_a_cotangent_that_is_none_is_zero(example, place):
    p = example.problem()
    _, pullback = p.op.vjp(**p.arguments, wrt=p.leaves, backend=place[1])
    for asked in list(itertools.product([True, False], repeat=len(p.cotangents)))[1:]:
        pairs = list(zip(p.cotangents, asked, strict=True))
        got = pullback(*(c if ask else None for c, ask in pairs))
        want = pullback(*(c if ask else 0 * c for c, ask in pairs))
        for one, other in zip(got, want, strict=True):
            if one is None:
                assert not other.any()
            else:
                agree(p, place[1], one, other)


@every_example
@pytest.mark.parametrize("name", SERVE_ARRAYS)
@needs_torch
def test_the_backward_uses_the_backend_of_the_forward(example, name, monkeypatch):
    p = example.problem("tiny")
    leaves = leaves_of(p)
    with requests(monkeypatch) as asked:
        with fusedops.use_backend(name):
            value = total(p)(*leaves)
        first = torch.autograd.grad(value, leaves, create_graph=True)
        torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves)
    assert len(asked) >= 2
    assert {backend for _, backend in asked} == {name}


# torch.func.


@at(BRIDGED)
def test_transforms(example, place):
    """Gradients, batches and gradients of batches have the bits of plain calls."""
    p = example.problem()
    function, loss = function_of(p, place[1]), total(p, place[1])
    arrays = [tensor(p.arguments[name]) for name in p.leaves]
    every = tuple(range(len(arrays)))

    def check(got, want):
        for one, other in zip(got, want, strict=True):
            agree(p, "cython", one.numpy(), other.numpy())

    leaves = leaves_of(p)
    want = torch.autograd.grad(loss(*leaves), leaves)
    check(torch.func.grad(loss, argnums=every)(*arrays), want)
    # Flipping makes another problem in which a density's widths stay positive.
    batch = [torch.stack([a, a.flip(0), 1.25 * a]) for a in arrays]
    rows = [tuple_of(function(*(array[b] for array in batch))) for b in range(3)]
    stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    check(tuple_of(torch.vmap(function)(*batch)), stacked)
    gradients = torch.vmap(torch.func.grad(loss, argnums=every))(*batch)
    check([gradient[0] for gradient in gradients], want)
    # Map the first argument alone, along another dimension.
    dims = (arrays[0].ndim, *[None] * (len(arrays) - 1))
    moved = torch.stack([arrays[0], arrays[0].flip(0)], -1)
    shared = tuple_of(torch.vmap(function, in_dims=dims)(moved, *arrays[1:]))
    check([out[0] for out in shared], tuple_of(function(*arrays)))


@at(BRIDGED)
def test_forward_mode(example, place):
    """Tangents are what differences say, and what the pullback says: dy · J dx = Jᵀ dy · dx."""
    from torch.autograd import forward_ad

    p = example.problem("tiny")
    function, arrays = function_of(p, place[1]), [tensor(p.arguments[name]) for name in p.leaves]
    rng = np.random.default_rng(3)
    dx = [tensor(rng.normal(size=a.shape)) for a in arrays]
    outs, tangents = map(tuple_of, torch.func.jvp(function, tuple(arrays), tuple(dx)))
    all_agree(p, place[1], [out.numpy() for out in outs], evaluate(place, p))
    step = 1e-5
    ends = [
        tuple_of(function(*(a + sign * step * d for a, d in zip(arrays, dx, strict=True))))
        for sign in (1, -1)
    ]
    for tangent, up, down in zip(tangents, *ends, strict=True):
        torch.testing.assert_close(tangent, (up - down) / (2 * step), atol=1e-7, rtol=1e-6)
    gradients = map(tensor, solve(place, p)[-len(arrays) :])
    pulled = sum((g * d).sum() for g, d in zip(gradients, dx, strict=True))
    pushed = sum((tensor(c) * t).sum() for c, t in zip(p.cotangents, tangents, strict=True))
    torch.testing.assert_close(pushed, pulled, atol=1e-10, rtol=1e-9)
    with forward_ad.dual_level():
        duals = tuple_of(function(*map(forward_ad.make_dual, arrays, dx)))
        for dual, tangent in zip(duals, tangents, strict=True):
            assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent)


@needs_torch
@every_example
def test_jacobians_of_forward_mode(example):
    p = example.problem("tiny")
    function, arrays = function_of(p), [tensor(p.arguments[name]) for name in p.leaves]
    got, want = (
        tuple_of(jacobian(function)(*arrays)) for jacobian in (torch.func.jacfwd, torch.func.jacrev)
    )
    torch.testing.assert_close(got, want)
    options = {"fast_mode": True, "check_undefined_grad": False}
    assert torch.autograd.gradcheck(
        function, leaves_of(p), check_forward_ad=True, check_batched_forward_grad=True, **options
    )
    assert torch.autograd.gradgradcheck(
        function, leaves_of(p), check_fwd_over_rev=True, check_rev_over_rev=False, **options
    )


@needs_torch
@every_op
def test_forward_mode_in_recordings(example):
    from torch.fx.experimental.proxy_tensor import make_fx

    p = example.problem("tiny")
    function = function_of(p, "numpy")
    arrays = tuple(tensor(p.arguments[name]) for name in p.leaves)

    def push(*arrays):
        return tuple_of(torch.func.jvp(function, arrays, arrays)[1])

    torch.testing.assert_close(make_fx(push)(*arrays)(*arrays), push(*arrays))


@needs_torch
def test_a_compiled_function_refuses_dual_tensors():
    from torch.autograd import forward_ad

    x = torch.ones(1, 3, 2, dtype=torch.float64)
    fast, _ = compiled(lambda x: fusedops.dynamic_conv(x, x[0, :2]))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward mode"):
        fast(forward_ad.make_dual(x, x))


INDEXED = [e for e in UNPACKED if e.op is not fusedops.gaussian_density]


@needs_torch
@pytest.mark.parametrize("example", INDEXED, ids=str)
def test_raw_indices_under_transforms_and_in_recordings(example):
    """No transform may map over them; a recording reads the ones that it is given."""
    from torch.fx.experimental.proxy_tensor import make_fx

    p = example.problem()
    function, loss, leaves = function_of(p), total(p), leaves_of(p)
    arrays = {n: a for n, a in p.arguments.items() if isinstance(a, np.ndarray)}
    indices = {n: tensor(a) for n, a in arrays.items() if a.dtype.kind == "i"}
    every = tuple(range(len(leaves)))
    got = torch.func.grad(loss, argnums=every)(*(leaf.detach() for leaf in leaves))
    torch.testing.assert_close(got, torch.autograd.grad(loss(*leaves), leaves))
    name, first = next(iter(indices.items()))
    with pytest.raises(TypeError, match=rf"{name} is mapped over or differentiated by torch\.func"):
        torch.vmap(lambda index: function(*leaves, **{**indices, name: index}))(first[None])

    def call(leaves, indices):
        return tuple_of(function(*leaves, **indices))

    recorded = make_fx(call)(leaves, indices)
    others = {name: index.clone() for name, index in indices.items()}
    for index in others.values():
        index[..., 1:-1] = index[..., :1]
    assert any(not torch.equal(others[name], indices[name]) for name in indices)
    for given in (indices, others):
        torch.testing.assert_close(recorded(leaves, given), call(leaves, given))


# Graphs of torch.


NOTHING = (
    *("none-uniform", "no-edges", "no-channels", "no-rows", "no-atoms-iso", "no-residues"),
    *("no-restraints", "attention-no-rows"),
)
OPCHECKED = of_primitives(
    *("chain-uniform", "atom_sigmas-weighted", "degenerate-uniform"),
    *("dynamic-packed", "static-mamba", "w1", "w5", "static-w1"),
    *("l1-m1-forth", "uma-degree", "own", "undo-packed", "l0-packed", "l2-dense"),
    *("uma-second", "gates", "l0-m0-l", "odd", "triclinic-aniso", "openfold", "plain"),
    *("generated-packed", "generated-bare", "delta-packed", "delta-bare", "delta-step"),
    *("backbone", "attention-ending"),
    *NOTHING,
)


# The last traces a pass in both directions, which takes most of the time; for primitives of ops the
# test of compiled calls traces these too.
UTILS = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"


def transposed(array):
    return array.mT.contiguous().mT if array.ndim > 1 else array.repeat_interleave(2)[::2]


def opchecks():
    """Yield cases in their layout, and some in another; torch traces some, and empty ones."""
    compiled = [op.primitive for op in TRACED_OF_OP]
    traced = [case for case in typical(OPCHECKED).values() if case.primitive not in compiled]
    traced += of_primitives(*NOTHING)
    strided = of_primitives(
        *("chain-weighted", "dynamic-short", "l1-m1-back", "l1-dense", "odd", "no-atoms-iso"),
        *("small-aniso", "l1-m1", "l1-m1-l", "delta", "delta-step-tokens", "attention-bare"),
    )
    primitives = {case.primitive for case in CASES}
    assert {case.primitive for case in OPCHECKED} == primitives
    for case in OPCHECKED:
        yield pytest.param(case, "", UTILS if case in traced else UTILS[:-1], id=str(case))
    for case, backend in itertools.product(strided, ("cython", "torch")):
        yield pytest.param(case, backend, UTILS[:-1], id=f"{case}-strided-{backend}")


@needs_torch
@pytest.mark.parametrize(("case", "backend", "utils"), list(opchecks()))
def test_opcheck(case, backend, utils):
    if backend:
        available("torch", backend)
        operator, arguments = registered(case, backend, torch.float32, transposed)
    else:
        operator, arguments = registered(case)
    torch.library.opcheck(operator, arguments, test_utils=utils)


@needs_torch
@every_example
def test_tensors_without_memory(example):
    """Fake and meta tensors have the shapes and dtypes of results; a recording gives their bits."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    p = example.problem(dtype="float32")
    function = function_of(p)
    arrays = [tensor(p.arguments[name]) for name in p.leaves]
    want = tuple_of(function(*arrays))
    with FakeTensorMode(allow_non_fake_inputs=True):
        apart = function_of(example.problem(dtype="float32"))
        fake = tuple_of(apart(*(torch.ones(a.shape) for a in arrays)))
    assert [(f.shape, f.dtype) for f in fake] == [(w.shape, w.dtype) for w in want]
    # Ops read packed arguments, which so need memory.
    if not any(isinstance(value, Packed) for value in p.arguments.values()):
        meta = tuple_of(p.op(**as_framework("torch", p, "meta"), backend="torch"))
        assert [(m.shape, m.dtype, m.device.type) for m in meta] == [
            (w.shape, w.dtype, "meta") for w in want
        ]
    recorded = tuple_of(make_fx(function)(*arrays)(*arrays))
    for got, other in zip(recorded, want, strict=True):
        agree(p, "cython", got.numpy(), other.numpy())


def compiled(function, **options):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


@needs_torch
@pytest.mark.parametrize("example", [*TRACED, *UNPACKED], ids=str)
def test_compile_without_breaks_or_recompiling(example, monkeypatch):
    """Sizes change from one structure, sequence or batch to the next."""
    problems = [example.of(size) for size in example.others]
    op, names = example.op, problems[0].leaves
    first, *others = (p.arguments for p in problems)
    same = {n for n, a in first.items() if not isinstance(a, np.ndarray | Packed)}
    rest = {n: first[n] for n in same if all(first[n] == other[n] for other in others)}

    def function(leaves, constants):
        given = [1.5 * leaf for leaf in leaves]
        out = op(**dict(zip(names, given, strict=True)), **constants, **rest)
        return out if isinstance(out, tuple) else (out,)

    fast, counter = compiled(function, dynamic=True)
    frames = []
    for p in problems:
        arguments = as_framework("torch", p)
        constants = {n: a for n, a in arguments.items() if n not in names and n not in rest}
        found = []
        for f in (fast, function):
            leaves = leaves_of(p)
            outs = f(leaves, constants)
            found.append([*outs, *torch.autograd.grad(sum(o.sin().sum() for o in outs), leaves)])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
        detached = [leaf.detach() for leaf in leaves]
        if example is TRACED_OF_OP[op]:
            found = (f(detached, constants) for f in (fast, function))
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got, want)
        frames.append(counter.frame_count)
    # Compiled code asks for its backend when it runs.
    with requests(monkeypatch) as asked:
        fast(leaves, constants)
        with fusedops.use_backend("numpy"):
            fast(leaves, constants)
    assert [backend for _, backend in asked] == [None, "numpy"]
    frames.append(counter.frame_count)
    # Calls without a gradient, of one example of the op, make another graph; a number may make the
    # first start over.
    assert len(set(frames)) == 1
    assert frames[0] <= 1 + (example is TRACED_OF_OP[op]) + (
        example.name in ("degree", "delta", "attention-masked")
    )


@needs_torch
@pytest.mark.parametrize("name", ["conv", "scatter", "density-aniso"])
def test_out_inside_compiled_code(name):
    """One output of two is shown; a size is of no array; values can't be looked at."""
    (p,) = (example.problem() for example in EXAMPLES if example.name == name)
    fast, _ = compiled(function_of(p), dynamic=True)
    arrays = [tensor(p.arguments[name]) for name in p.leaves]
    want = evaluate(("torch", None), p)
    out = torch.empty(want[0].shape, dtype=torch.float64)
    fast(*arrays, out=out)
    agree(p, "cython", out.numpy(), want[0])


@pytest.mark.gpu
@pytest.mark.quick
@every_example
def test_a_cuda_graph_replays_new_numbers(example):
    """Values and gradients are computed of numbers written in place of the recorded ones."""
    p = example.problem("medium", "float32")
    on_gpu = as_framework("torch", p, "cuda")
    leaves = {name: on_gpu[name].requires_grad_() for name in p.leaves}
    cotangents = [tensor(c).to("cuda") for c in p.cotangents]

    def run():
        outs = tuple_of(p.op(**{**on_gpu, **leaves}))
        return [o.detach() for o in outs], torch.autograd.grad(outs, [*leaves.values()], cotangents)

    graph, captured = capture(run)
    with torch.no_grad():
        for leaf in leaves.values():
            leaf *= 1.25
    graph.replay()
    for got, want in zip(itertools.chain(*captured), itertools.chain(*run()), strict=True):
        # The order of a map's sums changes from run to run.
        close(p, got.cpu().numpy(), want.cpu().numpy())


# `out`.


def bad_outs(shape):
    """Yield for every wrong `out` a function that makes it, the error and its message."""

    def spare(shape, dtype="float64"):
        return np.full(shape, 7.0, dtype)

    yield lambda: spare((*shape[:-1], shape[-1] + 1)), ValueError, "has shape .*{}"
    yield lambda: spare((1, *shape)), ValueError, "has shape .*{}"
    yield lambda: spare(shape, "f4"), TypeError, "has dtype float32{} float64"
    yield lambda: spare((*shape[:-1], 2 * shape[-1]))[..., ::2], ValueError, "is not contiguous{}"
    yield lambda: frozen(spare(shape)), ValueError, "is read-only{}"
    if len(shape) > 1:
        yield lambda: spare(shape[::-1]).T, ValueError, "is not contiguous{}"
    yield lambda: [7.0], TypeError, "is a list{} a NumPy array"
    yield lambda: 7.0, TypeError, "is a float{} a NumPy array"


def bad_out_tensors(shape):
    kind = {"dtype": torch.float64}
    yield np.empty(shape), TypeError, "is a ndarray{} a torch tensor"
    yield torch.empty(*shape[:-1], shape[-1] + 1, **kind), ValueError, "has shape"
    yield torch.empty(shape).bfloat16(), TypeError, "has dtype bfloat16{} float64"
    yield torch.empty(1, **kind).expand(shape), ValueError, "is not contiguous"
    yield torch.empty(shape, device="meta", **kind), ValueError, "is on meta{} on cpu"
    grad = torch.empty(shape, requires_grad=True, **kind)
    yield grad, RuntimeError, "is given and an argument req"


@with_out
def test_bad_out(example):
    """The error names a bad `out` and leaves it unchanged."""
    p = example.problem()
    for make, error, message in bad_outs(p.cotangents[0].shape):
        out = make()
        with pytest.raises(error, match=f"{p.op.__name__}: out {message}".format(SHOULD)):
            p.op(**p.arguments, out=out)
        assert (np.asarray(out) == 7).all(), message


@needs_torch
@with_out
def test_tensors_as_out(example):
    p = example.problem()
    shape, arguments = p.cotangents[0].shape, as_framework("torch", p)
    for out, error, message in bad_out_tensors(shape):
        with pytest.raises(error, match=f"{p.op.__name__}: out {message}".format(SHOULD)):
            p.op(**arguments, out=out)
    out = torch.zeros(shape, dtype=torch.float64)
    # Another backward needs its values.
    loss = (torch.ones((), requires_grad=True) * out).sum()
    arguments[p.leaves[-1]].requires_grad_()
    with pytest.raises(RuntimeError, match=r"requires grad.*called without out, or under torch"):
        p.op(**arguments, out=out)
    assert not out.any()
    with torch.no_grad():
        found = p.op(**arguments, out=out)
    assert tuple_of(found)[0] is out
    assert out.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@few
@pytest.mark.interpreted_slow(dtype="float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@at(PLACES, [e for e in (*EXAMPLES, *UPDATES) if e.takes_out])
def test_out_is_filled_and_returned(example, place, dtype, aligned):
    p, again = (small(example, place, dtype) for _ in range(2))
    out = np.full(p.cotangents[0].shape, np.nan, dtype)
    filled = tensor(out) if place[0] == "torch" else unaligned(out)
    found = p.op(**as_framework(place[0], p), out=filled, backend=place[1])
    assert tuple_of(found)[0] is filled
    got = [np.asarray(a) for a in tuple_of(found)]
    all_agree(p, place[1], [*got, *updated(p)], [*evaluate(place, again), *updated(again)])


# Wrong kinds of arguments.


def refused(p, changes, error, message):
    """Call an op, its `vjp` if it has any, and `explain` with changed arguments."""
    for function in (p.op, *[p.op.vjp] * bool(p.leaves), p.op.explain):
        with pytest.raises(error, match=f"^{p.op.__name__}: {message}"):
            function(**{**p.arguments, **changes})


@every_call
def test_an_array_of_another_dtype_or_rank_or_none_is_named(example):
    p = example.problem()
    for name in example.floats:
        integers, declared = p.op.declared[name].integers, p.op.declared[name]
        message = rf"{name} has dtype .*; it should be (bool, an integer, )?float32 or"
        for dtype in (*["i8"] * (not integers), "f2", complex, ">f8", "U1"):
            refused(p, {name: p.arguments[name].astype(dtype)}, TypeError, message)
        same(p.arguments[name], example.problem().arguments[name])
        if name not in example.leaves:
            continue
        # A leading dimension may be several.
        several = declared.lead and not declared.broadcasts
        many = () if several else (p.arguments[name][(None,) * 7],)
        for wrong in (*many, *([np.ones(())] * (name != "mask"))):
            refused(p, {name: wrong}, ValueError, rf"{name} has shape .*; it")
        if not declared.optional:
            refused(p, {name: None}, TypeError, f"{name} is None; it should be an array")


@every_call
def test_a_size_that_something_else_has_is_compared(example):
    p = example.problem()
    sizes = {
        name: next(terms for terms in array.shapes if len(terms) == p.arguments[name].ndim)
        for name, array in p.op.declared.items()
        if isinstance(p.arguments.get(name), np.ndarray)
    }
    compared = 0
    for name, terms in sizes.items():
        elsewhere = [size.name for other, of in sizes.items() if other != name for size in of]
        for axis, size in enumerate(terms):
            alone = size.name not in elsewhere and [t.name for t in terms].count(size.name) == 1
            if alone and size.name not in p.op.primitive.later and not size.name.isdecimal():
                continue
            # Slots choose among any number of states.
            if name in p.op.primitive.mutates and axis == 0:
                continue
            twice = np.concatenate([p.arguments[name]] * 2, axis)
            refused(p, {name: twice}, ValueError, ".*should (be|have|broadcast)")
            compared += 1
    assert compared


@needs_torch
@every_call
def test_tensors_of_another_dtype_are_named(example):
    """test_errors.py tries complex ones and tensors of other kinds."""
    p = example.problem(dtype="float32")
    arguments = as_framework("torch", p)
    for name in example.floats:
        for kind in (torch.float8_e4m3fn, *[torch.int32] * (not p.op.declared[name].integers)):
            message = rf"^{p.op.__name__}: .*{name} has dtype {str(kind)[6:]}; it should be"
            with pytest.raises(TypeError, match=message):
                p.op(**{**arguments, name: arguments[name].to(kind)})


@needs_torch
@every_example
def test_tensors_and_arrays_do_not_mix_nor_do_devices(example):
    p = example.problem(dtype="float32")
    arrays, tensors = p.arguments, as_framework("torch", p)
    first, *others = example.floats
    message = rf"{p.op.__name__}\.vjp: {p.leaves[0]} is a torch tensor; it should be a NumPy array"
    with pytest.raises(TypeError, match=message):
        p.op.vjp(**tensors)
    for name in others:
        with pytest.raises(
            TypeError, match=f"{name} is a torch tensor; it should be a NumPy array"
        ):
            p.op(**{**arrays, name: tensors[name]})
        with pytest.raises(
            TypeError, match=f"{name} is a NumPy array; it should be a torch tensor"
        ):
            p.op(**{**tensors, name: arrays[name]})
        with pytest.raises(
            ValueError, match=f"{name} is on meta; it should be on cpu, where {first}"
        ):
            p.op(**{**tensors, name: tensors[name].to("meta")})
    for name, value in arrays.items():
        if isinstance(value, Packed):
            with pytest.raises(ValueError, match=f"{name} is on meta; it should be on cpu"):
                p.op(**{**tensors, name: value.to("meta")})
            if first != name:
                with pytest.raises(ValueError, match="is on cpu; it should be on meta"):
                    p.op(**{**tensors, first: tensors[first].to("meta")})


# Backends.


@every_example
def test_a_backend_that_cannot_serve_says_so(example):
    p = example.problem()
    refused(p, {"backend": "cuda"}, ValueError, "backend is 'cuda'; it should be one of triton")
    for name in ("triton", "torch"):
        with pytest.raises(fusedops.BackendUnavailable, match="it takes torch tensors"):
            p.op(**p.arguments, backend=name)
        assert p.op.explain(**p.arguments, backend=name).backend is None


@at([*ARRAYS, *TENSORS])
def test_explain_says_who_serves(example, place):
    p = example.problem()
    arguments = as_framework(place[0], p)
    explanation = p.op.explain(**arguments, backend=place[1])
    assert explanation.backend == place[1]
    assert explanation.request.op == p.op.primitive.name
    with fusedops.use_backend(place[1]):
        assert p.op.explain(**arguments).backend == place[1]


# Packed arguments.


every_packed = pytest.mark.parametrize(
    ("example", "name"),
    [
        pytest.param(example, name, id=f"{type(value).__name__}-{example}")
        for example in EXAMPLES
        for name, value in example.problem().arguments.items()
        if isinstance(value, Packed)
    ],
)


@needs_torch
@every_packed
def test_packed_arguments_first_used_in_inference_mode_stay_usable(example, name):
    p = example.problem()
    packed = pickle.loads(pickle.dumps(p.arguments[name]))
    p = p.but(**{name: packed})
    with torch.inference_mode():
        p.op(**as_framework("torch", p), backend="torch")
    leaves = leaves_of(p)
    first = torch.autograd.grad(total(p, "torch")(*leaves), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    assert all(gradient.isfinite().all() for gradient in second)


@needs_torch
@every_packed
def test_packed_arguments_first_used_in_fake_mode_stay_usable(example, name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    p = example.problem()
    with FakeTensorMode(allow_non_fake_inputs=True):
        function_of(p)(*(torch.ones(p.arguments[n].shape, dtype=torch.float64) for n in p.leaves))
    for got, want in zip(solve(("torch", "torch"), p), solve(("numpy", "numpy"), p), strict=True):
        close(p, got, want)
