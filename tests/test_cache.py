"""`fusedops cache` and `info` see our compiled kernels, and no other program's."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import fusedops
from fusedops import _info, cli
from fusedops._frame import registry
from fusedops._info import CacheInfo
from processes import python

OURS = '#loc = loc("/site-packages/gpukern/conv/triton.py":144:0)\n'
OURS_ON_WINDOWS = r'#loc = loc("C:\\site-packages\\gpukern\\conv.py":144:0)'
OTHERS = '#loc = loc("/home/me/model.py":1:0)\n'


@pytest.fixture
def triton_folder(tmp_path, monkeypatch):
    if reason := registry.import_error("triton"):
        pytest.skip(reason)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    files = {"A.ttir": OURS, "B.ttgir": OURS_ON_WINDOWS, "C.ttir": OTHERS, "D.so": OURS}
    for name, code in files.items():
        folder = tmp_path / name[0]
        folder.mkdir()
        (folder / name).write_text(code)
        (folder / "kernel.cubin").write_bytes(bytes(1000))
    return tmp_path


def test_the_cache_of_triton(triton_folder, capsys):
    size = 2 * 1000 + len(OURS + OURS_ON_WINDOWS)
    assert fusedops.info().caches["triton"] == CacheInfo(str(triton_folder), size)
    assert cli.main(["cache"]) == 0
    assert f"triton: 0.0 MiB in {triton_folder}" in capsys.readouterr().out
    assert {path.name for path in triton_folder.iterdir()} == set("ABCD")
    assert cli.main(["cache", "--clear"]) == 0
    assert f"triton: removed 0.0 MiB in {triton_folder}" in capsys.readouterr().out
    assert {path.name for path in triton_folder.iterdir()} == set("CD")
    assert fusedops.info().caches["triton"].bytes == 0


def test_a_file_that_another_process_removes_has_no_size(triton_folder):
    size = fusedops.info().caches["triton"].bytes
    (triton_folder / "A" / "removed").symlink_to("nowhere")
    assert fusedops.info().caches["triton"].bytes == size


def test_no_cache(monkeypatch, capsys):
    """Without Numba and Triton the command says so."""
    monkeypatch.setattr(_info, "caches", dict)
    assert cli.main(["cache"]) == 0
    assert "neither Numba nor Triton" in capsys.readouterr().out


@pytest.fixture(autouse=True)
def numba_folder(tmp_path_factory, monkeypatch):
    """A folder in the place of Numba's: a test must not remove compiled kernels."""
    numba = pytest.importorskip("numba")
    folder = tmp_path_factory.mktemp("numba")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    return folder


def test_the_cache_of_numba(numba_folder, capsys):
    from cpukern import jit
    from cpukern.planarity import numba as planarity

    kernel = jit.jit(planarity._newton_eigenpair.py_func)
    kept, folder = Path(kernel._cache.cache_path), str(numba_folder)
    assert kept.parent == numba_folder
    others = numba_folder / "other/model.nbi"
    others.parent.mkdir()
    for path in (others, kept / "planarity.nbi", kept / "planarity.1.nbc"):
        path.write_bytes(bytes(1000))
    assert fusedops.info().caches["numba"] == CacheInfo(folder, 2000)
    assert cli.main(["cache", "--clear"]) == 0
    assert f"numba: removed 0.0 MiB in {folder}" in capsys.readouterr().out
    assert fusedops.info().caches["numba"] == CacheInfo(folder, 0)
    assert others.exists()


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_damaged_code_is_compiled_again(suffix, tmp_path):
    pytest.importorskip("numba")
    kernel = tmp_path / "kernel.py"
    kernel.write_text("from cpukern.jit import jit\n@jit\ndef twice(x):\n    return 2 * x\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from kernel import twice\nprint(twice(3), sum(twice.stats.cache_hits.values()))"
    run = functools.partial(python, code, NUMBA_CACHE_DIR=str(tmp_path))
    assert run().split() == ["6", "0"]
    (damaged,) = tmp_path.rglob(f"*{suffix}")
    damaged.write_bytes(damaged.read_bytes()[:99])
    assert run().split() == ["6", "0"]
    assert run().split() == ["6", "1"]
