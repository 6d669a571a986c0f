"""SO(2) convolutions and gates: their mathematics, their modules, and their own arguments."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import fusedops
from contract import compare
from cpukern.so2 import convolution as on_cpu
from fusedops.samples import convolved
from fusedops.testing import TOLERANCE, error
from places import HAS_TORCH, forget_plans, interpreted, needs_torch, needs_triton

if HAS_TORCH:
    import torch

pytestmark = interpreted


def sample(lmax, mmax, edges=5, channels=3, width=2, gates=4, **options):
    rng = np.random.default_rng(lmax + 10 * mmax)
    return convolved(rng, edges, lmax, mmax, channels, width, gates, **options)


def convolution(message, *, bias=0.0, radial=None, gate_channels=0, **weights):
    """Return the product of every order m, of complex numbers (E, lmax + 1 - m, C)."""
    E, _, C = message.shape
    degrees = weights["weight_m0"].shape[1] // C
    found, row, function = [], 0, 0
    for m, weight in enumerate(weights.values()):
        n = degrees - m
        x = message[:, row : row + n].astype(complex)
        if m:
            x += 1j * message[:, row + n : row + 2 * n]
            real, imaginary = np.split(weight, 2)
            weight = real + 1j * imaginary
        if radial is not None:
            x = x * radial[:, function * C : (function + n) * C].reshape(E, n, C)
        y = np.einsum("ei,oi->eo", x.reshape(E, -1), weight)
        if not m:
            gates, y = np.split(y.real + bias, [gate_channels], axis=1)
        y = y.reshape(E, n, -1)
        found += [y.real, y.imag] if m else [y]
        row, function = row + (2 * n if m else n), function + n
    out = np.concatenate(found, axis=1)
    return (out, gates) if gate_channels else out


def gated(gates, x, mmax, layout):
    """Return features times σ of the gates of their degrees, and of themselves at degree 0."""
    C = x.shape[2]
    lmax = gates.shape[1] // C
    degrees = [(l, m) for l in range(lmax + 1) for m in range(-l, l + 1) if abs(m) <= mmax]
    if layout == "m":
        degrees.sort(key=lambda row: (abs(row[1]), row[1] < 0, row[0]))
    h = [gates[:, (l - 1) * C : l * C] if l else x[:, 0] for l, _ in degrees]
    return x / (1 + np.exp(-np.stack(h, axis=1)))


def test_the_formula():
    sizes = [(5, lmax, mmax, 3, 4) for lmax, mmax in ((0, 0), (3, 0), (3, 3), (4, 2))]
    compare(fusedops.so2_convolution, convolution, sizes)
    compare(fusedops.gate_activation, gated, [size[:4] for size in sizes])


def large(op, edges):
    """Return arrays and options of an op with products, of so many edges or tokens."""
    if op == "so2_convolution":
        return sample(2, 2, edges, 16), {"gate_channels": 4}
    rng, D, W, H = np.random.default_rng(0), 8, 4, 4
    shapes = {"x": (1, edges, D), "hidden": (1, edges, H), "weight": (D * W, H), "bias": (D * W,)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}, {"activation": "silu"}


of_products = pytest.mark.parametrize("op", ["so2_convolution", "dynamic_conv_generated"])


def solve(op, arrays, **options):
    """Return outputs, and gradients of their squares, of tensors."""
    leaves = {name: array.detach().requires_grad_() for name, array in arrays.items()}
    out = getattr(fusedops, op)(**leaves, **options)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum(one.square().sum() for one in outs)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return [each.detach().numpy() for each in (*outs, *gradients)]


@needs_torch
@of_products
@pytest.mark.parametrize("layout", ["contiguous", "strided", "repeated"])
@pytest.mark.parametrize("backend", ["cython", "numba"])
def test_large_products_of_tensors_are_onednns(op, layout, backend, threads_of_onednn):
    """They take a bias of any layout."""
    arrays, options = large(op, 50)
    given = {name: torch.tensor(array).float() for name, array in arrays.items()}
    bias = given["bias"]
    if layout == "strided":
        given["bias"] = bias.repeat_interleave(2)[::2]
    elif layout == "repeated":
        given["bias"] = bias[:1].expand(len(bias))
    exact = {name: array.double() for name, array in given.items()}
    want = solve(op, exact, **options, backend="torch")
    assert not threads_of_onednn
    found = solve(op, given, **options, backend=backend)
    # One product of order 0 and three of each other order, forth and back, and those for weights.
    assert len(threads_of_onednn) == 7 + 7 + 5 or (op != "so2_convolution" and threads_of_onednn)
    for one, other in zip(found, want, strict=True):
        assert error(one, other) < 2e-6


@needs_torch
@of_products
def test_products_of_several_threads_start_none(op, threads_of_onednn):
    """OpenMP has a number of threads for each thread that calls it."""
    pytest.importorskip("threadpoolctl")
    arrays, options = large(op, 3000)
    given = {name: torch.tensor(array).float() for name, array in arrays.items()}
    results = []
    for threads in (1, 3):
        fusedops.set_num_threads(threads)
        try:
            results.append(solve(op, given, **options, backend="cython"))
        finally:
            fusedops.set_num_threads(None)
    assert set(threads_of_onednn) == {1}
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@needs_torch
@pytest.mark.parametrize("backend", ["cython", "numba"])
def test_three_products_for_four_lose_no_digits(backend):
    """The errors of orders and signs are those of sums of products of float32."""
    given = sample(2, 2, edges=300, channels=64, width=64)
    tensors = {name: torch.tensor(a) for name, a in given.items()}
    found = []
    kinds = (torch.float64, "torch"), (torch.float32, "torch"), (torch.float32, backend)
    for kind, by in kinds:
        cast = {name: a.to(kind) for name, a in tensors.items()}
        x = cast["message"].requires_grad_()
        out, gates = fusedops.so2_convolution(**cast, gate_channels=4, backend=by)
        (dx,) = torch.autograd.grad(out.square().sum() + gates.sum(), x)
        found.append([out.detach().double(), dx.double()])
    exact, one, other = found
    for a, b, c in zip(exact, one, other, strict=True):
        assert (c - a).abs().max() <= 4 * (b - a).abs().max()


#: Functions from x, a weight and a loss to gradients, and the leaves that have them.
PASSES = {
    "by x": (lambda x, w, loss: torch.autograd.grad(loss, x), "x"),
    "by a weight": (lambda x, w, loss: torch.autograd.grad(loss, w), "w"),
    "by both": (lambda x, w, loss: torch.autograd.grad(loss, (x, w)), "xw"),
    "twice": (lambda x, w, loss: torch.autograd.grad(loss, x, create_graph=True), "x"),
    "into grad": (lambda x, w, loss: loss.backward(), "xw"),
    "into one grad": (lambda x, w, loss: loss.backward(inputs=[x]), "x"),
}


@needs_torch
@pytest.mark.parametrize("leaf", [True, False], ids=["leaves", "results"])
@pytest.mark.parametrize("name", PASSES)
def test_a_large_pass_computes_the_gradients_that_it_wants(name, leaf, monkeypatch):
    """Forces are gradients by positions alone, though weights require theirs too."""
    from fusedops._frame.bridge import autograd

    run_pass, wanted = PASSES[name]
    given = {name: torch.tensor(array) for name, array in sample(2, 2, 4, radial=False).items()}
    x, w = leaves = [given[name].requires_grad_() for name in ("message", "weight_m1")]
    made, pull_back = [], on_cpu.backward

    def note(kernels, a, y, **options):
        made.append({name for name, slot in zip(y._fields, y, strict=True) if slot is not None})
        pull_back(kernels, a, y, **options)

    monkeypatch.setattr(on_cpu, "backward", note)
    monkeypatch.setattr(autograd, "_LARGE", 0)
    # A plan of an earlier call holds the limit of its time.
    forget_plans()

    def loss():
        used = {} if leaf else {"message": x * 1, "weight_m1": w * 1}
        options = {"gate_channels": 4, "backend": "cython"}
        return fusedops.so2_convolution(**{**given, **used}, **options)[0].square().sum()

    found = run_pass(x, w, loss())
    some = [each for each, letter in zip(leaves, "xw", strict=True) if letter in wanted]
    names = {"x": "dmessage", "w": "dweight_m1"}
    assert made == [{names[letter] for letter in wanted}]
    if name.startswith("into"):
        assert (w.grad is None) == ("w" not in wanted)
    expected = torch.autograd.grad(loss(), some)
    for one, other in zip(found or [each.grad for each in some], expected, strict=True):
        assert error(one.detach().numpy(), other.numpy()) < 1e-13


@needs_torch
@pytest.mark.parametrize(
    "backend", ["torch", "cython", "numba", pytest.param("triton", marks=needs_triton)]
)
def test_messages_are_not_kept_for_frozen_weights(backend, monkeypatch):
    if backend == "triton":
        from gpukern.so2 import triton as kernels

        def rows(array, rows=kernels.rows_of):
            assert array is None or 0 not in array.stride(), "rows without memory are copied"
            return rows(array)

        monkeypatch.setattr(kernels, "rows_of", rows)
    arrays = sample(2, 2, radial=False)
    given = {name: torch.tensor(array) for name, array in arrays.items()}
    x = given["message"].requires_grad_()

    def kept():
        out = fusedops.so2_convolution(**given, gate_channels=4, backend=backend)[0]
        saved = out.grad_fn.saved_tensors
        return out, [t for t in saved if t.shape == x.shape]

    out, (standing,) = kept()
    assert standing.untyped_storage().nbytes() == x.itemsize
    dout = torch.randn(out.shape, dtype=x.dtype, requires_grad=True)
    (dx,) = torch.autograd.grad(out, x, dout, create_graph=True)
    (back,) = torch.autograd.grad(dx, dout, ddx := torch.randn_like(x))
    given["weight_m1"].requires_grad_()
    out, (message,) = kept()
    assert message.data_ptr() == x.data_ptr()
    wanted, _ = torch.autograd.grad(out, (x, given["weight_m1"]), dout.detach())
    assert error(dx.detach().numpy(), wanted.numpy()) < 1e-13
    pushed = fusedops.so2_convolution(
        **{**given, "message": ddx, "bias": None}, gate_channels=4, backend="torch"
    )
    assert error(back.numpy(), pushed[0].detach().numpy()) < 1e-13


PRECISE = {"ieee": 2**-22, "tf32": 2**-22, "bf16": 2**-7}


@needs_torch
@pytest.mark.parametrize("precision", PRECISE)
def test_products_are_as_precise_as_asked(any_torch_backend, precision):
    """tf32 needs a GPU; elsewhere its products are float32."""
    given = {n: torch.tensor(a).float() for n, a in sample(2, 2, channels=16).items()}
    want, found = (
        solve("so2_convolution", given, gate_channels=4, backend=backend, precision=option)
        for backend, option in (("torch", None), (any_torch_backend, precision))
    )
    errors = [error(one, two) for one, two in zip(want, found, strict=True)]
    assert max(errors) < 4 * PRECISE[precision]
    if any_torch_backend == "triton" and precision == "bf16":
        assert max(errors[:2]) > 2**-14, "factors aren't rounded"


@needs_torch
@pytest.mark.parametrize("shape", [(3, 3, 4), (7, 3, 4), (7, 7, 2)])
def test_orders_that_begin_between_eights(any_torch_backend, shape):
    """Edges, messages and radial functions have eights, and single orders don't."""
    lmax, mmax, channels = shape
    sizes = sample(lmax, mmax, edges=8, channels=channels)
    given = {n: torch.tensor(a).float() for n, a in sizes.items()}
    want, found = (
        solve("so2_convolution", given, gate_channels=4, backend=backend)
        for backend in ("torch", any_torch_backend)
    )
    assert max(error(one, two) for one, two in zip(want, found, strict=True)) < 4e-6


