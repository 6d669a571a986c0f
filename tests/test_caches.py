"""DynamicShortConvolution and JetBlock, against their formulas in plain PyTorch, token by token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
import fusedops.nn  # noqa: E402
from formulas import gradients as gradients_by  # noqa: E402
from fusedops import _products  # noqa: E402
from fusedops.nn import DynamicShortConvolution, JetBlock  # noqa: E402

F = torch.nn.functional

#: For sums of some hundred products of numbers near one, in float64, in different orders.
TOLERANCE = {"rtol": 0, "atol": 1e-12}
C, H, K, V, W = 6, 2, 6, 4, 3


def convolution(dtype=torch.float64, kernel_size=W, **options):
    """Return a module with random parameters."""
    module = DynamicShortConvolution(C, kernel_size, **options).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def convolved(module, x, generator_input=None, activation=F.silu):
    """Return the convolution of tokens (B, T, D), and the cache after them."""
    g, width = module.kernel_generator, module.kernel_size
    hidden = F.silu((x if generator_input is None else generator_input) @ g.w1.weight.T)
    kernels = (hidden @ g.w2.weight.T + g.w2.bias).unflatten(-1, (-1, width))
    windows = F.pad(x, (0, 0, width - 1, 0)).unfold(1, width, 1)
    cache = F.pad(x, (0, 0, width, 0))[:, -width:].mT
    return activation((windows * kernels).sum(-1)), (cache,)


def jet(dtype=torch.float64, **options):
    block = JetBlock(C, H, K, V / K, W, 2, 1e-3, **options)
    for name, parameter in block.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
        elif name == "o_norm.weight":
            torch.nn.init.normal_(parameter, mean=1, std=0.3)
    return block.to(dtype)


def attended(block, x):
    """Return the block's result for tokens (B, T, C), and the cache after them."""
    p = dict(block.named_parameters())

    def project(name, x):
        return x @ p[f"{name}_proj.weight"].T

    def heads(x):
        return x.unflatten(-1, (H, -1))

    def unit(x):
        return x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k = (unit(heads(F.silu(project(name, x)))) for name in "qk")
    v, last = convolved(block.dynamic_conv1d, project("v", x), x)
    v, beta, rate = heads(v), project("b", x).sigmoid(), p["A_log"].exp()
    gates = torch.exp(-rate * F.softplus(project("a", x) + p["dt_bias"]))
    S, read = x.new_zeros(len(x), H, K, V), []
    for t in range(x.shape[1]):
        S = gates[:, t, :, None, None] * S
        had = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        change = beta[:, t, :, None] * (v[:, t] - had)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        read.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) / K**0.5)
    o = torch.stack(read, 1)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-3).sqrt() * p["o_norm.weight"]
    o = o * F.silu(heads(project("g", x)))
    return project("o", o.flatten(2)), (*last, S)


@dataclass
class Kind:
    """A module, its formula, the shapes of its cache for a sequence, and the ops that update it.

    In 16 bits the cache has these dtypes, and results are off by a share of the largest.
    """

    make: Callable[..., Any]
    formula: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    ops: tuple[str, str]
    narrow: list[torch.dtype]
    near: float

    def cache(self, make=torch.randn, count=2, dtype=torch.float64):
        return tuple(make(count, *shape, dtype=dtype) for shape in self.shapes)


KINDS = {
    "convolution": Kind(
        *(convolution, convolved, ((C, W),), ("dynamic_conv", "dynamic_conv_step")),
        *([torch.bfloat16], 0.02),
    ),
    "block": Kind(
        *(jet, attended, ((H * V, W), (H, K, V)), ("gated_delta_rule", "gated_delta_rule_step")),
        *([torch.bfloat16, torch.float32], 0.03),
    ),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["no-grad", "grad"])
def grad(request):
    return request.param


def tokens(count=9, dtype=torch.float64):
    return torch.randn(2, count, C, dtype=dtype)


def call(module, x, *mask, cache=None, **options):
    """Return the result, and the cache as a tuple."""
    given = cache if cache is None or len(cache) > 1 else cache[0]
    y, after = module(x, *mask, cache=given, **options)
    return y, after if after is None or isinstance(after, tuple) else (after,)


