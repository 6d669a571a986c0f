"""Tables on the terminal, by rich, or in plain columns if rich isn't installed."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

#: A row's cells and its rich style; None is a line between rows.
Row = tuple[Sequence[str], str | None] | None


def width_of(stream: Any) -> int | None:
    """Return the width of a terminal, or COLUMNS; None for other streams."""
    if stream.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def write(text: str, indent: str = "", file: Any = None) -> None:
    """Print a line; where it is wider than the terminal, it continues with `indent`."""
    width = width_of(file or sys.stdout)
    print(_filled(text, width, "", indent) if width else text, file=file, flush=True)


def _filled(text: str, width: int, first: str, indent: str) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def show(title: str, headings: Sequence[str], rows: Sequence[Row], right: int = 0) -> None:
    """Print a table with numbers in its last `right` columns.

    Where it is wider than the terminal, rich breaks its texts between words, in three lines at
    most; a table that is wider still has a row's texts in one line, and its numbers in the next.
    """
    has_rich = importlib.util.find_spec("rich") is not None
    cells = [headings, *(row[0] for row in rows if row)]
    count, total = len(headings), width_of(sys.stdout)
    # rich puts a line and two spaces around every column.
    between, texts = (3 * count + 1, count - right) if has_rich else (2 * count - 2, 0)
    widths = _widths(cells, texts, math.inf if total is None else total - between)
    if widths is None:
        _records(title, headings, rows, right, total or 0)
        return
    if not has_rich:
        print(title)
        for line in cells:
            print(_columns(line, widths, right))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for at, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        numbers = at >= count - right
        # rich itself would cut words in a narrow column.
        table.add_column(heading, justify="right" if numbers else "left", width=width)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row[0], style=row[1])
    Console(highlight=False, markup=False, width=sum(widths) + between).print(table)


def _widths(cells: Sequence[Sequence[str]], texts: int, room: float) -> list[int] | None:
    """Return the widths of columns that fit into `room`, of which the first, `texts`, may shrink.

    Return None if that would cut words, or break a text into more than three lines.
    """
    columns = list(zip(*cells, strict=True))
    widths = [max(1, *map(len, column)) for column in columns]
    words = [
        max(len(word) for cell in column for word in [*cell.split(), ""]) for column in columns
    ]
    excess = sum(widths) - room
    for at in sorted(range(texts), key=lambda at: words[at] - widths[at]):
        less = max(0, min(excess, widths[at] - words[at]))
        widths[at] -= int(less)
        excess -= less
    lines = (
        len(textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False))
        for column, width in zip(columns[:texts], widths, strict=False)
        for cell in column
    )
    return widths if excess <= 0 and max(lines, default=0) <= 3 else None


def _columns(cells: Sequence[str], widths: Sequence[int], right: int) -> str:
    at = len(cells) - right
    padded = [cell.ljust(width) for cell, width in zip(cells[:at], widths, strict=False)]
    padded += [cell.rjust(width) for cell, width in zip(cells[at:], widths[at:], strict=True)]
    return "  ".join(padded).rstrip()


def _records(
    title: str, headings: Sequence[str], rows: Sequence[Row], right: int, width: int
) -> None:
    print(title)
    at = len(headings) - right
    for cells, _ in filter(None, rows):
        texts = ", ".join(filter(None, cells[:at]))
        named = zip(headings[at:], cells[at:], strict=True)
        numbers = ", ".join(f"{heading} {cell}".strip() for heading, cell in named if cell)
        for line, indent in ((texts, "  "), (numbers, "    ")):
            print(_filled(line, width, indent, indent))
