"""Plans: calls of a known kind, changes that make another kind, and references that plans keep."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import benches  # noqa: F401
import fusedops
from bench.workloads import WORKLOADS, Source
from fusedops._frame import kinds
from fusedops.conv.op import conv
from fusedops.wigner import wigner_d
from places import HAS_TORCH, forget_plans, needs_torch, needs_triton

if HAS_TORCH:
    import torch

FRAMEWORKS = ["numpy", pytest.param("torch", marks=needs_torch)]
OPS = {w.op.__name__: w for w in reversed(WORKLOADS) if w.device == "cpu" and not w.needs}

pytestmark = pytest.mark.usefixtures("fresh_plans")


@contextlib.contextmanager
def checks(op):
    """List every call of the function that checks an op's arguments."""
    entered = []
    code = op.__wrapped__.__code__

    def note(frame, event, _):
        if event == "call" and frame.f_code is code:
            entered.append(event)

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def arguments_of(name, framework="numpy", size=11):
    """Return new arguments of a typical call, of the same kind every time."""
    given = OPS[name].make(Source("float32"), size).arguments
    if framework == "numpy":
        return given
    return {
        n: torch.from_numpy(a.copy()) if isinstance(a, np.ndarray) else a for n, a in given.items()
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", OPS)
def test_a_known_kind_is_not_checked_again(name, framework):
    op = OPS[name].op
    with checks(op) as entered:
        want = op(**arguments_of(name, framework))
        assert len(entered) == 1
        got = op(**arguments_of(name, framework))
        assert len(entered) == 1
    np.testing.assert_array_equal(got, want)


def convolved(**changes):
    """Return a call's arguments, some of them changed."""
    given = {
        "x": np.ones((1, 8, 4)),
        "kernels": np.ones((4, 3)),
        "cu_seqlens": fusedops.Sequences([0, 3, 8]),
    }
    return {**given, **changes}


unaligned = np.empty(8 * 32 + 1, np.uint8)[1:].view(np.float64).reshape(1, 8, 4)
unaligned[...] = 1.0
frozen = np.ones((1, 8, 4))
frozen.flags.writeable = False
OTHERS = {
    "dtype": {"x": np.ones((1, 8, 4), np.float32)},
    "shape": {"kernels": np.ones((4, 2))},
    "one more axis": {"kernels": np.ones((1, 8, 4, 3))},
    "strides": {"x": np.ones((1, 4, 8)).swapaxes(1, 2)},
    "alignment": {"x": unaligned},
    "read-only": {"x": frozen},
    "list": {"kernels": np.ones((4, 3)).tolist()},
    "array that was none": {"bias": np.ones(4)},
    "option": {"activation": "silu"},
    "outputs": {"output_final_state": True},
    "backend": {"backend": "numpy"},
    "sizes of a packed argument": {"cu_seqlens": fusedops.Sequences([0, 3, 5, 8])},
    "none for a packed argument": {"cu_seqlens": None},
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_kind_is_checked(change):
    with checks(fusedops.dynamic_conv) as entered:
        fusedops.dynamic_conv(**convolved())
        fusedops.dynamic_conv(**convolved(**OTHERS[change]))
        assert len(entered) == 2
        fusedops.dynamic_conv(**convolved())
        assert len(entered) == 2


def test_read_only_arrays_compile_nothing():
    """Numba would compile a kernel of its own for them, for seconds."""
    pytest.importorskip("numba")
    from cpukern.conv.numba import _conv_chunks, _vjp_blocks

    def step(arguments):
        out, pullback = fusedops.dynamic_conv.vjp(**arguments, backend="numba")
        return out, *pullback(np.broadcast_to(2.0, out.shape))

    want = step(convolved())
    known = [len(kernel.signatures) for kernel in (_conv_chunks, _vjp_blocks)]
    given = convolved()
    for name in ("x", "kernels"):
        given[name].flags.writeable = False
    for got, expected in zip(step(given), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [len(kernel.signatures) for kernel in (_conv_chunks, _vjp_blocks)] == known
    assert not given["x"].flags.writeable


def test_other_kinds_differ_among_themselves_and_in_the_context():
    with checks(fusedops.dynamic_conv) as entered:
        for number, x in enumerate((np.ones((1, 8, 4)), frozen, unaligned)):
            fusedops.dynamic_conv(**convolved(x=x))
            assert len(entered) == number + 1
        with fusedops.use_backend("numpy"):
            fusedops.dynamic_conv(**convolved())
        fusedops.dynamic_conv(**convolved())
    assert len(entered) == 4


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_array_may_be_given_twice(framework):
    """No plan takes one object for two arguments, in its own call or in another."""
    rng = np.random.default_rng(0)
    ones = [1 + rng.random((1, 8, 4)) for _ in range(3)]
    kernels = rng.random((4, 3))
    want = [fusedops.dynamic_conv(x, kernels) + r for x, r in itertools.pairwise(ones)]
    twice = [fusedops.dynamic_conv(x, kernels) + x for x in ones]
    forget_plans()
    if framework == "torch":
        *ones, kernels = (torch.from_numpy(array).requires_grad_() for array in (*ones, kernels))
    with checks(fusedops.dynamic_conv) as entered:
        outs = [fusedops.dynamic_conv(x, kernels, residual=x) for x in ones]
        outs += [fusedops.dynamic_conv(x, kernels, residual=r) for x, r in itertools.pairwise(ones)]
        assert len(entered) == 1
    for out, right in zip(outs, [*twice, *want], strict=True):
        out = out if framework == "numpy" else out.detach().numpy()
        np.testing.assert_allclose(out, right, rtol=1e-14)
    if framework == "torch":
        for x, out in zip(ones, outs, strict=False):
            (dx,) = torch.autograd.grad(out.sum(), x)
            (plain,) = torch.autograd.grad(fusedops.dynamic_conv(x, kernels).sum(), x)
            np.testing.assert_allclose(dx, plain + 1, rtol=1e-14)


def test_a_packed_argument_of_other_dtypes_is_of_another_kind():
    cube, wa, wbwc = np.ones((1, 2, 1, 2)), np.array([[0, 2]]), np.array([[[0, 1]]])
    with checks(fusedops.structured_scatter_add) as entered:
        for dtype in (np.int64, np.int32):
            plan = fusedops.ScatterPlan(wa.astype(dtype), wbwc.astype(dtype), 4)
            fusedops.structured_scatter_add(cube, plan)
    assert len(entered) == 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_list_of_planes_is_packed_and_served_by_a_plan(framework):
    """A list has no kind; given by its name, it is checked in every call."""
    x, index, sigma = np.ones((4, 3)), np.array([[0, 1, 2, 3]]), np.array([0.1])
    if framework == "torch":
        x, index, sigma = map(torch.tensor, (x, index, sigma))
    with checks(fusedops.planarity_nll) as entered:
        want = fusedops.planarity_nll(x, [(index, sigma)])
        assert len(entered) == 1
        assert fusedops.planarity_nll(x, [(index, sigma)]) == want
        assert fusedops.planarity_nll(x, fusedops.Planes([(index, sigma)])) == want
        assert len(entered) == 1
        assert fusedops.planarity_nll(x, plane_groups=[(index, sigma)]) == want
        assert len(entered) == 2


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "no_grad": lambda: torch.no_grad(),
    "inference_mode": lambda: torch.inference_mode(),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
}


def tensors(**changes):
    given = convolved()
    given = {n: torch.tensor(a) if isinstance(a, np.ndarray) else a for n, a in given.items()}
    return {**given, **changes}


@needs_torch
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_torch_makes_another_kind(mode):
    x = torch.ones(1, 8, 4, dtype=torch.float64, requires_grad=True)
    with checks(fusedops.dynamic_conv) as entered:
        assert fusedops.dynamic_conv(**tensors(x=x)).requires_grad
        with MODES[mode]():
            out = fusedops.dynamic_conv(**tensors(x=x))
        assert len(entered) == 2
        assert out.requires_grad == (mode in ("autocast", "deterministic"))
        assert fusedops.dynamic_conv(**tensors(x=x)).requires_grad
        assert len(entered) == 2


@needs_torch
def test_tensors_of_other_kinds():
    wide = torch.ones(200, dtype=torch.float64)
    with checks(fusedops.dynamic_conv) as entered:
        fusedops.dynamic_conv(**convolved())
        # A tensor, a leaf, an alignment of only 8 bytes, and a stride each make another kind.
        for number, x in enumerate(
            (
                wide[:32].view(1, 8, 4),
                wide[:32].view(1, 8, 4).clone().requires_grad_(),
                wide[1:33].view(1, 8, 4),
                wide[:64:2].view(1, 8, 4),
            )
        ):
            fusedops.dynamic_conv(**tensors(x=x))
            assert len(entered) == number + 2


@needs_torch
def test_a_cotangent_without_memory_is_zero():
    leaf = torch.ones(1, 8, 4, dtype=torch.float64, requires_grad=True)
    for backend in ("cython", "numba", "numpy", "torch"):
        out = fusedops.dynamic_conv(**tensors(x=leaf, backend=backend))
        zero = torch._efficientzerotensor(out.shape, dtype=out.dtype)
        assert not torch.autograd.grad(out, leaf, zero)[0].any()


@needs_torch
def test_the_backward_asks_for_no_backend_where_the_forward_asked_for_none(monkeypatch):
    from fusedops._frame import registry

    asked = []
    genuine = registry.choose
    monkeypatch.setattr(registry, "choose", lambda r: asked.append(r.forced) or genuine(r))
    x = torch.ones(1, 8, 4, dtype=torch.float64, requires_grad=True)
    out = fusedops.dynamic_conv(**tensors(x=x))
    with fusedops.use_backend("numpy"):
        out.sum().backward()
    assert asked == [None, None]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sizes_in_arrays_are_read_in_every_call(framework):
    array = np.array if framework == "numpy" else torch.tensor
    for degree in (1, 2, 1):
        matrices = wigner_d(array([[0.0, 1.0, 2.0]]), array(degree))
        assert matrices.shape[1] == (degree + 1) ** 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_values_are_looked_at_in_every_call(framework):
    given = arguments_of("gaussian_density", framework) | {"on_bad": "raise"}
    fusedops.gaussian_density(**given)
    given["b"][3] = np.nan
    with pytest.raises(ValueError, match=r"gaussian_density: b\[3\] is nan"):
        fusedops.gaussian_density(**given)


def test_states_are_still_writable_in_every_step():
    state = np.zeros((2, 4, 3))
    token, kernels = np.ones((2, 4)), np.ones((4, 3))
    fusedops.dynamic_conv_step(token, state, kernels)
    state.flags.writeable = False
    with pytest.raises(ValueError, match="state is read-only"):
        fusedops.dynamic_conv_step(token, state, kernels)


def in_memory(array, memory):
    """Return an array of NumPy's or a tensor with values of another, at the start of memory."""
    view = memory[: array.size].reshape(array.shape)
    view[...] = array if isinstance(memory, np.ndarray) else torch.from_numpy(array)
    return view


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("op", [fusedops.dynamic_conv_step, fusedops.gated_delta_rule_step])
def test_memory_is_compared_in_every_step(op, framework):
    """A token of the same kind as before, but in the state's memory, is found."""
    shapes = {"x": (2, 4), "state": (2, 4, 3), "kernels": (4, 3)}
    name = "x"
    if op is fusedops.gated_delta_rule_step:
        shapes = {"q": (2, 2, 4), "k": (2, 2, 4), "v": (2, 2, 5), "g": (2, 2), "beta": (2, 2)}
        shapes, name = shapes | {"state": (2, 2, 4, 5)}, "k"
    rng = np.random.default_rng(0)
    values = {argument: rng.normal(size=shape) for argument, shape in shapes.items()}
    make = np.zeros if framework == "numpy" else functools.partial(torch.zeros, dtype=torch.float64)
    given = {argument: in_memory(array, make(256)) for argument, array in values.items()}
    memory = make(256)
    given["state"] = in_memory(values["state"], memory)
    for start in (128, 160, values["state"].size):
        given[name] = in_memory(values[name], memory[start:])
        op(**given)
    for start in (0, 8, values["state"].size - 8):
        given[name] = in_memory(values[name], memory[start:])
        with checks(op) as entered, pytest.raises(ValueError, match=f"{name} shares memory with s"):
            op(**given)
        assert not entered


def test_plans_stay_within_their_limit(monkeypatch):
    monkeypatch.setattr(kinds.Plans, "limit", 4)
    for tokens in [*range(1, 10)] * 2:
        out = fusedops.dynamic_conv(np.ones((1, tokens, 2)), np.ones((2, 2)))
        assert out.sum() == 2 * (2 * tokens - 1)
        assert all(len(owner.plans._plans) <= 4 for owner in (fusedops.dynamic_conv, conv))
    # The last plans made are still kept.
    with checks(fusedops.dynamic_conv) as entered:
        fusedops.dynamic_conv(np.ones((1, 9, 2)), np.ones((2, 2)))
        assert not entered
        fusedops.dynamic_conv(np.ones((1, 1, 2)), np.ones((2, 2)))
        assert entered


@pytest.mark.parametrize("backend", [None, "numpy"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.usefixtures("young_heap")
def test_no_plan_keeps_an_array(name, framework, backend):
    """A plan keeps no argument, no result and no `out`."""
    op = OPS[name].op
    given = arguments_of(name, framework)
    if framework == "torch":
        for leaf in OPS[name].make(Source("float32"), 11).leaves:
            given[leaf].requires_grad_()
    leaves = [a for a in given.values() if getattr(a, "requires_grad", False)]
    results = [op(**given, backend=backend) for _ in range(2)]
    if leaves:
        results += torch.autograd.grad(results[0].sum(), leaves)
    elif framework == "numpy" and op.primitive.pullback:
        value, pullback = op.vjp(**given, backend=backend)
        results += [value, *pullback(np.ones_like(value))]
        del pullback, value
    if "out" in inspect.signature(op).parameters:
        library, quietly = (
            (np, contextlib.nullcontext()) if framework == "numpy" else (torch, torch.no_grad())
        )
        with quietly:
            results.append(op(**given, out=library.empty_like(results[0]), backend=backend))
    alive = [
        weakref.ref(value)
        for value in (*given.values(), *leaves, *results)
        if not isinstance(value, (str, bool, int, float, np.generic, type(None)))
    ]
    assert alive
    del given, leaves, results
    gc.collect()
    assert not [kept for ref in alive if (kept := ref()) is not None]


def test_threads_share_plans():
    def call(tokens):
        return fusedops.dynamic_conv(np.ones((1, 1 + tokens % 7, 2)), np.ones((2, 2))).sum()

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(call, range(400)))
    assert got == [2 * (2 * (1 + tokens % 7) - 1) for tokens in range(400)]


@needs_torch
@pytest.mark.parametrize("backend", ["cython", "numba", "torch", "numpy"])
def test_every_slot_is_filled(backend):
    """One slot has the dtype that kernels write; the other gets a converted copy."""
    x, taps, state = (
        torch.randn(*shape, dtype=torch.float64) for shape in ((1, 5, 3), (3, 2), (1, 3, 2))
    )
    out, final = torch.zeros(1, 5, 3, dtype=torch.float64), torch.zeros(1, 3, 2)
    with fusedops.use_backend(backend):
        for _ in range(2):
            y = conv(x, taps, state, None, None, None, "none", out=(out.zero_(), final.zero_()))
            assert y.out is out
            assert y.final_state is final
            assert out.any()
            torch.testing.assert_close(final, x[:, -2:].swapaxes(1, 2).float())


@needs_torch
def test_a_known_backward_pass_makes_its_call_alone(monkeypatch):
    """Another layout of the cotangent, other leaves, and `create_graph` make another kind."""
    pulled = []
    genuine = conv.pullback
    monkeypatch.setattr(conv, "pullback", lambda *given: pulled.append(1) or genuine(*given))
    shapes = {"x": (1, 5, 3), "kernels": (3, 2), "residual": (1, 5, 3)}
    arrays = {name: torch.randn(*shape) for name, shape in shapes.items()}
    cotangent = torch.randn(1, 5, 3)

    def pull(of, cotangent, graph=False):
        given = {
            name: array.clone() for name, array in arrays.items() if name in ("x", "kernels", *of)
        }
        leaves = [given[name].requires_grad_() for name in of]
        out = fusedops.dynamic_conv(**given)
        found = torch.autograd.grad(out, leaves, cotangent, create_graph=graph)
        if graph:
            found += torch.autograd.grad(sum(f.square().sum() for f in found), leaves)
        return found

    kinds = [
        (("x", "kernels"), cotangent, False),
        (("x", "kernels"), cotangent.transpose(1, 2).contiguous().transpose(1, 2), False),
        (("x", "kernels"), torch.ones(()).expand(1, 5, 3), False),
        (("kernels",), cotangent, False),
        (("x", "residual"), cotangent, False),
        (("x", "kernels"), cotangent, True),
    ]
    first = []
    for number, kind in enumerate(kinds):
        first.append(pull(*kind))
        assert len(pulled) == number + 1
    for kind, want in zip(kinds, first, strict=True):
        assert all(map(torch.equal, pull(*kind), want))
    assert len(pulled) == len(kinds)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        assert all(map(torch.equal, pull(*kinds[0]), first[0]))
    assert len(pulled) == len(kinds)


@needs_torch
def test_a_compiled_graph_keeps_its_plans(monkeypatch):
    from fusedops._frame import bridge

    planned = []
    genuine = bridge.evaluation
    monkeypatch.setattr(bridge, "evaluation", lambda *a: planned.append(a) or genuine(*a))
    x, taps = torch.randn(1, 5, 3), torch.randn(3, 2)
    step = torch.compile(lambda x: fusedops.dynamic_conv(x, taps), backend="aot_eager")
    # The first call runs while torch still compiles, which is another mode.
    for _ in range(2):
        step(x)
    planned.clear()
    step(x)
    assert not planned


@needs_triton
@pytest.mark.parametrize("platform", ["12.8", None], ids=["NVIDIA", "AMD"])
def test_another_triton_warns_once_that_launches_are_not_recorded(monkeypatch, platform):
    from gpukern import tape

    def kernel(a, y):
        raise AssertionError

    monkeypatch.setattr(tape, "_DIRECT", False)
    monkeypatch.setattr(torch.version, "cuda", platform)
    tape._warn_of_no_tape.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for device in ("cpu", "cuda", "cuda"):
            assert tape.per_plan(kernel, torch.device(device)) is kernel
    tape._warn_of_no_tape.cache_clear()
    told = [str(one.message) for one in caught]
    assert len(told) == (platform is not None)
    assert all("each launch takes the host about 10 µs instead of 4" in one for one in told)
