"""Triangle attention, the transition and the pair block, against formulas of the papers."""

from __future__ import annotations

import functools
import math
import pickle
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import formulas  # noqa: E402
from allocated import peak  # noqa: E402
from formulas import gradients, randomized  # noqa: E402
from fusedops import _products, pairs  # noqa: E402
from fusedops.compat import boltz  # noqa: E402
from fusedops.nn import PairBlock, PairTransition, TriangleAttention  # noqa: E402

C, D, H, N = 6, 4, 3, 5

#: For sums of a few dozen products of numbers near one, in float64, in different orders.
TOLERANCE = {"rtol": 0, "atol": 1e-12}


def pair(*leading, channels=C):
    z = torch.randn(*leading, N, N, channels, dtype=torch.float64, requires_grad=True)
    return z, torch.rand(*leading, N, N) > 0.3


def agree(module, formula, z, *mask, atol=1e-11):
    """Compare a module with its formula, and the gradients of z and all parameters."""
    got, want = module(z, *mask), formula(module, z, *mask)
    torch.testing.assert_close(got, want, rtol=0, atol=atol)
    inputs = z, *module.parameters()
    found, wanted = gradients(got, *inputs), gradients(want, *inputs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=10 * atol)


STARTING = pytest.mark.parametrize("starting", [True, False], ids=["starting", "ending"])
ATTENTION = pytest.mark.parametrize("attention", ["fusedops", "torch"])


@ATTENTION
@STARTING
@pytest.mark.parametrize("bias", [False, True], ids=["Boltz", "OpenFold"])
def test_attention_is_that_of_the_paper(starting, bias, attention):
    made = TriangleAttention(C, D, H, starting, bias=bias, attention=attention)
    module, (z, mask) = randomized(made), pair()
    mask[2] = mask[:, 2] = False
    for given in ((), (mask,)):
        agree(module, formulas.attention, z, *given, atol=1e-12)


@ATTENTION
@STARTING
@pytest.mark.parametrize("leading", [(2,), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32], ids=str)
def test_any_leading_dimensions_and_masks(starting, leading, dtype, attention):
    made = TriangleAttention(C, D, H, starting, attention=attention)
    module, (z, mask) = randomized(made), pair(*leading)
    want = formulas.attention(module, z, mask)
    torch.testing.assert_close(module(z, mask.to(dtype)), want, **TOLERANCE)
    # A mask of one row, for every row of every batch.
    row = mask.reshape(-1, N)[0]
    torch.testing.assert_close(module(z, row), module(z, row.expand(z.shape[:-1])), **TOLERANCE)


@ATTENTION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@STARTING
def test_a_row_without_edges(starting, dtype, attention):
    """It gets the mean of all values, with its gradient."""
    module = randomized(TriangleAttention(C, D, H, starting, attention=attention)).to(dtype)
    z, mask = pair()
    row = (1,) if starting else (slice(None), 1)
    mask[row] = False
    x = z.detach().to(dtype).requires_grad_()
    n, mha = module.layer_norm(x)[row], module.mha
    v = mha.linear_v(n)
    gate = torch.sigmoid(mha.linear_g(n))
    got, want = module(x, mask)[row], mha.linear_o(v.mean(-2, keepdim=True) * gate)
    dz = torch.randn_like(got)
    parts = module.layer_norm, mha.linear_v, mha.linear_g, mha.linear_o
    given = x, *(parameter for part in parts for parameter in part.parameters())
    found = [torch.autograd.grad(out, given, dz, retain_graph=True) for out in (got, want)]
    assert not torch.autograd.grad(got, mha.linear_q.weight, dz, retain_graph=True)[0].any()
    # Sums of a few numbers in another order.
    rounding = 4 * torch.finfo(dtype).eps
    for each, expected in zip((got, *found[0]), (want, *found[1]), strict=True):
        assert (each - expected).norm() <= rounding * expected.norm()


