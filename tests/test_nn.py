"""DynamicShortConvolution and TriangleMultiplicativeUpdate, against formulas in plain PyTorch."""

from __future__ import annotations

import copy
from typing import get_args

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import formulas  # noqa: E402
import fusedops  # noqa: E402
import fusedops.nn  # noqa: E402
from formulas import PROGRAMS, OfBoltz, OfGpuMode, OfMultimer, OfOpenFold, update_of  # noqa: E402
from fusedops import use_backend  # noqa: E402
from fusedops._frame import registry  # noqa: E402
from fusedops.compat import cuequivariance  # noqa: E402
from fusedops.nn import DynamicShortConvolution, TriangleMultiplicativeUpdate  # noqa: E402
from fusedops.trimul.op import trimul  # noqa: E402

F = torch.nn.functional

#: For sums of a dozen products of numbers near one, in float64, in different orders.
TOLERANCE = {"rtol": 0, "atol": 1e-12}


def identity(x):
    return x


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


GENERATOR_ACTIVATIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": identity,
    "linear": identity,
    "gelu_10": lambda x: F.gelu(x).clip(-10, 10),
    "gelu_python": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "hardswish": F.hardswish,
    "laplace": lambda x: 0.5 + 0.5 * torch.erf((x - 0.707107) / (0.282095 * 2**0.5)),
    "mish": lambda x: x * F.softplus(x).tanh(),
    "relu2": lambda x: x.clip(0) ** 2,
    "relu6": lambda x: x.clip(0, 6),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "prelu": lambda x: torch.where(x > 0, x, 0.25 * x),
    "sqrtsoftplus": lambda x: F.softplus(x) ** 0.5,
    "xielu": lambda x: torch.where(
        x > 0, 0.8 * x * x + 0.5 * x, (x.clip(max=-1e-6).expm1() - x) * 0.8 + 0.5 * x
    ),
    **{f"gelu_{n}": tanh_gelu for n in ("accurate", "fast", "new", "python_tanh", "pytorch_tanh")},
}


def example(hidden_size=6, kernel_size=4, dtype=torch.float64, **options):
    """Return a module with random parameters, and 2 × 9 tokens."""
    module = DynamicShortConvolution(hidden_size, kernel_size, **options).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module, torch.randn(2, 9, hidden_size, dtype=dtype)


def formula(module, x, generator_input=None, activation=F.silu):
    weights = dict(module.named_parameters())
    W = module.kernel_size
    hidden = F.silu(
        F.linear(
            x if generator_input is None else generator_input, weights["kernel_generator.w1.weight"]
        )
    )
    last = weights["kernel_generator.w2.weight"], weights["kernel_generator.w2.bias"]
    windows = F.pad(x, (0, 0, W - 1, 0)).unfold(1, W, 1)
    return activation((windows * F.linear(hidden, *last).reshape(windows.shape)).sum(-1))


def gradients(module, y, *inputs):
    return formulas.gradients(y, *module.parameters(), *inputs)


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7, 12])
@pytest.mark.parametrize(("name", "activation"), [("silu", F.silu), (None, identity)])
def test_values_and_gradients_are_those_of_the_formula(kernel_size, name, activation):
    module, x = example(kernel_size=kernel_size, activation=name)
    x.requires_grad_()
    y, cache = module(x)
    want = formula(module, x, activation=activation)
    assert cache is None
    torch.testing.assert_close(y, want, **TOLERANCE)
    torch.testing.assert_close(gradients(module, y, x), gradients(module, want, x), **TOLERANCE)


def test_the_type_of_an_activation_names_them_all():
    assert get_args(fusedops.nn.GeneratorActivation) == tuple(fusedops.nn.GENERATOR_ACTIVATIONS)


@pytest.mark.parametrize("name", fusedops.nn.GENERATOR_ACTIVATIONS)
def test_activations_of_the_generator(name):
    activation = DynamicShortConvolution(6, 4, generator_activation=name).kernel_generator.act
    x = torch.linspace(-12, 12, 97)
    torch.testing.assert_close(activation(x), GENERATOR_ACTIVATIONS[name](x), rtol=1e-5, atol=1e-5)


