"""Convolutions with generated kernels, for Hopper's tensor cores.

A program keeps the weight's rows of some channels in shared memory, and goes through tiles of
tokens. One warp brings hidden, in a ring. Two consumers of four warps each take every second tile,
in turns: one finishes outputs while the tensor cores work for the other.

The weight's rows are in such an order that a thread finds all taps of eight neighbouring channels
in its part of the product, so that it reads and writes vectors.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukern.hopper import REGISTERS, SHARED, TILE, as_held, load, sigmoid

# Tokens and channels of a tile, and taps of a channel.
ROWS, CHANNELS, TAPS = map(gl.constexpr, (64, 64, 4))
# Numbers of hidden that pass through shared memory at once.
CHUNK = gl.constexpr(64)
# Warps of a consumer.
WARPS = gl.constexpr(4)
COLUMNS, HALF = gl.constexpr(CHANNELS.value * TAPS.value), gl.constexpr(CHANNELS.value // 2)
# In the backward, tokens of a warp's sixteen whose cotangents of x are complete within the warp.
OWN = gl.constexpr(13)
# The most chunks of hidden in the ring.
_SLOTS = 12

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
# A thread has vectors of eight channels in two rows, eight apart.
_OUTPUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)

# Four threads hold a row; their second numbers are eight rows below.
_ROTATE = gl.constexpr(
    """{ .reg .u32 l; .reg .pred p; .reg .b32 s; mov.u32 l, %laneid; setp.lt.u32 p, l, 4;
    selp.b32 s, $2, $1, p; add.u32 l, l, 4; shfl.sync.idx.b32 $0, s, l, 31, -1; }"""
)
_DOWN = gl.constexpr("shfl.sync.down.b32 $0, $1, 4, 31, -1;")


def slots(H: int) -> int:
    """Return the chunks of hidden that fit in the ring, beside the weight."""
    chunks = -(-H // CHUNK.value)
    # The rest is for barriers.
    rows = (SHARED - 1024) // (2 * CHUNK.value)
    return min(_SLOTS, (rows - chunks * COLUMNS.value) // ROWS.value)


def packed(weight: Any, D: int) -> Any:
    """Return the weight's rows in the order of the kernel, block after block of channels.

    A block has two halves of its channels, and each of these its taps. There, column 8 i + 2 j + k
    has channel 8 j + 2 i + k.
    """
    rows = weight.view(D // HALF.value, 4, 4, 2, TAPS.value, *weight.shape[1:])
    return rows.transpose(1, 2).movedim(4, 1).reshape(weight.shape)


def described(array: Any, rows: int) -> Any:
    """Return a descriptor of boxes with so many rows."""
    return TensorDescriptor.from_tensor(array, [rows, CHUNK.value], TILE)


@gluon.jit
def _halves(x):
    """Return the first and the second half of columns."""
    half: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, (ROWS, 2, half)), (0, 2, 1)))


@gluon.jit
def _taps(x):
    """Return the taps in half of a product's columns, by channel, where they are."""
    one, two = _halves(x)
    columns = _halves(one) + _halves(two)
    taps = ()
    for w in gl.static_range(TAPS):
        by = gl.permute(gl.reshape(columns[w], (ROWS, 4, 4, 2)), (0, 2, 1, 3))
        by = gl.convert_layout(gl.reshape(by, (ROWS, HALF)), _OUTPUT, assert_trivial=True)
        taps = taps + (by,)
    return taps


@gluon.jit
def _items(items):
    """Return the first item of a program, and the first behind its last."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    each, more = items // programs, items % programs
    first = program * each + gl.minimum(program, more)
    return first, first + each + (program < more).to(gl.int32)


@gluon.jit
def _started(biases, block):
    """Return the biases of a tile's product, or zeros."""
    value = gl.zeros((ROWS, COLUMNS), gl.float32, _PRODUCT)
    if biases is not None:
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, _PRODUCT))
        started = gl.load(biases + block * COLUMNS + column).to(gl.float32)
        value, _ = gl.broadcast(started[None, :], value)
    return value