def gradients(module, y, *inputs):
    return gradients_by(y, *module.parameters(), *inputs)


def same(cache, other):
    """Whether both are of the same tensors."""
    return all(one is two for one, two in zip(cache, other, strict=True))


def rows(cache, s):
    return tuple(t[s : s + 1] for t in cache)


@pytest.mark.parametrize("count", [1, 9, 70])
def test_values_and_gradients_are_those_of_the_formula(kind, count):
    module, x = kind.make(), tokens(count).requires_grad_()
    (y, cache), (want, last) = call(module, x, output_final_state=True), kind.formula(module, x)
    torch.testing.assert_close(y, want, **TOLERANCE)
    torch.testing.assert_close(cache, tuple(t.detach() for t in last), **TOLERANCE)
    got, want = gradients(module, y, x), gradients(module, want, x)
    # Sums over all tokens, of numbers up to some hundred.
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert call(module, x)[1] is None


@pytest.mark.parametrize("sizes", [(9,), (1,) * 9, (5, 1, 1, 1, 1), (2, 4, 3)])
def test_chunks_and_steps_give_what_the_whole_gives(kind, sizes, grad):
    """All later calls update the cache that the first call makes."""
    module, x = kind.make(), tokens()
    whole, final = call(module, x, output_final_state=True)
    with torch.set_grad_enabled(grad):
        first, *others = x.split(sizes, 1)
        y, made = call(module, first, output_final_state=True)
        cache, outs = made, [y]
        for chunk in others:
            y, cache = call(module, chunk, cache=cache, output_final_state=True)
            outs.append(y)
            assert same(cache, made)
    y = torch.cat(outs, 1)
    torch.testing.assert_close(y, whole, **TOLERANCE)
    torch.testing.assert_close(cache, final, **TOLERANCE)
    assert not any(t.requires_grad for t in cache)
    assert y.requires_grad == grad
    if grad and kind.make is convolution:
        # The whole's, because cached tokens don't depend on parameters.
        want = gradients(module, kind.formula(module, x)[0])
        torch.testing.assert_close(gradients(module, y), want, **TOLERANCE)


def test_only_steps_update_a_cache_unasked(kind, grad):
    module, x = kind.make(), tokens()
    both, step = torch.cat([x, x], 1), torch.cat([x, x[:, :1]], 1)
    cache = call(module, x, output_final_state=True)[1]
    before = [t.clone() for t in cache]
    with torch.set_grad_enabled(grad):
        y, after = call(module, x, cache=cache)
        assert same(cache, after)
        assert all(map(torch.equal, cache, before))
        torch.testing.assert_close(y, kind.formula(module, both)[0][:, 9:], **TOLERANCE)
        y, after = call(module, x[:, :1], cache=cache)
    assert same(cache, after)
    want, last = kind.formula(module, step)
    torch.testing.assert_close(y, want[:, 9:], **TOLERANCE)
    torch.testing.assert_close([*cache], [t.detach() for t in last], **TOLERANCE)


@pytest.fixture
def called(kind, monkeypatch):
    """The names of the kind's ops that were called, each with its backend."""
    found = []
    for name in kind.ops:
        genuine = getattr(fusedops.nn, name)

        def recorded(*arrays, backend=None, name=name, genuine=genuine, **options):
            found.append((name, backend))
            return genuine(*arrays, backend=backend, **options)

        monkeypatch.setattr(fusedops.nn, name, recorded)
    return found


def test_a_step_runs_in_place_unless_it_needs_a_gradient(kind, called):
    module, x, cache = kind.make(), tokens(1), kind.cache(torch.zeros)
    call(module, x, cache=cache)
    with torch.no_grad():
        call(module, x, cache=cache)
    module.requires_grad_(False)
    call(module, x, cache=cache)
    assert [name for name, _ in called] == [kind.ops[at] for at in (0, 1, 1)]


