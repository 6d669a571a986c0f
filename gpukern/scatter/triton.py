"""Structured scatter and gather on the GPU.

Where all cubes are boxes of a periodic grid, as a plan finds out, the programs of a scatter own
tiles of the grid and sum the cubes' elements there, in the order of cubes; the programs of a gather
own cubes. No offset is read. Bytes: the cubes once, and the map once.

For any other offsets a program takes a cube, with its offsets within a plane in registers. The
scatter adds atomically, in an order that changes from run to run; torch's own operations serve
where it is asked for deterministic algorithms. No offset reaches memory outside of the map.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from fusedops._frame.registry import register
from fusedops.scatter import ScatterPlan
from fusedops.scatter.op import scatter as definition
from fusedops.scatter.plan import FIELD, TILE
from gpukern.launch import Launcher, kernel_of_any_size, power, wide

# Elements of a plane that a program takes at a time, for any offsets.
_BLOCK = 512
# Elements of a box that a program copies at a time, and the programs of a box.
_COPIED = 256
_SHARES = 2
# Pairs of a tile and a cube whose loads are in flight together.
_AHEAD = 2


def _own(
    cubes, grid, begin, pairs, planes, rows, columns,
    NX: tl.constexpr, NY: tl.constexpr, NZ: tl.constexpr,
    TX: tl.constexpr, TY: tl.constexpr, TZ: tl.constexpr, FIELD: tl.constexpr,
    AHEAD: tl.constexpr, FLOAT: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Sum the elements that all cubes have in a tile of the grid."""
    tile = tl.program_id(0)
    across = tl.cdiv(columns, TZ)
    along = tl.cdiv(rows, TY)
    e = tl.arange(0, TX * TY * TZ)
    x, y, z = e // (TY * TZ), e // TZ % TY, e % TZ
    row = tile // across
    grid_x, grid_y, grid_z = row // along * TX + x, row % along * TY + y, tile % across * TZ + z
    within = (x * NY + y) * NZ + z
    total = tl.zeros((TX * TY * TZ,), FLOAT)
    first = tl.load(begin + tile)
    pairs += first
    at, end = 0, (tl.load(begin + tile + 1) - first).to(tl.int32)
    while at < end:
        for ahead in tl.static_range(AHEAD):
            pair = tl.load(pairs + tl.minimum(at + ahead, end - 1))
            i = (pair & ((1 << FIELD) - 1)).to(tl.int32) - (1 << FIELD - 1)
            j = (pair >> FIELD & ((1 << FIELD) - 1)).to(tl.int32) - (1 << FIELD - 1)
            k = (pair >> 2 * FIELD & ((1 << FIELD) - 1)).to(tl.int32) - (1 << FIELD - 1)
            # Without a sign, a negative number is large.
            live = (x + i).to(tl.uint32, bitcast=True) < NX
            live = live & ((y + j).to(tl.uint32, bitcast=True) < NY)
            live = live & ((z + k).to(tl.uint32, bitcast=True) < NZ) & (at + ahead < end)
            cube = cubes + (pair >> 3 * FIELD) * (NX * NY * NZ) + ((i * NY + j) * NZ + k)
            total += tl.load(cube + within, mask=live, other=0.0).to(FLOAT)
        at += AHEAD
    inside = (grid_x < planes) & (grid_y < rows) & (grid_z < columns)
    # Only a map of 2³¹ elements and more has places of 64 bits.
    place = (grid_x.to(LONG) * rows + grid_y) * columns + grid_z
    tl.store(grid + place, total.to(grid.dtype.element_ty), mask=inside)


