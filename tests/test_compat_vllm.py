"""Calling conventions of vLLM and SGLang, against torch's conv1d, sequence by sequence."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from causal import random, reference  # noqa: E402
from fusedops.compat import sglang, vllm  # noqa: E402

D, W = 8, 4


def convolved(past, tokens, weight, bias=None, silu=True):
    """Return the convolution (D, T) of tokens that follow W - 1 inputs, and all of the inputs."""
    out = reference(tokens[None], weight, bias, past[None], "silu" if silu else None)[0]
    return out, torch.cat([past, tokens], -1)


def test_the_sixth_positional_argument_is_the_slots():
    """A call in vLLM's order, which causal-conv1d takes for lengths of circular states."""
    x, states, weight = random(2, 8), random(2, 8, 4), random(8, 4)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    want = [convolved(states[s, :, :3], x[b, :, None], weight) for b, s in enumerate((1, 0))]
    state = states.clone()
    out = vllm.causal_conv1d_update(
        x.clone(), state, weight, None, "silu", slots, null_block_id=None
    )
    torch.testing.assert_close(out, torch.cat([each for each, _ in want], 1).mT)
    for b, s in enumerate((1, 0)):
        assert torch.equal(state[s, :, :3], want[b][1][:, 1:])
    # By default block 0 is padding.
    state = states.clone()
    out = vllm.causal_conv1d_update(x.clone(), state, weight, None, True, slots)
    torch.testing.assert_close(out[0], want[0][0][:, 0])
    assert torch.equal(state[0], states[0])


@pytest.mark.parametrize("program", [vllm, sglang])
@pytest.mark.parametrize("room", [0, 2])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_packed_sequences(program, room, slot_dtype):
    """Continuous batching with padding, empty sequences, and tokens that belong to none."""
    starts = torch.tensor([0, 2, 2, 7, 8, 9], dtype=torch.int32)
    padding = 0 if program is vllm else -1
    # One slot more than sequences, of which the first is padding.
    slots = torch.tensor([padding, 3, 1, padding, 5, 9], dtype=slot_dtype)
    goes_on = torch.tensor([True, False, False, True, True])
    x, weight, bias = random(11, D).mT, random(D, W), random(D)
    states = random(6, W - 1 + room, D).mT
    before, given = states.clone(), x.clone()
    out = program.causal_conv1d_fn(
        x.requires_grad_(),
        weight,
        bias,
        conv_states=states,
        query_start_loc=starts,
        cache_indices=slots,
        has_initial_state=goes_on,
        activation=True,
    )
    assert not out.requires_grad
    assert torch.equal(x, given)
    for b in (2, 4):
        some = slice(int(starts[b]), int(starts[b + 1]))
        past = before[slots[b], :, : W - 1] * goes_on[b]
        want, inputs = convolved(past, given[:, some], weight, bias)
        torch.testing.assert_close(out[:, some].detach(), want)
        before[slots[b], :, : W - 1] = inputs[:, 1 - W :]
    assert torch.equal(states, before)


@pytest.mark.parametrize("layout", ["packed", "dense", "sglang"])
def test_speculative_decoding(layout):
    """Whatever number of drafts is accepted, the next call goes on after the last of them."""
    weight, bias, drafts = random(D, W), random(D), 3
    states, slots = random(5, D, W - 1 + drafts - 1), torch.tensor([3, 1])
    history = [states[s, :, : W - 1].clone() for s in (3, 1)]
    untouched = states[[0, 2, 4]].clone()
    accepted = torch.tensor([1, 1], dtype=torch.int32)
    drawn = [torch.empty(D, 0, dtype=torch.float64)] * 2
    for took in ((1, 3), (2, 1), (3, 2), (1, 1)):
        lengths = (drafts, drafts if layout != "packed" else max(took[1], 2))
        x = [random(D, n) for n in lengths]
        for b in (0, 1):
            # The first token of a call was drawn in the last one, after its accepted tokens.
            history[b] = torch.cat([history[b], drawn[b]], -1)
        if layout == "packed":
            starts = torch.tensor([0, *lengths]).cumsum(0)
            out = vllm.causal_conv1d_update(
                torch.cat(x, 1).mT.contiguous(),
                states,
                weight,
                bias,
                "silu",
                slots,
                accepted,
                starts,
                drafts,
            ).mT.split(lengths, 1)
        elif layout == "dense":
            out = vllm.causal_conv1d_update(
                torch.stack(x), states, weight, bias, "silu", slots[:, None].repeat(1, 2), accepted
            )
        else:
            out = sglang.causal_conv1d_update(
                torch.stack(x), states, weight, bias, "silu", None, slots, accepted
            )
        for b in (0, 1):
            want, _ = convolved(history[b][:, 1 - W :], x[b], weight, bias)
            torch.testing.assert_close(out[b], want)
            drawn[b] = x[b][:, : took[b]]
        accepted = torch.tensor(took, dtype=torch.int32)
    assert torch.equal(states[[0, 2, 4]], untouched)


