"""Messages of UMA's edges in float16, which have TF32's digits and half of the bytes.

Arrays of edges take most of a force step's time. TF32 rounds the factors of products to 11 binary
digits, as float16 rounds all numbers. Cotangents may be of any size: in each block of layers they
are multiplied by a power of two, and the gradients are divided by it (Micikevicius et al., arXiv
1710.03740). A number beyond float16's range makes the results infinite or NaN, for the caller to
see; a feature or weight below 6e-8, which TF32 would keep, is zero. Gradients are of the first
order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import fusedops._frame.needs_torch  # noqa: F401

import torch
from torch.autograd.function import once_differentiable

from fusedops._kept import formed
from fusedops.so2 import so2_convolution

#: The binary exponent of a block's largest cotangent: sums of some thousand such numbers, and
#: numbers that are smaller by 2¹⁷, are in float16's range.
_EXPONENT = 3
#: The bits of 2⁻⁹⁵. A smaller largest cotangent counts as this one, whose factor is a number.
_LEAST = 32 << 23


def half_of(weight: Any) -> Any:
    """Return a frozen weight in float16, or None for none."""
    if weight is None:
        return None

    def make(into: Any) -> Any:
        return weight.detach().half() if into is None else into.copy_(weight)

    return formed(weight, "float16", make)


class Radial(NamedTuple):
    """The input of a radial function's last layer, and the layer's parameters in float16."""

    hidden: Any
    weight: Any
    bias: Any


class _Scale:
    """The reciprocal of the factor of a block's cotangents, once the last of them is known."""

    reciprocal: Any = None


class _Into(torch.autograd.Function):
    """Round to float16."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: _Scale) -> Any:
        """Return features in float16."""
        ctx.scale = scale
        return x.half()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Any) -> Any:
        """Return the cotangent in float32."""
        return dx * ctx.scale.reciprocal, None


class _OutOf(torch.autograd.Function):
    """Return to float32."""

    @staticmethod
    def forward(ctx: Any, y: Any, scale: _Scale) -> Any:
        """Return features in float32."""
        ctx.scale = scale
        return y.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        """Return the cotangent, scaled, in float16."""
        # Each node's largest first: a reduction of so many numbers to one waits for a memset.
        most = torch.linalg.vector_norm(dy, torch.inf, dim=(1, 2))
        most = torch.linalg.vector_norm(most, torch.inf, dim=0, keepdim=True)
        # A float32's exponent, and nothing after it: few launches of one number each.
        bits = most.view(torch.int32).clamp(min=_LEAST).bitwise_and_(-1 << 23)
        ctx.scale.reciprocal = bits.sub_(_EXPONENT << 23).view(torch.float32)
        halves = torch.empty_like(dy, dtype=torch.float16)
        return torch.div(dy, ctx.scale.reciprocal, out=halves), None


def _convolved(layer: Any, message: Any, radial: Any) -> Any:
    """Return a convolution of messages, and the gates if the layer has any."""
    weights = layer.fc_m0.weight, *[part["fc"].weight for part in layer.so2_m_conv]
    return so2_convolution(
        message,
        *map(half_of, weights),
        bias=half_of(layer.fc_m0.bias),
        radial=radial,
        gate_channels=layer.extra_m0_output_channels or 0,
    )


def messages(
    layer: Any, x: Any, radial: Radial, edge_index: Any, wigner: Any, wigner_inv: Any, target: Any
) -> Any:
    """Return the sums of messages over the edges of each node, by fairchem's ``Edgewise``."""
    scale, backend = _Scale(), layer.backend

    def into(x: Any) -> Any:
        return _Into.apply(x, scale)

    functions = torch.nn.functional.linear(into(radial.hidden), radial.weight, radial.bias)
    found, rest, _ = backend.fused_node_to_edge_conv1_pack(
        into(x), edge_index, into(wigner), functions, x.shape[2]
    )
    found, gates = _convolved(layer.so2_conv_1, found, rest)
    found = _convolved(layer.so2_conv_2, layer.act(gates, found), None)
    found = backend.permute_wigner_inv_edge_to_node(found, into(wigner_inv), target, x.shape[0])
    return _OutOf.apply(found, scale)
