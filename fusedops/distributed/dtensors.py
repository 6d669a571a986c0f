"""DTensors in the arguments of public ops: unwrapped here, and wrapped with the same placements."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fusedops.distributed.exchanges import in_chunks
from fusedops.distributed.tiles import Tiles, increasing, slices_of, tiles_on
from fusedops.distributed.triangles import updated
from fusedops.trimul import op as trimul


class _ToLocal(torch.autograd.Function):
    """A rank's part of a DTensor; its adjoint makes a DTensor of all parts' cotangents.

    Torch's own functions cut derivatives of second order off, silently, in its older versions.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, grads: Any) -> torch.Tensor:
        ctx.whole = x.device_mesh, grads, x.shape
        local = x.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, dlocal: torch.Tensor) -> tuple[DTensor, None]:
        return _FromLocal.apply(dlocal, *ctx.whole), None


class _FromLocal(torch.autograd.Function):
    """The DTensor that all ranks' parts are."""

    @staticmethod
    def forward(ctx: Any, local: Any, mesh: Any, placements: Any, shape: torch.Size) -> DTensor:
        ctx.placements = tuple(placements)
        stride, local = torch.empty(shape, device="meta").stride(), local.contiguous()
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx: Any, dx: DTensor) -> tuple[Any, ...]:
        # Every rank's part of a sum has the cotangent of the sum.
        back = tuple([Replicate() if p.is_partial() else p for p in ctx.placements])
        dx = dx if tuple(dx.placements) == back else dx.redistribute(placements=back)
        return _ToLocal.apply(dx, ctx.placements), None, None, None


def _local(op: str, name: str, value: Any, x: DTensor, placements: Any, grads: Any) -> Any:
    """Return the local tensor of an argument with the expected placements. Raises ValueError."""
    if value.device_mesh != x.device_mesh:
        raise ValueError(f"{op}: {name} is on {value.device_mesh}; it should be on the mesh of x")
    if tuple(value.placements) != tuple(placements):
        raise ValueError(
            f"{op}: {name} has placements {tuple(value.placements)}; they should be "
            f"{tuple(placements)}, for x with {tuple(x.placements)}"
        )
    return _ToLocal.apply(value, grads)


def triangle_multiplicative_update(*args: Any, **kwargs: Any) -> DTensor:
    """Return the update of a DTensor that is sharded by batch, rows or columns."""
    name = "triangle_multiplicative_update"
    try:
        call = inspect.signature(trimul.triangle_multiplicative_update).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    call.apply_defaults()
    given = call.arguments
    x, mask = given["x"], given["mask"]
    if x.ndim < 3 or x.shape[-3] != x.shape[-2]:
        raise ValueError(f"{name}: x has shape {tuple(x.shape)}; it should be (..., N, N, C)")
    mesh, N = x.device_mesh, x.shape[-2]
    # A subclass of Shard has another rule of which elements a rank has.
    axes = [
        placement.dim - x.ndim if type(placement) is Shard else None for placement in x.placements
    ]
    pairs = [axis for axis in axes if axis in (-3, -2)]
    wrong = [
        placement
        for placement, axis in zip(x.placements, axes, strict=True)
        if axis == -1 or (axis is None and placement != Replicate())
    ]
    if wrong or len(set(pairs)) < len(pairs):
        raise ValueError(
            f"{name}: x has placements {tuple(x.placements)}; each should be Replicate, or "
            "Shard of the batch, of rows or of columns, of the last two once"
        )
    # Of a copy, a rank's gradient is its part where x is sharded, and whole where all do the same.
    grads = [Replicate() if axis is None else Partial() for axis in axes]
    if mask is not None:
        if not isinstance(mask, DTensor):
            raise TypeError(f"{name}: mask is no DTensor; it should be one, as x is")
        wanted = [_along(mask, axis) for axis in axes]
        grads_of_mask = [g if p == Replicate() else p for g, p in zip(grads, wanted, strict=True)]
        mask = _local(name, "mask", mask, x, wanted, grads_of_mask)
    whole = [Replicate()] * mesh.ndim
    weights = [
        _local(name, weight, given[weight], x, whole, grads)
        if isinstance(given[weight], DTensor)
        else given[weight]
        for weight in trimul.ARRAYS
        if weight not in ("x", "mask")
    ]
    others = *weights, given["eps"], given["precision"], given["gate"]
    more = {name: given[name] for name in ("max_memory", "backend")}
    local, direction = _ToLocal.apply(x, x.placements), given["direction"]
    if pairs:
        out = updated(*_tiles(x, axes, N), local, direction, mask, *others, **more)
    else:
        op: Any = trimul.triangle_multiplicative_update
        out = op(local, direction, mask, *others, **more)
    found: DTensor = _FromLocal.apply(out, mesh, x.placements, x.shape)
    return found


def _along(mask: DTensor, axis: int | None) -> Any:
    """Return the placement of a mask that broadcasts to x, whose axis is sharded."""
    if axis is None or mask.ndim + axis + 1 < 0 or mask.shape[axis + 1] == 1:
        return Replicate()
    return Shard(mask.ndim + axis + 1)


def _tiles(x: DTensor, axes: list[int | None], N: int) -> tuple[Tiles, bool]:
    """Return which rank has which pairs, and whether columns instead of rows are sharded."""
    mesh, own = x.device_mesh, x.device_mesh.get_coordinate()
    assert own is not None
    # The ranks that share this rank's members of the batch: rows first, and then columns.
    along = [axes.index(axis) if axis in axes else None for axis in (-3, -2)]
    here = [slice(None) if at in along else place for at, place in enumerate(own)]
    grid = increasing("x", mesh.mesh[tuple(here)])
    if None in along:
        transposed = along[0] is None
        grid, whole = grid.reshape(-1, 1), [slice(0, N)]
        return tiles_on(grid, slices_of(in_chunks(N, len(grid))), whole, N), transposed
    grid = grid if axes.index(-3) < axes.index(-2) else grid.T
    rows, columns = (slices_of(in_chunks(N, ranks)) for ranks in grid.shape)
    return tiles_on(grid, rows, columns, N), False
