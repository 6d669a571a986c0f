"""Layers for fairchem's UMA models: ours with the parameters of fairchem's, by fewer operations."""

from __future__ import annotations

import functools
import sys
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops._frame.bridge.modes import has_tangent
from fusedops._frame.check import traced
from fusedops._frame.torch_private import private
from fusedops._layers import has_hooks
from fusedops._products import linear_products
from fusedops.nn import SO2Convolution
from fusedops.so2 import Layout, gate_activation
from fusedops.so2.op import WEIGHTS


class Convolution(SO2Convolution):
    """An SO(2) convolution for fairchem's layers whose packing is joined to rotations.

    Our message is m-major already: it goes in place of the first of their three arrays.
    """

    def gemm_outputs_from_packed(self, message: Any, radial: Any, none: Any) -> Any:
        """Return gates, the convolution of messages, and nothing."""
        out, gates = self(message, radial)
        return gates, out, none

    def gemms_from_blocks(self, blocks: Any) -> Any:
        """Return the convolution of messages, and nothing more."""
        return self(blocks[0]), None, None


def _convolution(theirs: Any) -> Any:
    """Return an SO(2) convolution with the layers of fairchem's, or theirs if it has others."""
    layers = theirs.fc_m0, *(layer.fc for layer in theirs.so2_m_conv)
    # A mixture of experts computes weights in its layers.
    if len(layers) > len(WEIGHTS) or any(type(layer) is not torch.nn.Linear for layer in layers):
        return theirs
    with torch.device("meta"):
        ours = Convolution(
            theirs.sphere_channels,
            theirs.m_output_channels,
            theirs.lmax,
            theirs.mmax,
            extra_m0_output_channels=getattr(theirs, "extra_m0_output_channels", None),
        )
    ours.fc_m0 = layers[0]
    by_order: Any = ours.so2_m_conv
    for mine, layer in zip(by_order, layers[1:], strict=True):
        mine["fc"] = layer
    # The layers of the fast modes get radial functions, which one network has for all of them.
    if type(theirs).__name__ == "SO2_Convolution" and theirs.rad_func is not None:
        ours.rad_func = torch.nn.ModuleDict({"net": theirs.rad_func.net})
    return ours


