"""The backward of the triangle multiplicative update, kernel by kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusedops.trimul.op import Weights, slices
from gpukern.launch import power, processors
from gpukern.products import Halves, multiply_halves, split_by_most
from gpukern.tape import product
from gpukern.trimul import kernels
from gpukern.trimul.forward import (
    SideScales,
    bound_rows,
    end_rows,
    normalized,
    normalized_halves,
    project,
    triangles,
)
from gpukern.trimul.plan import (
    ALL,
    MANY,
    Update,
    aligned,
    ceil,
    hopper_backward,
    is_aligned,
    launch,
    strides_of,
    up,
)
from gpukern.trimul.products import (
    LONG,
    SPLIT,
    Halved,
    multiply,
    multiply_back,
    multiply_halves_back,
    over_rows,
    parts_over_rows,
    sum_of_halves,
    through,
)

# From this N on, a backward pass handles one member of the batch at a time.
_ALONE = 128
# The most edges and channels of a program of `sides_back`.
_SIDES_TILE = 64
# The most parts of a norm's cotangents that a kernel of ours adds up, and its columns at once.
_PARTS, _COLUMNS = 1 << 12, 16


class Parts(NamedTuple):
    """Parts of the cotangents of norms and of weights, to be summed.

    Parts of biases stand behind weights' rows, or are given by projection and gate, and by the last
    gate and the end.
    """

    norm: Any = None
    norm_out: Any = None
    sides: Any = None
    opened: Any = None
    end: Any = None
    biases: Any = None
    end_biases: Any = None


def triangle_multiplicative_update_vjp(a: Any, y: Any) -> None:
    """Write the cotangents of all arrays that want one."""
    update = Update(a)
    dx, dmask, *rest = y
    dweights, x = Weights(*rest), update.x
    if not x.numel():
        for output in y:
            if output is not None:
                output.zero_()
        return
    on_hopper = is_on_hopper(update, dmask)
    # Parts smaller than an eighth would save little beside left, right and the cotangent of o.
    update.divide(functools.partial(_need, update, a, dx, on_hopper), ceil(update.H, 8))
    hidden, dout = aligned(a.hidden), aligned(a.dout)
    scaling = scaling_of(update, dout)
    back = _back_in_parts
    if update.whole:
        back = _back_on_hopper if on_hopper else _back_at_once
        if update.halved_sides and not update.limit and (update.B == 1 or update.N >= _ALONE):
            back = _back_by_halves
    if dmask is not None:
        dmask.zero_()
    sums: list[Any] = []
    batches = slices(update.B, 1) if update.N >= _ALONE else update.batches
    for b in batches:
        to_x, to_mask = (None if to is None else to[b] for to in (dx, dmask))
        found = back(update, b, hidden, dout[b], scaling, to_x, to_mask)
        sums = _added(sums, found) if len(batches) > 1 else list(found)
    if on_hopper:
        parts = through_norm(*sums, scaling, update.weights, dweights)
        sum_parts(update, parts, None, dweights)
    else:
        dpairs, dopen, dnorm, dend, dnorm_out, *biases = sums
        parts = Parts(dnorm, dnorm_out, dpairs, dopen, dend, *biases)
        sum_parts(update, parts, scaling, dweights)


def _need(update: Update, a: Any, dx: Any, on_hopper: bool, b: int, h: int, n: int) -> int:
    """Return the numbers of intermediate results for parts of the batch, channels and lines."""
    N, C, H, G, pitch, width = update.N, update.C, update.H, update.G, update.pitch, update.width
    b = 1 if N >= _ALONE else b
    square, lines = N * pitch, min(n, N) * pitch
    wider = update.accumulator.itemsize // update.dtype.itemsize
    own = a.hidden is None or a.hidden.dtype != update.dtype
    # Kernels write the cotangent of x in any case.
    unasked = ceil(C * update.x.itemsize, update.dtype.itemsize) * (dx is None)
    sums = (min(SPLIT, lines // LONG) + 1) * (4 * H + G + C) * width * wider
    if h < H or n < N:
        waiting = G * (not _holds(update, dx))
        of_end = max(G + width, 2 * G + C + up(H + 1))
        of_front = 4 * H + G + C + width + unasked + 2 * wider
        end = square * H * (1 + (a.hidden is None)) + lines * of_end
        products = square * (3 * H + 2 * h) + lines * width
        front = square * (2 * H + 2 * h) + lines * of_front
        return b * (square * waiting + max(end, products, front)) + sums
    if on_hopper:
        return b * square * (4 * H + G + max(G + H * (1 + own), width + unasked)) + sums
    after = max(H + G + max(3 * H, up(H + 1) + C), C + width + unasked)
    return b * square * (4 * H + G + after) + sums


def _holds(update: Update, dx: Any) -> bool:
    """Return whether the cotangent of the last gate's logits fits in the memory of that of x."""
    return dx is not None and dx.dtype == update.dtype and update.G == update.C


