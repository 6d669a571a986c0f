r"""cuEquivariance's triangle update, with its values of `precision`.

::

    -from cuequivariance_torch import triangle_multiplicative_update
    +from fusedops.compat.cuequivariance import triangle_multiplicative_update
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import fusedops._frame.needs_torch

import torch

import fusedops
from fusedops._frame.arrays import allows_tf32
from fusedops.nn import autocast_precision

__all__ = ["TriMulPrecision", "triangle_multiplicative_update"]


class TriMulPrecision(enum.IntEnum):
    """Precisions of products, by cuEquivariance's names and numbers.

    TF32x3 adds three products of TF32, which gives nearly float32's digits; "float32" serves it.

    Attributes
    ----------
    NONE, DEFAULT, TF32, TF32x3, IEEE, MXFP8, BFLOAT16
        The members. MXFP8 is refused.

    References
    ----------
    cuEquivariance 0.13, ``cuequivariance_torch.TriMulPrecision``.

    Examples
    --------
    >>> from fusedops.compat.cuequivariance import TriMulPrecision
    >>> TriMulPrecision.TF32.value
    1
    """

    NONE = -1
    DEFAULT = 0
    TF32 = 1
    TF32x3 = 2
    IEEE = 3
    MXFP8 = 4
    BFLOAT16 = 5


#: Our precision by cuEquivariance's names, in small letters.
_PRECISIONS = {
    "none": None,
    "default": None,
    "tf32": "tf32",
    "tf32x3": "float32",
    "ieee": "ieee",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
}


def _precision(given: Any, x: torch.Tensor, weights: Sequence[Any]) -> str | None:
    """Return the precision that we call by another name."""
    name = given
    if isinstance(given, enum.Enum):
        # cuEquivariance's own members are of another class.
        name = given.name
    elif isinstance(given, int) and not isinstance(given, bool):
        name = {member.value: member.name for member in TriMulPrecision}.get(given)
    if given is not None and (not isinstance(name, str) or name.lower() not in _PRECISIONS):
        should = "None, a TriMulPrecision, or one of " + ", ".join(_PRECISIONS)
        raise ValueError(
            f"triangle_multiplicative_update: precision is {given!r}; it should be {should}"
        )
    found = None if given is None else _PRECISIONS[str(name).lower()]
    if found is None and (asked := autocast_precision(x, weights)) is not None:
        return asked
    if found is None and x.is_cuda and x.dtype == torch.float32 and allows_tf32():
        return "tf32"
    return found


def triangle_multiplicative_update(
    x: torch.Tensor,
    direction: str = "outgoing",
    mask: torch.Tensor | None = None,
    norm_in_weight: torch.Tensor | None = None,
    norm_in_bias: torch.Tensor | None = None,
    p_in_weight: torch.Tensor | None = None,
    p_in_bias: torch.Tensor | None = None,
    g_in_weight: torch.Tensor | None = None,
    g_in_bias: torch.Tensor | None = None,
    norm_out_weight: torch.Tensor | None = None,
    norm_out_bias: torch.Tensor | None = None,
    p_out_weight: torch.Tensor | None = None,
    p_out_bias: torch.Tensor | None = None,
    g_out_weight: torch.Tensor | None = None,
    g_out_bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    precision: TriMulPrecision | str | int | None = None,
) -> torch.Tensor:
    r"""Return the triangle multiplicative update of a pair representation.

    .. math:: \mathrm{out}_{ij} = p\Bigl(\sum_k l_{ik} \odot r_{jk}\Bigr) \odot g_{ij}

    in short; see `fusedops.triangle_multiplicative_update`, which has the other arguments.

    Parameters
    ----------
    x : tensor (..., N, N, C), float32, float64, bfloat16 or float16
        The pair representation.
    direction, mask, norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias
        As of `fusedops.triangle_multiplicative_update`.
    norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias, eps
        As of `fusedops.triangle_multiplicative_update`.
    precision : TriMulPrecision, str or int, optional
        The precision to which a product may round its factors: a member of this module's enum or
        of cuEquivariance's, or its name in any case; "bf16", "bfloat16" and "fp16" too. By default
        that of x; of float32 that of autocast where it is on, or else on a GPU TF32 if
        ``torch.backends.cuda.matmul.allow_tf32``.

    Returns
    -------
    tensor (..., N, N, D)
        In the dtype of x.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong dtype, shape, device or value; the message names it. A
        projection or its gate that isn't given is refused, where cuEquivariance draws random
        numbers; "mxfp8" is refused.

    References
    ----------
    cuEquivariance 0.13, ``cuequivariance_torch.triangle_multiplicative_update``.

    Examples
    --------
    >>> import torch
    >>> from fusedops.compat.cuequivariance import TriMulPrecision, triangle_multiplicative_update
    >>> x, square = torch.randn(5, 5, 4), torch.randn(4, 4)
    >>> given = {f"{name}_in_weight": torch.randn(8, 4) for name in "pg"}
    >>> given |= {f"{name}_out_weight": square for name in "pg"}
    >>> triangle_multiplicative_update(x, **given, precision=TriMulPrecision.IEEE).shape
    torch.Size([5, 5, 4])
    """
    # Any, as type checkers don't know how many weights there are.
    op: Any = fusedops.triangle_multiplicative_update
    weights = (
        *(norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias),
        *(norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias),
    )
    return op(x, direction, mask, *weights, eps, _precision(precision, x, weights))
