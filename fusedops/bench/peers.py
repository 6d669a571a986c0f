"""What programs call today in place of our ops: one function for each, of the same problem."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fusedops
from fusedops._frame.check import is_tensor
from fusedops.bench.workloads import BOTH, FORWARD, WORKLOADS, Problem, Steps, by_autograd
from fusedops.wigner import m_major_order

#: The peer that the host's time with a call is compared to.
EMPTY = "empty autograd.Function"


class Unsuited(Exception):
    """A peer doesn't do this problem; the message, if there is one, is worth a line."""


@dataclass(frozen=True)
class Peer:
    """A peer of some ops: `prepare` returns its steps from a problem and a cotangent.

    They are of `tensors`, or of NumPy arrays.

    It needs `package`, is there on `devices`, and may be left out of a quick look. Its steps can be
    `captured` in a CUDA graph or not. One that computes nothing has no error, nor has one that is
    not `checked`; a `dense` one has gradients outside of the blocks of matrices, where ours have
    none.
    """

    name: str
    ops: tuple[str, ...]
    prepare: Callable[[Problem, Any], Steps]
    package: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    quick: bool = True
    captured: bool = True
    computes: bool = True
    checked: bool = True
    tensors: bool = True
    dense: bool = False

    def why_not(self) -> str | None:
        """Return why the peer can't be timed here, or None."""
        if self.package is None:
            return None
        try:
            found = importlib.util.find_spec(self.package) is not None
        except ModuleNotFoundError:
            found = False
        return None if found else "not installed"


PEERS: list[Peer] = []


def peer(name: str, *ops: str, **options: Any) -> Callable[[Any], Any]:
    """Declare the decorated function to be what prepares a peer of some ops."""

    def declare(prepare: Callable[[Problem, Any], Steps]) -> Callable[[Problem, Any], Steps]:
        PEERS.append(Peer(name, ops, prepare, **options))
        return prepare

    return declare


def _steps(function: Callable[..., Any], problem: Problem, cotangent: Any) -> Steps:
    """Return the steps of a function of a problem's leaves, which autograd differentiates."""
    import torch

    leaves = [problem.arguments[name] for name in problem.leaves]

    def forward() -> tuple[Any, ...]:
        return (function(*leaves),)

    return {
        FORWARD: torch.no_grad()(forward),
        BOTH: by_autograd(function, leaves, cotangent),
    }


def _groups(problem: Problem) -> list[tuple[Any, Any]]:
    import torch

    xyz = problem.arguments["xyz"]
    return [
        (torch.tensor(i, device=xyz.device), torch.tensor(s, device=xyz.device, dtype=xyz.dtype))
        for i, s in problem.raw["groups"]
    ]


@peer("torch eager", "planarity_nll", captured=False)
def eigh(problem: Problem, cotangent: Any) -> Steps:
    """`eigh` of the covariance, with the normal held fixed."""
    import torch

    groups = _groups(problem)
    if problem.arguments["xyz"].is_cuda and problem.shape["planes"] > 100_000:
        raise Unsuited("asks for hundreds of GB")

    def nll(xyz: Any) -> Any:
        total = xyz.new_zeros(())
        for index, sigma in groups:
            x = xyz[index]
            r = x - x.mean(1, keepdim=True)
            with torch.no_grad():
                normal = torch.linalg.eigh(r.mT @ r)[1][..., :1]
            z = (r @ normal)[..., 0] / sigma[:, None]
            total = total + (0.5 * z**2 + sigma[:, None].log() + 0.5 * math.log(2 * math.pi)).sum()
        return total

    return _steps(nll, problem, cotangent)


@peer("TorchRef 0.7", "planarity_nll", package="torchref.base.targets", captured=False)
def torchref_planarity(problem: Problem, cotangent: Any) -> Steps:
    from torchref.base.targets.planarity import planarity_math

    if problem.arguments["xyz"].is_cuda and problem.shape["planes"] > 100_000:
        raise Unsuited("asks for hundreds of GB")
    # By atom: a (P,) is misread where P is the number of a plane's atoms.
    groups = [(i, s[:, None].expand(i.shape).contiguous()) for i, s in _groups(problem)]
    return _steps(lambda xyz: planarity_math(xyz, groups), problem, cotangent)


