"""`lmsmith list` and `lmsmith info`: what there is, read from the cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lmsmith import cards
from lmsmith.cli.output import Json, emit, facts, show

if TYPE_CHECKING:
    from lmsmith.display.tables import Table
    from lmsmith.settings import SettingRow


def list_methods(*, json: Json = False) -> None:
    """List the methods."""
    found = cards.find().values()
    if json:
        emit([card.to_dict() for card in found])
        return
    if not found:
        show("No methods yet; start one with: lmsmith new NAME")
        return
    from lmsmith.display.tables import Table

    rows = [[card.name, card.family, card.status, _origin(card), card.purpose] for card in found]
    columns = ["method", "family", "status", "from", "purpose"]
    show(Table(columns, rows, styles={"method": "name"}))


def info(
    method: Annotated[str, Parameter(help="A name from `lmsmith list`.")],
    /,
    *,
    json: Json = False,
) -> None:
    """Show what a method is, with every setting, default, unit and source."""
    card = cards.get(method)
    settings = card.load("config").describe() if "config" in card.entry else []
    if json:
        emit(card.to_dict() | {"settings": [row._asdict() for row in settings]})
        return
    from rich.markup import escape

    arxiv = f"arXiv {card.paper.arxiv}" if card.paper.arxiv else ""
    paper = (card.paper.title, card.paper.authors, card.paper.venue, arxiv)
    show(
        f"[name]{card.name}[/]: {escape(card.purpose)}",
        facts(
            {
                "family": card.family,
                "status": card.status,
                "paper": "; ".join(filter(None, paper)),
                "needs of a model": ", ".join(card.needs),
                "models at once": card.models or "any number",
                "commands": "\n".join(_commands(card)),
                "folder": card.folder,
            }
        ),
    )
    if settings:
        show(_settings_table(settings))
    for heading, lines in vars(card.sources).items():
        if lines:
            show(f"[heading]{heading}[/]", *(f"- {escape(line)}" for line in lines), "")


def _origin(card: cards.Card) -> str:
    return str(card.folder) if card.origin == "folder" else card.origin


def _commands(card: cards.Card) -> list[str]:
    commands = {
        "decoder": f"lmsmith generate MODEL PROMPT --method {card.name}",
        "bench": f"lmsmith bench {card.name}",
        "cli": f"lmsmith {card.name} --help",
    }
    return [command for kind, command in commands.items() if kind in card.entry]


def _settings_table(settings: list[SettingRow]) -> Table:
    from lmsmith.display.tables import Table

    rows = [
        [
            row.name,
            "none" if row.default is None else str(row.default),
            row.type,
            row.unit,
            row.meaning,
            row.source,
        ]
        for row in settings
    ]
    columns = ["setting", "default", "type", "unit", "meaning", "source"]
    return Table(columns, rows, title="Settings", styles={"setting": "name"})
