"""`fusedops check` runs every backend that works, and sees wrong kernels."""

from __future__ import annotations

import importlib.util
import re

import pytest

import fusedops
from fusedops import cli
from fusedops._catalogue import calls
from fusedops._frame import registry
from fusedops.cli import check
from fusedops.wigner import wigner_d
from places import needs_torch
from processes import ended, without

OPS = [wigner_d.__name__]
OPS += [name for name in fusedops.__all__ if hasattr(getattr(fusedops, name), "explain")]


def run_without(hidden, command):
    return ended(f"{without(*hidden)}from fusedops import cli\nsys.exit(cli.main({command!r}))")


@needs_torch
def test_every_op_is_checked_on_numpy(capsys, monkeypatch):
    """In 16 bits; below, without torch, arrays are checked."""

    def ways(op, backend):
        return {"torch": ["bfloat16" if op.primitive.sixteen_bits else "float32"]}

    monkeypatch.setattr(check, "_ways", ways)
    assert cli.main(["check", "--device", "cpu", "--backend", "numpy"]) == 0
    out = capsys.readouterr().out
    for name in OPS:
        assert name in out
    assert f"All {len(OPS)} checks passed." in out
    assert "FAILED" not in out


def test_with_numpy_alone():
    """Compiled kernels are checked if there are any, and the table is plain."""
    hidden = ["torch", "triton", "numba", "rich", "gemmi", "matplotlib", "scipy", "threadpoolctl"]
    done = run_without(hidden, ["check"])
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Errors against the reference")
    assert lines[-1].endswith("checks passed.")
    for backend in ("numba", "triton", "torch"):
        (line,) = [line for line in lines if line.split()[:3] == ["every", "op", backend]]
        assert "is not installed" in line
    served = [line.split()[1] for line in lines[2:-1] if line.split()[0] in OPS]
    assert served.count("numpy") == len(OPS)


@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_gpu_that_there_is_not(command):
    done = run_without(["torch"], [command, "--device", "cuda"])
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        'fusedops: torch is not installed: pip install "torch>=2.6"'
    ]


def test_nothing_to_check(capsys):
    done = run_without(["torch"], ["check", "--backend", "torch"])
    assert done.returncode == 2
    assert "nothing could be checked" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
@pytest.mark.parametrize(
    ("primitive", "op", "output"),
    [
        ("dynamic_conv", fusedops.dynamic_conv, -2),
        ("dynamic_conv_step", fusedops.dynamic_conv_step, -1),
        ("gaussian_density_vjp", fusedops.gaussian_density, -3),
    ],
)
def test_a_wrong_kernel_fails_the_check(capsys, monkeypatch, wrong_kernel, primitive, op, output):
    """The error is in the forward pass or only in the gradient, and other kernels still pass."""
    every = calls()
    monkeypatch.setattr(check, "calls", lambda: {kind: every[kind] for kind in (op, wigner_d)})
    wrong_kernel(primitive, "numba", output)
    assert cli.main(["check", "--backend", "numba", "numpy"]) == 1
    out = capsys.readouterr().out
    (failed,) = (line for line in out.splitlines() if "off by" in line)
    assert failed.split()[:2] == [op.__name__, "numba"]
    assert int(re.search(r" (\d+)% ", failed)[1]) > 100
    assert "1 OF 4 CHECKS FAILED." in out


@pytest.mark.usefixtures("fresh_plans")
def test_a_failure_is_the_exit_code(capsys, monkeypatch):
    """The failure is shown in its row and in the last line, too."""

    def fails(*args):
        raise ZeroDivisionError("no\nmore")

    op = fusedops.dynamic_conv_step
    every = calls()
    monkeypatch.setattr(check, "calls", lambda: {op: every[op]})
    monkeypatch.setattr(op.primitive, "formula", fails)
    monkeypatch.setattr(registry, "_chosen", {})
    assert cli.main(["check", "--device", "cpu", "--backend", "numpy"]) == 1
    out = capsys.readouterr().out
    assert "ZeroDivisionError: no" in out
    assert "1 OF 1 CHECKS FAILED." in out


@needs_torch
def test_tensors_are_checked_too(capsys, monkeypatch):
    every = calls()
    monkeypatch.setattr(
        check, "calls", lambda: {fusedops.dynamic_conv: every[fusedops.dynamic_conv]}
    )
    assert cli.main(["check", "--device", "cpu", "--backend", "numpy"]) == 0
    assert " NumPy f32 f64; torch f32 f64 bf16 " in capsys.readouterr().out
