"""Add to docs/history.md how our times have changed since a commit.

    python -m bench history 2026-12-01 v0.2.0    # bench/results now, over those in v0.2.0

Every machine's table gets a column of that date. Git has the results of all earlier dates.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench import report

ROOT = Path(__file__).parents[1]
#: The files of results, in the order of the page's tables.
FILES = ("bench/results/cpu.json", "bench/results/h200.json")


def added(table: str, date: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return a machine's Markdown table with one more column, from two reports."""
    changes = [change for change in report.compared(new, old) if change.row["ours"]]
    cells = {"op": date}
    for op in {**old["ops"], **new["ops"]}:
        of_op = [change for change in changes if change.row["op"] == op]
        cells[f"`{op}`"] = _cell(old["ops"].get(op), new["ops"].get(op), of_op)
    lines = table.splitlines()
    rows = {line.split("|")[1].strip(): at for at, line in enumerate(lines) if "|" in line}
    columns = lines[rows["op"]].count("|") - 2
    for name in ["---", *cells]:
        if name not in rows:
            rows[name] = len(lines)
            lines.append(f"| {name} |" + " - |" * columns)
    for name, at in rows.items():
        lines[at] += "---|" if name == "---" else f" {cells.get(name, '-')} |"
    return "\n".join(lines) + "\n"


def _cell(
    before: dict[str, Any] | None, block: dict[str, Any] | None, changes: list[report.Change]
) -> str:
    if block is None:
        return "-"
    if block == before:
        return "as before"
    if not changes:
        return f"{sum(bool(row['ours'] and row['ms']) for row in block['cases'])} cases"
    slower = sum(change.slower for change in changes)
    mean = geometric_mean(change.ratio for change in changes)
    return f"{mean:.2f}" + (f", **{slower} slower**" if slower else "")


def main(date: str, commit: str) -> None:
    """Add a column of a date to the page."""
    page = ROOT / "docs/history.md"
    head, *tables = re.split(r"(?m)^(?=\| op )", page.read_text())
    for at, file in enumerate(FILES):
        content = subprocess.check_output(["git", "show", f"{commit}:{file}"], cwd=ROOT)
        old, new = report.loads(content, f"{commit}:{file}"), report.read(ROOT / file)
        table, end, rest = tables[at].partition("\n\n")
        tables[at] = added(table, date, old, new).rstrip() + (end + rest or "\n")
    page.write_text(head + "".join(tables))
