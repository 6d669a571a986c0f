"""The triangle multiplicative update of a pair representation that no single device holds.

Ranks have some rows, some columns or both of the pairs. Each projects its own pairs, and sends each
rank left and right of some channels; multiplies whole planes of its own channels; and sends the
products back to the pairs' owners. Chunks of channels follow each other, so that one travels while
another is computed: the next one's pairs are under way before the product of a chunk begins.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from fusedops._frame import registry
from fusedops._frame.check import alike, floats, size
from fusedops._frame.packed import outside_of_graphs
from fusedops.distributed.exchanges import (
    Trip,
    agree,
    arrive,
    checked_sizes,
    group_of,
    in_chunks,
    sizes_everywhere,
    start,
    tensor,
)
from fusedops.trimul import ARRAYS
from fusedops.trimul import end as end_of
from fusedops.trimul import sides as sides_of
from fusedops.trimul import triangle_multiplicative_update as _on_one

_NAME = "triangle_multiplicative_update"

#: The bytes of left and right of a chunk that are worth a message of their own.
_MESSAGE = 1 << 23
#: The most chunks, unless more are asked for.
_CHUNKS = 4


class Tiles(NamedTuple):
    """The pairs of all ranks: a rectangle of rows and columns each, of N rows and N columns."""

    group: dist.ProcessGroup
    N: int
    rows: list[slice]
    columns: list[slice]

    def are_bands(self) -> bool:
        """Return whether ranks have whole rows, in their order."""
        whole = all([_length(columns) == self.N for columns in self.columns])
        return whole and self.rows == sorted(self.rows, key=lambda rows: rows.start)

    def areas(self) -> list[int]:
        """Return the number of pairs of every rank."""
        return [_length(r) * _length(c) for r, c in zip(self.rows, self.columns, strict=True)]

    def gathered(self, flat: torch.Tensor, per_pair: int) -> torch.Tensor:
        """Return planes (N, per_pair, N) from the rectangles of all ranks, one after the other."""
        if self.are_bands():
            return flat.view(self.N, per_pair, self.N)
        areas = [area * per_pair for area in self.areas()]
        bands: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for rows, columns, part in zip(self.rows, self.columns, flat.split(areas), strict=True):
            if part.numel() or _length(rows):
                tile = part.view(_length(rows), per_pair, _length(columns))
                bands.setdefault(rows.start, []).append((columns.start, tile))
        return torch.cat(
            [
                torch.cat([tile for _, tile in sorted(band, key=lambda at: at[0])], 2)
                for _, band in sorted(bands.items())
            ]
        )

    def scattered(self, planes: torch.Tensor) -> torch.Tensor:
        """Return the rectangles of all ranks, one after the other: the inverse of `gathered`."""
        if self.are_bands():
            return planes.reshape(-1)
        parts = zip(self.rows, self.columns, strict=True)
        return torch.cat([planes[rows, :, columns].reshape(-1) for rows, columns in parts])


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def slices_of(sizes: Sequence[int]) -> list[slice]:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]


@functools.lru_cache(maxsize=16)
def _group_of_ranks(world: Any, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of some ranks of the world, made once."""
    if len(ranks) == world.size():
        return world
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _sizes(axis: str, given: Any, own: int, N: int, group: dist.ProcessGroup) -> list[int]:
    """Return the checked sizes of shards of an axis, by default `torch.chunk`'s."""
    sizes = in_chunks(N, group.size()) if given is None else given
    found = checked_sizes(_NAME, "sizes", sizes, group)
    if sum(found) != N:
        raise ValueError(f"{_NAME}: sizes have the sum {sum(found)}; it should be {N}, N")
    rank = group.rank()
    if own != found[rank]:
        raise ValueError(
            f"{_NAME}: x has {own} {axis}; rank {rank} should have {found[rank]} of {N}"
        )
    return found