@pytest.mark.parametrize("masked", ["mask", "no mask"])
def test_the_bias_of_fast_kernels_has_no_gaps(monkeypatch, masked):
    """Of biases laid out otherwise torch has no fast kernel; SDPA got one around ending nodes."""
    strides = []

    def attention(q, k, v, bias):
        strides.append((bias.stride(-1), bias.stride(-2)))
        return v

    monkeypatch.setattr(pairs.F, "scaled_dot_product_attention", attention)
    z, mask = pair()
    for starting in (True, False):
        module = randomized(TriangleAttention(C, D, H, starting, attention="torch"))
        module(z, mask if masked == "mask" else None)
    assert strides == [(1, N), (1, N)]


@ATTENTION
@STARTING
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_attention_in_parts_is_the_whole(starting, masked, attention):
    module = randomized(TriangleAttention(C, D, H, starting, attention=attention))
    z, mask = pair(2)
    mask = mask if masked else None
    inputs = z, *module.parameters()
    want = module(z, mask)
    wanted = gradients(want, *inputs)
    for options, module.max_memory in (({"chunk_size": 2}, None), ({}, 1)):
        got = module(z, mask, **options)
        torch.testing.assert_close(got, want, **TOLERANCE)
        torch.testing.assert_close(gradients(got, *inputs), wanted, rtol=0, atol=1e-11)
        with torch.no_grad():
            torch.testing.assert_close(module(z, mask, **options), want, **TOLERANCE)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", ["fusedops", "torch", "transition"])
def test_max_memory_bounds_what_it_says(kind, grad):
    """Besides the limit there are z, its normalized form, the output, the bias, and gradients."""
    N, C = 64, 16
    limit = 2**19
    if kind != "transition":
        make = functools.partial(TriangleAttention, C, 8, 2, attention=kind)
        whole = 4 * 4 * N**2 * (C + 2)
    else:
        make, whole = functools.partial(PairTransition, C, 256), 4 * 4 * N**2 * C
    z = torch.randn(1, N, N, C)

    def run(module):
        with torch.set_grad_enabled(grad):
            x = z.clone().requires_grad_(grad)
            y = module(x)
            if grad:
                y.sum().backward()

    few, all_at_once = make(max_memory=limit), make()
    assert peak(lambda: run(few)) < limit + whole < peak(lambda: run(all_at_once))


@pytest.mark.parametrize("name", ["fc1", "fc2", "fc3"])
def test_inference_with_many_weights_of_one_layer(name):
    module, (z, _) = randomized(PairTransition(C)), pair()
    weight = module.get_submodule(name).weight
    weights = torch.randn(3, *weight.shape, dtype=weight.dtype)

    def run(weight):
        return torch.func.functional_call(module, {f"{name}.weight": weight}, (z,))

    with torch.no_grad():
        got, want = torch.func.vmap(run)(weights), torch.stack([run(each) for each in weights])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("leading", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("out_dim", [None, 7])
def test_the_transition_is_that_of_the_paper(leading, out_dim):
    module = randomized(PairTransition(C, 9, out_dim))
    x, _ = pair(*leading)
    # All rows at once, and a few at one time.
    for module.max_memory in (None, 1000):
        agree(module, formulas.transition, x, atol=1e-12)
    with torch.no_grad():
        got = module.eval()(x, chunk_size=2)
    torch.testing.assert_close(got, formulas.transition(module, x), **TOLERANCE)


@pytest.mark.parametrize("max_memory", [None, 600])
@pytest.mark.parametrize("kind", [PairTransition, TriangleAttention])
def test_layers_have_our_products_of_float32(monkeypatch, kind, max_memory):
    """In parts, and computed anew in the backward, too; a result is no view."""
    served, ours = [], _products.LinearProducts._linear
    note = staticmethod(lambda *given: served.append(given) or ours(*given))
    monkeypatch.setattr(_products.LinearProducts, "_linear", note)
    monkeypatch.setattr(_products, "_repays", lambda given: True)
    monkeypatch.setattr(pairs, "_products", lambda x: _products.LinearProducts())
    module, (z, _) = randomized(kind(C, D, max_memory=max_memory)).float(), pair(2)
    z = z.detach().float().requires_grad_()
    found = module(z)
    assert max_memory or not found._is_view()
    leaves = z, *module.parameters()
    first = torch.autograd.grad(found.square().sum(), leaves, create_graph=max_memory is None)
    assert len(served) >= (3 if kind is PairTransition else 2) * (4 if max_memory else 1)
    exact = module.double()
    wide = z.detach().double().requires_grad_()
    want = exact(wide)
    leaves = wide, *exact.parameters()
    wanted = torch.autograd.grad(want.square().sum(), leaves, create_graph=True)
    torch.testing.assert_close(
        (found, *first), (want, *wanted), rtol=1e-4, atol=1e-4, check_dtype=False
    )


@pytest.mark.parametrize("max_memory", [None, 600])
@pytest.mark.parametrize("kind", [PairTransition, TriangleAttention])
def test_pairs_on_a_cpu_have_torchs_products(monkeypatch, kind, max_memory):
    def refused(*_):
        raise AssertionError

    monkeypatch.setattr(_products, "MANY", 0)
    monkeypatch.setattr(_products.LinearProducts, "_linear", staticmethod(refused))
    module = kind(C, D, max_memory=max_memory).float()
    module(pair(2)[0].detach().float())
    if kind is PairTransition:
        module(torch.randn(N, C))


def test_a_transition_of_openfold_3_loads():
    module = randomized(PairTransition(C))
    layers = {"norm": "layer_norm", "fc3": "linear_out"}
    layers |= {"fc1": "swiglu.linear_a", "fc2": "swiglu.linear_b"}
    theirs = {
        f"blocks.0.{layers[name.partition('.')[0]]}.{name.partition('.')[2]}": parameter
        for name, parameter in module.state_dict().items()
    }
    before = dict(theirs)
    loaded = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([PairTransition(C)])}).double()
    loaded.load_state_dict(theirs)
    x, _ = pair()
    assert theirs == before
    assert torch.equal(loaded["blocks"][0](x), module(x))


