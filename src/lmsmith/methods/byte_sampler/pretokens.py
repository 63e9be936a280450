"""Where a tokenizer splits a text before BPE, and what text still to come can change about it.

Pre-tokenizers are regular expressions that look ahead: whether `don'` is split depends on the
letter that follows. They are never parsed here. The tokenizer's own pre-tokenizer is run on the
open end of the text followed by *witnesses*, short continuations that between them take every
branch such expressions have: contractions, runs of spaces and line ends, groups of digits, case,
scripts, marks. Every way of splitting the open end that some witness brings about is kept as a
hypothesis; the next character decides which ones remain.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Any, NamedTuple

from lmsmith.errors import CapabilityError

Splits = tuple[int, ...]
"""Positions strictly inside a text, in characters, rising."""

# Letters that continue contractions come in both cases; "1".."12" with nothing cover the three
# alignments of digit groups; a mark, CJK and others outside ASCII stand for their classes.
WITNESSES: tuple[str, ...] = (
    *("", "a", "A", "s", "t", "re", "ve", "ll", "e", "l", "m", "d"),
    *("S", "T", "RE", "VE", "LL", "E", "L", "M", "D", "aA", "Aa"),
    *("1", "12", "1a", " ", "  ", " a", "  a", "\n", "\n\n", "\na", "\n a", " \n", " \na", "  \n"),
    *("\r\n", "\t", "\ta", ".", ". ", ".\n", ".a", "'", "'s", "'a", "/", "_", "_a", "-"),
    *("中", "é", "あ", "\u0301", "\u0301a", "ا", "٣", "😀", "\u00a0", "\u3000a", "\u200d"),
)

# Inside a single word, with at most a space before it, only the kind of what follows matters.
_WORD = re.compile(r" ?[^\W\d_]+\Z")
_WORD_WITNESSES = ("", "a", "A", "1", " ", ".", "'", "'s", "'a", "\u0301", "中", "\n")
# Deep inside one long pre-token (a run of dashes, of spaces, of letters) every probe is long too.
_LONG = 48
_LONG_WITNESSES = (
    *("", "a", "A", "s", "t", "e", "l", "E", "L", "1", "12", " ", " a", "\n", ".", "'s", "/"),
)

# After a character that is given, or one that stands for others.
_AFTER_ASCII = ("", "a", "s", "l", "e", "1", "12", " ", "\n")
_AFTER_START = ("", "a", " ")

_CACHED = 100_000


class Outcomes(NamedTuple):
    """How an open end may be split."""

    hypotheses: tuple[Splits, ...]
    complete: Splits  # where the text ends here


class Splitter:
    """Asks a tokenizer's pre-tokenizer where it splits.

    Attributes:
        never: The tokenizer does not split at all.
    """

    def __init__(self, tokenizer: Any, state: dict[str, Any], space: str) -> None:
        self._pre_tokenizer = tokenizer.pre_tokenizer
        self._space = space
        description = state.get("pre_tokenizer")
        self.never = description is None or _never_splits(description, space, state)
        self._outcomes: dict[str, Outcomes] = {}
        self._separable: dict[tuple[str, int], bool] = {}
        self._before: dict[tuple[str, bytes], tuple[bool, ...]] = {}
        self._endings: dict[tuple[str, str], frozenset[Splits]] = {}
        if not self.never:
            for sample in ("a b, c's 12345 \n \n  d\t.中文\r\n", "don't   X_y  "):
                self.splits(sample)

    def splits(self, text: str) -> Splits:
        """Where a text is split, taken as complete.

        Raises:
            CapabilityError: The pre-tokenizer drops or adds text.
        """
        if self.never or not text:
            return ()
        pieces = self._pre_tokenizer.pre_tokenize_str(text)
        positions, end = [], 0
        for _, (start, stop) in pieces:
            if start != end:
                raise CapabilityError(
                    "byte-sampler", "a tokenizer that keeps all text", "one that drops some of it"
                )
            positions.append(start)
            end = stop
        if end != len(text):
            raise CapabilityError(
                "byte-sampler", "a tokenizer that keeps all text", "one that drops some of it"
            )
        return tuple(positions[1:])

    def outcomes(self, tail: str) -> Outcomes:
        """Every way in which text to come may leave `tail` split inside.

        A split at the very end of `tail` is left open.
        """
        known = self._outcomes.get(tail)
        if known is None:
            size = len(tail)
            found: dict[Splits, None] = {}
            for witness in _witnesses(tail):
                splits = self.splits(tail + witness)
                while splits and splits[-1] >= size:
                    splits = splits[:-1]
                found[splits] = None
            known = Outcomes(tuple(found), next(iter(found)))
            if size <= 2 * _LONG:
                _trim(self._outcomes)[tail] = known
        return known

    def separable(self, tail: str, at: int) -> bool:
        """Whether, whatever follows, `tail` keeps its splits up to one and then splits as if new.

        Splitters that look back need the text before.
        """
        known = self._separable.get((tail, at))
        if known is None:
            until = tuple(p for p in self.splits(tail) if p <= at)
            known = all(
                self.splits(tail + witness)
                == (*until, *(p + at for p in self.splits(tail[at:] + witness)))
                for witness in _LONG_WITNESSES
            )
            if len(tail) <= 2 * _LONG:
                _trim(self._separable)[tail, at] = known
        return known

    def forgettable(self, tail: str) -> int:
        """Characters at the start of a long `tail` that no longer matter to how it is split.

        0 if there are none. Inside one long pre-token the whole of it need not be looked at again
        with every character, which would take time in its square.
        """
        if len(tail) < 2 * _LONG or len(tail) % _LONG:
            return 0
        drop = len(tail) - _LONG
        for witness in WITNESSES:
            if self.splits(tail + witness) != tuple(
                p + drop for p in self.splits(tail[drop:] + witness)
            ):
                return 0
        return drop

    def splits_before(self, tail: str, pending: bytes) -> tuple[bool, ...]:
        """Whether a split may come right before an unfinished character: some of (False, True).

        Args:
            tail: The open end before it, not empty.
            pending: The first bytes of the character's UTF-8.
        """
        known = self._before.get((tail, pending))
        if known is None:
            here, found = len(tail), set()
            starts = representatives(pending)
            if here > _LONG:
                starts = tuple({unicodedata.category(start): start for start in starts}.values())
            for start in starts:
                for witness in _AFTER_START:
                    found.add(here in self.splits(tail + start + witness))
                if len(found) == 2:
                    break
            known = tuple(sorted(found))
            if here <= 2 * _LONG:
                _trim(self._before)[tail, pending] = known
        return known

    def endings(self, tail: str, following: str) -> frozenset[Splits]:
        """Ways to split `tail`, its end included, before text that begins with a character."""
        known = self._endings.get((tail, following))
        if known is None:
            size = len(tail)
            witnesses = _AFTER_ASCII if following.isascii() else _AFTER_START
            known = frozenset(
                tuple(p for p in self.splits(tail + following + witness) if p <= size)
                for witness in witnesses
            )
            if size <= 2 * _LONG:
                _trim(self._endings)[tail, following] = known
        return known


def _trim(cache: dict[Any, Any]) -> dict[Any, Any]:
    if len(cache) > _CACHED:
        cache.clear()
    return cache


def _witnesses(tail: str) -> tuple[str, ...]:
    if _WORD.match(tail):
        return _WORD_WITNESSES
    return WITNESSES if len(tail) <= _LONG else _LONG_WITNESSES


def _never_splits(description: dict[str, Any], space: str, state: dict[str, Any]) -> bool:
    kind = description["type"]
    if kind == "Sequence":
        return all(_never_splits(d, space, state) for d in description["pretokenizers"])
    if kind == "ByteLevel":
        return not description.get("use_regex", True)
    # The normalizer has already rewritten every space that this one looks for.
    return kind == "Split" and bool(space) and description["pattern"].get("String") == " "


@lru_cache(maxsize=4096)
def representatives(pending: bytes) -> tuple[str, ...]:
    """Characters whose UTF-8 starts with `pending`: some of every general category and block.

    The first and the last of each, as scripts seldom begin where blocks do.
    """
    first, last = completions(pending)
    stride = max(0x80, (last - first + 1) // 32)
    lowest: dict[tuple[str, int], str] = {}
    highest: dict[tuple[str, int], str] = {}
    for point in range(first, last + 1, 1 + (last - first) // 0x8000):
        if 0xD800 <= point < 0xE000:
            continue  # surrogates are not characters
        character = chr(point)
        key = unicodedata.category(character), (point - first) // stride
        lowest.setdefault(key, character)
        highest[key] = character
    return tuple(dict.fromkeys((*lowest.values(), *highest.values())))


def completions(pending: bytes) -> tuple[int, int]:
    """First and last code point whose UTF-8 starts with `pending` (1 to 3 bytes of it)."""
    lead = pending[0]
    length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    point = lead & (0x7F >> length)
    for byte in pending[1:]:
        point = point << 6 | byte & 0x3F
    missing = 6 * (length - len(pending))
    lowest = {2: 0x80, 3: 0x800, 4: 0x10000}[length]
    return max(point << missing, lowest), min((point + 1 << missing) - 1, 0x10FFFF)


@lru_cache(maxsize=4096)
def continuation_bytes(pending: bytes) -> frozenset[int]:
    """Bytes that may follow in UTF-8; after a whole character, as after nothing, any first byte."""
    if not pending:
        return _FIRST
    lead = pending[0]
    length = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    if len(pending) >= length:
        return _FIRST
    if len(pending) == 1 and lead in _SECOND:
        return frozenset(range(*_SECOND[lead]))
    return frozenset(range(0x80, 0xC0))


_FIRST = frozenset([*range(0x80), *range(0xC2, 0xF5)])
# No overlong forms, no surrogates, nothing above U+10FFFF.
_SECOND = {0xE0: (0xA0, 0xC0), 0xED: (0x80, 0xA0), 0xF0: (0x90, 0xC0), 0xF4: (0x80, 0x90)}


def opening_of(spelling: bytes) -> str | bytes | None:
    """What a token's spelling says of the character it begins with.

    Returns:
        A character of its class (category and block; ASCII stands for itself), or the first bytes
        of one, or None where it begins inside a character.
    """
    if spelling[0] not in _FIRST:
        return None
    for size in range(1, 5):
        start = spelling[:size]
        if continuation_bytes(start) is _FIRST:
            return _class_of(start.decode())
        if any(a not in continuation_bytes(spelling[:i]) for i, a in enumerate(start) if i):
            return None
        if size >= len(spelling):
            return start
    return None


def _class_of(character: str) -> str:
    if character.isascii():
        return character
    key = unicodedata.category(character), ord(character) >> 10
    return _CLASSES.setdefault(key, character)


_CLASSES: dict[tuple[str, int], str] = {}
