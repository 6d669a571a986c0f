"""Ops, backends, and the one resolver that chooses between them.

A `Primitive` is a function of arrays that kernels implement. Its pullback is made of primitives,
so that a gradient has kernels and a gradient of its own. `op` makes of a primitive what users
call: a function that checks its arguments, with ``.vjp`` and ``.explain``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast, overload

import numpy as np

from fusedops._frame import memory
from fusedops._frame.check import (
    as_array,
    device_of,
    dtype_name,
    is_tensor,
    of_shape,
    one_of,
    overlap,
    own_memory,
    promoted,
    reference,
    same_device,
    traced,
)

if TYPE_CHECKING:
    from typing_extensions import Self


F = TypeVar("F", bound=Callable[..., Any])
F_co = TypeVar("F_co", bound=Callable[..., Any], covariant=True)


class BackendUnavailable(RuntimeError):
    """No backend, or not the one that was asked for, can serve a call; the message says why."""


class Request(NamedTuple):
    """What a choice of backend depends on."""

    op: str
    framework: str
    device: str
    dtype: Any
    forced: str | None


@dataclass(frozen=True)
class Backend:
    """A row of the backend table.

    `speaks` is the framework whose arrays the kernels take; importing `module` registers them.
    `why_not` returns a sentence where the backend can't serve a request, and None where it can.
    A backend without a module evaluates the formula that a primitive declares.
    """

    name: str
    speaks: str
    module: str | None
    why_not: Callable[[Request], str | None]


@functools.cache
def import_error(package: str) -> str | None:
    """Return why a third-party package can't be used here, or None where it can."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # a missing library is an OSError; none of this code is ours
        return f"{package} is installed but does not import: {error}"
    return None


def _needs_cpu(request: Request) -> str | None:
    if request.device == "cpu":
        return None
    return f"it runs on the CPU; the tensors are on {request.device}"


def _needs_torch(request: Request) -> str | None:
    if request.framework == "torch":
        return None
    return "it takes torch tensors; these are NumPy arrays"


def _needs_extension(request: Request) -> str | None:
    from cpukern import isa

    return _needs_cpu(request) or isa.why_not()


def _needs_numba(request: Request) -> str | None:
    return _needs_cpu(request) or import_error("numba")


def _needs_gpu(request: Request) -> str | None:
    if reason := _needs_torch(request):
        return reason
    if request.device == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "it runs on a GPU; the tensors are on the CPU"
        if request.forced != "triton":
            return "it interprets kernels on the CPU only when asked for by name"
    elif request.device not in ("cuda", "xpu"):
        return f"it runs on cuda, rocm and xpu; the tensors are on {request.device}"
    return import_error("triton")


#: In order of preference.
BACKENDS = (
    Backend("triton", "torch", "gpukern", _needs_gpu),
    Backend("cython", "numpy", "cpukern.cython_backend", _needs_extension),
    Backend("numba", "numpy", "cpukern.numba_backend", _needs_numba),
    Backend("torch", "torch", None, _needs_torch),
    Backend("numpy", "numpy", None, _needs_cpu),
)
_NAMES = tuple(backend.name for backend in BACKENDS)

#: Public ops, and classes of packed arguments, by name: graphs hold nothing but names.
ops: dict[str, Callable[..., Any]] = {}
packed: dict[str, type[Packed]] = {}
_primitives: dict[str, Primitive] = {}
_kernels: dict[tuple[str, str], Callable[..., None]] = {}
# By op, framework, kind of device, dtype and name asked for, of which there are few.
_chosen: dict[Request, tuple[Backend, Callable[..., Any]]] = {}
takes_bfloat16: set[Callable[..., None]] = set()
_override: ContextVar[str | None] = ContextVar("fusedops_backend", default=None)


