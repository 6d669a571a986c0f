r"""causal-conv1d's functions, with its arguments, as Mamba and transformers call them::

    -from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    +from fusedops.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

`register` puts them in the place of the package, for transformers and other programs. Our kernels
read tokens of either layout in place, and states by their slots.
"""

from __future__ import annotations

from typing import Any

import fusedops._frame.needs_torch

import torch

import fusedops
from fusedops._frame.check import (
    device_of,
    dtype_name,
    flag,
    holds,
    need_apart,
    no_overlap,
    of_shape,
    one_of,
    same_device,
    size,
    traced,
)
from fusedops._frame.hook import outside_of_graphs
from fusedops.compat._packages import Package
from fusedops.conv import ACTIVATIONS, Activation
from fusedops.conv.op import conv_vjp
from fusedops.conv.plan import check_slots

__all__ = [
    "causal_conv1d_bwd_function",
    "causal_conv1d_fn",
    "causal_conv1d_fwd_function",
    "causal_conv1d_update",
    "causal_conv1d_update_function",
    "causal_conv1d_varlen_states",
    "register",
    "unregister",
]

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def need_tensor(op: str, name: str, value: Any) -> None:
    """Raise TypeError unless an argument is a tensor."""
    if not isinstance(value, torch.Tensor):
        shown = "None" if value is None else f"a {type(value).__name__}"
        raise TypeError(f"{op}: {name} is {shown}; it should be a tensor")


def need_float(op: str, name: str, value: Any) -> None:
    """Raise TypeError unless an argument is a float tensor."""
    need_tensor(op, name, value)
    if value.dtype not in _FLOATS:
        raise TypeError(
            f"{op}: {name} has dtype {dtype_name(value.dtype)}; it should be float32, float64, "
            "bfloat16 or float16"
        )


def need_floats(op: str, x: Any, **others: Any) -> None:
    """Raise unless x, and the other arguments that are given, are float tensors on one device."""
    for name, value in {"x": x, **others}.items():
        if value is None and name not in ("x", "weight"):
            continue
        need_float(op, name, value)
        if value.device != x.device:
            same_device(op, name, device_of(value), "x", device_of(x))


def need_integers(
    op: str, name: str, value: Any, shape: tuple[int | str, ...], x: Any, of: str = "x"
) -> None:
    """Raise unless an argument is a tensor of int32 or int64, of a shape, on the device of x."""
    need_tensor(op, name, value)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{op}: {name} has dtype {dtype_name(value.dtype)}; it should be int32 or int64"
        )
    of_shape(op, name, value, shape)
    same_device(op, name, device_of(value), of, device_of(x))


def need_weight(op: str, weight: torch.Tensor, channels: int | str = "D") -> tuple[int, int]:
    """Return the channels and the taps of a weight. Raises ValueError unless there is a tap."""
    of_shape(op, "weight", weight, (channels, "W"))
    D, W = weight.shape
    if not W:
        raise ValueError(f"{op}: weight has shape {(D, W)}; it should have at least one tap")
    return D, W


def need_activation(op: str, activation: Any) -> None:
    """Raise NotImplementedError, as causal-conv1d, for an unknown activation."""
    try:
        one_of(op, "activation", activation, ACTIVATIONS)
    except ValueError as error:
        raise NotImplementedError(str(error)) from None


def need_state(op: str, name: str, state: torch.Tensor, x: torch.Tensor) -> None:
    """Raise unless a state can take the values of x in place."""
    holds(op, name, state, x)
    no_overlap(op, name, state)


