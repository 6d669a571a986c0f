"""`fusedops --print-completion`: shells complete commands, options and files."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

import pytest

from fusedops.cli import completion

needs_shtab = pytest.mark.skipif(
    not importlib.util.find_spec("shtab"), reason="shtab is not installed"
)


@pytest.fixture
def script(run):
    """Return a function that prints the script for a shell."""

    def script(shell):
        code, out, err = run("--print-completion", shell)
        assert (code, err) == (0, "")
        return out

    return script


@needs_shtab
@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_has_commands_and_options(script, shell):
    text = script(shell)
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
def test_bash_completes(script, tmp_path, line, found):
    (tmp_path / "model.pdb").touch()
    (tmp_path / "monomers").mkdir()
    words = " ".join(["fusedops", *line])
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _shtab_fusedops; echo ${{COMPREPLY[@]}}"
    told = subprocess.run(
        ["bash", "-c", f"{script('bash')}\n{ask}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted({word.rstrip("/") for word in told.stdout.split()}) == found
