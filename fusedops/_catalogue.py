"""The catalogue: calls of every op, which its family lists in ``examples.py``.

A family's `cases` are calls of its primitives, for kernels on every backend; its `examples` are
calls of its public ops, of several sizes, for the promises that all ops make; its `updates`, if it
has any, are calls of ops that update an argument in place and have no gradient; its `arguments` are
good arguments of everything public, for the errors of bad ones; its `pictures`, if it has any, show
what an op is for. The first case of a primitive is typical: tests that take long run it alone.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fusedops._frame.check import is_tensor, on_host
from fusedops._frame.packed import Packed
from fusedops._frame.primitive import Primitive

Arguments = dict[Callable[..., Any], dict[str, Any]]
Steps = dict[str, Callable[[], tuple[Any, ...]]]
CallT = TypeVar("CallT", bound="Call")

FORWARD, BOTH = "forward", "forward + backward"

# `fusedops.testing` has the reasons.
TOLERANCE = {"float64": 1e-12, "float32": 3e-7, "bfloat16": 8e-3, "float16": 1e-3}


def tolerance(terms: int, dtype: str) -> float:
    return TOLERANCE[dtype] * max(1.0, terms**0.5 / 8)


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
    ('triangle_attention-attention', (1, 5, 37, 2, 32))
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
        >>> CASES[0].terms, round(CASES[0].tolerance("float32"), 9)
        (512, 8.49e-07)
        """
        return tolerance(self.terms, dtype)

    def __str__(self) -> str:
        return f"{self.primitive.name}-{self.name}"


