"""Forms of frozen weights that kernels keep from one replay of a CUDA graph to the next.

Halves of a weight, say, cost a graph's kernels more launches than the products that take them.
Torch doesn't tell of every write to a weight, so a copy of each is kept, for a graph to compare.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import fusedops._frame.needs_torch  # noqa: F401

import torch

Form = TypeVar("Form")


class Kept:
    """Forms of weights, made once, and again by `renew`.

    Parameters
    ----------
    weights : iterable of tensors
        Their memory is kept, too: a graph may read it when a model has other weights.
    device : torch.device
        Of the kernels.
    halves : bool
        Whether messages are of float16, and forms of their weights, too.
    splits : bool
        Whether kernels that make messages of float32 split them for products.
    """

    def __init__(
        self, weights: Iterable[Any], device: Any, halves: bool = False, splits: bool = False
    ) -> None:
        self.device, self.halves, self.splits = device, halves, splits
        self._weights = [x.detach() for x in weights]
        #: The bytes of each weight's memory by its address, and None for a form's.
        self._bytes: dict[int, Any] = {_memory(x): _bytes(x) for x in self._weights if _memory(x)}
        #: Copies of the bytes, of when the first form of a weight was made.
        self._copies: dict[int, Any] = {}
        self._forms: dict[Any, tuple[Any, Callable[[Any], Any]]] = {}
        #: Forms of arrays by their addresses, with their memory, layouts and versions.
        self._noted: dict[tuple[int, ...], tuple[Any, list[Any], list[Any]]] = {}

    def form(self, weight: Any, name: str, make: Callable[..., Form]) -> Form:
        """Return the form of a weight, or of a form, that was made before."""
        memory = _memory(weight)
        if memory not in self._bytes:
            return make(None)
        key = memory, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype, name
        if key not in self._forms:
            if self._bytes[memory] is not None and memory not in self._copies:
                self._copies[memory] = self._bytes[memory].clone()
            made = make(None)
            self._forms[key] = made, make
            for x in made if isinstance(made, tuple) else [made]:
                if isinstance(x, torch.Tensor):
                    self._bytes.setdefault(_memory(x), None)
        return self._forms[key][0]

    def note(self, form: Any, *arrays: Any) -> None:
        """Keep a form of new arrays for `take`, as long as all of these arrays live."""
        alive = {
            at: noted
            for at, noted in self._noted.items()
            if all([of() is not None for of in noted[1]])
        }
        memory = [weakref.ref(x.untyped_storage()) for x in arrays]
        at = tuple([x.data_ptr() for x in arrays])
        self._noted = {**alive, at: (form, memory, list(map(_state, arrays)))}

    def take(self, *arrays: Any) -> Any:
        """Return the form of arrays, once, unless torch has counted a write to them since."""
        found = self._noted.pop(tuple([x.data_ptr() for x in arrays]), None)
        if found is None:
            return None
        form, memory, states = found
        same = all([of() is x.untyped_storage() for of, x in zip(memory, arrays, strict=True)])
        return form if same and states == list(map(_state, arrays)) else None

    def forget(self) -> None:
        """Forget the forms that `take` hasn't taken."""
        self._noted = {}

    def changed(self) -> Any:
        """Return whether a weight has changed since its forms were made."""
        if not self._copies:
            return torch.zeros((), dtype=torch.bool, device=self.device)
        now = torch.cat([self._bytes[memory] for memory in self._copies])
        return (now != torch.cat([*self._copies.values()])).any()

    def renew(self) -> None:
        """Make all forms again, in their memory."""
        for memory, copy in self._copies.items():
            copy.copy_(self._bytes[memory])
        for made, make in self._forms.values():
            make(made)


def _state(x: Any) -> tuple[Any, ...]:
    """Return an array's layout, and the number of writes to it."""
    return x.shape, x.stride(), x._version


def _memory(x: Any) -> int:
    """Return the address of a tensor's memory, or 0 where it has none of its own."""
    return x.untyped_storage().data_ptr() if x.data_ptr() else 0


def _bytes(x: Any) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


#: The keeper, and the stream in which `keeping` was entered.
_keeper: tuple[Kept, Any] | None = None


@contextlib.contextmanager
def keeping(keeper: Kept) -> Iterator[None]:
    """Let kernels keep forms in a ``with`` block, where they are launched in its stream.

    Autograd launches them from threads of its own, which get no context.
    """
    global _keeper
    before, _keeper = _keeper, (keeper, stream_of(keeper.device))
    try:
        yield
    finally:
        _keeper = before
        keeper.forget()


def kept(device: Any) -> Kept | None:
    """Return the keeper of a device's current stream, or None."""
    found = _keeper
    return found[0] if found is not None and found[1] == stream_of(device) else None


def stream_of(device: Any) -> Any:
    """Return a GPU's current stream, or a CPU, which has no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else device


def formed(weight: Any, name: str, make: Callable[..., Form]) -> Form:
    """Return a form of a weight; `make` gets a form to write to, or None."""
    keeper = kept(weight.device)
    return make(None) if keeper is None else keeper.form(weight, name, make)
