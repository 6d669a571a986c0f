"""TorchRef 0.7's scales: scaled structure factors in few passes, and their fit by least squares.

TorchRef fits scales by L-BFGS in float32. The parameters of the isotropic and the anisotropic scale
nearly repeat each other, and strong and weak solvent have minima of their own, so the fit of a
large model ends elsewhere for each change of its rounding. Levenberg and Marquardt's steps in
float64 go on from the least of the ends of short walks, which start at four strengths of the
solvent. On a GPU a CUDA graph evaluates a fit's loss and its derivatives.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import fusedops._frame.needs_torch  # noqa: F401

import numpy as np
import torch

from fusedops._frame.bridge.modes import has_tangent
from fusedops.compat._graphs import Replayed
from fusedops.compat._refinement import kept_terms, unserved
from fusedops.compat._replays import only_owner


class _Scaled(torch.autograd.Function):
    """Structure factors with TorchRef's scale, anisotropy and bulk solvent, in few passes."""

    @staticmethod
    def forward(ctx: Any, F: Any, c_iso: Any, U: Any, k: Any, half: Any, n: Any, of: Any) -> Any:
        ctx.save_for_backward(F, c_iso, U, k, half, n)
        ctx.of, ctx.saved = of, of.factors(c_iso, U, k, half, n)
        return of.applied(ctx.saved, F)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        inputs, of = ctx.saved_tensors, ctx.of
        if torch.is_grad_enabled():
            leaves = [x.detach().requires_grad_() for x in inputs]
            wanted = [x if x.requires_grad else y for x, y in zip(inputs, leaves, strict=True)]
            y = of.applied(of.factors(*wanted[1:]), wanted[0])
            return *torch.autograd.grad(y, wanted, dy, create_graph=True), None
        F, _, _, k, half, n = inputs
        of_atoms, of_solvent, iso, aniso, power = ctx.saved
        dF = of_atoms * dy if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return dF, None, None, None, None, None, None
        atoms = of_atoms * _real_product(dy, F)
        solvent = of_solvent * _real_product(dy, of.solvent)
        dc = ((atoms + solvent) * (iso.abs() <= 10)) @ of.design
        dU = (atoms * (aniso.abs() <= 10)) @ of.squares
        log_ratio = of.log_s - half.log()
        slope = -solvent * (power <= 30) * power
        dn = slope @ log_ratio.clamp(min=_LEAST_LOG)
        dhalf = -n / half * (slope * (log_ratio >= _LEAST_LOG)).sum()
        return dF, dc, dU, solvent.sum() / k, dhalf, dn, None


def _real_product(x: Any, y: Any) -> Any:
    """Return the real part of conj(x) y."""
    return torch.addcmul(x.real * y.real, x.imag, y.imag)


_LN2, _LEAST_LOG = math.log(2), math.log(1e-12)


class _Scale(NamedTuple):
    """The constants of a scaler's reflections."""

    design: Any
    squares: Any
    log_s: Any
    solvent: Any

    @classmethod
    def of(cls, scaler: Any) -> _Scale:
        """Return them for a scaler's reflections, with the solvent that it keeps."""
        x, y, z = scaler.s.T
        products = torch.stack([x * x, y * y, z * z, 2 * x * y, 2 * x * z, 2 * y * z], 1)
        squares = -2 * math.pi**2 * products
        return cls(scaler._iso_design, squares, scaler._s_half_sq.log(), scaler._f_sol_raw)

    def factors(self, c_iso: Any, U: Any, k: Any, half: Any, n: Any) -> tuple[Any, ...]:
        """Return the factors of atoms and of solvent, and the exponents that they follow from."""
        iso, aniso = self.design @ c_iso, self.squares @ U
        power = _LN2 * torch.exp(n * (self.log_s - half.log()).clamp(min=_LEAST_LOG))
        scale = iso.clamp(-10, 10)
        of_atoms = torch.exp(scale + aniso.clamp(-10, 10))
        of_solvent = k * torch.exp(scale - power.clamp(max=30))
        return of_atoms, of_solvent, iso, aniso, power

    def applied(self, factors: tuple[Any, ...], F: Any) -> Any:
        """Return structure factors with scale and solvent."""
        return factors[0] * F + factors[1] * self.solvent


def scaled(scaler: Any, fcalc: Any, f_sol_override: Any = None) -> Any:
    """Return scaled structure factors of all reflections, with solvent."""
    constants = None if f_sol_override is not None else _constants(scaler, fcalc)
    if constants is None:
        return NotImplemented
    of = scaler.solvent

    def parameters() -> tuple[Any, ...]:
        return scaler.c_iso, scaler.U, of.k_solvent(), of.ss_half(), of.n_exp()

    refined = _parameters(scaler)
    if torch.is_grad_enabled() and any([x.requires_grad for x in refined]):
        return _Scaled.apply(fcalc, *parameters(), constants)
    # Not kept: a write through `.data` leaves no trace.
    with torch.no_grad():
        factors = constants.factors(*parameters())
    return constants.applied(factors, fcalc)


