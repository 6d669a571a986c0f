"""Calls of SO(2) convolutions and gates, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops.samples import convolved
from fusedops.so2.op import gate, gate_vjp, gate_vjp_vjp, orders, so2, so2_vjp
from fusedops.wigner.rows import message_rows


def _so2_cases() -> list[Case]:
    def add(name: str, *sizes: int, **options: Any) -> None:
        """Add a convolution of `sizes`, as `convolved` has them, and its gradient."""
        edges, lmax, mmax, channels, width, gates = sizes

        def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(lmax)
            given = convolved(rng, *sizes, **options)
            arrays: list[np.ndarray | None] = [given.get(name) for name in so2.arrays]
            if gradient:
                arrays.append(rng.normal(size=(edges, message_rows(lmax, mmax), width)))
                arrays.append(rng.normal(size=(edges, gates)) if gates else None)
            return tuple(arrays), (lmax, gates, "ieee")

        # Sums run over an order's inputs, its results, or edges.
        terms = max(2 * (lmax + 1) * max(channels, width) + gates, edges, 512)
        found.append(Case(name, so2, lambda: make(False), terms))
        found.append(Case(name, so2_vjp, lambda: make(True), terms))

    found: list[Case] = []
    add("uma", 20, 2, 2, 16, 8, 16)
    add("uma-second", 20, 2, 2, 8, 16, 0, radial=False)
    for lmax, mmax in ((0, 0), (1, 0), (1, 1), (3, 1), (4, 4), (6, 2)):
        odd = (lmax + mmax) % 2 == 1
        add(f"l{lmax}-m{mmax}", 7, lmax, mmax, 3, 2, lmax, radial=not odd, bias=odd)
    # More than one block of edges.
    add("blocks", 300, 1, 1, 2, 3, 1)
    add("no-edges", 0, 2, 1, 3, 2, 2)
    add("no-channels", 5, 1, 1, 0, 2, 1)
    add("no-results", 5, 1, 1, 2, 0, 1)
    return found


def _gate_cases() -> list[Case]:
    def add(name: str, edges: int, lmax: int, mmax: int, channels: int, layout: str) -> None:
        def make(count: int) -> tuple[tuple[np.ndarray, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(lmax)
            gates, x = (edges, lmax * channels), (edges, message_rows(lmax, mmax), channels)
            arrays = [rng.normal(size=shape) for shape in (gates, x, x, gates, x)]
            return tuple(arrays[:count]), (lmax, mmax, layout)

        for count, kind in ((2, gate), (3, gate_vjp), (5, gate_vjp_vjp)):
            found.append(Case(name, kind, functools.partial(make, count)))

    found: list[Case] = []
    add("gates", 9, 2, 2, 16, "m")
    for lmax, mmax in ((0, 0), (1, 1), (3, 1), (4, 4)):
        for layout in ("m", "l"):
            add(f"l{lmax}-m{mmax}-{layout}", 5, lmax, mmax, 3, layout)
    add("many-channels", 2, 1, 1, 150, "l")
    add("no-edges", 0, 1, 1, 3, "m")
    add("no-channels", 3, 2, 1, 0, "m")
    return found


def cases() -> list[Case]:
    return [*_so2_cases(), *_gate_cases()]


def messages(
    rng: Any, edges: int, lmax: int, mmax: int, C: int, D: int, *, gates: int, bare: bool = False
) -> dict[str, Any]:
    given = convolved(rng, edges, lmax, mmax, C, D, gates, radial=not bare, bias=not bare)
    return {**given, "gate_channels": gates}


def gated(
    rng: Any, edges: int, lmax: int, mmax: int, C: int, *, layout: str = "m"
) -> dict[str, Any]:
    shapes = {"gates": (edges, lmax * C), "x": (edges, message_rows(lmax, mmax), C)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return {**arrays, "mmax": mmax, "layout": layout}


def examples() -> list[Example]:
    return [
        *(
            example(
                f"so2{suffix}",
                fusedops.so2_convolution,
                functools.partial(messages, gates=gates, bare=bool(suffix)),
                *("message", "weight_m0", "weight_m1"),
                *(() if suffix else ("bias", "radial")),
                tiny=(2, 1, 1, 1, 2),
                small=(7, 2, 1, 3, 4),
                medium=(300, 1, 1, 2, 3),
                large=(1500, 2, 1, 16, 8),
                others=((20, 2, 1, 3, 4), (37, 2, 1, 3, 4), (50, 2, 1, 3, 4)),
                exact=False,
                # Sums over edges.
                terms=4096,
                slow=True,
                needed=("weight_m1",),
            )
            for suffix, gates in (("", 2), ("-bare", 0))
        ),
        *(
            example(
                f"gates-{layout}",
                fusedops.gate_activation,
                functools.partial(gated, layout=layout),
                *("gates", "x"),
                tiny=(2, 1, 1, 2),
                small=(7, 2, 1, 3),
                medium=(7, 3, 2, 70),
                large=(900, 2, 2, 40),
                others=((20, 2, 1, 3), (37, 2, 1, 3), (50, 2, 1, 3)),
                # Torch rounds the σ of a strided tensor otherwise.
                exact=False,
            )
            for layout in ("m", "l")
        ),
    ]


def arguments() -> Arguments:
    return {
        fusedops.so2_convolution: {
            "message": np.ones((3, 4, 2)),
            "weight_m0": np.ones((5, 4)),
            "weight_m1": np.ones((4, 2)),
            "bias": np.ones(5),
            "radial": np.ones((3, 6)),
            "gate_channels": 1,
            "out": np.ones((3, 4, 2)),
        },
        fusedops.gate_activation: {
            "gates": np.ones((3, 2)),
            "x": np.ones((3, 4, 2)),
            "mmax": 1,
            "layout": "m",
            "out": np.ones((3, 4, 2)),
        },
    }


def _draw(figure: Any) -> None:
    """Messages turned about their edges (points) give results turned alike (lines)"""
    lmax, angles = 2, np.linspace(0, 2 * np.pi, 25)
    given: dict[str, Any] = convolved(np.random.default_rng(0), 25, lmax, lmax, 3, 4, lmax * 4)

    def turned(message: np.ndarray) -> np.ndarray:
        """Return the first message, turned about its edge by all angles."""
        out = np.repeat(message[:1], len(angles), 0)
        for m, (rows, _) in enumerate(orders(lmax, lmax)[1:], 1):
            plus, minus = np.split(out[:, rows], 2, axis=1)
            phased = (plus + 1j * minus) * np.exp(1j * m * angles)[:, None, None]
            plus[...], minus[...] = phased.real, phased.imag
        return out

    given |= {"message": turned(given["message"]), "radial": given["radial"][:1].repeat(25, 0)}
    mixed, gates = fusedops.so2_convolution(**given, gate_channels=lmax * 4)
    results = given["message"], fusedops.gate_activation(gates, mixed)
    titles = "A message", "The convolution's result, gated"
    for panel, result, title in zip(figure.subplots(1, 2), results, titles, strict=True):
        for row, m in ((1, 0), (3, 1), (7, 2)):
            panel.plot(angles, turned(result)[:, row, 0], color=f"C{m}", label=f"order {m}")
            panel.plot(angles, result[:, row, 0], "o", color=f"C{m}", markersize=4)
        panel.set(title=title, xlabel="turn about the edge, radians")
    panel.legend(frameon=False)


pictures = {"so2_convolution": _draw}
