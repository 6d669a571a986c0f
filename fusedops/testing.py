"""The named cases and the tolerances of every op, for tests, benches and the demo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fusedops import _catalogue
from fusedops._catalogue import (
    BOTH,
    FORWARD,
    Call,
    Case,
    Steps,
    families,
    float64,
    steps_of,
    tuple_of,
)
from fusedops._frame import primitive, registry
from fusedops._frame.check import one_of, refuse
from fusedops._frame.packed import Packed

__all__ = [
    "CASES",
    "TOLERANCE",
    "Case",
    "check",
    "error",
    "poisoned_outputs",
    "run",
]

#: Largest error allowed, relative to the largest element of the reference, for sums of up to 64
#: terms. Planarity accumulates in float64 and rounds once, whatever the length of a sum, so its
#: error in other dtypes is one or two roundings of the output. Its second derivative divides by
#: gaps between eigenvalues, which magnifies float64's rounding errors. The convolution sums up to
#: 31 products in float32; the error grows with the root of their number. It sums over tokens in
#: float64, or in partial sums of at most 64 tokens.
TOLERANCE = _catalogue.TOLERANCE


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill every output with NaN before a kernel runs, to show elements that it doesn't write.

    Returns
    -------
    context manager
        For a ``with`` statement. It affects all threads of the process.

    Examples
    --------
    >>> import numpy as np, fusedops
    >>> with poisoned_outputs():
    ...     float(fusedops.dynamic_conv(np.ones((1, 2, 1)), np.ones((1, 1))).sum())
    2.0
    """
    before, primitive.poison = primitive.poison, True
    try:
        yield
    finally:
        primitive.poison = before


def error(value: Any, reference: Any) -> float:
    """Return the largest difference, relative to the largest element of the reference.

    Parameters
    ----------
    value, reference : array
        Of any real dtype; they are compared in float64.

    Returns
    -------
    float
        Infinite if shapes differ, or if an element of `value` or `reference` isn't finite.

    Raises
    ------
    TypeError
        If one of them is complex.

    Examples
    --------
    >>> error([1.0, 2.5], [1.0, 2.0])
    0.25
    """
    for name, array in (("value", value), ("reference", reference)):
        # NumPy only warns when it drops imaginary parts.
        if np.iscomplexobj(array):
            refuse(TypeError, "error", name, "is complex", "be real")
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    # A NaN is no larger than a bound, nor does `max` find it.
    if value.shape != reference.shape or not np.isfinite([value, reference]).all():
        return np.inf
    difference = np.abs(value - reference).max(initial=0.0)
    return float(difference / (np.abs(reference).max(initial=0.0) or 1.0))


def errors_of(
    exact: Call, given: Call, cotangents: Any, steps: Callable[[Any, Any], Steps]
) -> dict[str, float]:
    """Return the errors of a call's values and gradients against the reference, relative.

    Parameters
    ----------
    exact : Call
        With NumPy arrays in float64.
    given : Call
        The same, rounded to the dtype and framework that are checked.
    cotangents : array or tuple of array
        Of that dtype and framework; None where there is no gradient.
    steps : callable
        From `given` and `cotangents` to functions that compute its passes.
    """
    # Packed arguments were moved, not rounded.
    packed = {n: a for n, a in exact.arguments.items() if isinstance(a, Packed)}
    rounded = given.rounded().converted(lambda name, value: packed.get(name, value))
    back = tuple(map(float64, tuple_of(cotangents))) if exact.leaves else None
    truth, made = steps_of(rounded, "numpy", back), steps(given, cotangents)
    with poisoned_outputs():
        got = {name: made[name]() for name in (FORWARD, BOTH) if name in made}
    expected = truth[BOTH if BOTH in truth else FORWARD]()
    count = len(got[FORWARD])
    mutated = exact.op.primitive.mutates
    values = [pair for out in got.values() for pair in zip(out[:count], expected, strict=False)]
    values += [(given.arguments[name], rounded.arguments[name]) for name in mutated]
    found = {"value": max(error(float64(a), b) for a, b in values)}
    if BOTH in got:
        pairs = zip(got[BOTH][count:], expected[count:], strict=True)
        found["gradient"] = max(error(float64(a), b) for a, b in pairs)
    return found


