"""The gated delta rule on the GPU: a few tokens one by one, and many in chunks.

Columns of a state don't depend on each other. So a program that takes token after token keeps a few
of them in registers. With more tokens the kernels of chunks.py serve, which make products of
matrices on tensor cores: of bfloat16 with sums in float32, of float16 in tf32, which has its digits
and the range of states, of float32 in float32's digits, and of float64.

Operations, times B·T·HV·K·V: token by token 7; in chunks forward 6, backward 20, and for the tokens
of a chunk among each other some of B·T·HV·C·(K + V). Arrays beside the arguments, by B·T·HV
numbers: K + V + C, backward twice that and C; of states K·V / C, backward twice that.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fusedops._frame.check import promoted
from fusedops._frame.registry import register
from fusedops.conv.plan import CHUNK
from fusedops.delta.op import delta_vjp
from gpukern.delta import chunks
from gpukern.delta.chunks import sequence_of
from gpukern.launch import (
    Launcher,
    begin_vectors,
    is_small,
    kernel_of_any_size,
    power,
    processors,
    wide,
)
from gpukern.precision import of_float32

# Entries of a state, in float32, that a program takes in a walk along tokens, unless an axis is
# long; and entries for which it has a further warp.
_WALK, _MOST = 1024, 2048
# The most tokens of a sequence that go one by one, and the fewest of a chunk.
_FEW = _LEAST = 32


@triton.jit
def _entries(states, number, head, key, value, strides):
    """Return pointers to a part of a state in an array (N, HV, K, V)."""
    states += number * strides[0] + head * strides[1]
    return states + key.to(tl.int64) * strides[2] + value.to(tl.int64) * strides[3]


@triton.jit
def _sum(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the rows of a tile, in several sums side by side, as an addition waits for the last."""
    if ROWS > 16:
        tile = tl.sum(tl.reshape(tile, (ROWS // 16, 16, COLUMNS)), 0)
    return tl.sum(tile, 0)


@triton.jit
def _token(arrays, strides, t, live, key, value, K: tl.constexpr, V: tl.constexpr):
    """Load a token's rows of two arrays with K columns and one with V, its gate and its beta."""
    one, other, row, g, beta = arrays
    return (
        tl.load(one + t * strides[0] + key, mask=(key < K) & live, other=0.0),
        tl.load(other + t * strides[1] + key, mask=(key < K) & live, other=0.0),
        tl.load(row + t * strides[2] + value, mask=(value < V) & live, other=0.0),
        tl.load(g + t * strides[3], mask=live, other=0.0),
        tl.load(beta + t * strides[4], mask=live, other=0.0),
    )


def _walk_kernel(
    q, k, v, g, beta, state, slots, starts, out, final_state,
    tokens, count,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    g_batch, g_token, g_head, b_batch, b_token, b_head,
    s_sequence, s_head, s_key, f_sequence, f_head, f_key,
    s_value: tl.constexpr, f_value: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, HV: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (V + VALUES - 1) // VALUES
    program = tl.program_id(0)
    key, value = tl.arange(0, KEYS), VALUES * (program % TILES) + tl.arange(0, VALUES)
    head = (program // TILES % HV).to(tl.int64)
    sequence = (program // (TILES * HV)).to(tl.int64)
    batch, begin, end = sequence_of(sequence, starts, tokens)
    slot, live = sequence, sequence >= 0
    if slots is not None:
        slot = tl.load(slots + sequence).to(tl.int64)
        live = (slot >= 0) & (slot < count)
        slot = tl.where(live, slot, 0)
    there = ((key < K) & live)[:, None] & (value < V)[None, :]
    keys, values = key[:, None], value[None, :]
    S = tl.zeros([KEYS, VALUES], FLOAT)
    if state is not None:
        strides = (s_sequence, s_head, s_key, s_value)
        given = _entries(state, slot, head, keys, values, strides)
        S = tl.load(given, mask=there, other=0.0).to(FLOAT)
    q += batch * q_batch + head // GROUP * q_head
    k += batch * k_batch + head // GROUP * k_head
    v += batch * v_batch + head * v_head
    g += batch * g_batch + head * g_head
    beta += batch * b_batch + head * b_head
    # Two tokens' loads are in flight while one is worked on.
    arrays = (k, q, v, g, beta)
    by_token = (k_token, q_token, v_token, g_token, b_token)
    now = _token(arrays, by_token, begin, begin < end, key, value, K, V)
    later = _token(arrays, by_token, begin + 1, begin + 1 < end, key, value, K, V)
    t = begin
    while t < end:
        k_t, q_t, v_t, g_t, b = now
        now, later = later, _token(arrays, by_token, t + 2, t + 2 < end, key, value, K, V)
        k_t = k_t.to(FLOAT)[:, None]
        S *= tl.exp(g_t.to(FLOAT))
        r = v_t.to(FLOAT) - _sum(S * k_t, KEYS, VALUES)
        S += k_t * (b.to(FLOAT) * r)[None, :]
        if out is not None:
            o = SCALE * _sum(S * q_t.to(FLOAT)[:, None], KEYS, VALUES)
            o = tl.where(live, o, 0.0)
            at = ((batch * tokens + t) * HV + head) * V + value
            tl.store(out + at, o.to(out.dtype.element_ty), mask=value < V)
        t += 1
    if final_state is not None:
        strides = (f_sequence, f_head, f_key, f_value)
        final = _entries(final_state, slot, head, keys, values, strides)
        tl.store(final, S.to(final_state.dtype.element_ty), mask=there)


_walk = {warps: Launcher(kernel_of_any_size(_walk_kernel), warps) for warps in (1, 2, 4, 8)}


class Tile(NamedTuple):
    """Keys and values that a program takes at once, its warps and stages."""

    keys: int
    values: int
    warps: int
    stages: int


#: By the bytes of a number in products.
TILES = {
    2: {
        "solve": Tile(64, 0, 2, 2),
        "prepare": Tile(64, 128, 4, 3),
        "read": Tile(64, 128, 4, 3),
        "gradients": Tile(64, 64, 4, 2),
    },
    4: {
        "solve": Tile(32, 0, 2, 2),
        "prepare": Tile(32, 32, 4, 2),
        "read": Tile(32, 32, 4, 2),
        "gradients": Tile(32, 32, 4, 2),
    },
    8: dict.fromkeys(("solve", "prepare", "read", "gradients"), Tile(16, 16, 2, 1)),
}
# The most tokens of a chunk, and the most values of a walk, and its warps.
_TOKENS, _WALKED, _WARPS = {2: 64, 4: 32, 8: 32}, {2: 64, 4: 16, 8: 16}, {2: 4, 4: 2, 8: 2}
# The most entries of a state that a walk takes, unless an axis is long, and the most keys.
_STATE, _LONG = 8192, 512
# Bytes of shared memory that a walk may take: on Hopper and B200, and on small GPUs.
_SHARED = {False: 200 << 10, True: 90 << 10}


def _sequences(a: Any) -> tuple[int, Any, Any]:
    """Return the number of sequences, and where packed ones and their chunks begin."""
    if a.sequences is None:
        return a.q.shape[0], None, None
    starts, listed = a.sequences.tensors_here()
    return min(starts.numel() - 1, a.sequences.num_sequences), starts, listed


def _walk_along(
    a: Any, count: int, starts: Any, state: Any, out: Any, final_state: Any, slots: Any = None
) -> None:
    """Launch the walk of `count` sequences, token by token."""
    q, k, v = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in a[:3])
    (T, H, K), (HV, V) = q.shape[1:], v.shape[2:]
    strides = [stride for x in (q, k, v, a.g, a.beta) for stride in x.stride()[:3]]
    for given in (state, final_state):
        strides += (0,) * 3 if given is None else given.stride()[:3]
    by_value = [1 if given is None else given.stride(3) for given in (state, final_state)]
    arrays = q, k, v, a.g, a.beta, state, slots, starts, out, final_state
    integers = T, 0 if state is None else len(state), *strides
    given = [x for x in arrays if x is not None and x.is_floating_point()]
    double = promoted(given) == torch.float64
    keys, words = power(K), 2 if double else 1
    values = min(power(V), max(8, min(16, _WALK // (keys * words))))
    warps = min(8, max(1, keys * values * words // _MOST))
    constants = *by_value, K, V, HV, HV // H, a.scale, keys, values
    constants += (tl.float64 if double else tl.float32,)
    dtypes = [None if array is None else array.dtype for array in arrays]
    key = q.device, *dtypes, wide(*integers), *constants
    if programs := count * HV * -(-V // values):
        _walk[warps](programs, key, *arrays, *integers, *constants)


class _Chunks:
    """A call in chunks: its contiguous arrays, sizes, and the types of its products."""

    def __init__(self, a: Any) -> None:
        (self.B, self.T, H, self.K), (self.HV, self.V) = a.q.shape, a.v.shape[2:]
        self.count, self.starts, self.listed = _sequences(a)
        self.device, kind = a.q.device, promoted(a[:3])
        self.float = torch.float64 if kind == torch.float64 else torch.float32
        #: The dtype of arrays that products read.
        self.kept = kind if kind == torch.bfloat16 else self.float
        self.tiles = TILES[self.kept.itemsize]
        self.keys = power(self.K, 16)
        self.walked = self._walked()
        #: The tokens of a chunk: none where a walk lacks shared memory.
        self.tokens = _TOKENS[self.kept.itemsize]
        while self.tokens and not self.stages(self.tokens):
            self.tokens = self.tokens // 2 if self.tokens > _LEAST else 0
        if not self.tokens:
            return
        self.q, self.k, self.v, self.g, self.beta = (x.contiguous() for x in a[:5])
        # float16 lacks the range of states. Inverses beside bfloat16 are of tf32, too.
        precision = "ieee" if kind == torch.float64 else "tf32"
        if kind == torch.float32:
            precision = of_float32(self.device)
        types = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
        # The interpreter multiplies the bits of bfloat16.
        dot = self.kept if a.q.is_cuda else self.float
        self.types = types[self.float], types[dot], precision
        self.sizes = self.K, self.V, self.HV, self.HV // H, a.scale, self.tokens
        self.parts = CHUNK // self.tokens
        if self.listed is None:
            self.number = self.B * -(-self.T // self.tokens)
        else:
            self.number = len(self.listed) * self.parts

    def _walked(self) -> int:
        """Return the values that a program of a walk takes; few if programs are few."""
        values = min(_WALKED[self.kept.itemsize], power(self.V, 16))
        values = min(values, max(16, _STATE // self.keys))
        there = processors(self.device)
        while values > 16 and self.count * self.HV * -(-self.V // values) < there:
            values //= 2
        return values

    def stages(self, tokens: int) -> int:
        """Return the stages of a walk; none if its factors lack shared memory."""
        itemsize = self.kept.itemsize
        room = _SHARED[is_small(self.device)] - itemsize * self.keys * self.walked
        if self.keys > _LONG or room < itemsize * tokens * self.keys:
            return 0
        # Several have the rows of three arrays of keys and of two of values each.
        each = itemsize * tokens * (3 * self.keys + 2 * self.walked)
        return max(1, min(3, room // each))

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.kept, device=self.device)

    def of_tokens(self, size: int) -> torch.Tensor:
        return self.empty(self.B, self.T, self.HV, size)

    def gates(self) -> torch.Tensor:
        """Return room for the sums of gates, which have more digits than their differences need."""
        dtype = torch.float32 if self.kept == torch.bfloat16 else torch.float64
        return self.empty(self.B, self.T, self.HV, dtype=dtype)

    def states(self) -> torch.Tensor:
        """Return room for the state of every chunk."""
        rows = self.B * self.T // self.tokens + self.count
        return self.empty(rows, self.HV, self.K, self.V)

    def launch(
        self, name: str, programs: int, arrays: Any, integers: Any, constants: Any, *how: int
    ) -> None:
        dtypes = [None if array is None else array.dtype for array in arrays]
        key = self.device, *dtypes, wide(*integers), *constants
        launcher = _launcher(name, begin_vectors(arrays), *how)
        launcher(programs * self.HV, key, *arrays, *integers, *constants)

    def launch_chunks(self, name: str, *arrays: Any, tiled: bool = False) -> None:
        """Launch a kernel for every chunk, or for every tile of a chunk's values."""
        tile = self.tiles[name]
        keys, values = min(tile.keys, self.keys), min(tile.values, power(self.V, 16))
        constants = *self.sizes, self.parts, keys, values, *self.types
        programs = self.number * -(-self.V // values) if tiled else self.number
        stages = min(tile.stages, 2) if is_small(self.device) else tile.stages
        self.launch(name, programs, arrays, (self.count, self.T), constants, tile.warps, stages)

    def prepare(self, gates: Any, x: Any, *, back: bool) -> tuple[Any, Any]:
        """Return the response and the values of a walk without a state, from v or dout."""
        solved = self.of_tokens(self.tokens)
        mixed = self.of_tokens(self.tokens) if back else None
        response, found = self.of_tokens(self.K), self.of_tokens(self.V)
        chunks = self.starts, self.listed
        given = self.q, self.k, self.g, self.beta, *chunks, gates, solved, mixed
        self.launch_chunks("solve", *given)
        given = self.k, x, gates, *chunks, solved, mixed
        self.launch_chunks("prepare", *given, response, found)
        return response, found

    def walk(
        self, gates: Any, response: Any, found: Any, given: Any, final: Any, states: Any, dout: Any
    ) -> None:
        """Complete what was found without states, by a walk from a given state to a final one."""
        arrays = self.q, self.k, dout, gates, self.beta, response, found, given, self.starts
        steps = None if found.is_cuda else -(-self.T // self.tokens)
        constants = *self.sizes, self.keys, self.walked, steps, *self.types
        programs = self.count * -(-self.V // self.walked)
        how = _WARPS[self.kept.itemsize], self.stages(self.tokens)
        self.launch("walk", programs, (*arrays, states, final), (self.T,), constants, *how)


@functools.cache
def _launcher(name: str, vectors: bool, warps: int, stages: int) -> Launcher:
    """Return the launcher of a kernel; for vectors all pointers are multiples of 16 bytes."""
    function = getattr(chunks, name)
    pointers = {*inspect.signature(function).parameters} - {*chunks.NUMBERS} if vectors else ()
    return Launcher(kernel_of_any_size(function, pointers), warps, stages=stages)


@register("gated_delta_rule", "triton")
def gated_delta_rule(a: Any, y: Any) -> None:
    count, starts, _ = _sequences(a)
    many = a.q.shape[0] * a.q.shape[1] > _FEW * count
    call = _Chunks(a) if many and a.v.numel() else None
    if call is None or not call.tokens:
        _walk_along(a, count, starts, a.initial_state, y.out, y.final_state)
        return
    gates = call.gates()
    response, missed = call.prepare(gates, call.v, back=False)
    given = None if a.initial_state is None else a.initial_state.contiguous()
    states = None if y.out is None else call.states()
    call.walk(gates, response, missed, given, y.final_state, states, None)
    if y.out is not None:
        arrays = call.q, call.k, gates, call.beta, missed, states, call.starts, call.listed, y.out
        call.launch_chunks("read", *arrays, tiled=True)


@register("gated_delta_rule_vjp", "triton")
def gated_delta_rule_vjp(a: Any, y: Any) -> None:
    call, dout = _Chunks(a), a.dout.contiguous()
    if not (call.tokens and a.v.numel()):
        for made, value in zip(y, delta_vjp.formula(a), strict=True):
            if made is not None:
                made.copy_(value)
        return
    given, dfinal = (
        None if state is None else state.contiguous() for state in (a.initial_state, a.dfinal_state)
    )
    gates, states, dstates = call.gates(), call.states(), call.states()
    response, missed = call.prepare(gates, call.v, back=False)
    call.walk(gates, response, missed, given, None, states, None)
    response, pulled = call.prepare(gates, dout, back=True)
    call.walk(gates, response, pulled, dfinal, y.dinitial_state, dstates, dout)
    heads, group = a.q.shape[2], call.HV // a.q.shape[2]
    # Each head of v has its part of the cotangents of a head that it shares.
    parts = [
        dx if dx is None or group == 1 else call.empty(*a.v.shape[:3], call.K, dtype=call.float)
        for dx in (y.dq, y.dk)
    ]
    arrays = call.q, call.k, gates, call.beta, dout, missed, pulled, states, dstates
    arrays += call.starts, call.listed, *parts, y.dv, y.dg, y.dbeta
    call.launch_chunks("gradients", *arrays)
    for dx, part in zip((y.dq, y.dk), parts, strict=True):
        if dx is not None and part is not dx:
            dx.copy_(part.view(*part.shape[:2], heads, group, call.K).sum(3))


@register("gated_delta_rule_step", "triton")
def gated_delta_rule_step(a: Any, y: Any) -> None:
    slots = None if a.slots is None else a.slots.contiguous()
    if a.q.ndim == 3:
        tokens = {name: x[:, None] for name, x in zip(a._fields[:5], a, strict=False)}
        a = a._replace(**tokens)
    _walk_along(a, len(a.q), None, a.state, y.out, a.state, slots)
