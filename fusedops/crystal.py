"""Maps of crystals: their symmetry, and their structure factors.

Both are linear in the map, so each has its adjoint for a gradient, and derivatives of every order.
They are no primitives of the frame because it declares, casts and checks real numbers alone, and
structure factors are complex.

One file, from top to bottom: linear functions, symmetry operations on a grid, and Fourier
transforms.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from typing import cast as typed

import numpy as np

from fusedops._frame.arrays import ArrayT, add_at, beside, cast, either, namespace, zeros
from fusedops._frame.check import (
    arrays_only,
    cotangent,
    device_of,
    dtype_name,
    floats,
    indices,
    of_shape,
    real,
    same_device,
    traced,
    values,
)
from fusedops._frame.hook import bridge, outside_of_graphs
from fusedops._frame.packed import Packed
from fusedops._frame.shapes import Array
from fusedops._host.threads import get_num_threads, in_parallel
from fusedops.density import CellLike
from fusedops.density.plan import grid_sizes, read_cell

__all__ = ["Reflections", "structure_factors", "symmetrize"]

F = TypeVar("F", bound=Callable[..., Any])
F_co = TypeVar("F_co", bound=Callable[..., Any], covariant=True)

#: Translations of symmetry operations are multiples of 1/24, as in gemmi.
_PARTS = 24

# The voxels that are symmetrized at a time: on the CPU their offsets stay in a core's cache.
_CHUNK = 1 << 16
_CHUNK_ON_GPU = 1 << 25

_IDENTITY = ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0))

_MAP = Array("(nx, ny, nz), nx > 0, ny > 0, nz > 0")


class LinearOp(Generic[F_co]):
    """The type of a linear function, for type checkers: a function with attributes."""

    __call__: F_co

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., tuple[np.ndarray, ...]]]:
        """Return the value, and the pullback from a cotangent to the gradient."""
        raise NotImplementedError


class _Linear(NamedTuple):
    """A checked call: an array, the function of it, and the function's adjoint."""

    array: Any
    function: Callable[[Any], Any]
    adjoint: Callable[[Any], Any]


def _linear_in(array: Any, function: Callable[..., Any], adjoint: Callable[..., Any]) -> Any:
    """Return the result of a function under `_linear`, whose annotation is the result instead."""
    return _Linear(array, function, adjoint)


def _linear(check: F) -> LinearOp[F]:
    """Turn a function that returns a `_Linear` into a function of NumPy arrays and tensors."""
    name = check.__name__

    @functools.wraps(check)
    def call(*args: Any, **kwargs: Any) -> Any:
        array, function, adjoint = check(*args, **kwargs)
        return either(array, _plain, _recorded)(array, function, adjoint)

    def vjp(*args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], tuple[Any]]]:
        array, function, adjoint = check(*args, **kwargs)
        arrays_only(f"{name}.vjp", "map", array, ", tensors have autograd")
        y = function(array)
        return y, lambda dy: (adjoint(cotangent(f"{name}.vjp", dy, y.shape, y.dtype)),)

    op: Any = outside_of_graphs(call)
    op.vjp = outside_of_graphs(vjp)
    return typed("LinearOp[F]", op)


def _plain(array: np.ndarray, function: Any, adjoint: Any) -> Any:
    return function(array)


def _recorded(tensor: Any, function: Any, adjoint: Any) -> Any:
    return _differentiable().apply(tensor, function, adjoint)


