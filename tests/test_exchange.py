"""Exchanges between ranks, and the sum that adds the gradients of replicated tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)


from fusedops.distributed import exchange, share  # noqa: E402
from replicated import Enter, shard, whole  # noqa: E402
from worlds import WORLDS, device, on_ranks  # noqa: E402

#: Sizes of shards for two and three ranks: ones that don't divide, and an empty shard.
SIZES = {"uneven": {2: (3, 2), 3: (1, 3, 2)}, "empty": {2: (0, 4), 3: (3, 0, 1)}}


def values(*shape, dtype=torch.float64):
    """Return the same random values on every rank."""
    return torch.randn(shape, dtype=torch.float64).to(device(), dtype)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (-1, 1), (1, 2)])
@on_ranks
def test_an_exchange_moves_the_split(axes, sizes):
    P = dist.get_world_size()
    src, dst = axes
    shape = [4, 7, 5]
    shape[src] = sum(SIZES[sizes][P])
    x = values(*shape)
    given = {"group": dist.group.WORLD, "dst_sizes": None}
    step = -(-shape[dst] // P)
    to = [max(0, min(step, shape[dst] - step * p)) for p in range(P)]
    want = shard(x, dst % 3, to)
    for src_sizes in (None, SIZES[sizes][P]):
        own = shard(x, src % 3, SIZES[sizes][P])
        got = exchange(own, src, dst, src_sizes=src_sizes, **given)
        assert torch.equal(got, want)
        back = exchange(got, dst, src, group=dist.group.WORLD, dst_sizes=SIZES[sizes][P])
        assert torch.equal(back, own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.complex64], ids=str)
@on_ranks
def test_an_exchange_takes_any_dtype(dtype):
    x = torch.arange(36, device=device()).reshape(6, 6).to(dtype)
    P = dist.get_world_size()
    own = shard(x, 0, [6 // P] * P)
    got = exchange(own, 0, 1, group=dist.group.WORLD)
    assert torch.equal(got, x.chunk(P, 1)[dist.get_rank()])


@on_ranks
def test_derivatives_of_every_order():
    """x is exchanged, squared, exchanged back, and cubed: third derivatives aren't zero."""
    P = dist.get_world_size()
    sizes, to = SIZES["uneven"][P], SIZES["empty"][P]
    N, M = sum(sizes), sum(to)
    group = dist.group.WORLD
    weight = values(N, M)

    def loss(x, w):
        own = exchange(shard(x, 0, sizes) * shard(w, 0, sizes), 0, 1, group=group, dst_sizes=to)
        back = exchange(own.square(), 1, 0, group=group, dst_sizes=sizes)
        return whole(back * back.sin(), 0, sizes)

    x = values(N, M).requires_grad_()
    replicated = lambda x: loss(Enter.apply(x), weight)  # noqa: E731
    assert torch.autograd.gradcheck(replicated, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(replicated, (x,), fast_mode=True)
    # The third derivative, along one direction, beside one device's.
    one = (x * weight).square()
    found = []
    for value in (replicated(x), one * one.sin()):
        gradient = value.sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(gradient.sum(), x, create_graph=True)
        found.append(gradient)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@on_ranks
def test_share_adds_the_parts_of_all_ranks():
    P, rank = dist.get_world_size(), dist.get_rank()
    w, v = values(3).requires_grad_(), values(2, 2).requires_grad_()
    a, b = share(w, v, group=dist.group.WORLD)
    loss = (rank + 1) * a.pow(3).sum() + b.sum() * a.sum()
    dw, dv = torch.autograd.grad(loss, (w, v), create_graph=True)
    total = P * (P + 1) / 2
    torch.testing.assert_close(dw, total * 3 * w**2 + P * v.sum())
    torch.testing.assert_close(dv, (P * w.sum()).expand(2, 2))
    # The losses of the passes that follow, on one rank alone.
    (ddw,) = torch.autograd.grad(dw.sin().sum() * (rank == 0), w, create_graph=True)
    torch.testing.assert_close(ddw, 6 * total * w * dw.cos())
    (dddw,) = torch.autograd.grad(ddw.sum() * (rank == 0), w)
    torch.testing.assert_close(dddw, 6 * total * dw.cos() - (6 * total * w).square() * dw.sin())


# Torch's compiler is imported on every rank, for seconds.
@on_ranks(worlds=WORLDS[::2])
def test_a_compiled_function_ends_its_graph():
    P = dist.get_world_size()
    x = values(P, P).requires_grad_()

    def loss(x):
        own = x[dist.get_rank()].sin()[None]
        return exchange(own, 0, 1, group=dist.group.WORLD, src_sizes=[1] * P).square().sum()

    found = [torch.autograd.grad(f(x), x) for f in (loss, torch.compile(loss, backend="eager"))]
    torch.testing.assert_close(*found)


@on_ranks
def test_a_mesh_of_one_dimension_is_a_group():
    mesh = dist.device_mesh.init_device_mesh(device().type, (dist.get_world_size(),))
    x = torch.ones(dist.get_world_size(), 1, device=device())
    assert exchange(x, 1, 0, group=mesh).shape == (1, dist.get_world_size())


BAD = {
    "group": (lambda x, g: exchange(x, 0, 1, group=3), TypeError, "exchange: group is int"),
    "array": (lambda x, g: exchange(x.numpy(), 0, 1, group=g), TypeError, "x is a ndarray"),
    "bool": (lambda x, g: exchange(x, True, 0, group=g), ValueError, "src is True"),
    "axis": (lambda x, g: exchange(x, 0, 2, group=g), ValueError, "dst is 2; it should be an axis"),
    "same": (lambda x, g: exchange(x, 0, -2, group=g), ValueError, "it should be another axis"),
    "sum": (
        lambda x, g: exchange(x, 0, 1, group=g, dst_sizes=[1] * g.size()),
        ValueError,
        "dst_sizes have the sum",
    ),
    "count": (lambda x, g: exchange(x, 0, 1, group=g, dst_sizes=[5]), ValueError, "has 1 sizes"),
    "own": (
        lambda x, g: exchange(x, 0, 1, group=g, src_sizes=[3] * g.size()),
        ValueError,
        "it should be 4, the length",
    ),
    "nothing": (lambda x, g: share(group=g), TypeError, "share: there is no tensor"),
    "integers": (lambda x, g: share(x.int(), group=g), TypeError, "has dtype torch.int32"),
}


@pytest.mark.parametrize("case", BAD)
@on_ranks
def test_errors_come_before_anything_is_sent(case):
    call, error, message = BAD[case]
    for _ in range(2):
        # Were a rank still waiting for others, the second call would meet the first.
        with pytest.raises(error, match=message):
            call(torch.ones(4, 5), dist.group.WORLD)
    dist.barrier()


@on_ranks
def test_ranks_that_differ_are_named():
    from fusedops import Sequences
    from fusedops.distributed import Partition, dynamic_conv, exchanges, sequences, tiles
    from fusedops.distributed import triangle_multiplicative_update as update

    P, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    last = rank == P - 1
    x = torch.ones(1, P, P, 2, device=device())
    w = [torch.ones(4, 2, device=device()), torch.ones(2, 2, device=device())]
    one = torch.zeros(2, 0, dtype=torch.int64, device=device())
    part = Partition(one, torch.arange(P, device=device()), group=group)

    def triangle(x, p, **options):
        names = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")
        weights = dict(zip(names, (p, w[0], w[1], w[1]), strict=True))
        return update(x[:, rank : rank + 1], group=group, **(weights | options))

    taps = x.new_ones(2, 2)

    def conv(kernels=taps, **options):
        return dynamic_conv(x[0], kernels, **{"group": group, "sizes": [P] * P, **options})

    calls = {
        "dst": lambda: exchange(x, 0, 1 + last, group=group, src_sizes=[1] * P),
        "x": lambda: part.extend(x[0, 0, :1].requires_grad_(last)),
        "kernels": lambda: conv(x.new_ones(2, 2 + last)),
        "kernels ": lambda: conv(taps + last),
        "kernels  ": lambda: conv(taps.expand(1, P, 2, 2) if last else taps),
        "bias": lambda: conv(bias=x.new_ones(2) if last else None),
        "activation": lambda: conv(activation="silu" if last else None),
        "sizes": lambda: conv(sizes=[P + last, P - last] + [P] * (P - 2)),
        "cu_seqlens": lambda: conv(cu_seqlens=torch.tensor([0, 1 + last, P * P], device=device())),
        "cu_seqlens ": lambda: conv(cu_seqlens=Sequences([0, 1 + last, P * P])),
        "cu_seqlens  ": lambda: conv(cu_seqlens=Sequences([0, P * P]) if last else None),
        "tensors": lambda: share(*[x] * (1 + last), group=group),
        r"tensors\[1\]": lambda: share(x, x + last, group=group),
        "owner": lambda: Partition(
            one, torch.arange(P, device=device()).roll(int(last)), group=group
        ),
        "sizes ": lambda: triangle(x, w[0], sizes=[1] * P if last else None),
        "p_in_weight": lambda: triangle(x, w[0] + last),
        "mask": lambda: triangle(x, w[0], mask=x[:, :1, :, 0].requires_grad_() if last else None),
        "chunks": lambda: triangle(x, w[0], chunks=1 if last else 2),
        "dst ": lambda: exchange(x, 0, 9 if last else 1, group=group, src_sizes=[1] * P),
        "p_out_weight": lambda: triangle(x, w[0], p_out_weight=x.new_ones(2, 2 + last)),
        "direction ": lambda: triangle(x, w[0], direction="up" if last else "outgoing"),
        "direction": lambda: triangle(x, w[0], direction="incoming" if last else "outgoing"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for module in (exchanges, sequences, tiles):
            patch.setattr(module, "checks_ranks", lambda: True)
        for name, call in calls.items():
            with pytest.raises(ValueError, match=rf": {name.strip()} is .*should be the same"):
                call()
        assert triangle(x, w[0]).shape == (1, 1, P, 2)
        assert conv().shape == x[0].shape
        # A list is as good as a tuple, and errors that all ranks have stay the op's.
        assert conv(sizes=(P,) * P if last else [P] * P).shape == x[0].shape
        for wrong in ({"activation": torch.nn.functional.silu}, {"bias": "none"}):
            with pytest.raises((TypeError, ValueError), match=r"activation is|bias has"):
                conv(**wrong)
        assert len(share(x, w[0], group=group)) == 2
    dist.barrier()
