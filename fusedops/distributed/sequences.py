"""The causal convolution of tokens that ranks share.

A rank needs W − 1 inputs before its first token, the halo. They travel as the initial state of its
sequences, while a caller may compute kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fusedops._frame.check import is_tensor
from fusedops._frame.kinds import Plans, kind_of
from fusedops._frame.packed import outside_of_graphs
from fusedops.conv import Sequences
from fusedops.conv import dynamic_conv as _on_one
from fusedops.distributed.exchanges import (
    Trip,
    agree,
    arrive,
    checked_sizes,
    group_of,
    in_chunks,
    start,
    tensor,
)

_NAME = "dynamic_conv"

#: The kinds of calls whose arguments were checked.
_checked: Plans[bool] = Plans()


def _starts(sequences: Sequences) -> np.ndarray:
    """Return where sequences begin, and where the last one ends, on the CPU."""
    starts = sequences.arrays()[0]
    return starts.cpu().numpy() if is_tensor(starts) else np.asarray(starts)


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
        rank, ranks, tokens = group.rank(), group.size(), x.shape[1]
        self.width, self.group, self.sequences = width, group, None
        # The most inputs that the first sequence has before this rank.
        self.most = width - 1
        if cu_seqlens is not None:
            cu_seqlens = _sequences(cu_seqlens)
            sizes = in_chunks(cu_seqlens.num_tokens, ranks) if sizes is None else sizes
        if sizes is None:
            if tokens < width - 1:
                raise ValueError(
                    f"{_NAME}: x has {tokens} tokens; it should have {width - 1} at least, one "
                    "less than kernels have taps, or sizes should say how many all ranks have"
                )
            self.sent = [width - 1 if to == rank + 1 else 0 for to in range(ranks)]
            self.received = [width - 1 if of == rank - 1 else 0 for of in range(ranks)]
            return
        sizes = checked_sizes(_NAME, "sizes", sizes, group)
        if sizes[rank] != tokens:
            raise ValueError(
                f"{_NAME}: x has {tokens} tokens; rank {rank} should have {sizes[rank]}"
            )
        ends = [0, *np.cumsum(sizes).tolist()]
        self.sent = [_overlap(ends, rank, to, width) for to in range(ranks)]
        self.received = [_overlap(ends, of, rank, width) for of in range(ranks)]
        if cu_seqlens is not None:
            if cu_seqlens.num_tokens != ends[-1]:
                raise ValueError(
                    f"{_NAME}: cu_seqlens ends at {cu_seqlens.num_tokens}; it should end at "
                    f"{ends[-1]}, the number of tokens of all ranks"
                )
            self.sequences, self.most = _part_of(cu_seqlens, ends[rank], ends[rank + 1])

    def send(self, x: torch.Tensor) -> None:
        """Send the last tokens to the ranks that follow."""
        self.batch, tokens, self.channels = x.shape
        kind = x.dtype, x.requires_grad, self.batch, self.channels
        agree(_NAME, self.group, x, x=kind, kernels=f"{self.width} taps")
        each = self.batch * self.channels
        tails = torch.cat([x.transpose(0, 1)[tokens - n :] for n in self.sent])
        sent, received = ([n * each for n in some] for some in (self.sent, self.received))
        self.trip = Trip(sent, received, self.group)
        self.token = start(tails.flatten(), self.trip)

    def state(self) -> torch.Tensor:
        """Return the initial state of this rank's sequences."""
        all_of_it = sum(self.received)
        halo = arrive(self.token, self.trip).view(all_of_it, self.batch, self.channels)
        # Inputs of another sequence count as zeros.
        n = min(self.most, all_of_it)
        halo = halo[all_of_it - n :].permute(1, 2, 0)
        state = torch.nn.functional.pad(halo, (self.width - n, 0))
        if self.sequences is None:
            return state
        # Of several sequences only the first began on another rank; an empty rank has none.
        more = self.sequences.num_sequences - 1
        return state[:0] if more < 0 else torch.nn.functional.pad(state, (0, 0, 0, 0, 0, more))


def _sequences(cu_seqlens: Any) -> Sequences:
    if isinstance(cu_seqlens, Sequences):
        return cu_seqlens
    if is_tensor(cu_seqlens):
        return Sequences.read(_NAME, cu_seqlens, num_tokens=None)
    return Sequences(cu_seqlens)


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
    backend: str | None = None,
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
        tokens at least, and with `cu_seqlens` the number that `torch.chunk` gives it.
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
        This rank's outputs, in the dtype to which the arguments promote.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it. Nothing is sent then.
    BackendUnavailable
        If `backend` can't serve the call.

    Notes
    -----
    The last W − 1 tokens of a rank travel to the next one, (W − 1)BD numbers, and their cotangents
    back. Derivatives of every order exist; all ranks must differentiate alike. The loss is the sum
    of the losses of all ranks: gradients of static kernels and of the bias are this rank's part,
    see `share`. Layouts in which a rank has two distant parts of a sequence are not served, and no
    states: decoding is one rank's work.

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
        found: torch.Tensor = op(x, kernels, cu_seqlens=cu_seqlens, **more)
        return found
    halo = Halo(x, kernels.shape[-1], group, sizes, cu_seqlens)
    _check(x, kernels, bias, halo.sequences, activation, backend)
    halo.send(x)
    out: torch.Tensor = op(
        x, kernels, initial_state=halo.state(), cu_seqlens=halo.sequences, **more
    )
    return out
