"""`lmsmith doctor`: is this machine ready, and what would it use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmsmith.display.console import show, show_json


def doctor(*, registry: bool = False, json: bool = False) -> int:
    """Check whether this machine is ready; exit code 3 when something needed is missing.

    Args:
        registry: Also ask whether the package registry answers.
        json: Print one JSON document and nothing else.
    """
    checks = examine(registry)
    ready = all(check["ok"] for check in checks)
    if json:
        show_json({"ready": ready, "checks": checks})
        return 0 if ready else 3
    from rich.markup import escape

    from lmsmith.display.tables import Styled, Table

    marks = {True: Styled("ok", "pass"), False: Styled("wrong", "miss")}
    show(Table(["", "what", "found"], [[marks[c["ok"]], c["what"], c["found"]] for c in checks]))
    show("Ready." if ready else "Not ready:")
    for check in checks:
        if not check["ok"]:
            show(f"- {escape(check['what'])}: {escape(check['hint'])}")
    return 0 if ready else 3


def examine(registry: bool = False) -> list[dict[str, Any]]:
    """Every check, as rows of `what`, `found`, `ok` and `hint`."""
    rows = [*_packages(), *_hardware(), *_storage(), *_methods()]
    if registry:
        from lmsmith.models.doctor import registry_answers

        ok = registry_answers()
        hint = "check the network and pip's settings: python -m pip config list"
        rows.append(_row("package registry", "answers" if ok else "does not answer", ok, hint))
    return rows


def _row(what: str, found: Any, ok: bool = True, hint: str = "") -> dict[str, Any]:
    return {"what": what, "found": str(found), "ok": ok, "hint": "" if ok else hint}


def _packages() -> list[dict[str, Any]]:
    import platform
    import re
    from importlib.metadata import PackageNotFoundError, requires, version

    from lmsmith import __version__

    rows = [_row("python", platform.python_version()), _row("lmsmith", __version__)]
    try:
        needed = [line for line in requires("lmsmith") or () if "extra ==" not in line]
    except PackageNotFoundError:
        needed = []
    for line in needed:
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        try:
            rows.append(_row(name, version(name)))
        except PackageNotFoundError:
            rows.append(_row(name, "missing", False, f"python -m pip install '{line}'"))
    return rows


def _hardware() -> list[dict[str, Any]]:
    from lmsmith.evaluation.environment import cpu_name, fastest_threads
    from lmsmith.models.doctor import hardware, memory, usable_cores

    rows = [_row("processor", f"{cpu_name()}, {usable_cores()} cores usable")]
    try:
        found = hardware()
    except Exception as error:
        return [*rows, _row("torch", f"{type(error).__name__}: {error}", False, "reinstall torch")]
    sizes = {name: size for name, size in memory().items() if size is not None}
    fixed = bool(os.environ.get("OMP_NUM_THREADS"))
    why = "as OMP_NUM_THREADS says" if fixed else "the fastest just now; OMP_NUM_THREADS fixes it"
    return [
        *rows,
        _row("memory", ", ".join(f"{size / 1e9:.1f} GB {name}" for name, size in sizes.items())),
        _row("torch threads", f"{fastest_threads(repeats=1)}, {why}"),
        _row("accelerators", ", ".join(found["accelerators"]) or "none; models run on the CPU"),
        _row("device and dtype", f"auto is {found['device']}, {found['dtype']}"),
    ]


def _storage() -> list[dict[str, Any]]:
    from lmsmith.models.cache import HINT
    from lmsmith.models.doctor import cache

    found = cache()
    folder = Path(found["folder"])
    in_the_way = any(place.is_file() for place in (folder, *folder.parents))
    if in_the_way or not found["writable"]:
        return [_row("model cache", f"{found['folder']} cannot be written", False, HINT)]
    free = found["free"] / 1e9
    return [_row("model cache", f"{found['folder']}, {free:.1f} GB free", free > 1, HINT)]


def _methods() -> list[dict[str, Any]]:
    from lmsmith import cards
    from lmsmith.errors import LmsmithError

    rows = []
    try:
        found = cards.find()
    except LmsmithError as error:
        return [_row("methods", "not readable", False, str(error))]
    for card in found.values():
        for kind in card.entry:
            try:
                card.load(kind)  # type: ignore[arg-type]
            except LmsmithError as error:
                rows.append(_row(f"method {card.name}", f"{kind} fails", False, str(error)))
    return [_row("methods", ", ".join(found) or "none"), *rows]
