"""Convolutions with generated kernels on the GPU: a linear layer's tiles become taps in registers.

The forward multiplies a tile of tokens by the weight's rows of some channels, all taps at once, and
splits the sum by tap; each part meets the inputs that its tap reads. The backward makes the taps
again, and writes the cotangents of x and, for a part of the tokens at a time, of the kernels, which
products of matrices then pull to the linear layer. For x it shifts sums along the tile's tokens,
tap by tap, and tiles overlap by W - 1 tokens. On Hopper the kernels of hopper.py make the taps of
many tokens, in 16 bits.

Products, of 2 B T D W H operations: one forward, three backward. Bytes: x, hidden and the cotangent
in and their gradients out; the kernels' cotangents out, and in twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedops._frame.check import promoted
from fusedops._frame.registry import register
from fusedops.conv.op import conv_vjp
from fusedops.generated.op import convolution_of, kernels_of, pull_to_generator
from gpukern.activations import silu, silu_slope
from gpukern.conv import triton as conv
from gpukern.launch import Launcher, begin_vectors, kernel_of_any_size, power, processors, wide
from gpukern.precision import of_float32
from gpukern.products import Factor, multiply, sum_over_rows
from gpukern.trimul import plan
from gpukern.trimul.plan import aligned, ceil, is_aligned

hopper: Any = None
if plan.hopper is not None:
    from gpukern.generated import hopper


class Tile(NamedTuple):
    """Rows and columns of a program, the terms that it adds at once, its warps and stages."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


#: By the bytes of a number. Columns are taps times channels.
TILES = {
    2: {
        "forward": Tile(128, 128, 64, 8, 3),
        "inputs": Tile(64, 128, 64, 4, 3),
    },
    4: {
        "forward": Tile(64, 64, 32, 4, 2),
        "inputs": Tile(64, 64, 32, 4, 2),
    },
}
# The most taps of kernels that stay in registers; wider kernels are stored.
_WIDTH = 16
# Rows and terms of a program that orders the weight or its cotangent.
_ROWS = Tile(32, 0, 64, 4, 1)
# Warps of the kernel for states.
_WARPS = 4
# One part of the kernels' cotangents is stored at a time: the most parts, and the fewest numbers of
# a part.
_PARTS, _FEW = 2, 1 << 25
# The fewest tokens that repay a reordered weight, which the kernels for Hopper need.
_MANY = 4096


@triton.jit
def _sequence_of(t, starts, sequences, length, tokens, LEVELS: tl.constexpr):
    """Return the sequence of every token, and where it begins and ends.

    Packed sequences are found in LEVELS halvings of their list.
    """
    if LEVELS > 0:
        low = t * 0
        high = low + sequences
        for _level in tl.static_range(LEVELS):
            middle = (low + high) // 2
            after = tl.load(starts + middle) > t
            high = tl.where(after, middle, high)
            low = tl.where(after, low, middle)
        # Clamped, so that no bad number reaches outside of the arrays.
        begin = tl.minimum(tl.maximum(tl.load(starts + low), 0), tokens)
        end = tl.minimum(tl.maximum(tl.load(starts + low + 1), begin), tokens)
        return low, begin, end
    else:
        sequence = t // length
        return sequence, sequence * length, (sequence + 1) * length


