"""Results in files, in words, and beside an earlier run's.

In memory a report has a dict for every row. In a file a row is a line of `columns`; a line before
it has the values of its problem and contestant that differ from the row above. Passes and
contestants are places in the lists `passes` and `contestants`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from bench.timing import GRAPH, TORCH, noisy
from fusedops.structure import replacing

#: The version of the files' form, which every file states.
SCHEMA = 4

#: The names of a row's values in its line, and of the others, which precede the first such row.
COLUMNS = (
    *("pass", "ms", "quartiles_ms", "peak_MB", "host_ms", "over_empty", "alone_ms", "share"),
    "refused",
)
OF_PROBLEM = ("workload", "size", "shape", "dtype", "threads", "error_of")
OF_CONTESTANT = ("who", "how", "ours", "computes")
ROW = ("op", *OF_PROBLEM, *OF_CONTESTANT, "error", "work", *COLUMNS)
#: The names of the numbers of an error, and of the work of a pass.
ERROR, WORK = ("value", "gradient"), ("bytes", "flops", "exps", "floor_ms")

#: The digits of numbers in files, or more if three would be others. All others have five, so that
#: no two times become one.
DIGITS = {"error": 2} | dict.fromkeys(("quartiles_ms", "host_ms", "over_empty"), 3)
# Of three digits of a share, 0.235 for 0.2346, pages would make another percentage.
DIGITS |= dict.fromkeys(("peak_MB", "alone_ms", "share", "work"), 4)

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
        return loads(path.read_bytes(), str(path))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None


def loads(content: bytes, name: str) -> dict[str, Any]:
    """Return the report that a file of this name holds; see `read`."""
    try:
        report = json.loads(content)
    except ValueError as error:
        raise ReportError(f"{name}: no JSON: {error}") from None
    if not (
        isinstance(report, dict)
        # In files of the version before, rows name their contestants.
        and report.get("schema") in (SCHEMA - 1, SCHEMA)
        and {"device", "ops"} <= report.keys()
        and isinstance(report["ops"], dict)
    ):
        raise ReportError(f"{name}: no result of fusedops bench, schema {SCHEMA}")
    try:
        ops = {op: _block(op, block, report) for op, block in report["ops"].items()}
    except KeyError as missing:
        raise ReportError(f"{name}: has no {missing}") from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ReportError(f"{name}: broken: {error}") from None
    return {"schema": SCHEMA, "device": report["device"], "ops": ops}


def _block(op: str, block: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return an op's results in memory, from those in its file."""
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {"op": op}
    for line in block["cases"]:
        if isinstance(line, dict):
            about = about | line
            continue
        row = about | dict(zip_longest(report["columns"], line))
        row["pass"] = report["passes"][row["pass"]]
        if report["schema"] == SCHEMA:
            who = report["contestants"][row.pop("contestant")]
            row |= dict(zip(OF_CONTESTANT, who, strict=True))
        work, errors = row["work"].get(row["pass"]), row["error"]
        row["work"] = work and dict(zip(WORK, work, strict=True))
        row["error"] = errors and dict(zip(ERROR, errors, strict=False))
        rows.append({name: row[name] for name in ROW})
    rest = {name: each for name, each in block.items() if name != "run"}
    return {**rest, **report["runs"][block["run"]], "cases": rows}


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
        Path(draft).write_text(_text(_compact(report) if "ops" in report else report) + "\n")


def _compact(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report as its file has it."""
    ops, runs = {}, []
    passes = list(dict.fromkeys(row["pass"] for row in cases(report)))
    everyone = list(dict.fromkeys(map(_contestant, cases(report))))
    for op, block in report["ops"].items():
        run = {"machine": block["machine"]} if "machine" in block else {}
        if run not in runs:
            runs.append(run)
        lines: list[dict[str, Any] | list[Any]] = []
        before: dict[str, Any] = {}
        for _, problem in groupby(block["cases"], partial(_some, names=OF_PROBLEM)):
            rows = list(problem)
            work = {row["pass"]: [*row["work"].values()] for row in rows if row.get("work")}
            order = list(dict.fromkeys(map(_contestant, rows)))
            for row in sorted(rows, key=lambda row: order.index(_contestant(row))):
                error = row.get("error") and [*row["error"].values()]
                who = everyone.index(_contestant(row))
                about = _some(row, OF_PROBLEM) | {"contestant": who, "error": error, "work": work}
                about = _rounded(about)
                if changed := {n: x for n, x in about.items() if n not in before or before[n] != x}:
                    lines.append(changed)
                lines.append(_values(row | {"pass": passes.index(row["pass"])}))
                before = about
        rest = {name: each for name, each in block.items() if name not in run}
        ops[op] = {"run": runs.index(run), **rest, "cases": lines}
    report = report | {"ops": ops, "columns": COLUMNS, "passes": passes}
    return report | {"contestants": everyone, "runs": runs}


def _contestant(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in OF_CONTESTANT)


def _some(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: row.get(name) for name in names}


def _values(row: dict[str, Any]) -> list[Any]:
    """Return a row's values by column; at the end, missing ones are left out."""
    values = [*_rounded(_some(row, COLUMNS)).values()]
    while values[-1] is None:
        values.pop()
    return values


def _text(value: Any) -> str:
    """Return JSON with lines for items of lists and dicts, unless all are numbers and texts."""
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or not any(isinstance(x, dict | list) for x in parts):
        return _line(value)
    if isinstance(value, dict):
        lines = ",\n".join(f"{_line(name)}:{_text(x)}" for name, x in value.items())
        return f"{{\n{lines}\n}}"
    lines = ",\n".join(map(_line, value))
    return f"[\n{lines}\n]"


def _line(value: Any) -> str:
    return json.dumps(_rounded(value), separators=(",", ":"), allow_nan=False)


def _rounded(value: Any, count: int = 5) -> Any:
    """Return a value whose floats have so many digits, and whose truth values are 0 and 1."""
    if isinstance(value, dict):
        return {name: _rounded(x, DIGITS.get(name, count)) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(x, count) for x in value]
    if not isinstance(value, float | bool) or not math.isfinite(value):
        return value
    short = float(f"{float(value):.{count}g}")
    if count > 3 and digits(short) != digits(value):
        return _rounded(value, count + 1)
    return int(short) if short.is_integer() else short


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
        if row["ms"] and row["how"] != GRAPH and row["computes"]:
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


def over_floor(row: dict[str, Any]) -> float | None:
    """Return a row's time over the least time that its work takes on the machine."""
    return row["ms"] / row["work"]["floor_ms"] if row["ms"] and row["work"] else None


def is_noisy(row: dict[str, Any]) -> bool:
    """Return whether a row's median is worth little."""
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
