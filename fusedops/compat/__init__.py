"""Adapters that serve other programs with these ops, each a module named after its program."""
