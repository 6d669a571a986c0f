"""SO(2) convolutions and gates: their mathematics, fairchem's layers, and their own arguments."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import fusedops
from cpukern.so2 import convolution as on_cpu
from fusedops.samples import convolved
from fusedops.testing import TOLERANCE, error
from fusedops.wigner import m_major_order, wigner_d
from fusedops.wigner.rows import message_rows
from places import HAS_TORCH, interpreted, needs_torch, needs_triton

if HAS_TORCH:
    import torch

pytestmark = interpreted

DEGREES = [(0, 0), (1, 1), (2, 2), (3, 1), (6, 6)]
of_degrees = pytest.mark.parametrize(("lmax", "mmax"), DEGREES)


def sample(lmax, mmax, edges=5, channels=3, width=2, gates=4, **options):
    rng = np.random.default_rng(lmax + 10 * mmax)
    return convolved(rng, edges, lmax, mmax, channels, width, gates, **options)


def run(op, place, arrays, **options):
    """Return the outputs of an op as arrays."""
    if place[0] == "torch":
        arrays = {name: torch.from_numpy(array) for name, array in arrays.items()}
    out = op(**arrays, **options, backend=place[1])
    return [np.asarray(one) for one in (out if isinstance(out, tuple) else (out,))]


def phases(rows, lmax, mmax):
    """Return m-major rows as complex rows of orders 0 to mmax."""
    real, rest = rows[:, : lmax + 1], rows[:, lmax + 1 :]
    found = [real.astype(complex)]
    for m in range(1, mmax + 1):
        n = lmax + 1 - m
        found.append(rest[:, :n] + 1j * rest[:, n : 2 * n])
        rest = rest[:, 2 * n :]
    return found


def joined(parts):
    """Return m-major rows; the inverse of `phases`."""
    rows = [parts[0].real]
    for part in parts[1:]:
        rows += [part.real, part.imag]
    return np.concatenate(rows, axis=1)


def turned(rows, lmax, mmax, angle):
    """Return rows after a turn about the edge."""
    parts = phases(rows, lmax, mmax)
    return joined([part * np.exp(1j * m * angle) for m, part in enumerate(parts)])


def expected(given, lmax, mmax, gates):
    """Return the result and the gates, by products of complex numbers."""
    E, _, C = given["message"].shape
    parts, radial, found = phases(given["message"], lmax, mmax), given.get("radial"), []
    for m, part in enumerate(parts):
        n, weight = lmax + 1 - m, given[f"weight_m{m}"]
        if radial is not None:
            part = part * radial[:, : n * C].reshape(E, n, C)
            radial = radial[:, n * C :]
        if m:
            half = len(weight) // 2
            weight = weight[:half] + 1j * weight[half:]
        found.append(part.reshape(E, n * C) @ weight.T)
    found[0] = found[0] + given.get("bias", 0.0)
    first, found[0] = found[0][:, :gates], found[0][:, gates:]
    D = found[0].shape[1] // (lmax + 1)
    return joined([part.reshape(E, -1, D) for part in found]), first.real


@of_degrees
@pytest.mark.parametrize("bare", [False, True], ids=["scaled", "bare"])
def test_orders_are_products_of_complex_numbers(place, lmax, mmax, bare):
    given = sample(lmax, mmax, radial=not bare, bias=not bare)
    found = run(fusedops.so2_convolution, place, given, gate_channels=4)
    for one, other in zip(found, expected(given, lmax, mmax, 4), strict=True):
        assert error(one, other) < 1e-13


@of_degrees
def test_a_turn_about_the_edge_turns_the_result_and_leaves_the_gates(place, lmax, mmax):
    given = sample(lmax, mmax)
    out, gates = run(fusedops.so2_convolution, place, given, gate_channels=4)
    given["message"] = turned(given["message"], lmax, mmax, 0.7)
    after, same = run(fusedops.so2_convolution, place, given, gate_channels=4)
    assert error(after, turned(out, lmax, mmax, 0.7)) < 1e-13
    assert error(same, gates) < 1e-13


@needs_torch
@pytest.mark.parametrize("layout", ["strided", "repeated"])
def test_onednns_products_take_a_bias_of_any_layout(layout, threads_of_onednn):
    given = {name: torch.tensor(a).float() for name, a in sample(2, 2, channels=16).items()}
    given["bias"] = given["bias"].repeat_interleave(2)[::2]
    if layout == "repeated":
        given["bias"] = given["bias"][:1].expand(len(given["bias"]))
    exact = {name: array.double() for name, array in given.items()}
    results = [fusedops.so2_convolution(**arrays, gate_channels=4) for arrays in (exact, given)]
    assert threads_of_onednn
    for want, got in zip(*results, strict=True):
        assert error(got.numpy(), want.numpy()) < 2e-6


@needs_torch
@pytest.mark.parametrize("backend", ["cython", "numba"])
def test_large_products_of_tensors_are_onednns(backend, threads_of_onednn):
    given = {name: torch.tensor(a).float() for name, a in sample(2, 2, channels=16).items()}
    results = []
    for kind, by in ((torch.float64, "torch"), (torch.float32, backend)):
        leaves = {name: array.to(kind).requires_grad_() for name, array in given.items()}
        out = fusedops.so2_convolution(**leaves, gate_channels=4, backend=by)
        loss = sum(one.square().sum() for one in out)
        results.append([*out, *torch.autograd.grad(loss, list(leaves.values()))])
    # One product of order 0 and three of each other order, forth and back, and those for weights.
    assert len(threads_of_onednn) == 7 + 7 + 5
    for exact, one in zip(*results, strict=True):
        assert error(one.detach().numpy(), exact.detach().numpy()) < 2e-6


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


@needs_torch
@pytest.mark.parametrize("op", ["so2_convolution", "dynamic_conv_generated"])
def test_products_of_several_threads_start_none(op, threads_of_onednn):
    """OpenMP has a number of threads for each thread that calls it."""
    pytest.importorskip("threadpoolctl")
    if op == "so2_convolution":
        arrays, options = sample(2, 2, edges=3000), {"gate_channels": 4}
    else:
        rng = np.random.default_rng(0)
        shapes = {"x": (1, 1500, 8), "hidden": (1, 1500, 4), "weight": (32, 4)}
        arrays, options = {name: rng.normal(size=shape) for name, shape in shapes.items()}, {}
    results = []
    for threads in (1, 3):
        leaves = {name: torch.tensor(a).float().requires_grad_() for name, a in arrays.items()}
        fusedops.set_num_threads(threads)
        try:
            out = getattr(fusedops, op)(**leaves, **options, backend="cython")
            loss = sum(one.square().sum() for one in (out if isinstance(out, tuple) else (out,)))
            results.append(torch.autograd.grad(loss, list(leaves.values())))
        finally:
            fusedops.set_num_threads(None)
    assert set(threads_of_onednn) == {1}
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


#: Functions from the message, a weight and a loss to gradients by the message, and those wanted.
PASSES = {
    "by the message": (lambda x, w, loss: torch.autograd.grad(loss, x), {"message"}),
    "by a weight": (lambda x, w, loss: torch.autograd.grad(loss, w), {"weight_m1"}),
    "by both": (lambda x, w, loss: torch.autograd.grad(loss, (x, w)), {"message", "weight_m1"}),
    "to be differentiated": (
        lambda x, w, loss: torch.autograd.grad(loss, x, create_graph=True),
        {"message"},
    ),
    "into grad": (lambda x, w, loss: loss.backward(), {"message", "weight_m1"}),
    "into one grad": (lambda x, w, loss: loss.backward(inputs=[x]), {"message"}),
}


@needs_torch
@pytest.mark.parametrize("leaf", [True, False], ids=["leaves", "results"])
@pytest.mark.parametrize("name", PASSES)
def test_a_large_pass_computes_the_gradients_that_it_wants(name, leaf, monkeypatch):
    """Forces are gradients by positions alone, though weights require theirs too."""
    from fusedops._frame.bridge import autograd

    run_pass, wanted = PASSES[name]
    given = {name: torch.tensor(array) for name, array in sample(2, 2).items()}
    x, w = (given[name].requires_grad_() for name in ("message", "weight_m1"))
    used = {"message": x if leaf else x * 1, "weight_m1": w if leaf else w * 1}
    made = []
    pull_back = on_cpu.backward

    def note(kernels, a, y, **options):
        made.append({name[1:] for name, slot in zip(y._fields, y, strict=True) if slot is not None})
        pull_back(kernels, a, y, **options)

    monkeypatch.setattr(on_cpu, "backward", note)
    monkeypatch.setattr(autograd, "_LARGE", 0)
    # A plan of an earlier call holds the limit of its time.
    op = partial(fusedops.so2_convolution, gate_channels=4, backend="cython")
    out = op(**{**given, **used, "message": used["message"][:4], "radial": None})[0]
    found = run_pass(x, w, out.square().sum())
    assert made == [wanted]
    exact = op(**{**given, "message": x[:4], "radial": None})[0]
    leaves = {"message": x, "weight_m1": w}
    expected = torch.autograd.grad(exact.square().sum(), [leaves[n] for n in sorted(wanted)])
    found = found or [leaves[n].grad for n in sorted(wanted)]
    for one, other in zip(found, expected, strict=True):
        assert error(one.detach().numpy(), other.numpy()) < 1e-13
    if name.startswith("into"):
        assert (w.grad is None) == ("weight_m1" not in wanted)


@needs_torch
@pytest.mark.parametrize(
    "backend", ["torch", "cython", "numba", pytest.param("triton", marks=needs_triton)]
)
def test_messages_are_not_kept_for_frozen_weights(backend):
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


@pytest.mark.parametrize("precision", PRECISE)
def test_products_are_as_precise_as_asked(place, precision):
    """tf32 needs a GPU; elsewhere its products are float32."""
    if place[0] != "torch":
        pytest.skip("gradients are torch's")
    given = {n: torch.tensor(a).float() for n, a in sample(2, 2, channels=16).items()}
    leaves = [array.requires_grad_() for array in given.values()]
    results = []
    for backend, option in (("torch", None), (place[1], precision)):
        options = {"gate_channels": 4, "backend": backend, "precision": option}
        out = fusedops.so2_convolution(**given, **options)
        loss = sum(one.square().sum() for one in out)
        results.append([*out, *torch.autograd.grad(loss, leaves)])
    arrays = [[array.detach().numpy() for array in result] for result in results]
    errors = [error(one, two) for one, two in zip(*arrays, strict=True)]
    assert max(errors) < 4 * PRECISE[precision]
    if place[1] == "triton" and precision == "bf16":
        assert max(errors[:2]) > 2**-14, "factors aren't rounded"


def test_bad_precisions_name_the_argument():
    op, given = fusedops.so2_convolution, sample(2, 2)
    with pytest.raises(ValueError, match="precision is 'fp8'; it should be"):
        op(**given, gate_channels=4, precision="fp8")
    with pytest.raises(ValueError, match="precision is 'bf16'; with float64 it should be None or"):
        op(**given, gate_channels=4, precision="bf16")
    if HAS_TORCH:
        from fusedops.nn import SO2Convolution

        with pytest.raises(ValueError, match="SO2Convolution: precision is 'fp8'; it should be"):
            SO2Convolution(4, 4, 1, 1, precision="fp8")


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


def test_rows_that_overlap_or_go_backwards(exact):
    given = sample(2, 2)
    for array in (given["message"][::-1], np.broadcast_to(given["message"][:1], (5, 9, 3))):
        found, want = (
            fusedops.so2_convolution(**{**given, "message": a}, gate_channels=4, backend=exact)
            for a in (array, array.copy())
        )
        assert all(np.array_equal(one, other) for one, other in zip(found, want, strict=True))


@needs_torch
@pytest.mark.parametrize("frozen", [True, False], ids=["forces", "training"])
def test_a_weight_that_needs_no_gradient_gets_none(frozen):
    given = {name: torch.from_numpy(array) for name, array in sample(2, 1).items()}
    leaves = [a.requires_grad_() for n, a in given.items() if not (frozen and "weight" in n)]
    out, gates = fusedops.so2_convolution(**given, gate_channels=4)
    (out.square().sum() + gates.sum()).backward()
    assert all(leaf.grad is not None and leaf.grad.any() for leaf in leaves)
    assert all(("weight" in n and frozen) == (a.grad is None) for n, a in given.items())


@needs_torch
def test_third_derivatives():
    """The third derivatives of x σ(g) by g, and of SiLU, are equal to torch's own."""

    def thirds(function):
        x = torch.linspace(-2, 2, 4, dtype=torch.float64).view(1, 4, 1).requires_grad_()
        g = torch.full((1, 1), 0.3, dtype=torch.float64, requires_grad=True)
        value = function(g, x).square().sum()
        for _ in range(3):
            found = torch.autograd.grad(value, (g, x), create_graph=True)
            value = sum(dx.pow(3).sum() for dx in found)
        return [dx.detach().numpy() for dx in found]

    def plain(g, x):
        return torch.cat([torch.nn.functional.silu(x[:, :1]), x[:, 1:] * g[:, None].sigmoid()], 1)

    for one, other in zip(thirds(fusedops.gate_activation), thirds(plain), strict=True):
        assert error(one, other) < 1e-12


