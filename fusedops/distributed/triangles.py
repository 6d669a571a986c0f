"""The triangle multiplicative update of a pair representation that no single device holds.

Ranks have some rows, some columns or both of the pairs. Each projects its own pairs, and sends each
rank left and right of some channels; multiplies whole planes of its own channels; and sends the
products back to the pairs' owners. Chunks of channels follow each other, so that one travels while
another is computed: the next chunk is under way before the product of one begins. Two ranks that
share rows send a third less, their right or the other's part of the sums, beside a product that
needs nothing of the other rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fusedops._frame import registry
from fusedops._frame.check import alike, at_least_one, floats
from fusedops._frame.hook import outside_of_graphs
from fusedops._frame.registry import BackendName
from fusedops.distributed.exchanges import Trip, agree, all_to_all, by_graph, tensor
from fusedops.distributed.tiles import NAME, Tiles, tiles_of
from fusedops.trimul import triangle_multiplicative_update as _on_one
from fusedops.trimul.op import ARRAYS, end_vjp, sides_vjp, slices
from fusedops.trimul.op import end as end_of
from fusedops.trimul.op import sides as sides_of
from fusedops.trimul.rows import copy_rows

#: The bytes that are worth a message of their own.
_MESSAGE = 1 << 23
#: The chunks that are projected at once, except for the first, which should travel soon.
_AT_ONCE = 3


def _ahead(begin: Callable[[slice], Any], chunks: list[slice]) -> Iterator[tuple[slice, Any]]:
    """Yield each chunk and its result of `begin`, once the next chunk has begun, too.

    Messages that are sent after a product has filled the GPU wait until it is done.
    """
    begun = []
    for chunk in chunks:
        begun.append((chunk, begin(chunk)))
        if len(begun) > 1:
            yield begun.pop(0)
    yield from begun


def _worth(size: int, most: int) -> int:
    """Return how many messages so many bytes are worth, `most` at most."""
    return min(max(size // _MESSAGE, 1), most)


def _sides_of(planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return left and right, as matrices (batch, N, N), of planes (N, 2, batch, N)."""
    return planes[:, 0].transpose(0, 1), planes[:, 1].transpose(0, 1)


def _padded(o: torch.Tensor, ranks: int, each: int) -> torch.Tensor:
    """Return o (B, H, L, M) by the rank of its channels, with zeros where a rank has fewer."""
    missing = ranks * each - o.shape[1]
    if missing:
        # `pad` of torch 2.6 takes no empty shard.
        o = torch.cat([o, o.new_zeros(len(o), missing, *o.shape[2:])], 1)
    return o.unflatten(1, (ranks, each))


