"""Derivatives of primitives on tensors: autograd's, of every order, and torch.func's."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedops._frame import registry
from fusedops._frame.bridge.batched import is_batch, row_by_row
from fusedops._frame.bridge.evaluation import as_written, described, evaluation
from fusedops._frame.bridge.modes import pushed_forward, transforms
from fusedops._frame.check import reference
from fusedops._frame.kinds import CONSTANTS, Kind, Plans, are_one
from fusedops._frame.packed import Packed
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.torch_private import private


class Step:
    """The parts that all differentiable calls of a kind share.

    `present` has the places of the arrays that are given, since autograd would take time for absent
    ones too. `holding` has the places of other arguments that hold tensors, and `bare` the places,
    among the arrays that are given, of those whose shape alone the backward needs. A `large` call
    asks autograd which of its gradients a backward pass wants.
    """

    def __init__(
        self,
        primitive: Primitive,
        evaluate: Callable[[Any, Any], Any] | None,
        asked: str | None,
        slots: tuple[Any, ...],
        present: tuple[int, ...],
        others: tuple[Any, ...],
        bare: tuple[int, ...] = (),
        large: bool = False,
    ) -> None:
        self.bare, self.large = bare, large
        self.primitive, self.evaluate, self.asked = primitive, evaluate, asked
        self.slots, count = slots, len(present)
        self.kept = [primitive.outputs.index(name) for name in primitive.saves]
        self.holding = [
            at for at, value in enumerate(others) if isinstance(value, (Packed, torch.Tensor))
        ]
        #: From values of the arrays that are given to values of all arrays.
        self.spread = _picker(
            [present.index(at) if at in present else None for at in range(len(primitive.arrays))]
        )
        #: From saved values to the outputs that are kept.
        self.outputs = _picker(
            [
                count + self.kept.index(at) if at in self.kept else None
                for at in range(len(primitive.outputs))
            ]
        )
        #: From arguments to the arrays that are given, and to all other arguments.
        self.given = _picker(present)
        self.others = slice(len(primitive.arrays), None)
        #: The number of saved tensors that aren't borrowed.
        self.own = count + len(self.kept)
        #: Plans of backward passes that are one call of a primitive.
        self.calls: Plans[Callable[[tuple[Any, ...]], tuple[Any, ...]]] = Plans()

    def stored(self, arrays: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
        """Return the arrays to save: one number stands for an array whose shape alone is needed."""
        if not self.bare:
            return arrays
        kept = list(arrays)
        for at in self.bare:
            kept[at] = arrays[at].new_empty(()).expand(arrays[at].shape)
        return kept

    def zeroed(self, saved: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return saved tensors with zeros for the numbers that `stored` left unwritten.

        Derivatives of higher order multiply them by zero, and they may be NaN.
        """
        found = list(saved)
        for at in self.bare:
            found[at] = saved[at].new_zeros(()).expand(saved[at].shape)
        return found

    def beside(self, others: tuple[Any, ...], y: Any) -> list[torch.Tensor]:
        """Return the tensors to save beside arrays.

        These are the outputs that are kept, and the caller's tensors that a backward pass reads
        from other arguments, so that autograd sees writes to them.
        """
        found = [y[at] for at in self.kept]
        for at in self.holding:
            value = others[at]
            found += value.borrowed if isinstance(value, Packed) else [value]
        return found

    def pull_back(
        self, kind: Kind | None, needed: Sequence[bool], dy: Any, others: Any, saved: Any
    ) -> Sequence[Any]:
        """Return cotangents of all arrays; keep the call that makes them, if it is one call."""
        if any([is_batch(cotangent) for cotangent in dy]):
            return row_by_row(lambda dy: self.pull_back(None, needed, dy, others, saved), dy)
        primitive = self.primitive
        a = primitive.Arguments._make((*self.spread(saved), *others))
        y = primitive.Outputs._make(self.outputs(saved))
        wanted = self.spread([need or None for need in needed])

        def keep(call: Call) -> None:
            unkept = kind is None or transforms()
            again = None if unkept else _again(call, (*dy, *others, *saved))
            if again is not None:
                self.calls.keep(kind, again)

        same = self.asked == registry.forced(None)
        with contextlib.nullcontext() if same else registry.asking(self.asked):
            return pull_back(primitive, a, y, dy, wanted, keep)


def _picker(places: Sequence[int | None]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
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


class _Differentiable(torch.autograd.Function):
    """Any primitive, which computes the outputs that its pullback needs beside the wanted ones."""

    @staticmethod
    def forward(ctx: Any, step: Step, a: Any, *arrays: Any) -> tuple[Any, ...]:
        y = step.evaluate(a, step.slots)  # type: ignore[misc]
        ctx.step, ctx.others = step, (others := a[step.others])
        ctx.save_for_backward(*step.stored(arrays), *step.beside(others, y))
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor | None) -> tuple[Any, ...]:
        step, needed, others = ctx.step, ctx.needs_input_grad, ctx.others
        if step.large:
            needed = _needed_now(needed, ctx.next_functions)
        # Borrowed tensors are saved only for autograd to see writes to them.
        saved = ctx.saved_tensors[: step.own]
        if step.bare and torch.is_grad_enabled():
            saved = step.zeroed(saved)
        tensors = [value for value in (*dy, *saved) if value is not None]
        kind = (needed, *[cotangent is None for cotangent in dy]), tensors
        call = step.calls.get(kind)
        if call is None:
            found = step.pull_back(kind, needed[2:], dy, others, saved)
        else:
            found = call((*dy, *others, *saved))
        return None, None, *step.given(found)