@triton.jit
def _read(
    x, state, t, live, begin, sequence, d, w, W: tl.constexpr, D: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Load the inputs that tap w of tokens reads; inputs before a sequence come from its state."""
    p = t + (w - W + 1)
    inside = (d < D)[None, :]
    own = (live & (p >= begin))[:, None] & inside
    value = tl.load(x + p[:, None] * D + d[None, :], mask=own, other=0.0).to(tl.float32)
    if HAS_STATE:
        past = (live & (p < begin))[:, None] & inside
        at = (sequence[:, None] * D + d[None, :]) * W + (W + p - begin)[:, None]
        value = tl.where(own, value, tl.load(state + at, mask=past, other=0.0).to(tl.float32))
    return value


@triton.jit
def _split(acc, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr):
    """Return the columns of every tap."""
    parts = (acc,)
    LEVELS: tl.constexpr = TAPS.bit_length() - 1
    for level in tl.static_range(LEVELS):
        halves = ()
        for i in tl.static_range(1 << level):
            pair = tl.reshape(parts[i], (ROWS, 2, (CHANNELS * TAPS) >> (level + 1)))
            one, two = tl.split(tl.permute(pair, (0, 2, 1)))
            halves = halves + (one, two)
        parts = halves
    return parts


@triton.jit
def _taps(
    hidden, weight, bias, t, live, d, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, TERMS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply hidden by the weight's rows of a block of channels, tap after tap."""
    column = tl.arange(0, CHANNELS * TAPS)
    tap, channel = column // CHANNELS, d + column % CHANNELS
    real = (tap < W) & (channel < D)
    row = channel.to(tl.int64) * W + tap
    acc = tl.zeros([ROWS, CHANNELS * TAPS], tl.float32)
    for k in range(0, H, TERMS):
        h = k + tl.arange(0, TERMS)
        at = hidden + t[:, None] * H + h[None, :]
        a = tl.load(at, mask=live[:, None] & (h < H)[None, :], other=0.0)
        at = weight + row[:, None] * H + h[None, :]
        b = tl.load(at, mask=real[:, None] & (h < H)[None, :], other=0.0)
        acc = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)[None, :]
    return _split(acc, ROWS, CHANNELS, TAPS)


