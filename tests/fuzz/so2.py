"""SO(2) convolutions and gates."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops
from fusedops.samples import convolved

from .arrays import MEDIUM, SMALL, common, values
from .problem import Family, Problem


def strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "E": st.sampled_from(SMALL if compiled else (*MEDIUM, 150, 300)),
        "lmax": st.sampled_from((0, 1, 2) if compiled else (0, 1, 2, 3, 5)),
        "below": st.sampled_from((0, 0, 1) if compiled else (0, 0, 1, 2)),
        "C": st.sampled_from((1, 3) if compiled else (0, 1, 2, 3, 7, 16)),
        "D": st.sampled_from((1, 4) if compiled else (0, 1, 2, 5, 8)),
        "G": st.sampled_from((0, 3) if compiled else (0, 0, 1, 4, 7)),
        "radial": st.booleans(),
        "bias": st.booleans(),
    }


def parts(rows: np.ndarray, lmax: int, mmax: int) -> list[np.ndarray]:
    """Return the complex rows of every order, (E, lmax + 1 - m, C)."""
    found, at = [rows[:, : lmax + 1].astype(complex)], lmax + 1
    for m in range(1, mmax + 1):
        n = lmax + 1 - m
        found.append(rows[:, at : at + n] + 1j * rows[:, at + n : at + 2 * n])
        at += 2 * n
    return found


def build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    E, lmax, C, D, G = (d[name] for name in ("E", "lmax", "C", "D", "G"))
    mmax = max(0, lmax - d["below"])
    given = convolved(rng, E, lmax, mmax, C, D, G, radial=d["radial"], bias=d["bias"])
    arrays = {name: values(rng, array.shape, d["values"]) for name, array in given.items()}

    def oracle(message: np.ndarray, **given: np.ndarray) -> Any:
        radial, at = given.get("radial"), 0
        rows: list[np.ndarray] = []
        for m, part in enumerate(parts(message, lmax, mmax)):
            n, weight = lmax + 1 - m, given[f"weight_m{m}"]
            if radial is not None:
                part = part * radial[:, at : at + n * C].reshape(E, n, C)
                at += n * C
            if m:
                weight = weight[: n * D] + 1j * weight[n * D :]
            y = np.einsum("en,kn->ek", part.reshape(E, n * C), weight)
            if m == 0:
                y = y.real + given.get("bias", 0.0)
                gates, y = y[:, :G], y[:, G:]
            y = y.reshape(E, n, D)
            rows += [y] if m == 0 else [y.real, y.imag]
        out = np.concatenate(rows, axis=1)
        return (out, gates) if G else out

    factors = ("message", *(["radial"] if d["radial"] else []))
    widest = (lmax + 1) * max(C, 2 * D) + G
    return Problem(
        op=fusedops.so2_convolution,
        arrays=arrays,
        options={"gate_channels": G},
        oracle=oracle,
        linear=() if d["bias"] else factors,
        exact=False,
        terms=max(512, 4 * widest),
        gradient_terms=max(512, 4 * widest, 2 * E),
        bad=[("gate_channels", -1), ("gate_channels", len(given["weight_m0"]) + 1)],
    )


FAMILY = Family("so2", strategy, build, ("E", 3000), {"lmax": 1, "C": 1, "D": 1})


def gates_strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "E": st.sampled_from(SMALL if compiled else MEDIUM),
        "lmax": st.sampled_from((0, 1, 2) if compiled else (0, 1, 2, 3, 5)),
        "below": st.sampled_from((0, 0, 1) if compiled else (0, 0, 1, 2)),
        "C": st.sampled_from((1, 3) if compiled else (0, 1, 3, 16, 63, 64, 65)),
        "major": st.sampled_from(("m", "l")),
    }


def gates_build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    E, lmax, C, major = d["E"], d["lmax"], d["C"], d["major"]
    mmax = max(0, lmax - d["below"])
    degrees = [(l, m) for l in range(lmax + 1) for m in range(-l, l + 1) if abs(m) <= mmax]
    if major == "m":
        degrees.sort(key=lambda row: (abs(row[1]), row[1] < 0, row[0]))

    def sigmoid(h: np.ndarray) -> np.ndarray:
        return 0.5 * (1 + np.tanh(0.5 * h))

    def oracle(gates: np.ndarray, x: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        for r, (l, _) in enumerate(degrees):
            out[:, r] = x[:, r] * sigmoid(gates[:, (l - 1) * C : l * C] if l else x[:, r])
        return out

    def margin(arrays: Any) -> dict[str, Any]:
        """Return allowances for the slope σ (1 - σ), which rounds to 0 where a gate is far open."""
        eps = 1e-15 if d["dtype"] == "float64" else 1e-6
        sizes = np.zeros((lmax + 1, E, C))
        for r, (l, _) in enumerate(degrees):
            sizes[l] += np.abs(arrays["x"][:, r])
        open_gates = sizes[1:].transpose(1, 0, 2).reshape(E, lmax * C)
        return {"value": 0.0, "gates": eps * open_gates, "x": 0.0}

    return Problem(
        op=fusedops.gate_activation,
        arrays={
            "gates": values(rng, (E, lmax * C), d["values"]),
            "x": values(rng, (E, len(degrees), C), d["values"]),
        },
        options={"mmax": mmax, "layout": major},
        oracle=oracle,
        exact=False,
        terms=512,
        margin=margin,
        bad=[("mmax", -1), ("layout", "x")],
    )


GATES = Family("gate_activation", gates_strategy, gates_build, ("E", 10000), {"lmax": 1})
