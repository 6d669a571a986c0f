"""Products of float32 on tensor cores, with float32's digits and range."""

from __future__ import annotations

import functools
from typing import Any

import torch

#: Triton's name of emulated products of float32.
EMULATED = "bf16x6"

# GPUs of data centers: A100, Hopper and Blackwell. Others multiply bfloat16 at most four times as
# fast as float32.
_CAPABILITIES = (8, 0), (9, 0), (10, 0), (10, 3)


@functools.cache
def of_float32(device: Any) -> str:
    """Return Triton's name of the fastest products of float32 on a device.

    A number of float32 is the sum of three of bfloat16, whose range is the same. Of the nine
    products of two such sums, six count (Henry, Tang and Heinecke, arXiv 1904.06376).
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return "ieee"
    from triton.backends.nvidia.compiler import CUDAOptions

    # Triton has emulated products since 3.6.
    known = getattr(CUDAOptions, "allowed_dot_input_precisions", ())
    served = EMULATED in known and torch.cuda.get_device_capability(device) in _CAPABILITIES
    return EMULATED if served else "ieee"
