"""Arrays between pages that nobody may touch: a kernel that does so kills its process.

A test calls `run` with the code of that process, which imports the rest from here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import interpreter

PAGE = mmap.PAGESIZE
#: The framework whose arrays a kernel gets, and its backend, in the process of a test.
FRAMEWORK, BACKEND = os.environ.get("GUARDED_PLACE", "-").split("-")


def run(place: tuple[str, str], code: str, **given: Any) -> None:
    """Run code for a place in a process of its own, with these variables; fail where it fails."""
    variables = "".join(f"{name} = {value!r}\n" for name, value in given.items())
    command = [sys.executable, "-W", "ignore", "-c", variables + code]
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    environment = {**os.environ, "PYTHONPATH": path, "GUARDED_PLACE": "-".join(place)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def guarded(values: Any, at_the_end: bool) -> np.ndarray:
    """Return an array between two pages that nobody may touch, at the end or at the start."""
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


if FRAMEWORK == "torch":
    interpreter.hasten()
