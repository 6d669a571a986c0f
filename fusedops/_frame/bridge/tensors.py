"""Tensors and NumPy arrays in one memory, and the tensors of packed arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.weak

from fusedops._frame.check import dtype_name, refuse
from fusedops._frame.packed import Packed
from fusedops._frame.torch_private import private

#: Packed arguments that were read from tensors, by the first of these tensors; they are forgotten
#: with it.
packed_read = torch.utils.weak.WeakTensorKeyDictionary()


def np_dtype(dtype: torch.dtype) -> np.dtype:
    """Return NumPy's dtype for torch's: for bfloat16, the dtype of its bits."""
    return np.dtype("uint16" if dtype == torch.bfloat16 else dtype_name(dtype))


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how NumPy sees CPU tensors of one kind: shape, dtype, memory at an address, strides.

    With these `numpy.ndarray(shape, dtype, memory(tensor.data_ptr()), 0, strides)` is a view; of
    bfloat16, of its bits. A view doesn't keep the tensor: its holder must. `Tensor.numpy` would fix
    the size of a tensor's storage for good, but FSDP sets the size to zero and back.
    """
    size, shape = tensor.itemsize, tuple(tensor.shape)
    strides = tuple([size * stride for stride in tensor.stride()])
    last = sum([(n - 1) * stride for n, stride in zip(shape, strides, strict=True)])
    extent = last + size if tensor.numel() else 0
    return shape, np_dtype(tensor.dtype), (ctypes.c_char * extent).from_address, strides


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of a CPU tensor, even if it requires grad; of bfloat16, of its bits."""
    shape, dtype, memory, strides = layout_of(tensor)
    held = memory(tensor.data_ptr())
    # The array holds its memory, and so the tensor.
    held.tensor = tensor
    return np.ndarray(shape, dtype, held, 0, strides)


def values(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a constant as a NumPy array, a view if possible; floats as float64."""
    tensor = tensor.detach().cpu().resolve_neg()
    return as_numpy(tensor.double() if tensor.is_floating_point() else tensor)


def versioned(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether torch counts all writes.

    Neither another process nor an array shares the memory; an array would have fixed its size.
    """
    return all([not tensor.is_inference() and _is_own(tensor) for tensor in tensors])


def _is_own(tensor: torch.Tensor) -> bool:
    if not tensor.is_cpu:
        return True
    return tensor.untyped_storage().resizable() and not tensor.is_shared()


def states(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Return the number of writes to each tensor, and all else that may change but its values."""
    return [
        (
            tensor._version,
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.requires_grad,
            tensor.untyped_storage().resizable(),
        )
        for tensor in tensors
    ]


def as_tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return zero-copy views of NumPy arrays."""
    # Views are kept, and a tensor made in inference mode is of no use outside of it.
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
    # resolve_neg comes first, because the transforms wrap its result.
    tensor = tensor.resolve_neg()
    while private().is_wrapped(tensor):
        if private().is_mapped(tensor):
            was = "is what torch.vmap maps over"
            refuse(TypeError, op, argument, was, "be one for all, from outside")
        tensor = private().inside(tensor)
    return tensor
