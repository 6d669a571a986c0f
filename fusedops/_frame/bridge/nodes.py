"""Ops as nodes of torch.compile's graphs, which hold tensors, numbers and names only.

This file alone imports torch's compiler, which takes most of a second; so it is imported by the
first call that the compiler sees.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops._frame import registry
from fusedops._frame.check import traced
from fusedops._frame.packed import Packed, packed

_PACKED = "fusedops.Packed"


def compiled(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call an op in code that torch.compile traces: as one node of the graph, where it can be."""
    if torch.compiler.is_dynamo_compiling() and _fits([args, list(options.values())]):
        return _node(name, _apart(args), list(options), _apart(list(options.values())))
    return torch.compiler.disable(registry.ops[name])(*args, **options)


def _fits(argument: Any) -> bool:
    """Return whether a graph can hold an argument: it can't hold NumPy arrays."""
    if isinstance(argument, (list, tuple)):
        return all([_fits(value) for value in argument])
    kinds = (torch.Tensor, Packed, bool, int, float, str)
    return argument is None or isinstance(argument, kinds)


def _apart(argument: Any) -> Any:
    """Return an argument with every `Packed` taken apart into values that a graph can hold."""
    if isinstance(argument, (list, tuple)):
        return [_apart(value) for value in argument]
    if isinstance(argument, Packed):
        return [_PACKED, type(argument).__name__, *argument.flat()]
    return argument


def _together(argument: Any) -> Any:
    if isinstance(argument, torch.SymFloat):
        # Floats are options, and constants of a graph.
        return float(argument)
    if not isinstance(argument, (list, tuple)):
        return argument
    if len(argument) == 4 and isinstance(argument[0], str) and argument[0] == _PACKED:
        return packed[argument[1]].from_tensors(*argument[2:])
    return [_together(value) for value in argument]


@torch.compiler.allow_in_graph
@torch.compiler.disable
def _node(name: str, args: Any, options: Any, values: Any) -> Any:
    """Call an op, the only function of this library that torch.compile sees.

    The graph ends where an argument is bad, so that the call raises its own error outside of it.
    """
    try:
        given = dict(zip(options, _together(values), strict=True))
        return registry.ops[name](*_together(args), **given)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if not traced():
            raise
        raise NotImplementedError(str(error)) from error
