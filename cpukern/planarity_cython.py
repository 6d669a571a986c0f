"""Planarity by the compiled kernels: NumPy allocates, Cython works."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpukern import isa
from fusedops._frame.registry import register
from fusedops._frame.threads import threads_for
from fusedops.planarity import LANES, NO_PLANE

_planarity = isa.load("planarity_cython")
_planarity_of = {
    np.dtype(np.float32): _planarity.planarity["float"],
    np.dtype(np.float64): _planarity.planarity["double"],
}
if _planarity.lanes() != LANES:
    raise ImportError(f"the kernels take blocks of {_planarity.lanes()} planes, not {LANES}")
# Blocks of planes that pay for waking a thread.
_GRAIN = 64


def _run_planarity(xyz: Any, cotangent: Any, planes: Any, fit: str, out: Any) -> float:
    blocks = len(planes.block_ptr) - 1
    threads = threads_for(blocks, _GRAIN)
    return _planarity_of[xyz.dtype](
        np.ascontiguousarray(xyz),
        None if cotangent is None else np.ascontiguousarray(cotangent, dtype=xyz.dtype),
        planes.index,
        planes.weight,
        planes.plane_ptr,
        planes.block_ptr,
        planes.slot,
        planes.reduced,
        planes.reduced_ptr,
        planes.bound,
        planes.per_atom,
        fit == "weighted",
        NO_PLANE,
        out,
        np.empty((0 if out is None else planes.spill, 3), xyz.dtype),
        np.empty((threads, _planarity.scratch_size(planes.largest))),
        np.empty(blocks),
        threads,
    )


@register("planarity_nll", "cython")
def planarity_nll(a: Any, y: Any) -> None:
    xyz, planes, fit = a
    nll, gradient = y
    value = _run_planarity(xyz, None, planes, fit, gradient)
    if nll is not None:
        nll[...] = planes.constant[0] + value


@register("planarity_gradient_vjp", "cython")
def planarity_gradient_vjp(a: Any, y: Any) -> None:
    xyz, cotangent, planes, fit = a
    out = y.dxyz
    _run_planarity(xyz, cotangent, planes, fit, out)
