"""Backward passes of several cotangents at once, as ``is_grads_batched`` asks for.

Torch then gives an autograd.Function cotangents that are batches in disguise, without memory of
their own and without a way to ask for their rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedops._frame.torch_private import private

#: Torch nests no more batches than that.
_LEVELS = 64

_BATCHED: Any = private().dispatch_key("Batched")


def is_batch(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is a batch in disguise."""
    return tensor is not None and private().dispatch_keys(tensor).has(_BATCHED)


def row_by_row(
    pull_back: Callable[[tuple[Any, ...]], Sequence[Any]], dy: Sequence[Any]
) -> list[Any]:
    """Return cotangents, batches again, of a pullback that takes no batches."""
    level, first = _level(next(cotangent for cotangent in dy if is_batch(cotangent)))
    count = len(first)
    columns = [
        private().remove_batch_dim(cotangent, level, count, 0)
        if is_batch(cotangent)
        else [cotangent] * count
        for cotangent in dy
    ]
    rows = [pull_back(row) for row in zip(*columns, strict=True)]
    return [
        None if column[0] is None else private().add_batch_dim(torch.stack(column), 0, level)
        for column in zip(*rows, strict=True)
    ]


def _level(tensor: Any) -> tuple[int, torch.Tensor]:
    """Return how deep a batch is nested, and its plain tensor, whose first dimension it hides."""
    for level in range(1, _LEVELS + 1):
        plain = private().remove_batch_dim(tensor, level, 1, 0)
        if not is_batch(plain):
            return level, plain
    raise NotImplementedError(
        "a batch of batched cotangents can't be pulled back; use torch.func's vmap, or one batch"
    )
