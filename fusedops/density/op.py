"""The density of atoms on a periodic grid: sums of Gaussians, added straight to the map.

How far atoms reach, the atoms that have a density, the widths that are raised, the definition of
the map and of its first and second derivatives, and the public op.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fusedops._frame import registry
from fusedops._frame.arrays import (
    ArrayT,
    add_at,
    beside,
    cast,
    detached,
    double,
    int64,
    namespace,
    recomputed,
    zeros,
)
from fusedops._frame.check import (
    device_of,
    no_derivative,
    one_of,
    outside_of_transforms,
    positive,
    promoted,
    real,
    unseen,
    warn,
)
from fusedops._frame.kinds import Made
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName
from fusedops.density.plan import CellLike, Lattice, read_lattice

#: The share by which a voxel's squared distance may exceed an atom's squared radius. It keeps a
#: voxel at the radius inside, however its distance is rounded.
SLACK = 1e-5

OnBad = Literal["raise", "skip", "clamp"]
#: Where component (i, j) of a symmetric matrix is in [11, 22, 33, 12, 13, 23].
COMPONENTS = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))

# Where the nine elements of a symmetric matrix are among these components.
_ELEMENTS = 0, 3, 4, 3, 1, 5, 4, 5, 2

#: The number of atoms from which sorting pays on a GPU.
ORDERED = 5000

#: The least width of a Gaussian with on_bad="clamp", Å².
LEAST_WIDTH = 0.4

# The number of voxels times Gaussians that the definition works on at a time.
_CHUNK = 1 << 22


def _eigenvalues(U: Any) -> tuple[Any, Any]:
    """Return the least and largest eigenvalues of symmetric matrices (N, 6) (Smith, 1961)."""
    xp = namespace(U)
    mean = U[:, :3].mean(1)
    diagonal, off = U[:, :3] - mean[:, None], U[:, 3:]
    p = xp.sqrt(((diagonal**2).sum(1) + 2 * (off**2).sum(1)) / 6)
    safe = xp.where(p > 0, p, 1)[:, None]
    diagonal, off = diagonal / safe, off / safe
    # U12, U13 and U23 face the third, second and first diagonal element.
    rest = (diagonal * xp.flip(off, (1,)) ** 2).sum(1)
    half = 0.5 * xp.prod(diagonal, 1) + xp.prod(off, 1) - 0.5 * rest
    angle = (xp.arccos if xp is np else xp.acos)(xp.clip(half, -1, 1)) / 3
    return mean + 2 * p * xp.cos(angle + 2 * math.pi / 3), mean + 2 * p * xp.cos(angle)


def atom_radius(b: ArrayT, widths: ArrayT, *, n_sigma: float = 4.0) -> ArrayT:
    r"""Return how far from its centre an atom's density is worth computing.

    .. math:: r_i = n_\sigma \sqrt{\max_g (B_{ig} + b_i) / 8 \pi^2}

    rounded up to a quarter of an Å, and at least 2 Å. For an anisotropic atom,
    :math:`b_i / 8 \pi^2` is the largest eigenvalue of U.

    Parameters
    ----------
    b : array or tensor (N,) or (N, 6)
        B in Å², or U in Å²; see `fusedops.gaussian_density`.
    widths : array or tensor (N, G)
        Å².
    n_sigma : float
        The radius in standard deviations of the widest Gaussian. TorchRef's default is 3, which
        leaves 2.9 % of that Gaussian outside; 4 leaves 0.11 %.

    Returns
    -------
    array or tensor (N,)
        Å; NaN where `b` or `widths` is NaN.

    Notes
    -----
    The time of an atom grows with the third power of its radius: with a form factor of 50 Å²,
    B = 1000 Å² reaches 14.75 Å, and 50 times as many voxels as B = 20 Å². gemmi's cutoff
    (``DensityCalculatorX.cutoff``, 1e-5 by default) is absolute instead: gemmi's radius is where an
    atom's density falls below so many electrons/Å³.

    References
    ----------
    TorchRef 0.7 has the same rule (``radius_policy``, with ``torchref.sigma_cutoff_ed`` for
    n_sigma), but cuts radii off at 7 Å.

    Examples
    --------
    >>> import numpy as np
    >>> from fusedops.density import atom_radius
    >>> atom_radius(np.array([20.0, 400.0]), np.array([[10.0, 50.0], [10.0, 50.0]])).tolist()
    [4.0, 9.75]
    """
    n_sigma = positive("atom_radius", "n_sigma", n_sigma)
    return _radius(detached(b), detached(widths), n_sigma)


@np.errstate(invalid="ignore", over="ignore")
def _radius(b: Any, widths: Any, n_sigma: float) -> Any:
    xp = namespace(b)
    mean_square = b / (8 * math.pi**2) if b.ndim == 1 else _eigenvalues(b)[1]
    square = xp.amax(widths, 1) / (8 * math.pi**2) + mean_square
    radius = n_sigma * xp.sqrt(xp.clip(square, 1e-6, None))
    return xp.clip(xp.ceil(radius / 0.25) * 0.25, 2.0, None)


def _conditions(
    xyz: Any,
    b: Any,
    occupancy: Any,
    amplitudes: Any,
    widths: Any,
    radius: Any,
    *,
    lattice: Lattice | None,
    clamp: int = 0,
) -> list[tuple[str, Any, str, Any]]:
    """Return rows (argument, array, the condition in words, a mask of the atoms that meet it).

    The words are a format of the lattice.
    """
    xp = namespace(xyz)
    rows = [
        (name, array, "finite", xp.isfinite(array if array.ndim == 1 else array.sum(1)))
        for name, array in (
            ("xyz", xyz),
            ("b", b),
            ("occupancy", occupancy),
            ("amplitudes", amplitudes),
            ("widths", widths),
            ("radius", radius),
        )
    ]
    if not clamp:
        rows.append(_is_wide(b, widths))
    rows.append(("radius", radius, "at least 0", radius >= 0))
    if lattice is not None:
        fields = lattice.fields_like(xyz)
        place = double(xyz) @ fields.to_grid.T
        near = xp.isfinite(place).all(1)
        rows.append(("xyz", xyz, "so near to the cell that its place there is finite", near))
        largest = fields.measures[9]
        should = "at most {0.largest_radius:.6g}, where its box has 2²⁷ voxels"
        rows.append(("radius", radius, should, radius <= largest))
    return rows


def _is_wide(b: Any, widths: Any) -> tuple[str, Any, str, Any]:
    """Return the condition that all Gaussians of an atom have a positive width."""
    least = namespace(b).amin(widths, 1)
    if b.ndim == 1:
        return "b", b, "larger than minus each of the atom's widths", least + b > 0
    m = least[:, None] + 8 * math.pi**2 * b[:, :3]
    d, e, f = (8 * math.pi**2 * b[:, 3:]).T
    second = m[:, 0] * m[:, 1] - d * d
    third = m[:, 2] * second - m[:, 0] * f * f - m[:, 1] * e * e + 2 * d * e * f
    positive = (m[:, 0] > 0) & (second > 0) & (third > 0)
    return "b", b, "positive definite together with each of the atom's widths", positive


@np.errstate(invalid="ignore", over="ignore")
def bad_atoms(
    xyz: Any,
    b: Any,
    occupancy: Any,
    amplitudes: Any,
    widths: Any,
    radius: Any,
    *,
    lattice: Lattice | None = None,
) -> Any:
    """Return a mask of the atoms that `fusedops.gaussian_density` leaves out with on_bad="skip".

    Parameters
    ----------
    xyz, b, occupancy, amplitudes, widths : array or tensor
        See `fusedops.gaussian_density`.
    radius : array or tensor (N,)
        Å.
    lattice : Lattice, optional
        The lattice that limits the radius and the coordinates.

    Returns
    -------
    array or tensor (N,), bool
        True for an atom with a number that isn't finite, a Gaussian of no positive width, a radius
        below 0 or above the lattice's `largest_radius`, or a place in voxels that overflows.

    Examples
    --------
    >>> import numpy as np
    >>> from fusedops.density import bad_atoms
    >>> xyz, one = np.zeros((2, 3)), np.ones((2, 1))
    >>> bad_atoms(xyz, np.array([np.nan, 5.0]), one[:, 0], one, one, one[:, 0]).tolist()
    [True, False]
    """
    return ~_all_of(_conditions(xyz, b, occupancy, amplitudes, widths, radius, lattice=lattice))


def _all_of(conditions: Any) -> Any:
    """Return a mask of the atoms that meet all conditions."""
    return functools.reduce(lambda one, other: one & other, [good for *_, good in conditions])


def _gaussians(b: Any, widths: Any) -> tuple[Any, Any]:
    """Return norms (N, G) and matrices P (N, G, 3, 3) of Gaussians norm · exp(-w·P·w)."""
    xp = namespace(b)
    if b.ndim == 1:
        c = 4 * math.pi**2 / (widths + b[:, None])
        return (c / math.pi) ** 1.5, c[..., None, None] * _eye(b)
    M = gaussian_matrices(b, widths)
    return math.pi**1.5 / xp.sqrt(xp.linalg.det(M)), math.pi**2 * xp.linalg.inv(M)


def gaussian_matrices(b: Any, widths: Any) -> Any:
    """Return (B I + 8π² U) / 4 for all Gaussians, (N, G, 3, 3), or (B + b) I / 4."""
    if b.ndim == 1:
        return (widths + b[:, None])[..., None, None] * _eye(b) / 4
    return (widths[:, :, None, None] * _eye(b) + 8 * math.pi**2 * _symmetric(b)[:, None]) / 4


def _symmetric(components: Any) -> Any:
    """Return symmetric matrices (..., 3, 3) of their components (..., 6).

    Torch would copy a list of indices to the GPU, which a CUDA graph can't hold.
    """
    elements = [components[..., i] for i in _ELEMENTS]
    return namespace(components).stack(elements, -1).reshape(*components.shape[:-1], 3, 3)


def _by_width(b: Any, dM: Any) -> Any:
    """Return gradients (N,) or (N, 6) by `b`, from (N, G, 3, 3) by `gaussian_matrices`."""
    xp = namespace(b)
    dM = dM.sum(1)
    if b.ndim == 1:
        return _trace(dM) / 4
    twice = [(1 if i == j else 2) * dM[:, i, j] for i, j in COMPONENTS]
    return 2 * math.pi**2 * xp.stack(twice, -1)


def _trace(matrices: Any) -> Any:
    return matrices[..., 0, 0] + matrices[..., 1, 1] + matrices[..., 2, 2]


def _eye(like: Any) -> Any:
    """Return the unit matrix (3, 3) in the dtype and on the device of `like`."""
    return namespace(like).eye(3, dtype=like.dtype, **beside(like))


@np.errstate(invalid="ignore", over="ignore")
def clamped(a: Any) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
    """Return a call of wider Gaussians in place of one with `clamp`, and the way back of gradients.

    A Gaussian that is too sharp is another function of b than those beside it, so it goes into a
    copy of its atom: one copy for all isotropic Gaussians, which then are constant and alike, and
    otherwise one for each Gaussian. A copy without Gaussians is left out by a negative radius, so
    the number of atoms doesn't depend on values; so are all copies of an atom with a number that
    isn't finite, which one copy alone might not show.
    """
    xp = namespace(a.xyz)
    rows = a.amplitudes, double(a.widths), double(a.b)
    sums = [row if row.ndim == 1 else row.sum(1) for row in rows]
    finite = xp.isfinite(sums[0]) & xp.isfinite(sums[1]) & xp.isfinite(sums[2])
    A, B, b = [
        xp.where(finite if row.ndim == 1 else finite[:, None], row, xp.ones_like(row))
        for row in rows
    ]
    none = xp.zeros_like(B)
    if b.ndim == 1:
        sharp = B + b[:, None] < LEAST_WIDTH
        copies = [(xp.full_like(b, LEAST_WIDTH), none, sharp)]
        pull = None
    else:
        least = (LEAST_WIDTH - B) / (8 * math.pi**2)
        raised, sharp, pull = _raised(b, least)
        G = B.shape[1]
        number = xp.arange(G, **beside(b))
        copies = [(raised[:, g], B[:, g, None] + none, sharp & (number == g)) for g in range(G)]
    # Any positive width will do for a Gaussian without amplitude.
    widest = xp.amax(B, 1)[:, None] + none
    copies.insert(0, (b, xp.where(sharp, widest, B), ~sharp))
    dtype = a.b.dtype if a.b.dtype.itemsize > 2 else xp.float32
    far = [xp.where(own.any(1) & finite, a.radius, -xp.ones_like(a.radius)) for *_, own in copies]
    wide = a._replace(
        xyz=xp.concatenate([a.xyz] * len(copies)),
        b=xp.concatenate([cast(b, dtype) for b, _, _ in copies]),
        occupancy=xp.concatenate([a.occupancy] * len(copies)),
        amplitudes=xp.concatenate([xp.where(own, A, xp.zeros_like(A)) for *_, own in copies]),
        widths=xp.concatenate([cast(B, a.widths) for _, B, _ in copies]),
        radius=xp.concatenate(far),
        clamp=0,
    )
    if getattr(a, "order", None) is not None:
        wide = wide._replace(order=repeated(a.order, len(wide.xyz)))

    def back(
        dxyz: Any, db: Any, doccupancy: Any, damplitudes: Any, dwidths: Any
    ) -> tuple[Any, ...]:
        dxyz, db, doccupancy, damplitudes, dwidths = (
            None if d is None else d.reshape(len(copies), len(b), *d.shape[1:])
            for d in (dxyz, db, doccupancy, damplitudes, dwidths)
        )
        dU, dleast = (0, 0) if pull is None or db is None else pull(double(db[1:]))
        if damplitudes is not None:
            damplitudes = sum(
                xp.where(own, d, xp.zeros_like(d))
                for d, (*_, own) in zip(damplitudes, copies, strict=True)
            )
        if dwidths is not None:
            # Constant widths are no function of the atom's.
            parts = dwidths if b.ndim == 2 else dwidths[:1]
            dwidths = sum(
                xp.where(own, d, xp.zeros_like(d))
                for d, (*_, own) in zip(parts, copies, strict=False)
            )
            dwidths = dwidths - dleast / (8 * math.pi**2)
        return (
            None if dxyz is None else dxyz.sum(0),
            None if db is None else db[0] + dU,
            None if doccupancy is None else doccupancy.sum(0),
            damplitudes,
            dwidths,
        )

    return wide, back


def _raised(U: Any, least: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return U (N, G, 6) with eigenvalues raised to `least` (N, G), where, and the pullback.

    If one or two eigenvalues of U are below the bound c, the smallest or the largest eigenvalue λ
    is alone on its side. So it is simple, and λ and its projector P are differentiable: U becomes
    U + (c - λ) P or c + (λ - c) P. With N = U - λ, whose traces of powers are t1, t2 and t3,
    P is adj(N)/p with p = tr adj(N) = (t1² - t2)/2, and S = (N - t1 (1 - P))/p is the resolvent in
    dP = P dU S + S dU P.
    """
    xp = namespace(U)
    smallest, largest = _eigenvalues(detached(U))
    middle = U[:, :3].sum(1) - smallest - largest
    # Equal eigenvalues at the bound, and their rounding, must not look like one alone.
    slack = 1e-7 * (abs(smallest) + abs(largest))[:, None]
    smallest, middle, largest = (x[:, None] for x in (smallest, middle, largest))
    sharp, kept = smallest < least - slack, middle >= least
    one, two = sharp & kept, sharp & ~kept & (largest >= least + slack)
    some, kept = one | two, kept | ~sharp
    eye = _eye(U)
    full = _symmetric(U)[:, None]
    # Other matrices may have no such projector; diag(1, 0, 0) takes their place.
    M = xp.where(some[..., None, None], full, eye * eye[0])
    root = xp.where(one, smallest, largest)
    root = xp.where(some, root, xp.ones_like(root))[..., None, None]

    def powers(N: Any) -> tuple[Any, ...]:
        """Return N² and t1, t2 and t3."""
        square = N @ N
        t3 = xp.einsum("...ij,...ij->...", square, N)
        traces = xp.einsum("...ii->...", N), xp.einsum("...ii->...", square), t3
        return square, *(t[..., None, None] for t in traces)

    # Each of Newton's steps doubles the order up to which derivatives of λ are right: here seven.
    for _ in range(3):
        _, t1, t2, t3 = powers(M - root * eye)
        root = root + (t1**3 - 3 * t1 * t2 + 2 * t3) / (3 * (t1**2 - t2))
    N = M - root * eye
    square, t1, t2, _ = powers(N)
    p = (t1**2 - t2) / 2
    P = (square - t1 * N + p * eye) / p
    S = (N - t1 * (eye - P)) / p
    bound, kept = least[..., None, None], kept[..., None, None]
    sign = cast(two, U)[..., None, None] - cast(one, U)[..., None, None]
    above = root - bound
    V = xp.where(kept, full, bound * eye) + sign * above * P

    def pull(dV: Any) -> tuple[Any, Any]:
        """Return dU (N, 6) and the gradients (N, G) by the bounds, for dV (G, N, 6)."""
        D = xp.stack([dV[..., i] / (1 if i < 3 else 2) for i in range(6)], -1)
        D = _symmetric(xp.einsum("gn...->ng...", D))
        turned = P @ D @ S
        turned = turned + xp.einsum("...ij->...ji", turned)
        along = xp.einsum("...ij,...ij->...", P, D)[..., None, None]
        dU = xp.where(kept, D, xp.zeros_like(D)) + sign * (along * P + above * turned)
        dbound = xp.where(kept, xp.zeros_like(D), D * eye) - sign * D * P
        dU = xp.stack([(1 if i == j else 2) * dU[..., i, j] for i, j in COMPONENTS], -1).sum(1)
        return dU, dbound.sum((-1, -2))

    return xp.stack([V[..., i, j] for i, j in COMPONENTS], -1), sharp, pull


