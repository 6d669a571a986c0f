"""OpenFold's, Boltz's and cuEquivariance's calling conventions of the triangle update."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from formulas import OfBoltz, OfMultimer, OfOpenFold, update_of  # noqa: E402
from fusedops._frame.arrays import allows_tf32  # noqa: E402
from fusedops.compat import boltz, cuequivariance, openfold, openfold3, protenix  # noqa: E402

FUSED = {False: "TriangleMultiplication", True: "FusedTriangleMultiplication"}


@pytest.fixture(params=[False, True], ids=["own-projections", "fused"])
def fused(request):
    return request.param


@pytest.fixture(params=["outgoing", "incoming"])
def direction(request):
    return request.param


def modules(fused, direction):
    """Return OpenFold's module, ours with its parameters, and arguments."""
    other, z, mask = update_of(OfMultimer if fused else OfOpenFold, direction)
    ours = getattr(openfold, f"{FUSED[fused]}{direction.title()}")(6, 5).double()
    ours.load_state_dict(other.state_dict())
    return other, ours, z.detach(), mask


def test_state_dicts_load_both_ways(fused, direction):
    other, ours, z, mask = modules(fused, direction)
    state, want = ours.state_dict(), other(z, mask)
    assert state.keys() == other.state_dict().keys()
    torch.testing.assert_close(ours(z, mask), want)
    again, *_ = update_of(OfMultimer if fused else OfOpenFold, direction)
    again.load_state_dict(state)
    assert torch.equal(again(z, mask), want)
    names = torch.nn.ModuleDict({"stack": ours}).state_dict().keys()
    assert names == {f"stack.{name}" for name in state}


def test_a_renamed_layer_keeps_its_parameters():
    """A chunk is another tensor, and the whole of a DTensor that FSDP2 has sharded."""
    update = openfold.FusedTriangleMultiplicationOutgoing(6, 5)
    state = update.state_dict(keep_vars=True)
    assert all(tensor in set(update.parameters()) for tensor in state.values())


@pytest.mark.parametrize("add", [False, True])
def test_inference_in_place(fused, direction, add):
    """OpenFold counts on z + update where it asks for the sum; a fused update alone is apart."""
    other, ours, z, mask = modules(fused, direction)
    want = other(z, mask) + (z if add else 0)
    given = z.clone()
    with torch.no_grad():
        got = ours(given, mask, inplace_safe=True, _add_with_inplace=add, _inplace_chunk_size=4)
    assert (got is given) == (add or not fused)
    torch.testing.assert_close(got, want)
    assert torch.equal(given, z) == (fused and not add)


def test_fast_kernels_leave_z_alone(direction):
    """OpenFold 3 returns the update alone for them, and Protenix a new sum if H = C."""
    other, z, mask = update_of(OfOpenFold, direction, (6, 6))
    ours = getattr(openfold, f"TriangleMultiplication{direction.title()}")(6, 6).double()
    ours.load_state_dict(other.state_dict())
    given, want = z.detach().clone(), other(z, mask)
    with torch.no_grad():
        for add in (False, True):
            options = {"inplace_safe": True, "_add_with_inplace": add}
            got = ours(given, mask, **options, use_cueq_triangle_kernels=True)
            torch.testing.assert_close(got, want)
            got = ours(given, mask, **options, triangle_multiplicative="cuequivariance")
            torch.testing.assert_close(got, want + (z if add else 0))
            assert torch.equal(given, z)


@pytest.mark.parametrize(
    "module",
    [boltz.TriangleMultiplicationOutgoing(6), openfold.FusedTriangleMultiplicationIncoming(6, 5)],
    ids=["boltz", "openfold"],
)
@pytest.mark.parametrize("called", [False, True])
def test_an_update_has_autocasts_dtype(module, called):
    """As of linear layers that torch calls."""
    z = torch.randn(1, 4, 4, 6)
    with torch.no_grad():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        want = module(z)
        if called:
            handle = module.p_in.register_forward_hook(lambda *_: None)
        with torch.autocast("cpu", torch.bfloat16):
            got = module(z)
            assert module.double()(z.double()).dtype == torch.float64
        module.float()
        assert got.dtype == torch.bfloat16
        # Products are rounded to 8 bits.
        assert (got.float() - want).norm() < 0.05 * want.norm()
        if called:
            handle.remove()
        assert module(z.bfloat16()).dtype == torch.bfloat16


def test_attributes_that_programs_read():
    block = boltz.PairformerNoSeqModule(8, 2, 0.1, post_layer_norm=True)
    assert (block.token_z, block.num_blocks, block.dropout) == (8, 2, 0.1)
    assert block.post_layer_norm
    assert block.layers[0].post_layer_norm
    assert block.layers[0].tri_att_end.inf == 1e9
    assert openfold.TriangleAttentionEndingNode(8, 4, 2, inf=1e4).inf == 1e4
    transition, x = boltz.Transition(8), torch.randn(3, 8)
    torch.nn.init.normal_(transition.fc3.weight)
    transition.silu = torch.nn.Identity()
    n = transition.norm(x)
    torch.testing.assert_close(transition(x), transition.fc3(transition.fc1(n) * transition.fc2(n)))


