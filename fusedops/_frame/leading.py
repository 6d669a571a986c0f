"""Leading dimensions: an op may take any number of them where its primitive has one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fusedops._frame.check import as_array, is_tensor
from fusedops._frame.shapes import Array


def flat(array: Any, inner: int) -> Any:
    """Return an array with all dimensions but the last `inner` as one."""
    outer = array.ndim - inner
    return array.reshape((math.prod(array.shape[:outer]), *array.shape[outer:]))


def led(value: Any, lead: tuple[int, ...]) -> Any:
    """Return a result with leading dimensions in place of its first."""
    shape = *lead, *value.shape[1:]
    if is_tensor(value):
        # Not a view: FSDP can't follow writes to a view. Writes to either are not counted for the
        # other, so an op with leading dimensions can't save the output that it shows.
        return sys.modules["torch"].ops.aten._unsafe_view(value, shape)
    return value.reshape(shape)


def flattened(
    op: str, declared: Mapping[str, Array], leading: str | None, given: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, dict[str, Callable[[Any], Any]]]:
    """Return leading dimensions that aren't one, and functions that flatten a call's arrays."""
    if leading is None:
        return None, {}
    first, inner = as_array(op, leading, given[leading]), len(declared[leading].shapes[0]) - 1
    if first.ndim == inner + 1:
        return None, {}
    sizes = declared[leading].fit_end(op, leading, first)
    lead = tuple(first.shape[: first.ndim - inner])
    found: dict[str, Callable[[Any], Any]] = {
        leading: lambda array: flat(as_array(op, leading, array), inner)
    }
    for name, array in declared.items():
        inside = [term.value(sizes) for term in array.shapes[0][1:]]
        own = len(inside)
        if not array.broadcasts or given[name] is None:
            continue
        value = as_array(op, name, given[name])
        if value.ndim > own:
            shape = tuple(value.shape)
            full = *(lead or (1,)), *shape[-own:]
            pairs = zip(reversed(shape), reversed((*(lead or (1,)), *inside)), strict=False)
            if len(shape) > len(full) or not all([m in (None, n) or n == 1 for n, m in pairs]):
                raise ValueError(
                    f"{op}: {name} has shape {shape}; it should broadcast to {(*lead, *inside)}, "
                    f"as {leading} has shape {tuple(first.shape)}"
                )

            def broadcast(array: Any, name: str = name, full: Any = full, own: int = own) -> Any:
                array = as_array(op, name, array)
                wide = array.expand(full) if is_tensor(array) else np.broadcast_to(array, full)
                return flat(wide, own)

            found[name] = broadcast
    return lead, found
