"""`lmsmith models`: known models, where each comes from, and what is on disk."""

from __future__ import annotations

from lmsmith.cli.output import emit, show


def list_models(*, json: bool = False) -> None:
    """List known models.

    Args:
        json: Print one JSON document and nothing else.
    """
    from lmsmith.models.known import KNOWN

    rows = [
        {
            "name": model.name,
            "what": model.what,
            "licence": model.licence,
            "source": model.source,
            "on_disk": model.on_disk(),
        }
        for model in KNOWN.values()
    ]
    if json:
        emit(rows)
        return
    from lmsmith.display.tables import Styled, Table

    marks = {True: Styled("yes", "pass"), False: Styled("no", "quiet")}
    show(
        Table(
            ["model", "on disk", "what", "licence", "from"],
            [[r["name"], marks[r["on_disk"]], r["what"], r["licence"], r["source"]] for r in rows],
            note="A folder, a hub id or a .gguf file opens as well.",
            styles={"model": "name"},
        )
    )


def pull(name: str, /, *, force: bool = False, json: bool = False) -> None:
    """Fetch a known model, so that it opens in seconds.

    Args:
        name: A name from `lmsmith models`.
        force: Fetch and convert it again, even if it is on disk.
        json: Print one JSON document and nothing else.
    """
    from lmsmith.models.known import pull

    folder = pull(name, force=force)
    if json:
        emit({"name": name, "folder": str(folder)})
    else:
        show(str(folder))


def remove(name: str, /, *, json: bool = False) -> None:
    """Remove a known model from the disk.

    Args:
        name: A name from `lmsmith models`.
        json: Print one JSON document and nothing else.
    """
    from lmsmith.models.known import remove

    removed = remove(name)
    if json:
        emit({"name": name, "removed": removed})
    else:
        show(f"removed {name}" if removed else f"{name} was not on disk")
