"""The ``fusedops`` command: each sub-command is one function and one block of its arguments."""

from __future__ import annotations

import argparse
import contextlib
import csv
import errno
import functools
import importlib
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import fusedops
from fusedops._frame.registry import BACKENDS, forced
from fusedops.planarity import FITS
from fusedops.structure import (
    PlanarGroups,
    Structure,
    StructureError,
    check_target,
    planar_groups,
    read_structure,
)

#: Atoms for each step of the bar of ``fusedops density``, of which there are ten at most: a step
#: costs an addition of two maps.
_STEP = 40_000


class CommandError(Exception):
    """A reason to end a command with one line on stderr and exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``fusedops`` command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments, those of the process by default.

    Returns
    -------
    int
        The exit code: 0, 1 where a check of the command failed, 2 where it couldn't do its work,
        which is then said in one line on stderr; 130 after Ctrl-C.

    Raises
    ------
    SystemExit
        With code 2 if the arguments are wrong, with 0 after ``--help``.

    Examples
    --------
    >>> main(["planarity", "no-such-file.pdb"])
    2
    """
    parser = argparse.ArgumentParser(prog="fusedops", description=fusedops.__doc__)
    parser.add_argument("--version", action="version", version=fusedops.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_info(commands)
    _add_check(commands)
    _add_bench(commands)
    _add_planarity(commands)
    _add_density(commands)
    with contextlib.ExitStack() as streams:
        if sys.stderr is None:  # closed by whoever started the process, as stdout may be
            nowhere = streams.enter_context(open(os.devnull, "w"))
            streams.enter_context(contextlib.redirect_stderr(nowhere))
        stdout: Any = _Stdout(sys.stdout)
        streams.enter_context(contextlib.redirect_stdout(stdout))
        try:
            try:
                args = parser.parse_args(argv)
                return args.run(args)
            finally:
                sys.stdout.flush()
        except (CommandError, StructureError, fusedops.BackendUnavailable, MemoryError) as error:
            reason = str(error) or "out of memory"
            reason = "; ".join(" ".join(line.split()) for line in reason.splitlines())
            print("fusedops:", reason, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


class _Stdout:
    """The stdout of a command, whose errors name it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            # The name of a file, or an Å, may be what the encoding of the terminal lacks.
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._named():
            if self._stream is None:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._named():
            if self._stream is not None:
                self._stream.flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._stream is not None:
                # Python must not try again, and complain, when it ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            # Who closed a pipe has seen enough, and still wants the files that are to be written.
            if not isinstance(error, BrokenPipeError):
                raise CommandError(f"stdout: {error.strerror}") from None


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="run every op on an example, on every backend that works here",
        description="Score ubiquitin's planes, convolve packed tokens, pass messages along edges, "
        "compare densities and fill in distances, all with gradients, on every backend that works "
        "here; check each against the reference, and draw a picture. Exit code 1 if a check fails.",
    )
    parser.set_defaults(run=_demo)
    parser.add_argument(
        "--picture",
        default="fusedops-demo.png",
        metavar="PNG",
        help="where to draw (default: %(default)s)",
    )


def _demo(args: argparse.Namespace) -> int:
    _needs("gemmi", "structure")
    _needs("rich", "cli")
    _needs("matplotlib", "cli")
    _needs("scipy", "cli")
    from fusedops import demo, maps

    maps.check_picture_name(args.picture)
    passed = demo.run(Path(args.picture), _print_demo)
    print(f"Picture: {args.picture}")
    print("Every result agrees with the reference." if passed else "A CHECK FAILED.")
    return 0 if passed else 1


def _print_demo(rows: list[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Value and gradient, float64", box=box.SIMPLE_HEAD)
    for heading in ("op", "backend", "why"):
        table.add_column(heading)
    for heading in ("ms", "error", "check"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.errors is None:
            table.add_row(row.op, row.backend, row.why, "-", "-", "-", style="dim")
            continue
        table.add_row(
            row.op,
            row.backend,
            row.why,
            f"{row.milliseconds:.3f}",
            f"{max(row.errors.values()):.1e}",
            "FAILED" if row.failed else "ok",
            style="red" if row.failed else "bold" if row.chosen else None,
        )
    Console(highlight=False).print(table)


def _add_info(commands: Any) -> None:
    parser = commands.add_parser(
        "info", help="what this machine offers: backends, instruction set, threads, GPUs"
    )
    parser.set_defaults(run=_info)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _info(args: argparse.Namespace) -> int:
    found = fusedops.info()
    print(json.dumps(asdict(found), indent=1) if args.json else found)
    return 0


def _add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="check every op on every backend that works here",
        description="The self-test after an installation: every op, forward and gradient, on every "
        "backend that works here, against the NumPy reference. Exit code 1 if one is wrong.",
    )
    parser.set_defaults(run=_check)
    _add_choice(parser)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the commands that run ops on backends of a device."""
    names = [backend.name for backend in BACKENDS]
    parser.add_argument(
        "--backend", nargs="+", action="extend", choices=names, metavar="NAME", help="only these"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="the device (default: %(default)s)"
    )


def _check(args: argparse.Namespace) -> int:
    from fusedops import selfcheck

    devices = (args.device,) if args.device else ("cpu", "cuda")
    if args.device == "cuda":
        _needs_gpu()
    rows = []
    with _progress("checking", selfcheck.steps(devices, args.backend)) as advance:
        for row in selfcheck.run(devices, args.backend):
            rows.append(row)
            advance()
    selfcheck.show(rows)
    failed = [row for row in rows if row.failed]
    checked = [row for row in rows if row.errors]
    if failed:
        print(f"{len(failed)} OF {len(failed) + len(checked)} CHECKS FAILED.")
    elif not checked:
        raise CommandError("nothing could be checked: see the reasons above")
    else:
        print(f"All {len(checked)} checks passed.")
    return 1 if failed else 0


def _needs_gpu() -> None:
    _needs("torch", "gpu")
    import torch

    if not torch.cuda.is_available():
        raise CommandError("torch sees no GPU")


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time every op beside its peers and the floors of the machine",
        description="Time calls as real programs make them, on every backend with kernels, beside "
        "peers that are installed, and beside the least time that bytes, products and exponentials "
        "take on this machine. A kernel that is wrong is not timed. Exit code 1 if one is, or if "
        "something got slower than before.",
    )
    parser.set_defaults(run=_bench)
    _add_choice(parser)
    parser.set_defaults(device="cpu")
    parser.add_argument(
        "--op", nargs="+", action="extend", metavar="NAME", help="only these ops, or modules"
    )
    parser.add_argument("--quick", action="store_true", help="small cases, about a minute")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the results, in a file that is there in place of those of the same ops",
    )
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="say what got slower since then"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the results as SVG there")
    parser.add_argument(
        "--from",
        dest="files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing, but compare and draw the results in these files",
    )


