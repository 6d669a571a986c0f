"""The checks of one call: values, gradients, layouts, bad arguments, writes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import fusedops
from cpukern import isa
from fusedops._frame.packed import Packed
from fusedops._host import threads
from fusedops.testing import CASES, TOLERANCE

from .arrays import NUMPY_DTYPES, laid_out, repeated, tensor
from .ledger import Finding, Ledger, Place
from .problem import Problem

REFUSALS = (TypeError, ValueError, IndexError)
PACKED = ("Planes", "Edges", "Sequences", "ScatterPlan", "Lattice")


class Truth:
    """The expected results in float64, computed on first use.

    They come from the oracle and the NumPy reference on the CPU, and from torch's formula on a GPU.
    """

    def __init__(self, problem: Problem, rounded: dict[str, np.ndarray], place: Place) -> None:
        self.problem, self.rounded = problem, rounded
        self.device, self.deferred = place.device, place.deferred
        rng = np.random.default_rng(1)
        with np.errstate(all="ignore"):
            described = self._run(rounded, gradient=False)
        # Every dtype holds eighths exactly.
        self.cotangents = [rng.integers(-8, 9, np.shape(v)) / 8 for v in described]
        self.described = described

    def _run(
        self, arrays: dict[str, np.ndarray], *, gradient: bool, absolute: bool = False
    ) -> list[Any]:
        """Return outputs, or gradients, of the reference, as lists; or those of magnitudes."""
        p = self.problem
        cotangents = self.cotangents if gradient else []
        if absolute:
            arrays = {n: a if n in p.bounded else np.abs(a) for n, a in arrays.items()}
            cotangents = [np.abs(c) for c in cotangents]
        if not self.deferred:
            given = {name: array.copy() for name, array in arrays.items()}
            if not gradient:
                outputs = _several(p.op(**given, **p.constants, **p.options, backend="numpy"))
                return [*outputs, *(given[name] for name in p.mutated)]
            _, pullback = p.op.vjp(
                **given, **p.constants, **p.options, wrt=list(arrays), backend="numpy"
            )
            return list(pullback(*cotangents))
        torch = sys.modules["torch"]
        given = {
            name: torch.tensor(array, device=self.device, requires_grad=gradient)
            for name, array in arrays.items()
        }
        constants = on_device(p.constants, self.device)
        outputs = _several(p.op(**given, **constants, **p.options, backend="torch"))
        if not gradient:
            return [*outputs, *(given[name] for name in p.mutated)]
        cotangents = [torch.tensor(c, device=self.device) for c in cotangents]
        return list(
            torch.autograd.grad(outputs, list(given.values()), cotangents, materialize_grads=True)
        )

    @functools.cached_property
    def outputs(self) -> list[Any]:
        if self.deferred or self.problem.oracle is None:
            return self.described
        with np.errstate(all="ignore"):
            return _several(self.problem.oracle(**self.rounded))

    @functools.cached_property
    def gradients(self) -> list[Any]:
        with np.errstate(all="ignore"):
            return self._run(self.rounded, gradient=True)

    @functools.cached_property
    def margin(self) -> dict[str, Any]:
        with np.errstate(all="ignore"):
            found = self.problem.margin(self.rounded) if self.problem.margin else {}
        return on_device(found, self.device) if self.deferred else found

    @functools.cached_property
    def condition(self) -> float:
        """The factor by which the arrays' values multiply errors."""
        with np.errstate(all="ignore"):
            return self.problem.condition(self.rounded) if self.problem.condition else 1.0

    @functools.cached_property
    def bounds(self) -> tuple[list[Any], list[Any]]:
        """The sizes that errors of outputs and of gradients are relative to."""
        p = self.problem
        found = [self.outputs, self.gradients if p.differentiable else []]
        sizes = [[p.natural + _largest(a) for a in some] for some in found]
        if not p.summed:
            return tuple(sizes)
        # Sums may cancel, but sums of magnitudes don't.
        with np.errstate(all="ignore"):
            most = [
                self._run(self.rounded, gradient=gradient, absolute=True) if some else []
                for gradient, some in zip((False, True), found, strict=True)
            ]
        return tuple(
            [size + _largest(a) for size, a in zip(own, some, strict=True)]
            for own, some in zip(sizes, most, strict=True)
        )


