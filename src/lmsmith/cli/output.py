"""How a result reaches standard output.

Not for: laying tables out (`lmsmith.display`).
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmsmith.display.tables import Table


def emit(document: Any) -> None:
    """Print one JSON document."""
    json_module.dump(document, sys.stdout, ensure_ascii=False, indent=2, default=str)
    sys.stdout.write("\n")


def say(text: str) -> None:
    """Tell the user something that is not a result."""
    sys.stderr.write(f"{text}\n")


def show(*shown: Table | str) -> None:
    """Print tables and lines, whose `[style]` marks are the theme's, to standard output."""
    from lmsmith.display.theme import console

    for piece in shown:
        console().print(piece if isinstance(piece, str) else piece.rich())


def show_facts(facts: Mapping[str, object]) -> None:
    """Print names and values in two columns; what is empty is left out."""
    from rich.table import Table
    from rich.text import Text

    from lmsmith.display.theme import console

    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value not in ("", None):
            grid.add_row(Text(f"  {name}", style="quiet"), Text(str(value)))
    console().print(grid)


def show_below(*lines: str) -> None:
    """Print lines indented under what was shown last; wrapped ones stay indented."""
    from rich.padding import Padding

    from lmsmith.display.theme import console

    for line in lines:
        console().print(Padding(line, (0, 0, 0, 4), expand=False))
