"""Arrays between protected pages: a kernel that touches these kills its process."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusedops._frame import registry
from fusedops._frame.packed import Packed

PAGE = mmap.PAGESIZE


def run(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a process of its own; fail where it fails.

    The process is forked, because importing torch and Triton takes longer than most of these tests.
    """
    with tempfile.TemporaryFile("w+") as told, warnings.catch_warnings():
        # Forking warns of other threads, whose locks these functions don't use.
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            try:
                if "torch" in sys.modules:
                    sys.modules["torch"].set_num_threads(1)
                function(*arguments)
            except BaseException:
                traceback.print_exc(file=told)
                told.flush()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        assert status == 0, f"{os.waitstatus_to_exitcode(status)}: {told.read()}"


def guarded(values: Any, at_the_end: bool) -> np.ndarray:
    """Return an array between two protected pages, next to the one after or before it."""
    values = np.asarray(values)
    pages = max(1, -(-values.nbytes // PAGE))
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for page in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(start + page * PAGE), PAGE, 0) == 0
    offset = PAGE + (pages * PAGE - values.nbytes if at_the_end else 0)
    array = np.frombuffer(memory, np.uint8)[offset:][: values.nbytes]
    array = array.view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


def between(
    framework: str, device: str, shape: tuple[int, ...], around: float, values: Any
) -> tuple[Any, Any]:
    """Return memory, and an array in it that lies between eight others of its size and eight."""
    memory: Any = np.full((17, *shape), around)
    memory[8] = values
    if framework == "torch":
        memory = importlib.import_module("torch").from_numpy(memory).to(device)
    return memory, memory[8:9].reshape(shape)


def fill(
    place: tuple[str, str],
    primitive: Any,
    arguments: Sequence[Any],
    outputs: Sequence[Any],
    at_the_end: bool,
) -> tuple[Any, Any]:
    """Let the place's kernel fill outputs; return the arguments and outputs between pages.

    The arrays of packed arguments lie between pages, too.
    """

    def own(value: Any) -> Any:
        if isinstance(value, Packed):
            return value.from_tensors([*map(own, value.arrays())], value.sizes())
        return guarded(value, at_the_end) if isinstance(value, np.ndarray) else value

    framework, backend = place
    given = primitive.Arguments(*map(own, arguments))
    filled = primitive.Outputs(*map(own, outputs))
    first = next(array for array in given if array is not None)
    request = registry.Request(primitive.name, framework, "cpu", first.dtype, backend)
    kernel = registry.choose(request)[1]
    records = given, filled
    if framework == "torch":
        as_tensor = sys.modules["torch"].from_numpy
        records = (
            type(group)(*(as_tensor(one) if isinstance(one, np.ndarray) else one for one in group))
            for group in records
        )
    kernel(*records)
    return given, filled
