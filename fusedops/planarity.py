"""The planarity restraint: how far groups of atoms are from their best planes.

One file, from top to bottom: packing the groups, the definition of value, gradient and the
gradient's own derivative, and the public op. The kernels are in ``cpukern/planarity_*`` and
``gpukern/planarity.py``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, overload

import numpy as np

from fusedops._frame.arrays import cast, double, namespace
from fusedops._frame.check import (
    accumulator,
    device_of,
    dtype_name,
    is_tensor,
    no_derivative,
    one_of,
    own_memory,
    same_device,
    size,
    traced,
    values,
)
from fusedops._frame.op import op, to_run
from fusedops._frame.packed import Packed, bridge, outside_of_graphs
from fusedops._frame.primitive import Primitive
from fusedops._frame.registry import BackendName, compiled
from fusedops._frame.shapes import checked
from fusedops.eigenvector import NO_PLANE as NO_PLANE
from fusedops.eigenvector import pseudo_solve, smallest_eigenvector

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor

    PlaneGroups: TypeAlias = "Planes | Sequence[tuple[Any, Any]]"

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
        num_atoms = size("Planes", "num_atoms", num_atoms)
        groups, device = _checked_groups(plane_groups)
        self._lay_out(groups, num_atoms, device)

    @classmethod
    def made_of(cls, *tensors: Any, num_atoms: int) -> Planes:
        """Return the object that index and sigma tensors describe, group after group."""
        return cls(list(zip(tensors[::2], tensors[1::2], strict=True)), num_atoms=num_atoms)

    @classmethod
    def foresee(cls, *tensors: Any, num_atoms: int) -> dict[str, Any]:
        """Return the sizes that don't depend on the tensors' values."""
        num_planes = sum(len(index) for index in tensors[::2])
        num_entries = sum(index.numel() for index in tensors[::2])
        return {"bound": 0, "num_planes": num_planes, "num_entries": num_entries}

    def _lay_out(
        self,
        groups: list[tuple[np.ndarray, np.ndarray]],
        num_atoms: int,
        device: str,
        *,
        lasting: bool = True,
    ) -> None:
        num_atoms = min(num_atoms, MOST_ATOMS)
        pack = compiled("planes", "planarity")
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
            np.broadcast_to(_per_atom(sigma), index.shape).ravel() if per_atom else sigma
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


def _tensors(plane_groups: Any) -> list[Any]:
    """Return the indices and sigmas of all groups as tensors, for a graph."""
    torch = sys.modules["torch"]
    return [
        torch.as_tensor(array, dtype=None if is_tensor(array) else dtype)
        for group in plane_groups
        for array, dtype in zip(group, (torch.int64, torch.float64), strict=True)
    ]


def _read(plane_groups: Any, num_atoms: int) -> Planes:
    """Return the `Planes` of a list; of tensors, the same ones until a write to any of them."""

    def make() -> Planes:
        planes = Planes.__new__(Planes)
        groups, device = _checked_groups(plane_groups)
        planes._lay_out(groups, num_atoms, device, lasting=False)
        return planes

    if not isinstance(plane_groups, (list, tuple)):
        return make()
    given: list[Any] = []
    for entry in plane_groups:
        pair = isinstance(entry, (tuple, list)) and len(entry) == 2
        if not pair or not all([is_tensor(array) for array in entry]):
            return make()
        given += entry
    if not given:
        return make()
    if not given[0].is_cpu:
        # A CUDA graph wouldn't hold planes that are packed anew after a write.
        Planes._refuse_capture("Planes")
    with Planes.outside_of_transforms("Planes", given):
        return Planes.kept(given, {"num_atoms": num_atoms}, make)


def _checked_groups(plane_groups: Any) -> tuple[list[tuple[np.ndarray, np.ndarray]], str]:
    """Return the groups as NumPy arrays and the device that they came from."""
    scalar = getattr(plane_groups, "ndim", 1) == 0
    if isinstance(plane_groups, Planes) or not isinstance(plane_groups, Iterable) or scalar:
        raise TypeError(
            f"Planes: plane_groups is a {type(plane_groups).__name__}; it should be a sequence of "
            "pairs (indices, sigmas)"
        )
    groups, device, first = [], None, None
    for g, entry in enumerate(plane_groups):
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            raise TypeError(
                f"Planes: plane_groups[{g}] is {type(entry).__name__}; it should be a pair "
                "(indices, sigmas)"
            )
        index, sigma = entry
        names = f"plane_groups[{g}] indices", f"plane_groups[{g}] sigmas"
        if not (type(index) is np.ndarray and type(sigma) is np.ndarray):
            for name, array in zip(names, entry, strict=True):
                if is_tensor(array):
                    own_memory("Planes", name, array)
                    device, first = device or device_of(array), first or name
                    same_device("Planes", name, device_of(array), first, device)
                    no_derivative("Planes", name, array)
            index, sigma = (values("Planes", *pair) for pair in zip(names, entry, strict=True))
        if index.dtype.kind != "i":
            raise TypeError(
                f"Planes: {names[0]} has dtype {index.dtype}; it should be int32 or int64"
            )
        if index.ndim != 2 or index.shape[1] < 3:
            raise ValueError(
                f"Planes: {names[0]} has shape {index.shape}; it should be (P, n) with n ≥ 3"
            )
        if sigma.dtype.kind not in "fi":
            raise TypeError(
                f"Planes: {names[1]} has dtype {sigma.dtype}; it should be float32 or float64"
            )
        if sigma.shape == (len(index), 1):
            # One for each plane, as no plane has one atom.
            sigma = sigma[:, 0]
        elif sigma.shape not in (index.shape[:1], index.shape):
            raise ValueError(
                f"Planes: {names[1]} has shape {sigma.shape}; it should be {index.shape[:1]} for "
                f"planes or {index.shape} for atoms"
            )
        groups.append((index, sigma))
    return groups, device or "cpu"


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


def _runs(like: Any, planes: Planes) -> list[tuple[Any, Any]]:
    """Return indices (P, n) and 1/σ², (P, n) or (P, 1), of the planes of every size n."""
    fields = planes.fields_like(like)
    index, weight, ptr = fields.index, fields.weight, planes.plane_ptr
    if is_tensor(index):
        index = index.long()
    if is_tensor(ptr):
        ptr = bridge().values(ptr)
    size = np.diff(ptr)
    edges = [0, *(np.flatnonzero(np.diff(size)) + 1).tolist(), len(size)] if len(size) else []
    runs = []
    for low, high in pairwise(edges):
        span, shape = slice(int(ptr[low]), int(ptr[high])), (high - low, int(size[low]))
        own = weight[span].reshape(shape) if planes.per_atom else weight[low:high].reshape(-1, 1)
        runs.append((index[span].reshape(shape), own))
    return runs


class _Fit:
    """The best planes of P groups of n atoms, in float64.

    r (P, n, 3): vectors from the centroid; share (P, n): 1, or the weights; C (P, 3, 3): the
    covariance, multiplied by scale so that its trace is 1; normal (P, 3): zero for a group that
    has no plane; d (P, n): distances from the plane.
    """

    # Coordinates that aren't finite, or whose squares aren't, are left out below.
    @np.errstate(invalid="ignore", over="ignore")
    def __init__(self, xyz: Any, index: Any, weight: Any, fit: str) -> None:
        xp = namespace(xyz)
        x = double(xyz[index])
        # Relative to the plane's first atom: a large distance to the origin would cost digits.
        x = x - x[:, :1]
        self.share = xp.ones_like(x[..., 0])
        if fit == "weighted":
            self.share = self.share * weight
        self.total = self.share.sum(-1)
        r = x - (xp.einsum("pa,pai->pi", self.share, x) / self.total[:, None])[:, None]
        trace = xp.einsum("pa,pai,pai->p", self.share, r, r)
        usable = xp.isfinite(trace) & (trace > 0)
        usable = usable & xp.isfinite(1 / xp.where(usable, trace, 1.0))
        self.r = xp.where(usable[:, None, None], r, 0.0)
        self.scale = xp.where(usable, 1 / xp.where(usable, trace, 1.0), 0.0)
        self.C = (
            xp.einsum("pa,pai,paj->pij", self.share, self.r, self.r) * self.scale[:, None, None]
        )
        self.normal = smallest_eigenvector(self.C)
        self.d = xp.einsum("pai,pi->pa", self.r, self.normal)

    def centred(self, values: Any, fit: str) -> Any:
        """Return values (P, n) less their mean, which cancels out if the centroid is weighted."""
        return values if fit == "weighted" else values - values.mean(-1)[:, None]


def _scatter(rows: list[tuple[Any, Any]], like: Any) -> Any:
    """Return (N, 3) in the dtype of `like` with every row added to its atom."""
    if is_tensor(like):
        out = double(like.new_zeros(like.shape))
        for index, row in rows:
            # Unlike index_add, deterministic on a GPU too.
            out = out.index_put((index,), row, accumulate=True)
        return out.to(like.dtype)
    out = np.zeros(like.shape)
    for index, row in rows:
        np.add.at(out, index, row)
    return out.astype(like.dtype)


def _nll_formula(a: Any) -> tuple[Any, Any]:
    """Define the restraint and its gradient."""
    xyz, planes, fit = a
    total = planes.fields_like(xyz).constant.sum()
    rows = []
    for index, weight in _runs(xyz, planes):
        plane = _Fit(xyz, index, weight, fit)
        total = total + 0.5 * (weight * plane.d**2).sum()
        g = plane.centred(weight * plane.d, fit)
        rows.append((index, g[..., None] * plane.normal[:, None]))
    if is_tensor(xyz):
        dtype = getattr(namespace(xyz), accumulator(xyz) or dtype_name(xyz.dtype))
        return total.to(dtype), _scatter(rows, xyz.to(dtype))
    return np.asarray(total, xyz.dtype), _scatter(rows, xyz)


def _gradient_vjp_formula(a: Any) -> tuple[Any]:
    r"""Return Σ_c v_c · ∂G_c/∂xyz for the gradient G and a cotangent v (N, 3).

    In a plane G_c = g_c n with g = w d - mean(w d), so that Σ v·G = Σ t d with s = v·n and
    t = w (s - mean s). The normal turns by dn = -(C - λ)⁺ dC n, its cotangent is
    q = Σ t r + g v, and with p = (C - λ)⁺ q the pulled-back row is
    [t - mean t - share (p·r)] n - share d p.
    """
    xyz, cotangent, planes, fit = a
    xp = namespace(xyz)
    rows = []
    for index, weight in _runs(xyz, planes):
        f = _Fit(xyz, index, weight, fit)
        v = double(cotangent[index])
        t = weight * f.centred(xp.einsum("pai,pi->pa", v, f.normal), fit)
        g = f.centred(weight * f.d, fit)
        q = xp.einsum("pa,pai->pi", t, f.r) + xp.einsum("pa,pai->pi", g, v)
        p = pseudo_solve(f.C, f.normal, q)
        share = f.share * f.scale[:, None]
        along = (
            t
            - f.share / f.total[:, None] * t.sum(-1)[:, None]
            - share * xp.einsum("pai,pi->pa", f.r, p)
        )
        row = along[..., None] * f.normal[:, None] - (share * f.d)[..., None] * p[:, None]
        rows.append((index, row))
    return (_scatter(rows, xyz),)


def _nll_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> tuple[Any, ...]:
    # Reshaped to (1, 1), since torch.vmap can't multiply by a batch of 0-d tensors.
    dxyz = None if dy.nll is None else dy.nll.reshape(1, 1) * y.gradient
    if dy.gradient is not None:
        (turned,) = gradient_vjp(a.xyz, dy.gradient, a.planes, a.fit)
        dxyz = turned if dxyz is None else dxyz + turned
    return (cast(dxyz, a.xyz),)


gradient_vjp = Primitive(
    "planarity_gradient_vjp",
    family="planarity",
    arrays={"xyz": "(N, 3)", "dgradient": "(N, 3)"},
    static={"planes": Planes, "fit": str},
    outputs={"dxyz": "like xyz"},
    formula=_gradient_vjp_formula,
)
nll = Primitive(
    "planarity_nll",
    family="planarity",
    arrays={"xyz": "(N, 3)"},
    static={"planes": Planes, "fit": str},
    # The gradient is saved in float32 at least: in 16 bits it may overflow.
    outputs={"nll": "() summed of xyz", "gradient": "(N, 3) summed of xyz"},
    formula=_nll_formula,
    pullback=_nll_pullback,
    saves=("gradient",),
)


class _Nll(Protocol):
    @overload
    def __call__(
        self,
        xyz: np.ndarray,
        plane_groups: PlaneGroups,
        *,
        fit: Fit = ...,
        backend: BackendName | None = ...,
    ) -> np.floating[Any]: ...
    @overload
    def __call__(
        self,
        xyz: Tensor,
        plane_groups: PlaneGroups,
        *,
        fit: Fit = ...,
        backend: BackendName | None = ...,
    ) -> Tensor: ...


def _pack(*args: Any) -> tuple[Any, ...]:
    """Return an op's arguments with a list of planes packed, if the first is an array of atoms."""
    if len(args) < 2:
        return args
    xyz, plane_groups, *others = args
    array = isinstance(xyz, np.ndarray) or (is_tensor(xyz) and not (xyz.is_nested or traced()))
    if not (isinstance(plane_groups, (list, tuple)) and array and xyz.ndim == 2):
        return args
    return xyz, _packed(plane_groups, xyz), *others


