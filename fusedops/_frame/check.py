"""Argument checks. Every error names the op, the argument, what it was and what it should be."""

from __future__ import annotations

import math
import numbers
import operator
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fusedops._frame.hook import bridge
from fusedops._frame.torch_private import private

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import TypeIs

#: Packages whose frames lie between a user's call and the warning.
_BETWEEN = ("fusedops", "cpukern", "gpukern", "torch", "functools")
_INTEGER = re.compile(r"bool|u?int(8|16|32|64)")
_FLOATS = ("float32", "float64", "bfloat16", "float16")
# Classes of tensors with which torch traces, while one of its modes is active.
_TRACED = ("FakeTensor", "FunctionalTensor", "ProxyTensor")
_UNWRAPPED = {
    "DTensor": "a plain tensor, such as {}.to_local()",
    "AsyncCollectiveTensor": "a plain tensor, such as {}.wait()",
    "FakeTensor": "a tensor with memory, outside of FakeTensorMode",
    "NestedTensor": "a dense tensor, such as {}.to_padded_tensor(0)",
    "MaskedTensor": "a plain tensor, such as {}.to_tensor(0)",
}
# NumPy takes microseconds to name a dtype.
_NAMES = {np.dtype(name): name for name in ("float32", "float64", "int32", "int64")}


def is_tensor(value: Any) -> TypeIs[Tensor]:
    """Return whether `value` is a torch tensor, without importing torch."""
    # getattr, since another thread may still be importing torch.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def is_array(value: Any) -> bool:
    """Return whether `value` is a NumPy array or a torch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_dtensor(value: Any) -> bool:
    """Return whether `value` is a DTensor, without importing torch's distributed tensors."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def dtype_name(dtype: Any) -> str:
    """Return the name of a NumPy or torch dtype, such as ``float32``."""
    if isinstance(dtype, np.dtype) and dtype in _NAMES:
        return _NAMES[dtype]
    return str(dtype).removeprefix("torch.")


def refuse(error: type[Exception], op: str, name: str, was: str, should: str) -> NoReturn:
    """Raise an error about an argument of an op."""
    raise error(f"{op}: {name} {was}; it should {should}")


def warn(message: str) -> None:
    """Warn at the line outside of this library that made a call."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def accumulator(array: Any) -> Any:
    """Return the dtype of sums over an array: no tensor's is narrower than float32."""
    narrow = is_tensor(array) and array.itemsize == 2
    return sys.modules["torch"].float32 if narrow else array.dtype


def device_of(array: Any) -> str:
    """Return an array's device as torch writes it; all but tensors are on the CPU."""
    return "cpu" if getattr(array, "is_cpu", True) else str(array.device)


def reference(arrays: Sequence[Any]) -> Any:
    """Return the first array that isn't None; all share its framework and device."""
    for array in arrays:
        if array is not None:
            return array
    raise ValueError("there is no array")


def promoted(arrays: Sequence[Any]) -> Any:
    """Return the dtype to which arrays promote, by the rules of their framework."""
    dtype = reference(arrays).dtype
    for array in arrays:
        if array is not None and array.dtype != dtype:
            promote = sys.modules["torch"].promote_types if is_tensor(array) else np.promote_types
            dtype = promote(dtype, array.dtype)
    return dtype


def traced() -> bool:
    """Return whether torch records a call, or works on tensors without memory."""
    torch = sys.modules["torch"]
    return torch.compiler.is_compiling() or private().dispatch_modes() > 0


def is_traced(array: Any) -> bool:
    """Return whether an array is a tensor, and torch records what happens to it."""
    return is_tensor(array) and traced()


def unseen(array: Any) -> bool:
    """Return whether nobody may look at values: in compiled code, torch.vmap or a CUDA graph."""
    if not is_tensor(array):
        return False
    torch = private()
    mapped = torch.transforming() and any(level.key() == torch.vmap for level in torch.transforms())
    captured = array.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing()
    return mapped or captured or traced()


