"""`fusedops bench` measures right, refuses bad input and wrong kernels, and sees slowdowns."""

from __future__ import annotations

import gc
import importlib
import json
import re
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import benches
import fusedops
from bench import history, measure, memory, plot, report, steps, tables, terminal, uma, whole
from bench import timing as timings
from bench.contests import errors_of_step
from bench.floors import Rates
from bench.measure import Bench, Plan, power
from bench.peers import EMPTY, PEERS, Unsuited
from bench.timing import interleaved
from bench.workloads import BACKWARD, GROWTH, WORKLOADS, Source, Work, errors
from fusedops import cli
from fusedops._catalogue import BOTH, FORWARD, steps_of
from fusedops._frame import packed, registry
from fusedops.wigner import wigner_d
from places import HAS_TORCH, available, needs_torch

pytestmark = pytest.mark.usefixtures("young_heap")
OPS = [getattr(fusedops, name) for name in fusedops.__all__]
OPS = [wigner_d, *(op for op in OPS if hasattr(op, "explain"))]
SMALL = list({(w.op.__name__, w.name): w for w in WORKLOADS if not w.needs}.values())


@pytest.fixture
def small_sizes(monkeypatch):
    monkeypatch.setattr(measure, "WORKLOADS", [replace(w, size=w.small) for w in WORKLOADS])
    monkeypatch.setattr(measure, "GROWTH", {"cpu": [(w, sizes[:5]) for w, sizes in GROWTH["cpu"]]})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_has_a_workload_and_grows(device):
    own = [w for w in WORKLOADS if w.device == device]
    ops = {op.__name__ for op in OPS}
    assert {w.op.__name__ for w in own} == ops
    assert {w.op.__name__ for w in own if w.quick} == ops
    assert {w.op.__name__ for w, _ in GROWTH[device]} == ops
    for op in OPS:
        sizes = [w.size for w in own if w.op is op and not w.tiny]
        # The time of a triangle goes with the cube.
        times = 4 if op.__name__.startswith("triangle") else 20
        assert max(sizes) >= times * min(sizes)
    for _, sizes in GROWTH[device]:
        assert sizes[-1] / sizes[0] >= 999
        assert list(sizes) == sorted(set(sizes))
    # Rows of different cases have different keys, so that none is compared to another.
    makes = [(w, getattr(w.make, "keywords", {})) for w in own if not w.needs]
    keys = [(w.op.__name__, w.name, w.size, w.dtype, str(make)) for w, make in makes]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: f"{w.op.__name__}-{w.name}")
def test_a_workload_says_what_it_is(workload):
    problem = workload.make(Source("float32"), workload.small)
    assert problem.op is workload.op
    assert list(problem.work) == ([FORWARD, BACKWARD, BOTH] if problem.leaves else [FORWARD])
    assert (BOTH in steps_of(problem, "numpy", None)) == bool(problem.leaves)
    assert all(work.bytes > 0 for work in problem.work.values())
    (value,) = problem.forward(None)()
    # A forward pass moves at least its first array and its value.
    first = next(a for a in problem.arguments.values() if isinstance(a, np.ndarray))
    assert problem.work[FORWARD].bytes >= 0.99 * (first.nbytes + np.asarray(value).nbytes)


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=needs_torch)])
@pytest.mark.parametrize("workload", SMALL, ids=lambda w: f"{w.op.__name__}-{w.name}")
def test_backward_alone_is_the_gradient(workload, framework):
    small = workload.make(Source("float32"), min(workload.small, 40))
    if not small.leaves:
        pytest.skip("it has no gradient")
    if framework == "torch":
        small = small.to("cpu", "float32")
    cotangent = small.cotangent()
    _, *gradients = small.both(None, cotangent)()
    alone = small.backward(None, cotangent)()
    assert len(alone) == len(gradients) == len(small.leaves)
    for name, one, other in zip(small.leaves, alone, gradients, strict=True):
        assert tuple(one.shape) == tuple(small.arguments[name].shape)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_interleaved_runs_take_turns():
    taken = []
    runs = {name: lambda name=name: taken.append(name) for name in "ab"}
    times = interleaved(runs, lambda: None, seconds=1e-9, rounds=7)
    rounds = "".join(taken).replace("aaaa", "").replace("bbbb", "")
    assert rounds.endswith("ab" * 5)
    for timing in times.values():
        low, high = timing.quartiles_ms
        assert 0 < low <= timing.ms <= high
        assert timing.rounds >= 5


@pytest.mark.parametrize("host", [False, True])
def test_the_host_does_not_wait(monkeypatch, host):
    """A call takes the host one second, and the device ten more after that."""
    now, queue = [0.0], []

    def run():
        now[0] += 1
        queue.append(10)

    def wait():
        now[0] += sum(queue)
        queue.clear()

    monkeypatch.setattr(timings.time, "perf_counter", lambda: now[0])
    (found,) = interleaved({"a": run}, wait, seconds=1000, rounds=7, host=host).values()
    assert found.ms == pytest.approx(1e3 if host else 11e3)
    assert found.rounds == 7
    # A GPU's queue bounds the calls that time the host; one that isn't timed comes first.
    assert len(queue) == (1 + 12 if host else 0)
    interleaved({"a": run}, wait, seconds=1e6, rounds=7, host=host)
    assert len(queue) == (1 + max(timings.CALLS) if host else 0)


def test_every_run_follows_an_operation_whose_time_is_left_out(monkeypatch):
    now, order = [0.0], []

    def step(name, seconds):
        now[0] += seconds
        order.append(name)

    monkeypatch.setattr(timings.time, "perf_counter", lambda: now[0])
    before, run = (partial(step, *some) for some in (("before", 7), ("run", 2)))
    (found,) = interleaved({"a": run}, lambda: None, 100, rounds=5, before=before).values()
    assert found.ms == pytest.approx(2e3)
    assert order[-10:] == ["before", "run"] * 5


def test_the_power_of_growth():
    sizes = [10, 31, 100, 316, 1000, 3162, 10000]
    for exponent in (0.5, 1.0, 2.37):
        times = [1e-3 * n**exponent for n in sizes]
        assert power(sizes, times) == pytest.approx(exponent, abs=0.005)
        # One size beside a busy process.
        assert power(sizes, [*times[:-1], 20 * times[-1]]) == pytest.approx(exponent, abs=0.05)
    # Overhead is part of the times that are shown.
    assert power([100, 10000], [0.0539, 0.296]) == 0.37
    assert power(sizes[2:], [0.0539, 0.0756, 0.126, 0.193, 0.296]) == 0.37


SIZES = [100, 316, 1000, 3162, 10000, 31623]


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ([], "it grows with the power 1.00\n"),
        ([100], "without 1 noisy sizes"),
        ([31623], "without 1 noisy sizes"),
        ([1000, 31623], "noisy at 2 of 6 sizes"),
    ],
)
def test_a_noisy_size_is_no_growth(spoilt, told, capsys):
    """Times grow linearly, with delays at the spoilt sizes."""
    times = [1e-3 * n * (1 if n not in spoilt else 20) for n in SIZES]
    spread = [(t * (1 - 0.9 * (n in spoilt)), 1.1 * t) for n, t in zip(SIZES, times, strict=True)]
    exponent, noisy = measure.grown(SIZES, times, spread)
    assert noisy == spoilt
    assert exponent == (None if len(spoilt) > 1 else pytest.approx(1, abs=0.011))
    row = {"who": "cython", "how": "NumPy", "pass": BOTH, "unit": "planes", "sizes": SIZES}
    row |= {"ms": times, "exponent": exponent, "noisy": noisy}
    terminal.show("op", {"cases": [], "growth": [row], "skipped": {}})
    out = capsys.readouterr().out
    assert told in out
    assert ("it grows" in out) == (exponent is not None)


