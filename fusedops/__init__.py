"""Fused, differentiable operations for structures, potentials, folding and linear attention."""

from fusedops._frame.registry import BackendName, BackendUnavailable, use_backend
from fusedops._host.memory import release_memory
from fusedops._host.threads import get_num_threads
from fusedops._info import explain, info, set_num_threads
from fusedops._version import __version__ as __version__
from fusedops.attention import triangle_attention
from fusedops.conv import Sequences, dynamic_conv, dynamic_conv_step
from fusedops.delta import gated_delta_rule, gated_delta_rule_step
from fusedops.density import Lattice, gaussian_density
from fusedops.generated import dynamic_conv_generated
from fusedops.geometry import Restraints, geometry_nll
from fusedops.planarity import Planes, planarity_nll, plane_deviations
from fusedops.scatter import ScatterPlan, structured_gather, structured_scatter_add
from fusedops.so2 import gate_activation, so2_convolution
from fusedops.trimul import triangle_multiplicative_update
from fusedops.wigner import (
    Edges,
    edge_degree_scatter,
    node_to_edge_wigner_permute,
    permute_wigner_inv,
    permute_wigner_inv_edge_to_node,
)

__all__ = [
    "BackendName",
    "BackendUnavailable",
    "Edges",
    "Lattice",
    "Planes",
    "Restraints",
    "ScatterPlan",
    "Sequences",
    "dynamic_conv",
    "dynamic_conv_generated",
    "dynamic_conv_step",
    "edge_degree_scatter",
    "explain",
    "gate_activation",
    "gated_delta_rule",
    "gated_delta_rule_step",
    "gaussian_density",
    "geometry_nll",
    "get_num_threads",
    "info",
    "node_to_edge_wigner_permute",
    "permute_wigner_inv",
    "permute_wigner_inv_edge_to_node",
    "planarity_nll",
    "plane_deviations",
    "release_memory",
    "set_num_threads",
    "so2_convolution",
    "structured_gather",
    "structured_scatter_add",
    "triangle_attention",
    "triangle_multiplicative_update",
    "use_backend",
]
