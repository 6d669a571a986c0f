"""The planarity restraint: how far groups of atoms are from their best planes.

The definition of value, gradient and the gradient's own derivative, and the public ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np

from fusedops._frame.arrays import add_at, cast, double, int64, namespace, zeros
from fusedops._frame.check import (
    accumulator,
    arrays_only,
    device_of,
    on_host,
    one_of,
    same_device,
)
from fusedops._frame.hook import outside_of_graphs
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Primitive
from fusedops._frame.registry import BackendName
from fusedops._frame.shapes import checked
from fusedops.planarity.eigenvector import pseudo_solve, smallest_eigenvector
from fusedops.planarity.plan import (
    FITS,
    Fit,
    Planes,
    arrays_of,
    as_columns,
    checked_groups,
    read_planes,
    with_planes,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch import Tensor

    PlaneGroups: TypeAlias = "Planes | Sequence[tuple[Any, Any]]"


def _runs(like: Any, planes: Planes) -> list[tuple[Any, Any]]:
    """Return indices (P, n) and 1/σ², (P, n) or (P, 1), of the planes of every size n."""
    fields = planes.fields_like(like)
    index, weight, ptr = int64(fields.index), fields.weight, on_host(planes.plane_ptr)
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


def scattered(rows: list[tuple[Any, Any]], like: Any) -> Any:
    """Return an array like another with every row added to its atom."""
    out = double(zeros(like, tuple(like.shape)))
    for index, row in rows:
        add_at(out, index, row, in_order=True)
    return cast(out, like)


def _nll_formula(a: Any) -> tuple[Any, Any]:
    """Define the restraint and its gradient."""
    xyz, planes, fit = a
    total = planes.fields_like(xyz).constant
    rows = []
    for index, weight in _runs(xyz, planes):
        plane = _Fit(xyz, index, weight, fit)
        total = total + 0.5 * (weight * plane.d**2).sum()
        g = plane.centred(weight * plane.d, fit)
        rows.append((index, g[..., None] * plane.normal[:, None]))
    like = cast(xyz, accumulator(xyz))
    return cast(total.reshape(()), like), scattered(rows, like)


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
    return (scattered(rows, cast(xyz, accumulator(xyz))),)


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
    outputs={"dxyz": "(N, 3) summed of xyz"},
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


def _check(name: str, xyz: Any, plane_groups: Any, fit: str) -> Any:
    planes = plane_groups
    if not isinstance(planes, Planes):
        planes = read_planes(name, planes, xyz)
    same_device(name, "plane_groups", planes.device, "xyz", device_of(xyz))
    if planes.bound > xyz.shape[0]:
        raise IndexError(
            f"{name}: plane_groups has index {planes.bound - 1}; it should be below "
            f"{xyz.shape[0]}, the number of atoms in xyz"
        )
    one_of(name, "fit", fit, FITS)
    return to_run((xyz, planes, fit), "nll")


@op(nll, overloads=_Nll, pack=with_planes)  # type: ignore[type-abstract]
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
    arrays_only("plane_deviations", "xyz", xyz)
    checked("plane_deviations", nll.declared, {"xyz": xyz}, ())
    groups, device = checked_groups(arrays_of(plane_groups))
    same_device("plane_deviations", "plane_groups", device, "xyz", "cpu")
    _check("plane_deviations", xyz, groups, fit)
    return [
        _Fit(np.asarray(xyz), index, as_columns(1 / sigma.astype(np.float64) ** 2), fit).d
        for index, sigma in groups
    ]