@pytest.mark.parametrize("lmax", [0, 1, 3])
def test_gates_turn_with_their_features(place, lmax):
    rng = np.random.default_rng(lmax)
    matrices = wigner_d(rng.normal(size=(6, 3)), lmax)
    x = rng.normal(size=(6, (lmax + 1) ** 2, 4))
    gates = rng.normal(size=(6, 4 * lmax))
    gate = fusedops.gate_activation
    (out,) = run(gate, place, {"gates": gates, "x": x}, layout="l")
    (after,) = run(gate, place, {"gates": gates, "x": matrices @ x}, layout="l")
    assert error(after, matrices @ out) < 1e-13
    (major,) = run(gate, place, {"gates": gates, "x": x[:, m_major_order(lmax)]})
    assert error(major, out[:, m_major_order(lmax)]) < 1e-15


def test_an_order_between_others_has_a_weight():
    given = sample(2, 2)
    given["weight_m1"] = None
    with pytest.raises(TypeError, match="weight_m1 is None; it should be an array, as a larger"):
        fusedops.so2_convolution(**given, gate_channels=4)


@pytest.mark.parametrize(
    ("op", "given", "message"),
    [
        ("so2_convolution", {"message": np.ones((5, 8, 3))}, r"message has shape \(5, 8, 3\); it "),
        ("so2_convolution", {"gate_channels": 5}, r"weight_m0 .* with gate_channels 5; it should"),
        ("so2_convolution", {"radial": np.ones((5, 17))}, r"radial has shape \(5, 17\); it should"),
        ("gate_activation", {"x": np.ones((2, 8, 3))}, r"x has shape \(2, 8, 3\); it should be \("),
        ("gate_activation", {"mmax": 1}, r"x has shape \(2, 9, 3\); it should be \(E, M, C\) with"),
        ("gate_activation", {"mmax": 9}, r"x has shape \(2, 9, 3\); it should be \(E, M, C\) with"),
    ],
)
def test_sizes_that_do_not_fit(op, given, message):
    right = {**sample(2, 2), "gate_channels": 4}
    if op == "gate_activation":
        right = {"gates": np.ones((2, 6)), "x": np.ones((2, 9, 3))}
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
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
    want = expected(given, 2, 1, gates or 0)
    for one, other in zip(found if gates else (found,), want, strict=False):
        assert error(one.detach().numpy(), other) < 1e-13
    one = found[0] if gates else found
    one.square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def network(kind=None):
    """Return a network of radial functions, and its input."""
    torch.manual_seed(0)
    Linear = torch.nn.Linear
    layers = Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.SiLU(), Linear(5, 9, bias=False)
    return torch.nn.Sequential(*layers).to(kind), torch.randn(7, 6).to(kind)


