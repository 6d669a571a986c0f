"""The stages of an update that ranks share: before and after the products, on rectangles of pairs.

They are made of the kernels of a whole update, whose lines here are L lines of M pairs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fusedops.trimul.op import Weights, slices
from fusedops.trimul.rows import copy_rows
from gpukern.trimul.backward import (
    Parts,
    finish_back,
    finish_back_on_hopper,
    front_back,
    is_on_hopper,
    project_back,
    scaling_of,
    sides_back,
    sum_parts,
    through_norm,
)
from gpukern.trimul.forward import finish, project
from gpukern.trimul.plan import ALL, Update, aligned, is_aligned

#: The pairs of which a backward pass on Hopper has projections and logits at a time.
_PAIRS = 1 << 21


def _update(a: Any, H: int) -> Update:
    """Return the part of an update that a stage has, with H hidden channels."""
    given = a._asdict()
    none = a.x.new_empty(0, a.x.shape[3])
    needed = "p_in_weight", "g_in_weight", "g_out_weight"
    others = dict.fromkeys(Weights._fields) | dict.fromkeys(needed, none)
    others |= {"mask": None, "gate": "output"} | given
    return Update(SimpleNamespace(**others, direction="outgoing", max_memory=0), H)


def triangle_sides(a: Any, y: Any) -> None:
    """Write left and right of a rectangle of pairs."""
    update = _update(a, a.p_in_weight.shape[0] // 2)
    P, B, Q, L, M = y.sides.shape
    if not y.sides.numel():
        return
    # Planes without gaps are written in place, if two steps lead to every channel.
    fits = update.pitch == M and y.sides.dtype == update.dtype and is_aligned(y.sides)
    in_place = fits and (P == 2 or B == 1)
    for b in range(B):
        to, shape = y.sides[:, b], (2, update.H, L, update.pitch)
        planes = to.view(shape) if in_place else update.new(*shape)
        project(update, *update.edges(slice(b, b + 1), ALL), sides=planes)
        if not in_place:
            copy_rows(to, planes.view(P, Q, L, -1)[..., :M])


def triangle_end(a: Any, y: Any) -> None:
    """Write the output for a rectangle of o."""
    update = _update(a, a.o.shape[1])
    if not y.out.numel():
        return
    gate = update.gate(len(a.x), ALL, y.out)
    project(update, update.x, None, gate=gate)
    update.eps *= a.scale**2
    finish(update, aligned(a.o.to(update.dtype)), gate, y.out, 0)


def _all_zero(slots: Any) -> None:
    for slot in slots:
        if slot is not None:
            slot.zero_()


def triangle_sides_vjp(a: Any, y: Any) -> None:
    """Write the cotangents of the pairs, their mask and the weights."""
    update = _update(a, len(a.p_in_weight) // 2)
    if not update.x.numel():
        _all_zero(y)
        return
    dweights = _dweights(y)
    scaling = scaling_of(update, a.dsides, a.dlogits)
    if is_on_hopper(update, y.dmask):
        lines = slices(update.L, -(-_PAIRS // update.N))
        some = [(slice(b, b + 1), part) for b in range(update.B) for part in lines]
        sums = _added([_some_on_hopper(update, a, y, *part, scaling) for part in some])
        parts = through_norm(*sums, None, scaling, update.weights, dweights)
        sum_parts(update, parts, None, dweights)
    else:
        sums = _added([_member(update, a, y, b, scaling) for b in range(update.B)])
        dpairs, dopen, dnorm = sums
        parts = Parts(norm=dnorm, sides=dpairs, opened=dopen)
        sum_parts(update, parts, scaling, dweights)


def _dweights(y: Any) -> Weights:
    """Return the outputs for cotangents of weights by the weights' names."""
    return Weights(*[getattr(y, f"d{name}", None) for name in Weights._fields])


def _added(found: list[Any]) -> list[Any]:
    """Return the sums of parts over parts of the pairs."""
    if len(found) == 1:
        return [*found[0]]
    totals = [[parts.sum(0, keepdim=True) for parts in some] for some in found]
    return [torch.cat(parts).sum(0, keepdim=True) for parts in zip(*totals, strict=True)]


