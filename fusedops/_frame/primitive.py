"""Primitives: functions of arrays that kernels implement, with pullbacks made of primitives.

A gradient is a primitive too, so it has kernels and a gradient of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from fusedops._frame import registry
from fusedops._frame.arrays import cast
from fusedops._frame.check import is_tensor, reference
from fusedops._frame.hook import loaded
from fusedops._frame.kinds import Plans, kind_of
from fusedops._frame.shapes import Array, Output
from fusedops._host import memory

T = TypeVar("T")

#: Tests set this to find output elements that no kernel writes.
poison = False


def poisoned(arrays: Sequence[Any]) -> None:
    """Fill new outputs of floats with NaN."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            # uint16 holds the bits of bfloat16; these bits are a NaN.
            array.fill(0x7FC0 if array.dtype == np.uint16 else np.nan)
        elif array is not None and array.is_floating_point():
            array.fill_(np.nan)


def _parsed(primitive: str, lines: Mapping[str, str], parse: Callable[[str], T]) -> dict[str, T]:
    """Return parsed declarations by name. Raises ValueError that names the one that is wrong."""
    found = {}
    for name, line in lines.items():
        try:
            found[name] = parse(line)
        except ValueError as error:
            raise ValueError(f"{primitive}: {name} is declared {line!r}; {error}") from None
    return found


class Call:
    """A call of a primitive for the frame to make, which some pullbacks return.

    The pullback returns the cotangents in `before`, the call's outputs, and those in `after`.
    """

    def __init__(
        self,
        primitive: Primitive,
        *arguments: Any,
        out: Sequence[Any],
        before: tuple[Any, ...] = (),
        after: tuple[Any, ...] = (),
    ) -> None:
        self.primitive, self.a = primitive, primitive.Arguments._make(arguments)
        self.slots, self.before, self.after = tuple(out), before, after


