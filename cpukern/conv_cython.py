"""Dynamic convolution by the compiled kernels: NumPy allocates, Cython works."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpukern import isa
from cpukern.layout import laid_out
from fusedops._frame.registry import register
from fusedops._frame.threads import threads_for
from fusedops.conv import CHUNK

_conv = isa.load("conv_cython")
_BITS = np.dtype(np.uint16)
_conv_name = {_BITS: "bfloat16", np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
# Chunks of tokens, and numbers of a decoding step, that pay for waking a thread.
_CHUNK_GRAIN, _STEP_GRAIN = 2, 1 << 15
# Sums over tokens are formed in at most so many parts.
_PARTS = 64


def _scratch(threads: int, channels: int, width: int, dtype: np.dtype) -> np.ndarray:
    real = 8 if dtype.itemsize == 8 else 4
    # A multiple of a cache line for every thread.
    size = -(-real * _conv.scratch_size(channels, width) // 64) * 64
    return np.empty((threads, size), np.int8)


def _arguments(
    x: Any, kernels: Any, state: Any, bias: Any, sequences: Any, activation: str
) -> tuple[tuple[Any, ...], int]:
    """Return what both passes begin with, and how many chunks of tokens there are."""
    chunks = starts = None
    count = x.shape[0] * -(-x.shape[1] // CHUNK)
    if sequences is not None:
        chunks = sequences.chunks
        starts = sequences.cu_seqlens[: sequences.num_sequences + 1]
        count = chunks.size // 2 if len(starts) > 1 else 0
    static = kernels.ndim == 2
    taps = laid_out(kernels[None, None] if static else kernels, 2)
    inputs = laid_out(x, 1), taps, laid_out(state, 3), laid_out(bias, 1)
    return (*inputs, static, activation == "silu", chunks, starts, count, CHUNK), count


def _fill_tokenless(states: Any, given: Any, x: Any, sequences: Any) -> None:
    """Pass a state on through sequences without a token, which no chunk owns."""
    if states is None:
        return
    empty = slice(None) if x.shape[1] == 0 else slice(0)
    if sequences is not None:
        empty = np.diff(sequences.cu_seqlens[: sequences.num_sequences + 1]) == 0
    states[empty] = 0 if given is None else given[empty]


@register("dynamic_conv", "cython", bfloat16=True)
def dynamic_conv(a: Any, y: Any) -> None:
    x, kernels, state, bias, sequences, activation = a
    out, final = y
    _fill_tokenless(final, state, x, sequences)
    arguments, count = _arguments(x, kernels, state, bias, sequences, activation)
    if count and kernels.size:
        threads = threads_for(count, _CHUNK_GRAIN)
        channels, width = kernels.shape[-2:]
        scratch = _scratch(threads, channels, width, x.dtype)
        _conv.forward[_conv_name[x.dtype]](*arguments, out, final, scratch)


@register("dynamic_conv_vjp", "cython", bfloat16=True)
def dynamic_conv_vjp(a: Any, y: Any) -> None:
    x, kernels, state, bias, cotangent, final_cotangent, sequences, activation = a
    dx, dkernels, dstate, dbias = y
    _fill_tokenless(dstate, final_cotangent, x, sequences)
    arguments, count = _arguments(x, kernels, state, bias, sequences, activation)
    static = kernels.ndim == 2
    channels, width = kernels.shape[-2:]
    group = max(1, -(-count // _PARTS))
    parts = -(-count // group)
    dk_sum = np.zeros((parts, width, channels)) if static and dkernels is not None else None
    db_sum = None if dbias is None else np.zeros((parts, channels))
    if dk_sum is None and db_sum is None:
        group, parts = 1, count
    if count and kernels.size:
        threads = threads_for(parts, _CHUNK_GRAIN)
        _conv.backward[_conv_name[x.dtype]](
            *arguments,
            laid_out(cotangent, 1),
            laid_out(final_cotangent, 3),
            dx,
            None if static else dkernels,
            dstate,
            dk_sum,
            db_sum,
            group,
            _scratch(threads, channels, width, x.dtype),
        )
    if dk_sum is not None:
        _round(dk_sum.sum(0).T, dkernels)
    if db_sum is not None:
        _round(db_sum.sum(0), dbias)


def _round(values: np.ndarray, out: np.ndarray) -> None:
    """Write float64 values in the dtype of `out`, to the nearest; bfloat16 as its bits."""
    with np.errstate(over="ignore"):
        if out.dtype != _BITS:
            out[...] = values
            return
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    out[...] = np.where(np.isnan(values), 0x7FC0, rounded)


@register("dynamic_conv_step", "cython", bfloat16=True)
def dynamic_conv_step(a: Any, y: Any) -> None:
    x, state, kernels, bias, activation = a
    out = y.out
    if not state.size:
        return
    static = kernels.ndim == 2
    batch, channels, width = state.shape
    own = laid_out(state, 0)
    threads = min(batch, threads_for(state.size, _STEP_GRAIN))
    _conv.step[_conv_name[x.dtype]](
        laid_out(x.reshape(batch, channels), 2),
        own,
        laid_out(kernels[None] if static else kernels, 3),
        laid_out(bias, 1),
        static,
        activation == "silu",
        out.reshape(batch, channels),
        _scratch(threads, channels, width, x.dtype),
    )
    if own is not state:
        state[...] = own
