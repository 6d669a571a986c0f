"""The density of atoms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops
from fusedops import Lattice
from fusedops.density import atom_radius, bad_atoms
from fusedops.density.op import LEAST_WIDTH, SLACK
from fusedops.samples import atoms_in

from .arrays import common
from .problem import Family, Problem

CELLS = {
    "orthogonal": [[7.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 11.0]],
    "triclinic": [[9.0, 3.0, -4.0], [0.0, 8.0, 3.0], [0.0, 0.0, 7.0]],
    "small": [[4.0, 1.0, -1.8], [0.0, 3.5, 1.2], [0.0, 0.0, 3.0]],
    "long": [[5.0, 0.0, 0.0], [0.0, 6.0, 0.0], [1.0, 0.0, 30.0]],
    "left-handed": [[0.0, 8.0, 0.0], [7.0, 0.0, 0.0], [0.0, 0.0, 6.0]],
    "sheared": [[6.0, 14.0, 0.0], [0.0, 6.0, -13.0], [0.0, 0.0, 6.0]],
}


def strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "N": st.sampled_from((0, 1, 2, 3, 4)),
        "cell": st.sampled_from(tuple(CELLS)),
        "grid": st.tuples(*[st.sampled_from((1, 2, 3, 5, 6, 8))] * 3),
        # The planes of a slab, as fractions of the map.
        "slab": st.sampled_from((None, None, (0.0, 0.5), (0.3, 0.9), (0.5, 0.5), (0.6, 1.0))),
        "aniso": st.booleans(),
        "factors": st.booleans(),
        "radius": st.sampled_from((None, "array", 0.0, 1.5, 2.7, 5.0, 9.0)),
        "place": st.sampled_from(("any", "any", "grid", "same", "far")),
        "wrong": st.sampled_from((None, None, None, "xyz", "b", "occupancy", "radius", "width")),
    }


def build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    N, grid = d["N"], tuple(d["grid"])
    cell = np.array(CELLS[d["cell"]])
    xyz, b, occupancy, *table = atoms_in(cell, N, rng, anisotropic=d["aniso"])
    if d["place"] == "grid":
        xyz = (rng.integers(-3, 9, (N, 3)) / grid) @ cell.T
    elif d["place"] == "same":
        xyz[:] = xyz[:1]
    elif d["place"] == "far":
        xyz += cell @ rng.integers(-50, 50, 3)
    if N and d["wrong"] in ("xyz", "b", "occupancy"):
        {"xyz": xyz, "b": b, "occupancy": occupancy}[d["wrong"]][-1] = math.nan
    if N and d["wrong"] == "width":
        # Some of the atom's Gaussians are too sharp, in one direction or in all.
        b[-1] -= 0.6 * np.eye(6)[0] if d["aniso"] else 41.0
    amplitudes, widths = (t.astype(np.float32).astype(np.float64) for t in table)
    arrays = {"xyz": xyz, "b": b, "occupancy": occupancy}
    constants: dict[str, Any] = {}
    # Rounded widths may move a radius by the rule over one of its steps.
    factors = d["factors"] and d["radius"] is not None
    (arrays if factors else constants).update(amplitudes=amplitudes, widths=widths)
    on_bad = {None: "raise", "width": "clamp"}.get(d["wrong"], "skip")
    options: dict[str, Any] = {"on_bad": on_bad}
    if d["radius"] == "array":
        constants["radius"] = rng.uniform(0.5, 4.0, N).astype(np.float32).astype(np.float64)
        if N and d["wrong"] == "radius":
            # Its box has too many voxels.
            constants["radius"][-1] = 1e5
    elif d["radius"] is not None:
        options["radius"] = d["radius"]
    constants["cell"] = cell
    options["grid_shape"] = grid
    planes = slice(0, grid[0])
    if d["slab"]:
        planes = slice(*(round(part * grid[0]) for part in d["slab"]))
        constants["cell"] = Lattice(cell, grid).slab(planes.start, planes.stop)
        options["grid_shape"] = None

    def radius_of(b: np.ndarray) -> np.ndarray:
        if d["radius"] == "array":
            return constants["radius"]
        # The rule has steps that a rounding may cross, so apply it in the dtype of the call.
        narrow = b.astype(np.float32) if d["dtype"] != "float64" else b
        if d["radius"] is None:
            return atom_radius(narrow, widths.astype(narrow.dtype)).astype(np.float64)
        return np.full(N, float(d["radius"]))

    def terms(
        xyz: np.ndarray,
        b: np.ndarray,
        occupancy: np.ndarray,
        amplitudes: np.ndarray = amplitudes,
        widths: np.ndarray = widths,
    ) -> Any:
        """Yield good atoms, with density and squared distance (V, K) in K cells, and radius."""
        radius = radius_of(b)
        floor = LEAST_WIDTH if on_bad == "clamp" else 0.0
        wide = widths + 1e6 if on_bad == "clamp" else widths
        good = ~bad_atoms(xyz, b, occupancy, amplitudes, wide, radius, lattice=Lattice(cell, grid))
        voxels = np.stack(np.meshgrid(*[np.arange(n) / n for n in grid], indexing="ij"), -1)
        for i in np.flatnonzero(good):
            reach = radius[i] * np.linalg.norm(np.linalg.inv(cell), axis=1)
            far = [np.arange(-math.ceil(k) - 1, math.ceil(k) + 2) for k in reach]
            cells = np.stack(np.meshgrid(*far, indexing="ij"), -1).reshape(-1, 3)
            apart = voxels - np.linalg.solve(cell, xyz[i])
            w = ((apart - np.round(apart)).reshape(-1, 1, 3) + cells) @ cell.T
            square = (w**2).sum(-1)
            value = np.zeros(square.shape)
            for A, B in zip(amplitudes[i], widths[i], strict=True):
                if b.ndim == 1:
                    total = max(B + b[i], floor)
                    value += (
                        A * (4 * math.pi / total) ** 1.5 * np.exp(-4 * math.pi**2 * square / total)
                    )
                    continue
                u = b[i]
                U = np.array([[u[0], u[3], u[4]], [u[3], u[1], u[5]], [u[4], u[5], u[2]]])
                values, vectors = np.linalg.eigh(B * np.eye(3) + 8 * math.pi**2 * U)
                M = vectors * np.maximum(values, floor) @ vectors.T / 4
                power = math.pi**2 * ((w @ np.linalg.inv(M)) * w).sum(-1)
                value += A * math.pi**1.5 / math.sqrt(np.linalg.det(M)) * np.exp(-power)
            yield i, occupancy[i] * value, square, radius[i]

    def oracle(**arrays: np.ndarray) -> np.ndarray:
        out = np.zeros(math.prod(grid))
        for _, value, square, r in terms(**arrays):
            out += np.where(square <= r * r * (1 + SLACK), value, 0.0).sum(1)
        return out.reshape(grid)[planes]

    def margin(arrays: Any) -> dict[str, Any]:
        """Return allowances for voxels on a sphere's surface."""
        value = np.zeros(math.prod(grid))
        rows = {name: np.zeros_like(array) for name, array in arrays.items()}
        for i, own, square, r in terms(**arrays):
            # Rounded coordinates move an atom off the voxel that it lies on.
            rounding = 1e-13 if d["dtype"] == "float64" else 5e-5
            inside = square <= r * r * (1 + SLACK)
            rows["xyz"][i] = rounding * np.abs(own[inside]).sum() * np.abs(arrays["xyz"][i]).max()
            if not d["aniso"]:
                # Slopes by a width change their sign within the sphere, so sums may cancel.
                least = max(arrays.get("widths", widths)[i].min() + arrays["b"][i], LEAST_WIDTH)
                slope = (1.5 + 4 * math.pi**2 * square[inside] / least) / least
                sums = np.abs(own[inside]) @ slope
                for name in rows.keys() & {"b", "widths"}:
                    rows[name][i] = 1e-2 * rounding * sums
            reach = 1e-5 * (square + np.abs(arrays["xyz"][i]).max() * 1e-2)
            edge = np.abs(square - r * r * (1 + SLACK)) <= reach
            value += np.where(edge, 4 * np.abs(own) + 1e-3, 0.0).sum(1)
            if edge.any():
                for name in rows:
                    rows[name][i] = math.inf
        return {"value": value.reshape(grid)[planes], **rows}

    bad: list[tuple[str, Any]] = [
        ("cell", 0 * cell),
        ("cell", cell[:2]),
        ("cell", math.nan * cell),
        ("grid_shape", (0, 1, 1)),
        ("grid_shape", (4, 4)),
        ("on_bad", "warn"),
        ("n_sigma", -1.0),
    ]
    if d["radius"] is not None:
        bad = bad[:-1]
    if not d["slab"]:
        bad.append(("grid_shape", None))
    return Problem(
        op=fusedops.gaussian_density,
        arrays=arrays,
        constants=constants,
        options=options,
        oracle=oracle,
        pack=None
        if d["slab"]
        else lambda c: {"cell": Lattice(c["cell"], grid), "grid_shape": None},
        terms=32000,
        gradient_terms=128000,
        margin=margin,
        # Differences move voxels over the edge of a sphere.
        smooth=False,
        bad=bad,
    )


FAMILY = Family("gaussian_density", strategy, build, ("N", 200), {"grid": (3, 4, 5), "radius": 1.5})
