"""Rotations of node features into the frames of edges, and back, with sums over a node's edges."""

from fusedops.harmonics import wigner_d, wigner_d_of
from fusedops.wigner.op import (
    edge_degree_scatter,
    node_to_edge_wigner_permute,
    permute_wigner_inv,
    permute_wigner_inv_edge_to_node,
)
from fusedops.wigner.plan import Edges
from fusedops.wigner.rows import m_major_order

__all__ = [
    "Edges",
    "edge_degree_scatter",
    "m_major_order",
    "node_to_edge_wigner_permute",
    "permute_wigner_inv",
    "permute_wigner_inv_edge_to_node",
    "wigner_d",
    "wigner_d_of",
]
