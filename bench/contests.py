"""Contests: one problem of an op, or of a whole step of a program, that backends and peers compute.

Both kinds have the same attributes and methods, by which `bench.measure` times them in turns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import fusedops
from bench.floors import Rates
from bench.peers import Peer, Unsuited
from bench.steps import Case, Step, result
from bench.timing import GRAPHS, NUMPY, TORCH
from bench.workloads import BACKWARD, Problem, Workload, errors
from fusedops import testing
from fusedops._catalogue import BOTH, FORWARD, Steps, steps_of
from fusedops._frame import registry
from fusedops._frame.check import is_tensor


@dataclass(frozen=True)
class Contestant:
    """A backend, or a peer, and how it is called: `prepare` returns its steps from a problem."""

    who: str
    how: str
    prepare: Callable[..., Steps]
    peer: Peer | None = None
    steps: Steps = field(default_factory=dict)
    error: dict[str, float | None] | None = None

    @property
    def computes(self) -> bool:
        return self.peer is None or self.peer.computes

    @property
    def waits(self) -> bool:
        """Whether its calls may wait for a GPU, as a peer's do that can't be captured."""
        return self.peer is not None and self.peer.computes and not self.peer.captured


def backends_of(workload: Workload | Step, asked: Sequence[str]) -> list[registry.Backend]:
    """Return the backends to time: of the requested ones all that can serve, or all with kernels.

    Without any kernels, the backend of the plain formula is timed.
    """
    able = []
    for backend in registry.BACKENDS:
        if backend.speaks == "torch" and registry.import_error("torch"):
            continue
        # A request by name would have Triton's kernels interpreted on a CPU.
        about = workload.device, np.dtype(np.float32), None
        request = registry.Request(workload.op.primitive.name, backend.speaks, *about)
        if (not asked or backend.name in asked) and registry.why_not(backend, request) is None:
            able.append(backend)
    kernels = [backend for backend in able if backend.package is not None]
    return able if asked else kernels or able[:1]


class Contest:
    """A problem that backends and peers compute in turns.

    Once the problem is made, `given` has the arguments of `prepare`, by how it is called.
    Errors are those of a problem of its `kind`. All the time of a `tiny` call is the host's.
    """

    threads: int | None = None
    rounds: int | None = None
    tiny = False
    given: dict[str, tuple[Any, ...]]
    preparations: Mapping[str, Callable[[], Any]] = {}

    def __init__(self, of: Workload | Step, op: str, name: str) -> None:
        self.of, self.op, self.device, self.title = of, op, of.device, f"{op}, {name}"
        self.kind: tuple[Any, ...] = (op,)
        self.about: dict[str, Any] = {"op": op, "workload": name, "size": 0, "shape": {}}
        self.about |= {"dtype": of.dtype, "threads": fusedops.get_num_threads()}

    @property
    def times_host(self) -> bool:
        """Whether the host's own time with a call is measured."""
        return self.device != "cpu" and self.rounds is None

    def of_pass(self, what: str, rates: Rates) -> dict[str, Any]:
        """Return what the rows of a pass have in common."""
        return self.about


