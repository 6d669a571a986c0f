"""Set-up that all tests share.

Triton kernels are interpreted on the CPU, unless the tests are for a real GPU::

    pytest                              # all tests without a GPU
    pytest --interpret-all -k triton    # also cases that `interpreted_slow` leaves out
    pytest -m gpu -n 8                  # all tests with a GPU
    pytest -m "gpu and quick" -n 8      # one of every kind with a GPU, in a minute
    pytest -m gpu2 -n 4                 # tests on several ranks, with one GPU or more

A test marked ``interpreted_slow(name=value, ...)`` runs in the interpreter for this value of its
parameter alone, or for a tuple's values, and everywhere else for all of them.
"""

import contextlib
import functools
import gc
import importlib.util
import json
import os
import re
import sys
from types import FunctionType, ModuleType

import pytest

import interpreter
from places import EXACT, PLACES, QUICK, SERVE_ARRAYS, SERVE_TENSORS, available


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--interpret-all",
        action="store_true",
        help="run in Triton's interpreter what takes it many seconds, too",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr.split(" ")[0] in ("gpu", "gpu2"):
        return
    os.environ["TRITON_INTERPRET"] = "1"
    # Torch's compiler makes so many objects that the collector would take a tenth of the time. With
    # a GPU, its memory would be given back later.
    gc.set_threshold(10_000)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return an id that shows a parameter's value, where pytest would number it."""
    if isinstance(val, functools.partial):
        return "-".join([val.func.__name__, *map(str, val.args)])
    if isinstance(val, dict):
        return "-".join(f"{name}={short(value)}" for name, value in val.items()) or "nothing"
    if isinstance(val, (tuple, list)):
        between = "x" if all(isinstance(part, int) for part in val) else " "
        return between.join(map(short, val)) or "nothing"
    return None if isinstance(val, type) or not hasattr(val, "shape") else short(val)


def short(value: object) -> str:
    """Return a few words for a value, the shape of an array."""
    if isinstance(value, (type, FunctionType)):
        return value.__name__
    if hasattr(value, "shape"):
        return "x".join(map(str, value.shape)) or "scalar"
    if isinstance(value, (tuple, list)):
        return str(pytest_make_parametrize_id(value))
    return value if isinstance(value, str) else str(value)[:30]


def served_by(backend: str, item: pytest.Item) -> bool:
    """Return whether a parameter of a test is a backend, or a place with it on the CPU."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [value[-1] if isinstance(value, tuple) and value else value for value in values]
    return any(isinstance(name, str) and name == backend for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep tests from the garbage collector, which would visit them all again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put Numba first and campaigns last, and leave out what `interpreted_slow` excludes.

    So one of two workers, who begins at the start, compiles every kernel in Numba, while the other
    begins in the middle. The campaigns, too, find the kernels compiled.
    """
    items.sort(key=lambda item: 2 * (item.path.parent.name == "fuzz") - served_by("numba", item))
    if config.option.interpret_all:
        return
    left_out = []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        for mark in item.iter_markers("interpreted_slow"):
            unknown = mark.kwargs.keys() - parameters.keys()
            assert not unknown, f"{item.nodeid}: interpreted_slow names no parameter: {unknown}"
            kept = (
                str(parameters[name]) in map(str, value if isinstance(value, tuple) else (value,))
                for name, value in mark.kwargs.items()
            )
            if served_by("triton", item) and not all(kept):
                left_out.append(item)
                break
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


# Fixtures of places have module scope, because hypothesis refuses fixtures of function scope.


def every(places):
    """Return a fixture of the framework and the backend of every place."""

    @pytest.fixture(scope="module", params=places, ids="-".join)
    def place(request):
        return available(*request.param)

    return place


def serving(framework, names):
    """Return a fixture of backends that serve the arrays of a framework."""

    @pytest.fixture(scope="module", params=names)
    def backend(request):
        return available(framework, request.param)[1]

    return backend


