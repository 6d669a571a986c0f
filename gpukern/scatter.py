"""Structured scatter and gather on the GPU: a program per cube, with its offsets in registers.

Bytes: the cubes once, the map once, and ny · nz offsets for nx · ny · nz elements. The scatter adds
atomically, in an order that changes from run to run; where torch is asked for deterministic
algorithms its own serve. Whatever an offset says, what lies outside of the map is left alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._registry import register
from fusedops.scatter import ScatterPlan
from fusedops.scatter import scatter as definition
from gpukern.launch import Launcher, kernel_of_any_size, wide

# Elements of a plane that a program takes, and planes at a time.
_BLOCK = {"scatter": 512, "gather": 512}
_PLANES = {"scatter": 1, "gather": 1}
_WARPS = {"scatter": 1, "gather": 1}


def _walk(
    cubes, grid, order, wa, wbwc, nx, elements, size, blocks,
    BLOCK: tl.constexpr, PLANES: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Add the elements of a cube to the map, or copy them from there (BACK)."""
    count = tl.num_programs(0) // blocks
    c = tl.load(order + tl.program_id(0) // blocks).to(tl.int64)
    c = tl.minimum(tl.maximum(c, 0), count - 1)
    e = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    own = e < elements
    offset = tl.load(wbwc + c * elements + e, mask=own, other=0).to(tl.int64)
    first = 0
    while first < nx:
        for p in tl.static_range(PLANES):
            plane = c * nx + first + p
            there = first + p < nx
            place = offset + tl.load(wa + plane, mask=there, other=0).to(tl.int64)
            live = own & there & (place >= 0) & (place < size)
            if BACK:
                value = tl.load(grid + place, mask=live, other=0.0)
                tl.store(
                    cubes + plane * elements + e, value, mask=own & there, cache_modifier=".cs"
                )
            else:
                value = tl.load(
                    cubes + plane * elements + e,
                    mask=live,
                    other=0.0,
                    eviction_policy="evict_first",
                )
                tl.atomic_add(
                    grid + place, value.to(grid.dtype.element_ty), mask=live, sem="relaxed"
                )
        first += PLANES


_kernel = kernel_of_any_size(_walk)
_launch = {what: Launcher(_kernel, warps) for what, warps in _WARPS.items()}


def _order(plan: ScatterPlan) -> Any:
    """Return the cubes by their places: what they reach then stays in cache."""
    if plan.order is None:
        wa, wbwc = plan.tensors_here()
        plan.order = (wa[:, 0].long() + wbwc[:, 0, 0]).argsort()
    return plan.order


def _move(what: str, cubes: Any, grid: Any, plan: ScatterPlan) -> None:
    if not cubes.numel():
        return
    wa, wbwc = plan.tensors_here()
    count, nx, ny, nz = cubes.shape
    elements = ny * nz
    block = min(_BLOCK[what], triton.next_power_of_2(elements))
    blocks = -(-elements // block)
    integers = nx, elements, grid.numel(), blocks
    constants = block, _PLANES[what], what == "gather"
    key = cubes.device, cubes.dtype, grid.dtype, wa.dtype, wide(*integers), constants
    _launch[what](count * blocks, key, cubes, grid, _order(plan), wa, wbwc, *integers, *constants)


@register("structured_scatter_add", "triton")
def structured_scatter_add(density_cube: Any, plan: ScatterPlan, out: Any) -> None:
    if torch.are_deterministic_algorithms_enabled():
        out.copy_(definition.formula(density_cube, plan)[0])
        return
    # Atomic sums of 16 bits would lose what float32 keeps.
    total = out.zero_() if out.itemsize > 2 else torch.zeros_like(out, dtype=torch.float32)
    _move("scatter", density_cube.contiguous(), total, plan)
    if total is not out:
        out.copy_(total)


@register("structured_gather", "triton")
def structured_gather(grid: Any, plan: ScatterPlan, out: Any) -> None:
    _move("gather", out, grid.contiguous(), plan)
