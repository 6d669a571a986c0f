"""Tensors and NumPy arrays in one memory, and the tensors of packed arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.weak

from fusedops._frame.packed import Packed

#: Packed arguments that were read from a GPU, by the tensor that they were read from, with which
#: they go.
packed_read = torch.utils.weak.WeakTensorKeyDictionary()

_DTYPES = {
    getattr(torch, name): np.dtype(name)
    for name in (
        *("float64", "float32", "float16", "complex128", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
_DTYPES[torch.bfloat16] = np.dtype(np.uint16)


def view_of(tensor: torch.Tensor) -> Callable[[torch.Tensor], np.ndarray]:
    """Return what makes NumPy arrays on the memory of CPU tensors of one kind; of bfloat16's bits.

    `Tensor.numpy` would fix the size of a tensor's storage for good, which FSDP sets to zero and
    back. The array doesn't keep the tensor: whoever has the one must hold the other.
    """
    size, shape, dtype = tensor.itemsize, tuple(tensor.shape), _DTYPES[tensor.dtype]
    if not tensor.numel():
        return lambda tensor: np.empty(shape, dtype)
    strides = tuple([size * stride for stride in tensor.stride()])
    extent = sum([(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]) + size
    memory, array = (ctypes.c_char * extent).from_address, np.ndarray
    return lambda tensor: array(shape, dtype, memory(tensor.data_ptr()), 0, strides)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of a CPU tensor, whatever asks for its gradient; of bfloat16, of its bits."""
    array = view_of(tensor)(tensor)
    if array.size:
        # The array holds its memory, and so the tensor.
        array.base.tensor = tensor  # type: ignore[union-attr]
    return array


def values(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a constant as a NumPy array, a view where that can be; no bfloat16."""
    tensor = tensor.detach().cpu().resolve_neg()
    return as_numpy(tensor.double() if tensor.is_floating_point() else tensor)


def as_tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return zero-copy views of NumPy arrays."""
    # They are kept, and a tensor made in inference mode is of no use outside of it.
    with torch.inference_mode(False):
        return [torch.from_numpy(array) for array in arrays]


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are nothing but tensors."""
    return all([type(tensor) is torch.Tensor for tensor in tensors])


def move(argument: Packed, device: Any) -> Packed:
    """Return a packed argument on a device."""
    device = torch.empty(0, device=device).device
    if str(device) == argument.device:
        return argument
    with torch.inference_mode(False):
        tensors = [
            tensor.to(device, torch.float32)
            if device.type == "mps" and tensor.dtype == torch.float64
            else tensor.to(device)
            for tensor in argument.tensors_here()
        ]
    return type(argument).from_tensors(tensors, argument.sizes())


def unwrapped(op: str, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside torch.func's wrappers, which follow no derivative by a constant."""
    functorch = torch._C._functorch
    # First, because it is an operation, whose result the transforms wrap.
    tensor = tensor.resolve_neg()
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            raise TypeError(
                f"{op}: {argument} is what torch.vmap maps over; it should be one for all, from "
                "outside"
            )
        tensor = functorch.get_unwrapped(tensor)
    return tensor
