"""How many threads a parallel region gets: one rule for OpenMP and for Numba.

``set_num_threads`` > ``FUSEDOPS_NUM_THREADS`` > ``OMP_NUM_THREADS`` > the cores that this process
may use. The environment is read once, at first use.
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

_chosen: int | None = None
_pooled = False
_forked = False


def _mark_forked() -> None:
    global _forked
    _forked = _pooled


# Pools of threads don't survive a fork: a child forked from a process that has any works serially.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


def set_num_threads(threads: int | None) -> None:
    """Set the number of threads of every CPU kernel in this process.

    Parameters
    ----------
    threads : int or None
        At least 1; ``None`` returns to the environment's choice.

    Raises
    ------
    TypeError, ValueError
        If `threads` is not a positive integer.

    Examples
    --------
    >>> import fusedops
    >>> fusedops.set_num_threads(1)
    >>> fusedops.get_num_threads()
    1
    >>> fusedops.set_num_threads(None)
    """
    global _chosen
    if threads is not None:
        try:
            threads = operator.index(threads)
        except TypeError:
            raise TypeError(
                f"set_num_threads: threads is a {type(threads).__name__}; it should be an int"
            ) from None
        if threads < 1:
            raise ValueError(f"set_num_threads: threads is {threads}; it should be at least 1")
    _chosen = threads


def get_num_threads() -> int:
    """Return the number of threads that a CPU kernel may use now.

    Returns
    -------
    int
        1, whatever was set, in a child that was forked after a kernel had used several threads.

    Raises
    ------
    ValueError
        If ``FUSEDOPS_NUM_THREADS`` is set to something other than a positive integer.

    Examples
    --------
    >>> import fusedops
    >>> fusedops.get_num_threads() >= 1
    True
    """
    if _forked:
        return 1
    if _chosen is not None:
        return _chosen
    return _default()


@functools.cache
def _default() -> int:
    own = os.environ.get("FUSEDOPS_NUM_THREADS")
    if own:
        if not own.strip().isdigit() or int(own) < 1:
            raise ValueError(f"FUSEDOPS_NUM_THREADS is {own!r}; it should be a positive integer")
        return int(own)
    # OMP_NUM_THREADS may list one number per nesting level; ours is the outermost. OpenMP
    # runtimes ignore a malformed value, and so does this.
    outermost = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if outermost.isdigit() and int(outermost) > 0:
        return int(outermost)
    return _available_cores()


def threads_for(work: int, grain: int) -> int:
    """Return how many threads `work` items are worth, at least `grain` items for each."""
    global _pooled
    threads = max(1, min(get_num_threads(), work // grain))
    _pooled = _pooled or threads > 1
    return threads


def in_parallel(work: Callable[[int, int], None], items: int, grain: int) -> None:
    """Call ``work(low, high)``, which releases the GIL, on shares of ``range(items)``."""
    threads = threads_for(items, grain)
    if threads == 1:
        work(0, items)
        return
    edges = [items * t // threads for t in range(threads + 1)]
    rest = [_pool().submit(work, *span) for span in pairwise(edges[1:])]
    work(*edges[:2])
    for share in rest:
        share.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(64, _available_cores()), thread_name_prefix="fusedops")


@functools.cache
def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU quota of this container in cores, or None where there is none."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if limit == "max" or int(limit) <= 0:
        return None
    return int(limit) / int(period)
