"""Run every op on an example, on every backend that works here.

Run every op on an example, with gradients, on every backend that works here; check each against the
reference, and draw pictures. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fusedops
from fusedops import maps, wigner
from fusedops._catalogue import TOLERANCE, Example, calls, steps_of
from fusedops._frame import registry
from fusedops._info import Info
from fusedops.cli import check, common, pictures, tables
from fusedops.samples import convolved, cubes, ubiquitin
from fusedops.so2.op import orders
from fusedops.structure import planar_groups

#: Calls of which the demo shows the median time.
ROUNDS = 20


def add(parser: argparse.ArgumentParser) -> None:
    help = "where to draw; pictures of single ops get names such as picture-planarity.png "
    help += "(default: %(default)s)"
    parser.add_argument("--picture", default="fusedops-demo.png", metavar="PNG", help=help)


def run(args: argparse.Namespace) -> int:
    common.needs("gemmi", "matplotlib", "scipy")
    pictures.check_picture_name(args.picture)
    info = fusedops.info()
    lines: list[tables.Row] = []
    with common.progress("checking", len(calls())) as advance:
        for op, (example, *_) in calls().items():
            lines += rows(example, info)
            advance(op.__name__)
    headings = ("op", "backend", "why", "ms", "error", "check")
    tables.show("Value and gradient, float64", headings, lines, right=3)
    draw(Path(args.picture))
    print(f"Picture: {args.picture}, and one of each op beside it")
    failed = tables.failures(lines)
    print("A CHECK FAILED." if failed else "Every result agrees with the reference.")
    return 1 if failed else 0


def rows(example: Example, info: Info) -> Iterator[tables.Row]:
    """Yield a table's row of every backend, with the time of values and gradients."""
    op, exact = example.op, example.problem("medium")
    gpu = info.gpus and not info.backends["triton"].why_not
    best = op.explain(**(exact.to("cuda", "float64") if gpu else exact).arguments).backend
    for backend in registry.BACKENDS:
        if reason := info.backends[backend.name].why_not:
            yield [op.__name__, backend.name, reason, "-", "-", "-"], "dim"
            continue
        given, errors = check.compared(exact, backend, backend.speaks, "float64")
        *_, last = steps_of(given, backend.name, given.cotangents).values()
        off, chosen = max(errors.values()), backend.name == best
        failed = not off <= TOLERANCE["float64"]
        first = f"chosen, the first that can serve on the {'GPU' if gpu else 'CPU'}"
        cells = [op.__name__, backend.name, first if chosen else "works too"]
        seconds = statistics.median(timeit.repeat(last, number=1, repeat=ROUNDS))
        cells += [f"{1e3 * seconds:.3f}", f"{off:.1e}", "FAILED" if failed else "ok"]
        yield cells, "red" if failed else "bold" if chosen else None


def planarity(figure: Any) -> None:
    """Planar groups of ubiquitin, coloured by the Z of the worst atom"""
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection
    from scipy.spatial import ConvexHull

    structure = ubiquitin()
    groups = planar_groups(structure).groups
    deviations = fusedops.plane_deviations(structure.xyz, groups)
    z = [abs(d).max(1) / sigma for d, (_, sigma) in zip(deviations, groups, strict=True)]
    outlines = []
    for points in (structure.xyz[plane] for indices, _ in groups for plane in indices):
        off = points - points.mean(0)
        outlines.append(points[ConvexHull(off @ np.linalg.svd(off)[2][:2].T).vertices])
    faces = Poly3DCollection(outlines, array=np.concatenate(z), clim=(0, None), ec="0.3", lw=0.4)
    panel = _space(figure, np.concatenate(outlines))
    # autolim would read Matplotlib's uninitialised padding of short polygons.
    panel.add_collection3d(faces, autolim=False)
    figure.colorbar(faces, ax=panel, shrink=0.6, label="Z")


def _space(figure: Any, points: np.ndarray) -> Any:
    """Return a panel of three dimensions that holds all points."""
    panel = figure.add_subplot(projection="3d")
    panel.auto_scale_xyz(*points.T)
    panel.set_box_aspect(np.ptp(points, axis=0), zoom=1.5)
    panel.set_axis_off()
    return panel


def dynamic_conv(figure: Any) -> None:
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
    _taps(figure, taps, kernels.T, "token t")


def _taps(figure: Any, panel: Any, taps: np.ndarray, xlabel: str) -> None:
    figure.colorbar(panel.imshow(taps, aspect="auto", vmin=0, vmax=1), ax=panel, label="tap")
    names = [*(f"t − {back}" for back in range(len(taps) - 1, 0, -1)), "t"]
    panel.set(yticks=range(len(taps)), yticklabels=names, xlabel=xlabel)


def dynamic_conv_generated(figure: Any) -> None:
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
    _taps(figure, taps, weight, "hidden unit")


