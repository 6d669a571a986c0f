"""``fusedops demo``: every op on an example, on every backend that works here, checked.

To add an op, write a function that yields its `Row` objects and draws into a subfigure, and name it
in `DEMOS`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import fusedops
from fusedops import crystal, maps
from fusedops._frame import registry
from fusedops._frame.arrays import namespace
from fusedops._frame.check import is_tensor
from fusedops.cli import tables
from fusedops.cli.common import needs
from fusedops.cli.pictures import check_picture_name, save_picture
from fusedops.density import Lattice
from fusedops.samples import convolved, ubiquitin
from fusedops.structure import planar_groups
from fusedops.testing import TOLERANCE, error
from fusedops.wigner import m_major_order, wigner_d
from fusedops.wigner.plan import ends_of


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="run every op on an example, on every backend that works here",
        description="Score ubiquitin's planes, convolve packed tokens, learn kernels, pass "
        "messages along edges, rotate and convolve some, refine a model and fill in distances, all "
        "with gradients, on every backend that works here; check each against the reference, and "
        "draw a picture. Exit code 1 if a check fails.",
    )
    parser.set_defaults(run=_command)
    parser.add_argument(
        "--picture",
        default="fusedops-demo.png",
        metavar="PNG",
        help="where to draw; pictures of single ops get names such as picture-planarity.png "
        "(default: %(default)s)",
    )


def _command(args: argparse.Namespace) -> int:
    needs("gemmi", "matplotlib", "scipy")
    check_picture_name(args.picture)
    passed = run(Path(args.picture))
    print(f"Picture: {args.picture}, and one of each op beside it")
    print("Every result agrees with the reference." if passed else "A CHECK FAILED.")
    return 0 if passed else 1


@dataclass(frozen=True)
class Row:
    """A backend's row in the demo's table; `errors` are relative to the reference."""

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
    """Score the planes of ubiquitin, with the gradient, and draw them coloured by Z."""
    structure = ubiquitin()
    found = planar_groups(structure)
    arrays, packed = {"xyz": structure.xyz}, {"plane_groups": fusedops.Planes(found.groups)}
    yield from _rows(fusedops.planarity_nll, arrays, packed, 1.0)
    _draw_planes(figure, structure.xyz, found)


def dynamic_conv(figure: Any) -> Iterator[Row]:
    """Smooth two packed noisy signals with kernels computed from their tokens, and draw them.

    The loss is half the squared distance to the signals without noise. Decoding, token by token,
    must return the same values.
    """
    starts = [0, 40, 64]
    clean, x, kernels = _noisy_steps()
    arrays: dict[str, Any] = {"x": x, "kernels": kernels}
    packed: dict[str, Any] = {"cu_seqlens": fusedops.Sequences(starts)}
    out = fusedops.dynamic_conv(**arrays, **packed, backend="numpy")

    def decode(x: Any, kernels: Any, cu_seqlens: Any, backend: Any) -> list[list[Any]]:
        tokens = []
        for start, end in pairwise(starts):
            state = 0 * kernels[:, 0]
            for t in range(start, end):
                token = fusedops.dynamic_conv_step(x[:, t], state, kernels[:, t], backend=backend)
                tokens += token.tolist()
        return [tokens]

    yield from _rows(fusedops.dynamic_conv, arrays, packed, out - clean, step=decode)
    _draw_tokens(figure, starts, x, kernels, out)


def dynamic_conv_generated(figure: Any) -> Iterator[Row]:
    """Learn the layer that makes kernels which delay a signal as its hidden units say, and draw it.

    The loss is half the squared distance to the delayed signal.
    """
    rng, T, W = np.random.default_rng(2), 64, 4
    x = rng.normal(size=(1, T, 1))
    delays = np.repeat([0, 3, 1, 2], T // W)
    hidden, weight = np.eye(W)[None, delays], np.full((W, W), 1 / W)
    target = x[:, np.maximum(np.arange(T) - delays, 0)] * (np.arange(T) >= delays)[:, None]
    op: Any = fusedops.dynamic_conv_generated
    arrays = {"x": x, "hidden": hidden, "weight": weight}
    out = op(**arrays)
    yield from _rows(op, arrays, {}, out - target)
    start, steps = time.perf_counter(), 200
    for _ in range(steps):
        found, pullback = op.vjp(x, hidden, weight)
        weight = weight - 0.03 * pullback(found - target)[2]
    ms = 1e3 * (time.perf_counter() - start) / steps
    learnt = {"taps": error(weight, np.eye(W)[::-1])}
    backend = op.explain(**arrays).backend
    yield Row(op.__name__, backend, "gradient descent", False, ms, learnt, 0.05)
    _draw_delays(figure, x, target, out, found, weight)


def edge_wigner(figure: Any) -> Iterator[Row]:
    """Compute an energy of a piece of ubiquitin from messages along edges, and draw its forces.

    Rotated atoms must have the same energy, and the forces must equal its central differences. If
    torch is installed, other weights are trained on these forces, which needs second derivatives.
    """
    from scipy.spatial.transform import Rotation

    structure, cutoff, step = ubiquitin(), 3.0, 1e-5
    names = [label.split() for label in structure.labels]
    piece = [i for i, name in enumerate(names) if name[1] in ("44", "45", "46", "47")]
    xyz, elements = structure.xyz[piece], np.array([names[i][2][0] for i in piece])
    lengths = np.linalg.norm(xyz[:, None] - xyz, axis=-1)
    graph = fusedops.Edges(np.nonzero((lengths > 0) & (lengths < cutoff)), len(xyz))
    op, weights = _edge_energy(elements, cutoff)
    arrays, packed = {"xyz": xyz, "weights": weights}, {"graph": graph}
    turn = Rotation.from_rotvec([1, 2, 3]).as_matrix()

    def turned(xyz: Any, weights: Any, graph: Any, backend: str) -> float:
        return op(xyz @ _like(xyz, turn), weights, graph, backend).item()

    yield from _rows(op, arrays, packed, 1.0, turned=turned)
    start = time.perf_counter()
    moves = step * np.eye(xyz.size).reshape(-1, *xyz.shape)
    ends = [[op(end, weights, graph, "numpy") for end in (xyz + d, xyz - d)] for d in moves]
    expected = np.diff(ends).reshape(xyz.shape) / (2 * step)
    ms = 1e3 * (time.perf_counter() - start)
    models = {"the same energy": -op.vjp(xyz, weights, graph, "numpy")[1](1.0)[0]}
    errors = {"forces": error(models["the same energy"], expected)}
    # Differences divide the energy's rounding error by the step; ten digits of a force remain.
    yield Row(op.__name__, "numpy", "central differences", False, ms, errors, 1e-8)
    for backend, _, _, there in _arguments_on(op, arrays, packed):
        if there and is_tensor(there[0]["xyz"]):
            row, trained = _train(op, *there, expected, backend)
            yield row
            models |= trained
    _draw_forces(figure, xyz, elements, graph, expected, models)


def gaussian_density(figure: Any) -> Iterator[Row]:
    """Refine a shaken model of ubiquitin against noisy amplitudes to 2 Å, and draw its way back.

    Every backend's map of the shaken model is checked, and the gradient of half its squared
    difference to the true map.
    """
    structure, spacing = ubiquitin(), 2 / 3
    atoms = maps.scattering_atoms(structure)
    blur = atoms.needed_blur(spacing)
    atoms = atoms.blurred(blur)
    grid = maps.crystal_grid(structure, spacing)
    lattice = Lattice(grid.matrix, grid.shape)
    op = _density_of(atoms.amplitudes, atoms.widths)
    small = _density_of(atoms.amplitudes, atoms.widths, radius=2.5)  # which takes plain torch 1 s
    rng = np.random.default_rng(5)
    shaken = atoms.xyz + rng.normal(scale=0.2, size=atoms.xyz.shape)
    arrays = {"xyz": shaken, "b": atoms.b, "occupancy": atoms.occupancy}
    target, rho = (op(**(arrays | {"xyz": xyz}), cell=lattice) for xyz in (atoms.xyz, shaken))
    yield from _rows(small, arrays, {"cell": lattice}, rho - target)
    start = time.perf_counter()
    planes = fusedops.Planes(planar_groups(structure).groups)
    calculated = _structure_factors_of(op, atoms, lattice, grid, blur)
    observed = abs(calculated(atoms.xyz)[0])
    observed *= rng.normal(1, 0.03, observed.shape)
    xyz, R = _refined(calculated, observed, planes, shaken)
    ms = 1e3 * (time.perf_counter() - start) / len(R)
    why = f"R {R[0]:.1%} to {R[-1]:.1%} in {len(R) - 1} steps"
    backend = op.explain(**arrays, cell=lattice).backend
    # The noise leaves 2.4 %.
    yield Row("refinement", backend, why, False, ms, {"R": R[-1]}, 0.05)
    refined = op(**(arrays | {"xyz": xyz}), cell=lattice)
    differences = rho - target, refined - target
    _draw_refinement(figure, grid, atoms.xyz, (shaken, xyz), target, differences, R)


def triangle_multiplicative_update(figure: Any) -> Iterator[Row]:
    """Hide half of the distances between ubiquitin's residues, and let a block fill them in.

    The block counts third residues by their distances to both ends of a pair. The map from counts
    to a distance is learnt from pairs with a known distance. The loss is half the squared
    difference from the representation of all distances.
    """
    structure = ubiquitin()
    xyz = structure.xyz[[label.split()[2] == "CA" for label in structure.labels]]
    distances = np.linalg.norm(xyz[:, None] - xyz, axis=-1)
    hidden = np.triu(np.random.default_rng(3).uniform(size=distances.shape) < 0.5, 2)
    hidden |= hidden.T
    # Å. The first channel marks hidden pairs; the others are Gaussians around these centres.
    centres, few = np.linspace(0, 40, 20), np.linspace(0, 40, 4)
    full = np.insert(_gaussians(distances, centres), 0, 0.0, axis=-1)
    x = np.where(hidden[..., None], np.eye(len(centres) + 1)[0], full)
    arrays = {"x": x[None], "mask": 1.0 - (hidden | np.eye(len(xyz), dtype=bool))}
    weights = _counting_weights(_gaussians(centres, few).T)
    features = 2 * fusedops.triangle_multiplicative_update(**arrays, **weights)[0]
    known = arrays["mask"] == 1
    H = weights["p_out_weight"].shape[1]
    learnt = np.linalg.lstsq(features[known][:, :H], full[known], rcond=None)[0]
    weights["p_out_weight"] = np.ascontiguousarray(learnt.T)
    # The gate opens for hidden pairs.
    weights["g_out_weight"][:, 0] = 10.0
    op = _block_of(fusedops.triangle_multiplicative_update)
    out = op(**arrays, **weights)
    yield from _rows(op, arrays | weights, {}, out - full)
    filled = np.maximum(out[0, ..., 1:], 0)
    _draw_distances(figure, distances, hidden, filled @ centres / filled.sum(-1))


def so2_convolution(figure: Any) -> Iterator[Row]:
    """Convolve and gate messages rotated about their edges, and draw both."""
    rng, lmax, turns = np.random.default_rng(0), 2, 25
    weights = convolved(rng, turns, lmax, lmax, 3, 4, lmax * 4)
    message, radial = weights.pop("message"), weights.pop("radial")
    angles = np.linspace(0, 2 * np.pi, turns)
    # A message in every frame, rotated about the edge by the angle; their edges are alike.
    message, radial = _turned(message[:1], angles, lmax), np.repeat(radial[:1], turns, 0)
    arrays = {"message": message, **weights, "radial": radial}
    op: Any = fusedops.so2_convolution
    mixed, gates = op(**arrays, gate_channels=lmax * 4)
    bare = {name: array for name, array in arrays.items() if name != "bias"}
    bare["weight_m0"] = bare["weight_m0"][lmax * 4 :]
    yield from _rows(op, bare, {}, np.cos(op(**bare)))
    given = {"gates": gates, "x": mixed}
    out = fusedops.gate_activation(**given)
    yield from _rows(fusedops.gate_activation, given, {}, np.cos(out))
    panels = figure.subplots(1, 2, sharex=True)
    for row, m in ((1, 0), (3, 1), (7, 2)):
        for panel, rows in zip(panels, (message, out), strict=True):
            panel.plot(angles, _turned(rows[:1], angles, lmax)[:, row, 0], color=f"C{m}")
            label = f"order {m}"
            panel.plot(angles, rows[:, row, 0], "o", color=f"C{m}", label=label, markersize=4)
    for panel, title in zip(panels, ("A message", "The convolution's result, gated"), strict=True):
        panel.set_title(title)
        panel.set_xlabel("rotation about the edge, radians")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].margins(y=0.15)
    panels[0].legend(loc="upper center", ncols=3, frameon=False)
    figure.suptitle("Messages rotated about the edge (points) give results rotated alike (lines)")


def _turned(message: np.ndarray, angles: np.ndarray, lmax: int) -> np.ndarray:
    """Return one m-major message (1, M, C) rotated about its edge by angles, (angles, M, C)."""
    out, row = np.repeat(message, len(angles), 0), lmax + 1
    for m in range(1, lmax + 1):
        n = lmax + 1 - m
        plus, minus = out[:, row : row + n], out[:, row + n : row + 2 * n]
        phased = (plus + 1j * minus) * np.exp(1j * m * angles)[:, None, None]
        plus[...], minus[...] = phased.real, phased.imag
        row += 2 * n
    return out


DEMOS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "planarity": planarity,
    "dynamic_conv": dynamic_conv,
    "dynamic_conv_generated": dynamic_conv_generated,
    "edge_wigner": edge_wigner,
    "so2_convolution": so2_convolution,
    "gaussian_density": gaussian_density,
    "triangle_multiplicative_update": triangle_multiplicative_update,
}


def _rows(
    op: Any,
    arrays: dict[str, Any],
    packed: dict[str, Any],
    cotangent: Any,
    **again: Callable[..., Any],
) -> Iterator[Row]:
    """Yield every backend's row for an op's value and gradients, and the results of `again`."""
    names = ["value", *(f"d{name}" for name in arrays)]
    reference = _value_and_gradients(op, arrays, packed, cotangent, "numpy")()
    for backend, why, chosen, there in _arguments_on(op, arrays, packed):
        if there is None:
            yield Row(op.__name__, backend, why)
            continue
        step = _value_and_gradients(op, *there, cotangent, backend)
        errors = dict(zip(names, map(error, step(), reference), strict=True))
        for name, way in again.items():
            errors[name] = error(way(**there[0], **there[1], backend=backend), reference[0])
        yield Row(op.__name__, backend, why, chosen, _median_ms(step), errors)


def _arguments_on(
    op: Any, arrays: dict[str, Any], packed: dict[str, Any]
) -> Iterator[tuple[str, str, bool, tuple[dict[str, Any], dict[str, Any]] | None]]:
    """Yield every backend, the reason why it is used or not, and the arguments on its device."""
    info = fusedops.info()
    gpu = "cuda" if info.gpus and not info.backends["triton"].why_not else None

    def tensors(device: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
        import torch

        return (
            {name: torch.tensor(array, device=device) for name, array in arrays.items()},
            {name: argument.to(device) for name, argument in packed.items()},
        )

    fastest_on = tensors(gpu) if gpu else (arrays, packed)
    fastest = op.explain(**fastest_on[0], **fastest_on[1]).backend
    for backend in registry.BACKENDS:
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


def _like(array: Any, constant: Any) -> Any:
    return array.new_tensor(constant) if is_tensor(array) else constant


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
        Poly3DCollection(
            corners, facecolors=colours.to_rgba(np.array(z)), edgecolors="0.3", linewidths=0.4
        ),
        autolim=False,  # autolim would read Matplotlib's uninitialised padding of short polygons
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
    bars.barh([labels[i] for i in worst], values, color=colours.to_rgba(np.array(values)))
    bars.set_xlabel("Z = largest distance from the plane / 0.02 Å")
    bars.set_title("The twelve least flat groups")
    bars.spines[["top", "right"]].set_visible(False)


def _outline(points: np.ndarray) -> np.ndarray:
    """Return the atoms on a plane's convex hull, in order around it."""
    from scipy.spatial import ConvexHull

    r = points - points.mean(0)
    return points[ConvexHull(r @ np.linalg.svd(r)[2][:2].T).vertices]


