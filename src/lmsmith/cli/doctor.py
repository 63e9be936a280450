"""`lmsmith doctor`: is this machine ready, and what would it use."""

from __future__ import annotations

from typing import Any

from lmsmith.display.console import show, show_json


def doctor(*, json: bool = False) -> int:
    """Check whether this machine is ready; exit code 3 when something needed is missing.

    Args:
        json: Print one JSON document and nothing else.
    """
    checks = examine()
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


def examine() -> list[dict[str, Any]]:
    """Every check, as rows of `what`, `found`, `ok` and `hint`."""
    return [*_packages(), *_hardware(), *_storage(), *_methods()]


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
    import os

    from lmsmith.evaluation.environment import available_cores, cpu_name, fastest_threads

    cores = f"{available_cores()} usable of {os.cpu_count()}"
    rows = [_row("processor", cpu_name()), _row("CPU cores", cores)]
    try:
        import torch
    except Exception as error:
        return [*rows, _row("torch", f"{type(error).__name__}: {error}", False, "reinstall torch")]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count)]
    threads = (
        f"{fastest_threads(repeats=1)} is fastest now; commands choose it, OMP_NUM_THREADS sets it"
    )
    return [
        *rows,
        _row("CPU instructions", torch.backends.cpu.get_cpu_capability()),
        _row("torch threads", threads),
        _row("accelerators", ", ".join(devices) or "none; models run on the CPU"),
    ]


def _storage() -> list[dict[str, Any]]:
    import os
    import shutil

    from lmsmith.models.cache import HINT, cache_dir

    place = root = cache_dir()
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK)):
        return [_row("model cache", f"{root} cannot be written", False, HINT)]
    free = shutil.disk_usage(place).free / 1e9
    return [_row("model cache", f"{root}, {free:.1f} GB free", free > 1, HINT)]


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
