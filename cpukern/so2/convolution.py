"""SO(2) convolutions on the CPU: products by BLAS or oneDNN, of an order's numbers at a time.

Threads share blocks of edges. The scaled numbers of a block and order, and their products, stay in
the cache between the steps. A complex product is three real ones: with the weight R + i I,

    y₊ = (x₊ + x₋) R - x₋ (R + I),    y₋ = (x₊ + x₋) R + x₊ (I - R).

Weights get partial sums, one for each of a fixed number of groups of blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cpukern.layout import laid_out
from cpukern.products import ByNumpy, of_tensors, share_groups
from fusedops._host import memory
from fusedops._host.threads import blas_has_a_limit, in_parallel
from fusedops.so2.op import columns, dweight_of, orders, rows_by_degree, weights_of

# Numbers of messages that a block has in the cache.
_CACHED = 1 << 20
# The fewest edges of a block, for fast products.
_FEW = 256
# The fewest blocks, for threads to share, unless the edges are too few.
_BLOCKS = 8
# The most groups of blocks; a group has one partial sum.
_GROUPS = 16


class Order(NamedTuple):
    """Where an order lies among the numbers of an edge's message, and of its radial functions."""

    own: slice
    functions: slice
    signs: int

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return a view (edges, signs, numbers) of messages."""
        own = rows[:, self.own]
        return own.reshape(len(own), self.signs, own.shape[1] // self.signs)

    def factors(self, radial: np.ndarray | None) -> np.ndarray | None:
        """Return a view (edges, numbers) of radial functions."""
        return None if radial is None else radial[:, self.functions]


@functools.lru_cache(maxsize=64)
def orders_of(lmax: int, mmax: int, channels: int) -> list[Order]:
    """Return the place of every order."""
    return [
        Order(columns(own, channels), columns(functions, channels), 1 if m == 0 else 2)
        for m, (own, functions) in enumerate(orders(lmax, mmax))
    ]


class _Call:
    """A call's arguments as rows of edges, and the division of edges into blocks."""

    def __init__(self, kernels: Any, a: Any, tensors: bool) -> None:
        self.kernels, self.G, self.bias = kernels, a.gate_channels, a.bias
        self.E, M, C = a.message.shape
        self.weights = [np.ascontiguousarray(weight) for weight in weights_of(a)]
        lmax, mmax = a.lmax, len(self.weights) - 1
        D = (len(self.weights[0]) - self.G) // (lmax + 1)
        self.dtype, self.message = a.message.dtype, a.message
        self.radial: Any = None if a.radial is None else laid_out(a.radial, 1)
        self.inputs, self.outputs = (orders_of(lmax, mmax, n) for n in (C, D))
        most = max(_FEW, _CACHED // max(M * max(C, D), 1))
        self.block = min(most, max(_FEW, -(-self.E // _BLOCKS)))
        if not blas_has_a_limit():
            # BLAS shares one large product among its own threads.
            self.block = max(self.E, 1)
        self.blocks = -(-self.E // self.block)
        signs = [order.signs for order in self.inputs]
        least = min(w.size // n for w, n in zip(self.weights, signs, strict=True))
        self.by = of_tensors(self.dtype, self.block * least) if tensors else ByNumpy

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

    def multiplications(self, back: bool) -> list[list[Any]]:
        """Return for every order the functions that multiply its `parts` by the weight.

        An order has one function, or one each for the rows of +m and -m, and their sum. `back` is
        for cotangents of results, by the complex conjugate.
        """
        found = []
        for m, weight in enumerate(self.weights):
            matrices, bias = [weight], None if back or m else self.bias
            if m:
                half = len(weight) // 2
                real, imaginary = weight[:half], weight[half:]
                less, more = imaginary - real, -(real + imaginary)
                matrices = [more, less, real] if back else [less, more, real]
            sides = [matrix if back else matrix.T for matrix in matrices]
            found.append([self.by.prepared(side, self.block, bias) for side in sides])
        return found

    def parts(self, order: Order, e: slice, rows: Any, radial: Any, room: Any, sums: bool) -> Any:
        """Return the rows of an order in a block, times radial functions: of +m, of -m, their sum.

        The sum is there for m > 0 and `sums`.
        """
        x, factors = order.of(rows[e]), order.factors(None if radial is None else radial[e])
        if radial is None and order.signs == 1:
            return x.transpose(1, 0, 2)
        count, _, length = x.shape
        out = room("parts", (order.signs + (sums and order.signs > 1), count, length))

        def step(part: slice) -> None:
            self.kernels.scale(x[part], None if factors is None else factors[part], out[:, part])

        self.share(step, count)
        return out

    def join(
        self, order: Order, e: slice, products: Any, out: Any, radial: Any = None, on: Any = None
    ) -> None:
        """Fill an order's rows of a block from products of its `parts`.

        With radial functions the rows are cotangents of scaled messages. `out` gets those of
        messages, and `on` those of radial functions; one may be None.
        """
        # The rows of +m are beside the product of those of -m.
        plus, minus, shared = products[0], None, None
        if order.signs > 1:
            minus, plus, shared = products
        x = None if on is None else order.of(self.x[e])
        factors = order.factors(None if radial is None else radial[e])
        out = None if out is None else order.of(out[e])
        on = order.factors(None if on is None else on[e])

        def step(part: slice) -> None:
            given = [a if a is None else a[part] for a in (plus, minus, shared, x, factors)]
            self.kernels.unscale(*given, *[a if a is None else a[part] for a in (out, on)])

        self.share(step, len(plus))


def _rows(array: Any) -> Any:
    """Return (E, M, C) as (E, M C), in memory that BLAS can read."""
    rows = laid_out(array, 2).reshape(len(array), array.shape[1] * array.shape[2])
    # NumPy multiplies rows that overlap or go backwards without BLAS, slowly.
    apart = rows.strides[0] >= rows.shape[1] * rows.itemsize
    return rows if apart else np.ascontiguousarray(rows)


def _room(kept: dict[str, np.ndarray], dtype: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return scratch memory of a name, which the next order or block of a thread uses again."""
    array, size = kept.get(name), math.prod(shape)
    if array is None or len(array) < size:
        array = kept[name] = memory.empty((size,), dtype)
    return array[:size].reshape(shape)


def forward(kernels: Any, a: Any, y: Any, *, tensors: bool = False) -> None:
    """Fill the convolution, and the gates if they are wanted."""
    call = _Call(kernels, a, tensors)
    gates, G = y.gates, call.G
    out = None if y.out is None else _rows(y.out)
    multiplications = call.multiplications(back=False)

    def work(_: int, e: slice, room: Any) -> None:
        for m, by in enumerate(multiplications):
            if m and out is None:
                break
            parts = call.parts(call.inputs[m], e, call.x, call.radial, room, True)
            products = [multiply(part) for multiply, part in zip(by, parts, strict=True)]
            if m == 0 and gates is not None:
                gates[e] = products[0][:, :G]
            if m == 0:
                products[0] = products[0][:, G:]
            if out is not None:
                call.join(call.outputs[m], e, products, out)

    call.over_groups(call.blocks, work)


def backward(kernels: Any, a: Any, y: Any, *, tensors: bool = False) -> None:
    """Fill the cotangents that are wanted."""
    call = _Call(kernels, a, tensors)
    dout, dgates, radial = _rows(a.dout), a.dgates, call.radial
    dmessage: Any = None if y.dmessage is None else _rows(y.dmessage)
    dweights = y[1 : 1 + len(call.weights)]
    wants_weights = any(dw is not None for dw in dweights)
    wants_rows = dmessage is not None or y.dradial is not None
    groups = min(call.blocks, _GROUPS) if wants_weights or y.dbias is not None else call.blocks
    dmatrices: list[list[Any]] = [[None] * groups for _ in call.weights]
    dbias: list[Any] = [None] * groups
    multiplications = call.multiplications(back=True) if wants_rows else [None] * len(dweights)

    def add(totals: list[Any], g: int, one: np.ndarray) -> None:
        if totals[g] is None:
            totals[g] = one
        else:
            totals[g] += one

    def work(g: int, e: slice, room: Any) -> None:
        for m, (by, dw) in enumerate(zip(multiplications, dweights, strict=True)):
            order, result = call.inputs[m], dout[e, call.outputs[m].own]
            if m == 0 and dgates is not None:
                both = room("products", (len(result), len(call.weights[0])))
                both[:, : call.G], both[:, call.G :] = dgates[e], result
                result = both
            if m == 0 and y.dbias is not None:
                add(dbias, g, result.sum(0, np.float64))
            if dw is not None:
                parts = call.parts(order, e, call.x, radial, room, False)
                found = [call.by.dot(result.T, part) for part in parts]
                add(dmatrices[m], g, np.concatenate(found, axis=1))
            if by is None:
                continue
            parts = [result]
            if m:
                parts = call.parts(call.outputs[m], e, dout, None, room, True)
            products = [multiply(part) for multiply, part in zip(by, parts, strict=True)]
            call.join(order, e, products, dmessage, radial, y.dradial)

    call.over_groups(groups, work)
    for m, (dw, totals) in enumerate(zip(dweights, dmatrices, strict=True)):
        if dw is not None:
            dw[...] = dweight_of(sum(totals), m) if groups else 0
    if y.dbias is not None:
        y.dbias[...] = sum(dbias)


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
