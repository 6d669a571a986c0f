"""Pictures that commands draw; their files appear complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from fusedops.maps import MapGrid
from fusedops.structure import StructureError, check_target, replacing


def check_picture_name(path: str | os.PathLike) -> None:
    """Raise `StructureError` if the suffix of `path`, or its folder, allows no picture."""
    from matplotlib.backend_bases import FigureCanvasBase

    ending = Path(path).suffix.lower().lstrip(".")
    if ending not in FigureCanvasBase.get_supported_filetypes():
        raise StructureError(f"{path}: Matplotlib can't draw into such a file")
    check_target(path)


def draw_slices(path: str | os.PathLike, grid: MapGrid, rho: np.ndarray, unit: str) -> None:
    """Draw the three slices through the middle of the map `rho`, (nx, ny, nz) in `unit`."""
    from matplotlib.figure import Figure
    from matplotlib.transforms import Affine2D

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    lengths, angles = grid.cell.parameters[:3], np.radians(grid.cell.parameters[3:])
    names = "abc" if grid.spacegroup else "xyz"
    middle = [n // 2 for n in grid.shape]
    slices = [np.take(rho, at, axis) for axis, at in enumerate(middle)]
    # Cut the scale at a quantile: a few sharp atoms would leave everything else dark.
    top = max(float(np.quantile(piece, 0.998)) for piece in slices)
    panels = figure.subplots(1, 3)
    for axis, (panel, piece) in enumerate(zip(panels, slices, strict=True)):
        u, v = (edge for edge in range(3) if edge != axis)
        along = lengths[v] * np.cos(angles[axis]), lengths[v] * np.sin(angles[axis])
        oblique = Affine2D.from_values(lengths[u], 0, *along, 0, 0)
        # A voxel's value is the density at its middle.
        low, n = np.array(grid.start) - 0.5, np.array(grid.shape)
        (left, bottom), (right, up) = ((e / n)[[u, v]] for e in (low, low + n))
        image = panel.imshow(
            piece.T,
            origin="lower",
            extent=(left, right, bottom, up),
            transform=oblique + panel.transData,
            cmap="magma",
            vmin=0,
            vmax=top or None,
        )
        corners = oblique.transform([(x, y) for x in (left, right) for y in (bottom, up)])
        panel.set_xlim(corners[:, 0].min(), corners[:, 0].max())
        panel.set_ylim(corners[:, 1].min(), corners[:, 1].max())
        panel.set_aspect("equal")
        panel.set_xlabel(f"{names[u]}, Å")
        panel.set_ylabel(f"{names[v]}, Å")
        at = (grid.start[axis] + middle[axis]) / grid.shape[axis] * lengths[axis]
        panel.set_title(f"{names[axis]} = {at:.1f} Å")
    figure.colorbar(image, ax=panels, label=unit, extend="max", shrink=0.7)
    save_picture(path, figure)


def save_picture(path: str | os.PathLike, figure: Any) -> None:
    """Write a figure completely, or raise a `StructureError` with the reason."""
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format=Path(path).suffix.lower().lstrip("."))
