"""Causal convolution with a kernel for every token and channel, and its decoding step."""

from fusedops.conv.op import ACTIVATIONS as ACTIVATIONS
from fusedops.conv.op import Activation as Activation
from fusedops.conv.op import dynamic_conv, dynamic_conv_step
from fusedops.conv.plan import Sequences

__all__ = [
    "Sequences",
    "dynamic_conv",
    "dynamic_conv_step",
]