def test_noise_is_told(capsys):
    quiet = rows_of(("a", 0.9, 1.0, 1.1), ("b", 9.0, 10.0, 11.0))
    noisy = rows_of(("a", 0.9, 1.0, 1.1), ("b", 7.0, 10.0, 31.0))
    for given, count in ((quiet, 0), (noisy, 1)):
        cases = [
            row | {"work": None, "peak_MB": None, "error": None} for row in report.cases(given)
        ]
        terminal.show("op", {"cases": cases, "growth": [], "skipped": {}})
        out = capsys.readouterr().out
        assert out.count("noisy, ") == count
        assert ("1 of 2 rows are noisy" in out) == bool(count)


ARRAYS = np.ones(2**24, np.float32), np.ones((1, 16384, 1024), np.float32)


# Torch doesn't reuse the memory of temporaries, as NumPy does; the C library keeps arrays smaller
# than 64 MB for later ones.
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells the peak of a step")
@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=needs_torch)])
def test_peak_memory_counts_results_temporaries_and_what_the_pool_hands_out(framework):
    make = np.asarray if framework == "numpy" else importlib.import_module("torch").from_numpy
    x, tokens, kernels = map(make, (*ARRAYS, np.ones((1024, 4), np.float32)))
    for step, MB in (
        (lambda: x + 1, 64),
        (lambda: (x + 1) * (x - 1) + 2 * x, 128 if framework == "numpy" else 192),
        (lambda: fusedops.dynamic_conv(tokens, kernels), 64),
        (lambda: None, 0),
    ):
        assert memory.peak_MB(step, "cpu") == pytest.approx(MB, rel=0.1, abs=1)


def test_systems_other_than_linux_tell_no_peak(tmp_path, monkeypatch):
    def cdll(name):
        raise TypeError("Windows has no library without a name")

    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")
    monkeypatch.setattr(memory.ctypes, "CDLL", cdll)
    assert memory.peak_MB(lambda: None, "cpu") is None


@needs_torch
def test_memory_that_others_give_back_meanwhile_is_not_a_steps(monkeypatch):
    import torch

    class Model:
        def __init__(self):
            self.own = self

    def step():
        own.append(3)
        gc.collect()

    own, others = [], Model()
    left = weakref.ref(others)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: sum(own[:1]) + 5 * bool(left()))
    del others
    assert uma._captured({BOTH: step})[BOTH].held == 3


def test_the_floor_is_the_longest_of_what_must_be_done():
    floors = benches.RATES.floors_ms(Work(1e7, 2e8, 4e6), "float32", share=0.5)
    assert floors == pytest.approx({"bytes": 1.0, "FLOP": 4.0, "exponentials": 8.0})
    assert list(benches.RATES.floors_ms(Work(1e7), "float32")) == ["bytes"]


def test_the_command_finds_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fusedops, "__file__", str(tmp_path / "installed/fusedops/__init__.py"))
    for name in ("bench", "bench.cli"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    checkout, inner = tmp_path / "checkout", tmp_path / "checkout/docs"
    for folder in (checkout / "bench", checkout / "fusedops/cli", inner):
        folder.mkdir(parents=True)
    monkeypatch.chdir(inner)
    (checkout / "bench/__init__.py").touch()
    (checkout / "bench/cli.py").write_text("add = lambda parser: None\nrun = lambda args: 7\n")
    # Other projects have such a package, too.
    assert cli.main(["bench", "--quick"]) == 2
    assert "not installed; run it in a checkout" in capsys.readouterr().err
    for file in ("fusedops/cli/bench.py", "meson.build"):
        (checkout / file).touch()
    assert cli.main(["bench"]) == 7


@pytest.mark.usefixtures("quick_bench")
def test_a_run_has_its_json_and_its_table(tmp_path, capsys):
    path = tmp_path / "new" / "cpu.json"
    (block,) = benches.run(path, "--op", "planarity").values()
    out = capsys.readouterr().out
    assert "planarity_nll" in out
    assert "over floor" in out
    assert "it grows with the power" in out or "growth has no power" in out
    assert report.read(path)["device"] == block["machine"]["device"] == "cpu"
    assert block["machine"]["threads"] == fusedops.get_num_threads()
    assert {"fusedops", "numpy", "python"} <= block["machine"]["versions"].keys()
    assert set(block["rates"]) == {"copy_GB_s", "product_GFLOP_s", "exponentials_G_s"}
    ours = [row for row in block["cases"] if row["ours"]]
    assert {row["pass"] for row in ours} == {FORWARD, BOTH}
    for row in block["cases"]:
        low, high = row["quartiles_ms"]
        # A file keeps five digits of medians and three of quartiles, which moves these by 0.5 %.
        assert 0 < low <= 1.005 * row["ms"] <= 1.005**2 * high
        assert report.over_floor(row) == row["ms"] / row["work"]["floor_ms"] > 0
    tiny = {w.name for w in WORKLOADS if w.tiny}
    for row in ours:
        assert set(row["error"]) == {"value", "gradient"}
        assert row["error_of"] == min(100, row["size"])
        no_peak = row["workload"] in tiny or sys.platform != "linux"
        assert (row["peak_MB"] is None) == no_peak
    for row in block["growth"]:
        assert len(row["sizes"]) == len(row["ms"]) == 4
        assert row["sizes"][-1] >= 99 * row["sizes"][0]


def test_every_op_has_a_call_that_is_the_hosts():
    tiny = [w for w in WORKLOADS if w.tiny]
    assert [w.op.__name__ for w in tiny] == list({w.op.__name__: w for w in WORKLOADS})
    for workload in tiny:
        assert workload.device == "cpu"
        assert workload.threads == 1
        assert workload.quick
        assert workload.times_host
        arrays = [a for a in workload.problem().arguments.values() if isinstance(a, np.ndarray)]
        assert 0 < sum(a.nbytes for a in arrays) < 10_000
    assert not any(w.times_host for w in WORKLOADS if w.device == "cpu" and not w.tiny)
    assert all(w.times_host for w in WORKLOADS if w.device == "cuda")


@needs_torch
@pytest.mark.parametrize("workload", [w for w in WORKLOADS if w.tiny], ids=lambda w: w.op.__name__)
def test_the_empty_function_is_of_as_many_inputs(workload):
    (peer,) = (p for p in PEERS if p.name == EMPTY and workload.op.__name__ in p.ops)
    problem = workload.problem().to("cpu", "float32")
    steps = peer.prepare(problem, None)
    assert list(steps) == ([FORWARD, BOTH] if problem.leaves else [FORWARD])
    (value,) = steps[FORWARD]()
    first = problem.arguments[next(iter(problem.leaves or problem.arguments))]
    assert value.shape == first.shape
    assert not value.requires_grad
    if problem.leaves:
        _, *gradients = steps[BOTH]()
        assert [g.shape for g in gradients] == [problem.arguments[n].shape for n in problem.leaves]


@needs_torch
@pytest.mark.usefixtures("quick_bench", "small_sizes")
def test_the_hosts_time_beside_an_empty_function(monkeypatch, capsys):
    monkeypatch.setattr(measure, "GROWTH", {"cpu": []})
    *_, (op, block) = Bench(Plan(ops=("dynamic_conv",), backends=("numpy",), quick=True)).run()
    assert {row["workload"] for row in block["cases"]} == {"Jet-Nemotron", "a call"}
    terminal.show(op, block)
    out = capsys.readouterr().out
    assert "host µs" in out
    assert "over empty" in out
    seen = set()
    for row in block["cases"]:
        if row["workload"] != "a call":
            assert row["host_ms"] is row["over_empty"] is None
            assert (row["alone_ms"] is None) == (row["ms"] is None or row["how"] != "torch"), row
            assert row["who"] != EMPTY
            continue
        seen.add((row["who"], row["how"], row["pass"]))
        # On the CPU there is no device to wait for.
        assert row["host_ms"] == row["ms"] > 0
        (empty,) = (
            other["host_ms"]
            for other in block["cases"]
            if (other["who"], other["pass"]) == (EMPTY, row["pass"])
        )
        if row["how"] == "NumPy" or row["who"] == EMPTY:
            assert row["over_empty"] is None
        else:
            assert row["over_empty"] == row["host_ms"] / empty
    whos = (("numpy", "NumPy"), ("numpy", "torch"), ("torch eager", "torch"), (EMPTY, "torch"))
    assert seen == {(*who, what) for who in whos for what in (FORWARD, BOTH)}


@pytest.mark.usefixtures("quick_bench", "small_sizes")
def test_growth_that_ends_early_has_its_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Bench, "_at", raising)
    (block,) = benches.run(tmp_path / "cpu.json", "--op", "planarity").values()
    assert block["growth"] == []
    reasons = {n: why for n, why in block["skipped"].items() if n.startswith("growth of")}
    assert set(reasons.values()) == {"ZeroDivisionError: no"}
    assert capsys.readouterr().out.count("growth of planarity_nll beyond") == 1


