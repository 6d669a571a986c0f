"""Functions that programs call today in place of our ops, each given the same problem."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import fusedops
from bench.workloads import WORKLOADS, Problem
from fusedops._catalogue import BOTH, FORWARD, Steps, by_autograd
from fusedops._frame.check import dtype_name, is_tensor
from fusedops.wigner import m_major_order

#: The peer that the host's time with a call is compared to.
EMPTY = "empty autograd.Function"

#: The variable that names the folder with checkouts of the repositories that aren't packages.
CHECKOUTS = "FUSEDOPS_PEERS"

#: The repositories' addresses, by the name that `git clone` gives a checkout.
REPOSITORIES = {
    "Jet-Nemotron": "https://github.com/NVlabs/Jet-Nemotron",
    "discover": "https://github.com/test-time-training/discover",
}


class Unsuited(Exception):
    """A peer doesn't do this problem; the message, if there is one, is worth a line."""


@dataclass(frozen=True)
class Peer:
    """A peer of some ops: `prepare` returns its steps from a problem and a cotangent.

    The steps take `tensors`, or NumPy arrays. A peer of a whole step has the step's name in place
    of an op's, and is prepared from a problem and a device.

    A peer needs `package`, or `file` in a checkout of one of `REPOSITORIES`, runs on `devices`, and
    may be left out of a quick run. Its steps can be `captured` in a CUDA graph or not. A peer that
    computes nothing or isn't `checked` has no error; a `dense` peer returns gradients of
    matrices that aren't laid out as ours, or that are not zero outside of the blocks.
    """

    name: str
    ops: tuple[str, ...]
    prepare: Callable[..., Steps]
    package: str | None = None
    file: str | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")
    quick: bool = True
    captured: bool = True
    computes: bool = True
    checked: bool = True
    tensors: bool = True
    dense: bool = False

    def why_not(self) -> str | None:
        """Return why the peer can't be timed here, or None."""
        if self.file and (reason := no_file(self.file)):
            return reason
        if self.package is None:
            return None
        try:
            found = importlib.util.find_spec(self.package) is not None
        except ImportError:
            found = False
        return None if found else "not installed"


PEERS: list[Peer] = []


def _path(file: str) -> Path:
    return Path(os.environ.get(CHECKOUTS, "")) / file


def no_file(file: str) -> str | None:
    """Return what is missing for a file of a checkout, or None."""
    if _path(file).is_file():
        return None
    address = REPOSITORIES[Path(file).parts[0]]
    return f"needs a checkout of {address} in the folder that {CHECKOUTS} names"


@functools.cache
def file_module(file: str) -> ModuleType:
    """Return the module in a file of a checkout, without the package that the file belongs to.

    It may import modules beside it.
    """
    path = _path(file).absolute()
    folder = ModuleType(str(path.parent).replace(".", "_"))
    folder.__path__ = [str(path.parent)]
    sys.modules.setdefault(folder.__name__, folder)
    return importlib.import_module(f"{folder.__name__}.{path.stem}")


def peer(name: str, *ops: str, **options: Any) -> Callable[[Any], Any]:
    """Declare that the decorated function prepares a peer of some ops."""

    def declare(prepare: Callable[..., Steps]) -> Callable[..., Steps]:
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


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    # After some recompilations torch would run the function uncompiled.
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


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
    # TorchRef misreads sigmas (P,) where P is also the number of a plane's atoms.
    groups = [(i, s[:, None].expand(i.shape).contiguous()) for i, s in _groups(problem)]
    return _steps(lambda xyz: planarity_math(xyz, groups), problem, cotangent)


