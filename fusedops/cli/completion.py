"""``fusedops --print-completion``: a script that completes commands in a shell, by shtab."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from fusedops.cli.common import CommandError, needs

SHELLS = ("bash", "zsh", "tcsh")

#: The metavars of arguments that are files.
FILES = ("CIF", "FILE", "MAP", "MODEL", "OLD.json", "OUT", "PNG")


def add(parser: argparse.ArgumentParser) -> None:
    help = "print a script for a shell to complete commands, options and files"
    parser.add_argument("--print-completion", choices=SHELLS, action=_Print, help=help)


class _Print(argparse.Action):
    """Print the script for a shell, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, shell: Any, *__: Any) -> None:
        needs("shtab")
        import shtab

        _tell_files(parser, shtab)
        print(shtab.complete(parser, shell))
        parser.exit()


def _tell_files(parser: argparse.ArgumentParser, shtab: Any) -> None:
    """Tell shtab which arguments of a parser and of its commands are files or folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                with contextlib.suppress(CommandError):
                    command.fill(command)
                _tell_files(command, shtab)
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
