"""Activations that kernels of several files use."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(h):
    """Return h σ(h): 0 where h has overflowed to -∞."""
    return tl.where(h == -float("inf"), 0.0, h / (1 + tl.exp(-h)))


@triton.jit
def silu_slope(h):
    """Return the derivative of h σ(h): its limits where h has overflowed."""
    s = 1 / (1 + tl.exp(-h))
    return tl.where(tl.abs(h) == float("inf"), s, s * (1 + h * (1 - s)))
