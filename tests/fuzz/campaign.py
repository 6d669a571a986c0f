"""The runner: examples drawn by hypothesis, in batches, in one process or several."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

from fusedops import _catalogue
from fusedops._frame import registry
from fusedops.testing import poisoned_outputs

from . import calls, density, planarity, trimul
from .arrays import DTYPES, NUMPY_DTYPES
from .checks import ASPECTS, Trial
from .ledger import Finding, Ledger, Place
from .problem import Family

OWN = [module.FAMILY for module in (density, planarity, trimul)]
#: The families with a module here, and one of every other op of the catalogue.
FAMILIES = {family.name: family for family in OWN}
FAMILIES |= {
    op.__name__: calls.family(examples)
    for op, examples in _catalogue.calls().items()
    if op.__name__ not in FAMILIES
}
#: Values for every call on a GPU, where compiling takes longer than calling.
SEEDS = 8
#: Seconds that hypothesis may take to make a finding's example smaller.
SHRINKING = 2.0
#: Seconds after which an example counts as hung.
PATIENCE = 60.0
#: The same limit where kernels are compiled first, or interpreted.
COMPILING = 300.0
BATCH = 100


class Found(Exception):
    """An example has a finding that is new."""


class Enough(KeyboardInterrupt):
    """The end of a batch; an interrupt, because hypothesis lets these through."""


def places(backends: Sequence[str] = (), device: str = "cpu") -> list[Place]:
    """Return where calls run; in Triton's interpreter only when asked."""
    if device != "cpu":
        kinds = [("torch", name) for name in ("triton", "torch")]
        kinds = [k for k in kinds if k[1] in (backends or ("triton",))]
    else:
        names = backends or tuple(b.name for b in registry.BACKENDS if b.name != "triton")
        kinds = [("numpy", n) for n in names if n not in ("torch", "triton")]
        kinds += [("torch", n) for n in names if n != "numpy"]
    return [Place(*kind, device) for kind in kinds if _works(*kind)]


def _works(framework: str, backend: str) -> bool:
    if framework == "torch" and registry.import_error("torch"):
        return False
    row = next(b for b in registry.BACKENDS if b.name == backend)
    request = registry.Request("", framework, "cpu", np.dtype(np.float64), backend)
    return backend == "triton" or row.why_not(request) is None