def register(
    primitive: str, backend: str, *, bfloat16: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the decorated function to be the kernel of `primitive` on `backend`.

    It is called with the primitive's arrays, its static arguments, and one array to fill for
    every output, or None for an output that nobody wants. On the CPU all of them have one dtype.
    With `bfloat16` a CPU kernel takes these too, as the uint16 of their bits.
    """

    def declare(kernel: Callable[..., None]) -> Callable[..., None]:
        _kernels[primitive, backend] = kernel
        if bfloat16:
            takes_bfloat16.add(kernel)
        return kernel

    return declare


def _kernel(backend: Backend, primitive: str) -> Callable[..., Any] | None:
    if backend.module is None:
        return _primitives[primitive].formula
    importlib.import_module(backend.module)
    return _kernels.get((primitive, backend.name))


def why_not(backend: Backend, request: Request) -> str | None:
    """Return why a backend can't serve a request, or None where it can."""
    reason = backend.why_not(request)
    if reason is None and _kernel(backend, request.op) is None:
        return f"it has no kernel for {request.op}"
    return reason


def forced(backend: str | None, op: str = "fusedops") -> str | None:
    """Return the backend asked for: by argument, by `use_backend`, or by environment.

    The environment is read once, at first use.
    """
    if backend is not None:
        one_of(op, "backend", backend, _NAMES)
        return backend
    return _override.get() or _from_environment()


@functools.cache
def _from_environment() -> str | None:
    name = os.environ.get("FUSEDOPS_BACKEND")
    if name and name not in _NAMES:
        should = f"it should be one of {', '.join(_NAMES)}"
        raise ValueError(f"FUSEDOPS_BACKEND is {name!r}; {should}")
    return name or None


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Ask for one backend in every call of a ``with`` block, in this thread or task.

    The backward pass of a call uses the backend that its forward pass asked for.

    Parameters
    ----------
    name : str
        ``"triton"``, ``"cython"``, ``"numba"``, ``"torch"`` or ``"numpy"``.

    Returns
    -------
    context manager
        For a ``with`` statement; blocks may be nested, and the innermost counts.

    Raises
    ------
    TypeError, ValueError
        If there is no such backend. A backend that can't serve a call raises
        `BackendUnavailable` there.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> square = np.array([[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]])
    >>> with fusedops.use_backend("numpy"):
    ...     fusedops.planarity_nll.explain(square, [([[0, 1, 2, 3]], [0.02])]).backend
    'numpy'
    """
    one_of("use_backend", "name", name, _NAMES)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def choose(request: Request) -> tuple[Backend, Callable[..., Any]]:
    """Return the first backend that can serve a request, and its kernel.

    Raises
    ------
    BackendUnavailable
        With every backend's reason.
    """
    if found := _chosen.get(request):
        return found
    for backend in BACKENDS:
        if request.forced in (None, backend.name) and why_not(backend, request) is None:
            break
    else:
        raise BackendUnavailable(str(_explain(request, None)))
    if request.device == "cuda" and backend.name == "torch" and request.forced is None:
        # Where it is only that there is no kernel, nothing can be done about it.
        reason = BACKENDS[0].why_not(request)
        if reason:
            warnings.warn(
                f"{request.op}: plain torch serves this CUDA tensor, because of triton: {reason}",
                RuntimeWarning,
                stacklevel=4,
            )
    kernel = _kernel(backend, request.op)
    assert kernel is not None  # or the backend had been asked why
    _chosen[request] = backend, kernel
    return backend, kernel


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why not the others; `str` of it is a small table."""

    request: Request
    backend: str | None
    reasons: dict[str, str | None]

    def __str__(self) -> str:
        op, framework, device, dtype, asked = self.request
        served = self.backend or "no backend can serve"
        lines = [f"{op} on {device}, {dtype_name(dtype)}, {framework}: {served}"]
        for name, reason in self.reasons.items():
            if name == self.backend:
                reason = "asked for" if asked else "the first that can serve"
            elif reason is None:
                reason = f"could serve, but {asked} was asked for" if asked else "could serve too"
            lines.append(f"  {name:<8}{reason}")
        return "\n".join(lines)


def _explain(request: Request, chosen: str | None) -> Explanation:
    return Explanation(request, chosen, {b.name: why_not(b, request) for b in BACKENDS})


def explain(request: Request) -> Explanation:
    """Return what `choose` does with a request, with every backend's reason."""
    try:
        backend = choose(request)[0].name
    except BackendUnavailable:
        backend = None
    return _explain(request, backend)


def bridge() -> Any:
    """Return ``fusedops._frame.bridge``, which is imported where tensors are met and not before."""
    # A statement, because torch.compile traces it before and after the first time.
    from fusedops._frame import bridge as torch_bridge

    return torch_bridge


class Packed:
    """An argument that is checked and laid out once and used in many calls.

    A subclass names its arrays in `_fields`. Their NumPy form serves the CPU; a copy on another
    device is made by `to`, never by a call. `_given` and `_options` name the constructor's arrays
    and its other arguments.
    """

    _fields: tuple[str, ...]
    _sizes: tuple[str, ...]
    _given: tuple[str, ...] = ()
    _options: tuple[str, ...] = ()
    device = "cpu"
    tensors: Any = None
    # Tensors of the caller's that a backward pass reads.
    borrowed: tuple[Any, ...] = ()
    # The constructor's other arguments, where `tensors` are its arrays, for a graph to read.
    unread: dict[str, Any] | None = None

    def __init_subclass__(cls) -> None:
        packed[cls.__name__] = cls
        cls.__init__ = outside_of_graphs(cls.__init__)  # type: ignore[method-assign]

    def tensors_here(self) -> list[Any]:
        """Return the arrays as torch tensors on this object's device."""
        if self.tensors is None:
            self.tensors = bridge().as_tensors([getattr(self, name) for name in self._fields])
        return self.tensors

    def to(self, device: Any) -> Self:
        """Return the same object on a torch device; this one where it is there already.

        Parameters
        ----------
        device : str or torch.device
            Such as ``"cuda"``.

        Returns
        -------
        Packed
            Of the same class.

        Examples
        --------
        >>> import fusedops, torch
        >>> edges = fusedops.Edges([[0, 1], [1, 0]], num_nodes=2)
        >>> edges.to(torch.device("cpu")) is edges
        True
        """
        return bridge().move(self, device)

    @classmethod
    def read(cls, op: str, *tensors: Any, **options: Any) -> Self:
        """Return the object that tensors describe, which an op was given in its place.

        Reading from a GPU waits for it: what is there is read once, until it is written to. A graph
        reads whenever it runs.
        """
        if traced():
            return cls._unread(tensors, options)
        argument = cls._given[0]
        for name, tensor in zip(cycle(cls._given), tensors, strict=False):
            own_memory(op, name, tensor)
        torch = sys.modules["torch"]
        if torch._C._are_functorch_transforms_active():
            if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
                raise TypeError(
                    f"{op}: {argument} is what torch.func maps over or differentiates by; it "
                    f"should be {cls.__name__}, or a tensor from outside"
                )
            # What is made in here is not torch.func's to keep track of.
            with torch._C._DisableFuncTorch():
                return cls._read(op, tensors, options)
        return cls._read(op, tensors, options)

    @classmethod
    def _read(cls, op: str, tensors: Sequence[Any], options: dict[str, Any]) -> Self:
        first, *others = tensors
        if first.is_cpu:
            return cls.unchecked(*tensors, **options)
        if any(tensor.is_inference() for tensor in tensors):
            return cls.made_of(*tensors, **options)
        where = [(t._version, t.data_ptr(), t.shape, t.stride()) for t in tensors]
        stamp = cls, where, options
        read = bridge().packed_read.get(first)
        # The first is the key; what has the address of another may be one that came after it.
        if (
            read is None
            or read[0] != stamp
            or any(r() is not t for r, t in zip(read[1], others, strict=False))
        ):
            cls._refuse_capture(op)
            read = stamp, [weakref.ref(t) for t in others], cls.made_of(*tensors, **options)
            bridge().packed_read[first] = read
        return read[2]

    @classmethod
    def _refuse_capture(cls, op: str) -> None:
        if sys.modules["torch"].cuda.is_current_stream_capturing():
            raise TypeError(
                f"{op}: {cls._given[0]} is a tensor; inside a CUDA graph it should be "
                f"{cls.__name__}, made outside"
            )

    @classmethod
    def made_of(cls, *tensors: Any, **options: Any) -> Self:
        """Return the object that tensors describe."""
        return cls(*tensors, **options)

    @classmethod
    def unchecked(cls, *tensors: Any, **options: Any) -> Self:
        """Return the object that tensors on the CPU describe, for one call."""
        return cls.made_of(*tensors, **options)

    @classmethod
    def _unread(cls, tensors: Sequence[Any], options: dict[str, Any]) -> Self:
        """Return an object for a graph, with the sizes that follow from those of its tensors."""
        self = cls.__new__(cls)
        self.tensors = list(tensors)
        self.device = device_of(tensors[0])
        self.unread = options
        self.foresee(*tensors, **options)
        return self

    @classmethod
    def read_in_graph(cls, op: str, tensors: Sequence[Any], options: Sequence[int]) -> Self:
        """Return the object that a graph's tensors describe."""
        if not traced() and tensors[0].is_cuda:
            # A recording would keep the object of the tensors that it was made with.
            cls._refuse_capture(op)
        return cls.read(op, *tensors, **dict(zip(cls._options, options, strict=True)))

    def foresee(self, *tensors: Any, **options: Any) -> None:
        """Set the sizes that are known before the tensors' values are."""

    def sizes(self) -> list[int]:
        """Return the numbers that go with the arrays."""
        if self.unread is not None:
            return [self.unread[name] for name in self._options]
        return [getattr(self, name) for name in self._sizes]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any], sizes: Sequence[int]) -> Self:
        """Return an object around tensors that another one was taken apart into."""
        self = cls.__new__(cls)
        self.tensors = list(tensors)
        self.device = str(tensors[0].device)
        for name, size in zip(cls._sizes, sizes, strict=True):
            setattr(self, name, size)
        return self

    def __getattr__(self, name: str) -> Any:
        # Only reached by an array that exists as a tensor so far.
        if name in type(self)._fields and self.device == "cpu" and self.tensors is not None:
            array = bridge().as_numpy(self.tensors[self._fields.index(name)])
            setattr(self, name, array)
            return array
        raise AttributeError(f"{type(self).__name__} on {self.device} has no {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        if self.device != "cpu":
            return dict(self.__dict__)
        arrays = {name: getattr(self, name) for name in self._fields}
        return {**self.__dict__, **arrays, "tensors": None}


class Call(NamedTuple):
    """A primitive with all but its arrays; what a pullback is told about the call it belongs to."""

    primitive: Primitive
    static: tuple[Any, ...]
    forced: str | None
    registered: bool = False

    def other(
        self, primitive: Primitive, arrays: Sequence[Any], wanted: Sequence[bool] | None = None
    ) -> tuple[Any, ...]:
        """Evaluate another primitive of the same static arguments, differentiably in torch."""
        wanted = primitive.all_wanted if wanted is None else tuple(wanted)
        return self._replace(primitive=primitive)(arrays, wanted)

    def __call__(
        self, arrays: Sequence[Any], wanted: tuple[bool, ...], out: Any = None
    ) -> tuple[Any, ...]:
        """Return the outputs; one that isn't wanted may be None.

        `out` is filled by the first of those that are.
        """
        if is_tensor(reference(arrays)):
            return bridge().run(self, arrays, wanted, out)
        request = Request(self.primitive.name, "numpy", "cpu", promoted(arrays), self.forced)
        return self.on_numpy(*choose(request), arrays, wanted, out)

    def on_numpy(
        self,
        backend: Backend,
        kernel: Callable[..., Any],
        given: Sequence[Any],
        wanted: tuple[bool, ...],
        out: np.ndarray | None = None,
    ) -> tuple[Any, ...]:
        """Run a NumPy-speaking kernel on aligned arrays of one dtype, and make its outputs."""
        primitive = self.primitive
        dtype = promoted(given)
        fit = [a is None or (a.dtype == dtype and a.flags.aligned) for a in given]
        # Compiled code may fault where a number's address is no multiple of its size.
        arrays = [
            array if fits else np.array(array, dtype)
            for array, fits in zip(given, fit, strict=True)
        ]
        described = primitive.describe(given, self.static)
        if backend.module is None:
            outputs = list(kernel(*arrays, *self.static))
        else:
            given_out = out is not None and out.dtype == dtype and out.flags.aligned
            filled = wanted.index(True) if given_out else None
            outputs = [
                None
                if not want or not output
                else out
                if i == filled
                else allocate(memory.empty, output[0], dtype)
                for i, (want, output) in enumerate(zip(wanted, described, strict=True))
            ]
            kernel(*arrays, *self.static, *outputs)
        if not all(fit):
            for at, name in enumerate(primitive.arrays):
                if name in primitive.mutates and arrays[at] is not given[at]:
                    given[at][...] = arrays[at]
            outputs = [
                array
                if array is None
                else array.astype(output[1] or reference(given).dtype, copy=False)
                for array, output in zip(outputs, described, strict=True)
            ]
        if out is not None:
            filled = wanted.index(True)
            if outputs[filled] is not out:
                out[...] = outputs[filled]
                outputs[filled] = out
        return tuple(outputs)


#: Tests set this, so that an output element which no kernel writes shows.
poison = False


def allocate(empty: Callable[..., Any], shape: Any, dtype: Any) -> Any:
    """Return a new output array; the only place where the frame makes one."""
    array = empty(shape, dtype=dtype)
    if poison:
        # The bits of bfloat16 are uint16; these are its NaN.
        array[...] = 0x7FC0 if dtype == np.uint16 else float("nan")
    return array


class Primitive:
    """A function of arrays that kernels implement.

    Parameters
    ----------
    name : str
        What kernels register under.
    arrays, outputs : tuple of str
        The names of the differentiable arrays, and of the outputs. Arrays may be None in a call,
        but not all.
    static : dict of str to type
        The other arguments: subclasses of `Packed`, which may be None, `str`, `int` or `float`.
    describe : callable
        From the arrays and the static arguments to a (shape, dtype name) for every output; None
        for that of the first array given. None for an output that there isn't without some array.
    formula : callable
        The definition, in code that NumPy and torch both run: the truth which every kernel is held
        to. Returns a tuple of all outputs.
    pullback : callable, optional
        From (call, arrays, residuals, cotangents, needed) to a cotangent for every array, in terms
        of primitives; `needed` says which of them are asked for. A cotangent that is None is zero.
        Without one, torch differentiates the formula.
    residual : slice
        Which outputs the pullback needs.
    mutates : tuple of str
        The arrays that are updated in place; such a primitive has no derivative.
    sixteen_bits : bool
        Whether it computes on 16-bit floats as they are. Otherwise they are cast to float32 on the
        CPU and under autocast, which leaves the dtypes of one that does alone.
    """

    def __init__(
        self,
        name: str,
        *,
        arrays: tuple[str, ...],
        static: dict[str, type],
        outputs: tuple[str, ...],
        describe: Callable[..., Sequence[Any]],
        formula: Callable[..., tuple[Any, ...]],
        pullback: Callable[..., tuple[Any, ...]] | None = None,
        residual: slice = slice(0),
        mutates: tuple[str, ...] = (),
        sixteen_bits: bool = False,
    ) -> None:
        self.name = name
        self.arrays = arrays
        self.static = static
        self.outputs = outputs
        self.all_wanted = (True,) * len(outputs)
        self.describe = describe
        self.formula = formula
        self.pullback = pullback
        self.residual = residual
        self.saved = tuple(i in range(len(outputs))[residual] for i in range(len(outputs)))
        self.mutates = mutates
        self.sixteen_bits = sixteen_bits
        _primitives[name] = self

    def with_saved(self, wanted: Sequence[bool]) -> tuple[bool, ...]:
        """Return which outputs to compute for those that are wanted and for their pullback."""
        return tuple([a or b for a, b in zip(wanted, self.saved, strict=True)])


def primitives() -> dict[str, Primitive]:
    """Return every declared primitive by name."""
    return _primitives


class Op(Generic[F_co]):
    """What `op` returns, for type checkers: a function with more attributes."""

    __name__: str
    __doc__: str
    __call__: F_co
    __wrapped__: Callable[..., Any]
    primitive: Primitive

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., tuple[np.ndarray, ...]]]:
        """Return the value and its pullback, from a cotangent to gradients."""
        raise NotImplementedError

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Return which backend serves the call, and why."""
        raise NotImplementedError


def _compiling() -> bool:
    """Return whether torch.compile traces this frame, or would trace the ones that it calls."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def outside_of_graphs(function: F) -> F:
    """Return a function that torch.compile doesn't trace: its graph ends where it is called."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (bridge().uncompiled(function) if _compiling() else function)(*args, **kwargs)

    return cast(F, call)


def to_run(arrays: tuple[Any, ...], static: tuple[Any, ...], shown: str | tuple[str, ...]) -> Any:
    """Return what a function under `op` returns; its annotation is that of the op's result."""
    return arrays, static, shown


