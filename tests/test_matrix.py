"""Every case of every op, on every backend, in every dtype, against the reference."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import guarded
from contract import of_primitives
from fusedops import Sequences
from fusedops._catalogue import typical
from fusedops._frame import primitive as primitive_frame
from fusedops._frame import registry
from fusedops._frame.packed import Packed
from fusedops.conv.op import conv, conv_vjp
from fusedops.delta.op import delta, delta_vjp
from fusedops.planarity.op import gradient_vjp, nll
from fusedops.testing import CASES, check, error, poisoned_outputs, run
from places import (
    FILLING,
    HAS_TORCH,
    SERVE_ARRAYS,
    SERVE_TENSORS,
    available,
    interpreted,
    needs_linux,
    needs_torch,
)

# The framework of a case's arrays, and the requested backend.
DIRECT = [("numpy", name) for name in SERVE_ARRAYS]
DIRECT += [("torch", name) for name in SERVE_TENSORS if HAS_TORCH and name not in SERVE_ARRAYS]
#: Backends that get tensors as views, whatever the case: typical ones are enough.
BRIDGED = [("torch", name) for name in SERVE_ARRAYS if HAS_TORCH]


def served(cases, places):
    """Return every case in every place, with the test's id."""
    return [
        pytest.param(case, place, id=f"{case}-{'-'.join(place)}")
        for case in cases
        for place in places
    ]


CHAIN = next(case for case in CASES if case.primitive is nll)
TYPICAL = list(typical(CASES).values())
# One case for each way in which a kernel skips unwanted outputs, small for the interpreter.
ALONE = of_primitives(
    *("chain-uniform", "dynamic-short", "static-short", "w5", "generated-w7", "l1-m1-forth"),
    *("l1-m1-back", "undo-dense", "l3-m1", "l3-m1-m", "odd", "small-iso", "triclinic-aniso"),
    *("hidden-incoming", "plain"),
)
# For the interpreter, small cases of each way in which a kernel reads and writes.
FEW = of_primitives(
    *("static-packed", "dynamic-short", "paged", "circular", "generated-w7", "wrapped"),
    *("l1-m1-forth", "l1-m0-back", "undo-packed", "own", "l1-m0-scaled", "l1-dense"),
    *("l3-packed", "l3-m1", "l3-m1-m", "small-iso", "bad-aniso", "hidden-incoming", "openfold"),
    *("chain-uniform", "degenerate-weighted"),
)
# In the interpreter these cases are enough in float32, where kernels differ from float64 by
# roundings and casts.
FLOAT32 = [*ALONE, *FEW, *TYPICAL]


@interpreted
@pytest.mark.parametrize(("case", "place"), served(CASES, DIRECT) + served(TYPICAL, BRIDGED))
def test_agrees_with_the_reference(case, place, pytestconfig):
    # In float64 the reference is the formula in NumPy.
    dtypes = ["float64"] * (place != ("numpy", "numpy")) + ["float32"]
    if place[1] == "triton" and not pytestconfig.option.interpret_all:
        # In float64 a test below runs some cases, with all arrays between protected pages.
        dtypes = ["float64"] * (case not in FEW) + ["float32"] * (case in FLOAT32)
    for dtype in dtypes:
        check(case, *place, dtype, alone=place[1] != "triton" or case in ALONE)


@interpreted
@needs_torch
@pytest.mark.interpreted_slow(dtype="float16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("case", "place"), served(TYPICAL, [p for p in (*DIRECT, *BRIDGED) if p[0] == "torch"])
)
def test_sixteen_bits(case, place, dtype):
    check(case, *place, dtype)


def arguments_of(case):
    arrays, static = case.make()
    return case.primitive.Arguments(*arrays, *static)


def outputs_of(case):
    """Return the numbers of the outputs that a case has."""
    described = case.primitive.describe(arguments_of(case))
    return [number for number, output in enumerate(described) if output is not None]


