"""Benchmarks: every op and whole steps beside their peers and the floors of the machine."""
