"""Graphs whose nodes ranks share: energies, forces and training on forces, beside one device's."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("torch is built without gloo", allow_module_level=True)

import fusedops  # noqa: E402
from fusedops.distributed import Partition, share  # noqa: E402
from fusedops.wigner import wigner_d  # noqa: E402
from replicated import Enter, counting, whole  # noqa: E402
from worlds import device, on_ranks  # noqa: E402

LMAX, C = 1, 2


def graph(kind):
    """Return the edges of a whole graph, the owners of its nodes, and coordinates."""
    N, E, P = 11, 40, dist.get_world_size()
    ends = torch.randint(N - 1, (2, E))
    # No edge ends where it begins; the last node has no edge.
    ends[1] = (ends[0] + 1 + ends[1] % (N - 2)) % (N - 1)
    owner = torch.randint(P, (N,))
    if kind == "empty":
        owner[:] = P - 1
        owner[3] = 0 if P == 3 else P - 1
    if kind == "apart":
        # No edge connects two ranks.
        owner = torch.arange(N) % 2
        ends[1] = (ends[0] + 2 * (1 + ends[1] % 4)) % 10
    xyz = torch.randn(N, 3, dtype=torch.float64)
    return ends.to(device()), owner.to(device()), xyz.to(device())


def partitioned(kind="random"):
    """Return a graph's owners, this rank's part of it, and its rows' nodes."""
    ends, owner, _ = graph(kind)
    part = Partition(ends[:, owner[ends[1]] == dist.get_rank()], owner, group=dist.group.WORLD)
    return owner, part, torch.cat([part.nodes, part.halo])


def copies(nodes, count):
    """Return how many rows of all ranks are of each node."""
    found = torch.zeros(count, device=device(), dtype=torch.float64)
    found.index_add_(0, nodes, torch.ones_like(nodes, dtype=torch.float64))
    dist.all_reduce(found)
    return found


def layer(x, weight, edges, wigner, extend):
    """Return x after messages from both ends of edges, mixed by a weight."""
    n = len(x)
    message = fusedops.node_to_edge_wigner_permute(extend(x), edges, wigner)
    mixed = torch.tanh(message @ weight)
    total = fusedops.permute_wigner_inv_edge_to_node(mixed, edges, wigner, transpose=True)
    return x + total[:n]


def energy(xyz, features, weights, edges, index, extend):
    """Return the energy of own nodes in a model of two layers."""
    full = extend(xyz)
    vectors = full.index_select(0, index[1]) - full.index_select(0, index[0])
    wigner = wigner_d(vectors, LMAX)
    radial = torch.exp(-vectors.square().sum(1))[:, None, None].expand(-1, LMAX + 1, C)
    x = fusedops.edge_degree_scatter(extend(features), radial, edges, wigner, transpose=True)
    x = x[: len(features)]
    for weight in weights:
        x = layer(x, weight, edges, wigner, extend)
    return (x * x).sum()


def trained(xyz, features, weights, used, edges, index, extend, count):
    """Return the energy, forces, and the gradient of a loss of the forces.

    `used` are the weights as this rank uses them; their slopes count where `count` is true.
    """
    value = energy(xyz, features, used, edges, index, extend)
    forces, *slopes = torch.autograd.grad(-value, [xyz, *weights], create_graph=True)
    loss = forces.square().sum() + count * sum(slope.sin().sum() for slope in slopes)
    return value.detach(), forces, torch.autograd.grad(loss, [xyz, *weights])


