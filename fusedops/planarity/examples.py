"""Calls of planarity restraints, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops._pictures import space
from fusedops.planarity.op import gradient_vjp, nll
from fusedops.planarity.plan import Planes
from fusedops.samples import protein, ubiquitin
from fusedops.structure import planar_groups


def _chain(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    xyz, indices = protein(24, rng, noise=0.05)
    return xyz, [(index, np.full(len(index), 0.02)) for index in indices]


def _atom_sigmas(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    xyz, indices = protein(24, rng, noise=0.05)
    return xyz, [
        (index.astype(np.int32), rng.uniform(0.01, 0.05, index.shape if g % 2 else len(index)))
        for g, index in enumerate(indices)
    ]


def _sizes(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    """Groups of 3 to 70 atoms in no order, at random positions: nothing like a plane."""
    xyz = rng.normal(size=(90, 3)) * [5, 3, 1]
    groups = [
        (np.stack([rng.choice(80, n, replace=False) for _ in range(p)]), rng.uniform(0.1, 1, p))
        for n, p in ((64, 1), (3, 4), (17, 2), (4, 19), (70, 1), (3, 2), (9, 5))
    ]
    return xyz, groups


def _shared(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    """Every atom in many planes, one twice in a plane, and atoms in none."""
    xyz = rng.normal(size=(40, 3)) * [4, 4, 0.2]
    return xyz, [(rng.integers(3, 15, (30, 5)), np.full(30, 0.3))]


def _degenerate(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    """Among good planes: an exact one, a line, a point, and coordinates that aren't finite."""
    xyz, groups = _chain(rng)
    square = np.array([[0.0, 0, 0], [2, 0, 0], [2, 2, 0], [0, 2, 0]])
    line = np.arange(4)[:, None] * [1.0, 2.0, -2.0]
    point = np.full((4, 3), 7.25)
    nan, infinite = square.copy(), square.copy()
    nan[1, 2] = np.nan
    infinite[2, 0] = -np.inf
    at = len(xyz)
    extra = [square, line, point, nan, infinite]
    index = at + np.arange(4 * len(extra)).reshape(-1, 4)
    return np.concatenate([xyz, *extra]), [*groups, (index, np.full(len(extra), 0.02))]


def _none(rng: np.random.Generator) -> tuple[np.ndarray, list[Any]]:
    return rng.normal(size=(5, 3)), []


def cases() -> list[Case]:
    def add(name: str, build: Callable[..., Any], fit: str) -> None:
        def make(direction: bool) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(7)
            xyz, groups = build(rng)
            arrays = (xyz, rng.normal(size=xyz.shape)) if direction else (xyz,)
            return arrays, (Planes(groups), fit)

        found.append(Case(f"{name}-{fit}", nll, lambda: make(False)))
        found.append(Case(f"{name}-{fit}", gradient_vjp, lambda: make(True)))

    found: list[Case] = []
    for fit in ("uniform", "weighted"):
        add("chain", _chain, fit)
        add("atom_sigmas", _atom_sigmas, fit)
        add("sizes", _sizes, fit)
        add("shared", _shared, fit)
        add("degenerate", _degenerate, fit)
    add("none", _none, "uniform")
    return found


def planarity(rng: Any, residues: int, *, sigmas: str, fit: str) -> dict[str, Any]:
    xyz, indices = protein(residues, rng, noise=0.2)
    if residues == 1:
        # Rings have many atoms, which make derivatives along every coordinate slow.
        xyz, indices = xyz[:9], indices[:2]
    groups = [
        (i, np.full(len(i), 0.5) if sigmas == "plane" else rng.uniform(0.3, 0.6, i.shape))
        for i in indices
    ]
    return {"xyz": xyz, "plane_groups": fusedops.Planes(groups), "fit": fit}


def examples() -> list[Example]:
    return [
        *(
            example(
                f"planarity-{fit}",
                fusedops.planarity_nll,
                functools.partial(planarity, sigmas=sigmas, fit=fit),
                "xyz",
                tiny=(1,),
                small=(8,),
                medium=(24,),
                large=(800,),
                # Sizes that are equal by chance would be one to the compiler.
                others=((10,), (12,), (17,)),
            )
            for sigmas, fit in (("plane", "uniform"), ("atom", "weighted"))
        ),
    ]


def arguments() -> Arguments:
    groups = [(np.array([[0, 1, 2, 3]]), np.array([0.1]))]
    given = {"xyz": np.ones((4, 3)), "plane_groups": groups, "fit": "uniform"}
    return {
        fusedops.Planes: {"plane_groups": groups, "num_atoms": 4},
        fusedops.planarity_nll: given,
        fusedops.plane_deviations: given,
    }


def _draw(figure: Any) -> None:
    """Planar groups of ubiquitin, coloured by the Z of the worst atom"""
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection
    from scipy.spatial import ConvexHull

    structure = ubiquitin()
    groups = planar_groups(structure).groups
    deviations = fusedops.plane_deviations(structure.xyz, groups)
    z = [abs(d).max(1) / sigma for d, (_, sigma) in zip(deviations, groups, strict=True)]
    outlines = []
    for points in (structure.xyz[plane] for indices, _ in groups for plane in indices):
        off = points - points.mean(0)
        outlines.append(points[ConvexHull(off @ np.linalg.svd(off)[2][:2].T).vertices])
    faces = Poly3DCollection(outlines, array=np.concatenate(z), clim=(0, None), ec="0.3", lw=0.4)
    panel = space(figure, np.concatenate(outlines))
    # autolim would read Matplotlib's uninitialised padding of short polygons.
    panel.add_collection3d(faces, autolim=False)
    figure.colorbar(faces, ax=panel, shrink=0.6, label="Z")


pictures = {"planarity": _draw}