def strategy(family: Family, compiled: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy of descriptions of calls, which JSON can hold."""
    fields = family.strategy(compiled)
    if compiled:
        # Mixed dtypes would compile a kernel for every combination.
        fields |= {"dtype": st.sampled_from([name for name in DTYPES if name != "mixed"])}
    if registry.import_error("torch"):
        fields |= {"dtype": st.sampled_from(NUMPY_DTYPES)}
    return st.fixed_dictionaries(
        {"op": st.just(family.name), "aspect": st.sampled_from(ASPECTS), **fields}
    )


class Hung(KeyboardInterrupt):
    """An example takes too long."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Hung in the main thread after some time, where there are such signals."""
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def examine(description: dict[str, Any], where: list[Place], ledger: Ledger) -> Trial:
    """Run all checks of one description."""
    problem = FAMILIES[description["op"]].build(description)
    trial = Trial(problem, description, ledger, where)
    patience = COMPILING if any(place.deferred for place in where) else PATIENCE
    with warnings.catch_warnings(), alarm(patience):
        warnings.simplefilter("ignore")
        try:
            trial.run(description["aspect"])
        except Hung:
            trial.found(Place("?", "?"), "hangs", f"no end after {patience:.0f} s")
            raise
        except Exception as error:
            # An exception of our own reference or check is a finding, too.
            at = traceback.extract_tb(error.__traceback__)[-1]
            check = f"{type(error).__name__} in {at.name}, line {at.lineno}"
            trial.found(Place("?", "?"), check, str(error))
    ledger.examples += 1
    return trial


def resolve(trials: list[Trial], ledger: Ledger) -> None:
    """Wait for the GPU, once, and add the findings of its comparisons."""
    pending = [one for trial in trials for one in trial.pending]
    if pending:
        import torch

        wrong = torch.stack([flag for flag, _ in pending]).cpu().tolist()
        for bad, (_, finding) in zip(wrong, pending, strict=True):
            if bad:
                ledger.add(finding())
    trials.clear()


def batch(
    family: Family,
    where: list[Place],
    ledger: Ledger,
    *,
    seed: int | None,
    examples: int = BATCH,
    before: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Examine a number of examples; without a seed, the same ones every time.

    An example with a finding that is new is made smaller, and then other examples go on.
    """
    compiled = any(place.backend == "triton" for place in where)
    unresolved: list[Trial] = []
    pursued: list[Any] = []
    settings = hypothesis.settings(
        max_examples=examples,
        derandomize=seed is None,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )

    def example(description: dict[str, Any]) -> None:
        if pursued and time.monotonic() > pursued[1]:
            raise Enough
        before(description)
        own = Ledger()
        again = range(SEEDS if any(place.device != "cpu" for place in where) else 1)
        seeds = [(description["seed"] + step) % 2**32 for step in again]
        try:
            trials = [examine({**description, "seed": one}, where, own) for one in seeds]
        except Hung:
            ledger.merge(own)
            raise
        known = set(ledger.findings)
        ledger.merge(own)
        if trials[0].pending:
            unresolved.extend(trials)
            return
        if pursued:
            if pursued[0] in own.findings:
                raise Found
            return
        new = [key for key in own.findings if key not in known]
        if new:
            pursued[:] = new[0], time.monotonic() + SHRINKING
            raise Found

    test = hypothesis.given(strategy(family, compiled))(example)
    test = settings(test if seed is None else hypothesis.seed(seed)(test))
    with poisoned_outputs(), np.errstate(all="ignore"):
        with contextlib.suppress(Found, Enough, Hung, hypothesis.errors.Flaky):
            test()
        resolve(unresolved, ledger)


def work(
    number: int,
    seed: int,
    names: list[str],
    backends: list[str],
    device: str,
    told: Any,
    stop: Any,
    now: Any,
    since: Any,
) -> None:
    """Run batches of all families in turn until told to stop: a worker process."""
    import faulthandler

    faulthandler.enable()
    if not registry.import_error("torch"):
        import torch

        torch.set_num_threads(1)

    def before(description: dict[str, Any]) -> None:
        now.value = json.dumps(description).encode()[: len(now) - 1]
        since.value = time.monotonic()
        if stop.is_set():
            raise Enough

    step = 0
    while not stop.is_set():
        # Workers begin with different families, lest all compile the same kernels at once.
        name = names[(step + number) % len(names)]
        step += 1
        where = places(backends, device)
        if where:
            ledger = Ledger()
            own = (seed * 1_000_003 + number * 10_007 + step) % 2**32
            batch(FAMILIES[name], where, ledger, seed=own, before=before)
            told.put(ledger)
        elif len(names) == 1:
            return


class _Worker:
    def __init__(self, number: int, **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.number, self.arguments = number, arguments
        self.now = context.Array("c", 8192, lock=False)
        self.since = context.Value("d", time.monotonic() + 300, lock=False)
        given = {**arguments, "now": self.now, "since": self.since}
        self.process = context.Process(target=work, args=(number,), kwargs=given, daemon=True)
        self.process.start()

    def trouble(self) -> str | None:
        """Return why the process is of no more use, or None."""
        code = self.process.exitcode
        if code is not None:
            return None if code == 0 else f"the process ended with exit code {code}"
        # An alarm can't interrupt a loop in C.
        if time.monotonic() - self.since.value > 2 * COMPILING:
            self.process.kill()
            self.process.join()
            return f"no end after {2 * COMPILING:.0f} s"
        return None

    def finding(self, message: str, device: str) -> Finding:
        try:
            description = json.loads(self.now.value)
        except ValueError:
            description = {"op": "?"}
        return Finding(description["op"], Place("?", "?", device), message, "", description)


def campaign(
    *,
    seconds: float,
    calls: int,
    seed: int,
    names: list[str],
    backends: list[str],
    device: str,
    workers: int,
    say: Callable[[str], None],
) -> tuple[Ledger, float]:
    """Run worker processes for a time, or for a number of calls."""
    context = multiprocessing.get_context("spawn")
    told, stop = context.Queue(), context.Event()
    arguments = {
        "seed": seed,
        "names": names,
        "backends": backends,
        "device": device,
        "told": told,
        "stop": stop,
    }
    started = time.monotonic()
    crew = [_Worker(number, **arguments) for number in range(workers)]
    total, spoken, number = Ledger(), started, workers
    while crew:
        while not told.empty():
            total.merge(told.get())
        now = time.monotonic()
        if now - started > seconds or total.calls.total() >= calls:
            stop.set()
        if now - spoken > 30:
            spoken = now
            rate = total.calls.total() / (now - started)
            say(
                f"{total.calls.total():,} calls, {rate:,.0f} a second, "
                f"{len(total.findings)} findings"
            )
        for worker in list(crew):
            trouble = worker.trouble()
            if trouble:
                total.add(worker.finding(trouble, device))
                crew.remove(worker)
                if not stop.is_set():
                    crew.append(_Worker(number, **arguments))
                    number += 1
            elif worker.process.exitcode is not None:
                crew.remove(worker)
        time.sleep(0.05)
    while not told.empty():
        total.merge(told.get())
    return total, time.monotonic() - started