def _copy(
    cubes, grid, order, origins, shares, planes, rows, columns,
    NX: tl.constexpr, NY: tl.constexpr, NZ: tl.constexpr, BLOCK: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    """Copy a share of a cube's elements from the grid."""
    c = tl.load(order + tl.program_id(0) // shares)
    x = tl.load(origins + 3 * c)
    y = tl.load(origins + 3 * c + 1)
    z = tl.load(origins + 3 * c + 2)
    wraps = (x > planes - NX) | (y > rows - NY) | (z > columns - NZ)
    first = grid + ((x.to(tl.int64) * rows + y) * columns + z)
    begin = c * (NX * NY * NZ)
    # Whole lines of memory are written at a time.
    at = tl.program_id(0) % shares * BLOCK - (begin % 32).to(tl.int32)
    while at < NX * NY * NZ:
        e = at + tl.arange(0, BLOCK)
        own = e.to(tl.uint32, bitcast=True) < NX * NY * NZ
        row = (e.to(tl.uint32) // NZ).to(tl.int32)
        plane = (row.to(tl.uint32) // NY).to(tl.int32)
        place = e + row.to(LONG) * (columns - NZ) + plane.to(LONG) * (rows - NY) * columns
        if wraps:
            place -= tl.where(x + plane >= planes, rows.to(LONG) * columns * planes, 0)
            place -= tl.where(y + row - plane * NY >= rows, rows.to(LONG) * columns, 0)
            place -= tl.where(z + e - row * NZ >= columns, columns, 0)
        value = tl.load(first + place, mask=own, other=0.0)
        tl.store(cubes + (begin + at) + tl.arange(0, BLOCK), value, mask=own)
        at += shares * BLOCK


def _walk(
    cubes, grid, order, wa, wbwc, nx, elements, size, blocks,
    BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Add the elements of a cube to the map, or copy them from there (BACK)."""
    count = tl.num_programs(0) // blocks
    c = tl.load(order + tl.program_id(0) // blocks).to(tl.int64)
    c = tl.minimum(tl.maximum(c, 0), count - 1)
    e = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    own = e < elements
    offset = tl.load(wbwc + c * elements + e, mask=own, other=0).to(tl.int64)
    plane = 0
    while plane < nx:
        place = offset + tl.load(wa + c * nx + plane).to(tl.int64)
        live = own & (place >= 0) & (place < size)
        element = cubes + (c * nx + plane) * elements + e
        if BACK:
            value = tl.load(grid + place, mask=live, other=0.0)
            tl.store(element, value, mask=own, cache_modifier=".cs")
        else:
            value = tl.load(element, mask=live, other=0.0, eviction_policy="evict_first")
            tl.atomic_add(grid + place, value.to(grid.dtype.element_ty), mask=live, sem="relaxed")
        plane += 1


_owners = Launcher(kernel_of_any_size(_own), 1)
_copies = Launcher(kernel_of_any_size(_copy), 1)
_walks = Launcher(kernel_of_any_size(_walk), 1)


def _long(grid: Any) -> Any:
    return tl.int64 if grid.numel() >> 31 else tl.int32


def _sum(cubes: Any, grid: Any, plan: ScatterPlan) -> None:
    """Write the sum of all boxes to the grid."""
    begin, pairs, integers = plan.sorted.begin, plan.sorted.pairs, plan.grid
    accumulator = tl.float64 if grid.dtype == torch.float64 else tl.float32
    constants = *cubes.shape[1:], *TILE, FIELD, _AHEAD, accumulator, _long(grid)
    key = cubes.device, cubes.dtype, wide(*integers), constants
    _owners(begin.numel() - 1, key, cubes, grid, begin, pairs, *integers, *constants)


def _fetch(cubes: Any, grid: Any, plan: ScatterPlan) -> None:
    """Copy all boxes of the grid to the cubes."""
    order, origins = plan.sorted.order, plan.sorted.origins
    integers = _SHARES, *plan.grid
    constants = *cubes.shape[1:], _COPIED, _long(grid)
    key = cubes.device, cubes.dtype, wide(*integers), constants
    _copies(_SHARES * len(cubes), key, cubes, grid, order, origins, *integers, *constants)


def _move(cubes: Any, grid: Any, plan: ScatterPlan, back: bool) -> None:
    if not cubes.numel():
        return
    where = plan.sorted
    count, nx, ny, nz = cubes.shape
    elements = ny * nz
    block = min(_BLOCK, power(elements))
    blocks = -(-elements // block)
    integers = nx, elements, grid.numel(), blocks
    constants = block, back
    key = cubes.device, cubes.dtype, grid.dtype, where.wa.dtype, wide(*integers), constants
    _walks(
        count * blocks, key, cubes, grid, where.order, where.wa, where.wbwc, *integers, *constants
    )


@register("structured_scatter_add", "triton")
def structured_scatter_add(a: Any, y: Any) -> None:
    density_cube, plan = a
    out = y.map
    if any(plan.grid):
        _sum(density_cube.contiguous(), out, plan)
        return
    if torch.are_deterministic_algorithms_enabled():
        out.copy_(definition.formula(a)[0])
        return
    # Atomic sums in 16 bits would lose digits that float32 keeps.
    total = out.zero_() if out.itemsize > 2 else torch.zeros_like(out, dtype=torch.float32)
    _move(density_cube.contiguous(), total, plan, back=False)
    if total is not out:
        out.copy_(total)


@register("structured_gather", "triton")
def structured_gather(a: Any, y: Any) -> None:
    grid, plan = a
    out = y.density_cube
    if any(plan.grid):
        _fetch(out, grid.contiguous(), plan)
    else:
        _move(out, grid.contiguous(), plan, back=True)
