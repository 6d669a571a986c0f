"""Collectives with derivatives of every order.

A collective on raw tensors in a ``backward`` has a right first derivative and a silently wrong
second one. Here every backward calls ``apply`` of its adjoint, which autograd sees.
"""

from __future__ import annotations

import functools
import math
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedops._frame.check import as_array, is_dtensor, size
from fusedops._frame.hook import outside_of_graphs


def group_of(op: str, group: Any) -> dist.ProcessGroup:
    """Return the process group of a group or a one-dimensional mesh. Raises TypeError."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, dist.DeviceMesh) and group.ndim == 1:
        return group.get_group()
    was = f"a mesh of {group.ndim} dimensions" if hasattr(group, "ndim") else type(group).__name__
    raise TypeError(
        f"{op}: group is {was}; it should be a ProcessGroup of this rank, or a DeviceMesh of one "
        "dimension"
    )


def tensor(op: str, name: str, value: Any) -> torch.Tensor:
    """Return a plain tensor. Raises TypeError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; it should be a torch tensor")
    given: torch.Tensor = as_array(op, name, value)
    return given


@functools.cache
def checks_ranks() -> bool:
    """Return whether calls compare what ranks were given; the environment is read once."""
    return os.environ.get("FUSEDOPS_CHECK_RANKS") == "1"


def agree(op: str, group: dist.ProcessGroup, like: torch.Tensor, **given: Any) -> None:
    """Raise ValueError on every rank unless all were given the same, if that is to be compared.

    Of a tensor count shape, dtype, whether it requires grad, and a checksum of its values. All
    ranks give as many names.
    """
    if not checks_ranks():
        return
    own = torch.tensor([zlib.crc32(_shown(value).encode()) for value in given.values()])
    own = own.to(like.device)
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    for name, sums in zip(given, torch.stack(found).T.tolist(), strict=True):
        if len(set(sums)) > 1:
            # The first of the values that most ranks have.
            usual = max(sums, key=sums.count)
            others = [str(rank) for rank, value in enumerate(sums) if value != usual]
            raise ValueError(
                f"{op}: {name} is {_shown(given[name])} on rank {group.rank()}, and differs on "
                f"{', '.join(others)}; it should be the same on every rank"
            )


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join([_shown(each) for each in value])}]"
    if callable(value) or is_dtensor(value):
        # The op itself refuses these.
        return f"a {type(value).__name__}"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    values = value.detach().resolve_conj().resolve_neg().cpu().flatten().contiguous()
    checksum = zlib.crc32(values.view(torch.uint8).numpy())
    grad = ", requires grad" * value.requires_grad
    return f"a tensor {tuple(value.shape)}, {dtype}{grad}, with checksum {checksum:08x}"


