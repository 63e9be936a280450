"""What a stream may hold, and what becomes of an item that cannot be answered.

A stream item is a prompt (text, UTF-8 bytes, token ids, chat messages) or a mapping with one under
`prompt`, `messages`, `question` or `instruction`, and an `id` if it has a name. Anything else is
skipped with the reason; an adapting model must not stop for one bad line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmsmith.errors import UsageError
from lmsmith.methods.fg_ttl.config import FGTTLConfig
from lmsmith.models import LM

_PROMPT_FIELDS = ("messages", "prompt", "question", "instruction")


@dataclass(frozen=True)
class Item:
    """One item of a stream, read.

    Attributes:
        place: Its place in the stream, from 0.
        id: Its name; its place without one.
        prompt_ids: Token ids of its prompt; none if it is skipped.
        skipped: Why it cannot be answered; empty if it can.
    """

    place: int
    id: str
    prompt_ids: tuple[int, ...] = ()
    skipped: str = ""


@dataclass(frozen=True)
class Malformed:
    """What stands in a stream for something that could not be read."""

    reason: str


def read_items(
    lm: LM, stream: Iterable[Any], config: FGTTLConfig, chat: bool = False
) -> Iterator[Item]:
    """Read a stream's items as they come.

    Args:
        lm: The model that will answer.
        stream: See the module.
        config: Says how long a prompt may be, and what happens to a longer one.
        chat: Put plain text into the model's chat template.
    """
    for place, raw in enumerate(stream):
        name = raw.get("id", place) if isinstance(raw, Mapping) else place
        try:
            yield Item(place, str(name), tuple(_prompt_ids(lm, raw, config, chat)))
        except UsageError as error:
            yield Item(place, str(name), skipped=str(error))


def read_lines(path: str | Path) -> Iterator[Any]:
    """A stream from a file: one JSON value a line in `.jsonl`, one text a line otherwise.

    Lines are read as they are needed; empty ones are skipped items too.

    Raises:
        UsageError: The file cannot be opened.
    """
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    return _lines(file, path.suffix in (".jsonl", ".ndjson"))


def _lines(file: Any, as_json: bool) -> Iterator[Any]:
    with file:
        for line in file:
            try:
                text = line.decode("utf-8").rstrip("\r\n")
                yield json.loads(text) if as_json and text.strip() else text
            except UnicodeDecodeError as error:
                yield Malformed(f"the line is not UTF-8: byte 0x{line[error.start]:02x}")
            except ValueError as error:
                yield Malformed(f"the line is not JSON: {error}")


def _prompt_ids(lm: LM, raw: Any, config: FGTTLConfig, chat: bool) -> list[int]:
    prompt = _prompt(raw)
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    ids = _cut(lm, prompt, config) if config.too_long == "cut" else lm.prompt_ids(prompt)
    if len(ids) > config.prompt_tokens:
        raise UsageError(
            f"the prompt has {len(ids):,} tokens, more than prompt_tokens {config.prompt_tokens:,}"
        )
    if len(ids) >= lm.context:
        raise UsageError(f"the prompt fills {lm.name}'s context of {lm.context:,} tokens")
    return ids


def _cut(lm: LM, prompt: Any, config: FGTTLConfig) -> list[int]:
    # Longer than the context is no mistake here, so ids are made before prompt_ids checks them.
    if isinstance(prompt, str) and lm.tokenizer is not None:
        prompt = lm.encode(prompt)
    elif not isinstance(prompt, bytes) and len(prompt) and isinstance(prompt[0], Mapping):
        prompt = lm.chat_ids(prompt)
    ids = (
        prompt if isinstance(prompt, bytes) else prompt[: min(config.prompt_tokens, lm.context - 1)]
    )
    return lm.prompt_ids(ids)[: config.prompt_tokens]


def _prompt(raw: Any) -> Any:
    if isinstance(raw, Malformed):
        raise UsageError(raw.reason)
    if isinstance(raw, Mapping):
        field = next((name for name in _PROMPT_FIELDS if name in raw), None)
        if field is None:
            raise UsageError(f"the item has none of {', '.join(_PROMPT_FIELDS)}")
        extra = raw.get("input") if field == "instruction" else None
        raw = f"{raw[field]}\n{extra}" if extra else raw[field]
    if not isinstance(raw, str | bytes | list | tuple):
        raise UsageError(f"the item is {type(raw).__name__}, not a prompt")
    if not len(raw) or (isinstance(raw, str | bytes) and not raw.strip()):
        raise UsageError("the prompt is empty")
    return raw
