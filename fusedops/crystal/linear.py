"""Functions that are linear in a map, each with its adjoint, on NumPy arrays and tensors.

They have derivatives of every order. They are no primitives of the frame because it declares, casts
and checks real numbers alone, and structure factors are complex.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar
from typing import cast as typed

import numpy as np

from fusedops._frame.arrays import either
from fusedops._frame.check import arrays_only, cotangent, dtype_name, floats, traced
from fusedops._frame.hook import bridge, outside_of_graphs
from fusedops._frame.shapes import Array

F = TypeVar("F", bound=Callable[..., Any])
F_co = TypeVar("F_co", bound=Callable[..., Any], covariant=True)


_MAP = Array("(nx, ny, nz), nx > 0, ny > 0, nz > 0")


class LinearOp(Generic[F_co]):
    """The type of a linear function, for type checkers: a function with attributes."""

    __call__: F_co

    def vjp(self, *args: Any, **kwargs: Any) -> tuple[Any, Callable[..., tuple[np.ndarray, ...]]]:
        """Return the value, and the pullback from a cotangent to the gradient."""
        raise NotImplementedError


class _Linear(NamedTuple):
    """A checked call: an array, the function of it, and the function's adjoint."""

    array: Any
    function: Callable[[Any], Any]
    adjoint: Callable[[Any], Any]


def linear_in(array: Any, function: Callable[..., Any], adjoint: Callable[..., Any]) -> Any:
    """Return the result of a function under `linear`, whose annotation is the result instead."""
    return _Linear(array, function, adjoint)


def linear(check: F) -> LinearOp[F]:
    """Turn a function that returns a `_Linear` into a function of NumPy arrays and tensors."""
    name = check.__name__

    @functools.wraps(check)
    def call(*args: Any, **kwargs: Any) -> Any:
        array, function, adjoint = check(*args, **kwargs)
        return either(array, _plain, _recorded)(array, function, adjoint)

    def vjp(*args: Any, **kwargs: Any) -> tuple[Any, Callable[[Any], tuple[Any]]]:
        array, function, adjoint = check(*args, **kwargs)
        arrays_only(f"{name}.vjp", "map", array, ", tensors have autograd")
        y = function(array)
        return y, lambda dy: (adjoint(cotangent(f"{name}.vjp", dy, y.shape, y.dtype)),)

    op: Any = outside_of_graphs(call)
    op.vjp = outside_of_graphs(vjp)
    return typed("LinearOp[F]", op)


def _plain(array: np.ndarray, function: Any, adjoint: Any) -> Any:
    return function(array)


def _recorded(tensor: Any, function: Any, adjoint: Any) -> Any:
    return _differentiable()(tensor, function, adjoint)


def _is_for_numpy(x: Any) -> bool:
    """Return whether NumPy and SciPy serve a tensor: on our threads they are faster than torch."""
    return x.is_cpu and not traced()


@functools.cache
def _differentiable() -> Any:
    """Return the differentiable call of tensors; its class can't be declared without torch."""
    from fusedops._frame.bridge.autograd import is_batch, row_by_row

    torch = sys.modules["torch"]

    class Linear(torch.autograd.Function):  # type: ignore[name-defined]
        """A linear function, whose gradient is its adjoint; the adjoint's gradient is it again."""

        @staticmethod
        def forward(x: Any, function: Any, adjoint: Any) -> Any:
            if not _is_for_numpy(x):
                return function(x)
            array = bridge().tensors.as_numpy(x.resolve_conj().resolve_neg())
            return bridge().tensors.as_tensors([function(array)])[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            _, ctx.function, ctx.adjoint = inputs

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return each(dy, ctx.adjoint, ctx.function), None, None

        @staticmethod
        def jvp(ctx: Any, dx: Any, *_: Any) -> Any:
            return each(dx, ctx.function, ctx.adjoint)

        @staticmethod
        def vmap(_: Any, in_dims: tuple[Any, ...], x: Any, function: Any, adjoint: Any) -> Any:
            rows = [call(one, function, adjoint) for one in x.unbind(in_dims[0])]
            return torch.stack(rows), 0

    # Function.apply without what it does for torch.func, which takes longer than our kernels.
    quick: Any = super(torch.autograd.Function, Linear).apply

    def call(x: Any, function: Any, adjoint: Any) -> Any:
        if bridge().modes.transforms():
            return Linear.apply(x, function, adjoint)
        # Without a node's cost in the usual backward pass.
        return (quick if torch.is_grad_enabled() else Linear.forward)(x, function, adjoint)

    def each(x: Any, function: Any, adjoint: Any) -> Any:
        if not is_batch(x):
            return call(x, function, adjoint)
        return row_by_row(lambda rows: [call(rows[0], function, adjoint)], [x])[0]

    return call


def checked_map(op: str, map: Any) -> Any:
    map = floats(op, "map", map)
    if map.dtype.itemsize < 4:
        raise TypeError(
            f"{op}: map has dtype {dtype_name(map.dtype)}; it should be float32 or float64"
        )
    _MAP.fit(op, "map", map, {})
    return map