@pytest.fixture
def served(monkeypatch):
    """Have our products serve few edges too, and list the shapes of the weights."""
    from fusedops import nn

    shapes, ours = [], nn.so2_convolution

    def note(x, weight, **options):
        shapes.append(tuple(weight.shape))
        return ours(x, weight, **options)

    monkeypatch.setattr(nn, "MANY", 0)
    monkeypatch.setattr(nn, "so2_convolution", note)
    return shapes


@needs_torch
def test_radial_functions_have_our_products_and_torchs_derivatives(served):
    from fusedops.nn import radial_products

    found = []
    for kind in (torch.float32, torch.float64):
        net, x = network(kind)
        leaves = [x.requires_grad_(), *net.parameters()]
        with radial_products(x):
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
    from fusedops import nn

    net, x = network(torch.float64 if why == "float64" else torch.float32)
    x = x[None] if why == "batches" else x
    if why == "a subclass":
        x = x.as_subclass(type("Own", (torch.Tensor,), {}))
    if why == "few":
        monkeypatch.setattr(nn, "MANY", 1000)
    if why == "compile":
        monkeypatch.setattr(nn, "traced", lambda: True)
    with torch.autocast("cpu", enabled=why == "autocast"):
        with nn.radial_products(x, "torch" if why == "a backend" else None):
            found = net(x)
        expected = net(x)
    assert not served
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@needs_torch
def test_a_radial_function_of_another_width_raises_torchs_error(served):
    from fusedops.nn import radial_products

    net, x = network()
    with radial_products(x), pytest.raises(RuntimeError, match="mat1 and mat2"):
        net(x[:, 1:])


