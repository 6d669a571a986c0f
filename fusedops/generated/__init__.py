"""Causal convolution with kernels that a linear layer makes, without storing them."""

from fusedops.generated.op import dynamic_conv_generated

__all__ = [
    "dynamic_conv_generated",
]