# In calls with this many numbers a needless gradient takes longer than to ask autograd.
_LARGE = 1 << 20


def _needed_now(needed: tuple[bool, ...], nodes: Sequence[Any]) -> tuple[bool, ...]:
    """Return which gradients this backward pass wants, of those that some pass may want.

    Forces are gradients by positions alone, though the weights require theirs too.
    """
    wanted = [node is not None and _runs(node) for node, _ in nodes]
    return *needed[: -len(wanted)], *wanted


def _runs(node: Any) -> bool:
    """Return whether the backward pass that runs goes on to a node."""
    try:
        return bool(private().will_run(node))
    except RuntimeError:
        # Only of a leaf that torch.autograd.grad wants torch can't say so.
        return True


def _again(call: Call, values: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any] | None:
    """Return a function that makes the same call of other values; None where none can."""
    place_of = {id(value): at for at, value in enumerate(values)}
    constants = [part for part in call.a if type(part) in CONSTANTS]
    numbers = iter(range(len(values), len(values) + len(constants)))
    places = [
        next(numbers) if type(part) in CONSTANTS else place_of.get(id(part)) for part in call.a
    ]
    before, after = (
        [None if value is None else place_of.get(id(value), -1) for value in beside]
        for beside in (call.before, call.after)
    )
    if None in places or -1 in (*before, *after) or are_one(values):
        return None
    plan = call.primitive.plan(call.a, call.slots)
    if plan is None:
        return None
    pick, record, slots = _picker(places), call.primitive.Arguments._make, call.slots
    first, last = _picker(before), _picker(after)
    return lambda values: (
        first(values) + plan(record(pick((*values, *constants))), slots) + last(values)
    )


# Function.apply without its check for torch.func's transforms, which `plan` has made already.
_apply = super(torch.autograd.Function, _Differentiable).apply


def recorded(
    primitive: Primitive, a: Any, slots: Sequence[Any], asked: str | None
) -> Callable[[Any, Any], Any]:
    """Return a plan that evaluates a primitive on tensors of these kinds, and tells autograd."""
    count = len(primitive.arrays)
    saved = primitive.with_saved(slots)
    with torch.no_grad():
        evaluate = evaluation(primitive, a, saved, asked)
    present = tuple([at for at, array in enumerate(a[:count]) if array is not None])
    names = [primitive.arrays[at] for at in present]
    differ = {name for name in names if getattr(a, name).requires_grad}
    bare = tuple(
        [k for k, name in enumerate(names) if not differ.intersection(primitive.readers(name))]
    )
    large = len(differ) > 1 and sum([getattr(a, name).numel() for name in names]) >= _LARGE
    step = Step(primitive, evaluate, asked, saved, present, a[count:], bare, large)
    given, record = step.given, primitive.Outputs._make

    def run(a: Any, slots: Sequence[Any]) -> Any:
        return record(_apply(step, a, *given(a)))

    return run


def pull_back(
    primitive: Primitive,
    a: Any,
    y: Any,
    dy: Sequence[torch.Tensor | None],
    wanted: Sequence[Any],
    seen: Callable[[Call], None] | None = None,
) -> Sequence[Any]:
    """Return a cotangent for every array that wants one, from the outputs `y` that are kept."""
    if primitive.pullback is not None:
        found = primitive.pulled_back(a, y, dy, wanted, seen)
        if found is not NotImplemented:
            return found
    if not any([cotangent is not None for cotangent in dy]):
        return [None] * len(wanted)
    # The arrays of a transform that has ended no longer require grad.
    ended = [want and not array.requires_grad for array, want in zip(a, wanted, strict=False)]
    if any(ended) or private().transforming():
        return _transform_formula(primitive, a, dy, wanted)
    return _differentiate_formula(primitive, a, dy)


