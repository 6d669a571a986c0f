"""The gated delta rule by the compiled kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cpukern import isa
from cpukern.layout import clear, laid_out
from fusedops._frame.registry import register
from fusedops._host.threads import threads_for
from fusedops.conv.plan import num_sequences

_delta = isa.load("delta")
# Numbers of states, times tokens, that are worth waking a thread for.
_GRAIN = 1 << 16
# The fewest tokens between states that a backward keeps, an even number for pairs of tokens.
_FEWEST = 32


def _arguments(a: Any) -> tuple[Any, ...]:
    """Return the arguments that both passes share."""
    starts = None
    if a.sequences is not None:
        starts = a.sequences.cu_seqlens[: a.sequences.num_sequences + 1]
    tokens = (laid_out(x, 1) for x in (a.q, a.k, a.v))
    return (*tokens, a.g[..., None], a.beta[..., None], a.initial_state, a.scale, starts)


def _threads(a: Any, items: int) -> int:
    """Return the threads that a call's work is worth, shared in so many items."""
    work = a.q.shape[-1] * a.v.size
    return threads_for(items, 1 + _GRAIN * items // max(work, 1))


@register("gated_delta_rule", "cython")
def gated_delta_rule(a: Any, y: Any) -> None:
    sequences, heads = num_sequences(a), a.v.shape[2]
    if sequences and a.v.shape[3]:
        threads = _threads(a, sequences * heads)
        _delta.forward(*_arguments(a), None, y.out, y.final_state, sequences, threads)


@register("gated_delta_rule_vjp", "cython")
def gated_delta_rule_vjp(a: Any, y: Any) -> None:
    sequences, values = num_sequences(a), a.v.shape[3]
    if not (sequences and values):
        # Sums over no values.
        clear(y)
        return
    gates = (None if dx is None else dx[..., None] for dx in (y.dg, y.dbeta))
    _delta.backward(
        *_arguments(a),
        laid_out(a.dout, 1),
        a.dfinal_state,
        *(y.dq, y.dk, y.dv, *gates, y.dinitial_state),
        sequences,
        max(_FEWEST, math.isqrt(a.q.shape[1]) // 4 * 2),
        _threads(a, sequences * a.q.shape[2]),
    )


@register("gated_delta_rule_step", "cython")
def gated_delta_rule_step(a: Any, y: Any) -> None:
    if not y.out.size:
        return
    # One token of a sequence has no dimension of tokens, or one of length 1.
    at = np.s_[:, None] if a.q.ndim == 3 else np.s_[:]
    slots = None if a.slots is None else np.ascontiguousarray(a.slots, np.int64)
    sequences, heads = len(a.q), a.v.shape[-2]
    _delta.forward(
        laid_out(a.q, 1)[at],
        laid_out(a.k, 1)[at],
        laid_out(a.v, 1)[at],
        a.g[at][..., None],
        a.beta[at][..., None],
        a.state,
        a.scale,
        None,
        slots,
        y.out[at],
        a.state,
        sequences,
        _threads(a, sequences * heads),
    )
