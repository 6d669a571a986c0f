"""``fusedops demo``: every op on an example, on every backend that works here, checked.

An op joins by a function that yields its `Row` objects and draws into a subfigure, and its name
in `DEMOS`.
"""

from __future__ import annotations

import importlib.resources
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import fusedops
from fusedops import _registry
from fusedops.structure import planar_groups, read_structure
from fusedops.testing import TOLERANCE, error


@dataclass(frozen=True)
class Row:
    """A backend in the demo's table; `errors` are relative, against the reference."""

    op: str
    backend: str
    why: str
    chosen: bool = False
    milliseconds: float | None = None
    errors: dict[str, float] | None = None
    tolerance: float = TOLERANCE["float64"]

    @property
    def failed(self) -> bool:
        return self.errors is not None and not max(self.errors.values()) <= self.tolerance


def planarity(figure: Any) -> Iterator[Row]:
    """Score the planes of ubiquitin, with the gradient; draw them coloured by Z."""
    with importlib.resources.as_file(
        importlib.resources.files("fusedops") / "data/1ubi.pdb"
    ) as path:
        structure = read_structure(path)
    found = planar_groups(structure)
    arrays, packed = {"xyz": structure.xyz}, {"plane_groups": fusedops.Planes(found.groups)}
    yield from _rows(fusedops.planarity_nll, arrays, packed, 1.0)
    _draw_planes(figure, structure.xyz, found)


def dynamic_conv(figure: Any) -> Iterator[Row]:
    """Smooth two packed noisy signals by kernels made of their tokens, and draw them.

    The gradient is that of half the squared distance to the signals without noise. Decoding,
    token by token, must return the same.
    """
    starts = [0, 40, 64]
    clean, x, kernels = _noisy_steps()
    arrays, packed = {"x": x, "kernels": kernels}, {"cu_seqlens": fusedops.Sequences(starts)}
    out = fusedops.dynamic_conv(**arrays, **packed, backend="numpy")

    def decode(x: Any, kernels: Any, backend: str) -> list[list[Any]]:
        tokens = []
        for start, end in pairwise(starts):
            state = 0 * kernels[:, 0]
            for t in range(start, end):
                token = fusedops.dynamic_conv_step(x[:, t], state, kernels[:, t], backend=backend)
                tokens += token.tolist()
        return [tokens]

    yield from _rows(fusedops.dynamic_conv, arrays, packed, out - clean, decode)
    _draw_tokens(figure, starts, x, kernels, out)


DEMOS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "planarity": planarity,
    "dynamic_conv": dynamic_conv,
}


def _rows(
    op: Any,
    arrays: dict[str, Any],
    packed: dict[str, Any],
    cotangent: Any,
    decode: Callable[..., Any] | None = None,
) -> Iterator[Row]:
    """Yield every backend's row: an op's value and gradients, and decoding if it has that."""
    names = ["value", *(f"d{name}" for name in arrays)]
    reference = _value_and_gradients(op, arrays, packed, cotangent, "numpy")()
    for backend, why, chosen, there in _places(op, arrays, packed):
        if there is None:
            yield Row(op.__name__, backend, why)
            continue
        step = _value_and_gradients(op, *there, cotangent, backend)
        errors = dict(zip(names, map(error, step(), reference), strict=True))
        if decode:
            errors["step"] = error(decode(**there[0], backend=backend), reference[0])
        yield Row(op.__name__, backend, why, chosen, _median_ms(step), errors)


def _places(
    op: Any, arrays: dict[str, Any], packed: dict[str, Any]
) -> Iterator[tuple[str, str, bool, tuple[dict[str, Any], dict[str, Any]] | None]]:
    """Yield every backend with why it is used or not, and the arguments where it lives."""
    info = fusedops.info()
    gpu = "cuda" if info.gpus and not info.backends["triton"].why_not else None

    def tensors(device: str) -> tuple[dict[str, Any], dict[str, Any]]:
        import torch

        return (
            {name: torch.tensor(array, device=device) for name, array in arrays.items()},
            {name: argument.to(device) for name, argument in packed.items()},
        )

    fastest_on = tensors(gpu) if gpu else (arrays, packed)
    fastest = op.explain(**fastest_on[0], **fastest_on[1]).backend
    for backend in _registry.BACKENDS:
        reason = info.backends[backend.name].why_not
        if reason:
            yield backend.name, reason, False, None
            continue
        chosen = backend.name == fastest
        why = f"chosen, the first that can serve on the {'GPU' if gpu else 'CPU'}"
        why = why if chosen else "works too"
        if backend.speaks == "torch":
            there = tensors(gpu if backend.name == "triton" else "cpu")
        else:
            there = arrays, packed
        yield backend.name, why, chosen, there


def _value_and_gradients(
    op: Any, arrays: dict[str, Any], packed: dict[str, Any], cotangent: Any, backend: str
) -> Callable[[], tuple[Any, ...]]:
    if isinstance(next(iter(arrays.values())), np.ndarray):

        def step() -> tuple[Any, ...]:
            value, pullback = op.vjp(**arrays, **packed, backend=backend)
            return value, *pullback(cotangent)

    else:
        import torch

        leaves = {name: array.clone().requires_grad_() for name, array in arrays.items()}
        cotangent = torch.as_tensor(cotangent).to(next(iter(leaves.values())))

        def step() -> tuple[Any, ...]:
            value = op(**leaves, **packed, backend=backend)
            gradients = torch.autograd.grad(value, list(leaves.values()), cotangent)
            return tuple(result.detach().cpu().numpy() for result in (value, *gradients))

    return step


