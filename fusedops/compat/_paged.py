"""Causal convolutions of packed sequences whose states lie in a cache, for `vllm` and `sglang`.

Each state of a cache (N, D, L) begins with the last W - 1 inputs of its sequence, the latest last.
Behind these is room for tokens of speculative decoding, some of which the next call accepts.
"""

from __future__ import annotations

from typing import Any

import fusedops._frame.needs_torch

import torch

import fusedops
from fusedops._frame.check import (
    device_of,
    dtype_name,
    no_overlap,
    of_shape,
    one_of,
    same_device,
    traced,
    writable,
)
from fusedops.compat.causal_conv1d import need_floats, need_integers, need_tensor, need_weight
from fusedops.conv import ACTIVATIONS, Activation
from fusedops.conv.plan import check_slots


def named(activation: bool | Activation | None) -> Activation | None:
    """Return the name of an activation, which may be a bool."""
    if isinstance(activation, bool):
        return "silu" if activation else None
    return activation


def put(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, kept: torch.Tensor) -> None:
    """Write the rows that are `kept` into their slots of a cache; the host reads no value.

    A slot outside of the cache is padding. An assignment has to write every row, so the other rows
    repeat the first one that is kept.
    """
    if not len(slots) or not len(cache):
        return
    kept = kept & (slots >= 0) & (slots < len(cache))
    every = torch.arange(len(slots), device=slots.device)
    source = torch.where(kept, every, kept.int().argmax())
    where = slots[source].clamp(0, len(cache) - 1).long()
    cache[where] = torch.where(kept.any(), rows[source].to(cache.dtype), cache[where])


def _sequences(starts: torch.Tensor, tokens: int) -> fusedops.Sequences | torch.Tensor:
    """Return the sequences, and the tokens that follow the last one as one more sequence."""
    if traced():
        # The op reads the boundaries in each run of the graph.
        return torch.nn.functional.pad(starts.long(), (0, 1), value=tokens)

    def make() -> fusedops.Sequences:
        all_starts = torch.nn.functional.pad(starts.long(), (0, 1), value=tokens)
        if all_starts.is_cpu:
            return fusedops.Sequences(all_starts, num_tokens=tokens)
        return fusedops.Sequences.on_device(all_starts, num_tokens=tokens)

    if starts.is_cpu or (starts.is_cuda and torch.cuda.is_current_stream_capturing()):
        # On a CPU torch doesn't count writes by NumPy or other processes. Each run of a CUDA graph
        # reads the boundaries anew.
        return make()
    # `rest` keeps these sequences apart from the ones that an op makes of the same tensor.
    return fusedops.Sequences.kept((starts,), {"num_tokens": tokens, "rest": True}, make)


def _need(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    cache: dict[str, torch.Tensor],
    starts: torch.Tensor,
    slots: dict[str, torch.Tensor],
    continued: torch.Tensor | bool,
    accepted: dict[str, torch.Tensor],
) -> None:
    """Raise unless the arguments of `convolved` fit, and name one that doesn't."""
    need_floats(op, x, weight=weight, bias=bias, **cache)
    ((cache_name, states),) = cache.items()
    D = x.shape[1]
    _, W = need_weight(op, weight, D)
    if bias is not None:
        of_shape(op, "bias", bias, (D,))
    one_of(op, "activation", activation, ACTIVATIONS)
    of_shape(op, cache_name, states, ("N", D, "L"))
    N, _, L = states.shape
    if L < W - 1:
        raise ValueError(
            f"{op}: {cache_name} has {L} inputs of a sequence; it should have at least {W - 1}, "
            "one fewer than weight has taps"
        )
    no_overlap(op, cache_name, states)
    writable(op, cache_name, states)
    if not len(starts):
        raise ValueError(f"{op}: query_start_loc has shape (0,); it should be (B + 1,)")
    B = len(starts) - 1
    for name, value in {**slots, **accepted}.items():
        need_integers(op, name, value, (B,), x)
    if not isinstance(continued, bool):
        need_tensor(op, "has_initial_state", continued)
        if continued.dtype != torch.bool:
            dtype = dtype_name(continued.dtype)
            raise TypeError(f"{op}: has_initial_state has dtype {dtype}; it should be bool")
        of_shape(op, "has_initial_state", continued, (B,))
        same_device(op, "has_initial_state", device_of(continued), "x", device_of(x))
    if B and not N:
        raise ValueError(f"{op}: {cache_name} has no states; it should have one for each sequence")
    if traced() or not x.is_cpu:
        return
    bounds = starts.tolist()
    if bounds[0] != 0 or sorted(bounds) != bounds or bounds[-1] > len(x):
        raise ValueError(
            f"{op}: query_start_loc is {bounds}; it should rise from 0, and end at most at "
            f"{len(x)}, the number of tokens in x"
        )
    for name, value in slots.items():
        check_slots(op, name, value, N)
    for name, value in accepted.items():
        some = [int(n) for n, slot in zip(value, *slots.values(), strict=True) if slot >= 0]
        if some and (min(some) < 1 or max(some) > L - W + 2):
            raise ValueError(
                f"{op}: {name} is {value.tolist()}; each should be between 1 and {L - W + 2}, for "
                f"which {cache_name} has room"
            )
        longest = int(starts.diff().max()) if B else 0
        if longest > L - W + 2:
            raise ValueError(
                f"{op}: query_start_loc has a sequence of {longest} tokens; {cache_name} has room "
                f"for {L - W + 2}"
            )


