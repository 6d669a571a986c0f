"""The dynamic convolution whose kernels a linear layer makes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops

from . import conv
from .arrays import MEDIUM, common, values
from .problem import Family, Problem


def strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "B": st.sampled_from((0, 1, 1, 2, 3)),
        "T": st.sampled_from((*MEDIUM, 150)),
        "D": st.sampled_from((1, 8) if compiled else (1, 2, 3, 8, 17)),
        "W": st.sampled_from((4,) if compiled else (1, 2, 3, 4, 7, 18)),
        "H": st.sampled_from((8,) if compiled else (0, 1, 3, 16, 33)),
        "sequences": st.sampled_from((0, 0, 0, 1, 2, 5)),
        **{name: st.booleans() for name in ("state", "final", "bias", "shift", "silu")},
    }


def build(d: dict[str, Any]) -> Problem:
    """Return the problem of a convolution whose kernels are a product."""
    plain = conv.build({**d, "static": False, "residual": False, "bias": d["shift"]})
    rng, kind = np.random.default_rng(d["seed"] + 1), d["values"]
    W, H = d["W"], d["H"]
    B, T, D = plain.arrays["x"].shape
    arrays = {
        "x": plain.arrays["x"],
        "hidden": values(rng, (B, T, H), kind),
        "weight": values(rng, (D * W, H), kind),
    }
    if d["bias"]:
        arrays["bias"] = values(rng, (D * W,), kind)
    if d["state"]:
        arrays["initial_state"] = plain.arrays["initial_state"]
    if d["shift"]:
        arrays["conv_bias"] = plain.arrays["bias"]

    def oracle(
        x: np.ndarray,
        hidden: np.ndarray,
        weight: np.ndarray,
        bias: Any = 0.0,
        initial_state: Any = None,
        conv_bias: Any = None,
    ) -> Any:
        kernels = np.einsum("bth,rh->btr", hidden, weight) + bias
        return plain.oracle(x, kernels.reshape(B, T, D, W), initial_state, conv_bias)

    return Problem(
        op=fusedops.dynamic_conv_generated,
        arrays=arrays,
        constants=plain.constants,
        options=plain.options,
        oracle=oracle,
        pack=plain.pack,
        exact=False,
        absolute=plain.absolute,
        bends=plain.bends,
        terms=max(512, 4 * W * H),
        gradient_terms=max(512, 4 * D * W, 4 * W * H, 2 * B * T),
        bad=plain.bad,
    )


FAMILY = Family(
    "dynamic_conv_generated",
    strategy,
    build,
    ("T", 3000),
    {"B": 1, "D": 1, "W": 2, "H": 2, "sequences": 2},
)
