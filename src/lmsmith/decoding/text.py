"""Text out of tokens, or bytes, as they come.

A token is not text: it may hold half a character, and a tokenizer may put or drop a space by what
stands before. A stream holds back what may still change, so that all it returned, joined, is what
the tokenizer decodes from all the ids at once. The work a token is constant on average.

Not for: what ends a text (`lmsmith.decoding.stop`).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream(Protocol):
    """Text of one row."""

    def push(self, item: int) -> str:
        """Take in one token id, or byte value, and return the text that is now certain."""

    def flush(self) -> str:
        """The rest; the row has ended, and half a character becomes the replacement mark."""


class TextSource(Protocol):
    """Where the text streams of rows come from."""

    def stream(self) -> TextStream:
        """A stream for one new row."""


class TokenText:
    """Streams of text for one tokenizer; `stream()` starts one for a row.

    Joined, a stream's text equals `tokenizer.decode(ids, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)`. Ids the tokenizer does not know are no text.

    Args:
        tokenizer: A transformers tokenizer, or `None`: then all text is empty.
        skip_special: Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special: bool = True) -> None:
        self._stream: Callable[[], TextStream] = _NoText
        if tokenizer is None:
            return
        added = tokenizer.added_tokens_decoder
        special = {one for one, token in added.items() if token.special} if skip_special else set()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and _is_byte_level(backend.decoder):
            bytes_of = _Lazy(
                lambda one: b"" if one in special else _piece_bytes(backend.id_to_token(one))
            )
            self._stream = lambda: _ByteLevel(bytes_of)
            return

        def decode(ids: Sequence[int]) -> str:
            text = tokenizer.decode(
                list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
            return str(text)

        def kind(one: int) -> str:
            piece = None if one in special else tokenizer.convert_ids_to_tokens(one)
            if piece is None:
                return "nothing"
            return "byte" if _BYTE_PIECE.fullmatch(piece) else "text"

        kinds = _Lazy(kind)
        self._stream = lambda: _Windowed(decode, kinds)

    def stream(self) -> TextStream:
        """A stream for one new row."""
        return self._stream()


class ByteText:
    """Streams of text for byte decoders: items are byte values; 256 and above are no text.

    Half a character at the end of a row is no text either: its bytes are in the Event's ids.
    """

    def stream(self) -> TextStream:
        """A stream for one new row."""
        return _Bytes(_BYTES)


class _Lazy(dict[int, Any]):
    """A table filled on first use: a vocabulary is large and a text uses little of it."""

    def __init__(self, fill: Callable[[int], Any]) -> None:
        super().__init__()
        self._fill = fill

    def __missing__(self, key: int) -> Any:
        value = self[key] = self._fill(key)
        return value


_BYTES = _Lazy(lambda one: bytes((one,)) if one < 256 else b"")


class _NoText:
    """Without a tokenizer there are ids only."""

    def push(self, item: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _ByteLevel:
    """Items stand for bytes, whatever their neighbours; only UTF-8 has to be put together."""

    def __init__(self, bytes_of: _Lazy) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, item: int) -> str:
        return self._utf8.decode(self._bytes_of[item])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Bytes(_ByteLevel):
    def flush(self) -> str:
        return ""


class _Windowed:
    """Any other tokenizer: the newest ids are decoded behind the one that came before them.

    A run of byte pieces (SentencePiece's byte fallback) is held back to its end, since one wrong
    byte makes the tokenizer give up the whole run; so is a text that ends in half a character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], kinds: _Lazy) -> None:
        self._decode = decode
        self._kinds = kinds
        self._before: list[int] = []
        self._shown = 0  # length of the text of `_before` alone
        self._held: list[int] = []

    def push(self, item: int) -> str:
        kind = self._kinds[item]
        if kind == "nothing":
            return ""
        self._held.append(item)
        if kind == "byte":
            return ""
        text = self._decode(self._before + self._held)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._release(text)

    def flush(self) -> str:
        return self._release(self._decode(self._before + self._held)) if self._held else ""

    def _release(self, text: str) -> str:
        new = text[self._shown :]
        self._before = self._held[-1:]
        self._shown = len(self._decode(self._before))
        self._held = []
        return new


@cache
def _byte_alphabet() -> dict[str, int]:
    """Character of byte-level BPE to byte: printable Latin-1 as itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _piece_bytes(piece: str | None) -> bytes:
    if piece is None:
        return b""
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()  # an added token in plain text


def _is_byte_level(decoder: Any) -> bool:
    """Whether decoding is byte-level, with nothing beside it that looks at the neighbours."""
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    kinds = [step["type"] for step in state.get("decoders", [state])]
    return kinds[:1] == ["ByteLevel"] and set(kinds) <= {"ByteLevel", "ByteFallback", "Fuse"}
