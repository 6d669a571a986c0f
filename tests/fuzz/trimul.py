"""The triangle multiplicative update."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops
from fusedops.samples import pair

from .arrays import common
from .problem import Family, Problem


def strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "B": st.sampled_from((0, 1, 1, 2)),
        "N": st.sampled_from((0, 1, 2, 3, 5, 7, 8, 11, 17)),
        "C": st.sampled_from((5, 16) if compiled else (1, 2, 3, 5, 8, 16, 31, 33)),
        "H": st.sampled_from((1, 16) if compiled else (1, 2, 3, 5, 8, 16, 31, 33)),
        "D": st.sampled_from((None, None, None, 5)),
        "direction": st.sampled_from(("outgoing", "incoming")),
        "gate": st.sampled_from(("output", "hidden")),
        "mask": st.sampled_from((None, True) if compiled else (None, True, False)),
        "mask_shape": st.sampled_from(("whole", "rows")),
        "norms": st.booleans(),
        "biases": st.booleans(),
        "eps": st.sampled_from((1e-5, 1e-3, 1.0)),
        "max_memory": st.sampled_from((None, None, None, 1 << 12, 1 << 16)),
    }


def _normalized(y: np.ndarray, weight: Any, bias: Any, eps: float) -> np.ndarray:
    centred = y - y.mean(-1, keepdims=True)
    centred -= centred.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return y * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)


def build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    B, N, C, H = (d[name] for name in "BNCH")
    options = {name: d[name] for name in ("gate", "mask", "norms", "biases", "D")}
    given = pair(B, N, C, H, rng, **options)
    arrays = {name: array for name, array in given.items() if array is not None}
    if d["mask"] is not None and d["mask_shape"] == "rows" and B == 1:
        arrays["mask"] = arrays["mask"][0, :, :1]

    def linear(name: str, y: np.ndarray, given: Any) -> np.ndarray:
        out = np.einsum("...c,rc->...r", y, given[f"{name}_weight"])
        return out + given.get(f"{name}_bias", 0.0)

    def sigmoid(h: np.ndarray) -> np.ndarray:
        return 0.5 * (1 + np.tanh(0.5 * h))

    def hidden(given: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the normalized x, and the sum over triangles."""
        norm = given.get("norm_in_weight"), given.get("norm_in_bias")
        xn = _normalized(given["x"], *norm, d["eps"])
        sides = linear("p_in", xn, given) * sigmoid(linear("g_in", xn, given))
        sides *= np.broadcast_to(given.get("mask", 1.0), (B, N, N))[..., None]
        left, right = sides[..., :H], sides[..., H:]
        spec = "bikh,bjkh->bijh" if d["direction"] == "outgoing" else "bkih,bkjh->bijh"
        return xn, np.einsum(spec, left, right)

    def condition(given: Any) -> float:
        """Return how large a LayerNorm's inputs are beside their deviation from the mean."""
        sizes = [np.abs(y) / np.sqrt(y.var(-1, keepdims=True) + d["eps"]) for y in hidden(given)]
        return 1 + max(float(size.max(initial=0.0)) for size in sizes)

    def oracle(**given: np.ndarray) -> np.ndarray:
        norm_out = given.get("norm_out_weight"), given.get("norm_out_bias")
        xn, o = hidden(given)
        o = _normalized(o, *norm_out, d["eps"])
        last = sigmoid(linear("g_out", xn, given))
        if d["gate"] == "output":
            return linear("p_out", o, given) * last
        return linear("p_out", o * last, given)

    few = min(C, H) < 8
    terms = (1024 if few else 512) * (4 if C == H == 1 else 1)
    return Problem(
        op=fusedops.triangle_multiplicative_update,
        arrays=arrays,
        options={
            "direction": d["direction"],
            "gate": d["gate"],
            "eps": d["eps"],
            "max_memory": d["max_memory"],
        },
        oracle=oracle,
        condition=condition,
        # BLAS computes its products.
        exact=False,
        # LayerNorms can make channels and planes alike, which then cancel to nothing.
        natural=1.0,
        terms=terms,
        gradient_terms=(8 if few else 4) * terms,
        bad=[
            ("eps", 0.0),
            ("eps", math.nan),
            ("direction", "sideways"),
            ("gate", None),
            ("max_memory", 0),
            ("precision", "int8"),
        ],
    )


FAMILY = Family(
    "triangle_multiplicative_update", strategy, build, ("N", 20), {"B": 1, "C": 4, "H": 4}
)