@pytest.mark.parametrize("limit", [True, False], ids=["threadpoolctl", "none"])
def test_one_block_and_many_agree(monkeypatch, limit, exact):
    """Without a limit to the threads of BLAS all edges are one block."""
    monkeypatch.setattr(on_cpu, "blas_has_a_limit", lambda: limit)
    given = {n: a.astype(np.float32) for n, a in sample(2, 2, edges=700, channels=16).items()}
    out, pullback = fusedops.so2_convolution.vjp(**given, gate_channels=4, backend=exact)
    want, reference = fusedops.so2_convolution.vjp(**given, gate_channels=4, backend="numpy")
    cotangents = [np.ones_like(one) for one in out]
    pairs = zip((*out, *pullback(*cotangents)), (*want, *reference(*cotangents)), strict=True)
    assert all(error(one, other) < 8 * TOLERANCE["float32"] for one, other in pairs)


@pytest.mark.parametrize(
    ("op", "given", "message"),
    [
        ("so2_convolution", {"weight_m1": None}, "weight_m1 is None; it should be an array, as a"),
        ("so2_convolution", {"precision": "fp8"}, "precision is 'fp8'; it should be"),
        ("so2_convolution", {"precision": "bf16"}, "precision is 'bf16'; with float64 it should"),
        ("so2_convolution", {"gate_channels": 5}, r"weight_m0 .* with gate_channels 5; it should"),
        ("gate_activation", {"x": np.ones((2, 8, 3))}, r"x has shape \(2, 8, 3\); it should be \("),
        ("gate_activation", {"mmax": 1}, r"x has shape \(2, 9, 3\); it should be \(E, M, C\) with"),
        ("gate_activation", {"mmax": 9}, r"x has shape \(2, 9, 3\); it should be \(E, M, C\) with"),
    ],
)
def test_arguments_that_do_not_fit_are_named(op, given, message):
    right = {**sample(2, 2), "gate_channels": 4}
    if op == "gate_activation":
        right = {"gates": np.ones((2, 6)), "x": np.ones((2, 9, 3))}
    with pytest.raises((TypeError, ValueError), match=f"^{op}: {message}"):
        getattr(fusedops, op)(**{**right, **given})


