"""The list of swaps: it counts calls, and costs next to nothing."""

from __future__ import annotations

import importlib.metadata
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import fusedops.compat
from fusedops import _swaps
from processes import python


@pytest.fixture
def swap():
    pytest.importorskip("torch")
    (swap,) = _swaps.start("another", ["function"])
    yield swap
    _swaps.stop("another")


def test_a_count_begins_with_the_swap(swap):
    served = swap.counting(lambda x, by=1: x + by)
    assert served(1, by=2) == 3
    (before,) = fusedops.compat.swaps()
    assert repr(before) == (
        "Swap(program='another', version=None, name='function', calls=1, traced=0)"
    )
    assert _swaps.start("another", ["function"]) == [swap]
    served(1)
    assert (before.calls, fusedops.compat.swaps()[0].calls) == (1, 2)
    _swaps.stop("another")
    served(1)
    assert fusedops.compat.swaps() == []
    assert _swaps.start("another", ["function"]) == [swap]
    assert swap.calls == 0


def test_threads_count_together(swap):
    served, start = swap.counting(lambda: None), threading.Barrier(4)

    def work():
        start.wait()
        for _ in range(5000):
            served()

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(work)
    assert swap.calls == 20_000


def test_torch_compile_counts_the_calls_that_it_traces(swap):
    torch = pytest.importorskip("torch")
    served = swap.counting(lambda x, by: x * by)
    run = torch.compile(lambda x: served(x, 2) + served(x, by=3), backend="eager", fullgraph=True)
    assert [run(torch.ones(2)).tolist() for _ in range(2)] == [[5, 5], [5, 5]]
    assert (swap.calls, swap.traced) == (0, 2)
    assert str(swap).endswith("function, calls: 0, traced: 2")


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("2.15.3", "2.15.3 is installed; it should be 2.16 to 2.24"),
        ("2.16", None),
        ("2.24.1", None),
        ("3.0", "3.0 is installed; it should be 2.16 to 2.24"),
    ],
)
def test_info_compares_versions_of_programs(monkeypatch, version, why):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    found = fusedops.info()
    assert found.programs["fairchem-core"].why_not == why
    assert f"  fairchem-core  {why or f'{version}, by fusedops.compat.fairchem'}\n" in str(found)


def test_info_without_any_program(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = fusedops.info()
    assert {program.why_not for program in found.programs.values()} == {"not installed"}
    assert found.swaps == []


def test_the_list_imports_no_program():
    code = "import sys, fusedops.compat as c; assert c.swaps() == []; print('torch' in sys.modules)"
    assert python(code) == "False\n"
