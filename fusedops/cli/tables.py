"""Tables on the terminal."""

from __future__ import annotations

import functools
import itertools
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

#: A row's cells and its style; None is an empty line between rows.
Row = tuple[Sequence[str], str | None] | None

_CODES = {"bold": 1, "dim": 2, "red": 31}

#: `textwrap.wrap`, but no word is cut, nor an address or a name at its hyphens.
wrap = functools.partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal that obeys codes for styles and cursors."""
    modern = os.environ.get("WT_SESSION" if sys.platform == "win32" else "TERM", "dumb") != "dumb"
    return modern and stream.isatty()


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

    Where it is wider than the terminal, its texts break between words, in three lines at most; a
    table that is wider still has a row's texts in one line, and its numbers in the next.
    """
    texts, between = len(headings) - right, 2 * len(headings) - 2
    cells = [headings, *(row[0] for row in rows if row)]
    widths = _widths(cells, texts, (width_of(sys.stdout) or math.inf) - between)
    print(title)
    if widths is None:
        for line in cells[1:]:
            named = zip(headings[texts:], line[texts:], strict=True)
            numbers = (f"{heading} {cell}".strip() for heading, cell in named if cell)
            write(f"  {', '.join(filter(None, line[:texts]))}", "  ")
            write(f"    {', '.join(numbers)}", "    ")
        return
    stroke = "─" if sys.stdout.encoding.lower().startswith("utf") else "-"
    ruled: list[Row] = [(headings, "bold"), ([stroke * width for width in widths], None), *rows]
    styled = is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
    pads = [str.ljust] * texts + [str.rjust] * right
    for row in ruled:
        line, style = row or ([""] * len(headings), None)
        begin, end = (f"\x1b[{_CODES[style]}m", "\x1b[0m") if style and styled else ("", "")
        columns = (wrap(cell, width) or [""] for cell, width in zip(line, widths, strict=True))
        for parts in itertools.zip_longest(*columns, fillvalue=""):
            padded = (pad(part, n) for pad, part, n in zip(pads, parts, widths, strict=True))
            print(f"{begin}{'  '.join(padded).rstrip()}{end}")


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
    shrunk = zip(columns[:texts], widths, strict=False)
    lines = [len(wrap(cell, width)) for column, width in shrunk for cell in column]
    return widths if excess <= 0 and max(lines, default=0) <= 3 else None
