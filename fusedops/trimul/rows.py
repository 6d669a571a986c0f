"""Copies of rows of pair representations, for ranks and stages that hold some of the rows."""

from __future__ import annotations

from typing import Any

from fusedops._frame.arrays import namespace


def copy_rows(to: Any, rows: Any) -> None:
    """Copy a tensor to another of its shape and dtype.

    Torch copies tensors with gaps element by element; rows without gaps are copied as long words.
    """
    torch = namespace(to)
    for word in (torch.complex128, torch.int64):
        if all(_in_words(tensor, word.itemsize // tensor.itemsize) for tensor in (to, rows)):
            to, rows = to.view(word), rows.view(word)
            break
    to.copy_(rows)


def _in_words(tensor: Any, each: int) -> bool:
    """Return whether rows are whole words of so many elements."""
    *steps, last = tensor.stride()
    places = *steps, tensor.shape[-1], tensor.storage_offset()
    whole = each > 1 and last == 1 and not any([place % each for place in places])
    return whole and tensor.data_ptr() % (each * tensor.itemsize) == 0
