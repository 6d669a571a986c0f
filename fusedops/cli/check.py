"""``fusedops check``: every op on every backend that works here, against the reference."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Example, Problem, calls, steps_of
from fusedops._frame import registry
from fusedops._info import BackendInfo
from fusedops.cli import common, tables
from fusedops.testing import errors_of


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        run=_command,
        help="check every op on every backend that works here",
        description="The self-test after an installation: every op, forward and gradient, on every "
        "backend that works here, against the NumPy reference. Exit code 1 if one is wrong.",
    )
    common.add_choice(parser)


def _command(args: argparse.Namespace) -> int:
    if args.device == "cuda":
        common.needs_gpu()
    rows = []
    backends = asked(args.device, args.backend)
    with common.progress("checking", len(calls()) * len(backends)) as advance:
        for row in run(backends):
            rows.append(row)
            advance()
    show(rows)
    failed = [row for row in rows if row.failed]
    checked = [row for row in rows if row.errors or row.failed]
    if failed:
        print(f"{len(failed)} OF {len(checked)} CHECKS FAILED.")
    elif not checked:
        raise common.CommandError("nothing could be checked: see the reasons above")
    else:
        print(f"All {len(checked)} checks passed.")
    return 1 if failed else 0


@dataclass
class Row:
    """The result of checking an op on a backend, or the reason `why` it wasn't checked.

    `errors` are the largest errors in all runs, and `share` the largest part of a tolerance.
    """

    op: str
    backend: str
    why: str = ""
    where: list[tuple[str, str]] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    share: float = 0.0
    failed: bool = False
    seconds: float = 0.0


def asked(device: str | None, names: Sequence[str] | None) -> list[registry.Backend]:
    """Return the backends of a device, or of all, that are named, or all."""
    return [
        backend
        for backend in registry.BACKENDS
        if (not names or backend.name in names) and device in (None, device_of(backend))
    ]


def device_of(backend: registry.Backend) -> str:
    """Return the device on which a backend is checked."""
    return "cuda" if backend.name == "triton" else "cpu"


def run(backends: Sequence[registry.Backend]) -> Iterator[Row]:
    """Yield a row for every op on some backends.

    The examples of each op run forward and with their gradients, with NumPy arrays and, if torch is
    installed, with tensors. They run in float64 too unless that needs a compilation.
    """
    found = fusedops.info().backends
    for op, examples in calls().items():
        for backend in backends:
            start = time.perf_counter()
            row = _checked(op, examples, backend, found)
            row.seconds = time.perf_counter() - start
            yield row


def _checked(
    op: Any, examples: list[Example], backend: registry.Backend, found: dict[str, BackendInfo]
) -> Row:
    row = Row(op.__name__, backend.name, found[backend.name].why_not or "")
    if row.why:
        return row
    for framework, dtype in _ways(op, backend, has_torch=not found["torch"].why_not):
        row.where.append((framework, dtype))
        for example in examples:
            try:
                # A division by zero shows in the error, so NumPy's warning is not needed.
                with np.errstate(all="ignore"):
                    errors = errors_on(example, backend, framework, dtype)
            except Exception as error:  # every error belongs into the table
                row.failed = True
                row.why = f"{example}: {type(error).__name__}: {error}".partition("\n")[0]
                return row
            for name, off in errors.items():
                share = off / example.tolerance(dtype)
                row.errors[name] = max(off, row.errors.get(name, 0.0))
                row.share = max(share, row.share)
                if not share <= 1:
                    row.failed = True
                    row.why = f"{example}, {framework} {dtype}: {name} off by {off:.1e}"
    return row


def errors_on(
    example: Example, backend: registry.Backend, framework: str, dtype: str, size: str = "large"
) -> dict[str, float]:
    """Return the errors of the values and of the gradients of an example, relative."""
    exact = example.problem(size)
    given = given_to(backend, exact, framework, dtype)
    return errors_of(
        exact, given, given.cotangents, lambda call, back: steps_of(call, backend.name, back)
    )


def given_to(backend: registry.Backend, exact: Problem, framework: str, dtype: str) -> Problem:
    """Return a problem with the arrays of a framework, on the device of a backend."""
    return exact.astype(dtype) if framework == "numpy" else exact.to(device_of(backend), dtype)


def _ways(op: Any, backend: registry.Backend, has_torch: bool) -> list[tuple[str, str]]:
    """Return the frameworks and dtypes to check a backend with."""
    compiles = backend.name in ("numba", "triton")
    dtypes = ["float32"] if compiles else ["float32", "float64"]
    frameworks = ["numpy"] * (backend.speaks == "numpy") + ["torch"] * has_torch
    ways = [(framework, dtype) for framework in frameworks for dtype in dtypes]
    narrow = has_torch and op.primitive.sixteen_bits and backend.name != "numba"
    return [*ways, ("torch", "bfloat16")] if narrow else ways


def show(rows: list[Row]) -> None:
    """Print a table; a backend that serves nothing gets one line."""
    headings = ("op", "backend", "with", "why not", "value", "gradient", "of allowed", "s", "")
    lines: list[tables.Row] = []
    absent: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.why and not row.failed:
            absent.setdefault((row.backend, row.why), []).append(row.op)
            continue
        errors = (f"{row.errors[k]:.0e}" if k in row.errors else "" for k in ("value", "gradient"))
        cells = [row.op, row.backend, _arrays(row.where), row.why, *errors]
        cells += [f"{row.share:.0%}", f"{row.seconds:.1f}", "FAILED" if row.failed else "ok"]
        lines.append((cells, "red" if row.failed else None))
    for (backend, why), ops in absent.items():
        every = len(ops) == len({row.op for row in rows if row.backend == backend})
        cells = ["every op" if every else ", ".join(ops), backend, "", why, "", "", "", "", "-"]
        lines.append((cells, "dim"))
    tables.show("Errors against the reference, relative", headings, lines, right=5)


def _arrays(where: list[tuple[str, str]]) -> str:
    """Return a short text of the frameworks and dtypes."""
    widths: dict[str, list[str]] = {}
    for framework, dtype in where:
        name = "NumPy" if framework == "numpy" else framework
        widths.setdefault(name, []).append(dtype.replace("float", "f"))
    return "; ".join(f"{name} {' '.join(dtypes)}" for name, dtypes in widths.items())
