"""Counts of the calls that our functions serve in the place of other programs' functions.

A program's `register` calls `start`, and its `unregister` calls `stop`::

    for swap in start("torchref", names):
        setattr(module, swap.name, swap.counting(ours[swap.name]))
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fusedops._host.packages import release, version_of

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("fusedops")
#: For each distribution that a `register` serves, its module here, and the first and last version.
PROGRAMS = {
    "torchref": ("fusedops.compat.torchref", "0.5", "0.7"),
    "fairchem-core": ("fusedops.compat.fairchem", "2.16", "2.24"),
    "transformers": ("fusedops.compat.transformers", "5.23", "5.24"),
}
_lock = threading.Lock()
# A model that was built before `unregister` holds its swap, which counts again after `register`.
_all: dict[tuple[str, str], Swap] = {}
_active: dict[str, list[Swap]] = {}


@dataclass(eq=False)
class Swap:
    """A part of another program that fusedops serves, with the calls since `register`."""

    program: str
    version: str | None
    name: str
    calls: int = 0
    traced: int = 0

    def __str__(self) -> str:
        traced = f", traced: {self.traced}" if self.traced else ""
        return f"{_named(self.program, self.version)}: {self.name}, calls: {self.calls}{traced}"

    def count(self) -> None:
        """Count a call."""
        if sys.modules["torch"].compiler.is_compiling():
            self._trace()
        else:
            # No lock: CPython switches threads between lines, not within this one.
            self.calls += 1

    def _trace(self) -> None:
        self.traced += 1

    # torch.compile runs a function with this mark while it traces, and leaves it out of the graph.
    # Torch's decorator for it would import the compiler.
    _trace._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def counting(self, function: F) -> F:
        """Return a function whose calls are counted."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count()
            return function(*args, **kwargs)

        return counted  # type: ignore[return-value]


def _named(program: str, version: str | None) -> str:
    """Return a program's name and, if it is installed, version."""
    return f"{program} {version}" if version else program


def why_not(program: str) -> str | None:
    """Return why no `register` is known to serve a program as it is installed, or None."""
    version = version_of(program)
    _, first, last = PROGRAMS[program]
    if version is None:
        return "not installed"
    if not release(first) <= release(version)[:2] <= release(last):
        return f"{version} is installed; it should be {first} to {last}"
    return None


def release_of(program: str) -> tuple[int, ...]:
    """Return the first two numbers of an installed program's version; none without it."""
    version = version_of(program)
    return release(version)[:2] if version else ()


def of(program: str, name: str) -> Swap:
    """Return the only swap of a program by this name, active or not."""
    return _all.setdefault((program, name), Swap(program, None, name))


def start(program: str, names: Iterable[str], note: str = "") -> list[Swap]:
    """Return the swaps that are active in a program from now on, and log changes.

    A swap that was active before counts on.
    """
    with _lock:
        before, now = _active.get(program, []), [of(program, name) for name in names]
        for swap in now:
            if swap not in before:
                swap.version, swap.calls, swap.traced = version_of(program), 0, 0
        _active[program] = now
    if now != before or not now:
        served = ", ".join(swap.name for swap in now) or "nothing"
        level = logging.INFO if now else logging.WARNING
        name = _named(program, version_of(program))
        log.log(level, "%s: fusedops serves %s%s", name, served, note)
    return now


def stop(program: str) -> None:
    """Forget a program's swaps."""
    with _lock:
        _active.pop(program, None)


def serves(program: str) -> bool:
    """Return whether fusedops serves a part of a program."""
    return program in _active


def swaps() -> list[Swap]:
    """Return the parts of other programs that fusedops serves in this process, with their calls.

    The calls are counted from `register` on. A call that ``torch.compile`` traces is counted as
    often as it is traced, in ``traced``; runs of the graph aren't counted.

    Returns
    -------
    list of Swap
        Copies with the attributes ``program``, ``version``, ``name``, ``calls`` and ``traced``;
        later calls don't change them.

    Examples
    --------
    >>> import fusedops.compat
    >>> fusedops.compat.swaps()
    []
    """
    with _lock:
        return [replace(swap) for active in _active.values() for swap in active]
