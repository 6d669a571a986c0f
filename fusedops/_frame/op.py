"""Public ops: a primitive behind a function that checks its arguments."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np

from fusedops._frame import registry
from fusedops._frame.arrays import contiguous, is_writable
from fusedops._frame.check import (
    arrays_only,
    cotangent,
    device_of,
    dtype_name,
    is_array,
    is_dtensor,
    is_tensor,
    is_traced,
    of_shape,
    own_memory,
    reference,
    refuse,
    same_device,
    sharing,
    traced,
)
from fusedops._frame.hook import bridge, compiling, outside_of_graphs
from fusedops._frame.kinds import CONSTANTS, Kind, Made, Plans, are_one, arranged, kind_of
from fusedops._frame.packed import Packed
from fusedops._frame.primitive import Primitive
from fusedops._frame.registry import Explanation
from fusedops._frame.shapes import checked, flat, led

F = TypeVar("F", bound=Callable[..., Any])
F_co = TypeVar("F_co", bound=Callable[..., Any], covariant=True)


class Bound(NamedTuple):
    """A checked call: the primitive's arguments, and the outputs that are shown."""

    # The arguments, some of them `Made`.
    parts: Any
    # The names of the outputs that are shown; whether the result is one of them, not a tuple.
    shown: tuple[str, ...]
    alone: bool
    # Raises if values of the arguments are bad, which their kinds don't show.
    values: Callable[[Any], Any] | None = None
    # The record of the arguments; the op's arrays by name, as they meet their declarations.
    a: Any = None
    arrays: Any = None
    # The dimensions that outputs have in place of their first; None for the first itself.
    lead: tuple[int, ...] | None = None