def _bench(args: argparse.Namespace) -> int:
    from fusedops.bench import report

    if args.plot:
        _needs("matplotlib", "cli")
    if args.files and args.json:
        raise CommandError(f"--json {args.json}: --from measures nothing that could be written")
    try:
        old = report.read(args.compare) if args.compare else None
        if args.files:
            reports = [report.read(path) for path in args.files]
        else:
            reports = [_measure(args, report)]
    except report.ReportError as error:
        raise CommandError(str(error)) from None
    wrong = [row for each in reports for row in report.refused(each)]
    slower = []
    if old:
        changes = [change for each in reports for change in report.compared(each, old)]
        report.show_changes(changes)
        slower = [change for change in changes if change.slower]
        print(f"{len(slower)} of {len(changes)} cases are slower than their spreads explain.")
    if args.plot:
        from fusedops.bench import plot

        try:
            for path in plot.draw(reports, args.plot):
                print(f"Picture: {path}")
        except OSError as error:
            raise CommandError(f"{args.plot}: {error.strerror or error}") from None
    if wrong:
        who = sorted({f"{row['op']} by {row['who']}" for row in wrong})
        print(f"NOT TIMED, because wrong: {', '.join(who)}.")
    return 1 if wrong or slower else 0


def _measure(args: argparse.Namespace, report: Any) -> dict[str, Any]:
    """Return what was measured now, which is in the file with all that the file had."""
    from fusedops.bench import measure

    for name in args.op or []:
        if name not in measure.op_names():
            raise CommandError(f"--op {name}: it should be one of {', '.join(measure.op_names())}")
    if args.device == "cuda":
        _needs_gpu()
    plan = measure.Plan(args.device, tuple(args.op or ()), tuple(args.backend or ()), args.quick)
    # A file that can't be added to is known before the work, not after it.
    if args.json:
        try:
            args.json.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"{args.json.parent}: {error.strerror}") from None
        check_target(args.json)
    kept, found = report.start(args.json, args.device), report.new(args.device)
    blocks = {}
    with _progress("measuring", plan.steps) as advance:
        bench = measure.Bench(plan, advance)
        for op, block in bench.run():
            blocks[op] = found["ops"][op] = block
            if args.json:
                kept["ops"] |= blocks
                report.save(args.json, kept)
    for op, block in blocks.items():
        report.show(op, block)
    return found


