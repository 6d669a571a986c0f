"""Show this machine's backends, instruction set, threads and GPUs."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import fusedops
from fusedops.cli import common, tables


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    found = fusedops.info()
    if args.json:
        common.print_json(asdict(found))
        return 0
    for line in str(found).splitlines():
        tables.write(line, "  ")
    return 0
