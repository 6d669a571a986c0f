"""Modules for torch, imported by name since ``import fusedops`` doesn't import torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import fusedops._frame.needs_torch

import torch

# Imported now: torch.compile can't import the bridge while it traces a call.
import fusedops._frame.bridge  # noqa: F401
from fusedops._frame.arrays import wide
from fusedops._frame.bridge.modes import differentiates, watched
from fusedops._frame.check import (
    at_least_one,
    holds,
    no_overlap,
    of_shape,
    one_of,
    size,
    traced,
    writable,
)
from fusedops._frame.registry import BACKENDS, BackendName
from fusedops._layers import (
    check_callable,
    check_container,
    check_tensors,
    has_hooks,
    is_plain,
    is_plain_norm,
)
from fusedops._products import linear_products
from fusedops.conv import ACTIVATIONS, Activation, Sequences, dynamic_conv, dynamic_conv_step
from fusedops.delta import gated_delta_rule, gated_delta_rule_step
from fusedops.generated import dynamic_conv_generated
from fusedops.pairs import (
    Attention,
    PairTransition,
    TriangleAttention,
    autocasts,
    check_pairs,
    expanded,
    lecun_normal,
    wider_than,
)
from fusedops.so2 import PRECISIONS as SO2_PRECISIONS
from fusedops.so2 import Precision as SO2Precision
from fusedops.so2 import so2_convolution
from fusedops.so2.op import WEIGHTS, by_order, orders
from fusedops.trimul import Direction, triangle_multiplicative_update
from fusedops.trimul.op import DIRECTIONS, GATES, PRECISIONS, Gate, Precision
from fusedops.wigner.rows import message_rows

__all__ = [
    "DynamicShortConvolution",
    "JetBlock",
    "PairBlock",
    "PairTransition",
    "SO2Convolution",
    "TriangleAttention",
    "TriangleMultiplicativeUpdate",
]

#: The devices with kernels that make a convolution's kernels; the fewest numbers of these, or of
#: multiplications, that are worth it on a CPU; and the fewest that take an NVIDIA GPU longer than
#: the host.
FUSED = "cpu", "cuda", "xpu"
MANY = 1 << 22
MANY_ON_CUDA = 1 << 26


class _Elementwise(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class _XIELU(torch.nn.Module):
    """xIELU (Huang and Schlag, arXiv:2411.13010), with the parameters' names in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = torch.nn.Buffer(torch.tensor(0.5))
        self.eps = torch.nn.Buffer(torch.tensor(-1e-6))
        # The inverse of softplus at 0.8, and at 0.8 - beta.
        self.alpha_p = torch.nn.Parameter(torch.tensor([0.8]).expm1().log())
        self.alpha_n = torch.nn.Parameter(torch.tensor([0.3]).expm1().log())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        softplus = torch.nn.functional.softplus
        above = softplus(self.alpha_p) * x * x
        below = (torch.minimum(x, self.eps).expm1() - x) * (self.beta + softplus(self.alpha_n))
        return torch.where(x > 0, above, below) + self.beta * x


def _clipped_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x).clip(-10, 10)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * (1.702 * x).sigmoid()


def _laplace(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + ((x - 0.707107) / (0.282095 * 2**0.5)).erf())


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu().square()


def _root_of_softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(x).sqrt()


_tanh_gelu = partial(torch.nn.GELU, approximate="tanh")

GeneratorActivation = Literal[
    "silu",
    "swish",
    "gelu",
    "gelu_10",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "hardswish",
    "laplace",
    "mish",
    "relu",
    "relu2",
    "relu6",
    "leaky_relu",
    "prelu",
    "sigmoid",
    "sqrtsoftplus",
    "tanh",
    "xielu",
    "linear",
    "identity",
]

#: The activations of ACT2FN in transformers 5.23 by name, and "identity".
GENERATOR_ACTIVATIONS: dict[GeneratorActivation, Callable[[], torch.nn.Module]] = {
    "silu": torch.nn.SiLU,
    "swish": torch.nn.SiLU,
    "gelu": torch.nn.GELU,
    "gelu_10": partial(_Elementwise, _clipped_gelu),
    "gelu_accurate": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_python": torch.nn.GELU,
    "gelu_python_tanh": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": partial(_Elementwise, _quick_gelu),
    "hardswish": torch.nn.Hardswish,
    "laplace": partial(_Elementwise, _laplace),
    "mish": torch.nn.Mish,
    "relu": torch.nn.ReLU,
    "relu2": partial(_Elementwise, _squared_relu),
    "relu6": torch.nn.ReLU6,
    "leaky_relu": torch.nn.LeakyReLU,
    "prelu": torch.nn.PReLU,
    "sigmoid": torch.nn.Sigmoid,
    "sqrtsoftplus": partial(_Elementwise, _root_of_softplus),
    "tanh": torch.nn.Tanh,
    "xielu": _XIELU,
    "linear": torch.nn.Identity,
    "identity": torch.nn.Identity,
}


def num_sequences(x: torch.Tensor, cu_seqlens: Any) -> int | str:
    """Return the number of sequences, or a name where only the op reads it."""
    if cu_seqlens is None:
        return x.shape[0]
    if isinstance(cu_seqlens, Sequences):
        return cu_seqlens.num_sequences
    if isinstance(cu_seqlens, (list, tuple)):
        return len(cu_seqlens) - 1
    # len() of a tensor is an int, and would hold torch.export to it.
    return cu_seqlens.shape[0] - 1 if getattr(cu_seqlens, "ndim", 0) == 1 else "S"


def check_update(op: str, name: str, cache: torch.Tensor, copied: bool = True) -> None:
    """Raise, before any cache changes, unless torch or, if nothing is `copied`, a kernel can.

    A kernel writes to a tensor of inference mode too.
    """
    no_overlap(op, name, cache)
    if copied:
        writable(op, name, cache)
    if cache.is_leaf and watched((cache,)):
        raise RuntimeError(
            f"{op}: {name} is a leaf Variable that requires grad; it should be a clone, to be "
            "written to"
        )


