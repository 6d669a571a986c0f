"""What kernels make of frozen weights alone, kept from one replay of a CUDA graph to the next.

Halves of a weight, say, cost a graph's kernels more launches than the products that take them.
Torch doesn't tell of every write to a weight, so a copy of each is kept, for a graph to compare.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import fusedops._frame.needs_torch  # noqa: F401

import torch

Form = TypeVar("Form")


class Kept:
    """Forms of weights, made once and again after `renew`.

    Parameters
    ----------
    weights : iterable of tensors
        Whose memory stays where it is.
    halves : bool
        Whether messages are of float16, and forms of their weights, too.
    """

    def __init__(self, weights: Iterable[Any], halves: bool = False) -> None:
        self.halves = halves
        #: By memory: weights, or none of a form's.
        self._weights: dict[int, list[Any]] = {}
        for x in weights:
            self._weights.setdefault(_memory(x), []).append(x)
        self._then: dict[int, list[Any]] = {}
        self._forms: dict[Any, tuple[Any, Callable[[Any], Any]]] = {}

    def form(self, weight: Any, name: str, make: Callable[..., Form]) -> Form:
        """Return the form of a weight, or of a form, that was made before."""
        memory = _memory(weight)
        if memory not in self._weights:
            return make(None)
        key = memory, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype, name
        if key not in self._forms:
            if memory not in self._then:
                self._then[memory] = [x.clone() for x in self._weights[memory]]
            made = make(None)
            self._forms[key] = made, make
            for x in made if isinstance(made, tuple) else [made]:
                if hasattr(x, "untyped_storage"):
                    self._weights.setdefault(_memory(x), [])
        return self._forms[key][0]

    def change(self, zero: Any) -> Any:
        """Return the largest change of a weight since its forms were made, at least a zero."""
        now, then = self._pairs()
        if not now:
            return zero
        changes = torch._foreach_norm(torch._foreach_sub(now, then), torch.inf)
        # One that is no number stays.
        return torch.stack([zero, *[change.to(zero) for change in changes]]).max()

    def renew(self) -> None:
        """Make all forms again, in their memory."""
        for now, then in zip(*self._pairs(), strict=True):
            then.copy_(now)
        for made, make in self._forms.values():
            make(made)

    def _pairs(self) -> tuple[list[Any], list[Any]]:
        """Return the weights that have forms, and what they were when these were made."""
        now = [x for memory in self._then for x in self._weights[memory]]
        return now, [x for then in self._then.values() for x in then]


def _memory(x: Any) -> int:
    address: int = x.untyped_storage().data_ptr()
    return address


#: With the streams of their contexts.
_keepers: list[tuple[Kept, Any]] = []


@contextlib.contextmanager
def keeping(keeper: Kept, device: Any) -> Iterator[None]:
    """Let kernels keep forms in a ``with`` block, where they are launched in its stream.

    Autograd launches them from threads of its own, which get no context.
    """
    _keepers.append((keeper, _stream(device)))
    try:
        yield
    finally:
        _keepers.pop()


def kept(device: Any) -> Kept | None:
    """Return what keeps forms for the current stream of a device."""
    if _keepers:
        keeper, stream = _keepers[-1]
        if _stream(device) == stream:
            return keeper
    return None


def _stream(device: Any) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else device


def formed(weight: Any, name: str, make: Callable[..., Form]) -> Form:
    """Return a form of a weight; `make` gets a form to write to, or None."""
    keeper = kept(weight.device)
    return make(None) if keeper is None else keeper.form(weight, name, make)
