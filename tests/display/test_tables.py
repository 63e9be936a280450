"""Tables: aligned numbers, nothing lost in narrow terminals, valid Markdown."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.theme import Theme

from lmsmith.display.tables import MISS, PASS, Measured, Styled, Table, decimals, number
from lmsmith.display.theme import STYLES


def shown(table: Table, width: int = 100, color: bool = False) -> str:
    file = io.StringIO()
    system = "truecolor" if color else None
    console = Console(
        file=file, width=width, theme=Theme(STYLES), force_terminal=color, color_system=system
    )
    console.print(table)
    return file.getvalue()


ARMS = Table(
    ["arm", "mean", "ratio to the plain arm", "forward calls a byte", "ok"],
    [
        ["plain", Measured(5.14, 5.03, 5.25), None, 1.0, PASS],
        ["byte-sampler", Measured(11.875, 9.5, 12.25), Measured(0.5, None, None), 1.31, MISS],
    ],
    title="English: surprise",
    note="lower is better",
)


def test_decimals_and_intervals_line_up():
    lines = shown(ARMS).splitlines()
    rows = [line for line in lines if line.startswith("plain") or "byte-" in line]
    points = [[i for i, c in enumerate(row) if c == "."] for row in rows]
    assert rows[0].startswith("plain         ")
    assert " 5.14 [ 5.03,  5.25]" in rows[0]
    assert "11.88 [ 9.50, 12.25]" in rows[1]
    assert points[0][:3] == points[1][:3]
    assert points[0][-1] == points[1][-1]


@pytest.mark.parametrize("width", [100, 72, 50, 38])
def test_nothing_is_cut_off_in_a_narrow_terminal(width):
    text = shown(ARMS, width)
    assert max(map(len, text.splitlines())) <= width
    joined = "".join(text.split())
    for number_ in ("5.14", "5.03,", "12.25]", "1.31", "pass", "miss", "0.5"):
        assert number_ in joined, (number_, text)


def test_numbers_stay_on_one_line_while_there_is_room():
    for width in (100, 72):
        assert "11.88 [ 9.50, 12.25]" in shown(ARMS, width)


def test_text_that_looks_like_markup_is_shown_as_it_is():
    assert "[bold]x[/bold]" in shown(Table(["[red]a"], [["[bold]x[/bold]"]]))


def test_marks_are_coloured_only_on_a_terminal():
    assert "\x1b[" in shown(ARMS, color=True)
    assert "\x1b[" not in shown(ARMS)


def test_markdown_has_one_cell_a_column_whatever_the_text():
    table = Table(
        ["a", "n"], [["x | y\nz", 1], [Styled("s", "pass"), None], ["", Measured(2.5, 1, 3)]]
    )
    assert table.markdown() == (
        "| a | n |\n| --- | ---: |\n| x \\| y z | 1.00 |\n| s | – |\n|  | 2.50 [1.00, 3.00] |\n"
    )


def test_an_empty_table_can_be_shown():
    assert "name" in shown(Table(["name", "n"], []))
    assert Table(["name", "n"], []).markdown().count("\n") == 2


@given(st.floats(1e-12, 1e6))
def test_a_number_alone_keeps_three_figures(value):
    read = float(number(value).replace(",", ""))
    assert math.isclose(read, value, rel_tol=5e-3)


@pytest.mark.parametrize(
    ("values", "places"),
    [
        ([1, 20, 300], 0),
        ([5.14, 2.08], 2),
        ([0.365, 0.5], 3),
        ([0.0021, 150.5], 4),
        ([12345.6], 0),
        ([0.0, math.nan, math.inf], 0),
        ([], 0),
    ],
)
def test_decimals_of_a_column(values, places):
    assert decimals(values) == places


def test_what_is_not_finite_is_a_dash_and_tiny_is_not_zero():
    assert number(None) == number(math.nan) == number(math.inf) == "–"
    assert number(1e-9) == "1.00e-09"
    assert number(1e-9, 2) == "1.0e-09"
    assert number(0.0, 2) == "0.00"
    assert number(1234567.0) == "1,234,567"