def test_a_state_dict_of_jet_nemotron_loads():
    """Its generator may have another input and fewer hidden units."""
    shapes = {
        "kernel_generator.w1.weight": (4, 5),
        "kernel_generator.w2.weight": (32, 4),
        "kernel_generator.w2.bias": (32,),
    }
    module = DynamicShortConvolution(8, 4, generator_input_size=5, generator_reduction=2).double()
    assert module.generator_hidden_size == 4
    assert {name: tensor.shape for name, tensor in module.state_dict().items()} == shapes
    module.load_state_dict({n: torch.randn(shape).double() for n, shape in shapes.items()})
    x, u = (torch.randn(2, 9, size, dtype=torch.float64).requires_grad_() for size in (8, 5))
    y, want = module(x, generator_input=u)[0], formula(module, x, u)
    torch.testing.assert_close(y, want, **TOLERANCE)
    torch.testing.assert_close(gradients(module, y, u), gradients(module, want, u), **TOLERANCE)


def test_a_call_of_jet_nemotrons_constructor_is_a_call_of_ours():
    given = {"hidden_size": 8, "kernel_size": 4, "generator_input_size": None}
    given |= {"generator_reduction": 8, "generator_activation": "silu", "activation": "silu"}
    kept = {"static_conv_init": torch.nn.init.ones_, "use_fast_conv1d": True}
    kept |= {"implementation": "triton"}
    module = DynamicShortConvolution(**given, **kept)
    assert {name: getattr(module, name) for name in kept} == kept


def test_it_starts_at_zero_or_at_the_static_kernels():
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    module = DynamicShortConvolution(6, 4).double()
    assert not any(parameter.any() for parameter in module.parameters())
    assert not module(x)[0].any()
    taps = torch.randn(6, 4)
    module = DynamicShortConvolution(
        6, 4, activation=None, static_conv_init=lambda bias: bias.copy_(taps.flatten())
    ).double()
    assert module.kernel_generator.w2.bias.requires_grad
    assert not module.kernel_generator.w2.weight.any()
    torch.testing.assert_close(module(x)[0], fusedops.dynamic_conv(x, taps), **TOLERANCE)
    assert torch.equal(module.get_kernel(x[:, 2]), taps.expand(2, 6, 4).double())


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sizes", [(9,), (1,) * 9, (5, 1, 1, 1, 1), (2, 4, 3)])
def test_chunks_and_steps_give_what_the_whole_gives(sizes, grad):
    """All later calls update the cache that the first call makes."""
    module, x = example()
    whole, final = module(x, output_final_state=True)
    with torch.set_grad_enabled(grad):
        first, *others = x.split(sizes, 1)
        y, made = module(first, output_final_state=True)
        cache, outs = made, [y]
        for chunk in others:
            y, cache = module(chunk, cache=cache, output_final_state=True)
            outs.append(y)
            assert cache is made
    y = torch.cat(outs, 1)
    torch.testing.assert_close(y, whole, **TOLERANCE)
    assert torch.equal(cache, final)
    assert torch.equal(cache, x[:, -4:].swapaxes(1, 2))
    assert not cache.requires_grad
    assert y.requires_grad == grad
    if grad:
        # The whole's, because cached tokens don't depend on parameters.
        found, want = gradients(module, y), gradients(module, formula(module, x))
        torch.testing.assert_close(found, want, **TOLERANCE)


@pytest.mark.parametrize("grad", [False, True])
def test_only_steps_update_a_cache_unasked(grad):
    module, x = example()
    cache = torch.randn(2, 6, 4, dtype=x.dtype)
    before = cache.clone()
    with torch.set_grad_enabled(grad):
        y, same = module(x, cache=cache)
        assert same is cache
        assert torch.equal(cache, before)
        both = torch.cat([before.swapaxes(1, 2), x], 1)
        torch.testing.assert_close(y, module(both)[0][:, 4:], **TOLERANCE)
        y, same = module(x[:, :1], cache=cache)
    assert same is cache
    assert torch.equal(cache, torch.cat([before[..., 1:], x[:, :1].swapaxes(1, 2)], 2))
    torch.testing.assert_close(y, module(both)[0][:, 4:5], **TOLERANCE)


def test_a_step_runs_in_place_unless_it_needs_a_gradient(monkeypatch):
    called = []
    for name in ("dynamic_conv", "dynamic_conv_step"):
        genuine = getattr(fusedops.nn, name)
        monkeypatch.setattr(
            fusedops.nn,
            name,
            lambda *args, name=name, genuine=genuine, **options: (
                called.append(name) or genuine(*args, **options)
            ),
        )
    module, x = example()
    cache = x.new_zeros(2, 6, 4)
    module(x[:, :1], cache=cache)
    with torch.no_grad():
        module(x[:, :1], cache=cache)
    module.requires_grad_(False)
    module(x[:, :1], cache=cache)
    assert called == ["dynamic_conv", "dynamic_conv_step", "dynamic_conv_step"]


