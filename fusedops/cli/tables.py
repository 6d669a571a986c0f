"""Tables on the terminal, by rich, or in plain columns if rich isn't installed."""

from __future__ import annotations

import importlib.util
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
    """Print a table with numbers in its last `right` columns."""
    if importlib.util.find_spec("rich") is None:
        _plain(title, headings, rows, right)
        return
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    cells = [list(headings), *(list(row[0]) for row in rows if row)]
    for at, heading in enumerate(headings):
        numbers = at >= len(headings) - right
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=numbers)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row[0], style=row[1])
    console = Console(highlight=False, markup=False)
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    if width_of(sys.stdout) is None:
        console.width = needed
    widths = _widths(cells, right, needed - console.width)
    if widths is None:
        _records(title, headings, rows, right, console.width)
        return
    # rich itself would cut words in a narrow column.
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    console.print(table)


def _widths(cells: Sequence[Sequence[str]], right: int, excess: int) -> list[int] | None:
    """Return the columns' widths after texts give up `excess`.

    Return None if that would cut words, or break a text into more than three lines.
    """
    columns = list(zip(*cells, strict=True))
    widths = [max(1, *map(len, column)) for column in columns]
    texts = columns[: len(columns) - right]
    words = [max(len(word) for cell in column for word in [*cell.split(), ""]) for column in texts]
    for at in sorted(range(len(texts)), key=lambda at: words[at] - widths[at]):
        less = max(0, min(excess, widths[at] - words[at]))
        widths[at] -= less
        excess -= less
    lines = (
        len(textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False))
        for column, width in zip(texts, widths, strict=False)
        for cell in column
    )
    return widths if excess <= 0 and max(lines, default=0) <= 3 else None


def _records(
    title: str, headings: Sequence[str], rows: Sequence[Row], right: int, width: int
) -> None:
    """Print a row's texts in one line, and its numbers, with their headings, in the next."""
    print(title)
    at = len(headings) - right
    for row in rows:
        if row is None:
            continue
        cells = row[0]
        texts = ", ".join(filter(None, cells[:at]))
        named = zip(headings[at:], cells[at:], strict=True)
        numbers = ", ".join(f"{heading} {cell}".strip() for heading, cell in named if cell)
        for line, indent in ((texts, "  "), (numbers, "    ")):
            print(_filled(line, width, indent, indent))


def _plain(title: str, headings: Sequence[str], rows: Sequence[Row], right: int) -> None:
    cells = [list(headings), *(list(row[0]) if row else [] for row in rows)]
    count = len(headings)
    widths = [max(len(line[i]) for line in cells if line) for i in range(count)]
    width = width_of(sys.stdout)
    if width and sum(widths) + 2 * (count - 1) > width:
        _records(title, headings, rows, right, width)
        return
    print(title)
    for line in cells:
        padded = [
            cell.rjust(width) if i >= count - right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        print("  ".join(padded).rstrip())