def need_number(op: str, name: str, value: Any) -> None:
    """Raise TypeError unless the number of a padded state is an int or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; it should be an int or None")


def unpadded(slots: torch.Tensor, *numbers: int | None) -> torch.Tensor:
    """Return slots in which the numbers of padding are negative."""
    for number in numbers:
        if number is not None and number >= 0:
            slots = slots.masked_fill(slots == number, -1)
    return slots


def _begins(seq_idx: torch.Tensor) -> torch.Tensor:
    """Return for each token of a batch whether it begins a sequence, as (B · T,)."""
    found = torch.ones_like(seq_idx, dtype=torch.bool)
    found[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return found.flatten()


def _numbered(seq_idx: torch.Tensor) -> tuple[fusedops.Sequences | torch.Tensor, bool]:
    """Return the sequences of the tokens of a batch, and whether some tokens may be padding.

    The host reads the numbers in each call, and a GPU's only after a write to them. For a graph it
    doesn't: a graph has as many sequences as tokens, and the last ones may be empty.
    """
    count = seq_idx.numel()
    if traced():
        # The last as a tensor: torch.export would hold a number to the example's.
        numbers = torch.arange(count + 1, device=seq_idx.device)
        starts = torch.where(_begins(seq_idx), numbers[:-1], numbers[-1]).sort().values
        return torch.cat([starts, numbers[-1:]]), True

    def make() -> tuple[fusedops.Sequences, bool]:
        starts = torch.nn.functional.pad(_begins(seq_idx).nonzero()[:, 0], (0, 1), value=count)
        return fusedops.Sequences(starts), bool((seq_idx < 0).any())

    # Torch doesn't count all writes, as of NumPy and other processes.
    return make() if seq_idx.is_cpu else fusedops.Sequences.kept((seq_idx,), {}, make)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: Activation | None = None,
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
        padding, for which out and, if x is finite there, all gradients are zero. Read once by the
        host, and again in every run of a compiled graph. With it, no states are taken or returned.
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
    NotImplementedError
        If the activation is unknown.

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
        states = {"initial_states": initial_states, "return_final_states": return_final_states}
        _need_no_states(name, **states)
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
    activation: Activation | None,
    name: str = "causal_conv1d_fn",
) -> None:
    """Raise unless the arguments of `causal_conv1d_fn` fit, and name one that doesn't."""
    states = {"initial_states": initial_states, "final_states_out": final_states_out}
    need_floats(name, x, weight=weight, bias=bias, **states)
    of_shape(name, "x", x, ("B", "D", "T"))
    B, D, _ = x.shape
    _, W = need_weight(name, weight, D)
    if bias is not None:
        of_shape(name, "bias", bias, (D,))
    if initial_states is not None:
        of_shape(name, "initial_states", initial_states, (B, D, W - 1))
    need_activation(name, activation)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int | None = -1,
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
    pad_slot_id : int or None
        Another number of `conv_state_indices` that means padding, as in vLLM and SGLang.

    Returns
    -------
    tensor of the shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device; the message names it.
    NotImplementedError
        If the activation is unknown.
    RuntimeError
        Raised by torch if `conv_state` is a leaf that requires grad.

    Notes
    -----
    As in causal-conv1d, the result has no gradient, even if an argument requires grad; the result
    of `causal_conv1d_fn` with `initial_states` has. An updated state passes no gradient on to its
    old values.

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
    name = "causal_conv1d_update"
    need_number(name, "pad_slot_id", pad_slot_id)
    if conv_state_indices is not None and pad_slot_id is not None and pad_slot_id >= 0:
        need_integers(name, "conv_state_indices", conv_state_indices, ("B",), x)
        conv_state_indices = unpadded(conv_state_indices, pad_slot_id)
    given = x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
    # The op takes arrays, and kernels of every token, too.
    if not all(isinstance(each, torch.Tensor) for each in given[:3]) or weight.ndim != 2:
        _need_update(*given)
    several = x.ndim == 3
    # Autograd must see that the update overwrites the state's values.
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
            numbers = torch.arange(state.shape[0], device=state.device)
            updated = (conv_state_indices[:, None] == numbers).any(0)
            state = torch.where(updated[:, None, None], state, conv_state)
        conv_state.copy_(state)
    return out.transpose(1, 2) if several else out


def _need_no_states(name: str, **states: Any) -> None:
    """Raise if there are states beside `seq_idx`."""
    for which, given in states.items():
        if given is not None and given is not False:
            raise ValueError(f"{name}: {which} is given with seq_idx; only one of them should be")


def _need_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> None:
    """Raise unless the arguments of `causal_conv1d_update` fit, and name one that doesn't."""
    name = "causal_conv1d_update"
    need_floats(name, x, conv_state=conv_state, weight=weight, bias=bias)
    D, W = need_weight(name, weight)
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
    need_activation(name, activation)
    if cache_seqlens is not None:
        need_integers(name, "cache_seqlens", cache_seqlens, (B,), x)
        if not conv_state.shape[2]:
            raise ValueError(f"{name}: cache_seqlens is given; conv_state should then have inputs")
        if not traced() and cache_seqlens.is_cpu and (cache_seqlens < 0).any():
            least = int(cache_seqlens.min())
            raise ValueError(f"{name}: cache_seqlens has {least}; it should be at least 0")
    read = {"x": x, "weight": weight, "bias": bias, "cache_seqlens": cache_seqlens}
    need_apart(name, "conv_state", conv_state, read | {"conv_state_indices": conv_state_indices})
    if conv_state_indices is not None:
        need_integers(name, "conv_state_indices", conv_state_indices, (B,), x)
        if not traced() and conv_state_indices.is_cpu:
            check_slots(name, "conv_state_indices", conv_state_indices, conv_state.shape[0])


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
    starts = cu_seqlens.clamp(0, x.shape[0])
    at = starts[1:, None] - state_len + torch.arange(state_len, device=x.device)
    inside = at >= starts[:-1, None]
    if not x.shape[0]:
        return x.new_zeros(at.shape[0], state_len, x.shape[1]).transpose(1, 2)
    states = x[at.clamp(min=0)].masked_fill(~inside[..., None], 0)
    return states.transpose(1, 2)


