"""Formulas of the papers, by calls of a module's layers, and the modules of other programs."""

from __future__ import annotations

import math

import torch
from torch.nn import LayerNorm, Linear
from torch.nn.functional import silu


def randomized(module):
    """Return the module in float64, with random parameters."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.double()


def gradients(y, *inputs):
    cotangent = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)
    return torch.autograd.grad((y * cotangent).sum(), inputs)


def update(self, x, mask=None):
    """Return the triangle multiplicative update of `fusedops.nn`'s layers."""
    n = self.norm_in(x)
    sides = self.p_in(n) * torch.sigmoid(self.g_in(n))
    sides = sides if mask is None else sides * mask[..., None]
    left, right = sides.chunk(2, -1)
    if self.direction == "incoming":
        left, right = left.transpose(-2, -3), right.transpose(-2, -3)
    o = self.norm_out((left.unsqueeze(-3) * right.unsqueeze(-4)).sum(-2))
    gate = torch.sigmoid(self.g_out(n))
    return self.p_out(o) * gate if self.gate == "output" else self.p_out(o * gate)


def attention(self, x, mask=None):
    """Return triangle attention: algorithms 13 and 14 of AlphaFold 2."""
    if not self.starting:
        x, mask = x.transpose(-2, -3), None if mask is None else mask.transpose(-1, -2)
    n, mha = self.layer_norm(x), self.mha
    q, k, v, g = (
        getattr(mha, f"linear_{name}")(n).unflatten(-1, (self.no_heads, -1)) for name in "qkvg"
    )
    logits = torch.einsum("...ijhd,...ikhd->...ihjk", q, k) / math.sqrt(self.c_hidden)
    logits = logits + self.linear(n).movedim(-1, -3).unsqueeze(-4)
    if mask is not None:
        # Of a row without edges this leaves the mean of all values.
        logits = logits.masked_fill(mask[..., None, None, :] == 0, -1e9)
    o = torch.einsum("...ihjk,...ikhd->...ijhd", logits.softmax(-1), v) * g.sigmoid()
    out = mha.linear_o(o.flatten(-2))
    return out if self.starting else out.transpose(-2, -3)


def transition(self, x, mask=None):
    n = self.norm(x)
    return self.fc3(silu(self.fc1(n)) * self.fc2(n))


class OfBoltz(torch.nn.Module):
    """Boltz's eager update. Other programs have other names for its layers, or two for one."""

    layers = ("norm_in",), ("p_in",), ("g_in",), ("norm_out",), ("p_out",), ("g_out",)
    outgoing, incoming = "bikd,bjkd", "bkid,bkjd"
    gate, bias = "output", False

    def __init__(self, C, H, direction):
        super().__init__()
        self.direction = direction
        inputs, outputs = (C, C, C, H, H, C), (C, 2 * H, 2 * H, H, C, C)
        outputs = outputs if self.gate == "output" else (*outputs[:5], H)
        for names, n, m in zip(self.layers, inputs, outputs, strict=True):
            for name in names:
                layer = LayerNorm(n) if "norm" in name else Linear(n, m // len(names), self.bias)
                self.add_module(name, layer)

    def forward(self, x, mask):
        def call(names, x):
            return torch.cat([getattr(self, name)(x) for name in names], -1)

        norm_in, p_in, g_in, norm_out, p_out, g_out = self.layers
        n = call(norm_in, x)
        sides = call(p_in, n) * call(g_in, n).sigmoid() * mask.unsqueeze(-1)
        terms = f"{getattr(self, self.direction)}->bijd"
        o = call(norm_out, torch.einsum(terms, *sides.chunk(2, -1)))
        gate = call(g_out, n).sigmoid()
        return call(p_out, o) * gate if self.gate == "output" else call(p_out, o * gate)


class OfOpenFold(OfBoltz):
    layers = (
        *(("layer_norm_in",), ("linear_a_p", "linear_b_p"), ("linear_a_g", "linear_b_g")),
        *(("layer_norm_out",), ("linear_z",), ("linear_g",)),
    )
    bias = True


class OfMultimer(OfOpenFold):
    """OpenFold's update for AlphaFold-Multimer."""

    layers = ("layer_norm_in",), ("linear_ab_p",), ("linear_ab_g",), *OfOpenFold.layers[3:]


class OfGpuMode(OfBoltz):
    """The gpu-mode problem's update, and triangle-multiplicative-module's for incoming edges."""

    layers = (
        *(("norm",), ("left_proj", "right_proj"), ("left_gate", "right_gate")),
        *(("to_out_norm",), ("to_out",), ("out_gate",)),
    )
    incoming = "bkjd,bkid"
    gate = "hidden"


class WithBiases(OfGpuMode):
    """triangle-multiplicative-module's update."""

    bias = True


PROGRAMS = OfBoltz, OfOpenFold, OfMultimer, OfGpuMode, WithBiases


def update_of(program, direction="outgoing", sizes=(6, 5)):
    """Return another program's update with random parameters, z and a mask."""
    other = randomized(program(*sizes, direction))
    x = torch.randn(2, 7, 7, sizes[0], dtype=torch.float64, requires_grad=True)
    return other, x, (torch.rand(2, 7, 7) > 0.2).double()
