"""Loads of atoms by indices, which kernels of several files use."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def coordinates(xyz, i, inside, row_stride, column_stride, missing):
    """Load x, y, z of atoms i in float64, and a number for atoms that don't exist."""
    at = xyz + i.to(tl.int64) * row_stride
    x = tl.load(at, mask=inside, other=missing).to(tl.float64)
    y = tl.load(at + column_stride, mask=inside, other=missing).to(tl.float64)
    z = tl.load(at + 2 * column_stride, mask=inside, other=missing).to(tl.float64)
    return x, y, z


@triton.jit
def atom(index, entry, there, atoms):
    """Load the atoms of entries, and whether they exist."""
    i = tl.load(index + entry, mask=there, other=0)
    return i, there & (i >= 0) & (i < atoms)
