"""The examples run on every rank, and by their command."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

from fusedops.distributed.examples import EXAMPLES  # noqa: E402
from worlds import device, on_ranks  # noqa: E402


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
@on_ranks
def test_ranks_agree_with_one(number):
    got, want = EXAMPLES[number](device())
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_the_command_runs_them():
    command = [sys.executable, "-m", "fusedops.distributed.examples"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert [line.split(":")[0] for line in shown.splitlines()] == [f.__name__ for f in EXAMPLES]
