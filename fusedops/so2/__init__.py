"""SO(2) convolutions of messages in the frames of their edges, and the gates that follow them."""

from fusedops.so2.op import PRECISIONS as PRECISIONS
from fusedops.so2.op import Layout as Layout
from fusedops.so2.op import Precision as Precision
from fusedops.so2.op import gate_activation, so2_convolution

__all__ = [
    "gate_activation",
    "so2_convolution",
]
