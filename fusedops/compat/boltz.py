r"""Boltz's modules of a pair representation, with its names and arguments::

    -from boltz.model.layers.triangular_mult import (
    +from fusedops.compat.boltz import (
         TriangleMultiplicationIncoming,
         TriangleMultiplicationOutgoing,
     )
    -from boltz.model.layers.triangular_attention.attention import (
    +from fusedops.compat.boltz import (
         TriangleAttentionEndingNode,
         TriangleAttentionStartingNode,
     )
    -from boltz.model.layers.transition import Transition
    +from fusedops.compat.boltz import Transition

or whole blocks and trunks::

    -from boltz.model.layers.pairformer import PairformerNoSeqLayer, PairformerNoSeqModule
    +from fusedops.compat.boltz import PairformerNoSeqLayer, PairformerNoSeqModule
"""

from __future__ import annotations

from typing import Any

import fusedops._frame.needs_torch  # noqa: F401

import torch
from torch.utils.checkpoint import checkpoint

from fusedops import nn
from fusedops.pairs import autocasts, check_pairs

__all__ = [
    "PairformerNoSeqLayer",
    "PairformerNoSeqModule",
    "Transition",
    "TriangleAttentionEndingNode",
    "TriangleAttentionStartingNode",
    "TriangleMultiplicationIncoming",
    "TriangleMultiplicationOutgoing",
]

TriangleAttentionStartingNode = nn.TriangleAttention


class Transition(nn.PairTransition):
    """Boltz's transition, with 512 hidden channels by default, whatever the others.

    Parameters
    ----------
    dim, hidden, out_dim : int
        C, H and D: channels, hidden channels, and channels of the output, C by default.
    **options
        Further arguments of `fusedops.nn.PairTransition`.

    Attributes
    ----------
    norm, fc1, fc2, fc3
        The layers, as of `fusedops.nn.PairTransition`.

    References
    ----------
    Boltz 2.2, ``boltz/model/layers/transition.py``.

    Examples
    --------
    >>> from fusedops.compat.boltz import Transition
    >>> Transition(64).hidden
    512
    """

    def __init__(
        self, dim: int = 128, hidden: int = 512, out_dim: int | None = None, **options: Any
    ) -> None:
        super().__init__(dim, hidden, out_dim, **options)


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

    _of_autocast = True

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

    _of_autocast = True

    def __init__(self, dim: int = 128, **options: Any) -> None:
        super().__init__(dim, dim, "incoming", **options)


class TriangleAttentionEndingNode(nn.TriangleAttention):
    """Boltz's attention around ending nodes, by `fusedops.nn.TriangleAttention`.

    Parameters
    ----------
    c_in, c_hidden, no_heads
        C, D and H: channels, channels of a head, and heads.
    inf, **options
        Further arguments of `fusedops.nn.TriangleAttention`.

    Attributes
    ----------
    layer_norm, linear, mha
        The layers, as of `fusedops.nn.TriangleAttention`.

    References
    ----------
    Boltz 2.2, ``boltz/model/layers/triangular_attention/attention.py``.

    Examples
    --------
    >>> from fusedops.compat.boltz import TriangleAttentionEndingNode
    >>> TriangleAttentionEndingNode(8, 4, 2, inf=1e9).starting
    False
    """

    def __init__(
        self, c_in: int, c_hidden: int, no_heads: int, inf: float = 1e9, **options: Any
    ) -> None:
        super().__init__(c_in, c_hidden, no_heads, False, inf, **options)


