"""Three small models whose problem is shared by two ranks, beside the same on one device.

::

    python -m fusedops.distributed.examples                              # two processes on the CPU
    torchrun --nproc-per-node 2 -m fusedops.distributed.examples         # on GPUs, if there are any
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist

import fusedops
from fusedops import distributed
from fusedops.nn import DynamicShortConvolution, TriangleMultiplicativeUpdate
from fusedops.trimul import Direction
from fusedops.wigner import wigner_d


def pair_block(device: torch.device) -> tuple[Any, Any]:
    """Update pairs over outgoing and incoming edges, as Boltz does, with rows as a DTensor."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    ways: tuple[Direction, ...] = ("outgoing", "incoming")
    updates = [TriangleMultiplicativeUpdate(16, direction=way).to(device) for way in ways]
    for parameter in torch.nn.ModuleList(updates).parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    z = torch.randn(1, 10, 10, 16, device=device)
    shared: Any = distribute_tensor(z, mesh, [Shard(1)])
    for update in updates:
        z, shared = z + update(z), shared + update(shared)
    return shared.full_tensor(), z


def potential(device: torch.device) -> tuple[Any, Any]:
    """Return forces of a model with one layer of messages, as in UMA, on a graph of two parts."""
    rank, N, C = dist.get_rank(), 12, 4
    positions, features = torch.randn(N, 3, device=device), torch.randn(N, 9, C, device=device)
    pairs = torch.combinations(torch.arange(N, device=device)).T
    edge_index = torch.cat([pairs, pairs.flip(0)], 1)

    def forces(positions: Any, features: Any, edges: Any, edge_index: Any, extend: Any) -> Any:
        positions = positions.detach().requires_grad_()
        everywhere = extend(positions)
        wigner = wigner_d(everywhere[edge_index[1]] - everywhere[edge_index[0]], 2)
        message = fusedops.node_to_edge_wigner_permute(extend(features), edges, wigner)
        x = fusedops.permute_wigner_inv_edge_to_node(
            message[..., :C] * message[..., C:].tanh(), edges, wigner, transpose=True
        )
        energy = x[: len(features)].square().sum()
        return -torch.autograd.grad(energy, positions)[0]

    # Equal parts of the nodes in a Morton order, in which near nodes mostly follow each other.
    cells = ((positions - positions.amin(0)) / 0.5).long()
    bits = [(cells[:, axis] >> n & 1) << 3 * n + axis for n in range(20) for axis in range(3)]
    order = torch.stack(bits).sum(0).argsort()
    owner = torch.empty(N, dtype=torch.int64, device=device)
    owner[order] = torch.arange(N, device=device) * dist.get_world_size() // N
    own = edge_index[:, owner[edge_index[1]] == rank]
    part = distributed.Partition(own, owner, group=dist.group.WORLD)
    place = torch.empty(N, dtype=torch.int64, device=device)
    both = torch.cat([part.nodes, part.halo])
    place[both] = torch.arange(len(both), device=device)
    some = positions[part.nodes], features[part.nodes]
    got = forces(*some, part.edges, place[own], part.extend)
    edges = fusedops.Edges(edge_index, N)
    want = forces(positions, features, edges, edge_index, lambda x: x)
    return got, want[part.nodes]


def short_convolution(device: torch.device) -> tuple[Any, Any]:
    """Convolve two packed sequences, as a layer of Jet-Nemotron; one of them crosses the ranks."""
    layer = DynamicShortConvolution(8, 4, generator_reduction=2).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, boundaries = torch.randn(1, 24, 8, device=device), torch.tensor([0, 5, 24], device=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = x.chunk(ranks, 1)[rank]
    got, _ = layer(own, cu_seqlens=boundaries, group=dist.group.WORLD)
    want, _ = layer(x, cu_seqlens=boundaries)
    return got, want.chunk(ranks, 1)[rank]


EXAMPLES = (pair_block, potential, short_convolution)


def _run() -> None:
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for example in EXAMPLES:
        torch.manual_seed(0)
        got, want = example(device)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
        if dist.get_rank() == 0:
            error = (got - want).abs().max().item()
            ranks = dist.get_world_size()
            name = example.__name__
            print(f"{name}: {ranks} ranks agree with one within {error:.0e}", flush=True)
    dist.barrier()


def _work(rank: int, store: str) -> None:
    # No URL of the file, since Windows writes its name in another way.
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.set_num_threads(1)
    _run()
    # An orderly exit may abort while threads of gloo are still at work.
    os._exit(0)


def main() -> None:
    """Run the examples on the ranks of torchrun, or on two processes."""
    if "RANK" in os.environ:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
        _run()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = torch.multiprocessing.spawn
        spawn(_work, (f"{folder}/store",), nprocs=2)


if __name__ == "__main__":
    main()
