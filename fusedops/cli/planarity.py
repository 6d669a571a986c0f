"""``fusedops planarity``: score the planar groups of a structure, and flatten them."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

import fusedops
from fusedops._frame.registry import BACKENDS
from fusedops.cli.common import check_other, forced_backend, needs, number, progress, timed
from fusedops.planarity import FITS
from fusedops.structure import PlanarGroups, Structure, planar_groups, read_structure


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "planarity",
        help="score the planar groups of a structure, and flatten them",
        description="Score the peptide planes, planar side chains and bases of a PDB or mmCIF "
        "file. Z is the largest distance of an atom from its plane over its sigma of 0.02 Å.",
    )
    parser.set_defaults(run=_command)
    parser.add_argument("file", metavar="FILE", help="PDB or mmCIF, also gzipped")
    parser.add_argument(
        "--top",
        type=number(int, 1),
        metavar="N",
        help="the number of worst planes to show (default: 10; all with --json or --csv)",
    )
    parser.add_argument(
        "--fit", choices=FITS, default="uniform", help="the weights of atoms in fits of planes"
    )
    parser.add_argument(
        "--backend",
        choices=[backend.name for backend in BACKENDS],
        help="the backend that must compute it",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    output.add_argument("--csv", action="store_true", help="print the planes as CSV")
    parser.add_argument(
        "--flatten",
        metavar="OUT",
        help="write the structure (.pdb or .cif, also .gz) after some steps of L-BFGS on the "
        "restraint and a harmonic tether to the old positions; hydrogens don't move",
    )
    parser.add_argument(
        "--steps",
        type=number(int, 1),
        default=20,
        metavar="N",
        help="the most steps of --flatten (default: %(default)s)",
    )
    parser.add_argument(
        "--tether",
        type=number(float, 0, unit="1/Å²"),
        default=25.0,
        metavar="K",
        help="strength of the tether K/2 |x - x0|² in 1/Å² (default: %(default)s, which lets an "
        "atom move by 0.2 Å at the cost of one sigma)",
    )


def _command(args: argparse.Namespace) -> int:
    needs("gemmi", "structure")
    machine = args.json or args.csv
    if not machine:
        needs("rich", "cli")
    if args.flatten:
        needs("scipy", "cli")
    seconds: dict[str, float] = {}
    with timed(seconds, "read"):
        structure = read_structure(args.file)
    if args.flatten:
        structure.check_writable(args.flatten)
        check_other("--flatten", args.flatten, args.file)
    with timed(seconds, "find_planes"):
        found = planar_groups(structure)
    restraint = _Restraint(found, args.fit, args.backend)
    nll, _ = restraint(structure.xyz)
    # The first call also loads the backend.
    with timed(seconds, "value_and_gradient"):
        restraint(structure.xyz)

    planes = _scores(structure, found, structure.xyz, args.fit)
    in_planes = np.zeros(len(structure.xyz), dtype=bool)
    for indices, _ in found.groups:
        in_planes[indices] = True
    report = {
        "file": args.file,
        "counts": {
            "planes": found.count,
            "atoms": len(structure.xyz),
            "atoms_in_planes": int(in_planes.sum()),
            "waters": found.waters,
            "skipped": dict(found.skipped.most_common()),
        },
        "nll": nll,
        "fit": args.fit,
        "backend": restraint.backend(structure.xyz),
        "seconds": seconds,
    }
    if args.flatten:
        report["flatten"] = _flatten(args, structure, found, restraint, planes)

    shown = planes[: args.top or (None if machine else 10)]
    if args.json:
        report["planes"] = [asdict(plane) for plane in shown]
        print(json.dumps(report, indent=1, allow_nan=False))
        return 0
    if args.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(field.name for field in fields(_Plane))
        writer.writerows(asdict(plane).values() for plane in shown)
    elif shown:
        _print_table(shown)
    _print_report(report, file=sys.stderr if args.csv else sys.stdout)
    return 0


@dataclass(frozen=True)
class _Plane:
    plane: str
    atoms: int
    z: float
    rms_angstrom: float
    worst_atom: str
    deviation_angstrom: float


class _Restraint:
    """The planarity restraint of a structure as a function of its coordinates."""

    def __init__(self, found: PlanarGroups, fit: str, backend: str | None) -> None:
        self.planes = fusedops.Planes(found.groups)
        self.options = {"fit": fit, "backend": forced_backend(backend)}

    def __call__(self, xyz: np.ndarray) -> tuple[float, np.ndarray]:
        value, pullback = fusedops.planarity_nll.vjp(xyz, self.planes, **self.options)
        return float(value), pullback(1.0)[0]

    def backend(self, xyz: np.ndarray) -> str | None:
        return fusedops.planarity_nll.explain(xyz, self.planes, **self.options).backend


def _scores(structure: Structure, found: PlanarGroups, xyz: np.ndarray, fit: str) -> list[_Plane]:
    """Return the planes, the worst one first."""
    planes = []
    deviations = fusedops.plane_deviations(xyz, found.groups, fit=fit)
    for (indices, sigmas), labels, d in zip(found.groups, found.labels, deviations, strict=True):
        rms = np.sqrt((d**2).mean(axis=1))
        worst = abs(d).argmax(axis=1)
        atom = np.take_along_axis(indices, worst[:, None], axis=1)[:, 0]
        largest = np.take_along_axis(d, worst[:, None], axis=1)[:, 0]
        planes += [
            _Plane(label, indices.shape[1], z, r, structure.labels[i], x)
            for label, z, r, i, x in zip(
                labels,
                (abs(largest) / sigmas).tolist(),
                rms.tolist(),
                atom.tolist(),
                largest.tolist(),
                strict=True,
            )
        ]
    return sorted(planes, key=lambda plane: plane.z, reverse=True)


def _flatten(
    args: argparse.Namespace,
    structure: Structure,
    found: PlanarGroups,
    restraint: _Restraint,
    planes: list[_Plane],
) -> dict[str, Any]:
    from scipy.optimize import minimize

    start = structure.xyz

    def energy(flat: np.ndarray) -> tuple[float, np.ndarray]:
        xyz = flat.reshape(-1, 3)
        value, gradient = restraint(xyz)
        shift = xyz - start
        value += 0.5 * args.tether * np.vdot(shift, shift)
        return value, (gradient + args.tether * shift).ravel()

    seconds: dict[str, float] = {}
    with progress("flattening", args.steps) as advance, timed(seconds, "minimise"):
        result = minimize(
            energy,
            start.ravel(),
            jac=True,
            method="L-BFGS-B",
            callback=lambda _: advance(),
            options={"maxiter": args.steps},
        )
    xyz = result.x.reshape(-1, 3)
    structure.write(args.flatten, xyz)
    after = _scores(structure, found, xyz, args.fit)
    shift = np.linalg.norm(xyz - start, axis=1)
    return {
        "file": args.flatten,
        "steps": int(result.nit),
        "nll": [restraint(start)[0], restraint(xyz)[0]],
        "worst_z": [p[0].z if p else 0.0 for p in (planes, after)],
        "largest_shift_angstrom": float(shift.max()),
        "seconds": seconds["minimise"],
    }


def _print_table(planes: list[_Plane]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"The {len(planes)} worst planes", box=box.SIMPLE_HEAD, collapse_padding=True
    )
    table.add_column("plane")
    for heading in ("atoms", "Z", "rms Å"):
        table.add_column(heading, justify="right")
    table.add_column("worst atom")
    table.add_column("off by Å", justify="right")
    for p in planes:
        table.add_row(
            p.plane,
            str(p.atoms),
            f"{p.z:.2f}",
            f"{p.rms_angstrom:.4f}",
            p.worst_atom.partition("/")[2],
            f"{abs(p.deviation_angstrom):.4f}",
        )
    Console(markup=False, highlight=False).print(table)


def _print_report(report: dict[str, Any], file: Any) -> None:
    counts = report["counts"]
    skipped = [f"{count} {name}" for name, count in counts["skipped"].items()]
    if len(skipped) > 5:
        skipped[5:] = [f"{len(skipped) - 5} more residue types"]
    skipped.insert(0, f"{counts['waters']} waters")
    lines = [
        f"{counts['planes']} planes of {counts['atoms_in_planes']} atoms among {counts['atoms']}; "
        f"skipped {', '.join(skipped)}",
        f"NLL {report['nll']:.2f}, {report['fit']} fit, by {report['backend']}",
        ", ".join(
            f"{name.replace('_', ' ')} {1000 * value:.3g} ms"
            for name, value in report["seconds"].items()
        ),
    ]
    if flat := report.get("flatten"):
        (nll, nll_after), (z, z_after) = flat["nll"], flat["worst_z"]
        lines.append(
            f"{flat['steps']} steps in {flat['seconds']:.3g} s: NLL {nll:.2f} -> {nll_after:.2f}, "
            f"worst Z {z:.2f} -> {z_after:.2f}, largest shift "
            f"{flat['largest_shift_angstrom']:.3f} Å; wrote {flat['file']}"
        )
    print(*lines, sep="\n", file=file)
