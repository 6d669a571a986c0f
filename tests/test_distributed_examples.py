"""The examples run on every rank, and by their command."""

from __future__ import annotations

import gc
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
    # A peak of memory collects garbage first, which no module is.
    gc.freeze()
    for found in ranks.run(device().type, quick=True):
        counts.append(len(found["cases"]))
    gc.unfreeze()
    return found, counts


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bench_measures_every_contestant(ranks, capsys):
    from fusedops.bench.report import shared
    from fusedops.cli.bench import show_ranks

    (found, counts), *_ = world_of("gloo", ranks).run("test_distributed_examples", "bench")
    # A bench that is cut short leaves the problems before. Four ranks are a square, too.
    assert counts == ([8, 12, 18, 22, 22] if ranks == 2 else [10, 12, 16, 22, 26, 26])
    rows, grown = found["cases"], f"N 16 → {22 if ranks == 2 else 32}"
    ops = {row["op"] for row in rows}
    assert ops == {"triangle_multiplicative_update", "edge rotations", "dynamic_conv"}
    for row in rows:
        assert row["ms"] > 0
        alone = row["who"] == "one device" or row["size"] == "N 32"
        assert "efficiency" not in row if alone else row["efficiency"] > 0
        if row["who"].startswith("fusedops"):
            assert row["sent_MB"] == row["formula_MB"] > 0
        compared = "formula_MB" in row and row["size"] not in ("N 32", grown)
        assert row["apart"] < 1e-5 if compared else "apart" not in row
    assert [row["ranks"] for row in found["predicted"]] == [2, 2, 8, 8]
    for row in found["predicted"]:
        assert 0 < max(row["alone_ms"], row["exchanges_ms"]) == row["least_ms"] <= row["most_ms"]
    ours = [row["ms"] for row in rows if (row["who"], row["size"]) == ("fusedops", "N 16")]
    assert shared(found) == [*(ours if ranks == 2 else [None, None]), None, None]
    json.dumps(found, allow_nan=False)
    show_ranks(found)
    assert "gather, as FastFold" in capsys.readouterr().out


def test_the_bench_needs_torchrun(monkeypatch, capsys):
    from fusedops.cli import main

    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "--distributed"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    for ranks in ("1", "3"):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        assert main(["bench", "--distributed"]) == 2
        assert f"ranks are {ranks}; they should be 2, 4, 8" in capsys.readouterr().err


def test_a_file_that_cant_be_written_is_an_error_before_ranks_meet(monkeypatch, capsys, tmp_path):
    from fusedops.cli import main

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", "--distributed", "--json", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
