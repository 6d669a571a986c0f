"""Density by the compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpukern import isa
from fusedops._frame.registry import register
from fusedops._host.threads import threads_for
from fusedops.density.op import SLACK, clamped, clamping, tangents_of

_density = isa.load("density")
_NAMES = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
_splat_of = {dtype: _density.splat[name] for dtype, name in _NAMES.items()}
_splat_vjp_of = {dtype: _density.splat_vjp[name] for dtype, name in _NAMES.items()}
# Atoms that are worth waking a thread for.
_GRAIN = 32


def _arguments(a: Any) -> tuple[Any, ...]:
    """Return the arguments that both passes share."""
    xyz, lattice = a.xyz, a.lattice
    return (
        (*lattice.grid, lattice.start, lattice.stop - lattice.start),
        lattice.step,
        lattice.to_grid,
        lattice.measures,
        np.ascontiguousarray(xyz),
        np.ascontiguousarray(a.b),
        np.ascontiguousarray(a.occupancy),
        np.ascontiguousarray(a.amplitudes, np.float64),
        np.ascontiguousarray(a.widths, np.float64),
        np.ascontiguousarray(a.radius, np.float64),
        SLACK,
        a.b.ndim == 1 and not lattice.oblique,
        threads_for(len(xyz), _GRAIN),
    )


@register("gaussian_density", "cython")
def gaussian_density(a: Any, y: Any) -> None:
    if y.map is None:
        return
    if a.clamp:
        a, _ = clamped(a)
    if len(a.xyz) and y.map.size:
        _splat_of[a.xyz.dtype](*_arguments(a), None, y.map)
    else:
        y.map[...] = 0


@register("gaussian_density_vjp", "cython")
@clamping
def gaussian_density_vjp(a: Any, y: Any) -> None:
    if len(a.xyz):
        _splat_vjp_of[a.xyz.dtype](*_arguments(a), None, np.ascontiguousarray(a.dmap), *y)


@register("gaussian_density_vjp_vjp", "cython")
def gaussian_density_vjp_vjp(a: Any, y: Any) -> None:
    *gradients, ddmap = y
    if not len(a.xyz):
        if ddmap is not None:
            ddmap[...] = 0
        return
    arguments = *_arguments(a), tuple(map(np.ascontiguousarray, tangents_of(a)))
    if ddmap is not None and ddmap.size:
        _splat_of[a.xyz.dtype](*arguments, ddmap)
    if any([gradient is not None for gradient in gradients]):
        dmap = np.ascontiguousarray(a.dmap)
        _splat_vjp_of[a.xyz.dtype](*arguments, dmap, *gradients)
