r"""causal-conv1d's functions, as Mamba, vLLM and SGLang call them, with the arguments of these::

    -from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    +from fusedops.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

Our kernels read tokens of either layout, and states by slots, where they lie.
"""

from __future__ import annotations

from typing import Any

import torch

import fusedops
from fusedops._frame.check import (
    device_of,
    dtype_name,
    flag,
    holds,
    of_shape,
    one_of,
    overlaps_itself,
    same_device,
    size,
    traced,
)
from fusedops.conv import ACTIVATIONS

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def need_tensor(op: str, name: str, value: Any) -> None:
    """Raise TypeError unless an argument is a tensor."""
    if not isinstance(value, torch.Tensor):
        shown = "None" if value is None else f"a {type(value).__name__}"
        raise TypeError(f"{op}: {name} is {shown}; it should be a tensor")


def need_floats(op: str, x: Any, **others: Any) -> None:
    """Raise unless x, and the other arguments that are given, are float tensors on one device."""
    for name, value in {"x": x, **others}.items():
        if value is None and name not in ("x", "weight"):
            continue
        need_tensor(op, name, value)
        if value.dtype not in _FLOATS:
            raise TypeError(
                f"{op}: {name} has dtype {dtype_name(value.dtype)}; it should be float32, "
                "float64, bfloat16 or float16"
            )
        if value.device != x.device:
            same_device(op, name, device_of(value), "x", device_of(x))


def need_integers(op: str, name: str, value: Any, shape: tuple[int | str, ...], x: Any) -> None:
    """Raise unless an argument is a tensor of int32 or int64, of a shape, on the device of x."""
    need_tensor(op, name, value)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{op}: {name} has dtype {dtype_name(value.dtype)}; it should be int32 or int64"
        )
    of_shape(op, name, value, shape)
    same_device(op, name, device_of(value), "x", device_of(x))


