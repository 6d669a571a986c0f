"""Declarations of arrays, a line each, and the checks of arrays against them.

::

    (B, T, D)                            sizes by name, or numbers
    (D, W) or (B, T, D, W), W > 0        one of two shapes; a size that can't be zero
    (2 * H, C), optional                 a multiple of a size; an array that may be None
    (N, N), integers, broadcast          integers and bool too; sizes of known arrays, each of which
                                         may be 1, or left out from the left
    (N), number                          an array or a number
    (*B, N, C)                           any number of sizes under one name, first in a shape; an op
                                         gives them to its primitive as one

    (B, T, D) of x, kernels              an output; its dtype is x's and kernels', promoted
    (N, C) as x, message                 its dtype is x's, or message's if x is None
    () summed of xyz                     its dtype is the dtype of sums over xyz
    (N) int64 with order                 made only if `order` is given, or is not zero
    like x                               of the shape and dtype of x; made only if x is given
    (E, *matrix)                         several sizes under one name, at any place
"""

from __future__ import annotations

import copy
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from fusedops._frame.arrays import cast, dtype_of, namespace
from fusedops._frame.check import (
    accumulator,
    alike,
    floats,
    is_tensor,
    promoted,
    refuse,
)

#: Sizes by name.
Sizes = Mapping[str, Any]


class Term(NamedTuple):
    """One size of a shape: `factor` times the size called `name`, or `several` under one name."""

    factor: str
    name: str
    several: bool

    def value(self, sizes: Sizes) -> Any:
        """Return the size, a tuple of several; None if it isn't known."""
        factor, size = (_number(part, sizes) for part in (self.factor, self.name))
        return None if factor is None or size is None else factor * size


def _number(name: str, sizes: Sizes) -> Any:
    return int(name) if name.isdecimal() else sizes.get(name)


def _terms(text: str) -> tuple[Term, ...]:
    """Return the sizes between parentheses."""
    one = re.compile(r"(\*?)(?:(\w+) \* )?(\w+)")
    found = [one.fullmatch(part) for part in text.split(", ") if part]
    if None in found:
        raise ValueError(f"({text}) should be sizes with ', ' between them, such as (B, 2 * N)")
    return tuple([Term(m[2] or "1", m[3], bool(m[1])) for m in found if m])


def _shape(terms: Iterable[Term], sizes: Sizes) -> tuple[Any, ...]:
    """Return the shape that terms of known sizes make."""
    shape: list[Any] = []
    for term in terms:
        shape += term.value(sizes) if term.several else [term.value(sizes)]
    return tuple(shape)


def _names(terms: Iterable[Term]) -> set[str]:
    """Return the names of sizes among the terms."""
    return {name for term in terms for name in term[:2] if not name.isdecimal()}


