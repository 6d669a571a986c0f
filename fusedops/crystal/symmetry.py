"""Symmetry operations on the grid of a map."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fusedops._frame.arrays import ArrayT, beside, either, namespace, zeros
from fusedops._frame.check import values
from fusedops._host.threads import in_parallel
from fusedops.crystal.linear import checked_map, linear, linear_in

#: Translations of symmetry operations are multiples of 1/24, as in gemmi.
PARTS = 24

# The voxels that are symmetrized at a time: on the CPU their offsets stay in a core's cache.
_CHUNK = 1 << 16
_CHUNK_ON_GPU = 1 << 25

_IDENTITY = ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0))


def read_operations(operations: Any, op: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rotations (K, 3, 3), and translations (K, 3) in 24ths from 0 to 23, as int64."""
    try:
        given = list(operations)
    except TypeError:
        kind = type(operations).__name__
        raise TypeError(
            f"{op}: operations is a {kind}; it should be a list of operations, such as gemmi's "
            "spacegroup.operations()"
        ) from None
    if not given:
        raise ValueError(f"{op}: operations is empty; it should have at least the identity")
    matrices = np.array([_matrix(op, k, operation) for k, operation in enumerate(given)])
    turns, shifts = matrices[:, :, :3], PARTS * matrices[:, :, 3]
    rotations, translations = np.rint(turns), np.rint(shifts)
    with np.errstate(invalid="ignore"):
        turned = (abs(turns - rotations) < 1e-4).all(axis=(1, 2))
        turned &= abs(abs(np.linalg.det(rotations)) - 1) < 0.5
        shifted = (abs(shifts - translations) < 1e-3).all(axis=1)
    if not turned.all():
        k = int(turned.argmin())
        raise ValueError(
            f"{op}: operations[{k}] has the rotation {turns[k].tolist()}; it should be of integers "
            "in fractional coordinates, with determinant 1 or -1"
        )
    if not shifted.all():
        k = int(shifted.argmin())
        raise ValueError(
            f"{op}: operations[{k}] has the translation {matrices[k, :, 3].tolist()}; it should be "
            f"in multiples of 1/{PARTS} of the cell's edges"
        )
    return rotations.astype(np.int64), translations.astype(np.int64) % PARTS


def _matrix(op: str, k: int, operation: Any) -> np.ndarray:
    """Return the matrix [R t] (3, 4) of one operation, in fractional coordinates."""
    if hasattr(operation, "rot") and hasattr(operation, "tran"):
        return np.column_stack([operation.rot, operation.tran]) / PARTS
    name = f"operations[{k}]"
    matrix = values(op, name, operation)
    if matrix.dtype.kind not in "iuf":
        raise TypeError(
            f"{op}: {name} has dtype {matrix.dtype}; it should be a gemmi.Op, or a matrix of real "
            "numbers"
        )
    if matrix.shape not in ((3, 4), (4, 4)):
        raise ValueError(f"{op}: {name} has shape {matrix.shape}; it should be (3, 4) or (4, 4)")
    return matrix[:3].astype(np.float64)


def _moves(
    rotations: np.ndarray, translations: np.ndarray, shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], ...]]:
    """Return operations on a grid's indices: for each axis, three factors and a shift.

    Raises ValueError if an operation moves grid points off the grid.
    """
    size = np.array(shape)
    factors, off = np.divmod(rotations * size[:, None], size)
    shifts, between = np.divmod(translations * size, PARTS)
    bad = off.any(axis=(1, 2)) | between.any(axis=1)
    if bad.any():
        raise ValueError(
            f"symmetrize: map has shape {tuple(shape)}, and operations[{int(bad.argmax())}] moves "
            "grid points off the grid; it should have a shape that fits all operations, such as "
            f"{_fitting(rotations, translations, shape)}"
        )
    return [tuple(map(tuple, move)) for move in np.dstack([factors, shifts]).tolist()]


