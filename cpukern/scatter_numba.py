"""Structured scatter and gather on the CPU in Numba, by owners of parts of the map.

One thread clears a part and adds to it, in the order of the cubes, what lies in it, so that the
thread count changes no bit; what lies elsewhere is passed over, wherever it is. Offsets that follow
each other are a run, found once for all planes of a cube in a part, and added as vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from cpukern.jit import jit
from cpukern.threads import in_parallel, threads_for
from fusedops._registry import register
from fusedops.scatter import ScatterPlan

# Elements of cubes and map that pay for handing a share to another thread.
_GRAIN = 1 << 16
# Bytes that are added at once: as many as compilers choose, also where there are longer vectors.
_VECTOR = 32

_inlined = functools.partial(numba.njit, error_model="numpy", forceinline=True)


def _declared(builder, name, result, types):
    """Return a function of the module that is being built."""
    kind, module = ir.FunctionType(result, types), builder.module
    return module.globals.get(name) or ir.Function(module, kind, name)


def _vector_moved(add):
    """Return an intrinsic that writes, or adds, the first n elements of a vector.

    Runs are short: what a loop leaves over after its last whole vector would be most of them.
    """

    @intrinsic
    def move(typing_context, out, o, values, v, n):
        lanes = _VECTOR * 8 // out.dtype.bitwidth
        index = numba.types.intp

        def generate(context, builder, signature, arguments):
            i32 = ir.IntType(32)
            vector = ir.VectorType(context.get_value_type(out.dtype), lanes)
            mask = ir.VectorType(ir.IntType(1), lanes)
            pointer, kind = vector.as_pointer(), f"v{lanes}f{out.dtype.bitwidth}.p0"
            load = _declared(
                builder, f"llvm.masked.load.{kind}", vector, [pointer, i32, mask, vector]
            )
            store = _declared(
                builder, f"llvm.masked.store.{kind}", ir.VoidType(), [vector, pointer, i32, mask]
            )
            counts = ir.VectorType(arguments[4].type, lanes)
            count = builder.insert_element(counts(ir.Undefined), arguments[4], i32(0))
            count = builder.shuffle_vector(count, count, ir.VectorType(i32, lanes)([0] * lanes))
            kept = builder.icmp_signed("<", counts(list(range(lanes))), count)
            align, nothing = i32(out.dtype.bitwidth // 8), vector(None)

            def address(which):
                data = context.make_array(signature.args[which])(
                    context, builder, arguments[which]
                ).data
                return builder.bitcast(builder.gep(data, [arguments[which + 1]]), pointer)

            value = builder.call(load, [address(2), align, kept, nothing])
            if add:
                value = builder.fadd(builder.call(load, [address(0), align, kept, nothing]), value)
            builder.call(store, [value, address(0), align, kept])
            return context.get_dummy_value()

        return numba.types.void(out, index, values, index, index), generate

    return move


_copy_vector, _add_vector = _vector_moved(add=False), _vector_moved(add=True)


@_inlined()
def copy_run(out, o, values, v, n):
    """Write values[v : v + n] to out[o : o + n]."""
    for k in range(0, n, _VECTOR // out.itemsize):
        _copy_vector(out, o + k, values, v + k, n - k)


@_inlined()
def add_run(out, o, values, v, n):
    """Add values[v : v + n] to out[o : o + n]."""
    for k in range(0, n, _VECTOR // out.itemsize):
        _add_vector(out, o + k, values, v + k, n - k)


@jit
def _find_runs(offsets, runs):
    """Write where runs of offsets begin, and the end, into runs; return how many there are."""
    count = 0
    for at in range(len(offsets)):
        if at == 0 or offsets[at] != offsets[at - 1] + 1:
            runs[count] = at
            count += 1
    runs[count] = len(offsets)
    return count


@jit
def _parts(low, high, rows, part_ptr, part_size, wa, offsets, cube, grid, back):
    nx, plane = wa.shape[1], offsets.shape[1]
    runs = np.empty(plane + 1, np.int64)
    for p in range(low, high):
        first = p * part_size
        last = min(first + part_size, len(grid))
        if not back:
            grid[first:last] = 0
        found, count = -1, 0
        for at in range(part_ptr[p], part_ptr[p + 1]):
            row = rows[at]
            c = row // nx
            if c != found:
                found, count = c, _find_runs(offsets[c], runs)
            start = wa[c, row - c * nx]
            for r in range(count):
                o = start + offsets[c, runs[r]]
                begin, end = max(first, o), min(last, o + runs[r + 1] - runs[r])
                v = row * plane + runs[r] + begin - o
                if begin < end and back:
                    copy_run(cube, v, grid, begin, end - begin)
                elif begin < end:
                    add_run(grid, begin, cube, v, end - begin)


def in_shares(work: Callable[[int, int], None], ends: np.ndarray, grain: int) -> None:
    """Call ``work(low, high)`` on shares of items with about as much to do, of which `ends` is the
    cumulative sum from 0.
    """
    threads = threads_for(int(ends[-1]), grain)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(threads + 1) / threads)
    cuts[0], cuts[-1] = 0, len(ends) - 1
    in_parallel(lambda low, high: work(cuts[low], cuts[high]), threads, 1)


def _run(plan: ScatterPlan, cube: np.ndarray, grid: np.ndarray, back: bool) -> None:
    rows, part_ptr, part_size = plan.bins()
    count, *plane = plan.wbwc.shape
    offsets = plan.wbwc.reshape(count, plane[0] * plane[1])
    arguments = rows, part_ptr, part_size, plan.wa, offsets, cube.reshape(-1), grid, back
    ends = part_ptr * offsets.shape[1] + part_size * np.arange(len(part_ptr))
    in_shares(lambda low, high: _parts(low, high, *arguments), ends, _GRAIN)


@register("structured_scatter_add", "numba")
def structured_scatter_add(density_cube: Any, plan: ScatterPlan, out: Any) -> None:
    _run(plan, np.ascontiguousarray(density_cube), out, False)


@register("structured_gather", "numba")
def structured_gather(grid: Any, plan: ScatterPlan, density_cube: Any) -> None:
    _run(plan, density_cube, np.ascontiguousarray(grid), True)
