"""Tables on the terminal, by rich, or in plain columns if rich isn't installed."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

#: A row's cells and its rich style; None is a line between rows.
Row = tuple[Sequence[str], str | None] | None

#: `textwrap.wrap`, but no word is cut, nor an address or a name at its hyphens.
wrap = functools.partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def width_of(stream: Any) -> int | None:
    """Return the width of a terminal, or COLUMNS; None for other streams."""
    if stream.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def write(text: str, indent: str = "", file: Any = None) -> None:
    """Print a line; where it is wider than the terminal, it continues with `indent`."""
    width = width_of(file or sys.stdout)
    lines = wrap(text, width, subsequent_indent=indent) if width else [text]
    print("\n".join(lines), file=file, flush=True)


def show(title: str, headings: Sequence[str], rows: Sequence[Row], right: int = 0) -> None:
    """Print a table with numbers in its last `right` columns.

    Where it is wider than the terminal, a row's texts are in one line, and its numbers in the next.
    """
    cells = [headings, *(row[0] for row in rows if row)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    texts, limit = len(headings) - right, width_of(sys.stdout)
    # rich puts a line and two spaces around every column.
    total = sum(widths) + 3 * len(headings) + 1
    if limit is not None and total > limit:
        print(title)
        for line in cells[1:]:
            named = zip(headings[texts:], line[texts:], strict=True)
            numbers = (f"{heading} {cell}".strip() for heading, cell in named if cell)
            write(f"  {', '.join(filter(None, line[:texts]))}", "  ")
            write(f"    {', '.join(numbers)}", "    ")
    elif importlib.util.find_spec("rich") is None:
        print(title)
        for line in cells:
            pads = [str.ljust] * texts + [str.rjust] * right
            padded = (pad(cell, n) for pad, cell, n in zip(pads, line, widths, strict=True))
            print("  ".join(padded).rstrip())
    else:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(*headings[:texts], title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for heading in headings[texts:]:
            table.add_column(heading, justify="right")
        for row in rows:
            if row is None:
                table.add_section()
            else:
                table.add_row(*row[0], style=row[1])
        Console(highlight=False, markup=False, width=total).print(table)


def failures(rows: Sequence[Row]) -> int:
    """Return how many rows end with a failed check."""
    return sum(row[0][-1] == "FAILED" for row in rows if row)
