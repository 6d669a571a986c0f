"""TriangleMultiplicativeUpdate, against formulas in plain PyTorch and modules of programs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import formulas  # noqa: E402
from formulas import PROGRAMS, OfBoltz, OfGpuMode, OfMultimer, OfOpenFold, update_of  # noqa: E402
from fusedops import use_backend  # noqa: E402
from fusedops._frame import registry  # noqa: E402
from fusedops.compat import cuequivariance  # noqa: E402
from fusedops.nn import TriangleMultiplicativeUpdate  # noqa: E402
from fusedops.trimul.op import trimul  # noqa: E402

Z = torch.zeros(2, 4, 4, 6)


def updating(**options):
    return lambda: TriangleMultiplicativeUpdate(**{"c_z": 6, **options})


def updated(*given):
    return lambda: TriangleMultiplicativeUpdate(6, 5)(*given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (updating(c_z=0), "^TriangleMultiplicativeUpdate: c_z is 0; it should be at least 1"),
        (updating(c_hidden=0), "c_hidden is 0; it should be at least 1"),
        (updating(direction="up"), "direction is 'up'; it should be one of outgoing, incoming"),
        (updating(gate="none"), "gate is 'none'; it should be one of output, hidden"),
        (updating(precision="fp64"), "precision is 'fp64'; it should be one of None, float32, iee"),
        (updating(backend="cuda"), "backend is 'cuda'; it should be one of None, triton"),
        (updated(Z[..., :5]), r"x has shape .*; it should be \(\.\.\., N, N, 6\)"),
        (updated(Z[0, 0]), r"x has shape .*; it should be \(\.\.\., N, N, 6\)"),
        (updated(Z[:, :3]), r"x has shape .*; it should be \(\.\.\., N, N, 6\)"),
        (updated(Z, torch.ones(2, 4)), r"mask has shape \(2, 4\); it should broadcast to \(2, 4"),
        (updated(Z, [1]), "mask is a list; it should be a tensor"),
        (updated(Z.numpy()), "x is a ndarray; it should be a tensor"),
        (updated(None), "x is None; it should be a tensor"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("sizes", [(6, 5), (4, 4)])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_updates_of_other_programs_load(program, direction, sizes):
    other, x, mask = update_of(program, direction, sizes)
    state = other.state_dict()
    before = dict(state)
    loaded = TriangleMultiplicativeUpdate(*sizes, direction, gate=other.gate, bias=other.bias)
    loaded = loaded.double()
    loaded.load_state_dict(state)
    made = TriangleMultiplicativeUpdate.from_state_dict(state, direction)
    assert list(state) == list(before)
    want = other(x, mask)
    (gradient,) = torch.autograd.grad(want.square().sum(), x)
    for module in (loaded, made):
        assert (module.c_z, module.c_hidden, module.gate) == (*sizes, other.gate)
        got = module(x, mask)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
        (found,) = torch.autograd.grad(got.square().sum(), x)
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-9)
        # Our module's state_dict has Boltz's names, and can be loaded again.
        layers = ("norm_in", "p_in", "g_in", "norm_out", "p_out", "g_out")
        assert {key.split(".")[0] for key in module.state_dict()} == set(layers)
        again = TriangleMultiplicativeUpdate.from_state_dict(
            module.state_dict(), direction, gate=other.gate
        )
        assert torch.equal(again(x, mask), got)


@pytest.mark.parametrize("assign", [False, True])
def test_updates_load_inside_of_a_model(assign):
    out, x, mask = update_of(OfOpenFold)
    others = {"tri_mul_out": out, "tri_mul_in": update_of(OfMultimer, "incoming")[0]}
    state = torch.nn.ModuleDict(others).state_dict()
    block = torch.nn.ModuleDict(
        {
            where: TriangleMultiplicativeUpdate(6, 5, other.direction, bias=True)
            for where, other in others.items()
        }
    ).double()
    assert not block.load_state_dict(state, assign=assign).missing_keys
    for where, other in others.items():
        got = block[where](x, mask)
        torch.testing.assert_close(got, other(x, mask), rtol=0, atol=1e-11)
        made = TriangleMultiplicativeUpdate.from_state_dict(
            state, other.direction, prefix=f"{where}."
        )
        assert torch.equal(made(x, mask), got)


def test_a_state_dict_for_another_gate_is_refused():
    """It is refused even where C equals H and its shapes fit."""
    for program, gate in ((OfGpuMode, "output"), (OfOpenFold, "hidden")):
        other, *_ = update_of(program, sizes=(4, 4))
        module = TriangleMultiplicativeUpdate(4, gate=gate, bias=program.bias)
        message = f"gate is '{gate}'; it should be '{program.gate}' for a state_dict with these"
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict(other.state_dict())


def test_a_state_dict_with_too_much_or_too_little_is_refused():
    state = update_of(OfOpenFold)[0].state_dict()
    module = TriangleMultiplicativeUpdate(6, 5)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict(state)
    lacking = {name: tensor for name, tensor in state.items() if name != "linear_b_p.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key.*p_in\.weight"):
        TriangleMultiplicativeUpdate.from_state_dict(lacking)
    with pytest.raises(KeyError, match=r"state_dict has no p_out\.weight, linear_z\.weight or to_"):
        TriangleMultiplicativeUpdate.from_state_dict({})


def test_an_update_starts_at_zero_with_open_gates():
    module = TriangleMultiplicativeUpdate(128, 64, bias=True)
    assert not module(torch.randn(1, 3, 3, 128)).any()
    assert not module.g_in.weight.any()
    assert (module.g_in.bias == 1).all()
    assert not module.p_in.bias.any()
    deviation = module.p_in.weight.std().item() * 128**0.5
    # The deviation comes from 16384 samples.
    assert abs(deviation - 1) < 0.03


def test_an_update_takes_what_boltz_passes_and_its_own_options():
    other, x, mask = update_of(OfBoltz)
    module = TriangleMultiplicativeUpdate.from_state_dict(
        other.state_dict(), backend="numpy", max_memory=10**6, eps=1e-3, precision="ieee"
    )
    assert (module.backend, module.max_memory, module.norm_in.eps) == ("numpy", 10**6, 1e-3)
    got = module(x, mask=mask, use_kernels=True)
    other.norm_in.eps = other.norm_out.eps = 1e-3
    torch.testing.assert_close(got, other(x, mask), rtol=0, atol=1e-11)
    # Any number of batch dimensions, and no mask.
    assert torch.equal(module(x[:, None], mask[:, None]), got[:, None])
    torch.testing.assert_close(module(x[0]), other(x[:1], torch.ones(1, 7, 7).double())[0])
    assert "backend='numpy'" in repr(module)
    assert TriangleMultiplicativeUpdate(6).extra_repr() == (
        "6, c_hidden=6, direction='outgoing', gate='output'"
    )


@pytest.mark.parametrize("gate", ["output", "hidden"])
def test_an_update_of_another_width(gate):
    """cuEquivariance's function takes any width of the output, and a state_dict tells it."""
    update = formulas.randomized(TriangleMultiplicativeUpdate(6, 4, gate=gate, c_out=9))
    again = TriangleMultiplicativeUpdate.from_state_dict(update.state_dict())
    assert (again.c_z, again.c_hidden, again.c_out, again.gate) == (6, 4, 9, gate)
    x = torch.randn(2, 5, 5, 6, dtype=torch.float64)
    assert again(x).shape == (2, 5, 5, 9)
    torch.testing.assert_close(again(x), formulas.update(again, x))


