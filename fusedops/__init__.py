"""Fused, differentiable operations for structures, potentials, folding and linear attention."""

from cpukern.threads import get_num_threads, set_num_threads
from fusedops._info import info
from fusedops._registry import BackendUnavailable, use_backend
from fusedops.conv import Sequences, dynamic_conv, dynamic_conv_step
from fusedops.planarity import Planes, planarity_nll, plane_deviations

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "Planes",
    "Sequences",
    "dynamic_conv",
    "dynamic_conv_step",
    "get_num_threads",
    "info",
    "planarity_nll",
    "plane_deviations",
    "set_num_threads",
    "use_backend",
]
