"""Groups of atoms to restrain to planes, laid out for kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from fusedops._frame.arrays import as_tensor
from fusedops._frame.check import (
    add_device,
    device_of,
    is_array,
    is_tensor,
    is_traced,
    size,
    values,
)
from fusedops._frame.packed import Packed
from fusedops._frame.registry import compiled, forced
from fusedops.planarity.eigenvector import NO_PLANE as NO_PLANE

Fit = Literal["uniform", "weighted"]
FITS = get_args(Fit)

#: The number of planes that a CPU kernel fits at a time, one in each vector lane. It stands here,
#: not with the kernels, because `Planes` lists these blocks.
LANES = 16

#: The mean distance between a plane's first and last atom, in atoms, from which a GPU's cache can't
#: hold the gradient that neighbouring planes write.
SCATTERED = 2**19

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
MOST_ATOMS = 2**31 - 1


class Planes(Packed):
    r"""Groups of atoms to restrain to planes, checked and laid out once for many calls.

    Parameters
    ----------
    plane_groups : sequence of (indices, sigmas)
        `indices` (P, n) int32 or int64, the atoms of P planes of n ≥ 3 atoms each; `sigmas`, one
        for each plane, (P,) or (P, 1), or each atom (P, n), standard deviations in Å, finite and
        positive. NumPy arrays (or nested lists), or torch tensors on one device, on which the
        object then lives.
    num_atoms : int, optional
        The number of atoms that indices must stay below.

    Attributes
    ----------
    num_planes, num_entries : int
        The number of planes, and of their atoms, summed over all planes.
    bound : int
        One more than the largest index: the least number of atoms that coordinates must have.
    device : str
        ``"cpu"``, where NumPy arrays and torch tensors are both served, or a torch device.

    Raises
    ------
    TypeError, ValueError, IndexError
        If an array has the wrong dtype, shape, device or value; the message names it.

    Notes
    -----
    The arrays are copied, so later changes to them have no effect. Memory grows with the largest
    index. Planes are sorted by their number of atoms, and planes of one size by their first atom,
    so that calls walk through memory in order.

    Examples
    --------
    >>> import fusedops
    >>> planes = fusedops.Planes([([[0, 1, 2, 3]], [0.02]), ([[2, 3, 4], [4, 5, 6]], [0.02, 0.1])])
    >>> planes.num_planes, planes.num_entries, planes.bound
    (3, 10, 7)
    """

    # index: the atoms of all planes, plane after plane; weight: 1/σ² of planes or of entries;
    # plane_ptr: where each plane begins in index; block_ptr: where each run of up to LANES planes
    # of one size begins. An atom in exactly one plane gets its gradient from that plane alone
    # (slot < 0). Every other atom sums rows of a spill array, which planes write in order: entry e
    # writes row slot[e], and atom reduced[r] sums the rows that `summed` has from reduced_ptr[r] to
    # reduced_ptr[r + 1]; an atom in no plane has no rows. If atoms are scattered, all are summed:
    # a gradient read from anywhere is faster than one written anywhere.
    _fields = (
        "index",
        "weight",
        "plane_ptr",
        "block_ptr",
        "slot",
        "reduced",
        "reduced_ptr",
        "summed",
        "constant",
    )
    _sizes = ("bound", "largest", "rows", "spill", "per_atom", "num_planes", "num_entries")
    _given = ("plane_groups",)
    _options = ("num_atoms",)

    def __init__(
        self, plane_groups: Sequence[tuple[Any, Any]], *, num_atoms: int = MOST_ATOMS
    ) -> None:
        self._lay_out(arrays_of(plane_groups), size("Planes", "num_atoms", num_atoms))

    @classmethod
    def made_of(cls, *arrays: Any, num_atoms: int) -> Planes:
        """Return the object that indices and sigmas describe, group after group."""
        self = cls.__new__(cls)
        self._lay_out(arrays, num_atoms, lasting=False)
        return self

    @classmethod
    def _read_once(
        cls, op: str, tensors: Sequence[Any], options: dict[str, Any], in_graph: bool
    ) -> Planes:
        if tensors[0].is_cuda:
            # A CUDA graph wouldn't hold planes that are packed anew after a write.
            cls._refuse_capture(op)
        # To pack planes takes so long that those of CPU tensors are kept too.
        return cls.kept(tensors, options, lambda: cls.made_of(*tensors, **options))

    @classmethod
    def foresee(cls, *tensors: Any, num_atoms: int) -> dict[str, Any]:
        """Return the sizes that don't depend on the tensors' values."""
        num_planes = sum(len(index) for index in tensors[::2])
        num_entries = sum(index.numel() for index in tensors[::2])
        return {"bound": 0, "num_planes": num_planes, "num_entries": num_entries}

    def _lay_out(self, arrays: Sequence[Any], num_atoms: int, *, lasting: bool = True) -> None:
        groups, device = checked_groups(arrays)
        num_atoms = min(num_atoms, MOST_ATOMS)
        pack = compiled("planes", "planarity", forced(None))
        parts = None if pack is None else pack(groups, num_atoms)
        # Compiled code leaves bad planes to the definition, which names the first of them.
        parts = packing(groups, num_atoms) if parts is None else parts
        self._hold(device, lasting=lasting, **parts)

    def __repr__(self) -> str:
        return f"Planes({self.num_planes} planes, {self.num_entries} atoms, on {self.device})"


def flat(groups: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
    """Return the atoms of all planes of groups, their number in each plane, and all σ.

    There is a σ for each plane, or for each atom if a group has that.
    """
    per_atom = any([sigma.ndim == 2 for _, sigma in groups])
    index = np.concatenate([np.empty(0, np.int32), *[index.ravel() for index, _ in groups]])
    n = np.repeat([i.shape[1] for i, _ in groups], [len(i) for i, _ in groups]).astype(np.int64)
    sigma = np.concatenate(
        [np.empty(0)]
        + [
            np.broadcast_to(as_columns(sigma), index.shape).ravel() if per_atom else sigma
            for index, sigma in groups
        ],
        dtype=np.float64,
        casting="same_kind",
    )
    return index, n, sigma


def packing(groups: list[tuple[np.ndarray, np.ndarray]], num_atoms: int) -> dict[str, Any]:
    """Return the fields and sizes of `Planes` of checked groups.

    This is the definition; compiled functions return the same, or None if a value is bad.
    """
    index, n, sigma = flat(groups)
    if not inverse_square(sigma).min(initial=1) > 0:
        _refuse(
            [(sigma, inverse_square(sigma.astype(np.float64)) == 0) for _, sigma in groups],
            "sigmas",
            ValueError,
            "positive, and neither σ nor 1/σ² infinite",
        )
    if index.size and not (index.min() >= 0 and index.max() < num_atoms):
        _refuse(
            [(index, (index < 0) | (index >= num_atoms)) for index, _ in groups],
            "indices",
            IndexError,
            f"from 0 to {num_atoms - 1}",
        )
    num_planes, num_entries = len(n), len(index)
    if num_entries >= MOST_ATOMS:
        raise ValueError(
            f"Planes: plane_groups has {num_entries} indices; it should have fewer than "
            f"{MOST_ATOMS}"
        )
    per_atom = any([sigma.ndim == 2 for _, sigma in groups])
    start = np.cumsum(n) - n
    # Neighbouring planes share cache lines of coordinates and gradient.
    order = np.lexsort((np.minimum.reduceat(index, start), n)) if num_planes else start
    total, n = constant(n, sigma), n[order]
    plane_ptr = np.concatenate([[0], np.cumsum(n)])
    entries = np.repeat(start[order] - plane_ptr[:-1], n) + np.arange(num_entries)
    index, sigma = index[entries], sigma[entries if per_atom else order]
    count = np.bincount(index)
    alone = (count == 1) & (not is_scattered(index, plane_ptr))
    reduced = np.flatnonzero(~alone)
    shared = np.flatnonzero(~alone[index])
    slot = np.full(num_entries, -1, np.int32)
    slot[shared] = np.arange(len(shared))
    return {
        "index": index.astype(np.int32),
        "weight": inverse_square(sigma),
        "plane_ptr": plane_ptr,
        "block_ptr": blocks(n),
        "slot": slot,
        "reduced": reduced.astype(np.int32),
        "reduced_ptr": np.concatenate([[0], np.cumsum(count[reduced])], dtype=np.int64),
        "summed": np.argsort(index[shared], kind="stable").astype(np.int32),
        "constant": total,
        "bound": len(count),
        "largest": int(n.max(initial=0)),
        "rows": len(reduced),
        "spill": len(shared),
        "per_atom": int(per_atom),
        "num_planes": num_planes,
        "num_entries": num_entries,
    }


def is_scattered(index: np.ndarray, plane_ptr: np.ndarray) -> bool:
    """Return whether planes reach over SCATTERED atoms on average, first to last."""
    if len(plane_ptr) == 1:
        return False
    begin = plane_ptr[:-1]
    spans = np.maximum.reduceat(index, begin) - np.minimum.reduceat(index, begin)
    return bool(spans.sum(dtype=np.int64) > SCATTERED * len(begin))


def blocks(n: np.ndarray) -> np.ndarray:
    """Return where blocks of up to LANES planes of one size begin, of sorted sizes n."""
    _, planes = np.unique(n, return_counts=True)
    ends = np.cumsum(planes)
    begin = [np.arange(end - p, end, LANES) for end, p in zip(ends, planes, strict=True)]
    return np.concatenate([*begin, [len(n)]], dtype=np.int64)


def constant(n: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Return the terms of the restraint without coordinates, summed (1,), of planes of n atoms."""
    copies = n if len(sigma) == len(n) else 1
    return np.array([np.sum((np.log(sigma) + HALF_LOG_2PI) * copies)])


