"""Convolutions with generated kernels, for Hopper's tensor cores.

A program takes runs: some channels, whose rows of the weight stay in shared memory, and a chunk of
tokens. Two or three consumers of four warps multiply in turns: one has the tensor cores, while the
others finish outputs. One more warp brings hidden, in a ring. Every warp of a consumer has a
segment of the chunk's tokens, and goes through it from its end, sixteen tokens at a step. So the
backward keeps the sums that belong to the tokens before, which come next.

The weight's rows are in such an order that a thread finds all taps of eight neighbouring channels
in its part of the product, so that it reads and writes vectors.
"""

from __future__ import annotations

import functools
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gpukern.hopper import REGISTERS, SHARED, TILE, as_held, load, sigmoid
from gpukern.trimul.plan import ceil

# Tokens of a warp and of a consumer at a step, channels of a program, and taps of a channel.
STEP, ROWS, CHANNELS, TAPS = map(gl.constexpr, (16, 64, 32, 4))
# Numbers of hidden that pass through shared memory at once.
CHUNK = gl.constexpr(64)
# Consumers of the forward, and of the backward, of which three would spill registers.
_FORTH, _BACK = map(gl.constexpr, (3, 2))
# Warps of a consumer, and registers of a thread where there are three: of the second and third one,
# which leave the first one more, and of the warp that fills the ring.
WARPS = gl.constexpr(4)
_REGISTERS = gl.constexpr((160, 160, 24))
COLUMNS = gl.constexpr(CHANNELS.value * TAPS.value)
# The most chunks of hidden in the ring.
_SLOTS = 12

_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
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
# The first eight, or the last eight, of every warp's rows.
_EIGHT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]],
        [],
        [32, 32],
    )
)
_SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

# Four threads hold a row.
_ROTATE = gl.constexpr(
    """{ .reg .u32 l; .reg .pred p; .reg .b32 s; mov.u32 l, %laneid; setp.lt.u32 p, l, 4;
    selp.b32 s, $2, $1, p; add.u32 l, l, 4; shfl.sync.idx.b32 $0, s, l, 31, -1; }"""
)


