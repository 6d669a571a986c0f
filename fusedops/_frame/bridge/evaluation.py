"""Primitives on tensors, without a derivative: by a kernel for tensors or NumPy, or by formula."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fusedops._frame import primitive as primitive_frame
from fusedops._frame import registry
from fusedops._frame.arrays import cast
from fusedops._frame.bridge.tensors import layout_of, np_dtype
from fusedops._frame.check import own_memory, reference, refuse
from fusedops._frame.primitive import Primitive, converted, kernel_plan, poisoned
from fusedops._frame.torch_private import private
from fusedops._host import memory

HALF = (torch.float16, torch.bfloat16)


def evaluation(primitive: Primitive, a: Any, slots: Sequence[Any]) -> Callable[[Any, Any], Any]:
    """Return a function that evaluates a primitive on the backend chosen, without a derivative."""
    count = len(primitive.arrays)
    given = a[: count + len(primitive.constants)]
    for name, array in zip(a._fields, given, strict=False):
        if array is not None and type(array) is not torch.Tensor:
            own_memory(primitive.name, name, array)
    if any([isinstance(t, torch.Tensor) and _is_lazy(t) for t in (*given, *slots)]):
        _refuse_lazy(primitive, a, slots)
        run = evaluation(primitive, _resolved(primitive, a), slots)
        return lambda a, slots: run(_resolved(primitive, a), slots)
    request = registry.request(primitive.name, a[:count])
    backend, kernel = registry.choose(request)
    if backend.speaks == "numpy":
        work = kernel if backend.package else _filled_by(kernel)
        return _on_numpy(primitive, work, a, slots, request.dtype)
    if backend.package:
        work = importlib.import_module(backend.package).per_plan(kernel, reference(a).device)
        return _on_tensors(primitive, work, a, slots)

    def formula(a: Any, slots: Sequence[Any]) -> Any:
        with torch.no_grad(), as_written(reference(a)):
            return into(primitive, slots, kernel(a))

    return formula


def into(primitive: Primitive, slots: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Return the outputs that are wanted, copied into the tensors given for them."""
    return primitive.Outputs._make(
        [
            slot.copy_(output) if isinstance(slot, torch.Tensor) else slot and output
            for slot, output in zip(slots, outputs, strict=True)
        ]
    )