def _some_on_hopper(
    update: Update, a: Any, y: Any, b: slice, lines: slice, scaling: Any
) -> tuple[Any, Any]:
    """Write the cotangents of some pairs; return parts of the cotangents behind the norm."""
    x, mask = update.edges(b, lines)
    dboth = update.new(2, 2, update.H, *x.shape[1:3])
    # The memory of the logits' cotangents may hold a copy of the sides' before.
    dsides = a.dsides[b.start, :, lines].unflatten(0, (2, update.H))
    dsides = _as_taken(update, a.dsides, dsides, scaling, dboth[1])
    dgate = _as_taken(update, a.dlogits, a.dlogits[b, lines], scaling)
    dx = None if y.dx is None else y.dx[b, lines]
    return project_back(update, x, mask, dsides, dboth, dgate, scaling, dx)


def _as_taken(update: Update, whole: Any, part: Any, scaling: Any, room: Any = None) -> Any:
    """Return a part of a cotangent as kernels take it: itself, or else a scaled copy in `room`."""
    if scaling is None and whole.dtype == update.dtype and is_aligned(whole):
        return part
    to = update.new(*part.shape) if room is None else room
    return to.copy_(part if scaling is None else part * scaling)


def _member(update: Update, a: Any, y: Any, b: int, scaling: Any) -> tuple[Any, Any, Any]:
    """Do the same for a member of the batch where the kernels of Hopper don't serve."""
    x, mask = update.edges(slice(b, b + 1), ALL)
    _, L, M, _ = x.shape
    both = update.new(2, 2, update.H, L, update.pitch)
    project(update, x, mask, sides=both[0], logits=both[1])
    dsides, dgate = torch.zeros_like(both[0]), update.new(1, L, update.pitch, update.G).zero_()
    for to, cotangent in (
        (dsides.flatten(0, 1)[..., :M], a.dsides[b]),
        (dgate[0, :, :M], a.dlogits[b]),
    ):
        to.copy_(cotangent if scaling is None else cotangent * scaling)
    dmask = None if y.dmask is None else y.dmask[b : b + 1].zero_()
    sides_back(update, x, mask, both, dsides, scaling, dmask)
    dx = None if y.dx is None else y.dx[b : b + 1]
    return front_back(update, x, both, dgate, scaling, dx)


def triangle_end_vjp(a: Any, y: Any) -> None:
    """Write the cotangents of o, of the last gate's logits, and of the end's weights."""
    update = _update(a, a.o.shape[1])
    B, L, M, _ = update.x.shape
    if not update.x.numel():
        _all_zero(y)
        return
    cotangent = aligned(a.dout)
    scaling = scaling_of(update, cotangent)
    gate = update.gate(B, ALL)
    project(update, update.x, None, gate=gate)
    pair = y.do, y.dlogits
    # An output without gaps is written in place, if its numbers need no other form.
    own = [
        slot is not None
        and scaling is None
        and slot.dtype == update.dtype
        and update.pitch == M
        and is_aligned(slot)
        for slot in pair
    ]
    do = y.do if own[0] else update.new(B, update.H, L, update.pitch)
    dgate = y.dlogits if own[1] else update.new(B, L, update.pitch, update.G)
    update.eps *= a.scale**2
    ends = aligned(a.o.to(update.dtype)), gate, cotangent, scaling, do.flatten(0, 1), dgate
    dweights = _dweights(y)
    if is_on_hopper(update, None):
        by_end = finish_back_on_hopper(update, *ends, 0)
        parts = through_norm(None, None, by_end, scaling, update.weights, dweights)
        sum_parts(update, parts, None, dweights)
    else:
        dend, dnorm_out = finish_back(update, *ends)
        sum_parts(update, Parts(norm_out=dnorm_out, end=dend), scaling, dweights)
    found = do[..., :M], dgate[:, :, :M]
    for slot, value, done in zip(pair, found, own, strict=True):
        if slot is not None and not done:
            slot.copy_(value if scaling is None else value / scaling)
