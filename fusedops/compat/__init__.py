"""Adapters that serve other programs with these ops, each a module named after its program."""

from fusedops._swaps import swaps

__all__ = ["swaps"]
