"""``fusedops bench``: the package `bench` of a checkout, which takes the arguments."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module, util
from pathlib import Path
from typing import Any

import fusedops
from fusedops.cli.common import CommandError


def add(commands: Any) -> None:
    help = "time every op beside its peers and the floors of the machine"
    commands.add_parser("bench", help=help, fill=_fill)


def _fill(parser: argparse.ArgumentParser) -> None:
    if "bench" not in sys.modules:
        places = Path(fusedops.__file__).parents[1], Path.cwd(), *Path.cwd().parents
        files = "bench/cli.py", "fusedops/cli/bench.py", "meson.build"
        roots = [root for root in places if all((root / file).is_file() for file in files)]
        if not roots:
            raise CommandError("bench: it is not installed; run it in a checkout of the project")
        load(roots[0])
    import_module("bench.cli").fill(parser)


def load(root: Path) -> None:
    """Let `import bench` find the package of a checkout, wherever else Python looks."""
    spec = util.spec_from_file_location("bench", root / "bench/__init__.py")
    sys.modules["bench"] = util.module_from_spec(spec)  # type: ignore[arg-type]
