"""The bridge to torch, one for every op: only it and `fusedops.nn` import torch.

This file chooses how a call is served: by a plan, unless torch traces or transforms it. Every other
file has one part, and is reached by its name: `tensors`, memory that tensors share with NumPy
arrays; `evaluation`, kernels and formulas; `autograd`, derivatives; `graphs`, registered ops;
`nodes`, torch.compile; `modes`, the state of torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedops._frame import registry
from fusedops._frame.bridge.autograd import recorded, transformed
from fusedops._frame.bridge.evaluation import evaluation
from fusedops._frame.bridge.graphs import registered
from fusedops._frame.bridge.modes import has_tangent, transforms, watched
from fusedops._frame.check import traced
from fusedops._frame.kinds import TENSORS
from fusedops._frame.primitive import Primitive
from fusedops._frame.torch_private import private
from fusedops._host.threads import follow_torch

TENSORS |= {torch.Tensor, torch.nn.Parameter}
follow_torch(torch)


def __getattr__(name: str) -> Any:
    """Import `nodes` when torch's compiler looks for it, before it traces a call."""
    if name != "nodes":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.nodes")


def plan(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """Return a function that evaluates a primitive on tensors of these kinds.

    It serves this call alone where torch traces or transforms it.
    """
    arrays = a[: len(primitive.arrays)]
    asked, traces = watched(arrays), transforms() and traced()
    if torch.jit.is_tracing() and (asked or not _is_formula(primitive, arrays)):
        raise NotImplementedError(
            f"{primitive.name}: torch.jit.trace would keep the result of a kernel as a constant; "
            "use torch.export, or torch.no_grad and backend='torch'"
        )
    # A registered op has no rule for transforms, and its outputs lose tangents.
    transforming = private().transforming() or has_tangent(arrays)
    if primitive.mutates and (asked or transforming):
        raise RuntimeError(primitive.no_gradient(primitive.name))
    if transforming or (traces and asked):
        return functools.partial(transformed, primitive)
    if traces:
        return registered[primitive.name].call
    if asked:
        return recorded(primitive, a, slots)
    run = evaluation(primitive, a, slots)
    if primitive.mutates or any([isinstance(slot, torch.Tensor) for slot in slots]):
        return _told(primitive, run)
    return run


def _is_formula(primitive: Primitive, arrays: Sequence[Any]) -> bool:
    """Return whether the backend chosen for arrays evaluates the formula in torch."""
    backend, _ = registry.choose(registry.request(primitive.name, arrays))
    return backend.speaks != "numpy" and not backend.package


def _told(primitive: Primitive, run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Count writes that autograd hasn't seen, so that it finds stale saved tensors."""

    def told(a: Any, slots: Sequence[Any]) -> Any:
        y = run(a, slots)
        for tensor in (*slots, *[getattr(a, name) for name in primitive.mutates]):
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return y

    return told
