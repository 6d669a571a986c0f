"""Products of matrices: ours of float32 and of few rows, torch's of 16 bits and of float64.

Torch's products of float32 follow a global switch, and a call of torch takes the host several times
as long as a launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gpukern.launch import power, processors
from gpukern.precision import EMULATED
from gpukern.products import (
    Halves,
    in_vectors,
    multiply_halves,
    parts_of,
    repay,
    split,
    unit_of,
)
from gpukern.tape import product
from gpukern.trimul import kernels
from gpukern.trimul.plan import Update, ceil, launch, up

# The most batches that a product over all rows is split into.
SPLIT = 64
# The fewest rows of a batch, and the fewest if else the GPU had too few programs.
LONG, _SHORT = 1 << 11, 1 << 7


class Tile(NamedTuple):
    """Rows and columns of a program, the terms that it adds at once, its warps and stages."""

    size: int
    terms: int
    warps: int
    stages: int


# For products of float32 by their precision, and for 16 bits.
_TILES = {
    "tf32": Tile(size=128, terms=32, warps=8, stages=2),
    EMULATED: Tile(size=64, terms=32, warps=4, stages=3),
    "ieee": Tile(size=64, terms=32, warps=4, stages=2),
}
_TILE_OF_16_BITS = Tile(size=64, terms=64, warps=4, stages=3)


def _tile(update: Update) -> Tile:
    return _TILE_OF_16_BITS if update.dtype.itemsize == 2 else _TILES[update.precision]


def products(
    update: Update, a: Any, b: Any, out: Any, *, scale: float = 1.0, add: bool = False
) -> None:
    """Write products of batches of matrices, or add them to `out`."""
    if not update.ours:
        if out.dtype == update.dtype:
            tf32 = False if update.apart else None
            how = {"beta": float(add), "alpha": scale, "out": out}
            product(tf32, torch.baddbmm, out, a, b, **how)
        elif a.is_cuda:
            torch.baddbmm(out, a, b, out.dtype, beta=float(add), alpha=scale, out=out)
        else:
            torch.baddbmm(out, a.float(), b.float(), beta=float(add), alpha=scale, out=out)
        return
    sizes = *a.shape[:2], b.shape[2], a.shape[2]
    # Halves take as much memory as the matrices.
    if update.halved and not update.limit and repay(a.device, *sizes):
        multiply_halves(split(a, 2), split(b, 1), out, factor=scale, add=add)
        return
    size, terms, warps, stages = _tile(update)
    # The interpreter's time grows with its steps.
    terms = terms if a.is_cuda else 128
    (batches, M, K), N = a.shape, b.shape[2]
    programs = batches * ceil(M, size) * ceil(N, size)
    matrices = a, b, out
    numbers = M, N, K, *[by for matrix in matrices for by in matrix.stride()], scale
    units, aligned = [unit_of(matrix) for matrix in matrices], in_vectors(*matrices)
    constants = *units, aligned, size, size, terms, None if a.is_cuda else ceil(K, terms)
    constants += add, update.types.dot, update.precision
    names = ("a", "b", "c") if aligned else ()
    how = {"warps": warps, "stages": stages, "aligned": names}
    launch(kernels.product, programs, matrices, numbers, constants, **how)


class Halved(NamedTuple):
    """Halves of rows, the reciprocals of their scales, and the step from hi to lo."""

    halves: Any
    scales: Any
    lo: int

    @staticmethod
    def of(
        update: Update,
        projection: tuple[Any, Any],
        gate: tuple[Any, Any] = (None, None),
        other: Any = None,
        *,
        norm: tuple[Any, Any] = (None, None),
        most: Any = None,
        scales: Any = None,
        zeros: Any = None,
    ) -> Halved:
        """Return halves of rows, if products are made of halves.

        They are of a projection's weight, and of its gate's and another if given. Scales of
        projections, and of gates if there is room, are written with their reciprocals to `scales`;
        `most` is the largest magnitude of a factor of projections. `zeros` are written as well.
        """
        weights = [weight for weight in (projection[0], gate[0], other) if weight is not None]
        if not weights or not update.halved:
            return Halved(None, None, 0)
        rows, C = sum(map(len, weights)), weights[0].shape[1]
        halves = update.new(2, 1, rows, up(C), dtype=torch.float16)
        reciprocals = update.new(1, rows)
        projections = 0 if projection[0] is None else len(projection[0])
        to = (None, None) if scales is None else scales
        gates = scales is not None and len(scales[0]) > projections
        tensors = *projection, *gate, other, *norm, most, halves, reciprocals, *to, zeros
        numbers = halves.stride(0), 0 if zeros is None else zeros.numel()
        constants = C, projections, gates, power(C, 8), update.types.float
        launch(kernels.split_rows, rows, tensors, numbers, constants)
        # They meet normalized rows, whose rounding errors exceed what small numbers lose.
        return Halved(halves, reciprocals, halves.stride(0))


def over_rows(update: Update, a: Any, b: Any) -> Any:
    """Return parts (n, K, M) of Σ a b of matrices, of very many rows, in float32 or better."""
    parts = parts_over_rows(update, a, b)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def parts_over_rows(update: Update, a: Any, b: Any) -> list[Any]:
    """Return parts (..., K, M) of the sum of `over_rows`, for each of the matrices."""
    rows = a.shape[2]
    least = 1 if rows % 8 else 8
    most = min(SPLIT, rows // LONG) + 1
    if update.ours and len(a) == 1:
        size = _tile(update).size
        programs = ceil(a.shape[1], size) * ceil(b.shape[2], size)
        most = max(most, min(SPLIT, rows // _SHORT, ceil(processors(a.device), programs)))
    split = max(n for n in range(1, most + 1) if rows % (least * n) == 0)
    pairs = [(a, b)]
    if split > 1:
        pairs = [
            (m.unflatten(1, (split, -1)).transpose(0, 1), n.unflatten(0, (split, -1)))
            for m, n in zip(a, b, strict=True)
        ]
    return [_widened(update, m, n) for m, n in pairs]


def sum_of_halves(update: Update, left: Halves, right: Halves) -> Any:
    """Return parts of the product of halves, a sum over very many terms."""
    (_, M, K), N = left.shape, right.shape[2]
    parts = parts_of(update.x.device, M, N, K)
    sums = update.new(parts, M, N)
    multiply_halves(left, right, sums, parts=parts)
    return sums


def _widened(update: Update, a: Any, b: Any) -> Any:
    if update.ours or update.apart:
        out = update.new(len(a), a.shape[1], b.shape[2], dtype=torch.float32)
        products(update, a, b, out)
        return out
    if update.dtype == torch.float64:
        return a @ b
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def multiply(
    update: Update, sides: Any, side_scales: Any, o: Any, h: slice, scale: float = 1.0
) -> None:
    """Write planes of o, from left and right or from their halves."""
    if side_scales is None:
        left, right = sides[..., : update.N]
    else:
        left, right = _halves_of_sides(update, sides, side_scales[1], len(o))
    left, right = (left.mT, right) if update.direction == "incoming" else (left, right.mT)
    out = o[:, h].flatten(0, 1)
    if side_scales is None:
        products(update, left, right, out, scale=scale)
    else:
        multiply_halves(left, right, out, factor=scale)


def _halves_of_sides(update: Update, sides: Any, reciprocals: Any, members: int) -> list[Halves]:
    """Return left and right as batches of split planes, of which each has one scale.

    Behind the planes of either half, there may be others.
    """
    N, planes = update.N, members * reciprocals.shape[0] // 2
    reciprocals = reciprocals.view(2, 1, -1).expand(2, members, -1).reshape(2, planes, 1)
    low, shape = sides.stride(0) // sides.stride(-3), (planes, N, N)
    return [
        Halves(sides, scales.expand(-1, N), shape, fast=2, low=low, first=side * planes)
        for side, scales in enumerate(reciprocals)
    ]


def multiply_back(update: Update, sides: Any, do: Any, dsides: Any) -> None:
    """Write the cotangents of left and right."""
    left, right = sides[..., : update.N]
    dleft, dright = dsides[..., : update.N]
    for a, b, out in _pairs_back(update, left, right, do, dleft, dright):
        products(update, a, b, out)


def multiply_halves_back(
    update: Update, sides: Any, reciprocals: Any, do: Halves, dsides: Any, most: Any
) -> None:
    """Write the cotangents of left and right, and the bits of each plane's largest magnitude."""
    left, right = _halves_of_sides(update, sides, reciprocals, 1)
    to = zip(dsides[..., : update.N], most, strict=True)
    for a, b, (out, largest) in _pairs_back(update, left, right, do, *to):
        multiply_halves(a, b, out, most=largest)


def _pairs_back(
    update: Update, left: Any, right: Any, do: Any, dleft: Any, dright: Any
) -> tuple[tuple[Any, Any, Any], ...]:
    """Return the factors of the cotangents of left and right, with their outputs."""
    if update.direction == "incoming":
        return (right, do.mT, dleft), (left, do, dright)
    return (do, right, dleft), (do.mT, left, dright)


def through(update: Update, rows: Any, weight: Any, dxn: Any, *, add: bool = True) -> None:
    """Write, or add, the cotangent of normalized rows, from their projections' cotangent."""
    weight = weight if update.ours else weight.to(update.dtype)
    weight = weight[None].expand(len(rows), -1, -1)
    products(update, rows, weight, dxn.flatten(1, 2), add=add)