def arrays_of(plane_groups: Any) -> list[Any]:
    """Return the indices and sigmas of all groups, one after the other. Raises TypeError."""
    try:
        entries = list(plane_groups)
    except TypeError:
        raise TypeError(
            f"Planes: plane_groups is a {type(plane_groups).__name__}; it should be a sequence of "
            "pairs (indices, sigmas)"
        ) from None
    arrays: list[Any] = []
    for g, entry in enumerate(entries):
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise TypeError(
                f"Planes: plane_groups[{g}] is {type(entry).__name__}; it should be a pair "
                "(indices, sigmas)"
            )
        arrays += entry
    return arrays


def checked_groups(arrays: Sequence[Any]) -> tuple[list[tuple[np.ndarray, np.ndarray]], str]:
    """Return all indices and sigmas as NumPy arrays, and the device that they came from."""
    groups: list[tuple[np.ndarray, np.ndarray]] = []
    devices: dict[str, str] = {}
    for g, (index, sigma) in enumerate(zip(arrays[::2], arrays[1::2], strict=True)):
        group = f"plane_groups[{g}]"
        if not (type(index) is np.ndarray and type(sigma) is np.ndarray):
            pairs = (f"{group} indices", index), (f"{group} sigmas", sigma)
            for name, array in pairs:
                add_device("Planes", devices, name, array)
            index, sigma = (values("Planes", *pair) for pair in pairs)
        if index.dtype.kind != "i":
            raise TypeError(
                f"Planes: {group} indices has dtype {index.dtype}; it should be int32 or int64"
            )
        if index.ndim != 2 or index.shape[1] < 3:
            raise ValueError(
                f"Planes: {group} indices has shape {index.shape}; it should be (P, n) with n ≥ 3"
            )
        if sigma.dtype.kind not in "fi":
            raise TypeError(
                f"Planes: {group} sigmas has dtype {sigma.dtype}; it should be float32 or float64"
            )
        if sigma.shape == (len(index), 1):
            # One for each plane, as no plane has one atom.
            sigma = sigma[:, 0]
        elif sigma.shape not in (index.shape[:1], index.shape):
            raise ValueError(
                f"Planes: {group} sigmas has shape {sigma.shape}; it should be {index.shape[:1]} "
                f"for planes or {index.shape} for atoms"
            )
        groups.append((index, sigma))
    return groups, next(iter(devices.values()), "cpu")


