"""Argument checks. Every error names the op, the argument, what it was and what it should be."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

HALF = ("float16", "bfloat16")
_NUMPY_NAMES = {np.dtype(name): name for name in ("float32", "float64")}


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def dtype_name(array: Any) -> str:
    """Return the name of an array's or a tensor's dtype, such as ``float32``."""
    if isinstance(array, np.ndarray):
        return _NUMPY_NAMES.get(array.dtype) or str(array.dtype)
    return str(array.dtype).removeprefix("torch.")


def device_of(array: Any) -> str:
    """Return an array's device as torch writes it; NumPy arrays are on the CPU."""
    return str(array.device) if is_tensor(array) else "cpu"


def floats(op: str, name: str, value: Any, shape: tuple[int | str, ...]) -> Any:
    """Return `value` as a floating-point array or tensor of `shape`.

    A string in `shape` stands for any size. Raises TypeError or ValueError.
    """
    if is_tensor(value):
        if value.dtype.is_complex or not value.dtype.is_floating_point or value.is_sparse:
            raise TypeError(
                f"{op}: {name} has dtype {dtype_name(value)}; it should be a dense tensor of "
                "float32, float64, bfloat16 or float16"
            )
    else:
        value = np.asarray(value)
        if dtype_name(value) not in ("float32", "float64"):
            raise TypeError(
                f"{op}: {name} has dtype {dtype_name(value)}; it should be float32 or float64, "
                "in native byte order"
            )
    of_shape(op, name, value, shape)
    return value


def of_shape(op: str, name: str, value: Any, shape: tuple[int | str, ...]) -> None:
    """Raise ValueError unless `value` has `shape`, in which a string stands for any size."""
    if len(value.shape) == len(shape):
        for have, want in zip(value.shape, shape, strict=True):
            if have != want and not isinstance(want, str):
                break
        else:
            return
    should = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    raise ValueError(f"{op}: {name} has shape {tuple(value.shape)}; it should be ({should})")


def one_of(op: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{op}: {name} is {value!r}; it should be one of {', '.join(choices)}")


def same_device(op: str, name: str, device: str, other: str, other_device: str) -> None:
    """Raise ValueError unless two arguments share a device: no data moves behind a user's back."""
    if device != other_device:
        raise ValueError(
            f"{op}: {name} is on {device}; it should be on {other_device}, where {other} is"
        )