def _add_planarity(commands: Any) -> None:
    parser = commands.add_parser(
        "planarity",
        help="score the planar groups of a structure, and flatten them",
        description="Score the peptide planes, planar side chains and bases of a PDB or mmCIF "
        "file. Z is the largest distance of an atom from its plane over its sigma of 0.02 Å.",
    )
    parser.set_defaults(run=_planarity)
    parser.add_argument("file", metavar="FILE", help="PDB or mmCIF, also gzipped")
    parser.add_argument(
        "--top",
        type=_number(int, 1),
        metavar="N",
        help="how many of the worst planes to show (default: 10; all with --json or --csv)",
    )
    parser.add_argument("--fit", choices=FITS, default="uniform", help="how planes are fitted")
    parser.add_argument(
        "--backend", choices=[backend.name for backend in BACKENDS], help="which must compute it"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    form.add_argument("--csv", action="store_true", help="print the planes as CSV")
    parser.add_argument(
        "--flatten",
        metavar="OUT",
        help="write the structure (.pdb or .cif, also .gz) after some steps of L-BFGS on the "
        "restraint and a harmonic tether to where the atoms were; hydrogens stay where they are",
    )
    parser.add_argument(
        "--steps",
        type=_number(int, 1),
        default=20,
        metavar="N",
        help="most steps of --flatten (default: %(default)s)",
    )
    parser.add_argument(
        "--tether",
        type=_number(float, 0, unit="1/Å²"),
        default=25.0,
        metavar="K",
        help="strength of the tether K/2 |x - x0|² in 1/Å² (default: %(default)s, which lets an "
        "atom move by 0.2 Å at the cost of one sigma)",
    )


def _number(
    kind: type, least: float, most: float = math.inf, unit: str = ""
) -> Callable[[str], float]:
    """Return what argparse reads a finite number with, `unit` included in what it says."""
    what = f"a {'whole ' if kind is int else ''}number of "
    what += f"at least {least:g}" if most == math.inf else f"{least:g} to {most:,.0f}"
    what += f", in {unit}" if unit else ""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and value < math.inf):
            raise argparse.ArgumentTypeError(f"{text!r} should be {what}")
        return value

    return parse


def _check_other(option: str, path: str, source: str) -> None:
    """Raise CommandError if an output is the input, by whatever name."""
    if os.path.exists(path) and os.path.samefile(path, source):
        raise CommandError(f"{option} {path}: it is the input {source}; it should be another file")


def _planarity(args: argparse.Namespace) -> int:
    _needs("gemmi", "structure")
    machine = args.json or args.csv
    if not machine:
        _needs("rich", "cli")
    if args.flatten:
        _needs("scipy", "cli")
    seconds: dict[str, float] = {}
    with _timed(seconds, "read"):
        structure = read_structure(args.file)
    if args.flatten:
        structure.check_writable(args.flatten)
        _check_other("--flatten", args.flatten, args.file)
    with _timed(seconds, "find_planes"):
        found = planar_groups(structure)
    restraint = _Restraint(found, args.fit, args.backend)
    nll, _ = restraint(structure.xyz)
    # The first call also loads the backend.
    with _timed(seconds, "value_and_gradient"):
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
        self.options = {"fit": fit, "backend": _forced(backend)}

    def __call__(self, xyz: np.ndarray) -> tuple[float, np.ndarray]:
        value, pullback = fusedops.planarity_nll.vjp(xyz, self.planes, **self.options)
        return float(value), pullback(1.0)[0]

    def backend(self, xyz: np.ndarray) -> str | None:
        return fusedops.planarity_nll.explain(xyz, self.planes, **self.options).backend


def _scores(structure: Structure, found: PlanarGroups, xyz: np.ndarray, fit: str) -> list[_Plane]:
    """Return the planes, the worst first."""
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
    with _progress("flattening", args.steps) as advance, _timed(seconds, "minimise"):
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
        skipped[5:] = [f"{len(skipped) - 5} more kinds"]
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


