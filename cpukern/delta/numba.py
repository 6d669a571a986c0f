"""The gated delta rule on the CPU in Numba, one token after the other.

No column of a state depends on another one, so a tile of columns, in a near cache, is taken through
all tokens of its sequence. A dense batch counts as packed sequences of one length. A backward keeps
the states between chunks of tokens, and computes those within a chunk again. One thread adds all
that heads and tiles add to a head of q, so the thread count changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cpukern.jit import inlined, jit
from cpukern.layout import as_rows, clear
from fusedops._frame.registry import register
from fusedops._host.threads import in_parallel

# The columns of a tile, at most.
_TILE = 128
# The fewest tokens between two states that a backward keeps.
_CHUNK = 32
# Elements of states, times tokens, that are worth handing to another thread.
_GRAIN = 1 << 16

_fused = inlined(fastmath={"contract"})
# Sums over columns may be reordered into vectors; NaNs stay NaNs.
_reordered = inlined(fastmath={"contract", "reassoc"})


@_fused
def _scale(values, factor, out):
    """Write the values, which Numba's assignment compiles slowly, times a factor."""
    factor = out.dtype.type(factor)
    for i in range(len(out)):
        for c in range(out.shape[1]):
            out[i, c] = factor * values[i, c]


@_fused
def _sum(parts):
    """Add all four rows to the first. Every addition waits for the one before, in its own row."""
    for c in range(parts.shape[1]):
        parts[0, c] = (parts[0, c] + parts[1, c]) + (parts[2, c] + parts[3, c])


@_fused
def _read(S, row, parts):
    """Write Sᵀ row into the first row of parts (4, V)."""
    parts[:] = 0
    for i in range(len(S)):
        a, part = row[i], parts[i % 4]
        for c in range(S.shape[1]):
            part[c] += a * S[i, c]
    _sum(parts)


@_fused
def _write(S, decay, k, u, row, parts):
    """Let S be decay S + k uᵀ, and write Sᵀ row into the first row of parts (4, V)."""
    parts[:] = 0
    for i in range(len(S)):
        a, b, part = k[i], row[i], parts[i % 4]
        for c in range(S.shape[1]):
            s = decay * S[i, c] + a * u[c]
            S[i, c] = s
            part[c] += b * s
    _sum(parts)


@inlined()
def _chunk(length):
    """Return the tokens of a backward's chunk."""
    return max(_CHUNK, int(math.sqrt(length)))


