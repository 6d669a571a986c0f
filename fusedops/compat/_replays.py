"""TorchRef's losses by CUDA graphs while an optimizer runs: replays, which the host only starts.

An optimizer asks for the loss some dozen times, and changes nothing but its parameters between. The
first evaluation is TorchRef's own: it fills the caches of all that follows from other tensors. The
second is captured, gradients included, and replayed from then on.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch


class _Evaluations:
    """The evaluations of a loss while one optimizer runs."""

    refused = False

    def __init__(self, state: Any, parameters: list[Any]) -> None:
        self.state, self.parameters, self.turn = state, parameters, 0
        self.forget()

    def forget(self) -> None:
        """Drop the graph: a call without gradients replaces results that the graph reads."""
        self.setting: Any = None
        self.versions: list[int] = []
        self.graph: Any = None

    def loss(self) -> Any:
        """Return the loss by a graph, or NotImplemented for an evaluation that TorchRef serves."""
        leaves = [p for p in self.parameters if p.requires_grad]
        weights = {name: self.state.get_effective_weight(name) for name in self.state.targets}
        setting = weights, list(self.state.targets.values()), [p.data_ptr() for p in leaves]
        versions = [p._version for p in leaves]
        if self.refused or setting != self.setting:
            self.forget()
            self.setting, self.versions = setting, versions
            return NotImplemented
        if self.graph is None:
            # TorchRef's caches would serve results for a parameter that has not changed since.
            if any([new == old for new, old in zip(versions, self.versions, strict=True)]):
                return NotImplemented
            try:
                self._capture(leaves, weights)
            except RuntimeError as error:
                _Evaluations.refused = True
                warnings.warn(
                    f"LossState: losses are evaluated without a CUDA graph from now on: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return NotImplemented
        return _Replay.apply(self, *leaves)

    def _capture(self, leaves: list[Any], weights: dict[str, float]) -> None:
        state, dtype = self.state, sys.modules["torchref.config"].get_float_dtype()
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(leaves[0].device)
        aside, keeper = _pool(leaves[0].device)
        aside.wait_stream(here)
        _renew(leaves)
        with torch.cuda.stream(aside):
            graph.capture_begin(keeper.pool())
            try:
                total = torch.zeros((), dtype=dtype, device=leaves[0].device)
                losses = {name: state.targets[name]() for name, w in weights.items() if w != 0.0}
                for name, loss in losses.items():
                    total = total + weights[name] * loss
                self.gradients = torch.autograd.grad(total, leaves, allow_unused=True)
            finally:
                graph.capture_end()
        here.wait_stream(aside)
        _renew(leaves)
        self.graph, self.total = graph, total.detach()
        self.losses = {name: loss.detach() for name, loss in losses.items()}


def _renew(leaves: list[Any]) -> None:
    """Give leaves new nodes for their gradients: a node that lives on keeps its first stream."""
    for leaf in leaves:
        data = leaf.data
        leaf.data = data.to(torch.float32 if data.dtype == torch.float64 else torch.float64)
        leaf.data = data


@functools.cache
def _pool(device: Any) -> tuple[Any, Any]:
    """Return a stream for captures, and a graph that keeps the memory of all later ones."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.zeros((), device=device)
    return stream, graph


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: _Evaluations, *leaves: Any) -> Any:
        of.graph.replay()
        of.turn += 1
        of.state._losses.clear()
        of.state._losses.update(of.losses)
        ctx.of, ctx.turn, ctx.gradients = of, of.turn, of.gradients
        return of.total.clone()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "LossState.aggregate: a loss by a CUDA graph has no second derivatives; call "
                "fusedops.compat.torchref.unregister() for them"
            )
        if ctx.turn != ctx.of.turn:
            raise RuntimeError(
                "LossState.aggregate: backward of a loss before the last; its gradients are gone, "
                "as a later evaluation took their place"
            )
        return None, *[None if dx is None else dx * dy for dx in ctx.gradients]


# By the id of a LossState, which has no hash, while an optimizer runs.
_running: dict[int, _Evaluations] = {}


def run(
    state: Any,
    optimizer: Any,
    log: Any = False,
    nsteps: int = 1,
    *,
    context: str = "loss_state.step",
) -> Any:
    """Run an optimizer, whose closure asks for losses by `aggregate`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if id(state) in _running or not parameters or not all([p.is_cuda for p in parameters]):
        return NotImplemented
    theirs: Any = sys.modules["torchref.refinement.loss_state"].LossState.run
    _running[id(state)] = _Evaluations(state, parameters)
    try:
        return theirs.theirs(state, optimizer, log, nsteps, context=context)
    finally:
        del _running[id(state)]


def aggregate(state: Any, log_values: bool = False) -> Any:
    """Return the weighted sum of losses, of a running optimizer's by a graph."""
    evaluations = _running.get(id(state))
    if evaluations is None:
        return NotImplemented
    if log_values or not torch.is_grad_enabled():
        evaluations.forget()
        return NotImplemented
    return evaluations.loss()
