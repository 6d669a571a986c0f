"""The examples run on every rank, and by their command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

from fusedops.distributed.examples import EXAMPLES  # noqa: E402
from worlds import device, on_ranks, world_of  # noqa: E402


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
@on_ranks
def test_ranks_agree_with_one(number):
    got, want = EXAMPLES[number](device())
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_the_command_runs_them():
    command = [sys.executable, "-m", "fusedops.distributed.examples"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert [line.split(":")[0] for line in shown.splitlines()] == [f.__name__ for f in EXAMPLES]


def bench():
    """Return quick results of `fusedops bench --distributed`, and the rows that every save has."""
    from fusedops.bench import ranks

    counts = []
    for found in ranks.run(device().type, quick=True):
        counts.append(len(found["cases"]))
    return found, counts


def test_the_bench_measures_every_contestant(capsys):
    from fusedops.cli.bench import show_ranks

    (found, counts), _ = world_of("gloo", 2).run("test_distributed_examples", "bench")
    # A bench that is cut short leaves the problems before.
    assert counts == [8, 14, 18, 18]
    rows = found["cases"]
    ops = {row["op"] for row in rows}
    assert ops == {"triangle_multiplicative_update", "edge rotations", "dynamic_conv"}
    for row in rows:
        assert row["ms"] > 0
        assert row["efficiency"] > 0 if row["who"] != "one device" else "efficiency" not in row
        if row["who"] == "fusedops":
            assert row["sent_MB"] == row["formula_MB"] > 0
    assert len(rows) == 2 * (4 + 3 + 2)
    assert [row["ranks"] for row in found["predicted"]] == [2, 2, 8, 8]
    for row in found["predicted"]:
        assert 0 < max(row["alone_ms"], row["exchanges_ms"]) == row["least_ms"] <= row["most_ms"]
    json.dumps(found, allow_nan=False)
    show_ranks(found)
    assert "gather, as FastFold" in capsys.readouterr().out


def test_the_bench_needs_torchrun(monkeypatch, capsys):
    from fusedops.cli import main

    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "--distributed"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_a_file_that_cant_be_written_is_an_error_before_ranks_meet(monkeypatch, capsys, tmp_path):
    from fusedops.cli import main

    monkeypatch.setenv("RANK", "0")
    assert main(["bench", "--distributed", "--json", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
