"""`lmsmith list` and `lmsmith info`: what there is, read from the cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmsmith import cards
from lmsmith.display.console import show, show_below, show_facts, show_json

if TYPE_CHECKING:
    from lmsmith.settings import SettingRow

SOURCES = {
    "read": "what was read and followed",
    "inferred": "what the paper leaves open, and how it was filled",
    "measured": "what was measured here rather than taken over",
    "limits": "limits",
}


def list_methods(*, json: bool = False) -> None:
    """List the methods.

    Args:
        json: Print one JSON document and nothing else.
    """
    found = cards.find().values()
    if json:
        show_json([card.to_dict() for card in found])
        return
    if not found:
        show("No methods yet; start one with: lmsmith new NAME")
        return
    from lmsmith.display.tables import Table

    rows = [[card.name, card.family, card.status, _origin(card), card.purpose] for card in found]
    columns = ["method", "family", "status", "from", "purpose"]
    show(Table(columns, rows, styles={"method": "name"}))


def info(method: str, /, *, json: bool = False) -> None:
    """Show what a method is, with every setting, default, unit and source.

    Args:
        method: A name from `lmsmith list`.
        json: Print one JSON document and nothing else.
    """
    card = cards.get(method)
    settings = card.load("config").describe() if "config" in card.entry else []
    if json:
        show_json(card.to_dict() | {"settings": [row._asdict() for row in settings]})
        return
    from rich.markup import escape

    arxiv = f"arXiv {card.paper.arxiv}" if card.paper.arxiv else ""
    paper = (card.paper.title, card.paper.authors, card.paper.venue, arxiv)
    show(f"[name]{card.name}[/]: {escape(card.purpose)}")
    show_facts(
        {
            "family": card.family,
            "status": card.status,
            "paper": "; ".join(filter(None, paper)),
            "needs of a model": ", ".join(card.needs),
            "models at once": card.models or "any number",
            "commands": "\n".join(_commands(card)),
            "folder": card.folder,
        }
    )
    if settings:
        show("[heading]settings[/]")
    for row in settings:
        default = "none" if row.default is None else str(row.default)
        show(f"  [name]{row.name}[/] = {escape(default)}  [quiet]{escape(_kind(row))}[/]")
        show_below(escape(row.meaning), f"[quiet]source: {escape(row.source or 'not given')}[/]")
    for heading, lines in vars(card.sources).items():
        if lines:
            show(f"[heading]{SOURCES[heading]}[/]")
            show_below(*map(escape, lines))


def _kind(row: SettingRow) -> str:
    return f"{row.type}, {row.unit}" if row.unit else row.type


def _origin(card: cards.Card) -> str:
    return str(card.folder) if card.origin == "folder" else card.origin


def _commands(card: cards.Card) -> list[str]:
    commands = {
        "decoder": f"lmsmith generate MODEL PROMPT --method {card.name}",
        "bench": f"lmsmith bench {card.name}",
        "cli": f"lmsmith {card.name} --help",
    }
    return [command for kind, command in commands.items() if kind in card.entry]
