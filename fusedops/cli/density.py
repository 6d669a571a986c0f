"""``fusedops density``: calculate the density map of a structure."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import fusedops
from fusedops import mapfiles, maps
from fusedops.cli import tables
from fusedops.cli.common import (
    CommandError,
    add_backend,
    check_other,
    forced_backend,
    needs,
    number,
    progress,
    read_model,
    timed,
)
from fusedops.cli.pictures import check_picture_name, draw_slices, slice_of_text, slices
from fusedops.structure import Structure

#: Atoms in each step of the progress bar. There are at most ten steps, since each costs an
#: addition of two maps.
_STEP = 40_000

#: The units of a map and of its integral, by the kind of form factors.
_UNITS = {"X-rays": ("e/Å³", "electrons"), "electrons": ("1/Å²", "Å")}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "density",
        help="calculate the density map of a structure",
        description="Calculate the electron density, or the potential for electrons, of a PDB, "
        "mmCIF or small-molecule CIF file, and write it as a CCP4 map: of the unit cell with its "
        "symmetry or, if the file has no cell, of a box around the atoms.",
    )
    parser.set_defaults(run=_command)
    parser.add_argument(
        "file", metavar="MODEL", help="PDB or CIF, also gzipped; - reads standard input"
    )
    parser.add_argument(
        "--out", required=True, metavar="MAP", help="output file (.ccp4, .map or .mrc)"
    )
    angstrom: dict[str, Any] = {"type": number(float, 0.1, 100, "Å"), "metavar": "Å"}
    sampling = parser.add_mutually_exclusive_group()
    sampling.add_argument(
        "--spacing",
        type=number(float, 0.01, 100, "Å"),
        metavar="Å",
        help="largest distance between voxels (default: 0.5, or by --resolution)",
    )
    sampling.add_argument(
        "--like",
        metavar="MAP",
        help="take grid, cell, extent and origin of this CCP4 map, and print the correlation with "
        "it",
    )
    parser.add_argument(
        "--resolution",
        **angstrom,
        help="make the spacing a third of this, as gemmi does; --blur follows from the spacing. "
        "Also the resolution of --mtz",
    )
    parser.add_argument(
        "--electron",
        action="store_true",
        help="form factors for electron scattering (cryo-EM) instead of X-rays",
    )
    reach = parser.add_mutually_exclusive_group()
    reach.add_argument("--radius", **angstrom, help="radius of all atoms")
    reach.add_argument(
        "--n-sigma",
        type=number(float, 0.1, 100),
        default=4.0,
        metavar="S",
        help="radius in standard deviations of an atom's widest Gaussian, at least 2 Å "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--margin",
        type=number(float, 0, 1e6, "Å"),
        metavar="Å",
        help="make a box with this margin around the atoms, even if the file has a cell "
        "(default without a cell, and the least allowed: the largest radius of an atom)",
    )
    parser.add_argument(
        "--blur",
        type=number(float, 0, 1e6, "Å²"),
        metavar="Å²",
        help="increase of all B (default: raises the smallest B to 72 spacing²)",
    )
    parser.add_argument(
        "--max-voxels",
        type=number(int, 1),
        default=500_000_000,
        metavar="N",
        help="refuse a larger map (default: %(default)s, of 4 GB); --like has no limit",
    )
    add_backend(parser)
    parser.add_argument(
        "--mtz",
        metavar="FILE",
        help="also write the structure factors of the map, H K L FC PHIC, with the blur taken back "
        "out, to --resolution or, by default, to twice the spacing, the limit of the grid",
    )
    parser.add_argument(
        "--picture", metavar="PNG", help="draw the three slices in the middle, with contours"
    )
    parser.add_argument(
        "--slice",
        action="append",
        type=slice_of_text,
        metavar="AXIS=WHERE",
        help="draw this slice instead: across x, y or z (along a, b or c), at a fraction of the "
        "map's edge, as in z=0.25, or at a position, as in z=12.5Å or z=12.5A; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _command(args: argparse.Namespace) -> int:
    needs("gemmi", *["matplotlib"] * bool(args.picture))
    maps.check_map_name(args.out)
    if args.picture:
        check_picture_name(args.picture)
    elif args.slice:
        raise CommandError("--slice: it needs --picture")
    if args.mtz:
        mapfiles.check_mtz_name(args.mtz)
    if args.like and args.margin is not None:
        raise CommandError(f"--margin {args.margin:g}: --like {args.like} has an extent of its own")
    seconds: dict[str, float] = {}
    with timed(seconds, "read"):
        model = _read(args)
    plan = _plan(args, *model)
    show = (lambda line: None) if args.json else tables.write
    report = _planned(args, plan)
    _show_plan(args, report, show)
    report |= _written(args, plan, report, seconds) | {"seconds": seconds}
    _show_results(args, report, show)
    if args.json:
        print(json.dumps(report, indent=1, allow_nan=False))
    return 0


@dataclass(frozen=True)
class _Plan:
    """The model, and how its map is calculated; `limit` is the smallest d of reflections, Å."""

    structure: Structure
    target: mapfiles.MapTarget | None
    atoms: maps.ScatteringAtoms
    grid: maps.MapGrid
    spacing: float
    blur: float
    reach: float
    limit: float
    cuts: list[tuple[int, int]]

    @property
    def start(self) -> tuple[int, int, int]:
        return (self.target or self.grid).start

    @property
    def shape(self) -> tuple[int, ...]:
        return self.target.rho.shape if self.target else self.grid.shape


def _read(
    args: argparse.Namespace,
) -> tuple[Structure, mapfiles.MapTarget | None, maps.ScatteringAtoms]:
    structure = read_model(args.file)
    target = mapfiles.read_map(args.like) if args.like else None
    outputs = {"--out": args.out, "--picture": args.picture, "--mtz": args.mtz}
    for option, path in outputs.items():
        for source in (args.file, args.like):
            if path and source:
                check_other(option, path, source)
    method = dict(structure.gemmi.info).get("_exptl.method", "")
    if "ELECTRON" in method and "X-RAY" not in method and not args.electron:
        tables.write(
            f"fusedops: {args.file} is from {method.lower()} and gets form factors for X-rays; "
            "--electron takes form factors for electrons",
            file=sys.stderr,
        )
    return structure, target, maps.scattering_atoms(structure, electron=args.electron)


def _plan(
    args: argparse.Namespace,
    structure: Structure,
    target: mapfiles.MapTarget | None,
    atoms: maps.ScatteringAtoms,
) -> _Plan:
    """Return grid, blur and radius that go together, or raise CommandError."""
    spacing = args.spacing or (args.resolution / 3 if args.resolution else 0.5)
    if target:
        grid = mapfiles.target_grid(target, structure)
        spacing = mapfiles.largest_spacing(grid)
        maps.check_memory(math.prod(grid.shape))
    blur = atoms.needed_blur(spacing) if args.blur is None else args.blur
    atoms = atoms.blurred(blur)
    radius = atoms.radius(args.n_sigma)
    reach, least = args.radius or float(radius.max()), args.radius or float(radius.min())
    if spacing > least / 3:
        option = f"--like {args.like}: spacing" if args.like else "--spacing"
        raise CommandError(
            f"{option} {spacing:g}: voxels so far apart don't sample atoms, which reach {least:g} "
            f"Å; it should be at most {math.floor(100 * least / 3) / 100:g}, a third of that, or "
            "--radius larger"
        )
    if not target:
        grid = _own_grid(args, structure, atoms, spacing, reach)
    if reach > grid.largest_radius:
        raise CommandError(
            f"{args.file}: its atoms reach {reach:g} Å; these voxels allow at most "
            f"{grid.largest_radius:.4g} Å; the spacing should be larger, or --radius smaller"
        )
    limit = args.resolution or 2 * mapfiles.largest_spacing(grid)
    if args.mtz:
        mapfiles.check_reflections(args.mtz, grid, limit, blur)
    plan = _Plan(structure, target, atoms, grid, spacing, blur, reach, limit, [])
    if not args.picture:
        return plan
    return replace(plan, cuts=slices(args.slice, grid, plan.start, plan.shape))


def _own_grid(
    args: argparse.Namespace,
    structure: Structure,
    atoms: maps.ScatteringAtoms,
    spacing: float,
    reach: float,
) -> maps.MapGrid:
    margin = reach if args.margin is None else args.margin
    if args.margin is None and maps.unit_cell(structure):
        grid = maps.crystal_grid(structure, spacing)
    elif margin < reach:
        raise CommandError(
            f"--margin {margin:g}: atoms reach {reach:g} Å; it should be at least that, or "
            "--radius smaller"
        )
    else:
        grid = maps.box_grid(atoms.xyz, spacing, margin)
    voxels = math.prod(grid.shape)
    if voxels > args.max_voxels:
        option = "--spacing" if args.spacing or not args.resolution else "--resolution"
        raise CommandError(
            f"{option} {args.spacing or args.resolution or spacing:g}: the map has "
            f"{voxels:,} voxels, more than --max-voxels {args.max_voxels:,}, and needs "
            f"{grid.memory / 1e9:.1f} GB of memory; {option} should be larger, or --max-voxels "
            f"{voxels}"
        )
    return grid


def _planned(args: argparse.Namespace, plan: _Plan) -> dict[str, Any]:
    grid = plan.grid
    return {
        "file": args.file,
        "atoms": len(plan.atoms.xyz),
        "charged": plan.atoms.charged,
        "form_factors": "electrons" if args.electron else "X-rays",
        "spacing_angstrom": plan.spacing,
        "blur_angstrom2": plan.blur,
        "largest_radius_angstrom": plan.reach,
        "cell": list(grid.cell.parameters),
        "spacegroup": grid.spacegroup.xhm() if grid.spacegroup else None,
        "shape": list(plan.shape),
        "start": list(plan.start),
        "memory_bytes": grid.memory,
        "available_bytes": maps.available_memory(),
    }


def _written(
    args: argparse.Namespace, plan: _Plan, report: dict[str, Any], seconds: dict[str, float]
) -> dict[str, Any]:
    """Calculate the map, write all files, and return their part of the report."""
    atoms, grid, target = plan.atoms, plan.grid, plan.target
    backend = forced_backend(args.backend)
    parts = min(10, math.ceil(len(atoms.xyz) / _STEP))
    options = {"radius": args.radius, "n_sigma": args.n_sigma, "backend": backend, "parts": parts}
    with progress("placing atoms", parts) as advance, timed(seconds, "density"):
        whole = maps.density_map(atoms, grid, **options, advance=advance)
    ccp4 = target.part(whole) if target else whole
    rho = ccp4.grid.array
    least, largest = float(rho.min()), float(rho.max())
    if not math.isfinite(largest - least):
        raise CommandError(f"{args.file}: the density of its occupancies is too large for 32 bits")
    unit, _ = _UNITS[report["form_factors"]]
    name = "stdin" if args.file == "-" else os.path.basename(args.file)
    lines = [
        f"fusedops {fusedops.__version__} density",
        f"model {name}",
        f"{report['atoms']} atoms, {report['form_factors']}, unit {unit}",
        f"spacing {plan.spacing:.4g} Å, blur {plan.blur:.6g} Å², radius {plan.reach:g} Å at most",
    ]
    mapfiles.set_labels(ccp4, lines)
    with timed(seconds, "write"):
        maps.write_map(args.out, ccp4)
    volume = grid.cell.volume / math.prod(grid.shape)
    found = {
        "least": least,
        "largest": largest,
        "integral": float(rho.sum(dtype=np.float64)) * volume,
        "backend": maps.backend_of(atoms, grid, backend),
        "map": args.out,
    }
    if target:
        found |= {"like": args.like, "correlation": target.correlation(rho)}
    if args.mtz:
        with timed(seconds, "mtz"):
            count = mapfiles.write_mtz(
                args.mtz, whole, grid, plan.limit, blur=plan.blur, lines=lines
            )
        found |= {"mtz": args.mtz, "resolution_angstrom": plan.limit, "reflections": count}
    if args.picture:
        title = _title(report, dict(plan.structure.gemmi.info).get("_entry.id") or name)
        with timed(seconds, "picture"):
            draw_slices(args.picture, grid, plan.start, rho, plan.cuts, unit, title)
        found["picture"] = args.picture
    return found


def _title(report: dict[str, Any], entry: str) -> str:
    """Return the title of the picture, of one line."""
    entry = "".join(letter if letter.isprintable() else "?" for letter in entry)
    entry = entry if len(entry) <= 40 else f"{entry[:39]}…"
    blur = report["blur_angstrom2"]
    wider = f", B + {blur:.3g} Å²" if blur else ""
    voxels = f"voxels of {report['spacing_angstrom']:.3g} Å"
    return f"{entry}, {report['form_factors']}: {voxels}{wider}"


def _show_plan(args: argparse.Namespace, report: dict[str, Any], show: Any) -> None:
    charged, blur = report["charged"], report["blur_angstrom2"]
    neutral = f", {charged} charged ones as neutral" if charged else ""
    wider = f", B + {blur:.3g} Å² to suit the voxels" if blur and args.blur is None else ""
    show(
        f"{report['atoms']} atoms{neutral}, up to {report['largest_radius_angstrom']:g} Å far"
        f"{wider}"
    )
    group, available = report["spacegroup"], report["available_bytes"]
    lengths = " x ".join(f"{edge:.2f}" for edge in report["cell"][:3])
    sizes = " x ".join(map(str, report["shape"]))
    there = "" if available is None else f" of {available / 1e6:,.0f} that are available"
    memory = f"{report['memory_bytes'] / 1e6:,.1f} MB of memory{there}"
    show(f"{f'cell of {group}' if group else 'box'}, {lengths} Å: {sizes} voxels, {memory}")


def _show_results(args: argparse.Namespace, report: dict[str, Any], show: Any) -> None:
    unit, sum_unit = _UNITS[report["form_factors"]]
    show(
        f"{report['least']:.3g} to {report['largest']:.3g} {unit}, {report['integral']:.6g} "
        f"{sum_unit} in all, by {report['backend']}"
    )
    if args.like:
        value = report["correlation"]
        value = "unknown: a map is constant" if value is None else f"{value:.4f}"
        show(f"correlation with {args.like}: {value}")
    if args.mtz:
        show(f"{report['reflections']} reflections to {report['resolution_angstrom']:.4g} Å")
    show(", ".join(f"{name} {value:.3g} s" for name, value in report["seconds"].items()))
    show(f"wrote {' and '.join(filter(None, (args.out, args.mtz, args.picture)))}")
