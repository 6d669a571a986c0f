"""The promises of ops that update an argument in place, tested with the catalogue's `updates`."""

from __future__ import annotations

import numpy as np
import pytest

from contract import UPDATES, all_agree, as_framework, evaluate, same, tensor
from places import HAS_TORCH, SERVE_TENSORS, interpreted, needs_torch

if HAS_TORCH:
    import torch

pytestmark = interpreted

every_update = pytest.mark.parametrize("example", UPDATES, ids=str)


def named(p):
    """Return the name of the argument that is updated, and a copy of its array."""
    (name,) = p.op.primitive.mutates
    return name, p.arguments[name].copy()


def updated(place, p, **options):
    """Return the result, and the state that a copy of the problem's is updated to."""
    name, state = named(p)
    out = evaluate(place, p.but(**{name: state}), **options)
    return [*out, state]


# The size of memory, and the part of it in which an axis of n elements lies.
VIEWS = {
    "slice": lambda n: (n + 2, slice(1, -1)),
    "transpose": lambda n: (n + 2, slice(1, -1)),
    "strided": lambda n: (2 * n + 1, slice(1, None, 2)),
    "backwards": lambda n: (n + 2, slice(n, 0, -1)),
}


@pytest.mark.parametrize("view", VIEWS)
@every_update
def test_it_is_updated_where_it_lies(example, place, view):
    """A state may lie in a cache of many, whose other elements stay."""
    if view == "backwards" and place[0] == "torch":
        pytest.skip("tensors have no negative strides")
    p = example.problem()
    name, state = named(p)
    turned = state.T if view == "transpose" else state
    sizes, parts = zip(*map(VIEWS[view], turned.shape), strict=True)
    cache = np.full(sizes, 7.0)
    inside = cache[parts].T if view == "transpose" else cache[parts]
    inside[...] = state
    want = updated(place, p)
    all_agree(p, place[1], [*evaluate(place, p.but(**{name: inside})), inside], want)
    assert (inside != state).any()
    inside[...] = 7.0
    assert (cache == 7.0).all()


@every_update
def test_padding_is_of_no_state(example, place):
    p = example.problem()
    slots = p.arguments["slots"].copy()
    slots[0] = -1
    p = p.but(slots=slots)
    *out, state = updated(place, p)
    all_agree(p, None, [*out, state], updated(("numpy", "numpy"), p))
    others = np.delete(np.arange(len(state)), slots[1:])
    same(state[others], named(p)[1][others])


def overlapping(state):
    """Yield writable views of the shape of a state, some of whose elements are others."""
    for axis in range(state.ndim):
        for stride in {0, state.itemsize} - {state.strides[axis]}:
            strides = [*state.strides[:axis], stride, *state.strides[axis + 1 :]]
            if state.shape[axis] > 1:
                yield np.lib.stride_tricks.as_strided(np.zeros(state.size), state.shape, strides)


@every_update
def test_one_that_cannot_be_updated_is_named(example):
    p = example.problem()
    name, state = named(p)
    frozen = state.copy()
    frozen.flags.writeable = False
    bad = [(state.astype("f4"), "has dtype float32; it should hold float64")]
    bad += [(frozen, "is read-only; it should be writable")]
    bad += [(view, "overlaps itself") for view in overlapping(state)]
    for array, message in bad:
        before = array.copy()
        with pytest.raises((TypeError, ValueError), match=f"^{p.op.__name__}: {name} {message}"):
            p.op(**p.but(**{name: array}).arguments)
        same(array, before)


