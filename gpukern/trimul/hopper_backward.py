"""The backward of the triangle multiplicative update, for Hopper's tensor cores.

These kernels use the layouts of `gpukern.trimul.hopper`, and weights stay in shared memory. Sums
over rows are of standardized rows, not normalized ones: the cotangents of a norm's weight and bias
and of the weights behind it follow from the same sums (`through_norm`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from gpukern.hopper import SHARED, anew, barrier, sigmoid
from gpukern.trimul.hopper import (
    PREFETCH,
    Way,
    as_met,
    as_operand,
    as_rows,
    edge_met,
    fill_weights,
    mask_of,
    norm_at_hand,
    normed,
    opened_from,
    place_of,
    planes_layout,
    prefetch,
    products_layout,
    read_planes,
    row_met,
    rows_layout,
    standardized,
    turned_planes,
    weights_are_there,
    write_planes,
    write_rows,
)

# Names since Triton 3.8 and 3.9, or before.
_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def way_to_finish_back(C: int, H: int) -> int | None:
    """Return the warps of `finish_back`, or None where it can't serve."""
    return 8 if C in (64, 128) and H in (64, 128) else None


def way_to_project_back(C: int, H: int, G: int) -> Way | None:
    """Return how `project_back` goes, or None where it can't serve."""
    warps, block = 8, 32
    # Weights, a tile of the sides' cotangents, and a norm.
    shared = 2 * C * (4 * H + G) + 64 * H * warps + 8 * C
    fits = C in (64, 128) and H in (64, 128) and shared <= SHARED
    return Way(warps, block) if fits else None