def own_memory(op: str, name: str, tensor: Any) -> None:
    """Raise TypeError unless a tensor has memory that kernels can work on.

    Tensors that torch traces, and those on the meta device, pass without: they reach no kernel.
    """
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling():
        return
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if tensor.is_quantized or tensor.is_nested:
            was, advice = "quantized" if tensor.is_quantized else "nested", "a dense tensor"
        elif tensor.layout != torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            was, advice = f"of layout {layout}", f"a dense tensor, such as {name}.to_dense()"
        elif tensor._is_zerotensor():
            was, advice = "a tensor of zeros without memory", "a dense tensor"
        elif not private().transforming() and private().is_wrapped(tensor):
            was, advice = "from inside a torch.func transform that has ended", "a result of it"
        else:
            return
    elif torch.nn.parameter.is_lazy(tensor):
        was, advice = "an uninitialized parameter", "initialized"
    elif kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or (
        private().dispatch_modes() and kind.__name__ in _TRACED
    ):
        return
    else:
        was, advice = f"a {kind.__name__}", _UNWRAPPED.get(kind.__name__, "a plain torch.Tensor")
        advice = advice.format(name)
    refuse(TypeError, op, name, f"is {was}", f"be {advice}")


def sharing(one: Any, others: Sequence[Any]) -> Callable[[Any, Sequence[Any]], int | None]:
    """Return a function that finds the first array whose memory may overlap one's, or None.

    It serves arrays of these kinds. Tensors without memory overlap nothing, and neither does None.
    """
    present = [at for at, array in enumerate(others) if array is not None]
    arrays = [isinstance(array, np.ndarray) for array in (one, *[others[at] for at in present])]
    if any(arrays):
        mixed = not all(arrays)

        def by_views(one: Any, others: Sequence[Any]) -> int | None:
            if mixed:
                one, *others = map(_view, (one, *others))
            for at in present:
                if np.may_share_memory(one, others[at]):
                    return at
            return None

        return by_views
    near = []
    if _has_memory(one) and not private().transforming():
        own, held = _span(one), [at for at in present if _has_memory(others[at])]
        here = [(at, _span(others[at])) for at in held if others[at].device == one.device]
        near = [(at, span) for at, span in here if own and span]

    def by_addresses(one: Any, others: Sequence[Any]) -> int | None:
        start = one.data_ptr() if near else 0
        for at, span in near:
            begin = others[at].data_ptr()
            if start < begin + span and begin < start + own:
                return at
        return None

    return by_addresses


def need_apart(op: str, name: str, array: Any, others: dict[str, Any]) -> None:
    """Raise ValueError if an array that is written to may share memory with others, by name."""
    values = [*others.values()]
    at = None if traced() else sharing(array, values)(array, values)
    if at is not None:
        refuse(ValueError, op, name, f"shares memory with {[*others][at]}", "not")


def _view(array: Any) -> np.ndarray:
    """Return an array as it is, and a tensor's memory on the CPU as an array."""
    if isinstance(array, np.ndarray):
        return array
    held = _has_memory(array) and array.is_cpu and not private().transforming()
    return bridge().tensors.as_numpy(array) if held else np.empty(0)


def _has_memory(tensor: Any) -> bool:
    """Return whether a tensor has an address: one that torch traces has none."""
    torch = sys.modules["torch"]
    # Kernels get subclasses that leave operations to torch.
    own = getattr(type(tensor), "__torch_dispatch__", None)
    return own is torch.Tensor.__torch_dispatch__ and not tensor.is_meta


def _span(tensor: Any) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if tensor.is_contiguous() or 0 in tensor.shape:
        return int(tensor.nbytes)
    last = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return (sum(last) + 1) * int(tensor.itemsize)


def holds(op: str, name: str, state: Any, x: Any, other: str = "x") -> None:
    """Raise TypeError unless a state can take the values of x, called `other`, in place."""
    if promoted((state, x)) != state.dtype:
        should = f"hold {dtype_name(x.dtype)}, the dtype of {other}"
        refuse(TypeError, op, name, f"has dtype {dtype_name(state.dtype)}", should)


def no_overlap(op: str, name: str, array: Any) -> None:
    """Raise ValueError if two elements of an array may share memory."""
    if is_traced(array) or 0 in array.shape:
        return
    strides, extent = (array.stride(), 1) if is_tensor(array) else (array.strides, array.itemsize)
    for stride, size in sorted((abs(s), n) for s, n in zip(strides, array.shape, strict=True)):
        if size > 1:
            if stride < extent:
                refuse(ValueError, op, name, "overlaps itself", "have memory for every element")
            extent = stride * size


