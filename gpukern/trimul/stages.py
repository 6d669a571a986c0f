"""The stages of an update that ranks share: before and after the products, on rectangles of pairs.

They are made of the kernels of a whole update, whose lines here are L lines of M pairs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gpukern.trimul.backward import (
    _finish_back,
    _gate_back,
    _norm_back,
    _pairs_back,
    _sides_back,
    by_pairs,
    scaling_of,
)
from gpukern.trimul.forward import finish, normalized, project
from gpukern.trimul.plan import ALL, Update, aligned

_WEIGHTS = ("norm_in_weight", "norm_in_bias", "p_in_weight", "p_in_bias", "g_in_weight")
_WEIGHTS += ("g_in_bias", "norm_out_weight", "norm_out_bias", "p_out_weight", "p_out_bias")
_WEIGHTS += ("g_out_weight", "g_out_bias")


def _update(a: Any, H: int) -> Update:
    """Return the part of an update that a stage has, with H hidden channels."""
    given = a._asdict()
    none = a.x.new_empty(0, a.x.shape[3])
    others = dict.fromkeys(_WEIGHTS) | dict.fromkeys(("p_in_weight", "g_in_weight"), none)
    others |= {"g_out_weight": none, "mask": None, "gate": "output"} | given
    update = Update(SimpleNamespace(**others, direction="outgoing", max_memory=0))
    update.H = H
    return update


def _rows_of(planes: Any, like: Any, M: int) -> Any:
    """Return planes (2, R, L, pitch) as the sides (P, L, Q, M) of one member."""
    P, L, Q = like.shape[:3]
    return planes.view(P, Q, L, -1)[..., :M].transpose(1, 2)


def triangle_sides(a: Any, y: Any) -> None:
    """Write left and right of a rectangle of pairs."""
    update = _update(a, a.p_in_weight.shape[0] // 2)
    B, L, M, _ = update.x.shape
    if not y.sides.numel():
        return
    for b in range(B):
        planes = update.new(2, update.H, L, update.pitch)
        project(update, *update.edges(slice(b, b + 1), ALL), update.sides, sides=planes)
        y.sides[:, :, :, b] = _rows_of(planes, y.sides, M)


def triangle_end(a: Any, y: Any) -> None:
    """Write the output for a rectangle of o."""
    update = _update(a, a.o.shape[1])
    if not y.out.numel():
        return
    gate = update.gate(len(a.x), ALL, y.out)
    project(update, update.x, None, gate=gate)
    update.eps *= a.scale**2
    finish(update, aligned(a.o.to(update.dtype)), gate, y.out, 0)


def _fill(slots: Any, values: Any, scaling: Any) -> None:
    """Write cotangents that were scaled."""
    for slot, value in zip(slots, values, strict=True):
        if slot is not None:
            slot.copy_(value if scaling is None else value / scaling)


def triangle_sides_vjp(a: Any, y: Any) -> None:
    """Write the cotangents of the pairs, their mask and the weights."""
    H = a.p_in_weight.shape[0] // 2
    update = _update(a, H)
    B, L, M, C = update.x.shape
    if not a.dsides.numel() or not update.x.numel():
        for slot in y:
            if slot is not None:
                slot.zero_()
        return
    scaling, total, norms = scaling_of(update, a.dsides), 0, 0
    for b in range(B):
        x, mask = update.edges(slice(b, b + 1), ALL)
        both = update.new(2, 2, H, L, update.pitch)
        project(update, x, mask, update.sides, sides=both[0], logits=both[1])
        on_sides = torch.zeros_like(both[0])
        cotangent = a.dsides[:, :, :, b]
        to = _rows_of(on_sides, cotangent, M)
        to.copy_(cotangent if scaling is None else cotangent * scaling)
        by_mask = None
        if y.dmask is not None:
            # The mask's cotangent takes factors without the mask.
            by_mask = update.new(1, L, M, dtype=update.accumulator)
            project(update, x, None, update.sides, sides=both[0])
        _sides_back(update, 1, on_sides, *both, mask, by_mask)
        if y.dmask is not None:
            y.dmask[b : b + 1] = by_mask if scaling is None else by_mask / scaling
        on_xn = torch.zeros_like(update.new(1, L, update.pitch, C), dtype=update.accumulator)
        many = _pairs_back(update, slice(0, H), both, on_xn)
        total = total + by_pairs(update, many, normalized(update, x)).sum(0)
        on_x = torch.empty_like(x) if y.dx is None else y.dx[b : b + 1]
        norms = norms + _norm_back(update, x, on_xn, scaling, on_x).sum(0)
    _fill((y.dnorm_in_weight, y.dnorm_in_bias), norms, None)
    p, g = total.split(2 * H)
    found = p[:, :C], p[:, C], g[:, :C], g[:, C]
    _fill((y.dp_in_weight, y.dp_in_bias, y.dg_in_weight, y.dg_in_bias), found, scaling)


def triangle_end_vjp(a: Any, y: Any) -> None:
    """Write the cotangents of the pairs, of o and of the weights."""
    update = _update(a, a.o.shape[1])
    B, L, M, C = update.x.shape
    if not update.x.numel():
        for slot in y:
            if slot is not None:
                slot.zero_()
        return
    H, cotangent = update.H, aligned(a.dout)
    scaling = scaling_of(update, cotangent)
    gate = update.gate(B, ALL)
    project(update, update.x, None, gate=gate)
    on_o = update.new(B * H, L, update.pitch)
    on_gate = update.new(B, L, update.pitch, update.G)
    eps, update.eps = update.eps, update.eps * a.scale**2
    o = aligned(a.o.to(update.dtype))
    end, by_norm_out = _finish_back(update, o, gate, cotangent, scaling, on_o, on_gate)
    update.eps = eps
    on_xn = update.new(B, L, update.pitch, C)
    opened = _gate_back(update, on_gate, normalized(update, update.x), on_xn).sum(0)
    on_x = torch.empty_like(update.x) if y.dx is None else y.dx
    by_norm = _norm_back(update, update.x, on_xn, scaling, on_x)
    end = end.sum(0)
    _fill((y.do,), (on_o.view(B, H, L, -1)[..., :M],), scaling)
    _fill((y.dnorm_in_weight, y.dnorm_in_bias), by_norm.sum(0), None)
    _fill((y.dnorm_out_weight, y.dnorm_out_bias), by_norm_out.sum(0), scaling)
    _fill((y.dp_out_weight, y.dp_out_bias), (end[:, :H], end[:, H]), scaling)
    _fill((y.dg_out_weight, y.dg_out_bias), (opened[:, :C], opened[:, C]), scaling)