def test_the_cache_that_was_given_gets_a_gradient(kind):
    module, x = kind.make(), tokens()
    leaves = [leaf.requires_grad_() for leaf in kind.cache()]
    assert torch.autograd.gradcheck(lambda *cache: call(module, x, cache=cache)[0], leaves)
    want = torch.autograd.grad(call(module, x, cache=leaves)[0].sum(), leaves)
    cache = tuple(1 * leaf for leaf in leaves)
    y, _ = call(module, x, cache=cache, output_final_state=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaves), want, **TOLERANCE)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        call(module, x, cache=tuple(leaves), output_final_state=True)


def test_a_cache_made_in_inference_mode_serves_afterwards(kind):
    module, x = kind.make(), tokens()
    with torch.inference_mode():
        _, cache = call(module, x[:, :5], output_final_state=True)
        call(module, x[:, 5:6], cache=cache)
    y, _ = call(module, x[:, 6:], cache=cache)
    gradients(module, y)
    torch.testing.assert_close(y, kind.formula(module, x)[0][:, 6:], **TOLERANCE)


@pytest.mark.parametrize("as_object", [False, True])
def test_packed_sequences_are_separate_ones(kind, as_object):
    module, starts = kind.make(), [0, 7, 7, 8, 18]
    packed, given = tokens().reshape(1, 18, C), kind.cache(count=4)
    options = {"cu_seqlens": fusedops.Sequences(starts) if as_object else torch.tensor(starts)}
    options |= {"output_final_state": True}
    y, cache = call(module, packed, **options)
    kept = tuple(t.clone() for t in given)
    again, after = call(module, packed, cache=given, **options)
    assert same(after, given)
    for s in range(4):
        some = slice(starts[s], starts[s + 1])
        for out, found, before in ((y, cache, None), (again, given, rows(kept, s))):
            one, final = call(module, packed[:, some], cache=before, output_final_state=True)
            torch.testing.assert_close(out[:, some], one, **TOLERANCE)
            torch.testing.assert_close(rows(found, s), final, **TOLERANCE)


def test_sixteen_bits_in_and_out(kind):
    module, x = kind.make(torch.float32), tokens(dtype=torch.float32)
    want, _ = call(module, x)
    half = copy.deepcopy(module).bfloat16()
    y, cache = call(half, x.bfloat16(), torch.ones(2, 9), output_final_state=True)
    assert [t.dtype for t in (y, *cache)] == [torch.bfloat16, *kind.narrow]
    # Parameters and intermediate results are rounded to 8 bits each.
    torch.testing.assert_close(y.float(), want, rtol=0, atol=kind.near * want.abs().max().item())
    with torch.no_grad():
        step, after = call(half, x[:, :1].bfloat16(), cache=cache)
    assert step.dtype == torch.bfloat16
    assert same(cache, after)
    with pytest.raises(RuntimeError, match="dtype"):
        call(module, x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(kind, grad, dtype):
    """A convolution returns the dtype of x, and a block that of its projections."""
    module, x = kind.make(torch.float32), tokens(dtype=torch.float32)
    want, x = call(module, x)[0], x.to(dtype)
    dtype = dtype if kind.make is convolution else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        y, cache = call(module, x, output_final_state=True)
        step, after = call(module, x[:, :1], torch.ones(2, 1), cache=cache)
    assert [t.dtype for t in (y, step, *cache)] == [dtype] * 3 + kind.narrow[1:]
    assert same(cache, after)
    torch.testing.assert_close(y.float(), want, rtol=0, atol=kind.near * want.abs().max().item())
    if grad:
        assert {g.dtype for g in gradients(module, y)} == {torch.float32}


@pytest.mark.parametrize("way", ["prefill", "chunk", "step", "packed"])
def test_compile_without_breaks(kind, way):
    torch._dynamo.reset()
    module, x = kind.make(), tokens()
    given = {"chunk": x[:, :3], "step": x[:, :1], "packed": x.reshape(1, 18, C)}.get(way, x)
    options = {"cu_seqlens": fusedops.Sequences([0, 7, 18])} if way == "packed" else {}
    if way == "prefill" and kind.make is convolution:
        options["mask"] = torch.arange(9) >= torch.tensor([[0], [4]])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, module):
        cache = None if way == "prefill" else kind.cache(torch.ones)
        # A step without a gradient runs in place.
        with torch.set_grad_enabled(way != "step"):
            y, after = call(function, given, cache=cache, output_final_state=True, **options)
        found.append([y, *after, *(gradients(module, y) if y.requires_grad else ())])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_exported_for_any_number_of_tokens_and_sequences(kind):
    class Packed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = kind.make(torch.float32)

        def forward(self, x, starts, *cache):
            return call(self.module, x, cache=cache, cu_seqlens=starts)[0]

    def given(*starts):
        cache = kind.cache(count=len(starts) - 1, dtype=torch.float32)
        return torch.randn(1, starts[-1], C), torch.tensor(starts), *cache

    packed, sequences = Packed(), torch.export.Dim("sequences", min=2)
    of_cache = tuple({0: sequences} for _ in kind.shapes)
    sizes = {1: torch.export.Dim("tokens", min=2)}, {0: sequences + 1}, of_cache
    program = torch.export.export(packed, given(0, 2, 5), dynamic_shapes=sizes, strict=False)
    many = given(0, 4, 4, 9)
    torch.testing.assert_close(program.module()(*many), packed(*many))


