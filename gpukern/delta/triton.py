"""The gated delta rule on the GPU, token by token, with a part of the state in registers.

Columns of a state don't depend on each other, so a program walks along a sequence with a few of
them. The backward walks forward for what every value misses in the state, and backward for the
cotangents of the values that tokens write. Both walks keep a state every few tokens. Between these,
all gradients that are left are found in all chunks at once, where a program has a few rows of the
states: with the written values known, rows don't depend on each other either. So a sum over rows
or over columns lies within one program; sums over both, and over heads that share one of q and k,
are added up afterwards, in a fixed order.

Operations of B·T·HV·K·V entries: forward 7, backward 26. A walk takes as long as its tokens follow
on each other, until there are some programs for every processor. Bytes beside the arrays: in the
backward, two states for every chunk, written and read once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from fusedops._frame.check import promoted
from fusedops._frame.registry import register
from fusedops.conv.plan import CHUNK
from gpukern.launch import Launcher, kernel_of_any_size, power, wide

# Entries of a state, in float32, that a program takes in a walk along a sequence and in a chunk of
# one, unless an axis is long; and entries for which it has a further warp.
_WALK, _CHUNK, _MOST = 1024, 2048, 2048


@triton.jit
def _sequence(number, starts, tokens):
    """Return a sequence's batch, and where it begins and ends in there."""
    if starts is None:
        return number, number * 0, number * 0 + tokens
    else:
        # Clipped, so that no bad number reaches outside of the arrays.
        begin = tl.minimum(tl.maximum(tl.load(starts + number), 0), tokens)
        end = tl.minimum(tl.maximum(tl.load(starts + number + 1), begin), tokens)
        return number * 0, begin, end


@triton.jit
def _entries(states, number, head, key, value, strides):
    """Return pointers to a part of a state in an array (N, HV, K, V)."""
    states += number * strides[0] + head * strides[1]
    return states + key.to(tl.int64) * strides[2] + value.to(tl.int64) * strides[3]


@triton.jit
def _kept(
    states, number, head, key, value, K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr
):  # fmt: skip
    """Return pointers to a part of a state that a walk keeps.

    Its columns lie together, so that chunks load rows side by side.
    """
    return _entries(states, number, head, key, value, (HV * K * V, K * V, 1, K))


