"""fusedops.compat.fairchem with a stand-in for fairchem, whose backends are plain torch.

`test_compat_fairchem.py` has the tests with fairchem itself.
"""

from __future__ import annotations

import copy
import enum
import gc
import importlib
import importlib.metadata
import itertools
import logging
import pickle
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
import fusedops.compat.fairchem as uma  # noqa: E402

NODES, EDGES, CHANNELS = 5, 9, 3
DEGREES = [(1, 1), (2, 1), (2, 2), (3, 0), (4, 2)]
#: Sums of some dozens of products of numbers near one, in different orders.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}


class Mapping:
    """The orders of coefficients: l-major with |m| ≤ mmax, and m-major."""

    def __init__(self, lmax, mmax):
        self.lmax, self.mmax = lmax, mmax
        kept = [(l, m) for l in range(lmax + 1) for m in range(-min(l, mmax), min(l, mmax) + 1)]
        major = sorted(kept, key=lambda lm: (abs(lm[1]), lm[1] < 0, lm[0]))
        self.m_size = [sum(m == order for _, m in kept) for order in range(mmax + 1)]
        self.to_m = torch.tensor([[float(row == column) for column in kept] for row in major])
        self.coefficient_index = torch.tensor([l * l + l + m for l, m in kept])


class Mode(str, enum.Enum):
    GENERAL = "general"
    UMAS_FAST_PYTORCH = "umas_fast_pytorch"
    UMAS_FAST_GPU = "umas_fast_gpu"
    LATER = "later"


class ExecutionBackend:
    supports_fused_edgewise = False

    @staticmethod
    def validate(lmax, mmax, settings):
        pass

    @staticmethod
    def prepare_model_for_inference(model):
        pass

    @staticmethod
    def prepare_wigner(wigner, wigner_inv, mappingReduced, coefficient_index):
        if coefficient_index is not None:
            wigner, wigner_inv = wigner[:, coefficient_index], wigner_inv[:, :, coefficient_index]
        to_m = mappingReduced.to_m.to(wigner.dtype)
        return to_m @ wigner, wigner_inv @ to_m.T

    @staticmethod
    def node_to_edge_wigner_permute(x_full, edge_index, wigner):
        return wigner @ torch.cat([x_full[edge_index[0]], x_full[edge_index[1]]], dim=2)

    @staticmethod
    def permute_wigner_inv_edge_to_node(x_message, wigner_inv, scatter_target, num_nodes):
        turned = wigner_inv @ x_message
        return turned.new_zeros(num_nodes, *turned.shape[1:]).index_add(0, scatter_target, turned)

    @staticmethod
    def edge_degree_scatter(
        x,
        radial_output,
        wigner_inv,
        scatter_target,
        m_0_num_coefficients,
        sphere_channels,
        rescale_factor,
    ):
        radial = radial_output.view(-1, m_0_num_coefficients, sphere_channels)
        turned = wigner_inv[:, :, :m_0_num_coefficients] @ radial
        return x.index_add(0, scatter_target, turned / rescale_factor)


class UMASFastPytorchBackend(ExecutionBackend):
    @staticmethod
    def prepare_model_for_inference(model):
        model.converted = True


class UMASFastGPUBackend(UMASFastPytorchBackend):
    supports_fused_edgewise = True

    @staticmethod
    def validate(lmax, mmax, settings):
        raise ValueError("umas_fast_gpu requires CUDA")


THEIRS = {
    Mode.GENERAL: ExecutionBackend,
    Mode.UMAS_FAST_PYTORCH: UMASFastPytorchBackend,
    Mode.UMAS_FAST_GPU: UMASFastGPUBackend,
    Mode.LATER: ExecutionBackend,
}


@pytest.fixture
def fairchem(program):
    """The stand-in, with no backend of ours."""
    *packages, _ = itertools.accumulate(uma.MODULE.split("."), "{}.{}".format)
    for name in packages:
        program(name, __path__=[])
    backends = {backend.__name__: backend for backend in THEIRS.values()}
    yield program(uma.MODULE, ExecutionMode=Mode, _EXECUTION_BACKENDS=dict(THEIRS), **backends)
    uma.unregister()


@pytest.fixture
def backends(fairchem):
    """Ours, by the mode's name."""
    uma.register()
    return {mode.value: backend() for mode, backend in fairchem._EXECUTION_BACKENDS.items()}