OUTPUTS = [
    pytest.param(case, number, place, id=f"{case}-{case.primitive.outputs[number]}-{place[0]}")
    for case in TYPICAL
    for place in [("numpy", "numpy"), *[("torch", "torch")] * HAS_TORCH]
    for number in outputs_of(case)
]


@pytest.mark.parametrize(("case", "output", "place"), OUTPUTS)
@pytest.mark.usefixtures("fresh_plans")
def test_the_matrix_sees_a_broken_kernel(case, output, place, monkeypatch):
    """One element that is off by a millionth of the largest fails it, in either framework."""
    genuine = registry.choose

    def broken(request):
        backend, kernel = genuine(request)

        def wrong(*args):
            outputs = kernel(*args)
            if outputs[output] is not None:
                flat = outputs[output].reshape(-1)
                flat[flat.shape[0] // 2] += 2e-6 * abs(flat).max()
            return outputs

        return backend, wrong

    monkeypatch.setattr(registry, "choose", broken)
    with pytest.raises(AssertionError, match=case.primitive.outputs[output]):
        check(case, *place, "float32")


@pytest.mark.parametrize("backend", ["cython", "numba"])
@pytest.mark.usefixtures("fresh_plans")
def test_an_unwritten_output_shows(backend, monkeypatch):
    # The first request for a family's kernel registers all, and would undo the patch.
    registry.choose(registry.Request("planarity_nll", "numpy", "cpu", np.dtype("f8"), backend))
    monkeypatch.setitem(registry._kernels, ("planarity_nll", backend), lambda *args: None)
    monkeypatch.setattr(registry, "_chosen", {})
    outputs, _ = run(CHAIN, "numpy", backend, "float64")
    assert np.isnan(outputs[0])
    assert np.isnan(outputs[1]).all()


def test_poisoned_outputs_stay_so_around_a_check():
    with poisoned_outputs():
        check(CHAIN, "numpy", "numpy", "float64")
        assert primitive_frame.poison


def lies():
    """Yield primitives with shapes of arrays, beyond which indices or sequences point."""
    _, (planes, fit) = CHAIN.make()
    for primitive in (nll, gradient_vjp):
        yield primitive, [(20, 3)] * len(primitive.arrays), (planes, fit)
    T, D, W = 20, 3, 4
    for cu_seqlens in ([0, 2, 75, 80], [0, 0, 0, 1, 90]):
        states = {name: (len(cu_seqlens) - 1, D, W) for name in ("initial_state", "dfinal_state")}
        shapes = {"kernels": (1, T, D, W), "bias": (D,), **states}
        for primitive in (conv, conv_vjp):
            own = [shapes.get(name, (1, T, D)) for name in primitive.arrays]
            yield primitive, own, (Sequences(np.array(cu_seqlens)), "silu")
        (H, K), (HV, V) = (1, 3), (2, 5)
        states = {name: (len(cu_seqlens) - 1, HV, K, V) for name in states}
        # A few tokens go one by one on a GPU, and more of them in chunks.
        for T, scale in ((20, 1), (200, 3)):
            shapes = {"q": (1, T, H, K), "k": (1, T, H, K), "g": (1, T, HV), "beta": (1, T, HV)}
            for primitive in (delta, delta_vjp):
                own = [(shapes | states).get(name, (1, T, HV, V)) for name in primitive.arrays]
                yield primitive, own, (Sequences(scale * np.array(cu_seqlens)), 0.5)


GPU = pytest.param(("torch", "triton", "cuda"), marks=pytest.mark.gpu)


def name_of(part):
    return getattr(part, "name", None)


@interpreted
@pytest.mark.parametrize("place", [*FILLING, GPU], ids="-".join)
@pytest.mark.parametrize(("primitive", "shapes", "others"), list(lies()), ids=name_of)
def test_indices_that_lie_lead_nowhere(place, primitive, shapes, others):
    """A kernel takes them for no atoms or tokens, and touches nothing outside of its arrays."""
    framework, backend, device = (*place, "cpu")[:3]
    others = [part.to(device) if isinstance(part, Packed) else part for part in others]
    between = functools.partial(guarded.between, framework, device)
    rng = np.random.default_rng(0)
    arrays = [between(shape, np.nan, rng.normal(size=shape)) for shape in shapes]
    a = primitive.Arguments(*[array for _, array in arrays], *others)
    outputs = [between(shape, 5.0, 5.0) for shape, _ in primitive.describe(a)]
    request = registry.Request(primitive.name, framework, device, a[0].dtype, backend)
    registry.choose(request)[1](a, primitive.Outputs(*[out for _, out in outputs]))
    rng = np.random.default_rng(0)
    for shape, (memory, _) in zip(shapes, arrays, strict=True):
        memory = memory.cpu().numpy() if framework == "torch" else memory
        np.testing.assert_array_equal(memory[8], rng.normal(size=shape))
        assert np.isnan(np.delete(memory, 8, 0)).all()
    for memory, _ in outputs:
        memory = memory.cpu().numpy() if framework == "torch" else memory
        assert (np.delete(memory, 8, 0) == 5).all()
        assert np.isfinite(memory[8]).all()


def fill_guarded(place, cases, ends):
    """Compare kernels with the formula, all arrays of a call lying between protected pages.

    `ends` says, by dtype, whether arrays lie at the end of their pages.
    """
    for case, dtype in itertools.product(cases, ends):
        primitive, (arrays, others) = case.primitive, case.make()
        arrays = [a if a is None else a.astype(dtype) for a in arrays]
        given = primitive.Arguments(*arrays, *others)
        wide = [a if a is None else a.astype(np.float64) for a in arrays]
        exact = primitive.Arguments(*wide, *others)
        wanted = primitive.formula(exact)
        for at_the_end in ends[dtype]:
            outputs = [o and np.full(o[0], np.nan, dtype) for o in primitive.describe(given)]
            copies, found = guarded.fill(place, primitive, given, outputs, at_the_end)
            updated = [(getattr(copies, name), getattr(exact, name)) for name in primitive.mutates]
            for got, want in (*zip(found, wanted, strict=True), *updated):
                assert want is None or error(got, want) <= case.tolerance(dtype), case


@interpreted
@needs_linux
@pytest.mark.parametrize("family", sorted({case.primitive.family for case in CASES}))
@pytest.mark.parametrize("place", FILLING, ids="-".join)
def test_kernels_touch_nothing_beyond_their_arrays(place, family):
    """Nor beyond the arrays of packed arguments."""
    available(*place)
    ends = {"float64": (True, False), "float32": (True, False)}
    own = [case for case in CASES if case.primitive.family == family]
    if place[1] == "triton":
        own = [c for c in own if c in FEW] or [c for c in own if c in TYPICAL]
        ends = {"float64": (True,), "float32": (False,)}
    guarded.run(fill_guarded, place, own, ends)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_number_that_is_none_is_an_error_without_bounds(number):
    """Not NaN, which `max` passes over."""
    assert max(0.0, error([1.0], [number])) == np.inf
    assert error([number], [1.0]) == error([number], [number]) == np.inf


def test_complex_numbers_have_no_error():
    for name, pair in {"value": ([1 + 5j], [1.0]), "reference": ([1.0], [1 + 5j])}.items():
        with pytest.raises(TypeError, match=f"^error: {name} is complex; it should be real$"):
            error(*map(np.array, pair))


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("framework", ("jax", None, "float64")),
        ("backend", ("numpy", "junk", "float64")),
        ("wanted", ("numpy", None, "float64", (True,))),
    ],
)
def test_run_names_a_bad_argument(argument, arguments):
    *arguments, wanted = (*arguments, None)[:4]
    case = next(case for case in CASES if len(case.primitive.outputs) == 2)
    with pytest.raises(ValueError, match=f"^run: {argument} .*; it should "):
        run(case, *arguments, wanted=wanted)
