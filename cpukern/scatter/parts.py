"""Parts of a map, each owned by one thread, and the planes of cubes that reach each part."""

from __future__ import annotations

import numpy as np

from fusedops._frame.arrays import grouped
from fusedops.scatter import ScatterPlan

#: A part has 2**PART_BITS elements: half of a second-level cache in float32.
PART_BITS = 18


def bins(plan: ScatterPlan) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the planes that reach each part of the map, in the order of the cubes.

    The result is the planes' numbers c · nx + i, part after part; the start of each part in these;
    and the number of elements of a part.
    """
    # Planes of cubes without elements are not checked, and reach nothing.
    count = 0 if 0 in plan.shape else len(plan.wa)
    wa, (low, high) = plan.wa[:count], (ends[:count] for ends in plan.reach)
    map_size, shift = plan.map_size, PART_BITS
    while True:
        first = (wa + low[:, None]).ravel() >> shift
        last = (wa + high[:, None]).ravel() >> shift
        # Double the parts while planes reach over many of them.
        if (last - first).sum() <= len(first) or (map_size >> shift) == 0:
            break
        shift += 1
    parts = (max(map_size, 1) - 1 >> shift) + 1
    rows = None
    if (first != last).any():
        further = last - first
        rows = np.repeat(np.arange(len(first)), further + 1)
        begin = np.cumsum(further + 1) - (further + 1)
        first = first[rows] + np.arange(len(rows)) - begin[rows]
    order, pointers = grouped(first, parts)
    return order if rows is None else rows[order], pointers, 1 << shift
