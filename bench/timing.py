"""Times of runs, taken in turns in one process, also in CUDA graphs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: How calls are run: of arrays, of tensors, of tensors in a graph, and of tensors by a program that
#: captures some of its work in a graph.
NUMPY, TORCH, GRAPH, GRAPHS = "NumPy", "torch", "CUDA graph", "torch and a graph"

#: Steps in one CUDA graph: with many, the graph's own launch counts for little.
COPIES = 10

#: Fewest and most calls in a row that the host is timed with: a GPU's queue has room for them, and
#: they are done before the system lets another process run.
CALLS = (5, 20)

#: A spread of quartiles over the median that says more of the machine than of a run.
NOISY = 0.3


@dataclass(frozen=True)
class Timing:
    """The median and the quartiles of rounds, in ms."""

    ms: float
    quartiles_ms: tuple[float, float]
    rounds: int


def noisy(ms: float, quartiles_ms: Sequence[float]) -> bool:
    """Return whether a median is worth little, because the machine was busy otherwise, too."""
    low, high = quartiles_ms
    return high - low > NOISY * ms


def timed(run: Callable[[], Any], wait: Callable[[], None], repeats: int) -> float:
    """Return the mean time of a run, in ms."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - start) / repeats * 1e3


def after(
    before: Callable[[], Any], run: Callable[[], Any], wait: Callable[[], None], repeats: int
) -> float:
    """Return the mean time, in ms, of runs that each follow something else."""
    taken = 0.0
    for _ in range(repeats):
        before()
        wait()
        start = time.perf_counter()
        run()
        wait()
        taken += time.perf_counter() - start
    return taken / repeats * 1e3


def busy(run: Callable[[], Any], wait: Callable[[], None], repeats: int) -> float:
    """Return the mean time that the host is busy with a run, in ms; the device isn't waited for.

    A run that isn't timed comes first, since waiting lets the processor and its threads sleep.
    """
    wait()
    run()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats * 1e3


def interleaved(
    runs: Mapping[Any, Callable[[], Any]],
    wait: Callable[[], None],
    seconds: float,
    rounds: int = 25,
    *,
    host: bool = False,
    before: Callable[[], Any] | None = None,
) -> dict[Any, Timing]:
    """Return the times of every run, taken in turns, with `seconds` for each in all.

    Long runs get fewer of the rounds, five at least if there are as many. With `host`, return the
    times that the host is busy; with `before`, the times of runs that each follow a call of it.
    """
    clock, (least, most) = (busy, CALLS) if host else (timed, (1, 100))
    if before is not None:
        clock, most = functools.partial(after, before), 10
    once = {}
    for name, run in runs.items():
        run()
        wait()
        once[name] = timed(run, wait, 1) / 1e3
    if once:
        rounds = max(min(rounds, 5), min(rounds, int(seconds * len(runs) / sum(once.values()))))
    repeats = {n: max(least, min(most, int(seconds / rounds / t))) for n, t in once.items()}
    for name, run in runs.items():
        if repeats[name] > 1:
            timed(run, wait, min(3, repeats[name]))
    taken = [
        {name: clock(run, wait, repeats[name]) for name, run in runs.items()} for _ in range(rounds)
    ]
    found = {}
    for name in runs:
        low, middle, high = statistics.quantiles([each[name] for each in taken], n=4)
        found[name] = Timing(middle, (low, high), rounds)
    return found


def waiting(device: str) -> Callable[[], None]:
    """Return a function that waits for a device's work."""
    if device == "cpu":
        return lambda: None
    import torch

    return torch.cuda.synchronize


def graphed(step: Callable[[], Any], copies: int = COPIES) -> Callable[[], None]:
    """Return the replay of a CUDA graph that holds several steps, one after the other."""
    import torch

    from fusedops.compat._graphs import captured

    def several() -> None:
        for _ in range(copies):
            step()

    device = torch.device("cuda", torch.cuda.current_device())
    graph, _ = captured(several, device, shares=False, before=1)
    return graph.replay


def scaled(timing: Timing, by: float) -> Timing:
    """Return a timing multiplied by a factor."""
    low, high = timing.quartiles_ms
    return Timing(timing.ms * by, (low * by, high * by), timing.rounds)
