"""Layers that are more than a weight and a bias: modules call them, or refuse them by name."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

import formulas  # noqa: E402
import fusedops  # noqa: E402
from formulas import randomized  # noqa: E402
from fusedops.nn import (  # noqa: E402
    DynamicShortConvolution,
    PairTransition,
    SO2Convolution,
    TriangleAttention,
    TriangleMultiplicativeUpdate,
)

# torch says that the older norms and its quantization will go, and of caches that it compiles them.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{start}")
    for start in (
        ".*weight_norm.*deprecated:FutureWarning",
        ".*quant:UserWarning",
        ".*quant:DeprecationWarning",
        ".*lru_cache:UserWarning",
    )
]

C = 6


class Adapted(nn.Module):
    """A layer and the product of two thin matrices, as PEFT's LoRA has them."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        rows, columns = layer.weight.shape
        self.down = nn.Parameter(torch.randn(2, columns, dtype=layer.weight.dtype))
        self.up = nn.Parameter(torch.randn(rows, 2, dtype=layer.weight.dtype))

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.T @ self.up.T


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def adapter(parent, name):
    setattr(parent, name, Adapted(getattr(parent, name)))


def by_peft(parent, name):
    peft = pytest.importorskip("peft")
    layer = getattr(parent, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=2, target_modules=[name], init_lora_weights=False)
        peft.inject_adapter_in_model(config, parent)
    assert getattr(parent, name) is not layer
    parent.double()


def subclass(parent, name):
    getattr(parent, name).__class__ = Doubled


def forward_hook(parent, name):
    getattr(parent, name).register_forward_hook(lambda module, given, out: 2 * out)


def forward_pre_hook(parent, name):
    getattr(parent, name).register_forward_pre_hook(lambda module, given: (3 * given[0],))


def own_forward(parent, name):
    layer = getattr(parent, name)
    before = layer.forward
    layer.forward = lambda x: before(x) * 2


def by_weight_norm(parent, name):
    """A hook before the forward computes the weight, as in spectral_norm and in pruning."""
    torch.nn.utils.weight_norm(getattr(parent, name))
    with torch.no_grad():
        getattr(parent, name).weight_g.mul_(2)


def parametrized(parent, name):
    parametrizations.weight_norm(getattr(parent, name))
    with torch.no_grad():
        getattr(parent, name).parametrizations.weight.original0 *= 2


def parametrized_subclass(parent, name):
    subclass(parent, name)
    parametrized(parent, name)


WAYS = {
    way.__name__: way
    for way in (
        *(adapter, by_peft, subclass, forward_hook, forward_pre_hook, own_forward),
        *(by_weight_norm, parametrized, parametrized_subclass),
    )
}


def so2_formula(self, x, mask):
    """Messages of lmax = 2 and mmax = 1: rows 0 to 2, then cosine and sine of order 1."""
    gates, first = self.fc_m0(x[:, :3].flatten(1)).split([5, 12], 1)
    cosine, sine = (
        self.so2_m_conv[0]["fc"](x[:, rows].flatten(1)) for rows in (slice(3, 5), slice(5, 7))
    )
    (rc, ic), (rs, js) = cosine.chunk(2, 1), sine.chunk(2, 1)
    return torch.cat([first, rc - js, rs + ic, gates], 1)


def convolution_formula(self, x, mask):
    kernels = self.kernel_generator(x).unflatten(-1, (C, 3))
    windows = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1)
    return F.silu((kernels * windows).sum(-1))


def pairs():
    mask = (torch.rand(2, 4, 4) > 0.3).double()
    mask.diagonal(dim1=-2, dim2=-1).fill_(1)
    return torch.randn(2, 4, 4, C).double(), mask


def edges():
    return torch.randn(3, 7, 3).double(), None


def tokens():
    return torch.randn(2, 5, C).double(), None


