"""Test set-up: Triton kernels are interpreted on the CPU unless the tests are for a real GPU."""

import dataclasses
import importlib
import importlib.util
import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu":
        return
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def one_thread_for_torch():
    """Keep the threads of torch, which are worth nothing here, from waiting for each other."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    """Let Triton's interpreter leave out what it does in vain, in half of its time.

    That is to patch its language anew whenever a kernel calls a function, and to compute whether
    integers overflow, of which it says nothing.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or not importlib.util.find_spec("triton"):
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # Another Triton, whose interpreter stays slow.
    builder = interpreter.interpreter_builder
    patched = set()
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore

    def patch_once(function):
        if function.__module__ not in patched:
            patched.add(function.__module__)
            return patch(function)

    def restore_after_a_launch(scope):
        patched.clear()
        restore(scope)

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_once
    interpreter._LangPatchScope.restore = restore_after_a_launch


@pytest.fixture
def square():
    """Coordinates of a bent square, in float64, and the one group of its four corners."""
    import numpy as np

    xyz = np.array([[0, 0, 0.1], [1, 0, -0.1], [1, 1, 0.1], [0, 1, -0.1]])
    return xyz, [(np.array([[0, 1, 2, 3]]), np.array([0.1]))]


@pytest.fixture
def several_threads(monkeypatch):
    """Let kernels use all threads on small work, and list how many each parallel region gets."""
    from fusedops._frame import threads
    from fusedops.testing import CASES

    families = {case.primitive.family for case in CASES if case.has_kernels}
    kernels = [importlib.import_module(f"cpukern.{family}_cython") for family in families]
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
    """Let a test change what plans are made of: none from before, and none of its own after."""
    from fusedops._frame.kinds import forget_plans

    forget_plans()
    yield
    forget_plans()
