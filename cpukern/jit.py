"""Compiles Numba kernels, and keeps the code on disk where a folder can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for this CPU, to run without the GIL.

    Numba's cache is keyed by CPU, so that hosts may share one. Threads come from
    `cpukern.threads.in_parallel`, not from Numba's threading layers, which abort a forked child
    or a second Python thread.
    """
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(**options)(function)
