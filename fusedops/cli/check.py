"""Check every op on every backend that works here.

The self-test after an installation: every op, forward and gradient, on every backend that works
here, against the NumPy reference. Exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Example, Problem, calls, steps_of
from fusedops._frame import registry
from fusedops.cli import common, tables
from fusedops.testing import errors_of

HEADINGS = ("op", "backend", "with", "why not", "value", "gradient", "of allowed", "s", "")


def add(parser: argparse.ArgumentParser) -> None:
    common.add_choice(parser)


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda":
        common.needs_gpu()
    found = fusedops.info().backends
    usable: list[registry.Backend] = []
    absent: list[tables.Row] = []
    for backend in registry.BACKENDS:
        names = args.backend or [backend.name]
        if backend.name not in names or args.device not in (None, device_of(backend)):
            continue
        if why := found[backend.name].why_not:
            absent.append((["every op", backend.name, "", why, "", "", "", "", "-"], "dim"))
        else:
            usable.append(backend)
    rows: list[tables.Row] = []
    with common.progress("checking", len(calls()) * len(usable)) as advance:
        for (op, examples), backend in itertools.product(calls().items(), usable):
            rows.append(checked(op, examples, backend))
            advance()
    tables.show("Errors against the reference, relative", HEADINGS, [*rows, *absent], right=5)
    if not rows:
        raise common.CommandError("nothing could be checked: see the reasons above")
    failed, count = tables.failures(rows), len(rows)
    print(f"{failed} OF {count} CHECKS FAILED." if failed else f"All {count} checks passed.")
    return 1 if failed else 0


def device_of(backend: registry.Backend) -> str:
    """Return the device on which a backend is checked."""
    return "cuda" if backend.name == "triton" else "cpu"


def checked(op: Any, examples: Sequence[Example], backend: registry.Backend) -> tables.Row:
    """Return the row of an op on a backend: the largest errors of its examples, and of tolerances.

    The examples run forward and with their gradients, in all frameworks and dtypes.
    """
    start, ways, why, share = time.perf_counter(), _ways(op, backend), "", 0.0
    errors: dict[str, float] = {}
    each = [(framework, dtype) for framework, dtypes in ways.items() for dtype in dtypes]
    try:
        for (framework, dtype), example in itertools.product(each, examples):
            # A division by zero shows in the error, so NumPy's warning is not needed.
            with np.errstate(all="ignore"):
                _, found = compared(example.problem("large"), backend, framework, dtype)
            for name, off in found.items():
                part = off / example.tolerance(dtype)
                errors[name], share = max(off, errors.get(name, 0.0)), max(part, share)
                if not part <= 1:
                    why = f"{example}, {framework} {dtype}: {name} off by {off:.1e}"
    except Exception as error:  # every error belongs into the table
        why = f"{example}: {type(error).__name__}: {error}".partition("\n")[0]
    where = "; ".join(f"{name} {' '.join(dtypes)}" for name, dtypes in ways.items())
    cells = [op.__name__, backend.name, where.replace("float", "f"), why]
    cells += [f"{errors[k]:.0e}" if k in errors else "" for k in ("value", "gradient")]
    cells += [f"{share:.0%}", f"{time.perf_counter() - start:.1f}", "FAILED" if why else "ok"]
    return cells, "red" if why else None


def compared(
    exact: Problem, backend: registry.Backend, framework: str, dtype: str
) -> tuple[Problem, dict[str, float]]:
    """Return a problem with a framework's arrays, and the errors of its values and gradients."""
    given = exact.to(device_of(backend), dtype) if framework == "torch" else exact.astype(dtype)
    return given, errors_of(
        exact, given, given.cotangents, lambda call, back: steps_of(call, backend.name, back)
    )


def _ways(op: Any, backend: registry.Backend) -> dict[str, list[str]]:
    """Return the dtypes to check a backend in, by framework."""
    compiles = backend.name in ("numba", "triton")
    dtypes = ["float32"] if compiles else ["float32", "float64"]
    ways = {"NumPy": dtypes} if backend.speaks == "numpy" else {}
    if not registry.import_error("torch"):
        narrow = op.primitive.sixteen_bits and backend.name != "numba"
        ways["torch"] = [*dtypes, *["bfloat16"] * narrow]
    return ways
