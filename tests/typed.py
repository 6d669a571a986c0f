"""Calls as a user's type checker sees them; mypy reads this in `make lint`, nothing runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from typing_extensions import assert_type

import fusedops
from fusedops.crystal import Reflections, structure_factors, symmetrize
from fusedops.density import CellLike
from fusedops.nn import DynamicShortConvolution, PairBlock, TriangleAttention
from fusedops.wigner import wigner_d


def numpy_in_numpy_out(a: np.ndarray, groups: list[tuple[Any, Any]]) -> None:
    assert_type(fusedops.planarity_nll(a, groups), np.floating[Any])
    assert_type(fusedops.dynamic_conv(a, a, activation="silu"), np.ndarray)
    assert_type(fusedops.dynamic_conv(a, a, output_final_state=True), tuple[np.ndarray, np.ndarray])
    assert_type(fusedops.gaussian_density(a, a, a, a, a, a, (4, 4, 4), radius=3.0), np.ndarray)
    assert_type(structure_factors(symmetrize(a, [a]), a, a, blur=5.0), np.ndarray)
    assert_type(symmetrize.vjp(a, [a])[1](a), tuple[np.ndarray, ...])
    assert_type(wigner_d(a, 2, packed=True), np.ndarray)
    assert_type(fusedops.so2_convolution(a, a, a, bias=a), np.ndarray)
    assert_type(fusedops.gate_activation(a, a, layout="l"), np.ndarray)
    assert_type(fusedops.planarity_nll.vjp(a, groups)[1](1.0), tuple[np.ndarray, ...])
    assert_type(fusedops.planarity_nll.explain(a, groups).backend, fusedops.BackendName | None)
    assert_type(
        fusedops.explain(fusedops.planarity_nll, a, groups).backend, fusedops.BackendName | None
    )


def torch_in_torch_out(t: torch.Tensor, edges: fusedops.Edges, planes: fusedops.Planes) -> None:
    assert_type(planes.to("cuda"), fusedops.Planes)
    assert_type(fusedops.planarity_nll(xyz=t, plane_groups=planes, backend="torch"), torch.Tensor)
    assert_type(structure_factors(symmetrize(t, []), t, t), torch.Tensor)
    assert_type(fusedops.dynamic_conv(t, t), torch.Tensor)
    generated = fusedops.dynamic_conv_generated(t, t, t, conv_bias=t, output_final_state=True)
    assert_type(generated, tuple[torch.Tensor, torch.Tensor])
    assert_type(fusedops.gated_delta_rule(t, t, t, t, t, scale=1.0), torch.Tensor)
    assert_type(fusedops.so2_convolution(t, t, weight_m1=t), torch.Tensor)
    assert_type(fusedops.node_to_edge_wigner_permute(t, edges, t, mmax=1), torch.Tensor)
    assert_type(fusedops.triangle_multiplicative_update(x=t, mask=t, out=t), torch.Tensor)


def a_cell_is_of_any_kind(a: np.ndarray, t: torch.Tensor, lattice: fusedops.Lattice) -> None:
    cells: list[CellLike] = [a, t, a.tolist(), [[9.0, 0.0, 0.0], [0.0, 8.0, 0.0], [0.0, 0.0, 7.0]]]
    for cell in cells:
        assert_type(fusedops.gaussian_density(a, a, a, a, a, cell, (4, 4, 4)), np.ndarray)
        assert_type(structure_factors(t, a, cell), torch.Tensor)
        fusedops.Lattice(cell, (4, 4, 4))
        Reflections(a, cell, (4, 4, 4))
    fusedops.gaussian_density(a, a, a, a, a, lattice)


def options_have_names() -> None:
    DynamicShortConvolution(8, 4, generator_activation="gelu_new", backend="triton")
    DynamicShortConvolution(8, 4, generator_activation="geglu")  # type: ignore[arg-type]
    TriangleAttention(8, attention="cuequivariance")
    TriangleAttention(8, attention="flash")  # type: ignore[arg-type]
    PairBlock(8, attention="flash")  # type: ignore[arg-type]


def options_of_ops_have_types(a: np.ndarray) -> None:
    fusedops.dynamic_conv(a, a, activation="gelu")  # type: ignore[call-overload]
    fusedops.gated_delta_rule(a, a, a, a, a, activation="silu")  # type: ignore[call-overload]
    PairBlock(8, backend="cuda")  # type: ignore[arg-type]
    fusedops.use_backend("cuda")  # type: ignore[arg-type]


def what_is_wrong_is_seen(a: np.ndarray, t: torch.Tensor, planes: fusedops.Planes) -> None:
    fusedops.structured_gather(a, t)  # type: ignore[type-var]
    fusedops.dynamic_conv_step(t, t, t, activations="silu")  # type: ignore[call-arg]
    fusedops.dynamic_conv_step(t, t, t, activation="gelu")  # type: ignore[arg-type]
    fusedops.triangle_multiplicative_update(t, "outwards", t)  # type: ignore[arg-type]
    fusedops.gaussian_density(a, a, a, a, a, a, (4, 4, 4), on_bad="drop")  # type: ignore[arg-type]
    fusedops.gate_activation(a, a, layout="l", backend="cuda")  # type: ignore[arg-type]
    fusedops.Lattice({"a": 9.0}, (4, 4, 4))  # type: ignore[arg-type]
    structure_factors(a, a, {"a": 9.0})  # type: ignore[arg-type]
    fusedops.explain("planarity_nll", a, planes)  # type: ignore[arg-type]
    fusedops.planarity_nll(a, planes, out=a)  # type: ignore[call-overload]
