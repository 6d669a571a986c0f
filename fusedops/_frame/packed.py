"""Arguments that are checked and laid out once and used in many calls."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fusedops._frame.check import (
    device_of,
    dtype_name,
    is_tensor,
    own_memory,
    refuse,
    same_device,
    traced,
)
from fusedops._frame.hook import bridge, compiling, loaded, outside_of_graphs
from fusedops._frame.torch_private import private

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

#: Objects that are kept for one tensor and its views.
_MOST = 8

#: Classes of packed arguments, by name, since a graph can hold names only.
packed: dict[str, type[Packed]] = {}

# Living objects on the CPU, by the ids of their tensors, which live as long as they do.
_living: weakref.WeakValueDictionary[tuple[int, ...], Packed] = weakref.WeakValueDictionary()


class Packed:
    """An argument that is checked and laid out once, and never changes after that.

    A subclass names its arrays in `_fields` and its numbers in `_sizes`; its constructor ends in
    `_hold`. The arrays are attributes: read-only NumPy arrays on the CPU, tensors elsewhere. Only
    `to` copies an object to another device, no call does. `_given` and `_options` name the
    constructor's arrays and its other arguments, for `read`.
    """

    _fields: tuple[str, ...]
    _sizes: tuple[str, ...]
    _given: tuple[str, ...] = ()
    _options: tuple[str, ...] = ()
    _record: Any
    # The arrays as given, which may be writable; and the arrays as tensors.
    _arrays: Any = None
    _tensors: Any = None
    device = "cpu"
    # The caller's tensors that a backward pass reads.
    borrowed: tuple[Any, ...] = ()
    # While torch traces a graph: the tensors and options from which a run makes the object.
    unread: tuple[list[Any], list[int]] | None = None

    def __init_subclass__(cls) -> None:
        packed[cls.__name__] = cls
        cls._record = namedtuple(cls.__name__, cls._fields)  # type: ignore[misc]
        cls.__init__ = outside_of_graphs(cls.__init__)  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any = None) -> None:
        of = type(self).__name__
        raise AttributeError(f"{of}: {name} can't be changed; it should be given to a new {of}")

    __delattr__ = __setattr__

    def _hold(self, device: str = "cpu", *, lasting: bool = True, **parts: Any) -> None:
        """Keep the arrays and numbers of a new object; copy NumPy arrays to a device.

        An object that isn't `lasting` serves one call, and gets tensors only where it needs them.
        """
        held = self.__dict__
        arrays = self._record(*[parts.pop(name) for name in self._fields])
        held.update(parts)
        if is_tensor(arrays[0]):
            held.update(device=device_of(arrays[0]), _tensors=arrays)
        else:
            held["_arrays"] = arrays
            if device != "cpu":
                moved = dict(self.to(device).__dict__)
                held.clear()
                held.update(moved)
            elif lasting:
                # A compiled function would take an array that it reads first for one of its own,
                # and tensors first made inside of it would compile it again.
                for name in self._fields:
                    getattr(self, name)
                if "torch" in sys.modules:
                    self.tensors_here()
        tensors = self._tensors if self.device == "cpu" else None
        if tensors is not None and not compiling() and loaded().tensors.are_plain(tensors):
            _living.setdefault(tuple(map(id, tensors)), self)

    def tensors_here(self) -> Any:
        """Return a record of the arrays as torch tensors on this object's device."""
        if self._tensors is None:
            # Torch warns of read-only arrays, and a caller's may be read-only.
            arrays = [a if a.flags.writeable else a.copy() for a in self._arrays]
            tensors = self._record(*bridge().tensors.as_tensors(arrays))
            # Tensors made in torch's FakeTensorMode are useless outside of it.
            if not bridge().tensors.are_plain(tensors):
                return tensors
            self.__dict__["_tensors"] = tensors
        return self._tensors

    def fields_like(self, array: Any) -> Any:
        """Return an object with the arrays as attributes, in the framework of another array."""
        return self.tensors_here() if is_tensor(array) else self

    def derived(self, function: Callable[[Self], T]) -> T:
        """Return a function's result for this object, one for all calls and threads."""
        kept: dict[Any, T] = self.__dict__.setdefault("_derived", {})
        if function not in kept:
            kept.setdefault(function, function(self))
        return kept[function]

    def to(self, device: Any) -> Self:
        """Return the same object on a torch device, or this one if it is there already.

        Parameters
        ----------
        device : str or torch.device
            For example ``"cuda"``.

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
        return self if str(device) == self.device else bridge().tensors.move(self, device)

    @classmethod
    def given(cls, op: str, beside: tuple[str, Any], *arrays: Any, **options: Any) -> Self:
        """Return an op's packed argument: the object given for it, or the one read from arrays.

        Raises ValueError unless it is on the device of another argument, whose name and value are
        `beside`.
        """
        other, like = beside
        found = isinstance(arrays[0], cls)
        for name, array in zip(cls._given, arrays, strict=True):
            device = arrays[0].device if found else device_of(array)
            same_device(op, name, device, other, device_of(like))
        return arrays[0] if found else cls.read(op, *arrays, **options)

    @classmethod
    def read(cls, op: str, *tensors: Any, in_graph: bool = False, **options: Any) -> Self:
        """Return the object that tensors, or other arrays, describe; an op was given them for it.

        Reading from a GPU waits for the GPU, so objects of tensors there are `kept`. While torch
        traces a graph, the object has only the attributes of `foresee`; each run of the graph reads
        the tensors, `in_graph`.
        """
        if not tensors or not all(map(is_tensor, tensors)):
            return cls.made_of(*tensors, **options)
        if traced():
            self = cls.__new__(cls)
            unread = list(tensors), [options[name] for name in cls._options]
            self.__dict__.update(device=device_of(tensors[0]), unread=unread)
            self.__dict__.update(cls.foresee(*tensors, **options))
            return self
        for name, tensor in zip(cycle(cls._given), tensors, strict=False):
            own_memory(op, name, tensor)
        with cls.outside_of_transforms(op, tensors):
            return cls._read_once(op, tensors, options, in_graph)

    @classmethod
    def outside_of_transforms(
        cls, op: str, tensors: Sequence[Any]
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch.func keeps no track of tensors that are made."""
        if not private().transforming():
            return contextlib.nullcontext()
        if any(map(private().is_wrapped, tensors)):
            was = "is mapped over or differentiated by torch.func"
            should = f"be {cls.__name__}, or a tensor from outside"
            refuse(TypeError, op, cls._given[0], was, should)
        context: contextlib.AbstractContextManager[Any] = private().without_transforms()
        return context

    @classmethod
    def _read_once(
        cls, op: str, tensors: Sequence[Any], options: dict[str, Any], in_graph: bool
    ) -> Self:
        if tensors[0].is_cpu or tensors[0].is_meta:
            # The latter has no values, which the class refuses.
            return cls.made_of(*tensors, **options)
        if in_graph:
            # A CUDA graph would keep the object of the tensors that were recorded.
            cls._refuse_capture(op)

        def make() -> Any:
            cls._refuse_capture(op)
            return cls.made_of(*tensors, **options)

        return cls.kept(tensors, options, make)

    @classmethod
    def kept(cls, tensors: Sequence[Any], options: dict[str, Any], make: Callable[[], T]) -> T:
        """Return what `make` returns for tensors: made once, and again only after a write to any.

        Views of the same memory find the object too. It is forgotten with the tensor of which the
        first one is a view, and not kept where NumPy may write.
        """
        frame = loaded().tensors
        if not frame.versioned(tensors):
            return make()
        first, *others = [t if t._base is None else t._base for t in tensors]
        of, states = (cls, options), frame.states(tensors)
        found = frame.packed_read.get(first, ())
        for before, refs, then, made in found:
            same = before == of and then == states
            # Compare identity: a freed tensor's address may be reused.
            if same and all([ref() is other for ref, other in zip(refs, others, strict=True)]):
                return cast("T", made)
        made, refs = make(), [weakref.ref(tensor) for tensor in others]
        # Versions only grow: objects of an older one are never found again.
        found = [entry for entry in found if entry[2][0][0] == states[0][0]]
        frame.packed_read[first] = ((of, refs, states, made), *found[: _MOST - 1])
        return made

    @classmethod
    def _refuse_capture(cls, op: str) -> None:
        if sys.modules["torch"].cuda.is_current_stream_capturing():
            raise TypeError(
                f"{op}: {cls._given[0]} is a tensor; inside a CUDA graph it should be "
                f"{cls.__name__}, made outside"
            )

    def apart(self) -> Self:
        """Return an object that no write to the caller's NumPy arrays changes."""
        return self

    @classmethod
    def made_of(cls, *tensors: Any, **options: Any) -> Self:
        """Return the object that arrays describe; on the CPU it is for one call."""
        return cls(*tensors, **options)

    @classmethod
    def foresee(cls, *tensors: Any, **options: Any) -> dict[str, Any]:
        """Return the attributes that don't depend on the tensors' values."""
        return {}

    def arrays(self) -> Sequence[Any]:
        """Return the arrays as the object holds them: tensors, or NumPy arrays."""
        if self.unread is not None:
            return self.unread[0]
        return self._tensors if self._arrays is None else self._arrays

    def sizes(self) -> list[int]:
        """Return the numbers that go with the arrays."""
        if self.unread is not None:
            return self.unread[1]
        return [getattr(self, name) for name in self._sizes]

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """The properties of this object that a call's plan may depend on."""
        kinds = [(dtype_name(array.dtype), *array.shape) for array in self.arrays()]
        return type(self), self.device, self.unread is None, *self.sizes(), *kinds

    def flat(self) -> tuple[list[Any], list[int]]:
        """Return tensors and numbers, which a graph holds instead of this object."""
        return list(self.arrays() if self.unread else self.tensors_here()), self.sizes()

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any], sizes: Sequence[int]) -> Self:
        """Return the object with these tensors and numbers, the inverse of `flat`."""
        self = cls.__new__(cls)
        self.__setstate__((tensors, sizes))
        return self

    @classmethod
    def holding(cls, tensors: Sequence[Any], sizes: Sequence[int]) -> Self:
        """Return the living object with these tensors and numbers, or a new one.

        On a GPU it is new: what it derives in a CUDA graph must not outlive the graph's memory. The
        tensors of a living object never change.
        """
        found = _living.get(tuple(map(id, tensors)))
        if type(found) is cls and found.sizes() == sizes:
            return found
        return cls.from_tensors(tensors, sizes)

    def __getattr__(self, name: str) -> Any:
        # Reached for an array that is asked for the first time.
        arrays = self._tensors if self._arrays is None else self._arrays
        if name not in self._fields or arrays is None:
            raise AttributeError(f"{type(self).__name__} on {self.device} has no {name!r}")
        array = getattr(arrays, name)
        if self.device == "cpu":
            array = bridge().tensors.as_numpy(array) if is_tensor(array) else array.view()
            array.setflags(write=False)
        self.__dict__[name] = array
        return array

    def __getstate__(self) -> tuple[list[Any], list[int]]:
        if self.device != "cpu":
            return self.flat()
        return [*(self._arrays or [getattr(self, name) for name in self._fields])], self.sizes()

    def __setstate__(self, state: tuple[Sequence[Any], Sequence[int]]) -> None:
        arrays, sizes = state
        self._hold(**dict(zip((*self._fields, *self._sizes), (*arrays, *sizes), strict=True)))
