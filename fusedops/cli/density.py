"""Calculate the density map of a structure.

Calculate the electron density, or the potential for electrons, of a PDB, mmCIF or small-molecule
CIF file, and write it as a CCP4 map: of the unit cell with its symmetry or, if the file has no
cell, of a box around the atoms.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import fusedops
from fusedops import mapfiles, maps
from fusedops.cli import common, pictures, tables
from fusedops.cli.common import CommandError, number, timed
from fusedops.structure import Structure

#: Atoms in each step of the progress bar. There are at most ten steps, since each costs an
#: addition of two maps.
_STEP = 40_000


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("file", metavar="MODEL", help="PDB or CIF, also gzipped; - reads standard input")
    option("--out", required=True, metavar="MAP", help="output file (.ccp4, .map or .mrc)")
    sampling, reach = (parser.add_mutually_exclusive_group().add_argument for _ in range(2))
    help = "largest distance between voxels (default: 0.5, or by --resolution)"
    sampling("--spacing", type=number(0.01, 100, "Å"), metavar="Å", help=help)
    help = "take grid, cell, extent and origin of this CCP4 map, and print the correlation with it"
    sampling("--like", metavar="MAP", help=help)
    help = "make the spacing a third of this, as gemmi does; --blur follows from the spacing. "
    help += "Also the resolution of --mtz"
    option("--resolution", type=number(0.1, 100, "Å"), metavar="Å", help=help)
    help = "form factors for electron scattering (cryo-EM) instead of X-rays"
    option("--electron", action="store_true", help=help)
    help = "radius of all atoms (default: by --n-sigma)"
    reach("--radius", type=number(0.1, 100, "Å"), metavar="Å", help=help)
    help = "radius in standard deviations of an atom's widest Gaussian, at least 2 Å "
    help += "(default: %(default)s)"
    reach("--n-sigma", type=number(0.1, 100), metavar="S", default=4.0, help=help)
    help = "make a box with this margin around the atoms, even if the file has a cell "
    help += "(default without a cell, and the least allowed: the largest radius of an atom)"
    option("--margin", type=number(0, 1e6, "Å"), metavar="Å", help=help)
    help = "increase of all B (default: raises the smallest B to 72 spacing²)"
    option("--blur", type=number(0, 1e6, "Å²"), metavar="Å²", help=help)
    help = "refuse a larger map (default: %(default)s, of 4 GB); --like has no limit"
    option("--max-voxels", type=number(1, kind=int), metavar="N", default=500_000_000, help=help)
    common.add_backend(parser)
    help = "also write the structure factors of the map, H K L FC PHIC, with the blur taken back "
    help += "out, to --resolution or, by default, to twice the spacing, the limit of the grid"
    option("--mtz", metavar="FILE", help=help)
    help = "draw the three slices in the middle, with contours, in any format of Matplotlib"
    option("--picture", metavar="PNG", help=help)
    help = "draw this slice instead: across x, y or z (along a, b or c), at a fraction of the "
    help += "map's edge, as in z=0.25, or at a position, as in z=12.5Å or z=12.5A; may be repeated"
    option("--slice", action="append", type=pictures.slice_of_text, metavar="AXIS=WHERE", help=help)
    option("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    common.needs("gemmi", *["matplotlib"] * bool(args.picture))
    _check_options(args)
    say = (lambda line: None) if args.json else tables.write
    seconds: dict[str, float] = {}
    with timed(seconds, "read"):
        structure = common.read_model(args.file)
        target = mapfiles.read_map(args.like) if args.like else None
        _warn(args, structure)
        atoms = maps.scattering_atoms(structure, electron=args.electron)
    grid, atoms, spacing, blur, reach = _planned(args, structure, target, atoms)
    limit = args.resolution or 2 * mapfiles.largest_spacing(grid)
    if args.mtz:
        mapfiles.check_reflections(args.mtz, grid, limit, blur)
    shape, shown = grid.shape, grid
    if target:
        shape, shown = target.rho.shape, replace(grid, start=target.start)
    cuts = pictures.slices(args.slice, shown, shape) if args.picture else []

    kind, unit, sum_unit = "X-rays", "e/Å³", "electrons"
    if args.electron:
        kind, unit, sum_unit = "electrons", "1/Å²", "Å"
    report: dict[str, Any] = {
        "file": args.file,
        "atoms": len(atoms.xyz),
        "charged": atoms.charged,
        "form_factors": kind,
        "spacing_angstrom": spacing,
        "blur_angstrom2": blur,
        "largest_radius_angstrom": reach,
        "cell": grid.cell.parameters,
        "spacegroup": grid.spacegroup.xhm() if grid.spacegroup else None,
        "shape": shape,
        "start": shown.start,
        "memory_bytes": grid.memory,
        "available_bytes": maps.available_memory(),
        "seconds": seconds,
    }
    for line in _about(report, raised=args.blur is None):
        say(line)

    parts = min(10, math.ceil(report["atoms"] / _STEP))
    backend = common.forced_backend(args.backend)
    options = {"radius": args.radius, "n_sigma": args.n_sigma, "backend": backend, "parts": parts}
    with common.progress("placing atoms", parts) as advance, timed(seconds, "density"):
        whole = maps.density_map(atoms, grid, **options, advance=advance)
    ccp4 = target.part(whole) if target else whole
    rho = ccp4.grid.array
    least, largest = float(rho.min()), float(rho.max())
    if not math.isfinite(largest - least):
        raise CommandError(f"{args.file}: the density of its occupancies is too large for 32 bits")
    name = "stdin" if args.file == "-" else os.path.basename(args.file)
    lines = [
        f"fusedops {fusedops.__version__} density",
        f"model {name}",
        f"{report['atoms']} atoms, {kind}, unit {unit}",
        f"spacing {spacing:.4g} Å, blur {blur:.6g} Å², radius {reach:g} Å at most",
    ]
    mapfiles.set_labels(ccp4, lines)
    with timed(seconds, "write"):
        maps.write_map(args.out, ccp4)
    integral = float(rho.sum(dtype=np.float64)) * (grid.cell.volume / math.prod(grid.shape))
    served = maps.backend_of(atoms, grid, backend)
    say(f"{least:.3g} to {largest:.3g} {unit}, {integral:.6g} {sum_unit} in all, by {served}")
    report |= {"least": least, "largest": largest, "integral": integral}
    report |= {"backend": served, "map": args.out}
    if target:
        value = target.correlation(rho)
        report |= {"like": args.like, "correlation": value}
        told = "unknown: a map is constant" if value is None else f"{value:.4f}"
        say(f"correlation with {args.like}: {told}")
    if args.mtz:
        with timed(seconds, "mtz"):
            found = mapfiles.write_mtz(args.mtz, whole, grid, limit, blur=blur, lines=lines)
        report |= {"mtz": args.mtz, "resolution_angstrom": limit, "reflections": found}
        say(f"{found} reflections to {limit:.4g} Å")
    if args.picture:
        title = _title(dict(structure.gemmi.info).get("_entry.id") or name, report)
        with timed(seconds, "picture"):
            pictures.draw_slices(args.picture, shown, rho, cuts, unit, title)
        report |= {"picture": args.picture}
    say(common.times(seconds))
    say(f"wrote {' and '.join(filter(None, (args.out, args.mtz, args.picture)))}")
    if args.json:
        common.print_json(report)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raise an error, before any work, for options that can't be served."""
    outputs = {
        "out": maps.check_map_name,
        "picture": pictures.check_picture_name,
        "mtz": mapfiles.check_mtz_name,
    }
    for option, check in outputs.items():
        if path := getattr(args, option):
            check(path)
            common.check_other(f"--{option}", path, args.file, args.like)
    if args.slice and not args.picture:
        raise CommandError("--slice: it needs --picture")
    if args.like and args.margin is not None:
        raise CommandError(f"--margin {args.margin:g}: --like {args.like} has an extent of its own")