def _refuse(
    groups: list[tuple[np.ndarray, np.ndarray]], name: str, error: type[Exception], should: str
) -> None:
    """Raise an error that names the first bad element of pairs (array, mask of bad elements)."""
    for g, (array, bad) in enumerate(groups):
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise error(
                f"Planes: plane_groups[{g}] {name}{list(at)} is {array[at]}; it should be {should}"
            )


def inverse_square(sigma: np.ndarray) -> np.ndarray:
    """Return 1/σ², or zero where it isn't finite and positive."""
    with np.errstate(all="ignore"):
        weight = (1 / sigma) ** 2
    return np.where((sigma > 0) & (weight < np.inf), weight, 0.0)


def with_planes(*args: Any) -> tuple[Any, ...]:
    """Return an op's arguments with a list of planes packed, if the first is an array of atoms."""
    if len(args) < 2:
        return args
    xyz, plane_groups, *others = args
    dense = is_array(xyz) and not getattr(xyz, "is_nested", False)
    if not (isinstance(plane_groups, (list, tuple)) and dense and xyz.ndim == 2):
        return args
    return xyz, read_planes("Planes", plane_groups, xyz), *others


def read_planes(name: str, plane_groups: Any, xyz: Any) -> Planes:
    """Return the planes of a list; without any, on the device of the atoms."""
    arrays = arrays_of(plane_groups)
    if is_traced(xyz):
        tensors = map(as_tensor, arrays, itertools.cycle(("int64", "float64")))
        return Planes.read(name, *tensors, num_atoms=xyz.shape[0])
    if arrays and all(map(is_tensor, arrays)):
        # Not by `read`, whose checks packing repeats: planes that were kept are found sooner.
        with Planes.outside_of_transforms(name, arrays):
            planes = Planes._read_once(name, arrays, {"num_atoms": xyz.shape[0]}, False)
    else:
        planes = Planes.made_of(*arrays, num_atoms=xyz.shape[0])
    alone = not planes.num_planes and device_of(xyz) != "meta"
    return planes.to(device_of(xyz)) if alone else planes


def as_columns(values: np.ndarray) -> np.ndarray:
    return values[:, None] if values.ndim == 1 else values
