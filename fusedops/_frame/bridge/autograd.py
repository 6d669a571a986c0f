"""Derivatives of primitives on tensors: autograd's, of every order, and torch.func's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedops._frame import registry
from fusedops._frame.bridge.evaluation import as_written, evaluation, into
from fusedops._frame.bridge.modes import pushed_forward, transforms
from fusedops._frame.check import reference
from fusedops._frame.kinds import Kind, Plans, arranged, picker
from fusedops._frame.packed import Packed
from fusedops._frame.primitive import Call, Primitive
from fusedops._frame.torch_private import private


class Step:
    """The parts that all differentiable calls of a kind share.

    Autograd takes only the arrays that are `given`, since it would take time for absent ones too.
    """

    #: The places among these arrays of those whose shape alone the backward needs.
    bare: Sequence[int] = ()
    #: Whether to ask autograd which of the gradients a backward pass wants.
    large = False

    def __init__(
        self,
        primitive: Primitive,
        a: Any,
        slots: tuple[Any, ...],
        evaluate: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.primitive, self.slots, self.evaluate = primitive, slots, evaluate
        self.asked = registry.forced(None)
        count = len(primitive.arrays)
        present = [at for at in range(count) if a[at] is not None]
        self.kept = [primitive.outputs.index(name) for name in primitive.saves]
        #: From arguments, or cotangents of all arrays, to those of the arrays given, and back.
        self.given = picker(present)
        self.spread = picker([present.index(at) if at in present else None for at in range(count)])
        self.others = slice(count, None)
        #: The number of saved tensors that aren't borrowed.
        self.own = len(present) + len(self.kept)
        self.holding = [
            at for at, b in enumerate(a[count:]) if isinstance(b, (Packed, torch.Tensor))
        ]
        #: Plans of backward passes that are one call of a primitive.
        self.calls: Plans[Callable[[tuple[Any, ...]], tuple[Any, ...]]] = Plans()

    def numbered(self, tensors: Sequence[torch.Tensor], make: str) -> Sequence[torch.Tensor]:
        """Return tensors, with one number by `make` for each whose shape alone is needed.

        Only derivatives of higher order read it, and multiply it by zero.
        """
        if not self.bare:
            return tensors
        found = list(tensors)
        for at in self.bare:
            found[at] = getattr(tensors[at], make)(()).expand(tensors[at].shape)
        return found

    def beside(self, others: tuple[Any, ...], y: Any) -> list[torch.Tensor]:
        """Return the tensors to save beside arrays: outputs, and tensors of other arguments.

        Autograd sees writes to these, which are the caller's.
        """
        found = [y[at] for at in self.kept]
        for at in self.holding:
            value = others[at]
            found += value.borrowed if isinstance(value, Packed) else [value]
        return found

    def pull_back(
        self, kind: Kind | None, needed: Sequence[bool], dy: Any, others: Any, saved: Any
    ) -> Sequence[Any]:
        """Return cotangents of the arrays given; keep the call that makes them, if it is one."""
        primitive = self.primitive
        if self.evaluate is None:
            # torch.func.vjp pulls back after its transform, whose wrappers have no memory.
            saved, others = (tuple(map(_alive, values)) for values in (saved, others))
        a = primitive.Arguments._make((*self.spread(saved), *others))
        kept = dict(zip(primitive.saves, saved[self.own - len(self.kept) :], strict=True))
        y = primitive.Outputs._make([kept.get(name) for name in primitive.outputs])
        wanted = self.spread([need or None for need in needed])

        def keep(call: Call) -> None:
            unkept = self.evaluate is None or transforms()
            again = None if unkept else _again(call, (*dy, *others, *saved))
            if again is not None:
                self.calls.keep(kind, again)

        same = self.asked == registry.forced(None)
        with contextlib.nullcontext() if same else registry.asking(self.asked):
            return self.given(pulled_back(primitive, a, y, dy, wanted, keep))


class _Differentiable(torch.autograd.Function):
    """Any primitive, which computes the outputs that its pullback needs beside the wanted ones."""

    @staticmethod
    def forward(ctx: Any, step: Step, a: Any, *arrays: Any) -> tuple[Any, ...]:
        y = step.evaluate(a, step.slots)  # type: ignore[misc]
        ctx.step, ctx.others = step, (others := a[step.others])
        stored = step.numbered(arrays, "new_empty")
        ctx.save_for_backward(*stored, *step.beside(others, y))
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
            saved = step.numbered(saved, "new_zeros")
        tensors = [value for value in (*dy, *saved) if value is not None]
        kind = (needed, *[cotangent is None for cotangent in dy]), tensors
        call = step.calls.get(kind)
        if call is None:
            return None, None, *step.pull_back(kind, needed[2:], dy, others, saved)
        return None, None, *step.given(call((*dy, *others, *saved)))


# In calls with this many numbers a needless gradient takes longer than to ask autograd.
_LARGE = 1 << 20


def _needed_now(needed: tuple[bool, ...], nodes: Sequence[Any]) -> tuple[bool, ...]:
    """Return which gradients this backward pass wants: forces want none by weights."""
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
    before, arrange, after = [arranged(p, values) for p in (call.before, call.a, call.after)]
    if before is None or arrange is None or after is None:
        return None
    plan = call.primitive.plan(call.a, call.slots)
    if plan is None:
        return None
    record, slots = call.primitive.Arguments._make, call.slots
    return lambda values: before(values) + plan(record(arrange(values)), slots) + after(values)


# Function.apply without its check for torch.func's transforms, which `plan` has made already.
_apply = super(torch.autograd.Function, _Differentiable).apply


def recorded(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """Return a plan that evaluates a primitive on tensors of these kinds, and tells autograd."""
    saved = primitive.with_saved(slots)
    with torch.no_grad():
        evaluate = evaluation(primitive, a, saved)
    step = Step(primitive, a, saved, evaluate)
    arrays = {name: b for name, b in zip(primitive.arrays, a, strict=False) if b is not None}
    differ = {name for name, array in arrays.items() if array.requires_grad}
    readers = [primitive.read_for.get(name, primitive.arrays) for name in arrays]
    step.bare = [at for at, names in enumerate(readers) if not differ.intersection(names)]
    step.large = len(differ) > 1 and sum([b.numel() for b in arrays.values()]) >= _LARGE
    given, record = step.given, primitive.Outputs._make

    def run(a: Any, slots: Sequence[Any]) -> Any:
        return record(_apply(step, a, *given(a)))

    return run


def pulled_back(
    primitive: Primitive,
    a: Any,
    y: Any,
    dy: Sequence[torch.Tensor | None],
    wanted: Sequence[Any],
    seen: Callable[[Call], None] | None = None,
) -> Sequence[Any]:
    """Return a cotangent for every array that wants one, from the outputs `y` that are kept."""
    if any([is_batch(cotangent) for cotangent in dy]):
        return row_by_row(lambda dy: pulled_back(primitive, a, y, dy, wanted), dy)
    found: Any = primitive.pulled_back(a, y, dy, wanted, seen)
    return _pulled_back_by_formula(primitive, a, dy, wanted) if found is NotImplemented else found


# Under `is_grads_batched` cotangents are batches in disguise, without memory of their own and
# without a way to ask for their rule.
_BATCHED: Any = private().dispatch_key("Batched")

#: Torch nests no more batches than that.
_LEVELS = 64


def is_batch(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is a batch in disguise."""
    return tensor is not None and private().dispatch_keys(tensor).has(_BATCHED)


