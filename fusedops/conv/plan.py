"""Sequences of tokens packed one after the other, and their chunks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusedops._frame.arrays import is_writable, namespace
from fusedops._frame.check import (
    device_of,
    indices,
    is_traced,
    on_host,
    sharing,
    size,
)
from fusedops._frame.packed import Packed, bridge

if TYPE_CHECKING:
    from typing import Generic

    from typing_extensions import TypedDict

    from fusedops._frame.arrays import ArrayT
    from fusedops._frame.registry import BackendName

    class Options(TypedDict, Generic[ArrayT], total=False):
        """The options of every op on sequences, beside `output_final_state`."""

        initial_state: ArrayT | None
        cu_seqlens: Sequences | ArrayT | None
        out: ArrayT | None
        backend: BackendName | None


#: The tokens of one sequence that a kernel takes at a time. It stands here, not with the kernels,
#: because `Sequences` lists these chunks.
CHUNK = 64


class Sequences(Packed):
    r"""Sequences packed one after the other, checked and laid out once for many calls.

    Parameters
    ----------
    cu_seqlens : array or tensor (S + 1,), int32 or int64
        Where each of S sequences begins, and where the last one ends: from 0 to the number of
        tokens, never decreasing. A sequence may be empty. The object lives on the tensor's device.
    num_tokens : int, optional
        Where the last sequence must end.

    Attributes
    ----------
    num_sequences, num_tokens : int
        S, and the number of tokens in all sequences.
    device : str
        ``"cpu"``, where NumPy arrays and torch tensors are both served, or a torch device.

    Raises
    ------
    TypeError, ValueError
        If `cu_seqlens` has the wrong dtype, rank or values; the message names the first bad one.

    Notes
    -----
    The array is copied, so later changes to it have no effect. Reading a tensor on a GPU waits for
    the GPU.

    References
    ----------
    The convention follows flash-linear-attention and FlashAttention.

    Examples
    --------
    >>> import fusedops
    >>> sequences = fusedops.Sequences([0, 3, 3, 10])
    >>> sequences.num_sequences, sequences.num_tokens
    (3, 10)
    """

    # chunks (n, 2): the sequence of every run of up to CHUNK tokens, and its first token.
    _fields = ("cu_seqlens", "chunks")
    _sizes = ("num_sequences", "num_tokens")
    _given = ("cu_seqlens",)
    _options = ("num_tokens",)

    def __init__(self, cu_seqlens: Any, *, num_tokens: int | None = None) -> None:
        given = indices("Sequences", "cu_seqlens", cu_seqlens)
        if num_tokens is not None:
            num_tokens = size("Sequences", "num_tokens", num_tokens, bits=60)
        device, given = device_of(given), on_host(given)
        if given.ndim != 1 or not len(given):
            raise ValueError(
                f"Sequences: cu_seqlens has shape {given.shape}; it should be (S + 1,)"
            )
        starts = given.astype(np.int64)
        if starts[0] != 0:
            raise ValueError(f"Sequences: cu_seqlens[0] is {starts[0]}; it should be 0")
        falls = starts[1:] < starts[:-1]
        if falls.any():
            s = int(np.argmax(falls)) + 1
            raise ValueError(
                f"Sequences: cu_seqlens[{s}] is {starts[s]}; it should be at least "
                f"{starts[s - 1]}, the one before"
            )
        if num_tokens is not None and starts[-1] != num_tokens:
            raise ValueError(
                f"Sequences: cu_seqlens ends at {starts[-1]}; it should end at {num_tokens}, the "
                "number of tokens"
            )
        size("Sequences", "cu_seqlens[-1]", starts[-1], bits=60)
        lengths = np.diff(starts)
        counts = -(-lengths // CHUNK)
        which = np.repeat(np.arange(len(lengths)), counts)
        within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._hold(
            device,
            cu_seqlens=starts,
            chunks=np.stack([which, starts[which] + CHUNK * within], axis=1),
            num_sequences=len(lengths),
            num_tokens=int(starts[-1]),
        )

    @classmethod
    def _read_once(
        cls, op: str, tensors: Sequence[Any], options: dict[str, Any], in_graph: bool
    ) -> Sequences:
        (given,) = tensors
        if (
            given.is_cuda
            and (given.ndim, len(given) > 1) == (1, True)
            and (
                in_graph
                or not bridge().tensors.versioned(tensors)
                or namespace(given).cuda.is_current_stream_capturing()
            )
        ):
            return cls.on_device(given, **options)
        return super()._read_once(op, tensors, options, in_graph)

    @classmethod
    def on_device(cls, cu_seqlens: Any, *, num_tokens: int) -> Sequences:
        """Return sequences whose boundaries the host doesn't read, for the kernels on a GPU.

        As many chunks are listed as there can be; those that there aren't are empty, at the end.
        Boundaries that are out of order, or outside of the tokens, are moved.
        """
        torch = namespace(cu_seqlens)
        count = len(cu_seqlens) - 1
        starts = cu_seqlens.long().clamp(0, num_tokens).cummax(0).values
        # Numbers are filled in on the GPU; a captured graph can't copy them from the CPU.
        starts[:1].fill_(0)
        starts[-1:].fill_(num_tokens)
        ends = (-(-starts.diff() // CHUNK)).cumsum(0)
        numbers = torch.arange(num_tokens // CHUNK + count, device=starts.device)
        which = torch.searchsorted(ends, numbers, right=True).clamp(max=count - 1)
        within = numbers - torch.nn.functional.pad(ends, (1, 0))[which]
        first = torch.minimum(starts[which] + CHUNK * within, starts[which + 1])
        parts = starts, torch.stack([which, first], 1)
        return cls.from_tensors(parts, (count, num_tokens))

    @classmethod
    def foresee(cls, cu_seqlens: Any, *, num_tokens: int) -> dict[str, Any]:
        """Return the sizes that don't depend on the tensor's values."""
        return {"num_sequences": cu_seqlens.shape[0] - 1, "num_tokens": num_tokens}

    def __repr__(self) -> str:
        sizes = f"{self.num_sequences} sequences, {self.num_tokens} tokens"
        return f"Sequences({sizes}, on {self.device})"


def spans(x: Any, sequences: Sequences | None) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices of the batch, the tokens and the states, one for each packed sequence."""
    if sequences is None:
        yield slice(None), slice(None), slice(None)
        return
    starts = sequences.fields_like(x).cu_seqlens.tolist()
    for s in range(len(starts) - 1):
        yield slice(None), slice(starts[s], starts[s + 1]), slice(s, s + 1)


