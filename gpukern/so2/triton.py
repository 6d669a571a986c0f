"""SO(2) convolutions and gates on the GPU: torch's products, and kernels for the steps around them.

Products read and write strided rows: nothing is copied together or apart. A complex product is one
real product with [[R, -I], [I, R]], made of the weight in every call. One kernel multiplies
messages by radial functions, one pulls back through that, and one evaluates a gate or its
derivatives, a block of channels in a program. Where products are made of halves, these kernels
write the halves of messages alone.

Bytes beside the products', once each: M and R numbers of an edge and channel in and M out to scale;
2 M + R in and M + R out to pull back, and M for halves; and the features and gates of a gate.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fusedops._frame.check import promoted
from fusedops._frame.registry import register
from fusedops._kept import formed
from fusedops.so2.op import columns, orders, rows_by_degree, weights_of
from gpukern.launch import Launcher, in_one_dtype, kernel_of_any_size, power, rows_of, wide
from gpukern.products import (
    BLOCK,
    Factor,
    Orders,
    in_vectors,
    kept_orders,
    multiply,
    orders_to_keep,
    split_for_both,
    sum_over_rows,
    sums_halves,
    write_block,
    write_orders,
)

# Numbers that a program of the scaling takes, edges of its gradient's without halves, the most
# channels of a gate's, and warps.
_NUMBERS, _EDGES, _CHANNELS, _WARPS = 512, 8, 128, 4


@kernel_of_any_size
def _scale(
    x, radial, out, blocks, x_edge, radial_edge,
    C: tl.constexpr, LMAX: tl.constexpr, MMAX: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    e = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * SIZE + tl.arange(0, SIZE)
    live = at < M * C
    row = at // C
    function = row
    for m in tl.static_range(1, MMAX + 1):
        # Where the order begins among rows, and among functions.
        start = (2 * m - 1) * (LMAX + 1) - m * (m - 1)
        first = m * (LMAX + 1) - m * (m - 1) // 2
        function = tl.where(row >= start, first + (row - start) % (LMAX + 1 - m), function)
    value = tl.load(x + e * x_edge + at, mask=live, other=0.0).to(FLOAT)
    place = radial + e * radial_edge + function * C + at % C
    factor = tl.load(place, mask=live, other=0.0).to(FLOAT)
    tl.store(out + e * (M * C) + at, (value * factor).to(out.dtype.element_ty), mask=live)


def _unscale(
    dscaled, x, radial, dx, dradial, halves, scales, edges, x_edge, radial_edge, lo,
    C: tl.constexpr, LMAX: tl.constexpr, MMAX: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    BE: tl.constexpr, BC: tl.constexpr, FLOAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Pull back through the scaling, a block of edges and of one order's functions in a program.

    The halves of the scaled messages are written by blocks. `dx` may be the memory of `dscaled`.
    """
    blocks = 0
    for m in tl.static_range(MMAX + 1):
        blocks += ((LMAX + 1 - m) * C + BC - 1) // BC
    block = tl.program_id(0) % blocks
    e = (tl.program_id(0) // blocks).to(tl.int64) * BE + tl.arange(0, BE)[:, None]
    # Where the order begins among blocks, numbers of messages and functions, and its functions.
    first = 0
    start = 0
    function = 0
    width = (LMAX + 1) * C
    passed = 0
    for m in tl.static_range(1, MMAX + 1):
        passed += ((LMAX + 2 - m) * C + BC - 1) // BC
        later = block >= passed
        first = tl.where(later, passed, first)
        start = tl.where(later, ((2 * m - 1) * (LMAX + 1) - m * (m - 1)) * C, start)
        function = tl.where(later, (m * (LMAX + 1) - m * (m - 1) // 2) * C, function)
        width = tl.where(later, (LMAX + 1 - m) * C, width)
    if ALIGNED:
        x_edge, radial_edge = x_edge // 8 * 8, radial_edge // 8 * 8
        start, function, width = start // 8 * 8, function // 8 * 8, width // 8 * 8
    c = (block - first) * BC + tl.arange(0, BC)[None, :]
    live = (e < edges) & (c < width)
    place = e * (M * C) + start + c
    factor = tl.load(radial + e * radial_edge + function + c, mask=live, other=0.0).to(FLOAT)
    total = tl.zeros((BE, BC), FLOAT)
    for sign in tl.static_range(2):
        # Order 0 has no second half.
        there = live
        if sign == 1:
            there = live & (start > 0)
            place += width
        if dradial is not None or halves is not None:
            at = x + e * x_edge + (place - e * (M * C))
            value = tl.load(at, mask=there, other=0.0).to(FLOAT)
        h = tl.load(dscaled + place, mask=there, other=0.0).to(FLOAT)
        if dx is not None:
            tl.store(dx + place, (h * factor).to(dx.dtype.element_ty), mask=there)
        if dradial is not None:
            total += h * value
        if halves is not None:
            column = (start + sign * width) // BC + block - first
            to = scales + (tl.program_id(0) // blocks) * (M * C // BC) + column
            if sign == 0 or start > 0:
                write_block(value * factor, halves, place, there, lo // 8 * 8, to)
    if dradial is not None:
        to = dradial + e * (R * C) + function + c
        tl.store(to, total.to(dradial.dtype.element_ty), mask=live)


@kernel_of_any_size
def _real(weight, out, elements, half, width, row, column, SIZE: tl.constexpr):
    """Write [[R, -I], [I, R]] of a weight, R above I."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    i, j = at // (2 * width), at % (2 * width)
    lower, right = i >= half, j >= width
    # I stands below R in the weight, and in the two blocks beside the diagonal here.
    of = tl.where(lower, i - half, i) + tl.where(lower != right, half, 0)
    place = of * row + tl.where(right, j - width, j) * column
    value = tl.load(weight + place, mask=at < elements, other=0.0)
    tl.store(out + at, tl.where(right & (i < half), -value, value), mask=at < elements)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@kernel_of_any_size
def _gate(
    gates, x, dout, ddgates, ddx, rows_out, ddout, gates_out, halves, scales, blocks, edges,
    gates_edge, x_edge, dout_edge, ddgates_edge, ddx_edge,
    C: tl.constexpr, LMAX: tl.constexpr, MMAX: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, FLOAT: tl.constexpr, ORDER: tl.constexpr,
    BY_GATES: tl.constexpr, BY_X: tl.constexpr, ON_ROWS: tl.constexpr, ON_DOUT: tl.constexpr,
    ON_GATES: tl.constexpr, PLACES: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Evaluate the gate (ORDER 0), its derivative, or the derivative's.

    The halves of rows, and of gates, are written by orders.
    """
    e = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks) * SIZE + tl.arange(0, SIZE)
    live = c < C
    row = e * (M * C) + c
    h = tl.load(x + e * x_edge + c, mask=live, other=0.0).to(FLOAT)
    s = _sigmoid(h)
    slope = s * (1 - s)
    zero = tl.zeros([SIZE], FLOAT)
    made = ()
    made_gates = ()
    if ORDER == 0:
        made = made + (h * s,)
        tl.store(rows_out + row, (h * s).to(rows_out.dtype.element_ty), mask=live)
    else:
        g = tl.load(dout + e * dout_edge + c, mask=live, other=0.0).to(FLOAT)
        first = s + h * slope
        if ORDER == 1:
            made = made + (g * first,)
            if ON_ROWS:
                tl.store(rows_out + row, (g * first).to(rows_out.dtype.element_ty), mask=live)
        else:
            u = zero
            if BY_X:
                u = tl.load(ddx + e * ddx_edge + c, mask=live, other=0.0).to(FLOAT)
            if ON_ROWS:
                second = slope * (2 + h * (1 - 2 * s))
                total = (u * g * second).to(rows_out.dtype.element_ty)
                tl.store(rows_out + row, total, mask=live)
            if ON_DOUT:
                tl.store(ddout + row, (u * first).to(ddout.dtype.element_ty), mask=live)
    for l in tl.static_range(1, LMAX + 1):
        at = (l - 1) * C + c
        s = _sigmoid(tl.load(gates + e * gates_edge + at, mask=live, other=0.0).to(FLOAT))
        slope = s * (1 - s)
        v = zero
        if BY_GATES:
            v = tl.load(ddgates + e * ddgates_edge + at, mask=live, other=0.0).to(FLOAT) * slope
        pulled = zero
        pushed = zero
        for k in tl.static_range(2 * (l if l < MMAX else MMAX) + 1):
            r = ROWS[l * (2 * MMAX + 1) + k] * C
            h = tl.load(x + e * x_edge + r + c, mask=live, other=0.0).to(FLOAT)
            if ORDER == 0:
                made = made + (h * s,)
                tl.store(rows_out + row + r, (h * s).to(rows_out.dtype.element_ty), mask=live)
            else:
                g = tl.load(dout + e * dout_edge + r + c, mask=live, other=0.0).to(FLOAT)
                pulled += h * g
                if ORDER == 1:
                    made = made + (g * s,)
                    if ON_ROWS:
                        value = (g * s).to(rows_out.dtype.element_ty)
                        tl.store(rows_out + row + r, value, mask=live)
                else:
                    u = zero
                    if BY_X:
                        u = tl.load(ddx + e * ddx_edge + r + c, mask=live, other=0.0).to(FLOAT)
                    pushed += u * g
                    if ON_ROWS:
                        value = (v * g).to(rows_out.dtype.element_ty)
                        tl.store(rows_out + row + r, value, mask=live)
                    if ON_DOUT:
                        value = (u * s + v * h).to(ddout.dtype.element_ty)
                        tl.store(ddout + row + r, value, mask=live)
        if ON_GATES:
            if ORDER == 1:
                total = slope * pulled
            else:
                total = slope * pushed + v * (1 - 2 * s) * pulled
            made_gates = made_gates + (total,)
            place = gates_out + e * (LMAX * C) + at
            tl.store(place, total.to(gates_out.dtype.element_ty), mask=live)
    if halves is not None:
        values = ()
        for k in tl.static_range(M):
            values = values + (made[k][None, :],)
        if ON_GATES:
            for k in tl.static_range(LMAX):
                values = values + (made_gates[k][None, :],)
        own = e + tl.zeros([1], tl.int64)
        write_orders(
            values, halves, scales, own, edges, c[None, :], live[None, :], PLACES, STARTS, C
        )


_launch_scale = Launcher(_scale, _WARPS)
_launch_real = Launcher(_real, _WARPS)
_launch_gate = Launcher(_gate, 1)


@functools.cache
def _launch_unscale(aligned: bool, warps: int) -> Launcher:
    names = ("dscaled", "x", "radial", "dx", "dradial") if aligned else ()
    return Launcher(kernel_of_any_size(_unscale, ("halves", *names)), warps)


def _flat(array: Any) -> Any:
    """Return (E, M, C) as (E, M C)."""
    array = rows_of(array)
    return array.view(array.shape[0], array.shape[1] * array.shape[2])


def _float(*arrays: Any) -> Any:
    return tl.float64 if promoted(arrays) == torch.float64 else tl.float32


def _block_of(weight: Any) -> Any:
    """Return [[R, -I], [I, R]] of a weight, R above I."""
    rows, width = weight.shape

    def make(into: Any) -> Any:
        out = weight.new_empty(rows, 2 * width) if into is None else into
        integers = out.numel(), rows // 2, width, *weight.stride()
        programs = -(-out.numel() // _NUMBERS)
        _launch(_launch_real, programs, 1, (weight, out), integers, _NUMBERS)
        return out

    return formed(weight, "complex", make)


def _launch(
    launch: Launcher, edges: int, blocks: int, arrays: Any, integers: Any, *constants: Any
) -> None:
    if edges and blocks:
        key = (
            arrays[0].device,
            *[a if a is None else a.dtype for a in arrays],
            wide(*integers),
            *constants,
        )
        launch(edges * blocks, key, *arrays, *integers, *constants)


class _Call:
    """A call's arguments as rows of edges, and where orders lie in them."""

    def __init__(self, a: Any) -> None:
        self.message, (_, self.M, self.C) = a.message, a.message.shape
        self.lmax, self.weights = a.lmax, weights_of(a)
        self.mmax = len(self.weights) - 1
        self.D = (self.weights[0].shape[0] - a.gate_channels) // (self.lmax + 1)
        self.radial = rows_of(a.radial)
        found = orders(self.lmax, self.mmax)
        self.inputs = [columns(rows, self.C) for rows, _ in found]
        self.outputs = [columns(rows, self.D) for rows, _ in found]

    @functools.cached_property
    def scaled(self) -> Any:
        """The messages times radial functions."""
        out = torch.empty_like(self.message, memory_format=torch.contiguous_format)
        scale_messages(self.message, self.radial, out, self.lmax, self.mmax)
        return _flat(out)

    def parts(self, summed: bool) -> list[Factor]:
        """Return the messages of every order, times radial functions."""
        x = _flat(self.message)
        if self.radial is None:
            halves = self._written(self.inputs, summed, self.message)
            pairs = zip(self.inputs, halves, strict=True)
            return [Factor(x[:, own], summed=summed, halves=of) for own, of in pairs]
        return [
            Factor(
                x[:, own],
                functions=self.radial[:, columns(functions, self.C)],
                made=lambda own=own: self.scaled[:, own],  # type: ignore[misc]
                summed=summed,
            )
            for own, (_, functions) in zip(self.inputs, orders(self.lmax, self.mmax), strict=True)
        ]

    def results(self, dout: Any, dgates: Any, summed: bool) -> list[Factor]:
        """Return the cotangents of every order's results, and of the gates before the first."""
        halves = self._written(self.outputs, summed, dout, *[] if dgates is None else [dgates])
        dout = _flat(dout)
        first, *others = [dout[:, own] for own in self.outputs]
        made = None if dgates is None else lambda: torch.cat([dgates, first], 1)
        found = Factor(first, dgates, made=made, summed=summed, halves=halves[0])
        pairs = zip(others, halves[1:], strict=True)
        return [found, *[Factor(part, summed=summed, halves=of) for part, of in pairs]]

    @staticmethod
    def _written(orders: list[slice], summed: bool, *arrays: Any) -> list[Any]:
        """Return every order's halves with scales for rows, where a kernel has written them."""
        return (not summed and kept_orders(*arrays)) or [None] * len(orders)


def scale_messages(message: Any, radial: Any, out: Any, lmax: int, mmax: int) -> None:
    """Fill `out` with messages (E, M, C) times radial functions."""
    x, radial = _flat(message), rows_of(radial)
    blocks = -(-x.shape[1] // _NUMBERS)
    integers = blocks, x.stride(0), radial.stride(0)
    constants = message.shape[2], lmax, mmax, message.shape[1], _NUMBERS, _float(x, radial)
    _launch(_launch_scale, x.shape[0], blocks, (x, radial, out), integers, *constants)


def unscale_messages(
    dscaled: Any,
    message: Any,
    radial: Any,
    dmessage: Any,
    dradial: Any,
    lmax: int,
    mmax: int,
    kept: tuple[Any, Any] = (None, None),
) -> None:
    """Fill the cotangents of messages and radial functions, where they aren't None.

    The memory of `dscaled` may get the cotangent of messages. Halves of scaled messages, and their
    scales, are written where these are `kept`.
    """
    needed = dradial is not None or kept[0] is not None
    x = _flat(message) if needed else dscaled.flatten(1)
    radial, (_, M, C) = rows_of(radial), message.shape
    edges, (BE, BC), warps = len(x), BLOCK, 16
    if kept[0] is None:
        BE, warps = _EDGES, _WARPS
    blocks = sum([-(-(lmax + 1 - m) * C // BC) for m in range(mmax + 1)])
    arrays = dscaled, x, radial, dmessage, dradial, *kept
    lo = 0 if kept[0] is None else kept[0].stride(0)
    integers = edges, x.stride(0), radial.stride(0), lo
    # Orders begin at multiples of C.
    aligned = C % 8 == 0 and in_vectors(*[a.flatten(1)[None] for a in arrays[:5] if a is not None])
    functions = orders(lmax, mmax)[-1][1].stop
    constants = C, lmax, mmax, M, functions, BE, BC, _float(dscaled, x, radial), aligned
    programs = -(-edges // BE) * blocks
    _launch(_launch_unscale(aligned, warps), programs, 1, arrays, integers, *constants)


@register("so2_convolution", "triton")
@in_one_dtype
def so2_convolution(a: Any, y: Any) -> None:
    call, G, bias, precision = _Call(a), a.gate_channels, a.bias, a.precision
    first, *others = call.parts(summed=False)
    shifts = (None, None) if bias is None else (bias[:G], bias[G:])
    if y.gates is not None:
        multiply(y.gates, first, a.weight_m0[:G].T, precision, shifts[0])
    if y.out is None:
        return
    out = y.out.view(y.out.shape[0], call.M * call.D)
    results = [out[:, own] for own in call.outputs]
    multiply(results[0], first, a.weight_m0[G:].T, precision, shifts[1])
    for to, part, weight in zip(results[1:], others, call.weights[1:], strict=True):
        multiply(to, part, _block_of(weight).T, precision)


@register("so2_convolution_vjp", "triton")
@in_one_dtype
def so2_convolution_vjp(a: Any, y: Any) -> None:
    call, precision = _Call(a), a.precision
    dweights = y[1 : 1 + len(call.weights)]
    weighing = any([dweight is not None for dweight in dweights])
    results = call.results(a.dout, a.dgates, weighing)
    # Messages that no cotangent depends on have no memory of their own: rows would be copied.
    parts = call.parts(summed=True) if weighing else []
    if y.dmessage is not None or y.dradial is not None:
        shape = len(a.dout), call.M * call.C
        if y.dmessage is None:
            dparts = torch.empty(shape, dtype=a.dout.dtype, device=a.dout.device)
        else:
            dparts = y.dmessage.view(shape)
        first, *others = [dparts[:, own] for own in call.inputs]
        if weighing:
            for result, part, dweight in zip(results, parts, dweights, strict=True):
                if dweight is not None:
                    split_for_both(result, part.shape[1], precision)
        multiply(first, results[0], a.weight_m0, precision)
        for to, result, weight in zip(others, results[1:], call.weights[1:], strict=True):
            multiply(to, result, _block_of(weight), precision)
        if call.radial is not None:
            kept = _kept(call, results, parts, precision) if weighing else (None, None)
            given = dparts, a.message, call.radial, y.dmessage, y.dradial, call.lmax, call.mmax
            unscale_messages(*given, kept)
    if weighing:
        _pull_to_weights(results, parts, precision, dweights)
    if y.dbias is not None:
        results[0].sum(y.dbias)


def _kept(
    call: _Call, results: list[Factor], parts: list[Factor], precision: str
) -> tuple[Any, Any]:
    """Return memory for halves of the scaled messages, and their scales, which parts then have.

    There is none where blocks of channels don't begin with orders, or halves don't serve all.
    """
    pairs = zip(results, parts, strict=True)
    if call.C % BLOCK[1] or not all([sums_halves(*pair, precision) for pair in pairs]):
        return None, None
    edges, x = len(call.message), _flat(call.message)
    halves = x.new_empty(2, 1, *x.shape, dtype=torch.float16)
    scales = x.new_empty(1, -(-edges // BLOCK[0]), x.shape[1] // BLOCK[1])
    for part, own in zip(parts, call.inputs, strict=True):
        some = slice(own.start // BLOCK[1], own.stop // BLOCK[1])
        part.keep(halves[..., own], scales[..., some])
    return halves, scales


def _pull_to_weights(
    results: list[Factor], parts: list[Factor], precision: str, dweights: Any
) -> None:
    """Fill the cotangents of weights."""
    if dweights[0] is not None:
        dweights[0].copy_(sum_over_rows(results[0], parts[0], precision))
    for dweight, result, part in zip(dweights[1:], results[1:], parts[1:], strict=True):
        if dweight is None:
            continue
        both = sum_over_rows(result, part, precision)
        n, k = both.shape[0] // 2, both.shape[1] // 2
        torch.add(both[:n, :k], both[n:, k:], out=dweight[:n])
        torch.sub(both[n:, :k], both[:n, k:], out=dweight[n:])


@functools.lru_cache(maxsize=64)
def _table(lmax: int, mmax: int, layout: str) -> tuple[int, ...]:
    """Return the rows of every degree, filled up to the largest number of rows of one."""
    found: list[int] = []
    for rows in rows_by_degree(lmax, mmax, layout):
        found += [*rows.tolist(), *[0] * (2 * mmax + 1 - len(rows))]
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _places(lmax: int, mmax: int, gated: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the places of each order's rows among those of degrees, and where orders begin.

    Gates follow all rows of degrees, and come first in the matrix of order 0.
    """
    place = np.argsort(np.concatenate(rows_by_degree(lmax, mmax, "m")))
    found, starts = [len(place) + l for l in range(lmax) if gated], [0]
    for own, _ in orders(lmax, mmax):
        found += place[own].tolist()
        starts.append(len(found))
    return tuple(found), tuple(starts)


def _gated(a: Any, given: tuple[Any, ...], made: tuple[Any, ...], order: int) -> None:
    """Launch the kernel; `given` are dout, ddgates and ddx, `made` dx, ddout and dgates."""
    gates, x = rows_of(a.gates), rows_of(a.x)
    E, M, C = x.shape
    given = tuple([rows_of(array) for array in given])
    # Any tensor stands for a tensor that isn't touched.
    read = gates, x, *[x if array is None else array for array in given]
    written = [x if array is None else array for array in made]
    size = min(_CHANNELS, power(C))
    blocks = -(-C // size)
    both = [array for array in (made[0], made[2]) if array is not None]
    own = Orders()
    kind = _float(gates, x, *[array for array in given if array is not None])
    # A program has whole rows, and the convolution before a gate has cotangents of both.
    serves = a.layout == "m" and blocks == 1 and kind == tl.float32
    if serves and order < 2 and len(both) == order + 1:
        own = orders_to_keep(both[0], _places(a.lmax, a.mmax, order == 1), C)
    integers = blocks, E, *[array.stride(0) for array in read]
    constants = (
        C, a.lmax, a.mmax, M, _table(a.lmax, a.mmax, a.layout), size, kind, order,
        given[1] is not None, given[2] is not None, *[array is not None for array in made],
        *own.layout,
    )  # fmt: skip
    _launch(_launch_gate, E, blocks, (*read, *written, *own[:2]), integers, *constants)
    own.note(*both)


@register("gate_activation", "triton")
def gate_activation(a: Any, y: Any) -> None:
    _gated(a, (None, None, None), (y.out, None, None), 0)


@register("gate_activation_vjp", "triton")
def gate_activation_vjp(a: Any, y: Any) -> None:
    _gated(a, (a.dout, None, None), (y.dx, None, y.dgates), 1)


@register("gate_activation_vjp_vjp", "triton")
def gate_activation_vjp_vjp(a: Any, y: Any) -> None:
    _gated(a, (a.dout, a.ddgates, a.ddx), (y.dx, y.ddout, y.dgates), 2)
