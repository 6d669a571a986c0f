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

        (commands,) = (action for action in parser._actions if isinstance(action.choices, dict))
        for command in commands.choices.values():  # type: ignore[union-attr]
            with contextlib.suppress(CommandError):
                command.fill(command)
            for action in command._actions:
                if action.metavar in (*FILES, "DIR"):
                    action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
        print(shtab.complete(parser, shell))
        parser.exit()
