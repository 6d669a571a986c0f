"""``fusedops demo``: every op on an example, on every backend that works here, and pictures."""

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
from fusedops import maps
from fusedops._catalogue import TOLERANCE, Example, calls, steps_of
from fusedops._frame import registry
from fusedops.cli import tables
from fusedops.cli.check import device_of, errors_on
from fusedops.cli.common import needs, progress
from fusedops.cli.pictures import check_picture_name, save_picture
from fusedops.samples import convolved, cubes, ubiquitin
from fusedops.structure import planar_groups
from fusedops.wigner import wigner_d

#: Calls of which the demo shows the median time.
ROUNDS = 20


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="run every op on an example, on every backend that works here",
        description="Run every op on an example, with gradients, on every backend that works here; "
        "check each against the reference, and draw pictures. Exit code 1 if a check fails.",
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
    lines: list[tables.Row] = []
    with progress("checking", len(calls())) as advance:
        for op, (example, *_) in calls().items():
            lines += rows(example)
            advance(op.__name__)
    headings = ("op", "backend", "why", "ms", "error", "check")
    tables.show("Value and gradient, float64", headings, lines, right=3)
    draw(Path(args.picture))
    print(f"Picture: {args.picture}, and one of each op beside it")
    failed = any(cells[-1] == "FAILED" for cells, _ in filter(None, lines))
    print("A CHECK FAILED." if failed else "Every result agrees with the reference.")
    return 1 if failed else 0


def rows(example: Example) -> Iterator[tables.Row]:
    """Yield a table's row of every backend, with the time of values and gradients."""
    info, op, exact = fusedops.info(), example.op, example.problem("medium")
    gpu = info.gpus and not info.backends["triton"].why_not
    best = op.explain(**(exact.to("cuda", "float64") if gpu else exact).arguments).backend
    for backend in registry.BACKENDS:
        if reason := info.backends[backend.name].why_not:
            yield [op.__name__, backend.name, reason, "-", "-", "-"], "dim"
            continue
        off = max(errors_on(example, backend, backend.speaks, "float64", "medium").values())
        given = exact.to(device_of(backend), "float64") if backend.speaks == "torch" else exact
        *_, last = steps_of(given, backend.name, given.cotangents).values()
        failed, chosen = not off <= TOLERANCE["float64"], backend.name == best
        first = f"chosen, the first that can serve on the {'GPU' if gpu else 'CPU'}"
        cells = [op.__name__, backend.name, first if chosen else "works too"]
        seconds = statistics.median(timeit.repeat(last, number=1, repeat=ROUNDS))
        cells += [f"{1e3 * seconds:.3f}", f"{off:.1e}", "FAILED" if failed else "ok"]
        yield cells, "red" if failed else "bold" if chosen else None


def planarity(figure: Any) -> None:
    """Planar groups of ubiquitin, coloured by the Z of the worst atom"""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection
    from scipy.spatial import ConvexHull

    structure = ubiquitin()
    xyz, groups = structure.xyz, planar_groups(structure).groups

    def outline(points: np.ndarray) -> np.ndarray:
        r = points - points.mean(0)
        return points[ConvexHull(r @ np.linalg.svd(r)[2][:2].T).vertices]

    deviations = fusedops.plane_deviations(xyz, groups)
    z = [abs(d).max(1) / sigma for d, (_, sigma) in zip(deviations, groups, strict=True)]
    colours = ScalarMappable(Normalize(0, np.concatenate(z).max()), "viridis")
    corners = [outline(xyz[plane]) for indices, _ in groups for plane in indices]
    faces = {"facecolors": colours.to_rgba(np.concatenate(z)), "edgecolors": "0.3"}
    panel = _space(figure, np.concatenate(corners))
    # autolim would read Matplotlib's uninitialised padding of short polygons.
    panel.add_collection3d(Poly3DCollection(corners, linewidths=0.4, **faces), autolim=False)
    figure.colorbar(colours, ax=panel, shrink=0.6, label="Z")


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

    def averaged(kernels: np.ndarray) -> np.ndarray:
        return fusedops.dynamic_conv(tokens, kernels, cu_seqlens=sequences)[0, :, 0]

    out, mean = averaged(kernels[None, :, None]), averaged(np.full((1, W), 1 / W))
    lines, taps = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    lines.plot(x, ".", color="0.6", label="tokens")
    for values, label in ((mean, "one kernel for all: the mean"), (out, "dynamic kernels")):
        # A NaN breaks the line between sequences.
        t, values = (np.insert(line, 40, np.nan) for line in (np.arange(64.0), values))
        lines.plot(t, values, label=label)
    lines.legend(frameon=False)
    _taps(figure, taps, kernels.T)
    taps.set_xlabel("token t")


def _taps(figure: Any, panel: Any, taps: np.ndarray) -> None:
    figure.colorbar(panel.imshow(taps, aspect="auto", vmin=0, vmax=1), ax=panel, label="tap")
    W = len(taps)
    panel.set_yticks(range(W), [*(f"t − {back}" for back in range(W - 1, 0, -1)), "t"])


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
    _taps(figure, taps, weight)
    taps.set_xlabel("hidden unit")