def boltz_block(block, z, mask):
    """Boltz's block by its formulas, with its dropout for a probability of a quarter."""
    torch.manual_seed(1)
    formula = dict.fromkeys(("tri_mul_out", "tri_mul_in"), formulas.update)
    formula |= dict.fromkeys(("tri_att_start", "tri_att_end"), formulas.attention)
    for part, found in formula.items():
        v = z[:, :1, :, :1] if part == "tri_att_end" else z[:, :, :1, :1]
        factor = (torch.rand(v.shape) >= 0.25).double() / 0.75 if block.training else 1.0
        z = z + factor * found(getattr(block, part), z, mask)
    return z + formulas.transition(block.transition_z, z)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", [PairBlock, boltz.PairformerNoSeqLayer])
def test_a_block_is_that_of_boltz(kind, training):
    block = randomized(kind(C, 0.25, D, H)).train(training)
    z, mask = pair(2)
    torch.manual_seed(1)
    agree(block, boltz_block, z, mask, atol=1e-9)


@pytest.mark.parametrize("leading", [(), (2, 3)], ids=str)
def test_a_block_takes_any_leading_dimensions(leading):
    block = randomized(PairBlock(C, 0.25, D, H)).eval()
    z, mask = pair(*leading)
    flat = block(z.reshape(-1, N, N, C), mask.reshape(-1, N, N))
    torch.testing.assert_close(block(z, mask), flat.reshape(z.shape), **TOLERANCE)


def test_a_trunk_of_boltz():
    trunk = randomized(boltz.PairformerNoSeqModule(C, 2, 0.25, D, H))
    z, mask = pair(1)
    torch.manual_seed(1)
    want = trunk(z, mask)
    trunk.activation_checkpointing = True
    torch.manual_seed(1)
    got = trunk(z, mask)
    torch.testing.assert_close(got, want, **TOLERANCE)
    torch.testing.assert_close(gradients(got, z), gradients(want, z), **TOLERANCE)
    # In inference Boltz's rows come in chunks.
    trunk.eval()
    blocks = z
    for block in trunk.layers:
        blocks = block(blocks, mask)
    torch.testing.assert_close(trunk(z, mask, use_kernels=True), blocks, **TOLERANCE)


