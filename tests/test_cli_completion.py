"""`fusedops --print-completion`: shells complete commands, options and files."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

import pytest

from fusedops import cli
from fusedops.cli import completion

needs_shtab = pytest.mark.skipif(
    not importlib.util.find_spec("shtab"), reason="shtab is not installed"
)


def script(capsys, shell):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--print-completion", shell])
    assert ended.value.code == 0
    return capsys.readouterr().out


@needs_shtab
@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_has_commands_and_options(capsys, shell):
    text = script(capsys, shell)
    for name in ("planarity", "density", "bench", "--flatten", "--resolution", "numba"):
        assert name.lstrip("-") in text


@needs_shtab
@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["den"], ["density"]),
        (["planarity", "--flat"], ["--flatten"]),
        (["density", "--backend", "num"], ["numba", "numpy"]),
        (["density", "mod"], ["model.pdb"]),
        (["density", "--like", "mod"], ["model.pdb"]),
        (["planarity", "--monomers", "mon"], ["monomers"]),
    ],
    ids=" ".join,
)
def test_bash_completes(capsys, tmp_path, line, found):
    (tmp_path / "model.pdb").touch()
    (tmp_path / "monomers").mkdir()
    words = " ".join(["fusedops", *line])
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _shtab_fusedops; echo ${{COMPREPLY[@]}}"
    told = subprocess.run(
        ["bash", "-c", f"{script(capsys, 'bash')}\n{ask}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted({word.rstrip("/") for word in told.stdout.split()}) == found


def test_without_shtab(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "shtab" else find(name)
    )
    assert cli.main(["--print-completion", "bash"]) == 2
    assert 'pip install "fusedops[cli]"' in capsys.readouterr().err


def test_another_shell(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--print-completion", "fish"])
    assert ended.value.code == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err
