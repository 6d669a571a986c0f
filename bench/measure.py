"""Measurements of `fusedops bench`: workloads and whole steps, beside peers and floors."""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import math
import platform
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import fusedops
from bench import floors, language, memory, report, steps, uma, whole
from bench.contests import Contestant, OfOp, OfStep, backends_of
from bench.peers import EMPTY, PEERS, Peer, Unsuited, versions
from bench.steps import Step
from bench.timing import (
    COPIES,
    GRAPH,
    NUMPY,
    TORCH,
    Timing,
    graphed,
    interleaved,
    noisy,
    scaled,
    waiting,
)
from bench.workloads import GROWTH, WORKLOADS, Workload
from fusedops._catalogue import BOTH, FORWARD, steps_of
from fusedops._frame import registry

#: Whole steps, by name: functions from a device.
STEPS: dict[str, Callable[[str], Step]] = {
    "refinement": steps.refinement,
    "whole_refinement": whole.whole_refinement,
    "pair": steps.pair,
    "pair_float32": steps.pair_float32,
    "jet": language.jet,
    "jet_block": language.jet_block,
    "jet_block_float32": language.jet_block_float32,
    "serving": language.serving,
    "uma": uma.uma,
    "uma_md": uma.uma_md,
    "uma_md_tf32": uma.uma_md_tf32,
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
    """Return the names that select an op: its own, and its family's."""
    family = op.primitive.family
    # Users import the ops that make matrices from the module of the ops that take them.
    return op.__name__, "wigner" if family == "harmonics" else family


def op_names() -> list[str]:
    """Return all names that select ops."""
    return list(dict.fromkeys(name for w in WORKLOADS for name in sorted(names_of(w.op))))


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
        # By contest and way.
        self.checked: dict[Any, dict[str, float] | None] = {}
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
        """Yield the name of every op or step with its results, after each of its cases."""
        workloads, growing = self.plan.workloads(), self.plan.growing()
        dtypes = {w.rounds_to or w.dtype for w in [*workloads, *(w for w, _ in growing)]}
        dtypes |= {step.dtype for step in self.plan.whole_steps()}
        seconds = max(self.plan.seconds, 0.1)
        self.advance("rates of the machine")
        self.rates = floors.measured(self.plan.device, dtypes, seconds, self.has_torch)
        about = {"machine": machine(self.plan.device), "rates": rates_in_words(self.rates)}

        def block(name: str, cases: Any, growth: Any = ()) -> tuple[str, dict[str, Any]]:
            skipped = self._skipped(name)
            return name, {**about, "cases": cases, "growth": [*growth], "skipped": skipped}

        for op in dict.fromkeys(w.op for w in workloads):
            cases: list[dict[str, Any]] = []
            for w in workloads:
                if w.op is op:
                    cases = [*cases, *self.rows(OfOp(w))]
                    yield block(op.__name__, cases)
            wrong = {row["who"] for row in cases if row["refused"] and row["ours"]}
            own = [(w, sizes) for w, sizes in growing if w.op is op]
            growth = [row for each in own for row in self.growth(*each, wrong)]
            # Without a row there is the reason why times weren't measured.
            if own:
                yield block(op.__name__, cases, growth)
        for step in self.plan.whole_steps():
            rows: list[dict[str, Any]] = []
            for case in step.cases:
                found = self.rows(OfStep(step, case, bool(self.plan.backends)))
                rows = [*rows, *_with_shares(step, found)]
                yield block(step.name, rows)

    def _skipped(self, name: str) -> dict[str, str]:
        peers = {peer.name for peer in PEERS if name in peer.ops}
        return {n: why for n, why in self.skipped.items() if n in peers or name in n}

    def rows(self, contest: OfOp | OfStep) -> list[dict[str, Any]]:
        """Return the rows of a contest: its passes, and a step's parts with their shares."""
        self.advance(contest.title)
        rows: list[dict[str, Any]] = []
        threads = fusedops.get_num_threads()
        try:
            self._set_threads(contest.threads)
            contest.make()
            contestants, refused = self._entered(contest)
            rows += [row | contest.about for row in refused]
            beside_empty = EMPTY in {each.who for each in contestants}
            for what, entries in _by_pass(contestants).items():
                host = contest.times_host and what in (FORWARD, BOTH)
                if beside_empty:
                    host = (EMPTY, TORCH) in entries
                found = self._timed(what, entries, contest.rounds, contest.tiny, host)
                rows += [row | contest.of_pass(what, self.rates) for row in found]
        except (Unsuited, ImportError) as reason:
            self.skipped[f"{contest.op}, {contest.about['workload']}"] = str(reason)
            return []
        except Exception as error:  # out of memory, say: the other cases are worth having
            refused = [_row("every backend", "", "", refused=_word(error), ours=True)]
            return [row | contest.about for row in refused]
        finally:
            self._set_threads(threads if contest.threads else None)
            gc.collect()
            if self.plan.device == "cuda":
                import torch

                torch.cuda.empty_cache()
        return rows

    def _entered(self, contest: OfOp | OfStep) -> tuple[list[Contestant], list[dict[str, Any]]]:
        """Return the contestants, and rows for backends and peers that are refused or can't run."""
        ways = [
            Contestant(backend.name, how, partial(contest.ours, backend.name, how))
            for at, backend in enumerate(backends_of(contest.of, self.plan.backends))
            for how in contest.hows(at, backend)
            if how == NUMPY or self.has_torch
        ]
        ways += [
            Contestant(peer.name, TORCH if peer.tensors else NUMPY, peer.prepare, peer)
            for peer in PEERS
            if contest.op in peer.ops
            and contest.device in peer.devices
            and peer.name not in self.skipped
            and (peer.quick or not self.plan.quick)
            and (peer.name != EMPTY or contest.times_host)
        ]
        chosen, rows = [], []
        for way in ways:
            row, reason = _row(way.who, way.how, FORWARD, ours=way.peer is None), None
            try:
                found = self._errors(contest, way)
                row["error"] = _finite(found)
                reason = _refusal(contest, found) if found and way.peer is None else None
                steps = {} if reason else way.prepare(*contest.given[way.how])
            except Unsuited as unsuited:
                reason, row["ours"] = str(unsuited), False
            except Exception as error:  # a program that fails is as wrong as one that errs
                reason = _word(error)
            if reason is None:
                chosen.append(replace(way, steps=steps, error=row["error"]))
                if self.plan.device == "cuda" and (captured := contest.graph(way, steps)):
                    chosen.append(replace(chosen[-1], how=GRAPH, steps=captured))
            elif reason:
                rows.append(row | {"refused": reason})
        for name, prepare in contest.preparations.items():
            how = NUMPY if contest.device == "cpu" else TORCH
            chosen.append(Contestant(name, how, dict, steps={"preparation": prepare}))
        return chosen, rows

    def _errors(self, contest: OfOp | OfStep, way: Contestant) -> dict[str, float] | None:
        """Return the errors of a way on small problems, or None if they are unknown."""
        peer, key = way.peer, (*contest.kind, way.who, way.how)
        if peer and not (peer.computes and peer.checked):
            return None
        if key not in self.checked:
            try:
                self.checked[key] = contest.errors(way)
            except Exception as error:
                # A peer may serve the large problem alone.
                if peer is None or isinstance(error, Unsuited):
                    raise
                self.checked[key] = None
        found = self.checked[key]
        return {"value": found["value"]} if found and peer and peer.dense else found

    def _set_threads(self, threads: int | None) -> None:
        if threads is None:
            return
        fusedops.set_num_threads(threads)
        if self.has_torch:
            import torch

            torch.set_num_threads(threads)

    def _timed(
        self,
        what: str,
        entries: dict[tuple[str, str], Contestant],
        rounds: int | None,
        tiny: bool,
        times_host: bool,
    ) -> list[dict[str, Any]]:
        """Return a row for every run of one pass, timed in turns."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        runs: dict[tuple[str, str], Callable[[], Any]] = {}
        for key, each in entries.items():
            row = _row(each.who, each.how, what, ours=each.peer is None, error=each.error)
            row["computes"] = each.computes
            rows[key] = row
            try:
                step = each.steps[what]
                if not tiny and rounds is None:
                    row["peak_MB"] = memory.peak_MB(step, self.plan.device)
                runs[key] = graphed(step) if each.how == GRAPH else step
            except Exception as error:  # no capture possible, or out of memory
                row["refused"] = _word(error)
        # Full rounds of a slow step would take minutes.
        times = interleaved(runs, self.wait, self.plan.seconds, rounds or 25, host=tiny)
        for run, timing in times.items():
            rows[run] |= _times(scaled(timing, 1 / COPIES) if run[1] == GRAPH else timing)
        tensors = {key: run for key, run in runs.items() if key[1] == TORCH}
        if tensors and self.plan.device == "cpu" and not tiny and rounds is None:
            times = interleaved(tensors, self.wait, self.plan.seconds, before=_product())
            for run, timing in times.items():
                rows[run] |= {"alone_ms": rows[run]["ms"], **_times(timing)}
        if times_host:
            if not tiny:
                eager = {k: r for k, r in runs.items() if k[1] != GRAPH and not entries[k].waits}
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
                    "workload": workload.name,
                    "dtype": workload.dtype,
                    "who": name,
                    "how": GRAPH if on_gpu else NUMPY if _speaks(name) == "numpy" else TORCH,
                    "pass": what,
                    "unit": workload.unit,
                    "sizes": at,
                    "ms": medians,
                    "exponent": exponent,
                    **({"noisy": left_out} if left_out else {}),
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


def _with_shares(step: Step, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a case of a step, each part's with its share of the whole."""
    passes: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        passes.setdefault((row["who"], row["how"]), {})[row["pass"]] = row["ms"]
    for row in rows:
        ms = passes[row["who"], row["how"]]
        whole = ms.get(BOTH, ms.get(FORWARD))
        if step.has_shares and row["pass"] not in (FORWARD, BOTH) and row["ms"] and whole:
            row["share"] = row["ms"] / whole
    return rows


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


def _refusal(contest: OfOp | OfStep, found: dict[str, float]) -> str | None:
    """Return how large a kernel's errors are, if they are too large for it to be timed."""
    off = [
        f"{name} off by {error:.1e}, {allowed:.1e} allowed"
        for name, error in found.items()
        if not error <= (allowed := contest.tolerance(name == "gradient"))
    ]
    return "; ".join(off) or None


def _word(error: Exception) -> str:
    """Return an error's class and first sentence."""
    first = re.split(r"(?<=[.!]) |\n", str(error).strip())[0]
    return f"{type(error).__name__}: {first}"[:120]


def _finite(errors: dict[str, float] | None) -> dict[str, float | None] | None:
    """Return errors for JSON, which has no infinity and no NaN: None stands for these."""
    if errors is None:
        return None
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}


def _row(who: str, how: str, what: str, **values: Any) -> dict[str, Any]:
    row = dict.fromkeys(report.ROW)
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
