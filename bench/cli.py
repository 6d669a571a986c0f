"""``fusedops bench``: time every op, show and draw the results, and compare them to older ones."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bench import report, terminal
from bench.peers import CHECKOUTS, REPOSITORIES
from fusedops.cli.common import CommandError, add_choice, needs, needs_gpu, progress
from fusedops.structure import check_target


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fusedops bench` to its parser."""
    parser.description = (
        "Time calls as real programs make them, on every backend with kernels, beside "
        "peers that are installed, and beside the least time that bytes, products and exponentials "
        "take on this machine. Eager calls on a GPU, and tiny calls on the CPU, also have the time "
        "of the host, beside an empty torch.autograd.Function. Kernels with wrong results are not "
        "timed. Exit code 1 if a kernel is wrong, or if a case got slower than before."
    )
    parser.epilog = (
        "Peers that pip installs are found by themselves: torch, gemmi, torchref, "
        "torchref-kernels, fairchem-core, cuequivariance-torch, flash-linear-attention and "
        "causal-conv1d. Others are repositories. Clone "
        f"{' and '.join(REPOSITORIES.values())} into one folder, install einops, and set "
        f"{CHECKOUTS} to the folder."
    )
    add_choice(parser, "cpu")
    parser.add_argument(
        "--op", nargs="+", action="extend", metavar="NAME", help="only these ops or modules"
    )
    parser.add_argument(
        "--step",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="whole steps of programs instead, with the share of each part: refinement, "
        "whole_refinement, pair, pair_float32, jet, jet_block, jet_block_float32, serving, uma, "
        "uma_md, uma_md_tf32",
    )
    parser.add_argument("--quick", action="store_true", help="small cases, in a minute")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the results after each case; in an existing file an op's first case replaces "
        "all of its older results",
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


def run(args: argparse.Namespace) -> int:
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
    terminal.show_contests(report.contests(row for each in reports for row in report.cases(each)))
    wrong = [row for each in reports for row in report.refused(each)]
    slower = []
    if old:
        changes = [change for each in reports for change in report.compared(each, old)]
        terminal.show_changes(changes)
        slower = [change for change in changes if change.slower]
        print(f"{len(slower)} of {len(changes)} cases are slower than their spreads explain.")
    if args.plot:
        from bench import plot

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

    from bench import ranks

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
            terminal.show_ranks(found)
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


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the bench, merge its results into the file of ``--json``, and return them."""
    from bench import measure

    for name in args.op or []:
        if name not in measure.op_names():
            raise CommandError(f"--op {name}: it should be one of {', '.join(measure.op_names())}")
    for name in args.step or []:
        if name not in measure.STEPS:
            raise CommandError(f"--step {name}: it should be one of {', '.join(measure.STEPS)}")
        needs(*measure.STEPS[name](args.device).needs)
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
                terminal.show(op, {**block, "cases": cases, "skipped": dict(sorted(skipped))})
            # A step that can't be measured leaves the file its results of another day.
            if args.json and block["cases"]:
                kept["ops"][op] = block
                report.save(args.json, kept)
    if sys.stderr.isatty():
        for op, block in blocks.items():
            terminal.show(op, block)
    if not any(block["cases"] for block in blocks.values()):
        raise CommandError("nothing could be measured: see the reasons above")
    return found
