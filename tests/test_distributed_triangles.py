"""The triangle update of pairs that ranks share, beside the update of one device."""

from __future__ import annotations

import functools
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from formulas import randomized  # noqa: E402
from fusedops import triangle_multiplicative_update as on_one  # noqa: E402
from fusedops.distributed import share, triangles  # noqa: E402
from fusedops.distributed import triangle_multiplicative_update as update  # noqa: E402
from fusedops.trimul.op import Weights  # noqa: E402
from places import HAS_TRITON  # noqa: E402
from replicated import compare_derivatives, counting  # noqa: E402
from worlds import device, on_gpus, on_ranks  # noqa: E402

NAMES = Weights._fields


def problem(N=5, C=3, H=4, *, B=(2,), gate="output", biases=True, dtype=torch.float64):
    """Return x, a mask and weights, the same on every rank."""
    G = C if gate == "output" else H
    shapes = (C,), (C,), (2 * H, C), (2 * H,), (2 * H, C), (2 * H,), (H,), (H,)
    shapes += (C, H), (C,), (G, C), (G,)
    x, mask = torch.randn(*B, N, N, C), torch.rand(*B, N, N)
    weights = dict(zip(NAMES, [torch.randn(shape) for shape in shapes], strict=True))
    if not biases:
        weights = {name: w for name, w in weights.items() if not name.endswith("bias")}
        weights = {name: w for name, w in weights.items() if not name.startswith("norm")}
    moved = [a.to(device(), dtype) for a in (x, mask, *weights.values())]
    return moved[0], moved[1], dict(zip(weights, moved[2:], strict=True))


