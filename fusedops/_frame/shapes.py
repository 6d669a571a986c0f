"""Declarations of arrays, a line each, and the checks of arrays against them.

::

    (B, T, D)                            sizes by name, or numbers
    (D, W) or (B, T, D, W), W > 0        one of two shapes; a size that can't be zero
    (2 * H, C), optional                 a multiple of a size; an array that may be None
    (B?, N?, N?), integers               broadcast sizes: 1, or left out from the left; integers and
                                         bool too
    (N), number                          an array or a number

    (B, T, D) of x, kernels              an output; its dtype is x's and kernels', promoted
    (N, C) as x, message                 its dtype is x's, or message's if x is None
    () summed of xyz                     its dtype is the dtype of sums over xyz
    (N) int64 with order                 made only if `order` is given, or is not zero
    like x                               of the shape and dtype of x; made only if x is given
    (E, *matrix)                         several sizes under one name
"""

from __future__ import annotations

import copy
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from fusedops._frame.arrays import namespace
from fusedops._frame.check import (
    accumulator,
    alike,
    as_array,
    dtype_name,
    floats,
    is_tensor,
    promoted,
    refuse,
)

#: Sizes by name.
Sizes = Mapping[str, Any]


class Term(NamedTuple):
    """One size of a shape: `factor` times the size called `name`."""

    factor: str
    name: str
    broadcasts: bool

    def value(self, sizes: Sizes) -> Any:
        """Return the size, or None if it isn't known."""
        factor, size = (_number(part, sizes) for part in (self.factor, self.name))
        return None if factor is None or size is None else factor * size


def _number(name: str, sizes: Sizes) -> Any:
    return int(name) if name.isdecimal() else sizes.get(name)


def _terms(text: str) -> tuple[Term, ...]:
    """Return the sizes between parentheses."""
    found = [re.fullmatch(r"(?:(\w+) \* )?(\w+)(\??)", part) for part in text.split(", ") if part]
    if None in found:
        raise ValueError(f"({text}) should be sizes with ', ' between them, such as (B, 2 * N)")
    return tuple([Term(m[1] or "1", m[2], bool(m[3])) for m in found if m])


def _names(terms: Iterable[Term]) -> set[str]:
    """Return the names of sizes among the terms."""
    return {name for term in terms for name in term[:2] if not name.isdecimal()}


def _met(terms: tuple[Term, ...], shape: Any, sizes: Sizes) -> dict[str, Any] | None:
    """Return the known sizes and a shape's own, or None if they disagree."""
    found = dict(sizes)
    if terms and terms[0].broadcasts:
        terms = terms[max(0, len(terms) - len(shape)) :]
    if len(terms) != len(shape):
        return None
    for size, term in zip(shape, terms, strict=True):
        if term.broadcasts and size == 1:
            continue
        want, factor = term.value(found), _number(term.factor, found)
        if want is not None:
            if size != want:
                return None
        elif factor == 1:
            found[term.name] = size
        elif factor is not None:
            if size % factor:
                return None
            found[term.name] = size // factor
    return found


