"""The backward of the triangle multiplicative update, for Hopper's tensor cores.

As `gpukern.trimul_hopper`, whose layouts these kernels use: weights stay in shared memory, and
every warp goes through rows by itself.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from gpukern.trimul_hopper import (
    SHARED,
    _as_met,
    _as_operand,
    _as_rows,
    _edge_met,
    _fill,
    _from_planes,
    _place,
    _prefetch,
    _products_layout,
    _rows_layout,
    _sigmoid,
    _write_planes,
)


def way_to_project_back(C: int, H: int, G: int) -> tuple[int, int] | None:
    """Return the warps of `project_back` and the channels of a block, or None."""
    warps, block = 8, 32
    fits = C in (64, 128) and H % block == 0 and G % (2 * block) == 0
    return (warps, block) if fits and 2 * C * (4 * H + G) <= SHARED else None


def project_back(
    x, mask, w, b, p_w, p_b, g_w, g_b, o_w, on_sides, on_p, on_gate, scaling, on_x, kept,
    members, rows, N, half, plane, mask_b, mask_i, mask_j,
    EPS: gl.constexpr, C: gl.constexpr, H: gl.constexpr, G: gl.constexpr, KEPT: gl.constexpr,
    V: gl.constexpr, W: gl.constexpr, BH: gl.constexpr, DOT: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """Write the cotangents of x, and of the projections, and put those of logits for `on_sides`.

    And `kept`, the standardized x, with a column of ones.
    """
    BM: gl.constexpr = 16 * W
    BN: gl.constexpr = 2 * BH
    SIDES: gl.constexpr = 2 * H // BH
    GATES: gl.constexpr = G // BN
    shape: gl.constexpr = [SIDES + GATES, BN, C]
    weights = gl.allocate_shared_memory(DOT, shape, gl.NVMMASharedLayout(128, 16))
    _fill(weights, p_w, g_w, o_w, SIDES, GATES, True, V, W)

    layout: gl.constexpr = _rows_layout(W, C, V)
    across: gl.constexpr = _rows_layout(W, BN, 8)
    mma: gl.constexpr = _products_layout(W, BN)
    ones: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])
    edge = gl.arange(0, BM, gl.SliceLayout(1, layout))
    channel = gl.arange(0, C, gl.SliceLayout(0, layout))
    opening = gl.arange(0, BM, gl.SliceLayout(1, across))[:, None]
    column = gl.arange(0, BN, gl.SliceLayout(0, across))[None, :]
    met = _edge_met(gl.arange(0, BM, gl.SliceLayout(1, mma)))
    zeros = gl.zeros((BM, BN), gl.float32, mma)
    plane = plane.to(LONG) // 8 * 8
    half = half.to(LONG) // 8 * 8
    rows = rows // 8 * 8
    tiles = (rows + BM - 1) // BM
    for tile in range(gl.program_id(0), members * tiles, gl.num_programs(0)):
        member, first, here = _place(tile, tiles, rows, BM, LONG)
        live = (first + edge < rows)[:, None]
        at_x = here * C + edge[:, None] * C + channel[None, :]
        y = gl.load(x + at_x, mask=live, other=0.0).to(gl.float32)
        y -= (gl.sum(y, 1) / C)[:, None]
        scale = gl.rsqrt(gl.sum(y * y, 1) / C + EPS)[:, None]
        y *= scale
        standard = y.to(DOT)
        following = gl.minimum(tile + gl.num_programs(0), members * tiles - 1)
        _prefetch(x, following, tiles, rows, C, W, LONG)
        to = kept + here * KEPT + edge[:, None] * KEPT
        gl.store(to + channel[None, :], standard, mask=live)
        behind = gl.arange(0, 8, gl.SliceLayout(0, ones))
        below = gl.arange(0, BM, gl.SliceLayout(1, ones))
        one = gl.where((behind == 0)[None, :], 1.0, 0.0).to(DOT)
        to_one = kept + here * KEPT + C + below[:, None] * KEPT
        gl.store(to_one + behind[None, :], one, mask=(first + below < rows)[:, None])
        if w is not None:
            y *= gl.load(w + channel).to(gl.float32)[None, :]
        if b is not None:
            y += gl.load(b + channel).to(gl.float32)[None, :]
        operand = _as_operand(_as_met(y.to(DOT), W, C, V), W, BN)
        m = None
        if mask is not None:
            i, j = (first + met) // N, (first + met) % N
            at_mask = mask + member * mask_b + i * mask_i + j * mask_j
            m = gl.load(at_mask, mask=first + met < rows, other=0.0).to(gl.float32)[:, None]
        on_xn = gl.zeros((BM, C), gl.float32, _products_layout(W, C))
        for k in gl.static_range(GATES):
            at_gate = (here + opening) * G + k * BN + column
            on_open = gl.load(on_gate + at_gate, mask=first + opening < rows, other=0.0)
            on_xn = hopper.warpgroup_mma(
                _as_operand(_as_met(on_open, W, BN, 8), W, C), weights.index(SIDES + k), on_xn
            )
        for s in range(SIDES):
            at = s * BH // H * half + (member * H + s * BH % H) * plane
            d = _from_planes(on_sides + at, first, rows, plane, W, BH)
            pair = weights.index(s).permute((1, 0))
            both = hopper.warpgroup_mma(operand, pair, zeros, use_acc=False)
            p, g = gl.split(gl.permute(gl.reshape(both, (BM, 2, BH)), (0, 2, 1)))
            h = s * BH + gl.arange(0, BH, gl.SliceLayout(0, p.type.layout))
            if p_b is not None:
                p += gl.load(p_b + h).to(gl.float32)[None, :]
            if g_b is not None:
                g += gl.load(g_b + h).to(gl.float32)[None, :]
            opened = _sigmoid(g)
            d_p = gl.convert_layout(d, p.type.layout, assert_trivial=True).to(gl.float32) * opened
            if m is not None:
                d_p *= gl.convert_layout(m, p.type.layout, assert_trivial=True)
            d_g = (d_p * p * (1 - opened)).to(DOT)
            d_p16 = d_p.to(DOT)
            _write_planes(on_p + at, d_p16, first, rows, plane, W, BH)
            _write_planes(on_sides + at, d_g, first, rows, plane, W, BH)
            d_both = gl.reshape(gl.permute(gl.join(d_p16, d_g), (0, 2, 1)), (BM, BN))
            on_xn = hopper.warpgroup_mma(_as_operand(d_both, W, C), weights.index(s), on_xn)
        v = _as_rows(on_xn, W, C, V)
        if w is not None:
            v *= gl.load(w + channel).to(gl.float32)[None, :]
        y_again = standard.to(gl.float32)
        along = gl.sum(v * y_again, 1) / C
        v = (v - (gl.sum(v, 1) / C)[:, None] - y_again * along[:, None]) * scale
        if scaling is not None:
            v /= gl.load(scaling)
        gl.store(on_x + at_x, v.to(on_x.dtype.element_ty), mask=live)


# Of pointers to 16 bytes, `gpukern.trimul` makes sure.
POINTERS = {
    project_back: (
        *("x", "w", "b", "p_w", "p_b", "g_w", "g_b", "o_w"),
        *("on_sides", "on_p", "on_gate", "on_x", "kept"),
    ),
}
