"""The kind of a call: all that its plan may depend on.

A plan is worked out once for a kind and kept. The kind of an array is its dtype, shape and strides,
and whether it is aligned and writable; the kind of a packed argument is its class, device and
sizes. A guard compares the kinds of tensors, and the modes that torch is in, in one step. No kept
kind holds an array.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from fusedops._frame.hook import bridge
from fusedops._frame.packed import Packed

PlanT = TypeVar("PlanT")

#: Types of arguments that a kind holds as they are.
CONSTANTS = frozenset((type(None), bool, int, float, str))

#: Types of tensors that are nothing but tensors; the bridge adds them.
TENSORS: set[type] = set()

#: The kind of a call: a key, and the tensors of the call for guards to compare.
Kind = tuple[tuple[Any, ...], list[Any]]


def kind_of(values: Iterable[Any]) -> Kind | None:
    """Return the kind of arguments; None where an argument has no kind."""
    key: list[Any] = []
    tensors: list[Any] = []
    for value in values:
        of = type(value)
        if value is None or value is True or of is str:
            key.append(value)
        elif of in TENSORS:
            if not tensors:
                try:
                    key.append(value.shape)
                except RuntimeError:
                    # A nested tensor has no shape.
                    return None
            key.append(of)
            tensors.append(value)
        elif of is np.ndarray:
            flags = value.flags
            # Behaved arrays are aligned and writable; they are usual, and one question is quicker.
            fit = flags.behaved or (flags.aligned, flags.writeable)
            key += (value.dtype, value.shape, value.strides, fit)
        elif of in CONSTANTS:
            # Numbers of different types are equal.
            key += (of, value)
        elif isinstance(value, Packed):
            key.append(value.kind)
        else:
            return None
    return tuple(key), tensors


class Plans(Generic[PlanT]):
    """Plans by kind; beyond `limit` keys, the oldest are forgotten."""

    limit = 512
    #: Plans that one key may have, for tensors of different layouts and modes.
    most = 16

    def __init__(self) -> None:
        # The plans of a key, each with a guard that lets tensors of its kind pass.
        self._plans: dict[Any, tuple[tuple[Callable[[list[Any]], bool] | None, PlanT], ...]] = {}
        self._lock = threading.Lock()

    def get(self, kind: Kind | None) -> PlanT | None:
        """Return the plan of a kind, if there is one."""
        if kind is None:
            return None
        key, tensors = kind
        for passes, plan in self._plans.get(key, ()):
            if passes is None or passes(tensors):
                return plan
        return None

    def keep(self, kind: Kind | None, plan: PlanT) -> PlanT:
        """Return a plan, and keep it if its call has a kind."""
        if kind is None:
            return plan
        key, tensors = kind
        with self._lock:
            while len(self._plans) >= self.limit:
                del self._plans[next(iter(self._plans))]
            found = bridge().modes.guard(tensors) if tensors else None, plan
            self._plans[key] = found, *self._plans.get(key, ())[: self.most - 1]
        return plan


#: An argument of a primitive that every call makes anew, by a function of arguments of the op.
Made = functools.partial


def are_one(values: Sequence[Any]) -> bool:
    """Return whether an object is given as two arguments, so that it stands for neither alone."""
    arrays = [id(value) for value in values if type(value) not in CONSTANTS]
    return len(set(arrays)) < len(arrays)


def arranged(
    parts: Sequence[Any], values: tuple[Any, ...]
) -> Callable[[tuple[Any, ...]], Sequence[Any]] | None:
    """Return a function that makes `parts` anew from other values of the same kinds.

    A part is one of the values, which plans tell apart as objects, a constant, or `Made` of these.
    """
    if are_one(values):
        return None
    place_of = {id(value): at for at, value in enumerate(values)}
    constants: tuple[Any, ...] = ()
    places: list[int | None] = []
    made = []
    for at, part in enumerate(parts):
        if isinstance(part, Made):
            of = arranged(part.args, values)
            if of is None:
                return None
            made.append((at, part.func, of))
            places.append(None)
        elif type(part) in CONSTANTS:
            places.append(len(values) + len(constants))
            constants += (part,)
        elif id(part) in place_of:
            places.append(place_of[id(part)])
        else:
            return None
    pick = picker(places)
    if not made:
        return (lambda values: pick(values + constants)) if constants else pick

    def make(values: tuple[Any, ...]) -> list[Any]:
        found = list(pick(values + constants))
        for at, function, of in made:
            found[at] = function(*of(values))
        return found

    return make


def picker(places: Sequence[int | None]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks values by their places, with None for no place."""
    if not any([at is not None for at in places]):
        nothing = (None,) * len(places)
        return lambda values: nothing
    if len(places) == 1 and places[0] is not None:
        # A slice gives its one value in a tuple, as several places do.
        return operator.itemgetter(slice(places[0], places[0] + 1))
    if None not in places:
        return operator.itemgetter(*places)
    pick = operator.itemgetter(*[-1 if at is None else at for at in places])
    return lambda values: pick((*values, None))
