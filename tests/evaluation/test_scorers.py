"""Scorers on answers as models give them."""

import pytest

from lmsmith.evaluation.scorers import exact_match, last_number


@pytest.mark.parametrize(
    ("answer", "same"),
    [("Paris", True), ("  paris\n", True), ("Ｐａｒｉｓ", True), ("Paris.", False), ("", False)],
)
def test_exact_match(answer, same):
    assert exact_match(answer, "Paris") is same


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42),
        ("so 1,234,567 in all", 1234567),
        ("it fell by -3.5", -3.5),
        ("7-3", 3),
        ("(1)-(2)", 2),
        ("3, 4", 4),
        ("1,2", 2),
        ("12,3456", 3456),
        ("$18", 18),
        ("1e-3", 0.001),
        ("x = +5 apples", 5),
        ("none here", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number
