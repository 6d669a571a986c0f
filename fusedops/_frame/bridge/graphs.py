"""Graphs of torch.compile and torch.export, whose nodes are ops.

A graph holds tensors, numbers and names, so that packed arguments are taken apart. A primitive that
torch traces is a registered op, ``torch.ops.fusedops.<primitive>``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedops._frame import registry
from fusedops._frame.bridge.autograd import pull_back
from fusedops._frame.bridge.evaluation import described, evaluation
from fusedops._frame.check import reference, traced
from fusedops._frame.kinds import Plans, kind_of
from fusedops._frame.packed import Packed, packed
from fusedops._frame.primitive import Primitive, primitives

_PACKED = "fusedops.Packed"


def uncompiled(function: Any) -> Any:
    """Return a function that ends the graph of torch.compile where it is called."""
    return torch.compiler.disable(function)


def compiled(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call an op in code that torch.compile traces: as one node of the graph, where it can be."""
    if torch.compiler.is_dynamo_compiling() and _fits((args, options)):
        return _node(op.__name__, _apart(args), _apart(options))
    return uncompiled(op)(*args, **options)


def _fits(argument: Any) -> bool:
    """Return whether a graph can hold an argument: it can't hold NumPy arrays."""
    if isinstance(argument, dict):
        return _fits(list(argument.values()))
    if isinstance(argument, (list, tuple)):
        return all([_fits(value) for value in argument])
    kinds = (torch.Tensor, Packed, bool, int, float, str)
    return argument is None or isinstance(argument, kinds)


def _apart(argument: Any) -> Any:
    """Return an argument with every `Packed` taken apart into values that a graph can hold."""
    if isinstance(argument, dict):
        return {name: _apart(value) for name, value in argument.items()}
    if isinstance(argument, (list, tuple)):
        return [_apart(value) for value in argument]
    if isinstance(argument, Packed):
        return [_PACKED, type(argument).__name__, *argument.flat()]
    return argument


def _together(argument: Any) -> Any:
    if isinstance(argument, dict):
        return {name: _together(value) for name, value in argument.items()}
    if isinstance(argument, torch.SymFloat):
        # Floats are options, and constants of a graph.
        return float(argument)
    if not isinstance(argument, (list, tuple)):
        return argument
    if len(argument) == 4 and isinstance(argument[0], str) and argument[0] == _PACKED:
        return packed[argument[1]].from_tensors(*argument[2:])
    return [_together(value) for value in argument]


@torch.compiler.allow_in_graph
@torch.compiler.disable
def _node(name: str, args: Any, options: dict[str, Any]) -> Any:
    """Call an op, the only function of this library that torch.compile sees.

    The graph ends where an argument is bad, so that the call raises its own error outside of it.
    """
    try:
        return registry.ops[name](*_together(args), **_together(options))
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if not traced():
            raise
        raise NotImplementedError(str(error)) from error


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
                value = kind.from_tensors(value, sizes) if value else None
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
    return tuple([out if want else None for out, want in zip(outputs, wanted, strict=True)])


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
        asked = [
            cotangent if want and output is not None else None
            for cotangent, want, output in zip(cotangents, slots, made, strict=True)
        ]
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
