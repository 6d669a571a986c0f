"""Rotations of edges on the CPU with factors of messages, by a kernel without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cpukern.layout import laid_out
from cpukern.so2.convolution import orders_of
from fusedops._host import memory
from fusedops._host.threads import in_parallel
from fusedops.wigner.rows import degree_of, message_rows

# Edges that are worth handing to another thread.
_GRAIN = 1 << 8


def with_factors(rotate: Callable[[Any, Any], None], steps: Any, a: Any, y: Any) -> None:
    """Run a kernel of rotations, and the steps of an SO(2) convolution's scaling around it."""
    if a.factors is None:
        rotate(a, y)
        return
    lmax, E = degree_of(a.wigner), len(a.wigner)
    width = a.message.shape[2] if a.x is None else (1 + (a.way == "forth")) * a.x.shape[2]
    rows = message_rows(lmax, a.mmax)
    shape, orders = (E, rows, width), orders_of(lmax, a.mmax, width)
    factors = laid_out(a.factors, 1)

    def flat(array: Any) -> Any:
        return laid_out(array, 2).reshape(E, rows * width)

    def scale(given: Any, out: Any) -> None:
        rows, to = flat(given), flat(out)

        def step(low: int, high: int) -> None:
            e = slice(low, high)
            for order in orders:
                by_sign = order.of(to[e]).transpose(1, 0, 2)
                steps.scale(order.of(rows[e]), order.factors(factors[e]), by_sign)

        in_parallel(step, E, _GRAIN)

    scaled = rotated = None
    if a.message is not None and (y.dx is not None or y.dwigner is not None):
        scaled = memory.empty(shape, a.wigner.dtype)
        scale(a.message, scaled)
    if y.dmessage is not None or y.dfactors is not None:
        rotated = memory.empty(shape, a.wigner.dtype)
    rotate(a._replace(message=scaled, factors=None), y._replace(dmessage=rotated, dfactors=None))
    if y.dmessage is not None:
        scale(rotated, y.dmessage)
    if y.dfactors is not None:
        rows_of, turned = flat(a.message), flat(rotated)

        def fold(low: int, high: int) -> None:
            e = slice(low, high)
            for order in orders:
                given, own = order.of(turned[e]), order.of(rows_of[e])
                minus = given[:, 1] if order.signs > 1 else None
                on = order.factors(y.dfactors[e])
                steps.unscale(given[:, 0], minus, None, own, None, None, on)

        in_parallel(fold, E, _GRAIN)
