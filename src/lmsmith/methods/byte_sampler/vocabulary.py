"""A tokenizer's vocabulary as bytes: what every token spells, and which tokens may be neighbours.

Two families of BPE are read: byte-level (base symbols are the 256 bytes in GPT-2's alphabet) and
SentencePiece-style (base symbols are characters, a space is written as U+2581, and a character
that is not in the vocabulary becomes one token a byte). Needs no torch.
"""

from __future__ import annotations

import gc
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import add
from typing import Any

import numpy as np
from pydantic_core import from_json

from lmsmith.errors import CapabilityError
from lmsmith.methods.byte_sampler.merges import Merges
from lmsmith.methods.byte_sampler.pretokens import Splitter, opening_of

SPACE = "▁"
"""How SentencePiece vocabularies write a space."""

_CACHED = 1_000_000


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


class ByteTokens:
    """What the tokens of one BPE tokenizer spell. Build it with `from_tokenizer`.

    Attributes:
        kind: "byte-level" or "sentencepiece".
        size: One more than the highest token id.
        spelling: Bytes of each ordinary token; None for special, added and never used ids.
        special_ids: Ids that stand for no text (end of text, chat markers).
        added: Text of added tokens that are not special, by id. They are matched in a text before
            BPE runs.
        literals: Every added token's text, special or not, and its id.
        sorted_ids: Ids of ordinary tokens in the order of their spelling  # [ordinary]
        proper: Whether merges come after the merges that build their operands (informative: pair
            validity is exact either way).
        reencode: The replay of merges was wrong for a sampled pair, so the tokenizer itself is
            asked about every pair.
        whole_words: The tokenizer takes a pre-token that is in the vocabulary as it is, without
            merging (`ignore_merges`).
    """

    def __init__(self, tokenizer: Any, state: dict[str, Any]) -> None:
        model = state["model"]
        self._tokenizer = tokenizer
        self.kind, self._space = _family(state)
        self.rewrites_spaces = bool(self._space)
        self.whole_words = bool(model.get("ignore_merges"))
        vocabulary: dict[str, int] = model["vocab"]
        added = state.get("added_tokens") or []
        self.size = 1 + max([*vocabulary.values(), *(a["id"] for a in added)], default=-1)
        self.special_ids = frozenset(a["id"] for a in added if a["special"])
        self.literals: dict[str, int] = _literals(tokenizer, added)
        self.spelling: list[bytes | None] = [None] * self.size
        self.byte_ids: list[int] = [-1] * 256
        self.characters: dict[str, int] = {}
        if self.kind == "byte-level":
            self._read_byte_level(vocabulary)
        else:
            self._read_characters(vocabulary, bool(model.get("byte_fallback")))
        self._merges = self._read_merges(vocabulary, model["merges"])
        self.proper = self._merges.proper
        self._drop_unused()
        self.added = {
            i: content.encode()
            for content, i in self.literals.items()
            if i not in self.special_ids and self.spelling[i] is None
        }
        spelled = {i: s for i, s in enumerate(self.spelling) if s is not None}
        order = sorted(spelled, key=spelled.__getitem__)
        self._sorted = [spelled[token] for token in order]
        self.sorted_ids = np.array(order, dtype=np.int64)
        self.literal_starts = frozenset(content[0] for content in self.literals)
        self._literals = sorted(self.literals)
        self._lengths = sorted({len(content) for content in self.literals}, reverse=True)
        self._added = sorted(
            (content.encode(), i)
            for content, i in self.literals.items()
            if i not in self.special_ids
        )
        self._contents = {i: content for content, i in self.literals.items()}
        self._openings: dict[str | bytes, list[int]] | None = None
        self._steps: dict[bytes, tuple[bool, tuple[int, ...]]] = {}
        self._valid: dict[int, bool] = {}
        self.reencode = False
        self.splitter = Splitter(tokenizer, state, self._space if self.kind != "byte-level" else "")
        # Where the replay of merges disagrees with the tokenizer, the tokenizer is asked instead.
        if self.self_test(pairs=200):
            self.reencode = True
            self._valid.clear()

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> ByteTokens:
        """Read a fast tokenizer of transformers, or a `tokenizers.Tokenizer`.

        Raises:
            CapabilityError: It is not a BPE with merges, or has a part that cannot be read.
        """
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(backend, "to_str"):
            raise _refuse(f"a slow tokenizer ({type(tokenizer).__name__})")
        collecting = gc.isenabled()
        gc.disable()  # half a million small lists are not garbage, and looking at them is slow
        try:
            return cls._read(backend)
        finally:
            if collecting:
                gc.enable()

    @classmethod
    def _read(cls, backend: Any) -> ByteTokens:
        state = from_json(backend.to_str(), cache_strings="keys")
        model = state["model"]
        if model.get("type") != "BPE":
            raise _refuse(f"a {model.get('type')} tokenizer")
        if model.get("merges") is None:
            raise _refuse("a BPE tokenizer without merges")
        for part in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
            if model.get(part):
                raise _refuse(f"a BPE tokenizer with {part}")
        return cls(backend, state)

    # Reading --------------------------------------------------------------------------------

    def _read_byte_level(self, vocabulary: dict[str, int]) -> None:
        alphabet = byte_alphabet()
        table = str.maketrans({character: chr(byte) for byte, character in enumerate(alphabet)})
        for text, token in vocabulary.items():
            try:
                spelling = text.translate(table).encode("latin-1")
            except UnicodeEncodeError:
                continue  # not in the alphabet: no text becomes this token
            self.spelling[token] = spelling
            if len(spelling) == 1:
                self.byte_ids[spelling[0]] = token

    def _read_characters(self, vocabulary: dict[str, int], fallback: bool) -> None:
        space = self._space
        plain = [text.replace(space, " ") for text in vocabulary] if space else list(vocabulary)
        for token, spelling in zip(
            vocabulary.values(), [text.encode() for text in plain], strict=True
        ):
            self.spelling[token] = spelling
        self.characters = {
            text: token
            for text, token in zip(plain, vocabulary.values(), strict=True)
            if len(text) == 1
        }
        if space:
            self.characters[" "] = vocabulary.get(space, -1)
            for text in [text for text in vocabulary if " " in text]:
                self.spelling[vocabulary[text]] = None  # every space of a text is rewritten first
        for byte in range(256) if fallback else ():
            token = vocabulary.get(f"<0x{byte:02X}>", -1)
            if token >= 0:
                self.byte_ids[byte], self.spelling[token] = token, bytes([byte])
        self._byte_set = frozenset(i for i in self.byte_ids if i >= 0)

    def _read_merges(self, vocabulary: dict[str, int], merges: list[Any]) -> Merges:
        if merges and isinstance(merges[0], str):
            merges = [merge.split(" ", 1) for merge in merges]
        first, second = zip(*merges, strict=True) if merges else ((), ())
        left, right, product = (
            np.array(list(map(vocabulary.__getitem__, texts)), dtype=np.int64)
            for texts in (first, second, map(add, first, second))
        )
        return Merges(left, right, product, self.size, self._symbols)

    def _symbols(self, token: int) -> list[int] | None:
        """Base symbols of an ordinary token; None where a base symbol is missing."""
        spelling = self.spelling[token] if 0 <= token < self.size else None
        if not spelling:
            return None
        if self.kind == "byte-level":
            symbols = [self.byte_ids[byte] for byte in spelling]
            return symbols if min(symbols) >= 0 else None
        try:
            return [self.characters[c] for c in spelling.decode()]
        except (KeyError, UnicodeDecodeError):
            return None

    def _drop_unused(self) -> None:
        """Take the spelling from ids that no ordinary text becomes."""
        usable = self._merges.made()
        if self.whole_words:
            usable[:] = True
        bases = self.byte_ids if self.kind == "byte-level" else list(self.characters.values())
        usable[[token for token in bases if token >= 0]] = True
        if self.kind != "byte-level":
            for byte, token in enumerate(self.byte_ids):
                if token >= 0:
                    usable[token] = byte >= 0x80 or chr(byte) not in self.characters
        for token in np.flatnonzero(~usable).tolist():
            self.spelling[token] = None
        for content, token in self.literals.items():
            # Text that spells an added token is matched before BPE runs.
            if token in self.special_ids or self.spelling[token] == content.encode():
                self.spelling[token] = None

    # Looking up -----------------------------------------------------------------------------

    def range(self, prefix: bytes) -> tuple[int, int]:
        """Where the tokens that start with `prefix` lie in `sorted_ids`, as `low, high`."""
        low = bisect_left(self._sorted, prefix)
        stem = prefix.rstrip(b"\xff")
        if not stem:
            return low, len(self._sorted)
        return low, bisect_left(self._sorted, stem[:-1] + bytes([stem[-1] + 1]), low)

    def step(self, walked: bytes) -> tuple[bool, tuple[int, ...]]:
        """Whether some token starts with `walked`, and the tokens that spell just it."""
        found = self._steps.get(walked)
        if found is None:
            low, spelled, end = bisect_left(self._sorted, walked), [], len(self._sorted)
            alive = low < end and self._sorted[low].startswith(walked)
            while low < end and self._sorted[low] == walked:
                spelled.append(int(self.sorted_ids[low]))
                low += 1
            if len(self._steps) > _CACHED:
                self._steps.clear()
            found = self._steps[walked] = (alive, tuple(spelled))
        return found

    def match(self, text: str, at: int) -> tuple[int, bool]:
        """The longest added token that starts at a character.

        Returns:
            Where it stops (0 if there is none), and whether the text ends inside another, longer
            one that starts here.
        """
        if text[at] not in self.literal_starts:
            return 0, False
        stop = 0
        for length in self._lengths:
            if text[at : at + length] in self.literals and at + length <= len(text):
                stop = at + length
                break
        rest = text[at:]
        following = bisect_right(self._literals, rest)
        unfinished = following < len(self._literals) and self._literals[following].startswith(rest)
        return stop, unfinished

    def added_after(self, walked: bytes) -> list[tuple[bytes, int]]:
        """Text and id of the added tokens, not special, that start with some bytes."""
        low = bisect_left(self._added, (walked, -1))
        high = low
        while high < len(self._added) and self._added[high][0].startswith(walked):
            high += 1
        return self._added[low:high]

    def added_text(self, token: int) -> str:
        """What an added token is matched by."""
        return self._contents[token]

    def first_byte(self, token: int) -> int:
        """First byte of an ordinary token."""
        return (self.spelling[token] or b"\0")[0]

    def by_opening(self) -> dict[str | bytes, list[int]]:
        """Ordinary tokens by the character they begin with (see `opening_of`)."""
        if self._openings is None:
            self._openings = {}
            for token in self.sorted_ids.tolist():
                opening = opening_of(self.spelling[token] or b"\x80")
                if opening is not None:
                    self._openings.setdefault(opening, []).append(token)
        return self._openings

    def inside(self, left: int, right: int) -> bool:
        """Whether `right` may follow where `left` ends inside a character."""
        if self.kind != "byte-level":
            return right in self._byte_set
        return self.valid(left, right)

    def reachable(self, token: int) -> bool:
        """Whether the tokenizer ever makes this ordinary token by merging."""
        if self.kind != "byte-level" and token in self._byte_set:
            return self.spelling[token] is not None
        return self.spelling[token] is not None and self._merges.reachable(token)

    def valid(self, left: int, right: int) -> bool:
        """Whether two ordinary tokens may be neighbours inside one pre-token."""
        key = left * self.size + right
        known = self._valid.get(key)
        if known is None:
            if len(self._valid) > _CACHED:
                self._valid.clear()
            known = self._valid[key] = self._decide(left, right)
        return known

    def _decide(self, left: int, right: int) -> bool:
        if self.kind != "byte-level" and not self._byte_set.isdisjoint((left, right)):
            # Bytes of an unknown character merge with nothing.
            return self.reachable(left) and self.reachable(right)
        if self.reencode:
            both = (self.spelling[left] or b"") + (self.spelling[right] or b"")
            return self._encoded(both) == [left, right]
        return self._merges.valid(left, right)

    def _encoded(self, spelling: bytes) -> list[int] | None:
        """What the tokenizer itself makes of one pre-token; None where it cannot be asked."""
        if self.kind == "byte-level":
            alphabet = _ALPHABET
            text = "".join([alphabet[byte] for byte in spelling])
        else:
            try:
                text = spelling.decode()
            except UnicodeDecodeError:
                return None
            text = text.replace(" ", self._space) if self._space else text
        return [token.id for token in self._tokenizer.model.tokenize(text)]

    def normalize(self, text: str) -> str:
        """A text as the tokenizer normalizes it (NFC, for one).

        Whole prompts go through this. Sampled bytes are taken as they come.
        """
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return text
        text = normalizer.normalize_str(text)
        return text.replace(self._space, " ") if self._space else text

    # Checking -------------------------------------------------------------------------------

    def self_test(self, pairs: int = 2000, seed: int = 0) -> int:
        """Compare `valid` with re-encoding on sampled pairs; returns how many are wrong.

        Half of the pairs are the two sides of a cut through a token (near-valid), half random.
        """
        return sum(
            self.valid(left, right) != (self._encoded(text) == [left, right])
            for left, right, text in self.sample_pairs(pairs, seed)
        )

    def sample_pairs(self, pairs: int, seed: int = 0) -> Iterator[tuple[int, int, bytes]]:
        """Sampled pairs of ordinary tokens that re-encoding can judge, with their text."""
        if not len(self.sorted_ids):
            return
        draw, found = random.Random(seed), 0
        for index in range(20 * pairs):  # a vocabulary may have hardly any pair to judge
            if found == pairs:
                return
            left, right = (int(self.sorted_ids[draw.randrange(len(self.sorted_ids))]) for _ in "lr")
            if index % 2:
                spelling = self.spelling[left] or b""
                cut = draw.randrange(len(spelling) + 1)
                sides = [self._encoded(spelling[:cut]), self._encoded(spelling[cut:])]
                if not (sides[0] and sides[1]):
                    continue
                left, right = sides[0][-1], sides[1][0]
            text = (self.spelling[left] or b"") + (self.spelling[right] or b"")
            if self.spelling[left] is None or self.spelling[right] is None:
                continue
            if self.whole_words and (self.step(text)[1] or not self.reachable(left)):
                continue
            if self.kind != "byte-level" and not self._byte_set.isdisjoint((left, right)):
                continue
            found += 1
            yield left, right, text