@jit
def _attend(S, start, end, h, first, scale, tokens, out, missed, kept):
    """Take a tile of head h, of columns from `first` on, through tokens.

    `missed` gets the values less what the state had for their keys, as many as it has rows, and
    `kept` the decayed state before every chunk.
    """
    q, k, v, g, beta = tokens
    head, n, chunk = h // (v.shape[1] // q.shape[1]), S.shape[1], _chunk(end - start)
    known, read, u = np.empty((4, n), S.dtype), np.empty((4, n), S.dtype), np.empty(n, S.dtype)
    if start < end:
        _read(S, k[start, head], known)
    for t in range(start, end):
        decay, r = math.exp(g[t, h]), missed[(t - start) % len(missed)]
        for c in range(n):
            r[c] = v[t, h, first + c] - decay * known[0, c]
            u[c] = beta[t, h] * r[c]
        if len(kept) and (t - start) % chunk == 0:
            _scale(S, decay, kept[(t - start) // chunk])
        _write(S, decay, k[t, head], u, k[min(t + 1, end - 1), head], known)
        if len(out):
            _read(S, q[t, head], read)
            for c in range(n):
                out[t, h, first + c] = scale * read[0, c]


@jit
def _load(states, s, h, first, tile):
    """Read a tile of state s, of zeros if there are no states."""
    if s < len(states):
        _scale(states[s, h, :, first : first + tile.shape[1]], 1, tile)
    else:
        tile[:] = 0


@jit
def _tiles(low, high, starts, slots, scale, tokens, states, out, final_states):
    K, HV, V = tokens[1].shape[2], tokens[2].shape[1], tokens[2].shape[2]
    tiles, dtype = -(-V // _TILE), out.dtype
    kept = np.empty((0, 0, 0), dtype)
    for item in range(low, high):
        s, h, first = item // tiles // HV, item // tiles % HV, item % tiles * _TILE
        start, end, last, slot = starts[s], starts[s + 1], min(first + _TILE, V), slots[s]
        if slot < 0:
            out[start:end, h, first:last] = 0
            continue
        S, missed = np.empty((K, last - first), dtype), np.empty((1, last - first), dtype)
        _load(states, slot, h, first, S)
        _attend(S, start, end, h, first, scale, tokens, out, missed, kept)
        if slot < len(final_states):
            _scale(S, 1, final_states[slot, h, :, first:last])


@jit
def _restore(states, start, low, high, h, head, tokens, missed):
    """Write the decayed states before tokens low to high, of which the first is given."""
    _, k, _, g, beta = tokens
    for t in range(low, high - 1):
        S, after, r = states[t - low], states[t - low + 1], missed[t - start]
        decay = math.exp(g[t + 1, h])
        for i in range(len(S)):
            a = k[t, head, i] * beta[t, h]
            for c in range(S.shape[1]):
                after[i, c] = decay * (S[i, c] + a * r[c])


@_reordered
def _turn(S, dS, k, u, dr, do, dq, dk):
    """Pull the cotangent dS of S + k uᵀ, which a query reads, back to the decayed state S.

    Add to dq and dk, and return the cotangent of g.
    """
    zero = read = S.dtype.type(0)
    dg = 0.0
    for c in range(len(u)):
        read += u[c] * do[c]
    for i in range(len(S)):
        a, dq_i, dk_i, dg_i = k[i], zero, zero, zero
        for c in range(S.shape[1]):
            s, d = S[i, c], dS[i, c]
            dq_i += s * do[c]
            dk_i += d * u[c] - s * dr[c]
            d -= a * dr[c]
            dg_i += s * d
            dS[i, c] = d
        dq[i] += dq_i + a * read
        dk[i] += dk_i
        dg += dg_i
    return dg


@jit
def _attend_back(S, dS, start, end, h, first, scale, tokens, dout, dq, dk, dv, dg, dbeta):
    """Take a tile and its cotangent, which becomes that of the first state, there and back."""
    q, k, v, g, beta = tokens
    K, n, dtype = S.shape[0], S.shape[1], S.dtype
    head, length = h // (v.shape[1] // q.shape[1]), end - start
    chunk = _chunk(length)
    chunks = -(-length // chunk)
    missed, kept = np.empty((length, n), dtype), np.empty((chunks, K, n), dtype)
    states, nobody = np.empty((min(chunk, length), K, n), dtype), np.zeros((2, K), dtype)
    du, of_token = np.empty((4, n), dtype), np.empty((3, n), dtype)
    u, do, dr = of_token[0], of_token[1], of_token[2]
    _attend(S, start, end, h, first, scale, tokens, dv[:0], missed, kept)
    decay = dtype.type(1)
    for i in range(chunks - 1, -1, -1):
        low = start + i * chunk
        high = min(low + chunk, end)
        _scale(kept[i], 1, states[0])
        _restore(states, start, low, high, h, head, tokens, missed)
        for t in range(high - 1, low - 1, -1):
            r, b = missed[t - start], beta[t, h]
            for c in range(n):
                do[c], u[c] = scale * dout[t, h, first + c], b * r[c]
            _write(dS, decay, q[t, head], do, k[t, head], du)
            for c in range(n):
                dr[c] = b * du[0, c]
            dq_t = dq[t, head] if len(dq) else nobody[0]
            dk_t = dk[t, head] if len(dk) else nobody[1]
            dg_t = _turn(states[t - low], dS, k[t, head], u, dr, do, dq_t, dk_t)
            if len(dv):
                for c in range(n):
                    dv[t, h, first + c] = dr[c]
            if len(dg):
                dg[t, h] += dg_t
            if len(dbeta):
                for c in range(n):
                    dbeta[t, h] += du[0, c] * r[c]
            decay = math.exp(g[t, h])
    _scale(dS, decay, dS)


@jit
def _heads_back(
    low, high, starts, scale, tokens, states, dout, dfinal_states, dq, dk, dv, dg, dbeta, dstates
):
    H, K, HV, V = tokens[0].shape[1], tokens[0].shape[2], dout.shape[1], dout.shape[2]
    for item in range(low, high):
        s, head = item // H, item % H
        start, end = starts[s], max(starts[s], starts[s + 1])
        for h in range(head * (HV // H), (head + 1) * (HV // H)):
            for first in range(0, V, _TILE):
                last = min(first + _TILE, V)
                shape = K, last - first
                S, dS = np.empty(shape, dout.dtype), np.empty(shape, dout.dtype)
                _load(states, s, h, first, S)
                _load(dfinal_states, s, h, first, dS)
                _attend_back(
                    S, dS, start, end, h, first, scale, tokens, dout, dq, dk, dv, dg, dbeta
                )
                if s < len(dstates):
                    _scale(dS, 1, dstates[s, h, :, first:last])


def _tokens(a: Any) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return the scale, and the rows of q, k, v, g and beta, one for each token."""
    lead, dtype = a.q.ndim - 2, a.q.dtype
    return dtype.type(a.scale), tuple([as_rows(x, x.shape[lead:], dtype) for x in a[:5]])


def _states(states: Any, a: Any) -> np.ndarray:
    return as_rows(states, (a.v.shape[-2], a.q.shape[-1], a.v.shape[-1]), a.q.dtype)


def _starts(a: Any) -> np.ndarray:
    """Return where sequences begin and end, clipped to the tokens."""
    B, T = a.q.shape[:2]
    if a.sequences is None:
        return T * np.arange(B + 1)
    return np.clip(a.sequences.cu_seqlens, 0, T)


def _in_parallel(work: Callable[[int, int], None], items: int, a: Any) -> None:
    in_parallel(work, items, 1 + _GRAIN * items // max(a.v.size * a.q.shape[-1], 1))


def _run_tiles(a: Any, starts: Any, slots: Any, states: Any, out: Any, final_states: Any) -> None:
    HV, V = a.v.shape[-2:]
    out = as_rows(out, (HV, V), a.q.dtype)
    arguments = starts, slots, *_tokens(a), states, out, final_states
    items = len(slots) * HV * -(-V // _TILE)
    _in_parallel(lambda low, high: _tiles(low, high, *arguments), items, a)


@register("gated_delta_rule", "numba")
def gated_delta_rule(a: Any, y: Any) -> None:
    starts = _starts(a)
    slots = np.arange(len(starts) - 1)
    states, final_states = _states(a.initial_state, a), _states(y.final_state, a)
    _run_tiles(a, starts, slots, states, y.out, final_states)


@register("gated_delta_rule_vjp", "numba")
def gated_delta_rule_vjp(a: Any, y: Any) -> None:
    clear(y[:5])
    starts, dtype = _starts(a), a.q.dtype
    dout = as_rows(a.dout, a.v.shape[2:], dtype)
    given = _states(a.initial_state, a), dout, _states(a.dfinal_state, a)
    outputs = [as_rows(dx, x.shape[2:], dtype) for dx, x in zip(y[:5], a[:5], strict=True)]
    arguments = starts, *_tokens(a), *given, *outputs, _states(y.dinitial_state, a)
    items = (len(starts) - 1) * a.q.shape[2]
    _in_parallel(lambda low, high: _heads_back(low, high, *arguments), items, a)


@register("gated_delta_rule_step", "numba")
def gated_delta_rule_step(a: Any, y: Any) -> None:
    B, T = len(a.q), 1 if a.q.ndim == 3 else a.q.shape[1]
    slots = np.arange(B) if a.slots is None else a.slots.astype(np.int64)
    slots = np.where(slots < len(a.state), slots, -1)
    _run_tiles(a, T * np.arange(B + 1), slots, a.state, y.out, a.state)
