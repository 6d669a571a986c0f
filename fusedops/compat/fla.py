r"""flash-linear-attention's short convolution and gated delta rule, as models call them::

    -from fla.modules import ShortConvolution
    +from fusedops.compat.fla import ShortConvolution

    -from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    +from fusedops.compat.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

Checkpoints load unchanged. `register` puts the delta rule in its place for programs that import it.
"""

from __future__ import annotations

import warnings
from typing import Any

import fusedops._frame.needs_torch

import torch

import fusedops
from fusedops._frame.arrays import wide
from fusedops._frame.bridge.modes import differentiates
from fusedops._frame.check import of_shape, one_of
from fusedops.compat._packages import Package
from fusedops.compat.causal_conv1d import (
    need_float,
    need_floats,
    need_integers,
    need_state,
    need_tensor,
    need_weight,
)
from fusedops.conv import ACTIVATIONS, Activation
from fusedops.nn import check_update, log_gates, normalized, num_sequences

__all__ = [
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "register",
    "unregister",
]

#: The name in errors of the two delta rules, whose arguments have the same names.
_RULE = "gated_delta_rule"
#: Arguments of fla's delta rules, of this version or older ones, that aren't served.
_NOT_SERVED = {
    "cp_context": "every rank needs all tokens of its sequences",
    "gk": "every head has one gate",
    "gv": "every head has one gate",
    "head_first": "q, k and v are (B, T, H, ...)",
}


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: Activation | None = None,
    backend: str | None = "triton",
    cu_seqlens: Any = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Return the causal convolution of every channel, and the last W inputs.

    .. math:: y_{btd} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{dw} \, x_{b,\,t+w-W+1,\,d}
              + \mathrm{bias}_d\Bigr) + \mathrm{residual}_{btd}

    Parameters
    ----------
    x : tensor (B, T, D) or (B, T, H, D / H), float32, float64, bfloat16 or float16
        The tokens; B must be 1 with `cu_seqlens`.
    weight : tensor (D, W)
        The taps, in any float dtype; the last one multiplies the token itself.
    bias : tensor (D,), optional
        Added before the activation.
    residual : tensor of the shape of x, optional
        Added after the activation.
    initial_state : tensor (N, D, W), optional
        The W inputs before the first token of every sequence, the latest last.
    output_final_state : bool, optional
        Whether to return the last W inputs.
    activation : {None, "silu", "swish"}
        "silu" and "swish" both name x · sigmoid(x).
    cu_seqlens : Sequences, or tensor (N + 1,), int32 or int64, optional
        Where each of N packed sequences begins, and where the last one ends.
    backend, cu_seqlens_cpu, chunk_indices, **kwargs
        Ignored: fusedops chooses its backend, and packing needs only `cu_seqlens`.
    cp_context
        Refused; `fusedops.distributed.dynamic_conv` shares tokens among ranks.

    Returns
    -------
    y : tensor of the shape of x
        In the dtype of x.
    final_state : tensor (N, D, W), or None
        In the dtype of x, with `output_final_state`.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device; the message names it.

    Notes
    -----
    All float tensors have gradients of any order.

    References
    ----------
    Yang and Zhang, flash-linear-attention 0.6, ``fla.modules.convolution.causal_conv1d``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.fla import causal_conv1d
    >>> x = torch.tensor([[[1.0], [2.0]]])
    >>> y, final = causal_conv1d(x, torch.ones(1, 2), residual=x, output_final_state=True)
    >>> y.flatten().tolist(), final.tolist()
    ([2.0, 5.0], [[[1.0, 2.0]]])
    """
    name = "causal_conv1d"
    if cp_context is not None:
        raise ValueError(
            f"{name}: cp_context is given; it should be None: fusedops.distributed.dynamic_conv "
            "shares tokens among ranks"
        )
    floats = {"bias": bias, "residual": residual, "initial_state": initial_state}
    need_floats(name, x, weight=weight, **floats)
    assert weight is not None
    tokens = x.flatten(2) if x.ndim > 3 else x
    of_shape(name, "x", tokens, ("B", "T", "D"))
    need_weight(name, weight, tokens.shape[2])
    if bias is not None:
        of_shape(name, "bias", bias, (len(weight),))
    if residual is not None:
        of_shape(name, "residual", residual, tuple(x.shape))
    one_of(name, "activation", activation, ACTIVATIONS)
    # Any, since type checkers can't tell the overloads apart.
    conv: Any = fusedops.dynamic_conv
    result = conv(
        tokens,
        weight,
        bias=bias,
        residual=None if residual is None else residual.reshape(tokens.shape),
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens,
        activation=activation,
    )
    y, final = result if output_final_state else (result, None)
    return y.view(x.shape), None if final is None else final.to(x.dtype)


def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Shift a token of every sequence into the cache, in place, and return its convolution.

    .. math:: c_{nd} \leftarrow (c_{nd1}, \dots, c_{nd,W-1}, x_{nd}), \quad
              y_{nd} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{dw} \, c_{ndw}
              + \mathrm{bias}_d\Bigr) + \mathrm{residual}_{nd}

    Parameters
    ----------
    x : tensor (N, D), (N, 1, D) or (1, N, D), float32, float64, bfloat16 or float16
        A token of every sequence; channels may be the product of several last dimensions.
    cache : tensor (N, D, W)
        The last W inputs, the latest last. Updated in place.
    residual : tensor of the shape of x, optional
        Added after the activation.
    weight : tensor (D, W)
        The taps, in any float dtype.
    bias : tensor (D,), optional
        Added before the activation.
    activation : {None, "silu", "swish"}
        "silu" and "swish" both name x · sigmoid(x).

    Returns
    -------
    y : tensor of the shape and dtype of x
    cache : tensor (N, D, W)
        The one given.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device; the message names it.
    RuntimeError
        If the cache is a leaf that requires grad.

    Notes
    -----
    Gradients reach all float tensors that are given; the updated cache is detached.

    References
    ----------
    Yang and Zhang, flash-linear-attention 0.6, ``fla.modules.convolution.causal_conv1d_update``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.fla import causal_conv1d_update
    >>> cache = torch.tensor([[[1.0, 2.0]]])
    >>> causal_conv1d_update(torch.tensor([[4.0]]), cache, weight=torch.ones(1, 2))[0].tolist()
    [[6.0]]
    >>> cache.tolist()
    [[[2.0, 4.0]]]
    """
    name = "causal_conv1d_update"
    need_tensor(name, "cache", cache)
    need_floats(name, x, cache=cache, weight=weight, bias=bias, residual=residual)
    assert weight is not None
    need_weight(name, weight)
    of_shape(name, "cache", cache, ("N", *weight.shape))
    if bias is not None:
        of_shape(name, "bias", bias, (len(weight),))
    if residual is not None:
        of_shape(name, "residual", residual, tuple(x.shape))
    need_state(name, "cache", cache, x)
    one_of(name, "activation", activation, ACTIVATIONS)
    count = cache.shape[0]
    leads = ((count, 1), (1, count)) if x.ndim > 2 else ((count, weight.shape[0]),)
    if tuple(x.shape[:2]) not in leads or x.numel() != count * weight.shape[0]:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}; it should be (N, D), (N, 1, D) or (1, N, D), "
            f"with N = {count} and D = {weight.shape[0]}, as cache has"
        )
    tokens = x.reshape(count, weight.shape[0])
    added = None if residual is None else residual.reshape(tokens.shape)
    return _update(name, tokens, cache, added, weight, bias, activation).view(x.shape), cache


