"""Where tests run: the frameworks and backends of this machine, and how to leave one out."""

from __future__ import annotations

import functools
import importlib.util
import sys

import numpy as np
import pytest

import fusedops
from fusedops._frame import registry

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_TRITON = HAS_TORCH and importlib.util.find_spec("triton") is not None

needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
#: The test protects pages of memory, or inspects threads, the Linux way.
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has this")
#: Triton's interpreter computes both sides of a select in NumPy, which warns of the unused one.
interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton|interpreter")

#: Backends that compute by the same operations in the same order, however an array lies in memory
#: and however many threads share the work.
EXACT = ("cython", "numba")
#: Backends that serve NumPy arrays.
SERVE_ARRAYS = ("cython", "numba", "numpy")
#: Backends that serve tensors on the CPU; Triton's kernels are interpreted there, and slow.
SERVE_TENSORS = (*SERVE_ARRAYS, "torch", *(["triton"] if HAS_TRITON else []))
#: The framework of the arrays and the requested backend: every implementation once.
QUICK = [("numpy", name) for name in SERVE_ARRAYS] + [("torch", "torch")] * HAS_TORCH
PLACES = QUICK + [("torch", "triton")] * HAS_TRITON
#: The places whose kernels fill arrays that they are given.
FILLING = [place for place in PLACES if place[1] not in ("numpy", "torch")]


def forget_plans() -> None:
    """Forget all plans, after a change to a part of plans, such as a kernel."""
    for owner in (*registry.ops.values(), *registry.primitives.values()):
        owner.plans._plans.clear()


@functools.cache
def _missing(framework: str, backend: str) -> str | None:
    """Return why a backend can't serve arrays of a framework here, or None where it can."""
    x, kernels = np.ones((1, 2, 1)), np.ones((1, 1))
    if framework == "torch":
        import torch

        x, kernels = torch.from_numpy(x), torch.from_numpy(kernels)
    return fusedops.dynamic_conv.explain(x, kernels, backend=backend).reasons[backend]


def available(framework: str, backend: str) -> tuple[str, str]:
    """Return the place; skip the test where the backend isn't installed or built."""
    if framework == "torch":
        pytest.importorskip("torch")
    if reason := _missing(framework, backend):
        pytest.skip(f"{backend}: {reason}")
    return framework, backend