@peer(EMPTY, *{w.op.__name__: w for w in WORKLOADS}, captured=False, computes=False)
def nothing(problem: Problem, cotangent: Any) -> Steps:
    """The least that torch takes for a function of as many tensors as have gradients.

    It saves them, returns an array like the first, and backward one like each. Of an op without
    gradients, as many as its tensors, forward.
    """
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.save_for_backward(*inputs)
            return torch.empty_like(inputs[0])

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            return tuple(map(torch.empty_like, ctx.saved_tensors))

    given = problem.arguments
    inputs = [given[name] for name in problem.leaves] or [*filter(is_tensor, given.values())]
    steps = {FORWARD: torch.no_grad()(lambda: (Nothing.apply(*inputs),))}
    if problem.leaves:
        steps[BOTH] = by_autograd(Nothing.apply, inputs, torch.empty_like(inputs[0]))
    return steps


@peer("empty kernels", "planarity_nll", package="triton", devices=("cuda",), computes=False)
def launches(problem: Problem, cotangent: Any) -> Steps:
    """An autograd.Function that launches one kernel each way, which does nothing."""
    import torch

    empty = _empty_kernel()

    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            empty[(1,)](x)
            return x.new_empty(())

        @staticmethod
        def backward(ctx: Any, cotangent: Any) -> Any:
            (x,) = ctx.saved_tensors
            empty[(1,)](x)
            return torch.empty_like(x)

    return _steps(Empty.apply, problem, cotangent)


@functools.cache
def _empty_kernel() -> Any:
    import triton

    @triton.jit
    def empty(x):  # type: ignore[no-untyped-def]
        pass

    return empty


@peer("torch.compile", "dynamic_conv", quick=False, checked=False)
def shifted(problem: Problem, cotangent: Any) -> Steps:
    """W shifted products, compiled, which takes too long to do for a small problem too."""
    import torch

    if problem.arguments["activation"]:
        raise Unsuited

    def convolve(x: Any, kernels: Any) -> Any:
        width, tokens = kernels.shape[-1], x.shape[1]
        padded = torch.nn.functional.pad(x, (0, 0, width - 1, 0))
        return sum(kernels[..., w] * padded[:, w : w + tokens] for w in range(width))

    return _steps(torch.compile(convolve, dynamic=False), problem, cotangent)


@peer("torch eager", "dynamic_conv")
def unfolded(problem: Problem, cotangent: Any) -> Steps:
    """Jet-Nemotron's own fallback."""
    import torch

    if problem.arguments["activation"]:
        raise Unsuited

    def convolve(x: Any, kernels: Any) -> Any:
        padded = torch.nn.functional.pad(x, (0, 0, kernels.shape[-1] - 1, 0))
        return (padded.unfold(1, kernels.shape[-1], 1) * kernels).sum(-1)

    return _steps(convolve, problem, cotangent)


@peer("an empty kernel", "dynamic_conv_step", package="triton", devices=("cuda",), computes=False)
def empty_step(problem: Problem, cotangent: Any) -> Steps:
    x, empty = problem.arguments["x"], _empty_kernel()
    return {FORWARD: lambda: empty[(1,)](x)}


@peer(
    "768 empty programs", "dynamic_conv_step", package="triton", devices=("cuda",), computes=False
)
def empty_programs(problem: Problem, cotangent: Any) -> Steps:
    x, empty = problem.arguments["x"], _empty_kernel()
    return {FORWARD: lambda: empty[(768,)](x)}


