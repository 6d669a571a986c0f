"""The triangle multiplicative update on the GPU.

A row is an edge (b, i, j), a line all edges of (b, i). Forward: `_project` normalizes rows of x and
writes left and right, plane by plane as products want them, and the last gate; a batched product
makes o; `_finish` normalizes that and projects it. Bytes per row: x and the output once; left,
right, o and the gate, written and read, in the dtype of the factors. Where x has many channels and
rows, `_normalize` writes it first, so that `_project` can read it in parts (but see Hopper).

Backward: `_project` again, which keeps the logits of the gates too; `_finish_back`; two batched
products; `_sides_back`, which puts the cotangents of projections and of logits where left, right
and logits were; plain products with the x that `_normalize` writes, which give its cotangent and
those of the weights, a column of ones those of the biases; and `_norm_back`. Where memory is short,
all this goes member by member of the batch, and by some channels of left and right or some lines of
o at a time.

On Hopper, many rows with products of 16 bits have kernels of their own: `trimul_hopper` and
`trimul_hopper_wide` for the forward, `trimul_hopper_back` for a backward in which the logits aren't
kept, `project_back` does all between the cotangents of left and right and that of x, and those of
norms and weights come from the same sums over rows (`_through_norm`).

The programs of a kernel take blocks of a line, so that they lie within planes, whose lines have
places for a multiple of eight edges and are read and written in vectors. Products of 16 bits and of
float64 are torch's; those of float32 are ours, as torch's follow a global switch.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._frame.registry import register
from fusedops.trimul import in_parts, slices, warn_of_parts
from gpukern.constants import LOGISTIC, ONE
from gpukern.launch import Launcher, kernel_of_any_size, power, wide

# Gluon is experimental: another version may have another, or none.
hopper: Any = None
if triton.__version__.startswith("3.6."):
    with contextlib.suppress(ImportError, AttributeError):
        from gpukern import trimul_hopper, trimul_hopper_back, trimul_hopper_wide

        hopper, hopper_back, hopper_wide = trimul_hopper, trimul_hopper_back, trimul_hopper_wide

# Rows from which on it pays to write the normalized x of many channels, to round weights once, or,
# on Hopper, to have weights in shared memory for many tiles of rows.
_MANY = 1 << 16
# Channels that a program normalizes at once.
_CHANNELS = 128
# Channels, and eights of lines, that are worth a part of an update.
_PART = 16, 8
# Edges of a line from which on one of the batch goes alone through a backward pass.
_ALONE = 128
# Batches that a product over all rows is split into at most, and rows that make one more.
_SPLIT, _LONG = 64, 1 << 11

# For 16 bits, and TF32: rows of a program, channels that it takes at once, its warps and stages.
# Of `_project`, channels of sides, of the gate, and of x: forward, backward, and where x is ready.
_PROJECT = 128, 64, 64, 128, (8, 2)
_WITH_LOGITS = 128, 32, 64, 128, (8, 3)
_READY = 128, 64, 64, 64, (4, 3)

ALL = slice(None)

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _sigmoid(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(LOGISTIC, "=f,f", [x], tl.float32, True, 1)
    else:
        return 1 / (1 + tl.exp(-x))


@triton.jit
def _as_kept(s, gate, DOT: tl.constexpr):
    """Return a gate as the memory for it has it."""
    if gate.dtype.element_ty != DOT:
        s = s * ONE
    return s.to(gate.dtype.element_ty)


@triton.jit
def _opened(s, FLOAT: tl.constexpr, DOT: tl.constexpr):
    """Return a gate from what `_as_kept` made of it."""
    return s.to(FLOAT) if s.dtype == DOT else s.to(FLOAT) * (1 / ONE)


@triton.jit
def _place(program, L, N, pitch, BM: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr):
    """Return b, i, the number of (b, i, 0), j of a block, which are edges, which have a place."""
    blocks = tl.cdiv(N, BM)
    line = program // blocks
    j = program % blocks * BM + tl.arange(0, BM)
    if ALIGNED:
        # What the compiler then knows lets it read and write vectors.
        N = N // 8 * 8
    return line // L, line % L, line.to(LONG) * N, j, j < N, j < pitch // 8 * 8


@triton.jit
def _plane(c, batch, i, channels, plane, pitch, LONG: tl.constexpr):
    """Return where lines (b, c, i) of planes begin, which have `pitch` places a line."""
    pitch = pitch // 8 * 8
    return (batch.to(LONG) * channels + c) * (plane // 8 * 8) + i.to(LONG) * pitch


@triton.jit
def _side(h, batch, i, H: tl.constexpr, half, plane, pitch, LONG: tl.constexpr):
    """Return where lines (side, b, h, i) begin; `h` counts left before right."""
    of = (h // H).to(LONG) * (half // 8 * 8) + (h % H).to(LONG) * (plane // 8 * 8)
    return of + batch.to(LONG) * H * (plane // 8 * 8) + i.to(LONG) * (pitch // 8 * 8)


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
    # What is in the places of none is multiplied by zeros; channels are summed over.
    return y if C % BC == 0 else tl.where(inside, y, 0.0)


@triton.jit
def _add_one(to, live, there, C: tl.constexpr, KEPT: tl.constexpr, BM: tl.constexpr):
    """Write a one behind the elements of rows, and zeros behind that."""
    after = C + tl.arange(0, 16)
    one = tl.where((after == C)[None, :] & live[:, None], 1.0, 0.0)
    inside = there[:, None] & (after < KEPT)[None, :]
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
def _pair(
    p_w, g_w, first, last, k, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, DOT: tl.constexpr
):
    """Return rows of two weights, those of the second last, and a chunk of their columns."""
    row = tl.arange(0, 2 * BH)
    h = first + row % BH
    c = k * BC + tl.arange(0, BC)
    at = h[:, None] * C + c[None, :]
    inside = (h < last)[:, None] & (c < C)[None, :]
    return tl.load(tl.where((row < BH)[:, None], p_w + at, g_w + at), mask=inside, other=0.0).to(
        DOT
    )


@triton.jit
def _bias(b, first, last, BH: tl.constexpr, FLOAT: tl.constexpr):
    h = first + tl.arange(0, BH)
    return tl.load(b + h, mask=h < last, other=0.0).to(FLOAT)


@triton.jit
def _normalized(
    o, w, b, at, live, eps,
    H: tl.constexpr, BH: tl.constexpr, FLOAT: tl.constexpr, EXACT: tl.constexpr,
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
    scale = 1 / tl.sqrt(tl.sum(y * y, 0) / H + eps)
    y = y * scale[None, :]
    on = y
    if w is not None:
        on = on * tl.load(w + h, mask=h < H, other=0.0).to(FLOAT)[:, None]
    if b is not None:
        on = on + tl.load(b + h, mask=h < H, other=0.0).to(FLOAT)[:, None]
    return y, scale, on if H == BH else tl.where(inside, on, 0.0)


def _normalize(
    x, w, b, kept, L, N, pitch,
    EPS: tl.constexpr, C: tl.constexpr, KEPT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    FLOAT: tl.constexpr, EXACT: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the normalized rows of x, and behind each a one, but in the places of none a zero."""
    batch, i, row, j, live, there = _place(tl.program_id(0), L, N, pitch, BM, LONG, ALIGNED)
    near, rest, scale = _moments(x, row, j, live, EPS, C, BC, FLOAT, EXACT)
    to = kept + (_plane(0, batch, i, 1, L * pitch, pitch, LONG) + j)[:, None] * KEPT
    for k in tl.static_range((C + BC - 1) // BC):
        y = _chunk(x, w, b, row, j, live, near, rest, scale, k, C, BC, FLOAT)
        c = k * BC + tl.arange(0, BC)
        inside = there[:, None] & (c < C)[None, :]
        tl.store(to + c[None, :], y.to(kept.dtype.element_ty), mask=inside)
    _add_one(to, live, there, C, KEPT, BM)


def _project(
    x, mask, w, b, p_w, p_b, g_w, g_b, o_w, o_b, sides, logits, gate, kept,
    L, N, pitch, half, plane, mask_b, mask_i, mask_j,
    EPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, OUTPUT: tl.constexpr,
    KEPT: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    BH: tl.constexpr, BG: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, ASM: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write left and right, the last gate, and for a backward pass the logits of theirs.

    From what `_normalize` wrote (`kept`), or with its work done here. A program takes one of PARTS
    shares of the channels. None are sides where H is zero, and gates where G is.
    """
    READY: tl.constexpr = kept is not None
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    batch, i, row, j, live, there = _place(program, L, N, pitch, BM, LONG, ALIGNED)
    CHUNKS: tl.constexpr = (C + BC - 1) // BC
    xs = ()
    if READY:
        to = kept + (_plane(0, batch, i, 1, L * pitch, pitch, LONG) + j)[:, None] * KEPT
    else:
        near, rest, scale = _moments(x, row, j, live, EPS, C, BC, FLOAT, EXACT)
        for k in tl.static_range(CHUNKS):
            xs = xs + (_chunk(x, w, b, row, j, live, near, rest, scale, k, C, BC, FLOAT).to(DOT),)
    if mask is not None:
        m = tl.load(mask + batch * mask_b + i * mask_i + j * mask_j, mask=live, other=0.0)
        m = m.to(FLOAT)
    SIDES: tl.constexpr = (2 * H + BH - 1) // BH
    GATES: tl.constexpr = (G + BG - 1) // BG
    # Where x is ready, a share is one block of channels, of the sides or of the gate.
    PER: tl.constexpr = 1 if READY else (SIDES + PARTS - 1) // PARTS
    PER_GATE: tl.constexpr = 1 if READY else (GATES + PARTS - 1) // PARTS
    if SIDES > 0:
        if not READY or part < SIDES:
            for step in range(PER):
                first = (part * PER + step) * BH
                both = tl.zeros((BM, 2 * BH), FLOAT)
                if READY:
                    for k in range(CHUNKS):
                        c = k * BC + tl.arange(0, BC)
                        inside = there[:, None] & (c < C)[None, :]
                        rows = tl.load(to + c[None, :], mask=inside, other=0.0).to(DOT)
                        pair = _pair(p_w, g_w, first, 2 * H, k, C, BH, BC, DOT)
                        both = tl.dot(rows, tl.trans(pair), both, PRECISION, out_dtype=FLOAT)
                else:
                    for k in tl.static_range(CHUNKS):
                        pair = _pair(p_w, g_w, first, 2 * H, k, C, BH, BC, DOT)
                        both = tl.dot(xs[k], tl.trans(pair), both, PRECISION, out_dtype=FLOAT)
                # A thread has both halves of its columns.
                p, g = tl.split(tl.permute(tl.reshape(both, (BM, 2, BH)), (0, 2, 1)))
                if p_b is not None:
                    p += _bias(p_b, first, 2 * H, BH, FLOAT)[None, :]
                if g_b is not None:
                    g += _bias(g_b, first, 2 * H, BH, FLOAT)[None, :]
                side = p * _sigmoid(g, ASM)
                if mask is not None:
                    side = side * m[:, None]
                h = first + tl.arange(0, BH)
                at = _side(h, batch, i, H, half, plane, pitch, LONG)[:, None] + j[None, :]
                inside = (h < 2 * H)[:, None] & there[None, :]
                tl.store(sides + at, tl.trans(side.to(DOT)), mask=inside)
                if logits is not None:
                    tl.store(logits + at, tl.trans(g.to(DOT)), mask=inside)
    if GATES > 0:
        if not READY or part >= SIDES:
            for step in range(PER_GATE):
                begin = ((part - SIDES if READY else part) * PER_GATE + step) * BG
                if begin < G:
                    opened = tl.zeros((BM, BG), FLOAT)
                    if READY:
                        for k in range(CHUNKS):
                            c = k * BC + tl.arange(0, BC)
                            inside = there[:, None] & (c < C)[None, :]
                            rows = tl.load(to + c[None, :], mask=inside, other=0.0).to(DOT)
                            weight = _weight(o_w, begin, G, k, C, BG, BC, DOT)
                            opened = tl.dot(
                                rows, tl.trans(weight), opened, PRECISION, out_dtype=FLOAT
                            )
                    else:
                        for k in tl.static_range(CHUNKS):
                            weight = _weight(o_w, begin, G, k, C, BG, BC, DOT)
                            opened = tl.dot(
                                xs[k], tl.trans(weight), opened, PRECISION, out_dtype=FLOAT
                            )
                    if o_b is not None:
                        opened += _bias(o_b, begin, G, BG, FLOAT)[None, :]
                    value = _as_kept(_sigmoid(opened, ASM), gate, DOT)
                    of = begin + tl.arange(0, BG)
                    if OUTPUT:
                        at = (row + j)[:, None] * G + of[None, :]
                        tl.store(gate + at, value, mask=live[:, None] & (of < G)[None, :])
                    else:
                        at = _plane(of, batch, i, G, L * pitch, pitch, LONG)[:, None] + j[None, :]
                        inside = (of < G)[:, None] & there[None, :]
                        tl.store(gate + at, tl.trans(value), mask=inside)


@triton.jit
def _given(h, batch, i, N, H: tl.constexpr, plane, LONG: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where lines (b, h, i) of planes without gaps begin."""
    if ALIGNED:
        N = N // 8 * 8
        plane = plane // 8 * 8
    return (batch.to(LONG) * H + h) * plane + i.to(LONG) * N


def _finish(
    o, gate, w, b, p_w, p_b, out, L, N, pitch, plane, shift,
    EPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, OUTPUT: tl.constexpr,
    BM: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the output: o, given times a power of two, normalized, gated and projected."""
    batch, i, row, j, live, there = _place(tl.program_id(0), L, N, pitch, BM, LONG, ALIGNED)
    h = tl.arange(0, BH)
    to_gate = gate + (row + j)[:, None] * C
    # What is on its way while others are summed costs no time.
    if not OUTPUT:
        at = _plane(h, batch, i, H, L * pitch, pitch, LONG)[:, None] + j[None, :]
        opened = tl.load(gate + at, mask=(h < H)[:, None] & there[None, :], other=0.0)
    elif C <= BN:
        c_first = tl.arange(0, BN)
        within = live[:, None] & (c_first < C)[None, :]
        s_first = tl.load(to_gate + c_first[None, :], mask=within, other=0.0)
    at = _given(h, batch, i, N, H, plane, LONG, ALIGNED)[:, None] + j[None, :]
    # The norm of o times a number is that of o with another eps.
    eps = tl.exp2((2 * shift).to(tl.float32)).to(FLOAT) * EPS
    _, _, on = _normalized(o, w, b, at, live, eps, H, BH, FLOAT, EXACT)
    if not OUTPUT:
        on = on * _opened(opened, FLOAT, DOT)
    left = tl.trans(on.to(DOT))
    for block in range((C + BN - 1) // BN):
        c = block * BN + tl.arange(0, BN)
        inside = live[:, None] & (c < C)[None, :]
        if OUTPUT:
            s = s_first if C <= BN else tl.load(to_gate + c[None, :], mask=inside, other=0.0)
        weight = _weight(p_w, block * BN, C, 0, H, BN, BH, DOT)
        value = tl.dot(left, tl.trans(weight), None, PRECISION, out_dtype=FLOAT)
        if DOT == tl.bfloat16 and p_w.dtype.element_ty == tl.float32:
            # What rounding the weight left.
            rest = _weight(p_w, block * BN, C, 0, H, BN, BH, FLOAT) - weight.to(FLOAT)
            value = tl.dot(left, tl.trans(rest.to(DOT)), value, PRECISION, out_dtype=FLOAT)
        if p_b is not None:
            value += _bias(p_b, block * BN, C, BN, FLOAT)[None, :]
        if OUTPUT:
            value = value * _opened(s, FLOAT, DOT)
        to = out + (row + j)[:, None] * C + c[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def _finish_back(
    o, gate, cotangent, scaling, w, b, p_w, p_b, on_o, on_gate, on_p, kept, sums,
    L, N, pitch, plane, on_plane,
    EPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, OUTPUT: tl.constexpr,
    KEPT: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of o, of the last gate's logits, and of what was projected.

    With that itself (kept), and sums over rows for the weight and the bias of the norm.
    """
    batch, i, row, j, live, there = _place(tl.program_id(0), L, N, pitch, BM, LONG, ALIGNED)
    h = tl.arange(0, BH)
    at = _given(h, batch, i, N, H, plane, LONG, ALIGNED)[:, None] + j[None, :]
    y, scale, on = _normalized(o, w, b, at, live, EPS, H, BH, FLOAT, EXACT)
    inside = (h < H)[:, None] & there[None, :]
    place = (_plane(0, batch, i, 1, L * pitch, pitch, LONG) + j)[:, None] * G
    left = tl.trans(on.to(DOT))
    on_on = tl.zeros((BH, BM), FLOAT)
    for block in range((C + BN - 1) // BN):
        c = block * BN + tl.arange(0, BN)
        within = live[:, None] & (c < C)[None, :]
        at_c = (row + j)[:, None] * C + c[None, :]
        g = tl.load(cotangent + at_c, mask=within, other=0.0).to(FLOAT)
        if scaling is not None:
            g = g * tl.load(scaling)
        if OUTPUT:
            s = tl.load(gate + at_c, mask=within, other=0.0)
            s = _opened(s, FLOAT, DOT)
        weight = _weight(p_w, block * BN, C, 0, H, BN, BH, DOT)
        if OUTPUT:
            value = tl.dot(left, tl.trans(weight), None, PRECISION, out_dtype=FLOAT)
            if p_b is not None:
                value += _bias(p_b, block * BN, C, BN, FLOAT)[None, :]
            on_s = (g * value * s * (1 - s)).to(DOT)
            tl.store(on_gate + place + c[None, :], on_s, mask=there[:, None] & (c < C)[None, :])
            g = g * s
        if on_p is not None:
            tl.store(on_p + at_c, g.to(DOT), mask=within)
        on_on = tl.dot(tl.trans(weight), tl.trans(g.to(DOT)), on_on, PRECISION, out_dtype=FLOAT)
    projected = on
    if not OUTPUT:
        at_gate = _plane(h, batch, i, H, L * pitch, pitch, LONG)[:, None] + j[None, :]
        opened = _opened(tl.load(gate + at_gate, mask=inside, other=0.0), FLOAT, DOT)
        on_open = tl.trans((on_on * on * opened * (1 - opened)).to(DOT))
        across = there[:, None] & (h < H)[None, :]
        tl.store(on_gate + place + h[None, :], on_open, mask=across)
        on_on = on_on * opened
        projected = on * opened
    to = kept + (row + j)[:, None] * KEPT
    projected = tl.trans(projected.to(DOT))
    tl.store(to + h[None, :], projected, mask=live[:, None] & (h < H)[None, :])
    _add_one(to, live, live, H, KEPT, BM)
    on_on = tl.where(inside, on_on, 0.0)
    total = sums + tl.program_id(0).to(tl.int64) * 2 * H + h
    tl.store(total, tl.sum(on_on * y, 1), mask=h < H)
    tl.store(total + H, tl.sum(on_on, 1), mask=h < H)
    if w is not None:
        on_on = on_on * tl.load(w + h, mask=h < H, other=0.0).to(FLOAT)[:, None]
    along = tl.sum(on_on * y, 0) / H
    on_on = (on_on - (tl.sum(on_on, 0) / H)[None, :] - y * along[None, :]) * scale[None, :]
    to_o = _plane(h, batch, i, H, on_plane, pitch, LONG)[:, None] + j[None, :]
    tl.store(on_o + to_o, on_on.to(DOT), mask=inside)


def _sides_back(
    on_sides, sides, logits, mask, on_mask, N, pitch, half, plane, mask_b, mask_i, mask_j,
    H: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Overwrite sides by the cotangents of projections, and logits by those of logits.

    For a cotangent of the mask, sides are those without it.
    """
    program = tl.program_id(0) // PARTS
    batch, i, row, j, live, there = _place(program, N, N, pitch, BM, LONG, ALIGNED)
    by_mask = tl.zeros((BM,), FLOAT)
    if mask is not None:
        m = tl.load(mask + batch * mask_b + i * mask_i + j * mask_j, mask=live, other=0.0)
        m = m.to(FLOAT)[None, :]
    PER: tl.constexpr = ((2 * H + BH - 1) // BH + PARTS - 1) // PARTS
    for step in range(PER):
        h = (tl.program_id(0) % PARTS * PER + step) * BH + tl.arange(0, BH)
        at = _side(h, batch, i, H, half, plane, pitch, LONG)[:, None] + j[None, :]
        inside = (h < 2 * H)[:, None] & there[None, :]
        d = tl.load(on_sides + at, mask=inside, other=0.0).to(FLOAT)
        # A product left the places of no edge as they were.
        d = tl.where(live[None, :], d, 0.0)
        a = tl.load(sides + at, mask=inside, other=0.0).to(FLOAT)
        g = tl.load(logits + at, mask=inside, other=0.0).to(FLOAT)
        if on_mask is not None:
            by_mask += tl.sum(d * a, 0)
            a = a * m
        # a = p s m, so that its derivative by g is a (1 - s).
        on_g = d * a * _sigmoid(-g, ASM)
        d = d * _sigmoid(g, ASM)
        if mask is not None:
            d = d * m
        tl.store(sides + at, d.to(DOT), mask=inside)
        tl.store(logits + at, on_g.to(DOT), mask=inside)
    if on_mask is not None:
        tl.store(on_mask + row + j, by_mask, mask=live)


def _norm_back(
    x, on_xn, scaling, w, on_x, sums, rows, N, pitch, steps,
    EPS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    FLOAT: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Write the cotangent of x, and sums over rows for the weight and the bias of the norm."""
    c = tl.arange(0, BC)
    by_weight = tl.zeros((BM, BC), FLOAT)
    by_bias = tl.zeros((BM, BC), FLOAT)
    step = 0
    while step < steps:
        row = (tl.program_id(0).to(LONG) * steps + step) * BM + tl.arange(0, BM)
        live = (row < rows)[:, None] & (c < C)[None, :]
        at = row[:, None] * C + c[None, :]
        place = row + row // N * (pitch - N)
        v = tl.load(on_xn + place[:, None] * C + c[None, :], mask=live, other=0.0).to(FLOAT)
        y = tl.load(x + at, mask=live, other=0.0).to(FLOAT)
        y = tl.where(live, y - (tl.sum(y, 1) / C)[:, None], 0.0)
        y = tl.where(live, y - (tl.sum(y, 1) / C)[:, None], 0.0)
        scale = 1 / tl.sqrt(tl.sum(y * y, 1) / C + EPS)
        y = y * scale[:, None]
        if scaling is not None:
            v = v / tl.load(scaling)
        by_weight += v * y
        by_bias += v
        if w is not None:
            v = v * tl.load(w + c, mask=c < C, other=0.0).to(FLOAT)[None, :]
        along = tl.sum(v * y, 1) / C
        v = (v - (tl.sum(v, 1) / C)[:, None] - y * along[:, None]) * scale[:, None]
        tl.store(on_x + at, v.to(on_x.dtype.element_ty), mask=live)
        step += 1
    to = sums + tl.program_id(0).to(tl.int64) * 2 * C + c
    tl.store(to, tl.sum(by_weight, 0), mask=c < C)
    tl.store(to + C, tl.sum(by_bias, 0), mask=c < C)


def _through_norm(
    parts, weight, w, b, scaling, on_weight, on_bias, on_norm, many, total, first,
    C: tl.constexpr, KEPT: tl.constexpr, ONES: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of rows of a weight and its bias, and what they add to a norm's.

    The parts of sums over rows are of z y, and of z e from column ONES on, which is one column
    where e is one: y was standardized and times e, given the norm's weight w and bias b, and
    projected, and z is the cotangent of that.
    """
    row = tl.program_id(0)
    c = tl.arange(0, BC)
    inside = c < C
    by_y = tl.zeros((BP, BC), tl.float32)
    by_one = tl.zeros((BP, BC), tl.float32)
    by_bias = tl.zeros((BP,), tl.float32)
    begin = 0
    while begin < many:
        part = begin + tl.arange(0, BP)
        at = parts + (part.to(tl.int64) * total + first + row) * KEPT
        there = (part < many)[:, None] & inside[None, :]
        by_y += tl.load(at[:, None] + c[None, :], mask=there, other=0.0)
        if ONES > C:
            by_one += tl.load(at[:, None] + C + c[None, :], mask=there, other=0.0)
        by_bias += tl.load(at + ONES, mask=part < many, other=0.0)
        begin += BP
    by_y, by_one, by_bias = tl.sum(by_y, 0), tl.sum(by_one, 0), tl.sum(by_bias, 0)
    if ONES == C:
        by_one += by_bias
    if scaling is not None:
        by_y /= tl.load(scaling)
        by_one /= tl.load(scaling)
        by_bias /= tl.load(scaling)
    of = tl.load(weight + row * C + c, mask=inside, other=0.0).to(tl.float32)
    to = on_norm + row * 2 * C + c
    tl.store(to, of * by_y, mask=inside)
    tl.store(to + C, of * by_one, mask=inside)
    if w is not None:
        by_y *= tl.load(w + c, mask=inside, other=0.0).to(tl.float32)
    if b is not None:
        by_y += by_one * tl.load(b + c, mask=inside, other=0.0).to(tl.float32)
    if on_weight is not None:
        tl.store(on_weight + row * C + c, by_y, mask=inside)
    if on_bias is not None:
        tl.store(on_bias + row, by_bias)


def _sum_parts(
    parts, scaling, on_weight, on_bias, many, total, first,
    C: tl.constexpr, KEPT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, NORM: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Write the sums of parts: rows of a weight, with the bias after them, or both of a norm."""
    row = tl.program_id(0)
    c = tl.arange(0, BC)
    inside = c < C
    sums = tl.zeros((BP, BC), FLOAT)
    by_bias = tl.zeros((BP,), FLOAT)
    begin = 0
    while begin < many:
        part = begin + tl.arange(0, BP)
        at = parts + (part.to(tl.int64) * total + first + row) * KEPT
        there = (part < many)[:, None] & inside[None, :]
        sums += tl.load(at[:, None] + c[None, :], mask=there, other=0.0)
        if not NORM:
            by_bias += tl.load(at + C, mask=part < many, other=0.0)
        begin += BP
    found, of_bias = tl.sum(sums, 0), tl.sum(by_bias, 0)
    if scaling is not None:
        found /= tl.load(scaling)
        of_bias /= tl.load(scaling)
    if NORM:
        if on_weight is not None:
            tl.store(on_weight + c, found, mask=inside & (row == 0))
        if on_bias is not None:
            tl.store(on_bias + c, found, mask=inside & (row == 1))
    else:
        if on_weight is not None:
            tl.store(on_weight + row.to(tl.int64) * C + c, found, mask=inside)
        if on_bias is not None:
            tl.store(on_bias + row, of_bias)


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
    _sides_back: ("on_sides", "sides", "logits"),
    _norm_back: ("x", "on_xn", "on_x"),
    _through_norm: (),
    _sum_parts: (),
    _product: (),
}
_ON_HOPPER = {}
if hopper is not None:
    _ON_HOPPER = {**hopper.POINTERS, **hopper_back.POINTERS, **hopper_wide.POINTERS}


@functools.cache
def _launcher(kernel: Any, warps: int, stages: int) -> Launcher:
    if kernel in _ON_HOPPER:
        # A multiprocessor has one of these programs, of as many registers as there are.
        return Launcher(kernel_of_any_size(kernel, _ON_HOPPER[kernel], hopper.jit), warps)
    # So that a multiprocessor has room for two programs of eight warps, or three of four.
    registers = 128 if warps == 8 else 168 if kernel is _finish else None
    return Launcher(kernel_of_any_size(kernel, _POINTERS[kernel]), warps, registers, stages)


def _launch(
    kernel: Any,
    how: tuple[int, int],
    programs: int,
    tensors: tuple[Any, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> None:
    """Launch with (warps, stages) of how."""
    # A descriptor has no dtype: it follows from the other tensors', and its block from constants.
    kinds = tuple([getattr(tensor, "dtype", None) for tensor in tensors])
    key = tensors[0].device, kinds, wide(*numbers), constants
    _launcher(kernel, *how)(programs, key, *tensors, *numbers, *constants)


def _strides(mask: Any) -> tuple[int, ...]:
    return (0, 0, 0) if mask is None else mask.stride()


def _ceil(n: int, by: int) -> int:
    return -(-n // by)


def _up(n: int) -> int:
    """Return the next multiple of eight."""
    return _ceil(n, 8) * 8


@functools.cache
def _processors(device: Any) -> int:
    """Return how many multiprocessors there are; two, for the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _is_hopper(device: Any) -> bool:
    if hopper is None or device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def _is_aligned(array: Any) -> bool:
    """Return whether an array has no gaps and begins at a multiple of 16 bytes."""
    return array.is_contiguous() and array.data_ptr() % 16 == 0


def _aligned(array: Any) -> Any:
    """Return such an array of the same values."""
    if array is None or _is_aligned(array):
        return array
    return array.clone(memory_format=torch.contiguous_format)


class _Update:
    """An update's arguments as kernels take them, and the parts that it is done in.

    Of planes, lines have places for a multiple of eight edges, so that vectors can be read and
    written; in the places of none are zeros.
    """

    def __init__(self, a: Any) -> None:
        self.x, self.mask = _aligned(a.x), a.mask
        self.norm = [_aligned(a.norm_in_weight), _aligned(a.norm_in_bias)]
        given = a.p_in_weight, a.p_in_bias, a.g_in_weight, a.g_in_bias
        self.sides = [_aligned(array) for array in given]
        self.norm_out = [_aligned(a.norm_out_weight), _aligned(a.norm_out_bias)]
        self.p_out = [_aligned(a.p_out_weight), _aligned(a.p_out_bias)]
        self.g_out = [_aligned(a.g_out_weight), _aligned(a.g_out_bias)]
        p_w, _, g_w, _ = self.sides
        if p_w.dtype != g_w.dtype:
            # Kernels read either from one place or from the other.
            kind = torch.promote_types(p_w.dtype, g_w.dtype)
            self.sides[::2] = p_w.to(kind), g_w.to(kind)
        self.direction, self.eps, self.limit = a.direction, a.eps, a.max_memory
        self.output, precision = a.gate == "output", a.precision
        x = self.x
        self.B, self.N, _, self.C = x.shape
        self.H, self.G = self.sides[0].shape[0] // 2, self.g_out[0].shape[0]
        self.pitch, self.width = _up(self.N), _up(self.C + 1)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.dtype = dtype or torch.promote_types(x.dtype, torch.float32)
        # A gate is between zero and one, where fp16 has three binary digits more.
        self.opened = torch.float16 if self.dtype == torch.bfloat16 else self.dtype
        self.accumulator = torch.promote_types(self.dtype, torch.float32)
        self.fast = self.dtype.itemsize == 2 or precision == "tf32"
        self.precision = "tf32" if precision == "tf32" else "ieee"
        if self.mask is not None:
            # Kernels find a place within a mask's memory in 32 bits.
            steps = zip(self.mask.shape, self.mask.stride(), strict=True)
            if sum((n - 1) * step for n, step in steps) >> 31:
                self.mask = self.mask.contiguous()
        # A mean over edges is in the range of float16 where the factors are, if their sum isn't.
        self.shift = -round(math.log2(max(self.N, 1))) if self.dtype == torch.float16 else 0
        # What rounding a mean to float32 leaves counts.
        exact = self.dtype.itemsize > 2
        # The interpreter's products know no bfloat16.
        narrow = self.dtype == torch.bfloat16 and not x.is_cuda
        dot = tl.float32 if narrow else _TYPES[self.dtype]
        self.float = _TYPES[self.accumulator]
        self.types = dot, self.float, self.precision, exact
        self.exact = exact
        self.asm = self.fast and x.is_cuda and torch.version.cuda is not None
        size = self.B * self.N * self.pitch * max(self.width, 2 * self.H, self.G)
        self.long = tl.int64 if size >> 31 else tl.int32
        self.place = self.long, self.N % 8 == 0
        # The output's gate fits in the output's place: it is read just before that is written.
        self.in_out = self.output and x.dtype == self.dtype
        # What has planes without gaps, and products of 16 bits.
        self.on_hopper = _is_hopper(x.device) and self.N % 8 == 0 and self.dtype.itemsize == 2

    def new(self, *shape: int, dtype: Any = None) -> Any:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.x.device)

    def divide(self, need: Callable[[int, int, int], int]) -> None:
        """Find parts of the batch, of the channels of left and right, and of the lines.

        They `need` no more numbers than there may be, if there are such.
        """
        sizes = self.B, self.H, _ceil(self.N, 8)

        # Eight lines begin at a multiple of 16 bytes.
        def size(b: int, h: int, lines: int) -> int:
            return self.dtype.itemsize * need(b, h, 8 * lines)

        # Smaller parts take long, and much smaller ones would save little.
        sensible = tuple(map(min, (1, *_PART), sizes))
        limit = self.limit and max(self.limit, 5 * size(1, 1, 1) // 4)
        parts = in_parts(sizes, size, limit, sensible, (1, 1, 1))
        if self.limit and self.limit < size(*sensible):
            warn_of_parts(self.limit, size(*sensible))
        self.batches, self.channels, lines = (
            slices(n, step) for n, step in zip(sizes, parts, strict=True)
        )
        self.lines = [slice(8 * eight.start, min(8 * eight.stop, self.N)) for eight in lines]
        self.whole = len(self.channels) == len(self.lines) == 1

    def back_on_hopper(self, on_mask: Any) -> bool:
        """Return whether Hopper's kernels do a backward pass."""
        if not self.on_hopper or not self.whole or self.N**2 < _MANY or on_mask is not None:
            return False
        ways = (
            hopper_back.way_to_project_back(self.C, self.H, self.G),
            hopper_back.way_to_finish_back(self.C, self.H),
        )
        return None not in ways

    def gate(self, members: int, lines: slice, out: Any = None) -> Any:
        """Return memory for the last gate: rows of the output's, planes of the other."""
        n = len(range(*lines.indices(self.N)))
        if not self.output:
            return self.new(members, self.G, n, self.pitch, dtype=self.opened)
        if self.in_out and out is not None and _is_aligned(out):
            return out.view(self.opened)
        return self.new(members, n, self.N, self.G, dtype=self.opened)

    def kept(self, members: int, lines: int) -> Any:
        """Return memory for rows of the normalized x, with a column of ones."""
        return self.new(members, lines, self.pitch, self.width)

    def edges(self, b: slice, lines: slice) -> tuple[Any, Any]:
        """Return some edges of x and of the mask."""
        return self.x[b, lines], None if self.mask is None else self.mask[b, lines]

    def of(self, h: slice) -> list[Any]:
        """Return the projections and gates of some channels, left before right."""
        if h.stop - h.start == self.H:
            return self.sides
        return [
            None if a is None else torch.cat([a[h], a[self.H + h.start : self.H + h.stop]])
            for a in self.sides
        ]

    def project(
        self,
        x: Any,
        mask: Any,
        weights: Sequence[Any] = (None,) * 4,
        *,
        sides: Any = None,
        logits: Any = None,
        gate: Any = None,
    ) -> None:
        """Fill what is given: planes of sides, the logits of their gates, the last gate."""
        B, L, N, C = x.shape
        rows, lines = B * L * N, B * L
        many = rows >= _MANY
        p_w, p_b, g_w, g_b = weights
        o_w, o_b = self.g_out
        H, G = 0 if sides is None else p_w.shape[0] // 2, 0 if gate is None else self.G
        logging = logits is not None
        if self.on_hopper and many and not logging and hopper_wide.way_to_project_wide(C, H, G):
            self.project_wide(x, mask, weights, sides, gate)
            return
        numbers: tuple[int, ...]
        half, plane = (sides.stride(0), sides.stride(1)) if H else (0, 0)
        way = self.on_hopper and many and hopper.way_to_project(C, H, G, logging)
        tensors = x, mask, *self.norm, p_w, p_b, g_w, g_b, o_w, o_b, sides, logits, gate
        if way:
            numbers = B, L * N, N, half, plane, *_strides(mask)
            constants = self.eps, C, H, G, self.output, 16 // x.dtype.itemsize, *way
            constants += self.types[0], self.long
            programs = _processors(x.device)
            _launch(hopper.project, (way[0], 1), programs, tensors, numbers, constants)
            return
        if many:
            p_w, g_w, o_w = (None if a is None else a.to(self.dtype) for a in (p_w, g_w, o_w))
        ready, kept = many and C > _CHANNELS, None
        if ready:
            kept = self.normalized(x)
        BM, BH, BG, chunk, how = 32, 32, 32, 64 if self.dtype.itemsize < 8 else 32, (4, 1)
        if self.fast:
            BM, BH, BG, chunk, how = _READY if ready else _WITH_LOGITS if logging else _PROJECT
        chunk = min(chunk, power(C, 16))
        if C > chunk and not ready:
            how = how[0], 1
        if not x.is_cuda:
            # The interpreter's time goes by programs and steps.
            BM, BH, BG = 16, 128, 128
        BM = min(BM, power(N, 16))
        blocks, programs = _ceil(2 * H, BH), lines * _ceil(N, BM)
        # Few rows are shared by as many programs as a GPU runs at once.
        parts = max(1, min(blocks, _ceil(2 * _processors(x.device), programs)))
        if ready:
            parts = blocks + _ceil(G, BG)
        numbers = L, N, self.pitch, half, plane, *_strides(mask)
        constants = self.eps, C, H, G, self.output, self.width, parts, BM, chunk, BH, BG
        constants += *self.types, self.asm, *self.place
        _launch(_project, how, programs * parts, (*tensors, kept), numbers, constants)

    def project_wide(
        self, x: Any, mask: Any, weights: Sequence[Any], sides: Any, gate: Any
    ) -> None:
        """Fill planes of left and right, and the last gate if given, for many channels of x."""
        B, L, N, C = x.shape
        o_w, o_b = (None, None) if gate is None else self.g_out
        p_w, p_b, g_w, g_b = weights
        H, G = p_w.shape[0] // 2, 0 if gate is None else self.G
        block, slots = hopper_wide.way_to_project_wide(C, H, G)
        vector = 16 // x.dtype.itemsize
        packed, biases = self.new(4 * H + G, C), None
        if any(bias is not None for bias in (p_b, g_b, o_b, self.norm[1])):
            biases = self.new(4 * H + G, dtype=torch.float32)
        tensors = p_w, p_b, g_w, g_b, o_w, o_b, *self.norm, packed, biases
        constants = C, H, self.output, vector, block
        _launch(hopper_wide.pack, (4, 1), (4 * H + G) // 16, tensors, (), constants)
        half, plane = sides.stride(0), sides.stride(1)
        tensors = x, mask, hopper_wide.blocks_of(packed, block), biases, sides, gate
        numbers = B, L * N, N, half, plane, *_strides(mask)
        constants = self.eps, C, H, G, self.output, vector, block, slots, self.long
        programs = _processors(x.device)
        _launch(hopper_wide.project_wide, (4, 1), programs, tensors, numbers, constants)

    def normalized(self, x: Any) -> Any:
        """Return rows of the normalized x, with a column of ones."""
        B, L, N, C = x.shape
        kept = self.kept(B, L)
        chunk = min(_CHANNELS if self.fast else 64, power(C, 16))
        constants = self.eps, C, self.width, 16, chunk, self.float, self.exact, *self.place
        tensors = x, *self.norm, kept
        numbers = L, N, self.pitch
        _launch(_normalize, (4, 1), B * L * _ceil(N, 16), tensors, numbers, constants)
        return kept

    def products(self, a: Any, b: Any, out: Any, *, scale: float = 1.0, add: bool = False) -> None:
        """Write products of batches of matrices, or add them to what is there."""
        if out.dtype != self.dtype:
            if a.is_cuda:
                torch.baddbmm(out, a, b, out.dtype, beta=float(add), alpha=scale, out=out)
            else:
                torch.baddbmm(out, a.float(), b.float(), beta=float(add), alpha=scale, out=out)
            return
        if self.dtype != torch.float32:
            torch.baddbmm(out, a, b, beta=float(add), alpha=scale, out=out)
            return
        size = 128 if self.fast else 64
        (batches, M, K), N = a.shape, b.shape[2]
        programs = batches * _ceil(M, size) * _ceil(N, size)
        numbers = M, N, K, *a.stride(), *b.stride(), *out.stride()
        constants = size, size, 32 if a.is_cuda else 128, add, self.precision
        _launch(_product, (8 if self.fast else 4, 2), programs, (a, b, out), numbers, constants)

    def over_rows(self, a: Any, b: Any) -> Any:
        """Return parts (n, K, M) of Σ a b of matrices, of very many rows, in float32 or better."""
        parts = self.parts_over_rows(a, b)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def sum_parts(
        self,
        parts: Any,
        first: int,
        scaling: Any,
        on_weight: Any,
        on_bias: Any,
        columns: int = 0,
        norm: bool = False,
    ) -> None:
        """Write the sums of parts: to a weight of so many columns and its bias, or to a norm's."""
        if on_weight is None and on_bias is None:
            return
        many, total, kept = parts.shape
        C = kept if norm else columns
        rows = 2 if norm else (on_bias if on_weight is None else on_weight).shape[0]
        BC = power(C, 16)
        constants = C, kept, max(1, 4096 // BC), BC, norm, self.float
        tensors = parts, scaling, on_weight, on_bias
        _launch(_sum_parts, (4, 1), rows, tensors, (many, total, first), constants)

    def parts_over_rows(self, a: Any, b: Any) -> list[Any]:
        """Return parts of that (..., K, M), for each of the matrices."""
        rows = a.shape[2]
        least = 1 if rows % 8 else 8
        split = max(n for n in range(1, min(_SPLIT, rows // _LONG) + 2) if rows % (least * n) == 0)
        pairs = [(a, b)]
        if split > 1:
            pairs = [
                (m.unflatten(1, (split, -1)).transpose(0, 1), n.unflatten(0, (split, -1)))
                for m, n in zip(a, b, strict=True)
            ]
        return [self._widened(m, n) for m, n in pairs]

    def _widened(self, a: Any, b: Any) -> Any:
        if self.dtype == torch.float32:
            out = self.new(len(a), a.shape[1], b.shape[2])
            self.products(a, b, out)
            return out
        if self.dtype == torch.float64:
            return a @ b
        if a.is_cuda:
            return torch.bmm(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()

    def multiply(self, sides: Any, o: Any, h: slice, scale: float = 1.0) -> None:
        """Write planes of o."""
        left, right = sides[..., : self.N]
        left, right = (left.mT, right) if self.direction == "incoming" else (left, right.mT)
        self.products(left, right, o[:, h].flatten(0, 1), scale=scale)

    def multiply_back(self, sides: Any, on_o: Any, on_sides: Any) -> None:
        """Write the cotangents of left and right."""
        left, right = sides[..., : self.N]
        on_left, on_right = on_sides[..., : self.N]
        if self.direction == "incoming":
            self.products(right, on_o.mT, on_left)
            self.products(left, on_o, on_right)
        else:
            self.products(on_o, right, on_left)
            self.products(on_o.mT, left, on_right)

    def triangles(self, b: slice, o: Any, scale: float = 1.0) -> None:
        """Write o of some of the batch, some channels at a time."""
        for h in self.channels:
            sides = self.new(2, len(o) * (h.stop - h.start), self.N, self.pitch)
            for lines in self.lines:
                self.project(*self.edges(b, lines), self.of(h), sides=sides[:, :, lines])
            self.multiply(sides, o, h, scale)

    def finish(self, o: Any, gate: Any, out: Any, shift: int) -> None:
        """Write the output: o, given times a power of two, normalized, gated and projected."""
        B, L, N, C = out.shape
        result = out if _is_aligned(out) else torch.empty_like(out)
        tensors = o, gate, *self.norm_out, *self.p_out, result
        many = B * L * N >= _MANY
        split = self.dtype == torch.bfloat16 and self.p_out[0].dtype == torch.float32
        sizes = C, self.H, out.dtype.itemsize
        way = self.on_hopper and many and hopper.way_to_finish(*sizes, split)
        numbers: tuple[int, ...]
        if way:
            numbers = B, L * N, o.stride(1), shift
            vector = 16 // out.dtype.itemsize
            constants = self.eps, C, self.H, self.output, vector, *way, self.types[0], self.long
            programs = _processors(out.device)
            _launch(hopper.finish, (way[0], 1), programs, tensors, numbers, constants)
        else:
            BH = power(self.H, 16)
            BM = min(max(16, 8192 // BH) if self.fast else 16, power(N, 16))
            # A block of the weight is no larger than it is where H is 128.
            BN = max(16, min(128 if self.fast else 32, (1 << 14) // BH, power(C, 16)))
            constants = self.eps, C, self.H, self.output, BM, BH, BN, *self.types, *self.place
            numbers = L, N, self.pitch, o.stride(1), shift
            _launch(_finish, (4, 1), B * L * _ceil(N, BM), tensors, numbers, constants)
        if result is not out:
            out.copy_(result)

    def finish_back(
        self,
        o: Any,
        gate: Any,
        cotangent: Any,
        scaling: Any,
        on_o: Any,
        on_gate: Any,
        scratch: Any = None,
    ) -> tuple[Any, Any]:
        """Write the cotangents of o and of the gate's logits; return those of the end's weights.

        What is in `scratch`, an array like x, may be overwritten.
        """
        B, L, N, C = cotangent.shape
        H, width = self.H, _up(self.H + 1)
        kept = self.new(B, L * N, width)
        as_given = not self.output and scaling is None and cotangent.dtype == self.dtype
        fits = scratch is not None and scratch.dtype == self.dtype and _is_aligned(scratch)
        on_p = cotangent if as_given else scratch if fits else self.new(B, L, N, C)
        on_p = on_p.view(B, L * N, C)
        BH = power(H, 16)
        BM = min(max(16, 4096 // BH) if self.fast else 16, power(N, 16))
        BN = max(16, min(64 if self.fast else 16, (1 << 13) // BH, power(C, 16)))
        programs = B * L * _ceil(N, BM)
        sums = self.new(programs, 2, H, dtype=self.accumulator)
        constants = self.eps, C, H, self.G, self.output, width, BM, BH, BN
        constants += *self.types, *self.place
        tensors = o, gate, cotangent, scaling, *self.norm_out, *self.p_out
        tensors += on_o, on_gate, None if as_given else on_p, kept, sums
        numbers = L, N, self.pitch, o.stride(1), on_o.stride(0)
        _launch(_finish_back, (4, 2), programs, tensors, numbers, constants)
        return self.over_rows(on_p.mT, kept), sums

    def sides_back(
        self, members: int, on_sides: Any, sides: Any, logits: Any, mask: Any, on_mask: Any
    ) -> None:
        """Overwrite sides and logits by the cotangents of projections and of logits."""
        N, H = self.N, sides.shape[1] // members
        BM, BH = min(64, power(N, 16)), min(64, power(2 * H, 16))
        parts = 1 if on_mask is not None else _ceil(2 * H, BH)
        numbers = N, self.pitch, sides.stride(0), sides.stride(1), *_strides(mask)
        constants = H, parts, BM, BH, *self.types[:2], self.asm, *self.place
        programs = members * N * _ceil(N, BM) * parts
        tensors = on_sides, sides, logits, mask, on_mask
        _launch(_sides_back, (4, 1), programs, tensors, numbers, constants)

    def through(self, rows: Any, weight: Any, on_xn: Any, *, add: bool = True) -> None:
        """Write, or add, the cotangent of normalized rows by that of their projections."""
        weight = weight.to(self.dtype)[None].expand(len(rows), -1, -1)
        self.products(rows, weight, on_xn.flatten(1, 2), add=add)

    def finish_back_on_hopper(
        self, o: Any, gate: Any, cotangent: Any, scaling: Any, on_o: Any, on_gate: Any, shift: int
    ) -> Any:
        """Write the cotangents of o, given times a power of two, and of the gate's logits.

        Return the parts of what gives those of the end's weights.
        """
        B, L, N, C = cotangent.shape
        offset = not self.output and self.norm_out[1] is not None
        programs = _processors(cotangent.device)
        sums = self.new(programs, C, (2 if offset else 1) * self.H + 8, dtype=torch.float32)
        tensors = o, gate, cotangent, scaling, *self.norm_out, *self.p_out, on_o, on_gate, sums
        numbers = B, L * N, o.stride(1), on_o.stride(0), shift
        way = hopper_back.way_to_finish_back(C, self.H)
        vector = 16 // cotangent.dtype.itemsize
        constants = self.eps, C, self.H, self.output, vector, way, self.types[0], self.long
        _launch(hopper_back.finish_back, (way, 1), programs, tensors, numbers, constants)
        return sums

    def project_back(
        self, x: Any, mask: Any, on_sides: Any, on_p: Any, on_gate: Any, scaling: Any, on_x: Any
    ) -> Any:
        """Write cotangents of x and of projections, and those of logits for `on_sides`.

        Return the standardized x, with a column of ones.
        """
        B, L, N, C = x.shape
        kept = self.kept(B, L)
        result = on_x if on_x is not None and _is_aligned(on_x) else torch.empty_like(x)
        tensors = x, mask, *self.norm, *self.sides, self.g_out[0]
        tensors += on_sides, on_p, on_gate, scaling, result, kept
        numbers = B, L * N, N, on_p.stride(0), on_p.stride(1), *_strides(mask)
        way = hopper_back.way_to_project_back(C, self.H, self.G)
        constants = self.eps, C, self.H, self.G, self.width, 16 // x.dtype.itemsize, *way
        constants += self.types[0], self.long
        programs = _processors(x.device)
        _launch(hopper_back.project_back, (way[0], 1), programs, tensors, numbers, constants)
        if on_x is not None and result is not on_x:
            on_x.copy_(result)
        return kept

    def hidden_of(self, b: slice, hidden: Any) -> Any:
        """Return o of some of the batch, computed where it was not kept."""
        if hidden is not None:
            return hidden[b]
        o = self.new(b.stop - b.start, self.H, self.N, self.N)
        self.triangles(b, o)
        return o

    def through_norm(
        self,
        parts: Any,
        first: int,
        weight: Any,
        norm: Sequence[Any],
        scaling: Any,
        on_norm: Any,
        on_weight: Any,
        on_bias: Any,
    ) -> None:
        """Write the cotangents of a weight and its bias, and in `on_norm` what are a norm's."""
        rows, C = weight.shape
        many, total, kept = parts.shape
        constants = C, kept, kept - 8, 64, power(C)
        tensors = parts, weight, *norm, scaling, on_weight, on_bias, on_norm
        _launch(_through_norm, (4, 1), rows, tensors, (many, total, first), constants)

    def norm_back(self, x: Any, on_xn: Any, scaling: Any, on_x: Any) -> Any:
        """Write the cotangent of x; return parts of those of the norm's weight and bias."""
        C, rows = self.C, x.numel() // self.C
        BC = power(C, 16)
        BM = max(1, 1024 // BC)
        steps = _ceil(rows, BM * 4224)
        programs = _ceil(rows, BM * steps)
        sums = self.new(programs, 2, C, dtype=self.accumulator)
        result = on_x if on_x is not None and _is_aligned(on_x) else torch.empty_like(x)
        tensors = x, on_xn, scaling, self.norm[0], result, sums
        numbers = rows, self.N, self.pitch, steps
        constants = self.eps, C, BM, BC, self.float, self.long
        _launch(_norm_back, (2, 1), programs, tensors, numbers, constants)
        if on_x is not None and result is not on_x:
            on_x.copy_(result)
        return sums


@register("triangle_multiplicative_update", "triton")
def triangle_multiplicative_update(a: Any, y: Any) -> None:
    out, hidden = y
    update = _Update(a)
    if not update.x.numel():
        return
    N, H = update.N, update.H
    own = hidden is None or hidden.dtype != update.dtype
    square = N * update.pitch
    G = 0 if update.in_out else update.G
    update.divide(
        lambda b, h, n: (
            b * (N * N * H * own + 2 * h * square + n * update.pitch * (G + update.width))
        )
    )
    shift = update.shift if own else 0
    for b in update.batches:
        members = b.stop - b.start
        o = update.new(members, H, N, N) if own else hidden[b]
        gate = None
        if update.whole and out is not None:
            # Left, right and the gate at once.
            gate = update.gate(members, ALL, out[b])
            sides = update.new(2, members * H, N, update.pitch)
            update.project(*update.edges(b, ALL), update.sides, sides=sides, gate=gate)
            update.multiply(sides, o, ALL, 2.0**shift)
            del sides
        else:
            update.triangles(b, o, 2.0**shift)
        if hidden is not None and own:
            torch.mul(o, 2.0**-shift, out=hidden[b])
        if out is None:
            continue
        for lines in update.lines:
            if not update.whole:
                gate = update.gate(members, lines, out[b, lines])
                update.project(*update.edges(b, lines), gate=gate)
            update.finish(o[:, :, lines], gate, out[b, lines], shift)


@register("triangle_multiplicative_update_vjp", "triton")
def triangle_multiplicative_update_vjp(a: Any, y: Any) -> None:
    update = _Update(a)
    on_x, on_mask, *on_weights = y
    x = update.x
    if not x.numel():
        for output in y:
            if output is not None:
                output.zero_()
        return
    N, C, H, G, pitch, width = update.N, update.C, update.H, update.G, update.pitch, update.width
    square, wider = N * pitch, update.accumulator.itemsize // update.dtype.itemsize

    def need(b: int, h: int, n: int) -> int:
        if h == H and n >= N:
            after = max(H + G + max(3 * H, _up(H + 1) + C), C + width)
            return b * square * (4 * H + G + after)
        return b * (square * (H + wider * C + 6 * h) + n * pitch * (2 * G + C + H + 2 * width))

    update.divide(need)
    hidden, cotangent = _aligned(a.hidden), _aligned(a.dout)
    scaling = None
    if update.dtype == torch.float16:
        # What is small to fp16 is small to the largest cotangent then.
        most = cotangent.abs().amax().float()
        most = torch.where((most > 0) & most.isfinite(), most, 1.0)
        scaling = torch.exp2(-torch.log2(most).floor())
    if update.back_on_hopper(on_mask):
        _back_on_hopper(update, hidden, cotangent, scaling, on_x, on_weights)
        return
    back = _back_at_once if update.whole else _back_in_parts
    if on_mask is not None:
        on_mask.zero_()
    sums: list[Any] = []
    batches = slices(update.B, 1) if N >= _ALONE else update.batches
    for b in batches:
        to_x, to_mask = (None if to is None else to[b] for to in (on_x, on_mask))
        on_xn, *found = back(update, b, hidden, cotangent[b], scaling, to_x, to_mask)
        found.append(update.norm_back(x[b], on_xn, scaling, to_x))
        if len(batches) > 1:
            found = [parts.sum(0, keepdim=True) for parts in found]
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
        del on_xn
    on_pairs, on_end, on_norm_out, on_open, on_norm = sums
    update.sum_parts(on_norm, 0, None, y.dnorm_in_weight, y.dnorm_in_bias, norm=True)
    update.sum_parts(on_pairs, 0, scaling, y.dp_in_weight, y.dp_in_bias, C)
    update.sum_parts(on_pairs, 2 * H, scaling, y.dg_in_weight, y.dg_in_bias, C)
    update.sum_parts(on_norm_out, 0, scaling, y.dnorm_out_weight, y.dnorm_out_bias, norm=True)
    update.sum_parts(on_end, 0, scaling, y.dp_out_weight, y.dp_out_bias, H)
    update.sum_parts(on_open, 0, scaling, y.dg_out_weight, y.dg_out_bias, C)


def _back_at_once(
    update: _Update, b: slice, hidden: Any, cotangent: Any, scaling: Any, on_x: Any, on_mask: Any
) -> tuple[Any, ...]:
    """Return the cotangents of the normalized x, of projections and gates, and of the end.

    Those of the end are of the last projection, of the norm of o, and of the gate. That of the mask
    is written. The memory for that of x is used for others before.
    """
    members, N, H, pitch = b.stop - b.start, update.N, update.H, update.pitch
    x, mask = update.edges(b, ALL)
    both, gate = update.new(2, 2, members * H, N, pitch), update.gate(members, ALL)
    update.project(x, mask, update.sides, sides=both[0], logits=both[1], gate=gate)
    on_o, on_gate = update.new(members * H, N, pitch), update.new(members, N, pitch, update.G)
    o = update.hidden_of(b, hidden)
    ends = update.finish_back(o, gate, cotangent, scaling, on_o, on_gate, on_x)
    del o, gate
    h = slice(0, H)
    _sides_back_of(update, b, h, both, on_o[..., :N], scaling, on_mask)
    # The normalized x, and its cotangent, have room where others have gone.
    del on_o
    on_xn, kept = update.new(members, N, pitch, update.C), update.normalized(x)
    on_open = _gate_back(update, on_gate, kept, on_xn)
    del on_gate
    planes = _pairs_back(update, h, both, on_xn)
    return on_xn, _by_pairs(update, planes, kept), *ends, on_open


def _back_in_parts(
    update: _Update, b: slice, hidden: Any, cotangent: Any, scaling: Any, on_x: Any, on_mask: Any
) -> tuple[Any, ...]:
    """Do so for one of the batch, by some channels of left and right, or some lines of o."""
    N, H, pitch = update.N, update.H, update.pitch
    on_o = update.new(H, N, pitch)
    # What many parts are added to is rounded once.
    on_xn = update.new(1, N, pitch, update.C, dtype=update.accumulator)
    o = update.hidden_of(b, hidden)
    found = []
    for lines in update.lines:
        to_x = None if on_x is None else on_x[:, lines]
        some = o[:, :, lines], cotangent[:, lines], scaling, on_o[:, lines], on_xn[:, lines], to_x
        found.append(_lines_back(update, b, lines, *some))
    del o, some
    on_pairs = update.new(2, 2, H, update.width, dtype=update.accumulator)
    for h in update.channels:
        some = on_o[h, :, :N], scaling, on_xn, on_mask
        on_pairs[:, :, h] = _channels_back(update, b, h, *some)
    ends = [functools.reduce(torch.add, some) for some in zip(*found, strict=True)]
    return on_xn, on_pairs.view(1, 4 * H, -1), *ends


def _lines_back(
    update: _Update,
    b: slice,
    lines: slice,
    o: Any,
    cotangent: Any,
    scaling: Any,
    on_o: Any,
    on_xn: Any,
    on_x: Any,
) -> tuple[Any, ...]:
    """Write cotangents of some lines of o, and of the normalized x; return the end's."""
    x, mask = update.edges(b, lines)
    gate = update.gate(1, lines)
    update.project(x, mask, gate=gate)
    on_gate = update.new(1, lines.stop - lines.start, update.pitch, update.G)
    ends = update.finish_back(o, gate, cotangent, scaling, on_o, on_gate, on_x)
    del gate
    ends = *ends, _gate_back(update, on_gate, update.normalized(x), on_xn)
    return tuple([parts.sum(0, keepdim=True) for parts in ends])


def _channels_back(
    update: _Update, b: slice, h: slice, on_o: Any, scaling: Any, on_xn: Any, on_mask: Any
) -> Any:
    """Add cotangents by some channels; return those of their projections and gates."""
    x, pitch = update.x[b], update.pitch
    both = update.new(2, 2, h.stop - h.start, update.N, pitch)
    for lines in update.lines:
        sides, logits = both[:, :, :, lines]
        update.project(*update.edges(b, lines), update.of(h), sides=sides, logits=logits)
    _sides_back_of(update, b, h, both, on_o, scaling, on_mask)
    (planes,) = _pairs_back(update, h, both, on_xn)
    total: Any = 0
    for lines in update.lines:
        some = planes[..., lines.start * pitch : lines.stop * pitch]
        total = total + _by_pairs(update, [some], update.normalized(x[:, lines])).sum(0)
    return total.view(2, 2, -1, update.width)


def _back_on_hopper(
    update: _Update, hidden: Any, cotangent: Any, scaling: Any, on_x: Any, on_weights: Sequence[Any]
) -> None:
    """Write all cotangents but the mask's, member by member of the batch."""
    N, pitch, H = update.N, update.pitch, update.H
    sums: list[Any] = []
    for b in slices(update.B, 1):
        x, mask = update.edges(b, ALL)
        # Left and right, then cotangents of projections; those of left and right, then of logits.
        gate, both = update.gate(1, ALL), update.new(2, 2, H, N, pitch)
        update.project(x, mask, update.sides, sides=both[0], gate=gate)
        o, shift = None if hidden is None else hidden[b], 0
        if o is None or o.dtype != update.dtype:
            shift = update.shift
            o = update.new(1, H, N, N)
            if hidden is None:
                update.multiply(both[0], o, ALL, 2.0**shift)
            else:
                torch.mul(hidden[b], 2.0**shift, out=o)
        on_o, on_gate = update.new(H, N, pitch), update.new(1, N, pitch, update.G)
        some = o, gate, cotangent[b], scaling, on_o, on_gate
        by_end = update.finish_back_on_hopper(*some, shift)
        del o, gate, some
        update.multiply_back(both[0], on_o, both[1])
        del on_o
        on_some = None if on_x is None else on_x[b]
        kept = update.project_back(x, mask, both[1], both[0], on_gate, scaling, on_some)
        kept = kept.flatten(1, 2)
        (by_sides,) = update.parts_over_rows(both.view(1, 4 * H, N * pitch), kept)
        (by_gate,) = update.parts_over_rows(on_gate.flatten(1, 2).mT, kept)
        found = by_sides, by_gate, by_end
        sums = [a.add_(b) for a, b in zip(sums, found, strict=True)] if sums else [*found]
    on_w, on_b, on_p, on_p_b, on_g, on_g_b, *on_ends = on_weights
    p_w, _, g_w, _ = update.sides
    o_w = update.g_out[0]
    on_norm = update.new(4 * H + update.G, 2, update.C, dtype=torch.float32)
    by_sides, by_gate, by_end = sums
    given = update.norm, scaling
    update.through_norm(by_sides, 0, p_w, *given, on_norm, on_p, on_p_b)
    update.through_norm(by_sides, 2 * H, g_w, *given, on_norm[2 * H :], on_g, on_g_b)
    update.through_norm(by_gate, 0, o_w, *given, on_norm[4 * H :], *on_ends[4:])
    on_norm_out = update.new(update.C, 2, H, dtype=torch.float32)
    given = update.norm_out, scaling
    update.through_norm(by_end, 0, update.p_out[0], *given, on_norm_out, *on_ends[2:4])
    update.sum_parts(on_norm, 0, None, on_w, on_b, norm=True)
    update.sum_parts(on_norm_out, 0, None, *on_ends[:2], norm=True)


def _gate_back(update: _Update, on_gate: Any, kept: Any, on_xn: Any) -> Any:
    """Write the cotangent of the normalized x by the last gate; return its weight's."""
    on_gate = on_gate.flatten(1, 2)
    update.through(on_gate, update.g_out[0], on_xn, add=False)
    return update.over_rows(on_gate.mT, kept.flatten(1, 2))


def _sides_back_of(
    update: _Update, b: slice, h: slice, both: Any, on_o: Any, scaling: Any, on_mask: Any
) -> None:
    """Overwrite sides and logits (`both`) by cotangents, and add that of the mask."""
    (x, mask), (sides, logits) = update.edges(b, ALL), both
    on_sides = torch.empty_like(sides)
    update.multiply_back(sides, on_o, on_sides)
    by_mask = None
    if on_mask is not None:
        by_mask = update.new(*x.shape[:3], dtype=update.accumulator)
        # What factors are without it.
        for lines in update.lines:
            update.project(x[:, lines], None, update.of(h), sides=sides[:, :, lines])
    update.sides_back(len(x), on_sides, sides, logits, mask, by_mask)
    if by_mask is not None:
        on_mask += by_mask if scaling is None else by_mask / scaling


def _pairs_back(update: _Update, h: slice, both: Any, on_xn: Any) -> Sequence[Any]:
    """Add the cotangent of the normalized x by some channels of projections and gates.

    Return theirs, all in one matrix, where one of the batch goes alone.
    """
    members, weights = len(on_xn), update.of(h)
    weights = torch.stack([weights[0], weights[2]]).view(4, -1, update.C)
    z = both.view(4, members, -1, update.N * update.pitch).transpose(0, 1)
    many = [z.flatten(1, 2)] if members == 1 else z.unbind(1)
    weights = [weights.flatten(0, 1)] if members == 1 else weights
    for planes, weight in zip(many, weights, strict=True):
        update.through(planes.mT, weight, on_xn)
    return many


def _by_pairs(update: _Update, many: Sequence[Any], kept: Any) -> Any:
    """Return parts (n, 4 channels, C + ...) of what these and the normalized x give weights."""
    parts = [update.over_rows(planes, kept.flatten(1, 2)) for planes in many]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
