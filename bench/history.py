"""Keep results of a day, and show in docs/history.md how our times change.

    python -m bench history 2026-11-22    # keep bench/results/*.json under this date

The page compares all that is kept. Only rows of our own kernels are.
"""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench import report

ROOT = Path(__file__).parents[1]
TITLE = """# Speed over time

Written by `python -m bench history DATE`, which keeps the results of `fusedops bench` in
`bench/results/history`. A cell has the geometric mean of an op's times over the times of the date
before, and how many cases got slower than the spread of their rounds explains; a cell of the first
date has the number of cases, and "as before" an op that was not measured again. Another date may
have another machine: an eager call of small arrays takes the time of its host. `fusedops bench
--from NEW.json --compare OLD.json` names the slower cases.
"""


def keep(results: Path, date: str) -> None:
    """Keep our rows of the reports in a folder."""
    for path in sorted(results.glob("*.json")):
        # Results of ranks and of commands are no ops'.
        if "ops" not in json.loads(path.read_text()):
            continue
        found = report.read(path)
        for block in found["ops"].values():
            block["cases"] = [row for row in block["cases"] if row["ours"]]
        kept = results / "history" / f"{date}-{path.name}"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(found) + "\n")


def page(history: Path) -> str:
    """Return the Markdown of all reports that are kept: a table for each machine."""
    parts = [TITLE]
    paths = sorted(history.glob("*.json"), key=lambda path: (path.stem[11:], path.stem[:10]))
    for _, group in groupby(paths, key=lambda path: path.stem[11:]):
        dated = {path.stem[:10]: report.read(path) for path in group}
        last = list(dated.values())[-1]
        (machine, *_) = (block["machine"]["name"] for block in last["ops"].values())
        cells: dict[str, list[str]] = {op: [] for found in dated.values() for op in found["ops"]}
        for old, new in pairwise([report.new(""), *dated.values()]):
            changes = report.compared(new, old)
            for op, row in cells.items():
                of_op = [change for change in changes if change.row["op"] == op]
                row.append(_cell(old["ops"].get(op), new["ops"].get(op), of_op))
        lines = [
            f"## {machine}",
            "",
            f"| op | {' | '.join(dated)} |",
            "|---" * (1 + len(dated)) + "|",
        ]
        lines += [f"| `{op}` | {' | '.join(row)} |" for op, row in cells.items()]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(
    before: dict[str, Any] | None, block: dict[str, Any] | None, changes: list[report.Change]
) -> str:
    if block is None:
        return "-"
    if block == before:
        return "as before"
    if not changes:
        return f"{sum(row['ms'] is not None for row in block['cases'])} cases"
    slower = sum(change.slower for change in changes)
    mean = geometric_mean(change.ratio for change in changes)
    return f"{mean:.2f}" + (f", **{slower} slower**" if slower else "")


def main(*dates: str) -> None:
    """Keep the results under a date, if there is one, and write the page."""
    for date in dates:
        keep(ROOT / "bench/results", date)
    (ROOT / "docs/history.md").write_text(page(ROOT / "bench/results/history"))