def test_the_cache_that_was_given_gets_a_gradient():
    module, x = example()
    leaf = torch.randn(2, 6, 4, dtype=x.dtype, requires_grad=True)
    past = leaf.swapaxes(1, 2)
    (want,) = torch.autograd.grad(formula(module, torch.cat([past, x], 1))[:, 4:].sum(), leaf)
    (found,) = torch.autograd.grad(module(x, cache=leaf)[0].sum(), leaf)
    torch.testing.assert_close(found, want, **TOLERANCE)
    cache = 1.0 * leaf
    y, cache = module(x, cache=cache, output_final_state=True)
    (found,) = torch.autograd.grad(y.sum(), leaf)
    torch.testing.assert_close(found, want, **TOLERANCE)
    assert torch.equal(cache, x[:, -4:].swapaxes(1, 2))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        module(x, cache=leaf, output_final_state=True)


def test_a_cache_made_in_inference_mode_serves_afterwards():
    module, x = example()
    with torch.inference_mode():
        _, cache = module(x[:, :5], output_final_state=True)
        module(x[:, 5:6], cache=cache)
    y, _ = module(x[:, 6:], cache=cache)
    gradients(module, y)
    torch.testing.assert_close(y, formula(module, x)[:, 6:], **TOLERANCE)


@pytest.mark.parametrize("as_object", [False, True])
def test_packed_sequences_are_separate_ones(as_object):
    module, x = example()
    packed, starts = x.reshape(1, 18, 6), [0, 7, 7, 8, 18]
    cu_seqlens = fusedops.Sequences(starts) if as_object else torch.tensor(starts)
    y, cache = module(packed, cu_seqlens=cu_seqlens, output_final_state=True)
    again = torch.randn(4, 6, 4, dtype=x.dtype)
    given = again.clone()
    continued, same = module(packed, cache=again, cu_seqlens=cu_seqlens, output_final_state=True)
    assert same is again
    for s in range(4):
        tokens = packed[:, starts[s] : starts[s + 1]]
        for out, found, before in ((y, cache, None), (continued, again, given[s : s + 1])):
            one, final = module(tokens, cache=before, output_final_state=True)
            torch.testing.assert_close(out[:, starts[s] : starts[s + 1]], one, **TOLERANCE)
            assert torch.equal(found[s : s + 1], final)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_tokens_are_zero_and_the_callers_are_left_alone(dtype):
    module, x = example()
    before = x.clone()
    mask = torch.arange(9) >= torch.tensor([[0], [4]])
    y, cache = module(x, mask.to(dtype), output_final_state=True)
    zeroed = torch.where(mask[..., None], x, 0)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y, formula(module, zeroed), **TOLERANCE)
    assert torch.equal(cache, zeroed[:, -4:].swapaxes(1, 2))
    y = module(x, mask=mask.to(dtype), generator_input=x)[0]
    torch.testing.assert_close(y, formula(module, zeroed, x), **TOLERANCE)
    assert torch.equal(x, before)
    for grad in (False, True):
        cache = x.new_ones(2, 6, 4)
        with torch.set_grad_enabled(grad):
            module(x[:, :1], mask=torch.tensor([[1], [0]]), cache=cache)
        assert torch.equal(cache[0, :, -1], x[0, 0])
        assert not cache[1, :, -1].any()


