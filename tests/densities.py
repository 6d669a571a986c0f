"""Atoms in cells of many shapes, and their density as a sum over atoms, images and voxels."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from contract import same, tensor
from fusedops import Lattice, gaussian_density
from fusedops._frame.arrays import namespace
from fusedops._frame.check import is_tensor
from fusedops.samples import atoms_in
from fusedops.testing import TOLERANCE, error
from places import EXACT, HAS_TORCH

if HAS_TORCH:
    import torch

NAMES = ("xyz", "b", "occupancy", "amplitudes", "widths")
_TRICLINIC = [[6.0, 2.0, -3.0], [0.0, 5.0, 2.0], [0.0, 0.0, 5.0]]
#: The matrix of a cell, its grid, and the largest radius.
CELLS = {
    "orthogonal": (np.diag([6.0, 7.0, 8.0]), (9, 10, 11), 2.3),
    "monoclinic": ([[6.0, 0.0, -2.0], [0.0, 7.0, 0.0], [0.0, 0.0, 6.0]], (9, 10, 8), 2.4),
    "triclinic": (_TRICLINIC, (8, 7, 6), 2.1),
    "very skewed": ([[4.0, 14.5, -9.3], [0.0, 4.0, 7.7], [0.0, 0.0, 4.0]], (7, 6, 8), 1.8),
    "left-handed": ([[0.3, 5.0, -2.0], [6.0, -1.0, 0.5], [1.0, 2.0, 5.5]], (8, 7, 6), 2.2),
    "smaller than the sphere": (np.diag([3.0, 3.3, 2.9]), (6, 7, 5), 4.0),
    "skewed and smaller": ([[3.0, 1.0, -1.4], [0.0, 3.0, 5.1], [0.0, 0.0, 2.8]], (6, 5, 7), 4.0),
    "thin": (np.diag([3.0, 12.0, 4.0]), (5, 18, 6), 2.5),
    "thinner": ([[1.5, 0.3, 0.0], [0.0, 1.2, 0.2], [0.0, 0.0, 9.0]], (2, 1, 20), 4.0),
    "of one voxel": (_TRICLINIC, (1, 1, 1), 7.0),
}
#: Cells around which boxes of atoms go many times.
BOXES = {
    "thin along x": (np.diag([0.02, 5.0, 6.0]), (1, 8, 9), 2.2),
    "thin along y": (np.diag([5.0, 0.02, 6.0]), (8, 1, 9), 2.2),
    "thin along z": (np.diag([5.0, 6.0, 0.02]), (8, 9, 1), 2.2),
    "one plane": (np.diag([6.0, 5.0, 4.0]), (1, 7, 8), 13.0),
    "one row": (np.diag([6.0, 5.0, 4.0]), (1, 1, 8), 19.0),
}
CELLS |= BOXES


class Problem(NamedTuple):
    """The arguments of a density, and a cotangent of it."""

    xyz: Any
    b: Any
    occupancy: Any
    amplitudes: Any
    widths: Any
    radius: Any
    cell: Any
    shape: tuple[int, ...]
    cotangent: Any

    @property
    def atoms(self):
        return self[:5]

    @property
    def lattice(self):
        return Lattice(self.cell, self.shape)

    def of(self, rows):
        """Return the problem of some of the atoms."""
        return Problem(*(a[rows] for a in self[:6]), *self[6:])

    def astype(self, dtype):
        return Problem(*(a.astype(dtype) for a in self[:6]), *self[6:8], self[8].astype(dtype))


def problem(
    name="triclinic", count=4, gaussians=5, *, anisotropic=False, dtype="float64", seed=0
) -> Problem:
    """Return atoms in and around a cell, each with a random radius; one Gaussian is of nothing."""
    cell, shape, radius = CELLS[name]
    return atoms_of(cell, shape, radius, count, gaussians, anisotropic, seed).astype(dtype)


def atoms_of(cell, shape, radius, count=2, gaussians=5, anisotropic=False, seed=0) -> Problem:
    cell, rng = np.array(cell), np.random.default_rng(seed)
    *atoms, amplitudes, widths = atoms_in(cell, count, rng, anisotropic=anisotropic)
    columns = np.arange(gaussians) % 5
    amplitudes, widths = amplitudes[:, columns], widths[:, columns]
    if gaussians > 1:
        amplitudes[:1, 1] = 0
    radii = rng.uniform(0.7, 1.0, count) * radius
    return Problem(*atoms, amplitudes, widths, radii, cell, shape, rng.normal(size=shape))


def too_sharp(name="triclinic", *, anisotropic=False, dtype="float64") -> Problem:
    """Return wide atoms, and atoms whose widths are negative in some directions or in all."""
    p = problem(name, 5, anisotropic=anisotropic, dtype=dtype)
    if anisotropic:
        p.b[:3, :3] -= np.array([[0.8, 0.1, 0.0], [0.8, 0.8, 0.0], [2.0, 2.0, 2.0]], dtype)
        p.b[3] = 0
    else:
        # All Gaussians of the third and the fourth are too sharp, or only its constant.
        p.b[:4] = -2, -30, -99, 0
    return p


def direct(p: Problem) -> Any:
    """Return the density as a function of arrays or tensors, with atoms' voxels held fixed."""
    voxels = [np.arange(n) / n for n in p.shape]
    voxels = np.stack(np.meshgrid(*voxels, indexing="ij"), -1).reshape(-1, 1, 3)
    reach = p.radius.max(initial=0) * np.linalg.norm(np.linalg.inv(p.cell), axis=1)
    far = [math.floor(k * (1 + 1e-5) + 0.5) for k in reach]
    cells = np.array(list(itertools.product(*(range(-k, k + 1) for k in far))))
    start, rows = p.xyz.astype(np.float64), np.array([[0, 3, 4], [3, 1, 5], [4, 5, 2]])
    met = []
    for place, radius in zip(np.linalg.solve(p.cell, start.T).T, p.radius, strict=True):
        apart = voxels - place
        w = (apart - np.rint(apart) + cells) @ p.cell.T
        inside = np.linalg.norm(w, axis=-1) <= radius * (1 + 5e-6)
        met.append((inside.nonzero()[0], w[inside]))

    def function(*atoms):
        xp = namespace(atoms[0])
        total, eye = xp.zeros(len(voxels), dtype=xp.float64), xp.eye(3, dtype=xp.float64)
        for i, (voxel, w) in enumerate(met):
            x, b, occupancy, amplitudes, widths = (array[i] for array in atoms)
            w = xp.asarray(w) - (x - xp.asarray(start[i]))
            B = b * eye if b.ndim == 0 else 8 * math.pi**2 * b[rows]
            M = (widths[:, None, None] * eye + B) / 4
            q = math.pi**2 * xp.einsum("vi,gij,vj->gv", w, xp.linalg.inv(M), w)
            norm = occupancy * amplitudes * math.pi**1.5 / xp.sqrt(xp.linalg.det(M))
            values = (norm[:, None] * xp.exp(-q)).sum(0)
            if is_tensor(total):
                total = total.index_add(0, torch.from_numpy(voxel), values)
            else:
                np.add.at(total, voxel, values)
        return total.reshape(p.shape)

    return function