@needs_torch
@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("gates", [None, 4])
def test_a_module_is_the_op_with_its_parameters(gates, network):
    from fusedops.nn import SO2Convolution

    sizes = {"internal_weights": not network, "edge_channels_list": [6, 5] if network else None}
    module = SO2Convolution(3, 2, 2, 1, extra_m0_output_channels=gates, **sizes).double()
    names = {"fc_m0.weight", "fc_m0.bias", "so2_m_conv.0.fc.weight"}
    if network:
        names |= {f"rad_func.net.{n}.{p}" for n in (0, 1, 3) for p in ("weight", "bias")}
    assert set(module.state_dict()) == names
    x, x_edge = torch.randn(5, 7, 3).double(), torch.randn(5, 6).double()
    radial = module.rad_func["net"](x_edge) if network else None
    given = {"message": x, "weight_m0": module.fc_m0.weight, "bias": module.fc_m0.bias}
    given |= {"weight_m1": module.so2_m_conv[0]["fc"].weight, "radial": radial}
    given = {name: array.detach().numpy() for name, array in given.items() if array is not None}
    found = module(x, x_edge) if network else module(x)
    want = fusedops.so2_convolution(**given, gate_channels=gates or 0, backend="numpy")
    for one, other in zip(*((found, want) if gates else ((found,), (want,))), strict=True):
        assert error(one.detach().numpy(), other) < 1e-13
    one = found[0] if gates else found
    one.square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@needs_torch
