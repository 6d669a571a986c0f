"""Results in tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench import report
from bench.timing import NOISY
from fusedops.cli import tables


def show(op: str, block: dict[str, Any]) -> None:
    """Print an op's results.

    An eager call and its CUDA graph share a row; the row's time over the floor is the graph's.
    """
    pairs = report.side_by_side(block["cases"])
    on_gpu = any(graph for _, graph in pairs)
    has_host = any(any(report.host_of(row)) for row, _ in pairs)
    headings = ("workload", "dtype", "pass", "who", *([] if on_gpu else ["how"]))
    has_floor = any(row["work"] for row in block["cases"])
    has_share = any(row.get("share") for row in block["cases"])
    numbers = ["eager ms" if on_gpu else "ms", "quartiles", *["graph ms"] * on_gpu]
    numbers += [*["over floor"] * has_floor, *["share"] * has_share]
    numbers += [*["host µs", "over empty"] * has_host, "MB", "error"]
    rows: list[tables.Row] = []
    reasons: dict[str, None] = {}
    last = None
    for eager, graph in pairs:
        row: dict[str, Any] = eager or graph or {}
        what = f"{row['workload']}: {report.sizes(row)}"
        if last not in (None, what):
            rows.append(None)
        cells = [what if what != last else "", row["dtype"], row["pass"], row["who"]]
        cells += [] if on_gpu else [row["how"]]
        last = what
        if row["refused"]:
            cells[2] = "refused" if row["ours"] else "not run"
            who = f"{row['who']}, {row['how']}, {row['workload']}, {row['dtype']}"
            reasons[f"{who}: {cells[2]}: {row['refused']}"] = None
            rows.append(([*cells, *[""] * len(numbers)], "red" if row["ours"] else "dim"))
            continue
        cells += [*_time(eager), *_time(graph)[:1] * on_gpu]
        cells += [report.digits(report.over_floor(graph or row))] * has_floor
        cells += [f"{row['share']:.0%}" if row.get("share") else ""] * has_share
        cells += report.host_of(eager) if has_host else ()
        errors = (row["error"] or {}).values()
        # None stands for an infinity or NaN.
        largest = "not finite" if None in errors else f"{max(errors):.0e}" if errors else ""
        cells += ["" if row["peak_MB"] is None else f"{row['peak_MB']:,.1f}", largest]
        rows.append((cells, None if row["ours"] else "dim"))
    if rows:
        tables.show(op, (*headings, *numbers), rows, right=len(numbers))
    for reason in reasons:
        tables.write(reason)
    for row in block["growth"]:
        first, last = (
            f"{report.digits(row['ms'][at])} ms at {row['sizes'][at]:,}" for at in (0, -1)
        )
        tables.write(
            f"{row['who']}, {row['how']}, {row['pass']}: {first} {row['unit']}, {last}; "
            f"{report.growth_of(row)}"
        )
    if unsure := sum(map(report.is_noisy, block["cases"])):
        tables.write(
            f"{unsure} of {len(block['cases'])} rows are noisy: half of their rounds differ by "
            f"over {NOISY:.0%} of the median, as when other processes use the machine"
        )
    for name, why in block["skipped"].items():
        tables.write(f"{name} is left out: {why}")


def _time(row: dict[str, Any] | None) -> tuple[str, str]:
    """Return the texts of a row's median and quartiles."""
    if row is None:
        return "", ""
    low, high = row["quartiles_ms"]
    noise = "noisy, " * report.is_noisy(row)
    return report.digits(row["ms"]), f"{noise}{report.digits(low)} – {report.digits(high)}"


def show_contests(contests: Sequence[report.Contest]) -> None:
    """Print in how many cases our eager calls are the fastest, and where a peer's are."""
    lost = [contest for contest in contests if contest.ratio > 1]
    if contests:
        won = len(contests) - len(lost)
        tables.write(f"Of {len(contests)} eager calls beside peers, ours are the fastest in {won}.")
    for contest in lost:
        row = contest.ours
        what = f"{row['op']}, {row['workload']}: {report.sizes(row)}, {row['dtype']}, {row['pass']}"
        tables.write(f"{what}: {report.digits(contest.ratio)} times {contest.peer['who']}")


def show_changes(changes: Iterable[report.Change]) -> None:
    """Print the ratios of times to an older run's."""
    rows: list[tables.Row] = []
    for change in changes:
        row = change.row
        what = f"{row['op']}, {row['workload']}: {report.sizes(row)}"
        cells = [what, row["dtype"], row["pass"], row["who"], row["how"]]
        numbers = [report.digits(change.before_ms), report.digits(row["ms"]), f"{change.ratio:.2f}"]
        verdict = "SLOWER" if change.slower else ""
        rows.append(([*cells, verdict, *numbers], "red" if change.slower else None))
    headings = ("case", "dtype", "pass", "who", "how", "", "ms before", "ms", "ratio")
    tables.show("Compared to before", headings, rows, right=3)


def show_ranks(found: dict[str, Any]) -> None:
    """Print the results of problems that ranks share."""
    numbers = ["ms", "quartiles", "efficiency", "exposed ms", "sent MB", "formula", "peak MB"]
    numbers += ["apart"]
    rows: list[tables.Row] = []
    last = None
    for row in found["cases"]:
        what = f"{row['op']}: {row['size']}, {row['dtype']}"
        if last not in (None, what):
            rows.append(None)
        cells = [what if what != last else "", row["pass"], row["who"]]
        last = what
        if row["ms"] is None:
            rows.append(([*cells, "no memory", *[""] * (len(numbers) - 1)], "dim"))
            continue
        low, high = row["quartiles_ms"]
        cells += [report.digits(row["ms"]), f"{report.digits(low)} – {report.digits(high)}"]
        cells.append(f"{row['efficiency']:.0%}" if "efficiency" in row else "")
        others = ("exposed_ms", "sent_MB", "formula_MB", "peak_MB")
        cells += [report.digits(row.get(name)) for name in others]
        cells.append(f"{row['apart']:.1e}" if "apart" in row else "")
        rows.append((cells, "dim" if "efficiency" in row and "sent_MB" not in row else None))
    title = f"{found['machine']['ranks']} ranks, {found['machine']['name']}"
    tables.show(title, ("problem", "pass", "who", *numbers), rows, right=len(numbers))
    for row in found["all_to_all"]:
        size, ms, rate = (report.digits(row[name]) for name in ("MB", "ms", "GB_s"))
        print(f"all-to-all of {size} MB a rank: {ms} ms, {rate} GB/s sent")
    columns = ("ranks", "work ms", "exchanges ms", "least ms", "most ms", "measured ms")
    names = ("alone_ms", "exchanges_ms", "least_ms", "most_ms")
    rows = []
    for row, taken in zip(found["predicted"], report.shared(found), strict=True):
        times = [*(row[name] for name in names), taken]
        cells = [row["size"], row["pass"], str(row["ranks"]), *map(report.digits, times)]
        rows.append((cells, None))
    title = "triangle_multiplicative_update, predicted from one rank's work and the rate above"
    tables.show(title, ("problem", "pass", *columns), rows, right=len(columns))
