"""`fusedops demo` and `fusedops info`."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

import fusedops
from fusedops import cli
from fusedops._frame import registry
from fusedops.cli import demo
from fusedops.wigner import wigner_d

pytest.importorskip("gemmi")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

OPS = [wigner_d.__name__]
OPS += [name for name in fusedops.__all__ if hasattr(getattr(fusedops, name), "explain")]


def test_demo_draws_and_agrees(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "_median_ms", functools.partial(demo._median_ms, seconds=0))
    picture = tmp_path / "picture.png"
    assert cli.main(["demo", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
    names = {f"picture-{name}.png" for name in demo.DEMOS}
    assert {path.name for path in tmp_path.iterdir()} == {"picture.png", *names}
    rows = {tuple(line.split()[:2]) for line in out.splitlines()}
    for op in OPS:
        assert {(op, backend.name) for backend in registry.BACKENDS} <= rows
    assert "chosen" in out
    assert "Every result agrees" in out


@pytest.mark.parametrize(
    ("name", "primitive", "output"),
    [
        ("planarity", "planarity_nll", -1),
        ("dynamic_conv", "dynamic_conv", -2),
        ("dynamic_conv", "dynamic_conv_vjp", -4),
        ("dynamic_conv", "dynamic_conv_vjp", -3),
        ("dynamic_conv", "dynamic_conv_step", -1),
        ("edge_wigner", "wigner_d", 0),
        ("edge_wigner", "edge_wigner", 0),
        ("edge_wigner", "edge_wigner", 1),
        ("edge_wigner", "edge_wigner", 2),
        ("so2_convolution", "so2_convolution", -2),
        ("so2_convolution", "so2_convolution_vjp", -12),
        ("so2_convolution", "so2_convolution_vjp", -1),
        ("so2_convolution", "gate_activation_vjp", -2),
        ("gaussian_density", "gaussian_density", -2),
        ("gaussian_density", "gaussian_density_vjp", 0),
        ("gaussian_density", "gaussian_density_vjp", 1),
        ("gaussian_density", "gaussian_density_vjp", 2),
        ("triangle_multiplicative_update", "triangle_multiplicative_update", -2),
        ("triangle_multiplicative_update", "triangle_multiplicative_update_vjp", -14),
        ("triangle_multiplicative_update", "triangle_multiplicative_update_vjp", -13),
        ("triangle_multiplicative_update", "triangle_multiplicative_update_vjp", -2),
    ],
)
@pytest.mark.usefixtures("fresh_plans")
def test_demo_fails_when_a_backend_is_wrong(tmp_path, capsys, monkeypatch, name, primitive, output):
    monkeypatch.setattr(demo, "DEMOS", {name: demo.DEMOS[name]})
    monkeypatch.setattr(demo, "_median_ms", lambda step: 0.0)
    # The picture takes half of the time, and a test above draws one.
    monkeypatch.setattr(demo, "save_picture", lambda *given: None)
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


def test_demo_where_nothing_can_be_drawn(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "DEMOS", {"planarity": demo.planarity})
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
