"""Rotations into the frames of edges and back, and their matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops
from fusedops.wigner import m_major_order, wigner_d

from .arrays import MEDIUM, common, values
from .problem import Family, Problem

WAYS = {
    "forth": fusedops.node_to_edge_wigner_permute,
    "back": fusedops.permute_wigner_inv_edge_to_node,
    "own": fusedops.permute_wigner_inv,
    "degree": fusedops.edge_degree_scatter,
}


def strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "way": st.sampled_from(tuple(WAYS)),
        "lmax": st.sampled_from((0, 1, 2) if compiled else (0, 1, 1, 2, 2, 3, 4, 6)),
        "below": st.sampled_from((0, 0, 1) if compiled else (0, 0, 1, 2)),
        "N": st.sampled_from((1, 1, 2, 3, 5, 17)),
        "E": st.sampled_from(MEDIUM),
        "C": st.sampled_from((1, 3, 16) if compiled else (0, 1, 2, 3, 7, 16, 33)),
        "blocks": st.booleans(),
        "transpose": st.booleans(),
        "scale": st.sampled_from((1.0, 3.0, -0.7)),
        "scaled": st.booleans(),
    }


def _dense(matrices: np.ndarray, lmax: int) -> np.ndarray:
    """Return dense matrices with nothing outside of the blocks of degrees."""
    rows, at = (lmax + 1) ** 2, 0
    full = np.zeros((len(matrices), rows, rows))
    for l in range(lmax + 1):
        own, n = slice(l * l, (l + 1) ** 2), 2 * l + 1
        if matrices.ndim == 3:
            full[:, own, own] = matrices[:, own, own]
        else:
            full[:, own, own] = matrices[:, at : at + n * n].reshape(-1, n, n)
        at += n * n
    return full


def build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    N, E, C, lmax, way, kind = (d[name] for name in ("N", "E", "C", "lmax", "way", "values"))
    mmax = 0 if way == "degree" else max(0, lmax - d["below"])
    rows, order = (lmax + 1) ** 2, m_major_order(lmax, mmax)
    ends = rng.integers(0, max(N - 1, 1), (2, E)).astype(d["index"])
    count = sum((2 * l + 1) ** 2 for l in range(lmax + 1))
    matrices = values(rng, (E, count) if d["blocks"] else (E, rows, rows), kind)
    channels = 2 * C if way == "forth" else C
    message = values(rng, (E, len(order), channels), kind)
    x = values(rng, (N, rows, C), kind)
    transpose = d["transpose"]

    def rotated(message: np.ndarray, wigner_inv: np.ndarray) -> np.ndarray:
        V = _dense(wigner_inv, lmax)
        V = V.swapaxes(1, 2) if transpose else V
        return np.einsum("eir,erc->eic", V[:, :, order], message)

    def summed(rows_of: np.ndarray) -> np.ndarray:
        out = np.zeros((N, rows, C))
        for e, target in enumerate(ends[1]):
            out[target] += rows_of[e]
        return out

    # One function for every degree and |m|, in the order in which rows first have them.
    degree_of = np.sqrt(order).astype(int)
    kinds = list(zip(degree_of, abs(order - degree_of * degree_of - degree_of), strict=True))
    functions = list(dict.fromkeys(kinds))
    own = [functions.index(kind) for kind in kinds]
    scaled = {"radial": values(rng, (E, 2 * C * len(functions)), kind)} if d["scaled"] else {}

    def forth(x: np.ndarray, wigner: np.ndarray, radial: Any = None) -> np.ndarray:
        W = _dense(wigner, lmax)[:, order]
        out = np.concatenate([np.einsum("erj,ejc->erc", W, x[end]) for end in ends], axis=2)
        factors = 1.0 if radial is None else radial.reshape(E, len(functions), 2 * C)[:, own]
        return out * factors

    def degree(x: np.ndarray, radial: np.ndarray, wigner_inv: np.ndarray) -> np.ndarray:
        return x + summed(rotated(radial, wigner_inv)) / d["scale"]

    edges = {"edge_index": ends} if way != "own" else {}
    bad: list[tuple[str, Any]] = [("mmax", lmax + 1), ("mmax", -1)]
    rotation = {"message": message, "wigner_inv": matrices}
    options: dict[str, Any] = {"mmax": mmax, "transpose": transpose}
    if way == "forth":
        arrays, options, oracle = {"x": x, "wigner": matrices, **scaled}, {"mmax": mmax}, forth
    elif way == "own":
        arrays, oracle = rotation, rotated
    elif way == "back":
        arrays, options = rotation, options | {"num_nodes": N}
        oracle = lambda message, wigner_inv: summed(rotated(message, wigner_inv))  # noqa: E731
    else:
        arrays, oracle = {"x": x, "radial": message, "wigner_inv": matrices}, degree
        options = {"rescale_factor": d["scale"], "transpose": transpose}
        bad = [("rescale_factor", 0.0), ("rescale_factor", math.nan)]
    if edges and E:
        for wrong in (-1, N, 2**31 - 1):
            moved = ends.copy()
            moved[-1, -1] = wrong
            bad.append(("edge_index", moved))
    return Problem(
        op=WAYS[way],
        arrays=arrays,
        constants=edges,
        options=options,
        oracle=oracle,
        pack=(lambda c: {"edge_index": fusedops.Edges(c["edge_index"], N)}) if edges else None,
        linear=() if way == "degree" else tuple(arrays),
        absolute={"rescale_factor": abs(d["scale"])} if way == "degree" else {},
        terms=2 * max(C, (2 * lmax + 1) * E),
        bad=bad,
    )


FAMILY = Family(
    "wigner",
    strategy,
    build,
    ("E", 10000),
    {"N": 5, "C": 1, "lmax": 1},
    ops=tuple(op.__name__ for op in WAYS.values()),
)


def matrices_strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "lmax": st.sampled_from((0, 1, 2, 3) if compiled else (0, 1, 2, 3, 4, 6, 8)),
        "E": st.sampled_from(MEDIUM),
        "blocks": st.booleans(),
        "vectors": st.sampled_from(("any", "axes", "zero", "plane")),
        "length": st.sampled_from((1.0, 1.0, 1e-3, 1e6)),
    }


def harmonics(v: np.ndarray, lmax: int) -> np.ndarray:
    """Return real spherical harmonics (E, (lmax + 1)²) of unit vectors, with y as polar axis."""
    x, y, z = v.T
    azimuth, sine = np.arctan2(x, z), np.hypot(x, z)
    P = {(0, 0): np.ones_like(y)}
    for m in range(lmax + 1):
        if m:
            P[m, m] = (2 * m - 1) * sine * P[m - 1, m - 1]
        for l in range(m + 1, lmax + 1):
            before = P[l - 2, m] if l - 2 >= m else 0.0
            P[l, m] = ((2 * l - 1) * y * P[l - 1, m] - (l + m - 1) * before) / (l - m)
    columns = []
    for l in range(lmax + 1):
        for m in range(-l, l + 1):
            a = abs(m)
            norm = math.sqrt((2 * l + 1) * math.factorial(l - a) / math.factorial(l + a))
            turn = np.sin(a * azimuth) if m < 0 else np.cos(a * azimuth)
            columns.append(norm * P[l, a] * turn * (math.sqrt(2) if m else 1.0))
    return np.stack(columns, 1)


def matrices_build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    E, lmax = d["E"], d["lmax"]
    vectors = rng.normal(size=(E, 3))
    if d["vectors"] == "axes":
        vectors = np.sign(vectors) * np.eye(3)[rng.integers(0, 3, E)]
    elif d["vectors"] == "plane":
        # The choice of a rotation jumps on this plane.
        vectors[:, 1] = 0.0
    elif d["vectors"] == "zero":
        vectors[::2] = 0.0
    points = np.random.default_rng(0).normal(size=(3 * (2 * lmax + 1), 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)

    def oracle(edge_vec: np.ndarray) -> np.ndarray:
        """Return matrices that turn the harmonics of points as the rotation turns the points."""
        out = np.zeros((E, (lmax + 1) ** 2, (lmax + 1) ** 2))
        before = harmonics(points, lmax)
        for e, v in enumerate(edge_vec):
            length = np.linalg.norm(v)
            a, b, c = v / length if length else (0.0, 1.0, 0.0)
            # The shortest way of u to y, after half a turn about x where u points away from it.
            flip = np.diag([1.0, -1.0, -1.0]) if b < 0 else np.eye(3)
            a, b, c = flip @ (a, b, c)
            R = np.array([[b + c * c / (1 + b), -a, -a * c / (1 + b)], [a, b, c], [0, -c, 0]])
            R[2, 0], R[2, 2] = -a * c / (1 + b), b + a * a / (1 + b)
            after = harmonics(points @ (R @ flip).T, lmax)
            for l in range(lmax + 1):
                own = slice(l * l, (l + 1) ** 2)
                D = np.linalg.lstsq(before[:, own], after[:, own], rcond=None)[0].T
                out[e, own, own] = D
        if not d["blocks"]:
            return out
        blocks = [out[:, l * l : (l + 1) ** 2, l * l : (l + 1) ** 2] for l in range(lmax + 1)]
        return np.concatenate([b.reshape(E, b.shape[1] ** 2) for b in blocks], axis=1)

    return Problem(
        op=wigner_d,
        arrays={"edge_vec": d["length"] * vectors},
        options={"lmax": lmax, "packed": d["blocks"]},
        oracle=oracle,
        terms=64 * (lmax + 1) ** 2,
        # Each degree's matrix is computed from the degree before.
        gradient_terms=64 * (lmax + 1) ** 4,
        # Differences step over the jump, and see no length of zero.
        smooth=d["vectors"] == "any",
        bad=[("lmax", -1), ("packed", 2)],
    )


MATRICES = Family(
    "wigner_d",
    matrices_strategy,
    matrices_build,
    ("E", 3000),
    {"lmax": 1},
)
