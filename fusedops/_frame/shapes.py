"""Arrays as declarations say them, a line each; all checks of their shapes come from these lines.

::

    (B, T, D)                            sizes by name, or numbers
    (D, W) or (B, T, D, W), W > 0        one shape of several; a size that isn't zero
    (2 * H, C), optional                 a multiple of a size; None may stand for the array
    (B?, N?, N?), bool                   sizes that may be 1, or left out from the left
    (N), number                          a number may stand for the array

    (B, T, D) of x, kernels              an output, of the dtype to which x and kernels promote
    (N, C) as x, message                 of the dtype of the first of these that is given
    () summed of xyz                     of that in which sums over xyz are returned
    (N) int64 with order                 there only with another array, or with a size but zero
    like x                               of the shape and dtype of x, and only with x
    (E, *matrix)                         several sizes of one name
"""

from __future__ import annotations

import copy
import numbers
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from fusedops._frame.check import (
    accumulator,
    alike,
    dtype_name,
    floats,
    promoted,
)

#: Sizes by name.
Sizes = Mapping[str, Any]


class Term(NamedTuple):
    """One size of a shape: `factor` times the size called `name`."""

    factor: str
    name: str
    broadcasts: bool

    def value(self, sizes: Sizes) -> Any:
        """Return the size, None where it isn't known."""
        factor, size = (_number(part, sizes) for part in (self.factor, self.name))
        return None if factor is None or size is None else factor * size


def _number(name: str, sizes: Sizes) -> Any:
    return int(name) if name.isdecimal() else sizes.get(name)


def _terms(text: str) -> tuple[Term, ...]:
    """Return the sizes between parentheses."""
    found = [re.fullmatch(r"(?:(\w+) \* )?(\w+)(\??)", part) for part in text.split(", ") if part]
    if None in found:
        raise ValueError(f"({text}) is no shape")
    return tuple([Term(m[1] or "1", m[2], bool(m[3])) for m in found if m])


def _met(terms: tuple[Term, ...], shape: Any, sizes: Sizes) -> dict[str, Any] | None:
    """Return the sizes that a shape shows, with those known before; None where they differ."""
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
    """An argument that is an array, as its line declares it."""

    def __init__(self, text: str) -> None:
        shapes = re.match(r"\([^)]*\)(?: or \([^)]*\))*", text)
        if shapes is None:
            raise ValueError(f"{text!r} begins with no shape")
        self.shapes = [_terms(part[1:-1]) for part in shapes[0].split(" or ")]
        words = [word for word in text[shapes.end() :].split(", ") if word]
        #: The sizes that can't be zero.
        self.positive = [word.removesuffix(" > 0") for word in words if word.endswith(" > 0")]
        self.optional = "optional" in words
        self.bool = "bool" in words
        self.number = "number" in words
        unknown = set(words) - {"optional", "bool", "number", *[f"{n} > 0" for n in self.positive]}
        if unknown:
            raise ValueError(f"{text!r} has {', '.join(unknown)}, which mean nothing")
        self.broadcasts = any([term.broadcasts for shape in self.shapes for term in shape])

    def needed(self) -> Array:
        """Return the same declaration of an array that None can't stand for."""
        needed = copy.copy(self)
        needed.optional = False
        return needed

    def fit(
        self, op: str, name: str, value: Any, sizes: Sizes, later: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return sizes with those that an array shows. Raises ValueError where they differ.

        Those that are known `later` may be any here.
        """
        for terms in self.shapes:
            found = _met(terms, value.shape, sizes)
            if found is not None and all([found[size] != 0 for size in self.positive]):
                return {size: n for size, n in found.items() if size not in later}
        rank = len(value.shape)
        shown = [terms for terms in self.shapes if len(terms) == rank] or self.shapes
        should = " or ".join([_written(terms, sizes) for terms in shown])
        where = "".join([f", {size} > 0" for size in self.positive])
        verb = "broadcast to" if self.broadcasts else "be"
        raise ValueError(
            f"{op}: {name} has shape {tuple(value.shape)}; it should {verb} {should}{where}"
        )

    def whole(self, sizes: Sizes) -> tuple[Any, ...]:
        """Return the shape that an array of these sizes is broadcast to."""
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
    """Return the arrays of a call, and sizes that they show.

    Raises TypeError or ValueError unless the arrays go together.

    Sizes of the names `later` follow from other arguments; the primitive compares them.
    """
    arrays: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for name, array in declared.items():
        value = given[name]
        if (value is None and array.optional) or (array.number and isinstance(value, numbers.Real)):
            continue
        value = floats(op, name, value, or_bool=array.bool)
        if arrays:
            alike(op, name, value, *next(iter(arrays.items())))
        sizes = array.fit(op, name, value, sizes, later)
        arrays[name] = value
    return arrays, sizes


class Output:
    """An output, as its line declares it."""

    def __init__(self, text: str) -> None:
        parts = re.fullmatch(
            r"(?:like (\w+)|\(([^)]*)\))(?: (of|as|summed of) ([\w, ]+?)| (\w+\d))?"
            r"(?: with ([\w, ]+))?",
            text,
        )
        if parts is None:
            raise ValueError(f"{text!r} declares no output")
        self.like, shape, self.rule, arrays, self.dtype, needs = parts.groups()
        self.terms = shape.split(", ") if shape else []
        self.arrays = arrays.split(", ") if arrays else [self.like] if self.like else []
        self.needs = [*(needs.split(", ") if needs else []), *([self.like] if self.like else [])]

    def of(self, a: Any, first: Any, sizes: Sizes) -> tuple[tuple[Any, ...], str] | None:
        """Return the shape and the name of the dtype; None for an output that there isn't."""
        if any([not sizes[n] if n in sizes else getattr(a, n) is None for n in self.needs]):
            return None
        shape: list[Any] = list(getattr(a, self.like).shape) if self.like else []
        for part in self.terms:
            if part.startswith("*"):
                shape += sizes[part[1:]]
            else:
                shape += [term.value(sizes) for term in _terms(part)]
        if self.dtype:
            return tuple(shape), self.dtype
        given = [a for a in [getattr(a, name) for name in self.arrays] if a is not None] or [first]
        summed = accumulator(given[0]) if self.rule == "summed of" else None
        dtype = given[0].dtype if self.rule == "as" else promoted(given)
        return tuple(shape), summed or dtype_name(dtype)
