"""A few small calls of every op, with which test_contract.py tests the promises of all ops.

An `Example` makes the arguments of a call, of several sizes; a `Problem` is one such call with
cotangents of its outputs, as NumPy arrays. Access to the frame's internals is at the end.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fusedops._catalogue import Problem, families, tuple_of
from fusedops._frame import registry
from fusedops.testing import CASES, TOLERANCE, error
from places import EXACT, HAS_TORCH, forget_plans

if HAS_TORCH:
    import torch


EXAMPLES = [example for family in families() for example in family.examples()]
#: Calls that update an argument in place, and have no gradient.
UPDATES = [each for family in families() for each in getattr(family, "updates", list)()]
#: Examples with indices, sequences and cells that every call reads anew.
UNPACKED = [example.unpacked() for example in EXAMPLES if example.packs]
#: Examples that differ in their arguments' shapes and in the nodes of their graphs.
TRACED = [
    example
    for example in EXAMPLES
    if example.name not in ("planarity-weighted", "undo", "matrices-packed", "triangle-hidden")
]


def tensor(array: Any) -> Any:
    """Return a tensor that shares an array's memory; for a number, a new tensor."""
    array = np.asarray(array)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)


def as_framework(framework: str, p: Problem, device: str = "cpu") -> dict[str, Any]:
    """Return a problem's arguments, as tensors if need be."""
    if framework == "numpy":
        return dict(p.arguments)
    given = {n: tensor(a) if isinstance(a, np.ndarray) else a for n, a in p.arguments.items()}
    return {n: a.to(device) if hasattr(a, "to") else a for n, a in given.items()}


def leaves_of(p: Problem, device: str = "cpu") -> list[Any]:
    return [tensor(p.arguments[name].copy()).to(device).requires_grad_() for name in p.leaves]


def function_of(
    p: Problem, backend: str | None = None, device: str = "cpu", **options: Any
) -> Callable[..., Any]:
    """Return the call as a function of the tensors that have a gradient."""
    # Torch compiles no look into the problem, whose properties are made under a lock.
    arguments, op, names = as_framework("torch", p, device), p.op, p.leaves

    def function(*leaves: Any, **more: Any) -> Any:
        given = {**arguments, **dict(zip(names, leaves, strict=True)), **options, **more}
        return op(**given, backend=backend)

    return function


def evaluate(place: tuple[str, str | None], p: Problem, **options: Any) -> list[np.ndarray]:
    """Return the outputs, as arrays."""
    out = p.op(**as_framework(place[0], p), **options, backend=place[1])
    return [np.asarray(one) for one in tuple_of(out)]


def updated(p: Problem) -> list[np.ndarray]:
    """Return the arrays that a call updates."""
    return [p.arguments[name] for name in p.op.primitive.mutates]


def solve(place: tuple[str, str | None], p: Problem) -> list[np.ndarray]:
    """Return the outputs and the gradients of the leaves, or the arrays updated, as arrays."""
    framework, backend = place
    if p.op.primitive.mutates:
        return [*evaluate(place, p), *updated(p)]
    if framework == "numpy":
        out, pullback = p.op.vjp(**p.arguments, wrt=p.leaves, backend=backend)
        return [np.asarray(a) for a in (*tuple_of(out), *pullback(*p.cotangents))]
    leaves = [tensor(p.arguments[name]).requires_grad_() for name in p.leaves]
    outs = tuple_of(function_of(p, backend)(*leaves))
    gradients = torch.autograd.grad(outs, leaves, tuple(map(tensor, p.cotangents)))
    return [a.detach().numpy() for a in (*outs, *gradients)]


def total(p: Problem, backend: str | None = None, device: str = "cpu") -> Callable[..., Any]:
    """Return a number as a function of the leaves, such that no derivative is constant."""
    function = function_of(p, backend, device)
    weights = [tensor(cotangent).to(device) for cotangent in p.cotangents]

    def weighted(*leaves: Any) -> Any:
        # The squares alone of an orthogonal matrix have a constant sum.
        outs = tuple_of(function(*leaves))
        return sum((out.square() * w).sum() for out, w in zip(outs, weights, strict=True))

    return weighted


