"""The torch bridge: derivatives of every order, compile, transforms, autocast, 16-bit floats."""

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
from fusedops.testing import error  # noqa: E402


def example(residues=8, sigmas="plane", noise=0.1, dtype=torch.float64, groups=4):
    """Return coordinates, a leaf, and the first of four groups of planes over them."""
    rng = np.random.default_rng(residues)
    xyz, indices = protein(residues, rng, noise=noise)
    indices = indices[:groups]
    xyz = xyz[: 1 + max(index.max() for index in indices)]
    groups = [
        (i, np.full(len(i), 0.5) if sigmas == "plane" else rng.uniform(0.3, 0.6, i.shape))
        for i in indices
    ]
    return torch.tensor(xyz, dtype=dtype, requires_grad=True), fusedops.Planes(groups)


def derivative(function, order, vectors):
    """Return a function's derivative of some order, along one vector for each."""
    if order == 0:
        return function

    def next_order(x):
        value = derivative(function, order - 1, vectors)(x)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return (gradient * vectors[order - 1]).sum()

    return next_order


@pytest.mark.parametrize("backend", ["cython", "torch"])
@pytest.mark.parametrize("order", [3, 4])
def test_higher_orders(backend, order):
    """No kernel has a third derivative: torch differentiates the formula, and it is right."""
    xyz, planes = example(residues=1, sigmas="atom", noise=0.2, groups=2)
    generator = torch.Generator().manual_seed(order)
    vectors = [torch.randn(xyz.shape, dtype=xyz.dtype, generator=generator) for _ in range(order)]

    def nll(x):
        return fusedops.planarity_nll(x, planes, fit="weighted", backend=backend)

    assert torch.autograd.gradcheck(derivative(nll, order - 1, vectors), (xyz,))


@pytest.mark.parametrize("backend", ["cython", "torch"])
def test_third_derivatives_along_a_direction_that_depends_on_the_coordinates(backend):
    """Differentiate ‖∇NLL‖² twice by a leaf, and by a tensor computed from one."""
    xyz, planes = example(residues=1, noise=0.2, groups=2)

    def square(x):
        loss = fusedops.planarity_nll(x, planes, backend=backend)
        return torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()

    assert torch.autograd.gradcheck(square, (xyz,))
    assert torch.autograd.gradgradcheck(square, (xyz,))
    assert torch.autograd.gradgradcheck(lambda x: square(1.5 * x), (xyz,))


def test_numpy_and_torch_give_the_same_bits():
    xyz, planes = example()
    value, pullback = fusedops.planarity_nll.vjp(xyz.detach().numpy(), planes)
    loss = fusedops.planarity_nll(xyz, planes)
    (3 * loss).backward()
    assert loss.item() == value
    np.testing.assert_array_equal(xyz.grad.numpy(), pullback(3.0)[0])
    assert fusedops.planarity_nll(xyz.detach(), planes).grad_fn is None
    with torch.no_grad():
        assert fusedops.planarity_nll(xyz, planes).grad_fn is None


def test_views_and_strides_of_tensors():
    xyz, planes = example()
    want = torch.autograd.grad(fusedops.planarity_nll(xyz, planes), xyz)[0]
    wide = torch.zeros(len(xyz), 5, dtype=xyz.dtype)
    wide[:, 1:4] = xyz.detach()
    wide.requires_grad_()
    fusedops.planarity_nll(wide[:, 1:4], planes).backward()
    assert torch.equal(wide.grad[:, 1:4], want)
    assert not wide.grad[:, [0, 4]].any()


def test_a_registered_op_refuses_half_a_gradient():
    xyz, planes = example()
    outputs = torch.ops.fusedops.planarity_nll(
        xyz, *_take_apart(nll, (planes, "uniform")), [True, False], ""
    )
    with pytest.raises(RuntimeError, match="its gradient needs more outputs wanted"):
        outputs[0].backward()


