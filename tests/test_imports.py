"""Imports between rooms: each imports only the rooms below it, and no import closes a circle."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from processes import python

ROOT = Path(__file__).parents[1]
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for package in ("fusedops", "cpukern", "gpukern", "bench")
    for file in sorted((ROOT / package).rglob("*.py"))
}
#: The rooms of files at the top of fusedops; another one there is the definition of some ops.
ROOMS = {
    "": "package",
    **dict.fromkeys(("_info", "_swaps", "_version"), "package"),
    "__main__": "cli",
    **dict.fromkeys(("distributed", "mapfiles", "maps", "nn", "pairs"), "library"),
    **dict.fromkeys(("flatness", "restraints", "samples", "scaling", "structure"), "library"),
    "testing": "library",
    **dict.fromkeys(("_catalogue", "_pictures"), "library"),
}
#: The rooms that each may import, besides itself.
BELOW = {
    "_host": set(),
    "_frame": {"_host"},
    "definitions": {"_host", "_frame"},
    "cpukern": {"_host", "_frame", "definitions"},
    "gpukern": {"_frame", "definitions"},
    "package": {"_host", "_frame", "definitions", "cpukern"},
    "library": {"_host", "_frame", "definitions", "package"},
    "compat": {"_frame", "definitions", "package", "library"},
    "cli": {"_frame", "definitions", "package", "library"},
    "bench": {"_host", "_frame", "definitions", "package", "library", "compat", "cli"},
}


def room(module):
    package, _, rest = module.partition(".")
    if package != "fusedops":
        return package
    if rest.endswith(".examples"):
        return "library"
    first = rest.partition(".")[0]
    return ROOMS.get(first) or (first if first in BELOW else "definitions")


def imports(node):
    """Yield our modules that a node imports, in functions and for types too."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0
        whole = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in FILES else node.module for name in whole]
    else:
        names = []
        for child in ast.iter_child_nodes(node):
            yield from imports(child)
    yield from (name for name in names if name in FILES)


@pytest.fixture(scope="module")
def imported():
    """Return the imports of every module."""
    return {
        module: set(imports(ast.parse(file.read_text(encoding="utf-8"))))
        for module, file in FILES.items()
    }


def test_a_room_imports_only_rooms_below_it(imported):
    TopologicalSorter(BELOW).prepare()  # raises CycleError
    assert {room(module) for module in FILES} == set(BELOW)
    up = {
        (module, other)
        for module, others in imported.items()
        for other in others
        if room(other) not in {room(module), *BELOW[room(module)]}
    }
    assert not up


def test_modules_are_in_no_circle(imported):
    TopologicalSorter(imported).prepare()  # raises CycleError


def test_modules_for_torch_say_that_they_need_it():
    """Without torch an import of one ends in an error with the command that installs it."""
    of_torch = [
        module
        for module, file in FILES.items()
        if room(module) in ("library", "compat")
        and re.search("^(import|from) torch", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert {"fusedops.nn", "fusedops.pairs", "fusedops.distributed.graphs"} < set(of_torch)
    code = f"""
import importlib, sys
sys.modules["torch"] = None
for name in {of_torch!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert 'torch is not installed: pip install "fusedops[torch]"' in str(error), name
    else:
        raise AssertionError(name)
"""
    python(code)


@pytest.mark.parametrize("module", ["fusedops.testing", "fusedops.cli"])
def test_the_catalogue_needs_no_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    python(code)


def test_a_call_of_tensors_leaves_torchs_compiler_alone():
    """Loading the compiler takes ten times as long as all else in a process's first call."""
    pytest.importorskip("torch")
    code = (
        "import sys, torch, fusedops\n"
        "x = torch.ones(1, 4, 4, requires_grad=True)\n"
        "fusedops.dynamic_conv(x, torch.ones(1, 4, 4, 2), backend='torch').sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    python(code)
