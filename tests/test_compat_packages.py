"""Our functions in the place of packages, from `register` to `unregister`."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys

import pytest

pytest.importorskip("torch")

from fusedops import pairs
from fusedops.compat import causal_conv1d, cuequivariance, fla, swaps


@pytest.fixture(params=[causal_conv1d, cuequivariance, fla], ids=lambda ours: ours.PACKAGE.name)
def ours(request, monkeypatch):
    """A module of ours, in a process that has not imported its package."""
    for name in list(sys.modules):
        if name.partition(".")[0] in request.param.PACKAGE.roots:
            monkeypatch.delitem(sys.modules, name)
    yield request.param
    request.param.unregister()


def imported(package):
    return [name for name in sys.modules if name.partition(".")[0] in package.roots]


@pytest.mark.parametrize("broken", [False, True])
def test_a_package_that_is_not_there(ours, program, broken):
    """Nor one that can't be imported, of which a part may have been."""
    package, (name, *_) = ours.PACKAGE, sorted(ours.PACKAGE.names)
    if broken := broken and package.kept:
        theirs = program(package.name, __path__=[])
    early = program("early", **{name: None})
    ours.register()
    ours.register()
    for place, names in package.functions.items():
        module = importlib.import_module(place)
        assert importlib.util.find_spec(place) is module.__spec__
        parent, _, last = place.rpartition(".")
        # A package may hide a module behind a function of its name.
        if parent and last not in package.functions[parent]:
            assert getattr(sys.modules[parent], last) is module
        for each in names:
            found = getattr(module, each)
            assert found.__wrapped__ is getattr(ours, each)
            assert pickle.loads(pickle.dumps(found)) is found
        for constant, value in package.constants.get(place, {}).items():
            assert getattr(module, constant) is value
    assert getattr(early, name).__wrapped__ is getattr(ours, name)
    with pytest.raises(TypeError):
        getattr(early, name)()
    assert {s.name: s.calls for s in swaps()} == dict.fromkeys(package.names, 0) | {name: 1}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package.name}.modules")
    ours.unregister()
    ours.unregister()
    assert getattr(early, name) is None
    assert imported(package) == [package.name] * broken
    assert not broken or sys.modules[package.name] is theirs


def test_a_package_that_is_imported(ours, program):
    """It is replaced, if asked; or it stays, with our functions in it."""
    package = ours.PACKAGE
    theirs = {name: (lambda name=name: name) for name in package.names}
    places = {
        place: program(place, __path__=[], other=str, **{name: theirs[name] for name in names})
        for place, names in package.functions.items()
    }
    user = program("user", other=str, **theirs)
    alike = program("alike", **{name: (lambda: "another") for name in theirs})
    if ours is cuequivariance:
        with pytest.raises(
            RuntimeError, match=r"cuequivariance_\w* is imported already; register sh"
        ):
            ours.register()
        assert swaps() == []
    ours.register(**{"replace": True} if ours is cuequivariance else {})
    for name in theirs:
        assert getattr(user, name).__wrapped__ is getattr(ours, name)
        assert getattr(alike, name)() == "another"
    for place, names in package.functions.items():
        assert (sys.modules[place] is places[place]) == package.kept
        for name in names:
            assert getattr(sys.modules[place], name).__wrapped__ is getattr(ours, name)
    assert user.other is str
    ours.unregister()
    for place, module in places.items():
        assert sys.modules[place] is module
        assert module.other is str
    for module in (user, *places.values()):
        assert all(vars(module).get(name, each) is each for name, each in theirs.items())


def test_our_own_modules_choose_torch_meanwhile(monkeypatch):
    monkeypatch.setattr(pairs, "_searched", lambda: True)
    assert pairs._found()
    cuequivariance.register()
    try:
        assert not pairs._found()
    finally:
        cuequivariance.unregister()
