"""Write the tables of README.md and docs/measured.md from the results of `fusedops bench`.

    python -m bench tables

The text between `<!-- measured: MODULE NAME -->` and `<!-- end of measured -->` becomes the results
in bench/results/NAME.json of the ops of fusedops/MODULE.py, or of a whole step of that name. Where
MODULE is `peers`, it becomes the count of eager calls of every op in which we are faster than all
peers; where it is `largest`, the largest problem of a few ops, beside the fastest peer; where it is
`ranks`, the results of `fusedops bench --distributed`; where it is `commands`, the results of
`python -m bench commands`. Without results, the text stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import plot, report
from bench.measure import STEPS, names_of
from bench.timing import GRAPH, NUMPY, TORCH
from bench.workloads import WORKLOADS
from fusedops._catalogue import BOTH, FORWARD

ROOT = Path(__file__).parents[1]
MODULES = dict(names_of(workload.op) for workload in WORKLOADS) | {step: step for step in STEPS}
PART = re.compile(r"(<!-- measured: (\w+) (\w+) -->\n).*?(<!-- end of measured -->\n)", re.DOTALL)
NAMES = {"cython": "Cython", "numba": "Numba", "triton": "Triton", "numpy": "NumPy"}
PASSES = (FORWARD, BOTH)
HOWS = (NUMPY, TORCH, GRAPH)


def tables(text: str, results: Path) -> str:
    """Return a text with its tables written anew, from the files in a folder."""

    def part(match: re.Match[str]) -> str:
        begin, module, name, end = match.groups()
        path = results / f"{name}.json"
        if not path.exists():
            return match[0]
        if module in OTHERS:
            return f"{begin}{OTHERS[module](json.loads(path.read_text()))}{end}"
        ops = report.read(path)["ops"]
        if module == "peers":
            return f"{begin}{fastest(ops)}{end}"
        if module == "largest":
            return f"{begin}{largest(report.read(path))}{end}"
        blocks = {op: block for op, block in ops.items() if MODULES.get(op) == module}
        return f"{begin}{section(blocks, name)}{end}" if blocks else match[0]

    return PART.sub(part, text)


def section(blocks: dict[str, dict[str, Any]], name: str) -> str:
    """Return the Markdown of some ops' results: the machine, and a folded table of each op.

    The site has a picture in the place of the comment above an op's table.
    """
    parts, before = [], ""
    for op, block in blocks.items():
        about = _about(block)
        parts += [about] if about != before else []
        parts += [f"`{op}`:"] if len(blocks) > 1 else []
        parts += [f"<!-- picture: {name} {op} -->"] if op not in STEPS else []
        table = _shares(block) if op in STEPS else _table(block)
        parts += ["<details><summary>Times</summary>", table, _after(block), "</details>"]
        before = about
    return "\n\n".join(filter(None, parts)) + "\n"


def fastest(ops: dict[str, dict[str, Any]]) -> str:
    """Return in how many eager calls of every op we are faster than all peers, and the others."""
    lines = [
        _line(["op", *PASSES, "faster peers, and our time over theirs"]),
        "|---|---:|---:|---|",
    ]
    for op, block in ops.items():
        contests = report.contests(block["cases"])
        counts, lost = [], []
        for name in PASSES:
            ratios = [each.ratio for each in contests if each.ours["pass"] == name]
            won = sum(ratio <= 1 for ratio in ratios)
            counts.append(f"{won} of {len(ratios)}" if ratios else "")
        for each in contests:
            row = each.ours
            what = f"{row['workload']}: {report.sizes(row)}, {row['dtype']}, {row['pass']}"
            lost += [f"{what}: {each.peer['who']}, {each.ratio:.2f}"] * (each.ratio > 1)
        folded = f"<details><summary>{len(lost)}</summary>{'<br>'.join(lost)}</details>"
        lines += [_line([f"`{op}`", *counts, folded if lost else ""])] if contests else []
    return "\n".join(lines) + "\n"


def on_ranks(found: dict[str, Any]) -> str:
    """Return the Markdown of problems that ranks share, and of larger numbers of ranks."""
    titles = ["problem", "pass", "who", "ms", "efficiency", "exposed ms", "sent MB", "peak MB"]
    lines = [_line([*titles, "apart"]), "|---|---|---|" + "---:|" * 6]
    for row in found["cases"]:
        cells = [f"{row['op']}: {row['size']}, {row['dtype']}", row["pass"], row["who"]]
        if row["ms"] is None:
            lines.append(_line([*cells, "no memory", "", "", "", "", ""]))
            continue
        efficiency = f"{row['efficiency']:.0%}" if "efficiency" in row else ""
        shown = [report.digits(row.get(name)) for name in ("exposed_ms", "sent_MB", "peak_MB")]
        shown.append(f"{row['apart']:.0e}" if "apart" in row else "")
        lines.append(_line([*cells, report.digits(row["ms"]), efficiency, *shown]))
    rates = [f"{row['MB']:,.0f} MB {row['GB_s']:,.0f} GB/s" for row in found["all_to_all"]]
    lines += ["", f"An all-to-all sends, of {', of '.join(rates)}.", ""]
    names = ["alone_ms", "exchanges_ms", "least_ms", "most_ms"]
    titles = ["predicted", "pass", "ranks", "work", "exchanges", "at least", "at most", "measured"]
    lines += [_line(titles), "|---|---|---:|" + "---:|" * 5]
    for row, taken in zip(found["predicted"], report.shared(found), strict=True):
        shown = [report.digits(ms) for ms in (*(row[name] for name in names), taken)]
        lines.append(_line([f"{row['op']}: {row['size']}", row["pass"], str(row["ranks"]), *shown]))
    versions = ", ".join(f"{n} {version}" for n, version in found["machine"]["versions"].items())
    about = f"**{found['machine']['ranks']} GPUs**: {found['machine']['name']}, {versions}; ms."
    return "\n".join([about, "", *lines]) + "\n"


def commands(found: dict[str, Any]) -> str:
    """Return the Markdown of the commands on structures: seconds, peak of memory, and R."""
    titles = list(dict.fromkeys(name for file in found["files"].values() for name in file["runs"]))
    lines = [_line(["file", "atoms", *titles, "R"]), f"|---|{'---:|' * (len(titles) + 2)}"]
    for name, file in found["files"].items():
        runs = [_run(file["runs"][title]) for title in titles]
        lines.append(_line([f"`{name}`", f"{file['atoms']:,}", *runs, f"{100 * file['R']:.4f} %"]))
    machine = found["machine"]
    versions = ", ".join(f"{n} {version}" for n, version in machine["versions"].items())
    about = f"**CPU**: {machine['name']}, {machine['threads']} threads, {versions}; s / MB."
    alone = " and ".join(f"`{name}` {_run(run)}" for name, run in found["alone"].items())
    return "\n".join([about, "", *lines, "", f"Without a file: {alone}."]) + "\n"


def _run(run: dict[str, Any]) -> str:
    failed = f", exit code {run['code']}" if run["code"] else ""
    return f"{report.digits(run['seconds'])} / {run['peak_MB']:,.0f}{failed}"


def largest(found: dict[str, Any]) -> str:
    """Return our time and the fastest peer's, with gradients, for a few ops' largest problems."""
    head = [plot.where(found), "problem", "ours, ms", "fastest peer, ms"]
    lines = [_line(head), "|---|---|---:|---:|"]
    bars = plot.bars_of(found)
    for op in [*STEPS, *plot.FIRST]:
        for bar in bars.get(op, [])[-1:]:
            ours, peer = bar.ours, bar.peer
            problem = f"{report.sizes(ours)}, {ours['dtype']}"
            problem += "" if ours["pass"] == BOTH else f", {ours['pass']}"
            beside = f"{report.digits(peer['ms'])}, {peer['who']}"
            lines.append(_line([f"`{op}`", problem, report.digits(ours["ms"]), beside]))
    return "\n".join(lines) + "\n"


def _table(block: dict[str, Any]) -> str:
    """Return a row for each pass of a small and a large problem of every kind.

    A contestant's column has its times with arrays, with tensors and in graphs, where it has any.
    """
    rows = [
        row
        for row in report.small_and_large(block["cases"])
        if row["pass"] in PASSES and row["computes"]
    ]
    contestants: dict[str, set[str]] = {}
    cases: dict[tuple[str, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: not row["ours"]):
        contestants.setdefault(row["who"], set()).add(row["how"])
        what = f"{row['workload']}: {report.sizes(row)}", row["dtype"], row["pass"]
        cases.setdefault(what, {})[row["who"], row["how"]] = row
    host = ["host, µs (over empty)"] if any(row.get("host_ms") for row in rows) else []
    alone = ["over alone"] if any(row.get("alone_ms") for row in rows) else []
    numbers = [
        *(NAMES.get(who, who) for who in contestants),
        "errors",
        *host,
        *alone,
        "floor",
        "MB",
    ]
    lines = [
        _line(["workload", "dtype", "pass", *numbers]),
        "|---|---|---|" + "---:|" * len(numbers),
    ]
    for case, found in cases.items():
        times = [_times(found, who, hows) for who, hows in contestants.items()]
        ours = [row for row in found.values() if row["ours"]]
        floor = next(iter(found.values()))["work"]["floor_ms"]
        peaks = [row["peak_MB"] for row in ours if row["peak_MB"] is not None]
        ends = [report.digits(floor), f"{min(peaks):,.0f}" if peaks else ""]
        extra = [*[_host(ours)] * len(host), *[_over_alone(ours)] * len(alone)]
        times.append(_errors(found.values(), contestants))
        lines.append(_line([*case, *times, *extra, *ends]))
    return "\n".join(lines)


def _shares(block: dict[str, Any]) -> str:
    """Return a row for each pass and each part of every case of a step.

    A part has its share of the whole, forward and backward where the contestant has both.
    """
    contestants: dict[tuple[str, str], None] = {}
    cases: dict[tuple[str, str], dict[tuple[str, str], dict[str, Any]]] = {}
    for row in sorted(block["cases"], key=lambda row: not row["ours"]):
        if row["ms"] and row["computes"]:
            contestants[row["who"], row["how"]] = None
            case = f"{row['workload']}: {report.sizes(row)}"
            cases.setdefault((case, row["pass"]), {})[row["who"], row["how"]] = row
    names = [f"{NAMES.get(who, who)}, {how}" for who, how in contestants]
    lines = [_line(["case", "part", *names]), "|---|---|" + "---:|" * len(names)]
    order = sorted(cases, key=lambda case: (case[0], case[1] not in PASSES))
    last = None
    for case, part in order:
        found = [cases[case, part].get(each) for each in contestants]
        cells = [_share(row) if row else "" for row in found]
        lines.append(_line([case if case != last else "", part, *cells]))
        last = case
    rows = [row for row in block["cases"] if row["ms"]]
    errors = [
        _errors([row for row in rows if row["how"] == how], [who]) for who, how in contestants
    ]
    lines.append(_line(["", "largest error", *errors]))
    return "\n".join(lines)


def _share(row: dict[str, Any]) -> str:
    share = f" ({row['share']:.0%})" if row.get("share") else ""
    if row.get("over_empty"):
        share = "; host {} µs ({})".format(*report.host_of(row))
    tokens = row["shape"].get("tokens")
    if tokens and row["pass"] in PASSES:
        share = f"; {1e3 * tokens / row['ms']:,.0f} tokens/s, {row['peak_MB']:,.0f} MB"
    return f"{report.digits(row['ms'])}{share}"


def _times(found: dict[tuple[str, str], dict[str, Any]], who: str, hows: set[str]) -> str:
    """Return a contestant's times in one case, by the ways that it is called in the table."""
    called = [(who, how) for how in HOWS if how in hows]
    times = [report.digits(found[each]["ms"]) if each in found else "–" for each in called]
    return " / ".join(times) if found.keys() & {*called} else ""


