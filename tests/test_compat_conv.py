"""Calling conventions of causal-conv1d and flash-linear-attention, against torch's conv1d."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import fusedops  # noqa: E402
from causal import random, reference  # noqa: E402
from fusedops.compat import causal_conv1d, fla  # noqa: E402


def same_gradients(found, wanted, leaves):
    cotangents = [random(*out.shape) for out in found]
    got, want = (torch.autograd.grad(outs, leaves, cotangents) for outs in (found, wanted))
    torch.testing.assert_close(got, want)


def channel_last(x):
    return x.mT.contiguous().mT


@pytest.fixture(params=[torch.Tensor.contiguous, channel_last], ids=["BDT", "BTD"])
def layout(request):
    return request.param


@pytest.mark.parametrize("width", [1, 2, 4])
def test_causal_conv1d_fn(layout, width):
    x, weight, bias = random(2, 8, 70), random(8, width), random(8)
    before = random(2, 8, width - 1)
    leaves = [t.requires_grad_() for t in (layout(x), weight, bias, before)]
    filled = torch.empty(2, 8, width - 1, dtype=torch.float64)
    out, final = causal_conv1d.causal_conv1d_fn(
        *leaves[:3],
        initial_states=leaves[3],
        return_final_states=True,
        final_states_out=filled,
        activation="silu",
    )
    want = reference(*leaves, "silu")
    last = torch.cat([leaves[3], leaves[0]], -1)[..., 70:]
    assert final is filled
    torch.testing.assert_close((out, final), (want, last))
    same_gradients((out, final), (want, last), leaves)


@pytest.mark.parametrize(
    ("x_dtype", "autocast"),
    [
        (dtype, autocast)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for autocast in (False, True)
    ],
)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_dtype_of_x(x_dtype, weight_dtype, autocast):
    """Gradients have the dtypes of their tensors, and autocast changes none."""
    x, weight = random(2, 8, 5, dtype=x_dtype), random(8, 4, dtype=weight_dtype)
    state, leaves = random(2, 8, 3, dtype=x_dtype), [x.requires_grad_(), weight.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, final = causal_conv1d.causal_conv1d_fn(*leaves, return_final_states=True)
        step = causal_conv1d.causal_conv1d_update(x[..., 0], state, weight)
        y, cache = fla.causal_conv1d(x.mT, weight, residual=x.mT, output_final_state=True)
        moved, _ = fla.causal_conv1d_update(x[..., 0].detach(), cache.detach(), None, weight)
    assert {t.dtype for t in (out, final, step, y, cache, moved)} == {x.dtype}
    want = reference(*leaves)
    cotangent = random(*out.shape, dtype=x_dtype)
    found = out, *torch.autograd.grad(out, leaves, cotangent)
    wanted = want, *torch.autograd.grad(want, leaves, cotangent.double())
    for one, other in zip(found, wanted, strict=True):
        rounding = 4 * torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, other.to(one.dtype), rtol=rounding, atol=16 * rounding)


def test_seq_idx(layout):
    """Nothing crosses to another number; a negative number is padding, without gradients."""
    numbers = torch.tensor([[0] * 3 + [1] * 6, [2] * 4 + [7] + [-1] * 4], dtype=torch.int32)
    x, weight, bias = random(2, 8, 9), random(8, 4), random(8)
    leaves = [t.requires_grad_() for t in (layout(x), weight, bias)]
    out = causal_conv1d.causal_conv1d_fn(*leaves, seq_idx=numbers, activation="silu")
    parts = [[(0, 3), (3, 9)], [(0, 4), (4, 5)]]
    want = torch.zeros_like(out)
    for b, spans in enumerate(parts):
        for first, last in spans:
            some = reference(leaves[0][b : b + 1, :, first:last], weight, bias, None, "silu")
            want[b, :, first:last] = some[0]
    torch.testing.assert_close(out, want)
    same_gradients([out], [want], leaves)
    numbers[:] = 0
    convolve = causal_conv1d.causal_conv1d_fn
    torch.testing.assert_close(convolve(x, weight, seq_idx=numbers), reference(x, weight))
    assert convolve(x[..., :0], weight, seq_idx=numbers[:, :0]).shape == (2, 8, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("dynamic", [False, True])
def test_seq_idx_in_a_graph(dynamic):
    """Every run of a graph reads the numbers of its tokens, with padding or without."""

    def convolve(x, weight, bias, numbers):
        return causal_conv1d.causal_conv1d_fn(x, weight, bias, numbers, activation="silu")

    compiled = torch.compile(convolve, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    weight, bias = random(8, 4), random(8)
    for numbers in (
        [[0] * 3 + [1] * 6, [2] * 4 + [7] + [-1] * 4],
        [[0] * 9, [0] * 9],
        [[-1] * 9, [*range(9)]],
    ):
        leaves = [t.clone().requires_grad_() for t in (random(2, 8, 9), weight, bias)]
        given = torch.tensor(numbers, dtype=torch.int32)
        out, want = compiled(*leaves, given), convolve(*leaves, given)
        torch.testing.assert_close(out, want)
        same_gradients([out], [want], leaves)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*leaves, given), want)


class Exported(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


@pytest.mark.parametrize("what", ["numbered sequences", "fla's update", "causal-conv1d's update"])
def test_exported_for_any_size(what):
    weight, size = random(8, 4), torch.export.Dim("size", min=3)
    numbered = what == "numbered sequences"

    def given(n):
        if numbered:
            return random(1, 8, n), (torch.arange(n)[None] // 3).int()
        return random(n, 8), random(n, 8, 4)

    def function(x, other):
        if numbered:
            return causal_conv1d.causal_conv1d_fn(x, weight, seq_idx=other)
        if what == "fla's update":
            return fla.causal_conv1d_update(x, other.clone(), weight=weight)[0]
        return causal_conv1d.causal_conv1d_update(x, other.clone(), weight)

    sizes = ({2: size}, {1: size}) if numbered else ({0: size}, {0: size})
    program = torch.export.export(
        Exported(function), given(7), dynamic_shapes=(sizes,), strict=False
    )
    many = given(11)
    torch.testing.assert_close(program.module()(*many), function(*many))


@pytest.mark.parametrize("tokens", [None, 1, 3])
@pytest.mark.parametrize("pad", [-1, 5])
def test_an_update_of_paged_states(layout, tokens, pad):
    x = random(3, 8) if tokens is None else layout(random(3, 8, tokens))
    weight, bias, state = random(8, 4), random(8), layout(random(6, 8, 5))
    slots, before = torch.tensor([4, pad, 0]), state.clone()
    out = causal_conv1d.causal_conv1d_update(
        x, state, weight.requires_grad_(), bias, "silu", None, slots, pad_slot_id=pad
    )
    want, after = torch.zeros(3, 8, tokens or 1, dtype=torch.float64), before.clone()
    for b in (0, 2):
        new = x[b].reshape(8, -1)
        h = reference(new[None], weight.detach(), bias, before[slots[b], :, 2:][None], "silu")
        want[b] = h[0]
        after[slots[b]] = torch.cat([before[slots[b]], new], -1)[:, -5:]
    torch.testing.assert_close(out, want.reshape(x.shape))
    assert torch.equal(state, after)
    assert not out.requires_grad


@pytest.mark.parametrize("pad", [0, 9, None])
def test_padding_may_have_any_number_and_come_often(pad):
    """A number of padding isn't a state: it may be beyond them all, as in vLLM, or a state's."""
    x, weight, state = random(3, 8), random(8, 4), random(4, 8, 3)
    number = -1 if pad is None else pad
    slots, want_state = torch.tensor([number, 2, number]), state.clone()
    want = causal_conv1d.causal_conv1d_update(x[1:2], want_state[2:3], weight)
    out = causal_conv1d.causal_conv1d_update(
        x, state, weight, conv_state_indices=slots, pad_slot_id=pad
    )
    assert torch.equal(out[1:2], want)
    assert not out[::2].any()
    assert torch.equal(state, want_state)
    with pytest.raises(ValueError, match="conv_state has 2 inputs of a sequence; it should have"):
        causal_conv1d.causal_conv1d_update(
            x, state[..., 1:], weight, conv_state_indices=slots, pad_slot_id=pad
        )


def test_circular_states_follow_the_convolution():
    x, weight, state = random(2, 8, 12), random(8, 4), random(2, 8, 5)
    had = torch.tensor([3, 9], dtype=torch.int32)
    before = torch.stack([state[b].roll(-int(had[b]), 1) for b in range(2)])
    outs = [
        causal_conv1d.causal_conv1d_update(x[..., t : t + n], state, weight, cache_seqlens=had + t)
        for t, n in ((0, 1), (1, 2), (3, 7), (10, 2))
    ]
    torch.testing.assert_close(torch.cat(outs, -1), reference(x, weight, None, before[..., 2:]))


def test_varlen_states():
    x, starts = random(9, 4), torch.tensor([0, 1, 1, 9])
    states = causal_conv1d.causal_conv1d_varlen_states(x, starts, 3)
    want = torch.zeros(3, 4, 3, dtype=torch.float64)
    want[0, :, 2] = x[0]
    want[2] = x[6:].T
    assert torch.equal(states, want)
    assert not causal_conv1d.causal_conv1d_varlen_states(x[:0], starts[:1], 3).numel()


@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("silu", [False, True], ids=["", "silu"])
def test_functions_below_autograd(layout, states, silu):
    """mamba_ssm's fast paths give them half of an array, and memory for its gradient."""
    halves, weight, bias = layout(random(2, 16, 9)), random(8, 4), random(8)
    x, activation = halves.chunk(2, dim=1)[0], "silu" if silu else None
    before, final = (random(2, 8, 3), torch.empty(2, 8, 3).double()) if states else (None, None)
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias, before)]
    out = causal_conv1d.causal_conv1d_fwd_function(x, weight, bias, None, before, final, silu)
    assert out.stride() == torch.empty_like(x).stride()
    assert not out._is_view()
    want = reference(*leaves, activation)
    torch.testing.assert_close(out, want.detach())
    dout, dfinal, dx = random(2, 8, 9), None, torch.empty_like(halves).chunk(2, dim=1)[0]
    total = (want * dout).sum()
    if states:
        torch.testing.assert_close(final, x[..., -3:])
        dfinal = random(2, 8, 3)
        total = total + (leaves[0][..., -3:] * dfinal).sum()
    wanted = torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None])
    found = causal_conv1d.causal_conv1d_bwd_function(
        x, weight, bias, dout, None, before, dfinal, dx, states, silu
    )
    assert found[0] is dx
    assert not any(t is not None and t.requires_grad for t in (out, *found))
    torch.testing.assert_close(found[: len(wanted)], wanted)
    assert states or found[3] is None
    state = random(2, 8, 3)
    step = x[..., :1], state.clone(), weight, bias
    got = causal_conv1d.causal_conv1d_update_function(*step, silu, None, None)
    assert torch.equal(
        got, causal_conv1d.causal_conv1d_update(*step[:1], state, *step[2:], activation)
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_gradients_of_numbered_sequences_below_autograd():
    numbers = torch.tensor([[0] * 3 + [1] * 6, [2] * 4 + [7] + [-1] * 4], dtype=torch.int32)
    leaves = [t.requires_grad_() for t in (random(2, 8, 9), random(8, 4))]
    out = causal_conv1d.causal_conv1d_fn(*leaves, seq_idx=numbers, activation="silu")
    dout = random(2, 8, 9)
    given = *leaves, None, dout, numbers, None, None, None, False, True
    dx, dweight, dbias, _ = causal_conv1d.causal_conv1d_bwd_function(*given)
    assert dbias is None
    torch.testing.assert_close((dx, dweight), torch.autograd.grad(out, leaves, dout))
    compiled = torch.compile(causal_conv1d.causal_conv1d_bwd_function, backend="aot_eager")
    torch.testing.assert_close(compiled(*given)[:2], (dx, dweight))


X, STATE, WEIGHT = torch.ones(2, 8, 5), torch.ones(2, 8, 3), torch.ones(8, 4)
ONES = torch.ones(16)
NUMBERS, MODULE = torch.zeros(2, 5, dtype=torch.int32), fla.ShortConvolution(8, 4)
BACK = dict.fromkeys(["bias", "seq_idx", "initial_states", "dfinal_states", "dx"])
BACK |= {"dout": X, "return_dinitial_states": False, "silu_activation": True}
#: Functions with wrong arguments, and the errors; test_compat_errors.py replaces every tensor.
BAD = [
    (causal_conv1d.causal_conv1d_bwd_function, BACK | changes, ValueError, message)
    for changes, message in (
        ({"return_dinitial_states": True}, "initial_states is None"),
        ({"seq_idx": NUMBERS, "dfinal_states": STATE}, "dfinal_states is given with seq_idx"),
    )
]
BAD += [
    (causal_conv1d.causal_conv1d_fn, changes, error, message)
    for changes, error, message in (
        ({"activation": "gelu"}, NotImplementedError, "activation is 'gelu'"),
        ({"weight": None}, TypeError, "weight is None; it should be a tensor"),
        ({"initial_states": NUMBERS[0, 0]}, TypeError, "initial_states has dtype int32; it"),
        (
            {"initial_states": X[0, 0, 0]},
            ValueError,
            r"initial_states has shape \(\); .* \(2, 8, 3",
        ),
        (
            {"seq_idx": NUMBERS, "return_final_states": True},
            *(ValueError, "return_final_states is given with seq_idx; only one of them should be"),
        ),
    )
]
BAD += [
    (causal_conv1d.causal_conv1d_update, {"x": X[..., 0], "conv_state": STATE} | changes, *error)
    for changes, *error in (
        ({"activation": "gelu"}, NotImplementedError, "activation is 'gelu'"),
        (
            {"conv_state": STATE.bfloat16()},
            TypeError,
            "conv_state has dtype bfloat16; it should ho",
        ),
        (
            {"conv_state": STATE[..., 1:]},
            ValueError,
            "conv_state has 2 inputs .* at least 3",
        ),
        ({"conv_state": STATE[:1].expand(2, 8, 3)}, ValueError, "conv_state overlaps itself"),
        ({"conv_state_indices": torch.tensor([0, 2])}, ValueError, "conv_state_indices has 2; it"),
        ({"pad_slot_id": 1.5}, TypeError, "pad_slot_id is a float; it should be an int or None"),
        (
            {"pad_slot_id": 1, "conv_state_indices": [0, 1]},
            TypeError,
            "conv_state_indices is a list; it should be a tensor",
        ),
    )
]
BAD += [
    (fla.causal_conv1d, {"cp_context": "ring"}, ValueError, "cp_context is given; it should be"),
    *(
        (
            step,
            {"x": X[..., :1].mT, "residual": None, "cache": cache},
            TypeError,
            "cache .* hold fl",
        )
        for cache in (torch.ones(2, 8, 4).bfloat16(),)
        for step in (MODULE, MODULE.step, fla.causal_conv1d_update)
    ),
    *(
        (
            fla.causal_conv1d_update,
            {"x": x, "cache": torch.ones(2, 8, 4)},
            ValueError,
            r"x has shape .* it should be \(N, D\)",
        )
        for x in (ONES.view(8, 2), ONES.view(1, 16), ONES.view(1, 1, 16), ONES)
    ),
]


TAPLESS = {"weight": WEIGHT[:, :0]}, ValueError, "weight has shape .8, 0.; it should have at lea"
BAD += [
    (causal_conv1d.causal_conv1d_fn, *TAPLESS),
    (causal_conv1d.causal_conv1d_bwd_function, BACK | TAPLESS[0], *TAPLESS[1:]),
    (fla.causal_conv1d, TAPLESS[0] | {"x": X.mT}, *TAPLESS[1:]),
    (fla.causal_conv1d_update, TAPLESS[0] | {"cache": STATE}, *TAPLESS[1:]),
]


@pytest.mark.parametrize(("function", "given", "error", "message"), BAD)
def test_bad_arguments(function, given, error, message):
    weight = {} if function in (MODULE, MODULE.step) else {"weight": WEIGHT}
    given = {"x": X} | weight | given
    with pytest.raises(error, match=message):
        function(**given)
    assert (STATE == 1).all()


def test_bad_arguments_of_packed_sequences():
    for starts, message in (([0, 5], "has 5; it should lie"), ([-1, 4], "has -1; it should lie")):
        with pytest.raises(
            ValueError, match=f"varlen_states: cu_seqlens {message} between 0 and 4"
        ):
            causal_conv1d.causal_conv1d_varlen_states(X[0, :4, :1], torch.tensor(starts), 2)
    with pytest.raises(ValueError, match="mask is given; with"):
        MODULE(X[:1].mT, mask=X[:1, 0], cu_seqlens=NUMBERS[0, :2])
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        fla.ShortConvolution(8, 4, activation="gelu")


@pytest.mark.parametrize("slots", [None, torch.tensor([2, -1])], ids=["batch", "paged"])
def test_an_update_of_tensors_with_gradients_has_none(slots):
    """The values are those without gradients, and gradients of old states end at the update."""
    x, weight, old = random(2, 8, 1), random(8, 4), random(2 if slots is None else 4, 8, 4)
    want_state = old.clone()
    want = causal_conv1d.causal_conv1d_update(
        x, want_state, weight, activation="silu", conv_state_indices=slots
    )
    for tensor in (x, weight, old):
        tensor.requires_grad_()
    state = 1 * old
    out = causal_conv1d.causal_conv1d_update(
        x, state, weight, activation="silu", conv_state_indices=slots
    )
    assert not out.requires_grad
    assert torch.equal(out, want)
    assert torch.equal(state, want_state)
    kept = torch.tensor([0.0, 0] if slots is None else [1.0, 1, 0, 1]).double()
    (dold,) = torch.autograd.grad(state.sum(), old)
    assert torch.equal(dold, kept[:, None, None].expand_as(old))
    before = old.detach().clone()
    with pytest.raises(RuntimeError, match="leaf"):
        causal_conv1d.causal_conv1d_update(x, old, weight, conv_state_indices=slots)
    assert torch.equal(old, before)


@pytest.fixture(params=[True, False], ids=["bias", "no-bias"])
def convolution(request):
    made = fla.ShortConvolution(8, 4, bias=request.param, dtype=torch.float64)
    return made, made.weight[:, 0], made.bias


@pytest.mark.parametrize("packed", [False, True])
def test_short_convolution(convolution, packed):
    """A prompt, then single tokens, give the convolution of all tokens."""
    module, weight, bias = convolution
    x, residual, cache = random(2, 9, 8), random(2, 9, 8), random(2, 8, 4)
    want = reference(x.mT, weight, bias, cache[..., 1:], "silu").mT + residual
    starts = torch.tensor([0, 6, 12]) if packed else None
    pack = (lambda t: t.reshape(1, -1, 8)) if packed else (lambda t: t)
    y, state = module(pack(x[:, :6]), pack(residual[:, :6]), None, cache, True, cu_seqlens=starts)
    torch.testing.assert_close(y.reshape(2, 6, 8), want[:, :6])
    ones = torch.arange(3) if packed else None
    for t in range(6, 9):
        given, more = pack(x[:, t : t + 1]), pack(residual[:, t : t + 1])
        with torch.set_grad_enabled(t > 6):
            y, after = module(given, more, cache=state, output_final_state=True, cu_seqlens=ones)
        assert y.shape == given.shape
        assert after is state
        torch.testing.assert_close(y.reshape(2, 8), want[:, t])
    torch.testing.assert_close(state, x[:, -4:].mT)


def test_a_decoding_step_has_gradients(convolution):
    module, weight, bias = convolution
    x, residual, cache = (
        t.requires_grad_() for t in (random(2, 1, 8), random(2, 1, 8), random(2, 8, 4))
    )
    leaves = [x, residual, cache, *module.parameters()]
    before = cache.detach().clone()
    y, after = module.step(x, residual, cache.view(2, 8, 4).clone(), True)
    assert torch.equal(after[..., :3], before[..., 1:])
    given = x[:, 0], cache.clone(), residual[:, 0], module.weight[:, 0], bias, "silu"
    for found in (y, fla.causal_conv1d_update(*given)[0][:, None]):
        want = reference(x.mT, weight, bias, cache[..., 1:], "silu").mT + residual
        torch.testing.assert_close(found, want)
        same_gradients([found], [want], leaves)


def test_a_step_with_gradients_refuses_a_cache_of_inference_mode_unchanged(convolution):
    with torch.inference_mode():
        cache = random(2, 8, 4)
    before = cache.clone()
    with pytest.raises(ValueError, match="ShortConvolution: cache was made in inference mode; it"):
        convolution[0](random(2, 1, 8), cache=cache)
    assert torch.equal(cache, before)


def test_an_updated_cache_passes_no_gradient_to_the_old_one(convolution):
    module, _, _ = convolution
    x, old = random(2, 2, 8), random(2, 8, 4).requires_grad_()
    cache = 2 * old
    y, cache = module.step(x[:, :1], None, cache, True)
    again, _ = module.step(x[:, 1:], None, cache, True)
    want = torch.autograd.grad(y.sum(), old, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum() + again.sum(), old), want)
    before = old.detach().clone()
    with pytest.raises(RuntimeError, match="leaf"):
        module.step(x[:, :1], None, old, True)
    assert torch.equal(old, before)


