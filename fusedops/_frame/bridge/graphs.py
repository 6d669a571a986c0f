"""Primitives as torch's registered ops, ``torch.ops.fusedops.<primitive>``, which torch can trace.

A registered op takes tensors, numbers and names, so that packed arguments are taken apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from fusedops._frame import registry
from fusedops._frame.bridge.autograd import transformed
from fusedops._frame.bridge.evaluation import evaluation, into
from fusedops._frame.bridge.modes import has_tangent, watched
from fusedops._frame.check import reference
from fusedops._frame.packed import Packed
from fusedops._frame.primitive import Primitive
from fusedops._frame.torch_private import private


def _take_apart(primitive: Primitive, static: Sequence[Any]) -> list[Any]:
    """Return static arguments as values that a registered op's schema can hold."""
    flat: list[Any] = []
    for kind, value in zip(primitive.static.values(), static, strict=True):
        if not issubclass(kind, Packed):
            flat.append(value)
        elif value is None:
            flat += [[], [], False]
        else:
            flat += [*value.flat(), value.unread is not None]
    return flat


def _put_together(primitive: Primitive, flat: Sequence[Any]) -> tuple[Any, ...]:
    values = iter(flat)
    static: list[Any] = []
    for kind in primitive.static.values():
        value = next(values)
        if issubclass(kind, Packed):
            sizes, unread = next(values), next(values)
            if unread:
                options = dict(zip(kind._options, sizes, strict=True))
                value = kind.read(primitive.name, *value, in_graph=True, **options)
            else:
                value = kind.holding(value, sizes) if value else None
        static.append(value)
    return tuple(static)


_library = torch.library.Library("fusedops", "DEF")


class _Registered:
    """A primitive as a registered op: its schema, and what torch calls for the op."""

    def __init__(self, primitive: Primitive) -> None:
        self.primitive = primitive
        self.name = f"fusedops::{primitive.name}"
        #: The number of arrays and constants.
        self.given = len(primitive.arrays) + len(primitive.constants)
        _library.define(self.schema())
        _library.impl(primitive.name, self.evaluate, "CompositeExplicitAutograd")
        torch.library.register_fake(self.name, self.fake, lib=_library)
        self.operator = getattr(torch.ops.fusedops, primitive.name).default
        if not primitive.mutates:
            _library.impl(primitive.name, self.differentiate, "Autograd", with_keyset=True)

    def schema(self) -> str:
        """Return the op's signature, as torch writes signatures."""
        primitive = self.primitive
        arguments = [f"Tensor? {name}" for name in primitive.Arguments._fields[: self.given]]
        for at, name in enumerate(primitive.arrays):
            if name in primitive.mutates:
                arguments[at] = f"Tensor({'abcdefgh'[at]}!) {name}"
        for name, kind in primitive.static.items():
            if issubclass(kind, Packed):
                arguments += [f"Tensor[] {name}", f"SymInt[] {name}_sizes", f"bool {name}_unread"]
            else:
                arguments.append(f"{kind.__name__} {name}")
        arguments += ["bool[] wanted", "str backend"]
        returns = ", ".join(["Tensor"] * len(primitive.outputs))
        return f"{primitive.name}({', '.join(arguments)}) -> ({returns})"

    def call(self, a: Any, slots: Sequence[Any]) -> Any:
        """Return outputs where torch traces a call."""
        flat = _take_apart(self.primitive, a[self.given :])
        wanted = [slot is not None for slot in slots]
        outputs = self.operator(*a[: self.given], *flat, wanted, registry.asked() or "")
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # An empty tensor stands for an output that the call lacks.
        made = zip(outputs, self.primitive.describe(a), strict=True)
        found = [None if known is None else output for output, known in made]
        return into(self.primitive, slots, found)

    def record(self, args: Sequence[Any]) -> tuple[Any, list[Any], str | None]:
        """Return the arguments, the outputs wanted, and the backend asked for."""
        arrays, (*flat, wanted, backend) = args[: self.given], args[self.given :]
        a = self.primitive.Arguments._make((*arrays, *_put_together(self.primitive, flat)))
        return a, [want or None for want in wanted], backend or None

    def asking(self, backend: str | None) -> contextlib.AbstractContextManager[Any]:
        """Ask for the backend that a call names, and else leave what its caller asks for."""
        asked = backend and registry.forced(backend, self.primitive.name)
        return registry.asking(asked) if asked else contextlib.nullcontext()

    def evaluate(self, *args: Any) -> Any:
        self.refuse_tangents()
        a, slots, backend = self.record(args)
        if self.primitive.check is not None:
            self.primitive.check(a)
        with self.asking(backend):
            # A call of the primitive would come back here where a mode is set but switched off.
            run = self.primitive.plan(a, slots) or evaluation(self.primitive, a, slots)
            return _returned(a, slots, run(a, slots))

    def refuse_tangents(self) -> None:
        """Raise where torch doesn't show tangents, and would lose them."""
        if private().dual_level() >= 0 and private().has_forward_mode():
            raise NotImplementedError(
                f"torch.ops.{self.name} has no forward mode: it is called in a dual level, as by a "
                "compiled function of dual tensors; use torch.func.jvp in the compiled function"
            )

    def fake(self, *args: Any) -> Any:
        a, slots, _ = self.record(args)
        first = reference(a)
        made = [
            output and first.new_empty(output[0], dtype=output[1])
            for output in self.primitive.describe(a)
        ]
        return _returned(a, slots, made)

    def differentiate(self, keys: Any, *args: Any) -> Any:
        if not watched(args[: len(self.primitive.arrays)]):
            return self.operator.redispatch(keys & private().after_autograd, *args)
        a, slots, backend = self.record(args)
        if not has_tangent(a[: len(self.primitive.arrays)]):
            self.refuse_tangents()
        with self.asking(backend):
            return _returned(a, slots, transformed(self.primitive, a, slots))


def _returned(a: Any, slots: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Return outputs as a schema wants them: a single one bare, and an empty tensor for none."""
    made = [
        output if want and output is not None else reference(a).new_empty(0)
        for want, output in zip(slots, outputs, strict=True)
    ]
    return tuple(made) if len(made) > 1 else made[0]


#: The registered op of every primitive by name.
registered = {name: _Registered(primitive) for name, primitive in registry.primitives.items()}
