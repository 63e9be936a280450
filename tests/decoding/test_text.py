"""Streamed text against what the tokenizer decodes from all the ids at once."""

from __future__ import annotations

import codecs
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lmsmith.decoding.text import ByteText, TokenText
from lmsmith.testing import tiny_tokenizer


def wrapped(tokenizer):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=True
    )


def byte_level(decoder=None):
    """Byte-level BPE without merges, with an added token that is no special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([AddedToken("<new 好>"), AddedToken("ê")])
    return wrapped(tokenizer)


def sentencepiece(*steps):
    """SentencePiece-style BPE with byte fallback, as Gemma (no strip) or Llama (strip) has it."""
    pieces = ["<eos>", "▁", "▁▁", "▁a", "b", "你", "�", ".", "<0xZZ>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps]
    )
    tokenizer.add_special_tokens(["<eos>"])
    return wrapped(tokenizer)


def with_decoder(decoder, pieces):
    vocabulary = {piece: i for i, piece in enumerate(["<eos>", *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<eos>"])
    return wrapped(tokenizer)


TOKENIZERS = {
    "tiny": tiny_tokenizer(),
    "byte-level": byte_level(),
    "byte-level and fallback": byte_level(
        decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "gemma": sentencepiece(),
    "llama": sentencepiece(decoders.Strip(" ", 1, 0)),
    "metaspace": with_decoder(decoders.Metaspace(), ["▁a", "b", "▁", "▁c"]),
    "wordpiece": with_decoder(decoders.WordPiece(cleanup=False), ["a", "##b", "c", "."]),
    "suffix": with_decoder(decoders.BPEDecoder(), ["a</w>", "b", "c</w>"]),
    "no decoder": with_decoder(None, ["a", "b"]),
}


def streamed(texts, ids):
    stream = texts.stream()
    return [stream.push(one) for one in ids], stream.flush()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special", [True, False])
def test_joined_text_is_the_tokenizer_s(name, skip_special):
    tokenizer = TOKENIZERS[name]
    texts = TokenText(tokenizer, skip_special=skip_special)

    # Ids past the end stand for the padding of a model's vocabulary.
    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.integers(0, len(tokenizer) + 2), max_size=24))
    def check(ids):
        parts, rest = streamed(texts, ids)
        assert "".join(parts) + rest == tokenizer.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    check()


@pytest.mark.parametrize("name", ["tiny", "byte-level", "gemma", "llama"])
@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab .你好é🙂\u0301\U0001f468\u200d"), max_size=20))
def test_real_text_comes_through_without_marks(name, text):
    """Characters split over tokens are never shown in halves, and come once they are whole."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts, rest = streamed(TokenText(tokenizer), ids)
    assert "".join(parts) + rest == tokenizer.decode(ids, skip_special_tokens=True)
    if name in ("tiny", "byte-level"):
        assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=24))
@example(b"\xe4\xbd")
@example(b"\xf0\x9f\xf0\x9f\x99\x82")
def test_bytes_stream_like_a_lossy_decode(data):
    parts, rest = streamed(ByteText(), data)
    # Half a character at the end is not shown.
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    assert ("".join(parts), rest) == (whole, "")


def test_no_byte_lags_more_than_its_character():
    text = "aé你🙂"
    shown = 0
    stream = ByteText().stream()
    for place, byte in enumerate(text.encode()):
        shown += len(stream.push(byte))
        assert shown == len(text.encode()[: place + 1].decode("utf-8", errors="ignore"))


def test_a_byte_value_that_is_no_byte_has_no_text():
    assert streamed(ByteText(), [104, 256, 105]) == (["h", "", "i"], "")


def test_without_a_tokenizer_there_is_no_text():
    assert streamed(TokenText(None), [1, 2, 3]) == (["", "", ""], "")


@pytest.mark.parametrize("name", ["byte-level", "gemma"])
def test_the_work_a_token_does_not_grow(name):
    """Ten times the tokens take about ten times as long, also where nothing can be shown."""
    tokenizer = TOKENIZERS[name]
    half = tokenizer.convert_tokens_to_ids("<0xE4>" if name == "gemma" else "ä")
    for ids in ([half], tokenizer.encode("ab你 ", add_special_tokens=False)):

        def seconds(count, ids=ids):
            stream = TokenText(tokenizer).stream()
            began = time.perf_counter()
            for place in range(count):
                stream.push(ids[place % len(ids)])
            stream.flush()
            return time.perf_counter() - began

        seconds(100)
        short = min(seconds(1000) for _ in range(3))
        assert min(seconds(10_000) for _ in range(3)) < 40 * short
