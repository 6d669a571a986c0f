"""transformers' models, small and random, by our convolutions after `register`, on a CPU.

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
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
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


@pytest.fixture(params=MODELS)
def model(request):
    config = getattr(transformers, f"{request.param}Config")(**SIZES | MODELS[request.param])
    config._experts_implementation = "eager"  # grouped products serve no float64
    torch.manual_seed(0)
    made = getattr(transformers, f"{request.param}ForCausalLM")(config).double().eval()
    for name, parameter in made.named_parameters():
        if "conv" in name:
            torch.nn.init.normal_(parameter)
    return made


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
    causal_conv1d.register()
    try:
        got, gradients = trained(model, ids)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradients, want_gradients)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(decoded(model, ids, 6).detach(), want_decoded)
        given = {"max_new_tokens": 5, "do_sample": False}
        served = model.generate(ids, **given)
    finally:
        causal_conv1d.unregister()
    assert torch.equal(served, model.generate(ids, **given))


def test_our_functions_serve_every_layer(model):
    causal_conv1d.register()
    try:
        layers = sum(isinstance(layer, torch.nn.Conv1d) for layer in model.modules())
        decoded(model, tokens(2, 5), 3)
        calls = {swap.name: swap.calls for swap in swaps() if swap.calls}
    finally:
        causal_conv1d.unregister()
    assert layers
    assert calls == {"causal_conv1d_fn": layers, "causal_conv1d_update": 2 * layers}


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
