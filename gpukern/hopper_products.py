"""Products of split matrices for Hopper's tensor cores.

The kernel computes what `gpukern.products` does with a left factor by blocks, where halves serve. A
program stays for many tiles: one warp brings terms of both factors to a ring in shared memory,
ahead of two consumers of four warps each, which take half of a tile's rows. One adds up in float32
while the other multiplies.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukern.hopper import REGISTERS, load

_WARPS = gl.constexpr(4)
_ROWS = gl.constexpr(64)
_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=3)


def described(halves: Any, block: list[int]) -> Any:
    """Return a descriptor of tiles of a batch of matrices."""
    return TensorDescriptor.from_tensor(halves.flatten(0, -3), block, _LAYOUT)


@gluon.jit
def _place(tile, M, N, K, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):
    """Return a tile's member of the batch, and its first row and column."""
    across, along = gl.cdiv(N, BN), gl.cdiv(M, BM)
    member = tile // (across * along)
    tile = tile % (across * along)
    # Programs that run at once share rows and columns in the second-level cache.
    first = tile // (GROUP * across) * GROUP
    size = gl.minimum(along - first, GROUP)
    within = tile % (GROUP * across)
    return member, (first + within % size) * BM, within // size * BN


@gluon.jit
def _operand(ring, n, FAST: gl.constexpr, R: gl.constexpr, BK: gl.constexpr):
    """Return a tile of R rows and BK terms."""
    tile = ring.index(n)
    if FAST:
        return tile.reshape([R, BK])
    else:
        return tile.reshape([BK, R]).permute((1, 0))


@gluon.jit
def _scale_of(
    scales, row, term, rows, terms, by_row, by_term, ROWS: gl.constexpr, TERMS: gl.constexpr,
):  # fmt: skip
    """Return the reciprocal of a block's scale, and behind the last row or term one."""
    at = scales + row // ROWS * by_row + term // TERMS * by_term
    return gl.load(at, mask=(row < rows) & (term < terms), other=1.0)


