"""Tables on the terminal, by rich, or in plain columns if rich isn't installed."""

from __future__ import annotations

import functools
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

    Where it is wider than the terminal, rich breaks its texts between words, in three lines at
    most; a table that is wider still has a row's texts in one line, and its numbers in the next.
    """
    has_rich = importlib.util.find_spec("rich") is not None
    cells = [headings, *(row[0] for row in rows if row)]
    texts, total = len(headings) - right, width_of(sys.stdout)
    # rich puts a line and two spaces around every column.
    between = 3 * len(headings) + 1 if has_rich else 2 * len(headings) - 2
    room = math.inf if total is None else total - between
    widths = _widths(cells, texts if has_rich else 0, room)
    if widths is None:
        print(title)
        for line in cells[1:]:
            named = zip(headings[texts:], line[texts:], strict=True)
            numbers = (f"{heading} {cell}".strip() for heading, cell in named if cell)
            write(f"  {', '.join(filter(None, line[:texts]))}", "  ")
            write(f"    {', '.join(numbers)}", "    ")
        return
    if not has_rich:
        print(title)
        pads = [str.ljust] * texts + [str.rjust] * right
        for line in cells:
            padded = (pad(cell, n) for pad, cell, n in zip(pads, line, widths, strict=True))
            print("  ".join(padded).rstrip())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for at, (heading, width) in enumerate(zip(headings, widths, strict=True)):
        # rich itself would cut words in a narrow column.
        table.add_column(heading, justify="left" if at < texts else "right", width=width)
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
    words = [max(map(len, " ".join(column).split()), default=0) for column in columns]
    excess = sum(widths) - room
    for at in sorted(range(texts), key=lambda at: words[at] - widths[at]):
        less = max(0, min(excess, widths[at] - words[at]))
        widths[at] -= int(less)
        excess -= less
    lines = (
        len(wrap(cell, width))
        for column, width in zip(columns[:texts], widths, strict=False)
        for cell in column
    )
    return widths if excess <= 0 and max(lines, default=0) <= 3 else None
