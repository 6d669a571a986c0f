r"""vLLM's causal convolutions, with the arguments of vLLM 0.33::

    -from vllm.model_executor.layers.mamba.ops.causal_conv1d import (
    +from fusedops.compat.vllm import (
         causal_conv1d_fn,
         causal_conv1d_update,
     )

The order of arguments, the layouts and the padding differ from causal-conv1d's. As in vLLM, results
have no gradient.
"""

from __future__ import annotations

from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops._frame.check import flag, need_apart, no_overlap, of_shape, traced, writable
from fusedops.compat import causal_conv1d
from fusedops.compat._paged import convolved, decoded, named
from fusedops.compat.causal_conv1d import (
    need_floats,
    need_integers,
    need_number,
    need_tensor,
    unpadded,
)
from fusedops.conv import Activation

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: bool | Activation | None = "silu",
    pad_slot_id: int | None = -1,
    null_block_id: int | None = 0,
    metadata: Any = None,
    validate_data: bool = False,
) -> torch.Tensor:
    r"""Return the causal convolution of packed sequences, and update their states in place.

    .. math:: \mathrm{out}_{dt} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{dw} \,
              x_{d,\,t+w-W+1} + \mathrm{bias}_d\Bigr)

    where x stands for the inputs in a sequence's state, or zeros, before the first token.

    Parameters
    ----------
    x : tensor (D, T), float32, float64, bfloat16 or float16
        The tokens of all sequences, in any layout of memory; rounded to the dtype of the states.
    weight : tensor (D, W)
        The taps, in any float dtype.
    bias : tensor (D,) or None
        Added before the activation.
    conv_states : tensor (N, D, L), L ≥ W - 1
        The first W - 1 inputs of each are the latest of a sequence. Updated in place.
    query_start_loc : tensor (B + 1,), int32 or int64
        Where each sequence begins, and where the last one ends. Tokens after that belong to none.
    cache_indices : tensor (B,), int32 or int64, optional
        The number of each sequence's state, by default the sequence's; further ones aren't read.
    has_initial_state : tensor (B,), bool, optional
        Whether a sequence goes on from its state; none does by default.
    activation : {None, "silu", "swish"} or bool
        "silu", "swish" and True all name x · sigmoid(x).
    pad_slot_id, null_block_id : int or None
        Numbers in `cache_indices` that mark a sequence as padding, as all negative numbers do.
        Padding changes no state, and its results, which vLLM doesn't write, mean nothing. For
        versions of vLLM without `null_block_id`, which keep a sequence in block 0, pass None.
    metadata : optional
        The plan of vLLM's kernel; not used.
    validate_data : bool
        Whether vLLM checks the arguments; here they are always checked.

    Returns
    -------
    tensor (D, T)
        In the dtype of x, without a gradient.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape, device or, on the CPU, values; the message names
        it, and no state has changed. On a GPU the host reads no value.

    References
    ----------
    vLLM 0.33, ``vllm.model_executor.layers.mamba.ops.causal_conv1d``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.vllm import causal_conv1d_fn
    >>> x, states = torch.tensor([[1.0, 2, 4, 8]]), torch.zeros(3, 1, 1)
    >>> starts, slots = torch.tensor([0, 3, 4]), torch.tensor([2, 1])
    >>> causal_conv1d_fn(x, torch.ones(1, 2), None, states, starts, slots, activation=None).tolist()
    [[1.0, 3.0, 6.0, 8.0]]
    >>> states.ravel().tolist()
    [0.0, 8.0, 4.0]
    """
    op = "causal_conv1d_fn"
    need_tensor(op, "conv_states", conv_states)
    need_floats(op, x, weight=weight, conv_states=conv_states)
    of_shape(op, "x", x, ("D", "T"))
    need_integers(op, "query_start_loc", query_start_loc, ("B + 1",), x)
    need_number(op, "pad_slot_id", pad_slot_id)
    need_number(op, "null_block_id", null_block_id)
    flag(op, "validate_data", validate_data)
    if isinstance(metadata, torch.Tensor):
        raise TypeError(f"{op}: metadata is a tensor; it should be vLLM's metadata or None")
    count = max(len(query_start_loc) - 1, 0)
    if cache_indices is None:
        slots = torch.arange(count, device=x.device)
    else:
        need_integers(op, "cache_indices", cache_indices, ("B",), x)
        slots = unpadded(cache_indices[:count], pad_slot_id, null_block_id)
    out = convolved(
        op,
        x.to(conv_states.dtype).mT,
        weight,
        bias,
        named(activation),
        cache={"conv_states": conv_states},
        starts=query_start_loc,
        slots={"cache_indices": slots},
        continued=False if has_initial_state is None else has_initial_state,
    )
    return out.mT.to(x.dtype)


