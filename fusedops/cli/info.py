"""``fusedops info``: `fusedops.info` on the terminal."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import fusedops
from fusedops.cli import common, tables


def add(commands: Any) -> None:
    help = "show this machine's backends, instruction set, threads and GPUs"
    parser = commands.add_parser("info", run=_command, help=help)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _command(args: argparse.Namespace) -> int:
    found = fusedops.info()
    if args.json:
        common.print_json(asdict(found))
        return 0
    for line in str(found).splitlines():
        tables.write(line, "  ")
    return 0
