"""Pictures that commands draw; their files appear complete or not at all."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusedops.cli.common import CommandError
from fusedops.maps import MapGrid
from fusedops.structure import StructureError, check_target, replacing

#: The contours at 1, 2 and 3 σ; they differ in brightness too, for print without colours.
_INKS = ("#56b4e9", "#0072b2", "#d55e00")


def check_picture_name(path: str | os.PathLike) -> None:
    """Raise `StructureError` if the suffix of `path`, or its folder, allows no picture."""
    from matplotlib.backend_bases import FigureCanvasBase

    ending = Path(path).suffix.lower().lstrip(".")
    if ending not in FigureCanvasBase.get_supported_filetypes():
        raise StructureError(f"{path}: Matplotlib can't draw into such a file")
    check_target(path)


def slice_of_text(text: str) -> re.Match[str]:
    """Return the parts of an argument such as ``z=0.25`` or ``z=12.5Å``."""
    found = re.fullmatch(r"(?P<axis>[xyz])=(?P<at>-?\d*\.?\d+)\s*(?P<unit>[ÅA]?)", text)
    if not found or not (found["unit"] or 0 <= float(found["at"]) <= 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} should be x, y or z, an equals sign, and a fraction of 0 to 1 or a number "
            "of Å, as in z=0.25 or z=12.5A"
        )
    return found


def slices(
    asked: Sequence[re.Match[str]] | None, grid: MapGrid, shape: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the axis and the index of each slice; by default the three in the middle.

    A position that the map, of `shape` voxels, doesn't hold raises a CommandError.
    """
    if not asked:
        return [(axis, n // 2) for axis, n in enumerate(shape)]
    found = []
    for each in asked:
        axis, at = "xyz".index(each["axis"]), float(each["at"])
        n, index = shape[axis], math.floor(at * shape[axis] + 0.5)
        if each["unit"]:
            step = grid.cell.parameters[axis] / grid.shape[axis]
            first = grid.shift[axis] + grid.start[axis] * step
            index = round((at - first) / step)
            if not 0 <= index < n:
                raise CommandError(
                    f"--slice {each.string}: the map holds {each['axis']} of {first:.4g} to "
                    f"{first + (n - 1) * step:.4g} Å"
                )
        found.append((axis, min(index, n - 1)))
    return found


def draw_slices(
    path: str | os.PathLike,
    grid: MapGrid,
    rho: np.ndarray,
    cuts: Sequence[tuple[int, int]],
    unit: str,
    title: str,
) -> None:
    """Draw slices of a map in grey, with contours, as one prints them.

    The map `rho`, (nx, ny, nz), is in `unit`. `cuts` are as `slices` returns them.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.transforms import Affine2D

    lengths, angles = np.array(grid.cell.parameters[:3]), np.radians(grid.cell.parameters[3:])
    names = "abc" if grid.spacegroup else "xyz"
    steps = lengths / grid.shape
    first = np.array(grid.shift) + grid.start * steps
    mean = float(rho.mean(dtype=np.float64))
    # Plane by plane, since a copy of a large map in 64 bits may not fit into memory.
    squares = [np.square(plane - mean, dtype=np.float64).mean() for plane in rho.T]
    sigma = math.sqrt(np.mean(squares))
    levels = [mean + k * sigma for k in (1, 2, 3)]
    pieces = [np.moveaxis(rho, axis, 0)[at].T for axis, at in cuts]
    # One scale for all. A square root, since atoms are far denser than the space between them.
    low, top = min(map(np.min, pieces)), max(map(np.max, pieces))
    # Light greys, on which the contours show.
    greys = ListedColormap(colormaps["Greys"](np.linspace(0, 0.6, 256)))
    shades = {"norm": PowerNorm(0.5, low, top if top > low else low + 1), "cmap": greys}

    figure = Figure(layout="constrained")
    panels = figure.subplots(1, len(cuts), squeeze=False)[0]
    spans = []
    for panel, piece, (axis, at) in zip(panels, pieces, cuts, strict=True):
        u, v = (edge for edge in range(3) if edge != axis)
        turn = np.array([np.cos(angles[axis]), np.sin(angles[axis])])
        origin = first[v] * turn + [first[u], 0]
        oblique = Affine2D.from_values(steps[u], 0, *(steps[v] * turn), *origin)
        place = {"transform": oblique + panel.transData}
        image = panel.imshow(piece, origin="lower", **place, **shades)
        if sigma > 0 and min(piece.shape) > 1:
            panel.contour(piece, levels, colors=_INKS, linewidths=0.7, **place)
        # A voxel's value is the density at its middle.
        up, right = np.array(piece.shape) - 0.5
        corners = oblique.transform([(-0.5, -0.5), (right, -0.5), (right, up), (-0.5, up)])
        panel.fill(*corners.T, fill=False, edgecolor="0.5", linewidth=0.5)
        right_angle = abs(np.cos(angles[axis])) < 1e-6
        panel.set(
            xlim=(corners[:, 0].min(), corners[:, 0].max()),
            ylim=(corners[:, 1].min(), corners[:, 1].max()),
            aspect="equal",
            anchor="S",
            xlabel=f"{names[u]}, Å",
            ylabel=f"{names[v]}, Å" if right_angle else f"perpendicular to {names[u]}, Å",
            title=f"{names[axis]} = {first[axis] + at * steps[axis]:.1f} Å",
        )
        spans.append(np.ptp(corners, axis=0))
    widths, heights = np.transpose(spans)
    # All at one scale, with an inch of labels beside each, and room for the title and the legend.
    inches = min(4 / heights.max(), 13 / widths.sum())
    size = max(7.5, inches * widths.sum() + len(cuts) + 1.5), max(3.3, inches * heights.max() + 2)
    figure.set_size_inches(size)
    panels[0].get_gridspec().set_width_ratios(widths)
    figure.colorbar(image, ax=panels, label=unit, fraction=0.02, panchor=False)
    figure.suptitle(title, parse_math=False)
    lines = [Line2D([], [], color=ink) for ink in _INKS]
    texts = [f"mean + {k} σ = {level:.3g} {unit}" for k, level in enumerate(levels, 1)]
    figure.legend(lines, texts, loc="outside lower center", ncols=3, frameon=False)
    save_picture(path, figure)


def save_picture(path: str | os.PathLike, figure: Any) -> None:
    """Write a figure completely, or raise a `StructureError` with the reason."""
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format=Path(path).suffix.lower().lstrip("."))