def writable(op: str, name: str, tensor: Any) -> None:
    """Raise ValueError for a tensor of inference mode outside of it.

    Torch would write to it, and only then refuse to.
    """
    if traced():
        return
    if tensor.is_inference() and not sys.modules["torch"].is_inference_mode_enabled():
        was, should = "was made in inference mode", "be a clone, to be written to"
        refuse(ValueError, op, name, was, should)


def alike(op: str, name: str, value: Any, other: str, like: Any) -> None:
    """Raise unless an array is of the same framework and on the same device as another."""
    if is_tensor(value) != is_tensor(like):
        was, should = (
            "torch tensor" if is_tensor(array) else "NumPy array" for array in (value, like)
        )
        refuse(TypeError, op, name, f"is a {was}", f"be a {should}, as {other} is")
    same_device(op, name, device_of(value), other, device_of(like))


def as_array(op: str, name: str, value: Any) -> Any:
    """Return `value` as a NumPy array, or a tensor unchanged. Raises TypeError or ValueError."""
    if type(value) is np.ndarray:
        return value
    if is_tensor(value):
        own_memory(op, name, value)
        return value
    if value is None:
        refuse(TypeError, op, name, "is None", "be an array")
    if isinstance(value, np.ma.MaskedArray):
        was = "is a masked array, whose mask would be ignored"
        refuse(TypeError, op, name, was, "be a plain array, made by .filled(...)")
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(f"{op}: {name} is ragged; it should be an array") from None
    except (TypeError, RuntimeError) as error:  # from elements, such as tensors on a GPU
        kind = type(value).__name__
        raise TypeError(f"{op}: {name} is a {kind}; it should be an array: {error}") from None


def arrays_only(op: str, name: str, value: Any, also: str = "") -> None:
    """Raise TypeError if `value` is a tensor where NumPy arrays alone are served."""
    if is_tensor(value):
        refuse(TypeError, op, name, "is a torch tensor", f"be a NumPy array{also}")