def test_modules_of_boltz_take_what_boltz_passes():
    z, mask = pair(1)
    start = randomized(boltz.TriangleAttentionStartingNode(C, D, H, inf=1e9))
    end = randomized(boltz.TriangleAttentionEndingNode(C, D, H, inf=1e9))
    assert (start.starting, end.starting) == (True, False)
    for module in (start, end):
        got = module(z, mask=mask, chunk_size=2, use_kernels=True)
        torch.testing.assert_close(got, module(z, mask), **TOLERANCE)
    transition = randomized(boltz.Transition(C, 4 * C)).eval()
    torch.testing.assert_close(transition(z, 2), transition(z), **TOLERANCE)
    # Boltz's default is no multiple of the channels.
    assert boltz.Transition(C).fc3.weight.shape == (C, 512)


def test_cuequivariance_gets_its_shapes(program):
    """Its function, by the formula of its documentation."""

    def triangle_attention(q, k, v, bias, mask=None, scale=None):
        B = 2
        assert q.shape == k.shape == v.shape == (B, N, H, N, D)
        assert bias.shape == (B, 1, H, N, N)
        logits = q @ k.transpose(-1, -2) / math.sqrt(D) + bias
        if mask is not None:
            assert mask.shape == (B, N, 1, 1, N)
            assert mask.dtype == torch.bool
            logits = torch.where(mask, logits, -1e9)
        return logits.softmax(-1) @ v

    contents = {"triangle_attention": triangle_attention, "__spec__": object()}
    program("cuequivariance_torch", **contents)
    for starting in (True, False):
        theirs = randomized(TriangleAttention(C, D, H, starting, attention="cuequivariance"))
        ours = TriangleAttention(C, D, H, starting).double()
        ours.load_state_dict(theirs.state_dict())
        z, mask = pair(2)
        for given in (None, mask, mask.long()):
            torch.testing.assert_close(theirs(z, given), ours(z, given), **TOLERANCE)
    with pytest.raises(ValueError, match="mask requires a gradient; it should not with cueq"):
        theirs(z, mask.double().requires_grad_())


def test_our_attention_serves_where_it_has_kernels(monkeypatch):
    bias, mask = torch.ones(1, 1, H, N, N), torch.ones(1, N, N)
    module = TriangleAttention(C, D, H)
    for has, given, ours in (
        (True, mask, True),
        (True, None, True),
        (True, mask.clone().requires_grad_(), False),
        (False, mask, False),
    ):
        monkeypatch.setattr(pairs, "_has_kernels", lambda *_, has=has: has)
        assert module._is_ours(bias, given) == ours
        assert TriangleAttention(C, D, H, attention="fusedops")._is_ours(bias, given)
        assert not TriangleAttention(C, D, H, attention="torch")._is_ours(bias, given)
    with pytest.raises(ValueError, match="mask requires a gradient; it should not with fusedops"):
        TriangleAttention(C, attention="fusedops")(torch.ones(N, N, C), mask.requires_grad_())


@pytest.mark.parametrize(
    "given",
    {
        "cuequivariance": {},
        "torch, few residues": {"N": 319},
        "torch, float32": {"bytes": 4},
        "torch, on a CPU": {"on_gpu": False},
        "torch, a width that it lacks": {"D": 12},
        "torch, a wide head": {"D": 136},
        "torch, a mask with a gradient": {"grad": True},
        "torch, not installed": {"installed": False},
    }.values(),
)
def test_the_faster_attention(monkeypatch, given):
    told = {"N": 320, "bytes": 2, "on_gpu": True, "D": 32, "grad": False, "installed": True}
    told |= given
    monkeypatch.setattr(pairs, "_found", lambda: told["installed"])
    bias = SimpleNamespace(
        is_cuda=told["on_gpu"],
        element_size=lambda: told["bytes"],
        shape=(1, 1, H, told["N"], told["N"]),
    )
    mask = torch.ones(3, requires_grad=told["grad"])
    chosen = TriangleAttention(C, told["D"], H)._is_for_cuequivariance(bias, mask)
    assert chosen == (given == {})
    assert not TriangleAttention(C, attention="torch")._is_for_cuequivariance(bias, mask)


