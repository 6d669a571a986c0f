"""Results in files, in words, and beside an earlier run's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.timing import GRAPH, TORCH, noisy
from fusedops.structure import replacing

#: The version of the files' form, which every file states.
SCHEMA = 1

#: Times of equal runs differ by this factor: other processes and memory layout change them.
ALWAYS = 1.05


class ReportError(Exception):
    """A file is no result of ``fusedops bench``, or not of the same kind; the message says why."""


def new(device: str) -> dict[str, Any]:
    """Return a report of a device without results: one block for each op will be in `ops`."""
    return {"schema": SCHEMA, "device": device, "ops": {}}


def read(path: Path) -> dict[str, Any]:
    """Return the report in a file.

    Raises
    ------
    ReportError
        If the file is missing, or is no report.
    """
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ReportError(f"{path}: no JSON: {error}") from None
    if not (
        isinstance(report, dict)
        and report.get("schema") == SCHEMA
        and {"device", "ops"} <= report.keys()
        and isinstance(report["ops"], dict)
    ):
        raise ReportError(f"{path}: no result of fusedops bench, schema {SCHEMA}")
    return report


def start(path: Path | None, device: str) -> dict[str, Any]:
    """Return the report that a run adds to: the file's, whose other ops stay, or a new one.

    Raises
    ------
    ReportError
        If the file is no report of the same device.
    """
    if path is None or not path.exists():
        return new(device)
    report = read(path)
    if report["device"] != device:
        raise ReportError(f"{path}: has results of {report['device']}, not of {device}")
    return report


def save(path: Path, report: dict[str, Any]) -> None:
    """Write a report; a missing measurement is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        Path(draft).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def cases(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for block in report["ops"].values() for row in block["cases"]]


def refused(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of our own kernels that weren't timed."""
    return [row for row in cases(report) if row["ours"] and row["refused"]]


Pair = tuple[dict[str, Any] | None, dict[str, Any] | None]


def side_by_side(rows: Iterable[dict[str, Any]]) -> list[Pair]:
    """Return pairs of a row and the row of its calls in CUDA graphs; None for a missing one.

    Refused rows are paired, too.
    """
    found: dict[Any, dict[bool, dict[str, Any]]] = {}
    for row in rows:
        graph = row["how"] == GRAPH
        key = *_key(row | {"how": TORCH if graph else row["how"]}), bool(row["refused"])
        found.setdefault(key, {})[graph] = row
    return [(pair.get(False), pair.get(True)) for pair in found.values()]


def small_and_large(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the timed rows of the smallest and the largest problem of each op, kind and dtype.

    A problem is as large as the bytes that its passes must move.
    """
    kinds: dict[Any, dict[Any, list[dict[str, Any]]]] = {}
    for row in rows:
        if row["ms"] and row["work"]:
            kind = row["op"], row["workload"], row["dtype"]
            problem = tuple(row["shape"].items())
            kinds.setdefault(kind, {}).setdefault(problem, []).append(row)
    found = []
    for problems in kinds.values():
        by_size = sorted(problems.values(), key=lambda rows: max(r["work"]["bytes"] for r in rows))
        for rows_of in by_size[:1] + by_size[1:][-1:]:
            found += rows_of
    return found


@dataclass(frozen=True)
class Contest:
    """Our fastest call of a case and the fastest peer's, neither of them in a CUDA graph."""

    ours: dict[str, Any]
    peer: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Our time over the peer's."""
        return float(self.ours["ms"] / self.peer["ms"])


def contests(rows: Iterable[dict[str, Any]]) -> list[Contest]:
    """Return a contest for every case, pass and framework that a peer was timed in beside us."""
    best: dict[Any, dict[bool, dict[str, Any]]] = {}
    for row in rows:
        if row["ms"] and row["how"] != GRAPH and (row["ours"] or row["computes"]):
            case = best.setdefault(_key(row | {"who": ""}), {})
            if row["ours"] not in case or row["ms"] < case[row["ours"]]["ms"]:
                case[row["ours"]] = row
    return [Contest(case[True], case[False]) for case in best.values() if len(case) == 2]


def host_of(row: dict[str, Any] | None) -> tuple[str, str]:
    """Return the host's time with a call in µs and its ratio to an empty Function, in three digits.

    Both are empty for a row without them, as in older reports.
    """
    ms, over = (row.get("host_ms"), row.get("over_empty")) if row else (None, None)
    return digits(None if ms is None else 1e3 * ms), digits(over)


def sizes(row: dict[str, Any]) -> str:
    """Return a row's sizes in a few words."""
    return ", ".join(f"{name} {value}" for name, value in row["shape"].items())


def digits(value: float | None) -> str:
    """Return three digits of a number, without an exponent."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def is_noisy(row: dict[str, Any]) -> bool:
    """Return whether a row's median is worth little, computed for older reports that don't say."""
    return row["ms"] is not None and noisy(row["ms"], row["quartiles_ms"])


def growth_of(row: dict[str, Any]) -> str:
    """Return in words how times grow, or why that is unknown."""
    left_out = row.get("noisy", [])
    if row["exponent"] is None:
        return f"noisy at {len(left_out)} of {len(row['sizes'])} sizes, so that growth has no power"
    without = f", without {len(left_out)} noisy sizes" if left_out else ""
    return f"it grows with the power {row['exponent']:.2f}{without}"


@dataclass(frozen=True)
class Change:
    """A row's time over an earlier run's, and whether it is slower than the spreads explain."""

    row: dict[str, Any]
    before_ms: float
    ratio: float
    slower: bool


def compared(new: dict[str, Any], old: dict[str, Any]) -> list[Change]:
    """Return the change of every row of an older report that was measured again.

    A row is slower if it takes over `ALWAYS` times as long, with three quarters of its rounds above
    three quarters of the earlier ones.
    """
    before = {_key(row): row for row in cases(old) if row["ms"]}
    changes = []
    for row in cases(new):
        was = before.get(_key(row))
        if was is None or not row["ms"]:
            continue
        ratio = row["ms"] / was["ms"]
        apart = row["quartiles_ms"][0] > was["quartiles_ms"][1]
        changes.append(Change(row, was["ms"], ratio, apart and ratio > ALWAYS))
    return changes


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("op", "workload", "size", "dtype", "pass", "who", "how")
    return (*(row[name] for name in names), *sorted(row["shape"].items()))


def shared(found: dict[str, Any]) -> list[float | None]:
    """Return what ranks took, where so many were measured, beside each prediction for them."""
    kinds = ("op", "size", "pass", "ranks")
    ours = [row for row in found["cases"] if row["who"] == "fusedops"]
    times = {tuple(row[name] for name in kinds): row["ms"] for row in ours}
    return [times.get(tuple(row[name] for name in kinds)) for row in found["predicted"]]