def torchref_terms(like: Any, restraints: dict[str, Any]) -> Callable[[Any, Any], list[Any]]:
    """Return TorchRef's function from coordinates and B to the six terms of `geometry_nll`."""
    import torch
    from torchref.base.targets.adp import adp_simu_math
    from torchref.base.targets.angle import angle_math
    from torchref.base.targets.bond import bond_math
    from torchref.base.targets.chiral import chiral_math
    from torchref.base.targets.nonbonded import nonbonded_heavy_math
    from torchref.base.targets.torsion import torsion_omega_math
    from torchref.refinement.targets.geometry.torsions import _von_mises_nll
    from torchref.topology.restraints import Restraints

    def here(values: Any, count: int | None = None) -> Any:
        array = torch.as_tensor(values, device=like.device)
        array = array.to(like.dtype) if array.is_floating_point() else array
        return array if count is None else array.expand(count).contiguous()

    def column(kind: str, name: str) -> Any:
        return here(restraints[kind][name], len(restraints[kind]["indices"]))

    index = {kind: here(columns["indices"]) for kind, columns in restraints.items()}
    bonds, chirals = (
        [column(kind, "ideals"), column(kind, "sigmas")] for kind in ("bonds", "chirals")
    )
    angles, torsions = (
        [column(kind, "ideals"), column(kind, "sigmas")] for kind in ("angles", "torsions")
    )
    angles = [array.deg2rad() for array in angles]
    omega = column("torsions", "opposite") > 0
    omegas = index["torsions"][omega], torsions[1][omega]
    (cis,) = set(restraints["torsions"]["opposite"]) - {0}
    ideals, sigmas = torsions[0][~omega], torsions[1][~omega]
    others, periods = index["torsions"][~omega], column("torsions", "periods")[~omega]
    known = Restraints.__new__(Restraints)
    torch.nn.Module.__init__(known)
    group = {"indices": others, "references": ideals, "sigmas": sigmas, "periods": periods}
    known._entries = {"torsion": {"all": group}}
    distances, weights = column("contacts", "distances"), column("contacts", "weights")
    # The first operation is the identity, and the cell a cube of 1 Å.
    table = restraints["contacts"]["operations"]
    rotations = here(np.concatenate([np.eye(3)[None], table[:, :, :3]]))
    shifts = here(np.concatenate([np.zeros((1, 3)), table[:, :, 3]]))
    images = column("contacts", "images") + 1
    cell = here(np.eye(3))
    (sigma,) = {restraints["contacts"]["sigmas"]}
    sigma, repulsion, fourth = (
        torch.tensor(x, dtype=like.dtype, device=like.device)
        for x in (sigma, 1 / (4 * sigma**4), 4.0)
    )
    like_b = here(restraints["b_pairs"]["sigmas"])

    def terms(xyz: Any, b: Any) -> list[Any]:
        torsion = _von_mises_nll(*known.torsion_deviations_with_sigmas(xyz)).sum()
        omega = torsion_omega_math(xyz, *omegas, omegas[1] < 0, w_cis_general=cis)
        contact = nonbonded_heavy_math(
            xyz, index["contacts"], distances, images, None, rotations, shifts, cell, cell,
            repulsion, fourth, 0.0, sigma, weights,
        )  # fmt: skip
        return [
            bond_math(xyz, index["bonds"], *bonds),
            angle_math(xyz, index["angles"], *angles),
            torsion + omega,
            chiral_math(xyz, index["chirals"], *chirals),
            contact,
            adp_simu_math(b, index["b_pairs"], like_b),
        ]

    return terms


@peer("TorchRef 0.7", "geometry_nll", package="torchref.base.targets", captured=False)
def torchref_geometry(problem: Problem, cotangent: Any) -> Steps:
    import torch

    terms = torchref_terms(problem.arguments["xyz"], problem.raw["restraints"])
    return _steps(lambda xyz, b: torch.stack(terms(xyz, b)), problem, cotangent)


@peer(EMPTY, *{w.op.__name__: w for w in WORKLOADS}, captured=False, computes=False)
def nothing(problem: Problem, cotangent: Any) -> Steps:
    """An autograd.Function that computes nothing, of as many tensors as have gradients.

    For an op without gradients it takes all tensors, and has no backward.
    """
    import torch

    empty, given = empty_function(), problem.arguments
    inputs = [given[name] for name in problem.leaves] or [*filter(is_tensor, given.values())]
    steps = {FORWARD: torch.no_grad()(lambda: (empty(*inputs),))}
    if problem.leaves:
        steps[BOTH] = by_autograd(empty, inputs, torch.empty_like(inputs[0]))
    return steps


def empty_function() -> Callable[..., Any]:
    """Return an autograd.Function that saves its inputs, and gives an empty tensor like the first.

    Its backward gives one like each.
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

    return Nothing.apply


@peer("empty kernels", "planarity_nll", package="triton", devices=("cuda",), computes=False)
def launches(problem: Problem, cotangent: Any) -> Steps:
    """An autograd.Function that launches one empty kernel each way."""
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


def _activated(problem: Problem, convolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return a convolution, followed by the activation where there is one."""
    import torch

    if not problem.arguments["activation"]:
        return convolve
    return lambda *arrays: torch.nn.functional.silu(convolve(*arrays))


