"""cuEquivariance's functions, by plain torch in float64, and under the package's names."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from allocated import peak  # noqa: E402
from fusedops.compat import cuequivariance as ours  # noqa: E402

B, N, H, Q, K, D = 2, 3, 2, 5, 6, 4
#: The parameters of cuEquivariance 0.13, with a star before those that are given by name alone.
SIGNATURES = {
    "attention_pair_bias": "single_repr pair_repr mask num_heads w_ln_a b_ln_a w_proj_q b_proj_q "
    "w_proj_k w_proj_v w_proj_g w_proj_o w_proj_z=None b_proj_o=None b_proj_z=None w_ln_z=None "
    "b_ln_z=None inf=1000000.0 eps=1e-05 attn_scale=None return_z_proj=False "
    "is_cached_z_proj=False * b_proj_k=None b_proj_v=None w_ln_q=None b_ln_q=None w_ln_k=None "
    "b_ln_k=None b_proj_g=None norm_kind='layer_norm'",
    "mask_to_kv_lengths": "mask",
    "triangle_attention": "q k v bias mask=None scale=None return_aux=False * kv_lengths=None",
    "triangle_multiplicative_update": "x direction='outgoing' mask=None norm_in_weight=None "
    "norm_in_bias=None p_in_weight=None p_in_bias=None g_in_weight=None g_in_bias=None "
    "norm_out_weight=None norm_out_bias=None p_out_weight=None p_out_bias=None g_out_weight=None "
    "g_out_bias=None eps=1e-05 precision=None",
}
#: The digits of a sum of a few products near one, whose factors are rounded.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_theirs(name):
    signature = inspect.signature(getattr(ours, name))
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    shown = str(inspect.Signature(plain))[1:-1]
    assert shown.replace(", ", " ") == SIGNATURES[name]


def triangles(dtype=torch.float64):
    """Return q, k, v and bias, and a mask under which one row has no keys."""
    shapes = (B, N, H, Q, D), (B, N, H, K, D), (B, N, H, K, D), (B, 1, H, Q, K)
    mask = torch.rand(B, N, 1, 1, K) < 0.6
    mask[:, 0], mask[1, 2] = True, False
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes], mask


def logits(q, k, bias, mask, scale=D**-0.5):
    found = scale * q.double() @ k.double().mT + bias.double()
    return found if mask is None else torch.where(mask, found, -1e9)


def assert_near(got, want, dtype):
    assert got.dtype == dtype
    tolerance = ROUNDING[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("memory", [2**31, 1], ids=["whole", "rows"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_triangle_attention(monkeypatch, dtype, masked, memory):
    """Also one row at a time, as of many residues, and under autocast."""
    monkeypatch.setattr(ours, "_MEMORY", memory)
    given, mask = triangles(dtype)
    mask = mask if masked else None
    q, k, v, bias = (x.detach().double().requires_grad_() for x in given)
    want = logits(q, k, bias, mask).softmax(-1) @ v
    dout = torch.randn_like(want)
    wanted = torch.autograd.grad(want, (q, k, v, bias), dout)
    with torch.autocast("cpu", torch.bfloat16):
        got = ours.triangle_attention(*given, mask if mask is None else mask.float())
    assert_near(got, want, dtype)
    for each, expected in zip(torch.autograd.grad(got, given, dout.to(dtype)), wanted, strict=True):
        assert_near(each, expected, dtype)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_memory_grows_by_the_square_of_residues(monkeypatch, masked):
    monkeypatch.setattr(ours, "_MEMORY", 2**18)
    size = 64
    given = [torch.randn(1, size, H, size, D, requires_grad=True) for _ in range(3)]
    given.append(torch.randn(1, 1, H, size, size, requires_grad=True))
    mask = torch.rand(1, size, 1, 1, size) < 0.6 if masked else None

    def run():
        out, *_ = ours.triangle_attention(*given, mask, return_aux=True)
        torch.autograd.grad(out.sum(), given)

    logits = 4 * size**3 * H
    assert peak(run, *given) < logits
    monkeypatch.setattr(ours, "_MEMORY", 2**31)
    assert peak(run, *given) > logits


def test_second_derivatives_and_compile():
    given, mask = triangles()
    assert torch.autograd.gradgradcheck(ours.triangle_attention, (*given, mask), fast_mode=True)
    compiled = torch.compile(ours.triangle_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given, mask), ours.triangle_attention(*given, mask))


@pytest.mark.parametrize("memory", [2**31, 1], ids=["whole", "rows"])
def test_the_softmax_is_returned_too(monkeypatch, memory):
    monkeypatch.setattr(ours, "_MEMORY", memory)
    given, mask = triangles(torch.float32)
    out, lse, largest = ours.triangle_attention(*given, mask, 0.3, return_aux=True)
    found = logits(*given[:2], given[3], mask, 0.3).detach()
    assert lse.shape == largest.shape == (B, N, H, Q, 1)
    assert_near(largest, found.amax(-1, keepdim=True), torch.float32)
    assert_near(lse, (found - largest).logsumexp(-1, keepdim=True), torch.float32)
    assert not lse.requires_grad
    assert out.requires_grad


@pytest.mark.parametrize("memory", [2**31, 1], ids=["whole", "rows"])
def test_four_axes_and_rows_of_bias(monkeypatch, memory):
    """A batch of one is returned, as by cuEquivariance; OpenFold 3 passes each row its own bias."""
    monkeypatch.setattr(ours, "_MEMORY", memory)
    given, mask = triangles()
    want = ours.triangle_attention(*given, mask)
    got = ours.triangle_attention(*(x[0] for x in given), mask[0])
    torch.testing.assert_close(got, want[:1])
    bias = torch.randn(B, N, H, Q, K).double()
    got = ours.triangle_attention(*given[:3], bias)
    for row in range(N):
        one = [x[:, row : row + 1] for x in (*given[:3], bias)]
        torch.testing.assert_close(got[:, row : row + 1], ours.triangle_attention(*one))


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(("queries", "keys"), [(Q, 0), (0, K), (0, 0)])
def test_no_keys_and_no_queries(queries, keys, masked):
    given = [
        torch.randn(shape, requires_grad=True)
        for shape in ((B, N, H, queries, D), *[(B, N, H, keys, D)] * 2, (B, 1, H, queries, keys))
    ]
    mask = torch.ones(B, N, 1, 1, keys) if masked else None
    with torch.autocast("cpu", torch.bfloat16):
        out = ours.triangle_attention(*given, mask)
    torch.testing.assert_close(out, torch.zeros(B, N, H, queries, D))
    for x, gradient in zip(given, torch.autograd.grad(out.sum(), given), strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(x))


def test_a_scale_may_be_a_tensor():
    given, mask = triangles()
    want = ours.triangle_attention(*given, mask, 0.3, return_aux=True)
    got = ours.triangle_attention(
        *given, mask, torch.tensor(0.3, dtype=torch.float64), return_aux=True
    )
    assert all(map(torch.equal, got, want))


def test_numbers_of_keys():
    given, _ = triangles()
    lengths = torch.tensor([[0, 1, 4], [6, 9, 2]]).view(B, N, 1, 1, 1).int()
    mask = torch.arange(K) < lengths
    want = ours.triangle_attention(*given, mask, return_aux=True)
    got = ours.triangle_attention(*given, kv_lengths=lengths, return_aux=True)
    for each, expected in zip(got, want, strict=True):
        # A row whose number is 0 has zeros, unlike a row whose mask is.
        assert not each[0, 0].any()
        assert torch.equal(each[0, 1:], expected[0, 1:])
        assert torch.equal(each[1], expected[1])
    for gradient in torch.autograd.grad(got[0].sum(), given[:3]):
        assert not gradient[0, 0].any()
        assert gradient[0, 1:].any()
    found = ours.mask_to_kv_lengths(mask.float())
    assert found.dtype == torch.int32
    assert torch.equal(found, lengths.clamp(max=K))
    assert torch.equal(ours.mask_to_kv_lengths(mask[1]), found[1:])
    with pytest.raises(ValueError, match="mask has a missing key before others; it should be pad"):
        ours.mask_to_kv_lengths(~mask)
    with pytest.raises(ValueError, match=r"mask has shape \(1, 2, 3, 1, 6\); it should be \(B"):
        ours.mask_to_kv_lengths(torch.ones(2, 3, 1, K))


C, Z, M = 6, 3, 2


def tokens(dtype=torch.float64):
    """Return the arguments of `attention_pair_bias`, every one of them."""
    inner, size = H * D, {"a": C, "z": Z, "q": H * D, "k": H * D}
    shapes = {"single_repr": (B * M, N, C), "pair_repr": (B, N, N, Z)}
    shapes |= {f"{kind}_ln_{name}": (size[name],) for name in size for kind in "wb"}
    shapes |= {f"w_proj_{name}": (inner, C) for name in "qkvg"}
    shapes |= {f"b_proj_{name}": (inner,) for name in "qkvg"}
    shapes |= {"w_proj_o": (C, inner), "b_proj_o": (C,), "w_proj_z": (H, Z), "b_proj_z": (H,)}
    given = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return {name: x.requires_grad_() for name, x in given.items()}


def by_formula(a, mask, kind="layer_norm", inf=1e6):
    """Return the output and the bias, as Boltz computes them, in float64."""

    def norm(x, name):
        weight, bias = a.get(f"w_ln_{name}"), a.get(f"b_ln_{name}")
        x = x if kind == "rms_norm" else x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return (x if weight is None else x * weight) + (0 if bias is None else bias)

    def project(x, name):
        return F.linear(x, a[f"w_proj_{name}"], a.get(f"b_proj_{name}"))

    n = norm(a["single_repr"], "a")
    q, k, v, g = (project(n, name) for name in "qkvg")
    q, k = (
        norm(x, name) if f"w_ln_{name}" in a or f"b_ln_{name}" in a else x
        for x, name in ((q, "q"), (k, "k"))
    )
    q, k, v = (x.unflatten(-1, (H, D)).transpose(1, 2) for x in (q, k, v))
    bias = project(norm(a["pair_repr"], "z"), "z").permute(0, 3, 1, 2)
    found = q @ k.mT / D**0.5 + bias.repeat_interleave(M, 0)
    if mask is not None:
        each = mask.double().repeat_interleave(B * M // len(mask), 0)
        found = found + (1 - each[:, None, None]) * -inf
    o = (found.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return project(g.sigmoid() * o, "o"), bias


def called(given, mask, **options):
    names = ("w_ln_a", "b_ln_a", "b_proj_q")
    return ours.attention_pair_bias(
        mask=mask, num_heads=H, **dict.fromkeys(names) | given, **options
    )


@pytest.mark.parametrize("memory", [2**31, 1], ids=["whole", "samples"])
@pytest.mark.parametrize("rows", [None, B, B * M])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_attention_pair_bias(monkeypatch, dtype, rows, memory):
    monkeypatch.setattr(ours, "_MEMORY", memory)
    given = tokens(dtype)
    mask = None if rows is None else torch.tensor([1.0, 0, 1]).expand(rows, N).clone()
    if rows == B * M:
        mask[1] = torch.tensor([0, 1, 1])
        # 16 bits have no digits of logits left beside this bias.
        mask[2] = 0 if dtype == torch.float64 else 1
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    want, bias = by_formula(exact, mask)
    got, z_proj = called(given, mask, return_z_proj=True)
    # Sums of sums: the deviations of single elements grow with their number.
    share = 30 * ROUNDING[dtype] if dtype != torch.bfloat16 else 0.1
    for each, expected in ((got, want), (z_proj, bias)):
        assert each.dtype == dtype
        assert (each.double() - expected).norm() <= share * expected.norm()
    dout = torch.randn_like(want)
    wanted = torch.autograd.grad(want, exact.values(), dout)
    found = torch.autograd.grad(got, given.values(), dout.to(dtype))
    for each, expected in zip(found, wanted, strict=True):
        # The gradient by the bias of keys is zero but for a norm.
        assert (each.double() - expected).norm() <= share * (1 + expected.norm())
    cached = given | {"pair_repr": z_proj}
    again, none = called(cached, mask, is_cached_z_proj=True)
    assert none is None
    torch.testing.assert_close(again, got)


def test_exported_for_any_number_of_samples():
    weights = {name: x.detach() for name, x in tokens().items()}
    weights["pair_repr"] = weights["pair_repr"][:1]

    class Tokens(torch.nn.Module):
        def forward(self, single_repr, mask):
            return called(weights | {"single_repr": single_repr}, mask)[0]

    def given(samples):
        return torch.randn(samples, N, C).double(), torch.ones(samples, N)

    samples = {0: torch.export.Dim("samples", min=2, max=64)}
    program = torch.export.export(
        Tokens(), given(4), dynamic_shapes=(samples, samples), strict=False
    )
    torch.testing.assert_close(program.module()(*(many := given(5))), Tokens()(*many))


def test_the_bias_of_missing_tokens_is_given():
    given, mask = tokens(), torch.tensor([[1, 0, 1], [0, 0, 1]])
    got, _ = called(given, mask, inf=2.0)
    torch.testing.assert_close(got, by_formula(given, mask, inf=2.0)[0])


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_optional_weights_are_ones_and_zeros(kind):
    given = {n: x for n, x in tokens().items() if n.startswith("w_proj") or n.endswith("repr")}
    got, _ = called(given, None, norm_kind=kind)
    torch.testing.assert_close(got, by_formula(given, None, kind)[0])
    given["b_ln_q"] = torch.randn(H * D).double()
    if kind == "layer_norm":
        torch.testing.assert_close(called(given, None)[0], by_formula(given, None)[0])
    else:
        with pytest.raises(ValueError, match="b_ln_q is given; it should be None, as norm_kind"):
            called(given, None, norm_kind=kind)


KEYLESS = {"k": torch.ones(B, N, H, 0, D), "v": torch.ones(B, N, H, 0, D)}
KEYLESS |= {"bias": torch.ones(B, 1, H, Q, 0), "return_aux": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"v": torch.ones(B, N, H, K, D).double()},
            "v has dtype float64; it should have dtype flo",
        ),
        ({"scale": torch.ones(1)}, r"scale has shape \(1,\); it should be \(\)"),
        ({"scale": torch.ones((), requires_grad=True)}, "scale requires grad; it is a constant"),
        (KEYLESS, "k has shape .*; it should have keys, whose maximum return_aux asks for"),
        ({"kv_lengths": torch.ones(1), "mask": torch.ones(1)}, "kv_lengths is given with mask"),
    ],
)
def test_bad_arguments_of_triangles_are_named(changes, message):
    """test_compat_errors.py replaces every tensor."""
    given = dict(zip(("q", "k", "v", "bias"), triangles(torch.float32)[0], strict=True))
    with pytest.raises((TypeError, ValueError), match=f"triangle_attention: {message}"):
        ours.triangle_attention(**given | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; it should be at least 1"),
        ({"norm_kind": "none"}, "norm_kind is 'none'; it should be one of layer_norm, rms_norm"),
        ({"single_repr": torch.ones(3, N, C)}, "single_repr has 3 samples; it should have a mul"),
        ({"is_cached_z_proj": True}, r"pair_repr has shape .*; it should be \(B, 2, 3, 3\)"),
        ({"w_proj_z": None}, "w_proj_z is None; it should be a tensor"),
        ({"w_proj_q": torch.ones(9, C)}, "w_proj_q has 9 rows; it should have a multiple of num_h"),
        ({"w_proj_o": torch.ones(C, 8).double()}, "w_proj_o has dtype float64; it should have dty"),
    ],
)
def test_bad_arguments_of_tokens_are_named(changes, message):
    given = {"mask": None, "num_heads": H, **tokens(torch.float32)} | changes
    with pytest.raises((TypeError, ValueError), match=f"attention_pair_bias: {message}"):
        ours.attention_pair_bias(**given)


@pytest.mark.parametrize("inf", [1e6, 1e9])
def test_a_sample_without_tokens_is_one_with_all(inf):
    """A bias on all of its keys changes no weight; as logits it left no digits of the others."""
    torch.manual_seed(0)
    N, C, Z, H, inner = 5, 8, 6, 2, 16
    a, z = torch.randn(2, N, C), torch.randn(2, N, N, Z)
    mask = torch.ones(2, N, dtype=torch.bool)
    weights = {f"w_proj_{name}": torch.randn(inner, C) / 3 for name in "qkvg"}
    weights |= {"w_proj_o": torch.randn(C, inner) / 3, "w_proj_z": torch.randn(H, Z)}
    none = dict.fromkeys(("w_ln_a", "b_ln_a", "b_proj_q"))
    bias = torch.randn(inner, requires_grad=True)

    def first(mask):
        given = {**weights, **none, "b_proj_v": bias, "inf": inf}
        out = ours.attention_pair_bias(a, z, mask, H, **given)[0][0]
        return out, torch.autograd.grad(out.sum(), bias)[0]

    want = first(mask)
    mask[0] = False
    for got, wanted in zip(first(mask), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
