"""Bad inputs to every command end in one line that names the cause, and change no file."""

import errno
import gzip
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import benches  # noqa: F401
from bench import report
from fusedops import cli, maps
from fusedops._frame import registry
from fusedops._host import memory, threads
from fusedops.structure import read_structure

gemmi = pytest.importorskip("gemmi")
for package in ("matplotlib", "rich", "scipy"):
    pytest.importorskip(package)

UBIQUITIN = (files("fusedops") / "data/1ubi.pdb").read_bytes()
WITHOUT_SCALE = re.sub(rb"(?m)^SCALE.*\n", b"", UBIQUITIN)
ATOM = b"ATOM      1  N   MET A   1      27.343  24.294   2.683  1.00 14.70           N"
MMCIF = b"""data_x
_cell.length_a 20
_cell.length_b 30
_cell.length_c 40
_cell.angle_alpha 90
_cell.angle_beta 90
_cell.angle_gamma 90
loop_
_atom_site.id
_atom_site.type_symbol
_atom_site.label_atom_id
_atom_site.label_alt_id
_atom_site.label_comp_id
_atom_site.label_asym_id
_atom_site.label_seq_id
_atom_site.Cartn_x
_atom_site.Cartn_y
_atom_site.Cartn_z
_atom_site.occupancy
_atom_site.B_iso_or_equiv
1 C CA . ALA A 1 1.0 2.0 3.0 1.0 20.0
2 C CB . ALA A 1 2.0 2.0 3.5 1.0 20.0
"""


def crystal(numbers, group="P 1", source=WITHOUT_SCALE):
    """Return ubiquitin with other numbers in its CRYST1."""
    columns = (9, 9, 9, 7, 7, 7)
    texts = zip(numbers.split(), columns, strict=True)
    cell = "".join(f"{text:>{width}}" for text, width in texts)
    return re.sub(rb"(?m)^CRYST1.*", f"CRYST1{cell} {group:11s}   1".encode(), source)


def atom(column, text):
    """Return ubiquitin with another text in its first atom."""
    assert UBIQUITIN.count(ATOM) == 1
    line = ATOM[:column] + text.encode() + ATOM[column + len(text) :]
    return UBIQUITIN.replace(ATOM, line)


def scaled(a="0.019670", shift="0.00000"):
    """Return ubiquitin with another SCALE1."""
    line = b"SCALE1      0.019670  0.000000  0.000000        0.00000"
    assert UBIQUITIN.count(line) == 1
    return UBIQUITIN.replace(
        line, f"SCALE1    {a:>10}  0.000000  0.000000     {shift:>10}".encode()
    )


