"""A minute of the campaign, the same examples every time; `make fuzz` runs more of it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from . import campaign
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
    campaign.batch(family, campaign.places(family), ledger, seed=None, examples=EXAMPLES)
    assert ledger.calls.total() >= EXAMPLES
    expect_nothing(ledger)


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
@pytest.mark.parametrize(
    "name", [f.name for f in campaign.FAMILIES.values() if "triton" in f.backends]
)
def test_it_finds_nothing_in_the_interpreter(name):
    ledger, family = Ledger(), campaign.FAMILIES[name]
    where = campaign.places(family, ["triton"])
    campaign.batch(family, where, ledger, seed=None, examples=INTERPRETED)
    expect_nothing(ledger)


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory the Linux way")
@pytest.mark.parametrize("name", [f.name for f in campaign.FAMILIES.values() if f.growing])
def test_calls_leave_no_memory_behind(name):
    ledger = leaks([name], ["cython"], 500, say=lambda _: None)
    expect_nothing(ledger)
