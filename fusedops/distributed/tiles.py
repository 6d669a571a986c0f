"""The pairs of a pair representation that each rank of a group has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedops.distributed.exchanges import (
    agree,
    checked_sizes,
    checks_ranks,
    group_of,
    in_chunks,
    sizes_everywhere,
)

NAME = "triangle_multiplicative_update"


class Tiles(NamedTuple):
    """The pairs of all ranks: a rectangle of rows and columns each, of N rows and N columns."""

    group: dist.ProcessGroup
    N: int
    rows: list[slice]
    columns: list[slice]

    def are_bands(self) -> bool:
        """Return whether ranks have whole rows, in their order."""
        whole = all([_length(columns) == self.N for columns in self.columns])
        return whole and self.rows == sorted(self.rows, key=lambda rows: rows.start)

    def areas(self) -> list[int]:
        """Return the number of pairs of every rank."""
        return [_length(r) * _length(c) for r, c in zip(self.rows, self.columns, strict=True)]

    def gathered(self, flat: torch.Tensor, per_pair: int) -> torch.Tensor:
        """Return planes (N, per_pair, N) from the rectangles of all ranks, one after the other."""
        if self.are_bands():
            return flat.view(self.N, per_pair, self.N)
        areas = [area * per_pair for area in self.areas()]
        bands: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for rows, columns, part in zip(self.rows, self.columns, flat.split(areas), strict=True):
            if part.numel() or _length(rows):
                tile = part.view(_length(rows), per_pair, _length(columns))
                bands.setdefault(rows.start, []).append((columns.start, tile))
        return torch.cat(
            [
                torch.cat([tile for _, tile in sorted(band, key=lambda at: at[0])], 2)
                for _, band in sorted(bands.items())
            ]
        )

    def scattered(self, planes: torch.Tensor) -> torch.Tensor:
        """Return the rectangles of all ranks, one after the other: the inverse of `gathered`."""
        if self.are_bands():
            return planes.reshape(-1)
        parts = zip(self.rows, self.columns, strict=True)
        return torch.cat([planes[rows, :, columns].reshape(-1) for rows, columns in parts])


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def slices_of(sizes: Sequence[int]) -> list[slice]:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]


@functools.lru_cache(maxsize=16)
def _group_of_ranks(world: Any, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of some ranks of the world, made once."""
    if len(ranks) == world.size():
        return world
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _sizes(axis: str, given: Any, own: int, N: int, group: dist.ProcessGroup) -> list[int]:
    """Return the checked sizes of shards of an axis, by default ``torch.chunk``'s."""
    sizes = in_chunks(N, group.size()) if given is None else given
    found = checked_sizes(NAME, "sizes", sizes, group)
    if sum(found) != N:
        raise ValueError(f"{NAME}: sizes have the sum {sum(found)}; it should be {N}, N")
    rank = group.rank()
    if own != found[rank]:
        raise ValueError(
            f"{NAME}: x has {own} {axis}; rank {rank} should have {found[rank]} of {N}"
        )
    return found


def tiles_of(x: torch.Tensor, group: Any, sharded: Any, sizes: Any) -> tuple[Tiles, bool]:
    """Return the pairs of each rank, and whether columns instead of rows are sharded."""
    if x.ndim < 3:
        raise ValueError(f"{NAME}: x has shape {tuple(x.shape)}; it should be (..., N, N, C)")
    n, m = x.shape[-3:-1]
    if sharded in (1, 2):
        group = group_of(NAME, group)
        agree(NAME, group, x, sharded=sharded, sizes=sizes)
        axis, own, N = ("rows", n, m) if sharded == 1 else ("columns", m, n)
        found = slices_of(_sizes(axis, sizes, own, N, group))
        return Tiles(group, N, found, [slice(0, N)] * len(found)), sharded == 2
    if sharded not in ((1, 2), (2, 1)):
        raise ValueError(f"{NAME}: sharded is {sharded!r}; it should be 1, 2, (1, 2) or (2, 1)")
    if not isinstance(group, dist.DeviceMesh) or group.ndim != 2:
        raise TypeError(
            f"{NAME}: group is a {type(group).__name__}; with sharded={sharded} it should be a "
            "DeviceMesh of two dimensions"
        )
    grid = increasing("group", group.mesh)
    grid = grid if sharded == (1, 2) else grid.T
    axes = [group.get_group(sharded.index(axis)) for axis in (1, 2)]
    if checks_ranks():
        agree(NAME, _group_of_all(grid), x, sharded=sharded, sizes=sizes)
    if sizes is None:
        lengths = zip((n, m), axes, strict=True)
        sizes = [sizes_everywhere(own, along, x) for own, along in lengths]
    if not isinstance(sizes, Sequence) or len(sizes) != 2:
        raise TypeError(f"{NAME}: sizes should be two sequences of ints, for rows and for columns")
    N = sum(checked_sizes(NAME, "sizes[0]", sizes[0], axes[0]))
    rows = slices_of(_sizes("rows", sizes[0], n, N, axes[0]))
    columns = slices_of(_sizes("columns", sizes[1], m, N, axes[1]))
    return tiles_on(grid, rows, columns, N), False


def increasing(name: str, grid: torch.Tensor) -> torch.Tensor:
    """Return the ranks of a mesh. Raises ValueError, if a group of them has another order."""
    if any((grid.diff(dim=axis) < 0).any() for axis in range(grid.ndim)):
        raise ValueError(
            f"{NAME}: the mesh of {name} has the ranks {grid.tolist()}; they should increase along "
            "each of its dimensions"
        )
    return grid


def tiles_on(grid: torch.Tensor, rows: list[slice], columns: list[slice], N: int) -> Tiles:
    """Return the pairs of each rank of a grid: rows by its first axis, columns by the other."""
    places = [(grid == rank).nonzero()[0].tolist() for rank in sorted(grid.flatten().tolist())]
    flat = _group_of_all(grid)
    return Tiles(flat, N, [rows[i] for i, _ in places], [columns[j] for _, j in places])


def _group_of_all(grid: torch.Tensor) -> dist.ProcessGroup:
    ranks = sorted(grid.flatten().tolist())
    return _group_of_ranks(dist.group.WORLD, tuple(ranks))
