"""Products of float32 matrices on tensor cores, exact to float32.

A number x of float32 is split ahead of the product into two of float16: with a power of two s as
the scale of its row, hi = round(s x) and lo = round(2¹¹ (s x - hi)) have 22 binary digits of x
together. Of two such numbers' product, tensor cores add up hi hi', and hi lo' + lo hi' apart, in
float32; lo lo' is below float32's last digit (Ootomo and Yokota, arXiv 2203.03341).

The largest number of a row is scaled to 2¹⁴ to 2¹⁵, so that all digits of numbers down to 2⁻²⁸ of
it are kept, and 19 down to 2⁻³². Where a row or column has a smaller number, Inf, NaN, or an
extreme exponent, its tiles of the product are sums of six products of bfloat16
(`gpukern.precision`). Tensor cores truncate sums, so that few terms are summed there, and such sums
are added in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gpukern.launch import Launcher, is_small, kernel_of_any_size, power, wide
from gpukern.precision import EMULATED, of_float32
from gpukern.tape import product

# Rows, columns and terms of a program's tile, its warps and stages.
_TILE = 128, 128, 64, 8, 3
# The fewest rows of a part of a sum over rows.
_ROWS = 2048
#: The fewest terms of a product of halves. With fewer, float32's own error is below theirs.
LEAST = 64
# The least work of a product that repays splitting its matrices, in multiplications and additions,
# and the least for each number that is split.
_WORK, _WORK_OF_ONE = 1 << 32, 320


class Halves(NamedTuple):
    """A batch of matrices split for a product.

    `halves` (2, batch, slow, fast) have hi and lo in the layout of the matrix, of which `fast` is
    the axis without gaps, 1 or 2. Among the matrices there, those with hi begin at `first`, and
    those with lo are `low` matrices behind. Every row along the axis of the product's sums has the
    scale's reciprocal in `scales` (batch, n), or zero where halves lose digits; there the product
    reads `matrix`, of a shape and steps in memory. The batch has so many `terms` in all: the last
    matrix may have fewer than its shape says. Without a matrix, halves always serve; without
    scales too, the left factor of a product has none.
    """

    halves: Any
    scales: Any
    shape: tuple[int, int, int]
    fast: int
    low: int
    first: int = 0
    matrix: Any = None
    steps: tuple[int, int, int] = (0, 0, 0)
    terms: int = 0

    def described(self, rows: int, terms: int, along: int) -> TensorDescriptor:
        """Return a descriptor of tiles for a product with sums along an axis."""
        block = [1, rows, terms] if self.fast == along else [1, terms, rows]
        return TensorDescriptor.from_tensor(self.halves.flatten(0, -3), block)

    @property
    def mT(self) -> Halves:
        """The transposed matrices."""
        (batches, rows, columns), (step, row, column) = self.shape, self.steps
        matrix = None if self.matrix is None else self.matrix.mT
        return self._replace(
            matrix=matrix,
            shape=(batches, columns, rows),
            steps=(step, column, row),
            fast=3 - self.fast,
        )


def repay(device: Any, batches: int, M: int, N: int, K: int, ready: bool = False) -> bool:
    """Return whether a product of halves takes less time, also if halves aren't `ready`."""
    work = 2 * batches * M * N * K
    split = 0 if ready else _WORK_OF_ONE * batches * (M + N) * K
    return not is_small(device) and K >= LEAST and work >= max(_WORK, split)


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
def _block(at, step, r, rows, terms, x_term, BT: tl.constexpr):
    """Return a block of terms of rows, with zeros behind the last."""
    k = (step * BT + tl.arange(0, BT)).to(tl.int64)
    inside = (r < rows)[:, None] & (k < terms)[None, :]
    return tl.load(at + k[None, :] * x_term, mask=inside, other=0.0)