@gluon.jit
def _consume(
    a_ring, b_ring, full, empty, given, numbers,
    CONSUMER: gl.constexpr, A_FAST: gl.constexpr, B_FAST: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr,
    OUT_UNIT: gl.constexpr, ALIGNED: gl.constexpr, ADD: gl.constexpr, PARTS: gl.constexpr,
    A_ROWS: gl.constexpr, A_TERMS: gl.constexpr, B_ROWS: gl.constexpr, B_TERMS: gl.constexpr,
):  # fmt: skip
    """Write half of the rows of every tile of a program."""
    a_scales, b_scales, out, bias = given
    M, N, K, terms, tiles, out_batch, out_row, out_column = numbers[:8]
    a_row, a_term, b_batch, b_row, b_term, factor = numbers[8:]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, BN, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    lanes: gl.constexpr = gl.SliceLayout(0, layout)
    if ALIGNED:
        M, N = M // 8 * 8, N // 8 * 8
        out_batch, out_row, out_column = out_batch // 8 * 8, out_row // 8 * 8, out_column // 8 * 8
    if OUT_UNIT == 0:
        out_row = 1
    elif OUT_UNIT == 1:
        out_column = 1
    steps = gl.cdiv(K, BK)
    n = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        member, m_first, n_first = _place(tile, M, N, K, BM, BN, GROUP)
        batch = member.to(gl.int64)
        m_first += CONSUMER * _ROWS
        m = m_first + gl.arange(0, _ROWS, rows)
        c = n_first + gl.arange(0, BN, lanes)
        begin = member * K if PARTS else member * 0
        # A reciprocal of zero is that of columns or blocks that halves don't serve.
        least = 1.0
        total = gl.zeros([_ROWS, BN], gl.float32, layout)
        for step in range(steps):
            k = begin + step * BK
            of_a = _scale_of(a_scales, m_first, k, M, terms, a_row, a_term, A_ROWS, A_TERMS)
            least = gl.minimum(least, of_a)
            by = factor * of_a
            if B_TERMS > 0:
                of_b = _scale_of(b_scales, n_first, k, N, terms, b_row, b_term, B_ROWS, B_TERMS)
                least = gl.minimum(least, of_b)
                by *= of_b
            slot = n % SLOTS
            hopper.mbarrier.wait(full.index(slot), n // SLOTS & 1)
            a_high = _operand(a_ring, 2 * slot, A_FAST, BM, BK).slice(CONSUMER * _ROWS, _ROWS)
            a_low = _operand(a_ring, 2 * slot + 1, A_FAST, BM, BK).slice(CONSUMER * _ROWS, _ROWS)
            b_high = _operand(b_ring, 2 * slot, B_FAST, BN, BK).permute((1, 0))
            b_low = _operand(b_ring, 2 * slot + 1, B_FAST, BN, BK).permute((1, 0))
            none = gl.zeros([_ROWS, BN], gl.float32, layout)
            low = hopper.warpgroup_mma(a_high, b_low, none, use_acc=False, is_async=True)
            low = hopper.warpgroup_mma(a_low, b_high, low, is_async=True)
            high = hopper.warpgroup_mma(a_high, b_high, none, use_acc=False, is_async=True)
            # Tensor cores truncate sums, which are added in float32 for this reason.
            low = hopper.warpgroup_mma_wait(1, deps=[low])
            total += low * (by * (1 / 2048))
            high = hopper.warpgroup_mma_wait(0, deps=[high])
            hopper.mbarrier.arrive(empty.index(slot), count=1)
            total += high * by
            n += 1
        if B_TERMS == 0:
            by_column = gl.load(b_scales + batch * b_batch + c * b_row, mask=c < N, other=1.0)
            total *= by_column[None, :]
            # A mask by columns would keep threads from writing vectors.
            least = gl.minimum(least, gl.min(by_column, 0))
        inside = (m < M)[:, None] & (c < N)[None, :] & (least > 0)
        to = out + batch * out_batch + m.to(gl.int64)[:, None] * out_row
        to += c.to(gl.int64)[None, :] * out_column
        if ADD:
            total += gl.load(to, mask=inside, other=0.0)
        if bias is not None:
            total += gl.load(bias + c, mask=c < N, other=0.0)[None, :]
        gl.store(to, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _produce(
    a_halves, b_halves, a_ring, b_ring, full, empty,
    M, N, K, tiles, a_first, a_lo, b_first, b_lo,
    A_FAST: gl.constexpr, B_FAST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Bring the terms of both factors, tile after tile."""
    steps = gl.cdiv(K, BK)
    n = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        member, m_first, n_first = _place(tile, M, N, K, BM, BN, GROUP)
        of_a, of_b, begin = a_first, b_first, member * K
        if not PARTS:
            of_a, of_b, begin = a_first + member, b_first + member, member * 0
        for step in range(steps):
            slot = n % SLOTS
            ready = full.index(slot)
            # At first, slots are empty.
            hopper.mbarrier.wait(empty.index(slot), (n // SLOTS & 1) ^ 1)
            hopper.mbarrier.expect(ready, 4 * (BM + BN) * BK)
            k = begin + step * BK
            if A_FAST:
                load(a_halves, [of_a, m_first, k], ready, a_ring.index(2 * slot))
                load(a_halves, [of_a + a_lo, m_first, k], ready, a_ring.index(2 * slot + 1))
            else:
                load(a_halves, [of_a, k, m_first], ready, a_ring.index(2 * slot))
                load(a_halves, [of_a + a_lo, k, m_first], ready, a_ring.index(2 * slot + 1))
            if B_FAST:
                load(b_halves, [of_b, n_first, k], ready, b_ring.index(2 * slot))
                load(b_halves, [of_b + b_lo, n_first, k], ready, b_ring.index(2 * slot + 1))
            else:
                load(b_halves, [of_b, k, n_first], ready, b_ring.index(2 * slot))
                load(b_halves, [of_b + b_lo, k, n_first], ready, b_ring.index(2 * slot + 1))
            n += 1


def multiply(
    a_halves, b_halves, a_scales, b_scales, out, bias,
    M, N, K, terms, a_first, a_lo, b_first, b_lo, out_batch, out_row, out_column,
    a_scale_row, a_scale_term, b_scale_batch, b_scale_row, b_scale_term, factor,
    tiles,
    OUT_UNIT: gl.constexpr, ALIGNED: gl.constexpr, A_FAST: gl.constexpr, B_FAST: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr,
    GROUP: gl.constexpr, ADD: gl.constexpr, PARTS: gl.constexpr, A_ROWS: gl.constexpr,
    A_TERMS: gl.constexpr, B_ROWS: gl.constexpr, B_TERMS: gl.constexpr,
):  # fmt: skip
    """Write, or add, tiles of which halves serve, times a factor, plus a bias of columns."""
    a_shape: gl.constexpr = [2 * SLOTS, 1, BM, BK] if A_FAST else [2 * SLOTS, 1, BK, BM]
    b_shape: gl.constexpr = [2 * SLOTS, 1, BN, BK] if B_FAST else [2 * SLOTS, 1, BK, BN]
    a_ring = gl.allocate_shared_memory(gl.float16, a_shape, a_halves.layout)
    b_ring = gl.allocate_shared_memory(gl.float16, b_shape, b_halves.layout)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    for slot in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(slot), count=1)
        hopper.mbarrier.init(empty.index(slot), count=2)
    hopper.fence_async_shared()
    given = a_scales, b_scales, out, bias
    numbers = (
        M, N, K, terms, tiles, out_batch, out_row, out_column, a_scale_row, a_scale_term,
        b_scale_batch, b_scale_row, b_scale_term, factor,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    a_ring, b_ring, full, empty, given, numbers, 0, A_FAST, B_FAST, BM, BN, BK,
                    SLOTS, GROUP, OUT_UNIT, ALIGNED, ADD, PARTS, A_ROWS, A_TERMS, B_ROWS, B_TERMS,
                ),
            ),
            (
                _consume,
                (
                    a_ring, b_ring, full, empty, given, numbers, 1, A_FAST, B_FAST, BM, BN, BK,
                    SLOTS, GROUP, OUT_UNIT, ALIGNED, ADD, PARTS, A_ROWS, A_TERMS, B_ROWS, B_TERMS,
                ),
            ),
            (
                _produce,
                (
                    a_halves, b_halves, a_ring, b_ring, full, empty, M, N, K, tiles,
                    a_first, a_lo, b_first, b_lo, A_FAST, B_FAST, BM, BN, BK, SLOTS, GROUP, PARTS,
                ),
            ),
        ],
        [_WARPS, 1],
        REGISTERS,
    )  # fmt: skip
