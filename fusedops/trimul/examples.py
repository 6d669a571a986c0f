"""Calls of triangle updates, for tests; see `fusedops._catalogue`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Arguments, Case, Example, example
from fusedops.samples import exact, pair, ubiquitin
from fusedops.trimul.op import trimul, trimul_vjp


def cases() -> list[Case]:
    def add(
        name: str,
        shape: tuple[int, int, int, int],
        direction: str,
        gate: str = "output",
        *,
        hidden: bool = True,
        **options: Any,
    ) -> None:
        """Add an update and its gradient, which gets o as an argument if `hidden`."""
        # Rounded numbers go through five products and two LayerNorms. LayerNorms subtract the mean
        # and divide by the deviation, which magnifies errors, the more so the fewer the channels;
        # of a single channel nothing but rounding errors is left.
        few = min(shape[2:]) < 8
        terms = 1024 if few else 512
        terms *= 4 if shape[2:] == (1, 1) else 1

        def make(gradient: bool) -> tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]:
            rng = np.random.default_rng(shape[2])
            arrays: tuple[Any, ...] = tuple(pair(*shape, rng, gate=gate, **options).values())
            static = (direction, gate, "float32", 1e-5, 0)
            if gradient:
                a = trimul.Arguments._make((*arrays, *static))
                o = trimul.formula(a)[1] if hidden else None
                D = len(a.p_out_weight)
                arrays = (*arrays, o, exact(rng.normal(size=(*a.x.shape[:3], D))))
            return arrays, static

        found.append(Case(name, trimul, lambda: make(False), terms))
        found.append(Case(name, trimul_vjp, lambda: make(True), 8 * terms if few else 4 * terms))

    found: list[Case] = []
    add("boltz", (1, 12, 32, 32), "outgoing", mask=True)
    add("openfold", (2, 5, 6, 5), "incoming", mask=False, biases=True)
    add("gpu-mode", (2, 7, 4, 9), "outgoing", "hidden", mask=True, hidden=False)
    add("hidden-incoming", (1, 7, 5, 3), "incoming", "hidden", biases=True)
    add("plain", (1, 5, 9, 8), "outgoing", norms=False, hidden=False)
    add("plain-incoming", (1, 5, 8, 9), "incoming", "hidden", norms=False, mask=False)
    add("one-residue", (2, 1, 5, 7), "outgoing", biases=True)
    add("one-channel", (1, 3, 1, 1), "incoming", biases=True, mask=False)
    add("wide", (1, 3, 70, 33), "incoming", mask=False, hidden=False)
    add("long", (1, 19, 6, 8), "outgoing", "hidden", mask=True, biases=True)
    add("narrower", (1, 5, 9, 8), "outgoing", D=5, biases=True)
    add("wider", (2, 4, 8, 9), "incoming", "hidden", D=19, biases=True, hidden=False)
    add("no-residues", (1, 0, 4, 4), "outgoing", biases=True, mask=True)
    add("no-batch", (0, 3, 4, 4), "incoming", "hidden")
    return found


def update(rng: Any, B: int, N: int, C: int, H: int, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {k: options.pop(k) for k in ("direction", "gate") if k in options}
    arrays = pair(B, N, C, H, rng, gate=given["gate"], **options)
    return {**{name: a for name, a in arrays.items() if a is not None}, **given}


def _triangle(name: str, leaves: tuple[str, ...], **options: Any) -> Example:
    op = fusedops.triangle_multiplicative_update
    return example(
        name,
        op,
        functools.partial(update, **options),
        *(n for n in inspect.signature(op).parameters if n in leaves),
        tiny=(1, 3, 4, 3),
        small=(2, 5, 6, 7),
        medium=(2, 5, 6, 7),
        large=(1, 33, 17, 16),
        others=((2, 9, 6, 7), (3, 11, 6, 7), (5, 4, 6, 7)),
        exact=False,
        # Products of few channels, and two LayerNorms.
        terms=8192,
        slow=True,
    )


_NORMS = ("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias")
_WEIGHTS = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")


def examples() -> list[Example]:
    return [
        _triangle(
            "triangle",
            ("x", "mask", *_NORMS, *_WEIGHTS, *(w.replace("weight", "bias") for w in _WEIGHTS)),
            direction="outgoing",
            gate="output",
            mask=False,
            biases=True,
        ),
        _triangle(
            "triangle-hidden", ("x", *_NORMS, *_WEIGHTS), direction="incoming", gate="hidden"
        ),
    ]


WEIGHTS = {
    "norm_in_weight": np.ones(2),
    "norm_in_bias": np.ones(2),
    "p_in_weight": np.ones((6, 2)),
    "p_in_bias": np.ones(6),
    "g_in_weight": np.ones((6, 2)),
    "g_in_bias": np.ones(6),
    "norm_out_weight": np.ones(3),
    "norm_out_bias": np.ones(3),
    "p_out_weight": np.ones((2, 3)),
    "p_out_bias": np.ones(2),
    "g_out_weight": np.ones((2, 2)),
    "g_out_bias": np.ones(2),
}


def arguments() -> Arguments:
    return {
        fusedops.triangle_multiplicative_update: {
            "x": np.ones((1, 3, 3, 2)),
            "direction": "outgoing",
            "mask": np.ones((1, 3, 3)),
            **WEIGHTS,
            "eps": 1e-5,
            "precision": None,
            "gate": "output",
            "max_memory": 1 << 40,
            "out": np.ones((1, 3, 3, 2)),
        },
    }


def _draw(figure: Any) -> None:
    """Hidden distances of ubiquitin's Cα, filled in from distances to third residues"""
    structure = ubiquitin()
    xyz = structure.xyz[[label.split()[2] == "CA" for label in structure.labels]]
    distances = np.linalg.norm(xyz[:, None] - xyz, axis=-1)
    hidden = np.triu(np.random.default_rng(3).uniform(size=distances.shape) < 0.5, 2)
    hidden |= hidden.T
    known = ~hidden & ~np.eye(len(xyz), dtype=bool)

    def gaussians(values: np.ndarray, centres: np.ndarray) -> np.ndarray:
        return np.exp(-0.5 * ((values[..., None] - centres) / centres[1]) ** 2)

    centres, few = np.linspace(0, 40, 20), np.linspace(0, 40, 4)
    # A hidden channel counts the third residues that are in one range from i and another from j.
    ranges = gaussians(centres, few).T
    both = np.concatenate([np.repeat(ranges, 4, axis=0), np.tile(ranges, (4, 1))])
    given: dict[str, Any] = {"p_in_weight": both, "g_in_weight": both.copy()}
    given |= {"p_out_weight": np.eye(16), "g_out_weight": np.zeros((16, 20))}
    x = gaussians(np.where(hidden, 99.0, distances), centres)
    given |= {"x": x[None], "mask": known.astype(float)[None]}
    counts = fusedops.triangle_multiplicative_update(**given)[0]
    full = gaussians(distances, centres)
    filled = np.maximum(counts @ np.linalg.lstsq(counts[known], full[known], rcond=None)[0], 0)
    filled = filled @ centres / filled.sum(-1)
    shown = (np.where(hidden, np.nan, distances), "given"), (filled, "from third residues")
    *panels, parity = figure.subplots(1, 3)
    for panel, (values, title) in zip(panels, shown, strict=True):
        image = panel.imshow(values, vmin=0, vmax=distances.max(), cmap="viridis_r")
        panel.set(title=title, xlabel="residue j", ylabel="residue i")
    figure.colorbar(image, ax=panels, location="bottom", shrink=0.5, label="distance, Å")
    off = np.sqrt(np.mean((filled - distances)[hidden] ** 2))
    parity.plot(distances[hidden], filled[hidden], ".", markersize=2)
    parity.axline((0, 0), slope=1, color="0.8", linewidth=1)
    parity.set(xlabel="hidden distance, Å", ylabel="filled in, Å", aspect="equal")
    parity.set_title(f"off by {off:.1f} Å rms; the mean, {distances[hidden].std():.1f} Å")


pictures = {"triangle_multiplicative_update": _draw}
