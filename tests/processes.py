"""Code in interpreters of its own, with packages hidden from it or not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def ended(code, **environment):
    """Run code in a new interpreter; return how it ended."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        # Readline sets COLUMNS in the process's own environment, behind Python's back.
        env={**os.environ, **environment},
    )


def python(code, **environment):
    """Run code that must succeed; return what it printed."""
    done = ended(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without(*modules):
    """Return code that hides modules from find_spec and from import, as if never installed."""
    return f"""
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if any(name == m or name.startswith(m + ".") for m in {modules!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
genuine = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in {modules!r} else genuine(name, *a)
"""
