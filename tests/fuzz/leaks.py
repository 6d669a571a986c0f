"""Leak loops: many calls of every op with sizes that change, and memory that must not grow."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np

import fusedops
from fusedops._frame import kinds

from . import campaign
from .arrays import LAYOUTS, TENSOR_LAYOUTS
from .checks import Trial, _several
from .ledger import Ledger, Place
from .problem import Family

ROUNDS = 5
#: Different calls, at most, of which a loop repeats the same ones in every round.
KINDS = 100
#: Bytes that all rounds but the first may take. A leak takes memory in every round;
#: an allocator that reorganizes its heap takes it in one.
BOUND = 1 << 19


def resident() -> int:
    """Return the resident memory of this process in bytes, after the allocator freed its own."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def plain(family: Family) -> dict[str, Any]:
    """Return the simplest description, with the fields that leak loops hold steady."""
    # Hypothesis draws the simplest example first.
    settings = hypothesis.settings(
        database=None, max_examples=1, phases=[hypothesis.Phase.generate]
    )
    simplest = hypothesis.find(campaign.strategy(family, False), lambda _: True, settings=settings)
    return simplest | family.steady


def grown(family: Family, place: Place, calls: int, ledger: Ledger) -> list[int]:
    """Return by how much memory grew in every round but the first."""
    base = plain(family)
    field, limit = family.growing
    trials: list[Trial] = []
    for at, size in enumerate(np.random.default_rng(0).permutation(limit)[:KINDS] + 1):
        description = base | {
            field: family.sized(int(size)) if family.sized else int(size),
            "layout": LAYOUTS[at % 3],
            "tensor_layout": TENSOR_LAYOUTS[at % 3],
            "packed": bool(at % 3),
        }
        trials.append(Trial(family.build(description), description, ledger, [place]))
    memory = []
    # The collector then visits only objects made from here on.
    gc.freeze()
    for number, trial in zip(range(calls), itertools.cycle(trials)):
        if number % (calls // ROUNDS) == 0:
            memory.append(resident())
        _call(trial, place)
    memory.append(resident())
    gc.unfreeze()
    return np.diff(memory)[1:].tolist()


def _call(trial: Trial, place: Place) -> None:
    """Make one call and its gradient, and ignore their values."""
    p = trial.problem
    kwargs = {
        **trial.made(place, p.arrays),
        **p.options,
        **trial.constants(place),
        "backend": place.backend,
    }
    trial.ledger.calls[trial.op, str(place)] += 1 + p.differentiable
    if not p.differentiable:
        p.op(**kwargs)
    elif place.framework == "numpy":
        outputs, pullback = p.op.vjp(**kwargs, wrt=list(p.arrays))
        pullback(*map(np.ones_like, _several(outputs)))
    else:
        torch = sys.modules["torch"]
        needed = [kwargs[name].detach().requires_grad_() for name in p.arrays]
        outputs = _several(p.op(**{**kwargs, **dict(zip(p.arrays, needed, strict=True))}))
        torch.autograd.grad([o.sum() for o in outputs], needed, materialize_grads=True)


def leaks(names: list[str], backends: list[str], calls: int, say: Callable[[str], None]) -> Ledger:
    """Run the loops of ops on their backends, on one thread."""
    ledger = Ledger()
    fusedops.set_num_threads(1)
    # Changing sizes fill the caches of plans for a long time, which is no leak.
    limit, kinds.Plans.limit = kinds.Plans.limit, 8
    for name in names:
        family = campaign.FAMILIES[name]
        for place in campaign.places(backends):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                growth = grown(family, place, calls, ledger)
            say(f"{name} on {place}: {' '.join(f'{n / 1024:+.0f}' for n in growth)} KiB")
            ledger.checks[name, str(place)] += 1
            # A leak takes its share in every round.
            if min(growth) > BOUND / (ROUNDS - 1):
                trial = Trial(family.build(plain(family)), plain(family), ledger, [place])
                trial.found(place, "leak", f"{growth} bytes, {calls // ROUNDS} calls each")
    fusedops.set_num_threads(None)
    kinds.Plans.limit = limit
    return ledger