def _split(
    x, halves, scales, rows, terms, whole, x_batch, x_row, x_term, lo, pitch,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr, TERMS_FAST: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr, STEPS: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    """Write the halves of rows, and the scales' reciprocals.

    If STRICT, rows whose halves lose digits have zeros, as has the reciprocal.
    STEPS of BT terms are given where there is one, and to the interpreter, which can't turn a
    number into a range.
    """
    x_batch, x_row, x_term = strides(x_batch, x_row, x_term, UNIT, ALIGNED)
    if ALIGNED:
        rows, terms = rows // 8 * 8, terms // 8 * 8
    # Lines of halves begin at multiples of eight, and end with zeros.
    pitch, lo = pitch // 8 * 8, lo.to(tl.int64) // 8 * 8
    blocks = tl.cdiv(rows, BR)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    r = (tl.program_id(0) % blocks * BR + tl.arange(0, BR)).to(tl.int64)
    at = x + batch * x_batch + r[:, None] * x_row
    here = tl.minimum(terms, whole - batch * terms)
    if ALIGNED:
        here = here // 8 * 8
    value = tl.zeros((BR, BT), tl.float32)
    most = tl.zeros((BR, BT), tl.int32)
    INFINITE: tl.constexpr = 0x7F800000
    least = most + INFINITE
    for step in range(tl.cdiv(terms, BT) if STEPS is None else STEPS):
        value = _block(at, step, r, rows, here, x_term, BT)
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
            value = _block(at, step, r, rows, here, x_term, BT)
        if STRICT:
            value = tl.where(reciprocal[:, None] > 0, value, 0.0)
        hi, low = halves_of(value * scale[:, None])
        if TERMS_FAST:
            place = to + k[None, :]
            there = (r < rows)[:, None] & (k < pitch)[None, :]
        else:
            place = to + k[None, :] * pitch
            there = (r < pitch)[:, None] & (k < terms)[None, :]
        tl.store(place, hi, mask=there)
        tl.store(place + lo, low, mask=there)


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


@kernel_of_any_size
def _multiply(
    a_halves, b_halves, a, b, a_scales, b_scales, out, bias, most,
    M, N, K, whole, a_first, a_lo, b_first, b_lo,
    a_batch, a_row, a_column, b_batch, b_row, b_column, out_batch, out_row, out_column,
    a_scale_batch, a_scale_row, b_scale_batch, b_scale_row, factor,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    A_FAST: tl.constexpr, B_FAST: tl.constexpr, STEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr, PARTS: tl.constexpr, OTHERWISE: tl.constexpr,
):  # fmt: skip
    """Write, or add, the products of split matrices, times a factor, plus a bias of columns.

    A_FAST and B_FAST tell whether the terms' axis is the one without gaps. Without `a` and `b`,
    halves always serve; else OTHERWISE is the precision of products where they don't. If PARTS, the
    batch has parts of one product, of K terms each. `most` gets the bits of each product's largest
    magnitude, if they exceed what is there.
    """
    a_batch, a_row, a_column = strides(a_batch, a_row, a_column, A_UNIT, ALIGNED)
    b_batch, b_row, b_column = strides(b_batch, b_row, b_column, B_UNIT, ALIGNED)
    out_batch, out_row, out_column = strides(out_batch, out_row, out_column, OUT_UNIT, ALIGNED)
    if ALIGNED:
        M, N = M // 8 * 8, N // 8 * 8
        # Without matrices only the result is known to have eights.
        if OTHERWISE is not None:
            K = K // 8 * 8
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
    by_row = tl.full((BM,), 1.0, tl.float32)
    if a_scales is not None:
        by_row = tl.load(a_scales + batch * a_scale_batch + m * a_scale_row, mask=m < M, other=1.0)
    by_column = tl.load(b_scales + batch * b_scale_batch + n * b_scale_row, mask=n < N, other=1.0)
    total = tl.zeros((BM, BN), tl.float32)
    serves = True
    if OTHERWISE is not None:
        serves = (tl.min(by_row, 0) > 0) & (tl.min(by_column, 0) > 0)
    if serves:
        small = factor * (1 / 2048)
        begin = 0
        if PARTS:
            begin = member * K
        else:
            a_first += member
            b_first += member
        for step in range(tl.cdiv(K, BK) if STEPS is None else STEPS):
            k = begin + step * BK
            a_high = _tile(a_halves, a_first, m_first, k, BM, BK, A_FAST)
            b_high = _tile(b_halves, b_first, n_first, k, BN, BK, B_FAST)
            a_low = _tile(a_halves, a_first + a_lo, m_first, k, BM, BK, A_FAST)
            b_low = _tile(b_halves, b_first + b_lo, n_first, k, BN, BK, B_FAST)
            # Tensor cores truncate sums: without the factors, the compiler would have them add up.
            low = tl.dot(a_high, b_low.T)
            low = tl.dot(a_low, b_high.T, low)
            total += low * small
            total += tl.dot(a_high, b_high.T) * factor
        total *= by_row[:, None] * by_column[None, :]
    else:
        if OTHERWISE is not None:
            here = tl.minimum(K, whole - batch * K)
            for step in range(tl.cdiv(K, BK) if STEPS is None else STEPS):
                k = (step * BK + tl.arange(0, BK)).to(tl.int64)
                from_a = a + batch * a_batch + m[:, None] * a_row + k[None, :] * a_column
                from_b = b + batch * b_batch + k[:, None] * b_row + n[None, :] * b_column
                left = tl.load(from_a, mask=(m < M)[:, None] & (k < here)[None, :], other=0.0)
                right = tl.load(from_b, mask=(k < here)[:, None] & (n < N)[None, :], other=0.0)
                total = tl.dot(left, right, total, OTHERWISE)
            total *= factor
    to = out + batch * out_batch + m[:, None] * out_row + n[None, :] * out_column
    inside = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        total += tl.load(to, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)
    if most is not None:
        largest = tl.max(tl.max(tl.where(inside, _bits(total), 0), 1), 0)
        tl.atomic_max(most + batch, largest, sem="relaxed")


_launch_halve = Launcher(kernel_of_any_size(_halve, ("x", "halves")), 4)


@functools.cache
def _splitter(aligned: bool) -> Launcher:
    return Launcher(kernel_of_any_size(_split, ("x", "halves") if aligned else ("halves",)), 8)


@functools.cache
def _launcher(aligned: bool, warps: int, stages: int) -> Launcher:
    names = ("a", "b", "out") if aligned else ()
    return Launcher(kernel_of_any_size(_multiply.fn, names), warps, stages=stages)


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


def split(matrix: Any, along: int, parts: int = 1, strict: bool = True) -> Halves:
    """Split matrices (batch, rows, columns) for a product with sums along an axis.

    The sums of a single matrix may be split into parts, which become a batch. If not `strict`,
    halves serve for all rows: they lose digits of numbers below 2⁻²⁸ of a row's largest.
    """
    x = matrix if along == 2 else matrix.mT
    batches, rows, terms = x.shape
    step, row, term = x.stride()
    whole = batches * terms
    if parts > 1:
        terms = -(-terms // parts // 8) * 8
        batches, step = -(-whole // terms), terms * term
    terms_fast = unit_of(x) != 0
    slow, fast = (rows, terms) if terms_fast else (terms, rows)
    pitch = -(-fast // 8) * 8
    halves = torch.empty((2, batches, slow, pitch), dtype=torch.float16, device=x.device)
    scales = torch.empty((batches, rows), dtype=torch.float32, device=x.device)
    # As many terms as rows may have, so that numbers are read once.
    BT = power(terms, 64)
    BR = max(16 if not terms_fast else 4, 8192 // BT)
    if BT > 1024:
        BR, BT = (4, 1024) if terms_fast else (32, 128)
    numbers = rows, terms, whole, step, row, term, halves.stride(0), pitch
    steps = -(-terms // BT)
    steps = steps if steps == 1 or not x.is_cuda else None
    constants = unit_of(x), in_vectors(x), terms_fast, BR, BT, steps, strict
    key = x.device, wide(*numbers), *constants
    programs = batches * -(-rows // BR)
    _splitter(in_vectors(x))(programs, key, x, halves, scales, *numbers, *constants)
    shape, by = (batches, rows, terms), (step, row, term)
    if along == 1:
        shape, by = (batches, terms, rows), (step, term, row)
    fast_axis = along if terms_fast else 3 - along
    return Halves(halves, scales, shape, fast_axis, batches, 0, matrix, by, whole)


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

    A bias of columns may be added.
    The sums of a single product that needs no matrix may be written in parts, which become a batch.
    The bits of each product's largest magnitude are written to `most`, if they exceed its own.
    """
    (batches, M, K), N = left.shape, right.shape[2]
    a, b = left.matrix, right.matrix
    kept = a is not None and b is not None
    aligned = in_vectors(*((a, b, out) if kept else (out,)))
    BM, BN, BK, warps, stages = _TILE
    if parts > 1:
        batches, K = parts, -(-K // (parts * BK)) * BK
    numbers = M, N, K, left.terms, left.first, left.low, right.first, right.low
    numbers += *left.steps, *right.steps, *out.stride()
    for scales in (left.scales, right.scales):
        step, row = (0, 0) if scales is None else scales.stride()
        numbers += 0 if parts > 1 else step, row
    units = (unit_of(a), unit_of(b)) if kept else (None, None)
    steps = None if out.is_cuda else -(-K // BK)
    constants = *units, unit_of(out), aligned, left.fast == 2, right.fast == 1, steps
    otherwise = None if not kept else EMULATED if out.is_cuda else "ieee"
    constants += BM, BN, BK, 8, add, parts > 1, otherwise
    arrays = left.described(BM, BK, 2), right.described(BN, BK, 1), a, b
    arrays += left.scales, right.scales, out, bias, most
    kinds = tuple([array is None for array in arrays])
    key = out.device, kinds, out.dtype, wide(*numbers), *constants
    programs = batches * -(-M // BM) * -(-N // BN)
    _launcher(aligned, warps, stages)(programs, key, *arrays, *numbers, factor, *constants)


class Factor:
    """A factor of products, and its halves for sums along an axis, once they are asked for."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self._halves: dict[tuple[int, int], Halves] = {}

    def halves(self, along: int, parts: int = 1) -> Halves:
        found = self._halves.get((along, parts))
        if found is None:
            found = self._halves[along, parts] = split(self.matrix[None], along, parts)
        return found


def multiply(out: Any, a: Factor, b: Any, precision: str, shift: Any = None) -> None:
    """Write a @ b, plus a shift: `out` itself, or a bias of columns."""
    rows = a.matrix
    if precision == "bf16" and rows.dtype == torch.float32:
        rows, b = rows.bfloat16(), b.bfloat16()
        # torch multiplies into another dtype on CUDA only.
        found = torch.mm(rows, b, out_dtype=out.dtype) if b.is_cuda else rows.float() @ b.float()
        if shift is None:
            out.copy_(found)
        else:
            torch.add(shift, found, out=out)
    elif _is_split(precision, rows, b):
        add, bias = shift is out, None
        if shift is not None and not add:
            bias = shift.contiguous()
        multiply_halves(a.halves(2), split(b[None], 1), out[None], add=add, bias=bias)
    elif shift is None:
        product(precision == "tf32", torch.mm, rows, b, out=out)
    else:
        product(precision == "tf32", torch.addmm, shift, rows, b, out=out)


def sum_over_rows(a: Factor, b: Factor, precision: str) -> Any:
    """Return aᵀ @ b, a sum over many rows."""
    x, y = a.matrix.T, b.matrix
    if not _is_split(precision, x, y):
        out = x.new_empty(x.shape[0], y.shape[1])
        multiply(out, Factor(x), y, precision)
        return out
    parts = max(1, x.shape[1] // _ROWS)
    left, right = a.halves(1, parts), b.halves(1, parts)
    sums = x.new_empty(left.shape[0], x.shape[0], y.shape[1])
    multiply_halves(left.mT, right, sums)
    return sums.sum(0)


def _is_split(precision: str, a: Any, b: Any) -> bool:
    """Return whether a product is made of halves of float16."""
    if precision != "float32" or a.dtype != torch.float32:
        return False
    return of_float32(a.device) == EMULATED and repay(
        a.device, 1, a.shape[0], b.shape[1], a.shape[1]
    )