def in_chunks(n: int, ranks: int) -> list[int]:
    """Return the sizes of the shards that ``torch.chunk`` and DTensor cut n elements into."""
    step = -(-n // ranks)
    return [max(0, min(step, n - step * rank)) for rank in range(ranks)]


def checked_sizes(op: str, name: str, sizes: Any, group: dist.ProcessGroup) -> list[int]:
    """Return the sizes of all ranks' shards as ints. Raises TypeError or ValueError."""
    if not isinstance(sizes, Sequence):
        kind = type(sizes).__name__
        raise TypeError(f"{op}: {name} is a {kind}; it should be a sequence of ints")
    found = [size(op, f"{name}[{rank}]", n) for rank, n in enumerate(sizes)]
    if len(found) != group.size():
        raise ValueError(
            f"{op}: {name} has {len(found)} sizes; it should have {group.size()}, one for each rank"
        )
    return found


def sizes_everywhere(n: int, group: dist.ProcessGroup, like: torch.Tensor) -> list[int]:
    """Return the n of every rank, which waits for all ranks."""
    own = torch.tensor([n], device=like.device)
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    return torch.cat(found).tolist()


class Trip:
    """An all-to-all of flat pieces: the elements that go to, and come from, every rank."""

    def __init__(
        self, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self.sent, self.received, self.group = list(sent), list(received), group
        # While it is under way: torch's handle, the memory that is read, and that is written.
        self.under_way: Any = None
        # The trip that brings cotangents back.
        self.back: Trip | None = None

    def turned(self) -> Trip:
        """Return the trip back."""
        return Trip(self.received, self.sent, self.group)

    def begin(self, flat: torch.Tensor, room: torch.Tensor | None = None) -> None:
        """Send the pieces; the ones that come arrive in `room`, if it is given."""
        # Torch sends no tensor that is conjugated or negated when it is read.
        flat = flat.contiguous().resolve_conj().resolve_neg()
        room = flat.new_empty(sum(self.received)) if room is None else room
        work = dist.all_to_all_single(
            room, flat, self.received, self.sent, group=self.group, async_op=True
        )
        self.under_way = work, flat, room

    def end(self) -> torch.Tensor:
        """Return the pieces that arrive."""
        work, _, room = self.under_way
        work.wait()
        self.under_way = None
        return room


class _Start(torch.autograd.Function):
    """Begin a trip; return an empty tensor, by which autograd knows what `_Arrive` depends on."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.trip = trip
        trip.begin(flat)
        return flat.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> tuple[torch.Tensor, None]:
        return arrive(token, ctx.trip.back), None


class _Arrive(torch.autograd.Function):
    """End a trip. In a backward pass this node comes first, and begins the trip back."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.trip = trip
        return trip.end()

    @staticmethod
    def backward(ctx: Any, dflat: torch.Tensor) -> tuple[torch.Tensor, None]:
        trip = ctx.trip
        trip.back = trip.turned()
        return start(dflat, trip.back), None


def start(flat: torch.Tensor, trip: Trip) -> torch.Tensor:
    """Begin a trip with the pieces for all ranks, one after the other; return its token."""
    token: torch.Tensor = _Start.apply(flat, trip)
    return token


def arrive(token: torch.Tensor, trip: Trip) -> torch.Tensor:
    """Return the pieces of all ranks, one after the other."""
    flat: torch.Tensor = _Arrive.apply(token, trip)
    return flat


def all_to_all(flat: torch.Tensor, trip: Trip) -> torch.Tensor:
    """Make a trip and wait for it."""
    return arrive(start(flat, trip), trip)


@outside_of_graphs
def exchange(
    x: torch.Tensor,
    src: int,
    dst: int,
    *,
    group: Any,
    src_sizes: Sequence[int] | None = None,
    dst_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    r"""Return a tensor split along another axis: from shards along `src` to shards along `dst`.

    .. math:: \mathrm{out}^{(q)} = \mathrm{cat}_p \, x^{(p)}[\mathrm{dst} \in \mathrm{part}_q]

    for rank q: the parts of all ranks p, one after the other along `src`.

    Parameters
    ----------
    x : tensor
        This rank's shard along the axis `src`, of any dtype, with all of the axis `dst`. A shard
        may be empty.
    src, dst : int
        Two different axes.
    group : ProcessGroup, or DeviceMesh of one dimension
        The ranks that share the tensor.
    src_sizes : sequence of int, optional
        The length of every rank's shard along `src`. Without them the ranks ask each other, which
        waits for all of them, and for the GPU.
    dst_sizes : sequence of int, optional
        The lengths along `dst` after the exchange; by default those of ``torch.chunk``.

    Returns
    -------
    tensor
        This rank's shard along `dst`, with all of the axis `src`.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it. Nothing is sent then.

    Notes
    -----
    Derivatives of every order: the adjoint is the exchange from `dst` to `src`. The loss is the sum
    of the losses of all ranks, so a rank's cotangent is the derivative of that sum by its own shard
    of the result. All ranks must call alike, and differentiate alike.

    References
    ----------
    The all-to-all of DeepSpeed-Ulysses (arXiv:2309.14509) and of distributed Fourier transforms.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from fusedops import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> distributed.exchange(x, 0, 1, group=dist.group.WORLD).tolist()
    [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    >>> dist.destroy_process_group()
    """
    name = "exchange"
    x = tensor(name, "x", x)
    group = group_of(name, group)
    kind = x.dtype, x.requires_grad, x.ndim
    agree(name, group, x, src=src, dst=dst, x=kind, src_sizes=src_sizes, dst_sizes=dst_sizes)
    for argument, axis in (("src", src), ("dst", dst)):
        whole = isinstance(axis, int) and not isinstance(axis, bool)
        if not whole or not -x.ndim <= axis < x.ndim:
            raise ValueError(f"{name}: {argument} is {axis!r}; it should be an axis of x")
    src, dst = src % x.ndim, dst % x.ndim
    if src == dst:
        raise ValueError(f"{name}: dst is {dst}; it should be another axis than src")
    rest = [k for axis, k in enumerate(x.shape) if axis != src]
    agree(name, group, x, x=rest)
    rank, n, m = group.rank(), x.shape[src], x.shape[dst]
    if dst_sizes is None:
        dst_sizes = in_chunks(m, group.size())
    dst_sizes = checked_sizes(name, "dst_sizes", dst_sizes, group)
    if sum(dst_sizes) != m:
        raise ValueError(
            f"{name}: dst_sizes have the sum {sum(dst_sizes)}; it should be {m}, the length of x "
            f"along axis {dst}"
        )
    if src_sizes is None:
        src_sizes = sizes_everywhere(n, group, x)
    src_sizes = checked_sizes(name, "src_sizes", src_sizes, group)
    if src_sizes[rank] != n:
        raise ValueError(
            f"{name}: src_sizes[{rank}] is {src_sizes[rank]}; it should be {n}, the length of x "
            f"along axis {src}"
        )
    moved = x.movedim(dst, 0)
    others = math.prod(k for axis, k in enumerate(x.shape) if axis not in (src, dst))
    own = dst_sizes[rank]
    trip = Trip([n * k * others for k in dst_sizes], [k * own * others for k in src_sizes], group)
    arrived = all_to_all(moved.flatten(), trip).split(trip.received)
    parts = []
    for k, part in zip(src_sizes, arrived, strict=True):
        shape = list(x.shape)
        shape[src] = k
        del shape[dst]
        parts.append(part.view(own, *shape).movedim(0, dst))
    return torch.cat(parts, src)


def by_graph(
    function: Callable[..., Any], arrays: Sequence[Any], wanted: Sequence[bool], dout: Any
) -> tuple[Any, ...]:
    """Return the wanted cotangents of a function's arrays, which torch can differentiate again."""
    # Views, because an array may depend on another: autograd follows that path itself.
    given = [a.view_as(a) if want else a for a, want in zip(arrays, wanted, strict=True)]
    inputs = [array for array, want in zip(given, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(function(*given), inputs, dout, create_graph=True))
    return tuple([next(found) if want else None for want in wanted])


class _Share(torch.autograd.Function):
    """Tensors that all ranks have alike; the adjoint sums over ranks, in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.group = group
        return tuple([tensor.view_as(tensor) for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        return None, *_Sum.apply(ctx.group, *cotangents)


class _Sum(torch.autograd.Function):
    """Sums over ranks, which every rank gets."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.group = group
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return tuple(
            [
                part.view(like.shape).to(like.dtype)
                for part, like in zip(parts, tensors, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        return None, *_Sum.apply(ctx.group, *cotangents)


@outside_of_graphs
def share(*tensors: torch.Tensor, group: Any) -> Any:
    r"""Return tensors that all ranks have alike, with gradients summed over the ranks.

    .. math:: \mathrm{out} = x, \qquad dx = \sum_p d\mathrm{out}^{(p)}

    Parameters
    ----------
    *tensors : tensor
        Floating-point tensors that have the same values on every rank, such as the weights of a
        model whose tokens are sharded, or the atoms of a map of which every rank has a slab.
    group : ProcessGroup, or DeviceMesh of one dimension
        The ranks to sum over.

    Returns
    -------
    tensor, or tuple of tensors
        Views of the tensors; one alone without a tuple.

    Raises
    ------
    TypeError
        If an argument is wrong; the message names it.

    Notes
    -----
    The loss is the sum of the losses of all ranks. Without `share` a rank's gradient of a
    replicated tensor is that rank's part of the sum. DistributedDataParallel adds the parts too,
    but divides by the number of ranks: multiply the loss by it, or use `share` and no wrapper. All
    gradients travel in one all-reduce, for derivatives of every order.

    References
    ----------
    The first of the two conjugate operators of Megatron-LM (arXiv:1909.08053), there called f.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from fusedops import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> weight = torch.ones(3, requires_grad=True)
    >>> shared = distributed.share(weight, group=dist.group.WORLD)
    >>> shared.sum().backward()
    >>> weight.grad.tolist()
    [1.0, 1.0, 1.0]
    >>> dist.destroy_process_group()
    """
    name = "share"
    if not tensors:
        raise TypeError(f"{name}: there is no tensor; there should be one at least")
    for at, value in enumerate(tensors):
        if not tensor(name, f"tensors[{at}]", value).is_floating_point():
            raise TypeError(f"{name}: tensors[{at}] has dtype {value.dtype}; it should be a float")
    group = group_of(name, group)
    agree(name, group, tensors[0], tensors=len(tensors))
    agree(name, group, tensors[0], **{f"tensors[{at}]": a for at, a in enumerate(tensors)})
    shared = _Share.apply(group, *tensors)
    return shared[0] if len(shared) == 1 else shared
