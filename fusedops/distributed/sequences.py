"""The causal convolution of tokens that ranks share.

A rank needs W − 1 inputs before its first token, the halo. They travel while a GPU computes all
tokens of the rank as if zeros came before them; then it computes the first ones, the head, again,
with the halo as the initial state of its sequences. A rank of no more tokens than that waits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fusedops._frame import registry
from fusedops._frame.check import on_host
from fusedops._frame.hook import outside_of_graphs
from fusedops._frame.kinds import Plans, kind_of
from fusedops._frame.registry import BackendName
from fusedops.conv import Sequences
from fusedops.conv import dynamic_conv as _on_one
from fusedops.conv.op import conv, conv_vjp
from fusedops.conv.plan import CHUNK
from fusedops.distributed.exchanges import (
    Trip,
    agree,
    all_to_all,
    by_graph,
    checked_sizes,
    checks_ranks,
    group_of,
    in_chunks,
    tensor,
)

_NAME = "dynamic_conv"

#: The kinds of calls whose arguments were checked.
_checked: Plans[bool] = Plans()


def _starts(sequences: Sequences) -> np.ndarray:
    """Return where sequences begin, and where the last one ends, on the CPU."""
    return on_host(sequences.arrays()[0])


def _locals(sequences: Sequences) -> dict[tuple[int, int], tuple[Sequences, int]]:
    """Return a place for the parts of sequences that ranks have."""
    return {}


def _part_of(sequences: Sequences, low: int, high: int) -> tuple[Sequences, int]:
    """Return the sequences between two tokens, and how much the first has before them.

    Made once for every pair of tokens.
    """
    kept = sequences.derived(_locals)
    if (low, high) not in kept:
        starts = sequences.derived(_starts)
        here = np.flatnonzero((starts[:-1] < high) & (starts[1:] > low))
        before = int(low - min(starts[here[0]], low)) if len(here) else 0
        own = np.append(np.maximum(starts[here], low) - low, high - low)
        part = Sequences(own)
        device = sequences.device
        kept[low, high] = part if device == "cpu" else part.to(device), before
    return kept[low, high]


class Halo:
    """The inputs before a rank's first token: planned, sent, and then read as a state.

    Ranks without a halo take part too, so that they do in the backward.
    """

    def __init__(
        self, x: torch.Tensor, width: int, group: dist.ProcessGroup, sizes: Any, cu_seqlens: Any
    ) -> None:
        self.batch, self.tokens, self.channels = x.shape
        self.width, self.group, self.first = width, group, 0
        self.packed = None if cu_seqlens is None else _sequences(cu_seqlens)
        self.sent, self.received = self._counts(sizes)
        # How many rows arrive.
        self.arriving = sum(self.received)
        # How many tokens read them, in whole chunks of a kernel.
        head = -(-(width - 1) // CHUNK) * CHUNK if self.arriving else 0
        self.head = min(head, self.tokens)

    def _counts(self, sizes: Any) -> tuple[list[int], list[int]]:
        """Return how many rows go to every rank, and come from it."""
        rank, ranks, width = self.group.rank(), self.group.size(), self.width
        if self.packed is not None and sizes is None:
            sizes = in_chunks(self.packed.num_tokens, ranks)
        if sizes is None:
            if self.tokens < width - 1:
                raise ValueError(
                    f"{_NAME}: x has {self.tokens} tokens; it should have {width - 1} at least, "
                    "one less than kernels have taps, or sizes should say how many all ranks have"
                )
            sent = [width - 1 if to == rank + 1 else 0 for to in range(ranks)]
            return sent, [width - 1 if of == rank - 1 else 0 for of in range(ranks)]
        sizes = _sizes(sizes, self.tokens, self.group)
        ends = [0, *np.cumsum(sizes).tolist()]
        self.first = ends[rank]
        if self.packed is not None and self.packed.num_tokens != ends[-1]:
            raise ValueError(
                f"{_NAME}: cu_seqlens ends at {self.packed.num_tokens}; it should end at "
                f"{ends[-1]}, the number of tokens of all ranks"
            )
        sent = [_overlap(ends, rank, to, width) for to in range(ranks)]
        return sent, [_overlap(ends, of, rank, width) for of in range(ranks)]

    def trip(self) -> Trip:
        """Return the trip of every rank's last tokens to the ranks that follow."""
        each = self.batch * self.channels
        return Trip([n * each for n in self.sent], [n * each for n in self.received], self.group)

    def tails(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last tokens, once for each rank that reads them."""
        rows = x.transpose(0, 1)
        tails = [rows[self.tokens - n :] for n in self.sent if n] or [rows[:0]]
        return (tails[0] if len(tails) == 1 else torch.cat(tails)).reshape(-1)

    def add_tails(self, dx: torch.Tensor, flat: torch.Tensor) -> None:
        """Add the cotangents of the last tokens."""
        rows, each = dx.transpose(0, 1), self.batch * self.channels
        for n, part in zip(self.sent, flat.split([n * each for n in self.sent]), strict=True):
            # An addition of nothing is a kernel all the same.
            if n:
                rows[self.tokens - n :] += part.view(n, self.batch, self.channels)

    def room(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows (W, B, D) before the first token, zeros, and the ones that arrive, flat."""
        rows = x.new_zeros(self.width, self.batch, self.channels)
        return rows, rows[self.width - self.arriving :].view(-1)

    def filled(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the rows before the first token, differentiably."""
        rows = flat.view(self.arriving, self.batch, self.channels)
        return _behind_zeros(rows, self.width)

    def part(self, tokens: int) -> tuple[Sequences | None, int]:
        """Return the sequences of this rank's first tokens, and how much the first has before."""
        if self.packed is None:
            return None, self.width
        return _part_of(self.packed, self.first, self.first + tokens)

    def given(
        self, tokens: int, rows: torch.Tensor | None, x: Any, kernels: Any, bias: Any
    ) -> tuple[Any, ...]:
        """Return the arguments of the convolution of the first tokens, behind rows or zeros."""
        sequences, before = self.part(tokens)
        state = None if rows is None else self.state(rows, sequences, before)
        if tokens < self.tokens:
            x, kernels = x[:, :tokens], kernels if kernels.ndim == 2 else kernels[:, :tokens]
        return x, kernels, state, bias, sequences

    def state(self, rows: torch.Tensor, sequences: Sequences | None, before: int) -> torch.Tensor:
        """Return the initial state that rows (W, B, D) make."""
        # Inputs of another sequence count as zeros.
        state = _behind_zeros(rows[max(self.width - before, 0) :], self.width).permute(1, 2, 0)
        if sequences is None:
            return state
        # Of several sequences only the first began before; an empty part has none.
        more = sequences.num_sequences - 1
        return state[:0] if more < 0 else torch.nn.functional.pad(state, (0, 0, 0, 0, 0, more))

    def cotangents(self, dstate: torch.Tensor) -> torch.Tensor:
        """Return the cotangents of the rows that arrived, flat, from the state's of all tokens."""
        sequences, before = self.part(self.tokens)
        rows = (dstate if sequences is None else dstate[:1]).permute(2, 0, 1)
        counted = min(before, self.arriving)
        return _behind_zeros(rows[self.width - counted :], self.arriving).flatten()


def _behind_zeros(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return so many rows (…, B, D), the first of which are zeros."""
    missing = count - len(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, 0, missing, 0)) if missing else rows


class _Beside:
    """Work on a GPU that waits for all work so far, and not for the work after that.

    Its memory may be used again at once, as it begins with that wait every time.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self.on_gpu = x.is_cuda
        if self.on_gpu:
            self.current = torch.cuda.current_stream(x.device.index)
            self.so_far = self.current.record_event()

    def __enter__(self) -> None:
        if self.on_gpu:
            self.stream = _stream_beside(self.current)
            self.stream.wait_event(self.so_far)
            self.within = torch.cuda.stream(self.stream)
            self.within.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.on_gpu:
            self.within.__exit__(*error)
            self.current.wait_stream(self.stream)


@functools.cache
def _stream_beside(current: Any) -> Any:
    return torch.cuda.Stream(current.device)


class _Shared(torch.autograd.Function):
    """A convolution of tokens that ranks share; on a GPU their halo travels meanwhile."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, activation: str, x: Any, kernels: Any, bias: Any) -> Any:
        ctx.halo, ctx.activation, ctx.asked = halo, activation, registry.forced(None)

        def convolved(tokens: int, rows: torch.Tensor | None, slot: Any = True) -> torch.Tensor:
            *arrays, sequences = halo.given(tokens, rows, x, kernels, bias)
            out: torch.Tensor
            out = conv(*arrays, None, sequences, activation, out=(slot, None)).out
            return out

        beside, trip, n = _Beside(x), halo.trip(), halo.head
        every = 0 < n == halo.tokens
        out = None if every else convolved(halo.tokens, None)
        with beside:
            before, room = halo.room(x)
            trip.begin(halo.tails(x), room)
        trip.end()
        if out is None:
            out = convolved(n, before)
        elif n:
            place = out[:, :n]
            # Kernels fill no gaps.
            found = convolved(n, before, place if place.is_contiguous() else True)
            if found is not place:
                place.copy_(found)
        ctx.save_for_backward(x, kernels, bias, before)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        halo, (x, kernels, bias, before) = ctx.halo, ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        with registry.asking(ctx.asked):
            if not torch.is_grad_enabled():
                given = halo, x, kernels, bias, before, dout, ctx.activation
                return None, None, *_gradients(*given, *wanted)
            function = functools.partial(_differentiable, halo, ctx.activation)
            return None, None, *by_graph(function, (x, kernels, bias), wanted, dout)


def _gradients(
    halo: Halo,
    x: Any,
    kernels: Any,
    bias: Any,
    before: Any,
    dout: Any,
    activation: str,
    of_x: bool,
    of_kernels: bool,
    of_bias: bool,
) -> tuple[Any, ...]:
    """Return the wanted cotangents of x, kernels and bias.

    The halo's cotangent travels last: to pull back the head alone, before the rest, takes the host
    longer than the exchange takes.
    """
    reads = halo.arriving > 0
    *arrays, sequences = halo.given(halo.tokens, before if reads else None, x, kernels, bias)
    slots = [want or None for want in (of_x, of_kernels, reads, of_bias)]
    found = conv_vjp(*arrays, dout, None, sequences, activation, out=slots)
    # A rank whose x has no gradient has a part of another one's.
    trip = halo.trip().turned()
    trip.begin(halo.cotangents(found.dinitial_state) if reads else before.new_empty(0))
    tails = trip.end()
    if of_x:
        halo.add_tails(found.dx, tails)
    return found.dx, found.dkernels, found.dbias


def _differentiable(halo: Halo, activation: str, x: Any, kernels: Any, bias: Any) -> Any:
    """Return the convolution by functions that torch differentiates to any order."""
    rows = halo.filled(all_to_all(halo.tails(x), halo.trip()))
    *arrays, sequences = halo.given(halo.tokens, rows, x, kernels, bias)
    return conv(*arrays, None, sequences, activation, out=(True, None)).out


def _sizes(given: Any, tokens: int, group: dist.ProcessGroup) -> list[int]:
    """Return the checked numbers of tokens of all ranks."""
    sizes, rank = checked_sizes(_NAME, "sizes", given, group), group.rank()
    if sizes[rank] != tokens:
        raise ValueError(f"{_NAME}: x has {tokens} tokens; rank {rank} should have {sizes[rank]}")
    return sizes


def _sequences(cu_seqlens: Any) -> Sequences:
    if isinstance(cu_seqlens, Sequences):
        return cu_seqlens
    return Sequences.read(_NAME, cu_seqlens, num_tokens=None)


def _overlap(ends: Sequence[int], of: int, to: int, width: int) -> int:
    """Return how many of a rank's last tokens are among the inputs before another's first token."""
    first = ends[to]
    if to <= of or ends[to + 1] == first:
        return 0
    return max(0, ends[of + 1] - max(ends[of], first - (width - 1)))


def _check(x: Any, kernels: Any, bias: Any, sequences: Any, activation: Any, backend: Any) -> None:
    """Raise what the single-device op would, before anything is sent."""
    kind = kind_of((x, kernels, bias, sequences, activation, backend))
    if _checked.get(kind) is None:
        op: Any = _on_one
        more = {"cu_seqlens": sequences, "activation": activation, "backend": backend}
        op.bound(x, kernels, bias=bias, **{name: v for name, v in more.items() if v is not None})
        _checked.keep(kind, True)


@outside_of_graphs
def dynamic_conv(
    x: torch.Tensor,
    kernels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    group: Any,
    sizes: Sequence[int] | None = None,
    cu_seqlens: Any = None,
    activation: str | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    r"""Return the causal convolution of this rank's tokens, which follow those of the rank before.

    .. math:: \mathrm{out}_{btd} = a\Bigl(\sum_{w=0}^{W-1} k_{btdw} \, x_{b,\,t+w-W+1,\,d}
              + \mathrm{bias}_d\Bigr)

    where t counts the tokens of all ranks; see `fusedops.dynamic_conv`.

    Parameters
    ----------
    x : tensor (B, T, D), float32, float64, bfloat16 or float16
        This rank's tokens: contiguous parts of every sequence, in the order of the ranks.
    kernels : tensor (B, T, D, W) or (D, W)
        The taps of its tokens, or of every channel alone.
    bias : tensor (D,), optional
        Added before the activation.
    group : ProcessGroup, or DeviceMesh of one dimension
        The ranks that share the tokens.
    sizes : sequence of int, optional
        The number of tokens of every rank; a rank may have none. Without it every rank needs W − 1
        tokens at least, and with `cu_seqlens` the number that ``torch.chunk`` gives it.
    cu_seqlens : Sequences, or tensor (S + 1,), int32 or int64, optional
        Where each of S packed sequences begins among the tokens of all ranks, the same on every
        rank; B must be 1. Nothing crosses a boundary. A `Sequences` is read once; a tensor on a GPU
        as in `fusedops.dynamic_conv`.
    activation : {None, "silu", "swish"}
        "silu" and "swish" both name x · sigmoid(x).
    backend : str, optional
        The backend that must serve the call.

    Returns
    -------
    tensor (B, T, D)
        This rank's outputs, in the dtype of x.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it. Nothing is sent then.
    BackendUnavailable
        If `backend` can't serve the call.

    Notes
    -----
    The last W − 1 tokens of a rank travel to the next one, (W − 1)BD numbers, and their cotangents
    back. In 16 bits both parts of the cotangent of such a token are rounded, and their sum again.
    Derivatives of every order exist; all ranks must differentiate alike, and for derivatives of
    second order x must require grad on all ranks or on none. The loss is the sum of the losses of
    all ranks: gradients of static kernels and of the bias are this rank's part, see `share`.
    Layouts in which a rank has two distant parts of a sequence are not served, and no states:
    decoding is one rank's work.

    References
    ----------
    Compare the context parallelism of flash-linear-attention and of Megatron-LM.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from fusedops import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, kernels = torch.tensor([1.0, 2, 4]).reshape(1, 3, 1), torch.ones(1, 2)
    >>> distributed.dynamic_conv(x, kernels, group=dist.group.WORLD).flatten().tolist()
    [1.0, 3.0, 6.0]
    >>> dist.destroy_process_group()
    """
    x, kernels = tensor(_NAME, "x", x), tensor(_NAME, "kernels", kernels)
    group = group_of(_NAME, group)
    op: Any = _on_one
    more = {"bias": bias, "activation": activation, "backend": backend}
    if group.size() == 1 or x.ndim != 3 or kernels.ndim < 1:
        # Of one rank, or an error.
        if sizes is not None and x.ndim == 3:
            _sizes(sizes, x.shape[1], group)
        found: torch.Tensor = op(x, kernels, cu_seqlens=cu_seqlens, **more)
        return found
    if checks_ranks():
        kind = x.dtype, x.requires_grad, x.shape[0], x.shape[2]
        own = kernels.ndim, kernels.shape[-1], kernels.dtype, kernels.requires_grad
        taps = kernels if kernels.ndim == 2 else own
        packed = isinstance(cu_seqlens, Sequences)
        starts = torch.tensor(_starts(cu_seqlens)) if packed else cu_seqlens
        given = {"bias": bias, "activation": activation, "sizes": sizes, "cu_seqlens": starts}
        agree(_NAME, group, x, x=kind, kernels=taps, **given)
    halo = Halo(x, kernels.shape[-1], group, sizes, cu_seqlens)
    _check(x, kernels, bias, halo.part(halo.tokens)[0], activation, backend)
    activation = "none" if activation is None else "silu"
    with registry.asking(registry.forced(backend, _NAME)):
        out: torch.Tensor = _Shared.apply(halo, activation, x, kernels, bias)
    return out