def row_by_row(
    pull_back: Callable[[tuple[Any, ...]], Sequence[Any]], dy: Sequence[Any]
) -> list[Any]:
    """Return cotangents, batches again, of a pullback that takes no batches."""
    level, first = _level(next(cotangent for cotangent in dy if is_batch(cotangent)))
    count = len(first)
    columns = [
        private().remove_batch_dim(cotangent, level, count, 0)
        if is_batch(cotangent)
        else [cotangent] * count
        for cotangent in dy
    ]
    found = _stacked(pull_back, columns)
    return [None if rows is None else private().add_batch_dim(rows, 0, level) for rows in found]


def _level(tensor: Any) -> tuple[int, torch.Tensor]:
    """Return how deep a batch is nested, and its plain tensor, whose first dimension it hides."""
    for level in range(1, _LEVELS + 1):
        plain = private().remove_batch_dim(tensor, level, 1, 0)
        if not is_batch(plain):
            return level, plain
    raise NotImplementedError(
        "a batch of batched cotangents can't be pulled back; use torch.func's vmap, or one batch"
    )


def _pulled_back_by_formula(
    primitive: Primitive, a: Any, dy: Sequence[torch.Tensor | None], wanted: Sequence[Any]
) -> tuple[Any, ...]:
    """Pull back through the formula, for orders of derivative that no kernel has."""
    by = [array for array, want in zip(a, wanted, strict=False) if want]
    cotangents = tuple([cotangent for cotangent in dy if cotangent is not None])

    def formula(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = iter(values)
        arrays = [next(left) if want else b for b, want in zip(a, wanted, strict=False)]
        y = primitive.formula(primitive.Arguments._make((*arrays, *a[len(wanted) :])))
        return tuple([b for b, cotangent in zip(y, dy, strict=True) if cotangent is not None])

    # The arrays of a transform that has ended no longer require grad.
    if private().transforming() or not all([array.requires_grad for array in by]):
        with as_written(reference(a)):
            found = torch.func.vjp(formula, *by)[1](cotangents)
    else:
        with torch.enable_grad(), as_written(reference(a)):
            # Views, as a cotangent may depend on the arrays: autograd follows that path itself.
            views = [array.view_as(array) for array in by]
            y = formula(*views)
        # An output may depend on no array that is differentiated by.
        used = [(b, dy) for b, dy in zip(y, cotangents, strict=True) if b.requires_grad]
        found = [None] * len(by)
        if used:
            found = torch.autograd.grad(
                [b for b, _ in used],
                views,
                [dy for _, dy in used],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
    gradients = iter(found)
    return tuple([next(gradients) if want else None for want in wanted])


class _Transformed(_Differentiable):
    """Any primitive under torch.func, whose protocol would cost a plain call several µs."""

    @staticmethod
    def forward(  # type: ignore[override]
        step: Step, others: tuple[Any, ...], *arrays: Any
    ) -> tuple[Any, ...]:
        return tuple(step.primitive(*step.spread(arrays), *others, out=step.slots))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.step, ctx.others, *arrays = inputs
        ctx.save_for_backward(*arrays, *ctx.step.beside(ctx.others, output))
        ctx.save_for_forward(*arrays, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor | None, ...]:
        """Return tangents of the outputs, by the transpose of the pullback, which is linear."""
        step, others, count = ctx.step, ctx.others, len(tangents) - 2
        along = {at: tangent for at, tangent in enumerate(tangents[2:]) if tangent is not None}

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
        # A batch of none has the outputs of a batch of zeros, without its one row.
        most = max(info.batch_size, 1)
        dims = *in_dims[1], *in_dims[2:]
        columns = [
            [value] * most
            if dim is None
            else value.unbind(dim) or [value.new_zeros(value.movedim(dim, 0).shape[1:])]
            for value, dim in zip((*others, *arrays), dims, strict=True)
        ]
        count = len(others)
        found = _stacked(lambda row: _Transformed.apply(step, row[:count], *row[count:]), columns)
        batches = [None if rows is None else rows[: info.batch_size] for rows in found]
        return tuple(batches), tuple([None if rows is None else 0 for rows in batches])


def _stacked(
    function: Callable[[tuple[Any, ...]], Sequence[Any]], columns: Sequence[Any]
) -> list[Any]:
    """Return a function's results of every row of the columns, one column for each result."""
    rows = [function(row) for row in zip(*columns, strict=True)]
    return [
        None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)
    ]


def _alive(value: Any) -> Any:
    """Return a value without the wrappers of transforms that have ended, if it is a tensor."""
    while isinstance(value, torch.Tensor) and (inner := private().alive(value)) is not value:
        value = inner
    return value


def transformed(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Any:
    """Return outputs where torch.func transforms a call."""
    wanted = tuple([slot if slot is None else True for slot in slots])
    step = Step(primitive, a, primitive.with_saved(wanted))
    return into(primitive, slots, _Transformed.apply(step, a[step.others], *step.given(a)))
