"""Leading dimensions: an op may take any number of them where its primitive has one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fusedops._frame.check import is_tensor, own_memory
from fusedops._frame.shapes import Array


def flat(array: Any, inner: int) -> Any:
    """Return an array with all dimensions but the last `inner` as one."""
    outer = array.ndim - inner
    return array.reshape((math.prod(array.shape[:outer]), *array.shape[outer:]))


def led(value: Any, lead: tuple[int, ...]) -> Any:
    """Return a result with leading dimensions in place of its first."""
    shape = *lead, *value.shape[1:]
    if is_tensor(value):
        # Not a view: FSDP can't follow writes to a view.
        return sys.modules["torch"].ops.aten._unsafe_view(value, shape)
    return value.reshape(shape)


def flattened(
    op: str, declared: Mapping[str, Array], leading: str, given: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, dict[str, Callable[[Any], Any]]]:
    """Return leading dimensions that aren't one, and functions that flatten a call's arrays."""
    first, inner = given[leading], len(declared[leading].shapes[0]) - 1
    if not hasattr(first, "ndim") or first.ndim < inner or first.ndim == inner + 1:
        return None, {}
    if is_tensor(first):
        own_memory(op, leading, first)
    sizes = declared[leading].fit_end(op, leading, first)
    lead = tuple(first.shape[: first.ndim - inner])
    found: dict[str, Callable[[Any], Any]] = {leading: lambda array: flat(array, inner)}
    for name, array in declared.items():
        inside = [term.value(sizes) for term in array.shapes[0][1:]]
        own = len(inside)
        if array.broadcasts and getattr(given[name], "ndim", 0) > own:
            shape = tuple(given[name].shape)
            full = *(lead or (1,)), *shape[-own:]
            pairs = zip(reversed(shape), reversed((*(lead or (1,)), *inside)), strict=False)
            if len(shape) > len(full) or not all([m in (None, n) or n == 1 for n, m in pairs]):
                raise ValueError(
                    f"{op}: {name} has shape {shape}; it should broadcast to {(*lead, *inside)}, "
                    f"as {leading} has shape {tuple(first.shape)}"
                )

            def broadcast(array: Any, full: Any = full, own: int = own) -> Any:
                wide = array.expand(full) if is_tensor(array) else np.broadcast_to(array, full)
                return flat(wide, own)

            found[name] = broadcast
    return lead, found