def _stepped(problem: Problem, step: Callable[..., Any]) -> Steps:
    """Return the steps of a step in place; states in slots are gathered before and put back."""
    import torch

    x, state, kernels = (problem.arguments[name] for name in ("x", "state", "kernels"))
    slots, turned = problem.arguments.get("slots"), _activated(problem, step)

    def run() -> tuple[Any, ...]:
        if slots is None:
            return (turned(x, state, kernels),)
        rows = state[slots]
        out = turned(x, rows, kernels)
        state[slots] = rows
        return (out,)

    return {FORWARD: torch.no_grad()(run)}


@peer("torch.compile", "dynamic_conv", quick=False, checked=False)
def shifted(problem: Problem, cotangent: Any) -> Steps:
    """The compiled sum of W shifted products; compiling takes too long to check it, too."""
    import torch

    if problem.arguments["activation"] or problem.raw["static"]:
        raise Unsuited

    def convolve(x: Any, kernels: Any) -> Any:
        width, tokens = kernels.shape[-1], x.shape[1]
        padded = torch.nn.functional.pad(x, (0, 0, width - 1, 0))
        return sum(kernels[..., w] * padded[:, w : w + tokens] for w in range(width))

    return _steps(_compiled(convolve), problem, cotangent)


@peer("torch eager", "dynamic_conv")
def unfolded(problem: Problem, cotangent: Any) -> Steps:
    """The fallback of Jet-Nemotron in plain torch, or torch's convolution by static kernels."""
    convolve = _conv1d if problem.raw["static"] else _unfolded
    return _steps(_activated(problem, convolve), problem, cotangent)


def _conv1d(x: Any, kernels: Any) -> Any:
    import torch

    padded = torch.nn.functional.pad(x.mT, (kernels.shape[-1] - 1, 0))
    return torch.nn.functional.conv1d(padded, kernels[:, None], groups=len(kernels)).mT


@peer("causal-conv1d", "dynamic_conv", package="causal_conv1d", devices=("cuda",))
def causal_conv1d(problem: Problem, cotangent: Any) -> Steps:
    """The CUDA kernels of causal-conv1d."""
    from causal_conv1d import causal_conv1d_fn

    if not problem.raw["static"]:
        raise Unsuited

    def convolve(x: Any, kernels: Any) -> Any:
        return causal_conv1d_fn(x.mT, kernels, activation=problem.arguments["activation"]).mT

    return _steps(convolve, problem, cotangent)


@peer("fla", "dynamic_conv", package="fla", devices=("cuda",))
def fla(problem: Problem, cotangent: Any) -> Steps:
    """The Triton kernels of flash-linear-attention."""
    from fla.modules.convolution import causal_conv1d

    if not problem.raw["static"]:
        raise Unsuited

    def convolve(x: Any, kernels: Any) -> Any:
        return causal_conv1d(x, kernels, activation=problem.arguments["activation"])[0]

    return _steps(convolve, problem, cotangent)


def _unfolded(x: Any, kernels: Any) -> Any:
    import torch

    padded = torch.nn.functional.pad(x, (0, 0, kernels.shape[-1] - 1, 0))
    return (padded.unfold(1, kernels.shape[-1], 1) * kernels).sum(-1)


JET = "Jet-Nemotron/jetai/modeling/hf"


@peer("Jet-Nemotron", "dynamic_conv", file=f"{JET}/dconv_fwdbwd.py", devices=("cuda",))
def jet(problem: Problem, cotangent: Any) -> Steps:
    """The Triton kernels of Jet-Nemotron, followed by torch's activation."""
    if problem.raw["static"]:
        raise Unsuited
    convolve = file_module(f"{JET}/dconv_fwdbwd.py").dynamic_conv_triton_autograd
    return _steps(_activated(problem, convolve), problem, cotangent)


