"""Triangle multiplicative updates on the CPU: products by BLAS, the steps between by kernels.

Blocks of positions go from x, through one product with projections and gates stacked, to planes
(channels first), the factors of the products over triangles; and from planes of o to the output.
Intermediate results of a block stay in the cache. Threads share blocks and channels, and sums over
positions have a partial sum for each of a fixed number of groups of blocks, so the thread count
changes no bit. If memory isn't limited, the backward keeps projections and logits of all channels,
whose cotangents take their place; or else it computes them twice. A small update is a single block
and takes the same steps without loops.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cpukern.layout import laid_out
from cpukern.products import BITS, ByNumpy, assign, has_bfloat16, of_tensors, widened
from fusedops._host import memory
from fusedops._host.threads import blas_on_one_thread, in_parallel
from fusedops.trimul.op import in_parts, slices, warn_of_parts

#: The kernels that a backend must provide.
KERNELS = (
    "normalize_rows",
    "normalize_planes",
    "gate_planes",
    "gate_rows",
    "normalize_rows_back",
    "normalize_planes_back",
    "gate_planes_back",
    "gate_rows_back",
)

# Positions of a block, and the fewest if memory is short: products want many, the cache few.
_BLOCK, _FEW = 1536, 64
# Numbers of a side's planes whose cotangents are computed at once, unless memory is short.
_PLANES = 1 << 17
# Lines and columns of a tile of o, terms of a strip of its products, and the least of both. Small
# tiles are slow, since each row and column of tiles computes left and right again.
_TILE, _STRIP, _SMALLEST = 64, 16, 16
# Channels of a part of the backward, which repeats the steps after the products for each part.
_CHANNELS = 4
# The most groups of blocks, and of channels; a group has one partial sum.
_GROUPS = 16
# Multiplications that are worth waking a thread for.
_GRAIN = 1 << 20
# Multiplications below which BLAS wakes no thread by itself.
_FEWEST = 1 << 13


class _Room(dict):
    """Scratch arrays by name; a new array of a name reuses the memory of the last one."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = self.get(name)
        if array is None or array.size < (size := math.prod(shape)):
            array = self[name] = memory.empty(shape, dtype)
        elif array.shape != shape:
            array = array.reshape(-1)[:size].reshape(shape)
        return array


@functools.lru_cache(maxsize=64)
def _constant(n: int, value: float, dtype: np.dtype) -> np.ndarray:
    """Return an array for an omitted argument, which kernels must only read.

    It isn't marked read-only, since Numba would compile each kernel again for such arrays.
    """
    return np.full(n, value, dtype)


@functools.lru_cache(maxsize=64)
def _no_mask(batch: int, positions: int, dtype: np.dtype) -> np.ndarray:
    """Return a mask of ones, which has a single number in memory."""
    return np.ndarray((batch, positions), dtype, _constant(1, 1, dtype), strides=(0, 0))


def _given(array: Any, n: int, value: float, dtype: np.dtype) -> np.ndarray:
    return _constant(n, value, dtype) if array is None else np.ascontiguousarray(widened(array))


class _Shape(NamedTuple):
    """The sizes of an update, the bytes of a number, and the limit of memory in bytes (0: none)."""

    B: int
    N: int
    C: int
    D: int
    H: int
    gates: int
    itemsize: int
    limit: int


class _Parts(NamedTuple):
    """The division of an update into parts, which follows from its shape."""

    slices: tuple[list[slice], ...]
    # Positions of a block, and the threads that memory allows, or None for any number.
    block: int
    threads: int | None
    # Groups of blocks, and of channels; a group has one partial sum.
    groups: int
    # A limit that allows parts of a sensible size, if this one doesn't.
    enough: int | None


