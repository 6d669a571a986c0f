"""Linear layers of many rows in float32, by the products of our ops."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch
from torch.overrides import TorchFunctionMode

from fusedops._frame.arrays import allows_tf32
from fusedops._frame.check import traced
from fusedops._frame.registry import BackendName
from fusedops._kept import kept
from fusedops.so2 import so2_convolution

#: The types of tensors whose products are ours.
PLAIN = torch.Tensor, torch.nn.Parameter

#: The fewest multiplications of a layer that are worth a longer call on a CPU.
MANY = 1 << 22

#: The fewest multiplications of a layer, and outputs, that repay splitting rows on a GPU. Where
#: there are gradients either inputs or outputs must be so many, and both as many as `TRAINED`: with
#: fewer, `gpukern.products` leaves products to torch, after a longer call.
REPAID = 1 << 31, 160
TRAINED = 128
#: The fewest multiplications in a force step's graphs, whose launches cost the host nothing.
REPAID_IN_GRAPHS = 1 << 28


class LinearProducts(TorchFunctionMode):
    """Linear layers of many rows in float32 by our products, in a ``with`` block.

    A linear layer is an SO(2) convolution of degree 0. Ours are oneDNN's on a CPU, and torch's are
    MKL's, which multiplies at half the speed on some processors that aren't Intel's; ours serve
    rows of edges there, and no pair representations. On a GPU ours are those of tensor cores, exact
    to float32.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch, or ours in its place."""
        kwargs = kwargs or {}
        # A layer that is called in the block may be compiled.
        linear = function is torch.nn.functional.linear and not _recorded()
        if linear and self._serves(*args, **kwargs):
            return self._linear(*args, **kwargs)
        return function(*args, **kwargs)

    @staticmethod
    def _serves(input: Any, weight: Any, bias: Any = None) -> bool:
        given = (input, weight) if bias is None else (input, weight, bias)
        return (
            all(type(a) in PLAIN and a.dtype == torch.float32 for a in given)
            and all(a.device == input.device for a in given)
            and input.layout == weight.layout == torch.strided
            and input.ndim > weight.ndim - 1 == 1
            and input.shape[-1] == weight.shape[1]
            and (bias is None or bias.shape == weight.shape[:1])
            and _repays(given)
            and not torch.is_autocast_enabled(input.device.type)
        )

    @staticmethod
    def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
        found: Any = so2_convolution(input.flatten(0, -2).unsqueeze(1), weight, bias=bias)
        # As the layer's own, it is no view: FSDP warns of modules that return one.
        return torch.ops.aten._unsafe_view(found, (*input.shape[:-1], len(weight)))


def _recorded() -> bool:
    """Return whether torch records a call; torch.jit.trace would keep our result as a constant."""
    return traced() or torch.jit.is_tracing()


def _repays(given: tuple[Any, ...]) -> bool:
    """Return whether our product is faster than torch's."""
    input, weight = given[:2]
    products = math.prod(input.shape[:-1]) * weight.numel()
    if input.is_cpu:
        return products >= MANY
    least, results = _least(input), REPAID[1]
    trains = torch.is_grad_enabled() and any(a.requires_grad for a in given)
    few, many = sorted(weight.shape) if trains else (TRAINED, len(weight))
    repaid = products >= least and many >= results and few >= TRAINED
    return input.is_cuda and repaid and not allows_tf32()


def _least(x: Any) -> int:
    return REPAID[0] if kept(x.device) is None else REPAID_IN_GRAPHS


def linear_products(x: torch.Tensor, backend: BackendName | None = None) -> Any:
    """Return the context for layers of `x`: ours unless a backend is asked for.

    While torch traces, it is none: compilers multiply as they choose.
    """
    # A traced size must not be looked at: torch.export would keep to one side of the bound.
    if backend is not None or x.dtype != torch.float32 or _recorded():
        return nullcontext()
    # Torch calls the context for each function. A layer has up to some 4,096 results.
    many = x.numel() >= _least(x) >> 12 if x.is_cuda else x.ndim == 2
    return LinearProducts() if many else nullcontext()