def test_results_share_no_memory_with_planes():
    xyz, _ = example(residues=1)
    planes = fusedops.Planes([])
    loss = fusedops.planarity_nll(xyz.detach(), planes, backend="torch")
    loss += 5
    assert fusedops.planarity_nll(xyz.detach(), planes, backend="torch") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_coordinates(dtype):
    """The loss is float32, and the gradient has the coordinates' dtype."""
    xyz, planes = example(dtype=torch.float32)
    half = xyz.detach().to(dtype).requires_grad_()
    loss = fusedops.planarity_nll(half, planes)
    loss.backward()
    full = half.detach().float().requires_grad_()
    want = fusedops.planarity_nll(full, planes)
    want.backward()
    assert loss.dtype == torch.float32
    assert half.grad.dtype == dtype
    assert loss.item() == want.item()
    assert torch.equal(half.grad, full.grad.to(dtype))


def test_planes_from_tensors():
    xyz, planes = example()
    rng = np.random.default_rng(8)
    _, indices = protein(8, rng, noise=0.1)
    groups = [(torch.tensor(i), torch.full((len(i),), 0.5)) for i in indices]
    want = fusedops.planarity_nll(xyz, planes).item()
    assert fusedops.planarity_nll(xyz, groups).item() == want
    assert fusedops.planarity_nll(xyz.detach().numpy(), groups) == want


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
    assert len(packings) == 1
    assert fusedops.planarity_nll(xyz, list(groups)).item() == value
    leaf = xyz.clone().requires_grad_()
    fusedops.planarity_nll(leaf, groups, fit="weighted").backward()
    assert len(packings) == 1
    fusedops.planarity_nll(xyz[:, [2, 1, 0]], plane_groups=groups)
    assert len(packings) == 1
    with pytest.raises(IndexError, match=r"indices\[2, 3\] is 11; it should be from 0 to 10"):
        fusedops.planarity_nll(xyz[:11], groups)
    assert value == packed_anew(xyz, groups)


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_write_to_any_tensor_of_a_list_packs_it_again(packings, place):
    xyz, groups = listed()
    before = fusedops.planarity_nll(xyz, groups).item()
    tensor = groups[place[0]][place[1]]
    tensor.view(-1)[1] = 7 if place[1] == 0 else 2.0
    after = fusedops.planarity_nll(xyz, groups).item()
    assert len(packings) == 2
    assert after == packed_anew(xyz, groups) != before


