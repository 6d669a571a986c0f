"""Calls of Wigner D matrices, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fusedops._catalogue import Arguments, Case, Example, example
from fusedops.harmonics.op import (
    matrices,
    matrices_vjp,
    matrices_vjp_vjp,
    matrix_size,
    wigner_d,
    wigner_d_of,
)


def cases() -> list[Case]:
    def add(name: str, lmax: int, layout: str, edges: int | None = None) -> None:
        def make(count: int) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(lmax)
            axes = np.concatenate([np.eye(3), -np.eye(3)])
            # Beside the poles and the equator, and no direction at all.
            beside = [[1e-6, 1, -1e-6], [1e-6, -1, 1e-6], [1, 1e-6, 1], [1, -1e-6, 1], [0, 0, 0]]
            vectors = np.concatenate([axes, beside, rng.normal(size=(6, 3))])[:edges]
            shape = len(vectors), *matrix_size(lmax, layout == "packed")
            arrays = vectors, rng.normal(size=shape), rng.normal(size=vectors.shape)
            return arrays[:count], (lmax, layout)

        # Torch's formula makes degrees of each other in float32; kernels round once.
        terms = 64 * (lmax + 1) ** 2
        for count, kind in enumerate((matrices, matrices_vjp, matrices_vjp_vjp), 1):
            found.append(Case(name, kind, functools.partial(make, count), terms))

    found: list[Case] = []
    for lmax in (2, 0, 1, 3, 6, 8):
        for layout in ("dense", "packed"):
            add(f"l{lmax}-{layout}", lmax, layout)
    add("no-edges-dense", 2, "dense", 0)
    add("no-edges-packed", 0, "packed", 0)
    return found


def directions(rng: Any, edges: int, lmax: int, *, packed: bool) -> dict[str, Any]:
    return {"edge_vec": rng.normal(size=(edges, 3)), "lmax": lmax, "packed": packed}


def examples() -> list[Example]:
    return [
        *(
            example(
                f"matrices-{layout}",
                wigner_d,
                functools.partial(directions, packed=layout == "packed"),
                "edge_vec",
                tiny=(2, 1),
                small=(7, 2),
                medium=(7, 3),
                large=(500, 2),
                # Torch's formula makes degrees of each other in float32.
                many=576,
                others=((20, 2), (37, 2), (50, 2)),
            )
            for layout in ("dense", "packed")
        ),
    ]


def arguments() -> Arguments:
    return {
        wigner_d: {"edge_vec": np.ones((2, 3)), "lmax": 1, "packed": True, "out": np.ones((2, 10))},
        wigner_d_of: {"rotation": np.ones((2, 3)), "lmax": 1, "packed": True},
    }