class Primitive:
    """A function of arrays that kernels implement.

    Kernels, formula and pullback get the arguments of a call as one record by name, and outputs as
    another. Slots, a record or tuple too, ask for outputs, or for the cotangents that a pullback
    returns: each slot is an array to fill, True to make one, or None.

    Parameters
    ----------
    name : str
        The name that kernels register under.
    family : str
        The name of the folders that have its kernels, such as ``gpukern/conv``.
    arrays, outputs : dict of str to str
        The differentiable arrays and the outputs by name, each with its declaration (`shapes`).
        In a call some of the arrays may be None, but not all.
    constants : dict of str to str
        The arrays that have no derivative and are never cast.
    static : dict of str to type
        The other arguments: subclasses of `Packed`, which may be None, `str`, `int` or `float`.
    sizes : dict of str to callable
        Functions from the arguments to a size that no array needs to show; to several sizes if the
        key is several names, with commas between them.
    formula : callable
        A function from the arguments to a tuple of all outputs, in code that NumPy and torch both
        run: the definition, against which every kernel is tested.
    pullback : callable, optional
        A function from arguments `a`, outputs `y` (those in `saves`), cotangents `dy` of the
        outputs (None for zero, but not for all) and slots `wanted` to a tuple of a cotangent for
        every array (None for zero, or if unwanted); or to the `Call` that returns them, of arrays
        among `a`, `y` and `dy`, which later backward passes make without the pullback. Without a
        pullback, or where it returns NotImplemented, torch differentiates the formula.
    saves : tuple of str
        The outputs that the pullback needs.
    read_for : dict of str to tuple of str
        By array, the arrays for whose cotangents alone the pullback reads it. A gradient by none of
        these keeps the shape of the array instead of the array.
    mutates : tuple of str
        The arrays that are updated in place; a primitive with any has no derivative.
    check : callable, optional
        Raises if a record's values are bad, in an op's calls and in each run of a graph, unless it
        returns a quicker check for other calls of an op of the kind.
    """

    def __init__(
        self,
        name: str,
        *,
        family: str,
        arrays: dict[str, str],
        static: dict[str, type],
        outputs: dict[str, str],
        formula: Callable[[Any], tuple[Any, ...]],
        pullback: Callable[..., Any] | None = None,
        constants: dict[str, str] | None = None,
        sizes: dict[str, Callable[[Any], Any]] | None = None,
        saves: tuple[str, ...] = (),
        read_for: dict[str, tuple[str, ...]] | None = None,
        mutates: tuple[str, ...] = (),
        check: Callable[[Any], Any] | None = None,
    ) -> None:
        self.name = name
        self.family = family
        constants = constants or {}
        self.arrays, self.constants, self.outputs = tuple(arrays), tuple(constants), tuple(outputs)
        self.static = static
        #: The parsed declarations of arrays and constants.
        self.declared = _parsed(name, {**arrays, **constants}, Array)
        self._sizes = [(names.split(", "), of) for names, of in (sizes or {}).items()]
        #: The sizes that follow from other arguments than arrays.
        self.later = frozenset([name for names, _ in self._sizes for name in names])
        shown = self.later.union(*[array.names for array in self.declared.values()])
        described = _parsed(name, outputs, lambda line: Output(line, self.declared, shown))
        self._outputs = list(described.values())
        read_for = read_for or {}
        for role, given, among in (
            ("saves", saves, outputs),
            ("read_for", [*read_for, *itertools.chain(*read_for.values())], arrays),
            ("mutates", mutates, arrays),
        ):
            for unknown in set(given).difference(among):
                raise ValueError(f"{name}: {role} {unknown!r}; it should be of {', '.join(among)}")
        self._formula = formula
        self.pullback = pullback
        self.saves = saves
        self.read_for = read_for
        self.mutates = mutates
        self.check = check
        #: Whether 16-bit floats have outputs of 16 bits: sums over them are float32.
        self.sixteen_bits = any([output.rule != "summed of" for output in self._outputs])
        self.all: tuple[bool, ...] = (True,) * len(outputs)
        self._saved = tuple([output in saves for output in outputs])
        self.plans: Plans[Callable[[Any, Any], Any]] = Plans()
        if name in registry.primitives:
            raise ValueError(f"{name} is a primitive already; a primitive has a name of its own")
        registry.primitives[name] = self

    # Records are made when first used, since all of them would take a quarter of our import.

    @functools.cached_property
    def Arguments(self) -> Any:
        """The record type of a call's arguments."""
        return namedtuple("Arguments", (*self.arrays, *self.constants, *self.static))

    @functools.cached_property
    def Outputs(self) -> Any:
        """The record type of outputs."""
        return namedtuple("Outputs", self.outputs)

    @functools.cached_property
    def Arrays(self) -> Any:
        """The record type of arrays alone."""
        return namedtuple("Arrays", self.arrays)

    def __call__(self, *arguments: Any, out: Sequence[Any] | None = None) -> Any:
        """Return a record of outputs, differentiable in torch; an unwanted output may be None.

        `arguments` are the arrays, constants and static arguments, in order. `out` has a slot for
        every output; without it, all outputs are made.
        """
        a = self.Arguments._make(arguments)
        slots = self.all if out is None else tuple(out)
        plan = self.plan(a, slots)
        if plan is None:
            plan = loaded().plan(self, a, slots)
        return plan(a, slots)

    def formula(self, a: Any) -> tuple[Any, ...]:
        """Return all outputs, by the definition."""
        found = self._formula(a)
        if not isinstance(found, tuple) or len(found) != len(self.outputs):
            raise self._no_tuple("formula", found, self.outputs)
        return found

    def _no_tuple(self, role: str, found: Any, names: Sequence[str]) -> TypeError:
        was = f"{len(found)} of them" if isinstance(found, tuple) else f"a {type(found).__name__}"
        should = f"it should return a tuple of {len(names)}, of {', '.join(names)}"
        return TypeError(f"{self.name}: the {role} returned {was}; {should}")

    def plan(self, a: Any, slots: Sequence[Any]) -> Callable[[Any, Any], Any] | None:
        """Return the function that computes outputs; None where torch traces or transforms."""
        asked = registry.forced(None)
        kind = kind_of((asked, *slots, *a))
        found = self.plans.get(kind)
        if found is None:
            make: Any = _on_numpy
            if is_tensor(reference(a)):
                if loaded().modes.transforms():
                    return None
                make = loaded().plan
            found = self.plans.keep(kind, make(self, a, slots))
        return found

    def sizes(
        self, a: Any, op: str | None = None, names: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return all sizes by name. Raises ValueError if an array disagrees.

        The error names `op`, and its arrays by their `names` in the op's signature.
        """
        sizes: dict[str, Any] = {}
        for keys, of in self._sizes:
            sizes.update(zip(keys, of(a) if len(keys) > 1 else (of(a),), strict=True))
        for name, array in self.declared.items():
            value = getattr(a, name)
            if value is not None:
                shown = names.get(name, name) if names else name
                sizes = array.fit(op or self.name, shown, value, sizes)
        return sizes

    def describe(self, a: Any) -> list[Any]:
        """Return every output's shape and dtype, or None for one that the call lacks."""
        sizes, first = self.sizes(a), reference(a)
        return [output.of(a, first, sizes) for output in self._outputs]

    def with_saved(self, slots: Sequence[Any]) -> tuple[Any, ...]:
        """Return the slots, with True in those of further outputs that the pullback needs."""
        return tuple(
            [
                (saved or None) if slot is None else slot
                for slot, saved in zip(slots, self._saved, strict=True)
            ]
        )

    def pulled_back(
        self,
        a: Any,
        y: Any,
        dy: Sequence[Any],
        wanted: Sequence[Any],
        seen: Callable[[Call], None] | None = None,
    ) -> Any:
        """Return a cotangent for every array, None if it is unwanted or zero; or NotImplemented.

        A pullback that is one call shows it to `seen` first. No pullback gets zeros alone.
        """
        if not any([cotangent is not None for cotangent in dy]) or not any(wanted):
            return (None,) * len(wanted)
        if self.pullback is None:
            return NotImplemented
        found = self.pullback(a, y, self.Outputs._make(dy), self.Arrays._make(wanted))
        if found is NotImplemented:
            return found
        if isinstance(found, Call):
            if seen is not None:
                seen(found)
            found = found.before + found.primitive(*found.a, out=found.slots) + found.after
        if not isinstance(found, tuple) or len(found) != len(wanted):
            raise self._no_tuple("pullback", found, self.arrays)
        return tuple([dx if want else None for dx, want in zip(found, wanted, strict=True)])

    def no_gradient(self, op: str) -> str:
        """Return the message of the error that a derivative of an in-place update raises."""
        return (
            f"{op} has no gradient: it updates {', '.join(self.mutates)} in place; "
            "call it under torch.no_grad, or on arrays that don't require grad"
        )


def _on_numpy(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """Return the function that makes outputs and runs a NumPy kernel on arguments of these kinds.

    The kernel gets aligned arrays of one dtype.
    """
    count = len(primitive.arrays)
    request = registry.request(primitive.name, a[:count])
    backend, kernel = registry.choose(request)
    dtype, described = request.dtype, primitive.describe(a)
    unfit: list[tuple[int, Callable[[Any], Any]]] = []
    for at, array in enumerate(a[: count + len(primitive.constants)]):
        if array is None:
            continue
        to = dtype if at < count else array.dtype
        # Compiled code may fault if a number's address is not a multiple of its size.
        if array.dtype != to or not array.flags.aligned:
            unfit.append((at, functools.partial(cast, like=to, copy=True)))
        # Numba would compile its kernels again, for seconds, for arrays that are read-only.
        elif backend.name == "numba" and not array.flags.writeable:
            unfit.append((at, _as_writable))
    if backend.package is None:
        return converted(primitive, lambda a, slots: kernel(a), unfit, described)
    filled = [at for at, slot in enumerate(slots) if isinstance(slot, np.ndarray)]
    fit = [at for at in filled if slots[at].dtype == dtype and slots[at].flags.aligned]

    def empty(shape: Any, _: Any) -> Callable[[], np.ndarray]:
        return functools.partial(memory.empty_of(shape, dtype), tuple(shape), dtype)

    run = kernel_plan(primitive, kernel, slots, empty, described, fit)
    plain = all([output is None or output[1] == dtype for output in described])
    if plain and not (unfit or filled):
        return run
    return converted(primitive, run, unfit, described)


def kernel_plan(
    primitive: Primitive,
    kernel: Callable[[Any, Any], None],
    slots: Sequence[Any],
    empty: Callable[[Any, Any], Callable[[], Any]],
    described: Sequence[Any],
    fit: Sequence[int],
) -> Callable[[Any, Any], Any]:
    """Return a function that makes outputs, but takes those at `fit` from slots, and runs a kernel.

    `empty` returns a function that makes arrays of the shape and dtype of an output.
    """
    made = [
        (at, empty(*output))
        for at, (slot, output) in enumerate(zip(slots, described, strict=True))
        if output is not None and slot is not None and at not in fit
    ]
    size, record = len(slots), primitive.Outputs._make

    def run(a: Any, slots: Sequence[Any]) -> Any:
        outputs: list[Any] = [None] * size
        for at, make in made:
            outputs[at] = make()
        if poison:
            poisoned(outputs)
        for at in fit:
            outputs[at] = slots[at]
        y = record(outputs)
        kernel(a, y)
        return y

    return run


def converted(
    primitive: Primitive,
    run: Callable[[Any, Any], Sequence[Any]],
    unfit: Sequence[tuple[int, Callable[[Any], Any]]],
    described: Sequence[Any],
) -> Callable[[Any, Any], Any]:
    """Return a function that runs a plan with unfit arrays made fit, each by its function.

    Outputs get the dtypes that are `described`, and go into the arrays given for them.
    """
    names, record = primitive.Arguments._fields, primitive.Arguments._make
    written = [at for at, _ in unfit if names[at] in primitive.mutates]

    def convert(given: Any, slots: Sequence[Any]) -> Any:
        a = list(given)
        for at, made_fit in unfit:
            a[at] = made_fit(a[at])
        outputs = list(run(record(a), slots))
        for at in written:
            given[at][...] = a[at]
        for at, (slot, output) in enumerate(zip(slots, described, strict=True)):
            if slot is None or output is None:
                outputs[at] = None
                continue
            if outputs[at].dtype != output[1]:
                outputs[at] = cast(outputs[at], output[1])
            if slot is not True and outputs[at] is not slot:
                slot[...] = outputs[at]
                outputs[at] = slot
        return primitive.Outputs._make(outputs)

    return convert


def _as_writable(array: np.ndarray) -> np.ndarray:
    """Return a view of an array that claims to be writable, for a kernel that only reads it."""
    interface = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface, array=array))
