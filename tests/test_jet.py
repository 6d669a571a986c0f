"""JetBlock, against its formula in plain PyTorch, one token after the other."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
import fusedops.nn  # noqa: E402
from fusedops.nn import JetBlock  # noqa: E402

F = torch.nn.functional

#: For sums of some hundred products of numbers near one, in float64, in different orders.
TOLERANCE = {"rtol": 0, "atol": 1e-12}
C, H, K, V, W = 10, 2, 6, 4, 3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def example(B=2, T=9, dtype=torch.float64, **options):
    """Return a block with random parameters, and tokens."""
    block = JetBlock(C, H, K, V / K, W, 2, 1e-3, **options)
    for name, parameter in block.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
        elif name == "o_norm.weight":
            torch.nn.init.normal_(parameter, mean=1, std=0.3)
    return block.to(dtype), torch.randn(B, T, C, dtype=dtype)


def formula(block, x):
    """Return the block's result for tokens (B, T, C), and the cache after them."""
    p = dict(block.named_parameters())

    def project(name, x):
        return x @ p[f"{name}_proj.weight"].T

    def heads(x):
        return x.unflatten(-1, (H, -1))

    def unit(x):
        return x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()

    q, k = (unit(heads(F.silu(project(name, x)))) for name in "qk")
    w1, w2, bias = (
        p[f"dynamic_conv1d.kernel_generator.{name}"]
        for name in ("w1.weight", "w2.weight", "w2.bias")
    )
    kernels = (F.silu(x @ w1.T) @ w2.T + bias).unflatten(-1, (-1, W))
    inputs = F.pad(project("v", x), (0, 0, W - 1, 0))
    v = heads(F.silu((inputs.unfold(1, W, 1) * kernels).sum(-1)))
    beta, rate = project("b", x).sigmoid(), p["A_log"].exp()
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
    last = F.pad(project("v", x), (0, 0, W, 0))[:, -W:].mT
    return project("o", o.flatten(2)), (last, S)


def gradients(block, y, *inputs):
    cotangent = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return torch.autograd.grad(y, (*inputs, *block.parameters()), cotangent)


@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_values_and_gradients_are_those_of_the_formula(tokens):
    block, x = example(T=tokens)
    x.requires_grad_()
    (y, cache), (want, want_cache) = block(x, output_final_state=True), formula(block, x)
    torch.testing.assert_close(y, want, **TOLERANCE)
    torch.testing.assert_close(cache, tuple(t.detach() for t in want_cache), **TOLERANCE)
    got, want = gradients(block, y, x), gradients(block, want, x)
    # Sums over all tokens, of numbers up to some hundred.
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert block(x)[1] is None