# Files that no command can read, with the messages.
UNREADABLE = {
    "empty.pdb": (b"", "the file is empty"),
    "spaces.cif": (b" \n\n", "the file is empty"),
    "empty.cif.gz": (gzip.compress(b""), "the file is empty"),
    "page.cif": (b"<!DOCTYPE html>\n<html></html>", "neither PDB nor mmCIF"),
    "atom.pdb": (b"ATOM  " + bytes(range(256)) * 20, "line 1 holds no coordinates"),
    "plain.pdb.gz": (b"not gzipped", "neither PDB nor mmCIF"),
    "cut.pdb.gz": (gzip.compress(UBIQUITIN)[:3000], "broken gzip data"),
    "hole.pdb.gz": (gzip.compress(UBIQUITIN).replace(b"x", b""), "broken gzip data"),
    "sum.pdb.gz": (gzip.compress(b"ATOM" * 99)[:-9] + b"x" * 9, "broken gzip data"),
    "more.pdb.gz": (gzip.compress(UBIQUITIN) + b"garbage", "broken gzip data"),
    "twice.pdb.gz": (gzip.compress(gzip.compress(UBIQUITIN)), "neither PDB nor mmCIF"),
    "utf16.pdb": (UBIQUITIN.decode().encode("utf-16"), "neither PDB nor mmCIF"),
    "header.pdb": (b"HEADER    NOTHING\n", "it holds no atoms"),
    "model.pdb": (b"MODEL        1\nENDMDL\n" + UBIQUITIN, "it holds no atoms"),
    "nan.pdb": (atom(30, "     nan"), "the coordinates of A/MET 1 N are not finite numbers"),
    "far.pdb": (
        atom(30, "   1e300"),
        "the coordinates of A/MET 1 N are [1e+300, 24.294, 2.683]; they should be within 1,000,000",
    ),
    "inf.pdb": (atom(30, "     inf"), "the coordinates of A/MET 1 N are not finite numbers"),
    "blank.pdb": (atom(30, " " * 8), "line 270 holds no coordinates"),
    "letters.pdb": (atom(30, "     abc"), "line 270 holds no coordinates"),
    "cut.pdb": (UBIQUITIN[: UBIQUITIN.index(ATOM) + 40], "line 270 holds no coordinates"),
    "zero_angle.pdb": (crystal("50 50 50 0 90 90"), "Impossible angle"),
    "data.cif": (b"data_\n", "it holds no atoms"),
    **{
        f"no_{name}.cif": (
            MMCIF.replace(f"_atom_site.{name}\n".encode(), b"_atom_site.other\n"),
            f"its atoms lack _atom_site.{name}",
        )
        for name in ("id", "type_symbol", "label_alt_id", "label_asym_id", "Cartn_z")
    },
    "cut.cif": (MMCIF[:-9], "Wrong number of values in loop"),
    "open.cif": (MMCIF[:30], "mmCIF: line 3: parse error"),
    "number.cif": (MMCIF.replace(b"A 1 1.0", b"A one 1.0"), "not an integer"),
    "unknown.cif": (MMCIF.replace(b"2.0 2.0 3.5", b"? 2.0 3.5"), "of A/ALA 1 CB are not finite"),
    "far.cif": (MMCIF.replace(b"2.0 3.5", b"2e7 3.5"), "A/ALA 1 CB are [2.0, 20000000.0, 3.5]"),
}

# Files good for planes, of which no density can be calculated.
NO_DENSITY = {
    "angles.pdb": (crystal("50 50 50 179 179 179"), "(CRYST1) are 179, 179, 179; they should be"),
    "flat.pdb": (crystal("50 50 50 60 60 120"), "(CRYST1) are 60, 60, 120; they should be"),
    "nan.pdb": (crystal("nan 50 50 90 90 90"), "a of the unit cell (CRYST1) is 'nan'; it should"),
    "negative.pdb": (crystal("50 50 -50 90 90 90"), "c of the unit cell (CRYST1) is '-50'"),
    "tiny.pdb": (crystal("0.001 50 50 90 90 90"), "a of the unit cell (CRYST1) is '0.001'"),
    "gamma.pdb": (crystal("50 50 50 90 90 0"), "gamma of the unit cell (CRYST1) is '0'"),
    "huge.pdb": (crystal("99999999 5000 5000 90 90 90"), "GB of memory"),
    "cut_cell.pdb": (
        re.sub(rb"(?m)^(CRYST1.{27}).*", rb"\1", UBIQUITIN), "alpha of the unit cell (CRYST1) is ''"
    ),
    "unknown.pdb": (crystal("50 60 70 90 90 90", "P 9 9 9"), "space group 'P 9 9 9' is unknown"),
    "group.pdb": (crystal("50 60 70 90 90 90", "P 4"), "P 4 doesn't go with the unit cell 50, 60"),
    "stale.pdb": (
        crystal("60.84 42.77 28.95 90 90 90", "P 21 21 21", UBIQUITIN),
        "the SCALE records disagree with CRYST1: they are those of edges of 50.8388, 42.7698, "
        "28.9503 Å, and the unit cell has 60.84, 42.77, 28.95 Å",
    ),
    "flat_scale.pdb": (scaled("0.000000"), "the SCALE records disagree with CRYST1"),
    "shifted.pdb": (scaled(shift="0.25000"), "the SCALE records turn or shift the unit cell"),
    "unknown_edge.cif": (
        MMCIF.replace(b"_a 20", b"_a ?"), "a of the unit cell (_cell) is ''; it should be a number"
    ),
    "blank_occupancy.pdb": (atom(54, " " * 6), "line 270 has '      ' for occupancy"),
    "nan_occupancy.pdb": (atom(54, "   nan"), "the occupancy of A/MET 1 N is nan; it should"),
    "huge_occupancy.cif": (MMCIF.replace(b"3.0 1.0", b"3.0 1e300"), "A/ALA 1 CA is inf"),
    "large_occupancy.cif": (MMCIF.replace(b"3.0 1.0", b"3.0 3e38"), "too large for 32 bits"),
    "no_b.pdb": (atom(60, "   abc"), "line 270 has '   abc' for B"),
    "negative_b.pdb": (atom(60, "-99999"), "its atoms reach 142.5 Å; these voxels allow"),
    "element.pdb": (atom(76, " X"), "A/MET 1 N is of an unknown element"),
}  # fmt: skip