@pytest.mark.parametrize(
    ("x", "weights", "autocast", "asked"),
    [
        ("float32", "float32", "bfloat16", "bf16"),
        ("float32", "float32", "float16", "fp16"),
        ("float32", "float32", None, "float32"),
        ("float32", "float64", "bfloat16", "ieee"),
        ("float64", "float64", "bfloat16", "ieee"),
        ("bfloat16", "float32", "float16", "bf16"),
        ("bfloat16", "bfloat16", None, "bf16"),
    ],
)
@pytest.mark.parametrize("of", ["module", "cuequivariance"])
@pytest.mark.usefixtures("fresh_plans")
def test_autocast_rounds_products_and_no_dtype(of, x, weights, autocast, asked, monkeypatch):
    """As in cuEquivariance: a float32 pair stays float32, and products have autocast's dtype."""
    seen, genuine = [], trimul.formula
    monkeypatch.setattr(trimul, "formula", lambda a: seen.append(a.precision) or genuine(a))
    monkeypatch.setattr(registry, "_chosen", {})
    module = TriangleMultiplicativeUpdate(6, 4).to(getattr(torch, weights))
    z = torch.randn(1, 3, 3, 6, dtype=getattr(torch, x))
    dtype = torch.bfloat16 if autocast is None else getattr(torch, autocast)
    with torch.autocast("cpu", dtype, enabled=autocast is not None), use_backend("torch"):
        if of == "module":
            out = module(z)
        else:
            names = ("norm_in", "p_in", "g_in", "norm_out", "p_out", "g_out")
            given = {f"{name}_weight": getattr(module, name).weight for name in names}
            out = cuequivariance.triangle_multiplicative_update(z, **given)
    assert seen == [asked]
    assert out.dtype == z.dtype


def test_an_update_compiles_under_autocast():
    torch._dynamo.reset()
    module, x = TriangleMultiplicativeUpdate(6, 4), torch.randn(1, 3, 3, 6)
    torch.nn.init.normal_(module.p_out.weight)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), module(x))