def as_written(array: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast leaves products by torch as they are.

    The context serves once, as it keeps the state to restore.
    """
    if array.is_meta or not torch.is_autocast_enabled(array.device.type):
        return contextlib.nullcontext()
    return torch.autocast(array.device.type, enabled=False)


def _on_tensors(
    primitive: Primitive, work: Callable[..., Any], a: Any, slots: Sequence[Any]
) -> Callable[[Any, Any], Any]:
    """Return a function that makes outputs and runs a kernel on tensors."""
    device = reference(a).device

    def empty(shape: Any, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        if device.type == "cuda":
            strides = torch.empty(shape, device="meta").stride()
            return functools.partial(private().empty_strided_cuda, shape, strides, dtype)
        return functools.partial(torch.empty, shape, dtype=dtype, device=device)

    def unrounded(a: Any, y: Any) -> None:
        with as_written(reference(a)):
            work(a, y)

    fill = unrounded if torch.is_autocast_enabled(device.type) else work
    given = [at for at, slot in enumerate(slots) if isinstance(slot, torch.Tensor)]
    run = kernel_plan(primitive, fill, slots, empty, primitive.describe(a), given)
    if device.type != "cuda":
        return run

    current_device = private().current_device

    def on_its_device(a: Any, slots: Sequence[Any]) -> Any:
        if current_device() == device.index:
            return run(a, slots)
        # Triton launches on the current device.
        with torch.cuda.device(device):
            return run(a, slots)

    return on_its_device


def _on_numpy(
    primitive: Primitive, kernel: Any, a: Any, slots: Sequence[Any], dtype: torch.dtype
) -> Callable[[Any, Any], Any]:
    """Return a function that runs a kernel on views of CPU tensors, aligned and of one dtype.

    Floats of 16 bits that a kernel doesn't take are cast to float32.
    """
    count = len(primitive.arrays)
    if dtype in HALF and not (dtype == torch.bfloat16 and kernel in registry.takes_bfloat16):
        dtype = torch.float32
    arrays, unfit = list(a), []
    for at, array in enumerate(a[: count + len(primitive.constants)]):
        if array is not None and not _is_fit(array, to := dtype if at < count else array.dtype):
            unfit.append((at, functools.partial(cast, like=to, copy=True)))
            arrays[at] = torch.empty_like(array, dtype=to, device="meta")
    outputs = primitive.describe(a)
    tensors = [at for at, slot in enumerate(slots) if isinstance(slot, torch.Tensor)]
    fit = [at for at in tensors if _is_fit(slots[at], dtype)]
    seen = [(at, *layout_of(b)) for at, b in enumerate(arrays) if isinstance(b, torch.Tensor)]
    filled = [(at, *layout_of(slots[at])) for at in fit]
    told = kernel in registry.told_of_tensors
    work = functools.partial(kernel, tensors=True) if told else kernel
    kind = np_dtype(dtype)
    made = [
        (at, tuple(output[0]), memory.empty_of(output[0], kind))
        for at, (slot, output) in enumerate(zip(slots, outputs, strict=True))
        if output is not None and slot is not None and at not in fit
    ]
    Arguments, Outputs = primitive.Arguments._make, primitive.Outputs._make
    size, view = len(slots), np.ndarray
    wrap = torch.from_numpy if dtype != torch.bfloat16 else _from_bits

    def fill(a: Any, slots: Sequence[Any]) -> Any:
        arrays: list[Any] = list(a)
        for at, shape, of, held, strides in seen:
            arrays[at] = view(shape, of, held(arrays[at].data_ptr()), 0, strides)
        found: list[Any] = [None] * size
        y: list[Any] = [None] * size
        for at, shape, empty in made:
            y[at] = array = empty(shape, kind)
            found[at] = wrap(array)
        if primitive_frame.poison:
            poisoned(y)
        for at, shape, of, held, strides in filled:
            found[at] = slot = slots[at]
            y[at] = view(shape, of, held(slot.data_ptr()), 0, strides)
        work(Arguments(arrays), Outputs(y))
        return Outputs(found)

    plain = all([output is None or output[1] == dtype for output in outputs])
    return (
        fill
        if plain and not unfit and fit == tensors
        else converted(primitive, fill, unfit, outputs)
    )


def _is_fit(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor has a dtype, and memory aligned to it, as compiled code wants."""
    return tensor.dtype == dtype and tensor.data_ptr() % tensor.itemsize == 0


def _filled_by(formula: Callable[[Any], Sequence[Any]]) -> Callable[[Any, Any], None]:
    """Return a kernel that fills outputs by a formula."""

    def kernel(a: Any, y: Any) -> None:
        for slot, output in zip(y, formula(a), strict=True):
            if slot is not None:
                slot[...] = output

    return kernel


def _from_bits(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).view(torch.bfloat16)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor differ from its memory, which kernels read."""
    return tensor.is_neg() or tensor._is_zerotensor()


def _refuse_lazy(primitive: Primitive, a: Any, slots: Sequence[Any]) -> None:
    """Raise where the values of a tensor to write to differ from its memory."""
    op, name = primitive.name, "a tensor to write to"
    for tensor in (*slots, *[getattr(a, name) for name in primitive.mutates]):
        if isinstance(tensor, torch.Tensor):
            own_memory(op, name, tensor)
            if tensor.is_neg():
                refuse(ValueError, op, name, "is a negative view", "be resolved, by resolve_neg")


def _resolved(primitive: Primitive, a: Any) -> Any:
    """Return arguments with the values of tensors in their memory."""
    tensors = [t.clone() if isinstance(t, torch.Tensor) and _is_lazy(t) else t for t in a]
    return primitive.Arguments._make(tensors)