class _Update:
    """An update's shards, the chunks of its channels, and the stages that need no other rank.

    Subclasses multiply: `spread` arranges the weights of left and right for `sides`; `products`
    and `products_back` exchange and multiply; `differentiable` is for derivatives of higher order.
    """

    #: The most chunks, unless more are asked for.
    most_chunks: int
    #: The groups of channels that `sides` returns one after the other, and the channels of one.
    groups: int
    each: int
    #: The most matrices of one product. A message begins once all GPUs have done their product of
    #: the moment; therefore long products are made in parts.
    per_product: int

    def __init__(self, tiles: Tiles, a: Any, swap: bool, keep: bool) -> None:
        self.tiles, self.swap, self.keep = tiles, swap, keep
        self.B, self.L, self.M, _ = a.x.shape
        self.itemsize = a.x.itemsize
        self.H = a.p_in_weight.shape[0] // 2
        self.options = a[len(ARRAYS) :]
        self.direction, gate, self.precision, self.eps = self.options[:4]
        self.scale = 1.0
        if a.x.dtype == torch.float16:
            # A mean over pairs is in float16's range where the factors are; a sum may not be.
            self.scale = 2.0 ** -round(math.log2(max(tiles.N, 1)))
        self.end_options = gate, self.precision, self.scale, self.eps
        self.Arguments = type(a)

    def worth(self) -> int:
        """Return how many chunks are worth messages."""
        size = 2 * self.B * self.tiles.N**2 * self.each * self.itemsize // self.tiles.group.size()
        return _worth(size, self.most_chunks)

    def cut(self, chunks: int) -> None:
        """Cut the channels into chunks, so many at most."""
        self.chunks = slices(self.each, -(-self.each // chunks))

    def record(self, arrays: Sequence[Any]) -> Any:
        """Return the arrays by name."""
        return self.Arguments._make((*arrays, *self.options))

    def spread(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weights in two axes of groups and one of the channels of a group."""
        raise NotImplementedError

    def sides(self, a: Any, chunk: slice) -> torch.Tensor:
        """Return left and right of a chunk of the channels of every group."""
        given = a.p_in_weight, a.p_in_bias, a.g_in_weight, a.g_in_bias
        weights = [w if w is None else self.spread(w)[:, :, chunk].flatten(0, 2) for w in given]
        arrays = a.x, a.mask, a.norm_in_weight, a.norm_in_bias, *weights
        sides: torch.Tensor = sides_of(*arrays, self.groups, self.precision, self.eps).sides
        return sides

    def products(self, a: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return this rank's shard of o (B, H, L, M), and the tensors that are kept."""
        raise NotImplementedError

    def products_back(self, a: Any, do: torch.Tensor, kept: Any) -> torch.Tensor:
        """Return the cotangents (B, 2, H, L, M) of this rank's left and right."""
        raise NotImplementedError

    def differentiable(self, *arrays: Any) -> torch.Tensor:
        """Return the output by functions that torch differentiates to any order."""
        raise NotImplementedError

    def end(self, a: Any, o: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the output."""
        out: torch.Tensor = end_of(*self.for_end(a, o), *self.end_options).out
        return out

    def for_end(self, a: Any, o: torch.Tensor) -> tuple[Any, ...]:
        """Return the arrays of the stage after the products."""
        return tuple([o if name == "o" else getattr(a, name) for name in end_of.arrays])

    def multiply(self, a: Any, b: Any, form: str, out: Any, start: Any = None) -> None:
        """Write products of matrices, times the scale, plus `start`."""
        a, b = {"outgoing": (a, b.mT), "incoming": (a.mT, b), "plain": (a, b)}[form]
        beta = 0 if start is None else 1
        start = out if start is None else start
        for of in slices(len(out), self.per_product):
            torch.baddbmm(start[of], a[of], b[of], beta=beta, alpha=self.scale, out=out[of])

    def gradients(self, a: Any, o: Any, kept: Any, dout: Any, wanted: Any) -> tuple[Any, ...]:
        """Return the cotangents of all arrays that want one."""
        slots = {f"d{name}": want or None for name, want in zip(ARRAYS, wanted, strict=True)}
        slots |= {"do": True, "dlogits": True}
        out = [slots[name] for name in end_vjp.outputs]
        ends = end_vjp(*self.for_end(a, o), dout, *self.end_options, out=out)._asdict()
        given = a._asdict() | {"dlogits": ends["dlogits"]}
        given["dsides"] = self.products_back(a, ends.pop("do"), kept).flatten(1, 2)
        arrays = [given[name] for name in sides_vjp.arrays]
        out = [slots[name] for name in sides_vjp.outputs]
        found = ends | sides_vjp(*arrays, self.precision, self.eps, out=out)._asdict()
        return tuple([found[f"d{name}"] for name in ARRAYS])


class _ByChannels(_Update):
    """An update by planes of some channels on every rank.

    Left, right and o travel as rows: by rank, row, channel, member of the batch and column.
    """

    most_chunks = 4

    def __init__(self, tiles: Tiles, a: Any, swap: bool, keep: bool) -> None:
        super().__init__(tiles, a, swap, keep)
        self.groups = self.ranks = tiles.group.size()
        # Channels of a rank; the last ranks may have fewer, and zeros in the place of others.
        self.each = -(-self.H // self.ranks)

    def cut(self, chunks: int) -> None:
        super().cut(chunks)
        planes = self.chunks[0].stop * self.B
        # A chunk travels beside another one's product.
        self.per_product = planes if len(self.chunks) == 1 else -(-planes // 2)

    def spread(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weights by rank, by side, and by the channels of a rank, with zeros at the end."""
        weight = weight.unflatten(0, (2, self.H))
        weight = weight.flip(0) if self.swap else weight
        none = (0, 0) * (weight.ndim - 2)
        weight = torch.nn.functional.pad(weight, (*none, 0, self.ranks * self.each - self.H))
        return weight.unflatten(1, (self.ranks, self.each)).transpose(0, 1)

    def to_channels(self, per_pair: int) -> Trip:
        """Return the trip of so many numbers of each pair to the ranks of their channels."""
        areas = [area * per_pair for area in self.tiles.areas()]
        return Trip([self.L * self.M * per_pair] * self.ranks, areas, self.tiles.group)

    def to_pairs(self, per_pair: int) -> Trip:
        """Return the trip back."""
        return self.to_channels(per_pair).turned()

    def sides_by_chunk(self, a: Any) -> Iterator[torch.Tensor]:
        """Yield left and right of each chunk: (rank, member, side, channel, row, column).

        Chunks are projected together, since every projection reads and normalizes the pairs.
        """
        later = [slice(at, at + _AT_ONCE) for at in range(1, len(self.chunks), _AT_ONCE)]
        for chunks in [self.chunks[some] for some in (slice(1), *later)]:
            first, end = chunks[0].start, chunks[-1].stop
            planes = self.sides(a, slice(first, end)).unflatten(2, (2, end - first))
            parts = list(planes.split([chunk.stop - chunk.start for chunk in chunks], 3))
            del planes
            while parts:
                # Nothing here keeps the last part, after which nobody asks again.
                yield parts.pop(0)

    def send(self, planes: torch.Tensor) -> Trip:
        """Begin to send planes (rank, member, ..., row, column) to the ranks of their channels.

        They travel as rows.
        """
        planes = planes.movedim(-2, 1).movedim(2, -2)
        rows = planes.new_empty(planes.shape)
        copy_rows(rows, planes)
        trip = self.to_channels(math.prod(rows.shape[2:-1]))
        trip.begin(rows.flatten())
        return trip

    def return_planes(self, planes: torch.Tensor) -> Trip:
        """Begin to send planes (N, channels, N) to the ranks of the pairs."""
        trip = self.to_pairs(planes.shape[1])
        trip.begin(self.tiles.scattered(planes))
        return trip

    def rows(self, trip: Trip, *channels: int) -> torch.Tensor:
        """Return the numbers that a trip brings, by rank, row, channels, member and column."""
        return trip.end().view(self.ranks, self.L, *channels, self.B, self.M)

    def planes(self, trip: Trip, *channels: int) -> torch.Tensor:
        """Return the planes (N, channels, N) that a trip brings."""
        arrived = self.tiles.gathered(trip.end(), math.prod(channels) * self.B)
        return arrived.unflatten(1, (*channels[:-1], -1))

    def products(self, a: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        kept, returning, sides = [], [], self.sides_by_chunk(a)
        for chunk, coming in _ahead(lambda _: self.send(next(sides)), self.chunks):
            planes = self.planes(coming, 2, chunk.stop - chunk.start)
            o = a.x.new_empty(self.tiles.N, planes.shape[2], self.tiles.N)
            self.multiply(*_sides_of(planes), self.direction, o.transpose(0, 1))
            returning.append(self.return_planes(o))
            kept += [planes] if self.keep else []
        o = a.x.new_empty(self.B, self.ranks, self.each, self.L, self.M)
        for chunk, trip in zip(self.chunks, returning, strict=True):
            rows = self.rows(trip, chunk.stop - chunk.start)
            copy_rows(o[:, :, chunk].permute(1, 3, 2, 0, 4), rows)
        return o.flatten(1, 2)[:, : self.H], kept

    def multiply_back(self, planes: Any, do: Any) -> torch.Tensor:
        """Return the cotangents of planes, from those of o (N, channels, N)."""
        (left, right), do = _sides_of(planes), do.transpose(0, 1)
        dplanes = torch.empty_like(planes)
        dleft, dright = _sides_of(dplanes)
        if self.direction == "outgoing":
            self.multiply(do, right, "plain", dleft)
            self.multiply(do, left, "incoming", dright)
        else:
            self.multiply(right, do, "outgoing", dleft)
            self.multiply(left, do, "plain", dright)
        return dplanes.flatten(1, 2)

    def products_back(self, a: Any, do: torch.Tensor, kept: Any) -> torch.Tensor:
        do, returning = _padded(do, self.ranks, self.each), []
        sides_again = None if kept else self.sides_by_chunk(a)
        send = functools.partial(self.send_back, do, sides_again)
        for at, (chunk, (sides, cotangents)) in enumerate(_ahead(send, self.chunks)):
            channels = chunk.stop - chunk.start
            planes = kept[at] if sides is None else self.planes(sides, 2, channels)
            dplanes = self.multiply_back(planes, self.planes(cotangents, channels))
            returning.append(self.return_planes(dplanes))
        dsides = a.x.new_empty(self.B, 2, self.ranks, self.each, self.L, self.M)
        for chunk, trip in zip(self.chunks, returning, strict=True):
            rows = self.rows(trip, 2, chunk.stop - chunk.start)
            for side in range(2):
                to = dsides[:, side ^ self.swap, :, chunk].permute(1, 3, 2, 0, 4)
                copy_rows(to, rows[:, :, side])
        return dsides.flatten(2, 3)[:, :, : self.H]

    def send_back(self, do: Any, sides: Any, chunk: slice) -> tuple[Trip | None, Trip]:
        """Begin to send the cotangents of a chunk of o, and its sides if given."""
        again = None if sides is None else self.send(next(sides))
        return again, self.send(do[:, :, chunk].transpose(0, 1))

    def differentiable(self, *arrays: Any) -> torch.Tensor:
        a = self.record(arrays)
        every = slice(0, self.each)
        # `send` copies without a derivative.
        rows = self.sides(a, every).permute(0, 3, 2, 1, 4)
        arrived = all_to_all(rows.flatten(), self.to_channels(rows.shape[2] * self.B))
        planes = self.tiles.gathered(arrived, 2 * self.each * self.B)
        left, right = _sides_of(planes.unflatten(1, (2, -1)))
        left, right = (left, right.mT) if self.direction == "outgoing" else (left.mT, right)
        # Scaled before, as float16 may not hold the sums.
        rows = self.tiles.scattered(((left * self.scale) @ right).transpose(0, 1))
        o = all_to_all(rows, self.to_pairs(self.each * self.B))
        o = o.view(self.ranks, self.L, self.each, self.B, self.M).permute(3, 0, 2, 1, 4)
        return self.end(a, o.flatten(1, 2)[:, : self.H])


class _OfTwo(_Update):
    """An update of rows that two ranks share: each computes o of its own rows.

    Subclasses do it for a chunk of channels. Their messages begin as soon as they can, and products
    that need none come before the ones that do.
    """

    #: Products of more chunks would wait for messages more often.
    most_chunks = 1
    groups = 2

    def __init__(self, tiles: Tiles, a: Any, swap: bool, keep: bool) -> None:
        super().__init__(tiles, a, swap, keep)
        self.each = self.H
        rank = tiles.group.rank()
        self.mine, self.theirs = tiles.rows[rank], tiles.rows[1 - rank]

    def spread(self, weight: torch.Tensor) -> torch.Tensor:
        """Return weights by side and by channel."""
        weight = weight.unflatten(0, (2, 1, self.H))
        return weight.flip(0) if self.swap else weight

    def product(self, left: torch.Tensor, right: torch.Tensor, o: torch.Tensor) -> None:
        """Write o, from left and right of its channels."""
        raise NotImplementedError

    def product_back(self, left: Any, right: Any, do: Any, dleft: Any, dright: Any) -> None:
        """Write the cotangents of left and right, from the cotangents of o."""
        raise NotImplementedError

    def products(self, a: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        o, kept = a.x.new_empty(self.B, self.H, self.L, self.M), []
        for chunk in self.chunks:
            sides = self.both(a, chunk)
            self.product(sides[0], sides[1], o[:, chunk])
            kept += [sides] if self.keep else []
            del sides
        return o, kept

    def products_back(self, a: Any, do: torch.Tensor, kept: Any) -> torch.Tensor:
        dsides = a.x.new_empty(self.B, 2, self.H, self.L, self.M)
        for at, chunk in enumerate(self.chunks):
            sides = kept[at] if kept else self.both(a, chunk)
            dleft, dright = (dsides[:, side ^ self.swap, chunk] for side in range(2))
            self.product_back(sides[0], sides[1], do[:, chunk], dleft, dright)
            del sides
        return dsides

    def both(self, a: Any, chunk: slice) -> torch.Tensor:
        """Return left and right of a chunk, which plain torch computes with channels innermost."""
        return self.sides(a, chunk).contiguous()

    def cut(self, chunks: int) -> None:
        super().cut(chunks)
        most = self.chunks[0].stop
        size = self.tiles.N**2 * most * self.itemsize // 2
        # The channels of a message, and of a product, which is of one member.
        self.per_message = -(-most // _worth(self.B * size, 4))
        self.per_product = -(-most // _worth(size, 4))

    def messages(self, rows: torch.Tensor) -> list[slice]:
        """Return the parts of the channels of rows (B, channels, ...) that travel one by one."""
        return slices(rows.shape[1], self.per_message)

    def trip(self, rows: torch.Tensor) -> Trip:
        """Return the trip of rows (B, channels, rows, N) to the other rank, whose rows arrive."""
        arriving = rows.shape[1] * self.B * self.tiles.N**2 - rows.numel()
        ways = [rank != self.tiles.group.rank() for rank in range(2)]
        sent, received = [[n * way for way in ways] for n in (rows.numel(), arriving)]
        return Trip(sent, received, self.tiles.group)

    def send(self, rows: torch.Tensor, to: torch.Tensor | None = None) -> Trip:
        """Begin to send rows; the ones that arrive are written in `to`, if that has no gaps."""
        trip = self.trip(rows)
        trip.begin(rows.flatten(), to.view(-1) if to is not None and to.is_contiguous() else None)
        return trip

    def theirs_of(self, flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return arrived numbers as the other rank's rows of the channels of `like`."""
        return flat.view(*like.shape[:2], self.tiles.N - self.L, self.M)

    def exchanged(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the other rank's rows, differentiably."""
        return all_to_all(rows.flatten(), self.trip(rows))

    def multiply(self, a: Any, b: Any, form: str, out: Any, start: Any = None) -> None:
        """Write products of the matrices of every member, times the scale, plus `start`."""
        for of in range(self.B):
            more = None if start is None else start[of]
            super().multiply(a[of], b[of], form, out[of], more)

    def part(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return aᵀ b, times the scale: this rank's part of sums that the other one needs."""
        part = a.new_empty(*a.shape[:2], a.shape[-1], b.shape[-1])
        self.multiply(a, b, "incoming", part)
        return part


class _ByRight(_OfTwo):
    """An outgoing update: o is the product of a rank's left and both ranks' right."""

    def product(self, left: torch.Tensor, right: torch.Tensor, o: torch.Tensor) -> None:
        trips = [(part, self.send(right[:, part])) for part in self.messages(right)]
        self.multiply(left, right, "outgoing", o[..., self.mine])
        for part, trip in trips:
            some = left[:, part]
            arrived = self.theirs_of(trip.end(), some)
            self.multiply(some, arrived, "outgoing", o[:, part, :, self.theirs])

    def product_back(self, left: Any, right: Any, do: Any, dleft: Any, dright: Any) -> None:
        own, other = do[..., self.mine], do[..., self.theirs]
        # Every message waits for the other rank to come to it, so they are few.
        there = self.send(right)
        back = self.send(self.part(other, left), dright)
        self.multiply(own, right, "plain", dleft)
        self.multiply(other, self.theirs_of(there.end(), dleft), "plain", dleft, dleft)
        arrived = back.end().view(dright.shape)
        self.multiply(own, left, "incoming", dright, arrived)

    def differentiable(self, *arrays: Any) -> torch.Tensor:
        a = self.record(arrays)
        left, right = self.sides(a, slice(0, self.H))
        other = self.theirs_of(self.exchanged(right), right)
        in_order = (right, other) if self.mine.start <= self.theirs.start else (other, right)
        # Scaled before, as float16 may not hold the sums.
        return self.end(a, (left * self.scale) @ torch.cat(in_order, 2).mT)


class _ByParts(_OfTwo):
    """An incoming update: each rank has a part of all sums, and sends the part of the other's."""

    def product(self, left: torch.Tensor, right: torch.Tensor, o: torch.Tensor) -> None:
        own, other = left[..., self.mine], left[..., self.theirs]
        trips = [
            (part, self.send(self.part(other[:, part], right[:, part]), o[:, part]))
            for part in self.messages(right)
        ]
        for part, trip in trips:
            to = o[:, part]
            arrived = trip.end().view(to.shape)
            self.multiply(own[:, part], right[:, part], "incoming", to, arrived)

    def product_back(self, left: Any, right: Any, do: Any, dleft: Any, dright: Any) -> None:
        own, other = left[..., self.mine], left[..., self.theirs]
        trip = self.send(do)
        self.multiply(right, do, "outgoing", dleft[..., self.mine])
        self.multiply(own, do, "plain", dright)
        arrived = self.theirs_of(trip.end(), right)
        self.multiply(right, arrived, "outgoing", dleft[..., self.theirs])
        self.multiply(other, arrived, "plain", dright, dright)

    def differentiable(self, *arrays: Any) -> torch.Tensor:
        a = self.record(arrays)
        left, right = self.sides(a, slice(0, self.H))
        # Scaled before, as float16 may not hold the sums.
        left = (left * self.scale).mT
        o = left[..., self.mine, :] @ right
        part = self.exchanged(left[..., self.theirs, :] @ right)
        return self.end(a, o + part.view(o.shape))


class _Shared(torch.autograd.Function):
    """An update of pairs that ranks share, with a gradient that overlaps exchanges and products."""

    @staticmethod
    def forward(ctx: Any, update: _Update, *arrays: Any) -> torch.Tensor:
        a = update.record(arrays)
        o, kept = update.products(a)
        ctx.update, ctx.asked = update, registry.forced(None)
        ctx.save_for_backward(*arrays, o, *kept)
        return update.end(a, o)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        update, wanted, saved = ctx.update, ctx.needs_input_grad[1:], ctx.saved_tensors
        arrays, (o, *kept) = saved[: len(ARRAYS)], saved[len(ARRAYS) :]
        with registry.asking(ctx.asked):
            if not torch.is_grad_enabled():
                return None, *update.gradients(update.record(arrays), o, kept, dout, wanted)
            return None, *by_graph(update.differentiable, arrays, wanted, dout)


def _mask_of(mask: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return a checked mask in the shape and dtype of x, without channels."""
    if mask is None:
        return None
    mask = floats(NAME, "mask", tensor(NAME, "mask", mask), or_integers=True)
    alike(NAME, "mask", mask, "x", x)
    shape = x.shape[:-1]
    fits = mask.ndim <= len(shape) and all(
        n in (1, want) for n, want in zip(mask.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{NAME}: mask has shape {tuple(mask.shape)}; it should broadcast to {tuple(shape)}, "
            "the pairs of this rank"
        )
    return mask.to(x.dtype).expand(shape)


@outside_of_graphs
def triangle_multiplicative_update(
    x: torch.Tensor,
    direction: str = "outgoing",
    mask: torch.Tensor | None = None,
    norm_in_weight: torch.Tensor | None = None,
    norm_in_bias: torch.Tensor | None = None,
    p_in_weight: torch.Tensor | None = None,
    p_in_bias: torch.Tensor | None = None,
    g_in_weight: torch.Tensor | None = None,
    g_in_bias: torch.Tensor | None = None,
    norm_out_weight: torch.Tensor | None = None,
    norm_out_bias: torch.Tensor | None = None,
    p_out_weight: torch.Tensor | None = None,
    p_out_bias: torch.Tensor | None = None,
    g_out_weight: torch.Tensor | None = None,
    g_out_bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    precision: str | None = None,
    gate: str = "output",
    *,
    group: Any,
    sharded: int | tuple[int, int] = 1,
    sizes: Sequence[Any] | None = None,
    chunks: int | None = None,
    keep: bool = False,
    backend: BackendName | None = None,
) -> torch.Tensor:
    r"""Return this rank's shard of the update of a pair representation that ranks share.

    .. math:: \mathrm{out}_{ij} = V_p \, \mathrm{LN}\Bigl(\sum_k l_{ik} \odot r_{jk}\Bigr)
              \odot g_{ij}

    in short; see `fusedops.triangle_multiplicative_update`.

    Parameters
    ----------
    x : tensor (..., n, N, C), (..., N, n, C) or (..., n, m, C)
        This rank's rows, columns or both of the pair representation; it may have none.
    direction, eps, precision, gate
        As in `fusedops.triangle_multiplicative_update`, and the same on every rank. Products are
        torch's, so that for float32 torch's own switch allows TF32.
    mask : tensor that broadcasts to the pairs of this rank, optional
        Given on every rank, or on none.
    norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias : tensor, optional
        As in `fusedops.triangle_multiplicative_update`, whole on every rank.
    norm_out_weight, norm_out_bias, p_out_weight, p_out_bias : tensor, optional
        The same.
    g_out_weight, g_out_bias : tensor, optional
        The same.
    group : ProcessGroup or DeviceMesh
        The ranks that share the pairs, on a mesh of two dimensions if rows and columns are both
        sharded.
    sharded : {1, 2, (1, 2), (2, 1)}
        1 for rows, 2 for columns; two for the dimensions of a mesh, in their order.
    sizes : sequence of int, or two of them, optional
        The number of rows or columns of every rank, or of rows and of columns along the mesh.
        Shards of one axis have by default the sizes of ``torch.chunk``; of two axes, ranks ask each
        other, which waits for all of them and for the GPU.
    chunks : int, optional
        The chunks of channels that follow each other, so that one travels while another is
        computed; by default up to 4, fewer for small messages, or 1 between two ranks that share
        rows or columns. Many chunks take less memory. The same on every rank.
    keep : bool
        Whether to keep this rank's left and right for the backward, which else computes them again;
        more than two ranks then send them again, too.
    backend : str, optional
        The backend that must serve the stages before and after the products.

    Returns
    -------
    tensor of the shape of x
        In the dtype of x.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it. Nothing is sent then.

    Notes
    -----
    With u the bytes of a rank's pairs in H channels, and P ranks, a rank sends 3u(P − 1)/P bytes
    forward; and with the backward 8u(P − 1)/P, or 6u(P − 1)/P with `keep`, which takes 2u bytes. Of
    two ranks with ``sharded=1`` each sends u forward; and with the backward 3u outgoing, and 2u
    incoming; with ``sharded=2`` it is the other way round.
    N, C and H are arbitrary; P should not be larger than H. Derivatives of every order exist. The
    loss is the sum of the losses of all ranks: a weight's gradient is this rank's part, to be added
    by `share`, or by DistributedDataParallel with its division undone. Results are the same in
    every run of as many ranks; other numbers of ranks round differently. In float16 cotangents of
    the sums travel times N, and may overflow. A group of one rank is the single-device op.

    References
    ----------
    The all-to-all of channels follows NVIDIA's fold-cp-ops, and two ranks gather a factor as any
    number does in FastFold (arXiv:2203.00854); compare the ring of Boltz and Fold-CP
    (arXiv:2603.14806).

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from fusedops import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, C, H = torch.randn(1, 5, 5, 4), 4, 3
    >>> names = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")
    >>> shapes = ((2 * H, C), (2 * H, C), (C, H), (C, C))
    >>> weights = {n: torch.randn(shape) for n, shape in zip(names, shapes, strict=True)}
    >>> distributed.triangle_multiplicative_update(x, **weights, group=dist.group.WORLD).shape
    torch.Size([1, 5, 5, 4])
    >>> dist.destroy_process_group()
    """
    x = floats(NAME, "x", tensor(NAME, "x", x))
    weights = (
        *(norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias),
        *(norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias),
    )
    tiles, transposed = tiles_of(x, group, sharded, sizes)
    given = x, direction, mask, *weights, eps, precision, gate
    return updated(tiles, transposed, *given, chunks=chunks, keep=keep, backend=backend)


def updated(
    tiles: Tiles,
    transposed: bool,
    x: torch.Tensor,
    direction: str,
    mask: Any,
    *others: Any,
    chunks: int | None = None,
    keep: bool = False,
    **more: Any,
) -> torch.Tensor:
    """Return this rank's tile of the update; `others` and `more` are the op's."""
    mask = _mask_of(mask, x)
    if tiles.group.size() > 1:
        names = *list(ARRAYS)[2:], "eps", "precision", "gate"
        given = dict(zip(names, others, strict=True)) | {"direction": direction}
        given |= {"chunks": chunks, "keep": keep}
        given["mask"] = None if mask is None else mask.requires_grad
        given["x"] = x.dtype, x.requires_grad, tiles.rows, tiles.columns, x.shape[:-3]
        agree(NAME, tiles.group, x, **given)
    op: Any = _on_one
    # The single-device op checks all but the pairs, on a representation without members.
    like = x.new_empty(0, tiles.N, tiles.N, x.shape[-1])
    a = op.bound(like, direction, None, *others, **more).a
    at_least_one(NAME, chunks=chunks)
    if tiles.group.size() > 1 and len(a.p_out_weight) != x.shape[-1]:
        raise ValueError(
            f"{NAME}: p_out_weight has shape {tuple(a.p_out_weight.shape)}; it should be "
            f"{(x.shape[-1], a.p_out_weight.shape[1])}, as wide as x where ranks share pairs"
        )
    if tiles.group.size() == 1:
        found: torch.Tensor = op(x, direction, mask, *others, **more)
        return found
    pairs = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    mask = None if mask is None else mask.reshape(pairs.shape[:-1])
    if transposed:
        # o of transposed pairs is the transpose of o with left and right exchanged.
        pairs = pairs.transpose(1, 2)
        mask = None if mask is None else mask.transpose(1, 2)
        direction = "incoming" if direction == "outgoing" else "outgoing"
    a = a._replace(x=pairs, mask=mask, direction=direction)
    kind: type[_Update] = _ByChannels
    if tiles.group.size() == 2 and tiles.are_bands():
        kind = _ByRight if direction == "outgoing" else _ByParts
    shared = kind(tiles, a, transposed, keep)
    chunks = shared.worth() if chunks is None else chunks
    shared.cut(chunks)
    with registry.asking(registry.forced(more.get("backend"), NAME)):
        out = _Shared.apply(shared, *a[: len(ARRAYS)])
    out = out.transpose(1, 2) if transposed else out
    return out.reshape(x.shape)
