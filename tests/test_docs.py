"""Examples of docstrings, README.md and docs/*.md run, and docstrings have all their sections."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shutil
from pathlib import Path
from typing import get_origin

import pytest

import fusedops
from cpukern import isa
from fusedops._catalogue import families
from fusedops._frame.packed import Packed
from places import HAS_TORCH

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def modules_of(package, path):
    return [
        f"{package}.{module.name}"
        for module in pkgutil.iter_modules([str(path)])
        if not module.name.startswith("__")
    ]


HERE = Path(fusedops.__file__).parent
#: Every package but `fusedops._frame`, with all of its modules.
PACKAGES = {
    f"fusedops.{name}": modules_of(f"fusedops.{name}", HERE / name)
    for name in ("cli", "compat", "distributed", "_host")
} | {
    each.__package__: modules_of(each.__package__, Path(each.__file__).parent)
    for each in families()
}
COMPAT = [name for name in PACKAGES["fusedops.compat"] if not name.startswith("fusedops.compat._")]


MODULES = [
    "fusedops",
    *modules_of("fusedops", HERE),
    *(module for modules in PACKAGES.values() for module in modules),
]
NEED_TORCH = (
    *("fusedops.distributed", "fusedops.nn", "fusedops.pairs", "fusedops._frame.bridge"),
    *PACKAGES["fusedops.compat"],
    *PACKAGES["fusedops.distributed"],
)
#: What every block of a page needs.
REQUIRED = {
    "tutorial-dynamics.md": ("torch", "ase"),
    "tutorial-mamba.md": ("torch",),
    "tutorial-pair.md": ("torch",),
    "tutorial-refinement.md": ("scipy",),
}
# `fusedops` exports the public functions of all other modules.
PUBLIC = [
    "fusedops",
    *COMPAT,
    "fusedops.crystal",
    "fusedops.density",
    "fusedops.distributed",
    "fusedops.flatness",
    "fusedops.mapfiles",
    "fusedops.maps",
    "fusedops.nn",
    "fusedops.restraints",
    "fusedops.samples",
    "fusedops.scaling",
    "fusedops.structure",
    "fusedops.testing",
    "fusedops.wigner",
]


def imported(name):
    if name in NEED_TORCH:
        pytest.importorskip("torch")
    return importlib.import_module(name)


def own(module):
    """Yield a module's functions and classes, and the functions that its ops are made of."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) == module.__name__ and (
            inspect.isclass(value) or inspect.isfunction(value)
        ):
            yield name, inspect.unwrap(value)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = imported(name)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for what, value in own(module):
        for found in finder.find(value, f"{name}.{what}", module):
            if HAS_TORCH or "torch" not in "".join(line.source for line in found.examples):
                runner.run(found)
    fusedops.set_num_threads(None)
    assert runner.summarize(verbose=False).failed == 0


def test_an_op_has_examples_that_run():
    """An op's examples are its own, not the examples of the function that serves all ops."""
    (example,) = doctest.DocTestFinder().find(
        dict(own(imported("fusedops.planarity.op")))["planarity_nll"]
    )
    assert len(example.examples) > 3


def public():
    yield "fusedops.Planes.to", Packed.to
    for module in PUBLIC:
        if module in NEED_TORCH and not HAS_TORCH:
            continue
        found = importlib.import_module(module)
        for name in found.__all__:
            value = getattr(found, name)
            # A type alias has no docstring.
            if callable(value) and get_origin(value) is None:
                yield f"{module}.{name}", value
            # Methods of packed arguments are for kernels, except `to`.
            if inspect.isclass(value) and not issubclass(value, Packed):
                for method, function in vars(value).items():
                    function = getattr(function, "__func__", function)
                    hidden = method.startswith("_") or method == "extra_repr"
                    if inspect.isfunction(function) and not hidden:
                        yield f"{module}.{name}.{method}", function


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in public()])
def test_a_docstring_says_all(value):
    doc = inspect.getdoc(value) or ""
    sections = re.findall(r"^(\w[\w ]+)\n-+$", doc, re.MULTILINE)
    first = doc.split("\n\n")[0]
    assert first.endswith(".")
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    needed = ["Examples"]
    parameters = [] if is_made_here(value) else list(signature(value))
    needed += ["Parameters"] if parameters else []
    needed += ["Attributes"] if inspect.isclass(value) else []
    returns = inspect.isfunction(value) and value.__annotations__.get("return") != "None"
    assert set(needed) <= set(sections)
    assert not returns or {"Returns", "Yields"} & set(sections)
    described = doc[doc.find("Parameters\n") :]
    for parameter in parameters:
        assert re.search(rf"^(\w+, )*\**{parameter}\b", described, re.MULTILINE), parameter
    if hasattr(value, "vjp"):
        assert {"Returns", "Raises", "References"} <= set(sections)
        assert ".. math::" in doc


def signature(value):
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]


def is_made_here(value):
    """Return whether a class is a dataclass, which only functions make for users, or an enum."""
    return hasattr(value, "__dataclass_fields__") or hasattr(value, "__members__")


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not importlib.util.find_spec("gemmi"), reason="gemmi is not installed")
@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_the_examples_of_a_page(page, monkeypatch, tmp_path):
    """Every block continues the page's blocks before it, and blocks of NumPy need none of torch."""
    for package in REQUIRED.get(page.name, ()):
        pytest.importorskip(package)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "docs/data", "data")
    names = {}
    for block in blocks(page, "python"):
        if HAS_TORCH or not re.search("torch|fusedops.nn", block):
            exec(compile(block, page.name, "exec"), names)
    if isa.why_not() is None and importlib.util.find_spec("numba"):
        for shown in blocks(page, "pycon"):
            example = doctest.DocTestParser().get_doctest(shown, names, page.name, None, 0)
            assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_a_result_on_a_page_is_asserted(page):
    for block in blocks(page, "python"):
        *_, last = tree = ast.parse(block).body
        shows = isinstance(last, ast.Expr) and not isinstance(last.value, ast.Call)
        assert not shows or any(isinstance(each, ast.Assert) for each in tree), block


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.md"))
    for module in PUBLIC:
        if f"automodule:: {module}\n" not in text and (HAS_TORCH or module not in NEED_TORCH):
            names = importlib.import_module(module).__all__
            assert set(names) <= set(re.findall(r"\w+", text)), module


def test_every_field_has_examples():
    assert len([page for page in PAGES if blocks(page, "python")]) > 4
