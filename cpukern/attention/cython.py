"""Triangle attention by the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpukern import isa
from cpukern.attention.parts import parts_of
from cpukern.layout import clear, laid_out
from fusedops._frame.registry import register
from fusedops._host.threads import threads_for
from fusedops.attention.op import MISSING

_attention = isa.load("attention")
# Products of a query's and a key's channels that are worth waking a thread for.
_GRAIN = 1 << 18


def _arguments(a: Any) -> tuple[Any, ...]:
    """Return the arguments that both passes share."""
    edges = (laid_out(x, 1) for x in (a.q, a.k, a.v, a.bias))
    mask = None if a.mask is None else np.ascontiguousarray(a.mask).view(np.uint8)
    return (*edges, mask, a.scale, MISSING)


def _threads(a: Any, items: int) -> int:
    """Return the threads that a call's work is worth, shared in so many items."""
    work = a.q.size * a.k.shape[2]
    return threads_for(items, 1 + _GRAIN * items // max(work, 1))


@register("triangle_attention", "cython")
def triangle_attention(a: Any, y: Any) -> None:
    if a.q.size:
        items = a.q.shape[0] * a.q.shape[1] * a.q.shape[3]
        _attention.forward(*_arguments(a), y.out, y.lse, _threads(a, items))


@register("triangle_attention_vjp", "cython")
def triangle_attention_vjp(a: Any, y: Any) -> None:
    if not a.q.size:
        # Sums over no rows, or no queries.
        clear(y)
        return
    batch, _, queries, heads, _ = a.q.shape
    parts = parts_of(a)
    sums = (batch, heads, parts, queries, a.k.shape[2])
    _attention.backward(
        *_arguments(a),
        laid_out(a.dout, 1),
        *(y.dq, y.dk, y.dv, y.dbias),
        np.empty(sums if y.dbias is not None else (1, 1, parts, 1, 1), a.q.dtype),
        _threads(a, batch * heads * parts),
    )
