r"""SGLang's causal convolutions, with the arguments of SGLang 0.5.23::

    -from sglang.srt.layers.attention.mamba.causal_conv1d import causal_conv1d_fn
    -from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update
    +from fusedops.compat.sglang import causal_conv1d_fn, causal_conv1d_update

SGLang has each function in both modules. `causal_conv1d_fn` takes its arguments in the order of the
first module, and further arguments of the second one by name; `causal_conv1d_update` has
the arguments of the second one. As in SGLang, results have no gradient.
"""

from __future__ import annotations

from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops._frame.check import flag, of_shape, traced, writable
from fusedops.compat import causal_conv1d
from fusedops.compat._paged import convolved, decoded, named, put
from fusedops.compat.causal_conv1d import (
    need_floats,
    need_integers,
    need_number,
    need_state,
    need_tensor,
    unpadded,
)
from fusedops.conv import Activation
from fusedops.conv.plan import check_slots

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


@torch.no_grad()
def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    activation: bool | Activation | None = "silu",
    pad_slot_id: int | None = -1,
    *,
    seq_lens_cpu: Any = None,
    validate_data: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Return the causal convolution of packed sequences, and update their states in place.

    .. math:: \mathrm{out}_{dt} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{dw} \,
              x_{d,\,t+w-W+1} + \mathrm{bias}_d\Bigr)

    where x stands for the inputs in a sequence's state, or zeros, before the first token.

    Parameters
    ----------
    x : tensor (D, T), or (B, D, T) without `query_start_loc`; float
        The tokens of all sequences, in float32, float64, bfloat16 or float16.
    weight : tensor (D, W)
        The taps, in any float dtype.
    bias : tensor (D,), optional
        Added before the activation.
    query_start_loc : tensor (B + 1,), int32 or int64, optional
        Where each sequence begins, and where the last one ends. Tokens after that belong to none.
    cache_indices : tensor (B,), int32 or int64, optional
        The number of each sequence's state, by default the sequence's; further ones aren't read.
    has_initial_state : tensor (B,), bool, optional
        Whether a sequence goes on from its state; none does by default.
    conv_states : tensor (N, D, L), L ≥ W - 1, optional
        The first W - 1 inputs of each are the latest of a sequence. Updated in place.
    activation : {None, "silu", "swish"} or bool
        "silu", "swish" and True all name x · sigmoid(x).
    pad_slot_id : int or None
        The number in `cache_indices` that marks a sequence as padding, as all negative numbers do.
        Padding changes no state, and its results, which SGLang doesn't write, mean nothing.
    seq_lens_cpu, block_table : optional
        The plan of SGLang's kernel; not used.
    validate_data : bool
        Whether SGLang checks the arguments; here they are always checked.

    Returns
    -------
    tensor of the shape and dtype of x
        Without a gradient. Unlike in SGLang's compiled kernel, x keeps its values.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape, device or, on the CPU, values; the message names
        it, and no state has changed. On a GPU the host reads no value.

    References
    ----------
    SGLang 0.5.23, ``sglang.srt.layers.attention.mamba.causal_conv1d``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.sglang import causal_conv1d_fn
    >>> x, states = torch.tensor([[1.0, 2, 4, 8]]), torch.zeros(3, 1, 1)
    >>> starts, slots = torch.tensor([0, 3, 4]), torch.tensor([2, 0])
    >>> weight = torch.ones(1, 2)
    >>> causal_conv1d_fn(x, weight, None, starts, slots, None, states, activation=None).tolist()
    [[1.0, 3.0, 6.0, 8.0]]
    >>> states.ravel().tolist()
    [8.0, 0.0, 4.0]
    """
    op = "causal_conv1d_fn"
    need_floats(op, x, weight=weight, conv_states=conv_states)
    need_number(op, "pad_slot_id", pad_slot_id)
    flag(op, "validate_data", validate_data)
    if query_start_loc is None:
        of_shape(op, "x", x, ("B", "D", "T"))
        tokens = x.mT.flatten(0, 1)
        starts = torch.arange(len(x) + 1, device=x.device) * x.shape[2]
    else:
        need_integers(op, "query_start_loc", query_start_loc, ("B + 1",), x)
        of_shape(op, "x", x, ("D", "T"))
        tokens, starts = x.mT, query_start_loc
    count = max(len(starts) - 1, 0)
    if conv_states is None:
        for name, value in {
            "cache_indices": cache_indices,
            "has_initial_state": has_initial_state,
        }.items():
            if value is not None:
                raise ValueError(f"{op}: {name} is given; conv_states should then be given too")
        of_shape(op, "weight", weight, ("D", "W"))
        conv_states = x.new_empty(count, weight.shape[0], max(weight.shape[1] - 1, 0))
    if cache_indices is None:
        slots = torch.arange(count, device=x.device)
    else:
        need_integers(op, "cache_indices", cache_indices, ("B",), x)
        slots = unpadded(cache_indices[:count], pad_slot_id)
    out = convolved(
        op,
        tokens,
        weight,
        bias,
        named(activation),
        cache={"conv_states": conv_states},
        starts=starts,
        slots={"cache_indices": slots},
        continued=False if has_initial_state is None else has_initial_state,
    )
    return out.mT if x.ndim == 2 else out.view(len(x), x.shape[2], x.shape[1]).mT


@torch.no_grad()
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | Activation | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    pad_slot_id: int | None = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> torch.Tensor:
    r"""Shift tokens of every sequence into its state, in place, and return their convolution.

    .. math:: \mathrm{out}_{bdt} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{dw} \,
              x_{bd,\,t+w-W+1} + \mathrm{bias}_d\Bigr)

    where x stands for the inputs in the state before the first token.

    Parameters
    ----------
    x : tensor (B, D) or (B, D, T), float32, float64, bfloat16 or float16
        A token of every sequence, or several.
    conv_state : tensor (N, D, L), L ≥ W - 1
        The first W - 1 inputs of each are the latest of a sequence. Updated in place.
    weight : tensor (D, W)
        The taps, in any float dtype.
    bias : tensor (D,), optional
        Added before the activation.
    activation : {None, "silu", "swish"} or bool
        "silu", "swish" and True all name x · sigmoid(x).
    cache_seqlens : tensor (B,), int32 or int64, optional
        The number of tokens that each sequence has had. With it a state, with all its L inputs, is
        a circular buffer, as in SGLang's compiled kernel; the Triton kernel ignores it.
    conv_state_indices : tensor (B,), int32 or int64, optional
        The number of each sequence's state, by default the sequence's.
    num_accept_tokens : tensor (B,), int32 or int64, optional
        For speculative decoding: the number A, at least 1, of the last call's tokens that are
        right. The latest inputs are then the W - 1 from number A - 1 on. The updated state has the
        W - 2 latest of these, then all T tokens of this call, for which L ≥ T + W - 2.
    intermediate_conv_window : tensor (M, S, D, W - 1), S ≥ T, optional
        Filled with the W - 1 latest inputs after every token.
    intermediate_state_indices : tensor (B,), int32 or int64, optional
        The row of `intermediate_conv_window` for each sequence; to be given with it.
    retrieve_next_token, retrieve_next_sibling, retrieve_parent_token : optional
        The tree of EAGLE's tokens, which isn't served.
    pad_slot_id : int or None
        The number in `conv_state_indices` that marks a sequence as padding, as all negative numbers
        do. Padding changes no state, and its results mean nothing.
    metadata : optional
        Unused, as in SGLang.
    validate_data : bool
        Whether SGLang checks the arguments; here they are always checked.

    Returns
    -------
    tensor of the shape and dtype of x
        Without a gradient.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape, device or, on the CPU, values; the message names
        it, and no state has changed. On a GPU the host reads no value.
    NotImplementedError
        If a tree of tokens is given.

    References
    ----------
    SGLang 0.5.23, ``sglang.kernels.ops.mamba.causal_conv1d_triton``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.sglang import causal_conv1d_update
    >>> states = torch.tensor([[[1.0]], [[2.0]]])
    >>> slots = torch.tensor([1, -1])
    >>> x = torch.full((2, 1), 4.0)
    >>> causal_conv1d_update(x, states, torch.ones(1, 2), conv_state_indices=slots)[0].tolist()
    [6.0]
    >>> states.ravel().tolist()
    [1.0, 4.0]
    """
    op = "causal_conv1d_update"
    for name, value in {
        "retrieve_next_token": retrieve_next_token,
        "retrieve_next_sibling": retrieve_next_sibling,
        "retrieve_parent_token": retrieve_parent_token,
    }.items():
        if value is not None:
            raise NotImplementedError(
                f"{op}: {name} is given; it should be None, since trees of tokens aren't served"
            )
    need_tensor(op, "conv_state", conv_state)
    need_floats(op, x, weight=weight, conv_state=conv_state)
    if x.ndim != 3:
        of_shape(op, "x", x, ("B", "D"))
    of_shape(op, "weight", weight, (x.shape[1], "W"))
    of_shape(op, "conv_state", conv_state, ("N", x.shape[1], "L"))
    need_number(op, "pad_slot_id", pad_slot_id)
    flag(op, "validate_data", validate_data)
    if num_accept_tokens is not None:
        need_integers(op, "num_accept_tokens", num_accept_tokens, (len(x),), x)
    slots = conv_state_indices
    if slots is not None:
        need_integers(op, "conv_state_indices", slots, (len(x),), x)
        slots = unpadded(slots, pad_slot_id)
    ways = {
        "cache_seqlens": cache_seqlens,
        "num_accept_tokens": num_accept_tokens,
        "intermediate_conv_window": intermediate_conv_window,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{op}: {given[1]} is given with {given[0]}; only one of them should be")
    if num_accept_tokens is not None:
        return decoded(
            op,
            x,
            weight,
            bias,
            named(activation),
            cache={"conv_state": conv_state},
            starts=None,
            slots={"conv_state_indices": slots},
            accepted={"num_accept_tokens": num_accept_tokens},
        )
    states = conv_state
    if cache_seqlens is None:
        states = states[..., : weight.shape[1] - 1]
    if slots is None:
        states = states[: len(x)]
    rows = intermediate_state_indices
    if intermediate_conv_window is not None:
        windows = _windows(op, x, states, slots, intermediate_conv_window, rows)
    elif rows is not None:
        raise ValueError(
            f"{op}: intermediate_state_indices is given; intermediate_conv_window should then be "
            "given too"
        )
    out = causal_conv1d.causal_conv1d_update(
        x, states, weight, bias, named(activation), cache_seqlens, slots
    )
    if intermediate_conv_window is not None and rows is not None:
        kept = rows >= 0 if slots is None else (slots >= 0) & (slots < len(states))
        put(intermediate_conv_window[:, : windows.shape[1]], rows, windows, kept)
    return out


def _windows(
    op: str,
    x: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor | None,
    cache: Any,
    rows: Any,
) -> torch.Tensor:
    """Return the W - 1 latest inputs after every token; raise if the cache can't take them."""
    tokens = x if x.ndim == 3 else x[..., None]
    B, D, T = tokens.shape
    N, _, past = states.shape
    need_floats(op, x, intermediate_conv_window=cache)
    of_shape(op, "intermediate_conv_window", cache, ("M", "S", D, past))
    if cache.shape[1] < T:
        raise ValueError(
            f"{op}: intermediate_conv_window has room for {cache.shape[1]} tokens; it should have "
            f"room for {T}"
        )
    need_state(op, "intermediate_conv_window", cache, x)
    writable(op, "intermediate_conv_window", cache)
    need_integers(op, "intermediate_state_indices", rows, (B,), x)
    if not traced() and x.is_cpu:
        check_slots(op, "intermediate_state_indices", rows, len(cache))
    if not N or not T:
        return x.new_empty(B, T, D, past)
    old = states if slots is None else states[slots.clamp(0, N - 1).long()]
    inputs = torch.cat([old.to(x.dtype), tokens], -1)
    return torch.stack([inputs[..., 1 + t : 1 + t + past] for t in range(T)], 1)
