"""Where the elements of cubes lie in a map, sorted for kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fusedops._frame.arrays import either, int64, namespace
from fusedops._frame.check import (
    alike,
    device_of,
    flag,
    indices,
    is_tensor,
    of_shape,
    on_host,
    size,
)
from fusedops._frame.packed import Packed
from fusedops._host.threads import in_parallel

if TYPE_CHECKING:
    from typing_extensions import Self

# The number of cubes whose extremes are worth waking a thread for.
_GRAIN = 1 << 10
# Devices whose kernels need the cubes sorted.
_GPUS = ("cuda", "xpu")
#: The elements along each axis of a grid tile, which one program on a GPU owns. It stands here, not
#: with the kernels, because a plan on a GPU lists the cubes of every tile.
TILE = (4, 8, 16)
#: The bits of each offset in a pair of a tile and a cube, see `_pairs`.
FIELD = 10
_LONGEST = 1 << FIELD - 1


class Sorted(NamedTuple):
    """The tensors of a plan that kernels on a GPU read.

    If all cubes are boxes of one periodic grid, every program owns a tile of it; otherwise
    `origins`, `begin` and `pairs` are empty.
    """

    wa: Any
    wbwc: Any
    #: The indices of the cubes, sorted by the offset of their first element (C,).
    order: Any
    #: The grid coordinates of every cube's first element (C, 3).
    origins: Any
    #: Where the pairs of each tile begin (tiles + 1,).
    begin: Any
    #: The pairs of a tile and a cube that meet (P,), see `_pairs`.
    pairs: Any


class ScatterPlan(Packed):
    r"""Where the elements of cubes lie in a map, checked and sorted once for many calls.

    Element (c, i, j, k) of the cubes lies at ``wa[c, i] + wbwc[c, j, k]``.

    Parameters
    ----------
    wa : array or tensor (C, nx), int32 or int64
        Offsets of the planes of every cube.
    wbwc : array or tensor (C, ny, nz), int32 or int64
        Offsets within a plane. Cubes may wrap around, overlap, and repeat an element.
    map_size : int
        The number of elements of the map.
    copy : bool
        Whether to copy the arrays. If not, they must not change while the plan is in use.

    Attributes
    ----------
    map_size : int
        As given.
    shape : tuple of int
        The shape of the cubes, (C, nx, ny, nz).
    device : str
        ``"cpu"``, where NumPy arrays and torch tensors are both served, or a torch device.

    Raises
    ------
    TypeError, ValueError
        If an array has the wrong dtype, shape or device, or `map_size` is not a size.
    IndexError
        If an element lies outside of the map; the message names the first.

    Notes
    -----
    Arrays on a GPU stay there, and checking them waits for the GPU. ``to`` copies a plan to
    another device.

    Examples
    --------
    >>> import fusedops
    >>> plan = fusedops.ScatterPlan([[0, 4]], [[[0, 1], [2, 3]]], map_size=8)
    >>> plan.shape, plan.map_size
    ((1, 2, 2, 2), 8)
    """

    _fields = ("wa", "wbwc")
    _sizes = ("map_size",)
    _given = ("wa", "wbwc")
    _options = ("map_size",)
    # Whether some of the arrays are NumPy's, given to one call without a plan.
    _lent = False

    def __init__(self, wa: Any, wbwc: Any, map_size: int, *, copy: bool = True) -> None:
        flag("ScatterPlan", "copy", copy)
        self._lay_out(wa, wbwc, map_size, copy)
        self.checked()
        self._settled()

    def _lay_out(self, wa: Any, wbwc: Any, map_size: int, copy: bool) -> None:
        given = wa, wbwc
        wa, wbwc = _indices(wa, wbwc)
        map_size = size("ScatterPlan", "map_size", map_size, bits=60)
        if device_of(wa) != "cpu":
            with namespace(wa).inference_mode(False):
                dense = [array.contiguous() for array in (wa, wbwc)]
                wa, wbwc = (array.clone() for array in dense) if copy else dense
            self._hold(wa=wa, wbwc=wbwc, map_size=map_size)
            return
        wa, wbwc = (_dense(array, copy) for array in (wa, wbwc))
        borrowed = () if copy else tuple(filter(is_tensor, given))
        self._hold(wa=wa, wbwc=wbwc, map_size=map_size, borrowed=borrowed)

    @classmethod
    def made_of(cls, wa: Any, wbwc: Any, *, map_size: int) -> Self:
        """Return a plan; on the CPU the formula or kernel that reads it checks its arrays."""
        if device_of(wa) != "cpu":
            return cls(wa, wbwc, map_size)
        self = cls.__new__(cls)
        self._lay_out(wa, wbwc, map_size, copy=False)
        self.__dict__["_lent"] = not (is_tensor(wa) and is_tensor(wbwc))
        return self

    def apart(self) -> Self:
        """Return this plan, or a copy if it is of NumPy arrays given to one call."""
        if not self._lent:
            return self
        copied = type(self).__new__(type(self))
        copied._lay_out(self.wa, self.wbwc, self.map_size, copy=True)
        return copied

    @classmethod
    def foresee(cls, wa: Any, wbwc: Any, *, map_size: int) -> dict[str, Any]:
        """Return the attributes that don't depend on the tensors' values."""
        return {"map_size": map_size}

    def to(self, device: Any) -> Self:
        """Return the same plan on a torch device, or this one if it is there already."""
        return super().to(device)._settled()

    def _settled(self) -> Self:
        """Return this plan, sorted if on a GPU: in a CUDA graph a call can't wait for the sort."""
        if self._on_gpu():
            _ = self._sorted
        return self

    def _on_gpu(self) -> bool:
        return self.unread is None and self.device.startswith(_GPUS)

    @functools.cached_property
    def _sorted(self) -> tuple[Sorted, tuple[int, int, int]]:
        if self.device == "cpu":
            self.checked()
        tensors = super().tensors_here()
        with namespace(tensors.wa).inference_mode(False):
            return _sort(tensors.wa, tensors.wbwc, self.map_size)

    @property
    def sorted(self) -> Sorted:
        """The tensors that kernels on a GPU read."""
        return self._sorted[0]

    @property
    def grid(self) -> tuple[int, int, int]:
        """The planes, rows and columns of the periodic grid; zeros where there is none."""
        return self._sorted[1]

    @property
    def reach(self) -> tuple[Any, Any]:
        """The smallest and the largest in-plane offset of every cube, checked against the map.

        Raises IndexError if an element lies outside of the map.
        """
        # Before Python 3.12 a cached property has a lock for all plans, which a fork may find held.
        return self.derived(ScatterPlan._reach)

    def _reach(self) -> tuple[Any, Any]:
        reach = _extremes(self.wbwc)
        if 0 not in self.shape:
            self._check(*reach)
        return reach

    def checked(self) -> Self:
        """Return this plan, or raise IndexError if an element lies outside of the map."""
        _ = self.reach
        return self

    def _check(self, low: Any, high: Any) -> None:
        wa, wbwc = self.wa, self.wbwc
        low, high = low[:, None], high[:, None]
        bad = (wa + low < 0) | (wa + high >= self.map_size)
        # A sum of two offsets may overflow 64 bits; two large ones then give a negative number.
        bad |= (wa < 0) & (low < 0) | (wa + high < 0)
        if not bad.any():
            return
        c, i = (int(at[0]) for at in on_host(bad).nonzero())
        at = int(wa[c, i]) + on_host(wbwc[c]).astype(object)
        j, k = (int(n[0]) for n in ((at < 0) | (at >= self.map_size)).nonzero())
        raise IndexError(
            f"ScatterPlan: wa[{c}, {i}] + wbwc[{c}, {j}, {k}] is {at[j, k]}; it should be in "
            f"[0, {self.map_size}), map_size"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the cubes, (C, nx, ny, nz)."""
        wa, wbwc = self.arrays()
        return *wa.shape, *wbwc.shape[1:]

    def tensors_here(self) -> Any:
        """Return a record of the arrays as torch tensors; on a GPU, `sorted`."""
        return self.sorted if self._on_gpu() else super().tensors_here()

    def sizes(self) -> list[int]:
        """Return the numbers that go with the arrays; on a GPU, with the grid."""
        return [*super().sizes(), *self.grid] if self._on_gpu() else super().sizes()

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any], sizes: Sequence[int]) -> Self:
        """Return the plan with these tensors and numbers, the inverse of `flat`."""
        wa, wbwc, *more = tensors
        map_size, *grid = sizes
        parts = {"wa": wa, "wbwc": wbwc, "map_size": map_size}
        if more:
            parts["_sorted"] = Sorted._make(tensors), tuple(grid)
        self = cls.__new__(cls)
        self._hold(**parts)
        return self

    def __repr__(self) -> str:
        count, *edges = self.shape
        cubes = f"{count} cubes of {' × '.join(map(str, edges))}"
        return f"ScatterPlan({cubes}, map of {self.map_size}, on {self.device})"


def _dense(array: Any, copy: bool) -> np.ndarray:
    """Return an index array as CPU kernels take it: contiguous and aligned."""
    values = on_host(array)
    dense = np.array(values, order="C") if copy else np.require(values, None, ["C", "A"])
    # NumPy ignores strides of axes of one element and of empty arrays; torch doesn't.
    return np.ndarray(dense.shape, dense.dtype, dense)


def _indices(wa: Any, wbwc: Any) -> tuple[Any, Any]:
    """Return checked index arrays of one dtype and device."""
    given = []
    for name, array, rank in (("wa", wa, ("C", "nx")), ("wbwc", wbwc, ("C", "ny", "nz"))):
        array = indices("ScatterPlan", name, array)
        of_shape("ScatterPlan", name, array, rank)
        given.append(array)
    wa, wbwc = given
    alike("ScatterPlan", "wbwc", wbwc, "wa", wa)
    if len(wa) != len(wbwc):
        raise ValueError(
            f"ScatterPlan: wbwc has shape {tuple(wbwc.shape)}; its first size should be {len(wa)}, "
            "that of wa"
        )
    if wa.dtype != wbwc.dtype:
        wa, wbwc = (int64(array) for array in (wa, wbwc))
    return wa, wbwc


def _extremes(wbwc: Any) -> tuple[Any, Any]:
    """Return the smallest and the largest offset of every cube, as int64."""
    return either(wbwc, _extremes_here, _extremes_there)(wbwc)


def _extremes_there(wbwc: Any) -> tuple[Any, Any]:
    flat = wbwc.flatten(1)
    return (flat.amin(1).long(), flat.amax(1).long()) if flat.shape[1] else (flat, flat)


def _extremes_here(wbwc: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = wbwc.reshape(len(wbwc), int(np.prod(wbwc.shape[1:])))
    low, high = np.zeros((2, len(flat)), np.int64)

    def some(begin: int, end: int) -> None:
        # 256 cubes are still in the cache when the maximum reads them again.
        for at in range(begin, end, 256):
            rows = slice(at, min(at + 256, end))
            low[rows], high[rows] = flat[rows].min(1), flat[rows].max(1)

    if flat.size:
        in_parallel(some, len(flat), _GRAIN)
    return low, high


def _sort(wa: Any, wbwc: Any, map_size: int) -> tuple[Sorted, tuple[int, int, int]]:
    """Return the tensors that kernels on a GPU read, and the grid."""
    first = wa[:, :1].long() + wbwc.flatten(1)[:, :1]
    order = first[:, 0].argsort() if first.numel() else wa.new_zeros(len(wa)).long()
    found = _grid(wa, wbwc, map_size)
    if found is None:
        # Three tensors, not one thrice: the tape tells arguments apart by their tensors.
        return Sorted(wa, wbwc, order, *[order.new_empty(0) for _ in range(3)]), (0, 0, 0)
    grid, origins = found
    begin, pairs = _pairs(origins, (wa.shape[1], *wbwc.shape[1:]), grid)
    return Sorted(wa, wbwc, order, origins, begin, pairs), grid


def _grid(wa: Any, wbwc: Any, map_size: int) -> tuple[tuple[int, int, int], Any] | None:
    """Return the periodic grid that has all cubes as boxes, and their origins in it (C, 3).

    Return None if there is no such grid. Reads the values of the tensors.
    """
    torch = namespace(wa)
    count, nx = wa.shape
    ny, nz = wbwc.shape[1:]
    if min(count, nx - 1, ny - 1, nz) < 1:
        return None
    # Steps that wrap around are negative, so the largest step is the grid's.
    columns, plane = (int((a[:, 1:] - a[:, :-1]).amax()) for a in (wbwc[:, :, 0], wa))
    if columns < 1 or plane < 1 or plane % columns or map_size % plane:
        return None
    grid = map_size // plane, plane // columns, columns
    if any(
        n > min(size, _LONGEST) or size >> 31
        for n, size in zip(wa.shape[1:] + wbwc.shape[1:], grid, strict=True)
    ):
        return None
    first = wa[:, 0].long() + wbwc[:, 0, 0]
    x, y, z = first // plane, first % plane // columns, first % columns

    def along(at: Any, n: int, size: int) -> Any:
        """Return the distances of an axis's elements from the first one, in elements."""
        return (at[:, None] + torch.arange(n, device=at.device)) % size - at[:, None]

    along_x = along(x, nx, grid[0]) * plane
    along_yz = (along(y, ny, grid[1]) * columns)[:, :, None] + along(z, nz, columns)[:, None]
    if (wa - wa[:, :1] != along_x).any() or (wbwc - wbwc[:, :1, :1] != along_yz).any():
        return None
    return grid, torch.stack([x, y, z], 1).int()


def _pairs(origins: Any, shape: Sequence[int], grid: Sequence[int]) -> tuple[Any, Any]:
    """Return where the pairs of each tile begin (tiles + 1,), and all pairs (P,), int64.

    A pair holds the cube's index above three fields of `FIELD` bits, one for each axis: the tile's
    first element less the cube's, plus half of the field's range. A cube that wraps around may meet
    a tile twice.
    """
    torch = namespace(origins)
    n, size, tile = (origins.new_tensor(values).long() for values in (shape, grid, TILE))
    origins = origins.long()
    before = ((origins + n).minimum(size) - 1) // tile - origins // tile + 1
    beyond = ((origins + n - size).clamp(min=0) + tile - 1) // tile
    counts = before + beyond
    many = counts.prod(1)
    cube = torch.arange(len(origins), device=origins.device).repeat_interleave(many)
    at = torch.arange(len(cube), device=cube.device) - (many.cumsum(0) - many)[cube]
    key, pair, stride = torch.zeros_like(cube), cube, 1
    tiles = [-(-size // width) for size, width in zip(grid, TILE, strict=True)]
    for d in (2, 1, 0):
        step = at % counts[cube, d]
        at = at // counts[cube, d]
        wrapped = step >= before[cube, d]
        number = torch.where(wrapped, step - before[cube, d], origins[cube, d] // tile[d] + step)
        shift = number * tile[d] - origins[cube, d] + torch.where(wrapped, size[d], 0)
        pair = pair << FIELD | (shift + _LONGEST)
        key = key + number * stride
        stride *= tiles[d]
    key, order = key.sort(stable=True)
    begin = torch.searchsorted(key, torch.arange(stride + 1, device=key.device))
    return begin, pair[order]


def read_plan(name: str, wa: Any, wbwc: Any, map_size: int | None, argument: str, like: Any) -> Any:
    """Return a checked plan on the device of `like`."""
    if map_size is not None:
        map_size = size(name, "map_size", map_size, bits=60)
    if isinstance(wa, ScatterPlan):
        if wbwc is not None or map_size not in (None, wa.map_size):
            other = "map_size" if wbwc is None else "wbwc"
            raise TypeError(f"{name}: {other} is given; a ScatterPlan for wa has it already")
    elif wbwc is None or map_size is None:
        missing = "wbwc" if wbwc is None else "map_size"
        raise TypeError(
            f"{name}: {missing} is None; it should be given, unless wa is a ScatterPlan"
        )
    plan = ScatterPlan.given(name, (argument, like), wa, wbwc, map_size=map_size)
    # Autograd sees no writes to NumPy arrays.
    return plan.apart() if is_tensor(like) else plan