def tiles_of(x: torch.Tensor, group: Any, sharded: Any, sizes: Any) -> tuple[Tiles, bool]:
    """Return which rank has which pairs, and whether columns instead of rows are sharded."""
    if x.ndim < 3:
        raise ValueError(f"{_NAME}: x has shape {tuple(x.shape)}; it should be (..., N, N, C)")
    n, m = x.shape[-3:-1]
    if sharded in (1, 2):
        group = group_of(_NAME, group)
        axis, own, N = ("rows", n, m) if sharded == 1 else ("columns", m, n)
        found = slices_of(_sizes(axis, sizes, own, N, group))
        return Tiles(group, N, found, [slice(0, N)] * len(found)), sharded == 2
    if sharded not in ((1, 2), (2, 1)):
        raise ValueError(f"{_NAME}: sharded is {sharded!r}; it should be 1, 2, (1, 2) or (2, 1)")
    if not isinstance(group, dist.DeviceMesh) or group.ndim != 2:
        raise TypeError(
            f"{_NAME}: group is a {type(group).__name__}; with sharded={sharded} it should be a "
            "DeviceMesh of two dimensions"
        )
    axes = [group.get_group(sharded.index(axis)) for axis in (1, 2)]
    if sizes is None:
        lengths = zip((n, m), axes, strict=True)
        sizes = [sizes_everywhere(own, along, x) for own, along in lengths]
    if not isinstance(sizes, Sequence) or len(sizes) != 2:
        raise TypeError(f"{_NAME}: sizes should be two sequences of ints, for rows and for columns")
    N = sum(checked_sizes(_NAME, "sizes[0]", sizes[0], axes[0]))
    rows = slices_of(_sizes("rows", sizes[0], n, N, axes[0]))
    columns = slices_of(_sizes("columns", sizes[1], m, N, axes[1]))
    return tiles_on(group.mesh if sharded == (1, 2) else group.mesh.T, rows, columns, N), False


def tiles_on(grid: torch.Tensor, rows: list[slice], columns: list[slice], N: int) -> Tiles:
    """Return which rank of a grid has which pairs: rows by its first axis, columns by the other."""
    ranks = sorted(grid.flatten().tolist())
    flat = _group_of_ranks(dist.group.WORLD, tuple(ranks))
    places = [(grid == rank).nonzero()[0].tolist() for rank in ranks]
    return Tiles(flat, N, [rows[i] for i, _ in places], [columns[j] for _, j in places])


# The three products of matrices a and b, and the derivative of each by a and by b as such a product
# of two of a, b and the cotangent. This set is closed.
_FORMS = {
    "outgoing": (lambda a, b: (a, b.mT), ("plain", "do", "b"), ("incoming", "do", "a")),
    "incoming": (lambda a, b: (a.mT, b), ("outgoing", "b", "do"), ("plain", "a", "do")),
    "plain": (lambda a, b: (a, b), ("outgoing", "do", "b"), ("incoming", "a", "do")),
}


def _multiply(a: Any, b: Any, form: str, scale: float, out: Any) -> None:
    """Write products (batch, rows, columns), times a scale."""
    torch.baddbmm(out, *_FORMS[form][0](a, b), beta=0, alpha=scale, out=out)


