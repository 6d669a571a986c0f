"""The edges that fairchem's index tensors describe."""

from __future__ import annotations

from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import numpy as np
from torch.utils.weak import WeakTensorKeyDictionary

from fusedops._frame.check import outside_of_transforms, traced
from fusedops.wigner import Edges

NAME = "fusedops.compat.fairchem"
#: The edges of fairchem's index tensors, by number of nodes and offset.
_read = WeakTensorKeyDictionary()


def edges_of(index: Any, num_nodes: int, offset: int | None = None) -> Any:
    """Return the edges that an index tensor describes, made once for all layers that get it.

    With an offset, the index has targets, or sources and targets, and both ends of an edge are its
    target less the offset: fairchem sums over edges whose sources may be other processes' nodes.
    """
    if traced():
        return _ends(index, offset)
    # torch.func wraps all that is computed within a transform, indices too.
    index = outside_of_transforms(NAME, "edge_index", index)
    with Edges.outside_of_transforms(NAME, (index,)):
        ends = _ends(index, offset)
        kept = _read.setdefault(index, {})
        before, edges = kept.get((num_nodes, offset), (None, None))
        now = _state(index)
        if index.is_cpu:
            # NumPy may share the memory, and writes to it without a new version.
            same = edges is not None and all(
                map(np.array_equal, (edges.source, edges.target), ends.numpy())
            )
        else:
            same = now is not None and now == before
        if not same:
            edges = Edges.read(NAME, ends, num_nodes=num_nodes)
            kept[num_nodes, offset] = now, edges
        return edges


def _ends(index: Any, offset: int | None) -> Any:
    """Return both ends of every edge."""
    if offset is None:
        return index
    targets = index[1] if index.ndim == 2 else index
    return (targets - offset if offset else targets).expand(2, -1)


def _state(index: Any) -> Any:
    """Return what changes with a write to an index tensor; None where nothing does."""
    if index.is_cpu or index.is_inference():
        return None
    return index._version, index.data_ptr(), index.shape, index.stride()


def targets_of(index: Any, lists: tuple[Any, ...]) -> Any:
    """Return the targets of edges whose ends are known to be nodes, and of which lists are given.

    The lists are those of `Edges`, and no views of the index, which they would keep for good.
    `edges_of` finds the edges of both tensors then, in a CUDA graph too, where it reads no others.
    """
    targets = index[1]
    _, target, *_, by_target, target_ptr = lists
    sums, sizes = (by_target, target_ptr), [len(target_ptr) - 1, index.shape[1]]
    edges = Edges.from_tensors([*lists], sizes)
    summed = Edges.from_tensors([target, target, *sums, *sums], sizes)
    for tensor, offset, found in ((index, None, edges), (index, 0, summed), (targets, 0, summed)):
        _read.setdefault(tensor, {})[sizes[0], offset] = _state(tensor), found
    return targets
