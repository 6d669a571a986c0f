"""Wrong tensors for other programs' functions: errors name arguments, and no state changes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from contract import named  # noqa: E402
from fusedops.compat import causal_conv1d, cuequivariance, fla, sglang, vllm  # noqa: E402

ones = torch.ones


def whole(*values):
    return torch.tensor(values, dtype=torch.int32)


WEIGHT = {"weight": ones(8, 4), "bias": ones(8)}
CHANNELS = {"x": ones(2, 8, 5), **WEIGHT}
TOKEN = {"x": ones(2, 8), **WEIGHT}
STATE = {"conv_state": ones(3, 8, 5), "conv_state_indices": whole(2, 1)}
SHORT = {"x": ones(2, 1, 8), "residual": ones(2, 1, 8), "cache": ones(2, 8, 4)}
RULE = {"q": ones(2, 3, 2, 5), "k": ones(2, 3, 2, 5), "v": ones(2, 3, 4, 3), "g": -ones(2, 3, 4)}
RULE |= {"beta": ones(2, 3, 4), "initial_state": ones(2, 4, 5, 3)}
PACKED = {"x": ones(8, 4), **WEIGHT, "conv_states": ones(3, 8, 3), "cache_indices": whole(2, 1)}
PACKED |= {"query_start_loc": whole(0, 2, 4), "has_initial_state": whole(1, 0).bool()}
DRAFTS = {"query_start_loc": whole(0, 2, 4), "num_accepted_tokens": whole(1, 2)}
BACK = {"dout": ones(2, 8, 5), "initial_states": ones(2, 8, 3), "dfinal_states": ones(2, 8, 3)}
BACK |= {"dx": ones(2, 8, 5), "seq_idx": None, "return_dinitial_states": True}
WINDOWS = {"intermediate_conv_window": ones(2, 1, 8, 3), "intermediate_state_indices": whole(0, 1)}
TRIANGLES = {"q": ones(2, 3, 2, 5, 4), "k": ones(2, 3, 2, 6, 4), "v": ones(2, 3, 2, 6, 4)}
TRIANGLES |= {"bias": ones(2, 1, 2, 5, 6)}
PAIRS = {"single_repr": ones(4, 3, 6), "pair_repr": ones(2, 3, 3, 5), "mask": ones(4, 3)}
PAIRS |= {
    f"{p}_ln_{n}": ones(6 if n == "a" else 5 if n == "z" else 8) for p in "wb" for n in "azqk"
}
PAIRS |= {f"w_proj_{n}": ones(8, 6) for n in "qkvg"} | {f"b_proj_{n}": ones(8) for n in "qkvg"}
PAIRS |= {"w_proj_o": ones(6, 8), "b_proj_o": ones(6), "w_proj_z": ones(2, 5), "b_proj_z": ones(2)}

frozen = fla.ShortConvolution(8, 4).requires_grad_(False)
RIGHT = [
    (causal_conv1d.causal_conv1d_fn, {**CHANNELS, "initial_states": ones(2, 8, 3)}),
    (causal_conv1d.causal_conv1d_fn, {**CHANNELS, "seq_idx": whole([0] * 5, [1] * 5)}),
    (causal_conv1d.causal_conv1d_update, {**TOKEN, **STATE, "cache_seqlens": whole(0, 3)}),
    (causal_conv1d.causal_conv1d_bwd_function, {**CHANNELS, **BACK, "silu_activation": True}),
    (fla.causal_conv1d, {"x": ones(2, 5, 8), **WEIGHT, "residual": ones(2, 5, 8)}),
    (fla.causal_conv1d, {"x": ones(2, 5, 8), **WEIGHT, "initial_state": ones(2, 8, 4)}),
    (fla.causal_conv1d_update, {**TOKEN, "residual": ones(2, 8), "cache": ones(2, 8, 4)}),
    *(
        (step, SHORT)
        for module in (fla.ShortConvolution(8, 4), frozen)
        for step in (module, module.step)
    ),
    *((program.causal_conv1d_fn, PACKED) for program in (vllm, sglang)),
    (vllm.causal_conv1d_update, {**TOKEN, **STATE, "out": ones(2, 8)}),
    (vllm.causal_conv1d_update, {**STATE, **WEIGHT, **DRAFTS, "x": ones(4, 8)}),
    (sglang.causal_conv1d_update, {**TOKEN, **STATE, **WINDOWS}),
    (sglang.causal_conv1d_update, {**TOKEN, **STATE, "num_accept_tokens": whole(1, 1)}),
    *((rule, RULE) for rule in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule)),
    (cuequivariance.triangle_attention, {**TRIANGLES, "mask": ones(2, 3, 1, 1, 6)}),
    (
        cuequivariance.triangle_attention,
        {**TRIANGLES, "kv_lengths": whole(6).expand(2, 3, 1, 1, 1)},
    ),
    (cuequivariance.attention_pair_bias, {**PAIRS, "num_heads": 2}),
]
#: Arguments whose axes may have other lengths.
FREE = {
    "x": (0, 1, 2),
    "single_repr": (0,),
    "pair_repr": (0,),
    "weight": (1,),
    "conv_state": (0, 2),
}
FREE |= {"conv_states": (0, 2), "cache_indices": (0,), "intermediate_conv_window": (0, 1)}
#: The names in errors where they aren't the functions'.
OPS = dict.fromkeys(
    ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), "gated_delta_rule"
)
OPS |= {"step": "ShortConvolution", "causal_conv1d": "(causal_conv1d|dynamic_conv)"}


def wrong(name, value):
    """Yield what no function takes for a tensor."""
    yield "a list", value.tolist()
    yield "an array", value.numpy()
    yield "of another rank", value[(None,) * 6]
    yield "on meta", value.to("meta")
    if name != "mask":
        yield "of another dtype", value.int() if value.is_floating_point() else value.float()
    for axis in {*range(value.ndim)}.difference(FREE.get(name, ())):
        yield f"twice axis {axis}", torch.cat([value, value], axis)


@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_junk(number):
    function, right = RIGHT[number]
    op = getattr(function, "__name__", "step")
    op = OPS.get(op, op)
    errors = TypeError, ValueError, NotImplementedError
    for name in [n for n, v in right.items() if isinstance(v, torch.Tensor)]:
        given = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in right.items()}
        for kind, value in wrong(name, given[name]):
            # Of sizes that don't go together the error names either.
            one = ".*" if kind.startswith(("twice", "of another rank")) else rf".*\b{name}\b"
            with named(f"{name} {kind}"), pytest.raises(errors, match=rf"^{op}: (?={one}).*should"):
                function(**given | {name: value})
        for other, value in right.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(given[other], value)
