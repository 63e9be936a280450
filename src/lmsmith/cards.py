"""Find methods by their cards: what there is, without importing any of it.

A method is a folder with a `card.toml`. Cards come from three places: the methods inside the
package, packages that declare an entry point in the group `lmsmith.methods`, and the folders named
in `$LMSMITH_METHODS`. Reading a card imports nothing; `Card.load` imports one of its entries.

Not for: running methods, or their settings (`lmsmith.settings`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lmsmith.errors import (
    ConfigError,
    LmsmithError,
    MissingError,
    UnknownNameError,
    UsageError,
)

ENTRY_POINT_GROUP = "lmsmith.methods"
FOLDERS_VARIABLE = "LMSMITH_METHODS"
BUILT_IN = Path(__file__).parent / "methods"
FAMILIES = ("decode", "train", "measure", "agents", "defend")
STATUSES = ("stable", "experimental")
NEEDS = ("adapter", "bpe", "chat", "embedding", "hidden", "logits", "sentencepiece-bpe")

Kind = Literal["config", "decoder", "bench", "cli"]


@dataclass(frozen=True)
class Paper:
    """Where a method comes from."""

    title: str = ""
    authors: str = ""
    arxiv: str = ""
    venue: str = ""


@dataclass(frozen=True)
class Sources:
    """What in a method is the paper's and what is ours.

    Attributes:
        read: What was read (paper, official code) and followed.
        inferred: What the paper leaves open and how it was filled.
        measured: What was measured here rather than taken over.
        limits: What the method does not do.
    """

    read: tuple[str, ...] = ()
    inferred: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """What a method says of itself.

    Attributes:
        name: Name on the command line.
        purpose: One line.
        folder: Where its files are.
        family: One of `FAMILIES`, several joined by a comma.
        status: `stable` or `experimental`.
        needs: What the model must offer; see `LM.offers`.
        models: Most models its decoder takes at once; 0 is any number.
        paper: Where it comes from.
        sources: What is the paper's and what is ours.
        entry: Import paths `module:attribute` of its config, decoder, bench and cli.
        origin: `built-in`, `package` or `folder`.
    """

    name: str
    purpose: str
    folder: Path
    family: str = "decode"
    status: str = "experimental"
    needs: tuple[str, ...] = ()
    models: int = 1
    paper: Paper = Paper()
    sources: Sources = Sources()
    entry: Mapping[str, str] = field(default_factory=dict)
    origin: str = "built-in"

    def load(self, kind: Kind) -> Any:
        """Import one of the card's entries.

        Raises:
            UsageError: The method has no such entry.
            MissingError: A package that it needs is not installed.
            LmsmithError: The entry cannot be imported; the message has the reason.
        """
        if kind not in self.entry:
            has = ", ".join(sorted(self.entry)) or "nothing"
            raise UsageError(f"method {self.name!r} has no {kind}; its card declares {has}")
        self.make_importable()
        module, _, attribute = self.entry[kind].partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except LmsmithError:
            raise
        except ModuleNotFoundError as error:
            raise MissingError(
                f"method {self.name!r} cannot load its {kind} from {module}: {error}; "
                "install that module, or correct the path in card.toml"
            ) from error
        except Exception as error:
            raise LmsmithError(
                f"method {self.name!r} cannot load its {kind} from {self.entry[kind]}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def make_importable(self) -> None:
        """Put the parent of a folder from `$LMSMITH_METHODS` on the import path."""
        parent = str(self.folder.parent)
        if self.origin == "folder" and parent not in sys.path:
            sys.path.insert(0, parent)

    def to_dict(self) -> dict[str, Any]:
        """Everything on the card as plain values, for JSON."""
        return {
            "name": self.name,
            "family": self.family,
            "purpose": self.purpose,
            "status": self.status,
            "needs": list(self.needs),
            "models": self.models,
            "paper": vars(self.paper).copy(),
            "sources": {key: list(lines) for key, lines in vars(self.sources).items()},
            "entry": dict(self.entry),
            "origin": self.origin,
            "folder": str(self.folder),
        }


def read(folder: Path, origin: str = "folder") -> Card:
    """Read the card in a method's folder.

    Raises:
        ConfigError: The file is not TOML, or a key is unknown, missing or of the wrong type.
    """
    path = folder / "card.toml"
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None

    def table(key: str, known: Iterable[str]) -> dict[str, Any]:
        value = data.get(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {key!r} must be a table, [{key}]")
        _known_keys(path, value, known, where=f" in [{key}]")
        return value

    top = ("name", "family", "purpose", "status", "needs", "models", "paper", "entry", "sources")
    _known_keys(path, data, top)
    for key in ("name", "purpose"):
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise ConfigError(f"{path}: {key!r} must be a line of text")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", data["name"]):
        raise ConfigError(f"{path}: name {data['name']!r} must be lower-case words joined by '-'")
    family = data.get("family", "decode")
    for part in str(family).split(","):
        _choice(path, "family", part.strip(), FAMILIES)
    _choice(path, "status", data.get("status", "experimental"), STATUSES)
    for need in _lines(path, "needs", data.get("needs", [])):
        _choice(path, "needs", need, NEEDS)
    models = data.get("models", 1)
    if not isinstance(models, int) or isinstance(models, bool) or models < 0:
        raise ConfigError(f"{path}: 'models' must be a whole number, 0 for any number of them")
    entry = table("entry", ("config", "decoder", "bench", "cli"))
    for kind, target in entry.items():
        if not re.fullmatch(r"[\w.]+:\w+", str(target)):
            raise ConfigError(f"{path}: entry {kind} = {target!r} must be 'module:attribute'")
    paper = table("paper", vars(Paper()))
    sources = table("sources", vars(Sources()))
    return Card(
        name=data["name"],
        purpose=data["purpose"],
        folder=folder,
        family=family,
        status=data.get("status", "experimental"),
        needs=_lines(path, "needs", data.get("needs", [])),
        models=models,
        paper=Paper(**{key: str(value) for key, value in paper.items()}),
        sources=Sources(**{key: _lines(path, key, value) for key, value in sources.items()}),
        entry=entry,
        origin=origin,
    )


def find() -> dict[str, Card]:
    """Every method there is, by name, sorted.

    A folder in `$LMSMITH_METHODS` stands in front of a method of the same name, so that a copy can
    be worked on; two packages, or two such folders, with one name are an error.

    Raises:
        ConfigError: A card is wrong, or a name is taken twice.
    """
    found = _by_name(read(folder, "built-in") for folder in _folders(BUILT_IN))
    for name, card in _by_name(_packaged()).items():
        if name in found:
            raise ConfigError(
                f"{card.folder / 'card.toml'}: the name {name!r} belongs to a built-in method; "
                "uninstall that package or rename its method"
            )
        found[name] = card
    found |= _by_name(_in_folders())
    return dict(sorted(found.items()))


def get(name: str) -> Card:
    """The card of a method.

    Raises:
        UnknownNameError: No method has that name; the nearest is suggested.
        ConfigError: A card is wrong.
    """
    cards = find()
    if name not in cards:
        raise UnknownNameError("method", name, cards)
    return cards[name]


def _folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/card.toml"))


def _packaged() -> Iterable[Card]:
    if not _any_package():
        return
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINT_GROUP):
        # Looking a top-level package up imports nothing; a dotted one imports its parents only.
        try:
            spec = importlib.util.find_spec(point.value)
        except ImportError:
            spec = None
        for place in (spec and spec.submodule_search_locations) or ():
            if (Path(place) / "card.toml").is_file():
                yield read(Path(place), "package")
                break
        else:
            raise ConfigError(
                f"entry point {point.name!r} names {point.value!r}, which is no folder with a "
                "card.toml; reinstall or uninstall that package"
            )


def _any_package() -> bool:
    """Whether an installed package declares a method at all.

    Importing `importlib.metadata` and asking it costs more than everything else here together.
    """
    for place in sys.path:
        for path in Path(place).glob("*-info/entry_points.txt"):
            if f"[{ENTRY_POINT_GROUP}]" in path.read_text("utf-8", errors="replace"):
                return True
    return False


def _in_folders() -> Iterable[Card]:
    for name in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep):
        if not name:
            continue
        root = Path(name).expanduser().absolute()
        if not root.is_dir():
            raise ConfigError(f"${FOLDERS_VARIABLE} names {name!r}, which is not a folder")
        # Either one method's folder, or a folder of them.
        yield from map(read, [root] if (root / "card.toml").is_file() else _folders(root))


def _by_name(cards: Iterable[Card]) -> dict[str, Card]:
    found: dict[str, Card] = {}
    for card in cards:
        other = found.setdefault(card.name, card)
        if other.folder != card.folder:
            raise ConfigError(
                f"two methods are named {card.name!r}: {other.folder} and {card.folder}; "
                "rename one in its card.toml"
            )
    return found


def _known_keys(
    path: Path, table: Mapping[str, Any], known: Iterable[str], where: str = ""
) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{path}: unknown key {key!r}{where}; {hint}")


def _choice(path: Path, key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{path}: {key} {value!r} must be one of {', '.join(choices)}")


def _lines(path: Path, key: str, value: Any) -> tuple[str, ...]:
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ConfigError(f"{path}: {key!r} must be a list of strings")
    return tuple(lines)
