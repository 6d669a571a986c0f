"""Triangle multiplicative updates on the CPU: BLAS multiplies, and kernels do what is in between.

A block of positions at a time goes from x through one product, with projections and gates stacked,
to planes (channels first), of which the products over triangles are made, and from planes of o to
the output. What is between two products stays in the cache. Threads share blocks and channels, and
sums over positions are formed in a fixed number of groups of blocks, so that the thread count
changes no bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from fusedops._frame import memory
from fusedops._frame.threads import blas_on_one_thread, in_parallel
from fusedops.trimul import ARRAYS, in_parts, slices, warn_of_parts

#: What a backend provides.
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

# Positions of a block, and of one where memory is short: products want many, the cache few.
_BLOCK, _FEW = 1024, 64
# Lines and columns of a tile of o, terms of its products in a strip, and the least of both. Strips
# cost little, but tiles more the smaller they are: left and right are made again for every row and
# column of them.
_TILE, _STRIP, _SMALLEST = 64, 16, 16
# Channels that a backward pass does at once: for every part that is after products is done again.
_CHANNELS = 4
# Groups of blocks that share sums.
_GROUPS = 16
# Multiplications that pay for waking a thread.
_GRAIN = 1 << 20


class _Room(dict):
    """Arrays by name, each overwritten by the next one of its name."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        size = math.prod(shape)
        if name not in self or self[name].size < size:
            self[name] = memory.empty((size,), np.dtype(dtype))
        return self[name][:size].reshape(shape)


def _given(array: Any, n: int, value: float, dtype: np.dtype) -> np.ndarray:
    return np.full(n, value, dtype) if array is None else np.ascontiguousarray(array)


