"""CPU kernels in a process that has torch: whose threads they share, and how many."""

from __future__ import annotations

import ctypes
import os
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
_cpu = pytest.importorskip("cpukern._cpu")

from fusedops._host import threads  # noqa: E402
from processes import python  # noqa: E402

CALL = """
import os, sys, time
import numpy as np, torch, fusedops
x, kernels = torch.randn(1, 2048, 64), torch.randn(1, 2048, 64, 4)
call = lambda backend=None: fusedops.dynamic_conv(x, kernels, backend=backend)
want = fusedops.dynamic_conv(x.numpy(), kernels.numpy(), backend="numpy")
def check(backend=None):
    assert abs(call(backend).numpy() - want).max() < 1e-5
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about threads")
#: Whether torch has an OpenMP that we can join.
OPENMP = sys.platform != "win32" and sys.modules["torch"].backends.openmp.is_available()


def told(code, **environment):
    """Return the lines that code with a convolution of tensors prints."""
    environment = {"FUSEDOPS_NUM_THREADS": "", "OMP_NUM_THREADS": ""} | environment
    return python(CALL + textwrap.dedent(code), **environment).split("\n")[:-1]


@linux
@pytest.mark.skipif(not OPENMP, reason="torch has no OpenMP to join here")
def test_calls_with_tensors_start_no_threads_beside_torchs():
    code = """
    import cpukern.conv.cython, cpukern.conv.numba
    cpukern.conv.cython._CHUNK_GRAIN = cpukern.conv.numba._GRAIN = 1
    tasks = lambda: set(os.listdir("/proc/self/task"))
    for backend in ("cython", "numba"):
        torch.set_num_threads(1)
        call(backend)
        torch.set_num_threads(3)
        torch.rand(10**6).sin()
        before = tasks()
        # On a busy machine, the second call may take threads of our own.
        check(backend)
        assert fusedops.get_num_threads() == 3
        print(len(tasks() - before))
    """
    assert told(code) == ["0", "0"]


def test_without_a_number_of_its_own_a_call_with_tensors_takes_torchs():
    code = """
    print(fusedops.info().whose_threads)
    call()
    print(fusedops.info().whose_threads)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        print(fusedops.get_num_threads())
    fusedops.set_num_threads(2)
    print(fusedops.get_num_threads())
    fusedops.set_num_threads(None)
    from threadpoolctl import threadpool_limits
    with threadpool_limits(1, user_api="openmp"):
        print(fusedops.get_num_threads())
        check()
    """
    before, after, *numbers = told(code)
    assert (before, after) == ("own", "torch's OpenMP" if OPENMP else "own")
    assert numbers == ["1", "3", "2", "1"]
    assert told(code, FUSEDOPS_NUM_THREADS="4")[2:] == ["4", "4", "2", "4"]


def test_openmps_number_holds_for_tensors_and_ours_leaves_it_to_torch():
    code = """
    call()
    print(fusedops.get_num_threads())
    fusedops.set_num_threads(4)
    print(torch.get_num_threads(), fusedops.get_num_threads())
    """
    assert told(code, OMP_NUM_THREADS="1") == ["1", "1 4"]


def test_a_loader_of_data_works_on_one_thread():
    """Whether or not the parent has called us with tensors."""
    code = """
    class Data(torch.utils.data.Dataset):
        __len__ = lambda self: 4
        def __getitem__(self, i):
            check()
            return fusedops.get_num_threads()
    for parent in (int, call):
        parent()
        print(*(int(threads) for threads in torch.utils.data.DataLoader(Data(), num_workers=2)))
    """
    assert told(code) == ["1 1 1 1", "1 1 1 1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_wait_for_the_parents_openmp():
    """Whether the parent has called only torch, or us with tensors."""
    code = """
    import cpukern.conv.cython
    cpukern.conv.cython._CHUNK_GRAIN = 1
    torch.set_num_threads(2)
    for parent in (torch.rand(10**6).sin, call):
        parent()
        child = os.fork()
        if child == 0:
            check()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(status)
    """
    assert told(code) == ["0", "0"]


@linux
def test_a_child_that_imports_fusedops_does_not_wait_for_the_parents_openmp():
    code = """
    import os, torch
    torch.set_num_threads(2)
    torch.rand(10**6).sin()
    # In the child, torch itself would wait if it filled so many numbers.
    x, kernels = torch.ones(1, 4096, 256), torch.ones(1, 4096, 256, 4)
    child = os.fork()
    if child == 0:
        import fusedops
        os._exit(fusedops.dynamic_conv(x, kernels)[0, -1, 0] != 4)
    print(os.waitpid(child, 0)[1])
    """
    assert python(code, FUSEDOPS_NUM_THREADS="").strip() == "0"


@pytest.fixture(params=[0.0, 0.002])
def openmp(request):
    """Join an OpenMP of two threads whose regions end late, and list when they begin."""
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    begun = []

    @ctypes.CFUNCTYPE(None, region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(function, data, number, flags):
        # The runtime's own number of threads: another would end some and begin others.
        assert (number, flags) == (0, 0)
        begun.append(time.perf_counter())
        function(data)
        time.sleep(request.param)

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def number():
        return 2

    _cpu.join_openmp(*[ctypes.cast(f, ctypes.c_void_p).value for f in (parallel, number)])
    yield SimpleNamespace(late=request.param, begun=begun)
    _cpu.join_openmp(0, 0)
    if threads.whose_threads() == "torch's OpenMP":
        threads.follow_torch(sys.modules["torch"])


def call(number=2):
    spans = []
    _cpu.in_parallel(lambda *span: spans.append(span), 7, number)
    # A thread that is alone takes all parts, one after the other or at once.
    assert [i for low, high in sorted(spans) for i in range(low, high)] == list(range(7))


def test_a_late_region_sends_the_next_calls_to_threads_of_our_own(openmp):
    """Each in a row for twice as long, from 10 ms to 1 s."""
    while len(openmp.begun) < 8:
        call()
    if openmp.late:
        assert (np.diff(openmp.begun) > 0.01 * 2.0 ** np.arange(7)).all()
        for _ in range(3):
            call()
        assert len(openmp.begun) == 8
    else:
        assert np.diff(openmp.begun).min() < 0.01


def test_a_team_is_large_enough_or_stays_away(openmp):
    call(3)
    assert not openmp.begun
    call(2)
    assert len(openmp.begun) == 1


@pytest.mark.parametrize("callers", [2, 5])
def test_calls_at_once_have_the_helpers_of_one(callers):
    """In a server, N threads that call with four threads each are N + 3 at most."""
    lock, at_work, most = threading.Lock(), set(), []

    def work(low, high):
        me = threading.get_ident()
        with lock:
            at_work.add(me)
            most.append(len(at_work))
        time.sleep(0.002)
        with lock:
            at_work.remove(me)

    def serve():
        for _ in range(10):
            _cpu.in_parallel(work, 8, 4)

    with ThreadPoolExecutor(callers) as pool:
        for done in [pool.submit(serve) for _ in range(callers)]:
            done.result()
    assert 2 <= max(most) <= callers + 3


def test_an_error_ends_the_call_and_leaves_the_threads():
    def work(low, high):
        raise KeyError(low)

    for _ in range(3):
        with pytest.raises(KeyError):
            _cpu.in_parallel(work, 8, 4)
    done = np.zeros(8, int)

    def mark(low, high):
        done[low:high] += 1

    _cpu.in_parallel(mark, 8, 4)
    assert (done == 1).all()