def num_sequences(a: Any) -> Any:
    """Return S, the number of sequences in a call whose first array has the tokens."""
    return a[0].shape[0] if a.sequences is None else a.sequences.num_sequences


def read_sequences(name: str, cu_seqlens: Any, first: str, x: Any) -> Sequences | None:
    """Return the packed sequences of tokens x (1, T, ...), an argument called `first`."""
    if cu_seqlens is None:
        return None
    if x.shape[0] != 1:
        sizes = ", ".join(["1", "T", "D"] if x.ndim == 3 else ["1", "T", "H", "K"])
        raise ValueError(
            f"{name}: {first} has shape {tuple(x.shape)}; with cu_seqlens it should be ({sizes})"
        )
    tokens = x.shape[1]
    sequences = Sequences.given(name, (first, x), cu_seqlens, num_tokens=tokens)
    if sequences.num_tokens != tokens:
        raise ValueError(
            f"{name}: cu_seqlens ends at {sequences.num_tokens}; it should end at {tokens}, the "
            f"number of tokens in {first}"
        )
    return sequences


def may_update(name: str, a: Any, others: Sequence[str]) -> Callable[[Any], None]:
    """Raise unless a call's state can be updated in place, without a change of other arguments.

    Returns the check of memory that other calls of the kind need.
    """
    pick = operator.attrgetter(*others)
    shared = sharing(a.state, pick(a))

    def are_apart(a: Any) -> None:
        at = shared(a.state, pick(a))
        if at is not None:
            raise ValueError(f"{name}: {others[at]} shares memory with state; it should not")

    are_apart(a)
    if not is_writable(a.state):
        raise ValueError(f"{name}: state is read-only; it should be writable, to be updated")
    return are_apart


def readable(array: Any) -> Any:
    """Return integers that the host may read, or None for others."""
    hidden = array is not None and (device_of(array) != "cpu" or is_traced(array))
    return None if hidden else array


def check_slots(op: str, name: str, slots: Any, count: int) -> None:
    """Raise ValueError unless the slots that aren't padding are different rows of `count`."""
    own = [] if slots is None else [slot for slot in slots.tolist() if slot >= 0]
    if own and max(own) >= count:
        raise ValueError(
            f"{op}: {name} has {max(own)}; it should be below {count}, the number of states"
        )
    if len(set(own)) < len(own):
        twice = next(slot for slot in own if own.count(slot) > 1)
        raise ValueError(
            f"{op}: {name} has {twice} twice; every sequence should have a state of its own"
        )
