"""Triton's kernels of the triangle multiplicative update, for any GPU.

The programs of a kernel take blocks of a line. Lines of planes have places for a multiple of eight
edges, so that blocks are read and written in vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpukern.constants import LOGISTIC, ONE
from gpukern.products import halves_of, row_scaling, strides


@triton.jit
def _sigmoid(x, ASM: tl.constexpr):
    if ASM:
        return tl.inline_asm_elementwise(LOGISTIC, "=f,f", [x], tl.float32, True, 1)
    else:
        return 1 / (1 + tl.exp(-x))


@triton.jit
def _as_kept(s, gate, DOT: tl.constexpr):
    """Return a gate in the form in which memory holds it."""
    if gate.dtype.element_ty != DOT:
        s = s * ONE
    return s.to(gate.dtype.element_ty)


@triton.jit
def _opened(s, FLOAT: tl.constexpr, DOT: tl.constexpr):
    """Return a gate from the form of `_as_kept`."""
    return s.to(FLOAT) if s.dtype == DOT else s.to(FLOAT) * (1 / ONE)


@triton.jit
def _place(program, L, N, pitch, BM: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a block's b, i, the row of (b, i, 0), j, which j are edges, and which have a place."""
    blocks = tl.cdiv(N, BM)
    line = program // blocks
    j = program % blocks * BM + tl.arange(0, BM)
    if ALIGNED:
        # Knowing a multiple of eight, the compiler reads and writes vectors.
        N = N // 8 * 8
    return line // L, line % L, line.to(LONG) * N, j, j < N, j < pitch // 8 * 8


