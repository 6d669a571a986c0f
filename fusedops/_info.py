"""This machine's versions, backends, instruction set, threads and GPUs."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

import numpy as np

from cpukern import isa
from fusedops._frame import registry, threads
from fusedops._frame.primitive import primitives


@dataclass(frozen=True)
class BackendInfo:
    """The version of a backend's library, and the reason why it can't be used here, or None."""

    version: str | None
    why_not: str | None


@dataclass(frozen=True)
class Info:
    """The result of `info`; `str` makes it readable."""

    fusedops: str
    python: str
    numpy: str
    instruction_set: str | None
    threads: int
    gpus: tuple[str, ...]
    backends: dict[str, BackendInfo]

    def __str__(self) -> str:
        compiled = "no compiled kernels"
        if self.instruction_set:
            compiled = f"kernels compiled for {self.instruction_set}"
        lines = [
            f"fusedops {self.fusedops}, Python {self.python}, NumPy {self.numpy}",
            f"{compiled}; {self.threads} threads",
            f"GPUs: {', '.join(self.gpus) or 'none'}",
        ]
        for name, backend in self.backends.items():
            lines.append(f"  {name:<8}{backend.version or '-':<14}{backend.why_not or 'usable'}")
        return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
        ``threads`` is the result of `get_num_threads`.

    Examples
    --------
    >>> import fusedops
    >>> fusedops.info().backends["numpy"].why_not is None
    True
    """
    from fusedops import __version__

    gpus = _gpus()
    no_torch = registry.import_error("torch")
    backends = {}
    reason: str | None
    for backend in registry.BACKENDS:
        device = "cuda" if backend.name == "triton" else "cpu"
        request = registry.Request(
            next(iter(primitives())), backend.speaks, device, np.dtype(np.float32), None
        )
        if backend.speaks == "torch" and no_torch:
            reason = no_torch
        elif device == "cuda" and not gpus:
            reason = "torch sees no GPU"
        else:
            reason = registry.why_not(backend, request)
        package = "fusedops" if backend.name == "cython" else backend.name
        version = __version__ if package == "fusedops" else _version(package)
        backends[backend.name] = BackendInfo(version, reason)
    compiled = backends["cython"].why_not is None
    level = isa.level() if compiled else None
    return Info(
        fusedops=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        instruction_set=f"x86-64-{level}" if level and level != "baseline" else level,
        threads=threads.get_num_threads(),
        gpus=gpus,
        backends=backends,
    )
