"""The planarity restraint and deviations from planes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops
from fusedops.planarity.eigenvector import NO_PLANE

from .arrays import common
from .problem import Family, Problem

# Extents along three axes; the ratio of eigenvalues is the square of the extents' ratio.
SHAPES = {
    "any": (1.0, 1.0, 1.0),
    "plane": (1.0, 0.5, 0.02),
    "flat": (1.0, 0.7, 0.0),
    "near": (1.0, 1e-3, 1e-4),
    "nearer": (1.0, 1e-5, 1e-7),
    "line": (1.0, 0.0, 0.0),
    "point": (0.0, 0.0, 0.0),
}
#: A kernel's roundings may change eigenvalues by this share of the largest.
ROUNDING = 1e-14


def strategy(compiled: bool) -> dict[str, Any]:
    sizes = (3, 4, 5, 6, 9) if compiled else (3, 4, 5, 6, 7, 9, 16, 33, 70)
    group = st.tuples(
        st.sampled_from((0, 1, 2, 3, 7, 17)),
        st.sampled_from(sizes),
        st.sampled_from(("plane", "plane", *SHAPES)),
        st.sampled_from((False, True, "column")),
    )
    return common() | {
        "groups": st.lists(group, max_size=4),
        "shared": st.booleans(),
        "fit": st.sampled_from(("uniform", "weighted")),
        "sigma": st.sampled_from((0.02, 1.0, "spread")),
        "offset": st.sampled_from((0.0, 0.0, 30.0, 1e4, 1e8)),
        "size": st.sampled_from((1.5, 1.5, 1e-4, 1e5)),
        "decimals": st.sampled_from((None, None, 3)),
        "missing": st.sampled_from((None, None, None, None, "nan", "inf")),
        "spare": st.integers(0, 3),
    }


def build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    coordinates, groups, at = [np.zeros((0, 3))], [], 0
    for planes, n, shape, by_atom in d["groups"]:
        turn = np.linalg.qr(rng.normal(size=(planes, 3, 3)))[0]
        within = rng.normal(size=(planes, n, 3)) * SHAPES[shape]
        within = d["size"] * (within @ turn) + d["offset"] * rng.normal(size=3)
        coordinates.append(within.reshape(-1, 3))
        index = at + np.arange(planes * n).reshape(planes, n)
        at += planes * n
        if d["shared"] and at:
            index = np.where(rng.random(index.shape) < 0.3, rng.integers(0, at, index.shape), index)
        shapes = {False: (planes,), True: (planes, n), "column": (planes, 1)}
        sigma = np.full(shapes[by_atom], 0.5)
        sigma *= rng.uniform(0.1, 2, sigma.shape) if d["sigma"] == "spread" else d["sigma"]
        groups.append((index.astype(d["index"]), sigma.astype(np.float32).astype(np.float64)))
    coordinates.append(rng.normal(size=(d["spare"], 3)))
    xyz = np.concatenate(coordinates)
    xyz = xyz if d["decimals"] is None else xyz.round(d["decimals"])
    if d["missing"] and len(xyz):
        at_random = rng.integers(len(xyz)), rng.integers(3)
        xyz[at_random] = math.nan if d["missing"] == "nan" else -math.inf
    fit = d["fit"]

    def fits(xyz: np.ndarray) -> Any:
        for index, sigma in groups:
            sigmas = np.broadcast_to(sigma if sigma.ndim == 2 else sigma[:, None], index.shape)
            for atoms, own in zip(index, sigmas, strict=True):
                yield atoms, own, _best_plane(xyz[atoms], own**-2, fit)

    def oracle(xyz: np.ndarray) -> Any:
        return sum(
            float((0.5 * (f["d"] / s) ** 2 + np.log(s) + 0.5 * math.log(2 * math.pi)).sum())
            for _, s, f in fits(xyz)
        )

    def margin(arrays: Any) -> dict[str, Any]:
        xyz = arrays["xyz"]
        value, rows = 0.0, np.zeros_like(xyz)
        for atoms, s, f in fits(xyz):
            w, size = s**-2, np.abs(f["d"])
            own = w * (size * f["off"] + f["off"] ** 2)
            # The constants and the squares cancel in the sum.
            value += float(own.sum()) + 1e-15 * float((np.abs(np.log(s)) + w * size**2).sum())
            row = w * (f["off"] + size * f["turn"])
            row = row + (row.mean() if fit == "uniform" else 0.0)
            # Rows cancel within a plane, and over the planes of an atom.
            np.add.at(rows, atoms, (row + 1e-14 * (w * size).max())[:, None])
        return {"value": value, "xyz": rows}

    def deviations(trial: Any, place: Any) -> None:
        if place.framework != "numpy" or place.backend != "numpy":
            return
        found = trial.call(
            place, lambda: fusedops.plane_deviations(trial.given["xyz"], groups, fit=fit)
        )
        wanted = iter(list(fits(trial.rounded["xyz"])))
        for array, (index, _) in zip(found, groups, strict=True):
            trial.expect(place, "shape of deviations", array.shape == index.shape)
            for row, (_, _, f) in zip(array, wanted, strict=False):
                # The sign of a normal is arbitrary.
                near = min(np.abs(row - f["d"]).max(), np.abs(row + f["d"]).max())
                allowed = f["off"] + 1e-12 * np.abs(f["d"]).max()
                trial.expect(place, "deviations", near <= allowed, f"off by {near}, of {allowed}")

    bad: list[tuple[str, Any]] = [("fit", "best")]
    if len(groups) and groups[0][0].size:
        index, sigma = groups[0]
        for wrong in (-1, len(xyz), 2**31 - 1):
            moved = index.copy()
            moved[-1, -1] = wrong
            bad.append(("plane_groups", [(moved, sigma)]))
        bad += [
            ("plane_groups", [(index, -sigma)]),
            ("plane_groups", [(index, 0 * sigma)]),
            ("plane_groups", [(index, math.nan * sigma)]),
            ("plane_groups", [(index.astype(float), sigma)]),
            ("plane_groups", [(index[:, :2], sigma)]),
            ("plane_groups", [(index, sigma[:0])]),
        ]
    smooth = all(shape in ("plane", "flat") and n > 3 for _, n, shape, _ in d["groups"])
    smooth = smooth and not d["shared"] and d["missing"] is None and d["offset"] < 100
    return Problem(
        op=fusedops.planarity_nll,
        arrays={"xyz": xyz},
        constants={"plane_groups": groups},
        options={"fit": fit},
        oracle=oracle,
        pack=lambda c: {"plane_groups": fusedops.Planes(c["plane_groups"])},
        margin=margin,
        # The gradient is exact where all atoms of a plane have one sigma, or are fitted with them.
        smooth=smooth and (fit == "weighted" or all(g[3] is not True for g in d["groups"])),
        second=smooth,
        own=deviations,
        bad=bad,
    )


def _best_plane(x: np.ndarray, weight: np.ndarray, fit: str) -> dict[str, Any]:
    """Return distances d, how far off they may be, and by what angle the normal may turn."""
    n = len(x)
    none = {"d": np.zeros(n), "off": 0.0, "turn": 0.0}
    if not np.isfinite(x).all():
        return none
    share = weight / weight.max() if fit == "weighted" else np.ones(n)
    exact = x.astype(np.longdouble)
    r = (exact - (share[:, None] * exact).sum(0) / share.sum()).astype(np.float64)
    _, s, axes = np.linalg.svd(np.sqrt(share)[:, None] * r)
    s = np.concatenate([s, np.zeros(3 - len(s))])
    # The centroid is rounded, and moves the distances of all atoms.
    moved = 4 * n * np.finfo(np.float64).eps * np.abs(x).max()
    first, second, third = s**2
    noise = ROUNDING * first + n * moved**2
    if first <= n * moved**2:
        # Rounding decides whether there is one point or many.
        return none | {"off": 2 * (moved + s[0])}
    if second + noise + 2 * s[1] * moved <= NO_PLANE * first:
        return none
    reach = np.abs(r).max() * 3
    if second - noise - 2 * s[1] * moved <= NO_PLANE * first:
        return none | {"off": moved + reach, "turn": 1.0}
    tilt = noise / (first - third) if first > third else 1.0
    turn = noise / (second - third) if second > third else 1.0
    off = moved + min(tilt, 1.0) * reach + min(turn, 1.0) * s[1] / math.sqrt(share.min())
    return {"d": r @ axes[2], "off": off, "turn": min(1.0, tilt + turn)}


FAMILY = Family(
    "planarity_nll",
    strategy,
    build,
    ("groups", 1000),
    sized=lambda planes: [(planes, 4, "plane", False)],
)
