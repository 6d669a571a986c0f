"""``fusedops planarity``: score the planar groups of a structure, and flatten them."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

import fusedops
from fusedops.cli import tables
from fusedops.cli.common import (
    add_backend,
    check_other,
    forced_backend,
    needs,
    number,
    progress,
    read_model,
    timed,
)
from fusedops.planarity import FITS, Fit
from fusedops.restraints import Restraints, read_monomers, read_restraints
from fusedops.structure import SIGMA, PlanarGroups, Structure, planar_groups

#: The Z above which validation programs list a plane or an atom.
_LIMIT = 4


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "planarity",
        help="score the planar groups of a structure, and flatten them",
        description="Score the peptide planes, planar side chains, bases and ligands of a PDB or "
        "mmCIF file. The Z of an atom in a plane is its distance from the plane over its sigma; "
        "the Z of a plane is its largest. rmsd and rmsZ are over all atoms of all planes. A plane "
        "is above 4σ if one of its atoms is; an atom counts once, even if it is in two planes.",
    )
    parser.set_defaults(run=_command)
    parser.add_argument(
        "file", metavar="FILE", help="PDB or mmCIF, also gzipped; - reads standard input"
    )
    parser.add_argument(
        "--sigma",
        type=number(float, 1e-4, 100, "Å"),
        default=SIGMA,
        metavar="Å",
        help="sigma of the planes of proteins and nucleic acids (default: %(default)s); planes "
        "from a CIF have the sigmas there",
    )
    parser.add_argument(
        "--restraints",
        action="append",
        default=[],
        metavar="CIF",
        help="take the planes of ligands, or of other residues, from this file; may be repeated, "
        "and the last file that has a residue counts",
    )
    parser.add_argument(
        "--monomers",
        metavar="DIR",
        help="take the planes of other ligands and modified residues from this monomer library "
        "(default: CLIBD_MON of the environment)",
    )
    parser.add_argument(
        "--top",
        type=number(int, 1),
        metavar="N",
        help="the number of worst planes to show (default: 10; all with --json or --csv)",
    )
    parser.add_argument(
        "--fit", choices=FITS, default="uniform", help="the weights of atoms in fits of planes"
    )
    add_backend(parser)
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
        "--overwrite", action="store_true", help="let --flatten write over FILE itself"
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
    needs("gemmi", *["scipy"] * bool(args.flatten))
    machine = args.json or args.csv
    seconds: dict[str, float] = {}
    with timed(seconds, "read"):
        structure = read_model(args.file)
    if args.flatten:
        structure.check_writable(args.flatten)
        if not args.overwrite:
            check_other("--flatten", args.flatten, args.file, ", or add --overwrite")
    with timed(seconds, "find_planes"):
        restraints = _restraints(args, structure)
        found = planar_groups(structure, sigma=args.sigma, restraints=restraints)
    restraint = _Restraint(found, args.fit, args.backend)
    nll, _ = restraint(structure.xyz)
    # The first call also loads the backend.
    with timed(seconds, "value_and_gradient"):
        restraint(structure.xyz)

    scores = _Scores(structure, found, structure.xyz, args.fit)
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
        "summary": scores.summary(),
        "nll": nll,
        "fit": args.fit,
        "backend": restraint.backend(structure.xyz),
        "seconds": seconds,
    }
    if args.flatten:
        report["flatten"] = _flatten(args, structure, found, restraint, scores)

    shown = scores.planes[: args.top or (None if machine else 10)]
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


def _restraints(args: argparse.Namespace, structure: Structure) -> Restraints:
    restraints: Restraints = {}
    if folder := args.monomers or os.environ.get("CLIBD_MON"):
        restraints |= read_monomers(folder, structure)
    for path in args.restraints:
        restraints |= read_restraints(path)
    return restraints


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
        self.options = {"fit": fit, "backend": forced_backend(backend)}
        self.planes = fusedops.Planes(found.groups)

    def __call__(self, xyz: np.ndarray) -> tuple[float, np.ndarray]:
        value, pullback = fusedops.planarity_nll.vjp(xyz, self.planes, **self.options)
        return float(value), pullback(1.0)[0]

    def backend(self, xyz: np.ndarray) -> str | None:
        return fusedops.planarity_nll.explain(xyz, self.planes, **self.options).backend


class _Scores:
    """The distances of atoms from their planes; `planes` has the worst one first."""

    def __init__(
        self, structure: Structure, found: PlanarGroups, xyz: np.ndarray, fit: Fit
    ) -> None:
        self.planes: list[_Plane] = []
        self._d: list[np.ndarray] = []
        self._z: list[np.ndarray] = []
        self._bad: set[int] = set()
        deviations = fusedops.plane_deviations(xyz, found.groups, fit=fit)
        for (indices, sigmas), labels, d in zip(
            found.groups, found.labels, deviations, strict=True
        ):
            z = abs(d) / sigmas.reshape(len(d), -1)
            self._d.append(d.ravel())
            self._z.append(z.ravel())
            self._bad.update(indices[z > _LIMIT].tolist())
            rms = np.sqrt((d**2).mean(axis=1))
            worst = z.argmax(axis=1)[:, None]
            largest, atoms, off = (
                np.take_along_axis(each, worst, axis=1)[:, 0].tolist() for each in (z, indices, d)
            )
            columns = zip(labels, largest, rms.tolist(), atoms, off, strict=True)
            self.planes += [
                _Plane(label, indices.shape[1], most, r, structure.labels[atom], x)
                for label, most, r, atom, x in columns
            ]
        self.planes.sort(key=lambda plane: plane.z, reverse=True)

    def summary(self) -> dict[str, Any]:
        """Return the numbers for the report; without planes there are no means."""
        d, z = (np.concatenate([[], *each]) for each in (self._d, self._z))
        return {
            "rmsd_angstrom": float(np.sqrt((d**2).mean())) if len(d) else None,
            "rmsz": float(np.sqrt((z**2).mean())) if len(z) else None,
            "planes_above_4_sigma": sum(plane.z > _LIMIT for plane in self.planes),
            "atoms_above_4_sigma": len(self._bad),
        }


def _flatten(
    args: argparse.Namespace,
    structure: Structure,
    found: PlanarGroups,
    restraint: _Restraint,
    before: _Scores,
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
    after = _Scores(structure, found, xyz, args.fit)
    shift = np.linalg.norm(xyz - start, axis=1)
    return {
        "file": args.flatten,
        "steps": int(result.nit),
        "nll": [restraint(start)[0], restraint(xyz)[0]],
        "worst_z": [s.planes[0].z if s.planes else 0.0 for s in (before, after)],
        "largest_shift_angstrom": float(shift.max()),
        "seconds": seconds["minimise"],
    }


def _print_table(planes: list[_Plane]) -> None:
    rows: list[tables.Row] = [
        (
            (
                p.plane,
                p.worst_atom.partition("/")[2],
                str(p.atoms),
                f"{p.z:.2f}",
                f"{p.rms_angstrom:.4f}",
                f"{abs(p.deviation_angstrom):.4f}",
            ),
            None,
        )
        for p in planes
    ]
    headings = ("plane", "worst atom", "atoms", "Z", "rms Å", "off by Å")
    title = f"The {len(planes)} worst planes" if len(planes) > 1 else "The worst plane"
    tables.show(title, headings, rows, right=4)


def _print_report(report: dict[str, Any], file: Any) -> None:
    counts, summary = report["counts"], report["summary"]
    skipped = [f"{count} {name}" for name, count in counts["skipped"].items()]
    if len(skipped) > 20:
        skipped[20:] = [f"{len(skipped) - 20} more residue types (all with --json)"]
    lines = {
        "planes": f"{counts['planes']} of {counts['atoms_in_planes']} atoms among {counts['atoms']}"
    }
    if counts["planes"]:
        lines |= {
            "rmsd from planes": f"{summary['rmsd_angstrom']:.4f} Å",
            "rmsZ": f"{summary['rmsz']:.2f}",
            f"above {_LIMIT}σ": f"{summary['planes_above_4_sigma']} planes, "
            f"{summary['atoms_above_4_sigma']} atoms",
        }
    lines["waters"] = str(counts["waters"])
    if skipped:
        lines["skipped"] = (
            f"{', '.join(skipped)}: planes not known; --restraints or --monomers may have them"
        )
    lines["NLL"] = f"{report['nll']:.2f}, {report['fit']} fit, by {report['backend']}"
    lines["time"] = ", ".join(
        f"{name.replace('_', ' ')} {value:.3g} s"
        if value > 0.9995
        else f"{name.replace('_', ' ')} {1000 * value:.3g} ms"
        for name, value in report["seconds"].items()
    )
    if flat := report.get("flatten"):
        (nll, nll_after), (z, z_after) = flat["nll"], flat["worst_z"]
        lines["flattened"] = (
            f"{flat['steps']} steps in {flat['seconds']:.3g} s: NLL {nll:.2f} -> {nll_after:.2f}, "
            f"worst Z {z:.2f} -> {z_after:.2f}, largest shift "
            f"{flat['largest_shift_angstrom']:.3f} Å; wrote {flat['file']}"
        )
    for name, text in lines.items():
        tables.write(f"{name:18}{text}", " " * 18, file)
