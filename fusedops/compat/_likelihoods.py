"""TorchRef 0.7's likelihood of amplitudes, and the errors of a model that it follows from.

An acentric amplitude has Rice's distribution about the model's, and a centric one a folded normal
distribution (Read, Acta Cryst. A 42, 140).
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops._frame.bridge.modes import has_tangent
from fusedops.compat._graphs import Replayed
from fusedops.compat._refinement import unserved

_TINY, _MOST_BESSEL, _MOST_EXPONENT = 1e-12, 1e6, 80.0


class _Likelihood(torch.autograd.Function):
    """Negative log-likelihoods, with the derivative by the model's amplitudes."""

    @staticmethod
    def forward(ctx: Any, F: Any, observed: Any, variance: Any, centric: Any, theirs: Any) -> Any:
        size, weight = F.abs(), variance.clamp(min=sys.modules[_LIKELIHOODS].VAR_FLOOR).reciprocal()
        scaled = observed * weight
        product = size * scaled
        twice = 2 * product
        z = twice.clamp(max=_MOST_BESSEL)
        i0 = torch.special.i0e(z)
        decay = torch.exp(-twice.clamp(-_MOST_EXPONENT, _MOST_EXPONENT))
        inner = torch.where(centric, (1 + decay) / 2, i0) + _TINY
        scale = torch.where(centric, 2 / math.pi * weight, 2 * scaled) + _TINY
        share = torch.where(centric, 0.5, 1.0).to(F.dtype)
        squares = torch.addcmul(observed * scaled, size * size, weight)
        nll = share * (squares - scale.log()) - inner.log() - torch.where(centric, product, z)
        if ctx.needs_input_grad[0]:
            # The derivatives of TorchRef's clamps end where its values do.
            bessel = (torch.special.i1e(z) - i0 * z.sgn()) / inner + 1
            bessel = 2 * bessel * (twice <= _MOST_BESSEL)
            cosh = 1 - decay / inner * (twice.abs() <= _MOST_EXPONENT)
            slope = 2 * share * size * weight - scaled * torch.where(centric, cosh, bessel)
            ctx.save_for_backward(F, observed, variance, centric, slope * F.sgn())
            ctx.theirs = theirs
        return nll

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        F, *others, slope = ctx.saved_tensors
        if torch.is_grad_enabled():
            with torch.enable_grad():
                y = ctx.theirs(others[0], F, *others[1:])
            (dF,) = torch.autograd.grad(y, F, dy, create_graph=True)
        else:
            dF = dy * slope
        return dF, None, None, None, None


def likelihoods(F_obs: Any, F_calc: Any, Sigma: Any, centric_flags: Any, *, theirs: Any) -> Any:
    """Return the negative log-likelihood of each amplitude."""
    of = F_obs, Sigma
    if (
        unserved()
        or has_tangent((F_obs, F_calc, Sigma))
        or centric_flags is None
        or any([x.requires_grad or x.dtype != F_calc.dtype for x in of])
        or any([x.shape != F_calc.shape for x in (*of, centric_flags)])
        or not F_calc.is_floating_point()
    ):
        return NotImplemented
    return _Likelihood.apply(F_calc, F_obs, Sigma, centric_flags, theirs)


def shell_sums(x: Any, lengths: Any) -> Any:
    """Return sums over shells, whose lengths are read from the device at once."""
    if not isinstance(lengths, torch.Tensor):
        return NotImplemented
    index, mask = _layout(lengths, x)
    return (x[..., index] * mask).sum(-1)


def _layout(lengths: Any, like: Any) -> tuple[Any, Any]:
    """Return the places of each shell, filled up, and 1 for those that are not fill."""
    device = str(like.device)
    index, mask = sys.modules[_ERRORS]._segment_layout(tuple(lengths.tolist()), device)
    return index, mask.to(like.dtype)