def derivatives(
    p: Problem, backend: str | None, order: int, device: str = "cpu"
) -> list[np.ndarray]:
    """Return the gradient of a sum of squares, then of its part along a vector, and so on."""
    leaves, rng = leaves_of(p, device), np.random.default_rng(2)
    value, found = total(p, backend, device)(*leaves), []
    for _ in range(order):
        found.append(torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True))
        value = sum((g * tensor(rng.normal(size=g.shape)).to(device)).sum() for g in found[-1])
    return [gradient.detach().cpu().numpy() for gradients in found for gradient in gradients]


def unaligned(array: np.ndarray) -> np.ndarray:
    """Return a copy of an array at an odd address."""
    view = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got, want, strict=True)


def close(p: Problem, got: Any, want: Any, times: float = 1.0) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    allowed = TOLERANCE[str(got.dtype)] * max(1.0, p.example.terms**0.5 / 8)
    assert error(got, want) <= times * allowed


def agree(p: Problem, backend: str | None, got: Any, want: Any) -> None:
    """Compare bit for bit where the backend's order of operations is always the same."""
    if p.example.exact and backend in EXACT:
        same(got, want)
    else:
        close(p, got, want)


def all_agree(p: Problem, backend: str | None, got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        agree(p, backend, one, other)


@contextlib.contextmanager
def named(case: str) -> Iterator[None]:
    """Let a failure begin with the name of its case."""
    try:
        yield
    except (AssertionError, pytest.fail.Exception) as error:
        raise AssertionError(f"{case}: {error}") from error


def compare(
    op: Any,
    oracle: Callable[..., Any],
    sizes: Sequence[tuple[int, ...]] = (),
    **choices: Sequence[Any],
) -> None:
    """Compare the reference with a plain formula, which gets those arguments that are not None.

    The calls are an op's examples, of more sizes if given, with and without each optional array,
    and with each choice of other arguments.
    """
    for example in (*EXAMPLES, *UNPACKED):
        if example.op is not op:
            continue
        for size in (example.tiny, example.small, example.medium, *sizes):
            p = example.of(size)
            every = choices | {name: (p.arguments[name], None) for name in example.optional}
            for some in itertools.product(*every.values()):
                q = p.but(**dict(zip(every, some, strict=True)))
                want = oracle(**{n: value for n, value in q.arguments.items() if value is not None})
                for got, other in zip(evaluate(("numpy", "numpy"), q), tuple_of(want), strict=True):
                    close(q, got, other)


# Access to the frame's internals.


def of_primitives(*names: str) -> list[Any]:
    """Return the cases of all primitives that have any, by name."""
    return [case for case in CASES if case.name in names]


def registered(case: Any, backend: str = "", dtype: Any = None, layout: Any = None) -> Any:
    """Return a registered operator, and its arguments for a case."""
    from fusedops._frame.bridge.graphs import _take_apart

    primitive, (arrays, others) = case.primitive, case.make()
    count = len(primitive.constants)
    tensors = [
        None if a is None else torch.tensor(a, dtype=dtype) for a in (*arrays, *others[:count])
    ]
    if layout is not None:
        tensors = [None if a is None else layout(a) for a in tensors]
    if primitive.pullback is not None:
        for leaf in tensors[: len(arrays)]:
            if leaf is not None:
                leaf.requires_grad_()
    operator = getattr(torch.ops.fusedops, primitive.name).default
    flat = _take_apart(primitive, others[count:])
    return operator, (*tensors, *flat, list(primitive.all), backend)


@contextlib.contextmanager
def requests(monkeypatch: Any) -> Iterator[list[tuple[str, str | None]]]:
    """List the primitive and the requested backend of every choice of a backend."""
    asked: list[tuple[str, str | None]] = []
    genuine = registry.choose

    def watched(request: Any) -> Any:
        asked.append((request.op, request.forced))
        return genuine(request)

    # A plan keeps its backend, and would skip the choice.
    forget_plans()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "choose", watched)
        yield asked
    forget_plans()


def capture(run):
    """Return a CUDA graph of a function's work, and the results that it computes."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results