def test_parameters_of_a_fused_update_have_openfolds_order():
    """An optimizer's state is by their index."""
    names = [
        name for name, _ in openfold.FusedTriangleMultiplicationOutgoing(6, 5).named_parameters()
    ]
    layers = "g_out", "p_out", "norm_in", "norm_out", "p_in", "g_in"
    assert names == [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]


def test_a_layer_is_replaced_by_openfolds_name():
    _, ours, z, mask = modules(False, "outgoing")
    assert ours(z, mask).any()
    ours.linear_z = torch.nn.Linear(5, 6).double()
    torch.nn.init.zeros_(ours.p_out.weight)
    torch.nn.init.zeros_(ours.p_out.bias)
    assert ours.linear_z is ours.p_out
    assert not ours(z, mask).any()
    ours.add_module("layer_norm_out", torch.nn.Identity())
    assert ours.norm_out is ours.layer_norm_out is dict(ours.named_children())["norm_out"]
    for replace in (ours.__setattr__, ours.add_module, ours.register_module):
        with pytest.raises(AttributeError, match="linear_a_p is half of p_in; p_in should be set"):
            replace("linear_a_p", torch.nn.Linear(6, 5))
    with pytest.raises(AttributeError):
        ours.linear_a_p.weight = torch.zeros(5, 6)


@pytest.mark.parametrize("name", ["Outgoing", "Incoming", "StartingNode", "EndingNode"])
def test_esmfolds_modules_load_strictly(name):
    modeling = pytest.importorskip("transformers.models.esm.modeling_esmfold")
    torch.manual_seed(0)
    if "Node" in name:
        starting = name == "StartingNode"
        theirs = modeling.EsmFoldTriangleAttention(16, 8, 2, starting=starting, inf=1e9)
        ours = getattr(openfold, f"TriangleAttention{name}")(16, 8, 2)
    else:
        config, outgoing = SimpleNamespace(pairwise_state_dim=16), name == "Outgoing"
        theirs = modeling.EsmFoldTriangleMultiplicativeUpdate(config, _outgoing=outgoing)
        ours = getattr(openfold, f"TriangleMultiplication{name}")(16, 16)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    z, mask = torch.randn(1, 7, 7, 16), (torch.rand(1, 7, 7) > 0.3).float()
    mask[:, 2] = mask[..., 2] = 0
    found = []
    for module in (theirs, ours):
        x = z.clone().requires_grad_()
        out = module(x, mask=mask)
        # Theirs of a row without a key is not the derivative of its value.
        found.append([out, *torch.autograd.grad((out * mask[..., None]).square().sum(), x)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_esmfolds_attention_has_biases():
    names = {name for name, _ in openfold.TriangleAttention(8, 4, 2).named_parameters()}
    assert {"mha.linear_g.bias", "mha.linear_o.bias"} < names


def test_kernel_flags_change_nothing():
    _, ours, z, mask = modules(False, "outgoing")
    flags = dict.fromkeys(
        ("use_cueq_triangle_kernels", "use_triton_triangle_kernels", "use_fused_kernel"), True
    )
    got = ours(z, mask, **flags, triangle_multiplicative="cuequivariance")
    assert torch.equal(got, ours(z, mask))


def test_imported_weights_are_written_through():
    """OpenFold copies AlphaFold's weights into layers, of left and right each."""
    other, ours, z, mask = modules(False, "outgoing")
    other, *_ = update_of(OfOpenFold, "outgoing")
    layers = [name for name, _ in other.named_children()]
    assert len(layers) == 8
    with torch.no_grad():
        for name in layers:
            for part in ("weight", "bias"):
                getattr(getattr(ours, name), part).copy_(getattr(getattr(other, name), part))
    torch.testing.assert_close(ours(z, mask), other(z, mask))


class WithoutBiases(OfOpenFold):
    bias = False


@pytest.mark.parametrize("program", [protenix, openfold3], ids=["protenix", "openfold3"])
def test_protenix_and_openfold_3_have_no_biases(program, direction):
    """Their checkpoints have none, and a bias that isn't loaded would be one in a gate."""
    other, z, mask = update_of(WithoutBiases, direction)
    state = other.state_dict()
    ours = getattr(program, f"TriangleMultiplication{direction.title()}")(6, 5).double()
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(z, mask), other(z, mask))
    biased = getattr(openfold, f"TriangleMultiplication{direction.title()}")(6, 5).double()
    with pytest.raises(RuntimeError, match=r"g_in has a bias, which the state_dict lacks"):
        biased.load_state_dict(state, strict=False)


def test_a_setting_by_the_newer_api_of_tf32_is_not_in_the_way(newer_switch):
    newer_switch.fp32_precision = "tf32"
    assert allows_tf32()
    assert cuequivariance.triangle_multiplicative_update(**arguments(), precision="ieee").ndim == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((True, True), r"linear_init_params is a bool; it should have linear_z, li"),
        ((True, {"linear_z": {}}), r"linear_init_params is a dict; it should have linear_z, li"),
        (("incoming",), "_outgoing is 'incoming'; it should be True or False"),
    ],
)
def test_wrong_arguments_are_named(given, message):
    with pytest.raises(TypeError, match=message):
        openfold.TriangleMultiplicativeUpdate(6, 5, *given)


