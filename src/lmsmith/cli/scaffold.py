"""`lmsmith new` and `lmsmith copy`: a method of your own, from a working one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lmsmith import cards, scaffold
from lmsmith.cli.output import Json, emit, show


def new(
    name: Annotated[str, Parameter(help="Its name on the command line, such as my-method.")],
    /,
    *,
    dir: Annotated[Path, Parameter(help="Where its folder goes.")] = Path(),
    json: Json = False,
) -> None:
    """Start a method of your own from a working one, with a test that passes at once."""
    _tell(scaffold.new(name, dir), json)


def copy(
    method: Annotated[str, Parameter(help="A name from `lmsmith list`.")],
    folder: Annotated[Path, Parameter(help="The new folder; the copy takes its name.")],
    /,
    *,
    json: Json = False,
) -> None:
    """Take a method out of the package to edit it; the copy gets its own name."""
    _tell(scaffold.copy(cards.get(method), folder), json)


def _tell(folder: Path, json: bool) -> None:
    card = cards.read(folder)
    if json:
        emit({"name": card.name, "folder": str(folder)})
        return
    show(
        f"[name]{card.name}[/] is in {folder}. To see it in lmsmith list, generate and bench:",
        f"  export {cards.FOLDERS_VARIABLE}={folder.absolute()}",
        "or, in a package of your own, declare it in pyproject.toml:",
        f'  \\[project.entry-points."{cards.ENTRY_POINT_GROUP}"]',
        f'  {card.name} = "{folder.absolute().name}"',
    )
    if any(folder.glob("test_*.py")):
        show(f"Its test: python -m pytest {folder}")
