"""The catalogue: calls of every op, which its family lists in ``examples.py``.

A family's `cases` are calls of its primitives, for kernels on every backend; its `examples` are
calls of its public ops, of several sizes, for the promises that all ops make; its `arguments` are
good arguments of everything public, for the errors of bad ones. The first case of a primitive is
typical: tests that take long run it alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fusedops._frame.primitive import Primitive

Arguments = dict[Callable[..., Any], dict[str, Any]]

# `fusedops.testing` has the reasons.
TOLERANCE = {"float64": 1e-12, "float32": 3e-7, "bfloat16": 8e-3, "float16": 1e-3}


@dataclass(frozen=True)
class Case:
    """A primitive with arguments that a real program would pass.

    Attributes
    ----------
    name : str
        The workload's name; ``str`` puts the primitive's name before it.
    primitive : Primitive
        The primitive to call.
    make : callable
        Returns the float64 arrays and the static arguments, equal in every call.
    terms : int
        The number of products that an output's element sums, if it is large.

    Examples
    --------
    >>> from fusedops.testing import CASES
    >>> str(CASES[0]), CASES[0].make()[0][0].shape
    ('dynamic_conv-jet', (2, 70, 40))
    """

    name: str
    primitive: Primitive
    make: Callable[[], tuple[tuple[np.ndarray | None, ...], tuple[Any, ...]]]
    terms: int = 0

    def tolerance(self, dtype: str) -> float:
        """Return the largest error allowed, which grows with the root of the terms.

        Parameters
        ----------
        dtype : str
            ``"float64"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.

        Returns
        -------
        float
            Relative to the largest element of the reference.

        Examples
        --------
        >>> from fusedops.testing import CASES
        >>> CASES[0].tolerance("float32")
        3e-07
        """
        return TOLERANCE[dtype] * max(1.0, self.terms**0.5 / 8)

    def __str__(self) -> str:
        return f"{self.primitive.name}-{self.name}"


@dataclass(frozen=True)
class Example:
    """A kind of call.

    `make` returns the arguments by name, floats in float64, of a size: `tiny` for derivatives of
    higher order, `small` for most tests, `medium` for more than one block of a kernel, `large` for
    several threads, and `others`, which share numbers that `torch.compile` may take for constants.
    Only `leaves` have a gradient. Where `exact` is False, results depend on layout and threads, by
    roundings. Derivatives of a `slow` example are checked along random directions alone. Optional
    arrays that are `needed` fit the others, which fewer of them would not. Where it `packs` an
    argument, `make` has an option ``raw`` for the same argument as every call reads it anew.
    """

    name: str
    op: Any
    make: Callable[..., dict[str, Any]]
    leaves: tuple[str, ...]
    tiny: tuple[int, ...]
    small: tuple[int, ...]
    medium: tuple[int, ...]
    large: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    exact: bool = True
    terms: int = 64
    slow: bool = False
    needed: tuple[str, ...] = ()
    packs: bool = False

    def problem(self, size: str = "small", dtype: str = "float64") -> Problem:
        return self.of(getattr(self, size), dtype)

    def of(self, size: tuple[int, ...], dtype: str = "float64") -> Problem:
        cotangents = cotangents_of(self.op, self.make, size)
        return Problem(self, made(self.make, size), cotangents).astype(dtype)

    def unpacked(self) -> Example:
        make = functools.partial(self.make, raw=True)
        return dataclasses.replace(self, name=f"{self.name}-raw", make=make, packs=False)

    @property
    def takes_out(self) -> bool:
        return "out" in inspect.signature(self.op).parameters

    @property
    def floats(self) -> tuple[str, ...]:
        """The arguments that are arrays of floats; a cell's numbers are those of a lattice."""
        arguments = made(self.make, self.tiny)
        return tuple(
            name
            for name, value in arguments.items()
            if isinstance(value, np.ndarray) and value.dtype.kind == "f" and name != "cell"
        )

    @property
    def optional(self) -> tuple[str, ...]:
        """The leaves that may be left out."""
        may = [n for n in self.leaves if self.op.declared[n].optional]
        return tuple(n for n in may if n not in self.needed)

    def __str__(self) -> str:
        return self.name


def made(make: Callable[..., dict[str, Any]], size: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of a size; packed ones are new, because calls leave caches in them."""
    return make(np.random.default_rng(0), *size)


@functools.cache
def cotangents_of(op: Any, make: Any, size: tuple[int, ...]) -> tuple[Any, ...]:
    """Return random arrays of the shapes of the reference's outputs."""
    rng = np.random.default_rng(1)
    outs = tuple_of(op(**made(make, size), backend="numpy"))
    return tuple(rng.normal(size=np.shape(out)) for out in outs)


@dataclass(frozen=True)
class Problem:
    """A call's arguments by name, as NumPy arrays, and the cotangents of its outputs."""

    example: Example
    arguments: dict[str, Any]
    cotangents: tuple[Any, ...]

    @property
    def op(self) -> Any:
        return self.example.op

    @property
    def leaves(self) -> list[str]:
        return [n for n in self.example.leaves if self.arguments.get(n) is not None]

    def but(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, arguments={**self.arguments, **changes})

    def floats_mapped(self, function: Callable[[Any], Any]) -> Problem:
        """Return the problem with a function applied to every array of floats."""
        names = self.example.floats
        arguments = {n: function(a) if n in names else a for n, a in self.arguments.items()}
        return Problem(self.example, arguments, tuple(map(function, self.cotangents)))

    def mapped(self, function: Callable[[Any], Any]) -> Problem:
        """Return the problem with a function applied to every array."""
        arguments = {
            n: function(a) if isinstance(a, np.ndarray) else a for n, a in self.arguments.items()
        }
        return Problem(self.example, arguments, tuple(map(function, self.cotangents)))

    def astype(self, dtype: str) -> Problem:
        return self.floats_mapped(lambda a: np.array(a, dtype))

    def of_ones(self) -> Problem:
        """Return the problem with cotangents of ones."""
        cotangents = tuple(np.ones_like(c) for c in self.cotangents)
        return dataclasses.replace(self, cotangents=cotangents)


def example(name: str, op: Any, make: Any, *leaves: str, **options: Any) -> Example:
    return Example(name, op, make, leaves, **options)


def typical(cases: Iterable[Case]) -> dict[Primitive, Case]:
    """Return the typical case of every primitive."""
    found: dict[Primitive, Case] = {}
    for case in cases:
        found.setdefault(case.primitive, case)
    return found


def tuple_of(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


@functools.cache
def families() -> tuple[Any, ...]:
    """Return the module of examples of every family, a package with a module ``op``."""
    # A search by modules would import every package, and some need torch.
    names = sorted(path.parent.name for path in Path(__file__).parent.glob("[a-z]*/op.py"))
    return tuple(importlib.import_module(f"fusedops.{name}.examples") for name in names)
