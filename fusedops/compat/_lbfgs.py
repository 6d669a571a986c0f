"""torch's L-BFGS for losses by CUDA graphs: a wait for the GPU a loss, and one an iteration.

Steps and line search are `torch.optim.LBFGS`'s, whose two loops make a product, and wait for it,
for each of the steps that they remember. Here the products of an iteration are made at once, and
the loops run on them in float64 (Byrd, Nocedal and Schnabel, Math. Program. 63, 129).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import fusedops._frame.needs_torch  # noqa: F401

import numpy as np
import torch

from fusedops._frame.torch_private import private

#: Torch's least product of a step and a change of the gradient that is remembered.
_LEAST_CURVATURE = 1e-10


class _Value(NamedTuple):
    """A gradient, its product with the direction, and the largest magnitudes of both."""

    gradient: Any
    slope: float
    most: float
    longest: float

    # Torch's line search asks for the product of a gradient, and for copies.
    def dot(self, direction: Any) -> Any:
        return torch.tensor(self.slope, dtype=torch.float64)

    def clone(self, memory_format: Any = None) -> _Value:
        return self


class _History:
    """Steps s and changes y of the gradient, oldest first, with all their products."""

    def __init__(self, like: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Take the history in an optimizer's state, with room for another step's."""
        most = group["history_size"]
        pairs = [(state.get(name) or [])[-most:] for name in ("old_stps", "old_dirs")]
        self.used = len(pairs[0])
        self.size = min(most, self.used + group["max_iter"])
        #: The gradient, steps, and changes; the last places are for a pair that may be dropped.
        self.rows = like.new_zeros(3 + 2 * self.size, len(like))
        self.products = np.zeros((len(self.rows), len(self.rows)))
        #: The first inverse Hessian is a multiple of 1.
        self.scale = float(state.get("H_diag", 1.0))
        if self.used:
            self._put([*np.concatenate(self._places())], [*pairs[0], *pairs[1]])

    def state(self) -> dict[str, Any]:
        """Return what an optimizer's state has of it."""
        s, y = self._places()
        ro = 1 / self.products[s, y]
        pairs = {"old_stps": [*self.rows[s]], "old_dirs": [*self.rows[y]]}
        return {**pairs, "ro": ro.tolist(), "H_diag": self.scale}

    def _places(self) -> tuple[Any, Any]:
        """Return the rows of steps and of changes."""
        s = np.arange(1, 1 + self.used)
        return s, s + self.size + 1

    def _put(self, places: list[int], rows: list[Any]) -> None:
        for place, row in zip(places, rows, strict=True):
            self.rows[place] = row
        # One product of matrices might be of TF32.
        found = torch.stack([torch.mv(self.rows, self.rows[place]) for place in places])
        self.products[places] = found.tolist()
        self.products[:, places] = self.products[places].T

    def note(self, gradient: Any, step: Any, change: Any) -> None:
        """Take a gradient, and a pair if the curvature along the step is positive."""
        _, s, y = places = [0, 1 + self.used, 2 + self.size + self.used]
        self._put(places, [gradient, step, change])
        if not self.products[s, y] > _LEAST_CURVATURE:
            for place in (s, y):
                self.rows[place] = 0
                self.products[place] = self.products[:, place] = 0
            return
        self.used += 1
        self.scale = float(self.products[s, y] / self.products[y, y])
        if self.used > self.size:
            later = np.r_[2 : 2 + self.size, 1]
            kept = np.r_[0, later, later + self.size + 1]
            self.rows, self.products = self.rows[kept], self.products[np.ix_(kept, kept)]
            self.used = self.size

    def direction(self, out: Any) -> float:
        """Write the direction, and return its product with the gradient."""
        s, y = self._places()
        sy, yy = (self.products[np.ix_(rows, y)] for rows in (s, y))
        sg, yg = self.products[s, 0], self.products[y, 0]
        # Each of L-BFGS' two loops solves a triangular system.
        R = np.triu(sy)
        alpha = -np.linalg.solve(R, sg)
        by_s = np.linalg.solve(R.T, R.diagonal() * alpha + self.scale * (yg + yy @ alpha))
        shares = np.zeros(len(self.products))
        shares[0], shares[s], shares[y] = -self.scale, by_s, -self.scale * alpha
        torch.mv(self.rows.T, torch.from_numpy(shares).to(out), out=out)
        return float(shares @ self.products[0])


