"""fusedops.compat.fairchem in UMA models of fairchem, with random weights, on the CPU.

`make peer-tests` runs these tests; where fairchem-core is not installed, they are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pickle
import sys
import threading
import types
import warnings

import pytest

torch = pytest.importorskip("torch")

with warnings.catch_warnings():
    # fairchem and its packages warn as they are imported.
    warnings.simplefilter("ignore")
    pytest.importorskip("fairchem.core", reason="fairchem-core is not installed")
    pytest.importorskip("ase", reason="ase is not installed")
    from ase.build import bulk
    from fairchem.core.datasets.atomic_data import AtomicData, atomicdata_list_to_batch
    from fairchem.core.models.uma import escn_md, escn_moe
    from fairchem.core.models.uma.nn import execution_backends
    from fairchem.core.units.mlip_unit.api.inference import InferenceSettings

import fusedops.compat.fairchem as uma  # noqa: E402
from fusedops.compat import _edges, _force_steps, _uma  # noqa: E402
from fusedops.nn import SO2Convolution  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

MODES = [mode.value for mode in execution_backends.ExecutionMode if mode.value in uma.MODES]
DEGREES = [(2, 2), (2, 1), (4, 2), (0, 0)]
#: Of the largest value: the sums have another order.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SETTINGS = InferenceSettings(
    merge_mole=True, activation_checkpointing=False, external_graph_gen=False
)


@pytest.fixture
def registered():
    uma.register()
    yield
    uma.unregister()


def systems(count, dtype=torch.float64, device="cpu", size=3.9):
    """Return a batch of crystals, each of four atoms off their sites, in a cell of its own."""
    several = []
    for k in range(count):
        atoms = bulk("Cu", "fcc", a=size + 0.2 * k, cubic=True)
        atoms.numbers[:] = [29, 8, 6, 8]
        atoms.rattle(0.1, seed=k)
        atoms.info.update(charge=0, spin=0)
        several.append(AtomicData.from_ase(atoms, task_name="omat", r_data_keys=["charge", "spin"]))
    batch = atomicdata_list_to_batch(several)
    for name in ("pos", "cell", "cell_offsets"):
        batch[name] = batch[name].to(dtype)
    return batch.to(device)


def crystal(dtype, size=3.9):
    """Return a batch of one crystal."""
    return systems(1, dtype, size=size)


def model(mode, lmax=2, mmax=2, dtype=torch.float64, prepared=True, **options):
    """Return a backbone and a head, with the same weights for all modes."""
    torch.manual_seed(0)
    kind = escn_moe.eSCNMDMoeBackbone if "num_experts" in options else escn_md.eSCNMDBackbone
    backbone = kind(
        lmax=lmax,
        mmax=mmax,
        sphere_channels=16,
        hidden_channels=16,
        edge_channels=8,
        num_distance_basis=16,
        num_layers=2,
        cutoff=4.0,
        otf_graph=True,
        chg_spin_emb_type="rand_emb",
        execution_mode=mode,
        **{"direct_forces": False, "dataset_list": ["omat"], **options},
    )
    head = escn_md.MLP_EFS_Head(backbone, prefix=None, wrap_property=False)
    backbone.eval().to(dtype)
    if prepared:
        # The converted layers have the default dtype.
        backbone = backbone.prepare_for_inference(crystal(dtype), SETTINGS).to(dtype)
    return backbone, head.eval().to(dtype)


def evaluated(model, data):
    """Return energy and forces."""
    backbone, head = model
    found = head(data, backbone(data))
    return found["energy"], found["forces"]


def assert_close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        largest = float(b.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * largest)


@pytest.fixture(scope="module")
def expected():
    """The energies and forces of fairchem's general mode."""
    uma.unregister()
    return {
        (degree, dtype): evaluated(model("general", *degree, dtype), crystal(dtype))
        for degree in DEGREES
        for dtype in TOLERANCE
    }


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("mode", MODES)
def test_energies_and_forces_are_those_of_fairchem(expected, registered, mode, degree, dtype):
    ours = model(mode, *degree, dtype)
    assert isinstance(ours[0].backend, uma.EdgeOps)
    layers = list(ours[0].modules())
    assert any(isinstance(layer, SO2Convolution) for layer in layers)
    assert not {type(layer).__name__ for layer in layers} & set(_uma.LAYERS)
    joined = hasattr(execution_backends.UMASFastGPUBackend, "gate_activation")
    joined = joined and mode != "general" and degree[0] == 2
    assert ours[0].backend.supports_fused_edgewise == joined
    assert_close(evaluated(ours, crystal(dtype)), expected[tuple(degree), dtype], TOLERANCE[dtype])


@pytest.mark.parametrize("mode", MODES)
def test_normalizations_of_a_gpu(expected, registered, monkeypatch, mode):
    ours, served = model(mode), []

    def counted(name):
        primitive = getattr(_uma, name)
        return lambda *given: served.append(name) or primitive(*given)

    with monkeypatch.context() as patch:
        patch.setattr(_uma, "_by_kernels", lambda x: True)
        for name in ("layer_silu", "degree_norm"):
            patch.setattr(_uma, name, counted(name))
        found = evaluated(ours, crystal(torch.float64))
        # Two in the network of degrees and in each of two blocks, whose radial functions have two
        # each, in fast modes by a layer of ours; and the last.
        layers = 2 + 4 * (mode != "general")
        assert sorted(served) == ["degree_norm"] * 5 + ["layer_silu"] * layers
        second = hessian(ours)
    assert_close(found, expected[(2, 2), torch.float64], 1e-10)
    assert_close([second], [hessian(ours)], 1e-10)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "general"])
def test_radial_functions_compile_as_one_graph(registered, mode):
    network = model(mode)[0]._unified_radial_mlp
    x = torch.randn(7, network.W1_cat.shape[1], dtype=torch.float64)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), network(x), 1e-12)


EXPERTS = {"num_experts": 3, "use_composition_embedding": True}


@pytest.fixture(scope="module")
def expected_of_experts():
    """The energy and forces of fairchem's general mode with a mixture of experts."""
    uma.unregister()
    return evaluated(model("general", **EXPERTS), crystal(torch.float64))