_ALPHABET = byte_alphabet()


def _refuse(offered: str, hint: str = "") -> CapabilityError:
    return CapabilityError("byte-sampler", "a BPE tokenizer with merges", offered, hint)


def _parts(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder and everything inside it."""
    if component is None:
        return
    yield component
    for name in ("normalizers", "pretokenizers", "decoders"):
        for part in component.get(name) or []:
            yield from _parts(part)


def _family(state: dict[str, Any]) -> tuple[str, str]:
    """Kind of vocabulary, and the character that stands for a space ("" for none)."""
    splitters = list(_parts(state.get("pre_tokenizer")))
    normalizers = list(_parts(state.get("normalizer")))
    decoders = list(_parts(state.get("decoder")))
    if any(p["type"] == "ByteLevel" and p.get("add_prefix_space") for p in splitters):
        raise _refuse("one that puts a space before every text (add_prefix_space)")
    if any(p["type"] == "ByteLevel" for p in splitters):
        return "byte-level", ""
    if any(p["type"] == "ByteLevel" for p in normalizers):
        raise _refuse("one whose normalizer maps bytes")
    if any(p["type"] == "Prepend" for p in normalizers) or any(
        p["type"] == "Metaspace" and p.get("prepend_scheme", "always") != "never" for p in splitters
    ):
        raise _refuse("one that puts a space before every text (dummy prefix)")
    if any(p["type"] == "ByteLevel" for p in decoders):
        raise _refuse("a byte-level vocabulary without a ByteLevel pre-tokenizer")
    spaced = any(
        p["type"] == "Replace"
        and p.get("content") == SPACE
        and p.get("pattern", {}).get("String") == " "
        for p in normalizers
    ) or any(p["type"] == "Metaspace" for p in splitters)
    return "sentencepiece", SPACE if spaced else ""


def _literals(tokenizer: Any, added: list[dict[str, Any]]) -> dict[str, int]:
    """Text of every added token and its id.

    Raises:
        CapabilityError: One is matched in a way that depends on the text around it.
    """
    literals, raw, normalized = {}, [], []
    for token in added:
        for flag in ("single_word", "lstrip", "rstrip"):
            if token.get(flag):
                raise _refuse(f"an added token {token['content']!r} with {flag}")
        content = token["content"]
        if token.get("normalized") and tokenizer.normalizer is not None:
            content = tokenizer.normalizer.normalize_str(content).replace(SPACE, " ")
            normalized.append(content)
        else:
            raw.append(content)
        if content:
            literals[content] = token["id"]
    # The tokenizer looks for the raw ones first. With no overlap the order does not matter.
    for one in normalized:
        for other in raw:
            if any(one[i:].startswith(other[: len(one) - i]) for i in range(len(one))) or any(
                other[i:].startswith(one[: len(other) - i]) for i in range(len(other))
            ):
                raise _refuse(f"added tokens that overlap ({one!r}, {other!r})")
    return literals
