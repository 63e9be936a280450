"""Stop strings against a reader that looks at one character at a time."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmsmith.decoding.stop import StopStrings
from lmsmith.errors import UsageError


def one_character_at_a_time(text, stops):
    """The oracle: the first position where any stop string ends; the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


small = st.text(alphabet="abé", max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(st.text(alphabet="abé", max_size=5), max_size=12),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
@example(chunks=["ab", "c"], stops=["abc", "b"])
@example(chunks=["aa", "ab"], stops=["aab"])
@example(chunks=["abab", "abac"], stops=["abac"])
def test_whatever_the_chunks_the_text_is_the_same(chunks, stops):
    expected, found = one_character_at_a_time("".join(chunks), stops)
    scanner = StopStrings(stops)
    shown = ""
    for chunk in chunks:
        shown += scanner.push(chunk)
        assert expected.startswith(shown), "text was shown that a stop string took back"
    shown += scanner.flush()
    assert (shown, scanner.found) == (expected, found)


@given(text=small, stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))
def test_no_more_is_held_back_than_needed(text, stops):
    """What is held is the beginning of some stop string, so the stream lags no further."""
    scanner = StopStrings(stops)
    shown = "".join(scanner.push(character) for character in text)
    if scanner.found is None:
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
        assert scanner.flush() == held


def test_nothing_comes_after_a_match():
    scanner = StopStrings(["."])
    assert scanner.push("one. two") == "one"
    assert scanner.push(" three") == "" and scanner.flush() == ""


def test_without_stop_strings_text_passes():
    scanner = StopStrings(())
    assert scanner.push("any") == "any" and scanner.flush() == "" and scanner.found is None


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="stop string is empty"):
        StopStrings(["a", ""])
