"""Check every op on every backend that works here.

The self-test after an installation: every op, forward and gradient, on every backend that works
here, against the NumPy reference. Exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fusedops
from fusedops._catalogue import Example, Problem, calls, steps_of
from fusedops._frame import registry
from fusedops.cli import common, tables
from fusedops.testing import errors_of


def add(parser: argparse.ArgumentParser) -> None:
    common.add_choice(parser)


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda":
        common.needs_gpu()
    found, backends = fusedops.info().backends, asked(args.device, args.backend)
    absent = {each.name: why for each in backends if (why := found[each.name].why_not)}
    usable = [backend for backend in backends if backend.name not in absent]
    shown = []
    with common.progress("checking", len(calls()) * len(usable)) as advance:
        for row in rows(usable):
            shown.append(row)
            advance()
    show(shown, absent)
    if not shown:
        raise common.CommandError("nothing could be checked: see the reasons above")
    failed, count = sum(bool(row.why) for row in shown), len(shown)
    print(f"{failed} OF {count} CHECKS FAILED." if failed else f"All {count} checks passed.")
    return 1 if failed else 0


@dataclass
class Row:
    """The result of checking an op on a backend; `why` says why it failed.

    `where` has the frameworks and their dtypes, `errors` the largest errors in all runs, and
    `share` is the largest part of a tolerance.
    """

    op: str
    backend: str
    why: str = ""
    where: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    share: float = 0.0
    seconds: float = 0.0


def asked(device: str | None, names: Sequence[str] | None) -> list[registry.Backend]:
    """Return the backends of a device, or of all, that are named, or all."""
    found = (each for each in registry.BACKENDS if device in (None, device_of(each)))
    return [backend for backend in found if not names or backend.name in names]


def device_of(backend: registry.Backend) -> str:
    """Return the device on which a backend is checked."""
    return "cuda" if backend.name == "triton" else "cpu"


def rows(backends: Sequence[registry.Backend]) -> Iterator[Row]:
    """Yield a row for every op on some backends, which can be used here.

    The examples of each op run forward and with their gradients, with NumPy arrays and, if torch is
    installed, with tensors. They run in float64 too unless that needs a compilation.
    """
    has_torch = not registry.import_error("torch")
    for (op, examples), backend in itertools.product(calls().items(), backends):
        start = time.perf_counter()
        row = _checked(op, examples, backend, has_torch)
        row.seconds = time.perf_counter() - start
        yield row


def _checked(op: Any, examples: list[Example], backend: registry.Backend, has_torch: bool) -> Row:
    row = Row(op.__name__, backend.name)
    for framework, dtype in _ways(op, backend, has_torch):
        row.where.setdefault(framework, []).append(dtype)
        for example in examples:
            try:
                # A division by zero shows in the error, so NumPy's warning is not needed.
                with np.errstate(all="ignore"):
                    _, errors = compared(example.problem("large"), backend, framework, dtype)
            except Exception as error:  # every error belongs into the table
                row.why = f"{example}: {type(error).__name__}: {error}".partition("\n")[0]
                return row
            for name, off in errors.items():
                share = off / example.tolerance(dtype)
                row.errors[name] = max(off, row.errors.get(name, 0.0))
                row.share = max(share, row.share)
                if not share <= 1:
                    row.why = f"{example}, {framework} {dtype}: {name} off by {off:.1e}"
    return row


def compared(
    exact: Problem, backend: registry.Backend, framework: str, dtype: str
) -> tuple[Problem, dict[str, float]]:
    """Return a problem with a framework's arrays, and the errors of its values and gradients."""
    given = exact.astype(dtype) if framework == "numpy" else exact.to(device_of(backend), dtype)
    return given, errors_of(
        exact, given, given.cotangents, lambda call, back: steps_of(call, backend.name, back)
    )


def _ways(op: Any, backend: registry.Backend, has_torch: bool) -> list[tuple[str, str]]:
    """Return the frameworks and dtypes to check a backend with."""
    compiles = backend.name in ("numba", "triton")
    dtypes = ["float32"] if compiles else ["float32", "float64"]
    frameworks = ["numpy"] * (backend.speaks == "numpy") + ["torch"] * has_torch
    ways = [(framework, dtype) for framework in frameworks for dtype in dtypes]
    narrow = has_torch and op.primitive.sixteen_bits and backend.name != "numba"
    return [*ways, ("torch", "bfloat16")] if narrow else ways


def show(rows: list[Row], absent: Mapping[Any, str]) -> None:
    """Print a table; a backend that is absent, for a reason, gets one line."""
    headings = ("op", "backend", "with", "why not", "value", "gradient", "of allowed", "s", "")
    lines: list[tables.Row] = []
    for row in rows:
        where = "; ".join(f"{name} {' '.join(dtypes)}" for name, dtypes in row.where.items())
        cells = [row.op, row.backend, where.replace("numpy", "NumPy").replace("float", "f")]
        errors = (f"{row.errors[k]:.0e}" if k in row.errors else "" for k in ("value", "gradient"))
        cells += [row.why, *errors, f"{row.share:.0%}", f"{row.seconds:.1f}"]
        lines.append(([*cells, "FAILED"], "red") if row.why else ([*cells, "ok"], None))
    for backend, why in absent.items():
        lines.append((["every op", backend, "", why, "", "", "", "", "-"], "dim"))
    tables.show("Errors against the reference, relative", headings, lines, right=5)
