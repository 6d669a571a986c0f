"""Problems that ranks share, beside one device and beside how other programs share them.

Triangles are measured at a fixed size (strong scaling), also with √P times an N, so that a rank of
P has as many pairs as one device with that N; edges and tokens at a fixed size of each rank's share
(weak scaling). A time is the slowest rank's. The exposed time of exchanges is the time that a step
loses when its all-to-alls send nothing. More ranks than there are GPUs are predicted: from the
measured time of a rank's work alone, and from the bytes it would send at the measured rate.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

import fusedops
from bench.measure import machine
from bench.memory import peak_MB
from bench.timing import timed, waiting
from fusedops import distributed

FORWARD, TRAINING = "forward", "forward and backward"
ONE, OURS = "one device", "fusedops"
TRIANGLES = "triangle_multiplicative_update"
#: One device where it has no memory without `max_memory`.
BOUNDED = "one device, max_memory"


class Sizes(NamedTuple):
    """N of triangles, and N of one device, which ranks multiply by √P."""

    pairs: tuple[int, ...]
    growing: tuple[int, ...]
    #: Edges, and tokens, of a rank.
    edges: tuple[int, ...]
    tokens: tuple[int, ...]
    #: N, and the numbers of ranks for which it is predicted.
    predicted: tuple[tuple[int, tuple[int, ...]], ...]


SIZES = {
    "cuda": Sizes(
        (1024, 2048, 4096, 8192, 16384),
        (2048, 4096),
        (60_000, 320_000, 1_000_000),
        (65_536, 1_048_576),
        ((4096, (2, 4, 8)), (8192, (2, 4, 8, 64)), (16384, (8, 64))),
    ),
    "cpu": Sizes((64, 128), (64,), (2_000, 8_000), (8_192, 65_536), ((128, (2, 8)),)),
    "quick": Sizes((16,), (16,), (200,), (256,), ((16, (2, 8)),)),
}

Step = Callable[..., torch.Tensor]


class Contestant(NamedTuple):
    """A function of leaves.

    To compare it with one device, it has the placement of every leaf on a mesh; the output's is the
    first one's. Ours have the formula of the bytes that a rank sends in each pass. A pass takes
    `room` times the first leaf, besides the leaves.
    """

    run: Step
    leaves: tuple[torch.Tensor, ...]
    mesh: Any = None
    places: tuple[Any, ...] = ()
    sent: tuple[float, float] | None = None
    room: tuple[float, float] = (0, 0)


class Problem(NamedTuple):
    """The contestants, and one device's function of all ranks' leaves."""

    op: str
    size: str
    dtype: str
    weak: bool
    contestants: dict[str, Contestant]
    whole: Step


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _leaf(*shape: int, like: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=like.device, dtype=like.dtype).mul_(scale).requires_grad_()


_WEIGHTS = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")
#: The `room` of our update of pairs that ranks share.
_ROOM = (4.5, 11.5)


def _weights(like: torch.Tensor) -> list[torch.Tensor]:
    """Return weights of 128 channels and 128 hidden ones, the same on all ranks."""
    weights = [_leaf(n, 128, like=like, scale=128**-0.5) for n in (256, 256, 128, 128)]
    for weight in weights:
        dist.broadcast(weight.detach(), 0)
    return weights


def _updated(group: Any, sharded: Any = 1, sizes: Any = None) -> Step:
    """Return the update of rows, or of rows and columns, that a group shares."""

    def update(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        given: Any = dict(zip(_WEIGHTS, weights, strict=True))
        given |= {"group": group, "sharded": sharded, "sizes": sizes}
        return distributed.triangle_multiplicative_update(x, **given)

    return update


def _to_local(a: Any) -> torch.Tensor:
    """Return a rank's part of a DTensor; a copy's cotangent is a part of a sum."""
    back = [Partial() if place.is_replicate() else place for place in a.placements]
    return a.to_local(grad_placements=back)


def _bytes(N: int, P: int, itemsize: int) -> tuple[float, float]:
    """Return the bytes that a rank sends, forward and in all."""
    u = N * N * 128 * itemsize / P
    return (u, 3 * u) if P == 2 else (3 * u * (P - 1) / P, 8 * u * (P - 1) / P)


@functools.cache
def _mesh(device: str, *shape: int) -> Any:
    """Return the ranks as a mesh, whose groups are made once."""
    return dist.init_device_mesh(device, shape)


def _square(P: int) -> tuple[int, int]:
    """Return the sides of a mesh of P ranks that is as square as it can be."""
    rows = max(n for n in range(1, math.isqrt(P) + 1) if P % n == 0)
    return rows, P // rows


def _one(x: torch.Tensor, *weights: torch.Tensor, max_memory: int | None = None) -> torch.Tensor:
    """Return the update of pairs that one device has."""
    given: Any = dict(zip(_WEIGHTS, weights, strict=True))
    return fusedops.triangle_multiplicative_update(x, **given, max_memory=max_memory)


def triangles(N: int, like: torch.Tensor) -> Problem:
    """Update pairs (1, N, N, 128) with 128 hidden channels, and rows sharded, or tiles."""
    P, C, device = dist.get_world_size(), 128, like.device.type
    mesh, (rows, columns) = _mesh(device, P), _square(P)
    weights = _weights(like)
    x = _leaf(1, N // P, N, C, like=like)

    def moved(a: torch.Tensor, before: Any, after: Any) -> torch.Tensor:
        placed = DTensor.from_local(a, mesh, [before], run_check=False)
        return _to_local(placed.redistribute(placements=[after]))

    def in_stages(product: Step) -> Step:
        def run(x: torch.Tensor, p: Any, g: Any, v: Any, w: Any) -> torch.Tensor:
            xn = functional.layer_norm(x, (C,))
            left, right = ((xn @ p.T) * (xn @ g.T).sigmoid()).permute(0, 3, 1, 2).chunk(2, 1)
            o = product(left, right).permute(0, 2, 3, 1)
            return (functional.layer_norm(o, (C,)) @ v.T) * (xn @ w.T).sigmoid()

        return run

    def by_channels(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left, right = (moved(side, Shard(2), Shard(1)) for side in (left, right))
        return moved(left @ right.mT, Shard(1), Shard(2))

    def by_gather(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left @ moved(right, Shard(2), Replicate()).mT

    pairs = _leaf(1, N, N, C, like=like)
    one = Contestant(_one, (pairs, *weights), room=(4, 10))
    contestants = {ONE: one}
    if not fits(one, 1):
        bounded = functools.partial(_one, max_memory=4 * pairs.nbytes)
        contestants[BOUNDED] = one._replace(run=bounded, room=(3, 6.5))
    sent, on_rows = _bytes(N, P, x.itemsize), (mesh, ([Shard(1)], *[[Replicate()]] * 4))
    shared = Contestant(_updated(dist.group.WORLD), (x, *weights), *on_rows, sent, _ROOM)
    contestants[OURS] = shared
    if rows > 1:
        square, sizes = _mesh(device, rows, columns), ([N // rows] * rows, [N // columns] * columns)
        tile = _leaf(1, N // rows, N // columns, C, like=like)
        contestants[f"{OURS}, {rows} × {columns}"] = shared._replace(
            run=_updated(square, (1, 2), sizes),
            leaves=(tile, *weights),
            mesh=square,
            places=([Shard(1), Shard(2)], *[[Replicate()] * 2] * 4),
        )
    for who, product, room in (
        ("DTensor.redistribute", by_channels, (8, 14.5)),
        ("gather, as FastFold", by_gather, (4 + 2 * P, 14 + 2 * P)),
    ):
        contestants[who] = Contestant(in_stages(product), (x, *weights), *on_rows, room=room)
    return Problem(TRIANGLES, f"N {N}", _name(like.dtype), False, contestants, _one)


def edges(E: int, like: torch.Tensor) -> Problem:
    """Rotate features of both ends of edges forth and back, lmax 2, 128 channels, 30 a node."""
    P, rank, C = dist.get_world_size(), dist.get_rank(), 128
    n = max(E // 30, 4)
    target = torch.randint(n, (E,), device=like.device)
    # Sources are near: the halo is half as large as a rank's part.
    source = target + torch.randint(-n // 4, n // 4 + 1, (E,), device=like.device)
    ends = torch.stack([(source + rank * n) % (P * n), target + rank * n])
    owner = torch.arange(P * n, device=like.device) // n
    part = distributed.Partition(ends, owner, group=dist.group.WORLD)
    local = fusedops.Edges(torch.stack([source % n, target]), n)
    everything = fusedops.Edges(ends, P * n)
    mesh = _mesh(like.device.type, P)
    wigner = _leaf(E, 35, like=like).detach()

    def turned(x: torch.Tensor, graph: Any, wigner: torch.Tensor = wigner) -> torch.Tensor:
        message = fusedops.node_to_edge_wigner_permute(x, graph, wigner)
        back: torch.Tensor = fusedops.permute_wigner_inv_edge_to_node(
            message[..., :C] * message[..., C:], graph, wigner, transpose=True
        )
        return back

    def gathered(x: torch.Tensor) -> torch.Tensor:
        placed = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        nodes = _to_local(placed.redistribute(placements=[Replicate()]))
        return turned(nodes, everything)[rank * n : (rank + 1) * n]

    def of_all(x: torch.Tensor) -> torch.Tensor:
        graph = fusedops.Edges(_whole(ends, mesh, [Shard(1)]), P * n)
        return turned(x, graph, _whole(wigner, mesh, [Shard(0)]))

    x = _leaf(n, 9, C, like=like)
    read = sum(part._sent) - part._sent[rank]
    row = 9 * C * x.itemsize
    sent = (float(read * row), float((read + len(part.halo)) * row))
    by_nodes = mesh, ([Shard(0)],)
    contestants = {
        ONE: Contestant(lambda x: turned(x, local), (x,)),
        OURS: Contestant(lambda x: turned(part.extend(x), part.edges)[:n], (x,), *by_nodes, sent),
        "gather of nodes, as fairchem": Contestant(gathered, (x,), *by_nodes),
    }
    size = f"{E:,} edges, {len(part.halo):,} remote"
    return Problem("edge rotations", size, _name(like.dtype), True, contestants, of_all)


def tokens(T: int, like: torch.Tensor) -> Problem:
    """Convolve T tokens a rank of 1,024 channels with dynamic kernels of 4 taps."""
    P, rank, D, W = dist.get_world_size(), dist.get_rank(), 1024, 4
    D = D if T > 256 else 8
    leaves = _leaf(1, T, D, like=like), _leaf(1, T, D, W, like=like)
    group = dist.group.WORLD
    mesh = _mesh(like.device.type, P)

    def ours(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        return distributed.dynamic_conv(x, kernels, group=group, activation="silu")

    def one(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        return fusedops.dynamic_conv(x, kernels, activation="silu")

    halo = float((W - 1) * D * like.itemsize)
    last, first = rank == P - 1, rank == 0
    sent = (halo * (not last), halo * ((not last) + (not first)))
    contestants = {
        ONE: Contestant(one, leaves),
        OURS: Contestant(ours, leaves, mesh, ([Shard(1)],) * 2, sent),
    }
    return Problem("dynamic_conv", f"{T:,} tokens", _name(like.dtype), True, contestants, one)


class _Sent:
    """The all-to-alls of a step: counted, or left out."""

    def __init__(self) -> None:
        self.bytes, self.genuine = 0, dist.all_to_all_single

    def counted(self, out: Any, given: Any, received: Any, sizes: Any, **options: Any) -> Any:
        own = sizes[dist.get_rank(options["group"])]
        self.bytes += (sum(sizes) - own) * given.itemsize
        return self.genuine(out, given, received, sizes, **options)

    def nothing(self, *_: Any, **options: Any) -> Any:
        # The memory keeps earlier numbers: zeros would be multiplied faster.
        return self

    def wait(self) -> None:
        """Stand for a finished exchange."""


@contextlib.contextmanager
def _instead(function: Callable[..., Any]) -> Iterator[None]:
    genuine = dist.all_to_all_single
    dist.all_to_all_single = function
    try:
        yield
    finally:
        dist.all_to_all_single = genuine


def _slowest(step: Callable[[], Any], device: str, seconds: float) -> tuple[float, list[float]]:
    """Return the median and the quartiles of the slowest rank's times, in ms."""
    wait = waiting(device)

    def once() -> float:
        dist.barrier()
        wait()
        taken = torch.tensor([timed(step, wait, 1)], device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    once()
    rounds = int(max(5, min(25, seconds * 1e3 / once())))
    low, middle, high = statistics.quantiles([once() for _ in range(rounds)], n=4)
    return middle, [low, high]


def _steps(contestant: Contestant) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each pass and its step."""
    run, leaves = contestant.run, contestant.leaves

    def forward() -> Any:
        with torch.no_grad():
            return run(*leaves)

    def both() -> Any:
        out = run(*leaves)
        cotangent, edge = torch.ones_like(out), get_gradient_edge(out)
        # Nobody needs the output once its cotangent is there, but its node has to live on.
        out = out[..., :0].clone()
        return torch.autograd.grad(edge, leaves, cotangent)

    yield FORWARD, forward
    yield TRAINING, both


def _whole(a: torch.Tensor, mesh: Any, places: Any) -> torch.Tensor:
    """Return all ranks' parts of a tensor as one."""
    return DTensor.from_local(a.detach(), mesh, places, run_check=False).full_tensor()


def _summed(a: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' tensors."""
    total = a.clone()
    dist.all_reduce(total)
    return total


def apart(ours: Contestant, whole: Step) -> tuple[float, float]:
    """Return how far ours is from one device, relative to the largest number of a result.

    The first is of the output, the second of the gradients too.
    """

    def results(run: Step, leaves: Any, cotangent: Any) -> tuple[torch.Tensor, ...]:
        out = run(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, cotangent)

    gather = [functools.partial(_whole, mesh=ours.mesh, places=at) for at in ours.places]
    cotangent = torch.randn_like(ours.leaves[0])
    got = results(ours.run, ours.leaves, cotangent)
    leaves = [full(leaf).requires_grad_() for full, leaf in zip(gather, ours.leaves, strict=True)]
    want = results(whole, leaves, gather[0](cotangent))
    # A rank has a part of the gradient by a tensor that all ranks have.
    shared = [all(place.is_replicate() for place in at) for at in ours.places]
    by = [_summed if all_have else full for all_have, full in zip(shared, gather, strict=True)]
    far = [
        float((full(a).double() - b).abs().max() / b.abs().max())
        for full, a, b in zip([gather[0], *by], got, want, strict=True)
    ]
    # Where one is NaN, the largest is, too.
    return far[0], float(torch.tensor(far).max())


def memory(device: str) -> float:
    """Return the bytes of a GPU's memory; a CPU's are taken to be enough."""
    return torch.cuda.mem_get_info()[1] if device == "cuda" else math.inf


def fits(contestant: Contestant, at: int) -> bool:
    """Return whether a pass finds memory.

    It isn't tried where it would not: ranks whose memory ends at different places would wait for
    each other.
    """
    x = contestant.leaves[0]
    return x.nbytes * (1 + contestant.room[at]) <= 0.93 * memory(x.device.type)


def measured(
    problem: Problem, device: str, seconds: float, compare: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row for every contestant and pass; one that lacks memory has no time.

    Contestants with placements are compared with one device, if asked for.

    Raises
    ------
    ArithmeticError
        If a contestant differs from one device by more than its dtype explains.
    """
    P = dist.get_world_size()
    ones: dict[str, float] = {}
    for who in list(problem.contestants):
        # Its leaves go with it.
        contestant = problem.contestants.pop(who)
        far: tuple[float, ...] = ()
        if compare and contestant.places:
            far = apart(contestant, problem.whole)
            if not far[1] <= math.sqrt(torch.finfo(contestant.leaves[0].dtype).eps):
                raise ArithmeticError(f"{problem.op} by {who} is {far} apart from one device")
        for at, (name, step) in enumerate(_steps(contestant)):
            row: dict[str, Any] = {"op": problem.op, "size": problem.size, "dtype": problem.dtype}
            row |= {"pass": name, "who": who, "ranks": P, "ms": None, "quartiles_ms": None}
            if not fits(contestant, at):
                yield row
                continue
            ms, row["quartiles_ms"] = _slowest(step, device, seconds)
            row["ms"], row["peak_MB"] = ms, peak_MB(step, device)
            if who in (ONE, BOUNDED):
                ones.setdefault(name, ms)
            elif name in ones:
                row["efficiency"] = ones[name] / ms / (1 if problem.weak else P)
            if contestant.sent:
                sent = _Sent()
                with _instead(sent.counted):
                    step()
                with _instead(sent.nothing):
                    alone, _ = _slowest(step, device, seconds)
                row |= {"exposed_ms": max(0.0, ms - alone), "sent_MB": sent.bytes / 2**20}
                row |= {"formula_MB": contestant.sent[at] / 2**20}
            if far:
                row["apart"] = far[at]
            yield row


def predicted(
    N: int, P: int, like: torch.Tensor, speeds: list[dict[str, float]], seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield what triangles would take on P ranks: exchanges hidden as far as they can be, and not.

    A rank's work is measured without any exchange, if it finds memory. An exchange takes the time
    of the smallest one that was measured, and its bytes at the rate of the largest.
    """
    # A group that can say its size, and no more.
    stub: Any = dist.ProcessGroup
    device, leaves = like.device.type, (_leaf(1, N // P, N, 128, like=like), *_weights(like))
    contestant = Contestant(_updated(stub(0, P)), leaves, room=_ROOM)
    for at, (name, step) in enumerate(_steps(contestant)):
        if not fits(contestant, at):
            continue
        sent, calls = _Sent(), 0

        def counted(*given: Any, sent: _Sent = sent, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            return sent.nothing(*given, **options)

        with _instead(counted):
            step()
            exchanges = calls
            alone, _ = _slowest(step, device, seconds)
        size = _bytes(N, P, like.itemsize)[at]
        latency, rate = speeds[0]["ms"], speeds[-1]["GB_s"]
        travel = exchanges * latency + size / rate / 1e6
        row: dict[str, Any] = {"op": TRIANGLES, "size": f"N {N}", "pass": name, "ranks": P}
        row |= {"alone_ms": alone, "exchanges_ms": travel}
        yield row | {"least_ms": max(alone, travel), "most_ms": alone + travel}


def bandwidth(device: str, seconds: float, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """Return the GB/s that a rank sends in all-to-alls of so many bytes."""
    found = []
    for size in sizes:
        x = torch.ones(size // 4, device=device)
        out, P = torch.empty_like(x), dist.get_world_size()

        def step(out: Any = out, x: Any = x) -> None:
            dist.all_to_all_single(out, x)

        ms, _ = _slowest(step, device, seconds)
        found.append({"MB": size / 2**20, "ms": ms, "GB_s": size * (P - 1) / P / ms / 1e6})
    return found


def run(device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the results so far after every problem, on every rank of the default group."""
    seconds = 0.02 if quick else 1.0
    like = torch.empty(0, device=device, dtype=torch.bfloat16 if device == "cuda" else None)
    exact = torch.empty(0, device=device)
    sizes = SIZES["quick" if quick else device]
    about = machine(device) | {"ranks": dist.get_world_size()}
    found: dict[str, Any] = {"schema": 1, "device": device, "machine": about}
    found |= {"cases": [], "all_to_all": [], "predicted": []}
    P = about["ranks"]
    pairs = {*sizes.pairs, *(P * round(N / math.sqrt(P)) for N in sizes.growing)}
    for make, kind, dtype in (
        (triangles, sorted(pairs), like),
        (edges, sizes.edges, exact),
        (tokens, sizes.tokens, like),
    ):
        for size in kind:
            torch.manual_seed(dist.get_rank())
            problem = make(size, dtype)
            found["cases"] += measured(problem, device, seconds, compare=size == kind[0])
            yield found
    most = 1 << (14 if quick else 30 if device == "cuda" else 24)
    speeds = bandwidth(device, seconds, (most >> 10, most >> 6, most >> 3, most))
    found["all_to_all"] = speeds
    for N, counts in sizes.predicted:
        for count in counts:
            found["predicted"] += predicted(N, count, like, speeds, seconds)
        yield found
