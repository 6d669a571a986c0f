"""The convolution of tokens that ranks share, beside one device's."""

from __future__ import annotations

import contextlib
import functools

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

import fusedops  # noqa: E402
from formulas import randomized  # noqa: E402
from fusedops.distributed import dynamic_conv, sequences, share  # noqa: E402
from fusedops.nn import DynamicShortConvolution  # noqa: E402
from replicated import compare_derivatives, counting, shard  # noqa: E402
from worlds import device, on_ranks  # noqa: E402

T, D, W = 12, 3, 4

#: The tokens of every rank, for two ranks and for three.
SIZES = {
    "alike": None,
    "uneven": {2: [5, 7], 3: [7, 2, 3]},
    "short": {2: [11, 1], 3: [1, 1, 10]},
    "empty": {2: [0, 12], 3: [2, 0, 10]},
}
#: Boundaries of packed sequences: at and near those of ranks, and with an empty sequence.
PACKED = {"none": None, "few": [0, 5, 12], "at": [0, 4, 6, 8, 12], "many": [0, 1, 1, 5, 7, 11, 12]}


@contextlib.contextmanager
def short_heads():
    """Let most ranks have tokens behind their head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "CHUNK", 2)
        yield


def spread(sizes):
    P = dist.get_world_size()
    return [T // P] * P if SIZES[sizes] is None else SIZES[sizes][P]


def given_sizes(sizes):
    return {} if SIZES[sizes] is None else {"sizes": spread(sizes)}


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("sizes", SIZES)
@on_ranks
@short_heads()
def test_value_and_all_derivatives_are_one_devices(sizes, packed, static):
    B = 2 if PACKED[packed] is None else 1
    x = torch.randn(B, T, D, dtype=torch.float64)
    kernels = torch.randn(*((D, W) if static else (B, T, D, W)), dtype=torch.float64)
    arrays = [a.to(device()).requires_grad_() for a in (x, kernels, torch.randn(D).double())]
    x, kernels, bias = arrays
    cotangent, own = torch.randn_like(x), spread(sizes)
    cu = None if PACKED[packed] is None else torch.tensor(PACKED[packed], device=device())
    want = fusedops.dynamic_conv(x, kernels, bias=bias, cu_seqlens=cu, activation="silu")
    shared = share(kernels, bias, group=dist.group.WORLD)
    got = dynamic_conv(
        shard(x, 1, own),
        shared[0] if static else shard(kernels, 1, own),
        bias=shared[1],
        group=dist.group.WORLD,
        cu_seqlens=cu,
        activation="silu",
        **given_sizes(sizes),
    )
    torch.testing.assert_close(got, shard(want, 1, own), rtol=1e-13, atol=1e-13)
    values = (got * shard(cotangent, 1, own)).sum(), (want * cotangent).sum()
    tokens = functools.partial(shard, axis=1, sizes=own)
    compare_derivatives(*values, arrays, (tokens, None if static else tokens, None))


@pytest.mark.parametrize("sizes", ["alike", "empty"])
@on_ranks
@short_heads()
def test_kernels_may_be_made_of_x(sizes):
    x = torch.randn(1, T, D, dtype=torch.float64).to(device()).requires_grad_()
    taps = torch.randn(D, W, dtype=torch.float64).to(device()).requires_grad_()
    cotangent, own = torch.randn_like(x), spread(sizes)

    def loss(x, taps, cotangent, op, **more):
        kernels = x.tanh()[..., None] * taps
        out = op(x, kernels, bias=taps.sum(1), activation="silu", **more)
        return (out * cotangent).sum()

    want = loss(x, taps, cotangent, fusedops.dynamic_conv)
    more = {"group": dist.group.WORLD, **given_sizes(sizes)}
    here, shared = shard(x, 1, own), share(taps, group=dist.group.WORLD)
    value = loss(here, shared, shard(cotangent, 1, own), dynamic_conv, **more)
    tokens = functools.partial(shard, axis=1, sizes=own)
    compare_derivatives(value, want, (x, taps), (tokens, None))


@pytest.mark.parametrize("width", [1, W])
@pytest.mark.parametrize("wanted", [["x"], ["kernels"], ["bias"], ["x", "bias"]], ids="-".join)
@on_ranks
@short_heads()
def test_only_wanted_gradients_are_made_of_tensors_with_gaps(wanted, width):
    arrays = {
        "x": torch.randn(D, T, 2).to(device()).permute(2, 1, 0),
        "kernels": torch.randn(2, 1, D, width).to(device()).expand(2, T, D, width),
        "bias": torch.randn(1).to(device()).expand(D),
    }
    leaves = [arrays[name].requires_grad_() for name in wanted]
    x, kernels, bias = arrays.values()
    cotangent, own = torch.randn(1, T, 1).to(device()).expand_as(x), spread("uneven")
    want = fusedops.dynamic_conv(x, kernels, bias=bias, activation="silu")
    gradients = torch.autograd.grad(want, leaves, cotangent)
    asked, genuine = [], sequences.conv_vjp

    def noted(*given, out):
        asked.append(out)
        return genuine(*given, out=out)

    with pytest.MonkeyPatch.context() as patch, counting() as sent:
        patch.setattr(sequences, "conv_vjp", noted)
        options = {"bias": bias, "group": dist.group.WORLD, "sizes": own, "activation": "silu"}
        got = dynamic_conv(shard(x, 1, own), shard(kernels, 1, own), **options)
        found = torch.autograd.grad(got, leaves, shard(cotangent, 1, own))
    torch.testing.assert_close(got, shard(want, 1, own))
    ((of_x, of_kernels, _, of_bias),) = asked
    assert [bool(slot) for slot in (of_x, of_kernels, of_bias)] == [n in wanted for n in arrays]
    # Another rank may want a part of its x's cotangent.
    assert len(sent) == 2
    for name, part, whole_of_it in zip(wanted, found, gradients, strict=True):
        if name == "bias":
            dist.all_reduce(part)
        else:
            part, whole_of_it = shard(part, 1, own), shard(whole_of_it, 1, own)
        torch.testing.assert_close(part, whole_of_it, rtol=1e-4, atol=1e-5)


@on_ranks
def test_x_may_need_a_gradient_on_some_ranks():
    x, kernels = torch.randn(1, T, D).to(device()), torch.randn(D, W).to(device()).requires_grad_()
    whole_x = x.clone().requires_grad_()
    loss = fusedops.dynamic_conv(whole_x, kernels).square().sum()
    dx, dkernels = torch.autograd.grad(loss, [whole_x, kernels])
    own, first = spread("alike"), dist.get_rank() == 0
    here = shard(x, 1, own).requires_grad_(first)
    dynamic_conv(here, kernels, group=dist.group.WORLD).square().sum().backward()
    dist.all_reduce(kernels.grad)
    torch.testing.assert_close(kernels.grad, dkernels)
    if first:
        torch.testing.assert_close(here.grad, shard(dx, 1, own))


@pytest.mark.parametrize("backend", ["cython", "numba"])
@on_ranks
@short_heads()
def test_bits_are_one_devices(backend):
    x = torch.randn(2, T, D).to(device())
    kernels = torch.randn(2, T, D, W).to(device())
    own = spread("uneven")
    try:
        want = fusedops.dynamic_conv(x, kernels, activation="silu", backend=backend)
    except fusedops.BackendUnavailable:
        return
    options = {"group": dist.group.WORLD, "sizes": own, "activation": "silu", "backend": backend}
    got = dynamic_conv(shard(x, 1, own), shard(kernels, 1, own), **options)
    assert torch.equal(got, shard(want, 1, own))


@pytest.mark.parametrize("packed", ["none", "many"])
@on_ranks
@short_heads()
def test_the_module_takes_a_group(packed):
    module = randomized(DynamicShortConvolution(D, W, generator_reduction=1)).to(device())
    x = torch.randn(1, T, D, dtype=torch.float64, device=device())
    mask = torch.rand(1, T, device=device()) > 0.3
    cu = None if PACKED[packed] is None else torch.tensor(PACKED[packed], device=device())
    want, _ = module(x, mask, cu_seqlens=cu)
    own = spread("alike")
    some = shard(x, 1, own), shard(mask, 1, own)
    got, cache = module(*some, cu_seqlens=cu, group=dist.group.WORLD)
    assert cache is None
    torch.testing.assert_close(got, shard(want, 1, own))
    loss = got.square().sum()
    gradients = torch.autograd.grad(loss, module.parameters())
    wanted = torch.autograd.grad(want.square().sum(), module.parameters())
    for part, all_of_it in zip(gradients, wanted, strict=True):
        dist.all_reduce(part)
        torch.testing.assert_close(part, all_of_it)
    for wrong in ({"output_final_state": True}, {"cache": torch.zeros(1, D, W).to(x)}):
        with pytest.raises(ValueError, match="with group it should not be"):
            module(*some, group=dist.group.WORLD, **wrong)


@on_ranks
def test_ddp_divides_the_modules_gradients_by_the_ranks():
    P, own = dist.get_world_size(), spread("alike")
    module = randomized(DynamicShortConvolution(D, W, generator_reduction=1)).to(device())
    x = torch.randn(1, T, D, dtype=torch.float64, device=device())
    loss = module(x)[0].square().sum()
    want = torch.autograd.grad(loss, module.parameters())
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    wrapped(shard(x, 1, own), group=dist.group.WORLD)[0].square().sum().mul(P).backward()
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], [*want])


@on_ranks
def test_bytes_sent_are_the_halos():
    rank = dist.get_rank()
    with counting() as sent:
        x = torch.randn(2, 5, D, device=device(), requires_grad=True)
        dynamic_conv(x, x.new_ones(D, W), group=dist.group.WORLD).sum().backward()
    (received, out), back = sent
    halo = 2 * (W - 1) * D
    assert (received, out) == (halo * (rank > 0), halo * (rank < dist.get_world_size() - 1))
    assert back == (out, received)


@on_ranks
def test_errors_come_before_anything_is_sent():
    P = dist.get_world_size()
    x, kernels, world = torch.ones(1, 5, D), torch.ones(D, W), {"group": dist.group.WORLD}
    x, kernels = x.to(device()), kernels.to(device())
    cu = torch.tensor([0, 5 * P], device=device())
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for call, message in (
        (lambda: dynamic_conv(x, kernels, sizes=[4], group=alone), "x has 5 tokens; rank 0 sh"),
        (lambda: dynamic_conv(x, kernels, sizes=[5, 0], group=alone), "sizes has 2 sizes"),
        (lambda: dynamic_conv(x, kernels, sizes=[5], **world), "sizes has 1 sizes"),
        (lambda: dynamic_conv(x, kernels, sizes=[4] * P, **world), "x has 5 tokens; rank"),
        (lambda: dynamic_conv(x[:, :2], kernels, **world), "x has 2 tokens; it should have 3 at l"),
        (lambda: dynamic_conv(x, kernels, cu_seqlens=cu + 1, **world), r"cu_seqlens\[0\] is 1"),
        (
            lambda: dynamic_conv(x, kernels, cu_seqlens=2 * cu, sizes=[5] * P, **world),
            "cu_seqlens ends at",
        ),
        (lambda: dynamic_conv(x, kernels[:2], **world), "kernels has shape"),
        (lambda: dynamic_conv(x, kernels, activation="relu", **world), "activation is 'relu'"),
        (lambda: dynamic_conv(x[0], kernels, **world), "x has shape"),
        (lambda: dynamic_conv(x.numpy(force=True), kernels, **world), "x is a ndarray"),
        (lambda: dynamic_conv(x, kernels, group=1), "group is int"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    dist.barrier()
