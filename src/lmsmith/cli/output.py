"""What every command shares: the `--json` option, and how a result reaches standard output.

Not for: laying tables out (`lmsmith.display`).
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from lmsmith.display.tables import Table

Json = Annotated[
    bool,
    Parameter(name="--json", negative=(), help="Print one JSON document and nothing else."),
]
DryRun = Annotated[
    bool,
    Parameter(
        name="--dry-run", negative=(), help="Print the resolved settings and plan, and stop."
    ),
]


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


def facts(rows: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> Table:
    """A table of names and values; what is empty is left out."""
    from lmsmith.display.tables import Table

    pairs = rows.items() if isinstance(rows, Mapping) else rows
    return Table(
        ["", " "], [[n, str(v)] for n, v in pairs if v not in ("", None)], styles={"": "quiet"}
    )
