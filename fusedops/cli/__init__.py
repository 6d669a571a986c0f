"""The ``fusedops`` command.

Each sub-command is a file: the first line of its docstring is its help, the rest its description,
`add` declares its arguments, and `run` does its work and returns the exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import fusedops
from fusedops.cli import bench, cache, check, completion, demo, density, info, planarity, tables
from fusedops.cli.common import CommandError, check_environment
from fusedops.structure import StructureError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``fusedops`` command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; by default the process's.

    Returns
    -------
    int
        The exit code: 0; 1 if a check of the command failed; 2 if the command couldn't do its work,
        with the reason in one line on stderr; 130 after Ctrl-C.

    Raises
    ------
    SystemExit
        With code 2 if the arguments are wrong, with 0 after ``--help``.

    Examples
    --------
    >>> main(["planarity", "no-such-file.pdb"])
    2
    """
    parser = _Parser(prog="fusedops", description=fusedops.__doc__)
    parser.add_argument("--version", action="version", version=fusedops.__version__)
    completion.add(parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # It gets the arguments of the command, whose parser knows their names.
    commands.type = str
    for command in (demo, info, check, bench, planarity, density, cache):
        first, _, rest = (command.__doc__ or "").partition("\n")
        commands.add_parser(
            command.__name__.rpartition(".")[2],
            run=command.run,
            fill=command.add,
            help=first[:1].lower() + first[1:].rstrip("."),
            description=rest.strip() or first,
        )
    # The parent process may close stderr, and stdout too.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(sys.stderr or nowhere):
        try:
            if sys.stdout is None:
                raise CommandError(f"stdout: {os.strerror(errno.EBADF)}")
            stdout: Any = _Stdout(sys.stdout)
            with contextlib.redirect_stdout(stdout):
                try:
                    args = parser.parse_args(argv)
                    check_environment()
                    return args.run(args)
                finally:
                    stdout.flush()
        except (CommandError, StructureError, fusedops.BackendUnavailable, MemoryError) as error:
            reason = str(error) or "out of memory"
            reason = "; ".join(" ".join(line.split()) for line in reason.splitlines())
            print("fusedops:", reason, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


class _Parser(argparse.ArgumentParser):
    """A parser of a command; `fill` adds its arguments when it is used. Errors are one line."""

    def __init__(self, run: Any = None, fill: Any = lambda _: None, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)
        self.register("type", None, _text)
        self.set_defaults(run=run)
        self.fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.fill(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> Any:
        message = " ".join(message.split())
        self.exit(2, f"{self.prog}: {message} (for all arguments: {self.prog} --help)\n")


def _text(given: str) -> str:
    """Return an argument without a type; a script's empty variable is an error."""
    if not given:
        raise argparse.ArgumentTypeError("it is empty")
    return given


class _Help(argparse.HelpFormatter):
    """Help whose lines end between words, not at hyphens in addresses and names."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return tables.wrap(" ".join(text.split()), width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


class _Stdout:
    """The stdout of a command; error messages name it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):
            # The terminal's encoding may lack an Å, or a character in a file's name.
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stream, name)
        return functools.partial(self._try, found) if name in ("write", "flush") else found

    def _try(self, do: Callable[..., Any], *arguments: str) -> Any:
        try:
            return do(*arguments)
        except OSError as error:
            # At exit Python must not flush again, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            # The reader of a closed pipe has seen enough; the command still writes its files.
            # Windows may call the write to one an invalid argument.
            closed = (errno.EPIPE, errno.EINVAL) if sys.platform == "win32" else (errno.EPIPE,)
            if error.errno not in closed:
                raise CommandError(f"stdout: {error.strerror}") from None