@pytest.mark.parametrize("mode", MODES)
def test_merged_experts_have_fused_methods(expected_of_experts, registered, mode):
    ours = model(mode, **EXPERTS)
    fused = hasattr(execution_backends.UMASFastGPUBackend, "gate_activation")
    assert ours[0].backend.supports_fused_edgewise == (fused and mode != "general")
    assert_close(evaluated(ours, crystal(torch.float64)), expected_of_experts, 1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_experts_are_merged_after_unregister(expected_of_experts, registered, mode):
    backbone, head = model(mode, prepared=False, **EXPERTS)
    uma.unregister()
    merged = backbone.prepare_for_inference(crystal(torch.float64), SETTINGS).double()
    assert isinstance(merged.backend, uma.EdgeOps)
    assert merged.backend is not backbone.backend
    assert_close(evaluated((merged, head), crystal(torch.float64)), expected_of_experts, 1e-10)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_balanced_channels_are_fairchems(monkeypatch, mode, count):
    options = {"charge_balanced_channels": [0, 1, 2], "spin_balanced_channels": [3, 4]}
    several = systems(count)
    several["charge"], several["spin"] = several["charge"] + 2, several["spin"] + 3
    uma.unregister()
    theirs = model("general", **options)
    uma.register()
    ours = model(mode, **options)
    uma.unregister()
    ours[0].load_state_dict(theirs[0].state_dict(), strict=mode == "general")
    expected = evaluated(theirs, several.clone())
    assert_close(evaluated(ours, several.clone()), expected, 1e-10)
    assert_close([hessian(ours)], [hessian(theirs)], 1e-10)
    x, tx = torch.randn(2, len(several["pos"]), 9, 16, dtype=torch.float64)
    rest = several["natoms"], several["batch"]
    charge, tangent = torch.randn(2, count, dtype=torch.float64)

    def balanced(backbone):
        return lambda x, charge: backbone.balance_channels(x, charge, several["spin"], *rest)

    both = [balanced(of[0]) for of in (ours, theirs)]
    assert_close(*[torch.func.jvp(of, (x, charge), (tx, tangent)) for of in both], 1e-12)
    assert_close(*[torch.func.vjp(of, x, charge)[1](tx) for of in both], 1e-12)
    assert_close(*[torch.func.jacfwd(of, (0, 1))(x, charge) for of in both], 1e-12)

    def mixed(of):
        """Return the derivatives by charges of a gradient by rows, in two transforms."""
        rows = torch.func.grad(lambda x, charge: of(x, charge).pow(3).sum())
        return [torch.func.grad(lambda charge: rows(x, charge).square().sum())(charge)]

    assert_close(*map(mixed, both), 1e-12)
    several["spin"] = torch.zeros(count, dtype=torch.uint8)
    assert_close(*[[of(x, charge)] for of in both], 1e-12)
    # Processes that share atoms add their sums up, as fairchem does.
    found, shared = [], escn_md.gp_utils
    monkeypatch.setattr(shared, "initialized", lambda: True)
    monkeypatch.setattr(ours[0].balance_channels, "theirs", lambda *given: found.append(given))
    both[0](x, charge)
    assert len(found) == 1


@pytest.mark.parametrize("natoms", [[6], [1, 5]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_balanced_channels_have_the_dtype_of_rows(registered, natoms, dtype):
    backbone = model("general", charge_balanced_channels=[0, 1], spin_balanced_channels=[2])[0]
    x, natoms = torch.randn(6, 9, 16, dtype=torch.float64), torch.tensor(natoms)
    charge = torch.tensor([2, -1][: len(natoms)], dtype=dtype)
    given = x, charge, charge + 2, natoms, torch.arange(len(natoms)).repeat_interleave(natoms)
    balance = backbone.balance_channels
    assert_close([balance(*given)], [balance.theirs(*given)], 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_networks_of_radial_functions_have_our_products(expected, registered, monkeypatch, mode):
    from fusedops import _products

    served, ours = [], _products.LinearProducts._linear
    monkeypatch.setattr(_products, "MANY", 0)
    note = staticmethod(lambda *given: served.append(given) or ours(*given))
    monkeypatch.setattr(_products.LinearProducts, "_linear", note)
    found = evaluated(model(mode, dtype=torch.float32), crystal(torch.float32))
    assert_close(found, expected[(2, 2), torch.float32], TOLERANCE[torch.float32])
    # Three layers for the degree embedding, and for each of two convolutions; fast modes join two.
    assert len(served) == (9 if mode == "general" else 8)


def layers_of_nodes():
    """Return fairchem's layers of nodes, whose parameters are random."""
    from fairchem.core.models.uma.escn_md_block import SpectralAtomwise
    from fairchem.core.models.uma.nn.layer_norm import get_normalization_layer
    from fairchem.core.models.uma.nn.so3_layers import SO3_Linear

    torch.manual_seed(0)
    made = {
        "norm": get_normalization_layer("rms_norm_sh", 2, 6),
        "linear": SO3_Linear(6, 4, 2),
        "atomwise": SpectralAtomwise(6, 4, 2, 2, None),
    }
    for layer in made.values():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    return made


def replaced(layer):
    """Return ours for one of fairchem's layers."""
    parent = torch.nn.ModuleDict({"layer": layer})
    _uma.replace_layers(parent, None)
    return parent["layer"]


@pytest.mark.parametrize("name", ["norm", "linear", "atomwise"])
def test_layers_of_nodes_are_fairchems(name):
    theirs = layers_of_nodes()[name].double().eval()
    ours = replaced(layers_of_nodes()[name].double().eval())
    assert type(ours) is not type(theirs)
    assert not any(layer.training for layer in ours.modules())
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    x, tx = torch.randn(2, 3, 9, 6, dtype=torch.float64)
    x.requires_grad_()
    assert_close([ours(x)], [theirs(x)], 1e-12)
    assert_close(*[torch.func.jvp(layer, (x,), (tx,)) for layer in (ours, theirs)], 1e-12)
    assert_close([torch.vmap(ours)(x[None])[0]], [theirs(x)], 1e-12)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for layer in (ours, compiled):
        found, expected = (
            torch.autograd.grad(one(x).square().sum(), (x, *one.parameters()))
            for one in (layer, theirs)
        )
        assert_close(found, expected, 1e-12)
    assert torch.autograd.gradgradcheck(ours, x[:1].detach().requires_grad_())


def test_norms_in_another_dtype_than_they_were_made_in():
    theirs, ours = layers_of_nodes()["norm"].double(), replaced(layers_of_nodes()["norm"]).double()
    x = torch.randn(3, 9, 6, dtype=torch.float64)
    assert_close([ours(x)], [theirs(x)], 1e-12)


def test_norms_of_other_kinds_stay_fairchems():
    from fairchem.core.models.uma.nn import layer_norm

    norm = layer_norm.EquivariantRMSNormArraySphericalHarmonicsV2
    for options in ({"affine": False}, {"centering": False}, {"std_balance_degrees": False}):
        assert type(replaced(norm(2, 6, **options))) is norm


def test_layers_with_hooks_stay_fairchems(expected, registered):
    backbone, head = model("general", prepared=False)
    called, layers = [], (backbone.norm, backbone.blocks[0].edge_wise.act)
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: called.append(layer))
    backbone = backbone.prepare_for_inference(crystal(torch.float64), SETTINGS)
    found = evaluated((backbone, head), crystal(torch.float64))
    assert called == [layers[1], layers[0]]
    assert_close(found, expected[(2, 2), torch.float64], 1e-10)


def test_hooks_of_prepared_layers_are_called(expected, registered, monkeypatch):
    monkeypatch.setattr(_uma, "_by_kernels", lambda x: True)
    found = []
    for hooked in (False, True):
        backbone, head = model("general", ff_type="spectral")
        atomwise, called = backbone.blocks[0].atom_wise, []
        net = backbone.edge_degree_embedding.rad_func.net
        first = atomwise.so3_linear_1, atomwise.scalar_mlp, atomwise.scalar_mlp[0]
        for layer in (net, *net, *first) if hooked else ():
            layer.register_forward_hook(lambda layer, *_, to=called: to.append(layer))
        found.append(evaluated((backbone, head), crystal(torch.float64)))
        assert set(called) == (set((net, *net, *first)) if hooked else set())
    assert_close(*found, 1e-12)


@pytest.mark.parametrize("kind", ["so2", "all"])
def test_experts_that_are_not_merged(registered, monkeypatch, kind):
    monkeypatch.setattr(_uma, "_by_kernels", lambda x: True)
    settings = dataclasses.replace(SETTINGS, merge_mole=False)
    backbone, head = model("general", prepared=False, ff_type="spectral", moe_type=kind, **EXPERTS)
    expected = evaluated((backbone, head), crystal(torch.float64))
    backbone = backbone.prepare_for_inference(crystal(torch.float64), settings)
    assert isinstance(backbone.blocks[0].atom_wise, _uma._Atomwise)
    assert_close(evaluated((backbone, head), crystal(torch.float64)), expected, 1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_frames_of_edges_are_not_random(registered, mode):
    """As fairchem's are, which turns energies by rounding from step to step."""
    ours, data = model(mode), crystal(torch.float64)
    (energy, forces), again = evaluated(ours, data), evaluated(ours, data)
    assert torch.equal(energy, again[0])
    assert torch.equal(forces, again[1])


def test_a_precision_reaches_every_convolution():
    uma.register(precision="tf32")
    try:
        again = pickle.loads(pickle.dumps(model("umas_fast_pytorch")[0]))
        uma.register()
        exact = model("umas_fast_pytorch")[0]
    finally:
        uma.unregister()
    for backbone, want in ((again, "tf32"), (exact, None)):
        of = [layer for layer in backbone.modules() if isinstance(layer, SO2Convolution)]
        assert [layer.precision for layer in of] == [want] * 4
    with pytest.raises(ValueError, match="register: precision is 'fp8'; it should be"):
        uma.register(precision="fp8")


@pytest.mark.parametrize("degree", [(2, 2), (2, 1)])
def test_messages_multiplied_as_they_are_written(expected, registered, monkeypatch, degree):
    """As on a GPU, where the convolution gets no radial functions."""
    rotate, given = uma.node_to_edge_wigner_permute, []

    def scaled(self, x, edge_index, wigner, radial, channels):
        given.append(radial)
        edges, matrices = uma.edges_of(edge_index, len(x)), uma._matrices(wigner)
        return rotate(x, edges, matrices, radial=radial, mmax=self.mmax), None, None

    monkeypatch.setattr(uma.EdgeOps, "fused_node_to_edge_conv1_pack", scaled)
    ours = model("umas_fast_pytorch", *degree)
    found = evaluated(ours, crystal(torch.float64))
    assert len(given) == 2 * ours[0].backend.supports_fused_edgewise
    assert_close(found, expected[degree, torch.float64], 1e-10)


def test_nitro_is_named_when_it_runs(registered, monkeypatch, caplog):
    predict = pytest.importorskip("fairchem.core.units.mlip_unit.predict")
    if not hasattr(predict, "NITRO_MODEL_ID"):
        pytest.skip("before fairchem 2.24")
    nitro = types.ModuleType("fairchem.core.models.uma.uma_nitro")
    nitro.UMANitroModel = types.SimpleNamespace(
        validate=lambda *given: None, from_checkpoint=lambda checkpoint: torch.nn.Identity()
    )
    monkeypatch.setitem(sys.modules, nitro.__name__, nitro)
    unit = object.__new__(predict.MLIPPredictUnit)
    predict.PredictUnit.__init__(unit)
    unit.inference_settings, unit._inference_model_path = None, ""
    unit._requested_device = "cpu"
    checkpoint = types.SimpleNamespace(model_config={})
    monkeypatch.setattr(predict, "_checkpoint_model_name", lambda config: predict.NITRO_MODEL_ID)
    with pytest.raises(predict.UMANitroNotSupportedError):
        unit._load_nitro_model(checkpoint)
    assert "fusedops" not in caplog.text
    unit._requested_device = "cuda"
    unit._load_nitro_model(checkpoint)
    assert isinstance(unit.model.module, torch.nn.Identity)
    assert "fusedops serves nothing of it" in caplog.text


def hessian(model):
    """Return the derivatives of forces by positions, all rows in one backward pass."""
    model[1].train()  # for forces that have gradients
    data = crystal(torch.float64)
    _, forces = evaluated(model, data)

    def row(cotangent):
        return torch.autograd.grad(forces, data["pos"], cotangent, retain_graph=True)[0]

    basis = torch.eye(forces.numel(), dtype=forces.dtype)
    return torch.vmap(row)(basis.view(-1, *forces.shape))


@pytest.mark.parametrize("degree", [(2, 2), (2, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_hessians_are_those_of_fairchem(mode, degree):
    uma.unregister()
    theirs = hessian(model("general", *degree))
    uma.register()
    ours = hessian(model(mode, *degree))
    uma.unregister()
    assert_close([ours], [theirs], 1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_transforms_of_a_model_are_those_of_fairchem(mode):
    uma.unregister()
    theirs = model("general", regress_forces=False)
    uma.register()
    ours = model(mode, regress_forces=False)
    uma.unregister()
    data = systems(1)
    found = theirs[0]._generate_graph(data.clone())
    for name in ("edge_index", "cell_offsets"):
        data[name] = found[name]
    data["nedges"] = found["neighbors"]
    pos, tpos = data["pos"], torch.randn_like(data["pos"])
    results = []
    for backbone, head in (ours, theirs):
        backbone.otf_graph = False

        def energy(pos, backbone=backbone, head=head):
            moved = _force_steps.copied(data)
            moved["pos"] = pos
            return head(moved, backbone(moved))["energy"].sum()

        pushed = torch.func.jvp(torch.func.grad(energy), (pos,), (tpos,))
        results.append((torch.func.jvp(energy, (pos,), (tpos,))[1], *pushed))
    assert_close(*results, 1e-10)


def by_weights(model):
    """Return the gradients of energy and squared forces by a backbone's weights."""
    model[1].train()
    energy, forces = evaluated(model, crystal(torch.float64))
    weights = [p for p in model[0].parameters() if p.requires_grad]
    loss = energy.sum() + forces.square().sum()
    return [dw for dw in torch.autograd.grad(loss, weights, allow_unused=True) if dw is not None]


def test_training_gradients_are_those_of_fairchem():
    uma.unregister()
    theirs = by_weights(model("general", 2, 1, prepared=False))
    uma.register()
    ours = by_weights(model("general", 2, 1, prepared=False))
    uma.unregister()
    assert len(ours) > 10
    assert_close(ours, theirs, 1e-10)


def test_activation_checkpointing(expected, registered, monkeypatch):
    monkeypatch.setattr(escn_md, "ESCNMD_DEFAULT_EDGE_ACTIVATION_CHECKPOINT_CHUNK_SIZE", 32)
    ours = model("general", prepared=False, activation_checkpointing=True)
    found = evaluated(ours, crystal(torch.float64))
    assert_close(found, expected[(2, 2), torch.float64], 1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_atoms_without_neighbors(mode):
    """fairchem gives such a system one edge, with a length beyond the cutoff."""
    uma.unregister()
    try:
        energy, _ = evaluated(model("general"), crystal(torch.float64, size=20.0))
    except ValueError as refused:
        pytest.skip(f"before fairchem 2.18: {str(refused)[:50]}")
    uma.register()
    found, forces = evaluated(model(mode), crystal(torch.float64, size=20.0))
    uma.unregister()
    assert_close([found], [energy], 1e-10)
    assert not forces.any()


class Forces(torch.nn.Module):
    """A backbone and a head, and the number of their calls."""

    def __init__(self, backbone, head):
        super().__init__()
        self.backbone, self.head, self.calls = backbone, head, 0
        self.eval().requires_grad_(False)

    def forward(self, data):
        self.calls += 1
        return self.head(data, self.backbone(data))


#: fairchem joins its layers' methods from 2.23 on.
needs_fused = pytest.mark.skipif(
    not hasattr(execution_backends.UMASFastGPUBackend, "gate_activation"), reason="fairchem < 2.23"
)


@pytest.fixture
def uncaptured(monkeypatch):
    """Force steps on the CPU, whose replays evaluate anew."""
    monkeypatch.setattr(_force_steps, "_is_on_gpu", lambda tensor: True)

    def anew(compute, device, **options):
        return types.SimpleNamespace(replay=compute), None

    monkeypatch.setattr(_force_steps, "captured", anew)
    uma.register(turbo=True)
    yield
    uma.unregister()


def stepped(step, data, tolerance):
    """Compare a step with its model, and return how often it called the model."""
    ours = step.model
    torch.manual_seed(0)
    want, calls = ours(data.clone()), ours.calls
    torch.manual_seed(0)
    found = step(data.clone())
    assert list(found) == list(want)
    assert_close(found.values(), want.values(), tolerance)
    return ours.calls - calls


MOVES = "pos", "cell", "charge", "atomic_numbers"


def moved(data, what):
    """Change a batch as a simulation does."""
    generator = torch.Generator().manual_seed(1)
    if what == "pos":
        move = 0.05 * torch.randn(data["pos"].shape, generator=generator, dtype=torch.float64)
        data["pos"] = data["pos"] + move.to(data["pos"])
    elif what == "cell":
        data["cell"], data["pos"] = 0.96 * data["cell"], 0.96 * data["pos"]
    elif what == "charge":
        data["charge"] = data["charge"] + 1
    else:
        data["atomic_numbers"] = data["atomic_numbers"].flip(0)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", ["general", "umas_fast_gpu"])
def test_a_force_step_is_its_models(uncaptured, mode, count):
    merged = mode != "general"
    ours = Forces(*model(mode, regress_stress=True, prepared=merged))
    step, data = uma.ForceStep(ours, skin=0.4), systems(count)
    # The first call is the model's; later ones evaluate arrays, and twice with other pairs.
    calls = [stepped(step, data, 1e-10)]
    assert step._captured is None
    for what in ("pos", *MOVES, "pos", "pos", "pos", "pos", "pos"):
        calls.append(stepped(step, data, 1e-10))
        moved(data, what)
    assert step._captured is not None
    assert set(calls) == {1, 2}
    assert step(data)["forces"].grad_fn is None


def half(mode="umas_fast_gpu", **options):
    """Return a model whose products are TF32's, and a step of it."""
    uma.register(turbo=True, precision="tf32")
    ours = Forces(*model(mode, dtype=torch.float32, regress_stress=True, **options))
    return ours, uma.ForceStep(ours)


def of_datasets(
    kind, mode="umas_fast_gpu", dtype=torch.float64, device="cpu", merged=True, **options
):
    """Return a model whose head is merged for one of several datasets, as published ones are."""
    names = ["omat", "omat_more", "omol"]
    backbone, _ = model(mode, dtype=dtype, regress_stress=True, dataset_list=names, **options)
    head = getattr(escn_moe, kind)(
        backbone=backbone,
        dataset_names=names,
        head_cls="fairchem.core.models.uma.escn_md.MLP_EFS_Head",
        wrap_property=False,
        head_kwargs={"prefix": None, "wrap_property": False},
    )
    if merged:
        head = head.eval().to(dtype).prepare_for_inference(crystal(dtype), SETTINGS)
    return Forces(backbone, head.to(dtype)).to(device)


WRAPPERS = ["DatasetSpecificSingleHeadWrapper", "DatasetSpecificMoEWrapper"]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_force_step_of_a_model_for_several_datasets(uncaptured, kind):
    ours = of_datasets(kind)
    step, data = uma.ForceStep(ours), systems(1)
    want = ours(data.clone())
    step(data.clone())

    found = step(data.clone())
    assert step._captured is not None
    assert list(found) == list(want)
    for name, x in found.items():
        assert x.isnan().all() == (not name.startswith("omat_") or "more" in name)
        torch.testing.assert_close(x, want[name], rtol=0, atol=1e-10, equal_nan=True)


#: Methods of tensors for which the host waits, as a capture can't.
WAITS = (
    *("__bool__", "__float__", "__index__", "__int__", "bincount", "cpu", "equal", "item"),
    *("masked_select", "nonzero", "tolist", "unique"),
)


@pytest.mark.parametrize("mode", ["general", "umas_fast_gpu"])
@pytest.mark.parametrize("kind", [None, *WRAPPERS])
@pytest.mark.parametrize("experts", [False, True])
def test_a_capture_waits_for_nothing(uncaptured, monkeypatch, experts, kind, mode):
    def wait(tensor, *_, **__):
        raise RuntimeError("a capture can't wait for the host")

    def anew(compute, device, **options):
        def replay():
            with monkeypatch.context() as patch:
                for name in WAITS:
                    patch.setattr(torch.Tensor, name, wait)
                compute()

        return types.SimpleNamespace(replay=replay), None

    monkeypatch.setattr(_force_steps, "captured", anew)
    options = EXPERTS if experts else {}
    if kind is None:
        ours = Forces(*model(mode, regress_stress=True, **options))
    else:
        ours = of_datasets(kind, mode=mode, **options)
    # A mixture is merged for one system.
    step, data = uma.ForceStep(ours), systems(1 if experts else 2)
    for _ in range(3):
        step(data.clone())
    assert step._captured is not None


@pytest.mark.parametrize("kind", WRAPPERS)
def test_heads_that_are_not_merged_are_the_models(uncaptured, kind):
    step, data = uma.ForceStep(of_datasets(kind, merged=False)), systems(1)
    for _ in range(3):
        assert stepped(step, data, 1e-10) == 1
    assert step._captured is None


@needs_fused
@pytest.mark.parametrize("kind", WRAPPERS)
def test_halves_of_a_model_for_several_datasets(uncaptured, kind):
    uma.register(turbo=True, precision="tf32")
    step, data = uma.ForceStep(of_datasets(kind, dtype=torch.float32)), systems(1, torch.float32)
    for _ in range(3):
        calls = step.model.calls
        found = step(data.clone())
    assert step._captured.kept.halves
    # The model itself made none of the last step.
    assert step.model.calls == calls + 1
    assert found["omat_forces"].isfinite().all()


@needs_fused
@pytest.mark.parametrize("count", [1, 2])
def test_messages_of_a_force_step_in_halves(uncaptured, count):
    ours, step = half()
    data = systems(count, torch.float32)
    for what in MOVES:
        want = ours(data.clone())
        for _ in range(2):
            found = step(data.clone())
        assert step._captured.kept.halves
        # Forces are sums of messages that nearly cancel.
        assert_close(found.values(), want.values(), 0.02)
        assert not torch.equal(found["forces"], want["forces"])
        moved(data, what)


@needs_fused
def test_halves_of_weights_that_change_behind_torchs_back(uncaptured):
    ours, step = half()
    data = systems(1, torch.float32)
    for _ in range(2):
        step(data.clone())
    graph = step._captured
    for p in (*ours.parameters(), *ours.backbone._unified_radial_mlp.buffers()):
        p.data.mul_(1.1)
    assert_close(step(data.clone()).values(), ours(data.clone()).values(), 0.02)
    assert step._captured is graph
    assert graph.kept.halves


@needs_fused
@pytest.mark.parametrize("power", [-80, -20, 60])
def test_forces_of_any_size_in_halves(uncaptured, power):
    ours, step = half()
    data = systems(1, torch.float32)
    unit = [step(data.clone()) for _ in range(2)][-1]
    with torch.no_grad():
        ours.head.energy_block[-1].weight.mul_(2.0**power)
        ours.head.energy_block[-1].bias.mul_(2.0**power)
    for _ in range(3):
        found = step(data.clone())
    assert step._captured.kept.halves
    for name in ("energy", "forces", "stress"):
        assert torch.equal(found[name], unit[name] * 2.0**power)


@needs_fused
@pytest.mark.parametrize("layer", ["first", "last"])
def test_numbers_beyond_halves_are_the_models(uncaptured, layer):
    ours, step = half()
    data = systems(1, torch.float32)
    with torch.no_grad():
        block = ours.backbone.blocks[0 if layer == "first" else -1]
        block.edge_wise.so2_conv_1.fc_m0.weight.mul_(1e6)
    calls = [stepped(step, data, 1e-4) for _ in range(3)]
    assert step._captured.kept.halves
    # Of the capture, and the model itself.
    assert calls == [1, 2, 2]


@needs_fused
@pytest.mark.parametrize("what", ["adapter", "hook"])
def test_halves_are_for_layers_that_are_their_weights(uncaptured, what):
    ours, step = half()
    layer, data = ours.backbone.blocks[0].edge_wise, systems(1, torch.float32)
    if what == "hook":
        layer.register_forward_hook(lambda layer, given, out: 2 * out)
    else:

        class Adapted(torch.nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        layer.so2_conv_2.fc_m0.__class__ = Adapted
    for _ in range(2):
        stepped(step, data, 1e-4)
    assert not step._captured.kept.halves


@needs_fused
def test_halves_are_for_float32_where_tf32_may_round(uncaptured):
    for dtype in TOLERANCE:
        uma.register(turbo=True)
        ours = Forces(*model("umas_fast_gpu", dtype=dtype, regress_stress=True))
        step, data = uma.ForceStep(ours), systems(1, dtype)
        for _ in range(2):
            stepped(step, data, TOLERANCE[dtype])
        assert not step._captured.kept.halves


def test_a_force_step_of_given_edges(uncaptured):
    ours = Forces(*model("umas_fast_pytorch", regress_stress=True))
    data = systems(1)
    found = _force_steps.copied(data)
    found = ours.backbone._generate_graph(found)
    ours.backbone.otf_graph = False
    data["edge_index"], data["cell_offsets"] = found["edge_index"], found["cell_offsets"]
    data["nedges"] = torch.tensor([72])
    step = uma.ForceStep(ours)
    for _ in range(3):
        assert stepped(step, data, 1e-10) == 1
        moved(data, "pos")
    # Fewer edges, and then more than the graph has room for.
    full = data["edge_index"], data["cell_offsets"]
    for count in (10, 72, 2000):
        some = torch.arange(count) % 72
        data["edge_index"], data["cell_offsets"] = full[0][:, some], full[1][some]
        data["nedges"] = torch.tensor([count])
        assert stepped(step, data, 1e-10) == 1


def test_a_force_step_makes_room(uncaptured):
    ours = Forces(*model("umas_fast_pytorch", regress_stress=True))
    step, data = uma.ForceStep(ours, skin=0.2), systems(1)
    for _ in range(2):
        stepped(step, data, 1e-10)
    before = step._captured.pairs.space
    for name in ("pos", "cell"):
        data[name] = 0.7 * data[name]
    stepped(step, data, 1e-10)
    assert step._captured.pairs.space > before


@pytest.mark.parametrize("count", [1, 2])
def test_a_strained_cell_keeps_its_pairs_while_they_hold(uncaptured, monkeypatch, count):
    found, ours = [], Forces(*model("general", regress_stress=True, prepared=False))
    pairs = _force_steps._Captured._pairs
    monkeypatch.setattr(
        _force_steps._Captured, "_pairs", lambda *given: found.append(1) or pairs(*given)
    )
    step, data = uma.ForceStep(ours, skin=0.6), systems(count)
    generator = torch.Generator().manual_seed(2)
    often = []
    for k in range(24):
        stepped(step, data, 1e-10)
        size = 0.002 if k < 12 else 0.04
        strain = torch.eye(3) + size * torch.randn(3, 3, generator=generator)
        data["cell"] = data["cell"] @ strain.to(data["cell"])
        data["pos"] = data["pos"] @ strain.to(data["pos"])
        often.append(len(found))
    # Once for the graph, then rarely, and then in every other step or so.
    assert often[11] <= 3
    assert often[-1] >= often[11] + 3
    # A bound of how much nearer atoms came is one.
    graph = step._captured
    for _ in range(50):
        strain = torch.eye(3) + 0.05 * torch.randn(3, 3, generator=generator)
        cell, pos, batch = (graph.origin[name] for name in ("cell", "pos", "batch"))
        now = cell @ strain.to(cell)
        move = 0.1 * torch.randn(pos.shape, generator=generator).to(pos)
        at = pos @ strain.to(pos) + move
        far = torch.randn(200, 3, generator=generator).round().to(pos) @ now[0]
        first, second = torch.randint(4, (2, 200), generator=generator)
        after = far + at[second] - at[first]
        before = far @ torch.linalg.inv(now[0]) @ cell[0] + pos[second] - pos[first]
        near = after.norm(dim=1) < ours.backbone.cutoff
        nearer = (before.norm(dim=1) - after.norm(dim=1))[near].max()
        assert nearer <= graph._nearer(at, now, batch)


def test_many_neighbours_are_fairchems(uncaptured):
    ours = Forces(*model("umas_fast_pytorch", regress_stress=True, max_neighbors=6))
    step, data = uma.ForceStep(ours), systems(1)
    calls = [stepped(step, data, 1e-10) for _ in range(3)]
    assert calls == [1, 2, 2]


@pytest.mark.parametrize(
    "what",
    ["training", "head", "weights", "positions", "hessian", "experts", "checkpoints", "tangents"],
)
def test_a_force_step_leaves_gradients_to_the_model(uncaptured, what):
    ours = Forces(*model("umas_fast_pytorch", regress_stress=True))
    step, data = uma.ForceStep(ours), systems(1)
    context = contextlib.nullcontext()
    if what == "training":
        step.train()
    elif what == "head":
        ours.head.train()
    elif what == "weights":
        next(ours.parameters()).requires_grad_()
    elif what == "positions":
        data["pos"] = 1 * data["pos"].requires_grad_()
    elif what == "hessian":
        ours.backbone.regress_config.hessian = True
    elif what == "experts":
        ours.head.mixture = type("MOLE", (torch.nn.Module,), {})().eval()
    elif what == "checkpoints":
        ours.backbone.edge_degree_embedding.activation_checkpoint_chunk_size = 1000
    else:
        context = torch.autograd.forward_ad.dual_level()
    with context:
        for _ in range(3):
            step(_force_steps.copied(data))
    assert step._captured is None


@pytest.mark.parametrize(
    "what", ["cutoff", "max_neighbors", "stress", "buffer", "layer", "precision"]
)
def test_a_force_step_sees_other_models(uncaptured, what):
    ours = Forces(*model("umas_fast_pytorch", regress_stress=True))
    step, data = uma.ForceStep(ours), systems(1)
    for _ in range(3):
        stepped(step, data, 1e-10)
    assert step._captured is not None
    if what == "stress":
        ours.backbone.regress_config.stress = False
    elif what == "buffer":
        ours.backbone._unified_radial_mlp.W1_cat = 2 * ours.backbone._unified_radial_mlp.W1_cat
    elif what == "layer":
        ours.head.energy_block[1] = torch.nn.Tanh().eval()
    elif what == "precision":
        ours.backbone.blocks[0].edge_wise.so2_conv_1.precision = "ieee"
    else:
        setattr(ours.backbone, what, 6)
    stepped(step, data, 1e-10)
    assert step._captured is None


@pytest.mark.parametrize("kernels", [False, True])
def test_a_force_step_sees_new_weights(uncaptured, monkeypatch, kernels):
    if kernels:
        monkeypatch.setattr(_uma, "_by_kernels", lambda x: True)
    ours = Forces(*model("umas_fast_pytorch", regress_stress=True, ff_type="spectral"))
    step, data = uma.ForceStep(ours), systems(1)
    for _ in range(2):
        stepped(step, data, 1e-10)
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(1.1)
    for _ in range(3):
        stepped(step, data, 1e-10)
    # Torch doesn't count a write to `data`, as of averaged weights.
    for p in ours.parameters():
        p.data.mul_(1.1)
    stepped(step, data, 1e-10)
    copied = pickle.loads(pickle.dumps(step))
    # Another process has no kernels yet.
    assert (step._is_new, copied._is_new) == (False, True)
    assert copied._captured is None
    assert_close(copied(data.clone()).values(), ours(data.clone()).values(), 1e-10)


@pytest.mark.parametrize("version", [1, 2])
def test_atoms_on_each_other_part(uncaptured, version):
    """Within the skin, so that pairs aren't found anew."""
    step = uma.ForceStep(Forces(*model("umas_fast_pytorch", regress_stress=True)))
    step.model.backbone.radius_pbc_version = version
    data, calls = systems(1), []
    own = data["pos"].clone()
    for apart in (0, 0, 0.25, 0.1, 0.005, 0, 0.3):
        data["pos"] = own.clone()
        data["pos"][1] = own[0] + torch.tensor([0, apart, 0])
        calls.append(stepped(step, data, 1e-10))
    # The model serves atoms that are close.
    assert calls == [1, 2, 1, 1, 2, 2, 1]


def test_atoms_far_outside_of_the_cell(uncaptured):
    """As those inside of it, where the model's own graph misses edges."""
    step = uma.ForceStep(Forces(*model("umas_fast_pytorch", regress_stress=True)))
    data = systems(2)
    step(data.clone())
    own, of = data["pos"].clone(), data["cell"].index_select(0, data["batch"])
    want, misses = step.model(data.clone()), False
    for cells in torch.tensor([[0, 0, 0], [1, -2, 0], [3, 0, 5], [-4, 4, 1]]).double():
        data["pos"] = own.clone()
        shifts = (cells[:, None] * of).sum(1)
        data["pos"][::3] += shifts[::3]
        found = step(data.clone())
        assert_close(found.values(), want.values(), 1e-9)
        misses |= (step.model(data.clone())["energy"] != want["energy"]).any().item()
    assert misses


def test_positions_that_are_no_numbers(uncaptured):
    """The model has no energy, whether or not the atom is in a place without an edge."""
    ours = Forces(*model("umas_fast_pytorch", regress_stress=True))
    one = systems(1)
    data = atomicdata_list_to_batch([one.get_example(0)] * 64)
    found = ours.backbone._generate_graph(_force_steps.copied(data))
    ours.backbone.otf_graph = False
    data["edge_index"], data["cell_offsets"] = found["edge_index"], found["cell_offsets"]
    data["nedges"] = found["neighbors"]
    step = uma.ForceStep(ours)
    for _ in range(2):
        step(data.clone())
    own = data["pos"].clone()
    for bad in (float("nan"), float("inf")):
        for atom in range(196, 220, 8):
            data["pos"] = own.clone()
            data["pos"][atom, 0] = bad
            assert step(data.clone())["energy"][atom // 4].isnan()


def test_edges_that_fairchem_adds_are_no_pairs(uncaptured, monkeypatch):
    """Before fairchem 2.22 such edges fill a chunk, in front of the others."""
    ours = Forces(*model("umas_fast_pytorch", regress_stress=True))
    find = escn_md.eSCNMDBackbone._generate_graph

    def filled(self, data):
        found = find(self, data)
        ends, vector = (
            torch.zeros(2, 5).to(found["edge_index"]),
            torch.full((5, 3), 1 + self.cutoff),
        )
        parts = {"edge_index": ends, "edge_distance": vector.norm(dim=1)}
        parts["edge_distance_vec"] = vector
        for name, part in parts.items():
            whole = found[name]
            found[name] = torch.cat([part.to(whole), whole], dim=int(name == "edge_index"))
        data["scatter_target"] = found["edge_index"][1]
        return found

    monkeypatch.setattr(escn_md.eSCNMDBackbone, "_generate_graph", filled)
    step, data = uma.ForceStep(ours), systems(1)
    for _ in range(3):
        stepped(step, data, 1e-10)
        moved(data, "pos")
    assert step._captured is not None


@pytest.mark.parametrize("what", ["pbc", "natoms"])
def test_a_force_step_finds_pairs_of_another_box(uncaptured, what):
    step = uma.ForceStep(Forces(*model("umas_fast_pytorch", regress_stress=True)))
    data = systems(2)
    for _ in range(3):
        stepped(step, data, 1e-10)
    if what == "pbc":
        data["pbc"] = torch.tensor([[True, True, False]] * 2)
    else:
        data["natoms"], data["batch"] = torch.tensor([3, 5]), torch.tensor([0] * 3 + [1] * 5)
    assert stepped(step, data, 1e-10) == 2


def test_a_capture_that_fails(uncaptured, monkeypatch):
    def fails(compute, device, **options):
        compute()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(_force_steps, "captured", fails)
    step, data = uma.ForceStep(Forces(*model("umas_fast_gpu", regress_stress=True))), systems(1)
    stepped(step, data, 1e-10)
    with pytest.warns(RuntimeWarning, match="ForceStep: .* capturing failed: .*not permitted"):
        stepped(step, data, 1e-10)
    assert stepped(step, data, 1e-10) == 1
    assert "_generate_graph" not in vars(step.model.backbone)


def test_a_force_step_that_is_interrupted(uncaptured, monkeypatch):
    step, data = uma.ForceStep(Forces(*model("umas_fast_gpu", regress_stress=True))), systems(1)
    for _ in range(3):
        stepped(step, data, 1e-10)

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(step._captured, "_keep", interrupted)
    data["pos"] = data["pos"].flip(0)
    with pytest.raises(KeyboardInterrupt):
        step(data.clone())
    assert step._captured is None
    stepped(step, data, 1e-10)


def test_results_of_a_force_step_in_a_tuple(uncaptured):
    class Pair(Forces):
        def forward(self, data):
            found = super().forward(data)
            return found["energy"], [found["forces"]]

    step, data = uma.ForceStep(Pair(*model("umas_fast_gpu", regress_stress=True))), systems(1)
    for _ in range(2):
        energy, (forces,) = step(data.clone())
    for found, kept in (
        (energy, step._captured.outputs[0]),
        (forces, step._captured.outputs[1][0]),
    ):
        assert found.data_ptr() != kept.data_ptr()
        assert kept.grad_fn is None


def test_force_steps_of_threads(uncaptured, monkeypatch):
    step, data = uma.ForceStep(Forces(*model("umas_fast_gpu", regress_stress=True))), systems(1)
    for _ in range(2):
        stepped(step, data, 1e-10)
    want = step(data.clone())["energy"]
    other, entered = data.clone(), threading.Event()
    run = step._captured.runs[1].replay
    moved(other, "charge")
    thread = threading.Thread(target=step, args=(other,))

    def meanwhile():
        if not entered.is_set():
            entered.set()
            thread.start()
            thread.join(0.3)
        run()

    step._captured.runs[1] = types.SimpleNamespace(replay=meanwhile)
    found = step(data.clone())["energy"]
    thread.join()
    assert_close([found], [want], 1e-10)


def test_a_force_step_reads_torchs_newer_switch(uncaptured, newer_switch):
    newer_switch.fp32_precision = "ieee"
    step, data = uma.ForceStep(Forces(*model("umas_fast_gpu", regress_stress=True))), systems(1)
    for _ in range(2):
        stepped(step, data, 1e-10)
    assert step._captured is not None
    newer_switch.fp32_precision = "tf32"
    step(data.clone())
    assert step._captured is None


def test_a_force_step_keeps_no_edges(uncaptured):
    step = uma.ForceStep(Forces(*model("umas_fast_gpu", regress_stress=True)))
    gc.collect()
    before = len(_edges._read)
    for _ in range(3):
        step(systems(1))
    gc.collect()
    assert len(_edges._read) == before


def test_bad_force_steps():
    with pytest.raises(TypeError, match=r"ForceStep: model has 0 backbones .*; it should have one"):
        uma.ForceStep(torch.nn.Identity())
    old = model("general")[0]
    del old.regress_config
    with pytest.raises(TypeError, match=r"model is fairchem 2\.16's; it should be of 2\.17"):
        uma.ForceStep(old)
    with pytest.raises(ValueError, match="ForceStep: skin is 0; it should be a positive number"):
        uma.ForceStep(Forces(*model("general")), skin=0)
    for name in ("graphs", "turbo"):
        with pytest.raises(TypeError, match=f"register: {name} is a str; it should be True or F"):
            uma.register(**{name: "no"})


def test_a_predictor_has_force_steps(monkeypatch):
    predict = pytest.importorskip("fairchem.core.units.mlip_unit.predict")
    if not hasattr(predict, "NITRO_MODEL_ID"):
        pytest.skip("before fairchem 2.24")
    own = predict.MLIPPredictUnit._lazy_init, predict.MLIPPredictUnit._load_nitro_model
    uma.register(turbo=True, graphs=True)
    try:
        unit = object.__new__(predict.MLIPPredictUnit)
        predict.PredictUnit.__init__(unit)
        unit.inference_settings = InferenceSettings(compile=True, merge_mole=True)
        unit.move_to_device = lambda: None
        with pytest.raises(predict.UMANitroNotSupportedError, match="graphs=True"):
            unit._load_nitro_model(None)
        compiled = []
        monkeypatch.setattr(torch, "compile", lambda model, **_: compiled.append(model) or model)
        own_kind = predict._ModelWrapper
        for device, options, kind in (
            ("cuda", {}, uma.ForceStep),
            ("cpu", {}, own_kind),
            ("cuda", {"regress_hessian": True}, own_kind),
            ("cuda", {"direct_forces": True}, own_kind),
            ("cuda", None, own_kind),
        ):
            backbone, head = model("general", dtype=torch.float32, prepared=False, **options or {})
            if options is None:
                # Another model of fairchem's.
                backbone = torch.nn.Linear(1, 1)
                backbone.prepare_for_inference = lambda *_, self=backbone: self
            inner = predict.HydraModelV2 if hasattr(predict, "HydraModelV2") else None
            inner = inner or sys.modules["fairchem.core.models.base"].HydraModelV2
            unit.model, unit.device = predict._ModelWrapper(inner(backbone, {"efs": head})), device
            compiled.clear()
            unit._lazy_init(systems(1, torch.float32))
            assert type(unit.model) is kind
            assert len(compiled) == (kind is own_kind)
            assert type(unit.model.module) is inner
            assert unit.inference_settings.compile
        uma.register(turbo=True)
        assert predict.MLIPPredictUnit._lazy_init is own[0]
    finally:
        uma.unregister()
    assert (predict.MLIPPredictUnit._lazy_init, predict.MLIPPredictUnit._load_nitro_model) == own


@pytest.mark.gpu
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_model_for_several_datasets_by_a_graph(kind):
    uma.register(turbo=True)
    try:
        step, data = uma.ForceStep(of_datasets(kind, device="cuda")), systems(1, device="cuda")
        for _ in range(3):
            want, calls = step.model(data.clone()), step.model.calls
            found = step(data.clone())
            for name, x in found.items():
                torch.testing.assert_close(x, want[name], rtol=0, atol=1e-8, equal_nan=True)
        assert step.model.calls == calls
    finally:
        uma.unregister()


@pytest.mark.gpu
@needs_fused
def test_halves_by_a_graph():
    try:
        ours, step = half()
        ours.cuda()
        data = systems(2, torch.float32, "cuda")
        for at in range(6):
            if at > 1:
                moved(data, MOVES[at % 4])
            calls, want = ours.calls, ours(data.clone())
            found = step(data.clone())
            assert_close(found.values(), want.values(), 0.02)
            assert ours.calls - calls == {0: 3, 1: 4}.get(at, 1)
        for p in (*ours.parameters(), *ours.backbone._unified_radial_mlp.buffers()):
            p.data.mul_(1.1)
        assert_close(step(data.clone()).values(), ours(data.clone()).values(), 0.02)
        assert step._captured.kept.halves
    finally:
        uma.unregister()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("mode", "dtype"), [("umas_fast_gpu", torch.float32), ("general", None)])
def test_a_force_step_by_a_graph(mode, dtype, count):
    dtype = dtype or torch.float64
    uma.register(turbo=True)
    try:
        made = model(mode, dtype=dtype, regress_stress=True, prepared=mode != "general")
        step = uma.ForceStep(Forces(*made).cuda(), skin=0.4)
        data = systems(count, dtype, "cuda")
        calls = [stepped(step, data, 10 * TOLERANCE[dtype])]
        for what in ("pos", *MOVES, "pos", "pos", "pos", "pos", "pos"):
            calls.append(stepped(step, data, 10 * TOLERANCE[dtype]))
            moved(data, what)
        # Forms of weights are kept, and a write to `data` changes no version.
        for p in step.parameters():
            p.data.mul_(1.1)
        calls.append(stepped(step, data, 10 * TOLERANCE[dtype]))
    finally:
        uma.unregister()
    # Before the model's step, and before the capture and its warming up, kernels are compiled.
    assert calls == [2, 3, *[0] * 10]


@pytest.mark.gpu
def test_a_model_that_waits_for_the_gpu_is_not_captured():
    """Its steps are the model's own from then on, and other models have graphs."""

    class Waiting(Forces):
        def forward(self, data):
            assert data["pos"].isfinite().all().item()
            return super().forward(data)

    uma.register(turbo=True)
    try:
        made = model("umas_fast_gpu", dtype=torch.float32, regress_stress=True)
        steps = [uma.ForceStep(kind(*made).cuda()) for kind in (Waiting, Forces)]
        tolerance, data = 10 * TOLERANCE[torch.float32], systems(1, torch.float32, "cuda")
        stepped(steps[0], data, tolerance)
        with pytest.warns(RuntimeWarning, match="ForceStep: .* capturing failed"):
            stepped(steps[0], data, tolerance)
        found = [[stepped(step, data, tolerance) for _ in range(3)] for step in steps]
    finally:
        uma.unregister()
    assert found == [[1, 1, 1], [2, 3, 0]]


def test_a_step_of_the_bench_agrees_with_fairchem(monkeypatch):
    import benches  # noqa: F401
    from bench import uma as bench
    from fusedops._catalogue import BOTH

    sizes = {"sphere_channels": 16, "hidden_channels": 16, "edge_channels": 8, "num_layers": 1}
    monkeypatch.setattr(bench, "SIZES", {**bench.SIZES, **sizes})
    bench._truth.cache_clear()
    step = bench.uma("cpu")
    few = step.checks[0].make()
    truth = step.reference(few)
    ours = step.ours(few, "torch", "cpu", "float32", None)
    assert isinstance(ours.model.backend, uma.EdgeOps)
    theirs = bench._Model(few, "general", "cpu", "float32")
    assert not isinstance(theirs.model.backend, uma.EdgeOps)
    steps = ours.steps()
    assert {"messages", "messages, backward", "nodes", "degree embedding"} <= set(steps)
    for found in (steps[BOTH](), theirs.steps()[BOTH]()):
        assert_close([value.double() for value in found], truth, step.tolerance)
    for function in steps.values():
        function()
    bench._truth.cache_clear()


@pytest.mark.parametrize("name", ["uma_md", "uma_md_tf32"])
def test_a_simulated_step_of_the_bench_agrees_with_fairchem(monkeypatch, name):
    import benches  # noqa: F401
    from bench import uma as bench
    from bench.timing import GRAPHS
    from fusedops._catalogue import BOTH

    sizes = {"sphere_channels": 16, "hidden_channels": 16, "edge_channels": 8, "num_layers": 1}
    monkeypatch.setattr(bench, "SIMULATED", {**bench.SIMULATED, **sizes})
    bench._their_model.cache_clear()
    step = getattr(bench, name)("cpu")
    few = step.checks[0].make()
    truth = step.reference(few)
    ours = step.ours(few, GRAPHS, "cpu", "float32", None)
    for found in (ours.steps()[BOTH](), bench._simulated("general", few, "cpu")[BOTH]()):
        assert_close([value.double() for value in found], truth, 1e-4)
    assert not torch.backends.cuda.matmul.allow_tf32
    bench._their_model.cache_clear()


def test_water_of_the_bench():
    import benches  # noqa: F401
    from bench import uma as bench

    water = bench._water(3)
    bonds = water.xyz.reshape(3, 3, 3)[:, 1:] - water.xyz.reshape(3, 3, 3)[:, :1]
    lengths = (bonds**2).sum(-1) ** 0.5
    assert abs(lengths - 0.9572).max() < 1e-12
    assert abs((bonds[:, 0] * bonds[:, 1]).sum(-1) / 0.9572**2 + 0.25072).max() < 1e-5


def test_edges_of_the_bench_are_those_of_ase():
    from ase import Atoms
    from ase.neighborlist import neighbor_list

    import benches  # noqa: F401
    from bench import uma as bench

    for atoms in (bench._salt(2, 1, 1), bench._ubiquitin()):
        system = Atoms(atoms.numbers, atoms.xyz, cell=atoms.cell, pbc=True)
        target, source, images = neighbor_list("ijS", system, bench.CUTOFF)
        want = sorted(zip(source, target, *images.T, strict=True))
        assert sorted(zip(*atoms.edges, *atoms.images.T, strict=True)) == want