@pytest.mark.usefixtures("quick_bench")
def test_a_run_of_one_op_leaves_the_others_in_the_file(tmp_path, capsys):
    path = tmp_path / "cpu.json"
    given = report.new("cpu")
    given["ops"] = {op: {"cases": [], "growth": []} for op in ("another", "dynamic_conv_step")}
    report.save(path, given)
    after = benches.run(path, "--op", "dynamic_conv_step", "--backend", "numpy")
    assert after["another"] == given["ops"]["another"]
    rows = after["dynamic_conv_step"]["cases"]
    assert {row["who"] for row in rows if row["ours"]} == {"numpy"}
    assert "another" not in capsys.readouterr().out
    report.save(path, report.new("cuda"))
    before = path.read_bytes()
    assert cli.main(["bench", "--quick", "--op", "planarity", "--json", str(path)]) == 2
    assert "of cuda, not of cpu" in capsys.readouterr().err
    assert path.read_bytes() == before


def changed(monkeypatch, primitive, backend, change):
    """Let a kernel's outputs be changed after its call."""
    (own,) = (each for each in registry.BACKENDS if each.name == backend)
    kernel = registry._kernel(own, primitive)
    monkeypatch.setitem(registry._kernels, (primitive, backend), lambda a, y: change(kernel, a, y))
    monkeypatch.setattr(registry, "_chosen", {})


def raising(*args):
    raise ZeroDivisionError("no")


def off_by_a_hundredth(kernel, a, y):
    kernel(a, y)
    y[0][7] *= 1.01


# The error is in the forward pass, or only in the gradient; outputs aren't written; a call raises.
@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.usefixtures("quick_bench", "small_sizes", "fresh_plans")
@pytest.mark.parametrize(
    ("op", "primitive", "change", "word"),
    [
        ("structured_gather", "structured_scatter_add", None, "off by"),
        ("structured_gather", "structured_gather", None, "off by"),
        ("dynamic_conv_step", "dynamic_conv_step", lambda *_: None, "value off by inf"),
        ("dynamic_conv_step", "dynamic_conv_step", raising, "ZeroDivisionError: no"),
    ],
)
def test_a_wrong_kernel_is_not_timed(
    tmp_path, capsys, monkeypatch, wrong_kernel, op, primitive, change, word
):
    wrong_kernel(primitive, "numba", -1)
    if change is not None:
        changed(monkeypatch, primitive, "numba", change)
    command = "--op", op, "--backend", "numba", "numpy"
    (block,) = benches.run(tmp_path / "cpu.json", *command, code=1).values()
    out = capsys.readouterr().out
    assert f"NOT TIMED, because wrong: {op} by numba." in out
    assert "refused" in out
    assert word in out
    ours = [row for row in block["cases"] if row["who"] == "numba"]
    assert {row["how"] for row in ours} == {"NumPy", *(["torch"] if HAS_TORCH else [])}
    assert len({row["workload"] for row in ours}) == 2
    for row in ours:
        assert row["ms"] is None
        assert word in row["refused"]
        assert change is not None or max(row["error"].values()) > 1e-6
    good = [row for row in block["cases"] if row["who"] == "numpy"]
    assert all(row["ms"] and not row["refused"] for row in good)
    assert {row["who"] for row in block["growth"]} == {"numpy"}


@needs_torch
@pytest.mark.usefixtures("quick_bench", "tiny_steps", "fresh_plans")
def test_a_wrong_step_is_not_timed(capsys, monkeypatch):
    _, backend = available("numpy", "cython")
    changed(monkeypatch, "gaussian_density_vjp", backend, off_by_a_hundredth)
    assert cli.main(["bench", "--quick", "--step", "refinement", "--backend", backend]) == 1
    assert "NOT TIMED, because wrong: refinement by" in capsys.readouterr().out


def work_of(size):
    return dict(zip(report.WORK, (size, 1, 0, 0.5), strict=True))


def rows_of(*times):
    """Return a report of one op with a case for every (who, q1, median, q3)."""
    cases = [
        {
            **{"op": "dynamic_conv", "workload": "Jet", "size": 7, "shape": {"T": 7}},
            **{"dtype": "float32", "pass": FORWARD, "who": who, "how": "NumPy", "ours": True},
            "computes": True,
            **{"ms": ms, "quartiles_ms": [low, high], "refused": None},
        }
        for who, low, ms, high in times
    ]
    return {**report.new("cpu"), "ops": {"dynamic_conv": {"cases": cases, "growth": []}}}


@pytest.mark.parametrize(
    ("before", "after", "slower"),
    [
        ((0.9, 1.0, 1.1), (0.9, 1.0, 1.1), False),
        ((0.9, 1.0, 1.1), (1.0, 1.2, 1.4), False),  # spreads overlap
        ((0.99, 1.0, 1.01), (1.02, 1.03, 1.04), False),  # apart, but by as little as any two runs
        ((0.9, 1.0, 1.1), (1.2, 1.3, 1.4), True),
        ((1.2, 1.3, 1.4), (0.9, 1.0, 1.1), False),  # faster
    ],
)
def test_what_is_slower(before, after, slower):
    (change,) = report.compared(rows_of(("cython", *after)), rows_of(("cython", *before)))
    assert change.slower == slower
    assert change.ratio == pytest.approx(after[1] / before[1])


def test_comparing_files(tmp_path, capsys):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    report.save(old, rows_of(("cython", 0.9, 1.0, 1.1), ("numba", 1.9, 2.0, 2.1)))
    report.save(new, rows_of(("numba", 2.9, 3.0, 3.1), ("cython", 0.8, 0.9, 1.0), ("x", 1, 2, 3)))
    command = ["bench", "--from", str(new), "--compare"]
    assert cli.main([*command, str(old)]) == 1
    out = capsys.readouterr().out
    assert out.count("SLOWER") == 1
    assert "1.50" in out
    assert "1 of 2 cases" in out
    assert cli.main([*command, str(new)]) == 0
    assert "0 of 3 cases" in capsys.readouterr().out


