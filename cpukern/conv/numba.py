"""Dynamic causal convolution on the CPU in Numba, in chunks of up to CHUNK tokens of one sequence.

A dense batch counts as packed sequences of one length. One chunk writes each element of an output,
and sums over tokens have a partial sum for each block of chunks, so the thread count changes no
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cpukern.jit import jit
from cpukern.layout import as_rows
from cpukern.vectors_numba import sigmoid, swish
from fusedops._frame.registry import register
from fusedops._host.threads import in_parallel
from fusedops.conv import Sequences
from fusedops.conv.plan import CHUNK

# Products of a tap and an input that are worth handing to another thread.
_GRAIN = 1 << 16
# The most partial sums over tokens: more would take more memory.
_BLOCKS = 128


@jit
def _span(chunks, cu_seqlens, c, tokens):
    """Return the sequence of chunk c, and the bounds of both, clipped to the arrays."""
    q = min(max(chunks[c, 0], 0), len(cu_seqlens) - 2)
    end = min(max(cu_seqlens[q + 1], 0), tokens)
    start = min(max(cu_seqlens[q], 0), end)
    first = min(max(chunks[c, 1], start), end)
    return q, start, end, first, min(first + CHUNK, end)


@jit
def _input(tokens, states, q, start, s):
    """Return the row of input s of sequence q: before `start`, a row of the state.

    All sequences may share one state.
    """
    if s >= start:
        return tokens[s]
    return states[min(q, len(states) - 1), s - start + states.shape[1]]


@jit
def _convolve(x, kernels, states, bias, q, start, t, h):
    """Write the convolution at token t, before its activation, into h."""
    taps = kernels[min(t, len(kernels) - 1)]
    width = taps.shape[1]
    h[:] = 0
    for w in range(width):
        row = _input(x, states, q, start, t + w - width + 1)
        for d in range(len(h)):
            h[d] += taps[d, w] * row[d]
    for row in bias:
        for d in range(len(h)):
            h[d] += row[d]


@jit
def _conv_chunks(
    low, high, chunks, cu_seqlens, x, kernels, states, bias, silu, residual, out, final_state
):
    width = kernels.shape[2]
    for c in range(low, high):
        q, start, end, first, last = _span(chunks, cu_seqlens, c, len(x))
        for t in range(first, min(last, len(out))):
            h = out[t]
            _convolve(x, kernels, states, bias, q, start, t, h)
            if silu:
                for d in range(len(h)):
                    h[d] = swish(h[d])
            if len(residual):
                h += residual[t]
        if last == end and q < len(final_state):
            for w in range(width):
                row = _input(x, states, q, start, end + w - width)
                for d in range(len(row)):
                    final_state[q, d, w] = row[d]


@jit
def _vjp_blocks(
    low,
    high,
    block_ptr,
    chunks,
    cu_seqlens,
    x,
    kernels,
    states,
    bias,
    silu,
    dout,
    dfinal_states,
    dx,
    dkernels,
    per_token,
    dstates,
    dbias,
):
    width = kernels.shape[2]
    v = np.empty(x.shape[1], x.dtype)
    for b in range(low, high):
        for c in range(block_ptr[b], block_ptr[b + 1]):
            q, start, end, first, last = _span(chunks, cu_seqlens, c, len(x))
            # A chunk writes the cotangents of its inputs, and a sequence's first chunk also the
            # cotangents of the state. Tokens of later chunks read these inputs, too.
            own_first = start - width if first == start and len(dstates) else first
            own_last = last if len(dx) else first
            for s in range(own_first, own_last):
                row = _input(dx, dstates, q, start, s)
                row[:] = 0
                if s >= end - width:
                    row += dfinal_states[min(q, len(dfinal_states) - 1), s - end + width]
            stop = last if len(dkernels) or len(dbias) else first
            if own_first < own_last:
                stop = max(stop, min(own_last + width - 1, end))
            # Tokens backwards, so that an input's terms are summed in the order of the taps.
            for t in range(stop - 1, first - 1, -1):
                c_t = dout[t]
                if silu:
                    _convolve(x, kernels, states, bias, q, start, t, v)
                    for d in range(len(v)):
                        sigma = sigmoid(v[d])
                        # Where the sum has overflowed, σ is the derivative's limit.
                        bend = 0 if math.isinf(v[d]) else v[d] * (1 - sigma)
                        v[d] = c_t[d] * sigma * (1 + bend)
                else:
                    v[:] = c_t
                if t < last and len(dbias):
                    for d in range(len(v)):
                        dbias[b, d] += v[d]
                taps = kernels[min(t, len(kernels) - 1)]
                if t < last and len(dkernels):
                    dtaps = dkernels[t if per_token else b]
                    if per_token:
                        dtaps[:] = 0
                    for w in range(width):
                        row = _input(x, states, q, start, t + w - width + 1)
                        for d in range(len(v)):
                            dtaps[d, w] += v[d] * row[d]
                for w in range(width):
                    s = t + w - width + 1
                    if own_first <= s < own_last:
                        row = _input(dx, dstates, q, start, s)
                        for d in range(len(v)):
                            row[d] += v[d] * taps[d, w]


@jit
def _step_rows(low, high, x, state, kernels, bias, residual, slots, positions, silu, out):
    width, length, tokens = kernels.shape[3], state.shape[2], x.shape[1]
    window = np.empty((width, x.shape[2]), x.dtype)
    for b in range(low, high):
        slot, position = b, 0
        if len(slots):
            slot = slots[b]
            if slot < 0 or slot >= len(state):
                out[b] = 0
                continue
        if len(positions):
            position = positions[b] % length
        row, k = state[slot], min(b, len(kernels) - 1)
        for w in range(width - 1):
            past = (position + length - width + 1 + w) % length
            for d in range(len(row)):
                window[w, d] = row[d, past]
        for t in range(tokens):
            window[(t + width - 1) % width] = x[b, t]
            taps = kernels[k, min(t, kernels.shape[1] - 1)]
            h = out[b, t]
            for d in range(len(h)):
                h[d] = 0
                for w in range(width):
                    h[d] += taps[d, w] * window[(t + w) % width, d]
                for extra in range(len(bias)):
                    h[d] += bias[extra, d]
                if silu:
                    h[d] = swish(h[d])
                if len(residual):
                    h[d] += residual[b, t, d]
        if not len(positions):
            position = length - tokens
            for d in range(len(row)):
                for past in range(length - tokens):
                    row[d, past] = row[d, past + tokens]
        for t in range(max(tokens - length, 0), tokens):
            place = position + t
            if len(positions):
                place %= length
            for d in range(len(row)):
                row[d, place] = x[b, t, d]


@jit
def _copy_channels(low, high, x, rows):
    """Copy chunks of CHUNK tokens of (B, T, D) to rows, line by line of both arrays."""
    chunks = -(-x.shape[1] // CHUNK)
    for c in range(low, high):
        b, first = c // chunks, c % chunks * CHUNK
        last = min(first + CHUNK, x.shape[1])
        for channel in range(0, x.shape[2], 16):
            for t in range(first, last):
                for d in range(channel, min(channel + 16, x.shape[2])):
                    rows[b, t, d] = x[b, t, d]


def _tokens(x: np.ndarray) -> np.ndarray:
    """Return (B, T, D) as rows of tokens; arrays (B, D, T) are copied by lines of memory."""
    B, T, D = x.shape
    if x.size and x.strides[1] == x.itemsize and not x.flags.c_contiguous:
        rows = np.empty(x.shape, x.dtype)
        _in_parallel(lambda *some: _copy_channels(*some, x, rows), B * -(-T // CHUNK), x.size)
        x = rows
    return as_rows(x, (D,), x.dtype)


def _states(states: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return (S, D, W) as (S, W, D), or one state of zeros for all sequences if None."""
    W, D = shape
    if states is None:
        return np.zeros((1, W, D), dtype)
    return np.ascontiguousarray(states.swapaxes(1, 2))


