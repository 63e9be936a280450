"""Results to standard output, one way for commands and for methods' verbs.

Not for: laying tables out (`tables`), or what is no result (`progress`, standard error).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from lmsmith.display.tables import Table


def results() -> Console:
    """The console of results, in the theme: colour on a terminal only."""
    from lmsmith.display.theme import console

    return console()


def show_json(document: Any) -> None:
    """Print one JSON document."""
    # Escapes where standard output cannot carry every character.
    escaped = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    json.dump(document, sys.stdout, ensure_ascii=escaped, indent=2, default=str)
    sys.stdout.write("\n")


def show(*shown: Table | str) -> None:
    """Print tables, and lines whose `[style]` marks are the theme's."""
    for piece in shown:
        results().print(piece)


def show_facts(facts: Mapping[str, object]) -> None:
    """Print names and values in two columns; what is empty is left out."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value not in ("", None):
            grid.add_row(Text(f"  {name}", style="quiet"), Text(str(value)))
    results().print(grid)


def show_below(*lines: str) -> None:
    """Print lines indented under what was shown last; wrapped ones stay indented."""
    from rich.padding import Padding

    for line in lines:
        results().print(Padding(line, (0, 0, 0, 4), expand=False))


def say(text: str) -> None:
    """Tell the user something that is not a result, on standard error."""
    sys.stderr.write(f"{text}\n")