def _several(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _largest(array: Any) -> Any:
    if isinstance(array, (int, float, np.generic, np.ndarray)):
        return float(np.abs(array).max(initial=0.0))
    largest = array.detach().abs().max() if array.numel() else 0.0
    return float(largest) if array.is_cpu else largest


def each(function: Callable[[np.ndarray], Any], value: Any) -> Any:
    """Return lists and tuples with a function applied to their arrays."""
    if isinstance(value, np.ndarray):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([each(function, part) for part in value])
    if isinstance(value, dict):
        return {name: each(function, part) for name, part in value.items()}
    return value


def on_device(values: dict[str, Any], device: str) -> dict[str, Any]:
    """Return tensors in place of arrays, and packed arguments, on a device."""
    torch = sys.modules["torch"]
    return moved(each(lambda array: torch.tensor(array, device=device), values), device)


def moved(values: dict[str, Any], device: str) -> dict[str, Any]:
    """Return packed arguments on a device."""
    return {n: v.to(device) if isinstance(v, Packed) else v for n, v in values.items()}


def leaves(value: Any) -> Iterator[Any]:
    """Yield all arrays and tensors of lists, tuples and dicts."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        if hasattr(value, "dtype"):
            yield value
        return
    for part in value:
        yield from leaves(part)


def contents(values: Any) -> list[Any]:
    """Return copies of arrays' contents, for a later comparison."""
    found = []
    for array in leaves(values):
        if isinstance(array, (np.ndarray, np.generic)):
            found.append(array.tobytes())
        elif array.is_cpu and array.layout == sys.modules["torch"].strided:
            plain = array.detach().resolve_neg()
            plain = plain.float() if plain.itemsize < 4 else plain
            found.append(plain.numpy().tobytes())
    return found


@contextlib.contextmanager
def threaded(count: int) -> Iterator[None]:
    """Let kernels use `count` threads even on small work; one thread changes nothing."""
    if count == 1:
        yield
        return
    # Kernels first called in here would keep these settings.
    for case in CASES:
        if isa.why_not() is None:
            importlib.import_module(f"cpukern.{case.primitive.family}.cython")
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("fusedops._host.", "cpukern.")) and hasattr(module, "threads_for")
    ]
    genuine, before = threads.threads_for, threads._chosen
    fusedops.set_num_threads(count)
    for module in modules:
        module.threads_for = lambda work, grain: count
    try:
        yield
    finally:
        for module in modules:
            module.threads_for = genuine
        threads._chosen = before