def test_no_gates_are_returned_as_any_others():
    """As by fairchem's layer for lmax = 0, whose caller takes the pair apart."""
    from fusedops.nn import SO2Convolution

    module, x = SO2Convolution(3, 2, 0, 0, extra_m0_output_channels=0), torch.randn(5, 1, 3)
    out, gates = module(x)
    hook = module.fc_m0.register_forward_hook(lambda *_: None)
    by_layers = module(x)
    hook.remove()
    assert gates.shape == by_layers[1].shape == (5, 0)
    torch.testing.assert_close(out, by_layers[0])


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("network", [False, True])
def test_a_module_is_exported_for_any_number_of_edges(network, called):
    torch = pytest.importorskip("torch")
    from fusedops.nn import SO2Convolution

    sizes = {"internal_weights": False, "edge_channels_list": [6, 5]} if network else {}
    module = SO2Convolution(3, 2, 2, 1, **sizes)
    if called:
        module.fc_m0.register_forward_hook(lambda module, given, out: None)
    few, many = ((torch.randn(n, 7, 3), torch.randn(n, 6 if network else 15)) for n in (4, 9))
    edges = {0: torch.export.Dim("edges", min=2)}
    program = torch.export.export(module, few, dynamic_shapes=(edges, edges), strict=False)
    torch.testing.assert_close(program.module()(*many), module(*many))


