"""Dynamic convolution by the compiled kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cpukern import isa
from cpukern.layout import clear, laid_out
from fusedops._frame.registry import register
from fusedops._host.threads import threads_for
from fusedops.conv.plan import CHUNK

_conv = isa.load("conv")
# bfloat16 arrives as uint16, its bits.
_NAMES = {np.uint16: "bfloat16", np.float32: "float", np.float64: "double"}
_conv_of = {
    np.dtype(dtype): SimpleNamespace(
        forward=_conv.forward[name], backward=_conv.backward[name], step=_conv.step[name]
    )
    for dtype, name in _NAMES.items()
}
# Chunks of tokens, and numbers of a decoding step, that are worth waking a thread for.
_CHUNK_GRAIN, _STEP_GRAIN = 2, 1 << 15
# The most partial sums over tokens.
_PARTS = 64


def _arguments(a: Any) -> tuple[tuple[Any, ...], int]:
    """Return the arguments that both passes share, and the number of chunks of tokens."""
    x, kernels, sequences = a.x, a.kernels, a.sequences
    chunks = starts = None
    if sequences is None:
        count = x.shape[0] * -(-x.shape[1] // CHUNK)
    else:
        chunks = sequences.chunks
        starts = sequences.cu_seqlens[: sequences.num_sequences + 1]
        count = chunks.size // 2 if len(starts) > 1 else 0
    static = kernels.ndim == 2
    taps = laid_out(kernels[None, None] if static else kernels, 2)
    inputs = laid_out(x, 0), taps, laid_out(a.initial_state, 3), laid_out(a.bias, 1)
    return (*inputs, static, a.activation == "silu", chunks, starts, count, CHUNK), count


def _fill_tokenless(states: Any, given: Any, a: Any) -> None:
    """Copy the state of sequences without a token, since no chunk owns these."""
    if states is None or (a.sequences is None and a.x.shape[1]):
        return
    empty: Any = slice(None)
    if a.sequences is not None:
        empty = np.diff(a.sequences.cu_seqlens[: a.sequences.num_sequences + 1]) == 0
    states[empty] = 0 if given is None else given[empty]


@register("dynamic_conv", "cython", bfloat16=True)
def dynamic_conv(a: Any, y: Any) -> None:
    _fill_tokenless(y.final_state, a.initial_state, a)
    arguments, count = _arguments(a)
    if count and a.kernels.size:
        threads = threads_for(count, _CHUNK_GRAIN)
        residual = laid_out(a.residual, 0)
        _conv_of[a.x.dtype].forward(*arguments, residual, y.out, y.final_state, threads)


@register("dynamic_conv_vjp", "cython", bfloat16=True)
def dynamic_conv_vjp(a: Any, y: Any) -> None:
    _fill_tokenless(y.dinitial_state, a.dfinal_state, a)
    arguments, count = _arguments(a)
    static = a.kernels.ndim == 2
    dkernels, dbias = y.dkernels, y.dbias
    if not (count and a.kernels.size):
        # Sums over no tokens.
        clear((dkernels, dbias))
        return
    sums = dbias is not None or (static and dkernels is not None)
    group = -(-count // _PARTS) if sums else 1
    _conv_of[a.x.dtype].backward(
        *arguments,
        laid_out(a.dout, 0),
        laid_out(a.dfinal_state, 3),
        y.dx,
        dkernels[None, None] if static and dkernels is not None else dkernels,
        y.dinitial_state,
        dbias,
        group,
        threads_for(-(-count // group), _CHUNK_GRAIN),
    )


@register("dynamic_conv_step", "cython", bfloat16=True)
def dynamic_conv_step(a: Any, y: Any) -> None:
    x, kernels, residual, out = a.x, a.kernels, a.residual, y.out
    if not out.size:
        return
    if x.ndim == 2:
        x, out = x[:, None], out[:, None]
        residual = None if residual is None else residual[:, None]
    if kernels.ndim < 4:
        kernels = kernels[None, None] if kernels.ndim == 2 else kernels[:, None]
    own = laid_out(a.state, 0)
    _conv_of[x.dtype].step(
        laid_out(x, 0),
        own,
        laid_out(kernels, 4),
        laid_out(a.bias, 1),
        laid_out(residual, 0),
        *[
            None if places is None else np.ascontiguousarray(places, np.int64)
            for places in (a.slots, a.positions)
        ],
        a.activation == "silu",
        out,
        min(len(x), threads_for(out.size * kernels.shape[-1], _STEP_GRAIN)),
    )
    if own is not a.state:
        a.state[...] = own
