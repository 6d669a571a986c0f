"""Planarity by the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpukern import isa
from fusedops._frame.registry import register
from fusedops._host.threads import threads_for
from fusedops.planarity.eigenvector import NO_PLANE
from fusedops.planarity.plan import HALF_LOG_2PI, LANES, SCATTERED

_planarity = isa.load("planarity")
_planarity_of = {
    np.dtype(np.float32): _planarity.planarity["float"],
    np.dtype(np.float64): _planarity.planarity["double"],
}
if _planarity.lanes() != LANES:
    raise ImportError(f"the kernels take blocks of {_planarity.lanes()} planes, not {LANES}")
# Blocks of planes that are worth waking a thread for.
_GRAIN = 64


def _run_planarity(a: Any, dgradient: Any, out: Any) -> float:
    xyz, planes = a.xyz, a.planes
    return _planarity_of[xyz.dtype](
        np.ascontiguousarray(xyz),
        None if dgradient is None else np.ascontiguousarray(dgradient),
        planes,
        a.fit == "weighted",
        NO_PLANE,
        out,
        threads_for(len(planes.block_ptr) - 1, _GRAIN),
    )


@register("planarity_nll", "cython")
def planarity_nll(a: Any, y: Any) -> None:
    value = _run_planarity(a, None, y.gradient)
    if y.nll is not None:
        y.nll[...] = a.planes.constant[0] + value


@register("planarity_gradient_vjp", "cython")
def planarity_gradient_vjp(a: Any, y: Any) -> None:
    _run_planarity(a, a.dgradient, y.dxyz)


@register("planes", "cython")
def packing(groups: list[tuple[np.ndarray, np.ndarray]], num_atoms: int) -> dict[str, Any] | None:
    """Return the fields and sizes of `Planes`, or None if a value is bad."""
    return _planarity.packing(groups, num_atoms, HALF_LOG_2PI, SCATTERED)