def summed(p: Problem) -> np.ndarray:
    """Return the map of the direct sum, in float64."""
    return direct(p)(*p.astype("float64").atoms)


def leaves_of(p, names=NAMES[:3]):
    return [tensor(getattr(p, name).copy()).requires_grad_() for name in names]


def function_of(p, backend=None, lattice=None, **options):
    """Return the density as a function of tensors of the first of its arrays."""
    atoms, lattice = [tensor(a) for a in p.atoms], p.lattice if lattice is None else lattice
    options = {"radius": tensor(p.radius), "backend": backend, **options}

    def function(*leaves, **more):
        return gaussian_density(*leaves, *atoms[len(leaves) :], lattice, **options, **more)

    return function


def evaluate(place, p, **options):
    """Return the map, an array."""
    arrays = [tensor(a) for a in p[:6]] if place[0] == "torch" else p[:6]
    options = {"cell": p.cell, "grid_shape": p.shape, "radius": arrays[5], **options}
    return np.asarray(gaussian_density(*arrays[:5], **options, backend=place[1]))


def solve(place, p, names=NAMES[:3], *, cell=None, cotangent=None, **options):
    """Return the map and the gradients by the first arrays, as arrays."""
    cell = p.lattice if cell is None else cell
    cotangent = p.cotangent if cotangent is None else cotangent
    if place[0] == "numpy":
        options = {"radius": p.radius, "backend": place[1], **options}
        out, pullback = gaussian_density.vjp(*p.atoms, cell, wrt=names, **options)
        return [out, *pullback(cotangent)]
    leaves, atoms = leaves_of(p, names), [tensor(a) for a in p.atoms]
    options = {"radius": tensor(p.radius), "backend": place[1], **options}
    out = gaussian_density(*leaves, *atoms[len(leaves) :], cell, **options)
    found = (out, *torch.autograd.grad(out, leaves, tensor(cotangent)))
    return [np.asarray(array.detach()) for array in found]


def close(got, want, dtype=None, terms=64):
    """Compare with a reference by the matrix's tolerance for sums of that many products."""
    dtype = str(got.dtype) if dtype is None else dtype
    assert error(got, want) <= TOLERANCE[dtype] * max(1.0, terms**0.5 / 8)


def all_close(got, want, dtype=None, terms=4000):
    """Compare derivatives, which cancel, so that many roundings count."""
    for one, other in zip(got, want, strict=True):
        close(one, other, dtype, terms)


def agree(place, got, want):
    assert got.dtype == want.dtype
    (same if place[1] in EXACT else close)(got, want)
