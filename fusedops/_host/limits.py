"""The cores and the memory that this process may use: the machine's, or its container's."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@functools.cache
def available_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def available_memory() -> int | None:
    """Return the bytes of memory that this process may still take, or None if they are unknown.

    Returns
    -------
    int or None
        The memory that Linux calls available, or the rest of a container's limit, if less.

    Examples
    --------
    >>> available_memory() != 0
    True
    """
    found = [memory for memory in (_system_memory(), _cgroup_memory()) if memory is not None]
    return min(found, default=None)


def _cgroup_quota(root: Path = _CGROUP) -> float | None:
    """Return the CPU quota of this container in cores, or None if it has none."""
    words = _words(root / "cpu.max")
    if len(words) != 2:
        words = _words(root / "cpu/cpu.cfs_quota_us") + _words(root / "cpu/cpu.cfs_period_us")
    if len(words) != 2 or words[0] == "max" or int(words[0]) <= 0:
        return None
    return int(words[0]) / int(words[1])


def _cgroup_memory(root: Path = _CGROUP) -> int | None:
    """Return the bytes that are left to this container, or None if it has no limit."""
    stat = _words(root / "memory.stat")
    try:
        (limit,), (used,) = (_words(root / f"memory.{name}") for name in ("max", "current"))
        # Linux drops cached files before it runs out of memory.
        return max(0, int(limit) - int(used) + int(stat[stat.index("inactive_file") + 1]))
    except (IndexError, ValueError):
        return None


def _system_memory(path: Path = Path("/proc/meminfo")) -> int | None:
    words = _words(path)
    try:
        return 1024 * int(words[words.index("MemAvailable:") + 1])
    except (IndexError, ValueError):
        return None


def _words(path: Path) -> list[str]:
    """Return the words of a system file, or none if the file is missing."""
    try:
        return path.read_text().split()
    except (OSError, ValueError):
        return []
