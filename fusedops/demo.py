"""``fusedops demo``: every op on a real example, on every backend that works here, checked.

An op joins by a function that yields its `Row` objects and draws into an axes, and its name in
`DEMOS`.
"""

from __future__ import annotations

import importlib.resources
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    planes = fusedops.Planes(found.groups)
    with fusedops.use_backend("numpy"):
        nll, pullback = fusedops.planarity_nll.vjp(structure.xyz, planes)
        reference = nll, pullback(1.0)[0]
    for name, why, chosen, xyz, packed in _places(structure.xyz, planes):
        if xyz is None:
            yield Row("planarity_nll", name, why)
            continue
        step = _value_and_gradient(xyz, packed, name)
        result = step()
        errors = {
            key: error(value, want)
            for key, value, want in zip(("value", "gradient"), result, reference, strict=True)
        }
        yield Row("planarity_nll", name, why, chosen, _median_ms(step), errors)
    _draw_planes(figure, structure.xyz, found)


DEMOS: dict[str, Callable[[Any], Iterator[Row]]] = {"planarity": planarity}


def _places(xyz: np.ndarray, planes: fusedops.Planes) -> Iterator[tuple[str, str, bool, Any, Any]]:
    """Yield every backend with why it is used or not, and the arguments where it lives."""
    info = fusedops.info()
    gpu = "cuda" if info.gpus and not info.backends["triton"].why_not else None
    if gpu:
        import torch

        there = torch.tensor(xyz, device=gpu), planes.to(gpu)
        fastest = fusedops.planarity_nll.explain(*there).backend
    else:
        fastest = fusedops.planarity_nll.explain(xyz, planes).backend
    for backend in _registry.BACKENDS:
        reason = info.backends[backend.name].why_not
        if reason:
            yield backend.name, reason, False, None, None
            continue
        chosen = backend.name == fastest
        why = f"chosen, the first that can serve on the {'GPU' if gpu else 'CPU'}"
        why = why if chosen else "works too"
        if backend.name == "triton":
            yield backend.name, why, chosen, *there
        elif backend.speaks == "torch":
            import torch

            yield backend.name, why, chosen, torch.from_numpy(xyz), planes
        else:
            yield backend.name, why, chosen, xyz, planes


def _value_and_gradient(xyz: Any, planes: Any, backend: str) -> Callable[[], tuple[Any, Any]]:
    if isinstance(xyz, np.ndarray):

        def step() -> tuple[Any, Any]:
            value, pullback = fusedops.planarity_nll.vjp(xyz, planes, backend=backend)
            return value, pullback(1.0)[0]

    else:
        leaf = xyz.clone().requires_grad_()

        def step() -> tuple[Any, Any]:
            leaf.grad = None
            value = fusedops.planarity_nll(leaf, planes, backend=backend)
            value.backward()
            return value.detach().cpu().numpy(), leaf.grad.cpu().numpy()

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


def run(picture: Path, show: Callable[[list[Row]], None]) -> bool:
    """Run every demo, draw `picture`, and return whether all checks passed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6), layout="constrained")
    panels = figure.subfigures(len(DEMOS), 1, squeeze=False)[:, 0]
    rows = [row for demo, panel in zip(DEMOS.values(), panels, strict=True) for row in demo(panel)]
    show(rows)
    figure.savefig(picture, dpi=150)
    return not any(row.failed for row in rows)
