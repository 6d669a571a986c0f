"""Products of float32 matrices on tensor cores, exact to float32.

A number x of float32 is split ahead of the product into two of float16: with a power of two s as
the scale of its row, hi = round(s x) and lo = round(2¹¹ (s x - hi)) have 22 binary digits of x
together. Of two such numbers' product, tensor cores add up hi hi', and hi lo' + lo hi' apart, in
float32; lo lo' is below float32's last digit (Ootomo and Yokota, arXiv 2203.03341).

The largest number of a row is scaled to 2¹⁴ to 2¹⁵, so that all digits of numbers down to 2⁻²⁸ of
it are kept, and 19 down to 2⁻³². A row with a smaller number, Inf, NaN, or an extreme exponent has
the upper and the lower bits of its numbers in the places of hi and lo; its tiles of the product are
sums of six products of bfloat16 (`gpukern.precision`). Tensor cores truncate sums, so that few
terms are summed there, and such sums are added in float32.

Rows of which products and sums over rows are made have one scale for each block: a product adds up
few terms at a time, so that the scale may change on the way.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedops._kept import formed, kept
from gpukern.launch import (
    Launcher,
    has_gluon,
    is_small,
    kernel_of_any_size,
    power,
    processors,
    wide,
)
from gpukern.precision import EMULATED, of_float32
from gpukern.tape import product

hopper: Any = None
if has_gluon():
    with contextlib.suppress(ImportError, AttributeError):
        from gpukern import hopper_products as hopper

# Rows, columns and terms of a program's tile, its warps and stages.
_TILE = 128, 128, 64, 8, 3
# The most terms that a program adds up, and the fewest.
_TERMS, _SHORT = 1 << 13, 1 << 7
#: The rows and columns that share a scale: as many as a product adds at once, and as many as a tile
#: of a sum over rows has.
BLOCK = 64, 128
#: The fewest terms of a product of halves. With fewer, float32's own error is below theirs.
LEAST = 64
# The least work of a product that repays splitting its matrices, in multiplications and additions,
# and the least for each number that is split; and the least work in graphs that keep weights'
# halves, whose launches cost the host nothing.
_WORK, _WORK_OF_ONE, _WORK_IN_GRAPHS = 1 << 32, 320, 1 << 29


class Halves(NamedTuple):
    """A batch of matrices split for a product.

    `halves` (2, batch, slow, fast) have hi and lo in the layout of the matrix, of which `fast` is
    the axis without gaps, 1 or 2. Among the matrices there, those with hi begin at `first`, and
    those with lo are `low` matrices behind. `scales` have the scales' reciprocals: (batch, n) for
    every row along the axis of the product's sums, or (1, rows, columns) for every `block`, of so
    many rows and columns. If `strict`, a reciprocal is zero where halves would lose digits, and hi
    and lo are bits of float32 there; else halves always serve. Without scales, the left factor of
    a product has none.
    """

    halves: Any
    scales: Any
    shape: tuple[int, int, int]
    fast: int
    low: int
    first: int = 0
    strict: bool = False
    block: tuple[int, int] | None = None

    def described(self, rows: int, terms: int, along: int) -> TensorDescriptor:
        """Return a descriptor of tiles for a product with sums along an axis."""
        block = self.block_of(rows, terms, along)
        return TensorDescriptor.from_tensor(self.halves.flatten(0, -3), block)

    def block_of(self, rows: int, terms: int, along: int) -> list[int]:
        """Return the shape of a tile in memory."""
        return [1, rows, terms] if self.fast == along else [1, terms, rows]

    def scaled(self, along: int) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Return steps from scale to scale, by batch, row and term, and the rows and terms of one.

        No terms stand for all.
        """
        if self.scales is None:
            return (0, 0, 0), (1, 0)
        if self.block is None:
            return (*self.scales.stride(), 0), (1, 0)
        (step, row, column), (rows, columns) = self.scales.stride(), self.block
        both = (step, row, column), (rows, columns)
        return both if along == 2 else ((step, column, row), (columns, rows))

    @property
    def mT(self) -> Halves:
        """The transposed matrices."""
        batches, rows, columns = self.shape
        found = self._replace(shape=(batches, columns, rows), fast=3 - self.fast)
        if self.block is None:
            return found
        return found._replace(scales=self.scales.mT, block=self.block[::-1])


def repay(device: Any, batches: int, M: int, N: int, K: int, ready: bool = False) -> bool:
    """Return whether a product of halves takes less time, also if halves aren't `ready`."""
    work = 2 * batches * M * N * K
    return K >= LEAST and _repays(device, work, 0 if ready else batches * (M + N) * K)


def _repays(device: Any, work: int, numbers: int) -> bool:
    """Return whether work by halves takes less time, splitting some numbers included."""
    least = _WORK if kept(device) is None else _WORK_IN_GRAPHS
    return not is_small(device) and work >= max(least, _WORK_OF_ONE * numbers)


