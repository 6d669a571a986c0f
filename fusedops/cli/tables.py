"""Tables on the terminal, by rich, or in plain columns if rich isn't installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

#: A row's cells and its rich style; None is a line between rows.
Row = tuple[Sequence[str], str | None] | None


def show(title: str, headings: Sequence[str], rows: Sequence[Row], right: int = 0) -> None:
    """Print a table with numbers in its last `right` columns."""
    if importlib.util.find_spec("rich") is None:
        _plain(title, headings, rows, right)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for at, heading in enumerate(headings):
        numbers = at >= len(headings) - right
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=numbers)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row[0], style=row[1])
    # A file or a pipe has no width.
    width = None if sys.stdout.isatty() else 160
    Console(highlight=False, markup=False, width=width).print(table)


def _plain(title: str, headings: Sequence[str], rows: Sequence[Row], right: int) -> None:
    cells = [list(headings), *(list(row[0]) if row else [] for row in rows)]
    count = len(headings)
    widths = [max(len(line[i]) for line in cells if line) for i in range(count)]
    print(title)
    for line in cells:
        padded = [
            cell.rjust(width) if i >= count - right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        print("  ".join(padded).rstrip())
