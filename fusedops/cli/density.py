"""``fusedops density``: calculate the density map of a structure."""

from __future__ import annotations

import argparse
import functools
import json
import math
from typing import Any

import numpy as np

from fusedops import maps
from fusedops._frame.registry import BACKENDS
from fusedops.cli.common import (
    CommandError,
    check_other,
    forced_backend,
    needs,
    number,
    progress,
    timed,
)
from fusedops.cli.pictures import check_picture_name, draw_slices
from fusedops.structure import read_structure

#: Atoms in each step of the progress bar. There are at most ten steps, since each costs an
#: addition of two maps.
_STEP = 40_000


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "density",
        help="calculate the density map of a structure",
        description="Calculate the electron density, or the potential for electrons, of a PDB or "
        "mmCIF file, and write it as a CCP4 map: of the unit cell with its symmetry or, if the "
        "file has no cell, of a box around the atoms.",
    )
    parser.set_defaults(run=_command)
    parser.add_argument("file", metavar="MODEL", help="PDB or mmCIF, also gzipped")
    parser.add_argument(
        "--out", required=True, metavar="MAP", help="output file (.ccp4, .map or .mrc)"
    )
    parser.add_argument(
        "--spacing",
        type=number(float, 0.01, 100, "Å"),
        default=0.5,
        metavar="Å",
        help="largest distance between voxels (default: %(default)s)",
    )
    parser.add_argument(
        "--electron",
        action="store_true",
        help="form factors for electron scattering (cryo-EM) instead of X-rays",
    )
    reach = parser.add_mutually_exclusive_group()
    reach.add_argument(
        "--radius", type=number(float, 0.1, 100, "Å"), metavar="Å", help="radius of all atoms"
    )
    reach.add_argument(
        "--n-sigma",
        type=number(float, 0.1, 100),
        default=4.0,
        metavar="S",
        help="radius in standard deviations of an atom's widest Gaussian, within 2 to 7 Å "
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
        "--backend",
        choices=[backend.name for backend in BACKENDS],
        help="the backend that must compute it",
    )
    parser.add_argument("--picture", metavar="PNG", help="draw the three slices in the middle")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _command(args: argparse.Namespace) -> int:
    needs("gemmi", "structure")
    maps.check_map_name(args.out)
    if args.picture:
        needs("matplotlib", "cli")
        check_picture_name(args.picture)
    report = _make_map(args)
    if args.json:
        print(json.dumps(report, indent=1, allow_nan=False))
    return 0


def _margin(asked: float | None, reach: float) -> float:
    if asked is None:
        return reach
    if asked < reach:
        raise CommandError(
            f"--margin {asked:g}: atoms reach {reach:g} Å; it should be at least that, or "
            "--radius smaller"
        )
    return asked


def _check_reach(args: argparse.Namespace, atoms: Any, blur: float, radius: np.ndarray) -> None:
    """Raise CommandError if voxels are too coarse for the radius, or the radius cuts B off."""
    least = args.radius or float(radius.min())
    if args.spacing > least / 3:
        raise CommandError(
            f"--spacing {args.spacing:g}: voxels so far apart don't sample atoms, which reach "
            f"{least:g} Å; it should be at most {math.floor(100 * least / 3) / 100:g}, a third of "
            "that, or --radius larger"
        )
    b = atoms.median_b
    # A ball of 2.5 standard deviations holds nine tenths of a Gaussian.
    needed = min(2.5, args.n_sigma) * math.sqrt(b / (8 * math.pi**2))
    if args.radius is None and radius.max() < needed:
        raise CommandError(
            f"{args.file}: half of its atoms have a B of {b:.4g} Å² or more, and reach "
            f"{radius.max():g} Å; it should be smaller, or --radius at least {math.ceil(needed)} "
            f"(a blur adds {blur:.4g} Å² to the sharpest atom's {atoms.least_b - blur:.4g} Å²)"
        )


