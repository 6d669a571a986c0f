"""Third-party packages: the versions that are asked for, and those that are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re

#: The versions that are asked for; pyproject.toml has the same.
REQUIREMENTS = {
    "gemmi": "gemmi>=0.7.3",
    "matplotlib": "matplotlib>=3.10",
    "numba": "numba>=0.60",
    "scipy": "scipy>=1.11",
    "shtab": "shtab>=1.7",
    "torch": "torch>=2.6",
    "triton": "triton>=3.4",
}


@functools.cache
def import_error(package: str) -> str | None:
    """Return why a third-party package can't be used here, or None if it can."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    oldest = REQUIREMENTS.get(package, "").partition(">=")[2]
    try:
        module = importlib.import_module(package)
        version = module.__version__ if oldest else ""
    except Exception as error:  # a missing library is an OSError; none of this code is ours
        return f"{package} is installed but does not import: {error}"
    if release(version) < release(oldest):
        return f"{package} {version} is installed; it should be {oldest} or newer"
    return None


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def how_to_install(*packages: str) -> str:
    """Return the command that installs packages."""
    requirements = [f'"{REQUIREMENTS.get(package, package)}"' for package in packages]
    return f"pip install {' '.join(requirements)}"
