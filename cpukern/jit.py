"""Compilation of Numba kernels, with the code kept on disk if a folder is writable."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from numba.core.caching import FunctionCache


class _Cache(FunctionCache):
    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # Numba itself notices changes to the file of a kernel alone.
        own = Path(self._py_func.__code__.co_filename).parent
        return *super()._index_key(sig, codegen), _sources(own)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            # Files that a crash of the machine has cut short raise nearly anything.
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        # A full disk only costs a compilation in the next process.
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


@functools.cache
def _sources(folder: Path) -> str:
    """Return a hash of the files whose functions the kernels of a folder inline."""
    files = sorted([*Path(__file__).parent.glob("*.py"), *folder.glob("*.py")])
    return hashlib.sha256(b"".join([file.read_bytes() for file in files])).hexdigest()


def folders() -> list[str]:
    """Return the folders in which Numba keeps these kernels, none if no folder is writable."""
    found = []
    for module in sorted(Path(__file__).parent.glob("*/numba.py")):
        # Numba chooses a folder by the file that a function is from.
        there = FunctionType(jit.__code__.replace(co_filename=str(module)), {})
        with contextlib.suppress(RuntimeError):
            found.append(FunctionCache(there).cache_path)
    return found


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for this CPU, to run without the GIL.

    Numba's cache is keyed by CPU, so hosts may share one. Threads come from the frame's
    `in_parallel`, not from Numba's threading layers, which abort a forked child or a second Python
    thread.
    """
    compiled = numba.njit(nogil=True, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # no folder for a cache is writable
        compiled._cache = _Cache(function)
    return compiled


#: Compile a function into the kernels that call it.
inlined = functools.partial(numba.njit, error_model="numpy", forceinline=True)