def _noisy_steps(width: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two channels (1, T, 2), clean and noisy, and kernels computed from the noisy ones.

    The taps favour inputs that are similar to the token itself: a causal bilateral filter.
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
    # A NaN breaks the line.
    t, mean, out = (
        np.insert(line, starts[1:-1], np.nan, axis=0)
        for line in (np.arange(0.0, T), mean[0], out[0])
    )
    figure.suptitle(
        "Two channels of noisy tokens: each kernel averages the last four inputs that are similar "
        "to its token"
    )
    panels = figure.subplots(2, D, sharex=True, sharey="row", height_ratios=(3, 1))
    for d, (stream, taps) in enumerate(panels.T):
        stream.plot(x[0, :, d], ".", color="0.6", label="tokens")
        stream.plot(t, mean[:, d], color="C1", linewidth=1, label="one kernel for all: the mean")
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
    left.set_ylabel("x and results")
    left.set_ylim(0, 6.5)
    left.legend(loc="upper left", frameon=False)
    taps.set_ylabel("input")
    taps.set_yticks(range(W), [*(f"t − {back}" for back in range(W - 1, 0, -1)), "t"])
    figure.colorbar(image, ax=panels[1], label="tap")


def _draw_delays(
    figure: Any, x: np.ndarray, target: np.ndarray, out: np.ndarray, found: np.ndarray, weight: Any
) -> None:
    W = len(weight)
    lines, taps = figure.subplots(1, 2, width_ratios=(3, 1))
    lines.plot(x.ravel(), color="0.6", label="tokens")
    lines.plot(target.ravel(), ".", color="C0", label="delayed by 0, 3, 1 and 2 tokens")
    lines.plot(out.ravel(), ":", color="C1", label="before learning: the mean")
    lines.plot(found.ravel(), color="C0", linewidth=1, label="after learning")
    lines.set_xlabel("token t")
    lines.set_ylabel("x and results")
    lines.margins(y=0.2)
    lines.legend(loc="upper center", ncols=2, frameon=False)
    lines.spines[["top", "right"]].set_visible(False)
    figure.colorbar(taps.imshow(weight, vmin=0, vmax=1), ax=taps)
    taps.set_title("The layer's weight")
    taps.set_xlabel("hidden unit: the delay")
    taps.set_ylabel("tap")
    taps.set_xticks(range(W))
    taps.set_yticks(range(W), [*(f"t − {back}" for back in range(W - 1, 0, -1)), "t"])
    figure.suptitle("A layer learns kernels that delay the tokens as its hidden units say")


def _edge_energy(elements: np.ndarray, cutoff: float) -> tuple[Any, np.ndarray]:
    """Return an op-like energy of coordinates, and weights, in which the energy is linear.

    Each edge tells its target the source's element, by direction and length. Then the features of
    both ends are rotated into the edge's frame, multiplied by functions of its length, and rotated
    back. The energy weights the squares of the sums by degree and channel.
    """
    rng, lmax, channels, gaussians = np.random.default_rng(19), 2, 2, 4
    kinds = rng.normal(size=(3, 1, channels))
    atoms = kinds[["CNO".index(element) for element in elements]]
    base = np.pad(atoms, ((0, 0), (0, lmax * (lmax + 2)), (0, 0)))
    centres, width = np.linspace(1, cutoff, gaussians), cutoff / gaussians
    first = rng.normal(size=(gaussians, (lmax + 1) * channels))
    # The same for m and -m, since a frame's angle about its edge is arbitrary and mixes the two.
    second = rng.normal(size=(gaussians, lmax + 1, lmax + 1, 2 * channels))
    order, degree = m_major_order(lmax), np.repeat(np.arange(lmax + 1), [1, 3, 5])
    l = degree[order]
    second = second[:, l, abs(order - l * (l + 1))].reshape(gaussians, -1)

    def evaluate(xyz: Any, weights: Any, graph: Any, backend: str | None, vjp: bool = True) -> Any:
        def call(op: Any, *args: Any, backend: str | None = backend, **kwargs: Any) -> Any:
            if vjp:
                return op.vjp(*args, backend=backend, **kwargs)
            return op(*args, backend=backend, **kwargs), None

        xp = namespace(xyz)
        source, target = ends_of(graph, "forth", xyz)
        vectors = xyz[source] - xyz[target]
        r = xp.sqrt((vectors * vectors).sum(-1))[:, None]
        near, off = 1 - (r / cutoff) ** 2, (r - _like(xyz, centres)) / width
        radial = near**3 * xp.exp(-off * off / 2)
        wigner, pull_wigner = call(wigner_d, vectors, lmax, packed=True)
        told = _like(xyz, atoms)[source]
        scattered = told * (radial @ _like(xyz, first)).reshape(-1, lmax + 1, channels)
        transposed = partial(call, transpose=True)
        embed, back = fusedops.edge_degree_scatter, fusedops.permute_wigner_inv_edge_to_node
        x, pull_x = transposed(embed, _like(xyz, base), scattered, graph, wigner)
        message, pull_message = call(fusedops.node_to_edge_wigner_permute, x, graph, wigner)
        factors = (radial @ _like(xyz, second)).reshape(message.shape)
        out, pull_out = transposed(back, message * factors, graph, wigner)
        squares = (out * out).sum(0)

        def pullback(cotangent: float) -> tuple[np.ndarray, np.ndarray]:
            dproduct, dwigner = pull_out(2 * cotangent * weights[degree] * out)
            dx, more = pull_message(dproduct * factors)
            _, dscattered, first_of_all = pull_x(dx)
            dwigner = dwigner + more + first_of_all
            dradial = (told * dscattered).reshape(len(r), -1) @ first.T
            dradial += (message * dproduct).reshape(len(r), -1) @ second.T
            slopes = -radial * (6 * r / (cutoff**2 * near) + off / width)
            dr = (dradial * slopes).sum(1, keepdims=True)
            dvectors = pull_wigner(dwigner)[0] + dr * vectors / r
            dxyz, dweights = np.zeros_like(xyz), np.zeros_like(weights)
            np.add.at(dxyz, source, dvectors)
            np.subtract.at(dxyz, target, dvectors)
            np.add.at(dweights, degree, cotangent * squares)
            return dxyz, dweights

        return (weights[degree] * squares).sum(), pullback

    def edge_energy(xyz: Any, weights: Any, graph: Any, backend: str | None = None) -> Any:
        return evaluate(xyz, weights, graph, backend, vjp=False)[0]

    def explain(xyz: Any, weights: Any, graph: Any) -> Any:
        # One primitive is behind all three rotations.
        return fusedops.permute_wigner_inv.explain(xyz[:, :1, None], xyz[:, :1])

    op: Any = edge_energy
    op.vjp, op.explain = evaluate, explain
    return op, rng.uniform(0.2, 1, (lmax + 1, 2 * channels))


def _train(
    op: Any, arrays: dict[str, Any], packed: dict[str, Any], target: np.ndarray, backend: str
) -> tuple[Row, dict[str, np.ndarray]]:
    """Return a row for training on forces, and the forces before and after training."""
    import torch

    xyz, goal = arrays["xyz"].requires_grad_(), _like(arrays["xyz"], target)
    weights, steps = torch.full_like(arrays["weights"], 0.6), 3

    def forces(weights: Any, **options: Any) -> Any:
        energy = op(xyz, weights, **packed, backend=backend)
        return -torch.autograd.grad(energy, xyz, **options)[0]

    before, start = forces(weights), time.perf_counter()
    for _ in range(steps):
        off = forces(weights.requires_grad_(), create_graph=True) - goal
        (slope,) = torch.autograd.grad(off.square().sum(), weights)
        # Forces are linear in the weights, so the best step down the slope is known.
        change = forces(slope)
        weights = (weights - (off * change).sum() / change.square().sum() * slope).detach()
    ms = 1e3 * (time.perf_counter() - start) / steps
    after = forces(weights)
    left = (after - goal).square().sum() / (before - goal).square().sum()
    # A wrong slope would leave most of the loss.
    row = Row(op.__name__, backend, "a training step", False, ms, {"loss": left.item()}, 0.1)
    models = {"other weights": before, f"after {steps} training steps": after}
    return row, {name: values.cpu().numpy() for name, values in models.items()}


def _draw_forces(
    figure: Any,
    xyz: np.ndarray,
    elements: np.ndarray,
    graph: Any,
    expected: np.ndarray,
    models: dict[str, np.ndarray],
) -> None:
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    space = figure.add_subplot(1, 2, 1, projection="3d")
    edges = xyz[np.stack([graph.source, graph.target], 1)]
    lengths = np.linalg.norm(edges[:, 1] - edges[:, 0], axis=1)
    for chosen, colour, width in ((lengths >= 1.9, "0.8", 0.6), (lengths < 1.9, "0.4", 2)):
        space.add_collection3d(Line3DCollection(edges[chosen], colors=colour, linewidths=width))
    for element, colour in {"C": "0.4", "N": "C0", "O": "C3"}.items():
        atoms = xyz[elements == element]
        space.scatter(*atoms.T, s=40, color=colour, depthshade=False, label=element)
    scale = np.linalg.norm(expected, axis=1).max() / 2.5
    tips = xyz + expected / scale
    label = f"force; 1 Å of arrow is {scale:.1f} energy units / Å"
    space.quiver(*xyz.T, *(tips - xyz).T, color="C1", arrow_length_ratio=0.2, label=label)
    drawn = np.concatenate([xyz, tips])
    space.auto_scale_xyz(*drawn.T)
    space.set_box_aspect(np.ptp(drawn, axis=0), zoom=1.5)
    space.set_axis_off()
    space.legend(loc="lower left", frameon=False)
    space.set_title(
        f"{len(xyz)} atoms of ubiquitin, {len(edges)} edges up to {lengths.max():.1f} Å"
    )

    parity = figure.add_subplot(1, 2, 2)
    parity.axline((0, 0), slope=1, color="0.8", linewidth=1)
    for (name, forces), style in zip(models.items(), ("k.", "C7x", "C0+"), strict=False):
        label = f"{name}: off by {np.sqrt(np.mean((forces - expected) ** 2)):.1g} rms"
        parity.plot(expected.ravel(), forces.ravel(), style, label=label)
    parity.set_xlabel("−ΔE / Δx by central differences (arbitrary energy units / Å)")
    parity.set_ylabel("−∂E / ∂x (arbitrary energy units / Å)")
    parity.set_title("Components of the forces, by gradients and by differences")
    parity.legend(loc="upper left", frameon=False)
    parity.spines[["top", "right"]].set_visible(False)


def _density_of(amplitudes: np.ndarray, widths: np.ndarray, radius: float | None = None) -> Any:
    """Return the op with its constant arguments bound."""

    def bound(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(xyz: Any, b: Any, occupancy: Any, cell: Any, **options: Any) -> Any:
            factors = _like(xyz, amplitudes), _like(xyz, widths)
            return call(xyz, b, occupancy, *factors, cell, radius=radius, **options)

        return run

    op: Any = bound(fusedops.gaussian_density)
    op.__name__ = "gaussian_density"
    op.vjp = bound(fusedops.gaussian_density.vjp)
    op.explain = bound(fusedops.gaussian_density.explain)
    return op


def _structure_factors_of(
    op: Any, atoms: maps.ScatteringAtoms, lattice: Lattice, grid: maps.MapGrid, blur: float
) -> Callable[[np.ndarray], tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]]:
    """Return a function from coordinates to structure factors to 2 Å, and their pullback."""
    import gemmi

    hkl = gemmi.make_miller_array(grid.cell, grid.spacegroup, 2.0)
    options = {"blur": blur, "operations": grid.spacegroup.operations()}
    reflections = crystal.Reflections(hkl, grid.matrix, grid.shape, **options)

    def calculated(xyz: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        rho, to_atoms = op.vjp(xyz, atoms.b, atoms.occupancy, lattice)
        F, to_map = crystal.structure_factors.vjp(rho, reflections)
        return F, lambda dF: to_atoms(*to_map(dF))[0]

    return calculated


def _refined(
    calculated: Any, observed: np.ndarray, planes: fusedops.Planes, xyz: np.ndarray
) -> tuple[np.ndarray, list[float]]:
    """Return coordinates refined by L-BFGS, and the R factors before every step and at the end."""
    from scipy.optimize import minimize

    weight, latest = 1 / np.square(0.03 * observed).mean(), 0.0

    def target(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal latest
        F, to_xyz = calculated(x.reshape(xyz.shape))
        off = abs(F) - observed
        nll, to_planes = fusedops.planarity_nll.vjp(x.reshape(xyz.shape), planes)
        dxyz = to_xyz(weight * off * F / abs(F)) + to_planes(1.0)[0]
        latest = abs(off).sum() / observed.sum()
        return weight * off @ off / 2 + nll, dxyz.ravel()

    target(xyz.ravel())
    R, options = [latest], {"maxiter": 30}
    # A step ends where the target was evaluated last.
    end = minimize(
        target,
        xyz.ravel(),
        jac=True,
        method="L-BFGS-B",
        options=options,
        callback=lambda _: R.append(latest),
    )
    return end.x.reshape(xyz.shape), R


def _draw_refinement(
    figure: Any,
    grid: maps.MapGrid,
    home: np.ndarray,
    models: tuple[np.ndarray, np.ndarray],
    true: np.ndarray,
    differences: tuple[np.ndarray, np.ndarray],
    R: list[float],
) -> None:
    """Draw contours of the plane of voxels with the most atoms, before and after, and R."""
    edges, shape = np.diag(grid.matrix), np.array(grid.shape)
    inside = home % edges
    planes = np.rint(inside[:, 2] / edges[2] * shape[2]).astype(int) % shape[2]
    plane = int(np.bincount(planes).argmax())
    z = plane * edges[2] / shape[2]
    near = np.flatnonzero(abs(inside[:, 2] - z) < 1.2)
    lengths = np.linalg.norm(inside[near, None] - inside[near], axis=-1)
    bonds = near[np.argwhere(np.triu(lengths < 1.95, 1))]
    middle = np.median(inside[near], axis=0)
    x, y = (np.arange(n) * edge / n for n, edge in zip(shape[:2], edges[:2], strict=True))
    levels, three_sigma = true.std() * np.arange(2, 8, 2), 3 * differences[0].std()
    *panels, curve = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    for panel, xyz, rho, when, factor in zip(
        panels, models, differences, ("Before", "After"), (R[0], R[-1]), strict=True
    ):
        panel.contour(x, y, true[:, :, plane].T, levels, colors="#5b8fc9", linewidths=0.6)
        for level, colour in ((-three_sigma, "#2e9e5b"), (three_sigma, "#d0463b")):
            difference = rho[:, :, plane].T
            panel.contour(x, y, difference, [level], colors=colour, linestyles="solid")
        moved = inside + xyz - home
        for place, colour in ((inside, "0.7"), (moved, "black")):
            panel.plot(*place[bonds, :2].transpose(2, 1, 0), color=colour, linewidth=1.5)
        panel.set(xlim=middle[0] + [-12, 12], ylim=middle[1] + [-12, 12], aspect="equal")
        panel.set_xlabel("x (Å)")
        off = np.sqrt(((xyz - home) ** 2).sum(1).mean())
        panel.set_title(f"{when}: atoms off by {off:.2f} Å (rms), R = {factor:.1%}")
    panels[0].set_ylabel("y (Å)")
    figure.supxlabel(
        f"z = {z:.1f} Å. Blue: the true density at 2, 4 and 6 σ. Green: it is 3 σ, "
        f"{three_sigma:.2f} e/Å³, above the model's; red: below. "
        "Black: the model's bonds; grey: the true ones.",
        fontsize="small",
    )
    curve.plot(np.array(R) * 100, ".-")
    curve.set_xlabel("steps")
    curve.set_ylabel("R (%)")
    curve.set_title("Ubiquitin, amplitudes to 2 Å")
    curve.set_ylim(0)
    curve.spines[["top", "right"]].set_visible(False)


def _gaussians(values: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * ((values[..., None] - centres) / centres[1]) ** 2)


def _counting_weights(ranges: np.ndarray) -> dict[str, Any]:
    """Return weights of an update whose first H channels are counts, as normalized o / 2.

    `ranges` (A, C - 1) are ranges of distances, in the channels after the first. Each of the A²
    hidden channels counts the k with d_ik in one range and d_jk in another.
    """
    count, C = len(ranges), ranges.shape[1] + 1
    ranges = np.insert(ranges, 0, 0.0, axis=1)
    both = np.concatenate([np.repeat(ranges, count, axis=0), np.tile(ranges, (count, 1))])
    # The gate equals the projection, so distances outside of a range count little.
    weights = {"p_in_weight": both, "g_in_weight": both.copy()}
    return weights | {"p_out_weight": np.eye(C, count**2), "g_out_weight": np.zeros((C, C))}


def _block_of(update: Any) -> Any:
    """Return an op-like function that adds an update to its x."""

    def triangle_block(x: Any, **arguments: Any) -> Any:
        return x + update(x, **arguments)

    def vjp(x: np.ndarray, **arguments: Any) -> tuple[np.ndarray, Callable[..., Any]]:
        out, pullback = update.vjp(x, **arguments)

        def back(cotangent: np.ndarray) -> tuple[np.ndarray, ...]:
            dx, *others = pullback(cotangent)
            return cotangent + dx, *others

        return x + out, back

    op: Any = triangle_block
    op.vjp, op.explain = vjp, update.explain
    return op


def _draw_distances(
    figure: Any, distances: np.ndarray, hidden: np.ndarray, filled: np.ndarray
) -> None:
    figure.suptitle(
        "Distances between the Cα of ubiquitin, filled in from distances to third residues"
    )
    before, after, parity = figure.subplots(1, 3)
    for panel, values, title in (
        (before, np.where(hidden, np.nan, distances), f"x: {hidden.mean():.0%} are hidden (white)"),
        (after, filled, "x + update"),
    ):
        image = panel.imshow(values, vmin=0, vmax=distances.max(), cmap="viridis_r")
        panel.set_xlabel("residue j")
        panel.set_title(title)
    before.set_ylabel("residue i")
    bar = {"location": "bottom", "shrink": 0.5, "label": "distance (Å)"}
    figure.colorbar(image, ax=[before, after], **bar)
    of, by = distances[np.triu(hidden)], filled[np.triu(hidden)]
    off = np.sqrt(np.mean((by - of) ** 2))
    parity.axline((0, 0), slope=1, color="0.8", linewidth=1)
    parity.plot(of, by, ".", markersize=2)
    parity.set_xlim(0, of.max() + 1)
    parity.set_ylim(0, of.max() + 1)
    parity.set_xlabel("hidden distance (Å)")
    parity.set_ylabel("filled-in distance (Å)")
    parity.set_title(f"Error {off:.1f} Å rms; guessing the mean, {of.std():.1f} Å")
    parity.set_box_aspect(1)
    parity.spines[["top", "right"]].set_visible(False)


def run(picture: Path) -> bool:
    """Run every demo, print rows, draw `picture` and its parts, and return whether all passed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6 * len(DEMOS)), layout="constrained")
    panels = figure.subfigures(len(DEMOS), 1, squeeze=False)[:, 0]
    rows: list[Row] = []
    for (name, demo), panel in zip(DEMOS.items(), panels, strict=True):
        print(f"{name}: {str(demo.__doc__).splitlines()[0]}", file=sys.stderr, flush=True)
        rows += demo(panel)
    print("Drawing", file=sys.stderr, flush=True)
    _show(rows)
    save_picture(picture, figure)
    figure.set_layout_engine("none")
    for name, panel in zip(DEMOS, panels, strict=True):
        for other in panels:
            other.set_visible(other is panel)
        part = panel.bbox.transformed(figure.dpi_scale_trans.inverted())
        save_picture(picture.with_stem(f"{picture.stem}-{name}"), figure, part)
    return not any(row.failed for row in rows)


def _show(rows: list[Row]) -> None:
    lines: list[tables.Row] = []
    for row in rows:
        if row.errors is None:
            lines.append(([row.op, row.backend, row.why, "-", "-", "-"], "dim"))
            continue
        numbers = f"{row.milliseconds:.3f}", f"{max(row.errors.values()):.1e}"
        style = "red" if row.failed else "bold" if row.chosen else None
        check = "FAILED" if row.failed else "ok"
        lines.append(([row.op, row.backend, row.why, *numbers, check], style))
    headings = ("op", "backend", "why", "ms", "error", "check")
    tables.show("Value and gradient, float64", headings, lines, right=3)