def causal_conv1d_fwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    final_states_out: torch.Tensor | None,
    silu_activation: bool,
) -> torch.Tensor:
    """Return the causal convolution of every channel, without a gradient.

    out = causal_conv1d_fn(x, weight, bias, ...), see `causal_conv1d_fn`

    Parameters
    ----------
    x, weight, bias, seq_idx, initial_states
        As of `causal_conv1d_fn`.
    final_states_out : tensor (B, D, W - 1), optional
        Filled with the final states.
    silu_activation : bool
        Whether the activation is x · sigmoid(x); otherwise there is none.

    Returns
    -------
    tensor (B, D, T)
        In the dtype of x, and laid out as ``torch.empty_like(x)``.

    Raises
    ------
    TypeError, ValueError
        As of `causal_conv1d_fn`.

    References
    ----------
    Dao, causal-conv1d 1.6, ``causal_conv1d.cpp_functions``, which mamba_ssm calls.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.causal_conv1d import causal_conv1d_fwd_function
    >>> x, weight = torch.tensor([[[1.0, 2, 4]]]), torch.ones(1, 2)
    >>> causal_conv1d_fwd_function(x, weight, None, None, None, None, False).tolist()
    [[[1.0, 3.0, 6.0]]]
    """
    with torch.no_grad():
        found = causal_conv1d_fn(
            x,
            weight,
            bias,
            seq_idx,
            initial_states,
            return_final_states=final_states_out is not None,
            final_states_out=final_states_out,
            activation="silu" if silu_activation else None,
        )
        out = found if final_states_out is None else found[0]
        like = torch.empty_like(x)
        if out.stride() != like.stride():
            return like.copy_(out)
        # A view that an autograd function returns beside final states can't be written to.
        return x.new_empty(0).set_(out)