def _warn(args: argparse.Namespace, structure: Structure) -> None:
    """Note on stderr that a model by electrons gets form factors for X-rays."""
    method = dict(structure.gemmi.info).get("_exptl.method", "")
    if "ELECTRON" in method and "X-RAY" not in method and not args.electron:
        tables.write(
            f"fusedops: {args.file} is from {method.lower()} and gets form factors for X-rays; "
            "--electron takes form factors for electrons",
            file=sys.stderr,
        )


def _planned(
    args: argparse.Namespace,
    structure: Structure,
    target: mapfiles.MapTarget | None,
    atoms: maps.ScatteringAtoms,
) -> tuple[maps.MapGrid, maps.ScatteringAtoms, float, float, float]:
    """Return the grid, the blurred atoms, spacing, blur and largest radius, which go together."""
    spacing = args.spacing or (args.resolution / 3 if args.resolution else 0.5)
    if target:
        spacing = mapfiles.largest_spacing(target.grid)
    blur = atoms.needed_blur(spacing) if args.blur is None else args.blur
    atoms = atoms.blurred(blur)
    radius = atoms.radius(args.n_sigma)
    least, reach = (args.radius or float(end) for end in (radius.min(), radius.max()))
    if spacing > least / 3:
        option = f"--like {args.like}: spacing" if target else "--spacing"
        raise CommandError(
            f"{option} {spacing:g}: voxels so far apart don't sample atoms, which reach {least:g} "
            f"Å; it should be at most {math.floor(100 * least / 3) / 100:g}, a third of that, or "
            "--radius larger"
        )
    margin = reach if args.margin is None else args.margin
    if target:
        grid = mapfiles.target_grid(target, structure)
    elif args.margin is None and maps.unit_cell(structure):
        grid = maps.crystal_grid(structure, spacing)
    elif margin < reach:
        raise CommandError(
            f"--margin {margin:g}: atoms reach {reach:g} Å; it should be at least that, or "
            "--radius smaller"
        )
    else:
        grid = maps.box_grid(atoms.xyz, spacing, margin)
    voxels = math.prod(grid.shape)
    if voxels > args.max_voxels and not target:
        option = "--spacing" if args.spacing or not args.resolution else "--resolution"
        raise CommandError(
            f"{option} {args.spacing or args.resolution or spacing:g}: the map has "
            f"{voxels:,} voxels, more than --max-voxels {args.max_voxels:,}, and needs "
            f"{grid.memory / 1e9:.1f} GB of memory; {option} should be larger, or --max-voxels "
            f"{voxels}"
        )
    if reach > grid.largest_radius:
        raise CommandError(
            f"{args.file}: its atoms reach {reach:g} Å; these voxels allow at most "
            f"{grid.largest_radius:.4g} Å; the spacing should be larger, or --radius smaller"
        )
    return grid, atoms, spacing, blur, reach


