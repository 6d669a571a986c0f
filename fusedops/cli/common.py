"""Code that the commands share: errors, arguments and checks of them, times, JSON, progress."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from fusedops import _info
from fusedops._frame.registry import BACKENDS, how_to_install
from fusedops.structure import Structure, read_structure


class CommandError(Exception):
    """A reason to end a command with one line on stderr and exit code 2."""


def add_choice(parser: argparse.ArgumentParser, device: str | None = None) -> None:
    """Add the arguments that choose backends and the device, by default all devices."""
    option, names = parser.add_argument, [backend.name for backend in BACKENDS]
    help = "only these backends"
    option("--backend", nargs="+", action="extend", choices=names, metavar="NAME", help=help)
    help = f"the device (default: {device or 'the CPU, and a GPU if there is one'})"
    option("--device", choices=("cpu", "cuda"), default=device, help=help)


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add the argument that chooses a backend for NumPy arrays."""
    names = [backend.name for backend in BACKENDS if backend.speaks == "numpy"]
    help = "the backend that must compute it (default: the first that can)"
    parser.add_argument("--backend", choices=names, help=help)


def number(
    least: float, most: float = math.inf, unit: str = "", kind: type = float
) -> Callable[[str], float]:
    """Return the type of an argument that is a finite number; its errors name the unit."""
    ends = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:,.0f}"
    what = f"a {'whole ' * (kind is int)}number of {ends}{unit and f', in {unit}'}"

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most and value < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} should be {what}")

    return parse


def read_model(path: str) -> Structure:
    """Read the structure in a file, or on stdin if its name is a dash."""
    if path == "-" and sys.stdin is None:
        raise CommandError("-: stdin is closed")
    return read_structure(sys.stdin.buffer if path == "-" else path)


def check_other(option: str, path: str, *sources: str | None, unless: str = "") -> None:
    """Raise CommandError if an output is an input file, even under another name."""
    for source in sources:
        if source and all(map(os.path.exists, (path, source))) and os.path.samefile(path, source):
            raise CommandError(
                f"{option} {path}: it is the input {source}; it should be another file{unless}"
            )


def check_environment() -> None:
    """Raise CommandError if a variable that every command may need has no meaning."""
    try:
        _info.check_variables()
    except ValueError as error:
        raise CommandError(error) from None


#: Packages whose modules have other names.
_MODULES = {"fairchem-core": "fairchem"}
#: Packages that the extra `cli` installs.
_CLI = ("gemmi", "matplotlib", "scipy", "shtab")


def needs(*packages: str) -> None:
    """Raise CommandError, with the command that installs them, if packages are missing."""
    missing = [name for name in packages if find_spec(_MODULES.get(name, name)) is None]
    if missing:
        *first, last = missing
        names = f"{', '.join(first)} and {last} are" if first else f"{last} is"
        extras = dict.fromkeys("fusedops[cli]" if each in _CLI else each for each in missing)
        raise CommandError(f"{names} not installed: {how_to_install(*extras)}")


def needs_gpu() -> None:
    needs("torch")
    import torch

    if not torch.cuda.is_available():
        raise CommandError("torch sees no GPU")


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Put the time that a ``with`` block takes under a name."""
    start = perf_counter()
    yield
    seconds[name] = perf_counter() - start


def times(seconds: dict[str, float]) -> str:
    """Return times as text."""
    units = ((name, s, "s") if s > 0.9995 else (name, 1e3 * s, "ms") for name, s in seconds.items())
    return ", ".join(f"{name.replace('_', ' ')} {value:.3g} {unit}" for name, value, unit in units)


def print_json(report: dict[str, Any]) -> None:
    print(json.dumps(report, indent=1, allow_nan=False))


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Yield a function to call after each of `total` steps, which advances a bar on stderr.

    Its optional argument names the next step. Without a terminal, or without rich, there is no bar.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda what="": None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda what=title: bar.update(task, advance=1, description=what)
