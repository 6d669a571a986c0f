"""Rotations of edges by the compiled kernels: NumPy allocates and lays out, Cython works."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cpukern import isa
from cpukern.layout import laid_out
from fusedops._frame.registry import register
from fusedops._frame.threads import threads_for
from fusedops.wigner import degree_of, degrees, message_rows

_wigner = isa.load("wigner_cython")
# Numbers of messages that pay for waking a thread, and shares of the work, for any number of these.
_ROTATION_GRAIN, _SHARES = 1 << 16, 256
_REAL = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


@functools.lru_cache(maxsize=64)
def _places(lmax: int, mmax: int, way: str, dense: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return of every degree where its matrix begins, and its m-major rows.

    The former is the first element that is kept, and the steps to those of the next row of the
    message and of the node, all to be multiplied by the steps of a dense matrix's rows and columns,
    or of a packed one's elements.
    """
    places = np.empty((lmax + 1, 3, 2 if dense else 1), np.int64)
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
    return places, own_rows


def _shares(pointers: np.ndarray, nodes: int) -> np.ndarray:
    """Return where shares of the nodes begin that have about as many edges."""
    marks = pointers[-1] * np.arange(1, _SHARES) // _SHARES
    return np.concatenate([[0], np.searchsorted(pointers, marks).clip(max=nodes), [nodes]])


@register("edge_wigner", "cython")
def edge_wigner(a: Any, y: Any) -> None:
    base, x, message, wigner, edges, mmax, way, scale = a
    on_x, on_message, on_wigner = y
    lmax, ends = degree_of(wigner), 2 if way == "forth" else 1
    channels = x.shape[2] if x is not None else message.shape[2] // ends
    count = len(wigner)
    wigner = laid_out(wigner, 0)
    lists: tuple[Any, ...] = (None,) * 6
    pointers = [] if on_x is None else [np.arange(len(on_x) + 1)]
    if edges is not None:
        by_edge = edges.source, edges.target, edges.by_source, edges.by_target
        count = min(count, *[len(nodes) for nodes in by_edge])
        pointers = [edges.target_ptr, edges.source_ptr][:ends]
        lists = (
            *(edges.source, edges.target),
            *(edges.by_source, edges.source_ptr),
            *(edges.by_target, edges.target_ptr),
        )
    if on_x is not None:
        shares = np.stack([_shares(p, len(on_x)) for p in pointers])
    else:
        shares = count * np.arange(_SHARES + 1)[None] // _SHARES
    places, own = _places(lmax, mmax, way, wigner.ndim == 3)
    width = (lmax + 1) ** 2
    size = width * width if wigner.ndim == 3 else wigner.shape[1]
    steps = np.array(wigner.strides[1:]) // wigner.itemsize
    # Gradients of the matrices are contiguous.
    summed = (width, 1) if wigner.ndim == 3 else (1,)
    threads = threads_for(count * width * channels * ends, _ROTATION_GRAIN)
    # Whole cache lines for every thread.
    factors = np.empty((threads, -(-((2 * lmax + 1) ** 2) // 16) * 16), wigner.dtype)
    offsets = np.empty((threads, -(-4 * (lmax + 1) // 8) * 8), np.intp)
    _wigner.rotate[_REAL[wigner.dtype]](
        laid_out(base, 3),
        laid_out(x, 3),
        laid_out(message, 3),
        wigner if wigner.ndim == 3 else wigner[:, None],
        *lists,
        shares,
        np.stack([places @ steps, places @ summed]),
        own,
        ends,
        count,
        channels,
        message_rows(lmax, mmax),
        scale,
        on_x,
        on_message,
        None if on_wigner is None else on_wigner.reshape(len(on_wigner), size),
        factors,
        offsets,
    )
