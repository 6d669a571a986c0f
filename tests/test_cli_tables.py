"""Tables of commands: at any width of the terminal no name is cut."""

import json
import re
import sys
from importlib.resources import files

import pytest

import benches  # noqa: F401
from bench import report, terminal
from fusedops import cli
from fusedops.cli import check as checks
from fusedops.cli import tables

HEADINGS = ("op", "backend", "with", "why not", "value", "of allowed", "")
ROWS = [
    (["structured_scatter_add", "cython", "NumPy f32; torch f32", "", "2e-08", "10%", "ok"], None),
    None,
    (["node_to_edge_wigner_permute", "triton", "", "torch sees no GPU", "", "", "-"], "dim"),
]


def words(text):
    return set(re.split(r"[\s,]+", text))


@pytest.fixture
def shown(capsys, monkeypatch):
    """Return a function that shows something on a terminal of some columns, and returns it."""
    pytest.importorskip("rich")

    def shown(columns, show, *arguments, **options):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        show(*arguments, **options)
        return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)

    return shown


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_no_name_is_cut(shown, columns):
    out = shown(columns, tables.show, "Errors", HEADINGS, ROWS, right=3)
    assert "…" not in out
    for cells, _ in filter(None, ROWS):
        assert words(" ".join(cells)) <= words(out)
    assert max(map(len, out.splitlines())) <= columns
    # A row is one line where it fits.
    assert any({"structured_scatter_add", "ok"} <= words(x) for x in out.splitlines()) == (
        columns >= 120
    )


@pytest.mark.parametrize(("columns", "in_columns"), [(68, True), (67, False)])
def test_a_table_that_does_not_fit_is_a_list(shown, columns, in_columns):
    rows = [(["A/SER 22 - A/GLU 23 peptide alt C", "GLU 23 N", "5.65", "0.1131"], None)]
    headings = "plane", "worst atom", "Z", "off by Å"
    out = shown(columns, tables.show, "The worst plane", headings, rows, right=2)
    assert ("─" in out) == in_columns
    assert ("\n    Z 5.65, off by Å 0.1131\n" in out) != in_columns


def planarity():
    pytest.importorskip("gemmi")
    assert cli.main(["planarity", str(files("fusedops") / "data/1ubi.pdb")]) == 0


def check():
    ops = ("node_to_edge_wigner_permute", "triangle_multiplicative_update", "gaussian_density")
    done = "NumPy float32 float64; torch float32", "", "1e-07", "2e-06", "50%", "0.1", "ok"
    rows = [([op, "cython", *done], None) for op in ops]
    tables.show("Errors", checks.HEADINGS, rows, right=5)


def bench_row(**values):
    row = {"op": "permute_wigner_inv_edge_to_node", "workload": "Jet-Nemotron, SiLU", "size": 7}
    row |= {"shape": {"atoms": 11484, "reflections": 125197}, "dtype": "float32", "ours": True}
    row |= {"who": "TorchRef 0.7, float64", "how": "torch", "pass": "forward + backward"}
    row |= {"ms": 12.3, "quartiles_ms": [11.0, 13.0], "refused": None, "work": {"floor_ms": 8.2}}
    return row | {"error": {"value": 1e-7}, "peak_MB": 33.0, "share": 0.12} | values


def bench():
    peer = bench_row(who="cuEquivariance", ours=False)
    refused = bench_row(refused="OutOfMemoryError: too large", ms=None, **{"pass": "forward"})
    cases = [bench_row(), peer, bench_row(how="CUDA graph"), refused]
    terminal.show("refinement", {"cases": cases, "growth": [], "skipped": {}})


def changes():
    terminal.show_changes([report.Change(bench_row(), 12.0, 1.1, True)])


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("command", [planarity, check, bench, changes])
def test_no_command_cuts_a_name(capsys, shown, command, columns):
    """All words below the headings of a wide table are in the narrow one."""
    command()
    _, rule, wide = capsys.readouterr().out.rpartition("─")
    assert rule
    out = shown(columns, command)
    assert "…" not in out
    assert {word for word in words(wide) if word[:1].isalpha()} <= words(out)


@pytest.mark.parametrize("columns", [60, 99])
@pytest.mark.parametrize("has_rich", [True, False])
def test_a_pipe_has_the_width_of_columns(capsys, monkeypatch, has_rich, columns):
    if has_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("COLUMNS", str(columns))
    tables.show("Errors", HEADINGS, ROWS, right=3)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "structured_scatter_add" in out


@pytest.mark.parametrize(
    ("command", "option", "title"),
    [("planarity", "--flatten x.pdb", "flattening"), ("density", "--out x.map", "placing atoms")],
)
def test_a_bar_shows_on_a_terminal_and_leaves_stdout_alone(
    run, folder, monkeypatch, command, option, title
):
    for package in ("gemmi", "rich", "scipy"):
        pytest.importorskip(package)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model = files("fusedops") / "data/1ubi.pdb"
    code, out, err = run(command, model, *option.split(), "--json")
    assert code == 0
    assert title in err
    json.loads(out)


@pytest.mark.parametrize("command", ["planarity", "info", "density"])
def test_a_text_breaks_between_words(run, folder, monkeypatch, command):
    pytest.importorskip("gemmi")
    model = files("fusedops") / "data/1ubi.pdb"
    args = {"planarity": [model], "info": [], "density": [model, "--out", "x.map"]}[command]
    _, wide, _ = run(command, *args)
    monkeypatch.setenv("COLUMNS", "20")
    _, out, _ = run(command, *args)
    assert max(map(len, wide.splitlines())) > 50
    lines = [line for line in out.splitlines() if len(line) > 20]
    assert all(len(line.split()) == 1 for line in lines)  # a module, or the path of a folder
    # Times differ, and a narrow table has no line of headings.
    told = " ".join(wide.splitlines()[-6:])
    names = {word for word in words(told) if word.isalpha() or word.startswith("fusedops.")}
    assert names <= words(out)


@pytest.mark.parametrize("command", ["bench", "check", "demo", "density", "planarity"])
def test_help_is_whole(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "(default: None)" not in out
    assert not re.search(r"\w-\n", out)


def test_a_pipe_has_no_width(capsys, monkeypatch):
    pytest.importorskip("rich")
    long = "a reason " * 30
    tables.show("Errors", ["op", "why"], [(["x", long], None)])
    assert long.strip() in capsys.readouterr().out