def _add_density(commands: Any) -> None:
    parser = commands.add_parser(
        "density",
        help="calculate the density map of a structure",
        description="Calculate the electron density, or the potential for electrons, of a PDB or "
        "mmCIF file, and write it as a CCP4 map: of the unit cell with its symmetry, or, where the "
        "file has no cell, of a box around the atoms.",
    )
    parser.set_defaults(run=_density)
    parser.add_argument("file", metavar="MODEL", help="PDB or mmCIF, also gzipped")
    parser.add_argument(
        "--out", required=True, metavar="MAP", help="where to write (.ccp4, .map or .mrc)"
    )
    parser.add_argument(
        "--spacing",
        type=_number(float, 0.01, 100, "Å"),
        default=0.5,
        metavar="Å",
        help="largest distance of voxels (default: %(default)s)",
    )
    parser.add_argument(
        "--electron",
        action="store_true",
        help="form factors of electron scattering, for cryo-EM, in place of those of X-rays",
    )
    reach = parser.add_mutually_exclusive_group()
    reach.add_argument(
        "--radius", type=_number(float, 0.1, 100, "Å"), metavar="Å", help="how far atoms reach"
    )
    reach.add_argument(
        "--n-sigma",
        type=_number(float, 0.1, 100),
        default=4.0,
        metavar="S",
        help="the same in standard deviations of an atom's widest Gaussian, within 2 to 7 Å "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--margin",
        type=_number(float, 0, 1e6, "Å"),
        metavar="Å",
        help="make a box that ends so far from the outermost atoms, whether or not the file has a "
        "cell (default where it has none: as far as atoms reach, which is also the least)",
    )
    parser.add_argument(
        "--blur",
        type=_number(float, 0, 1e6, "Å²"),
        metavar="Å²",
        help="add to all B (default: what the sharpest atom lacks to be seen by the voxels, "
        "B = 72 spacing²)",
    )
    parser.add_argument(
        "--backend", choices=[backend.name for backend in BACKENDS], help="which must compute it"
    )
    parser.add_argument("--picture", metavar="PNG", help="draw the three slices in the middle")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _density(args: argparse.Namespace) -> int:
    _needs("gemmi", "structure")
    from fusedops import maps

    maps.check_map_name(args.out)
    if args.picture:
        _needs("matplotlib", "cli")
        maps.check_picture_name(args.picture)
    report = _make_map(args, maps)
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
    """Raise CommandError where atoms end before voxels see them, or where most of them do."""
    least = args.radius or float(radius.min())
    if args.spacing > least / 3:
        raise CommandError(
            f"--spacing {args.spacing:g}: voxels so far apart don't sample atoms, which reach "
            f"{least:g} Å; it should be at most {math.floor(100 * least / 3) / 100:g}, a third of "
            "that, or --radius larger"
        )
    b = atoms.median_b
    # Of a Gaussian, 2.5 standard deviations hold nine tenths.
    needed = min(2.5, args.n_sigma) * math.sqrt(b / (8 * math.pi**2))
    if args.radius is None and radius.max() < needed:
        raise CommandError(
            f"{args.file}: half of its atoms have a B of {b:.4g} Å² or more, and reach "
            f"{radius.max():g} Å; it should be smaller, or --radius at least {math.ceil(needed)} "
            f"(a blur adds {blur:.4g} Å² to the sharpest atom's {atoms.least_b - blur:.4g} Å²)"
        )


def _make_map(args: argparse.Namespace, maps: Any) -> dict[str, Any]:
    show = (lambda line: None) if args.json else functools.partial(print, flush=True)
    seconds: dict[str, float] = {}
    with _timed(seconds, "read"):
        structure = read_structure(args.file)
        _check_other("--out", args.out, args.file)
        if args.picture:
            _check_other("--picture", args.picture, args.file)
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
    backend = _forced(args.backend)
    with _progress("placing atoms", parts) as advance, _timed(seconds, "density"):
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
    with _timed(seconds, "write"):
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
        with _timed(seconds, "picture"):
            maps.draw_slices(args.picture, grid, rho, unit)
        report["picture"] = args.picture
    report["seconds"] = seconds
    show(
        f"{report['least']:.3g} to {report['largest']:.3g} {unit}, {report['integral']:.6g} "
        f"{sum_unit} in all, by {report['backend']}"
    )
    show(", ".join(f"{name} {value:.3g} s" for name, value in seconds.items()))
    show(f"wrote {args.out}" + (f" and {args.picture}" if args.picture else ""))
    return report


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = perf_counter()
    yield
    seconds[name] = perf_counter() - start


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Yield what to call after each of `total` steps; a bar on stderr shows it to a person.

    It may be told what comes next. Without rich there is none.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda what="": None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda what=title: bar.update(task, advance=1, description=what)


def _forced(backend: str | None) -> str | None:
    try:
        return forced(backend)
    except ValueError as error:
        raise CommandError(error) from None


def _needs(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise CommandError(f'{package} is not installed: pip install "fusedops[{extra}]"')
