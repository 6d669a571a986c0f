"""Kernels compiled side by side, ahead of a computation that would compile one after the other."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops._kept import stream_of


class _Ahead:
    """Threads that compile each kernel once."""

    def __init__(self, threads: ThreadPoolExecutor, stream: Any) -> None:
        self.threads, self.stream = threads, stream
        self._begun: set[Any] = set()

    def begin(self, kernel: Any, compile: Callable[[], Any]) -> None:
        """Compile a kernel, unless it has begun."""
        if kernel not in self._begun:
            self._begun.add(kernel)
            self.threads.submit(compile)


_ahead: _Ahead | None = None


@contextlib.contextmanager
def compilers() -> Iterator[ThreadPoolExecutor]:
    """Return threads for compilers in a ``with`` block, which ends when all are done.

    Triton's passes and LLVM's leave Python to other threads. Triton's parser replaces the process's
    filters of warnings, and puts back those that it found, be they another thread's.
    """
    with warnings.catch_warnings(), ThreadPoolExecutor() as threads:
        yield threads


def compile_ahead(compute: Callable[[], Any], device: Any) -> None:
    """Compile the kernels that a computation launches.

    It is evaluated, but for launches of kernels that are new. So its results are of no use, and no
    index in it may be a kernel's result. The evaluation has a stream of its own, by which launches
    from autograd's threads, and no others, are found. Errors are the computation's own to raise.
    Without a GPU there is nothing to compile.
    """
    global _ahead
    if device.type != "cuda":
        return
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(here)
    with torch.random.fork_rng([device]), compilers() as threads:
        before, _ahead = _ahead, _Ahead(threads, aside)
        try:
            with torch.cuda.stream(aside), contextlib.suppress(Exception):
                compute()
        finally:
            _ahead = before
    here.wait_stream(aside)
    # Torch would keep the memory for a stream that has no more work.
    torch.cuda.empty_cache()


def ahead(device: Any) -> _Ahead | None:
    """Return the threads that compile what a device's current stream would launch, or None."""
    found = _ahead
    return found if found is not None and found.stream == stream_of(device) else None