def edge_wigner(figure: Any) -> None:
    """Edges rotate a pair force out of their frames; an atom of ubiquitin sums its edges'"""
    from mpl_toolkits.mplot3d.art3d import Line3DCollection

    structure = ubiquitin()
    xyz = structure.xyz[[44 <= int(label.split()[1]) < 48 for label in structure.labels]]
    lengths = np.linalg.norm(xyz[:, None] - xyz, axis=-1)
    source, target = np.nonzero((lengths > 0) & (lengths < 3))
    graph = fusedops.Edges((source, target), len(xyz))
    vectors, r = xyz[source] - xyz[target], lengths[source, target]
    # Degree 0 is the energy of an edge, and degree 1 a force along it: zero at 2.4 Å.
    radial = np.stack([(r - 2.4) ** 2, 2 * (r - 2.4)], 1)[..., None]
    wigner = wigner_d(vectors, 1, packed=True)
    back: Any = {"wigner_inv": wigner, "transpose": True}
    x = fusedops.edge_degree_scatter(np.zeros((len(xyz), 4, 1)), radial, graph, **back)

    panel = _space(figure, np.concatenate([xyz, xyz + x[:, 1:, 0]]))
    edges = np.stack([xyz[source], xyz[target]], 1)
    for chosen, colour, width in ((r >= 1.9, "0.8", 0.6), (r < 1.9, "0.4", 2)):
        panel.add_collection3d(Line3DCollection(edges[chosen], colors=colour, linewidths=width))
    panel.quiver(*xyz.T, *x[:, 1:, 0].T, color="C1", arrow_length_ratio=0.2)


def so2_convolution(figure: Any) -> None:
    """Messages turned about their edges (points) give results turned alike (lines)"""
    lmax, angles = 2, np.linspace(0, 2 * np.pi, 25)
    given: dict[str, Any] = convolved(np.random.default_rng(0), 25, lmax, lmax, 3, 4, lmax * 4)

    def turned(message: np.ndarray) -> np.ndarray:
        """Return the first message, turned about its edge by all angles."""
        out, row = np.repeat(message[:1], len(angles), 0), lmax + 1
        for m in range(1, lmax + 1):
            plus, minus = np.split(out[:, row : row + 2 * (lmax + 1 - m)], 2, axis=1)
            phased = (plus + 1j * minus) * np.exp(1j * m * angles)[:, None, None]
            plus[...], minus[...] = phased.real, phased.imag
            row += 2 * (lmax + 1 - m)
        return out

    given |= {"message": turned(given["message"]), "radial": given["radial"][:1].repeat(25, 0)}
    mixed, gates = fusedops.so2_convolution(**given, gate_channels=lmax * 4)
    results = given["message"], fusedops.gate_activation(gates, mixed)
    titles = "A message", "The convolution's result, gated"
    for panel, rows, title in zip(figure.subplots(1, 2), results, titles, strict=True):
        for row, m in ((1, 0), (3, 1), (7, 2)):
            panel.plot(angles, turned(rows)[:, row, 0], color=f"C{m}", label=f"order {m}")
            panel.plot(angles, rows[:, row, 0], "o", color=f"C{m}", markersize=4)
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
    grid = maps.crystal_grid(structure, 2 / 3)
    atoms = maps.scattering_atoms(structure)
    atoms = atoms.blurred(atoms.needed_blur(2 / 3))
    lattice = fusedops.Lattice(grid.matrix, grid.shape)
    home, moves = atoms.xyz, np.random.default_rng(5).normal(scale=0.2, size=atoms.xyz.shape)
    rest = atoms.b, atoms.occupancy, atoms.amplitudes, atoms.widths, lattice
    op: Any = fusedops.gaussian_density
    true = op(home, *rest, radius=2.5)
    rho, pullback = op.vjp(home + moves, *rest, radius=2.5, wrt=("xyz",))
    pull = pullback(true - rho)[0]
    edges, shape = np.diag(grid.matrix), np.array(grid.shape)
    inside = home % edges
    # The plane of voxels with the most atoms.
    z = int(np.bincount(np.rint(inside[:, 2] / edges[2] * shape[2]).astype(int)).argmax())
    near = np.flatnonzero(abs(inside[:, 2] - z * edges[2] / shape[2]) < 1.2)
    lengths = np.linalg.norm(inside[near, None] - inside[near], axis=-1)
    bonds = near[np.argwhere(np.triu(lengths < 1.95, 1))]
    panel = figure.subplots()
    x, y = (np.arange(n) * edge / n for n, edge in zip(shape[:2], edges[:2], strict=True))
    three = 3 * (true - rho).std()
    for values, levels, colour in (
        (true, true.std() * np.arange(2, 8, 2), "#5b8fc9"),
        (true - rho, [three], "#2e9e5b"),
        (rho - true, [three], "#d0463b"),
    ):
        panel.contour(x, y, values[:, :, z].T, levels, colors=colour, linewidths=0.8)
    for place, colour in ((inside, "0.7"), (inside + moves, "black")):
        panel.plot(*place[bonds, :2].transpose(2, 1, 0), color=colour, linewidth=1.5)
    tails, arrows = (inside + moves)[near, :2].T, pull[near, :2].T
    panel.quiver(*tails, *arrows, angles="xy", color="C1", width=0.003)
    middle = np.median(inside[near], axis=0)
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
    ranges = np.ascontiguousarray(gaussians(centres, few).T)
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

    figure = Figure(figsize=(13, 6 * len(PICTURES)), layout="constrained")
    panels = figure.subfigures(len(PICTURES), 1, squeeze=False)[:, 0]
    for picture, panel in zip(PICTURES, panels, strict=True):
        print(f"{picture.__name__}: {picture.__doc__}", file=sys.stderr, flush=True)
        panel.suptitle(picture.__doc__)
        picture(panel)
    print("Drawing", file=sys.stderr, flush=True)
    save_picture(path, figure)
    figure.set_layout_engine("none")
    for picture, panel in zip(PICTURES, panels, strict=True):
        for other in panels:
            other.set_visible(other is panel)
        part = panel.bbox.transformed(figure.dpi_scale_trans.inverted())
        save_picture(path.with_stem(f"{path.stem}-{picture.__name__}"), figure, part)