def _after_a_layer(problem: Problem, convolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return a linear layer that makes kernels, and a convolution with these."""
    import torch

    width = problem.shape["W"]

    def layer(x: Any, hidden: Any, weight: Any, bias: Any) -> Any:
        kernels = torch.nn.functional.linear(hidden, weight, bias)
        return convolve(x, kernels.unflatten(-1, (-1, width)))

    return layer


@peer("a layer, then dynamic_conv", "dynamic_conv_generated")
def stored(problem: Problem, cotangent: Any) -> Steps:
    """Kernels that torch's layer stores, and our convolution with SiLU."""

    def convolve(x: Any, kernels: Any) -> Any:
        return fusedops.dynamic_conv(x, kernels, activation="silu")

    return _steps(_after_a_layer(problem, convolve), problem, cotangent)


@peer("Jet-Nemotron", "dynamic_conv_generated", file=f"{JET}/dconv_fwdbwd.py", devices=("cuda",))
def jet_layer(problem: Problem, cotangent: Any) -> Steps:
    """Kernels that torch's layer stores, Jet-Nemotron's Triton kernels, and torch's SiLU."""
    convolve = file_module(f"{JET}/dconv_fwdbwd.py").dynamic_conv_triton_autograd
    turned = _activated(problem, convolve)
    return _steps(_after_a_layer(problem, turned), problem, cotangent)


@peer("torch eager", "dynamic_conv_generated")
def unfolded_layer(problem: Problem, cotangent: Any) -> Steps:
    """Kernels that torch's layer stores, and the fallback of Jet-Nemotron in plain torch."""
    return _steps(_after_a_layer(problem, _activated(problem, _unfolded)), problem, cotangent)


@peer("torch.compile", "dynamic_conv_generated", quick=False)
def compiled_layer(problem: Problem, cotangent: Any) -> Steps:
    """The same, compiled as one function."""
    layer = _after_a_layer(problem, _activated(problem, _unfolded))
    return _steps(_compiled(layer), problem, cotangent)


@peer("Jet-Nemotron", "dynamic_conv_step", file=f"{JET}/dconv_step.py", devices=("cuda",))
def jet_step(problem: Problem, cotangent: Any) -> Steps:
    """The Triton kernel of Jet-Nemotron for a step, followed by torch's activation."""
    step = file_module(f"{JET}/dconv_step.py").causal_conv_step_triton
    return _stepped(problem, lambda x, state, kernels: step(x[:, None], state, kernels))


@peer("torch eager", "dynamic_conv_step")
def rolled(problem: Problem, cotangent: Any) -> Steps:
    """The state shifted by a token, then a sum of products."""
    import torch

    def step(x: Any, state: Any, kernels: Any) -> Any:
        state.copy_(torch.cat([state[..., 1:], x[..., None]], -1))
        return (state * kernels).sum(-1)

    return _stepped(problem, step)


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


QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"


@peer("transformers", "gated_delta_rule", package=QWEN, captured=False)
def transformers_chunks(problem: Problem, cotangent: Any) -> Steps:
    """The chunks of Qwen3-Next in plain torch, as it runs where fla can't."""
    chunks = inspect.unwrap(importlib.import_module(QWEN).torch_chunk_gated_delta_rule)
    return _steps(lambda *arrays: chunks(*arrays)[0], problem, cotangent)


@peer("transformers", "gated_delta_rule_step", package=QWEN)
def transformers_step(problem: Problem, cotangent: Any) -> Steps:
    """The recurrence of Qwen3-Next in plain torch, whose cache takes the new state."""
    import torch

    step = inspect.unwrap(importlib.import_module(QWEN).torch_recurrent_gated_delta_rule)
    *tokens, state = problem.arguments.values()

    def run() -> tuple[Any, ...]:
        given = [x[:, None] for x in tokens]
        out, new = step(*given, initial_state=state, output_final_state=True)
        state.copy_(new)
        return (out[:, 0],)

    return {FORWARD: torch.no_grad()(run)}


@peer("fla", "gated_delta_rule", package="fla", devices=("cuda",))
def fla_chunks(problem: Problem, cotangent: Any) -> Steps:
    """The Triton kernels of flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return _steps(lambda *arrays: chunk_gated_delta_rule(*arrays)[0], problem, cotangent)


def _graph(problem: Problem) -> tuple[Any, Any, int]:
    """Return the edges' sources and targets, and how many nodes there are."""
    import torch

    features = next(iter(problem.arguments.values()))
    source, target = torch.tensor(problem.raw["index"], device=features.device)
    return source, target, problem.raw["nodes"]


def _prepared(problem: Problem) -> Problem:
    """Return the problem with matrices as fairchem makes them, once for all layers of a model.

    Their rows or columns are in the order of a message, and they have its dtype.
    """
    import torch

    if problem.raw["packed"]:
        raise Unsuited
    arguments = problem.arguments
    features = next(iter(arguments.values()))
    order = torch.as_tensor(m_major_order(problem.raw["lmax"]), device=features.device)
    name = "wigner" if "wigner" in arguments else "wigner_inv"
    matrices = arguments[name].to(features.dtype)[:, order]
    if name == "wigner_inv":
        matrices = matrices.mT
    return replace(problem, arguments=arguments | {name: matrices.contiguous()})


@peer("torch eager", "node_to_edge_wigner_permute", dense=True)
def gathered(problem: Problem, cotangent: Any) -> Steps:
    """Gather, cat and bmm, as in fairchem's general backend."""
    import torch

    source, target, _ = _graph(problem)

    def turn(x: Any, wigner: Any) -> Any:
        return torch.bmm(wigner, torch.cat([x[source], x[target]], dim=2))

    return _steps(turn, _prepared(problem), cotangent)


@peer("torch eager", "permute_wigner_inv_edge_to_node", dense=True)
def summed(problem: Problem, cotangent: Any) -> Steps:
    """Products by bmm, then index_add, as in fairchem's general backend."""
    import torch

    _, target, nodes = _graph(problem)

    def turn(message: Any, wigner_inv: Any) -> Any:
        turned = torch.bmm(wigner_inv, message)
        return turned.new_zeros(nodes, *turned.shape[1:]).index_add(0, target, turned)

    return _steps(turn, _prepared(problem), cotangent)


@peer("torch eager", "permute_wigner_inv", dense=True)
def turned_back(problem: Problem, cotangent: Any) -> Steps:
    """The products by bmm alone."""
    import torch

    def turn(message: Any, wigner_inv: Any) -> Any:
        return torch.bmm(wigner_inv, message)

    return _steps(turn, _prepared(problem), cotangent)


@peer("torch eager", "edge_degree_scatter", dense=True)
def degrees(problem: Problem, cotangent: Any) -> Steps:
    """The bmm of order zero and index_add, as in fairchem's general backend."""
    import torch

    _, target, _ = _graph(problem)

    def turn(x: Any, radial: Any, wigner_inv: Any) -> Any:
        turned = torch.bmm(wigner_inv[:, :, : radial.shape[1]], radial)
        return x.index_add(0, target, turned)

    return _steps(turn, _prepared(problem), cotangent)


def _fairchem(problem: Problem) -> tuple[Any, Problem]:
    """Return the functions of fairchem's `umas_fast_gpu`, and the problem with its matrices.

    The matrices are of degree 2, and inverted for the way back.
    """
    from fairchem.core.models.uma.nn.execution_backends import UMASFastGPUBackend

    arguments = problem.arguments
    if problem.raw["lmax"] != 2:
        raise Unsuited
    if "wigner_inv" in arguments:
        arguments = arguments | {"wigner_inv": arguments["wigner_inv"].mT.contiguous()}
    return UMASFastGPUBackend, replace(problem, arguments=arguments)


@peer("fairchem", "node_to_edge_wigner_permute", package="fairchem.core", devices=("cuda",))
def fairchem_forth(problem: Problem, cotangent: Any) -> Steps:
    """The Triton kernels of fairchem, with torch's products and sums in the backward pass."""
    import torch

    functions, given = _fairchem(problem)
    edges = torch.stack(_graph(problem)[:2])

    def turn(x: Any, wigner: Any) -> Any:
        return functions.node_to_edge_wigner_permute(x, edges, wigner)

    return _steps(turn, given, cotangent)


@peer(
    "fairchem",
    "permute_wigner_inv_edge_to_node",
    package="fairchem.core",
    devices=("cuda",),
    dense=True,
)
def fairchem_back(problem: Problem, cotangent: Any) -> Steps:
    """The Triton kernels of fairchem, and index_add."""
    functions, given = _fairchem(problem)
    _, target, nodes = _graph(problem)

    def turn(message: Any, wigner_inv: Any) -> Any:
        return functions.permute_wigner_inv_edge_to_node(message, wigner_inv, target, nodes)

    return _steps(turn, given, cotangent)


@peer("fairchem", "permute_wigner_inv", package="fairchem.core", devices=("cuda",), dense=True)
def fairchem_turned(problem: Problem, cotangent: Any) -> Steps:
    """The Triton kernels of fairchem alone."""
    from fairchem.core.models.uma.triton import UMASFastGPUPermuteWignerInvEdgeToNode

    return _steps(UMASFastGPUPermuteWignerInvEdgeToNode.apply, _fairchem(problem)[1], cotangent)


@peer(
    "fairchem",
    "edge_degree_scatter",
    package="fairchem.core",
    devices=("cuda",),
    captured=False,
    dense=True,
)
def fairchem_degrees(problem: Problem, cotangent: Any) -> Steps:
    """The bmm and index_add of fairchem's `umas_fast_gpu`, which has no kernel for this."""
    functions, given = _fairchem(problem)
    _, target, _ = _graph(problem)

    def turn(x: Any, radial: Any, wigner_inv: Any) -> Any:
        _, orders, channels = radial.shape
        flat = radial.flatten(1)
        return functions.edge_degree_scatter(x, flat, wigner_inv, target, orders, channels, 1.0)

    return _steps(turn, given, cotangent)


@peer("fairchem", "wigner_d", package="fairchem.core", checked=False)
def fairchem_matrices(problem: Problem, cotangent: Any) -> Steps:
    """The matrices of fairchem and their inverses; the roll about the edge may differ from ours."""
    from fairchem.core.models.uma.common.quaternion.wigner_d_custom_kernels import (
        CustomKernelModule,
    )
    from fairchem.core.models.uma.common.quaternion.wigner_d_hybrid import axis_angle_wigner_hybrid

    given = problem.arguments
    vectors, lmax = given["edge_vec"], given["lmax"]
    options = {
        "gamma": vectors.new_zeros(len(vectors)),
        "custom_kernels": CustomKernelModule().to(vectors),
        "compact_l2": given["packed"],
    }
    return _steps(lambda x: axis_angle_wigner_hybrid(x, lmax, **options)[0], problem, cotangent)


def _orders_in_torch(problem: Problem) -> Callable[..., Any]:
    import torch

    lmax, C = problem.shape["lmax"], problem.shape["C"]

    def convolved(message: Any, *rest: Any) -> Any:
        *weights, radial = rest
        degrees = [lmax + 1 - m for m in range(lmax + 1)]
        parts = message.split([degrees[0], *(2 * n for n in degrees[1:])], 1)
        functions = radial.split([n * C for n in degrees], 1)
        results: list[Any] = []
        for x, own, weight in zip(parts, functions, weights, strict=True):
            # Rows of +m, then of -m.
            x = x.reshape(len(x), -1, own.shape[1]) * own[:, None]
            y = x @ weight.T
            if results:
                real, imaginary = y.chunk(2, -1)
                y = torch.stack([real[:, 0] - imaginary[:, 1], real[:, 1] + imaginary[:, 0]], 1)
            results.append(y.reshape(len(y), -1, problem.shape["D"]))
        return torch.cat(results, 1)

    return convolved


@peer("torch eager", "so2_convolution")
def orders(problem: Problem, cotangent: Any) -> Steps:
    """A product for every order, and sums of its real and imaginary parts, as in fairchem."""
    return _steps(_orders_in_torch(problem), problem, cotangent)


@peer("torch.compile", "so2_convolution", quick=False)
def compiled_orders(problem: Problem, cotangent: Any) -> Steps:
    """The same, compiled."""
    return _steps(_compiled(_orders_in_torch(problem)), problem, cotangent)


@peer("fairchem", "so2_convolution", package="fairchem.core")
def fairchem_convolution(problem: Problem, cotangent: Any) -> Steps:
    """The layer of fairchem's `general` mode, given radial functions."""
    import torch
    from fairchem.core.models.uma.common.so3 import CoefficientMapping
    from fairchem.core.models.uma.nn.so2_layers import SO2_Convolution

    lmax, channels, width = (problem.shape[name] for name in ("lmax", "C", "D"))
    mapping = CoefficientMapping(lmax, lmax)
    layer = SO2_Convolution(channels, width, lmax, lmax, mapping)
    names = ["fc_m0.weight", *(f"so2_m_conv.{m}.fc.weight" for m in range(lmax))]
    no_bias = {"fc_m0.bias": problem.arguments["weight_m0"].new_zeros((lmax + 1) * width)}

    def convolved(message: Any, *rest: Any) -> Any:
        *weights, radial = rest
        given = {**dict(zip(names, weights, strict=True)), **no_bias}
        return torch.func.functional_call(layer, given, (message, radial))

    return _steps(convolved, problem, cotangent)


@peer("fairchem", "gate_activation", package="fairchem.core")
def fairchem_gates(problem: Problem, cotangent: Any) -> Steps:
    """The layer of fairchem's `general` mode."""
    from fairchem.core.models.uma.nn.activation import GateActivation

    lmax, x = problem.shape["lmax"], problem.arguments["x"]
    gates = GateActivation(lmax, lmax, problem.shape["C"], m_prime=True).to(x.device)
    return _steps(gates, problem, cotangent)


def _places(problem: Problem, like: Any) -> Any:
    """Return every element's place in the map, as torch's own functions take it."""
    import torch

    if problem.raw["index"] != "int64":
        raise Unsuited
    wa, wbwc = (torch.tensor(problem.raw[name], device=like.device) for name in ("wa", "wbwc"))
    return (wa[:, :, None, None] + wbwc[:, None]).reshape(-1)


@peer("torch eager", "structured_scatter_add")
def index_added(problem: Problem, cotangent: Any) -> Steps:
    """torch's `index_add`, with its indices computed before."""
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
    """torch's `take`, with its indices computed before."""
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
    """The C++ code of TorchRef, which the first use compiles."""
    import torch
    from torchref.base.kernels.cpu_scatter import structured_scatter_add

    if problem.raw["index"] != "int64":
        raise Unsuited
    wa, wbwc = (torch.tensor(problem.raw[name]) for name in ("wa", "wbwc"))
    size = problem.raw["size"]
    return _steps(lambda x: structured_scatter_add(x, wa, wbwc, size), problem, cotangent)


def _torchref_density(problem: Problem, cotangent: Any, bits: int) -> Steps:
    """The kernels of TorchRef 0.7, called without its checks."""
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


@peer(
    "TorchRef 0.7",
    "gaussian_density",
    package="torchref.base.electron_density.kernels.cuda.variable_radius",
    devices=("cuda",),
)
def torchref_triton(problem: Problem, cotangent: Any) -> Steps:
    """The Triton kernels of TorchRef, with our radii."""
    import torch
    from torchref.base.electron_density.kernels.cuda import variable_radius as kernels

    given = problem.arguments
    xyz, radius, shape = given["xyz"], given["radius"], given["cell"].shape
    cell = torch.tensor(problem.raw["cell"], device=xyz.device, dtype=xyz.dtype)
    fixed = given["amplitudes"], given["widths"], torch.linalg.inv(cell), cell, radius
    anisotropic = given["b"].ndim == 2
    add = kernels.add_anisotropic_cuda_var if anisotropic else kernels.add_isotropic_cuda_var

    def density(xyz: Any, b: Any, occupancy: Any) -> Any:
        return add(xyz.new_zeros(shape), xyz, b, occupancy, *fixed)

    return _steps(density, problem, cotangent)


@peer("gemmi", "gaussian_density", package="gemmi", devices=("cpu",), tensors=False)
def gemmi(problem: Problem, cotangent: Any) -> Steps:
    """The density calculator of gemmi, on the atoms of a structure, without a gradient."""
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

        def linear(x: Any, name: str) -> Any:
            return F.linear(x, p[f"{name}_weight"], p.get(f"{name}_bias"))

        sides = linear(n, "p_in") * linear(n, "g_in").sigmoid()
        left, right = sides.chunk(2, -1)
        o = torch.einsum("bikh,bjkh->bijh", left, right)
        o = F.layer_norm(o, o.shape[-1:], p["norm_out_weight"], p["norm_out_bias"])
        s = linear(n, "g_out").sigmoid()
        if given["gate"] == "output":
            return linear(o, "p_out") * s
        return linear(o * s, "p_out")

    return update


def _steps_with_products(update: Callable[..., Any], problem: Problem, cotangent: Any) -> Steps:
    """Return the steps of an update by autocast, or TF32, where the problem has such products."""
    import torch

    precision, device = problem.arguments["precision"], problem.arguments["x"].device.type
    if precision in ("fp16", "bf16"):
        kind = torch.float16 if precision == "fp16" else torch.bfloat16
        update = torch.autocast(device, kind)(update)
    steps = _steps(update, problem, cotangent)
    if precision != "tf32":
        return steps

    def in_tf32(step: Callable[[], Any]) -> Any:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return step()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return {name: functools.partial(in_tf32, step) for name, step in steps.items()}


@peer("torch eager", "triangle_multiplicative_update")
def gated(problem: Problem, cotangent: Any) -> Steps:
    """The formula as folding models write it, with autocast or TF32 where they have it."""
    return _steps_with_products(_gated_in_torch(problem), problem, cotangent)


@peer("torch.compile", "triangle_multiplicative_update", quick=False)
def compiled_update(problem: Problem, cotangent: Any) -> Steps:
    """The same, compiled, which takes too long for more problems than the ones in float32."""
    if problem.arguments["precision"] or dtype_name(problem.arguments["x"].dtype) != "float32":
        raise Unsuited
    return _steps(_compiled(_gated_in_torch(problem)), problem, cotangent)


DISCOVER = "discover/results/kernel-engineering/trimul.py"


@peer("TTT-Discover", "triangle_multiplicative_update", file=DISCOVER, devices=("cuda",))
def discover(problem: Problem, cotangent: Any) -> Steps:
    """The kernels of `discover` for the GPU MODE contest, without a gradient."""
    import torch

    given = problem.arguments
    if given["precision"] != "fp16" or given["gate"] != "hidden":
        raise Unsuited
    run = file_module(DISCOVER).custom_kernel
    weights = {"to_out.weight": given["p_out_weight"], "out_gate.weight": given["g_out_weight"]}
    for theirs, ours in (("norm", "norm_in"), ("to_out_norm", "norm_out")):
        for kind in ("weight", "bias"):
            weights[f"{theirs}.{kind}"] = given[f"{ours}_{kind}"]
    for theirs, ours in (("proj", "p_in"), ("gate", "g_in")):
        left, right = given[f"{ours}_weight"].chunk(2)
        weights |= {f"left_{theirs}.weight": left, f"right_{theirs}.weight": right}
    channels, hidden = given["p_out_weight"].shape
    data = given["x"], None, weights, {"dim": channels, "hidden_dim": hidden, "nomask": True}
    return {FORWARD: torch.no_grad()(lambda: (run(data),))}


@peer(
    "cuEquivariance",
    "triangle_multiplicative_update",
    package="cuequivariance_torch",
    devices=("cuda",),
    quick=False,
)
def cuequivariance(problem: Problem, cotangent: Any) -> Steps:
    from cuequivariance_torch import triangle_multiplicative_update

    if problem.arguments["gate"] != "output":
        raise Unsuited

    def update(*values: Any) -> Any:
        return triangle_multiplicative_update(**dict(zip(problem.leaves, values, strict=True)))

    return _steps_with_products(update, problem, cotangent)


@peer("torch SDPA", "triangle_attention")
def sdpa(problem: Problem, cotangent: Any) -> Steps:
    """Torch's attention, with the bias as a mask that rows share."""
    from torch.nn import functional as F

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        rows = q.shape[:2]
        q, k, v = (x.transpose(2, 3).flatten(0, 1) for x in (q, k, v))
        shared = bias.unsqueeze(1).expand(-1, rows[1], -1, -1, -1).flatten(0, 1)
        out = F.scaled_dot_product_attention(q, k, v, shared)
        return out.unflatten(0, rows).transpose(2, 3)

    return _steps(attend, problem, cotangent)


@peer(
    "cuEquivariance",
    "triangle_attention",
    package="cuequivariance_torch",
    devices=("cuda",),
    quick=False,
)
def cuequivariance_attention(problem: Problem, cotangent: Any) -> Steps:
    from cuequivariance_torch import triangle_attention

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        rows = (x.transpose(2, 3) for x in (q, k, v))
        # Its kernels for GPUs before Blackwell convert another bias, and warn of it.
        return triangle_attention(*rows, bias.unsqueeze(1).float()).transpose(2, 3)

    return _steps(attend, problem, cotangent)


def versions() -> dict[str, str]:
    """Return the versions of the peers' packages that are installed."""
    found = {}
    for package in (
        "torchref",
        "torchref-kernels",
        "gemmi",
        "cuequivariance-torch",
        # Its kernels, for CUDA 12 or 13.
        "cuequivariance-ops-torch-cu12",
        "cuequivariance-ops-torch-cu13",
        "fairchem-core",
        # Nitro's kernels for Hopper.
        "nvidia-cutlass-dsl",
        "fla-core",
        "causal-conv1d",
    ):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
