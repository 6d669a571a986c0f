"""Tables of commands: at any width of the terminal no name is cut."""

import re
import sys

import pytest

from fusedops.cli import tables

HEADINGS = ("op", "backend", "with", "why not", "value", "of allowed", "")
ROWS = [
    (["structured_scatter_add", "cython", "NumPy f32; torch f32", "", "2e-08", "10%", "ok"], None),
    None,
    (["node_to_edge_wigner_permute", "triton", "", "torch sees no GPU", "", "", "-"], "dim"),
]


def words(text):
    return set(re.split(r"[\s,]+", text))


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_no_name_is_cut(capsys, monkeypatch, columns):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    tables.show("Errors", HEADINGS, ROWS, right=3)
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "…" not in out
    for cells, _ in filter(None, ROWS):
        assert words(" ".join(cells)) <= words(out)
    assert max(map(len, out.splitlines())) <= columns
    # A row is one line where it fits.
    assert any({"structured_scatter_add", "ok"} <= words(x) for x in out.splitlines()) == (
        columns >= 120
    )


def test_a_pipe_has_no_width(capsys):
    pytest.importorskip("rich")
    long = "a reason " * 30
    tables.show("Errors", ["op", "why"], [(["x", long], None)])
    assert long.strip() in capsys.readouterr().out


def test_without_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("COLUMNS", "30")
    tables.show("Errors", HEADINGS, ROWS, right=3)
    assert "structured_scatter_add" in capsys.readouterr().out