@every_update
def test_slots_of_no_state_or_of_one_twice_are_named(example):
    p = example.problem()
    name, state = named(p)
    count, own = len(state), p.arguments["slots"]
    for slots, message in (
        ([*own[1:], count], f"has {count}; it should be below {count}"),
        ([*own[1:], own[1]], f"has {own[1]} twice; every sequence should have a state of its own"),
        (own + 0.0, "has dtype float64; it should be int"),
        (own[1:], rf"has shape \({len(own) - 1},\); it should be \({len(own)},\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{p.op.__name__}: slots {message}"):
            p.op(**p.but(slots=np.array(slots)).arguments)
        same(p.arguments[name], state)


@needs_torch
@every_update
def test_a_tensor_that_cannot_be_updated_is_named(example):
    p = example.problem(dtype="float32")
    name, state = named(p)
    given = as_framework("torch", p)
    whole = tensor(state)
    for bad, error, message in (
        (state, TypeError, "is a NumPy array; it should be a torch"),
        (whole[:1].expand(len(whole), *whole.shape[1:]), ValueError, "overlaps itself"),
        (whole.to("meta"), ValueError, "is on meta; it should be on cpu"),
        (whole.half(), TypeError, "has dtype float16; it should hold float32"),
        (whole.bfloat16(), TypeError, "has dtype bfloat16; it should hold float32"),
    ):
        with pytest.raises(error, match=f"^{p.op.__name__}: {name} {message}"):
            p.op(**{**given, name: bad})
    narrow = {n: a.bfloat16() if n in example.floats else a for n, a in given.items()}
    with pytest.raises(TypeError, match=f"{name} has dtype float16; it should hold bfloat16"):
        p.op(**{**narrow, name: whole.half()})
    same(whole.numpy(), named(p)[1])


@needs_torch
@pytest.mark.parametrize("backend", SERVE_TENSORS)
@every_update
def test_memory_that_is_the_negative_of_it_is_refused(example, backend):
    p = example.problem()
    name, state = named(p)
    negative = torch.complex(tensor(state), tensor(state)).conj().imag
    assert negative.is_neg()
    with pytest.raises(ValueError, match="a tensor to write to is a negative view"):
        p.op(**{**as_framework("torch", p), name: negative}, backend=backend)


@needs_torch
@pytest.mark.parametrize("backend", SERVE_TENSORS)
@every_update
def test_autograd_notices_what_is_written_in_place(example, backend):
    """Writing to a tensor that another backward needs gives an error, not a wrong gradient."""
    p = example.problem()
    given = as_framework("torch", p.mapped(np.copy))
    given["out"] = tensor(p.cotangents[0].copy())
    weight = torch.ones((), requires_grad=True)
    losses = [(weight * given[written]).sum() for written in (named(p)[0], "out")]
    p.op(**given, backend=backend)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@every_update
def test_it_has_no_vjp(example):
    p = example.problem()
    message = f"{p.op.__name__} has no gradient: it updates {named(p)[0]}"
    with pytest.raises(TypeError, match=message):
        p.op.vjp(**p.arguments)


@needs_torch
@every_update
def test_it_has_no_gradient(example, torch_backend):
    p = example.problem()
    name, state = named(p)
    message = f"{p.op.__name__} has no gradient: it updates {name}"
    want = updated(("torch", torch_backend), p)
    for leaf in example.floats:
        given = as_framework("torch", p.mapped(np.copy))
        given[leaf].requires_grad_()
        with pytest.raises(RuntimeError, match=message):
            p.op(**given, backend=torch_backend)
        same(given[name].detach().numpy(), state)
        with torch.no_grad():
            out = p.op(**given, backend=torch_backend)
        assert not out.requires_grad
        same(out.numpy(), want[0])

        def steps(x, given=given, leaf=leaf):
            return p.op(**{**given, leaf: x}).sum()

        if leaf != name:
            before = given[name].detach().clone()
            with pytest.raises(RuntimeError, match=message):
                torch.func.grad(steps)(given[leaf].detach())
            assert torch.equal(given[name], before)


@needs_torch
@every_update
def test_a_graph_serves_every_number_of_states(example):
    """The check of slots, which a graph can't make, doesn't count the states either."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def step(arrays):
        return example.op(**arrays, **rest)

    fast = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for size in example.others:
        p = example.of(size)
        given = as_framework("torch", p.mapped(np.copy))
        rest = {n: a for n, a in given.items() if not isinstance(a, torch.Tensor)}
        want = updated(("torch", "torch"), p)
        out = fast({n: a for n, a in given.items() if n not in rest})
        all_agree(p, None, [out.numpy(), given[named(p)[0]].numpy()], want)
    # One more where sizes are equal.
    assert counter.frame_count <= 2
