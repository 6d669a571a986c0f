"""Whole refinements by TorchRef's own command, alone and after `fusedops.compat.torchref.register`.

A run reads a shaken model and simulated amplitudes from files, refines it by TorchRef's defaults,
five cycles of scales, coordinates and B, and writes model, maps and history. Its value is the two R
factors, which a program reaches on a path of its own: rounding decides between steps of L-BFGS.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import fusedops
from bench import steps
from bench.peers import peer
from bench.steps import Case, Step
from bench.timing import TORCH
from fusedops import crystal, maps, samples
from fusedops._catalogue import FORWARD, Steps
from fusedops._frame.registry import BackendName
from fusedops.structure import read_structure

NOISE, FREE = 0.1, 0.05
"""Noise, as a share of each amplitude; and the share of free reflections."""


@dataclass(frozen=True)
class Files:
    """The bytes of files with a model and amplitudes, and the number of cycles of a refinement."""

    model: bytes
    amplitudes: bytes
    shape: dict[str, int]
    cycles: int

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the files into a folder, and return the paths of model and amplitudes."""
        model, amplitudes = folder / "model.cif", folder / "amplitudes.mtz"
        model.write_bytes(self.model)
        amplitudes.write_bytes(self.amplitudes)
        return model, amplitudes


def whole_refinement(device: str) -> Step:
    """Refinements at 2 Å of models whose atoms are moved by 0.1 Å along each axis."""
    names = "1ubi", "4cup", "3p3w"
    cases = tuple([Case(name, partial(simulated, name), quick=name == "1ubi") for name in names])
    return Step(
        "whole_refinement",
        fusedops.gaussian_density,
        cases,
        # Runs of fewer cycles or to 3 Å differ by 0.002 to 0.004 in R free, TorchRef's own as well.
        cases[:1],
        # Relative. Of a dozen runs of TorchRef's own on a CPU one ended 2 % from the others.
        0.03,
        lambda problem: torchref(problem, device)[FORWARD](),
        _ours,
        device,
        needs=("gemmi", "torch", "torchref"),
        hows=(TORCH,),
        has_shares=False,
        captured=False,
        rounds=3,
    )


def simulated(name: str, resolution: float = steps.RESOLUTION, cycles: int = 5) -> Files:
    """Return files with the shaken model of an entry, and the amplitudes of the model before."""
    import gemmi

    structure = samples.ubiquitin() if name == "1ubi" else read_structure(steps._path(name))
    atoms = maps.scattering_atoms(structure)
    grid = maps.crystal_grid(structure, resolution / 3)
    problem = steps._shaken(atoms, grid, [], resolution)
    atoms = atoms.blurred(problem.blur)
    arrays = atoms.xyz, atoms.b, atoms.occupancy, atoms.amplitudes, atoms.widths
    rho = fusedops.gaussian_density(*arrays, grid.matrix, grid.shape)
    symmetry = {"blur": problem.blur, "operations": grid.spacegroup.operations()}
    exact = abs(crystal.structure_factors(rho, problem.hkl, grid.matrix, **symmetry))
    rng = np.random.default_rng(1)
    sigma = NOISE * exact
    observed = abs(exact + sigma * rng.normal(size=len(exact)))
    work = rng.random(len(exact)) >= FREE
    # A weight is finite.
    sigma = np.maximum(sigma, 1e-3 * np.median(sigma))
    shape = {"atoms": len(atoms.xyz), "reflections": len(exact), "cycles": cycles}
    model = steps._moved(structure, problem).make_mmcif_document().as_string()
    mtz = gemmi.Mtz(with_base=True)
    mtz.cell, mtz.spacegroup = grid.cell, grid.spacegroup
    mtz.add_dataset("simulated")
    for label, kind in (("F-obs", "F"), ("SIGF-obs", "Q"), ("R-free-flags", "I")):
        mtz.add_column(label, kind)
    columns = np.column_stack([problem.hkl, observed, sigma, work])
    mtz.set_data(columns.astype(np.float32))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "amplitudes.mtz"
        mtz.write_to_file(str(path))
        return Files(model.encode(), path.read_bytes(), shape, cycles)


def _run(problem: Files, device: str) -> tuple[Any, ...]:
    """Run TorchRef's command, and return the R factors of work and free reflections."""
    import torch

    command = importlib.import_module("torchref.cli.refine")
    with tempfile.TemporaryDirectory() as out:
        model, amplitudes = problem.write(Path(out))
        arguments = ["-m", model, "-sf", amplitudes, "-o", out]
        arguments += ["-n", problem.cycles, "--device", device]
        torch.manual_seed(0)
        with (
            mock.patch.object(sys, "argv", ["torchref.refine", *map(str, arguments)]),
            # It would print its time when the process ends.
            mock.patch.object(command, "register_timing"),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            command.main()
        found = json.loads((Path(out) / "refinement_history.json").read_text())
    statistics = found["final_statistics"]
    return (np.array([statistics["R_work"], statistics["R_free"]]),)


@contextlib.contextmanager
def _registered(backend: BackendName | None) -> Iterator[None]:
    theirs = importlib.import_module("fusedops.compat.torchref")
    theirs.register()
    try:
        with fusedops.use_backend(backend) if backend else contextlib.nullcontext():
            yield
    finally:
        theirs.unregister()


def _ours(
    problem: Files, how: str, device: str, dtype: str, backend: BackendName | None
) -> steps.Served:
    """Return TorchRef's command with our ops."""

    def run() -> tuple[Any, ...]:
        with _registered(backend):
            return _run(problem, device)

    return steps.Served({FORWARD: run})


@peer("TorchRef 0.7", "whole_refinement", package="torchref.cli", captured=False)
def torchref(problem: Files, device: str) -> Steps:
    return {FORWARD: partial(_run, problem, device)}