def slots(kernel: Any, H: int) -> int:
    """Return the chunks of hidden that fit in the ring, beside the weight and sums."""
    chunks = ceil(H, CHUNK.value)
    sums = 4 * CONSUMERS[inputs] * COLUMNS.value * 8 * WARPS.value if kernel is inputs else 0
    # The rest is for barriers.
    rows = (SHARED - 1024 - sums) // (2 * CHUNK.value)
    return min(_SLOTS, (rows - chunks * COLUMNS.value) // ROWS.value)


@functools.lru_cache(256)
def split(kernel: Any, tokens: int, blocks: int, programs: int) -> tuple[int, int]:
    """Return the chunks of tokens, and the steps of their segments, that end first.

    In the backward, segments overlap. A run's weight takes about as long as a step.
    """
    overlap = TAPS.value - 1 if kernel is inputs else 0
    each = CONSUMERS[kernel] * WARPS.value

    def steps(chunks: int) -> int:
        return ceil(ceil(tokens, chunks * each) + overlap, STEP.value)

    def time(chunks: int) -> int:
        return ceil(chunks * blocks, programs) * (steps(chunks) + 1)

    # Offsets within a chunk, and a step beyond, are numbers of 32 bits.
    width = blocks * CHANNELS.value * (TAPS.value if kernel is inputs else 1)
    fewest = ceil(tokens, max(2**31 // width - 2 * STEP.value * each, 1))
    chunks = min(range(fewest, fewest + programs), key=time)
    return chunks, steps(chunks)


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
    """Return the taps in a product's columns, by channel, where they are."""
    one, two = _halves(x)
    columns = _halves(one) + _halves(two)
    taps = ()
    for w in gl.static_range(TAPS):
        by = gl.permute(gl.reshape(columns[w], (ROWS, 4, 4, 2)), (0, 2, 1, 3))
        by = gl.convert_layout(gl.reshape(by, (ROWS, CHANNELS)), _OUTPUT, assert_trivial=True)
        taps = taps + (by,)
    return taps


@gluon.jit
def _eights(x):
    """Return the first and the last eight of every warp's rows."""
    by = gl.permute(gl.reshape(x, (WARPS, 2, 8, CHANNELS)), (0, 2, 3, 1))
    one, two = gl.split(by)
    one, two = gl.reshape(one, (8 * WARPS, CHANNELS)), gl.reshape(two, (8 * WARPS, CHANNELS))
    return (
        gl.convert_layout(one, _EIGHT, assert_trivial=True),
        gl.convert_layout(two, _EIGHT, assert_trivial=True),
    )


@gluon.jit
def _joined(first, last):
    """Return the rows of which these are the first and the last eight of every warp."""
    by = gl.reshape(gl.join(first, last), (WARPS, 8, CHANNELS, 2))
    by = gl.reshape(gl.permute(by, (0, 3, 1, 2)), (ROWS, CHANNELS))
    return gl.convert_layout(by, _OUTPUT, assert_trivial=True)


@gluon.jit
def _next(eight, above):
    """Return the next row of each of eight; the last one's is the first of those above."""
    # All threads of a warp must take part.
    return gl.inline_asm_elementwise(_ROTATE, "=f,f,f", [eight, above], gl.float32, False, 1)


@gluon.jit
def _moved(rows, by, width: gl.constexpr):
    """Return the pointer to rows that begin so many later."""
    return rows + by.to(gl.int64) * width


@gluon.jit
def _started(biases, block):
    """Return the biases of a product, or zeros."""
    value = gl.zeros((ROWS, COLUMNS), gl.float32, _PRODUCT)
    if biases is not None:
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, _PRODUCT))
        started = gl.load(biases + block * COLUMNS + column).to(gl.float32)
        value, _ = gl.broadcast(started[None, :], value)
    return value


@gluon.jit
def _product(
    value, use, places, runs, done,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Return a step's product, when it is this consumer's turn.

    The step is the consumer's done-th of a program, in the runs-th run.
    """
    weights, ring, ready, full, empty, turns = places
    CHUNKS: gl.constexpr = weights.shape[0]
    FIRST: gl.constexpr = 1 if CONSUMER == 0 else 0
    n = (done * CONSUMERS + CONSUMER) * CHUNKS
    hopper.mbarrier.wait(turns.index(CONSUMER), (done & 1) ^ FIRST)
    # Wait for the weight only after the other's step: before, the barrier may still be in the phase
    # of the previous run, whose weight would be taken for this one.
    hopper.mbarrier.wait(ready, runs & 1)
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
    hopper.mbarrier.arrive(turns.index((CONSUMER + 1) % CONSUMERS), count=1)
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
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, SILU: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Write the outputs of a consumer."""
    x, biases, shift, out, length, tokens, chunks, steps = given
    row = gl.arange(0, ROWS, gl.SliceLayout(1, _OUTPUT))
    channel = gl.arange(0, CHANNELS, gl.SliceLayout(0, _OUTPUT))
    own = steps * STEP
    segment = (CONSUMER * WARPS + row // STEP) * own
    done, runs = 0, 0
    for run in range(gl.program_id(0), chunks * (D // CHANNELS), gl.num_programs(0)):
        block = run % (D // CHANNELS)
        d = block * CHANNELS + channel
        begin = run // (D // CHANNELS) * (CONSUMERS * WARPS * own)
        x_here, out_here = _moved(x, begin, D), _moved(out, begin, D)
        for step in range(steps):
            within = segment + (steps - 1 - step) * STEP + row % STEP
            t = begin + within
            live = t < tokens
            p = t % length
            at = within[:, None] * D + d[None, :]
            value = _started(biases, block)
            inputs = _inputs(x_here, at, live, p, D)
            value = _product(
                value, biases is not None, places, runs, done, CONSUMER, CONSUMERS, SLOTS
            )
            here = None if shift is None else shift + d
            h = _preactivation(_taps(value), inputs, here)
            if SILU:
                # The sum may have overflowed.
                h = gl.where(h == -float("inf"), 0.0, h * sigmoid(h))
            gl.store(out_here + at, h.to(out.dtype.element_ty), mask=live[:, None])
            done += 1
        runs += 1


@gluon.jit
def _pull(
    given, places, held,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, SILU: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Write the cotangents of kernels and x of a consumer, and sums of those of kernels."""
    x, biases, shift, dout, dkernels, dx, sums, length, tokens, start, end, chunks, steps = given
    row = gl.arange(0, ROWS, gl.SliceLayout(1, _OUTPUT))
    channel = gl.arange(0, CHANNELS, gl.SliceLayout(0, _OUTPUT))
    none = gl.zeros((8 * WARPS, CHANNELS), gl.float32, _EIGHT)
    own = steps * STEP - (TAPS - 1)
    segment = (CONSUMER * WARPS + row // STEP) * own
    done, runs = 0, 0
    for run in range(gl.program_id(0), chunks * (D // CHANNELS), gl.num_programs(0)):
        block = run % (D // CHANNELS)
        d = block * CHANNELS + channel
        begin = run // (D // CHANNELS) * (CONSUMERS * WARPS * own)
        x_here, dout_here = _moved(x, start + begin, D), _moved(dout, start + begin, D)
        if dkernels is not None:
            dkernels_here = _moved(dkernels, begin, TAPS * D)
        if dx is not None:
            dx_here = _moved(dx, start + begin, D)
        if sums is not None:
            for w in gl.static_range(TAPS):
                held.index(CONSUMER * TAPS + w).store(none)
        above = none
        for step in range(steps):
            place = row % STEP + (steps - 1 - step) * STEP
            within = segment + place
            t = start + begin + within
            live = t < tokens
            mine = ((place < own) & (t < end))[:, None]
            p = t % length
            at = within[:, None] * D + d[None, :]
            value = _started(biases, block)
            inputs = _inputs(x_here, at, live, p, D)
            v = gl.load(dout_here + at, mask=live[:, None], other=0.0)
            value = _product(
                value, biases is not None, places, runs, done, CONSUMER, CONSUMERS, SLOTS
            )
            taps = _taps(value)
            v = as_held(v)
            if SILU:
                h = _preactivation(taps, inputs, None if shift is None else shift + d)
                s = sigmoid(h)
                v *= gl.where(gl.abs(h) == float("inf"), s, s * (1 + h * (1 - s)))
            # Sums for rows, and those of eight rows before them, which the next step needs.
            first, last, before = none, none, none
            for w in gl.static_range(TAPS):
                if dkernels is not None:
                    product = v * as_held(inputs[w])
                    to = dkernels_here + (within[:, None] * (TAPS * D) + (d + w * D)[None, :])
                    gl.store(to, product.to(dkernels.dtype.element_ty), mask=mine)
                    if sums is not None:
                        one, two = _eights(gl.where(mine, product, 0.0))
                        sum = held.index(CONSUMER * TAPS + w)
                        sum.store(sum.load(_EIGHT) + (one + two))
                if dx is not None:
                    reads = (p >= TAPS - 1 - w)[:, None]
                    one, two = _eights(gl.where(reads, v * taps[w], 0.0))
                    if w > 0:
                        before = _next(before, first)
                        one += _next(first, last)
                        two += _next(last, none)
                    first, last = one, two
            if dx is not None:
                total = _joined(first, last + above)
                above = before
                gl.store(dx_here + at, total.to(dx.dtype.element_ty), mask=mine)
            done += 1
        if sums is not None:
            first = (run // (D // CHANNELS) * CONSUMERS + CONSUMER) * WARPS
            for w in gl.static_range(TAPS):
                by = held.index(CONSUMER * TAPS + w).load(_EIGHT)
                by = gl.sum(gl.reshape(by, (WARPS, 8, CHANNELS)), 1)
                warp = gl.arange(0, WARPS, gl.SliceLayout(1, by.type.layout))
                channel_of = gl.arange(0, CHANNELS, gl.SliceLayout(0, by.type.layout))
                to = ((first + warp) * TAPS + w)[:, None] * D + block * CHANNELS
                gl.store(sums + (to + channel_of[None, :]), by)
        runs += 1


@gluon.jit
def _produce(
    hidden, weight, places, start, chunks, steps, own,
    CONSUMERS: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Bring the weight for every run, and hidden for every step."""
    weights, ring, ready, full, empty, _ = places
    CHUNKS: gl.constexpr = weights.shape[0]
    n = 0
    for run in range(gl.program_id(0), chunks * (D // CHANNELS), gl.num_programs(0)):
        # The previous weight is free once its last chunks of hidden are.
        for m in range(gl.maximum(n - SLOTS, 0), n):
            hopper.mbarrier.wait(empty.index(m % SLOTS), (m // SLOTS) & 1)
        hopper.mbarrier.expect(ready, 2 * CHUNKS * COLUMNS * CHUNK)
        for k in gl.static_range(CHUNKS):
            row = run % (D // CHANNELS) * COLUMNS
            load(weight, [row, k * CHUNK], ready, weights.index(k))
        for step in range(steps):
            for consumer in range(CONSUMERS):
                segment = (run // (D // CHANNELS) * CONSUMERS + consumer) * (WARPS * own)
                first = start + segment + (steps - 1 - step) * STEP
                for k in gl.static_range(CHUNKS):
                    slot = (n + k) % SLOTS
                    # At first, slots are empty.
                    hopper.mbarrier.wait(empty.index(slot), (((n + k) // SLOTS) & 1) ^ 1)
                    hopper.mbarrier.expect(full.index(slot), 2 * ROWS * CHUNK)
                    for warp in gl.static_range(WARPS):
                        to = ring.index(slot).slice(warp * STEP, STEP)
                        load(hidden, [first + warp * own, k * CHUNK], full.index(slot), to)
                n += CHUNKS


@gluon.jit
def _shared(hidden, weight, CONSUMERS: gl.constexpr, H: gl.constexpr, SLOTS: gl.constexpr):
    """Return the weight's and hidden's places in shared memory, and barriers."""
    CHUNKS: gl.constexpr = (H + CHUNK - 1) // CHUNK
    weights = gl.allocate_shared_memory(weight.dtype, [CHUNKS, COLUMNS, CHUNK], weight.layout)
    ring = gl.allocate_shared_memory(hidden.dtype, [SLOTS, ROWS, CHUNK], hidden.layout)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barrier)
    hopper.mbarrier.init(ready, count=1)
    for k in gl.static_range(SLOTS):
        hopper.mbarrier.init(full.index(k), count=1)
        hopper.mbarrier.init(empty.index(k), count=1)
    for k in gl.static_range(CONSUMERS):
        hopper.mbarrier.init(turns.index(k), count=1)
    hopper.fence_async_shared()
    return weights, ring, ready, full, empty, turns


def forward(
    x, hidden, weight, biases, shift, out, length, tokens, chunks, steps,
    H: gl.constexpr, D: gl.constexpr, SILU: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Write the convolution of sequences of one length."""
    places = _shared(hidden, weight, _FORTH, H, SLOTS)
    given = x, biases, shift, out, length, tokens, chunks, steps
    gl.warp_specialize(
        [
            (_consume, (given, places, 0, _FORTH, D, SILU, SLOTS)),
            (_consume, (given, places, 1, _FORTH, D, SILU, SLOTS)),
            (_consume, (given, places, 2, _FORTH, D, SILU, SLOTS)),
            (_produce, (hidden, weight, places, 0, chunks, steps, steps * STEP, _FORTH, D, SLOTS)),
        ],
        [WARPS, WARPS, 1],
        _REGISTERS,
    )


def inputs(
    x, hidden, weight, biases, shift, dout, dkernels, dx, sums, length, tokens, start, end,
    chunks, steps,
    H: gl.constexpr, D: gl.constexpr, SILU: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Write the cotangents of kernels and x for the tokens from start to end.

    The kernels', and their sums over a segment's tokens, are laid out by tap, then channel.
    """
    places = _shared(hidden, weight, _BACK, H, SLOTS)
    held = gl.allocate_shared_memory(gl.float32, [_BACK * TAPS, 8 * WARPS, CHANNELS], _SUMS)
    given = x, biases, shift, dout, dkernels, dx, sums, length, tokens, start, end, chunks, steps
    own = steps * STEP - (TAPS - 1)
    gl.warp_specialize(
        [
            (_pull, (given, places, held, 0, _BACK, D, SILU, SLOTS)),
            (_pull, (given, places, held, 1, _BACK, D, SILU, SLOTS)),
            (_produce, (hidden, weight, places, start, chunks, steps, own, _BACK, D, SLOTS)),
        ],
        [WARPS, 1],
        REGISTERS,
    )


CONSUMERS = {forward: _FORTH.value, inputs: _BACK.value}
# These pointers are multiples of 16 bytes.
POINTERS = {
    forward: ("x", "biases", "shift", "out"),
    inputs: ("x", "biases", "shift", "dout", "dkernels", "dx", "sums"),
}