@triton.jit
def _plane(c, batch, i, channels, plane, pitch, LONG: tl.constexpr):
    """Return where lines (b, c, i) of planes begin, with `pitch` places a line."""
    pitch = pitch // 8 * 8
    return (batch.to(LONG) * channels + c) * (plane // 8 * 8) + i.to(LONG) * pitch


@triton.jit
def _side(h, batch, i, H: tl.constexpr, half, plane, pitch, LONG: tl.constexpr):
    """Return where lines (side, b, h, i) begin; `h` counts left before right."""
    of = (h // H).to(LONG) * (half // 8 * 8) + (h % H).to(LONG) * (plane // 8 * 8)
    return of + batch.to(LONG) * H * (plane // 8 * 8) + i.to(LONG) * (pitch // 8 * 8)


@triton.jit
def _from_halves(high, at, lo, inside, back):
    """Return numbers whose halves lie at a place, times the reciprocals of rows' scales."""
    low = tl.load(high + at + lo // 8 * 8, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(high + at, mask=inside, other=0.0).to(tl.float32)
    return (high + low * (1 / 2048)) * back[:, None]


@triton.jit
def _store_halves(to, lo, x, inside, TURNED: tl.constexpr):
    """Store the halves of scaled numbers, or of the transposed ones, at pointers."""
    high, low = halves_of(x)
    if TURNED:
        high, low = tl.trans(high), tl.trans(low)
    tl.store(to, high, mask=inside)
    # Knowing a multiple of eight, the compiler writes vectors.
    tl.store(to + lo // 8 * 8, low, mask=inside)


@triton.jit
def _moments(
    x, row, j, live,
    EPS: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, FLOAT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return a number near the mean of rows of x, the mean's rest, and 1 over the deviation."""
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
            # Among numbers this small, a second mean finds the rounding error of the first.
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
    # Places without an edge are multiplied by zeros, but channels are summed over.
    return y if C % BC == 0 else tl.where(inside, y, 0.0)


@triton.jit
def _add_one(to, live, there, C: tl.constexpr, KEPT: tl.constexpr, BM: tl.constexpr):
    """Write a one behind the elements of rows, and zeros behind the one."""
    after = C + tl.arange(0, 16)
    one = tl.where((after == C)[None, :] & live[:, None], 1.0, 0.0)
    inside = there[:, None] & (after < KEPT)[None, :]
    tl.store(to + after[None, :], one.to(to.dtype.element_ty), mask=inside)


@triton.jit
def _weight(
    w, first, last, k, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, DOT: tl.constexpr
):
    """Return a chunk of columns of a weight's rows."""
    h = first + tl.arange(0, BH)
    c = k * BC + tl.arange(0, BC)
    inside = (h < last)[:, None] & (c < C)[None, :]
    return tl.load(w + h[:, None] * C + c[None, :], mask=inside, other=0.0).to(DOT)


@triton.jit
def _pair(
    p_w, g_w, first, last, k, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, DOT: tl.constexpr
):
    """Return a chunk of columns of two weights' rows, the second weight's last."""
    row = tl.arange(0, 2 * BH)
    h = first + row % BH
    c = k * BC + tl.arange(0, BC)
    at = h[:, None] * C + c[None, :]
    inside = (h < last)[:, None] & (c < C)[None, :]
    return tl.load(tl.where((row < BH)[:, None], p_w + at, g_w + at), mask=inside, other=0.0).to(
        DOT
    )


@triton.jit
def _halves(
    halves, lo, first, last, k, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
    PAIR: tl.constexpr, PITCH: tl.constexpr,
):  # fmt: skip
    """Return a chunk of columns of rows' halves, transposed, and of rows PAIR behind them."""
    if PAIR > 0:
        row = tl.arange(0, 2 * BH)
        h = first + row % BH
        at = h + row // BH * PAIR
    else:
        h = first + tl.arange(0, BH)
        at = h
    c = k * BC + tl.arange(0, BC)
    place = halves + at[:, None] * PITCH + c[None, :]
    lo = lo // 8 * 8
    inside = (h < last)[:, None] & (c < C)[None, :]
    high = tl.load(place, mask=inside, other=0.0)
    low = tl.load(place + lo, mask=inside, other=0.0)
    return tl.trans(high), tl.trans(low)


@triton.jit
def _kept(to, lo, there, k, C: tl.constexpr, BC: tl.constexpr):
    """Return a chunk of columns of normalized rows' halves."""
    lo = lo // 8 * 8
    c = k * BC + tl.arange(0, BC)
    inside = there[:, None] & (c < C)[None, :]
    high = tl.load(to + c[None, :], mask=inside, other=0.0)
    return high, tl.load(to + c[None, :] + lo, mask=inside, other=0.0)


@triton.jit
def _scales(scales, first, last, BH: tl.constexpr, PAIR: tl.constexpr):
    """Return the reciprocals of scales of the rows of `_halves`."""
    if PAIR > 0:
        row = tl.arange(0, 2 * BH)
        h = first + row % BH
        return tl.load(scales + h + row // BH * PAIR, mask=h < last, other=1.0)
    else:
        h = first + tl.arange(0, BH)
        return tl.load(scales + h, mask=h < last, other=1.0)


@triton.jit
def _add_halves(total, left, left_low, right, right_low, by_row):
    """Add the product of halves, times the reciprocals of rows' scales."""
    low = tl.dot(left_low, right, tl.dot(left, right_low))
    # With a factor of their own, the sums leave the tensor cores, which truncate.
    total += low * (by_row * (1 / 2048))[:, None]
    return total + tl.dot(left, right) * by_row[:, None]


@triton.jit
def _bias(b, first, last, BH: tl.constexpr, FLOAT: tl.constexpr):
    h = first + tl.arange(0, BH)
    return tl.load(b + h, mask=h < last, other=0.0).to(FLOAT)


@triton.jit
def _normalized(
    o, w, b, at, live, eps,
    H: tl.constexpr, BH: tl.constexpr, FLOAT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return the standardized o (BH, BM), 1 over its deviation, and the normalized o."""
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


@triton.jit
def _most_normalized(w, b, C: tl.constexpr, BC: tl.constexpr, FLOAT: tl.constexpr):
    """Return a bound of normalized rows, whose norm is at most √C before a weight and a bias."""
    most = tl.zeros((BC,), FLOAT)
    for k in tl.static_range((C + BC - 1) // BC):
        c = k * BC + tl.arange(0, BC)
        bound = tl.zeros((BC,), FLOAT) + C**0.5
        if w is not None:
            bound *= tl.abs(tl.load(w + c, mask=c < C, other=0.0).to(FLOAT))
        if b is not None:
            bound += tl.abs(tl.load(b + c, mask=c < C, other=0.0).to(FLOAT))
        most = tl.maximum(most, bound)
    return tl.max(most, 0)


def normalize(
    x, w, b, kept, reciprocal, L, N, pitch, lo,
    EPS: tl.constexpr, C: tl.constexpr, KEPT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    FLOAT: tl.constexpr, EXACT: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the normalized rows of x, and behind each a one, or a zero where there is no edge.

    With room for a scale's reciprocal, write halves of the rows instead, and nothing behind.
    """
    batch, i, row, j, live, there = _place(tl.program_id(0), L, N, pitch, BM, LONG, ALIGNED)
    near, rest, scale = _moments(x, row, j, live, EPS, C, BC, FLOAT, EXACT)
    to = kept + (_plane(0, batch, i, 1, L * pitch, pitch, LONG) + j)[:, None] * KEPT
    if reciprocal is not None:
        by, back = row_scaling(_most_normalized(w, b, C, BC, FLOAT))
        if tl.program_id(0) == 0:
            tl.store(reciprocal, back)
    for k in tl.static_range((C + BC - 1) // BC):
        y = _chunk(x, w, b, row, j, live, near, rest, scale, k, C, BC, FLOAT)
        c = k * BC + tl.arange(0, BC)
        if reciprocal is not None:
            inside = there[:, None] & (c < KEPT)[None, :]
            _store_halves(to + c[None, :], lo, y * by, inside, False)
        else:
            inside = there[:, None] & (c < C)[None, :]
            tl.store(to + c[None, :], y.to(kept.dtype.element_ty), mask=inside)
    if reciprocal is None:
        _add_one(to, live, there, C, KEPT, BM)


@triton.jit
def _magnitude(most, FLOAT: tl.constexpr):
    """Return a largest magnitude, of which bits may be given."""
    found = tl.load(most)
    if most.dtype.element_ty == tl.int32:
        found = found.to(tl.float32, bitcast=True)
    return found.to(FLOAT)


@triton.jit
def _write_row_bound(
    weight, row, p_b, w, b, most, scales, reciprocals,
    C: tl.constexpr, BC: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Write a power of two that scales a projection to at most 2¹⁵, and its reciprocal.

    The bound is by Cauchy and Schwarz: the norm of a normalized row is at most √C. `most` is the
    largest magnitude of a factor.
    """
    c = tl.arange(0, BC)
    bound = tl.zeros((), FLOAT)
    if b is not None:
        bound += tl.abs(tl.sum(weight * tl.load(b + c, mask=c < C, other=0.0).to(FLOAT)))
    if w is not None:
        weight *= tl.load(w + c, mask=c < C, other=0.0).to(FLOAT)
    # Squares of the weight itself would leave the range of its numbers.
    largest = tl.max(tl.abs(weight), 0)
    part = tl.where(largest > 0, weight / tl.where(largest > 0, largest, 1.0), weight)
    bound += largest * tl.sqrt(C * tl.sum(part * part))
    if p_b is not None:
        bound += tl.abs(tl.load(p_b + row).to(FLOAT))
    if most is not None:
        bound *= _magnitude(most, FLOAT)
    scale, reciprocal = row_scaling(bound)
    tl.store(scales + row, scale)
    tl.store(reciprocals + row, reciprocal)


def row_bounds(
    p_w, p_b, w, b, most, scales, reciprocals,
    C: tl.constexpr, BC: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Write scales of projections, and their reciprocals."""
    row = tl.program_id(0)
    c = tl.arange(0, BC)
    weight = tl.load(p_w + row * C + c, mask=c < C, other=0.0).to(FLOAT)
    _write_row_bound(weight, row, p_b, w, b, most, scales, reciprocals, C, BC, FLOAT)


def split_rows(
    p_w, p_b, g_w, g_b, o_w, w, b, most, halves, halves_scales, scales, reciprocals, zeros, lo,
    many_zeros,
    C: tl.constexpr, ROWS: tl.constexpr, GATES: tl.constexpr, BC: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Write halves of the rows of weights, one weight's after the other's.

    Of projections (ROWS), and of their GATES, write also scales and reciprocals, where there is
    room; `most` is the largest magnitude of a factor of projections. Write `zeros` too.
    """
    row = tl.program_id(0)
    c = tl.arange(0, BC)
    inside = c < C
    weight = tl.zeros((BC,), FLOAT)
    if row < ROWS:
        if p_w is not None:
            weight += tl.load(p_w + row * C + c, mask=inside, other=0.0).to(FLOAT)
            if scales is not None:
                _write_row_bound(weight, row, p_b, w, b, most, scales, reciprocals, C, BC, FLOAT)
    elif row < 2 * ROWS:
        if g_w is not None:
            weight += tl.load(g_w + (row - ROWS) * C + c, mask=inside, other=0.0).to(FLOAT)
            if GATES:
                _write_row_bound(
                    weight, row - ROWS, g_b, w, b, None, scales + ROWS, reciprocals + ROWS,
                    C, BC, FLOAT,
                )  # fmt: skip
    elif o_w is not None:
        weight += tl.load(o_w + (row - 2 * ROWS) * C + c, mask=inside, other=0.0).to(FLOAT)
    scale, reciprocal = row_scaling(tl.max(tl.abs(weight), 0))
    tl.store(halves_scales + row, reciprocal)
    high, low = halves_of(weight * scale)
    PITCH: tl.constexpr = (C + 7) // 8 * 8
    to = halves + row * PITCH + c
    tl.store(to, high, mask=c < PITCH)
    tl.store(to + lo // 8 * 8, low, mask=c < PITCH)
    if zeros is not None:
        at = row * BC + c
        tl.store(zeros + at, tl.zeros((BC,), tl.int32), mask=at < many_zeros)


def split_columns(
    p_w, g_w, o_w, factors, halves, scales, lo,
    C: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Write halves of the columns of weights, below each other, whose rows have factors."""
    r = tl.arange(0, BR)[:, None]
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    within = c < C
    at = r * C + c
    weight = tl.load(p_w + at, mask=within & (r < ROWS), other=0.0).to(FLOAT)
    own = within & (r >= ROWS) & (r < 2 * ROWS)
    weight += tl.load(g_w + at - ROWS * C, mask=own, other=0.0).to(FLOAT)
    own = within & (r >= 2 * ROWS) & (r < 2 * ROWS + G)
    weight += tl.load(o_w + at - 2 * ROWS * C, mask=own, other=0.0).to(FLOAT)
    weight *= tl.load(factors + r, mask=r < 2 * ROWS + G, other=0.0)
    scale, reciprocal = row_scaling(tl.max(tl.abs(weight), 0))
    own_column = tl.program_id(0) * BC + tl.arange(0, BC)
    tl.store(scales + own_column, reciprocal, mask=own_column < C)
    high, low = halves_of(weight * scale[None, :])
    PITCH: tl.constexpr = (C + 7) // 8 * 8
    to = halves + r * PITCH + c
    there = (r < 2 * ROWS + G) & (c < PITCH)
    tl.store(to, high, mask=there)
    tl.store(to + lo // 8 * 8, low, mask=there)


def largest(x, most, size, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Raise the bits of the largest magnitude."""
    found = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        at = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        found = tl.maximum(found, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(most, tl.max(found, 0), sem="relaxed")


def project(
    x, mask, w, b, p_w, p_b, g_w, g_b, o_w, o_b, sides, logits, gate, kept,
    halves, scales, side_scales, kept_scale,
    L, N, pitch, half, plane, mask_b, mask_i, mask_j, halves_lo, kept_lo, sides_lo,
    EPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, OUTPUT: tl.constexpr,
    KEPT: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
    BH: tl.constexpr, BG: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, ASM: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write left and right, the last gate, and for a backward pass the logits of sides' gates.

    `normalize` wrote the normalized x (`kept`), or it is made here. A program takes one of PARTS
    shares of the channels. There are no sides where H is zero, and no gate where G is. With the
    `halves` of all weights' rows, those of the sides first, products are made of halves; so are
    sides and logits with scales of their own.
    """
    READY: tl.constexpr = kept is not None
    HALVED: tl.constexpr = halves is not None
    PITCH: tl.constexpr = (C + 7) // 8 * 8
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    batch, i, row, j, live, there = _place(program, L, N, pitch, BM, LONG, ALIGNED)
    CHUNKS: tl.constexpr = (C + BC - 1) // BC
    xs = ()
    if READY:
        place = _plane(0, batch, i, 1, L * pitch, pitch, LONG) + j
        to = kept + place[:, None] * (PITCH if HALVED else KEPT)
        if HALVED:
            by_row = tl.zeros((BM,), FLOAT) + tl.load(kept_scale)
    else:
        near, rest, scale = _moments(x, row, j, live, EPS, C, BC, FLOAT, EXACT)
        for k in tl.static_range(CHUNKS):
            xs = xs + (_chunk(x, w, b, row, j, live, near, rest, scale, k, C, BC, FLOAT).to(DOT),)
        if HALVED:
            most = tl.max(tl.abs(xs[0]), 1)
            for k in tl.static_range(1, CHUNKS):
                most = tl.maximum(most, tl.max(tl.abs(xs[k]), 1))
            by, by_row = row_scaling(most)
            lows = ()
            highs = ()
            for k in tl.static_range(CHUNKS):
                made, made_low = halves_of(xs[k] * by[:, None])
                highs = highs + (made,)
                lows = lows + (made_low,)
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
                if HALVED:
                    if READY:
                        for k in range(CHUNKS):
                            high, low = _kept(to, kept_lo, there, k, C, BC)
                            pair, pair_low = _halves(
                                halves, halves_lo, first, 2 * H, k, C, BH, BC, 2 * H, PITCH
                            )
                            both = _add_halves(both, high, low, pair, pair_low, by_row)
                    else:
                        for k in tl.static_range(CHUNKS):
                            pair, pair_low = _halves(
                                halves, halves_lo, first, 2 * H, k, C, BH, BC, 2 * H, PITCH
                            )
                            both = _add_halves(both, highs[k], lows[k], pair, pair_low, by_row)
                    both *= _scales(scales, first, 2 * H, BH, 2 * H)[None, :]
                elif READY:
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
                if side_scales is not None:
                    by_side = tl.load(side_scales + h, mask=h < 2 * H, other=1.0)
                    # Halves are read with the places that have no edge.
                    scaled = tl.where(live[:, None], side * by_side[None, :], 0.0)
                    _store_halves(sides + at, sides_lo, scaled, inside, True)
                    if logits is not None:
                        by_logit = tl.load(side_scales + 2 * H + h, mask=h < 2 * H, other=1.0)
                        scaled = g * by_logit[None, :]
                        _store_halves(logits + at, sides_lo, scaled, inside, True)
                else:
                    tl.store(sides + at, tl.trans(side.to(DOT)), mask=inside)
                    if logits is not None:
                        tl.store(logits + at, tl.trans(g.to(DOT)), mask=inside)
    if GATES > 0:
        if not READY or part >= SIDES:
            for step in range(PER_GATE):
                begin = ((part - SIDES if READY else part) * PER_GATE + step) * BG
                if begin < G:
                    opened = tl.zeros((BM, BG), FLOAT)
                    if HALVED:
                        at_gate = 4 * H + begin
                        if READY:
                            for k in range(CHUNKS):
                                high, low = _kept(to, kept_lo, there, k, C, BC)
                                weight, weight_low = _halves(
                                    halves, halves_lo, at_gate, 4 * H + G, k, C, BG, BC, 0, PITCH
                                )
                                opened = _add_halves(opened, high, low, weight, weight_low, by_row)
                        else:
                            for k in tl.static_range(CHUNKS):
                                weight, weight_low = _halves(
                                    halves, halves_lo, at_gate, 4 * H + G, k, C, BG, BC, 0, PITCH
                                )
                                opened = _add_halves(
                                    opened, highs[k], lows[k], weight, weight_low, by_row
                                )
                        opened *= _scales(scales, at_gate, 4 * H + G, BG, 0)[None, :]
                    elif READY:
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


def open_sides(
    sides, logits, mask, p_b, g_b, L, N, pitch, half, plane, logits_half, logits_plane,
    mask_b, mask_i, mask_j,
    H: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
    FLOAT: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Overwrite projections by left and right, and add biases to their gates' logits.

    A program takes one of PARTS blocks of channels.
    """
    program = tl.program_id(0) // PARTS
    batch, i, _, j, live, there = _place(program, L, N, pitch, BM, LONG, ALIGNED)
    first = tl.program_id(0) % PARTS * BH
    h = first + tl.arange(0, BH)
    side = sides + _side(h, batch, i, H, half, plane, pitch, LONG)[:, None] + j[None, :]
    of = _side(h, batch, i, H, logits_half, logits_plane, pitch, LONG)[:, None]
    logit = logits + of + j[None, :]
    inside = (h < 2 * H)[:, None] & there[None, :]
    p = tl.load(side, mask=inside, other=0.0)
    g = tl.load(logit, mask=inside, other=0.0)
    if p_b is not None:
        p += _bias(p_b, first, 2 * H, BH, FLOAT)[:, None]
    if g_b is not None:
        g += _bias(g_b, first, 2 * H, BH, FLOAT)[:, None]
        tl.store(logit, g, mask=inside)
    p *= _sigmoid(g, False)
    if mask is not None:
        m = tl.load(mask + batch * mask_b + i * mask_i + j * mask_j, mask=live, other=0.0)
        p *= m.to(FLOAT)[None, :]
    tl.store(side, tl.where(live[None, :], p, 0.0), mask=inside)


@triton.jit
def _given(h, batch, i, N, H: tl.constexpr, plane, LONG: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where lines (b, h, i) of planes without gaps begin."""
    if ALIGNED:
        N = N // 8 * 8
        plane = plane // 8 * 8
    return (batch.to(LONG) * H + h) * plane + i.to(LONG) * N


def end_rows(
    o, gate, w, b, kept, L, N, pitch, plane, shift,
    EPS: tl.constexpr, H: tl.constexpr, KEPT: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
    FLOAT: tl.constexpr, EXACT: tl.constexpr, LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the last projection's input: o, normalized, and times a gate of its channels."""
    batch, i, row, j, live, there = _place(tl.program_id(0), L, N, pitch, BM, LONG, ALIGNED)
    h = tl.arange(0, BH)
    at = _given(h, batch, i, N, H, plane, LONG, ALIGNED)[:, None] + j[None, :]
    eps = tl.exp2((2 * shift).to(tl.float32)).to(FLOAT) * EPS
    _, _, on = _normalized(o, w, b, at, live, eps, H, BH, FLOAT, EXACT)
    if gate is not None:
        at = _plane(h, batch, i, H, L * pitch, pitch, LONG)[:, None] + j[None, :]
        on *= tl.load(gate + at, mask=(h < H)[:, None] & there[None, :], other=0.0)
    to = kept + (row + j)[:, None] * KEPT
    tl.store(to + h[None, :], tl.trans(on), mask=live[:, None] & (h < H)[None, :])
    _add_one(to, live, live, H, KEPT, BM)


def finish(
    o, gate, w, b, p_w, p_b, out, halves, scales, L, N, pitch, plane, shift, halves_lo,
    EPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, OUTPUT: tl.constexpr,
    BM: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the output: o, given times a power of two, normalized, gated and projected."""
    batch, i, row, j, live, there = _place(tl.program_id(0), L, N, pitch, BM, LONG, ALIGNED)
    h = tl.arange(0, BH)
    to_gate = gate + (row + j)[:, None] * C
    # A load in flight during the sums below costs no time.
    if not OUTPUT:
        at = _plane(h, batch, i, H, L * pitch, pitch, LONG)[:, None] + j[None, :]
        opened = tl.load(gate + at, mask=(h < H)[:, None] & there[None, :], other=0.0)
    elif C <= BN:
        c_first = tl.arange(0, BN)
        within = live[:, None] & (c_first < C)[None, :]
        s_first = tl.load(to_gate + c_first[None, :], mask=within, other=0.0)
    at = _given(h, batch, i, N, H, plane, LONG, ALIGNED)[:, None] + j[None, :]
    # The norm of a scaled o is the norm of o with another eps.
    eps = tl.exp2((2 * shift).to(tl.float32)).to(FLOAT) * EPS
    _, _, on = _normalized(o, w, b, at, live, eps, H, BH, FLOAT, EXACT)
    if not OUTPUT:
        on = on * _opened(opened, FLOAT, DOT)
    PITCH: tl.constexpr = (H + 7) // 8 * 8
    if halves is not None:
        by, by_row = row_scaling(tl.max(tl.abs(on), 0))
        on_high, on_low = halves_of(on * by[None, :])
        left, left_low = tl.trans(on_high), tl.trans(on_low)
    else:
        left = tl.trans(on.to(DOT))
    for block in range((C + BN - 1) // BN):
        c = block * BN + tl.arange(0, BN)
        inside = live[:, None] & (c < C)[None, :]
        if OUTPUT:
            s = s_first if C <= BN else tl.load(to_gate + c[None, :], mask=inside, other=0.0)
        if halves is not None:
            right, right_low = _halves(halves, halves_lo, block * BN, C, 0, H, BN, BH, 0, PITCH)
            value = tl.zeros((BM, BN), FLOAT)
            value = _add_halves(value, left, left_low, right, right_low, by_row)
            value *= _scales(scales, block * BN, C, BN, 0)[None, :]
        else:
            weight = _weight(p_w, block * BN, C, 0, H, BN, BH, DOT)
            value = tl.dot(left, tl.trans(weight), None, PRECISION, out_dtype=FLOAT)
        if DOT == tl.bfloat16 and p_w.dtype.element_ty == tl.float32:
            # The weight's rounding error.
            rest = _weight(p_w, block * BN, C, 0, H, BN, BH, FLOAT) - weight.to(FLOAT)
            value = tl.dot(left, tl.trans(rest.to(DOT)), value, PRECISION, out_dtype=FLOAT)
        if p_b is not None:
            value += _bias(p_b, block * BN, C, BN, FLOAT)[None, :]
        if OUTPUT:
            value = value * _opened(s, FLOAT, DOT)
        to = out + (row + j)[:, None] * C + c[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def finish_back(
    o, gate, dout, scaling, w, b, p_w, p_b, do, dgate, dp, kept, sums, halves, scales,
    dout_most, gate_scales, reciprocals, do_most, by_bias, dkept,
    L, N, pitch, plane, do_plane, halves_lo, dgate_lo, dp_lo, kept_lo,
    EPS: tl.constexpr, C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, OUTPUT: tl.constexpr,
    KEPT: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of o, of the last gate's logits, and of the last projection.

    Write also the projection's input (`kept`), and sums over rows for the norm's weight and bias.
    With the cotangent of that input (`dkept`), all that is of the projection, or of a gate of its
    output, is already written.

    With the bits of the largest magnitudes of o's cotangents by channel (`do_most`), which it
    raises, all that it writes but these cotangents are halves: of the gate's logits, planes by
    `gate_scales`; of the projection and of its input, rows by scales whose reciprocals it writes.
    A program also writes its sums over rows for the biases of the gate and of the projection.
    """
    batch, i, row, j, live, there = _place(tl.program_id(0), L, N, pitch, BM, LONG, ALIGNED)
    h = tl.arange(0, BH)
    at = _given(h, batch, i, N, H, plane, LONG, ALIGNED)[:, None] + j[None, :]
    y, scale, on = _normalized(o, w, b, at, live, EPS, H, BH, FLOAT, EXACT)
    inside = (h < H)[:, None] & there[None, :]
    place = (_plane(0, batch, i, 1, L * pitch, pitch, LONG) + j)[:, None] * G
    HALVED: tl.constexpr = halves is not None
    PITCH: tl.constexpr = (H + 7) // 8 * 8
    BY_HALVES: tl.constexpr = do_most is not None
    OUT_PITCH: tl.constexpr = (C + 7) // 8 * 8
    if BY_HALVES:
        by_dp, dp_back = row_scaling(_magnitude(dout_most, FLOAT))
        by_kept, kept_back = row_scaling(_most_normalized(w, b, H, BH, FLOAT))
        if tl.program_id(0) == 0:
            tl.store(reciprocals, dp_back)
            tl.store(reciprocals + 1, kept_back)
        to_bias = by_bias + tl.program_id(0).to(tl.int64) * (G + C)
    if HALVED:
        by, by_row = row_scaling(tl.max(tl.abs(on), 0))
        on_high, on_low = halves_of(on * by[None, :])
        left, left_low = tl.trans(on_high), tl.trans(on_low)
        don_rows = tl.zeros((BM, BH), FLOAT)
    else:
        left = tl.trans(on.to(DOT))
        don = tl.zeros((BH, BM), FLOAT)
    if dkept is not None:
        own = live[:, None] & (h < H)[None, :]
        don += tl.trans(tl.load(dkept + (row + j)[:, None] * H + h[None, :], mask=own, other=0.0))
    for block in range((C + BN - 1) // BN if dkept is None else 0):
        c = block * BN + tl.arange(0, BN)
        within = live[:, None] & (c < C)[None, :]
        at_c = (row + j)[:, None] * C + c[None, :]
        g = tl.load(dout + at_c, mask=within, other=0.0).to(FLOAT)
        if scaling is not None:
            g = g * tl.load(scaling)
        if OUTPUT:
            s = tl.load(gate + at_c, mask=within, other=0.0)
            s = _opened(s, FLOAT, DOT)
        if HALVED:
            right, right_low = _halves(halves, halves_lo, block * BN, C, 0, H, BN, BH, 0, PITCH)
            by_column = _scales(scales, block * BN, C, BN, 0)
        else:
            weight = _weight(p_w, block * BN, C, 0, H, BN, BH, DOT)
        if OUTPUT:
            if HALVED:
                value = tl.zeros((BM, BN), FLOAT)
                value = _add_halves(value, left, left_low, right, right_low, by_row)
                value *= by_column[None, :]
            else:
                value = tl.dot(left, tl.trans(weight), None, PRECISION, out_dtype=FLOAT)
            if p_b is not None:
                value += _bias(p_b, block * BN, C, BN, FLOAT)[None, :]
            ds = (g * value * s * (1 - s)).to(DOT)
            if BY_HALVES:
                by_gate = tl.load(gate_scales + c, mask=c < C, other=1.0)
                to_plane = _plane(c, batch, i, G, do_plane, pitch, LONG)[:, None] + j[None, :]
                across = (c < C)[:, None] & there[None, :]
                _store_halves(dgate + to_plane, dgate_lo, ds * by_gate[None, :], across, True)
                tl.store(to_bias + c, tl.sum(ds, 0), mask=c < C)
            else:
                tl.store(dgate + place + c[None, :], ds, mask=there[:, None] & (c < C)[None, :])
            g = g * s
        if BY_HALVES:
            to_dp = dp + (row + j)[:, None] * OUT_PITCH + c[None, :]
            own = live[:, None] & (c < OUT_PITCH)[None, :]
            _store_halves(to_dp, dp_lo, g * by_dp, own, False)
            tl.store(to_bias + G + c, tl.sum(g, 0), mask=c < C)
        elif dp is not None:
            tl.store(dp + at_c, g.to(DOT), mask=within)
        if HALVED:
            # The scales of the weight's rows go with the cotangent, whose columns they meet.
            g = g * by_column[None, :]
            by, by_g = row_scaling(tl.max(tl.abs(g), 1))
            high, low = halves_of(g * by[:, None])
            don_rows = _add_halves(don_rows, high, low, tl.trans(right), tl.trans(right_low), by_g)
        else:
            don = tl.dot(tl.trans(weight), tl.trans(g.to(DOT)), don, PRECISION, out_dtype=FLOAT)
    if HALVED:
        don = tl.trans(don_rows)
    projected = on
    if not OUTPUT:
        at_gate = _plane(h, batch, i, H, L * pitch, pitch, LONG)[:, None] + j[None, :]
        opened = _opened(tl.load(gate + at_gate, mask=inside, other=0.0), FLOAT, DOT)
        dopen = don * on * opened * (1 - opened)
        if BY_HALVES:
            by_gate = tl.load(gate_scales + h, mask=h < H, other=1.0)
            to_plane = _plane(h, batch, i, G, do_plane, pitch, LONG)[:, None] + j[None, :]
            _store_halves(dgate + to_plane, dgate_lo, dopen * by_gate[:, None], inside, False)
            tl.store(to_bias + h, tl.sum(dopen, 1), mask=h < H)
        else:
            across = there[:, None] & (h < H)[None, :]
            tl.store(dgate + place + h[None, :], tl.trans(dopen.to(DOT)), mask=across)
        don = don * opened
        projected = on * opened
    if BY_HALVES:
        to = kept + (row + j)[:, None] * KEPT + h[None, :]
        own = live[:, None] & (h < KEPT)[None, :]
        _store_halves(to, kept_lo, projected * by_kept, own, True)
    elif dkept is None:
        to = kept + (row + j)[:, None] * KEPT + h[None, :]
        own = live[:, None] & (h < H)[None, :]
        tl.store(to, tl.trans(projected.to(DOT)), mask=own)
        _add_one(kept + (row + j)[:, None] * KEPT, live, live, H, KEPT, BM)
    don = tl.where(inside, don, 0.0)
    total = sums + tl.program_id(0).to(tl.int64) * 2 * H + h
    tl.store(total, tl.sum(don * y, 1), mask=h < H)
    tl.store(total + H, tl.sum(don, 1), mask=h < H)
    if w is not None:
        don = don * tl.load(w + h, mask=h < H, other=0.0).to(FLOAT)[:, None]
    along = tl.sum(don * y, 0) / H
    don = (don - (tl.sum(don, 0) / H)[None, :] - y * along[None, :]) * scale[None, :]
    to_o = _plane(h, batch, i, H, do_plane, pitch, LONG)[:, None] + j[None, :]
    tl.store(do + to_o, don.to(DOT), mask=inside)
    if BY_HALVES:
        largest = tl.max(tl.where(inside, tl.abs(don), 0.0), 1).to(tl.int32, bitcast=True)
        tl.atomic_max(do_most + h, largest, mask=h < H, sem="relaxed")


def sides_back(
    dsides, sides, logits, mask, dmask, side_back, dsides_most, mask_most, reciprocals, by_bias,
    L, N, pitch, dsides_half, dsides_plane, half, plane, mask_b, mask_i, mask_j, sides_lo,
    H: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
    DOT: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Overwrite sides by the cotangents of projections, and logits by their own cotangents.

    For a cotangent of the mask, `sides` must be made without the mask.

    With the reciprocals of scales of sides and logits (`side_back`), these are halves, and so are
    their cotangents, by scales from the bits of the largest magnitudes of `dsides` by channel. It
    writes these scales' reciprocals too, and a program's sums over rows for biases.
    """
    program = tl.program_id(0) // PARTS
    batch, i, row, j, live, there = _place(program, L, N, pitch, BM, LONG, ALIGNED)
    by_mask = tl.zeros((BM,), FLOAT)
    if mask is not None:
        m = tl.load(mask + batch * mask_b + i * mask_i + j * mask_j, mask=live, other=0.0)
        m = m.to(FLOAT)[None, :]
    PER: tl.constexpr = ((2 * H + BH - 1) // BH + PARTS - 1) // PARTS
    for step in range(PER):
        h = (tl.program_id(0) % PARTS * PER + step) * BH + tl.arange(0, BH)
        at = _side(h, batch, i, H, half, plane, pitch, LONG)[:, None] + j[None, :]
        inside = (h < 2 * H)[:, None] & there[None, :]
        from_at = (
            _side(h, batch, i, H, dsides_half, dsides_plane, pitch, LONG)[:, None] + j[None, :]
        )
        d = tl.load(dsides + from_at, mask=inside, other=0.0).to(FLOAT)
        # The product left places without an edge as they were.
        d = tl.where(live[None, :], d, 0.0)
        if side_back is not None:
            back = tl.load(side_back + h, mask=h < 2 * H, other=1.0)
            a = _from_halves(sides, at, sides_lo, inside, back)
            of_logits = tl.load(side_back + 2 * H + h, mask=h < 2 * H, other=1.0)
            g = _from_halves(logits, at, sides_lo, inside, of_logits)
        else:
            a = tl.load(sides + at, mask=inside, other=0.0).to(FLOAT)
            g = tl.load(logits + at, mask=inside, other=0.0).to(FLOAT)
        if dmask is not None:
            by_mask += tl.sum(d * a, 0)
            a = a * m
        # a = p s m, so that its derivative by g is a (1 - s).
        dg = d * a * _sigmoid(-g, ASM)
        d = d * _sigmoid(g, ASM)
        if mask is not None:
            d = d * m
        if side_back is not None:
            # A gate is below one, and a side below its scale's reciprocal times 2¹⁵.
            most = tl.load(dsides_most + h, mask=h < 2 * H, other=0).to(tl.float32, bitcast=True)
            most_of_logits = most * back * 32768.0
            if mask is not None:
                most *= tl.load(mask_most).to(FLOAT)
                if dmask is not None:
                    most_of_logits *= tl.load(mask_most).to(FLOAT)
            by, by_back = row_scaling(most)
            by_logits, logits_back = row_scaling(most_of_logits)
            if program == 0:
                tl.store(reciprocals + h, by_back, mask=h < 2 * H)
                tl.store(reciprocals + 2 * H + h, logits_back, mask=h < 2 * H)
            to_bias = by_bias + program.to(tl.int64) * (4 * H) + h
            tl.store(to_bias, tl.sum(d, 1), mask=h < 2 * H)
            tl.store(to_bias + 2 * H, tl.sum(dg, 1), mask=h < 2 * H)
            _store_halves(sides + at, sides_lo, d * by[:, None], inside, False)
            _store_halves(logits + at, sides_lo, dg * by_logits[:, None], inside, False)
        else:
            tl.store(sides + at, d.to(DOT), mask=inside)
            tl.store(logits + at, dg.to(DOT), mask=inside)
    if dmask is not None:
        tl.store(dmask + row + j, by_mask, mask=live)


def norm_back(
    x, dxn, scaling, w, dx, sums, rows, N, pitch, steps,
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
        v = tl.load(dxn + place[:, None] * C + c[None, :], mask=live, other=0.0).to(FLOAT)
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
        tl.store(dx + at, v.to(dx.dtype.element_ty), mask=live)
        step += 1
    to = sums + tl.program_id(0).to(tl.int64) * 2 * C + c
    tl.store(to, tl.sum(by_weight, 0), mask=c < C)
    tl.store(to + C, tl.sum(by_bias, 0), mask=c < C)


@triton.jit
def _row_through_norm(
    parts, weight, w, b, scaling, dweight, dbias, dnorm, row, rows, many,
    C: tl.constexpr, KEPT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of a weight's row and its bias, and the row's part of a norm's."""
    ONES: tl.constexpr = KEPT - 8
    c = tl.arange(0, BC)
    inside = c < C
    by_y = tl.zeros((BP, BC), tl.float32)
    by_one = tl.zeros((BP, BC), tl.float32)
    by_bias = tl.zeros((BP,), tl.float32)
    begin = 0
    while begin < many:
        part = begin + tl.arange(0, BP)
        place = parts + (part.to(tl.int64) * rows + row) * KEPT
        there = (part < many)[:, None] & inside[None, :]
        by_y += tl.load(place[:, None] + c[None, :], mask=there, other=0.0)
        if ONES > C:
            by_one += tl.load(place[:, None] + C + c[None, :], mask=there, other=0.0)
        by_bias += tl.load(place + ONES, mask=part < many, other=0.0)
        begin += BP
    by_y, by_one, by_bias = tl.sum(by_y, 0), tl.sum(by_one, 0), tl.sum(by_bias, 0)
    if ONES == C:
        by_one += by_bias
    if scaling is not None:
        by_y /= tl.load(scaling)
        by_one /= tl.load(scaling)
        by_bias /= tl.load(scaling)
    of = tl.load(weight + row * C + c, mask=inside, other=0.0).to(tl.float32)
    to = dnorm + row * 2 * C + c
    tl.store(to, of * by_y, mask=inside)
    tl.store(to + C, of * by_one, mask=inside)
    if w is not None:
        by_y *= tl.load(w + c, mask=inside, other=0.0).to(tl.float32)
    if b is not None:
        by_y += by_one * tl.load(b + c, mask=inside, other=0.0).to(tl.float32)
    if dweight is not None:
        tl.store(dweight + row * C + c, by_y, mask=inside)
    if dbias is not None:
        tl.store(dbias + row, by_bias)


def through_norm(
    sides, opened, end, scaling, p_w, g_w, o_w, e_w, w, b, w_out, b_out,
    dp_w, dp_b, dg_w, dg_b, de_w, de_b, do_w, do_b, dnorm, dnorm_out,
    many_sides, many_opened, many_end,
    C: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    KEPT: tl.constexpr, KEPT_END: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of weights and biases behind a norm, and their parts of the norm's.

    A program takes a row of a weight: of both projections and their gates, of the last gate, or of
    the end; the end may be missing, or there alone. The parts of sums over rows are of z y; from
    column C on of z e, unless e is one; and of z in column KEPT - 8. Here y is a standardized row
    times e, and z the cotangent of the projection of w y + b e.
    """
    row = tl.program_id(0)
    if sides is None:
        _row_through_norm(
            end, e_w, w_out, b_out, scaling, de_w, de_b, dnorm_out, row, C, many_end,
            H, KEPT_END, BP, BH,
        )  # fmt: skip
    elif row < 2 * H:
        _row_through_norm(
            sides, p_w, w, b, scaling, dp_w, dp_b, dnorm, row, 4 * H, many_sides,
            C, KEPT, BP, BC,
        )  # fmt: skip
    elif row < 4 * H:
        _row_through_norm(
            sides + 2 * H * KEPT, g_w, w, b, scaling, dg_w, dg_b, dnorm + 4 * H * C,
            row - 2 * H, 4 * H, many_sides, C, KEPT, BP, BC,
        )  # fmt: skip
    elif row < 4 * H + G:
        _row_through_norm(
            opened, o_w, w, b, scaling, do_w, do_b, dnorm + 8 * H * C,
            row - 4 * H, G, many_opened, C, KEPT, BP, BC,
        )  # fmt: skip
    elif end is not None:
        _row_through_norm(
            end, e_w, w_out, b_out, scaling, de_w, de_b, dnorm_out,
            row - 4 * H - G, C, many_end, H, KEPT_END, BP, BH,
        )  # fmt: skip


@triton.jit
def _write_sums(
    parts, biases, scaling, dweight, dbias, row, part, many, bias_row, many_biases,
    C: tl.constexpr, KEPT: tl.constexpr, BC: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Write the sum of the parts of a weight's row, and of its bias.

    Parts of the bias are numbers behind the row, or a column of `biases`.
    """
    BP: tl.constexpr = 4096 // BC if BC < 4096 else 1
    c = tl.arange(0, BC)
    inside = c < C
    sums = tl.zeros((BP, BC), FLOAT)
    by_bias = tl.zeros((BP,), FLOAT)
    begin = 0
    while begin < many:
        own = begin + tl.arange(0, BP)
        place = parts + own.to(tl.int64) * part + row * KEPT
        there = (own < many)[:, None] & inside[None, :]
        sums += tl.load(place[:, None] + c[None, :], mask=there, other=0.0)
        if KEPT > C:
            by_bias += tl.load(place + C, mask=own < many, other=0.0)
        begin += BP
    found, of_bias = tl.sum(sums, 0), tl.sum(by_bias, 0)
    if biases is not None:
        of_bias += _column_sum(biases + row, many_biases, bias_row, FLOAT)
    if scaling is not None:
        found /= tl.load(scaling)
        of_bias /= tl.load(scaling)
    if dweight is not None:
        tl.store(dweight + row.to(tl.int64) * C + c, found, mask=inside)
    if dbias is not None:
        tl.store(dbias + row, of_bias)


@triton.jit
def _column_sum(column, many, step, FLOAT: tl.constexpr):
    """Return the sum of a column."""
    sums = tl.zeros((1024,), FLOAT)
    begin = 0
    while begin < many:
        own = begin + tl.arange(0, 1024)
        sums += tl.load(column + own.to(tl.int64) * step, mask=own < many, other=0.0)
        begin += 1024
    return tl.sum(sums, 0)


@triton.jit
def _write_norm(
    parts, scaling, dweight, dbias, program, many, C: tl.constexpr, BC: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Write the sums of some columns of a norm's very many parts: of its weight, or of its bias."""
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    BP: tl.constexpr = 4096 // BC
    c = program % BLOCKS * BC + tl.arange(0, BC)
    of_bias = program // BLOCKS
    sums = tl.zeros((BP, BC), FLOAT)
    begin = 0
    while begin < many:
        own = begin + tl.arange(0, BP)
        place = parts + (own.to(tl.int64) * 2 + of_bias)[:, None] * C + c[None, :]
        sums += tl.load(place, mask=(own < many)[:, None] & (c < C)[None, :], other=0.0)
        begin += BP
    found = tl.sum(sums, 0)
    if scaling is not None:
        found /= tl.load(scaling)
    if dweight is not None:
        tl.store(dweight + c, found, mask=(c < C) & (of_bias == 0))
    if dbias is not None:
        tl.store(dbias + c, found, mask=(c < C) & (of_bias == 1))


def sum_parts(
    norm, norm_out, sides, opened, end, by_bias, by_end_bias, scaling,
    dw, db, dp_w, dp_b, dg_w, dg_b, dw_out, db_out, de_w, de_b, do_w, do_b,
    many_norm, many_norm_out, many_sides, many_opened, many_end, many_biases, many_end_biases,
    sides_part, opened_part, end_part,
    C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, KEPT_END: tl.constexpr,
    BC: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Write the cotangents of norms and of all other weights, as far as their parts are given.

    Norms have the most parts: the first programs take BN columns of a norm's weight or bias each.
    The others take a row of a weight: of both projections and their gates, of the last gate, or of
    the end. Parts of biases stand behind the rows, or are given: of both projections and gates, and
    of the last gate and the end.
    """
    NORM: tl.constexpr = 2 * ((C + BN - 1) // BN)
    NORMS: tl.constexpr = NORM + 2 * ((H + BN - 1) // BN)
    program = tl.program_id(0)
    row = program - NORMS
    if program < NORM:
        if norm is not None:
            _write_norm(norm, None, dw, db, program, many_norm, C, BN, FLOAT)
    elif program < NORMS:
        if norm_out is not None:
            _write_norm(
                norm_out, scaling, dw_out, db_out, program - NORM, many_norm_out, H, BN, FLOAT
            )
    elif sides is None:
        if end is not None:
            _write_sums(
                end, None, scaling, de_w, de_b, row, end_part, many_end, 0, 0,
                H, KEPT_END, BH, FLOAT,
            )  # fmt: skip
    elif row < 2 * H:
        _write_sums(
            sides, by_bias, scaling, dp_w, dp_b, row, sides_part, many_sides, 4 * H, many_biases,
            C, KEPT, BC, FLOAT,
        )  # fmt: skip
    elif row < 4 * H:
        _write_sums(
            sides + 2 * H * KEPT, None if by_bias is None else by_bias + 2 * H, scaling,
            dg_w, dg_b, row - 2 * H, sides_part, many_sides, 4 * H, many_biases,
            C, KEPT, BC, FLOAT,
        )  # fmt: skip
    elif row < 4 * H + G:
        _write_sums(
            opened, by_end_bias, scaling, do_w, do_b, row - 4 * H, opened_part, many_opened,
            G + C, many_end_biases, C, KEPT, BC, FLOAT,
        )  # fmt: skip
    elif end is not None:
        _write_sums(
            end, None if by_end_bias is None else by_end_bias + G, scaling, de_w, de_b,
            row - 4 * H - G, end_part, many_end, G + C, many_end_biases, H, KEPT_END, BH, FLOAT,
        )  # fmt: skip


def product(
    a, b, c, M, N, K, a_batch, a_row, a_column, b_batch, b_row, b_column, c_batch, c_row, c_column,
    scale,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, C_UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
    ADD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write, or add, the products of matrices of any strides, times a number, summed in float32.

    STEPS of BK terms are given to the interpreter, which can't turn a number into a range.
    """
    a_batch, a_row, a_column = strides(a_batch, a_row, a_column, A_UNIT, ALIGNED)
    b_batch, b_row, b_column = strides(b_batch, b_row, b_column, B_UNIT, ALIGNED)
    c_batch, c_row, c_column = strides(c_batch, c_row, c_column, C_UNIT, ALIGNED)
    if ALIGNED:
        M, N, K = M // 8 * 8, N // 8 * 8, K // 8 * 8
    across, along = tl.cdiv(N, BN), tl.cdiv(M, BM)
    tile = tl.program_id(0) % (across * along)
    batch = (tl.program_id(0) // (across * along)).to(tl.int64)
    m = (tile // across * BM + tl.arange(0, BM)).to(tl.int64)
    n = (tile % across * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, BK) if STEPS is None else STEPS):
        k = (step * BK + tl.arange(0, BK)).to(tl.int64)
        at_a = a + batch * a_batch + m[:, None] * a_row + k[None, :] * a_column
        at_b = b + batch * b_batch + k[:, None] * b_row + n[None, :] * b_column
        left = tl.load(at_a, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(at_b, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(left.to(DOT), right.to(DOT), total, PRECISION)
    total *= scale
    to = c + batch * c_batch + m[:, None] * c_row + n[None, :] * c_column
    inside = (m < M)[:, None] & (n < N)[None, :]
    if ADD:
        total += tl.load(to, mask=inside, other=0.0)
    tl.store(to, total.to(c.dtype.element_ty), mask=inside)


# `gpukern.trimul.plan` aligns these pointers to 16 bytes.
POINTERS = {
    normalize: ("x", "kept"),
    row_bounds: (),
    split_rows: ("halves",),
    split_columns: ("halves",),
    largest: (),
    project: ("x", "p_w", "g_w", "o_w", "sides", "logits", "gate", "kept", "halves"),
    open_sides: ("sides", "logits"),
    end_rows: ("o", "gate", "kept"),
    finish: ("o", "gate", "p_w", "out", "halves"),
    finish_back: ("o", "gate", "dout", "p_w", "do", "dgate", "dp", "kept", "halves", "dkept"),
    sides_back: ("dsides", "sides", "logits"),
    norm_back: ("x", "dxn", "dx"),
    through_norm: (),
    sum_parts: (),
    product: (),
}
