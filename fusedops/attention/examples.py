"""Calls of triangle attention, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops.attention.op import attention, attention_vjp


def rows(
    rng: Any, B: int, N: int, Q: int, K: int, H: int, D: int, *, ending: bool = False
) -> dict[str, Any]:
    """Return q, k, v and bias; around ending nodes, the first three are views of columns."""

    def edges(length: int) -> Any:
        if ending:
            return rng.normal(size=(B, length, N, H, D)).swapaxes(1, 2)
        return rng.normal(size=(B, N, length, H, D))

    return {"q": edges(Q), "k": edges(K), "v": edges(K), "bias": rng.normal(size=(B, H, Q, K))}


def present(rng: Any, B: int, N: int, K: int) -> Any:
    """Return a mask of rows with two keys and more, but the first, which has none."""
    mask = rng.uniform(size=(B, N, K)) < 0.8
    mask[..., :2] = True
    mask[:, :1] = False
    return mask


def cases() -> list[Case]:
    found: list[Case] = []

    def add(
        name: str, shape: tuple[int, int, int, int, int, int], *, masked: bool, **options: bool
    ) -> None:
        """Add attention (B, N, Q, K, H, D) and its gradient."""
        B, N, Q, K, H, D = shape

        def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(K)
            arrays = tuple(rows(rng, *shape, **options).values())
            constants = present(rng, B, N, K) if masked else None, D**-0.5
            if gradient:
                saved = attention.formula(attention.Arguments(*arrays, *constants))
                arrays = (*arrays, *saved, rng.normal(size=(B, N, Q, H, D)))
            return arrays, constants

        # The gradient of a softmax is a difference, of exponentials of rounded logits.
        found.append(Case(name, attention, lambda: make(False), 512))
        found.append(Case(name, attention_vjp, lambda: make(True), 2048))

    add("attention", (1, 5, 37, 37, 2, 32), masked=True)
    add("attention-bare", (1, 3, 19, 19, 1, 16), masked=False)
    add("attention-ending", (2, 4, 21, 21, 2, 8), masked=True, ending=True)
    add("attention-ragged", (2, 3, 9, 70, 1, 64), masked=True)
    add("attention-few-keys", (1, 3, 70, 2, 3, 24), masked=True)
    add("attention-one-row", (2, 1, 35, 18, 2, 5), masked=False)
    add("attention-long", (1, 2, 150, 300, 1, 8), masked=True)
    add("attention-narrow", (1, 2, 3, 4, 1, 1), masked=False)
    add("attention-wide", (1, 2, 5, 7, 1, 130), masked=True)
    add("attention-no-rows", (1, 0, 5, 4, 2, 3), masked=True)
    add("attention-no-queries", (1, 2, 0, 4, 2, 3), masked=True)
    add("attention-no-heads", (1, 2, 5, 4, 0, 3), masked=False)
    add("attention-no-batch", (0, 2, 5, 4, 2, 3), masked=False)
    return found


def attended(rng: Any, *shape: int, masked: bool) -> dict[str, Any]:
    B, N, _, K, _, _ = shape
    more = {"mask": present(rng, B, N, K), "scale": 0.5} if masked else {}
    return {**rows(rng, *shape, ending=masked), **more}


def examples() -> list[Example]:
    return [
        example(
            f"attention{suffix}",
            fusedops.triangle_attention,
            functools.partial(attended, masked=bool(suffix)),
            *("q", "k", "v", "bias"),
            tiny=(1, 2, 2, 3, 2, 3),
            small=(2, 3, 4, 5, 2, 3),
            medium=(1, 3, 18, 35, 2, 5),
            large=(2, 9, 40, 70, 3, 8),
            # torch.compile would keep equal sizes equal, so they differ.
            others=((4, 9, 11, 13, 3, 7), (6, 5, 14, 12, 3, 7), (5, 8, 17, 10, 3, 7)),
            terms=2048,
            slow=True,
            bounded=("q", "k", "bias"),
            # The share of a row's only key is one.
            cancels=True,
        )
        for suffix in ("", "-masked")
    ]


def arguments() -> Arguments:
    return {
        fusedops.triangle_attention: {
            "q": np.ones((1, 2, 3, 2, 4)),
            "k": np.ones((1, 2, 5, 2, 4)),
            "v": np.ones((1, 2, 5, 2, 4)),
            "bias": np.ones((1, 2, 3, 5)),
            "mask": np.ones((1, 2, 5)),
            "scale": 1.0,
            "out": np.ones((1, 2, 3, 2, 4)),
        },
    }
