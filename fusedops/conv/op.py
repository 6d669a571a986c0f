"""Causal convolution with a kernel for every token and channel, and its decoding step.

The definition of value and gradient, the rule for all further derivatives, and the public ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, overload

from fusedops._frame.arrays import (
    ArrayT,
    added,
    cast,
    namespace,
    silu,
    silu_slopes,
    wide,
    zeros,
)
from fusedops._frame.check import (
    flag,
    holds,
    indices,
    no_overlap,
    of_shape,
    one_of,
    promoted,
)
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName
from fusedops.conv.plan import (
    Sequences,
    check_slots,
    may_update,
    num_sequences,
    read_sequences,
    readable,
    spans,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fusedops.conv.plan import Options

    class _Options(Options[ArrayT], total=False):
        bias: ArrayT | None
        residual: ArrayT | None
        activation: Activation | None


Activation = Literal["silu", "swish"]
ACTIVATIONS = (None, *get_args(Activation))


class _Window:
    """The inputs that the taps of a span read: W of its state, then its own."""

    def __init__(self, x: Any, kernels: Any, state: Any) -> None:
        self.width = kernels.shape[-1]
        self.length = x.shape[1]
        if state is None:
            past = zeros(x, (x.shape[0], self.width, x.shape[2]))
        else:
            past = state.swapaxes(1, 2)
        self.inputs = namespace(x).concatenate([past, x], axis=1)

    def tap(self, array: Any, w: int) -> Any:
        """Return the part of an array like `inputs` that tap w reads."""
        return array[:, 1 + w : 1 + w + self.length]

    def convolved(self, kernels: Any, bias: Any) -> Any:
        total = sum(kernels[..., w] * self.tap(self.inputs, w) for w in range(self.width))
        return total if bias is None else total + bias


def _formula(a: Any) -> tuple[Any, Any]:
    """Define the convolution and the last W inputs of every sequence."""
    x, kernels, initial_state, bias, residual, sequences, activation = a
    xp = namespace(x)
    inputs, k, state, b = map(wide, (x, kernels, initial_state, bias))
    outs, finals = [inputs[:, :0]], [zeros(inputs, (0, x.shape[2], kernels.shape[-1]))]
    for batch, tokens, states in spans(x, sequences):
        span_k = k if k.ndim == 2 else k[batch, tokens]
        window = _Window(inputs[batch, tokens], span_k, None if state is None else state[states])
        h = window.convolved(span_k, b)
        outs.append(silu(h) if activation == "silu" else h)
        finals.append(window.inputs[:, window.inputs.shape[1] - window.width :].swapaxes(1, 2))
    out, final = xp.concatenate(outs, axis=1), xp.concatenate(finals, axis=0)
    if residual is not None:
        out = out + wide(residual)
    return cast(out, x), cast(final, promoted((x, initial_state)))


def _vjp_formula(a: Any) -> tuple[Any, ...]:
    r"""Return the cotangents of x, kernels, initial_state and bias.

    With h the convolution before its activation and :math:`v = \mathrm{dout} \cdot a'(h)`, tap w
    gives :math:`\mathrm{dk}_{tdw} = v_{td} x_{t+w-W+1,d}` and
    :math:`\mathrm{dx}_{t+w-W+1,d} \mathrel{+}= v_{td} k_{tdw}`.
    """
    inputs, k, state, b = map(wide, (a.x, a.kernels, a.initial_state, a.bias))
    g, g_final = wide(a.dout), wide(a.dfinal_state)
    dx: Any
    dk: Any
    dstate: Any
    dx, dk, dstate, db = (
        None if array is None else zeros(array, array.shape) for array in (inputs, k, state, b)
    )
    for batch, tokens, states in spans(a.x, a.sequences):
        span_k, span_dk = (k, dk) if k.ndim == 2 else (k[batch, tokens], dk[batch, tokens])
        window = _Window(inputs[batch, tokens], span_k, None if state is None else state[states])
        v = g[batch, tokens]
        if a.activation == "silu":
            v = v * silu_slopes(window.convolved(span_k, b))[0]
        dinputs = zeros(window.inputs, window.inputs.shape)
        for w in range(window.width):
            window.tap(dinputs, w)[...] += v * span_k[..., w]
            product = v * window.tap(window.inputs, w)
            span_dk[..., w] += product.sum((0, 1)) if k.ndim == 2 else product
        if b is not None:
            db += v.sum((0, 1))
        if g_final is not None:
            dinputs[:, dinputs.shape[1] - window.width :] += g_final[states].swapaxes(1, 2)
        dx[batch, tokens] = dinputs[:, window.width :]
        if state is not None:
            dstate[states] = dinputs[:, : window.width].swapaxes(1, 2)
    given = a.x, a.kernels, a.initial_state, a.bias
    return tuple(
        None if gradient is None else cast(gradient, like)
        for gradient, like in zip((dx, dk, dstate, db), given, strict=True)
    )


def _pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    dout = namespace(a.x).zeros_like(a.x) if dy.out is None else dy.out
    # NumPy gets a copy, since users may write to a gradient.
    dresidual = cast(dout, a.residual) if wanted.residual else None
    *slots, _ = wanted
    if not any(slots):
        return None, None, None, None, dresidual
    given = a.x, a.kernels, a.initial_state, a.bias, dout, dy.final_state
    return Call(conv_vjp, *given, a.sequences, a.activation, out=slots, after=(dresidual,))


def _vjp_pullback(a: Any, y: Any, ddy: Any, wanted: Any) -> tuple[Any, ...]:
    """Pull back through the gradient, which is bilinear except for the activation.

    Without an activation, the convolution f(x, k) is bilinear in the pair (x, state) and the
    kernels, and p(v, x, k) = (dx, dk) is its pullback. Cotangents (ddx, ddk) of (dx, dk) give v the
    cotangent dv = f(ddx, k) + f(x, ddk), and (x, k) the cotangents p(v, ddx, ddk). The activation φ
    makes v = c φ'(h), where c is the cotangent of the op's output and h = f(x, k) + bias; it adds
    p(dh, x, k) with dh = dv c φ''(h).
    """
    # In float32 or better, so that intermediate results aren't rounded to 16 bits.
    x, kernels, state, bias = map(wide, (a.x, a.kernels, a.initial_state, a.bias))
    c = wide(a.dout)
    ddx, ddk, ddstate, ddbias = map(wide, ddy)
    sequences = a.sequences

    def convolve(x: Any, kernels: Any, state: Any, bias: Any, final: Any = None) -> tuple[Any, Any]:
        return conv(x, kernels, state, bias, None, sequences, "none", out=(True, final))

    def pull_back(wanted: Sequence[Any], *arrays: Any) -> tuple[Any, ...]:
        return conv_vjp(*arrays, None, sequences, "none", out=wanted)

    if ddstate is not None and ddx is None:
        ddx = namespace(x).zeros_like(x)
    dv = dfinal_state = None
    if ddx is not None:
        dv, dfinal_state = convolve(ddx, kernels, ddstate, None, wanted.dfinal_state)
    if ddk is not None:
        dv = added(dv, convolve(x, ddk, state, None)[0])
    if ddbias is not None:
        dv = added(dv, namespace(x).zeros_like(c) + ddbias)
    v, dc, through_h = c, dv, (None,) * 4
    if a.activation == "silu":
        h, _ = convolve(x, kernels, state, bias)
        slope, bend = silu_slopes(h)
        v, dc = c * slope, dv * slope
        slots = wanted.x, wanted.kernels, wanted.initial_state, wanted.bias
        if any(slots):
            through_h = pull_back(slots, x, kernels, state, bias, dv * (c * bend))
    dx = dk = dstate = None
    if ddk is not None and (wanted.x or wanted.initial_state):
        some = (wanted.x, None, wanted.initial_state, None)
        dx, _, dstate, _ = pull_back(some, x, ddk, state, None, v)
    if ddx is not None and wanted.kernels:
        _, dk, _, _ = pull_back((None, True, None, None), ddx, kernels, ddstate, None, v)
    direct = (dx, dk, dstate, None)
    found = [added(one, two) for one, two in zip(direct, through_h, strict=True)]
    return tuple(
        None if cotangent is None else cast(cotangent, array)
        for cotangent, array in zip((*found, dc, dfinal_state), a, strict=False)
    )


_ARRAYS = {
    "x": "(B, T, D)",
    "kernels": "(D, W) or (B, T, D, W), W > 0",
    "initial_state": "(S, D, W), optional",
    "bias": "(D), optional",
}


conv_vjp = Primitive(
    "dynamic_conv_vjp",
    family="conv",
    arrays={**_ARRAYS, "dout": "(B, T, D)", "dfinal_state": "(S, D, W), optional"},
    static={"sequences": Sequences, "activation": str},
    sizes={"S": num_sequences},
    outputs={f"d{name}": f"like {name}" for name in _ARRAYS},
    formula=_vjp_formula,
    pullback=_vjp_pullback,
)
conv = Primitive(
    "dynamic_conv",
    family="conv",
    arrays={**_ARRAYS, "residual": "(B, T, D), optional"},
    static={"sequences": Sequences, "activation": str},
    sizes={"S": num_sequences},
    outputs={
        "out": "(B, T, D) as x",
        "final_state": "(S, D, W) of x, initial_state",
    },
    formula=_formula,
    pullback=_pullback,
    # Its cotangent is the output's.
    read_for={"residual": ()},
)


def _every(like: Any, count: int) -> Any:
    """Return the integers from 0 to count - 1, where `like` is."""
    return (zeros(like, (count,)) + 1).cumsum(0) - 1


def _turned(buffers: Any, by: Any) -> Any:
    """Return circular buffers (B, D, L) whose place l has what place l + by, modulo L, had."""
    length = buffers.shape[2]
    places = (_every(by, length) + by[:, None]) % length
    return buffers.swapaxes(1, 2)[_every(by, len(by))[:, None], places].swapaxes(1, 2)


def _step_formula(a: Any) -> tuple[Any]:
    """Shift tokens into their states, in place, and return the convolution of every token."""
    x, state, kernels, bias, residual, slots, positions, activation = a
    tokens = x if x.ndim == 3 else x[:, None]
    count, length, width = tokens.shape[1], state.shape[2], kernels.shape[-1]
    rows: Any = slice(None)
    where = rows
    if slots is not None:
        rows = (slots >= 0) & (slots < len(state))
        where = slots[rows]
    latest = cast(tokens[rows], state).swapaxes(1, 2)
    past = state[where]
    if positions is not None:
        # The remainder alone, since a sum with a large position would overflow.
        positions = positions[rows] % length
        past = _turned(past, positions)
    inputs = namespace(x).concatenate([past, latest], axis=-1)
    kept = inputs[..., count:]
    state[where] = kept if positions is None else _turned(kept, -positions - count)
    if kernels.ndim > 2:
        kernels = kernels[rows] if kernels.ndim == 4 else kernels[rows][:, None]
    inputs, kernels = wide(inputs).swapaxes(1, 2), wide(kernels)
    first = length - width + 1
    h = sum(inputs[:, first + w : first + w + count] * kernels[..., w] for w in range(width))
    if bias is not None:
        h = h + wide(bias)
    h = silu(h) if activation == "silu" else h
    if residual is not None:
        h = h + wide(residual.reshape(tokens.shape)[rows])
    out = zeros(x, tokens.shape)
    out[rows] = cast(h, x)
    return (out.reshape(x.shape),)


conv_step = Primitive(
    "dynamic_conv_step",
    family="conv",
    arrays={
        "x": "(B, D) or (B, T, D)",
        "state": "(N, D, L)",
        "kernels": "(D, W) or (B, D, W) or (B, T, D, W), W > 0",
        "bias": "(D), optional",
        "residual": "(B, D) or (B, T, D), optional",
    },
    constants={"slots": "(B), integers, optional", "positions": "(B), integers, optional"},
    static={"activation": str},
    sizes={
        "N": lambda a: (a.x if a.slots is None else a.state).shape[0],
        "T": lambda a: a.x.shape[1] if a.x.ndim == 3 else 1,
    },
    outputs={"out": "like x"},
    formula=_step_formula,
    mutates=("state",),
    check=lambda a: _check_step(a),
)


class _Conv(Protocol):
    @overload
    def __call__(
        self,
        x: ArrayT,
        kernels: ArrayT,
        *,
        output_final_state: Literal[False] = ...,
        **options: Unpack[_Options[ArrayT]],
    ) -> ArrayT: ...
    @overload
    def __call__(
        self,
        x: ArrayT,
        kernels: ArrayT,
        *,
        output_final_state: Literal[True],
        **options: Unpack[_Options[ArrayT]],
    ) -> tuple[ArrayT, ArrayT]: ...
    @overload
    def __call__(
        self,
        x: ArrayT,
        kernels: ArrayT,
        *,
        output_final_state: bool,
        **options: Unpack[_Options[ArrayT]],
    ) -> Any: ...


@op(conv, overloads=_Conv)  # type: ignore[type-abstract]
def dynamic_conv(
    x: Any,
    kernels: Any,
    *,
    bias: Any = None,
    residual: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    activation: Activation | None = None,
    out: Any = None,
    backend: BackendName | None = None,
) -> Any:
    r"""Return the causal convolution of tokens with a kernel for every token and channel.

    .. math:: \mathrm{out}_{btd} = a\Bigl(\sum_{w=0}^{W-1} k_{btdw} \, x_{b,\,t+w-W+1,\,d}
              + \mathrm{bias}_d\Bigr) + \mathrm{residual}_{btd}

    with the activation a. Before the first token x stands for the inputs in `initial_state`, or
    zeros.

    Parameters
    ----------
    x : array or tensor (B, T, D), float32 or float64; in torch bfloat16 and float16 too
        The tokens, dimensionless like all arrays here.
    kernels : array or tensor (B, T, D, W) or (D, W)
        The taps of every token and channel, or of every channel alone: the causal depthwise
        convolution of Mamba. The last tap multiplies the token itself. Any W ≥ 1.
    bias : array or tensor (D,), optional
        Added before the activation.
    residual : array or tensor (B, T, D), optional
        Added after the activation, before the result is rounded; it may be x itself.
    initial_state : array or tensor (B, D, W), or (S, D, W) for packed sequences, optional
        The W inputs before the first token, the latest last. No tap reads the first of them: it
        only moves on into the final state of an empty sequence.
    output_final_state : bool
        Whether to return the last W inputs too.
    cu_seqlens : Sequences, or array or tensor (S + 1,), int32 or int64, optional
        Where each of S packed sequences begins, and where the last one ends; B must be 1. Nothing
        crosses a boundary, forward or backward. A tensor on a GPU is read when first used and
        after every write to it, which waits for the GPU; a `Sequences` is read once. Inside
        ``torch.compile``, in inference mode and in a CUDA graph the host reads no tensor on a GPU:
        boundaries out of order, or beyond the tokens, are then moved instead of refused, and a
        graph's next run has the tensor's new boundaries.
    activation : {None, "silu", "swish"}
        "silu" and "swish" both name x · sigmoid(x).

    Returns
    -------
    out : array or tensor (B, T, D)
        In the dtype of x, whatever the others'; accumulated in float32 or better.
    final_state : array or tensor (B, D, W) or (S, D, W)
        With `output_final_state` only: the `initial_state` of the tokens that follow. In the dtype
        to which x and `initial_state` promote.

    Notes
    -----
    x, kernels, initial_state, bias and residual have gradients of any order: the convolution is
    bilinear, so the same kernels compute its derivatives, from the second on in float32 or better.
    The backward recomputes the values before the activation, and keeps no residual.
    ``dynamic_conv.vjp`` returns gradients for the arrays that were given, in the order x, kernels,
    initial_state, bias, residual. Autocast changes no dtypes. On a GPU the first use of a width of
    64 takes seconds to compile, of 128 a minute.

    References
    ----------
    Gu, Hu, et al., "Jet-Nemotron: Efficient Language Model with Post Neural Architecture Search",
    arXiv:2508.15884 (2025); the states follow flash-linear-attention's ShortConvolution.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> x = np.array([1.0, 2, 4, 8]).reshape(1, 4, 1)
    >>> kernels = np.ones((1, 4, 1, 2))
    >>> fusedops.dynamic_conv(x, kernels).ravel().tolist()
    [1.0, 3.0, 6.0, 12.0]
    >>> fusedops.dynamic_conv(x, kernels, cu_seqlens=np.array([0, 2, 4])).ravel().tolist()
    [1.0, 3.0, 4.0, 12.0]
    >>> out, pullback = fusedops.dynamic_conv.vjp(x, kernels)
    >>> dx, dkernels = pullback(np.ones_like(out))
    >>> dx.ravel().tolist()
    [2.0, 2.0, 2.0, 1.0]
    """
    name = "dynamic_conv"
    sequences = read_sequences(name, cu_seqlens, "x", x)
    one_of(name, "activation", activation, ACTIVATIONS)
    flag(name, "output_final_state", output_final_state)
    return to_run(
        (
            x,
            kernels,
            initial_state,
            bias,
            residual,
            sequences,
            "none" if activation is None else "silu",
        ),
        ("out", "final_state") if output_final_state else "out",
    )


@op(conv_step)
def dynamic_conv_step(
    x: ArrayT,
    state: ArrayT,
    kernels: ArrayT,
    *,
    bias: ArrayT | None = None,
    residual: ArrayT | None = None,
    activation: Activation | None = None,
    slots: ArrayT | None = None,
    positions: ArrayT | None = None,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Shift tokens of every sequence into its state, in place, and return their convolution.

    .. math:: s_{bdl} \leftarrow s_{bd,l+1}, \quad s_{bd,L-1} \leftarrow x_{bd}, \quad
              \mathrm{out}_{bd} = a\Bigl(\sum_{w=0}^{W-1} k_{bdw} \, s_{bd,\,L-W+w}
              + \mathrm{bias}_d\Bigr) + \mathrm{residual}_{bd}

    for one token after the other. A state of W - 1 inputs has no room for the token itself, which
    its tap reads from x.

    Parameters
    ----------
    x : array or tensor (B, D) or (B, T, D), float32 or float64; in torch bfloat16 and float16 too
        A token of every sequence, or several.
    state : array or tensor (B, D, L), or (N, D, L) with `slots`; L ≥ W - 1
        The last L inputs, the latest last: with L = W the final state of `dynamic_conv`. Updated
        in place, unless an error is raised; any strides. Its dtype must hold the values of x.
    kernels : array or tensor (B, T, D, W), (B, D, W) or (D, W)
        The taps, of every token, or the same for all tokens; the last one multiplies x.
    bias : array or tensor (D,), optional
        Added before the activation.
    residual : array or tensor of the shape of x, optional
        Added after the activation, before the result is rounded.
    activation : {None, "silu", "swish"}
        "silu" and "swish" both name x · sigmoid(x).
    slots : array or tensor (B,), int32 or int64, optional
        The row of `state` that each sequence has: no two the same. A negative one is padding, for
        which out is zero and no state changes. On a GPU, where no value is read, so is a slot
        from N on; on the CPU that is an error.
    positions : array or tensor (B,), int32 or int64, optional
        The number of tokens that each sequence has had. With it, states are circular buffers:
        token p of a sequence lies at p mod L. On the CPU a negative number of a sequence that isn't
        padding is an error; on a GPU, where no value is read, it is taken mod L too.

    Returns
    -------
    array or tensor of the shape and dtype of x
        Accumulated in float32 or better.

    Raises
    ------
    RuntimeError
        If an argument requires grad: a step that works in place has no gradient. Its functional
        form, ``dynamic_conv(x[:, None], kernels, initial_state=state, output_final_state=True)``,
        has derivatives of every order and returns the new state.

    References
    ----------
    See `dynamic_conv`. Slots and positions are ``conv_state_indices`` and ``cache_seqlens`` of
    Dao's causal-conv1d, as vLLM and SGLang use them.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> state = np.array([[[1.0, 2.0]]])
    >>> fusedops.dynamic_conv_step(np.array([[4.0]]), state, np.ones((1, 1, 2))).tolist()
    [[6.0]]
    >>> state.tolist()
    [[[2.0, 4.0]]]
    """
    name = "dynamic_conv_step"
    holds(name, "state", state, x)
    if state.shape[2] < kernels.shape[-1] - 1:
        raise ValueError(
            f"{name}: state has {state.shape[2]} inputs of a sequence; it should have at least "
            f"{kernels.shape[-1] - 1}, one fewer than kernels have taps"
        )
    if residual is not None:
        of_shape(name, "residual", residual, tuple(x.shape))
    no_overlap(name, "state", state)
    for argument, value in (("slots", slots), ("positions", positions)):
        if value is not None:
            indices(name, argument, value)
    if positions is not None and not state.shape[2]:
        raise ValueError(f"{name}: positions is given; state should then have inputs")
    one_of(name, "activation", activation, ACTIVATIONS)
    applied = "none" if activation is None else "silu"
    given = x, state, kernels, bias, residual, slots, positions, applied
    return to_run(given, "out")


def _check_step(a: Any) -> Any:
    """Raise if a state has two sequences or none, or its update would change another argument."""
    name = "dynamic_conv_step"
    again = may_update(name, a, ("x", "kernels", "bias", "residual", "slots", "positions"))
    slots, positions = map(readable, (a.slots, a.positions))
    if positions is not None and (a.slots is None) == (slots is None):
        early = [p for b, p in enumerate(positions.tolist()) if slots is None or slots[b] >= 0]
        if early and min(early) < 0:
            raise ValueError(
                f"{name}: positions has {min(early)}; it should be at least 0, the "
                "number of tokens before"
            )
    check_slots(name, "slots", slots, a.state.shape[0])
    return again if slots is None is positions else None