@pytest.fixture
def x(folder):
    """A folder with a model, x.pdb."""
    (folder / "x.pdb").write_bytes(UBIQUITIN)
    return folder


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files(refused, folder, name):
    content, reason = UNREADABLE[name]
    (folder / name).write_bytes(content)
    for command in (f"planarity {name} --flatten out.cif", f"density {name} --out out.map"):
        assert refused(command, reason, f"{name}: ") == ""


@pytest.mark.parametrize("name", NO_DENSITY)
def test_files_without_a_density(refused, folder, name):
    content, reason = NO_DENSITY[name]
    (folder / name).write_bytes(content)
    refused(f"density {name} --out out.map --picture x.png", reason)
    assert cli.main(["planarity", name, "--flatten", "out.cif"]) == 0
    # A command that uses no cell accepts a bad one.
    if "unit cell" in reason and name.endswith(".pdb"):
        args = ["--spacing", "2", "--margin", "9"]
        assert cli.main(["density", name, "--out", "out.map", *args]) == 0


def table(prefix, text):
    """Return commands, which begin alike, with the message of each, from lines with a bar."""
    lines = (line.partition(" | ") for line in text.strip().splitlines())
    return [(f"{prefix} {options.strip()}", reason.strip()) for options, _, reason in lines]


LONG = "x" * 300
DENSITY = """
--spacing 1e9 | --spacing: '1e9' should be a number of 0.01 to 100, in Å
--spacing abc | --spacing: 'abc' should be a number of 0.01 to 100, in Å
--spacing nan | --spacing: 'nan' should be
--spacing 99 --radius 7 | spacing 99: atoms reach 7 Å; it should be at most 2.33
--spacing 2.4 --blur 99 | it should be at most 1.75, a third of that, or
--spacing 0.01 | GB of memory
--spacing 0.01 --margin 1e5 | GB of memory
--blur 1e6 | x.pdb: its atoms reach 450.25 Å; these voxels allow at most 121
--blur 1e300 | --blur: '1e300' should be a number of 0 to 1,000,000, in Å²
--blur 0 | A/ARG 42 C has no density: its B is 0.0 Å²
--radius 1e300 | --radius: '1e300' should be a number of 0.1 to 100, in Å
--radius 3 --n-sigma 4 | --n-sigma: not allowed with argument --radius
--n-sigma many | --n-sigma: 'many' should be a number of 0.1 to 100
--margin -1 | --margin: '-1' should be a number of 0 to 1,000,000, in Å
--margin 2 | --margin 2: atoms reach
--margin 9 --like x.map | an extent of its own
--backend abacus | --backend: invalid choice: 'abacus'
--colour red | unrecognized arguments: --colour red
--resolution 0.2 | GB of memory
--spacing 1 --like x.map | --like: not allowed with argument --spacing
--like none.map | none.map: No such file or directory
--like x.pdb | x.pdb: Not a CCP4 map
--mtz x.hkl | x.hkl: name it .mtz
--mtz x.mtz --resolution 1 --spacing 1 | hold no reflections beyond
--mtz x.mtz --spacing 0.5 --resolution 0.8 | the resolution is 0.8 and should be at least that
--mtz x.mtz --blur 200 | leaves too little of the reflections at 0.9
--max-voxels 1000 | --max-voxels 1000: the map has 583200, which need 0.0 GB
--resolution 1 --max-voxels 9 | it should be larger, or the spacing
--out map.png | map.png: name it .ccp4, .map or .mrc
--out none/x.map | none/x.map: there is no folder
--out taken.map | taken.map: is a folder
--out LONG.map | File name too long
--picture x.abc | x.abc: Matplotlib can't draw
--picture x.png --slice z=28.8A | the map holds z of 0 to 28.47 Å
--picture x.png --slice z=-1A | the map holds z of 0 to 28.47 Å
--like= | argument --like: it is empty
--slice z=0.5 | --slice: it needs --picture
--slice w=0.5 | --slice: 'w=0.5' should be x, y or z, an equals sign, and
--slice z=nan | --slice: 'z=nan' should be x, y or z, an equals sign, and
--slice z | --slice: 'z' should be x, y or z, an equals sign, and
"""
PLANARITY = """
--top 1.5 | --top: '1.5' should be a whole number of at least 1
--sigma 0 | --sigma: '0' should be a number of 0.0001 to 100, in Å
--restraints | --restraints: expected one argument
--restraints none.cif | none.cif: No such file or directory
--restraints x.pdb | x.pdb: can't be read as restraints: line 1
--monomers none | none: there is no such folder; it should
--tether -1 | --tether: '-1' should be
--tether inf | --tether: 'inf' should be a number of at least 0, in 1/Å²
--fit best | --fit: invalid choice: 'best'
--backend torch | --backend: invalid choice: 'torch'
--json --csv | not allowed with argument
--monomers= | argument --monomers: it is empty
--flatten none/x.pdb | none/x.pdb: there is no folder
--flatten LONG.pdb | File name too long
"""
OTHERS = """
 | required: COMMAND
nonsense | invalid choice: 'nonsense'
planarity | required: FILE
density x.pdb | required: --out
planarity none.cif --json | none.cif: No such file or directory
density none/x.pdb --out x.map | none/x.pdb: No such file or directory
planarity taken.pdb | taken.pdb: Is a directory
planarity /dev/zero | /dev/zero: is a device
--print-completion fish | invalid choice: 'fish'
info --jsom | unrecognized arguments: --jsom
demo --picture x.abc | x.abc: Matplotlib can't draw into such a file
demo --picture none/x.png | none/x.png: there is no folder
check --backend abacus | --backend: invalid choice: 'abacus'
bench --op abc | --op abc: it should be one of planarity, planarity_nll
bench --step refine | --step refine: it should be one of refinement
bench --json taken.pdb | taken.pdb: is a folder
bench --json taken.pdb/text/x.json | taken.pdb/text: File exists
bench --json /dev/full | /dev/full: is no regular file
bench --json text.json | text.json: no JSON
bench --from list.json | list.json: no result of fusedops bench
bench --from ops.json | ops.json: no result of fusedops bench
bench --from old.json | old.json: no result of fusedops bench, schema 4
bench --from none.json | none.json: No such file or directory
bench --from good.json --compare taken.pdb | taken.pdb: Is a directory
bench --from good.json --json x.json | --json x.json: --from measures
bench --from good.json --plot text.json | text.json: File exists
"""
REFUSED = [
    *table("density x.pdb --out out.map", DENSITY),
    *table("planarity x.pdb", PLANARITY),
    *table("", OTHERS),
]


