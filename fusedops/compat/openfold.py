r"""OpenFold's triangle updates and attention, with its arguments, names and in-place addition.

ESMFold's modules in transformers have the same names and parameters. Ours take the places of
modules of the same names in OpenFold; `fusedops.compat.openfold3` and `fusedops.compat.protenix`
have those programs' own updates::

    -from openfold.model.triangular_multiplicative_update import (
    +from fusedops.compat.openfold import (
         TriangleMultiplicationOutgoing,
         TriangleMultiplicationIncoming,
     )
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import fusedops._frame.needs_torch  # noqa: F401

import torch

from fusedops import nn

__all__ = [
    "FusedTriangleMultiplicationIncoming",
    "FusedTriangleMultiplicationOutgoing",
    "FusedTriangleMultiplicativeUpdate",
    "TriangleAttention",
    "TriangleAttentionEndingNode",
    "TriangleAttentionStartingNode",
    "TriangleMultiplicationIncoming",
    "TriangleMultiplicationOutgoing",
    "TriangleMultiplicativeUpdate",
]


class _Half(NamedTuple):
    weight: Any
    bias: Any


def _layer(ours: str) -> property:
    return property(lambda module: getattr(module, ours))


def _half(ours: str, half: int) -> property:
    """Return an attribute whose weight and bias are views of half of a layer's."""

    def layer(module: Any) -> _Half:
        whole = getattr(module, ours)
        parts = whole.weight, whole.bias
        return _Half(*[part if part is None else part.chunk(2)[half] for part in parts])

    return property(layer)