def sharding(sharded, sizes, N):
    """Return the arguments that say who has which pairs, and each sharded axis with its sizes."""
    P = dist.get_world_size()
    if isinstance(sharded, tuple):
        shape = (P, 1) if P % 2 else (P // 2, 2)
        shape = shape if sharded == (1, 2) else shape[::-1]
        mesh = init_device_mesh(device().type, shape)
        sizes = [chunks(N, n) for n in (shape if sharded == (1, 2) else shape[::-1])]
        given = {"group": mesh, "sharded": sharded}
        groups = [mesh.get_local_rank(sharded.index(axis)) for axis in (1, 2)]
        return given, list(zip((-3, -2), sizes, groups, strict=True))
    own = {None: chunks(N, P), "uneven": [*range(1, P), N - P * (P - 1) // 2]}
    own["empty"] = [0, N, 0][:P]
    given = {"group": dist.group.WORLD, "sharded": sharded}
    if sizes is not None:
        given["sizes"] = own[sizes]
    return given, [(sharded - 4, own[sizes], dist.get_rank())]


def chunks(n, parts):
    step = -(-n // parts)
    return [max(0, min(step, n - step * part)) for part in range(parts)]


def own(x, axes, shift=0):
    """Return this rank's shard of pairs."""
    for axis, sizes, rank in axes:
        x = x.narrow(axis + shift, sum(sizes[:rank]), sizes[rank])
    return x


def shards(arrays, axes):
    """Return this rank's shards of pairs and of their mask, and whole weights."""
    x, mask, *weights = arrays
    return [own(x, axes), own(mask, axes, 1), *weights]


CASES = {
    "rows": dict(sharded=1),
    "columns": dict(sharded=2, direction="incoming", chunks=2, keep=True, H=3),
    "rows-incoming-chunks": dict(sharded=1, direction="incoming", chunks=2, gate="hidden"),
    "columns-outgoing-uneven": dict(sharded=2, sizes="uneven", chunks=3, keep=True, H=5),
    "empty": dict(sharded=1, sizes="empty", chunks=2, gate="hidden", N=4),
    "empty-incoming": dict(sharded=2, sizes="empty", chunks=2, keep=True, N=4),
    "no-members": dict(sharded=1, B=(0,)),
    "mesh": dict(sharded=(1, 2), chunks=2, direction="incoming"),
    "mesh-turned-plain": dict(sharded=(2, 1), biases=False, keep=True, H=3, N=4),
    "few-channels": dict(sharded=1, H=1, B=(), N=3),
    "alone": dict(sharded=1, B=(), H=6),
    "alone-incoming": dict(sharded=1, B=(), H=5, direction="incoming", sizes="uneven"),
    "many-chunks": dict(sharded=1, H=18, chunks=6),
    "dependent": dict(sharded=1, dependent=True),
    "dependent-incoming": dict(
        sharded=2, dependent=True, direction="incoming", chunks=2, keep=True
    ),
    "dependent-mesh": dict(sharded=(1, 2), dependent=True, chunks=2),
    "many-leading": dict(sharded=1, B=(2, 1, 2), N=3, H=2, sizes="uneven"),
}


def made(case):
    """Return what a case's call takes, and how it is sharded."""
    options = {name: value for name, value in CASES[case].items() if name != "dependent"}
    spread = {name: options.pop(name, None) for name in ("sharded", "sizes")}
    call = {name: options.pop(name) for name in ("chunks", "keep") if name in options}
    alike = {"direction": options.pop("direction", "outgoing")}
    alike["gate"] = options.get("gate", "output")
    x, mask, weights = problem(**options)
    given, axes = sharding(spread["sharded"], spread["sizes"], x.shape[-2])
    return x, mask, weights, alike, {**given, **call}, axes


@pytest.mark.parametrize("case", CASES)
@on_ranks
def test_value_and_all_derivatives_are_one_devices(case):
    x, mask, weights, alike, given, axes = made(case)
    arrays = [a.requires_grad_() for a in (x, mask, *weights.values())]
    cotangent = torch.randn_like(x)

    def called(x, mask, weights, cotangent, op, **more):
        """Return the output, and this call's own loss, from which derivatives follow."""
        if "dependent" in CASES[case]:
            p = weights["p_in_weight"]
            weights = weights | {"g_in_weight": p, "norm_in_weight": p[0].tanh()}
            mask = x.mean(-1)
        out = op(x, mask=mask, **weights, **alike, **more)
        return out, (out * cotangent).sum()

    want, on_one_device = called(x, mask, weights, cotangent, on_one)
    # Every rank its shard; weights by `share`, pairs by slices of leaves of its own.
    shared = share(*weights.values(), group=dist.group.WORLD)
    here = dict(zip(weights, shared, strict=True))
    pairs, of_mask = functools.partial(own, axes=axes), functools.partial(own, axes=axes, shift=1)
    got, loss = called(pairs(x), of_mask(mask), here, pairs(cotangent), update, **given)
    torch.testing.assert_close(got, pairs(want), rtol=1e-12, atol=1e-12)
    compare_derivatives(loss, on_one_device, arrays, [pairs, of_mask, *[None] * len(weights)])


#: Channels travel one or two at a time.
small_messages = mock.patch.object(triangles, "_MESSAGE", 1)


@pytest.mark.parametrize("case", ["alone", "alone-incoming", "rows", "columns"])
@on_ranks
@small_messages
def test_messages_of_few_channels_add_up(case):
    test_value_and_all_derivatives_are_one_devices.on_rank(case)


@pytest.mark.parametrize("case", ["mesh", "mesh-turned-plain"])
@on_ranks(worlds=[("gloo", 4), on_gpus(4)])
def test_a_square_of_ranks_is_one_device(case):
    test_value_and_all_derivatives_are_one_devices.on_rank(case)


#: Global shapes and placements of DTensors: the mesh, of x by dimension (batch, rows, columns).
PLACED = {
    "rows": (None, "r"),
    "columns": (None, "c"),
    "batch": (None, "b"),
    "replicated": (None, "-"),
    "rows-columns": ((2, 1), "rc"),
    "columns-rows": ((1, 2), "cr"),
    "batch-rows": ((1, 2), "br"),
    "replicated-columns": ((1, 2), "-c"),
}


def placed(case):
    """Return a mesh and the placements of x on it."""
    from torch.distributed.tensor import Replicate, Shard

    P, (shape, letters) = dist.get_world_size(), PLACED[case]
    if shape is not None and P % 2:
        # Three ranks in a row.
        shape = tuple(P if n > 1 else 1 for n in shape)
    mesh = init_device_mesh(device().type, shape or (P,))
    kinds = {"b": Shard(0), "r": Shard(1), "c": Shard(2), "-": Replicate()}
    return mesh, [kinds[letter] for letter in letters]


@pytest.mark.parametrize(
    ("case", "mask"),
    [
        *((case, "whole") for case in PLACED),
        *((case, "one for all rows") for case in ("rows", "columns", "rows-columns")),
    ],
)
@on_ranks(worlds=[("gloo", 3), on_gpus(2), on_gpus(3)])
def test_a_dtensor_keeps_its_placement(case, mask):
    from torch.distributed.tensor import Replicate, distribute_tensor

    x, whole_mask, weights = problem(N=5, B=(3,))
    arrays = [x, whole_mask, *weights.values()]
    if mask == "one for all rows":
        arrays[1] = arrays[1][:1, :1].clone()
    mesh, placements = placed(case)
    # An axis that broadcasts is on all ranks.
    copies = [Replicate()] * mesh.ndim
    of_mask = [
        Replicate() if place.is_replicate() or arrays[1].shape[place.dim] == 1 else place
        for place in placements
    ]
    spread = [placements, of_mask] + [copies] * (len(arrays) - 2)
    given = [distribute_tensor(a, mesh, place) for a, place in zip(arrays, spread, strict=True)]
    cotangent = torch.randn_like(x)
    found = []
    for some, by in ((arrays, cotangent), (given, distribute_tensor(cotangent, mesh, placements))):
        some = [a.detach().requires_grad_() for a in some]
        out = on_one(some[0], "incoming", some[1], *some[2:])
        loss = (out.sin() * by).sum()
        first = torch.autograd.grad(loss, some, retain_graph=True)
        again = torch.autograd.grad(loss, some, create_graph=True)
        # Not their squares: torch 2.6 squares the ranks' parts of a gradient one by one.
        second = torch.autograd.grad(sum(g.sin().sum() for g in again), some)
        found.append([out, *first, *again, *second])
    assert list(found[1][0].placements) == placements
    got = [value.full_tensor() for value in found[1]]
    torch.testing.assert_close(got, found[0], rtol=1e-9, atol=1e-11)


@on_ranks
def test_a_module_takes_a_dtensor():
    from torch.distributed.tensor import Shard, distribute_tensor

    from fusedops.nn import TriangleMultiplicativeUpdate

    module = randomized(TriangleMultiplicativeUpdate(4, 3, bias=True)).to(device())
    x = torch.randn(2, 5, 5, 4, device=device(), dtype=torch.float64)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    got = module(distribute_tensor(x, mesh, [Shard(2)]))
    torch.testing.assert_close(got.full_tensor(), module(x))


@on_ranks
def test_misplaced_dtensors_are_refused():
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    x, mask, weights = problem(N=4)
    mesh, turned = init_device_mesh(device().type, (dist.get_world_size(),)), turned_mesh((-1,))
    rows, copies = (distribute_tensor(x, mesh, [place]) for place in (Shard(1), Replicate()))
    last = distribute_tensor(x, mesh, [Shard(3)])
    part = type(rows).from_local(x, mesh, [Partial()], run_check=False)
    other = distribute_tensor(mask, mesh, [Shard(2)])
    split = {"p_in_weight": distribute_tensor(weights["p_in_weight"], mesh, [Shard(0)])}
    whole = {"p_in_weight": distribute_tensor(weights["p_in_weight"], mesh, [Replicate()])}
    for call, message in (
        (lambda: on_one(last, **weights), "x has placements"),
        (
            lambda: on_one(distribute_tensor(x, turned, [Shard(1)]), **weights),
            "mesh of x has the ranks",
        ),
        (lambda: on_one(part, **weights), "x has placements"),
        (lambda: on_one(rows, "outgoing", mask, **weights), "mask is no DTensor"),
        (lambda: on_one(rows, mask=other, **weights), "mask has placements"),
        (lambda: on_one(rows, **(weights | split)), "p_in_weight has placements"),
        (lambda: on_one(x, **(weights | whole)), r"p_in_weight.to_local\(\)"),
        (lambda: on_one(copies, **weights, out=x), "to_local"),
        (lambda: on_one(rows, a=1, **weights), "unexpected keyword"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@on_ranks
def test_bytes_sent_are_the_formulas(direction, keep):
    P, rank = dist.get_world_size(), dist.get_rank()
    N, H, B = 2 * P, 3 * P, 2
    x, mask, weights = problem(N=N, H=H)
    with counting() as counts:
        here = [x.chunk(P, 1)[rank].requires_grad_(), mask.chunk(P, 1)[rank]]
        more = {"group": dist.group.WORLD, "keep": keep, "chunks": 3}
        out = update(here[0], direction, here[1], **weights, **more)
        trips = len(counts)
        out.sum().backward()
    sent = [n * x.itemsize for _, n in counts]
    forward = sum(sent[:trips])
    u = B * N * N * H * x.itemsize // P
    if P == 2:
        assert (forward, sum(sent)) == (u, (3 if direction == "outgoing" else 2) * u)
    else:
        assert forward == 3 * u * (P - 1) // P
        assert sum(sent) == (6 if keep else 8) * u * (P - 1) // P


@pytest.mark.parametrize(("direction", "back"), [("outgoing", 2), ("incoming", 1)])
@on_ranks(worlds=[("gloo", 2)])
@small_messages
def test_two_ranks_send_parts_forward_and_all_at_once_back(direction, back):
    x, _, weights = problem(N=4, H=8)
    with counting() as sent:
        here = x.chunk(2, 1)[dist.get_rank()].requires_grad_()
        out = update(here, direction, **weights, group=dist.group.WORLD)
        forward = len(sent)
        out.sum().backward()
    assert (forward, len(sent)) == (4, 4 + back)


@on_ranks(worlds=[("gloo", 3)])
def test_a_message_can_begin_between_two_products():
    x, _, weights = problem(N=3, H=12, B=())
    done, product, message = [], torch.baddbmm, dist.all_to_all_single

    def noted(name, function):
        return lambda *given, **options: done.append(name) or function(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "baddbmm", noted("product", product))
        patch.setattr(dist, "all_to_all_single", noted("message", message))
        here = x.chunk(3)[dist.get_rank()]
        update(here, **weights, group=dist.group.WORLD, chunks=2)
    assert done == [*["message"] * 2, *["product", "product", "message"] * 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@on_ranks
def test_other_dtypes(direction, dtype):
    P, rank = dist.get_world_size(), dist.get_rank()
    x, mask, weights = problem(N=6, C=8, H=6, dtype=dtype)
    own_x, own_mask = (a.chunk(P, 1)[rank] for a in (x, mask))
    got = update(own_x, direction, own_mask, **weights, group=dist.group.WORLD)
    exact = {name: w.double() for name, w in weights.items()}
    want = on_one(x.double(), direction, mask.double(), **exact).chunk(P, 1)[rank]
    assert got.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps * want.abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@on_ranks
def test_sums_beyond_float16_have_both_gradients(direction):
    P, rank = dist.get_world_size(), dist.get_rank()
    x, _, weights = problem(N=32, C=8, H=4, B=(), dtype=torch.float16)
    weights["p_in_weight"] *= 120
    own_x = x.chunk(P)[rank].requires_grad_()
    out = update(own_x, direction, **weights, group=dist.group.WORLD)
    loss = out.float().square().mean()
    (plain,) = torch.autograd.grad(loss, own_x, retain_graph=True)
    (again,) = torch.autograd.grad(loss, own_x, create_graph=True)
    assert plain.isfinite().all()
    tolerance = 0.02 * plain.abs().max().item()
    torch.testing.assert_close(again, plain, rtol=0, atol=tolerance)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@on_ranks
def test_kernels_of_stages_serve():
    """Triton's, interpreted on a CPU."""
    P, rank = dist.get_world_size(), dist.get_rank()
    x, mask, weights = problem(N=P + 1, C=4, H=4, B=(), dtype=torch.float32)
    sizes = [1] * (P - 1) + [2]
    given, axes = {"group": dist.group.WORLD, "sizes": sizes}, [(-3, sizes, rank)]
    leaves = [a.requires_grad_() for a in (x, mask, *weights.values())]
    want = on_one(x, "incoming", mask, **weights, backend="torch")
    wanted = torch.autograd.grad(want.square().sum(), leaves)
    weights = dict(zip(weights, share(*leaves[2:], group=dist.group.WORLD), strict=True))
    own_mask = own(mask, axes, 1)
    got = update(own(x, axes), "incoming", own_mask, **weights, **given, backend="triton")
    found = torch.autograd.grad(got.square().sum(), leaves)
    torch.testing.assert_close(got, own(want, axes), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shards(found, axes), shards(wanted, axes), rtol=1e-3, atol=1e-3)


def turned_mesh(shape):
    """Return a mesh whose ranks are in the opposite order."""
    return dist.DeviceMesh(device().type, torch.arange(dist.get_world_size()).flip(0).view(shape))


@on_ranks
def test_errors_come_before_anything_is_sent():
    P = dist.get_world_size()
    x, mask, weights = problem(N=P)
    own_x, world = x[:, :1], {"group": dist.group.WORLD}
    for arguments, message in (
        (dict(x=own_x, **world, sharded=3), "sharded is 3; it should be 1, 2"),
        (dict(x=own_x, **world, sharded=(1, 2)), "DeviceMesh of two dimensions"),
        (dict(x=x, **world), f"x has {P} rows; rank . should have 1 of {P}"),
        (dict(x=own_x, **world, sizes=[1]), "sizes has 1 sizes"),
        (dict(x=own_x, **world, sizes=[2] * P), f"sizes have the sum {2 * P}"),
        (dict(x=own_x, mask=mask[:, 0, :1].expand(2, P + 1), **world), "mask has shape"),
        (dict(x=own_x, **world, chunks=0), "chunks is 0"),
        (dict(x=own_x, direction="up", **world), "direction is 'up'"),
        (dict(x=own_x, group="all"), "group is str"),
        (dict(x=own_x.int(), **world), "x has dtype torch.int32|x has dtype int32"),
        (dict(x=own_x[0, 0], **world), "x has shape"),
        (dict(x=own_x, group=turned_mesh((P, 1)), sharded=(1, 2)), "mesh of group has the ranks"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            update(**arguments, **weights)
    x = torch.ones(1, dist.get_world_size(), 3, device=device(), dtype=torch.float64)
    C, H = weights["p_out_weight"].shape
    wider = {"p_out_weight": x.new_ones(C + 1, H), "p_out_bias": None}
    wider |= {"g_out_weight": x.new_ones(C + 1, C), "g_out_bias": None}
    with pytest.raises(ValueError, match="as wide as x where ranks share pairs"):
        update(x, **(weights | wider), group=dist.group.WORLD)
    with pytest.raises(ValueError, match="p_in_weight has shape"):
        update(x, **(weights | {"p_in_weight": weights["p_in_weight"][1:]}), group=dist.group.WORLD)
    dist.barrier()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@on_ranks
def test_a_backward_keeps_the_sums_and_if_asked_both_sides(direction, keep):
    P = dist.get_world_size()
    N, H, kept = 2 * P, 3 * P, {}
    x, _, weights = problem(N=N, H=H, B=())
    own_x = x.chunk(P)[dist.get_rank()].requires_grad_()

    def noted(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        out = update(own_x, direction, **weights, group=dist.group.WORLD, keep=keep, chunks=2)
    for tensor in (own_x, *weights.values()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    assert sum(kept.values()) == N * N // P * H * (3 if keep else 1) * x.itemsize


@on_ranks(worlds=[on_gpus(2), on_gpus(3)])
def test_peak_memory_is_the_formulas():
    N, C, H, chunks = 960, 64, 64, 4
    x, _, weights = problem(N, C, H, B=(), dtype=torch.bfloat16)
    P, rank = dist.get_world_size(), dist.get_rank()
    own_x = x.chunk(P)[rank].clone()
    del x

    def peak(backward):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(backward):
            out = update(own_x, **weights, group=dist.group.WORLD, chunks=chunks)
            if backward:
                torch.autograd.grad(out, own_x, out)
        return torch.cuda.max_memory_allocated() - before

    own_x.requires_grad_()
    for backward, two, more in ((False, 3.5, 5), (True, 10, 10.5)):
        peak(backward)
        # In u, the bytes of a rank's pairs in H channels, here also the bytes of x.
        assert 0.5 < peak(backward) / own_x.nbytes / (two if P == 2 else more) < 1.15
