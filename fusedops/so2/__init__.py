"""SO(2) convolutions of messages in the frames of their edges, and the gates that follow them."""

from fusedops.so2.op import PRECISIONS, Layout, Precision, gate_activation, so2_convolution

__all__ = [
    "PRECISIONS",
    "Layout",
    "Precision",
    "gate_activation",
    "so2_convolution",
]
