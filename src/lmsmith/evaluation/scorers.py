"""Scores of an answer against a reference, as plain functions.

Not for: asking the model (methods and benches do that).
"""

from __future__ import annotations

import re
import unicodedata

# A sign counts only where it cannot be a minus between two numbers.
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
)


def exact_match(answer: str, reference: str) -> bool:
    """Whether the texts agree, but for case, spacing and Unicode form."""

    def plain(text: str) -> str:
        return " ".join(unicodedata.normalize("NFKC", text).casefold().split())

    return plain(answer) == plain(reference)


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators allowed; `None` if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
