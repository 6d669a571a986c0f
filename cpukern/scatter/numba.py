"""Structured scatter and gather on the CPU in Numba; one thread owns each part of the map.

The owner clears a part and adds the elements in it, in the order of the cubes, so the thread count
changes no bit. It skips elements outside of the part, wherever their index points. Consecutive
offsets form a run; runs are found once for all planes of a cube in a part, and added as vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cpukern.jit import jit
from cpukern.scatter.parts import bins
from cpukern.vectors_numba import add_run, copy_run, fetch
from fusedops._frame.registry import register
from fusedops._host.threads import in_parallel, threads_for
from fusedops.scatter import ScatterPlan

# Planes to read ahead: a part has few planes of one cube, and the next cube lies elsewhere.
_AHEAD = 4
# Elements of cubes and map that are worth handing to another thread.
_GRAIN = 1 << 16


@jit
def _find_runs(offsets, runs):
    """Write the starts of runs of offsets, and the end, into `runs`; return the number of runs."""
    count = 0
    for at in range(len(offsets)):
        if at == 0 or offsets[at] != offsets[at - 1] + 1:
            runs[count] = at
            count += 1
    runs[count] = len(offsets)
    return count


@jit
def _parts(low, high, rows, part_ptr, part_size, wa, offsets, cube, grid, cleared, back):
    nx, plane = wa.shape[1], offsets.shape[1]
    flat = cube.reshape(-1)
    line = 64 // cube.itemsize
    runs = np.empty(plane + 1, np.int64)
    for p in range(low, high):
        first = p * part_size
        last = min(first + part_size, len(grid))
        cleared[first:last] = 0
        found, count = -1, 0
        for at in range(part_ptr[p], part_ptr[p + 1]):
            row = rows[at]
            ahead = rows[min(at + _AHEAD, part_ptr[p + 1] - 1)]
            fetch(cube, ahead, line)
            c = row // nx
            if c != found:
                found, count = c, _find_runs(offsets[c], runs)
            start = wa[c, row - c * nx]
            for r in range(count):
                o = start + offsets[c, runs[r]]
                begin, end = max(first, o), min(last, o + runs[r + 1] - runs[r])
                v = row * plane + runs[r] + begin - o
                if begin < end and back:
                    copy_run(flat, v, grid, begin, end - begin)
                elif begin < end:
                    add_run(grid, begin, flat, v, end - begin)


def in_shares(work: Callable[[int, int], None], ends: np.ndarray, grain: int) -> None:
    """Call ``work(low, high)`` on shares of items with about equal work.

    `ends` is the cumulative sum of the items' work, from 0.
    """
    threads = threads_for(int(ends[-1]), grain)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(threads + 1) / threads)
    cuts[0], cuts[-1] = 0, len(ends) - 1
    in_parallel(lambda low, high: work(cuts[low], cuts[high]), threads, 1)


def _run(plan: ScatterPlan, cube: np.ndarray, grid: np.ndarray, back: bool) -> None:
    rows, part_ptr, part_size = plan.derived(bins)
    count, *plane = plan.wbwc.shape
    offsets = plan.wbwc.reshape(count, plane[0] * plane[1])
    arguments = (
        rows,
        part_ptr,
        part_size,
        plan.wa,
        offsets,
        cube.reshape(plan.wa.size, offsets.shape[1]),
        grid,
        # A gather's map may be read-only, so pass nothing to clear.
        np.empty(0, grid.dtype) if back else grid,
        back,
    )
    ends = part_ptr * offsets.shape[1] + part_size * np.arange(len(part_ptr))
    in_shares(lambda low, high: _parts(low, high, *arguments), ends, _GRAIN)


@register("structured_scatter_add", "numba")
def structured_scatter_add(a: Any, y: Any) -> None:
    density_cube, plan = a
    out = y.map
    _run(plan, np.ascontiguousarray(density_cube), out, False)


@register("structured_gather", "numba")
def structured_gather(a: Any, y: Any) -> None:
    grid, plan = a
    density_cube = y.density_cube
    _run(plan, density_cube, np.ascontiguousarray(grid), True)
