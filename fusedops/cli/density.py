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
from dataclasses import replace
from typing import Any

import numpy as np

import fusedops
from fusedops import mapfiles, maps
from fusedops._frame import registry
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
    help = "make the spacing a third of this, as gemmi does; also the resolution of --mtz"
    option("--resolution", type=number(0.1, 100, "Å"), metavar="Å", help=help)
    help = "form factors for electron scattering (cryo-EM) instead of X-rays"
    option("--electron", action="store_true", help=help)
    help = "radius of all atoms (default: by --n-sigma)"
    reach("--radius", type=number(0.1, 100, "Å"), metavar="Å", help=help)
    help = "radius in σ of an atom's widest Gaussian, at least 2 Å (default: %(default)s)"
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
    name = "stdin" if args.file == "-" else os.path.basename(args.file)
    neutral = f" ({atoms.charged} charged ones as neutral)" if atoms.charged else ""
    lines = [
        f"fusedops {fusedops.__version__} density",
        f"model {name}",
        f"{len(atoms.xyz)} atoms{neutral}, {kind}, unit {unit}",
        f"spacing {spacing:.4g} Å, blur {blur:.6g} Å², radius {reach:g} Å at most",
    ]
    place = f"cell of {grid.spacegroup.xhm()}" if grid.spacegroup else "box"
    edges = " x ".join(f"{edge:.2f}" for edge in grid.cell.parameters[:3])
    voxels = f"{' x '.join(map(str, shape))} voxels, {grid.memory / 1e6:,.1f} MB of memory"
    for line in (*lines[2:], f"{place}, {edges} Å: {voxels}"):
        say(line)

    parts = min(10, math.ceil(len(atoms.xyz) / _STEP))
    backend: Any = registry.forced(args.backend)
    options = {"radius": args.radius, "n_sigma": args.n_sigma, "backend": backend, "parts": parts}
    with common.progress("placing atoms", parts) as advance, timed(seconds, "density"):
        whole = maps.density_map(atoms, grid, **options, advance=advance)
    ccp4 = target.part(whole) if target else whole
    rho = ccp4.grid.array
    least, largest = float(rho.min()), float(rho.max())
    if not math.isfinite(largest - least):
        raise CommandError(f"{args.file}: the density of its occupancies is too large for 32 bits")
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
        shown_name = "".join(letter if letter.isprintable() else "?" for letter in name[:40])
        title = f"{shown_name}, {kind}; {lines[-1]}"
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
        raise CommandError(
            f"{args.like or args.file}: spacing {spacing:g}: atoms reach {least:g} Å; it should be "
            f"at most {math.floor(100 * least / 3) / 100:g}, a third of that, or --radius larger"
        )
    margin = reach if args.margin is None else args.margin
    if target:
        grid = mapfiles.target_grid(target, structure)
    elif args.margin is None and maps.unit_cell(structure):
        grid = maps.crystal_grid(structure, spacing)
    elif margin < reach:
        should = f"atoms reach {reach:g} Å; it should be at least that, or --radius smaller"
        raise CommandError(f"--margin {margin:g}: {should}")
    else:
        grid = maps.box_grid(atoms.xyz, spacing, margin)
    voxels = math.prod(grid.shape)
    if voxels > args.max_voxels and not target:
        raise CommandError(
            f"--max-voxels {args.max_voxels}: the map has {voxels}, which need "
            f"{grid.memory / 1e9:.1f} GB of memory; it should be larger, or the spacing"
        )
    if reach > grid.largest_radius:
        raise CommandError(
            f"{args.file}: its atoms reach {reach:g} Å; these voxels allow at most "
            f"{grid.largest_radius:.4g} Å; the spacing should be larger, or --radius smaller"
        )
    return grid, atoms, spacing, blur, reach
