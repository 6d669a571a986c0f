"""The package `bench` of this checkout, and what its tests share.

Tests import this module before they import from `bench`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fusedops import cli
from fusedops.cli.bench import load

ROOT = Path(__file__).parents[1]
load(ROOT)

from bench import report  # noqa: E402
from bench.floors import Rates  # noqa: E402
from bench.peers import Unsuited  # noqa: E402
from bench.workloads import errors  # noqa: E402

RATES = Rates(1e10, dict.fromkeys(("float32", "bfloat16"), 1e11), 1e9)


def run(path, *arguments, code=0):
    """Run `fusedops bench` quickly, and return the blocks of its file by op."""
    assert cli.main(["bench", "--quick", *arguments, "--json", str(path)]) == code
    return report.read(path)["ops"]


def judged(peer, workloads, most):
    """Yield the workloads that suit a peer, and its errors on the CPU at sizes up to `most`."""
    for workload in workloads:
        small = replace(workload, size=min(workload.small, most), device="cpu")
        try:
            found = errors(small, peer.prepare, "torch", "float32")
        except Unsuited:
            continue
        yield workload, found