@functools.cache
def _differentiable() -> Any:
    """Return the autograd.Function for tensors; its class can't be declared without torch."""
    from fusedops._frame.bridge.autograd import is_batch, row_by_row

    torch = sys.modules["torch"]

    class Linear(torch.autograd.Function):  # type: ignore[name-defined]
        """A linear function, whose gradient is its adjoint; the adjoint's gradient is it again."""

        @staticmethod
        def forward(x: Any, function: Any, adjoint: Any) -> Any:
            if not x.is_cpu or traced():
                return function(x)
            # NumPy and SciPy on our threads are faster than torch.
            array = bridge().tensors.as_numpy(x.resolve_conj().resolve_neg())
            return bridge().tensors.as_tensors([function(array)])[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _, ctx.function, ctx.adjoint = inputs

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            def pull_back(dy: Any) -> Any:
                return [Linear.apply(*dy, ctx.adjoint, ctx.function)]

            (dx,) = row_by_row(pull_back, [dy]) if is_batch(dy) else pull_back([dy])
            return dx, None, None

        @staticmethod
        def jvp(ctx: Any, dx: Any, *_: Any) -> Any:
            return Linear.apply(dx, ctx.function, ctx.adjoint)

        @staticmethod
        def vmap(_: Any, in_dims: tuple[Any, ...], x: Any, function: Any, adjoint: Any) -> Any:
            each = [Linear.apply(one, function, adjoint) for one in x.unbind(in_dims[0])]
            return torch.stack(each), 0

    return Linear


def _checked_map(op: str, map: Any) -> Any:
    map = floats(op, "map", map)
    if map.dtype.itemsize < 4:
        raise TypeError(
            f"{op}: map has dtype {dtype_name(map.dtype)}; it should be float32 or float64"
        )
    _MAP.fit(op, "map", map, {})
    return map


def _read_operations(operations: Any, op: str) -> tuple[np.ndarray, np.ndarray]:
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
    turns, shifts = matrices[:, :, :3], _PARTS * matrices[:, :, 3]
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
            f"in multiples of 1/{_PARTS} of the cell's edges"
        )
    return rotations.astype(np.int64), translations.astype(np.int64) % _PARTS


def _matrix(op: str, k: int, operation: Any) -> np.ndarray:
    """Return the matrix [R t] (3, 4) of one operation, in fractional coordinates."""
    if hasattr(operation, "rot") and hasattr(operation, "tran"):
        return np.column_stack([operation.rot, operation.tran]) / _PARTS
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
    shifts, between = np.divmod(translations * size, _PARTS)
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
    multiples = [math.lcm(*(_PARTS // np.gcd(axis, _PARTS)).tolist()) for axis in translations.T]
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
        (turned + translations[:, None]) % _PARTS,
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
    backward = _moves(back, -np.einsum("kij,kj->ki", back, t) % _PARTS, shape)
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


@_linear
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
    map = _checked_map("symmetrize", map)
    rotations, translations = _read_operations(operations, "symmetrize")
    there, back = _passes(rotations.tobytes(), translations.tobytes(), tuple(map.shape))
    return _linear_in(
        map, functools.partial(_summed_over, there), functools.partial(_summed_over, back)
    )


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
    any grid fits.

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

    # factors (K, M): complex, and in single precision; at (K M,): where a real map's half spectrum
    # has an index, or else its Friedel mate; mated (K M,): whether it has the index, whose factor
    # is the conjugate; held (L,), held_at (L,): where a wave's conjugates (first K M) and waves go.
    _fields = ("factors", "single", "at", "mated", "held", "held_at")
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

    def __repr__(self) -> str:
        return (
            f"Reflections({self.arrays()[0].shape[1]} of a map of {self.nx} × {self.ny} × "
            f"{self.nz}, on {self.device})"
        )


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
        rotations, translations = _read_operations(operations, op)
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
    phases = np.exp(2j * np.pi / _PARTS * (translations @ hkl.T % _PARTS))
    plus, in_plus = _half(turned, shape)
    minus, in_minus = _half(-turned, shape)
    held = np.flatnonzero(np.concatenate([in_plus, in_minus]))
    factors = _factors(op, hkl, cell, blur, nx * ny * nz) * phases
    return {
        "factors": factors,
        "single": factors.astype(np.complex64),
        "at": np.where(in_plus, plus, minus),
        "mated": in_plus,
        "held": held,
        "held_at": np.concatenate([plus, minus])[held],
        "nx": nx,
        "ny": ny,
        "nz": nz,
    }


def _half(hkl: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return where a real map's half spectrum has indices, and whether it has them."""
    _, ny, nz = shape
    h, k, l = (hkl % shape).reshape(-1, 3).T
    return (h * ny + k) * (nz // 2 + 1) + l, l <= nz // 2


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


@_linear
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
    map = _checked_map(op, map)
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

    return _linear_in(map, transform, adjoint)
