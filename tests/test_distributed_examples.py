"""The examples run on every rank, and by their command."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

import benches  # noqa: E402, F401
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
    names = [f.__name__ for f in EXAMPLES]
    heads = [line.split(":")[0] for line in shown.splitlines()]
    # Gloo of torch 2.8 prints lines of its own.
    assert [head for head in heads if head in names] == names


def bench(room):
    """Return quick results of `fusedops bench --distributed`, and the rows that every save has.

    A GPU of so many bytes would hold all but one device's training, and the gather's.
    """
    from bench import ranks

    counts = []
    with pytest.MonkeyPatch.context() as patch:
        if room:
            patch.setattr(ranks, "memory", lambda device: room)
        # As few rounds as there may be.
        slowest = ranks._slowest
        patch.setattr(ranks, "_slowest", lambda step, device, _: slowest(step, device, 0.0))
        for found in ranks.run(device().type, quick=True):
            counts.append(len(found["cases"]))
    return found, counts


@pytest.mark.parametrize(("ranks", "room"), [(2, 1.2e6), (4, None)])
def test_the_bench_measures_every_contestant(ranks, room, capsys):
    from bench.report import shared
    from bench.terminal import show_ranks

    work = world_of("gloo", ranks).run("test_distributed_examples", "bench", room=room)
    found, counts = work[0]
    rows = found["cases"]
    ops = {row["op"] for row in rows}
    assert ops == {"triangle_multiplicative_update", "edge rotations", "dynamic_conv"}
    # A bench that is cut short leaves the problems before. Four ranks are a square, too, and two
    # have a row for one device's bounded memory.
    assert counts == [10, 20, 26, 30, 30]
    lacking = [(row["size"], row["who"], row["pass"]) for row in rows if row["ms"] is None]
    training = "forward and backward"
    if room:
        assert lacking[:2] == [
            ("N 16", "one device", training),
            ("N 16", "gather, as FastFold", training),
        ]
        assert {size for size, _, _ in lacking[2:]} == {"N 22"}
    else:
        assert not lacking
    ones = {}
    for row in rows:
        if row["ms"] is None:
            continue
        problem = row["op"], row["size"], row["pass"]
        if row["who"].startswith("one device"):
            ones.setdefault(problem, row["ms"])
            assert "efficiency" not in row
        elif problem in ones:
            many = ranks if row["op"] == "triangle_multiplicative_update" else 1
            assert row["efficiency"] == pytest.approx(ones[problem] / row["ms"] / many)
        if row["who"].startswith("fusedops"):
            assert row["sent_MB"] == row["formula_MB"] > 0
        smallest = row["size"] not in ("N 22", "N 32") and "one device" not in row["who"]
        assert row["apart"] < 1e-5 if smallest else "apart" not in row
    assert [row["ranks"] for row in found["predicted"]] == [2, 2, 8, 8]
    for row in found["predicted"]:
        assert 0 < max(row["alone_ms"], row["exchanges_ms"]) == row["least_ms"] <= row["most_ms"]
    ours = [row["ms"] for row in rows if (row["who"], row["size"]) == ("fusedops", "N 16")]
    assert shared(found) == [*(ours if ranks == 2 else [None, None]), None, None]
    json.dumps(found, allow_nan=False)
    show_ranks(found)
    assert "gather, as FastFold" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [1.01, math.nan])
@on_ranks(worlds=[("gloo", 2)])
def test_the_bench_refuses_a_gradient_of_weights_that_differs_from_one_devices(factor):
    from bench import ranks

    problem = ranks.triangles(16, torch.empty(0))

    def whole(x, *weights):
        last = weights[3] * factor - weights[3].detach() * (factor - 1)
        return problem.whole(x, *weights[:3], last)

    broken = problem._replace(whole=whole)
    with pytest.raises(ArithmeticError, match="triangle_multiplicative_update by fusedops is"):
        list(ranks.measured(broken, "cpu", 0.01, compare=True))


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
