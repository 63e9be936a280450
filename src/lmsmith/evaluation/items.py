"""Items to measure on, from a list, a file or a data set of the hub.

Not for: what is done with them (`bench`, `scorers`).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from lmsmith.errors import DataSourceError, MissingDependencyError, UsageError


@dataclass(frozen=True)
class Item:
    """One thing to measure on.

    Attributes:
        id: Its name, unique within a list; results are kept under it.
        fields: What is known of it; plain JSON values and bytes.
    """

    id: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def number_items(rows: Iterable[Mapping[str, Any]]) -> list[Item]:
    """Items named by their place in the list."""
    return [Item(str(number), dict(row)) for number, row in enumerate(rows)]


def load_items(
    source: str | Path,
    *,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
    id_field: str | None = None,
    split: str = "train",
    name: str | None = None,
) -> list[Item]:
    """Read items from a local file or from a data set of the hub.

    Args:
        source: A `.jsonl`, `.csv` or `.parquet` file, or the hub id of a data set.
        limit: Read at most this many.
        columns: Names of the columns of a CSV file that has no header.
        id_field: The field that names an item; its place in the file when `None`.
        split: Split of a hub data set.
        name: Configuration of a hub data set.

    Raises:
        UsageError: The file is missing, is not what its ending says, or two items share an id.
        MissingDependencyError: Parquet or the hub is asked for without the `data` extra.
        DataSourceError: The hub does not answer or has no such data set.
    """
    path = Path(source)
    kind = path.suffix.lower()
    if kind in (".jsonl", ".csv", ".parquet") and not path.is_file():
        raise UsageError(f"no file {path}")
    if kind not in (".jsonl", ".csv", ".parquet") and path.is_file():
        raise UsageError(f"{path} is not a .jsonl, .csv or .parquet file")
    if kind == ".jsonl":
        rows: Iterable[Mapping[str, Any]] = _jsonl(path)
    elif kind == ".csv":
        rows = _csv(path, columns)
    else:
        rows = _datasets(path if kind == ".parquet" else str(source), name, split)
    try:
        items = number_items(islice(rows, limit))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if id_field is not None:
        items = [_renamed(item, id_field, source) for item in items]
    check_unique(items)
    return items


def check_unique(items: Sequence[Item]) -> None:
    """Make sure that no two items share an id.

    Raises:
        UsageError: Two do; the message names one such id.
    """
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise UsageError(f"two items are named {item.id!r}; every item needs its own id")
        seen.add(item.id)


def _renamed(item: Item, id_field: str, source: str | Path) -> Item:
    if id_field not in item.fields:
        raise UsageError(f"item {item.id} of {source} has no field {id_field!r} to name it by")
    return Item(str(item.fields[id_field]), item.fields)


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path} line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UsageError(f"{path} line {number} is not a JSON object")
            yield row


def _csv(path: Path, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        names = list(columns) if columns is not None else next(reader, [])
        for row in reader:
            if not row:
                continue
            if len(row) != len(names):
                raise UsageError(
                    f"{path} line {reader.line_num} has {len(row)} columns, expected {len(names)}"
                )
            yield dict(zip(names, row, strict=True))


@contextmanager
def _cache_only_when_hub_is_silent() -> Iterator[None]:
    """Look in the local cache alone when no hub answers; its clients would retry for long."""
    import datasets.config
    import httpx
    import huggingface_hub.constants as hub

    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    try:
        httpx.head(hub.ENDPOINT, timeout=5)
        silent = False
    except httpx.HTTPError:
        silent = True
    if silent:
        hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _datasets(source: str | Path, name: str | None, split: str) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError("datasets", "data") from error
    try:
        if isinstance(source, Path):
            return datasets.Dataset.from_parquet(str(source))
        with _cache_only_when_hub_is_silent():
            return datasets.load_dataset(source, name, split=split)
    except Exception as error:  # its loaders raise whatever pyarrow or the network raised
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(source, Path):
            raise UsageError(f"{source} is not a parquet file: {first}") from error
        raise DataSourceError(
            f"the data set {source!r} could not be loaded: {first}; "
            "check its id and the connection, or give a local .jsonl, .csv or .parquet file"
        ) from error
