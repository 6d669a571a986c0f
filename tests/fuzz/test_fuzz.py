"""A minute of the campaign, the same examples every time; `make fuzz` runs more of it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from . import campaign, sanitized
from .leaks import leaks
from .ledger import Ledger

EXAMPLES = 40
# Kernels that are interpreted take a thousand times as long.
INTERPRETED = 3


def expect_nothing(ledger):
    if ledger.findings:
        pytest.fail(ledger.report(), pytrace=False)


@pytest.mark.parametrize("name", campaign.FAMILIES)
def test_the_campaign_finds_nothing(name):
    ledger, family = Ledger(), campaign.FAMILIES[name]
    campaign.batch(family, campaign.places(), ledger, seed=None, examples=EXAMPLES)
    assert ledger.calls.total() >= EXAMPLES
    expect_nothing(ledger)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
@pytest.mark.parametrize("name", [*(family.name for family in campaign.OWN), "dynamic_conv"])
def test_it_finds_nothing_in_the_interpreter(name):
    ledger, family = Ledger(), campaign.FAMILIES[name]
    where = campaign.places(["triton"])
    campaign.batch(family, where, ledger, seed=None, examples=INTERPRETED)
    expect_nothing(ledger)


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory the Linux way")
@pytest.mark.parametrize("name", campaign.FAMILIES)
def test_calls_leave_no_memory_behind(name):
    ledger = leaks([name], ["cython"], 250, say=lambda _: None)
    expect_nothing(ledger)


@pytest.mark.parametrize("findings", [0, 3])
def test_what_a_sanitizer_says(findings, tmp_path, capsys):
    path = tmp_path / "0"
    path.with_suffix(".out").write_text("test_gpu.py::test_a[b] PASSED   [ 50%]\ntest_gpu.py::")
    found = [
        "========= Invalid __global__ read of size 4 bytes",
        "=========     at k+0x30",
        "========= ",
    ]
    last = f"========= ERROR SUMMARY: {findings} errors"
    log = ["========= COMPUTE-SANITIZER", "========= ", *findings * found, last]
    path.with_suffix(".log").write_text("\n".join(log) + "\n")
    assert sanitized.told([path], 2) == (findings > 0)
    out = capsys.readouterr().out
    assert f"{{'PASSED': 1}} of 2 tests; {findings} findings" in out
    assert ("3 x Invalid __global__ read of size 4 bytes\n  at k+0x30" in out) == (findings > 0)
