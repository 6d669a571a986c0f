"""Convolutions with generated kernels on the CPU: a block of tokens at a time, in scratch memory.

A block's kernels are a product, and stay in the cache for the convolution, by a kernel in
``cpukern/conv``. The inputs before a block are its state. In the backward a block's
cotangents of its state go to the tokens before it, once all blocks are done. Threads share blocks;
the weight has a partial sum for each of a fixed number of groups of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cpukern.products import ByNumpy, of_tensors, share_groups
from fusedops._host import memory
from fusedops._host.threads import blas_has_a_limit
from fusedops.conv import Sequences
from fusedops.conv.op import conv, conv_vjp

# Numbers of kernels that a block has in the cache.
_CACHED = 1 << 20
# The fewest tokens of a block, for fast products, and the most.
_FEW, _MANY = 64, 1 << 12
# The fewest blocks, for threads to share, unless the tokens are too few.
_BLOCKS = 8
# The most groups of blocks; their partial sums have at most 1/_SHARE of the kernels' numbers.
_GROUPS, _SHARE = 16, 8


class _Call:
    """A call's arguments as rows of tokens, and the division of tokens into blocks."""

    def __init__(self, a: Any, tensors: bool) -> None:
        B, T, self.D = a.x.shape
        self.N, self.H = B * T, a.hidden.shape[2]
        self.W = a.weight.shape[0] // self.D
        self.dtype, self.activation = a.x.dtype, a.activation
        self.x, self.hidden = _rows(a.x), _rows(a.hidden)
        self.bias, self.conv_bias, self.state = a.bias, a.conv_bias, a.initial_state
        self.weight = np.ascontiguousarray(a.weight)
        starts = T * np.arange(B + 1)
        if a.sequences is not None:
            starts = a.sequences.cu_seqlens[: a.sequences.num_sequences + 1]
        empty = np.diff(starts) == 0
        #: The sequences without tokens, the sequences with tokens, and where these begin.
        self.empty, self.own = np.flatnonzero(empty), np.flatnonzero(~empty)
        self.starts = np.append(starts[:-1][~empty], self.N)
        most = min(max(_FEW, _CACHED // max(self.D * self.W, 1)), _MANY)
        self.block = min(most, max(_FEW, -(-self.N // _BLOCKS)))
        if not blas_has_a_limit():
            # BLAS shares one large product among its own threads.
            self.block = most
        self.blocks = -(-self.N // self.block)
        work = self.block * self.weight.size
        self.by = of_tensors(self.dtype, work) if tensors else ByNumpy

    def over_groups(self, groups: int, work: Callable[[int, _Block], None]) -> None:
        """Call ``work(group, block)`` on all blocks, in order within a group."""

        def share(low: int, high: int) -> None:
            room: dict[str, np.ndarray] = {}
            for g in range(low, high):
                for b in range(self.blocks * g // groups, self.blocks * (g + 1) // groups):
                    work(g, _Block(self, b, room))

        share_groups(self.by, groups, share)


class _Block:
    """A run of tokens, which may begin and end within a sequence."""

    def __init__(self, call: _Call, b: int, room: dict[str, np.ndarray]) -> None:
        self.call, self.room = call, room
        self.low = b * call.block
        self.high = min(self.low + call.block, call.N)
        self.tokens = slice(self.low, self.high)
        self.first = int(np.searchsorted(call.starts, self.low, side="right")) - 1
        last = int(np.searchsorted(call.starts, self.high))
        #: The sequences that have tokens here, and those of them that end here.
        self.own = call.own[self.first : last]
        self.ended = self.own[: len(self.own) - (call.starts[last] > self.high)]
        #: How many tokens of the first sequence come before.
        self.before = self.low - int(call.starts[self.first])
        self.sequences = None
        if len(self.own) > 1:
            bounds = np.clip(call.starts[self.first : last + 1], self.low, self.high)
            self.sequences = Sequences(bounds - self.low)

    def scratch(self, name: str, *shape: int) -> np.ndarray:
        """Return memory of a name, which the next block of a thread uses again."""
        array = self.room.get(name)
        if array is None or len(array) < shape[0]:
            array = self.room[name] = memory.empty(shape, self.call.dtype)
        return array[: shape[0]]

    def arguments(self) -> tuple[Any, ...]:
        """Return x, kernels, state and bias of the block's convolution."""
        call = self.call
        n, rows = self.high - self.low, call.D * call.W
        kernels = self.scratch("kernels", n, rows)
        call.by.dot(call.hidden[self.tokens], call.weight.T, kernels)
        if call.bias is not None:
            kernels += call.bias
        kernels = kernels.reshape(1, n, call.D, call.W)
        return call.x[None, self.tokens], kernels, self._state(), call.conv_bias

    def _state(self) -> Any:
        """Return the W inputs before each sequence's tokens in the block."""
        call, W = self.call, self.call.W
        if call.state is None and not self.before:
            return None
        shape = len(self.own), call.D, W
        state = np.zeros(shape, call.dtype) if call.state is None else call.state[self.own]
        known = min(self.before, W)
        if known:
            state[0, :, : W - known] = state[0, :, known:].copy()
            state[0, :, W - known :] = call.x[self.low - known : self.low].T
        return state


def _rows(array: Any) -> Any:
    """Return (B, T, C) as contiguous rows (B T, C)."""
    return np.ascontiguousarray(array).reshape(array.shape[0] * array.shape[1], array.shape[2])


def _fill_tokenless(states: Any, given: Any, call: _Call) -> None:
    if states is not None:
        states[call.empty] = 0 if given is None else given[call.empty]


def forward(convolve: Callable[[Any, Any], None], a: Any, y: Any, *, tensors: bool = False) -> None:
    """Fill the convolution and the final state by a kernel of `dynamic_conv`."""
    call = _Call(a, tensors)
    out = None if y.out is None else y.out.reshape(call.N, call.D)
    _fill_tokenless(y.final_state, a.initial_state, call)

    def work(_: int, block: _Block) -> None:
        made = None if out is None else out[None, block.tokens]
        final = None
        if y.final_state is not None:
            final = block.scratch("final", len(block.own), call.D, call.W)
        given = conv.Arguments(*block.arguments(), None, block.sequences, call.activation)
        convolve(given, conv.Outputs(made, final))
        if final is not None:
            y.final_state[block.ended] = final[: len(block.ended)]

    call.over_groups(call.blocks, work)


def backward(pull: Callable[[Any, Any], None], a: Any, y: Any, *, tensors: bool = False) -> None:
    """Fill the cotangents that are wanted by a kernel of `dynamic_conv`'s gradient."""
    call = _Call(a, tensors)
    dout = _rows(a.dout)
    dx = None if y.dx is None else y.dx.reshape(call.N, call.D)
    dhidden = None if y.dhidden is None else y.dhidden.reshape(call.N, call.H)
    dstate, wants_inputs = y.dinitial_state, y.dx is not None or y.dinitial_state is not None
    wants_generator = any([d is not None for d in (y.dhidden, y.dweight, y.dbias)])
    _fill_tokenless(dstate, a.dfinal_state, call)
    groups = call.blocks
    if any([d is not None for d in (y.dweight, y.dbias, y.dconv_bias)]):
        groups = min(groups, _GROUPS, max(2, call.N // max(_SHARE * call.H, 1)))
    sums: list[dict[str, Any]] = [{} for _ in range(groups)]
    carried: list[tuple[_Block, np.ndarray]] = []

    def work(g: int, block: _Block) -> None:
        n, rows, own = block.high - block.low, call.D * call.W, len(block.own)
        dkernels: Any = block.scratch("dkernels", n, rows) if wants_generator else None
        block_dstate: Any = block.scratch("dstate", own, call.D, call.W) if wants_inputs else None
        block_dbias = None if y.dconv_bias is None else np.empty(call.D, call.dtype)
        dfinal = None
        if a.dfinal_state is not None:
            dfinal = np.zeros((own, call.D, call.W), call.dtype)
            dfinal[: len(block.ended)] = a.dfinal_state[block.ended]
        taken = *block.arguments(), dout[None, block.tokens], dfinal
        made = (
            None if dx is None else dx[None, block.tokens],
            None if dkernels is None else dkernels.reshape(1, n, call.D, call.W),
            block_dstate,
            block_dbias,
        )
        pull(conv_vjp.Arguments(*taken, block.sequences, call.activation), conv_vjp.Outputs(*made))
        if block_dstate is not None and block.before:
            carried.append((block, block_dstate[0].copy()))
        if dstate is not None:
            begun = slice(1 if block.before else 0, None)
            dstate[block.own[begun]] = block_dstate[begun]
        total = sums[g]
        if block_dbias is not None:
            total["conv_bias"] = total.get("conv_bias", 0) + block_dbias.astype(np.float64)
        if y.dbias is not None:
            total["bias"] = total.get("bias", 0) + dkernels.sum(0).astype(np.float64)
        if y.dweight is not None:
            product = call.by.dot(dkernels.T, call.hidden[block.tokens])
            if "weight" in total:
                total["weight"] += product
            else:
                total["weight"] = product
        if dhidden is not None:
            call.by.dot(dkernels, call.weight, dhidden[block.tokens])

    call.over_groups(groups, work)
    # In one order, whichever thread was first.
    for block, block_dstate in sorted(carried, key=lambda pair: pair[0].low):
        _carry(call, block, block_dstate, dx, dstate)
    for name in ("weight", "bias", "conv_bias"):
        made = getattr(y, f"d{name}")
        if made is not None:
            made[...] = sum([total[name] for total in sums if name in total])


def _carry(call: _Call, block: _Block, block_dstate: np.ndarray, dx: Any, dstate: Any) -> None:
    """Add the cotangents of the inputs before a block to those of the tokens, or of the state."""
    known = min(block.before, call.W)
    if dx is not None:
        dx[block.low - known : block.low] += block_dstate[:, call.W - known :].T
    if dstate is not None:
        dstate[block.own[0], :, known:] += block_dstate[:, : call.W - known]
