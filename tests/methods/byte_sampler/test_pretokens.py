"""Splits and their look-ahead: hypotheses, unfinished characters, UTF-8."""

import json

import pytest
from families import SPLITTERS, byte_level
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmsmith.methods.byte_sampler.pretokens import (
    Splitter,
    completions,
    continuation_bytes,
    opening_of,
    representatives,
)


def splitter(name):
    tokenizer = byte_level(name)
    return Splitter(tokenizer, json.loads(tokenizer.to_str()), "")


def test_splits_are_positions_inside_the_text():
    assert splitter("gpt-2").splits("don't  stop") == (3, 5, 6)
    assert splitter("gpt-2").splits("") == ()
    assert splitter("whole text").never
    assert splitter("whole text").splits("a b") == ()


@pytest.mark.parametrize(
    ("name", "tail", "hypotheses"),
    [
        # "  " before a word gives its last space away.
        ("gpt-2", "  ", {(), (1,)}),
        # Contractions: "'l" may become "'ll".
        ("gpt-2", "'l", {(), (1,)}),
        ("gpt-4o", "don'", {(3,), ()}),
        # Three alignments of digits from the right; from the left there is only one.
        ("digits from the right", "123", {(), (1,), (2,)}),
        ("gpt-4", "1234", {(3,)}),
        # A line end takes back the spaces before it.
        ("qwen", "\n ", {(1,), ()}),
        ("qwen", "word", {()}),
    ],
)
def test_hypotheses(name, tail, hypotheses):
    outcomes = splitter(name).outcomes(tail)
    assert set(outcomes.hypotheses) == hypotheses
    assert outcomes.complete == splitter(name).splits(tail)


@pytest.mark.parametrize("name", sorted(set(SPLITTERS) - {"whole text"}))
@settings(deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from([*" \n'a1.sSl中\t", "  ", "ll", "ve", "\r\n", "Ab", "\u0301", "12", "_"]),
        max_size=4,
    ),
    more=st.text(max_size=4),
)
@example(pieces=["a", "'"], more="ve")
def test_every_continuation_splits_in_a_foreseen_way(name, pieces, more):
    asked, tail = splitter(name), "".join(pieces)
    splits = asked.splits(tail + more)
    assert tuple(p for p in splits if p < len(tail)) in asked.outcomes(tail).hypotheses
    if tail and more:
        ends = tuple(p for p in splits if p <= len(tail))
        data = more[0].encode()
        for cut in range(1, len(data)):
            assert (len(tail) in ends) in asked.splits_before(tail, data[:cut])


def test_splits_before_an_unfinished_character():
    # A letter goes on with the word, punctuation does not; the bytes say which are possible.
    assert splitter("gpt-2").splits_before("word", "中".encode()[:2]) == (False,)
    assert set(splitter("gpt-2").splits_before("word", b"\xe2")) == {False, True}


def test_continuation_bytes_are_those_of_utf8():
    following: dict[bytes, set[int]] = {}
    for point in [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x110000, 64)]:
        data = chr(point).encode()
        for cut in range(min(3, len(data))):  # of four bytes only the last is not gone through
            following.setdefault(data[:cut], set()).add(data[cut])
    assert len(following) > 1000
    for prefix, expected in following.items():
        assert continuation_bytes(prefix) == expected, prefix
    assert continuation_bytes("é".encode()) == continuation_bytes(b"")


@given(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]))
def test_completions_and_representatives(character):
    data = character.encode()
    for cut in range(1, len(data)):
        first, last = completions(data[:cut])
        assert first <= ord(character) <= last
        for point in (first, last):
            if not 0xD800 <= point < 0xE000:
                assert chr(point).encode()[:cut] == data[:cut]
        found = representatives(data[:cut])
        assert found and all(c.encode()[:cut] == data[:cut] for c in found)


def test_opening_of_a_token():
    assert opening_of(b"ab") == "a"
    assert opening_of(b" x") == " "
    assert opening_of("中".encode()[:2]) == "中".encode()[:2]
    assert opening_of("中".encode()[1:]) is None
    assert opening_of("文中".encode()) == opening_of("文".encode())
