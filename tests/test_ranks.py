"""All that ranks share: a silent backward shows, a dead rank is an error, all ranks call alike."""

from __future__ import annotations

import importlib
import os

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

from fusedops import distributed  # noqa: E402
from fusedops.distributed import dtensors, exchanges, graphs, sequences, triangles  # noqa: E402
from worlds import WORLDS, World, on_ranks  # noqa: E402

#: A test of derivatives of second order, or third, for each function.
TESTS = {
    "exchange": ("test_exchange", "test_derivatives_of_every_order", {}),
    "share": ("test_exchange", "test_share_adds_the_parts_of_all_ranks", {}),
    "extend": ("test_partition", "test_gradcheck_of_the_gathered_halo", {}),
    "triangles": (
        "test_distributed_triangles",
        "test_value_and_all_derivatives_are_one_devices",
        {"case": "rows"},
    ),
    "convolution": (
        "test_distributed_conv",
        "test_value_and_all_derivatives_are_one_devices",
        {"sizes": "uneven", "packed": "few", "static": False},
    ),
    "DTensors": (
        "test_distributed_triangles",
        "test_a_dtensor_keeps_its_placement",
        {"case": "rows", "mask": "whole"},
    ),
}
#: The functions of autograd whose backwards communicate.
BACKWARDS = {
    "exchange": [exchanges._Start, exchanges._Arrive],
    "share": [exchanges._Share, exchanges._Sum],
    "extend": [graphs._Extend, graphs._Fold],
    "triangles": [triangles._Shared],
    "convolution": [sequences._Shared],
    "DTensors": [dtensors._ToLocal, dtensors._FromLocal],
}


def run(op):
    module, test, arguments = TESTS[op]
    getattr(importlib.import_module(module), test).on_rank(**arguments)


@pytest.mark.parametrize("op", BACKWARDS)
@on_ranks(worlds=WORLDS[::2])
def test_a_silent_backward_shows(op):
    """A collective on raw tensors in a backward, the usual pattern, loses higher derivatives."""
    for node in BACKWARDS[op]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node, "backward", staticmethod(torch.no_grad()(node.backward)))
            with pytest.raises((AssertionError, RuntimeError)):
                run(op)
        dist.barrier()


@pytest.mark.parametrize("op", TESTS)
@on_ranks(worlds=[("watched", 3)])
def test_torch_finds_no_collective_that_differs(op):
    run(op)


@on_ranks(worlds=[("watched", 3)])
def test_torch_finds_one_that_differs():
    with pytest.raises(RuntimeError, match="mismatch between collectives"):
        dist.all_reduce(torch.ones(2 + (dist.get_rank() == 1)))


def prepared(op):
    """Return a call that needs all ranks."""
    P, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    x, square = torch.ones(1, P, P, 2), torch.ones(2, 2)
    if op == "exchange":
        return lambda: distributed.exchange(x[0], 0, 1, group=group, src_sizes=[P] * P)
    if op == "share":
        weight = square.requires_grad_()
        shared = distributed.share(weight, group=group)
        return lambda: torch.autograd.grad(shared.sum(), weight)
    if op == "extend":
        ends = torch.tensor([[(rank + 1) % P], [rank]])
        part = distributed.Partition(ends, torch.arange(P), group=group)
        return lambda: part.extend(x[0, 0, :1])
    if op == "triangles":
        weights = (torch.ones(4, 2), torch.ones(4, 2), square, square)
        names = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")
        given = dict(zip(names, weights, strict=True), group=group)
        return lambda: distributed.triangle_multiplicative_update(x[:, :1], **given)
    return lambda: distributed.dynamic_conv(x[0], square, group=group)


def call_beside_a_dead_rank(op):
    """Make a call after another rank has died; return the error."""
    call = prepared(op)
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        return call()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("op", [op for op in TESTS if op != "DTensors"])
def test_a_dead_rank_is_an_error_within_the_groups_timeout(op):
    world = World("gloo", 3, seconds=5)
    try:
        for connection in world.connections:
            connection.send((__name__.split(".")[-1], "call_beside_a_dead_rank", {"op": op}))
        *found, died = sorted(world.answers(), key=lambda answer: "rank 1 died" in answer)
    finally:
        world.close()
    assert "rank 1 died" in died
    assert [type(answer) for answer in found] == [str, str]