def to_run(
    arguments: Sequence[Any],
    shown: str | tuple[str, ...],
    values: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the result of a function under `op`, whose annotation is the op's result instead.

    `arguments` are the primitive's: each is an argument of the op, a constant, or `Made`. They must
    depend on the kinds of the op's arguments alone. `values` checks the values of the record of
    arguments in every call, unless it returns a quicker check for other calls of the kind.
    """
    if isinstance(shown, str):
        return Bound(arguments, (shown,), True, values)
    return Bound(arguments, shown, False, values)


@overload
def op(
    primitive: Primitive, *, overloads: type[F], **options: Any
) -> Callable[[Callable[..., Any]], Op[F]]: ...
@overload
def op(
    primitive: Primitive,
    *,
    names: Mapping[str, str] | None = None,
    sharded: str | None = None,
    by_request: Sequence[str] = (),
) -> Callable[[F], Op[F]]: ...
def op(primitive: Primitive, *, overloads: Any = None, pack: Any = None, **options: Any) -> Any:
    """Turn a function that checks its options into a public op.

    The function gets arrays that meet the primitive's declarations, and returns `to_run`. Its
    signature is the op's. It ends in ``backend`` and, unless the op returns a number, ``out``, an
    array for the output shown first; these two are served and documented here. `overloads` is a
    protocol for type checkers, if one signature isn't enough. `pack` returns positional arguments
    with those packed that have no kind, such as lists, so that a plan serves their call. The other
    options are those of `Op`.
    """

    def declare(check: Callable[..., Any]) -> Any:
        of: Op[Any] = Op(primitive, check, **options)
        name, plans = of.__name__, of.plans
        check.__doc__ = _documented(name, check.__doc__, of.takes_out)

        @functools.wraps(check)
        def call(*args: Any, out: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
            if compiling():
                options = {"out": out, "backend": backend, **kwargs}
                return bridge().nodes.compiled(name, args, options)
            asked = registry.forced(backend, name)
            if out is not None:
                return of.serve(None, asked, backend, args, kwargs, out)
            values = (*args, *kwargs.values())
            kind = kind_of((asked, len(args), *kwargs, *values))
            if kind is None and pack is not None:
                args = pack(*args)
                values = (*args, *kwargs.values())
                kind = kind_of((asked, len(args), *kwargs, *values))
            found = plans.get(kind)
            if found is not None:
                return found(values)
            if kind is not None and are_one(values) and not are_one(apart := _apart(values)):
                kwargs = dict(zip(kwargs, apart[len(args) :], strict=True))
                return call(*apart[: len(args)], backend=backend, **kwargs)
            return of.serve(kind, asked, backend, args, kwargs)

        shown: Any = call
        for attribute in ("primitive", "declared", "by_request", "bound", "plans"):
            setattr(shown, attribute, getattr(of, attribute))
        shown.vjp, shown.explain = outside_of_graphs(of.vjp), outside_of_graphs(of.explain)
        registry.ops[name] = shown
        return shown

    return declare


class Op(Generic[F_co]):
    """A public op, the function `check` in front of a primitive; users hold its `call`.

    `names` maps names of the primitive's arrays to names in the signature, if they differ.
    `sharded` is the module whose function of the op's name serves calls in which the first argument
    is a DTensor; without it they are refused. `by_request` names arrays by which `vjp` has
    gradients only if its `wrt` asks for them.
    """

    __doc__: str
    __call__: F_co
    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        primitive: Primitive,
        check: Callable[..., Any],
        names: Mapping[str, str] | None = None,
        sharded: str | None = None,
        by_request: Sequence[str] = (),
    ) -> None:
        self.primitive, self.check, self.names = primitive, check, names or {}
        self.sharded, self.by_request = sharded, by_request
        self.__name__ = check.__name__
        self.signature = inspect.signature(check)
        self.takes_out = "out" in self.signature.parameters
        #: The names of the primitive's arrays in the signature.
        self.arguments = [self.names.get(name, name) for name in primitive.arrays]
        found = {self.names.get(name, name): array for name, array in primitive.declared.items()}
        found |= {self.names[name]: primitive.declared[name] for name in self.names}
        #: The declarations of the arrays in the signature, in its order.
        self.declared = {
            name: found[name] if parameter.default is None else found[name].needed()
            for name, parameter in self.signature.parameters.items()
            if name in found
        }
        #: The arrays that the primitive gets in other shapes.
        self.filled = [name for name, of in self.declared.items() if of.broadcasts or of.lead]
        self.lead = next((of.lead for of in self.declared.values() if of.lead), "")
        self.plans: Plans[Callable[..., Any]] = Plans()

    def bound(self, *args: Any, **kwargs: Any) -> Bound:
        """Return a checked call."""
        name, primitive, declared = self.__name__, self.primitive, self.declared
        try:
            call = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        call.apply_defaults()
        for argument in primitive.mutates:
            value = call.arguments[argument]
            if not is_array(value):
                was = None if value is None else f"a {type(value).__name__}"
                refuse(TypeError, name, argument, f"is {was}", "be an array, to be updated")
        arrays, sizes = checked(name, declared, call.arguments, primitive.later)
        call.arguments.update(arrays)
        bound: Bound = self.check(*call.args, **call.kwargs)
        _check_bound(name, primitive, bound)
        parts, lead = primitive.Arguments._make(bound.parts), sizes.get(self.lead)
        for argument in arrays.keys() & self.filled:
            value = getattr(parts, argument)
            fill = declared[argument].filling(value, bound.parts[0].dtype, sizes)
            if fill is not None:
                parts = parts._replace(**{argument: Made(fill, value)})
        lead = None if lead is None or len(lead) == 1 else lead
        a = [part() if isinstance(part, Made) else part for part in parts]
        a = primitive.Arguments._make(a)
        primitive.sizes(a, name, self.names)
        check = bound.values or primitive.check
        look = check and (check(a) or check)
        return bound._replace(parts=parts, values=look, a=a, arrays=arrays, lead=lead)

    def shown(self, bound: Bound) -> list[int]:
        """Return the places of the outputs that a call shows."""
        return [self.primitive.outputs.index(name) for name in bound.shown]

    def slots(self, bound: Bound) -> list[Any]:
        """Return slots that ask for the outputs shown."""
        return [True if output in bound.shown else None for output in self.primitive.outputs]

    def serve(
        self,
        kind: Kind | None,
        asked: str | None,
        backend: str | None,
        args: Any,
        kwargs: Any,
        out: Any = None,
    ) -> Any:
        """Return the results of a call, the first of them in `out`; keep the plan of its kind."""
        first = args[0] if args else kwargs.get(next(iter(self.signature.parameters)))
        if self.sharded and out is None and is_dtensor(first) and not traced():
            serve = getattr(importlib.import_module(self.sharded), self.__name__)
            return serve(*args, backend=backend, **kwargs)
        with registry.asking(asked):
            bound = self.bound(*args, **kwargs)
        slots = self.slots(bound)
        if out is not None:
            slots[self.shown(bound)[0]] = self.checked_out(bound, self.by_name(args, kwargs), out)
        # A compiled graph chooses its backend when it runs, not when it is traced.
        with registry.asking(backend if is_traced(reference(bound.a)) else asked):
            y = self.primitive(*bound.a, out=slots)
            if kind is not None:
                found = self.planned(bound, slots, (*args, *kwargs.values()))
                if found is not None:
                    self.plans.keep(kind, found)
        results = self.results(bound)(y)
        if out is None:
            return results
        return (out, *results[1:]) if isinstance(results, tuple) else out

    def planned(
        self, bound: Bound, slots: Sequence[Any], values: tuple[Any, ...]
    ) -> Callable[[tuple[Any, ...]], Any] | None:
        """Return a function from a call's `values` that serves its kind without checks, or None.

        It needs each argument of the primitive to be arranged from the values. A value that isn't
        passed on, such as a 0-d array for an int, counts by more than its kind.
        """
        arrange = arranged(bound.parts, values)
        used = [part.args if isinstance(part, Made) else (part,) for part in bound.parts]
        counted = {id(source) for sources in used for source in sources}
        passed = all([type(value) in CONSTANTS or id(value) in counted for value in values])
        if arrange is None or not passed:
            return None
        plan = self.primitive.plan(bound.a, slots)
        if plan is None:
            return None
        record, look, results = self.primitive.Arguments._make, bound.values, self.results(bound)
        asked = registry.asked()
        if asked is not None and any([isinstance(part, Made) for part in bound.parts]):
            arrange = registry.asking(asked)(arrange)

        def run(values: tuple[Any, ...]) -> Any:
            a = record(arrange(values))
            if look is not None:
                look(a)
            return results(plan(a, slots))

        return run

    def results(self, bound: Bound) -> Callable[[Any], Any]:
        """Return a function from outputs to the results that a call shows."""
        shown, lead = self.shown(bound), bound.lead
        alone = shown[0] if bound.alone else None

        def results(y: Any) -> Any:
            if alone is None:
                return tuple([y[at] if lead is None else led(y[at], lead) for at in shown])
            value = y[alone] if lead is None else led(y[alone], lead)
            # A NumPy scalar instead of a 0-d array.
            return value if value.ndim or type(value) is not np.ndarray else value[()]

        return results

    def by_name(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call by their names in the signature."""
        return {**dict(zip(self.signature.parameters, args, strict=False)), **kwargs}

    def checked_out(self, bound: Bound, given: Mapping[str, Any], out: Any) -> Any:
        """Return the array for the first output shown, in `out`; raise if it can't be there."""
        name, names = self.__name__, self.arguments
        if not self.takes_out:
            raise TypeError(f"{name}: it returns a number and takes no out")
        arrays, others = bound.a[: len(names)], bound.a[len(names) :]
        first = reference(arrays)
        shape, dtype = self.primitive.describe(bound.a)[self.shown(bound)[0]]
        shape = shape if bound.lead is None else (*bound.lead, *shape[1:])
        plain = isinstance(out, np.ndarray) and not isinstance(out, np.ma.MaskedArray)
        if not (is_tensor(out) if is_tensor(first) else plain):
            kind = "torch tensor" if is_tensor(first) else "NumPy array"
            refuse(TypeError, name, "out", f"is a {type(out).__name__}", f"be a {kind}")
        if is_tensor(out):
            own_memory(name, "out", out)
        at = next(at for at, array in enumerate(arrays) if array is first)
        same_device(name, "out", device_of(out), names[at], device_of(first))
        of_shape(name, "out", out, shape)
        if out.dtype != dtype:
            was, should = f"has dtype {dtype_name(out.dtype)}", f"be {dtype_name(dtype)}"
            refuse(TypeError, name, "out", was, should)
        if is_tensor(out) and bridge().modes.watched((*arrays, out)):
            raise RuntimeError(
                f"{name}: out is given and an argument requires grad; it should be called without "
                "out, or under torch.no_grad"
            )
        if contiguous(out) is not out or not is_writable(out):
            was = "read-only" if contiguous(out) is out else "not contiguous"
            refuse(ValueError, name, "out", f"is {was}", "be contiguous and writable")
        # Look at converted arguments as well as given ones: a conversion may copy, or be a view.
        converted = (*zip(names, arrays, strict=True), *[(None, value) for value in others])
        named = [of for pair in (*given.items(), *converted) for of in _named_arrays(*pair)]
        held = [array for _, array in named]
        shared = sharing(out, held)(out, held)
        if shared is not None:
            refuse(ValueError, name, "out", f"shares memory with {named[shared][0]}", "not")
        return out if bound.lead is None else flat(out, out.ndim - len(bound.lead))

    def vjp(
        self,
        *args: Any,
        wrt: Sequence[str] | None = None,
        backend: str | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Callable[..., tuple[np.ndarray, ...]]]:
        """Return the value, and the pullback from a cotangent to gradients.

        `wrt` names the arrays that gradients are by; they come in the order of the signature.
        """
        name, primitive = self.__name__, self.primitive
        if "out" in kwargs:
            raise TypeError(f"{name}.vjp: it takes no out")
        asked = registry.forced(backend, name)
        bound = self.bound(*args, **kwargs)
        pairs = list(zip(self.arguments, bound.a, strict=False))
        for argument, array in pairs:
            arrays_only(f"{name}.vjp", argument, array, ", tensors have autograd")
        if primitive.mutates:
            raise TypeError(primitive.no_gradient(name))
        given = [argument for argument, array in pairs if array is not None]
        by = _by(name, wrt, given, self.by_request)
        # The pullback reads them again.
        a = [part.apart() if isinstance(part, Packed) else part for part in bound.a]
        bound = bound._replace(a=primitive.Arguments._make(a))
        with registry.asking(asked):
            y = primitive(*bound.a, out=primitive.with_saved(self.slots(bound)))
        # Two arrays of a primitive may have one name in the signature.
        wanted = [True if array is not None and arg in by else None for arg, array in pairs]

        def pullback(*cotangents: Any) -> tuple[Any, ...]:
            dy = self.cotangents(bound, y, cotangents)
            with registry.asking(asked):
                found = primitive.pulled_back(bound.a, y, dy, wanted)
            each = zip(self.arguments, found, wanted, strict=True)
            return tuple([self.as_given(bound, name, dx) for name, dx, want in each if want])

        return self.results(bound)(y), pullback

    def cotangents(self, bound: Bound, y: Any, given: Sequence[Any]) -> tuple[Any, ...]:
        """Return checked cotangents of all outputs, from those of the outputs shown."""
        op, shown = f"{self.__name__}.vjp", bound.shown
        if len(given) != len(shown):
            should = f"get {len(shown)}, of {' and '.join(shown)}"
            refuse(TypeError, op, "the pullback", f"got {len(given)} cotangents", should)
        dy = dict.fromkeys(self.primitive.outputs)
        for output, value in zip(shown, given, strict=True):
            if value is None:
                continue
            like = getattr(y, output)
            full = like.shape if bound.lead is None else (*bound.lead, *like.shape[1:])
            dy[output] = cotangent(op, value, full, like.dtype).reshape(like.shape)
        return tuple(dy.values())

    def as_given(self, bound: Bound, argument: str, dx: Any) -> Any:
        """Return a cotangent of the primitive's array in the shape and dtype of the argument."""
        if dx is None:
            return np.zeros_like(bound.arrays[argument])
        if argument not in (*self.filled, *self.by_request):
            return dx
        given = bound.arrays[argument]
        if bound.lead is not None and self.declared[argument].lead:
            dx = led(dx, bound.lead or (1,))
        if dx.shape != given.shape:
            more = dx.ndim - given.ndim
            axes = (*range(more), *(more + i for i, n in enumerate(given.shape) if n == 1))
            dx = dx.sum(axes).reshape(given.shape)
        return dx.astype(given.dtype, copy=False) if given.dtype.kind == "f" else dx

    def explain(
        self, *args: Any, out: Any = None, backend: str | None = None, **kwargs: Any
    ) -> Explanation:
        """Return which backend serves the call, and why."""
        asked = registry.forced(backend, self.__name__)
        with registry.asking(asked):
            bound = self.bound(*args, **kwargs)
        if out is not None:
            self.checked_out(bound, self.by_name(args, kwargs), out)
        arrays = bound.a[: len(self.arguments)]
        return registry.explain(registry.request(self.primitive.name, arrays, asked))


def _check_bound(op: str, primitive: Primitive, bound: Any) -> None:
    """Raise TypeError unless a function under `op` returned a call of its primitive."""
    fields = primitive.Arguments._fields
    if not isinstance(bound, Bound):
        was, should = f"returned a {type(bound).__name__}", "return to_run(...)"
    elif len(bound.parts) != len(fields):
        was, should = f"gave to_run {len(bound.parts)} arguments", f"give {', '.join(fields)}"
    elif not set(bound.shown) <= set(primitive.outputs):
        was = f"shows {', '.join(map(repr, bound.shown))}"
        should = f"show some of {', '.join(primitive.outputs)}"
    else:
        return
    refuse(TypeError, op, "its function", was, should)


def _named_arrays(name: str | None, value: Any) -> list[tuple[str | None, Any]]:
    """Return the arrays of an argument with its name; None means the packed one's own names."""
    if isinstance(value, Packed):
        pairs = zip(value._fields, value.arrays(), strict=False)
        return [(name or field, array) for field, array in pairs]
    return [(name, value)] if is_array(value) else []


_OUT = """
out : array or tensor, optional
    An array for the result: of its shape and dtype, contiguous, and apart from the arguments."""
_BACKEND = """
backend : str, optional
    The backend that must serve the call; ``.explain`` of this function, with the same arguments,
    returns which backend serves it, and why."""
_RAISES = """Raises
------
TypeError, ValueError
    If an argument has the wrong dtype, shape, device or value; the message names it.
BackendUnavailable
    If `backend` can't serve the call."""


def _documented(op: str, doc: str | None, takes_out: bool) -> str | None:
    """Return an op's docstring with the arguments and errors that all ops share."""
    if doc is None:
        # Python runs with -OO, which drops docstrings.
        return None
    parts = inspect.cleandoc(doc).split("\n\n")

    def first(*sections: str) -> int:
        for at, part in enumerate(parts):
            if part.startswith(tuple(f"{section}\n" for section in sections)):
                return at
        raise ValueError(f"{op}: its docstring should have a section {' or '.join(sections)}")

    at = first("Returns")
    parts[at - 1] += (_OUT if takes_out else "") + _BACKEND
    at = first("Notes", "References")
    if parts[at - 1].startswith("Raises\n"):
        at -= 1
        parts[at] = parts[at].replace("Raises\n------", _RAISES)
    else:
        parts.insert(at, _RAISES)
    return "\n\n".join(parts)


def _by(
    op: str, wrt: Sequence[str] | None, given: Sequence[str], by_request: Sequence[str]
) -> Sequence[str]:
    """Return the names of the arrays that gradients are by: of `by_request`, those in `wrt`."""
    if wrt is None:
        return [name for name in given if name not in by_request]
    # An iterator would be empty once its names were checked, and so would be the gradients.
    named = isinstance(wrt, Collection) and not isinstance(wrt, str | bytes)
    if not named or not all([name in given for name in wrt]):
        should = f"be a sequence of names of arrays that are given, of {', '.join(given)}"
        refuse(ValueError, f"{op}.vjp", "wrt", f"is {wrt!r}", should)
    return wrt


def _apart(values: tuple[Any, ...]) -> list[Any]:
    """Return values with a view of each array that came before, as x may be a residual too."""
    found: list[Any] = []
    for value in values:
        again = any([value is other for other in found])
        found.append(value[...] if again and is_array(value) else value)
    return found