class DynamicShortConvolution(torch.nn.Module):
    r"""Causal convolution of tokens with kernels that a small network computes from each token.

    .. math:: y_{btd} = a\Bigl(\sum_{w=0}^{W-1} k_{btdw} \, x_{b,\,t+w-W+1,\,d}\Bigr), \quad
              k_{bt,\,dW+w} = \bigl(W_2 \, g(W_1 u_{bt}) + \beta\bigr)_{dW+w}

    with the activations a and g, and the generator's input u: x, or another tensor.

    Parameters
    ----------
    hidden_size : int
        D, the channels of x.
    kernel_size : int
        W, the taps of every token and channel.
    generator_input_size : int, optional
        C, the channels of u; D by default.
    generator_reduction : int, optional
        The generator has hidden_size // generator_reduction hidden units; D by default.
    generator_activation : str
        g, by its name in ACT2FN of transformers, such as "silu", "gelu" or "linear".
    activation : {"silu", "swish", None}
        a; "silu" and "swish" both name x · sigmoid(x).
    static_conv_init : callable, optional
        A function that fills :math:`\beta`, a parameter (D · W,), in place. It is called once,
        without gradients, and sets the kernels before training.
    use_fast_conv1d, implementation
        Ignored, and accepted only for callers that pass them: see `backend`.
    backend : str, optional
        The backend that must serve every call.

    Attributes
    ----------
    hidden_size, kernel_size, generator_input_size, generator_hidden_size : int
        The sizes D, W and C, and the number of hidden units.
    activation, backend, implementation : str or None
        As given; programs may read, and set, `implementation`.
    static_conv_init, use_fast_conv1d
        As given.
    kernel_generator : torch.nn.Sequential
        Linear layers ``w1`` and ``w2``, with ``act`` between them. The parameters ``w1.weight``,
        ``w2.weight`` and ``w2.bias`` start at zero, except for `static_conv_init`.

    Raises
    ------
    ValueError
        If a size isn't positive or an activation is unknown; the message names the argument.

    Notes
    -----
    Arguments, attributes, parameters and results are the same as in Jet-Nemotron's class of this
    name: to switch, change the import; checkpoints load unchanged. Results differ where that class
    is wrong: its evaluation ignores `cu_seqlens`; its "naive" implementation drops the cache of a
    prompt's earlier chunks, and ignores `cu_seqlens` too; with packed sequences its cache has one
    row instead of one for each sequence; and a prompt shorter than W leaves old inputs of the cache
    in their places, where they should move on. Unlike that class, this one leaves x unchanged under
    a mask, and has gradients in a decoding step.

    If ``w2`` is a plain Linear without hooks, it may be part of the convolution, as in
    `fusedops.dynamic_conv_generated`, and no kernels are stored. On a GPU this is so in prefill of
    2²⁶ numbers of kernels and more, as the host decides the time of fewer; with gradients on Hopper
    alone, in 16 bits, for four taps and sequences of one length. Storing takes twice the memory
    there; elsewhere it is faster. On a CPU it is so from 2²² numbers of kernels on, or for any in a
    traced call, in prefill in float32 and float64, with gradients in float32, where storing takes
    one and a half times the memory. A decoding step stores them.

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
        generator_activation: GeneratorActivation = "silu",
        activation: Activation | None = "silu",
        static_conv_init: Callable[[torch.Tensor], Any] | None = None,
        use_fast_conv1d: bool = True,
        implementation: str = "naive",
        *,
        backend: BackendName | None = None,
    ) -> None:
        super().__init__()
        name = "DynamicShortConvolution"
        if generator_input_size is None:
            generator_input_size = hidden_size
        at_least_one(
            name,
            hidden_size=hidden_size,
            kernel_size=kernel_size,
            generator_input_size=generator_input_size,
        )
        if generator_reduction is None:
            generator_reduction = 1
        if not 1 <= size(name, "generator_reduction", generator_reduction) <= hidden_size:
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
        self.static_conv_init = static_conv_init
        self.use_fast_conv1d = use_fast_conv1d
        self.implementation = implementation
        w1 = torch.nn.Linear(generator_input_size, self.generator_hidden_size, bias=False)
        act = GENERATOR_ACTIVATIONS[generator_activation]()
        w2 = torch.nn.Linear(self.generator_hidden_size, hidden_size * kernel_size)
        self.kernel_generator = torch.nn.Sequential(OrderedDict(w1=w1, act=act, w2=w2))
        with torch.no_grad():
            for layer in (w1, w2):
                for parameter in layer.parameters():
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
            In the dtype of the parameters, or autocast's.

        Raises
        ------
        RuntimeError
            Raised by torch if x doesn't fit the parameters.

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
        group: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        r"""Return the convolution of tokens, and the cache for the tokens that follow.

        .. math:: y_{btd} = a\Bigl(\sum_{w=0}^{W-1} k_{btdw} \, x_{b,\,t+w-W+1,\,d}\Bigr)

        with x multiplied by the mask. Before the first token x stands for the inputs in the cache,
        or zeros. One token with a cache, and without `cu_seqlens`, is a decoding step.

        Parameters
        ----------
        x : tensor (B, T, D), float32, float64, bfloat16 or float16
            The tokens.
        mask : tensor (B, T), of any dtype, optional
            Zero or false where a token is padding.
        cache : tensor (B, D, W), or (S, D, W) for packed sequences, optional
            The last W inputs, the latest last. A decoding step, or any call with
            `output_final_state`, updates it in place. Its dtype must hold the values of x.
        output_final_state : bool
            Whether to return the last W inputs.
        cu_seqlens : Sequences, or tensor (S + 1,), int32 or int64, optional
            Where each of S packed sequences begins, and where the last one ends; B must be 1.
        generator_input : tensor (B, T, C), optional
            u, the generator's input; by default x, after the mask.
        group : ProcessGroup, or DeviceMesh of one dimension, optional
            The ranks that share the tokens of every sequence, as in
            `fusedops.distributed.dynamic_conv`; `cu_seqlens` then counts the tokens of all ranks.
            No cache goes with it. The last inputs of the rank before travel while most tokens are
            convolved.
        **kwargs
            Ignored, for callers that pass the same arguments to layers of several classes.

        Returns
        -------
        y : tensor (B, T, D)
            In the dtype of x.
        cache : tensor (B, D, W) or (S, D, W), or None
            The cache that was given; if none was, a new one with `output_final_state`.

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong dtype, shape or device; the message names it.
        RuntimeError
            Raised by torch if the generator's input has another dtype than its parameters; or if
            the cache to be updated is a leaf that requires grad.
        BackendUnavailable
            If the module's backend can't serve the call.

        Notes
        -----
        A cache passes values on to the next call, but no gradients: values written into a cache,
        and a new cache, are detached. The gradient of a call reaches its own x, generator's input
        and parameters, and the given cache, if that requires grad.

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
        check_tensors(name, "x", x=x, mask=mask, cache=cache, generator_input=generator_input)
        of_shape(name, "x", x, ("B", "T", self.hidden_size))
        tokens = tuple(x.shape[:2])
        if mask is not None:
            of_shape(name, "mask", mask, tokens)
            x = x * mask[..., None].to(x.dtype)
        if generator_input is None:
            generator_input = x
        of_shape(name, "generator_input", generator_input, (*tokens, self.generator_input_size))
        if cache is not None:
            count = num_sequences(x, cu_seqlens)
            of_shape(name, "cache", cache, (count, self.hidden_size, self.kernel_size))
            holds(name, "cache", cache, x)
        if group is not None:
            return self._shared(x, generator_input, cache, output_final_state, cu_seqlens, group)
        state, activation, backend = cache, self.activation, self.backend
        decoding = cache is not None and cu_seqlens is None and tokens[1] == 1
        update = output_final_state or decoding
        whole = cache is None and cu_seqlens is None and x.itemsize == 2
        given = self._given(generator_input, decoding, whole)
        recorded = differentiates((x, *given, cache))
        if cache is not None and decoding and not recorded:
            (kernels,) = given
            y = dynamic_conv_step(x, cache, kernels, activation=activation, backend=backend)
            return y, cache
        if cache is not None and update:
            check_update(name, "cache", cache)
        if cache is not None and recorded:
            # The backward reads the cache as it was before the update, and can't save a tensor
            # that was made in inference mode.
            state = cache.clone()
        convolve: Any = dynamic_conv if len(given) == 1 else dynamic_conv_generated
        result = convolve(
            x,
            *given,
            initial_state=state,
            output_final_state=update,
            cu_seqlens=cu_seqlens,
            activation=activation,
            backend=backend,
        )
        if not update:
            return result, cache
        y, final = result
        cache = final.detach() if cache is None else cache.copy_(final.detach())
        return y, cache

    def _given(self, u: torch.Tensor, decoding: bool, whole: bool) -> tuple[Any, ...]:
        """Return the kernels, or the hidden units, weight and bias that make them.

        The generator's last layer is then part of the convolution. A layer that is more than its
        weight and bias makes kernels itself. A layer whose gradient is wanted does so too, as its
        kernels would be made three times, but where that is faster: in float32 on a CPU, and on
        Hopper for `whole` sequences in 16 bits, of one length. On a CPU a layer in 16 bits, which
        torch multiplies faster, makes kernels too, and so does one for kernels that the CPU's cache
        may hold; on a GPU one for few kernels, which the host launches in less time.
        """
        if decoding or u.device.type not in FUSED:
            return (self.get_kernel(u),)
        generator: Any = self.kernel_generator
        last = generator.w2
        plain = (
            type(self).get_kernel is DynamicShortConvolution.get_kernel
            and "get_kernel" not in vars(self)
            and type(generator) is torch.nn.Sequential
            and len(generator) == 3
            and not has_hooks(generator)
            and is_plain(last)
        )
        on_cpu = u.device.type == "cpu"
        count = u.shape[0] * u.shape[1] * self.hidden_size * self.kernel_size
        if plain and on_cpu:
            # A traced size must not be looked at: torch.export would keep to one side of the bound.
            plain = last.weight.itemsize > 2 and (traced() or count >= MANY)
        elif plain and u.is_cuda and not traced():
            plain = count >= MANY_ON_CUDA
        anew = plain and on_cpu and last.weight.dtype == torch.float32
        if plain and whole and u.is_cuda and not traced():
            anew = (
                self.kernel_size == 4
                and not (self.hidden_size % 32 or self.generator_hidden_size % 8)
                and last.weight.itemsize == u.itemsize == 2
                and torch.cuda.get_device_capability(u.device)[0] == 9
            )
        if plain and not anew:
            plain = not torch.is_grad_enabled() or not any(
                tensor.requires_grad for tensor in chain((u,), generator.parameters())
            )
        if not plain:
            return (self.get_kernel(u),)
        hidden = generator.act(generator.w1(u))
        # Under autocast the layer would round its parameters as it rounds the hidden units.
        bias = None if last.bias is None else last.bias.to(hidden.dtype)
        return hidden, last.weight.to(hidden.dtype), bias

    def _shared(
        self,
        x: torch.Tensor,
        generator_input: torch.Tensor,
        cache: torch.Tensor | None,
        output_final_state: bool,
        cu_seqlens: Any,
        group: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the convolution of tokens that ranks share."""
        from fusedops import distributed

        name = "DynamicShortConvolution"
        for argument, value in (("cache", cache), ("output_final_state", output_final_state)):
            if value is not None and value is not False:
                raise ValueError(f"{name}: {argument} is given; with group it should not be")
        y = distributed.dynamic_conv(
            x,
            self.get_kernel(generator_input),
            group=group,
            cu_seqlens=cu_seqlens,
            activation=self.activation,
            backend=self.backend,
        )
        return y, None

    def extra_repr(self) -> str:
        """Return the text in ``repr`` that comes before the generator."""
        shown = (
            f"{self.hidden_size}, kernel_size={self.kernel_size}, activation={self.activation!r}"
        )
        return shown if self.backend is None else f"{shown}, backend={self.backend!r}"


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Return vectors divided by their lengths, as flash-linear-attention divides them."""
    squares = wide(x).square().sum(-1, keepdim=True)
    return (x * (squares + 1e-6).rsqrt()).to(x.dtype)


def log_gates(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor | None) -> torch.Tensor:
    """Return the logarithms of a delta rule's gates, -exp(A_log) softplus(a + dt_bias)."""
    a = wide(a)
    a = a if dt_bias is None else a + dt_bias.to(a.dtype)
    return -A_log.to(a.dtype).exp() * torch.nn.functional.softplus(a)


class _GatedRMSNorm(torch.nn.RMSNorm):
    """A norm of heads, times SiLU of their gates."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        # Autocast leaves the weight, beside which torch would warn of its slower kernel.
        rms_norm, silu = torch.nn.functional.rms_norm, torch.nn.functional.silu
        weight = self.weight.to(x.dtype)
        return rms_norm(x, self.normalized_shape, weight, self.eps) * silu(gate)


class JetBlock(torch.nn.Module):
    r"""Linear attention by the gated delta rule, with values from a dynamic convolution.

    .. math:: q_t = \ell(W_q x_t), \quad k_t = \ell(W_k x_t), \quad
              v = \mathrm{conv}(W_v x), \quad
              \beta_t = \sigma(W_b x_t), \quad
              g_t = -e^{A} \, \mathrm{softplus}(W_a x_t + d)

    .. math:: S_t = e^{g_t} S_{t-1} + \beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T, \quad
              y_t = W_o \bigl(\mathrm{norm}(K^{-1/2} S_t^T q_t) \odot \mathrm{silu}(W_g x_t)\bigr)

    for every head, with :math:`\ell(u) = \mathrm{silu}(u) / |\mathrm{silu}(u)|`, kernels of the
    convolution made from x, and a norm by the root mean square of a head.

    Parameters
    ----------
    hidden_size : int
        C, the channels of x.
    num_heads : int
        H, the number of heads.
    head_dim : int
        K, the channels of a query or key of a head.
    expand_v : float
        The channels of a value are V = expand_v · K, up to rounding; an integer.
    conv_size : int
        W, the taps of the convolution.
    dconv_generator_reduction : int
        The convolution's generator has H · V // dconv_generator_reduction hidden units.
    norm_eps : float or str
        :math:`\varepsilon` of the norm, or its decimal text.
    mode, dconv_implementation
        Ignored, and accepted only as a part of Jet-Nemotron's configurations.
    initializer_range : float
        The standard deviation of the convolution's kernels before training.
    backend : str, optional
        The backend that must serve every convolution and every delta rule.

    Attributes
    ----------
    hidden_size, num_heads, head_k_dim, head_v_dim, key_dim, value_dim, conv_size : int
        C, H, K, V, H · K, H · V and W.
    backend : str or None
        As given.
    q_proj, k_proj, v_proj, b_proj, a_proj, g_proj, o_proj : torch.nn.Linear
        The projections :math:`W_q` and so on, without biases.
    A_log, dt_bias : torch.nn.Parameter
        A and d (H,), marked by ``_no_weight_decay``.
    dynamic_conv1d : DynamicShortConvolution
        The convolution, whose kernels are made from x.
    o_norm : torch.nn.Module
        The norm, with a weight (V,) for all heads.

    Raises
    ------
    ValueError
        If a size isn't a positive integer; the message names the argument.

    Notes
    -----
    Parameters and their names are those of Jet-Nemotron's class of this name. Its checkpoints load
    unchanged: ``JetBlock(config.hidden_size, **config.efficient_attention_config["jet"])``. That
    class runs on a GPU alone, and trains on more than 64 tokens. A mask means the same here and
    there: tokens of padding are as if they weren't there.

    References
    ----------
    Gu, Hu, et al., "Jet-Nemotron: Efficient Language Model with Post Neural Architecture Search",
    arXiv:2508.15884 (2025). See `fusedops.gated_delta_rule` for the delta rule.

    Examples
    --------
    >>> import torch
    >>> from fusedops.nn import JetBlock
    >>> block = JetBlock(16, num_heads=2, head_dim=4, dconv_generator_reduction=2)
    >>> x = torch.randn(3, 5, 16)
    >>> y, cache = block(x[:, :4], output_final_state=True)
    >>> y.shape, *(each.shape for each in cache)
    (torch.Size([3, 4, 16]), torch.Size([3, 16, 4]), torch.Size([3, 2, 4, 8]))
    >>> next_y, cache = block(x[:, 4:], cache=cache)
    >>> torch.allclose(next_y, block(x)[0][:, 4:], atol=1e-6)
    True
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 6,
        head_dim: int = 256,
        expand_v: float = 2.0,
        conv_size: int = 4,
        dconv_generator_reduction: int = 8,
        norm_eps: float | str = 1e-5,
        mode: str = "chunk",
        dconv_implementation: str = "triton",
        *,
        initializer_range: float = 0.02,
        backend: BackendName | None = None,
    ) -> None:
        super().__init__()
        name = "JetBlock"
        sizes = {"num_heads": num_heads, "head_dim": head_dim, "conv_size": conv_size}
        at_least_one(name, hidden_size=hidden_size, **sizes)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_k_dim = head_dim
        self.head_v_dim = round(head_dim * expand_v)
        # A configuration has 2.6666666667 for 8 / 3.
        rounded = abs(head_dim * expand_v - self.head_v_dim)
        if self.head_v_dim < 1 or rounded > 1e-5 * self.head_v_dim:
            raise ValueError(
                f"{name}: expand_v is {expand_v}; times {head_dim}, the head_dim, it should be a "
                "positive integer"
            )
        self.key_dim, self.value_dim = num_heads * head_dim, num_heads * self.head_v_dim
        self.conv_size = conv_size
        self.backend = backend

        def projection(size: int, out: int) -> torch.nn.Linear:
            return torch.nn.Linear(size, out, bias=False)

        self.q_proj = projection(hidden_size, self.key_dim)
        self.k_proj = projection(hidden_size, self.key_dim)
        self.v_proj = projection(hidden_size, self.value_dim)
        self.b_proj = projection(hidden_size, num_heads)
        self.a_proj = projection(hidden_size, num_heads)
        # Rates from 0 to 16 and time steps from 0.001 to 0.1, as Mamba2 draws them.
        rate = 16 * (1 - torch.rand(num_heads))
        step = 0.001 * 100 ** torch.rand(num_heads)
        self.A_log = torch.nn.Parameter(rate.log())
        self.dt_bias = torch.nn.Parameter(step.expm1().log())
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        self.dynamic_conv1d = DynamicShortConvolution(
            self.value_dim,
            conv_size,
            hidden_size,
            dconv_generator_reduction,
            static_conv_init=partial(torch.nn.init.normal_, std=initializer_range),
            backend=backend,
        )
        self.g_proj = projection(hidden_size, self.value_dim)
        self.o_norm = _GatedRMSNorm(self.head_v_dim, eps=float(norm_eps))
        self.o_proj = projection(self.value_dim, hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: tuple[torch.Tensor, torch.Tensor] | None = None,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        r"""Return the attention of tokens, and the cache for the tokens that follow.

        .. math:: y_t = W_o \bigl(\mathrm{norm}(K^{-1/2} S_t^T q_t)
                  \odot \mathrm{silu}(W_g x_t)\bigr)

        with the states S of the class. One token with a cache, and without `cu_seqlens`, is a
        decoding step.

        Parameters
        ----------
        hidden_states : tensor (B, T, C), float32, float64, bfloat16 or float16
            x, the tokens.
        mask : tensor (B, T), of any dtype, optional
            Zero or false where a token is padding, which changes no state, and whose y is zero. The
            host waits for a GPU to count the others.
        cache : pair of tensors (B, H · V, W) and (B, H, K, V), or of S rows each, optional
            The last W inputs of the convolution and the states S, in float32 or better. A decoding
            step, or any call with `output_final_state`, updates both in place.
        output_final_state : bool
            Whether to return the cache after the last tokens.
        cu_seqlens : Sequences, or tensor (S + 1,), int32 or int64, optional
            Where each of S packed sequences begins, and where the last one ends; B must be 1.

        Returns
        -------
        y : tensor (B, T, C)
            In the dtype of `o_proj`.
        cache : pair of tensors, or None
            The cache that was given; if none was, a new one with `output_final_state`.

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong dtype, shape or device; the message names it.
        RuntimeError
            Raised by torch if x has another dtype than the parameters; or if a tensor of the cache
            that is to be updated is a leaf that requires grad. No cache has changed then.
        BackendUnavailable
            If the module's backend can't serve the call.

        Notes
        -----
        A cache passes values on to the next call, but no gradients, as in
        `DynamicShortConvolution`.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.nn import JetBlock
        >>> block = JetBlock(16, num_heads=2, head_dim=4)
        >>> x, mask = torch.randn(1, 4, 16), torch.tensor([[0, 1, 1, 1]])
        >>> torch.allclose(block(x, mask)[0][:, 1:], block(x[:, 1:])[0])
        True
        """
        name = "JetBlock"
        check_tensors(name, "hidden_states", hidden_states=hidden_states, mask=mask)
        of_shape(name, "hidden_states", hidden_states, ("B", "T", self.hidden_size))
        tokens = tuple(hidden_states.shape[:2])
        decoding = cache is not None and cu_seqlens is None and tokens[1] == 1
        update = output_final_state or decoding
        with linear_products(hidden_states, self.backend):
            if mask is None:
                return self._attention(hidden_states, cache, update, cu_seqlens)
            of_shape(name, "mask", mask, tokens)
            if cu_seqlens is not None:
                raise ValueError(f"{name}: mask is given; with cu_seqlens it should not be")
            there = mask != 0
            starts = torch.nn.functional.pad(there.sum(1).cumsum(0), (1, 0))
            packed, cache = self._attention(hidden_states[there][None], cache, update, starts)
            y = packed.new_zeros(*tokens, packed.shape[-1])
            return y.masked_scatter(there[..., None], packed), cache

    def _attention(
        self,
        x: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor] | None,
        update: bool,
        cu_seqlens: Any,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return the attention of tokens, and the cache, updated or as it was."""
        inputs, state = None, None
        if cache is not None:
            inputs, state = self._states(x, cache, cu_seqlens, update)
        heads = self.num_heads, -1
        silu = torch.nn.functional.silu
        q, k = (
            normalized(silu(layer(x)).unflatten(-1, heads)) for layer in (self.q_proj, self.k_proj)
        )
        v, inputs = self.dynamic_conv1d(
            self.v_proj(x),
            cache=inputs,
            output_final_state=update,
            cu_seqlens=cu_seqlens,
            generator_input=x,
        )
        g = log_gates(self.a_proj(x), self.A_log, self.dt_bias)
        given = q, k, v.unflatten(-1, heads), g, self.b_proj(x).sigmoid()
        recorded = differentiates((*given, state))
        if state is not None and x.shape[1] == 1 and cu_seqlens is None and not recorded:
            o = gated_delta_rule_step(*given, state, backend=self.backend)
        else:
            # The backward reads the state as it was before the update, as in the convolution.
            before = state.clone() if state is not None and recorded else state
            rule: Any = gated_delta_rule
            options = {"cu_seqlens": cu_seqlens, "backend": self.backend}
            result = rule(*given, initial_state=before, output_final_state=update, **options)
            if update:
                o, final = result[0], result[1].detach()
                state = final if state is None else state.copy_(final)
            else:
                o = result
        o = self.o_norm(o, self.g_proj(x).unflatten(-1, heads))
        y = self.o_proj(o.flatten(-2))
        return y, None if state is None else (inputs, state)

    def _states(self, x: torch.Tensor, cache: Any, cu_seqlens: Any, update: bool) -> Any:
        """Return the two tensors of a cache. Raises unless they fit, before one is updated."""
        name = "JetBlock"
        pair = isinstance(cache, tuple | list) and len(cache) == 2
        if not pair or not all(isinstance(each, torch.Tensor) for each in cache):
            kind = type(cache).__name__
            raise TypeError(f"{name}: cache is a {kind}; it should be a pair of tensors")
        count = num_sequences(x, cu_seqlens)
        of_shape(name, "cache[0]", cache[0], (count, self.value_dim, self.conv_size))
        of_shape(
            name, "cache[1]", cache[1], (count, self.num_heads, self.head_k_dim, self.head_v_dim)
        )
        holds(name, "cache[1]", cache[1], x, "hidden_states")
        if update:
            copied = x.shape[1] != 1 or cu_seqlens is not None
            copied = copied or differentiates((x, *cache))
            if torch.is_grad_enabled():
                copied = copied or differentiates((*self.parameters(),))
            for at, each in enumerate(cache):
                check_update(name, f"cache[{at}]", each, copied)
        return cache

    def extra_repr(self) -> str:
        """Return the text in ``repr`` that comes before the layers."""
        shown = f"{self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_k_dim}"
        return shown if self.backend is None else f"{shown}, backend={self.backend!r}"


class SO2Convolution(torch.nn.Module):
    r"""SO(2) convolution of messages, with radial functions that a small network computes.

    .. math:: (\gamma \,\|\, y_0) = W_0 (r_0 \odot x_0) + b, \quad
              y_{+m} + i \, y_{-m} = (R_m + i I_m) \, \bigl(r_m \odot (x_{+m} + i \, x_{-m})\bigr)

    See `fusedops.so2_convolution`.

    Parameters
    ----------
    sphere_channels : int
        C, the channels of a message.
    m_output_channels : int
        D, the channels of the result.
    lmax, mmax : int
        The largest degree, and the largest order, at most lmax and at most 8.
    mappingReduced
        Ignored, and accepted only for callers that pass it: `lmax` and `mmax` say as much.
    internal_weights : bool
        Whether there is no network for radial functions.
    edge_channels_list : sequence of int, optional
        Without `internal_weights`, the sizes of the network's input and hidden layers.
    extra_m0_output_channels : int, optional
        G, the number of gates, which are returned beside the result, 0 of them too.
    precision : {None, "float32", "ieee", "tf32", "bf16"}
        See `fusedops.so2_convolution`.
    backend : str, optional
        The backend that must serve every call.

    Attributes
    ----------
    sphere_channels, m_output_channels, lmax, mmax : int
        As given.
    extra_m0_output_channels, precision, backend
        As given.
    fc_m0 : torch.nn.Linear
        The weight and the bias of order 0.
    so2_m_conv : torch.nn.ModuleList
        For every order from 1 to mmax a linear layer ``fc`` without bias, with the weights' real
        parts above their imaginary parts.
    rad_func : torch.nn.ModuleDict or None
        ``net``: linear layers, with LayerNorm and SiLU between them.

    Raises
    ------
    ValueError
        If a size or an order is out of range, or `edge_channels_list` is missing; the message names
        the argument.

    Notes
    -----
    Arguments, parameters and results are the same as in fairchem's class ``SO2_Convolution``: to
    switch, change the import; checkpoints load unchanged. If a layer is more than its weight and
    bias (hooks, an adapter, another class), torch computes all products, by calls of the layers.

    References
    ----------
    Passaro and Zitnick, ICML 2023 (eSCN); fairchem-core,
    ``fairchem/core/models/uma/nn/so2_layers.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.nn import SO2Convolution
    >>> convolution = SO2Convolution(
    ...     8, 4, lmax=2, mmax=1, internal_weights=False, edge_channels_list=[16, 16],
    ...     extra_m0_output_channels=8
    ... )
    >>> out, gates = convolution(torch.randn(5, 7, 8), torch.randn(5, 16))
    >>> out.shape, gates.shape
    (torch.Size([5, 7, 4]), torch.Size([5, 8]))
    """

    def __init__(
        self,
        sphere_channels: int,
        m_output_channels: int,
        lmax: int,
        mmax: int,
        mappingReduced: Any = None,
        internal_weights: bool = True,
        edge_channels_list: Sequence[int] | None = None,
        extra_m0_output_channels: int | None = None,
        *,
        precision: SO2Precision | None = None,
        backend: BackendName | None = None,
    ) -> None:
        super().__init__()
        name = "SO2Convolution"
        at_least_one(name, sphere_channels=sphere_channels, m_output_channels=m_output_channels)
        gates = size(name, "extra_m0_output_channels", extra_m0_output_channels or 0)
        lmax, mmax = size(name, "lmax", lmax), size(name, "mmax", mmax)
        most = min(lmax, len(WEIGHTS) - 1)
        if mmax > most:
            raise ValueError(
                f"{name}: mmax is {mmax}; it should be from 0 to {most}, as lmax is {lmax}"
            )
        if not (internal_weights or edge_channels_list):
            raise ValueError(
                f"{name}: edge_channels_list is {edge_channels_list}; it should have sizes, "
                "unless internal_weights is True"
            )
        one_of(name, "precision", precision, SO2_PRECISIONS)
        one_of(name, "backend", backend, (None, *(each.name for each in BACKENDS)))
        self.sphere_channels = sphere_channels
        self.m_output_channels = m_output_channels
        self.lmax = lmax
        self.mmax = mmax
        self.extra_m0_output_channels = extra_m0_output_channels
        self.precision = precision
        self.backend = backend
        Linear = torch.nn.Linear
        widths = [(lmax + 1 - m) * sphere_channels for m in range(mmax + 1)]
        self.fc_m0 = Linear(widths[0], (lmax + 1) * m_output_channels + gates)
        self.so2_m_conv = torch.nn.ModuleList()
        for m in range(1, mmax + 1):
            fc = Linear(widths[m], 2 * (lmax + 1 - m) * m_output_channels, bias=False)
            with torch.no_grad():
                # A result adds two products.
                fc.weight.mul_(2**-0.5)
            self.so2_m_conv.append(torch.nn.ModuleDict({"fc": fc}))
        self.rad_func = None
        if not internal_weights:
            sizes = [*(edge_channels_list or ()), sum(widths)]
            layers: list[torch.nn.Module] = []
            for before, after in pairwise(sizes):
                layers += [Linear(before, after), torch.nn.LayerNorm(after), torch.nn.SiLU()]
            self.rad_func = torch.nn.ModuleDict({"net": torch.nn.Sequential(*layers[:-2])})

    def forward(
        self, x: torch.Tensor, x_edge: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        r"""Return the convolution of messages, and the gates if the module has any.

        Parameters
        ----------
        x : tensor (E, M, C)
            Messages, m-major (`fusedops.wigner.m_major_order`).
        x_edge : tensor (E, edge_channels_list[0]) or (E, Σ (lmax + 1 - m) C), optional
            The input of ``rad_func``; or the radial functions themselves, if the module has none.

        Returns
        -------
        out : tensor (E, M, D)
            The convolution, m-major.
        gates : tensor (E, G)
            Unless `extra_m0_output_channels` is None.

        Raises
        ------
        TypeError, ValueError
            If an argument doesn't fit the module; the message names it.
        BackendUnavailable
            If the module's backend can't serve the call.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.nn import SO2Convolution
        >>> SO2Convolution(8, 4, lmax=2, mmax=2)(torch.randn(5, 9, 8)).shape
        torch.Size([5, 9, 4])
        """
        check_tensors("SO2Convolution", "x", x=x, x_edge=x_edge)
        # Without orders above 0 the op takes any rows and channels of the same product.
        shape = "E", message_rows(self.lmax, self.mmax), self.sphere_channels
        of_shape("SO2Convolution", "x", x, shape)
        if self.rad_func is not None:
            check_container("SO2Convolution", "rad_func", self.rad_func)
            network: Any = self.rad_func["net"]
            if x_edge is None:
                raise TypeError(
                    "SO2Convolution: x_edge is None; it should be given, as the module has rad_func"
                )
            of_shape("SO2Convolution", "x_edge", x_edge, (x.shape[0], network[0].in_features))
            with linear_products(x_edge, self.backend):
                x_edge = network(x_edge)
        layers: Any = [self.fc_m0]
        parts: Any = self.so2_m_conv
        for m, part in enumerate(parts, 1):
            check_container("SO2Convolution", f"so2_m_conv[{m - 1}]", part)
            layers.append(part["fc"])
        for m, layer in enumerate(layers):
            if not is_plain(layer) or (m > 0 and layer.bias is not None):
                which = f"so2_m_conv[{m - 1}].fc" if m else "fc_m0"
                check_callable("SO2Convolution", which, x, self.backend)
                return self._by_layers(x, x_edge, layers)
        weights = [layer.weight for layer in layers[1:]]
        G = self.extra_m0_output_channels
        found: Any = so2_convolution(
            x,
            self.fc_m0.weight,
            *weights,
            bias=self.fc_m0.bias,
            radial=x_edge,
            gate_channels=G or 0,
            precision=self.precision,
            backend=self.backend,
        )
        # Degree 0 alone has no gates, and fairchem's caller expects the pair.
        return (found, found.new_empty(x.shape[0], 0)) if G == 0 else found

    def _by_layers(self, x: torch.Tensor, radial: torch.Tensor | None, layers: Any) -> Any:
        """Return the convolution of messages, and the gates, by calls of the layers."""
        rows = message_rows(self.lmax, self.mmax)
        if radial is not None:
            numbers = orders(self.lmax, self.mmax)[-1][1].stop * self.sphere_channels
            of_shape("SO2Convolution", "x_edge", radial, (x.shape[0], numbers))
        first, *parts = by_order(x, radial, self.lmax, self.mmax)
        G = self.extra_m0_output_channels
        sizes = [G or 0, (self.lmax + 1) * self.m_output_channels]
        gates, *found = layers[0](first).split(sizes, -1)
        for part, layer in zip(parts, layers[1:], strict=True):
            real, imaginary = layer(part.unflatten(1, (2, -1))).chunk(2, -1)
            found += [real[:, 0] - imaginary[:, 1], real[:, 1] + imaginary[:, 0]]
        out = torch.cat(found, 1).unflatten(1, (rows, self.m_output_channels))
        return out if G is None else (out, gates)

    def extra_repr(self) -> str:
        """Return the text in ``repr`` that comes before the layers."""
        shown = (
            f"{self.sphere_channels}, {self.m_output_channels}, lmax={self.lmax}, mmax={self.mmax}"
        )
        for name in ("precision", "backend"):
            value = getattr(self, name)
            shown += "" if value is None else f", {name}={value!r}"
        return shown


#: Other programs' names for the layers of the triangle update, by the gate of the program. Two
#: names are left and right.
_LAYERS: dict[str, dict[str, tuple[tuple[str, ...], ...]]] = {
    "output": {
        "norm_in": (("layer_norm_in",),),
        "p_in": (("linear_ab_p",), ("linear_a_p", "linear_b_p")),
        "g_in": (("linear_ab_g",), ("linear_a_g", "linear_b_g")),
        "norm_out": (("layer_norm_out",),),
        "p_out": (("linear_z",),),
        "g_out": (("linear_g",),),
    },
    "hidden": {
        "norm_in": (("norm",),),
        "p_in": (("left_proj", "right_proj"),),
        "g_in": (("left_gate", "right_gate"),),
        "norm_out": (("to_out_norm",),),
        "p_out": (("to_out",),),
        "g_out": (("out_gate",),),
    },
}


#: The layers of the triangle update, in the order of the op's arguments.
_OWN_LAYERS = "norm_in", "p_in", "g_in", "norm_out", "p_out", "g_out"

#: The precision of products by the dtype of autocast.
_OF_AUTOCAST = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _renamed(state_dict: Mapping[str, Any], prefix: str, direction: str) -> tuple[Any, str | None]:
    """Return a state_dict with our names for the layers, and the gate that other names imply.

    The program with the hidden gate sums l_kj r_ki over incoming edges: left and right change.
    """
    renamed, gate = dict(state_dict), None
    for kind, layers in _LAYERS.items():
        for ours, choices in layers.items():
            for names in choices:
                for part in ("weight", "bias"):
                    keys = [f"{prefix}{name}.{part}" for name in names]
                    if all(key in renamed for key in keys):
                        tensors = [renamed.pop(key) for key in keys]
                        if kind == "hidden" and direction == "incoming":
                            tensors.reverse()
                        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                        renamed[f"{prefix}{ours}.{part}"] = joined
                        gate = kind
    return renamed, gate


def _weights(update: TriangleMultiplicativeUpdate) -> list[Any]:
    """Return the weight and the bias of every layer, in the order of the op's arguments.

    They are looked up where modules keep them: as an attribute, each takes half a microsecond.
    """
    found = []
    layers: dict[str, Any] = update._modules
    for layer in _OWN_LAYERS:
        own = layers[layer]._parameters
        for name in ("weight", "bias"):
            # With a parametrization, the weight is no parameter.
            found.append(own[name] if name in own else getattr(layers[layer], name))
    return found


def autocast_precision(x: torch.Tensor, weights: Sequence[Any]) -> str | None:
    """Return the precision that autocast asks of products of a float32 x; None outside of it.

    As in cuEquivariance, x and its LayerNorm stay float32, and only products are rounded.
    """
    if x.dtype != torch.float32 or not autocasts(x):
        return None
    if any(weight is not None and weight.dtype == torch.float64 for weight in weights):
        return None
    return _OF_AUTOCAST.get(torch.get_autocast_dtype(x.device.type))


def _autocast_to(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that a linear layer of x has under autocast, if it is on."""
    if x.dtype == torch.float64 or not autocasts(x):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


class TriangleMultiplicativeUpdate(torch.nn.Module):
    r"""The triangle multiplicative update of a pair representation, with its weights.

    See `fusedops.triangle_multiplicative_update` for the formula.

    Parameters
    ----------
    c_z : int
        C, the channels of the pair representation.
    c_hidden : int, optional
        H, the channels of left and right; C by default.
    direction : {"outgoing", "incoming"}
        The edges of a triangle that the sum runs over.
    gate : {"output", "hidden"}
        The factor of the last gate: the output, as in OpenFold and Boltz; or the normalized sum,
        as in the gpu-mode TriMul problem.
    bias : bool
        Whether projections and gates have biases, as in OpenFold's AlphaFold 2.
    c_out : int, optional
        D, the channels of the update; C by default.
    eps : float
        ε of both LayerNorms.
    precision : {None, "float32", "ieee", "tf32", "bf16", "fp16"}
        The lowest precision to which a product may round its factors; None means that of x, and
        under autocast of a float32 x that of autocast.
    max_memory : int, optional
        The most bytes of intermediate results in forward or backward; see
        `fusedops.triangle_multiplicative_update`.
    backend : str, optional
        The backend that must serve every call.

    Attributes
    ----------
    c_z, c_hidden, c_out : int
        The sizes C, H and D.
    direction, gate, eps, precision, max_memory, backend
        As given.
    norm_in, norm_out : torch.nn.LayerNorm
        The LayerNorms of x, and of the sum over triangles.
    p_in, g_in : torch.nn.Linear
        Projection and gate of x, left above right.
    p_out, g_out : torch.nn.Linear
        Projection and gate of the output.

    Raises
    ------
    ValueError
        If a size isn't positive or a direction, gate, precision or backend is unknown; the message
        names the argument.

    Notes
    -----
    The parameters have the names of Boltz. ``load_state_dict`` also takes OpenFold's names
    (``linear_a_p`` or ``linear_ab_p`` and so on) with ``gate="output"``, and the gpu-mode problem's
    (``left_proj`` and so on) with ``gate="hidden"``; `from_state_dict` makes the module that fits a
    state_dict. The gpu-mode problem sums over outgoing edges only. With ``direction="incoming"``
    its names are read as in triangle-multiplicative-module, which it took them from: left and
    right change places. Before training the output is zero, as in AlphaFold.

    Kernels read the layers' weights. If a layer is more than its weight and bias (it has hooks, an
    adapter such as LoRA's, or another class), torch calls all layers, and computes the update
    without regard to `max_memory`. Such a layer is refused for a DTensor, and where a backend other
    than "torch" is asked for.

    References
    ----------
    Jumper et al., Nature 596 (2021) 583, supplementary algorithms 11 and 12.

    Examples
    --------
    >>> import torch
    >>> from fusedops.nn import TriangleMultiplicativeUpdate
    >>> update = TriangleMultiplicativeUpdate(16, 8, direction="incoming")
    >>> z, mask = torch.randn(2, 5, 5, 16), torch.ones(2, 5, 5, dtype=torch.bool)
    >>> z = z + update(z, mask)
    >>> update.p_in.weight.shape
    torch.Size([16, 16])
    """

    # Whether the class takes the place of another program's, with its arguments, and autocast's
    # dtype for the update, as its layers have when torch calls them.
    _of_autocast = False

    def __init__(
        self,
        c_z: int,
        c_hidden: int | None = None,
        direction: Direction = "outgoing",
        *,
        gate: Gate = "output",
        bias: bool = False,
        c_out: int | None = None,
        eps: float = 1e-5,
        precision: Precision | None = None,
        max_memory: int | None = None,
        backend: BackendName | None = None,
    ) -> None:
        super().__init__()
        name = "TriangleMultiplicativeUpdate"
        c_hidden = c_z if c_hidden is None else c_hidden
        c_out = c_z if c_out is None else c_out
        at_least_one(name, c_z=c_z, c_hidden=c_hidden, c_out=c_out, max_memory=max_memory)
        one_of(name, "direction", direction, DIRECTIONS)
        one_of(name, "gate", gate, GATES)
        one_of(name, "precision", precision, PRECISIONS)
        one_of(name, "backend", backend, (None, *(each.name for each in BACKENDS)))
        self.c_z = c_z
        self.c_hidden = c_hidden
        self.c_out = c_out
        self.direction = direction
        self.gate = gate
        self.eps = eps
        self.precision = precision
        self.max_memory = max_memory
        self.backend = backend
        self.norm_in = torch.nn.LayerNorm(c_z, eps)
        self.p_in = torch.nn.Linear(c_z, 2 * c_hidden, bias)
        self.g_in = torch.nn.Linear(c_z, 2 * c_hidden, bias)
        self.norm_out = torch.nn.LayerNorm(c_hidden, eps)
        self.p_out = torch.nn.Linear(c_hidden, c_out, bias)
        self.g_out = torch.nn.Linear(c_z, c_out if gate == "output" else c_hidden, bias)
        self.register_load_state_dict_pre_hook(self._rename)
        with torch.no_grad():
            lecun_normal(self.p_in.weight)
            for layer in (self.g_in, self.g_out, self.p_out):
                layer.weight.zero_()
            if bias:
                for layer in (self.p_in, self.p_out):
                    layer.bias.zero_()
                for layer in (self.g_in, self.g_out):
                    layer.bias.fill_(1.0)

    @staticmethod
    def _rename(
        module: Any,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Rename the layers of a state_dict to our names, in place."""
        renamed, gate = _renamed(state_dict, prefix, module.direction)
        if gate not in (None, module.gate):
            errors.append(
                f"TriangleMultiplicativeUpdate: gate is {module.gate!r}; it should be {gate!r} for "
                "a state_dict with these names"
            )
        for layer in ("p_in", "g_in", "p_out", "g_out"):
            lacks = f"{prefix}{layer}.bias" not in renamed and f"{prefix}{layer}.weight" in renamed
            if lacks and getattr(module, layer).bias is not None:
                # An error without `strict` too: a bias that isn't loaded is not zero.
                errors.append(
                    f"{type(module).__name__}: {prefix}{layer} has a bias, which the state_dict "
                    "lacks; the module should be made with bias=False"
                )
        state_dict.clear()
        state_dict.update(renamed)

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, torch.Tensor],
        direction: Direction = "outgoing",
        *,
        prefix: str = "",
        **options: Any,
    ) -> TriangleMultiplicativeUpdate:
        r"""Return a module with the parameters, sizes and dtype of a state_dict.

        Parameters
        ----------
        state_dict : mapping of str to tensor
            With the names of this class and Boltz, of OpenFold, or of the gpu-mode TriMul problem.
            The shape of the output's projection is (D, H).
        direction : {"outgoing", "incoming"}
            The edges of a triangle that the sum runs over; a state_dict doesn't say.
        prefix : str
            The prefix of these parameters' names; other names are ignored.
        **options
            Other arguments of the class. A `gate` that isn't given follows from names and shapes,
            or is "output" if they don't tell.

        Returns
        -------
        TriangleMultiplicativeUpdate
            On the device of the tensors, which are copied.

        Raises
        ------
        TypeError
            If the class is of ``fusedops.compat``, where classes have other programs' arguments.
        KeyError
            If the output's projection is missing.
        RuntimeError
            Raised by torch if other parameters are missing, too many, or of the wrong shape.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.nn import TriangleMultiplicativeUpdate
        >>> C, H = 4, 3
        >>> state = {"norm.weight": torch.ones(C), "norm.bias": torch.zeros(C)}
        >>> state |= {"to_out_norm.weight": torch.ones(H), "to_out_norm.bias": torch.zeros(H)}
        >>> for name in ("left_proj", "right_proj", "left_gate", "right_gate", "out_gate"):
        ...     state[f"{name}.weight"] = torch.randn(H, C)
        >>> state["to_out.weight"] = torch.randn(C, H)
        >>> TriangleMultiplicativeUpdate.from_state_dict(state).gate
        'hidden'
        """
        if cls._of_autocast:
            raise TypeError(
                f"{cls.__name__}: from_state_dict is given by fusedops.nn alone; a module of this "
                "class should be made with its own arguments, and then load the state_dict"
            )
        own = {n[len(prefix) :]: t for n, t in state_dict.items() if n.startswith(prefix)}
        own, gate = _renamed(own, "", direction)
        if "p_out.weight" not in own:
            raise KeyError(
                f"TriangleMultiplicativeUpdate: state_dict has no {prefix}p_out.weight, "
                f"{prefix}linear_z.weight or {prefix}to_out.weight; it should have one"
            )
        c_out, c_hidden = own["p_out.weight"].shape
        c_z = own["p_in.weight"].shape[1] if "p_in.weight" in own else c_out
        if gate is None:
            full = "g_out.weight" in own and own["g_out.weight"].shape[0] == c_out
            gate = "output" if full or "g_out.weight" not in own else "hidden"
        options = {"gate": gate, "bias": "p_in.bias" in own, "c_out": c_out, **options}
        with torch.device("meta"):
            module = cls(c_z, c_hidden, direction, **options)
        like = own["p_out.weight"]
        module = module.to_empty(device=like.device).to(like.dtype)
        module.load_state_dict(own)
        return module

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, use_kernels: bool = False
    ) -> torch.Tensor:
        r"""Return the update to add to a pair representation.

        .. math:: \mathrm{out}_{ij} = p\Bigl(\sum_k l_{ik} \odot r_{jk}\Bigr) \odot g_{ij}

        in short; see `fusedops.triangle_multiplicative_update`.

        Parameters
        ----------
        x : tensor (..., N, N, C), float32, float64, bfloat16 or float16
            The pair representation, with any number of batch dimensions, or none.
        mask : tensor that broadcasts to (..., N, N), bool, any integer or any float, optional
            Zero or false where an edge is missing.
        use_kernels
            Ignored, and accepted only because Boltz passes it: `backend` of the class chooses.

        Returns
        -------
        tensor (..., N, N, D)
            In the dtype of x.

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong dtype, shape or device; the message names it.
        BackendUnavailable
            If the module's backend can't serve the call.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.nn import TriangleMultiplicativeUpdate
        >>> update = TriangleMultiplicativeUpdate(8)
        >>> update(torch.randn(5, 5, 8)).shape
        torch.Size([5, 5, 8])
        """
        name = "TriangleMultiplicativeUpdate"
        check_pairs(name, self.c_z, "x", x=x, mask=mask)
        for layer in _OWN_LAYERS:
            each = self._modules[layer]
            if not (is_plain_norm(each, self.eps) if "norm" in layer else is_plain(each)):
                check_callable(name, layer, x, self.backend)
                return self._by_layers(x, mask)
        # Any, as type checkers don't know how many weights there are.
        op: Any = triangle_multiplicative_update
        options = {"max_memory": self.max_memory, "backend": self.backend}
        weights = _weights(self)
        precision = autocast_precision(x, weights) if self.precision is None else self.precision
        given = self.eps, precision, self.gate
        out = op(x, self.direction, mask, *weights, *given, **options)
        return out.to(_autocast_to(x)) if self._of_autocast else out

    def _by_layers(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the update by calls of the layers."""
        if (wider := wider_than(x, self.norm_in, self.p_in)) is not None:
            return self._by_layers(x.to(wider), mask).to(x.dtype)
        n = self.norm_in(x)
        sides = self.p_in(n) * self.g_in(n).sigmoid()
        if mask is not None:
            mask = expanded("TriangleMultiplicativeUpdate", mask, x.shape[:-1])
            sides = sides * mask.unsqueeze(-1).to(sides.dtype)
        edges = "...ikd,...jkd" if self.direction == "outgoing" else "...kid,...kjd"
        o = self.norm_out(torch.einsum(f"{edges}->...ijd", *sides.chunk(2, -1)))
        gate = self.g_out(n).sigmoid()
        out = self.p_out(o) * gate if self.gate == "output" else self.p_out(o * gate)
        return out.to(_autocast_to(x) if self._of_autocast else x.dtype)

    def extra_repr(self) -> str:
        """Return the text in ``repr`` that comes before the layers."""
        shown = (
            f"{self.c_z}, c_hidden={self.c_hidden}, direction={self.direction!r}, "
            f"gate={self.gate!r}"
        )
        return shown if self.backend is None else f"{shown}, backend={self.backend!r}"


def _shared_dropout(z: torch.Tensor, update: torch.Tensor, p: float, axis: int) -> torch.Tensor:
    """Return z + update; all channels along an axis of edges, of the update, are zero together."""
    if p == 0:
        return z + update
    shape = [*z.shape[:-1], 1]
    shape[axis] = 1
    # Drawn in the order, and from the numbers, that Boltz draws from.
    kept = (torch.rand(shape, device=z.device) >= p).to(update.dtype)
    return z + kept / (1 - p) * update


class PairBlock(torch.nn.Module):
    r"""A block of updates of a pair representation, without a sequence track.

    .. math:: z \mathrel{+}= d \odot \mathrm{update}_\mathrm{out}(z), \quad
              z \mathrel{+}= d \odot \mathrm{update}_\mathrm{in}(z)

    .. math:: z \mathrel{+}= d \odot \mathrm{attention}_\mathrm{start}(z), \quad
              z \mathrel{+}= d' \odot \mathrm{attention}_\mathrm{end}(z), \quad
              z \mathrel{+}= \mathrm{transition}(z)

    with dropout d that the edges of a row share, and d' that the edges of a column share.

    Parameters
    ----------
    token_z : int
        C, the channels of the pair representation.
    dropout : float
        The probability in training that all channels of a row, or of a column, are zero in an
        update.
    pairwise_head_width : int
        D, the channels of a head of attention.
    pairwise_num_heads : int
        H, the number of heads.
    attention : {None, "fusedops", "torch", "cuequivariance"}
        As of `TriangleAttention`.
    max_memory : int, optional
        The most bytes of intermediate results in each part of the block, as the parts define it.
    backend : str, optional
        The backend that must serve every triangle update.

    Attributes
    ----------
    token_z : int
        C.
    dropout : float
        As given.
    tri_mul_out, tri_mul_in : TriangleMultiplicativeUpdate
        The updates over outgoing and incoming edges.
    tri_att_start, tri_att_end : TriangleAttention
        Attention around starting and ending nodes.
    transition_z : PairTransition
        The transition.

    Raises
    ------
    ImportError, ValueError
        If an argument is wrong, or the attention isn't installed; the message names the argument.

    Notes
    -----
    The parameters have the names of Boltz's PairformerNoSeqLayer, whose checkpoints load.
    ``torch.export`` keeps N open for a batch of one; larger batches have the N of the example.

    References
    ----------
    Abramson et al., Nature 630 (2024) 493, supplementary algorithm 17, without the single
    representation. Names and dropout from Boltz 2.2, ``boltz/model/layers/pairformer.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.nn import PairBlock
    >>> block = PairBlock(16, pairwise_head_width=8, pairwise_num_heads=2)
    >>> block(torch.randn(2, 5, 5, 16), torch.ones(2, 5, 5, dtype=torch.bool)).shape
    torch.Size([2, 5, 5, 16])
    """

    def __init__(
        self,
        token_z: int = 128,
        dropout: float = 0.25,
        pairwise_head_width: int = 32,
        pairwise_num_heads: int = 4,
        *,
        attention: Attention | None = None,
        max_memory: int | None = None,
        backend: BackendName | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"PairBlock: dropout is {dropout}; it should be at least 0, below 1")
        self.token_z = token_z
        self.dropout = dropout

        def update(direction: Direction) -> TriangleMultiplicativeUpdate:
            return TriangleMultiplicativeUpdate(
                token_z, direction=direction, max_memory=max_memory, backend=backend
            )

        def attended(starting: bool) -> TriangleAttention:
            sizes = token_z, pairwise_head_width, pairwise_num_heads
            return TriangleAttention(*sizes, starting, attention=attention, max_memory=max_memory)

        self.tri_mul_out = update("outgoing")
        self.tri_mul_in = update("incoming")
        self.tri_att_start = attended(True)
        self.tri_att_end = attended(False)
        self.transition_z = PairTransition(token_z, max_memory=max_memory)

    def forward(
        self,
        z: torch.Tensor,
        pair_mask: torch.Tensor | None = None,
        chunk_size_tri_attn: int | None = None,
        use_kernels: bool = False,
    ) -> torch.Tensor:
        """Return the updated pair representation.

        Parameters
        ----------
        z : tensor (..., N, N, C), float32, float64, bfloat16 or float16
            The pair representation, with any number of batch dimensions, or none.
        pair_mask : tensor that broadcasts to (..., N, N), bool, any integer or any float, optional
            Zero or false where an edge is missing, else one.
        chunk_size_tri_attn : int, optional
            The most rows of attention to compute at one time.
        use_kernels
            Ignored, and accepted only because Boltz passes it.

        Returns
        -------
        tensor (..., N, N, C)
            A new tensor.

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
        >>> from fusedops.nn import PairBlock
        >>> block = PairBlock(8, pairwise_head_width=4, pairwise_num_heads=2).eval()
        >>> block(torch.randn(6, 6, 8), chunk_size_tri_attn=2).shape
        torch.Size([6, 6, 8])
        """
        check_pairs("PairBlock", self.token_z, "z", z=z, pair_mask=pair_mask)
        p = self.dropout if self.training else 0.0
        z = _shared_dropout(z, self.tri_mul_out(z, pair_mask), p, -2)
        z = _shared_dropout(z, self.tri_mul_in(z, pair_mask), p, -2)
        z = _shared_dropout(z, self.tri_att_start(z, pair_mask, chunk_size_tri_attn), p, -2)
        z = _shared_dropout(z, self.tri_att_end(z, pair_mask, chunk_size_tri_attn), p, -3)
        return z + self.transition_z(z)

    def extra_repr(self) -> str:
        """Return the text in ``repr`` that comes before the layers."""
        return f"{self.token_z}, dropout={self.dropout}"
