"""`lmsmith new` and `lmsmith copy`: a method of your own, from a working one."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from lmsmith import cards, scaffold
from lmsmith.display.console import show_json


def new(name: str, /, *, dir: Path = Path(), json: bool = False) -> None:
    """Start a method of your own from a working one, with a test that passes at once.

    Args:
        name: Its name on the command line, such as my-method.
        dir: Where its folder goes.
        json: Print one JSON document and nothing else.
    """
    _tell(scaffold.new(name, dir), json)


def copy(method: str, folder: Path, /, *, json: bool = False) -> None:
    """Take a method out of the package to edit it; the copy gets its own name.

    Args:
        method: A name from `lmsmith list`.
        folder: The new folder; the copy takes its name.
        json: Print one JSON document and nothing else.
    """
    _tell(scaffold.copy(cards.get(method), folder), json)


def _tell(folder: Path, json: bool) -> None:
    card = cards.read(folder)
    if json:
        show_json({"name": card.name, "folder": str(folder)})
        return
    place = folder.absolute()
    lines = [f"Method {card.name} is in the folder {place}."]
    if card.name not in cards.find():
        before = f"${cards.FOLDERS_VARIABLE}:" if os.environ.get(cards.FOLDERS_VARIABLE) else ""
        lines += [
            "To see it in lmsmith list, generate and bench:",
            f"  export {cards.FOLDERS_VARIABLE}={before}{shlex.quote(str(place))}",
            "or, in a package of your own, declare it in pyproject.toml:",
            f'  [project.entry-points."{cards.ENTRY_POINT_GROUP}"]',
            f'  {card.name} = "{place.name}"',
        ]
    if any(folder.glob("test_*.py")):
        lines.append(f"Its test: python -m pytest {shlex.quote(str(folder))}")
    # Not through the console, which would break lines that are there to be copied.
    sys.stdout.write("\n".join(lines) + "\n")
