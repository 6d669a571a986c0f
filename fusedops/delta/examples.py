"""Calls of the gated delta rule, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops.conv.plan import Sequences
from fusedops.delta.op import delta, delta_step, delta_vjp


def _tokens(rng: Any, *shape: int, groups: int = 1) -> tuple[np.ndarray, ...]:
    """Return q, k, v, g and beta (..., H, K, V), with keys of length 1."""
    *lead, H, K, V = shape
    q, k = rng.normal(size=(2, *lead, H, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(*lead, groups * H, V))
    g = -rng.exponential(0.3, size=v.shape[:-1])
    return q, k, v, g, rng.uniform(0, 2, size=g.shape)


def cases() -> list[Case]:
    found: list[Case] = []

    def add(
        name: str,
        shape: tuple[int, int, int, int, int],
        *,
        groups: int = 1,
        state: bool = True,
        cu_seqlens: list[int] | None = None,
    ) -> None:
        """Add attention (B, T, H, K, V) and its gradient; both have states, or neither."""
        B, T, H, K, V = shape
        count = B if cu_seqlens is None else len(cu_seqlens) - 1

        def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(T)
            arrays: list[Any] = [*_tokens(rng, *shape, groups=groups)]
            states = (count, groups * H, K, V)
            arrays.append(rng.normal(size=states) if state else None)
            if gradient:
                arrays.append(rng.normal(size=(B, T, groups * H, V)))
                arrays.append(rng.normal(size=states) if state else None)
            sequences = None if cu_seqlens is None else Sequences(np.array(cu_seqlens))
            return tuple(arrays), (sequences, K**-0.5)

        # States and gradients of states are differences of sums over a chunk.
        terms = 16 * max(K, V, 32)
        found.append(Case(name, delta, lambda: make(False), terms))
        found.append(Case(name, delta_vjp, lambda: make(True), terms))

    add("delta", (2, 70, 1, 24, 40), groups=2)
    add("delta-bare", (2, 19, 1, 3, 5), state=False)
    add("delta-packed", (1, 136, 2, 5, 9), cu_seqlens=[0, 0, 3, 67, 67, 68, 136])
    add("delta-wide", (1, 5, 1, 130, 66))
    add("delta-narrow", (1, 9, 3, 1, 1), groups=3)
    add("delta-no-tokens", (2, 0, 2, 3, 4))
    add("delta-no-batch", (0, 5, 1, 3, 2))
    add("delta-no-values", (1, 5, 1, 3, 0))
    add("delta-no-sequences", (1, 0, 1, 3, 2), cu_seqlens=[0])

    def add_step(
        name: str, B: int, H: int, K: int, V: int, *, tokens: int | None = None, paged: bool = False
    ) -> None:
        def make() -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(B)
            lead = (B,) if tokens is None else (B, tokens)
            slots = None
            if paged:
                slots = rng.permutation(B + 2)[:B]
                slots[1:2] = -1
            state = rng.normal(size=(B + 2 * paged, 2 * H, K, V))
            return (*_tokens(rng, *lead, H, K, V, groups=2), state), (slots, K**-0.5)

        found.append(Case(name, delta_step, make, 16 * max(K, V, 32)))

    add_step("delta-step", 3, 2, 24, 40, paged=True)
    add_step("delta-step-tokens", 2, 1, 5, 3, tokens=3)
    add_step("delta-step-no-batch", 0, 1, 5, 3)
    return found


def attention(
    rng: Any, B: int, T: int, H: int, K: int, V: int, *, packed: bool = False, raw: bool = False
) -> dict[str, Any]:
    """Attention of B sequences, or of B packed in T tokens; two heads of v share one of q."""
    given: dict[str, Any] = {"output_final_state": True, "scale": 0.5}
    count = B
    if packed:
        cu_seqlens = np.sort(np.concatenate([[0, 0, T], rng.integers(0, T + 1, B - 2)]))
        given, B = {"cu_seqlens": cu_seqlens if raw else fusedops.Sequences(cu_seqlens)}, 1
    names = "q", "k", "v", "g", "beta"
    return {
        **dict(zip(names, _tokens(rng, B, T, H, K, V, groups=2), strict=True)),
        "initial_state": rng.normal(size=(count, 2 * H, K, V)),
        **given,
    }


def examples() -> list[Example]:
    return [
        example(
            f"delta{suffix}",
            fusedops.gated_delta_rule,
            functools.partial(attention, packed=bool(suffix)),
            *("q", "k", "v", "g", "beta", "initial_state"),
            tiny=(3, 3, 1, 2, 2),
            small=(3, 7, 2, 3, 4),
            medium=(4, 140, 1, 5, 3),
            large=(5, 300, 2, 16, 40),
            # torch.compile would keep equal sizes equal, so the first ones differ.
            others=((4, 467, 11, 3, 7), (6, 14, 11, 3, 7), (5, 76, 11, 3, 7)),
            terms=4096,
            slow=True,
            bounded=("k", "g", "beta"),
            packs=bool(suffix),
        )
        for suffix in ("", "-packed")
    ]


def step(rng: Any, B: int, H: int, K: int, V: int) -> dict[str, Any]:
    """A token of every sequence, whose states are every second one of a cache, at random."""
    names = "q", "k", "v", "g", "beta"
    return {
        **dict(zip(names, _tokens(rng, B, H, K, V, groups=2), strict=True)),
        "state": rng.normal(size=(2 * B, 2 * H, K, V)),
        "slots": rng.permutation(2 * B)[:B],
    }


def updates() -> list[Example]:
    return [
        example(
            "delta-step",
            fusedops.gated_delta_rule_step,
            step,
            tiny=(1, 1, 2, 2),
            small=(2, 2, 3, 4),
            medium=(5, 1, 20, 33),
            large=(16, 4, 40, 70),
            others=((3, 2, 3, 4), (9, 2, 3, 4), (12, 2, 3, 4)),
            terms=4096,
            bounded=("k", "g", "beta"),
        )
    ]


def arguments() -> Arguments:
    tokens = {"q": np.ones((1, 4, 1, 2)), "k": np.ones((1, 4, 1, 2)), "v": np.ones((1, 4, 2, 3))}
    gates = {"g": np.zeros((1, 4, 2)), "beta": np.ones((1, 4, 2))}
    return {
        fusedops.gated_delta_rule: {
            **tokens,
            **gates,
            "scale": 1.0,
            "initial_state": np.ones((1, 2, 2, 3)),
            "output_final_state": True,
            "cu_seqlens": np.array([0, 4]),
            "out": np.ones((1, 4, 2, 3)),
        },
        fusedops.gated_delta_rule_step: {
            **{name: x[:, 0] for name, x in (tokens | gates).items()},
            "state": np.ones((1, 2, 2, 3)),
            "scale": 1.0,
            "slots": np.array([0]),
            "out": np.ones((1, 2, 3)),
        },
    }