def edge_wigner(figure: Any) -> None:
    """Edges rotate a pair force out of their frames; an atom of ubiquitin sums its edges'"""
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    structure = ubiquitin()
    xyz = structure.xyz[[44 <= int(label.split()[1]) < 48 for label in structure.labels]]
    lengths = np.linalg.norm(xyz[:, None] - xyz, axis=-1)
    pairs = np.argwhere((lengths > 0) & (lengths < 3))
    edges, graph = xyz[pairs], fusedops.Edges(pairs.T, len(xyz))
    vectors, r = edges[:, 0] - edges[:, 1], lengths[tuple(pairs.T)]
    # Degree 0 is the energy of an edge, and degree 1 a force along it: zero at 2.4 Å.
    radial = np.stack([(r - 2.4) ** 2, 2 * (r - 2.4)], 1)[..., None]
    nothing, D = np.zeros((len(xyz), 4, 1)), wigner.wigner_d(vectors, 1, packed=True)
    x = fusedops.edge_degree_scatter(nothing, radial, graph, wigner_inv=D, transpose=True)
    panel = _space(figure, np.concatenate([xyz, xyz + x[:, 1:, 0]]))
    for chosen, colour, width in ((r >= 1.9, "0.8", 0.6), (r < 1.9, "0.4", 2)):
        panel.add_collection3d(Line3DCollection(edges[chosen], colors=colour, linewidths=width))
    panel.quiver(*xyz.T, *x[:, 1:, 0].T, color="C1", arrow_length_ratio=0.2)


def so2_convolution(figure: Any) -> None:
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


def structured_scatter(figure: Any) -> None:
    """Cubes around points add up in a periodic map, here summed along z"""
    wa, wbwc = cubes(np.random.default_rng(3), 30, (24, 24, 24), (9, 9, 9))
    plan = fusedops.ScatterPlan(wa, wbwc, 24**3)
    bell = np.exp(-(np.linspace(-2, 2, 9) ** 2))
    cube = np.broadcast_to(bell[:, None, None] * bell[:, None] * bell, (30, 9, 9, 9)).copy()
    total = fusedops.structured_scatter_add(cube, plan)
    panel = figure.subplots()
    figure.colorbar(panel.imshow(total.reshape(24, 24, 24).sum(2).T, origin="lower"), ax=panel)
    panel.set(xlabel="x", ylabel="y")


def gaussian_density(figure: Any) -> None:
    """Ubiquitin shaken by 0.2 Å (black), and where the gradient pulls its atoms (arrows)"""
    structure = ubiquitin()
    grid, atoms = maps.crystal_grid(structure, 2 / 3), maps.scattering_atoms(structure)
    atoms = atoms.blurred(atoms.needed_blur(2 / 3))
    shape, steps = grid.shape, np.diag(grid.matrix) / grid.shape
    home = atoms.xyz % np.diag(grid.matrix)
    moved = home + np.random.default_rng(5).normal(scale=0.2, size=home.shape)
    rest = atoms.b, atoms.occupancy, atoms.amplitudes, atoms.widths, grid.matrix, shape
    true = fusedops.gaussian_density(home, *rest, radius=2.5)
    rho, pullback = fusedops.gaussian_density.vjp(moved, *rest, radius=2.5, wrt=("xyz",))
    off = true - rho
    pull = pullback(off)[0]
    # The plane of voxels with the most atoms.
    z = int(np.bincount(np.rint(home[:, 2] / steps[2]).astype(int)).argmax())
    near = np.flatnonzero(abs(home[:, 2] - z * steps[2]) < 1.2)
    lengths = np.linalg.norm(home[near, None] - home[near], axis=-1)
    bonds = near[np.argwhere(np.triu(lengths < 1.95, 1))]
    panel = figure.subplots()
    x, y = np.arange(shape[0]) * steps[0], np.arange(shape[1]) * steps[1]
    blue, red, green = "#5b8fc9", "#d0463b", "#2e9e5b"
    for values, sigmas, inks in ((true, [2, 4, 6], [blue] * 3), (off, [-3, 3], [red, green])):
        levels = values.std() * np.array(sigmas)
        panel.contour(x, y, values[:, :, z].T, levels, colors=inks, linewidths=0.8)
    for xyz, colour in ((home, "0.7"), (moved, "black")):
        panel.plot(*xyz[bonds, :2].transpose(2, 1, 0), color=colour, linewidth=1.5)
    panel.quiver(*moved[near, :2].T, *pull[near, :2].T, angles="xy", color="C1", width=0.003)
    middle = np.median(home[near], axis=0)
    panel.set(xlim=middle[0] + [-16, 16], ylim=middle[1] + [-9, 9], aspect="equal")
    panel.set(xlabel="x, Å. Blue: the true density. Green: it is 3 σ above the model's; red: below")


def triangle_multiplicative_update(figure: Any) -> None:
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


#: The pictures, by the names that their files end in.
PICTURES: tuple[Callable[[Any], None], ...] = (
    planarity,
    dynamic_conv,
    dynamic_conv_generated,
    edge_wigner,
    so2_convolution,
    structured_scatter,
    gaussian_density,
    triangle_multiplicative_update,
)


def draw(path: Path) -> None:
    """Draw all pictures into one file, and each into a file beside it."""
    from matplotlib.figure import Figure

    together = Figure(figsize=(13, 6 * len(PICTURES)), layout="constrained")
    panels = together.subfigures(len(PICTURES), 1, squeeze=False)[:, 0]
    for picture, panel in zip(PICTURES, panels, strict=True):
        print(f"{picture.__name__}: {picture.__doc__}", file=sys.stderr, flush=True)
        alone = Figure(figsize=(13, 6), layout="constrained")
        for figure in (panel, alone):
            figure.suptitle(picture.__doc__)
            picture(figure)
        pictures.save_picture(path.with_stem(f"{path.stem}-{picture.__name__}"), alone)
    print("Drawing", file=sys.stderr, flush=True)
    pictures.save_picture(path, together)
