r"""Boltz's modules of the triangle update, with its names::

-from boltz.model.layers.triangular_mult import (
+from fusedops.compat.boltz import (
     TriangleMultiplicationIncoming,
     TriangleMultiplicationOutgoing,
 )
"""

from __future__ import annotations

from typing import Any

from fusedops import nn

__all__ = ["TriangleMultiplicationIncoming", "TriangleMultiplicationOutgoing"]


class TriangleMultiplicationOutgoing(nn.TriangleMultiplicativeUpdate):
    """Boltz's update over outgoing edges, with as many hidden channels as others.

    Parameters
    ----------
    dim : int
        C and H.
    **options
        Further arguments of `fusedops.nn.TriangleMultiplicativeUpdate`.

    Attributes
    ----------
    norm_in, p_in, g_in, norm_out, p_out, g_out
        The layers, as of `fusedops.nn.TriangleMultiplicativeUpdate`.

    References
    ----------
    Boltz 2.2, ``boltz/model/layers/triangular_mult.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.boltz import TriangleMultiplicationOutgoing
    >>> update = TriangleMultiplicationOutgoing(8)
    >>> update(torch.randn(1, 5, 5, 8), mask=torch.ones(1, 5, 5), use_kernels=True).shape
    torch.Size([1, 5, 5, 8])
    """

    def __init__(self, dim: int = 128, **options: Any) -> None:
        super().__init__(dim, dim, "outgoing", **options)


class TriangleMultiplicationIncoming(nn.TriangleMultiplicativeUpdate):
    """Boltz's update over incoming edges.

    Parameters
    ----------
    dim, **options
        As of `TriangleMultiplicationOutgoing`.

    Attributes
    ----------
    norm_in, p_in, g_in, norm_out, p_out, g_out
        As of `TriangleMultiplicationOutgoing`.

    References
    ----------
    See `TriangleMultiplicationOutgoing`.

    Examples
    --------
    >>> from fusedops.compat.boltz import TriangleMultiplicationIncoming
    >>> TriangleMultiplicationIncoming(8).direction
    'incoming'
    """

    def __init__(self, dim: int = 128, **options: Any) -> None:
        super().__init__(dim, dim, "incoming", **options)
