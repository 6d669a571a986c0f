"""The bridge to torch, one for every op: with `fusedops.nn`, all that imports torch.

Eager calls take a direct autograd.Function. Under `torch.compile` the same call is a registered op,
``torch.ops.fusedops.<primitive>``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.weak
from torch.autograd import forward_ad

from fusedops._frame import registry
from fusedops._frame.check import own_memory, promoted, reference, traced
from fusedops._frame.registry import Call, Packed, Primitive, Request

_HALF = (torch.float16, torch.bfloat16)

#: Packed arguments that were read from a GPU, by the tensor that they were read from, with which
#: they go.
packed_read = torch.utils.weak.WeakTensorKeyDictionary()


def as_tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return zero-copy views of NumPy arrays."""
    # They are kept, and a tensor made in inference mode is of no use outside of it.
    with torch.inference_mode(False):
        return [torch.from_numpy(array) for array in arrays]


def move(packed: Packed, device: Any) -> Packed:
    """Return a packed argument on a device."""
    device = torch.empty(0, device=device).device
    if str(device) == packed.device:
        return packed
    with torch.inference_mode(False):
        tensors = [
            tensor.to(device, torch.float32)
            if device.type == "mps" and tensor.dtype == torch.float64
            else tensor.to(device)
            for tensor in packed.tensors_here()
        ]
    return type(packed).from_tensors(tensors, packed.sizes())


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
        return [_PACKED, type(argument).__name__, argument.tensors_here(), argument.sizes()]
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
        return registry.packed[argument[1]].from_tensors(*argument[2:])
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