def _packed(plane_groups: Any, xyz: Any) -> Planes:
    """Return the planes of a list; without any, on the device of the atoms."""
    planes = _read(plane_groups, xyz.shape[0])
    if not planes.num_planes and is_tensor(xyz) and not xyz.is_meta:
        return planes.to(xyz.device)
    return planes


def _check(name: str, xyz: Any, plane_groups: Any, fit: str) -> Any:
    planes = plane_groups
    if not isinstance(planes, Planes):
        if is_tensor(xyz) and traced():
            planes = Planes.read(name, *_tensors(planes), num_atoms=xyz.shape[0])
        else:
            planes = _packed(planes, xyz)
    same_device(name, "plane_groups", planes.device, "xyz", device_of(xyz))
    if planes.bound > xyz.shape[0]:
        raise IndexError(
            f"{name}: plane_groups has index {planes.bound - 1}; it should be below "
            f"{xyz.shape[0]}, the number of atoms in xyz"
        )
    one_of(name, "fit", fit, FITS)
    return to_run((xyz, planes, fit), "nll")


@op(nll, overloads=_Nll, pack=_pack)  # type: ignore[type-abstract]
def planarity_nll(
    xyz: Any,
    plane_groups: PlaneGroups,
    *,
    fit: Fit = "uniform",
    backend: BackendName | None = None,
) -> Any:
    r"""Return the negative log-likelihood that groups of atoms lie in planes.

    .. math:: \mathrm{NLL} = \sum_p \sum_{a \in p} \left[ \tfrac12 (d_{pa}/\sigma_{pa})^2
              + \ln \sigma_{pa} + \tfrac12 \ln 2\pi \right], \quad
              d_{pa} = (x_{pa} - c_p) \cdot n_p

    where :math:`c_p` is the centroid of plane p, and :math:`n_p` the eigenvector of its covariance
    with the smallest eigenvalue, solved in float64.

    Parameters
    ----------
    xyz : array or tensor (N, 3), float32 or float64; in torch bfloat16 and float16 too
        Coordinates in Å.
    plane_groups : Planes, or sequence of (indices, sigmas)
        `Planes`, packed once for many calls, or its argument, packed in every call. A list of
        tensors is packed again only after a write to one of them that torch counts.
    fit : {"uniform", "weighted"}
        An atom's weight in its plane's centroid and covariance: 1, or 1/σ².

    Returns
    -------
    scalar
        In the dtype of `xyz`, float32 for the 16-bit ones; accumulated in float64.

    Raises
    ------
    IndexError
        If a plane's atom index is out of range for `xyz`.

    Notes
    -----
    The gradient is :math:`[d_c/\sigma_c^2 - \mathrm{mean}_a(d_a/\sigma_a^2)] n_p`, with the normal
    held fixed, as in TorchRef, SHELXL, Phenix and Refmac. It is exact where σ is uniform in a plane
    or `fit` is ``"weighted"``. Second derivatives differentiate this gradient, and include the
    rotation of the normal. A group with a coordinate that isn't finite, or with all atoms on a line
    or at a point, has no plane: its distances count as zero and it adds nothing to the gradient.
    Atoms count as on a line if their second largest variance is at most 1e-12 of the largest.

    References
    ----------
    Schomaker, Waser, Marsh & Bergman, "To fit a plane or a line to a set of points by least
    squares", Acta Cryst. 12, 600-604 (1959).

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> xyz = np.array([[0, 0, 0.1], [1, 0, -0.1], [1, 1, 0.1], [0, 1, -0.1]])
    >>> nll, pullback = fusedops.planarity_nll.vjp(xyz, [([[0, 1, 2, 3]], [0.1])])
    >>> round(float(nll), 4)
    -3.5346
    >>> (dxyz,) = pullback(1.0)
    >>> dxyz[:, 2].round(6).tolist()
    [10.0, -10.0, 10.0, -10.0]
    """
    return _check("planarity_nll", xyz, plane_groups, fit)