@triton.jit
def _sum(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the rows of a tile, in several sums side by side, as an addition waits for the last."""
    if ROWS > 16:
        tile = tl.sum(tl.reshape(tile, (ROWS // 16, 16, COLUMNS)), 0)
    return tl.sum(tile, 0)


@triton.jit
def _token(arrays, strides, t, live, key, value, K: tl.constexpr, V: tl.constexpr):
    """Load a token's rows of two arrays with K columns and one with V, its gate and its beta."""
    one, other, row, g, beta = arrays
    return (
        tl.load(one + t * strides[0] + key, mask=(key < K) & live, other=0.0),
        tl.load(other + t * strides[1] + key, mask=(key < K) & live, other=0.0),
        tl.load(row + t * strides[2] + value, mask=(value < V) & live, other=0.0),
        tl.load(g + t * strides[3], mask=live, other=0.0),
        tl.load(beta + t * strides[4], mask=live, other=0.0),
    )


def _forward_kernel(
    q, k, v, g, beta, state, slots, starts, out, final_state, missed, states,
    tokens, count, length,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, b_batch, b_token, b_head,
    s_sequence, s_head, s_key, f_sequence, f_head, f_key,
    s_value: tl.constexpr, f_value: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + VALUES - 1) // VALUES
    program = tl.program_id(0)
    key, value = tl.arange(0, KEYS), VALUES * (program % TILES) + tl.arange(0, VALUES)
    head = (program // TILES % HV).to(tl.int64)
    sequence = (program // (TILES * HV)).to(tl.int64)
    batch, begin, end = _sequence(sequence, starts, tokens)
    slot, live = sequence, sequence >= 0
    if slots is not None:
        slot = tl.load(slots + sequence).to(tl.int64)
        live = (slot >= 0) & (slot < count)
        slot = tl.where(live, slot, 0)
    there = ((key < K) & live)[:, None] & (value < V)[None, :]
    keys, values = key[:, None], value[None, :]
    S = tl.zeros([KEYS, VALUES], FLOAT)
    if state is not None:
        strides = (s_sequence, s_head, s_key, s_value)
        given = _entries(state, slot, head, keys, values, strides)
        S = tl.load(given, mask=there, other=0.0).to(FLOAT)
    q += batch * q_batch + head // GROUP * q_head
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head * v_head
    g += batch * g_batch + head * g_head
    beta += batch * b_batch + head * b_head
    # Two tokens' loads are in flight while one is worked on.
    arrays = (k, k if out is None else q, v, g, beta)
    by_token = (k_token, k_token if out is None else q_token, v_token, g_token, b_token)
    now = _token(arrays, by_token, begin, begin < end, key, value, K, V)
    later = _token(arrays, by_token, begin + 1, begin + 1 < end, key, value, K, V)
    chunk = (batch * tokens + begin) // length + sequence
    t = begin
    while t < end:
        if states is not None:
            tl.store(_kept(states, chunk, head, keys, values, K, V, HV), S, mask=there)
        last = tl.minimum(t + length, end)
        while t < last:
            k_t, q_t, v_t, g_t, b = now
            now, later = later, _token(arrays, by_token, t + 2, t + 2 < end, key, value, K, V)
            k_t = k_t.to(FLOAT)[:, None]
            S *= tl.exp(g_t.to(FLOAT))
            r = v_t.to(FLOAT) - _sum(S * k_t, KEYS, VALUES)
            S += k_t * (b.to(FLOAT) * r)[None, :]
            at = ((batch * tokens + t) * HV + head) * V + value
            if missed is not None:
                tl.store(missed + at, r, mask=value < V)
            if out is not None:
                o = SCALE * _sum(S * q_t.to(FLOAT)[:, None], KEYS, VALUES)
                o = tl.where(live, o, 0.0)
                tl.store(out + at, o.to(out.dtype.element_ty), mask=value < V)
            t += 1
        chunk += 1
    if final_state is not None:
        strides = (f_sequence, f_head, f_key, f_value)
        final = _entries(final_state, slot, head, keys, values, strides)
        tl.store(final, S.to(final_state.dtype.element_ty), mask=there)


def _backward_kernel(
    q, k, g, beta, dout, dfinal_state, starts, du, dv, dstate, dstates,
    tokens, length,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Walk from the last token to the first with the cotangent of the state."""
    TILES: tl.constexpr = (V + VALUES - 1) // VALUES
    program = tl.program_id(0)
    key, value = tl.arange(0, KEYS), VALUES * (program % TILES) + tl.arange(0, VALUES)
    head = (program // TILES % HV).to(tl.int64)
    sequence = (program // (TILES * HV)).to(tl.int64)
    batch, begin, end = _sequence(sequence, starts, tokens)
    there = (key < K)[:, None] & (value < V)[None, :]
    dS = tl.zeros([KEYS, VALUES], FLOAT)
    keys, values, whole = key[:, None], value[None, :], (HV * K * V, K * V, V, 1)
    if dfinal_state is not None:
        final = _entries(dfinal_state, sequence, head, keys, values, whole)
        dS = tl.load(final, mask=there, other=0.0).to(FLOAT)
    begin += batch * tokens
    end += batch * tokens
    q += head // GROUP * K
    k += head // GROUP * K
    arrays = (q, k, dout + head * V, g + head, beta + head)
    by_token = (HV // GROUP * K, HV // GROUP * K, HV * V, HV, HV)
    now = _token(arrays, by_token, end - 1, begin < end, key, value, K, V)
    later = _token(arrays, by_token, end - 2, begin < end - 1, key, value, K, V)
    t = end - 1
    while t >= begin:
        chunk = (t - begin) // length
        if dstates is not None:
            row = begin // length + sequence + chunk
            tl.store(_kept(dstates, row, head, keys, values, K, V, HV), dS, mask=there)
        first = begin + chunk * length
        while t >= first:
            q_t, k_t, do, g_t, b = now
            now, later = later, _token(arrays, by_token, t - 2, t - 2 >= begin, key, value, K, V)
            q_t, k_t = q_t.to(FLOAT)[:, None], k_t.to(FLOAT)[:, None]
            dS += q_t * (SCALE * do.to(FLOAT))[None, :]
            into = _sum(dS * k_t, KEYS, VALUES)
            dr = b.to(FLOAT) * into
            dS = tl.exp(g_t.to(FLOAT)) * (dS - k_t * dr[None, :])
            at = (t * HV + head) * V + value
            if du is not None:
                tl.store(du + at, into, mask=value < V)
            if dv is not None:
                tl.store(dv + at, dr.to(dv.dtype.element_ty), mask=value < V)
            t -= 1
    if dstate is not None:
        given = _entries(dstate, sequence, head, keys, values, whole)
        tl.store(given, dS.to(dstate.dtype.element_ty), mask=there)


def _chunk_kernel(
    q, k, g, beta, dout, missed, du, states, dstates, starts, chunks, dq, dk, dg, dbeta,
    sequences, tokens, length,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Walk along a chunk and back, with some rows of the state and of its cotangent.

    Rows of dq, and both terms of dk, are whole; each tile of rows has a term of dg.
    """
    TILES: tl.constexpr = (K + KEYS - 1) // KEYS
    program = tl.program_id(0)
    tile = program % TILES
    key, value = KEYS * tile + tl.arange(0, KEYS), tl.arange(0, VALUES)
    head = (program // TILES % HV).to(tl.int64)
    number = (program // (TILES * HV)).to(tl.int64)
    if chunks is None:
        each = tl.cdiv(tokens, length)
        sequence, at_chunk = number // each, number % each
        _, begin, end = _sequence(sequence, starts, tokens)
        begin, end = begin + sequence * tokens, end + sequence * tokens
        first = begin + at_chunk * length
    else:
        sequence = tl.minimum(tl.maximum(tl.load(chunks + 2 * number), 0), sequences - 1)
        _, begin, end = _sequence(sequence, starts, tokens)
        first = tl.minimum(tl.maximum(tl.load(chunks + 2 * number + 1), begin), end)
        # A chunk here may be several that are listed, of which the first one takes it.
        end = tl.where((first - begin) % length == 0, end, first)
        at_chunk = (first - begin) // length
    last = tl.minimum(first + length, end)
    row = begin // length + sequence + at_chunk
    there = (value < V)[:, None] & (key < K)[None, :]
    # Transposed, since a lane has many rows of a tile and few columns.
    keys, values = key[None, :], value[:, None]
    S = tl.load(_kept(states, row, head, keys, values, K, V, HV), mask=there, other=0.0)
    t = first
    while t < last:
        at = t * HV + head
        at_key = at // GROUP * K + key
        k_t = tl.load(k + at_key, mask=key < K, other=0.0).to(FLOAT)
        b = tl.load(beta + at).to(FLOAT)
        r = tl.load(missed + at * V + value, mask=value < V, other=0.0)
        into = tl.load(du + at * V + value, mask=value < V, other=0.0)
        do = tl.load(dout + at * V + value, mask=value < V, other=0.0).to(FLOAT)
        S *= tl.exp(tl.load(g + at).to(FLOAT))
        read = _sum(S * (b * into)[:, None], VALUES, KEYS)
        tl.store(dk + 2 * at * K + key, -read, mask=key < K)
        S += (b * r)[:, None] * k_t[None, :]
        tl.store(dq + at * K + key, SCALE * _sum(S * do[:, None], VALUES, KEYS), mask=key < K)
        if dbeta is not None:
            if tile == 0:
                tl.store(dbeta + at, tl.sum(r * into, 0).to(dbeta.dtype.element_ty))
        t += 1
    dS = tl.load(_kept(dstates, row, head, keys, values, K, V, HV), mask=there, other=0.0)
    # A state times its cotangent, summed, is the cotangent of the next token's gate.
    product = _sum(S * dS, VALUES, KEYS)
    # The rows that are written above are read below, by other threads.
    tl.debug_barrier()
    while t > first:
        t -= 1
        at = t * HV + head
        at_key = at // GROUP * K + key
        q_t = tl.load(q + at_key, mask=key < K, other=0.0).to(FLOAT)
        k_t = tl.load(k + at_key, mask=key < K, other=0.0).to(FLOAT)
        b = tl.load(beta + at).to(FLOAT)
        r = tl.load(missed + at * V + value, mask=value < V, other=0.0)
        into = tl.load(du + at * V + value, mask=value < V, other=0.0)
        do = tl.load(dout + at * V + value, mask=value < V, other=0.0).to(FLOAT)
        dS += (SCALE * do)[:, None] * q_t[None, :]
        written = _sum(dS * (b * r)[:, None], VALUES, KEYS)
        tl.store(dk + (2 * at + 1) * K + key, written, mask=key < K)
        if dg is not None:
            from_read = tl.load(dk + 2 * at * K + key, mask=key < K, other=0.0)
            from_out = tl.load(dq + at * K + key, mask=key < K, other=0.0)
            product += q_t * from_out - k_t * (written - from_read)
            tl.store(dg + at * TILES + tile, tl.sum(product, 0))
        dS = tl.exp(tl.load(g + at).to(FLOAT)) * (dS - (b * into)[:, None] * k_t[None, :])


_forward, _backward, _chunks = (
    {warps: Launcher(kernel, warps) for warps in (1, 2, 4, 8)}
    for kernel in map(kernel_of_any_size, (_forward_kernel, _backward_kernel, _chunk_kernel))
)


def _kind(a: Any) -> torch.dtype:
    """Return the dtype in which a call is computed."""
    arrays = [array for array in a if isinstance(array, torch.Tensor) and array.is_floating_point()]
    return torch.float64 if promoted(arrays) == torch.float64 else torch.float32


def _sizes(a: Any, whole: int, part: int, most: int) -> tuple[int, int, int]:
    """Return the sizes of a tile with all of one axis and a part of another, and its warps."""
    words, whole = _kind(a).itemsize // 4, power(whole)
    others = min(power(part), max(8, min(16, most // (whole * words))))
    return whole, others, min(8, max(1, whole * others * words // _MOST))


def _columns(a: Any) -> tuple[int, int, int]:
    """Return the keys, values and warps of a tile that a walk takes."""
    return _sizes(a, a.k.shape[-1], a.v.shape[-1], _WALK)


def _rows(a: Any) -> tuple[int, int, int]:
    """Return the keys, values and warps of a tile in a chunk."""
    values, keys, warps = _sizes(a, a.v.shape[-1], a.k.shape[-1], _CHUNK)
    return keys, values, warps


def _launch(
    launchers: dict[int, Launcher],
    a: Any,
    count: int,
    tile: tuple[int, int, int],
    arrays: Any,
    integers: Any,
    *constants: Any,
) -> None:
    """Launch a program for every tile of `count` states."""
    (H, K), (HV, V), (keys, values, warps) = a.k.shape[-2:], a.v.shape[-2:], tile
    kind = tl.float64 if _kind(a) == torch.float64 else tl.float32
    constants += K, V, HV, HV // H, a.scale, keys, values, kind
    dtypes = [None if array is None else array.dtype for array in arrays]
    key = a.k.device, *dtypes, wide(*integers), *constants
    if programs := count * HV * -(-K // keys) * -(-V // values):
        launchers[warps](programs, key, *arrays, *integers, *constants)


def _sequences(a: Any) -> tuple[int, Any, Any]:
    """Return the number of sequences, and where packed ones and their chunks begin."""
    if a.sequences is None:
        return a.q.shape[0], None, None
    starts, chunks = a.sequences.tensors_here()
    return min(starts.numel() - 1, a.sequences.num_sequences), starts, chunks


def _walk_forward(
    a: Any,
    count: int,
    starts: Any,
    state: Any,
    out: Any,
    final_state: Any,
    *,
    slots: Any = None,
    missed: Any = None,
    states: Any = None,
    length: int | None = None,
) -> None:
    """Launch the walk of `count` sequences, whose states it keeps every `length` tokens."""
    q, k, v = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in a[:3])
    tokens = q.shape[1]
    strides = [stride for x in (q, k, v, a.g, a.beta) for stride in x.stride()[:3]]
    for given in (state, final_state):
        strides += (0,) * 3 if given is None else given.stride()[:3]
    arrays = q, k, v, a.g, a.beta, state, slots, starts, out, final_state, missed, states
    integers = tokens, 0 if state is None else len(state), length or max(tokens, 1), *strides
    by_value = [1 if given is None else given.stride(3) for given in (state, final_state)]
    _launch(_forward, a, count, _columns(a), arrays, integers, *by_value)


@register("gated_delta_rule", "triton")
def gated_delta_rule(a: Any, y: Any) -> None:
    count, starts, _ = _sequences(a)
    _walk_forward(a, count, starts, a.initial_state, y.out, y.final_state)


@register("gated_delta_rule_vjp", "triton")
def gated_delta_rule_vjp(a: Any, y: Any) -> None:
    count, starts, chunks = _sequences(a)
    (B, T, H, K), (HV, V) = a.q.shape, a.v.shape[2:]
    dq, dk, dv, dg, dbeta, dstate = y
    if not count * HV * V:
        for array in y:
            if array is not None:
                array.zero_()
        return
    names = "q", "k", "v", "g", "beta", "dout"
    a = a._replace(**{name: getattr(a, name).contiguous() for name in names})
    dfinal_state = None if a.dfinal_state is None else a.dfinal_state.contiguous()
    empty = functools.partial(torch.empty, dtype=_kind(a), device=a.q.device)
    # Chunks of packed sequences begin where `Sequences` lists chunks.
    length = CHUNK * power(math.isqrt(B * T // CHUNK**2) or 1)
    missed = du = states = dstates = None
    in_chunks = T > 0 and any([array is not None for array in (dq, dk, dg, dbeta)])
    if in_chunks:
        missed, du = empty(a.v.shape), empty(a.v.shape)
        states, dstates = (empty(B * T // length + count, HV, K, V) for _ in range(2))
        given = a.initial_state, None, None
        _walk_forward(a, count, starts, *given, missed=missed, states=states, length=length)
    shared = a.q, a.k, a.g, a.beta, a.dout
    arrays = *shared, dfinal_state, starts, du, dv, dstate, dstates
    _launch(_backward, a, count, _columns(a), arrays, (T, length))
    if not in_chunks:
        return
    parts_of_q, parts_of_k = empty(B, T, HV, K), empty(B, T, HV, 2, K)
    tile = _rows(a)
    parts_of_g = None if dg is None else empty(B, T, HV, -(-K // tile[0]))
    number = B * -(-T // length) if chunks is None else len(chunks)
    arrays = *shared, missed, du, states, dstates, starts, chunks
    arrays += parts_of_q, parts_of_k, parts_of_g, dbeta
    _launch(_chunks, a, number, tile, arrays, (count, T, length))
    for array, parts in ((dq, parts_of_q), (dk, parts_of_k)):
        if array is not None:
            array.copy_(parts.view(B, T, H, -1, K).sum(3))
    if dg is not None:
        dg.copy_(parts_of_g.sum(3))


@register("gated_delta_rule_step", "triton")
def gated_delta_rule_step(a: Any, y: Any) -> None:
    slots = None if a.slots is None else a.slots.contiguous()
    if a.q.ndim == 3:
        tokens = {name: x[:, None] for name, x in zip(a._fields[:5], a, strict=False)}
        a = a._replace(**tokens)
    _walk_forward(a, len(a.q), None, a.state, y.out, a.state, slots=slots)