def run(
    case: Case,
    framework: str,
    backend: str | None,
    dtype: str,
    *,
    wanted: tuple[bool, ...] | None = None,
    device: str = "cpu",
) -> tuple[list[Any], list[np.ndarray | None]]:
    """Evaluate a case on a backend, into outputs poisoned with NaN.

    Parameters
    ----------
    case : Case
        One of `CASES`.
    framework : {"numpy", "torch"}
        The framework of the arrays.
    backend : str or None
        The backend that must serve the call; None for the first that can.
    dtype : str
        ``"float64"``, ``"float32"``; in torch ``"bfloat16"`` and ``"float16"`` too.
    wanted : tuple of bool, optional
        The outputs to compute; all by default.
    device : str
        A torch device.

    Returns
    -------
    outputs : list of array
        In float64; None for an unwanted output. At the end, the arrays updated in place.
    arrays : list of array
        The case's arrays rounded to `dtype`, as the kernel got them, in float64.

    Raises
    ------
    ValueError
        If there is no such framework or backend, or `wanted` has another number of outputs.
    BackendUnavailable
        If the backend can't serve the call.

    Examples
    --------
    >>> from fusedops.testing import CASES
    >>> outputs, arrays = run(CASES[0], "numpy", "numpy", "float64")
    >>> [output.shape for output in outputs]
    [(1, 5, 37, 2, 32), (1, 5, 2, 37)]
    """
    primitive = case.primitive
    one_of("run", "framework", framework, ("numpy", "torch"))
    if wanted is not None and len(wanted) != len(primitive.outputs):
        should = f"have {len(primitive.outputs)}, for {', '.join(primitive.outputs)}"
        refuse(ValueError, "run", "wanted", f"has {len(wanted)} elements", should)
    arrays: list[Any]
    static: Sequence[Any]
    given, static = case.make()
    if framework == "numpy":
        arrays = [None if a is None else a.astype(dtype) for a in given]
        rounded = [None if a is None else a.astype(np.float64) for a in arrays]
    else:
        import torch

        kind = getattr(torch, dtype)
        arrays = [None if a is None else torch.tensor(a, device=device, dtype=kind) for a in given]
        rounded = [None if a is None else a.double().cpu().numpy().copy() for a in arrays]
        static = [s.to(device) if isinstance(s, Packed) else s for s in static]
        static = [_constant(s, kind, device) if isinstance(s, np.ndarray) else s for s in static]
    out = primitive.all if wanted is None else [want or None for want in wanted]
    with poisoned_outputs(), registry.asking(backend and registry.forced(backend, "run")):
        outputs = [*primitive(*arrays, *static, out=out)]
    outputs += [a for n, a in zip(primitive.arrays, arrays, strict=True) if n in primitive.mutates]
    if framework == "torch":
        outputs = [None if out is None else out.double().cpu().numpy() for out in outputs]
    return outputs, rounded


def _constant(array: np.ndarray, kind: Any, device: str) -> Any:
    """Return a constant array as a tensor: integers, or floats of at least 32 bits."""
    import torch

    kind = torch.promote_types(kind, torch.float32) if array.dtype.kind == "f" else None
    return torch.tensor(array, device=device, dtype=kind)


def check(
    case: Case,
    framework: str,
    backend: str | None,
    dtype: str,
    device: str = "cpu",
    *,
    alone: bool = True,
) -> None:
    """Raise AssertionError unless a backend agrees with the reference on a case.

    In float32, outputs computed alone (of five outputs or more, in two halves) must equal those
    computed together; on the CPU bit for bit.

    Parameters
    ----------
    case, framework, backend, dtype, device
        See `run`.
    alone : bool
        Whether to compute outputs alone, too.

    Raises
    ------
    AssertionError
        If they disagree; the message has the case and the error of every output.
    BackendUnavailable
        If the backend can't serve the call.

    Examples
    --------
    >>> from fusedops.testing import CASES
    >>> check(CASES[0], "numpy", "numpy", "float32")
    """
    primitive = case.primitive
    outputs, rounded = run(case, framework, backend, dtype, device=device)
    reference = primitive.formula(primitive.Arguments._make((*rounded, *case.make()[1])))
    updated = [a for n, a in zip(primitive.arrays, rounded, strict=True) if n in primitive.mutates]
    names = primitive.outputs + primitive.mutates
    errors = {
        name: error(out, want)
        for name, out, want in zip(names, outputs, [*reference, *updated], strict=True)
        # The order of atoms on a GPU is arbitrary, so the formula returns None for it. Float16 has
        # no output whose numbers it can't hold.
        if want is not None and (out is not None or dtype != "float16")
    }
    # On the CPU the bridge computes most ops in float32 when given 16-bit floats.
    narrow = device == "cpu" and dtype not in ("float32", "float64")
    worked = "float32" if narrow and not primitive.sixteen_bits else dtype
    if not max(errors.values()) <= case.tolerance(worked):
        raise AssertionError(f"{case} on {backend} in {dtype}: {errors}")
    count = len(primitive.outputs)
    if dtype != "float32" or count == 1 or not alone:
        return
    # Of five outputs or more, every second at a time.
    step = count if count < 5 else 2
    for first in range(step):
        wanted = tuple(number % step == first for number in range(count))
        some, _ = run(case, framework, backend, dtype, wanted=wanted, device=device)
        # On a GPU each choice compiles another kernel, in which products and sums may fuse anew.
        allowed = 0.0 if device == "cpu" else case.tolerance(worked)
        for number in range(first, count, step):
            if outputs[number] is None:
                continue
            if not error(some[number], outputs[number]) <= allowed:
                raise AssertionError(
                    f"{case} on {backend} in {dtype}: {names[number]} alone differs"
                )


#: Every case of every op.
CASES = [case for family in families() for case in family.cases()]
