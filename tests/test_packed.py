"""Packed arguments: named arrays on every device, immutable once made."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import numpy as np
import pytest

import fusedops
from cpukern.scatter.parts import bins
from fusedops import crystal
from fusedops._frame.packed import Packed
from fusedops.scatter import plan as plans
from places import HAS_TORCH, PLACES, needs_torch

if HAS_TORCH:
    import torch


GROUPS = [([[0, 1, 2, 3]], [0.02]), ([[2, 3, 4], [4, 5, 6]], [0.02, 0.1])]
HKL = [[1, 0, -1], [0, 2, 1], [0, 0, 0]]
WA, WBWC, CUBES = [[0, 4], [1, 5]], [[[0, 1], [2, 3]], [[1, 2], [3, 0]]], (2, 2, 2, 2)


def geometry():
    """Return restraints of every kind but B."""
    terms, quad = {"ideals": 1.5, "sigmas": 0.5}, [[0, 1, 2, 3]]
    return {
        "bonds": {"indices": [[0, 1]], **terms},
        "angles": {"indices": [[0, 1, 2]], **terms},
        "torsions": {"indices": quad, **terms},
        "chirals": {"indices": quad, **terms},
        "contacts": {"indices": [[0, 3]], "distances": 5.0, "sigmas": 0.5},
    }


MAKE = {
    "Planes": lambda: fusedops.Planes(GROUPS),
    "Restraints": lambda: fusedops.Restraints(**geometry()),
    "Edges": lambda: fusedops.Edges([[0, 1, 2, 0], [1, 0, 1, 1]], num_nodes=4),
    "Lattice": lambda: fusedops.Lattice(np.diag([10.0, 20.0, 30.0]), (8, 10, 12)),
    "Sequences": lambda: fusedops.Sequences([0, 3, 3, 10]),
    "ScatterPlan": lambda: fusedops.ScatterPlan(WA, WBWC, 9),
    "Reflections": lambda: crystal.Reflections(HKL, np.diag([10.0, 20.0, 30.0]), (4, 5, 6)),
}
REPR = {
    "Planes": "Planes(3 planes, 10 atoms, on {})",
    "Restraints": "Restraints(5 restraints, 4 atoms, on {})",
    "Edges": "Edges(4 edges, 4 nodes, on {})",
    "Lattice": "Lattice(8 × 10 × 12 voxels, on {})",
    "Sequences": "Sequences(3 sequences, 10 tokens, on {})",
    "ScatterPlan": "ScatterPlan(2 cubes of 2 × 2 × 2, map of 9, on {})",
    "Reflections": "Reflections(3 of a map of 4 × 5 × 6, on {})",
}
every = pytest.mark.parametrize("name", MAKE)


def use(name, plan, place):
    """Return an op's value with a plan, and the gradient by the op's first argument."""
    atoms = np.full(3, 9.0), np.ones(3), np.ones((3, 1)), np.full((3, 1), 2.0)
    op, x, after, options = {
        "Planes": (fusedops.planarity_nll, (7, 3), (plan,), {}),
        "Restraints": (fusedops.geometry_nll, (4, 3), (plan,), {}),
        "Edges": (fusedops.node_to_edge_wigner_permute, (4, 4, 2), (plan, np.ones((4, 4, 4))), {}),
        "Lattice": (fusedops.gaussian_density, (3, 3), (*atoms, plan), {"radius": 2.0}),
        "Sequences": (fusedops.dynamic_conv, (1, 10, 4), (np.ones((4, 2)),), {"cu_seqlens": plan}),
        "ScatterPlan": (fusedops.structured_scatter_add, CUBES, (plan,), {}),
        "Reflections": (crystal.structure_factors, (4, 5, 6), (plan,), {}),
    }[name]
    # Structure factors are formulas, which no backend has kernels of.
    options |= {} if name == "Reflections" else {"backend": place[1]}
    x = np.random.default_rng(0).normal(size=x)
    if place[0] == "numpy":
        y, pullback = op.vjp(x, *after, **options)
        return np.asarray(y), pullback(np.ones_like(y))[0]
    x = torch.from_numpy(x).requires_grad_()
    after = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in after]
    y = op(x, *after, **options)
    y.sum().abs().backward()
    return y.detach().numpy(), x.grad.numpy()


SERVED = [*PLACES, *[("torch", "cython")] * HAS_TORCH]


def copies_of(plan):
    """Return copies, pickled ones and one made of tensors, and copies of that."""
    made = [plan]
    if HAS_TORCH:
        made.append(type(plan).from_tensors(*plan.flat()))
    copies = (copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan)))
    return [*made, *(make(each) for each in made for make in copies)]


def at_once(work):
    """Return the results of four threads that begin together."""
    start, found = threading.Barrier(4), []

    def begin():
        start.wait()
        found.append(work())

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    return found


def arrays_of(plan):
    return {name: np.asarray(getattr(plan, name)).copy() for name in plan._fields}


def numbers_of(plan):
    return [repr(plan), type(plan).kind.func(plan), *(getattr(plan, size) for size in plan._sizes)]


def same_plan(one, arrays, numbers):
    assert numbers_of(one) == numbers
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, getattr(one, name), strict=True)


@every
def test_a_plan_says_what_it_is(name):
    assert repr(MAKE[name]()) == REPR[name].format("cpu")
    if HAS_TORCH:
        assert repr(MAKE[name]().to("meta")) == REPR[name].format("meta")
        assert (plan := MAKE[name]()).to("cpu") is plan


@every
def test_attributes_are_for_reading(name):
    plan = MAKE[name]()
    for attribute in ("device", *plan._fields, *plan._sizes, "anything"):
        with pytest.raises(AttributeError, match=f"^{name}: {attribute} can't be changed"):
            setattr(plan, attribute, 0)
        with pytest.raises(AttributeError, match=f"^{name}: {attribute} can't be changed"):
            delattr(plan, attribute)
    with pytest.raises(AttributeError, match=f"{name} on cpu has no 'anything'"):
        _ = plan.anything


@every
def test_arrays_are_for_reading(name):
    for plan in copies_of(MAKE[name]()):
        for field in plan._fields:
            with pytest.raises(ValueError, match="read-only"):
                getattr(plan, field)[...] = 0


@every
def test_a_copy_is_the_same_plan(name):
    plan = MAKE[name]()
    copies, arrays, numbers = copies_of(plan), arrays_of(plan), numbers_of(plan)
    want = use(name, plan, ("numpy", "cython"))
    # The caches that a call leaves in a plan are copied, too.
    for other in (*copies, *copies_of(plan)):
        same_plan(other, arrays, numbers)
        for got, expected in zip(use(name, other, ("numpy", "cython")), want, strict=True):
            np.testing.assert_array_equal(got, expected)


@needs_torch
@every
def test_fields_have_their_names_on_every_device(name):
    plan = MAKE[name]()
    record = plan.tensors_here()
    assert record is plan.tensors_here()
    assert plan.fields_like(torch.zeros(1)) is record
    assert plan.fields_like(np.zeros(1)) is plan
    assert record._fields == plan._fields
    there = plan.to("meta")
    assert there.device == "meta"
    for field in plan._fields:
        array, tensor = getattr(plan, field), getattr(record, field)
        assert np.shares_memory(array, tensor.numpy())
        assert getattr(there, field) is getattr(there.tensors_here(), field)
        assert getattr(there, field).shape == array.shape


@every
def test_no_kernel_writes_into_a_plan(name):
    plan = MAKE[name]()
    arrays, numbers = arrays_of(plan), numbers_of(plan)
    for place in SERVED:
        use(name, plan, place)
        same_plan(plan, arrays, numbers)


# Triton's interpreter works in one thread only.
@pytest.mark.parametrize("place", [place for place in SERVED if place[1] != "triton"])
@every
def test_threads_share_a_plan_from_its_first_call(name, place):
    want = use(name, MAKE[name](), place)
    for _ in range(3):
        plan = MAKE[name]()
        for results in at_once(lambda plan=plan: use(name, plan, place)):
            for got, expected in zip(results, want, strict=True):
                np.testing.assert_array_equal(got, expected)


def test_what_is_derived_is_derived_once():
    plan = MAKE["ScatterPlan"]()
    calls = []

    def lengths(given):
        calls.append(given)
        return [len(given.wa)]

    assert plan.derived(lengths) is plan.derived(lengths)
    assert plan.derived(bins) is plan.derived(bins)
    assert calls == [plan]


def test_threads_that_derive_at_once_get_one_result():
    plan, within = MAKE["Edges"](), threading.Barrier(4)

    def ask(given):
        # The barrier lets all threads in before any result is kept.
        within.wait()
        return object()

    assert len(set(at_once(lambda: plan.derived(ask)))) == 1


def test_read_only_indices_are_shared_and_warn_of_nothing():
    """Torch warns where a tensor shares a read-only array."""
    wa, wbwc = np.array(WA), np.array(WBWC)
    for array in (wa, wbwc):
        array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = fusedops.ScatterPlan(wa, wbwc, 9, copy=False)
        for place in SERVED:
            use("ScatterPlan", plan, place)
    assert np.shares_memory(plan.wa, wa)
    assert np.shares_memory(plan.wbwc, wbwc)
    if HAS_TORCH:
        assert not np.shares_memory(plan.tensors_here().wa.numpy(), wa)


def test_the_arrays_of_a_caller_stay_writable():
    wa, wbwc = np.array(WA), np.array(WBWC)
    plan = fusedops.ScatterPlan(wa, wbwc, 9, copy=False)
    wa[0, 0] = 1
    assert plan.wa[0, 0] == 1


@pytest.fixture
def sorted_on_cpu(monkeypatch):
    """Sort plans on the CPU when they are made, as on a GPU."""
    monkeypatch.setattr(plans, "_GPUS", ("cpu",))


@needs_torch
@pytest.mark.parametrize("on_grid", [True, False])
def test_a_sorted_plan_travels_sorted(sorted_on_cpu, monkeypatch, on_grid):
    """A rebuilt plan isn't sorted again, which would wait for a GPU."""
    wbwc = np.arange(2)[:, None] * 4 + np.arange(3)
    where = [[[0, 16], [16, 32]], [wbwc, wbwc + on_grid]]
    plan = fusedops.ScatterPlan(*map(torch.tensor, map(np.array, where)), 48 if on_grid else 47)
    assert plan.grid == ((3, 4, 4) if on_grid else (0, 0, 0))
    tensors, sizes = plan.flat()
    assert [id(t) for t in tensors] == [id(t) for t in plan.tensors_here()]
    # Replayed launches tell tensors apart by identity.
    assert len({id(tensor) for tensor in tensors}) == len(tensors) == 6
    assert sizes == [plan.map_size, *plan.grid]
    monkeypatch.setattr(plans, "_sort", None)
    back = fusedops.ScatterPlan.from_tensors(tensors, sizes)
    assert back.grid == plan.grid
    assert back.kind == plan.kind
    assert all(map(torch.equal, back.sorted, plan.sorted))
    torch.compiler.reset()
    cube = torch.ones(plan.shape)
    add = torch.compile(
        lambda cube, plan: fusedops.structured_scatter_add(cube, plan, backend="torch"),
        backend="aot_eager",
        fullgraph=True,
    )
    want = fusedops.structured_scatter_add(cube, plan, backend="torch")
    assert torch.equal(add(cube, plan), want)


@needs_torch
def test_a_plan_of_a_graph_has_what_is_known_before_values_are():
    """The plan is read when the graph runs, and has no arrays until then."""
    index = torch.tensor([[0, 1, 2, 0], [1, 0, 1, 1]])
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(index)
        unread = fusedops.Edges.read("an op", fake, num_nodes=4)
        assert repr(unread) == "Edges(4 edges, 4 nodes, on cpu)"
        assert unread.flat() == ([fake], [4])
        with pytest.raises(AttributeError, match="Edges on cpu has no 'source'"):
            _ = unread.source


def test_every_kind_of_plan_is_tested():
    assert {cls.__name__ for cls in Packed.__subclasses__()} == set(MAKE)
