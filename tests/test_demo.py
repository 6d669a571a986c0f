"""`fusedops demo` and `fusedops info`."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fusedops
from fusedops import _registry, cli

pytest.importorskip("gemmi")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")


def test_demo_draws_and_agrees(tmp_path, capsys):
    picture = tmp_path / "picture.png"
    assert cli.main(["demo", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
    for backend in _registry.BACKENDS:
        assert backend.name in out
    assert "chosen" in out
    assert "Every result agrees" in out


def test_demo_fails_when_a_backend_is_wrong(tmp_path, capsys, monkeypatch):
    kernel = _registry._kernels["planarity_nll", "numba"]

    def wrong(xyz, planes, fit, nll, gradient):
        kernel(xyz, planes, fit, nll, gradient)
        if gradient is not None:
            gradient[100] += 1e-6 * np.abs(gradient).max()

    monkeypatch.setitem(_registry._kernels, ("planarity_nll", "numba"), wrong)
    monkeypatch.setattr(_registry, "_chosen", {})
    assert cli.main(["demo", "--picture", str(tmp_path / "p.png")]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILED") == 2
    assert "Every result agrees" not in out


def test_demo_where_nothing_can_be_drawn(tmp_path, capsys):
    assert cli.main(["demo", "--picture", str(tmp_path / "none/p.png")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "p.png" in lines[0]


def test_info(capsys):
    assert cli.main(["info"]) == 0
    assert capsys.readouterr().out == f"{fusedops.info()}\n"
    assert cli.main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fusedops"] == fusedops.__version__
    assert told["backends"]["numpy"] == {"version": np.__version__, "why_not": None}