def need_state(op: str, name: str, state: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless a state can take the values of x in place."""
    holds(op, name, state, x)
    if overlaps_itself(state):
        raise ValueError(f"{op}: {name} overlaps itself; it should have memory for every element")


def _begins(seq_idx: torch.Tensor) -> torch.Tensor:
    """Return whether each of the tokens of a batch (B · T,) begins a sequence."""
    found = torch.ones_like(seq_idx, dtype=torch.bool)
    found[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return found.flatten()


def _numbered(seq_idx: torch.Tensor) -> tuple[fusedops.Sequences | torch.Tensor, bool]:
    """Return the sequences of the tokens of a batch, and whether some tokens may be padding.

    The numbers are read once, and again only after a write to them. A graph doesn't read them: it
    has as many sequences as tokens, of which those at the end are empty.
    """
    count = seq_idx.numel()
    if traced():
        numbers = torch.arange(count, device=seq_idx.device)
        starts = torch.where(_begins(seq_idx), numbers, count).sort().values
        return torch.nn.functional.pad(starts, (0, 1), value=count), True

    def make() -> tuple[fusedops.Sequences, bool]:
        starts = torch.nn.functional.pad(_begins(seq_idx).nonzero()[:, 0], (0, 1), value=count)
        return fusedops.Sequences(starts), bool((seq_idx < 0).any())

    return fusedops.Sequences.kept((seq_idx,), {}, make)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> Any:
    r"""Return the causal convolution of every channel.

    .. math:: \mathrm{out}_{bdt} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{dw} \,
              x_{bd,\,t+w-W+1} + \mathrm{bias}_d\Bigr)

    Parameters
    ----------
    x : tensor (B, D, T), float32, float64, bfloat16 or float16
        Tokens, with channels or tokens side by side in memory; neither is copied.
    weight : tensor (D, W)
        The taps, in any float dtype; the last one multiplies the token itself. Any W ≥ 1.
    bias : tensor (D,), optional
        Added before the activation.
    seq_idx : tensor (B, T), int32 or int64, optional
        The number of each token's sequence, in which nothing crosses to another; a negative one is
        padding, for which out and all gradients are zero. Read once by the host, and again in
        every run of a compiled graph. With it, no states are taken or returned.
    initial_states : tensor (B, D, W - 1), optional
        The inputs before the first token, the latest last; zeros by default.
    return_final_states : bool
        Whether to return the last W - 1 inputs too.
    final_states_out : tensor (B, D, W - 1), optional
        Filled with the final states, and returned in their place.
    activation : {None, "silu", "swish"}
        "silu" and "swish" both name x · sigmoid(x).

    Returns
    -------
    out : tensor (B, D, T)
        In the dtype of x; channels lie side by side in memory.
    final_states : tensor (B, D, W - 1)
        With `return_final_states` only, in the dtype of x.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device; the message names it.

    Notes
    -----
    All tensors but `seq_idx` have gradients of any order. Unlike causal-conv1d, this function
    takes states in every layout, any W, and any strides.

    References
    ----------
    Dao, causal-conv1d 1.6, ``causal_conv1d_fn``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.causal_conv1d import causal_conv1d_fn
    >>> causal_conv1d_fn(torch.tensor([[[1.0, 2, 4]]]), torch.ones(1, 2)).tolist()
    [[[1.0, 3.0, 6.0]]]
    """
    name = "causal_conv1d_fn"
    given = x, weight, bias, initial_states, final_states_out, activation
    tensors = isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
    # The op takes arrays, and kernels of every token, too, and it knows of two of these no names.
    if not tensors or weight.ndim != 2 or seq_idx is not None or final_states_out is not None:
        _need_fn(*given)
    flag(name, "return_final_states", return_final_states)
    # Any, since type checkers can't tell the overloads apart.
    conv: Any = fusedops.dynamic_conv
    if seq_idx is not None:
        B, D, T = x.shape
        need_integers(name, "seq_idx", seq_idx, (B, T), x)
        if initial_states is not None or return_final_states:
            which = "initial_states" if initial_states is not None else "return_final_states"
            raise ValueError(f"{name}: {which} is given with seq_idx; only one of them should be")
        sequences, padded = _numbered(seq_idx)
        flat = x.transpose(1, 2).reshape(1, B * T, D)
        out = conv(flat, weight, bias=bias, cu_seqlens=sequences, activation=activation)
        out = out.view(B, T, D)
        if padded:
            out = out.masked_fill((seq_idx < 0)[..., None], 0)
        return out.transpose(1, 2)
    try:
        state = initial_states
        if state is not None:
            # No tap reads the oldest of W inputs.
            state = torch.nn.functional.pad(state, (1, 0))
        found = conv(
            x.transpose(1, 2),
            weight,
            bias=bias,
            initial_state=state,
            activation=activation,
            output_final_state=return_final_states,
        )
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        # The op has refused under its own names, as of `causal_conv1d_update`.
        _need_fn(*given)
        raise
    if not return_final_states:
        return found.transpose(1, 2)
    out, final = found
    final = final[..., 1:].to(x.dtype)
    if final_states_out is not None:
        of_shape(name, "final_states_out", final_states_out, tuple(final.shape))
        final = final_states_out.copy_(final)
    return out.transpose(1, 2), final


def _need_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    final_states_out: torch.Tensor | None,
    activation: str | None,
) -> None:
    """Raise unless the arguments of `causal_conv1d_fn` fit, and name one that doesn't."""
    name = "causal_conv1d_fn"
    states = {"initial_states": initial_states, "final_states_out": final_states_out}
    need_floats(name, x, weight=weight, bias=bias, **states)
    of_shape(name, "x", x, ("B", "D", "T"))
    B, D, _ = x.shape
    of_shape(name, "weight", weight, (D, "W"))
    if bias is not None:
        of_shape(name, "bias", bias, (D,))
    if initial_states is not None:
        of_shape(name, "initial_states", initial_states, (B, D, weight.shape[1] - 1))
    one_of(name, "activation", activation, ACTIVATIONS)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
) -> torch.Tensor:
    r"""Shift tokens of every sequence into its state, in place, and return their convolution.

    .. math:: \mathrm{out}_{bdt} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{dw} \,
              x_{bd,\,t+w-W+1} + \mathrm{bias}_d\Bigr)

    where x stands for the inputs in the state before the first token.

    Parameters
    ----------
    x : tensor (B, D) or (B, D, T), float32, float64, bfloat16 or float16
        A token of every sequence, or several.
    conv_state : tensor (B, D, L), or (N, D, L) with `conv_state_indices`; L ≥ W - 1
        The last L inputs, the latest last, with any strides. Updated in place.
    weight : tensor (D, W)
        The taps, in any float dtype.
    bias : tensor (D,), optional
        Added before the activation.
    activation : {None, "silu", "swish"}
        "silu" and "swish" both name x · sigmoid(x).
    cache_seqlens : tensor (B,), int32 or int64, optional
        The number of tokens that each sequence has had. With it, a state is a circular buffer.
    conv_state_indices : tensor (B,), int32 or int64, optional
        The state of each sequence, as in continuous batching. A negative one is padding, for which
        out is zero and no state changes.
    pad_slot_id : int
        Another number of `conv_state_indices` that means padding, as in vLLM and SGLang.

    Returns
    -------
    tensor of the shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device; the message names it.
    RuntimeError
        Raised by torch if `conv_state` is a leaf that requires grad.

    Notes
    -----
    As in causal-conv1d, the result has no gradient, whatever requires one: `causal_conv1d_fn` with
    `initial_states` has. An updated state passes no gradient on to its old values.

    References
    ----------
    Dao, causal-conv1d 1.6, ``causal_conv1d_update``; SGLang and vLLM, ``causal_conv1d_update``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.causal_conv1d import causal_conv1d_update
    >>> state = torch.tensor([[[1.0]], [[2.0]]])
    >>> slots = torch.tensor([1, -1])
    >>> x = torch.full((2, 1), 4.0)
    >>> causal_conv1d_update(x, state, torch.ones(1, 2), conv_state_indices=slots).tolist()
    [[6.0], [0.0]]
    >>> state.tolist()
    [[[1.0]], [[4.0]]]
    """
    given = x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
    # The op takes arrays, and kernels of every token, too.
    if not all(isinstance(each, torch.Tensor) for each in given[:3]) or weight.ndim != 2:
        _need_update(*given)
    if conv_state_indices is not None and pad_slot_id >= 0:
        _need_update(*given)
        padding = conv_state_indices == pad_slot_id
        conv_state_indices = conv_state_indices.masked_fill(padding, -1)
    several = x.ndim == 3
    # Autograd must learn that an update has overwritten values that it knows.
    recorded = conv_state.requires_grad and torch.is_grad_enabled()
    state = conv_state.detach().clone() if recorded else conv_state
    try:
        with torch.no_grad():
            out = fusedops.dynamic_conv_step(
                x.transpose(1, 2) if several else x,
                state,
                weight,
                bias=bias,
                activation=activation,
                slots=conv_state_indices,
                positions=cache_seqlens,
            )
    except (AttributeError, TypeError, ValueError):
        # The op has refused under its own names. Checks of every call would cost the host as much
        # again as the checks of the op.
        _need_update(*given)
        raise
    if recorded:
        if conv_state_indices is not None:
            numbers = torch.arange(len(state), device=state.device)
            updated = (conv_state_indices[:, None] == numbers).any(0)
            state = torch.where(updated[:, None, None], state, conv_state)
        conv_state.copy_(state)
    return out.transpose(1, 2) if several else out


