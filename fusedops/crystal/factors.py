"""Structure factors of a map, by a fast Fourier transform."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fusedops._frame.arrays import ArrayT, add_at, cast, namespace, zeros
from fusedops._frame.check import device_of, same_device
from fusedops._host.threads import get_num_threads
from fusedops.crystal.linear import checked_map, linear, linear_in
from fusedops.crystal.plan import Reflections
from fusedops.density import CellLike


@functools.cache
def _scipy_fft() -> Any:
    return importlib.import_module("scipy.fft") if importlib.util.find_spec("scipy") else None


def _transforms(like: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the real transform of several axes, and its inverse: SciPy's are the fastest."""
    fft = namespace(like).fft
    scipy = _scipy_fft() if fft is np.fft else None
    if scipy is None:
        return fft.rfftn, fft.irfftn
    shared = functools.partial(functools.partial, workers=get_num_threads())
    return shared(scipy.rfftn), shared(scipy.irfftn)


@linear
def structure_factors(
    map: ArrayT,
    hkl: Any,
    cell: CellLike | None = None,
    *,
    blur: float = 0.0,
    operations: Iterable[Any] | None = None,
) -> ArrayT:
    r"""Return structure factors of a map, by a fast Fourier transform.

    .. math:: F(h) = \frac{V}{n} e^{B s^2 / 4} \sum_x \mathrm{map}(x)\, e^{2 \pi i\, h \cdot x}

    Parameters
    ----------
    map : array or tensor (nx, ny, nz), float32 or float64
        The density on the grid of a unit cell of volume V, electrons/Å³ for X-rays, at the
        fractional coordinates x = (i/nx, j/ny, k/nz) of its n voxels.
    hkl : array or tensor (M, 3), int32 or int64; or Reflections
        Miller indices of any sign, repeated ones too; or indices laid out once for many calls,
        which take the place of cell, blur and operations too.
    cell : array (3, 3)
        The matrix from fractional to Cartesian coordinates, Å, as in `fusedops.gaussian_density`;
        of a gemmi.UnitCell, ``cell.orth.mat``.
    blur : float
        The B that was added to all atoms before the map was made, Å²; the factor of the sum takes
        it out again, with s = 1/d.
    operations : iterable of gemmi.Op, or array (K, 3, 4) or (K, 4, 4), optional
        As in `symmetrize`, whose map has these structure factors: summed here, they take no pass
        over the map.

    Returns
    -------
    array or tensor (M,), complex64 or complex128
        Electrons for X-rays.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or value; or if an index is at or beyond the
        Nyquist limit, half of the grid's size along its axis.

    Notes
    -----
    The sign of the phase is that of crystallography and gemmi. The adjoint is one inverse transform
    of the half spectrum: ``structure_factors.vjp`` returns the gradient by `map`, from a cotangent
    ∂L/∂Re F + i ∂L/∂Im F, as in torch; tensors have derivatives of every order. hkl, cell and blur
    have none. NumPy arrays are transformed by SciPy if it is installed, which is faster. Indices on
    a GPU are copied to the host, which waits for the GPU.

    References
    ----------
    Ten Eyck, Acta Cryst. A33 (1977) 486-492, who blurs sharp atoms to use coarser grids.

    Examples
    --------
    >>> import numpy as np
    >>> from fusedops.crystal import structure_factors
    >>> x = np.arange(8) / 8
    >>> rho = np.tile(1 + np.cos(2 * np.pi * x)[:, None, None], (1, 6, 4))
    >>> cell = np.diag([4.0, 3.0, 2.0])
    >>> structure_factors(rho, [[0, 0, 0], [1, 0, 0], [0, 2, 0]], cell).real.round(6).tolist()
    [24.0, 12.0, 0.0]
    """
    op = "structure_factors"
    map = checked_map(op, map)
    shape = tuple(map.shape)
    if isinstance(hkl, Reflections):
        if cell is not None or blur or operations is not None:
            raise TypeError(f"{op}: hkl is a Reflections; cell, blur and operations belong to it")
        if hkl.shape != shape:
            raise ValueError(f"{op}: map has shape {shape}; the Reflections has {hkl.shape}")
        same_device(op, "hkl", hkl.device, "map", device_of(map))
        reflections = hkl
    else:
        if cell is None:
            raise TypeError(f"{op}: cell is None; it should be given, unless hkl is a Reflections")
        reflections = Reflections.of_call(op, hkl, cell, shape, blur, operations)
        reflections = reflections.to(device_of(map))
    single = map.dtype.itemsize == 4

    def parts(like: Any) -> tuple[Any, Any]:
        """Return the factors in the precision of the map, and all fields."""
        fields = reflections.fields_like(like)
        return fields.single if single else fields.factors, fields

    def transform(map: Any) -> Any:
        factors, fields = parts(map)
        forward, _ = _transforms(map)
        found = forward(map).reshape(-1)[fields.at]
        found = namespace(map).where(fields.mated, found.conj(), found)
        return (factors * cast(found, factors).reshape(factors.shape)).sum(0)

    def adjoint(dF: Any) -> Any:
        """Sum a wave for each index; the half spectrum holds it, its Friedel mate, or both."""
        xp = namespace(dF)
        factors, fields = parts(dF)
        halves = (0.5 * factors.conj() * dF).reshape(-1)
        halves = xp.concatenate([halves.conj(), halves])[fields.held]
        nx, ny, nz = shape
        spectrum = zeros(halves, (nx * ny * (nz // 2 + 1),))
        add_at(spectrum, fields.held_at, halves)
        _, backward = _transforms(dF)
        dmap = backward(spectrum.reshape(nx, ny, -1), shape, (0, 1, 2), norm="forward")
        # NumPy 1 transforms in float64.
        return dmap if dmap.dtype == dF.real.dtype else cast(dmap, dF.real)

    return linear_in(map, transform, adjoint)