def test_the_backend_of_the_module_serves_its_calls(kind, called):
    module, x = kind.make(backend="torch"), tokens()
    with torch.no_grad():
        y, cache = call(module, x, output_final_state=True)
        call(module, x[:, :1], cache=cache)
    torch.testing.assert_close(y, kind.formula(module, x)[0], **TOLERANCE)
    assert called == [(name, "torch") for name in kind.ops]
    assert getattr(module, "dynamic_conv1d", module).backend == "torch"
    assert "backend='torch'" in repr(module)
    module.backend = "triton2"
    with pytest.raises(ValueError, match="backend is 'triton2'"):
        call(module, x[:, :1], cache=cache)


X, CONV, BLOCK = torch.zeros(2, 9, C), KINDS["convolution"], KINDS["block"]
CACHE = BLOCK.cache(torch.zeros, dtype=torch.float32)


def made(module, *arguments, **options):
    return lambda: module(*arguments, **options)


def given(kind, x=X, **options):
    return lambda: kind.make(torch.float32)(x, **options)


WRONG = [
    *(
        (call, message)
        for kind, module in ((CONV, DynamicShortConvolution), (BLOCK, JetBlock))
        for call, message in (
            (made(module, 0, 4), f"^{module.__name__}: hidden_size is 0; it should be at least 1"),
            (
                made(module, 6, 4, backend="cuda"),
                "backend is 'cuda'; it should be one of None, tri",
            ),
            (given(kind, X[0]), r"(x|hidden_states) has shape \(9, 6\); it should be \(B, T, 6\)"),
            (given(kind, X[..., :5]), r"(x|hidden_states) has shape \(2, 9, 5\)"),
            (given(kind, X.numpy()), "(x|hidden_states) is a ndarray; it should be a tensor"),
            (
                given(kind, None),
                f"{module.__name__}: (x|hidden_states) is None; it should be a ten",
            ),
            (given(kind, mask=torch.ones(2, 8)), r"mask has shape \(2, 8\); .* \(2, 9\)"),
            (given(kind, mask=torch.ones(9)), r"mask has shape \(9,\)"),
            (given(kind, mask=[[1], [1]]), "mask is a list; it should be a tensor"),
            (given(kind, cu_seqlens=torch.tensor([0, 9])), "with cu_seqlens it should be"),
        )
    ),
    (made(DynamicShortConvolution, 6, 0), "kernel_size is 0; it should be at least 1"),
    (made(DynamicShortConvolution, 6, 4, 0), "generator_input_size is 0; it should be at least 1"),
    *(
        (made(DynamicShortConvolution, 6, 4, None, n), f"generator_reduction is {n}; it .* 1 to 6")
        for n in (0, 7)
    ),
    *(
        (
            made(DynamicShortConvolution, 6, 4, None, 2, name),
            f"generator_activation is {name!r}; it",
        )
        for name in ("softplus", None)
    ),
    (made(DynamicShortConvolution, 6, 4, activation="relu"), "activation is 'relu'; it should be"),
    (given(CONV, cache=torch.ones(1, C, W)), r"cache has shape .* be \(2, 6, 3\)"),
    (given(CONV, cache=torch.ones(2, C, W).half()), "cache has dtype float16"),
    (given(CONV, cache=np.zeros((2, C, W), "f4")), "cache is a ndarray; it should be a tensor"),
    (given(CONV, generator_input=torch.ones(2, 1, C)), "generator_input has shape"),
    (given(CONV, generator_input=[1.0]), "generator_input is a list; it should be a tensor"),
    (
        given(CONV, X[:1], cu_seqlens=torch.tensor([0, 4, 9]), cache=torch.ones(1, C, W)),
        r"cache has shape \(1, 6, 3\)",
    ),
    (made(JetBlock, 4, 0), "num_heads is 0; it should be at least 1"),
    (made(JetBlock, 4, 1, 0), "head_dim is 0; it should be at least 1"),
    *(
        (
            made(JetBlock, 4, 1, 3, n),
            f"expand_v is {n}; times 3, the head_dim, it should be a posit",
        )
        for n in (0.5, 0)
    ),
    (made(JetBlock, 4, 1, 3, 1, 0), "conv_size is 0; it should be at least 1"),
    (
        given(BLOCK, X[:1], mask=X[:1, :, 0], cu_seqlens=torch.tensor([0, 9])),
        "mask is given; with cu_seqlens it should not be",
    ),
    (given(BLOCK, cache=CACHE[0]), "cache is a Tensor; it should be a pair of tensors"),
    *(
        (given(BLOCK, cache=(CACHE[0], bad)), "cache is a tuple; it should be a pair of tensors")
        for bad in (None, np.zeros(3))
    ),
    (given(BLOCK, cache=CACHE[::-1]), r"cache\[0\] has shape \(2, 2, 6, 4\); .* \(2, 8, 3\)"),
    (given(BLOCK, cache=(CACHE[0], CACHE[1][:1])), r"cache\[1\] has .*; .* \(2, 2, 6, 4\)"),
    (given(BLOCK, cache=(CACHE[0], CACHE[1].half())), r"cache\[1\] has dtype float16; it should h"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_bad_step_leaves_the_cache(kind, grad):
    cache = kind.cache(torch.ones, dtype=torch.float32)
    bad = *cache[:-1], cache[-1][..., 1:]
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"cache.* has shape"):
        call(kind.make(torch.float32), X[:, :1], cache=bad)
    assert all((t == 1).all() for t in cache)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("way", ["overlapping", "leaf", "inference"])
def test_a_cache_that_cannot_be_written_to_changes_nothing(kind, grad, count, way):
    """Of a block's two tensors the first is as it was if the second can't be updated."""
    if not grad and (way == "leaf" or (way, count) == ("inference", 1)):
        pytest.skip("a kernel writes to such a tensor")
    cache = kind.cache(dtype=torch.float32)
    last, error, message = cache[-1], ValueError, "overlaps itself; it should"
    if way == "overlapping":
        last = last[:1].expand_as(last)
    elif way == "leaf":
        last, error, message = last.clone().requires_grad_(), RuntimeError, "leaf Variable that req"
    else:
        message = "was made in inference mode; it should be a clone"
        with torch.inference_mode():
            last = last.clone()
    given, module = (*cache[:-1], last), kind.make(torch.float32)
    before = [t.detach().clone() for t in given]
    with torch.set_grad_enabled(grad), pytest.raises(error, match=f"(cache|state).* {message}"):
        call(module, X[:, :count], cache=given, output_final_state=True)
    assert all(map(torch.equal, given, before))


# The convolution alone.


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


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7, 12])
@pytest.mark.parametrize(("name", "activation"), [("silu", F.silu), (None, identity)])
def test_any_width_and_activation(kernel_size, name, activation):
    module, x = convolution(kernel_size=kernel_size, activation=name), tokens().requires_grad_()
    y, want = module(x)[0], convolved(module, x, activation=activation)[0]
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
    y, want = module(x, generator_input=u)[0], convolved(module, x, u)[0]
    torch.testing.assert_close(y, want, **TOLERANCE)
    torch.testing.assert_close(gradients(module, y, u), gradients(module, want, u), **TOLERANCE)


