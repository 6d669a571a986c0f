"""The peak memory of a step besides its arguments: results and temporaries, torch's too."""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusedops._host import memory

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def peak_MB(step: Callable[[], Any], device: str) -> float | None:
    """Return the peak of memory during a step, in 2²⁰ bytes, less what was in use before it.

    On a GPU, torch's allocator counts what it hands out. On the CPU it is the peak of resident
    memory, which Linux resets for a process that asks; allocators have then given back what they
    had kept. Other systems don't reset it, and the result is None. Memory that a step holds from
    call to call counts too (`holding`).
    """
    step()
    if device != "cpu":
        return _on_gpu(step) + getattr(step, "held", 0) / 2**20
    if not _CLEAR.exists():
        return None
    memory.release_memory()
    gc.collect()
    try:
        _trim()
        _CLEAR.write_text("5")
        before = _resident("VmRSS")
    except OSError:
        return None
    step()
    return max(0.0, _resident("VmHWM") - before) / 1024


def holding(step: Callable[[], Any], held: int) -> Callable[[], Any]:
    """Return a step that holds so many bytes of a GPU from call to call, as a CUDA graph does."""

    @functools.wraps(step)
    def held_step() -> Any:
        return step()

    held_step.held = held  # type: ignore[attr-defined]
    return held_step


def _on_gpu(step: Callable[[], Any]) -> float:
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _resident(name: str) -> int:
    """Return a line of the process's status, in 2¹⁰ bytes."""
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _trim() -> None:
    """Make the C library give back what it keeps of freed memory, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
