"""How flat the planar groups of a structure are, and coordinates in which they are flatter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fusedops
from fusedops._frame.check import floats, of_shape, real, refuse, size, values
from fusedops._frame.registry import BackendName
from fusedops.planarity import Fit
from fusedops.structure import PlanarGroups, Structure, checked_xyz

__all__ = ["Flatness", "PlaneScore", "flatness", "flattened"]

#: The Z above which validation programs list a plane or an atom.
LIMIT = 4


@dataclass(frozen=True)
class PlaneScore:
    """The distances of a plane's atoms from it; `z` and `deviation_angstrom` are the worst atom's.

    Attributes
    ----------
    plane : str
        As in `fusedops.structure.PlanarGroups`.
    atoms : int
        The number of atoms.
    z : float
        The largest distance of an atom over its sigma.
    rms_angstrom : float
        The root of the mean square distance.
    worst_atom : str
        As in `fusedops.structure.Structure`.
    deviation_angstrom : float
        With a sign.

    Examples
    --------
    >>> PlaneScore("A/PHE 45 ring", 7, 4.5, 0.04, "A/PHE 45 CZ", -0.09).z
    4.5
    """

    plane: str
    atoms: int
    z: float
    rms_angstrom: float
    worst_atom: str
    deviation_angstrom: float


@dataclass(frozen=True)
class Flatness:
    """Scores of planes, and of all of their atoms together.

    Attributes
    ----------
    planes : list of PlaneScore
        The worst one first.
    rmsd_angstrom, rmsz : float or None
        Over all atoms of all planes; None without planes.
    planes_above_4_sigma, atoms_above_4_sigma : int
        An atom counts once, even if it is in two planes.

    Examples
    --------
    >>> from fusedops.samples import ubiquitin
    >>> from fusedops.structure import planar_groups
    >>> structure = ubiquitin()
    >>> found = flatness(structure, planar_groups(structure))
    >>> len(found.planes), found.planes_above_4_sigma
    (103, 0)
    """

    planes: list[PlaneScore]
    rmsd_angstrom: float | None
    rmsz: float | None
    planes_above_4_sigma: int
    atoms_above_4_sigma: int


def flatness(
    structure: Structure,
    found: PlanarGroups,
    xyz: np.ndarray | None = None,
    *,
    fit: Fit = "uniform",
) -> Flatness:
    """Return the scores of a structure's planar groups.

    Parameters
    ----------
    structure : Structure
        From `fusedops.structure.read_structure`.
    found : PlanarGroups
        From `fusedops.structure.planar_groups`.
    xyz : (N, 3) array, optional
        Coordinates in Å in place of the structure's.
    fit : {"uniform", "weighted"}
        The weights of atoms in fits of planes.

    Returns
    -------
    Flatness

    Raises
    ------
    TypeError, ValueError
        `xyz` has another dtype or shape than the structure's; or a coordinate isn't finite, or is
        beyond 1,000,000 Å.

    Examples
    --------
    >>> from fusedops.samples import ubiquitin
    >>> from fusedops.structure import planar_groups
    >>> structure = ubiquitin()
    >>> worst = flatness(structure, planar_groups(structure)).planes[0]
    >>> worst.plane, round(worst.z, 2)
    ('A/ARG 74 guanidinium', 2.71)
    """
    xyz = structure.xyz if xyz is None else checked_xyz("flatness", structure, xyz)
    planes: list[PlaneScore] = []
    distances, scores, bad = [np.empty(0)], [np.empty(0)], [np.empty(0, np.int64)]
    deviations = fusedops.plane_deviations(xyz, found.groups, fit=fit)
    for (indices, sigmas), labels, d in zip(found.groups, found.labels, deviations, strict=True):
        z = abs(d) / sigmas.reshape(len(d), -1)
        distances.append(d.ravel())
        scores.append(z.ravel())
        bad.append(indices[z > LIMIT])
        rms, worst = np.sqrt((d**2).mean(axis=1)).tolist(), z.argmax(axis=1).tolist()
        for p, (label, k) in enumerate(zip(labels, worst, strict=True)):
            atom, off = structure.labels[indices[p, k]], float(d[p, k])
            planes.append(PlaneScore(label, indices.shape[1], float(z[p, k]), rms[p], atom, off))
    planes.sort(key=lambda plane: plane.z, reverse=True)
    rmsd, rmsz = (
        float(np.sqrt(np.square(np.concatenate(each)).mean())) if planes else None
        for each in (distances, scores)
    )
    above = sum(plane.z > LIMIT for plane in planes)
    return Flatness(planes, rmsd, rmsz, above, len(np.unique(np.concatenate(bad))))


def flattened(
    xyz: np.ndarray,
    planes: Any,
    *,
    steps: int = 20,
    tether: float = 25.0,
    fit: Fit = "uniform",
    backend: BackendName | None = None,
    advance: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, int]:
    """Return coordinates that minimise the planarity restraint and a harmonic tether, by L-BFGS.

    Parameters
    ----------
    xyz : (N, 3) array
        Coordinates in Å.
    planes : Planes or list of (indices, sigmas)
        As `fusedops.planarity_nll` takes them.
    steps : int
        The most steps.
    tether : float
        K of the tether K/2 ``|x - x0|²``, 1/Å².
    fit, backend
        See `fusedops.planarity_nll`.
    advance : function
        Called after each step.

    Returns
    -------
    xyz : (N, 3) float64 array
        Atoms in no plane stay.
    steps : int
        The number of steps.

    Raises
    ------
    TypeError, ValueError
        `xyz` has another shape, isn't of real numbers or isn't finite; `tether` isn't finite;
        `tether` or `steps` is negative; or as `fusedops.planarity_nll`.

    Examples
    --------
    >>> square = np.array([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0.2]])
    >>> flat, _ = flattened(square, [([[0, 1, 2, 3]], [0.02])])
    >>> bool(abs(fusedops.plane_deviations(flat, [([[0, 1, 2, 3]], [0.02])])[0]).max() < 0.01)
    True
    """
    from scipy.optimize import minimize

    op = "flattened"
    xyz = floats(op, "xyz", values(op, "xyz", xyz))
    of_shape(op, "xyz", xyz, ("N", 3))
    if not np.isfinite(xyz).all():
        first = int(np.isfinite(xyz).all(axis=1).argmin())
        refuse(ValueError, op, f"xyz[{first}]", f"is {xyz[first].tolist()}", "be finite")
    if not 0 <= real(op, "tether", tether) < np.inf:
        refuse(ValueError, op, "tether", f"is {tether!r}", "be a number of at least 0")
    if not size(op, "steps", steps):
        # SciPy takes a step before it counts.
        return xyz.astype(np.float64), 0

    def energy(flat: np.ndarray) -> tuple[float, np.ndarray]:
        moved = flat.reshape(-1, 3)
        value, pullback = fusedops.planarity_nll.vjp(moved, planes, fit=fit, backend=backend)
        shift = moved - xyz
        tethered = float(value) + 0.5 * tether * np.vdot(shift, shift)
        return tethered, (pullback(1.0)[0] + tether * shift).ravel()

    result = minimize(
        energy,
        xyz.ravel(),
        jac=True,
        method="L-BFGS-B",
        callback=lambda _: advance(),
        options={"maxiter": steps},
    )
    return result.x.reshape(-1, 3), int(result.nit)
