"""`fusedops demo` and `fusedops info`."""

from __future__ import annotations

import numpy as np
import pytest

import fusedops
from fusedops._catalogue import calls, pictures
from fusedops._frame import registry
from fusedops.cli import demo
from fusedops.wigner import wigner_d

pytest.importorskip("gemmi")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

OPS = [wigner_d.__name__]
OPS += [name for name in fusedops.__all__ if hasattr(getattr(fusedops, name), "explain")]


def only(monkeypatch, *ops):
    """Let the demo be of some ops, and without pictures."""
    every = calls()
    monkeypatch.setattr(demo, "calls", lambda: {op: every[op] for op in ops})
    monkeypatch.setattr(demo, "pictures", lambda: {"nothing": lambda panel: None})
    monkeypatch.setattr(demo, "ROUNDS", 1)


def test_demo_draws_and_agrees(folder, run, monkeypatch):
    monkeypatch.setattr(demo, "ROUNDS", 1)
    code, out, _ = run("demo", "--picture", "picture.png")
    assert code == 0
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    together = sizes.pop("picture.png")
    assert set(sizes) == {f"picture-{name}.png" for name in pictures()}
    assert together > max(sizes.values())
    assert min(sizes.values()) > 20_000
    rows = {tuple(line.split()[:2]) for line in out.splitlines()}
    for op in OPS:
        assert {(op, backend.name) for backend in registry.BACKENDS} <= rows
    assert "chosen" in out
    assert "Every result agrees" in out


@pytest.mark.parametrize(
    ("op", "primitive", "output"),
    [
        (fusedops.dynamic_conv, "dynamic_conv_vjp", -4),
        (fusedops.dynamic_conv_step, "dynamic_conv_step", -1),
        (fusedops.edge_degree_scatter, "edge_wigner", 0),
    ],
)
def test_demo_fails_when_a_backend_is_wrong(
    folder, run, monkeypatch, wrong_kernel, op, primitive, output
):
    only(monkeypatch, op)
    wrong_kernel(primitive, "numba", output)
    code, out, _ = run("demo", "--picture", "p.png")
    assert code == 1
    assert "A CHECK FAILED." in out
    rows = [line.split() for line in out.splitlines() if line.split()[-1:] == ["FAILED"]]
    assert {row[1] for row in rows} == {"numba"}
    assert "Every result agrees" not in out


def test_info(run, told):
    assert run("info") == (0, f"{fusedops.info()}\n", "")
    found = told("info")
    assert found["fusedops"] == fusedops.__version__
    assert found["backends"]["numpy"] == {"version": np.__version__, "why_not": None}