def test_a_call_of_jet_nemotrons_constructor_is_a_call_of_ours():
    given = {"hidden_size": 8, "kernel_size": 4, "generator_input_size": None}
    given |= {"generator_reduction": 8, "generator_activation": "silu", "activation": "silu"}
    kept = {"static_conv_init": torch.nn.init.ones_, "use_fast_conv1d": True}
    kept |= {"implementation": "triton"}
    module = DynamicShortConvolution(**given, **kept)
    assert {name: getattr(module, name) for name in kept} == kept
    assert module.extra_repr() == "8, kernel_size=4, activation='silu'"
    x = torch.randn(2, 3, 8)
    assert torch.equal(module(x, past_key_values=None)[0], module(x)[0])


def test_it_starts_at_zero_or_at_the_static_kernels():
    x = tokens()
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


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_tokens_are_zero_and_the_callers_are_left_alone(dtype):
    module, x = convolution(), tokens()
    before = x.clone()
    mask = torch.arange(9) >= torch.tensor([[0], [4]])
    y, cache = module(x, mask.to(dtype), output_final_state=True)
    zeroed = torch.where(mask[..., None], x, 0)
    want, (last,) = convolved(module, zeroed)
    assert y.dtype == x.dtype
    torch.testing.assert_close(y, want, **TOLERANCE)
    assert torch.equal(cache, last)
    y = module(x, mask=mask.to(dtype), generator_input=x)[0]
    torch.testing.assert_close(y, convolved(module, zeroed, x)[0], **TOLERANCE)
    assert torch.equal(x, before)
    for grad in (False, True):
        cache = x.new_ones(2, C, W)
        with torch.set_grad_enabled(grad):
            module(x[:, :1], mask=torch.tensor([[1], [0]]), cache=cache)
        assert torch.equal(cache[0, :, -1], x[0, 0])
        assert not cache[1, :, -1].any()


