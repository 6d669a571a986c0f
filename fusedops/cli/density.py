"""``fusedops density``: calculate the density map of a structure."""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any, NamedTuple

import numpy as np

import fusedops
from fusedops import mapfiles, maps
from fusedops.cli import tables
from fusedops.cli.common import (
    CommandError,
    Report,
    add_backend,
    add_number,
    check_other,
    forced_backend,
    needs,
    progress,
    read_model,
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
    option = parser.add_argument
    option("file", metavar="MODEL", help="PDB or CIF, also gzipped; - reads standard input")
    option("--out", required=True, metavar="MAP", help="output file (.ccp4, .map or .mrc)")
    sampling, reach = (parser.add_mutually_exclusive_group() for _ in range(2))
    help = "largest distance between voxels (default: 0.5, or by --resolution)"
    add_number(sampling, "--spacing", 0.01, 100, "Å", help=help)
    help = "take grid, cell, extent and origin of this CCP4 map, and print the correlation with it"
    sampling.add_argument("--like", metavar="MAP", help=help)
    help = "make the spacing a third of this, as gemmi does; --blur follows from the spacing. "
    add_number(parser, "--resolution", 0.1, 100, "Å", help=f"{help}Also the resolution of --mtz")
    help = "form factors for electron scattering (cryo-EM) instead of X-rays"
    option("--electron", action="store_true", help=help)
    add_number(reach, "--radius", 0.1, 100, "Å", help="radius of all atoms")
    help = "radius in standard deviations of an atom's widest Gaussian, at least 2 Å "
    help += "(default: %(default)s)"
    add_number(reach, "--n-sigma", 0.1, 100, metavar="S", default=4.0, help=help)
    help = "make a box with this margin around the atoms, even if the file has a cell "
    help += "(default without a cell, and the least allowed: the largest radius of an atom)"
    add_number(parser, "--margin", 0, 1e6, "Å", help=help)
    help = "increase of all B (default: raises the smallest B to 72 spacing²)"
    add_number(parser, "--blur", 0, 1e6, "Å²", help=help)
    help = "refuse a larger map (default: %(default)s, of 4 GB); --like has no limit"
    add_number(parser, "--max-voxels", 1, kind=int, metavar="N", default=500_000_000, help=help)
    add_backend(parser)
    help = "also write the structure factors of the map, H K L FC PHIC, with the blur taken back "
    help += "out, to --resolution or, by default, to twice the spacing, the limit of the grid"
    option("--mtz", metavar="FILE", help=help)
    help = "draw the three slices in the middle, with contours"
    option("--picture", metavar="PNG", help=help)
    help = "draw this slice instead: across x, y or z (along a, b or c), at a fraction of the "
    help += "map's edge, as in z=0.25, or at a position, as in z=12.5Å or z=12.5A; may be repeated"
    option("--slice", action="append", type=slice_of_text, metavar="AXIS=WHERE", help=help)
    option("--json", action="store_true", help="print the report as JSON")


class _Model(NamedTuple):
    """The structure in the file, and the map that its map should be like."""

    structure: Structure
    target: mapfiles.MapTarget | None
    atoms: maps.ScatteringAtoms


class _Plan(NamedTuple):
    """How the map is calculated; `limit` is the smallest d of reflections, Å."""

    grid: maps.MapGrid
    atoms: maps.ScatteringAtoms
    spacing: float
    blur: float
    reach: float
    limit: float


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
    report = Report(args.file, quiet=args.json)
    with report.timed("read"):
        model = _read(args)
    _calculate(args, model, _plan(args, model), report)
    if args.json:
        report.print_json()
    return 0


def _read(args: argparse.Namespace) -> _Model:
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
    return _Model(structure, target, maps.scattering_atoms(structure, electron=args.electron))


def _plan(args: argparse.Namespace, model: _Model) -> _Plan:
    """Return grid, blur and radius that go together, or raise CommandError."""
    spacing = args.spacing or (args.resolution / 3 if args.resolution else 0.5)
    if model.target:
        grid = mapfiles.target_grid(model.target, model.structure)
        spacing = mapfiles.largest_spacing(grid)
        maps.check_memory(math.prod(grid.shape))
    blur = model.atoms.needed_blur(spacing) if args.blur is None else args.blur
    atoms = model.atoms.blurred(blur)
    radius = atoms.radius(args.n_sigma)
    reach, least = args.radius or float(radius.max()), args.radius or float(radius.min())
    if spacing > least / 3:
        option = f"--like {args.like}: spacing" if args.like else "--spacing"
        raise CommandError(
            f"{option} {spacing:g}: voxels so far apart don't sample atoms, which reach {least:g} "
            f"Å; it should be at most {math.floor(100 * least / 3) / 100:g}, a third of that, or "
            "--radius larger"
        )
    if not model.target:
        grid = _own_grid(args, model.structure, atoms, spacing, reach)
    if reach > grid.largest_radius:
        raise CommandError(
            f"{args.file}: its atoms reach {reach:g} Å; these voxels allow at most "
            f"{grid.largest_radius:.4g} Å; the spacing should be larger, or --radius smaller"
        )
    limit = args.resolution or 2 * mapfiles.largest_spacing(grid)
    if args.mtz:
        mapfiles.check_reflections(args.mtz, grid, limit, blur)
    return _Plan(grid, atoms, spacing, blur, reach, limit)


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


def _calculate(args: argparse.Namespace, model: _Model, plan: _Plan, report: Report) -> None:
    """Calculate the map, write all files, and report on them."""
    atoms, grid, target = plan.atoms, plan.grid, model.target
    start, shape = (target.start, target.rho.shape) if target else (grid.start, grid.shape)
    cuts = slices(args.slice, grid, start, shape) if args.picture else []
    count, charged, spacing, blur = len(atoms.xyz), atoms.charged, plan.spacing, plan.blur
    kind, available = "electrons" if args.electron else "X-rays", maps.available_memory()
    group = grid.spacegroup.xhm() if grid.spacegroup else None
    report |= {
        "atoms": count,
        "charged": charged,
        "form_factors": kind,
        "spacing_angstrom": spacing,
        "blur_angstrom2": blur,
        "largest_radius_angstrom": plan.reach,
        "cell": list(grid.cell.parameters),
        "spacegroup": group,
        "shape": list(shape),
        "start": list(start),
        "memory_bytes": grid.memory,
        "available_bytes": available,
    }
    neutral = f", {charged} charged ones as neutral" if charged else ""
    wider = f", B + {blur:.3g} Å² to suit the voxels" if blur and args.blur is None else ""
    report.show(f"{count} atoms{neutral}, up to {plan.reach:g} Å far{wider}")
    lengths = " x ".join(f"{edge:.2f}" for edge in grid.cell.parameters[:3])
    there = "" if available is None else f" of {available / 1e6:,.0f} that are available"
    report.show(
        f"{f'cell of {group}' if group else 'box'}, {lengths} Å: {' x '.join(map(str, shape))} "
        f"voxels, {grid.memory / 1e6:,.1f} MB of memory{there}"
    )

    parts, backend = min(10, math.ceil(count / _STEP)), forced_backend(args.backend)
    options = {"radius": args.radius, "n_sigma": args.n_sigma, "backend": backend, "parts": parts}
    with progress("placing atoms", parts) as advance, report.timed("density"):
        whole = maps.density_map(atoms, grid, **options, advance=advance)
    ccp4 = target.part(whole) if target else whole
    rho = ccp4.grid.array
    least, largest = float(rho.min()), float(rho.max())
    if not math.isfinite(largest - least):
        raise CommandError(f"{args.file}: the density of its occupancies is too large for 32 bits")
    unit, sum_unit = _UNITS[kind]
    name = "stdin" if args.file == "-" else os.path.basename(args.file)
    lines = [
        f"fusedops {fusedops.__version__} density",
        f"model {name}",
        f"{count} atoms, {kind}, unit {unit}",
        f"spacing {spacing:.4g} Å, blur {blur:.6g} Å², radius {plan.reach:g} Å at most",
    ]
    mapfiles.set_labels(ccp4, lines)
    with report.timed("write"):
        maps.write_map(args.out, ccp4)
    integral = float(rho.sum(dtype=np.float64)) * (grid.cell.volume / math.prod(grid.shape))
    served = maps.backend_of(atoms, grid, backend)
    report |= {"least": least, "largest": largest, "integral": integral, "backend": served}
    report |= {"map": args.out}
    report.show(
        f"{least:.3g} to {largest:.3g} {unit}, {integral:.6g} {sum_unit} in all, by {served}"
    )
    if target:
        value = target.correlation(rho)
        report |= {"like": args.like, "correlation": value}
        told = "unknown: a map is constant" if value is None else f"{value:.4f}"
        report.show(f"correlation with {args.like}: {told}")
    if args.mtz:
        with report.timed("mtz"):
            found = mapfiles.write_mtz(args.mtz, whole, grid, plan.limit, blur=blur, lines=lines)
        report |= {"mtz": args.mtz, "resolution_angstrom": plan.limit, "reflections": found}
        report.show(f"{found} reflections to {plan.limit:.4g} Å")
    if args.picture:
        entry = dict(model.structure.gemmi.info).get("_entry.id") or name
        title = f"{_shortened(entry)}, {kind}: voxels of {spacing:.3g} Å"
        title += f", B + {blur:.3g} Å²" if blur else ""
        with report.timed("picture"):
            draw_slices(args.picture, grid, start, rho, cuts, unit, title)
        report |= {"picture": args.picture}
    report.show(", ".join(f"{what} {seconds:.3g} s" for what, seconds in report.seconds.items()))
    report.show(f"wrote {' and '.join(filter(None, (args.out, args.mtz, args.picture)))}")


def _shortened(entry: str) -> str:
    """Return the name of an entry for one line of a title."""
    entry = "".join(letter if letter.isprintable() else "?" for letter in entry)
    return entry if len(entry) <= 40 else f"{entry[:39]}…"