#: A module, its formula, its input, and its layers.
MODULES = {
    "outgoing": (
        lambda: TriangleMultiplicativeUpdate(C, 5, bias=True),
        *(formulas.update, pairs, ("p_in", "g_in", "p_out", "g_out")),
    ),
    "incoming-hidden": (
        lambda: TriangleMultiplicativeUpdate(C, 5, "incoming", gate="hidden"),
        *(formulas.update, pairs, ("p_in", "g_out")),
    ),
    "starting": (
        lambda: TriangleAttention(C, 3, 2, bias=True),
        *(formulas.attention, pairs, ("linear", *(f"mha.linear_{part}" for part in "qgo"))),
    ),
    "ending": (
        lambda: TriangleAttention(C, 3, 2, starting=False),
        *(formulas.attention, pairs, ("mha.linear_k", "mha.linear_v")),
    ),
    "transition": (
        lambda: PairTransition(C, 5),
        *(formulas.transition, pairs, ("fc1", "fc2", "fc3")),
    ),
    "so2": (
        lambda: SO2Convolution(3, 4, 2, 1, extra_m0_output_channels=5),
        *(so2_formula, edges, ("fc_m0", "so2_m_conv.0.fc")),
    ),
    "convolution": (
        lambda: DynamicShortConvolution(C, 3),
        *(convolution_formula, tokens, ("kernel_generator.w1", "kernel_generator.w2")),
    ),
}
LAYERS = {name: layers for name, (*_, layers) in MODULES.items()}


def example(name):
    torch.manual_seed(0)
    make, formula, given, _ = MODULES[name]
    return randomized(make()), formula, *given()


def run(name, module, x, mask):
    if name == "so2":
        out, gates = module(x)
        return torch.cat([out.flatten(1), gates], 1)
    if name == "convolution":
        return module(x)[0]
    return module(x) if name == "transition" else module(x, mask)


def owner(module, path):
    parent, _, name = path.rpartition(".")
    return module.get_submodule(parent), name


def derivatives(module, y, x):
    """Return y, and its first and second derivatives."""
    given = [x, *(p for p in module.parameters() if p.requires_grad)]
    first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
    norm = sum(each.square().sum() for each in first)
    return [y, *first, *torch.autograd.grad(norm, given)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, paths in LAYERS.items() for path in paths]
)
def test_layers_are_called(name, path, way, monkeypatch):
    monkeypatch.setattr(fusedops.nn, "MANY", 0)
    module, formula, x, mask = example(name)
    plain = run(name, module, x, mask)
    WAYS[way](*owner(module, path))
    x.requires_grad_()
    got, want = run(name, module, x, mask), formula(module, x, mask)
    assert not torch.allclose(want, plain)
    torch.testing.assert_close(
        derivatives(module, got, x), derivatives(module, want, x), rtol=1e-8, atol=1e-8
    )
    with torch.no_grad():
        torch.testing.assert_close(run(name, module, x, mask), want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["outgoing", "starting", "transition", "so2", "convolution"])
def test_hooks_of_the_backward_run(name, monkeypatch):
    monkeypatch.setattr(fusedops.nn, "MANY", 0)
    module, _, x, mask = example(name)
    layer, seen = module.get_submodule(LAYERS[name][0]), []
    layer.register_full_backward_hook(lambda module, given, out: seen.append(out[0]))
    run(name, module, x.requires_grad_(), mask).sum().backward()
    assert len(seen) == 1


def test_hooks_of_all_modules_run():
    module, formula, x, mask = example("outgoing")
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, out: seen.append(type(module).__name__)
    )
    try:
        got = module(x, mask)
    finally:
        handle.remove()
    assert seen.count("Linear") == 4
    torch.testing.assert_close(got, formula(module, x, mask))


class Halving(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) / 2


