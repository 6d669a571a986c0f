"""The choice, once in a process, of the instruction set for which compiled kernels are loaded.

``FUSEDOPS_ISA`` (``v2``, ``v3``, ``v4``) asks for a lower level than the CPU's own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType


@functools.cache
def _find() -> tuple[str, str | None]:
    if importlib.util.find_spec("cpukern._cpu") is None:
        return "", "the compiled extension is not built here"
    try:
        cpu = importlib.import_module("cpukern._cpu")
    except ImportError as error:
        return "", f"the compiled extension does not load: {error}"
    own = cpu.x86_64_level()
    if own == 0:
        return "baseline", None
    if own < 2:
        return "", "the CPU is older than x86-64-v2"
    asked = os.environ.get("FUSEDOPS_ISA") or f"v{own}"
    if asked not in ("v2", "v3", "v4"):
        return "", f"FUSEDOPS_ISA is {asked!r}; it should be v2, v3 or v4"
    if int(asked[1]) > own:
        return "", f"FUSEDOPS_ISA is {asked}; this CPU stops at v{own}"
    if importlib.util.find_spec(f"cpukern.wigner_{asked}") is None:
        return "", f"the compiled extension is not built for x86-64-{asked} here"
    return asked, None


def why_not() -> str | None:
    """Return why no compiled kernel can run here, or None if they can."""
    return _find()[1]


def level() -> str:
    """Return the instruction set chosen: ``v2``, ``v3`` or ``v4`` of x86-64, or ``baseline``."""
    return _find()[0]


def load(family: str) -> ModuleType:
    """Return the compiled module of a family for the instruction set chosen."""
    return importlib.import_module(f"cpukern.{family}_{level()}")