@triton.jit
def strides(batch, row, column, UNIT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a matrix's strides, the row's one if UNIT is 0, the column's one if UNIT is 1."""
    if ALIGNED:
        # Knowing multiples of eight, the compiler reads vectors.
        batch, row, column = batch // 8 * 8, row // 8 * 8, column // 8 * 8
    if UNIT == 0:
        row = 1
    elif UNIT == 1:
        column = 1
    return batch, row, column


@triton.jit
def halves_of(x):
    """Return hi and lo of scaled numbers."""
    hi = x.to(tl.float16)
    return hi, ((x - hi.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def row_scaling(most):
    """Return scales for rows' largest magnitudes, and reciprocals, of any exponents.

    The reciprocal of an infinite or missing magnitude is NaN: the scale would flush all others.
    """
    bits = most.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.where(bits == 0, 141, tl.maximum(bits >> 23, 15))
    scale = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    back = tl.where(exponent == 255, 0x7FC00000, (exponent - 14) << 23)
    return scale, back.to(tl.float32, bitcast=True)


@triton.jit
def _serve(most, least):
    """Return whether halves hold rows, by the bits of their most and least that isn't zero."""
    exponent = most >> 23
    reach = exponent - (least >> 23)
    return (most == 0) | ((exponent >= 67) & (exponent <= 187) & (reach <= 32))


@triton.jit
def _bits(x):
    """Return the bits of magnitudes, which are ordered as these are."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _stored(x, scale, reciprocal, STRICT: tl.constexpr):
    """Return hi and lo of numbers; if STRICT, their bits where the scale's reciprocal is zero."""
    if STRICT:
        serves = reciprocal > 0
        hi, low = halves_of(tl.where(serves, x, 0.0) * scale)
        bits = x.to(tl.int32, bitcast=True)
        upper = (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        lower = bits.to(tl.int16).to(tl.float16, bitcast=True)
        return tl.where(serves, hi, upper), tl.where(serves, low, lower)
    else:
        return halves_of(x * scale)


@triton.jit
def _numbers(hi, low, reciprocal):
    """Return the numbers that `_stored` has kept."""
    upper = hi.to(tl.int16, bitcast=True).to(tl.int32) << 16
    bits = upper | (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    serves = reciprocal != 0
    high = tl.where(serves, hi, 0.0).to(tl.float32)
    whole = high + tl.where(serves, low, 0.0).to(tl.float32) * (1 / 2048)
    return tl.where(serves, whole * reciprocal, bits.to(tl.float32, bitcast=True))


@triton.jit
def _unless_zero(bits):
    """Return bits of magnitudes, and of infinity in place of zero."""
    return tl.where(bits == 0, 0x7F800000, bits)


@triton.jit
def write_block(x, halves, place, there, lo, to_scale):
    """Write the halves of a block at their places, and the reciprocal of its scale.

    A row or column of much smaller numbers than others would have fewer digits than float32: halves
    serve where the largest of each reaches the block's, less 24 binary digits. From 2⁻⁵⁵ on, two
    blocks' reciprocals and the 2⁻¹¹ of a low half have a product that isn't zero.
    """
    bits = _bits(x)
    by_row, by_column = tl.max(bits, 1), tl.max(bits, 0)
    largest = tl.max(by_row, 0)
    scale, reciprocal = row_scaling(largest.to(tl.float32, bitcast=True))
    least = tl.min(tl.min(_unless_zero(bits), 1), 0)
    least_line = tl.minimum(tl.min(_unless_zero(by_row), 0), tl.min(_unless_zero(by_column), 0))
    serves = _serve(largest, least) & ((largest >> 23) - (least_line >> 23) <= 24)
    serves &= (largest == 0) | (largest >> 23 >= 127 - 55)
    reciprocal = tl.where(serves, reciprocal, 0.0)
    tl.store(to_scale, reciprocal)
    hi, low = _stored(x, scale, reciprocal, True)
    tl.store(halves + place, hi, mask=there)
    tl.store(halves + place + lo, low, mask=there)


@triton.jit
def _write_order(
    values, halves, scales, r, rows, c, live,
    PLACES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the halves of a matrix's rows, and the scales' reciprocals."""
    most = tl.where(live, _bits(values[PLACES[FIRST]]), 0)
    least = _unless_zero(most)
    for k in tl.static_range(1, COUNT):
        bits = tl.where(live, _bits(values[PLACES[FIRST + k]]), 0)
        most = tl.maximum(most, bits)
        least = tl.minimum(least, _unless_zero(bits))
    largest = tl.max(most, 1)
    scale, reciprocal = row_scaling(largest.to(tl.float32, bitcast=True))
    reciprocal = tl.where(_serve(largest, tl.min(least, 1)), reciprocal, 0.0)
    tl.store(scales + r, reciprocal, mask=r < rows)
    place = halves + r[:, None] * (COUNT * C) + c
    for k in tl.static_range(COUNT):
        value = values[PLACES[FIRST + k]]
        hi, low = _stored(value, scale[:, None], reciprocal[:, None], True)
        tl.store(place + k * C, hi, mask=live)
        tl.store(place + (rows * (COUNT * C) + k * C), low, mask=live)


@triton.jit
def write_orders(
    values, halves, scales, r, rows, c, live,
    PLACES: tl.constexpr, STARTS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the halves of rows of several matrices, and the scales' reciprocals.

    `values[PLACES[k]]` has the k-th C columns of all matrices, one after the other, and matrix m
    begins at k = STARTS[m]. `r` are numbers of rows, and `c` of columns.
    """
    rows = rows.to(tl.int64)
    for m in tl.static_range(len(STARTS) - 1):
        _write_order(
            values, halves + 2 * rows * (STARTS[m] * C), scales + m * rows, r, rows, c, live,
            PLACES, STARTS[m], STARTS[m + 1] - STARTS[m], C,
        )  # fmt: skip


@triton.jit
def _block(at, at_before, step, r, rows, terms, ahead, x_term, BT: tl.constexpr):
    """Return a block of terms of rows, of which some may lie ahead, with zeros behind the last."""
    k = (step * BT + tl.arange(0, BT)).to(tl.int64)[None, :]
    inside = (r < rows)[:, None] & (k < terms)
    if at_before is None:
        return tl.load(at + k * x_term, mask=inside, other=0.0)
    else:
        first = tl.load(at_before + k, mask=inside & (k < ahead), other=0.0)
        rest = tl.load(at + (k - ahead) * x_term, mask=inside & (k >= ahead), other=0.0)
        return tl.where(k < ahead, first, rest)


def _split(
    x, before, halves, scales, rows, terms, ahead, x_batch, x_row, x_term, before_row, lo, pitch,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr, TERMS_FAST: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr, STEPS: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    """Write the halves of rows, and the scales' reciprocals.

    A row has `ahead` terms of `before`, and then x. If STRICT, rows whose halves lose digits have
    bits instead, and a reciprocal of zero. STEPS of BT terms are given where there is one, and to
    the interpreter, which can't turn a number into a range.
    """
    x_batch, x_row, x_term = strides(x_batch, x_row, x_term, UNIT, ALIGNED)
    if ALIGNED:
        rows, terms, ahead = rows // 8 * 8, terms // 8 * 8, ahead // 8 * 8
        before_row = before_row // 8 * 8
    # Lines of halves begin at multiples of eight, and end with zeros.
    pitch, lo = pitch // 8 * 8, lo.to(tl.int64) // 8 * 8
    blocks = tl.cdiv(rows, BR)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    r = (tl.program_id(0) % blocks * BR + tl.arange(0, BR)).to(tl.int64)
    at = x + batch * x_batch + r[:, None] * x_row
    at_before = before
    if before is not None:
        at_before = before + r[:, None] * before_row
    value = tl.zeros((BR, BT), tl.float32)
    most = tl.zeros((BR, BT), tl.int32)
    INFINITE: tl.constexpr = 0x7F800000
    least = most + INFINITE
    for step in range(tl.cdiv(terms, BT) if STEPS is None else STEPS):
        value = _block(at, at_before, step, r, rows, terms, ahead, x_term, BT)
        bits = _bits(value)
        most = tl.maximum(most, bits)
        least = tl.minimum(least, tl.where(bits == 0, INFINITE, bits))
    largest = tl.max(most, 1)
    scale, reciprocal = row_scaling(largest.to(tl.float32, bitcast=True))
    if STRICT:
        reciprocal = tl.where(_serve(largest, tl.min(least, 1)), reciprocal, 0.0)
    tl.store(scales + batch * rows + r, reciprocal, mask=r < rows)
    if TERMS_FAST:
        to = halves + (batch * rows + r[:, None]) * pitch
    else:
        to = halves + batch * terms * pitch + r[:, None]
    for step in range(tl.cdiv(terms, BT) if STEPS is None else STEPS):
        k = (step * BT + tl.arange(0, BT)).to(tl.int64)
        # A single block is still there.
        if STEPS != 1:
            value = _block(at, at_before, step, r, rows, terms, ahead, x_term, BT)
        hi, low = _stored(value, scale[:, None], reciprocal[:, None], STRICT)
        if TERMS_FAST:
            place = to + k[None, :]
            there = (r < rows)[:, None] & (k < pitch)[None, :]
        else:
            place = to + k[None, :] * pitch
            there = (r < pitch)[:, None] & (k < terms)[None, :]
        tl.store(place, hi, mask=there)
        tl.store(place + lo, low, mask=there)


def _split_blocks(
    x, before, functions, halves, scales, sums,
    rows, columns, width, ahead, x_row, before_row, functions_row, lo, pitch,
    ALIGNED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the halves of rows by blocks, and sums of each block's columns.

    A row has `ahead` numbers of `before`, and then x, times functions that repeat after `width`.
    """
    if ALIGNED:
        columns, width, ahead = columns // 8 * 8, width // 8 * 8, ahead // 8 * 8
        x_row, before_row = x_row // 8 * 8, before_row // 8 * 8
        functions_row = functions_row // 8 * 8
    pitch, lo = pitch // 8 * 8, lo.to(tl.int64) // 8 * 8
    across = tl.cdiv(columns, BC)
    along, block = tl.program_id(0) // across, tl.program_id(0) % across
    r = (along * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    c = (block * BC + tl.arange(0, BC))[None, :]
    inside = (r < rows) & (c < columns)
    if before is None:
        value = tl.load(x + r * x_row + c, mask=inside, other=0.0)
    else:
        first = tl.load(before + r * before_row + c, mask=inside & (c < ahead), other=0.0)
        value = tl.load(x + r * x_row + c - ahead, mask=inside & (c >= ahead), other=0.0)
        value = tl.where(c < ahead, first, value)
    if functions is not None:
        value *= tl.load(functions + r * functions_row + c % width, mask=inside, other=0.0)
    if sums is not None:
        own = block * BC + tl.arange(0, BC)
        tl.store(sums + along * columns + own, tl.sum(value, 0), mask=own < columns)
    place, there = r * pitch + c, (r < rows) & (c < pitch)
    write_block(value, halves, place, there, lo, scales + tl.program_id(0))


def _halve(x, halves, most, scales, size, lo, BLOCK: tl.constexpr):
    """Write the halves of matrices by a scale for each, and the scales' reciprocals."""
    size, lo = size // 8 * 8, lo.to(tl.int64) // 8 * 8
    blocks = tl.cdiv(size, BLOCK)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks
    scale, reciprocal = row_scaling(tl.load(most + batch).to(tl.float32, bitcast=True))
    if first == 0:
        tl.store(scales + batch, reciprocal)
    at = first * BLOCK + tl.arange(0, BLOCK)
    place = batch * size + at
    hi, low = halves_of(tl.load(x + place, mask=at < size, other=0.0) * scale)
    tl.store(halves + place, hi, mask=at < size)
    tl.store(halves + place + lo, low, mask=at < size)


@triton.jit
def _tile(halves, batch, n, k, R: tl.constexpr, BK: tl.constexpr, FAST: tl.constexpr):
    """Return halves of R rows, from the n-th on, and BK terms."""
    if FAST:
        return halves.load([batch, n, k]).reshape(R, BK)
    else:
        return halves.load([batch, k, n]).reshape(BK, R).T


@triton.jit
def _scale_of(
    scales, row, term, rows, terms, by_row, by_term, ROWS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Return the reciprocals of rows' scales for a term, and behind the last row or term ones."""
    at = scales + row // ROWS * by_row + term // TERMS * by_term
    return tl.load(at, mask=(row < rows) & (term < terms), other=1.0)


@triton.jit
def _row_scales(
    scales, row, rows, begin, K, terms, by_row, by_term,
    ROWS: tl.constexpr, TERMS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Return rows' reciprocals; of blocks, the least of K terms."""
    if scales is None:
        return tl.full(row.shape, 1.0, tl.float32)
    elif TERMS > 0:
        k = begin // TERMS * TERMS + tl.arange(0, MANY)[None, :] * TERMS
        end = tl.minimum(begin + K, terms)
        found = _scale_of(scales, row[:, None], k, rows, end, by_row, by_term, ROWS, TERMS)
        return tl.min(found, 1)
    else:
        return tl.load(scales + row * by_row, mask=row < rows, other=1.0)


@triton.jit
def _emulated(
    a_halves, b_halves, a_scales, b_scales, a_first, a_lo, b_first, b_lo, m_first, n_first,
    by_row, by_column, M, N, K, begin, terms, a_row, a_term, b_row, b_term,
    A_FAST: tl.constexpr, B_FAST: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, A_ROWS: tl.constexpr,
    A_TERMS: tl.constexpr, B_ROWS: tl.constexpr, B_TERMS: tl.constexpr,
):  # fmt: skip
    """Return a tile of the product of the numbers that halves or bits make."""
    total = tl.zeros((BM, BN), tl.float32)
    m = m_first + tl.arange(0, BM)[:, None]
    n = n_first + tl.arange(0, BN)[:, None]
    # Such tiles are few: stages would take shared memory from the parts of float32.
    for step in tl.range(0, tl.cdiv(K, BK) if STEPS is None else STEPS, num_stages=1):
        k = begin + step * BK
        of_a = by_row[:, None]
        of_b = by_column[:, None]
        if A_TERMS > 0:
            of_a = _scale_of(a_scales, m, k, M, terms, a_row, a_term, A_ROWS, A_TERMS)
        if B_TERMS > 0:
            of_b = _scale_of(b_scales, n, k, N, terms, b_row, b_term, B_ROWS, B_TERMS)
        a_high = _tile(a_halves, a_first, m_first, k, BM, BK, A_FAST)
        a_low = _tile(a_halves, a_first + a_lo, m_first, k, BM, BK, A_FAST)
        b_high = _tile(b_halves, b_first, n_first, k, BN, BK, B_FAST)
        b_low = _tile(b_halves, b_first + b_lo, n_first, k, BN, BK, B_FAST)
        left = _numbers(a_high, a_low, of_a)
        right = _numbers(b_high, b_low, of_b)
        total = tl.dot(left, right.T, total, PRECISION)
    return total


@triton.jit
def _write_tile(
    total, to, inside, n, N, batch, out, bias, most, ADD: tl.constexpr,
):  # fmt: skip
    """Write, or add, a tile of a product, and raise the bits of the largest magnitude."""
    if ADD:
        total += tl.load(to, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)
    if most is not None:
        largest = tl.max(tl.max(tl.where(inside, _bits(total), 0), 1), 0)
        tl.atomic_max(most + batch, largest, sem="relaxed")


@kernel_of_any_size
def _multiply(
    a_halves, b_halves, a_scales, b_scales, out, bias, most,
    M, N, K, terms, a_first, a_lo, b_first, b_lo, out_batch, out_row, out_column,
    a_scale_batch, a_scale_row, a_scale_term, b_scale_batch, b_scale_row, b_scale_term, factor,
    OUT_UNIT: tl.constexpr, ALIGNED: tl.constexpr, A_FAST: tl.constexpr, B_FAST: tl.constexpr,
    STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr, OTHERWISE: tl.constexpr,
    A_ROWS: tl.constexpr, A_TERMS: tl.constexpr, B_ROWS: tl.constexpr, B_TERMS: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """Write, or add, the products of split matrices, times a factor, plus a bias of columns.

    A_FAST and B_FAST tell whether the terms' axis is the one without gaps. A scale of A_ROWS rows
    serves A_TERMS terms, or all, and no more than MANY scales serve a program's terms. OTHERWISE is
    the precision of products where halves don't serve; they always do if it is None. If PARTS, the
    batch has parts of one product, of K terms each. `most` gets the bits of each product's largest
    magnitude, if they exceed what is there.
    """
    out_batch, out_row, out_column = strides(out_batch, out_row, out_column, OUT_UNIT, ALIGNED)
    if ALIGNED:
        M, N = M // 8 * 8, N // 8 * 8
    across, along = tl.cdiv(N, BN), tl.cdiv(M, BM)
    tile = tl.program_id(0) % (across * along)
    member = tl.program_id(0) // (across * along)
    batch = member.to(tl.int64)
    # Programs that run at once share rows and columns in the second-level cache.
    first = tile // (GROUP * across) * GROUP
    size = tl.minimum(along - first, GROUP)
    within = tile % (GROUP * across)
    m_first = (first + within % size) * BM
    n_first = within // size * BN
    m = (m_first + tl.arange(0, BM)).to(tl.int64)
    n = (n_first + tl.arange(0, BN)).to(tl.int64)
    begin = 0
    if PARTS:
        begin = member * K
    else:
        a_first += member
        b_first += member
    # A scale of many rows is one number for the tile.
    a_row = m[:, None] if A_ROWS < BM else m_first
    b_row = n[None, :] if B_ROWS < BN else n_first
    if a_scales is not None:
        a_scales += batch * a_scale_batch
    b_scales += batch * b_scale_batch
    by_row = _row_scales(
        a_scales, m, M, begin, K, terms, a_scale_row, a_scale_term, A_ROWS, A_TERMS, MANY
    )
    by_column = _row_scales(
        b_scales, n, N, begin, K, terms, b_scale_row, b_scale_term, B_ROWS, B_TERMS, MANY
    )
    total = tl.zeros((BM, BN), tl.float32)
    serves = True
    if OTHERWISE is not None:
        serves = (tl.min(by_row, 0) > 0) & (tl.min(by_column, 0) > 0)
    if serves:
        for step in range(tl.cdiv(K, BK) if STEPS is None else STEPS):
            k = begin + step * BK
            by = factor
            if A_TERMS > 0:
                by *= _scale_of(
                    a_scales, a_row, k, M, terms, a_scale_row, a_scale_term, A_ROWS, A_TERMS
                )
            if B_TERMS > 0:
                by *= _scale_of(
                    b_scales, b_row, k, N, terms, b_scale_row, b_scale_term, B_ROWS, B_TERMS
                )
            a_high = _tile(a_halves, a_first, m_first, k, BM, BK, A_FAST)
            b_high = _tile(b_halves, b_first, n_first, k, BN, BK, B_FAST)
            a_low = _tile(a_halves, a_first + a_lo, m_first, k, BM, BK, A_FAST)
            b_low = _tile(b_halves, b_first + b_lo, n_first, k, BN, BK, B_FAST)
            # Tensor cores truncate sums: without the factors, the compiler would have them add up.
            low = tl.dot(a_high, b_low.T)
            low = tl.dot(a_low, b_high.T, low)
            total += low * (by * (1 / 2048))
            total += tl.dot(a_high, b_high.T) * by
        if A_TERMS == 0:
            total *= by_row[:, None]
        if B_TERMS == 0:
            total *= by_column[None, :]
    else:
        if OTHERWISE is not None:
            total = factor * _emulated(
                a_halves, b_halves, a_scales, b_scales, a_first, a_lo, b_first, b_lo,
                m_first, n_first, by_row, by_column, M, N, K, begin, terms,
                a_scale_row, a_scale_term, b_scale_row, b_scale_term, A_FAST, B_FAST, STEPS,
                BM, BN, BK, OTHERWISE, A_ROWS, A_TERMS, B_ROWS, B_TERMS,
            )  # fmt: skip
    to = out + batch * out_batch + m[:, None] * out_row + n[None, :] * out_column
    inside = (m < M)[:, None] & (n < N)[None, :]
    _write_tile(total, to, inside, n, N, batch, out, bias, most, ADD)


def _multiply_rest(
    a_halves, b_halves, a_scales, b_scales, out, bias, most,
    M, N, K, terms, a_first, a_lo, b_first, b_lo, out_batch, out_row, out_column,
    a_scale_batch, a_scale_row, a_scale_term, b_scale_batch, b_scale_row, b_scale_term, factor,
    A_FAST: tl.constexpr, B_FAST: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
    OTHERWISE: tl.constexpr, A_ROWS: tl.constexpr, A_TERMS: tl.constexpr, B_ROWS: tl.constexpr,
    B_TERMS: tl.constexpr, MANY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write, or add, rows of tiles that halves don't serve, and tiles with such columns.

    A product has no more than COLUMNS. A program takes BM rows.
    """
    along = tl.cdiv(M, BM)
    member = tl.program_id(0) // along
    batch = member.to(tl.int64)
    m_first = tl.program_id(0) % along * BM
    m = (m_first + tl.arange(0, BM)).to(tl.int64)
    begin = 0
    if PARTS:
        begin = member * K
    else:
        a_first += member
        b_first += member
    if a_scales is not None:
        a_scales += batch * a_scale_batch
    b_scales += batch * b_scale_batch
    of_columns = _row_scales(
        b_scales, tl.arange(0, COLUMNS // B_ROWS) * B_ROWS, N, begin, K, terms,
        b_scale_row, b_scale_term, B_ROWS, B_TERMS, MANY,
    )  # fmt: skip
    of_rows = _row_scales(
        a_scales, m_first + tl.arange(0, BM // A_ROWS if A_ROWS < BM else 1) * A_ROWS, M, begin,
        K, terms, a_scale_row, a_scale_term, A_ROWS, A_TERMS, MANY,
    )  # fmt: skip
    least = tl.min(of_rows, 0)
    if (least <= 0) | (tl.min(of_columns, 0) <= 0):
        by_row = _row_scales(
            a_scales, m, M, begin, K, terms, a_scale_row, a_scale_term, A_ROWS, A_TERMS, MANY
        )
        for step in range(COLUMNS // BN if STEPS is not None else tl.cdiv(N, BN)):
            n_first = step * BN
            n = (n_first + tl.arange(0, BN)).to(tl.int64)
            by_column = _row_scales(
                b_scales, n, N, begin, K, terms, b_scale_row, b_scale_term, B_ROWS, B_TERMS, MANY
            )
            least_of_columns = tl.min(by_column, 0)
            if (least <= 0) | (least_of_columns <= 0):
                total = factor * _emulated(
                    a_halves, b_halves, a_scales, b_scales, a_first, a_lo, b_first, b_lo,
                    m_first, n_first, by_row, by_column, M, N, K, begin, terms,
                    a_scale_row, a_scale_term, b_scale_row, b_scale_term, A_FAST, B_FAST, STEPS,
                    BM, BN, BK, OTHERWISE, A_ROWS, A_TERMS, B_ROWS, B_TERMS,
                )  # fmt: skip
                to = out + batch * out_batch + m[:, None] * out_row + n[None, :] * out_column
                inside = (m < M)[:, None] & (n < N)[None, :]
                inside &= (tl.minimum(by_row, least_of_columns) <= 0)[:, None]
                _write_tile(total, to, inside, n, N, batch, out, bias, most, ADD)


def _repeat(
    row, out, rows, columns, out_row, R: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write a row into all rows of a matrix."""
    if ALIGNED:
        columns, out_row = columns // 8 * 8, out_row // 8 * 8
    blocks = tl.cdiv(columns, SIZE)
    r = (tl.program_id(0) // blocks * R + tl.arange(0, R)).to(tl.int64)[:, None]
    c = (tl.program_id(0) % blocks * SIZE + tl.arange(0, SIZE))[None, :]
    value = tl.load(row + c, mask=c < columns, other=0.0)
    there = (r < rows) & (c < columns)
    tl.store(out + r * out_row + c, tl.broadcast_to(value, (R, SIZE)), mask=there)


_launch_halve = Launcher(kernel_of_any_size(_halve, ("x", "halves")), 4)
_launch_rest = Launcher(kernel_of_any_size(_multiply_rest), 8)


@functools.cache
def _splitter(aligned: bool) -> Launcher:
    names = ("x", "before") if aligned else ()
    return Launcher(kernel_of_any_size(_split, ("halves", *names)), 8)


@functools.cache
def _block_splitter(aligned: bool) -> Launcher:
    names = ("x", "before", "functions") if aligned else ()
    return Launcher(kernel_of_any_size(_split_blocks, ("halves", *names)), 8)


@functools.cache
def _repeater(aligned: bool) -> Launcher:
    return Launcher(kernel_of_any_size(_repeat, ("row", "out") if aligned else ()), 4)


@functools.cache
def _launcher(aligned: bool, warps: int, stages: int) -> Launcher:
    names = ("out",) if aligned else ()
    return Launcher(kernel_of_any_size(_multiply.fn, names), warps, stages=stages)


@functools.cache
def _hopper_launcher(aligned: bool) -> Launcher:
    names = ("out",) if aligned else ()
    return Launcher(kernel_of_any_size(hopper.multiply, names, hopper.gluon.jit), 4)


@functools.cache
def _on_hopper(device: Any) -> bool:
    """Return whether a GPU has Hopper's kernels."""
    if hopper is None or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def unit_of(matrix: Any) -> int | None:
    """Return which axis of a batch of matrices is without gaps: 0 for rows, 1 for columns."""
    return next((axis for axis in (1, 0) if matrix.stride(axis + 1) == 1), None)


def in_vectors(*matrices: Any) -> bool:
    """Return whether all matrices can be read in vectors of eight numbers."""
    return all(
        (unit := unit_of(matrix)) is not None
        and matrix.data_ptr() % 16 == 0
        and not any(n % 8 for n in matrix.shape[1:])
        and not any(by % 8 for axis, by in enumerate(matrix.stride()) if axis != unit + 1)
        for matrix in matrices
    )


def split(
    matrix: Any, along: int, strict: bool = True, before: Any = None, into: Halves | None = None
) -> Halves:
    """Split matrices (batch, rows, columns) for a product with sums along an axis.

    If not `strict`, halves serve for all rows: they lose digits of numbers below 2⁻²⁸ of a row's
    largest. One matrix with sums along its columns may have those of another `before` it. `into`
    takes earlier halves of the same matrices, which are written over.
    """
    x = matrix if along == 2 else matrix.mT
    batches, rows, terms = x.shape
    ahead = 0 if before is None else before.shape[1]
    if before is not None:
        before, terms = before if before.stride(1) == 1 else before.contiguous(), ahead + terms
    terms_fast = unit_of(x) != 0
    slow, fast = (rows, terms) if terms_fast else (terms, rows)
    pitch = -(-fast // 8) * 8
    if into is None:
        halves = torch.empty((2, batches, slow, pitch), dtype=torch.float16, device=x.device)
        scales = torch.empty((batches, rows), dtype=torch.float32, device=x.device)
    else:
        halves, scales = into.halves, into.scales
    # As many terms as rows may have, so that numbers are read once.
    BT = power(terms, 64)
    BR = max(16 if not terms_fast else 4, 8192 // BT)
    if BT > 1024:
        BR, BT = (4, 1024) if terms_fast else (32, 128)
    row = 0 if before is None else before.stride(0)
    numbers = rows, terms, ahead, *x.stride(), row, halves.stride(0), pitch
    steps = -(-terms // BT)
    steps = steps if steps == 1 or not x.is_cuda else None
    aligned = in_vectors(x) and (before is None or in_vectors(before[None]))
    constants = unit_of(x), aligned, terms_fast, BR, BT, steps, strict
    key = x.device, before is None, wide(*numbers), *constants
    programs = batches * -(-rows // BR)
    _splitter(aligned)(programs, key, x, before, halves, scales, *numbers, *constants)
    shape = (batches, rows, terms) if along == 2 else (batches, terms, rows)
    return Halves(halves, scales, shape, along if terms_fast else 3 - along, batches, strict=strict)


def split_blocks(
    matrix: Any, before: Any = None, functions: Any = None, sums: Any = None
) -> Halves:
    """Split rows, by blocks, for products and for sums over rows.

    A row may have columns of another matrix `before` it. It may be multiplied by functions, a
    matrix whose columns repeat. `sums` (blocks of rows, columns) get the sums of blocks of rows.
    """
    rows, ahead = len(matrix), 0 if before is None else before.shape[1]
    columns = ahead + matrix.shape[1]
    matrix, before, functions = (
        x if x is None or x.stride(1) == 1 else x.contiguous() for x in (matrix, before, functions)
    )
    pitch = -(-columns // 8) * 8
    halves = torch.empty((2, 1, rows, pitch), dtype=torch.float16, device=matrix.device)
    shape = [-(-n // size) for n, size in zip((rows, columns), BLOCK, strict=True)]
    scales = torch.empty((1, *shape), dtype=torch.float32, device=matrix.device)
    aligned = in_vectors(*[x[None] for x in (matrix, before, functions) if x is not None])
    width = columns if functions is None else functions.shape[1]
    steps = [0 if x is None else x.stride(0) for x in (matrix, before, functions)]
    numbers = rows, columns, width, ahead, *steps, halves.stride(0), pitch
    arrays = matrix, before, functions, halves, scales, sums
    constants = aligned, *BLOCK
    kinds = tuple([array is None for array in arrays])
    key = matrix.device, kinds, wide(*numbers), *constants
    _block_splitter(aligned)(shape[0] * shape[1], key, *arrays, *numbers, *constants)
    return Halves(halves, scales, (1, rows, columns), 2, 1, strict=True, block=BLOCK)


class Orders(NamedTuple):
    """Memory for halves of several matrices of as many rows, with a scale for each row; or none.

    The layout has `write_orders`'s PLACES and STARTS.
    """

    halves: Any = None
    scales: Any = None
    layout: tuple[tuple[int, ...], tuple[int, ...]] = ((0,), (0,))
    parts: tuple[Halves, ...] = ()

    def note(self, *arrays: Any) -> None:
        """Keep the halves that a kernel has written beside arrays."""
        keeper = kept(arrays[0].device) if self.parts else None
        if keeper is not None:
            keeper.note(self.parts, *arrays)


def orders_to_keep(
    out: Any, layout: tuple[tuple[int, ...], tuple[int, ...]], channels: int
) -> Orders:
    """Return memory for the halves of an array's orders, or none where they wouldn't repay.

    Orders begin at STARTS times `channels` columns. Products with square weights decide, as the
    real ones aren't known yet.
    """
    keeper, rows = kept(out.device), len(out)
    widths = [(end - begin) * channels for begin, end in itertools.pairwise(layout[1])]
    serves = (
        keeper is not None
        and keeper.splits
        and out.dtype == torch.float32
        and of_float32(out.device) == EMULATED
        and channels % 8 == 0
        and min(widths) >= LEAST
        and _repays(out.device, 2 * rows * min(widths) ** 2, rows * min(widths))
    )
    if not serves:
        return Orders()
    halves = torch.empty(2 * rows * sum(widths), dtype=torch.float16, device=out.device)
    scales = torch.empty((len(widths), 1, rows), dtype=torch.float32, device=out.device)
    parts = [
        Halves(own.view(2, 1, rows, width), to, (1, rows, width), 2, 1, strict=True)
        for own, to, width in zip(
            halves.split([2 * rows * width for width in widths]), scales, widths, strict=True
        )
    ]
    return Orders(halves, scales, layout, tuple(parts))


def kept_orders(*arrays: Any) -> tuple[Halves, ...] | None:
    """Return the halves that a kernel has written beside arrays, or None."""
    keeper = kept(arrays[0].device)
    return None if keeper is None else keeper.take(*arrays)


def split_by_most(matrix: Any, most: Any) -> Halves:
    """Split matrices of which the bits of each one's largest magnitude are known.

    Columns lie without gaps, in places for a multiple of eight, where zeros follow the matrix's.
    """
    batches, rows, columns = matrix.shape
    size, lo = matrix.stride(0), batches * matrix.stride(0)
    halves = torch.empty((2, batches, rows, size // rows), dtype=torch.float16, device=most.device)
    scales = torch.empty((batches, 1), dtype=torch.float32, device=most.device)
    programs = batches * -(-size // 2048)
    key = matrix.device, wide(size, lo)
    _launch_halve(programs, key, matrix, halves, most, scales, size, lo, 2048)
    scales = scales.expand(batches, columns)
    return Halves(halves, scales, (batches, rows, columns), fast=2, low=batches)


def multiply_halves(
    left: Halves,
    right: Halves,
    out: Any,
    *,
    factor: float = 1.0,
    add: bool = False,
    parts: int = 1,
    bias: Any = None,
    most: Any = None,
) -> None:
    """Write the products of split matrices, times a factor, or add them to `out`.

    A bias of columns may be added. The sums of a single product may be written in parts, which
    become a batch. The bits of each product's largest magnitude are written to `most`, if they
    exceed its own.
    """
    (batches, M, K), N = left.shape, right.shape[2]
    # Halves of other rows would be written behind the end.
    assert out.shape == (batches if parts == 1 else parts, M, N)
    aligned = in_vectors(out)
    BM, BN, BK, warps, stages = _TILE
    terms = K
    if parts > 1:
        batches, K = parts, -(-K // (parts * BK)) * BK
    (a_steps, of_a), (b_steps, of_b) = left.scaled(2), right.scaled(1)
    if parts > 1:
        a_steps, b_steps = (0, *a_steps[1:]), (0, *b_steps[1:])
    numbers = M, N, K, terms, left.first, left.low, right.first, right.low, *out.stride()
    steps = None if out.is_cuda else -(-K // BK)
    strict = left.strict or right.strict
    otherwise = None if not strict else EMULATED if out.is_cuda else "ieee"
    # At least as many as a program's terms have, whichever side of a block they are.
    many = power(-(-K // min(BLOCK))) if left.block or right.block else 1
    form = left.fast == 2, right.fast == 1
    how = add, parts > 1
    given = left.scales, right.scales, out, bias
    arrays = left.described(BM, BK, 2), right.described(BN, BK, 1), *given, most
    kinds = tuple([array is None for array in arrays])
    rows, tiles = batches * -(-M // BM), batches * -(-M // BM) * -(-N // BN)
    scalars = *numbers, *a_steps, *b_steps
    # Triangles of 256 residues, whose products have few terms, take longer there.
    plain = left.block is None or left.shape[0] > 1 or of_b[0] not in (1, BN)
    if plain or most is not None or not _on_hopper(out.device):
        constants = unit_of(out), aligned, *form, steps, BM, BN, BK, 8, *how, otherwise
        constants += *of_a, *of_b, many
        key = out.device, kinds, out.dtype, wide(*scalars), *constants
        _launcher(aligned, warps, stages)(tiles, key, *arrays, *scalars, factor, *constants)
        return
    constants = unit_of(out), aligned, *form, BM, BN, BK, stages, 8, *how, *of_a, *of_b
    key = out.device, kinds, out.dtype, wide(*scalars, tiles), *constants
    factors = (
        hopper.described(left.halves, left.block_of(BM, BK, 2)),
        hopper.described(right.halves, right.block_of(BN, BK, 1)),
    )
    some = *numbers, *a_steps[1:], *b_steps, factor, tiles
    programs = min(tiles, processors(out.device))
    _hopper_launcher(aligned)(programs, key, *factors, *given, *some, *constants)
    columns = max(power(N), of_b[0], BN)
    constants = *form, steps, BM, BN, BK, *how, otherwise, *of_a, *of_b, many, columns
    key = out.device, kinds, out.dtype, wide(*scalars), *constants
    _launch_rest(rows, key, *arrays, *scalars, factor, *constants)


def repeat(row: Any, out: Any) -> None:
    """Write a row into all rows of a matrix, whose columns lie without gaps."""
    (rows, columns), row = out.shape, row.contiguous()
    aligned = in_vectors(out[None]) and row.data_ptr() % 16 == 0
    integers, constants = (rows, columns, out.stride(0)), (16, 128, aligned)
    key = out.device, out.dtype, wide(*integers), constants
    programs = -(-rows // 16) * -(-columns // 128)
    _repeater(aligned)(programs, key, row, out, *integers, *constants)


def parts_of(device: Any, M: int, N: int, K: int) -> int:
    """Return the parts of a sum over very many terms, for rounds of all multiprocessors."""
    many, tiles = processors(device), -(-M // _TILE[0]) * -(-N // _TILE[1])
    rounds = -(-K * tiles // (_TERMS * many))
    return max(1, min(rounds * many // tiles, K // _SHORT))


class Factor:
    """A factor of products, and its halves, once they are asked for.

    The matrix may have columns of another `before` it, or be multiplied by functions whose columns
    repeat; then `made` returns the result. Halves by blocks serve products and sums over rows.
    Where no sum is wanted, rows have their own scales, as edges near a cutoff have small numbers
    beside others. Given `halves` are taken as they are.
    """

    def __init__(
        self,
        matrix: Any,
        before: Any = None,
        functions: Any = None,
        made: Callable[[], Any] | None = None,
        summed: bool = True,
        halves: Halves | None = None,
    ) -> None:
        self._given, self._summed = (matrix, before, functions), summed
        self._made = made if made is None else functools.cache(made)
        self._halves = halves
        self._sums: Any = None
        self.dtype, self.device, rows = matrix.dtype, matrix.device, len(matrix)
        self.shape = rows, matrix.shape[1] + (0 if before is None else before.shape[1])

    @property
    def matrix(self) -> Any:
        return self._given[0] if self._made is None else self._made()

    @property
    def halves(self) -> Halves:
        if self._halves is None and not self._summed:
            matrix, before, functions = self._given
            if functions is not None:
                matrix, before = self.matrix, None
            self._halves = split(matrix[None], 2, before=before)
        elif self._halves is None:
            rows, columns = self.shape
            self._sums = self._given[0].new_empty(-(-rows // BLOCK[0]), columns)
            self._halves = split_blocks(*self._given, self._sums)
        return self._halves

    @property
    def parts(self) -> tuple[Any, ...]:
        """The matrices whose columns lie one after the other, joined if that serves a sum, too.

        In 16 bits the sum of their products would be rounded in between.
        """
        matrix, before, functions = self._given
        joined = before is None or functions is not None or self._summed or self.dtype.itemsize < 4
        return (self.matrix,) if joined else (before, matrix)

    @property
    def ready(self) -> bool:
        """Whether there are halves already."""
        return self._halves is not None

    def keep(self, halves: Any, scales: Any) -> None:
        """Take halves by blocks that are written otherwise."""
        self._halves = Halves(halves, scales, (1, *self.shape), 2, 1, strict=True, block=BLOCK)

    def sum(self, out: Any) -> None:
        """Write the sum of rows."""
        torch.sum(self.matrix if self._sums is None else self._sums, 0, out=out)


def multiply(out: Any, a: Factor, b: Any, precision: str, shift: Any = None) -> None:
    """Write a @ b, plus a shift, a bias of columns."""
    if precision == "bf16" and a.dtype == torch.float32:
        rows, b = a.matrix.bfloat16(), b.bfloat16()
        # torch multiplies into another dtype on CUDA only.
        found = torch.mm(rows, b, out_dtype=out.dtype) if b.is_cuda else rows.float() @ b.float()
        if shift is None:
            out.copy_(found)
        else:
            torch.add(shift, found, out=out)
    elif _is_split(precision, a, a.shape[0], b.shape[1], a.shape[1]):
        bias = None if shift is None else shift.contiguous()
        halves = formed(b, "halves", lambda into: split(b[None], 1, into=into))
        multiply_halves(a.halves, halves, out[None], bias=bias)
    else:
        tf32, begin = precision == "tf32", 0
        # Torch would write the bias into rows with gaps itself, number by number.
        if shift is not None and out.numel() and not out.is_contiguous():
            repeat(shift, out)
            shift = out
        for part in a.parts:
            end = begin + part.shape[1]
            if shift is None:
                product(tf32, torch.mm, part, b[begin:end], out=out)
            else:
                product(tf32, torch.addmm, shift, part, b[begin:end], out=out)
            shift, begin = out, end


def sum_over_rows(a: Factor, b: Factor, precision: str) -> Any:
    """Return aᵀ @ b, a sum over many rows."""
    (K, M), N = a.shape, b.shape[1]
    if not sums_halves(a, b, precision):
        out = b.matrix.new_empty(M, N)
        multiply(out, Factor(a.matrix.T), b.matrix, precision)
        return out
    parts = parts_of(a.device, M, N, K)
    sums = torch.empty((parts, M, N), dtype=torch.float32, device=a.device)
    multiply_halves(a.halves.mT, b.halves, sums, parts=parts)
    return sums.sum(0)


def sums_halves(a: Factor, b: Factor, precision: str) -> bool:
    """Return whether a sum over rows is made of halves."""
    return _is_split(precision, a, a.shape[1], b.shape[1], a.shape[0])


def split_for_both(a: Factor, columns: int, precision: str) -> None:
    """Make halves of a factor of two products, where both together repay them.

    One product has so many columns. The other is a sum over the factor's rows and as many of a
    factor that has so many columns.
    """
    rows, terms = a.shape
    if _halves_serve(precision, a) and terms >= LEAST <= rows:
        # Of each product, halves of both factors are half of the numbers.
        work, numbers = 2 * rows * terms * columns, rows * (terms + columns) // 2
        if _repays(a.device, work, numbers):
            a.halves  # noqa: B018


def _is_split(precision: str, a: Factor, M: int, N: int, K: int) -> bool:
    """Return whether a product is made of halves, of which `a` may have its own already."""
    if not _halves_serve(precision, a) or K < LEAST:
        return False
    return _repays(a.device, 2 * M * N * K, (N if a.ready else M + N) * K)


def _halves_serve(precision: str, a: Factor) -> bool:
    """Return whether halves make products of the factor as exact as asked."""
    return precision == "float32" and a.dtype == torch.float32 and of_float32(a.device) == EMULATED
