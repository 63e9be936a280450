"""Tables that look the same in a terminal and in Markdown: aligned decimals, intervals, marks.

Not for: deciding what goes into a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from lmsmith.display.theme import console

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as RichTable

ABSENT = "–"


class Styled(NamedTuple):
    """A cell with a style of the theme; Markdown shows the text alone."""

    text: str
    style: str


class Measured(NamedTuple):
    """A number with its interval, shown as `0.31 [0.28, 0.35]`; ends may be `None`."""

    value: float | None
    low: float | None = None
    high: float | None = None
    style: str = ""


Cell = str | int | float | bool | None | Styled | Measured

PASS = Styled("pass", "pass")
MISS = Styled("miss", "miss")


@dataclass
class Table:
    """A titled grid of text and numbers.

    A column that holds a number is set flush right with one count of decimals.

    Attributes:
        columns: Column names.
        rows: Cells, one list a row.
        title: One line above.
        note: One line below.
        styles: Theme style of a column, by its name.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    styles: dict[str, str] = field(default_factory=dict)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Print as rich prints: `console.print(table)`."""
        yield self.rich(options.max_width)
        yield ""

    def rich(self, width: int | None = None) -> RichTable:
        """The table as rich draws it, for `width` columns or as many as the terminal has."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title) if self.title else None,
            caption=Text(self.note) if self.note else None,
            title_style="heading",
            caption_style="quiet",
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            padding=(0, 1, 0, 0),
            border_style="quiet",
            header_style="quiet",
            pad_edge=False,
        )
        width = console().width if width is None else width
        texts = self._texts()
        widest = [max(map(len, column), default=0) for column in zip(*texts, strict=True)]
        widest = widest or [0] * len(self.columns)
        # Numbers, marks and short names stay on one line, unless the terminal is too narrow
        # even for those: then wrapping beats cutting off.
        firm = [self._firm(column, widest[column]) for column in range(len(self.columns))]
        needed = [w if keep else min(w, 8) for w, keep in zip(widest, firm, strict=True)]
        heads = [
            max(w, *map(len, name.split() or [""]))
            for w, name in zip(needed, self.columns, strict=True)
        ]
        if sum(heads) + 2 * len(heads) > width:
            firm = [False] * len(firm)
        whole = sum(max(w, len(name)) for w, name in zip(widest, self.columns, strict=True))
        tight = whole + 2 * len(widest) > width
        for column, name in enumerate(self.columns):
            head = fill(name, max(1, heads[column])) if firm[column] and tight else name
            table.add_column(
                Text(head),
                justify="right" if self._numeric(column) else "left",
                no_wrap=firm[column],
                style=self.styles.get(name, ""),
                overflow="fold",
            )
        for cells, row in zip(texts, self.rows, strict=True):
            table.add_row(
                *(Text(text, style=_style(cell)) for text, cell in zip(cells, row, strict=True))
            )
        return table

    def markdown(self) -> str:
        """The table in GitHub's Markdown, with title and note around it."""
        rules = ["---:" if self._numeric(column) else "---" for column in range(len(self.columns))]
        lines = [self.columns, rules, *self._texts()]
        grid = "\n".join(
            "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |"
            for line in lines
        )
        around = [f"**{self.title}**" if self.title else "", grid, self.note]
        return "\n\n".join(part for part in around if part) + "\n"

    def _firm(self, column: int, widest: int) -> bool:
        """Whether a column's cells stay on one line."""
        plain = all(isinstance(row[column], str) for row in self.rows)
        return not plain or widest <= (32 if column == 0 else 8)

    def _numeric(self, column: int) -> bool:
        return any(
            isinstance(row[column], int | float | Measured) and not isinstance(row[column], bool)
            for row in self.rows
        )

    def _texts(self) -> list[list[str]]:
        by_column = [
            _column_texts([row[column] for row in self.rows]) for column in range(len(self.columns))
        ]
        return [list(cells) for cells in zip(*by_column, strict=True)]


def decimals(values: Iterable[float]) -> int:
    """Decimals that show three figures of the smallest value, and at most seven of the largest.

    Zeros and what is not finite have no say; whole numbers get no decimals.
    """
    sizes = [abs(v) for v in values if math.isfinite(v) and v]
    if all(size == int(size) for size in sizes):
        return 0
    before = [math.floor(math.log10(size)) + 1 for size in sizes]
    return max(0, min(3 - min(before), 7 - max(1, *before, 1), 6))


def number(value: float | None, places: int | None = None) -> str:
    """A number as people read it, with `places` decimals or as many as it needs."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if places is None:
        if 0 < abs(value) < 1e-4:
            return f"{value:.2e}"
        places = decimals([value])
    if value and abs(value) < 0.5 * 10**-places:
        return f"{value:.1e}"
    return f"{value:,.{places}f}"


def _column_texts(cells: Sequence[Cell]) -> list[str]:
    """Cells of one column as text, numbers to one count of decimals."""
    plain = [c for c in cells if isinstance(c, int | float) and not isinstance(c, bool)]
    measured = [c for c in cells if isinstance(c, Measured)]
    values = [*plain, *(c.value for c in measured if c.value is not None)]
    places = decimals(values)
    ends = [number(e, places) for c in measured for e in (c.low, c.high) if e is not None]
    width = max(map(len, ends), default=0)

    def text(cell: Cell) -> str:
        if cell is None:
            return ABSENT
        if isinstance(cell, bool):
            return "yes" if cell else "no"
        if isinstance(cell, int | float):
            return number(cell, places)
        if isinstance(cell, Styled):
            return cell.text
        if isinstance(cell, Measured):
            shown = number(cell.value, places)
            if cell.low is None or cell.high is None:
                return shown + " " * (2 * width + 5 if width else 0)
            low, high = (number(end, places).rjust(width) for end in (cell.low, cell.high))
            return f"{shown} [{low}, {high}]"
        return cell

    return [text(cell) for cell in cells]


def _style(cell: Any) -> str:
    return cell.style if isinstance(cell, Styled | Measured) else ""
