"""Panels that pictures of several ops share."""

from __future__ import annotations

from typing import Any

import numpy as np


def space(figure: Any, points: np.ndarray) -> Any:
    """Return a panel of three dimensions that holds all points."""
    panel = figure.add_subplot(projection="3d")
    panel.auto_scale_xyz(*points.T)
    panel.set_box_aspect(np.ptp(points, axis=0), zoom=1.5)
    panel.set_axis_off()
    return panel


def show_taps(figure: Any, panel: Any, taps: np.ndarray, xlabel: str) -> None:
    figure.colorbar(panel.imshow(taps, aspect="auto", vmin=0, vmax=1), ax=panel, label="tap")
    names = [*(f"t − {back}" for back in range(len(taps) - 1, 0, -1)), "t"]
    panel.set(yticks=range(len(taps)), yticklabels=names, xlabel=xlabel)
