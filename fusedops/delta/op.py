"""Linear attention by the gated delta rule, and its decoding step.

The definition of value and gradient, in chunks of tokens, and the public ops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from fusedops._frame.arrays import ArrayT, cast, double, namespace, unit_solved, widened, zeros
from fusedops._frame.check import (
    accumulator,
    flag,
    holds,
    indices,
    no_overlap,
    real,
    refuse,
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
        scale: float | None


# The tokens of a chunk, solved for together: with more of them float32 would lose digits.
_CHUNK = 32
#: A gate below this forgets all, as its exponential is zero; in a sum it would swallow others.
LEAST_GATE = -746.0


def _transposed(x: Any) -> Any:
    return x.swapaxes(-1, -2)


def _sums_before(x: Any) -> Any:
    return x.cumsum(-1) - x


class _Chunk:
    r"""A chunk of tokens (B, HV, C, ...), and the state before it.

    With γ the sums of g within the chunk, and Γ_ts = exp(γ_t - γ_s) for s ≤ t, the values that
    tokens write solve u_t = β_t (v_t - exp(γ_t) Sᵀ k_t - Σ_{s<t} Γ_ts (k_t · k_s) u_s).
    """

    def __init__(self, scale: float, state: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> None:
        xp = namespace(q)
        self.q, self.k, self.beta, self.scale, self.state = q, k, beta, scale, state
        # In float64: sums of many gates have fewer digits than a difference of two of them.
        within = double(xp.where(g < LEAST_GATE, LEAST_GATE, g)).cumsum(-2)
        passed = cast(within - _transposed(within), g)
        # Infinity before the exponential, which would overflow for tokens to come.
        decays = xp.exp(xp.where(xp.tril(xp.ones_like(passed)) > 0, passed, -math.inf))
        #: Decays since the chunk began, until it ends, and from token to token: Γ, times the scale
        #: of queries, and without its diagonal.
        self.since = xp.exp(cast(within, g))
        self.rest = xp.exp(cast(within[..., -1:, :] - within, g))
        self.until, self.between = scale * decays, xp.tril(decays, -1)
        self.attention = q @ _transposed(k) * self.until
        self.overlap = k @ _transposed(k) * self.between
        self.system = beta * self.overlap
        self.known = self.since * (k @ state)
        self.u = self.solved(beta * (v - self.known))
        #: The values less what the state had for their keys.
        self.missed = v - self.known - self.overlap @ self.u

    def solved(self, right: Any, *, transposed: bool = False) -> Any:
        """Return x for which (1 + β overlap) x = right, or the transpose of the matrix times x."""
        system = _transposed(self.system) if transposed else self.system
        return unit_solved(system, right, upper=transposed)

    def out(self) -> Any:
        across = self.scale * self.since * (self.q @ self.state)
        return across + self.attention @ self.u

    def next_state(self) -> Any:
        return self.since[..., -1:, :] * self.state + _transposed(self.rest * self.k) @ self.u

    def pulled_back(self, do: Any, dnext: Any) -> tuple[Any, ...]:
        """Return the cotangents of the state, and of q, k, v, g and β."""
        q, k, u, state, scale = self.q, self.k, self.u, self.state, self.scale
        into = k @ dnext
        du = _transposed(self.attention) @ do + self.rest * into
        # The cotangent of the system's right side.
        w = self.solved(du, transposed=True)
        dv = self.beta * w
        dread, dmissed = do @ _transposed(u), -(dv @ _transposed(u))
        from_state = scale * self.since * (do @ _transposed(state))
        dattention, doverlap = dread * self.until, dmissed * self.between
        dq = from_state + dattention @ k
        dk = _transposed(dattention) @ q + (doverlap + _transposed(doverlap)) @ k
        dk = dk + self.rest * (u @ _transposed(dnext)) - self.since * (dv @ _transposed(state))
        dbeta = (w * self.missed).sum(-1)[..., None]
        # A gate is in the decays that begin before its token, and end with it or later.
        turned = dread * self.attention + dmissed * self.overlap
        across = (q * from_state).sum(-1) - (dv * self.known).sum(-1)
        left = (self.rest * into * u).sum(-1)
        whole = self.since[..., -1, :] * (state * dnext).sum((-1, -2))[..., None]
        xp = namespace(q)
        dg = xp.tril(_sums_before(turned)).sum(-2) + _sums_before(left) + whole
        dg = (dg + xp.flip(xp.flip(across, (-1,)).cumsum(-1), (-1,)))[..., None]
        dstate = self.since[..., -1:, :] * dnext + scale * _transposed(self.since * q) @ do
        dstate = dstate - _transposed(self.since * k) @ dv
        return dstate, dq, dk, dv, dg, dbeta


class _Span:
    """The sequences of one length in a call, by chunks of tokens."""

    def __init__(self, a: Any, batch: slice, tokens: slice, states: slice) -> None:
        q, k, v, g, beta = (x[batch, tokens] for x in a[:5])
        self.B, self.T, self.H, K = q.shape
        self.HV, V = v.shape[2:]
        self.size = min(_CHUNK, max(self.T, 1))
        self.count = -(-self.T // self.size)
        repeated = (self._repeated(x) for x in (q, k))
        arrays = (*repeated, v, g[..., None], beta[..., None])
        state = a.initial_state
        state = zeros(q, (self.B, self.HV, K, V)) if state is None else state[states]
        self.chunks = []
        for each in zip(*map(self.divided, arrays), strict=True):
            self.chunks.append(_Chunk(a.scale, state, *each))
            state = self.chunks[-1].next_state()
        self.final_state = state

    def _repeated(self, x: Any) -> Any:
        """Return the heads of q or k, each as often as heads of v share it."""
        shape = self.B, self.T, self.H, self.HV // self.H, x.shape[-1]
        x = namespace(x).broadcast_to(x[:, :, :, None], shape)
        return x.reshape(self.B, self.T, self.HV, x.shape[-1])

    def divided(self, x: Any) -> Any:
        """Return tokens (B, T, HV, ...) as chunks (N, B, HV, C, ...), the last padded."""
        more = zeros(x, (self.B, self.count * self.size - self.T, *x.shape[2:]))
        x = namespace(x).concatenate([x, more], 1)
        x = x.reshape(self.B, self.count, self.size, *x.shape[2:])
        return namespace(x).moveaxis(x, (1, 3), (0, 2))

    def joined(self, chunks: Sequence[Any], like: Any) -> Any:
        """Return chunks (B, HV, C, ...) as tokens, summed over heads that share one of `like`."""
        shape = self.B, self.T, *like.shape[2:]
        if not chunks:
            return zeros(like, shape)
        x = namespace(like).stack(list(chunks), 1).swapaxes(2, 3)
        x = x.reshape(self.B, self.count * self.size, self.HV, x.shape[-1])[:, : self.T]
        heads = like.shape[2], self.HV // like.shape[2]
        return x.reshape(self.B, self.T, *heads, x.shape[-1]).sum(3).reshape(shape)


def _formula(a: Any) -> tuple[Any, Any]:
    """Define the values that tokens read, and the state after every sequence."""
    given = widened(a)
    outs = [given.v[:, :0]]
    finals = [zeros(given.q, (0, given.v.shape[2], given.q.shape[3], given.v.shape[3]))]
    for span in (_Span(given, *slices) for slices in spans(given.q, a.sequences)):
        outs.append(span.joined([chunk.out() for chunk in span.chunks], given.v))
        finals.append(span.final_state)
    xp = namespace(given.q)
    out, final = xp.concatenate(outs, 1), xp.concatenate(finals, 0)
    return cast(out, a.q), cast(final, accumulator(a.q))


def _vjp_formula(a: Any) -> tuple[Any, ...]:
    """Return the cotangents of all arrays."""
    given = widened(a)
    arrays, found = given[:5], [[x[:, :0]] for x in given[:5]]
    state = given.initial_state
    dstates = None if state is None else [state[:0]]
    for slices in spans(given.q, a.sequences):
        span = _Span(given, *slices)
        batch, tokens, states = slices
        dnext = namespace(given.q).zeros_like(span.final_state)
        if given.dfinal_state is not None:
            dnext = given.dfinal_state[states]
        backwards = []
        douts = [*span.divided(given.dout[batch, tokens])]
        for chunk, do in zip(span.chunks[::-1], douts[::-1], strict=True):
            dnext, *gradients = chunk.pulled_back(do, dnext)
            backwards.append(gradients)
        for at, (like, all_spans) in enumerate(zip(arrays, found, strict=True)):
            all_spans.append(span.joined([each[at] for each in backwards[::-1]], like))
        if dstates is not None:
            dstates.append(dnext)
    xp = namespace(given.q)
    made = [xp.concatenate(all_spans, 1) for all_spans in found]
    made.append(None if dstates is None else xp.concatenate(dstates, 0))
    pairs = zip(made, a, strict=False)
    return tuple(None if dx is None else cast(dx, x) for dx, x in pairs)


def _pullback(a: Any, y: Any, dy: Any, wanted: Any) -> Any:
    *arrays, sequences, scale = a
    dout = dy.out
    if dout is None:
        dout = zeros(a.q, tuple(a.v.shape))
    return Call(delta_vjp, *arrays, dout, dy.final_state, sequences, scale, out=wanted)


_ARRAYS = {
    "q": "(B, T, H, K), H > 0, K > 0",
    "k": "(B, T, H, K)",
    "v": "(B, T, HV, V), HV > 0",
    "g": "(B, T, HV)",
    "beta": "(B, T, HV)",
    "initial_state": "(S, HV, K, V), optional",
}
_STATIC: dict[str, type] = {"sequences": Sequences, "scale": float}

delta_vjp = Primitive(
    "gated_delta_rule_vjp",
    family="delta",
    arrays={**_ARRAYS, "dout": "(B, T, HV, V)", "dfinal_state": "(S, HV, K, V), optional"},
    static=_STATIC,
    sizes={"S": num_sequences},
    outputs={f"d{name}": f"like {name}" for name in _ARRAYS},
    formula=_vjp_formula,
)
delta = Primitive(
    "gated_delta_rule",
    family="delta",
    arrays=_ARRAYS,
    static=_STATIC,
    sizes={"S": num_sequences},
    outputs={"out": "(B, T, HV, V) as q", "final_state": "(S, HV, K, V) summed of q"},
    formula=_formula,
    pullback=_pullback,
)


def _step_formula(a: Any) -> tuple[Any]:
    """Update the states of all sequences in place, and return the values that tokens read."""
    rows: Any = slice(None)
    where = rows
    if a.slots is not None:
        rows = (a.slots >= 0) & (a.slots < len(a.state))
        where = a.slots[rows]
    one = a.q.ndim == 3
    tokens = [x[rows][:, None] if one else x[rows] for x in a[:5]]
    state = a.state[where]
    out, final = _formula(delta.Arguments(*tokens, state, None, a.scale))
    a.state[where] = cast(final, a.state)
    whole = zeros(a.q, tuple(a.v.shape))
    whole[rows] = out[:, 0] if one else out
    return (whole,)


delta_step = Primitive(
    "gated_delta_rule_step",
    family="delta",
    arrays={
        "q": "(B, H, K) or (B, T, H, K), H > 0, K > 0",
        "k": "(B, H, K) or (B, T, H, K)",
        "v": "(B, HV, V) or (B, T, HV, V), HV > 0",
        "g": "(B, HV) or (B, T, HV)",
        "beta": "(B, HV) or (B, T, HV)",
        "state": "(N, HV, K, V)",
    },
    constants={"slots": "(B), integers, optional"},
    static={"scale": float},
    sizes={
        "N": lambda a: (a.q if a.slots is None else a.state).shape[0],
        "T": lambda a: a.q.shape[1] if a.q.ndim == 4 else 1,
    },
    outputs={"out": "like v as q"},
    formula=_step_formula,
    mutates=("state",),
    check=lambda a: _check_step(a),
)


class _Rule(Protocol):
    @overload
    def __call__(
        self,
        q: ArrayT,
        k: ArrayT,
        v: ArrayT,
        g: ArrayT,
        beta: ArrayT,
        *,
        output_final_state: Literal[False] = ...,
        **options: Unpack[_Options[ArrayT]],
    ) -> ArrayT: ...
    @overload
    def __call__(
        self,
        q: ArrayT,
        k: ArrayT,
        v: ArrayT,
        g: ArrayT,
        beta: ArrayT,
        *,
        output_final_state: Literal[True],
        **options: Unpack[_Options[ArrayT]],
    ) -> tuple[ArrayT, ArrayT]: ...
    @overload
    def __call__(
        self,
        q: ArrayT,
        k: ArrayT,
        v: ArrayT,
        g: ArrayT,
        beta: ArrayT,
        *,
        output_final_state: bool,
        **options: Unpack[_Options[ArrayT]],
    ) -> Any: ...


def _scale(name: str, scale: Any, q: Any, v: Any) -> float:
    """Return the factor of queries. Raises unless as many heads of v share each head of q."""
    heads = q.shape[-2]
    if v.shape[-2] % heads:
        was, should = f"has {v.shape[-2]} heads", f"have a multiple of {heads}, the heads of q"
        refuse(ValueError, name, "v", was, should)
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    scale = real(name, "scale", scale)
    if not math.isfinite(scale):
        refuse(ValueError, name, "scale", f"is {scale}", "be a finite number")
    return scale


@op(delta, overloads=_Rule)  # type: ignore[type-abstract]
def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    out: Any = None,
    backend: BackendName | None = None,
) -> Any:
    r"""Return linear attention whose state forgets by gates and is corrected by the delta rule.

    .. math:: S_t = e^{g_t} S_{t-1} + k_t u_t^T, \quad
              u_t = \beta_t \left(v_t - e^{g_t} S_{t-1}^T k_t\right), \quad
              \mathrm{out}_t = \mathrm{scale} \cdot S_t^T q_t

    for every head, with the matrix S (K, V) as state. A token replaces a share :math:`\beta_t` of
    the value that the state has for its key by its own value.

    Parameters
    ----------
    q : array or tensor (B, T, H, K), float32 or float64; in torch bfloat16 and float16 too
        The queries, dimensionless like all arrays here; H > 0 and K > 0.
    k : array or tensor (B, T, H, K)
        The keys. The rule is made for keys of length 1; with longer ones states may grow.
    v : array or tensor (B, T, HV, V)
        The values. Heads h r to h r + r - 1 share head h of q and k, with r = HV / H an integer.
    g : array or tensor (B, T, HV)
        The logarithms of the gates: 0 forgets nothing. They should be finite.
    beta : array or tensor (B, T, HV)
        The strengths of writing, in general from 0 to 1, or to 2.
    scale : float, optional
        The factor of the queries; by default :math:`K^{-1/2}`.
    initial_state : array or tensor (B, HV, K, V), or (S, HV, K, V) for packed sequences, optional
        The states before the first tokens; by default zeros.
    output_final_state : bool
        Whether to return the states after the last tokens too.
    cu_seqlens : Sequences, or array or tensor (S + 1,), int32 or int64, optional
        Where each of S packed sequences begins, and where the last one ends, as in `dynamic_conv`;
        B must be 1.

    Returns
    -------
    out : array or tensor (B, T, HV, V)
        In the dtype of q; accumulated in float32 or better.
    final_state : array or tensor (B, HV, K, V) or (S, HV, K, V)
        With `output_final_state` only: the `initial_state` of the tokens that follow. In the dtype
        of q, in float32 if that has 16 bits.

    Notes
    -----
    All arrays have gradients, of any order in torch. The backward computes the states again, and
    keeps none of them. ``gated_delta_rule.vjp`` returns gradients for the arrays that were given,
    in the order q, k, v, g, beta, initial_state. The CPU kernels take one token after the other, or
    two at once, with a part of the state in a near cache, and compute 16-bit floats in float32.
    The GPU kernels take chunks of up to 64 tokens by products of matrices; few tokens go one by
    one. Sums are of float32 or better. Factors of these products are rounded to bfloat16 for
    arrays of it; for float16 they have the digits of TF32, as many as float16 has. The definition,
    which also serves derivatives from the second on, takes chunks of 32 tokens.

    References
    ----------
    Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
    arXiv:2412.06464 (2024); names and shapes are those of ``chunk_gated_delta_rule`` in
    flash-linear-attention.

    Examples
    --------
    The second token has the key of the first, whose value it replaces by half:

    >>> import numpy as np, fusedops
    >>> q = k = np.ones((1, 2, 1, 1))
    >>> v = np.array([2.0, 4.0]).reshape(1, 2, 1, 1)
    >>> g, beta = np.zeros((1, 2, 1)), np.array([[[1.0], [0.5]]])
    >>> out, state = fusedops.gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    >>> out.ravel().tolist(), state.tolist()
    ([2.0, 3.0], [[[[3.0]]]])
    """
    name = "gated_delta_rule"
    sequences = read_sequences(name, cu_seqlens, "q", q)
    flag(name, "output_final_state", output_final_state)
    return to_run(
        (q, k, v, g, beta, initial_state, sequences, _scale(name, scale, q, v)),
        ("out", "final_state") if output_final_state else "out",
    )


@op(delta_step)
def gated_delta_rule_step(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    g: ArrayT,
    beta: ArrayT,
    state: ArrayT,
    *,
    scale: float | None = None,
    slots: ArrayT | None = None,
    out: ArrayT | None = None,
    backend: BackendName | None = None,
) -> ArrayT:
    r"""Write tokens of every sequence into its state, in place, and return what they read.

    .. math:: S \leftarrow e^{g} S + k u^T, \quad
              u = \beta \left(v - e^{g} S^T k\right), \quad
              \mathrm{out} = \mathrm{scale} \cdot S^T q

    for every head, for one token after the other.

    Parameters
    ----------
    q : array or tensor (B, H, K) or (B, T, H, K), float32 or float64; in torch 16-bit floats too
        The query of a token of every sequence, or of several; H > 0 and K > 0.
    k : array or tensor of the shape of q
        The keys.
    v : array or tensor (B, HV, V) or (B, T, HV, V)
        The values; HV is a multiple of H, as in `gated_delta_rule`.
    g : array or tensor (B, HV) or (B, T, HV)
        The logarithms of the gates.
    beta : array or tensor of the shape of g
        The strengths of writing.
    state : array or tensor (B, HV, K, V), or (N, HV, K, V) with `slots`
        The states. Updated in place, unless an error is raised; any strides. Its dtype must hold
        the values of q; float32 serves 16-bit floats well.
    scale : float, optional
        The factor of the queries; by default :math:`K^{-1/2}`.
    slots : array or tensor (B,), int32 or int64, optional
        The row of `state` that each sequence has: no two the same. A negative one is padding, for
        which out is zero and no state changes. On a GPU, where no value is read, so is a slot
        from N on; on the CPU that is an error.

    Returns
    -------
    array or tensor of the shape of v
        In the dtype of q; accumulated in float32 or better.

    Raises
    ------
    RuntimeError
        If an argument requires grad: a step that works in place has no gradient. Its functional
        form, ``gated_delta_rule(..., initial_state=state, output_final_state=True)``, has
        derivatives and returns the new state.

    References
    ----------
    See `gated_delta_rule`. Slots are the state indices of vLLM's and SGLang's decoding kernels.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> state, one = np.array([[[[2.0]]]]), np.ones((1, 1, 1))
    >>> g, beta = np.zeros((1, 1)), np.array([[0.5]])
    >>> fusedops.gated_delta_rule_step(one, one, 4 * one, g, beta, state).tolist()
    [[[3.0]]]
    >>> state.tolist()
    [[[[3.0]]]]
    """
    name = "gated_delta_rule_step"
    shown = {"k": (k, q.ndim), "v": (v, q.ndim), "g": (g, q.ndim - 1), "beta": (beta, q.ndim - 1)}
    for argument, (x, rank) in shown.items():
        if x.ndim != rank:
            should = f"have {rank} dimensions, since q has {q.ndim}"
            refuse(ValueError, name, argument, f"has shape {tuple(x.shape)}", should)
    holds(name, "state", state, q, "q")
    no_overlap(name, "state", state)
    if slots is not None:
        indices(name, "slots", slots)
    return to_run((q, k, v, g, beta, state, slots, _scale(name, scale, q, v)), "out")


def _check_step(a: Any) -> Any:
    """Raise if a state has two sequences or none, or its update would change another argument."""
    name = "gated_delta_rule_step"
    again = may_update(name, a, ("q", "k", "v", "g", "beta", "slots"))
    slots = readable(a.slots)
    check_slots(name, "slots", slots, a.state.shape[0])
    return again if slots is None else None
