"""The dynamic convolution and its step."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops

from .arrays import LARGE, SMALL, common, values
from .problem import Family, Problem


def _flags() -> dict[str, Any]:
    return {name: st.booleans() for name in ("static", "bias", "residual", "silu")}


def strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "B": st.sampled_from((0, 1, 1, 2, 3)),
        "T": st.sampled_from(LARGE),
        "D": st.sampled_from((0, 1, 2, 3, 5, 8, 17, 33)),
        "W": st.sampled_from((1, 4) if compiled else (1, 2, 3, 4, 5, 7, 13)),
        "sequences": st.sampled_from((0, 0, 0, 1, 2, 5)),
        "state": st.booleans(),
        "final": st.booleans(),
        **_flags(),
    }


def _activated(h: np.ndarray, silu: bool) -> np.ndarray:
    # Far below zero the exponential is infinite, and the value zero.
    with np.errstate(over="ignore"):
        return h / (1 + np.exp(-h)) if silu else h


def build(d: dict[str, Any]) -> Problem:
    rng = np.random.default_rng(d["seed"])
    B, T, D, W = (d[name] for name in "BTDW")
    count, starts = B, None
    constants = {}
    if d["sequences"]:
        B, count = 1, d["sequences"]
        inner = np.sort(rng.integers(0, T + 1, count - 1))
        starts = np.concatenate([[0], inner, [T]])
        constants["cu_seqlens"] = starts.astype(d["index"])
    kind = d["values"]
    arrays = {
        "x": values(rng, (B, T, D), kind),
        "kernels": values(rng, (D, W) if d["static"] else (B, T, D, W), kind),
    }
    if d["state"]:
        arrays["initial_state"] = values(rng, (count, D, W), kind)
    if d["bias"]:
        arrays["bias"] = values(rng, (D,), kind)
    if d["residual"]:
        arrays["residual"] = values(rng, (B, T, D), kind)

    def oracle(
        x: np.ndarray,
        kernels: np.ndarray,
        initial_state: Any = None,
        bias: Any = None,
        residual: Any = None,
    ) -> Any:
        out, final = np.zeros(x.shape), np.zeros((count, D, W))
        for s in range(count):
            row, low, high = (s, 0, T) if starts is None else (0, starts[s], starts[s + 1])
            past = np.zeros((W, D)) if initial_state is None else initial_state[s].T
            inputs = np.concatenate([past, x[row, low:high]])
            # Token t reads inputs t + 1 to t + W, for it is number t + W itself.
            reads = inputs[np.arange(high - low)[:, None] + np.arange(1, W + 1)]
            taps = kernels if d["static"] else kernels[row, low:high]
            spec = "twd,dw->td" if d["static"] else "twd,tdw->td"
            h = np.einsum(spec, reads, taps)
            out[row, low:high] = _activated(h if bias is None else h + bias, d["silu"])
            final[s] = inputs[len(inputs) - W :].T
        if residual is not None:
            out += residual
        return (out, final) if d["final"] else out

    def pack(given: Any) -> dict[str, Any]:
        return {"cu_seqlens": fusedops.Sequences(given["cu_seqlens"])}

    bad: list[tuple[str, Any]] = [("activation", "relu")]
    if starts is not None:
        bad += [("cu_seqlens", starts + 1), ("cu_seqlens", starts[:0]), ("cu_seqlens", -starts - 1)]
    return Problem(
        op=fusedops.dynamic_conv,
        arrays=arrays,
        constants=constants,
        options={
            "activation": "silu" if d["silu"] else None,
            "output_final_state": d["final"],
        },
        oracle=oracle,
        pack=pack if constants else None,
        linear=()
        if any(d[name] for name in ("silu", "bias", "residual", "final"))
        else ("kernels",),
        absolute={"activation": None},
        bends=d["silu"],
        terms=W,
        gradient_terms=max(W, B * T),
        bad=bad,
    )


FAMILY = Family(
    "dynamic_conv", strategy, build, ("T", 5000), {"B": 1, "D": 1, "W": 2, "sequences": 2}
)


def step_strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "B": st.sampled_from(SMALL),
        "D": st.sampled_from((0, 1, 2, 3, 5, 8, 17, 33, 64)),
        "W": st.sampled_from((1, 2, 4, 5) if compiled else (1, 2, 3, 4, 5, 7, 13)),
        "T": st.sampled_from((None, 1, 1, 3, 9)),
        "more": st.sampled_from((0, 0, -1, 2)),
        "paged": st.booleans(),
        "circular": st.booleans(),
        **_flags(),
    }


def step_build(d: dict[str, Any]) -> Problem:
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
        absolute={"activation": None},
        bends=d["silu"],
        terms=W,
        differentiable=False,
        mutated=("state",),
        bad=[("activation", "relu")],
    )


STEP = Family("dynamic_conv_step", step_strategy, step_build, ("B", 5000), {"D": 1, "W": 4})
