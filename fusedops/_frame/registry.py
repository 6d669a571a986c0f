"""Backends, their kernels, and the choice of a backend for a call."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from fusedops._frame.check import (
    dtype_name,
    is_tensor,
    one_of,
    promoted,
    reference,
    traced,
    warn,
)
from fusedops._host.packages import how_to_install, import_error

T = TypeVar("T")

BackendName = Literal["triton", "cython", "numba", "torch", "numpy"]


class BackendUnavailable(RuntimeError):
    """No backend can serve a call, or the one asked for can't; the message says why."""


class Request(NamedTuple):
    """All that the choice of a backend depends on."""

    op: str
    framework: str
    device: str
    dtype: Any
    forced: str | None


def request(op: str, arrays: Sequence[Any], backend: str | None = None) -> Request:
    """Return the request for a call of a primitive with these arrays; some may be None."""
    first = reference(arrays)
    where = ("torch", first.device.type) if is_tensor(first) else ("numpy", "cpu")
    return Request(op, *where, promoted(arrays), forced(backend, op))


@dataclass(frozen=True)
class Backend:
    """A row of the backend table.

    `speaks` is the framework whose arrays the kernels take. `package` has a folder for each family
    of ops, where the import of the module of the backend's name registers the family's kernels.
    `why_not` returns the reason why the backend can't serve a request, or None if it can. A backend
    without a package evaluates the formula that a primitive declares.
    """

    name: BackendName
    speaks: str
    package: str | None
    why_not: Callable[[Request], str | None]


def _needs_cpu(request: Request) -> str | None:
    if request.device == "cpu":
        return None
    return f"it runs on the CPU; the tensors are on {request.device}"


def _needs_torch(request: Request) -> str | None:
    if request.framework == "torch":
        return None
    return "it takes torch tensors; these are NumPy arrays"


def _needs_extension(request: Request) -> str | None:
    # By name, as modules of kernels are: kernels import the frame.
    return _needs_cpu(request) or importlib.import_module("cpukern.isa").why_not()


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


#: All backends, in order of preference.
BACKENDS = (
    Backend("triton", "torch", "gpukern", _needs_gpu),
    Backend("cython", "numpy", "cpukern", _needs_extension),
    Backend("numba", "numpy", "cpukern", _needs_numba),
    Backend("torch", "torch", None, _needs_torch),
    Backend("numpy", "numpy", None, _needs_cpu),
)
_NAMES = tuple(backend.name for backend in BACKENDS)

#: Public ops by name, since a graph can hold names only.
ops: dict[str, Callable[..., Any]] = {}
#: Declared primitives by name.
primitives: dict[str, Any] = {}
_kernels: dict[tuple[str, str], Callable[..., Any]] = {}
# Choices made so far. There are few different requests, so nothing is dropped.
_chosen: dict[Request, tuple[Backend, Callable[..., Any]]] = {}
takes_bfloat16: set[Callable[..., Any]] = set()
told_of_tensors: set[Callable[..., Any]] = set()
_override: ContextVar[str | None] = ContextVar("fusedops_backend", default=None)


