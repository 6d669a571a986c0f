"""Measurements of `fusedops bench`: workloads and whole steps, beside peers and floors."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import itertools
import math
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import fusedops
from bench import floors, language, memory, report, steps, uma
from bench.peers import EMPTY, PEERS, Peer, Unsuited, versions
from bench.steps import Case, Step, result
from bench.timing import (
    COPIES,
    GRAPH,
    GRAPHS,
    NUMPY,
    TORCH,
    Timing,
    graphed,
    interleaved,
    noisy,
    scaled,
    waiting,
)
from fusedops import testing
from fusedops._frame import registry
from fusedops._frame.check import is_tensor
from fusedops._workloads import (
    BACKWARD,
    BOTH,
    FORWARD,
    GROWTH,
    WORKLOADS,
    Problem,
    Steps,
    Workload,
    errors,
    steps_of,
)

#: Whole steps, by name: functions from a device.
STEPS: dict[str, Callable[[str], Step]] = {
    "refinement": steps.refinement,
    "pair": steps.pair,
    "jet": language.jet,
    "jet_block": language.jet_block,
    "serving": language.serving,
    "uma": uma.uma,
}


@dataclass(frozen=True)
class Plan:
    """The ops, whole steps and backends to measure, and for how many seconds each run.

    Without ops and steps, all ops are timed. Of `backends`, the ones that can serve are; without
    any, all backends with kernels, of which a step takes the first.
    """

    device: str = "cpu"
    ops: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    quick: bool = False
    whole: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        if self.quick:
            return 0.03
        return 0.5 if self.device == "cpu" else 0.08

    def workloads(self) -> list[Workload]:
        return [
            w
            for w in WORKLOADS
            if w.device == self.device and self._of(w) and (w.quick or not self.quick)
        ]

    def growing(self) -> list[tuple[Workload, tuple[int, ...]]]:
        """Return workloads with sizes over three decades; over two, in fewer steps, if quick."""
        step, count = (2, 7) if self.quick else (1, None)
        return [(w, sizes[:count:step]) for w, sizes in GROWTH[self.device] if self._of(w)]

    def whole_steps(self) -> list[Step]:
        found = [STEPS[name](self.device) for name in self.whole]
        if self.quick:
            quick = [tuple(case for case in step.cases if case.quick) for step in found]
            found = [replace(step, cases=cases) for step, cases in zip(found, quick, strict=True)]
        return found

    @property
    def steps(self) -> int:
        """How often a bench reports progress."""
        of_ops = len(self.workloads()) + sum(len(sizes) for _, sizes in self.growing())
        return 1 + of_ops + sum(len(step.cases) for step in self.whole_steps())

    def _of(self, workload: Workload) -> bool:
        if not self.ops:
            return not self.whole
        return bool({*names_of(workload.op)} & {*self.ops})


def names_of(op: Any) -> tuple[str, str]:
    """Return the names that select an op: its own, and its module's."""
    module = op.__module__.rpartition(".")[2]
    # Users import the ops that make matrices from the module of the ops that take them.
    return op.__name__, "wigner" if module == "harmonics" else module


def op_names() -> list[str]:
    """Return all names that select ops."""
    return list(dict.fromkeys(name for w in WORKLOADS for name in sorted(names_of(w.op))))


def backends_of(workload: Workload | Step, asked: Sequence[str]) -> list[registry.Backend]:
    """Return the backends to time: of the requested ones all that can serve, or all with kernels.

    Without any kernels, the backend of the plain formula is timed.
    """
    able = []
    for backend in registry.BACKENDS:
        if backend.speaks == "torch" and registry.import_error("torch"):
            continue
        name, device = workload.op.primitive.name, workload.device
        dtype = np.dtype(np.float32)
        # A request by name would have Triton's kernels interpreted on a CPU.
        request = registry.Request(name, backend.speaks, device, dtype, None)
        if (not asked or backend.name in asked) and registry.why_not(backend, request) is None:
            able.append(backend)
    kernels = [backend for backend in able if backend.package is not None]
    return able if asked else kernels or able[:1]


