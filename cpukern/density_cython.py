"""Density by the compiled kernels: NumPy allocates and lays out, Cython works."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpukern import isa
from fusedops._frame.registry import register
from fusedops._frame.threads import threads_for
from fusedops.density import SLACK, listed

_density = isa.load("density_cython")
_ATOM_BYTES, _NUMBERS, _ROW = _density.sizes()
# Atoms that pay for waking a thread, and slabs of planes of the map, for any number of threads.
_ATOM_GRAIN, _SLABS = 32, 32
_REAL = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


def _set_up(a: Any) -> tuple[Any, ...]:
    """Return arrays as kernels take them, and what they find out first of every atom."""
    xyz, lattice = a.xyz, a.lattice
    given = xyz, a.b.reshape(len(a.b), -1), a.occupancy
    arrays = [np.ascontiguousarray(array) for array in given]
    amplitudes, widths, radius = (
        np.ascontiguousarray(array, dtype=np.float64)
        for array in (a.amplitudes, a.widths, a.radius)
    )
    threads = threads_for(len(xyz), _ATOM_GRAIN)
    atoms = np.empty((len(xyz), _ATOM_BYTES), np.int8)
    numbers = np.empty((len(xyz), _NUMBERS, widths.shape[1]), xyz.dtype)
    boxes = np.empty((len(xyz), 3, 2), np.int64)
    _density.set_up[_REAL[xyz.dtype]](
        lattice.shape,
        lattice.step,
        lattice.to_grid,
        lattice.measures[9:12],
        lattice.images,
        *arrays,
        amplitudes,
        widths,
        # One that is infinite stays what it is: of an atom without a density.
        np.where(radius < np.inf, np.minimum(radius, lattice.measures[-1]), radius),
        SLACK,
        threads,
        atoms,
        numbers,
        boxes,
    )
    common = lattice.shape, lattice.step, lattice.images, atoms, numbers
    return common, [*arrays, amplitudes, widths], boxes, threads


def _padded(extent: np.ndarray) -> int:
    """Return the largest of some numbers of voxels, up to a whole vector and one more."""
    return (int(extent.max(initial=1)) // _ROW + 2) * _ROW


@register("gaussian_density", "cython")
def gaussian_density(a: Any, y: Any) -> None:
    xyz, b, lattice = a.xyz, a.b, a.lattice
    out = y.map
    if out is None:
        return
    if not len(xyz):
        out[...] = 0
        return
    common, arrays, boxes, threads = _set_up(a)
    low, high = boxes[..., 0], boxes[..., 1]
    slab = -(-lattice.nx // _SLABS)
    extent = high - low + 1
    most, pitch = _padded(extent[:, :2]), _padded(extent[:, 2])
    scratch = pitch + most + (3 * most + pitch) * common[-1].shape[2]
    _density.splat[_REAL[xyz.dtype]](
        *common,
        b.ndim == 1 and not lattice.oblique,
        arrays[2],
        *listed(low[:, 0], high[:, 0], lattice.nx, slab),
        slab,
        out,
        # Lanes without a voxel are computed too: what was left there may be denormal, and slow.
        np.zeros((threads, scratch), xyz.dtype),
        np.zeros((threads, 2 * most)),
        most,
        pitch,
    )


@register("gaussian_density_vjp", "cython")
def gaussian_density_vjp(a: Any, y: Any) -> None:
    xyz, b, cotangent, lattice = a.xyz, a.b, a.dmap, a.lattice
    on_xyz, on_b, on_occupancy = y
    if not len(xyz):
        return
    common, arrays, boxes, threads = _set_up(a)
    extent = boxes[..., 1] - boxes[..., 0] + 1
    most, pitch = _padded(extent[:, :2]), _padded(extent[:, 2])
    G = common[-1].shape[2]
    scratch = most * (4 * G + 2 + pitch) + G * (pitch + 5 * _ROW)
    # What nobody wants is computed all the same: it costs no more than what somebody does.
    outputs = [
        np.empty(like.shape, like.dtype) if given is None else given.reshape(like.shape)
        for given, like in zip((on_xyz, on_b, on_occupancy), arrays[:3], strict=True)
    ]
    _density.splat_vjp[_REAL[xyz.dtype]](
        *common,
        b.ndim == 1 and not lattice.oblique,
        *arrays[1:],
        np.ascontiguousarray(cotangent),
        *outputs,
        np.zeros((threads, scratch), xyz.dtype),
        np.zeros((threads, 2 * most)),
        np.empty((threads, most), np.intp),
        np.empty((threads, -(-10 * G // 8) * 8)),
        most,
        pitch,
    )
