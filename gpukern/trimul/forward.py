"""The forward of the triangle multiplicative update, kernel by kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusedops.trimul.op import Weights
from gpukern.launch import power, processors
from gpukern.products import Halves
from gpukern.tape import product
from gpukern.trimul import kernels
from gpukern.trimul.plan import (
    ALL,
    CHANNELS,
    MANY,
    Update,
    ceil,
    hopper,
    hopper_wide,
    is_aligned,
    launch,
    strides_of,
    up,
)
from gpukern.trimul.products import Halved, multiply


class Tile(NamedTuple):
    """Rows of a program of `project`, its channels at once, its warps and stages."""

    rows: int
    sides: int
    gate: int
    x: int
    warps: int
    stages: int


# For 16 bits and TF32: forward, backward, and where x is ready.
_PROJECT = Tile(rows=128, sides=64, gate=64, x=128, warps=8, stages=2)
_WITH_LOGITS = Tile(rows=128, sides=32, gate=64, x=128, warps=8, stages=3)
_READY = Tile(rows=128, sides=64, gate=64, x=64, warps=4, stages=3)
# For emulated products, whose parts take registers: where x is made and where it is ready.
_EMULATED = Tile(rows=64, sides=32, gate=32, x=64, warps=4, stages=2)
_READY_EMULATED = Tile(rows=128, sides=32, gate=32, x=32, warps=8, stages=2)
# For products of halves.
_HALVED = Tile(rows=128, sides=64, gate=128, x=128, warps=8, stages=2)
_NARROW_HALVED = Tile(rows=64, sides=32, gate=64, x=64, warps=4, stages=2)
_READY_HALVED = Tile(rows=128, sides=64, gate=128, x=64, warps=8, stages=3)
# With little shared memory, where large tiles of TF32 don't fit, and others spill more.
_SMALL = Tile(rows=64, sides=32, gate=32, x=128, warps=4, stages=2)
# For float32 and float64 themselves.
_EXACT = Tile(rows=32, sides=32, gate=32, x=64, warps=4, stages=1)
_FLOAT64 = _EXACT._replace(x=32)


class SideScales(NamedTuple):
    """Room for scales of the halves of sides, or of sides and their logits, by channel.

    `project` writes them, their reciprocals, and `zeros`, in which kernels behind it find largest
    magnitudes. `most` is the mask's.
    """

    scales: Any
    reciprocals: Any
    most: Any = None
    zeros: Any = None


def triangle_multiplicative_update(a: Any, y: Any) -> None:
    """Write the update, and o for a backward pass."""
    out, hidden = y
    update = Update(a)
    if not update.x.numel():
        return
    N, H = update.N, update.H
    own = hidden is None or hidden.dtype != update.dtype
    square = N * update.pitch
    G = 0 if update.in_out else update.G
    update.divide(
        lambda b, h, n: (
            b * (N * N * H * own + 2 * h * square + n * update.pitch * (G + update.width))
        ),
        16,
    )
    shift = update.shift if own else 0
    for b in update.batches:
        members = b.stop - b.start
        o = update.new(members, H, N, N) if own else hidden[b]
        gate = None
        if update.whole and out is not None:
            # One launch makes left, right and the gate.
            gate = update.gate(members, ALL, out[b])
            sides = update.new_sides(members * H)
            scales = side_scales(update, b, len(update.weights.p_in_weight))
            project(update, *update.edges(b, ALL), sides=sides, side_scales=scales, gate=gate)
            multiply(update, sides, scales, o, ALL, 2.0**shift)
            del sides
        else:
            triangles(update, b, o, 2.0**shift)
        if hidden is not None and own:
            torch.mul(o, 2.0**-shift, out=hidden[b])
        if out is None:
            continue
        for lines in update.lines:
            if not update.whole:
                gate = update.gate(members, lines, out[b, lines])
                project(update, *update.edges(b, lines), gate=gate)
            finish(update, o[:, :, lines], gate, out[b, lines], shift)


def project(
    update: Update,
    x: Any,
    mask: Any,
    *,
    weights: Weights | None = None,
    sides: Any = None,
    side_scales: SideScales | None = None,
    logits: Any = None,
    gate: Any = None,
) -> None:
    """Fill the outputs given: planes of sides, the logits of their gates, the last gate.

    The weights may be those of some channels of the sides. With scales, which it writes, sides and
    logits are halves.
    """
    B, L, N, C = x.shape
    rows, lines = B * L * N, B * L
    many = rows >= MANY
    w = update.weights if weights is None else weights
    if update.apart:
        _project_apart(update, x, mask, w, sides, logits, gate)
        return
    p_w, p_b, g_w, g_b = (
        (None, None, None, None)
        if sides is None
        else (w.p_in_weight, w.p_in_bias, w.g_in_weight, w.g_in_bias)
    )
    o_w, o_b = w.g_out_weight, w.g_out_bias
    H, G = 0 if sides is None else p_w.shape[0] // 2, 0 if gate is None else update.G
    logging = logits is not None
    if update.on_hopper and many and not logging and hopper_wide.way_to_project_wide(C, H, G):
        _project_wide(update, x, mask, w, sides, gate)
        return
    numbers: tuple[int, ...]
    half, plane = (sides.stride(-4), sides.stride(-3)) if H else (0, 0)
    way = update.on_hopper and many and hopper.way_to_project(C, H, G, logging)
    norm = w.norm_in_weight, w.norm_in_bias
    outputs = sides, logits, gate
    if way:
        tensors = x, mask, *norm, p_w, p_b, g_w, g_b, o_w, o_b, *outputs
        numbers = B, L * N, N, half, plane, *strides_of(mask)
        constants = update.eps, C, H, G, update.output, 16 // x.dtype.itemsize, *way
        constants += update.types.dot, update.long
        programs = processors(x.device)
        launch(hopper.project, programs, tensors, numbers, constants, warps=way.warps)
        return
    ready, kept, kept_lo, kept_scale = many and C > CHANNELS, None, 0, None
    if ready and update.halved:
        ahead = normalized_halves(update, x)
        kept, kept_scale, kept_lo = ahead.halves, ahead.scales, ahead.halves.stride(0)
    elif ready:
        kept = normalized(update, x)
    BM, BH, BG, chunk, warps, stages = _tile(update, ready, logging)
    chunk = min(chunk, power(C, 16))
    if C > chunk and not ready:
        stages = 1
    if not x.is_cuda:
        # The interpreter's time grows with programs and steps.
        BM, BH, BG = 16, 128, 128
    BM = min(BM, power(N, 16))
    blocks, programs = ceil(2 * H, BH), lines * ceil(N, BM)
    # Few rows are shared by as many programs as a GPU runs at once.
    parts = max(1, min(blocks, ceil(2 * processors(x.device), programs)))
    if ready:
        parts = blocks + ceil(G, BG)
    numbers = L, N, update.pitch, half, plane, *strides_of(mask)
    sides_lo = 0 if side_scales is None else sides.stride(0)
    constants = update.eps, C, H, G, update.output, update.width, parts, BM, chunk, BH, BG
    constants += *update.types, update.asm, *update.place
    of_sides = SideScales(None, None) if side_scales is None else side_scales
    halved = Halved.of(
        update,
        (p_w, p_b),
        (g_w, g_b),
        o_w if G else None,
        norm=norm,
        most=of_sides.most,
        scales=side_scales and side_scales[:2],
        zeros=of_sides.zeros,
    )
    tensors = x, mask, *norm, p_w, p_b, g_w, g_b, o_w, o_b, *outputs
    tensors += kept, halved.halves, halved.scales, of_sides.scales, kept_scale
    numbers += halved.lo, kept_lo, sides_lo
    how = {"warps": warps, "stages": stages, "limited": not update.halved}
    launch(kernels.project, programs * parts, tensors, numbers, constants, **how)


def _project_apart(
    update: Update, x: Any, mask: Any, w: Weights, sides: Any, logits: Any, gate: Any
) -> None:
    """Do the same by products of torch's, which read normalized rows."""
    B, L, N, C = x.shape
    kept = normalized(update, x)[..., :C].flatten(1, 2)

    def planes(weight: Any, to: Any) -> None:
        """Write a product with the rows of each half of a weight for each member's planes."""
        halves = weight.to(update.dtype).unflatten(0, (len(to), -1))
        for b, rows in enumerate(kept):
            own = to.unflatten(1, (B, -1))[:, b].flatten(2)
            product(False, torch.bmm, halves, rows.mT.expand(len(to), -1, -1), out=own)

    if sides is not None:
        logits = update.new(*sides.shape) if logits is None else logits
        planes(w.p_in_weight, sides)
        planes(w.g_in_weight, logits)
        BM, BH = min(64, power(N, 16)), min(32, power(2 * update.H, 16))
        H = sides.shape[1] // B
        parts = ceil(2 * H, BH)
        numbers = L, N, update.pitch, *sides.stride()[:2], *logits.stride()[:2], *strides_of(mask)
        constants = H, parts, BM, BH, update.types.float, *update.place
        tensors = sides, logits, mask, w.p_in_bias, w.g_in_bias
        programs = B * L * ceil(N, BM) * parts
        launch(kernels.open_sides, programs, tensors, numbers, constants)
    if gate is None:
        return
    weight, bias = w.g_out_weight.to(update.dtype), w.g_out_bias
    if update.output:
        found = gate if N == update.pitch else update.new(B, L, update.pitch, update.G)
        by_row = weight.T.expand(B, -1, -1)
        product(False, torch.bmm, kept, by_row, out=found.flatten(1, 2))
    else:
        planes(weight, gate.flatten(0, 1)[None])
        found = gate
        bias = None if bias is None else bias[:, None, None]
    if bias is not None:
        found += bias
    torch.sigmoid(found[:, :, :N] if update.output else found, out=gate)