@gluon.jit
def _product(
    value, use, places, item, first, tiles, begun,
    CONSUMER: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Return a tile's product, when it is this consumer's turn.

    The tile is an item of the program, whose first one is `first`, and the consumer's begun-th. Of
    all items, `tiles` in a row have one block of channels.
    """
    weights, ring, ready, full, empty, turns = places
    CHUNKS: gl.constexpr = weights.shape[0]
    # The tile's first chunk in the ring, and the number of its block in the program.
    n = (item - first) * CHUNKS
    blocks = item // tiles - first // tiles
    hopper.mbarrier.wait(turns.index(CONSUMER), (begun & 1) ^ (1 - CONSUMER))
    # Wait for the weight only after the other's tile: before, the barrier may still be in the phase
    # of the previous block, whose weight would be taken for this one.
    hopper.mbarrier.wait(ready, blocks & 1)
    for k in gl.static_range(CHUNKS):
        slot = (n + k) % SLOTS
        hopper.mbarrier.wait(full.index(slot), ((n + k) // SLOTS) & 1)
        value = hopper.warpgroup_mma(
            ring.index(slot), weights.index(k).permute((1, 0)), value, use_acc=k > 0 or use,
            is_async=True,
        )  # fmt: skip
        if k > 0:
            value = hopper.warpgroup_mma_wait(1, deps=[value])
            hopper.mbarrier.arrive(empty.index((n + k - 1) % SLOTS), count=1)
    hopper.mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
    value = hopper.warpgroup_mma_wait(0, deps=[value])
    hopper.mbarrier.arrive(empty.index((n + CHUNKS - 1) % SLOTS), count=1)
    return value


@gluon.jit
def _inputs(x, at, live, p, D: gl.constexpr):
    """Load the inputs of all taps."""
    inputs = ()
    for w in gl.static_range(TAPS):
        mask = (live & (p >= TAPS - 1 - w))[:, None]
        place = x + (at - (TAPS - 1 - w) * D)
        inputs = inputs + (gl.load(place, mask=mask, other=0.0),)
    return inputs


@gluon.jit
def _preactivation(taps, inputs, shift):
    h = taps[0] * as_held(inputs[0])
    for w in gl.static_range(1, TAPS):
        h += taps[w] * as_held(inputs[w])
    if shift is not None:
        h += gl.load(shift).to(gl.float32)[None, :]
    return h


@gluon.jit
def _consume(
    given, places,
    CONSUMER: gl.constexpr, D: gl.constexpr, SILU: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Write every second tile of a program."""
    x, biases, shift, out, length, tokens = given
    tiles = (tokens + ROWS - 1) // ROWS
    first, stop = _items(tiles * (D // CHANNELS))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, _OUTPUT))
    channel = gl.arange(0, HALF, gl.SliceLayout(0, _OUTPUT))
    begun = 0
    for item in range(first + CONSUMER, stop, 2):
        block = item // tiles
        t = item % tiles * ROWS + row
        live = t < tokens
        p = t % length
        d = block * CHANNELS + channel
        at = t.to(gl.int64)[:, None] * D + d[None, :]
        value = _started(biases, block)
        inputs = _inputs(x, at, live, p, D), _inputs(x, at + HALF, live, p, D)
        value = _product(
            value, biases is not None, places, item, first, tiles, begun, CONSUMER, SLOTS
        )
        halves = _halves(value)
        for half in gl.static_range(2):
            here = None if shift is None else shift + d + half * HALF
            h = _preactivation(_taps(halves[half]), inputs[half], here)
            if SILU:
                # The sum may have overflowed.
                h = gl.where(h == -float("inf"), 0.0, h * sigmoid(h))
            gl.store(out + at + half * HALF, h.to(out.dtype.element_ty), mask=live[:, None])
        begun += 1


@gluon.jit
def _shifted(x):
    """Return every row's next row, among sixteen of a warp; the last has no next row."""
    by = gl.permute(gl.reshape(x, (WARPS, 2, 8, HALF)), (0, 2, 3, 1))
    even, odd = gl.split(by)
    # All threads of a warp must take part.
    low = gl.inline_asm_elementwise(_ROTATE, "=f,f,f", [even, odd], gl.float32, False, 1)
    high = gl.inline_asm_elementwise(_DOWN, "=f,f", [odd], gl.float32, False, 1)
    by = gl.permute(gl.join(low, high), (0, 3, 1, 2))
    return gl.convert_layout(gl.reshape(by, (ROWS, HALF)), _OUTPUT, assert_trivial=True)


@gluon.jit
def _pull(
    given, places,
    CONSUMER: gl.constexpr, D: gl.constexpr, SILU: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Write the cotangents of kernels and x for every second tile of a program."""
    x, biases, shift, dout, dkernels, dx, length, tokens, start, end = given
    tiles = (end - start + WARPS * OWN - 1) // (WARPS * OWN)
    first, stop = _items(tiles * (D // CHANNELS))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, _OUTPUT))
    channel = gl.arange(0, HALF, gl.SliceLayout(0, _OUTPUT))
    begun = 0
    for item in range(first + CONSUMER, stop, 2):
        block = item // tiles
        within = (item % tiles * WARPS + row // 16) * OWN + row % 16
        t = start + within
        live = t < tokens
        own = ((row % 16 < OWN) & (t < end))[:, None]
        p = t % length
        d = block * CHANNELS + channel
        at = t.to(gl.int64)[:, None] * D + d[None, :]
        place = within.to(gl.int64)[:, None] * (TAPS * D) + d[None, :]
        value = _started(biases, block)
        inputs = _inputs(x, at, live, p, D)
        v = gl.load(dout + at, mask=live[:, None], other=0.0)
        value = _product(
            value, biases is not None, places, item, first, tiles, begun, CONSUMER, SLOTS
        )
        halves = _halves(value)
        for half in gl.static_range(2):
            here = at + half * HALF
            if half == 1:
                inputs = _inputs(x, here, live, p, D)
                v = gl.load(dout + here, mask=live[:, None], other=0.0)
            taps = _taps(halves[half])
            v = as_held(v)
            if SILU:
                h = _preactivation(taps, inputs, None if shift is None else shift + d + half * HALF)
                s = sigmoid(h)
                v *= gl.where(gl.abs(h) == float("inf"), s, s * (1 + h * (1 - s)))
            if dkernels is not None:
                for w in gl.static_range(TAPS):
                    product = (v * as_held(inputs[w])).to(dkernels.dtype.element_ty)
                    gl.store(dkernels + place + (w * D + half * HALF), product, mask=own)
            if dx is not None:
                total = gl.where((p >= TAPS - 1)[:, None], v * taps[0], 0.0)
                for w in gl.static_range(1, TAPS):
                    reads = (p >= TAPS - 1 - w)[:, None]
                    total = _shifted(total) + gl.where(reads, v * taps[w], 0.0)
                gl.store(dx + here, total.to(dx.dtype.element_ty), mask=own)
        begun += 1


@gluon.jit
def _produce(
    hidden, weight, places, start, end,
    D: gl.constexpr, STEP: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Bring hidden for every tile, and the weight for every block of channels.

    Every box of hidden's rows is STEP rows behind the one before.
    """
    weights, ring, ready, full, empty, _ = places
    CHUNKS: gl.constexpr = weights.shape[0]
    BOX: gl.constexpr = hidden.block_shape[0]
    BOXES: gl.constexpr = ROWS // BOX
    tiles = (end - start + BOXES * STEP - 1) // (BOXES * STEP)
    first, stop = _items(tiles * (D // CHANNELS))
    for item in range(first, stop):
        n = (item - first) * CHUNKS
        block, tile = item // tiles, item % tiles
        if (item == first) | (tile == 0):
            # The previous weight is free once its last chunks of hidden are.
            for m in range(gl.maximum(n - SLOTS, 0), n):
                hopper.mbarrier.wait(empty.index(m % SLOTS), (m // SLOTS) & 1)
            hopper.mbarrier.expect(ready, 2 * CHUNKS * COLUMNS * CHUNK)
            for k in gl.static_range(CHUNKS):
                load(weight, [block * COLUMNS, k * CHUNK], ready, weights.index(k))
        for k in gl.static_range(CHUNKS):
            slot = (n + k) % SLOTS
            # At first, slots are empty.
            hopper.mbarrier.wait(empty.index(slot), (((n + k) // SLOTS) & 1) ^ 1)
            hopper.mbarrier.expect(full.index(slot), 2 * ROWS * CHUNK)
            for i in gl.static_range(BOXES):
                row = start + (tile * BOXES + i) * STEP
                to = ring.index(slot).slice(i * BOX, BOX)
                load(hidden, [row, k * CHUNK], full.index(slot), to)


@gluon.jit
def _shared(hidden, weight, H: gl.constexpr, SLOTS: gl.constexpr):
    """Return the weight's and hidden's places in shared memory, and barriers."""
    CHUNKS: gl.constexpr = (H + CHUNK - 1) // CHUNK
    weights = gl.allocate_shared_memory(weight.dtype, [CHUNKS, COLUMNS, CHUNK], weight.layout)
    ring = gl.allocate_shared_memory(hidden.dtype, [SLOTS, ROWS, CHUNK], hidden.layout)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    hopper.mbarrier.init(ready, count=1)
    for k in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(k), count=1)
        hopper.mbarrier.init(empty.index(k), count=1)
    for k in gl.static_range(2):
        hopper.mbarrier.init(turns.index(k), count=1)
    hopper.fence_async_shared()
    return weights, ring, ready, full, empty, turns


def forward(
    x, hidden, weight, biases, shift, out, length, tokens,
    H: gl.constexpr, D: gl.constexpr, SILU: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Write the convolution of sequences of one length."""
    places = _shared(hidden, weight, H, SLOTS)
    given = x, biases, shift, out, length, tokens
    gl.warp_specialize(
        [
            (_consume, (given, places, 0, D, SILU, SLOTS)),
            (_consume, (given, places, 1, D, SILU, SLOTS)),
            (_produce, (hidden, weight, places, 0, tokens, D, ROWS, SLOTS)),
        ],
        [WARPS, 1],
        REGISTERS,
    )


def inputs(
    x, hidden, weight, biases, shift, dout, dkernels, dx, length, tokens, start, end,
    H: gl.constexpr, D: gl.constexpr, SILU: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Write the cotangents of kernels and x for the tokens from start to end.

    The kernels' are laid out by tap, then channel.
    """
    places = _shared(hidden, weight, H, SLOTS)
    given = x, biases, shift, dout, dkernels, dx, length, tokens, start, end
    gl.warp_specialize(
        [
            (_pull, (given, places, 0, D, SILU, SLOTS)),
            (_pull, (given, places, 1, D, SILU, SLOTS)),
            (_produce, (hidden, weight, places, start, end, D, OWN, SLOTS)),
        ],
        [WARPS, 1],
        REGISTERS,
    )


# The rows of hidden's boxes.
BOX = {forward: ROWS.value, inputs: 16}
# These pointers are multiples of 16 bytes.
POINTERS = {
    forward: ("x", "biases", "shift", "out"),
    inputs: ("x", "biases", "shift", "dout", "dkernels", "dx"),
}
