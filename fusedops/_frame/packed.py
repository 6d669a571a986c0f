"""Arguments that are checked and laid out once and used in many calls."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fusedops._frame.check import device_of, dtype_name, own_memory, traced

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])

#: Classes of packed arguments, by name: graphs hold nothing but names.
packed: dict[str, type[Packed]] = {}


def bridge() -> Any:
    """Return ``fusedops._frame.bridge``, which is imported where tensors are met and not before."""
    # A statement, because torch.compile traces it before and after the first time.
    from fusedops._frame import bridge as torch_bridge

    return torch_bridge


def compiling() -> bool:
    """Return whether torch.compile traces this frame, or would trace the ones that it calls."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def outside_of_graphs(function: F) -> F:
    """Return a function that torch.compile doesn't trace: its graph ends where it is called."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (bridge().uncompiled(function) if compiling() else function)(*args, **kwargs)

    return cast(F, call)


class Packed:
    """An argument that is checked and laid out once and used in many calls.

    A subclass names its arrays in `_fields`. Their NumPy form serves the CPU; a copy on another
    device is made by `to`, never by a call. `_given` and `_options` name the constructor's arrays
    and its other arguments.
    """

    _fields: tuple[str, ...]
    _sizes: tuple[str, ...]
    _given: tuple[str, ...] = ()
    _options: tuple[str, ...] = ()
    device = "cpu"
    tensors: Any = None
    # Tensors of the caller's that a backward pass reads.
    borrowed: tuple[Any, ...] = ()
    # The constructor's other arguments, where `tensors` are its arrays, for a graph to read.
    unread: dict[str, Any] | None = None

    def __init_subclass__(cls) -> None:
        packed[cls.__name__] = cls
        cls.__init__ = outside_of_graphs(cls.__init__)  # type: ignore[method-assign]

    def tensors_here(self) -> list[Any]:
        """Return the arrays as torch tensors on this object's device."""
        if self.tensors is None:
            self.tensors = bridge().as_tensors([getattr(self, name) for name in self._fields])
        return self.tensors

    def to(self, device: Any) -> Self:
        """Return the same object on a torch device; this one where it is there already.

        Parameters
        ----------
        device : str or torch.device
            Such as ``"cuda"``.

        Returns
        -------
        Packed
            Of the same class.

        Examples
        --------
        >>> import fusedops, torch
        >>> edges = fusedops.Edges([[0, 1], [1, 0]], num_nodes=2)
        >>> edges.to(torch.device("cpu")) is edges
        True
        """
        return bridge().move(self, device)

    @classmethod
    def read(cls, op: str, *tensors: Any, **options: Any) -> Self:
        """Return the object that tensors describe, which an op was given in its place.

        Reading from a GPU waits for it: what is there is read once, until it is written to. A graph
        reads whenever it runs.
        """
        if traced():
            return cls._unread(tensors, options)
        argument = cls._given[0]
        for name, tensor in zip(cycle(cls._given), tensors, strict=False):
            own_memory(op, name, tensor)
        torch = sys.modules["torch"]
        if torch._C._are_functorch_transforms_active():
            if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
                raise TypeError(
                    f"{op}: {argument} is what torch.func maps over or differentiates by; it "
                    f"should be {cls.__name__}, or a tensor from outside"
                )
            # What is made in here is not torch.func's to keep track of.
            with torch._C._DisableFuncTorch():
                return cls._read(op, tensors, options)
        return cls._read(op, tensors, options)

    @classmethod
    def _read(cls, op: str, tensors: Sequence[Any], options: dict[str, Any]) -> Self:
        first, *others = tensors
        if first.is_cpu:
            return cls.unchecked(*tensors, **options)
        if any(tensor.is_inference() for tensor in tensors):
            return cls.made_of(*tensors, **options)
        where = [(t._version, t.data_ptr(), t.shape, t.stride()) for t in tensors]
        stamp = cls, where, options
        read = bridge().packed_read.get(first)
        # The first is the key; what has the address of another may be one that came after it.
        if (
            read is None
            or read[0] != stamp
            or any(r() is not t for r, t in zip(read[1], others, strict=False))
        ):
            cls._refuse_capture(op)
            read = stamp, [weakref.ref(t) for t in others], cls.made_of(*tensors, **options)
            bridge().packed_read[first] = read
        return read[2]

    @classmethod
    def _refuse_capture(cls, op: str) -> None:
        if sys.modules["torch"].cuda.is_current_stream_capturing():
            raise TypeError(
                f"{op}: {cls._given[0]} is a tensor; inside a CUDA graph it should be "
                f"{cls.__name__}, made outside"
            )

    @classmethod
    def made_of(cls, *tensors: Any, **options: Any) -> Self:
        """Return the object that tensors describe."""
        return cls(*tensors, **options)

    @classmethod
    def unchecked(cls, *tensors: Any, **options: Any) -> Self:
        """Return the object that tensors on the CPU describe, for one call."""
        return cls.made_of(*tensors, **options)

    @classmethod
    def _unread(cls, tensors: Sequence[Any], options: dict[str, Any]) -> Self:
        """Return an object for a graph, with the sizes that follow from those of its tensors."""
        self = cls.__new__(cls)
        self.tensors = list(tensors)
        self.device = device_of(tensors[0])
        self.unread = options
        self.foresee(*tensors, **options)
        return self

    @classmethod
    def read_in_graph(cls, op: str, tensors: Sequence[Any], options: Sequence[int]) -> Self:
        """Return the object that a graph's tensors describe."""
        if not traced() and tensors[0].is_cuda:
            # A recording would keep the object of the tensors that it was made with.
            cls._refuse_capture(op)
        return cls.read(op, *tensors, **dict(zip(cls._options, options, strict=True)))

    def foresee(self, *tensors: Any, **options: Any) -> None:
        """Set the sizes that are known before the tensors' values are."""

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """What the plan of a call may depend on."""
        parts = self.tensors or [getattr(self, name) for name in self._fields]
        kinds = [(dtype_name(part.dtype), *part.shape) for part in parts]
        return type(self), self.device, *self.sizes(), *kinds

    def sizes(self) -> list[int]:
        """Return the numbers that go with the arrays."""
        if self.unread is not None:
            return [self.unread[name] for name in self._options]
        return [getattr(self, name) for name in self._sizes]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any], sizes: Sequence[int]) -> Self:
        """Return an object around tensors that another one was taken apart into."""
        self = cls.__new__(cls)
        self.tensors = list(tensors)
        self.device = str(tensors[0].device)
        for name, size in zip(cls._sizes, sizes, strict=True):
            setattr(self, name, size)
        return self

    def __getattr__(self, name: str) -> Any:
        # Only reached by an array that exists as a tensor so far.
        if name in type(self)._fields and self.device == "cpu" and self.tensors is not None:
            array = bridge().as_numpy(self.tensors[self._fields.index(name)])
            setattr(self, name, array)
            return array
        raise AttributeError(f"{type(self).__name__} on {self.device} has no {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        if self.device != "cpu":
            return dict(self.__dict__)
        arrays = {name: getattr(self, name) for name in self._fields}
        return {**self.__dict__, **arrays, "tensors": None}