class Array:
    """The parsed declaration of an array; it raises ValueError if the text declares none."""

    def __init__(self, text: str) -> None:
        shapes = re.match(r"\([^)]*\)(?: or \([^)]*\))*", text)
        if shapes is None:
            raise ValueError("it should begin with a shape in parentheses, such as (B, N)")
        self.shapes = [_terms(part[1:-1]) for part in shapes[0].split(" or ")]
        words = [word for word in text[shapes.end() :].split(", ") if word]
        #: The sizes that must not be zero.
        self.positive = [word.removesuffix(" > 0") for word in words if word.endswith(" > 0")]
        self.optional = "optional" in words
        self.integers = "integers" in words
        self.number = "number" in words
        #: The names of the sizes that the array may show.
        self.names = _names(term for shape in self.shapes for term in shape)
        allowed = ["optional", "integers", "number"]
        allowed += [f"{name} > 0" for name in sorted(self.names)]
        for word in words:
            if word not in allowed:
                raise ValueError(f"{word!r} should be one of {', '.join(allowed)}")
        self.broadcasts = any([term.broadcasts for shape in self.shapes for term in shape])

    def needed(self) -> Array:
        """Return the same declaration, of an array that must be given."""
        needed = copy.copy(self)
        needed.optional = False
        return needed

    def fit(
        self, op: str, name: str, value: Any, sizes: Sizes, later: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the known sizes and an array's own; raise ValueError if they disagree.

        Sizes in `later` are left out of the result, for the primitive to compare.
        """
        for terms in self.shapes:
            found = _met(terms, value.shape, sizes)
            if found is not None and all([found[size] != 0 for size in self.positive]):
                return {size: n for size, n in found.items() if size not in later}
        rank = len(value.shape)
        shown = [terms for terms in self.shapes if len(terms) == rank] or self.shapes
        self._refuse(op, name, value, " or ".join([_written(terms, sizes) for terms in shown]))

    def fit_end(self, op: str, name: str, value: Any) -> dict[str, Any]:
        """Return an array's last sizes, for all that are declared but the first."""
        terms = self.shapes[0][1:]
        found = _met(terms, value.shape[-len(terms) :], {})
        if found is None or not all([found[size] != 0 for size in self.positive]):
            self._refuse(op, name, value, f"(..., {_written(terms, {})[1:]}")
        return found

    def _refuse(self, op: str, name: str, value: Any, shape: str) -> NoReturn:
        verb = "broadcast to" if self.broadcasts else "be"
        where = "".join([f", {size} > 0" for size in self.positive])
        was = f"has shape {tuple(value.shape)}"
        refuse(ValueError, op, name, was, f"{verb} {shape}{where}")

    def full_shape(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return the shape that the array is broadcast to."""
        (terms,) = self.shapes
        return tuple([term.value(sizes) for term in terms])


def _written(terms: tuple[Term, ...], sizes: Sizes) -> str:
    parts = []
    for term in terms:
        value, factor = term.value(sizes), _number(term.factor, sizes)
        times = "" if factor == 1 else f"{term.factor if factor is None else factor} * "
        parts.append(f"{times}{term.name}" if value is None else str(value))
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def checked(
    op: str, declared: Mapping[str, Array], given: Mapping[str, Any], later: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a call, and the sizes that they show.

    Raises TypeError or ValueError unless the arrays fit each other. Sizes in `later` follow from
    other arguments; the primitive compares them.
    """
    arrays: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for name, array in declared.items():
        value = given[name]
        if (value is None and array.optional) or (array.number and isinstance(value, numbers.Real)):
            continue
        value = floats(op, name, value, or_integers=array.integers)
        if arrays:
            alike(op, name, value, *next(iter(arrays.items())))
        sizes = array.fit(op, name, value, sizes, later)
        arrays[name] = value
    return arrays, sizes


def flat(array: Any, inner: int) -> Any:
    """Return an array with all dimensions but the last `inner` as one."""
    outer = array.ndim - inner
    return array.reshape((math.prod(array.shape[:outer]), *array.shape[outer:]))


def led(value: Any, lead: tuple[int, ...]) -> Any:
    """Return a result with leading dimensions in place of its first."""
    shape = *lead, *value.shape[1:]
    if is_tensor(value):
        # Not a view: FSDP can't follow writes to a view. Writes to either are not counted for the
        # other, so an op with leading dimensions can't save the output that it shows.
        return namespace(value).ops.aten._unsafe_view(value, shape)
    return value.reshape(shape)


def flattened(
    op: str, declared: Mapping[str, Array], leading: str | None, given: Mapping[str, Any]
) -> tuple[tuple[int, ...] | None, dict[str, Callable[[Any], Any]]]:
    """Return leading dimensions that aren't one, and functions that flatten a call's arrays."""
    if leading is None:
        return None, {}
    first, inner = as_array(op, leading, given[leading]), len(declared[leading].shapes[0]) - 1
    if first.ndim == inner + 1:
        return None, {}
    sizes = declared[leading].fit_end(op, leading, first)
    lead = tuple(first.shape[: first.ndim - inner])
    found: dict[str, Callable[[Any], Any]] = {
        leading: lambda array: flat(as_array(op, leading, array), inner)
    }
    for name, array in declared.items():
        inside = [term.value(sizes) for term in array.shapes[0][1:]]
        own = len(inside)
        if not array.broadcasts or given[name] is None:
            continue
        value = as_array(op, name, given[name])
        if value.ndim > own:
            shape = tuple(value.shape)
            full = *(lead or (1,)), *shape[-own:]
            pairs = zip(reversed(shape), reversed((*(lead or (1,)), *inside)), strict=False)
            if len(shape) > len(full) or not all([m in (None, n) or n == 1 for n, m in pairs]):
                like = f"as {leading} has shape {tuple(first.shape)}"
                should = f"broadcast to {(*lead, *inside)}, {like}"
                refuse(ValueError, op, name, f"has shape {shape}", should)

            def broadcast(array: Any, name: str = name, full: Any = full, own: int = own) -> Any:
                array = as_array(op, name, array)
                return flat(namespace(array).broadcast_to(array, full), own)

            found[name] = broadcast
    return lead, found


class Output:
    """The parsed declaration of an output, which may name arrays `given` and sizes `known`."""

    def __init__(self, text: str, given: Collection[str], known: Collection[str]) -> None:
        parts = re.fullmatch(
            r"(?:like (\w+)|\(([^)]*)\))(?: (of|as|summed of) ([\w, ]+?)| (\w+\d))?"
            r"(?: with ([\w, ]+))?",
            text,
        )
        if parts is None:
            raise ValueError("it should read as the outputs at the head of shapes.py do")
        self.like, shape, self.rule, arrays, self.dtype, needs = parts.groups()
        self.terms: list[str | Term] = []
        for part in shape.split(", ") if shape else []:
            self.terms += [part[1:]] if part.startswith("*") else _terms(part)
        self.arrays = arrays.split(", ") if arrays else [self.like] if self.like else []
        self.needs = [*(needs.split(", ") if needs else []), *([self.like] if self.like else [])]
        sizes = {part for part in self.terms if isinstance(part, str)}
        sizes |= _names(part for part in self.terms if isinstance(part, Term))
        for name in sorted(sizes.difference(known)):
            raise ValueError(f"{name!r} should be a size of an array's shape, or in sizes=")
        for name in self.arrays:
            if name not in given:
                raise ValueError(f"{name!r} should be one of {', '.join(given)}")
        for name in self.needs:
            if name not in given and name not in known:
                raise ValueError(f"{name!r} should be an array, or a size")

    def of(self, a: Any, first: Any, sizes: Sizes) -> tuple[tuple[Any, ...], str] | None:
        """Return the shape and dtype name, or None if the call doesn't have this output."""
        if any([not sizes[n] if n in sizes else getattr(a, n) is None for n in self.needs]):
            return None
        shape = list(getattr(a, self.like).shape) if self.like else []
        for part in self.terms:
            shape += sizes[part] if isinstance(part, str) else [part.value(sizes)]
        if self.dtype:
            return tuple(shape), self.dtype
        given = [a for a in [getattr(a, name) for name in self.arrays] if a is not None] or [first]
        summed = accumulator(given[0]) if self.rule == "summed of" else None
        dtype = given[0].dtype if self.rule == "as" else promoted(given)
        return tuple(shape), summed or dtype_name(dtype)
