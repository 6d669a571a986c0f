"""Score the planar groups of a structure, and flatten them.

Score the peptide planes, planar side chains, bases and ligands of a PDB or mmCIF file. The Z of an
atom in a plane is its distance from the plane over its sigma; the Z of a plane is its largest. rmsd
and rmsZ are over all atoms of all planes. A plane is above 4σ if one of its atoms is; an atom
counts once, even if it is in two planes.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from dataclasses import asdict, fields
from typing import Any

import numpy as np

import fusedops
from fusedops._frame import registry
from fusedops.cli import common, tables
from fusedops.cli.common import number, timed
from fusedops.flatness import LIMIT, PlaneScore, flatness, flattened
from fusedops.planarity import FITS
from fusedops.restraints import read_monomers, read_restraints
from fusedops.structure import SIGMA, planar_groups


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("file", metavar="FILE", help="PDB or mmCIF, also gzipped; - reads standard input")
    help = "sigma of the planes that are from no CIF (default: %(default)s)"
    option("--sigma", type=number(1e-4, 100, "Å"), metavar="Å", default=SIGMA, help=help)
    help = "take the planes of ligands, or of other residues, from this file; may be repeated, "
    help += "and the last file that has a residue counts"
    option("--restraints", action="append", default=[], metavar="CIF", help=help)
    help = "take the planes of other ligands and modified residues from this monomer library "
    help += "(default: CLIBD_MON of the environment)"
    option("--monomers", metavar="DIR", default=os.environ.get("CLIBD_MON") or None, help=help)
    help = "the number of worst planes to show (default: 10; all with --json or --csv)"
    option("--top", type=number(1, kind=int), metavar="N", help=help)
    help = "the weights of atoms in the fit of a plane: 1 or 1/sigma² (default: %(default)s)"
    option("--fit", choices=FITS, default="uniform", help=help)
    common.add_backend(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    output.add_argument("--csv", action="store_true", help="print the planes as CSV")
    help = "write the structure (.pdb or .cif, also .gz) after some steps of L-BFGS on the "
    help += "restraint and a harmonic tether to the old positions; hydrogens don't move"
    option("--flatten", metavar="OUT", help=help)
    option("--overwrite", action="store_true", help="let --flatten write over FILE itself")
    help = "the most steps of --flatten (default: %(default)s)"
    option("--steps", type=number(1, kind=int), metavar="N", default=20, help=help)
    help = "K of the tether K/2 |x - x0|², 1/Å² (default: %(default)s: 0.2 Å cost one sigma)"
    option("--tether", type=number(0, unit="1/Å²"), metavar="K", default=25.0, help=help)


def run(args: argparse.Namespace) -> int:
    common.needs("gemmi", *["scipy"] * bool(args.flatten))
    seconds: dict[str, float] = {}
    with timed(seconds, "read"):
        structure = common.read_model(args.file)
    if args.flatten:
        structure.check_writable(args.flatten)
        if not args.overwrite:
            unless = ", or add --overwrite"
            common.check_other("--flatten", args.flatten, args.file, unless=unless)
    with timed(seconds, "find_planes"):
        restraints = read_monomers(args.monomers, structure) if args.monomers else {}
        for path in args.restraints:
            restraints |= read_restraints(path)
        found = planar_groups(structure, sigma=args.sigma, restraints=restraints)
    options: dict[str, Any] = {"fit": args.fit, "backend": registry.forced(args.backend)}
    given = structure.xyz, fusedops.Planes(found.groups)
    op = fusedops.planarity_nll
    # The first call also loads the backend.
    op.vjp(*given, **options)[1](1.0)
    with timed(seconds, "value_and_gradient"):
        value, pullback = op.vjp(*given, **options)
        pullback(1.0)
    nll = float(value)
    scores = asdict(flatness(structure, found, fit=args.fit))
    planes = scores.pop("planes")
    report: dict[str, Any] = {
        "file": args.file,
        "counts": {
            "planes": found.count,
            "atoms": len(structure.xyz),
            "atoms_in_planes": len(set().union(*(index.ravel() for index, _ in found.groups))),
            "waters": found.waters,
            "skipped": dict(found.skipped.most_common()),
            "incomplete": found.incomplete,
        },
        "summary": scores,
        "nll": nll,
        "fit": args.fit,
        "backend": op.explain(*given, **options).backend,
        "seconds": seconds,
    }
    if args.flatten:
        how = options | {"steps": args.steps, "tether": args.tether}
        report["flatten"] = flat = {"file": args.flatten}
        with common.progress("flattening", args.steps) as advance, timed(flat, "seconds"):
            xyz, flat["steps"] = flattened(*given, **how, advance=advance)
        structure.write(args.flatten, xyz)
        after = flatness(structure, found, xyz, fit=args.fit).planes
        flat["nll"] = [nll, float(op(xyz, given[1], **options))]
        flat["worst_z"] = [planes[0]["z"], after[0].z] if planes else [0.0, 0.0]
        flat["largest_shift_angstrom"] = float(np.linalg.norm(xyz - structure.xyz, axis=1).max())
    report["planes"] = planes[: args.top or (None if args.json or args.csv else 10)]
    if args.json:
        common.print_json(report)
    elif args.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(field.name for field in fields(PlaneScore))
        writer.writerows(plane.values() for plane in report["planes"])
        _show(report, sys.stderr)
    else:
        _show_planes(report["planes"])
        _show(report, sys.stdout)
    return 0


def _show_planes(planes: list[dict[str, Any]]) -> None:
    rows: list[tables.Row] = []
    for plane in planes:
        atom, off = plane["worst_atom"].partition("/")[2], abs(plane["deviation_angstrom"])
        numbers = f"{plane['z']:.2f}", f"{plane['rms_angstrom']:.4f}", f"{off:.4f}"
        rows.append(([plane["plane"], atom, str(plane["atoms"]), *numbers], None))
    headings = ("plane", "worst atom", "atoms", "Z", "rms Å", "off by Å")
    if rows:
        tables.show(f"The worst planes: {len(rows)}", headings, rows, right=4)


def _show(report: dict[str, Any], file: Any) -> None:
    counts, summary, flat = report["counts"], report["summary"], report.get("flatten")
    lines = {"planes": "{planes} of {atoms_in_planes} atoms among {atoms}".format(**counts)}
    if counts["planes"]:
        lines["rmsd from planes"] = f"{summary['rmsd_angstrom']:.4f} Å"
        lines["rmsZ"] = f"{summary['rmsz']:.2f}"
        above = "{planes_above_4_sigma} planes, {atoms_above_4_sigma} atoms"
        lines[f"above {LIMIT}σ"] = above.format(**summary)
    lines["waters"] = str(counts["waters"])
    if counts["skipped"]:
        kinds = _some([f"{count} {name}" for name, count in counts["skipped"].items()])
        lines["skipped"] = f"{kinds}: planes not known; --restraints or --monomers may have them"
    if counts["incomplete"]:
        lines["incomplete"] = f"{_some(counts['incomplete'])}: atoms are missing; left out"
    lines["NLL"] = "{nll:.2f}, {fit} fit, by {backend}".format(**report)
    lines["time"] = common.times(report["seconds"])
    if flat:
        lines["flattened"] = (
            "{steps} steps in {seconds:.3g} s: NLL {nll[0]:.2f} -> {nll[1]:.2f}, worst Z "
            "{worst_z[0]:.2f} -> {worst_z[1]:.2f}, largest shift {largest_shift_angstrom:.3f} Å; "
            "wrote {file}"
        ).format(**flat)
    for name, text in lines.items():
        tables.write(f"{name:18}{text}", " " * 18, file)


def _some(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = [f"{len(names) - 20} more (all with --json)"] if len(names) > 20 else []
    return ", ".join(names[:20] + more)