#: A layer of another class or shape, by the module, and by the layer's owner and name.
OTHERS = {
    "RMSNorm": ("outgoing", "norm_in", nn.RMSNorm(C)),
    "subclass": ("outgoing", "norm_in", Halving(C)),
    "another-eps": ("outgoing", "norm_in", nn.LayerNorm(C, 0.1)),
    "more-axes": ("outgoing", "norm_in", nn.LayerNorm((4, C))),
    "no-norm": ("outgoing", "norm_in", nn.Identity()),
    "no-norm-of-attention": ("starting", "layer_norm", nn.Identity()),
    "bias-of-queries": ("starting", "mha.linear_q", nn.Linear(C, 6)),
    "bias-of-an-order": ("so2", "so2_m_conv.0.fc", nn.Linear(6, 16)),
    "one-more": ("convolution", "kernel_generator.last", nn.Tanh()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_layers_are_called(other, monkeypatch):
    monkeypatch.setattr(fusedops.nn, "MANY", 0)
    name, path, layer = OTHERS[other]
    module, formula, x, mask = example(name)
    parent, last = owner(module, path)
    parent.register_module(last, layer.double())
    torch.testing.assert_close(run(name, module, x, mask), formula(module, x, mask))


@pytest.mark.parametrize("name", ["outgoing", "starting"])
def test_quantized_layers_are_called(name):
    module, formula, x, mask = example(name)
    module, x, mask = module.float(), x.float(), mask.float()
    exact = run(name, module, x, mask)
    parent, last = owner(module, LAYERS[name][0])
    quantized = torch.ao.quantization.quantize_dynamic(
        nn.ModuleDict({last: getattr(parent, last)}), {nn.Linear}, inplace=False
    )[last]
    setattr(parent, last, quantized)
    with torch.no_grad():
        got, want = run(name, module, x, mask), formula(module, x, mask)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert 1e-4 < (got - exact).abs().max() < 0.5


@pytest.mark.parametrize(
    ("name", "adapted"),
    [*((name, True) for name in ("outgoing", "starting", "transition", "so2")), ("so2", False)],
)
def test_compiled_modules_call_layers(name, adapted):
    """test_pairs.py compiles plain modules."""
    torch._dynamo.reset()
    module, formula, x, mask = example(name)
    if adapted:
        adapter(*owner(module, LAYERS[name][0]))
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(name, compiled, x, mask), formula(module, x, mask))


@pytest.mark.parametrize("given", ["argument", "block"])
@pytest.mark.parametrize("name", ["outgoing", "so2"])
def test_a_backend_that_calls_no_layers_is_refused(name, given):
    module, formula, x, mask = example(name)
    path = LAYERS[name][0]
    adapter(*owner(module, path))
    module.backend = "cython" if given == "argument" else None
    message = rf"{path} is more than its weight and bias, .*; backend is 'cython', and should be"
    block = fusedops.use_backend("cython") if given == "block" else nullcontext()
    with block, pytest.raises(fusedops.BackendUnavailable, match=message):
        run(name, module, x, mask)
    module.backend = "torch"
    torch.testing.assert_close(run(name, module, x, mask), formula(module, x, mask))


@pytest.mark.parametrize("more", ["hooks", "a forward of its own"])
@pytest.mark.parametrize(("name", "part"), [("starting", "mha"), ("so2", "so2_m_conv.0")])
def test_a_container_that_is_more_than_its_layers_is_refused(name, part, more):
    module, _, x, mask = example(name)
    container = module.get_submodule(part)
    if more == "hooks":
        container.register_forward_hook(lambda module, given, out: None)
    else:
        own = {"forward": lambda self, *given: None}
        container.__class__ = type("Own", (type(container),), own)
    with pytest.raises(TypeError, match=f"has {more}; it should have none, as only its layers are"):
        run(name, module, x, mask)


def test_a_forward_that_a_program_gave_all_layers_is_called(monkeypatch):
    module, _, x, mask = example("outgoing")
    linear, calls = torch.nn.Linear.forward, []

    def forward(layer, x):
        calls.append(layer)
        return linear(layer, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    run("outgoing", module, x, mask)
    assert set(calls) == {module.p_in, module.g_in, module.p_out, module.g_out}


def test_a_mask_and_radial_functions_that_do_not_fit_are_named():
    module, _, x, _ = example("outgoing")
    forward_hook(module, "p_in")
    with pytest.raises(ValueError, match=r"mask has shape \(3,\); it should broadcast to \(2, 4"):
        module(x, torch.ones(3))
    module, _, x, _ = example("so2")
    forward_hook(module, "fc_m0")
    with pytest.raises(ValueError, match="x_edge has shape"):
        module(x, torch.ones(3, 16).double())


def test_what_a_hook_sees_stays():
    module, _, x, _ = example("transition")
    seen = []
    module.fc1.register_forward_hook(lambda module, given, out: seen.append((out, out.clone())))
    with torch.no_grad():
        module(x)
    assert torch.equal(*seen[0])


def test_sixteen_bits_and_autocast_return_the_dtype_of_x():
    module, formula, x, mask = example("outgoing")
    adapter(module, "p_in")
    module, x, mask = module.float(), x.float(), mask.float()
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x, mask)
    assert got.dtype == torch.float32
    want = formula(module, x, mask).detach()
    # Products are rounded to 8 bits.
    assert (got - want).norm() < 0.03 * want.norm()
    # As kernels do, layers in float32 take an x of 16 bits.
    torch.testing.assert_close(
        module(x.bfloat16(), mask), module(x.bfloat16().float(), mask).bfloat16()
    )
    assert module.bfloat16()(x.bfloat16(), mask).dtype == torch.bfloat16
