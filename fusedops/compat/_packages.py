"""Our functions in the place of other programs' packages, from `register` to `unregister`."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fusedops._swaps import of, start, stop

_lock = threading.Lock()


class Package:
    """A program's package, or several, with functions that have ours in their place.

    Parameters
    ----------
    name : str
        The package's name in an ``import``; of several, the first.
    program, version : str
        The distribution that has the package, and the version whose functions ours are.
    functions : mapping of str to sequence of str
        The packages' modules, each after its parent, and the functions of ours in them.
    ours : mapping of str to function
        Our functions by name.
    kept : bool
        Whether an installed package stays, with our functions in it. Otherwise, and where it is
        not installed, modules that have our functions alone stand in for it.
    plain : mapping of str to str, optional
        The names of transformers' own functions, which the package's functions replace where they
        are found, and the names of the latter; by default they are the same.
    """

    def __init__(
        self,
        name: str,
        program: str,
        version: str,
        functions: Mapping[str, tuple[str, ...]],
        ours: Mapping[str, Any],
        *,
        kept: bool = False,
        plain: Mapping[str, str] | None = None,
        constants: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.name, self.program, self.version = name, program, version
        self.functions, self.ours, self.kept = functions, ours, kept
        self.names = frozenset(name for names in functions.values() for name in names)
        self.plain = plain or {name: name for name in self.names}
        self.constants = constants or {}
        self.roots = frozenset(module.partition(".")[0] for module in functions)
        # The package's modules from before, and globals (module, name, value) of all modules.
        self._before: tuple[dict[str, ModuleType], list[tuple[ModuleType, str, Any]]] | None = None

    @functools.cached_property
    def counted(self) -> dict[str, Callable[..., Any]]:
        """Our functions by name, with their calls counted."""
        found: dict[str, Callable[..., Any]] = {}
        for module, names in self.functions.items():
            for name in names:
                if name not in found:
                    found[name] = of(self.program, name).counting(self.ours[name])
                    # Pickle looks for a function in the module that it names.
                    found[name].__module__ = module
        return found

    @functools.cached_property
    def modules(self) -> dict[str, ModuleType]:
        """Our modules of the package by name."""
        made: dict[str, ModuleType] = {}
        for name, functions in self.functions.items():
            module = made[name] = ModuleType(name, f"{self.program}'s functions, by fusedops.")
            parent, _, last = name.rpartition(".")
            is_package = any(other.startswith(f"{name}.") for other in self.functions)
            # `importlib.util.find_spec` raises for an imported module without one.
            module.__spec__ = ModuleSpec(name, None, origin=__name__, is_package=is_package)
            module.__dict__.update({function: self.counted[function] for function in functions})
            module.__dict__.update(self.constants.get(name, {}))
            if is_package:
                module.__dict__["__path__"] = []
            if parent:
                # A package may hide a module behind a function of its name.
                made[parent].__dict__.setdefault(last, module)
            else:
                module.__dict__["__version__"] = self.version
        return made

    def register(self, replace: bool = True) -> None:
        """Give programs our functions from now on. A second call changes nothing.

        Raises RuntimeError if the package is imported, and `replace` is False.
        """
        with _lock:
            if self._before is not None:
                return
            stays = self.kept and self._is_installed()
            imported = {
                name: module
                for name, module in _modules().items()
                if name.partition(".")[0] in self.roots
            }
            if imported and not replace:
                raise RuntimeError(
                    f"register: {min(imported)} is imported already; register should be called "
                    "before, or with replace=True"
                )
            # A program that found no package may have None in its place.
            replaced = [None, *(each for m in imported.values() for _, each in self._held(m))]
            if not stays:
                for name in imported:
                    del sys.modules[name]
            held = [
                (module, name, value)
                for module in _modules().values()
                for name, value in self._held(module)
                if any(value is each for each in replaced)
            ]
            if not stays:
                sys.modules.update(self.modules)
            for module, name, _ in held:
                setattr(module, name, self.counted[name])
            self._before = ({} if stays else imported), held
            self._choose_again()
        start(self.program, sorted(self.names))

    def unregister(self) -> None:
        """Give programs the package that there was before `register`, or none."""
        with _lock:
            if self._before is None:
                return
            theirs, held = self._before
            for name, module in self.modules.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
            sys.modules.update(theirs)
            for module, name, value in held:
                if module.__dict__.get(name) is self.counted[name]:
                    setattr(module, name, value)
            self._before = None
            self._choose_again()
        stop(self.program)

    def _is_installed(self) -> bool:
        """Import the package's modules, if they can be."""
        try:
            for name in self.functions:
                importlib.import_module(name)
        # A package that needs a GPU, or other versions, may raise anything.
        except Exception:
            return False
        return True

    def _held(self, module: ModuleType) -> list[tuple[str, Any]]:
        """Return the globals of a module that have our functions' names."""
        return [(name, module.__dict__[name]) for name in self.names & module.__dict__.keys()]

    def _choose_again(self) -> None:
        """Let transformers choose anew between the package and plain torch, as at an import."""
        hub = sys.modules.get("transformers.integrations.hub_kernels")
        choose = getattr(hub, "use_kernel_func_from_hub_with_fallback", None)
        if choose is None:
            return
        for module in _modules().values():
            if module.__name__.startswith("transformers."):
                for name in self.plain.keys() & module.__dict__.keys():
                    found, function = module.__dict__[name], self.plain[name]
                    plain = getattr(found, "__wrapped__", None)
                    if plain is not None and found is not self.counted[function]:
                        setattr(module, name, choose(function, self.name)(plain))


def _modules() -> dict[str, ModuleType]:
    """Return the imported modules by name."""
    return {n: module for n, module in list(sys.modules.items()) if isinstance(module, ModuleType)}
