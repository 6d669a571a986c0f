"""The kind of a call: all that its plan may depend on.

A plan is worked out once for a kind and kept. The kind of an array is its dtype, shape, strides and
alignment; that of a packed argument is its class, device and sizes; and of tensors it holds the
modes that torch is in. No kind holds an array.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import numpy as np

from fusedops._frame.check import is_tensor
from fusedops._frame.packed import Packed, bridge

PlanT = TypeVar("PlanT")

#: Types of arguments that a kind holds as they are.
CONSTANTS = frozenset((type(None), bool, int, float, str))


class Plans(Generic[PlanT]):
    """Plans by kind; of more than `limit`, those made first are forgotten."""

    limit = 512

    def __init__(self) -> None:
        self._plans: dict[Any, PlanT] = {}
        self._lock = threading.Lock()
        self.get = self._plans.get
        _all.append(self)

    def keep(self, kind: Any, plan: PlanT) -> None:
        """Keep a plan; of two threads that make one at once, either's serves."""
        with self._lock:
            while len(self._plans) >= self.limit:
                del self._plans[next(iter(self._plans))]
            self._plans[kind] = plan

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._plans.clear()


_all: list[Plans[Any]] = []


def forget_plans() -> None:
    """Forget every plan, for one who changes what plans are made of, such as a kernel."""
    for plans in _all:
        plans.clear()


def kind_of(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return the kind of arguments, for a key; None where there is an argument without one."""
    kind: list[Any] = []
    torch_bridge: Any = None
    for value in values:
        of = type(value)
        if of is np.ndarray:
            kind += (value.dtype, value.shape, value.strides, value.flags.aligned)
        elif of in CONSTANTS:
            # Numbers of different types are equal.
            kind += (of, value)
        elif isinstance(value, Packed):
            kind.append(value.kind)
        else:
            if torch_bridge is None:
                if not is_tensor(value):
                    return None
                torch_bridge = bridge()
                modes = torch_bridge.modes()
                if modes is None:
                    return None
                kind += modes
            if of not in torch_bridge.PLAIN:
                return None
            try:
                address = value.data_ptr()
                if not address or value.is_neg():
                    return None
                kind += (value.dtype, value.shape, value.stride(), value.device)
            except RuntimeError:
                # It has no memory of its own.
                return None
            kind += (address & 15, value.requires_grad)
    return tuple(kind)
