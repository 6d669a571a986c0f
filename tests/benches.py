"""Rates of a machine that tests of `fusedops bench` assume, and the scripts of the folder bench."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fusedops.bench.floors import Rates

RATES = Rates(1e10, dict.fromkeys(("float32", "bfloat16"), 1e11), 1e9)


def bench_module(name):
    """Return a script of the folder bench as a module."""
    root = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(name, root / f"bench/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