def test_functional_calls_have_gradients():
    module, x = convolution(), tokens(1)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

    def loss(parameters):
        given = (x,), {"cache": torch.zeros(2, C, W, dtype=x.dtype)}
        return torch.func.functional_call(module, parameters, *given)[0].sum()

    found = torch.func.grad(loss)(parameters)
    want = torch.autograd.grad(convolved(module, x)[0].sum(), tuple(module.parameters()))
    torch.testing.assert_close(tuple(found.values()), want, **TOLERANCE)


@pytest.mark.parametrize("activation", ["silu", None])
def test_the_generators_last_layer_is_part_of_the_convolution(activation, monkeypatch):
    """In prefill, with the results of kernels that are stored, as a gradient wants them."""
    module, x = convolution(activation=activation), tokens()
    (cache,) = CONV.cache()
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
    module = DynamicShortConvolution(64, 4)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    module = module.to("cuda", torch.bfloat16).requires_grad_(trains)
    x = torch.randn(2, 9, 64).bfloat16().cuda()
    with monkeypatch.context() as patch:
        patch.setattr(fusedops.nn, "dynamic_conv_generated", None)
        stored = module(x)[0]
    monkeypatch.setattr(fusedops.nn, "dynamic_conv", None)
    monkeypatch.setattr(fusedops.nn, "MANY_ON_CUDA", 0)
    # Kernels are stored in 16 bits, and a channel's products may cancel.
    largest = float(stored.detach().abs().max())
    torch.testing.assert_close(module(x)[0], stored, rtol=2e-2, atol=1e-2 * largest)


def test_training_in_float32_on_a_cpu_stores_no_kernels(monkeypatch):
    module, x = convolution(torch.float32), tokens(dtype=torch.float32)
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
    module, x = convolution(activation=None), tokens()
    want = 2 * convolved(module, x, activation=identity)[0]
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
    module, x = convolution(), tokens()
    with torch.device("meta"):
        empty = DynamicShortConvolution(C, W, static_conv_init=torch.nn.init.ones_)
    assert empty(x.to("meta"))[0].shape == x.shape
    empty.load_state_dict(module.state_dict(), assign=True)
    assert torch.equal(empty(x)[0], module(x)[0])


# The block alone.