@torch.no_grad()
def convolved(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    *,
    cache: dict[str, torch.Tensor],
    starts: torch.Tensor,
    slots: dict[str, torch.Tensor],
    continued: torch.Tensor | bool = True,
    accepted: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the convolution of packed tokens (T, D) that follow their states; update the states.

    `cache`, `slots` and `accepted` have one tensor each, under the program's name for it. A
    negative slot is padding. A sequence that isn't `continued` begins with zeros. With numbers of
    `accepted` tokens a state's inputs end at the last accepted one, and the updated state has all
    tokens of x, some of which the next call accepts.
    """
    _need(op, x, weight, bias, activation, cache, starts, slots, continued, accepted or {})
    (states,), (slot,) = cache.values(), slots.values()
    (N, D, L), W, S = states.shape, weight.shape[1], len(slot)
    if not len(x):
        return torch.empty_like(x)
    rows = slot.clamp(0, N - 1).long()
    lengths = starts.diff()
    kept = lengths > 0
    old = states[rows]
    first: Any = 0
    if accepted:
        (count,) = accepted.values()
        first = count.long().clamp(1, L - W + 2)[:, None] - 1

    def shifted(by: Any, length: int) -> torch.Tensor:
        """Return `length` inputs of every state, from number `by` on."""
        at = (torch.arange(length, device=x.device) + by).clamp(max=max(L - 1, 0))
        return old.gather(2, at.expand(S, length)[:, None].expand(-1, D, -1))

    before = shifted(first, W - 1)
    initial = x.new_zeros(S + 1, D, W)
    if isinstance(continued, torch.Tensor):
        initial[:S, :, 1:] = before.masked_fill(~continued[:, None, None], 0)
    elif continued:
        initial[:S, :, 1:] = before
    conv: Any = fusedops.dynamic_conv
    out, final = conv(
        x[None],
        weight,
        bias=bias,
        initial_state=initial,
        cu_seqlens=_sequences(starts, len(x)),
        activation=activation,
        output_final_state=True,
    )
    if not accepted:
        put(states[..., : W - 1], slot, final[:S, :, 1:], kept)
        return out[0]
    place = torch.arange(L, device=x.device) - (W - 2)
    tokens = x[(starts[:-1, None] + place).clamp(0, len(x) - 1).long()].mT
    new = torch.where((place < lengths[:, None])[:, None], tokens.to(old.dtype), old)
    put(states, slot, torch.where(place < 0, shifted(first + 1, L), new), kept)
    return out[0]


def decoded(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    *,
    cache: dict[str, torch.Tensor],
    starts: torch.Tensor | None,
    slots: dict[str, torch.Tensor | None],
    accepted: dict[str, torch.Tensor | None],
) -> torch.Tensor:
    """Return `convolved` of tokens (B, D) or (B, D, T), or of packed (T, D) with `starts`."""
    tokens = x
    if starts is None:
        tokens = x.mT.flatten(0, 1) if x.ndim == 3 else x
        each = x.shape[2] if x.ndim == 3 else 1
        starts = torch.arange(len(x) + 1, device=x.device) * each
    else:
        need_integers(op, "query_start_loc", starts, ("B + 1",), x)
        of_shape(op, "x", x, ("T", "D"))
    every = torch.arange(max(len(starts) - 1, 0), device=x.device)
    out = convolved(
        op,
        tokens,
        weight,
        bias,
        activation,
        cache=cache,
        starts=starts,
        slots={name: every if value is None else value for name, value in slots.items()},
        accepted={name: value for name, value in accepted.items() if value is not None},
    )
    return out.unflatten(0, (x.shape[0], x.shape[2])).mT if x.ndim == 3 else out