def run(
    call: Call, arrays: Sequence[Any], wanted: tuple[bool, ...], out: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """Evaluate a primitive on tensors, differentiably where autograd asks for it."""
    primitive = call.primitive
    first = reference(arrays)
    if (
        not primitive.sixteen_bits
        and first.dtype in _HALF
        and (first.is_cpu or torch.is_autocast_enabled(first.device.type))
    ):
        # NumPy has no bfloat16; under autocast such an op is among those that run in float32.
        arrays = [None if array is None else array.float() for array in arrays]
    transformed = torch._C._are_functorch_transforms_active() and not call.registered
    if primitive.mutates:
        _refuse_gradient(call, arrays, transformed)
    if call.registered:
        return _into(out, wanted, _call_registered(call, arrays, wanted))
    if transformed:
        return _into(out, wanted, _transformed(call, arrays, wanted))
    if forward_ad._current_level >= 0 and any(
        array is not None and forward_ad.unpack_dual(array).tangent is not None for array in arrays
    ):
        raise NotImplementedError(_no_forward_mode(call))
    if torch.is_grad_enabled():
        for array in arrays:
            if array is not None and array.requires_grad:
                return _apply(call, wanted, *arrays)
    outputs = evaluate(call, arrays, wanted, out)
    if primitive.mutates or out is not None:
        names = zip(primitive.arrays, arrays, strict=True)
        _tell_autograd([out, *(array for name, array in names if name in primitive.mutates)])
    return outputs


def _into(
    out: torch.Tensor | None, wanted: tuple[bool, ...], outputs: Sequence[Any]
) -> tuple[Any, ...]:
    """Return outputs, the first that is wanted copied into `out` where that is given."""
    if out is None:
        return tuple(outputs)
    filled = wanted.index(True)
    return tuple([out.copy_(o) if i == filled else o for i, o in enumerate(outputs)])


def _tell_autograd(written: Sequence[torch.Tensor | None]) -> None:
    """Count writes that autograd hasn't seen, lest it use new values for old ones."""
    for tensor in written:
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _refuse_gradient(call: Call, arrays: Sequence[Any], transformed: bool) -> None:
    """Raise where a derivative is asked of a primitive that works in place."""
    needed = any(array is not None and array.requires_grad for array in arrays)
    if transformed or (needed and torch.is_grad_enabled()):
        raise RuntimeError(registry._no_gradient(call.primitive.name, call.primitive))


def evaluate(
    call: Call, arrays: Sequence[Any], wanted: tuple[bool, ...], out: torch.Tensor | None = None
) -> tuple[Any, ...]:
    """Evaluate a primitive on the backend chosen, without a derivative."""
    primitive, static, forced, _ = call
    for name, array in zip(primitive.arrays, arrays, strict=True):
        if array is not None and type(array) is not torch.Tensor:
            own_memory(primitive.name, name, array)
    if any([array is not None and array.is_neg() for array in (*arrays, out)]):
        arrays = _resolved(primitive, arrays, out)
    first = reference(arrays)
    dtype = promoted(arrays)
    backend, kernel = registry.choose(
        Request(primitive.name, "torch", first.device.type, dtype, forced)
    )
    if backend.speaks == "numpy":
        return _on_numpy(call, backend, kernel, arrays, dtype, wanted, out)
    described = primitive.describe(arrays, static)
    if backend.module is None:
        with torch.no_grad(), _as_written(first):
            outputs = kernel(*arrays, *static)
        return _into(out, wanted, outputs)
    outputs = [
        registry.allocate(
            first.new_empty, output[0], getattr(torch, output[1]) if output[1] else first.dtype
        )
        if want and output is not None
        else None
        for want, output in zip(wanted, described, strict=True)
    ]
    if out is not None:
        outputs[wanted.index(True)] = out
    if torch.is_autocast_enabled(first.device.type):
        # A kernel may use products of torch's.
        kernel = torch.autocast(first.device.type, enabled=False)(kernel)
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        # Triton launches on the current device.
        with torch.cuda.device(first.device):
            kernel(*arrays, *static, *outputs)
    else:
        kernel(*arrays, *static, *outputs)
    return tuple(outputs)


def _as_written(array: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast leaves a formula's products as they are."""
    if array.is_meta or not torch.is_autocast_enabled(array.device.type):
        return contextlib.nullcontext()
    return torch.autocast(array.device.type, enabled=False)


def _resolved(
    primitive: Primitive, arrays: Sequence[Any], out: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Return tensors that mean what is in their memory, not its negative, which no kernel knows."""
    written = [a for a, n in zip(arrays, primitive.arrays, strict=True) if n in primitive.mutates]
    if any(array is not None and array.is_neg() for array in (*written, out)):
        raise ValueError(
            f"{primitive.name}: a tensor to write to is a negative view; it should be resolved, "
            "by resolve_neg"
        )
    return [array if array is None else array.resolve_neg() for array in arrays]


def _on_numpy(
    call: Call,
    backend: registry.Backend,
    kernel: Any,
    arrays: Sequence[Any],
    dtype: torch.dtype,
    wanted: tuple[bool, ...],
    out: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Evaluate on views of CPU tensors; 16-bit floats that a kernel doesn't take, in float32."""
    primitive = call.primitive
    bits = dtype == torch.bfloat16 and kernel in registry.takes_bfloat16
    if dtype in _HALF and not bits:
        dtype = torch.float32
    alike = all([array is None or array.dtype == dtype for array in arrays])
    cast = arrays if alike else [a if a is None else a.to(dtype) for a in arrays]
    views = [array if array is None else as_numpy(array) for array in cast]
    there = None if out is None or out.dtype != dtype else as_numpy(out)
    results = call.on_numpy(backend, kernel, views, wanted, there)
    outputs = [array if array is None else torch.from_numpy(array) for array in results]
    if bits:
        outputs = [tensor if tensor is None else tensor.view(torch.bfloat16) for tensor in outputs]
    if not alike:
        for name, array, used in zip(primitive.arrays, arrays, cast, strict=True):
            if name in primitive.mutates and used.dtype != array.dtype:
                array.copy_(used)
        described = primitive.describe(arrays, call.static)
        outputs = [
            tensor
            if tensor is None
            else tensor.to(getattr(torch, output[1]) if output[1] else reference(arrays).dtype)
            for tensor, output in zip(outputs, described, strict=True)
        ]
    if there is None:
        return _into(out, wanted, outputs)
    outputs[wanted.index(True)] = out
    return tuple(outputs)


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


class _Differentiable(torch.autograd.Function):
    """Any primitive. What the pullback needs is computed beside what is wanted."""

    @staticmethod
    def forward(ctx: Any, call: Call, wanted: tuple[bool, ...], *arrays: Any) -> tuple[Any, ...]:
        outputs = evaluate(call, arrays, call.primitive.with_saved(wanted))
        ctx.call = call
        # Borrowed tensors are saved too, so that autograd sees who writes to them.
        packed = [argument for argument in call.static if isinstance(argument, Packed)]
        borrowed = [tensor for argument in packed for tensor in argument.borrowed]
        ctx.save_for_backward(*borrowed, *arrays, *outputs[call.primitive.residual])
        ctx.borrowed = len(borrowed)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        needed, saved = ctx.needs_input_grad[2:], ctx.saved_tensors[ctx.borrowed :]
        return None, None, *_pull_back(ctx.call, saved, cotangents, needed)


# Function.apply less its own look at torch.func's transforms, which `run` has looked for already.
_apply = super(torch.autograd.Function, _Differentiable).apply


class _Transformed(_Differentiable):
    """The same under torch.func, whose protocol costs a plain eager call several microseconds."""

    @staticmethod
    def forward(  # type: ignore[override]
        call: Call, wanted: tuple[bool, ...], *arrays: Any
    ) -> tuple[Any, ...]:
        return evaluate(call, arrays, wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.call, _, *arrays = inputs
        ctx.borrowed = 0
        ctx.save_for_backward(*arrays, *output[ctx.call.primitive.residual])
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: Call, wanted: tuple[bool, ...], *arrays: Any
    ) -> Any:
        rows = [
            _Transformed.apply(
                call,
                wanted,
                *(
                    array if dim is None else array.select(dim, b)
                    for array, dim in zip(arrays, in_dims[2:], strict=True)
                ),
            )
            for b in range(info.batch_size)
        ]
        if not rows:
            return _Transformed._of_no_rows(in_dims[2:], call, arrays)
        stacked = tuple(
            None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)
        )
        return stacked, tuple(None if column is None else 0 for column in stacked)

    @staticmethod
    def _of_no_rows(in_dims: tuple[Any, ...], call: Call, arrays: Sequence[Any]) -> Any:
        """Return the outputs of a batch of no arrays."""
        row = [
            array if dim is None else array.new_empty([*array.shape[:dim], *array.shape[dim + 1 :]])
            for array, dim in zip(arrays, in_dims, strict=True)
        ]
        outputs = tuple(
            None
            if output is None
            else reference(arrays).new_empty((0, *output[0]), dtype=_dtype(output[1]))
            for output in call.primitive.describe(row, call.static)
        )
        return outputs, tuple(None if output is None else 0 for output in outputs)


def _transformed(call: Call, arrays: Sequence[Any], wanted: tuple[bool, ...]) -> tuple[Any, ...]:
    levels = torch._C._functorch.get_interpreter_stack()
    if any(level.key() == torch._C._functorch.TransformType.Jvp for level in levels):
        raise NotImplementedError(_no_forward_mode(call))
    return _Transformed.apply(call, call.primitive.with_saved(wanted), *arrays)


def _no_forward_mode(call: Call) -> str:
    return (
        f"{call.primitive.name} has no forward-mode derivative (jvp, jacfwd, torch.func.hessian); "
        "use the reverse mode (grad, vjp, jacrev)"
    )


def _pull_back(
    call: Call,
    saved: Sequence[Any],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> tuple[Any, ...]:
    primitive = call.primitive
    count = len(primitive.arrays)
    if not any([cotangent is not None for cotangent in cotangents]):
        return (None,) * count
    if primitive.pullback is None:
        if torch._C._are_functorch_transforms_active():
            return _transform_formula(call, saved[:count], cotangents, needed)
        return _differentiate_formula(call, saved[:count], cotangents)
    gradients = primitive.pullback(call, saved[:count], saved[count:], cotangents, needed)
    return tuple(g if need else None for g, need in zip(gradients, needed, strict=True))


def _differentiate_formula(
    call: Call, arrays: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]
) -> tuple[Any, ...]:
    """Pull back through the formula: for the orders of derivative that no kernel has."""
    with torch.enable_grad(), _as_written(reference(arrays)):
        # Views, because a cotangent may depend on the arrays: that path is autograd's, not ours.
        differentiated = [array is not None and array.requires_grad for array in arrays]
        arrays = [
            array.view_as(array) if by else array
            for array, by in zip(arrays, differentiated, strict=True)
        ]
        needed = [array for array, by in zip(arrays, differentiated, strict=True) if by]
        outputs = call.primitive.formula(*arrays, *call.static)
    # An output may depend on no array that is differentiated by.
    used = [
        (output, cotangent)
        for output, cotangent in zip(outputs, cotangents, strict=True)
        if cotangent is not None and output.requires_grad
    ]
    if not used:
        return (None,) * len(arrays)
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
    call: Call,
    arrays: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> tuple[Any, ...]:
    """Pull back through the formula by torch.func, for other transforms to go through."""
    asked = [cotangent is not None for cotangent in cotangents]

    def formula(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by = iter(values)
        mixed = [next(by) if need else array for array, need in zip(arrays, needed, strict=True)]
        outputs = call.primitive.formula(*mixed, *call.static)
        return tuple([output for output, ask in zip(outputs, asked, strict=True) if ask])

    by = [array for array, need in zip(arrays, needed, strict=True) if need]
    with _as_written(reference(arrays)):
        pull_back = torch.func.vjp(formula, *by)[1]
        gradients = iter(pull_back(tuple([c for c in cotangents if c is not None])))
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
            flat += [value.tensors_here(), value.sizes(), value.unread is not None]
    return flat


def _put_together(primitive: Primitive, flat: Sequence[Any]) -> tuple[Any, ...]:
    values = iter(flat)
    static: list[Any] = []
    for kind in primitive.static.values():
        value = next(values)
        if issubclass(kind, Packed):
            sizes, unread = next(values), next(values)
            if unread:
                value = kind.read_in_graph(primitive.name, value, sizes)
            else:
                value = kind.from_tensors(value, sizes) if value else None
        static.append(value)
    return tuple(static)


def _call_registered(call: Call, arrays: Sequence[Any], wanted: tuple[bool, ...]) -> Any:
    primitive = call.primitive
    if any(array is not None and array.requires_grad for array in arrays):
        wanted = primitive.with_saved(wanted)
    operator = getattr(torch.ops.fusedops, primitive.name)
    flat = _take_apart(primitive, call.static)
    outputs = operator(*arrays, *flat, list(wanted), call.forced or "")
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return tuple([out if want else None for out, want in zip(outputs, wanted, strict=True)])


_library = torch.library.Library("fusedops", "DEF")


def _register(primitive: Primitive) -> None:
    kinds = []
    for name, kind in primitive.static.items():
        packed = issubclass(kind, Packed)
        plain = [f"{kind.__name__} {name}"]
        taken_apart = [f"Tensor[] {name}", f"SymInt[] {name}_sizes", f"bool {name}_unread"]
        kinds += taken_apart if packed else plain
    count = len(primitive.arrays)
    takes_tensors = [*(kind.startswith("Tensor[]") for kind in kinds), False, False]
    arguments = [*(f"Tensor? {name}" for name in primitive.arrays), *kinds]
    for at, name in enumerate(primitive.arrays):
        if name in primitive.mutates:
            arguments[at] = f"Tensor({'abcdefgh'[at]}!) {name}"
    returns = ", ".join(["Tensor"] * len(primitive.outputs))
    qualified = f"fusedops::{primitive.name}"
    _library.define(
        f"{primitive.name}({', '.join(arguments)}, bool[] wanted, str backend) -> ({returns})"
    )

    def returned(outputs: Sequence[torch.Tensor]) -> Any:
        """A schema with one result wants it bare."""
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def implementation(*args: Any) -> Any:
        arrays, (*flat, wanted, backend) = args[:count], args[count:]
        forced = registry.forced(backend or None, primitive.name)
        bound = Call(primitive, _put_together(primitive, flat), forced)
        outputs = evaluate(bound, arrays, tuple(wanted))
        return returned(
            [
                output if want and output is not None else reference(arrays).new_empty(0)
                for want, output in zip(wanted, outputs, strict=True)
            ]
        )

    def fake(*args: Any) -> Any:
        arrays, (*flat, wanted, _) = args[:count], args[count:]
        described = primitive.describe(arrays, _put_together(primitive, flat))
        shapes = [
            output if want and output is not None else (0, None)
            for want, output in zip(wanted, described, strict=True)
        ]
        return returned(
            [reference(arrays).new_empty(shape, dtype=_dtype(dtype)) for shape, dtype in shapes]
        )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.flat = inputs[count:]
        ctx.save_for_backward(*inputs[:count], *outputs[primitive.residual])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        *flat, wanted, backend = ctx.flat
        if tuple(wanted) != primitive.with_saved(wanted):
            raise RuntimeError(f"torch.ops.{qualified}: its gradient needs more outputs wanted")
        bound = Call(primitive, _put_together(primitive, flat), backend or None, registered=True)
        described = primitive.describe(ctx.saved_tensors[:count], bound.static)
        asked = [
            cotangent if want and output is not None else None
            for cotangent, want, output in zip(cotangents, wanted, described, strict=True)
        ]
        needed = ctx.needs_input_grad[:count]
        gradients = _pull_back(bound, ctx.saved_tensors, asked, needed)
        nothing = [
            # An empty list of sizes has a list for its gradient too.
            [None] * len(value) if tensors or value == [] else None
            for tensors, value in zip(takes_tensors, ctx.flat, strict=True)
        ]
        return (*gradients, *nothing)

    _library.impl(primitive.name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    if not primitive.mutates:
        torch.library.register_autograd(
            qualified, backward, setup_context=setup_context, lib=_library
        )


for _primitive in registry.primitives().values():
    _register(_primitive)


class _SmallestEigenvector(torch.autograd.Function):
    """Of symmetric matrices (P, 3, 3), differentiable to any order; zero where there is no plane.

    dn = -(C - λ)⁺ dC n. The backward is written with the saved output, so that autograd finds the
    way through it again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(C: torch.Tensor, no_plane: float) -> torch.Tensor:
        values, vectors = _jacobi(C)
        order = values.argsort(1)
        least = vectors.gather(2, order[:, None, :1].expand(-1, 3, 1))[..., 0]
        middle, most = values.gather(1, order[:, 1:]).unbind(1)
        return torch.where((middle > no_plane * most)[:, None], least, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        from fusedops.planarity import pseudo_solve

        C, normal = ctx.saved_tensors
        p = pseudo_solve(C, normal, cotangent)
        outer = p[:, :, None] * normal[:, None, :]
        return -0.5 * (outer + outer.mT), None


def smallest_eigenvector(C: torch.Tensor, no_plane: float) -> torch.Tensor:
    """Return the eigenvectors (P, 3) of matrices (P, 3, 3) with the smallest eigenvalues.

    Zero where the second eigenvalue is at most `no_plane` of the third.
    """
    return _SmallestEigenvector.apply(C, no_plane)


def _jacobi(C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues (P, 3) and eigenvectors (P, 3, 3), the latter as columns.

    In plain arithmetic: no LAPACK call, so that it runs on any device and in a CUDA graph.
    """
    a = [[C[:, i, j] for j in range(3)] for i in range(3)]
    v = [[torch.full_like(a[0][0], float(i == j)) for j in range(3)] for i in range(3)]
    for _ in range(6):
        for p, q, r in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
            off = a[p][q]
            zero = off == 0
            theta = (a[q][q] - a[p][p]) / torch.where(zero, 1.0, 2 * off)
            sign = torch.where(theta >= 0, 1.0, -1.0)
            t = torch.where(zero, 0.0, sign / (theta.abs() + (theta * theta + 1).sqrt()))
            c = 1 / (t * t + 1).sqrt()
            s = t * c
            a[p][p] = a[p][p] - t * off
            a[q][q] = a[q][q] + t * off
            a[p][q] = a[q][p] = torch.zeros_like(off)
            a[r][p], a[r][q] = c * a[r][p] - s * a[r][q], s * a[r][p] + c * a[r][q]
            a[p][r], a[q][r] = a[r][p], a[r][q]
            for k in range(3):
                v[k][p], v[k][q] = c * v[k][p] - s * v[k][q], s * v[k][p] + c * v[k][q]
    values = torch.stack([a[k][k] for k in range(3)], 1)
    return values, torch.stack([torch.stack(row, 1) for row in v], 1)