@pytest.mark.parametrize(("command", "reason"), REFUSED, ids=[words for words, _ in REFUSED])
def test_arguments(refused, x, monkeypatch, command, reason):
    monkeypatch.setattr(maps, "available_memory", lambda: 10**9)
    # All but names that are too long for the system is told before any work.
    if "LONG" not in command:
        monkeypatch.setattr(maps, "density_map", None)
        monkeypatch.setattr(cli.planarity, "planar_groups", None)
    if command.endswith(("--out none/x.map", "--picture x.abc")):
        monkeypatch.setattr(cli.common, "read_model", None)
    for name in ("taken.pdb", "taken.map"):
        (x / name).mkdir()
    (x / "taken.pdb/text").write_text("x")
    (x / "text.json").write_text("nothing")
    (x / "list.json").write_text("[]")
    good = report.new("cpu")
    for name, found in {"ops": {"ops": []}, "old": {"schema": 0}, "good": {}}.items():
        (x / f"{name}.json").write_text(json.dumps(good | found))
    refused(command.replace("LONG", LONG), reason)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("planarity", "FILE"),
        ("planarity x.pdb --flatten", "--flatten"),
        ("density x.pdb --out", "--out"),
        ("density x.pdb --out out.map --mtz", "--mtz"),
        ("demo --picture", "--picture"),
    ],
)
def test_an_empty_variable_of_a_script(run, x, command, name):
    code, out, err = run(*command.split(), "")
    assert (code, out) == (2, "")
    assert f"argument {name}: it is empty" in err


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        ("planarity x.pdb", "FUSEDOPS_BACKEND", "abacus"),
        ("density x.pdb --out x.map", "FUSEDOPS_BACKEND", "abacus"),
        ("check", "FUSEDOPS_BACKEND", "abacus"),
        ("planarity x.pdb", "FUSEDOPS_NUM_THREADS", "two"),
        ("info", "FUSEDOPS_NUM_THREADS", "0"),
        ("info", "FUSEDOPS_POOL_BYTES", "1e9"),
        ("planarity x.pdb", "CLIBD_MON", "/no/such"),
    ],
)
def test_the_environment(refused, x, monkeypatch, command, name, value):
    # The environment is read once a process, so this process must read it again.
    for module, reads in ((registry, "_from_environment"), (threads, "_own"), (memory, "limit")):
        monkeypatch.setattr(module, reads, getattr(module, reads).__wrapped__)
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.setenv(name, value)
    refused(command, value)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("planarity x.pdb", "gemmi"),
        ("planarity x.pdb --flatten y.pdb", "scipy"),
        ("density x.pdb --out x.map --picture x.png", "gemmi and matplotlib"),
        ("--print-completion bash", "shtab"),
    ],
)
def test_missing_packages(refused, monkeypatch, command, missing):
    packages = missing.split(" and ")
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    are = "are" if len(packages) > 1 else "is"
    refused(command, f'{missing} {are} not installed: pip install "fusedops[cli]"')