class OfOp(Contest):
    """A call of an op."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, workload.op.__name__, workload.name)
        self.workload, self.threads, self.tiny = workload, workload.threads, workload.tiny
        self.tolerance = workload.tolerance
        self.small, threads = min(workload.size, workload.small), self.about["threads"]
        # Kernels of one thread have a share of the machine's rates.
        self.share = (self.threads or threads) / threads
        self.kind = self.op, workload.name, str(workload.make), workload.dtype, self.small
        self.about |= {"size": workload.size, "shape": {workload.unit: workload.size}}
        self.about |= {"threads": self.threads or threads, "error_of": self.small}

    @property
    def times_host(self) -> bool:
        return self.workload.times_host

    def make(self) -> None:
        """Make the problem, or raise `Unsuited` with the reason why it can't be made here."""
        for package in self.workload.needs:
            if registry.import_error(package):
                raise Unsuited(f"{package} not installed")
        self.problem = tensors = self.workload.problem()
        if self.problem.framework == "numpy" and registry.import_error("torch") is None:
            tensors = self.problem.to(self.device, self.workload.dtype)
        self.given = {
            how: (problem, problem.cotangent() if problem.leaves else None)
            for how, problem in ((NUMPY, self.problem), (TORCH, tensors))
        }
        self.about["shape"] = self.problem.shape
        if self.workload.prepares:
            self.preparations = self.problem.preparations

    def hows(self, at: int, backend: registry.Backend) -> list[str]:
        """Return how the backend at a place in their order is called."""
        narrow = self.workload.dtype in ("bfloat16", "float16")
        arrays = backend.speaks == "numpy" and self.device == "cpu" and not narrow
        # The bridge to tensors is the same for all backends of NumPy arrays.
        tensors = backend.speaks == "torch" or at == 0 or narrow
        return [*[NUMPY] * arrays, *[TORCH] * tensors]

    def ours(self, backend: str, how: str, problem: Problem, cotangent: Any) -> Steps:
        """Return the steps of a backend."""
        return steps_of(problem, backend, cotangent)

    def errors(self, way: Contestant) -> dict[str, float]:
        """Return the errors of a way on a small problem."""
        framework = "numpy" if way.how == NUMPY else "torch"
        return errors(self.workload.at(self.small), way.prepare, framework)

    def graph(self, way: Contestant, steps: Steps) -> Steps:
        """Return the steps to capture in CUDA graphs."""
        if way.peer:
            return {FORWARD: steps[FORWARD]} if way.peer.captured else {}
        problem, cotangent = self.given[way.how]
        alone = {BACKWARD: problem.backward(way.who, cotangent)} if BOTH in steps else {}
        return steps | alone

    def of_pass(self, what: str, rates: Rates) -> dict[str, Any]:
        work = self.problem.work.get(what)
        if not work:
            return self.about
        dtype = self.workload.rounds_to or self.workload.dtype
        floor = max(rates.floors_ms(work, dtype, self.share).values())
        return self.about | {"work": {**asdict(work), "floor_ms": floor}}


class OfStep(Contest):
    """A case of a whole step, on the first backend only, unless some are `asked` for."""

    def __init__(self, step: Step, case: Case, asked: bool = False) -> None:
        super().__init__(step, step.name, case.name)
        self.step, self.case, self.asked, self.rounds = step, case, asked, step.rounds
        self.tolerance = lambda gradient: step.tolerance

    def make(self) -> None:
        """Make the problem, or raise `Unsuited` with the reason why it can't be made here."""
        problem = self.case.make()
        self.given = dict.fromkeys((NUMPY, TORCH, GRAPHS), (problem, self.device))
        self.about |= {"size": next(iter(problem.shape.values())), "shape": problem.shape}

    def hows(self, at: int, backend: registry.Backend) -> list[str]:
        """Return how the backend at a place in their order is called."""
        on_gpu = self.device != "cpu"
        able = {NUMPY: backend.speaks == "numpy" and not on_gpu, TORCH: True, GRAPHS: on_gpu}
        return [how for how in self.step.hows if able[how] and (at == 0 or self.asked)]

    def ours(self, backend: str, how: str, problem: Any, device: str) -> Steps:
        """Return the steps of a backend."""
        steps: Steps = self.step.ours(problem, how, device, self.step.dtype, backend).steps()
        return steps

    def errors(self, way: Contestant) -> dict[str, float]:
        """Return the largest errors of a way on the small problems of the step."""
        if not _truths(self.step):
            raise Unsuited("none of its small problems can be made here")
        largest: dict[str, float] = {}
        for small, truth in _truths(self.step):
            for name, error in errors_of_step(way.prepare(small, self.device), truth).items():
                # NaN is larger than all.
                if not error <= largest.setdefault(name, 0.0):
                    largest[name] = error
        return largest

    def graph(self, way: Contestant, steps: Steps) -> Steps:
        """Return the steps to capture in CUDA graphs."""
        if way.peer or not self.step.captured or GRAPHS in self.step.hows:
            return {}
        return {what: steps[what] for what in (FORWARD, BOTH) if what in steps}


@functools.cache
def _truths(step: Step) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return a step's small problems, and their results in float64."""
    problems = []
    for case in step.checks:
        # A kind that can't be made here has no cases either.
        with contextlib.suppress(Unsuited):
            problems.append(case.make())
    return [(small, step.reference(small)) for small in problems]


def errors_of_step(steps: Steps, truth: tuple[Any, ...]) -> dict[str, float]:
    """Return the errors of a step's value, and of its gradients where the program has them."""
    got = result(steps)
    errors = [testing.error(_in_numpy(x), _in_numpy(y)) for x, y in zip(got, truth, strict=False)]
    return {"value": errors[0], **({"gradient": max(errors[1:])} if errors[1:] else {})}


def _in_numpy(x: Any) -> Any:
    return x.double().cpu().numpy() if is_tensor(x) else np.asarray(x, float)