class Trial:
    """All checks of one description on some places."""

    def __init__(
        self, problem: Problem, description: dict[str, Any], ledger: Ledger, places: list[Place]
    ) -> None:
        self.problem, self.description, self.ledger = problem, description, ledger
        self.op = problem.op.__name__
        self.rng = np.random.default_rng(description["seed"])
        self.dtypes = self._dtypes()
        numpys = set(self.dtypes.values()) <= set(NUMPY_DTYPES)
        self.places = [place for place in places if place.framework == "torch" or numpys]
        #: Comparisons on a GPU that are still running:
        #: a flag there, and the finding if it is set.
        self.pending: list[tuple[Any, Callable[[], Finding]]] = []
        self._truths: dict[bool, Truth] = {}

    def _dtypes(self) -> dict[str, str]:
        asked = self.description["dtype"]
        names = list(self.problem.arrays)
        if asked != "mixed":
            return dict.fromkeys(names, asked)
        some = NUMPY_DTYPES if self.rng.integers(2) else ("float32", "bfloat16", "float16")
        dtypes = {name: str(self.rng.choice(some)) for name in names}
        # An array that the call updates must hold the promoted dtype.
        return dtypes | dict.fromkeys(
            self.problem.mutated, "float64" if "float64" in some else "float32"
        )

    @property
    def narrowest(self) -> str:
        return max(self.dtypes.values(), key=TOLERANCE.__getitem__)

    def layout(self, place: Place) -> str:
        found = self.description["layout" if place.framework == "numpy" else "tensor_layout"]
        updated = found in ("repeated", "readonly") and self.problem.mutated
        return "plain" if updated else found

    def truth(self, place: Place) -> Truth:
        again = self.layout(place) == "repeated"
        if again not in self._truths:
            rounded = {}
            for name, array in self.problem.arrays.items():
                array = repeated(array) if again else array
                rounded[name] = _rounded(array, self.dtypes[name])
            self._truths[again] = Truth(self.problem, rounded, place)
        return self._truths[again]

    def arrays(self, place: Place) -> dict[str, Any]:
        """Return new arrays in the layout of the description."""
        return self.made(place, self.truth(place).rounded)

    def made(self, place: Place, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return arrays of their dtypes, in the layout of the description."""
        layout = self.layout(place)
        if place.framework == "numpy":
            return {n: laid_out(a.astype(self.dtypes[n]), layout) for n, a in arrays.items()}
        torch = sys.modules["torch"]
        if self.problem.mutated and layout == "negative":
            layout = "plain"
        return {
            n: tensor(a, getattr(torch, self.dtypes[n]), layout, place.device)
            for n, a in arrays.items()
        }

    def constants(self, place: Place, packed: bool | None = None) -> dict[str, Any]:
        """Return new constants in the layout of the description, or packed."""
        layout = self.layout(place).replace("repeated", "strided")
        packed = self.description["packed"] if packed is None else packed
        if place.framework == "torch":
            made = each(
                lambda array: tensor(array, None, layout, place.device), self.problem.constants
            )
        else:
            made = each(lambda array: laid_out(array, layout), self.problem.constants)
        if packed and self.problem.pack is not None:
            made |= self.problem.pack(made)
        return made if place.device == "cpu" else moved(made, place.device)

    def kwargs(self, place: Place, packed: bool | None = None) -> dict[str, Any]:
        options = dict(self.problem.options)
        return {**self.arrays(place), **options, **self.constants(place, packed)}

    def call(self, place: Place, function: Callable[[], Any], check: str = "raised") -> Any:
        """Return a call's result, or None where it raises, which is a finding."""
        self.ledger.calls[self.op, str(place)] += 1
        try:
            return function()
        except Exception as error:
            self.found(place, f"{check}: {type(error).__name__}", f"{error}")
            return None

    def found(self, place: Place, check: str, message: str = "") -> None:
        self.ledger.add(self.finding(place, check, message))

    def finding(self, place: Place, check: str, message: str) -> Finding:
        return Finding(self.op, place, check, message[:500], self.description)

    def expect(self, place: Place, check: str, good: Any, message: str = "") -> None:
        self.ledger.checks[self.op, str(place)] += 1
        if not good:
            self.found(place, check, message)

    def agree(
        self, place: Place, check: str, value: Any, wanted: Any, allowed: Any, dtype: str
    ) -> None:
        """Compare an output with the expected one, element by element."""
        if tuple(np.shape(value)) != tuple(np.shape(wanted)):
            self.expect(place, check, False, f"shape {np.shape(value)}, not {np.shape(wanted)}")
            return
        slack = _SLACK[dtype]
        if place.deferred:
            torch = sys.modules["torch"]
            good = (value.detach().double() - wanted).abs() <= allowed + slack
            good = (good | (wanted.abs() > _MOST[dtype])).all()
            self.ledger.checks[self.op, str(place)] += 1

            def finding() -> Finding:
                here = (part.cpu().numpy() for part in (value.detach().double(), wanted))
                allows = allowed.cpu().numpy() if isinstance(allowed, torch.Tensor) else allowed
                return self.finding(place, check, self.difference(*here, allows, slack, dtype))

            self.pending.append((torch.logical_not(good), finding))
            return
        if place.framework == "torch" and not isinstance(value, np.ndarray):
            value = value.detach().double().numpy()
        told = self.difference(value, wanted, allowed, slack, dtype)
        self.expect(place, check, not told, told)

    @staticmethod
    def difference(value: Any, wanted: Any, allowed: Any, slack: float, dtype: str) -> str:
        """Return where two arrays differ by more than is allowed, or nothing if they agree."""
        with np.errstate(all="ignore"):
            off = np.abs(np.asarray(value, np.float64) - wanted)
            good = (off <= allowed + slack) | (np.abs(wanted) > _MOST[dtype])
        if good.all():
            return ""
        at = np.unravel_index(np.argmin(good), good.shape)
        most = np.broadcast_to(allowed, good.shape)[at]
        return (
            f"{np.asarray(value)[at]} at {list(map(int, at))} should be {np.asarray(wanted)[at]}, "
            f"within {most:.3g}"
        )

    def run(self, aspect: str) -> None:
        with threaded(self.description["threads"]):
            for place in self.places:
                if self.problem.own is not None:
                    self.given, self.rounded = self.arrays(place), self.truth(place).rounded
                    self.problem.own(self, place)
                self.values(place)
                if aspect != "values":
                    getattr(self, aspect)(place)
        if self.places:
            self.reference()

    # Checks of every example.

    def values(self, place: Place) -> None:
        p, truth = self.problem, self.truth(place)
        kwargs = self.kwargs(place)
        before = contents(kwargs)
        outputs = self.call(place, lambda: p.op(**kwargs, backend=place.backend))
        if outputs is None:
            return
        outputs = _several(outputs)
        if not p.mutated:
            self.expect(place, "arguments changed", contents(kwargs) == before)
        outputs += [kwargs[name] for name in p.mutated]
        self._compare(place, "value", outputs, truth.outputs, truth.bounds[0], False)
        if p.differentiable:
            found = self.gradients(place, kwargs)
            if found is not None:
                self.expect(place, "arguments changed by a gradient", contents(kwargs) == before)
                value, gradients = found
                if place.device == "cpu" and p.exact:
                    same = all(map(_same_bits, value, outputs))
                    self.expect(place, "value beside a gradient", same)
                self._compare(place, "gradient", gradients, truth.gradients, truth.bounds[1], True)

    def _compare(
        self,
        place: Place,
        what: str,
        values: list[Any],
        wanted: list[Any],
        bounds: list[Any],
        gradient: bool,
    ) -> None:
        p, margin = self.problem, self.truth(place).margin
        names = list(p.arrays) if gradient else [str(at) for at in range(len(wanted))]
        narrowest = self.narrowest
        # A million draws meet tails of the errors that one run of the matrix misses.
        tolerance = 2 * p.tolerance(narrowest, gradient)
        tolerance *= self.truth(place).condition ** (2 if gradient else 1)
        if self.layout(place) == "repeated":
            # Roundings of equal terms grow as their number, not as its root.
            tolerance *= max(1.0, max(p.terms, gradient * p.gradient_terms) ** 0.5 / 8)
        for name, value, want, bound in zip(names, values, wanted, bounds, strict=True):
            more = margin.get(name if gradient else "value", 0.0)
            dtype = str(value.dtype).removeprefix("torch.")
            check = what if len(names) == 1 else f"{what} {name}"
            self.agree(place, check, value, want, tolerance * bound + more, dtype)
            if gradient:
                self.expect(place, f"dtype of {check}", dtype == self.dtypes[name], dtype)

    def gradients(self, place: Place, kwargs: dict[str, Any]) -> Any:
        """Return outputs and gradients, each once more."""
        p, truth = self.problem, self.truth(place)
        if place.framework == "numpy":
            by = list(p.arrays)
            found = self.call(place, lambda: p.op.vjp(**kwargs, wrt=by, backend=place.backend))
            if found is None:
                return None
            outputs, pullback = _several(found[0]), found[1]
            cotangents = [
                laid_out(c, "strided" if at % 2 else "reversed").astype(o.dtype)
                for at, (c, o) in enumerate(zip(truth.cotangents, outputs, strict=True))
            ]
            gradients = self.call(place, lambda: pullback(*cotangents))
            return None if gradients is None else (outputs, gradients)
        graph = self._graph(place, kwargs)
        if graph is None:
            return None
        outputs, needed, cotangents = graph
        gradients = self.call(
            place,
            lambda: sys.modules["torch"].autograd.grad(
                outputs, needed, cotangents, materialize_grads=True
            ),
        )
        return None if gradients is None else (outputs, gradients)

    def _graph(self, place: Place, kwargs: dict[str, Any]) -> Any:
        """Return outputs that require grad, the leaves, and cotangents."""
        p, truth, torch = self.problem, self.truth(place), sys.modules["torch"]
        kwargs = {n: v.detach().requires_grad_() if n in p.arrays else v for n, v in kwargs.items()}
        outputs = self.call(place, lambda: p.op(**kwargs, backend=place.backend))
        if outputs is None:
            return None
        outputs = _several(outputs)
        cotangents = [
            torch.tensor(c, dtype=o.dtype, device=place.device)
            for c, o in zip(truth.cotangents, outputs, strict=True)
        ]
        return outputs, [kwargs[name] for name in p.arrays], cotangents

    # Checks of the reference.

    def reference(self) -> None:
        """Hold the reference's gradient to properties and to differences of the oracle."""
        p, place = self.problem, Place("numpy", "numpy")
        truth = next(iter(self._truths.values()))
        if truth.deferred or not p.differentiable or not truth.gradients:
            return
        self._compare_reference(place, truth)
        if p.smooth and p.oracle is not None and self.description["values"] != "big":
            self._differences(place, truth)

    def _compare_reference(self, place: Place, truth: Truth) -> None:
        p = self.problem
        more = truth.margin.get("value", 0.0)
        for value, want, bound in zip(truth.described, truth.outputs, truth.bounds[0], strict=True):
            allowed = p.tolerance("float64") * truth.condition * bound + more
            self.agree(place, "reference and oracle", value, want, allowed, "float64")

    def _differences(self, place: Place, truth: Truth) -> None:
        p = self.problem

        directions = {
            name: np.random.default_rng(2).normal(size=array.shape)
            for name, array in truth.rounded.items()
        }

        def along(step: float) -> tuple[float, float]:
            """Return the sum of outputs times cotangents, and its terms' absolute sum."""
            arrays = {name: a + step * directions[name] for name, a in truth.rounded.items()}
            outputs = _several(p.oracle(**arrays))
            terms = [c * o for c, o in zip(truth.cotangents, outputs, strict=True)]
            return sum(float(t.sum()) for t in terms), sum(float(np.abs(t).sum()) for t in terms)

        parts = [g * directions[name] for name, g in zip(p.arrays, truth.gradients, strict=True)]
        exact = sum(float(np.sum(part)) for part in parts)
        size = sum(float(np.sum(np.abs(part))) for part in parts)
        largest = max([_largest(array) for array in truth.rounded.values()] + [1e-30])
        # Rounding leaves slopes of this size where the exact value is constant.
        floor = 1e-11 * sum(float(np.abs(c).sum()) for c in truth.cotangents)
        told = ""
        for share in (1e-4, 1e-5, 1e-6):
            step = share * min(largest, 1.0)
            with np.errstate(all="ignore"):
                points, sizes = zip(*(along(m * step) for m in (-2, -1, 1, 2)), strict=True)
            slope = (8 * (points[2] - points[1]) - (points[3] - points[0])) / (12 * step)
            noise = (1e-11 * max(map(abs, points)) + 1e-14 * max(sizes)) / step + floor
            if abs(slope - exact) <= 1e-4 * size + noise:
                break
            told += f"{slope} "
        else:
            self.expect(place, "differences", False, f"{told}, and the gradient {exact}")
            return
        self.expect(place, "differences", True)

    # Further checks, of which every example runs one.

    def second(self, place: Place) -> None:
        """Compare second derivatives with plain torch's."""
        p = self.problem
        wide = set(self.dtypes.values()) <= set(NUMPY_DTYPES)
        if place.framework != "torch" or not (p.differentiable and p.second and wide):
            return
        torch, truth = sys.modules["torch"], self.truth(place)
        turned = [
            np.random.default_rng(3).integers(-8, 9, a.shape) / 8 for a in truth.rounded.values()
        ]

        def derivatives(place: Place, kwargs: dict[str, Any]) -> Any:
            graph = self._graph(place, kwargs)
            if graph is None:
                return None
            outputs, needed, cotangents = graph
            cotangents = [c.requires_grad_() for c in cotangents]

            def run() -> Any:
                first = torch.autograd.grad(
                    outputs, needed, cotangents, create_graph=True, materialize_grads=True
                )
                along = [
                    torch.tensor(t, dtype=g.dtype, device=place.device)
                    for t, g in zip(turned, first, strict=True)
                ]
                used = [(f, a) for f, a in zip(first, along, strict=True) if f.requires_grad]
                if not used:
                    return []
                return torch.autograd.grad(
                    [f for f, _ in used],
                    [*needed, *cotangents],
                    [a for _, a in used],
                    materialize_grads=True,
                )

            return self.call(place, run, "second derivative raised")

        kwargs = self.kwargs(place)
        exact = {n: torch.tensor(a, device=place.device) for n, a in truth.rounded.items()}
        constants = on_device(p.constants, place.device)
        plain = place._replace(backend="torch")
        found = derivatives(place, kwargs)
        wanted = derivatives(plain, {**p.options, **constants, **exact})
        if found is None or wanted is None:
            return
        if len(found) != len(wanted):
            self.expect(place, "second derivatives", False, f"{len(found)}, not {len(wanted)}")
            return
        names = [*p.arrays, *(f"cotangent {at}" for at in range(len(truth.cotangents)))]
        tolerance = 64 * p.tolerance(self.narrowest, True) * truth.condition**3
        sizes = [_largest(want) for want in wanted]
        # Where a sum cancels to nothing, roundings of the others remain.
        others = max(1e-3 * tolerance, 4 * float(np.finfo(self.narrowest).eps)) * sum(sizes)
        for name, value, want, size in zip(names, found, wanted, sizes, strict=True):
            dtype = str(value.dtype).removeprefix("torch.")
            allowed = tolerance * size + others
            want = want if place.deferred else want.detach().numpy()
            self.agree(place, f"second derivative {name}", value, want, allowed, dtype)

    def out(self, place: Place) -> None:
        """Compare results in `out` with returned ones."""
        p = self.problem
        if "out" not in inspect.signature(p.op).parameters:
            return
        kwargs = self.kwargs(place)
        again = {n: v.clone() if hasattr(v, "clone") else v for n, v in kwargs.items()}
        if place.framework == "numpy":
            again = {n: v.copy() if n in p.mutated else v for n, v in kwargs.items()}
        first = self.call(place, lambda: p.op(**again, backend=place.backend))
        if first is None:
            return
        first = _several(first)[0]
        if place.framework == "numpy":
            buffer = laid_out(np.full(first.shape, np.nan, first.dtype), "plain")
        else:
            buffer = sys.modules["torch"].full_like(
                first, math.nan, memory_format=sys.modules["torch"].contiguous_format
            )
        found = self.call(place, lambda: p.op(**kwargs, out=buffer, backend=place.backend))
        if found is None:
            return
        self.expect(place, "out is returned", _several(found)[0] is buffer)
        # A copy of an updated array may lie otherwise, and NumPy's products depend on that.
        if place.device == "cpu" and p.exact and not (p.mutated and place.backend == "numpy"):
            self.expect(place, "out has the same bits", _same_bits(buffer, first))

    def refuse(self, place: Place, argument: str, kwargs: dict[str, Any], check: str) -> None:
        """Expect a documented error that names the argument, and that nothing has changed."""
        self.ledger.calls[self.op, str(place)] += 1
        before = contents(kwargs)
        try:
            self.problem.op(**kwargs, backend=place.backend)
            if place.device == "cuda":
                # A GPU checks edges by itself; the next call with them raises.
                sys.modules["torch"].cuda.synchronize()
                self.problem.op(**kwargs, backend=place.backend)
        except REFUSALS as error:
            first = str(error).split(":")[0].removesuffix(".vjp")
            named = first in (self.op, *PACKED) and argument in str(error)
            self.expect(place, f"error for {check}", named, f"{type(error).__name__}: {error}")
        except fusedops.BackendUnavailable:
            return
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self.expect(place, f"error for {check}", False, message)
            return
        else:
            self.expect(place, f"no error for {check}", False, "nothing was raised")
            return
        self.expect(place, f"{check} changed arguments", contents(kwargs) == before)

    def bad(self, place: Place) -> None:
        """Give one wrong argument at a time."""
        p = self.problem
        for argument, value in p.bad:
            kwargs = self.kwargs(place, packed=False)
            if place.framework == "torch":
                value = each(lambda array: tensor(array, None, "plain", place.device), value)
            self.refuse(place, argument, {**kwargs, argument: value}, f"bad {argument}")

    def write(self, place: Place) -> None:
        """Write to an argument between forward and backward."""
        p = self.problem
        if place.framework != "torch" or not p.differentiable or place.device != "cpu":
            return
        torch, truth = sys.modules["torch"], self.truth(place)
        for name in [*p.arrays, *p.constants]:
            kwargs = self.kwargs(place)
            if not isinstance(kwargs.get(name), torch.Tensor) or not kwargs[name].numel():
                continue
            if self.layout(place) == "repeated" and name in p.arrays:
                continue  # torch can't write to elements that share a place.
            graph = self._graph(place, kwargs)
            if graph is None:
                return
            outputs, needed, cotangents = graph
            kwargs = {**kwargs, **dict(zip(p.arrays, needed, strict=True))}
            with torch.no_grad():
                written = kwargs[name]
                if written.is_floating_point():
                    written.mul_(0.5)
                else:
                    written.copy_(written.flip(-1))
            self.ledger.calls[self.op, str(place)] += 1
            try:
                gradients = torch.autograd.grad(outputs, needed, cotangents, materialize_grads=True)
            except RuntimeError as error:
                told = "modified by an inplace operation" in str(error)
                self.expect(place, f"error for {name} written to", told, str(error))
                continue
            check = f"after {name} was written to, gradient"
            self._compare(place, check, list(gradients), truth.gradients, truth.bounds[1], True)


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        if dtype in NUMPY_DTYPES:
            return array.astype(dtype).astype(np.float64)
    torch = sys.modules["torch"]
    found = torch.tensor(array).to(getattr(torch, dtype)).double().numpy()
    # Finite numbers that overflow in the narrow dtype are replaced.
    return np.where(np.isfinite(found) | ~np.isfinite(array), found, np.sign(array))


def _same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, (np.ndarray, np.generic)):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    equal = sys.modules["torch"].equal
    one, other = one.detach(), other.detach()
    return equal(one, other) or equal(one.nan_to_num(), other.nan_to_num())


_SLACK = {"float64": 1e-307, "float32": 1.2e-38, "bfloat16": 1.2e-38, "float16": 2.4e-7}
_MOST = {"float64": 1e307, "float32": 3e38, "bfloat16": 3e38, "float16": 6e4}
ASPECTS = ("values", "values", "second", "out", "bad", "write")
