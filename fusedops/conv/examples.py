"""Calls of dynamic convolutions, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops._pictures import show_taps
from fusedops.conv.op import conv, conv_step, conv_vjp
from fusedops.conv.plan import Sequences


def _conv_case(
    name: str,
    shape: tuple[int, int, int, int],
    *,
    static: bool = False,
    state: bool = False,
    bias: bool = False,
    residual: bool = False,
    cu_seqlens: list[int] | None = None,
    silu: bool = False,
    final: bool = False,
) -> list[Case]:
    """Return a convolution (B, T, D, W) and its gradient, which `final` gives a dfinal_state."""
    B, T, D, W = shape
    count = B if cu_seqlens is None else len(cu_seqlens) - 1

    def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
        rng = np.random.default_rng(W)
        arrays = [
            rng.normal(size=(B, T, D)),
            rng.normal(size=(D, W) if static else (B, T, D, W)) / np.sqrt(W),
            rng.normal(size=(count, D, W)) if state else None,
            rng.normal(size=D) if bias else None,
            # The gradient's dout, or the residual, which no gradient reads.
            rng.normal(size=(B, T, D)) if gradient or residual else None,
        ]
        if gradient:
            arrays.append(rng.normal(size=(count, D, W)) if final else None)
        sequences = None if cu_seqlens is None else Sequences(np.array(cu_seqlens))
        return tuple(arrays), (sequences, "silu" if silu else "none")

    return [Case(name, conv, lambda: make(False)), Case(name, conv_vjp, lambda: make(True))]


def _step_case(
    name: str,
    B: int,
    D: int,
    W: int,
    *,
    static: bool,
    bias: bool,
    silu: bool,
    residual: bool = False,
    tokens: int | None = None,
    length: int | None = None,
    paged: bool = False,
    circular: bool = False,
) -> Case:
    """A step of one token, or of `tokens`; states hold `length` inputs, W by default."""
    L = W if length is None else length

    def make() -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
        rng = np.random.default_rng(W)
        each = (B,) if tokens is None else (B, tokens)
        kernels = rng.normal(size=(D, W) if static else (*each, D, W))
        state = rng.normal(size=(B + 2 * paged, D, L))
        given = (
            rng.normal(size=(*each, D)),
            state,
            kernels,
            rng.normal(size=D) if bias else None,
            rng.normal(size=(*each, D)) if residual else None,
        )
        slots = positions = None
        if paged:
            slots = rng.permutation(B + 2)[:B]
            slots[1:2] = -1
        if circular:
            positions = rng.integers(0, 100, B)
        return given, (slots, positions, "silu" if silu else "none")

    return Case(name, conv_step, make)


def cases() -> list[Case]:
    # Sequences that are empty, shorter than the kernel, as long as a chunk, and longer.
    packed = [0, 0, 3, 67, 67, 68, 136]
    found = _conv_case("jet", (2, 70, 40, 4), state=True, silu=True, final=True)
    for width in (1, 2, 3, 4, 5, 7, 16, 31):
        shape = (2 if width < 16 else 1, 66 if width < 5 else 39 + width, 5, width)
        odd = width % 2 == 1
        found += _conv_case(f"w{width}", shape, silu=odd, bias=not odd, state=odd)
    for static in (False, True):
        kind = "static" if static else "dynamic"
        every: dict[str, Any] = {"static": static, "state": True, "final": True}
        every |= {"bias": True, "residual": True}
        some: dict[str, Any] = {"bias": True, "residual": static, "silu": True}
        found += _conv_case(f"{kind}-mamba", (2, 70, 40, 4), static=static, **some)
        found += _conv_case(f"{kind}-short", (3, 2, 4, 7), silu=True, **every)
        found += _conv_case(f"{kind}-packed", (1, 136, 9, 4), cu_seqlens=packed, silu=True, **every)
        found += _conv_case(f"{kind}-packed-w7", (1, 136, 3, 7), cu_seqlens=packed, static=static)
        found += _conv_case(f"{kind}-no-tokens", (2, 0, 3, 4), **every)
    found += _conv_case("no-batch", (0, 5, 3, 2))
    found += _conv_case("no-channels", (2, 5, 0, 3), static=True, state=True)
    found += _conv_case("no-sequences", (1, 0, 3, 2), cu_seqlens=[0], state=True)
    found.append(_step_case("jet", 3, 40, 4, static=False, bias=False, silu=True))
    found.append(_step_case("w5", 2, 5, 5, static=False, bias=True, silu=False))
    found.append(_step_case("static-w1", 2, 5, 1, static=True, bias=True, silu=True))
    found.append(_step_case("no-batch", 0, 5, 3, static=True, bias=False, silu=False))
    some = {"static": True, "bias": True, "silu": True}
    several = {**some, "static": False, "residual": True}
    found.append(_step_case("paged", 5, 8, 4, **some, paged=True))
    found.append(_step_case("residual", 5, 8, 4, **some, paged=True, residual=True))
    found.append(_step_case("short-state", 3, 8, 4, **some, length=3, paged=True))
    found.append(_step_case("tokens", 3, 5, 4, **several, tokens=3, length=7))
    found.append(_step_case("more-tokens-than-state", 3, 5, 3, **some, tokens=5, length=2))
    found.append(_step_case("circular", 4, 5, 3, **some, tokens=2, length=5, circular=True))
    return found


def convolution(
    rng: Any, B: int, T: int, D: int, W: int, *, static: bool = False
) -> dict[str, Any]:
    return {
        "x": rng.normal(size=(B, T, D)),
        "kernels": rng.normal(size=(D, W) if static else (B, T, D, W)),
        "initial_state": rng.normal(size=(B, D, W)),
        "bias": rng.normal(size=D),
        "residual": rng.normal(size=(B, T, D)),
        "output_final_state": True,
        "activation": "silu",
    }


def packed_convolution(
    rng: Any, S: int, T: int, D: int, W: int, *, static: bool = False, raw: bool = False
) -> dict[str, Any]:
    """S sequences, of which the first is empty."""
    cu_seqlens = np.sort(np.concatenate([[0, 0, T], rng.integers(0, T + 1, S - 2)]))
    return {
        "x": rng.normal(size=(1, T, D)),
        "kernels": rng.normal(size=(D, W) if static else (1, T, D, W)),
        "initial_state": rng.normal(size=(S, D, W)),
        "bias": rng.normal(size=D),
        "cu_seqlens": cu_seqlens if raw else fusedops.Sequences(cu_seqlens),
        "activation": "silu" if static else None,
    }


def examples() -> list[Example]:
    return [
        *(
            example(
                f"conv{suffix}",
                fusedops.dynamic_conv,
                functools.partial(convolution, static=bool(suffix)),
                *("x", "kernels", "initial_state", "bias", "residual"),
                tiny=(1, 3, 2, 3),
                small=(2, 5, 3, 4),
                medium=(2, 70, 5, 3),
                large=(3, 400, 40, 4),
                # A gradient of static kernels sums over tokens.
                many=2048,
                others=((2, 9, 3, 4), (2, 12, 3, 4), (2, 17, 3, 4)),
            )
            for suffix in ("", "-static")
        ),
        *(
            example(
                f"conv-packed{suffix}",
                fusedops.dynamic_conv,
                functools.partial(packed_convolution, static=bool(suffix)),
                *("x", "kernels", "initial_state", "bias"),
                tiny=(3, 4, 2, 3),
                small=(3, 7, 3, 4),
                medium=(4, 140, 5, 3),
                large=(18, 1800, 40, 4),
                # A gradient of static kernels sums over tokens.
                many=2048,
                # torch.compile would keep equal sizes equal, so the first ones differ.
                others=((4, 467, 11, 3), (6, 14, 11, 3), (5, 76, 11, 3)),
                packs=not suffix,
            )
            for suffix in ("", "-static")
        ),
    ]


def step(rng: Any, B: int, D: int, W: int, *, tokens: int | None = None) -> dict[str, Any]:
    """Tokens of sequences, whose states are every second one of a cache, at random.

    Of several tokens, kernels are static, and states circular.
    """
    shape = (B, D) if tokens is None else (B, tokens, D)
    some = {} if tokens is None else {"positions": rng.integers(0, 3 * W, B)}
    return {
        "x": rng.normal(size=shape),
        "state": rng.normal(size=(2 * B, D, W + (tokens or 0))),
        "kernels": rng.normal(size=(B, D, W) if tokens is None else (D, W)),
        "bias": rng.normal(size=D),
        "residual": rng.normal(size=shape),
        "slots": rng.permutation(2 * B)[:B],
        **some,
        "activation": "silu",
    }


def updates() -> list[Example]:
    return [
        example(
            name,
            fusedops.dynamic_conv_step,
            functools.partial(step, tokens=tokens),
            tiny=(1, 2, 2),
            small=(2, 3, 4),
            medium=(5, 70, 3),
            large=(64, 400, 4),
            others=((3, 3, 4), (9, 3, 4), (12, 3, 4)),
        )
        for name, tokens in (("conv-step", None), ("conv-step-tokens", 3))
    ]


def arguments() -> Arguments:
    return {
        fusedops.Sequences: {"cu_seqlens": np.array([0, 2, 4]), "num_tokens": 4},
        fusedops.dynamic_conv: {
            "x": np.ones((1, 4, 2)),
            "kernels": np.ones((1, 4, 2, 3)),
            "bias": np.ones(2),
            "residual": np.ones((1, 4, 2)),
            "initial_state": np.ones((1, 2, 3)),
            "output_final_state": True,
            "cu_seqlens": np.array([0, 4]),
            "activation": "silu",
            "out": np.ones((1, 4, 2)),
        },
        fusedops.dynamic_conv_step: {
            "x": np.ones((1, 2)),
            "state": np.ones((1, 2, 3)),
            "kernels": np.ones((2, 3)),
            "bias": np.ones(2),
            "residual": np.ones((1, 2)),
            "activation": "silu",
            "slots": np.array([0]),
            "positions": np.array([5]),
            "out": np.ones((1, 2)),
        },
    }


def _draw(figure: Any) -> None:
    """Kernels average the inputs that are similar to a token; a sequence begins after zeros"""
    W, rng = 4, np.random.default_rng(1)
    x = np.repeat([2.0, 4, 3, 5], [14, 12, 22, 16]) + rng.normal(scale=0.2, size=64)
    inputs = np.lib.stride_tricks.sliding_window_view(np.pad(x, (W - 1, 0)), W)
    kernels = np.exp(-0.5 * ((inputs - x[:, None]) / 0.4) ** 2)
    kernels /= kernels.sum(1, keepdims=True)
    tokens, sequences = x[None, :, None], fusedops.Sequences([0, 40, 64])
    lines, taps = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    lines.plot(x, ".", color="0.6", label="tokens")
    mean, dynamic = np.full((1, W), 1 / W), kernels[None, :, None]
    for given, label in ((mean, "one kernel for all: the mean"), (dynamic, "dynamic kernels")):
        out = fusedops.dynamic_conv(tokens, given, cu_seqlens=sequences).ravel()
        # A NaN breaks the line between sequences.
        lines.plot(*np.insert([np.arange(64.0), out], 40, np.nan, axis=1), label=label)
    lines.legend(frameon=False)
    show_taps(figure, taps, kernels.T, "token t")


pictures = {"dynamic_conv": _draw}