def test_a_checkpoint_of_jet_nemotron_loads():
    """The section of a configuration is that of the model of two billion parameters."""
    section = {"conv_size": 4, "dconv_generator_reduction": 8, "dconv_implementation": "triton"}
    section |= {"expand_v": 2.6666666667, "head_dim": 96, "mode": "chunk", "norm_eps": "1e-5"}
    with torch.device("meta"):
        block = JetBlock(1536, **section, num_heads=12)
    assert {name: tuple(t.shape) for name, t in block.state_dict().items()} == {
        "A_log": (12,),
        "dt_bias": (12,),
        "q_proj.weight": (1152, 1536),
        "k_proj.weight": (1152, 1536),
        "v_proj.weight": (3072, 1536),
        "b_proj.weight": (12, 1536),
        "a_proj.weight": (12, 1536),
        "dynamic_conv1d.kernel_generator.w1.weight": (384, 1536),
        "dynamic_conv1d.kernel_generator.w2.weight": (12288, 384),
        "dynamic_conv1d.kernel_generator.w2.bias": (12288,),
        "g_proj.weight": (3072, 1536),
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


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sizes", [(1,) * 9, (5, 1, 1, 1, 1), (2, 4, 3)])
def test_chunks_and_steps_give_what_the_whole_gives(sizes, grad):
    """All later calls update the cache that the first call makes."""
    block, x = example()
    whole, final = block(x, output_final_state=True)
    with torch.set_grad_enabled(grad):
        first, *others = x.split(sizes, 1)
        y, cache = block(first, output_final_state=True)
        made, outs = cache, [y]
        for chunk in others:
            y, cache = block(chunk, cache=cache, output_final_state=True)
            outs.append(y)
            assert all(one is other for one, other in zip(cache, made, strict=True))
    y = torch.cat(outs, 1)
    torch.testing.assert_close(y, whole, **TOLERANCE)
    torch.testing.assert_close(cache, final, **TOLERANCE)
    assert not any(t.requires_grad for t in cache)
    assert y.requires_grad == grad


@pytest.mark.parametrize("grad", [False, True])
def test_only_steps_update_a_cache_unasked(grad):
    block, x = example()
    cache = block(x, output_final_state=True)[1]
    before = [t.clone() for t in cache]
    with torch.set_grad_enabled(grad):
        y, same = block(x, cache=cache)
        torch.testing.assert_close(y, block(torch.cat([x, x], 1))[0][:, 9:], **TOLERANCE)
        assert all(map(torch.equal, cache, before))
        block(x[:, :1], cache=cache)
    assert same[0] is cache[0]
    assert same[1] is cache[1]
    want = block(torch.cat([x, x[:, :1]], 1), output_final_state=True)[1]
    torch.testing.assert_close(cache, want, **TOLERANCE)


@pytest.fixture
def called(monkeypatch):
    """The names of the delta rules that were called, each with its backend."""
    found = []
    for name in ("gated_delta_rule", "gated_delta_rule_step"):
        genuine = getattr(fusedops.nn, name)

        def recorded(*arrays, backend, name=name, genuine=genuine, **options):
            found.append((name, backend))
            return genuine(*arrays, backend=backend, **options)

        monkeypatch.setattr(fusedops.nn, name, recorded)
    return found


def test_a_step_runs_in_place_unless_it_needs_a_gradient(called):
    block, x = example()
    cache = x.new_zeros(2, H * V, W), x.new_zeros(2, H, K, V)
    block(x[:, :1], cache=cache)
    with torch.no_grad():
        block(x[:, :1], cache=cache)
    block.requires_grad_(False)
    block(x[:, :1], cache=cache)
    assert [name for name, _ in called] == ["gated_delta_rule", *["gated_delta_rule_step"] * 2]


def test_the_cache_that_was_given_gets_a_gradient():
    block, x = example()
    leaves = [torch.randn(2, H * V, W), torch.randn(2, H, K, V)]
    leaves = [leaf.double().requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(lambda *cache: block(x, cache=cache)[0], leaves)
    (want,) = torch.autograd.grad(block(x, cache=leaves)[0].sum(), leaves[1])
    cache = tuple(1 * leaf for leaf in leaves)
    y, _ = block(x, cache=cache, output_final_state=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaves[1])[0], want, **TOLERANCE)


def test_a_cache_made_in_inference_mode_serves_afterwards():
    block, x = example()
    with torch.inference_mode():
        _, cache = block(x[:, :5], output_final_state=True)
        block(x[:, 5:6], cache=cache)
    y, _ = block(x[:, 6:], cache=cache)
    gradients(block, y)
    torch.testing.assert_close(y, formula(block, x)[0][:, 6:], **TOLERANCE)


@pytest.mark.parametrize("as_object", [False, True])
def test_packed_sequences_are_separate_ones(as_object):
    block, x = example()
    packed, starts = x.reshape(1, 18, C), [0, 7, 7, 8, 18]
    cu_seqlens = fusedops.Sequences(starts) if as_object else torch.tensor(starts)
    y, cache = block(packed, cu_seqlens=cu_seqlens, output_final_state=True)
    for s in range(4):
        tokens = packed[:, starts[s] : starts[s + 1]]
        one, final = block(tokens, output_final_state=True)
        torch.testing.assert_close(y[:, starts[s] : starts[s + 1]], one, **TOLERANCE)
        torch.testing.assert_close([t[s : s + 1] for t in cache], [*final], **TOLERANCE)
    first = [t.clone() for t in cache]
    again, same = block(packed, cache=cache, cu_seqlens=cu_seqlens, output_final_state=True)
    assert same[1] is cache[1]
    given = tuple(t[3:] for t in first)
    torch.testing.assert_close(again[:, 8:], block(packed[:, 8:], cache=given)[0], **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_tokens_of_padding_are_as_if_they_were_not_there(dtype):
    """On either side, in between, and everywhere; in a decoding step too."""
    block, x = example(B=4)
    x.requires_grad_()
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[0, :3] = mask[1, 6:] = mask[2, 2:7:2] = mask[3] = False
    y, cache = block(x, mask.to(dtype), output_final_state=True)
    assert not y[~mask].any()
    assert not cache[0][3].any()
    for b in range(3):
        alone, final = block(x[b : b + 1, mask[b]], output_final_state=True)
        torch.testing.assert_close(y[b, mask[b]], alone[0], **TOLERANCE)
        torch.testing.assert_close([t[b : b + 1] for t in cache], [*final], **TOLERANCE)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert not dx[~mask].any()
    assert dx[mask].any(-1).all()
    before = [t.clone() for t in cache]
    y, same = block(x[:, :1], mask[:, :1], cache)
    assert same[1] is cache[1]
    for b in range(4):
        row = tuple(t[b : b + 1] for t in before)
        if mask[b, 0]:
            alone, row = block(x[b : b + 1, :1], cache=row)
            torch.testing.assert_close(y[b], alone[0], **TOLERANCE)
        torch.testing.assert_close([t[b : b + 1] for t in cache], [*row], **TOLERANCE)


def test_sixteen_bits_in_and_out():
    block, x = example(dtype=torch.float32)
    want, _ = block(x)
    half = block.bfloat16()
    y, cache = half(x.bfloat16(), output_final_state=True)
    assert [t.dtype for t in (y, *cache)] == [torch.bfloat16, torch.bfloat16, torch.float32]
    # Each of a dozen intermediate results is rounded to 8 bits, and y is up to 10.
    torch.testing.assert_close(y.float(), want, rtol=0, atol=0.3)
    with torch.no_grad():
        step, same = half(x[:, :1].bfloat16(), cache=cache)
    assert step.dtype == torch.bfloat16
    assert same[1] is cache[1]


@pytest.mark.parametrize("grad", [False, True])
def test_autocast(grad):
    """Of a layer in float32, under autocast, results are rounded as those of its projections."""
    block, x = example(dtype=torch.float32)
    want, _ = block(x)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        y, cache = block(x, output_final_state=True)
        step, same = block(x[:, :1], torch.ones(2, 1), cache)
    assert [t.dtype for t in (y, step, *cache)] == [torch.bfloat16] * 3 + [torch.float32]
    assert same[1] is cache[1]
    torch.testing.assert_close(y.float(), want, rtol=0, atol=0.3)
    if grad:
        assert {g.dtype for g in gradients(block, y)} == {torch.float32}


@pytest.mark.parametrize("call", ["prefill", "chunk", "step", "packed"])
def test_compile_without_breaks(call):
    torch._dynamo.reset()
    block, x = example()
    tokens = {"chunk": x[:, :3], "step": x[:, :1], "packed": x.reshape(1, 18, C)}.get(call, x)
    options = {"cu_seqlens": fusedops.Sequences([0, 7, 18])} if call == "packed" else {}
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, block):
        cache = None
        if call != "prefill":
            cache = x.new_ones(2, H * V, W), x.new_ones(2, H, K, V)
        # A step without a gradient runs in place.
        with torch.set_grad_enabled(call != "step"):
            y, after = function(tokens, cache=cache, output_final_state=True, **options)
        found.append([y, *after, *(gradients(block, y) if y.requires_grad else ())])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_the_backend_of_the_module_serves_its_calls(called):
    block, x = example(backend="torch")
    with torch.no_grad():
        y, cache = block(x, output_final_state=True)
        block(x[:, :1], cache=cache)
    torch.testing.assert_close(y, formula(block, x)[0], **TOLERANCE)
    assert called == [("gated_delta_rule", "torch"), ("gated_delta_rule_step", "torch")]
    assert block.dynamic_conv1d.backend == "torch"
    assert "backend='torch'" in repr(block)


X = torch.zeros(2, 9, C)
CACHE = torch.zeros(2, H * V, W), torch.zeros(2, H, K, V)


def made(*arguments, **options):
    return lambda: JetBlock(*arguments, **options)


def attending(**given):
    return lambda: example(dtype=torch.float32)[0](**{"hidden_states": X, **given})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (made(0), "^JetBlock: hidden_size is 0; it should be at least 1"),
        (made(4, 0), "num_heads is 0; it should be at least 1"),
        (made(4, 1, 0), "head_dim is 0; it should be at least 1"),
        (made(4, 1, 3, 0.5), "expand_v is 0.5; times 3, the head_dim, it should be a positive in"),
        (made(4, 1, 3, 0), "expand_v is 0; times 3, the head_dim, it should be a positive in"),
        (made(4, 1, 3, 1, 0), "conv_size is 0; it should be at least 1"),
        (made(4, backend="cuda"), "backend is 'cuda'; it should be one of None, triton"),
        (
            attending(hidden_states=X[0]),
            r"hidden_states has shape \(9, 10\); it should be \(B, T, 10",
        ),
        (attending(hidden_states=X.numpy()), "hidden_states is a ndarray; it should be a tensor"),
        (attending(mask=torch.ones(2, 8)), r"mask has shape \(2, 8\); .* \(2, 9\)"),
        (attending(mask=[[1], [1]]), "mask is a list; it should be a tensor"),
        (
            attending(hidden_states=X[:1], mask=X[:1, :, 0], cu_seqlens=torch.tensor([0, 9])),
            "mask is given; with cu_seqlens it should not be",
        ),
        (attending(cache=CACHE[0]), "cache is a Tensor; it should be a pair of tensors"),
        (attending(cache=(CACHE[0], None)), "cache is a tuple; it should be a pair of tensors"),
        (
            attending(cache=(CACHE[0], np.zeros(3))),
            "cache is a tuple; it should be a pair of tensors",
        ),
        (attending(cache=CACHE[::-1]), r"cache\[0\] has shape \(2, 2, 6, 4\); .* \(2, 8, 3\)"),
        (
            attending(cache=(CACHE[0], CACHE[1][:1])),
            r"cache\[1\] has shape \(1, 2, 6, 4\); .* \(2, 2, 6, 4\)",
        ),
        (
            attending(cache=(CACHE[0], CACHE[1].half())),
            r"cache\[1\] has dtype float16; it should hold",
        ),
        (attending(cu_seqlens=torch.tensor([0, 9])), "with cu_seqlens it should be"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_a_bad_step_leaves_the_cache(grad):
    block, _ = example(dtype=torch.float32)
    cache = torch.ones(2, H * V, W), torch.ones(2, H, K, V - 1)
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"cache\[1\] has shape"):
        block(X[:, :1], cache=cache)
    assert all((t == 1).all() for t in cache)
