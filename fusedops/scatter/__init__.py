"""Structured scatter and gather between cubes around atoms and one map."""

from fusedops.scatter.op import structured_gather, structured_scatter_add
from fusedops.scatter.plan import ScatterPlan

__all__ = [
    "ScatterPlan",
    "structured_gather",
    "structured_scatter_add",
]
