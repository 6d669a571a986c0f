"""The frame's imports, choice of backends, threads, forks, instruction sets and caches."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import textwrap
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import benches  # noqa: F401
import fusedops
from bench.workloads import WORKLOADS, Source
from cpukern import isa
from fusedops._frame import registry
from fusedops._frame.op import op, to_run
from fusedops._frame.primitive import Primitive
from fusedops._host import limits, threads
from fusedops.samples import protein
from places import needs_torch
from processes import python, without

HEAVY = ("torch", "triton", "numba", "gemmi", "scipy", "matplotlib", "rich")

#: One kernel, quick to compile.
TOKENS = """
import numpy as np, fusedops
x, kernels = np.ones((1, 4, 2)), np.ones((2, 3))
assert fusedops.dynamic_conv(x, kernels).sum() == 18
"""

SQUARE = """
import numpy as np, fusedops
xyz = np.array([[0, 0, 0.1], [1, 0, -0.1], [1, 1, 0.1], [0, 1, -0.1]])
groups = [([[0, 1, 2, 3]], [0.1])]
explain = lambda: fusedops.planarity_nll.explain(xyz, groups)
value, pullback = fusedops.planarity_nll.vjp(xyz, groups)
assert abs(value + 3.5345862) < 1e-6 and abs(pullback(1.0)[0][0, 2] - 10) < 1e-9
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import fusedops", []),
        ("import fusedops.structure, fusedops.cli, fusedops.testing", []),
        (SQUARE, []),
        ("import fusedops, scipy", ["scipy"]),
    ],
    ids=["package", "modules", "call", "control"],
)
def test_a_call_imports_no_more_than_it_needs(code, heavy):
    told = python(f"{code}\nimport sys\nprint([m for m in {HEAVY!r} if m in sys.modules])")
    assert told.strip() == str(heavy)


def test_without_anything_optional():
    chosen = python(without(*HEAVY, "cpukern._cpu") + SQUARE + "print(explain())")
    assert "float64, numpy: numpy" in chosen
    assert "the compiled extension is not built here" in chosen
    assert "numba is not installed" in chosen


def test_plain_formulas_warn_once_with_a_remedy():
    calls = """
import warnings
import numpy as np, fusedops
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    x = np.ones((1, 3, 4))
    fusedops.dynamic_conv(x, np.ones((4, 2)), backend="numpy")
    for dtype in ("float64", "float32"):
        fusedops.dynamic_conv(x.astype(dtype), np.ones((4, 2), dtype))
    fusedops.planarity_nll(np.zeros((3, 3)), [])
for warning in warned:
    print(warning.filename, warning.message)
"""
    (line,) = python(without(*HEAVY, "cpukern._cpu") + calls).splitlines()
    assert line.startswith("<string> dynamic_conv: plain formulas serve this call")
    assert "the compiled extension is not built here; numba: numba is not installed" in line
    assert 'pip install "numba>=' in line
    assert python(calls) == ""


def test_requirements_named_in_errors_are_those_of_the_package():
    extras = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for requirement in fusedops._host.packages.REQUIREMENTS.values():
        assert re.search(rf'"{re.escape(requirement)}["; ]', extras)


@pytest.mark.skipif(isa.why_not() is not None, reason="the extension is not built")
def test_the_compiled_extension_comes_first_then_numba():
    assert "numpy: cython" in python(SQUARE + "print(explain())")
    assert "numpy: numba" in python(without("cpukern._cpu") + SQUARE + "print(explain())")