def _added(sums: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    """Return the sums of parts over all that was found so far."""
    totals = [parts.sum(0, keepdim=True) for parts in found]
    return [a.add_(b) for a, b in zip(sums, totals, strict=True)] if sums else totals


def scaling_of(update: Update, *cotangents: Any) -> Any:
    """Return a number to multiply cotangents by before they are rounded to fp16; else None."""
    if update.dtype != torch.float16:
        return None
    # The largest becomes about 1, so that numbers too small for fp16 are negligible beside it.
    most = torch.stack([cotangent.abs().amax().float() for cotangent in cotangents]).amax()
    most = torch.where((most > 0) & most.isfinite(), most, 1.0)
    return torch.exp2(-torch.log2(most).floor())


def is_on_hopper(update: Update, dmask: Any) -> bool:
    """Return whether Hopper's kernels do a backward pass."""
    many = update.L * update.N >= MANY
    if not update.on_hopper or not many or dmask is not None:
        return False
    ways = (
        hopper_backward.way_to_project_back(update.C, update.H, update.G),
        hopper_backward.way_to_finish_back(update.C, update.H),
    )
    return None not in ways


def _back_at_once(
    update: Update, b: slice, hidden: Any, dout: Any, scaling: Any, dx: Any, dmask: Any
) -> tuple[Any, ...]:
    """Return the cotangents of projections, of gates, of the norm of x, and of the end.

    The first three are the front; the end is the last projection and the norm of o. Write the
    cotangents of x and of the mask. `dx` serves as scratch before.
    """
    members, N, H, pitch = b.stop - b.start, update.N, update.H, update.pitch
    x, mask = update.edges(b, ALL)
    both, gate = update.new(2, 2, members * H, N, pitch), update.gate(members, ALL)
    project(update, x, mask, sides=both[0], logits=both[1], gate=gate)
    do, dgate = update.new(members * H, N, pitch), update.new(members, N, pitch, update.G)
    o = _hidden_of(update, b, hidden)
    ends = finish_back(update, o, gate, dout, scaling, do, dgate, dx)
    del o, gate
    dsides = torch.empty_like(both[0])
    multiply_back(update, both[0], do[..., :N], dsides)
    sides_back(update, x, mask, both, dsides, scaling, dmask)
    # Free memory for the normalized x and its cotangent.
    del do, dsides
    return *front_back(update, x, both, dgate, scaling, dx), *ends


class _Halved(NamedTuple):
    """The planes of a backward by halves, and numbers that go with them.

    `planes` (2, 4 H + G, N, pitch) have left, right and logits by `scales`, whose reciprocals are
    `backs`, and then the cotangents of these and of the last gate's logits by scales whose
    `reciprocals` are written. `most` has the bits of the largest magnitudes by channel, of the
    cotangents of o, of left and of right, and at last of the output's.
    """

    planes: Any
    scales: Any
    backs: Any
    reciprocals: Any
    most: Any

    @staticmethod
    def of(update: Update) -> _Halved:
        N, H, rows = update.N, update.H, 4 * update.H + update.G
        return _Halved(
            update.new(2, rows, N, update.pitch, dtype=torch.float16),
            update.new(4 * H),
            update.new(4 * H),
            update.new(rows),
            update.new(3 * H + 1, dtype=torch.int32),
        )

    def sides(self) -> tuple[Any, Any]:
        """Return the planes of left and right, and the planes of their logits."""
        H = len(self.scales) // 4
        sides, logits = (self.planes[:, i : i + 2 * H].unflatten(1, (2, H)) for i in (0, 2 * H))
        return sides, logits

    def rows(self) -> Halves:
        """Return cotangents as a matrix with a row for each plane."""
        planes = self.planes.flatten(2)[:, None]
        return Halves(planes, self.reciprocals[None], (1, *planes.shape[2:]), fast=2, low=1)


def _back_by_halves(
    update: Update, b: slice, hidden: Any, dout: Any, scaling: None, dx: Any, dmask: Any
) -> tuple[Any, ...]:
    """Do the same for one member by products of halves, which kernels write.

    Only the cotangent of o is split after it is written, as its scales are known no earlier.
    """
    N, C, H, pitch = update.N, update.C, update.H, update.pitch
    x, mask = update.edges(b, ALL)
    halved = _Halved.of(update)
    mask_most = None if mask is None else mask.abs().amax().float()
    scales = SideScales(halved.scales, halved.backs, mask_most, halved.most)
    gate = update.gate(1, ALL)
    sides, logits = halved.sides()
    project(update, x, mask, sides=sides, side_scales=scales, logits=logits, gate=gate)
    of_o, of_sides = halved.most[:H], halved.most[H:-1].view(2, H)
    o, do = _hidden_of(update, b, hidden), update.new(H, N, pitch)
    given = o, gate, dout, do, halved, dx
    rows, inputs, end_biases, dnorm_out = _finish_back_by_halves(update, *given)
    del o, gate, given
    dend = sum_of_halves(update, rows.mT, inputs)
    del rows, inputs
    split_do = split_by_most(do[..., :N], of_o)
    del do
    dsides = update.new(2, H, N, pitch)
    sides = halved.planes, halved.backs[: 2 * H]
    multiply_halves_back(update, *sides, split_do, dsides, of_sides)
    del split_do
    given = mask, mask_most, halved, dsides, of_sides, dmask
    biases = _sides_back_by_halves(update, x, *given)
    del dsides
    cotangents = halved.rows()
    dxn = update.new(1, N, pitch, C)
    by_weight = _halves_of_columns(update, halved.reciprocals)
    multiply_halves(cotangents.mT._replace(scales=None), by_weight, dxn.flatten(1, 2))
    dall = sum_of_halves(update, cotangents, normalized_halves(update, x))
    dnorm = norm_back(update, x, dxn, None, dx)
    return dall[:, : 4 * H], dall[:, 4 * H :], dnorm, dend, dnorm_out, biases, end_biases


def _halves_of_columns(update: Update, factors: Any) -> Halves:
    """Return halves of the columns of weights behind the first norm, whose rows have factors."""
    w, C, rows = update.weights, update.C, len(factors)
    halves = update.new(2, 1, rows, up(C), dtype=torch.float16)
    scales = update.new(1, C)
    BR = power(rows)
    BC = max(1, (1 << 13) // BR)
    tensors = w.p_in_weight, w.g_in_weight, w.g_out_weight, factors, halves, scales
    constants = C, 2 * update.H, update.G, BR, BC, update.types.float
    launch(kernels.split_columns, ceil(up(C), BC), tensors, (halves.stride(0),), constants, warps=8)
    return Halves(halves, scales, (1, rows, C), fast=2, low=1)


def _back_in_parts(
    update: Update, b: slice, hidden: Any, dout: Any, scaling: Any, dx: Any, dmask: Any
) -> tuple[Any, ...]:
    """Do the same for one member, some lines or some channels after the other.

    Left, right and the cotangent of o are kept whole, since every line depends on all lines. The
    cotangent of the last gate's logits is kept in the memory of `dx`.
    """
    N, H, pitch, on_hopper = update.N, update.H, update.pitch, is_on_hopper(update, dmask)
    shift = _shift(update, hidden) if on_hopper else 0
    o = _hidden_of(update, b, hidden, 2.0**shift)
    do = update.new(H, N, pitch)
    waiting = dx if _holds(update, dx) else update.new(1, N, N, update.G)

    def end(lines: slice, some_o: Any, some_do: Any) -> tuple[Any, ...]:
        """Write the cotangents of lines of o and of the last gate's logits; return the end's."""
        x, mask = update.edges(b, lines)
        to = waiting[:, lines]
        if on_hopper and hidden is not None:
            some_o = _scaled(update, some_o, shift)
        gate = update.gate(1, lines)
        project(update, x, mask, gate=gate)
        in_place = on_hopper and is_aligned(to)
        dgate = to if in_place else update.new(1, x.shape[1], pitch, update.G)
        given = update, some_o, gate, dout[:, lines], scaling, some_do, dgate
        if on_hopper:
            found: tuple[Any, ...] = (finish_back_on_hopper(*given, shift),)
        else:
            found = finish_back(*given, None if dx is None else dx[:, lines])
        if not in_place:
            to.copy_(dgate[:, :, :N])
        return found

    def front(lines: slice, some_dsides: Any) -> tuple[Any, ...]:
        """Write the cotangents of lines of x and the mask; return the front's."""
        x, mask = update.edges(b, lines)
        to_x, to_mask = (None if to is None else to[:, lines] for to in (dx, dmask))
        # A copy, since `dx` may be the memory of `waiting`.
        dgate = update.new(1, x.shape[1], pitch, update.G)
        dgate[:, :, :N], dgate[:, :, N:] = waiting[:, lines], 0
        both = update.new(2, 2, H, x.shape[1], pitch)
        if on_hopper:
            return project_back(update, x, mask, some_dsides, both, dgate, scaling, to_x)
        project(update, x, mask, sides=both[0], logits=both[1])
        sides_back(update, x, mask, both, some_dsides, scaling, to_mask)
        return front_back(update, x, both, dgate, scaling, to_x)

    ends: list[Any] = []
    for lines in update.lines:
        ends = _added(ends, end(lines, o[:, :, lines], do[:, lines]))
    del o
    dsides, fronts = _product_back(update, b, do), []
    del do
    for lines in update.lines:
        fronts = _added(fronts, front(lines, dsides[:, :, lines]))
    return *fronts, *ends


def _product_back(update: Update, b: slice, do: Any) -> Any:
    """Return the cotangents of left and right of one member, made some channels at a time.

    The memory has room for one part ahead of left and right. Each part's cotangents overwrite left
    and right of the part before; the first part is the largest.
    """
    N, H, ahead = update.N, update.H, update.channels[0].stop
    planes = update.new(ahead + H, 2, N, update.pitch).transpose(0, 1)
    sides, dsides = planes[:, ahead:], planes[:, :H]
    for lines in update.lines:
        project(update, *update.edges(b, lines), sides=sides[:, :, lines])
    for h in update.channels:
        multiply_back(update, sides[:, h], do[h, :, :N], dsides[:, h])
    return dsides


def _back_on_hopper(
    update: Update, b: slice, hidden: Any, dout: Any, scaling: Any, dx: Any, dmask: None
) -> tuple[Any, ...]:
    """Write the cotangent of x for one member; return sums for `through_norm`."""
    N, pitch, H = update.N, update.pitch, update.H
    x, mask = update.edges(b, ALL)
    # both[0] has left and right, then cotangents of projections; both[1] has cotangents of left
    # and right, then cotangents of logits.
    gate, both = update.gate(1, ALL), update.new(2, 2, H, N, pitch)
    project(update, x, mask, sides=both[0], gate=gate)
    shift = _shift(update, hidden)
    if hidden is None:
        o = update.new(1, H, N, N)
        multiply(update, both[0], None, o, ALL, 2.0**shift)
    else:
        o = _scaled(update, hidden[b], shift)
    do, dgate = update.new(H, N, pitch), update.new(1, N, pitch, update.G)
    by_end = finish_back_on_hopper(update, o, gate, dout, scaling, do, dgate, shift)
    del o, gate
    multiply_back(update, both[0], do, both[1])
    del do
    return *project_back(update, x, mask, both[1], both, dgate, scaling, dx), by_end


def front_back(
    update: Update, x: Any, both: Any, dgate: Any, scaling: Any, dx: Any
) -> tuple[Any, Any, Any]:
    """Write the cotangent of x from the cotangents of projections, logits and the last gate's.

    Return the cotangents of projections and gates, of the last gate, and of the norm.
    """
    B, L, _, C = x.shape
    dxn, kept = update.new(B, L, update.pitch, C), normalized(update, x).flatten(1, 2)
    dgate = dgate.flatten(1, 2)
    through(update, dgate, update.weights.g_out_weight, dxn, add=False)
    dopen = over_rows(update, dgate.mT, kept)
    dpairs = [over_rows(update, planes, kept) for planes in pairs_back(update, both, dxn)]
    dnorm = norm_back(update, x, dxn, scaling, dx)
    return dpairs[0] if len(dpairs) == 1 else torch.cat(dpairs, 1), dopen, dnorm


def pairs_back(update: Update, both: Any, dxn: Any) -> Sequence[Any]:
    """Add the cotangent of the normalized x by projections and gates.

    Return the channels' cotangents, in one matrix where a member goes alone.
    """
    members, w = len(dxn), update.weights
    p_w, g_w = w.p_in_weight, w.g_in_weight
    z = both.view(4, members, -1, both.shape[3] * update.pitch).transpose(0, 1)
    if members > 1:
        many = factors = z.unbind(1)
        weights = [half for weight in (p_w, g_w) for half in weight.chunk(2)]
    else:
        many = factors = [z.flatten(1, 2)]
        weights = [p_w, g_w]
        if update.few:
            factors = many[0].chunk(2, 1)
        else:
            weights = [torch.cat(weights)]
    for planes, weight in zip(factors, weights, strict=True):
        through(update, planes.mT, weight, dxn)
    return many


def finish_back(
    update: Update,
    o: Any,
    gate: Any,
    dout: Any,
    scaling: Any,
    do: Any,
    dgate: Any,
    scratch: Any = None,
) -> tuple[Any, Any]:
    """Write the cotangents of o and of the gate's logits; return the end's weights' cotangents.

    `scratch`, an array like x, may be overwritten.
    """
    B, L, N, C = dout.shape
    as_given = not update.output and scaling is None and dout.dtype == update.dtype
    fits = scratch is not None and scratch.dtype == update.dtype and is_aligned(scratch)
    dp = dout if as_given else scratch if fits else update.new(B, L, N, C)
    dp = dp.view(B, L * N, C)
    if update.apart:
        kept = end_rows(update, o, gate, 0)
        dkept = _end_back(update, kept, gate, dout, dp, dgate)
        to = do, dgate, None, None
    else:
        dkept, kept = None, update.new(B, L * N, up(update.H + 1))
        to = do, dgate, None if as_given else dp, kept
    halved = Halved.of(update, (update.weights.p_out_weight, None))
    to = halved, *to, up(update.H + 1)
    sums = _launch_finish_back(update, o, gate, dout, scaling, *to, dkept=dkept)
    return over_rows(update, dp.mT, kept), sums


def _end_back(update: Update, kept: Any, gate: Any, dout: Any, dp: Any, dgate: Any) -> Any:
    """Write the cotangents of the last projection and of a gate of its output, by torch's products.

    Return the cotangent of the projection's input.
    """
    w, N = update.weights, update.N
    weight = w.p_out_weight.to(update.dtype)
    flat, rows = dp.flatten(0, 1), kept.flatten(0, 1)[:, : update.H]
    if update.output:
        value = update.new(*dout.shape)
        product(False, torch.mm, rows, weight.T, out=value.flatten(0, 2))
        if w.p_out_bias is not None:
            value += w.p_out_bias
        given = dp.view(dout.shape)
        torch.mul(dout, gate, out=given)
        value *= given
        torch.addcmul(value, value, gate, value=-1, out=dgate[:, :, :N])
        # As an item that is set, a number would go by the CPU, and the call would have no tape.
        dgate[:, :, N:].zero_()
    elif dp.data_ptr() != dout.data_ptr():
        dp.copy_(dout.view(dp.shape))
    dkept = update.new(*rows.shape)
    product(False, torch.mm, flat, weight, out=dkept)
    return dkept


def _finish_back_by_halves(
    update: Update, o: Any, gate: Any, dout: Any, do: Any, to: _Halved, scratch: Any
) -> tuple[Halves, Halves, Any, Any]:
    """Write the cotangent of o, and halves of the gate's logits' cotangents.

    Return halves of rows of the last projection's cotangent and of its input, parts of the
    cotangents of the gate's and the projection's biases, and sums for the norm's weight and bias.
    `scratch`, an array like x, may be the memory of the projection's cotangent.
    """
    (_, L, N, C), H, w = dout.shape, update.H, update.weights
    most, by_row = to.most[3 * H :], {}
    BLOCK, STEPS = 4096, 4
    vectors = ("x",) if dout.data_ptr() % 16 == 0 else ()
    programs = ceil(dout.numel(), BLOCK * STEPS)
    constants = BLOCK, STEPS
    launch(kernels.largest, programs, (dout, most), (dout.numel(),), constants, aligned=vectors)
    scales, reciprocals = update.new(update.G), update.new(2, 1)
    room = scales, to.reciprocals[4 * H :]
    if update.output:
        by_row = {"norm": (w.norm_out_weight, w.norm_out_bias), "most": most, "scales": room}
    else:
        # The cotangent of the last projection's input meets this input.
        of_input = most.view(torch.float32) * _most_normalized(update)
        bound_rows(update, w.p_out_weight.T.contiguous(), None, None, None, of_input, *room)
    halved = Halved.of(update, (w.p_out_weight, w.p_out_bias), **by_row)
    shapes = [(2, 1, L * N, up(width)) for width in (C, H)]
    fits = scratch is not None and scratch.dtype == torch.float32 and is_aligned(scratch)
    if fits and C % 8 == 0:
        dp = scratch.view(torch.float16).view(shapes[0])
    else:
        dp = update.new(*shapes[0], dtype=torch.float16)
    kept, dgate = update.new(*shapes[1], dtype=torch.float16), to.planes[:, 4 * H :]
    by_bias = update.new(L * ceil(N, _end_tile(update)[0]), update.G + C)
    halves = most, scales, reciprocals, to.most[:H], by_bias
    numbers = to.planes.stride(0), dp.stride(0), kept.stride(0)
    tensors = halved, do, dgate, dp, kept, up(H), halves, numbers
    sums = _launch_finish_back(update, o, gate, dout, None, *tensors)
    rows, inputs = (
        Halves(made, back.expand(1, n), (1, L * N, n), fast=2, low=1)
        for made, back, n in zip((dp, kept), reciprocals, (C, H), strict=True)
    )
    return rows, inputs, by_bias, sums


def _most_normalized(update: Update) -> Any:
    """Return a bound of the normalized o."""
    weight, bias = update.weights.norm_out_weight, update.weights.norm_out_bias
    most = update.H**0.5
    if weight is not None:
        most = most * weight.abs().amax().float()
    return most if bias is None else most + bias.abs().amax().float()


def _launch_finish_back(
    update: Update,
    o: Any,
    gate: Any,
    dout: Any,
    scaling: Any,
    halved: Halved,
    do: Any,
    dgate: Any,
    dp: Any,
    kept: Any,
    width: int,
    halves: tuple[Any, ...] = (None,) * 5,
    steps: tuple[int, ...] = (0,) * 3,
    dkept: Any = None,
) -> Any:
    """Launch `finish_back`; return sums for the norm's weight and bias."""
    (B, L, N, C), H = dout.shape, update.H
    BM, BN, BH = *_end_tile(update), power(H, 16)
    programs = B * L * ceil(N, BM)
    sums = update.new(programs, 2, H, dtype=update.accumulator)
    constants = update.eps, C, H, update.G, update.output, width, BM, BH, BN
    constants += *update.types, *update.place
    w = update.weights
    tensors = o, gate, dout, scaling, w.norm_out_weight, w.norm_out_bias
    tensors += w.p_out_weight, w.p_out_bias
    tensors += do, dgate, dp, kept, sums, halved.halves, halved.scales, *halves, dkept
    numbers = L, N, update.pitch, o.stride(1), do.stride(0), halved.lo, *steps
    how = {"stages": 2, "limited": not update.halved}
    launch(kernels.finish_back, programs, tensors, numbers, constants, **how)
    return sums


def _end_tile(update: Update) -> tuple[int, int]:
    """Return the edges of a program of `finish_back`, and its channels at once."""
    BH = power(update.H, 16)
    if update.halved:
        rows, channels = 32, max(16, min(64, (1 << 13) // BH) // (1 if BH <= 128 else 2))
    else:
        rows = max(16, (2048 if update.small else 4096) // BH) if update.rounded else 16
        most = 64 if update.rounded else 32 if update.emulated else 16
        channels = max(16, min(most, (1 << 13) // BH))
    return min(rows, power(update.N, 16)), min(channels, power(update.C, 16))


def sides_back(
    update: Update, x: Any, mask: Any, both: Any, dsides: Any, scaling: Any, dmask: Any
) -> None:
    """Overwrite sides and logits (`both`) by cotangents, and add the mask's cotangent."""
    sides, logits = both
    by_mask = None
    if dmask is not None:
        by_mask = update.new(*x.shape[:3], dtype=update.accumulator)
        # The mask's cotangent is a product with unmasked sides.
        project(update, x, None, sides=sides)
    _launch_sides_back(update, x, mask, sides, logits, dsides, by_mask)
    if by_mask is not None:
        dmask += by_mask if scaling is None else by_mask / scaling


def _sides_back_by_halves(
    update: Update,
    x: Any,
    mask: Any,
    mask_most: Any,
    halved: _Halved,
    dsides: Any,
    most: Any,
    dmask: Any,
) -> Any:
    """Do the same with planes of halves, and return parts of sums for biases."""
    (sides, logits), by_mask = halved.sides(), None
    if dmask is not None:
        by_mask, rows = update.new(*x.shape[:3]), 2 * update.H
        scales = SideScales(halved.scales[:rows], halved.backs[:rows])
        project(update, x, None, sides=sides, side_scales=scales)
    by_bias = update.new(update.N * ceil(update.N, _SIDES_TILE), 4 * update.H)
    halves = halved.backs, most, mask_most, halved.reciprocals, by_bias
    lo = sides.stride(0)
    _launch_sides_back(update, x, mask, sides, logits, dsides, by_mask, halves, lo)
    if by_mask is not None:
        dmask += by_mask
    return by_bias


def _launch_sides_back(
    update: Update,
    x: Any,
    mask: Any,
    sides: Any,
    logits: Any,
    dsides: Any,
    by_mask: Any,
    halves: tuple[Any, ...] = (None,) * 5,
    lo: int = 0,
) -> None:
    (members, L, N, _), H = x.shape, update.H
    BM, BH = min(_SIDES_TILE, power(N, 16)), min(_SIDES_TILE, power(2 * H, 16))
    parts = 1 if by_mask is not None else ceil(2 * H, BH)
    numbers = L, N, update.pitch, *dsides.stride()[:2], *sides.stride()[-4:-2]
    numbers += *strides_of(mask), lo
    types = update.types
    constants = H, parts, BM, BH, types.dot, types.float, update.asm, *update.place
    programs = members * L * ceil(N, BM) * parts
    tensors = dsides, sides, logits, mask, by_mask, *halves
    launch(kernels.sides_back, programs, tensors, numbers, constants)


def finish_back_on_hopper(
    update: Update,
    o: Any,
    gate: Any,
    dout: Any,
    scaling: Any,
    do: Any,
    dgate: Any,
    shift: int,
) -> Any:
    """Write the cotangents of o, given times a power of two, and of the gate's logits.

    Return the parts of sums from which `through_norm` makes the cotangents of the end's weights.
    """
    B, L, N, C = dout.shape
    w = update.weights
    offset = not update.output and w.norm_out_bias is not None
    programs = processors(dout.device)
    sums = update.new(programs, C, (2 if offset else 1) * update.H + 8, dtype=torch.float32)
    tensors = o, gate, dout, scaling, w.norm_out_weight, w.norm_out_bias
    tensors += w.p_out_weight, w.p_out_bias, do, dgate, sums
    numbers = B, L * N, o.stride(1), do.stride(0), shift
    warps = hopper_backward.way_to_finish_back(C, update.H)
    constants = update.eps, C, update.H, update.output, 16 // dout.dtype.itemsize, warps
    constants += update.types.dot, update.long
    launch(hopper_backward.finish_back, programs, tensors, numbers, constants, warps=warps)
    return sums


def project_back(
    update: Update,
    x: Any,
    mask: Any,
    dsides: Any,
    dboth: Any,
    dgate: Any,
    scaling: Any,
    dx: Any,
) -> tuple[Any, Any]:
    """Write the cotangents of x, and of projections and logits (`dboth`), from the sides'.

    `dsides` may be the memory of the logits' cotangents. Return the parts of sums from which
    `through_norm` makes the cotangents of the weights behind the first norm.
    """
    B, L, N, C = x.shape
    kept = update.kept(B, L)
    result = dx if dx is not None and is_aligned(dx) else torch.empty_like(x)
    w = update.weights
    tensors = x, mask, w.norm_in_weight, w.norm_in_bias
    tensors += w.p_in_weight, w.p_in_bias, w.g_in_weight, w.g_in_bias, w.g_out_weight
    tensors += dsides, *dboth, dgate, scaling, result, kept
    numbers = B, L * N, N, *dboth.stride()[1:3], *dsides.stride()[:2], *strides_of(mask)
    way = hopper_backward.way_to_project_back(C, update.H, update.G)
    constants = update.eps, C, update.H, update.G, update.width, 16 // x.dtype.itemsize, *way
    constants += update.types.dot, update.long
    programs, warps = processors(x.device), way.warps
    launch(hopper_backward.project_back, programs, tensors, numbers, constants, warps=warps)
    if dx is not None and result is not dx:
        dx.copy_(result)
    kept = kept.flatten(1, 2)
    (by_sides,) = parts_over_rows(update, dboth.view(1, 4 * update.H, L * N), kept)
    (by_gate,) = parts_over_rows(update, dgate.flatten(1, 2).mT, kept)
    return by_sides, by_gate


def _shift(update: Update, hidden: Any) -> int:
    """Return the power of two by which Hopper's kernels get o multiplied."""
    return update.shift if hidden is None or hidden.dtype != update.dtype else 0


def _scaled(update: Update, o: Any, shift: int) -> Any:
    """Return a kept o in the dtype of the products, times a power of two."""
    if o.dtype == update.dtype:
        return o
    return torch.mul(o, 2.0**shift, out=update.new(*o.shape))


def _hidden_of(update: Update, b: slice, hidden: Any, scale: float = 1.0) -> Any:
    """Return o of some of the batch: as it was kept, or else computed and scaled."""
    if hidden is not None:
        return hidden[b]
    o = update.new(b.stop - b.start, update.H, update.N, update.N)
    triangles(update, b, o, scale)
    return o


def through_norm(
    by_sides: Any,
    by_gate: Any,
    by_end: Any,
    scaling: Any,
    weights: Weights,
    dweights: Weights,
) -> Parts:
    """Write the cotangents of weights and biases behind norms; return parts of the norms'.

    The sums for the first norm, or the sums for the second, may be missing.
    """
    w, d = weights, dweights
    programs, C, H, G, dnorm, dnorm_out = 0, 0, 0, 0, None, None
    if by_sides is not None:
        (rows, C), G = w.p_in_weight.shape, len(w.g_out_weight)
        H, programs = rows // 2, 2 * rows + G
        dnorm = by_sides.new_empty(programs, 2, C)
    if by_end is not None:
        C, H = w.p_out_weight.shape
        programs += C
        dnorm_out = by_end.new_empty(C, 2, H)
    tensors = by_sides, by_gate, by_end, scaling
    tensors += w.p_in_weight, w.g_in_weight, w.g_out_weight, w.p_out_weight
    tensors += w.norm_in_weight, w.norm_in_bias, w.norm_out_weight, w.norm_out_bias
    tensors += d.p_in_weight, d.p_in_bias, d.g_in_weight, d.g_in_bias
    tensors += d.p_out_weight, d.p_out_bias, d.g_out_weight, d.g_out_bias, dnorm, dnorm_out
    some = by_sides, by_gate, by_end
    kept, _, kept_end = (0 if sums is None else sums.shape[2] for sums in some)
    constants = C, H, G, kept, kept_end, 64, power(C), power(H)
    numbers = tuple([0 if sums is None else len(sums) for sums in some])
    launch(kernels.through_norm, programs, tensors, numbers, constants)
    return Parts(dnorm, dnorm_out)


def norm_back(update: Update, x: Any, dxn: Any, scaling: Any, dx: Any) -> Any:
    """Write the cotangent of x; return parts of the cotangents of the norm's weight and bias."""
    C, rows = update.C, x.numel() // update.C
    BC = power(C, 16)
    BM = max(1, 1024 // BC)
    steps = ceil(rows, BM * 4224)
    programs = ceil(rows, BM * steps)
    sums = update.new(programs, 2, C, dtype=update.accumulator)
    result = dx if dx is not None and is_aligned(dx) else torch.empty_like(x)
    tensors = x, dxn, scaling, update.weights.norm_in_weight, result, sums
    numbers = rows, update.N, update.pitch, steps
    constants = update.eps, C, BM, BC, update.types.float, update.long
    launch(kernels.norm_back, programs, tensors, numbers, constants, warps=2)
    if dx is not None and result is not dx:
        dx.copy_(result)
    return sums


def _few(parts: Any) -> Any:
    """Return parts of a sum, or their sum if they are many."""
    return parts if parts is None or len(parts) <= _PARTS else parts.sum(0, keepdim=True)


def sum_parts(update: Update, parts: Parts, scaling: Any, dweights: Weights) -> None:
    """Write the cotangents of norms, and of other weights and biases whose parts are given."""
    if all(dweight is None for dweight in dweights):
        return
    C, H, G = update.C, update.H, update.G
    # One program would take a norm's very many parts one after the other.
    parts = Parts(*[_few(some) for some in parts[:2]], *parts[2:])
    weights = parts.sides, parts.opened, parts.end
    # The numbers of a row, without or with a bias behind.
    kept, _, kept_end = (0 if some is None else some.shape[2] for some in weights)
    constants = C, H, G, kept, kept_end, power(C, 16), power(H, 16), _COLUMNS, update.types.float
    numbers = tuple([0 if some is None else len(some) for some in parts])
    numbers += tuple([0 if some is None else some.stride(0) for some in weights])
    programs = 2 * (ceil(C, _COLUMNS) + ceil(H, _COLUMNS))
    programs += (0 if parts.sides is None else 4 * H + G) + (0 if parts.end is None else C)
    tensors = *parts, scaling, *dweights
    launch(kernels.sum_parts, programs, tensors, numbers, constants)