def _update(
    op: str,
    tokens: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
) -> torch.Tensor:
    """Shift tokens (N, D) into the cache, and return their convolution, with its gradients."""
    if not differentiates((tokens, cache, weight, bias, residual)):
        return fusedops.dynamic_conv_step(
            tokens, cache, weight, bias=bias, residual=residual, activation=activation
        )
    check_update(op, "cache", cache)
    # The backward reads the cache as it was before the update.
    before = cache.clone()
    y = fusedops.dynamic_conv(
        tokens[:, None],
        weight,
        bias=bias,
        residual=None if residual is None else residual[:, None],
        initial_state=before,
        activation=activation,
    )
    # By the copy autograd knows that gradients of the new values end here.
    shifted = torch.empty_like(before)
    shifted[..., :-1], shifted[..., -1] = before[..., 1:].detach(), tokens.detach()
    cache.copy_(shifted)
    return y[:, 0]


class ShortConvolution(torch.nn.Conv1d):
    r"""Causal convolution of every channel, with states.

    .. math:: y_{btd} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{d0w} \, x_{b,\,t+w-W+1,\,d}
              + \mathrm{bias}_d\Bigr) + \mathrm{residual}_{btd}

    Parameters
    ----------
    hidden_size : int
        D, the channels.
    kernel_size : int
        W, the taps of every channel.
    bias : bool
        Whether there is a bias, a parameter (D,).
    activation : {"silu", "swish", None}
        "silu" and "swish" both name x · sigmoid(x).
    backend
        Ignored: fusedops chooses its backend.
    device, dtype : optional
        Of the parameters.
    **kwargs
        Ignored, such as ``use_fast_conv1d`` of older versions.

    Attributes
    ----------
    hidden_size : int
        D.
    activation, backend : str or None
        As given.
    state_size : int
        The numbers in the state of a sequence, D · W.

    Raises
    ------
    ValueError
        If the activation is unknown.

    Notes
    -----
    Names, parameters and initial values are those of the class in flash-linear-attention:
    checkpoints load unchanged. This class leaves x unchanged where it is masked, and has gradients
    in a decoding step, which is a call with one token of every sequence. The host doesn't read
    `cu_seqlens` on a GPU for this: as many tokens as sequences are then taken for a decoding step,
    as in flash-linear-attention, though a sequence may be empty. `Sequences` tell the two apart.

    References
    ----------
    Yang and Zhang, flash-linear-attention 0.6, ``fla.modules.ShortConvolution``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.fla import ShortConvolution
    >>> convolution, x = ShortConvolution(8, 4), torch.randn(2, 5, 8)
    >>> y, cache = convolution(x[:, :4], output_final_state=True)
    >>> y.shape, cache.shape
    (torch.Size([2, 4, 8]), torch.Size([2, 8, 4]))
    >>> next_y, cache = convolution(x[:, 4:], cache=cache, output_final_state=True)
    >>> torch.allclose(next_y, convolution(x)[0][:, 4:], atol=1e-6)
    True
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: Activation | None = "silu",
        backend: str | None = "triton",
        device: Any = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            bias=bias,
            padding=kernel_size - 1,
            device=device,
            dtype=dtype,
        )
        one_of("ShortConvolution", "activation", activation, ACTIVATIONS)
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = backend

    @property
    def state_size(self) -> int:
        """The numbers in the state of a sequence."""
        return self.hidden_size * self.kernel_size[0]

    def extra_repr(self) -> str:
        """Return the text in ``repr``."""
        return f"{super().extra_repr()}, activation={self.activation}, backend={self.backend}"

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
        chunk_indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        r"""Return the convolution of tokens, and the cache for the tokens that follow.

        .. math:: y_{btd} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{d0w} \,
                  x_{b,\,t+w-W+1,\,d} + \mathrm{bias}_d\Bigr) + \mathrm{residual}_{btd}

        One token of every sequence is a decoding step, with `cu_seqlens` in the shape (1, N, D).

        Parameters
        ----------
        x : tensor (B, T, D), float32, float64, bfloat16 or float16
            The tokens; B must be 1 with `cu_seqlens`.
        residual : tensor (B, T, D), optional
            Added after the activation.
        mask : tensor (B, T), optional
            Multiplies x; not with `cu_seqlens`.
        cache : tensor (N, D, W), optional
            The W inputs before the first token, the latest last. A decoding step updates it in
            place.
        output_final_state : bool
            Whether to return the last W inputs.
        cu_seqlens : Sequences, or tensor (N + 1,), int32 or int64, optional
            Where each of N packed sequences begins, and where the last one ends.
        chunk_indices, **kwargs
            Ignored.

        Returns
        -------
        y : tensor (B, T, D)
            In the dtype of x.
        cache : tensor (N, D, W), or None
            With `output_final_state`: in a decoding step the one given, otherwise a new one.

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong dtype, shape or device; the message names it.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.compat.fla import ShortConvolution
        >>> convolution = ShortConvolution(8, 4)
        >>> x, starts = torch.randn(1, 5, 8), torch.tensor([0, 2, 5])
        >>> convolution(x, cu_seqlens=starts, output_final_state=True)[1].shape
        torch.Size([2, 8, 4])
        """
        name = "ShortConvolution"
        need_tensor(name, "x", x)
        of_shape(name, "x", x, ("B" if cu_seqlens is None else 1, "T", self.hidden_size))
        if isinstance(cu_seqlens, torch.Tensor):
            need_integers(name, "cu_seqlens", cu_seqlens, ("N + 1",), x)
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError(f"{name}: mask is given; with cu_seqlens it should not be")
            need_tensor(name, "mask", mask)
            of_shape(name, "mask", mask, tuple(x.shape[:2]))
            x = x * mask[..., None].to(x.dtype)
        if _decodes(x, cu_seqlens):
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        need_floats(name, x, weight=self.weight, residual=residual, cache=cache)
        if residual is not None:
            of_shape(name, "residual", residual, tuple(x.shape))
        if cache is not None:
            of_shape(name, "cache", cache, (num_sequences(x, cu_seqlens), *self.weight[:, 0].shape))
        return causal_conv1d(
            x,
            self.weight[:, 0],
            self.bias,
            residual,
            cache,
            output_final_state,
            self.activation,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )

    def step(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cache: torch.Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        r"""Return the convolution of one token of every sequence, and the updated cache.

        .. math:: y_{nd} = a\Bigl(\sum_{w=0}^{W-1} \mathrm{weight}_{d0w} \, c_{ndw}
                  + \mathrm{bias}_d\Bigr) + \mathrm{residual}_{nd}

        with the cache c after the tokens were shifted in. Gradients reach x, residual, the
        parameters and the given cache; the updated cache is detached.

        Parameters
        ----------
        x : tensor (N, 1, D), or (1, N, D) with `cu_seqlens`
            The tokens.
        residual : tensor of the shape of x, or None
            Added after the activation.
        cache : tensor (N, D, W), or None for zeros
            Updated in place.
        output_final_state : bool
            Whether to return the cache.
        cu_seqlens : Sequences, or tensor (N + 1,), optional
            It tells that x is (1, N, D).

        Returns
        -------
        y : tensor of the shape and dtype of x
        cache : tensor (N, D, W), or None

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong dtype, shape or device; the message names it.
        RuntimeError
            If the cache is a leaf that requires grad.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.compat.fla import ShortConvolution
        >>> y, cache = ShortConvolution(8, 4).step(torch.randn(2, 1, 8), None, None, True)
        >>> cache.shape
        torch.Size([2, 8, 4])
        """
        name = "ShortConvolution"
        need_floats(name, x, weight=self.weight, residual=residual, cache=cache)
        given, weight, bias = num_sequences(x, cu_seqlens), self.weight[:, 0], self.bias
        lead = (given, 1) if cu_seqlens is None else (1, given)
        of_shape(name, "x", x, (*lead, self.hidden_size))
        count = len(x.flatten(0, 1))
        if residual is not None:
            of_shape(name, "residual", residual, tuple(x.shape))
        if cache is None:
            cache = x.new_zeros(count, *weight.shape)
        of_shape(name, "cache", cache, (count, *weight.shape))
        need_state(name, "cache", cache, x)
        tokens = x.reshape(count, self.hidden_size)
        added = None if residual is None else residual.reshape(tokens.shape)
        y = _update(name, tokens, cache, added, weight, bias, self.activation)
        return y.view(x.shape), cache if output_final_state else None


def _decodes(x: torch.Tensor, cu_seqlens: Any) -> bool:
    """Return whether every sequence has one token."""
    tokens = x.shape[1]
    if cu_seqlens is None:
        return tokens == 1
    if tokens != num_sequences(x, cu_seqlens):
        return False
    if isinstance(cu_seqlens, fusedops.Sequences):
        # Known on every device: a sequence of more tokens has fewer chunks than tokens.
        return len(cu_seqlens.chunks) == tokens
    starts = torch.as_tensor(cu_seqlens)
    return not starts.is_cpu or bool((starts == torch.arange(tokens + 1)).all())


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Return linear attention by the gated delta rule, and the states after the last tokens.

    .. math:: S_t = e^{g_t} S_{t-1} + \beta_t k_t \left(v_t - e^{g_t} S_{t-1}^T k_t\right)^T, \quad
              \mathrm{out}_t = \mathrm{scale} \cdot S_t^T q_t

    Parameters
    ----------
    q, k, v, g, beta, scale, initial_state, cu_seqlens
        As of `fusedops.gated_delta_rule`; without g nothing is forgotten, and beta is one if None.
    output_final_state : bool, optional
        Whether to return the states.
    use_qk_l2norm_in_kernel : bool
        Whether to divide q and k by their lengths, :math:`\sqrt{|x|^2 + 10^{-6}}`.
    use_beta_sigmoid_in_kernel, allow_neg_eigval : bool
        Whether the strength of writing is the logistic function of beta, or twice that.
    state_v_first : bool
        Whether states are (N, HV, V, K); ``transpose_state_layout`` is an older name for it.
    use_gate_in_kernel : bool
        Whether the logarithms of the gates are :math:`-e^{A} \, \mathrm{softplus}(g + d)`.
    A_log, dt_bias : tensor (HV,), optional
        A and d, with `use_gate_in_kernel`; d is zero by default.
    cu_seqlens_cpu, chunk_indices, **kwargs
        Ignored, such as ``chunk_size``: chunks are the kernels' own.
    cp_context
        Refused: every rank needs all tokens of its sequences.

    Returns
    -------
    o : tensor (B, T, HV, V)
        In the dtype of q.
    final_state : tensor (N, HV, K, V), or None
        With `output_final_state`; in float32, or float64 if q is.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device, or isn't served; the message names it.

    Notes
    -----
    All float tensors have gradients of any order.

    References
    ----------
    Yang and Zhang, flash-linear-attention 0.6, ``fla.ops.gated_delta_rule``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.fla import chunk_gated_delta_rule
    >>> q = k = v = torch.ones(1, 2, 1, 1)
    >>> beta = torch.zeros(1, 2, 1)
    >>> o, state = chunk_gated_delta_rule(
    ...     q, k, v, None, beta, output_final_state=True, use_beta_sigmoid_in_kernel=True
    ... )
    >>> o.flatten().tolist(), state.tolist()
    ([0.5, 0.75], [[[[0.75]]]])
    """
    asked = {"cp_context": cp_context, **kwargs}
    for argument, why in _NOT_SERVED.items():
        value = asked.get(argument)
        if value is not None and value is not False:
            raise ValueError(f"{_RULE}: {argument} is given; it should not be: {why}")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            f"{_RULE}: allow_neg_eigval is True; it should be False without "
            "use_beta_sigmoid_in_kernel"
        )
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    needed = {"q", "k", "v"}
    if use_gate_in_kernel:
        tensors |= {"A_log": A_log, "dt_bias": dt_bias}
        needed |= {"g", "A_log"}
    for argument, value in tensors.items():
        if value is not None or argument in needed:
            need_float(_RULE, argument, value)
    if use_gate_in_kernel:
        assert g is not None
        assert A_log is not None
        of_shape(_RULE, "v", v, ("B", "T", "HV", "V"))
        of_shape(_RULE, "g", g, tuple(v.shape[:3]))
        heads = (v.shape[2],)
        for argument, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                of_shape(_RULE, argument, value, heads)
        g = log_gates(g, A_log, dt_bias)
    if beta is not None and use_beta_sigmoid_in_kernel:
        beta = (1 + allow_neg_eigval) * wide(beta).sigmoid()
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ValueError(
                f"{_RULE}: state_v_first is given; with transpose_state_layout, its older name, it "
                "should not be"
            )
        warnings.warn("transpose_state_layout is state_v_first now", DeprecationWarning, 2)
        state_v_first = kwargs["transpose_state_layout"]
    if initial_state is not None and state_v_first:
        # The op would show the shape that it has below.
        of_shape(_RULE, "initial_state", initial_state, ("N", *v.shape[2:], *k.shape[3:]))
        initial_state = initial_state.mT
    # Any, since type checkers can't tell the overloads apart.
    rule: Any = fusedops.gated_delta_rule
    result = rule(
        normalized(q) if use_qk_l2norm_in_kernel else q,
        normalized(k) if use_qk_l2norm_in_kernel else k,
        v,
        q.new_zeros(v.shape[:3]) if g is None else g,
        q.new_ones(v.shape[:3]) if beta is None else beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens,
    )
    o, final = result if output_final_state else (result, None)
    return o, final.mT.contiguous() if final is not None and state_v_first else final


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Return linear attention by the gated delta rule, and the states after the last tokens.

    .. math:: S_t = e^{g_t} S_{t-1} + \beta_t k_t \left(v_t - e^{g_t} S_{t-1}^T k_t\right)^T, \quad
              \mathrm{out}_t = \mathrm{scale} \cdot S_t^T q_t

    The same as `chunk_gated_delta_rule`, for callers of both: the kernels are the same, and there
    are gradients here too.

    Parameters
    ----------
    q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel
        As of `chunk_gated_delta_rule`.
    use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first
        As of `chunk_gated_delta_rule`.
    cu_seqlens, **kwargs
        As of `chunk_gated_delta_rule`.
    gk, gv
        Refused, as is beta with a number for every channel: a gate, and a strength, is a head's.

    Returns
    -------
    o : tensor (B, T, HV, V)
        In the dtype of v, as in flash-linear-attention.
    final_state : tensor (N, HV, K, V), or None
        With `output_final_state`; in float32, or float64 if q or v is.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape or device, or isn't served; the message names it.

    References
    ----------
    Yang and Zhang, flash-linear-attention 0.6, ``fla.ops.gated_delta_rule``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.fla import fused_recurrent_gated_delta_rule
    >>> token, state = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 3.0)
    >>> g = torch.full((1, 1, 1), 0.5).log()
    >>> o, _ = fused_recurrent_gated_delta_rule(
    ...     token, token, token, g, beta=torch.full((1, 1, 1), 0.5), initial_state=state
    ... )
    >>> o.flatten().tolist()
    [1.25]
    """
    for argument, value in (("q", q), ("v", v)):
        need_float(_RULE, argument, value)
    # Not rounded to the dtype of q first.
    o, final = chunk_gated_delta_rule(
        q.to(torch.promote_types(q.dtype, v.dtype)),
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        gk=gk,
        gv=gv,
        **kwargs,
    )
    return o.to(v.dtype), final


_FUNCTIONS = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
PACKAGE = Package(
    "fla",
    "flash-linear-attention",
    "0.6.0",
    {"fla": (), "fla.ops": _FUNCTIONS, "fla.ops.gated_delta_rule": _FUNCTIONS},
    globals(),
    kept=True,
    plain={
        "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    },
)


def register() -> None:
    """Put our gated delta rule in the place of flash-linear-attention's from now on.

    Call it in every process. Programs that import the package ``fla``, such as transformers, then
    get our two functions, on a CPU too. If the package is installed, all else in it stays, and it
    is imported here; if it is not, or can't be imported, there is one with these functions alone.
    Modules that were imported before call our functions too, as with
    `fusedops.compat.causal_conv1d.register`. A second call changes nothing.

    Examples
    --------
    >>> import fusedops.compat.fla
    >>> fusedops.compat.fla.register()
    >>> from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    >>> chunk_gated_delta_rule.__wrapped__.__module__
    'fusedops.compat.fla'
    >>> fusedops.compat.fla.unregister()
    """
    PACKAGE.register()


def unregister() -> None:
    """Give programs flash-linear-attention's gated delta rule again, or none.

    Functions that a program has imported by name since `register` stay ours, except in
    transformers. Without `register` before, nothing changes.

    Examples
    --------
    >>> import fusedops.compat.fla
    >>> fusedops.compat.fla.unregister()
    """
    PACKAGE.unregister()
