"""TorchRef's losses by CUDA graphs while an optimizer runs: replays, which the host only starts.

An optimizer asks for the loss some dozen times, and changes nothing but its parameters between. The
first evaluation is TorchRef's own: it makes all that is kept for later ones. The next is captured,
gradients included, and replayed from then on. Losses of a new kind are evaluated once more before,
to see whether the host waits for the GPU, which no graph holds.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops.compat import _lbfgs
from fusedops.compat._graphs import captured, capturing
from fusedops.compat._refinement import keeps, unserved

#: Kinds of losses, and whether a graph holds them.
_held: dict[Any, bool] = {}


class _Evaluations:
    """The evaluations of a loss while one optimizer runs."""

    def __init__(self, state: Any, optimizer: Any) -> None:
        self.state, self.groups = state, optimizer.param_groups
        #: The direction in which an optimizer of ours moves all parameters.
        self.direction: Any = None
        #: The loss of the last replay that its step accepted, if no closure followed.
        self.latest: float | None = None
        # A loss that outlives the run holds this list, and not the graph.
        self.turn = [0]
        self.versions: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Drop the graph: a call without gradients replaces results that it reads."""
        self.setting: Any = None
        self.graph: Any = None
        self.total: Any = None
        self.losses: dict[str, Any] = {}
        self.gradients: Any = ()
        self.report: Any = None

    def _now(self) -> tuple[list[Any], dict[str, float], Any]:
        """Return the leaves, the weights, and all that a graph follows from but their values."""
        targets = self.state.targets
        leaves = [p for p in _parameters(self.groups) if p.requires_grad]
        weights = {name: self.state.get_effective_weight(name) for name in targets}
        places = [(p.device, p.data_ptr(), _is_hooked(p)) for p in leaves]
        return leaves, weights, (weights, list(targets.values()), places)

    def check(self) -> None:
        """Drop the graph if it would no longer be the loss."""
        if self.graph is not None and self._now()[2] != self.setting:
            self.forget()

    def again(self) -> Any:
        """Replay the loss in an optimizer's step: return `reported`, or None without a graph."""
        if self.graph is None:
            return None
        self.graph.replay()
        self.turn[0] += 1
        gradient, report = self.report
        return gradient.clone(), report

    def reported(self, loss: Any, gradient_of: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the gradient by all parameters, and its report.

        A report has the loss, the product of gradient and direction, and their largest magnitudes.
        """
        found = [(p, gradient_of(p)) for p in _parameters(self.groups)]
        ahead = self.direction
        gradient = torch.cat(
            [torch.zeros_like(p.flatten()) if dx is None else dx.flatten() for p, dx in found]
        )
        numbers = loss.detach(), gradient.dot(ahead), gradient.abs().max(), ahead.abs().max()
        return gradient, torch.stack([number.double() for number in numbers])

    def loss(self) -> Any:
        """Return the loss, or NotImplemented for an evaluation that TorchRef serves."""
        state, targets = self.state, self.state.targets
        leaves, weights, setting = self._now()
        before, self.versions = self.versions, [p._version for p in leaves]
        if setting != self.setting:
            self.forget()
            self.setting = setting
            return NotImplemented
        if self.graph is None:
            kind = tuple([(name, type(target).__qualname__) for name, target in targets.items()])
            kind += tuple([p.shape for p in leaves])
            # TorchRef keeps results of a parameter that hasn't changed since. The gradient of a
            # parameter with hooks would pass through them twice.
            stays = any([new == old for new, old in zip(self.versions, before, strict=True)])
            if stays or _held.get(kind) is False or any(map(_is_hooked, leaves)):
                return NotImplemented
            # All is made anew: one target may replace what another one reads.
            state.reset_caches()
            if kind not in _held:
                _held[kind] = self._is_held(leaves, weights)
            else:
                try:
                    self._capture(leaves, weights)
                except BaseException as error:
                    _held[kind] = False
                    self._discard(leaves)
                    if not isinstance(error, RuntimeError):
                        raise
                    _tell(f"capturing failed: {error}")
                    return NotImplemented
        if self.graph is not None:
            self.graph.replay()
        self.turn[0] += 1
        state._losses.clear()
        state._losses.update(self.losses)
        return _Loss.apply(self, *leaves)

    def _evaluate(self, leaves: list[Any], weights: dict[str, float]) -> None:
        """Evaluate the loss, its terms and its gradients."""
        dtype, targets = sys.modules["torchref.config"].get_float_dtype(), self.state.targets
        total = torch.zeros((), dtype=dtype, device=leaves[0].device)
        losses = {name: targets[name]() for name, weight in weights.items() if weight != 0.0}
        for name, loss in losses.items():
            total = total + weights[name] * loss
        self.gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        self.total = total.detach()
        if self.direction is not None:
            by_leaf = dict(zip(leaves, self.gradients, strict=True))
            self.report = self.reported(total, by_leaf.get)
        self.losses = {name: loss.detach() for name, loss in losses.items()}

    def _is_held(self, leaves: list[Any], weights: dict[str, float]) -> bool:
        """Evaluate the loss, and return whether the host didn't wait for the GPU."""
        before, waits = torch.cuda.get_sync_debug_mode(), False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._evaluate(leaves, weights)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for one in caught:
            if "synchronizing CUDA operation" in str(one.message):
                waits = True
            elif "Synchronization debug mode" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if waits:
            _tell("the host waits for the GPU in one of them")
        return not waits

    def _capture(self, leaves: list[Any], weights: dict[str, float]) -> None:
        _renew(leaves)
        graph, _ = captured(lambda: self._evaluate(leaves, weights), leaves[0].device)
        _renew(leaves)
        self.graph = graph

    def _discard(self, leaves: list[Any]) -> None:
        """Let nobody keep results of a capture that failed, which were never computed."""
        self.forget()
        self.state.reset_caches()
        with torch.no_grad():
            for leaf in leaves:
                leaf.mul_(1)
        _renew(leaves)


def _parameters(groups: list[dict[str, Any]]) -> list[Any]:
    return [p for group in groups for p in group["params"]]


def _is_hooked(p: Any) -> bool:
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def _tell(why: str) -> None:
    warnings.warn(
        f"LossState: such losses are evaluated without a CUDA graph: {why}",
        RuntimeWarning,
        stacklevel=4,
    )


def _renew(leaves: list[Any]) -> None:
    """Give leaves new nodes for their gradients: a node that lives on keeps its first stream."""
    for leaf in leaves:
        data = leaf.data
        leaf.data = data.to(torch.float32 if data.dtype == torch.float64 else torch.float64)
        leaf.data = data


class _Loss(torch.autograd.Function):
    """A loss whose gradients are there."""

    @staticmethod
    def forward(ctx: Any, of: _Evaluations, *leaves: Any) -> Any:
        ctx.now, ctx.turn, ctx.gradients = of.turn, of.turn[0], of.gradients
        return of.total.clone()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "LossState.aggregate: a loss by a CUDA graph has no second derivatives; call "
                "fusedops.compat.torchref.unregister() for them"
            )
        if ctx.turn != ctx.now[0]:
            raise RuntimeError(
                "LossState.aggregate: backward of a loss before the last; its gradients are gone, "
                "as a later evaluation took their place"
            )
        return None, *[None if dx is None else dx * dy for dx in ctx.gradients]