class PairformerNoSeqLayer(nn.PairBlock):
    """Boltz's block of a pair representation.

    Parameters
    ----------
    token_z, dropout, pairwise_head_width, pairwise_num_heads
        As of `fusedops.nn.PairBlock`.
    post_layer_norm : bool
        Kept for callers that read it, and not used, as in Boltz: it concerns the sequence track.
    **options
        Further arguments of `fusedops.nn.PairBlock`.

    Attributes
    ----------
    tri_mul_out, tri_mul_in, tri_att_start, tri_att_end, transition_z
        The parts, as of `fusedops.nn.PairBlock`.

    References
    ----------
    Boltz 2.2, ``boltz/model/layers/pairformer.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.boltz import PairformerNoSeqLayer
    >>> block = PairformerNoSeqLayer(8)
    >>> block(torch.randn(1, 5, 5, 8), torch.ones(1, 5, 5), None, True).shape
    torch.Size([1, 5, 5, 8])
    """

    def __init__(
        self,
        token_z: int,
        dropout: float = 0.25,
        pairwise_head_width: int = 32,
        pairwise_num_heads: int = 4,
        post_layer_norm: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(token_z, dropout, pairwise_head_width, pairwise_num_heads, **options)
        self.post_layer_norm = post_layer_norm

    def forward(
        self,
        z: torch.Tensor,
        pair_mask: torch.Tensor | None = None,
        chunk_size_tri_attn: int | None = None,
        use_kernels: bool = False,
        use_cuequiv_mul: bool = False,
        use_cuequiv_attn: bool = False,
        use_flash_attn: bool = False,
    ) -> torch.Tensor:
        """Return the updated pair representation.

        Parameters
        ----------
        z, pair_mask, chunk_size_tri_attn
            As of `fusedops.nn.PairBlock.forward`.
        use_kernels, use_cuequiv_mul, use_cuequiv_attn, use_flash_attn
            Ignored: `backend` and `attention` of the class choose the kernels.

        Returns
        -------
        tensor (..., N, N, C)
            A new tensor.

        References
        ----------
        See the class.

        Examples
        --------
        See the class.
        """
        check_pairs("PairformerNoSeqLayer", self.token_z, "z", z=z, pair_mask=pair_mask)
        if autocasts(z):
            # Boltz's dropout is float32.
            z = z.to(torch.promote_types(z.dtype, torch.float32))
        return super().forward(z, pair_mask, chunk_size_tri_attn)


class PairformerNoSeqModule(torch.nn.Module):
    """Boltz's trunk of blocks of a pair representation.

    Parameters
    ----------
    token_z : int
        C, the channels of the pair representation.
    num_blocks : int
        The number of blocks.
    dropout, pairwise_head_width, pairwise_num_heads, post_layer_norm
        As of `PairformerNoSeqLayer`.
    activation_checkpointing : bool
        Whether the backward computes each block anew, from its input.
    **options
        Further arguments of `fusedops.nn.PairBlock`.

    Attributes
    ----------
    layers : torch.nn.ModuleList
        The blocks.
    token_z, num_blocks, dropout, post_layer_norm, activation_checkpointing
        As given.

    References
    ----------
    Boltz 2.2, ``boltz/model/layers/pairformer.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.boltz import PairformerNoSeqModule
    >>> trunk = PairformerNoSeqModule(8, num_blocks=2)
    >>> trunk(torch.randn(1, 5, 5, 8), torch.ones(1, 5, 5)).shape
    torch.Size([1, 5, 5, 8])
    """

    def __init__(
        self,
        token_z: int,
        num_blocks: int,
        dropout: float = 0.25,
        pairwise_head_width: int = 32,
        pairwise_num_heads: int = 4,
        post_layer_norm: bool = False,
        activation_checkpointing: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        given = token_z, dropout, pairwise_head_width, pairwise_num_heads, post_layer_norm
        self.token_z = token_z
        self.num_blocks = num_blocks
        self.dropout = dropout
        self.post_layer_norm = post_layer_norm
        self.activation_checkpointing = activation_checkpointing
        self.layers = torch.nn.ModuleList(
            PairformerNoSeqLayer(*given, **options) for _ in range(num_blocks)
        )

    def forward(
        self,
        z: torch.Tensor,
        pair_mask: torch.Tensor | None = None,
        use_kernels: bool = False,
        use_flash_attn: bool = False,
    ) -> torch.Tensor:
        """Return the pair representation after all blocks.

        Parameters
        ----------
        z, pair_mask
            As of `fusedops.nn.PairBlock.forward`.
        use_kernels, use_flash_attn
            Ignored: `backend` and `attention` of the class choose the kernels.

        Returns
        -------
        tensor (..., N, N, C)
            A new tensor.

        Notes
        -----
        In inference attention takes 512 rows at one time, and 128 of more than 384 residues, as in
        Boltz.

        References
        ----------
        See the class.

        Examples
        --------
        See the class.
        """
        check_pairs("PairformerNoSeqModule", self.token_z, "z", z=z, pair_mask=pair_mask)
        chunk = None if self.training else 128 if z.shape[-3] > 384 else 512
        for block in self.layers:
            if self.activation_checkpointing and self.training:
                z = checkpoint(block, z, pair_mask, chunk, use_reentrant=False)
            else:
                z = block(z, pair_mask, chunk)
        return z
