"""Files of the project that name versions and commands agree."""

from __future__ import annotations

import re
from pathlib import Path

import fusedops

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()
WORKFLOWS = "".join(path.read_text() for path in sorted(ROOT.glob(".github/workflows/*.yml")))


def test_versions_of_python_agree():
    (tested,) = re.findall(r"python: \[(.*)\]", WORKFLOWS)
    (built,) = re.findall(r'^build = "(.*)"', PYPROJECT, re.MULTILINE)
    classified = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert re.findall(r"[\d.]+", tested) == classified
    assert built == " ".join(f"cp{version.replace('.', '')}-*" for version in classified)
    assert f'requires-python = ">={classified[0]}"' in PYPROJECT


def test_the_recipe_of_conda_asks_for_the_same():
    recipe = (ROOT / "recipe/recipe.yaml").read_text()
    assert f'version: "{fusedops.__version__}"' in recipe
    asked = re.findall(r"[\w-]+ >=[\d.]+", recipe)
    assert len(asked) == recipe.count(">=") == 6
    for requirement in asked:
        assert re.search(f'"{re.escape(requirement.replace(" ", ""))}[";]', PYPROJECT)


def test_the_makefile_alone_pins_tools():
    pins = re.compile(r"(ruff|mypy|pre-commit)[ \w]*==")
    assert len(pins.findall(MAKEFILE)) == 3
    assert not pins.findall(HOOKS + WORKFLOWS + PYPROJECT)
    entries = re.findall(r"entry: (.*)", HOOKS)
    assert len(entries) == 3
    assert all(entry.startswith(".venv/bin/python -m ") for entry in entries)


def test_every_command_of_the_makefile_has_its_help():
    (commands,) = re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)
    helped = re.findall(r"^([a-z-]+):[^=\n]*## \w", MAKEFILE, re.MULTILINE)
    assert sorted(helped) == sorted(commands.split())


def test_no_plugin_warns_beside_xdist(pytestconfig):
    assert pytestconfig.pluginmanager.is_blocked("benchmark")


def test_no_environment_has_the_name_of_a_package():
    """Tests run in .venv, where Python would take its folder for the package."""
    made = re.findall(r"-m venv \.venv/(\S+)", MAKEFILE)
    assert made
    assert not [name for name in made if name.isidentifier()]


def test_ci_tries_every_command_alone():
    (commands,) = re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)
    (alone,) = re.findall(r"^alone=\((.*)\)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    long_or_empty = {"bench", "clean", "help", "peer-tests", "sanitize", "test"}
    assert set(alone.split()) == set(commands.split()) - long_or_empty
