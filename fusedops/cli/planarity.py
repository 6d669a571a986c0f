"""``fusedops planarity``: score the planar groups of a structure, and flatten them."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from dataclasses import asdict, fields
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
from fusedops.flatness import LIMIT, PlaneScore, flatness, flattened
from fusedops.planarity import FITS
from fusedops.restraints import Restraints, read_monomers, read_restraints
from fusedops.structure import SIGMA, Structure, planar_groups


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
    options: dict[str, Any] = {"fit": args.fit, "backend": forced_backend(args.backend)}
    planes = fusedops.Planes(found.groups)
    op = fusedops.planarity_nll
    value, pullback = op.vjp(structure.xyz, planes, **options)
    nll, _ = float(value), pullback(1.0)
    # The first call also loads the backend.
    with timed(seconds, "value_and_gradient"):
        op.vjp(structure.xyz, planes, **options)[1](1.0)
    scores = asdict(flatness(structure, found, fit=args.fit))
    report = {
        "file": args.file,
        "counts": {
            "planes": found.count,
            "atoms": len(structure.xyz),
            "atoms_in_planes": len(set().union(*(index.ravel() for index, _ in found.groups))),
            "waters": found.waters,
            "skipped": dict(found.skipped.most_common()),
        },
        "summary": {name: value for name, value in scores.items() if name != "planes"},
        "nll": nll,
        "fit": args.fit,
        "backend": op.explain(structure.xyz, planes, **options).backend,
        "seconds": seconds,
    }
    if args.flatten:
        took: dict[str, float] = {}
        with progress("flattening", args.steps) as advance, timed(took, "minimise"):
            how = options | {"steps": args.steps, "tether": args.tether, "advance": advance}
            xyz, steps = flattened(structure.xyz, planes, **how)
        structure.write(args.flatten, xyz)
        after = asdict(flatness(structure, found, xyz, fit=args.fit))
        report["flatten"] = {
            "file": args.flatten,
            "steps": steps,
            "nll": [nll, float(op(xyz, planes, **options))],
            "worst_z": [each["planes"][0]["z"] if found.count else 0.0 for each in (scores, after)],
            "largest_shift_angstrom": float(np.linalg.norm(xyz - structure.xyz, axis=1).max()),
            "seconds": took["minimise"],
        }
    _show(args, report, scores["planes"])
    return 0


def _show(args: argparse.Namespace, report: dict[str, Any], planes: list[dict[str, Any]]) -> None:
    shown = planes[: args.top or (None if args.json or args.csv else 10)]
    if args.json:
        print(json.dumps(report | {"planes": shown}, indent=1, allow_nan=False))
        return
    if args.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(field.name for field in fields(PlaneScore))
        writer.writerows(plane.values() for plane in shown)
    elif shown:
        _print_table(shown)
    _print_report(report, file=sys.stderr if args.csv else sys.stdout)


def _restraints(args: argparse.Namespace, structure: Structure) -> Restraints:
    restraints: Restraints = {}
    if folder := args.monomers or os.environ.get("CLIBD_MON"):
        restraints |= read_monomers(folder, structure)
    for path in args.restraints:
        restraints |= read_restraints(path)
    return restraints


def _print_table(planes: list[dict[str, Any]]) -> None:
    rows: list[tables.Row] = []
    for plane in planes:
        atom, off = plane["worst_atom"].partition("/")[2], abs(plane["deviation_angstrom"])
        numbers = f"{plane['z']:.2f}", f"{plane['rms_angstrom']:.4f}", f"{off:.4f}"
        rows.append(([plane["plane"], atom, str(plane["atoms"]), *numbers], None))
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
            f"above {LIMIT}σ": f"{summary['planes_above_4_sigma']} planes, "
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
