"""Functions of replicated tensors, made of functions of shards: for gradcheck on all ranks.

And derivatives beside one device's, and how much ranks send each other.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist


class Enter(torch.autograd.Function):
    """From a replicated tensor to every rank's own use of it."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return Leave.apply(dx)


class Leave(torch.autograd.Function):
    """From every rank's own part to the sum, replicated."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, dtotal):
        return Enter.apply(dtotal)


def bounds(sizes, rank=None):
    """Return where this rank's shard begins and ends."""
    rank = dist.get_rank() if rank is None else rank
    return sum(sizes[:rank]), sum(sizes[: rank + 1])


def shard(x, axis, sizes):
    """Return this rank's shard of a tensor that all ranks have."""
    low, high = bounds(sizes)
    return x.narrow(axis, low, high - low)


def whole(x, axis, sizes):
    """Return the tensor of which every rank has a shard."""
    low, high = bounds(sizes)
    pad = [0, 0] * x.ndim
    at = 2 * (x.ndim - 1 - axis)
    pad[at : at + 2] = low, sum(sizes) - high
    return Leave.apply(torch.nn.functional.pad(x, pad))


def compare_derivatives(value, want, arrays, parts):
    """Compare derivatives of a number that ranks share with those of one device's.

    `parts` has for each array a function that returns this rank's part of its gradient, or None
    where all ranks have the array.
    """
    others = [torch.randn_like(a) for a in arrays]

    def compare(found, wanted, rtol):
        for part, *pair in zip(parts, found, wanted, strict=True):
            torch.testing.assert_close(*(map(part, pair) if part else pair), rtol=rtol, atol=1e-11)

    def second(gradients, weights):
        loss = sum((g * v).sum() for g, v in zip(gradients, weights, strict=True))
        return torch.autograd.grad(loss, arrays, materialize_grads=True)

    options = {"create_graph": True, "materialize_grads": True}
    gradients = torch.autograd.grad(want, arrays, **options)
    # Two ways: one pulls back by kernels and overlaps exchanges and products, the other can be
    # differentiated again.
    for options["create_graph"] in (False, True):
        found = torch.autograd.grad(value, arrays, retain_graph=True, **options)
        compare(found, gradients, 1e-10)
    # Of gradients that all ranks have alike, one rank's count. A rank's gradient of a token or pair
    # is its own outside of its shard too: zero.
    first = dist.get_rank() == 0
    weights = [v * (part is not None or first) for v, part in zip(others, parts, strict=True)]
    compare(second(found, weights), second(gradients, others), 1e-9)


@contextlib.contextmanager
def counting():
    """Yield a list that gets what every all-to-all brings from other ranks, and sends to them."""
    counts, genuine, rank = [], dist.all_to_all_single, dist.get_rank()

    def counted(out, given, received, sizes, **options):
        counts.append((sum(received) - received[rank], sum(sizes) - sizes[rank]))
        return genuine(out, given, received, sizes, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        yield counts