def _make_map(args: argparse.Namespace) -> dict[str, Any]:
    show = (lambda line: None) if args.json else functools.partial(print, flush=True)
    seconds: dict[str, float] = {}
    with timed(seconds, "read"):
        structure = read_structure(args.file)
        check_other("--out", args.out, args.file)
        if args.picture:
            check_other("--picture", args.picture, args.file)
        atoms = maps.scattering_atoms(structure, electron=args.electron)
    blur = args.blur
    if blur is None:
        blur = atoms.needed_blur(args.spacing)
    atoms = atoms.blurred(blur)
    radius = atoms.radius(args.n_sigma)
    reach = args.radius or float(radius.max())
    _check_reach(args, atoms, blur, radius)
    if args.margin is None and maps.unit_cell(structure):
        grid = maps.crystal_grid(structure, args.spacing)
    else:
        grid = maps.box_grid(atoms.xyz, args.spacing, _margin(args.margin, reach))
    symmetry = grid.spacegroup.xhm() if grid.spacegroup else None

    available = maps.available_memory()
    report = {
        "file": args.file,
        "atoms": len(atoms.xyz),
        "charged": atoms.charged,
        "form_factors": "electrons" if args.electron else "X-rays",
        "blur_angstrom2": blur,
        "largest_radius_angstrom": reach,
        "cell": list(grid.cell.parameters),
        "spacegroup": symmetry,
        "shape": list(grid.shape),
        "start": list(grid.start),
        "memory_bytes": grid.memory,
        "available_bytes": available,
    }
    neutral = f", {atoms.charged} charged ones as neutral" if atoms.charged else ""
    wider = f", B + {blur:.3g} Å² to suit the voxels" if blur and args.blur is None else ""
    show(f"{len(atoms.xyz)} atoms{neutral}, up to {reach:g} Å far{wider}")
    lengths = " x ".join(f"{edge:.2f}" for edge in grid.cell.parameters[:3])
    sizes = " x ".join(map(str, grid.shape))
    what = f"cell of {symmetry}" if symmetry else "box"
    there = "" if available is None else f" of {available / 1e6:,.0f} that are available"
    show(f"{what}, {lengths} Å: {sizes} voxels, {grid.memory / 1e6:,.1f} MB of memory{there}")

    parts = min(10, math.ceil(len(atoms.xyz) / _STEP))
    backend = forced_backend(args.backend)
    with progress("placing atoms", parts) as advance, timed(seconds, "density"):
        ccp4 = maps.density_map(
            atoms,
            grid,
            radius=args.radius,
            n_sigma=args.n_sigma,
            backend=backend,
            parts=parts,
            advance=advance,
        )
    rho = ccp4.grid.array
    least, largest = float(rho.min()), float(rho.max())
    if not math.isfinite(largest - least):
        raise CommandError(f"{args.file}: the density of its occupancies is too large for 32 bits")
    with timed(seconds, "write"):
        maps.write_map(args.out, ccp4)
    unit, sum_unit = ("1/Å²", "Å") if args.electron else ("e/Å³", "electrons")
    volume = grid.cell.volume / rho.size
    report |= {
        "least": least,
        "largest": largest,
        "integral": float(rho.sum(dtype=np.float64)) * volume,
        "backend": maps.backend_of(atoms, grid, backend),
        "map": args.out,
    }
    if args.picture:
        with timed(seconds, "picture"):
            draw_slices(args.picture, grid, rho, unit)
        report["picture"] = args.picture
    report["seconds"] = seconds
    show(
        f"{report['least']:.3g} to {report['largest']:.3g} {unit}, {report['integral']:.6g} "
        f"{sum_unit} in all, by {report['backend']}"
    )
    show(", ".join(f"{name} {value:.3g} s" for name, value in seconds.items()))
    show(f"wrote {args.out}" + (f" and {args.picture}" if args.picture else ""))
    return report