def _constants(scaler: Any, fcalc: Any) -> _Scale | None:
    """Return the constants of a scaler for structure factors of all its reflections, or None."""
    parts = (getattr(scaler, name, None) for name in ("c_iso", "U", "solvent"))
    if (
        unserved()
        or fcalc.shape != scaler.bins.shape
        or not fcalc.is_complex()
        or any([part is None for part in parts])
        or type(scaler.solvent) is not sys.modules["torchref.scaling.solvent"].SolventModel
        or has_tangent((fcalc, *_parameters(scaler)))
    ):
        return None
    if scaler._f_sol_raw is None:
        scaler._f_sol_raw = scaler.solvent.get_rec_solvent(scaler.hkl)
    sources = scaler._f_sol_raw, scaler._iso_design, scaler.s, scaler._s_half_sq
    return kept_terms(scaler).packed.get(sources, lambda: _Scale.of(scaler))


def _parameters(scaler: Any) -> tuple[Any, ...]:
    of = scaler.solvent
    return scaler.c_iso, scaler.U, of.log_k_solvent, of.log_ss_half, of.log_n_exp


class _Fit:
    """The least squares of amplitudes of the work set, by the parameters of `_parameters`."""

    def __init__(self, scaler: Any, of: _Scale, fcalc: Any) -> None:
        solvent, work = sys.modules["torchref.scaling.solvent"], scaler._data.work

        def exact(x: Any) -> Any:
            dtype = torch.complex128 if x.is_complex() else torch.float64
            return work.select(x.detach()).to(dtype)

        self.U = slice(of.design.shape[1], of.design.shape[1] + 6)
        edges = (-10, 10), np.log(solvent.SS_HALF_BOUNDS), np.log(solvent.N_EXP_BOUNDS)
        bounds = np.array([(-np.inf, np.inf)] * self.U.stop + [*edges])
        # TorchRef's clamps have no gradient where an exponential is rounded to beyond a bound.
        self.low, self.high = (bounds + [1e-12, -1e-12]).T
        #: The parameters on the device, where a CUDA graph reads them.
        self.given = torch.zeros(len(bounds), dtype=torch.float64, device=fcalc.device)
        fixed = _Scale(*map(exact, of)), exact(fcalc), work.F.detach().double()
        self.products = Replayed(functools.partial(_products, self.given, *fixed), fcalc.device)

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the loss, with TorchRef's penalty of U, its gradient, and J transposed times J."""
        self.given.copy_(torch.from_numpy(x))
        products = self.products().cpu().numpy()
        JTJ, gradient, loss = products[:-1, :-1], products[:-1, -1], products[-1, -1] / 2
        JTJ[self.U, self.U] += 2 * np.eye(6)
        gradient[self.U] += 2 * x[self.U]
        return loss + float(x[self.U] @ x[self.U]), gradient, JTJ

    def least(self, x: np.ndarray) -> np.ndarray | None:
        """Return the parameters of the minimum that is found from a start, or None for NaN."""
        x = np.clip(x, self.low, self.high)
        k = self.U.stop
        starts = [x]
        # Without solvent nothing tells a fit where it would begin.
        if not x[self.U].any() or x[k] == self.low[k]:
            starts += [np.r_[x[:k], start] for start in _SOLVENTS]
        ends = [self._descend(start, self(start), _ROUGH_GAIN) for start in starts]
        ends = [end for end in ends if math.isfinite(end[1][0])]
        if not ends:
            return None
        best = min(ends, key=lambda end: end[1][0])
        return self._descend(*best, _LEAST_GAIN)[0]

    def _descend(self, x: np.ndarray, found: Any, least_gain: float) -> tuple[np.ndarray, Any]:
        """Walk until a step gains less than a share of the loss; return the end, and its loss."""
        loss, gradient, JTJ = found
        damping = 1e-3
        for _ in range(_MOST_STEPS):
            # A parameter that its bound holds back stays.
            held = (x <= self.low) & (gradient > 0) | (x >= self.high) & (gradient < 0)
            free = np.flatnonzero(~held)
            diagonal = np.diag(JTJ)[free]
            scale = np.maximum(diagonal, max(1e-12 * diagonal.max(), 1e-300))
            damped = JTJ[np.ix_(free, free)] + damping * np.diag(scale)
            moved = x.copy()
            moved[free] -= np.linalg.solve(damped, gradient[free])
            moved = np.clip(moved, self.low, self.high)
            new = self(moved)
            if new[0] < loss:
                gain = loss - new[0]
                x, (loss, gradient, JTJ) = moved, new
                damping = max(damping / 5, 1e-9)
                if gain < least_gain * loss:
                    break
            else:
                damping *= 10
                if damping > 1e3:
                    break
        return x, (loss, gradient, JTJ)


