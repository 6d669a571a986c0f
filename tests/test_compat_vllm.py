"""Calling conventions of vLLM and SGLang, against torch's conv1d, sequence by sequence."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from causal import random, reference  # noqa: E402
from fusedops.compat import causal_conv1d, sglang, vllm  # noqa: E402

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
    with torch.inference_mode():
        states = before.clone()
    starts = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="conv_state was made in inference mode"):
        vllm.causal_conv1d_update(
            x, states, weight, conv_state_indices=slots, query_start_loc=starts
        )
    for program in (vllm, sglang):
        with pytest.raises(ValueError, match="conv_states was made in inference mode"):
            program.causal_conv1d_fn(
                x.mT, weight, None, conv_states=states, query_start_loc=starts, cache_indices=slots
            )
    assert torch.equal(states, before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_without_breaks(dynamic):
    """Every run of a graph reads the boundaries and the slots anew."""
    weight, states, goes_on = random(D, W), random(5, D, W + 1), torch.tensor([True, False])

    def served(x, states, starts, slots):
        first = sglang.causal_conv1d_fn(x, weight, None, starts, slots, goes_on, states)
        second = vllm.causal_conv1d_fn(x, weight, None, states, starts, slots, goes_on)
        third = vllm.causal_conv1d_update(
            x.mT.clone(), states, weight, None, "silu", slots, slots.clamp(1, 2), starts
        )
        return first, second, third

    compiled = torch.compile(served, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for starts, slots in (((0, 2, 5), (3, 1)), ((0, 3, 4), (-1, 2))):
        x, own, other = random(D, 6), states.clone(), states.clone()
        given = torch.tensor(starts, dtype=torch.int32), torch.tensor(slots)
        found, want = compiled(x, own, *given), served(x, other, *given)
        torch.testing.assert_close((*found, own), (*want, other))


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_graph_writes_no_windows_to_rows_that_there_are_not():
    """They aren't read there, so that they can't be an error, as on a GPU; slots are."""
    weight, x, states = random(D, W), random(2, D), random(3, D, W - 1)
    compiled = torch.compile(sglang.causal_conv1d_update, fullgraph=True, backend="aot_eager")

    def decode(rows, slots):
        windows = torch.zeros(2, 1, D, W - 1, dtype=torch.float64)
        given = {"conv_state_indices": torch.tensor(slots), "intermediate_conv_window": windows}
        compiled(x, states, weight, **given, intermediate_state_indices=torch.tensor(rows))
        return windows

    with pytest.raises(ValueError, match="slots has 9; it should be below 3"):
        decode((1, 0), (9, 2))
    for rows, slots, changed in (((7, 0), (2, 1), [0]), ((5, 6), (0, 1), [])):
        windows = decode(rows, slots)
        assert windows.flatten(1).any(1).nonzero()[:, 0].tolist() == changed
    none = torch.zeros(0, 1, D, W - 1, dtype=torch.float64)
    given = {"intermediate_conv_window": none, "intermediate_state_indices": torch.tensor([-1, -1])}
    sglang.causal_conv1d_update(x, states, weight, **given)


def test_sglang_takes_sequences_of_one_length_and_no_states():
    x, weight = random(2, D, 5), random(D, W)
    want = torch.stack([convolved(torch.zeros(D, W - 1), each, weight)[0] for each in x])
    torch.testing.assert_close(sglang.causal_conv1d_fn(x, weight), want)
    circular, had = random(2, D, 5), torch.tensor([0, 5])
    want, _ = convolved(circular[0, :, 2:], x[0, :, :1], weight, silu=False)
    out = sglang.causal_conv1d_update(x[..., 0], circular, weight, None, None, had)
    torch.testing.assert_close(out[0], want[:, 0])


STARTS, SLOTS = torch.tensor([0, 2, 4]), torch.tensor([2, 1])
ACTIVATION = {"activation": "gelu"}, "activation is 'gelu'"
FN = [
    ({"conv_states": None}, "conv_states is None|conv_states should then be given"),
    ({"conv_states": torch.ones(3, D, 2)}, "conv_states has 2 inputs"),
    ({"query_start_loc": torch.tensor([0, 2, 9])}, "query_start_loc is .0, 2, 9."),
    ({"query_start_loc": torch.tensor([0, 3, 2])}, "query_start_loc is .0, 3, 2."),
    ({"query_start_loc": torch.tensor(4)}, "query_start_loc has shape"),
    ({"cache_indices": torch.tensor([2, 7])}, "cache_indices has 7"),
    ({"cache_indices": torch.tensor([1, 1])}, "cache_indices has 1 twice"),
    ({"pad_slot_id": SLOTS}, "pad_slot_id is a Tensor"),
    ({"validate_data": SLOTS}, "validate_data is a Tensor"),
    ACTIVATION,
]
UPDATE = [
    ({"conv_state": torch.ones(3, D, 2)}, "conv_state has 2"),
    ({"conv_state_indices": torch.tensor([2, 7])}, "conv_state_indices has 7"),
    ({"conv_state_indices": torch.tensor([1, 1])}, "conv_state_indices has 1 twice"),
    ACTIVATION,
]
ONLY = {
    vllm: [
        ({"num_accepted_tokens": torch.tensor([3, 1])}, "num_accepted_tokens is .3, 1."),
        ({"num_accepted_tokens": torch.tensor([0, 1])}, "num_accepted_tokens is .0, 1."),
        ({"null_block_id": SLOTS}, "null_block_id is a Tensor"),
        ({"query_start_loc": torch.tensor(4)}, "query_start_loc has shape"),
        (
            {"query_start_loc": STARTS[:0], "conv_state_indices": None},
            r"query_start_loc has shape \(0,\)",
        ),
        ({"conv_state_indices": SLOTS[:, None][:, :0]}, r"conv_state_indices has shape \(2, 0\)"),
        ({"conv_state": torch.tensor(1.0)}, "conv_state has shape .*N, 8, L"),
        ({"out": torch.ones(2, D).double()}, "out has dtype"),
        ({"x": torch.ones(1, D).expand(2, D)}, "x overlaps itself"),
    ],
    sglang: [
        ({"num_accept_tokens": -1}, "num_accept_tokens is a int"),
        ({"retrieve_next_token": SLOTS}, "retrieve_next_token is given"),
        ({"retrieve_parent_token": SLOTS}, "retrieve_parent_token is given"),
        (
            {"intermediate_conv_window": torch.ones(2, 1, D, 3)},
            "intermediate_state_indices is None",
        ),
        ({"intermediate_state_indices": SLOTS}, "intermediate_state_indices is given"),
        (
            {"cache_seqlens": SLOTS, "num_accept_tokens": SLOTS},
            "num_accept_tokens is given with cache_seqlens",
        ),
    ],
}
PREFILL = {"x": torch.ones(D, 4), "bias": None, "query_start_loc": STARTS, "cache_indices": SLOTS}
DECODING = {"x": torch.ones(2, D), "conv_state_indices": SLOTS}


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (
            getattr(program, name),
            PREFILL | changes if name.endswith("fn") else DECODING | changes,
            m,
        )
        for program in (vllm, sglang)
        for name, bad in (
            ("causal_conv1d_fn", FN),
            ("causal_conv1d_update", UPDATE + ONLY[program]),
        )
        for changes, m in bad
    ],
)
def test_bad_arguments(function, changes, message):
    """test_compat_errors.py replaces every tensor."""
    states, name = torch.ones(3, D, W), "conv_state" + "s" * function.__name__.endswith("fn")
    before = changes["x"].clone()
    errors = (TypeError, ValueError, NotImplementedError)
    with pytest.raises(errors, match=f"{function.__name__}: .*({message})"):
        function(**{name: states, "weight": torch.ones(D, W)} | changes)
    assert (states == 1).all()
    assert torch.equal(changes["x"], before)


def test_boundaries_that_another_library_writes():
    """Torch doesn't count writes of NumPy, or of another process, to memory on the CPU."""
    torch.manual_seed(0)
    x, weight, states = torch.randn(3, 5), torch.randn(3, 4), torch.randn(3, 3, 3)
    starts = torch.tensor([0, 2, 5])
    vllm.causal_conv1d_fn(x, weight, None, states.clone(), starts)
    np.from_dlpack(starts)[1] = 3
    found = vllm.causal_conv1d_fn(x, weight, None, states.clone(), starts)
    want = vllm.causal_conv1d_fn(x, weight, None, states.clone(), torch.tensor([0, 3, 5]))
    assert torch.equal(found, want)
    numbers = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
    causal_conv1d.causal_conv1d_fn(x[None], weight, None, numbers)
    numbers.data[0, 2] = 0
    found = causal_conv1d.causal_conv1d_fn(x[None], weight, None, numbers)
    want = causal_conv1d.causal_conv1d_fn(x[None], weight, None, numbers.clone())
    assert torch.equal(found, want)


def test_outputs_that_are_arguments_are_refused():
    weight, states, x = torch.randn(3, 4), torch.randn(4, 3, 3), torch.randn(2, 3)
    slots, before = torch.tensor([1, 2]), states.clone()
    for out, name in ((states[1:3, :, 0], "conv_state"), (weight.T[:2], "weight")):
        with pytest.raises(ValueError, match=f"out shares memory with {name}; it should not"):
            vllm.causal_conv1d_update(x, states, weight, None, None, slots, out=out)
    starts = torch.tensor([0, 1, 2])
    for more in ((), (None, starts)):
        given = states[:2, :, 0], states, weight, None, None, torch.tensor([2, 3]), *more
        with pytest.raises(ValueError, match="conv_state shares memory with x; it should not"):
            vllm.causal_conv1d_update(*given)
    assert torch.equal(states, before)