KINDS = ["random", "empty", "apart"]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_training_on_forces_is_one_devices(kind):
    ends, owner, xyz = graph(kind)
    rank = dist.get_rank()
    features = torch.randn(len(xyz), (LMAX + 1) ** 2, C, dtype=torch.float64).to(device())
    weights = [
        torch.randn(2 * C, C, dtype=torch.float64).to(device()).requires_grad_() for _ in range(2)
    ]
    edges = fusedops.Edges(ends, len(xyz))
    whole_xyz = xyz.clone().requires_grad_()
    value, forces, second = trained(
        whole_xyz, features, weights, weights, edges, ends, lambda x: x, True
    )

    here = (owner[ends[1]] == rank).nonzero()[:, 0]
    part = Partition(ends[:, here], owner, group=dist.group.WORLD)
    assert torch.equal(part.nodes, (owner == rank).nonzero()[:, 0])
    index = torch.stack([torch.as_tensor(a) for a in ends_of(part.edges)]).to(device())
    both = torch.cat([part.nodes, part.halo])
    assert torch.equal(both[index], ends[:, here])
    own_xyz = xyz[part.nodes].requires_grad_()
    shared = share(*weights, group=dist.group.WORLD)
    # The loss is the sum of all ranks' losses, so the weights' slopes count on one rank alone.
    got_value, got_forces, got_second = trained(
        *(own_xyz, features[part.nodes], weights, shared),
        *(part.edges, index, part.extend, rank == 0),
    )
    dist.all_reduce(got_value)
    torch.testing.assert_close(got_value, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_forces, forces[part.nodes], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(got_second[0], second[0][part.nodes], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got_second[1:], second[1:], rtol=1e-9, atol=1e-9)


def ends_of(edges):
    """Return sources and targets, of Edges on any device."""
    fields = edges.tensors_here()
    return fields.source, fields.target


@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_extend_takes_any_rows_and_derivatives_of_every_order(kind):
    _, part, both = partitioned(kind)
    for dtype in (torch.int64, torch.bfloat16, torch.complex64):
        for shape in ((), (3,), (2, 0)):
            x = torch.arange(11, device=device()).to(dtype).reshape(-1, *[1] * len(shape))
            x = x.expand(11, *shape)
            assert torch.equal(part.extend(x[part.nodes]), x[both])
    x = torch.randn(11, dtype=torch.float64, device=device())[part.nodes].requires_grad_()
    # A node's third derivative counts all copies of it.
    count = copies(both, 11)
    value = part.extend(x).pow(4).sum()
    for k in (4, 12, 24):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        want = k * x ** {4: 3, 12: 2, 24: 1}[k]
        torch.testing.assert_close(value, want * count[part.nodes])


@on_ranks
def test_gradcheck_of_the_gathered_halo():
    owner, part, both = partitioned()
    sizes = [torch.empty(1, device=device()) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, sizes[0].new_tensor([len(both)]))
    sizes = torch.cat(sizes).int().tolist()

    def gathered(x):
        return whole(part.extend(Enter.apply(x)[part.nodes]).pow(3), 0, sizes)

    x = torch.randn(len(owner), 2, dtype=torch.float64).to(device()).requires_grad_()
    assert torch.autograd.gradcheck(gathered, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(gathered, (x,), fast_mode=True)

    def slopes(x):
        rows = Enter.apply(x)[part.nodes]
        extended = part.extend(rows)
        (slope,) = torch.autograd.grad(extended.pow(3), rows, extended, create_graph=True)
        return whole(slope, 0, torch.bincount(owner, minlength=len(sizes)).tolist())

    assert torch.autograd.gradgradcheck(slopes, (x,), fast_mode=True)


@on_ranks
def test_sums_of_16_bits_are_rounded_once():
    P, rank = dist.get_world_size(), dist.get_rank()
    # Every rank reads node 0, which the first one owns.
    owner = torch.arange(P, device=device())
    ends = torch.tensor([[0], [rank]], device=device())
    part = Partition(ends, owner, group=dist.group.WORLD)
    x = torch.ones(1, device=device(), dtype=torch.bfloat16, requires_grad=True)
    # 256 and 1 can't be added in bfloat16, 256 and 1 + 1 can.
    own = 256.0 if rank == 0 else 1.0
    (dx,) = torch.autograd.grad(part.extend(x), x, x.new_full((1 + (rank > 0),), own))
    # 257 is rounded to 256.
    assert dx.item() == ({2: 256.0, 3: 258.0}[P] if rank == 0 else 1.0)


@on_ranks
def test_conjugates_and_tensors_with_gaps_travel():
    _, part, both = partitioned()
    whole = torch.randn(11, 3, 2, dtype=torch.complex128, device=device())
    for form in (torch.conj, lambda x: x.transpose(1, 2), lambda x: x.conj().imag):
        assert torch.equal(part.extend(form(whole[part.nodes])), form(whole[both]))
    x = whole[part.nodes].requires_grad_()
    y = part.extend(x)
    # The cotangent is conjugated when it is read.
    (dx,) = torch.autograd.grad((y.conj() ** 3).sum().real, x)
    want = 3 * x.detach().conj() ** 2
    torch.testing.assert_close(dx, want * copies(both, 11)[part.nodes, None, None])


@on_ranks
def test_bytes_sent_are_the_halos():
    _, part, _ = partitioned()
    with counting() as sent:
        x = torch.randn(part.num_local, 4, C, device=device()).requires_grad_()
        part.extend(x).sum().backward()
    (received, out), back = sent
    assert received == len(part.halo) * 4 * C
    assert back == (out, received)


@on_ranks
def test_two_runs_give_the_same_bits():
    def run():
        torch.manual_seed(0)
        _, part, _ = partitioned()
        x = torch.linspace(0, 1, part.num_local, device=device()).requires_grad_()
        (dx,) = torch.autograd.grad(part.extend(x).exp().sin().sum(), x)
        return dx

    assert torch.equal(run(), run())


WRONG = {
    "target": (lambda ends, owner: (ends.flip(1), owner), "a node of rank"),
    "node": (lambda ends, owner: (ends + len(owner), owner), r"should be in \[0, 11\), the nodes"),
    "owner": (lambda ends, owner: (ends, owner - 1), r"owner\[\d+\] is -1"),
}


@pytest.mark.parametrize("case", WRONG)
@on_ranks
def test_wrong_values_on_one_rank_are_an_error_on_all(case):
    change, message = WRONG[case]
    owner = torch.arange(11, device=device()) % dist.get_world_size()
    rank = dist.get_rank()
    ends = torch.tensor([[10, 0], [rank, rank]], device=device())
    if rank == 1:
        wrong = {"target": (torch.tensor([[0], [0]], device=device()), owner)}
        ends, owner = wrong.get(case) or change(ends, owner)
    else:
        message = "out of range on rank 1"
    with pytest.raises(IndexError, match=message):
        Partition(ends, owner, group=dist.group.WORLD)
    # All ranks are in step.
    dist.barrier()


@on_ranks
def test_a_rank_refuses_nodes_that_it_does_not_own():
    P, rank = dist.get_world_size(), dist.get_rank()
    owner = torch.arange(2 * P, device=device()) % P
    source = torch.tensor([P + rank], device=device())
    ends = torch.stack([source, source])
    if rank == 0:
        # Rank 0 alone believes that node 0 is rank 1's, and asks it.
        owner[0], ends[0, 0] = 1, 0
    refused = pytest.raises(IndexError, match="owner differs between ranks")
    with refused if rank == 1 else contextlib.nullcontext():
        Partition(ends, owner, group=dist.group.WORLD)
    dist.barrier()


@on_ranks
def test_wrong_arguments_are_refused():
    world = {"group": dist.group.WORLD}
    ends, owner = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for call, message in (
        (lambda: Partition(ends.double(), owner, **world), "edge_index has dtype float64"),
        (lambda: Partition(ends.numpy(), owner, **world), "edge_index is a ndarray"),
        (lambda: Partition(ends[0], owner, **world), r"edge_index has shape \(0,\)"),
        (lambda: Partition(ends, owner[None], **world), "owner has shape"),
        (lambda: Partition(ends, owner, group=None), "group is NoneType"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    part = Partition(ends.to(device()), owner.to(device()), **world)
    for x in (torch.ones(7, device=device()), torch.tensor(1.0, device=device())):
        with pytest.raises(ValueError, match="x has shape"):
            part.extend(x)
    assert "0 edges" in repr(part)