def _products(given: Any, of: _Scale, fcalc: Any, observed: Any) -> Any:
    """Return the products of all columns of J and of the residuals with each other."""
    k = of.design.shape[1]
    c, U, (log_k, log_half, log_n) = given.tensor_split([k, k + 6])
    n = log_n.exp()
    factors = of.factors(c, U, log_k.exp(), log_half.exp(), n)
    of_atoms, of_solvent, iso, aniso, power = factors
    F = of.applied(factors, fcalc)
    size = F.abs()
    phase = F / size.clamp(min=torch.finfo(size.dtype).tiny)
    atoms = of_atoms * _real_product(phase, fcalc)
    solvent = of_solvent * _real_product(phase, of.solvent)
    falloff = -solvent * (power <= 30) * power * n
    log_ratio = (of.log_s - log_half).clamp(min=_LEAST_LOG)
    columns = [
        ((atoms + solvent) * (iso.abs() <= 10))[:, None] * of.design,
        (atoms * (aniso.abs() <= 10))[:, None] * of.squares,
        torch.stack([solvent, -falloff, falloff * log_ratio, size - observed], 1),
    ]
    J = torch.cat(columns, 1)
    return J.T @ J


#: Logarithms of the solvent's scale that a first fit also starts from, with TorchRef's falloff.
_FALLOFF = math.log(1 / (4 * 3.59**2)), math.log(5.0)
_SOLVENTS = (-0.7, *_FALLOFF), (-2.0, *_FALLOFF), (-4.0, *_FALLOFF)
_MOST_STEPS, _ROUGH_GAIN, _LEAST_GAIN = 100, 1e-2, 1e-7


def fit(
    scaler: Any,
    fcalc: Any,
    nsteps: int = 3,
    lr: float = 1.0,
    max_iter: int = 200,
    history_size: int = 10,
    verbose: bool = True,
    scale_target: str = "ls",
) -> Any:
    """Fit a scaler to the amplitudes of its work set, and return TorchRef's measures of the fit."""
    # TorchRef then tells every step, and of structure factors that aren't finite.
    if scaler.verbose > 2:
        return NotImplemented
    theirs, data = sys.modules["torchref.scaling.scaler_base"], scaler._data
    of = _constants(scaler, fcalc)
    own = type(scaler).forward is theirs.ScalerBase.forward
    in_float64 = fcalc.device.type in ("cpu", "cuda")
    if of is None or not own or not in_float64 or scale_target != "ls" or nsteps < 1:
        return NotImplemented
    refined = _parameters(scaler)
    if len(refined) < len([*scaler.parameters()]) or not all([p.requires_grad for p in refined]):
        return NotImplemented
    with torch.no_grad():
        minimum = _Fit(scaler, of, fcalc)
        start = torch.cat([p.detach().double().flatten() for p in refined]).cpu().numpy()
        with only_owner(id(minimum), minimum) as alone:
            minimum.products.captures &= alone
            end = minimum.least(start)
        if end is None:
            return NotImplemented
        parts = torch.from_numpy(end).split([p.numel() for p in refined])
        for p, x in zip(refined, parts, strict=True):
            p.copy_(x.view_as(p))
        F = scaler(fcalc)
        nlls = [theirs.nll_xray_mean(x.F, x.select(F), x.sigF) for x in (data.work, data.free)]
        R = theirs.rfactor_work_free(data, F.abs())
    if verbose and scaler.verbose > 0:
        print("Refining scales with LBFGS...")
        print(f"Scale refinement complete. rwork: {R[0]:.4f}, rfree: {R[1]:.4f}\n")
        print("Final Scale Parameters: ")
        for name, p in scaler.named_parameters():
            print(f"  {name}: {p.data}")
    measures = dict(zip(("xray_work", "xray_test", "rwork", "rfree"), (*nlls, *R), strict=True))
    # The steps after the first one move nothing.
    repeated = {name: [float(value)] * nsteps for name, value in measures.items()}
    return {"target": "scales", "steps": [*range(1, nsteps + 1)], **repeated}


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "ScalerBase.forward": ("torchref.scaling.scaler_base", scaled),
    "ScalerBase.refine_lbfgs": ("torchref.scaling.scaler_base", fit),
}
