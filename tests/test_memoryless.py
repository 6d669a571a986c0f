"""Tensors without memory of their own reach no kernel: a TypeError names the argument."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from contract import named  # noqa: E402
from fusedops._catalogue import families  # noqa: E402

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

    def placed(value):
        if isinstance(value, list):
            return [tuple(map(placed, group)) for group in value]
        if not isinstance(value, np.ndarray):
            return value
        return torch.tensor(value.astype("f4" if value.dtype.kind == "f" else "i8"), device=device)

    found = {}
    for family in families():
        for function, given in family.arguments().items():
            given = {name: placed(value) for name, value in given.items() if name != "out"}
            tensors = {n: given.pop(n) for n in [*given] if isinstance(given[n], torch.Tensor)}
            found[function.__name__] = functools.partial(function, **given), tensors
    # For arrays alone.
    del found["plane_deviations"]
    groups = {"indices": torch.zeros(1, 3, dtype=torch.int64), "sigmas": torch.ones(1)}
    groups = {name: tensor.to(device) for name, tensor in groups.items()}
    found["Planes"] = (lambda **named: fusedops.Planes([tuple(named.values())])), groups
    return found


ARGUMENTS = [(op, name) for op, (_, tensors) in calls("cpu").items() for name in tensors]


@pytest.mark.filterwarnings("ignore:.*quantize|.*nested tensor|.*MaskedTensor:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_it_is_refused(op, name, device, group):
    function, tensors = calls(device)[op]
    kinds = KINDS | (OF_FLOATS if tensors[name].is_floating_point() else {})
    if (op, name) == ("triangle_multiplicative_update", "x"):
        # It is served.
        del kinds["dtensor"]
    if len(tensors) == 1 and op not in ("Edges", "Sequences", "Lattice"):
        # Its result is on meta, too.
        del kinds["meta"]
    for kind, (make, advice) in kinds.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = tensors | {name: make(tensors[name])}
        # The error may name either tensor of a pair on different devices.
        should = rf"\b{name}\b.* is .*{advice.format(name=name)}"
        message = f"^{op}: .*{' on meta' if kind == 'meta' else should}"
        error = (TypeError, ValueError) if kind == "meta" else TypeError
        with named(kind), pytest.raises(error, match=message):
            function(**given)


@pytest.mark.filterwarnings("ignore:.*nested tensor|.*MaskedTensor:UserWarning")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", KINDS)
def test_no_result_is_written_to_it(kind):
    make, advice = KINDS[kind]
    message = f"^dynamic_conv: out is .*{advice.format(name='out')}"
    with pytest.raises((TypeError, ValueError), match=message):
        fusedops.dynamic_conv(torch.ones(1, 3, 2), torch.ones(2, 2), out=make(torch.ones(1, 3, 2)))


def test_indices_on_meta_are_refused_beside_other_tensors_there():
    """Also by a torch without CUDA, which has no captured graph to ask for."""
    refused = 0
    for op, (function, tensors) in calls("cpu").items():
        if any(not tensor.is_floating_point() for tensor in tensors.values()):
            with named(op), pytest.raises(TypeError, match=" is on meta; it should be a tensor"):
                function(**{name: tensor.to("meta") for name, tensor in tensors.items()})
            refused += 1
    assert refused
    planes = [(torch.zeros(1, 3, dtype=torch.int64, device="meta"), torch.ones(1, device="meta"))]
    with pytest.raises(TypeError, match=r"plane_groups\[0\] indices is on meta; it should be"):
        fusedops.planarity_nll(torch.zeros(4, 3, device="meta"), planes)


@pytest.mark.parametrize("kind", ["dtensor", "nested"])
def test_a_gradient_is_refused_as_well(kind, group):
    """Torch passes a cotangent, which no check of arguments sees."""
    x = torch.ones(1, 5, 3, requires_grad=True)
    out = fusedops.dynamic_conv(x, torch.ones(3, 4))
    with pytest.raises((TypeError, RuntimeError)):
        out.backward(KINDS[kind][0](torch.ones(1, 5, 3)))
