"""Calls of scatter and gather, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops.samples import cubes
from fusedops.scatter.op import gather, scatter
from fusedops.scatter.plan import ScatterPlan


def cases() -> list[Case]:
    def add(
        name: str,
        shape: tuple[int, int, int, int],
        grid: tuple[int, int, int] | int,
        index: str = "int64",
        terms: int = 0,
    ) -> None:
        """Add a case on a crystal's grid, or, if `grid` is a map's size, with indices anywhere."""

        def make(back: bool) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(shape[0])
            count, *cube = shape
            if isinstance(grid, int):
                wa = rng.integers(0, grid // 2, (count, cube[0]))
                wbwc = rng.integers(0, grid - grid // 2, (count, *cube[1:]))
                elements = grid
            else:
                wa, wbwc = cubes(rng, count, grid, cube)
                elements = int(np.prod(grid))
            plan = ScatterPlan(wa.astype(index), wbwc.astype(index), elements)
            return (rng.normal(size=elements if back else shape),), (plan,)

        found.append(Case(name, scatter, lambda: make(False), terms))
        found.append(Case(name, gather, lambda: make(True)))

    found: list[Case] = []
    add("torchref", (30, 9, 9, 9), (24, 20, 28))
    add("odd", (7, 5, 4, 3), (12, 9, 11), "int32")
    add("wrapped", (3, 5, 7, 9), (4, 5, 6))
    add("parts", (2, 3, 4, 33), (9, 250, 256), "int32")
    add("rows", (2, 3, 2, 70), (5, 6, 90))
    add("anywhere", (5, 3, 4, 5), 77)
    # Sums of 174 terms, in any order where atomics add them: the error of 1,000 in a good order.
    add("one", (40, 2, 2, 2), 3, terms=1000)
    add("far", (4, 3, 2, 3), 1_000_000)
    add("point", (6, 1, 1, 1), (5, 5, 5))
    add("no-cubes", (0, 3, 3, 3), (5, 5, 5))
    add("no-planes", (3, 0, 3, 3), (5, 5, 5))
    add("no-rows", (3, 3, 3, 0), (5, 5, 5))
    return found


def scattered(
    rng: Any, C: int, nx: int, ny: int, nz: int, n: int, *, back: bool = False, raw: bool = False
) -> dict[str, Any]:
    """Cubes of a periodic grid n³ that overlap; raw ones lie anywhere in the map."""
    size = n**3
    if raw:
        wa, wbwc = rng.integers(-9, size // 2, (C, nx)), rng.integers(9, size // 2, (C, ny, nz))
    else:
        wa, wbwc = cubes(rng, C, (n, n, n), (nx, ny, nz))
    values = (
        {"grid": rng.normal(size=size)}
        if back
        else {"density_cube": rng.normal(size=(C, nx, ny, nz))}
    )
    if not raw:
        return {**values, "wa": fusedops.ScatterPlan(wa, wbwc, size)}
    return {**values, "wa": wa, "wbwc": wbwc, **({} if back else {"map_size": size})}


def _scatter(name: str, op: Any, leaf: str, **options: Any) -> Example:
    return example(
        name,
        op,
        functools.partial(scattered, **options),
        leaf,
        tiny=(2, 2, 1, 3, 3),
        small=(3, 2, 3, 5, 5),
        medium=(5, 3, 4, 6, 5),
        # A map of several parts, with many cubes in each.
        large=(90, 5, 6, 19, 104),
        others=((5, 3, 4, 6, 5), (8, 5, 7, 9, 7), (4, 3, 4, 6, 9)),
        packs=True,
    )


def examples() -> list[Example]:
    return [
        _scatter("scatter", fusedops.structured_scatter_add, "density_cube"),
        _scatter("gather", fusedops.structured_gather, "grid", back=True),
    ]


def arguments() -> Arguments:
    wa, wbwc = np.zeros((2, 1), np.int64), np.zeros((2, 1, 3), np.int64)
    return {
        fusedops.ScatterPlan: {"wa": wa, "wbwc": wbwc, "map_size": 2, "copy": False},
        fusedops.structured_scatter_add: {
            "density_cube": np.ones((2, 1, 1, 3)),
            "wa": wa,
            "wbwc": wbwc,
            "map_size": 2,
            "out": np.ones(2),
        },
        fusedops.structured_gather: {
            "grid": np.ones(2),
            "wa": wa,
            "wbwc": wbwc,
            "out": np.ones((2, 1, 1, 3)),
        },
    }


def _draw(figure: Any) -> None:
    """Cubes around points add up in a periodic map, here summed along z"""
    wa, wbwc = cubes(np.random.default_rng(3), 30, (24, 24, 24), (9, 9, 9))
    plan = fusedops.ScatterPlan(wa, wbwc, 24**3)
    bell = np.exp(-(np.linspace(-2, 2, 9) ** 2))
    cube = np.broadcast_to(bell[:, None, None] * bell[:, None] * bell, (30, 9, 9, 9)).copy()
    total = fusedops.structured_scatter_add(cube, plan)
    panel = figure.subplots()
    figure.colorbar(panel.imshow(total.reshape(24, 24, 24).sum(2).T, origin="lower"), ax=panel)
    panel.set(xlabel="x", ylabel="y")


pictures = {"structured_scatter": _draw}
