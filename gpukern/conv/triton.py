"""Dynamic causal convolution on the GPU: one launch forward, one for all gradients.

A program takes a run of one sequence's tokens and a block of channels, a few channels to a lane,
and walks along the tokens with the last W - 1 inputs in registers, so that every input and tap is
read once; a few tokens' loads are in flight together. The backward carries along the cotangents
that those inputs have so far, and walks W - 1 tokens past its own to complete its last ones: no
element is written by two programs, and nothing is kept from the forward. Sums over tokens (static
kernels, bias) are formed run by run and added up afterwards, in a fixed order.

Arrays (B, D, T) are read where they lie: a lane loads a few tokens of a channel side by side.

Bytes, once each, of B·T·D elements: forward 1 + W in, 2 + W with a residual, 1 out; backward 2 + W
in, 1 + W out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._frame.check import promoted
from fusedops._frame.registry import register
from fusedops.conv.plan import CHUNK
from gpukern.activations import silu, silu_slope
from gpukern.launch import Launcher, begin_vectors, kernel_of_any_size, wide

# Warps of a program, and taps of a channel whose loads are in flight together.
_WARPS, _TAPS = 4, 32
# Where vectors are loaded, every stride is a multiple of so many elements.
_UNIT = 8


@triton.jit
def _find_run(
    run, chunks, starts, sequences, tokens, runs, length, PACKED: tl.constexpr
):  # fmt: skip
    """Return a run's sequence and batch, the sequence's begin and end, and the run's own."""
    if PACKED:
        chunk = chunks + 2 * (run // runs)
        # Clamped, so that no bad number reaches outside of the arrays.
        sequence = tl.minimum(tl.maximum(tl.load(chunk), 0), sequences - 1)
        batch = sequence * 0
        begin = tl.minimum(tl.maximum(tl.load(starts + sequence), 0), tokens)
        end = tl.minimum(tl.maximum(tl.load(starts + sequence + 1), begin), tokens)
        first = tl.maximum(tl.load(chunk + 1), begin) + (run % runs) * length
        first = tl.minimum(first, end)
    else:
        sequence = (run // runs).to(tl.int64)
        batch = sequence
        begin = sequence * 0
        end = begin + tokens
        first = (run % runs).to(tl.int64) * length
    return sequence, batch, begin, end, first, tl.minimum(first + length, end)


@triton.jit
def _block_of(block, ROW: tl.constexpr):
    """Return the number of a block, in 64 bits where a row of taps needs them."""
    if ROW >= 2**30:
        block = block.to(tl.int64)
    return block


@triton.jit
def _load_taps(
    row, block, live, W: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, VECTOR: tl.constexpr
):
    """Load W taps of a block of channels; as vectors, all taps of a channel in one lane."""
    if VECTOR:
        at = 4 * SIZE * block + tl.arange(0, 4 * SIZE)
        flat = tl.load(row + at, mask=(at < 4 * D) & live, other=0.0)
        even, odd = tl.split(tl.reshape(flat, (SIZE, 2, 2)))
        k0, k2 = tl.split(even)
        k1, k3 = tl.split(odd)
        return (k0, k1, k2, k3)
    else:
        d = SIZE * block + tl.arange(0, SIZE)
        taps = ()
        for w in tl.static_range(W):
            taps = taps + (tl.load(row + d * W + w, mask=(d < D) & live, other=0.0),)
        return taps


@triton.jit
def _store_taps(
    row, block, live, taps,
    W: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store W values for every channel of a block, joined so that stores are contiguous."""
    PADDED: tl.constexpr = triton.next_power_of_2(W)
    columns = ()
    for w in tl.static_range(PADDED):
        columns = columns + (tl.reshape(taps[w if w < W else 0], (SIZE, 1)),)
    LEVELS: tl.constexpr = PADDED.bit_length() - 1
    for level in tl.static_range(LEVELS):
        joined = ()
        for w in tl.static_range(PADDED >> (level + 1)):
            pair = tl.join(columns[w], columns[w + (PADDED >> (level + 1))])
            joined = joined + (tl.reshape(pair, (SIZE, 2 << level)),)
        columns = joined
    values = columns[0].to(row.dtype.element_ty)
    if VECTOR:
        at = PADDED * SIZE * block + tl.arange(0, PADDED * SIZE)
        values = tl.reshape(values, (PADDED * SIZE,))
        tl.store(row + at, values, mask=(at < W * D) & live)
    else:
        d = SIZE * block + tl.arange(0, SIZE)[:, None]
        w = tl.arange(0, PADDED)[None, :]
        tl.store(row + d * W + w, values, mask=(d < D) & (w < W) & live)


@triton.jit
def _load_tokens(
    x, t, stop, d, row, D: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    CHANNELS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load a block of channels of STEPS tokens; CHANNELS have a row each, or tokens have."""
    if CHANNELS:
        if ALIGNED:
            t, stop = tl.multiple_of(t, STEPS), tl.multiple_of(stop, STEPS)
        steps = t + tl.arange(0, STEPS)
        at = d.to(tl.int64)[:, None] * row + steps[None, :]
        mask = (d < D)[:, None] & (steps < stop)[None, :]
        columns = (tl.load(x + at, mask=mask, other=0.0),)
        LEVELS: tl.constexpr = STEPS.bit_length() - 1
        for level in tl.static_range(LEVELS):
            even = ()
            odd = ()
            for part in tl.static_range(1 << level):
                halves = tl.reshape(columns[part], (SIZE, STEPS >> (level + 1), 2))
                one, other = tl.split(halves)
                even = even + (one,)
                odd = odd + (other,)
            columns = even + odd
        tokens = ()
        for step in tl.static_range(STEPS):
            tokens = tokens + (tl.reshape(columns[step], (SIZE,)),)
        return tokens
    else:
        tokens = ()
        for step in tl.static_range(STEPS):
            at = x + (t + step) * row + d
            tokens = tokens + (tl.load(at, mask=(d < D) & (t + step < stop), other=0.0),)
        return tokens


@triton.jit
def _window_before(
    x, state, sequence, begin, first, d, x_row, W: tl.constexpr, D: tl.constexpr,
    HAS_STATE: tl.constexpr, FLOAT: tl.constexpr, X_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Load the W - 1 inputs before a token; inputs before the sequence come from the state."""
    inside = d < D
    window = ()
    for w in tl.static_range(W - 1):
        p = first - W + 1 + w
        at = d.to(tl.int64) * x_row + p if X_CHANNELS else p * x_row + d
        value = tl.load(x + at, mask=inside & (p >= begin), other=0.0).to(FLOAT)
        if HAS_STATE:
            at = (sequence * D + d) * W + (W + p - begin)
            before = tl.load(state + at, mask=inside & (p < begin), other=0.0).to(FLOAT)
            value = tl.where(p >= begin, value, before)
        window = window + (value,)
    return window


@triton.jit
def _convolved(taps, window, bias, W: tl.constexpr, FLOAT: tl.constexpr):
    total = taps[0].to(FLOAT) * window[0]
    for w in tl.static_range(1, W):
        total += taps[w].to(FLOAT) * window[w]
    return total + bias


def _forward_kernel(
    chunks, starts, x, kernels, state, bias, out, final_state, residual,
    sequences, tokens, blocks, runs, length, x_batch, x_row, k_batch, k_token, r_batch, r_row,
    W: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, FLOAT: tl.constexpr, STATIC: tl.constexpr,
    ALIGNED: tl.constexpr, X_CHANNELS: tl.constexpr, R_CHANNELS: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, HAS_STATE: tl.constexpr, HAS_BIAS: tl.constexpr, WANT_OUT: tl.constexpr,
    WANT_FINAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block = _block_of(program % blocks, W * D)
    sequence, batch, begin, end, first, last = _find_run(
        program // blocks, chunks, starts, sequences, tokens, runs, length, PACKED
    )
    d = SIZE * block + tl.arange(0, SIZE)
    inside = d < D
    # Strides come in units that keep rows aligned.
    x_row = x_row.to(tl.int64) * UNIT
    k_token = k_token.to(tl.int64) * UNIT
    x += batch * x_batch * UNIT
    kernels += batch * k_batch * UNIT
    out += batch * tokens * D
    if residual is not None:
        r_row = r_row.to(tl.int64) * UNIT
        residual += batch * r_batch * UNIT
    shift = tl.zeros([SIZE], FLOAT)
    if HAS_BIAS:
        shift = tl.load(bias + d, mask=inside, other=0.0).to(FLOAT)
    window = _window_before(
        x, state, sequence, begin, first, d, x_row, W, D, HAS_STATE, FLOAT, X_CHANNELS
    )
    static_taps = ()
    if STATIC:
        static_taps = _load_taps(kernels, block, True, W, D, SIZE, VECTOR)
    t = first
    while t < last:
        inputs = _load_tokens(x, t, last, d, x_row, D, SIZE, STEPS, X_CHANNELS, ALIGNED)
        if residual is not None:
            added = _load_tokens(residual, t, last, d, r_row, D, SIZE, STEPS, R_CHANNELS, ALIGNED)
        taps = ()
        for step in tl.static_range(STEPS):
            live = t + step < last
            if WANT_OUT and not STATIC:
                row = kernels + (t + step) * k_token
                taps = taps + (_load_taps(row, block, live, W, D, SIZE, VECTOR),)
        for step in tl.static_range(STEPS):
            live = t + step < last
            window = window + (inputs[step].to(FLOAT),)
            if WANT_OUT:
                if STATIC:
                    h = _convolved(static_taps, window, shift, W, FLOAT)
                else:
                    h = _convolved(taps[step], window, shift, W, FLOAT)
                if SILU:
                    h = silu(h)
                if residual is not None:
                    h += added[step].to(FLOAT)
                at = out + (t + step) * D + d
                tl.store(at, h.to(out.dtype.element_ty), mask=inside & live)
            if WANT_FINAL:
                if t + step == end - 1:
                    row = final_state + sequence * D * W
                    _store_taps(row, block, live, window, W, D, SIZE, False)
            window = window[1:]
        t += STEPS


def _backward_kernel(
    chunks, starts, x, kernels, state, bias, dout, dfinal_state,
    dx, dkernels, dstate, sums,
    sequences, tokens, blocks, runs, length, x_batch, x_row, k_batch, k_token, c_batch, c_row,
    W: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    VECTOR: tl.constexpr, UNIT: tl.constexpr, FLOAT: tl.constexpr, STATIC: tl.constexpr,
    ALIGNED: tl.constexpr, X_CHANNELS: tl.constexpr, C_CHANNELS: tl.constexpr, SILU: tl.constexpr,
    PACKED: tl.constexpr, HAS_STATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FINAL: tl.constexpr,
    WANT_X: tl.constexpr, WANT_KERNELS: tl.constexpr, WANT_STATE: tl.constexpr,
    WANT_BIAS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block = _block_of(program % blocks, W * D)
    run = program // blocks
    sequence, batch, begin, end, first, last = _find_run(
        run, chunks, starts, sequences, tokens, runs, length, PACKED
    )
    d = SIZE * block + tl.arange(0, SIZE)
    inside = d < D
    x_row = x_row.to(tl.int64) * UNIT
    k_token = k_token.to(tl.int64) * UNIT
    c_row = c_row.to(tl.int64) * UNIT
    x += batch * x_batch * UNIT
    kernels += batch * k_batch * UNIT
    dout += batch * c_batch * UNIT
    dx += batch * tokens * D
    dkernels += batch * tokens * D * W
    zero = tl.zeros([SIZE], FLOAT)
    shift = zero
    if HAS_BIAS:
        shift = tl.load(bias + d, mask=inside, other=0.0).to(FLOAT)
    window = _window_before(
        x, state, sequence, begin, first, d, x_row, W, D, HAS_STATE, FLOAT, X_CHANNELS
    )
    # Cotangents of the inputs that a token's taps read, oldest first.
    pulled = ()
    kernel_sums = ()
    for _tap in tl.static_range(W):
        pulled = pulled + (zero,)
        kernel_sums = kernel_sums + (zero,)
    bias_sum = zero
    static_taps = ()
    if STATIC:
        static_taps = _load_taps(kernels, block, True, W, D, SIZE, VECTOR)
    ON_INPUTS: tl.constexpr = WANT_X or WANT_STATE
    stop = last
    if ON_INPUTS:
        # The last W - 1 tokens may lie past the end, where loads give zeros.
        stop = tl.where(first < last, last + W - 1, last)
    t = first
    # Tokens that are all the run's own need no masks, of which static taps take the most.
    for MASKED in tl.static_range(0 if STATIC and W <= 8 else 1, 2):
        bound = stop if MASKED else last - STEPS + 1
        while t < bound:
            edge = tl.minimum(tl.cdiv(stop, STEPS) * STEPS if ALIGNED else stop, end)
            inputs = _load_tokens(x, t, edge, d, x_row, D, SIZE, STEPS, X_CHANNELS, ALIGNED)
            vs = _load_tokens(dout, t, edge, d, c_row, D, SIZE, STEPS, C_CHANNELS, ALIGNED)
            taps = ()
            for step in tl.static_range(STEPS):
                live = t + step < edge
                if not STATIC and (ON_INPUTS or SILU):
                    row = kernels + (t + step) * k_token
                    taps = taps + (_load_taps(row, block, live, W, D, SIZE, VECTOR),)
            for step in tl.static_range(STEPS):
                own = t + step < last
                window = window + (inputs[step].to(FLOAT),)
                v = vs[step].to(FLOAT)
                if STATIC:
                    k = static_taps
                elif ON_INPUTS or SILU:
                    k = taps[step]
                if SILU:
                    h = _convolved(k, window, shift, W, FLOAT)
                    # Past the end, v must stay zero, even where h is infinite or NaN.
                    v = v * silu_slope(h)
                    if MASKED:
                        v = tl.where(t + step < end, v, 0.0)
                if ON_INPUTS:
                    grown = ()
                    for w in tl.static_range(W):
                        product = v * k[w].to(FLOAT)
                        if STATIC and MASKED:
                            # Static taps aren't zero past the end, and may be infinite.
                            product = tl.where(t + step < end, product, 0.0)
                        grown = grown + (pulled[w] + product,)
                    p = t + step - W + 1
                    done = grown[0]
                    if HAS_FINAL:
                        kept = p - end + W
                        at = dfinal_state + (sequence * D + d) * W + kept
                        final = tl.load(at, mask=inside & (kept >= 0) & (p < last), other=0.0)
                        done += final.to(FLOAT)
                    if WANT_X:
                        mine = (p >= first) & (p < last)
                        at = dx + p * D + d
                        tl.store(at, done.to(dx.dtype.element_ty), mask=inside & mine)
                    if WANT_STATE:
                        # Few tokens have one, and a branch costs the others less than a mask.
                        if (p < begin) & (first == begin) & (p < last):
                            # A name of its own: a branch can't change a pointer's type.
                            place = dstate + (sequence * D + d) * W + (W + p - begin)
                            tl.store(place, done.to(dstate.dtype.element_ty), mask=inside)
                    pulled = grown[1:] + (zero,)
                if WANT_KERNELS:
                    products = ()
                    for w in tl.static_range(W):
                        products = products + (v * window[w],)
                    if STATIC:
                        added = ()
                        for w in tl.static_range(W):
                            product = tl.where(own, products[w], 0.0) if MASKED else products[w]
                            added = added + (kernel_sums[w] + product,)
                        kernel_sums = added
                    else:
                        row = dkernels + (t + step) * D * W
                        _store_taps(row, block, own, products, W, D, SIZE, VECTOR)
                if WANT_BIAS:
                    bias_sum += tl.where(own, v, 0.0) if MASKED else v
                window = window[1:]
            t += STEPS
    if WANT_STATE:
        # No tap of a token reads the oldest input.
        oldest = inside & (first == begin) & (first < last)
        tl.store(dstate + (sequence * D + d) * W, zero.to(dstate.dtype.element_ty), mask=oldest)
    SUMMED: tl.constexpr = W if WANT_KERNELS and STATIC else 0
    row = sums + run.to(tl.int64) * (SUMMED + WANT_BIAS) * D
    for w in tl.static_range(SUMMED):
        tl.store(row + w * D + d, kernel_sums[w], mask=inside)
    if WANT_BIAS:
        tl.store(row + SUMMED * D + d, bias_sum, mask=inside)


def _step_kernel(
    x, state, kernels, bias, slots, positions, out, residual, states, blocks,
    x_batch, x_token, x_channel, k_batch, k_token, s_batch, s_channel, s_tap,
    r_batch, r_token, r_channel,
    W: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, VECTOR: tl.constexpr,
    FLOAT: tl.constexpr, TOKENS: tl.constexpr, LENGTH: tl.constexpr, STATIC: tl.constexpr,
    SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, CIRCULAR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block = _block_of(program % blocks, W * D)
    b = (program // blocks).to(tl.int64)
    slot = b
    live = b >= 0
    if HAS_SLOTS:
        slot = tl.load(slots + b).to(tl.int64)
        live = (slot >= 0) & (slot < states)
        slot = tl.where(live, slot, 0)
    position = b * 0
    if CIRCULAR:
        # The remainder of a negative number is negative.
        position = (tl.load(positions + b).to(tl.int64) % LENGTH + LENGTH) % LENGTH
    d = SIZE * block + tl.arange(0, SIZE)
    inside = d < D
    wide_d = d.to(tl.int64)
    if VECTOR:
        # The compiler must see that rows begin with vectors, and that channels are neighbours.
        x_batch, k_batch, s_batch = x_batch // 8 * 8, k_batch // 8 * 8, s_batch // 8 * 8
        x_channel = 1
    row = state + slot * s_batch
    at = row + wide_d * s_channel
    x += b * x_batch + wide_d * x_channel
    kernels += b * k_batch
    out += b * TOKENS * D
    latest = tl.load(x, mask=inside & live, other=0.0)
    taps = _load_taps(kernels, block, True, W, D, SIZE, VECTOR)
    # The inputs that the first token's taps read, or that stay in the state.
    KEPT: tl.constexpr = 0 if CIRCULAR or LENGTH < TOKENS else LENGTH - TOKENS
    READ: tl.constexpr = KEPT if KEPT > W - 1 else W - 1
    past = ()
    if VECTOR:
        past = _load_taps(row, block, live, W, D, SIZE, VECTOR)[1:]
    else:
        for tap in tl.static_range(READ):
            place = position + (LENGTH - READ + tap)
            if CIRCULAR:
                place = place % LENGTH
            past = past + (tl.load(at + place * s_tap, mask=inside & live, other=0.0),)
    shift = tl.zeros([SIZE], FLOAT)
    if HAS_BIAS:
        shift = tl.load(bias + d, mask=inside, other=0.0).to(FLOAT)
    window = ()
    for w in tl.static_range(READ - W + 1, READ):
        window = window + (past[w].to(FLOAT),)
    if not VECTOR:
        for tap in tl.static_range(KEPT):
            tl.store(at + tap * s_tap, past[READ - KEPT + tap], mask=inside & live)
    for t in range(TOKENS):
        window = window + (latest.to(FLOAT),)
        h = _convolved(taps, window, shift, W, FLOAT)
        if SILU:
            h = silu(h)
        if residual is not None:
            at_token = residual + b * r_batch + t * r_token + wide_d * r_channel
            h += tl.load(at_token, mask=inside & live, other=0.0).to(FLOAT)
        h = tl.where(live, h, 0.0)
        tl.store(out + t * D + d, h.to(out.dtype.element_ty), mask=inside)
        if VECTOR:
            _store_taps(row, block, live, window, W, D, SIZE, VECTOR)
        elif LENGTH > 0:
            place = position + t
            if CIRCULAR:
                place = place % LENGTH
            else:
                place += LENGTH - TOKENS
            kept = inside & live & (t >= TOKENS - LENGTH)
            tl.store(at + place * s_tap, latest.to(state.dtype.element_ty), mask=kept)
        window = window[1:]
        if TOKENS > 1:
            more = t + 1 < TOKENS
            latest = tl.load(x + (t + 1) * x_token, mask=inside & live & more, other=0.0)
            if not STATIC:
                taps = _load_taps(kernels + (t + 1) * k_token, block, more, W, D, SIZE, VECTOR)


def _launchers(function: Any, vectors: tuple[str, ...]) -> dict[bool, Launcher]:
    """Return launchers by whether the arrays named in `vectors` are aligned for vector loads."""
    return {
        aligned: Launcher(kernel_of_any_size(function, vectors if aligned else ()), _WARPS)
        for aligned in (False, True)
    }


_forward = _launchers(_forward_kernel, ("x", "kernels", "out", "residual"))
_backward = _launchers(_backward_kernel, ("x", "kernels", "dout", "dx", "dkernels"))
_step = _launchers(_step_kernel, ("x", "state", "kernels", "out"))


def _rows(array: Any, contiguous: int) -> Any:
    """Return a tensor that is contiguous in its last axes, a copy where it isn't."""
    if array is None:
        return None
    step = 1
    for axis in range(1, contiguous + 1):
        if array.stride(-axis) != step and array.shape[-axis] > 1:
            return array.contiguous()
        step *= array.shape[-axis]
    return array


def _laid_out(x: Any) -> tuple[Any, bool]:
    """Return tokens (B, T, D) side by side along an axis, and whether that is the tokens' axis."""
    _, T, D = x.shape
    if x.stride(2) == 1 or D == 1:
        return x, False
    if x.stride(1) == 1 and T > 1:
        return x, True
    return x.contiguous(), False


def _aligned(width: int, channels: int, strides: Sequence[int], arrays: Sequence[Any]) -> bool:
    """Return whether four taps of a channel can be loaded and stored as one vector."""
    return (
        width == 4
        and not channels % _UNIT
        and not any([stride % _UNIT for stride in strides])
        and begin_vectors(arrays)
    )


def _block(kernels: Any, vector: bool) -> int:
    """Return how many channels a program takes: a lane has one, or 16 bytes of taps."""
    return 32 * _WARPS * (max(1, 4 // kernels.itemsize) if vector else 1)


def _steps(width: int, channels: bool) -> int:
    """Return how many tokens are taken together; few for wide kernels, which compile slowly.

    They are a power of two where channels have the rows.
    """
    steps = min(8, max(1, _TAPS // width))
    return 1 << (steps.bit_length() - 1) if channels else steps


def _length(width: int, long: bool) -> int:
    """Return the tokens of a run: enough to pay for W - 1 tokens more, or for a row of sums.

    Long runs also read more of every line, where channels have the rows.
    """
    return CHUNK if long or width > 16 else CHUNK // 2 if width > 8 else CHUNK // 4


def _fill_tokenless(states: Any, given: Any, x: Any, sequences: Any) -> None:
    """Pass a state on through sequences without a token; sequences with tokens write over it."""
    if states is None or (sequences is None and x.shape[1]):
        return
    states.zero_() if given is None else states.copy_(given)


def _launch(
    launchers: dict[bool, Launcher],
    given: Sequence[Any],
    tokens: Sequence[tuple[Any, bool]],
    vectors: Sequence[Any],
    sequences: Any,
    length: int,
    flags: Sequence[bool],
    residual: Sequence[Any] = (),
) -> None:
    """Launch a program for every run of tokens and block of channels.

    `tokens` has x, and the cotangent or the residual, with whether channels have the rows. For an
    array in `given` that is None, kernels get x, which they don't read. They get no residual where
    that is None, for they are compiled without one.
    """
    x, kernels = given[:2]
    width, channels = kernels.shape[-1], x.shape[2]
    static = kernels.ndim == 2
    if sequences is None:
        chunks = starts = x
        runs, members = -(-x.shape[1] // length), x.shape[0]
        count = x.shape[0] * runs
    else:
        starts, chunks = sequences.tensors_here().cu_seqlens, sequences.tensors_here().chunks
        runs, members = CHUNK // length, min(starts.numel() - 1, sequences.num_sequences)
        count = chunks.numel() // 2 * runs if members > 0 else 0
    if not count or not channels:
        return
    (batch, row), *more = [
        (array.stride(0), array.stride(2 if channel_rows else 1)) if array is not None else (0, 0)
        for array, channel_rows in tokens
    ]
    strides = [batch, row, *((0, 0) if static else kernels.stride()[:2])]
    strides += [stride for pair in more for stride in pair]
    channel_rows = [rows for _, rows in tokens]
    vector = _aligned(width, channels, strides, [array for array in vectors if array is not None])
    unit = _UNIT if vector else 1
    size = _block(kernels, vector)
    blocks = -(-channels // size)
    integers = [members, x.shape[1], blocks, runs, length, *[stride // unit for stride in strides]]
    arrays = [chunks, starts, *[x if array is None else array for array in given], *residual]
    dtypes = [None if array is None else array.dtype for array in arrays]
    float64 = torch.float64 in dtypes
    constants = (
        width, channels, size, _steps(width, any(channel_rows)), vector, unit,
        tl.float64 if float64 else tl.float32, static,
        vector and any(channel_rows) and sequences is None and not x.shape[1] % _UNIT,
        *channel_rows, *flags,
    )  # fmt: skip
    key = x.device, *dtypes, wide(*integers), *constants
    if residual and residual[0] is None:
        integers[-2:] = None, None
    launchers[vector](count * blocks, key, *arrays, *integers, *constants)


@register("dynamic_conv", "triton")
def dynamic_conv(a: Any, y: Any) -> None:
    x, sequences, (out, final) = a.x, a.sequences, y
    _fill_tokenless(final, a.initial_state, x, sequences)
    (x, x_channels), kernels = _laid_out(x), _rows(a.kernels, 2)
    residual, r_channels = None, False
    if a.residual is not None and out is not None:
        residual, r_channels = _laid_out(a.residual)
    state, bias = _rows(a.initial_state, 3), _rows(a.bias, 1)
    optional = state, bias, out, final
    _launch(
        _forward,
        (x, kernels, *optional),
        [(x, x_channels), (residual, r_channels)],
        (x, kernels, out, residual),
        sequences,
        _length(kernels.shape[-1], x_channels or r_channels),
        (a.activation == "silu", sequences is not None, *[o is not None for o in optional]),
        (residual,),
    )


@register("dynamic_conv_vjp", "triton")
def dynamic_conv_vjp(a: Any, y: Any) -> None:
    x, sequences, (dx, dkernels, dstate, dbias) = a.x, a.sequences, y
    _fill_tokenless(dstate, a.dfinal_state, x, sequences)
    (x, x_channels), (dout, c_channels) = _laid_out(x), _laid_out(a.dout)
    kernels, bias = _rows(a.kernels, 2), _rows(a.bias, 1)
    state, dfinal_state = _rows(a.initial_state, 3), _rows(a.dfinal_state, 3)
    width = kernels.shape[-1]
    taps = width if kernels.ndim == 2 and dkernels is not None else 0
    rows = taps + (dbias is not None)
    length = _length(width, rows > 0 or x_channels or c_channels)
    programs = x.shape[0] * -(-x.shape[1] // length)
    if sequences is not None:
        programs = sequences.tensors_here().chunks.numel() // 2 * (CHUNK // length)
    arrays = x, kernels, state, bias, dout, dfinal_state
    float64 = promoted(arrays) == torch.float64
    sums = x.new_empty(
        (programs if rows else 0, rows, x.shape[2]),
        dtype=torch.float64 if float64 else torch.float32,
    )
    optional = state, bias, dfinal_state, dx, dkernels, dstate, dbias
    _launch(
        _backward,
        (*arrays, dx, dkernels, dstate, sums),
        [(x, x_channels), (dout, c_channels)],
        (x, kernels, dout, dx, dkernels),
        sequences,
        length,
        (a.activation == "silu", sequences is not None, *[o is not None for o in optional]),
    )
    if rows:
        total = sums.sum(0)
        if taps:
            dkernels.copy_(total[:taps].T)
        if dbias is not None:
            dbias.copy_(total[taps])


@register("dynamic_conv_step", "triton")
def dynamic_conv_step(a: Any, y: Any) -> None:
    x, state, residual, out = a.x, a.state, a.residual, y.out
    if not out.numel():
        return
    batch, tokens, channels = x.shape[0], x.shape[1] if x.ndim == 3 else 1, x.shape[-1]
    kernels, bias = _rows(a.kernels, 2), _rows(a.bias, 1)
    slots, positions = _rows(a.slots, 1), _rows(a.positions, 1)
    length, width = state.shape[2], kernels.shape[-1]
    x_strides, r_strides = (
        (None,) * 3
        if array is None
        else array.stride()
        if array.ndim == 3
        else (array.stride(0), 0, array.stride(1))
        for array in (x, residual)
    )
    k_strides = kernels.stride()[:-2] if kernels.ndim == 4 else (*kernels.stride()[:-2], 0, 0)[:2]
    strides = *x_strides, *k_strides, *state.stride()
    vector = (
        tokens == 1
        and length == width
        and positions is None
        and x_strides[2] == 1
        and state.stride()[1:] == (width, 1)
        and _aligned(width, channels, (x_strides[0], k_strides[0]), (x, state, kernels, out))
        and not state.stride(0) % _UNIT
    )
    size = _block(kernels, vector)
    blocks = -(-channels // size)
    optional = bias, slots, positions
    arrays = [x, state, kernels, *[x if b is None else b for b in optional], out, residual]
    float64 = promoted((x, state, kernels, bias, residual)) == torch.float64
    constants = (
        width, channels, size, vector, tl.float64 if float64 else tl.float32, tokens, length,
        k_strides[1] == 0, a.activation == "silu",
        *[array is not None for array in optional],
    )  # fmt: skip
    integers = state.shape[0], blocks, *strides
    dtypes = [None if array is None else array.dtype for array in arrays]
    key = (
        x.device,
        *dtypes,
        wide(*integers, *(r_strides if residual is not None else ())),
        *constants,
    )
    _step[vector](batch * blocks, key, *arrays, *integers, *r_strides, *constants)