class TestTheInputStays:
    @pytest.fixture(autouse=True)
    def _names(self, x):
        (x / "soft.pdb").symlink_to("x.pdb")
        os.link("x.pdb", "hard.pdb")
        (x / "folder").mkdir()

    @pytest.mark.parametrize("source", ["x.pdb", "soft.pdb"])
    @pytest.mark.parametrize("out", ["x.pdb", "./folder/../x.pdb", "soft.pdb", "hard.pdb"])
    def test_flatten(self, refused, source, out):
        told = f"--flatten {out}: it is the input {source}; it should be another file, or add "
        refused(f"planarity {source} --flatten {out}", f"{told}--overwrite")

    @pytest.mark.parametrize("out", ["x.pdb", "soft.pdb", "hard.pdb"])
    def test_flatten_when_told_to(self, folder, out):
        assert cli.main(["planarity", "x.pdb", "--flatten", out, "--overwrite"]) == 0
        assert (folder / out).read_bytes() != UBIQUITIN
        assert read_structure(out).xyz.shape == (683, 3)

    @pytest.mark.parametrize(
        ("option", "name"), [("--out", "x.map"), ("--picture", "x.png"), ("--mtz", "x.mtz")]
    )
    def test_density(self, refused, folder, option, name):
        (folder / name).symlink_to("x.pdb")
        told = f"{option} {name}: it is the input x.pdb; it should be another file"
        refused(f"density x.pdb --out y.map {option} {name}", told)

    def test_another_file_is_replaced(self, folder):
        (folder / "old.pdb").write_text("old")
        assert cli.main(["planarity", "x.pdb", "--flatten", "old.pdb"]) == 0
        assert read_structure("old.pdb").xyz.shape == (683, 3)
        assert (folder / "x.pdb").read_bytes() == UBIQUITIN