def dense(blocks, lmax):
    """Return packed blocks (E, P) as matrices (E, L, L)."""
    size = (lmax + 1) ** 2
    ranges = [range(l * l, (l + 1) ** 2) for l in range(lmax + 1)]
    where = torch.tensor([row * size + column for own in ranges for row in own for column in own])
    matrices = blocks.new_zeros(len(blocks), size * size)
    return matrices.index_copy(1, where, blocks).view(-1, size, size)


class Problem:
    """Random arrays of a model with two layers, and the model."""

    def __init__(self, lmax, mmax, dtype=torch.float64):
        torch.manual_seed(lmax + 10 * mmax)
        self.lmax, self.mmax = lmax, mmax
        self.mapping = Mapping(lmax, mmax)
        rows = (mmax + 1) * (lmax + 1) - mmax * (mmax + 1) // 2
        L, P = (lmax + 1) ** 2, sum((2 * l + 1) ** 2 for l in range(lmax + 1))
        self.edge_index = torch.randint(NODES, (2, EDGES))
        shapes = {
            "x": (NODES, L, CHANNELS),
            "wigner": (EDGES, P),
            "wigner_inv": (EDGES, P),
            "envelope": (EDGES, 1, 1),
            "embedding": (EDGES, (lmax + 1) * CHANNELS),
            "radial": (EDGES, rows * 2 * CHANNELS),
        }
        self.leaves = {
            name: (torch.randn(shape, dtype=dtype) / 2).requires_grad_()
            for name, shape in shapes.items()
        }

    def energy(self, backend):
        """Return a sum over nodes, by the steps of a UMA, with squares for activations."""
        x, wigner, wigner_inv, envelope, embedding, radial = self.leaves.values()
        wigner, wigner_inv = dense(wigner, self.lmax), dense(wigner_inv, self.lmax)
        index = self.mapping.coefficient_index if self.mmax < self.lmax else None
        wigner, wigner_inv = backend.prepare_wigner(wigner, wigner_inv, self.mapping, index)
        wigner_inv = wigner_inv * (envelope if wigner_inv.ndim == 3 else envelope[:, 0])
        target = self.edge_index[1]
        x = backend.edge_degree_scatter(
            x, embedding, wigner_inv, target, self.lmax + 1, CHANNELS, 5.0
        )
        for _ in range(2):
            message = backend.node_to_edge_wigner_permute(x, self.edge_index, wigner)
            message = self.mix(message * self.factors(radial))
            x = x + backend.permute_wigner_inv_edge_to_node(message, wigner_inv, target, NODES)
        return (x**3).sum()

    def mix(self, message):
        return message[..., :CHANNELS] * message[..., CHANNELS:].sum(2, keepdim=True) / 10

    def factors(self, radial):
        """Return the factors of a message's rows; +m and −m share theirs."""
        sizes = [2 * CHANNELS * size for size in self.mapping.m_size]
        first, *others = (
            part.unflatten(1, (-1, 2 * CHANNELS)) for part in radial.split(sizes, dim=1)
        )
        return torch.cat([first, *itertools.chain(*zip(others, others, strict=True))], dim=1)


def derivatives(energy, leaves):
    """Return the energy, its gradients, and the gradients of the sum of their squares."""
    first = torch.autograd.grad(energy, leaves, create_graph=True)
    square = sum((dx * dx).sum() for dx in first)
    return [energy, *first, *torch.autograd.grad(square, leaves)]


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        tolerance = TOLERANCE[b.dtype] * float(b.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("lmax", "mmax"), DEGREES)
def test_values_and_derivatives_are_those_of_plain_torch(backends, lmax, mmax, dtype):
    problem = Problem(lmax, mmax, dtype)
    leaves = list(problem.leaves.values())
    expected = derivatives(problem.energy(ExecutionBackend()), leaves)
    assert_close(derivatives(problem.energy(backends["general"]), leaves), expected)


def test_one_backend_may_serve_models_of_several_orders(backends):
    for mmax in (2, 1, 0, 2):
        problem = Problem(2, mmax)
        assert_close([problem.energy(backends["general"])], [problem.energy(ExecutionBackend())])


