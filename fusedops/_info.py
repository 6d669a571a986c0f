"""This machine's versions, backends, instruction set, threads and GPUs; how calls are served."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpukern import isa
from fusedops import _swaps
from fusedops._frame import registry
from fusedops._frame.check import size
from fusedops._frame.op import Op
from fusedops._host import memory
from fusedops._host.packages import version_of
from fusedops._host.threads import choose_num_threads, get_num_threads, whose_threads
from fusedops._version import __version__

#: Packages without which the library works, but not all of its commands and functions.
_PACKAGES = ("gemmi", "matplotlib", "rich", "scipy", "shtab", "threadpoolctl")


def check_variables() -> None:
    """Raise ValueError if a variable of the environment that calls may need has no meaning."""
    registry.forced(None)
    get_num_threads()
    memory.limit()


@dataclass(frozen=True)
class BackendInfo:
    """The version of a backend's library, and the reason why it can't be used here, or None."""

    version: str | None
    why_not: str | None


@dataclass(frozen=True)
class CacheInfo:
    """A compiler's folder, and the bytes that kernels of this library take there."""

    folder: str
    bytes: int


@dataclass(frozen=True)
class ProgramInfo:
    """A program's version, the module whose `register` serves it, and why it can't, or None."""

    version: str | None
    module: str
    why_not: str | None


@dataclass(frozen=True)
class Info:
    """The result of `info`; `str` makes it readable."""

    fusedops: str
    python: str
    numpy: str
    instruction_set: str | None
    threads: int
    whose_threads: str
    gpus: tuple[str, ...]
    backends: dict[str, BackendInfo]
    packages: dict[str, str | None]
    caches: dict[str, CacheInfo]
    pool: int
    pool_limit: int
    programs: dict[str, ProgramInfo]
    swaps: list[Any]

    def __str__(self) -> str:
        compiled = "no compiled kernels"
        if self.instruction_set:
            compiled = f"kernels compiled for {self.instruction_set}"
        lines = [
            f"fusedops {self.fusedops}, Python {self.python}, NumPy {self.numpy}",
            f"{compiled}; {self.threads} threads ({self.whose_threads})",
            f"GPUs: {', '.join(self.gpus) or 'none'}",
        ]
        for name, backend in self.backends.items():
            lines.append(f"  {name:<8}{backend.version or '-':<14}{backend.why_not or 'usable'}")
        packages = (f"{name} {found or 'not installed'}" for name, found in self.packages.items())
        lines.append(f"Packages: {', '.join(packages)}")
        for name, cache in self.caches.items():
            lines.append(f"Kernels compiled by {name}: {megabytes(cache.bytes)} in {cache.folder}")
        pool, limit = megabytes(self.pool), megabytes(self.pool_limit)
        lines.append(f"Memory kept for arrays: {pool} of {limit}")
        lines.append("Programs that a register() serves:")
        for name, program in self.programs.items():
            told = program.why_not or f"{program.version}, by {program.module}"
            lines.append(f"  {name:<15}{told}")
        lines.append(f"Served in this process: {'' if self.swaps else 'nothing'}".rstrip())
        lines += [f"  {swap}" for swap in self.swaps]
        return "\n".join(lines)


def explain(op: Op[Any], /, *args: Any, **kwargs: Any) -> registry.Explanation:
    """Return which backend serves a call of an op, and why: ``op.explain`` as a function.

    The op isn't run. The arguments are checked as the call checks them.

    Parameters
    ----------
    op : function
        An op of fusedops, such as `fusedops.planarity_nll`.
    *args
        The arguments of the call.
    **kwargs
        The same by name, `out` too; `backend` asks for a backend.

    Returns
    -------
    Explanation
        `backend`, the name of the backend that serves the call, or None; and `reasons`, a dict with
        the reason of each backend that can't serve it, and None for the others. ``str`` makes a
        table of them.

    Raises
    ------
    TypeError, ValueError
        If op isn't an op of fusedops, or the call would raise it; the message names the argument.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> square = np.array([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]])
    >>> planes = [([[0, 1, 2, 3]], [0.02])]
    >>> why = fusedops.explain(fusedops.planarity_nll, square, planes, backend="numpy")
    >>> why.backend, why.reasons["torch"]
    ('numpy', 'it takes torch tensors; these are NumPy arrays')
    """
    if not any(op is one for one in registry.ops.values()):
        was = getattr(op, "__qualname__", None) or f"a {type(op).__name__}"
        raise TypeError(
            f"explain: op is {was}; it should be an op of fusedops, such as fusedops.planarity_nll"
        )
    return op.explain(*args, **kwargs)


def megabytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def caches() -> dict[str, tuple[Path, list[Path]]]:
    """Return each compiler's folder, and the files and folders there that hold our kernels."""
    found = {}
    if not registry.import_error("numba"):
        from cpukern import jit

        if kept := jit.folders():
            ours = [path for folder in kept for path in sorted(Path(folder).glob("*.nb[ci]"))]
            found["numba"] = Path(os.path.commonpath(kept)), ours
    if not registry.import_error("triton"):
        from triton import knobs

        folder = Path(knobs.cache.dir)
        found["triton"] = folder, [path for path in sorted(folder.glob("*")) if _holds_ours(path)]
    return found


def _holds_ours(folder: Path) -> bool:
    """Return whether a folder in Triton's cache, which all programs share, is of our kernels.

    Triton's and Gluon's code names its source file at the beginning.
    """
    for path in folder.glob("*.tt*ir"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as code:
            if re.search(rb"[/\\]gpukern[/\\]", code.read(4096)):
                return True
    return False


def size_of(paths: list[Path]) -> int:
    """Return the bytes of files and of folders, from which other processes may remove some."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            for file in [path] if path.is_file() else list(path.iterdir()):
                with contextlib.suppress(FileNotFoundError):
                    total += file.stat().st_size
    return total


def clear(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else os.remove(path)


def _gpus() -> tuple[str, ...]:
    if registry.import_error("torch"):
        return ()
    import torch

    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def info() -> Info:
    """Return this machine's versions, GPUs and threads, and the backends that it can use.

    Imports torch, Numba and Triton where they are installed.

    Returns
    -------
    Info
        ``backends`` maps each backend's name to its version and the reason why it can't be used
        here, or None; ``instruction_set`` is the one of the compiled kernels that were loaded;
        ``threads`` is the result of `get_num_threads`; ``whose_threads`` is ``"torch's OpenMP"``
        from the first call with tensors on, before it ``"own"``, and ``"Python's"`` where the
        compiled kernels are missing; ``packages`` has the versions of optional packages;
        ``caches`` maps compilers to the folder and the bytes of their compiled kernels;
        ``pool`` has the bytes that `release_memory` would free, at most ``pool_limit``;
        ``programs`` maps the programs that a `register` of ``fusedops.compat`` serves to their
        version, the module of `register`, and the reason why it can't serve them here, or None;
        ``swaps`` is the result of `fusedops.compat.swaps`.

    Examples
    --------
    >>> import fusedops
    >>> fusedops.info().backends["numpy"].why_not is None
    True
    """
    gpus = _gpus()
    no_torch = registry.import_error("torch")
    backends: dict[str, BackendInfo] = {}
    reason: str | None
    for backend in registry.BACKENDS:
        device = "cuda" if backend.name == "triton" else "cpu"
        request = registry.Request(
            next(iter(registry.primitives)), backend.speaks, device, np.dtype(np.float32), None
        )
        if backend.speaks == "torch" and no_torch:
            reason = no_torch
        elif device == "cuda" and not gpus:
            reason = "torch sees no GPU"
        else:
            reason = registry.why_not(backend, request)
        package = "fusedops" if backend.name == "cython" else backend.name
        version = __version__ if package == "fusedops" else version_of(package)
        backends[backend.name] = BackendInfo(version, reason)
    compiled = backends["cython"].why_not is None
    level = isa.level() if compiled else None
    return Info(
        fusedops=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        instruction_set=f"x86-64-{level}" if level and level != "baseline" else level,
        threads=get_num_threads(),
        whose_threads=whose_threads(),
        gpus=gpus,
        backends=backends,
        packages={package: version_of(package) for package in _PACKAGES},
        caches={
            name: CacheInfo(str(folder), size_of(ours)) for name, (folder, ours) in caches().items()
        },
        pool=memory.pooled(),
        pool_limit=memory.limit(),
        programs={
            name: ProgramInfo(version_of(name), module, _swaps.why_not(name))
            for name, (module, *_) in _swaps.PROGRAMS.items()
        },
        swaps=_swaps.swaps(),
    )


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
    if threads is not None:
        threads = size("set_num_threads", "threads", threads, least=1)
    choose_num_threads(threads)
