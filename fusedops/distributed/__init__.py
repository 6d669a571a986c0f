"""Operations on problems larger than one GPU, on the collectives of torch.distributed."""

import fusedops._frame.needs_torch  # noqa: F401

from fusedops.distributed.exchanges import exchange, share
from fusedops.distributed.graphs import Partition
from fusedops.distributed.sequences import dynamic_conv
from fusedops.distributed.triangles import triangle_multiplicative_update

__all__ = ["Partition", "dynamic_conv", "exchange", "share", "triangle_multiplicative_update"]