def repeated(order: Any, count: int) -> Any:
    """Return an order of `count` atoms, copies of those that `order` lists."""
    return namespace(order).concatenate([order + at for at in range(0, count, len(order))])


class Atoms(NamedTuple):
    """The arrays of atoms."""

    xyz: Any
    b: Any
    occupancy: Any
    amplitudes: Any
    widths: Any


def atoms_of(a: Any) -> Atoms:
    return Atoms(a.xyz, a.b, a.occupancy, a.amplitudes, a.widths)


def tangents_of(a: Any) -> Atoms:
    """Return the tangents of atoms in the definition's dtype: zeros for those left out."""
    given = a.ddxyz, a.ddb, a.ddoccupancy, a.ddamplitudes, a.ddwidths
    return Atoms(
        *[
            double(zeros(array, tuple(array.shape)) if tangent is None else tangent)
            for array, tangent in zip(atoms_of(a), given, strict=True)
        ]
    )


def clamping(kernel: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Let a kernel of the gradient serve calls with `clamp`."""

    @functools.wraps(kernel)
    def run(a: Any, y: Any) -> None:
        if not a.clamp:
            kernel(a, y)
            return
        wide, back = clamped(a)
        wanted = [out is not None for out in y]
        # Bounds of U depend on widths.
        wanted[1] |= wanted[4]
        pairs = zip(wanted, atoms_of(wide), strict=True)
        made = [zeros(x, tuple(x.shape)) if want else None for want, x in pairs]
        kernel(wide, y._make(made))
        for out, found in zip(y, back(*made), strict=True):
            if out is not None:
                out[...] = found

    return run


def _ball(xyz: Any, radius: Any, lattice: Lattice, part: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Return for every atom's box flat voxel indices, vectors from the atom, and a mask, inside.

    The box lies around the atom, and may be larger than the grid: indices are wrapped. Voxels
    beyond the lattice's slab aren't inside. `part` is the number of a part of the box, whose planes
    are split into so many.
    """
    xp = namespace(xyz)
    fields = lattice.fields_like(xyz)
    step, to_grid, measures = (
        cast(array, xyz) for array in (fields.step, fields.to_grid, fields.measures)
    )
    n = np.array(lattice.grid, xyz.dtype) if xp is np else step.new_tensor(lattice.grid)
    at = xyz @ to_grid.T
    cells = xp.floor(at / n) * n
    at = at - detached(cells)
    reach = radius[:, None] * measures[6:9] * (1 + SLACK)
    low, high = xp.ceil(at - reach), xp.floor(at + reach)
    extent = [int(m) for m in xp.amax(high - low, 0) + 1]
    k, parts = part
    spans = [(extent[0] * k // parts, extent[0] * (k + 1) // parts), *((0, m) for m in extent[1:])]
    axes = [low[:, d, None] + xp.arange(*span, **beside(xyz)) for d, span in enumerate(spans)]
    flat: Any = 0
    spread = [tuple(slice(None) if e in (-1, d) else None for e in range(-1, 3)) for d in range(3)]
    planes = axes[0] % n[0] - lattice.start
    here = (planes >= 0) & (planes < lattice.stop - lattice.start)
    rows = xp.where(here, planes, xp.zeros_like(planes)), axes[1] % n[1], axes[2] % n[2]
    for d, row in enumerate(rows):
        flat = flat * lattice.shape[d] + row[spread[d]]
    x, y, z = (
        (axis - at[:, d, None])[spread[d]][..., None] * step[:, d] for d, axis in enumerate(axes)
    )
    w = x + y + z
    inside = (w * w).sum(-1) <= (radius * radius * (1 + SLACK))[:, None, None, None]
    inside = inside & here[spread[0]]
    count = len(at)
    return flat.reshape(count, -1), w.reshape(count, -1, 3), inside.reshape(count, -1)


def _chunks(arrays: Sequence[Any], radius: Any, more: Sequence[Any], lattice: Lattice) -> Any:
    """Yield numbers of atoms that have a density, their rows of all arrays, and a part of boxes.

    The boxes of many atoms are taken at a time, or a large one in parts: see `_ball`.
    """
    xp = namespace(arrays[0])
    if lattice.start == lattice.stop:
        return
    radius = cast(radius, arrays[0])
    good = ~bad_atoms(*(*arrays, radius), lattice=lattice)
    good = xp.flatnonzero(good) if xp is np else good.nonzero()[:, 0]
    measures = cast(lattice.fields_like(arrays[0]).measures, arrays[0])
    boxes = (2 * radius[good][:, None] * measures[6:9] + 2).prod(1)
    sizes = _listed(boxes * arrays[4].shape[1])
    begin = 0
    while begin < len(sizes):
        end, most = begin + 1, sizes[begin]
        while end < len(sizes) and max(most, sizes[end]) * (end + 1 - begin) <= _CHUNK:
            most = max(most, sizes[end])
            end += 1
        rows, parts = good[begin:end], math.ceil(most / _CHUNK)
        for k in range(parts):
            yield rows, [array[rows] for array in (*arrays, radius, *more)], (k, parts)
        begin = end


def _listed(values: Any) -> list[float]:
    """Return the numbers of an array of one axis."""
    try:
        return list(values.tolist())
    except RuntimeError:
        # Before 2.9 torch lists no tensor that transforms have wrapped.
        return [value.item() for value in values]


class _Voxels(NamedTuple):
    """The voxels V around every atom, and the atom's Gaussians there, each of one electron."""

    # Flat indices (N, V), and monomials 1, w, w wᵀ of the vectors from the atom, (N, V, 13).
    flat: Any
    monomials: Any
    # Gaussians (N, V, G), zero beyond the radius, and their matrices P (N, G, 3, 3).
    e: Any
    P: Any


def _voxels(x: Any, b: Any, widths: Any, radius: Any, part: Any, lattice: Lattice) -> _Voxels:
    xp = namespace(x)
    norm, P = _gaussians(b, widths)
    flat, w, inside = _ball(x, radius, lattice, part)
    squares = (w[..., :, None] * w[..., None, :]).reshape(*w.shape[:2], 9)
    q = squares @ _turned(P.reshape(*P.shape[:2], 9))
    # Zero the masked exponents, so that exp can't overflow.
    q = xp.where(inside[..., None], q, xp.zeros_like(q))
    e = xp.where(inside[..., None], norm[:, None] * xp.exp(-q), xp.zeros_like(q))
    return _Voxels(flat, xp.concatenate([xp.ones_like(w[..., :1]), w, squares], -1), e, P)


def _turned(matrices: Any) -> Any:
    return matrices.swapaxes(-1, -2)


def _moments(values: Any, monomials: Any) -> tuple[Any, Any, Any]:
    """Return sums over voxels of values (N, V, G), times 1, times w and times w wᵀ."""
    sums = _turned(values) @ monomials
    return sums[..., 0], sums[..., 1:4], sums[..., 4:].reshape(*sums.shape[:2], 3, 3)


def _product(matrices: Any, vectors: Any) -> Any:
    return (matrices @ vectors[..., None])[..., 0]


def _at(map: Any, flat: Any) -> Any:
    return map[int64(flat)]


def _density_formula(a: Any) -> tuple[Any, Any]:
    dtype, lattice, xyz = promoted((a.xyz, a.b, a.occupancy)), a.lattice, a.xyz
    atoms = Atoms(*map(double, atoms_of(a)))
    if a.clamp:
        a, _ = clamped(a._replace(**atoms._asdict()))
        atoms = atoms_of(a)
    out = zeros(atoms.xyz, (math.prod(lattice.shape),))
    for _, (x, b, occ, amplitudes, widths, radius), part in _chunks(atoms, a.radius, (), lattice):
        voxels = _voxels(x, b, widths, radius, part, lattice)
        values = _product(voxels.e, occ[:, None] * amplitudes)
        add_at(out, int64(voxels.flat.reshape(-1)), values.reshape(-1))
    order = None
    if _is_ordered(xyz):
        order = namespace(xyz).arange(len(xyz), **beside(xyz))
    return cast(out, dtype).reshape(lattice.shape), order


def _vjp_formula(a: Any) -> tuple[Any, ...]:
    r"""Return the gradients of Σ_v g_v ρ(v).

    With e a Gaussian of one electron, M = (B I + 8π² U)/4 and P = π² M⁻¹, they follow from sums
    over voxels of g e times 1, w and w wᵀ, as the derivatives of e by x and M are e times 2 P w and
    (P w wᵀ P - P/2) / π².
    """
    lattice = a.lattice
    atoms = Atoms(*map(double, atoms_of(a)))
    if a.clamp:
        wide, back = clamped(a._replace(**atoms._asdict(), order=None))
        pairs = zip(back(*_vjp_formula(wide)), atoms_of(a), strict=True)
        return tuple([cast(found, array) for found, array in pairs])
    g = double(a.dmap).reshape(-1)

    def some(
        g: Any, part: Any, x: Any, b: Any, occ: Any, amplitudes: Any, widths: Any, radius: Any
    ) -> tuple[Any, ...]:
        flat, monomials, e, P = _voxels(x, b, widths, radius, part, lattice)
        one, w, ww = _moments(_at(g, flat)[..., None] * e, monomials)
        share = occ[:, None] * amplitudes
        dx = 2 * (share[..., None] * _product(P, w)).sum(1)
        dM = (P @ ww @ P - 0.5 * one[..., None, None] * P) / math.pi**2
        dM = share[..., None, None] * dM
        docc = (amplitudes * one).sum(1)
        return dx, _by_width(b, dM), docc, occ[:, None] * one, _trace(dM) / 4

    run = recomputed(some, g)
    numbers, found = [], []
    for rows, given, part in _chunks(atoms, a.radius, (), lattice):
        numbers.append(rows)
        found.append(run(g, part, *given))
    return _whole(atoms_of(a), numbers, found)


def _whole(arrays: Sequence[Any], numbers: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
    """Return gradients by arrays, from rows of them; all other atoms have gradients of zero."""
    xp = namespace(arrays[0])
    results = []
    for at, array in enumerate(arrays):
        total = zeros(double(array), tuple(array.shape))
        if numbers:
            rows, values = xp.concatenate(numbers), xp.concatenate([part[at] for part in found])
            # A large box has several parts.
            add_at(total, rows, values)
        results.append(cast(total, array))
    return tuple(results)


def _vjp_vjp_formula(a: Any) -> tuple[Any, ...]:
    r"""Return the gradients of Σ_v g_v ρ'(v), by atoms and by g.

    ρ' is the derivative of ρ along the cotangents (t, T, …) of the gradients by atoms. With the
    symbols of `_vjp_formula` and M' the derivative of M, a Gaussian of one electron changes by e z,

    .. math:: z = β·w + w·γ w - ν, \quad
              β = 2 P t, \quad γ = P M' P / π^2, \quad ν = tr(P M') / 2 π^2

    so that ρ' = Σ e d with d = (o A)' + o A z, and sums over voxels of g e and of g e d times 1, w
    and w wᵀ are enough.
    """
    lattice = a.lattice
    atoms, along = Atoms(*map(double, atoms_of(a))), tangents_of(a)
    g = double(a.dmap).reshape(-1)
    xp = namespace(g)

    def some(
        g: Any, part: Any, x: Any, b: Any, occ: Any, A: Any, widths: Any, radius: Any,
        t: Any, tb: Any, tocc: Any, tA: Any, twidths: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        flat, monomials, e, P = _voxels(x, b, widths, radius, part, lattice)
        share, dshare = occ[:, None] * A, tocc[:, None] * A + occ[:, None] * tA
        PM = P @ gaussian_matrices(tb, twidths)
        beta, gamma = 2 * _product(P, t[:, None]), PM @ P / math.pi**2
        nu = _trace(PM) / (2 * math.pi**2)
        factors = [-nu[..., None], beta, gamma.reshape(*nu.shape, 9)]
        ez = e * (monomials @ _turned(xp.concatenate(factors, -1)))
        ed = dshare[:, None] * e + share[:, None] * ez
        g = _at(g, flat)[..., None]
        one, w, ww = _moments(g * e, monomials)
        ones, ws, wws = _moments(g * ed, monomials)
        z = (g * ez).sum(1)
        dx = 2 * _product(P, ws) - share[..., None] * (
            one[..., None] * beta + 2 * _product(gamma, w)
        )
        bent = 0.5 * _product(P, w)[..., None] * beta[..., None, :] + P @ ww @ gamma
        bent = bent + _turned(bent) - 0.5 * one[..., None, None] * gamma
        dM = P @ wws @ P - 0.5 * ones[..., None, None] * P - share[..., None, None] * bent
        dM = dM / math.pi**2
        docc = (tA * one + A * z).sum(1)
        dA = tocc[:, None] * one + occ[:, None] * z
        return dx.sum(1), _by_width(b, dM), docc, dA, _trace(dM) / 4, flat, ed.sum(-1)

    run = recomputed(some, g)
    numbers, found = [], []
    ddmap = zeros(g, tuple(g.shape))
    for rows, given, part in _chunks(atoms, a.radius, along, lattice):
        *parts, flat, values = run(g, part, *given)
        add_at(ddmap, int64(flat.reshape(-1)), values.reshape(-1))
        numbers.append(rows)
        found.append(parts)
    return *_whole(atoms_of(a), numbers, found), cast(ddmap.reshape(a.dmap.shape), a.dmap)


def _density_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    last = a.radius, y.order, a.lattice, a.clamp
    return Call(density_vjp, *atoms_of(a), dy.map, *last, out=wanted)


def _vjp_pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    if a.clamp:
        return NotImplemented
    last = a.radius, a.order, a.lattice
    return Call(density_vjp_vjp, *atoms_of(a), a.dmap, *dy, *last, out=wanted)


def _is_ordered(xyz: Any) -> bool:
    """Return whether the map's kernel sorts the atoms, and saves their order for the gradient."""
    return device_of(xyz) not in ("cpu", "meta") and xyz.shape[0] >= ORDERED


_ATOMS = {
    "xyz": "(N, 3)",
    "b": "(N) or (N, 6)",
    "occupancy": "(N)",
    "amplitudes": "(N, G), G > 0",
    "widths": "(N, G)",
}
_RADIUS, _ORDER = {"radius": "(N), optional, number"}, {"order": "(N), optional"}
_SIZES: dict[str, Any] = {"nx, ny, nz": lambda a: a.lattice.shape}
_GRADIENTS = {f"d{name}": f"like {name}" for name in _ATOMS}

density = Primitive(
    "gaussian_density",
    family="density",
    arrays=_ATOMS,
    constants=_RADIUS,
    static={"lattice": Lattice, "clamp": int},
    sizes={**_SIZES, "ordered": lambda a: _is_ordered(a.xyz)},
    outputs={"map": "(nx, ny, nz) of xyz, b, occupancy", "order": "(N) int64 with ordered"},
    formula=_density_formula,
    pullback=_density_pullback,
    saves=("order",),
)
density_vjp = Primitive(
    "gaussian_density_vjp",
    family="density",
    arrays={**_ATOMS, "dmap": "(nx, ny, nz)"},
    constants={**_RADIUS, **_ORDER},
    static={"lattice": Lattice, "clamp": int},
    sizes=_SIZES,
    outputs=_GRADIENTS,
    formula=_vjp_formula,
    pullback=_vjp_pullback,
)
density_vjp_vjp = Primitive(
    "gaussian_density_vjp_vjp",
    family="density",
    arrays={
        **_ATOMS,
        "dmap": "(nx, ny, nz)",
        **{f"dd{name}": f"{line}, optional" for name, line in _ATOMS.items()},
    },
    constants={**_RADIUS, **_ORDER},
    static={"lattice": Lattice},
    sizes=_SIZES,
    outputs={**_GRADIENTS, "ddmap": "like dmap"},
    formula=_vjp_vjp_formula,
)

reach = Primitive(
    "atom_radius",
    family="density",
    arrays={"b": _ATOMS["b"], "widths": _ATOMS["widths"]},
    static={"n_sigma": float},
    outputs={"radius": "(N) of b, widths"},
    formula=lambda a: (_radius(a.b, a.widths, a.n_sigma),),
)


def _in(dtype: Any, value: Any) -> Any:
    """Return an array in `dtype`, as a `Made` if it must be cast."""
    return value if value.dtype == dtype else Made(lambda value: cast(value, dtype), value)


def _constant(name: str, argument: str, value: Any) -> Any:
    """Return a constant array without the wrappers of torch.func."""
    no_derivative(name, argument, value)
    return outside_of_transforms(name, argument, value)


def _raise_or_warn(name: str, on_bad: str, a: Any) -> None:
    """Raise if an atom has no density, or warn that it is left out."""
    hidden = unseen(a.xyz)
    if on_bad != "raise" and (hidden or device_of(a.xyz) != "cpu"):
        return
    if hidden:
        raise TypeError(
            f"{name}: on_bad is 'raise', which has to look at the atoms; inside torch.compile, "
            "torch.vmap or a CUDA graph it should be 'skip' or 'clamp'"
        )
    arrays = map(detached, (*atoms_of(a), a.radius))
    with np.errstate(invalid="ignore", over="ignore"):
        conditions = _conditions(*arrays, lattice=a.lattice, clamp=a.clamp)
    bad = ~_all_of(conditions)
    if not bad.any():
        return
    atom = int(bad.nonzero()[0][0])
    argument, value, should = next(
        (argument, array[atom], should)
        for argument, array, should, good in conditions
        if not good[atom]
    )
    wrong = f"{argument}[{atom}] is {value.tolist()}; it should be {should.format(a.lattice)}"
    if on_bad != "skip":
        raise ValueError(f"{name}: {wrong}")
    warn(f"{name}: {int(bad.sum())} of {len(bad)} atoms are left out; of the first, {wrong}")


@op(density, by_request=("amplitudes", "widths"))
def gaussian_density(
    xyz: ArrayT,
    b: ArrayT,
    occupancy: ArrayT,
    amplitudes: ArrayT,
    widths: ArrayT,
    cell: CellLike | Lattice,
    grid_shape: Sequence[int] | None = None,
    *,
    radius: ArrayT | float | None = None,
    n_sigma: float = 4.0,
    on_bad: OnBad = "raise",
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Return the density of atoms on the grid of a crystal's unit cell.

    .. math:: \rho(v) = \sum_i o_i \sum_{t:\,|w| \le r_i} \sum_g A_{ig}
              \Bigl(\frac{4\pi}{B_{ig} + b_i}\Bigr)^{3/2}
              \exp\Bigl(-\frac{4\pi^2 |w|^2}{B_{ig} + b_i}\Bigr), \quad w = v + t - x_i

    over all lattice vectors t: every image of an atom counts as far as its radius reaches. For an
    anisotropic atom the terms are

    .. math:: A_{ig} \, \pi^{3/2} |M_{ig}|^{-1/2} \exp(-\pi^2 w^\top M_{ig}^{-1} w),
              \quad M_{ig} = (B_{ig} I + 8\pi^2 U_i) / 4.

    Parameters
    ----------
    xyz : array or tensor (N, 3), float32 or float64; in torch 16 bits too
        Cartesian coordinates, Å, anywhere: the cell is repeated.
    b : array or tensor (N,) or (N, 6)
        Isotropic B, Å²; or anisotropic [U11 U22 U33 U12 U13 U23], Cartesian, Å². If some
        atoms are anisotropic, the others have U = B/(8π²) I.
    occupancy : array or tensor (N,)
        Dimensionless.
    amplitudes : array or tensor (N, G)
        Form factors at s = 0: A of Gaussians A exp(-B s²) with s = sin θ/λ; electrons for X-rays, Å
        for electron scattering. A constant term is a Gaussian of width 0.
    widths : array or tensor (N, G)
        B of these Gaussians, Å².
    cell : array (3, 3), or Lattice
        The matrix from fractional to Cartesian coordinates, Å; or a lattice made once for many
        calls, which takes the place of grid_shape too, and may be of some planes alone
        (`Lattice.slab`). Reading a tensor on a GPU waits for the GPU.
    grid_shape : (int, int, int)
        The number of voxels along each edge of the cell.
    radius : float, or array or tensor (N,), optional
        The distance up to which an atom counts, Å; by default `fusedops.density.atom_radius`. The
        box around an atom may be larger than the cell, and has at most 2²⁷ voxels, as many as 512³:
        ``Lattice.largest_radius``.
    n_sigma : float
        The radius in standard deviations of the widest Gaussian, if `radius` isn't given; see
        `fusedops.density.atom_radius` for the rules of TorchRef and gemmi. Time grows with the
        third power of the radius; memory doesn't.
    on_bad : {"raise", "skip", "clamp"}
        The treatment of an atom with a number that isn't finite, a Gaussian of no positive width,
        or a radius that is negative or too large (see `fusedops.density.bad_atoms`). "raise" waits
        for the GPU, if the atoms are on one. "skip" leaves such atoms out: on the CPU with a
        warning that counts them, on a GPU silently and without waiting. "clamp" raises the width
        B + b of every Gaussian to at least 0.4 Å², as TorchRef does; for an anisotropic atom, every
        eigenvalue of B I + 8π² U. A width that it raises has zero derivatives. An atom with another
        fault is an error on the CPU, and left out on a GPU and inside torch.compile.

    Returns
    -------
    array or tensor (nx, ny, nz)
        The map, or its planes of a slab: electrons/Å³ for X-rays. In the dtype to which xyz, b and
        occupancy promote.

    Notes
    -----
    xyz, b, occupancy, amplitudes and widths have gradients, with the set of voxels held fixed: in
    torch of every order, in NumPy of the first. ``gaussian_density.vjp`` returns the gradients by
    xyz, b and occupancy, in this order; wrt=("xyz", "widths") asks for others, in the order of the
    signature. Kernels compute first and second derivatives; torch differentiates the definition for
    higher ones, and for the second with on_bad="clamp". A product of the Hessian with a vector
    takes about three times the time of the gradient on a CPU. Gradients by amplitudes and widths
    take time only if they are asked for.

    On the CPU atoms are summed in their order for any number of threads; on a GPU the order changes
    from run to run, unless ``torch.use_deterministic_algorithms`` asks for a fixed one. A voxel is
    inside up to 1 + 5·10⁻⁶ times the radius. Inside of torch.compile, `cell` should be a `Lattice`
    and `on_bad` "skip" or "clamp".

    References
    ----------
    Form factors: International Tables for Crystallography C (1992), table 6.1.1.4; Peng et al.,
    Acta Cryst. A52 (1996) 257. The truncation follows TorchRef 0.7.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> xyz, b, occupancy = np.array([[1.0, 1.0, 1.0]]), np.array([20.0]), np.array([1.0])
    >>> carbon = np.array([[2.31, 1.02, 1.5886, 0.865, 0.2156]])
    >>> widths = np.array([[20.8439, 10.2075, 0.5687, 51.6512, 0.0]])
    >>> cell = np.diag([12.0, 12.0, 12.0])
    >>> rho = fusedops.gaussian_density(xyz, b, occupancy, carbon, widths, cell, (24, 24, 24))
    >>> print(f"{rho.sum() * 0.5**3:.2f} electrons")
    6.00 electrons
    """
    name = "gaussian_density"
    # Constants of 16-bit atoms keep float32's digits; besides, NumPy has no bfloat16.
    dtype = promoted((xyz, b, occupancy))
    dtype = namespace(xyz).float32 if dtype.itemsize == 2 else dtype
    one_of(name, "on_bad", on_bad, get_args(OnBad))
    if radius is None:
        n_sigma = positive(name, "n_sigma", n_sigma)

        def radius_of(b: Any, widths: Any) -> Any:
            b, widths = (
                cast(detached(outside_of_transforms(name, argument, array)), dtype)
                for argument, array in (("b", b), ("widths", widths))
            )
            if registry.triton_may_serve(b, registry.forced(None)):
                return reach(b, widths, n_sigma)[0]
            return _radius(b, widths, n_sigma)

        in_radius: Any = Made(radius_of, b, widths)
    elif isinstance(radius, numbers.Real):
        number = real(name, "radius", radius)
        # Made from widths, not from xyz, which torch.vmap may map over.
        in_radius = Made(lambda widths: _full(number, dtype, widths), widths)
    else:
        in_radius = _in(dtype, _constant(name, "radius", radius))
    lattice = read_lattice(name, cell, grid_shape, xyz)
    atoms: tuple[Any, ...] = xyz, b, occupancy, _in(dtype, amplitudes), _in(dtype, widths)
    return to_run(
        (*atoms, in_radius, lattice, int(on_bad == "clamp")),
        "map",
        functools.partial(_raise_or_warn, name, on_bad),
    )


def _full(number: float, dtype: Any, like: Any) -> Any:
    # Not len(like), which torch.compile would make a constant.
    return namespace(like).full(like.shape[:1], number, dtype=dtype, **beside(like))
