"""The triangle multiplicative update on the GPU.

A row is an edge (b, i, j), a line all edges of (b, i). Forward: `_project` normalizes rows of x and
writes left and right, plane by plane as products want them, and the last gate; a batched product
makes o; `_finish` normalizes that and projects it. Bytes per row: x and the output once; left,
right, o and the gate, written and read, in the dtype of the factors. Where x has many channels and
rows, `_normalize` writes it first, so that `_project` can read it in parts.

Backward: `_project` again, which keeps the logits of the gates too; `_finish_back`; two batched
products; then, for some lines at a time, `_sides_back` and plain products, which give the
cotangents of the normalized x and of the weights, a column of ones those of the biases; and
`_norm_back`.

The programs of a kernel take blocks of a line, so that they lie within planes, and read and write
vectors where N is a multiple of eight. Products of 16 bits and of float64 are torch's; those of
float32 are ours, as torch's follow a global switch.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedops._registry import register
from gpukern.launch import Launcher, kernel_of_any_size, wide

# Elements of z, rows of which are made at a time in the backward pass.
_AT_A_TIME = 1 << 26
# Rows from which on it pays to write the normalized x of many channels, and to round weights once.
_MANY = 1 << 16
# Channels that a program normalizes at once.
_CHANNELS = 128
# Batches that a product over all rows is split into at most, and rows that make one more.
_SPLIT, _LONG = 64, 1 << 11

# Rows, channels and columns of a program where x is ready, its warps and stages.
_READY = 128, 64, 64, (4, 3)

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _sigmoid(x, ASM: tl.constexpr):
    if ASM:
        # Four instructions, and an error of two roundings.
        return tl.inline_asm_elementwise(
            """{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }""",
            "=f,f", [x], tl.float32, True, 1,
        )  # fmt: skip
    else:
        return 1 / (1 + tl.exp(-x))


@triton.jit
def _place(program, line, N, BM: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr):
    """Return b, i, the number of (b, i, 0), the j of a block of rows, and which are there."""
    blocks = tl.cdiv(N, BM)
    line += program // blocks
    j = program % blocks * BM + tl.arange(0, BM)
    if ALIGNED:
        # What the compiler then knows lets it read and write vectors.
        N = N // 8 * 8
    return line // N, line % N, line.to(LONG) * N, j, j < N


@triton.jit
def _moments(
    x, row, j, live,
    EPS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, FLOAT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return a number near the mean of rows of x, the rest of it, and 1 over their deviation."""
    CHUNKS: tl.constexpr = (C + BC - 1) // BC
    c = tl.arange(0, BC)
    for k in tl.static_range(CHUNKS):
        inside = live[:, None] & (k * BC + c < C)[None, :]
        part = tl.load(x + (row + j)[:, None] * C + (k * BC + c)[None, :], mask=inside, other=0.0)
        part = part.to(FLOAT)
        if k == 0:
            near = tl.sum(part, 1) / min(BC, C)
        part = tl.where(inside, part - near[:, None], 0.0)
        middle = tl.zeros_like(near)
        if EXACT or k > 0:
            # What the rounding of a mean leaves is found among small numbers.
            middle = tl.sum(part, 1) / min(BC, C - k * BC)
            part = tl.where(inside, part - middle[:, None], 0.0)
        square = tl.sum(part * part, 1)
        if k == 0:
            rest, total = middle, square
        else:
            # Chan, Golub and LeVeque's update.
            step = middle - rest
            rest += step * (min(BC, C - k * BC) / min(C, (k + 1) * BC))
            total += square + step * step * (k * BC * min(BC, C - k * BC) / min(C, (k + 1) * BC))
    return near, rest, 1 / tl.sqrt(total / C + EPS)


