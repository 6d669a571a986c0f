"""Modules of triangle attention and of the transition of pair representations.

`fusedops.nn` exports the modules. Attention is our op, torch's ``scaled_dot_product_attention``, or
cuEquivariance's ``triangle_attention``. Rows of a pair representation depend on each other in the
bias of attention alone; both modules can therefore work through a few rows after the other.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, get_args

import fusedops._frame.needs_torch  # noqa: F401

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedops._frame import registry
from fusedops._frame.bridge.modes import transforms
from fusedops._frame.check import at_least_one, is_dtensor, one_of, traced
from fusedops._frame.torch_private import private
from fusedops._layers import check_container, check_tensors, is_plain
from fusedops._products import linear_products
from fusedops._swaps import serves
from fusedops.attention import triangle_attention

Attention = Literal["fusedops", "torch", "cuequivariance"]
ATTENTIONS = (None, *get_args(Attention))
# The residues from which on cuEquivariance's attention is faster than torch's, forward and
# backward: below, the host takes twice as long. (An H200, bfloat16, 4 heads of 32 channels.)
_MANY = 320
# The bias of an edge that is missing, in the range of float16, and half of its lowest number.
_MISSING = -32768.0

#: OpenFold 3's names for the layers of the transition.
_TRANSITION = {
    "layer_norm.": "norm.",
    "swiglu.linear_a.": "fc1.",
    "swiglu.linear_b.": "fc2.",
    "linear_out.": "fc3.",
}


def lecun_normal(weight: torch.Tensor) -> None:
    """Fill the weight of a layer from a truncated normal distribution of variance 1 / fan-in."""
    # Truncation at two standard deviations leaves 0.88 of a normal distribution's.
    deviation = weight.shape[1] ** -0.5 / 0.87962566103423978
    torch.nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


def expanded(
    name: str, given: torch.Tensor, shape: Sequence[int], argument: str = "mask"
) -> torch.Tensor:
    """Return a mask, or another argument, that broadcasts to a shape, in this shape."""
    try:
        return given if given.shape == shape else given.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name}: {argument} has shape {tuple(given.shape)}; it should broadcast to "
            f"{tuple(shape)}"
        ) from None


def check_pairs(name: str, channels: int, needed: str, **given: Any) -> None:
    """Raise an error unless arguments are tensors, and the `needed` one is (..., N, N, C)."""
    check_tensors(name, needed, **given)
    shape = given[needed].shape
    if len(shape) < 3 or shape[-3] != shape[-2] or shape[-1] != channels:
        raise ValueError(
            f"{name}: {needed} has shape {tuple(shape)}; it should be (..., N, N, {channels})"
        )


def autocasts(x: torch.Tensor) -> bool:
    """Return whether autocast chooses the dtype in which layers of x compute."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def wider_than(x: torch.Tensor, norm: Any, layer: Any) -> torch.dtype | None:
    """Return the dtype of a norm, if it is wider than x of 16 bits, which layers would refuse.

    The layer after the norm may have the dtype of x, beside which norms are often kept in float32.
    """
    own = getattr(norm, "weight", None)
    narrow = x.dtype in (torch.bfloat16, torch.float16) and not autocasts(x)
    if narrow and getattr(getattr(layer, "weight", None), "dtype", None) == x.dtype:
        return None
    return own.dtype if narrow and own is not None and own.element_size() > 2 else None


def _products(x: torch.Tensor) -> Any:
    """Return the context of our products on a GPU; on a CPU torch's are as fast."""
    return linear_products(x) if x.is_cuda else nullcontext()