class _Update:
    """An update's arguments as kernels take them, and the parts that it is done in.

    `parts` are how much is done at once of the batch and of what else an update divides.
    """

    def __init__(self, kernels: Any, arrays: Any, static: Any) -> None:
        a = SimpleNamespace(**dict(zip(ARRAYS, arrays, strict=True)))
        self.kernels = kernels
        self.direction, self.gate, _, self.eps, self.limit = static
        self.dtype = a.x.dtype
        self.B, self.N, _, self.C = a.x.shape
        self.H = a.p_in_weight.shape[0] // 2
        self.x = np.ascontiguousarray(a.x).reshape(self.B, self.N**2, self.C)
        self.mask = np.ones(self.x.shape[:2], self.dtype)
        if a.mask is not None:
            self.mask.reshape(a.mask.shape)[...] = a.mask
        # Projections before gates, left before right.
        shape = 2, 2, self.H
        self.w_in = np.concatenate([a.p_in_weight, a.g_in_weight]).reshape(*shape, self.C)
        biases = [_given(b, 2 * self.H, 0, self.dtype) for b in (a.p_in_bias, a.g_in_bias)]
        self.b_in = np.concatenate(biases).reshape(shape)
        self.norm_in = self._norm(a.norm_in_weight, a.norm_in_bias, self.C)
        self.norm_out = self._norm(a.norm_out_weight, a.norm_out_bias, self.H)
        self.p_out = np.ascontiguousarray(a.p_out_weight)
        self.g_out = np.ascontiguousarray(a.g_out_weight)
        self.p_out_bias = _given(a.p_out_bias, self.C, 0, self.dtype)
        self.g_out_bias = _given(a.g_out_bias, len(self.g_out), 0, self.dtype)
        self.room = _Room()

    def _norm(self, weight: Any, bias: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
        return _given(weight, n, 1, self.dtype), _given(bias, n, 0, self.dtype)

    def divide(
        self, row: int, sizes: tuple[int, ...], need: Callable[..., int], *stages: tuple[int, ...]
    ) -> list[list[slice]]:
        """Return slices of sizes, of parts that need no more memory than there may be.

        A position of a block takes `row` numbers, and parts `need` numbers for so many threads. The
        last stage has the smallest parts, and the one before those that are of a sensible size.
        """
        size, self.block, self.threads = self.dtype.itemsize, _BLOCK, None
        parts = list(sizes)
        if self.limit:
            stages = tuple(tuple(map(min, stage, sizes)) for stage in stages)

            def room(limit: int) -> int:
                # A quarter is for blocks, of several threads where they are small enough.
                room = limit // (4 * row * size)
                self.block = min(max(room // 4, _FEW), _BLOCK)
                self.threads = max(room // self.block, 1)
                return limit - self.mask.nbytes - size * row * self.block * self.threads

            def bytes_of(*some: int) -> int:
                return size * need(*some, self.threads or 1)

            if room(self.limit) < bytes_of(*stages[-2]):
                enough = 1
                while room(enough) < bytes_of(*stages[-2]):
                    enough += -(-enough // 16)
                warn_of_parts(self.limit, enough)
            parts = in_parts(sizes, bytes_of, max(room(self.limit), 1), *stages)
        return [slices(n, step) for n, step in zip(sizes, parts, strict=True)]

    def halves(self, b: slice, h: slice) -> list[slice]:
        """Return which of some channels of left and right are there at once: half, if many bytes.

        What that costs is to normalize x again.
        """
        n = h.stop - h.start
        planes = 2 * n * (b.stop - b.start) * self.N**2 * self.dtype.itemsize
        step = -(-n // 2) if planes > memory.SMALL or self.limit else n
        return [slice(h.start + k.start, h.start + k.stop) for k in slices(n, step)]

    def blocks(self, batch: int, size: int) -> list[tuple[slice, slice]]:
        """Return members of the batch, and positions of their planes, of every block."""
        together = max(1, self.block // max(size, 1))
        step = self.block if together == 1 else size
        return [(b, p) for b in slices(batch, together) for p in slices(size, step)]

    def over_blocks(
        self, where: tuple[int, int], groups: int | None, work: Callable[..., None]
    ) -> None:
        """Call ``work(room, group, members, positions)`` on all blocks, of a group in order."""
        blocks = self.blocks(*where)
        groups = len(blocks) if groups is None else groups

        def share(low: int, high: int) -> None:
            room = _Room()
            with np.errstate(all="ignore"):
                for g in range(low, high):
                    for block in blocks[
                        len(blocks) * g // groups : len(blocks) * (g + 1) // groups
                    ]:
                        work(room, g, *block)

        in_parallel(share, groups, self.grain(groups))

    def over_channels(self, channels: int, work: Callable[[int, int], None]) -> None:
        def share(low: int, high: int) -> None:
            with np.errstate(all="ignore"):
                work(low, high)

        in_parallel(share, channels, max(self.grain(channels), _GRAIN // (1 + self.N**3)))

    def grain(self, items: int) -> int:
        """Return how many items a thread takes at least, for which there is memory."""
        return 1 if self.threads is None else max(1, -(-items // self.threads))

    def normalized(self, room: _Room, x: np.ndarray) -> np.ndarray:
        out = room("normalized", x.shape, self.dtype)
        self.kernels.normalize_rows(x, *self.norm_in, self.eps, out)
        return out

    def projected(self, room: _Room, xn: np.ndarray, sides: slice, h: slice) -> tuple[Any, ...]:
        """Return projections and gates of some channels, each with its biases."""
        w = self.w_in[:, sides, h].reshape(-1, self.C)
        b = np.ascontiguousarray(self.b_in[:, sides, h]).reshape(2, -1)
        both = np.matmul(w, xn.T, out=room("projected", (len(w), len(xn)), self.dtype))
        half = len(w) // 2
        return both[:half], b[0], both[half:], b[1]

    def places(self, rows: slice, columns: slice, p: slice) -> Any:
        """Return where in a plane are positions of a part of it."""
        width = columns.stop - columns.start
        if width == self.N:
            return slice(rows.start * width + p.start, rows.start * width + p.stop)
        at = np.arange(p.start, p.stop)
        return (rows.start + at // width) * self.N + columns.start + at % width

    def project(
        self, b: slice, sides: slice, h: slice, i: slice, k: slice, out: np.ndarray
    ) -> None:
        """Fill planes (B, sides, channels, positions) of lines i and their places k.

        Those are rows where the update is outgoing, and columns where it is incoming.
        """
        x, mask = self.x[b], self.mask[b]
        part = (i, k) if self.direction == "outgoing" else (k, i)

        def work(room: _Room, _: int, m: slice, p: slice) -> None:
            at = self.places(*part, p)
            xn = self.normalized(room, x[m, at].reshape(-1, self.C))
            given = self.projected(room, xn, sides, h)
            self.kernels.gate_planes(*given, mask[m, at].reshape(-1), out[m, ..., p])

        self.over_blocks((len(x), out.shape[-1]), None, work)

    def sides(self, b: slice, h: slice, i: slice, k: slice) -> np.ndarray:
        """Return channels of left and right (B, 2, channels, positions)."""
        positions = (i.stop - i.start) * (k.stop - k.start)
        shape = b.stop - b.start, 2, h.stop - h.start, positions
        out = self.room("sides", shape, self.dtype)
        self.project(b, slice(2), h, i, k, out)
        return out

    def matrices(self, planes: np.ndarray, i: slice, k: slice) -> np.ndarray:
        """Return planes of left or right as matrices, of which o is one times another, turned."""
        lines, places = i.stop - i.start, k.stop - k.start
        if self.direction == "outgoing":
            return planes.reshape(*planes.shape[:-1], lines, places)
        return planes.reshape(*planes.shape[:-1], places, lines).swapaxes(-1, -2)

    def products(self, b: slice, h: slice, i: slice, j: slice, k: slice, o: np.ndarray) -> None:
        """Fill channels of a tile of o (B, channels, lines, columns) with a strip of its products.

        With the first strip; others are added.
        """
        if i == j:
            left, right = np.moveaxis(self.sides(b, h, i, k), 1, 0)
        else:
            shape = len(o), 1, o.shape[1]
            sizes = [(lines.stop - lines.start) * (k.stop - k.start) for lines in (i, j)]
            both = self.room("sides", (math.prod(shape) * sum(sizes),), self.dtype)
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
                np.matmul(left[:, some], right[:, some], out=o[:, some])
                return
            spare = memory.empty(o.shape[2:], self.dtype)
            for at in np.ndindex(len(o), high - low):
                at = at[0], low + at[1]
                o[at] += np.matmul(left[at], right[at], out=spare)

        self.over_channels(o.shape[1], work)

    def ended(self, room: _Room, xn: np.ndarray, o: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a block of the normalized o, and of the last gate."""
        on = room("on", (self.H, len(xn)), self.dtype)
        self.kernels.normalize_planes(o, *self.norm_out, self.eps, on)
        if self.gate == "output":
            gates = np.matmul(xn, self.g_out.T, out=room("gates", xn.shape, self.dtype))
        else:
            gates = np.matmul(self.g_out, xn.T, out=room("gates", on.shape, self.dtype))
        return on, gates

    def gated(self, on: np.ndarray, gates: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return what the kernels of a gate take where the normalized o is what is gated."""
        bias = np.zeros_like(self.g_out_bias)
        return on, bias, gates, self.g_out_bias, np.ones(on.shape[1], self.dtype)

    def end(self, b: slice, i: slice, j: slice, o: np.ndarray, out: np.ndarray) -> None:
        """Fill a tile of the output from that of o (B, H, positions)."""
        x, out = self.x[b], out.reshape(self.x.shape)[b]

        def work(room: _Room, _: int, m: slice, p: slice) -> None:
            at = self.places(i, j, p)
            xn = self.normalized(room, x[m, at].reshape(-1, self.C))
            rows = out[m, at].reshape(-1, self.C)
            on, gates = self.ended(room, xn, o[m, :, p])
            if self.gate == "hidden":
                self.kernels.gate_planes(*self.gated(on, gates), on[None, None])
            np.matmul(on.T, self.p_out.T, out=rows)
            if self.gate == "hidden":
                rows += self.p_out_bias
            else:
                self.kernels.gate_rows(rows, self.p_out_bias, gates, self.g_out_bias)
            if j.stop - j.start < self.N:
                # These are a copy.
                out[m, at] = rows.reshape(len(o[m]), -1, self.C)

        self.over_blocks((len(x), o.shape[2]), None, work)


class _Gradients(_Update):
    """The cotangents of an update's arrays; sums over positions are in float64."""

    def __init__(self, kernels: Any, arrays: Any, static: Any, outputs: Any) -> None:
        super().__init__(kernels, arrays, static)
        self.on = SimpleNamespace(**dict(zip(ARRAYS, outputs, strict=True)))
        shapes = {
            "norm_in": (2, self.C),
            "w_in": self.w_in.shape,
            "b_in": self.b_in.shape,
            "norm_out": (2, self.H),
            "p_out": self.p_out.shape,
            "p_out_bias": self.p_out_bias.shape,
            "g_out": self.g_out.shape,
            "gate": (2, len(self.g_out)),
        }
        self.sums_size = 8 * sum(map(math.prod, shapes.values()))
        groups = self.limit // (8 * self.sums_size) if self.limit else _GROUPS
        self.sums = [
            SimpleNamespace(**{name: np.zeros(shape) for name, shape in shapes.items()})
            for _ in range(min(max(groups, 1), _GROUPS))
        ]
        self.on_mask = None
        if self.on.mask is not None:
            self.on.mask[...] = 0
            self.on_mask = self.on.mask.reshape(self.mask.shape)

    def over_groups(self, where: tuple[int, int], work: Callable[..., None]) -> None:
        self.over_blocks(where, min(len(self.sums), len(self.blocks(*where))), work)

    def end_back(
        self, b: slice, h: slice, o: np.ndarray, cotangent: np.ndarray, on_x: np.ndarray
    ) -> np.ndarray:
        """Return the cotangent of channels of o; with the first of them, find all others."""
        x, cotangent = self.x[b], cotangent[b]
        on_o = self.room("on_o", (len(x), h.stop - h.start, self.N**2), self.dtype)
        output, first = self.gate == "output", h.start == 0

        def work(room: _Room, g: int, m: slice, p: slice) -> None:
            sums, rows = self.sums[g], cotangent[m, p].reshape(-1, self.C)
            gated: tuple[np.ndarray, ...]
            gate, norm = sums.gate, sums.norm_out
            if not first:
                gate, norm = np.zeros_like(gate), np.zeros_like(norm)
            xn = self.normalized(room, x[m, p].reshape(-1, self.C))
            on, gates = self.ended(room, xn, o[m, :, p])
            on_on = room("on_on", on.shape, self.dtype)
            if output:
                by, end = room("values", rows.shape, self.dtype), on.T
                np.matmul(end, self.p_out.T, out=by)
                gated = by, self.p_out_bias, gates, self.g_out_bias
                self.kernels.gate_rows_back(rows, *gated, gate)
                on_gates = gates
                np.matmul(self.p_out.T, by.T, out=on_on)
            else:
                by, end = rows, room("values", on.shape, self.dtype)
                gated = self.gated(on, gates)
                self.kernels.gate_planes(*gated, end[None, None])
                np.matmul(self.p_out.T, by.T, out=on_on)
                on_mask = room("on_mask", (len(rows),), np.float64)
                self.kernels.gate_planes_back(on_on[None, None], *gated, on_mask, gate)
                on_on, on_gates, end = on, gates.T, end.T
            if first:
                sums.p_out += by.T @ end
                sums.g_out += on_gates.T @ xn
                sums.p_out_bias += np.ones(len(rows), self.dtype) @ by
                np.matmul(on_gates, self.g_out, out=on_x[m, p].reshape(-1, self.C))
            arguments = o[m, :, p], self.norm_out[0], self.eps, on_on, h.start
            self.kernels.normalize_planes_back(*arguments, on_o[m, :, p], norm)

        self.over_groups(x.shape[:2], work)
        return on_o

    def products_back(self, sides: np.ndarray, on_o: np.ndarray) -> None:
        """Overwrite left and right (B, 2, channels, positions) by their cotangents."""
        whole = slice(0, self.N)
        left, right = (self.matrices(sides[:, side], whole, whole) for side in (0, 1))
        on_o = on_o.reshape(left.shape)

        def work(low: int, high: int) -> None:
            room = _Room()
            for b in range(len(left)):
                for c in slices(high - low, max(1, _BLOCK // max(self.N**2, 1))):
                    l, r, o = (a[b, low:high][c] for a in (left, right, on_o))
                    spare = room("spare", (len(l), self.N**2), self.dtype)
                    spare = self.matrices(spare, whole, whole)
                    np.matmul(o, r, out=spare)
                    np.matmul(o.swapaxes(-1, -2), l, out=r)
                    l[...] = spare

        self.over_channels(left.shape[1], work)

    def sides_back(self, b: slice, h: slice, on_sides: np.ndarray, on_x: np.ndarray) -> None:
        """Pull the cotangent of channels of left and right back; with the last of them, to x."""
        x, mask = self.x[b], self.mask[b]
        w = self.w_in[:, :, h].reshape(-1, self.C)

        def work(room: _Room, g: int, m: slice, p: slice) -> None:
            sums, rows = self.sums[g], x[m, p].reshape(-1, self.C)
            xn = self.normalized(room, rows)
            given = self.projected(room, xn, slice(2), h)
            both = room("projected", (len(w), len(rows)), self.dtype)
            on_mask = room("on_mask", (len(rows),), np.float64)
            bias = np.zeros((2, len(w) // 2))
            by = on_sides[m, ..., p]
            self.kernels.gate_planes_back(by, *given, mask[m, p].reshape(-1), on_mask, bias)
            if self.on_mask is not None:
                self.on_mask[b][m, p] += on_mask.reshape(len(by), -1)
            sums.w_in[:, :, h] += (both @ xn).reshape(2, 2, -1, self.C)
            sums.b_in[:, :, h] += bias.reshape(2, 2, -1)
            on_xn = np.matmul(both.T, w, out=room("on_xn", xn.shape, self.dtype))
            on_rows = on_x[m, p].reshape(-1, self.C)
            if h.stop < self.H:
                on_rows += on_xn
            else:
                weight = self.norm_in[0]
                self.kernels.normalize_rows_back(
                    rows, weight, self.eps, on_xn, on_rows, sums.norm_in
                )

        self.over_groups(x.shape[:2], work)

    def finish(self) -> None:
        """Fill the cotangents that are sums over positions."""
        on, H = self.on, self.H
        total = SimpleNamespace(
            **{name: sum(getattr(s, name) for s in self.sums) for name in vars(self.sums[0])}
        )
        for out, value in (
            (on.norm_in_weight, total.norm_in[0]),
            (on.norm_in_bias, total.norm_in[1]),
            (on.p_in_weight, total.w_in[0].reshape(2 * H, self.C)),
            (on.p_in_bias, total.b_in[0].reshape(2 * H)),
            (on.g_in_weight, total.w_in[1].reshape(2 * H, self.C)),
            (on.g_in_bias, total.b_in[1].reshape(2 * H)),
            (on.norm_out_weight, total.norm_out[0]),
            (on.norm_out_bias, total.norm_out[1]),
            (on.p_out_weight, total.p_out),
            (on.p_out_bias, total.p_out_bias),
            (on.g_out_weight, total.g_out),
            (on.g_out_bias, total.gate[1]),
        ):
            if out is not None:
                with np.errstate(all="ignore"):
                    out[...] = value


def forward(kernels: Any, *args: Any) -> None:
    """Fill the update, and o where it is wanted.

    That is made in tiles, where it isn't wanted itself, and what it is made from in strips.
    """
    out, hidden = args[19:]
    u = _Update(kernels, args[:14], args[14:19])
    N, H, own = u.N, u.H, hidden is None

    def need(b: int, i: int, j: int, k: int, threads: int) -> int:
        spare = i * j * min(threads, H) if k < N else 0
        return b * H * (own * i * j + (i + j) * k) + spare

    batches, rows, columns, strips = u.divide(
        2 * u.C + max(4 * H, H + len(u.g_out)),
        (u.B, N, N, N),
        need,
        (1, N, N, _TILE),
        (1, _TILE, _TILE, _TILE) if own else (1, N, N, _STRIP),
        (1, _TILE, _TILE, _STRIP),
        (1, _SMALLEST, _SMALLEST, _SMALLEST),
    )
    with blas_on_one_thread():
        for b, i, j in itertools.product(batches, rows, columns):
            lines, places, members = i.stop - i.start, j.stop - j.start, b.stop - b.start
            shape = members, H, lines, places
            o = u.room("o", shape, u.dtype) if own else hidden[b, :, i, j]
            channels = [slice(0, H)] if u.limit else u.halves(b, slice(0, H))
            for h, k in itertools.product(channels, strips):
                u.products(b, h, i, j, k, o[:, h])
            if out is not None:
                u.end(b, i, j, o.reshape(members, H, -1), out)


def backward(kernels: Any, *args: Any) -> None:
    """Fill the cotangents that are wanted, by members of the batch and some channels."""
    hidden, cotangent = args[14:16]
    u = _Gradients(kernels, args[:14], args[16:21], args[21:])
    shape, whole = (u.B, u.H, u.N**2), slice(0, u.N)
    inner = any(output is not None for output in args[21:29])

    def need(b: int, c: int, threads: int) -> int:
        rows = u.C * (u.on.x is None) + u.H * (hidden is None)
        at_once = -(-c // 2)
        return u.N**2 * (b * (c + 2 * at_once + rows) + min(at_once, threads))

    ends = u.C + 3 * u.H + len(u.g_out) + max(u.C, u.H)
    row = max(ends, 2 * u.C + 4 * u.H) + 2
    batches, channels = u.divide(row, (u.B, u.H), need, (1, _CHANNELS), (1, 1))
    cotangent = np.ascontiguousarray(cotangent).reshape(u.x.shape)
    if hidden is not None:
        hidden = np.ascontiguousarray(hidden).reshape(shape)
    with blas_on_one_thread():
        for b in batches:
            if hidden is None:
                o = u.room("o", (b.stop - b.start, *shape[1:]), u.dtype)
                square = o.reshape(*o.shape[:2], u.N, u.N)
                for h in itertools.chain.from_iterable(u.halves(b, h) for h in channels):
                    u.products(b, h, whole, whole, whole, square[:, h])
            else:
                o = hidden[b]
            if u.on.x is None:
                on_x = u.room("on_x", (b.stop - b.start, *u.x.shape[1:]), u.dtype)
            else:
                on_x = u.on.x.reshape(u.x.shape)[b]
            for h in channels:
                on_o = u.end_back(b, h, o, cotangent, on_x)
                for k in u.halves(b, h) if inner else ():
                    sides = u.sides(b, k, whole, whole)
                    u.products_back(sides, on_o[:, k.start - h.start : k.stop - h.start])
                    u.sides_back(b, k, sides, on_x)
    u.finish()
