"""Triangle multiplicative updates on the CPU: BLAS multiplies, and kernels do what is in between.

A block of positions at a time goes from x through one product, with projections and gates stacked,
to planes (channels first), of which the products over triangles are made, and from planes of o to
the output. What is between two products stays in the cache. BLAS has its own threads, whose number
can't be set for one call alone; those of the kernels share a block. Neither changes a block, or the
order of a sum over blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpukern.threads import in_parallel
from fusedops import _memory
from fusedops.trimul import ARRAYS

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

#: Positions that kernels take at a time; sums over positions are formed in as many.
TILE = 128
# Positions of a block, and of one where there is little memory: the product wants many, the cache
# few.
_BLOCK, _FEW = 1024, 128
# Tiles that pay for waking a thread.
_GRAIN = 2


def _slices(n: int, step: int) -> list[slice]:
    return [slice(low, min(low + step, n)) for low in range(0, n, step)]


def _given(array: Any, n: int, value: float, dtype: np.dtype) -> np.ndarray:
    return np.full(n, value, dtype) if array is None else np.ascontiguousarray(array)


class _Update:
    """An update's arguments as kernels take them, its parts, and memory for one at a time.

    `batches`, `channels` and `lines` are slices of the batch, of the channels of left and right,
    and of the first index of o, that are done one after the other.
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
        self._memory: dict[str, np.ndarray] = {}

    def _norm(self, weight: Any, bias: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
        return _given(weight, n, 1, self.dtype), _given(bias, n, 0, self.dtype)

    def divide(self, row: int, need: Callable[[int, int, int], int], *, lines: bool) -> None:
        """Find parts that need no more memory than there may be, if there are such.

        `row` is how many numbers each position of a block takes, and `need` tells how many members
        of the batch, channels and lines take; `lines` says whether lines may be apart.
        """
        size, limit = self.dtype.itemsize, self.limit
        self.block = min(max(limit // (4 * row * size), _FEW), _BLOCK) if limit else _BLOCK
        parts, may = [self.B, self.H, self.N], 3 if lines else 2
        while limit and max(parts[:may]) > 1:
            if self.mask.nbytes + size * (self.block * row + need(*parts)) <= limit:
                break
            at = next(at for at, n in enumerate(parts) if n > 1)
            parts[at] = -(-parts[at] // 2)
        self.batches, self.channels, self.lines = (
            _slices(n, max(part, 1)) for n, part in zip((self.B, self.H, self.N), parts, strict=True)
        )

    def scratch(self, name: str, *shape: int) -> np.ndarray:
        """Return an array that is overwritten by the next one of its name."""
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].size < size:
            self._memory[name] = _memory.empty((size,), self.dtype)
        return self._memory[name][:size].reshape(shape)

    def blocks(self, batch: int, size: int) -> Iterator[tuple[slice, slice]]:
        """Yield members of the batch, and positions of their planes of that size."""
        together = max(1, self.block // max(size, 1))
        for b in _slices(batch, together):
            for p in _slices(size, self.block if together == 1 else max(size, 1)):
                yield b, p

    def run(self, kernel: Callable[..., None], batch: int, size: int, *args: Any) -> None:
        """Call a kernel on all tiles of that many planes, or rows."""
        tiles = batch * -(-size // TILE)
        in_parallel(lambda low, high: kernel(low, high, *args), tiles, _GRAIN)

    def normalized(self, x: np.ndarray) -> np.ndarray:
        out = self.scratch("normalized", *x.shape)
        self.run(self.kernels.normalize_rows, 1, len(x), x, *self.norm_in, self.eps, out)
        return out

    def projected(self, xn: np.ndarray, sides: slice, h: slice) -> tuple[Any, ...]:
        """Return channels of projections and gates, each with its biases."""
        w, b = self.w_in[:, sides, h].reshape(-1, self.C), self.b_in[:, sides, h].reshape(2, -1)
        both = np.matmul(w, xn.T, out=self.scratch("projected", len(w), len(xn)))
        half = len(w) // 2
        return both[:half], b[0], both[half:], b[1]

    def project(
        self, x: np.ndarray, mask: np.ndarray, sides: slice, h: slice, out: np.ndarray
    ) -> None:
        """Fill planes (B, sides, channels, positions)."""
        for b, p in self.blocks(*mask.shape):
            planes = out[b, ..., p]
            given = self.projected(self.normalized(x[b, p].reshape(-1, self.C)), sides, h)
            self.run(
                self.kernels.gate_planes,
                len(planes),
                planes.shape[-1],
                *given,
                mask[b, p].reshape(-1),
                planes,
            )

    def matrices(self, planes: np.ndarray) -> np.ndarray:
        """Return planes of left or right as matrices over which o is a product."""
        lines = planes.shape[-1] // self.N if self.N else 0
        if self.direction == "outgoing":
            return planes.reshape(*planes.shape[:-1], lines, self.N)
        return planes.reshape(*planes.shape[:-1], self.N, lines).swapaxes(-1, -2)

    def lines_of(self, rows: np.ndarray, i: slice) -> np.ndarray:
        """Return what left of some lines of o is made from, of rows (B, positions, ...)."""
        square = rows.reshape(len(rows), self.N, self.N, *rows.shape[2:])
        some = square[:, i] if self.direction == "outgoing" else square[:, :, i]
        return np.ascontiguousarray(some).reshape(len(rows), -1, *rows.shape[2:])

    def products(self, b: slice, i: slice, out: np.ndarray) -> None:
        """Fill lines of o (B, H, positions), for which left and right are made channel by channel."""
        x, mask = self.x[b], self.mask[b]
        B, whole = len(x), i.stop - i.start == self.N
        for h in self.channels:
            n = h.stop - h.start
            if whole:
                planes = self.scratch("sides", B, 2, n, self.N**2)
                self.project(x, mask, slice(0, 2), h, planes)
                left, right = planes[:, 0], planes[:, 1]
            else:
                left = self.scratch("left", B, 1, n, (i.stop - i.start) * self.N)
                right = self.scratch("right", B, 1, n, self.N**2)
                some = self.lines_of(x, i), self.lines_of(mask, i)
                self.project(*some, slice(0, 1), h, left)
                self.project(x, mask, slice(1, 2), h, right)
                left, right = left[:, 0], right[:, 0]
            o = out[:, h].reshape(B, n, -1, self.N)
            np.matmul(self.matrices(left), self.matrices(right).swapaxes(-1, -2), out=o)

    def ended(self, xn: np.ndarray, o: np.ndarray) -> tuple[Any, ...]:
        """Return a block of the normalized o, and of the last gate with its biases."""
        on = self.scratch("on", self.H, len(xn))
        where = len(o), o.shape[-1]
        self.run(self.kernels.normalize_planes, *where, o, *self.norm_out, self.eps, on)
        if self.gate == "output":
            gates = np.matmul(xn, self.g_out.T, out=self.scratch("gates", *xn.shape))
        else:
            gates = np.matmul(self.g_out, xn.T, out=self.scratch("gates", *on.shape))
        return on, gates

    def gated(self, on: np.ndarray, gates: np.ndarray, out: np.ndarray) -> None:
        """Fill the normalized o times its gate; they may be the same array."""
        self.run(
            self.kernels.gate_planes,
            1,
            on.shape[1],
            on,
            np.zeros_like(self.g_out_bias),
            gates,
            self.g_out_bias,
            np.ones(on.shape[1], self.dtype),
            out[None, None],
        )

    def end(self, b: slice, i: slice, o: np.ndarray, out: np.ndarray) -> None:
        """Fill lines of the output from those of o (B, H, positions)."""
        where = slice(i.start * self.N, i.stop * self.N)
        x, out = self.x[b, where], out.reshape(self.B, -1, self.C)[b, where]
        for m, p in self.blocks(*x.shape[:2]):
            rows = out[m, p].reshape(-1, self.C)
            on, gates = self.ended(self.normalized(x[m, p].reshape(-1, self.C)), o[m, :, p])
            if self.gate == "hidden":
                self.gated(on, gates, on)
            np.matmul(on.T, self.p_out.T, out=rows)
            if self.gate == "hidden":
                rows += self.p_out_bias
            else:
                ends = rows, self.p_out_bias, gates, self.g_out_bias
                self.run(self.kernels.gate_rows, 1, len(rows), *ends)


def forward(kernels: Any, *args: Any) -> None:
    """Fill the update, and o where it is wanted.

    The least memory is that of a block, of one line of o of all channels, and of one channel of
    left and right; of a channel of left and right where o is wanted.
    """
    out, hidden = args[19:]
    u = _Update(kernels, args[:14], args[14:19])
    N, own = u.N, hidden is None
    row = u.C + 5 * u.H + len(u.g_out)
    u.divide(
        row,
        lambda b, c, i: b * (N * ((N + i) * c + own * i * u.H) + (i < N) * i * N * u.C),
        lines=own,
    )
    with np.errstate(all="ignore"):
        for b in u.batches:
            for i in u.lines:
                n = b.stop - b.start
                if own:
                    o = u.scratch("o", n, u.H, (i.stop - i.start) * N)
                else:
                    o = hidden[b].reshape(n, u.H, N * N)
                u.products(b, i, o)
                if out is not None:
                    u.end(b, i, o, out)