def _median_ms(step: Callable[[], Any], seconds: float = 0.2) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _draw_planes(figure: Any, xyz: np.ndarray, found: Any) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    corners, z, labels = [], [], []
    deviations = fusedops.plane_deviations(xyz, found.groups)
    for (indices, sigmas), names, d in zip(found.groups, found.labels, deviations, strict=True):
        corners += [_outline(xyz[atoms]) for atoms in indices]
        z += (np.abs(d) / sigmas[:, None]).max(1).tolist()
        labels += names
    colours = ScalarMappable(Normalize(0, max(z)), "viridis")

    space = figure.add_subplot(1, 2, 1, projection="3d")
    space.add_collection3d(
        Poly3DCollection(corners, facecolors=colours.to_rgba(z), edgecolors="0.3", linewidths=0.4),
        autolim=False,  # it would read Matplotlib's uninitialised padding of short polygons
    )
    atoms = np.concatenate(corners)
    space.auto_scale_xyz(*atoms.T)
    space.set_box_aspect(np.ptp(atoms, axis=0), zoom=1.5)
    space.set_axis_off()
    space.set_title(f"{len(z)} planar groups of ubiquitin (1ubi)")
    figure.colorbar(colours, ax=space, shrink=0.6, label="Z of the plane's worst atom")

    bars = figure.add_subplot(1, 2, 2)
    worst = np.argsort(z)[::-1][:12][::-1]
    values = [z[i] for i in worst]
    bars.barh([labels[i] for i in worst], values, color=colours.to_rgba(values))
    bars.set_xlabel("Z = largest distance from the plane / 0.02 Å")
    bars.set_title("The dozen that are least flat")
    bars.spines[["top", "right"]].set_visible(False)


def _outline(points: np.ndarray) -> np.ndarray:
    """Return the outermost of a plane's atoms, in order around it."""
    from scipy.spatial import ConvexHull

    r = points - points.mean(0)
    return points[ConvexHull(r @ np.linalg.svd(r)[2][:2].T).vertices]


def _noisy_steps(width: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two channels (1, T, 2) without noise and with it, and kernels made of the latter.

    The taps favour inputs that are like the token itself: a bilateral filter, made causal.
    """
    steps = ([2, 4, 3, 5], [14, 12, 22, 16]), ([4, 2, 3, 1.5], [20, 12, 20, 12])
    clean = np.stack([np.repeat(levels, counts) for levels, counts in steps], -1)[None]
    x = clean + np.random.default_rng(1).normal(scale=0.2, size=clean.shape)
    before = np.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    inputs = np.stack([before[:, w : w + x.shape[1]] for w in range(width)], -1)
    kernels = np.exp(-0.5 * ((inputs - x[..., None]) / 0.4) ** 2)
    return clean, x, kernels / kernels.sum(-1, keepdims=True)


def _draw_tokens(
    figure: Any, starts: list[int], x: np.ndarray, kernels: np.ndarray, out: np.ndarray
) -> None:
    _, T, D, W = kernels.shape
    mean = fusedops.dynamic_conv(x, np.full((D, W), 1 / W), cu_seqlens=np.array(starts))
    as_one = fusedops.dynamic_conv(x, kernels)
    # A line is broken where a NaN is.
    t, mean, out = (
        np.insert(line, starts[1:-1], np.nan, axis=0)
        for line in (np.arange(0.0, T), mean[0], out[0])
    )
    figure.suptitle(
        "Two channels of noisy tokens: a kernel averages those of the last four inputs that are "
        "like its token"
    )
    panels = figure.subplots(2, D, sharex=True, sharey="row", height_ratios=(3, 1))
    for d, (stream, taps) in enumerate(panels.T):
        stream.plot(x[0, :, d], ".", color="0.6", label="tokens")
        stream.plot(t, mean[:, d], color="C1", linewidth=1, label="the same kernel for all: mean")
        stream.plot(as_one[0, :, d], ":", color="C0", linewidth=2, label="dynamic, as one sequence")
        stream.plot(t, out[:, d], color="C0", label="dynamic, as two sequences")
        stream.spines[["top", "right"]].set_visible(False)
        image = taps.imshow(kernels[0, :, d].T, aspect="auto", vmin=0, vmax=1)
        taps.set_xlabel("token t")
        for start in starts[1:-1]:
            stream.axvline(start - 0.5, color="0.3", linestyle="--", linewidth=1)
            taps.axvline(start - 0.5, color="white", linestyle="--", linewidth=1)
    (left, right), (taps, _) = panels
    left.set_title("Steps stay sharp, which one kernel for all would blur")
    right.set_title("Nothing crosses the boundary: a sequence begins after zeros")
    left.set_ylabel("x and what comes out")
    left.set_ylim(0, 6.5)
    left.legend(loc="upper left", frameon=False)
    taps.set_ylabel("input")
    taps.set_yticks(range(W), [*(f"t − {back}" for back in range(W - 1, 0, -1)), "t"])
    figure.colorbar(image, ax=panels[1], label="its tap")


def run(picture: Path, show: Callable[[list[Row]], None]) -> bool:
    """Run every demo, draw `picture`, and return whether all checks passed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6 * len(DEMOS)), layout="constrained")
    panels = figure.subfigures(len(DEMOS), 1, squeeze=False)[:, 0]
    rows = [row for demo, panel in zip(DEMOS.values(), panels, strict=True) for row in demo(panel)]
    show(rows)
    figure.savefig(picture, dpi=150)
    return not any(row.failed for row in rows)