@pytest.mark.parametrize(
    "module",
    [
        boltz.TriangleMultiplicationOutgoing(5),
        openfold.TriangleMultiplicationIncoming(5, 3),
        openfold.FusedTriangleMultiplicativeUpdate(5, 3),
        protenix.TriangleMultiplicationOutgoing(5, 3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_classes_with_other_arguments_are_not_made_from_a_state_dict(module):
    kind = type(module)
    with pytest.raises(TypeError, match=rf"{kind.__name__}: from_state_dict is given by"):
        kind.from_state_dict(module.state_dict())


@pytest.mark.parametrize("bias", [False, True])
def test_openfold_3_says_whether_layers_have_biases(bias):
    names = ["linear_z", "linear_g", *[f"linear_{side}_{kind}" for side in "ab" for kind in "pg"]]
    settings = SimpleNamespace(**{name: {"bias": bias, "init": "final"} for name in names})
    update = openfold.TriangleMultiplicationIncoming(6, 5, linear_init_params=settings)
    assert ("linear_z.bias" in update.state_dict()) == bias
    assert update.direction == "incoming"
    assert (update.linear_a_p.bias is None) != bias
    assert not update._outgoing
    settings.linear_g = {"bias": not bias}
    with pytest.raises(ValueError, match="linear_init_params has biases for some layers"):
        openfold.TriangleMultiplicationIncoming(6, 5, linear_init_params=settings)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_an_openfold_module_compiles_as_one_graph():
    _, ours, z, mask = modules(False, "incoming")
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(z, mask), ours(z, mask))


@pytest.mark.parametrize("use_kernels", [False, True])
def test_boltz_exchanges_an_import(direction, use_kernels):
    other, z, mask = update_of(OfBoltz, direction, (6, 6))
    ours = getattr(boltz, f"TriangleMultiplication{direction.title()}")(6).double()
    ours.load_state_dict(other.state_dict())
    assert set(ours.state_dict()) == set(other.state_dict())
    got = ours(z, mask=mask, use_kernels=use_kernels)
    torch.testing.assert_close(got, other(z, mask))


def arguments():
    torch.manual_seed(0)
    weights = {f"{name}_in_weight": torch.randn(10, 6) for name in "pg"}
    return {"x": torch.randn(2, 3, 4, 4, 6), "p_out_weight": torch.randn(6, 5), **weights} | {
        "g_out_weight": torch.randn(6, 6)
    }


class Foreign(enum.Enum):
    """Members that another package declares: those of cuEquivariance 0.13 are no numbers."""

    TF32x3 = 2
    MXFP8 = 4
    BFLOAT16 = 5


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (None, None),
        ("None", None),
        ("default", None),
        ("IEEE", "ieee"),
        ("bfloat16", "bf16"),
        ("fp16", "fp16"),
        (cuequivariance.TriMulPrecision.NONE, None),
        (cuequivariance.TriMulPrecision.TF32, "tf32"),
        (Foreign.TF32x3, "float32"),
        (Foreign.BFLOAT16, "bf16"),
        (3, "ieee"),
        (5, "bf16"),
    ],
)
def test_precisions_of_cuequivariance(monkeypatch, given, ours):
    seen = []
    op = fusedops.triangle_multiplicative_update

    def noted(*args):
        seen.append(args[-1])
        return op(*args)

    monkeypatch.setattr(fusedops, "triangle_multiplicative_update", noted)
    got = cuequivariance.triangle_multiplicative_update(**arguments(), precision=given)
    assert seen == [ours]
    assert torch.equal(got, op(**arguments(), precision=ours))


@pytest.mark.parametrize(
    "given", ["mxfp8", Foreign.MXFP8, 4, "half", 7, True, 1.0, b"ieee"], ids=str
)
def test_other_precisions_are_refused(given):
    with pytest.raises(ValueError, match=r"update: precision is .*; it should be None, a TriMul"):
        cuequivariance.triangle_multiplicative_update(**arguments(), precision=given)


def test_a_projection_is_never_random():
    given = arguments()
    del given["p_in_weight"]
    with pytest.raises(TypeError, match="p_in_weight is None; it should be an array"):
        cuequivariance.triangle_multiplicative_update(**given)
