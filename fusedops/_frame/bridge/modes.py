"""The kinds of tensors and the modes of torch, which the plan of a call may depend on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fusedops._frame.check import traced
from fusedops._frame.torch_private import private

_transforming, _dispatch_modes = private().transforming, private().dispatch_modes
_is_deterministic, _dual_level = private().is_deterministic, private().dual_level


def transforms() -> bool:
    """Return whether torch does more than compute: traces, transforms, or pushes forward."""
    return _transforming() or _dispatch_modes() > 0 or _dual_level() >= 0


def watched(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Return whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


def has_tangent(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Return whether any of the tensors is dual, a value with a tangent."""
    return _dual_level() >= 0 and any(
        [x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors]
    )


def differentiates(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Return whether operations on the tensors may have derivatives, or are mapped."""
    # Compilers trace neither transforms nor tangents.
    return watched(tensors) or (not traced() and (_transforming() or has_tangent(tensors)))


@contextlib.contextmanager
def pushed_forward(saved: Sequence[torch.Tensor | None]) -> Iterator[list[Any]]:
    """Return saved tensors without their tangents, in a context for the jvp of a Function.

    Torch switches tangents off in a jvp, those of outer transforms too; the context has them on.
    """
    with private().set_forward_mode(True):
        # Torch has no level but 0, and doesn't report it in compiled graphs.
        yield [None if x is None else forward_ad.unpack_dual(x, level=0).primal for x in saved]


def guard(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Return a function that tells whether other tensors, and torch's modes, are of one kind.

    One step of torch compares types, dtypes, devices, shapes, strides, whether a tensor requires
    grad, and the dispatch keys of tensors and thread, which show lazy negation, autocast, inference
    mode and transforms. Kernels may depend on where a tensor begins, modulo 16 bytes.
    """
    check = private().guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    modes = _modes()
    begin = [tensor.data_ptr() & 15 for tensor in tensors]
    aligned = not any(begin)

    def passes(tensors: Sequence[torch.Tensor]) -> bool:
        if not check(*tensors) or _modes() != modes:
            return False
        if not aligned:
            return [tensor.data_ptr() & 15 for tensor in tensors] == begin
        bits = 0
        for tensor in tensors:
            bits |= tensor.data_ptr()
        return not bits & 15

    return passes


def _modes() -> tuple[Any, ...]:
    """Return the modes of torch that no dispatch key shows."""
    return (
        torch.is_grad_enabled(),
        _is_deterministic(),
        _dispatch_modes(),
        _dual_level(),
    )
