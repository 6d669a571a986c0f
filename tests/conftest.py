"""Test set-up: Triton kernels are interpreted on the CPU unless the tests are for a real GPU."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        return
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def square():
    """Coordinates of a bent square, in float64, and the one group of its four corners."""
    import numpy as np

    xyz = np.array([[0, 0, 0.1], [1, 0, -0.1], [1, 1, 0.1], [0, 1, -0.1]])
    return xyz, [(np.array([[0, 1, 2, 3]]), np.array([0.1]))]


@pytest.fixture
def several_threads(monkeypatch):
    """Let kernels use all threads on small work, and list how many each parallel region gets."""
    from cpukern import cython_backend, threads

    used = []

    def threads_for(work, grain):
        used.append(threads.get_num_threads())
        return used[-1]

    for module in (threads, cython_backend):
        monkeypatch.setattr(module, "threads_for", threads_for)
    return used
