"""Structure factors of a map, by a fast Fourier transform."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fusedops._frame import registry
from fusedops._frame.arrays import ArrayT, add_at, cast, namespace, wide, zeros
from fusedops._frame.check import device_of, is_tensor, same_device
from fusedops._frame.primitive import Primitive
from fusedops._host.threads import get_num_threads
from fusedops.crystal.linear import checked_map, linear, linear_in
from fusedops.crystal.plan import Reflections, as_complex, as_real
from fusedops.density import CellLike


@functools.cache
def _scipy_fft() -> Any:
    return importlib.import_module("scipy.fft") if importlib.util.find_spec("scipy") else None


def _transforms(like: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the real transform of several axes, and its inverse: SciPy's are the fastest."""
    fft = namespace(like).fft
    if is_tensor(like):
        # Torch transforms the axes 0 and 1 apart from others, and leaves planes out of order.
        return lambda map: fft.rfftn(map[None], dim=(1, 2, 3)), fft.irfftn
    scipy = _scipy_fft()
    if scipy is None:
        return fft.rfftn, fft.irfftn
    shared = functools.partial(functools.partial, workers=get_num_threads())
    return shared(scipy.rfftn), shared(scipy.irfftn)


def _as_precise(found: Any, like: Any) -> Any:
    """Return a transform's result in the precision of its argument: NumPy 1 computes in float64."""
    if is_tensor(found) or found.real.dtype == like.real.dtype:
        return found
    return cast(found, np.dtype("complex64" if found.dtype.kind == "c" else "float32"))


def _gathered(spectrum: Any, reflections: Reflections) -> Any:
    """Return structure factors from a half spectrum."""
    factors, fields = _factors(reflections, spectrum)
    where, mated = namespace(spectrum).where, fields.at >= 0
    found = spectrum[where(mated, fields.at, ~fields.at)]
    found = where(mated, found.conj(), found)
    return (factors * cast(found, factors).reshape(factors.shape)).sum(0)


def _spread(dF: Any, reflections: Reflections) -> Any:
    """Sum a wave for each index; the half spectrum holds it, its Friedel mate, or both."""
    factors, fields = _factors(reflections, dF)
    halves = (0.5 * factors.conj() * dF).reshape(-1)
    waves = namespace(dF).concatenate([halves.conj(), halves])[fields.waves]
    spectrum = zeros(waves, (_size(reflections),))
    add_at(spectrum, fields.wave_at, waves)
    return spectrum


def _on_pairs(function: Callable[[Any, Reflections], Any], a: Any) -> tuple[Any]:
    """Return a function of complex numbers as a primitive's, of pairs of real ones."""
    pairs, reflections = a
    return (cast(as_real(function(as_complex(wide(pairs)), reflections)), pairs),)


def _factors(reflections: Reflections, like: Any) -> tuple[Any, Any]:
    """Return the factors in the precision of complex numbers, and all fields."""
    fields = reflections.fields_like(like)
    return as_complex(fields.single if like.dtype.itemsize == 8 else fields.factors), fields


def _size(reflections: Reflections) -> int:
    """Return the size of a real map's half spectrum."""
    nx, ny, nz = reflections.shape
    return nx * ny * (nz // 2 + 1)


_SIZES: dict[str, Any] = {
    "M": lambda a: a.reflections.num_reflections,
    "n": lambda a: _size(a.reflections),
}

# Complex numbers are pairs of real ones, which the frame declares alone.
gather = Primitive(
    "spectrum_to_factors",
    family="crystal",
    arrays={"spectrum": "(n, 2)"},
    static={"reflections": Reflections},
    sizes=_SIZES,
    outputs={"factors": "(M, 2)"},
    formula=functools.partial(_on_pairs, _gathered),
)
spread = Primitive(
    "factors_to_spectrum",
    family="crystal",
    arrays={"factors": "(M, 2)"},
    static={"reflections": Reflections},
    sizes=_SIZES,
    outputs={"spectrum": "(n, 2)"},
    formula=functools.partial(_on_pairs, _spread),
)


def _by(
    primitive: Primitive, function: Callable[..., Any], asked: str | None, size: int,
    reflections: Reflections, x: Any,
) -> Any:  # fmt: skip
    """Return `size` complex numbers, by a primitive's kernels if they serve, or by its function."""
    if not registry.triton_may_serve(x, asked):
        return function(x, reflections)
    # A view of pairs as complex numbers could not be written to later.
    y = x.new_empty(size)
    same = asked == registry.forced(None)
    with contextlib.nullcontext() if same else registry.asking(asked):
        primitive(as_real(x), reflections, out=(as_real(y),))
    return y


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

    # A backward pass asks for the same backend, in another thread too.
    asked = registry.forced(None)
    count, size = reflections.num_reflections, _size(reflections)
    gathered = functools.partial(_by, gather, _gathered, asked, count, reflections)
    spread_out = functools.partial(_by, spread, _spread, asked, size, reflections)

    def transform(map: Any) -> Any:
        forward, _ = _transforms(map)
        return gathered(_as_precise(forward(map), map).reshape(-1))

    def adjoint(dF: Any) -> Any:
        _, backward = _transforms(dF)
        spectrum = spread_out(dF).reshape(*shape[:2], -1)
        return _as_precise(backward(spectrum, shape, (0, 1, 2), norm="forward"), dF)

    return linear_in(map, transform, adjoint)
