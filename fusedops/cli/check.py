"""``fusedops check``: every op on every backend that works here, against the reference."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusedops._frame import registry
from fusedops._workloads import WORKLOADS, Workload, errors, steps_of
from fusedops.cli import tables
from fusedops.cli.common import CommandError, add_choice, needs_gpu, progress


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="check every op on every backend that works here",
        description="The self-test after an installation: every op, forward and gradient, on every "
        "backend that works here, against the NumPy reference. Exit code 1 if one is wrong.",
    )
    parser.set_defaults(run=_command)
    add_choice(parser)


def _command(args: argparse.Namespace) -> int:
    devices = (args.device,) if args.device else ("cpu", "cuda")
    if args.device == "cuda":
        needs_gpu()
    rows = []
    with progress("checking", steps(devices, args.backend)) as advance:
        for row in run(devices, args.backend):
            rows.append(row)
            advance()
    show(rows)
    failed = [row for row in rows if row.failed]
    checked = [row for row in rows if row.errors]
    if failed:
        print(f"{len(failed)} OF {len(failed) + len(checked)} CHECKS FAILED.")
    elif not checked:
        raise CommandError("nothing could be checked: see the reasons above")
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
    device: str
    why: str = ""
    where: list[tuple[str, str]] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    share: float = 0.0
    failed: bool = False
    seconds: float = 0.0


def steps(devices: Sequence[str], backends: Sequence[str] | None) -> int:
    """Return the number of rows that `run` yields."""
    return len(list(_pairs(devices, backends)))


def run(devices: Sequence[str], backends: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield a row for every op on every backend (or the named ones) of some devices.

    Each op runs on small versions of the problems that `fusedops bench` times, forward and with its
    gradient, with NumPy arrays and, if torch is installed, with tensors. It runs in float64 too
    unless that needs a compilation. Problems whose kernels are special, and take seconds to
    compile on a GPU, are left out.
    """
    for workloads, backend in _pairs(devices, backends):
        start = time.perf_counter()
        row = _checked(workloads, backend)
        row.seconds = time.perf_counter() - start
        yield row


def _pairs(
    devices: Sequence[str], backends: Sequence[str] | None
) -> Iterator[tuple[list[Workload], registry.Backend]]:
    for device in devices:
        kinds = _kinds(device)
        for name in dict.fromkeys(w.op.__name__ for w in kinds):
            for backend in registry.BACKENDS:
                asked = backends is None or backend.name in backends
                # Each backend has a row on one device only.
                here = (backend.name == "triton") == (device == "cuda")
                if asked and here:
                    yield [w for w in kinds if w.op.__name__ == name], backend


def _kinds(device: str) -> list[Workload]:
    """Return a small workload of every kind that needs no other package."""
    kinds: dict[Any, Workload] = {}
    for workload in WORKLOADS:
        if workload.device == device and workload.self_check and not workload.needs:
            key = workload.op.__name__, workload.name, workload.dtype
            kinds.setdefault(key, workload.at(workload.small))
    return list(kinds.values())


def _checked(workloads: list[Workload], backend: registry.Backend) -> Row:
    first = workloads[0]
    row = Row(first.op.__name__, backend.name, first.device)
    if why := _why_not(first, backend):
        row.why = why
        return row
    for workload in workloads:
        for framework, dtype in _ways(workload, backend):
            row.where.append((framework, dtype))
            try:
                # A division by zero shows in the error, so NumPy's warning is not needed.
                with np.errstate(all="ignore"):
                    found = errors(
                        workload,
                        lambda problem, cotangent: steps_of(problem, backend.name, cotangent),
                        framework,
                        dtype,
                    )
            except Exception as error:  # every error belongs into the table
                row.failed = True
                row.why = f"{workload.name}: {type(error).__name__}: {error}".partition("\n")[0]
                return row
            for name, off in found.items():
                share = off / workload.tolerance(name == "gradient", dtype)
                row.errors[name] = max(off, row.errors.get(name, 0.0))
                row.share = max(share, row.share)
                if not share <= 1:
                    row.failed = True
                    row.why = f"{workload.name}, {framework} {dtype}: {name} off by {off:.1e}"
    return row


def _why_not(workload: Workload, backend: registry.Backend) -> str | None:
    if backend.speaks == "torch" and (missing := registry.import_error("torch")):
        return missing
    if workload.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "torch sees no GPU"
    request = registry.Request(
        workload.op.primitive.name,
        backend.speaks,
        workload.device,
        np.dtype(np.float32),
        backend.name,
    )
    return registry.why_not(backend, request)


def _ways(workload: Workload, backend: registry.Backend) -> list[tuple[str, str]]:
    """Return the frameworks and dtypes to check a backend with."""
    if workload.dtype in ("bfloat16", "float16"):
        has_torch = registry.import_error("torch") is None
        return [("torch", workload.dtype)] if has_torch and backend.name != "numba" else []
    compiles = backend.name in ("numba", "triton")
    dtypes = ["float32"] if compiles or workload.rounds_to else ["float32", "float64"]
    frameworks = []
    if backend.speaks == "numpy":
        frameworks.append("numpy")
    if registry.import_error("torch") is None:
        frameworks.append("torch")
    return [(framework, dtype) for framework in frameworks for dtype in dtypes]


def show(rows: list[Row]) -> None:
    """Print a table; a backend that serves nothing gets one line."""
    headings = ("op", "backend", "with", "why not", "value", "gradient", "of allowed", "s", "")
    lines: list[tables.Row] = []
    absent: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.why and not row.failed:
            absent.setdefault((row.backend, row.why), []).append(row.op)
            continue
        cells = [row.op, row.backend, _arrays(row.where), row.why]
        for name in ("value", "gradient"):
            cells.append(f"{row.errors[name]:.0e}" if name in row.errors else "")
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
    for framework, dtype in dict.fromkeys(where):
        name = "NumPy" if framework == "numpy" else framework
        widths.setdefault(name, []).append(dtype.replace("float", "f"))
    return "; ".join(f"{name} {' '.join(dtypes)}" for name, dtypes in widths.items())