def test_autocast_makes_products_in_sixteen_bits():
    z = torch.randn(2, N, N, C)
    for module in (TriangleAttention(C, D, H), PairTransition(C)):
        randomized(module).float()
        with torch.autocast("cpu", torch.bfloat16):
            got = module(z)
        assert got.dtype == torch.bfloat16
        # Values near one, of products that are rounded to 8 bits.
        torch.testing.assert_close(got.float(), module(z), rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
    "made",
    [TriangleAttention(C, D, H), PairTransition(C), PairBlock(C, 0, D, H)],
    ids=lambda made: type(made).__name__,
)
def test_sixteen_bits_beside_parameters_in_float32(made):
    module, z = randomized(made).float(), pair()[0].bfloat16()
    got = module(z)
    assert got.dtype == torch.bfloat16
    # Results of the parts are rounded, and so are the sums of a block.
    tolerance = {"rtol": 0.05, "atol": 0.05} if isinstance(made, PairBlock) else {}
    torch.testing.assert_close(got, module(z.float()).bfloat16(), **tolerance)


@pytest.mark.parametrize("made", [TriangleAttention(C, D, H), PairTransition(C)])
def test_norms_in_float32_beside_layers_in_sixteen_bits(made):
    module, z = randomized(made).float(), pair()[0].bfloat16()
    want = module(z)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.bfloat16()
    got = module(z)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.1)


def test_integers_are_no_pair_representation():
    """Also those of eight bits, fewer than the parameters have."""
    for module in (TriangleAttention(C, D, H), PairTransition(C)):
        with pytest.raises(RuntimeError, match="mixed dtype"):
            module(pair()[0].to(torch.int8))


def test_a_block_of_boltz_under_autocast_is_float32():
    """As its dropout, by which it multiplies updates."""
    block = boltz.PairformerNoSeqLayer(C, 0, D, H)
    with torch.autocast("cpu", torch.bfloat16):
        assert block(torch.randn(1, N, N, C).bfloat16()).dtype == torch.float32


def test_modules_start_at_zero():
    for module in (TriangleAttention(C, D, H, bias=True), PairTransition(C)):
        assert not module(torch.randn(N, N, C)).any()
    assert (TriangleAttention(C, bias=True).mha.linear_g.bias == 1).all()
    # The deviation comes from 65536 samples.
    assert abs(PairTransition(128).fc1.weight.std().item() * 128**0.5 - 1) < 0.02
    z = torch.randn(N, N, C)
    assert torch.equal(PairBlock(C)(z), z)