def _host(ours: list[dict[str, Any]]) -> str:
    """Return the host's time with a call of tensors on the first backend that takes them."""
    for row in ours:
        if row.get("over_empty"):
            return "{} ({})".format(*report.host_of(row))
    return ""


def _over_alone(ours: list[dict[str, Any]]) -> str:
    """Return the time after an operation of torch's over the time alone, of our first backend."""
    for row in ours:
        if row.get("alone_ms"):
            return f"{row['ms'] / row['alone_ms']:.2f}"
    return ""


def _after(block: dict[str, Any]) -> str:
    """Return the text below a table: preparations, and how the first backend's times grow."""
    said = [
        f"{row['who']} of {report.sizes(row)}: {report.digits(row['ms'])} ms."
        for row in block["cases"]
        if row["ms"] and row["pass"] == "preparation"
    ]
    said += [
        f"{NAMES.get(row['who'], row['who'])}: time grows with the power {row['exponent']:.2f} of "
        f"the {row['unit']}, {row['sizes'][0]:,} to {row['sizes'][-1]:,}."
        for row in block["growth"][:1]
        if row["exponent"] is not None
    ]
    return "\n".join(said)


def _errors(rows: Iterable[dict[str, Any]], of: Iterable[str]) -> str:
    """Return the largest errors of some contestants: of values, and of gradients beside these."""
    largest: dict[str, float] = {}
    for row in rows:
        names = ("value",) if row["pass"] == FORWARD else ("value", "gradient")
        for name in names:
            error = (row["error"] or {}).get(name)
            if error is not None:
                largest[row["who"]] = max(largest.get(row["who"], 0.0), error)
    return " / ".join(f"{largest[who]:.0e}" if who in largest else "–" for who in of)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _about(block: dict[str, Any]) -> str:
    machine, rates = block["machine"], block["rates"]
    kind = "GPU" if machine["device"] == "cuda" else "CPU"
    threads = "" if kind == "GPU" else f" {machine['threads']} threads,"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    products = ", ".join(
        f"{rate / 1e3:,.2f} TFLOP/s in {dtype}" for dtype, rate in rates["product_GFLOP_s"].items()
    )
    return (
        f"**{kind}**: {machine['name']},{threads} {versions}; ms. Measured beside it: a copy "
        f"{rates['copy_GB_s']:,.0f} GB/s, a product {products}, exponentials "
        f"{rates['exponentials_G_s']:,.1f} G/s."
    )


#: By module, the tables that aren't of an op's cases.
OTHERS = {"ranks": on_ranks, "commands": commands}


def main() -> None:
    """Write all tables."""
    for page in (ROOT / "README.md", ROOT / "docs/measured.md"):
        page.write_text(tables(page.read_text(), ROOT / "bench/results"))