def _met(terms: tuple[Term, ...], shape: Any, sizes: Sizes) -> dict[str, Any] | None:
    """Return the known sizes and a shape's own, or None if they disagree."""
    found = dict(sizes)
    if terms and terms[0].several:
        outer = max(0, len(shape) - len(terms) + 1)
        shape = tuple(shape[:outer]), *shape[outer:]
    if len(terms) != len(shape):
        return None
    for size, term in zip(shape, terms, strict=True):
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
        allowed += [*[f"{name} > 0" for name in sorted(self.names)], "broadcast"]
        for word in words:
            if word not in allowed:
                raise ValueError(f"{word!r} should be one of {', '.join(allowed)}")
        self.broadcasts = "broadcast" in words
        #: The size under which an array has several leading dimensions.
        self.lead = self.shapes[0][0].name if text.startswith("(*") else None

    def needed(self) -> Array:
        """Return the same declaration, of an array that must be given."""
        needed = copy.copy(self)
        needed.optional = False
        return needed

    def fit(
        self, op: str, name: str, value: Any, sizes: Sizes, first: tuple[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the known sizes and an array's own; raise ValueError if they disagree.

        `first` is the array that shows the leading dimensions, with its name.
        """
        rank = len(value.shape)
        if self.broadcasts:
            full = self.full_shape(sizes)
            pairs = zip(reversed(value.shape), reversed(full), strict=False)
            if rank <= len(full) and all([n in (1, m) for n, m in pairs]):
                return dict(sizes)
        for terms in self.shapes:
            found = None if self.broadcasts else _met(terms, value.shape, sizes)
            if found is not None and all([found[size] != 0 for size in self.positive]):
                return found
        shown = [terms for terms in self.shapes if len(terms) == rank] or self.shapes
        shape = " or ".join([_written(terms, sizes, rank) for terms in shown])
        verb = "broadcast to" if self.broadcasts else "be"
        where = "".join([f", {size} > 0" for size in self.positive])
        if self.lead and first and len(sizes[self.lead]) != 1:
            where += f", as {first[0]} has shape {tuple(first[1].shape)}"
        was = f"has shape {tuple(value.shape)}"
        refuse(ValueError, op, name, was, f"{verb} {shape}{where}")

    def full_shape(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return the shape that the array is broadcast to, with a leading dimension at least."""
        (terms,) = self.shapes
        shape = _shape(terms, sizes)
        return (1, *shape) if self.lead and not sizes[self.lead] else shape

    def filling(self, array: Any, dtype: Any, sizes: Sizes) -> Callable[[Any], Any] | None:
        """Return a function that casts arrays like this one, broadcasts them to all sizes, and
        makes their leading dimensions one; None if this one is so already.
        """
        shape, rank = self.full_shape(sizes), len(self.shapes[0])
        if array.dtype == dtype and tuple(array.shape) == shape and len(shape) == rank:
            return None

        def fill(array: Any) -> Any:
            array = array if array.dtype == dtype else cast(array, dtype)
            if self.broadcasts:
                array = namespace(array).broadcast_to(array, shape)
            return flat(array, rank - 1)

        return fill


def _written(terms: tuple[Term, ...], sizes: Sizes, rank: int) -> str:
    parts = []
    for term in terms:
        value, factor = term.value(sizes), _number(term.factor, sizes)
        if value is None:
            times = "" if factor == 1 else f"{term.factor if factor is None else factor} * "
            parts.append("..." if term.several and rank != len(terms) else f"{times}{term.name}")
        else:
            parts += map(str, value if term.several else [value])
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
        first = next(iter(arrays.items()), None)
        if first is not None:
            alike(op, name, value, *first)
        sizes = array.fit(op, name, value, sizes, first)
        sizes = {size: n for size, n in sizes.items() if size not in later}
        arrays[name] = value
    return arrays, sizes


def flat(array: Any, inner: int) -> Any:
    """Return an array with all dimensions but the last `inner` as one."""
    outer = array.ndim - inner
    if outer == 1:
        return array
    return array.reshape((math.prod(array.shape[:outer]), *array.shape[outer:]))


def led(value: Any, lead: tuple[int, ...]) -> Any:
    """Return a result with leading dimensions in place of its first."""
    shape = *lead, *value.shape[1:]
    if is_tensor(value):
        # Not a view: FSDP can't follow writes to a view. Writes to either are not counted for the
        # other, so an op with leading dimensions can't save the output that it shows.
        return namespace(value).ops.aten._unsafe_view(value, shape)
    return value.reshape(shape)


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
        self.terms = _terms(shape or "")
        self.arrays = arrays.split(", ") if arrays else [self.like] if self.like else []
        self.needs = [*(needs.split(", ") if needs else []), *([self.like] if self.like else [])]
        for name in sorted(_names(self.terms).difference(known)):
            raise ValueError(f"{name!r} should be a size of an array's shape, or in sizes=")
        for name in self.arrays:
            if name not in given:
                raise ValueError(f"{name!r} should be one of {', '.join(given)}")
        for name in self.needs:
            if name not in given and name not in known:
                raise ValueError(f"{name!r} should be an array, or a size")

    def of(self, a: Any, first: Any, sizes: Sizes) -> tuple[tuple[Any, ...], Any] | None:
        """Return the shape and dtype, or None if the call doesn't have this output."""
        if any([not sizes[n] if n in sizes else getattr(a, n) is None for n in self.needs]):
            return None
        shape = tuple(getattr(a, self.like).shape) if self.like else _shape(self.terms, sizes)
        if self.dtype:
            return shape, dtype_of(self.dtype, first)
        given = [a for a in [getattr(a, name) for name in self.arrays] if a is not None] or [first]
        if self.rule == "summed of":
            return shape, accumulator(given[0])
        return shape, given[0].dtype if self.rule == "as" else promoted(given)
