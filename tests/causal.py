"""The causal convolution of programs of the day: torch's conv1d in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def random(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def reference(x, weight, bias=None, before=None, activation=None):
    """Return conv1d (B, D, T) in float64, with the inputs `before` or zeros before the first."""
    x, weight = x.double(), weight.double()
    before = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if before is None else before.double()
    bias = None if bias is None else bias.double()
    inputs = torch.cat([before, x], -1)
    h = torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=len(weight))
    return h if activation is None else torch.nn.functional.silu(h)
