"""Degenerate planes: lines, near-lines, points, far from the origin, of uneven weights.

Every backend is compared with singular values of centred coordinates, which tell a second variance
of 1e-16 of the first from zero, within first-order bounds of what rounding the covariance does to
each group. A line has to give zero to the bit.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import fusedops
from fusedops.planarity.eigenvector import NO_PLANE
from places import interpreted
from test_planarity import everywhere, fits, results

pytestmark = interpreted

#: Roundings that an atom adds to a sum, with room for errors of second order.
ROUNDINGS = 2


def _along(axis, rows):
    return np.einsum("pai,pi->pa", rows, axis)


def _length(rows):
    return np.sqrt(np.einsum("...i,...i->...", rows, rows))


class Expected:
    """The documented results of groups (P, n), and bounds on their rounding errors.

    Of the covariance C, scaled to trace 1, rounding errors of norm `e` tilt the normal by e / gap
    towards another axis. Lists go from the smallest eigenvalue to the largest.
    """

    def __init__(self, xyz, index, sigma, fit, v):
        x = xyz[index].astype(np.longdouble)
        x -= x[:, :1]
        weight = np.broadcast_to((sigma**-2.0).reshape(len(index), -1), index.shape)
        uniform = fit == "uniform"
        share = np.ones_like(weight) if uniform else weight
        part = share / share.sum(1, keepdims=True)
        r = x - np.einsum("pa,pai->pi", part, x)[:, None]
        trace = np.einsum("pa,pai,pai->p", share, r, r)
        scale = np.where(trace > 0, 1 / np.where(trace > 0, trace, 1), 0)
        _, s, axes = np.linalg.svd((np.sqrt(share * scale[:, None])[..., None] * r).astype(float))
        r, scale = r.astype(float), scale.astype(float)
        values, axes = s[:, ::-1] ** 2, axes[:, ::-1].swapaxes(0, 1)

        # A centred coordinate is rounded in proportion to the group's extent.
        many = ROUNDINGS * index.shape[1] * np.finfo(float).eps
        slip = many * 2 * _length(x.astype(float)).max(1, keepdims=True)
        turned = np.einsum("pa,pa->p", share, _length(r)) * slip[:, 0]
        e = many + (2 * turned + share.sum(1) * slip[:, 0] ** 2) * scale
        second, limit = values[:, 1], NO_PLANE * values[:, 2]
        self.undecided = (abs(second - limit) <= e) & (scale > 0)
        self.planar = (second > limit) & ~self.undecided
        possible = self.planar | self.undecided

        with np.errstate(divide="ignore", invalid="ignore"):
            gaps = [values[:, k] - values[:, 0] for k in (1, 2)]
            tilts = [np.where(possible, np.minimum(e / gap, 1), 0)[:, None] for gap in gaps]
        tilt = sum(tilts)
        normal = np.where(self.planar[:, None], axes[0], 0)
        across = [_along(axis, r) for axis in axes[1:]]
        d = _along(axes[0], r)
        self.d = _along(normal, r)
        # An undecided group may have the distances from its plane, or zeros.
        self.d_error = possible[:, None] * (
            sum(abs(a) * t for a, t in zip(across, tilts, strict=True))
            + abs(d) * tilt**2
            + slip
            + abs(d - self.d)
        )

        def centred(values):
            return values - values.mean(1, keepdims=True) if uniform else values

        def spread(errors):
            return errors + errors.mean(1, keepdims=True) if uniform else errors

        self.terms = 0.5 * weight * self.d**2
        self.terms_error = weight * (abs(self.d) + self.d_error) * self.d_error
        g = centred(weight * self.d)
        g_error = spread(weight * (self.d_error + many * abs(self.d)))
        self.gradient = g[..., None] * normal[:, None]
        self.gradient_error = g_error + abs(g) * tilt

        # The second derivative follows fusedops.planarity.op._gradient_vjp_formula.
        v = v[index]
        t = weight * centred(_along(normal, v))
        t_error = weight * spread(_length(v)) * (tilt + many)
        q = np.einsum("pa,pai->pi", t, r) + np.einsum("pa,pai->pi", g, v)
        along_normal = abs(np.einsum("pi,pi->p", q, normal))
        size = _length(q)
        p, parts, errors = np.zeros_like(q), [], []
        gaps = [np.where(self.planar & (gap > 0), gap, 1) for gap in gaps]
        for axis, gap in zip(axes[1:], gaps, strict=True):
            parts.append(np.einsum("pi,pi->p", q, axis) * self.planar / gap)
            p += parts[-1][:, None] * axis
        steepness = _length(p)
        for axis, gap, a in zip(axes[1:], gaps, across, strict=True):
            q_error = np.sum(
                t_error * abs(a) + abs(t) * slip + g_error * abs(_along(axis, v)), axis=1
            )
            errors.append(
                (2 * e * steepness + q_error) / gap
                + e * along_normal / gap**2
                # (C - λ)⁺ q is formed as (tr q - (C - λ) q) / (the product of both gaps).
                + many * size / gaps[0]
            )
        errors.insert(0, steepness * tilt[:, 0])
        pulled = share * scale[:, None]
        pr_error = steepness[:, None] * slip + sum(
            error[:, None] * abs(a) for error, a in zip(errors, [self.d, *across], strict=True)
        )
        along = t - part * t.sum(1, keepdims=True) - pulled * np.einsum("pai,pi->pa", r, p)
        along_error = (
            t_error
            + part * t_error.sum(1, keepdims=True)
            + pulled * pr_error
            + many * (abs(t) + part * abs(t).sum(1, keepdims=True))
            + many * pulled * _length(r) * steepness[:, None]
        )
        self.turned = along[..., None] * normal[:, None] - (pulled * self.d)[..., None] * p[:, None]
        self.turned_error = (
            along_error
            + abs(along) * tilt
            + pulled * self.d_error * steepness[:, None]
            + pulled * abs(self.d) * sum(errors)[:, None]
        )
        # First-order bounds say nothing where the normal is undetermined, and the second derivative
        # has a rule of its own where the gap itself counts as zero.
        close = gaps[0] * gaps[1] < 2 * NO_PLANE * (gaps[0] + gaps[1]) ** 2
        self.determined = ~self.undecided & ~(self.planar & ((tilt[:, 0] > 0.01) | close))


def _lines(rng, planes, n):
    start, along = 20 * rng.normal(size=(2, planes, 1, 3))
    return start + along / 10 * rng.normal(size=(planes, n, 1))


def _near_lines(rng, planes, n):
    """Return groups with a second variance of 1e-3 to 1e-16 of the first, and any third."""
    axes = np.linalg.qr(rng.normal(size=(planes, 3, 3)))[0]
    second = 10.0 ** -rng.permutation(np.linspace(3, 16, planes))
    third = second * rng.choice([0, 0.01, 0.5, 1], planes)
    spread = np.sqrt(np.stack([np.ones(planes), second, third], 1))
    return 3 * (rng.normal(size=(planes, n, 3)) * spread[:, None]) @ axes


def _planes(rng, planes, n):
    spread = rng.choice([0, 1e-6, 0.01, 0.5, 1], planes)[:, None, None] ** [0, 0, 1]
    return _turned(rng, 3 * rng.normal(size=(planes, n, 3)) * spread)


def _turned(rng, x):
    return x @ np.linalg.qr(rng.normal(size=(len(x), 3, 3)))[0]


KINDS = {
    "lines": _lines,
    "lines of three decimals": lambda *given: np.round(_lines(*given), 3),
    "near-lines": _near_lines,
    "near-lines of three decimals": lambda *given: np.round(_near_lines(*given), 3),
    "planes": _planes,
    "lines far off": lambda *given: _lines(*given) + 1e8 * np.array([1.0, -0.7, 0.3]),
    "near-lines far off": lambda *given: _near_lines(*given) + 1e8 * np.array([1.0, -0.7, 0.3]),
    "planes far off": lambda *given: _planes(*given) + 1e8 * np.array([1.0, -0.7, 0.3]),
    "repeated indices": _lines,
    "points": lambda rng, planes, n: np.broadcast_to(_lines(rng, planes, 1), (planes, n, 3)),
}
# Planes of every kind and size by backend; the interpreter is slow.
COUNT = {"numpy": 400, "cython": 400, "numba": 400, "torch": 400, "triton": 32}


@functools.lru_cache(maxsize=32)
def _case(kind, planes, n, dtype, fit, per_atom, seed=0):
    """Return coordinates, a cotangent, groups, and their expected results."""
    rng = np.random.default_rng([seed, len(kind), n, dtype == "float64", len(fit), per_atom])
    xyz = KINDS[kind](rng, planes, n).reshape(-1, 3).astype(dtype)
    index = np.arange(planes * n).reshape(planes, n)
    if kind == "repeated indices":
        # Indices name up to three atoms, and may leave out the second and third.
        index = index[:, :1] + rng.integers(0, rng.integers(1, 4, (planes, 1)), (planes, n))
    sigma = 10 ** rng.uniform(-3, 3, (planes, n)) if per_atom else np.full(planes, 0.02)
    v = rng.normal(size=xyz.shape).astype(dtype)
    return xyz, v, index, sigma, Expected(xyz.astype(float), index, sigma, fit, v.astype(float))


def _compare(case, fit, backend, device="cpu"):
    """Assert that value, gradient and second derivative are right."""
    xyz, v, index, sigma, want = case
    found = results(backend, (xyz, v), fusedops.Planes([(index, sigma)]), fit, device)
    value, gradient, turned = (result.astype(float) for result in found)

    narrow = float(np.finfo(xyz.dtype).eps)
    copies = 1 if sigma.ndim == 2 else index.shape[1]
    constants = (np.log(sigma) + 0.5 * np.log(2 * np.pi)) * copies
    off = abs(value - np.sum(want.terms) - np.sum(constants))
    size = np.sum(want.terms) + np.sum(abs(constants))
    allowed = np.sum(want.terms_error) + (1e-13 + 2 * narrow) * size
    assert off <= allowed, (value, off, allowed)

    for name, got, rows, errors, trusted in (
        ("gradient", gradient, want.gradient, want.gradient_error, True),
        ("turned", turned, want.turned, want.turned_error, want.determined),
    ):
        assert np.isfinite(got).all(), name
        errors = np.where(np.reshape(trusted, (-1, 1)), errors + 4 * narrow * _length(rows), np.inf)
        total, allowed = np.zeros_like(got), np.zeros(len(got))
        np.add.at(total, index, rows)
        np.add.at(allowed, index, errors)
        off = _length(got - total)
        worst = np.argmax(off - allowed)
        assert off[worst] <= allowed[worst], (name, worst, got[worst], total[worst], allowed[worst])


@pytest.mark.parametrize("backend", [*COUNT, pytest.param("cuda", marks=pytest.mark.gpu)])
@fits
@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_are_hardly_planes(backend, kind, fit):
    where = ("triton", "cuda") if backend == "cuda" else (backend,)
    choices = list(itertools.product((3, 4, 5, 12), ("float64", "float32"), (False, True)))
    if backend == "triton":
        # The interpreter takes a millisecond a group, so try all pairs of any two choices.
        choices = [(4, "float64", False), (4, "float32", True)]
        choices += [(7, "float64", True), (7, "float32", False)]
    for n, dtype, per_atom in choices:
        case = _case(kind, COUNT.get(backend, 10_000), n, dtype, fit, per_atom)
        _compare(case, fit, *where)
        want = case[-1]
        # With more undecided groups the test would prove little.
        assert want.undecided.mean() < 0.1
        assert want.determined.mean() > 0.5
        if dtype == "float64" and not per_atom and kind in ("lines", "lines far off", "points"):
            assert not want.planar.any()


@fits
@pytest.mark.parametrize("kind", KINDS)
def test_deviations_of_groups_that_are_hardly_planes(kind, fit):
    xyz, _, index, sigma, want = _case(kind, COUNT["numpy"], 4, "float64", fit, True)
    (d,) = fusedops.plane_deviations(xyz, [(index, sigma)], fit=fit)
    sign = np.where(np.sum(d * want.d, axis=1, keepdims=True) < 0, -1, 1)
    off = abs(sign * d - want.d)
    assert (off <= want.d_error).all()


@everywhere
def test_a_line_costs_its_constant(backend):
    """For two points, Newton's method once took the line for its normal."""
    xyz = np.array(
        [
            [2.472978972389173, 2.9935604794377824, -3.2696626513912523],
            [1.7025091160414167, -0.4232716747358015, -1.0797208518947203],
        ]
    )
    planes = fusedops.Planes([([[0, 1, 0, 1]], [0.02])])
    value, gradient, _ = results(backend, (xyz, xyz), planes, "uniform")
    assert value == pytest.approx(4 * (np.log(0.02) + 0.5 * np.log(2 * np.pi)), rel=1e-14)
    np.testing.assert_array_equal(gradient, 0)