def register(
    primitive: str, backend: str, *, bfloat16: bool = False, tensors: bool = False
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Declare the decorated function to be the kernel of `primitive` on `backend`.

    A kernel gets two records: the primitive's arguments by name, and its outputs, each an array to
    fill or None. On the CPU all arrays have one dtype. With `bfloat16` a CPU kernel takes arrays of
    bfloat16 too, as the uint16 of their bits. With `tensors` it is called with ``tensors=True`` for
    arrays that are tensors' memory. The kernel's Python may depend on the kinds of its arguments
    alone.
    """

    def declare(kernel: Callable[..., T]) -> Callable[..., T]:
        _kernels[primitive, backend] = kernel
        if bfloat16:
            takes_bfloat16.add(kernel)
        if tensors:
            told_of_tensors.add(kernel)
        return kernel

    return declare


def _kernel(backend: Backend, primitive: str) -> Callable[..., Any] | None:
    declared = primitives[primitive]
    if backend.package is None:
        return declared.formula
    return _registered(backend, primitive, declared.family)


def _registered(backend: Backend, name: str, family: str) -> Callable[..., Any] | None:
    folder = f"{backend.package}.{family}"
    module = f"{folder}.{backend.name}"
    find = importlib.util.find_spec
    if (name, backend.name) not in _kernels and find(folder) and find(module):
        importlib.import_module(module)
    return _kernels.get((name, backend.name))


@functools.cache
def compiled(name: str, family: str, asked: str | None) -> Callable[..., Any] | None:
    """Return the first compiled function that a family registers under `name`, or None.

    It does work that is no primitive's, such as packing, and that a definition in NumPy does too.
    Of backends asked for, only those on NumPy arrays count.
    """
    own = [backend for backend in BACKENDS if backend.speaks == "numpy"]
    request = Request(name, "numpy", "cpu", None, asked)
    for backend in [backend for backend in own if backend.name == asked] or own:
        if backend.package is not None and backend.why_not(request) is None:
            return _registered(backend, name, family)
    return None


def why_not(backend: Backend, request: Request) -> str | None:
    """Return why a backend can't serve a request, or None if it can."""
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


def asked() -> str | None:
    """Return the backend asked for by argument or `use_backend`."""
    return _override.get()


def _is_on_gpu(array: Any) -> bool:
    return is_tensor(array) and bool(array.is_cuda)


def triton_may_serve(array: Any, asked: str | None) -> bool:
    """Return whether to call a primitive that Triton alone has kernels for, or else its formula."""
    return _is_on_gpu(array) and not traced() and asked in (None, "triton")


@contextlib.contextmanager
def asking(backend: str | None) -> Iterator[None]:
    """Ask for a backend, or for none in particular, in the calls of a ``with`` block."""
    token = _override.set(backend)
    try:
        yield
    finally:
        _override.reset(token)


@functools.cache
def _from_environment() -> str | None:
    name = os.environ.get("FUSEDOPS_BACKEND")
    if name and name not in _NAMES:
        should = f"it should be one of {', '.join(_NAMES)}"
        raise ValueError(f"FUSEDOPS_BACKEND is {name!r}; {should}")
    return name or None


@contextlib.contextmanager
def use_backend(name: BackendName) -> Iterator[None]:
    """Ask for one backend in every call of a ``with`` block, in this thread or task.

    The backward pass of a call uses the backend that its forward pass asked for. A thread that is
    started in the block asks for it too under ``sys.flags.thread_inherit_context``, the default of
    Python without the GIL.

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
    with asking(name):
        yield


_warned_of_formulas = False


def _warn_of_formulas(request: Request) -> None:
    """Warn, once in a process, if no compiled kernels can serve a CPU here."""
    global _warned_of_formulas
    reasons = [(b.name, b.why_not(request)) for b in BACKENDS if b.name in ("cython", "numba")]
    if _warned_of_formulas or not all(reason for _, reason in reasons):
        return
    _warned_of_formulas = True
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons)
    warn(
        f"{request.op}: plain formulas serve this call, up to hundreds of times slower than "
        f"compiled kernels ({told}). Remedy: {how_to_install('numba')}, or install fusedops where "
        "there is a C compiler."
    )


def choose(request: Request) -> tuple[Backend, Callable[..., Any]]:
    """Return the first backend that can serve a request, and its kernel; or raise all reasons."""
    if found := _chosen.get(request):
        return found
    for backend in BACKENDS:
        if request.forced in (None, backend.name) and why_not(backend, request) is None:
            break
    else:
        raise BackendUnavailable(str(explain(request)))
    if request.device == "cuda" and backend.name == "torch" and request.forced is None:
        # If Triton only lacks a kernel, the user can do nothing about it.
        reason = BACKENDS[0].why_not(request)
        if reason:
            warn(f"{request.op}: plain torch serves this CUDA tensor, because of triton: {reason}")
    if request.device == "cpu" and backend.package is None and request.forced is None:
        _warn_of_formulas(request)
    kernel = _kernel(backend, request.op)
    assert kernel is not None  # `why_not` has checked it
    _chosen[request] = backend, kernel
    return backend, kernel


@dataclass(frozen=True)
class Explanation:
    """The backend that serves a call, and a reason for every backend; `str` gives a table."""

    request: Request
    backend: BackendName | None
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


def explain(request: Request) -> Explanation:
    """Return the choice for a request, with a reason for every backend."""
    reasons: dict[str, str | None] = {b.name: why_not(b, request) for b in BACKENDS}
    able = [b.name for b in BACKENDS if request.forced in (None, b.name) and not reasons[b.name]]
    return Explanation(request, able[0] if able else None, reasons)
