"""SO(2) convolutions on the CPU: products by BLAS or oneDNN, which read strided rows.

Threads share blocks of edges, whose scaled messages stay in the cache between the scaling and the
products. Complex products are real ones with [[R, -I], [I, R]], made once in a call. Weights get
partial sums, one for each of a fixed number of groups of blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cpukern.layout import laid_out
from cpukern.products import ByNumpy, of_tensors, share_groups
from fusedops._frame import memory
from fusedops._frame.threads import blas_has_a_limit, in_parallel
from fusedops.so2 import columns, on_weight, orders, rows_by_degree, weights_of

# Numbers of messages that a block has in the cache, and the fewest edges of a block: products want
# many. The fewest blocks, for threads to share, unless they have too few edges.
_CACHED, _FEW, _BLOCKS = 1 << 20, 256, 8
# The most groups of blocks; a group has one partial sum.
_GROUPS = 16


@functools.lru_cache(maxsize=64)
def segments_of(lmax: int, mmax: int, channels: int) -> np.ndarray:
    """Return where orders lie in an edge's messages and radial functions.

    The array has, for each order and sign, a place in messages, a place in radial functions, a
    length, and a sign: 1 for the rows of -m, which come after the rows of +m.
    """
    segments = []
    for m, (own, functions) in enumerate(orders(lmax, mmax)):
        length = (lmax + 1 - m) * channels
        for sign in range(1 if m == 0 else 2):
            place = own.start * channels + sign * length
            segments.append((place, functions.start * channels, length, sign))
    return np.array(segments, np.int64)


class _Call:
    """A call's arguments as rows of edges, and the division of edges into blocks."""

    def __init__(self, kernels: Any, a: Any, tensors: bool) -> None:
        self.kernels, self.G = kernels, a.gate_channels
        self.E, M, C = a.message.shape
        weights = weights_of(a)
        lmax, mmax = a.lmax, len(weights) - 1
        self.D = (len(weights[0]) - self.G) // (lmax + 1)
        self.dtype = a.message.dtype
        self.message, self.numbers = a.message, M * C
        self.radial: Any = None if a.radial is None else laid_out(a.radial, 1)
        self.segments, rows = segments_of(lmax, mmax, C), [own for own, _ in orders(lmax, mmax)]
        self.inputs, self.outputs = ([columns(own, n) for own in rows] for n in (C, self.D))
        self.matrices = [np.ascontiguousarray(weights[0]), *map(_real, weights[1:])]
        most = max(_FEW, _CACHED // max(M * max(C, self.D), 1))
        self.block = min(most, max(_FEW, -(-self.E // _BLOCKS)))
        if not blas_has_a_limit():
            # BLAS shares one large product among its own threads.
            self.block = max(self.E, 1)
        self.blocks = -(-self.E // self.block)
        least = self.block * min(matrix.size for matrix in self.matrices)
        self.by = of_tensors(self.dtype, least) if tensors else ByNumpy

    @functools.cached_property
    def x(self) -> np.ndarray:
        """The messages as rows. The backward may have their shape alone, and not ask for them."""
        return _rows(self.message)

    def share(self, step: Callable[[slice], None], count: int) -> None:
        """Take a step on a block's edges; on several threads, if no other block has a thread."""
        if self.blocks > 1:
            step(slice(0, count))
        else:
            in_parallel(lambda low, high: step(slice(low, high)), count, _FEW)

    def over_groups(self, groups: int, work: Callable[..., None]) -> None:
        """Call ``work(group, edges, room)`` on all blocks, in order within a group."""

        def share(low: int, high: int) -> None:
            room = functools.partial(_room, {}, self.dtype)
            for g in range(low, high):
                for k in range(self.blocks * g // groups, self.blocks * (g + 1) // groups):
                    work(g, slice(k * self.block, min((k + 1) * self.block, self.E)), room)

        share_groups(self.by, groups, share)

    def scaled(self, e: slice, room: Any) -> np.ndarray:
        """Return a block's messages times radial functions."""
        x = self.x[e]
        if self.radial is None:
            return x
        radial, out = self.radial[e], room("scaled", x.shape)
        self.share(
            lambda part: self.kernels.scale(x[part], radial[part], self.segments, out[part]), len(x)
        )
        return out

    def unscale(self, e: slice, on_parts: Any, dmessage: Any, dradial: Any) -> None:
        """Fill the cotangents of a block's messages and radial functions."""
        # Without a cotangent of radial functions any array stands for the messages.
        x, radial = on_parts if dradial is None else self.x[e], self.radial[e]
        made = [None if array is None else array[e] for array in (dmessage, dradial)]

        def step(part: slice) -> None:
            given = on_parts[part], x[part], radial[part], self.segments
            self.kernels.unscale(*given, *[d if d is None else d[part] for d in made])

        self.share(step, len(x))


def _real(weight: np.ndarray) -> np.ndarray:
    """Return [[R, -I], [I, R]] of a weight, R above I."""
    half, width = weight.shape[0] // 2, weight.shape[1]
    out = memory.empty((2 * half, 2 * width), weight.dtype)
    out[:, :width] = weight
    np.negative(weight[half:], out=out[:half, width:])
    out[half:, width:] = weight[:half]
    return out


def _rows(array: Any) -> Any:
    """Return (E, M, C) as (E, M C), in memory that BLAS can read."""
    rows = laid_out(array, 2).reshape(len(array), array.shape[1] * array.shape[2])
    # NumPy multiplies rows that overlap or go backwards without BLAS, slowly.
    apart = rows.strides[0] >= rows.shape[1] * rows.itemsize
    return rows if apart else np.ascontiguousarray(rows)


def _room(kept: dict[str, np.ndarray], dtype: Any, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Return scratch memory of a name, which the next block of a thread uses again."""
    array = kept.get(name)
    if array is None or len(array) < shape[0]:
        array = kept[name] = memory.empty(shape, dtype)
    return array[: shape[0]]


def forward(kernels: Any, a: Any, y: Any, *, tensors: bool = False) -> None:
    """Fill the convolution, and the gates if they are wanted."""
    call = _Call(kernels, a, tensors)
    gates, out, G, bias = y.gates, y.out, call.G, a.bias
    out = None if out is None else _rows(out)
    first = call.matrices[0]

    def work(_: int, e: slice, room: Any) -> None:
        parts = call.scaled(e, room)
        if gates is not None:
            call.by.dot(parts[:, call.inputs[0]], first[:G].T, gates[e])
            if bias is not None:
                gates[e] += bias[:G]
        if out is None:
            return
        results = [out[e, own] for own in call.outputs]
        for own, matrix, result in zip(call.inputs, call.matrices, results, strict=True):
            # The rows of gates come first, and have no place in the result.
            kept = matrix[len(matrix) - result.shape[1] :]
            call.by.dot(parts[:, own], kept.T, result)
        if bias is not None:
            results[0] += bias[G:]

    call.over_groups(call.blocks, work)


def backward(kernels: Any, a: Any, y: Any, *, tensors: bool = False) -> None:
    """Fill the cotangents that are wanted."""
    call = _Call(kernels, a, tensors)
    dout, dgates, radial = _rows(a.dout), a.dgates, call.radial
    dmessage: Any = None if y.dmessage is None else _rows(y.dmessage)
    dweights = y[1 : 1 + len(call.matrices)]
    on_weights = any(dw is not None for dw in dweights)
    sums = on_weights or y.dbias is not None
    groups = min(call.blocks, _GROUPS) if sums else call.blocks
    on_matrices: list[list[Any]] = [[None] * groups for _ in call.matrices]
    on_bias: list[Any] = [None] * groups

    def add(totals: list[Any], g: int, one: np.ndarray) -> None:
        if totals[g] is None:
            totals[g] = one
        else:
            totals[g] += one

    def work(g: int, e: slice, room: Any) -> None:
        results = [dout[e, own] for own in call.outputs]
        if dgates is not None:
            both = room("products", (len(results[0]), len(call.matrices[0])))
            both[:, : call.G], both[:, call.G :] = dgates[e], results[0]
            results[0] = both
        if y.dbias is not None:
            add(on_bias, g, results[0].sum(0, np.float64))
        if on_weights:
            parts = call.scaled(e, room)
            for totals, dw, result, own in zip(
                on_matrices, dweights, results, call.inputs, strict=True
            ):
                if dw is not None:
                    add(totals, g, result.T @ parts[:, own])
        if dmessage is None and y.dradial is None:
            return
        rows = len(results[0]), call.numbers
        on_parts = dmessage[e] if radial is None else room("on_parts", rows)
        for own, matrix, result in zip(call.inputs, call.matrices, results, strict=True):
            call.by.dot(result, matrix, on_parts[:, own])
        if radial is not None:
            call.unscale(e, on_parts, dmessage, y.dradial)

    call.over_groups(groups, work)
    for m, (dw, totals) in enumerate(zip(dweights, on_matrices, strict=True)):
        if dw is not None:
            dw[...] = on_weight(sum(totals), m) if groups else 0
    if y.dbias is not None:
        y.dbias[...] = sum(on_bias)


@functools.lru_cache(maxsize=64)
def degree_table(lmax: int, mmax: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of all degrees, degree after degree, and where each degree begins."""
    rows = rows_by_degree(lmax, mmax, layout)
    starts = np.cumsum([0, *map(len, rows)])
    return np.concatenate(rows), starts.astype(np.int64)


def gated(kernel: Any, a: Any, given: tuple[Any, ...], made: tuple[Any, ...], order: int) -> None:
    """Run the kernel of the gate's value (order 0), first or second derivative.

    `given` are dout, ddgates and ddx; `made` are the results by rows, then those by gates.
    """
    table = degree_table(a.lmax, a.mmax, a.layout)
    arrays = [None if g is None else laid_out(g, g.ndim - 1) for g in (a.gates, a.x, *given)]
    kernel(*arrays, *table, *made, order)
