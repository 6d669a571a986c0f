"""Memory of large arrays is used again, and never while anybody holds it."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from collections import deque

import numpy as np
import pytest

import fusedops
from fusedops._host import memory, threads

LARGE = (memory.SMALL // 8 + 3,)


pytestmark = pytest.mark.usefixtures("young_heap")


@pytest.fixture(autouse=True)
def empty_pool(monkeypatch):
    monkeypatch.setattr(memory, "_free", [])
    monkeypatch.setattr(memory, "_returned", deque())


def large():
    return memory.empty(LARGE, np.dtype(np.float64))


def address(array):
    return array.ctypes.data


def test_arrays_are_like_numpys():
    array = memory.empty((3, 5, memory.SMALL // 32), np.dtype(np.float32))
    assert array.shape == (3, 5, memory.SMALL // 32)
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert address(array) % 64 == 0
    array[:] = 2
    assert (pickle.loads(pickle.dumps(array)) == 2).all()
    for shape in ((), (0, 3), (2, 2)):
        assert memory.empty(shape, np.dtype(np.float64)).shape == shape


def test_memory_is_used_again():
    array = large()
    first = address(array)
    del array
    again = large()
    assert address(again) == first
    assert address(large()) != first


VIEWS = {
    "slice": lambda array: array[5:7],
    "transpose": lambda array: array.reshape(-1, 1).T,
    "bytes": lambda array: array.view(np.uint8)[8:],
    "memoryview": lambda array: memoryview(array)[3:],
    "buffer": lambda array: np.frombuffer(array, np.uint8)[1:],
    "dlpack": lambda array: np.from_dlpack(array)[2:],
    "tensor": lambda array: pytest.importorskip("torch").from_numpy(array).view(-1, 1)[1:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_keeps_the_memory(view):
    array = large()
    array[:] = 1
    first = address(array)
    held = VIEWS[view](array)
    before = np.asarray(held).copy()
    del array
    gc.collect()
    other = large()
    other[:] = 7
    assert address(other) != first
    assert (np.asarray(held) == before).all()
    del held
    gc.collect()
    assert address(large()) == first


def test_a_block_serves_arrays_of_about_its_size():
    size = memory.SMALL
    array = memory.empty((8 * size,), np.dtype(np.uint8))
    first = address(array)
    del array
    assert address(memory.empty((4 * size,), np.dtype(np.uint8))) != first
    assert address(memory.empty((7 * size,), np.dtype(np.uint8))) == first


def test_no_more_is_kept_than_allowed(monkeypatch):
    monkeypatch.setattr(memory, "limit", lambda: 5 * memory.SMALL)
    arrays = [memory.empty((2 * memory.SMALL,), np.dtype(np.uint8)) for _ in range(4)]
    arrays.append(memory.empty((6 * memory.SMALL,), np.dtype(np.uint8)))
    arrays.clear()
    assert 0 < memory.pooled() <= 5 * memory.SMALL


def test_memory_is_given_back():
    array = large()
    assert fusedops.info().pool == fusedops.release_memory() == 0
    size = array.nbytes
    del array
    assert size <= fusedops.info().pool <= size + 64
    assert fusedops.release_memory() >= size
    assert fusedops.info().pool == 0


@pytest.mark.parametrize(("asked", "limit"), [("", 2**30), ("0", 0), ("5000000000", 5_000_000_000)])
def test_the_environment_limits_the_pool(monkeypatch, asked, limit):
    monkeypatch.setattr(memory, "limit", memory.limit.__wrapped__)
    monkeypatch.setenv("FUSEDOPS_POOL_BYTES", asked)
    array = large()
    size = array.nbytes
    del array
    assert memory.limit() == fusedops.info().pool_limit == limit
    assert (memory.pooled() >= size) == (limit >= size)


@pytest.mark.parametrize("asked", ["1 GB", "-1", "1e9", "²"])
def test_a_limit_that_is_no_number(monkeypatch, asked):
    monkeypatch.setattr(memory, "limit", memory.limit.__wrapped__)
    monkeypatch.setenv("FUSEDOPS_POOL_BYTES", asked)
    with pytest.raises(ValueError, match=f"FUSEDOPS_POOL_BYTES is '{asked}'; it should be"):
        large()


def test_threads_never_share_an_array():
    def work(number):
        for _ in range(200):
            array = large()
            array[::4096] = number
            if not (array[::4096] == number).all():
                wrong.append(number)

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_it_goes_on():
    with memory._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            array = large()
            del array
            large()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_an_array_may_die_while_another_is_made():
    """A finalizer or a signal handler may run just then and free it."""
    array = large()
    with memory._lock:
        del array
    assert len(memory._returned) == 1
    alive = [large()]
    assert not memory._returned
    del alive


def test_what_is_kept_gives_way_to_what_is_needed(monkeypatch):
    array = large()
    del array
    genuine, failed = np.empty, []

    def short_of_memory(shape, dtype):
        if memory._free:
            failed.append(shape)
            raise MemoryError
        return genuine(shape, dtype)

    monkeypatch.setattr(np, "empty", short_of_memory)
    memory.empty((8 * LARGE[0],), np.dtype(np.float64))
    assert failed


@pytest.mark.parametrize("length", [0, 5, memory.SMALL // 8])
def test_arrays_together_are_apart(length):
    sizes = [(length, np.dtype(np.int32)), (7, np.dtype(np.float64)), (length, np.dtype(np.int64))]
    arrays = memory.together(*sizes)
    assert [(len(array), array.dtype) for array in arrays] == sizes
    for value, array in enumerate(arrays):
        assert array.flags.aligned
        array[:] = value
    for value, array in enumerate(arrays):
        assert (array == value).all()


def test_memory_of_arrays_together_is_used_again():
    sizes = [(memory.SMALL // 16, np.dtype(np.int32))] * 4
    arrays = memory.together(*sizes)
    block = address(arrays[0])
    del arrays[0]
    assert address(memory.together(*sizes)[0]) != block
    arrays.clear()
    gc.collect()
    assert address(memory.together(*sizes)[0]) == block


def test_an_interrupt_leaves_blas_its_threads(monkeypatch):
    """It may come after the number is set, or before the block is entered."""
    pytest.importorskip("threadpoolctl")
    found = threads._blas().lib_controllers
    before, real = [library.get_num_threads() for library in found], threads._set_num_threads
    for library in found:
        real(library, 2)
    try:
        for after in (True, False):

            def interrupted(library, number, after=after):
                if after:
                    real(library, number)
                monkeypatch.setattr(threads, "_set_num_threads", real)
                raise KeyboardInterrupt

            monkeypatch.setattr(threads, "_set_num_threads", interrupted)
            with pytest.raises(KeyboardInterrupt), threads.blas_on_one_thread():
                pytest.fail("entered")
            assert (threads._blas_users, threads._blas_before) == (0, [])
            assert [library.get_num_threads() for library in found] == [2] * len(found)
    finally:
        for library, number in zip(found, before, strict=True):
            real(library, number)