# By the id of a LossState, which has no hash, while an optimizer runs, or of another owner: graphs
# share memory, so only one at a time has them.
_running: dict[int, Any] = {}


@contextlib.contextmanager
def only_owner(key: int, owner: Any) -> Iterator[bool]:
    """Yield whether an owner may have graphs that share memory, and keep others from it."""
    with capturing:
        alone = not _running
        if alone:
            _running[key] = owner
    try:
        yield alone
    finally:
        if alone:
            _running.pop(key, None)


def run(
    state: Any,
    optimizer: Any,
    log: Any = False,
    nsteps: int = 1,
    *,
    context: str = "loss_state.step",
) -> Any:
    """Run an optimizer, whose closure asks for losses by `aggregate`."""
    parameters = _parameters(optimizer.param_groups)
    served = _on_gpu(parameters) and keeps() and not unserved()
    # An optimizer that runs within another one's step has other parameters.
    outer = _running.pop(id(state), None)
    if outer is None and not served:
        return NotImplemented
    kind = sys.modules["torchref.refinement.loss_state"].LossState
    theirs: Any = getattr(kind.run, "theirs", kind.run)
    theirs = functools.partial(theirs, state, optimizer, log, nsteps)
    if outer is not None:
        try:
            return theirs(context=context)
        finally:
            outer.forget()
            _running[id(state)] = outer
    evaluations = _Evaluations(state, optimizer)
    with only_owner(id(state), evaluations) as alone:
        if not alone:
            return NotImplemented
        try:
            # A replay within a step would lack what another `aggregate` adds.
            whole = getattr(state.aggregate, "__func__", None) is kind.aggregate
            if whole and _lbfgs.serves(optimizer):
                evaluations.direction = torch.cat([p.detach().flatten() for p in parameters])
                optimizer.step = _lbfgs.step_by(optimizer, evaluations)
            found = theirs(context=context)
        finally:
            evaluations.forget()
            if evaluations.direction is not None:
                vars(optimizer).pop("step", None)
    if evaluations.latest is None:
        return found
    dtype = sys.modules["torchref.config"].get_float_dtype()
    return torch.tensor(evaluations.latest, dtype=dtype, device=parameters[0].device)


def _on_gpu(parameters: list[Any]) -> bool:
    devices = {p.device for p in parameters}
    return len(devices) == 1 and devices.pop().type == "cuda"


def aggregate(state: Any, log_values: bool = False) -> Any:
    """Return the weighted sum of losses, of a running optimizer's by a graph.

    The terms in ``_losses`` have no gradients then, and change with the next evaluation.
    """
    evaluations = _running.get(id(state))
    if evaluations is None:
        return NotImplemented
    if log_values or not torch.is_grad_enabled():
        evaluations.forget()
        return NotImplemented
    return evaluations.loss()


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "LossState.run": ("torchref.refinement.loss_state", run),
    "LossState.aggregate": ("torchref.refinement.loss_state", aggregate),
}