@torch.no_grad()
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | Activation | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = 0,
    validate_data: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Shift tokens of every sequence into its state, in place, and return their convolution.

    .. math:: \mathrm{out}_{bdt} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{dw} \,
              x_{bd,\,t+w-W+1} + \mathrm{bias}_d\Bigr)

    where x stands for the inputs in the state before the first token.

    Parameters
    ----------
    x : tensor (B, D), (B, D, T), or (T, D) with `query_start_loc`; float
        A token of every sequence, or several, in float32, float64, bfloat16 or float16; rounded to
        the dtype of the states. The result takes its place unless `out` is given, dtypes differ, x
        requires grad, or x was made in inference mode and is used outside of it.
    conv_state : tensor (N, D, L), L ≥ W - 1
        The first W - 1 inputs of each are the latest of a sequence. Updated in place.
    weight : tensor (D, W)
        The taps, in any float dtype.
    bias : tensor (D,), optional
        Added before the activation.
    activation : {None, "silu", "swish"} or bool
        "silu", "swish" and True all name x · sigmoid(x).
    conv_state_indices : tensor (B,) or (B, M), int32 or int64, optional
        The number of each sequence's state, by default the sequence's; of M numbers the first.
    num_accepted_tokens : tensor (B,), int32 or int64, optional
        For speculative decoding: the number A, at least 1, of the last call's tokens that are
        right. The latest inputs are then the W - 1 from number A - 1 on. The updated state has the
        W - 2 latest of these, then all T tokens of this call, for which L ≥ T + W - 2.
    query_start_loc : tensor (B + 1,), int32 or int64, optional
        Where each of packed sequences begins, and where the last one ends.
    max_query_len : int
        The most tokens of a packed sequence; not used.
    null_block_id : int or None
        The number in `conv_state_indices` that marks a sequence as padding, as all negative numbers
        do. Padding changes no state, and its results mean nothing. For versions of vLLM without
        this argument, which keep a sequence in block 0, pass None.
    validate_data : bool
        Whether vLLM checks the arguments; here they are always checked.
    out : tensor of the shape and dtype of x, optional
        Filled with the result.

    Returns
    -------
    tensor of the shape and dtype of x
        `out` if it is given, else x or a new tensor, without a gradient.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape, device or, on the CPU, values; the message names
        it, and no state has changed. On a GPU the host reads no value.

    References
    ----------
    vLLM 0.33, ``vllm.model_executor.layers.mamba.ops.causal_conv1d``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.vllm import causal_conv1d_update
    >>> states = torch.tensor([[[1.0]], [[2.0]], [[3.0]]])
    >>> slots = torch.tensor([2, 0])
    >>> x = torch.full((2, 1), 4.0)
    >>> causal_conv1d_update(x, states, torch.ones(1, 2), None, None, slots)[0].tolist()
    [7.0]
    >>> states.ravel().tolist()
    [1.0, 2.0, 4.0]
    """
    op = "causal_conv1d_update"
    need_tensor(op, "conv_state", conv_state)
    need_floats(op, x, weight=weight, conv_state=conv_state)
    if x.ndim != 3:
        of_shape(op, "x", x, ("B", "D"))
    of_shape(op, "weight", weight, (x.shape[1], "W"))
    of_shape(op, "conv_state", conv_state, ("N", x.shape[1], "L"))
    need_number(op, "null_block_id", null_block_id)
    flag(op, "validate_data", validate_data)
    written = out
    # A write to x would leave the gradient of its old values, or be refused by torch too late.
    inference = not traced() and x.is_inference() and not torch.is_inference_mode_enabled()
    kept = x.requires_grad or inference
    if out is None and x.dtype == conv_state.dtype and not kept:
        written = x
    if out is not None:
        need_floats(op, x, out=out)
        of_shape(op, "out", out, tuple(x.shape))
        if out.dtype != x.dtype:
            raise TypeError(f"{op}: out has dtype {out.dtype}; it should be that of x, {x.dtype}")
        if out.requires_grad:
            raise ValueError(f"{op}: out requires grad; it should not, as the result has none")
        writable(op, "out", out)
        read = {"conv_state": conv_state, "weight": weight, "bias": bias}
        read |= {"conv_state_indices": conv_state_indices, "query_start_loc": query_start_loc}
        need_apart(op, "out", out, read | {"num_accepted_tokens": num_accepted_tokens})
    if written is not None:
        no_overlap(op, "x" if out is None else "out", written)
    slots = conv_state_indices
    if slots is not None:
        need_tensor(op, "conv_state_indices", slots)
        columns = slots.ndim == 2 and slots.shape[1] > 0
        need_integers(op, "conv_state_indices", slots, ("B", "M") if columns else ("B",), x)
        slots = unpadded(slots[:, 0] if slots.ndim == 2 else slots, null_block_id)
    tokens = x.to(conv_state.dtype)
    if query_start_loc is None and num_accepted_tokens is None:
        states = conv_state[..., : weight.shape[1] - 1]
        if slots is None:
            states = states[: len(x)]
        result = causal_conv1d.causal_conv1d_update(
            tokens, states, weight, bias, named(activation), None, slots
        )
    else:
        need_apart(op, "conv_state", conv_state, {"x": x})
        result = decoded(
            op,
            tokens,
            weight,
            bias,
            named(activation),
            cache={"conv_state": conv_state},
            starts=query_start_loc,
            slots={"conv_state_indices": slots},
            accepted={"num_accepted_tokens": num_accepted_tokens},
        )
    return result.to(x.dtype) if written is None else written.copy_(result)
