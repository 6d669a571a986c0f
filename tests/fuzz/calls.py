"""The catalogue's examples, of random sizes: the calls of ops without a module of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

from fusedops._catalogue import Example, tuple_of

from .arrays import MEDIUM, SMALL, common
from .checks import REFUSALS
from .problem import Family, Problem


def family(examples: Iterable[Example]) -> Family:
    """Return the family of an op with these examples."""
    known = {each.name: each for e in examples for each in (e, *[e.unpacked()] * e.packs)}
    first = next(iter(known.values()))

    def strategy(compiled: bool) -> dict[str, Any]:
        # Kernels are compiled for some sizes anew.
        lengths = SMALL if compiled else (*MEDIUM, 70, 150)
        sizes = [
            {size for e in known.values() for size in (e.tiny[at], e.small[at], e.medium[at])}
            for at in range(1, len(first.tiny))
        ]
        sizes = [some if compiled else some | {0, 1, 2, 3} for some in sizes]
        return common() | {
            "example": st.sampled_from(tuple(known)),
            "size": st.tuples(
                st.sampled_from(lengths), *(st.sampled_from(sorted(some)) for some in sizes)
            ),
            "values": st.sampled_from(("normal", "normal", "whole", "zero", "small", "big")),
            # Optional arrays and flags, each by a bit.
            "absent": st.sampled_from((0, 0, *range(16))),
            "flags": st.integers(0, 3),
        }

    return Family(
        first.op.__name__,
        strategy,
        functools.partial(build, known),
        ("size", 150),
        {"size": first.small},
        lambda more: (first.small[0] + more, *first.small[1:]),
    )


def build(known: dict[str, Example], d: dict[str, Any]) -> Problem:
    """Return the problem of an example, or ask for another description where it has none."""
    example = known[d["example"]]
    op, rng = example.op, np.random.default_rng(d["seed"])
    try:
        given = example.make(rng, *d["size"])
    except (ValueError, IndexError, ZeroDivisionError):
        # The example has no such size.
        hypothesis.reject()
    for at, name in enumerate(example.optional):
        if d["absent"] >> at & 1:
            given[name] = None
    for at, name in enumerate([name for name, value in given.items() if type(value) is bool]):
        given[name] = bool(d["flags"] >> at & 1)
    for name, value in given.items():
        if isinstance(value, np.ndarray) and value.dtype == np.int64:
            given[name] = value.astype(d["index"])
    arrays = {
        name: value if name in example.bounded else of_kind(rng, value, d["values"])
        for name, value in given.items()
        if isinstance(value, np.ndarray)
        and value.dtype.kind == "f"
        and name in op.declared
        and name not in op.primitive.constants
    }
    constants = {
        name: value for name, value in given.items() if name not in arrays and not plain(value)
    }
    options = {name: value for name, value in given.items() if plain(value)}

    def reference(**arrays: np.ndarray) -> Any:
        arrays = {n: a.copy() if n in op.primitive.mutates else a for n, a in arrays.items()}
        out = op(**arrays, **constants, **options, backend="numpy")
        updated = [arrays[name] for name in op.primitive.mutates]
        return (*tuple_of(out), *updated) if updated else out

    try:
        reference(**arrays)
    except REFUSALS:
        hypothesis.reject()
    sizes = [value.size for value in given.values() if isinstance(value, np.ndarray)]
    terms = 4 * max(example.terms, *sizes)
    bad: list[tuple[str, Any]] = []
    for name, value in constants.items():
        # Where an array is empty, no index may be read.
        if isinstance(value, np.ndarray) and value.dtype.kind == "i" and all(sizes):
            # A negative slot is padding.
            for shift in (2**30,) if name == "slots" else (2**30, -(2**30)):
                moved = value.copy()
                moved.reshape(-1)[-1] += shift
                bad.append((name, moved))
    return Problem(
        op=op,
        arrays=arrays,
        constants=constants,
        options=options,
        # Differences of the reference check its gradient.
        oracle=reference,
        # They step over kinks where vectors are zero, or round to it.
        smooth=d["values"] == "normal",
        natural=0.0 if example.exact and not example.cancels else 1.0,
        summed=True,
        bounded=example.bounded,
        exact=example.exact,
        # All elements may meet in one sum.
        terms=terms,
        gradient_terms=4 * terms,
        differentiable=op.primitive.pullback is not None,
        mutated=op.primitive.mutates,
        bad=bad,
    )


def plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))


def of_kind(rng: np.random.Generator, array: np.ndarray, kind: str) -> np.ndarray:
    """Return an example's numbers with some gone, rounded, or of another magnitude."""
    if kind == "zero":
        return np.where(rng.random(array.shape) < 0.3, array, 0.0)
    if kind == "whole":
        return np.rint(2 * array)
    return array * {"small": 2.0**-20, "big": 2.0**20}.get(kind, 1.0)