def test_a_mask_and_heads(convolution):
    module, weight, bias = convolution
    x, mask = random(2, 5, 8), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    given = x.clone()
    y, none = module(given, mask=mask)
    assert none is None
    assert torch.equal(given, x)
    torch.testing.assert_close(
        y, reference((x * mask[..., None]).mT, weight, bias, None, "silu").mT
    )
    heads, _ = fla.causal_conv1d(x.view(2, 5, 2, 4), weight, bias, activation="swish")
    torch.testing.assert_close(heads.view(2, 5, 8), module(x)[0])


@pytest.mark.parametrize("of", [torch.tensor, fusedops.Sequences, list], ids=lambda of: of.__name__)
def test_as_many_tokens_as_sequences_need_not_be_a_step(convolution, of):
    module, weight, bias = convolution
    x, cache = random(1, 2, 8), random(2, 8, 4)
    before = cache.clone()
    y, final = module(x, cache=cache, output_final_state=True, cu_seqlens=of([0, 0, 2]))
    torch.testing.assert_close(y.mT, reference(x.mT, weight, bias, before[1:, :, 1:], "silu"))
    assert final is not cache
    assert torch.equal(cache, before)
    torch.testing.assert_close(
        final, torch.stack([before[0], torch.cat([before[1], x[0].mT], -1)[:, 2:]])
    )
    assert module(x, cache=cache, output_final_state=True, cu_seqlens=of([0, 1, 2]))[1] is cache


