"""Projections of the triangle multiplicative update for many channels, for Hopper's tensor cores.

These kernels use the layouts of `gpukern.trimul.hopper`, where weights don't fit in shared memory:
weights pass through it block by block, in a ring that one warp of a program fills over and over.
Two consumers of four warps each have standardized rows in registers, and take every block. `pack`
orders the blocks before, with the norm's weight in the weights and its bias in the biases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukern.hopper import REGISTERS, SHARED, TILE, anew, as_held, load
from gpukern.trimul.hopper import (
    as_met,
    as_operand,
    edge_met,
    log2,
    mask_of,
    place_of,
    powers,
    products_layout,
    row_met,
    rows_layout,
    write_gate,
    write_sides,
)

# Warps and rows of a consumer, and channels of a first operand.
_WARPS = gl.constexpr(4)
_ROWS = gl.constexpr(64)
_CHUNK = gl.constexpr(64)


class Ring(NamedTuple):
    """The channels of a block, and the blocks that the ring holds."""

    block: int
    slots: int


def way_to_project_wide(C: int, H: int, G: int) -> Ring | None:
    """Return the ring of `project_wide`, or None where it can't serve."""
    # More channels don't fit into registers.
    if C % 64 or not 128 < C <= 384 or H == 0:
        return None
    for block in (64, 32):
        # The rest is for barriers.
        slots = (SHARED - 1024) // (4 * C * block)
        if slots >= 2 and H % block == 0 and G % (2 * block) == 0:
            return Ring(block, slots)
    return None


def blocks_of(packed: Any, block: int) -> Any:
    """Return a descriptor, for `project_wide`, of the weights that `pack` wrote."""
    return TensorDescriptor.from_tensor(packed, [2 * block, _CHUNK.value], TILE)


_TO_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")


@gluon.jit
def _rounded(x, DOT: gl.constexpr):
    """Return numbers in 16 bits, in pairs from here on, so that they take half the registers."""
    if DOT == gl.bfloat16:
        return gl.inline_asm_elementwise(_TO_BF16, "=r,r,r", [x], gl.bfloat16, False, 2)
    else:
        return gl.inline_asm_elementwise(_TO_FP16, "=r,r,r", [x], gl.float16, False, 2)