@needs_torch
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sphere_channels": 0}, "sphere_channels is 0; it should be at least 1"),
        ({"mmax": 3}, "mmax is 3; it should be from 0 to 2, as lmax is 2"),
        ({"lmax": 9, "mmax": 9}, "mmax is 9; it should be from 0 to 8, as lmax is 9"),
        ({"internal_weights": False}, "edge_channels_list is None; it should have sizes"),
        ({"backend": "fast"}, "backend is 'fast'; it should be one of"),
        ({"extra_m0_output_channels": -3}, "extra_m0_output_channels is -3; it should be at least"),
    ],
)
def test_bad_sizes_of_a_module(given, message):
    from fusedops.nn import SO2Convolution

    right = {"sphere_channels": 3, "m_output_channels": 2, "lmax": 2, "mmax": 2}
    with pytest.raises(ValueError, match=f"SO2Convolution: {message}"):
        SO2Convolution(**{**right, **given})


@needs_torch
@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        (None, TypeError, "x_edge is None; it should be given"),
        ((5, 3), ValueError, r"x_edge has shape \(5, 3\); it should be \(5, 6\)"),
        ((4, 6), ValueError, r"x_edge has shape \(4, 6\); it should be \(5, 6\)"),
    ],
)
def test_bad_edges_of_a_module(shape, kind, message):
    from fusedops.nn import SO2Convolution

    module = SO2Convolution(3, 2, 2, 1, internal_weights=False, edge_channels_list=[6, 5])
    with pytest.raises(kind, match=f"SO2Convolution: {message}"):
        module(torch.randn(5, 7, 3), None if shape is None else torch.randn(shape))


