"""Scatter and gather."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops
from fusedops.samples import cubes

from .arrays import MEDIUM, SMALL, common, values
from .problem import Family, Problem


def strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "gather": st.booleans(),
        "C": st.sampled_from(SMALL if compiled else MEDIUM),
        "cube": st.tuples(*[st.sampled_from((1, 2, 3, 5) if compiled else SMALL)] * 3),
        "grid": st.tuples(*[st.sampled_from((1, 2, 3, 7, 12))] * 3),
        "place": st.sampled_from(("boxes", "anywhere", "one", "negative")),
    }


def build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    C, cube, grid = d["C"], d["cube"], d["grid"]
    size = int(np.prod(grid))
    if d["place"] == "boxes":
        wa, wbwc = cubes(rng, C, tuple(grid), cube)
    elif d["place"] == "one":
        # All elements go to one place.
        at = int(rng.integers(size))
        wa, wbwc = np.full((C, cube[0]), at), np.zeros((C, *cube[1:]), int)
    else:
        wa = rng.integers(0, (size + 1) // 2, (C, cube[0]))
        wbwc = rng.integers(0, size - (size + 1) // 2 + 1, (C, *cube[1:]))
        if d["place"] == "negative":
            # Only the sums are indices.
            wa, wbwc = wa + 7 * size, wbwc - 7 * size
    index = np.dtype(d["index"])
    constants = {"wa": wa.astype(index), "wbwc": wbwc.astype(index)}
    shape = (C, *cube)
    places = (wa[:, :, None, None] + wbwc[:, None]).reshape(-1)

    def scatter(density_cube: np.ndarray) -> np.ndarray:
        return np.bincount(places, density_cube.ravel(), size) if C else np.zeros(size)

    def gather(grid: np.ndarray) -> np.ndarray:
        return grid[places].reshape(shape)

    bad = [("wa", outside(constants["wa"], size)), ("wa", outside(constants["wa"], -8 * size - 1))]
    terms = int(np.bincount(places).max(initial=0))
    if d["gather"]:
        return Problem(
            op=fusedops.structured_gather,
            arrays={"grid": values(rng, (size,), d["values"])},
            constants=constants,
            oracle=gather,
            pack=lambda c: {"wa": fusedops.ScatterPlan(c["wa"], c["wbwc"], size)},
            linear=("grid",),
            absolute={},
            gradient_terms=terms,
            bad=bad if places.size else [],
        )
    return Problem(
        op=fusedops.structured_scatter_add,
        arrays={"density_cube": values(rng, shape, d["values"])},
        constants=constants,
        options={"map_size": size},
        oracle=scatter,
        pack=lambda c: {
            "wa": fusedops.ScatterPlan(c["wa"], c["wbwc"], size),
            "map_size": None,
        },
        linear=("density_cube",),
        absolute={},
        terms=terms,
        bad=[*bad, ("map_size", int(places.max()))] if places.size else [],
    )


def outside(index: np.ndarray, shift: int) -> np.ndarray:
    """Return indices of which the last points outside."""
    moved = index.copy()
    if moved.size:
        moved.reshape(-1)[-1] += shift
    return moved


FAMILY = Family("scatter", strategy, build, ("C", 5000), {"cube": (1, 3, 2), "grid": (7, 7, 7)})
