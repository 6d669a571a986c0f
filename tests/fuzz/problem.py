"""Calls that an op's strategy builds from descriptions, with everything known about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusedops.testing import Case


@dataclass
class Problem:
    """A call of an op."""

    op: Any
    #: Arrays with gradients, float64, in the gradients' order; absent arrays are left out.
    arrays: dict[str, np.ndarray]
    #: Other arrays, or lists and tuples of them. Floats among them are exact in float32.
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    #: From `arrays` to the outputs in float64, by another method than the reference's.
    oracle: Callable[..., Any] | None = None
    #: From `constants` to the same as packed arguments.
    pack: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    #: The least size that errors are relative to, for sums which may cancel to nothing.
    natural: float = 0.0
    #: Whether errors are relative to results of the arrays' magnitudes, too.
    summed: bool = False
    #: The arrays whose numbers stay as they are beside magnitudes.
    bounded: tuple[str, ...] = ()
    #: From `arrays` to a factor of errors, squared in gradients.
    condition: Callable[[Mapping[str, Any]], float] | None = None
    #: Whether a result has the same bits in any memory and beside any other results.
    exact: bool = True
    #: How many products an element of output or gradient adds up; see `fusedops.testing.Case`.
    terms: int = 0
    gradient_terms: int = 0
    #: Whether derivatives exist, so that differences of the oracle are near them.
    smooth: bool = True
    #: Whether second derivatives are well conditioned.
    second: bool = True
    differentiable: bool = True
    #: The arrays that the call updates, as outputs of the oracle after the others.
    mutated: tuple[str, ...] = ()
    #: From `arrays` to allowances besides roundings, for "value" and for gradients by name.
    margin: Callable[[Mapping[str, Any]], Any] | None = None
    #: Further checks, called with (trial, place).
    own: Callable[..., None] | None = None
    #: Arguments that must be refused.
    bad: list[tuple[str, Any]] = field(default_factory=list)

    def tolerance(self, dtype: str, gradient: bool = False) -> float:
        """Return the project's tolerance, for arrays of a dtype, or the narrowest of many."""
        terms = max(self.terms, self.gradient_terms) if gradient else self.terms
        return Case("", self.op.primitive, tuple, terms).tolerance(dtype)


@dataclass(frozen=True)
class Family:
    """Descriptions of the calls of an op, and a function that makes problems of them."""

    name: str
    #: From whether calls run on a GPU or in its interpreter, where kernels are compiled for some
    #: sizes anew, to a dict of strategies by field, whose values JSON can hold.
    strategy: Callable[[bool], dict[str, Any]]
    build: Callable[[dict[str, Any]], Problem]
    #: The field that is a size, and how far it grows in leak loops.
    growing: tuple[str, int]
    #: Other fields in these loops, where the simplest description is too simple.
    steady: dict[str, Any] = field(default_factory=dict)
    #: From a size to the value of the field.
    sized: Callable[[int], Any] | None = None
