"""Vocabularies as bytes: spellings, ranges, added tokens, refusals, the load-time self-test."""

import random
import subprocess
import sys

import numpy as np
import pytest
from families import ADDED, SPECIALS, byte_level, sentencepiece, tokenizers, whole_words
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lmsmith.errors import CapabilityError
from lmsmith.methods.byte_sampler.merges import Merges
from lmsmith.methods.byte_sampler.vocabulary import ByteTokens
from lmsmith.testing.tokenizers import tiny_tokenizer

FAMILIES = [*tokenizers()]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    tokenizer = tokenizers()[request.param]
    return tokenizer, ByteTokens.from_tokenizer(tokenizer)


def test_spellings_are_what_the_decoder_says(family):
    tokenizer, tokens = family
    for token in tokens.sorted_ids.tolist():
        try:
            spelled = tokens.spelling[token].decode()
        except UnicodeDecodeError:
            continue  # a piece of a character has no text of its own
        assert tokenizer.decode([token], skip_special_tokens=False) == spelled


def test_encoding_uses_only_ordinary_special_and_added_tokens(family):
    tokenizer, tokens = family
    text = "Hi  there, 文字 don't 1234 <b>x <|im_end|>\n\n\n\tx🙂"
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        known = token in tokens.special_ids, token in tokens.added
        assert known.count(True) + (tokens.spelling[token] is not None) == 1
    assert tokens.special_ids >= {tokenizer.token_to_id(name) for name in SPECIALS}
    assert {tokens.added[tokenizer.token_to_id(c)] for c in ADDED} == {c.encode() for c in ADDED}


def test_ranges_are_the_tokens_with_a_prefix(family):
    _, tokens = family
    draw = random.Random(0)
    spellings = [s for s in tokens.spelling if s is not None]
    prefixes = [s[: draw.randint(0, len(s))] for s in draw.sample(spellings, 60)]
    for prefix in [*prefixes, b"\xff", b"\xff\xff", b"zzzzqq", b"a\xff", b""]:
        low, high = tokens.range(prefix)
        expected = {
            i for i, s in enumerate(tokens.spelling) if s is not None and s.startswith(prefix)
        }
        assert set(tokens.sorted_ids[low:high].tolist()) == expected
        alive, spelled = tokens.step(prefix)
        assert alive == bool(expected)
        assert set(spelled) == {i for i in expected if tokens.spelling[i] == prefix}


def test_no_wrong_pair(family):
    _, tokens = family
    assert tokens.self_test(pairs=3000, seed=1) == 0


def test_sampled_pairs_hold_both_answers(family):
    _, tokens = family
    if tokens.whole_words:
        pytest.skip("two tokens that spell a third cannot be judged by re-encoding here")
    answers = [tokens.valid(a, b) for a, b, _ in tokens.sample_pairs(400)]
    assert 0.1 < np.mean(answers) < 0.9


def test_a_wrong_replay_is_noticed_and_the_tokenizer_asked_instead(monkeypatch):
    right = ByteTokens.from_tokenizer(byte_level("gpt-2"))
    monkeypatch.setattr(Merges, "valid", lambda self, left, right: True)
    tokens = ByteTokens.from_tokenizer(byte_level("gpt-2"))
    monkeypatch.undo()
    pairs = list(right.sample_pairs(500, seed=2))
    assert not all(right.valid(a, b) for a, b, _ in pairs)
    assert [tokens.valid(a, b) for a, b, _ in pairs] == [right.valid(a, b) for a, b, _ in pairs]
    assert tokens.self_test(500, seed=2) == 0


def test_padding_ids_and_spoilt_tokens_have_no_spelling():
    state = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "[PAD3]": 3, "ba": 4}}
    tokenizer = Tokenizer(models.BPE(vocab=state["vocab"], merges=[("a", "b")]))
    tokens = ByteTokens.from_tokenizer(tokenizer)
    assert tokens.spelling == [b"a", b"b", b"ab", None, None]
    assert tokens.size == 5 and tokens.sorted_ids.tolist() == [0, 2, 1]


def test_whole_words_keep_tokens_that_no_merge_makes():
    tokens = ByteTokens.from_tokenizer(whole_words())
    word = whole_words().token_to_id("Ġtokenizer")
    assert tokens.whole_words and tokens.spelling[word] == b" tokenizer"
    assert not tokens.reachable(word)


def test_sentencepiece_spellings():
    tokenizer = sentencepiece()
    tokens = ByteTokens.from_tokenizer(tokenizer)
    assert tokens.kind == "sentencepiece"
    assert tokens.spelling[tokenizer.token_to_id("▁")] == b" "
    assert tokens.spelling[tokenizer.token_to_id("<0xE4>")] == b"\xe4"
    # A known character is never written as bytes.
    assert "a" in tokens.characters
    assert tokens.spelling[tokenizer.token_to_id("<0x61>")] is None


def test_fast_tokenizers_of_transformers_are_read():
    tokens = ByteTokens.from_tokenizer(tiny_tokenizer())
    assert tokens.kind == "byte-level" and len(tokens.special_ids) == 5
    assert tokens.self_test(500) == 0


def test_normalize():
    tokenizer = Tokenizer.from_str(byte_level("gpt-2").to_str())
    assert ByteTokens.from_tokenizer(tokenizer).normalize("e\u0301") == "e\u0301"
    tokenizer.normalizer = normalizers.NFC()
    assert ByteTokens.from_tokenizer(tokenizer).normalize("e\u0301") == "\u00e9"
    assert ByteTokens.from_tokenizer(sentencepiece()).normalize("a b") == "a b"


def refused(change):
    tokenizer = Tokenizer.from_str(byte_level("gpt-2").to_str())
    change(tokenizer)
    return tokenizer


REFUSED = {
    "WordPiece": lambda: Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    "Unigram": lambda: Tokenizer(models.Unigram([("a", 0.0)], 0)),
    "slow": object,
    "add_prefix_space": lambda: refused(
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))
    ),
    "dummy prefix": lambda: refused(
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace())
    ),
    "single_word": lambda: refused(lambda t: t.add_tokens([AddedToken("zq", single_word=True)])),
    "rstrip": lambda: refused(lambda t: t.add_tokens([AddedToken("zq", rstrip=True)])),
    "end_of_word_suffix": lambda: Tokenizer(
        models.BPE(vocab={"a": 0}, merges=[], end_of_word_suffix="</w>")
    ),
    "dropout": lambda: Tokenizer(models.BPE(vocab={"a": 0}, merges=[], dropout=0.1)),
    "drops some": lambda: refused(
        lambda t: setattr(
            t,
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False, use_regex=False)]
            ),
        )
    ),
    "without a ByteLevel": lambda: refused(lambda t: setattr(t, "pre_tokenizer", None)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(what):
    with pytest.raises(CapabilityError) as caught:
        ByteTokens.from_tokenizer(REFUSED[what]())
    assert what in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("byte-sampler needs ")
    assert caught.value.exit_code == 2


def test_metaspace_without_a_prefix_is_read():
    tokenizer = Tokenizer.from_str(sentencepiece().to_str())
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    assert ByteTokens.from_tokenizer(tokenizer).self_test(500) == 0


def test_reading_a_vocabulary_needs_no_torch():
    code = (
        "import sys, lmsmith.methods.byte_sampler.tree as t\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
