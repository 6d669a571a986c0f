"""Restraints of geometry by the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpukern import isa
from fusedops._frame.registry import register
from fusedops._host.threads import threads_for

_geometry = isa.load("geometry")
_geometry_of = {
    np.dtype(np.float32): _geometry.geometry["float"],
    np.dtype(np.float64): _geometry.geometry["double"],
}
# Blocks of restraints that are worth waking a thread for.
_GRAIN = 32


def _run(a: Any, dnlls: Any, ddxyz: Any, ddb: Any, second: bool, *outputs: Any) -> None:
    arrays = [
        None if array is None else np.ascontiguousarray(array)
        for array in (a.xyz, a.b, dnlls, ddxyz, ddb)
    ]
    run = _geometry_of[a.xyz.dtype]
    run(*arrays, a.restraints, second, *outputs, _GRAIN, threads_for)


@register("geometry_nll", "cython")
def geometry_nll(a: Any, y: Any) -> None:
    if y.nlls is not None:
        _run(a, None, None, None, False, y.nlls, None, None)


@register("geometry_nll_vjp", "cython")
def geometry_nll_vjp(a: Any, y: Any) -> None:
    _run(a, a.dnlls, None, None, False, None, y.dxyz, y.db)


@register("geometry_nll_vjp_vjp", "cython")
def geometry_nll_vjp_vjp(a: Any, y: Any) -> None:
    _run(a, a.dnlls, a.ddxyz, a.ddb, True, y.ddnlls, y.dxyz, y.db)
