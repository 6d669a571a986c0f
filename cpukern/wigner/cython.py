"""Rotations of edges by the compiled kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from cpukern import isa
from cpukern.layout import laid_out
from cpukern.so2.cython import STEPS
from cpukern.wigner.factors import with_factors
from fusedops._frame.registry import register
from fusedops._host.threads import threads_for
from fusedops.wigner.rows import degree_of_size, degrees, message_rows

_wigner = isa.load("wigner")
_rotate_of = {
    np.dtype(np.float32): _wigner.rotate["float"],
    np.dtype(np.float64): _wigner.rotate["double"],
}
# Numbers in messages that are worth waking a thread for.
_GRAIN = 1 << 16


class _Degrees(NamedTuple):
    """The layout of every degree's matrix, and the degree's rows of the message.

    places (2, degrees, 3): the offset of the first element that is kept, and the steps to the next
    row of the message and of the node; first in matrices as given, then in their gradient. own
    (degrees, orders): the m-major rows.
    """

    places: np.ndarray
    own: np.ndarray
    degrees: int
    orders: int
    message_rows: int


@functools.lru_cache(maxsize=64)
def _degrees_of(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, mmax: int, way: str
) -> _Degrees:
    """Return the degrees of an edge's matrix of this shape, dense or packed."""
    dense = len(shape) == 2
    lmax = degree_of_size(shape[-1], packed=not dense)
    # In rows and columns of a dense matrix, or in elements of a packed one.
    places = np.empty((lmax + 1, 3, len(shape)), np.int64)
    own_rows = np.zeros((lmax + 1, 2 * mmax + 1), np.int64)
    packed = 0
    for l, (rows, kept, own) in enumerate(degrees(lmax, mmax)):
        size = 2 * l + 1
        row, column = np.eye(2, dtype=int) if dense else ([size], [1])
        own_step, step = np.array((column, row) if way == "back" else (row, column))
        corner = rows.start if dense else packed
        places[l] = corner + kept[0] * own_step, own_step, step
        own_rows[l, : len(own)] = own
        packed += size * size
    steps = np.array(strides) // itemsize
    # Gradients are contiguous.
    own_steps = (shape[1], 1) if dense else (1,)
    both = np.stack([places @ steps, places @ own_steps])
    return _Degrees(both, own_rows, lmax + 1, 2 * mmax + 1, message_rows(lmax, mmax))


@register("edge_wigner", "cython")
def edge_wigner(a: Any, y: Any) -> None:
    with_factors(_rotate, STEPS[a.wigner.dtype], a, y)


def _rotate(a: Any, y: Any) -> None:
    x, edges = a.x, a.edges
    wigner, dwigner = laid_out(a.wigner, 0), y.dwigner
    of = _degrees_of(wigner.shape[1:], wigner.strides[1:], wigner.itemsize, a.mmax, a.way)
    ends = 2 if a.way == "forth" else 1
    channels = a.message.shape[2] // ends if x is None else x.shape[2]
    if edges is None:
        lists = (None,) * 6
    else:
        by_node = edges.by_source, edges.source_ptr, edges.by_target, edges.target_ptr
        lists = edges.source, edges.target, *by_node
    if wigner.ndim == 2:
        wigner = wigner[:, None]
        dwigner = None if dwigner is None else dwigner[:, None]
    _rotate_of[wigner.dtype](
        laid_out(a.base, 3),
        laid_out(x, 3),
        laid_out(a.message, 3),
        wigner,
        *lists,
        *of,
        ends,
        channels,
        a.scale,
        y.dx,
        y.dmessage,
        dwigner,
        threads_for(len(wigner) * of.degrees**2 * channels * ends, _GRAIN),
    )
