"""`lmsmith models`: known models, where each comes from, and what is on disk."""

from __future__ import annotations

from lmsmith.display.console import show, show_below, show_json


def list_models(*, json: bool = False) -> None:
    """List known models.

    Args:
        json: Print one JSON document and nothing else.
    """
    from lmsmith.models.known import status

    models = status()
    if json:
        show_json(models)
        return
    from rich.filesize import decimal

    for model in models:
        place = f"on disk, {decimal(model['size'])}" if model["on_disk"] else "not on disk"
        show(f"[name]{model['name']}[/]  [{'pass' if model['on_disk'] else 'quiet'}]{place}[/]")
        show_below(
            model["what"],
            f"{model['licence']}; {decimal(model['download'])} from {model['source']}",
        )
    show("A folder, a hub id or a .gguf file opens as well.")


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
        show_json({"name": name, "folder": str(folder)})
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
        show_json({"name": name, "removed": removed})
    else:
        show(f"removed {name}" if removed else f"{name} was not on disk")
