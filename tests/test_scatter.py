"""Structured scatter and gather and their plans, on the reference and the kernels."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

import fusedops
import guarded
from contract import same, tensor
from cpukern.scatter.parts import bins
from densities import agree, close
from fusedops import ScatterPlan, structured_gather, structured_scatter_add
from fusedops._frame import registry
from fusedops.scatter import plan as plans
from fusedops.scatter.op import gather, scatter
from places import (
    FILLING,
    HAS_TORCH,
    available,
    interpreted,
    needs_torch,
    needs_triton,
)

if HAS_TORCH:
    import torch

pytestmark = interpreted


class Problem(NamedTuple):
    """Cubes, a map, and the cubes' places in it; each is a cotangent for the other op."""

    cube: Any
    grid: Any
    wa: Any
    wbwc: Any

    @property
    def size(self):
        return len(self.grid)

    @property
    def where(self):
        return self.wa, self.wbwc, self.size

    @property
    def plan(self):
        return ScatterPlan(*self.where)


def problem(shape=(5, 3, 4, 6), size=97, *, dtype="float64", index="int64", seed=0):
    """Return cubes that overlap and repeat elements, with some negative offsets."""
    rng = np.random.default_rng(seed)
    count, nx, *rows = shape
    low = 9
    wa = rng.integers(-low, size // 2, (count, nx)).astype(index)
    wbwc = rng.integers(low, low + size - size // 2 - low, (count, *rows)).astype(index)
    return Problem(*(rng.normal(size=s).astype(dtype) for s in (shape, size)), wa, wbwc)


def runs(shape=(6, 4, 3, 17), size=400, *, dtype="float64", index="int64", seed=0):
    """Return cubes whose rows are contiguous in the map, where they don't wrap around its end."""
    rng = np.random.default_rng(seed)
    count, nx, ny, nz = shape
    wa = np.arange(nx) + 0 * rng.integers(0, 2, (count, 1))
    start = rng.integers(0, size - nx, (count, ny, 1))
    wbwc = (start + np.arange(nz)) % (size - nx)
    arrays = (rng.normal(size=s).astype(dtype) for s in (shape, size))
    return Problem(*arrays, wa.astype(index), wbwc.astype(index))


def places_of(p):
    return p.wa[:, :, None, None] + p.wbwc[:, None]


def added(p):
    """Return the map, by NumPy's own unbuffered sum."""
    out = np.zeros(p.size, p.cube.dtype)
    np.add.at(out, places_of(p), p.cube)
    return out


def expected(p):
    """Return the results of `solve`, by NumPy alone."""
    cubes = p.grid[places_of(p)]
    return [added(p), cubes, cubes, added(p)]


def solve(place, p, where=None):
    """Return the map, the map's gradient, the cubes, and the cubes' gradient."""
    framework, backend = place
    where = p.where if where is None else where
    results = []
    for op, array, cotangent, at in (
        (structured_scatter_add, p.cube, p.grid, where),
        (structured_gather, p.grid, p.cube, where[:2]),
    ):
        if framework == "numpy":
            out, pullback = op.vjp(array, *at, backend=backend)
            results += [out, *pullback(cotangent)]
        else:
            leaf = tensor(array).requires_grad_()
            out = op(leaf, *at, backend=backend)
            results += [out.detach(), *torch.autograd.grad(out, leaf, tensor(cotangent))]
    return [np.asarray(result) for result in results]


def whole(p, dtype="float64"):
    """Return the problem with whole numbers, whose sums are exact in any order."""
    cube, grid = (np.rint(20 * a).astype(dtype) for a in (p.cube, p.grid))
    return p._replace(cube=cube, grid=grid)


def check(place, p, where=None):
    """Compare with NumPy's own indexing, bit for bit: sums of whole numbers are exact."""
    p = whole(p, p.cube.dtype)
    results = solve(place, p, where)
    for got, want in zip(results, expected(p), strict=True):
        same(got, want)
    # Each op is the other's adjoint.
    assert np.vdot(results[0], p.grid) == np.vdot(p.cube, results[2])


def boxes(shape, grid, index="int64"):
    """Return cubes of a periodic grid, with their common part in either array of indices."""
    rng = np.random.default_rng(0)
    count, *n = shape
    first = rng.integers(grid, size=(count, 3))
    x, y, z = ((first[:, d, None] + np.arange(n[d])) % grid[d] for d in range(3))
    common = rng.integers(-3, 4, count)
    wa = x * grid[1] * grid[2] + common[:, None]
    wbwc = y[:, :, None] * grid[2] + z[:, None] - common[:, None, None]
    arrays = (rng.normal(size=s) for s in (shape, int(np.prod(grid))))
    return Problem(*arrays, wa.astype(index), wbwc.astype(index))


@needs_triton
@pytest.mark.parametrize(
    ("shape", "grid", "index"),
    [
        ((9, 5, 4, 3), (7, 9, 20), "int64"),
        # Cubes meet a tile from both sides, or fill the grid.
        ((5, 7, 11, 18), (8, 12, 19), "int32"),
        ((3, 2, 3, 1), (2, 3, 1), "int64"),
        ((2, 2, 9, 40), (3, 17, 41), "int64"),
    ],
)
def test_boxes_of_a_grid_are_summed_by_owners(shape, grid, index):
    p = boxes(shape, grid, index=index)
    plan = ScatterPlan(*map(tensor, p.where[:2]), p.size)
    assert plan.grid == grid
    check(available("torch", "triton"), p, (plan,))
    # In the order of the cubes.
    same(structured_scatter_add(tensor(p.cube), plan, backend="triton").numpy(), added(p))


@needs_triton
@pytest.mark.parametrize("which", ["wa", "wbwc"])
def test_a_cube_that_is_nearly_a_box_is_none(which):
    p = boxes((6, 3, 4, 5), (9, 8, 11))
    getattr(p, which)[-1, -1] = getattr(p, which)[-1, 0]
    assert ScatterPlan(*map(tensor, p.where[:2]), p.size).grid == (0, 0, 0)
    check(available("torch", "triton"), p)


@pytest.mark.parametrize("make", [problem, runs])
def test_an_element_is_summed_in_the_order_of_the_cubes(exact, make):
    """The order makes a sum's bits equal in every run."""
    p = make(seed=3)
    for _ in range(2):
        same(structured_scatter_add(p.cube, *p.where, backend=exact), added(p))


KINDS = {
    "lists": lambda p: (p.wa.tolist(), p.wbwc.tolist(), p.size),
    "int32": lambda p: (p.wa.astype("i4"), p.wbwc.astype("i4"), np.int32(p.size)),
    "int32 and int64": lambda p: (p.wa.astype("i4"), p.wbwc, p.size),
    "int64 and int32": lambda p: (p.wa, p.wbwc.astype("i4"), np.int64(p.size)),
    "a plan": lambda p: (p.plan,),
    "a plan and its map_size": lambda p: (p.plan, None, p.size),
    "a plan of int32": lambda p: (ScatterPlan(p.wa.astype("i4"), p.wbwc.astype("i4"), p.size),),
    "a plan of views": lambda p: (ScatterPlan(*p.where, copy=False),),
    "tensors": lambda p: (tensor(p.wa), tensor(p.wbwc), p.size),
    "int32 tensors": lambda p: (tensor(p.wa).int(), tensor(p.wbwc).int(), p.size),
    "int32 and int64 tensors": lambda p: (tensor(p.wa).int(), tensor(p.wbwc), p.size),
    "a plan of tensors": lambda p: (ScatterPlan(tensor(p.wa), tensor(p.wbwc), p.size),),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_index_gives_the_same_bits(place, kind):
    if "tensor" in kind and not HAS_TORCH:
        pytest.skip("torch is not installed")
    p = problem((3, 2, 3, 5))
    for got, want in zip(solve(place, p, KINDS[kind](p)), solve(place, p), strict=True):
        agree(place, got, want)


def test_a_plan_says_what_it_holds():
    plan = problem((5, 3, 4, 6), 97).plan
    assert (plan.shape, plan.map_size, plan.device) == ((5, 3, 4, 6), 97, "cpu")
    none = ScatterPlan(np.zeros((0, 2), np.int32), np.zeros((0, 3, 0), np.int32), 0)
    assert (none.shape, none.map_size) == ((0, 2, 3, 0), 0)


LAYOUTS = {
    "contiguous": np.copy,
    "transposed": lambda a: a.T.copy().T,
    "tensor": lambda a: tensor(a.copy()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_is_a_copy_unless_it_is_of_views(layout):
    """Beside it, a call reads arrays anew."""
    if layout == "tensor":
        pytest.importorskip("torch")
    p = problem()
    wa, wbwc = (LAYOUTS[layout](a) for a in (p.wa, p.wbwc))
    cube = tensor(p.cube) if layout == "tensor" else p.cube
    plan, views = (ScatterPlan(wa, wbwc, p.size, copy=copy) for copy in (True, False))
    if layout == "contiguous":
        assert np.shares_memory(views.wa, wa)
        assert np.shares_memory(views.wbwc, wbwc)
    close(np.asarray(structured_scatter_add(cube, wa, wbwc, p.size)), added(p))
    wa[:] = 0
    moved = added(p._replace(wa=np.zeros_like(p.wa)))
    close(np.asarray(structured_scatter_add(cube, wa, wbwc, p.size)), moved)
    wbwc[:] = 10**9
    close(np.asarray(structured_scatter_add(cube, plan)), added(p))


def test_a_plan_does_not_wait_for_the_check_of_another(monkeypatch):
    """A child that is forked meanwhile would wait forever."""
    begun, ended, extremes = threading.Event(), threading.Event(), plans._extremes

    def slow(wbwc):
        if threading.current_thread() is other:
            begun.set()
            ended.wait(20)
        return extremes(wbwc)

    monkeypatch.setattr(plans, "_extremes", slow)
    p = problem()
    other = threading.Thread(target=lambda: p.plan)
    other.start()
    try:
        assert begun.wait(20)
        third = threading.Thread(target=lambda: p.plan)
        third.start()
        third.join(5)
        assert not third.is_alive()
    finally:
        ended.set()
        other.join()
        third.join()


@pytest.mark.parametrize("by", [1, 10**6])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("op", [structured_scatter_add, structured_gather])
def test_a_backward_pass_has_the_indices_of_its_call(op, framework, by):
    """Whatever is written to NumPy's index arrays after it."""
    p = problem()
    x, dy = (p.cube, p.grid) if op is structured_scatter_add else (p.grid, p.cube)
    options = {"map_size": p.size} if op is structured_scatter_add else {}
    (dx,) = op.vjp(x, p.plan)[1](dy)
    if framework == "torch":
        pytest.importorskip("torch")
        x = tensor(x).requires_grad_()
        y = op(x, p.wa, p.wbwc, **options)
        back = functools.partial(torch.autograd.grad, y, x, tensor(dy))
    else:
        _, pullback = op.vjp(x, p.wa, p.wbwc, **options)
        back = functools.partial(pullback, dy)
    p.wa[...] += by
    p.wbwc[...] -= 3 * by
    (found,) = back()
    close(np.asarray(found), dx)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("threads", [None, 1, 3])
def test_bins_name_the_planes_that_reach_every_part(threads, wide, several_threads):
    """Planes are listed by part and in order, so that parts are summed in the order of the cubes.

    With a number of threads, the compiled survey finds the planes.
    """
    rng = np.random.default_rng(0)
    size = 3_000_000
    wa, wbwc = rng.integers(0, size // 2, (40, 3)), rng.integers(0, size // 50, (40, 2, 5))
    wbwc[slice(None) if wide else 7] *= 20
    # The last element of a plane is the first one of a part.
    wa[5, 0] = 2**21 - wbwc[5].max()
    plan = ScatterPlan(wa, wbwc, size)
    found = bins(plan)
    if threads:
        available("numpy", "cython")
        from cpukern.scatter.cython import survey

        try:
            fusedops.set_num_threads(threads)
            found = survey(plan)
        finally:
            fusedops.set_num_threads(None)
    rows, begin, part = found[:3]
    at = (wa[:, :, None, None] + wbwc[:, None]).reshape(120, 10)
    assert (part > 2**18) == wide
    assert len(begin) == (size - 1) // part + 2
    for number in range(len(begin) - 1):
        low = number * part
        reach = np.flatnonzero((at.min(1) < low + part) & (at.max(1) >= low))
        assert rows[begin[number] : begin[number + 1]].tolist() == reach.tolist()


SHAPE, SIZE = (2, 3, 4, 5), 20


def offsets(index="int64"):
    """Return offsets whose sums reach both ends of a map of 20."""
    wa = np.array([[0, 4, 8], [8, 4, 0]], index)
    wbwc = np.arange(20).reshape(4, 5) % 12
    return wa, np.stack([wbwc, wbwc]).astype(index)


def changed(which, at, value, index="int64"):
    wa, wbwc = offsets(index)
    (wa, wbwc)[which][at] = value
    return wa, wbwc


FAR = 2**62
WRONG = {
    "negative": (changed(0, (1, 2), -1), r"wa\[1, 2\] \+ wbwc\[1, 0, 0\] is -1"),
    "too large": (changed(0, (0, 1), 20), r"wa\[0, 1\] \+ wbwc\[0, 0, 0\] is 20"),
    "by the sum": (changed(0, (1, 1), 9), r"wa\[1, 1\] \+ wbwc\[1, 2, 1\] is 20"),
    "by the offset in a plane": (changed(1, (1, 3, 2), 12), r"wa\[1, 0\] \+ wbwc\[1, 3, 2\] is 20"),
    "a negative offset": (changed(1, (0, 1, 0), -1), r"wa\[0, 0\] \+ wbwc\[0, 1, 0\] is -1"),
    "far off": (changed(0, (0, 0), FAR), rf"wa\[0, 0\] \+ wbwc\[0, 0, 0\] is {FAR}"),
    "the first of two": (
        (changed(0, (0, 2), 50)[0], changed(1, (1, 0, 0), 99)[1]),
        r"wa\[0, 2\] \+ wbwc\[0, 0, 0\] is 50",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_element_outside_of_the_map_is_named_and_nothing_is_written(name):
    (wa, wbwc), message = WRONG[name]
    message += r"; it should be in \[0, 20\), map_size"
    kinds = [(wa, wbwc), (wa.tolist(), wbwc)]
    if abs(wa).max() < 2**31:
        kinds += [(wa.astype("i4"), wbwc.astype("i4")), (wa.astype("i4"), wbwc)]
    for where in kinds:
        out, cubes = np.full(SIZE, 7.0), np.full(SHAPE, 7.0)
        with pytest.raises(IndexError, match=message):
            structured_scatter_add(np.ones(SHAPE), *where, SIZE, out=out)
        with pytest.raises(IndexError, match=message):
            structured_gather(np.ones(SIZE), *where, out=cubes)
        with pytest.raises(IndexError, match=message):
            ScatterPlan(*where, SIZE)
        assert (out == 7).all()
        assert (cubes == 7).all()
    if HAS_TORCH:
        out = torch.full((SIZE,), 7.0)
        with pytest.raises(IndexError, match=message):
            structured_scatter_add(torch.ones(SHAPE), tensor(wa), tensor(wbwc), SIZE, out=out)
        assert (out == 7).all()


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_a_sum_that_is_no_number_of_its_dtype_is_outside(index):
    """A sum that wraps around its dtype into the map is outside, too."""
    least, most = np.iinfo(index).min, np.iinfo(index).max
    for value in (least, most):
        refused(value, [value], index, rf"wa\[0, 0\] \+ wbwc\[0, 0, 0\] is {2 * value};")
    half = most // 2 + 1
    refused(half, [-half, half], index, rf"wbwc\[0, 0, 1\] is {2 * half};")
    # The row's numbers follow each other only by wrapping around.
    refused(-most, [most, least], index, rf"wbwc\[0, 0, 1\] is {least - most};")


def refused(start, row, index, message):
    """Expect an error for one cube of a row, from a plan and from ops."""
    given = np.array([[start]], index), np.array([[row]], index), np.ones((1, 1, 1, len(row)))
    for library in [np.asarray] + [tensor] * HAS_TORCH:
        wa, wbwc, cube = map(library, given)
        with pytest.raises(IndexError, match=message):
            ScatterPlan(wa, wbwc, 8)
        with pytest.raises(IndexError, match=message):
            structured_scatter_add(cube, wa, wbwc, 8)


def test_both_ends_of_the_map_are_inside(place):
    wa, wbwc = offsets()
    p = Problem(np.random.default_rng(0).normal(size=SHAPE), np.arange(20.0), wa, wbwc)
    assert (places_of(p).min(), places_of(p).max()) == (0, SIZE - 1)
    check(place, p)


@pytest.mark.parametrize("shape", [(0, 3, 3, 3), (2, 0, 3, 3), (2, 3, 0, 3), (2, 3, 3, 0)])
def test_offsets_of_nothing_are_wrong_in_no_way(place, shape):
    wa, wbwc = np.full(shape[:2], -50), np.full((shape[0], *shape[2:]), 10**9)
    for size in (0, 4):
        p = Problem(np.zeros(shape), np.ones(size), wa, wbwc)
        assert not p.plan.derived(bins)[1].any()
        results = solve(place, p, (p.plan,))
        same(results[0], np.zeros(size))
        assert results[1].shape == shape


def test_a_place_is_a_number_of_64_bits(place):
    """Offsets of 32 bits reach a map of more than 2**31 elements, few of them in memory."""
    size = 2**31 + 100
    try:
        grid = np.zeros(size, np.float32)
    except MemoryError:
        pytest.skip("there is no room for such a map")
    grid[2**31 + 20 : 2**31 + 26] = np.arange(1, 7)
    wa = np.array([[2**31 - 10, 2**31 - 9]], np.int32)
    wbwc = np.arange(30, 36, dtype=np.int32).reshape(1, 2, 3)
    given = tensor(grid) if place[0] == "torch" else grid
    got = np.asarray(structured_gather(given, wa, wbwc, backend=place[1]))
    assert got.tolist() == [[[[1, 2, 3], [4, 5, 6]], [[2, 3, 4], [5, 6, 0]]]]


PLAN = {"wa": ScatterPlan(*offsets(), SIZE), "wbwc": None}
BAD_INDICES = {
    "wbwc missing": ({"wbwc": None}, "wbwc is None; it should be given, unless wa is a Scat"),
    "more atoms in wbwc": (
        {"wbwc": np.zeros((3, 4, 5), int)},
        r"wbwc has shape \(3, 4, 5\); its first size should be 2, that of wa",
    ),
    "a plan with wbwc": (PLAN | {"wbwc": offsets()[1]}, "wbwc is given; a ScatterPlan for wa has"),
}
BAD_SIZES = {
    "another map_size": (PLAN | {"map_size": 21}, "map_size is given; a ScatterPlan for wa has it"),
    "no map_size": ({"map_size": None}, "map_size is None; it should be given, unless wa"),
}


@pytest.mark.parametrize("name", BAD_INDICES | BAD_SIZES)
def test_bad_indices_name_the_argument(name):
    """test_errors.py passes junk, and test_contract.py wrong cubes and maps."""
    changes, message = (BAD_INDICES | BAD_SIZES)[name]
    given = {**dict(zip(("wa", "wbwc"), offsets(), strict=True)), "map_size": SIZE} | changes
    size = given.pop("map_size")
    calls = [(structured_scatter_add, {"density_cube": np.ones(SHAPE), "map_size": size})]
    calls += [(structured_gather, {"grid": np.ones(SIZE)})] * (name in BAD_INDICES)
    for op, own in calls:
        for function in (op, op.vjp, op.explain):
            with pytest.raises((TypeError, ValueError), match=message):
                function(**own, **given)


def odd_indices():
    """Return offsets with strides that no tensor has, on axes of one element or none."""
    for shape in ((2, 1), (1, 1), (0, 1), (1, 0)):
        wa = np.zeros(shape, np.int64)
        yield wa[:, ::-1], wa[:, None, ::-1]
    field = np.zeros((1, 1), [("offset", np.int64), ("flag", np.int8)])["offset"]
    yield field, field[:, None]


@needs_torch
@pytest.mark.parametrize(("wa", "wbwc"), list(odd_indices()))
def test_strides_of_axes_of_one_element(quick, wa, wbwc):
    shape = *wa.shape, *wbwc.shape[1:]
    plans = [(wa, wbwc)] + [(ScatterPlan(wa, wbwc, 1, copy=copy),) for copy in (False, True)]
    framework, backend = quick
    one = np.ones if framework == "numpy" else torch.ones
    for where in plans:
        size = (1,) if len(where) == 2 else ()
        out = structured_scatter_add(one(shape), *where, *size, backend=backend)
        assert out.tolist() == [np.prod(shape)]
        cubes = structured_gather(one(1), *where, backend=backend)
        assert tuple(cubes.shape) == shape
        assert (cubes == 1).all()


def test_a_number_that_is_none_stays_where_it_is(place):
    """A cube's NaN reaches only its own element, and a map's only the cubes that read it."""
    p = problem((3, 2, 3, 5))
    cube, grid = p.cube.copy(), p.grid.copy()
    cube[1, 1, 2, 3] = np.nan
    own = p.wa[1, 1] + p.wbwc[1, 2, 3]
    grid[own] = np.inf
    got = solve(place, p._replace(cube=cube, grid=grid))
    want = solve(place, p)
    at = np.arange(p.size) == own
    for after, before, reached in zip(
        (got[0], got[2]), (want[0], want[2]), (at, places_of(p) == own), strict=True
    ):
        same(np.isfinite(after), ~reached)
        agree(place, after[~reached], before[~reached])


@pytest.mark.parametrize("binned", [False, True])
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("primitive", [scatter, gather], ids=lambda p: p.name)
@pytest.mark.parametrize("place", FILLING, ids="-".join)
def test_indices_that_lie_lead_nowhere(place, primitive, index, binned):
    """Indices changed after their check make no kernel read or write outside of the arrays."""
    framework, backend = available(*place)
    between = functools.partial(guarded.between, framework, "cpu")
    request = registry.Request(primitive.name, framework, "cpu", np.dtype("f8"), backend)
    kernel = registry.choose(request)[1]
    shape, size, rng = (6, 3, 2, 19), 200, np.random.default_rng(0)
    inputs, outputs = (shape, (size,)) if primitive is scatter else ((size,), shape)
    for which in ("wa", "wbwc", "rows"):
        p = runs(shape, size, index=index)
        plan = ScatterPlan(*p.where, copy=False)
        if binned:
            plan.derived(bins)
        if which == "rows":
            # The rows still follow each other, but some pass an end of the map.
            p.wbwc[...] = np.arange(19) + rng.choice([-10, size - 10, 2 * size], (6, 2, 1))
        else:
            wild = getattr(p, which)
            wild[...] = rng.integers(-3 * size, 3 * size, wild.shape)
        _, array = between(inputs, np.nan, rng.normal(size=inputs))
        memory, out = between(outputs, 5.0, 5.0)
        # A kernel may notice the bad indices.
        with contextlib.suppress(ValueError, IndexError):
            kernel(primitive.Arguments(array, plan), primitive.Outputs(out))
            assert np.isfinite(np.asarray(out)).all(), "what was read lies outside"
        assert (np.delete(np.asarray(memory), 8, 0) == 5.0).all(), "something is written outside"
