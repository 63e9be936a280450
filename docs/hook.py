"""mkdocs hook: the table of methods is made from the cards, so that no page has to be kept up."""

from pathlib import Path
from typing import Any

from lmsmith import cards

MARK = "<!-- methods -->"
PAGES = Path(__file__).parent / "methods"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table where a page asks for it.

    Raises:
        FileNotFoundError: A built-in method has no page.
    """
    if MARK not in markdown:
        return markdown
    lines = ["| method | family | status | paper |", "| --- | --- | --- | --- |"]
    for card in cards.find().values():
        if card.origin != "built-in":
            continue
        if not (PAGES / f"{card.name}.md").is_file():
            raise FileNotFoundError(f"docs/methods/{card.name}.md is missing")
        paper = card.paper.title
        if card.paper.arxiv:
            paper = f"[{paper}](https://arxiv.org/abs/{card.paper.arxiv})"
        name = f"[{card.name}](methods/{card.name}.md)"
        lines.append(f"| {name}: {card.purpose} | {card.family} | {card.status} | {paper} |")
    return markdown.replace(MARK, "\n".join(lines))
