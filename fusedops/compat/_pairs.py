"""Pairs of atoms, from which a CUDA graph takes the edges of every step.

Lists of edges have fixed sizes, so there is room for some more. A place without an edge holds one
of an atom to itself, of twice the cutoff's length, where an envelope is zero. Pairs are sorted
once, by their targets and by their sources. A step's edges are in the same orders, so that sums of
flags tell their places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops.wigner.plan import grouped_ends


class Chosen(NamedTuple):
    """The edges of a step.

    `lists` are those of `fusedops.Edges`; `offsets` (E, 3) are the cells between an edge's ends,
    and `far` (E, 3) is to be added to vectors, Å: zeros for edges. `squares` are the squares of
    pairs' lengths, Å², `total` is the number of edges, and `degrees` are those of atoms.
    """

    lists: tuple[Any, ...]
    offsets: Any
    far: Any
    squares: Any
    total: Any
    degrees: Any


class Pairs:
    """Pairs of atoms on a device, with room for more.

    Parameters
    ----------
    pos : tensor (N, 3)
        Of the atoms.
    pairs : tensor (2, P), int64
        Sources and targets.
    edges : int
        The pairs within the cutoff.
    cutoff : float
        Å.
    """

    def __init__(self, pos: Any, pairs: Any, edges: int, cutoff: float) -> None:
        self.cutoff = cutoff
        #: Places of edges.
        self.space = edges + edges // 64 + 128
        self.room = room = pairs.shape[1] + pairs.shape[1] // 16 + 1024
        self.ends = pairs.new_zeros(2, room)
        self.offsets = pos.new_zeros(room, 3)
        self.by_source = torch.arange(room, device=pos.device)
        #: The targets of pairs, and then the sources in their order.
        self.atoms = pairs.new_zeros(2 * room)
        # Sums up to a pair begin with none.
        self.are_pairs = torch.zeros(1 + room, dtype=torch.bool, device=pos.device)
        #: Where the pairs of each atom begin in both orders.
        self.starts = pairs.new_zeros(2, len(pos) + 1)
        self.numbers = torch.arange(len(pos) + 1, device=pos.device)
        # A pair that is no edge gets the first place, which is cut off.
        self.places = torch.arange(-1, self.space, device=pos.device).repeat(2, 1)
        self.far = pos.new_tensor([2 * cutoff, 0, 0]).repeat(self.space + 1, 1)

    def keep(self, pairs: Any, offsets: Any) -> bool:
        """Take other pairs, if there is room for them, with the cells between their ends."""
        count, room = pairs.shape[1], self.room
        if count > room:
            return False
        none = torch.zeros_like(pairs, dtype=torch.bool)
        by_source, sources, order, targets = grouped_ends(pairs, none, self.starts.shape[1] - 1)
        pairs = pairs.index_select(1, order)
        # The same pairs, by their numbers in the order of targets.
        rank = torch.empty_like(order)
        rank[order] = torch.arange(count, device=order.device)
        by_source = rank.index_select(0, by_source)
        self.ends[:, :count] = pairs
        self.offsets[:count] = offsets.index_select(0, order)
        self.by_source[:count] = by_source
        torch.arange(count, room, out=self.by_source[count:])
        self.atoms[:count] = pairs[1]
        self.atoms[room : room + count] = pairs[0].index_select(0, by_source)
        self.are_pairs[1 : 1 + count] = True
        self.are_pairs[1 + count :] = False
        # Before the first source, `choose` has the sum of all targets.
        self.starts[0], self.starts[1] = targets, torch.where(sources == 0, 0, room + sources)
        return True

    def choose(self, pos: Any, cell: Any, batch: Any) -> Chosen:
        """Return the edges among the pairs.

        Places without an edge are shared out among the atoms: a sum over an atom's edges is one
        program's.
        """
        squares = vectors(pos, cell, batch, self.ends, self.offsets).square().sum(1)
        are_edges = self.are_pairs.clone()
        are_edges[1:].logical_and_(inside(squares, self.cutoff))
        are_edges = torch.cat([are_edges, are_edges[1:].index_select(0, self.by_source)])
        # The edges up to each pair, in the order of targets and then of sources.
        sums = are_edges.cumsum(0)
        total = sums[self.room].clone()
        sums[self.room + 1 :].sub_(total)
        # With more edges than places the step is made again.
        sums.clamp_(max=self.space)
        starts = sums[self.starts]
        degrees = starts[0].diff()
        spare = (self.space - sums[self.room]) * self.numbers // len(degrees)
        starts = starts + spare
        sums = sums[1:] + spare.index_select(0, self.atoms)
        at, at_by_source = (sums * are_edges[1:]).chunk(2)
        ends = torch.searchsorted(starts, self.places, right=True)
        target = ends[0] - 1
        source = target.scatter(0, at, self.ends[0])
        # An atom's spare places are at the end of both of its lists.
        by_source = self.places[0] + (starts[0] - starts[1]).index_select(0, ends[1])
        by_source.scatter_(0, at_by_source, at.index_select(0, self.by_source) - 1)
        lists = source[1:], target[1:], by_source[1:], starts[1], self.places[0, 1:], starts[0]
        offsets = torch.zeros_like(self.far).index_copy_(0, at, self.offsets)
        far = self.far.index_fill(0, at, 0.0)
        return Chosen(lists, offsets[1:], far[1:], squares, total, degrees)


def inside(squares: Any, cutoff: float) -> Any:
    """Return whether lengths are below the cutoff, or not finite: the model tells of these."""
    return squares.nan_to_num(nan=0.0, posinf=0.0) < cutoff**2


def vectors(pos: Any, cell: Any, batch: Any, ends: Any, offsets: Any) -> Any:
    """Return the vectors from targets to the sources' images."""
    source, target = ends
    of = cell if len(cell) == 1 else cell.index_select(0, batch.index_select(0, target))
    # A product of matrices might round the cell to TF32.
    shifts = (offsets[:, :, None] * of).sum(1)
    return pos.index_select(0, source) - pos.index_select(0, target) + shifts