@pytest.mark.parametrize("offset", [0, 2])
def test_both_ends_and_an_offset_in_the_place_of_targets(backends, offset):
    """Before 2.22 the sums got both ends, with sources of other processes, and an offset."""
    problem = Problem(2, 1)
    x, wigner_inv = problem.leaves["x"][:2], dense(problem.leaves["wigner_inv"], 2)
    ends = torch.stack([problem.edge_index[0] + 7, problem.edge_index[1] % 2 + offset])
    message = torch.randn(EDGES, 7, CHANNELS, dtype=torch.float64)
    ours, target = backends["general"], ends[1] - offset
    ours.mmax = 1
    rotate, embed = ours.permute_wigner_inv_edge_to_node, ours.edge_degree_scatter
    radial = problem.leaves["embedding"], wigner_inv
    assert torch.equal(
        rotate(message, wigner_inv, ends, 2, offset), rotate(message, wigner_inv, target, 2)
    )
    assert torch.equal(
        embed(x, *radial, ends, 3, CHANNELS, 5.0, offset),
        embed(x, *radial, target, 3, CHANNELS, 5.0),
    )


@pytest.fixture
def sorts(monkeypatch):
    """A list that grows with every graph that is sorted."""
    found, sort = [], fusedops.Edges._sorted
    monkeypatch.setattr(
        fusedops.Edges, "_sorted", lambda self, *args: (found.append(self), sort(self, *args))
    )
    return found


def test_a_graph_is_sorted_once(backends, sorts):
    problem = Problem(2, 2)
    index, target = problem.edge_index, problem.edge_index[1]
    x, wigner = problem.leaves["x"], dense(problem.leaves["wigner"], 2)
    for backend in (backends["general"], backends["umas_fast_gpu"]):
        for _ in range(3):
            message = backend.node_to_edge_wigner_permute(x, index, wigner)[..., :CHANNELS]
            backend.permute_wigner_inv_edge_to_node(message, wigner, target, NODES)
    assert len(sorts) == 2


@pytest.mark.parametrize("by", ["torch", "numpy"])
def test_a_graph_is_read_again_after_a_write(backends, sorts, by):
    problem = Problem(1, 1)
    index, x, wigner = problem.edge_index, problem.leaves["x"], dense(problem.leaves["wigner"], 1)
    forth = backends["general"].node_to_edge_wigner_permute
    forth(x, index, wigner)
    if by == "torch":
        index[0, 0] = (index[0, 0] + 1) % NODES
    else:
        index.numpy()[0, 0] = (index[0, 0] + 1) % NODES
    found = forth(x, index, wigner)
    assert len(sorts) == 2
    assert torch.equal(found, fusedops.node_to_edge_wigner_permute(x, index.clone(), wigner))


@pytest.mark.parametrize(("inference", "reads"), [(False, [1, 1, 2]), (True, [1, 2, 3])])
def test_a_tensor_elsewhere_is_read_by_its_version(monkeypatch, inference, reads):
    """Comparing values would wait for a GPU; in inference mode no version counts writes."""

    class Elsewhere(torch.Tensor):
        is_cpu = False

    found = []
    monkeypatch.setattr(fusedops.Edges, "read", lambda *args, **options: found.append(args))
    with torch.inference_mode(inference):
        index = torch.zeros(2, 3, dtype=torch.int64).as_subclass(Elsewhere)
        count = []
        for step in range(3):
            if step == 2:
                index[0, 0] = 1
            uma.edges_of(index, NODES)
            count.append(len(found))
    assert count == reads


def test_edges_go_with_their_tensor(backends, sorts):
    problem = Problem(1, 1)
    index = problem.edge_index.clone()
    x, wigner = problem.leaves["x"], dense(problem.leaves["wigner"], 1)
    backends["general"].node_to_edge_wigner_permute(x.detach(), index, wigner.detach())
    (edges,) = map(weakref.ref, sorts)
    sorts.clear()
    del index
    gc.collect()
    assert edges() is None


def calls():
    return {swap.name: (swap.calls, swap.traced) for swap in fusedops.compat.swaps()}


def test_torch_compile(backends):
    problem = Problem(2, 1)
    energy = problem.energy(ExecutionBackend())
    (expected,) = torch.autograd.grad(energy, problem.leaves["x"])
    backend = copy.copy(backends["umas_fast_gpu"])
    found = torch.compile(problem.energy, backend="aot_eager", fullgraph=True)(backend)
    assert_close([found], [energy])
    assert_close(torch.autograd.grad(found, problem.leaves["x"]), [expected])
    assert calls()["umas_fast_gpu"] == (0, 5)


