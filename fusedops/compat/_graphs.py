"""CUDA graphs of computations, captured on a stream of their own."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops._ahead import compiling_ahead

#: Of the thread that captures, or compiles ahead.
capturing = threading.RLock()


def captured(
    compute: Callable[[], Any], device: Any, *, shares: bool = True, before: int = 0
) -> tuple[Any, Any]:
    """Return a CUDA graph of a computation, and the result, which a replay computes.

    Graphs that share memory may use each other's: a replay of one that stays while others are
    captured would write over their results. Calls `before` compile kernels.
    """
    with capturing, _without_collections():
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        aside, keeper = _pool(device)
        aside.wait_stream(here)
        try:
            with torch.cuda.stream(aside):
                for _ in range(before):
                    compute()
                if not shares:
                    # Memory of its own isn't taken from what torch keeps for later tensors.
                    torch.cuda.empty_cache()
                pool = keeper.pool() if shares else None
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    result = compute()
                finally:
                    graph.capture_end()
        except BaseException:
            # The stream may be left within the capture, and torch draws no random numbers until
            # another one ends.
            _pool.cache_clear()
            with contextlib.suppress(RuntimeError):
                _pool(device)
            raise
        here.wait_stream(aside)
        return graph, result


def compile_ahead(compute: Callable[[], Any], device: Any) -> None:
    """Compile the kernels of a computation side by side, by an evaluation without results.

    Errors are left to the evaluation that has results. A CPU has nothing to compile.
    """
    if device.type != "cuda":
        return
    with capturing, torch.random.fork_rng([device]):
        here, (aside, _) = torch.cuda.current_stream(device), _pool(device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside), compiling_ahead(device), contextlib.suppress(Exception):
            compute()
        here.wait_stream(aside)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Let Python collect no garbage: a graph that is destroyed within a capture ends it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.cache
def _pool(device: Any) -> tuple[Any, Any]:
    """Return a stream for captures, and a graph that keeps the memory of all later ones."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    alone = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    # torch.cuda.graph leaves its stream current where a capture doesn't begin or end.
    with torch.cuda.stream(stream), alone:
        torch.zeros((), device=device)
    return stream, graph


class Replayed:
    """A computation that is evaluated once, then captured, and replayed from then on.

    Where capturing fails it is evaluated in every call.
    """

    def __init__(self, compute: Callable[[], Any], device: Any, *, shares: bool = True) -> None:
        self.compute, self.device, self.shares = compute, device, shares
        self.captures, self.evaluated = device.type == "cuda", False
        self.graph: Any = None
        self.result: Any = None

    def __call__(self) -> Any:
        """Return the result, which a later call may write over."""
        if self.graph is None and self.captures and self.evaluated:
            try:
                self.graph, self.result = captured(self.compute, self.device, shares=self.shares)
            except RuntimeError:
                self.captures = False
        self.evaluated = True
        if self.graph is None:
            return self.compute()
        self.graph.replay()
        return self.result
