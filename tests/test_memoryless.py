"""Tensors without memory of their own reach no kernel: a TypeError names the argument."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from fusedops.wigner import wigner_d  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Make a process group of this one process."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch is built without torch.distributed")
    store = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def distributed(tensor):
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh(tensor.device.type, (1,))
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def fake(tensor):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def escaped(tensor):
    """Return the tensor from inside a transform that has ended."""
    found = []
    if tensor.is_floating_point():
        torch.func.grad(lambda x: found.append(x) or x.sum())(tensor)
    else:
        torch.vmap(lambda x: found.append(x) or x)(tensor[None])
    return found[0]


def nested(tensor):
    return torch.nested.nested_tensor([tensor, tensor])


def jagged(tensor):
    rows = tensor.reshape(-1, 1)
    return torch.nested.nested_tensor([rows, rows], layout=torch.jagged)


def masked(tensor):
    return torch.masked.masked_tensor(tensor, torch.ones_like(tensor, dtype=torch.bool))


# Functions that make such a tensor of a plain one, and the error's advice.
KINDS = {
    "dtensor": (distributed, r"{name}\.to_local\(\)"),
    "fake": (fake, "outside of FakeTensorMode"),
    "escaped": (escaped, "a result of it"),
    "nested": (nested, "a dense tensor"),
    "jagged": (jagged, r"{name}\.to_padded_tensor\(0\)"),
    "sparse": (lambda tensor: tensor.to_sparse(), r"{name}\.to_dense\(\)"),
    "masked": (masked, r"{name}\.to_tensor\(0\)"),
    "lazy": (
        lambda tensor: torch.nn.parameter.UninitializedParameter(device=tensor.device),
        "initialized",
    ),
    "meta": (lambda tensor: tensor.to("meta"), "meta"),
}
OF_FLOATS = {
    "quantized": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "a dense tensor")
}


def calls(device):
    """Return a function of every op and class, and its tensors by argument."""

    def floats(*shape):
        return torch.ones(shape, device=device)

    def integers(*shape):
        return torch.zeros(shape, dtype=torch.int64, device=device)

    lattice = fusedops.Lattice(9 * np.eye(3), (4, 4, 4)).to(device)
    triangle = {"norm_in_weight": floats(2), "norm_in_bias": floats(2)}
    triangle |= {name: floats(4, 2) for name in ("p_in_weight", "g_in_weight")}
    triangle |= {"norm_out_weight": floats(2), "norm_out_bias": floats(2)}
    triangle |= {name: floats(2, 2) for name in ("p_out_weight", "g_out_weight")}
    kernels = {"x": floats(1, 5, 3), "kernels": floats(3, 4)}
    matrices = floats(2, 4, 4)
    return {
        "dynamic_conv": (
            fusedops.dynamic_conv,
            {
                **kernels,
                "bias": floats(3),
                "initial_state": floats(1, 3, 4),
                "cu_seqlens": torch.tensor([0, 5], device=device),
            },
        ),
        "dynamic_conv_step": (
            fusedops.dynamic_conv_step,
            {"x": floats(1, 3), "state": floats(1, 3, 4), "kernels": floats(3, 4)},
        ),
        "planarity_nll": (
            lambda xyz, groups: fusedops.planarity_nll(xyz, [groups]),
            {"xyz": floats(4, 3)},
        ),
        "node_to_edge_wigner_permute": (
            fusedops.node_to_edge_wigner_permute,
            {"x": floats(3, 4, 1), "edge_index": integers(2, 2), "wigner": matrices},
        ),
        "permute_wigner_inv": (
            fusedops.permute_wigner_inv,
            {"message": floats(2, 4, 1), "wigner_inv": matrices},
        ),
        "wigner_d": (lambda edge_vec: wigner_d(edge_vec, 1), {"edge_vec": floats(2, 3)}),
        "so2_convolution": (
            fusedops.so2_convolution,
            {
                "message": floats(2, 4, 1),
                "weight_m0": floats(2, 2),
                "weight_m1": floats(2, 1),
                "bias": floats(2),
                "radial": floats(2, 3),
            },
        ),
        "gate_activation": (
            fusedops.gate_activation,
            {"gates": floats(2, 1), "x": floats(2, 4, 1)},
        ),
        "structured_scatter_add": (
            lambda **k: fusedops.structured_scatter_add(**k, map_size=4),
            {"density_cube": floats(1, 1, 1, 2), "wa": integers(1, 1), "wbwc": integers(1, 1, 2)},
        ),
        "gaussian_density": (
            lambda **k: fusedops.gaussian_density(**k, cell=lattice, on_bad="skip"),
            {
                "xyz": floats(2, 3),
                "b": floats(2),
                "occupancy": floats(2),
                "amplitudes": floats(2, 1),
                "widths": floats(2, 1),
                "radius": floats(2),
            },
        ),
        "triangle_multiplicative_update": (
            lambda **k: fusedops.triangle_multiplicative_update(**k),
            {"x": floats(1, 3, 3, 2), "mask": floats(1, 3, 3), **triangle},
        ),
        "Edges": (lambda edge_index: fusedops.Edges(edge_index, 2), {"edge_index": integers(2, 2)}),
        "Sequences": (fusedops.Sequences, {"cu_seqlens": integers(2)}),
        "ScatterPlan": (
            lambda **k: fusedops.ScatterPlan(**k, map_size=4),
            {"wa": integers(1, 1), "wbwc": integers(1, 1, 2)},
        ),
        "Planes": (
            lambda indices, sigmas: fusedops.Planes([(indices, sigmas)]),
            {"indices": integers(1, 3), "sigmas": floats(1)},
        ),
        "Lattice": (lambda cell: fusedops.Lattice(cell, (2, 2, 2)), {"cell": floats(3, 3)}),
    }


ARGUMENTS = [(op, name) for op, (_, tensors) in calls("cpu").items() for name in tensors]


@pytest.mark.filterwarnings("ignore:.*quantize|.*nested tensor|.*MaskedTensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, *OF_FLOATS])
@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_it_is_refused(op, name, kind, device, group):
    function, tensors = calls(device)[op]
    if op == "planarity_nll":
        tensors["groups"] = (torch.tensor([[0, 1, 2]], device=device), [0.1])
    make, advice = {**KINDS, **OF_FLOATS}[kind]
    if (op, name, kind) == ("triangle_multiplicative_update", "x", "dtensor"):
        pytest.skip("it is served")
    if kind in OF_FLOATS and not tensors[name].is_floating_point():
        pytest.skip("of floats alone")
    if kind == "meta" and len(tensors) == 1 and op not in ("Edges", "Sequences", "Lattice"):
        pytest.skip("its result is on meta, too")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors[name] = make(tensors[name])
    if kind == "meta":
        # The error may name either tensor of a pair on different devices.
        refused = pytest.raises((TypeError, ValueError), match=f"^{op}: .* on meta")
    else:
        should = advice.format(name=name)
        refused = pytest.raises(TypeError, match=rf"^{op}: .*\b{name}\b.* is .*{should}")
    with refused:
        function(**tensors)


def test_all_of_it_on_meta_has_a_shape():
    """Calls all on meta compute nothing, and so need no memory."""
    x, kernels = torch.ones(1, 5, 3, device="meta"), torch.ones(3, 4, device="meta")
    out = fusedops.dynamic_conv(x, kernels)
    assert (out.shape, out.device.type) == ((1, 5, 3), "meta")


@pytest.mark.parametrize("kind", ["dtensor", "nested"])
def test_a_gradient_is_refused_as_well(kind, group):
    """Torch passes a cotangent, which no check of arguments sees."""
    x = torch.ones(1, 5, 3, requires_grad=True)
    out = fusedops.dynamic_conv(x, torch.ones(3, 4))
    with pytest.raises((TypeError, RuntimeError)):
        out.backward(KINDS[kind][0](torch.ones(1, 5, 3)))
