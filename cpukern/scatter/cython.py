"""Structured scatter and gather by the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpukern import isa
from cpukern.scatter.parts import PART_BITS
from fusedops._frame.registry import register
from fusedops._host import memory
from fusedops._host.threads import threads_for
from fusedops.scatter import ScatterPlan

_scatter = isa.load("scatter")
_INDEX = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_move_of = {
    np.dtype(np.float32): _scatter.move["float"],
    np.dtype(np.float64): _scatter.move["double"],
}
# Elements of cubes that are worth waking a thread for.
_CUBE_GRAIN = 1 << 16


def survey(plan: ScatterPlan) -> tuple[Any, ...]:
    """Return the result of `bins` and the runs of the cubes' rows; check the plan meanwhile."""
    cubes, nx, rows, _ = plan.shape
    first, second = memory.empty((2, cubes, rows), np.dtype(np.int64))
    split = np.empty((cubes, rows), np.int32)
    low, high = np.empty((2, cubes), np.int64)
    spans = np.empty((cubes, nx, 2), np.int32)
    threads = threads_for(plan.wbwc.size, _CUBE_GRAIN)
    ends = np.zeros((threads, 2, (plan.map_size - 1 >> PART_BITS) + 1), np.int64)
    found = first, second, split, low, high, spans, ends
    look = _scatter.survey[_INDEX[plan.wa.dtype]]
    look(plan.wa, plan.wbwc, plan.map_size, PART_BITS, *found)
    if ends[:, 0].sum() != plan.wa.size:
        # A plane leaves the map: the constructor of a plan raises an error that names it.
        ScatterPlan(plan.wa, plan.wbwc, plan.map_size, copy=False)
    return *_lists(spans, ends), first, second, split


def _lists(spans: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the result of `bins` from the findings of a survey.

    A part's planes are listed share after share, so the number of shares changes nothing.
    """
    bits = PART_BITS
    while True:
        counts = (ends[:, 0] - ends[:, 1]).cumsum(1) + ends[:, 1]
        # Double the parts while planes reach over many of them.
        if counts.sum() <= spans.size:
            break
        ends = np.add.reduceat(ends, np.arange(0, ends.shape[2], 2), axis=2)
        bits += 1
    stops = counts.T.cumsum().reshape(-1, len(counts))
    pointers = np.append(0, stops[:, -1])
    planes = np.empty(pointers[-1], np.int64)
    _scatter.fill(spans, bits - PART_BITS, np.subtract(stops.T, counts, order="C"), planes)
    return planes, pointers, 1 << bits


def _move(back: bool, cubes: np.ndarray, grid: np.ndarray, plan: ScatterPlan) -> None:
    if 0 in cubes.shape:
        if not back:
            grid[...] = 0
        return
    threads = threads_for(cubes.size, _CUBE_GRAIN)
    wa, found = plan.wa, plan.derived(survey)
    move = _move_of[cubes.dtype]
    move(back, wa.itemsize == 8, wa, plan.wbwc, *found, cubes, grid, threads)


@register("structured_scatter_add", "cython")
def structured_scatter_add(a: Any, y: Any) -> None:
    _move(False, np.ascontiguousarray(a.density_cube), y.map, a.plan)


@register("structured_gather", "cython")
def structured_gather(a: Any, y: Any) -> None:
    _move(True, y.density_cube, np.ascontiguousarray(a.grid), a.plan)
