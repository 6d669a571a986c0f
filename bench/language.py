"""Steps of language models: Jet-Nemotron's convolution layer and block, and a server's loop."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import fusedops
from bench.peers import (
    EMPTY,
    JET,
    Unsuited,
    empty_function,
    file_module,
    peer,
)
from bench.steps import Case, Chain, Part, Step, dtype_on, result
from bench.timing import GRAPHS, TORCH, graphed
from fusedops._catalogue import BOTH, FORWARD, Steps
from fusedops._frame.registry import BackendName


def jet(device: str) -> Step:
    """Jet-Nemotron's convolution layer alone, generator to SiLU: training, prefill and decoding."""
    if device == "cpu":
        cases = [
            Case("training", partial(_layer, 1, 1024, 1536), quick=True),
            Case("prefill", partial(_layer, 1, 32_768, 1536, False)),
        ]
    else:
        cases = [
            Case("training", partial(_layer, 1, 4096, 1536), quick=True),
            *(Case("training", partial(_layer, 8, 4096, D)) for D in (1536, 3072)),
            *(Case("prefill", partial(_layer, 1, 32_768, D, False)) for D in (1536, 3072)),
        ]
    decoding = [Case("decoding", partial(_layer, B, 1, 1536), quick=B == 64) for B in (1, 64, 256)]
    return Step(
        "jet",
        fusedops.dynamic_conv_generated,
        (*cases, *decoding),
        (
            Case("training", partial(_layer, 2, 1100, 512)),
            # So many tokens that no device stores the kernels.
            Case("prefill", partial(_layer, 1, 4200, 512, False)),
            Case("decoding", partial(_layer, 8, 1, 512)),
        ),
        # Relative to the largest element of the result or of each gradient; in 16 bits hidden
        # units are rounded.
        1e-5 if device == "cpu" else 0.06,
        lambda problem: result(_jet_by(_in_torch, problem, "cpu", "float64").steps()),
        _jet_by_module,
        device,
        dtype_on(device),
        needs=("torch",),
        hows=(TORCH,),
    )


def jet_block(device: str, dtype: str | None = None) -> Step:
    """Jet-Nemotron's block, projection to projection: training, prefill and decoding."""
    dtype = dtype or dtype_on(device)
    block = partial(_block, dtype=dtype)
    if device == "cpu":
        sizes = [("training", 1, 256, True), ("prefill", 1, 4096, False)]
    else:
        sizes = [*(("training", B, 4096, True) for B in (1, 8)), ("prefill", 1, 32_768, False)]
    sizes += [("decoding", B, 1, False) for B in ((1, 64) if device == "cpu" else (1, 64, 256))]
    return Step(
        "jet_block",
        fusedops.gated_delta_rule,
        tuple(
            Case(
                name,
                partial(block, B, T, 12, 1536, training),
                quick=B == 1 and (training or T == 1),
            )
            for name, B, T, training in sizes
        ),
        tuple(
            Case(name, partial(block, B, T, 12, 256, training))
            for name, B, T, training in (
                # fla's kernels depend on the number of heads; training is refused below 65 tokens.
                ("training", 1, 70, True),
                ("prefill", 1, 70, False),
                ("decoding", 2, 1, False),
            )
        ),
        # Relative to the largest element of the result or of each gradient; in 16 bits every
        # intermediate result is rounded.
        1e-5 if dtype == "float32" else 0.1,
        lambda problem: result(_block_by(_formula_of_block, problem, "cpu", "float64").steps()),
        _block_by_module,
        device,
        dtype,
        needs=("torch",),
        hows=(TORCH,),
    )


def jet_block_float32(device: str) -> Step:
    """The same in float32, the dtype of a block that asks for none."""
    return replace(jet_block(device, "float32"), name="jet_block_float32")


def serving(device: str) -> Step:
    """A server's loop around a convolution of paged states, as in docs/language-models.md."""
    batches, D, chunk = ((16,), 1536, 128) if device == "cpu" else ((16, 128), 3072, 512)
    return Step(
        "serving",
        fusedops.dynamic_conv_step,
        tuple(Case("requests", partial(_requests, B, D, chunk), quick=B == 16) for B in batches),
        (Case("requests", partial(_requests, 3, 64, 16)),),
        # Relative to the largest element.
        1e-5 if device == "cpu" else 0.02,
        lambda problem: problem.truth(),
        _served,
        device,
        dtype_on(device),
        needs=("torch",),
        hows=(TORCH, GRAPHS),
        has_shares=False,
    )