def _fitting(
    rotations: np.ndarray, translations: np.ndarray, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the smallest shape that is no smaller than `shape` and that operations fit.

    Axes that rotations mix get the same size.
    """
    mixed = (rotations != 0).any(axis=0) | np.eye(3, dtype=bool)
    mixed = np.linalg.matrix_power((mixed | mixed.T).astype(int), 2) > 0
    multiples = [math.lcm(*(PARTS // np.gcd(axis, PARTS)).tolist()) for axis in translations.T]
    fitting = []
    for axes in mixed:
        multiple = math.lcm(*[n for n, together in zip(multiples, axes, strict=True) if together])
        size = max(n for n, together in zip(shape, axes, strict=True) if together)
        fitting.append(-(-size // multiple) * multiple)
    return tuple(fitting)


def _products(rotations: np.ndarray, translations: np.ndarray) -> np.ndarray | None:
    """Return the table (K, K) of a group's products, or None if the operations are no group."""
    turned = np.einsum("aij,bj->abi", rotations, translations)
    parts = (
        np.einsum("aij,bjk->abik", rotations, rotations).reshape(len(rotations), -1, 9),
        (turned + translations[:, None]) % PARTS,
    )
    place = {
        (*rotation.ravel().tolist(), *translation.tolist()): k
        for k, (rotation, translation) in enumerate(zip(rotations, translations, strict=True))
    }
    products = np.concatenate(parts, axis=2).tolist()
    table = [[place.get(tuple(product), -1) for product in row] for row in products]
    closed = len(place) == len(table) and all(-1 not in row for row in table)
    return np.array(table) if closed else None


def _factored(rotations: np.ndarray, translations: np.ndarray) -> list[list[int]]:
    """Return sets of operations; the products of one from each are all operations, each once.

    A group is built up from a subgroup H. An operation g that H is normal to, and whose square is
    in H, doubles it: H ∪ gH is a group. By Sylow's theorem there is such an operation until the
    order of H has all factors 2. Cosets of H make up the rest.
    """
    table = _products(rotations, translations)
    if table is None:
        return [list(range(len(rotations)))]
    every = set(range(len(table)))
    H = np.flatnonzero((rotations == np.eye(3)).all(axis=(1, 2))).tolist()
    identity = next(k for k in H if table[k, k] == k)
    sets = [H]
    while True:
        doubling = (
            g for g in every.difference(H) if table[g, g] in H and {*table[g, H]} == {*table[H, g]}
        )
        g = next(doubling, None)
        if g is None:
            break
        sets.append([identity, g])
        H = H + table[g, H].tolist()
    cosets = {frozenset(table[g, H].tolist()) for g in every}
    sets.append(sorted([min(coset) for coset in cosets]))
    return [operations for operations in sets if len(operations) > 1] or [[identity]]


@functools.lru_cache(maxsize=32)
def _passes(
    rotations: bytes, translations: bytes, shape: tuple[int, ...]
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Return lists of moves, by which passes over a map read it, for the sum and its adjoint."""
    R = np.frombuffer(rotations, np.int64).reshape(-1, 3, 3)
    t = np.frombuffer(translations, np.int64).reshape(-1, 3)
    back = np.rint(np.linalg.inv(R)).astype(np.int64)
    there = _moves(R, t, shape)
    backward = _moves(back, -np.einsum("kij,kj->ki", back, t) % PARTS, shape)
    sets = _factored(R, t)
    return (
        [[backward[k] for k in operations] for operations in sets],
        [[there[k] for k in operations] for operations in reversed(sets)],
    )


def _summed_over(passes: list[list[Any]], map: Any) -> Any:
    """Return a map after passes; each sums the map as read by several moves."""
    for moves in passes:
        map = _one_pass(moves, map)
    return map


def _one_pass(moves: list[Any], map: Any) -> Any:
    nx, ny, nz = map.shape
    flat = map.reshape(-1)
    out = zeros(map, map.shape)
    here: tuple[Any, ...] = (_CHUNK, in_parallel, np.take)
    there: tuple[Any, ...] = (_CHUNK_ON_GPU, _in_one, _taken)
    chunk, share, taken = either(map, here, there)
    planes = max(1, chunk // (ny * nz))

    def some(begin: int, end: int) -> None:
        for low in range(begin, end, planes):
            high = min(low + planes, end)
            for move in moves:
                if move == _IDENTITY:
                    out[low:high] += map[low:high]
                else:
                    out[low:high] += taken(flat, _offsets(move, (nx, ny, nz), low, high, map))

    share(some, nx, planes)
    return out


def _taken(flat: Any, index: Any) -> Any:
    # Tensor.take is much slower.
    return flat.index_select(0, index.reshape(-1)).reshape(index.shape)


def _in_one(some: Callable[[int, int], None], count: int, grain: int) -> None:
    some(0, count)


def _offsets(move: Any, shape: tuple[int, ...], low: int, high: int, like: Any) -> Any:
    """Return where, in a flat map, a move takes the voxels of the planes from `low` to `high`."""
    xp = namespace(like)
    x, y, z = (xp.arange(*span, **beside(like)) for span in ((low, high), shape[1:2], shape[2:]))
    axes = x[:, None, None], y[:, None], z
    i, j, k = (
        sum(factor * axis for factor, axis in zip(factors, axes, strict=True) if factor) + shift
        for *factors, shift in move
    )
    nx, ny, nz = shape
    return (i % nx * ny + j % ny) * nz + k % nz


@linear
def symmetrize(map: ArrayT, operations: Iterable[Any]) -> ArrayT:
    r"""Return the sum of a map over symmetry operations, which add copies of its atoms.

    .. math:: \mathrm{out}(x) = \sum_k \mathrm{map}(R_k^{-1} (x - t_k))

    Parameters
    ----------
    map : array or tensor (nx, ny, nz), float32 or float64
        Values on the grid of a unit cell, as `fusedops.gaussian_density` returns them; such as the
        density of the atoms of an asymmetric unit.
    operations : iterable of gemmi.Op, or array (K, 3, 4) or (K, 4, 4)
        Such as gemmi's ``spacegroup.operations()``; or matrices [R t] in fractional coordinates, as
        gemmi's ``op.float_seitz()``. R is of integers, and t in multiples of 1/24.

    Returns
    -------
    array or tensor (nx, ny, nz)
        In the dtype of `map`.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or value, an operation is none of a lattice, or an
        operation moves grid points off the grid; the message has a shape that fits.

    Notes
    -----
    The adjoint is the sum over the inverse operations; for a group it is the function itself.
    ``symmetrize.vjp`` returns the gradient by `map`, and tensors have derivatives of every order.
    An atom on a special position is added once by every operation, so its occupancy should be that
    of the file, reduced. A group is summed in a few passes, which are fewer than its operations;
    maps agree with another order of the sum to rounding.

    References
    ----------
    ``Grid.symmetrize_sum`` of gemmi does the same in place, for a space group.

    Examples
    --------
    >>> import numpy as np
    >>> from fusedops.crystal import symmetrize
    >>> twofold = [[-1, 0, 0, 0], [0, 1, 0, 0.5], [0, 0, -1, 0]]  # -x, y+1/2, -z
    >>> rho = np.zeros((4, 4, 4))
    >>> rho[1, 0, 0] = 1.0
    >>> np.argwhere(symmetrize(rho, [np.eye(4)[:3], twofold])).tolist()
    [[1, 0, 0], [3, 2, 0]]
    """
    map = checked_map("symmetrize", map)
    rotations, translations = read_operations(operations, "symmetrize")
    there, back = _passes(rotations.tobytes(), translations.tobytes(), tuple(map.shape))
    return linear_in(
        map, functools.partial(_summed_over, there), functools.partial(_summed_over, back)
    )
