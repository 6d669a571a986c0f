"""Causal convolution with kernels that a linear layer makes for every token, without storing them.

The definition of value and gradient, by those of `dynamic_conv`; the rule for all further
derivatives; and the public op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from fusedops._frame.arrays import ArrayT, added, cast, namespace, widened
from fusedops._frame.check import flag, one_of, promoted
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.registry import BackendName
from fusedops.conv import ACTIVATIONS, Activation, Sequences
from fusedops.conv.op import conv, conv_vjp
from fusedops.conv.plan import num_sequences, read_sequences

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fusedops.conv.plan import Options

    class _Options(Options[ArrayT], total=False):
        conv_bias: ArrayT | None
        activation: Activation | None


def kernels_of(a: Any) -> Any:
    """Return the kernels (B, T, D, W) that a call's arrays make, in their dtype."""
    kernels = a.hidden @ a.weight.swapaxes(0, 1)
    if a.bias is not None:
        kernels = kernels + a.bias
    return kernels.reshape(*a.x.shape, a.weight.shape[0] // a.x.shape[2])


def convolution_of(a: Any, kernels: Any) -> Any:
    """Return the arguments of `dynamic_conv`, or of its gradient, with the kernels stored."""
    taken = a.x, kernels, a.initial_state, a.conv_bias
    if "dout" not in a._fields:
        return conv.Arguments(*taken, None, a.sequences, a.activation)
    return conv_vjp.Arguments(*taken, a.dout, a.dfinal_state, a.sequences, a.activation)


def pull_to_generator(a: Any, dkernels: Any) -> tuple[Any, Any, Any]:
    """Return the cotangents of hidden, weight and bias for the cotangent of the kernels."""
    tokens = a.x.shape[0] * a.x.shape[1]
    rows = dkernels.reshape(tokens, a.weight.shape[0])
    hidden = a.hidden.reshape(tokens, a.weight.shape[1])
    dbias = None if a.bias is None else rows.sum(0)
    return (rows @ a.weight).reshape(a.hidden.shape), rows.swapaxes(0, 1) @ hidden, dbias


def _formula(a: Any) -> tuple[Any, Any]:
    """Define the convolution and the last W inputs of every sequence."""
    arrays = widened(a)
    out, final = conv.formula(convolution_of(arrays, kernels_of(arrays)))
    return cast(out, a.x), cast(final, promoted((a.x, a.initial_state)))


def _vjp_formula(a: Any) -> tuple[Any, ...]:
    """Return the cotangents of all arrays."""
    arrays = widened(a)
    given = convolution_of(arrays, kernels_of(arrays))
    dx, dkernels, dstate, dconv_bias = conv_vjp.formula(given)
    found = dx, *pull_to_generator(arrays, dkernels), dstate, dconv_bias
    return tuple(
        None if gradient is None else cast(gradient, like)
        for gradient, like in zip(found, a, strict=False)
    )


def _pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    *arrays, sequences, activation = a
    dout = dy.out
    if dout is None:
        dout = namespace(a.x).zeros_like(a.x)
    return Call(generated_vjp, *arrays, dout, dy.final_state, sequences, activation, out=wanted)


def _vjp_pullback(a: Any, y: Any, ddy: Any, wanted: Any) -> tuple[Any, ...]:
    """Pull back through the gradient, by that of `dynamic_conv` with the kernels stored.

    With dk the cotangent of the kernels k = h Vᵀ + b, the gradient's products are dh = dk V,
    dV = dkᵀ h and db = Σ dk. Cotangents (ddh, ddV, ddb) of these give dk the cotangent
    ddk = ddh Vᵀ + h ddVᵀ + ddb, and (h, V) the cotangents (dk ddV, dkᵀ ddh). The gradient of the
    convolution gives k a cotangent for ddk, which goes to h, V and b as any other does.
    """
    arrays = widened(a)
    kernels = kernels_of(arrays)
    # A product takes factors of one dtype.
    ddx, ddhidden, ddweight, ddbias, ddstate, ddconv_bias = (
        given if given is None else cast(given, kernels) for given in ddy
    )
    given = convolution_of(arrays, kernels)
    like = namespace(kernels).zeros_like
    ddk = None
    if ddhidden is not None:
        ddk = ddhidden @ arrays.weight.swapaxes(0, 1)
    if ddweight is not None:
        ddk = added(ddk, arrays.hidden @ ddweight.swapaxes(0, 1))
    if ddbias is not None:
        ddk = added(ddk, like(kernels).reshape(*a.x.shape[:2], len(a.weight)) + ddbias)
    if ddk is not None:
        ddk = ddk.reshape(kernels.shape)
    *_, dinitial_state, dconv_bias, ddout, dfinal_state = wanted
    wants_kernels = True if wanted.hidden or wanted.weight or wanted.bias else None
    slots = wanted.x, wants_kernels, dinitial_state, dconv_bias, ddout, dfinal_state
    ddconv = conv_vjp.Outputs(ddx, ddk, ddstate, ddconv_bias)
    dx, dk, *rest = conv_vjp.pulled_back(given, None, ddconv, conv_vjp.Arrays(*slots))
    dgenerator: Any = (None, None, None)
    if dk is not None:
        dgenerator = pull_to_generator(arrays, dk)
    if ddhidden is not None or ddweight is not None:
        (_, direct, _, _) = conv_vjp(*given, out=(None, True, None, None))
        tangent = arrays._replace(
            hidden=like(arrays.hidden) if ddhidden is None else ddhidden,
            weight=like(arrays.weight) if ddweight is None else ddweight,
            bias=None,
        )
        pairs = zip(dgenerator, pull_to_generator(tangent, direct), strict=True)
        dgenerator = [added(one, two) for one, two in pairs]
    return tuple(
        None if cotangent is None else cast(cotangent, array)
        for cotangent, array in zip((dx, *dgenerator, *rest), a, strict=False)
    )


_ARRAYS = {
    "x": "(B, T, D), D > 0",
    "hidden": "(B, T, H)",
    "weight": "(D * W, H), W > 0",
    "bias": "(D * W), optional",
    "initial_state": "(S, D, W), optional",
    "conv_bias": "(D), optional",
}
_STATIC: dict[str, type] = {"sequences": Sequences, "activation": str}

generated_vjp = Primitive(
    "dynamic_conv_generated_vjp",
    family="generated",
    arrays={**_ARRAYS, "dout": "(B, T, D)", "dfinal_state": "(S, D, W), optional"},
    static=_STATIC,
    sizes={"S": num_sequences},
    outputs={f"d{name}": f"like {name}" for name in _ARRAYS},
    formula=_vjp_formula,
    pullback=_vjp_pullback,
)
generated = Primitive(
    "dynamic_conv_generated",
    family="generated",
    arrays=_ARRAYS,
    static=_STATIC,
    sizes={"S": num_sequences},
    outputs={
        "out": "(B, T, D) as x",
        "final_state": "(S, D, W) of x, initial_state",
    },
    formula=_formula,
    pullback=_pullback,
)


class _Generated(Protocol):
    @overload
    def __call__(
        self,
        x: ArrayT,
        hidden: ArrayT,
        weight: ArrayT,
        bias: ArrayT | None = ...,
        *,
        output_final_state: Literal[False] = ...,
        **options: Unpack[_Options[ArrayT]],
    ) -> ArrayT: ...
    @overload
    def __call__(
        self,
        x: ArrayT,
        hidden: ArrayT,
        weight: ArrayT,
        bias: ArrayT | None = ...,
        *,
        output_final_state: Literal[True],
        **options: Unpack[_Options[ArrayT]],
    ) -> tuple[ArrayT, ArrayT]: ...
    @overload
    def __call__(
        self,
        x: ArrayT,
        hidden: ArrayT,
        weight: ArrayT,
        bias: ArrayT | None = ...,
        *,
        output_final_state: bool,
        **options: Unpack[_Options[ArrayT]],
    ) -> Any: ...


@op(generated, overloads=_Generated)  # type: ignore[type-abstract]
def dynamic_conv_generated(
    x: Any,
    hidden: Any,
    weight: Any,
    bias: Any = None,
    *,
    conv_bias: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    activation: Activation | None = None,
    out: Any = None,
    backend: BackendName | None = None,
) -> Any:
    r"""Return the causal convolution of tokens with kernels that a linear layer makes from others.

    .. math:: \mathrm{out}_{btd} = a\Bigl(\sum_{w=0}^{W-1} k_{btdw} \, x_{b,\,t+w-W+1,\,d}
              + \mathrm{conv\_bias}_d\Bigr), \quad
              k_{btdw} = \sum_h V_{dW+w,\,h} \, \mathrm{hidden}_{bth} + \beta_{dW+w}

    with the activation a, the weight V and the bias β. Before the first token x stands for the
    inputs in `initial_state`, or zeros. The kernels, W times as large as x, are made tile by tile,
    and again in the backward, instead of being stored; Notes name the exceptions.

    Parameters
    ----------
    x : array or tensor (B, T, D), float32 or float64; in torch bfloat16 and float16 too
        The tokens, of at least one channel; dimensionless like all arrays here.
    hidden : array or tensor (B, T, H)
        The inputs of the linear layer.
    weight : array or tensor (D · W, H)
        V. Rows d W to d W + W - 1 make the taps of channel d, the token's own tap last. Any W ≥ 1.
    bias : array or tensor (D · W,), optional
        β, the bias of the linear layer.
    conv_bias : array or tensor (D,), optional
        Added before the activation.
    initial_state : array or tensor (B, D, W), or (S, D, W) for packed sequences, optional
        The W inputs before the first token, the latest last.
    output_final_state : bool
        Whether to return the last W inputs too.
    cu_seqlens : Sequences, or array or tensor (S + 1,), int32 or int64, optional
        Where each of S packed sequences begins, and where the last one ends, as in `dynamic_conv`;
        B must be 1.
    activation : {None, "silu", "swish"}
        "silu" and "swish" both name x · sigmoid(x).

    Returns
    -------
    out : array or tensor (B, T, D)
        In the dtype of x; accumulated in float32 or better.
    final_state : array or tensor (B, D, W) or (S, D, W)
        With `output_final_state` only: the `initial_state` of the tokens that follow. In the dtype
        to which x and `initial_state` promote.

    Notes
    -----
    All arrays have gradients of any order, and no sum of a gradient depends on the order in which
    threads or programs end. ``dynamic_conv_generated.vjp`` returns gradients for the arrays that
    were given, in the order x, hidden, weight, bias, initial_state, conv_bias. Derivatives from the
    second on store kernels, as do float64 and W > 16 on a GPU. On a GPU the backward stores the
    kernels' cotangents in up to two parts, one at a time. The layer multiplies in the dtype to
    which hidden and weight promote, in float32 without TF32, and its result is not rounded to 16
    bits before it is multiplied with x. Autocast changes no dtypes.

    References
    ----------
    Gu, Hu, et al., "Jet-Nemotron: Efficient Language Model with Post Neural Architecture Search",
    arXiv:2508.15884 (2025), whose generator ends in this layer.

    Examples
    --------
    The layer gives every token the taps 1 and h:

    >>> import numpy as np, fusedops
    >>> x = np.array([1.0, 2, 4, 8]).reshape(1, 4, 1)
    >>> hidden = np.array([1.0, 2, 3, 4]).reshape(1, 4, 1)
    >>> weight, bias = np.array([[0.0], [1.0]]), np.array([1.0, 0.0])
    >>> fusedops.dynamic_conv_generated(x, hidden, weight, bias).ravel().tolist()
    [1.0, 5.0, 14.0, 36.0]
    >>> kernels = (hidden @ weight.T + bias).reshape(1, 4, 1, 2)
    >>> fusedops.dynamic_conv(x, kernels).ravel().tolist()
    [1.0, 5.0, 14.0, 36.0]
    """
    name = "dynamic_conv_generated"
    sequences = read_sequences(name, cu_seqlens, "x", x)
    one_of(name, "activation", activation, ACTIVATIONS)
    flag(name, "output_final_state", output_final_state)
    arrays = x, hidden, weight, bias, initial_state, conv_bias
    return to_run(
        (*arrays, sequences, "none" if activation is None else "silu"),
        ("out", "final_state") if output_final_state else "out",
    )