@outside_of_graphs
def causal_conv1d_bwd_function(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dout: torch.Tensor,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dfinal_states: torch.Tensor | None,
    dx: torch.Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[torch.Tensor | None, ...]:
    r"""Return the gradients of `causal_conv1d_fn`.

    .. math:: \mathrm{dx} = \Bigl(\frac{\partial\,\mathrm{out}}{\partial x}\Bigr)^{\!\top}
              \mathrm{dout}

    and likewise for weight, bias and initial states.

    Parameters
    ----------
    x, weight, bias, seq_idx, initial_states
        As of `causal_conv1d_fn`.
    dout : tensor (B, D, T)
        The cotangent of out.
    dfinal_states : tensor (B, D, W - 1), optional
        The cotangent of the final states.
    dx : tensor (B, D, T), optional
        Filled with the gradient of x, and returned.
    return_dinitial_states : bool
        Whether to return the gradient of `initial_states`.
    silu_activation : bool
        Whether the activation is x · sigmoid(x); otherwise there is none.

    Returns
    -------
    dx, dweight, dbias, dinitial_states : tensor, or None where it isn't given or asked for
        In the shapes and dtypes of x, weight, bias and initial states.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device; the message names it.

    References
    ----------
    Dao, causal-conv1d 1.6, ``causal_conv1d.cpp_functions``, which mamba_ssm calls.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.causal_conv1d import causal_conv1d_bwd_function
    >>> x, weight = torch.tensor([[[1.0, 2, 4]]]), torch.ones(1, 2)
    >>> given = x, weight, None, torch.ones_like(x), None, None, None, None, False, False
    >>> dx, dweight, dbias, dinitial_states = causal_conv1d_bwd_function(*given)
    >>> dx.tolist(), dweight.tolist()
    ([[[2.0, 2.0, 1.0]]], [[3.0, 7.0]])
    """
    name = "causal_conv1d_bwd_function"
    _need_fn(x, weight, bias, initial_states, None, None, name)
    need_floats(name, x, weight=weight, dout=dout, dfinal_states=dfinal_states, dx=dx)
    (B, D, T), width = x.shape, weight.shape[1]
    for argument, value in (("dout", dout), ("dx", dx)):
        if value is not None:
            of_shape(name, argument, value, (B, D, T))
    if dfinal_states is not None:
        of_shape(name, "dfinal_states", dfinal_states, (B, D, width - 1))
    if return_dinitial_states and initial_states is None:
        raise ValueError(f"{name}: initial_states is None; its gradient is asked for")
    sequences: Any = None
    tokens = B, T, D
    with torch.no_grad():
        if seq_idx is not None:
            need_integers(name, "seq_idx", seq_idx, (B, T), x)
            _need_no_states(name, initial_states=initial_states, dfinal_states=dfinal_states)
            sequences, padded = _numbered(seq_idx)
            if isinstance(sequences, torch.Tensor):
                sequences = fusedops.Sequences.read(name, sequences, num_tokens=B * T)
            tokens = 1, B * T, D
            if padded:
                dout = dout.masked_fill((seq_idx < 0)[:, None], 0)
        # No tap reads the oldest of W inputs.
        state, dfinal = (
            None if states is None else torch.nn.functional.pad(states, (1, 0))
            for states in (initial_states, dfinal_states)
        )
        found = conv_vjp(
            x.transpose(1, 2).reshape(tokens),
            weight,
            state,
            bias,
            dout.transpose(1, 2).reshape(tokens),
            dfinal,
            sequences,
            "silu" if silu_activation else "none",
            out=(True, True, return_dinitial_states or None, bias is not None or None),
        )
        dtokens = found.dx.view(B, T, D).transpose(1, 2)
        dx = dtokens if dx is None else dx.copy_(dtokens)
        dstates = found.dinitial_state
        return dx, found.dkernels, found.dbias, None if dstates is None else dstates[..., 1:]


def causal_conv1d_update_function(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu_activation: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> torch.Tensor:
    """Shift tokens of every sequence into its state, in place, and return their convolution.

    out = causal_conv1d_update(x, conv_state, weight, bias, ...), see `causal_conv1d_update`

    Parameters
    ----------
    x, conv_state, weight, bias, cache_seqlens, conv_state_indices
        As of `causal_conv1d_update`.
    silu_activation : bool
        Whether the activation is x · sigmoid(x); otherwise there is none.

    Returns
    -------
    tensor of the shape and dtype of x

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As of `causal_conv1d_update`.

    References
    ----------
    Dao, causal-conv1d 1.6, ``causal_conv1d.cpp_functions``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.causal_conv1d import causal_conv1d_update_function
    >>> x, state, weight = torch.tensor([[[4.0]]]), torch.tensor([[[1.0]]]), torch.ones(1, 2)
    >>> causal_conv1d_update_function(x, state, weight, None, False, None, None).tolist()
    [[[5.0]]]
    """
    activation: Activation | None = "silu" if silu_activation else None
    return causal_conv1d_update(
        x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
    )


#: The package's modules, and our functions in them.
FUNCTIONS = {
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    "causal_conv1d.causal_conv1d_interface": ("causal_conv1d_fn", "causal_conv1d_update"),
    "causal_conv1d.causal_conv1d_varlen": ("causal_conv1d_varlen_states",),
    "causal_conv1d.cpp_functions": (
        "causal_conv1d_fwd_function",
        "causal_conv1d_bwd_function",
        "causal_conv1d_update_function",
    ),
}
PACKAGE = Package("causal_conv1d", "causal-conv1d", "1.6.1", FUNCTIONS, globals())


def register() -> None:
    """Put our functions in the place of the package ``causal_conv1d`` from now on.

    Call it in every process. Programs that import the package, such as transformers and mamba_ssm,
    then get our functions, on a CPU too, whether the package is installed or not. Modules that were
    imported before call our functions too: transformers' models, modules that imported the
    package's functions by name, and modules that have None for them because there was no package.
    `fusedops.compat.swaps` counts calls. A second call changes nothing.

    Notes
    -----
    A function that a program has kept elsewhere before, such as in an attribute of a model or under
    another name, isn't replaced. A program's check for a GPU stays, as in mamba_ssm or in models
    with code of their own. transformers prefers kernels from the hub where a model asks for them by
    ``use_kernels=True``.

    Examples
    --------
    >>> import fusedops.compat.causal_conv1d
    >>> fusedops.compat.causal_conv1d.register()
    >>> from causal_conv1d import causal_conv1d_fn
    >>> causal_conv1d_fn.__wrapped__.__module__
    'fusedops.compat.causal_conv1d'
    >>> fusedops.compat.causal_conv1d.unregister()
    """
    PACKAGE.register()


def unregister() -> None:
    """Give programs the package ``causal_conv1d`` that there was before `register`, or none.

    Functions that a program has imported by name since then stay ours, except in transformers.
    Without `register` before, nothing changes.

    Examples
    --------
    >>> import fusedops.compat.causal_conv1d
    >>> fusedops.compat.causal_conv1d.unregister()
    """
    PACKAGE.unregister()