@peer("moving the bytes", "dynamic_conv_step", package="triton", devices=("cuda",), computes=False)
def moved(problem: Problem, cotangent: Any) -> Steps:
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def move(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)

    x = problem.arguments["x"]
    half = int(problem.work[FORWARD].bytes) // x.itemsize // 2
    source = torch.zeros(half, device=x.device, dtype=x.dtype)
    target = torch.empty_like(source)
    programs = -(-half // 1024)
    return {FORWARD: lambda: move[(programs,)](source, target, half, 1024)}


def _dense(problem: Problem) -> tuple[Any, Any]:
    """Return the edges, and the m-major order of the rows of dense matrices."""
    import torch

    if problem.raw["packed"]:
        raise Unsuited
    features = next(iter(problem.arguments.values()))
    order = torch.as_tensor(m_major_order(problem.raw["lmax"]), device=features.device)
    return torch.tensor(problem.raw["index"], device=features.device), order


@peer("torch eager", "node_to_edge_wigner_permute", dense=True)
def gathered(problem: Problem, cotangent: Any) -> Steps:
    """Gather, cat and bmm, as in fairchem's general backend."""
    import torch

    (source, target), order = _dense(problem)

    def turn(x: Any, wigner: Any) -> Any:
        ends = torch.cat([x[source], x[target]], dim=2)
        return torch.bmm(wigner.to(ends.dtype)[:, order], ends)

    return _steps(turn, problem, cotangent)


@peer("torch eager", "permute_wigner_inv_edge_to_node", dense=True)
def summed(problem: Problem, cotangent: Any) -> Steps:
    """The bmm and index_add of the same."""
    import torch

    (_, target), order = _dense(problem)
    nodes, rows = problem.raw["nodes"], len(order)

    def turn(message: Any, wigner: Any) -> Any:
        turned = torch.bmm(wigner.to(message.dtype)[:, order].mT, message)
        total = message.new_zeros(nodes, rows, message.shape[2])
        return total.index_add(0, target, turned)

    return _steps(turn, problem, cotangent)


def _places(problem: Problem, like: Any) -> Any:
    """Return every element's place in the map, as torch's own functions take it."""
    import torch

    if problem.raw["index"] != "int64":
        raise Unsuited
    wa, wbwc = (torch.tensor(problem.raw[name], device=like.device) for name in ("wa", "wbwc"))
    return (wa[:, :, None, None] + wbwc[:, None]).reshape(-1)


@peer("torch eager", "structured_scatter_add")
def index_added(problem: Problem, cotangent: Any) -> Steps:
    """`index_add`, with its indices ready."""
    import torch

    cubes, size = problem.arguments["density_cube"], problem.raw["size"]
    place = _places(problem, cubes)

    def forward() -> tuple[Any, ...]:
        return (cubes.new_zeros(size).index_add_(0, place, cubes.view(-1)),)

    def add(cubes: Any) -> Any:
        return cubes.new_zeros(size).index_add(0, place, cubes.reshape(-1))

    return _steps(add, problem, cotangent) | {FORWARD: torch.no_grad()(forward)}


@peer("torch eager", "structured_gather")
def taken(problem: Problem, cotangent: Any) -> Steps:
    """`take`, with its indices ready."""
    import torch

    place = _places(problem, problem.arguments["grid"])
    shape = problem.shape["cubes"], *[problem.shape["edge"]] * 3
    return _steps(lambda grid: torch.take(grid, place).view(shape), problem, cotangent)


@peer(
    "TorchRef 0.5",
    "structured_scatter_add",
    package="torchref.base.kernels.cpu_scatter",
    devices=("cpu",),
    quick=False,
)
def torchref_scatter(problem: Problem, cotangent: Any) -> Steps:
    """Its C++, which it compiles when it is first used."""
    import torch
    from torchref.base.kernels.cpu_scatter import structured_scatter_add

    if problem.raw["index"] != "int64":
        raise Unsuited
    wa, wbwc = (torch.tensor(problem.raw[name]) for name in ("wa", "wbwc"))
    size = problem.raw["size"]
    return _steps(lambda x: structured_scatter_add(x, wa, wbwc, size), problem, cotangent)


def _torchref_density(problem: Problem, cotangent: Any, bits: int) -> Steps:
    """The kernels that TorchRef 0.7 calls, called without its checks."""
    import torch
    from torchref_kernels import native

    kernels, given = native(), problem.arguments
    cell, shape = problem.raw["cell"], given["cell"].shape
    dtype = getattr(torch, f"float{bits}")
    anisotropic = given["b"].ndim == 2
    name = f"sphere_{'aniso' if anisotropic else 'iso'}"

    def flat(array: Any) -> Any:
        return torch.as_tensor(array).to(dtype).contiguous().view(-1)

    def buffers(*tensors: Any) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]

    names = "xyz", "b", "occupancy", "amplitudes", "widths"
    inputs = [flat(given[name]) for name in names]
    inputs += [flat(given["radius"] ** 2), flat(np.linalg.inv(cell)), flat(cell)]
    seed = flat(cotangent)

    def forward() -> tuple[Any, ...]:
        out = torch.zeros(math.prod(shape), dtype=dtype)
        run = getattr(kernels, f"{name}_fwd_f{bits}")
        run(*buffers(out, *inputs), *shape, fusedops.get_num_threads())
        return (out.view(shape),)

    def both() -> tuple[Any, ...]:
        value = forward()
        gradients = [torch.zeros(given[name].shape, dtype=dtype) for name in problem.leaves]
        run = getattr(kernels, f"{name}_bwd_f{bits}")
        run(*buffers(*gradients, seed, *inputs), *shape, fusedops.get_num_threads())
        return *value, *gradients

    return {FORWARD: forward, BOTH: both}