def test_where_a_peer_is_faster(tmp_path, capsys):
    given = rows_of(("cython", 0.9, 2.0, 2.1), ("numba", 1.9, 3.0, 3.1), ("x", 0.9, 1.0, 1.1))
    cases = given["ops"]["dynamic_conv"]["cases"]
    cases[2]["ours"] = False
    empty = cases[2] | {"who": "empty", "ms": 0.1, "computes": False}
    refused = cases[2] | {"pass": BOTH, "ms": None, "refused": "no"}
    tensors = cases[2] | {"how": "torch"}
    won = [cases[0] | {"size": 8, "shape": {"T": 8}}, cases[2] | {"size": 8, "shape": {"T": 8}}]
    won[1] |= {"ms": 2.5}
    graph = won[1] | {"how": "CUDA graph", "ms": 0.1}
    cases += [empty, refused, tensors, *won, graph]
    lost, other = report.contests(cases)
    assert (lost.ours["who"], lost.peer["who"], lost.ratio) == ("cython", "x", 2.0)
    assert other.ratio == 0.8
    report.save(tmp_path / "cpu.json", given)
    assert cli.main(["bench", "--from", str(tmp_path / "cpu.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 eager calls beside peers, ours are the fastest in 1." in lines[0]
    assert lines[1] == "dynamic_conv, Jet: T 7, float32, forward: 2.00 times x"
    assert len(lines) == 2


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_results_without_the_hosts_time_are_shown(capsys, name):
    """An older version, or a machine without torch, leaves such results."""
    found = report.read(benches.ROOT / f"bench/results/{name}.json")
    for row in report.cases(found):
        for key in ("host_ms", "over_empty"):
            row.pop(key, None)
    for op, block in found["ops"].items():
        terminal.show(op, block)
    out = capsys.readouterr().out
    assert "host µs" not in out
    assert ("graph ms" in out) == (name == "h200")
    assert "host" not in tables.section(found["ops"], name)


def test_eager_calls_and_graphs_share_a_row(capsys):
    given = rows_of(("triton", 1.9, 2.0, 2.1), ("torch eager", 2.9, 3.0, 3.1))
    (eager, peer) = report.cases(given)
    eager["how"] = peer["how"] = "torch"
    graph = eager | {"how": "CUDA graph", "ms": 0.5, "quartiles_ms": [0.4, 0.6]}
    alone = graph | {"pass": BACKWARD, "ms": 0.7}
    refused = peer | {"how": "CUDA graph", "ms": None, "refused": "no", "quartiles_ms": None}
    rows = [eager, peer, graph, alone, refused]
    assert report.side_by_side(rows) == [
        (eager, graph),
        (peer, None),
        (None, alone),
        (None, refused),
    ]
    for row in rows:
        row |= {"work": {"floor_ms": 0.4}, "peak_MB": None, "error": None}
    eager |= {"host_ms": 0.0415, "over_empty": 2.56}
    terminal.show("op", {"cases": rows, "growth": [], "skipped": {}})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (line,) = (line for line in lines if "2.00" in line)
    assert line[-8:] == ["2.00", "1.90", "–", "2.10", "0.500", "1.25", "41.5", "2.56"]
    (line,) = (line for line in lines if "0.700" in line)
    assert line[-2:] == ["0.700", "1.75"]


def test_pictures_of_files(tmp_path):
    pytest.importorskip("matplotlib")
    found, op = report.read(benches.ROOT / "bench/results/cpu.json"), "dynamic_conv_step"
    report.save(tmp_path / "cpu.json", found | {"ops": {op: found["ops"][op]}})
    path, folder = str(tmp_path / "cpu.json"), tmp_path / "pictures"
    assert cli.main(["bench", "--from", path, path, "--plot", str(folder)]) == 0
    assert {p.name for p in folder.iterdir()} == {"roofline.svg", "peers.svg", "growth.svg"}
    for picture in folder.iterdir():
        assert picture.read_text().startswith("<?xml")


def test_the_picture_of_peers_shows_a_small_and_a_large_size():
    """Both sizes are shown, whoever is faster, in the dtype and beside the peer that is hardest."""
    given = report.new("cuda")
    cases = []
    for size, ours, x in ((3, 2.0, 1.0), (30, 2.0, 4.0), (300, 2.0, 8.0)):
        timed = rows_of(("triton", ours, ours, ours), ("x", x, x, x), ("y", 2 * x, 2 * x, 2 * x))
        for row in report.cases(timed):
            row |= {"size": size, "shape": {"T": size, "W": 4}, "work": {"bytes": size}}
            row |= {"how": "torch", "ours": row["who"] == "triton"}
            cases += [row, row | {"dtype": "float64", "ms": row["ms"] * (1 + (row["who"] == "x"))}]
            cases += [row | {"how": "CUDA graph", "ms": 0.5}] * row["ours"]
    given["ops"]["dynamic_conv"] = {"cases": cases, "growth": []}
    bars = plot.bars_of(given)["dynamic_conv"]
    assert [(bar.peer["size"], bar.eager, bar.graph) for bar in bars] == [
        (3, 0.5, 2.0),
        (300, 4.0, 16.0),
    ]
    assert {(bar.peer["who"], bar.peer["dtype"]) for bar in bars} == {("x", "float32")}


@needs_torch
def test_peers_compute_the_same(monkeypatch):
    """Peers that need no other package are run on the CPU, even the ones for GPUs, uncompiled."""
    import torch

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    seen = set()
    for peer in PEERS:
        if peer.package or peer.file or not peer.computes:
            continue
        workloads = [w for w in SMALL if w.op.__name__ in peer.ops]
        for workload, found in benches.judged(peer, workloads, 12):
            seen.add((peer.name, workload.op.__name__))
            # The peer by eigh loses half of float32's digits.
            factor = {"float16": 300, "bfloat16": 2400}.get(workload.rounds_to, 1)
            assert found["value"] < factor * 1e-5, (peer.name, workload.name)
            gradient = 0 if peer.dense else found.get("gradient", 0)
            assert gradient < factor * 1e-4, (peer.name, workload.name)
    assert len(seen) == 18


CONV = "from fusedops import dynamic_conv as dynamic_conv_triton_autograd"
STEP = """
from fusedops import dynamic_conv_step

def causal_conv_step_triton(x, cache, kernels):
    return dynamic_conv_step(x[:, 0], cache, kernels)
"""
TRIMUL = """
import fusedops.nn

def custom_kernel(data):
    x, mask, weights, sizes = data
    assert mask is None and sizes["nomask"]
    update = fusedops.nn.TriangleMultiplicativeUpdate.from_state_dict(weights)
    assert (update.c_z, update.c_hidden) == (sizes["dim"], sizes["hidden_dim"])
    return update(x)
"""


@needs_torch
@pytest.mark.parametrize(
    ("name", "op", "code"),
    [
        ("Jet-Nemotron", "dynamic_conv", CONV),
        ("Jet-Nemotron", "dynamic_conv_step", STEP),
        ("TTT-Discover", "triangle_multiplicative_update", TRIMUL),
    ],
)
def test_a_peer_of_a_checkout(tmp_path, monkeypatch, name, op, code):
    (peer,) = (each for each in PEERS if each.name == name and op in each.ops)
    monkeypatch.setenv("FUSEDOPS_PEERS", str(tmp_path))
    assert "github.com" in peer.why_not()
    assert "FUSEDOPS_PEERS" in peer.why_not()
    path = tmp_path / peer.file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert peer.why_not() is None
    kinds = [w for w in SMALL if w.op.__name__ == op and w.device == "cuda"]
    done = [found for _, found in benches.judged(peer, kinds, 8)]
    assert done
    for found in done:
        assert max(found.values()) < 1e-5
        assert ("gradient" in found) == (op == "dynamic_conv")


@needs_torch
@pytest.mark.parametrize("op", [o for o in OPS if "wigner" in o.__name__ or "edge" in o.__name__])
def test_the_matrices_of_fairchem(program, op):
    """Fairchem takes dense matrices in the order of degrees, and inverses on the way back."""

    class Backend:
        node_to_edge_wigner_permute = fusedops.node_to_edge_wigner_permute

        def permute_wigner_inv_edge_to_node(x, wigner, target, nodes):
            edges = target.expand(2, -1)
            return fusedops.permute_wigner_inv_edge_to_node(x, edges, wigner, nodes)

        def edge_degree_scatter(x, radial, wigner, target, orders, channels, factor):
            radial = radial.reshape(-1, orders, channels)
            return fusedops.edge_degree_scatter(
                x, radial, target.expand(2, -1), wigner, rescale_factor=factor
            )

    class Alone:
        apply = fusedops.permute_wigner_inv

    contents = {"UMASFastGPUBackend": Backend, "UMASFastGPUPermuteWignerInvEdgeToNode": Alone}
    for name in ("nn.execution_backends", "triton"):
        program(f"fairchem.core.models.uma.{name}", **contents)
    peer = next(p for p in PEERS if p.name == "fairchem" and op.__name__ in p.ops)
    if op is wigner_d:
        assert not peer.checked
        return
    for workload in SMALL:
        if workload.op is op and workload.name == "UMA":
            small = replace(workload, size=20, device="cpu")
            assert errors(small, peer.prepare, "torch", "float32")["value"] < 1e-6


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let the CPU pass for a GPU on small problems in plain torch; a graph only calls its step."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Elsewhere(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            args = tuple("cpu" if isinstance(a, str) and a == "cuda" else a for a in args)
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device: generator("cpu"))
    monkeypatch.setattr(packed.Packed, "to", lambda self, device: self)
    monkeypatch.setattr(fusedops.ScatterPlan, "to", lambda self, device: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    captured = []

    def graphed(step, copies=10):
        captured.append(step)
        return step

    monkeypatch.setattr(measure, "graphed", graphed)
    monkeypatch.setattr(timings, "CALLS", (1, 1))
    kinds = {(w.op.__name__, w.dtype): w for w in WORKLOADS if w.device == "cuda"}
    small = [replace(w, size=min(w.small, 4), quick=True) for w in kinds.values()]
    monkeypatch.setattr(measure, "WORKLOADS", small)
    growing = [(w, [2, 3, 4, 6, 8]) for w, _ in GROWTH["cuda"]]
    monkeypatch.setattr(measure, "GROWTH", {"cuda": growing})
    with Elsewhere():
        yield captured


@needs_torch
@pytest.mark.usefixtures("quick_bench", "tiny_steps")
@pytest.mark.parametrize(
    "module", ["planarity", "conv", "wigner", "so2", "scatter", "density", "trimul", "refinement"]
)
def test_the_path_of_a_gpu(monkeypatch, on_a_gpu, module):
    dtypes = ("float32", "float16", "bfloat16")
    rates = Rates(1e12, dict.fromkeys(dtypes, 1e14), 1e12)
    monkeypatch.setattr(measure.floors, "measured", lambda *args: rates)
    names = {"whole": (module,)} if module == "refinement" else {"ops": (module,)}
    plan, said = Plan("cuda", backends=("torch",), quick=True, **names), []
    blocks = dict(Bench(plan, said.append).run())
    assert len(said) == plan.steps
    assert on_a_gpu
    for op, block in blocks.items():
        ours = [row for row in block["cases"] if row["ours"]]
        assert not [row["refused"] for row in ours if row["refused"]]
        assert all(row["ms"] > 0 for row in ours)
        passes = {(row["how"], row["pass"]) for row in ours if row["pass"] != "preparation"}
        parts = (FORWARD,) if op == "dynamic_conv_step" else (FORWARD, BOTH)
        more = (*PARTS, *map(steps.backward_of, PARTS)) if op == "refinement" else ()
        alone = (BACKWARD,) if len(parts) == 2 and not more else ()
        assert passes == {
            *(("torch", what) for what in (*parts, *more)),
            *(("CUDA graph", what) for what in (*parts, *alone)),
        }
        json.dumps(block, allow_nan=False)
        if more:
            continue
        assert all(row["peak_MB"] == 0 for row in ours)
        empty = [row["pass"] for row in block["cases"] if row["who"] == EMPTY]
        assert list(dict.fromkeys(empty)) == list(parts)
        for row in block["cases"]:
            # Planarity's peers wait for the GPU themselves.
            waits = op == "planarity_nll" and row["who"] in ("torch eager", "TorchRef 0.7")
            eager = row["how"] == "torch" and row["pass"] in (FORWARD, BOTH)
            assert (row["host_ms"] is not None) == (eager and not waits), row
            assert (row["over_empty"] is None) == (row["host_ms"] is None or row["who"] == EMPTY)
        assert [row["how"] for row in block["growth"]] == ["CUDA graph"]


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_a_file_that_is_read_and_written_is_the_same(tmp_path, name):
    tracked, again = benches.ROOT / f"bench/results/{name}.json", tmp_path / "again.json"
    report.save(again, report.read(tracked))
    assert again.read_bytes() == tracked.read_bytes()


def test_a_file_keeps_the_percentages_of_shares(tmp_path):
    given, path = report.read(benches.ROOT / "bench/results/h200.json"), tmp_path / "file.json"
    shares = [0.23455, 0.054962, 0.39488, 0.0035, 0.995]
    given["ops"] = {"pair": given["ops"]["pair"]}
    given["ops"]["pair"]["cases"] = rows = report.cases(given)[: len(shares)]
    for row, share in zip(rows, shares, strict=True):
        row["share"] = share
    report.save(path, given)
    found = [row["share"] for row in report.cases(report.read(path))]
    assert [f"{share:.0%}" for share in found] == [f"{share:.0%}" for share in shares]


def test_a_file_of_the_version_before_is_read():
    tracked = benches.ROOT / "bench/results/cpu.json"
    old = json.loads(tracked.read_text()) | {"schema": report.SCHEMA - 1}
    for block in old["ops"].values():
        for line in block["cases"]:
            if isinstance(line, dict) and "contestant" in line:
                who = old["contestants"][line.pop("contestant")]
                line |= dict(zip(("who", "how", "ours", "computes"), who, strict=True))
    del old["contestants"]
    assert report.loads(json.dumps(old).encode(), "old") == report.read(tracked)


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (lambda file: file, ("columns", "passes", "contestants", "runs")),
        (lambda file: file["ops"]["dynamic_conv"], ("run", "cases")),
        (
            lambda file: file["ops"]["dynamic_conv"]["cases"][0],
            ("workload", "contestant", "error", "work"),
        ),
    ],
    ids=["file", "op", "case"],
)
def test_a_file_without_a_key_is_refused(tmp_path, place, names):
    report.save(tmp_path / "x.json", rows_of(("cython", 0.9, 1.0, 1.1)))
    content = (tmp_path / "x.json").read_text()
    for name in names:
        file = json.loads(content)
        del place(file)[name]
        with pytest.raises(report.ReportError, match=f"has no '{name}'"):
            report.loads(json.dumps(file).encode(), "x.json")
    file = json.loads(content) | {"passes": []}
    with pytest.raises(report.ReportError, match=r"x.json: broken: list index out of range"):
        report.loads(json.dumps(file).encode(), "x.json")


def test_numbers_of_a_file_have_the_digits_that_are_shown(tmp_path):
    given = rows_of(("cython", 1.0949, 1.23496789, 2.0), ("numba", 1.0, 2.34567891, 3.0))
    given["ops"]["dynamic_conv"]["cases"][0] |= {"error": {"value": 1.2345e-8, "gradient": None}}
    report.save(tmp_path / "cpu.json", given)
    one, other = report.cases(report.read(tmp_path / "cpu.json"))
    assert (one["ms"], one["quartiles_ms"], other["ms"]) == (1.23497, [1.09, 2], 2.3457)
    assert one["error"] == {"value": 1.2e-8, "gradient": None}


def test_the_history_of_times():
    def times(ms):
        given = rows_of(("cython", ms, ms, ms), ("numba", 1.0, 1.0, 1.0), ("peer", 9.0, 9.0, 9.0))
        given["ops"]["dynamic_conv"]["cases"][2]["ours"] = False
        return given

    table, before = "| op | 2026-01-01 |\n|---|---|\n| `other` | as before |\n", report.new("cpu")
    for day, ms in enumerate((1.0, 4.0, 2.0, 2.0), 2):
        table, before = history.added(table, f"2026-01-0{day}", before, times(ms)), times(ms)
    assert table.splitlines() == [
        "| op | 2026-01-01 | 2026-01-02 | 2026-01-03 | 2026-01-04 | 2026-01-05 |",
        "|---|---|---|---|---|---|",
        "| `other` | as before | - | - | - | - |",
        "| `dynamic_conv` | - | 2 cases | 2.00, **1 slower** | 0.71 | as before |",
    ]
    page = (benches.ROOT / "docs/history.md").read_text()
    assert page.count("\n| op | ") == len(history.FILES)


def test_the_pages_have_the_tables_of_the_files():
    root = benches.ROOT
    text, readme = ((root / page).read_text() for page in ("docs/measured.md", "README.md"))
    # A part is of the GPU that its results are of.
    places = {(m, d.replace("h100", "h200")) for _, m, d, *_ in tables.PART.findall(text)}
    modules = {*tables.MODULES.values(), "peers"}
    others = {("ranks", "h200x2"), ("commands", "commands")}
    assert modules >= measure.STEPS.keys()
    # On the CPU blocks have float32 anyway.
    both = {(m, d) for m in modules for d in ("cpu", "h200")}
    both -= {("pair_float32", "cpu"), ("jet_block_float32", "cpu")}
    both -= {("uma_md", "cpu"), ("uma_md_tf32", "cpu")}
    assert places == both | others
    parts = {match[1:3] for match in tables.PART.findall(readme)}
    assert parts == {("largest", "cpu"), ("largest", "h200")}
    for page in (text, readme):
        assert tables.tables(page, root / "bench/results") == page
    commands = json.loads((root / "bench/results/commands.json").read_text())
    for name, file in commands["files"].items():
        assert not any(run["code"] for run in file["runs"].values()), name
        assert file["R"] < 0.005, name


TOLD = "before\n<!-- measured: {} {} -->\nold\n<!-- end of measured -->\nafter\n"


def test_the_measured_tables(tmp_path):
    given = rows_of(("cython", 0.9, 1.0, 1.1), ("numba", 1.9, 2.0, 2.1))
    block = given["ops"]["dynamic_conv"]
    block |= {"machine": measure.machine("cpu"), "rates": measure.rates_in_words(benches.RATES)}
    for row in block["cases"]:
        row |= {"peak_MB": 3.0, "work": work_of(7), "error": {"value": 2e-7, "gradient": 3e-6}}

    def written(module="conv"):
        report.save(tmp_path / "cpu.json", given)
        text = tables.tables(TOLD.format(module, "cpu"), tmp_path)
        assert "old" not in text
        assert tables.tables(text, tmp_path) == text
        return text

    text = written()
    assert "| workload | dtype | pass | Cython | Numba | errors | floor | MB |\n" in text
    # A forward pass has no gradients.
    assert "| Jet: T 7 | float32 | forward | 1.00 | 2.00 | 2e-07 / 2e-07 | 0.500 | 3 |\n" in text
    first, peer = block["cases"][0], block["cases"][1] | {"who": "x", "ours": False}
    beside = given | {"ops": {"dynamic_conv": block | {"cases": [*block["cases"], peer]}}}
    assert "| `dynamic_conv` | T 7, float32, forward | 1.00 | 2.00, x |" in tables.largest(beside)
    # The host's time comes from a call of tensors.
    first["host_ms"] = 0.0123
    block["cases"].append(first | {"how": "torch", "over_empty": 2.05})
    text = written()
    assert "| Cython | Numba | errors | host, µs (over empty) | floor | MB |\n" in text
    assert "| 1.00 / 1.00 | 2.00 | 2e-07 / 2e-07 | 12.3 (2.05) | 0.500 | 3 |\n" in text
    # The table has a small and a large size, whoever is faster, and no empty functions.
    block["cases"] = [first] + [
        first | {"how": "torch", "size": size, "shape": {"T": size}, "ms": ms, **who}
        for size in (7, 70, 700)
        for ms, who in (
            (2.0, {"over_empty": 2.05}),
            (1.0 if size == 7 else 4.0, {"who": "x", "ours": False, "error": None}),
            (0.1, {"who": "empty", "ours": False, "computes": False}),
        )
    ]
    for row in block["cases"]:
        row["work"] = work_of(row["size"])
    text = written()
    assert "| Cython | x | errors | host, µs (over empty) | floor | MB |\n" in text
    assert "| Jet: T 7 | float32 | forward | 1.00 / 2.00 | 1.00 | 2e-07 / – | 12.3 (2.05) |" in text
    assert "| Jet: T 700 | float32 | forward | – / 2.00 | 4.00 | 2e-07 / – | 12.3 (2.05) |" in text
    assert "T 70 " not in text
    lost = "<details><summary>1</summary>Jet: T 7, float32, forward: x, 2.00</details>"
    assert f"| `dynamic_conv` | 2 of 3 |  | {lost} |\n" in written("peers")
    # Text without results stays.
    for other in (("planarity", "cpu"), ("conv", "h200")):
        assert tables.tables(TOLD.format(*other), tmp_path) == TOLD.format(*other)


def test_every_op_has_a_picture_and_folded_times(tmp_path):
    pytest.importorskip("matplotlib")
    root = benches.ROOT
    text = (root / "docs/measured.md").read_text()
    found = report.read(root / "bench/results/cpu.json")
    pictures = re.findall(r"<!-- picture: cpu (\w+) -->\n\n<details>", text)
    assert sorted(pictures) == sorted(found["ops"].keys() - measure.STEPS.keys())
    assert text.count("<details>") == text.count("</details>")
    op = "planarity_nll"
    drawn = plot.draw_ops(found | {"ops": {op: found["ops"][op]}}, tmp_path)
    assert [*drawn] == [op]
    assert "<svg" in drawn[op].read_text()


@pytest.fixture
def tiny_steps(monkeypatch):
    """Let steps have one case of a few atoms or residues, and one that can't be made."""

    def refinement(device):
        step = steps.refinement(device)
        few = steps.Case("tiny", lambda: steps._generated(24), quick=True)
        return replace(step, cases=(few, replace(step.cases[1], quick=True)), checks=(few,))

    def pair(device):
        few = steps.Case("tiny", lambda: steps._pairs(10), quick=True)
        return replace(steps.pair(device), cases=(few,), checks=(few,))

    pytest.importorskip("gemmi")
    monkeypatch.delenv(steps.DATA, raising=False)
    monkeypatch.setattr(measure, "STEPS", {"refinement": refinement, "pair": pair})


PARTS = ("density", "Fourier", "target", "planarity")


@pytest.mark.parametrize("framework", ["NumPy", pytest.param("torch", marks=needs_torch)])
@pytest.mark.parametrize("anisotropic", [False, True], ids=["B", "U"])
def test_the_gradients_of_a_refinement_step(framework, anisotropic):
    """Every leaf moves by itself, in the direction of its gradient."""
    pytest.importorskip("gemmi")
    problem = steps.refinement("cpu").checks[0].make()
    if anisotropic:
        U = problem.atoms.b[:, None] / (8 * np.pi**2) * [1.0, 1.2, 0.9, 0.1, 0.0, -0.1]
        problem = replace(problem, atoms=replace(problem.atoms, b=U))
    chain = steps._refined(problem, framework, "cpu", "float64", None)
    made = chain.steps()
    assert set(made) == {FORWARD, BOTH, *PARTS, *map(steps.backward_of, PARTS)}
    value, *gradients = made[BOTH]()
    np.testing.assert_allclose(np.asarray(made[FORWARD]()[0]), np.asarray(value), rtol=1e-12)
    assert len(gradients) == len(chain.leaves) == 3
    for name, gradient in zip(chain.leaves, gradients, strict=True):
        at = np.asarray(chain.leaves[name])
        gradient = np.asarray(gradient)
        # Short enough that no voxel enters or leaves a sphere's volume noticeably.
        along = 1e-7 * gradient / np.abs(gradient).max()
        ends = []
        for end in (at + along, at - along):
            field = replace(problem.atoms, **{name: end})
            moved = steps._refined(replace(problem, atoms=field), "NumPy", "cpu", "float64", None)
            ends.append(moved.steps()[FORWARD]()[0])
        np.testing.assert_allclose((ends[0] - ends[1]) / 2, (gradient * along).sum(), rtol=1e-4)


def test_the_passes_of_parts_are_those_of_the_chain():
    """A part that two others are functions of gets the sum of their cotangents."""
    chain = steps.Chain(
        {"x": np.array([2.0, 3.0])},
        (
            steps.Part("square", ("x",), lambda x: (x * x, lambda dy: (2 * x * dy,))),
            steps.Part("sum", ("square",), lambda y: (y.sum(), lambda dz: (dz + 0 * y,))),
            steps.Part("product", ("square",), lambda y: (y.prod(), lambda dz: (dz * y[::-1],))),
        ),
    )
    made = chain.steps()
    assert made[FORWARD]() == (13.0 + 36.0,)
    loss, dx = made[BOTH]()
    assert loss == 49.0
    np.testing.assert_array_equal(dx, [4 * (1 + 9), 6 * (1 + 4)])
    np.testing.assert_array_equal(made["square, backward"]()[0], dx)
    np.testing.assert_array_equal(made["product, backward"]()[0], [9.0, 4.0])
    assert made["sum"]()[0] == 13.0


@needs_torch
def test_no_graph_of_a_part_lives_before_its_backward_pass():
    """Else a pass of the whole couldn't be captured: nodes of gradients keep their stream."""
    import torch

    weight = torch.full((3,), 2.0, requires_grad=True)

    def lives():
        """Whether a node of the weight's gradient outlives the references made here."""
        torch.autograd.graph.get_gradient_edge(weight).node.metadata["seen"] = True
        return "seen" in torch.autograd.graph.get_gradient_edge(weight).node.metadata

    product = steps.Part("product", ("x",), lambda x: x * weight, (weight,))
    made = steps.Chain(
        {"x": torch.ones(3)}, (product, steps.Part("sum", ("product",), torch.sum))
    ).steps()
    made[BOTH]()
    assert not lives()
    for _ in range(2):
        dx, dweight = made[steps.backward_of("product")]()
        assert (dx.tolist(), dweight.tolist()) == ([2.0] * 3, [1.0] * 3)
    assert lives()


@pytest.mark.usefixtures("quick_bench", "tiny_steps")
@pytest.mark.parametrize("name", ["refinement", pytest.param("pair", marks=needs_torch)])
def test_a_step_has_its_json_its_tables_and_its_picture(tmp_path, monkeypatch, capsys, name):
    """A case that fails leaves the others."""

    def fail():
        raise MemoryError("a map of 1 TB")

    step = measure.STEPS[name]("cpu")
    cases = (steps.Case("huge", fail, quick=True), *step.cases)
    monkeypatch.setattr(measure, "STEPS", {name: lambda device: replace(step, cases=cases)})
    block = benches.run(tmp_path / "cpu.json", "--step", name, code=1)[name]
    out = capsys.readouterr().out
    assert "MemoryError: a map of 1 TB" in out
    assert "share" in out
    assert "over floor" not in out
    block["cases"] = [row for row in block["cases"] if row["workload"] != "huge"]
    ours = [row for row in block["cases"] if row["ours"]]
    assert {row["workload"] for row in ours} == {"tiny"}
    for row in ours:
        assert row["ms"] > 0
        assert set(row["error"]) == {"value", "gradient"}
        assert (row.get("share") is None) == (row["pass"] in (FORWARD, BOTH))
    written = tables.tables(TOLD.format(name, "cpu"), tmp_path)
    names = [line.split("|")[2].strip() for line in written.splitlines() if line.startswith("| ")]
    assert names == ["part", FORWARD, BOTH, *names[3:]]
    if name == "pair":
        assert {row["how"] for row in block["cases"]} == {"torch"}
        assert {row["who"] for row in block["cases"] if not row["ours"]} == {"torch eager"}
        assert "starting attention, backward" in names
        return
    assert "refinement, 3p3w is left out: needs 3p3w.pdb or 3p3w.cif, gzipped" in out
    assert steps.DATA in out
    assert {row["how"] for row in ours} == {"NumPy", *["torch"] * HAS_TORCH}
    assert {row["shape"]["atoms"] for row in ours} == {row["size"] for row in ours} == {36}
    assert {*names[3:]} == {*PARTS, *map(steps.backward_of, PARTS), "largest error"}
    assert re.search(r"\| density \| [\d.]+ \(\d+%\) \|", written)
    pytest.importorskip("matplotlib")
    block["cases"].append(ours[0] | {"who": "x", "ours": False, "ms": 2 * ours[0]["ms"]})
    (bar,) = plot.bars_of({**report.new("cpu"), "ops": {"refinement": block}})["refinement"]
    assert bar.eager == pytest.approx(2)


@needs_torch
@pytest.mark.usefixtures("quick_bench", "tiny_steps")
def test_a_step_of_minutes_is_timed_in_few_rounds(monkeypatch, tmp_path):
    made, rounds = replace(measure.STEPS["refinement"]("cpu"), rounds=2), []
    monkeypatch.setattr(measure, "STEPS", {"refinement": lambda _: made})
    timed = measure.interleaved

    def counted(*args, **kwargs):
        found = timed(*args, **kwargs)
        rounds.extend(timing.rounds for timing in found.values())
        return found

    monkeypatch.setattr(measure, "interleaved", counted)
    block = benches.run(tmp_path / "cpu.json", "--step", "refinement")["refinement"]
    assert {*rounds} == {2}
    assert len(rounds) == len(block["cases"])
    for row in block["cases"]:
        assert row["ms"] > 0
        assert row.get("peak_MB") is row.get("alone_ms") is None


@pytest.mark.usefixtures("tiny_steps")
def test_simulated_files_hold_the_shaken_model_and_noisy_amplitudes(tmp_path):
    gemmi = pytest.importorskip("gemmi")
    files = whole.simulated("1ubi", 4.0, cycles=2)
    model, amplitudes = files.write(tmp_path)
    mtz = gemmi.read_mtz_file(str(amplitudes))
    observed, sigma, work = (
        mtz.column_with_label(name).array for name in ("F-obs", "SIGF-obs", "R-free-flags")
    )
    assert mtz.resolution_high() == pytest.approx(4, abs=0.1)
    assert files.shape == {"atoms": 683, "reflections": len(observed), "cycles": 2}
    assert sigma / observed == pytest.approx(whole.NOISE, rel=1)
    assert {*work} == {0, 1}
    assert 0.9 < work.mean() < 1
    moved = [cra.atom.pos.tolist() for cra in gemmi.read_structure(str(model))[0].all()]
    rms = np.sqrt(np.mean((np.array(moved) - fusedops.samples.ubiquitin().xyz) ** 2))
    assert rms == pytest.approx(0.1, rel=0.05)


@needs_torch
@pytest.mark.parametrize("blocks", [1, 2])
def test_our_block_is_that_of_the_formulas(blocks):
    """In float64, for the whole step and for each of its parts."""
    problem = steps._pairs(10, blocks)
    ours = steps._pair_by_modules(problem, "torch", "cpu", "float64", "numpy").steps()
    theirs = steps._pair_by(steps._formulas(), problem, "cpu", "float64").steps()
    parts = [*steps.PARTS.values()] if blocks == 1 else ["block 1", "block 2"]
    names = [*parts, "target"]
    assert set(ours) == set(theirs) == {FORWARD, BOTH, *names, *map(steps.backward_of, names)}
    # The loss, and the gradients of z and of the parameters of updates, attentions, transitions.
    assert len(ours[BOTH]()) == 2 + blocks * (2 * 8 + 2 * 8 + 5)
    for name in (BOTH, *map(steps.backward_of, parts)):
        for got, want in zip(ours[name](), theirs[name](), strict=True):
            # Relative to the largest element: sums of hundreds of products cancel.
            assert (got - want).abs().max() <= 1e-12 * want.abs().max() > 0


@needs_torch
def test_the_pair_step_of_cuequivariance(program):
    """Its two functions, by their documented formulas."""
    from fusedops.compat.cuequivariance import triangle_multiplicative_update

    def triangle_attention(q, k, v, bias, mask):
        logits = q @ k.mT / q.shape[-1] ** 0.5 + bias
        return logits.masked_fill(~mask, -1e9).softmax(-1) @ v

    functions = triangle_multiplicative_update, triangle_attention
    program("cuequivariance_torch", **{function.__name__: function for function in functions})
    for step in (steps.pair("cuda"), steps.pair_float32("cuda")):
        problem = steps._pairs(10, dtype=step.dtype)
        truth = step.reference(problem)
        found = errors_of_step(steps.pair_by_cuequivariance(problem, "cpu"), truth)
        assert max(found.values()) < step.tolerance


@needs_torch
def test_a_step_names_the_package_that_it_lacks(capsys, monkeypatch):
    monkeypatch.setitem(cli.common._MODULES, "fairchem-core", "no_such_module")
    assert cli.main(["bench", "--step", "uma"]) == 2
    told = 'fusedops: fairchem-core is not installed: pip install "fairchem-core"\n'
    assert capsys.readouterr() == ("", told)


@pytest.mark.usefixtures("quick_bench", "tiny_steps")
def test_a_bench_that_measures_nothing_keeps_older_results(tmp_path, capsys, monkeypatch):
    made = measure.STEPS["refinement"]
    missing = replace(made("cpu"), cases=made("cpu").cases[1:])
    monkeypatch.setattr(measure, "STEPS", {"refinement": lambda device: missing})
    path = tmp_path / "cpu.json"
    kept = report.new("cpu") | {"ops": {"refinement": {"cases": []}, "pair": {"cases": []}}}
    report.save(path, kept)
    assert cli.main(["bench", "--quick", "--step", "refinement", "--json", str(path)]) == 2
    out, err = capsys.readouterr()
    assert "refinement, 3p3w is left out: needs 3p3w.pdb" in out
    assert "workload" not in out
    assert err == "fusedops: nothing could be measured: see the reasons above\n"
    assert report.read(path) == kept


def test_a_structure_of_the_data_folder(tmp_path, monkeypatch):
    gemmi = pytest.importorskip("gemmi")
    ubiquitin = steps._of_file("1ubi")
    monkeypatch.setenv(steps.DATA, str(tmp_path))
    with pytest.raises(Unsuited, match=r"needs copy\.pdb"):
        steps._of_file("copy")
    (Path(tmp_path) / "copy.pdb").write_bytes(
        (Path(fusedops.__file__).parent / "data/1ubi.pdb").read_bytes()
    )
    copied = steps._of_file("copy")
    assert copied.shape == ubiquitin.shape
    np.testing.assert_array_equal(copied.observed, ubiquitin.observed)
    # The model of the peers is the shaken one.
    assert isinstance(copied.model, gemmi.Structure)
    xyz = np.array([cra.atom.pos.tolist() for cra in copied.model[0].all()])
    np.testing.assert_allclose(xyz, copied.atoms.xyz, atol=1e-6)
    # R of a shaken model, with noise in the data.
    F = steps._refined(copied, "NumPy", "cpu", "float64", None).steps()["Fourier"]()[0]
    assert 0.05 < np.abs(abs(F) - copied.observed).sum() / copied.observed.sum() < 0.4


#: TorchRef says at its import how many threads it takes.
TALKS = pytest.mark.filterwarnings("ignore:TorchRef auto-configured:UserWarning")


@TALKS
@pytest.mark.gpu
def test_a_step_on_a_gpu(tmp_path):
    pytest.importorskip("gemmi")
    path = tmp_path / "gpu.json"
    found = benches.run(path, "--device", "cuda", "--step", "refinement")["refinement"]
    ours = [row for row in found["cases"] if row["ours"]]
    assert {row["how"] for row in ours} == {"torch", "CUDA graph"}
    for row in ours:
        assert row["ms"], row


@pytest.mark.gpu
def test_check_on_a_gpu():
    assert cli.main(["check", "--device", "cuda"]) == 0


@TALKS
@pytest.mark.gpu
@pytest.mark.parametrize("op", [op.__name__ for op in OPS])
def test_bench_on_a_gpu(op, tmp_path, monkeypatch):
    monkeypatch.setattr(measure.Plan, "seconds", 0.001)
    found = benches.run(tmp_path / "gpu.json", "--device", "cuda", "--op", op)
    assert set(found) == {op}
    for row in report.cases({"ops": found}):
        assert row["ms"] or not row["ours"], row