def test_a_broken_or_old_package_is_a_reason_and_a_broken_module_of_ours_is_an_error(tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba/__init__.py").write_text("raise ImportError('made for another NumPy')")
    # Without torch, which takes longer to import than all else.
    broken = without("torch", "triton") + f"sys.path.insert(0, {str(tmp_path)!r})\n"
    told = python(broken + SQUARE + "print(explain())")
    assert "numba is installed but does not import: made for another NumPy" in told
    (tmp_path / "numba/__init__.py").write_text("raise OSError('libllvm.so: no such file')")
    told = python(broken + SQUARE + "print(fusedops.info())")
    assert "numba is installed but does not import: libllvm.so: no such file" in told
    (tmp_path / "numba/__init__.py").write_text("__version__ = '0.59.1'")
    told = python(broken + SQUARE + "print(explain())")
    assert "numba 0.59.1 is installed; it should be 0.60 or newer" in told
    code = """
    import sys
    sys.modules["cpukern.jit"] = None
    import fusedops, numpy as np
    try:
        fusedops.planarity_nll(np.zeros((3, 3)), [], backend="numba")
    except ImportError as error:
        print("surfaced")
    """
    assert python(code).strip() == "surfaced"


def test_every_way_to_ask_for_a_backend(square):
    explain = fusedops.planarity_nll.explain
    with fusedops.use_backend("numpy"):
        assert explain(*square).backend == "numpy"
        assert explain(*square, backend="numba").backend == "numba"
        with fusedops.use_backend("numba"):
            assert explain(*square).backend == "numba"
        assert explain(*square).backend == "numpy"
    code = SQUARE + "print(explain().backend)"
    assert python(code, FUSEDOPS_BACKEND="numba").strip() == "numba"
    asked = "with fusedops.use_backend('numpy'): print(explain().backend)"
    assert python(SQUARE + asked, FUSEDOPS_BACKEND="numba").strip() == "numpy"


def test_another_thread_keeps_its_own_choice(square):
    with fusedops.use_backend("numpy"), ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(lambda: fusedops.planarity_nll.explain(*square).request.forced)
        # By default a thread of Python without the GIL begins with its creator's context.
        inherits = getattr(sys.flags, "thread_inherit_context", False)
        assert elsewhere.result() == ("numpy" if inherits else None)


def test_the_type_of_a_backend_names_them_all():
    assert get_args(fusedops.BackendName) == tuple(each.name for each in registry.BACKENDS)


def test_unknown_backends():
    with pytest.raises(ValueError, match="use_backend: name is 'cude'; it should be one of triton"):
        fusedops.use_backend("cude").__enter__()
    code = "import fusedops, numpy as np\ntry: fusedops.planarity_nll(np.zeros((3, 3)), [])\n"
    told = python(code + "except ValueError as e: print(e)", FUSEDOPS_BACKEND="cude")
    assert told.startswith("FUSEDOPS_BACKEND is 'cude'; it should be one of")


def test_a_backend_that_cannot_serve_says_why_and_why_not_the_others(square):
    with pytest.raises(fusedops.BackendUnavailable) as caught:
        fusedops.planarity_nll(*square, backend="triton")
    message = str(caught.value)
    assert "no backend can serve" in message
    assert "triton  it takes torch tensors; these are NumPy arrays" in message
    for name in ("cython", "numba", "torch", "numpy"):
        assert f"\n  {name}" in message
    explanation = fusedops.planarity_nll.explain(*square, backend="triton")
    assert explanation.backend is None
    assert str(explanation) == message


@pytest.mark.usefixtures("fresh_plans")
def test_the_explanation_is_of_the_call(square, monkeypatch):
    """The explained backend is the one that runs the call."""
    for name in ("cython", "numba", "numpy"):
        chosen = []
        genuine = registry.choose
        with monkeypatch.context() as patch:
            patch.setattr(
                registry, "choose", lambda r, g=genuine, c=chosen: c.append(g(r)) or c[-1]
            )
            fusedops.planarity_nll(*square, backend=name)
        assert chosen[0][0].name == name
        assert fusedops.planarity_nll.explain(*square, backend=name).backend == name
    text = str(fusedops.planarity_nll.explain(*square))
    assert "the first that can serve" in text
    assert "could serve too" in text


def test_explain_is_a_function_too(square):
    for name in ("numba", "numpy", "triton"):
        own = fusedops.planarity_nll.explain(*square, backend=name)
        assert fusedops.explain(fusedops.planarity_nll, *square, backend=name) == own
    with pytest.raises(TypeError, match="planarity_nll: missing a required argument: 'plane_gr"):
        fusedops.explain(fusedops.planarity_nll, square[0])


@pytest.mark.parametrize(
    ("value", "was"),
    [
        ("planarity_nll", "a str"),
        (np.zeros(3), "a ndarray"),
        (fusedops.info, "info"),
        (fusedops.Planes, "Planes"),
    ],
)
def test_explain_refuses_other_functions(square, value, was):
    with pytest.raises(TypeError, match=f"^explain: op is {was}; it should be an op of fusedops"):
        fusedops.explain(value, *square)


def test_a_missing_kernel_is_a_reason(square, monkeypatch):
    monkeypatch.delitem(registry._kernels, ("planarity_nll", "numba"), raising=False)
    importlib.import_module("cpukern.planarity.numba")
    monkeypatch.delitem(registry._kernels, ("planarity_nll", "numba"), raising=False)
    monkeypatch.setattr(registry, "_chosen", {})
    reasons = fusedops.planarity_nll.explain(*square).reasons
    assert reasons["numba"] == "it has no kernel for planarity_nll"


def test_public_functions_look_like_functions():
    signature = inspect.signature(fusedops.planarity_nll)
    assert list(signature.parameters) == ["xyz", "plane_groups", "fit", "backend"]
    step = inspect.signature(fusedops.dynamic_conv_step)
    assert list(step.parameters) == [
        *("x", "state", "kernels", "bias", "residual", "activation", "slots", "positions"),
        *("out", "backend"),
    ]  # fmt: skip
    assert inspect.isfunction(fusedops.planarity_nll)
    public = [getattr(fusedops, name) for name in fusedops.__all__ if name != "BackendName"]
    assert all(value.__doc__ for value in public)


def test_info():
    found = fusedops.info()
    assert found.backends["numpy"].why_not is None
    assert set(found.backends) == {backend.name for backend in registry.BACKENDS}
    assert found.threads == fusedops.get_num_threads()
    assert fusedops.__version__ in str(found)
    if isa.why_not() is None:
        assert found.instruction_set.endswith(isa.level())


LEVELS = ("v2", "v3", "v4")


@pytest.mark.skipif(isa.level() not in LEVELS, reason="one build serves every CPU here")
@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set(level):
    if level > f"v{importlib.import_module('cpukern._cpu').x86_64_level()}":
        pytest.skip("this CPU doesn't have it")
    if level == isa.level():
        pytest.skip("test_matrix.py runs it")
    code = """
    import sys
    from fusedops.testing import CASES, check
    for case in CASES:
        for dtype in ("float64", "float32"):
            check(case, "numpy", "cython", dtype)
    print({m[-2:] for m in sys.modules if m.startswith("cpukern.") and "_v" in m})
    """
    assert python(code, FUSEDOPS_ISA=level).strip() == str({level})


@pytest.mark.skipif(isa.level() not in LEVELS, reason="one build serves every CPU here")
def test_an_unknown_instruction_set_is_a_reason():
    told = python(SQUARE + "print(explain())", FUSEDOPS_ISA="v9")
    assert "FUSEDOPS_ISA is 'v9'; it should be v2, v3 or v4" in told
    alone = without(f"cpukern.wigner_{isa.level()}") + SQUARE + "print(explain())"
    assert f"not built for x86-64-{isa.level()} here" in python(alone)


def test_thread_rule(monkeypatch):
    count = "import fusedops; print(fusedops.get_num_threads())"
    assert python(count, FUSEDOPS_NUM_THREADS="3", OMP_NUM_THREADS="5").strip() == "3"
    assert python(count, OMP_NUM_THREADS="5,2").strip() == "5"
    first = "import fusedops; fusedops.set_num_threads(7); print(fusedops.get_num_threads())"
    assert python(first, FUSEDOPS_NUM_THREADS="3").strip() == "7"
    for malformed in ("many", "²", "٣", "9" * 5000, "0"):
        monkeypatch.setenv("OMP_NUM_THREADS", malformed)
        assert threads._default.__wrapped__() == limits.available_cores()
    for malformed in ("0", "²"):
        monkeypatch.setenv("FUSEDOPS_NUM_THREADS", malformed)
        should = f"^FUSEDOPS_NUM_THREADS is {malformed!r}; it should be a positive integer"
        with pytest.raises(ValueError, match=should):
            threads._own.__wrapped__()
    with pytest.raises(ValueError, match="threads is 0; it should be at least 1"):
        fusedops.set_num_threads(0)
    with pytest.raises(TypeError, match="threads is a float; it should be an int"):
        fusedops.set_num_threads(2.0)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_containers_limit_threads(tmp_path, files, cores):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert limits._cgroup_quota(tmp_path) == cores


def test_explain_checks_out_as_the_call_does():
    x, kernels = np.ones((1, 5, 2)), np.ones((2, 3))
    op = fusedops.dynamic_conv
    assert fusedops.explain(op, x, kernels, out=np.empty_like(x)).backend is not None
    for out, error in ((np.empty(3), ValueError), (x, ValueError), (3, TypeError)):
        for function in (op, op.explain):
            with pytest.raises(error, match=r"^dynamic_conv: out "):
                function(x, kernels, out=out)


LARGE = """
import os, sys
import numpy as np
import fusedops
from fusedops.samples import protein
xyz, indices = protein(6000, np.random.default_rng(0))
planes = fusedops.Planes([(i, np.full(len(i), 0.02)) for i in indices])
def step(backend):
    value, pullback = fusedops.planarity_nll.vjp(xyz, planes, backend=backend)
    return value, pullback(1.0)[0]
fusedops.set_num_threads(4)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to hold a thread up")
@pytest.mark.skipif(isa.why_not() is not None, reason="the extension is not built")
def test_nobody_waits_for_a_thread_that_does_not_run():
    """On a busy machine, another process may occupy the core of the other thread."""
    code = """
    import statistics, subprocess, time
    import cpukern.planarity.cython
    cpukern.planarity.cython._GRAIN = 1
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        fusedops.set_num_threads(2)
        before = set(os.listdir("/proc/self/task"))
        step("cython")
        (worker,) = map(int, set(os.listdir("/proc/self/task")) - before)
        alone = f"import os; os.sched_setaffinity(0, {{{cores[1]}}})\\nwhile True: pass"
        other = subprocess.Popen([sys.executable, "-c", alone])
        os.sched_setaffinity(0, {cores[0]})
        os.sched_setaffinity(worker, {cores[1]})
        os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
        times = []
        try:
            for _ in range(5):
                time.sleep(0.3)
                start = time.perf_counter()
                step("cython")
                times.append(time.perf_counter() - start)
        finally:
            other.kill()
            other.wait()
        assert statistics.median(times) < 0.2, times
    """
    python(LARGE + textwrap.dedent(code))


def test_shares_that_no_thread_begins_with_are_done_by_the_caller(monkeypatch):
    monkeypatch.setattr(threads, "_compiled", lambda: None)
    pool, ends = ThreadPoolExecutor(1), threading.Event()
    held = pool.submit(ends.wait)
    monkeypatch.setattr(threads, "_pool", lambda: pool)
    monkeypatch.setattr(threads, "_chosen", 4)
    done = []
    caller = threading.Thread(
        target=threads.in_parallel, args=(lambda *span: done.append(span), 10, 1), daemon=True
    )
    try:
        caller.start()
        caller.join(10)
        assert not caller.is_alive()
        assert sorted(done) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    finally:
        ends.set()
        held.result()
        pool.shutdown()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("backend", ["cython", "numba"])
def test_a_forked_child_works_serially(backend):
    code = f"""
    import cpukern.planarity.cython, cpukern.planarity.numba
    cpukern.planarity.cython._GRAIN = cpukern.planarity.numba._GRAIN = 1
    want = step({backend!r})
    child = os.fork()
    if child == 0:
        assert fusedops.get_num_threads() == 1
        value, gradient = step({backend!r})
        os._exit(0 if value == want[0] and (gradient == want[1]).all() else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert fusedops.get_num_threads() == 4
    """
    # The child of a process without threads has its own.
    first = """
    import os, fusedops
    child = os.fork()
    if child == 0:
        fusedops.set_num_threads(3)
        os._exit(fusedops.get_num_threads())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    """
    python(textwrap.dedent(first) + LARGE + textwrap.dedent(code))


@pytest.mark.parametrize("backend", ["cython", "numba"])
def test_calls_from_several_threads_at_once(backend, several_threads):
    xyz, indices = protein(400, np.random.default_rng(1))
    planes = fusedops.Planes([(index, np.full(len(index), 0.02)) for index in indices])

    def step(shift):
        value, pullback = fusedops.planarity_nll.vjp(xyz + shift, planes, backend=backend)
        return value, pullback(1.0)[0]

    shifts = [0.0, 1.0, 2.0, 3.0] * 50
    fusedops.set_num_threads(3)
    try:
        want = [step(shift) for shift in shifts[:4]] * 50
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(step, shifts))
    finally:
        fusedops.set_num_threads(None)
    assert set(several_threads) == {3}
    for (value, gradient), (other, other_gradient) in zip(got, want, strict=True):
        assert value == other
        np.testing.assert_array_equal(gradient, other_gradient)


BOTH = """
import time
from threadpoolctl import threadpool_info
torch.set_num_threads(2)
fusedops.set_num_threads(2)
numbers = torch.rand(2_000_000, dtype=torch.float64)
reference = fusedops.planarity_nll.vjp(xyz, planes, backend="numpy")[0]

def ours():
    # One region, since on a busy machine OpenMP may have the first, and our own threads the next.
    value = fusedops.planarity_nll(xyz, planes, backend="cython")
    assert abs(value - reference) < 1e-9 * abs(reference)

def theirs():
    sines = torch.sin(numbers)
    np.testing.assert_allclose(sines[::1000], np.sin(numbers[::1000].numpy()), rtol=1e-14)

def used(work):
    \"""The most threads of this process that were running in a call.\"""
    def times():
        found = {}
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                found[thread] = int(file.read().split()[0])
        return found
    most = 0
    for turn in range(50):
        # On a busy machine a second thread may come too late for a share, again and again.
        if turn >= 5 and most > 1:
            break
        time.sleep(0.06)  # who waits for work in a loop gives up
        before = times()
        work()
        most = max(most, sum(spent > before.get(t, 0) for t, spent in times().items()))
    return most

work = [theirs, ours] if first == "torch" else [ours, theirs]
for each in work * 2:
    each()
print(torch.get_num_threads(), fusedops.get_num_threads(), *(used(each) for each in work * 2))
print({pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "openmp"})
"""


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about threads")
@pytest.mark.skipif(isa.why_not() is not None, reason="the extension is not built")
@pytest.mark.parametrize("first", ["torch", "fusedops"])
def test_torch_and_fusedops_both_keep_their_threads(first):
    """The order of the imports doesn't matter."""
    order = ["import torch\ntorch.rand(10**6).sin()", "import numpy\n" + LARGE + "step('cython')"]
    code = f"first = {first!r}\n" + "\n".join(order if first == "torch" else order[::-1])
    assert python(code + BOTH).split("\n")[:2] == ["2 2 2 2 2 2", "{2}"]


def test_numba_without_a_folder_for_its_cache(tmp_path):
    """A folder that can't be written is no error; one that can be written is used."""
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "below")
    code = """
    import numba.core.caching as caching
    caching._CacheLocator.ensure_cache_path = lambda self: (_ for _ in ()).throw(OSError("no"))
    """
    told = python(
        textwrap.dedent(code)
        + without("cpukern._cpu")
        + TOKENS
        + "print(fusedops.dynamic_conv.explain(x, kernels).backend)",
        NUMBA_CACHE_DIR=nowhere,
        HOME=nowhere,
    )
    assert told.strip() == "numba"
    cache = tmp_path / "cache"
    python(without("cpukern._cpu") + TOKENS, NUMBA_CACHE_DIR=str(cache))
    assert list(cache.rglob("*.nbi"))


def test_numbas_cache_follows_functions_that_kernels_inline(tmp_path):
    """A kernel is compiled again after a change to another file, whose function it has."""
    kernel = "from cpukern.jit import jit\nfrom other import value\nrun = jit(lambda: value())\n"
    (tmp_path / "kernel.py").write_text(kernel)
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom kernel import run\n"
    code += "print(run(), len(run.stats.cache_hits))"
    settings = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    found = []
    for number in (1, 1, 2):
        other = f"from cpukern.jit import inlined\nvalue = inlined(lambda: {number})\n"
        (tmp_path / "other.py").write_text(other)
        found.append(python(code, **settings).split())
    assert found == [["1", "0"], ["1", "1"], ["2", "0"]]


def test_numba_leaves_the_users_settings_alone():
    code = "import numba; before = numba.get_num_threads(), numba.config.CACHE_DIR\n"
    after = "assert before == (numba.get_num_threads(), numba.config.CACHE_DIR)"
    python(code + without("cpukern._cpu") + SQUARE + after)


def load_kernels(backend):
    """Import every kernel, because calls import only the kernels that they need."""
    for name in list(registry.primitives):
        registry._kernel(next(b for b in registry.BACKENDS if b.name == backend), name)


def kept():
    """Return how many entries each of our caches without a bound of its own holds."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("cpukern", "fusedops", "gpukern"):
            continue
        for key, value in list(vars(module).items()):
            if key.startswith("__"):
                continue
            if hasattr(value, "cache_info"):
                info = value.cache_info()
                found[name, key] = info.currsize if info.maxsize is None else 0
            elif hasattr(value, "py_func"):
                found[name, key] = len(value.signatures)
            elif isinstance(value, (dict, list, set, deque)):
                found[name, key] = len(value)
    return found


@pytest.mark.parametrize("backend", ["cython", "numba"])
def test_no_cache_grows_with_sizes_and_strides(backend):
    load_kernels(backend)
    kinds = {(w.op.__name__, w.name): w for w in WORKLOADS if w.device == "cpu" and not w.needs}

    def work(size):
        for workload in kinds.values():
            problem = workload.make(Source("float32"), size)
            primitive = workload.op.primitive.name
            serves = backend if (primitive, backend) in registry._kernels else "numpy"
            if problem.leaves:
                problem.both(serves, problem.cotangent())()
            else:
                problem.forward(serves)()
        # With edges last in memory, strides of matrices depend on the number of edges.
        x, ends = np.ones((3, 9, 2), np.float32), np.arange(2 * size).reshape(2, -1) % 3
        matrices = np.ones((9, 9, size), np.float32).transpose(2, 0, 1)
        fusedops.node_to_edge_wigner_permute(x, ends, matrices, backend=backend)
        packed = np.ones((35, size), np.float32).T
        fusedops.node_to_edge_wigner_permute(x, ends, packed, backend=backend)

    # The largest is computed in parts, of other layouts than small arrays computed whole.
    for size in (*range(11, 15), 40):
        work(size)
    before = kept()
    # A cache keyed by sizes would grow with each.
    for size in range(15, 18):
        work(size)
    grown = {at: (before.get(at), n) for at, n in kept().items() if n > before.get(at, 0)}
    assert not grown


def test_no_share_runs_on_after_an_error(monkeypatch):
    begun, over = threading.Event(), threading.Event()

    def work(low, high):
        if low == 0:
            assert begun.wait(10)
            raise RuntimeError("broken")
        begun.set()
        time.sleep(0.2)
        over.set()

    monkeypatch.setattr(threads, "threads_for", lambda *_: 2)
    with pytest.raises(RuntimeError, match="broken"):
        threads.in_parallel(work, 2, 1)
    assert over.is_set()


def primitive(name="toy", **changes):
    """Declare a primitive for one test."""
    declared = {
        "family": "toy",
        "arrays": {"x": "(B, N)", "bias": "(N), optional"},
        "static": {},
        "outputs": {"out": "(B, N) of x, bias"},
        "formula": lambda a: (a.x,),
        "pullback": lambda a, y, dy, wanted: (dy.out, dy.out.sum(0)),
    }
    return Primitive(name, **{**declared, **changes})


@pytest.fixture
def own_primitives(monkeypatch):
    """Forget primitives that a test declares."""
    monkeypatch.setattr(registry, "primitives", dict(registry.primitives))
    monkeypatch.setattr(registry, "_chosen", {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrays": {"x": "(B, N"}}, r"x is declared '\(B, N'; it should begin with a shape in"),
        ({"arrays": {"x": "(B,N)"}}, r"'\(B,N\)'; \(B,N\) should be sizes with ', ' between them"),
        (
            {"arrays": {"x": "(B), optinal"}},
            "'optinal' should be one of optional, integers, number, B",
        ),
        (
            {"arrays": {"x": "(B), W > 0"}},
            "'W > 0' should be one of optional, integers, number, B > 0",
        ),
        ({"outputs": {"out": "(B) off x"}}, r"out is declared '\(B\) off x'; it should read as"),
        ({"outputs": {"out": "(B,N)"}}, r"\(B,N\) should be sizes with ', ' between them"),
        ({"outputs": {"out": "(B, M)"}}, "'M' should be a size of an array's shape, or in sizes="),
        ({"outputs": {"out": "(B) of x, bais"}}, "'bais' should be one of x, bias"),
        ({"outputs": {"dx": "like y"}}, "'y' should be one of x, bias"),
        ({"outputs": {"out": "(B) with mask"}}, "'mask' should be an array, or a size"),
        ({"saves": ("o",)}, "saves 'o'; it should be of out"),
        ({"mutates": ("state",)}, "mutates 'state'; it should be of x, bias"),
        ({"name": "dynamic_conv"}, "is a primitive already"),
    ],
)
@pytest.mark.usefixtures("own_primitives")
def test_a_wrong_declaration_is_named(changes, message):
    with pytest.raises(ValueError, match=rf"^{changes.get('name', 'toy')}\b.*{message}"):
        primitive(**changes)


@pytest.mark.parametrize(
    ("found", "was"), [((1,), "1 of them"), ([1, 2], "a list"), (None, "a NoneType")], ids=str
)
@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=needs_torch)])
@pytest.mark.usefixtures("own_primitives")
def test_a_formula_and_a_pullback_return_all_that_they_should(framework, found, was):
    x = importlib.import_module(framework).ones((2, 3))
    short = primitive(outputs={"out": "like x", "more": "like x"}, formula=lambda a: found)
    message = f"toy: the formula returned {was}; it should return a tuple of 2, of out, more"
    with pytest.raises(TypeError, match=message):
        short(x, None)
    short = primitive("other", pullback=lambda *_: found)
    message = f"other: the pullback returned {was}; it should return a tuple of 2, of x, bias"
    with pytest.raises(TypeError, match=message):
        short.pulled_back(short.Arguments(x, None), short(x, None), (x,), (True, None))


@pytest.mark.usefixtures("own_primitives")
def test_a_pullback_gets_no_zeros_alone():
    x = np.ones((2, 3))
    toy = primitive()
    assert toy.pulled_back(toy.Arguments(x, None), None, (None,), (True, None)) == (None, None)


@pytest.fixture
def own_ops(monkeypatch, own_primitives):
    """Forget ops that a test declares."""
    monkeypatch.setattr(registry, "ops", dict(registry.ops))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"returned a NoneType; it should return to_run\(...\)"),
        (to_run((None,), "out"), "gave to_run 1 arguments; it should give x, bias"),
        (to_run((None, None), "result"), "shows 'result'; it should show some of out"),
    ],
    ids=["nothing", "too few", "no output"],
)
@pytest.mark.usefixtures("own_ops")
def test_what_a_function_under_op_returns(returned, message):
    @op(primitive())
    def toy(x, bias=None, *, backend=None):
        """Return x.

        Returns
        -------
        array

        Notes
        -----
        None.
        """
        return returned

    with pytest.raises(TypeError, match=f"toy: its function {message}"):
        toy(np.ones((2, 3)))


@pytest.mark.parametrize(
    ("text", "message"),
    [("Return x.", "Returns"), ("Return x.\n\nReturns\n-------\narray", "Notes or References")],
    ids=["nothing", "result"],
)
@pytest.mark.usefixtures("own_ops")
def test_a_docstring_without_a_section_is_refused(text, message):
    def toy(x, bias=None, *, backend=None):
        pass

    toy.__doc__ = text
    with pytest.raises(ValueError, match=f"toy: its docstring should have a section {message}$"):
        op(primitive())(toy)
