"""Bad arguments that constructors of packed arguments must refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

import fusedops

from .arrays import common
from .checks import JUNK, REFUSALS
from .problem import Family, Problem

# Good arguments, of which one at a time is replaced.
RIGHT: dict[str, dict[str, Any]] = {
    "Planes": {"plane_groups": [([[0, 1, 2]], [0.1])], "num_atoms": 3},
    "Edges": {"edge_index": [[0, 1], [1, 0]], "num_nodes": 2},
    "Sequences": {"cu_seqlens": [0, 2, 5], "num_tokens": 5},
    "ScatterPlan": {"wa": [[0, 4]], "wbwc": [[[0, 1]]], "map_size": 8},
    "Lattice": {"cell": np.diag([5.0, 6.0, 7.0]), "grid_shape": (2, 3, 4)},
}
CHOICES = [(kind, argument) for kind, given in RIGHT.items() for argument in given]
WRONG = (
    *JUNK,
    [],
    [[]],
    [[[0.5]]],
    [(0, 1)],
    [([[0, 1, 2]], ["a"])],
    [([[0, 1], [2]], [0.1])],
    np.array([0, 2**62]),
    np.full((2, 2), -(2**63)),
    np.full((3, 3), math.inf),
    np.full((3, 3), 1j),
    np.zeros((2, 0), np.int64),
    (2, 3, 10**30),
)


def strategy(compiled: bool) -> dict[str, Any]:
    return common() | {
        "dtype": st.just("float64"),
        "choice": st.integers(0, len(CHOICES) - 1),
        "wrong": st.integers(0, len(WRONG) - 1),
    }


def build(d: dict[str, Any]) -> Problem:
    kind, argument = CHOICES[d["choice"]]
    wrong = WRONG[d["wrong"]]

    def refused(trial: Any, place: Any) -> None:
        trial.op = kind
        given = {**RIGHT[kind], argument: wrong}
        label = type(wrong).__name__ if isinstance(wrong, type) else repr(wrong)
        check = f"error for {argument} = {label[:40]}"
        trial.ledger.calls[trial.op, str(place)] += 1
        try:
            getattr(fusedops, kind)(**given)
        except REFUSALS as error:
            # Where two arguments disagree, the error may name either.
            named = str(error).startswith(f"{kind}: ") and any(name in str(error) for name in given)
            trial.expect(place, check, named, f"{type(error).__name__}: {error}")
        except Exception as error:
            trial.expect(place, check, False, f"{type(error).__name__}: {error}")
        else:
            trial.expect(place, check, True)

    return Problem(op=None, arrays={}, own=refused, differentiable=False)


FAMILY = Family("packed", strategy, build, backends=("numpy",))