class _Product(torch.autograd.Function):
    """Products of a batch of matrices, whose rows are the outermost axis in memory."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, form: str, scale: float) -> Any:
        ctx.save_for_backward(a, b)
        ctx.form, ctx.scale = form, scale
        batch, rows, columns = len(a), a.shape[1 + (form == "incoming")], b.shape[2]
        columns = b.shape[1] if form == "outgoing" else columns
        out = a.new_empty(rows, batch, columns).transpose(0, 1)
        _multiply(a, b, form, scale, out)
        return out

    @staticmethod
    def backward(ctx: Any, do: Any) -> Any:
        a, b = ctx.saved_tensors
        given, (_, *ways) = {"a": a, "b": b, "do": do}, _FORMS[ctx.form]
        found = [
            _Product.apply(given[one], given[other], form, ctx.scale) for form, one, other in ways
        ]
        return *found, None, None


class _Triangles(torch.autograd.Function):
    """o (batch, N, N) of planes (N, 2, batch, N): rows, left and right, channels, columns."""

    @staticmethod
    def forward(ctx: Any, planes: Any, direction: str, scale: float) -> Any:
        ctx.save_for_backward(planes)
        ctx.direction, ctx.scale = direction, scale
        N, _, batch, _ = planes.shape
        o = planes.new_empty(N, batch, N).transpose(0, 1)
        _multiply(*_left_and_right(planes), direction, scale, o)
        return o

    @staticmethod
    def backward(ctx: Any, do: Any) -> Any:
        (planes,) = ctx.saved_tensors
        left, right = _left_and_right(planes)
        given, (_, *ways) = {"a": left, "b": right, "do": do}, _FORMS[ctx.direction]
        if torch.is_grad_enabled():
            found = [
                _Product.apply(given[one], given[other], form, ctx.scale)
                for form, one, other in ways
            ]
            return torch.stack([part.transpose(0, 1) for part in found], 1), None, None
        dplanes = torch.empty_like(planes)
        for (form, one, other), out in zip(ways, _left_and_right(dplanes), strict=True):
            _multiply(given[one], given[other], form, ctx.scale, out)
        return dplanes, None, None


def _left_and_right(planes: Any) -> tuple[Any, Any]:
    """Return the two as matrices (batch, N, N)."""
    return planes[:, 0].transpose(0, 1), planes[:, 1].transpose(0, 1)


class _Update:
    """An update's shards, and the chunks of its channels."""

    def __init__(self, tiles: Tiles, a: Any, swap: bool, chunks: int) -> None:
        self.tiles, self.a, self.asked = tiles, a, registry.forced(None)
        self.ranks = tiles.group.size()
        self.B, self.L, self.M, _ = a.x.shape
        self.H = a.p_in_weight.shape[0] // 2
        # Channels of a rank; the last ranks may have fewer, and zeros in the place of others.
        self.each = -(-self.H // self.ranks)
        self.direction = a.direction
        self.scale = 1.0
        if a.x.dtype == torch.float16:
            # A mean over pairs is in float16's range where the factors are; a sum may not be.
            self.scale = 2.0 ** -round(math.log2(max(tiles.N, 1)))
        step = -(-self.each // chunks)
        self.chunks = [range(c, min(c + step, self.each)) for c in range(0, self.each, step)]
        given = a.p_in_weight, a.p_in_bias, a.g_in_weight, a.g_in_bias
        spread = [None if array is None else self.spread(array, swap) for array in given]
        self.weights = [
            [None if w is None else w[:, :, c.start : c.stop].flatten(0, 2) for w in spread]
            for c in self.chunks
        ]
        # Trips of chunks that are recomputed in a backward pass.
        self.again: dict[int, tuple[torch.Tensor, Trip]] = {}

    def spread(self, weight: torch.Tensor, swap: bool) -> torch.Tensor:
        """Return weights by rank, by side, and by the channels of a rank, with zeros at the end."""
        weight = weight.unflatten(0, (2, self.H))
        weight = weight.flip(0) if swap else weight
        none = (0, 0) * (weight.ndim - 2)
        weight = torch.nn.functional.pad(weight, (*none, 0, self.ranks * self.each - self.H))
        return weight.unflatten(1, (self.ranks, self.each)).transpose(0, 1)

    def depart(self, c: int) -> tuple[torch.Tensor, Trip]:
        """Begin to send left and right of a chunk to the ranks of the channels."""
        p_w, p_b, g_w, g_b = self.weights[c]
        a = self.a
        arrays = a.x, a.mask, a.norm_in_weight, a.norm_in_bias, p_w, p_b, g_w, g_b
        (sides,) = sides_of(*arrays, self.ranks, a.precision, a.eps)
        pieces = 2 * len(self.chunks[c]) * self.B
        sent = [self.L * self.M * pieces] * self.ranks
        received = [area * pieces for area in self.tiles.areas()]
        trip = Trip(sent, received, self.tiles.group)
        return start(sides.flatten(), trip), trip

    def planes(self, c: int, token: torch.Tensor, trip: Trip) -> torch.Tensor:
        """Return left and right of this rank's channels, (N, 2, channels · B, N)."""
        batch = len(self.chunks[c]) * self.B
        return self.tiles.gathered(arrive(token, trip), 2 * batch).unflatten(1, (2, batch))

    def planes_again(self, c: int) -> torch.Tensor:
        """Return the planes of a chunk anew, with the chunk that comes next under way."""
        with torch.no_grad(), registry.asking(self.asked):
            for chunk in (c, c - 1):
                if chunk >= 0 and chunk not in self.again:
                    self.again[chunk] = self.depart(chunk)
            return self.planes(c, *self.again.pop(c))

    def triangles(self, c: int, planes: torch.Tensor, keep: bool) -> torch.Tensor:
        """Return o of a chunk, (channels · B, N, N); keep its planes for the backward, or not."""
        if keep or not torch.is_grad_enabled():
            return _Triangles.apply(planes, self.direction, self.scale)
        with saved_tensors_hooks(lambda planes: c, self.planes_again):
            return _Triangles.apply(planes, self.direction, self.scale)

    def give_back(self, c: int, o: torch.Tensor) -> tuple[torch.Tensor, Trip]:
        """Begin to send o of a chunk to the ranks of the pairs."""
        batch = len(self.chunks[c]) * self.B
        sent = [area * batch for area in self.tiles.areas()]
        trip = Trip(sent, [self.L * self.M * batch] * self.ranks, self.tiles.group)
        return start(self.tiles.scattered(o.transpose(0, 1)), trip), trip

    def run(self, keep: bool) -> torch.Tensor:
        """Return this rank's shard of the output."""
        under_way, returning = self.depart(0), []
        for c in range(len(self.chunks)):
            following = self.depart(c + 1) if c + 1 < len(self.chunks) else None
            o = self.triangles(c, self.planes(c, *under_way), keep)
            returning.append(self.give_back(c, o))
            if following is not None:
                under_way = following
        shape = self.ranks, self.L, -1, self.B, self.M
        returned = [
            arrive(*some).view(*shape[:2], len(chunk), *shape[3:])
            for some, chunk in zip(returning, self.chunks, strict=True)
        ]
        by_channel = [part.permute(3, 0, 2, 1, 4) for part in returned]
        o = torch.cat(by_channel, 2).flatten(1, 2)[:, : self.H]
        a = self.a
        norms = a.norm_in_weight, a.norm_in_bias, a.norm_out_weight, a.norm_out_bias
        lasts = a.p_out_weight, a.p_out_bias, a.g_out_weight, a.g_out_bias
        (out,) = end_of(a.x, o, *norms, *lasts, a.gate, a.precision, self.scale, a.eps)
        return out


def _mask_of(mask: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return a checked mask in the shape and dtype of x, without channels."""
    if mask is None:
        return None
    mask = floats(_NAME, "mask", tensor(_NAME, "mask", mask), or_integers=True)
    alike(_NAME, "mask", mask, "x", x)
    shape = x.shape[:-1]
    fits = mask.ndim <= len(shape) and all(
        n in (1, want) for n, want in zip(mask.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{_NAME}: mask has shape {tuple(mask.shape)}; it should broadcast to {tuple(shape)}, "
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
    backend: str | None = None,
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
    norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias : tensor, \
            optional
        The same.
    group : ProcessGroup or DeviceMesh
        The ranks that share the pairs, on a mesh of two dimensions if rows and columns are both
        sharded.
    sharded : {1, 2, (1, 2), (2, 1)}
        1 for rows, 2 for columns; two for the dimensions of a mesh, in their order.
    sizes : sequence of int, or two of them, optional
        The number of rows or columns of every rank, or of rows and of columns along the mesh.
        Shards of one axis have by default the sizes of `torch.chunk`; of two axes, ranks ask each
        other, which waits for all of them and for the GPU.
    chunks : int, optional
        The chunks of channels that follow each other, so that one travels while another is
        computed; by default up to 4, fewer for small messages. The same on every rank.
    keep : bool
        Whether to keep left and right for the backward, which else computes and sends them again.
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
    forward; and with the backward 8u(P − 1)/P, or 6u(P − 1)/P with `keep`, which takes 2u bytes.
    N, C and H are arbitrary; P should not be larger than H. Derivatives of every order exist. The
    loss is the sum of the losses of all ranks: a weight's gradient is this rank's part, to be added
    by `share`, or by DistributedDataParallel with its division undone. Results are the same in
    every run of as many ranks; other numbers of ranks round differently. In float16 cotangents of
    the sums travel times N, and may overflow. A group of one rank is the single-device op.

    References
    ----------
    The all-to-all of channels follows NVIDIA's fold-cp-ops; compare the ring of Boltz and Fold-CP
    (arXiv:2603.14806) and the gathers of FastFold (arXiv:2203.00854).

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
    x = floats(_NAME, "x", tensor(_NAME, "x", x))
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
    op: Any = _on_one
    # The single-device op checks all but the pairs, on a representation without members.
    like = x.new_empty(0, tiles.N, tiles.N, x.shape[-1])
    a = op.bound(like, direction, None, *others, **more).a
    if chunks is not None and size(_NAME, "chunks", chunks) < 1:
        raise ValueError(f"{_NAME}: chunks is 0; it should be at least 1, or None")
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
    each = -(-a.p_in_weight.shape[0] // (2 * tiles.group.size()))
    if chunks is None:
        message = 2 * len(pairs) * tiles.N**2 * each * x.itemsize // tiles.group.size()
        chunks = min(max(message // _MESSAGE, 1), _CHUNKS)
    given = dict(zip(ARRAYS, a, strict=False)) | {"chunks": chunks, "keep": keep}
    given["x"] = x.dtype, x.requires_grad, len(pairs), tiles.rows, tiles.columns
    given["mask"] = None if mask is None else (mask.dtype, mask.requires_grad)
    for option in ("direction", "gate", "precision", "eps"):
        given[option] = getattr(a, option)
    agree(_NAME, tiles.group, x, **given)
    with registry.asking(registry.forced(more.get("backend"), _NAME)):
        out = _Update(tiles, a, transposed, min(chunks, each)).run(keep)
    out = out.transpose(1, 2) if transposed else out
    return out.reshape(x.shape)
