"""Functions for definitions, which NumPy and torch both run."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fusedops._frame.check import is_tensor, promoted
from fusedops._frame.torch_private import private

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: A NumPy array or a torch tensor; all in a signature are of one framework.
ArrayT = TypeVar("ArrayT", np.ndarray, "Tensor")


def namespace(array: Any) -> Any:
    """Return the module of an array's functions: NumPy or torch."""
    return sys.modules["torch"] if is_tensor(array) else np


def either(array: Any, numpy: T, torch: T) -> T:
    """Return the first of two algorithms for NumPy arrays, and the second for tensors."""
    return torch if is_tensor(array) else numpy


def wide(array: Any) -> Any:
    """Return an array in the dtype that the definition computes in."""
    if array is None:
        return None
    if not is_tensor(array):
        return array.astype(np.float64)
    return array.float() if array.itemsize == 2 else array


def widened(a: Any) -> Any:
    """Return a record of arguments with its arrays in one dtype, the definition's."""
    arrays = {name: wide(value) for name, value in a._asdict().items() if hasattr(value, "dtype")}
    dtype = promoted([*arrays.values()])
    return a._replace(**{name: cast(array, dtype) for name, array in arrays.items()})


def double(array: Any) -> Any:
    """Return an array in float64, or in float32 on a device without float64."""
    if not is_tensor(array):
        return array.astype(np.float64)
    return array.float() if array.device.type == "mps" else array.double()


def dtype_of(name: str, like: Any) -> Any:
    """Return the dtype of a name, in the framework of an array."""
    return getattr(namespace(like), name) if is_tensor(like) else np.dtype(name)


def cast(array: Any, like: Any, *, copy: bool = False) -> Any:
    """Return `array` in the dtype of `like`, a dtype or an array; a copy of a tensor if asked."""
    dtype = getattr(like, "dtype", like)
    return array.to(dtype, copy=copy) if is_tensor(array) else array.astype(dtype)


def zeros(like: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of zeros in the dtype and on the device of `like`."""
    return like.new_zeros(shape) if is_tensor(like) else np.zeros(shape, like.dtype)


def beside(like: Any) -> dict[str, Any]:
    """Return options with which functions of `namespace` make arrays on the device of `like`."""
    return {"device": like.device} if is_tensor(like) else {}


def int64(array: Any) -> Any:
    """Return an array in int64, the same if it is."""
    return array.long() if is_tensor(array) else array.astype(np.int64, copy=False)


def is_writable(array: Any) -> bool:
    """Return whether an array may be written to."""
    return is_tensor(array) or array.flags.writeable


def contiguous(array: Any) -> Any:
    """Return an array with contiguous memory, the same if it has."""
    return array.contiguous() if is_tensor(array) else np.asanyarray(array, order="C")


def table(function: Callable[[int], np.ndarray], at: int, like: Any) -> Any:
    """Return a function's array in the dtype and on the device of another; copied there once."""
    if not is_tensor(like):
        return function(at).astype(like.dtype)
    torch = namespace(like)
    # A tensor made under a transform is of no use outside of it.
    if type(like) not in (torch.Tensor, torch.nn.Parameter) or private().transforming():
        return like.new_tensor(function(at))
    return _table(function, at, like.dtype, like.device)


@functools.cache
def _table(function: Callable[[int], np.ndarray], at: int, dtype: Any, device: Any) -> Any:
    torch = sys.modules["torch"]
    # A tensor made in inference mode is of no use outside of it.
    with torch.inference_mode(False):
        return torch.tensor(function(at), dtype=dtype, device=device)


def detached(array: Any) -> Any:
    """Return an array as a constant."""
    return array.detach() if is_tensor(array) else array


def as_tensor(value: Any, dtype: str) -> Any:
    """Return a tensor as it is, and any other value as a tensor of a dtype."""
    torch = sys.modules["torch"]
    return value if is_tensor(value) else torch.as_tensor(value, dtype=getattr(torch, dtype))


def unit_solved(matrix: Any, right: Any, *, upper: bool) -> Any:
    """Return x for which (1 + matrix) x = right, of a strictly triangular matrix."""
    linalg = namespace(matrix).linalg
    if is_tensor(matrix):
        return linalg.solve_triangular(matrix, right, upper=upper, unitriangular=True)
    return linalg.solve(matrix + np.eye(matrix.shape[-1]), right)


def add_at(total: Any, index: Any, values: Any, *, in_order: bool = False) -> None:
    """Add values to rows of `total`, in place; if `in_order`, in one order on a GPU too."""
    if not is_tensor(total):
        np.add.at(total, index, values)
    elif in_order:
        total.index_put_((index,), values, accumulate=True)
    else:
        total.index_add_(0, index, values)


def allows_tf32() -> bool:
    """Return whether torch's own products of float32 on a GPU may round factors to TF32."""
    from torch.backends.cuda import matmul

    try:
        # Torch compiles a look at this name alone.
        return bool(matmul.allow_tf32)
    except RuntimeError:
        # A program that uses the newer setting can't read the older one.
        return bool(matmul.fp32_precision == "tf32")


def sigmoid(h: Any) -> Any:
    """Return the logistic function; its exponential may overflow, harmlessly."""
    if is_tensor(h):
        return h.sigmoid()
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-h))


def silu(h: Any) -> Any:
    """Return h · sigmoid(h), which is 0 where h has overflowed to -∞."""
    return namespace(h).clip(h, -_largest(h), None) * sigmoid(h)


def silu_slopes(h: Any) -> tuple[Any, Any]:
    """Return the first two derivatives of `silu`: their limits where h has overflowed."""
    s = sigmoid(h)
    h = namespace(h).clip(h, -_largest(h), _largest(h))
    return s * (1 + h * (1 - s)), s * (1 - s) * (2 + h * (1 - 2 * s))


def _largest(like: Any) -> float:
    """Return the largest number of an array's dtype."""
    return float(namespace(like).finfo(like.dtype).max)


def standardized(x: Any, eps: float) -> tuple[Any, Any]:
    """Return x standardized over its last axis, and 1 over the standard deviation."""
    centred = x - x.mean(-1)[..., None]
    # Centre twice: the second pass removes the rounding error of the first mean.
    centred = centred - centred.mean(-1)[..., None]
    scale = (((centred * centred).mean(-1) + eps) ** -0.5)[..., None]
    return centred * scale, scale


def standardized_back(dy: Any, y: Any, scale: Any) -> Any:
    """Return the cotangent of x, which `standardized` made y and scale from."""
    along = (dy * y).mean(-1)[..., None]
    return scale * (dy - dy.mean(-1)[..., None] - y * along)


def added(one: Any, two: Any) -> Any:
    """Return the sum of two cotangents; None stands for zero."""
    if one is None or two is None:
        return two if one is None else one
    return one + two


def recomputed(stage: Any, like: Any) -> Any:
    """Return a stage of a definition that saves no intermediate results for torch's backward.

    The backward computes the stage again. Under torch.func the stage saves everything, since
    torch.func has no hooks for saved tensors.
    """
    if not is_tensor(like) or not namespace(like).is_grad_enabled() or private().transforming():
        return stage
    # torch 2.6 doesn't import this module by itself.
    checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
    return functools.partial(checkpoint, stage, use_reentrant=False, preserve_rng_state=False)


def grouped(keys: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the stable order that sorts keys below `count`, and where each key begins in it."""
    # NumPy sorts 16-bit integers by counting.
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    shift = 16
    while count >> shift:
        digit = (keys >> shift).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
        shift += 16
    return order, np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=count))])
