"""Projections and the end of the triangle multiplicative update, for Hopper's tensor cores.

The kernels compute the same as `gpukern.trimul.kernels`, with weights that stay in shared memory
while the warps of a program go through rows by themselves, without a barrier. Rows are the first
operand, in registers: a thread reads vectors of channels of its own, and the weights' columns are
in the order in which the tensor cores then meet them. Rows that go to planes are turned in a warp,
in blocks of 8 × 8 (`movmatrix`), so that every thread writes four edges of a channel at once.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from gpukern.constants import ONE
from gpukern.hopper import SHARED, barrier, sigmoid


class Way(NamedTuple):
    """The warps of a kernel, and the channels of a block."""

    warps: int
    block: int


def way_to_project(C: int, H: int, G: int, logits: bool) -> Way | None:
    """Return how `project` goes, or None where it can't serve."""
    # More warps wait less, and have fewer registers each.
    warps, block = (8, 64) if logits else (16, 32)
    fits = C in (64, 128) and H > 0 and H % block == 0 and G % (2 * block) == 0
    return Way(warps, block) if fits and 2 * C * (4 * H + G) + 8 * C <= SHARED else None


def way_to_finish(C: int, H: int, itemsize: int, split: bool) -> Way | None:
    """Return how `finish` goes, or None where it can't serve.

    A weight that is split has two parts.
    """
    warps, block = (16, 64) if C <= 128 else (8, 256 // itemsize)
    shared = 2 * C * H * (2 if split else 1) + 8 * H
    fits = H in (64, 128) and C % block == 0 and shared <= SHARED
    return Way(warps, block) if fits else None


PREFETCH = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
_TURN = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


@gluon.jit
def opened_from(s, DOT: gl.constexpr):
    """Return a gate from the form of `write_gate`."""
    if s.dtype == DOT:
        return s.to(gl.float32)
    else:
        return s.to(gl.float32) * (1 / ONE)


@gluon.constexpr_function
def powers(first, count):
    return [first << n for n in range(count)]


@gluon.constexpr_function
def log2(n):
    return int(n).bit_length() - 1


@gluon.constexpr_function
def rows_layout(W, C, V):
    """Return which edges and channels a thread reads: V channels at once, four threads a row.

    Edges of a warp are numbered such that, once turned, a thread has four that follow each other.
    """
    v, m = log2(V), log2(C // (4 * V))
    registers = [[0, c] for c in powers(1, v)] + [[2, 0]] + [[0, c] for c in powers(4 * V, m)]
    lanes = [[0, V], [0, 2 * V], [1, 0], [4, 0], [8, 0]]
    warps = [[r, 0] for r in powers(16, log2(W))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * W, C])


@gluon.constexpr_function
def planes_layout(W, H):
    """Return which channels and edges a thread reads: four edges of every eighth channel."""
    registers = [[0, 1], [0, 2]] + [[h, 0] for h in powers(8, log2(H // 8))]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warps = [[0, r] for r in powers(16, log2(W))]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [H, 16 * W])


@gluon.constexpr_function
def products_layout(W, columns):
    return gl.NVMMADistributedLayout([3, 0], [W, 1], [16, columns, 16])


@gluon.jit
def _columns_met(w, ROWS: gl.constexpr, C: gl.constexpr, V: gl.constexpr):
    """Return columns in the order in which rows of `rows_layout` meet them."""
    w = gl.reshape(w, (ROWS, C // (4 * V), 4, V // 2, 2))
    return gl.reshape(gl.permute(w, (0, 1, 3, 2, 4)), (ROWS, C))


@gluon.jit
def as_operand(x, W: gl.constexpr, BN: gl.constexpr):
    """Reinterpret `x` in the layout of the MMA's A operand."""
    layout: gl.constexpr = gl.DotOperandLayout(0, products_layout(W, BN), 2)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def as_met(x, W: gl.constexpr, C: gl.constexpr, V: gl.constexpr):
    """Return rows of `rows_layout` in the place of a first operand, without moving anything."""
    x = gl.reshape(x, (W, 4, 2, 2, C // (4 * V), 4, V // 2, 2))
    return gl.reshape(gl.permute(x, (0, 2, 1, 3, 4, 6, 5, 7)), (16 * W, C))


@gluon.jit
def _turned(x):
    """Return every block of 8 × 8 numbers of 16 bits, which a warp has, transposed."""
    # Not pure: the compiler must not skip it in any thread of a warp.
    return gl.inline_asm_elementwise(_TURN, "=r,r", [x], x.dtype, False, 2)


@gluon.jit
def _as_planes(x, W: gl.constexpr, H: gl.constexpr):
    """Return a product (edges, H), in 16 bits, as (H, edges)."""
    x = gl.reshape(_turned(x), (W, 2, 8, H // 8, 4, 2))
    return gl.reshape(gl.permute(x, (3, 2, 0, 4, 1, 5)), (H, 16 * W))


@gluon.jit
def _planes_of(at, first, rows, plane, W: gl.constexpr, H: gl.constexpr, V: gl.constexpr):
    """Return the places of planes' edges, in the order of `row_met`, and which edges exist."""
    layout: gl.constexpr = planes_layout(W, H)
    edge = first + gl.arange(0, 16 * W, gl.SliceLayout(0, layout))
    h = row_met(gl.arange(0, H, gl.SliceLayout(1, layout)), V).to(plane.dtype)
    return at + (h * plane)[:, None] + edge[None, :], (edge < rows)[None, :]


@gluon.jit
def read_planes(
    at, first, rows, plane, W: gl.constexpr, H: gl.constexpr, V: gl.constexpr = 2
):  # fmt: skip
    """Return (H, edges) of planes."""
    place, inside = _planes_of(at, first, rows, plane, W, H, V)
    return gl.load(place, mask=inside, other=0.0)


@gluon.jit
def turned_planes(x, W: gl.constexpr, H: gl.constexpr):
    """Return (H, edges) of `planes_layout` as (edges, H) in the place of a first operand."""
    x = gl.permute(gl.reshape(x, (H // 8, 8, W, 4, 2, 2)), (2, 4, 1, 0, 3, 5))
    return _turned(gl.reshape(x, (16 * W, H)))


@gluon.jit
def as_rows(x, W: gl.constexpr, BN: gl.constexpr, V: gl.constexpr):
    """Return a product (edges, BN) as rows; `row_met` has ordered the weight's rows."""
    x = gl.reshape(x, (W, 2, 4, 2, BN // (4 * V), V // 2, 4, 2))
    x = gl.reshape(gl.permute(x, (0, 2, 1, 3, 4, 6, 5, 7)), (16 * W, BN))
    return gl.convert_layout(x, rows_layout(W, BN, V), assert_trivial=True)


@gluon.jit
def _from_planes(at, first, rows, plane, W: gl.constexpr, H: gl.constexpr):
    """Return (edges, H) of planes in the place of a first operand."""
    return turned_planes(read_planes(at, first, rows, plane, W, H), W, H)


@gluon.jit
def edge_met(row):
    """Return the edge in a row of a first operand."""
    return row // 16 * 16 + row % 8 // 2 * 4 + row // 8 % 2 * 2 + row % 2


@gluon.jit
def row_met(n, V: gl.constexpr):
    """Return the weight's row that gives a thread V elements of a row in sequence."""
    return n // (4 * V) * (4 * V) + n // 2 % 4 * V + n // 8 % (V // 2) * 2 + n % 2


@gluon.jit
def norm_at_hand(w, b, C: gl.constexpr, W: gl.constexpr, V: gl.constexpr = 2):
    """Bring a norm's weight and bias to shared memory, in the order of `row_met`."""
    # Streamed rows would evict them from the first-level cache.
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    norm = gl.allocate_shared_memory(gl.float32, [2, C], shared)
    c = row_met(gl.arange(0, C, gl.BlockedLayout([C // 32], [32], [W], [0])), V)
    if w is not None:
        norm.index(0).store(gl.load(w + c).to(gl.float32))
    if b is not None:
        norm.index(1).store(gl.load(b + c).to(gl.float32))
    return norm


@gluon.jit
def standardized(x, eps, C: gl.constexpr):
    """Return rows, less their means, over their deviations, and 1 over the deviations."""
    x -= (gl.sum(x, 1) / C)[:, None]
    scale = gl.rsqrt(gl.sum(x * x, 1) / C + eps)[:, None]
    return x * scale, scale


@gluon.jit
def normed(y, norm, w, b):
    """Return standardized rows times a norm's weight, plus its bias."""
    layout: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    if w is not None:
        y *= norm.index(0).load(layout)[None, :]
    if b is not None:
        y += norm.index(1).load(layout)[None, :]
    return y


@gluon.jit
def write_planes(
    to, value, first, rows, plane, W: gl.constexpr, H: gl.constexpr, V: gl.constexpr = 2
):  # fmt: skip
    """Write a product (edges, H), in 16 bits, to planes."""
    place, inside = _planes_of(to, first, rows, plane, W, H, V)
    value = gl.convert_layout(_as_planes(value, W, H), planes_layout(W, H), assert_trivial=True)
    gl.store(place, value, mask=inside)


@gluon.jit
def write_rows(to, value, first, rows, G: gl.constexpr, W: gl.constexpr, BN: gl.constexpr):
    """Write a product (edges, BN) to rows (rows, G)."""
    value = as_rows(value, W, BN, 8)
    layout: gl.constexpr = value.type.layout
    edge = gl.arange(0, 16 * W, gl.SliceLayout(1, layout))
    c = gl.arange(0, BN, gl.SliceLayout(0, layout))
    inside = (first + edge < rows)[:, None]
    gl.store(to + edge[:, None] * G + c[None, :], value, mask=inside)


@gluon.jit
def weights_are_there():
    hopper.fence_async_shared()
    # Without a barrier here, the compiler puts one before every product.
    barrier()


@gluon.jit
def fill_weights(
    weights, p_w, g_w, o_w,
    SIDES: gl.constexpr, GATES: gl.constexpr, OUTPUT: gl.constexpr, V: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """Fill blocks of weights, each with a projection and its gate, or with the last gate."""
    BN: gl.constexpr = weights.shape[1]
    C: gl.constexpr = weights.shape[2]
    BH: gl.constexpr = BN // 2
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    n = gl.arange(0, BN, gl.SliceLayout(1, blocked))
    c = gl.arange(0, C, gl.SliceLayout(0, blocked))[None, :]
    # All loads are in flight before the first arrives.
    read = ()
    for k in gl.static_range(SIDES):
        at = (k * BH + n % BH)[:, None] * C + c
        read = read + (gl.load(gl.where((n < BH)[:, None], p_w + at, g_w + at)),)
    for k in gl.static_range(GATES):
        # Eight channels of a row follow each other in a thread.
        row = k * BN + (row_met(n, 8) if OUTPUT else n)
        read = read + (gl.load(o_w + row[:, None] * C + c),)
    for k in gl.static_range(SIDES + GATES):
        weights.index(k).store(_columns_met(read[k].to(weights.dtype), BN, C, V))
    weights_are_there()


@gluon.jit
def write_sides(
    both, m, p_b, g_b, sides, logits, block, member, first, rows, half, plane,
    H: gl.constexpr, W: gl.constexpr, BH: gl.constexpr, DOT: gl.constexpr,
):  # fmt: skip
    """Write a block of left or right, and the logits of its gate, from both products."""
    p, g = gl.split(gl.permute(gl.reshape(both, (16 * W, 2, BH)), (0, 2, 1)))
    h = block * BH + gl.arange(0, BH, gl.SliceLayout(0, p.type.layout))
    if p_b is not None:
        p += gl.load(p_b + h).to(gl.float32)[None, :]
    if g_b is not None:
        g += gl.load(g_b + h).to(gl.float32)[None, :]
    side = p * sigmoid(g)
    if m is not None:
        side *= gl.convert_layout(m, side.type.layout, assert_trivial=True)
    at = block * BH // H * half + (member * H + block * BH % H) * plane
    write_planes(sides + at, side.to(DOT), first, rows, plane, W, BH)
    if logits is not None:
        write_planes(logits + at, g.to(DOT), first, rows, plane, W, BH)


@gluon.jit
def write_gate(
    value, o_b, gate, column, block, member, first, rows,
    OUTPUT: gl.constexpr, G: gl.constexpr, W: gl.constexpr, DOT: gl.constexpr,
):  # fmt: skip
    """Write a block of the last gate from a product."""
    BN: gl.constexpr = value.type.shape[1]
    if o_b is not None:
        value += gl.load(o_b + block * BN + column).to(gl.float32)[None, :]
    value = sigmoid(value)
    if gate.dtype.element_ty != DOT:
        value *= ONE
    value = value.to(gate.dtype.element_ty)
    if OUTPUT:
        to = gate + (member * rows + first) * G + block * BN
        write_rows(to, value, first, rows, G, W, BN)
    else:
        to = gate + (member * G + block * BN) * rows
        write_planes(to, value, first, rows, rows.to(member.dtype), W, BN)


@gluon.jit
def place_of(tile, tiles, rows, BM: gl.constexpr, LONG: gl.constexpr):
    """Return a tile's member of the batch, its first row there, and its first row of all."""
    member = (tile // tiles).to(LONG)
    first = tile % tiles * BM
    return member, first, member * rows + first


@gluon.jit
def mask_of(mask, member, edge, rows, N, mask_b, mask_i, mask_j):
    """Return the mask of edges, zero where there are none."""
    i, j = edge // N, edge % N
    at = mask + member * mask_b + i * mask_i + j * mask_j
    return gl.load(at, mask=edge < rows, other=0.0).to(gl.float32)[:, None]


@gluon.jit
def prefetch(x, tile, tiles, rows, C: gl.constexpr, W: gl.constexpr, LONG: gl.constexpr):
    """Have rows of a tile brought to the second-level cache."""
    LINE: gl.constexpr = 1024 // x.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = C // LINE
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [W, 1], [1, 0])
    member, first, _ = place_of(tile, tiles, rows, 16 * W, LONG)
    row = first + gl.arange(0, 16 * W, gl.SliceLayout(1, layout))
    here = member * rows + gl.minimum(row, rows - 1)
    line = gl.arange(0, LINES, gl.SliceLayout(0, layout))
    at = x + here[:, None] * C + (line * LINE)[None, :]
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [at.to(gl.int64)], gl.int32, False, 1)


def project(
    x, mask, w, b, p_w, p_b, g_w, g_b, o_w, o_b, sides, logits, gate,
    members, rows, N, half, plane, mask_b, mask_i, mask_j,
    EPS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, OUTPUT: gl.constexpr,
    V: gl.constexpr, W: gl.constexpr, BH: gl.constexpr, DOT: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """Write left and right, the last gate, and for a backward pass the logits of sides' gates."""
    BM: gl.constexpr = 16 * W
    BN: gl.constexpr = 2 * BH
    SIDES: gl.constexpr = 2 * H // BH
    GATES: gl.constexpr = 0 if gate is None else G // BN
    shape: gl.constexpr = [SIDES + GATES, BN, C]
    weights = gl.allocate_shared_memory(DOT, shape, gl.NVMMASharedLayout(128, 16))
    norm = norm_at_hand(w, b, C, W)
    fill_weights(weights, p_w, g_w, o_w, SIDES, GATES, OUTPUT, V, W)

    layout: gl.constexpr = rows_layout(W, C, V)
    mma: gl.constexpr = products_layout(W, BN)
    edge = gl.arange(0, BM, gl.SliceLayout(1, layout))
    channel = gl.arange(0, C, gl.SliceLayout(0, layout))
    met = edge_met(gl.arange(0, BM, gl.SliceLayout(1, mma)))
    column = gl.arange(0, BN, gl.SliceLayout(0, mma))
    if OUTPUT:
        column = row_met(column, 8)
    zeros = gl.zeros((BM, BN), gl.float32, mma)
    plane = plane.to(LONG) // 8 * 8
    half = half.to(LONG) // 8 * 8
    rows = rows // 8 * 8
    tiles = (rows + BM - 1) // BM
    for tile in range(gl.program_id(0), members * tiles, gl.num_programs(0)):
        member, first, here = place_of(tile, tiles, rows, BM, LONG)
        live = (first + edge < rows)[:, None]
        y = gl.load(x + here * C + edge[:, None] * C + channel[None, :], mask=live, other=0.0)
        y, _ = standardized(y.to(gl.float32), EPS, C)
        y = normed(y, norm, w, b).to(DOT)
        # The last tile has no successor, and prefetches itself.
        following = gl.minimum(tile + gl.num_programs(0), members * tiles - 1)
        prefetch(x, following, tiles, rows, C, W, LONG)
        operand = as_operand(as_met(y, W, C, V), W, BN)
        m = None
        if mask is not None:
            m = mask_of(mask, member, first + met, rows, N, mask_b, mask_i, mask_j)
        for s in range(SIDES):
            pair = weights.index(s).permute((1, 0))
            both = hopper.warpgroup_mma(operand, pair, zeros, use_acc=False)
            write_sides(
                both, m, p_b, g_b, sides, logits, s, member, first, rows, half, plane,
                H, W, BH, DOT,
            )  # fmt: skip
        if gate is not None:
            for s in range(GATES):
                weight = weights.index(SIDES + s).permute((1, 0))
                value = hopper.warpgroup_mma(operand, weight, zeros, use_acc=False)
                write_gate(value, o_b, gate, column, s, member, first, rows, OUTPUT, G, W, DOT)


def finish(
    o, gate, w, b, p_w, p_b, out, members, rows, plane, shift,
    EPS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, OUTPUT: gl.constexpr,
    V: gl.constexpr, W: gl.constexpr, BN: gl.constexpr, DOT: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """Write the output: o, given times a power of two, normalized, gated and projected."""
    BM: gl.constexpr = 16 * W
    BLOCKS: gl.constexpr = C // BN
    # A weight of 32 bits has two parts, the second its rounding error.
    SPLIT: gl.constexpr = DOT == gl.bfloat16 and p_w.dtype.element_ty == gl.float32
    shape: gl.constexpr = [2 * BLOCKS if SPLIT else BLOCKS, BN, H]
    weights = gl.allocate_shared_memory(DOT, shape, gl.NVMMASharedLayout(128, 16))
    norm = norm_at_hand(w, b, H, W)
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    n = row_met(gl.arange(0, BN, gl.SliceLayout(1, blocked)), V)
    h = gl.arange(0, H, gl.SliceLayout(0, blocked))
    read = ()
    for k in gl.static_range(BLOCKS):
        read = read + (gl.load(p_w + (k * BN + n)[:, None] * H + h[None, :]),)
    for k in gl.static_range(BLOCKS):
        rounded = read[k].to(DOT)
        weights.index(k).store(rounded)
        if SPLIT:
            weights.index(BLOCKS + k).store((read[k] - rounded.to(gl.float32)).to(DOT))
    weights_are_there()

    plane = plane.to(LONG) // 8 * 8
    rows = rows // 8 * 8
    layout: gl.constexpr = rows_layout(W, BN, V)
    edge = gl.arange(0, BM, gl.SliceLayout(1, layout))
    channel = gl.arange(0, BN, gl.SliceLayout(0, layout))
    zeros = gl.zeros((BM, BN), gl.float32, products_layout(W, BN))
    # The norm of a scaled o is the norm of o with another eps.
    eps = gl.exp2((2 * shift).to(gl.float32)) * EPS
    tiles = (rows + BM - 1) // BM
    for tile in range(gl.program_id(0), members * tiles, gl.num_programs(0)):
        member, first, here = place_of(tile, tiles, rows, BM, LONG)
        live = (first + edge < rows)[:, None]
        y = _from_planes(o + member * H * plane, first, rows, plane, W, H)
        y, _ = standardized(y.to(gl.float32), eps, H)
        y = normed(y, norm, w, b)
        if not OUTPUT:
            opened = _from_planes(gate + member * H * rows, first, rows, rows.to(LONG), W, H)
            y *= opened_from(opened, DOT)
        operand = as_operand(y.to(DOT), W, BN)
        for s in range(BLOCKS):
            at = here * C + edge[:, None] * C + (s * BN + channel)[None, :]
            if OUTPUT:
                opened_rows = gl.load(gate + at, mask=live, other=0.0)
            weight = weights.index(s).permute((1, 0))
            value = hopper.warpgroup_mma(operand, weight, zeros, use_acc=False)
            if SPLIT:
                rest = weights.index(BLOCKS + s).permute((1, 0))
                value = hopper.warpgroup_mma(operand, rest, value)
            value = as_rows(value, W, BN, V)
            if p_b is not None:
                value += gl.load(p_b + s * BN + channel).to(gl.float32)[None, :]
            if OUTPUT:
                value *= opened_from(opened_rows, DOT)
            gl.store(out + at, value.to(out.dtype.element_ty), mask=live)


# `gpukern.trimul.plan` aligns these pointers to 16 bytes.
POINTERS = {
    project: (
        *("x", "w", "b", "p_w", "p_b", "g_w", "g_b", "o_w", "o_b", "sides", "logits", "gate"),
    ),
    finish: ("o", "gate", "w", "b", "p_w", "p_b", "out"),
}