def error_variances(
    fo: Any,
    fc: Any,
    cen: Any,
    eps: Any,
    seg_lengths: Any,
    seg: Any,
    Sigma_N: Any,
    S2: Any,
    ratio: Any,
    v_min: float,
    n_grid: int,
    n_stages: int,
) -> Any:
    """Return the likeliest 1 - σ_A² of each shell on TorchRef's nested grids, and its objective.

    The first of a grid's least values is found at once, where TorchRef takes them in turn.
    """
    index, mask = _layout(seg_lengths, fo)
    inputs = fo, fc, cen, eps, seg, Sigma_N, S2, ratio, index, mask
    options = v_min, n_grid, n_stages
    if not fo.is_cuda or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _searched(inputs, _ladders(Sigma_N, *options), v_min)
    kinds = tuple([(x.shape, x.dtype, x.device) for x in inputs])
    # A graph's inputs are those of one stream's work at a time.
    return _searches(kinds, options, torch.cuda.current_stream(fo.device).cuda_stream)(inputs)


def _ladders(like: Any, v_min: float, count: int, stages: int) -> list[Any]:
    """Return the factors of each stage's grid, about the best value of the stage before."""
    span = 1 / max(v_min, 1e-12)
    step = span ** (1 / (count - 1))
    ratios = [step]
    for _ in range(stages - 1):
        ratios.append(ratios[-1] ** (2 / (count - 1)))
    make = sys.modules[_ERRORS]._grid_ladder
    first, *others = (make(count, ratio, like.device, like.dtype)[:, None] for ratio in ratios)
    return [v_min * first * span**0.5, *others]


@functools.lru_cache(maxsize=4)
def _searches(kinds: Any, options: Any, stream: int) -> Callable[[Any], tuple[Any, Any]]:
    """Return a search by a CUDA graph, for inputs of some kinds."""
    inputs = tuple([torch.zeros(shape, dtype=dtype, device=of) for shape, dtype, of in kinds])
    ladders, lock = _ladders(inputs[5], *options), threading.Lock()
    compute = functools.partial(_searched, inputs, ladders, options[0])
    replayed = Replayed(compute, inputs[0].device, shares=False)

    def search(given: Any) -> tuple[Any, Any]:
        with lock:
            torch._foreach_copy_(inputs, given)
            best, least = replayed()
            return best.clone(), least.clone()

    return search


def _searched(inputs: Any, ladders: list[Any], v_min: float) -> tuple[Any, Any]:
    theirs = sys.modules[_ERRORS]
    fo, fc, cen, eps, seg, Sigma_N, S2, ratio, index, mask = inputs
    coupling = ratio.clamp(max=theirs.RATIO_MAX).sqrt()
    least, best = torch.full_like(Sigma_N, math.inf), torch.ones_like(Sigma_N)
    last = len(ladders[0]) - 1
    places = torch.arange(last + 1, device=Sigma_N.device)[:, None]
    for ladder in ladders:
        # The first grid is about 1, which is the best value so far.
        v = (best * ladder).clamp(v_min, 1)
        mean = (1 - v).clamp(0, 1).sqrt() * coupling
        variance = eps * (v * Sigma_N + S2)[:, seg]
        nll = theirs._rice_nll_reduced(fo[None], mean[:, seg] * fc, variance, cen[None])
        nll = torch.where(nll.isfinite(), nll, 1e30)
        sums = (nll[:, index] * mask).sum(-1)
        sums = torch.where(sums.isfinite(), sums, math.inf)
        found = sums.amin(0)
        # Whether argmin finds the first is the backend's choice.
        first = torch.where(sums == found, places, last).amin(0)
        closer = found < least
        best = torch.where(closer, v.gather(0, first[None])[0], best)
        least = torch.where(closer, found, least)
    return best, least


_LIKELIHOODS = "torchref.base.targets.xray_likelihoods"
_ERRORS = "torchref.refinement.model_error_estimation.sigma_a"
METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "_rice_body": (_LIKELIHOODS, likelihoods),
    "_segsum": (_ERRORS, shell_sums),
    "_solve_sigma_a": (_ERRORS, error_variances),
}