def _divide(
    shape: _Shape,
    row: int,
    sizes: tuple[int, ...],
    need: Callable[..., int],
    *stages: tuple[int, ...],
    sums: int = 0,
) -> _Parts:
    """Return a division of `sizes` whose parts keep within the limit of memory.

    A position of a block takes `row` numbers, a part and a number of threads `need` numbers, and a
    group `sums`. The last stage has the smallest parts, the last but one parts of a sensible size.
    """
    size, limit = shape.itemsize, shape.limit
    block, threads, groups, enough = _BLOCK, None, _GROUPS, None
    parts = list(sizes)
    if limit:
        stages = tuple(tuple(map(min, stage, sizes)) for stage in stages)
        groups = min(max(limit // (64 * max(sums, 1)), 1), _GROUPS)

        def blocks(limit: int) -> tuple[int, int, int]:
            """Return a block's positions, the threads, and the bytes left for parts."""
            # A quarter is for blocks, one for each thread if small blocks allow several threads.
            room = limit // (4 * row * size)
            block = min(max(room // 4, _FEW), _BLOCK)
            threads = max(room // block, 1)
            return block, threads, limit - size * (shape.B * shape.N**2 + row * block * threads)

        def fits(limit: int) -> bool:
            _, threads, room = blocks(limit)
            return room >= size * need(*stages[-2], threads)

        block, threads, room = blocks(limit)
        if not fits(limit):
            enough = 1
            while not fits(enough):
                enough += -(-enough // 16)
        parts = in_parts(sizes, lambda *some: size * need(*some, threads), max(room, 1), *stages)
    divided = tuple(slices(n, step) for n, step in zip(sizes, parts, strict=True))
    return _Parts(divided, block, threads, groups, enough)


@functools.lru_cache(maxsize=256)
def _forward_parts(shape: _Shape, own: bool) -> _Parts:
    """Return parts of the batch, of o's lines and columns, and of its terms; o is `own` or kept."""
    _, N, C, D, H, gates, *_ = shape

    def need(b: int, i: int, j: int, k: int, threads: int) -> int:
        spare = i * j * min(threads, H) if k < N else 0
        return b * H * (own * i * j + (i + j) * k) + spare

    return _divide(
        shape,
        2 * C + max(4 * H, 2 * D + H + gates),
        (shape.B, N, N, N),
        need,
        (1, N, N, _TILE),
        (1, _TILE, _TILE, _TILE) if own else (1, N, N, _STRIP),
        (1, _TILE, _TILE, _STRIP),
        (1, _SMALLEST, _SMALLEST, _SMALLEST),
    )


@functools.lru_cache(maxsize=256)
def _backward_parts(shape: _Shape, own: bool, own_dx: bool) -> _Parts:
    """Return parts of the batch and of the channels; o and dx are our own or given."""
    B, N, C, D, H, gates, *_ = shape

    def need(b: int, c: int, threads: int) -> int:
        at_once = -(-c // 2)
        return N**2 * (b * (c + 2 * at_once + C * own_dx + H * own) + min(at_once, threads))

    ends = 2 * C + 3 * H + gates + max(2 * D, H)
    row = max(ends, 3 * C + 4 * H) + 2
    sums = sum(map(math.prod, _sums_shapes(C, D, H, gates)))
    return _divide(shape, row, (B, H), need, (1, _CHANNELS), (1, 1), sums=sums)


class _Update:
    """An update's arguments, in the layout of kernels."""

    def __init__(self, kernels: Any, products: type[ByNumpy], a: Any) -> None:
        self.kernels, self.by, self.dot = kernels, products, products.dot
        self.direction, self.gate, self.eps = a.direction, a.gate, a.eps
        self.dtype = a.x.dtype
        # The dtype of masks, biases and norms.
        self.real = dtype = np.dtype(np.float32) if self.dtype == BITS else self.dtype
        self.B, self.N, _, self.C = B, N, _, C = a.x.shape
        self.H = H = len(a.p_in_weight) // 2
        self.limit = a.max_memory
        self.x = np.ascontiguousarray(a.x).reshape(B, N * N, C)
        if a.mask is None:
            self.mask = _no_mask(B, N * N, dtype)
        else:
            self.mask = np.ascontiguousarray(widened(a.mask)).reshape(B, N * N)
        # Projections before gates, left before right.
        self.w_in = np.concatenate((a.p_in_weight, a.g_in_weight)).reshape(2, 2, H, C)
        biases = (_given(b, 2 * H, 0, dtype) for b in (a.p_in_bias, a.g_in_bias))
        self.b_in = np.concatenate(tuple(biases)).reshape(2, 2, H)
        self.norm_in_weight = _given(a.norm_in_weight, C, 1, dtype)
        self.norm_in_bias = _given(a.norm_in_bias, C, 0, dtype)
        self.norm_out_weight = _given(a.norm_out_weight, H, 1, dtype)
        self.norm_out_bias = _given(a.norm_out_bias, H, 0, dtype)
        self.p_out_weight = np.ascontiguousarray(a.p_out_weight)
        self.D = D = len(a.p_out_weight)
        self.p_out_bias = _given(a.p_out_bias, D, 0, dtype)
        self.g_out_weight = np.ascontiguousarray(a.g_out_weight)
        self.g_out_bias = _given(a.g_out_bias, len(a.g_out_weight), 0, dtype)
        self.room = _Room()

    def is_small(self) -> bool:
        """Whether the update is one block with too little work for a second thread."""
        n = self.B * self.N**2
        return not self.limit and n <= _BLOCK and n * self.N * self.H <= _GRAIN

    def one_thread_for_blas(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which BLAS starts no threads; of tiny products it starts none."""
        widest = max(4 * self.H, self.C, self.D)
        if not self.limit and self.B * self.N**2 * widest**2 <= _FEWEST:
            return contextlib.nullcontext()
        return blas_on_one_thread()

    def normalized(self, room: _Room, x: np.ndarray) -> np.ndarray:
        out = room("normalized", x.shape, self.dtype)
        self.kernels.normalize_rows(x, self.norm_in_weight, self.norm_in_bias, self.eps, out)
        return out

    def scratch(self, room: _Room, name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return a product that lasts for a block."""
        if self.by.allocates:
            return self.dot(a, b)
        return self.dot(a, b, room(name, (len(a), b.shape[1]), self.dtype))

    def weights(self, sides: slice, h: slice) -> np.ndarray:
        """Return weights of projections and gates of some channels."""
        return self.w_in[:, sides, h].reshape(-1, self.C)

    def projected(
        self, room: _Room, xn: np.ndarray, w: np.ndarray, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return projections and logits of a block, in planes."""
        return self.scratch(room, "logits", w, xn.T) if out is None else self.dot(w, xn.T, out)

    def of_sides(self, logits: np.ndarray, sides: slice, h: slice) -> tuple[np.ndarray, ...]:
        """Return the arguments of a gate kernel for projections and logits of some channels."""
        return logits[0], self.b_in[0, sides, h], logits[1], self.b_in[1, sides, h]

    def ended(self, room: _Room, xn: np.ndarray, o: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a block's normalized o, and its last gate."""
        on = room("on", (self.H, len(xn)), self.dtype)
        self.kernels.normalize_planes(o, self.norm_out_weight, self.norm_out_bias, self.eps, on)
        if self.gate == "output":
            return on, self.scratch(room, "gates", xn, self.g_out_weight.T)
        return on, self.scratch(room, "gates", self.g_out_weight, xn.T)

    def ones(self, on: np.ndarray) -> np.ndarray:
        """Return ones, one for every position of a block."""
        return _constant(_BLOCK, 1, self.real)[: on.shape[1]]

    def gated(self, on: np.ndarray, gates: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the arguments of a gate kernel, with the normalized o as values."""
        no_bias = _constant(self.H, 0, self.real)
        some = on, no_bias, gates, self.g_out_bias
        return *(array[None] for array in some), self.ones(on)

    def end_block(self, room: _Room, xn: np.ndarray, o: np.ndarray, rows: np.ndarray) -> None:
        """Fill rows of the output from planes of o."""
        on, gates = self.ended(room, xn, o)
        if self.gate == "hidden":
            self.kernels.gate_planes(*self.gated(on, gates), on[None, None])
        self.dot(on.T, self.p_out_weight.T, rows)
        if self.gate == "hidden":
            assign(rows, widened(rows) + self.p_out_bias)
        else:
            self.kernels.gate_rows(rows, self.p_out_bias, gates, self.g_out_bias)

    def divide(self, find: Callable[..., _Parts], *own: bool) -> tuple[list[slice], ...]:
        """Return the slices of every divided axis; warn if the limit makes them small."""
        gates, itemsize = len(self.g_out_weight), self.dtype.itemsize
        shape = _Shape(self.B, self.N, self.C, self.D, self.H, gates, itemsize, self.limit)
        self.parts = find(shape, *own)
        if self.parts.enough:
            warn_of_parts(self.limit, self.parts.enough)
        return self.parts.slices

    def halves(self, b: slice, h: slice) -> list[slice]:
        """Return channels to compute at once: all, or two halves if they take many bytes.

        The second half normalizes x again. All of 16 bits take as much as half of 32.
        """
        n = h.stop - h.start
        planes = 2 * n * (b.stop - b.start) * self.N**2 * self.dtype.itemsize
        if (planes <= memory.SMALL and not self.limit) or self.dtype == BITS:
            return [h]
        return [slice(h.start + k.start, h.start + k.stop) for k in slices(n, -(-n // 2))]

    def blocks(self, batch: int, size: int) -> list[tuple[slice, slice]]:
        """Return every block's members of the batch, and positions in their planes."""
        together = max(1, self.parts.block // max(size, 1))
        step = size
        if together == 1:
            # An even number of blocks of about the same size, for two threads.
            count = 2 * -(-size // (2 * self.parts.block))
            step = min(self.parts.block, _FEW * -(-size // (_FEW * count)))
        return [(b, p) for b in slices(batch, together) for p in slices(size, step)]

    def share(self, work: Callable[[int, int], None], items: int, grain: int) -> None:
        """Call ``work(low, high)`` on shares of items, on several threads if there are many."""

        def quietly(low: int, high: int) -> None:
            # Each thread has its own NumPy error state.
            with np.errstate(all="ignore"), self.by.alone():
                work(low, high)

        in_parallel(quietly, items, grain)

    def over_blocks(
        self, batch: int, size: int, groups: int | None, work: Callable[..., None]
    ) -> None:
        """Call ``work(room, group, members, positions)`` on all blocks, in order within a group."""
        blocks = self.blocks(batch, size)
        count = len(blocks)
        groups = count if groups is None else min(groups, count)

        def share(low: int, high: int) -> None:
            room = _Room()
            for g in range(low, high):
                for block in blocks[count * g // groups : count * (g + 1) // groups]:
                    work(room, g, *block)

        self.share(share, groups, self.grain(groups))

    def over_channels(self, channels: int, work: Callable[[int, int], None]) -> None:
        self.share(work, channels, max(self.grain(channels), _GRAIN // (1 + self.N**3)))

    def grain(self, items: int) -> int:
        """Return the least number of items for a thread, such that memory is enough for all."""
        threads = self.parts.threads
        return 1 if threads is None else max(1, -(-items // threads))

    def positions(self, rows: slice, columns: slice, p: slice) -> Any:
        """Return the positions in a plane of positions p in a part of the plane."""
        width = columns.stop - columns.start
        if width == self.N:
            return slice(rows.start * width + p.start, rows.start * width + p.stop)
        at = np.arange(p.start, p.stop)
        return (rows.start + at // width) * self.N + columns.start + at % width

    def project(
        self, b: slice, sides: slice, h: slice, i: slice, k: slice, out: np.ndarray
    ) -> None:
        """Fill planes (B, sides, channels, positions) for lines i and elements k of each line.

        Lines are rows if the update is outgoing, and columns if it is incoming.
        """
        x, mask, w = self.x[b], self.mask[b], self.weights(sides, h)
        part = (i, k) if self.direction == "outgoing" else (k, i)

        def work(room: _Room, _: int, m: slice, p: slice) -> None:
            at = self.positions(*part, p)
            xn = self.normalized(room, x[m, at].reshape(-1, self.C))
            logits = self.projected(room, xn, w).reshape(2, *out.shape[1:3], len(xn))
            given = self.of_sides(logits, sides, h)
            self.kernels.gate_planes(*given, mask[m, at].ravel(), out[m, ..., p])

        self.over_blocks(len(x), out.shape[-1], None, work)

    def sides(self, b: slice, h: slice, i: slice, k: slice) -> np.ndarray:
        """Return left and right of some channels, (B, 2, channels, positions)."""
        positions = (i.stop - i.start) * (k.stop - k.start)
        shape = b.stop - b.start, 2, h.stop - h.start, positions
        out = self.room("planes", shape, self.dtype)
        self.project(b, slice(2), h, i, k, out)
        return out

    def matrices(self, planes: np.ndarray, i: slice, k: slice) -> np.ndarray:
        """Return planes of left or right as matrices; o is left times the transpose of right."""
        lines, terms = i.stop - i.start, k.stop - k.start
        if self.direction == "outgoing":
            return planes.reshape(*planes.shape[:-1], lines, terms)
        return planes.reshape(*planes.shape[:-1], terms, lines).swapaxes(-1, -2)

    def products(self, b: slice, h: slice, i: slice, j: slice, k: slice, o: np.ndarray) -> None:
        """Write or add a strip of products to a tile of o (B, channels, lines, columns).

        The first strip is written, all others are added.
        """
        if i == j:
            sides = self.sides(b, h, i, k)
            left, right = sides[:, 0], sides[:, 1]
        else:
            shape = len(o), 1, o.shape[1]
            sizes = [(lines.stop - lines.start) * (k.stop - k.start) for lines in (i, j)]
            both = self.room("planes", (math.prod(shape) * sum(sizes),), self.dtype)
            left, right = (
                part.reshape(*shape, -1) for part in np.split(both, [math.prod(shape) * sizes[0]])
            )
            self.project(b, slice(1), h, i, k, left)
            self.project(b, slice(1, 2), h, j, k, right)
            left, right = left[:, 0], right[:, 0]
        left, right = self.matrices(left, i, k), self.matrices(right, j, k).swapaxes(-1, -2)

        def work(low: int, high: int) -> None:
            some = slice(low, high)
            if k.start == 0:
                self.by.matmul(left[:, some], right[:, some], o[:, some])
                return
            spare = memory.empty(o.shape[2:], self.dtype)
            for at in np.ndindex(len(o), high - low):
                at = at[0], low + at[1]
                o[at] += np.matmul(left[at], right[at], out=spare)

        self.over_channels(o.shape[1], work)

    def end(self, b: slice, i: slice, j: slice, o: np.ndarray, out: np.ndarray) -> None:
        """Fill a tile of the output from the same tile of o (B, H, positions)."""
        x, out = self.x[b], out.reshape(self.B, -1, self.D)[b]

        def work(room: _Room, _: int, m: slice, p: slice) -> None:
            at = self.positions(i, j, p)
            xn = self.normalized(room, x[m, at].reshape(-1, self.C))
            rows = out[m, at].reshape(-1, self.D)
            self.end_block(room, xn, o[m, :, p], rows)
            if j.stop - j.start < self.N:
                # Indexing by numbers had copied the rows.
                out[m, at] = rows.reshape(len(o[m]), -1, self.D)

        self.over_blocks(len(x), o.shape[2], None, work)

    def fill_in_parts(self, out: Any) -> None:
        """Compute o in tiles, unless it is an output, and its factors in strips."""
        H, own = self.H, out.hidden is None
        batches, rows, columns, strips = self.divide(_forward_parts, own)
        for b, i, j in itertools.product(batches, rows, columns):
            members = b.stop - b.start
            shape = members, H, i.stop - i.start, j.stop - j.start
            o = self.room("o", shape, self.dtype) if own else out.hidden[b, :, i, j]
            channels = [slice(0, H)] if self.limit else self.halves(b, slice(0, H))
            for h, k in itertools.product(channels, strips):
                self.products(b, h, i, j, k, o[:, h])
            if out.out is not None:
                # A reshaped tile of one column would keep the gaps between its rows.
                self.end(b, i, j, laid_out(o, 2).reshape(members, H, -1), out.out)

    def small_logits(self, xn: np.ndarray) -> np.ndarray:
        """Return projections and logits of a small update, (2, 2, H, positions)."""
        w = self.weights(slice(2), slice(0, self.H))
        return self.projected(self.room, xn, w).reshape(2, 2, self.H, len(xn))

    def fill_sides(self, logits: np.ndarray, mask: np.ndarray, h: slice, sides: np.ndarray) -> None:
        """Fill left and right of some channels, (B, 2, channels, positions), from their logits."""
        self.kernels.gate_planes(*self.of_sides(logits, slice(2), h), mask.ravel(), sides)

    def fill_small(self, logits: np.ndarray, mask: np.ndarray, o: np.ndarray) -> None:
        """Fill o (B, H, N, N) of a small update."""
        B, H, N = self.B, self.H, self.N
        sides = self.room("sides", (B, 2, H, N**2), self.dtype)
        self.fill_sides(logits, mask, slice(0, H), sides)
        left, right = sides.reshape(B, 2, H, N, N).swapaxes(0, 1)
        if self.direction == "outgoing":
            self.by.matmul(left, right.swapaxes(-1, -2), o)
        else:
            self.by.matmul(left.swapaxes(-1, -2), right, o)

    def fill_in_one_block(self, out: Any) -> None:
        """Fill the outputs of a small update, without loops."""
        room, B, H, N = self.room, self.B, self.H, self.N
        xn = self.normalized(room, self.x.reshape(-1, self.C))
        o = room("o", (B, H, N, N), self.dtype) if out.hidden is None else out.hidden
        self.fill_small(self.small_logits(xn), np.ascontiguousarray(self.mask), o)
        if out.out is not None:
            rows = out.out.reshape(-1, self.D)
            self.end_block(room, xn, o.reshape(B, H, N * N), rows)


class _Sums(NamedTuple):
    """Sums over positions in float64, one partial sum for each group of blocks."""

    norm_in: Any
    w_in: Any
    b_in: Any
    norm_out: Any
    p_out: Any
    p_out_bias: Any
    g_out: Any
    gate: Any


@functools.lru_cache(maxsize=64)
def _sums_shapes(C: int, D: int, H: int, gates: int) -> _Sums:
    return _Sums(
        norm_in=(2, C),
        w_in=(2, 2, H, C),
        b_in=(2, 2, H),
        norm_out=(2, H),
        p_out=(D, H),
        p_out_bias=(D,),
        g_out=(gates, C),
        gate=(2, gates),
    )


def _add(total: np.ndarray, values: np.ndarray) -> None:
    total += values


class _Gradients(_Update):
    """The cotangents of an update's arrays."""

    def __init__(self, kernels: Any, products: type[ByNumpy], a: Any, out: Any) -> None:
        super().__init__(kernels, products, a)
        self.a, self.out = a, out
        self.dout = np.ascontiguousarray(a.dout).reshape(self.B, self.N**2, self.D)
        self.dmask: Any = None
        if out.dmask is not None:
            own = out.dmask if out.dmask.dtype == self.real else np.empty_like(out.dmask, self.real)
            own[...] = 0
            self.dmask = own.reshape(self.x.shape[:2])
        # Whether a wanted cotangent belongs to an array used before the products.
        self.inner = any(
            slot is not None
            for slot in (
                out.dx,
                out.dmask,
                out.dnorm_in_weight,
                out.dnorm_in_bias,
                out.dp_in_weight,
                out.dp_in_bias,
                out.dg_in_weight,
                out.dg_in_bias,
            )
        )

    def make_sums(self, groups: int) -> None:
        shapes = _sums_shapes(self.C, self.D, self.H, len(self.g_out_weight))
        self.sums = _Sums(*[np.zeros((groups, *shape)) for shape in shapes])
        self.groups = groups

    def end_back_block(
        self,
        room: _Room,
        g: int,
        xn: np.ndarray,
        o: np.ndarray,
        dout: np.ndarray,
        dx: np.ndarray,
        channel: int,
        do: np.ndarray,
    ) -> None:
        """Fill the cotangent of o's channels; with the first channels, all other cotangents too."""
        output, first = self.gate == "output", channel == 0
        gated: tuple[np.ndarray, ...]
        gate, norm = self.sums.gate[g], self.sums.norm_out[g]
        if not first:
            gate, norm = np.zeros_like(gate), np.zeros_like(norm)
        on, gates = self.ended(room, xn, o)
        if output:
            end = on.T
            dp = self.scratch(room, "values", end, self.p_out_weight.T)
            gated = dp, self.p_out_bias, gates, self.g_out_bias
            self.kernels.gate_rows_back(dout, *gated, gate)
            dgates = gates
            don = self.scratch(room, "don", self.p_out_weight.T, dp.T)
        else:
            dp, end = dout, room("values", on.shape, self.dtype)
            gated = self.gated(on, gates)
            self.kernels.gate_planes(*gated, end[None, None])
            don = self.scratch(room, "don", self.p_out_weight.T, dp.T)
            self.kernels.gate_planes_back(don[None, None], *gated, np.empty(0), gate[:, None])
            don, dgates, end = on, gates.T, end.T
        if first:
            _add(self.sums.p_out[g], self.dot(dp.T, end))
            _add(self.sums.g_out[g], self.dot(dgates.T, xn))
            if not output:
                _add(self.sums.p_out_bias[g], self.ones(on).dot(widened(dp)))
            self.dot(dgates, self.g_out_weight, dx)
        self.kernels.normalize_planes_back(
            o, self.norm_out_weight, self.eps, don, channel, do, norm
        )

    def products_back_block(
        self, left: np.ndarray, right: np.ndarray, do: np.ndarray, dleft: np.ndarray
    ) -> None:
        """Fill the cotangent of left, and overwrite right with its cotangent."""
        if self.direction == "outgoing":
            self.by.matmul(do, right, dleft)
            self.by.matmul(do.swapaxes(-1, -2), left, right)
        else:
            self.by.matmul(right, do.swapaxes(-1, -2), dleft)
            self.by.matmul(left, do, right)

    def channels_back(
        self,
        room: _Room,
        logits: np.ndarray,
        mask: np.ndarray,
        h: slice,
        do: np.ndarray,
        dmask: np.ndarray,
    ) -> None:
        """Overwrite projections and logits of some channels with their cotangents."""
        planes = room("sides", (len(mask), 3, logits.shape[2], self.N**2), self.dtype)
        self.fill_sides(logits, mask, h, planes[:, 1:])
        matrices = planes.reshape(*planes.shape[:3], self.N, self.N)
        dleft, left, right = matrices.swapaxes(0, 1)
        self.products_back_block(left, right, do.reshape(left.shape), dleft)
        # The cotangent of right is where right was.
        given = self.of_sides(logits, slice(2), h)
        sums = self.sums.b_in[0, :, :, h]
        self.kernels.gate_planes_back(planes[:, ::2], *given, mask.ravel(), dmask, sums)

    def sides_back_block(
        self,
        room: _Room,
        g: int,
        rows: np.ndarray,
        xn: np.ndarray,
        h: slice,
        dlogits: np.ndarray,
        dx: np.ndarray,
    ) -> None:
        """Pull the cotangents of projections and logits back; with the last channels, to x."""
        dlogits = self.by.close(dlogits)
        _add(self.sums.w_in[g, :, :, h], self.dot(dlogits, xn).reshape(2, 2, -1, self.C))
        dxn = self.scratch(room, "dxn", dlogits.T, self.weights(slice(2), h))
        if h.stop < self.H:
            _add(dx, dxn)
        else:
            norm = self.sums.norm_in[g]
            self.kernels.normalize_rows_back(rows, self.norm_in_weight, self.eps, dxn, dx, norm)

    def end_back(self, b: slice, h: slice, o: np.ndarray, dx: np.ndarray) -> np.ndarray:
        """Return the cotangent of some channels of o."""
        x, dout = self.x[b], self.dout[b]
        do = self.room("do", (len(x), h.stop - h.start, self.N**2), self.dtype)

        def work(room: _Room, g: int, m: slice, p: slice) -> None:
            rows, drows, by = (a[m, p].reshape(-1, a.shape[2]) for a in (x, dx, dout))
            xn = self.normalized(room, rows)
            self.end_back_block(room, g, xn, o[m, :, p], by, drows, h.start, do[m, :, p])

        self.over_blocks(len(x), self.N**2, self.groups, work)
        return do

    def logits(self, b: slice) -> np.ndarray:
        """Return projections and logits, (2, 2, H, positions)."""
        x, w = self.x[b], self.weights(slice(2), slice(0, self.H))
        out = self.room("planes", (len(w), len(x) * self.N**2), self.dtype)

        def work(room: _Room, _: int, m: slice, p: slice) -> None:
            xn = self.normalized(room, x[m, p].reshape(-1, self.C))
            self.projected(room, xn, w, out[:, self.flat(m, p)])

        self.over_blocks(len(x), self.N**2, None, work)
        return out.reshape(2, 2, self.H, out.shape[1])

    def flat(self, m: slice, p: slice) -> slice:
        """Return a block's positions among all of the batch."""
        return slice(m.start * self.N**2 + p.start, (m.stop - 1) * self.N**2 + p.stop)

    def logits_back(self, b: slice, logits: np.ndarray, do: np.ndarray) -> None:
        """Overwrite projections and logits with their cotangents."""
        mask, size, H = np.ascontiguousarray(self.mask[b]), self.N**2, self.H
        # Channels share the mask: its cotangent has a partial sum for each group of them.
        groups, step = min(H, _GROUPS), max(1, _PLANES // max(size, 1))
        dmask = np.zeros((groups, len(mask), 0 if self.dmask is None else size))

        def work(low: int, high: int) -> None:
            room = _Room()
            for g, m in itertools.product(range(low, high), range(len(mask))):
                at, end = slice(m * size, (m + 1) * size), H * (g + 1) // groups
                for start in range(H * g // groups, end, step):
                    h = slice(start, min(start + step, end))
                    of_m = mask[m : m + 1], h, do[m : m + 1, h], dmask[g, m]
                    self.channels_back(room, logits[:, :, h, at], *of_m)

        of_group = 1 + self.N**3 * len(mask) * H // groups
        self.share(work, groups, max(1, _GRAIN // of_group))
        if self.dmask is not None:
            self.dmask[b] += dmask.sum(0)

    def products_back(self, sides: np.ndarray, do: np.ndarray) -> None:
        """Overwrite left and right (B, 2, channels, positions) with their cotangents."""
        left, right = sides.reshape(*sides.shape[:3], self.N, self.N).swapaxes(0, 1)
        do = do.reshape(left.shape)

        def work(low: int, high: int) -> None:
            spare = memory.empty((1, 1, self.N, self.N), self.dtype)
            for b, c in itertools.product(range(len(left)), range(low, high)):
                one = (slice(b, b + 1), slice(c, c + 1))
                self.products_back_block(left[one], right[one], do[one], spare)
                left[b, c] = spare[0, 0]

        self.over_channels(left.shape[1], work)

    def sides_back(
        self, b: slice, h: slice, dx: np.ndarray, planes: np.ndarray, *, kept: bool
    ) -> None:
        """Pull cotangents of some channels back: of kept logits, or of left and right."""
        x, mask, w = self.x[b], self.mask[b], self.weights(slice(2), h)
        dmask = None if self.dmask is None else self.dmask[b]
        shape = 2, 2, h.stop - h.start

        def work(room: _Room, g: int, m: slice, p: slice) -> None:
            rows, drows = (a[m, p].reshape(-1, self.C) for a in (x, dx))
            xn = self.normalized(room, rows)
            if kept:
                dlogits = planes.reshape(len(w), planes.shape[3])[:, self.flat(m, p)]
            else:
                dlogits = self.projected(room, xn, w)
                given = self.of_sides(dlogits.reshape(*shape, len(xn)), slice(2), h)
                found = np.zeros(0 if dmask is None else len(xn))
                last = mask[m, p].ravel(), found, self.sums.b_in[g, :, :, h]
                self.kernels.gate_planes_back(planes[m, ..., p], *given, *last)
                if dmask is not None:
                    dmask[m, p] += found.reshape(dmask[m, p].shape)
            self.sides_back_block(room, g, rows, xn, h, dlogits, drows)

        self.over_blocks(len(x), self.N**2, self.groups, work)

    def finish(self) -> None:
        """Fill the cotangents that are sums over positions."""
        out, shape = self.out, (2 * self.H, self.C)
        total = _Sums(*[s[0] if self.groups == 1 else s.sum(0) for s in self.sums])
        # If the output is gated, this bias is the bias of the gate's values.
        p_out_bias = total.gate[0] if self.gate == "output" else total.p_out_bias
        for slot, value in (
            (out.dnorm_in_weight, total.norm_in[0]),
            (out.dnorm_in_bias, total.norm_in[1]),
            (out.dp_in_weight, total.w_in[0].reshape(shape)),
            (out.dp_in_bias, total.b_in[0].reshape(-1)),
            (out.dg_in_weight, total.w_in[1].reshape(shape)),
            (out.dg_in_bias, total.b_in[1].reshape(-1)),
            (out.dnorm_out_weight, total.norm_out[0]),
            (out.dnorm_out_bias, total.norm_out[1]),
            (out.dp_out_weight, total.p_out),
            (out.dp_out_bias, p_out_bias),
            (out.dg_out_weight, total.g_out),
            (out.dg_out_bias, total.gate[1]),
        ):
            if slot is not None:
                assign(slot, value)
        if out.dmask is not None and out.dmask.dtype == BITS:
            assign(out.dmask, self.dmask.reshape(out.dmask.shape))

    def pull_in_parts(self) -> None:
        """Pull the cotangent back, for some members of the batch and some channels at a time."""
        out, hidden, N, H, full = self.out, self.a.hidden, self.N, self.H, slice(0, self.N)
        batches, channels = self.divide(_backward_parts, hidden is None, out.dx is None)
        blocks = len(self.blocks(batches[0].stop, N**2)) if batches else 0
        self.make_sums(max(min(self.parts.groups, blocks), 1))
        if hidden is not None:
            hidden = np.ascontiguousarray(hidden).reshape(self.B, H, N**2)
        for b in batches:
            members = b.stop - b.start
            if hidden is None:
                o = self.room("o", (members, H, N**2), self.dtype)
                square = o.reshape(members, H, N, N)
                for h in itertools.chain.from_iterable(self.halves(b, h) for h in channels):
                    self.products(b, h, full, full, full, square[:, h])
            else:
                o = hidden[b]
            if out.dx is None:
                dx = self.room("dx", (members, N**2, self.C), self.dtype)
            else:
                dx = out.dx.reshape(self.x.shape)[b]
            for h in channels:
                do = self.end_back(b, h, o, dx)
                if self.inner and not self.limit:
                    logits = self.logits(b)
                    self.logits_back(b, logits, do)
                    self.sides_back(b, h, dx, logits, kept=True)
                elif self.inner:
                    for k in self.halves(b, h):
                        sides = self.sides(b, k, full, full)
                        self.products_back(sides, do[:, k.start - h.start : k.stop - h.start])
                        self.sides_back(b, k, dx, sides, kept=False)

    def pull_in_one_block(self) -> None:
        """Pull the cotangent of a small update back, without loops."""
        room, B, H, N, C = self.room, self.B, self.H, self.N, self.C
        out, hidden = self.out, self.a.hidden
        self.make_sums(1)
        rows = self.x.reshape(-1, C)
        dx = room("dx", rows.shape, self.dtype) if out.dx is None else out.dx.reshape(-1, C)
        xn = self.normalized(room, rows)
        channels, mask = slice(0, H), np.ascontiguousarray(self.mask)
        if hidden is None or self.inner:
            logits = self.small_logits(xn)
        if hidden is None:
            o = room("o", (B, H, N, N), self.dtype)
            self.fill_small(logits, mask, o)
        else:
            o = np.ascontiguousarray(hidden)
        do = room("do", (B, H, N * N), self.dtype)
        dout = self.dout.reshape(-1, self.D)
        self.end_back_block(room, 0, xn, o.reshape(do.shape), dout, dx, 0, do)
        if self.inner:
            dmask = np.zeros(0 if self.dmask is None else mask.size)
            self.channels_back(room, logits, mask, channels, do, dmask)
            if self.dmask is not None:
                self.dmask += dmask.reshape(self.dmask.shape)
            dlogits = logits.reshape(4 * H, len(rows))
            self.sides_back_block(room, 0, rows, xn, channels, dlogits, dx)


def forward(kernels: Any, a: Any, out: Any, *, tensors: bool = False) -> None:
    """Fill the update, and o if it is wanted."""
    work = a.x.size * len(a.p_in_weight)
    products = of_tensors(a.x.dtype, work) if tensors else ByNumpy
    u = _Update(kernels, products, a)
    with u.one_thread_for_blas(), np.errstate(all="ignore"):
        if u.is_small():
            with products.alone():
                u.fill_in_one_block(out)
        else:
            u.fill_in_parts(out)


def backward(kernels: Any, a: Any, out: Any, *, tensors: bool = False) -> None:
    """Fill the cotangents that are wanted."""
    work = a.x.size * len(a.p_in_weight)
    products = of_tensors(a.x.dtype, work) if tensors else ByNumpy
    u = _Gradients(kernels, products, a, out)
    with u.one_thread_for_blas(), np.errstate(all="ignore"):
        if u.is_small():
            with products.alone():
                u.pull_in_one_block()
        else:
            u.pull_in_parts()
        u.finish()


def takes_bits(a: Any) -> bool:
    """Return whether bfloat16 may be rounded between the steps, and is there as a whole.

    Parts add up in memory. A processor without vectors for such products takes ten times as long
    for them as for products of float32.
    """
    return a.precision == "bf16" and not a.max_memory and has_bfloat16()


def in_float32(pass_: Callable[..., None], kernels: Any, a: Any, out: Any) -> None:
    """Compute bfloat16's bits in float32."""
    arrays = [widened(array) if isinstance(array, np.ndarray) else array for array in a]
    wide: list[Any] = [s if s is None else np.empty(s.shape, np.float32) for s in out]
    pass_(kernels, a._make(arrays), out._make(wide), tensors=True)
    for slot, values in zip(out, wide, strict=True):
        if slot is not None:
            assign(slot, values)
