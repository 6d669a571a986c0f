"""GPU kernels in Triton: the module ``triton`` of each folder registers the kernels of a family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def per_plan(kernel: Callable[[Any, Any], None], device: Any) -> Callable[[Any, Any], None]:
    """Return a function that does a kernel's work for arguments of one kind."""
    from gpukern import tape

    return tape.per_plan(kernel, device)
