"""The bridge to torch, one for every op: with `fusedops.nn`, all that imports torch.

Eager calls take a direct autograd.Function. Under `torch.compile` the same call is a registered op,
``torch.ops.fusedops.<primitive>``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.weak
from torch._C._dynamo import guards
from torch.autograd import forward_ad

from fusedops._frame import primitive as primitive_frame
from fusedops._frame import registry
from fusedops._frame.check import own_memory, promoted, reference, traced
from fusedops._frame.kinds import TENSORS, Plans, kind_of
from fusedops._frame.packed import Packed, packed
from fusedops._frame.primitive import Primitive, numpy_plan, poisoned, primitives
from fusedops._frame.registry import Request

TENSORS |= {torch.Tensor, torch.nn.Parameter}

_HALF = (torch.float16, torch.bfloat16)

#: Packed arguments that were read from a GPU, by the tensor that they were read from, with which
#: they go.
packed_read = torch.utils.weak.WeakTensorKeyDictionary()


def as_tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return zero-copy views of NumPy arrays."""
    # They are kept, and a tensor made in inference mode is of no use outside of it.
    with torch.inference_mode(False):
        return [torch.from_numpy(array) for array in arrays]


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are nothing but tensors."""
    return all([type(tensor) is torch.Tensor for tensor in tensors])


def move(argument: Packed, device: Any) -> Packed:
    """Return a packed argument on a device."""
    device = torch.empty(0, device=device).device
    if str(device) == argument.device:
        return argument
    with torch.inference_mode(False):
        tensors = [
            tensor.to(device, torch.float32)
            if device.type == "mps" and tensor.dtype == torch.float64
            else tensor.to(device)
            for tensor in argument.tensors_here()
        ]
    return type(argument).from_tensors(tensors, argument.sizes())


def unwrapped(op: str, argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside torch.func's wrappers, which follow no derivative by a constant."""
    functorch = torch._C._functorch
    # First, because it is an operation, whose result the transforms wrap.
    tensor = tensor.resolve_neg()
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            raise TypeError(
                f"{op}: {argument} is what torch.vmap maps over; it should be one for all, from "
                "outside"
            )
        tensor = functorch.get_unwrapped(tensor)
    return tensor


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
    """Return an argument with every `Packed` taken apart into what a graph can hold."""
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


_PACKED = "fusedops.Packed"


@torch.compiler.allow_in_graph
@torch.compiler.disable
def _node(name: str, args: Any, options: dict[str, Any]) -> Any:
    """Call an op: all of this library that torch.compile sees.

    The graph ends where an argument is bad, so that the call raises its own error outside of it.
    """
    try:
        return registry.ops[name](*_together(args), **_together(options))
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if not traced():
            raise
        raise NotImplementedError(str(error)) from error


def transforms() -> bool:
    """Return whether torch does more than compute: traces, transforms, or pushes forward."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


def guard(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Return what tells whether other tensors, and the modes that torch is in, are of one kind.

    One step of torch's compares types, dtypes, devices, shapes, strides, whether a tensor requires
    grad, and the dispatch keys of tensors and thread, in which are lazy negation, autocast,
    inference mode and transforms.
    """
    check = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    begin, modes = _alignment(tensors), _modes()

    def passes(tensors: Sequence[torch.Tensor]) -> bool:
        return check(*tensors) and _alignment(tensors) == begin and _modes() == modes

    return passes


def _modes() -> tuple[Any, ...]:
    """Return the modes of torch that are in no dispatch key."""
    return (
        torch.is_grad_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch._C._len_torch_dispatch_stack(),
        forward_ad._current_level,
    )


def _alignment(tensors: Sequence[torch.Tensor]) -> int | tuple[int, ...]:
    """Return where tensors begin, modulo 16 bytes: zero for all, where that is so."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return tuple([tensor.data_ptr() & 15 for tensor in tensors]) if bits & 15 else 0


def run(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Any:
    """Evaluate a primitive on tensors, differentiably where autograd asks for it."""
    found = plan(primitive, a, slots)
    return _traced_or_transformed(primitive, a, slots) if found is None else found(a, slots)


def plan(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Callable[[Any, Any], Any] | None:
    """Return what computes outputs of tensors of these kinds; None under transforms of torch's."""
    asked = registry.forced(None)
    kind = kind_of((asked, *slots, *a))
    found = primitive.plans.get(kind)
    if found is None:
        if transforms():
            return None
        found = primitive.plans.keep(kind, _eager(primitive, a, slots, asked))
    return found


