"""Products of matrices: torch's of 16 bits and of float64, ours of float32.

Torch's products of float32 follow a global switch.
"""

from __future__ import annotations

from typing import Any

import torch

from gpukern.trimul import kernels
from gpukern.trimul.plan import Update, ceil, launch

# Batches that a product over all rows is split into at most, and rows that make one more.
_SPLIT, _LONG = 64, 1 << 11


def products(
    update: Update, a: Any, b: Any, out: Any, *, scale: float = 1.0, add: bool = False
) -> None:
    """Write products of batches of matrices, or add them to what is there."""
    if out.dtype != update.dtype:
        if a.is_cuda:
            torch.baddbmm(out, a, b, out.dtype, beta=float(add), alpha=scale, out=out)
        else:
            torch.baddbmm(out, a.float(), b.float(), beta=float(add), alpha=scale, out=out)
        return
    if update.dtype != torch.float32:
        torch.baddbmm(out, a, b, beta=float(add), alpha=scale, out=out)
        return
    size = 128 if update.fast else 64
    (batches, M, K), N = a.shape, b.shape[2]
    programs = batches * ceil(M, size) * ceil(N, size)
    numbers = M, N, K, *a.stride(), *b.stride(), *out.stride()
    constants = size, size, 32 if a.is_cuda else 128, add, update.precision
    launch(kernels.product, (8 if update.fast else 4, 2), programs, (a, b, out), numbers, constants)


def over_rows(update: Update, a: Any, b: Any) -> Any:
    """Return parts (n, K, M) of Σ a b of matrices, of very many rows, in float32 or better."""
    parts = parts_over_rows(update, a, b)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def parts_over_rows(update: Update, a: Any, b: Any) -> list[Any]:
    """Return parts of that (..., K, M), for each of the matrices."""
    rows = a.shape[2]
    least = 1 if rows % 8 else 8
    split = max(n for n in range(1, min(_SPLIT, rows // _LONG) + 2) if rows % (least * n) == 0)
    pairs = [(a, b)]
    if split > 1:
        pairs = [
            (m.unflatten(1, (split, -1)).transpose(0, 1), n.unflatten(0, (split, -1)))
            for m, n in zip(a, b, strict=True)
        ]
    return [_widened(update, m, n) for m, n in pairs]


def _widened(update: Update, a: Any, b: Any) -> Any:
    if update.dtype == torch.float32:
        out = update.new(len(a), a.shape[1], b.shape[2])
        products(update, a, b, out)
        return out
    if update.dtype == torch.float64:
        return a @ b
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def multiply(update: Update, sides: Any, o: Any, h: slice, scale: float = 1.0) -> None:
    """Write planes of o."""
    left, right = sides[..., : update.N]
    left, right = (left.mT, right) if update.direction == "incoming" else (left, right.mT)
    products(update, left, right, o[:, h].flatten(0, 1), scale=scale)


def multiply_back(update: Update, sides: Any, on_o: Any, on_sides: Any) -> None:
    """Write the cotangents of left and right."""
    left, right = sides[..., : update.N]
    on_left, on_right = on_sides[..., : update.N]
    if update.direction == "incoming":
        products(update, right, on_o.mT, on_left)
        products(update, left, on_o, on_right)
    else:
        products(update, on_o, right, on_left)
        products(update, on_o.mT, left, on_right)


def through(update: Update, rows: Any, weight: Any, on_xn: Any, *, add: bool = True) -> None:
    """Write, or add, the cotangent of normalized rows by that of their projections."""
    weight = weight.to(update.dtype)[None].expand(len(rows), -1, -1)
    products(update, rows, weight, on_xn.flatten(1, 2), add=add)
