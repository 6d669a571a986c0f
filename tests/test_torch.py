"""The torch bridge: derivatives of high order, lists of tensors packed once, private names."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from fusedops._frame import bridge, registry, torch_private  # noqa: E402
from fusedops._frame.bridge.graphs import _take_apart  # noqa: E402
from fusedops.planarity.op import nll  # noqa: E402
from fusedops.samples import protein  # noqa: E402
from places import forget_plans  # noqa: E402


def example():
    """Return coordinates, a leaf, and two groups of planes over them."""
    rng = np.random.default_rng(1)
    xyz, indices = protein(1, rng, noise=0.2)
    indices = indices[:2]
    xyz = xyz[: 1 + max(index.max() for index in indices)]
    planes = fusedops.Planes([(index, rng.uniform(0.3, 0.6, index.shape)) for index in indices])
    return torch.tensor(xyz, requires_grad=True), planes


@pytest.mark.parametrize("backend", ["cython", "torch"])
def test_fourth_derivatives(backend):
    """No kernel has a third derivative: torch differentiates the formula, and it is right."""
    xyz, planes = example()
    generator = torch.Generator().manual_seed(4)
    vectors = [torch.randn(xyz.shape, dtype=xyz.dtype, generator=generator) for _ in range(3)]

    def derivative(x):
        value = fusedops.planarity_nll(x, planes, fit="weighted", backend=backend)
        for vector in vectors:
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = (gradient * vector).sum()
        return value

    assert torch.autograd.gradcheck(derivative, (xyz,), fast_mode=True)


@pytest.mark.parametrize("backend", ["cython", "torch"])
def test_third_derivatives_along_a_direction_that_depends_on_the_coordinates(backend):
    """Differentiate ‖∇NLL‖² twice by a leaf, and by a tensor computed from one."""
    xyz, planes = example()

    def square(x):
        loss = fusedops.planarity_nll(1.5 * x, planes, fit="weighted", backend=backend)
        return torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()

    assert torch.autograd.gradcheck(square, (xyz,), fast_mode=True)
    for function in (square, lambda x: square(1.5 * x)):
        assert torch.autograd.gradgradcheck(function, (xyz,), fast_mode=True)


def test_a_registered_op_saves_what_its_gradient_needs():
    xyz, planes = example()
    assert fusedops.planarity_nll(xyz.detach(), planes).grad_fn is None
    with torch.no_grad():
        assert fusedops.planarity_nll(xyz, planes).grad_fn is None
    loss, normals = torch.ops.fusedops.planarity_nll(
        xyz, *_take_apart(nll, (planes, "uniform")), [True, False], ""
    )
    assert not normals.numel()
    (want,) = torch.autograd.grad(fusedops.planarity_nll(xyz, planes), xyz)
    assert torch.equal(torch.autograd.grad(loss, xyz)[0], want)


def test_a_registered_op_computes_where_a_mode_is_switched_off():
    """So torch evaluates small constants while it traces."""
    xyz, planes = example()
    given = xyz.detach(), *_take_apart(nll, (planes, "uniform")), [True, False], ""
    with torch._subclasses.FakeTensorMode(), torch._C._DisableTorchDispatch():
        loss, _ = torch.ops.fusedops.planarity_nll(*given)
    assert loss == fusedops.planarity_nll(xyz, planes)


def test_results_share_no_memory_with_planes():
    xyz, planes = torch.ones(3, 3), fusedops.Planes([])
    loss = fusedops.planarity_nll(xyz, planes, backend="torch")
    loss += 5
    assert fusedops.planarity_nll(xyz, planes, backend="torch") == 0


@pytest.fixture
def packings(monkeypatch):
    """List every packing of planes."""
    found, lay_out = [], fusedops.Planes._lay_out

    def noted(self, *given, **options):
        found.append(self)
        lay_out(self, *given, **options)

    monkeypatch.setattr(fusedops.Planes, "_lay_out", noted)
    return found


def listed():
    """Return coordinates, and planes of two sizes as tensors of their own memory."""
    xyz = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    index = torch.arange(12).reshape(3, 4), torch.tensor([[0, 5, 9, 1, 4], [2, 3, 11, 6, 8]])
    return xyz, [(index[0], torch.full((3,), 0.5)), (index[1], torch.full((2, 5), 0.25))]


def packed_anew(xyz, groups):
    return fusedops.planarity_nll(xyz, fusedops.Planes(groups)).item()


def test_a_list_of_tensors_is_packed_once(packings):
    xyz, groups = listed()
    value = fusedops.planarity_nll(xyz, groups).item()
    assert fusedops.planarity_nll(xyz, list(groups)).item() == value
    leaf = xyz.clone().requires_grad_()
    fusedops.planarity_nll(leaf, groups, fit="weighted").backward()
    fusedops.planarity_nll(xyz[:, [2, 1, 0]], plane_groups=groups)
    assert len(packings) == 1
    assert value == packed_anew(xyz, groups) == fusedops.planarity_nll(xyz.numpy(), groups)


def test_what_is_refused_after_a_list_of_the_same(square):
    xyz, groups = listed()
    fusedops.planarity_nll(xyz, groups)
    with pytest.raises(IndexError, match=r"indices\[2, 3\] is 11; it should be from 0 to 10"):
        fusedops.planarity_nll(xyz[:11], groups)
    with pytest.raises(TypeError, match="it should be a pair"):
        fusedops.planarity_nll(xyz, [(*groups[0], *groups[1])])
    groups[1][1].requires_grad_()
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"plane_groups\[1\] sigmas requires grad; it is a con"
        ):
            fusedops.planarity_nll(xyz, groups)
    with pytest.raises(ValueError, match="plane_groups is on cpu; it should be on meta, where xyz"):
        fusedops.planarity_nll(torch.zeros(4, 3, device="meta"), square[1])
    with pytest.raises(ValueError, match="sigmas is on cpu; it should be on meta"):
        fusedops.Planes([(groups[0][0].to("meta"), groups[0][1])])


CHANGES = {
    "a write to the first indices": lambda g: g[0][0].view(-1)[1].fill_(7),
    "a write to the first sigmas": lambda g: g[0][1].view(-1)[1].fill_(2),
    "a write to other indices": lambda g: g[1][0].view(-1)[1].fill_(7),
    "a write to other sigmas": lambda g: g[1][1].view(-1)[1].fill_(2),
    "another tensor": lambda g: g.insert(1, (g[1][0].clone(), g.pop()[1])),
    "fewer tensors": lambda g: g.pop(),
    "another order": lambda g: g.append((g[1][0].flip(0), g.pop()[1])),
    "other memory": lambda g: g[1][1].set_(torch.full((2, 5), 0.75)),
    "tensors and arrays": lambda g: g.append(tuple(t.tolist() for t in g.pop())),
    # A tensor that shares an array's memory is packed in every call.
    "a write by NumPy": lambda g: g[1][0].numpy().put(1, 6),
    "memory of an array": lambda g: g.append((g.pop(0)[0], torch.from_numpy(np.ones(3)))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_list_of_tensors_is_packed(packings, change):
    xyz, groups = listed()
    fusedops.planarity_nll(xyz, groups)
    CHANGES[change](groups)
    value = fusedops.planarity_nll(xyz, groups).item()
    assert len(packings) == 2
    assert value == pytest.approx(packed_anew(xyz, groups), rel=1e-14)
    if change == "memory of an array":
        groups[-1][1].numpy()[:] = 2
        assert fusedops.planarity_nll(xyz, groups).item() == packed_anew(xyz, groups) != value


def test_a_packed_list_is_forgotten_with_its_tensors():
    xyz, groups = listed()
    gc.collect()
    before = len(bridge.tensors.packed_read)
    fusedops.planarity_nll(xyz, groups)
    assert len(bridge.tensors.packed_read) == before + 1
    del groups
    gc.collect()
    assert len(bridge.tensors.packed_read) == before


def test_views_of_a_tensor_find_its_packed_argument():
    made, ends = [], torch.tensor([[0, 1, 2], [1, 2, 0]])

    def read(tensor):
        def make():
            made.append(tensor)
            return fusedops.Edges(tensor, 3)

        return fusedops.Edges.kept([tensor], {"num_nodes": 3}, make)

    first = read(ends)
    assert read(ends[:]) is first
    assert read(ends.view(2, 3)) is first
    turned = read(ends.flip(0))
    assert turned.source.tolist() == [1, 2, 0]
    part = read(ends[:, 1:])
    assert part.num_edges == 2
    assert read(ends[:, 1:]) is part
    assert read(ends) is first
    assert len(made) == 3
    ends[0, 0] = 2
    assert read(ends[:]).source.tolist() == [2, 1, 2]


def test_lists_of_tensors_under_inference_mode_and_transforms():
    xyz, groups = listed()
    want = packed_anew(xyz, groups)
    with torch.inference_mode():
        made = [(i.clone(), s.clone()) for i, s in groups]
        assert fusedops.planarity_nll(xyz, made).item() == want
        assert fusedops.planarity_nll(xyz, groups).item() == want
    assert fusedops.planarity_nll(xyz, made).item() == want
    gradient = torch.func.grad(lambda x: fusedops.planarity_nll(x, groups))(xyz)
    leaf = xyz.clone().requires_grad_()
    fusedops.planarity_nll(leaf, groups).backward()
    assert torch.equal(gradient, leaf.grad)


def test_the_gpu_fallback_warns_once(square, monkeypatch):
    """Without Triton, plain torch serves CUDA tensors, which a user should know."""
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.setattr(registry, "import_error", lambda _: "absent")
    request = registry.Request("planarity_nll", "torch", "cuda", torch.float32, None)
    with pytest.warns(RuntimeWarning, match="plain torch serves this CUDA tensor.*absent"):
        assert registry.choose(request)[0].name == "torch"
    assert registry.choose(request)[0].name == "torch"


def test_public_names_replace_private_ones():
    names = ("__version__", "are_deterministic_algorithms_enabled", "autograd", "compiler", "cuda")
    other = SimpleNamespace(**{name: getattr(torch, name) for name in names})
    found = torch_private._Private(other)
    assert not found.is_deterministic()
    assert found.frame_callback() is None
    assert found.will_run(None)
    with pytest.raises(NotImplementedError, match=r"has no torch._C._functorch.unwrap_if_dead"):
        found.alive(torch.ones(1))


class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kernels = torch.nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return fusedops.dynamic_conv(x, self.kernels)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_an_exported_program_with_parameters(monkeypatch):
    """It follows `use_backend`, and has no tangents, as an exported program of others hasn't."""
    x = torch.randn(1, 5, 3)
    program = torch.export.export(Convolution(), (x,)).module()
    chosen, choose = [], registry.choose

    def noted(request):
        found = choose(request)
        chosen.append(found[0].name)
        return found

    monkeypatch.setattr(registry, "choose", noted)
    forget_plans()
    with fusedops.use_backend("torch"):
        program(x).sum().backward()
    assert set(chosen) == {"torch"}
    with pytest.raises(NotImplementedError, match="has no forward mode"):
        torch.func.jvp(program, (x,), (x,))


def test_a_compiled_function_reads_a_packed_argument_first():
    edges = fusedops.Edges(np.stack([np.arange(4) % 3, np.arange(4)[::-1] % 3]), 3)
    seen = torch.compile(lambda x: x + torch.as_tensor(edges.source).sum(), backend="eager")
    assert seen(torch.ones(2)).tolist() == [1 + sum(n % 3 for n in range(4))] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torchscript_keeps_no_result_as_a_constant():
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    kernels = torch.randn(4, 2, dtype=torch.float64)

    def traced(backend, x):
        def function(x):
            return fusedops.dynamic_conv(x, kernels, backend=backend)

        return function, torch.jit.trace(function, x, check_trace=False)

    for given in (None, x), ("torch", x.clone().requires_grad_()):
        with pytest.raises(NotImplementedError, match="would keep the result of a kernel"):
            traced(*given)
    function, recorded = traced("torch", x)
    torch.testing.assert_close(recorded(x.sin()), function(x.sin()))