def _eager(
    primitive: Primitive, a: Any, slots: Sequence[Any], asked: str | None
) -> Callable[[Any, Any], Any]:
    """Return what evaluates a primitive on tensors of these kinds, and tells autograd."""
    count = len(primitive.arrays)
    narrow = _narrow(primitive, a)
    a = _in_float32(primitive, a) if narrow else a
    needed = torch.is_grad_enabled() and any(
        [array is not None and array.requires_grad for array in a[:count]]
    )
    if needed and primitive.mutates:
        raise RuntimeError(primitive.no_gradient(primitive.name))
    run: Callable[[Any, Any], Any]
    if needed:
        saved = primitive.with_saved(slots)
        with torch.no_grad():
            evaluate = evaluation(primitive, a, saved, asked)
        present = tuple([at for at, array in enumerate(a[:count]) if array is not None])
        step = _Step(primitive, evaluate, asked, saved, present)

        def run(a: Any, slots: Sequence[Any]) -> Any:
            y = _apply(step, a[count:], *[a[at] for at in present])
            return primitive.Outputs._make(y)

    else:
        run = evaluation(primitive, a, slots, asked)
        if primitive.mutates or any([isinstance(slot, torch.Tensor) for slot in slots]):
            run = _told(primitive, run)
    if not narrow:
        return run
    return lambda a, slots: run(_in_float32(primitive, a), slots)


def _narrow(primitive: Primitive, a: Any) -> bool:
    """Return whether a primitive's 16-bit floats are to be cast.

    NumPy has no bfloat16; under autocast such an op is among those that run in float32.
    """
    first = reference(a)
    return (
        not primitive.sixteen_bits
        and first.dtype in _HALF
        and (first.is_cpu or torch.is_autocast_enabled(first.device.type))
    )


def _in_float32(primitive: Primitive, a: Any) -> Any:
    count = len(primitive.arrays)
    cast = [array if array is None else array.float() for array in a[:count]]
    return primitive.Arguments._make([*cast, *a[count:]])