def _arguments(a: Any) -> tuple[np.ndarray, ...]:
    """Return the arguments that forward and backward kernels share."""
    x, sequences = a.x, a.sequences
    B, T, D = x.shape
    W = a.kernels.shape[-1]
    if sequences is None:
        sequences = Sequences(T * np.arange(B + 1, dtype=np.int64))
    starts = sequences.cu_seqlens
    # A sequence without tokens gets an empty chunk, which writes its state.
    empty = np.flatnonzero(np.diff(starts) == 0)
    return (
        np.concatenate([sequences.chunks, np.stack([empty, starts[empty]], axis=1)]),
        starts,
        _tokens(x),
        as_rows(a.kernels, (D, W), x.dtype),
        _states(a.initial_state, (W, D), x.dtype),
        as_rows(a.bias, (D,), x.dtype),
    )


def _in_parallel(work: Callable[[int, int], None], items: int, products: int) -> None:
    in_parallel(work, items, 1 + _GRAIN * items // max(products, 1))


@register("dynamic_conv", "numba")
def dynamic_conv(a: Any, y: Any) -> None:
    x, (D, W) = a.x, a.kernels.shape[-2:]
    arguments = _arguments(a)
    added = as_rows(None, (D,), x.dtype) if a.residual is None else _tokens(a.residual)
    outputs = as_rows(y.out, (D,), x.dtype), as_rows(y.final_state, (D, W), x.dtype)
    _in_parallel(
        lambda low, high: _conv_chunks(
            low, high, *arguments, a.activation == "silu", added, *outputs
        ),
        len(arguments[0]),
        x.size * W,
    )


@register("dynamic_conv_vjp", "numba")
def dynamic_conv_vjp(a: Any, y: Any) -> None:
    x, (D, W) = a.x, a.kernels.shape[-2:]
    dx, dkernels, dinitial_state, dbias = y
    arguments = _arguments(a)
    blocks = min(len(arguments[0]), _BLOCKS)
    per_token = a.kernels.ndim == 4
    if per_token:
        dtaps = as_rows(dkernels, (D, W), x.dtype)
    else:
        dtaps = np.zeros((0 if dkernels is None else blocks, D, W))
    dstates = np.empty((0 if dinitial_state is None else len(dinitial_state), W, D), x.dtype)
    dbiases = np.zeros((0 if dbias is None else blocks, D))
    block_ptr = len(arguments[0]) * np.arange(blocks + 1) // max(blocks, 1)
    given = _tokens(a.dout), _states(a.dfinal_state, (W, D), x.dtype)
    outputs = as_rows(dx, (D,), x.dtype), dtaps, per_token, dstates, dbiases
    _in_parallel(
        lambda low, high: _vjp_blocks(
            low, high, block_ptr, *arguments, a.activation == "silu", *given, *outputs
        ),
        blocks,
        x.size * W,
    )
    if not per_token and dkernels is not None:
        dkernels[...] = dtaps.sum(axis=0)
    if dinitial_state is not None:
        dinitial_state[...] = dstates.swapaxes(1, 2)
    if dbias is not None:
        dbias[...] = dbiases.sum(axis=0)


@register("dynamic_conv_step", "numba")
def dynamic_conv_step(a: Any, y: Any) -> None:
    x, kernels, residual, out = a.x, a.kernels, a.residual, y.out
    if not out.size:
        return
    if x.ndim == 2:
        x, out = x[:, None], out[:, None]
    added = np.empty((0, *x.shape[1:]), x.dtype) if residual is None else residual.reshape(x.shape)
    if kernels.ndim < 4:
        kernels = kernels[None, None] if kernels.ndim == 2 else kernels[:, None]
    # Each layout would be compiled anew; kernels, which are larger, are read as they lie.
    x, added = map(np.ascontiguousarray, (x, added))
    arrays = x, a.state, kernels, as_rows(a.bias, x.shape[2:], x.dtype), added
    places = [
        np.empty(0, np.int64) if array is None else array.astype(np.int64)
        for array in (a.slots, a.positions)
    ]
    _in_parallel(
        lambda low, high: _step_rows(low, high, *arrays, *places, a.activation == "silu", out),
        len(x),
        x.size * kernels.shape[-1],
    )
