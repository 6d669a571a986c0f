"""Miller indices, laid out on the grid of a map for many calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fusedops._frame.arrays import contiguous, namespace
from fusedops._frame.check import indices, is_tensor, of_shape, real, values
from fusedops._frame.packed import Packed
from fusedops.crystal.symmetry import PARTS, read_operations
from fusedops.density import CellLike
from fusedops.density.plan import grid_sizes, read_cell


class Reflections(Packed):
    """Miller indices on the grid of a map, laid out once for many calls of `structure_factors`.

    Parameters
    ----------
    hkl : array or tensor (M, 3), int32 or int64
        Miller indices of any sign; repeated ones too.
    cell : array (3, 3)
        The matrix from fractional to Cartesian coordinates, Å, as in `fusedops.gaussian_density`.
    grid_shape : (int, int, int)
        The shape of the map.
    blur : float
        The B that was added to all atoms before the map was made, Å².
    operations : iterable of gemmi.Op, or array (K, 3, 4) or (K, 4, 4), optional
        As in `symmetrize`, whose map then has these structure factors.

    Attributes
    ----------
    shape : tuple of int
        The shape of the map.
    num_reflections : int
        The number of indices.
    device : str
        ``"cpu"``, where NumPy arrays and torch tensors are both served, or a torch device.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or value; or if an index, or its image under an
        operation, is at or beyond the Nyquist limit, half of the grid's size along its axis.

    Notes
    -----
    An operation (R, t) makes exp(2πi h·t) F(h R) of F(h), which takes no pass over the map, and
    any grid fits. A gradient on a GPU sums the waves of an index that is repeated one by one, in
    their order.

    References
    ----------
    Ten Eyck, Acta Cryst. A29 (1973) 183-191.

    Examples
    --------
    >>> import numpy as np
    >>> from fusedops.crystal import Reflections
    >>> Reflections([[1, 0, -2], [0, 2, 3]], np.diag([9.0, 8.0, 7.0]), (20, 20, 20))
    Reflections(2 of a map of 20 × 20 × 20, on cpu)
    """

    # factors (K, M, 2), real and imaginary parts, and in single precision; at (K M,): where a real
    # map's half spectrum has an index, whose factor is the conjugate, or -1 minus where it has the
    # Friedel mate; waves (L,), wave_at (L,): waves, the first K M of which are conjugates, in the
    # order of the places that hold them; begin (P + 1,): the waves of each of the places.
    _fields = ("factors", "single", "at", "waves", "wave_at", "begin")
    _sizes = ("nx", "ny", "nz")

    def __init__(
        self,
        hkl: Any,
        cell: CellLike,
        grid_shape: Sequence[int],
        *,
        blur: float = 0.0,
        operations: Iterable[Any] | None = None,
    ) -> None:
        self._hold(**_layout("Reflections", hkl, cell, grid_shape, blur, operations))

    @classmethod
    def of_call(cls, op: str, *arguments: Any) -> Reflections:
        """Return the object for one call of an op, which errors name."""
        self = cls.__new__(cls)
        self._hold(lasting=False, **_layout(op, *arguments))
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the map."""
        return self.nx, self.ny, self.nz

    @property
    def num_reflections(self) -> int:
        """The number of indices."""
        return int(self.arrays()[0].shape[1])

    def __repr__(self) -> str:
        return (
            f"Reflections({self.num_reflections} of a map of {self.nx} × {self.ny} × "
            f"{self.nz}, on {self.device})"
        )


def as_real(array: Any) -> Any:
    """Return complex numbers as a real array (..., 2)."""
    if is_tensor(array):
        return namespace(array).view_as_real(array.resolve_conj())
    return contiguous(array).view(array.real.dtype).reshape(*array.shape, 2)


def as_complex(array: Any) -> Any:
    """Return a real array (..., 2) as complex numbers."""
    if is_tensor(array):
        # NumPy's empty arrays have strides that torch refuses.
        array = array.contiguous() if array.numel() else array.new_empty(array.shape)
        return namespace(array).view_as_complex(array)
    array = contiguous(array)
    return array.view(np.result_type(array.dtype, np.complex64))[..., 0]


def _layout(
    op: str,
    hkl: Any,
    cell: CellLike,
    grid_shape: Sequence[int],
    blur: float,
    operations: Iterable[Any] | None,
) -> dict[str, Any]:
    """Return the fields and sizes of `Reflections`."""
    hkl = values(op, "hkl", indices(op, "hkl", hkl)).astype(np.int64, copy=False)
    of_shape(op, "hkl", hkl, ("M", 3))
    nx, ny, nz = shape = grid_sizes(op, grid_shape)
    rotations, translations = np.eye(3, dtype=np.int64)[None], np.zeros((1, 3), np.int64)
    if operations is not None:
        rotations, translations = read_operations(operations, op)
    turned = np.einsum("mi,kij->kmj", hkl, rotations)
    every, half = np.concatenate([hkl[None], turned]), -(-np.array(shape) // 2)
    # Twice an index, or the size of the least integer, may overflow.
    beyond = ((every >= half) | (every <= -half)).any(axis=(0, 2))
    if beyond.any():
        first = int(beyond.argmax())
        raise ValueError(
            f"{op}: hkl[{first}] is {tuple(hkl[first].tolist())}; it and its "
            f"equivalents should be below half of the map's shape {shape}"
        )
    phases = np.exp(2j * np.pi / PARTS * (translations @ hkl.T % PARTS))
    plus, in_plus = _half(turned, shape)
    minus, in_minus = _half(-turned, shape)
    kept = np.flatnonzero(np.concatenate([in_plus, in_minus]))
    place = np.concatenate([plus, minus])[kept]
    order = np.argsort(place, kind="stable")
    place = place[order]
    factors = as_real(_factors(op, hkl, cell, blur, nx * ny * nz) * phases)
    return {
        "factors": factors,
        "single": factors.astype(np.float32),
        "at": np.where(in_plus, plus, ~minus),
        "waves": kept[order],
        "wave_at": place,
        "begin": np.append(np.flatnonzero(np.diff(place, prepend=-1)), len(place)),
        "nx": nx,
        "ny": ny,
        "nz": nz,
    }


def _half(hkl: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return where a real map's half spectrum has indices, and whether it has them."""
    _, ny, nz = shape
    h, k, l = (hkl % shape).reshape(-1, 3).T
    return (h * ny + k) * (nz // 2 + 1) + l, l <= nz // 2


def _factors(op: str, hkl: np.ndarray, cell: CellLike, blur: Any, size: int) -> np.ndarray:
    """Return the factors (M,) or () of a map's Fourier sums, which make structure factors."""
    cell = read_cell(op, cell)
    volume = abs(np.linalg.det(cell))
    if not volume > 0:
        raise ValueError(f"{op}: cell is {cell.tolist()}; it should be finite, with a volume")
    if not math.isfinite(real(op, "blur", blur)):
        raise ValueError(f"{op}: blur is {blur!r}; it should be a finite number")
    if not blur:
        return np.array(volume / size)
    s = hkl @ np.linalg.inv(cell)
    exponents = blur / 4 * np.einsum("mi,mi->m", s, s)
    # float32 holds exp(88).
    if exponents.max(initial=0) > 88:
        raise ValueError(
            f"{op}: blur is {blur!r}; it should be so small that exp(blur s²/4) is within float32"
        )
    return volume / size * np.exp(exponents)