@outside_of_graphs
def plane_deviations(
    xyz: np.ndarray, plane_groups: Sequence[tuple[Any, Any]], *, fit: Fit = "uniform"
) -> list[np.ndarray]:
    r"""Return the signed distance of every atom from its plane, :math:`(x_a - c) \cdot n`.

    Parameters
    ----------
    xyz : array (N, 3), float32 or float64
        Coordinates in Å.
    plane_groups : sequence of (indices, sigmas)
        As in `Planes`.
    fit : {"uniform", "weighted"}
        As in `planarity_nll`.

    Returns
    -------
    list of array (P, n), float64
        In Å, an array for every entry of `plane_groups`, in order; zero in a group that has no
        plane. The sign follows the normal's, which is arbitrary for every plane.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `planarity_nll`.

    References
    ----------
    See `planarity_nll`.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> xyz = np.array([[0, 0, 0.1], [1, 0, -0.1], [1, 1, 0.1], [0, 1, -0.1]])
    >>> (d,) = fusedops.plane_deviations(xyz, [([[0, 1, 2, 3]], [0.1])])
    >>> abs(d).round(6).tolist()
    [[0.1, 0.1, 0.1, 0.1]]
    """
    if is_tensor(xyz):
        raise TypeError("plane_deviations: xyz is a torch tensor; it should be a NumPy array")
    checked("plane_deviations", nll.declared, {"xyz": xyz}, ())
    groups, device = _checked_groups(plane_groups)
    same_device("plane_deviations", "plane_groups", device, "xyz", "cpu")
    _check("plane_deviations", xyz, groups, fit)
    return [
        _Fit(np.asarray(xyz), index, _per_atom(1 / sigma.astype(np.float64) ** 2), fit).d
        for index, sigma in groups
    ]


def _per_atom(values: np.ndarray) -> np.ndarray:
    return values[:, None] if values.ndim == 1 else values