@pytest.mark.parametrize("module", [fla.ShortConvolution, fusedops.nn.DynamicShortConvolution])
@pytest.mark.parametrize("starts", [2, torch.tensor(2)], ids=["int", "tensor"])
def test_starts_that_are_no_row_are_named(module, starts):
    with pytest.raises(ValueError, match=r"cu_seqlens has shape \(\); it should be \(. \+ 1,"):
        module(8, 4)(random(1, 2, 8).float(), cache=torch.zeros(1, 8, 4), cu_seqlens=starts)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_an_empty_batch(tokens, grad):
    module = fla.ShortConvolution(3, 2).requires_grad_(grad)
    y, cache = module(torch.ones(0, tokens, 3), output_final_state=True)
    assert (y.shape, cache.shape) == ((0, tokens, 3), (0, 3, 2))


def test_a_residual_is_added_before_the_result_is_rounded():
    x, residual = random(2, 8, dtype=torch.bfloat16), random(2, 8, dtype=torch.float32)
    weight, cache = random(8, 4, dtype=torch.float32), random(2, 8, 4, dtype=torch.bfloat16)
    plain, _ = fla.causal_conv1d_update(x.float(), cache.float(), weight=weight)
    y, _ = fla.causal_conv1d_update(x, cache, residual, weight)
    assert torch.equal(y, (plain + residual).to(x.dtype))


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_a_step_rounds_no_wider_cache(grad):
    module = fla.ShortConvolution(8, 4, dtype=torch.bfloat16).requires_grad_(grad)
    x, cache = random(2, 1, 8, dtype=torch.bfloat16), random(2, 8, 4, dtype=torch.float32)
    want = torch.cat([cache[..., 1:], x.mT.float()], -1)
    y, _ = module.step(x, None, cache)
    assert y.dtype == x.dtype
    assert torch.equal(cache, want)


