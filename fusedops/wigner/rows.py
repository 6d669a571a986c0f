"""Rows of features and messages: l-major and m-major order, and the sizes of degrees."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fusedops._frame.check import (
    size,
)
from fusedops.harmonics.op import matrix_size


def m_major_order(lmax: int, mmax: int | None = None) -> np.ndarray:
    r"""Return the l-major row of every m-major row.

    Coefficient (l, m) of a feature has row :math:`l^2 + l + m` in l-major order. In m-major order
    the rows of m = 0 come first, for all l; then, for every m from 1 to mmax, the rows of +m, for
    l ≥ m, and the rows of −m.

    Parameters
    ----------
    lmax : int
        The largest degree, at least 0.
    mmax : int, optional
        The largest order that is kept, from 0 to lmax; lmax if not given.

    Returns
    -------
    array (M,), int64
        For m-major row r the l-major row ``order[r]``: ``x[:, order]`` is x in m-major order.

    Raises
    ------
    TypeError, ValueError
        If lmax or mmax is not an integer in its range.

    References
    ----------
    Passaro and Zitnick, "Reducing SO(3) Convolutions to SO(2) for Efficient Equivariant GNNs",
    ICML 2023 (eSCN); the order follows fairchem's UMA.

    Examples
    --------
    With three degrees there are nine coefficients. The rows of (l, m) = (0, 0), (1, 0) and (2, 0)
    are 0, 2 and 6; then come (1, 1) and (2, 1), (1, −1) and (2, −1), (2, 2), and (2, −2):

    >>> from fusedops.wigner import m_major_order
    >>> m_major_order(2).tolist()
    [0, 2, 6, 3, 7, 1, 5, 8, 4]
    >>> m_major_order(2, mmax=1).tolist()
    [0, 2, 6, 3, 7, 1, 5]
    """
    # 30 bits, since the number of rows is (lmax + 1)².
    lmax = size("m_major_order", "lmax", lmax, bits=30)
    return _m_major_order(lmax, order_limit("m_major_order", mmax, lmax)).copy()


@functools.lru_cache(maxsize=64)
def _m_major_order(lmax: int, mmax: int) -> np.ndarray:
    signed = [0, *(sign * m for m in range(1, mmax + 1) for sign in (1, -1))]
    return np.array([l * l + l + m for m in signed for l in range(abs(m), lmax + 1)])


@functools.lru_cache(maxsize=64)
def degrees(lmax: int, mmax: int) -> list[tuple[slice, np.ndarray, np.ndarray]]:
    """Return for every degree its l-major rows, the kept ones, and the m-major rows of these."""
    order = _m_major_order(lmax, mmax)
    found = []
    for l in range(lmax + 1):
        own = np.flatnonzero((order >= l * l) & (order < (l + 1) ** 2))
        own = own[np.argsort(order[own])]
        found.append((slice(l * l, (l + 1) ** 2), order[own] - l * l, own))
    return found


def degree_of(wigner: Any) -> int:
    """Return lmax of matrices that are dense (E, n, n) or packed blocks (E, Σ(2l+1)²)."""
    return degree_of_size(wigner.shape[-1], packed=wigner.ndim == 2)


def degree_of_size(size: int, packed: bool) -> int:
    """Return lmax of matrices with a last axis of this size."""
    lmax = 0
    while matrix_size(lmax, packed)[0] < size:
        lmax += 1
    return lmax


def message_rows(lmax: int, mmax: int) -> int:
    """Return M, the number of rows with ``|m|`` ≤ mmax."""
    return (mmax + 1) ** 2 + (lmax - mmax) * (2 * mmax + 1)


@functools.lru_cache(maxsize=64)
def functions_of(lmax: int, mmax: int) -> np.ndarray:
    """Return the radial function of every m-major row: one for l and |m|, order after order."""
    order = _m_major_order(lmax, mmax)
    degree = np.sqrt(order).astype(np.int64)
    m = abs(order - degree * degree - degree)
    return m * (lmax + 1) - m * (m - 1) // 2 + degree - m


def function_rows(lmax: int, mmax: int) -> int:
    """Return the number of radial functions of an edge and channel: one for l and |m|."""
    return (mmax + 1) * (lmax + 1) - mmax * (mmax + 1) // 2


def order_limit(name: str, mmax: int | None, lmax: int) -> int:
    if mmax is None:
        return lmax
    mmax = size(name, "mmax", mmax)
    if mmax > lmax:
        raise ValueError(f"{name}: mmax is {mmax}; it should be at most {lmax}, lmax")
    return mmax
