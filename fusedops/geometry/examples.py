"""Calls of restraints of geometry, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops.geometry.op import nll, nll_vjp, nll_vjp_vjp
from fusedops.geometry.plan import Restraints
from fusedops.samples import backbone


def _backbone(rng: np.random.Generator, residues: int) -> tuple[np.ndarray, Restraints]:
    xyz, restraints = backbone(residues, rng)
    return xyz, Restraints(**restraints)


def _none(rng: np.random.Generator) -> tuple[np.ndarray, Restraints]:
    return rng.normal(size=(5, 3)), Restraints()


def _degenerate(rng: np.random.Generator) -> tuple[np.ndarray, Restraints]:
    """Atoms on one point, on a line, and in a plane."""
    point, line = np.zeros((4, 3)), np.arange(4)[:, None] * [1.0, 2.0, -2.0]
    square = np.array([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]])
    xyz = np.concatenate([point, line, square])
    quads, ones = np.arange(12).reshape(3, 4), np.ones(3)
    pairs = {"indices": quads[:, :2], "ideals": 1.4, "sigmas": 0.5}
    return xyz, Restraints(
        bonds=pairs,
        angles={"indices": quads[:, :3], "ideals": 110.0 * ones, "sigmas": 20.0},
        torsions={"indices": quads, "ideals": 47.0, "sigmas": 20.0, "periods": [1, 2, 3]},
        chirals={"indices": quads, "ideals": [2.4, 0.0, 0.0], "sigmas": 0.5},
        # Second derivatives of two atoms on one point stay within the range of float16.
        contacts={"indices": quads[:, ::3], "distances": 1.5, "sigmas": 2.0},
    )


def cases() -> list[Case]:
    def add(name: str, build: Any) -> None:
        def make(primitive: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(7)
            xyz, restraints = build(rng)
            atoms = len(xyz)
            given = {"xyz": xyz, "b": rng.uniform(5, 50, atoms), "dnlls": rng.normal(size=6)}
            given |= {"ddxyz": rng.normal(size=(atoms, 3)), "ddb": rng.normal(size=atoms)}
            return tuple([given[array] for array in primitive.arrays]), (restraints,)

        for primitive in (nll, nll_vjp, nll_vjp_vjp):
            found.append(Case(name, primitive, functools.partial(make, primitive)))

    found: list[Case] = []
    add("backbone", functools.partial(_backbone, residues=12))
    add("long", functools.partial(_backbone, residues=120))
    add("degenerate", _degenerate)
    add("no-restraints", _none)
    return found


def restrained(rng: Any, residues: int, *, factors: bool) -> dict[str, Any]:
    """A backbone, with B factors or without."""
    xyz, restraints = backbone(residues, rng)
    if not factors:
        del restraints["b_pairs"]
    given = {"xyz": xyz, "restraints": Restraints(**restraints)}
    return {**given, "b": rng.uniform(5, 50, len(xyz))} if factors else given


def examples() -> list[Example]:
    return [
        example(
            "geometry" if factors else "geometry-without-b",
            fusedops.geometry_nll,
            functools.partial(restrained, factors=factors),
            "xyz",
            *(["b"] if factors else []),
            tiny=(2,),
            small=(4,),
            medium=(24,),
            large=(800,),
            # Sizes that are equal by chance would be one to the compiler.
            others=((10,), (12,), (17,)),
            needed=("b",),
        )
        for factors in (True, False)
    ]


def arguments() -> Arguments:
    index, quad = np.array([[0, 1]]), np.array([[0, 1, 2, 3]])
    one = np.array([1.0])
    terms = {"ideals": one, "sigmas": one}
    given: dict[str, Any] = {
        "bonds": {"indices": index, **terms},
        "angles": {"indices": quad[:, :3], **terms},
        "torsions": {"indices": quad, **terms},
        "chirals": {"indices": quad, **terms},
        "contacts": {"indices": index, "distances": one, "sigmas": one},
        "b_pairs": {"indices": index, "sigmas": one},
    }
    return {
        fusedops.Restraints: {**given, "num_atoms": 4},
        fusedops.geometry_nll: {
            "xyz": np.ones((4, 3)),
            "restraints": Restraints(**given),
            "b": np.ones(4),
            "out": np.ones(6),
        },
    }
