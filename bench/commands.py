"""Time `fusedops density` and `planarity` on every structure of a folder, `info` and `check`.

    FUSEDOPS_DATA=folder python -m bench commands

A run is a process: its exit code, its shortest time in some rounds and its peak of memory go into
bench/results/commands.json, from which bench.tables makes the table of docs/measured.md. So
does the R factor of the structure factors that `density --mtz` writes, to gemmi's direct summation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from fusedops.cli import tables

RESULTS = Path(__file__).parent / "results/commands.json"
ROUNDS = 5
#: Reflections at most in an R factor: of a ribosome, direct summation takes 0.1 s for each.
REFLECTIONS = 500
ENTRY = re.compile(r"\.(pdb|cif)(\.gz)?$").search
#: By the column of the table; a placeholder is a name in a folder of the structure's own.
COMMANDS = {
    "density": "density MODEL --out x.ccp4",
    "density, 2 Å, MTZ, picture": "density MODEL --out y.ccp4 --resolution 2 --mtz y.mtz "
    "--picture y.png",
    "density, electrons, like a map, slices": "density MODEL --out z.mrc --electron --like x.ccp4 "
    "--picture z.png --slice z=0.25 --slice y=0.6",
    "planarity": "planarity MODEL",
    "planarity, a pipe, σ, ligands": "planarity - --sigma 0.03 --restraints ligands.cif --json",
    "planarity, flattened": "planarity MODEL --flatten MODEL.flat",
}
#: Planes of the ligands in 4cup and 6zu5.
PLANES = {"ZYB": "F C C1 C2 C3 C4 C5 C6", "AMP": "N9 C8 N7 C5 C6 N6 N1 C2 N3 C4"}


# Modules that take memory are imported last: Linux counts a parent's memory as its child's peak.


def timed(command: str, folder: Path, model: Path | None = None) -> dict[str, Any]:
    """Return the exit code, the seconds and the peak in MB of a command in a folder."""
    words = [sys.executable, "-m", "fusedops", *command.split()]
    if model:
        flat = f"flat.{model.name.partition('.')[2]}"
        words = [{"MODEL": str(model), "MODEL.flat": flat}.get(word, word) for word in words]
    best = float("inf")
    for _ in range(ROUNDS):
        start = perf_counter()
        with open(model or os.devnull) as given, open(folder / "said", "w") as said:
            process = subprocess.Popen(
                words, cwd=folder, stdin=given, stdout=said, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        best = min(best, perf_counter() - start)
        if process.returncode:
            print((folder / "said").read_text(), file=sys.stderr)
    # Linux counts in KiB.
    return {"code": process.returncode, "seconds": best, "peak_MB": usage.ru_maxrss * 1.024e-3}


def runs(model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of all commands on a structure."""
    lines = [f"{name} ring {atom} 0.02" for name in PLANES for atom in PLANES[name].split()]
    columns = ("comp_id", "plane_id", "atom_id", "dist_esd")
    head = ["data_comp_ligands", "loop_", *(f"_chem_comp_plane_atom.{name}" for name in columns)]
    (folder / "ligands.cif").write_text("\n".join([*head, *lines]) + "\n")
    found = {title: timed(command, folder, model) for title, command in COMMANDS.items()}
    rows: list[tables.Row] = [
        ((title, str(run["code"]), f"{run['seconds']:.2f}", f"{run['peak_MB']:.0f}"), None)
        for title, run in found.items()
    ]
    tables.show(model.name, ("command", "exit code", "s", "MB"), rows, right=3)
    return found


def r_factor(model: Path, path: Path) -> dict[str, float]:
    """Return the number of atoms, and R of the amplitudes in an MTZ file."""
    import gemmi
    import numpy as np

    from fusedops.structure import read_structure

    mtz, read = gemmi.read_mtz_file(str(path)), read_structure(model)
    structure = read.gemmi
    # An entry without a cell is in a box, as the map is.
    structure.cell, structure.spacegroup_hm = mtz.cell, mtz.spacegroup.xhm()
    structure.setup_cell_images()
    chosen = np.random.default_rng(0).permutation(mtz.nreflections)[:REFLECTIONS]
    calculator = gemmi.StructureFactorCalculatorX(structure.cell)
    expected = [
        abs(calculator.calculate_sf_from_model(structure[0], hkl))
        for hkl in mtz.make_miller_array()[chosen].tolist()
    ]
    off = np.abs(mtz.column_with_label("FC").array[chosen] - expected)
    return {
        "atoms": len(read.xyz),
        "R": float(off.sum() / np.sum(expected)),
        "reflections": len(chosen),
        "all_reflections": mtz.nreflections,
    }


def main() -> None:
    given = sorted(Path(os.environ["FUSEDOPS_DATA"]).iterdir())
    models = [path for path in given if ENTRY(path.name)]
    with tempfile.TemporaryDirectory() as name:
        folders = {model: Path(name, model.name) for model in models}
        alone = {command: timed(command, Path(name)) for command in ("info", "check")}
        files: dict[str, dict[str, Any]] = {}
        for model, folder in folders.items():
            folder.mkdir()
            files[model.name] = {"runs": runs(model, folder)}
        for model, folder in folders.items():
            files[model.name] |= r_factor(model, folder / "y.mtz")
    from bench import measure, report

    about = {"machine": measure.machine("cpu"), "rounds": ROUNDS}
    report.save(RESULTS, {**about, "alone": alone, "files": files})
