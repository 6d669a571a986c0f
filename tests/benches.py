"""The package `bench` of this checkout, and rates of a machine that its tests assume.

Tests import this module before they import from `bench`.
"""

from __future__ import annotations

from pathlib import Path

from fusedops.cli.bench import load

ROOT = Path(__file__).parents[1]
load(ROOT)

from bench.floors import Rates  # noqa: E402

RATES = Rates(1e10, dict.fromkeys(("float32", "bfloat16"), 1e11), 1e9)
