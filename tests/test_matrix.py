"""Every case of every op, on every backend, in every dtype, against the reference."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from fusedops import _registry
from fusedops.testing import CASES, check, run

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_TRITON = HAS_TORCH and importlib.util.find_spec("triton") is not None

# Where a case runs: the framework of its arrays, and the backend asked for.
PLACES = [("numpy", "cython"), ("numpy", "numba"), ("numpy", "numpy")]
if HAS_TORCH:
    PLACES += [("torch", name) for name in ("cython", "numba", "torch", "numpy")]
if HAS_TRITON:
    PLACES += [("torch", "triton")]

# Triton's interpreter computes both sides of a select in NumPy, which warns of the unused one.
interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@interpreted
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("place", PLACES, ids="-".join)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_the_reference(case, place, dtype):
    check(case, *place, dtype)


@interpreted
@pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", [backend for kind, backend in PLACES if kind == "torch"])
def test_sixteen_bits(backend, dtype):
    check(CASES[0], "torch", backend, dtype)


@pytest.mark.parametrize("place", [p for p in PLACES if p[1] != "triton"], ids="-".join)
def test_the_matrix_sees_a_broken_kernel(place, monkeypatch):
    """What a kernel gets wrong by one part in ten thousand, or doesn't write, fails the matrix."""
    case = CASES[0]
    check(case, *place, "float64")
    genuine = _registry.choose

    def broken(request):
        backend, kernel = genuine(request)

        def wrong(*args):
            result = kernel(*args)
            target = result if backend.module is None else args
            target[-1][:1] *= 1.0001
            return result

        return backend, wrong

    monkeypatch.setattr(_registry, "choose", broken)
    with pytest.raises(AssertionError):
        check(case, *place, "float64")


@pytest.mark.parametrize("backend", ["cython", "numba"])
def test_an_unwritten_output_shows(backend, monkeypatch):
    monkeypatch.setitem(_registry._kernels, ("planarity_nll", backend), lambda *args: None)
    monkeypatch.setattr(_registry, "_chosen", {})
    outputs, _ = run(CASES[0], "numpy", backend, "float64")
    assert np.isnan(outputs[0])
    assert np.isnan(outputs[1]).all()
