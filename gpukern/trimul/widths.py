"""Outputs whose width is not that of x, by groups of as many channels as x has.

The last group has zeros as weights of the channels that are none. An output's channels have nothing
in common but what comes before them, so that groups' outputs lie side by side, and their cotangents
add up. Every group computes an update of its own, as few programs have such outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedops.trimul.op import slices
from gpukern.trimul import backward, forward


def triangle_multiplicative_update(a: Any, y: Any) -> None:
    """Write the update, and o for a backward pass."""
    C, D = a.x.shape[3], len(a.p_out_weight)
    if C == D:
        forward.triangle_multiplicative_update(a, y)
        return
    hidden = y.hidden
    for d in slices(D, C):
        out = None if y.out is None else torch.empty_like(a.x)
        forward.triangle_multiplicative_update(_group(a, d, C), y._make((out, hidden)))
        if out is None:
            return
        y.out[..., d] = out[..., : d.stop - d.start]
        hidden = None


def triangle_multiplicative_update_vjp(a: Any, y: Any) -> None:
    """Write the cotangents of all arrays that want one."""
    C, D = a.x.shape[3], len(a.p_out_weight)
    if C == D:
        backward.triangle_multiplicative_update_vjp(a, y)
        return
    split = [f"d{name}" for name in _split(a)]
    for d in slices(D, C):
        group = _group(a, d, C)._replace(dout=_padded(a.dout[..., d], -1, C))
        found = y._make([None if to is None else torch.empty_like(to) for to in y])
        found = found._replace(
            **{
                name: to.new_empty((C, *to.shape[1:]))
                for name in split
                if (to := getattr(y, name)) is not None
            }
        )
        backward.triangle_multiplicative_update_vjp(group, found)
        for name, to, by_group in zip(y._fields, y, found, strict=True):
            if to is None:
                continue
            if name in split:
                to[d] = by_group[: d.stop - d.start]
            elif d.start == 0:
                to.copy_(by_group)
            else:
                to += by_group


def _split(a: Any) -> tuple[str, ...]:
    """Return the arrays that have a row for every channel of the output."""
    gates = ("g_out_weight", "g_out_bias") if a.gate == "output" else ()
    return "p_out_weight", "p_out_bias", *gates


def _group(a: Any, d: slice, C: int) -> Any:
    """Return the arguments of an update with some channels of the output, and zeros up to C."""
    given = {name: getattr(a, name) for name in _split(a)}
    return a._replace(
        **{name: w if w is None else _padded(w[d], 0, C) for name, w in given.items()}
    )


def _padded(array: Any, axis: int, n: int) -> Any:
    """Return an array with zeros up to a length along an axis."""
    shape = list(array.shape)
    shape[axis] = n
    padded = array.new_zeros(shape)
    padded.narrow(axis, 0, array.shape[axis]).copy_(array)
    return padded
