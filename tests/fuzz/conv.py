"""The step of the dynamic convolution, which updates a state."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops

from .arrays import SMALL, common, values
from .problem import Family, Problem


def _activated(h: np.ndarray, silu: bool) -> np.ndarray:
    # Far below zero the exponential is infinite, and the value zero.
    with np.errstate(over="ignore"):
        return h / (1 + np.exp(-h)) if silu else h


def strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "B": st.sampled_from(SMALL),
        "D": st.sampled_from((0, 1, 2, 3, 5, 8, 17, 33, 64)),
        "W": st.sampled_from((1, 2, 4, 5) if compiled else (1, 2, 3, 4, 5, 7, 13)),
        "T": st.sampled_from((None, 1, 1, 3, 9)),
        "more": st.sampled_from((0, 0, -1, 2)),
        "paged": st.booleans(),
        "circular": st.booleans(),
        **{name: st.booleans() for name in ("static", "bias", "residual", "silu")},
    }


def build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    B, D, W = (d[name] for name in "BDW")
    kind, T, L = d["values"], d["T"], W + d["more"]
    tokens = (B, D) if T is None else (B, T, D)
    arrays = {
        "x": values(rng, tokens, kind),
        "state": values(rng, (B + d["paged"], D, L), kind),
        "kernels": values(rng, (D, W) if d["static"] else (*tokens, W), kind),
    }
    if d["bias"]:
        arrays["bias"] = values(rng, (D,), kind)
    if d["residual"]:
        arrays["residual"] = values(rng, tokens, kind)
    slots = np.arange(B)
    constants: dict[str, Any] = {}
    if d["paged"]:
        slots = rng.permutation(B + 1)[:B]
        slots[1:2] = -1
        constants["slots"] = slots
    starts = np.full(B, L)
    if d["circular"] and L:
        starts = constants["positions"] = rng.integers(0, 3 * L, B)

    def oracle(
        x: np.ndarray,
        state: np.ndarray,
        kernels: np.ndarray,
        bias: Any = None,
        residual: Any = None,
    ) -> Any:
        x, state = x.reshape(B, T or 1, D), state.copy()
        out = np.zeros(x.shape)
        for b, slot in enumerate(slots):
            if slot < 0:
                continue
            past = np.roll(state[slot], -starts[b], axis=1) if L else state[slot]
            inputs = np.concatenate([past, x[b].T], axis=1)
            taps = kernels if d["static"] else kernels.reshape(B, T or 1, D, W)[b]
            windows = np.lib.stride_tricks.sliding_window_view(inputs[:, L - W + 1 :], W, axis=1)
            h = np.einsum("dtw,dw->td" if d["static"] else "dtw,tdw->td", windows, taps)
            out[b] = _activated(h if bias is None else h + bias, d["silu"])
            if residual is not None:
                out[b] += residual.reshape(out.shape)[b]
            if L:
                turn = starts[b] + x.shape[1] if "positions" in constants else 0
                state[slot] = np.roll(inputs[:, -L:], turn, axis=1)
        return out.reshape(tokens), state

    return Problem(
        op=fusedops.dynamic_conv_step,
        arrays=arrays,
        constants=constants,
        options={"activation": "silu" if d["silu"] else None},
        oracle=oracle,
        terms=64 * W,
        differentiable=False,
        mutated=("state",),
        bad=[("activation", "relu")],
    )


FAMILY = Family("dynamic_conv_step", strategy, build, ("B", 5000), {"D": 1, "W": 4})
