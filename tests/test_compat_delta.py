"""Calling conventions of flash-linear-attention's delta rule, against a loop over tokens."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from causal import random  # noqa: E402
from fusedops.compat import fla  # noqa: E402

RULES = fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule
#: For sums of a hundred products of numbers near one, in float64, in different orders.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
B, T, H, HV, K, V = 2, 70, 2, 4, 5, 3


def tokens(B=B, T=T, dtype=torch.float64):
    """Return q, k, v, g and beta; queries and keys aren't of length 1."""
    q, k, v = random(B, T, H, K), random(B, T, H, K) / 4, random(B, T, HV, V)
    return [x.to(dtype) for x in (q, k, v, -random(B, T, HV).abs(), random(B, T, HV).sigmoid())]


def reference(q, k, v, g, beta, S=None, scale=K**-0.5):
    """Return the rule of every token in float64, and the state after the last."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    S = q.new_zeros(len(q), v.shape[2], q.shape[3], v.shape[3]) if S is None else S.double()
    outs = [v[:, :0]]
    for t in range(q.shape[1]):
        S = g[:, t, :, None, None].exp() * S
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S)[:, None])
    return torch.cat(outs, 1), S


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def test_the_arguments_are_those_of_fla():
    """In the order of flash-linear-attention 0.6."""
    chunk, recurrent = (list(inspect.signature(rule).parameters) for rule in RULES)
    assert chunk[:16] == [
        *("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"),
        *("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"),
        *("state_v_first", "cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_context"),
    ]
    assert recurrent == [
        *("q", "k", "v", "g", "gk", "gv", "beta", "scale", "initial_state"),
        *("output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log"),
        *("dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first"),
        *("cu_seqlens", "kwargs"),
    ]
    # transformers passes an argument only if the signature names it.
    assert set(recurrent) - set(chunk) == {"gk", "gv"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("v_first", [False, True])
def test_values_states_and_gradients(rule, v_first):
    state = random(B, HV, K, V)
    leaves = [x.requires_grad_() for x in (*tokens(), state)]
    given = {"initial_state": state.mT.contiguous() if v_first else state, "scale": 0.3}
    q, k, v, g, beta = leaves[:5]
    found = rule(q, k, v, g, beta=beta, output_final_state=True, state_v_first=v_first, **given)
    o, final = reference(*leaves, scale=0.3)
    wanted = o, final.mT if v_first else final
    torch.testing.assert_close(found, wanted, **TOLERANCE)
    assert found[1].is_contiguous()
    cotangents = [random(*out.shape) for out in wanted]
    got, want = (torch.autograd.grad(outs, leaves, cotangents) for outs in (found, wanted))
    torch.testing.assert_close(got, want, **TOLERANCE)
    if v_first:
        with pytest.warns(DeprecationWarning, match="state_v_first now"):
            older = rule(q, k, v, g, beta=beta, transpose_state_layout=True, **given)
        torch.testing.assert_close(older, (o, None), **TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("doubles", [False, True])
def test_what_fla_does_in_its_kernels(rule, bias, doubles):
    q, k, v, *_ = tokens()
    a, b, A_log = random(B, T, HV), random(B, T, HV), random(HV)
    dt_bias = random(HV) if bias else None
    leaves = [x.requires_grad_() for x in (q, k, v, a, b, A_log) + (dt_bias,) * bias]
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
    options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": doubles}
    o, none = rule(q, k, v, a, beta=b, A_log=A_log, dt_bias=dt_bias, **options)
    assert none is None
    rate = torch.nn.functional.softplus(a if dt_bias is None else a + dt_bias)
    beta = b.sigmoid() * (2 if doubles else 1)
    want, _ = reference(unit(q), unit(k), v, -A_log.exp() * rate, beta)
    torch.testing.assert_close(o, want, **TOLERANCE)
    got, wanted = (torch.autograd.grad(x.sin().sum(), leaves) for x in (o, want))
    torch.testing.assert_close(got, wanted, **TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
def test_without_gates_and_strengths(rule):
    """Of an update that isn't gated nothing is forgotten, and one that isn't weighed is whole."""
    q, k, v, g, beta = tokens(T=9)
    o, _ = rule(q, k, v, None, beta=beta, A_log=random(HV))
    torch.testing.assert_close(o, reference(q, k, v, 0 * g, beta)[0], **TOLERANCE)
    o, _ = rule(q, k, v, g, beta=None, dt_bias=random(HV))
    torch.testing.assert_close(o, reference(q, k, v, g, 1 + 0 * beta)[0], **TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("as_object", [False, True])
def test_packed_sequences(rule, as_object):
    starts, arrays, state = [0, 7, 7, 8, 70], tokens(B=1), random(4, HV, K, V)
    q, k, v, g, beta = arrays
    sequences = fusedops.Sequences(starts) if as_object else torch.tensor(starts)
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": sequences}
    o, final = rule(q, k, v, g, beta=beta, **options)
    for s in range(4):
        some = [x[:, starts[s] : starts[s + 1]] for x in arrays]
        want, after = reference(*some, state[s : s + 1])
        torch.testing.assert_close(o[:, starts[s] : starts[s + 1]], want, **TOLERANCE)
        torch.testing.assert_close(final[s : s + 1], after, **TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{}, {"use_qk_l2norm_in_kernel": True}])
def test_sixteen_bits_beside_gates_and_states_in_float32(rule, options):
    """As models call it: results are in the dtype of q, states in float32."""
    q, k, v, g, beta = tokens(dtype=torch.bfloat16)
    given = {"initial_state": random(B, HV, K, V, dtype=torch.float32)}
    o, final = rule(q, k, v, g.float(), beta=beta, output_final_state=True, **given, **options)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    units = [unit(x.double()) if options else x for x in (q, k)]
    want, after = reference(*units, v, g, beta, given["initial_state"])
    # q and k are rounded to 8 bits after the norm, and results up to 4 are.
    torch.testing.assert_close(o.double(), want, rtol=0, atol=0.03)
    torch.testing.assert_close(final.double(), after, rtol=0, atol=0.03 if options else 1e-5)


@pytest.mark.parametrize("of", ["q", "v"])
@pytest.mark.parametrize("rule", RULES)
def test_results_have_the_dtype_that_flas_have(rule, of):
    """Of queries by chunks, of values token by token; states are float32."""
    q, k, v, g, beta = tokens(T=9, dtype=torch.bfloat16)
    q, v = (x.float() if name == of else x for name, x in (("q", q), ("v", v)))
    o, final = rule(q, k, v, g, beta=beta, output_final_state=True)
    own = "q" if rule is fla.chunk_gated_delta_rule else "v"
    assert (o.dtype, final.dtype) == (torch.float32 if own == of else torch.bfloat16, torch.float32)
    want, after = reference(q, k, v, g, beta)
    # Of float32 or, to 8 bits, of bfloat16.
    torch.testing.assert_close(o.double(), want, rtol=1e-5 if own == of else 2**-8, atol=1e-5)
    torch.testing.assert_close(final.double(), after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_where_torch_computes_too(rule, dtype):
    given = refused(A_log=random(HV), dt_bias=random(HV))
    options = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    for name in given:
        bad = given | {name: given[name].to(dtype)}
        with pytest.raises(
            TypeError, match=f"^gated_delta_rule: {name} has dtype .*should be float32"
        ):
            rule(**bad, **dict.fromkeys(options, True))


@pytest.mark.parametrize("rule", RULES)
def test_a_graph_without_breaks(rule):
    q, k, v, a, b = tokens(T=9)
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": random(HV)}
    options |= {"use_beta_sigmoid_in_kernel": True, "output_final_state": True}
    compiled = torch.compile(rule, fullgraph=True, backend="aot_eager")
    found, want = (each(q, k, v, a, beta=b, **options) for each in (compiled, rule))
    torch.testing.assert_close(found, want)


def refused(**changes):
    q, k, v, g, beta = tokens(T=3)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp_context": "ranks"}, "cp_context is given; it should not be: every rank needs all"),
        ({"gk": random(B, 3, HV, K)}, "gk is given; it should not be: every head has one gate"),
        ({"gv": random(B, 3, HV, V)}, "gv is given; it should not be: every head has one gate"),
        ({"head_first": True}, r"head_first is given; it should not be: q, k and v are \(B, T, H"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval is True; it should be False without use_b"),
        ({"use_gate_in_kernel": True}, "A_log is None; it should be a tensor"),
        (
            {"use_gate_in_kernel": True, "A_log": random(HV), "g": None},
            "g is None; it should be a tensor",
        ),
        (
            {"use_gate_in_kernel": True, "A_log": random(H)},
            r"A_log has shape \(2,\); it should be \(4,\)",
        ),
        (
            {"use_gate_in_kernel": True, "A_log": random(HV), "dt_bias": random(HV, 1)},
            r"dt_bias has shape \(4, 1\); it should be \(4,\)",
        ),
        *(
            (
                {"use_gate_in_kernel": True, "A_log": random(HV), name: value},
                rf"{name} has shape .*; it should be \({should}\)",
            )
            for name, value, should in (
                ("g", random(B, 3, 1), "2, 3, 4"),
                ("g", random(3), "2, 3, 4"),
                ("v", random(3), "B, T, HV, V"),
            )
        ),
        (
            {"initial_state": random(B, HV, K, V), "state_v_first": True},
            r"initial_state has shape \(2, 4, 5, 3\); it should be \(N, 4, 3, 5\)",
        ),
        (
            {"state_v_first": True, "transpose_state_layout": False},
            "state_v_first is given; with transpose_state_layout, its older name, it should not be",
        ),
        ({"cu_seqlens": torch.tensor([0, 3])}, "with cu_seqlens it should be"),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_arguments_that_are_not_served_are_named(rule, changes, message):
    with pytest.raises((TypeError, ValueError), match=f"^gated_delta_rule: .*{message}"):
        rule(**refused(**changes))


@pytest.mark.parametrize("rule", RULES)
def test_arguments_of_a_fork_are_ignored(rule):
    given = refused(autotune_interval=7, chunk_size=16, head_first=False, gk=None, cp_context=None)
    want, _ = reference(*(given[name] for name in ("q", "k", "v", "g", "beta")))
    torch.testing.assert_close(rule(**given)[0], want, **TOLERANCE)