def _told(primitive: Primitive, run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Count writes that autograd hasn't seen, so that it finds stale saved tensors."""

    def told(a: Any, slots: Sequence[Any]) -> Any:
        y = run(a, slots)
        for tensor in (*slots, *[getattr(a, name) for name in primitive.mutates]):
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return y

    return told


def _traced_or_transformed(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Any:
    """Evaluate a primitive where torch traces it, or transforms it."""
    count = len(primitive.arrays)
    if _narrow(primitive, a):
        a = _in_float32(primitive, a)
    arrays = a[:count]
    transformed = torch._C._are_functorch_transforms_active() and not traced()
    if primitive.mutates and (
        transformed
        or (torch.is_grad_enabled() and any(b is not None and b.requires_grad for b in arrays))
    ):
        raise RuntimeError(primitive.no_gradient(primitive.name))
    if traced():
        y = _call_registered(primitive, a, slots)
    elif transformed:
        y = _transformed(primitive, a, slots)
    elif any(b is not None and forward_ad.unpack_dual(b).tangent is not None for b in arrays):
        raise NotImplementedError(_no_forward_mode(primitive))
    else:
        return _eager(primitive, a, slots, registry.forced(None))(a, slots)
    return primitive.Outputs._make(_into(slots, y))


def _into(slots: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return outputs, copied into the tensors given for them."""
    return tuple(
        [
            slot.copy_(output) if isinstance(slot, torch.Tensor) else output
            for slot, output in zip(slots, outputs, strict=True)
        ]
    )


def evaluation(
    primitive: Primitive, a: Any, slots: Sequence[Any], asked: str | None
) -> Callable[[Any, Any], Any]:
    """Return what evaluates a primitive on the backend chosen, without a derivative."""
    count = len(primitive.arrays)
    given = a[: count + len(primitive.constants)]
    for name, array in zip(a._fields, given, strict=False):
        if array is not None and type(array) is not torch.Tensor:
            own_memory(primitive.name, name, array)
    if any([isinstance(t, torch.Tensor) and _is_lazy(t) for t in (*given, *slots)]):
        _refuse_lazy(primitive, a, slots)
        resolved = _resolved(primitive, a)
        run = evaluation(primitive, resolved, slots, asked)
        return lambda a, slots: run(_resolved(primitive, a), slots)
    first = reference(a)
    dtype = promoted(a[:count])
    backend, kernel = registry.choose(
        Request(primitive.name, "torch", first.device.type, dtype, asked)
    )
    if backend.speaks == "numpy":
        return _on_numpy(primitive, backend, kernel, a, slots, dtype)
    if backend.module is None:

        def formula(a: Any, slots: Sequence[Any]) -> Any:
            with torch.no_grad(), _as_written(reference(a)):
                return primitive.Outputs._make(_into(slots, kernel(a)))

        return formula
    return _on_tensors(primitive, backend, kernel, a, slots)


def empty_on(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return what makes tensors of a shape, strides and dtype on a device, the current one."""
    if device.type == "cuda":
        # The allocation of torch's own compiler takes a quarter of the time of torch.empty.
        return guards._empty_strided_cuda  # type: ignore[attr-defined]
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


def _layout(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a shape, and the strides of memory without gaps."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(shape), tuple(reversed(strides))


def _on_tensors(
    primitive: Primitive,
    backend: registry.Backend,
    kernel: Callable[..., Any],
    a: Any,
    slots: Sequence[Any],
) -> Callable[[Any, Any], Any]:
    """Return what runs a kernel on tensors, and makes outputs."""
    first = reference(a)
    device = first.device
    made = [
        (at, *_layout(output[0]), _dtype(output[1]))
        for at, (slot, output) in enumerate(zip(slots, primitive.describe(a), strict=True))
        if slot is True and output is not None
    ]
    empty = empty_on(device)
    filled = [at for at, slot in enumerate(slots) if isinstance(slot, torch.Tensor)]
    count, Outputs = len(slots), primitive.Outputs
    room = importlib.import_module(str(backend.module).partition(".")[0])
    per_plan = getattr(room, "per_plan", None)
    work = kernel if per_plan is None else per_plan(kernel, device)
    if torch.is_autocast_enabled(device.type):
        work = _without_autocast(work, device.type)

    def run(a: Any, slots: Sequence[Any]) -> Any:
        outputs: list[Any] = [None] * count
        for at, shape, strides, dtype in made:
            outputs[at] = empty(shape, strides, dtype)
        if primitive_frame.poison:
            poisoned([y for y in outputs if y is not None and y.is_floating_point()])
        for at in filled:
            outputs[at] = slots[at]
        y = Outputs._make(outputs)
        work(a, y)
        return y

    if device.type != "cuda":
        return run

    def on_its_device(a: Any, slots: Sequence[Any]) -> Any:
        if torch._C._cuda_getDevice() == device.index:
            return run(a, slots)
        # Triton launches on the current device.
        with torch.cuda.device(device):
            return run(a, slots)

    return on_its_device


def _without_autocast(work: Callable[[Any, Any], None], kind: str) -> Callable[[Any, Any], None]:
    """Return a kernel whose products by torch are in its own dtypes."""

    def run(a: Any, y: Any) -> None:
        # A context of its own for every call: one keeps the state that it goes back to.
        with torch.autocast(kind, enabled=False):
            work(a, y)

    return run


def _as_written(array: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast leaves a formula's products as they are."""
    if array.is_meta or not torch.is_autocast_enabled(array.device.type):
        return contextlib.nullcontext()
    return torch.autocast(array.device.type, enabled=False)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor means other numbers than its memory holds, of which no kernel knows.

    They are the negative of those, or zeros without memory, such as autograd may pull back.
    """
    return tensor.is_neg() or tensor._is_zerotensor()


def _refuse_lazy(primitive: Primitive, a: Any, slots: Sequence[Any]) -> None:
    """Raise where a tensor to write to means other numbers than its memory holds."""
    for tensor in (*slots, *[getattr(a, name) for name in primitive.mutates]):
        if not isinstance(tensor, torch.Tensor):
            continue
        own_memory(primitive.name, "a tensor to write to", tensor)
        if tensor.is_neg():
            raise ValueError(
                f"{primitive.name}: a tensor to write to is a negative view; it should be "
                "resolved, by resolve_neg"
            )


def _resolved(primitive: Primitive, a: Any) -> Any:
    """Return arguments whose tensors mean the numbers in their memory."""
    tensors = [t.clone() if isinstance(t, torch.Tensor) and _is_lazy(t) else t for t in a]
    return primitive.Arguments._make(tensors)


def _on_numpy(
    primitive: Primitive,
    backend: registry.Backend,
    kernel: Any,
    a: Any,
    slots: Sequence[Any],
    dtype: torch.dtype,
) -> Callable[[Any, Any], Any]:
    """Return what evaluates on views of CPU tensors.

    Floats of 16 bits that a kernel doesn't take are cast to float32.
    """
    count = len(primitive.arrays)
    dtypes = [output and _dtype(output[1]) for output in primitive.describe(a)]
    bits = dtype == torch.bfloat16 and kernel in registry.takes_bfloat16
    if dtype in _HALF and not bits:
        dtype = torch.float32
    converted = [
        at for at, array in enumerate(a[:count]) if array is not None and array.dtype != dtype
    ]
    plain = not converted and not any([output is not None and output != dtype for output in dtypes])
    given = [
        at for at, array in enumerate(a[: count + len(primitive.constants)]) if array is not None
    ]
    # A tensor of the dtype that kernels write is filled by them; another is copied to.
    filled = [at for at, slot in enumerate(slots) if getattr(slot, "dtype", None) == dtype]
    others = [
        at for at, slot in enumerate(slots) if isinstance(slot, torch.Tensor) and at not in filled
    ]
    cast = list(a)
    for at in converted:
        cast[at] = torch.empty_like(a[at], dtype=dtype)
    views = [(at, _view_of(cast[at])) for at in given]
    on_slots = [(at, _view_of(slots[at])) for at in filled]
    written = [at for at in converted if primitive.arrays[at] in primitive.mutates]
    record, numpy_slots = (
        primitive.Arguments._make,
        [True if isinstance(slot, torch.Tensor) else slot for slot in slots],
    )
    wrap, Outputs = torch.from_numpy, primitive.Outputs

    def arguments(a: Any) -> Any:
        arrays = list(a)
        for at, view in views:
            arrays[at] = view(arrays[at])
        return record(arrays)

    def seen(slots: Sequence[Any]) -> list[Any]:
        found = list(numpy_slots)
        for at, view in on_slots:
            found[at] = view(slots[at])
        return found

    work = numpy_plan(primitive, backend, kernel, arguments(cast), seen(slots))

    def direct(a: Any, slots: Sequence[Any]) -> Any:
        y = work(arguments(a), numpy_slots)
        return Outputs._make([array if array is None else wrap(array) for array in y])

    if plain and not bits and not filled and not others:
        return direct

    def run(a: Any, slots: Sequence[Any]) -> Any:
        cast = list(a)
        for at in converted:
            cast[at] = cast[at].to(dtype)
        y = [None if array is None else wrap(array) for array in work(arguments(cast), seen(slots))]
        if bits:
            y = [tensor if tensor is None else tensor.view(torch.bfloat16) for tensor in y]
        for at in written:
            a[at].copy_(cast[at])
        y = [
            tensor if tensor is None else tensor.to(to)
            for tensor, to in zip(y, dtypes, strict=True)
        ]
        for at in filled:
            y[at] = slots[at]
        for at in others:
            y[at] = slots[at].copy_(y[at])
        return Outputs._make(y)

    return run


def _view_of(tensor: torch.Tensor) -> Callable[[torch.Tensor], np.ndarray]:
    """Return what makes NumPy arrays on the memory of CPU tensors of one kind; of bfloat16's bits.

    `Tensor.numpy` would fix the size of a tensor's storage for good, which FSDP sets to zero and
    back. The array doesn't keep the tensor: whoever has the one must hold the other.
    """
    size, shape = tensor.itemsize, tuple(tensor.shape)
    dtype = np.dtype(_TYPES[tensor.dtype])
    if not tensor.numel():
        return lambda tensor: np.empty(shape, dtype)
    strides = tuple([size * stride for stride in tensor.stride()])
    extent = sum([(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]) + size
    memory, array = (ctypes.c_char * extent).from_address, np.ndarray
    return lambda tensor: array(shape, dtype, memory(tensor.data_ptr()), 0, strides)


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


_TYPES = {
    getattr(torch, name): np.dtype(name).str
    for name in (
        *("float64", "float32", "float16", "complex128", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
_TYPES[torch.bfloat16] = np.dtype(np.uint16).str


class _Memory:
    """A CPU tensor's memory, as NumPy's array interface describes it."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        size = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "typestr": _TYPES[tensor.dtype],
            "shape": tuple(tensor.shape),
            "strides": None
            if tensor.is_contiguous()
            else tuple([size * stride for stride in tensor.stride()]),
            "data": (tensor.data_ptr(), False),
        }


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of a CPU tensor, whatever asks for its gradient; of bfloat16, of its bits.

    `Tensor.numpy` would fix the size of the tensor's storage for good, which FSDP sets to zero
    and back.
    """
    return np.asarray(_Memory(tensor))


def values(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a constant as a NumPy array, a view where that can be; no bfloat16."""
    tensor = tensor.detach().cpu().resolve_neg()
    return as_numpy(tensor.double() if tensor.is_floating_point() else tensor)


class _Step(NamedTuple):
    """The parts that all differentiable calls of a kind share."""

    primitive: Primitive
    evaluate: Callable[[Any, Any], Any] | None
    asked: str | None
    slots: tuple[Any, ...]
    # Places of the arrays that are given: autograd takes its time for every other too.
    present: tuple[int, ...]

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Return values of the arrays that are given, and None for the others."""
        found = [None] * len(self.primitive.arrays)
        for at, value in zip(self.present, values, strict=False):
            found[at] = value
        return found


class _Differentiable(torch.autograd.Function):
    """Any primitive. The outputs that its pullback needs are computed beside those wanted."""

    @staticmethod
    def forward(ctx: Any, step: _Step, others: tuple[Any, ...], *arrays: Any) -> tuple[Any, ...]:
        primitive, evaluate, _, slots, _ = step
        a = primitive.Arguments._make((*step.spread(arrays), *others))
        y = evaluate(a, slots)  # type: ignore[misc]
        ctx.step, ctx.others = step, others
        # Borrowed tensors are saved too, so that autograd sees who writes to them.
        borrowed = _borrowed(others)
        saved = [getattr(y, name) for name in primitive.saves]
        ctx.save_for_backward(*arrays, *saved, *borrowed)
        ctx.set_materialize_grads(False)
        return tuple(y)

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor | None) -> tuple[Any, ...]:
        step, saved = ctx.step, ctx.saved_tensors
        wanted = step.spread([need or None for need in ctx.needs_input_grad[2:]])
        given = (
            step.primitive, step.spread(saved), ctx.others, saved[len(step.present) :], dy, wanted
        )  # fmt: skip
        if step.asked == registry.forced(None):
            found = _pull_back(*given)
        else:
            with registry.asking(step.asked):
                found = _pull_back(*given)
        return None, None, *[found[at] for at in step.present]


def _borrowed(others: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in others:
        if isinstance(value, Packed):
            found += value.borrowed
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found


# Function.apply less its own look at torch.func's transforms, which `plan` has looked for already.
_apply = super(torch.autograd.Function, _Differentiable).apply


class _Transformed(_Differentiable):
    """The same under torch.func, whose protocol costs a plain eager call several microseconds."""

    @staticmethod
    def forward(  # type: ignore[override]
        step: _Step, others: tuple[Any, ...], *arrays: Any
    ) -> tuple[Any, ...]:
        a = step.primitive.Arguments._make((*arrays, *others))
        return tuple(evaluation(step.primitive, a, step.slots, step.asked)(a, step.slots))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.step, ctx.others, *arrays = inputs
        y = ctx.step.primitive.Outputs._make(output)
        ctx.save_for_backward(*arrays, *[getattr(y, name) for name in ctx.step.primitive.saves])
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], step: _Step, others: tuple[Any, ...], *arrays: Any
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
            else reference(arrays).new_empty((0, *output[0]), dtype=_dtype(output[1]))
            for output in primitive.describe(primitive.Arguments._make((*row, *others)))
        )
        return outputs, tuple(None if output is None else 0 for output in outputs)


def _transformed(primitive: Primitive, a: Any, slots: Sequence[Any]) -> tuple[Any, ...]:
    levels = torch._C._functorch.get_interpreter_stack()
    if any(level.key() == torch._C._functorch.TransformType.Jvp for level in levels):
        raise NotImplementedError(_no_forward_mode(primitive))
    count = len(primitive.arrays)
    wanted = tuple([slot if slot is None else True for slot in slots])
    slots, asked = primitive.with_saved(wanted), registry.forced(None)
    step = _Step(primitive, None, asked, slots, tuple(range(count)))
    return _Transformed.apply(step, a[count:], *a[:count])


def _no_forward_mode(primitive: Primitive) -> str:
    return (
        f"{primitive.name} has no forward-mode derivative (jvp, jacfwd, torch.func.hessian); "
        "use the reverse mode (grad, vjp, jacrev)"
    )


def _pull_back(
    primitive: Primitive,
    arrays: Sequence[Any],
    others: tuple[Any, ...],
    saved: Sequence[Any],
    dy: Sequence[torch.Tensor | None],
    wanted: Sequence[Any],
) -> Sequence[Any]:
    """Return a cotangent for every array that wants one."""
    if not any([cotangent is not None for cotangent in dy]):
        return [None] * len(wanted)
    a = primitive.Arguments._make((*arrays, *others))
    if primitive.pullback is None:
        if torch._C._are_functorch_transforms_active():
            return _transform_formula(primitive, a, dy, wanted)
        return _differentiate_formula(primitive, a, dy)
    kept = dict(zip(primitive.saves, saved, strict=False))
    y = primitive.Outputs._make([kept.get(name) for name in primitive.outputs])
    return primitive.pulled_back(a, y, dy, wanted)


def _differentiate_formula(
    primitive: Primitive, a: Any, dy: Sequence[torch.Tensor | None]
) -> tuple[Any, ...]:
    """Pull back through the formula: for the orders of derivative that no kernel has."""
    count = len(primitive.arrays)
    with torch.enable_grad(), _as_written(reference(a)):
        # Views, because a cotangent may depend on the arrays: that path is autograd's, not ours.
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
    with _as_written(reference(a)):
        pull_back = torch.func.vjp(formula, *by)[1]
        gradients = iter(pull_back(tuple([c for c in dy if c is not None])))
    return tuple(next(gradients) if need else None for need in needed)


def _take_apart(primitive: Primitive, static: Sequence[Any]) -> list[Any]:
    """Return static arguments as what a registered op's schema can hold."""
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


def _call_registered(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Any:
    given = len(primitive.arrays) + len(primitive.constants)
    wanted = [slot is not None for slot in slots]
    if any(isinstance(array, torch.Tensor) and array.requires_grad for array in a[:given]):
        wanted = [slot is not None for slot in primitive.with_saved([w or None for w in wanted])]
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
    takes_tensors = [*(kind.startswith("Tensor[]") for kind in kinds), False, False]
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
        """A schema with one result wants it bare."""
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
        shapes = [
            output if want and output is not None else (0, None)
            for want, output in zip(slots, primitive.describe(a), strict=True)
        ]
        return returned(
            [reference(a).new_empty(shape, dtype=_dtype(dtype)) for shape, dtype in shapes]
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
        if any(
            [slot is None and saved for slot, saved in zip(slots, primitive._saved, strict=True)]
        ):
            raise RuntimeError(f"torch.ops.{qualified}: its gradient needs more outputs wanted")
        asked = [
            cotangent if want and output is not None else None
            for cotangent, want, output in zip(
                cotangents, slots, primitive.describe(a), strict=True
            )
        ]
        saved = ctx.saved_tensors[given:]
        wanted = [need or None for need in ctx.needs_input_grad[:count]]
        with registry.asking(backend or None):
            gradients = _pull_back(primitive, a[:count], a[count:], saved, asked, wanted)
        nothing = [
            # An empty list of sizes has a list for its gradient too.
            [None] * len(value) if tensors or value == [] else None
            for tensors, value in zip(takes_tensors, ctx.flat, strict=True)
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
