"""Operations on problems larger than one GPU, on the collectives of torch.distributed."""

from fusedops.distributed.exchange import exchange, share

__all__ = ["exchange", "share"]
