"""The sums to which the rows of a head add their gradients of the bias."""

from __future__ import annotations

from typing import Any

# The shares of a backward's work, at least.
_SHARES = 32


def parts_of(a: Any) -> int:
    """Return how many sums a head has: as many as its rows at most, and one at least."""
    batch, rows, _, heads, _ = a.q.shape
    return int(max(1, min(rows, -(-_SHARES // max(1, batch * heads)))))