def _named_arrays(name: str | None, value: Any) -> list[tuple[str | None, Any]]:
    """Return the arrays of an argument under its name; None for the names of a packed one's."""
    if isinstance(value, np.ndarray) or is_tensor(value):
        return [(name, value)]
    if not isinstance(value, Packed):
        return []
    parts = value.tensors or [getattr(value, field) for field in value._fields]
    return [(name or field, part) for field, part in zip(value._fields, parts, strict=False)]


def _check_out(
    name: str,
    call: Call,
    given: Mapping[str, Any],
    arrays: Sequence[Any],
    names: Sequence[str],
    output: int,
    out: Any,
) -> None:
    """Raise unless `out` can be filled with an output."""
    first = reference(arrays)
    shape, dtype = call.primitive.describe(arrays, call.static)[output]
    dtype = dtype or dtype_name(first.dtype)
    plain = isinstance(out, np.ndarray) and not isinstance(out, np.ma.MaskedArray)
    if not (is_tensor(out) if is_tensor(first) else plain):
        kind = "torch tensor" if is_tensor(first) else "NumPy array"
        raise TypeError(f"{name}: out is a {type(out).__name__}; it should be a {kind}")
    at = next(at for at, array in enumerate(arrays) if array is first)
    same_device(name, "out", device_of(out), names[at], device_of(first))
    of_shape(name, "out", out, tuple(shape))
    if dtype_name(out.dtype) != dtype:
        raise TypeError(f"{name}: out has dtype {dtype_name(out.dtype)}; it should be {dtype}")
    if is_tensor(out):
        torch = sys.modules["torch"]
        contiguous, writable = out.is_contiguous(), True
        inputs = [*arrays, out]
        if torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in inputs):
            raise RuntimeError(
                f"{name}: out is given and an argument requires grad; it should be called without "
                "out, or under torch.no_grad"
            )
    else:
        contiguous, writable = out.flags.c_contiguous, out.flags.writeable
    if not contiguous or not writable:
        what = "read-only" if contiguous else "not contiguous"
        raise ValueError(f"{name}: out is {what}; it should be contiguous and writable")
    # An argument may have been converted, to an array of its own or to a view.
    held = (*((None, value) for value in call.static), *zip(names, arrays, strict=True))
    once = {id(value): (argument, value) for argument, value in (*held, *given.items())}
    for argument, value in once.values():
        for part, array in _named_arrays(argument, value):
            if overlap(out, array):
                raise ValueError(f"{name}: out shares memory with {part}; it should not")


