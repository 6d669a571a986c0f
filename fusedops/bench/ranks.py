"""Problems that ranks share, beside one device and beside how other programs share them.

Triangles are measured at a fixed size (strong scaling), edges and tokens at a fixed size of every
rank's share (weak). A time is the slowest rank's. The exposed time of exchanges is the time that a
step loses when its all-to-alls send nothing. More ranks than there are GPUs are predicted: from the
measured time of a rank's work alone, and from the bytes it would send at the measured rate.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

import fusedops
from fusedops import distributed
from fusedops.bench.measure import machine
from fusedops.bench.memory import peak_MB
from fusedops.bench.timing import timed, waiting

FORWARD, TRAINING = "forward", "forward and backward"
ONE, OURS = "one device", "fusedops"

#: N; edges, and tokens, of a rank.
SIZES = {
    "cuda": ((1024, 2048, 4096, 8192), (60_000, 250_000, 1_000_000), (65_536, 1_048_576)),
    "cpu": ((64, 128), (2_000, 8_000), (8_192, 65_536)),
    "quick": ((16,), (200,), (256,)),
}
#: N, and the numbers of ranks for which it is predicted.
PREDICTED = {
    "cuda": ((4096, (2, 8)), (8192, (2, 8, 64)), (16384, (8, 64))),
    "cpu": ((128, (2, 8)),),
    "quick": ((16, (2, 8)),),
}


class Problem(NamedTuple):
    """A function of leaves for each contestant; `sent` is the formula of bytes for each pass."""

    op: str
    size: str
    dtype: str
    weak: bool
    leaves: dict[str, tuple[torch.Tensor, ...]]
    runs: dict[str, Callable[..., torch.Tensor]]
    sent: tuple[float, float]


def _leaf(*shape: int, like: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=like.device, dtype=like.dtype).mul_(scale).requires_grad_()


_WEIGHTS = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")


def _shard(N: int, P: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a rank's rows of pairs (1, N, N, 128), and weights with 128 hidden channels."""
    C, rows = 128, (256, 256, 128, 128)
    weights = [_leaf(n, C, like=like, scale=C**-0.5) for n in rows]
    return _leaf(1, N // P, N, C, like=like), *weights


def _updated(group: Any) -> Callable[..., torch.Tensor]:
    """Return the update of rows that a group shares."""

    def update(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        given: Any = dict(zip(_WEIGHTS, weights, strict=True))
        return distributed.triangle_multiplicative_update(x, **given, group=group)

    return update


def _bytes(N: int, P: int, itemsize: int) -> tuple[float, float]:
    """Return the bytes that a rank sends, forward and in all."""
    u = N * N * 128 * itemsize / P
    return (u, 3 * u) if P == 2 else (3 * u * (P - 1) / P, 8 * u * (P - 1) / P)


def triangles(N: int, like: torch.Tensor) -> Problem:
    """Update pairs (1, N, N, 128) with 128 hidden channels, and rows sharded."""
    P, C = dist.get_world_size(), 128
    x, *weights = _shard(N, P, like)
    mesh = dist.init_device_mesh(like.device.type, (P,))

    def one(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        given: Any = dict(zip(_WEIGHTS, weights, strict=True))
        return fusedops.triangle_multiplicative_update(x, **given)

    def moved(a: torch.Tensor, before: Any, after: Any) -> torch.Tensor:
        placed = DTensor.from_local(a, mesh, [before], run_check=False)
        return placed.redistribute(placements=[after]).to_local()

    def in_stages(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
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

    whole = (_leaf(1, N, N, C, like=like),) if P > 1 else (x,)
    runs = {
        ONE: one,
        OURS: _updated(dist.group.WORLD),
        "DTensor.redistribute": in_stages(by_channels),
        "gather, as FastFold": in_stages(by_gather),
    }
    sent = _bytes(N, P, x.itemsize)
    leaves = {name: (x, *weights) for name in runs} | {ONE: (*whole, *weights)}
    dtype = str(like.dtype).removeprefix("torch.")
    return Problem("triangle_multiplicative_update", f"N {N}", dtype, False, leaves, runs, sent)


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
    mesh = dist.init_device_mesh(like.device.type, (P,))
    wigner = _leaf(E, 35, like=like)
    wigner.requires_grad_(False)

    def turned(x: torch.Tensor, graph: Any) -> torch.Tensor:
        message = fusedops.node_to_edge_wigner_permute(x, graph, wigner)
        back: torch.Tensor = fusedops.permute_wigner_inv_edge_to_node(
            message[..., :C] * message[..., C:], graph, wigner, transpose=True
        )
        return back

    def gathered(x: torch.Tensor) -> torch.Tensor:
        placed = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        return turned(placed.redistribute(placements=[Replicate()]).to_local(), everything)

    runs: dict[str, Callable[..., torch.Tensor]] = {
        ONE: lambda x: turned(x, local),
        OURS: lambda x: turned(part.extend(x), part.edges)[:n],
        "gather of nodes, as fairchem": gathered,
    }
    x = _leaf(n, 9, C, like=like)
    read = sum(part._sent) - part._sent[rank]
    row = 9 * C * x.itemsize
    sent = (float(read * row), float((read + len(part.halo)) * row))
    dtype, size = str(like.dtype).removeprefix("torch."), f"{E:,} edges, {len(part.halo):,} remote"
    return Problem("edge rotations", size, dtype, True, {name: (x,) for name in runs}, runs, sent)


def tokens(T: int, like: torch.Tensor) -> Problem:
    """Convolve T tokens a rank of 1,024 channels with dynamic kernels of 4 taps."""
    P, rank, D, W = dist.get_world_size(), dist.get_rank(), 1024, 4
    D = D if T > 256 else 8
    leaves = _leaf(1, T, D, like=like), _leaf(1, T, D, W, like=like)
    group = dist.group.WORLD

    def ours(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        return distributed.dynamic_conv(x, kernels, group=group, activation="silu")

    def one(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        return fusedops.dynamic_conv(x, kernels, activation="silu")

    halo = float((W - 1) * D * like.itemsize)
    last, first = rank == P - 1, rank == 0
    sent = (halo * (not last), halo * ((not last) + (not first)))
    dtype, runs = str(like.dtype).removeprefix("torch."), {ONE: one, OURS: ours}
    return Problem(
        "dynamic_conv", f"{T:,} tokens", dtype, True, {name: leaves for name in runs}, runs, sent
    )


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


def _steps(run: Any, leaves: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each pass and its step."""

    def forward() -> Any:
        with torch.no_grad():
            return run(*leaves)

    def both() -> Any:
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        out = run(*leaves)
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    yield FORWARD, forward
    yield TRAINING, both


def measured(problem: Problem, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for every contestant and pass; one that lacks memory has no time."""
    P, ones = dist.get_world_size(), {}
    for who, run in problem.runs.items():
        for at, (name, step) in enumerate(_steps(run, problem.leaves[who])):
            row: dict[str, Any] = {"op": problem.op, "size": problem.size, "dtype": problem.dtype}
            row |= {"pass": name, "who": who, "ranks": P, "ms": None, "quartiles_ms": None}
            try:
                ms, row["quartiles_ms"] = _slowest(step, device, seconds)
                row["ms"], row["peak_MB"] = ms, peak_MB(step, device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                yield row
                continue
            if who == ONE:
                ones[name] = ms
            elif name in ones:
                row["efficiency"] = ones[name] / ms / (1 if problem.weak else P)
            if who == OURS:
                sent = _Sent()
                with _instead(sent.counted):
                    step()
                with _instead(sent.nothing):
                    alone, _ = _slowest(step, device, seconds)
                row |= {"exposed_ms": max(0.0, ms - alone), "sent_MB": sent.bytes / 2**20}
                row |= {"formula_MB": problem.sent[at] / 2**20}
            yield row


def predicted(
    N: int, P: int, like: torch.Tensor, speeds: list[dict[str, float]], seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield what triangles would take on P ranks: exchanges hidden as far as they can be, and not.

    A rank's work is measured without any exchange. An exchange takes the time of the smallest one
    that was measured, and its bytes at the rate of the largest.
    """
    # A group that can say its size, and no more.
    stub: Any = dist.ProcessGroup
    device, update = like.device.type, _updated(stub(0, P))
    leaves = _shard(N, P, like)
    for at, (name, step) in enumerate(_steps(update, leaves)):
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
        row: dict[str, Any] = {"op": "triangle_multiplicative_update", "size": f"N {N}"}
        row |= {"pass": name, "ranks": P, "alone_ms": alone, "exchanges_ms": travel}
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
    for make, kind, dtype in zip(
        (triangles, edges, tokens), sizes, (like, exact, like), strict=True
    ):
        for size in kind:
            torch.manual_seed(dist.get_rank())
            found["cases"] += measured(make(size, dtype), device, seconds)
            yield found
    most = 1 << (14 if quick else 30 if device == "cuda" else 24)
    speeds = bandwidth(device, seconds, (most >> 10, most >> 6, most >> 3, most))
    found["all_to_all"] = speeds
    for N, ranks in PREDICTED["quick" if quick else device]:
        for P in ranks:
            found["predicted"] += predicted(N, P, like, speeds, seconds)
        yield found