def _need_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> None:
    """Raise unless the arguments of `causal_conv1d_update` fit, and name one that doesn't."""
    name = "causal_conv1d_update"
    need_floats(name, x, conv_state=conv_state, weight=weight, bias=bias)
    of_shape(name, "weight", weight, ("D", "W"))
    D, W = weight.shape
    if not W:
        raise ValueError(f"{name}: weight has shape {(D, W)}; it should have at least one tap")
    of_shape(name, "x", x, ("B", D) if x.ndim == 2 else ("B", D, "T"))
    if bias is not None:
        of_shape(name, "bias", bias, (D,))
    B = x.shape[0]
    of_shape(name, "conv_state", conv_state, (B if conv_state_indices is None else "N", D, "L"))
    if conv_state.shape[2] < W - 1:
        raise ValueError(
            f"{name}: conv_state has {conv_state.shape[2]} inputs of a sequence; it should have "
            f"at least {W - 1}, one fewer than weight has taps"
        )
    need_state(name, "conv_state", conv_state, x)
    one_of(name, "activation", activation, ACTIVATIONS)
    if cache_seqlens is not None:
        need_integers(name, "cache_seqlens", cache_seqlens, (B,), x)
    if conv_state_indices is not None:
        need_integers(name, "conv_state_indices", conv_state_indices, (B,), x)
        if B and not traced() and conv_state_indices.is_cpu:
            largest = max(conv_state_indices.tolist())
            if largest >= len(conv_state):
                raise ValueError(
                    f"{name}: conv_state_indices has {largest}; it should be below "
                    f"{len(conv_state)}, the number of states"
                )


def causal_conv1d_varlen_states(
    x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int
) -> torch.Tensor:
    """Return the last inputs of packed sequences, with zeros before their first.

    states[b, d, l] = x[cu_seqlens[b + 1] - state_len + l, d]

    Parameters
    ----------
    x : tensor (T, D), of any dtype
        The tokens of all sequences.
    cu_seqlens : tensor (B + 1,), int32 or int64
        Where each sequence begins, and where the last one ends. On a GPU the host doesn't read it:
        a boundary outside of the tokens is moved to their end.
    state_len : int
        L, the inputs of a state.

    Returns
    -------
    tensor (B, D, L)
        In the dtype of x, differentiable; channels lie side by side in memory.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device, or a boundary on the CPU lies outside
        of the tokens; the message names it.

    References
    ----------
    Dao, causal-conv1d 1.6, ``causal_conv1d_varlen_states``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.causal_conv1d import causal_conv1d_varlen_states
    >>> x = torch.arange(1.0, 5)[:, None]
    >>> causal_conv1d_varlen_states(x, torch.tensor([0, 3, 4]), 2).tolist()
    [[[2.0, 3.0]], [[0.0, 4.0]]]
    """
    name = "causal_conv1d_varlen_states"
    need_tensor(name, "x", x)
    of_shape(name, "x", x, ("T", "D"))
    need_integers(name, "cu_seqlens", cu_seqlens, ("B + 1",), x)
    size(name, "state_len", state_len)
    if len(cu_seqlens) and not traced() and cu_seqlens.is_cpu:
        least, most = (int(bound) for bound in cu_seqlens.aminmax())
        if least < 0 or most > len(x):
            raise ValueError(
                f"{name}: cu_seqlens has {least if least < 0 else most}; it should lie between 0 "
                f"and {len(x)}, the number of tokens in x"
            )
    starts = cu_seqlens.clamp(0, len(x))
    at = starts[1:, None] - state_len + torch.arange(state_len, device=x.device)
    inside = at >= starts[:-1, None]
    if not len(x):
        return x.new_zeros(len(at), state_len, x.shape[1]).transpose(1, 2)
    states = x[at.clamp(min=0)].masked_fill(~inside[..., None], 0)
    return states.transpose(1, 2)