@dataclass(frozen=True)
class Example:
    """A kind of call.

    `make` returns the arguments by name, floats in float64, of a size: `tiny` for derivatives of
    higher order, `small` for most tests, `medium` for more than one block of a kernel, `large` for
    several threads, and `others`, which share numbers that `torch.compile` may take for constants.
    Only `leaves` have a gradient. An element sums `terms` products, or `many` of the `large` size.
    Where `exact` is False, results depend on layout and threads, by roundings. Derivatives of a
    `slow` example are checked along random directions alone. Optional arrays that are `needed` fit
    the others, which fewer of them would not. Results grow without bounds for other numbers in
    `bounded` arrays than `make`'s. Where it `cancels`, roundings may be all that a gradient has.
    Where it `packs` an argument, `make` has an option ``raw`` for the same argument as every call
    reads it anew.
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
    many: int = 0
    slow: bool = False
    needed: tuple[str, ...] = ()
    bounded: tuple[str, ...] = ()
    cancels: bool = False
    packs: bool = False

    def problem(self, size: str = "small", dtype: str = "float64") -> Problem:
        return self.of(getattr(self, size), dtype)

    def of(self, size: tuple[int, ...], dtype: str = "float64") -> Problem:
        cotangents = cotangents_of(self.op, self.make, size)
        return Problem(self, made(self.make, size), cotangents).astype(dtype)

    def tolerance(self, dtype: str) -> float:
        """Return the largest error allowed of the `large` size."""
        return tolerance(max(self.terms, self.many), dtype)

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


class Call:
    """An op with its arguments, NumPy arrays or tensors on one device.

    A subclass is a dataclass. Arguments named by `wide` stay float32 where the others have 16 bits.
    `leaves` have gradients, for which a pullback is asked by `wrt`.
    """

    op: Any
    arguments: dict[str, Any]
    leaves: Any
    wide: frozenset[str] = frozenset()
    wrt: Any = None

    @property
    def framework(self) -> str:
        return "torch" if any(map(is_tensor, self.arguments.values())) else "numpy"

    def converted(self: CallT, convert: Callable[[str, Any], Any]) -> CallT:
        arguments = {name: convert(name, value) for name, value in self.arguments.items()}
        return dataclasses.replace(self, arguments=arguments)  # type: ignore[type-var]

    def astype(self: CallT, dtype: str) -> CallT:
        """Return the call with NumPy arrays of floats in `dtype`."""
        return self.converted(
            lambda _, value: value.astype(dtype, copy=False) if _is_float(value) else value
        )

    def to(self: CallT, device: str, dtype: str) -> CallT:
        """Return the call with tensors in place of arrays, floats in `dtype`."""

        def convert(name: str, value: Any) -> Any:
            if isinstance(value, Packed):
                return value.to(device)
            narrow = "float32" if name in self.wide and dtype.endswith("16") else dtype
            return tensor(value, device, narrow) if isinstance(value, np.ndarray) else value

        return self.converted(convert)

    def rounded(self: CallT) -> CallT:
        """Return the call with copies of its arrays and tensors in NumPy's float64.

        Products become float64, too. Packed arguments stay as they are.
        """

        def convert(name: str, value: Any) -> Any:
            if name == "precision":
                return None
            array = on_host(value)
            return float64(array).copy() if _is_float(array) else array

        return self.converted(convert)

    def forward(self, backend: str | None) -> Callable[[], tuple[Any, ...]]:
        """Return a function that computes the values."""

        def step() -> tuple[Any, ...]:
            return tuple_of(self.op(**self.arguments, backend=backend))

        if self.framework == "numpy":
            return step
        import torch

        return torch.no_grad()(step)

    def both(self, backend: str | None, cotangents: Any) -> Callable[[], tuple[Any, ...]]:
        """Return a function that computes values and gradients, by ``vjp`` or autograd."""
        if self.framework == "torch":
            return by_autograd(
                lambda *leaves: self.op(
                    **{**self.arguments, **dict(zip(self.leaves, leaves, strict=True))},
                    backend=backend,
                ),
                [self.arguments[name] for name in self.leaves],
                cotangents,
            )
        cotangents = tuple_of(cotangents)

        def step() -> tuple[Any, ...]:
            values, pullback = self.op.vjp(**self.arguments, wrt=self.wrt, backend=backend)
            return *tuple_of(values), *pullback(*cotangents)

        return step


def steps_of(call: Call, backend: str | None, cotangents: Any) -> Steps:
    """Return functions that compute the passes of a call on a backend."""
    steps = {FORWARD: call.forward(backend)}
    if call.leaves:
        steps[BOTH] = call.both(backend, cotangents)
    return steps


def by_autograd(
    function: Callable[..., Any], leaves: list[Any], cotangents: Any
) -> Callable[[], tuple[Any, ...]]:
    """Return a function that computes the values of another, and its gradients by autograd."""
    import torch

    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]

    def step() -> tuple[Any, ...]:
        values = function(*leaves)
        gradients = torch.autograd.grad(values, leaves, cotangents)
        return *(value.detach() for value in tuple_of(values)), *gradients

    return step


def float64(array: Any) -> Any:
    return np.asarray(on_host(array), np.float64)


def tensor(array: Any, device: str, dtype: str) -> Any:
    """Return an array as a tensor, floats in `dtype`."""
    import torch

    kind = getattr(torch, dtype) if np.asarray(array).dtype.kind == "f" else None
    return torch.from_numpy(np.asarray(array)).to(device, kind)


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


@dataclass(frozen=True)
class Problem(Call):
    """A call's arguments by name, as NumPy arrays, and the cotangents of its outputs."""

    example: Example
    arguments: dict[str, Any]
    cotangents: tuple[Any, ...]

    @functools.cached_property
    def op(self) -> Any:
        return self.example.op

    @functools.cached_property
    def leaves(self) -> Sequence[str]:
        return [n for n in self.example.leaves if self.arguments.get(n) is not None]

    @functools.cached_property
    def wrt(self) -> Sequence[str]:
        return self.leaves

    def but(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, arguments={**self.arguments, **changes})

    def floats_mapped(self, function: Callable[[Any], Any]) -> Problem:
        """Return the problem with a function applied to every array of floats."""
        names = self.example.floats
        arguments = {n: function(a) if n in names else a for n, a in self.arguments.items()}
        return Problem(self.example, arguments, tuple(map(function, self.cotangents)))

    def mapped(self, function: Callable[[Any], Any]) -> Problem:
        """Return the problem with a function applied to every array."""
        p = self.converted(lambda _, a: function(a) if isinstance(a, np.ndarray) else a)
        return dataclasses.replace(p, cotangents=tuple(map(function, self.cotangents)))

    def astype(self, dtype: str) -> Problem:
        return self.floats_mapped(lambda a: np.array(a, dtype))

    def to(self, device: str, dtype: str) -> Problem:
        cotangents = tuple(tensor(c, device, dtype) for c in self.cotangents)
        return dataclasses.replace(super().to(device, dtype), cotangents=cotangents)

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


def calls() -> dict[Any, list[Example]]:
    """Return the examples of every op, those of ops that update an argument too."""
    found: dict[Any, list[Example]] = {}
    for family in families():
        for each in [*family.examples(), *getattr(family, "updates", list)()]:
            found.setdefault(each.op, []).append(each)
    return found


def pictures() -> dict[str, Callable[[Any], None]]:
    """Return functions that draw into a figure of Matplotlib, with titles for docstrings."""
    found: dict[str, Callable[[Any], None]] = {}
    for family in families():
        found |= getattr(family, "pictures", {})
    return found


@functools.cache
def families() -> tuple[Any, ...]:
    """Return the module of examples of every family, a package with a module ``op``."""
    # A search by modules would import every package, and some need torch.
    names = sorted(path.parent.name for path in Path(__file__).parent.glob("[a-z]*/op.py"))
    return tuple(importlib.import_module(f"fusedops.{name}.examples") for name in names)
