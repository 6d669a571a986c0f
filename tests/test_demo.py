"""`fusedops demo` and `fusedops info`."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fusedops
from fusedops import cli
from fusedops._catalogue import calls
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
    monkeypatch.setattr(demo, "PICTURES", (lambda panel: None,))
    monkeypatch.setattr(demo, "ROUNDS", 1)


def test_demo_draws_and_agrees(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "ROUNDS", 1)
    picture = tmp_path / "picture.png"
    assert cli.main(["demo", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
    names = {f"picture-{picture.__name__}.png" for picture in demo.PICTURES}
    assert {path.name for path in tmp_path.iterdir()} == {"picture.png", *names}
    rows = {tuple(line.split()[:2]) for line in out.splitlines()}
    for op in OPS:
        assert {(op, backend.name) for backend in registry.BACKENDS} <= rows
    assert "chosen" in out
    assert "Every result agrees" in out


@pytest.mark.parametrize(
    ("op", "primitive", "output"),
    [
        (fusedops.dynamic_conv, "dynamic_conv", -2),
        (fusedops.dynamic_conv, "dynamic_conv_vjp", -4),
        (fusedops.dynamic_conv_step, "dynamic_conv_step", -1),
        (wigner_d, "wigner_d", 0),
        (fusedops.edge_degree_scatter, "edge_wigner", 0),
        (fusedops.node_to_edge_wigner_permute, "edge_wigner", 2),
        (fusedops.gate_activation, "gate_activation_vjp", -2),
        (fusedops.triangle_multiplicative_update, "triangle_multiplicative_update_vjp", -13),
    ],
)
@pytest.mark.usefixtures("fresh_plans")
def test_demo_fails_when_a_backend_is_wrong(tmp_path, capsys, monkeypatch, op, primitive, output):
    only(monkeypatch, op)
    (numba,) = (backend for backend in registry.BACKENDS if backend.name == "numba")
    kernel = registry._kernel(numba, primitive)

    def wrong(a, y):
        kernel(a, y)
        if y[output] is not None:
            y[output].flat[100 % y[output].size] += 1e-6 * np.abs(y[output]).max()

    monkeypatch.setitem(registry._kernels, (primitive, "numba"), wrong)
    monkeypatch.setattr(registry, "_chosen", {})
    assert cli.main(["demo", "--picture", str(tmp_path / "p.png")]) == 1
    out = capsys.readouterr().out
    assert "A CHECK FAILED." in out
    rows = [line.split() for line in out.splitlines() if line.split()[-1:] == ["FAILED"]]
    assert {row[1] for row in rows} == {"numba"}
    assert "Every result agrees" not in out


def test_info(capsys):
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out == f"{fusedops.info()}\n"
    assert cli.main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fusedops"] == fusedops.__version__
    assert told["backends"]["numpy"] == {"version": np.__version__, "why_not": None}