# Torch's own rules of forward mode are scripted.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_decoding_step_has_forward_derivatives():
    torch.manual_seed(0)
    layer = fla.ShortConvolution(8, 4).double().requires_grad_(False)
    cache, x, tx = (torch.randn(2, *shape).double() for shape in ((8, 4), (1, 8), (1, 8)))

    def step(x):
        return layer(x, cache=cache.clone())[0]

    out, tangent = torch.func.jvp(step, (x,), (tx,))
    torch.testing.assert_close(out, step(x))
    want = (step(x + 1e-4 * tx) - step(x - 1e-4 * tx)) / 2e-4
    torch.testing.assert_close(tangent, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cache_seqlens": [1, -1]}, "cache_seqlens has -1; it should be at least 0"),
        ({"L": 0, "W": 1, "cache_seqlens": [1, 1]}, "cache_seqlens is given; conv_state should"),
        ({"shared": True}, "conv_state shares memory with x; it should not"),
    ],
)
def test_an_update_names_its_own_arguments(more, message):
    state, weight = torch.randn(2, 3, more.get("L", 3)), torch.randn(3, more.get("W", 4))
    x = state[:, :, 0] if "shared" in more else torch.randn(2, 3)
    given = (
        {"cache_seqlens": torch.tensor(more["cache_seqlens"])} if "cache_seqlens" in more else {}
    )
    with pytest.raises(ValueError, match=f"causal_conv1d_update: {message}"):
        causal_conv1d.causal_conv1d_update(x, state, weight, **given)