@triton.jit
def _read_all(
    x, state, t, live, begin, sequence, d, W: tl.constexpr, D: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Load the inputs that all taps of tokens read."""
    inputs = ()
    for w in tl.static_range(W):
        inputs = inputs + (_read(x, state, t, live, begin, sequence, d, w, W, D, HAS_STATE),)
    return inputs


@triton.jit
def _preactivation(
    taps, inputs, shift, d, W: tl.constexpr, D: tl.constexpr, HAS_SHIFT: tl.constexpr
):
    h = taps[0] * inputs[0]
    for w in tl.static_range(1, W):
        h += taps[w] * inputs[w]
    if HAS_SHIFT:
        h += tl.load(shift + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return h


def _forward_kernel(
    starts, x, hidden, weight, bias, state, shift, out,
    sequences, length, tokens, parts,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, TERMS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    SILU: tl.constexpr, LEVELS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    part = program % parts
    t = (program // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = t < tokens
    sequence, begin, _ = _sequence_of(t, starts, sequences, length, tokens, LEVELS)
    d = part * CHANNELS + tl.arange(0, CHANNELS)
    taps = _taps(
        hidden, weight, bias, t, live, part * CHANNELS, H, W, D, ROWS, CHANNELS, TAPS, TERMS,
        DOT, PRECISION, HAS_BIAS,
    )  # fmt: skip
    inputs = _read_all(x, state, t, live, begin, sequence, d, W, D, HAS_STATE)
    h = _preactivation(taps, inputs, shift, d, W, D, HAS_SHIFT)
    if SILU:
        h = silu(h)
    at = out + t[:, None] * D + d[None, :]
    tl.store(at, h.to(out.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


def _inputs_kernel(
    starts, x, hidden, weight, bias, state, shift, dout, dfinal, v_out, dkernels, sums, dx,
    sequences, length, tokens, parts, start, stop,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, TERMS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    SILU: tl.constexpr, LEVELS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_SHIFT: tl.constexpr, HAS_FINAL: tl.constexpr, WANT_V: tl.constexpr,
    WANT_KERNELS: tl.constexpr, WANT_SUMS: tl.constexpr, WANT_X: tl.constexpr,
):  # fmt: skip
    """Write v, the cotangent before the activation, and the cotangents of kernels and x.

    The kernels' and their sums over the program's tokens are laid out by tap, then channel, for the
    tokens from start to stop alone.
    """
    program = tl.program_id(0)
    part = program % parts
    row = tl.arange(0, ROWS)
    t = start + (program // parts).to(tl.int64) * (ROWS - W + 1) + row
    live = t < tokens
    own = (t < stop) & (row < ROWS - W + 1)
    sequence, begin, end = _sequence_of(t, starts, sequences, length, tokens, LEVELS)
    d = part * CHANNELS + tl.arange(0, CHANNELS)
    inside = (d < D)[None, :]
    taps = _taps(
        hidden, weight, bias, t, live, part * CHANNELS, H, W, D, ROWS, CHANNELS, TAPS, TERMS,
        DOT, PRECISION, HAS_BIAS,
    )  # fmt: skip
    at = t[:, None] * D + d[None, :]
    v = tl.load(dout + at, mask=live[:, None] & inside, other=0.0).to(tl.float32)
    if SILU or WANT_KERNELS:
        inputs = _read_all(x, state, t, live, begin, sequence, d, W, D, HAS_STATE)
    if SILU:
        h = _preactivation(taps, inputs, shift, d, W, D, HAS_SHIFT)
        v = tl.where(live[:, None], v * silu_slope(h), 0.0)
    if WANT_V:
        tl.store(v_out + at, v.to(v_out.dtype.element_ty), mask=own[:, None] & inside)
    if WANT_KERNELS:
        place = dkernels + (t - start)[:, None] * (W * D) + d[None, :]
        for w in tl.static_range(W):
            product = tl.where(own[:, None], v * inputs[w], 0.0)
            mask = own[:, None] & inside
            tl.store(place + w * D, product.to(dkernels.dtype.element_ty), mask=mask)
            if WANT_SUMS:
                to = sums + ((program // parts).to(tl.int64) * W + w) * D + d
                tl.store(to, tl.sum(product, 0), mask=d < D)
    if WANT_X:
        # Tap w of token t reads input t + w - W + 1: the sums move on by a token for each tap.
        after = tl.zeros([ROWS, CHANNELS], tl.int32) + tl.minimum(row + 1, ROWS - 1)[:, None]
        total = tl.zeros([ROWS, CHANNELS], tl.float32)
        for w in tl.static_range(W):
            reads = live & (t + (w - W + 1) >= begin)
            product = tl.where(reads[:, None], v * taps[w], 0.0)
            if w > 0:
                product += tl.gather(total, after, 0)
            total = product
        if HAS_FINAL:
            kept = t - end + W
            place = (sequence[:, None] * D + d[None, :]) * W + kept[:, None]
            mask = (own & (kept >= 0))[:, None] & inside
            total += tl.load(dfinal + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, total.to(dx.dtype.element_ty), mask=own[:, None] & inside)


def _final_kernel(
    starts, x, state, final, length, tokens, blocks,
    W: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Write the last W inputs of a sequence."""
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    d = (tl.program_id(0) % blocks) * SIZE + tl.arange(0, SIZE)
    inside = d < D
    begin = sequence * length
    end = begin + length
    if LEVELS > 0:
        begin = tl.minimum(tl.maximum(tl.load(starts + sequence), 0), tokens)
        end = tl.minimum(tl.maximum(tl.load(starts + sequence + 1), begin), tokens)
    row = (sequence * D + d) * W
    for w in tl.static_range(W):
        p = end - W + w
        value = tl.load(x + p * D + d, mask=inside & (p >= begin), other=0.0)
        value = value.to(final.dtype.element_ty)
        if HAS_STATE:
            before = inside & (p < begin)
            past = tl.load(state + row + (W + p - begin), mask=before, other=0.0)
            value = tl.where(p >= begin, value, past.to(final.dtype.element_ty))
        tl.store(final + row + w, value, mask=inside)


def _order_kernel(
    starts, weight, bias, packed, packed_bias, by_tap, rows,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TERMS: tl.constexpr,
    HAS_BIAS: tl.constexpr, WANT_PACKED: tl.constexpr, WANT_TAPS: tl.constexpr,
):  # fmt: skip
    """Write the weight's rows, and the bias, as the kernels for Hopper take them, and by tap."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    d, w = row // W, row % W
    # A block of 32 channels has its taps one after another; column 8 i + 2 j + k of a tap has
    # channel 8 j + 2 i + k.
    column = d % 8 // 2 * 8 + d % 32 // 8 * 2 + d % 2
    place = (d // 32 * W + w) * 32 + column
    for k in range(0, H, TERMS):
        h = k + tl.arange(0, TERMS)
        mask = live[:, None] & (h < H)[None, :]
        value = tl.load(weight + row[:, None] * H + h[None, :], mask=mask)
        if WANT_PACKED:
            at = packed + place[:, None] * H + h[None, :]
            tl.store(at, value.to(packed.dtype.element_ty), mask=mask)
        if WANT_TAPS:
            at = by_tap + (w * D + d)[:, None] * H + h[None, :]
            tl.store(at, value.to(by_tap.dtype.element_ty), mask=mask)
    if HAS_BIAS and WANT_PACKED:
        tl.store(packed_bias + place, tl.load(bias + row, mask=live), mask=live)


def _gather_kernel(
    starts, products, sums, dweight, dbias, rows, parts,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TERMS: tl.constexpr,
    WANT_WEIGHT: tl.constexpr, WANT_BIAS: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of weight and bias from sums by tap, then channel."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    place = row % W * D + row // W
    if WANT_WEIGHT:
        for k in range(0, H, TERMS):
            h = k + tl.arange(0, TERMS)
            mask = live[:, None] & (h < H)[None, :]
            value = tl.load(products + place[:, None] * H + h[None, :], mask=mask)
            at = dweight + row[:, None] * H + h[None, :]
            tl.store(at, value.to(dweight.dtype.element_ty), mask=mask)
    if WANT_BIAS:
        total = tl.zeros([TERMS, ROWS], tl.float32)
        first = parts * 0
        while first < parts:
            part = first + tl.arange(0, TERMS)
            at = sums + part.to(tl.int64)[:, None] * rows + place[None, :]
            total += tl.load(at, mask=(part < parts)[:, None] & live[None, :], other=0.0)
            first += TERMS
        tl.store(dbias + row, tl.sum(total, 0).to(dbias.dtype.element_ty), mask=live)


_KERNELS = {
    "order": (_order_kernel, ("weight", "packed", "by_tap")),
    "gather": (_gather_kernel, ("products", "sums", "dweight")),
    "forward": (_forward_kernel, ("x", "hidden", "weight", "out")),
    "inputs": (
        _inputs_kernel,
        ("x", "hidden", "weight", "dout", "v_out", "dkernels", "sums", "dx"),
    ),
    "final": (_final_kernel, ()),
}
# Where vectors are loaded, rows have a multiple of so many numbers.
_UNIT = 8


@functools.cache
def _hopper_launcher(kernel: Any) -> Launcher:
    function = kernel_of_any_size(kernel, hopper.POINTERS[kernel], hopper.gluon.jit)
    return Launcher(function, hopper.WARPS.value)


@functools.cache
def _launcher(name: str, aligned: bool, warps: int, stages: int | None) -> Launcher:
    function, vectors = _KERNELS[name]
    kernel = kernel_of_any_size(function, vectors if aligned else ())
    return Launcher(kernel, warps, stages=stages)


class _Call:
    """A call's arrays as contiguous rows of tokens, and the sizes that its kernels share."""

    def __init__(self, a: Any) -> None:
        B, T, self.D = a.x.shape
        self.tokens, self.H, self.W = B * T, a.hidden.shape[2], a.weight.shape[0] // self.D
        self.x, self.hidden, self.weight = (
            array.contiguous() for array in (a.x, a.hidden, a.weight)
        )
        self.bias, self.state, self.shift = (
            None if array is None else array.contiguous()
            for array in (a.bias, a.initial_state, a.conv_bias)
        )
        self.dot = promoted((a.hidden, a.weight))
        self.silu, self.levels = a.activation == "silu", 0
        self.starts, self.count = self.x, B
        if a.sequences is not None:
            self.starts = a.sequences.tensors_here().cu_seqlens
            self.count = min(self.starts.numel() - 1, a.sequences.num_sequences)
            # A constant of the kernel: a multiple of four is seldom a new one.
            self.levels = 4 * ceil(max(self.count, 1).bit_length(), 4)
        self.length = T

    def flags(self, *optional: Any) -> tuple[bool, ...]:
        return tuple([array is not None for array in optional])

    def products(self) -> tuple[Any, ...]:
        """Return the type and precision of products."""
        types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        precision = of_float32(self.x.device) if self.dot == torch.float32 else "ieee"
        # The interpreter multiplies the bits of bfloat16.
        return types.get(self.dot, tl.float32) if self.x.is_cuda else tl.float32, precision

    def tile(self, name: str) -> Tile:
        tile = TILES[self.dot.itemsize][name]
        return tile._replace(terms=min(tile.terms, power(self.H, 16)))

    def launch(
        self,
        name: str,
        tile: Tile | None,
        programs: int,
        arrays: Sequence[Any],
        integers: Sequence[int],
        *constants: Any,
    ) -> None:
        """Launch a kernel; any tensor stands for one that it doesn't touch."""
        given = [self.starts, *[self.x if array is None else array for array in arrays]]
        aligned = not (self.D % _UNIT or self.H % _UNIT) and begin_vectors(given)
        warps, stages = (_WARPS, None) if tile is None else (tile.warps, tile.stages)
        key = self.x.device, *[array.dtype for array in given], wide(*integers), *constants
        _launcher(name, aligned, warps, stages)(programs, key, *given, *integers, *constants)

    def on_hopper(self, *optional: Any) -> bool:
        """Return whether the kernels for Hopper serve, which don't know the optional arrays."""
        given = *optional, self.state
        return (
            plan.is_hopper(self.x.device)
            and self.W == hopper.TAPS.value
            and self.dot.itemsize == self.x.dtype.itemsize == 2
            and self.tokens >= _MANY
            and not (self.levels or any([array is not None for array in given]))
            and not (self.D % hopper.CHANNELS.value or self.H % _UNIT)
            and self.H > 0
            and hopper.slots(hopper.inputs, self.H) > 2
        )

    def order(self, packed: bool, by_tap: bool) -> None:
        """Order the weight as kernels for Hopper take it, or by tap, then channel."""
        rows = self.weight.shape[0]
        self.packed = torch.empty_like(self.weight, dtype=self.dot) if packed else None
        self.by_tap = torch.empty_like(self.weight, dtype=self.dot) if by_tap else None
        self.packed_bias = None
        if packed and self.bias is not None:
            self.packed_bias = torch.empty_like(self.bias)
        made = self.packed, self.packed_bias, self.by_tap
        self.launch(
            "order", _ROWS, ceil(rows, _ROWS.rows), (self.weight, self.bias, *made), (rows,),
            self.H, self.W, self.D, _ROWS.rows, _ROWS.terms, self.bias is not None, packed, by_tap,
        )  # fmt: skip

    def gather(self, products: Any, sums: Any, dweight: Any, dbias: Any) -> None:
        """Fill the cotangents of weight and bias from sums by tap, then channel."""
        rows = self.weight.shape[0]
        self.launch(
            "gather", _ROWS, ceil(rows, _ROWS.rows), (products, sums, dweight, dbias),
            (rows, 0 if sums is None else len(sums)),
            self.H, self.W, self.D, _ROWS.rows, _ROWS.terms, *self.flags(dweight, dbias),
        )  # fmt: skip

    def split(self, kernel: Any, tokens: int) -> tuple[int, int]:
        """Return the chunks and steps in which a kernel for Hopper goes through some tokens."""
        blocks = self.D // hopper.CHANNELS.value
        return hopper.split(kernel, tokens, blocks, processors(self.x.device))

    def launch_on_hopper(self, kernel: Any, arrays: Sequence[Any], *part: int) -> None:
        """Launch a kernel for Hopper on all tokens, or on a part of them."""
        weight = hopper.described(self.packed, hopper.COLUMNS.value)
        hidden = aligned(self.hidden.to(self.dot).view(self.tokens, self.H))
        shift = None if self.shift is None else aligned(self.shift)
        arrays = self.packed_bias, shift, *[aligned(array) for array in arrays]
        start, stop = part or (0, self.tokens)
        chunks, steps = self.split(kernel, stop - start)
        integers = self.length, self.tokens, *part, chunks, steps
        constants = self.H, self.D, self.silu, hopper.slots(kernel, self.H)
        kinds = [None if array is None else array.dtype for array in arrays]
        key = self.x.device, self.x.dtype, self.dot, *kinds, wide(*integers), *constants
        programs = min(processors(self.x.device), chunks * self.D // hopper.CHANNELS.value)
        _hopper_launcher(kernel)(
            programs, key, aligned(self.x), hopper.described(hidden, hopper.STEP.value), weight,
            *arrays, *integers, *constants,
        )  # fmt: skip

    def sums_of(self, tokens: int, on_hopper: bool) -> int:
        """Return how many sums of kernels' cotangents the programs for some tokens make."""
        if on_hopper:
            chunks, _ = self.split(hopper.inputs, tokens)
            return chunks * hopper.CONSUMERS[hopper.inputs] * hopper.WARPS.value
        return ceil(tokens, self.tile("inputs").rows - self.W + 1)

    def sizes(self, parts: int) -> tuple[int, ...]:
        return self.count, self.length, self.tokens, parts

    def over_taps(
        self, name: str, arrays: Sequence[Any], *flags: bool, part: tuple[int, ...] = ()
    ) -> None:
        """Launch a kernel that makes taps, on tiles of tokens and blocks of channels.

        With a part, a range of tokens, the tiles overlap by W - 1 tokens.
        """
        tile, taps = self.tile(name), power(self.W)
        channels = max(1, tile.columns // taps)
        parts, tiles = ceil(self.D, channels), ceil(self.tokens, tile.rows)
        if part:
            tiles = ceil(part[1] - part[0], tile.rows - self.W + 1)
        self.launch(
            name, tile, tiles * parts, arrays, (*self.sizes(parts), *part),
            self.H, self.W, self.D, tile.rows, channels, taps, tile.terms, *self.products(),
            self.silu, self.levels, *self.flags(self.bias, self.state, self.shift), *flags,
        )  # fmt: skip


def _is_stored(a: Any) -> bool:
    """Return whether a call's kernels are stored: of float64, and of many taps."""
    arrays = [array for array in a if isinstance(array, torch.Tensor)]
    return promoted(arrays) == torch.float64 or a.weight.shape[0] > _WIDTH * a.x.shape[2]


def _stored(a: Any) -> tuple[Any, Any]:
    """Return the call in the dtype of its generator, and the convolution's arguments."""
    generator = a.hidden, a.weight, a.bias
    dtype = promoted(generator)
    hidden, weight, bias = (None if array is None else array.to(dtype) for array in generator)
    cast = a._replace(hidden=hidden, weight=weight, bias=bias)
    return cast, convolution_of(a, kernels_of(cast))


@register("dynamic_conv_generated", "triton")
def dynamic_conv_generated(a: Any, y: Any) -> None:
    if _is_stored(a):
        conv.dynamic_conv(_stored(a)[1], y)
        return
    call = _Call(a)
    if y.out is not None and call.tokens and is_aligned(y.out) and call.on_hopper():
        call.order(True, False)
        call.launch_on_hopper(hopper.forward, (y.out,))
    elif y.out is not None and call.tokens:
        arrays = call.x, call.hidden, call.weight, call.bias, call.state, call.shift, y.out
        call.over_taps("forward", arrays)
    if y.final_state is not None and call.count:
        size = 32 * _WARPS
        blocks = ceil(call.D, size)
        call.launch(
            "final", None, call.count * blocks, (call.x, call.state, y.final_state),
            (call.length, call.tokens, blocks),
            call.W, call.D, size, call.levels, call.state is not None,
        )  # fmt: skip


@register("dynamic_conv_generated_vjp", "triton")
def dynamic_conv_generated_vjp(a: Any, y: Any) -> None:
    if _is_stored(a):
        _pull_stored(a, y)
        return
    call = _Call(a)
    if y.dinitial_state is not None:
        _pull_to_state(a, y.dinitial_state)
    sums = y.dweight, y.dbias, y.dconv_bias
    if not call.tokens:
        for made in sums:
            if made is not None:
                made.zero_()
        return
    v = dout = a.dout.contiguous()
    dfinal = None if a.dfinal_state is None else a.dfinal_state.contiguous()
    generator = call.x, call.hidden, call.weight, call.bias, call.state, call.shift
    dgenerator = any([made is not None for made in (y.dhidden, y.dweight, y.dbias)])
    if call.silu and y.dconv_bias is not None:
        v = torch.empty_like(dout)
    on_hopper = v is dout and call.on_hopper(dfinal) and (y.dx is None or is_aligned(y.dx))

    def pull(dkernels: Any, sums: Any, *part: int) -> None:
        if on_hopper:
            call.launch_on_hopper(hopper.inputs, (dout, dkernels, y.dx, sums), *part)
            return
        made = None if v is dout else v, dkernels, sums, y.dx
        flags = call.flags(dfinal, *made)
        call.over_taps("inputs", (*generator, dout, dfinal, *made), *flags, part=part)

    if on_hopper or dgenerator:
        call.order(on_hopper, dgenerator)
    if dgenerator:
        _pull_in_parts(call, y, pull, on_hopper)
    elif y.dx is not None or v is not dout:
        pull(None, None, 0, call.tokens)
    if y.dconv_bias is not None:
        y.dconv_bias.copy_(v.sum((0, 1), dtype=torch.float32))


def _pull_in_parts(call: _Call, y: Any, pull: Callable[..., None], on_hopper: bool) -> None:
    """Fill the cotangents of the generator from parts of the kernels' cotangents."""
    D, W, H, tokens = call.D, call.W, call.H, call.tokens
    each = max(_FEW // (D * W), ceil(tokens, _PARTS))
    each = ceil(tokens, ceil(tokens, max(each, 1)))
    starts = range(0, tokens, each)
    room = torch.empty((min(each, tokens), W * D), dtype=call.dot, device=call.x.device)
    hidden = call.hidden.to(call.dot).view(tokens, H)
    products = sums = None
    if y.dweight is not None:
        products = torch.empty((1, W * D, H), dtype=torch.float32, device=room.device)
    counts = [call.sums_of(min(each, tokens - start), on_hopper) for start in starts]
    if y.dbias is not None:
        sums = torch.empty((sum(counts), W * D), dtype=torch.float32, device=room.device)
    first = 0
    for start, count in zip(starts, counts, strict=True):
        stop = min(start + each, tokens)
        dkernels = room[: stop - start]
        pull(dkernels, None if sums is None else sums[first : first + count], start, stop)
        first += count
        factor = Factor(dkernels)
        if y.dhidden is not None:
            part = y.dhidden.view(tokens, H)[start:stop]
            made = part if part.dtype == call.dot else torch.empty_like(part, dtype=call.dot)
            multiply(made, factor, call.by_tap, "float32")
            if made is not part:
                part.copy_(made)
        if products is None:
            continue
        if call.dot.itemsize == 2 and dkernels.is_cuda:
            ends = dkernels.T[None], hidden[None, start:stop]
            torch.baddbmm(products, *ends, products.dtype, beta=min(start, 1), out=products)
            continue
        if call.dot == torch.float32:
            found = sum_over_rows(factor, Factor(hidden[start:stop]), "float32")
        else:
            found = dkernels.T.float() @ hidden[start:stop].float()
        torch.add(products, found, out=products) if start else products.copy_(found)
    if products is not None or sums is not None:
        call.gather(products, sums, y.dweight, y.dbias)


def _pull_stored(a: Any, y: Any) -> None:
    cast, given = _stored(a)
    dgenerator = y.dhidden, y.dweight, y.dbias
    dkernels = None
    if any([made is not None for made in dgenerator]):
        dkernels = torch.empty_like(given.kernels)
    made = conv_vjp.Outputs(y.dx, dkernels, y.dinitial_state, y.dconv_bias)
    conv.dynamic_conv_vjp(given, made)
    if dkernels is not None:
        for made, value in zip(dgenerator, pull_to_generator(cast, dkernels), strict=True):
            if made is not None:
                made.copy_(value)


def _pull_to_state(a: Any, dstate: Any) -> None:
    """Fill the cotangent of the initial state, which the first W - 1 tokens read."""
    x, W, T = a.x, dstate.shape[2], a.x.shape[1]
    n = min(T, W - 1)
    arrays = x, a.hidden, a.dout
    if a.sequences is None:
        first = [array[:, :n] for array in arrays]
    else:
        starts = a.sequences.tensors_here().cu_seqlens
        begin, lengths = starts[:-1], starts.diff()
        place = torch.arange(n, device=x.device)
        at = (begin[:, None] + place).clamp(max=max(T - 1, 0))
        # Past its end, a sequence has zeros.
        live = (place < lengths[:, None])[..., None]
        first = [array[0, at].where(live, 0) for array in arrays]
    short = a._replace(x=first[0], hidden=first[1], dout=first[2], dfinal_state=None)
    short = short._replace(sequences=None)
    conv.dynamic_conv_vjp(_stored(short)[1], conv_vjp.Outputs(None, None, dstate, None))
    if a.dfinal_state is None:
        return
    # Inputs of the state move on into the final state of a sequence of less than W tokens.
    if a.sequences is None:
        if T < W:
            dstate[..., T:] += a.dfinal_state[..., : W - T]
    else:
        kept = torch.arange(W, device=x.device) - lengths[:, None]
        at = kept.clamp(min=0)[:, None].expand_as(dstate)
        dstate += a.dfinal_state.gather(2, at).where((kept >= 0)[:, None], 0)