def _summed(array: Any, given: Any) -> Any:
    """Return the transpose of a broadcast of `given`, in its dtype if it has floats."""
    given = np.asarray(given)
    more = array.ndim - given.ndim
    axes = (*range(more), *(more + i for i, n in enumerate(given.shape) if n == 1))
    summed = array.sum(axes).reshape(given.shape)
    return summed.astype(given.dtype, copy=False) if given.dtype.kind == "f" else summed


def _cotangent(op: str, value: Any, like: Any) -> np.ndarray:
    """Return a checked cotangent of a NumPy output, in its dtype."""
    if is_tensor(value):
        raise TypeError(f"{op}: the cotangent is a torch tensor; it should be a NumPy array")
    value = as_array(op, "the cotangent", value)
    if value.dtype.kind not in "fiu":
        raise TypeError(f"{op}: the cotangent has dtype {value.dtype}; it should be float or int")
    of_shape(op, "the cotangent", value, like.shape)
    return value.astype(like.dtype, copy=False)


def _no_gradient(name: str, primitive: Primitive) -> str:
    return (
        f"{name} has no gradient: it updates {', '.join(primitive.mutates)} in place; "
        "call it under torch.no_grad, or on arrays that don't require grad"
    )


@overload
def op(
    primitive: Primitive,
    *,
    names: Mapping[str, str] | None = None,
    broadcasts: tuple[str, ...] = (),
) -> Callable[[F], Op[F]]: ...
@overload
def op(
    primitive: Primitive,
    *,
    names: Mapping[str, str] | None = None,
    broadcasts: tuple[str, ...] = (),
    overloads: type[F],
) -> Callable[[Callable[..., Any]], Op[F]]: ...
def op(
    primitive: Primitive,
    *,
    names: Mapping[str, str] | None = None,
    broadcasts: tuple[str, ...] = (),
    overloads: Any = None,
) -> Any:
    """Make a public op of a function that checks its arguments.

    The decorated function returns `to_run`: the arrays and the static arguments of `primitive`, and
    the name of the output that the op returns, or a tuple of names. Its signature, which is the
    op's, ends in ``backend`` and, unless a number is returned, ``out``, an array for the output
    shown first: these two are served here. `names` says what the primitive's arrays are called in
    that signature, where that differs, and `broadcasts` which of them the function broadcasts:
    their gradients have the shapes and dtypes given. `overloads` is a protocol for type checkers,
    where one signature doesn't say what is returned.
    """

    outputs = primitive.outputs
    arguments = [(names or {}).get(name, name) for name in primitive.arrays]
    alone = {shown: tuple([name == shown for name in outputs]) for shown in outputs}

    def declare(check: Callable[..., Any]) -> Any:
        signature = inspect.signature(check)
        takes_out = "out" in signature.parameters

        def bind(args: Any, kwargs: Any, backend: str | None) -> tuple[Any, Call, Any]:
            arrays, static, shown = check(*args, **kwargs)
            if is_tensor(reference(arrays)) and traced():
                # A compiled graph looks for a backend when it runs, not when it is traced.
                return arrays, Call(primitive, static, backend, True), shown
            return arrays, Call(primitive, static, forced(backend, call.__name__)), shown

        def names_of(shown: Any) -> tuple[str, ...]:
            return (shown,) if isinstance(shown, str) else shown

        def wanted(shown: Any) -> tuple[bool, ...]:
            return alone[shown] if isinstance(shown, str) else tuple([n in shown for n in outputs])

        def shown_of(results: Sequence[Any], shown: Any) -> Any:
            if not isinstance(shown, str):
                return tuple([results[outputs.index(name)] for name in shown])
            value = results[outputs.index(shown)]
            # A NumPy scalar, not an array of no dimensions.
            return value if is_tensor(value) or value.ndim else value[()]

        # Any, because functions have attributes that checkers don't know of.
        wrapped: Any = functools.wraps(check)

        @wrapped
        def call(*args: Any, out: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
            if _compiling():
                options = {"out": out, "backend": backend, **kwargs}
                return bridge().compiled(call, args, options)
            arrays, bound, shown = bind(args, kwargs, backend)
            if out is not None:
                if not takes_out:
                    raise TypeError(f"{call.__name__}: it returns a number and takes no out")
                filled = outputs.index(names_of(shown)[0])
                given = {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
                _check_out(call.__name__, bound, given, arrays, arguments, filled, out)
            return shown_of(bound(arrays, wanted(shown), out), shown)

        def vjp(
            *args: Any, backend: str | None = None, **kwargs: Any
        ) -> tuple[Any, Callable[..., tuple[Any, ...]]]:
            if "out" in kwargs:
                raise TypeError(f"{call.__name__}.vjp: it takes no out")
            arrays, bound, shown = bind(args, kwargs, backend)
            for name, array in zip(arguments, arrays, strict=True):
                if is_tensor(array):
                    raise TypeError(
                        f"{call.__name__}.vjp: {name} is a torch tensor; it should be a NumPy "
                        "array, tensors have autograd"
                    )
            pull_back = primitive.pullback
            if primitive.mutates:
                raise TypeError(_no_gradient(call.__name__, primitive))
            assert pull_back is not None  # what has no derivative was sent away
            results = bound(arrays, primitive.with_saved(wanted(shown)))
            needed = tuple(array is not None for array in arrays)
            bound_to = signature.bind(*args, **kwargs).arguments if broadcasts else {}
            broadcast = {name: bound_to[name] for name in broadcasts if name in bound_to}

            def pullback(*given: Any) -> tuple[Any, ...]:
                op, shown_names = f"{call.__name__}.vjp", names_of(shown)
                if len(given) != len(shown_names):
                    raise TypeError(
                        f"{op}: the pullback got {len(given)} cotangents; it should get "
                        f"{len(shown_names)}, of {' and '.join(shown_names)}"
                    )
                cotangents: list[Any] = [None] * len(outputs)
                for name, value in zip(shown_names, given, strict=True):
                    if value is not None:
                        like = results[outputs.index(name)]
                        cotangents[outputs.index(name)] = _cotangent(op, value, like)
                saved = results[primitive.residual]
                gradients: Sequence[Any] = pull_back(bound, arrays, saved, cotangents, needed)
                gradients = [
                    _summed(g, broadcast[name]) if g is not None and name in broadcast else g
                    for name, g in zip(arguments, gradients, strict=True)
                ]
                return tuple([g for g, need in zip(gradients, needed, strict=True) if need])

            return shown_of(results, shown), pullback

        def explain_call(*args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
            arrays, bound, _ = bind(args, kwargs, backend)
            first = reference(arrays)
            framework = "torch" if is_tensor(first) else "numpy"
            device = first.device.type if framework == "torch" else "cpu"
            return explain(
                Request(primitive.name, framework, device, promoted(arrays), bound.forced)
            )

        call.primitive = primitive
        call.vjp = outside_of_graphs(vjp)
        call.explain = outside_of_graphs(explain_call)
        ops[call.__name__] = call
        return call

    return declare