def _differentiate_formula(
    primitive: Primitive, a: Any, dy: Sequence[torch.Tensor | None]
) -> tuple[Any, ...]:
    """Pull back through the formula, for orders of derivative that no kernel has."""
    count = len(primitive.arrays)
    with torch.enable_grad(), as_written(reference(a)):
        # Views, because a cotangent may depend on the arrays: autograd follows that path itself.
        differentiated = [array is not None and array.requires_grad for array in a[:count]]
        arrays = [
            array.view_as(array) if by else array
            for array, by in zip(a, differentiated, strict=False)
        ]
        needed = [array for array, by in zip(arrays, differentiated, strict=True) if by]
        y = primitive.formula(primitive.Arguments._make((*arrays, *a[count:])))
    # An output may depend on no array that is differentiated by.
    used = [
        (output, cotangent)
        for output, cotangent in zip(y, dy, strict=True)
        if cotangent is not None and output.requires_grad
    ]
    if not used:
        return (None,) * count
    gradients = iter(
        torch.autograd.grad(
            [output for output, _ in used],
            needed,
            [cotangent for _, cotangent in used],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return tuple(next(gradients) if by else None for by in differentiated)


class _Transformed(_Differentiable):
    """Any primitive under torch.func, whose protocol would cost a plain call several µs."""

    @staticmethod
    def forward(  # type: ignore[override]
        step: Step, others: tuple[Any, ...], *arrays: Any
    ) -> tuple[Any, ...]:
        return tuple(step.primitive(*arrays, *others, out=step.slots))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.step, ctx.others, *arrays = inputs
        ctx.save_for_backward(*arrays, *[output[at] for at in ctx.step.kept])
        ctx.save_for_forward(*arrays, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor | None) -> tuple[Any, ...]:
        # The pullback of torch.func.vjp runs after its transform, whose wrappers have no memory.
        saved, others = (
            tuple([_alive(value) if isinstance(value, torch.Tensor) else value for value in some])
            for some in (ctx.saved_tensors, ctx.others)
        )
        found = ctx.step.pull_back(None, ctx.needs_input_grad[2:], dy, others, saved)
        return None, None, *ctx.step.given(found)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor | None, ...]:
        """Return tangents of the outputs, by the transpose of the pullback, which is linear."""
        step, others = ctx.step, ctx.others
        along = {at: tangent for at, tangent in enumerate(tangents[2:]) if tangent is not None}
        count = len(step.primitive.arrays)

        def pull_back(dy: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            given = [dy.get(at) for at in range(len(y))]
            dx = step.pull_back(None, [at in along for at in range(count)], given, others, saved)
            return {
                at: torch.zeros_like(tangent) if dx[at] is None else dx[at]
                for at, tangent in along.items()
            }

        with pushed_forward(ctx.saved_for_forward) as values:
            arrays, y = values[:count], values[count:]
            saved = *arrays, *[y[at] for at in step.kept]
            # The transpose is the same at every cotangent.
            dy = {at: torch.zeros_like(output) for at, output in enumerate(y) if output is not None}
            (found,) = torch.func.vjp(pull_back, dy)[1](along)
        return tuple([found.get(at) for at in range(len(y))])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], step: Step, others: tuple[Any, ...], *arrays: Any
    ) -> Any:
        dims = in_dims[2:]
        rows = [
            _Transformed.apply(
                step,
                others,
                *(
                    array if dim is None else array.select(dim, b)
                    for array, dim in zip(arrays, dims, strict=True)
                ),
            )
            for b in range(info.batch_size)
        ]
        if not rows:
            return _Transformed._of_no_rows(dims, step.primitive, others, arrays)
        stacked = tuple(
            None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)
        )
        return stacked, tuple(None if column is None else 0 for column in stacked)

    @staticmethod
    def _of_no_rows(
        in_dims: tuple[Any, ...], primitive: Primitive, others: tuple[Any, ...], arrays: Any
    ) -> Any:
        """Return the outputs of a batch of no arrays."""
        row = [
            array if dim is None else array.new_empty([*array.shape[:dim], *array.shape[dim + 1 :]])
            for array, dim in zip(arrays, in_dims, strict=True)
        ]
        outputs = tuple(
            None
            if output is None
            else reference(arrays).new_empty((0, *output[0]), dtype=output[1])
            for output in described(primitive, primitive.Arguments._make((*row, *others)))
        )
        return outputs, tuple(None if output is None else 0 for output in outputs)


def _alive(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the wrappers of transforms that have ended."""
    while (inner := private().alive(tensor)) is not tensor:
        tensor = inner
    return tensor


def transformed(primitive: Primitive, a: Any, slots: Sequence[Any]) -> tuple[Any, ...]:
    """Return outputs where torch.func transforms a call."""
    if primitive.mutates:
        raise RuntimeError(primitive.no_gradient(primitive.name))
    count = len(primitive.arrays)
    wanted = tuple([slot if slot is None else True for slot in slots])
    slots, asked = primitive.with_saved(wanted), registry.forced(None)
    step = Step(primitive, None, asked, slots, tuple(range(count)), a[count:])
    return _Transformed.apply(step, a[count:], *a[:count])


def _transform_formula(
    primitive: Primitive, a: Any, dy: Sequence[torch.Tensor | None], needed: Sequence[bool]
) -> tuple[Any, ...]:
    """Pull back through the formula by torch.func, for other transforms to go through."""
    asked = [cotangent is not None for cotangent in dy]

    def formula(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by = iter(values)
        arrays = [next(by) if need else array for array, need in zip(a, needed, strict=False)]
        y = primitive.formula(primitive.Arguments._make((*arrays, *a[len(needed) :])))
        return tuple([output for output, ask in zip(y, asked, strict=True) if ask])

    by = [array for array, need in zip(a, needed, strict=False) if need]
    with as_written(reference(a)):
        pull_back = torch.func.vjp(formula, *by)[1]
        gradients = iter(pull_back(tuple([c for c in dy if c is not None])))
    return tuple(next(gradients) if need else None for need in needed)