def test_a_checkpoint_of_jet_nemotron_loads():
    """The section of a configuration is that of the model of two billion parameters."""
    section = {"conv_size": 4, "dconv_generator_reduction": 8, "dconv_implementation": "triton"}
    section |= {"expand_v": 2.6666666667, "head_dim": 96, "mode": "chunk", "norm_eps": "1e-5"}
    with torch.device("meta"):
        block = JetBlock(1536, **section, num_heads=12)
    rows = {"q": 1152, "k": 1152, "v": 3072, "b": 12, "a": 12, "g": 3072}
    assert {name: tuple(t.shape) for name, t in block.state_dict().items()} == {
        **{f"{name}_proj.weight": (count, 1536) for name, count in rows.items()},
        "A_log": (12,),
        "dt_bias": (12,),
        "dynamic_conv1d.kernel_generator.w1.weight": (384, 1536),
        "dynamic_conv1d.kernel_generator.w2.weight": (12288, 384),
        "dynamic_conv1d.kernel_generator.w2.bias": (12288,),
        "o_norm.weight": (256,),
        "o_proj.weight": (1536, 3072),
    }
    assert block.o_norm.eps == 1e-5


def test_it_starts_with_slow_gates():
    """Time steps are from 0.001 to 0.1, and rates from 0 to 16."""
    block = JetBlock(4, num_heads=1000, head_dim=1)
    steps = F.softplus(block.dt_bias)
    assert 0.001 <= steps.min() < 0.0011 < 0.09 < steps.max() <= 0.1 + 1e-6
    assert 0 < block.A_log.exp().min() < 1 < 15 < block.A_log.exp().max() <= 16
    assert block.A_log._no_weight_decay
    assert block.dt_bias._no_weight_decay
    taps = block.dynamic_conv1d.kernel_generator.w2.bias
    assert 0.015 < taps.std() < 0.025


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_tokens_of_padding_are_as_if_they_were_not_there(dtype):
    """On either side, in between, and everywhere; in a decoding step too."""
    block, x = jet(), torch.randn(4, 9, C, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[0, :3] = mask[1, 6:] = mask[2, 2:7:2] = mask[3] = False
    y, cache = block(x, mask.to(dtype), output_final_state=True)
    assert not y[~mask].any()
    assert not cache[0][3].any()
    for b in range(3):
        alone, final = block(x[b : b + 1, mask[b]], output_final_state=True)
        torch.testing.assert_close(y[b, mask[b]], alone[0], **TOLERANCE)
        torch.testing.assert_close(rows(cache, b), final, **TOLERANCE)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert not dx[~mask].any()
    assert dx[mask].any(-1).all()
    before = [t.clone() for t in cache]
    y, after = block(x[:, :1], mask[:, :1], cache)
    assert same(cache, after)
    for b in range(4):
        row = rows(before, b)
        if mask[b, 0]:
            alone, row = block(x[b : b + 1, :1], cache=row)
            torch.testing.assert_close(y[b], alone[0], **TOLERANCE)
        torch.testing.assert_close(rows(cache, b), row, **TOLERANCE)


@pytest.mark.parametrize("masked", [False, True])
def test_a_block_has_our_products_of_float32(monkeypatch, masked):
    """As on a GPU: seven layers of tokens, the generator's apart."""
    served, ours = [], _products.LinearProducts._linear
    note = staticmethod(lambda *given: served.append(given) or ours(*given))
    monkeypatch.setattr(_products.LinearProducts, "_linear", note)
    monkeypatch.setattr(_products, "_repays", lambda given: True)
    block, x = jet(torch.float32), torch.randn(2, 5, C, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]) if masked else None
    want = block(x, mask)[0]
    assert not served, "a CPU has torch's products"
    leaves = x, *block.parameters()
    wanted = torch.autograd.grad(want.square().sum(), leaves)
    always = _products.LinearProducts()
    monkeypatch.setattr(fusedops.nn, "linear_products", lambda x, backend: always)
    found = block(x, mask)[0]
    assert len(served) >= 7
    gradients = torch.autograd.grad(found.square().sum(), leaves)
    torch.testing.assert_close((found, *gradients), (want, *wanted), rtol=1e-4, atol=1e-4)
