"""Launches Triton kernels with little overhead."""

from __future__ import annotations

from typing import Any


class Launcher:
    """A Triton kernel whose compiled forms are found by a short key.

    Triton's own launch works out a specialization from every argument, which takes longer than a
    small kernel does. The kernels here specialize on nothing but pointer types, the width of
    integers, and constants, so that a key of those finds the compiled form.
    """

    def __init__(self, kernel: Any, warps: int) -> None:
        self.kernel = kernel
        self.warps = warps
        self._compiled: dict[Any, Any] = {}

    def __call__(self, programs: int, key: tuple[Any, ...], *args: Any) -> None:
        """Launch `programs` of the kernel; `key` holds all that `args` may be compiled for."""
        compiled = self._compiled.get(key)
        if compiled is None:
            # None again under TRITON_INTERPRET=1, where there is nothing to compile.
            self._compiled[key] = self.kernel[(programs,)](*args, num_warps=self.warps)
        else:
            compiled[(programs, 1, 1)](*args)
