"""A unit cell with a grid on it, and the cells and grids that it may be made of."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from fusedops._frame.arrays import as_tensor
from fusedops._frame.check import (
    device_of,
    is_traced,
    no_derivative,
    of_shape,
    size,
    values,
)
from fusedops._frame.packed import Packed, outside_of_graphs

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import Tensor

#: A matrix (3, 3) from fractional to Cartesian coordinates, Å.
CellLike = Union["ArrayLike", "Tensor"]

#: The most voxels of the box around an atom, so that no radius takes hours or overflows an integer.
MOST_VOXELS = 1 << 27

# Limits of edges, Å, such that squared voxel steps of any grid are within float32.
_SHORTEST, _LONGEST = 1e-9, 1e9

# The least volume of a cell, in products of its edges, that leaves positions most of their digits.
# No crystal comes near to it.
_FLATTEST = 1e-6


class Lattice(Packed):
    r"""A unit cell with a grid on it, laid out once for many calls.

    Parameters
    ----------
    cell : array (3, 3)
        The matrix from fractional to Cartesian coordinates, Å: its columns are the cell's edges.
    grid_shape : (int, int, int)
        The number of voxels along each edge; voxel (i, j, k) is at the fractional coordinates
        (i/nx, j/ny, k/nz).

    Attributes
    ----------
    shape : tuple of int
        The map's: as given, or with fewer planes along the first axis, see `slab`.
    grid : tuple of int
        As given.
    device : str
        ``"cpu"``, where NumPy arrays and torch tensors are both served, or a torch device.
    largest_radius : float
        The largest radius of an atom, Å: the box around it has 2²⁷ voxels, as many as 512³.

    Raises
    ------
    TypeError, ValueError
        If the shape isn't three positive sizes, or the cell isn't of real numbers, requires grad,
        has an edge below 1e-9 or above 1e9 Å, or has no volume: less than a millionth of the
        product of its edges.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> fusedops.Lattice(np.diag([10.0, 20.0, 30.0]), (20, 40, 60)).shape
    (20, 40, 60)
    """

    # step (3, 3): columns from a voxel to the next; to_grid: its inverse. measures (10,): c, yy,
    # yz, zz, u, v of the squared length c (x + u y + v z)² + yy y² + 2 yz y z + zz z²; for each
    # axis the most voxels that 1 Å reaches; the largest radius. oblique: whether the steps along y
    # and z are not at right angles; skewed: whether any two steps are not. The map has the planes
    # from start to stop of the nx of the cell.
    _fields = ("step", "to_grid", "measures")
    _sizes = ("nx", "ny", "nz", "oblique", "skewed", "start", "stop")
    _given = ("cell",)
    _options = ("nx", "ny", "nz")

    def __init__(self, cell: CellLike, grid_shape: Sequence[int]) -> None:
        cell = read_cell("Lattice", cell)
        _check_edges("Lattice", cell)
        nx, ny, nz = shape = grid_sizes("Lattice", grid_shape)
        step = cell / shape
        to_grid = np.linalg.inv(step)
        metric = step.T @ step
        along = metric[0, 1:] / metric[0, 0]
        rest = metric[1:, 1:] - np.outer(along, metric[0, 1:])
        reach = np.linalg.norm(to_grid, axis=1)
        form = metric[0, 0], rest[0, 0], rest[0, 1], rest[1, 1], *along
        edges = step / np.linalg.norm(step, axis=0)
        xy, xz, yz = np.abs((edges.T @ edges)[[0, 0, 1], [1, 2, 2]]) > 1e-12
        self._hold(
            step=step,
            to_grid=to_grid,
            measures=np.array([*form, *reach, _largest_radius(reach)]),
            nx=nx,
            ny=ny,
            nz=nz,
            oblique=int(yz),
            skewed=int(xy or xz or yz),
            start=0,
            stop=nx,
        )

    @classmethod
    def made_of(cls, cell: Any, *, nx: int, ny: int, nz: int) -> Lattice:
        """Return the object that a tensor and a grid's sizes describe."""
        return cls(cell, (nx, ny, nz))

    @classmethod
    def foresee(cls, cell: Any, *, nx: int, ny: int, nz: int) -> dict[str, Any]:
        """Return the sizes that don't depend on the tensor's values."""
        return {"nx": nx, "ny": ny, "nz": nz, "start": 0, "stop": nx}

    @outside_of_graphs
    def slab(self, start: int, stop: int) -> Lattice:
        """Return the lattice of some planes of the map, which has no other voxels then.

        Parameters
        ----------
        start, stop : int
            The planes `start` to `stop` - 1 along the first edge, counted in the whole grid;
            0 <= start <= stop <= nx. Without a plane the map is empty.

        Returns
        -------
        Lattice
            Of the same cell and grid, on the same device, and of shape (stop - start, ny, nz).

        Raises
        ------
        TypeError, ValueError
            If the planes aren't ints, or there are no such planes.

        Notes
        -----
        With it `gaussian_density` draws the part of every atom, and of every image of it, that lies
        in the slab: plane by plane the numbers of the whole map. A gradient is the slab's share of
        the whole map's, and the sum over slabs that make up the cell is all of it.

        Examples
        --------
        >>> import numpy as np, fusedops
        >>> lattice = fusedops.Lattice(np.diag([10.0, 20.0, 30.0]), (20, 40, 60))
        >>> lattice.slab(5, 12).shape
        (7, 40, 60)
        """
        name = "Lattice.slab"
        start, stop = size(name, "start", start), size(name, "stop", stop)
        if start > self.nx:
            raise ValueError(f"{name}: start is {start}; it should be at most {self.nx}, nx")
        if not start <= stop <= self.nx:
            raise ValueError(
                f"{name}: stop is {stop}; it should be from {start}, start, to {self.nx}, nx"
            )
        *sizes, _, _ = self.sizes()
        return self.from_tensors(self.arrays(), [*sizes, start, stop])

    @property
    def grid(self) -> tuple[int, int, int]:
        """The number of voxels along each edge of the cell."""
        return self.nx, self.ny, self.nz

    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of voxels of the map along each axis."""
        return self.stop - self.start, self.ny, self.nz

    @property
    def is_whole(self) -> bool:
        """Whether the map has all planes of the cell."""
        return self.shape == self.grid

    @property
    def largest_radius(self) -> float:
        """The largest radius of an atom, Å."""
        return float(self.measures[9])

    def __repr__(self) -> str:
        planes = "" if self.is_whole else f", planes {self.start} to {self.stop - 1}"
        return f"Lattice({self.nx} × {self.ny} × {self.nz} voxels{planes}, on {self.device})"


def grid_sizes(op: str, grid_shape: Any) -> tuple[int, ...]:
    """Return a checked grid_shape."""
    try:
        shape = tuple(grid_shape)
    except TypeError:
        kind = type(grid_shape).__name__
        raise TypeError(f"{op}: grid_shape is a {kind}; it should be three sizes") from None
    if len(shape) != 3:
        raise ValueError(f"{op}: grid_shape is {shape}; it should be three sizes")
    shape = tuple([size(op, "grid_shape", n) for n in shape])
    if 0 in shape:
        raise ValueError(f"{op}: grid_shape is {shape}; its sizes should be positive")
    return shape


def read_cell(op: str, cell: Any) -> np.ndarray:
    """Return a cell as a new array (3, 3) of finite numbers."""
    given = values(op, "cell", cell)
    of_shape(op, "cell", given, (3, 3))
    if given.dtype.kind not in "biufO":
        raise TypeError(f"{op}: cell has dtype {given.dtype}; it should be of real numbers")
    try:
        array = given.astype(np.float64, order="C")
    except TypeError:
        raise TypeError(f"{op}: cell is {cell}; it should be of real numbers") from None
    except OverflowError:
        raise ValueError(
            f"{op}: cell has a number beyond the largest float; it should be finite, with a volume"
        ) from None
    if not np.isfinite(array).all():
        raise ValueError(f"{op}: cell is {array.tolist()}; it should be finite, with a volume")
    return array


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def _check_edges(op: str, cell: np.ndarray) -> None:
    """Raise ValueError if a cell has no volume, or edges beyond the limits."""
    edges = np.linalg.norm(cell, axis=0)
    if not abs(np.linalg.det(cell / edges)) >= _FLATTEST:
        raise ValueError(
            f"{op}: cell is {cell.tolist()}; it should be finite, with a volume of at least "
            f"{_FLATTEST:g} times the product of its edges"
        )
    if edges.min() < _SHORTEST or edges.max() > _LONGEST:
        raise ValueError(
            f"{op}: cell is {cell.tolist()}; its edges should be from {_SHORTEST} to {_LONGEST} Å"
        )


def _largest_radius(reach: np.ndarray) -> float:
    """Return the radius, a float32, whose box has the most voxels; 1 Å reaches `reach` of them."""
    low, high = 0.0, MOST_VOXELS / (2 * reach.max())
    for _ in range(50):
        middle = (low + high) / 2
        fits = (2 * middle * reach + 1).prod() <= MOST_VOXELS
        low, high = (middle, high) if fits else (low, middle)
    # Radii of either dtype then compare alike.
    return float(np.nextafter(np.float32(low), np.float32(0)))


@functools.lru_cache(maxsize=64)
def _lattice(cell: tuple[float, ...], shape: tuple[int, ...], device: str) -> Lattice:
    return Lattice(np.reshape(cell, (3, 3)), shape).to(device)


def read_lattice(name: str, cell: Any, grid_shape: Sequence[int] | None, xyz: Any) -> Lattice:
    """Return the lattice of a cell and a grid, or the one given for both, where `xyz` is."""
    if isinstance(cell, Lattice):
        if grid_shape is not None and grid_sizes(name, grid_shape) != cell.grid:
            raise ValueError(f"{name}: grid_shape is {grid_shape}; the Lattice has {cell.grid}")
        return Lattice.given(name, ("xyz", xyz), cell)
    if grid_shape is None:
        raise TypeError(f"{name}: grid_shape is None; it should be given, unless cell is a Lattice")
    if is_traced(xyz):
        no_derivative(name, "cell", cell)
        nx, ny, nz = grid_sizes(name, grid_shape)
        return Lattice.read(name, as_tensor(cell, "float64"), nx=nx, ny=ny, nz=nz)
    cell = read_cell(name, cell)
    shape = grid_sizes(name, grid_shape)
    return _lattice(tuple(cell.ravel().tolist()), shape, device_of(xyz))