def _chain(name: str, x: Any, function: Callable[[Any], Any], parameters: Any) -> Chain:
    """Return the step of a layer, a function of tokens: in training, with gradients of a loss."""
    layer = Part(name, ("x",), function, tuple(parameters))
    if not any(parameter.requires_grad for parameter in layer.parameters):
        return Chain({"x": x}, (layer,), has_gradients=False)
    return Chain({"x": x}, (layer, Part("target", (name,), _half_mean_square)))


def _half_mean_square(y: Any) -> Any:
    return 0.5 * (y.float() if y.itemsize == 2 else y).square().mean()


#: The most tokens of a sequence for which a loop over chunks of 64 is compiled.
MOST_COMPILED = 4096

KEYS, VALUES = 96, 256
"""Channels of a head in Jet-Nemotron's model of 2 billion parameters."""

#: The files of Jet-Nemotron's block, as a checkout has them.
BLOCK = f"{JET}/jet_block.py"
#: The steps of a block, which have the same peers.
JET_BLOCK = "jet_block", "jet_block_float32"


@dataclass(frozen=True)
class Layer:
    """Tokens, and a layer with Jet-Nemotron's names: a convolution alone, or a block around it.

    The convolution has D channels, four taps and D / 8 hidden units. A block has projections and a
    gated delta rule, too.

    Parameters
    ----------
    x : tensor (B, T, C), float64
    parameters : dict
        By Jet-Nemotron's names.
    training : bool
        Whether gradients are wanted.
    states : tuple of tensors
        For a token that is decoded, the last inputs (B, D, 4) of the convolution, and the matrices
        (B, heads, 96, 256) of a block's delta rule.
    heads : int
        Of a block, each with 96 channels of queries and keys, and 256 of values: D = 256 heads.
    dtype : str
        Of a block that is timed.
    """

    x: Any
    parameters: dict[str, Any]
    training: bool
    states: tuple[Any, ...] = ()
    heads: int = 0
    dtype: str = "float32"

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that a table shows."""
        B, T, C = self.x.shape
        channels = {"C": C, "D": VALUES * self.heads} if self.heads else {"D": C}
        return {"tokens": B * T, "B": B, **channels}

    def to(self, device: str, dtype: str) -> Layer:
        """Return the problem on a device and in a dtype, with parameters that have gradients.

        States are copies, which a program may update. The matrices of the delta rule stay in
        float32 at least, as fla keeps them.
        """
        import torch

        kind = getattr(torch, dtype)

        def cast(x: Any) -> Any:
            wide = torch.promote_types(kind, torch.float32) if x.ndim == 4 else kind
            return x.to(device, wide, copy=True)

        parameters = {
            name: cast(x).requires_grad_(self.training) for name, x in self.parameters.items()
        }
        states = tuple(map(cast, self.states))
        return replace(self, x=cast(self.x), parameters=parameters, states=states)


def _drawn(seed: int) -> Callable[..., Any]:
    """Return a function that draws normal numbers of a shape."""
    import torch

    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return torch.randn(shape, generator=rng, dtype=torch.float64) * scale

    return normal


def _generator(normal: Callable[..., Any], D: int, C: int) -> dict[str, Any]:
    """Return the parameters of a convolution's generator of kernels."""
    return {
        "w1.weight": normal(D // 8, C, scale=C**-0.5),
        "w2.weight": normal(4 * D, D // 8, scale=(D // 4) ** -0.5),
        "w2.bias": normal(4 * D, scale=0.5),
    }


def _layer(B: int, T: int, D: int, training: bool = True) -> Layer:
    normal = _drawn(T)
    states = (normal(B, D, 4),) if T == 1 else ()
    return Layer(normal(B, T, D), _generator(normal, D, D), training and T > 1, states)


def _jet_by_module(
    problem: Layer, how: str, device: str, dtype: str, backend: BackendName | None
) -> Chain:
    """Return the step by our module."""
    import torch

    from fusedops.nn import DynamicShortConvolution

    given = problem.to(device, dtype)
    (cache,) = given.states or (None,)
    # The step's backends are those of the fused op, which decoding doesn't call.
    layer = DynamicShortConvolution(given.x.shape[-1], 4, generator_reduction=8, backend=backend)
    layer = layer.to(given.x).requires_grad_(problem.training)
    with torch.no_grad():
        layer.kernel_generator.load_state_dict(given.parameters)

    def convolve(x: Any) -> Any:
        return layer(x, cache=cache)[0]

    return _chain("layer", given.x, convolve, layer.parameters())


def _jet_by(convolve: Callable[..., Any], problem: Layer, device: str, dtype: str) -> Chain:
    """Return the step by torch's layers, which store the kernels, and a convolution with SiLU.

    The convolution is a function of x, kernels (B, T, D, 4) and a cache or None, which it updates.
    """
    from torch.nn import functional as F

    given = problem.to(device, dtype)
    w1, w2, bias = given.parameters.values()
    (cache,) = given.states or (None,)

    def layer(x: Any) -> Any:
        kernels = F.linear(F.silu(F.linear(x, w1)), w2, bias).unflatten(-1, (-1, 4))
        return convolve(x, kernels, cache)

    return _chain("layer", given.x, layer, (w1, w2, bias))


def _in_torch(x: Any, kernels: Any, cache: Any) -> Any:
    """Return Jet-Nemotron's convolution in plain torch, as it runs without kernels."""
    import torch
    from torch.nn import functional as F

    if cache is not None:
        cache.copy_(torch.cat([cache[..., 1:], x.mT], -1))
        return F.silu((cache[:, None] * kernels).sum(-1))
    return F.silu((F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1) * kernels).sum(-1))


def _stored(x: Any, kernels: Any, cache: Any) -> Any:
    if cache is not None:
        return fusedops.dynamic_conv_step(x, cache, kernels[:, 0], activation="silu")
    return fusedops.dynamic_conv(x, kernels, activation="silu")


@peer("torch eager", "jet")
def jet_in_torch(problem: Layer, device: str) -> Steps:
    """Jet-Nemotron's formulas, as it runs them without kernels."""
    return _jet_by(_in_torch, problem, device, dtype_on(device)).steps()


@peer("kernels stored", "jet")
def jet_stored(problem: Layer, device: str) -> Steps:
    """Kernels from torch's layers, and our convolution with these."""
    return _jet_by(_stored, problem, device, dtype_on(device)).steps()


@peer("torch.compile", "jet", quick=False)
def jet_compiled(problem: Layer, device: str) -> Steps:
    """Jet-Nemotron's formulas, compiled as one function."""
    import torch

    chain = _jet_by(_in_torch, problem, device, dtype_on(device))
    layer, *rest = chain.parts
    # Or torch runs it uncompiled, after a few sizes.
    torch.compiler.reset()
    layer = replace(layer, function=torch.compile(layer.function, dynamic=False))
    steps = replace(chain, parts=(layer, *rest)).steps()
    return {what: steps[what] for what in (FORWARD, BOTH) if what in steps}


@peer("Jet-Nemotron", "jet", file=f"{JET}/dconv_fwdbwd.py", devices=("cuda",))
def jet_by_its_kernels(problem: Layer, device: str) -> Steps:
    """Its Triton kernels after torch's layers, and torch's SiLU."""
    from torch.nn import functional as F

    convolve = file_module(f"{JET}/dconv_fwdbwd.py").dynamic_conv_triton_autograd
    step = file_module(f"{JET}/dconv_step.py").causal_conv_step_triton

    def activated(x: Any, kernels: Any, cache: Any) -> Any:
        if cache is None:
            return F.silu(convolve(x, kernels))
        return F.silu(step(x, cache, kernels[:, 0]))

    return _jet_by(activated, problem, device, dtype_on(device)).steps()


def _block(B: int, T: int, heads: int, C: int, training: bool, dtype: str = "float32") -> Layer:
    import torch

    normal, D = _drawn(T), VALUES * heads
    kernels = _generator(normal, D, C)
    sizes = {"q": KEYS * heads, "k": KEYS * heads, "v": D, "b": heads, "a": heads, "g": D}
    parameters = {
        "A_log": torch.linspace(0, 2, heads, dtype=torch.float64),
        "dt_bias": torch.linspace(-4, -2, heads, dtype=torch.float64),
        **{f"{name}_proj.weight": normal(n, C, scale=C**-0.5) for name, n in sizes.items()},
        **{f"dynamic_conv1d.kernel_generator.{name}": x for name, x in kernels.items()},
        "o_norm.weight": 1 + normal(VALUES, scale=0.1),
        "o_proj.weight": normal(C, D, scale=D**-0.5),
    }
    states = (normal(B, D, 4), normal(B, heads, KEYS, VALUES, scale=0.1)) if T == 1 else ()
    return Layer(normal(B, T, C), parameters, training, states, heads, dtype)


def _block_by(
    make: Callable[[Layer], tuple[Any, Any]], problem: Layer, device: str, dtype: str
) -> Chain:
    """Return the step by a function of tokens, and its parameters, made from a block."""
    given = problem.to(device, dtype)
    return _chain("block", given.x, *make(given))


@functools.cache
def _no_training() -> str | None:
    """Return why fla has no gradients of the delta rule here, as with some versions of Triton."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    sizes = {"q": (12, KEYS), "k": (12, KEYS), "v": (12, VALUES), "g": (12,), "beta": (12,)}
    given = {
        name: torch.zeros(1, 64, *size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name, size in sizes.items()
    }
    try:
        torch.autograd.grad(chunk_gated_delta_rule(**given)[0].sum(), [*given.values()])
    except RuntimeError as error:
        return str(error)
    return None


def _module_of_block() -> Any:
    """Return Jet-Nemotron's module of the block.

    Its norm takes an argument of a fork of fla: how often kernels are chosen anew. Releases of
    fla choose them once, and the argument is dropped.
    """
    module: Any = file_module(BLOCK)
    norm = module.FusedRMSNormGated
    if "autotune_interval" not in inspect.signature(norm).parameters:
        module.FusedRMSNormGated = lambda *a, autotune_interval=None, **k: norm(*a, **k)
    return module


def _their_block(given: Layer) -> tuple[Any, Any]:
    """Return Jet-Nemotron's block, a function of tokens, and its parameters."""

    module = _module_of_block()
    config = module.JetBlockConfig(
        num_heads=given.heads, head_dim=KEYS, expand_v=VALUES / KEYS, dconv_implementation="triton"
    )
    sizes = {"hidden_size": given.x.shape[-1], "initializer_range": 0.02, "layer_idx": 0}
    block = module.JetBlock(**sizes, jet_block_config=config)
    cache: Any = None
    if given.states:
        inputs, matrices = given.states
        cache = file_module(f"{JET}/kv_cache.py").JetNemotronCache()
        cache.update(recurrent_state=matrices, conv_state=inputs, layer_idx=0)

    def function(x: Any) -> Any:
        y = block(x, past_key_value=cache, use_cache=cache is not None)[0]
        if given.states:
            # In memory that stays: a CUDA graph reads and writes it in every replay.
            cache[0]["recurrent_state"] = matrices.copy_(cache[0]["recurrent_state"])
        return y

    return function, _loaded(block, given)


def _loaded(block: Any, given: Layer) -> list[Any]:
    """Give a block the parameters of a problem; return the block's, in the problem's order."""
    block.to(given.x).requires_grad_(given.training).train(given.training)
    block.load_state_dict(given.parameters)
    own = dict(block.named_parameters())
    return [own[name] for name in given.parameters]


def _our_block(given: Layer, backend: BackendName | None = None) -> tuple[Any, Any]:
    """Return our block, a function of tokens, and its parameters."""
    from fusedops.nn import JetBlock

    sizes = given.x.shape[-1], given.heads, KEYS, VALUES / KEYS
    block = JetBlock(*sizes, backend=backend)
    cache: Any = given.states or None
    return lambda x: block(x, cache=cache)[0], _loaded(block, given)


def _block_by_module(
    problem: Layer, how: str, device: str, dtype: str, backend: BackendName | None
) -> Chain:
    """Return the step by our module."""
    return _block_by(partial(_our_block, backend=backend), problem, device, dtype)


@peer("Jet-Nemotron", *JET_BLOCK, file=BLOCK, package="fla", devices=("cuda",))
def jet_block_by_its_kernels(problem: Layer, device: str) -> Steps:
    """Its own block, with the delta rule and the norm of fla."""
    if problem.training and (reason := _no_training()):
        raise Unsuited(reason)
    return _block_by(_their_block, problem, device, problem.dtype).steps()


@peer("torch eager", *JET_BLOCK)
def jet_block_in_torch(problem: Layer, device: str) -> Steps:
    """Its formulas, with chunks of 64 tokens in the delta rule."""
    make = partial(_formula_of_block, rule=_rule_by_chunks)
    return _block_by(make, problem, device, problem.dtype).steps()


@peer("torch.compile", *JET_BLOCK, quick=False)
def jet_block_compiled(problem: Layer, device: str) -> Steps:
    """The same, compiled as one function with its loop over chunks, for which it takes minutes."""
    import torch

    if problem.x.shape[1] > MOST_COMPILED:
        raise Unsuited(f"more than {MOST_COMPILED // 64} chunks take it too long to compile")
    torch.compiler.reset()

    def make(given: Layer) -> tuple[Any, Any]:
        function, parameters = _formula_of_block(given, _rule_by_chunks)
        return torch.compile(function, dynamic=False), parameters

    steps = _block_by(make, problem, device, problem.dtype).steps()
    # A compiled backward frees what the forward has kept: by itself it can't be timed again.
    return {what: steps[what] for what in (FORWARD, BOTH) if what in steps}


def _rule_by_tokens(q: Any, k: Any, v: Any, g: Any, beta: Any, S: Any) -> tuple[Any, Any]:
    """Return the delta rule, a token after the other, and the state after the last."""
    import torch

    outs = []
    for t in range(q.shape[1]):
        S = g[:, t, :, None, None].exp() * S
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t, :, :, None] * change[:, :, None]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) / KEYS**0.5)
    return torch.stack(outs, 1), S