class TestOutputs:
    """An output that can't be written is reported before any work, or leaves old files alone."""

    pytestmark = pytest.mark.usefixtures("x")

    @pytest.mark.parametrize("name", ["pipe", "socket"])
    def test_only_regular_files_are_replaced(self, refused, folder, name):
        target = folder / f"{name}.pdb"
        if name == "pipe":
            os.mkfifo(target)
        else:
            target.symlink_to("/dev/full")
        refused(f"planarity x.pdb --flatten {name}.pdb", f"{name}.pdb: is no regular file")
        assert not Path("/dev/full").is_file()

    def test_a_read_only_file(self, refused, folder, monkeypatch):
        (folder / "old.pdb").write_text("old")
        allowed = os.access
        monkeypatch.setattr(
            os,
            "access",
            lambda path, mode: not str(path).endswith("old.pdb") and allowed(path, mode),
        )
        refused("planarity x.pdb --flatten old.pdb", "old.pdb: no permission")

    @pytest.mark.parametrize(
        ("args", "old"),
        [
            ("planarity x.pdb --flatten old.pdb", "old.pdb"),
            ("density x.pdb --spacing 2 --out old.map", "old.map"),
        ],
    )
    def test_a_full_disk(self, folder, args, old):
        (folder / old).write_text("old")
        # A limit on the size of files stands in for a full disk.
        script = (
            "import resource, sys; from fusedops import cli; "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); sys.exit(cli.main())"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, *args.split()], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert old in done.stderr
        assert (folder / old).read_text() == "old"
        assert {path.name for path in folder.iterdir()} == {"x.pdb", old}

    def test_a_full_disk_leaves_an_old_picture(self, folder, monkeypatch):
        (folder / "old.png").write_text("old")

        def full(self, path, **options):
            Path(path).write_text("half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
        monkeypatch.setattr("fusedops.cli.demo.calls", dict)
        monkeypatch.setattr("fusedops.cli.demo.pictures", lambda: {"nothing": lambda panel: None})
        args = ["density", "x.pdb", "--spacing", "2", "--out", "x.map"]
        for command in (["demo"], args):
            assert cli.main([*command, "--picture", "old.png"]) == 2
        assert {path.name for path in folder.iterdir()} == {"x.pdb", "x.map", "old.png"}
        assert (folder / "old.png").read_text() == "old"

    def test_a_full_disk_leaves_the_results_of_an_earlier_bench(self, folder, monkeypatch):
        path = folder / "old.json"
        path.write_text("old")

        def full(self, text):
            self.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(ValueError, match=r"old\.json: No space left"):
            report.save(path, report.new("cpu"))
        assert [p.read_bytes() for p in folder.glob("old*")] == [b"old"]

    def test_text_that_is_not_utf8_comes_back(self, folder, refused):
        text = MMCIF.replace(b"data_x\n", b"data_x\n_citation.title 'caf\xe9'\n")
        (folder / "x.cif").write_bytes(text)
        structure = read_structure("x.cif")
        structure.write("moved.cif", structure.xyz + 1)
        assert b"'caf\xe9'" in (folder / "moved.cif").read_bytes()
        np.testing.assert_allclose(read_structure("moved.cif").xyz, structure.xyz + 1)
        (folder / "y.pdb").write_bytes(b"TITLE     CAF\xe9\n" + UBIQUITIN)
        reason = "out.cif: can't be written as mmCIF: y.pdb holds the byte 0xe9"
        refused("planarity y.pdb --flatten out.cif", reason)


class TestStdout:
    pytestmark = pytest.mark.usefixtures("x")

    def run(self, command, redirection, **environment):
        done = subprocess.run(
            ["bash", "-c", f'"$0" -m fusedops {command} {redirection}', sys.executable],
            capture_output=True,
            env=os.environ | environment,
        )
        return done.returncode, done.stdout, done.stderr.decode()

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
    # Every command and every writer, with and without a buffer; each runs in a process.
    @pytest.mark.parametrize(
        ("command", "unbuffered"),
        [
            ("info", "1"),
            ("planarity x.pdb --csv", "1"),
            ("density x.pdb --spacing 2 --out x.map --json", ""),
            ("--help", "1"),
        ],
    )
    def test_a_full_disk(self, command, unbuffered):
        code, _, err = self.run(command, "> /dev/full", PYTHONUNBUFFERED=unbuffered)
        lines = [line for line in err.splitlines() if not line.startswith("NLL")]
        assert (code, lines[-1:]) == (2, ["fusedops: stdout: No space left on device"])
        assert "Traceback" not in err
        assert len(lines) <= (3 if "--csv" in command else 1)

    @pytest.mark.parametrize("command", ["info", "planarity x.pdb --flatten y.pdb --json"])
    def test_one_that_is_closed(self, folder, command):
        assert self.run(command, ">&-") == (2, b"", "fusedops: stdout: Bad file descriptor\n")
        assert os.listdir(folder) == ["x.pdb"]

    def test_a_closed_stderr(self, folder):
        assert self.run("planarity x.pdb --flatten y.pdb", "2>&-")[0] == 0
        assert len(read_structure("y.pdb").xyz) == 683
        assert self.run("planarity none.pdb", "2>&-") == (2, b"", "")

    @pytest.mark.parametrize(
        ("command", "unbuffered"),
        [
            ("info", "1"),
            ("planarity x.pdb --csv 2> /dev/null", ""),
        ],
    )
    def test_a_reader_that_has_seen_enough(self, command, unbuffered):
        pipe = "| head -c 1; exit ${PIPESTATUS[0]}"
        code, out, err = self.run(command, pipe, PYTHONUNBUFFERED=unbuffered)
        assert (code, len(out), err) == (0, 1, "")

    @pytest.mark.parametrize(
        ("platform", "number", "refused"),
        [
            ("linux", errno.EPIPE, False),
            ("linux", errno.EINVAL, True),
            ("win32", errno.EINVAL, False),
            ("win32", errno.ENOSPC, True),
        ],
    )
    def test_a_closed_pipe_has_another_number_on_windows(
        self, folder, monkeypatch, platform, number, refused
    ):
        def write(text):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(sys, "platform", platform)
        with open(folder / "out", "w") as file:
            stdout = cli._Stdout(SimpleNamespace(write=write, fileno=file.fileno))
            with pytest.raises(cli.CommandError) if refused else nullcontext():
                stdout.write("x")

    def test_a_reader_that_has_seen_enough_still_gets_the_map(self, folder):
        done = self.run("density x.pdb --spacing 1 --out x.map", "| true; exit ${PIPESTATUS[0]}")
        assert done == (0, b"", "")
        assert gemmi.read_ccp4_map("x.map").grid.point_count > 10_000

    def test_names_that_are_not_utf8(self, folder):
        assert self.run(r"planarity x.pdb --flatten $'n\xe9.pdb'", "> out")[::2] == (0, "")
        assert os.fsdecode(b"n\xe9.pdb") in os.listdir(folder)
        out = self.run(r"planarity $'n\xe9.pdb' --json", "")
        assert json.loads(out[1])["file"] == os.fsdecode(b"n\xe9.pdb")
        out = self.run(r"planarity $'m\xe9.pdb'", "")
        assert out[2] == "fusedops: m\\udce9.pdb: No such file or directory\n"
        out = self.run(r"density x.pdb --out $'m\xe9.map'", "")
        assert out == (2, b"", "fusedops: m\\udce9.map: gemmi takes names in UTF-8\n")

    def test_an_encoding_without_an_angstrom(self):
        code, out, err = self.run("planarity x.pdb", "", PYTHONIOENCODING="ascii")
        assert (code, err) == (0, "")
        assert rb"rms \xc5" in out

    def test_a_defect_of_ours_shows_its_traceback(self, monkeypatch):
        def defect(args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(cli.info, "run", defect)
        with pytest.raises(OSError, match="No space left"):
            cli.main(["info"])