@dataclass(frozen=True)
class Contestant:
    """A backend or a peer on one workload: its name, its steps, and how they are run.

    A call that `queues` leaves its work to a GPU, and the host is free when the call returns.
    """

    who: str
    how: str
    steps: Steps
    backend: str | None = None
    computes: bool = True
    queues: bool = True
    error: dict[str, float] | None = None


def _by_pass(contestants: list[Contestant]) -> dict[str, dict[tuple[str, str], Contestant]]:
    passes: dict[str, dict[tuple[str, str], Contestant]] = {}
    for each in contestants:
        for what in each.steps:
            passes.setdefault(what, {})[each.who, each.how] = each
    return passes


class Bench:
    """Measurements of one device, in one process."""

    def __init__(self, plan: Plan, advance: Callable[[str], None] = lambda what: None) -> None:
        self.plan, self.advance = plan, advance
        self.has_torch = registry.import_error("torch") is None
        self.wait = waiting(plan.device)
        # By workload kind and contestant: the errors, or why there are none.
        self.checked: dict[Any, dict[str, float] | str] = {}
        # By step: its small problems, and their results in float64.
        self.truths: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {}
        asked = {w.op.__name__ for w in plan.workloads()} | {*plan.whole}
        peers = [peer for peer in PEERS if asked & {*peer.ops}]
        self.skipped = {p.name: why for p in peers if (why := self._why_not(p))}
        if self.has_torch:
            import torch

            torch.set_num_threads(fusedops.get_num_threads())

    def _why_not(self, peer: Peer) -> str | None:
        if self.plan.device not in peer.devices:
            return None
        return peer.why_not() if self.has_torch or not peer.tensors else "needs torch"

    def run(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name of every op with its results, and of a step after each of its cases."""
        workloads, growing = self.plan.workloads(), self.plan.growing()
        dtypes = {w.rounds_to or w.dtype for w in [*workloads, *(w for w, _ in growing)]}
        dtypes |= {step.dtype for step in self.plan.whole_steps()}
        seconds = max(self.plan.seconds, 0.1)
        self.advance("rates of the machine")
        self.rates = floors.measured(self.plan.device, dtypes, seconds, self.has_torch)
        about = {"machine": machine(self.plan.device), "rates": rates_in_words(self.rates)}
        for op in dict.fromkeys(w.op for w in workloads):
            cases = [row for w in workloads if w.op is op for row in self.cases(w)]
            wrong = {row["who"] for row in cases if row["refused"] and row["ours"]}
            growth = [
                row for w, sizes in growing if w.op is op for row in self.growth(w, sizes, wrong)
            ]
            skipped = self._skipped(op.__name__)
            yield op.__name__, {**about, "cases": cases, "growth": growth, "skipped": skipped}
        for step in self.plan.whole_steps():
            rows: list[dict[str, Any]] = []
            for case in step.cases:
                rows = [*rows, *self.whole(step, case)]
                skipped = self._skipped(step.name)
                yield step.name, {**about, "cases": rows, "growth": [], "skipped": skipped}

    def _skipped(self, name: str) -> dict[str, str]:
        peers = {peer.name for peer in PEERS if name in peer.ops}
        return {n: why for n, why in self.skipped.items() if n in peers or name in n}

    def cases(self, workload: Workload) -> list[dict[str, Any]]:
        """Return the rows of one workload."""
        self.advance(f"{workload.op.__name__}, {workload.name}, {workload.size} {workload.unit}")
        missing = [package for package in workload.needs if registry.import_error(package)]
        if missing:
            self.skipped[f"{workload.op.__name__}, {workload.name}"] = f"{missing[0]} not installed"
            return []
        threads = fusedops.get_num_threads()
        try:
            self._set_threads(workload.threads)
            return self._cases(workload, (workload.threads or threads) / threads)
        except Exception as error:  # out of memory, say: the other cases are worth having
            about = self._about(workload, {workload.unit: workload.size})
            return [_row("every backend", "", "", refused=_word(error), ours=True) | about]
        finally:
            self._set_threads(threads if workload.threads else None)
            self._clear()

    def _clear(self) -> None:
        gc.collect()
        if self.plan.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def whole(self, step: Step, case: Case) -> list[dict[str, Any]]:
        """Return the rows of one case of a step: its passes, and its parts with their shares."""
        self.advance(f"{step.name}, {case.name}")
        about: dict[str, Any] = {
            "op": step.name,
            "workload": case.name,
            "dtype": step.dtype,
            "threads": fusedops.get_num_threads(),
        }
        try:
            problem = case.make()
            shape = step.shape(problem)
            about |= {"size": next(iter(shape.values())), "shape": shape}
            contestants, rows = self._programs(step, problem)
            beside_empty = EMPTY in {each.who for each in contestants}
            for what, entries in _by_pass(contestants).items():
                host = (EMPTY, TORCH) in entries if beside_empty else step.device != "cpu"
                rows += self._timed(what, entries, times_host=host)
        except (Unsuited, ImportError) as reason:
            self.skipped[f"{step.name}, {case.name}"] = str(reason)
            return []
        except Exception as error:  # out of memory, say: the other cases are worth having
            about = {"size": 0, "shape": {}} | about
            return [_row("every backend", "", "", refused=_word(error), ours=True) | about]
        finally:
            self._clear()
        passes: dict[tuple[str, str], dict[str, Any]] = {}
        for row in rows:
            passes.setdefault((row["who"], row["how"]), {})[row["pass"]] = row["ms"]
        for row in rows:
            ms = passes[row["who"], row["how"]]
            whole = ms.get(BOTH, ms.get(FORWARD))
            is_part = step.has_shares and row["pass"] not in (FORWARD, BOTH)
            if row["ms"] and whole and is_part:
                row["share"] = row["ms"] / whole
        return [row | about for row in rows]

    def _programs(self, step: Step, problem: Any) -> tuple[list[Contestant], list[dict[str, Any]]]:
        """Return our ways and the peers that make a step, and rows for the ones that can't."""
        ways: list[tuple[str, str, bool, bool, Callable[[Any], Steps]]] = []
        backends = backends_of(step, self.plan.backends)
        for backend in backends if self.plan.backends else backends[:1]:
            name = backend.name
            able = {
                NUMPY: backend.speaks == "numpy" and step.device == "cpu",
                TORCH: self.has_torch,
                GRAPHS: self.has_torch and step.device == "cuda",
            }
            for how in (how for how in step.hows if able[how]):
                ways.append((name, how, True, True, partial(_own, step, how, name)))
        for peer in PEERS:
            suits = step.name in peer.ops and step.device in peer.devices
            if suits and peer.name not in self.skipped and (peer.quick or not self.plan.quick):
                how = TORCH if peer.tensors else NUMPY
                theirs = partial(peer.prepare, device=step.device)
                ways.append((peer.name, how, False, peer.checked, theirs))
        chosen, rows = [], []
        for who, how, own, checked, prepare in ways:
            try:
                found = self._errors_of_step(step, who, how, prepare) if checked else None
                if own and found and not max(found.values()) <= step.tolerance:
                    raise ArithmeticError(f"off by {found}, {step.tolerance:.1e} allowed")
                steps = prepare(problem)
            except Unsuited as reason:
                if str(reason):
                    rows.append(_row(who, how, FORWARD, refused=str(reason)))
                continue
            except Exception as error:  # a program that fails is as wrong as one that errs
                rows.append(_row(who, how, FORWARD, refused=_word(error), ours=own))
                continue
            contest = partial(Contestant, backend=who if own else None, error=found)
            chosen.append(contest(who, how, steps, computes=who != EMPTY))
            if step.device == "cuda" and own and step.captured and GRAPHS not in step.hows:
                passes = {what: steps[what] for what in (FORWARD, BOTH) if what in steps}
                chosen.append(contest(who, GRAPH, passes))
        return chosen, rows

    def _errors_of_step(
        self, step: Step, who: str, how: str, prepare: Callable[[Any], Steps]
    ) -> dict[str, float]:
        """Return the largest errors of a program in the small problems of a step."""
        if step.name not in self.truths:
            problems = []
            for case in step.checks:
                # A kind that can't be made here has no cases either.
                with contextlib.suppress(Unsuited):
                    problems.append(case.make())
            self.truths[step.name] = [(small, step.reference(small)) for small in problems]
        key = step.name, who, how
        if key not in self.checked:
            if not self.truths[step.name]:
                raise Unsuited("none of its small problems can be made here")
            largest: dict[str, float] = {}
            for small, truth in self.truths[step.name]:
                for name, error in _step_errors(prepare(small), truth).items():
                    # NaN is larger than all.
                    if not error <= largest.setdefault(name, 0.0):
                        largest[name] = error
            self.checked[key] = largest
        found = self.checked[key]
        assert isinstance(found, dict)
        return found

    def _set_threads(self, threads: int | None) -> None:
        if threads is None:
            return
        fusedops.set_num_threads(threads)
        if self.has_torch:
            import torch

            torch.set_num_threads(threads)

    def _cases(self, workload: Workload, share: float) -> list[dict[str, Any]]:
        problem = workload.problem()
        contestants, rows = self._contestants(workload, problem)
        for row in rows:
            row.update(self._about(workload, problem.shape))
        for what, entries in _by_pass(contestants).items():
            about = self._about(workload, problem.shape)
            about["error_of"] = min(workload.size, workload.small)
            if work := problem.work.get(what):
                floor = self.rates.floors_ms(work, workload.rounds_to or workload.dtype, share)
                about["work"] = {**asdict(work), "floor_ms": max(floor.values())}
            options = {"tiny": workload.tiny, "times_host": workload.times_host}
            rows += [row | about for row in self._timed(what, entries, **options)]
        return rows

    def _about(self, workload: Workload, shape: dict[str, int]) -> dict[str, Any]:
        return {
            "op": workload.op.__name__,
            "workload": workload.name,
            "size": workload.size,
            "shape": shape,
            "dtype": workload.dtype,
            "threads": workload.threads or fusedops.get_num_threads(),
        }

    def _contestants(
        self, workload: Workload, problem: Problem
    ) -> tuple[list[Contestant], list[dict[str, Any]]]:
        """Return the contestants, and rows for backends and peers that are refused or can't run."""
        chosen, rows = [], []
        cotangent = problem.cotangent() if problem.leaves else None
        tensors, seed = problem, cotangent
        if self.has_torch and problem.framework == "numpy":
            tensors = problem.to(workload.device, workload.dtype)
            seed = tensors.cotangent() if problem.leaves else None
        backends = backends_of(workload, self.plan.backends)
        narrow = workload.dtype in ("bfloat16", "float16")
        for at, backend in enumerate(backends):
            hows = [NUMPY] if backend.speaks == "numpy" and self.plan.device == "cpu" else []
            if narrow:
                hows = []
            # The bridge to tensors is the same for all backends of NumPy arrays.
            if self.has_torch and (backend.speaks == "torch" or at == 0 or narrow):
                hows.append(TORCH)
            for how in hows:
                given, own = (problem, cotangent) if how == NUMPY else (tensors, seed)
                make = partial(_ours, backend.name)
                found: Any = self._errors(workload, backend.name, how, make)
                if reason := _refusal(workload, found):
                    rows.append(_row(backend.name, how, FORWARD, refused=reason, ours=True))
                    if not isinstance(found, str):
                        rows[-1]["error"] = _finite(found)
                    continue
                steps = steps_of(given, backend.name, own)
                contest = partial(Contestant, backend=backend.name, error=found)
                chosen.append(contest(backend.name, how, steps))
                if self.plan.device == "cuda":
                    if BOTH in steps:
                        steps = steps | {BACKWARD: given.backward(backend.name, own)}
                    chosen.append(contest(backend.name, GRAPH, steps))
        for peer in PEERS:
            if peer.tensors:
                self._add_peer(peer, workload, tensors, seed, chosen, rows)
            else:
                self._add_peer(peer, workload, problem, cotangent, chosen, rows)
        if workload.prepares:
            how = NUMPY if problem.framework == "numpy" else TORCH
            for name, prepare in problem.preparations.items():
                chosen.append(Contestant(name, how, {"preparation": prepare}, ""))
        return chosen, rows

    def _add_peer(
        self,
        peer: Peer,
        workload: Workload,
        problem: Problem,
        seed: Any,
        chosen: list[Contestant],
        rows: list[dict[str, Any]],
    ) -> None:
        device, how = self.plan.device, TORCH if peer.tensors else NUMPY
        if (
            workload.op.__name__ not in peer.ops
            or device not in peer.devices
            or peer.name in self.skipped
            or (self.plan.quick and not peer.quick)
            or (peer.name == EMPTY and not workload.times_host)
        ):
            return
        try:
            steps = peer.prepare(problem, seed)
            found: Any = None
            if peer.computes and peer.checked:
                found = self._errors(workload, peer.name, how, peer.prepare)
                kept = ("value",) if peer.dense else ("value", "gradient")
                found = (
                    None if isinstance(found, str) else {n: found[n] for n in kept if n in found}
                )
        except Unsuited as reason:
            if str(reason):
                rows.append(_row(peer.name, how, FORWARD, refused=str(reason)))
            return
        except Exception as error:  # any error of other people's code becomes a word in the table
            rows.append(_row(peer.name, how, FORWARD, refused=_word(error)))
            return
        contest = partial(Contestant, peer.name, computes=peer.computes, error=found)
        # A peer that can't be captured may wait for the GPU in its steps.
        queues = peer.captured or not peer.computes
        chosen.append(contest(how, steps, queues=queues))
        if device == "cuda" and peer.captured:
            chosen.append(contest(GRAPH, {FORWARD: steps[FORWARD]}))

    def _errors(self, workload: Workload, who: str, how: str, steps: Any) -> dict[str, float] | str:
        """Return the errors of a small problem of the same kind, or of this one if it is smaller.

        If the check fails, return the reason as text.
        """
        small = workload.at(min(workload.size, workload.small))
        kind = workload.op.__name__, workload.name, workload.make, small.size
        key = (*map(str, kind), workload.dtype, who, how)
        if key not in self.checked:
            framework = "numpy" if how == NUMPY else "torch"
            try:
                self.checked[key] = errors(small, steps, framework)
            except Unsuited:
                raise
            except Exception as error:  # a kernel that fails is as wrong as one that errs
                self.checked[key] = _word(error)
        return self.checked[key]

    def _timed(
        self,
        what: str,
        entries: dict[tuple[str, str], Contestant],
        *,
        tiny: bool = False,
        times_host: bool = False,
    ) -> list[dict[str, Any]]:
        """Return a row for every run of one pass, timed in turns."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        runs: dict[tuple[str, str], Callable[[], Any]] = {}
        for key, each in entries.items():
            error = _finite(each.error)
            row = _row(each.who, each.how, what, ours=each.backend is not None, error=error)
            row["computes"] = each.computes
            rows[key] = row
            try:
                step = each.steps[what]
                if not tiny:
                    row["peak_MB"] = memory.peak_MB(step, self.plan.device)
                runs[key] = graphed(step) if each.how == GRAPH else step
            except Exception as error:  # no capture possible, or out of memory
                row["refused"] = _word(error)
        # Full rounds of a slow step would take minutes.
        times = interleaved(runs, self.wait, self.plan.seconds, host=tiny)
        for run, timing in times.items():
            rows[run] |= _times(scaled(timing, 1 / COPIES) if run[1] == GRAPH else timing)
        tensors = {key: run for key, run in runs.items() if key[1] == TORCH}
        if tensors and self.plan.device == "cpu" and not tiny:
            times = interleaved(tensors, self.wait, self.plan.seconds, before=_product())
            for run, timing in times.items():
                rows[run] |= {"alone_ms": rows[run]["ms"], **_times(timing)}
        if times_host and (what in (FORWARD, BOTH) or (EMPTY, TORCH) in entries):
            if not tiny:
                eager = {k: r for k, r in runs.items() if k[1] != GRAPH and entries[k].queues}
                times = interleaved(eager, self.wait, self.plan.seconds / 2, host=True)
            empty = times.get((EMPTY, TORCH))
            for (who, how), timing in times.items():
                rows[who, how] |= _host(timing, empty if how == TORCH and who != EMPTY else None)
        return list(rows.values())

    def growth(
        self, workload: Workload, sizes: Sequence[int], wrong: set[str]
    ) -> list[dict[str, Any]]:
        """Return the times over sizes, forward and backward, of backends that aren't wrong."""
        backends = [
            b.name for b in backends_of(workload, self.plan.backends) if b.name not in wrong
        ]
        on_gpu = self.plan.device == "cuda"
        points: dict[str, list[tuple[int, Timing]]] = {name: [] for name in backends}
        what = FORWARD
        for size in sizes:
            self.advance(f"{workload.op.__name__}, growth, {size} {workload.unit}")
            try:
                what, times = self._at(workload.at(size), backends)
            except Exception as error:  # it grows no further here
                self.skipped[f"growth of {workload.op.__name__} beyond {size}"] = _word(error)
                break
            for name, timing in times.items():
                points[name].append((size, timing))
            gc.collect()
        rows = []
        for name, measured in points.items():
            if len(measured) < 3:
                continue
            at, medians = [size for size, _ in measured], [timing.ms for _, timing in measured]
            quartiles = [timing.quartiles_ms for _, timing in measured]
            exponent, left_out = grown(at, medians, quartiles)
            rows.append(
                {
                    "op": workload.op.__name__,
                    "workload": workload.name,
                    "dtype": workload.dtype,
                    "who": name,
                    "how": GRAPH if on_gpu else NUMPY if _speaks(name) == "numpy" else TORCH,
                    "pass": what,
                    "unit": workload.unit,
                    "sizes": at,
                    "ms": medians,
                    "quartiles_ms": quartiles,
                    "noisy": left_out,
                    "exponent": exponent,
                }
            )
        return rows

    def _at(self, workload: Workload, backends: Sequence[str]) -> tuple[str, dict[str, Timing]]:
        """Return the longest pass of a problem, and its times by backend."""
        problem = workload.problem()
        tensors = problem
        if self.has_torch and problem.framework == "numpy":
            tensors = problem.to(self.plan.device, workload.dtype)
        what = BOTH if problem.leaves else FORWARD
        runs = {}
        for name in backends:
            given = problem if _speaks(name) == "numpy" else tensors
            step = steps_of(given, name, given.cotangent() if given.leaves else None)[what]
            runs[name] = graphed(step) if self.plan.device == "cuda" else step
        times = interleaved(runs, self.wait, self.plan.seconds / 5, 9)
        if self.plan.device == "cuda":
            times = {name: scaled(timing, 1 / COPIES) for name, timing in times.items()}
        return what, times


def grown(
    sizes: Sequence[int], times: Sequence[float], quartiles: Sequence[Sequence[float]]
) -> tuple[float | None, list[int]]:
    """Return the `power` over the sizes whose times aren't noisy, and the other sizes.

    The power is None where more than a quarter of the sizes is left out.
    """
    points = list(zip(sizes, times, quartiles, strict=True))
    left_out = [size for size, ms, spread in points if noisy(ms, spread)]
    quiet = [(size, ms) for size, ms, spread in points if not noisy(ms, spread)]
    if 4 * len(left_out) > len(points):
        return None, left_out
    return power(*zip(*quiet, strict=True)), left_out


def power(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Return the p of times that grow as Nᵖ, overhead included: the median slope of all pairs.

    So a single size that another process has slowed down moves it little (Theil and Sen).
    """
    slopes = [
        math.log(late / early) / math.log(large / small)
        for (small, early), (large, late) in itertools.combinations(
            zip(sizes, times, strict=True), 2
        )
    ]
    return round(statistics.median(slopes), 2)


def machine(device: str) -> dict[str, Any]:
    """Return the machine and the versions of a measurement."""
    names = {"fusedops": fusedops.__version__, "python": platform.python_version()}
    for package in ("numpy", "numba", "torch", "triton"):
        if registry.import_error(package) is None:
            names[package] = importlib.metadata.version(package)
    name = _processor()
    if device == "cuda":
        import torch

        name = torch.cuda.get_device_name()
    return {
        "name": name,
        "device": device,
        "threads": fusedops.get_num_threads(),
        "versions": names | versions(),
    }


def rates_in_words(rates: floors.Rates) -> dict[str, Any]:
    return {
        "copy_GB_s": rates.bytes / 1e9,
        "product_GFLOP_s": {dtype: rate / 1e9 for dtype, rate in sorted(rates.flops.items())},
        "exponentials_G_s": rates.exps / 1e9,
    }


def _processor() -> str:
    """Return the processor's name and the instruction set that the kernels use on it."""
    level = fusedops.info().instruction_set
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {level or 'no compiled kernels'}"


def _speaks(name: str) -> str:
    return next(backend.speaks for backend in registry.BACKENDS if backend.name == name)


def _ours(backend: str, problem: Problem, cotangent: Any) -> Steps:
    return steps_of(problem, backend, cotangent)


def _own(step: Step, how: str, backend: str, problem: Any) -> Steps:
    return step.ours(problem, how, step.device, step.dtype, backend).steps()


def _step_errors(steps: Steps, truth: tuple[Any, ...]) -> dict[str, float]:
    """Return the errors of a step's value, and of its gradients where the program has them."""
    got = result(steps)
    errors = [testing.error(_in_numpy(x), _in_numpy(y)) for x, y in zip(got, truth, strict=False)]
    return {"value": errors[0], **({"gradient": max(errors[1:])} if errors[1:] else {})}


def _in_numpy(x: Any) -> Any:
    return x.double().cpu().numpy() if is_tensor(x) else np.asarray(x, float)


def _refusal(workload: Workload, found: dict[str, float] | str) -> str | None:
    """Return why a kernel isn't timed: its exception, or how large its error is."""
    if isinstance(found, str):
        return found
    off = [
        f"{name} off by {error:.1e}, {allowed:.1e} allowed"
        for name, error in found.items()
        if not error <= (allowed := workload.tolerance(name == "gradient"))
    ]
    return "; ".join(off) or None


def _word(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:200]


def _finite(errors: dict[str, float] | None) -> dict[str, float | None] | None:
    """Return errors for JSON, which has no infinity and no NaN: None stands for these."""
    if errors is None:
        return None
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}


def _row(who: str, how: str, what: str, **values: Any) -> dict[str, Any]:
    row = dict.fromkeys((*report.OF_PROBLEM, *report.OF_CONTESTANT, "work", *report.COLUMNS))
    row |= {"who": who, "how": how, "pass": what, "ours": False, "computes": True}
    return row | values


@cache
def _product() -> Callable[[], Any]:
    """Return a product of torch's, as other operations of a program precede a call.

    For milliseconds after it, the threads of torch's OpenMP keep their cores.
    """
    import torch

    a = torch.randn(600, 600)
    return lambda: a @ a


def _times(timing: Timing) -> dict[str, Any]:
    return {"ms": timing.ms, "quartiles_ms": list(timing.quartiles_ms)}


def _host(timing: Timing, empty: Timing | None) -> dict[str, Any]:
    """Return how long the host is busy with a call, and its ratio to an empty Function."""
    return {"host_ms": timing.ms, "over_empty": timing.ms / empty.ms if empty else None}
