"""Start a method from a working one, or take a method out of the package to edit it.

A method's folder knows its own package only by the import paths in its files and its own name only
by the quoted word in its card and commands, so a copy is the folder with both replaced.
"""

from __future__ import annotations

import keyword
import re
import shutil
import sys
from pathlib import Path

from lmsmith import cards
from lmsmith.errors import StorageError, UsageError

TEMPLATE = Path(__file__).parent / "template"
_SKIPPED = ("__pycache__",)


def new(name: str, directory: Path) -> Path:
    """Make the folder of a new method, complete and with a test that passes at once.

    Args:
        name: Its name on the command line, such as `my-method`.
        directory: Where the folder goes.

    Raises:
        UsageError: The name cannot be used or is taken, or the folder is there already.
        StorageError: The folder cannot be written.
    """
    words = name.replace("_", "-")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", words):
        raise UsageError(f"{name!r} cannot name a method; use lower-case words joined by '-'")
    if words in cards.find():
        raise UsageError(f"there is already a method {words!r}; choose another name")
    package = words.replace("-", "_")
    _check_package(package)
    built_in = directory.resolve() == cards.BUILT_IN.resolve()
    return _copy(
        TEMPLATE,
        directory / package,
        {
            "lmsmith.scaffold.template": f"lmsmith.methods.{package}" if built_in else package,
            "template_method": package,
            "template-method": words,
            "TemplateMethod": "".join(word.capitalize() for word in words.split("-")),
        },
    )


def copy(card: cards.Card, folder: Path) -> Path:
    """Copy a method's folder out, under the name of its new folder.

    Args:
        card: The method to copy.
        folder: The new folder; its name is the copy's package and, with '-' for '_', its method.

    Raises:
        UsageError: The folder is there already, or its name cannot name a package.
        StorageError: The folder cannot be written.
    """
    package = folder.absolute().name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", package):
        raise UsageError(
            f"{package!r} cannot name a package; give a folder like ./my_{card.folder.name}"
        )
    _check_package(package)
    # What the card's entries have in common is the package they live in.
    old = {target.partition(":")[0].rpartition(".")[0] for target in card.entry.values()}
    changed = {path: package for path in old if path}
    name = package.replace("_", "-")
    words = {f'"{card.name}"': f'"{name}"', f"`{card.name}`": f"`{name}`"}
    return _copy(card.folder, folder, changed | words)


def _check_package(package: str) -> None:
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or package == "lmsmith":
        raise UsageError(f"{package!r} is taken by Python itself; choose another name")


def _copy(source: Path, target: Path, replaced: dict[str, str]) -> Path:
    if target.exists():
        raise UsageError(f"{target} is there already; remove it or choose another name")

    # Whole dotted paths and words only, never a part of a longer one; class names go on.
    patterns = {
        re.compile(rf"(?<![\w.-]){re.escape(old)}(?![a-z0-9_-])"): fresh
        for old, fresh in replaced.items()
    }

    def rename(text: str) -> str:
        for pattern, fresh in patterns.items():
            text = pattern.sub(fresh, text)
        return text

    try:
        for path in sorted(source.rglob("*")):
            inside = path.relative_to(source)
            if not path.is_file() or any(part in _SKIPPED for part in inside.parts):
                continue
            name = path.name
            for old, fresh in replaced.items():
                name = name.replace(old, fresh)
            place = target / inside.with_name(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix in (".py", ".toml", ".md"):
                place.write_text(rename(path.read_text("utf-8")), "utf-8")
            else:
                place.write_bytes(path.read_bytes())
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise StorageError(f"cannot write {target}: {error.strerror}") from error
    return target
