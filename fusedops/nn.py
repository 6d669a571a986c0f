"""Modules for torch. Import it by name: ``import fusedops`` alone imports no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

# The bridge: torch.compile can't import it while it traces a call.
import fusedops._torch  # noqa: F401
from fusedops._check import dtype_name, of_shape, one_of, promoted
from fusedops._registry import BACKENDS
from fusedops.conv import ACTIVATIONS, Sequences, dynamic_conv, dynamic_conv_step

__all__ = ["DynamicShortConvolution"]

GENERATOR_ACTIVATIONS = {
    "silu": torch.nn.SiLU,
    "swish": torch.nn.SiLU,
    "gelu": torch.nn.GELU,
    "relu": torch.nn.ReLU,
    "tanh": torch.nn.Tanh,
    "sigmoid": torch.nn.Sigmoid,
    "identity": torch.nn.Identity,
}


class DynamicShortConvolution(torch.nn.Module):
    r"""Causal convolution of tokens with kernels that a small network makes of every token.

    .. math:: y_{btd} = a\Bigl(\sum_{w=0}^{W-1} k_{btdw} \, x_{b,\,t+w-W+1,\,d}\Bigr), \quad
              k_{bt,\,dW+w} = \bigl(W_2 \, g(W_1 u_{bt}) + \beta\bigr)_{dW+w}

    with the activations a and g, and u the generator's input: x, or another one.

    Parameters
    ----------
    hidden_size : int
        D, the channels of x.
    kernel_size : int
        W, the taps of every token and channel.
    generator_input_size : int, optional
        C, the channels of u; D by default.
    generator_reduction : int, optional
        The generator has hidden_size // generator_reduction hidden units, and D without it.
    generator_activation : {"silu", "swish", "gelu", "relu", "tanh", "sigmoid", "identity"}
        g.
    activation : {"silu", "swish", None}
        a, of which the first two are x · sigmoid(x).
    static_conv_init : callable, optional
        Called once, without gradients, with :math:`\beta`, a parameter (D · W,), to fill it in
        place: the kernels before there is anything learned.
    use_fast_conv1d, implementation
        Ignored: the registry chooses a backend. They are here for calls that pass them.
    backend : str, optional
        The backend that must serve every call.

    Attributes
    ----------
    hidden_size, kernel_size, generator_input_size, generator_hidden_size : int
        The sizes D, W and C, and the number of hidden units.
    activation, backend : str or None
        As given.
    kernel_generator : torch.nn.Sequential
        ``w1`` and ``w2``, linear, and ``act`` between them; of its parameters ``w1.weight``,
        ``w2.weight`` and ``w2.bias``, all are zero at first, but for `static_conv_init`.

    Raises
    ------
    ValueError
        If a size isn't positive or there is no such activation; the message names the argument.

    Notes
    -----
    Arguments, parameters and results are those of the class of this name in Jet-Nemotron: to
    change from one to the other is to change the import, and checkpoints load as they are. Unlike
    that one, it leaves x as it is, takes packed sequences, and has gradients in a decoding step.

    References
    ----------
    Gu, Hu, et al., "Jet-Nemotron: Efficient Language Model with Post Neural Architecture Search",
    arXiv:2508.15884 (2025).

    Examples
    --------
    >>> import torch
    >>> from fusedops.nn import DynamicShortConvolution
    >>> convolution = DynamicShortConvolution(
    ...     8, kernel_size=4, generator_reduction=2, static_conv_init=torch.nn.init.ones_
    ... )
    >>> x = torch.randn(2, 5, 8)
    >>> y, cache = convolution(x[:, :4], output_final_state=True)
    >>> y.shape, cache.shape
    (torch.Size([2, 4, 8]), torch.Size([2, 8, 4]))
    >>> next_y, cache = convolution(x[:, 4:], cache=cache)
    >>> torch.allclose(next_y, convolution(x)[0][:, 4:], atol=1e-6)
    True
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        generator_input_size: int | None = None,
        generator_reduction: int | None = None,
        generator_activation: str = "silu",
        activation: str | None = "silu",
        static_conv_init: Callable[[torch.Tensor], Any] | None = None,
        use_fast_conv1d: bool = True,
        implementation: str = "naive",
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        name = "DynamicShortConvolution"
        if generator_input_size is None:
            generator_input_size = hidden_size
        for argument, size in (
            ("hidden_size", hidden_size),
            ("kernel_size", kernel_size),
            ("generator_input_size", generator_input_size),
        ):
            if size < 1:
                raise ValueError(f"{name}: {argument} is {size}; it should be at least 1")
        if generator_reduction is None:
            generator_reduction = 1
        if not 1 <= generator_reduction <= hidden_size:
            raise ValueError(
                f"{name}: generator_reduction is {generator_reduction}; it should be from 1 to "
                f"{hidden_size}, the hidden_size"
            )
        one_of(name, "generator_activation", generator_activation, tuple(GENERATOR_ACTIVATIONS))
        one_of(name, "activation", activation, ACTIVATIONS)
        one_of(name, "backend", backend, (None, *(each.name for each in BACKENDS)))
        self.hidden_size = hidden_size
        self.kernel_size = kernel_size
        self.generator_input_size = generator_input_size
        self.generator_hidden_size = hidden_size // generator_reduction
        self.activation = activation
        self.backend = backend
        w1 = torch.nn.Linear(generator_input_size, self.generator_hidden_size, bias=False)
        act = GENERATOR_ACTIVATIONS[generator_activation]()
        w2 = torch.nn.Linear(self.generator_hidden_size, hidden_size * kernel_size)
        self.kernel_generator = torch.nn.Sequential(OrderedDict(w1=w1, act=act, w2=w2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            if static_conv_init is not None:
                static_conv_init(w2.bias)

    def get_kernel(self, x: torch.Tensor) -> torch.Tensor:
        r"""Return the kernels of the generator's inputs.

        .. math:: k_{dw} = \bigl(W_2 \, g(W_1 x) + \beta\bigr)_{dW+w}

        Parameters
        ----------
        x : tensor (B, T, C) or (B, C), of the parameters' dtype

        Returns
        -------
        tensor (B, T, D, W) or (B, D, W)
            In the dtype of the parameters, or that of autocast.

        Raises
        ------
        RuntimeError
            torch's own, if x doesn't go with the parameters.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.nn import DynamicShortConvolution
        >>> DynamicShortConvolution(8, 4).get_kernel(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8, 4])
        """
        return self.kernel_generator(x).unflatten(-1, (self.hidden_size, self.kernel_size))

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
        generator_input: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        r"""Return the convolution of tokens, and the cache that the next ones need.

        .. math:: y_{btd} = a\Bigl(\sum_{w=0}^{W-1} k_{btdw} \, x_{b,\,t+w-W+1,\,d}\Bigr)

        with x multiplied by the mask, and before the first token the inputs that the cache holds,
        or zero. One token with a cache, and without `cu_seqlens`, is a decoding step.

        Parameters
        ----------
        x : tensor (B, T, D), float32, float64, bfloat16 or float16
            The tokens.
        mask : tensor (B, T), of any dtype, optional
            Zero or false where a token is padding.
        cache : tensor (B, D, W), or (S, D, W) for packed sequences, optional
            The last W inputs, the latest last. A decoding step updates it in place, and with
            `output_final_state` so does any call. Its dtype must hold that of x.
        output_final_state : bool
            Whether to return the last W inputs.
        cu_seqlens : Sequences, or tensor (S + 1,), int32 or int64, optional
            Where each of S packed sequences begins, and where the last one ends; then B is 1.
            Inside `torch.compile` it should be a `Sequences`.
        generator_input : tensor (B, T, C), optional
            What the kernels are made of; by default x, after the mask.
        **kwargs
            Ignored, for callers that pass the same arguments to several kinds of layers.

        Returns
        -------
        y : tensor (B, T, D)
            In the dtype of x.
        cache : tensor (B, D, W) or (S, D, W), or None
            The one that was given; without one, a new one if `output_final_state` asks for it.

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong dtype, shape or device; the message names it.
        RuntimeError
            torch's own, if the generator's input has another dtype than its parameters, or if the
            cache to be updated is a leaf that requires grad.
        BackendUnavailable
            If the module's backend can't serve the call.

        Notes
        -----
        A cache takes values on to the next call, but no gradients: what is written into it, or
        returned as a new one, is detached. The gradient of a call reaches its own x, generator's
        input and parameters, and the cache that it was given, if that requires grad.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.nn import DynamicShortConvolution
        >>> convolution = DynamicShortConvolution(1, 2, static_conv_init=torch.nn.init.ones_)
        >>> x, mask = torch.ones(1, 4, 1), torch.tensor([[0, 1, 1, 1]])
        >>> y, cache = convolution(x, mask, output_final_state=True)
        >>> [round(value, 2) for value in y.flatten().tolist()]
        [0.0, 0.73, 1.76, 1.76]
        >>> cache.tolist()
        [[[1.0, 1.0]]]
        """
        name = "DynamicShortConvolution"
        for argument, value in (("x", x), ("mask", mask), ("cache", cache)):
            if value is not None and not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise TypeError(f"{name}: {argument} is a {kind}; it should be a tensor")
        of_shape(name, "x", x, ("B", "T", self.hidden_size))
        tokens = tuple(x.shape[:2])
        if mask is not None:
            of_shape(name, "mask", mask, tokens)
            x = x * mask[..., None].to(x.dtype)
        if generator_input is None:
            generator_input = x
        of_shape(name, "generator_input", generator_input, (*tokens, self.generator_input_size))
        if cache is not None:
            count = tokens[0] if cu_seqlens is None else "S"
            if isinstance(cu_seqlens, Sequences):
                count = cu_seqlens.num_sequences
            elif isinstance(cu_seqlens, torch.Tensor):
                count = cu_seqlens.numel() - 1
            of_shape(name, "cache", cache, (count, self.hidden_size, self.kernel_size))
            if promoted((cache, x)) != cache.dtype:
                raise TypeError(
                    f"{name}: cache has dtype {dtype_name(cache.dtype)}; it should hold "
                    f"{dtype_name(x.dtype)}, the dtype of x"
                )
        kernels = self.get_kernel(generator_input)
        state, activation, backend = cache, self.activation, self.backend
        decoding = cache is not None and cu_seqlens is None and tokens[1] == 1
        update = output_final_state or decoding
        if torch.is_grad_enabled() and any(
            array is not None and array.requires_grad for array in (x, kernels, cache)
        ):
            # The backward reads what the cache held before it was updated, and can't keep a tensor
            # that was made in inference mode.
            state = None if cache is None else cache.clone()
        elif decoding:
            y = dynamic_conv_step(x, cache, kernels[:, 0], activation=activation, backend=backend)
            return y.to(x.dtype), cache
        result = dynamic_conv(
            x,
            kernels,
            initial_state=state,
            output_final_state=update,
            cu_seqlens=cu_seqlens,
            activation=activation,
            backend=backend,
        )
        y, final = result if update else (result, None)
        if update:
            cache = final.detach() if cache is None else cache.copy_(final.detach())
        return y.to(x.dtype), cache

    def extra_repr(self) -> str:
        """Return what ``repr`` shows besides the generator."""
        shown = (
            f"{self.hidden_size}, kernel_size={self.kernel_size}, activation={self.activation!r}"
        )
        return shown if self.backend is None else f"{shown}, backend={self.backend!r}"
