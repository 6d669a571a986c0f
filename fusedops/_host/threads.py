"""The number of threads of a parallel region, and the threads themselves, for all CPU kernels.

``set_num_threads`` > ``FUSEDOPS_NUM_THREADS`` > torch's number, once a call had tensors >
``OMP_NUM_THREADS`` > the cores that this process may use. The environment is read once, at first
use.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from fusedops._host.limits import available_cores

_chosen: int | None = None
_pooled = False
_forked = False
# Whether this process is a child, in which OpenMP would wait forever for its parent's threads.
_child = False
_torch: Any = None
_joined = False
_blas_lock = threading.Lock()
# The calls that hold BLAS at one thread, and the libraries with their earlier thread counts.
_blas_users = 0
_blas_before: list[tuple[Any, int]] = []


def _mark_forked() -> None:
    global _forked, _child, _joined, _blas_lock, _blas_users
    _forked, _child = _pooled, True
    if _joined:
        _compiled().join_openmp(0, 0)
        _joined = False
    _blas_lock, _blas_users = threading.Lock(), 0
    _blas_before.clear()


# Thread pools don't survive a fork, so the child of a process with a pool works serially.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


def choose_num_threads(threads: int | None) -> None:
    """Set the number of threads of every CPU kernel; None returns to the environment's choice."""
    global _chosen
    _chosen = threads


def get_num_threads() -> int:
    """Return the number of threads that a CPU kernel may use now.

    Returns
    -------
    int
        Always 1 in a child process that was forked after a kernel had used several threads. Without
        a number of our own, from the first call with tensors or the import of ``fusedops.nn`` on
        ``torch.get_num_threads()``, in a DataLoader's worker 1.

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
    return _own() or (_default() if _torch is None else _torch.get_num_threads())


@functools.cache
def _own() -> int:
    own = os.environ.get("FUSEDOPS_NUM_THREADS", "")
    threads = _positive(own)
    if own and not threads:
        raise ValueError(f"FUSEDOPS_NUM_THREADS is {own!r}; it should be a positive integer")
    return threads


@functools.cache
def _default() -> int:
    # OMP_NUM_THREADS may list one number per nesting level; ours is the outermost. As in OpenMP
    # runtimes, a malformed value is ignored.
    return _positive(os.environ.get("OMP_NUM_THREADS", "").split(",")[0]) or available_cores()


def _positive(text: str) -> int:
    """Return the positive integer that a text is, or 0 if it is none."""
    # Not str.isdigit, which accepts superscripts; and no more digits than int accepts.
    return int(text) if re.fullmatch(r"\s*[0-9]{1,18}\s*", text) else 0


def follow_torch(torch: Any) -> None:
    """Take torch's number of threads for the default, and the threads of its OpenMP for ours.

    After each of its operations they spin for milliseconds, and threads of our own would wait.
    """
    global _torch, _joined
    _torch = torch
    if _compiled() is None or sys.platform == "win32" or not torch.backends.openmp.is_available():
        return
    if _child or _is_fork():
        return
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    library = Path(torch.__file__).with_name("lib") / f"libtorch_cpu{suffix}"
    with contextlib.suppress(OSError, AttributeError):
        # A library's symbols include those of the libraries that it is linked to.
        openmp = ctypes.CDLL(str(library))
        functions = openmp.GOMP_parallel, openmp.omp_get_max_threads
        _compiled().join_openmp(*[ctypes.cast(f, ctypes.c_void_p).value for f in functions])
        _joined = True


def _is_fork() -> bool:
    """Return whether Linux tells that this process was forked and has begun no program since."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return False
    # PF_FORKNOEXEC among the flags, the seventh field after the program's name.
    return bool(int(stat.rpartition(")")[2].split()[6]) & 0x40)


def whose_threads() -> str:
    """Return whose threads CPU kernels have: ``"torch's OpenMP"``, ``"own"`` or ``"Python's"``."""
    if _joined:
        return "torch's OpenMP"
    return "own" if _compiled() is not None else "Python's"


@functools.cache
def _compiled() -> Any:
    """Return the module that has compiled kernels' threads, or None where it isn't built."""
    try:
        return importlib.import_module("cpukern._cpu")
    except ImportError:
        return None