@gluon.constexpr_function
def _weight_layout(W, C, N):
    """Return the layout of the cotangent of a weight (C, N)."""
    return gl.NVMMADistributedLayout([3, 0], [C // 16, W * 16 // C], [16, N * C // 16 // W, 16])


@gluon.constexpr_function
def _beside(W, C):
    """Return the least columns of a weight's cotangent."""
    return W * 128 // C


@gluon.jit
def _prefetch_planes(
    x, tile, tiles, rows, plane, H: gl.constexpr, W: gl.constexpr, LONG: gl.constexpr
):
    """Have planes of a tile brought to the second-level cache."""
    LINES: gl.constexpr = W // 4
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [W, 1], [1, 0])
    member, first, _ = place_of(tile, tiles, rows, 16 * W, LONG)
    h = gl.arange(0, H, gl.SliceLayout(1, layout)).to(LONG)
    edge = first + 64 * gl.arange(0, LINES, gl.SliceLayout(0, layout))
    edge = gl.minimum(edge, rows - 1)
    at = x + member * (H * plane) + (h * plane)[:, None] + edge[None, :]
    gl.inline_asm_elementwise(PREFETCH, "=r,l", [at.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def _beside_it(a, b):
    """Return the columns of a, then the columns of b."""
    BM: gl.constexpr = a.type.shape[0]
    BN: gl.constexpr = a.type.shape[1]
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (BM, 2 * BN))


@gluon.jit
def _part(tile, at: gl.constexpr, layout: gl.constexpr, t: gl.constexpr, BN: gl.constexpr):
    """Return a block of a vector in shared memory."""
    return tile.index(anew(gl.to_tensor(at))).slice(t * BN, BN).load(layout)[None, :]


@gluon.jit
def _normed_part(y, norm, w, b, t: gl.constexpr):
    """Return a block of columns times a norm's weight, plus its bias."""
    BN: gl.constexpr = y.type.shape[1]
    layout: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    if w is not None:
        y *= _part(norm, 0, layout, t, BN)
    if b is not None:
        y += _part(norm, 1, layout, t, BN)
    return y


@gluon.jit
def _back(g_tile, weights, zeros, t: gl.constexpr, LATER: gl.constexpr):
    """Return a block of columns of the cotangent of the normalized (and gated) o."""
    BN: gl.constexpr = zeros.type.shape[1]
    zero = anew(gl.to_tensor(0))
    weight = weights.index(zero).slice(t * BN, BN, 1)
    g = g_tile.index(zero)
    return hopper.warpgroup_mma(g, weight, zeros, use_acc=False, is_async=LATER)


@gluon.jit
def _of_tile(tile, like, t: gl.constexpr):
    """Return a block of columns of a tile in shared memory, in the layout of products."""
    BN: gl.constexpr = like.type.shape[1]
    tile = tile.index(anew(gl.to_tensor(0))).slice(t * BN, BN, 1)
    return tile.load(like.type.layout).to(gl.float32)


@gluon.jit
def _write_sums(to, value, first, V: gl.constexpr, VH: gl.constexpr, KEPT: gl.constexpr):
    """Write a cotangent of a weight, some columns of it, or just the first eight."""
    layout: gl.constexpr = value.type.layout
    row = row_met(gl.arange(0, value.type.shape[0], gl.SliceLayout(1, layout)), V)
    column = gl.arange(0, value.type.shape[1], gl.SliceLayout(0, layout))
    at = to + row[:, None] * KEPT + first + row_met(column, VH)[None, :]
    gl.store(at, value, mask=(first + column < KEPT)[None, :])


def finish_back(
    o, gate, dout, scaling, w, b, p_w, p_b, do, dgate, sums,
    members, rows, plane, do_plane, shift,
    EPS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, OUTPUT: gl.constexpr,
    V: gl.constexpr, W: gl.constexpr, DOT: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """Write the cotangents of o, given times a power of two, and of the last gate's logits.

    Write also every program's sums over rows: of g y, with g the cotangent of the last projection
    and y the standardized o, times the gate e unless e gates the output; then of g e, where b is
    given; and of g, eight times.
    """
    BM: gl.constexpr = 16 * W
    BN: gl.constexpr = 64
    BLOCKS: gl.constexpr = C // BN
    # With a hidden gate, threads write vectors of eight channels of its cotangent.
    VH: gl.constexpr = 2 if OUTPUT else 8
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ONES: gl.constexpr = _beside(W, C)
    weights = gl.allocate_shared_memory(DOT, [1, C, H], shared)
    g_tile = gl.allocate_shared_memory(DOT, [1, BM, C], shared)
    # Tiles of the standardized o, of the gate, and of their product.
    y_tile = gl.allocate_shared_memory(DOT, [1, BM, H], shared)
    e_tile = y_tile if OUTPUT else gl.allocate_shared_memory(DOT, [1, BM, H], shared)
    p_tile = y_tile if OUTPUT else gl.allocate_shared_memory(DOT, [1, BM, H], shared)
    ones = gl.allocate_shared_memory(DOT, [1, ONES, BM], shared)

    # With an output's gate, the norm's weight and bias become part of the projection.
    norm = norm_at_hand(None if OUTPUT else w, None if OUTPUT else b, H, W, VH)
    OFFSET: gl.constexpr = b is not None and not OUTPUT
    ADDED: gl.constexpr = OUTPUT and (p_b is not None or b is not None)
    behind = gl.allocate_shared_memory(gl.float32, [1, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    c = gl.arange(0, C, gl.SliceLayout(1, blocked))
    h = gl.arange(0, H, gl.SliceLayout(0, blocked))
    n, k = row_met(c, V), row_met(h, VH)
    by_w = gl.load(p_w + n[:, None] * H + k[None, :]).to(gl.float32)
    if OUTPUT and w is not None:
        by_w *= gl.load(w + k).to(gl.float32)[None, :]
    weights.index(0).store(by_w.to(DOT))
    if ADDED:
        added = gl.zeros((C,), gl.float32, gl.SliceLayout(1, blocked))
        if b is not None:
            by_b = gl.load(p_w + c[:, None] * H + h[None, :]).to(gl.float32)
            added += gl.sum(by_b * gl.load(b + h).to(gl.float32)[None, :], 1)
        if p_b is not None:
            added += gl.load(p_b + c).to(gl.float32)
        behind.index(0).store(added)
    ones.index(0).store(gl.full((ONES, BM), 1.0, DOT, blocked))
    weights_are_there()

    products: gl.constexpr = products_layout(W, BN)
    layout: gl.constexpr = rows_layout(W, BN, V)
    edge = gl.arange(0, BM, gl.SliceLayout(1, layout))
    channel = gl.arange(0, BN, gl.SliceLayout(0, layout))
    zeros = gl.zeros((BM, BN), gl.float32, products)
    dp_w = gl.zeros((C, H), gl.float32, _weight_layout(W, C, H))
    de = gl.zeros((C, H), gl.float32, _weight_layout(W, C, H))
    db = gl.zeros((C, ONES), gl.float32, _weight_layout(W, C, ONES))
    plane = plane.to(LONG) // 8 * 8
    do_plane = do_plane.to(LONG) // 8 * 8
    rows = rows // 8 * 8
    flat = rows.to(LONG)
    power = shift.to(gl.float32)
    # The norm of a scaled o is the norm of o with another eps.
    eps = gl.exp2(2 * power) * EPS
    tiles = (rows + BM - 1) // BM
    last = members * tiles - 1
    for tile in range(gl.program_id(0), members * tiles, gl.num_programs(0)):
        member, first, here = place_of(tile, tiles, rows, BM, LONG)
        live = (first + edge < rows)[:, None]
        at = here * C + edge[:, None] * C + channel[None, :]
        # Registers can't keep the addresses of so many planes from tile to tile.
        y = read_planes(o + member * H * plane, first, rows, anew(plane) // 8 * 8, W, H, VH)
        if OUTPUT:
            opened = gl.load(gate + at, mask=live, other=0.0)
            g = gl.load(dout + at, mask=live, other=0.0)
        # The last tile has no successor, and prefetches itself.
        following = gl.minimum(tile + gl.num_programs(0), last)
        _prefetch_planes(o, following, tiles, rows, plane, H, W, LONG)
        prefetch(dout, following, tiles, rows, C, W, LONG)
        if OUTPUT:
            prefetch(gate, following, tiles, rows, C, W, LONG)
        else:
            _prefetch_planes(gate, following, tiles, rows, flat, H, W, LONG)
        y, scale = standardized(turned_planes(y, W, H).to(gl.float32), eps, H)
        y = y.to(DOT)
        if not OUTPUT:
            # Before, there are no registers for the gate.
            to_gate = gate + member * H * flat
            opened = read_planes(to_gate, first, rows, anew(flat) // 8 * 8, W, H, VH)
        # All products of the previous tile must be done before shared memory is written.
        barrier()
        # `anew` keeps addresses in shared memory out of registers, too.
        zero = anew(gl.to_tensor(0))
        y_tile.index(zero).store(y)
        if OUTPUT:
            operand = as_operand(y, W, BN)
        else:
            e = opened_from(turned_planes(opened, W, H), DOT)
            e_tile.index(zero).store(e.to(DOT))
            p_tile.index(zero).store((y.to(gl.float32) * e).to(DOT))
        for s in gl.static_range(BLOCKS):
            if not OUTPUT:
                g = gl.load(dout + s * BN + at, mask=live, other=0.0)
            g_now = g.to(gl.float32)
            if scaling is not None:
                g_now *= gl.load(scaling)
            if OUTPUT and s < BLOCKS - 1:
                g = gl.load(dout + (s + 1) * BN + at, mask=live, other=0.0)
            if OUTPUT:
                s_now = opened_from(opened, DOT)
                if s < BLOCKS - 1:
                    opened = gl.load(gate + (s + 1) * BN + at, mask=live, other=0.0)
                weight = weights.index(zero).slice(s * BN, BN).permute((1, 0))
                value = hopper.warpgroup_mma(operand, weight, zeros, use_acc=False)
                value = as_rows(value, W, BN, V)
                if ADDED:
                    value += _part(behind, 0, gl.SliceLayout(0, layout), s, BN)
                g_now *= s_now
                to = dgate + s * BN + at
                gl.store(to, (g_now * value * (1 - s_now)).to(DOT), mask=live)
            g_met = as_operand(as_met(g_now.to(DOT), W, BN, V), W, BN)
            if s == 0:
                g_all = g_met
            else:
                g_all = _beside_it(g_all, g_met)
        # One store: the compiler would put a barrier between two.
        g_tile.index(zero).store(g_all)
        hopper.fence_async_shared()
        barrier()
        kept = ()
        if OUTPUT:
            for t in gl.static_range(H // BN):
                kept = kept + (_back(g_tile, weights, zeros, t, True),)
        turned = g_tile.index(zero).permute((1, 0))
        dp_w = hopper.warpgroup_mma(turned, p_tile.index(zero), dp_w, is_async=OUTPUT)
        if OFFSET:
            de = hopper.warpgroup_mma(turned, e_tile.index(zero), de)
        every = ones.index(zero).permute((1, 0))
        db = hopper.warpgroup_mma(turned, every, db, is_async=OUTPUT)
        if OUTPUT:
            # The last two products go on.
            if H > BN:
                kept = hopper.warpgroup_mma_wait(2, deps=kept)
            else:
                kept = (hopper.warpgroup_mma_wait(2, deps=kept),)
        total = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, products))
        along = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, products))
        for t in gl.static_range(H // BN):
            v = kept[t] if OUTPUT else _back(g_tile, weights, zeros, t, False)
            y_met = _of_tile(y_tile, zeros, t)
            if not OUTPUT:
                e_met = _of_tile(e_tile, zeros, t)
                v *= e_met
                on = _normed_part(y_met, norm, w, b, t)
                dopen = (v * on * (1 - e_met)).to(DOT)
                write_rows(dgate + here * H + t * BN, dopen, first, rows, H, W, BN)
                v = _normed_part(v, norm, w, None, t)
            total += gl.sum(v, 1)
            along += gl.sum(v * y_met, 1)
        scale = gl.convert_layout(scale, zeros.type.layout, assert_trivial=True) * gl.exp2(power)
        total = total[:, None] / H * scale
        along = along[:, None] / H * scale
        for t in gl.static_range(H // BN):
            if OUTPUT:
                u = kept[t]
            else:
                # Computed again: registers are scarce.
                u = _back(g_tile, weights, zeros, t, False) * _of_tile(e_tile, zeros, t)
                u = _normed_part(u, norm, w, None, t)
            u = u * scale - total - _of_tile(y_tile, zeros, t) * along
            to_o = do + (member * H + t * BN) * do_plane
            write_planes(to_o, u.to(DOT), first, rows, anew(do_plane) // 8 * 8, W, BN, VH)
        if OUTPUT:
            dp_w = hopper.warpgroup_mma_wait(0, deps=[dp_w])
            db = hopper.warpgroup_mma_wait(0, deps=[db])

    KEPT: gl.constexpr = 2 * H + 8 if OFFSET else H + 8
    to = sums + gl.program_id(0) * C * KEPT
    _write_sums(to, dp_w, 0, V, VH, KEPT)
    if OFFSET:
        _write_sums(to, de, H, V, VH, KEPT)
    _write_sums(to, db, KEPT - 8, V, 2, KEPT)


@gluon.jit
def _copy_planes(
    buffer, dsides, tile, tiles, rows, half, plane,
    H: gl.constexpr, W: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """Have a tile of both sides' planes brought to shared memory."""
    BM: gl.constexpr = 16 * W
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BM, BM // 8], [W, 1], [1, 0])
    member, first, _ = place_of(tile, tiles, rows, BM, LONG)
    edge = first + gl.arange(0, BM, gl.SliceLayout(0, layout))
    h = gl.arange(0, 2 * H, gl.SliceLayout(1, layout)).to(LONG)
    line = h // H * half + (member * H + h % H) * plane
    to = dsides + line[:, None] + edge[None, :]
    _load(buffer, to, mask=(edge < rows)[None, :])
    async_copy.commit_group()


@gluon.jit
def _keep(to, y, first, rows, KEPT: gl.constexpr, W: gl.constexpr):
    """Write rows, each with a one and seven zeros behind."""
    C: gl.constexpr = y.type.shape[1]
    layout: gl.constexpr = y.type.layout
    edge = gl.arange(0, 16 * W, gl.SliceLayout(1, layout))
    channel = gl.arange(0, C, gl.SliceLayout(0, layout))
    at = to + edge[:, None] * KEPT + channel[None, :]
    gl.store(at, y, mask=(first + edge < rows)[:, None])
    ones: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])
    below = gl.arange(0, 16 * W, gl.SliceLayout(1, ones))
    behind = gl.arange(0, 8, gl.SliceLayout(0, ones))
    one = gl.where((behind == 0)[None, :], 1.0, 0.0).to(y.dtype)
    at_one = to + C + below[:, None] * KEPT + behind[None, :]
    gl.store(at_one, one, mask=(first + below < rows)[:, None])


def project_back(
    x, mask, w, b, p_w, p_b, g_w, g_b, o_w, dsides, dp, dg, dgate, scaling, dx, kept,
    members, rows, N, half, plane, dsides_half, dsides_plane, mask_b, mask_i, mask_j,
    EPS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, KEPT: gl.constexpr,
    V: gl.constexpr, W: gl.constexpr, BH: gl.constexpr, DOT: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """Write the cotangents of x, of projections and of logits; `dsides` may be their memory.

    Write also `kept`, the standardized x with a column of ones.
    """
    BM: gl.constexpr = 16 * W
    BN: gl.constexpr = 2 * BH
    SIDES: gl.constexpr = 2 * H // BH
    GATES: gl.constexpr = G // BN
    shape: gl.constexpr = [SIDES + GATES, BN, C]
    weights = gl.allocate_shared_memory(DOT, shape, gl.NVMMASharedLayout(128, 16))
    norm = norm_at_hand(w, b, C, W)
    fill_weights(weights, p_w, g_w, o_w, SIDES, GATES, True, V, W)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 4, [1, 0])
    buffer = gl.allocate_shared_memory(DOT, [2 * H, BM], swizzled)
    if _REINTERPRETS:
        blocks = buffer.reinterpret(DOT, [SIDES, BH, BM], swizzled)
    else:
        blocks = buffer._reinterpret(DOT, [SIDES, BH, BM], swizzled)

    layout: gl.constexpr = rows_layout(W, C, V)
    across: gl.constexpr = rows_layout(W, BN, 8)
    mma: gl.constexpr = products_layout(W, BN)
    edge = gl.arange(0, BM, gl.SliceLayout(1, layout))
    channel = gl.arange(0, C, gl.SliceLayout(0, layout))
    opening = gl.arange(0, BM, gl.SliceLayout(1, across))[:, None]
    column = gl.arange(0, BN, gl.SliceLayout(0, across))[None, :]
    met = edge_met(gl.arange(0, BM, gl.SliceLayout(1, mma)))
    zeros = gl.zeros((BM, BN), gl.float32, mma)
    plane = plane.to(LONG) // 8 * 8
    half = half.to(LONG) // 8 * 8
    dsides_plane = dsides_plane.to(LONG) // 8 * 8
    dsides_half = dsides_half.to(LONG) // 8 * 8
    rows = rows // 8 * 8
    tiles = (rows + BM - 1) // BM
    if gl.program_id(0) < members * tiles:
        _copy_planes(
            buffer, dsides, gl.program_id(0), tiles, rows, dsides_half, dsides_plane, H, W, LONG
        )
    for tile in range(gl.program_id(0), members * tiles, gl.num_programs(0)):
        member, first, here = place_of(tile, tiles, rows, BM, LONG)
        live = (first + edge < rows)[:, None]
        at_x = here * C + edge[:, None] * C + channel[None, :]
        y = gl.load(x + at_x, mask=live, other=0.0).to(gl.float32)
        opens = ()
        for k in gl.static_range(GATES):
            at_gate = dgate + (here + opening) * G + k * BN + column
            opens = opens + (gl.load(at_gate, mask=first + opening < rows, other=0.0),)
        y, scale = standardized(y, EPS, C)
        standard = y.to(DOT)
        following = gl.minimum(tile + gl.num_programs(0), members * tiles - 1)
        prefetch(x, following, tiles, rows, C, W, LONG)
        prefetch(dgate, following, tiles, rows, G, W, LONG)
        _keep(kept + here * KEPT, standard, first, rows, KEPT, W)
        y = normed(y, norm, w, b).to(DOT)
        operand = as_operand(as_met(y, W, C, V), W, BN)
        m = None
        if mask is not None:
            m = mask_of(mask, member, first + met, rows, N, mask_b, mask_i, mask_j)
        dxn = gl.zeros((BM, C), gl.float32, products_layout(W, C))
        for k in gl.static_range(GATES):
            dxn = hopper.warpgroup_mma(
                as_operand(as_met(opens[k], W, BN, 8), W, C), weights.index(SIDES + k), dxn
            )
        async_copy.wait_group(0)
        barrier()
        dxn_acc = hopper.warpgroup_mma_init(dxn)
        coming = hopper.warpgroup_mma(
            operand, weights.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        for s in range(SIDES):
            at = s * BH // H * half + (member * H + s * BH % H) * plane
            d = turned_planes(blocks.index(s).load(planes_layout(W, BH)), W, BH)
            both, dxn_there = hopper.warpgroup_mma_wait(0, deps=[coming, dxn_acc])
            p, g = gl.split(gl.permute(gl.reshape(both, (BM, 2, BH)), (0, 2, 1)))
            h = s * BH + gl.arange(0, BH, gl.SliceLayout(0, p.type.layout))
            if p_b is not None:
                p += gl.load(p_b + h).to(gl.float32)[None, :]
            if g_b is not None:
                g += gl.load(g_b + h).to(gl.float32)[None, :]
            opened = sigmoid(g)
            dp_now = gl.convert_layout(d, p.type.layout, assert_trivial=True).to(gl.float32)
            dp_now *= opened
            if m is not None:
                dp_now *= gl.convert_layout(m, p.type.layout, assert_trivial=True)
            dg_now = (dp_now * p * (1 - opened)).to(DOT)
            dp_16 = dp_now.to(DOT)
            dboth = gl.reshape(gl.permute(gl.join(dp_16, dg_now), (0, 2, 1)), (BM, BN))
            dxn_acc = hopper.warpgroup_mma(
                as_operand(dboth, W, C), weights.index(s), dxn_there, is_async=True
            )
            # The next block's product begins here; nothing reads the last.
            pair = weights.index(gl.minimum(s + 1, SIDES - 1)).permute((1, 0))
            coming = hopper.warpgroup_mma(operand, pair, zeros, use_acc=False, is_async=True)
            write_planes(dp + at, dp_16, first, rows, plane, W, BH)
            write_planes(dg + at, dg_now, first, rows, plane, W, BH)
        _, dxn_all = hopper.warpgroup_mma_wait(0, deps=[coming, dxn_acc])
        barrier()
        if tile + gl.num_programs(0) < members * tiles:
            _copy_planes(
                buffer, dsides, following, tiles, rows, dsides_half, dsides_plane, H, W, LONG
            )
        v = as_rows(dxn_all, W, C, V)
        v = normed(v, norm, w, None)
        # Read back from memory: registers are scarce.
        at_kept = here * KEPT + edge[:, None] * KEPT + channel[None, :]
        y_again = gl.load(kept + at_kept, mask=live, other=0.0).to(gl.float32)
        along = gl.sum(v * y_again, 1) / C
        v = (v - (gl.sum(v, 1) / C)[:, None] - y_again * along[:, None]) * scale
        if scaling is not None:
            v /= gl.load(scaling)
        gl.store(dx + at_x, v.to(dx.dtype.element_ty), mask=live)


# `gpukern.trimul.plan` aligns these pointers to 16 bytes.
POINTERS = {
    finish_back: ("o", "gate", "dout", "w", "b", "p_w", "p_b", "do", "dgate", "sums"),
    project_back: (
        *("x", "w", "b", "p_w", "p_b", "g_w", "g_b", "o_w"),
        *("dsides", "dp", "dg", "dgate", "dx", "kept"),
    ),
}