def _tile(update: Update, ready: bool, logging: bool) -> Tile:
    if not update.fast:
        return _FLOAT64 if update.dtype.itemsize == 8 else _EXACT
    if update.small:
        return _SMALL
    if update.halved:
        return _READY_HALVED if ready else _HALVED if update.C > 64 else _NARROW_HALVED
    if update.emulated:
        return _READY_EMULATED if ready else _EMULATED
    return _READY if ready else _WITH_LOGITS if logging else _PROJECT


def _project_wide(
    update: Update, x: Any, mask: Any, weights: Weights, sides: Any, gate: Any
) -> None:
    """Fill planes of left and right, and the last gate if given, for many channels of x."""
    B, L, N, C = x.shape
    w = weights if gate is not None else weights._replace(g_out_weight=None, g_out_bias=None)
    H, G = len(w.p_in_weight) // 2, 0 if gate is None else update.G
    block, slots = hopper_wide.way_to_project_wide(C, H, G)
    vector = 16 // x.dtype.itemsize
    packed, biases = update.new(4 * H + G, C), None
    given = w.p_in_bias, w.g_in_bias, w.g_out_bias, w.norm_in_bias
    if any(bias is not None for bias in given):
        biases = update.new(4 * H + G, dtype=torch.float32)
    tensors = w.p_in_weight, w.p_in_bias, w.g_in_weight, w.g_in_bias
    tensors += w.g_out_weight, w.g_out_bias, w.norm_in_weight, w.norm_in_bias, packed, biases
    constants = C, H, update.output, vector, block
    launch(hopper_wide.pack, (4 * H + G) // 16, tensors, (), constants)
    half, plane = sides.stride(0), sides.stride(1)
    tensors = x, mask, hopper_wide.blocks_of(packed, block), biases, sides, gate
    numbers = B, L * N, N, half, plane, *strides_of(mask)
    constants = update.eps, C, H, G, update.output, vector, block, slots, update.long
    programs = processors(x.device)
    launch(hopper_wide.project_wide, programs, tensors, numbers, constants)


def normalized(update: Update, x: Any) -> Any:
    """Return rows of the normalized x, with a column of ones."""
    kept = update.kept(*x.shape[:2])
    _normalize(update, x, kept, update.width, 0)
    return kept


def normalized_halves(update: Update, x: Any) -> Halves:
    """Return rows of the normalized x as halves of one scale."""
    (B, L, _, C), width = x.shape, up(x.shape[3])
    rows = B * L * update.pitch
    halves = update.new(2, 1, rows, width, dtype=torch.float16)
    scale = update.new(1, 1)
    _normalize(update, x, halves, width, halves.stride(0), scale)
    return Halves(halves, scale.expand(1, C), (1, rows, C), fast=2, low=1)


def _normalize(
    update: Update, x: Any, kept: Any, width: int, lo: int, reciprocal: Any = None
) -> None:
    B, L, N, C = x.shape
    chunk = min(CHANNELS if update.fast else 64, power(C, 16))
    types, w = update.types, update.weights
    constants = update.eps, C, width, 16, chunk, types.float, types.exact, *update.place
    tensors = x, w.norm_in_weight, w.norm_in_bias, kept, reciprocal
    numbers = L, N, update.pitch, lo
    launch(kernels.normalize, B * L * ceil(N, 16), tensors, numbers, constants)


def side_scales(update: Update, b: slice, rows: int) -> SideScales | None:
    """Return room for scales of the sides' halves; None for no halves."""
    if not update.halved_sides:
        return None
    most = None if update.mask is None else update.mask[b].abs().amax()
    return SideScales(update.new(rows), update.new(rows), most)


def bound_rows(
    update: Update, w: Any, b: Any, norm_w: Any, norm_b: Any, most: Any, to: Any, back: Any
) -> None:
    """Write scales, and reciprocals, for projections of normalized rows times a factor."""
    rows, width = w.shape
    constants = width, power(width), update.types.float
    launch(kernels.row_bounds, rows, (w, b, norm_w, norm_b, most, to, back), (), constants)


def triangles(update: Update, b: slice, o: Any, scale: float = 1.0) -> None:
    """Write o of some of the batch, some channels at a time."""
    for h in update.channels:
        sides, weights = update.new_sides(len(o) * (h.stop - h.start)), update.of(h)
        scales = side_scales(update, b, len(weights.p_in_weight))
        for lines in update.lines:
            edges, some = update.edges(b, lines), sides[..., lines, :]
            project(update, *edges, weights=weights, sides=some, side_scales=scales)
        multiply(update, sides, scales, o, h, scale)


def end_rows(update: Update, o: Any, gate: Any, shift: int) -> Any:
    """Return rows of the last projection's input, with a column of ones."""
    (B, H, L, N), w = o.shape, update.weights
    BH, width = power(H, 16), up(H + 1)
    BM = min(max(16, 4096 // BH), power(N, 16))
    kept = update.new(B, L * N, width)
    tensors = o, None if update.output else gate, w.norm_out_weight, w.norm_out_bias, kept
    numbers = L, N, update.pitch, o.stride(1), shift
    constants = update.eps, H, width, BM, BH, update.types.float, True, *update.place
    launch(kernels.end_rows, B * L * ceil(N, BM), tensors, numbers, constants)
    return kept


def finish(update: Update, o: Any, gate: Any, out: Any, shift: int) -> None:
    """Write the output: o, given times a power of two, normalized, gated and projected."""
    B, L, N, C = out.shape
    result = out if is_aligned(out) else torch.empty_like(out)
    w = update.weights
    norm, projection = (w.norm_out_weight, w.norm_out_bias), (w.p_out_weight, w.p_out_bias)
    tensors: tuple[Any, ...] = o, gate, *norm, *projection, result
    many = B * L * N >= MANY
    split = update.dtype == torch.bfloat16 and w.p_out_weight.dtype == torch.float32
    sizes = C, update.H, out.dtype.itemsize
    way = update.on_hopper and many and hopper.way_to_finish(*sizes, split)
    numbers: tuple[int, ...]
    if way:
        numbers = B, L * N, o.stride(1), shift
        vector = 16 // out.dtype.itemsize
        constants = update.eps, C, update.H, update.output, vector, *way
        constants += update.types.dot, update.long
        programs = processors(out.device)
        launch(hopper.finish, programs, tensors, numbers, constants, warps=way.warps)
    elif update.apart:
        kept = end_rows(update, o, gate, shift).flatten(0, 1)[:, : update.H]
        found = result if result.dtype == update.dtype else update.new(*out.shape)
        found_rows, weight = found.flatten(0, 2), w.p_out_weight.to(update.dtype)
        product(False, torch.mm, kept, weight.T, out=found_rows)
        if w.p_out_bias is not None:
            found_rows += w.p_out_bias
        if update.output:
            found *= gate
        if found is not result:
            result.copy_(found)
    else:
        BH = power(update.H, 16)
        rows = (4096 if update.small else 8192) // BH
        BM = min(max(16, rows) if update.fast else 16, power(N, 16))
        # At most the numbers that a block of the weight has with H = 128.
        BN = max(16, min(128 if update.fast else 32, (1 << 14) // BH, power(C, 16)))
        halved = Halved.of(update, projection)
        tensors += halved.halves, halved.scales
        warps = 4
        if update.halved:
            BM, warps = min(64, power(N, 16)), 4 if BH <= 128 else 8
            BN = min(BN, 32 if BH <= 128 else 64)
        elif update.emulated and BH > 128:
            # The three parts of a float32 factor take registers.
            BM, BN = 16, min(BN, 32)
        constants = update.eps, C, update.H, update.output, BM, BH, BN, *update.types, *update.place
        numbers = L, N, update.pitch, o.stride(1), shift, halved.lo
        programs, limited = B * L * ceil(N, BM), not update.halved
        how = {"warps": warps, "limited": limited}
        launch(kernels.finish, programs, tensors, numbers, constants, **how)
    if result is not out:
        out.copy_(result)
