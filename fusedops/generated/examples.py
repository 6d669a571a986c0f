"""Calls of convolutions with generated kernels, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops._pictures import show_taps
from fusedops.conv.plan import Sequences
from fusedops.generated.op import generated as primitive
from fusedops.generated.op import generated_vjp


def cases() -> list[Case]:
    found: list[Case] = []

    def add(
        name: str,
        shape: tuple[int, int, int, int, int],
        *,
        cu_seqlens: list[int] | None = None,
        silu: bool = False,
        bare: bool = False,
    ) -> None:
        """Add a convolution (B, T, D, W, H) and its gradient; a bare one has no optional array."""
        B, T, D, W, H = shape
        count = B if cu_seqlens is None else len(cu_seqlens) - 1

        def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(W)
            arrays = [
                rng.normal(size=(B, T, D)),
                rng.normal(size=(B, T, H)),
                rng.normal(size=(D * W, H)) / np.sqrt(max(H, 1) * W),
            ]
            shapes: list[tuple[int, ...]] = [(D * W,), (count, D, W), (D,)]
            if gradient:
                shapes += [(B, T, D), (count, D, W)]
            arrays += [
                None if bare and shape != (B, T, D) else rng.normal(size=shape) for shape in shapes
            ]
            sequences = None if cu_seqlens is None else Sequences(np.array(cu_seqlens))
            return tuple(arrays), (sequences, "silu" if silu else "none")

        # Gradients sum over the weight's rows, and over tokens.
        terms = 8 * max(D * W, H, B * T)
        found.append(Case(name, primitive, lambda: make(False), terms))
        found.append(Case(name, generated_vjp, lambda: make(True), terms))

    add("generated", (2, 70, 24, 4, 16), silu=True)
    add("generated-bare", (2, 19, 5, 3, 7), bare=True)
    add("generated-packed", (1, 136, 9, 4, 5), cu_seqlens=[0, 0, 3, 67, 67, 68, 136], silu=True)
    add("generated-w7", (3, 2, 4, 7, 3))
    add("generated-w1", (1, 5, 3, 1, 2), silu=True, bare=True)
    add("generated-w17", (1, 40, 2, 17, 3), silu=True)
    add("generated-nothing", (2, 9, 3, 2, 0))
    add("generated-no-tokens", (2, 0, 3, 4, 2), silu=True)
    add("generated-no-batch", (0, 5, 3, 2, 2), bare=True)
    add("generated-no-sequences", (1, 0, 3, 2, 2), cu_seqlens=[0])
    return found


def generated(
    rng: Any, B: int, T: int, D: int, W: int, H: int, *, packed: bool = False
) -> dict[str, Any]:
    """A convolution of B sequences with generated kernels, or of B packed in T tokens."""
    given: dict[str, Any] = {"output_final_state": True, "activation": "silu"}
    count = B
    if packed:
        cu_seqlens = np.sort(np.concatenate([[0, 0, T], rng.integers(0, T + 1, B - 2)]))
        given, B = {"cu_seqlens": fusedops.Sequences(cu_seqlens)}, 1
    return {
        "x": rng.normal(size=(B, T, D)),
        "hidden": rng.normal(size=(B, T, H)),
        "weight": rng.normal(size=(D * W, H)),
        "bias": rng.normal(size=D * W),
        "initial_state": rng.normal(size=(count, D, W)),
        "conv_bias": rng.normal(size=D),
        **given,
    }


def examples() -> list[Example]:
    return [
        *(
            example(
                f"generated{suffix}",
                fusedops.dynamic_conv_generated,
                functools.partial(generated, packed=bool(suffix)),
                *("x", "hidden", "weight", "bias", "initial_state", "conv_bias"),
                tiny=(3, 3, 2, 2, 2),
                small=(3, 7, 3, 4, 5),
                medium=(4, 150, 5, 3, 4),
                large=(5, 1300, 40, 4, 8),
                # torch.compile would keep equal sizes equal, so the first ones differ.
                others=((4, 467, 11, 3, 7), (6, 14, 11, 3, 7), (5, 76, 11, 3, 7)),
                exact=False,
                # Sums over tokens, and over the weight's rows.
                terms=8192,
                slow=True,
            )
            for suffix in ("", "-packed")
        ),
    ]


def arguments() -> Arguments:
    return {
        fusedops.dynamic_conv_generated: {
            "x": np.ones((1, 4, 2)),
            "hidden": np.ones((1, 4, 5)),
            "weight": np.ones((6, 5)),
            "bias": np.ones(6),
            "conv_bias": np.ones(2),
            "initial_state": np.ones((1, 2, 3)),
            "output_final_state": True,
            "cu_seqlens": np.array([0, 4]),
            "activation": "silu",
            "out": np.ones((1, 4, 2)),
        },
    }


def _draw(figure: Any) -> None:
    """A layer makes kernels that delay tokens as their hidden units say"""
    delays = np.repeat([0, 3, 1, 2], 16)
    x = np.random.default_rng(2).normal(size=(1, 64, 1))
    hidden, weight = np.eye(4)[None, delays], np.eye(4)[::-1].copy()
    lines, taps = figure.subplots(1, 2, width_ratios=(3, 1))
    lines.plot(x.ravel(), color="0.6", label="tokens")
    out = fusedops.dynamic_conv_generated(x, hidden, weight)
    lines.plot(out.ravel(), ".-", label="delayed by 0, 3, 1 and 2 tokens")
    lines.legend(frameon=False)
    lines.set_xlabel("token t")
    show_taps(figure, taps, weight, "hidden unit")


pictures = {"dynamic_conv_generated": _draw}