class _Update(nn.TriangleMultiplicativeUpdate):
    # The part that all modules of OpenFold share.

    # Whether projections and gates have biases.
    _bias = True
    #: OpenFold's layers in each of ours that has another name.
    _layers: ClassVar[dict[str, tuple[str, ...]]] = {
        "norm_in": ("layer_norm_in",),
        "norm_out": ("layer_norm_out",),
        "p_out": ("linear_z",),
        "g_out": ("linear_g",),
    }
    layer_norm_in, layer_norm_out = _layer("norm_in"), _layer("norm_out")
    linear_z, linear_g = _layer("p_out"), _layer("g_out")
    _of_autocast = True
    # Whether an update in place that isn't added overwrites z.
    _overwrites = True

    def __init__(
        self,
        c_z: int,
        c_hidden: int,
        _outgoing: bool = True,
        linear_init_params: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(_outgoing, bool):
            raise TypeError(
                f"{type(self).__name__}: _outgoing is {_outgoing!r}; it should be True or False"
            )
        options = {"bias": self._has_biases(linear_init_params), **options}
        super().__init__(c_z, c_hidden, "outgoing" if _outgoing else "incoming", **options)
        # An optimizer finds its state by the order of parameters.
        for name in ("g_out", "p_out", "norm_in", "norm_out", "p_in", "g_in"):
            self._modules[name] = self._modules.pop(name)
        self.register_state_dict_post_hook(self._rename_back)

    def _own_name(self, name: str) -> str:
        """Return our name of a layer to set.

        By OpenFold's it would stand beside ours, and never be called.
        """
        for ours, theirs in self._layers.items():
            if name in theirs:
                if len(theirs) > 1:
                    raise AttributeError(
                        f"{type(self).__name__}: {name} is half of {ours}; {ours} should be set"
                    )
                return ours
        return name

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(self._own_name(name), value)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        super().add_module(self._own_name(name), module)

    @property
    def _outgoing(self) -> bool:
        return self.direction == "outgoing"

    def _has_biases(self, linear_init_params: Any) -> bool:
        """Return whether layers have biases, by OpenFold 3's arguments of every layer."""
        if linear_init_params is None:
            return self._bias
        names = [name for theirs in self._layers.values() for name in theirs if "linear" in name]
        try:
            layers = [getattr(linear_init_params, name) for name in names]
            found = {layer.get("bias", True) for layer in layers}
        except AttributeError:
            raise TypeError(
                f"{type(self).__name__}: linear_init_params is a "
                f"{type(linear_init_params).__name__}; it should have {', '.join(names)}, each a "
                "dict"
            ) from None
        if len(found) > 1:
            raise ValueError(
                f"{type(self).__name__}: linear_init_params has biases for some layers; it should "
                "have them for all, or for none"
            )
        return bool(found.pop())

    @staticmethod
    def _rename_back(
        module: Any, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        """Rename the layers of a state_dict to OpenFold's names, in place."""
        for ours, theirs in module._layers.items():
            for part in ("weight", "bias"):
                tensor = state_dict.pop(f"{prefix}{ours}.{part}", None)
                if tensor is not None:
                    # Chunks of a DTensor, even one alone, are whole on every rank.
                    parts = tensor.chunk(2) if len(theirs) == 2 else (tensor,)
                    for name, own in zip(theirs, parts, strict=True):
                        state_dict[f"{prefix}{name}.{part}"] = own

    def forward(
        self,
        z: torch.Tensor,
        mask: torch.Tensor | None = None,
        inplace_safe: bool = False,
        *,
        _add_with_inplace: bool = False,
        _inplace_chunk_size: int | None = None,
        use_cueq_triangle_kernels: bool = False,
        use_triton_triangle_kernels: bool = False,
        use_fused_kernel: bool = False,
        triangle_multiplicative: str = "torch",
    ) -> torch.Tensor:
        r"""Return the update, or write it to z.

        .. math:: \mathrm{out}_{ij} = p\Bigl(\sum_k l_{ik} \odot r_{jk}\Bigr) \odot g_{ij}

        in short; see `fusedops.triangle_multiplicative_update`.

        Parameters
        ----------
        z : tensor (..., N, N, C), float32, float64, bfloat16 or float16
            The pair representation.
        mask : tensor that broadcasts to (..., N, N), bool, any integer or any float, optional
            Zero or false where an edge is missing.
        inplace_safe : bool
            Whether z may be written to, as in OpenFold's inference.
        _add_with_inplace : bool
            With `inplace_safe`, whether to add the update to z and return z. Otherwise the update
            overwrites z, which is returned; a fused module leaves z alone and returns the update.
        use_cueq_triangle_kernels : bool
            Whether to ignore `inplace_safe`, as OpenFold 3 does for its fast kernels.
        triangle_multiplicative : str
            With "cuequivariance" and H = C z is left alone, as in Protenix: the update, or the sum
            of z and the update, is a new tensor.
        _inplace_chunk_size, use_triton_triangle_kernels, use_fused_kernel
            Ignored, and accepted only because these programs pass them: `backend` of the
            class chooses the kernels, and `max_memory` bounds memory.

        Returns
        -------
        tensor (..., N, N, C)
            In the dtype of z, or of autocast; z itself if it was written to.

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong dtype, shape or device; the message names it.

        References
        ----------
        OpenFold, ``openfold/model/triangular_multiplicative_update.py``.

        Examples
        --------
        >>> import torch
        >>> from fusedops.compat.openfold import TriangleMultiplicationOutgoing
        >>> update, z = TriangleMultiplicationOutgoing(8, 4), torch.randn(5, 5, 8)
        >>> with torch.no_grad():
        ...     out = update(z, inplace_safe=True, _add_with_inplace=True)
        >>> out is z
        True
        """
        update = super().forward(z, mask)
        if not inplace_safe or use_cueq_triangle_kernels:
            return update
        if triangle_multiplicative == "cuequivariance" and self.c_z == self.c_hidden:
            return z + update if _add_with_inplace else update
        if _add_with_inplace:
            return z.add_(update)
        return z.copy_(update) if self._overwrites else update


class TriangleMultiplicativeUpdate(_Update):
    r"""OpenFold's update with projections of their own for left and right.

    See `fusedops.triangle_multiplicative_update` for the formula. `TriangleMultiplicationOutgoing`
    and `TriangleMultiplicationIncoming` have their direction by their name.

    Parameters
    ----------
    c_z : int
        C, the channels of the pair representation.
    c_hidden : int
        H, the channels of left and right.
    _outgoing : bool
        Whether the sum runs over outgoing edges.
    linear_init_params : object, optional
        The arguments of every layer, as OpenFold 3 gives them. Layers have biases if ``bias`` is
        true in these, or missing. Without them, layers have biases as in OpenFold.
    **options
        Further arguments of `fusedops.nn.TriangleMultiplicativeUpdate`.

    Attributes
    ----------
    layer_norm_in, layer_norm_out : torch.nn.LayerNorm
        The LayerNorms of z, and of the sum over triangles.
    linear_a_p, linear_b_p, linear_a_g, linear_b_g
        Projections and gates of left and right, with the attributes weight and bias.
    linear_z, linear_g : torch.nn.Linear
        Projection and gate of the output.

    Notes
    -----
    State dicts have OpenFold's names, both loaded and saved; ``named_parameters`` has the names of
    `fusedops.nn.TriangleMultiplicativeUpdate`. The attributes above exist for OpenFold's import of
    AlphaFold's weights: they are views of the parameters, and under FSDP2 copies. A module with
    biases refuses a state dict without them, also without ``strict``.

    References
    ----------
    Ahdritz et al., "OpenFold", Nature Methods 21 (2024) 1514.

    Examples
    --------
    >>> from fusedops.compat.openfold import TriangleMultiplicativeUpdate
    >>> update = TriangleMultiplicativeUpdate(8, 4)
    >>> sorted(update.state_dict())[:2], update.linear_a_p.weight.shape
    (['layer_norm_in.bias', 'layer_norm_in.weight'], torch.Size([4, 8]))
    """

    _layers = _Update._layers | {
        "p_in": ("linear_a_p", "linear_b_p"),
        "g_in": ("linear_a_g", "linear_b_g"),
    }
    linear_a_p, linear_b_p = _half("p_in", 0), _half("p_in", 1)
    linear_a_g, linear_b_g = _half("g_in", 0), _half("g_in", 1)


class FusedTriangleMultiplicativeUpdate(_Update):
    """OpenFold's update with one projection for left and right, as AlphaFold-Multimer's.

    `FusedTriangleMultiplicationOutgoing` and `FusedTriangleMultiplicationIncoming` have their
    direction by their name.

    Parameters
    ----------
    c_z, c_hidden, _outgoing, linear_init_params, **options
        As of `TriangleMultiplicativeUpdate`.

    Attributes
    ----------
    layer_norm_in, layer_norm_out, linear_z, linear_g
        As of `TriangleMultiplicativeUpdate`.
    linear_ab_p, linear_ab_g : torch.nn.Linear
        Projection and gate of z, left above right.

    References
    ----------
    See `TriangleMultiplicativeUpdate`.

    Examples
    --------
    >>> from fusedops.compat.openfold import FusedTriangleMultiplicativeUpdate
    >>> FusedTriangleMultiplicativeUpdate(8, 4).linear_ab_p.weight.shape
    torch.Size([8, 8])
    """

    _layers = _Update._layers | {"p_in": ("linear_ab_p",), "g_in": ("linear_ab_g",)}
    _overwrites = False
    linear_ab_p, linear_ab_g = _layer("p_in"), _layer("g_in")


class TriangleAttention(nn.TriangleAttention):
    """OpenFold's and ESMFold's attention, with biases of gate and output.

    `TriangleAttentionStartingNode` is this class.

    Parameters
    ----------
    c_in, c_hidden, no_heads : int
        C, D and H: channels, channels of a head, and heads.
    starting : bool
        Whether edges with the same starting node attend to each other; else with the same ending
        node.
    inf, **options
        Further arguments of `fusedops.nn.TriangleAttention`.

    Attributes
    ----------
    layer_norm, linear, mha
        The layers, as of `fusedops.nn.TriangleAttention`.

    References
    ----------
    OpenFold, ``openfold/model/triangular_attention.py``; transformers 5.23,
    ``models/esm/modeling_esmfold.py``.

    Examples
    --------
    >>> from fusedops.compat.openfold import TriangleAttention
    >>> TriangleAttention(8, 4, 2).mha.linear_o.bias.shape
    torch.Size([8])
    """

    def __init__(
        self,
        c_in: int,
        c_hidden: int,
        no_heads: int,
        starting: bool = True,
        inf: float = 1e9,
        **options: Any,
    ) -> None:
        super().__init__(c_in, c_hidden, no_heads, starting, inf, **{"bias": True, **options})

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        chunk_size: int | None = None,
        use_memory_efficient_kernel: bool = False,
        use_deepspeed_evo_attention: bool = False,
        use_lma: bool = False,
        inplace_safe: bool = False,
    ) -> torch.Tensor:
        """Return the update to add to a pair representation.

        Parameters
        ----------
        x, mask, chunk_size
            As of `fusedops.nn.TriangleAttention.forward`.
        use_memory_efficient_kernel, use_deepspeed_evo_attention, use_lma, inplace_safe
            Ignored: `attention` of the class chooses the kernel, and x is never written to.

        Returns
        -------
        tensor (..., N, N, C)
            In the dtype of x, or of autocast.

        References
        ----------
        See the class.

        Examples
        --------
        See the class.
        """
        return super().forward(x, mask, chunk_size)


TriangleAttentionStartingNode = TriangleAttention


class TriangleAttentionEndingNode(TriangleAttention):
    """OpenFold's attention around ending nodes.

    Parameters
    ----------
    c_in, c_hidden, no_heads, inf, **options
        As of `TriangleAttention`.

    Attributes
    ----------
    layer_norm, linear, mha
        As of `TriangleAttention`.

    References
    ----------
    See `TriangleAttention`.

    Examples
    --------
    >>> from fusedops.compat.openfold import TriangleAttentionEndingNode
    >>> TriangleAttentionEndingNode(8, 4, 2).starting
    False
    """

    def __init__(
        self, c_in: int, c_hidden: int, no_heads: int, inf: float = 1e9, **options: Any
    ) -> None:
        super().__init__(c_in, c_hidden, no_heads, False, inf, **options)


# These six have no docstring of their own, so that `help` shows the one of the update.


class _Outgoing(_Update):
    def __init__(
        self, c_z: int, c_hidden: int, linear_init_params: Any = None, **options: Any
    ) -> None:
        super().__init__(c_z, c_hidden, True, linear_init_params, **options)


class _Incoming(_Update):
    def __init__(
        self, c_z: int, c_hidden: int, linear_init_params: Any = None, **options: Any
    ) -> None:
        super().__init__(c_z, c_hidden, False, linear_init_params, **options)


class TriangleMultiplicationOutgoing(_Outgoing, TriangleMultiplicativeUpdate):
    pass


class TriangleMultiplicationIncoming(_Incoming, TriangleMultiplicativeUpdate):
    pass


class FusedTriangleMultiplicationOutgoing(_Outgoing, FusedTriangleMultiplicativeUpdate):
    pass


class FusedTriangleMultiplicationIncoming(_Incoming, FusedTriangleMultiplicativeUpdate):
    pass
