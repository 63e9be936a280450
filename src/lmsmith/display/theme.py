"""One palette for terminal, figures and page, readable on dark and on light grounds.

Not for: laying anything out (`tables`, `figures`, `progress`).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Middle lightness: contrast of at least 3 to 1 against both white and near-black, and hues that
# stay apart under red-green colour blindness.
BLUE = "#2f7fd6"
ORANGE = "#c8701a"
GREEN = "#2a9461"
PINK = "#c2569a"
GREY = "#808790"

SERIES = (BLUE, ORANGE, GREEN, PINK, GREY)

INK = "#22272e"
PAPER = "#fcfcfa"
RULE = "#d9dce1"

# Meanings, as rich style names usable in markup: "[pass]", "[miss]", "[name]", "[quiet]".
STYLES = {
    "name": f"bold {BLUE}",
    "number": BLUE,
    "best": f"bold {GREEN}",
    "pass": f"bold {GREEN}",
    "miss": f"bold {ORANGE}",
    "accent": PINK,
    "quiet": GREY,
    "heading": "bold",
    "bar.complete": BLUE,
    "bar.finished": GREEN,
    "bar.pulse": BLUE,
    "progress.percentage": GREY,
    "progress.remaining": GREY,
    "progress.elapsed": GREY,
}


@cache
def console(stderr: bool = False) -> Console:
    """The console in our theme; standard output carries results, standard error the rest.

    Colour appears only on a terminal, and the usual switches (`NO_COLOR`, `FORCE_COLOR`, `TERM`)
    are honoured.
    """
    from rich.console import Console
    from rich.theme import Theme

    return Console(stderr=stderr, theme=Theme(STYLES), highlight=False)