def test_vllm_writes_the_result_to_x_or_out():
    x, weight, slots = random(2, D), random(D, W), torch.tensor([2, 1])
    states, given = random(3, D, W - 1), x.clone()
    other, filled = states.clone(), torch.empty_like(x)
    assert vllm.causal_conv1d_update(x, states, weight, None, None, slots) is x
    out = vllm.causal_conv1d_update(given, other, weight, None, None, slots, out=filled)
    assert out is filled
    assert torch.equal(filled, x)
    assert not torch.equal(given, x)
    # Tokens are rounded to the dtype of the states, and x of another dtype is kept.
    single = given.float()
    out = vllm.causal_conv1d_update(single, random(3, D, W - 1), weight, None, None, slots)
    assert out.dtype == torch.float32
    assert torch.equal(single, given.float())


def test_tensors_that_can_not_be_written_to():
    weight, slots = random(D, W), torch.tensor([2, 1])
    states, x = random(3, D, W - 1), random(2, D)
    with torch.inference_mode():
        inference = x.clone()
    want = vllm.causal_conv1d_update(x.clone(), states.clone(), weight, None, None, slots)
    for given in (x.clone().requires_grad_(), inference):
        out = vllm.causal_conv1d_update(given, states.clone(), weight, None, None, slots)
        assert not out.requires_grad
        assert torch.equal(out, want)
        assert torch.equal(given, x)
    before = states.clone()
    for out, message in (
        (x.clone().requires_grad_(), "out requires grad"),
        (inference, "out was made in inference mode"),
    ):
        with pytest.raises(ValueError, match=message):
            vllm.causal_conv1d_update(x, states, weight, None, None, slots, out=out)
    with torch.inference_mode():
        windows = {"intermediate_conv_window": torch.zeros(2, 1, D, W - 1, dtype=x.dtype)}
    windows["intermediate_state_indices"] = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="intermediate_conv_window was made in inference mode"):
        sglang.causal_conv1d_update(x, states, weight, conv_state_indices=slots, **windows)
    assert torch.equal(states, before)


@pytest.mark.parametrize("tokens", [None, 3])
def test_sglang_keeps_the_states_between_tokens(tokens):
    x = random(3, D) if tokens is None else random(3, D, tokens)
    weight, states, slots = random(D, W), random(5, D, W - 1), torch.tensor([4, -1, 0])
    windows, rows = torch.zeros(4, 3, D, W - 1, dtype=torch.float64), torch.tensor([1, 2, 3])
    before = states.clone()
    sglang.causal_conv1d_update(
        x,
        states,
        weight,
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=rows,
    )
    for b in (0, 2):
        _, inputs = convolved(before[slots[b]], x[b].reshape(D, -1), weight)
        for t in range(tokens or 1):
            assert torch.equal(windows[rows[b], t], inputs[:, 1 + t : W + t])
    assert not windows[[0, 2]].any()


def test_sglang_takes_sequences_of_one_length_and_no_states():
    x, weight = random(2, D, 5), random(D, W)
    want = torch.stack([convolved(torch.zeros(D, W - 1), each, weight)[0] for each in x])
    torch.testing.assert_close(sglang.causal_conv1d_fn(x, weight), want)
    circular, had = random(2, D, 5), torch.tensor([0, 5])
    want, _ = convolved(circular[0, :, 2:], x[0, :, :1], weight, silu=False)
    out = sglang.causal_conv1d_update(x[..., 0], circular, weight, None, None, had)
    torch.testing.assert_close(out[0], want[:, 0])