def test_no_edges():
    limited = [kind(C, max_memory=10**6) for kind in (TriangleAttention, PairTransition, PairBlock)]
    for module in (TriangleAttention(C, D, H), PairTransition(C), *limited):
        assert module(torch.zeros(2, 0, 0, C)).shape == (2, 0, 0, C)
        assert module(torch.zeros(0, N, N, C)).shape == (0, N, N, C)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TriangleAttention(0), "TriangleAttention: c_in is 0; it should be at least 1"),
        (lambda: TriangleAttention(4, no_heads=0), "no_heads is 0; it should be at least 1"),
        (lambda: TriangleAttention(4, attention="flash"), "attention is 'flash'; it should be one"),
        (lambda: TriangleAttention(4, max_memory=0), "max_memory is 0; it should be at least 1"),
        (lambda: PairTransition(4, 0), "PairTransition: hidden is 0; it should be at least 1"),
        (lambda: PairBlock(4, dropout=1.0), r"dropout is 1\.0; it should be at least 0, below 1"),
        (lambda: TriangleAttention(4)(torch.zeros(5, 5, 3)), r"x has shape \(5, 5, 3\); it should"),
        (lambda: TriangleAttention(4)(torch.zeros(5, 6, 4)), r"should be \(\.\.\., N, N, 4\)"),
        (
            lambda: TriangleAttention(4)(torch.zeros(5, 5, 4), torch.ones(2, 5, 5)),
            r"mask has shape \(2, 5, 5\); it should broadcast to \(5, 5\)",
        ),
        (lambda: TriangleAttention(4)(torch.zeros(5, 5, 4), chunk_size=0), "chunk_size is 0; it"),
        (lambda: PairTransition(4)(torch.zeros(3)), r"x has shape \(3,\); it should be"),
        (lambda: PairTransition(4)([1]), "x is a list; it should be a tensor"),
        (lambda: PairTransition(4)(None), "PairTransition: x is None; it should be a tensor"),
        (lambda: TriangleAttention(4)(None), "TriangleAttention: x is None; it should be a tensor"),
        (lambda: PairBlock(4)(None), "PairBlock: z is None; it should be a tensor"),
        (lambda: PairBlock(4)(torch.zeros(5, 5, 4), [1]), "PairBlock: pair_mask is a list; it"),
        (lambda: PairBlock(4)(torch.zeros(5, 4)), r"PairBlock: z has shape \(5, 4\); it should be"),
        (lambda: boltz.PairformerNoSeqLayer(4)(None), "PairformerNoSeqLayer: z is None; it should"),
        (
            lambda: boltz.PairformerNoSeqModule(4, 1).eval()(torch.zeros(5, 4)),
            r"PairformerNoSeqModule: z has shape \(5, 4\); it should be \(\.\.\., N, N, 4\)",
        ),
        (
            lambda: TriangleAttention(4)(torch.zeros(5, 5, 4), [1]),
            "mask is a list; it should be a tensor",
        ),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_missing_package_or_bias_is_named(monkeypatch):
    monkeypatch.setattr(pairs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="'cuequivariance', but cuequivariance_torch isn't inst"):
        TriangleAttention(4, attention="cuequivariance")
    state = TriangleAttention(4).state_dict()
    with pytest.raises(RuntimeError, match=r"mha\.linear_g has a bias, which the state_dict lacks"):
        TriangleAttention(4, bias=True).load_state_dict(state, strict=False)


@pytest.fixture
def block():
    """A block, which has an update, attention and the transition, with z and a mask."""
    torch._dynamo.reset()
    return randomized(PairBlock(C, 0.0, D, H)), *pair(2)


def test_a_state_dict_goes_round(block, tmp_path):
    module, z, mask = block
    torch.save(module.state_dict(), tmp_path / "state")
    with torch.device("meta"):
        again = PairBlock(C, 0.0, D, H).double()
    assert again(z.to("meta"), mask.to("meta")).shape == z.shape
    again = again.to_empty(device="cpu")
    again.load_state_dict(torch.load(tmp_path / "state"))
    for other in (again, pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(z, mask), module(z, mask))