def serves(optimizer: Any) -> bool:
    """Return whether steps of an optimizer can be ours."""
    if type(optimizer) is not torch.optim.LBFGS or "step" in vars(optimizer):
        return False
    kinds = {(p.device, p.dtype) for group in optimizer.param_groups for p in group["params"]}
    return (
        [group["line_search_fn"] for group in optimizer.param_groups] == ["strong_wolfe"]
        and len(kinds) == 1
        and all([dtype.is_floating_point for _, dtype in kinds])
        and private().strong_wolfe is not None
    )


def step_by(optimizer: Any, evaluations: Any) -> Callable[[Any], Any]:
    """Return a step of an optimizer, with its hooks, whose evaluations may be replays."""

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def step(optimizer: Any, closure: Any) -> Any:
        return _step(optimizer, torch.enable_grad()(closure), evaluations)

    return functools.partial(step, optimizer)


def _step(optimizer: Any, closure: Any, evaluations: Any) -> Any:
    """Take a step; gradients are then the accepted point's, not those of the last one tried."""
    (group,) = optimizer.param_groups
    leaves, lr, tolerance = group["params"], float(group["lr"]), group["tolerance_change"]
    state = optimizer.state[leaves[0]]
    sizes, direction = [p.numel() for p in leaves], evaluations.direction
    ahead = [part.view_as(p) for part, p in zip(direction.split(sizes), leaves, strict=True)]
    direction.zero_()
    evaluations.check()

    def read(gradient: Any, report: Any) -> tuple[float, _Value]:
        loss, *numbers = report.tolist()
        return loss, _Value(gradient, *numbers)

    def evaluate() -> tuple[float, _Value]:
        replayed = evaluations.again()
        if replayed is not None:
            loss, value = read(*replayed)
            if math.isfinite(loss) and math.isfinite(value.most):
                evaluations.latest = loss
                return loss, value
        # A loss that isn't finite is TorchRef's to tell and to reject.
        loss, value = read(*evaluations.reported(closure(), lambda p: p.grad))
        if math.isfinite(loss):
            evaluations.latest = None
        return loss, value

    def move(start: list[Any], t: float) -> None:
        for p, at, by in zip(leaves, start, ahead, strict=True):
            torch.add(at, by, alpha=t, out=p)

    def along(start: list[Any], t: Any, _: Any) -> tuple[float, _Value]:
        move(start, float(t))
        return evaluate()

    loss, value = evaluate()
    first, evaluated, most = direction.new_tensor(loss), 1, group["max_eval"]
    history, n = _History(value.gradient, state, group), state.get("n_iter", 0)
    last, done = n + group["max_iter"], value.most <= group["tolerance_grad"]
    d, t, before, loss_before = (
        state.get(name) for name in ("d", "t", "prev_flat_grad", "prev_loss")
    )
    while n < last and not done:
        n += 1
        if n == 1:
            torch.neg(value.gradient, out=direction)
            slope = float(direction.dot(value.gradient))
            t = min(1.0, 1.0 / float(value.gradient.abs().sum())) * lr
        else:
            history.note(value.gradient, d * t, value.gradient - before)
            slope, t = history.direction(direction), lr
        d, before, loss_before = direction.clone(), value.gradient, loss
        if slope > -tolerance:
            break
        start = [p.clone() for p in leaves]
        given = along, start, t, direction, loss, value, slope
        loss, value, t, count = private().strong_wolfe(*given, max_ls=most - evaluated)
        t = float(t)
        move(start, t)
        evaluated += count
        still = abs(loss - loss_before) < tolerance or value.longest * t <= tolerance
        done = evaluated >= most or value.most <= group["tolerance_grad"] or still
    state.update(n_iter=n, func_evals=state.get("func_evals", 0) + evaluated)
    if d is not None:
        state.update(history.state(), d=d, t=t, prev_flat_grad=before, prev_loss=loss_before)
    for p, dx in zip(leaves, value.gradient.split(sizes), strict=True):
        if p.grad is not None:
            p.grad.copy_(dx.view_as(p))
    return first