@triton.jit
def _chunk(
    x, w, b, row, j, live, near, rest, scale,
    k: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Return a chunk of columns of the normalized rows."""
    c = k * BC + tl.arange(0, BC)
    inside = live[:, None] & (c < C)[None, :]
    y = tl.load(x + (row + j)[:, None] * C + c[None, :], mask=inside, other=0.0).to(FLOAT)
    y = (y - near[:, None] - rest[:, None]) * scale[:, None]
    if w is not None:
        y = y * tl.load(w + c, mask=c < C, other=0.0).to(FLOAT)[None, :]
    if b is not None:
        y = y + tl.load(b + c, mask=c < C, other=0.0).to(FLOAT)[None, :]
    # Rows that aren't there are written nowhere; channels are summed over.
    return y if C % BC == 0 else tl.where(inside, y, 0.0)


@triton.jit
def _add_one(to, live, SIZE: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr):
    """Write a one behind the elements of rows, and zeros behind that."""
    after = SIZE + tl.arange(0, 16)
    one = tl.where(after == SIZE, 1.0, 0.0)[None, :] + tl.zeros((BM, 16), tl.float32)
    inside = live[:, None] & (after < WIDTH)[None, :]
    tl.store(to + after[None, :], one.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _weight(
    w, first, last, k, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, DOT: tl.constexpr
):
    """Return rows of a weight, and a chunk of its columns."""
    h = first + tl.arange(0, BH)
    c = k * BC + tl.arange(0, BC)
    inside = (h < last)[:, None] & (c < C)[None, :]
    return tl.load(w + h[:, None] * C + c[None, :], mask=inside, other=0.0).to(DOT)


@triton.jit
def _bias(b, first, last, BH: tl.constexpr, FLOAT: tl.constexpr):
    h = first + tl.arange(0, BH)
    return tl.load(b + h, mask=h < last, other=0.0).to(FLOAT)


@triton.jit
def _planes(h, batch, row, N, H: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where lines (b, h, i) of planes without gaps begin; `row` is that of (b, i)."""
    if ALIGNED:
        N = N // 8 * 8
    square = N.to(LONG) * N
    return batch * (H - 1) * square + row + h.to(LONG) * square


@triton.jit
def _normalized(
    o, w, b, at, live,
    EPS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, FLOAT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return of o (BH, BM) the standardized, 1 over its deviation, and the normalized."""
    h = tl.arange(0, BH)
    inside = (h < H)[:, None] & live[None, :]
    y = tl.load(o + at, mask=inside, other=0.0).to(FLOAT)
    y -= (tl.sum(y, 0) / H)[None, :]
    if H < BH:
        y = tl.where(inside, y, 0.0)
    if EXACT:
        y -= (tl.sum(y, 0) / H)[None, :]
        y = tl.where(inside, y, 0.0)
    scale = 1 / tl.sqrt(tl.sum(y * y, 0) / H + EPS)
    y = y * scale[None, :]
    on = y
    if w is not None:
        on = on * tl.load(w + h, mask=h < H, other=0.0).to(FLOAT)[:, None]
    if b is not None:
        on = on + tl.load(b + h, mask=h < H, other=0.0).to(FLOAT)[:, None]
    return y, scale, on if H == BH else tl.where(inside, on, 0.0)


def _normalize(
    x, w, b, kept, rows,
    EPS: tl.constexpr, C: tl.constexpr, KEPT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    FLOAT: tl.constexpr, EXACT: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Write the normalized rows of x, and behind each a one."""
    row = tl.program_id(0).to(LONG) * BM
    j = tl.arange(0, BM)
    live = row + j < rows
    near, rest, scale = _moments(x, row, j, live, EPS, C, BC, FLOAT, EXACT)
    to = kept + (row + j)[:, None] * KEPT
    for k in tl.static_range((C + BC - 1) // BC):
        y = _chunk(x, w, b, row, j, live, near, rest, scale, k, C, BC, FLOAT)
        c = k * BC + tl.arange(0, BC)
        inside = live[:, None] & (c < C)[None, :]
        tl.store(to + c[None, :], y.to(kept.dtype.element_ty), mask=inside)
    _add_one(to, live, C, KEPT, BM)


@triton.jit
def _both(
    p_w, g_w, first, last, xs, x, live,
    C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr, READY: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return two projections (BH, BM) of normalized rows: of chunks xs, or of x if READY."""
    CHUNKS: tl.constexpr = (C + BC - 1) // BC
    p = tl.zeros((BH, BM), FLOAT)
    g = tl.zeros((BH, BM), FLOAT)
    if READY:
        for k in range(CHUNKS):
            c = k * BC + tl.arange(0, BC)
            rows = tl.load(x + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0)
            xn = tl.trans(rows.to(DOT))
            p_part = _weight(p_w, first, last, k, C, BH, BC, DOT)
            g_part = _weight(g_w, first, last, k, C, BH, BC, DOT)
            p = tl.dot(p_part, xn, p, PRECISION, out_dtype=FLOAT)
            g = tl.dot(g_part, xn, g, PRECISION, out_dtype=FLOAT)
    else:
        for k in tl.static_range(CHUNKS):
            p_part = _weight(p_w, first, last, k, C, BH, BC, DOT)
            g_part = _weight(g_w, first, last, k, C, BH, BC, DOT)
            p = tl.dot(p_part, tl.trans(xs[k]), p, PRECISION, out_dtype=FLOAT)
            g = tl.dot(g_part, tl.trans(xs[k]), g, PRECISION, out_dtype=FLOAT)
    return p, g


@triton.jit
def _one(
    w, first, last, xs, x, live,
    C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr, READY: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return one projection, as `_both` returns two."""
    CHUNKS: tl.constexpr = (C + BC - 1) // BC
    value = tl.zeros((BH, BM), FLOAT)
    if READY:
        for k in range(CHUNKS):
            c = k * BC + tl.arange(0, BC)
            rows = tl.load(x + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0)
            part = _weight(w, first, last, k, C, BH, BC, DOT)
            value = tl.dot(part, tl.trans(rows.to(DOT)), value, PRECISION, out_dtype=FLOAT)
    else:
        for k in tl.static_range(CHUNKS):
            part = _weight(w, first, last, k, C, BH, BC, DOT)
            value = tl.dot(part, tl.trans(xs[k]), value, PRECISION, out_dtype=FLOAT)
    return value


def _project(
    x, mask, w, b, p_w, p_b, g_w, g_b, o_w, o_b, sides, logits, gate, kept,
    lines, N, pitch, mask_b, mask_i, mask_j,
    EPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, OUTPUT: tl.constexpr,
    READY: tl.constexpr, KEPT: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    ASM: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write left and right, the last gate, and for a backward pass the logits of theirs.

    From what `_normalize` wrote (READY), or with its work done here. A program takes one of PARTS
    shares of the channels.
    """
    part = tl.program_id(0) % PARTS
    batch, i, row, j, live = _place(tl.program_id(0) // PARTS, 0, N, BM, LONG, ALIGNED)
    CHUNKS: tl.constexpr = (C + BC - 1) // BC
    to = kept
    if READY or kept is not None:
        to = kept + (row + j)[:, None] * KEPT
    xs = ()
    if not READY:
        near, rest, scale = _moments(x, row, j, live, EPS, C, BC, FLOAT, EXACT)
        for k in tl.static_range(CHUNKS):
            xs = xs + (_chunk(x, w, b, row, j, live, near, rest, scale, k, C, BC, FLOAT).to(DOT),)
        if kept is not None:
            if part == 0:
                for k in tl.static_range(CHUNKS):
                    c = k * BC + tl.arange(0, BC)
                    tl.store(to + c[None, :], xs[k], mask=live[:, None] & (c < C)[None, :])
                _add_one(to, live, C, KEPT, BM)
    if mask is not None:
        m = tl.load(mask + batch * mask_b + i * mask_i + j * mask_j, mask=live, other=0.0)
        m = m.to(FLOAT)
    pitch = pitch // 8 * 8
    plane = N.to(LONG) * pitch
    half = (lines // N) * H * plane
    place = batch * H * plane + i.to(LONG) * pitch
    SIDES: tl.constexpr = (2 * H + BH - 1) // BH
    GATES: tl.constexpr = (G + BH - 1) // BH
    # Where x is ready, a share is one block of channels, of the sides or of the gate.
    PER: tl.constexpr = 1 if READY else (SIDES + PARTS - 1) // PARTS
    PER_GATE: tl.constexpr = 1 if READY else (GATES + PARTS - 1) // PARTS
    if not READY or part < SIDES:
        for step in range(PER):
            first = (part * PER + step) * BH
            p, g = _both(
                p_w, g_w, first, 2 * H, xs, to, live, C, BM, BC, BH, READY, DOT, FLOAT, PRECISION
            )
            if p_b is not None:
                p += _bias(p_b, first, 2 * H, BH, FLOAT)[:, None]
            if g_b is not None:
                g += _bias(g_b, first, 2 * H, BH, FLOAT)[:, None]
            side = p * _sigmoid(g, ASM)
            if mask is not None:
                side = side * m[None, :]
            h = first + tl.arange(0, BH)
            at = ((h // H) * half + (h % H) * plane)[:, None] + place + j[None, :]
            inside = (h < 2 * H)[:, None] & live[None, :]
            tl.store(sides + at, side.to(DOT), mask=inside)
            if logits is not None:
                tl.store(logits + at, g.to(DOT), mask=inside)
    if not READY or part >= SIDES:
        for step in range(PER_GATE):
            begin = ((part - SIDES if READY else part) * PER_GATE + step) * BH
            if begin < G:
                opened = _one(
                    o_w, begin, G, xs, to, live, C, BM, BC, BH, READY, DOT, FLOAT, PRECISION
                )
                if o_b is not None:
                    opened += _bias(o_b, begin, G, BH, FLOAT)[:, None]
                value = _sigmoid(opened, ASM).to(DOT)
                of = begin + tl.arange(0, BH)
                if OUTPUT:
                    across = live[:, None] & (of < G)[None, :]
                    to_gate = gate + (row + j)[:, None] * G + of[None, :]
                    tl.store(to_gate, tl.trans(value), mask=across)
                else:
                    planes = _planes(of, batch, row, N, G, LONG, ALIGNED)[:, None] + j[None, :]
                    tl.store(gate + planes, value, mask=(of < G)[:, None] & live[None, :])


def _finish(
    o, gate, w, b, p_w, p_b, out, N,
    EPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, OUTPUT: tl.constexpr,
    BM: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the output: o normalized, gated and projected."""
    batch, _, row, j, live = _place(tl.program_id(0), 0, N, BM, LONG, ALIGNED)
    h = tl.arange(0, BH)
    there = _planes(h, batch, row, N, H, LONG, ALIGNED)[:, None] + j[None, :]
    # What is on its way while others are summed costs no time.
    if not OUTPUT:
        opened = tl.load(gate + there, mask=(h < H)[:, None] & live[None, :], other=0.0)
    elif C <= BN:
        c_first = tl.arange(0, BN)
        there_first = (row + j)[:, None] * C + c_first[None, :]
        within = live[:, None] & (c_first < C)[None, :]
        s_first = tl.load(gate + there_first, mask=within, other=0.0)
    _, _, on = _normalized(o, w, b, there, live, EPS, H, BH, FLOAT, EXACT)
    if not OUTPUT:
        on = on * opened.to(FLOAT)
    left = tl.trans(on.to(DOT))
    for block in range((C + BN - 1) // BN):
        c = block * BN + tl.arange(0, BN)
        inside = live[:, None] & (c < C)[None, :]
        at = (row + j)[:, None] * C + c[None, :]
        if OUTPUT:
            s = s_first if C <= BN else tl.load(gate + at, mask=inside, other=0.0)
        weight = _weight(p_w, block * BN, C, 0, H, BN, BH, DOT)
        value = tl.dot(left, tl.trans(weight), None, PRECISION, out_dtype=FLOAT)
        if p_b is not None:
            value += _bias(p_b, block * BN, C, BN, FLOAT)[None, :]
        if OUTPUT:
            value = value * s.to(FLOAT)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _finish_back(
    o, gate, cotangent, scaling, w, b, p_w, p_b, on_o, on_gate, on_p, kept, sums, N, pitch,
    EPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, OUTPUT: tl.constexpr,
    KEPT: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of o, of the last gate's logits, and of what was projected.

    With that itself (kept), and sums over rows for the weight and the bias of the norm.
    """
    batch, i, row, j, live = _place(tl.program_id(0), 0, N, BM, LONG, ALIGNED)
    h = tl.arange(0, BH)
    there = _planes(h, batch, row, N, H, LONG, ALIGNED)[:, None] + j[None, :]
    y, scale, on = _normalized(o, w, b, there, live, EPS, H, BH, FLOAT, EXACT)
    inside = (h < H)[:, None] & live[None, :]
    left = tl.trans(on.to(DOT))
    on_on = tl.zeros((BH, BM), FLOAT)
    for block in range((C + BN - 1) // BN):
        c = block * BN + tl.arange(0, BN)
        within = live[:, None] & (c < C)[None, :]
        at = (row + j)[:, None] * C + c[None, :]
        g = tl.load(cotangent + at, mask=within, other=0.0).to(FLOAT)
        if scaling is not None:
            g = g * tl.load(scaling)
        if OUTPUT:
            s = tl.load(gate + at, mask=within, other=0.0).to(FLOAT)
        weight = _weight(p_w, block * BN, C, 0, H, BN, BH, DOT)
        if OUTPUT:
            value = tl.dot(left, tl.trans(weight), None, PRECISION, out_dtype=FLOAT)
            if p_b is not None:
                value += _bias(p_b, block * BN, C, BN, FLOAT)[None, :]
            tl.store(on_gate + at, (g * value * s * (1 - s)).to(DOT), mask=within)
            g = g * s
        if on_p is not None:
            tl.store(on_p + at, g.to(DOT), mask=within)
        on_on = tl.dot(tl.trans(weight), tl.trans(g.to(DOT)), on_on, PRECISION, out_dtype=FLOAT)
    projected = on
    if not OUTPUT:
        opened = tl.load(gate + there, mask=inside, other=0.0).to(FLOAT)
        on_open = tl.trans((on_on * on * opened * (1 - opened)).to(DOT))
        across = live[:, None] & (h < H)[None, :]
        tl.store(on_gate + (row + j)[:, None] * G + h[None, :], on_open, mask=across)
        on_on = on_on * opened
        projected = on * opened
    to = kept + (row + j)[:, None] * KEPT
    projected = tl.trans(projected.to(DOT))
    tl.store(to + h[None, :], projected, mask=live[:, None] & (h < H)[None, :])
    _add_one(to, live, H, KEPT, BM)
    on_on = tl.where(inside, on_on, 0.0)
    total = sums + tl.program_id(0).to(tl.int64) * 2 * H + h
    tl.store(total, tl.sum(on_on * y, 1), mask=h < H)
    tl.store(total + H, tl.sum(on_on, 1), mask=h < H)
    if w is not None:
        on_on = on_on * tl.load(w + h, mask=h < H, other=0.0).to(FLOAT)[:, None]
    along = tl.sum(on_on * y, 0) / H
    on_on = (on_on - (tl.sum(on_on, 0) / H)[None, :] - y * along[None, :]) * scale[None, :]
    pitch = pitch // 8 * 8
    plane = N.to(LONG) * pitch
    to_o = batch * H * plane + i.to(LONG) * pitch + h.to(LONG) * plane
    tl.store(on_o + to_o[:, None] + j[None, :], on_on.to(DOT), mask=inside)


def _sides_back(
    on_sides, sides, logits, mask, z, start, lines, N, pitch, mask_b, mask_i, mask_j,
    H: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of projections and of gates' logits, row by row, to z."""
    batch, i, row, j, live = _place(tl.program_id(0) // PARTS, start, N, BM, LONG, ALIGNED)
    h = tl.program_id(0) % PARTS * BH + tl.arange(0, BH)
    pitch = pitch // 8 * 8
    plane = N.to(LONG) * pitch
    half = (lines // N) * H * plane
    first = (h // H) * half + (h % H) * plane + batch * H * plane + i.to(LONG) * pitch
    at = first[:, None] + j[None, :]
    inside = (h < 2 * H)[:, None] & live[None, :]
    d = tl.load(on_sides + at, mask=inside, other=0.0).to(FLOAT)
    a = tl.load(sides + at, mask=inside, other=0.0).to(FLOAT)
    g = tl.load(logits + at, mask=inside, other=0.0).to(FLOAT)
    # a = p s m, so that its derivative by g is a (1 - s).
    on_g = d * a * _sigmoid(-g, ASM)
    d = d * _sigmoid(g, ASM)
    if mask is not None:
        m = tl.load(mask + batch * mask_b + i * mask_i + j * mask_j, mask=live, other=0.0)
        d = d * m.to(FLOAT)[None, :]
    to = z + (row - start.to(LONG) * N + j)[:, None] * (4 * H) + h[None, :]
    across = live[:, None] & (h < 2 * H)[None, :]
    tl.store(to, tl.trans(d.to(DOT)), mask=across)
    tl.store(to + 2 * H, tl.trans(on_g.to(DOT)), mask=across)


def _norm_back(
    x, on_xn, scaling, w, on_x, sums, rows, steps,
    EPS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    FLOAT: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Write the cotangent of x, and sums over rows for the weight and the bias of the norm."""
    c = tl.arange(0, BC)
    by_weight = tl.zeros((BC,), FLOAT)
    by_bias = tl.zeros((BC,), FLOAT)
    step = 0
    while step < steps:
        row = (tl.program_id(0).to(LONG) * steps + step) * BM + tl.arange(0, BM)
        live = (row < rows)[:, None] & (c < C)[None, :]
        at = row[:, None] * C + c[None, :]
        v = tl.load(on_xn + at, mask=live, other=0.0).to(FLOAT)
        y = tl.load(x + at, mask=live, other=0.0).to(FLOAT)
        y = tl.where(live, y - (tl.sum(y, 1) / C)[:, None], 0.0)
        y = tl.where(live, y - (tl.sum(y, 1) / C)[:, None], 0.0)
        scale = 1 / tl.sqrt(tl.sum(y * y, 1) / C + EPS)
        y = y * scale[:, None]
        if scaling is not None:
            v = v / tl.load(scaling)
        by_weight += tl.sum(v * y, 0)
        by_bias += tl.sum(v, 0)
        if w is not None:
            v = v * tl.load(w + c, mask=c < C, other=0.0).to(FLOAT)[None, :]
        along = tl.sum(v * y, 1) / C
        v = (v - (tl.sum(v, 1) / C)[:, None] - y * along[:, None]) * scale[:, None]
        tl.store(on_x + at, v.to(on_x.dtype.element_ty), mask=live)
        step += 1
    to = sums + tl.program_id(0).to(tl.int64) * 2 * C + c
    tl.store(to, by_weight, mask=c < C)
    tl.store(to + C, by_bias, mask=c < C)


def _product(
    a, b, c, M, N, K, a_batch, a_row, a_column, b_batch, b_row, b_column, c_batch, c_row, c_column,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write, or add, the products of float32 matrices of any strides."""
    across, along = tl.cdiv(N, BN), tl.cdiv(M, BM)
    tile = tl.program_id(0) % (across * along)
    batch = (tl.program_id(0) // (across * along)).to(tl.int64)
    m = (tile // across * BM + tl.arange(0, BM)).to(tl.int64)
    n = (tile % across * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    begin = 0
    while begin < K:
        k = (begin + tl.arange(0, BK)).to(tl.int64)
        at_a = a + batch * a_batch + m[:, None] * a_row + k[None, :] * a_column
        at_b = b + batch * b_batch + k[:, None] * b_row + n[None, :] * b_column
        left = tl.load(at_a, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(at_b, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(left, right, total, PRECISION)
        begin += BK
    to = c + batch * c_batch + m[:, None] * c_row + n[None, :] * c_column
    inside = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        total += tl.load(to, mask=inside, other=0.0)
    tl.store(to, total, mask=inside)


# Of pointers to 16 bytes, `_aligned` makes sure.
_POINTERS = {
    _normalize: ("x", "kept"),
    _project: ("x", "p_w", "g_w", "o_w", "sides", "logits", "gate", "kept"),
    _finish: ("o", "gate", "p_w", "out"),
    _finish_back: ("o", "gate", "cotangent", "p_w", "on_o", "on_gate", "on_p", "kept"),
    _sides_back: ("on_sides", "sides", "logits", "z"),
    _norm_back: ("x", "on_xn", "on_x"),
    _product: (),
}


@functools.cache
def _launcher(kernel: Any, warps: int, stages: int) -> Launcher:
    return Launcher(kernel_of_any_size(kernel, _POINTERS[kernel]), warps, stages=stages)


def _launch(
    kernel: Any,
    how: tuple[int, int],
    programs: int,
    tensors: tuple[Any, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> None:
    """Launch with (warps, stages) of how."""
    kinds = tuple([tensor if tensor is None else tensor.dtype for tensor in tensors])
    key = tensors[0].device, kinds, wide(*numbers), constants
    _launcher(kernel, *how)(programs, key, *tensors, *numbers, *constants)


class _Work(NamedTuple):
    """What the kernels of a call are compiled for."""

    dtype: torch.dtype
    accumulator: torch.dtype
    precision: str
    fast: bool
    asm: bool
    interpreted: bool
    long: Any
    aligned: bool

    @property
    def types(self) -> tuple[Any, ...]:
        # The interpreter's products know no bfloat16.
        narrow = self.dtype == torch.bfloat16 and self.interpreted
        dot = tl.float32 if narrow else _TYPES[self.dtype]
        return dot, _TYPES[self.accumulator], self.precision

    @property
    def exact(self) -> bool:
        """Whether what rounding a mean to float32 leaves counts."""
        return self.dtype.itemsize > 2


def _work(x: Any, precision: str, channels: int) -> _Work:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    dtype = dtype or torch.promote_types(x.dtype, torch.float32)
    double = dtype == torch.float64
    fast = dtype.itemsize == 2 or precision == "tf32"
    lines, N, C = x.shape[0] * x.shape[1], x.shape[1], x.shape[3]
    size = lines * (N + 8) * max(C + 8, channels)
    return _Work(
        dtype,
        torch.float64 if double else torch.float32,
        "tf32" if precision == "tf32" else "ieee",
        fast,
        fast and x.is_cuda and torch.version.cuda is not None,
        not x.is_cuda,
        tl.int64 if size >> 31 else tl.int32,
        N % 8 == 0,
    )


def _power(n: int, least: int = 16) -> int:
    return max(least, triton.next_power_of_2(n))


def _ceil(n: int, by: int) -> int:
    return -(-n // by)


def _is_aligned(array: Any) -> bool:
    """Return whether an array has no gaps and begins at a multiple of 16 bytes."""
    return array.is_contiguous() and array.data_ptr() % 16 == 0


def _aligned(array: Any) -> Any:
    """Return such an array of the same values."""
    if array is None or _is_aligned(array):
        return array
    return array.clone(memory_format=torch.contiguous_format)


def _products(a: Any, b: Any, out: Any, work: _Work, scale: float = 1.0, add: bool = False) -> None:
    """Write products of batches of matrices, or add them to what is there."""
    if work.dtype != torch.float32:
        torch.baddbmm(out, a, b, beta=float(add), alpha=scale, out=out)
        return
    size = 128 if work.fast else 64
    (batches, M, K), N = a.shape, b.shape[2]
    programs = batches * _ceil(M, size) * _ceil(N, size)
    numbers = M, N, K, *a.stride(), *b.stride(), *out.stride()
    constants = size, size, 32 if a.is_cuda else 128, add, work.precision
    _launch(_product, (8 if work.fast else 4, 2), programs, (a, b, out), numbers, constants)


def _over_rows(a: Any, b: Any, work: _Work) -> Any:
    """Return aᵀ b in float32 or better, for very many rows."""
    rows = len(a)
    split = max(n for n in range(1, min(_SPLIT, rows // _LONG) + 2) if rows % n == 0)
    a, b = (m.view(split, rows // split, -1) for m in (a, b))
    if work.dtype == torch.float32:
        out = a.new_empty(split, a.shape[2], b.shape[2])
        _products(a.mT, b, out, work)
    elif work.dtype == torch.float64:
        out = a.mT @ b
    elif a.is_cuda:
        out = torch.bmm(a.mT, b, out_dtype=torch.float32)
    else:
        out = a.mT.float() @ b.float()
    return out.sum(0)


def _factors(sides: Any, direction: str) -> tuple[Any, Any]:
    """Return the factors whose product is o."""
    left, right = sides
    return (left.mT, right) if direction == "incoming" else (left, right.mT)


def _begin(
    arrays: tuple[Any, ...], work: _Work, output: bool, eps: float, back: bool = False
) -> tuple[Any, Any, Any, Any]:
    """Return left and right, the last gate, and for a backward pass logits and normalized x."""
    x, mask, w, b, p_w, p_b, g_w, g_b, *_, o_w, o_b = arrays
    B, N, _, C = x.shape
    H, G = p_w.shape[0] // 2, o_w.shape[0]
    rows, pitch, width = B * N * N, _ceil(N, 8) * 8, _ceil(C + 1, 8) * 8
    many = rows >= _MANY

    def new(*shape: int) -> Any:
        return torch.empty(shape, dtype=work.dtype, device=x.device)

    if many:
        p_w, g_w, o_w = (a.to(work.dtype) for a in (p_w, g_w, o_w))
    sides = new(2, B * H, N, pitch)
    logits = torch.empty_like(sides) if back else None
    gate = new(rows, G) if output else new(B, G, N, N)
    ready = many and C > _CHANNELS
    kept = new(rows, width) if back or ready else None
    chunk = min(_CHANNELS if work.fast else 64, _power(C))
    if work.dtype == torch.float64:
        chunk = min(chunk, 32)
    if ready:
        constants = eps, C, width, 16, chunk, _TYPES[work.accumulator], work.exact, work.long
        _launch(_normalize, (4, 1), _ceil(rows, 16), (x, w, b, kept), (rows,), constants)
    BM, BH, how = (128, 64, (8, 2)) if work.fast else (32, 32, (4, 1))
    if ready and work.fast:
        BM, BH, chunk, how = _READY
    elif C > _CHANNELS:
        how = how[0], 1
    if not x.is_cuda:
        # The interpreter's time goes by programs and steps.
        BM, BH = 16, 128
    BM = min(BM, _power(N))
    blocks, programs = _ceil(2 * H, BH), B * N * _ceil(N, BM)
    # Few rows are shared by as many programs as a GPU runs at once.
    parts = blocks + _ceil(G, BH) if ready else min(blocks, _ceil(264, programs))
    numbers = B * N, N, pitch, *((0, 0, 0) if mask is None else mask.stride())
    constants = eps, C, H, G, output, ready, width, parts, BM, chunk, BH
    constants += *work.types, work.exact, work.asm, work.long, work.aligned
    tensors = x, mask, w, b, p_w, p_b, g_w, g_b, o_w, o_b, sides, logits, gate, kept
    _launch(_project, how, programs * parts, tensors, numbers, constants)
    return sides[..., :N], gate, logits, kept


@register("triangle_multiplicative_update", "triton")
def triangle_multiplicative_update(*args: Any) -> None:
    *arrays, direction, gate_kind, precision, eps, _, out, hidden = args
    x, p_w = arrays[0], arrays[4]
    if not x.numel():
        return
    arrays = tuple([array if at == 1 else _aligned(array) for at, array in enumerate(arrays)])
    output = gate_kind == "output"
    B, N, _, C = x.shape
    H = p_w.shape[0] // 2
    work = _work(x, precision, 4 * H)
    sides, gate, *_ = _begin(arrays, work, output, eps)
    scale = 1.0
    if hidden is not None and hidden.dtype == work.dtype:
        o = hidden
    else:
        o = torch.empty((B, H, N, N), dtype=work.dtype, device=x.device)
        if work.dtype == torch.float16:
            # A mean over edges is in range where the factors are, if their sum isn't.
            scale = 2.0 ** -round(math.log2(N))
    _products(*_factors(sides, direction), o.view(B * H, N, N), work, scale)
    del sides
    if hidden is not None and o is not hidden:
        torch.mul(o, 1 / scale, out=hidden)
    if out is None:
        return
    w, b, q_w, q_b = arrays[8:12]
    result = out if _is_aligned(out) else torch.empty_like(x)
    BH = _power(H)
    BM = min(max(16, 8192 // BH) if work.fast else 16, _power(N))
    BN = min(128 if work.fast else 32, _power(C))
    # The norm of o times a number is that of o with another eps.
    constants = (
        eps * scale**2,
        C,
        H,
        output,
        BM,
        BH,
        BN,
        *work.types,
        work.exact,
        work.long,
        work.aligned,
    )
    tensors = o, gate, w, b, q_w, q_b, result
    _launch(_finish, (4, 1), B * N * _ceil(N, BM), tensors, (N,), constants)
    if result is not out:
        out.copy_(result)


@register("triangle_multiplicative_update_vjp", "triton")
def triangle_multiplicative_update_vjp(*args: Any) -> None:
    *given, direction, gate_kind, precision, eps, _ = args[:21]
    outputs = args[21:]
    *arrays, hidden, cotangent = given
    if not arrays[0].numel():
        for output in outputs:
            if output is not None:
                output.zero_()
        return
    arrays = tuple([array if at == 1 else _aligned(array) for at, array in enumerate(arrays)])
    x, mask, w, _, p_w, _, g_w, _, v, c, q_w, q_b, o_w, _ = arrays
    on_x, on_mask, *on_weights = outputs
    cotangent = _aligned(cotangent)
    output = gate_kind == "output"
    B, N, _, C = x.shape
    H, G = p_w.shape[0] // 2, o_w.shape[0]
    rows, lines = B * N * N, B * N
    work = _work(x, precision, 4 * H)

    def new(*shape: int, dtype: Any = work.dtype) -> Any:
        return torch.empty(shape, dtype=dtype, device=x.device)

    sides, gate, logits, kept_x = _begin(arrays, work, output, eps, back=True)
    pitch = sides.stride(-2)
    if hidden is None:
        hidden = new(B, H, N, N)
        _products(*_factors(sides, direction), hidden.view(B * H, N, N), work)
    hidden = _aligned(hidden)
    scaling = None
    if work.dtype == torch.float16:
        # What is small to fp16 is small to the largest cotangent then.
        most = cotangent.abs().amax().float()
        most = torch.where((most > 0) & most.isfinite(), most, 1.0)
        scaling = torch.exp2(-torch.log2(most).floor())

    on_o, on_gate = new(B * H, N, pitch), new(rows, G)
    width = _ceil(H + 1, 8) * 8
    kept = new(rows, width)
    as_given = not output and scaling is None and cotangent.dtype == work.dtype
    on_p = cotangent.view(rows, C) if as_given else new(rows, C)
    BH = _power(H)
    BM = min(max(16, 4096 // BH) if work.fast else 16, _power(N))
    BN = min(64 if work.fast else 16, _power(C))
    programs = lines * _ceil(N, BM)
    sums = new(programs, 2, H, dtype=work.accumulator)
    constants = eps, C, H, G, output, width, BM, BH, BN
    constants += *work.types, work.exact, work.long, work.aligned
    tensors = hidden, gate, cotangent, scaling, v, c, q_w, q_b
    tensors += on_o, on_gate, None if as_given else on_p, kept, sums
    _launch(_finish_back, (4, 2), programs, tensors, (N, pitch), constants)
    del gate, hidden
    on_q = _over_rows(on_p, kept, work)
    on_v, on_c = sums.sum(0)
    del on_p, kept, sums

    on_o = on_o[..., :N]
    on_sides = new(2, B * H, N, pitch)
    (left, right), (on_left, on_right) = sides, on_sides[..., :N]
    if direction == "incoming":
        _products(right, on_o.mT, on_left, work)
        _products(left, on_o, on_right, work)
    else:
        _products(on_o, right, on_left, work)
        _products(on_o.mT, left, on_right, work)
    del on_o

    weights = torch.cat([p_w, g_w]).to(work.dtype)
    o_weights = o_w.to(work.dtype)
    result = on_x if on_x is not None and _is_aligned(on_x) else torch.empty_like(x)
    # Eight lines begin at a multiple of 16 bytes.
    many = min(lines, max(1, _AT_A_TIME // (N * 4 * H * 8)) * 8)
    z, on_xn = new(many * N, 4 * H), new(many * N, C)
    on_sides_too, on_open, on_norm = [], [], []
    numbers = lines, N, pitch, *((0, 0, 0) if mask is None else mask.stride())
    BM, BH = min(64, _power(N)), min(64, _power(2 * H))
    parts, blocks = _ceil(2 * H, BH), _ceil(N, BM)
    constants = H, parts, BM, BH, *work.types[:2], work.asm, work.long, work.aligned
    for line in range(0, lines, many):
        here = slice(line * N, min(line + many, lines) * N)
        count = here.stop - here.start
        tensors = on_sides, sides, logits, mask, z
        _launch(
            _sides_back, (4, 1), count // N * blocks * parts, tensors, (line, *numbers), constants
        )
        _products(z[None, :count], weights[None], on_xn[None, :count], work)
        _products(on_gate[None, here], o_weights[None], on_xn[None, :count], work, add=True)
        on_sides_too.append(_over_rows(z[:count], kept_x[here], work))
        on_open.append(_over_rows(on_gate[here], kept_x[here], work))
        on_norm.append(
            _norms_back(
                *(x.view(rows, C)[here], on_xn[:count], scaling, w),
                *(result.view(rows, C)[here], eps, work),
            )
        )
    if on_x is not None and result is not on_x:
        on_x.copy_(result)
    on_pg, on_open, (on_w, on_b) = (torch.stack(a).sum(0) for a in (on_sides_too, on_open, on_norm))
    if scaling is not None:
        on_pg, on_open, on_q, on_v, on_c = (a / scaling for a in (on_pg, on_open, on_q, on_v, on_c))
    found = (
        *(on_w, on_b),
        *(on_pg[: 2 * H, :C], on_pg[: 2 * H, C], on_pg[2 * H :, :C], on_pg[2 * H :, C]),
        *(on_v, on_c, on_q[:, :H], on_q[:, H], on_open[:, :C], on_open[:, C]),
    )
    for to, value in zip(on_weights, found, strict=True):
        if to is not None:
            to.copy_(value)
    if on_mask is not None:
        plain, *_ = _begin((x, None, *arrays[2:]), work, output, eps)
        by_channel = on_sides[..., :N].to(work.accumulator) * plain
        value = by_channel.view(2, B, H, N, N).sum((0, 2))
        on_mask.copy_(value if scaling is None else value / scaling)


def _norms_back(
    x: Any, on_xn: Any, scaling: Any, w: Any, on_x: Any, eps: float, work: _Work
) -> Any:
    """Write rows of the cotangent of x, and return those of the norm's weight and bias."""
    rows, C = x.shape
    BC = _power(C)
    BM = max(1, 1024 // BC)
    steps = _ceil(rows, BM * 4224)
    programs = _ceil(rows, BM * steps)
    sums = torch.empty((programs, 2, C), dtype=work.accumulator, device=x.device)
    constants = eps, C, BM, BC, _TYPES[work.accumulator], work.long
    tensors = x, on_xn, scaling, w, on_x, sums
    _launch(_norm_back, (2, 1), programs, tensors, (rows, steps), constants)
    return sums.sum(0)
