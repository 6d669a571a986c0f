"""The edges of a graph, sorted by their nodes."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusedops._frame.arrays import grouped, namespace
from fusedops._frame.check import (
    device_of,
    indices,
    on_host,
    size,
)
from fusedops._frame.packed import Packed


class Edges(Packed):
    r"""A graph's edges, checked and sorted once for many calls.

    Sums over a node's edges run over a sorted list, so they need no atomic operations and have a
    fixed order.

    Parameters
    ----------
    edge_index : array or tensor (2, E), int32 or int64
        The source and the target node of every edge, in any order; self-loops and repeated edges
        are allowed. The object lives on the tensor's device.
    num_nodes : int
        N, larger than every index. A node may have no edge.

    Attributes
    ----------
    num_nodes, num_edges : int
        N and E.
    device : str
        ``"cpu"``, where NumPy arrays and torch tensors are both served, or a torch device.

    Raises
    ------
    TypeError, ValueError
        If `edge_index` has the wrong dtype or shape, or `num_nodes` is not a size.
    IndexError
        If an index is out of range; the message names the first one.

    Notes
    -----
    The array is copied, so later changes to it have no effect. ``to`` copies an object to another
    device.

    A tensor on a CUDA GPU is sorted and checked there, without waiting. The error for a bad index
    comes from the first call with the edges after the GPU has found it, from the next `Edges`, or
    from ``check``, which waits. Until then sums over a node's edges leave a bad edge out, and an
    edge's own results are of some node; no memory outside of the arrays is read.

    References
    ----------
    The convention follows PyTorch Geometric and fairchem.

    Examples
    --------
    >>> import fusedops
    >>> edges = fusedops.Edges([[0, 1, 2, 0], [1, 0, 1, 1]], num_nodes=4)
    >>> edges.num_nodes, edges.num_edges
    (4, 4)
    """

    # by_target: the edges, sorted by target; target_ptr (N + 1,): where each node's edges begin.
    _fields = ("source", "target", "by_source", "source_ptr", "by_target", "target_ptr")
    _sizes = ("num_nodes", "num_edges")
    _given = ("edge_index",)
    _options = ("num_nodes",)

    def __init__(self, edge_index: Any, num_nodes: int) -> None:
        given = indices("Edges", "edge_index", edge_index)
        if given.ndim != 2 or given.shape[0] != 2:
            raise ValueError(
                f"Edges: edge_index has shape {tuple(given.shape)}; it should be (2, E)"
            )
        num_nodes = size("Edges", "num_nodes", num_nodes, bits=60)
        if device_of(given) == "cpu":
            ends = np.array(on_host(given), dtype=np.int64, order="C")
            bad = (ends < 0) | (ends >= num_nodes)
            if bad.any():
                raise _outside(ends, bad, num_nodes)
            lists = [array for end in ends for array in grouped(end, num_nodes)]
            self._sorted(ends, lists, num_nodes)
            return
        self._refuse_capture("Edges")
        _report()
        torch = namespace(given)
        with torch.inference_mode(False):
            ends = given.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
            bad = (ends < 0) | (ends >= num_nodes)
            self._sorted(ends, grouped_ends(ends, bad, num_nodes), num_nodes)
            held = _Check(ends, bad, num_nodes)
        self.__dict__["_unchecked"] = held
        if ends.is_cuda:
            _unchecked.append(held)
        else:
            self.check()

    def _sorted(self, ends: Any, lists: Sequence[Any], num_nodes: int) -> None:
        """Hold checked ends, and the lists of sources and of targets."""
        self._hold(
            **dict(zip(self._fields, (*ends, *lists), strict=True)),
            num_nodes=num_nodes,
            num_edges=int(ends.shape[1]),
        )

    def check(self) -> None:
        """Wait until the GPU has checked the edges. Only edges made there are still unchecked.

        Raises
        ------
        IndexError
            If an index is out of range; the message names the first one.

        Examples
        --------
        >>> import fusedops
        >>> fusedops.Edges([[0], [1]], num_nodes=2).check()
        """
        self._look(wait=True)

    def _look(self, wait: bool = False) -> None:
        """Raise if the GPU has found a bad index."""
        held = self.__dict__.get("_unchecked")
        if held is not None and held.done(wait):
            self.__dict__.pop("_unchecked", None)

    def to(self, device: Any) -> Edges:
        """Return the same edges, checked, on a torch device; these if they are there already.

        Parameters
        ----------
        device : str or torch.device
            For example ``"cuda"``.

        Returns
        -------
        Edges
            On the device.

        Raises
        ------
        IndexError
            If an index is out of range.

        Examples
        --------
        >>> import fusedops, torch
        >>> edges = fusedops.Edges([[0, 1], [1, 0]], num_nodes=2)
        >>> edges.to(torch.device("cpu")) is edges
        True
        """
        self.check()
        return super().to(device)

    @classmethod
    def foresee(cls, edge_index: Any, *, num_nodes: int) -> dict[str, Any]:
        """Return the sizes that don't depend on the tensor's values."""
        return {"num_nodes": num_nodes, "num_edges": edge_index.shape[1]}

    def __repr__(self) -> str:
        return f"Edges({self.num_edges} edges, {self.num_nodes} nodes, on {self.device})"


def _outside(ends: Any, bad: Any, num_nodes: int) -> IndexError:
    """Return the error for the first bad end."""
    row, edge = (int(at[0]) for at in on_host(bad).nonzero())
    return IndexError(
        f"Edges: edge_index[{row}, {edge}] is {int(ends[row, edge])}; it should be in "
        f"[0, {num_nodes}), num_nodes"
    )


def grouped_ends(ends: Any, bad: Any, count: int) -> tuple[Any, Any, Any, Any]:
    """Return the order that sorts edges by source, where each source begins in it, and by target.

    One sort serves both, and doesn't wait. An edge with a bad end is in no group of that end.
    """
    torch = namespace(ends)
    E, largest = ends.shape[1], 2 * count + 1
    # The sort makes a pass for every byte of a key.
    kinds = torch.int16, torch.int32, torch.int64
    kind = next(kind for kind in kinds if largest <= torch.iinfo(kind).max)
    keys = torch.where(bad, count, ends)
    keys[1] += count + 1
    keys, order = torch.sort(keys.flatten().to(kind), stable=True)
    marks = torch.arange(2 * count + 2, dtype=kind, device=ends.device)
    starts = torch.searchsorted(keys, marks)
    return order[:E], starts[: count + 1], order[E:] - E, starts[count + 1 :] - E


class _Check:
    """A check of ends on a GPU, whose result comes later."""

    def __init__(self, ends: Any, bad: Any, num_nodes: int) -> None:
        torch = namespace(ends)
        self.of: Any = ends, bad, num_nodes
        self.error: IndexError | None = None
        #: Whether a caller has seen the error.
        self.told = False
        self.event: Any = None
        self.flag = bad.any()
        if ends.is_cuda:
            with torch.cuda.device(ends.device):
                here = torch.empty((), dtype=torch.bool, pin_memory=True)
                self.flag = here.copy_(self.flag, non_blocking=True)
                self.event = torch.cuda.Event()
                self.event.record()

    def done(self, wait: bool = False) -> bool:
        """Return whether the ends are known to be good. Raises IndexError if one is bad."""
        # Threads may ask at once; each finds the same.
        of = self.of
        if of is None:
            if self.error is not None:
                self.told = True
                raise self.error
            return True
        if self.event is not None:
            # The question would end a CUDA graph's capture.
            if namespace(self.flag).cuda.is_current_stream_capturing():
                return False
            if wait:
                self.event.synchronize()
            elif not self.event.query():
                return False
        if self.flag.item():
            self.error = _outside(*of)
        self.of = None
        return self.done()


#: Checks that may not be done, whose edges may have been dropped since.
_unchecked: collections.deque[_Check] = collections.deque()


def _report() -> None:
    """Raise if a GPU has found a bad index in edges made before, which no caller knows of."""
    for held in tuple(_unchecked):
        if held.told or held.done():
            with contextlib.suppress(ValueError):
                _unchecked.remove(held)


def late(edges: Edges) -> Any:
    """Return the check of values that a call with edges needs."""
    return None if edges.device == "cpu" else lambda a: a.edges._look()


def ends_of(edges: Edges | None, way: str, like: Any) -> list[Any]:
    """Return the nodes at each end that is read; None where every edge is a node of its own."""
    if edges is None:
        return [None]
    nodes = edges.fields_like(like)
    return [nodes.source, nodes.target] if way == "forth" else [nodes.target]


def read_graph(
    name: str, edge_index: Any, num_nodes: int | None, like: Any, argument: str, count: int
) -> Edges:
    """Return checked edges, `count` of them, on the device of `like`."""
    if num_nodes is not None:
        num_nodes = size(name, "num_nodes", num_nodes, bits=60)
    elif not isinstance(edge_index, Edges):
        raise TypeError(
            f"{name}: num_nodes is None; it should be an int, unless edge_index is Edges"
        )
    edges = Edges.given(name, (argument, like), edge_index, num_nodes=num_nodes)
    if num_nodes not in (None, edges.num_nodes):
        raise ValueError(
            f"{name}: edge_index has {edges.num_nodes} nodes; it should have {num_nodes}"
        )
    if edges.num_edges != count:
        raise ValueError(
            f"{name}: edge_index has {edges.num_edges} edges; it should have {count}, the length "
            "of the matrices"
        )
    return edges
