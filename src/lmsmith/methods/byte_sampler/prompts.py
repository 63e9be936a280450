"""Prompts as a byte reader takes them: pieces of text as bytes, special tokens as ids."""

from __future__ import annotations

from collections.abc import Sequence

from lmsmith.decoding.events import Prompt
from lmsmith.errors import CapabilityError, UsageError
from lmsmith.methods.byte_sampler.reader import ByteReader
from lmsmith.methods.byte_sampler.vocabulary import SPACE


def parts_of(reader: ByteReader, prompt: Prompt) -> tuple[list[int | bytes], bool]:
    """A prompt in parts, and whether the model's own start token belongs in front.

    Text is normalised as the tokenizer normalises it. Bytes are taken as they are and may end
    inside a character. Messages go through the model's own chat template. Ids are read back as
    bytes, so that an id sequence that ends inside a word is continued as well as text is.

    Raises:
        UsageError: The prompt is empty, or its bytes are not UTF-8.
        CapabilityError: Messages, but the model has no chat template.
    """
    lm, tokens = reader.lm, reader.tokens
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError:  # a lone surrogate
            raise UsageError("the prompt holds characters that are not Unicode text") from None
        prompt = tokens.normalize(prompt).encode()
    if isinstance(prompt, bytes):
        _check_utf8(prompt)
        if tokens.rewrites_spaces:  # as the tokenizer does in text
            prompt = prompt.replace(SPACE.encode(), b" ")
        if not prompt and not lm.adds_bos:
            raise UsageError("the prompt is empty; give at least one character")
        return [prompt] if prompt else [], lm.adds_bos
    if prompt and not is_ids(prompt):
        if "chat" not in lm.offers or lm.tokenizer is None:
            raise CapabilityError("a chat prompt", "a chat template", "none", "pass plain text")
        text = lm.tokenizer.apply_chat_template(
            [dict(message) for message in prompt],  # type: ignore[arg-type]
            tokenize=False,
            add_generation_prompt=True,
        )
        return [tokens.normalize(str(text)).encode()], False
    if not prompt:
        raise UsageError("the prompt is empty; give at least one token")
    return _spell(reader, [int(token) for token in prompt]), False  # type: ignore[arg-type]


def is_ids(prompt: Prompt) -> bool:
    """Whether a prompt is token ids."""
    return not isinstance(prompt, str | bytes) and bool(prompt) and isinstance(prompt[0], int)


def pending_bytes(parts: Sequence[int | bytes]) -> bytes:
    """The bytes at the end of the prompt that are a character not yet complete."""
    tail = parts[-1] if parts else b""
    if not isinstance(tail, bytes):
        return b""
    for size in range(1, min(4, len(tail) + 1)):
        byte = tail[-size]
        if byte < 0x80:
            return b""
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return tail[-size:] if size < length else b""
    return b""


def _spell(reader: ByteReader, ids: Sequence[int]) -> list[int | bytes]:
    parts: list[int | bytes] = []
    for token in ids:
        if not 0 <= token < reader.lm.vocabulary:
            raise UsageError(f"token id {token} is outside the vocabulary of {reader.lm.name}")
        spelling = reader.tokens.spelling[token] if token < len(reader.tokens.spelling) else None
        if spelling is None:
            parts.append(token)
        elif parts and isinstance(parts[-1], bytes):
            parts[-1] += spelling
        else:
            parts.append(spelling)
    return parts


def _check_utf8(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            raise UsageError(
                f"the prompt is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
            ) from None
