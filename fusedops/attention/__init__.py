"""Attention along the rows of a pair representation."""

from fusedops.attention.op import triangle_attention

__all__ = ["triangle_attention"]