CHANGES = {
    "another tensor": lambda g: [g[0], (g[1][0].clone(), g[1][1])],
    "fewer tensors": lambda g: g[:1],
    "another order": lambda g: [(g[0][0], g[0][1]), (g[1][0].flip(0), g[1][1])],
    "other memory": lambda g: g[1][1].set_(torch.full((2, 5), 0.75)) is None or g,
    "tensors and arrays": lambda g: [g[0], tuple(t.tolist() for t in g[1])],
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_list_of_tensors_is_packed(packings, change):
    xyz, groups = listed()
    fusedops.planarity_nll(xyz, groups)
    groups = CHANGES[change](groups)
    value = fusedops.planarity_nll(xyz, groups).item()
    assert len(packings) == 2
    assert value == pytest.approx(packed_anew(xyz, groups), rel=1e-14)


def test_tensors_that_are_no_pairs_are_refused_after_a_list_of_the_same():
    xyz, groups = listed()
    fusedops.planarity_nll(xyz, groups)
    with pytest.raises(TypeError, match="it should be a pair"):
        fusedops.planarity_nll(xyz, [(*groups[0], *groups[1])])


def test_a_list_that_numpy_may_write_to_is_packed_in_every_call():
    xyz, groups = listed()
    fusedops.planarity_nll(xyz, groups)
    groups[1][0].numpy()[0, 1] = 6
    assert fusedops.planarity_nll(xyz, groups).item() == packed_anew(xyz, groups)
    sigma = np.full(3, 0.5)
    groups[0] = groups[0][0], torch.from_numpy(sigma)
    before = fusedops.planarity_nll(xyz, groups).item()
    sigma[:] = 2
    assert fusedops.planarity_nll(xyz, groups).item() == packed_anew(xyz, groups) != before


def test_a_packed_list_is_forgotten_with_its_tensors():
    xyz, groups = listed()
    gc.collect()
    before = len(bridge.packed_read)
    fusedops.planarity_nll(xyz, groups)
    assert len(bridge.packed_read) == before + 1
    del groups
    gc.collect()
    assert len(bridge.packed_read) == before


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


def test_a_list_of_tensors_is_checked_again_when_one_asks_for_a_gradient():
    xyz, groups = listed()
    fusedops.planarity_nll(xyz, groups)
    groups[1][1].requires_grad_()
    with pytest.raises(ValueError, match=r"plane_groups\[1\] sigmas requires grad"):
        fusedops.planarity_nll(xyz, groups)


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


BAD = {
    "integers": (torch.zeros(4, 3, dtype=torch.int64), {}, TypeError, "xyz has dtype int64"),
    "complex": (torch.zeros(4, 3, dtype=torch.complex64), {}, TypeError, "xyz has dtype complex64"),
    "sparse": (torch.zeros(4, 3).to_sparse(), {}, TypeError, "a dense tensor"),
    "float8": (torch.zeros(4, 3).to(torch.float8_e4m3fn), {}, TypeError, "xyz has dtype float8"),
    "shape": (torch.zeros(4, 2), {}, ValueError, r"xyz has shape \(4, 2\)"),
    "bound": (torch.zeros(2, 3), {}, IndexError, r"indices\[0, 2\] is 2; it should be from 0"),
    "device": (
        torch.zeros(4, 3, device="meta"),
        {},
        ValueError,
        "plane_groups is on cpu; it should be on meta, where xyz is",
    ),
    "backend": (torch.zeros(4, 3), {"backend": "triton2"}, ValueError, "backend is 'triton2'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_name_the_argument(name, square):
    xyz, options, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        fusedops.planarity_nll(xyz, square[1], **options)


def test_constants_must_not_ask_for_a_gradient(square):
    sigma = torch.tensor([0.1], requires_grad=True)
    with pytest.raises(ValueError, match="sigmas requires grad; it is a constant"):
        fusedops.planarity_nll(torch.zeros(4, 3), [(torch.tensor([[0, 1, 2]]), sigma)])


def test_mixed_devices_in_a_list():
    index = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="sigmas is on cpu; it should be on meta"):
        fusedops.Planes([(index, torch.ones(1))])


def test_the_gpu_fallback_warns_once(square, monkeypatch):
    """Without Triton, plain torch serves CUDA tensors, which a user should know."""
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.setattr(registry, "import_error", lambda _: "absent")
    request = registry.Request("planarity_nll", "torch", "cuda", torch.float32, None)
    with pytest.warns(RuntimeWarning, match="plain torch serves this CUDA tensor.*absent"):
        assert registry.choose(request)[0].name == "torch"
    assert registry.choose(request)[0].name == "torch"


def test_eigenvectors_of_plain_torch():
    from fusedops.planarity.eigenvector import smallest_eigenvector

    points = np.random.default_rng(2).normal(size=(200, 5, 3)) * [1, 0.3, 0.05]
    C = np.einsum("pai,paj->pij", points, points)
    want = np.linalg.eigh(C)[1][:, :, 0]
    found = smallest_eigenvector(torch.from_numpy(C)).numpy()
    assert error(np.abs(np.einsum("pi,pi->p", want, found)), np.ones(200)) < 1e-13


def test_public_names_replace_private_ones():
    names = ("__version__", "are_deterministic_algorithms_enabled", "autograd", "compiler", "cuda")
    other = SimpleNamespace(**{name: getattr(torch, name) for name in names})
    found = torch_private._Private(other)
    assert not found.is_deterministic()
    assert found.frame_callback() is None
    assert found.will_run(None)
    with pytest.raises(NotImplementedError, match=r"has no torch._C._functorch.unwrap_if_dead"):
        found.alive(torch.ones(1))
