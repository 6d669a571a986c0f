"""The eigenvector of symmetric 3×3 matrices with the smallest eigenvalue, and its derivative.

Takes NumPy arrays and torch tensors; with tensors, differentiable to any order.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from fusedops._frame.arrays import either, namespace
from fusedops._frame.hook import bridge

#: A group's second largest variance counts as zero below this share of the largest: the group is
#: a line or a point, has no plane, and gets a zero normal.
NO_PLANE = 1e-12


def smallest_eigenvector(C: Any) -> Any:
    """Return the eigenvectors (P, 3) of covariances (P, 3, 3) with the smallest eigenvalues.

    The eigenvector of a group without a plane is zero.
    """
    return either(C, _by_lapack, _by_jacobi)(C)


def _by_jacobi(C: Any) -> Any:
    return _differentiable().apply(C)


def _by_lapack(C: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(C)
    return np.where((values[:, 1] > NO_PLANE * values[:, 2])[:, None], vectors[:, :, 0], 0.0)


def pseudo_solve(C: Any, normal: Any, q: Any) -> Any:
    """Return (C - λ)⁺ q, where λ is the eigenvalue of C at `normal`.

    A = C - λ has a null vector, so that on the plane A⁺ = (tr A - A) / (½ (tr² A - tr A²)); if
    the two lower eigenvalues are equal, A⁺ = A / tr² A.
    """
    xp = namespace(C)
    q = q - xp.einsum("pi,pi->p", q, normal)[:, None] * normal
    value = xp.einsum("pi,pij,pj->p", normal, C, normal)
    trace = xp.einsum("pii->p", C) - 3 * value
    square = xp.einsum("pij,pij->p", C, C) - 2 * value * xp.einsum("pii->p", C) + 3 * value**2
    product = 0.5 * (trace**2 - square)
    Aq = xp.einsum("pij,pj->pi", C, q) - value[:, None] * q
    regular, single = product > NO_PLANE * trace**2, trace > NO_PLANE
    full = (trace[:, None] * q - Aq) / xp.where(regular, product, 1.0)[:, None]
    half = Aq / xp.where(single, trace, 1.0)[:, None] ** 2
    return xp.where(regular[:, None], full, xp.where(single[:, None], half, 0.0 * q))


@functools.cache
def _differentiable() -> Any:
    """Return the autograd.Function for tensors; its class can't be declared without torch."""
    torch = sys.modules["torch"]

    class SmallestEigenvector(torch.autograd.Function):  # type: ignore[name-defined]
        """dn = -(C - λ)⁺ dC n.

        The backward uses the saved output, so that autograd can differentiate it again.
        """

        generate_vmap_rule = True

        @staticmethod
        def forward(C: Any) -> Any:
            values, vectors = _jacobi(C)
            order = values.argsort(1)
            least = vectors.gather(2, order[:, None, :1].expand(-1, 3, 1))[..., 0]
            middle, most = values.gather(1, order[:, 1:]).unbind(1)
            return torch.where((middle > NO_PLANE * most)[:, None], least, 0.0)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.save_for_backward(*inputs, output)
            ctx.save_for_forward(*inputs, output)

        @staticmethod
        def backward(ctx: Any, cotangent: Any) -> Any:
            C, normal = ctx.saved_tensors
            p = pseudo_solve(C, normal, cotangent)
            outer = p[:, :, None] * normal[:, None, :]
            return -0.5 * (outer + outer.mT)

        @staticmethod
        def jvp(ctx: Any, tangent: Any) -> Any:
            with bridge().modes.pushed_forward(ctx.saved_for_forward) as (C, normal):
                symmetric = 0.5 * (tangent + tangent.mT)
                return -pseudo_solve(C, normal, torch.einsum("pij,pj->pi", symmetric, normal))

    return SmallestEigenvector


def _jacobi(C: Any) -> tuple[Any, Any]:
    """Return eigenvalues (P, 3) and eigenvectors (P, 3, 3), the latter as columns.

    Plain arithmetic, without LAPACK, runs on any device and in a CUDA graph.
    """
    torch = namespace(C)
    a = [[C[:, i, j] for j in range(3)] for i in range(3)]
    v = [[torch.full_like(a[0][0], float(i == j)) for j in range(3)] for i in range(3)]
    for _ in range(6):
        for p, q, r in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
            off = a[p][q]
            zero = off == 0
            theta = (a[q][q] - a[p][p]) / torch.where(zero, 1.0, 2 * off)
            sign = torch.where(theta >= 0, 1.0, -1.0)
            t = torch.where(zero, 0.0, sign / (theta.abs() + (theta * theta + 1).sqrt()))
            c = 1 / (t * t + 1).sqrt()
            s = t * c
            a[p][p] = a[p][p] - t * off
            a[q][q] = a[q][q] + t * off
            a[p][q] = a[q][p] = torch.zeros_like(off)
            a[r][p], a[r][q] = c * a[r][p] - s * a[r][q], s * a[r][p] + c * a[r][q]
            a[p][r], a[q][r] = a[r][p], a[r][q]
            for k in range(3):
                v[k][p], v[k][q] = c * v[k][p] - s * v[k][q], s * v[k][p] + c * v[k][q]
    values = torch.stack([a[k][k] for k in range(3)], 1)
    return values, torch.stack([torch.stack(row, 1) for row in v], 1)
