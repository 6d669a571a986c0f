"""Graphs whose nodes belong to ranks: each rank's edges, and the remote nodes that these read."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from fusedops._frame.arrays import cast, wide
from fusedops._frame.check import alike, indices, of_shape
from fusedops._frame.hook import outside_of_graphs
from fusedops.distributed.exchanges import Trip, agree, group_of, tensor
from fusedops.wigner import Edges

_NAME = "Partition"


class Partition:
    r"""One rank's part of a graph, made once for many calls.

    A rank has the nodes that it owns, and the edges that end at them. The sources of these edges
    that other ranks own, its halo, follow its own nodes in `edges`, in the order of their owners.

    Parameters
    ----------
    edge_index : tensor (2, E), int32 or int64
        Source and target of this rank's edges, as numbers of nodes of the whole graph: all edges
        whose target this rank owns. No rank needs the edges of others.
    owner : tensor (N,), int32 or int64
        The rank in the group of every node of the whole graph, the same on every rank. Any choice
        is right; nodes near each other should share a rank, since every remote source travels. A
        rank may own nothing.
    group : ProcessGroup, or DeviceMesh of one dimension
        The ranks.

    Attributes
    ----------
    nodes, halo : tensor (n,) and (h,), int64
        The numbers in the whole graph of own nodes, in increasing order, and of remote sources.
    edges : Edges
        This rank's edges between n + h nodes: own ones, then the halo.
    num_local : int
        n.
    group : ProcessGroup
        The ranks.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type, dtype or shape.
    IndexError
        On every rank, before nodes are asked for, if a rank's number of a node or an owner is out
        of range, or if it doesn't own a target. On a rank that is asked for nodes of others, as
        `owner` then differs; the others wait.

    Notes
    -----
    The ranks tell each other which nodes they read: two small all-to-alls, which wait for all
    ranks.

    References
    ----------
    Park et al., "Scalable Parallel Algorithm for Graph Neural Network Interatomic Potentials",
    J. Chem. Theory Comput. 20 (2024) 4857 (SevenNet); compare the gather of all nodes in fairchem.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from fusedops import distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> index, owner = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.zeros(3, dtype=torch.int64)
    >>> part = distributed.Partition(index, owner, group=dist.group.WORLD)
    >>> part.edges.num_nodes, part.num_local
    (3, 3)
    >>> dist.destroy_process_group()
    """

    def __init__(self, edge_index: torch.Tensor, owner: torch.Tensor, *, group: Any) -> None:
        ends = indices(_NAME, "edge_index", tensor(_NAME, "edge_index", edge_index)).long()
        of_shape(_NAME, "edge_index", ends, (2, "E"))
        owner = indices(_NAME, "owner", tensor(_NAME, "owner", owner)).long()
        of_shape(_NAME, "owner", owner, ("N",))
        alike(_NAME, "owner", owner, "edge_index", ends)
        self.group = group_of(_NAME, group)
        agree(_NAME, self.group, owner, owner=owner)
        rank, ranks = self.group.rank(), self.group.size()
        error = _error(ends, owner, rank, ranks)
        if error is None:
            (source, _), mine = ends, owner == rank
            self.nodes = mine.nonzero()[:, 0]
            remote = torch.unique(source[~mine[source]])
            # Sorted by owner, and by number among the nodes of one owner.
            self.halo = remote[torch.sort(owner[remote], stable=True).indices]
            counts = torch.bincount(owner[self.halo], minlength=ranks)
        else:
            counts = owner.new_full((ranks,), -1)
        asked = torch.empty_like(counts)
        dist.all_to_all_single(asked, counts, group=self.group)
        # How many nodes this rank reads of every rank, and every rank of this one.
        self._received, self._sent = torch.stack([counts, asked]).tolist()
        if error is not None:
            raise IndexError(error)
        if min(self._sent) < 0:
            raise IndexError(
                f"{_NAME}: edge_index or owner is out of range on rank {self._sent.index(-1)}; see "
                "its error"
            )
        wanted = self.halo.new_empty(sum(self._sent))
        dist.all_to_all_single(wanted, self.halo, self._sent, self._received, group=self.group)
        if not torch.isin(wanted, self.nodes).all():
            raise IndexError(
                f"{_NAME}: owner differs between ranks; rank {rank} was asked for nodes that it "
                "doesn't own"
            )
        self.num_local = len(self.nodes)
        place = torch.empty_like(owner)
        place[self.nodes] = torch.arange(self.num_local, device=owner.device)
        place[self.halo] = self.num_local + torch.arange(len(self.halo), device=owner.device)
        # This rank's nodes that others read, for each rank without repetition.
        self._read = place[wanted]
        self.edges = Edges(place[ends], self.num_local + len(self.halo))

    @outside_of_graphs
    def extend(self, x: torch.Tensor) -> torch.Tensor:
        r"""Return values of own nodes with values of the halo behind them.

        .. math:: \mathrm{out} = (x_{\mathrm{own}} \;\Vert\; x_{\mathrm{halo}})

        Parameters
        ----------
        x : tensor (n, ...)
            A value, of any dtype, for every own node.

        Returns
        -------
        tensor (n + h, ...)
            To be read by edges. Of a sum over `edges`, the first n rows count: a rank has all edges
            of its own nodes only.

        Raises
        ------
        TypeError, ValueError
            If x is no tensor, or has the wrong length or device; nothing is sent then.

        Notes
        -----
        Derivatives of every order: the adjoint sends cotangents of the halo to their owners, which
        add them in the order of the ranks, in float32 or better, the same in every run. The loss is
        the sum of the losses of all ranks; gradients by own nodes are whole then, such as forces.

        Examples
        --------
        >>> import torch, torch.distributed as dist
        >>> from fusedops import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> index, owner = torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, dtype=torch.int64)
        >>> part = distributed.Partition(index, owner, group=dist.group.WORLD)
        >>> part.extend(torch.ones(2, 3)).shape
        torch.Size([2, 3])
        >>> dist.destroy_process_group()
        """
        x = tensor(f"{_NAME}.extend", "x", x)
        if x.ndim == 0 or len(x) != self.num_local:
            raise ValueError(
                f"{_NAME}.extend: x has shape {tuple(x.shape)}; it should be "
                f"({self.num_local}, ...), with this rank's nodes"
            )
        alike(f"{_NAME}.extend", "x", x, "edge_index", self._read)
        kind = x.dtype, x.requires_grad, *x.shape[1:]
        agree(f"{_NAME}.extend", self.group, x, x=kind)
        extended: torch.Tensor = _Extend.apply(x, self)
        return extended

    def _trip(self, each: int) -> Trip:
        """Return the trip of so many numbers of each node to the ranks that read them."""
        sent, received = ([n * each for n in some] for some in (self._sent, self._received))
        return Trip(sent, received, self.group)

    def __repr__(self) -> str:
        own = f"{self.num_local} nodes, {len(self.halo)} remote ones, {self.edges.num_edges} edges"
        return f"{_NAME}({own}, rank {self.group.rank()} of {self.group.size()})"


def _error(ends: torch.Tensor, owner: torch.Tensor, rank: int, ranks: int) -> str | None:
    """Return what is wrong with values, or None."""
    bad = ((owner < 0) | (owner >= ranks)).nonzero()
    if len(bad):
        node = int(bad[0])
        return f"{_NAME}: owner[{node}] is {int(owner[node])}; it should be in [0, {ranks}), a rank"
    bad = ((ends < 0) | (ends >= len(owner))).nonzero()
    if len(bad):
        row, edge = bad[0].tolist()
        return (
            f"{_NAME}: edge_index[{row}, {edge}] is {int(ends[row, edge])}; it should be in "
            f"[0, {len(owner)}), the nodes"
        )
    bad = (owner[ends[1]] != rank).nonzero()
    if len(bad):
        edge = int(bad[0])
        target = int(ends[1, edge])
        return (
            f"{_NAME}: edge_index[1, {edge}] is {target}, a node of rank {int(owner[target])}; it "
            f"should be one of rank {rank}, this one"
        )
    return None


class _Extend(torch.autograd.Function):
    """Rows of own nodes, and behind them the rows that other ranks send."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: Partition) -> torch.Tensor:
        ctx.part = part
        trip = part._trip(math.prod(x.shape[1:]))
        out = x.new_empty(part.num_local + len(part.halo), *x.shape[1:])
        own, halo = out.tensor_split((part.num_local,))
        trip.begin(x.index_select(0, part._read).flatten(), halo.view(-1))
        own.copy_(x)
        trip.end()
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Fold.apply(dout, ctx.part), None


class _Fold(torch.autograd.Function):
    """Rows of own nodes, plus the rows that other ranks have for them, in the order of the ranks.

    The rows of one rank are of different nodes, so that no two of them are added at once.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, part: Partition) -> torch.Tensor:
        ctx.part = part
        trip = part._trip(math.prod(rows.shape[1:])).turned()
        own, halo = rows.tensor_split((part.num_local,))
        trip.begin(halo.flatten())
        arrived = wide(trip.end()).view(len(part._read), *rows.shape[1:])
        total = own.to(arrived.dtype, copy=True)
        pieces = zip(arrived.split(part._sent), part._read.split(part._sent), strict=True)
        for piece, nodes in pieces:
            if len(nodes):
                total.index_add_(0, nodes, piece)
        found: torch.Tensor = cast(total, rows)
        return found

    @staticmethod
    def backward(ctx: Any, dtotal: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Extend.apply(dtotal, ctx.part), None
