"""``fusedops bench``: time every op, show and draw the results, and compare them to older ones."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fusedops.bench import report
from fusedops.bench.peers import CHECKOUTS, REPOSITORIES
from fusedops.bench.timing import NOISY
from fusedops.cli import tables
from fusedops.cli.common import CommandError, add_choice, needs, needs_gpu, progress
from fusedops.structure import check_target


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time every op beside its peers and the floors of the machine",
        description="Time calls as real programs make them, on every backend with kernels, beside "
        "peers that are installed, and beside the least time that bytes, products and exponentials "
        "take on this machine. Eager calls on a GPU, and tiny calls on the CPU, also have the time "
        "of the host, beside an empty torch.autograd.Function. Kernels with wrong results are not "
        "timed. Exit code 1 if a kernel is wrong, or if a case got slower than before.",
        epilog="Peers that pip installs are found by themselves: torch, gemmi, torchref, "
        "torchref-kernels, fairchem-core, cuequivariance-torch, flash-linear-attention and "
        "causal-conv1d. Others are repositories. Clone "
        f"{' and '.join(REPOSITORIES.values())} into one folder, install einops, and set "
        f"{CHECKOUTS} to the folder.",
    )
    parser.set_defaults(run=_command)
    add_choice(parser, "cpu")
    parser.add_argument(
        "--op", nargs="+", action="extend", metavar="NAME", help="only these ops or modules"
    )
    parser.add_argument(
        "--step",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="whole steps of programs instead, with the share of each part: refinement, pair, jet, "
        "jet_block, serving, uma",
    )
    parser.add_argument("--quick", action="store_true", help="small cases, in a minute")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the results; in an existing file they replace results of the same ops",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="time problems that the ranks of torchrun share, instead of all else",
    )
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="name the cases that got slower since then"
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the results as SVG there")
    parser.add_argument(
        "--from",
        dest="files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="instead of measuring, compare and draw the results in these files",
    )


def _command(args: argparse.Namespace) -> int:
    if args.distributed:
        return _on_ranks(args)
    if args.plot:
        needs("matplotlib")
    if args.files and args.json:
        raise CommandError(f"--json {args.json}: --from measures nothing that could be written")
    try:
        old = report.read(args.compare) if args.compare else None
        reports = [report.read(path) for path in args.files] if args.files else [_measure(args)]
    except report.ReportError as error:
        raise CommandError(str(error)) from None
    show_contests(report.contests(row for each in reports for row in report.cases(each)))
    wrong = [row for each in reports for row in report.refused(each)]
    slower = []
    if old:
        changes = [change for each in reports for change in report.compared(each, old)]
        show_changes(changes)
        slower = [change for change in changes if change.slower]
        print(f"{len(slower)} of {len(changes)} cases are slower than their spreads explain.")
    if args.plot:
        from fusedops.bench import plot

        try:
            for path in plot.draw(reports, args.plot):
                print(f"Picture: {path}")
        except OSError as error:
            raise CommandError(f"{args.plot}: {error.strerror or error}") from None
    if wrong:
        who = sorted({f"{row['op']} by {row['who']}" for row in wrong})
        print(f"NOT TIMED, because wrong: {', '.join(who)}.")
    return 1 if wrong or slower else 0


def _on_ranks(args: argparse.Namespace) -> int:
    """Time problems that ranks share; the first rank prints and writes the results."""
    for option in ("op", "backend", "compare", "plot", "files"):
        if getattr(args, option):
            raise CommandError("--distributed: it goes with --device, --quick and --json alone")
    needs("torch")
    if "RANK" not in os.environ:
        raise CommandError(
            "--distributed: run it as torchrun --nproc-per-node 2 -m fusedops bench --distributed"
        )
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2 or size & (size - 1):
        raise CommandError(f"--distributed: ranks are {size}; they should be 2, 4, 8 or so on")
    import torch
    import torch.distributed as dist

    from fusedops.bench import ranks

    first = os.environ["RANK"] == "0"
    if args.json and first:
        _check_json(args.json)
    if args.device == "cuda":
        needs_gpu()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        # A run that is cut short leaves this, and the results of another day.
        part = args.json and first and args.json.with_name(f"{args.json.name}.part")
        for found in ranks.run(args.device, args.quick):
            if part:
                report.save(part, found)
        if first:
            show_ranks(found)
        if part:
            report.save(args.json, found)
            part.unlink()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def _check_json(path: Path) -> None:
    """Find out before the work, not after it, that the file can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{path.parent}: {error.strerror}") from None
    check_target(path)


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


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the bench, merge its results into the file of ``--json``, and return them."""
    from fusedops.bench import measure
    from fusedops.bench.steps import STEPS

    for name in args.op or []:
        if name not in measure.op_names():
            raise CommandError(f"--op {name}: it should be one of {', '.join(measure.op_names())}")
    for name in args.step or []:
        if name not in STEPS:
            raise CommandError(f"--step {name}: it should be one of {', '.join(STEPS)}")
        needs(*STEPS[name](args.device).needs)
    if args.device == "cuda":
        needs_gpu()
    ops, backends, whole = (tuple(names or ()) for names in (args.op, args.backend, args.step))
    plan = measure.Plan(args.device, ops, backends, args.quick, whole)
    if args.json:
        _check_json(args.json)
    kept, found = report.start(args.json, args.device), report.new(args.device)
    blocks: dict[str, Any] = {}
    with progress("measuring", plan.steps) as advance:
        bench = measure.Bench(plan, advance)
        for op, block in bench.run():
            before = blocks.get(op, {"cases": [], "skipped": {}})
            blocks[op] = found["ops"][op] = block
            # A bar would stand between the tables.
            if not sys.stderr.isatty():
                skipped = block["skipped"].items() - before["skipped"].items()
                cases = block["cases"][len(before["cases"]) :]
                show(op, {**block, "cases": cases, "skipped": dict(sorted(skipped))})
            # A step that can't be measured leaves the file its results of another day.
            if args.json and block["cases"]:
                kept["ops"][op] = block
                report.save(args.json, kept)
    if sys.stderr.isatty():
        for op, block in blocks.items():
            show(op, block)
    if not any(block["cases"] for block in blocks.values()):
        raise CommandError("nothing could be measured: see the reasons above")
    return found


def show(op: str, block: dict[str, Any]) -> None:
    """Print an op's results.

    An eager call and its CUDA graph share a row; the row's time over the floor is the graph's.
    """
    pairs = report.side_by_side(block["cases"])
    on_gpu = any(graph for _, graph in pairs)
    has_host = any(any(report.host_of(row)) for row, _ in pairs)
    headings = ("workload", "dtype", "pass", "who", *([] if on_gpu else ["how"]))
    has_floor = any(row["over_floor"] for row in block["cases"])
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
        cells += [report.digits((graph or row)["over_floor"])] * has_floor
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