def _prepared_chunks(q: Any, k: Any, v: Any, g: Any, beta: Any) -> tuple[Any, ...]:
    """Return what a step takes of every chunk of 64 tokens."""
    import torch
    from torch.nn import functional as F

    tokens, size = q.shape[1], 64

    def chunks(x: Any) -> Any:
        x = F.pad(x, (0, 0, 0, 0, 0, -tokens % size))
        return x.unflatten(1, (-1, size)).movedim((1, 3), (0, 2))

    q, k, v, g, beta = map(chunks, (q, k, v, g[..., None], beta[..., None]))
    passed = g.cumsum(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decays = (passed - passed.mT).masked_fill(later, -torch.inf).exp()
    system = beta * (k @ k.mT * decays)
    solve = partial(torch.linalg.solve_triangular, system, upper=False, unitriangular=True)
    values, keys = solve(beta * v), solve(beta * passed.exp() * k)
    attention = q @ k.mT * decays
    q, k = q * passed.exp(), k * (passed[..., -1:, :] - passed).exp()
    return q, k, values, keys, attention, passed[..., -1:, :].exp()


def _step_of_chunk(
    S: Any, q: Any, k: Any, values: Any, keys: Any, attention: Any, decay: Any
) -> tuple[Any, Any]:
    """Return a chunk's results, and the state after it."""
    u = values - keys @ S
    return q @ S + attention @ u, decay * S + k.mT @ u


def _rule_by_chunks(q: Any, k: Any, v: Any, g: Any, beta: Any, S: Any) -> tuple[Any, Any]:
    """Return the delta rule, a chunk after the other, as programs without fla compute it."""
    import torch

    outs = []
    chunks = _prepared_chunks(*[x.to(S.dtype) for x in (q, k, v, g, beta)])
    for parts in zip(*chunks, strict=True):
        out, S = _step_of_chunk(S, *parts)
        outs.append(out)
    out = torch.stack(outs).movedim((0, 2), (1, 3)).flatten(1, 2)[:, : q.shape[1]]
    return out / KEYS**0.5, S


def _formula_of_block(
    given: Layer, rule: Callable[..., tuple[Any, Any]] = _rule_by_tokens
) -> tuple[Any, Any]:
    """Return the block's formula in plain torch, and its parameters."""
    import torch
    from torch.nn import functional as F

    p, heads = given.parameters, given.heads

    def project(name: str, x: Any) -> Any:
        return F.linear(x, p[f"{name}_proj.weight"])

    def unit(x: Any) -> Any:
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    def generator(x: Any) -> Any:
        w1, w2, bias = (
            p[f"dynamic_conv1d.kernel_generator.{name}"]
            for name in ("w1.weight", "w2.weight", "w2.bias")
        )
        return F.linear(F.silu(F.linear(x, w1)), w2, bias).unflatten(-1, (-1, 4))

    def block(x: Any) -> Any:
        last, state = given.states or (None, None)
        q, k = (unit(F.silu(project(name, x)).unflatten(-1, (heads, -1))) for name in "qk")
        v = _in_torch(project("v", x), generator(x), last).unflatten(-1, (heads, -1))
        wide = torch.promote_types(x.dtype, torch.float32)
        a = project("a", x).to(wide)
        g = -p["A_log"].to(wide).exp() * F.softplus(a + p["dt_bias"])
        before = state
        if state is None:
            before = x.new_zeros(len(x), heads, KEYS, VALUES, dtype=wide)
        o, after = rule(q, k, v, g, project("b", x).sigmoid(), before)
        if state is not None:
            state.copy_(after)
        o = F.rms_norm(o.to(x.dtype), (VALUES,), p["o_norm.weight"], 1e-5)
        gate = F.silu(project("g", x)).unflatten(-1, (heads, -1))
        return project("o", (o * gate).flatten(-2))

    return block, p.values()


@dataclass(frozen=True)
class Requests:
    """Requests to a server whose model is a convolution of four taps, with SiLU.

    Parameters
    ----------
    tokens : tensor (N + 1,), int64
        Of all prompts and answers, request by request, and one of no request. Answers are given,
        so that every program gets the same tokens.
    table : tensor (V, D), float64
        The channels of every token.
    weight : tensor (D, 4), float64
    lengths : tuple of pairs of int
        Of each prompt and its answer.
    batch, chunk : int
        The requests that are answered at a time, and the most tokens of a prompt read at a time.
    """

    tokens: Any
    table: Any
    weight: Any
    lengths: tuple[tuple[int, int], ...]
    batch: int
    chunk: int

    @property
    def shape(self) -> dict[str, int]:
        """The sizes that a table shows."""
        count, N, D = len(self.lengths), len(self.tokens) - 1, self.table.shape[1]
        return {"tokens": N, "requests": count, "batch": self.batch, "D": D}

    def starts(self) -> list[int]:
        """Return where each request begins, and where the last one ends."""
        starts = [0]
        for prompt, answer in self.lengths:
            starts.append(starts[-1] + prompt + answer)
        return starts

    def truth(self) -> tuple[Any, ...]:
        """Return the convolution of every request by itself."""
        import torch

        starts = self.starts()
        fresh = self.weight.new_zeros(1, len(self.weight), 3)
        outs = [
            _read_in_torch(self.table[self.tokens[first:last]], self.weight, fresh)[0]
            for first, last in pairwise(starts)
        ]
        return (torch.cat(outs),)


def _requests(batch: int, D: int, chunk: int) -> Requests:
    """Return two requests for every place of the batch, with prompts of up to three chunks."""
    import torch

    rng = torch.Generator().manual_seed(batch)
    prompts = torch.randint(1, 3 * chunk, (2 * batch,), generator=rng).tolist()
    answers = torch.randint(1, chunk // 4 + 2, (2 * batch,), generator=rng).tolist()
    lengths = tuple(zip(prompts, answers, strict=True))
    N, V = sum(prompts) + sum(answers), 256
    tokens = torch.randint(0, V, (N + 1,), generator=rng)
    table = torch.randn(V, D, generator=rng, dtype=torch.float64)
    weight = torch.randn(D, 4, generator=rng, dtype=torch.float64) / 2
    return Requests(tokens, table, weight, lengths, batch, chunk)


@dataclass(frozen=True)
class Convolution:
    """The functions of a program that a server calls.

    Parameters
    ----------
    read : callable
        From tokens (T, D) of one request, the weight, and its state (1, D, L) to the convolution
        and the state after them.
    step : callable
        From a token (B, D) of every request, the states (R, D, L) of all rows, which it updates,
        the weight, and the rows (B,) to the convolution.
    inputs : int
        L, the inputs that a state has.
    """

    read: Callable[..., Any]
    step: Callable[..., Any]
    inputs: int = 3


class Server:
    """Continuous batching: a turn decodes a token of each running request, beside a prompt's chunk.

    Every request has a row of `pages`, the states, from its prompt to its end. A decoding step
    takes tokens from `places`, and states from `slots`, both of which the host writes every turn;
    on a GPU it may be captured in a graph, as its shapes never change. Where the batch isn't full,
    the slot is -1, which some programs take as the last row, and the place is behind all tokens.
    """

    def __init__(
        self, requests: Requests, program: Convolution, device: str, dtype: str, graph: bool
    ) -> None:
        import torch

        kind = getattr(torch, dtype)
        self.requests, self.program, self.graph = requests, program, graph
        self.tokens, self.table = requests.tokens.to(device), requests.table.to(device, kind)
        self.weight = requests.weight.to(device, kind)
        self.out = self.table.new_empty(len(self.tokens), self.table.shape[1])
        batch, D = requests.batch, self.table.shape[1]
        # Channels lie side by side, as causal-conv1d's kernels need them.
        self.pages = self.table.new_zeros(batch + 1, program.inputs, D).mT
        self.places = torch.full((batch,), len(self.tokens) - 1, device=device)
        self.slots = torch.full((batch,), -1, device=device, dtype=torch.int32)
        self.decode = graphed(self._decode, 1) if graph else self._decode

    def steps(self) -> Steps:
        """Return functions that serve all requests, make one step, and read one chunk."""
        import torch

        batch = self.requests.batch
        every = {row: (row, row) for row in range(batch)}
        made: dict[str, Callable[[], Any]] = {
            FORWARD: self.serve,
            "a decoding step": partial(self._step, every),
        }
        if not self.graph:
            rows = torch.arange(batch, dtype=torch.int32, device=self.table.device)
            given = self.table[:batch], self.pages, self.weight, rows
            made[CONVOLUTION] = partial(self.program.step, *given)
            made["a chunk of a prompt"] = partial(self._read, 0, self.requests.chunk, 0)
        return {name: torch.no_grad()(step) for name, step in made.items()}

    def serve(self) -> tuple[Any, ...]:
        """Serve all requests; return the convolution of all their tokens."""
        requests, starts = self.requests, self.requests.starts()
        waiting = deque(range(len(requests.lengths)))
        # The row of every running request, and the place of its next token.
        running: dict[int, tuple[int, int]] = {}
        free = list(range(requests.batch))
        prompt = None
        while waiting or running or prompt:
            if prompt is None and waiting and len(running) < requests.batch:
                name, row = waiting.popleft(), free.pop()
                self.pages[row] = 0
                prompt = name, row, starts[name]
            if running:
                self._step(running)
                for name, (row, at) in list(running.items()):
                    running[name] = row, at + 1
                    if at + 1 == starts[name + 1]:
                        del running[name]
                        free.append(row)
            if prompt:
                name, row, at = prompt
                end = starts[name] + requests.lengths[name][0]
                last = min(at + requests.chunk, end)
                self._read(at, last, row)
                prompt = name, row, last
                if last == end:
                    running[name] = row, last
                    prompt = None
        return (self.out[:-1],)

    def _step(self, running: dict[int, tuple[int, int]]) -> None:
        """Take the next token of every running request, of which the rows and places are given."""
        import torch

        empty = self.requests.batch - len(running)
        slots = [row for row, _ in running.values()] + [-1] * empty
        places = [at for _, at in running.values()] + [len(self.tokens) - 1] * empty
        self.slots.copy_(torch.tensor(slots, dtype=torch.int32), non_blocking=True)
        self.places.copy_(torch.tensor(places), non_blocking=True)
        self.decode()

    def _decode(self) -> None:
        x = self.table[self.tokens[self.places]]
        y = self.program.step(x, self.pages, self.weight, self.slots)
        self.out.index_copy_(0, self.places, y)

    def _read(self, first: int, last: int, row: int) -> None:
        state = self.pages[row : row + 1]
        x = self.table[self.tokens[first:last]]
        y, after = self.program.read(x, self.weight, state)
        self.out[first:last] = y
        state.copy_(after)


#: The part that is held beside an empty function on a GPU: every layer of a model has its own.
CONVOLUTION = "its convolution"


def _served(
    problem: Requests, how: str, device: str, dtype: str, backend: BackendName | None
) -> Server:
    """Return the loop with our functions by causal-conv1d's names."""
    from fusedops.compat import causal_conv1d

    return Server(problem, _by_causal_conv1d(causal_conv1d, backend), device, dtype, how == GRAPHS)


def _by_causal_conv1d(module: Any, backend: BackendName | None = None) -> Convolution:
    """Return the functions of causal-conv1d, or ours with its names."""

    def read(x: Any, weight: Any, state: Any) -> Any:
        y, after = module.causal_conv1d_fn(
            x.mT[None],
            weight,
            initial_states=state,
            return_final_states=True,
            activation="silu",
        )
        return y[0].mT, after

    def step(x: Any, pages: Any, weight: Any, slots: Any) -> Any:
        return module.causal_conv1d_update(
            x, pages, weight, activation="silu", conv_state_indices=slots
        )

    # Entering a context costs the host less than use_backend does in every call.
    with fusedops.use_backend(backend) if backend else contextlib.nullcontext():
        context = contextvars.copy_context()
    run: Any = context.run
    return Convolution(partial(run, read), partial(run, step))


def _read_in_torch(x: Any, weight: Any, state: Any) -> Any:
    import torch
    from torch.nn import functional as F

    inputs = torch.cat([state, x.mT[None]], -1)
    y = F.silu(F.conv1d(inputs, weight[:, None], groups=len(weight)))
    return y[0].mT, inputs[..., -state.shape[-1] :]


def _step_in_torch(x: Any, pages: Any, weight: Any, slots: Any) -> Any:
    import torch
    from torch.nn import functional as F

    inputs = torch.cat([pages[slots], x[..., None]], -1)
    pages[slots] = inputs[..., 1:]
    return F.silu((inputs * weight).sum(-1))


@peer("torch eager", "serving")
def served_in_torch(problem: Requests, device: str) -> Steps:
    """The loop with torch's convolution, and its own sum of products for a step."""
    program = Convolution(_read_in_torch, _step_in_torch)
    return Server(problem, program, device, dtype_on(device), False).steps()


@peer("causal-conv1d", "serving", package="causal_conv1d", devices=("cuda",))
def served_by_causal_conv1d(problem: Requests, device: str) -> Steps:
    """The loop with its CUDA kernels."""
    import causal_conv1d

    program = _by_causal_conv1d(causal_conv1d)
    return Server(problem, program, device, dtype_on(device), False).steps()


@peer("fla", "serving", package="fla", devices=("cuda",))
def served_by_fla(problem: Requests, device: str) -> Steps:
    """The loop with its Triton kernels; states are gathered before a step, and put back."""
    from fla.modules.convolution import causal_conv1d, causal_conv1d_update

    def read(x: Any, weight: Any, state: Any) -> Any:
        options = {"activation": "silu", "output_final_state": True}
        y, after = causal_conv1d(x[None], weight, initial_state=state.contiguous(), **options)
        return y[0], after

    def step(x: Any, pages: Any, weight: Any, slots: Any) -> Any:
        rows = pages[slots].contiguous()
        y, rows = causal_conv1d_update(x, rows, weight=weight, activation="silu")
        pages[slots] = rows
        return y

    program = Convolution(read, step, inputs=4)
    return Server(problem, program, device, dtype_on(device), False).steps()


@peer(EMPTY, "serving", devices=("cuda",), captured=False, computes=False, checked=False)
def serving_nothing(problem: Requests, device: str) -> Steps:
    """An autograd.Function that computes nothing, of a token of every request."""
    import torch

    x = problem.table[: problem.batch].to(device, getattr(torch, dtype_on(device)))
    return {CONVOLUTION: torch.no_grad()(partial(empty_function(), x))}