def network(kind=None):
    """Return a network of radial functions, and its input."""
    torch.manual_seed(0)
    Linear = torch.nn.Linear
    layers = Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.SiLU(), Linear(5, 9, bias=False)
    return torch.nn.Sequential(*layers).to(kind), torch.randn(7, 6).to(kind)


@pytest.fixture
def served(monkeypatch):
    """Have our products serve few edges too, and list the shapes of the weights."""
    from fusedops import _products

    shapes, ours = [], _products.so2_convolution

    def note(x, weight, **options):
        shapes.append(tuple(weight.shape))
        return ours(x, weight, **options)

    monkeypatch.setattr(_products, "MANY", 0)
    monkeypatch.setattr(_products, "so2_convolution", note)
    return shapes


@needs_torch
def test_radial_functions_have_our_products_and_torchs_derivatives(served):
    from fusedops._products import linear_products

    found = []
    for kind in (torch.float32, torch.float64):
        net, x = network(kind)
        leaves = [x.requires_grad_(), *net.parameters()]
        with linear_products(x):
            out = net(x)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(dx.square().sum() for dx in first), leaves)
        found.append([out, *first, *second])
    assert served == [(5, 6), (9, 5)]
    for one, other in zip(*found, strict=True):
        # Second derivatives of LayerNorm magnify roundings of 6e-8.
        assert error(one.detach().numpy(), other.detach().numpy()) < 2e-5


@needs_torch
@pytest.mark.parametrize(
    "why", ["few", "float64", "batches", "autocast", "compile", "a subclass", "a backend"]
)
def test_radial_functions_that_are_left_to_torch(served, monkeypatch, why):
    from fusedops import _products

    net, x = network(torch.float64 if why == "float64" else torch.float32)
    x = x[None] if why == "batches" else x
    if why == "a subclass":
        x = x.as_subclass(type("Own", (torch.Tensor,), {}))
    if why == "few":
        monkeypatch.setattr(_products, "MANY", 1000)
    if why == "compile":
        monkeypatch.setattr(_products, "traced", lambda: True)
    with torch.autocast("cpu", enabled=why == "autocast"):
        with _products.linear_products(x, "torch" if why == "a backend" else None):
            found = net(x)
        expected = net(x)
    assert not served
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@needs_torch
def test_radial_functions_without_memory(served):
    from fusedops._products import linear_products

    net, x = (part.to("meta") for part in network())
    with linear_products(x):
        assert net(x).is_meta
    assert not served


@needs_torch
def test_a_radial_function_of_another_width_raises_torchs_error(served):
    from fusedops._products import linear_products

    net, x = network()
    with linear_products(x), pytest.raises(RuntimeError, match="mat1 and mat2"):
        net(x[:, 1:])


@needs_torch
def test_radial_functions_that_are_compiled_alone(served):
    from fusedops._products import linear_products

    net, x = network()
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with linear_products(x):
        found = compiled(x)
    assert not served
    torch.testing.assert_close(found, net(x))


