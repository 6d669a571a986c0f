"""Primitives as torch's registered ops, ``torch.ops.fusedops.<primitive>``, which torch can trace.

A registered op takes tensors, numbers and names, so that packed arguments are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fusedops._frame import registry
from fusedops._frame.bridge.autograd import pull_back
from fusedops._frame.bridge.batched import is_batch, row_by_row
from fusedops._frame.bridge.evaluation import described, evaluation
from fusedops._frame.check import reference
from fusedops._frame.kinds import Plans, kind_of
from fusedops._frame.packed import Packed
from fusedops._frame.primitive import Primitive, primitives


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


def call_registered(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Any:
    """Return outputs where torch traces a call."""
    given = len(primitive.arrays) + len(primitive.constants)
    if any(isinstance(array, torch.Tensor) and array.requires_grad for array in a[:given]):
        slots = primitive.with_saved(slots)
    wanted = [slot is not None for slot in slots]
    operator = getattr(torch.ops.fusedops, primitive.name)
    flat = _take_apart(primitive, a[given:])
    outputs = operator(*a[:given], *flat, wanted, registry.asked() or "")
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # An empty tensor stands for an output that isn't made.
    made = described(primitive, a)
    return tuple(
        [
            out if want and output is not None else None
            for out, want, output in zip(outputs, wanted, made, strict=True)
        ]
    )


_library = torch.library.Library("fusedops", "DEF")


def _register(primitive: Primitive) -> None:
    kinds = []
    for name, kind in primitive.static.items():
        is_packed = issubclass(kind, Packed)
        plain = [f"{kind.__name__} {name}"]
        taken_apart = [f"Tensor[] {name}", f"SymInt[] {name}_sizes", f"bool {name}_unread"]
        kinds += taken_apart if is_packed else plain
    given = len(primitive.arrays) + len(primitive.constants)
    arguments = [*(f"Tensor? {name}" for name in primitive.Arguments._fields[:given]), *kinds]
    for at, name in enumerate(primitive.arrays):
        if name in primitive.mutates:
            arguments[at] = f"Tensor({'abcdefgh'[at]}!) {name}"
    returns = ", ".join(["Tensor"] * len(primitive.outputs))
    qualified = f"fusedops::{primitive.name}"
    evaluations: Plans[Callable[[Any, Any], Any]] = Plans()
    _library.define(
        f"{primitive.name}({', '.join(arguments)}, bool[] wanted, str backend) -> ({returns})"
    )

    def returned(outputs: Sequence[torch.Tensor]) -> Any:
        """Return outputs as a schema wants them: a single one bare."""
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def record(args: Sequence[Any]) -> tuple[Any, list[Any], str]:
        """Return the arguments, the outputs wanted, and the backend asked for."""
        arrays, (*flat, wanted, backend) = args[:given], args[given:]
        a = primitive.Arguments._make((*arrays, *_put_together(primitive, flat)))
        return a, [want or None for want in wanted], backend

    def implementation(*args: Any) -> Any:
        # Torch doesn't show tangents here, and would lose them.
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
            raise NotImplementedError(
                f"torch.ops.{qualified} has no forward mode: it is called in a dual level, as by a "
                "compiled function of dual tensors; use torch.func.jvp in the compiled function"
            )
        a, slots, backend = record(args)
        asked = registry.forced(backend or None, primitive.name)
        kind = kind_of((asked, *slots, *a))
        evaluate = evaluations.get(kind)
        if evaluate is None:
            evaluate = evaluations.keep(kind, evaluation(primitive, a, slots, asked))
        outputs = evaluate(a, slots)
        return returned(
            [
                output if want and output is not None else reference(a).new_empty(0)
                for want, output in zip(slots, outputs, strict=True)
            ]
        )

    def fake(*args: Any) -> Any:
        a, slots, _ = record(args)
        first = reference(a)
        return returned(
            [
                first.new_empty(output[0], dtype=output[1])
                if want and output
                else first.new_empty(0)
                for want, output in zip(slots, described(primitive, a), strict=True)
            ]
        )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = primitive.Outputs._make(output if isinstance(output, tuple) else (output,))
        ctx.flat = inputs[given:]
        saved = [getattr(outputs, name) for name in primitive.saves]
        ctx.save_for_backward(*inputs[:given], *saved)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        count = len(primitive.arrays)
        a, slots, backend = record((*ctx.saved_tensors[:given], *ctx.flat))
        if tuple(slots) != primitive.with_saved(slots):
            raise RuntimeError(f"torch.ops.{qualified}: its gradient needs more outputs wanted")
        made = primitive.Outputs._make(described(primitive, a))
        asked = tuple(
            cotangent if want and output is not None else None
            for cotangent, want, output in zip(cotangents, slots, made, strict=True)
        )
        kept = dict(zip(primitive.saves, ctx.saved_tensors[given:], strict=True))
        # An empty tensor stands for an output that isn't made.
        y = primitive.Outputs._make(
            [
                kept.get(name) if output is not None else None
                for name, output in zip(primitive.outputs, made, strict=True)
            ]
        )
        wanted = [need or None for need in ctx.needs_input_grad[:count]]
        with registry.asking(backend or None):
            if any([is_batch(cotangent) for cotangent in asked]):
                gradients: Sequence[Any] = row_by_row(
                    lambda dy: pull_back(primitive, a, y, dy, wanted), asked
                )
            else:
                gradients = pull_back(primitive, a, y, asked, wanted)
        # Torch takes a list for a list of tensors, also an empty one, unless it has another value.
        nothing = [
            [None] * len(value)
            if isinstance(value, list) and all([isinstance(part, torch.Tensor) for part in value])
            else None
            for value in ctx.flat
        ]
        return (*gradients, *[None] * len(primitive.constants), *nothing)

    _library.impl(primitive.name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    if not primitive.mutates:
        torch.library.register_autograd(
            qualified, backward, setup_context=setup_context, lib=_library
        )


for _primitive in primitives().values():
    _register(_primitive)
