"""Causal convolution with a kernel for every token and channel, and its decoding step."""

from fusedops.conv.op import ACTIVATIONS, Activation, dynamic_conv, dynamic_conv_step
from fusedops.conv.plan import Sequences

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Sequences",
    "dynamic_conv",
    "dynamic_conv_step",
]