#: Every implementation, Triton's kernels interpreted, and every one but those.
place, quick = every(PLACES), every(QUICK)
#: Backends of NumPy arrays, and the ones that give the same bits whatever the threads.
backend, exact = serving("numpy", SERVE_ARRAYS), serving("numpy", EXACT)
#: Backends of tensors on the CPU, without the interpreter and with it.
torch_backend = serving("torch", [*SERVE_ARRAYS, "torch"])
any_torch_backend = serving("torch", SERVE_TENSORS)


@pytest.fixture
def load(tmp_path):
    """Read a structure from text or bytes."""
    pytest.importorskip("gemmi")
    from fusedops.structure import read_structure

    def load(content, name="x.pdb"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_structure(path)

    return load


@pytest.fixture
def newer_switch(monkeypatch):
    """Torch's setting of TF32 after a program used the newer API: the older one can't be read."""
    torch = pytest.importorskip("torch")

    class Newer:
        @property
        def allow_tf32(self):
            raise RuntimeError("you have used mix of the legacy and new APIs")

    switch = Newer()
    monkeypatch.setattr(torch.backends.cuda, "matmul", switch)
    return switch


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys):
    """Run a command in this process, and return its exit code, stdout and stderr."""
    from fusedops import cli

    def run(*args):
        try:
            code = cli.main([*map(str, args)])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def told(run):
    """Run a command, which must succeed, and return its report."""

    def told(*args):
        code, out, err = run(*args, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return told


@pytest.fixture
def refused(folder, run):
    """Run a command, which must end in one line that has the reasons, and change no file."""

    def contents():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def refused(command, *reasons):
        before = contents()
        code, out, err = run(*command.split())
        assert code == 2
        (line,) = err.splitlines()
        assert re.match(r"fusedops( [\w-]+)?: ", line)
        for reason in reasons:
            assert " ".join(reason.split()) in line
        assert contents() == before
        return out

    return refused


@pytest.fixture(params=[False, True], ids=["iso", "aniso"])
def anisotropic(request):
    """Whether atoms have U, or B."""
    return request.param


@pytest.fixture(autouse=True, scope="session")
def poison():
    """Let an output be NaN wherever no kernel writes it."""
    from fusedops._frame import primitive

    primitive.poison = True


@pytest.fixture(autouse=True, scope="session")
def no_columns():
    """Let output be as wide as it is: pytest-xdist tells its workers of a terminal's width."""
    os.environ.pop("COLUMNS", None)


@pytest.fixture(autouse=True)
def torch_begins_anew():
    """Give torch the same random numbers for every test, and one thread, after a bench too.

    On small work several threads only wait for each other.
    """
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # Without a GPU torch would note the stack of each seed for the day that there is one.
        (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def one_thread_for_blas():
    """Give NumPy's products one thread, for the same reason."""
    # For BLAS that is loaded later, and for processes that tests start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if importlib.util.find_spec("threadpoolctl") is not None:
        from threadpoolctl import threadpool_limits

        threadpool_limits(1, user_api="blas")


@pytest.fixture
def two_threads_for_blas():
    """Give BLAS the threads that all other tests take from it."""
    with pytest.importorskip("threadpoolctl").threadpool_limits(2, user_api="blas"):
        yield


@pytest.fixture(autouse=True, scope="session")
def no_worlds_left():
    """End the processes of tests on several ranks."""
    yield
    if "worlds" in sys.modules:
        sys.modules["worlds"].close_all()


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    """Let Triton's interpreter skip useless work."""
    interpreter.hasten()


@pytest.fixture(autouse=True)
def gpu_memory(request, tmp_path_factory):
    """Leave no memory of a GPU to the next test, and give one test at a time more than 8 GB."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import filelock
    import torch

    large = request.node.get_closest_marker("large") is not None
    # The folder that all workers have.
    lock = filelock.FileLock(tmp_path_factory.getbasetemp().parent / "gpu_memory")
    with lock if large else contextlib.nullcontext():
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.empty_cache()
    assert large or torch.cuda.max_memory_allocated() < 8e9, "mark this test `large`"


@pytest.fixture
def program(monkeypatch):
    """Return a function that makes a module in the place of a program's."""

    def program(name, **contents):
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return program


@pytest.fixture
def young_heap(request):
    """Let the garbage collector visit a test's objects alone: all would take half a second."""
    gc.freeze()
    yield
    # Dead objects among them may have memory of a GPU.
    if request.node.get_closest_marker("gpu") is not None:
        gc.unfreeze()


@pytest.fixture
def quick_bench(monkeypatch):
    """Time three rounds with one thread, at given rates, which take no time to measure."""
    import benches
    import fusedops
    from bench import measure

    timed = measure.interleaved

    def interleaved(runs, wait, seconds, rounds=25, **options):
        return timed(runs, wait, seconds, min(rounds, 3), **options)

    monkeypatch.setattr(measure, "interleaved", interleaved)
    monkeypatch.setattr(measure.Plan, "seconds", 0.001)
    monkeypatch.setattr(measure.floors, "measured", lambda *args: benches.RATES)
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    fusedops.set_num_threads(1)
    yield
    fusedops.set_num_threads(None)
    if threads:
        sys.modules["torch"].set_num_threads(threads)


@pytest.fixture
def square():
    """Coordinates of a bent square, in float64, and the one group of its four corners."""
    import numpy as np

    xyz = np.array([[0, 0, 0.1], [1, 0, -0.1], [1, 1, 0.1], [0, 1, -0.1]])
    return xyz, [(np.array([[0, 1, 2, 3]]), np.array([0.1]))]


@pytest.fixture
def several_threads(monkeypatch):
    """Let kernels use all threads on small work, and list the threads of each parallel region."""
    from fusedops._host import threads
    from fusedops.testing import CASES

    families = {case.primitive.family for case in CASES}
    kernels = [importlib.import_module(f"cpukern.{family}.cython") for family in families]
    used = []

    def threads_for(work, grain):
        used.append(threads.get_num_threads())
        return used[-1]

    for module in (threads, *kernels):
        if hasattr(module, "threads_for"):
            monkeypatch.setattr(module, "threads_for", threads_for)
    return used


@pytest.fixture
def fresh_plans():
    """Forget all plans before and after a test that changes their ingredients."""
    from places import forget_plans

    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def aligned(monkeypatch, fresh_plans):
    """Let every kernel assert that its arrays are aligned; list the calls."""
    import numpy as np

    from fusedops._frame import registry
    from fusedops._frame.packed import Packed

    calls = []
    genuine = registry.choose

    def choose(request):
        backend, kernel = genuine(request)

        def spy(*records):
            calls.append(request)
            given = [value for record in records for value in record]
            packed = [p for p in given if isinstance(p, Packed)]
            fields = [getattr(p, name) for p in packed for name in p._fields]
            for array in (*given, *fields):
                assert not isinstance(array, np.ndarray) or array.flags.aligned
            return kernel(*records)

        return backend, spy

    monkeypatch.setattr(registry, "choose", choose)
    return calls


@pytest.fixture
def wrong_kernel(monkeypatch, fresh_plans):
    """Let a kernel be off in one element by a hundred-thousandth of the largest."""
    import numpy as np

    from fusedops._frame import registry

    def put(primitive, backend, output):
        request = registry.Request(primitive, "numpy", "cpu", np.dtype("f4"), backend)
        genuine = registry.choose(request)[1]

        def wrong(a, y):
            genuine(a, y)
            if y[output] is not None:
                y[output].flat[y[output].size // 2] += 1e-5 * np.abs(y[output]).max()

        monkeypatch.setitem(registry._kernels, (primitive, backend), wrong)
        monkeypatch.setattr(registry, "_chosen", {})

    return put


@pytest.fixture
def threads_of_onednn(monkeypatch):
    """Have oneDNN multiply small matrices too, and list OpenMP's threads in each product."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no such product")
    from cpukern import products

    counts = []

    def counted(multiply):
        def by(*given):
            counts.append(torch.get_num_threads())
            return multiply(*given)

        return by

    ours, prepare = products.InFloat32.dot, products.InFloat32.prepared
    for name, noting in (
        ("dot", counted(ours)),
        ("prepared", lambda *given: counted(prepare(*given))),
    ):
        monkeypatch.setattr(products.InFloat32, name, staticmethod(noting))
    monkeypatch.setattr(products, "_WORTH", 0)
    return counts