class _Radial(torch.nn.Module):
    """fairchem's ``RadialMLP``, by `linear_products`."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.net = theirs.net

    def forward(self, inputs: Any) -> Any:
        """Return the radial functions."""
        with linear_products(inputs):
            return self.net(inputs)


class _OwnAdjoint(torch.autograd.Function):
    """A function of rows, a constant and factors: linear in rows, and its own adjoint there.

    Without the constant it gives cotangents of rows, and tangents.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Any, x: Any, constant: Any, *factors: Any) -> Any:
        """Return the function of the rows."""
        return function(x, constant, *factors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep the factors."""
        ctx.function = inputs[0]
        ctx.save_for_backward(*inputs[3:])
        ctx.save_for_forward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        """Return the cotangent of the rows."""
        factors = ctx.saved_tensors
        dx = _OwnAdjoint.apply(ctx.function, dy, None, *factors)
        return None, dx, None, *[None for _ in factors]

    @staticmethod
    def jvp(ctx: Any, _: None, tx: Any, *others: Any) -> Any:
        """Return the tangent of the rows."""
        return _OwnAdjoint.apply(ctx.function, tx, None, *ctx.saved_tensors)


def _of_rows(function: Any, x: Any, constant: Any, *factors: Any) -> Any:
    """Return a function that is its own adjoint, of rows."""
    # torch.compile has no rule for such a class.
    if traced():
        return function(x, constant, *factors)
    return _OwnAdjoint.apply(function, x, constant, *factors)


def _centred(x: Any, _: None, factors: Any) -> Any:
    """Return rows (N, K, C) times a factor each, and the first row less its mean."""
    y = x * factors
    y[:, 0] -= y[:, 0].mean(-1, keepdim=True)
    return y


def _balanced(span: slice, x: Any, target: Any, natoms: Any, batch: Any) -> Any:
    """Return nodes' rows (N, K, C) with sums over systems' atoms: the target, or zero.

    All numbers of a system change alike, those of the first row in a span of channels.
    """
    scalars, single = x[:, 0, span], len(natoms) == 1
    if single:
        sums = scalars.sum(0, keepdim=True)
    else:
        none = scalars.new_zeros(len(natoms), scalars.shape[1])
        sums = none.index_add(0, batch, scalars)
    excess = (sums if target is None else sums - target[:, None]) / natoms[:, None]
    y = x.clone()
    y[:, 0, span] -= excess if single else excess.index_select(0, batch)
    return y


def _may_vary(constant: Any) -> bool:
    """Return whether a derivative by a constant may be asked for."""
    # Within a transform of torch.func a tensor tells of the innermost one only.
    varies: bool = constant.requires_grad or (
        not traced() and (private().is_wrapped(constant) or has_tangent((constant,)))
    )
    return varies


def divides_atoms() -> bool:
    """Return whether several processes share a model's atoms."""
    parallel = sys.modules.get("fairchem.core.common.gp_utils")
    return parallel is not None and parallel.initialized()


class _Balance:
    """fairchem's ``balance_channels``: sums of charge and spin channels over systems' atoms.

    The gradient of fairchem's rows ``corrections[batch]`` adds all atoms to one row, one after the
    other.
    """

    def __init__(self, model: Any) -> None:
        self.theirs = model.balance_channels
        self.spans = [
            slice(getattr(model, f"{name}_channel_start"), getattr(model, f"{name}_channel_end"))
            for name in ("charge", "spin")
        ]

    def __call__(self, x: Any, charge: Any, spin: Any, natoms: Any, batch: Any) -> Any:
        """Return nodes' rows whose channels have the charges, and the spins less one, as sums."""
        if divides_atoms() or _may_vary(charge) or _may_vary(spin):
            return self.theirs(x, charge, spin, natoms, batch)
        for span, target in zip(self.spans, (charge, spin - 1.0), strict=True):
            if span.start < span.stop:
                x = _of_rows(functools.partial(_balanced, span), x, target, natoms, batch)
        return x


class _Norm(torch.nn.Module):
    """fairchem's ``EquivariantRMSNormArraySphericalHarmonicsV2`` by torch's normalization.

    In the mean square each degree weighs as much as any other, whatever its number of rows. So rows
    are multiplied by the root of their weight before, and their weight is divided by it after.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.affine_weight, self.affine_bias = theirs.affine_weight, theirs.affine_bias
        self.eps = theirs.eps
        self.register_buffer("expand_index", theirs.expand_index, persistent=False)
        weights = theirs.balance_degree_weight
        self.register_buffer("balance_degree_weight", weights, persistent=False)

    def forward(self, node_input: Any) -> Any:
        """Return the normalized features."""
        with torch.autocast(node_input.device.type, enabled=False):
            # Kept roots would be those of the first dtype: fairchem makes models in float32, and
            # then moves them to float64.
            balance: Any = self.balance_degree_weight
            factors = (len(balance) * balance).sqrt()
            weight = self.affine_weight.index_select(0, self.expand_index) / factors
            x = _of_rows(_centred, node_input, None, factors)
            x = torch.nn.functional.rms_norm(x, weight.shape, weight, self.eps)
            return x + _first(self.affine_bias, len(weight))


def _norm(theirs: Any) -> Any:
    """Return a norm with the parameters of fairchem's, or theirs if it has no bias or weights."""
    parts = theirs.affine_bias, theirs.balance_degree_weight
    return theirs if any(part is None for part in parts) else _Norm(theirs)


class _Linear(torch.nn.Module):
    """fairchem's ``SO3_Linear``, whose bias is added by the products."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.weight, self.bias = theirs.weight, theirs.bias
        self.register_buffer("expand_index", theirs.expand_index, persistent=False)

    def forward(self, input_embedding: Any) -> Any:
        """Return the features of the next layer."""
        weight = self.weight.index_select(0, self.expand_index).mT
        bias = _first(self.bias, len(weight)).unsqueeze(1)
        found = torch.baddbmm(bias, input_embedding.transpose(0, 1), weight)
        return found.transpose(0, 1).contiguous()


class _Atomwise(torch.nn.Module):
    """fairchem's ``SpectralAtomwise``, whose gates are one product of all nodes' rows."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.scalar_mlp, self.act = theirs.scalar_mlp, theirs.act
        self.so3_linear_1, self.so3_linear_2 = theirs.so3_linear_1, theirs.so3_linear_2

    def forward(self, x: Any) -> Any:
        """Return the features of the next layer."""
        gates = self.scalar_mlp(x[:, 0])
        return self.so3_linear_2(self.act(gates, self.so3_linear_1(x)))


def _first(row: Any, count: int) -> Any:
    """Return a row and rows of zeros."""
    return torch.nn.functional.pad(row.unsqueeze(0), (0, 0, 0, count - 1))


class Gates(torch.nn.Module):
    """fairchem's ``GateActivation``, by `fusedops.gate_activation`."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.mmax = theirs.mmax
        self.layout: Layout = "m" if theirs.m_prime else "l"

    def forward(self, gating_scalars: Any, input_tensors: Any) -> Any:
        """Return the gated features."""
        gates = gating_scalars.flatten(1)
        return gate_activation(gates, input_tensors, mmax=self.mmax, layout=self.layout)


#: Functions that return ours for layers of fairchem's, by their class.
LAYERS: dict[str, Any] = {
    "SO2_Convolution": _convolution,
    "SO2_Conv1_WithRadialBlock": _convolution,
    "SO2_Conv2_InternalBlock": _convolution,
    "GateActivation": Gates,
    "RadialMLP": _Radial,
    "EquivariantRMSNormArraySphericalHarmonicsV2": _norm,
    "SO3_Linear": _Linear,
    "SpectralAtomwise": _Atomwise,
}


def replace_layers(model: Any, precision: str | None) -> None:
    """Put ours in the place of fairchem's layers in a model, but for layers with hooks."""
    # Layers within layers first.
    for parent in reversed(list(model.modules())):
        for name, theirs in list(parent.named_children()):
            ours = LAYERS.get(type(theirs).__name__)
            if ours is not None and not has_hooks(theirs):
                setattr(parent, name, made := ours(theirs))
                made.train(theirs.training)
                if hasattr(made, "precision"):
                    made.precision = precision
    # Before fairchem 2.18 each channel was balanced alone.
    if hasattr(model, "charge_channel_start"):
        model.balance_channels = _Balance(model)
