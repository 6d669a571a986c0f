"""Decide if a kernel may read a layer's weights; any other layer is called, or refused."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as _modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusedops._frame.check import is_dtensor
from fusedops._frame.registry import BackendName, BackendUnavailable, forced

#: Layers that compute by weight and bias alone, if they have any, and usual types of weights.
KINDS = torch.nn.Linear, torch.nn.LayerNorm, torch.nn.SiLU
WEIGHTS = torch.nn.Parameter, torch.Tensor, type(None)
#: The ``forward`` of each kind, which a program may have replaced for all layers.
FORWARDS: dict[Any, Any] = {kind: kind.forward for kind in KINDS}


def check_tensors(name: str, needed: str, **given: Any) -> None:
    """Raise TypeError unless arguments are tensors, or None where they aren't the `needed` one."""
    for argument, value in given.items():
        if not isinstance(value, torch.Tensor) and (value is not None or argument == needed):
            was = "None" if value is None else f"a {type(value).__name__}"
            raise TypeError(f"{name}: {argument} is {was}; it should be a tensor")


def has_hooks(module: Any) -> bool:
    """Return whether a call of a module is more than the ``forward`` of its class."""
    own = module.__dict__
    return bool(
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
        or "forward" in own
    )


def check_container(name: str, part: str, module: Any) -> None:
    """Raise an error if a container has hooks or a forward: only its layers are called."""
    own = type(module).forward is not torch.nn.Module.forward
    if own or has_hooks(module):
        more = "a forward of its own" if own else "hooks"
        raise TypeError(
            f"{name}: {part} has {more}; it should have none, as only its layers are called"
        )


def is_plain(layer: Any) -> bool:
    """Return whether a layer's weight and bias say all that a call of it computes.

    This holds for torch's Linear, LayerNorm and SiLU without hooks, adapters or a forward of their
    own, and with ``torch.nn.utils.parametrize`` too, which computes attributes when they are read.
    The op judges sharded weights; quantized weights can be multiplied by the layer alone.
    """
    own, kind = layer.__dict__, type(layer)
    if kind not in KINDS and not (kind.__base__ in KINDS and "parametrizations" in own["_modules"]):
        return False
    base = kind if kind in KINDS else kind.__base__
    if kind.forward is not FORWARDS[base]:
        return False
    if has_hooks(layer) or _modules._has_any_global_hook():
        return False
    weight = own["_parameters"].get("weight")
    if type(weight) in WEIGHTS or is_dtensor(weight):
        return True
    return not is_traceable_wrapper_subclass(weight)


def is_plain_norm(layer: Any, eps: float) -> bool:
    """Return whether a layer is a plain LayerNorm of one axis, with this ε."""
    return is_plain(layer) and layer.eps == eps and len(layer.normalized_shape) == 1


def check_callable(name: str, layer: str, x: Any, backend: BackendName | None) -> None:
    """Raise an error unless torch may call a module's layer, which isn't plain."""
    is_more = f"{name}: {layer} is more than its weight and bias, so that torch must call it"
    if is_dtensor(x):
        raise TypeError(f"{is_more}; x should be no DTensor then, or {layer} a plain layer")
    asked = backend if torch.compiler.is_compiling() else forced(backend, name)
    if asked not in (None, "torch"):
        raise BackendUnavailable(f"{is_more}; backend is {asked!r}, and should be None or 'torch'")