def _about(report: dict[str, Any], raised: bool) -> Iterator[str]:
    """Yield lines about the atoms, whose B may be `raised` to suit the voxels, and the grid."""
    blur, available = report["blur_angstrom2"], report["available_bytes"]
    neutral = f", {report['charged']} charged ones as neutral" if report["charged"] else ""
    wider = f", B + {blur:.3g} Å² to suit the voxels" if blur and raised else ""
    reach = report["largest_radius_angstrom"]
    yield f"{report['atoms']} atoms{neutral}, up to {reach:g} Å far{wider}"
    group = report["spacegroup"]
    lengths = " x ".join(f"{edge:.2f}" for edge in report["cell"][:3])
    there = "" if available is None else f" of {available / 1e6:,.0f} that are available"
    yield (
        f"{f'cell of {group}' if group else 'box'}, {lengths} Å: "
        f"{' x '.join(map(str, report['shape']))} voxels, {report['memory_bytes'] / 1e6:,.1f} MB "
        f"of memory{there}"
    )


def _title(entry: str, report: dict[str, Any]) -> str:
    """Return one line about the map of an entry."""
    entry = "".join(letter if letter.isprintable() else "?" for letter in entry)
    entry = entry if len(entry) <= 40 else f"{entry[:39]}…"
    blur = report["blur_angstrom2"]
    title = f"{entry}, {report['form_factors']}: voxels of {report['spacing_angstrom']:.3g} Å"
    return f"{title}, B + {blur:.3g} Å²" if blur else title