def in_parts(
    function: Callable[..., Any], axes: Sequence[int | None], rows: int, *given: Any
) -> Any:
    """Return a function of tensors, computed for at most `rows` along an axis of each at a time.

    A tensor with None for an axis is whole in every part; expanded along the rows, it would have a
    gradient for each of them. The result has rows along the axis of the first. With gradients a
    part is computed anew in the backward, so that one part at a time has intermediate results.
    """
    axis = axes[0]
    assert axis is not None
    if rows >= given[0].shape[axis]:
        return function(*given)
    number = len(given[0].split(rows, axis))
    split = (
        [x] * number if at is None else x.split(rows, at)
        for x, at in zip(given, axes, strict=False)
    )
    parts = zip(*split, strict=True)
    # Transforms of torch.func refuse the hooks of checkpoints.
    if torch.is_grad_enabled() and (traced() or not private().transforming()):
        done = [checkpoint(function, *part, use_reentrant=False) for part in parts]
    else:
        done = [function(*part) for part in parts]
    return torch.cat(done, axis)


class PairTransition(torch.nn.Module):
    r"""The transition of a pair representation: a LayerNorm and two layers with SwiGLU.

    .. math:: \mathrm{out} = W_3 \bigl(\mathrm{silu}(W_1 n) \odot W_2 n\bigr), \quad
              n = \mathrm{LN}(x)

    Parameters
    ----------
    dim : int
        C, the channels of x.
    hidden : int, optional
        H, the hidden channels; 4C by default.
    out_dim : int, optional
        D, the channels of the output; C by default.
    eps : float
        ε of the LayerNorm.
    max_memory : int, optional
        The most bytes of hidden channels and their gradients at one time. To stay below, rows are
        computed in parts, and with gradients again in the backward; a part has one row at least.

    Attributes
    ----------
    dim, hidden, out_dim : int
        The sizes C, H and D.
    max_memory : int or None
        As given.
    norm : torch.nn.LayerNorm
        The LayerNorm of x.
    fc1, fc2, fc3 : torch.nn.Linear
        :math:`W_1` (H, C), :math:`W_2` (H, C) and :math:`W_3` (D, H), without biases.
    silu : torch.nn.SiLU
        The activation.

    Raises
    ------
    ValueError
        If a size isn't positive; the message names the argument.

    Notes
    -----
    The parameters have the names of Boltz. ``load_state_dict`` also takes OpenFold 3's
    (``layer_norm``, ``swiglu.linear_a``, ``swiglu.linear_b``, ``linear_out``), which multiplies
    its output by a mask. The transition of OpenFold and AlphaFold 2 is another: ReLU in place of
    SwiGLU, and biases. Before training the output is zero, as in AlphaFold.

    References
    ----------
    Abramson et al., Nature 630 (2024) 493, supplementary algorithm 11; in AlphaFold 2, with ReLU,
    Jumper et al., Nature 596 (2021) 583, supplementary algorithm 15. Names from Boltz 2.2,
    ``boltz/model/layers/transition.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.nn import PairTransition
    >>> transition = PairTransition(8)
    >>> z = torch.randn(1, 5, 5, 8)
    >>> z = z + transition(z)
    >>> transition.fc3.weight.shape
    torch.Size([8, 32])
    """

    def __init__(
        self,
        dim: int = 128,
        hidden: int | None = None,
        out_dim: int | None = None,
        *,
        eps: float = 1e-5,
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        at_least_one(
            "PairTransition", dim=dim, hidden=hidden, out_dim=out_dim, max_memory=max_memory
        )
        self.dim = dim
        self.hidden = 4 * dim if hidden is None else hidden
        self.out_dim = dim if out_dim is None else out_dim
        self.max_memory = max_memory
        self.norm = torch.nn.LayerNorm(dim, eps)
        self.fc1 = torch.nn.Linear(dim, self.hidden, bias=False)
        self.fc2 = torch.nn.Linear(dim, self.hidden, bias=False)
        self.fc3 = torch.nn.Linear(self.hidden, self.out_dim, bias=False)
        self.silu = torch.nn.SiLU()
        self.register_load_state_dict_pre_hook(self._rename)
        with torch.no_grad():
            lecun_normal(self.fc1.weight)
            lecun_normal(self.fc2.weight)
            self.fc3.weight.zero_()

    @staticmethod
    def _rename(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Rename the layers of a state_dict of OpenFold 3 to our names, in place."""
        for theirs, ours in _TRANSITION.items():
            for part in ("weight", "bias"):
                if (key := f"{prefix}{theirs}{part}") in state_dict:
                    state_dict[f"{prefix}{ours}{part}"] = state_dict.pop(key)

    def forward(self, x: torch.Tensor, chunk_size: int | None = None) -> torch.Tensor:
        """Return the transition to add to a pair representation.

        Parameters
        ----------
        x : tensor (..., C)
            A pair representation, or any other.
        chunk_size : int, optional
            Boltz's number of hidden channels at a time, which takes as much memory as the same
            share of the rows here; Boltz ignores it in training, and so does this module.

        Returns
        -------
        tensor (..., D)
            In the dtype of x, or of autocast.

        Raises
        ------
        TypeError, ValueError
            If x is no tensor, or doesn't have C channels, or `chunk_size` isn't positive.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.nn import PairTransition
        >>> PairTransition(8, 16, 3)(torch.randn(2, 5, 5, 8)).shape
        torch.Size([2, 5, 5, 3])
        """
        check_tensors("PairTransition", "x", x=x)
        at_least_one("PairTransition", chunk_size=chunk_size)
        if x.ndim < 1 or x.shape[-1] != self.dim:
            raise ValueError(
                f"PairTransition: x has shape {tuple(x.shape)}; it should be (..., {self.dim})"
            )
        if (wider := wider_than(x, self.norm, self.fc1)) is not None:
            return self.forward(x.to(wider), chunk_size).to(x.dtype)
        rows = total = max(1, math.prod(x.shape[:-1]))
        if chunk_size is not None and not self.training:
            rows = min(rows, math.ceil(total * chunk_size / self.hidden))
        if self.max_memory is not None:
            # Both products, silu and the gated channels, and in the backward as many gradients.
            channels = (7 if torch.is_grad_enabled() else 3) * self.hidden
            rows = min(rows, max(1, self.max_memory // (channels * x.element_size())))
        if rows == total:
            return self._transition(x)
        flat = x.reshape(total, self.dim)
        return in_parts(self._transition, (0,), rows, flat).reshape(*x.shape[:-1], self.out_dim)

    def _transition(self, x: torch.Tensor) -> Any:
        n = self.norm(x)
        # In place where neither a derivative nor a layer's hook needs the factors, and no transform
        # may map over one of them alone.
        plain = all(map(is_plain, (self.fc1, self.fc2, self.silu)))
        kept = torch.is_grad_enabled() or traced() or transforms() or not plain
        with _products(n):
            hidden = self.silu(self.fc1(n)) if kept else F.silu(self.fc1(n), inplace=True)
            gate = self.fc2(n)
            return self.fc3(hidden * gate if kept else hidden.mul_(gate))

    def extra_repr(self) -> str:
        """Return the text in ``repr`` that comes before the layers."""
        return f"{self.dim}, hidden={self.hidden}, out_dim={self.out_dim}"


class _Projections(torch.nn.Module):
    """The projections of triangle attention, with the names of Boltz and OpenFold."""

    def __init__(self, channels: int, hidden: int, bias: bool) -> None:
        super().__init__()
        for name in "qkv":
            layer = torch.nn.Linear(channels, hidden, bias=False)
            torch.nn.init.xavier_uniform_(layer.weight)
            setattr(self, f"linear_{name}", layer)
        self.linear_o = torch.nn.Linear(hidden, channels, bias)
        self.linear_g = torch.nn.Linear(channels, hidden, bias)
        with torch.no_grad():
            for layer in (self.linear_o, self.linear_g):
                layer.weight.zero_()
            if bias:
                self.linear_o.bias.zero_()
                self.linear_g.bias.fill_(1.0)


def absent_keys(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1 - mask, of keys along the last axis, and the rows without any key.

    A row without keys has 0 in place of 1 - mask: a large bias on each of its keys would leave no
    digits of the logits, and gradients by fast kernels would be N times too large.
    """
    occupied = mask.any(-1, keepdim=True)
    return (1 - mask.to(dtype)) * occupied, occupied.logical_not()


def by_torch(
    q: Any, k: Any, v: Any, bias: Any, absent: Any, missing: float = _MISSING, **options: Any
) -> Any:
    """Return attention (B, R, H, N, D) of q, k and v, with a bias (B, 1, H, N, K).

    Where `absent` (B, R, 1, 1, K) is one, a key has the bias `missing` besides. Options are
    arguments of ``scaled_dot_product_attention``.
    """
    bias = bias.to(q.dtype)
    if absent is None:
        bias = bias.expand(*q.shape[:-1], k.shape[-2])
    else:
        bias = torch.add(bias, absent, alpha=missing)
    # torch's fast kernels take four axes.
    given = [x.flatten(0, 1) for x in (q, k, v, bias)]
    found = F.scaled_dot_product_attention(*given, **options)
    return found.unflatten(0, q.shape[:2])


def _by_cuequivariance(q: Any, k: Any, v: Any, bias: Any, absent: Any) -> Any:
    from cuequivariance_torch import triangle_attention

    # A bias of numbers below one would be as large as that of a missing edge.
    present = None if absent is None else absent == 0
    if bias.is_cuda and torch.cuda.get_device_capability(bias.device)[0] < 10:
        # Its kernels for GPUs before Blackwell convert another bias, and warn of it.
        bias = bias.float()
    return triangle_attention(q, k, v, bias, present)


def _installed() -> bool:
    return importlib.util.find_spec("cuequivariance_torch") is not None


# A search takes longer than a launch.
_searched = functools.cache(_installed)


def _found() -> bool:
    # `compat.cuequivariance.register` puts our functions into the package's place.
    return not serves("cuequivariance-torch") and _searched()


@functools.cache
def _served(device: str, dtype: torch.dtype) -> bool:
    """Return whether kernels, rather than plain formulas, serve our attention on a device."""
    request = registry.Request("triangle_attention", "torch", device, dtype, None)
    return registry.explain(request).backend not in (None, "torch", "numpy")


@torch.compiler.assume_constant_result
def _has_kernels(device: str, dtype: torch.dtype) -> bool:
    return _served(device, dtype)


class TriangleAttention(torch.nn.Module):
    r"""Gated attention of a pair representation's edges around a node, with a bias by triangles.

    .. math:: n = \mathrm{LN}(z), \quad (q, k, v)^h_{ij} = W^h_{q,k,v} n_{ij}, \quad
              b^h_{ij} = w^h \cdot n_{ij}, \quad g^h_{ij} = \sigma(W^h_g n_{ij} + c^h_g)

    .. math:: o^h_{ij} = g^h_{ij} \odot \sum_k \mathrm{softmax}_k\Bigl(\tfrac{1}{\sqrt D}
              q^h_{ij} \cdot k^h_{ik} + b^h_{jk} + 2^{15} (m_{ik} - 1)\Bigr) v^h_{ik}
              \ \text{(starting node)}

    .. math:: o^h_{ij} = g^h_{ij} \odot \sum_k \mathrm{softmax}_k\Bigl(\tfrac{1}{\sqrt D}
              q^h_{ij} \cdot k^h_{kj} + b^h_{ki} + 2^{15} (m_{kj} - 1)\Bigr) v^h_{kj}
              \ \text{(ending node)}

    .. math:: \mathrm{out}_{ij} = W_o (o^1_{ij}, \dots, o^H_{ij}) + c_o

    Parameters
    ----------
    c_in : int
        C, the channels of the pair representation.
    c_hidden : int
        D, the channels of a head.
    no_heads : int
        H, the number of heads.
    starting : bool
        Whether edges of one starting node attend to each other, or of one ending node.
    inf : float
        Kept for callers that read it, and not used: a missing edge has the bias -32768.
    bias : bool
        Whether gate and output have the biases c, as in OpenFold's AlphaFold 2.
    eps : float
        ε of the LayerNorm.
    attention : {None, "fusedops", "torch", "cuequivariance"}
        Attention by `fusedops.triangle_attention`, by torch's ``scaled_dot_product_attention``, or
        by cuEquivariance's ``triangle_attention``, which needs its package and a GPU. None means
        ours where it has kernels, or else the faster one: see the notes.
    max_memory : int, optional
        The most bytes of intermediate results in forward or backward, besides the normalized z, o,
        b and their gradients. To stay below, rows are computed in parts, and with gradients again
        in the backward; a part has one row at least.

    Attributes
    ----------
    c_in, c_hidden, no_heads : int
        The sizes C, D and H.
    starting, inf, attention, max_memory
        As given.
    layer_norm : torch.nn.LayerNorm
        The LayerNorm of z.
    linear : torch.nn.Linear
        w, (H, C).
    mha : torch.nn.Module
        The layers ``linear_q``, ``linear_k``, ``linear_v``, ``linear_g`` (HD, C), ``linear_o``
        (C, HD).

    Raises
    ------
    ImportError
        If `attention` is "cuequivariance", and cuequivariance_torch isn't installed.
    ValueError
        If a size isn't positive or `attention` is unknown; the message names the argument.

    Notes
    -----
    The parameters have the names of Boltz, OpenFold and Protenix. torch's attention takes one bias
    for every row, edge and key: O(N³) bytes, which `max_memory` bounds; ours and cuEquivariance's
    take b and the mask as they are, and an edge of which the mask isn't zero is present. A row
    without edges gets the mean of all values, as in these programs. Before training the output is
    zero. Layers with hooks, adapters such as LoRA's, or other classes are called; hooks of ``mha``
    are refused.

    With None, our kernels serve where the device has them, unless the mask has a gradient.
    Elsewhere cuEquivariance's kernel serves eager calls on a GPU where its package is installed,
    for 16 bits, 320 residues or more, heads of up to 128 channels, a multiple of eight, and a mask
    without a gradient; torch's serves all others, and ``torch.compile`` and ``torch.export``.

    References
    ----------
    Jumper et al., Nature 596 (2021) 583, supplementary algorithms 13 and 14; Abramson et al.,
    Nature 630 (2024) 493, supplementary algorithms 14 and 15. Names from Boltz 2.2,
    ``boltz/model/layers/triangular_attention/attention.py``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.nn import TriangleAttention
    >>> attention = TriangleAttention(16, 8, 2, starting=False)
    >>> z, mask = torch.randn(2, 5, 5, 16), torch.ones(2, 5, 5, dtype=torch.bool)
    >>> z = z + attention(z, mask)
    >>> attention.mha.linear_g.weight.shape
    torch.Size([16, 16])
    """

    def __init__(
        self,
        c_in: int,
        c_hidden: int = 32,
        no_heads: int = 4,
        starting: bool = True,
        inf: float = 1e9,
        *,
        bias: bool = False,
        eps: float = 1e-5,
        attention: Attention | None = None,
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        name = "TriangleAttention"
        at_least_one(name, c_in=c_in, c_hidden=c_hidden, no_heads=no_heads, max_memory=max_memory)
        one_of(name, "attention", attention, ATTENTIONS)
        if attention == "cuequivariance" and not _installed():
            raise ImportError(
                f"{name}: attention is 'cuequivariance', but cuequivariance_torch isn't installed"
            )
        self.c_in = c_in
        self.c_hidden = c_hidden
        self.no_heads = no_heads
        self.starting = starting
        self.inf = inf
        self.attention = attention
        self.max_memory = max_memory
        self.layer_norm = torch.nn.LayerNorm(c_in, eps)
        self.linear = torch.nn.Linear(c_in, no_heads, bias=False)
        self.mha = _Projections(c_in, no_heads * c_hidden, bias)
        torch.nn.init.normal_(self.linear.weight, std=c_in**-0.5)
        self.register_load_state_dict_pre_hook(self._refuse_missing_biases)

    @staticmethod
    def _refuse_missing_biases(
        module: Any,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        for layer in ("linear_g", "linear_o"):
            key = f"{prefix}mha.{layer}"
            lacks = f"{key}.bias" not in state_dict and f"{key}.weight" in state_dict
            if lacks and getattr(module.mha, layer).bias is not None:
                # An error without `strict` too: a bias that isn't loaded is not zero.
                errors.append(
                    f"TriangleAttention: {key} has a bias, which the state_dict lacks; the module "
                    "should be made with bias=False"
                )

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        chunk_size: int | None = None,
        use_kernels: bool = False,
        use_flash_attn: bool = False,
    ) -> torch.Tensor:
        """Return the update to add to a pair representation.

        Parameters
        ----------
        x : tensor (..., N, N, C), float32, float64, bfloat16 or float16
            z, with any number of batch dimensions, or none.
        mask : tensor that broadcasts to (..., N, N), bool, any integer or any float, optional
            m: zero or false where an edge is missing, else one. A row without edges gets the mean
            of its values, and has no gradient by its mask.
        chunk_size : int, optional
            The most rows to compute at one time; see `max_memory` too.
        use_kernels, use_flash_attn
            Ignored, and accepted only because Boltz passes them: `attention` says which is used.

        Returns
        -------
        tensor (..., N, N, C)
            In the dtype of x, or of autocast.

        Raises
        ------
        TypeError, ValueError
            If an argument has the wrong type or shape, or the mask requires a gradient that
            cuEquivariance doesn't compute; the message names the argument.

        References
        ----------
        See the class.

        Examples
        --------
        >>> import torch
        >>> from fusedops.nn import TriangleAttention
        >>> attention = TriangleAttention(8, 4, 2)
        >>> attention(torch.randn(5, 5, 8), chunk_size=2).shape
        torch.Size([5, 5, 8])
        """
        name = "TriangleAttention"
        check_pairs(name, self.c_in, "x", x=x, mask=mask)
        at_least_one(name, chunk_size=chunk_size)
        check_container(name, "mha", self.mha)
        if (wider := wider_than(x, self.layer_norm, self.linear)) is not None:
            return self.forward(x.to(wider), mask, chunk_size).to(x.dtype)
        *leading, N, _, C = x.shape
        batch = math.prod(leading)
        n = self.layer_norm(x)
        n = n if n.ndim == 4 else n.reshape(batch, N, N, C)
        # (B, 1, H, j, k) of edges (j, k), and of (k, j) around ending nodes.
        axes = (0, 3, 1, 2) if self.starting else (0, 3, 2, 1)
        bias = self.linear(n).permute(axes).unsqueeze(1).contiguous()
        ours = self._is_ours(bias, mask)
        given = [n]
        if mask is not None:
            mask = self._mask(mask, x.shape[:-1])
            given += [mask] if ours else absent_keys(mask[:, :, None, None], bias.dtype)

        def attended(n: torch.Tensor, *mask: torch.Tensor) -> Any:
            return self._attended(n, bias, ours, *mask)

        rows = N if chunk_size is None else min(N, chunk_size)
        if self.max_memory is not None:
            # Without edges a row takes no bytes.
            row = max(1, self._bytes_of_a_row(batch, N, x, ours))
            rows = min(rows, max(1, self.max_memory // row))
        o = in_parts(attended, (1 if self.starting else 2, 1, 1), rows, *given)
        layers: Any = self.mha
        # FSDP refuses views: the layer's result is none.
        o = o.reshape(*leading, N, N, self.no_heads * self.c_hidden)
        with _products(o):
            return layers.linear_o(o)

    def _mask(self, mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a mask as (B, R, N), for the edges of every row."""
        if self.attention in ("fusedops", "cuequivariance") and mask.requires_grad:
            raise ValueError(
                "TriangleAttention: mask requires a gradient; it should not with "
                f"{self.attention}, which has none"
            )
        mask = expanded("TriangleAttention", mask, shape)
        mask = mask.reshape(math.prod(shape[:-2]), *shape[-2:])
        # Contiguous, or else its sum with the bias is laid out by rows, and torch has no fast
        # kernel for that.
        return (mask if self.starting else mask.transpose(1, 2)).contiguous()

    def _is_ours(self, bias: torch.Tensor, mask: torch.Tensor | None) -> bool:
        if self.attention is not None or bias.numel() == 0:
            return self.attention == "fusedops" and bias.numel() > 0
        differs = mask is not None and mask.requires_grad
        # Torch's own functions take DTensors too.
        return not (differs or is_dtensor(bias)) and _has_kernels(bias.device.type, bias.dtype)

    def _is_for_cuequivariance(self, bias: torch.Tensor, absent: torch.Tensor | None) -> bool:
        if self.attention is not None:
            return self.attention == "cuequivariance"
        return (
            bias.is_cuda
            and bias.element_size() == 2
            and not torch.compiler.is_compiling()
            and bias.shape[-1] >= _MANY
            and self.c_hidden % 8 == 0
            and self.c_hidden <= 128
            and (absent is None or not absent.requires_grad)
            and _found()
        )

    def _bytes_of_a_row(self, batch: int, N: int, x: torch.Tensor, ours: bool) -> int:
        """Return the bytes of intermediate results that a row takes."""
        channels = self.no_heads * self.c_hidden
        grad = torch.is_grad_enabled()
        # q, k, v and the gate, their sum, σ of the gate, and both together, and gradients; those of
        # q, k and v are there twice, alone and as one.
        edges = channels * (17 if grad else 7)
        # The bias of a row, the logits and their softmax, and their gradients. Ours keeps none.
        pairs = 0 if ours else self.no_heads * (6 if grad else 4)
        # torch computes 16 bits in float32 where it has no kernel.
        return batch * N * max(4, x.element_size()) * (edges + pairs * N)

    def _attended(
        self,
        n: torch.Tensor,
        bias: torch.Tensor,
        ours: bool,
        mask: torch.Tensor | None = None,
        empty: torch.Tensor | None = None,
    ) -> Any:
        """Return the gated sums of edges n, (B, R, N, C), as (B, R, N, H, D).

        The bias is (B, 1, H, N, N). The mask is (B, R, N) for `ours`, or else 1 - mask as
        (B, R, 1, 1, N), with `empty` (B, R, 1, 1, 1). Around ending nodes edges are (B, N, R, C):
        q, k and v are read with other strides, so that no edge is copied.
        """
        layers: Any = [getattr(self.mha, f"linear_{name}") for name in "qkvg"]
        gate = layers[-1]
        with _products(n):
            if all(map(is_plain, layers)) and all(layer.bias is None for layer in layers[:-1]):
                # One product reads n once.
                found = F.linear(n, torch.cat([layer.weight for layer in layers]))
                *qkv, g = found.unflatten(-1, (4, self.no_heads, -1)).unbind(-3)
                if gate.bias is not None:
                    g = g + gate.bias.unflatten(0, g.shape[-2:])
            else:
                *qkv, g = (layer(n).unflatten(-1, (self.no_heads, -1)) for layer in layers)
        if ours:
            q, k, v = (each if self.starting else each.transpose(1, 2) for each in qkv)
            o = triangle_attention(q, k, v, bias.squeeze(1), mask)
            return g.sigmoid() * (o if self.starting else o.transpose(1, 2))
        attend = _by_cuequivariance if self._is_for_cuequivariance(bias, mask) else by_torch
        axes = (0, 1, 3, 2, 4) if self.starting else (0, 2, 3, 1, 4)
        q, k, v = (each.permute(axes) for each in qkv)
        o = attend(q, k, v, bias, mask)
        if empty is not None:
            o = torch.where(empty, v.mean(-2, keepdim=True), o)
        o = o.permute((0, 1, 3, 2, 4) if self.starting else (0, 3, 1, 2, 4))
        return g.sigmoid() * o

    def extra_repr(self) -> str:
        """Return the text in ``repr`` that comes before the layers."""
        return (
            f"{self.c_in}, c_hidden={self.c_hidden}, no_heads={self.no_heads}, "
            f"starting={self.starting}, attention={self.attention!r}"
        )
