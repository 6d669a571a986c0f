"""transformers' models, small and random, by our functions after `register`, on a CPU.

Skipped without transformers; `make peer-tests` runs these tests.
"""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "Qwen3NextForCausalLM"):
    pytest.skip("an older transformers", allow_module_level=True)

from fusedops.compat import causal_conv1d, swaps  # noqa: E402
from fusedops.compat import transformers as ours  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
#: Models of each class, with a convolution and what goes with it.
MODELS = {
    "Mamba": {"state_size": 4},
    "Mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "FalconMamba": {"state_size": 4},
    "Bamba": {**HEADS, "attn_layer_indices": [1]},
    "FalconH1": {**HEADS, "mamba_d_ssm": 64},
    "Zamba2": {
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid"],
        "adapter_rank": 4,
    },
    "Qwen3Next": {
        **EXPERTS,
        **DELTA,
        "head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3_5": {**DELTA, "head_dim": 8},
    "OlmoHybrid": DELTA,
    "LaraMini": {**EXPERTS, **DELTA, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "GraniteMoeHybrid": {
        **HEADS,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"],
    },
}
#: Where transformers' own decoding differs from its prefill.
ROUGH = {"Bamba": 1e-3}


def make(name):
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = kind.config_class(**SIZES | MODELS[name])
    config._experts_implementation = "eager"  # grouped products serve no float64
    torch.manual_seed(0)
    made = kind(config).double().eval()
    for name, parameter in made.named_parameters():
        if "conv" in name:
            torch.nn.init.normal_(parameter)
    return made


@pytest.fixture(params=MODELS)
def model(request):
    return make(request.param)


def has_delta_rule(model):
    return model.config.to_dict().get("linear_key_head_dim") is not None


def tokens(*shape):
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(0))


def trained(model, ids):
    """Return the logits, and the gradient of every parameter."""
    model.zero_grad()
    found = model(ids, labels=ids, use_cache=False)
    found.loss.backward()
    return found.logits, {name: p.grad for name, p in model.named_parameters()}


def decoded(model, ids, prompt):
    """Return the logits of every token, after a prompt one token at a time."""
    found = model(ids[:, :prompt], use_cache=True)
    logits = [found.logits]
    for t in range(prompt, ids.shape[1]):
        found = model(ids[:, t : t + 1], use_cache=True, cache=found.cache)
        logits.append(found.logits)
    return torch.cat(logits, 1)


def test_a_model(model):
    """Logits, gradients and decoding are those of transformers' plain torch, before and after."""
    ids = tokens(2, 11)
    want, want_gradients = trained(model, ids)
    with torch.no_grad():
        want_decoded = decoded(model, ids, 6)
    apart = ROUGH.get(type(model).__name__.removesuffix("ForCausalLM"), 1e-6)
    torch.testing.assert_close(want_decoded, want.detach(), rtol=0, atol=apart)
    # transformers computes a delta rule in float32, whatever the model's dtype.
    close = {"rtol": 1e-5, "atol": 1e-6} if has_delta_rule(model) else {}
    ours.register()
    try:
        got, gradients = trained(model, ids)
        torch.testing.assert_close(got, want, **close)
        torch.testing.assert_close(gradients, want_gradients, **close)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                found = decoded(model, ids, 6).detach()
            torch.testing.assert_close(found, want_decoded, **close)
        given = {"max_new_tokens": 5, "do_sample": False}
        served = model.generate(ids, **given)
    finally:
        ours.unregister()
    assert torch.equal(served, model.generate(ids, **given))


def test_our_functions_serve_every_layer(model):
    ours.register()
    try:
        layers = sum(isinstance(layer, torch.nn.Conv1d) for layer in model.modules())
        decoded(model, tokens(2, 5), 3)
        calls = {swap.name: swap.calls for swap in swaps() if swap.calls}
    finally:
        ours.unregister()
    assert layers
    want = {"causal_conv1d_fn": layers, "causal_conv1d_update": 2 * layers}
    if has_delta_rule(model):
        want |= {"chunk_gated_delta_rule": layers, "fused_recurrent_gated_delta_rule": 2 * layers}
    assert calls == want


def test_a_model_that_is_imported_after_register():
    x, weight = torch.randn(1, 4, 5), torch.randn(4, 3)
    causal_conv1d.register()
    try:
        name = "transformers.models.lfm2_moe.modeling_lfm2_moe"
        modeling = importlib.import_module(name)
        with pytest.raises(NotImplementedError, match="causal_conv1d_fn: activation is 'gelu'"):
            modeling.causal_conv1d_fn(x, weight, activation="gelu")
        numbers = torch.tensor([[0, 0, 1, 1, 1]])
        out = modeling.causal_conv1d_fn(x, weight, seq_idx=numbers)
        alone = modeling.causal_conv1d_fn(x[..., 2:], weight)
        torch.testing.assert_close(out[..., 2:], alone)
    finally:
        causal_conv1d.unregister()
    torch.testing.assert_close(modeling.causal_conv1d_fn(x[..., 2:], weight), alone)
    modeling.causal_conv1d_fn(x, weight, activation="gelu")
    with pytest.raises(ValueError, match="packed sequences"):
        modeling.causal_conv1d_fn(x, weight, seq_idx=numbers)


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5", "LaraMini"])
def test_packed_sequences_are_separate_ones(monkeypatch, name):
    """As transformers' collator passes them; its plain torch can't keep them apart."""
    layers = ["linear_attention", "linear_attention"]
    monkeypatch.setitem(MODELS, name, MODELS[name] | {"layer_types": layers})
    model, ids = make(name), tokens(1, 11)
    starts = torch.tensor([0, 4, 11], dtype=torch.int32)
    packed = {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "seq_idx": torch.tensor([[0] * 4 + [1] * 7], dtype=torch.int32),
        "position_ids": torch.tensor([[*range(4), *range(7)]]),
    }
    ours.register()
    try:
        logits = model(ids, use_cache=False, **packed).logits
        for first, last in ((0, 4), (4, 11)):
            alone = model(ids[:, first:last], use_cache=False).logits
            torch.testing.assert_close(logits[:, first:last], alone)
    finally:
        ours.unregister()
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids, use_cache=False, **packed)


def test_a_model_with_a_delta_rule_that_is_imported_after_register():
    q = k = v = torch.ones(1, 3, 1, 2)
    g, beta = torch.zeros(1, 3, 1), torch.ones(1, 3, 1)
    ours.register()
    try:
        name = "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe"
        modeling = importlib.import_module(name)
        rules = modeling.torch_chunk_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule
        starts = torch.tensor([0, 1, 3])
        for rule in rules:
            out, _ = rule(q, k, v, g=g, beta=beta, cu_seqlens=starts)
            alone, _ = rule(q[:, 1:], k[:, 1:], v[:, 1:], g=g[:, 1:], beta=beta[:, 1:])
            torch.testing.assert_close(out[:, 1:], alone)
    finally:
        ours.unregister()
    torch.testing.assert_close(
        modeling.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True),
        rules[1](q, k, v, g=g, beta=beta, output_final_state=True),
    )
    with pytest.raises(ValueError, match="packed sequences"):
        modeling.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=starts)