@needs_torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("lmax", "mmax"), [(1, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("gates", [None, 8])
def test_a_module_loads_the_state_of_fairchems(lmax, mmax, gates):
    layers = pytest.importorskip(
        "fairchem.core.models.uma.nn.so2_layers", reason="fairchem-core is not installed"
    )
    from fairchem.core.models.uma.common.so3 import CoefficientMapping

    from fusedops.nn import SO2Convolution

    torch.manual_seed(0)
    given = (6, 4, lmax, mmax, CoefficientMapping(lmax, mmax), False, [7, 5], gates)
    theirs = layers.SO2_Convolution(*given).double()
    ours = SO2Convolution(*given).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(9, message_rows(lmax, mmax), 6, dtype=torch.float64, requires_grad=True)
    x_edge = torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    found = []
    for module in (ours, theirs):
        out = module(x, x_edge)
        out = out if gates else (out,)
        loss = sum(one.pow(3).sum() for one in out)
        gradients = torch.autograd.grad(loss, (x, x_edge, *module.parameters()), create_graph=True)
        second = torch.autograd.grad(gradients[0].square().sum(), (x, x_edge))
        names = [name for name, _ in module.named_parameters()]
        found.append([*out, *gradients[:2], *second])
        found.append([dict(zip(names, gradients[2:], strict=True))[n] for n in sorted(names)])
    for one, other in zip(found[0] + found[1], found[2] + found[3], strict=True):
        assert error(one.detach().numpy(), other.detach().numpy()) < 1e-12
