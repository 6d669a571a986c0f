"""Calls that an op's strategy builds from descriptions, with everything known about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusedops.testing import Case


@dataclass
class Problem:
    """A call of an op.

    Attributes
    ----------
    op : callable
        Public.
    arrays : dict
        Arrays with gradients, float64, in the gradients' order; absent arrays are left out.
    constants : dict
        Other arrays, or lists and tuples of them. Floats among them are exact in float32.
    options : dict
        The other arguments.
    oracle : callable, optional
        From `arrays` to the outputs in float64, by another method than the reference's.
    pack : callable, optional
        From `constants` to the same as packed arguments.
    summed : bool
        Whether errors are relative to results of the arrays' magnitudes, too.
    bounded : tuple of str
        The arrays whose numbers stay as they are beside magnitudes.
    natural : float
        The least size that errors are relative to, for sums which may cancel to nothing.
    condition : callable, optional
        From `arrays` to a factor of errors, squared in gradients.
    exact : bool
        Whether a result has the same bits in any memory and beside any other results.
    terms, gradient_terms : int
        How many products an element of output or gradient adds up; see `fusedops.testing.Case`.
    smooth : bool
        Whether derivatives exist, so that differences of the oracle are near them.
    second : bool
        Whether second derivatives are well conditioned.
    differentiable : bool
        Whether there is a gradient at all.
    mutated : tuple of str
        The arrays that the call updates, as outputs of the oracle after the others.
    margin : callable, optional
        From `arrays` to allowances besides roundings, for "value" and for gradients by name.
    own : callable, optional
        Further checks, called with (trial, place).
    bad : list of (str, value)
        Arguments that must be refused.
    """

    op: Any
    arrays: dict[str, np.ndarray]
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    oracle: Callable[..., Any] | None = None
    pack: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    natural: float = 0.0
    summed: bool = False
    bounded: tuple[str, ...] = ()
    condition: Callable[[Mapping[str, Any]], float] | None = None
    exact: bool = True
    terms: int = 0
    gradient_terms: int = 0
    smooth: bool = True
    second: bool = True
    differentiable: bool = True
    mutated: tuple[str, ...] = ()
    margin: Callable[[Mapping[str, Any]], Any] | None = None
    own: Callable[..., None] | None = None
    bad: list[tuple[str, Any]] = field(default_factory=list)

    def tolerance(self, dtype: str, gradient: bool = False) -> float:
        """Return the project's tolerance, for arrays of a dtype, or the narrowest of many."""
        terms = max(self.terms, self.gradient_terms) if gradient else self.terms
        return Case("", self.op.primitive, tuple, terms).tolerance(dtype)


@dataclass(frozen=True)
class Family:
    """Descriptions of the calls of an op, and a function that makes problems of them.

    Attributes
    ----------
    name : str
        The op's name.
    strategy : callable
        From whether calls run on a GPU or in its interpreter, where kernels are compiled for
        some sizes anew, to a dict of strategies by field, whose values JSON can hold.
    build : callable
        From a description to a Problem.
    growing : (str, int)
        The field that is a size, and how far it grows in leak loops.
    steady : dict
        Other fields in these loops, where the simplest description is too simple.
    sized : callable, optional
        From a size to the value of the field.
    """

    name: str
    strategy: Callable[[bool], dict[str, Any]]
    build: Callable[[dict[str, Any]], Problem]
    growing: tuple[str, int]
    steady: dict[str, Any] = field(default_factory=dict)
    sized: Callable[[int], Any] | None = None