def test_sixteen_bits_in_and_out():
    module, x = example(dtype=torch.float32)
    want, _ = module(x)
    half = copy.deepcopy(module).to(torch.bfloat16)
    y, cache = half(x.bfloat16(), mask=torch.ones(2, 9), output_final_state=True)
    assert y.dtype == cache.dtype == torch.bfloat16
    # Parameters, hidden units and kernels are rounded to 8 bits each: some 2⁻⁸ of sums of four
    # products up to about 4.
    torch.testing.assert_close(y.float(), want, rtol=0, atol=0.1)
    with torch.no_grad():
        assert half(x[:, :1].bfloat16(), cache=cache)[0].dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):
        module(x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_returns_the_dtype_of_x(dtype, grad):
    module, x = example(dtype=torch.float32)
    x = x.to(dtype)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        assert module.get_kernel(x).dtype == torch.bfloat16
        y, cache = module(x, output_final_state=True)
        step, _ = module(x[:, :1], cache=cache)
    assert y.dtype == step.dtype == cache.dtype == dtype
    if grad:
        assert {g.dtype for g in gradients(module, y)} == {torch.float32}


@pytest.mark.parametrize("call", ["prefill", "chunk", "step", "packed"])
def test_compile_without_breaks(call):
    torch._dynamo.reset()
    module, x = example()
    tokens = {"prefill": x, "chunk": x[:, :3], "step": x[:, :1], "packed": x.reshape(1, 18, 6)}[
        call
    ]
    options = {
        "prefill": {"mask": torch.arange(9) >= torch.tensor([[0], [4]])},
        "packed": {"cu_seqlens": fusedops.Sequences([0, 7, 18])},
    }.get(call, {})
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, module):
        cache = None if call == "prefill" else x.new_ones(2, 6, 4)
        # A step without a gradient runs in place.
        with torch.set_grad_enabled(call != "step"):
            y, after = function(tokens, cache=cache, output_final_state=True, **options)
        assert cache is None or after is cache
        found.append([y, after, *(gradients(module, y) if y.requires_grad else ())])
    torch.testing.assert_close(*found, **TOLERANCE)


def test_functional_calls_have_gradients():
    module, x = example()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters):
        cache = torch.zeros(2, 6, 4, dtype=x.dtype)
        call = (x[:, :1],), {"cache": cache}
        return torch.func.functional_call(module, parameters, *call)[0].sum()

    found = torch.func.grad(loss)(parameters)
    want = torch.autograd.grad(formula(module, x[:, :1]).sum(), tuple(module.parameters()))
    torch.testing.assert_close(tuple(found.values()), want, **TOLERANCE)