@needs_torch
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_radial_functions_that_torchscript_traces(served):
    import torch

    from fusedops._products import linear_products

    class Radial(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.x = network()

        def forward(self, x):
            with linear_products(x):
                return self.net(x)

    radial = Radial()
    traced = torch.jit.trace(radial, radial.x, check_trace=False)
    assert not served
    x = torch.cat([radial.x, -radial.x])
    torch.testing.assert_close(traced(x), radial.net(x))


@needs_torch
def test_layers_on_a_gpu_that_are_traced_for_any_number_of_rows():
    """As by torch.export; a GPU is told from a CPU without one."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from fusedops._products import linear_products

    sizes = ShapeEnv()
    with FakeTensorMode(shape_env=sizes):
        x = torch.empty((sizes.create_unbacked_symint(), 128), device="cuda")
        with linear_products(x):
            assert x.is_cuda
    assert not sizes.guards


@needs_torch
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sphere_channels": 0}, "sphere_channels is 0; it should be at least 1"),
        ({"mmax": 3}, "mmax is 3; it should be from 0 to 2, as lmax is 2"),
        ({"lmax": 9, "mmax": 9}, "mmax is 9; it should be from 0 to 8, as lmax is 9"),
        ({"internal_weights": False}, "edge_channels_list is None; it should have sizes"),
        ({"backend": "fast"}, "backend is 'fast'; it should be one of"),
        ({"precision": "fp8"}, "precision is 'fp8'; it should be"),
        ({"extra_m0_output_channels": -3}, "extra_m0_output_channels is -3; it should be at least"),
        ({"x": np.ones((5, 7, 2))}, r"x has shape \(5, 7, 2\); it should be \(E, 7, 3\)"),
        (
            {"x": np.ones((5, 1, 9)), "mmax": 0},
            r"x has shape \(5, 1, 9\); it should be \(E, 3, 3\)",
        ),
        ({"x_edge": None}, "x_edge is None; it should be given"),
        ({"x_edge": np.ones((5, 3))}, r"x_edge has shape \(5, 3\); it should be \(5, 6\)"),
        ({"x_edge": np.ones((4, 6))}, r"x_edge has shape \(4, 6\); it should be \(5, 6\)"),
    ],
)
def test_bad_arguments_of_a_module(given, message):
    from fusedops.nn import SO2Convolution

    right = {"sphere_channels": 3, "m_output_channels": 2, "lmax": 2, "mmax": 1}
    given = dict(given)
    call = partial(SO2Convolution, **{**right, **given})
    if "x" in given:
        x = torch.from_numpy(given.pop("x")).float()
        call = partial(SO2Convolution(**{**right, **given}), x)
    if "x_edge" in given:
        module = SO2Convolution(**right, internal_weights=False, edge_channels_list=[6, 5])
        x_edge = None if given["x_edge"] is None else torch.from_numpy(given["x_edge"])
        call = partial(module, torch.randn(5, 7, 3), x_edge)
    with pytest.raises((TypeError, ValueError), match=f"SO2Convolution: {message}"):
        call()


@needs_triton
def test_a_graph_keeps_real_matrices_of_complex_weights():
    """They follow the weights by `renew`, forth and back."""
    from fusedops._kept import Kept, keeping
    from gpukern.so2 import triton as kernels

    torch.manual_seed(2)
    message = torch.randn(7, 9, 4, requires_grad=True)
    weights = [torch.randn(6, 12), torch.randn(8, 8), torch.randn(4, 4)]

    def convolved(backend):
        out = fusedops.so2_convolution(message, *weights, backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), message)

    keeper, made, launch = Kept(weights, torch.device("cpu")), [], kernels._launch_real
    with pytest.MonkeyPatch.context() as patch, keeping(keeper):
        patch.setattr(kernels, "_launch_real", lambda *a: made.append(a[0]) or launch(*a))
        for times in range(2):
            for found, want in zip(convolved("triton"), convolved("torch"), strict=True):
                torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
            # One for each order but 0, and again after a change.
            assert len(made) == 2 + 2 * times
            weights[1].mul_(-1.5)
            keeper.renew()