def threads_for(work: int, grain: int) -> int:
    """Return the number of threads for `work` items, with at least `grain` items for each."""
    global _pooled
    threads = get_num_threads()
    if threads == 1 or work < 2 * grain:
        return 1
    _pooled = True
    if _joined:
        # Torch sets a new thread's number when it is first asked for it.
        _torch.get_num_threads()
    return min(threads, work // grain)


def in_parallel(work: Callable[[int, int], None], items: int, grain: int) -> None:
    """Call ``work(low, high)``, which releases the GIL, on shares of ``range(items)``.

    If no thread has begun a share, because other processes have the cores, the caller's thread does
    the share. An error of a share is raised once all begun shares have ended.
    """
    threads = threads_for(items, grain)
    if threads == 1:
        work(0, items)
        return
    if (compiled := _compiled()) is not None:
        compiled.in_parallel(work, items, threads)
        return
    first, *others = pairwise(items * t // threads for t in range(threads + 1))
    # A cancelled share stays in the pool's queue; there it should keep no arrays alive.
    given = [work]
    rest = [(span, _pool().submit(lambda *span: given[0](*span), *span)) for span in others]
    try:
        work(*first)
        # In reverse, since the pool begins the last share last.
        for span, share in reversed(rest):
            if share.cancel():
                work(*span)
    finally:
        # After an error too, no thread may still work on the arrays.
        for _, share in rest:
            if not share.cancel():
                share.exception()
        given.clear()
    for _, share in rest:
        if not share.cancelled():
            share.result()


class blas_on_one_thread:
    """Have BLAS compute every product on the calling thread, if threadpoolctl is installed.

    BLAS has one number of threads for the whole process: the first call to enter sets it, and the
    last one to leave restores it.
    """

    def __enter__(self) -> None:
        global _blas_users
        blas, counted = _blas(), False
        try:
            with _blas_lock:
                _blas_users, counted = _blas_users + 1, True
                if _blas_users == 1 and blas is not None:
                    # Not with threadpoolctl's `limit`, which first queries all libraries, slowly.
                    for library in blas.lib_controllers:
                        if (threads := library.get_num_threads()) != 1:
                            # Before it is set, for an interrupt in between.
                            _blas_before.append((library, threads))
                            _set_num_threads(library, 1)
        except BaseException:
            # An interrupt: nobody leaves a block that wasn't entered.
            if counted:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        global _blas_users
        with _blas_lock:
            _blas_users -= 1
            if _blas_users == 0:
                while _blas_before:
                    _set_num_threads(*_blas_before[-1])
                    _blas_before.pop()


def _set_num_threads(library: Any, threads: int) -> None:
    """Set a BLAS's number of threads, from any Python thread."""
    # Since 3.8 threadpoolctl lets one Python thread set OpenBLAS's threads, and ignores others.
    clear = getattr(library, "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)
    library.set_num_threads(threads)
    if clear is not None:
        clear(force=True)


@contextlib.contextmanager
def openmp_on_one_thread() -> Iterator[None]:
    """Have OpenMP, and so torch, compute on the calling thread alone, with threadpoolctl.

    OpenMP has a number of threads for each thread that calls it.
    """
    libraries = _openmp()
    if not libraries:
        yield
        return
    # Torch sets a new thread's number when it is first asked for it.
    sys.modules["torch"].get_num_threads()
    before = [library.get_num_threads() for library in libraries]
    for library in libraries:
        library.set_num_threads(1)
    try:
        yield
    finally:
        for library, threads in zip(libraries, before, strict=True):
            library.set_num_threads(threads)


@functools.cache
def _openmp() -> list[Any]:
    """Return the loaded OpenMP libraries, torch's among them; none without threadpoolctl."""
    if importlib.util.find_spec("threadpoolctl") is None:
        return []
    from threadpoolctl import ThreadpoolController

    return list(ThreadpoolController().select(user_api="openmp").lib_controllers)


def blas_has_a_limit() -> bool:
    """Return whether `blas_on_one_thread` works: whether threadpoolctl is installed."""
    return _blas() is not None


@functools.cache
def _blas() -> Any:
    """Return a controller of the loaded BLAS, or None without threadpoolctl."""
    if importlib.util.find_spec("threadpoolctl") is None:
        return None
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(64, available_cores()), thread_name_prefix="fusedops")