@pytest.mark.parametrize("activation", ["silu", None])
def test_the_generators_last_layer_is_part_of_the_convolution(activation, monkeypatch):
    """In prefill, with the results of kernels that are stored, as a gradient wants them."""
    module, x = example(activation=activation)
    cache = torch.randn(2, 6, 4, dtype=torch.float64)
    monkeypatch.setattr(fusedops.nn, "MANY", 0)

    def results():
        return module(x, cache=cache.clone(), output_final_state=True)

    with monkeypatch.context() as patch:
        patch.setattr(fusedops.nn, "dynamic_conv_generated", None)
        stored = results()
        assert stored[0].requires_grad
    monkeypatch.setattr(fusedops.nn, "dynamic_conv", None)
    with torch.no_grad():
        torch.testing.assert_close(results(), stored, **TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("trains", [False, True])
def test_a_gpu_stores_few_kernels(trains, monkeypatch):
    """The host needs less time to store them."""
    if trains and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("training stores kernels")
    module, x = example(64)
    module, x = module.to("cuda", torch.bfloat16).requires_grad_(trains), x.bfloat16().cuda()
    with monkeypatch.context() as patch:
        patch.setattr(fusedops.nn, "dynamic_conv_generated", None)
        stored = module(x)[0]
    monkeypatch.setattr(fusedops.nn, "dynamic_conv", None)
    monkeypatch.setattr(fusedops.nn, "MANY_ON_CUDA", 0)
    # Kernels are stored in 16 bits, and a channel's products may cancel.
    largest = float(stored.detach().abs().max())
    torch.testing.assert_close(module(x)[0], stored, rtol=2e-2, atol=1e-2 * largest)


def test_training_in_float32_on_a_cpu_stores_no_kernels(monkeypatch):
    module, x = example(dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(fusedops.nn, "MANY", 0)
        patch.setattr(fusedops.nn, "dynamic_conv", None)
        found = gradients(module, module(x)[0])
    monkeypatch.setattr(fusedops.nn, "MANY", 1 << 60)
    torch.testing.assert_close(found, gradients(module, module(x)[0]), rtol=1e-4, atol=1e-5)


class Doubled(DynamicShortConvolution):
    def get_kernel(self, x):
        return 2 * super().get_kernel(x)


@pytest.mark.parametrize("way", ["hook", "subclass", "method", "another layer"])
def test_a_generator_that_is_more_than_its_parameters_makes_kernels(way, monkeypatch):
    """test_layers.py changes its layers."""
    monkeypatch.setattr(fusedops.nn, "MANY", 0)
    module, x = example(activation=None)
    want = 2 * formula(module, x, activation=identity)
    if way == "hook":
        module.kernel_generator.register_forward_hook(lambda module, given, out: 2 * out)
    elif way == "subclass":
        module.__class__ = Doubled
    elif way == "method":
        module.get_kernel = lambda x: 2 * DynamicShortConvolution.get_kernel(module, x)
    else:
        module.kernel_generator.w2 = torch.nn.Sequential(module.kernel_generator.w2)
        want = want / 2
    with torch.no_grad():
        torch.testing.assert_close(module(x)[0], want, **TOLERANCE)


def test_it_may_start_on_the_meta_device():
    module, x = example()
    with torch.device("meta"):
        empty = DynamicShortConvolution(6, 4, static_conv_init=torch.nn.init.ones_)
    assert empty(x.to("meta"))[0].shape == x.shape
    empty.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(empty(x)[0], module(x)[0])


def test_the_backend_of_the_module_serves_its_calls():
    module, x = example(backend="numpy")
    torch.testing.assert_close(module(x)[0], formula(module, x), **TOLERANCE)
    module.backend = "triton2"
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="backend is 'triton2'"):
            module(x[:, :1], cache=x.new_zeros(2, 6, 4))


def test_the_text_that_it_shows():
    module = DynamicShortConvolution(6, 4)
    assert module.extra_repr() == "6, kernel_size=4, activation='silu'"
    assert "backend='torch'" in repr(DynamicShortConvolution(6, 4, backend="torch"))


X, Z = torch.zeros(2, 9, 6), torch.zeros(2, 4, 4, 6)


def made(*arguments, **options):
    return lambda: DynamicShortConvolution(*arguments, **options)


def convolved(**given):
    return lambda: DynamicShortConvolution(6, 4)(**{"x": X, **given})


def updating(**options):
    return lambda: TriangleMultiplicativeUpdate(**{"c_z": 6, **options})


def updated(*given):
    return lambda: TriangleMultiplicativeUpdate(6, 5)(*given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (made(0, 4), "^DynamicShortConvolution: hidden_size is 0; it should be at least 1"),
        (made(6, 0), "kernel_size is 0; it should be at least 1"),
        (made(6, 4, 0), "generator_input_size is 0; it should be at least 1"),
        (made(6, 4, None, 7), "generator_reduction is 7; it should be from 1 to 6"),
        (made(6, 4, None, 0), "generator_reduction is 0; it should be from 1 to 6"),
        (made(6, 4, None, 2, "softplus"), "generator_activation is 'softplus'; it should be one"),
        (made(6, 4, None, 2, None), "generator_activation is None; it should be one of silu, swi"),
        (made(6, 4, None, 2, "silu", "relu"), "activation is 'relu'; it should be one of None, s"),
        (made(6, 4, backend="cuda"), "backend is 'cuda'; it should be one of None, triton"),
        (convolved(x=X[0]), r"x has shape \(9, 6\); it should be \(B, T, 6\)"),
        (convolved(x=X[..., :5]), r"x has shape \(2, 9, 5\)"),
        (convolved(x=X.numpy()), "x is a ndarray"),
        (convolved(mask=torch.ones(2, 8)), r"mask has shape \(2, 8\); .* \(2, 9\)"),
        (convolved(mask=torch.ones(9)), r"mask has shape \(9,\)"),
        (convolved(mask=[[1], [1]]), "mask is a list; it should be a tensor"),
        (convolved(cache=torch.ones(1, 6, 4)), r"cache has shape .* be \(2, 6, 4\)"),
        (convolved(cache=torch.ones(2, 6, 4).half()), "cache has dtype float16"),
        (convolved(cache=np.zeros((2, 6, 4), "f4")), "cache is a ndarray; it should be a tensor"),
        (convolved(generator_input=torch.ones(2, 1, 6)), r"generator_input has shape"),
        (convolved(cu_seqlens=torch.tensor([0, 9])), "with cu_seqlens it should be"),
        (
            convolved(cu_seqlens=torch.tensor([0, 4, 9]), cache=torch.ones(1, 6, 4)),
            r"cache has shape \(1, 6, 4\)",
        ),
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
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_unknown_keywords_are_ignored():
    module, x = example()
    assert torch.equal(module(x, past_key_values=None)[0], module(x)[0])


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
    update = TriangleMultiplicativeUpdate(6, 4, gate=gate, c_out=9)
    for parameter in update.parameters():
        torch.nn.init.normal_(parameter)
    again = TriangleMultiplicativeUpdate.from_state_dict(update.state_dict())
    assert (again.c_z, again.c_hidden, again.c_out, again.gate) == (6, 4, 9, gate)
    x = torch.randn(2, 5, 5, 6)
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
