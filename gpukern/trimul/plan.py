"""The arguments of an update's kernels, the parts that an update is done in, and launches."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedops._frame.check import warn
from fusedops.trimul.op import Weights, in_parts, slices, warn_of_parts
from gpukern.launch import GLUON, Launcher, has_gluon, is_small, kernel_of_any_size, wide
from gpukern.precision import EMULATED, of_float32
from gpukern.products import repay
from gpukern.trimul import kernels

hopper: Any = None
hopper_backward: Any = None
hopper_wide: Any = None
if has_gluon():
    with contextlib.suppress(ImportError, AttributeError):
        from triton.experimental import gluon

        from gpukern.trimul import hopper, hopper_backward, hopper_wide

# Rows that repay a pass of their own: to normalize x, to round weights, or on Hopper to fill shared
# memory with weights.
MANY = 1 << 16
# Rows up to which a backward pass is bound by the host; and up to which our own products of float32
# itself take less time than torch's.
FEW, FEW_EXACT = 1 << 14, 1 << 12
# The most channels that a projection normalizes itself.
CHANNELS = 128
# The fewest groups of eight lines that are worth a part of an update.
_LINES = 8

ALL = slice(None)

_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}

ON_HOPPER: dict[Any, tuple[str, ...]] = {}
if hopper is not None:
    ON_HOPPER = {**hopper.POINTERS, **hopper_backward.POINTERS, **hopper_wide.POINTERS}


@functools.cache
def _launcher(
    kernel: Any, warps: int, stages: int, aligned: tuple[str, ...], limited: bool
) -> Launcher:
    if kernel in ON_HOPPER:
        # A multiprocessor runs one such program, which may use all registers.
        return Launcher(kernel_of_any_size(kernel, ON_HOPPER[kernel], gluon.jit), warps)
    # Such limits leave a multiprocessor room for two programs of eight warps, or three of four.
    registers = 128 if warps == 8 else 168 if kernel is kernels.finish else None
    registers = registers if limited else None
    names = *kernels.POINTERS[kernel], *aligned
    return Launcher(kernel_of_any_size(kernel, names), warps, registers, stages)


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Any, ...],
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    *,
    warps: int = 4,
    stages: int = 1,
    aligned: tuple[str, ...] = (),
    limited: bool = True,
) -> None:
    """Launch a kernel; `aligned` names pointers that are so in this launch.

    If not `limited`, a program may use all registers.
    """
    # A descriptor has no dtype: the other tensors imply it, and constants imply its block.
    kinds = tuple([getattr(tensor, "dtype", None) for tensor in tensors])
    device = next(tensor.device for tensor in tensors if tensor is not None)
    key = device, kinds, wide(*numbers), constants
    _launcher(kernel, warps, stages, aligned, limited)(
        programs, key, *tensors, *numbers, *constants
    )


def strides_of(mask: Any) -> tuple[int, ...]:
    return (0, 0, 0) if mask is None else mask.stride()


def ceil(n: int, by: int) -> int:
    return -(-n // by)


def up(n: int) -> int:
    """Return the next multiple of eight."""
    return ceil(n, 8) * 8


@functools.cache
def is_hopper(device: Any) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    if hopper is None:
        warn(
            f"Triton is {triton.__version__}; there are kernels for Hopper with Triton "
            f"{GLUON[0]} to {GLUON[-1]}. The kernels for all GPUs serve, more slowly."
        )
    return hopper is not None


def is_aligned(array: Any) -> bool:
    """Return whether an array has no gaps and begins at a multiple of 16 bytes."""
    return array.is_contiguous() and array.data_ptr() % 16 == 0


def aligned(array: Any) -> Any:
    """Return an array, or a copy of it without gaps that begins at a multiple of 16 bytes."""
    if array is None or is_aligned(array):
        return array
    return array.clone(memory_format=torch.contiguous_format)


class Types(NamedTuple):
    """The dtypes of factors and of sums, the precision of products, and whether means are exact."""

    dot: Any
    float: Any
    precision: str
    exact: bool


class Place(NamedTuple):
    """The integers that find an element, and whether lines begin at multiples of eight."""

    long: Any
    aligned: bool


class Update:
    """An update's arguments as kernels take them, and the parts that it is done in.

    Lines of planes have places for a multiple of eight edges, so that vectors can be read and
    written; places without an edge hold zeros.
    """

    def __init__(self, a: Any, H: int | None = None) -> None:
        self.x, self.mask = aligned(a.x), a.mask
        w = Weights(*[aligned(getattr(a, name)) for name in Weights._fields])
        if w.p_in_weight.dtype != w.g_in_weight.dtype:
            # One load of a kernel reads from both weights.
            kind = torch.promote_types(w.p_in_weight.dtype, w.g_in_weight.dtype)
            both = {"p_in_weight": w.p_in_weight.to(kind), "g_in_weight": w.g_in_weight.to(kind)}
            w = w._replace(**both)
        self.weights = w
        self.direction, self.eps, self.limit = a.direction, a.eps, a.max_memory
        self.output, precision = a.gate == "output", a.precision
        x = self.x
        # L lines of N pairs; in a whole update L is N.
        self.B, self.L, self.N, self.C = x.shape
        # A stage may have no weights that tell H.
        self.H, self.G = len(w.p_in_weight) // 2 if H is None else H, len(w.g_out_weight)
        self.pitch, self.width = up(self.N), up(self.C + 1)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.dtype = dtype or torch.promote_types(x.dtype, torch.float32)
        # A gate is between zero and one, where fp16 has three binary digits more.
        self.opened = torch.float16 if self.dtype == torch.bfloat16 else self.dtype
        self.accumulator = torch.promote_types(self.dtype, torch.float32)
        # Whether factors may be rounded, and whether products run on tensor cores.
        self.rounded = self.dtype.itemsize == 2 or precision == "tf32"
        self.precision = "ieee"
        if self.dtype == torch.float32 and precision in ("tf32", "float32"):
            self.precision = "tf32" if precision == "tf32" else of_float32(x.device)
        self.emulated = self.precision == EMULATED
        self.fast = self.rounded or self.emulated
        if self.mask is not None:
            # Kernels find a place within a mask's memory in 32 bits.
            steps = zip(self.mask.shape, self.mask.stride(), strict=True)
            if sum((n - 1) * step for n, step in steps) >> 31:
                self.mask = self.mask.contiguous()
        # In float16 o is a mean over edges, since a sum may overflow.
        self.shift = -round(math.log2(max(self.N, 1))) if self.dtype == torch.float16 else 0
        exact_float32 = self.dtype == torch.float32 and not self.fast
        few = FEW_EXACT if exact_float32 else FEW
        self.few = self.B * self.L * self.N <= few and self.dtype != torch.float64
        self.small = is_small(x.device)
        # Whether products of float32 are made of halves.
        self.halved = self.emulated and not (self.few or self.small)
        self.halved_sides = self.halved and repay(x.device, self.H, *[self.N] * 3, ready=True)
        # Whether torch multiplies float32 itself, between kernels of ours. That takes memory.
        self.apart = exact_float32 and not (self.few or self.limit)
        # Whether our own kernel makes the products.
        self.ours = self.few or (self.dtype == torch.float32 and not self.apart)
        # The interpreter's products know no bfloat16.
        narrow = self.dtype == torch.bfloat16 and not x.is_cuda
        dot = tl.float32 if narrow else _TYPES[self.dtype]
        # With more than two bytes, the rounding error of a mean counts.
        exact = self.dtype.itemsize > 2
        self.types = Types(dot, _TYPES[self.accumulator], self.precision, exact)
        self.asm = self.rounded and x.is_cuda and torch.version.cuda is not None
        size = self.B * self.L * self.pitch * max(self.width, 2 * self.H, self.G)
        self.long = tl.int64 if size >> 31 else tl.int32
        self.place = Place(self.long, self.N % 8 == 0)
        # Whether the gate may lie where the output will: each element is read before it is written.
        self.in_out = self.output and x.dtype == self.dtype and not self.apart
        # Hopper's kernels take planes without gaps, and products of 16 bits.
        self.on_hopper = is_hopper(x.device) and self.N % 8 == 0 and self.dtype.itemsize == 2

    def new(self, *shape: int, dtype: Any = None) -> Any:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.x.device)

    def new_sides(self, planes: int) -> Any:
        """Return memory for planes of left and right, or for their halves."""
        if self.halved_sides:
            return self.new(2, 2, planes, self.N, self.pitch, dtype=torch.float16)
        return self.new(2, planes, self.N, self.pitch)

    def divide(self, need: Callable[[int, int, int], int], least: int) -> None:
        """Find parts of the batch, of the channels of left and right, and of the lines.

        The numbers that they `need` fit in the memory allowed, if any parts' numbers do. Parts of
        fewer channels than `least` take long, and save little.
        """
        sizes = self.B, self.H, ceil(self.N, 8)

        # Eight lines begin at a multiple of 16 bytes.
        def size(b: int, h: int, lines: int) -> int:
            return self.dtype.itemsize * need(b, h, 8 * lines)

        sensible = tuple(map(min, (1, least, _LINES), sizes))
        limit, smallest = self.limit, size(1, 1, 1)
        if 0 < limit < smallest:
            # The smallest parts would save no more than this, and take many times as long.
            limit = 5 * smallest // 4
        parts = in_parts(sizes, size, limit, sensible, (1, 1, 1))
        # A small update may take less as a whole.
        enough = min(size(*sensible), size(*sizes))
        if 0 < self.limit < enough:
            warn_of_parts(self.limit, enough)
        self.batches, self.channels, lines = (
            slices(n, step) for n, step in zip(sizes, parts, strict=True)
        )
        self.lines = [slice(8 * eight.start, min(8 * eight.stop, self.N)) for eight in lines]
        self.whole = len(self.channels) == len(self.lines) == 1

    def gate(self, members: int, lines: slice, out: Any = None) -> Any:
        """Return memory for the last gate: rows if it gates the output, else planes."""
        n = len(range(*lines.indices(self.L)))
        if not self.output:
            return self.new(members, self.G, n, self.pitch, dtype=self.opened)
        if self.in_out and out is not None and is_aligned(out):
            return out.view(self.opened)
        return self.new(members, n, self.N, self.G, dtype=self.opened)

    def kept(self, members: int, lines: int) -> Any:
        """Return memory for rows of the normalized x, with a column of ones."""
        return self.new(members, lines, self.pitch, self.width)

    def edges(self, b: slice, lines: slice) -> tuple[Any, Any]:
        """Return some edges of x and of the mask."""
        return self.x[b, lines], None if self.mask is None else self.mask[b, lines]

    def of(self, h: slice) -> Weights:
        """Return the weights with the projections and gates of some channels, left before right."""
        w = self.weights
        if h.stop - h.start == self.H:
            return w

        def some(a: Any) -> Any:
            return None if a is None else torch.cat([a[h], a[self.H + h.start : self.H + h.stop]])

        return w._replace(
            p_in_weight=some(w.p_in_weight),
            p_in_bias=some(w.p_in_bias),
            g_in_weight=some(w.g_in_weight),
            g_in_bias=some(w.g_in_bias),
        )