def test_registered_and_not(fairchem):
    """A backend of the user's own comes back, too."""
    table = fairchem._EXECUTION_BACKENDS
    theirs = {**THEIRS, Mode.GENERAL: type("Own", (ExecutionBackend,), {})}
    table[Mode.GENERAL] = theirs[Mode.GENERAL]
    uma.unregister()
    assert table == theirs
    for _ in range(2):
        uma.register()
        ours = dict(table)
        uma.register()
        assert table == ours
        for mode in set(THEIRS) - {Mode.LATER}:
            assert issubclass(ours[mode], uma.EdgeOps)
            assert issubclass(ours[mode], ExecutionBackend)
        assert table[Mode.LATER] is ExecutionBackend
        for _ in range(2):
            uma.unregister()
            assert table == theirs


def test_rotations_are_counted_by_mode(backends):
    model = Problem(1, 1)
    for _ in range(2):
        model.energy(backends["general"])
        assert calls() == {"general": (5, 0), "umas_fast_pytorch": (0, 0), "umas_fast_gpu": (0, 0)}
        uma.unregister()
        assert calls() == {}
        uma.register()


@pytest.mark.parametrize("turbo", [False, True])
def test_register_logs_the_modes_that_it_serves(monkeypatch, fairchem, caplog, turbo):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.24.0")
    with caplog.at_level(logging.INFO, "fusedops"):
        for _ in range(2):
            uma.register(turbo=turbo)
    (line,) = caplog.messages
    assert line.startswith("fairchem-core 2.24.0: fusedops serves general, umas_fast_pytorch")
    assert line.endswith("umas_fast_gpu" if turbo else "stays: see turbo")
    with caplog.at_level(logging.INFO, "fusedops"):
        uma.register(turbo=not turbo)
    assert len(caplog.messages) == 2
    assert issubclass(fairchem._EXECUTION_BACKENDS[Mode.UMAS_FAST_GPU], uma.EdgeOps) != turbo


def test_nitro_bypasses_us_with_a_warning(program, fairchem, caplog):
    class MLIPPredictUnit:
        def _load_nitro_model(self, checkpoint):
            if checkpoint != "uma-s-1p2p1":
                raise RuntimeError("is not supported in nitro mode")
            return checkpoint

    theirs = MLIPPredictUnit._load_nitro_model
    program(uma.PREDICTOR, MLIPPredictUnit=MLIPPredictUnit)
    for name in ("fairchem.core.units", "fairchem.core.units.mlip_unit"):
        program(name)
    uma.register()
    uma.register()
    with pytest.raises(RuntimeError, match="not supported"):
        MLIPPredictUnit()._load_nitro_model("uma-m-1p1")
    assert not caplog.messages
    assert MLIPPredictUnit()._load_nitro_model("uma-s-1p2p1") == "uma-s-1p2p1"
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("fusedops", "WARNING")
    assert "Nitro, which calls no execution backend" in record.message
    uma.unregister()
    assert MLIPPredictUnit._load_nitro_model is theirs


@pytest.mark.parametrize("turbo", [None, False, True])
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_fairchem_keeps_its_turbo_mode_on_a_gpu(monkeypatch, fairchem, gpu, turbo):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    uma.register(turbo=turbo)
    table = fairchem._EXECUTION_BACKENDS
    ours = not gpu if turbo is None else turbo
    assert issubclass(table[Mode.UMAS_FAST_GPU], uma.EdgeOps) == ours
    assert issubclass(table[Mode.UMAS_FAST_PYTORCH], uma.EdgeOps)


def test_threads_register_one_class(fairchem):
    start = threading.Barrier(8)

    def work():
        start.wait()
        uma.register()
        return fairchem._EXECUTION_BACKENDS[Mode.GENERAL]

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(work) for _ in range(8)]
    assert len({each.result() for each in found}) == 1


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("mode", uma.MODES)
def test_a_backend_is_copied_and_pickled(backends, mode, registered):
    backend = backends[mode]
    backend.mmax = 1
    if not registered:
        uma.unregister()
    for again in (copy.deepcopy(backend), pickle.loads(pickle.dumps(backend))):
        assert type(again) is type(backend)
        assert again.mmax == 1


