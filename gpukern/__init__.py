"""GPU kernels in Triton, one module or package a family of ops, which registers its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def per_plan(kernel: Callable[[Any, Any], None], device: Any) -> Callable[[Any, Any], None]:
    """Return what does a kernel's work for arguments of one kind."""
    from gpukern import tape

    return tape.per_plan(kernel, device)
