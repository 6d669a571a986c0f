"""Arrays between protected pages: a kernel that touches these kills its process.

A test calls `run` with the code of that process, which imports the rest from here. It is forked,
because importing torch and Triton takes longer than most of these tests.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
#: The framework of a kernel's arrays, and its backend, in the process of a test.
FRAMEWORK, BACKEND = "", ""


def run(place: tuple[str, str], code: str, **given: Any) -> None:
    """Run code for a place in a process of its own, with these variables; fail where it fails."""
    global FRAMEWORK, BACKEND
    with tempfile.TemporaryFile("w+") as told, warnings.catch_warnings():
        # Forking warns of other threads, whose locks this code doesn't use.
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            try:
                FRAMEWORK, BACKEND = place
                if "torch" in sys.modules:
                    sys.modules["torch"].set_num_threads(1)
                exec(code, given)
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


def packed(value: Any, at_the_end: bool) -> Any:
    """Return a packed argument whose arrays lie between protected pages."""
    arrays = [guarded(getattr(value, field), at_the_end) for field in value._fields]
    if FRAMEWORK == "torch":
        import torch

        return value.from_tensors([*map(torch.from_numpy, arrays)], value.sizes())
    made = copy.copy(value)
    vars(made).update(zip(value._fields, arrays, strict=True))
    return made


def fill(primitive: Any, a: Any, outputs: Sequence[Any]) -> None:
    """Let the place's kernel fill outputs from a record of arguments; arrays are NumPy's."""
    from fusedops._frame import registry

    first = next(array for array in a if array is not None)
    request = registry.Request(primitive.name, FRAMEWORK, "cpu", first.dtype, BACKEND)
    kernel = registry.choose(request)[1]
    if FRAMEWORK == "torch":
        import torch

        a, outputs = (
            [torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in group]
            for group in (a, outputs)
        )
    kernel(primitive.Arguments(*a), primitive.Outputs(*outputs))