def test_matrices_of_another_model_change_nothing(backends):
    """As where threads or models share a backend."""
    torch.manual_seed(0)
    backend, mapping = backends["general"], Mapping(2, 2)
    message, target = torch.randn(5, 9, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    edge_vec = torch.randn(5, 3, dtype=torch.float64)
    D = uma.wigner_d(edge_vec, 2)
    _, packed = backend.prepare_wigner(*uma._frames(2, edge_vec), mapping, None)
    _, dense = backend.prepare_wigner(D, D.mT.contiguous(), mapping, None)
    found = [
        backend.permute_wigner_inv_edge_to_node(message, wigner_inv, target, 2)
        for wigner_inv in (packed, dense)
    ]
    assert_close(found[:1], found[1:])


def backbone(backend, lmax, *layers):
    """Return a stand-in for fairchem's backbone."""
    model = torch.nn.Sequential(*layers)
    model.backend, model.lmax = backend, lmax
    return model


@pytest.mark.parametrize(("lmax", "mmax"), [(2, 2), (2, 1), (3, 2)])
def test_turbo_takes_any_degree_on_any_device(backends, lmax, mmax):
    backend = backends["umas_fast_gpu"]
    model = backbone(backend, lmax)
    backend.validate(lmax, mmax, None)
    backend.prepare_model_for_inference(model)
    assert model.converted
    assert not backend.supports_fused_edgewise


class SO2_Convolution(torch.nn.Module):
    """fairchem's layer with internal weights, for lmax = 1 and two channels."""

    def __init__(self, linear=torch.nn.Linear):
        super().__init__()
        self.sphere_channels = self.m_output_channels = 2
        self.lmax = self.mmax = 1
        self.extra_m0_output_channels = 2
        self.fc_m0 = linear(4, 6)
        self.so2_m_conv = torch.nn.ModuleList([torch.nn.Module()])
        self.so2_m_conv[0].fc = linear(2, 4, bias=False)
        self.rad_func = None


class GateActivation(torch.nn.Module):
    """fairchem's gates, for lmax = 1 and two channels."""

    mmax, m_prime = 1, True


class Edgewise(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.so2_conv, self.act = layer, GateActivation()

    def forward(self, message):
        out, gates = self.so2_conv(message)
        return self.act(gates, out)


def test_a_prepared_model_has_our_layers(backends):
    theirs = SO2_Convolution().double()
    backend = backends["general"]
    model = backbone(backend, 1, Edgewise(theirs))
    backend.prepare_model_for_inference(model)
    assert isinstance(model[0].so2_conv, fusedops.nn.SO2Convolution)
    names = {"fc_m0.weight", "fc_m0.bias", "so2_m_conv.0.fc.weight"}
    assert {f"0.so2_conv.{name}" for name in names} == set(model.state_dict())
    assert model[0].so2_conv.fc_m0 is theirs.fc_m0
    message = torch.randn(5, 4, 2, dtype=torch.float64)
    gates, first = theirs.fc_m0(message[:, :2].flatten(1)).split([2, 4], dim=1)
    real, imaginary = theirs.so2_m_conv[0].fc.weight.chunk(2)
    plus, minus = message[:, 2], message[:, 3]
    pair = plus @ real.T - minus @ imaginary.T, minus @ real.T + plus @ imaginary.T
    rows = torch.stack([first[:, :2], first[:, 2:], *pair], dim=1)
    expected = rows * gates.sigmoid()[:, None]
    expected[:, 0] = torch.nn.functional.silu(rows[:, 0])
    assert_close([model(message)], [expected])


def test_a_mixture_of_experts_stays(backends):
    class MOLE(torch.nn.Linear):
        pass

    theirs = SO2_Convolution(MOLE)
    backend = backends["general"]
    model = backbone(backend, 1, Edgewise(theirs))
    backend.prepare_model_for_inference(model)
    assert model[0].so2_conv is theirs


def test_without_fairchem(monkeypatch):
    monkeypatch.setitem(sys.modules, "fairchem", None)
    for name in [name for name in sys.modules if name.startswith("fairchem.")]:
        monkeypatch.delitem(sys.modules, name)

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    uma.unregister()
    with pytest.raises(ImportError, match=r"not installed; .*\(pip install 'fairchem-core"):
        uma.register()


@pytest.mark.parametrize("has", ["no module", "other methods"])
def test_an_old_fairchem(fairchem, monkeypatch, has):
    if has == "no module":
        monkeypatch.delitem(sys.modules, uma.MODULE)
    else:
        monkeypatch.setattr(fairchem, "ExecutionBackend", type("ExecutionBackend", (), {}))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.15.0")
    with pytest.raises(ImportError, match=r"is 2\.15\.0; it should be 2\.16 or newer"):
        uma.register()
    assert fairchem._EXECUTION_BACKENDS == THEIRS


def test_a_package_that_fairchem_lacks_is_named_by_python(monkeypatch):
    def lacking(name):
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra")

    monkeypatch.setattr(importlib, "import_module", lacking)
    with pytest.raises(ModuleNotFoundError, match="hydra"):
        uma.register()
