"""Compilations of kernels side by side, which launches would begin one after the other."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

from fusedops._kept import stream_of


class _Ahead:
    """Threads that compile each kernel once, in place of launches in a stream."""

    def __init__(self, threads: ThreadPoolExecutor, stream: Any) -> None:
        self.threads, self.stream = threads, stream
        self._begun: set[Any] = set()

    def begin(self, kernel: Any, compile: Callable[[], Any]) -> None:
        """Compile a kernel, unless it has begun; a launch to come raises the compiler's errors."""
        if kernel not in self._begun:
            self._begun.add(kernel)
            self.threads.submit(compile)


_ahead: _Ahead | None = None


@contextlib.contextmanager
def compilers() -> Iterator[ThreadPoolExecutor]:
    """Return threads for compilers in a ``with`` block, which ends when all are done.

    Triton's passes and LLVM's leave Python to other threads. Triton's parser replaces the process's
    filters of warnings for a while, so that one of two threads may put back the other's.
    """
    with warnings.catch_warnings(), ThreadPoolExecutor() as threads:
        yield threads


@contextlib.contextmanager
def compiling_ahead(device: Any) -> Iterator[None]:
    """Let launches of new kernels in a ``with`` block compile these, and launch nothing.

    This holds for the device's current stream, in which autograd's threads launch, too. A
    computation whose indices are results of kernels would read anywhere. One block is entered at a
    time.
    """
    global _ahead
    with compilers() as threads:
        before, _ahead = _ahead, _Ahead(threads, stream_of(device))
        try:
            yield
        finally:
            _ahead = before


def ahead(device: Any) -> _Ahead | None:
    """Return the threads that compile kernels of a device's current stream, or None."""
    found = _ahead
    return found if found is not None and found.stream == stream_of(device) else None