STARTS, SLOTS = torch.tensor([0, 2, 4]), torch.tensor([2, 1])
FN = {
    "conv_states is None": {"conv_states": None},
    "conv_states has 2 inputs": {"conv_states": torch.ones(3, D, 2)},
    "conv_states has shape": {"conv_states": torch.ones(3, D + 1, 3)},
    "weight has shape": {"weight": torch.ones(D + 1, W)},
    "bias has shape": {"bias": torch.ones(D + 1)},
    "x has shape": {"x": torch.ones(D)},
    "query_start_loc has dtype": {"query_start_loc": STARTS.float()},
    "query_start_loc is .0, 2, 9.": {"query_start_loc": torch.tensor([0, 2, 9])},
    "query_start_loc is .0, 3, 2.": {"query_start_loc": torch.tensor([0, 3, 2])},
    "cache_indices has 7": {"cache_indices": torch.tensor([2, 7])},
    "cache_indices has 1 twice": {"cache_indices": torch.tensor([1, 1])},
    "cache_indices has shape": {"cache_indices": torch.tensor([1])},
    "has_initial_state has dtype": {"has_initial_state": torch.tensor([1, 0])},
    "has_initial_state has shape": {"has_initial_state": torch.tensor([True])},
    "activation is 'gelu'": {"activation": "gelu"},
    "pad_slot_id is a Tensor": {"pad_slot_id": SLOTS},
    "validate_data is a Tensor": {"validate_data": SLOTS},
}


@pytest.mark.parametrize("program", [vllm, sglang])
@pytest.mark.parametrize("message", FN)
def test_bad_arguments_of_prefill(program, message):
    states = torch.ones(3, D, W - 1)
    right = {
        "x": torch.ones(D, 4),
        "weight": torch.ones(D, W),
        "bias": None,
        "conv_states": states,
        "query_start_loc": STARTS,
        "cache_indices": SLOTS,
        "has_initial_state": torch.tensor([True, False]),
    }
    if program is sglang and "None" in message:
        message, bad = "conv_states should then be given", {"conv_states": None}
    else:
        bad = FN[message]
    with pytest.raises((TypeError, ValueError), match=f"causal_conv1d_fn: .*{message}"):
        program.causal_conv1d_fn(**{**right, **bad})
    assert torch.equal(states, torch.ones(3, D, W - 1))


UPDATE = {
    "x has shape": {"x": torch.ones(D)},
    "weight has shape": {"weight": torch.ones(D + 1, W)},
    "conv_state has 2": {"conv_state": torch.ones(3, D, 2)},
    "conv_state is None": {"conv_state": None},
    "conv_state_indices has 7": {"conv_state_indices": torch.tensor([2, 7])},
    "conv_state_indices has 1 twice": {"conv_state_indices": torch.tensor([1, 1])},
    "conv_state_indices has shape": {"conv_state_indices": torch.tensor([1])},
    "activation is 'gelu'": {"activation": "gelu"},
}
ONLY = {
    vllm: {
        "num_accepted_tokens is .3, 1.": {"num_accepted_tokens": torch.tensor([3, 1])},
        "num_accepted_tokens is .0, 1.": {"num_accepted_tokens": torch.tensor([0, 1])},
        "query_start_loc is a list": {"query_start_loc": [0, 1, 2]},
        "null_block_id is a Tensor": {"null_block_id": SLOTS},
        "out has shape": {"out": torch.ones(2)},
        "out has dtype": {"out": torch.ones(2, D).double()},
        "x overlaps itself": {"x": torch.ones(1, D).expand(2, D)},
    },
    sglang: {
        "num_accept_tokens is a int": {"num_accept_tokens": -1},
        "retrieve_next_token is given": {"retrieve_next_token": SLOTS},
        "retrieve_parent_token is given": {"retrieve_parent_token": SLOTS},
        "intermediate_state_indices is None": {
            "intermediate_conv_window": torch.ones(2, 1, D, W - 1)
        },
        "intermediate_state_indices is given": {"intermediate_state_indices": SLOTS},
        "intermediate_conv_window has shape": {"intermediate_conv_window": torch.ones(2, 1, D, W)},
        "num_accept_tokens is given with cache_seqlens": {
            "cache_seqlens": SLOTS,
            "num_accept_tokens": SLOTS,
        },
    },
}


@pytest.mark.parametrize(
    ("program", "message"),
    [(program, each) for program in ONLY for each in (*UPDATE, *ONLY[program])],
)
def test_bad_arguments_of_decoding(program, message):
    states = torch.ones(3, D, W)
    right = {
        "x": torch.ones(2, D),
        "conv_state": states,
        "weight": torch.ones(D, W),
        "conv_state_indices": SLOTS,
    }
    bad = {**UPDATE, **ONLY[program]}[message]
    errors = (TypeError, ValueError, NotImplementedError)
    with pytest.raises(errors, match=f"causal_conv1d_update: .*{message}"):
        program.causal_conv1d_update(**{**right, **bad})
    assert torch.equal(states, torch.ones(3, D, W))
    assert torch.equal(right["x"], torch.ones(2, D))