@gluon.constexpr_function
def _half_layout(V):
    """Return the layout of half a tile: of a thread's two rows in `rows_layout`, one."""
    registers = [[0, c] for c in powers(1, log2(V)) + powers(4 * V, log2(16 // V))]
    lanes = [[0, V], [0, 2 * V], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [_ROWS // 2, _CHUNK])


@gluon.jit
def _half(V: gl.constexpr):
    """Return which rows of a tile are in its first half, and the channels of a chunk."""
    layout: gl.constexpr = _half_layout(V)
    n = gl.arange(0, _ROWS // 2, gl.SliceLayout(1, layout))
    c = gl.arange(0, _CHUNK, gl.SliceLayout(0, layout))
    return n // 2 * 4 + n % 2, c


@gluon.jit
def _standardized_chunks(x, edge, c, live, eps, C: gl.constexpr, DOT: gl.constexpr):
    """Return chunks of rows, less their means, over their deviations."""
    at = x + anew(edge)[:, None] * C + c[None, :]
    xs = ()
    for k in gl.static_range(C // _CHUNK):
        given = gl.load(at + k * _CHUNK, mask=live[:, None], other=0.0)
        xs = xs + (given,)
        part = given.to(gl.float32)
        middle = gl.sum(part, 1) * (1 / _CHUNK)
        part -= middle[:, None]
        if k == 0:
            mean = middle
            square = gl.sum(part * part, 1)
        else:
            # Chan, Golub and LeVeque's update.
            step = middle - mean
            mean += step * (1 / (k + 1))
            square += gl.sum(part * part, 1) + step * step * (k * _CHUNK / (k + 1))
    scale = gl.rsqrt(square * (1 / C) + eps)
    ys = ()
    for k in gl.static_range(C // _CHUNK):
        y = (as_held(xs[k]) - mean[:, None]) * scale[:, None]
        ys = ys + (_rounded(y, DOT),)
    return ys


@gluon.jit
def _whole(even, odd, V: gl.constexpr):
    """Return a chunk of a tile's rows from its halves."""
    x = gl.reshape(gl.join(even, odd), (_ROWS // 4, 2, _CHUNK, 2))
    x = gl.reshape(gl.permute(x, (0, 3, 1, 2)), (_ROWS, _CHUNK))
    return gl.convert_layout(x, rows_layout(_WARPS, _CHUNK, V), assert_trivial=True)


@gluon.jit
def _product(
    operands, ring, full, empty, biases, block, n, CHUNKS: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """Return the product with a block of weights, the n-th of all, and give its slot back."""
    BN: gl.constexpr = ring.shape[1]
    layout: gl.constexpr = products_layout(_WARPS, BN)
    value = gl.zeros((_ROWS, BN), gl.float32, layout)
    if biases is not None:
        # Biases load during the wait for weights.
        column = gl.arange(0, BN, gl.SliceLayout(0, layout))
        value += gl.load(biases + block * BN + column)[None, :]
    slot = n % SLOTS
    hopper.mbarrier.wait(full.index(slot), n // SLOTS & 1)
    for k in gl.static_range(CHUNKS):
        weight = ring.index(slot * CHUNKS + k).permute((1, 0))
        value = hopper.warpgroup_mma(
            operands[k], weight, value, use_acc=k > 0 or biases is not None, is_async=True
        )
    done = hopper.warpgroup_mma_wait(0, deps=[value])
    hopper.mbarrier.arrive(empty.index(slot), count=1)
    return done


@gluon.jit
def _pass_by(full, empty, n, SLOTS: gl.constexpr):
    """Give a slot back unused."""
    hopper.mbarrier.wait(full.index(n % SLOTS), n // SLOTS & 1)
    hopper.mbarrier.arrive(empty.index(n % SLOTS), count=1)


@gluon.jit
def _consume(
    given,
    CONSUMER: gl.constexpr, EPS: gl.constexpr, C: gl.constexpr, H: gl.constexpr,
    OUTPUT: gl.constexpr, V: gl.constexpr, BLOCKS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Write the outputs of every second tile of a program."""
    x, mask, biases, sides, gate, ring, full, empty = given[:8]
    members, rows, N, half, plane, mask_b, mask_i, mask_j = given[8:]
    DOT: gl.constexpr = ring.dtype
    LONG: gl.constexpr = plane.dtype
    BN: gl.constexpr = ring.shape[1]
    BH: gl.constexpr = BN // 2
    SIDES: gl.constexpr = 2 * H // BH
    G: gl.constexpr = (BLOCKS - SIDES) * BN
    CHUNKS: gl.constexpr = C // _CHUNK
    even, channel = _half(V)
    odd = even + 2
    met = edge_met(gl.arange(0, _ROWS, gl.SliceLayout(1, products_layout(_WARPS, BN))))
    plane = plane // 8 * 8
    half = half // 8 * 8
    rows = rows // 8 * 8
    tiles = (rows + _ROWS - 1) // _ROWS
    last = members * tiles - 1
    # One consumer reads rows while the other is at work, half of the blocks ahead.
    BEHIND: gl.constexpr = CONSUMER * (BLOCKS // 2)
    for before in range(BEHIND):
        _pass_by(full, empty, before, SLOTS)
    n = BEHIND
    # Both consumers take the same number of steps: each must release every block of the ring.
    for step in range(gl.program_id(0), last // 2 + 1, gl.num_programs(0)):
        tile = 2 * step + CONSUMER
        member, first, _ = place_of(gl.minimum(tile, last), tiles, rows, _ROWS, LONG)
        # A tile behind the last has no rows.
        first = gl.where(tile > last, rows, first)
        here = x + (member * rows + first) * C
        evens = _standardized_chunks(here, even, channel, first + even < rows, EPS, C, DOT)
        odds = _standardized_chunks(here, odd, channel, first + odd < rows, EPS, C, DOT)
        operands = ()
        for k in gl.static_range(CHUNKS):
            y = as_met(_whole(evens[k], odds[k], V), _WARPS, _CHUNK, V)
            operands = operands + (as_operand(y, _WARPS, BN),)
        m = None
        if mask is not None:
            m = mask_of(mask, member, first + met, rows, N, mask_b, mask_i, mask_j)
        for begun in range(BLOCKS):
            s = (BEHIND + begun) % BLOCKS
            value = _product(operands, ring, full, empty, biases, s, n + begun, CHUNKS, SLOTS)
            # The product has biases in it.
            if s < SIDES:
                write_sides(
                    value, m, None, None, sides, None, s, member, first, rows, half,
                    anew(plane) // 8 * 8, H, _WARPS, BH, DOT,
                )  # fmt: skip
            else:
                if gate is not None:
                    write_gate(
                        value, None, gate, None, s - SIDES, member, first,
                        anew(rows) // 8 * 8, OUTPUT, G, _WARPS, DOT,
                    )  # fmt: skip
        n += BLOCKS
    for after in range(BLOCKS // 2 - BEHIND):
        _pass_by(full, empty, n + after, SLOTS)


@gluon.jit
def _produce(
    weights, ring, full, empty, members, rows,
    C: gl.constexpr, BLOCKS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Bring all blocks of weights, for every tile of a consumer again."""
    BN: gl.constexpr = ring.shape[1]
    CHUNKS: gl.constexpr = C // _CHUNK
    rows = rows // 8 * 8
    tiles = (rows + _ROWS - 1) // _ROWS
    last = members * tiles - 1
    steps = (last // 2 + gl.num_programs(0) - gl.program_id(0)) // gl.num_programs(0)
    for n in range(steps * BLOCKS + BLOCKS // 2):
        slot = n % SLOTS
        ready = full.index(slot)
        # At first, slots are empty.
        hopper.mbarrier.wait(empty.index(slot), (n // SLOTS & 1) ^ 1)
        hopper.mbarrier.expect(ready, 2 * BN * C)
        for k in gl.static_range(CHUNKS):
            to = ring.index(slot * CHUNKS + k)
            at = [n % BLOCKS * BN, k * _CHUNK]
            load(weights, at, ready, to)


def project_wide(
    x, mask, weights, biases, sides, gate,
    members, rows, N, half, plane, mask_b, mask_i, mask_j,
    EPS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, OUTPUT: gl.constexpr,
    V: gl.constexpr, BH: gl.constexpr, SLOTS: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """Write left and right, and the last gate, from weights as `pack` puts them."""
    BN: gl.constexpr = 2 * BH
    BLOCKS: gl.constexpr = (4 * H + G) // BN
    shape: gl.constexpr = [SLOTS * (C // _CHUNK), BN, _CHUNK]
    ring = gl.allocate_shared_memory(weights.dtype, shape, weights.layout)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    for k in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(k), count=1)
        hopper.mbarrier.init(empty.index(k), count=2)
    hopper.fence_async_shared()
    half = half.to(LONG)
    plane = plane.to(LONG)
    given = (
        x, mask, biases, sides, gate, ring, full, empty,
        members, rows, N, half, plane, mask_b, mask_i, mask_j,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (given, 0, EPS, C, H, OUTPUT, V, BLOCKS, SLOTS)),
            (_consume, (given, 1, EPS, C, H, OUTPUT, V, BLOCKS, SLOTS)),
            (_produce, (weights, ring, full, empty, members, rows, C, BLOCKS, SLOTS)),
        ],
        [_WARPS, 1],
        REGISTERS,
    )


@gluon.jit
def _pack_rows(at, bias, w, b, to, biases, row, q, c, C: gl.constexpr):
    """Write a weight's rows times the norm's weight, and biases plus the norm's, projected."""
    read = ()
    for k in gl.static_range(C // _CHUNK):
        read = read + (gl.load(at + k * _CHUNK).to(gl.float32),)
    for k in gl.static_range(C // _CHUNK):
        value = read[k]
        if b is not None:
            bias += gl.sum(value * gl.load(b + k * _CHUNK + c).to(gl.float32)[None, :], 1)
        if w is not None:
            value *= gl.load(w + k * _CHUNK + c).to(gl.float32)[None, :]
        there = to + row[:, None] * C + (k * _CHUNK + q)[None, :]
        gl.store(there, value.to(to.dtype.element_ty))
    if biases is not None:
        gl.store(biases + row, bias)


def pack(
    p_w, p_b, g_w, g_b, o_w, o_b, w, b, to, biases,
    C: gl.constexpr, H: gl.constexpr, OUTPUT: gl.constexpr, V: gl.constexpr, BH: gl.constexpr,
):  # fmt: skip
    """Write weights in blocks, each of a projection and of its gate, or of the last gate.

    Write also their biases, with the norm's weight and bias in both. A program writes sixteen rows.
    """
    BN: gl.constexpr = 2 * BH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q = gl.arange(0, _CHUNK, gl.SliceLayout(0, layout))
    # Columns are in the order in which rows meet them.
    c = row_met(q, V)
    row = gl.program_id(0) * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
    bias = gl.zeros((16,), gl.float32, gl.SliceLayout(1, layout))
    if gl.program_id(0) * 16 < 4 * H:
        n = row % BN
        h = row // BN * BH + n % BH
        at = h[:, None] * C + c[None, :]
        place = gl.where((n < BH)[:, None], p_w + at, g_w + at)
        if p_b is not None:
            bias += gl.load(p_b + h, mask=n < BH, other=0.0).to(gl.float32)
        if g_b is not None:
            bias += gl.load(g_b + h, mask=n >= BH, other=0.0).to(gl.float32)
        _pack_rows(place, bias, w, b, to, biases, row, q, c, C)
    else:
        if o_w is not None:
            # Eight channels of a row follow each other in a thread.
            o = row_met(row - 4 * H, 8) if OUTPUT else row - 4 * H
            if o_b is not None:
                bias += gl.load(o_b + o).to(gl.float32)
            _pack_rows(o_w + o[:, None] * C + c[None, :], bias, w, b, to, biases, row, q, c, C)


# `gpukern.trimul.plan` aligns these pointers to 16 bytes.
POINTERS = {
    project_wide: ("x", "biases", "sides", "gate"),
    pack: ("p_w", "p_b", "g_w", "g_b", "o_w", "o_b", "w", "b", "to", "biases"),
}
