"""Run every op on an example, on every backend that works here.

Run every op on an example, with gradients, on every backend that works here; check each against the
reference, and draw pictures. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from collections.abc import Iterator
from pathlib import Path

import fusedops
from fusedops._catalogue import TOLERANCE, Example, calls, pictures, steps_of
from fusedops._frame import registry
from fusedops._info import Info
from fusedops.cli import check, common, tables
from fusedops.cli.pictures import check_picture_name, save_picture

#: Calls of which the demo shows the median time.
ROUNDS = 20


def add(parser: argparse.ArgumentParser) -> None:
    help = "where to draw; a single op is in picture-planarity.png (default: %(default)s)"
    parser.add_argument("--picture", default="fusedops-demo.png", metavar="PNG", help=help)


def run(args: argparse.Namespace) -> int:
    common.needs("gemmi", "matplotlib", "scipy")
    check_picture_name(args.picture)
    info = fusedops.info()
    lines: list[tables.Row] = []
    with common.progress("checking", len(calls())) as advance:
        for op, (example, *_) in calls().items():
            lines += rows(example, info)
            advance(op.__name__)
    headings = ("op", "backend", "why", "ms", "error", "check")
    tables.show("Value and gradient, float64", headings, lines, right=3)
    draw(Path(args.picture))
    print(f"Picture: {args.picture}, and one of each op beside it")
    failed = tables.failures(lines)
    print("A CHECK FAILED." if failed else "Every result agrees with the reference.")
    return 1 if failed else 0


def rows(example: Example, info: Info) -> Iterator[tables.Row]:
    """Yield a table's row of every backend, with the time of values and gradients."""
    op, exact = example.op, example.problem("medium")
    gpu = info.gpus and not info.backends["triton"].why_not
    best = op.explain(**(exact.to("cuda", "float64") if gpu else exact).arguments).backend
    for backend in registry.BACKENDS:
        if reason := info.backends[backend.name].why_not:
            yield [op.__name__, backend.name, reason, "-", "-", "-"], "dim"
            continue
        given, errors = check.compared(exact, backend, backend.speaks, "float64")
        *_, last = steps_of(given, backend.name, given.cotangents).values()
        off, chosen = max(errors.values()), backend.name == best
        failed = not off <= TOLERANCE["float64"]
        first = f"chosen, the first that can serve on the {'GPU' if gpu else 'CPU'}"
        cells = [op.__name__, backend.name, first if chosen else "works too"]
        seconds = statistics.median(timeit.repeat(last, number=1, repeat=ROUNDS))
        cells += [f"{1e3 * seconds:.3f}", f"{off:.1e}", "FAILED" if failed else "ok"]
        yield cells, "red" if failed else "bold" if chosen else None


def draw(path: Path) -> None:
    """Draw all pictures into one file, and each into a file beside it."""
    from matplotlib.figure import Figure

    every = pictures()
    together = Figure(figsize=(13, 6 * len(every)), layout="constrained")
    panels = together.subfigures(len(every), 1, squeeze=False)[:, 0]
    for (name, picture), panel in zip(every.items(), panels, strict=True):
        print(f"{name}: {picture.__doc__}", file=sys.stderr, flush=True)
        alone = Figure(figsize=(13, 6), layout="constrained")
        for figure in (panel, alone):
            figure.suptitle(picture.__doc__)
            picture(figure)
        save_picture(path.with_stem(f"{path.stem}-{name}"), alone)
    print("Drawing", file=sys.stderr, flush=True)
    save_picture(path, together)
