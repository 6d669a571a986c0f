"""Arguments that nothing should take: the error names them, and nothing has changed."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import fusedops
from fusedops import wigner

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch


def ones(*shape):
    return np.ones(shape)


WA, WBWC = np.zeros((2, 1), np.int64), np.zeros((2, 1, 3), np.int64)
EDGES = np.zeros((2, 2), np.int64)
GROUPS = [(np.array([[0, 1, 2, 3]]), np.array([0.1]))]
CELL = np.diag([5.0, 6.0, 7.0])
ATOMS = {
    "xyz": ones(2, 3),
    "b": 20 * ones(2),
    "occupancy": ones(2),
    "amplitudes": ones(2, 1),
    "widths": ones(2, 1),
}
EDGE = {"edge_index": EDGES, "num_nodes": 3}
WEIGHTS = {
    "norm_in_weight": ones(2),
    "norm_in_bias": ones(2),
    "p_in_weight": ones(6, 2),
    "p_in_bias": ones(6),
    "g_in_weight": ones(6, 2),
    "g_in_bias": ones(6),
    "norm_out_weight": ones(3),
    "norm_out_bias": ones(3),
    "p_out_weight": ones(2, 3),
    "p_out_bias": ones(2),
    "g_out_weight": ones(2, 2),
    "g_out_bias": ones(2),
}

#: Arguments that are right, of all that is public.
RIGHT = {
    fusedops.Edges: EDGE,
    fusedops.Lattice: {"cell": CELL, "grid_shape": (4, 4, 4)},
    fusedops.Planes: {"plane_groups": GROUPS, "num_atoms": 4},
    fusedops.ScatterPlan: {"wa": WA, "wbwc": WBWC, "map_size": 2, "copy": False},
    fusedops.Sequences: {"cu_seqlens": np.array([0, 2, 4]), "num_tokens": 4},
    fusedops.structured_scatter_add: {
        "density_cube": ones(2, 1, 1, 3),
        "wa": WA,
        "wbwc": WBWC,
        "map_size": 2,
        "out": ones(2),
    },
    fusedops.structured_gather: {
        "grid": ones(2),
        "wa": WA,
        "wbwc": WBWC,
        "out": ones(2, 1, 1, 3),
    },
    fusedops.dynamic_conv: {
        "x": ones(1, 4, 2),
        "kernels": ones(1, 4, 2, 3),
        "bias": ones(2),
        "initial_state": ones(1, 2, 3),
        "output_final_state": True,
        "cu_seqlens": np.array([0, 4]),
        "activation": "silu",
        "out": ones(1, 4, 2),
    },
    fusedops.dynamic_conv_step: {
        "x": ones(1, 2),
        "state": ones(1, 2, 3),
        "kernels": ones(2, 3),
        "bias": ones(2),
        "activation": "silu",
        "out": ones(1, 2),
    },
    fusedops.node_to_edge_wigner_permute: {
        "x": ones(3, 4, 2),
        "edge_index": EDGES,
        "wigner": ones(2, 4, 4),
        "mmax": 1,
        "out": ones(2, 4, 4),
    },
    fusedops.permute_wigner_inv_edge_to_node: {
        "message": ones(2, 4, 2),
        "wigner_inv": ones(2, 10),
        "mmax": 1,
        "transpose": False,
        "out": ones(3, 4, 2),
        **EDGE,
    },
    fusedops.permute_wigner_inv: {
        "message": ones(2, 4, 2),
        "wigner_inv": ones(2, 10),
        "mmax": 1,
        "transpose": False,
        "out": ones(2, 4, 2),
    },
    fusedops.edge_degree_scatter: {
        "x": ones(3, 4, 2),
        "radial": ones(2, 2, 2),
        "edge_index": EDGES,
        "wigner_inv": ones(2, 4, 4),
        "rescale_factor": 2.0,
        "transpose": False,
        "out": ones(3, 4, 2),
    },
    fusedops.gaussian_density: {
        **ATOMS,
        "cell": CELL,
        "grid_shape": (4, 4, 4),
        "radius": ones(2),
        "n_sigma": 4.0,
        "on_bad": "raise",
        "out": ones(4, 4, 4),
    },
    fusedops.planarity_nll: {"xyz": ones(4, 3), "plane_groups": GROUPS, "fit": "uniform"},
    fusedops.plane_deviations: {"xyz": ones(4, 3), "plane_groups": GROUPS, "fit": "uniform"},
    fusedops.triangle_multiplicative_update: {
        "x": ones(1, 3, 3, 2),
        "direction": "outgoing",
        "mask": ones(1, 3, 3),
        **WEIGHTS,
        "eps": 1e-5,
        "precision": None,
        "gate": "output",
        "max_memory": None,
        "out": ones(1, 3, 3, 2),
    },
    fusedops.use_backend: {"name": "numpy"},
    wigner.m_major_order: {"lmax": 2, "mmax": 1},
    wigner.wigner_d: {"edge_vec": ones(2, 3), "lmax": 1, "packed": True, "out": ones(2, 10)},
}
FRAMEWORKS = ("numpy", "torch") if HAS_TORCH else ("numpy",)
OPS = [function for function in RIGHT if hasattr(function, "explain")]

SHARING = [
    (op, name)
    for op in OPS
    for name, value in RIGHT[op].items()
    if "out" in RIGHT[op] and isinstance(value, np.ndarray) and name != "out"
]


def of_one_memory(*arrays):
    """Return memory, and arrays of elements of eight bytes like others that all begin in it."""
    memory = np.zeros(max(array.size for array in arrays))
    return memory, *(memory[: a.size].view(a.dtype).reshape(a.shape) for a in arrays)


@pytest.mark.parametrize("index", FRAMEWORKS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("op", "name"), SHARING, ids=[f"{op.__name__}-{n}" for op, n in SHARING])
def test_out_shares_memory_with_no_argument(op, name, framework, index):
    given = dict(RIGHT[op])
    memory, given[name], given["out"] = of_one_memory(given[name], given["out"])
    given[name][...] = RIGHT[op][name]
    before = memory.copy()
    for key, value in given.items():
        if isinstance(value, np.ndarray):
            kind = framework if value.dtype == np.float64 else index
            given[key] = torch.from_numpy(value) if kind == "torch" else value
    with pytest.raises(ValueError, match=f"{op.__name__}: out shares memory with {name};"):
        op(**given)
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("name", ["wa", "wbwc"])
@pytest.mark.parametrize("make", [fusedops.ScatterPlan, memoryview], ids=lambda make: make.__name__)
def test_out_shares_memory_with_no_view_that_a_plan_has(make, name):
    given = {"wa": WA, "wbwc": WBWC}
    out = ones(2)
    memory, given[name], out = of_one_memory(given[name], out)
    if make is memoryview:
        where = {key: memoryview(array) for key, array in given.items()} | {"map_size": 2}
        named = name
    else:
        where = {"wa": fusedops.ScatterPlan(**given, map_size=2, copy=False)}
        named = "wa"
    with pytest.raises(ValueError, match=f"out shares memory with {named};"):
        fusedops.structured_scatter_add(ones(2, 1, 1, 3), **where, out=out)
    assert not memory.any()
    apart = fusedops.ScatterPlan(**given, map_size=2)
    fusedops.structured_scatter_add(ones(2, 1, 1, 3), apart, out=out)
    assert out.tolist() == [6, 0]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["x", "kernels", "bias"])
def test_a_state_shares_memory_with_no_argument(name, framework):
    given = {**RIGHT[fusedops.dynamic_conv_step], "out": None}
    memory, given[name], given["state"] = of_one_memory(given[name], given["state"])
    given = {
        key: torch.from_numpy(value) if framework == "torch" and hasattr(value, "dtype") else value
        for key, value in given.items()
    }
    with pytest.raises(ValueError, match=f"dynamic_conv_step: {name} shares memory with state;"):
        fusedops.dynamic_conv_step(**given)
    assert not memory.any()