def cotangent(op: str, value: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return the cotangent of an output of a shape and dtype. Raises TypeError or ValueError."""
    name = "the cotangent"
    arrays_only(op, name, value)
    value = as_array(op, name, value)
    kinds, should = ("fiuc", "a number") if dtype.kind == "c" else ("fiu", "float or int")
    if value.dtype.kind not in kinds:
        refuse(TypeError, op, name, f"has dtype {value.dtype}", f"be {should}")
    of_shape(op, name, value, shape)
    array: np.ndarray = value.astype(dtype, copy=False)
    return array


def values(op: str, name: str, value: Any) -> np.ndarray:
    """Return an argument without derivative as a NumPy array. Raises TypeError or ValueError."""
    value = as_array(op, name, value)
    no_derivative(op, name, value)
    _not_on_meta(op, name, value)
    return on_host(value)


def on_host(value: Any) -> np.ndarray:
    """Return an array or a tensor as a NumPy array; a tensor's floats as float64."""
    array: np.ndarray = bridge().tensors.values(value) if is_tensor(value) else value
    return array


def _not_on_meta(op: str, name: str, value: Any) -> None:
    if is_tensor(value) and value.is_meta:
        refuse(TypeError, op, name, "is on meta", "be a tensor with values")


def no_derivative(op: str, name: str, value: Any) -> None:
    """Raise ValueError if a derivative by a constant is asked for, in either mode."""
    if not is_tensor(value):
        return
    asks = "requires grad" if value.requires_grad else "has a tangent"
    if value.requires_grad or bridge().modes.has_tangent((value,)):
        raise ValueError(f"{op}: {name} {asks}; it is a constant, pass x.detach()")


def outside_of_transforms(op: str, name: str, value: Any) -> Any:
    """Return a constant without the wrappers of torch.func."""
    if is_tensor(value) and private().transforming():
        return bridge().tensors.unwrapped(op, name, value)
    return value


def indices(op: str, name: str, value: Any) -> Any:
    """Return `value` as an array or tensor of int32 or int64. Raises TypeError or ValueError."""
    is_list, value = isinstance(value, (list, tuple)), as_array(op, name, value)
    if is_list and not value.size:
        value = value.astype(np.int64)
    _not_on_meta(op, name, value)
    if is_tensor(value):
        value = value.resolve_neg()
    _of_dtypes(op, name, value, ("int32", "int64"), "int32 or int64")
    return value


def floats(op: str, name: str, value: Any, *, or_integers: bool = False) -> Any:
    """Return `value` as a floating-point array or tensor. Raises TypeError or ValueError."""
    value = as_array(op, name, value)
    if or_integers and _INTEGER.fullmatch(dtype_name(value.dtype)):
        return value
    also = "bool, an integer, " if or_integers else ""
    if is_tensor(value):
        should = f"a dense tensor of {also}float32, float64, bfloat16 or float16"
        _of_dtypes(op, name, value, _FLOATS, should)
    else:
        should = f"{also}float32 or float64, in native byte order"
        _of_dtypes(op, name, value, _FLOATS[:2], should)
    return value


def _of_dtypes(op: str, name: str, value: Any, dtypes: Sequence[str], should: str) -> None:
    dtype = dtype_name(value.dtype)
    if dtype not in dtypes:
        refuse(TypeError, op, name, f"has dtype {dtype}", f"be {should}")


def of_shape(op: str, name: str, value: Any, shape: tuple[int | str, ...]) -> None:
    """Raise ValueError unless `value` has `shape`, in which a string stands for any size."""
    got = value.shape
    if len(got) == len(shape):
        for have, want in zip(got, shape, strict=True):
            if have != want and not isinstance(want, str):
                break
        else:
            return
    should = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    refuse(ValueError, op, name, f"has shape {tuple(got)}", f"be ({should})")


def one_of(op: str, name: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """Raise TypeError or ValueError unless `value` is one of `choices`."""
    named = value is None or isinstance(value, str)
    if named and value in choices:
        return
    shown = repr(value) if named else f"a {type(value).__name__}"
    error = ValueError if named else TypeError
    refuse(error, op, name, f"is {shown}", f"be one of {', '.join(map(str, choices))}")


def size(op: str, name: str, value: Any, *, bits: int = 63, least: int = 0) -> int:
    """Return `value` as an int from `least` to `bits` bits. Raises TypeError or ValueError.

    With 60 bits, the bytes of so many 8-byte elements still have 63 bits.
    """
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].SymInt):
        # A comparison would make the size a constant of the compiled graph.
        return value
    try:
        if isinstance(value, bool) or (is_tensor(value) and dtype_name(value.dtype) == "bool"):
            raise TypeError
        number = operator.index(value)
    except (TypeError, RuntimeError):  # the latter from a meta tensor
        raise TypeError(f"{op}: {name} is a {type(value).__name__}; it should be an int") from None
    if not least <= number < 1 << bits:
        # Python refuses to write more than 4300 digits, and nobody reads so many.
        shown = number if -(1 << 64) < number < 1 << 64 else f"of {number.bit_length()} bits"
        refuse(ValueError, op, name, f"is {shown}", f"be at least {least}, and below 2**{bits}")
    return number


def at_least_one(op: str, **sizes: Any) -> None:
    """Raise TypeError or ValueError unless sizes are None or positive ints."""
    for name, value in sizes.items():
        if value is not None:
            size(op, name, value, least=1)


def real(op: str, name: str, value: Any) -> float:
    """Return a real number as a float. Raises TypeError, or ValueError if it is too large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(TypeError, op, name, f"is a {type(value).__name__}", "be a number")
    try:
        return float(value)
    except OverflowError:
        refuse(ValueError, op, name, "is beyond the largest float", "be a finite number")


def positive(op: str, name: str, value: Any) -> float:
    """Return a positive number as a float. Raises ValueError."""
    known = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number = real(op, name, value) if known else math.nan
    if not 0 < number < math.inf:
        refuse(ValueError, op, name, f"is {value!r}", "be a positive number")
    return number


def flag(op: str, name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        refuse(TypeError, op, name, f"is a {type(value).__name__}", "be True or False")


def add_device(op: str, devices: dict[str, str], name: str, value: Any) -> None:
    """Add a tensor's device to others by name. Raises ValueError unless it is theirs."""
    if is_tensor(value):
        for other, device in devices.items():
            same_device(op, name, device_of(value), other, device)
        devices[name] = device_of(value)


def same_device(op: str, name: str, device: str, other: str, other_device: str) -> None:
    """Raise ValueError unless two arguments share a device: no data moves behind a user's back."""
    if device != other_device:
        refuse(ValueError, op, name, f"is on {device}", f"be on {other_device}, where {other} is")