def test_activation_checkpointing(block):
    again = functools.partial(checkpoint, use_reentrant=False)
    agree(block[0], again, *block[1:], atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_compiled_without_a_break(block):
    compiled = torch.compile(block[0], fullgraph=True, backend="aot_eager")
    agree(block[0], lambda _, *given: compiled(*given), *block[1:])


def test_exported_for_any_number_of_residues(block, tmp_path):
    module, z, mask = block
    # Of a larger batch, torch can't prove the sizes of attention equal for every N.
    given = z[:1].detach(), mask[:1]
    edges = dict.fromkeys((1, 2), torch.export.Dim("N", min=2, max=512))
    program = torch.export.export(module, given, dynamic_shapes=(edges, edges))
    torch.export.save(program, tmp_path / "module.pt2")
    loaded = torch.export.load(tmp_path / "module.pt2").module()
    z, mask = torch.randn(1, 9, 9, C, dtype=z.dtype), torch.rand(1, 9, 9) > 0.3
    torch.testing.assert_close(loaded(z, mask), module(z, mask), **TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [PairTransition, TriangleAttention])
def test_large_layers_on_a_gpu_have_our_products(monkeypatch, kind):
    """With gradients of all parameters, as exact as torch's; torch's own switch to TF32 stays."""
    served, ours = [], _products.LinearProducts._linear
    note = staticmethod(lambda *given: served.append(given) or ours(*given))
    monkeypatch.setattr(_products.LinearProducts, "_linear", note)
    torch.manual_seed(0)
    module, z = randomized(kind(128)).cuda().float(), torch.randn(1, 256, 256, 128, device="cuda")

    def derivatives(module, z):
        leaves = z.detach().requires_grad_(), *module.parameters()
        found = module(leaves[0])
        return [found.detach(), *torch.autograd.grad(found.square().sum(), leaves)]

    found, count = derivatives(module, z), len(served)
    assert count == (3 if kind is PairTransition else 1)
    with monkeypatch.context() as patch:
        patch.setattr(_products, "_repays", lambda given: False)
        theirs = derivatives(module, z)
    exact = derivatives(module.double(), z.double())
    for one, other, true in zip(found, theirs, exact, strict=True):
        errors = [float((x.double() - true).norm() / true.norm()) for x in (one, other)]
        assert errors[0] < max(2 * errors[1], 1e-6)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    module.float()(z)
    assert len(served) == count


@pytest.mark.gpu
# On an H200 too, cuEquivariance warns that its kernel for Blackwell takes no mask.
@pytest.mark.filterwarnings("ignore:(?s).*cuequivariance triangle_attention:UserWarning")
@pytest.mark.parametrize("attention", pairs.ATTENTIONS)
def test_a_block_on_a_gpu(attention):
    if attention == "cuequivariance":
        pytest.importorskip("cuequivariance_torch")
    block = randomized(PairBlock(32, 0.0, 32, 2))
    z, mask = pair(1, channels=32)
    want = block(z, mask)
    wanted = [want, *gradients(want, z, *block.parameters())]
    other = PairBlock(32, 0.0, 32, 2, attention=attention).cuda()
    other.load_state_dict(block.state_dict())
    x = z.detach().float().cuda().requires_grad_()
    got = other(x, mask.cuda())
    found = [got, *gradients(got, x, *other.parameters())]
    # cuEquivariance rounds factors to TF32.
    tolerance = 1e-4 if attention == "torch" else 2e-2
    for each, expected in zip(found, wanted, strict=True):
        off = (each.cpu().double() - expected).abs().max()
        assert off <= tolerance * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:(?s).*cuequivariance triangle_attention:UserWarning")
@pytest.mark.parametrize("attention", ["torch", "cuequivariance"])
@STARTING
def test_rows_without_edges_on_a_gpu(attention, starting):
    """Kernels that keep a logarithm of a sum had gradients N times too large."""
    if attention == "cuequivariance":
        pytest.importorskip("cuequivariance_torch")
    number = 128
    truth = randomized(TriangleAttention(32, 32, 2, starting)).cuda()
    module = TriangleAttention(32, 32, 2, starting, attention=attention).cuda()
    module.load_state_dict(truth.state_dict())
    z = torch.randn(1, number, number, 32, device="cuda").bfloat16()
    mask = torch.ones(number, number, device="cuda")
    mask[-9:] = mask[:, -9:] = 0
    dz = torch.randn_like(z)
    found = []
    for each, dtype in ((truth, torch.float64), (module.bfloat16(), torch.bfloat16)):
        x = z.to(dtype).requires_grad_()
        out = each(x, mask)
        found.append([out, *torch.autograd.grad(out, [x, *each.parameters()], dz.to(dtype))])
    for want, got in zip(*found, strict=True):
        assert (got.double() - want).norm() < 0.05 * want.norm()


# Torch's own rules of forward mode are scripted.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transforms_of_modules_in_parts(transform):
    """Transforms refuse the hooks of checkpoints, which parts have otherwise."""
    torch.manual_seed(0)
    block = randomized(PairBlock(8, pairwise_head_width=4, pairwise_num_heads=2)).double().eval()
    z = torch.randn(1, 6, 6, 8, dtype=torch.float64)

    def derivative(chunk):
        def function(z):
            return block(z, None, chunk)

        if transform == "grad":
            return torch.func.grad(lambda z: function(z).square().sum())(z)
        return torch.func.jvp(function, (z,), (z.cos(),))[1]

    torch.testing.assert_close(derivative(2), derivative(None), rtol=1e-9, atol=1e-12)