@peer(
    "torchref-kernels",
    "gaussian_density",
    package="torchref_kernels",
    devices=("cpu",),
    quick=False,
)
def torchref_float32(problem: Problem, cotangent: Any) -> Steps:
    if problem.arguments["b"].ndim == 2:
        raise Unsuited("takes many seconds in float32")
    return _torchref_density(problem, cotangent, 32)


@peer(
    "torchref-kernels, float64",
    "gaussian_density",
    package="torchref_kernels",
    devices=("cpu",),
)
def torchref_float64(problem: Problem, cotangent: Any) -> Steps:
    return _torchref_density(problem, cotangent, 64)


@peer("gemmi", "gaussian_density", package="gemmi", devices=("cpu",), tensors=False)
def gemmi(problem: Problem, cotangent: Any) -> Steps:
    """Its calculator of densities, on the atoms of a structure, without a gradient."""
    if "calculator" not in problem.raw:
        raise Unsuited
    calculator, structure = problem.raw["calculator"], problem.raw["structure"]

    def put() -> tuple[Any, ...]:
        calculator.put_model_density_on_grid(structure[0])
        return (calculator.grid.array,)

    return {FORWARD: put}


def _gated_in_torch(problem: Problem) -> Callable[..., Any]:
    import torch
    from torch.nn import functional as F

    given, leaves = problem.arguments, problem.leaves

    def update(*values: Any) -> Any:
        p = dict(zip(leaves, values, strict=True))
        x = p["x"]
        n = F.layer_norm(x, x.shape[-1:], p["norm_in_weight"], p["norm_in_bias"])
        sides = F.linear(n, p["p_in_weight"]) * F.linear(n, p["g_in_weight"]).sigmoid()
        left, right = sides.chunk(2, -1)
        o = torch.einsum("bikh,bjkh->bijh", left, right)
        o = F.layer_norm(o, o.shape[-1:], p["norm_out_weight"], p["norm_out_bias"])
        s = F.linear(n, p["g_out_weight"]).sigmoid()
        if given["gate"] == "output":
            return F.linear(o, p["p_out_weight"]) * s
        return F.linear(o * s, p["p_out_weight"])

    return update


@peer("torch eager", "triangle_multiplicative_update")
def gated(problem: Problem, cotangent: Any) -> Steps:
    """The formula, as folding models have it."""
    if problem.arguments["precision"]:
        raise Unsuited
    return _steps(_gated_in_torch(problem), problem, cotangent)


@peer(
    "cuEquivariance",
    "triangle_multiplicative_update",
    package="cuequivariance_torch",
    devices=("cuda",),
    quick=False,
)
def cuequivariance(problem: Problem, cotangent: Any) -> Steps:
    from cuequivariance_torch import triangle_multiplicative_update

    given = problem.arguments
    if given["precision"] or given["gate"] != "output":
        raise Unsuited

    def update(*values: Any) -> Any:
        return triangle_multiplicative_update(**dict(zip(problem.leaves, values, strict=True)))

    return _steps(update, problem, cotangent)


def versions() -> dict[str, str]:
    """Return the versions of the peers' packages that are installed."""
    found = {}
    for package in ("torchref", "torchref-kernels", "gemmi", "cuequivariance-torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
