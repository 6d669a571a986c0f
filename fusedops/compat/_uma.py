"""Layers for fairchem's UMA models: ours with the parameters of fairchem's, by fewer operations."""

from __future__ import annotations

import functools
import sys
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops._frame import registry
from fusedops._frame.arrays import allows_tf32
from fusedops._frame.bridge.modes import has_tangent
from fusedops._frame.check import traced
from fusedops._frame.torch_private import private
from fusedops._kept import formed, kept
from fusedops._layers import has_hooks, is_plain
from fusedops._networks import degree_norm, layer_silu, row_linear
from fusedops._products import linear_products
from fusedops.compat._halves import Radial, half_of, messages
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


def _by_kernels(x: Any) -> bool:
    """Return whether a GPU's own kernels serve a layer."""
    # Compilers can't ask which backend was asked for, and autocast normalizes in float32.
    return (
        not traced()
        and registry.triton_may_serve(x, registry.forced(None))
        and not torch.is_autocast_enabled("cuda")
    )


def _layer_silu(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Return SiLU of normalized rows."""
    if x.ndim == 2 and _by_kernels(x):
        return layer_silu(x, weight, bias, eps).out
    return torch.nn.functional.silu(
        torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    )


class _Radial(torch.nn.Module):
    """fairchem's ``RadialMLP``, by `linear_products` and normalizations with their activation."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.net = theirs.net

    def forward(self, inputs: Any) -> Any:
        """Return the radial functions."""
        between = [layer for layer in self.net if not isinstance(layer, torch.nn.Linear)]
        x, layers = inputs, iter(self.net)
        with linear_products(inputs):
            if has_hooks(self.net) or not all(map(is_plain, between)):
                return self.net(inputs)
            for layer in layers:
                if isinstance(layer, torch.nn.LayerNorm):
                    x = _layer_silu(x, layer.weight, layer.bias, layer.eps)
                    next(layers)
                else:
                    x = layer(x)
        return x


class _Radials(torch.nn.Module):
    """fairchem's ``UnifiedRadialMLP``, by the same."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        for name, buffer in theirs.named_buffers():
            self.register_buffer(name, buffer)
        self.num_layers, self.ln_eps = theirs.num_layers, theirs.ln_eps

    def forward(self, x: Any) -> Any:
        """Return the radial functions of every layer."""
        own: Any = self
        # Compilers can't ask for a stream.
        keeper = None if traced() else kept(x.device)
        last = own.fc3_weight, own.fc3_bias
        with linear_products(x):
            h = torch.nn.functional.linear(x, own.W1_cat, own.b1_cat)
            parts = enumerate(h.chunk(self.num_layers, 1))
            hidden = [self._hidden(part, i) for i, part in parts]
            if keeper is None or not keeper.halves:
                layers = zip(hidden, *last, strict=True)
                return [torch.nn.functional.linear(*layer) for layer in layers]
            return list(map(Radial, hidden, *[map(half_of, each) for each in last]))

    def _hidden(self, h: Any, i: int) -> Any:
        """Return the input of a layer's last product."""
        own: Any = self
        h = _layer_silu(h, own.ln1_weight[i], own.ln1_bias[i], self.ln_eps)
        h = torch.nn.functional.linear(h, own.fc2_weight[i], own.fc2_bias[i])
        return _layer_silu(h, own.ln2_weight[i], own.ln2_bias[i], self.ln_eps)


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
    y[:, 0].sub_(y[:, 0].mean(-1, keepdim=True))
    return y


def _balanced(span: slice, x: Any, target: Any, natoms: Any, batch: Any) -> Any:
    """Return nodes' rows (N, K, C) with sums over systems' atoms: the target, or zero.

    All numbers of a system change alike, those of the first row in a span of channels.
    """
    y = x.clone()
    scalars = y[:, 0, span]
    # Numbers of another dtype would be divided in float32.
    target = None if target is None else target.to(x.dtype)[:, None] / natoms[:, None]
    if len(natoms) == 1:
        # Columns without gaps are summed by many blocks of threads, and columns of rows by one.
        means, of = scalars.T.contiguous().mean(1), None
    else:
        none = scalars.new_zeros(len(natoms), scalars.shape[1])
        means, of = none.index_add(0, batch, scalars) / natoms[:, None], batch
    excess = means if target is None else means - target
    scalars.sub_(excess if of is None else excess.index_select(0, of))
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
    """fairchem's ``EquivariantRMSNormArraySphericalHarmonicsV2``, by a kernel or torch's.

    In the mean square each degree weighs as much as any other, whatever its number of rows. So for
    torch's, rows are multiplied by the root of their weight before, and their weight is divided by
    it after.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.affine_weight, self.affine_bias = theirs.affine_weight, theirs.affine_bias
        self.eps = theirs.eps
        self.register_buffer("expand_index", theirs.expand_index, persistent=False)
        weights = theirs.balance_degree_weight
        self.register_buffer("balance_degree_weight", weights, persistent=False)

    def forward(self, node_input: Any, more: Any = None) -> Any:
        """Return the normalized features, with `more` added to the first row."""
        balance: Any = self.balance_degree_weight
        if _by_kernels(node_input):
            affine, lmax = (self.affine_weight, self.affine_bias), len(self.affine_weight) - 1
            return degree_norm(node_input, *affine, more, balance.flatten(), lmax, self.eps).out
        with torch.autocast(node_input.device.type, enabled=False):
            # Kept roots would be those of the first dtype: fairchem makes models in float32, and
            # then moves them to float64.
            factors = (len(balance) * balance).sqrt()
            weight = self.affine_weight.index_select(0, self.expand_index) / factors
            x = _of_rows(_centred, node_input, None, factors)
            x = torch.nn.functional.rms_norm(x, weight.shape, weight, self.eps)
            x = x + _first(self.affine_bias, len(weight))
        return x if more is None else torch.cat([x[:, :1] + more.unsqueeze(1), x[:, 1:]], 1)


def _norm(theirs: Any) -> Any:
    """Return a norm with the parameters of fairchem's, or theirs if it has no bias or weights."""
    parts = theirs.affine_bias, theirs.balance_degree_weight
    return theirs if any(part is None for part in parts) else _Norm(theirs)


class _Block(torch.nn.Module):
    """fairchem's ``eSCNMD_Block``, whose first normalization adds the embedding of systems."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.norm_1, self.edge_wise = theirs.norm_1, theirs.edge_wise
        self.norm_2, self.atom_wise = theirs.norm_2, theirs.atom_wise

    def forward(
        self,
        x: Any,
        x_edge: Any,
        edge_index: Any,
        wigner: Any,
        wigner_inv_envelope: Any,
        total_atoms_across_gp_ranks: Any,
        sys_node_embedding: Any = None,
        **more: Any,
    ) -> Any:
        """Return the features of nodes after messages and the nodes' own network."""
        normed = self.norm_1(x, sys_node_embedding)
        edges = x_edge, edge_index, wigner, wigner_inv_envelope
        if isinstance(x_edge, Radial):
            x = x + messages(self.edge_wise, normed, *edges, more["scatter_target"])
        else:
            x = x + self.edge_wise(normed, *edges, total_atoms_across_gp_ranks, **more)
        return x + self.atom_wise(self.norm_2(x))


def _block(theirs: Any) -> Any:
    """Return a block of fairchem's layers, or theirs if its first norm isn't ours."""
    return _Block(theirs) if isinstance(theirs.norm_1, _Norm) else theirs


class _Linear(torch.nn.Module):
    """fairchem's ``SO3_Linear``, whose products have the rows of nodes where they lie on a GPU."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.weight, self.bias = theirs.weight, theirs.bias
        self.register_buffer("expand_index", theirs.expand_index, persistent=False)

    def with_gates(self, x: Any, layer: Any = None) -> Any:
        """Return the features of the next layer, and the gates by a layer of the first row."""
        of: Any = self.expand_index

        def make(into: Any) -> Any:
            return torch.index_select(self.weight, 0, of, out=into)

        rows = formed(self.weight, "rows", make)
        gated = (None, None) if layer is None else (layer.weight, layer.bias)
        return row_linear(x, rows, self.bias, *gated)

    def forward(self, input_embedding: Any) -> Any:
        """Return the features of the next layer."""
        if _by_kernels(input_embedding):
            return self.with_gates(input_embedding).out
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
        first, layers = self.so3_linear_1, self.scalar_mlp
        # A mixture of experts may have its weights in the gates' layer, too.
        if (
            isinstance(first, _Linear)
            and _by_kernels(x)
            and is_plain(layers[0])
            and not has_hooks(layers)
            and not has_hooks(first)
        ):
            h, gates = first.with_gates(x, layers[0])
            return self.so3_linear_2(self.act(layers[1:](gates), h))
        return self.so3_linear_2(self.act(layers(x[:, 0]), first(x)))


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
    "UnifiedRadialMLP": _Radials,
    "EquivariantRMSNormArraySphericalHarmonicsV2": _norm,
    "SO3_Linear": _Linear,
    "SpectralAtomwise": _Atomwise,
    "eSCNMD_Block": _block,
}


def has_our_parts(edgewise: Any) -> bool:
    """Return whether all parts of fairchem's layer are ours, with radial functions given to it."""
    parts = edgewise.so2_conv_1, edgewise.so2_conv_2
    return (
        isinstance(edgewise.act, Gates)
        and all([isinstance(part, Convolution) for part in parts])
        and parts[0].rad_func is None
    )


def has_halves(backbone: Any) -> bool:
    """Return whether messages of a prepared model, whose products may be TF32's, may be halves."""
    blocks = getattr(backbone, "blocks", ())
    layers = [block.edge_wise for block in blocks if isinstance(block, _Block)]
    if len(layers) < len(blocks) or not all(map(has_our_parts, layers)):
        return False
    parts = [part for of in layers for part in (of.so2_conv_1, of.so2_conv_2)]
    linear = [each for of in parts for each in (of.fc_m0, *[part["fc"] for part in of.so2_m_conv])]
    # Their weights alone are read, and their hooks aren't called.
    alone = [*layers, *parts, *[layer.act for layer in layers]]
    return (
        isinstance(getattr(backbone, "_unified_radial_mlp", None), _Radials)
        and getattr(backbone.backend, "supports_fused_edgewise", False)
        and all(map(is_plain, linear))
        and not any(map(has_hooks, alone))
        and _multiply_in(parts) == {"tf32"}
        and not torch.is_autocast_enabled("cuda")
    )


def has_splits(backbone: Any) -> bool:
    """Return whether products of a model's convolutions are float32's."""
    parts = [part for part in backbone.modules() if isinstance(part, Convolution)]
    return _multiply_in(parts) == {"float32"}


def _multiply_in(parts: list[Any]) -> set[str]:
    """Return the precisions of convolutions' products."""
    default = "tf32" if allows_tf32() else "float32"
    return {part.precision or default for part in parts}


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
