"""Colours that can be read on any ground, and figures that show what they were given."""

import io
import itertools
import math

import numpy as np
import pytest
from PIL import Image

from lmsmith.display import figures, theme
from lmsmith.evaluation.stats import Interval


def linear(color: str) -> np.ndarray:
    values = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """Contrast ratio of WCAG 2.2."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("color", theme.SERIES)
@pytest.mark.parametrize("ground", ["#ffffff", theme.PAPER, "#1e1e1e", "#000000"])
def test_every_colour_is_readable_on_light_and_dark(color, ground):
    assert contrast(color, ground) >= 3.0


def test_series_colours_differ():
    for a, b in itertools.combinations(theme.SERIES, 2):
        assert np.abs(linear(a) - linear(b)).max() > 0.08


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def colored(image: np.ndarray, color: str) -> np.ndarray:
    """Where an image shows a colour, `[height, width]`."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return (np.abs(image - wanted) < 6).all(axis=-1)


def test_bars_are_as_high_as_their_values():
    image = pixels(figures.bars({"a": {"x": 4.0, "y": 1.0}, "b": {"x": 2.0}}, "Claim"))
    image = image[: int(0.9 * len(image))]  # without the legend
    first = colored(image, theme.SERIES[0])
    height = first.sum(axis=0)
    tall = height[: image.shape[1] // 2].max()
    short = height[image.shape[1] // 2 :].max()
    assert tall / short == pytest.approx(2.0, rel=0.05)
    second = colored(image, theme.SERIES[1]).sum(axis=0).max()
    assert tall / second == pytest.approx(4.0, rel=0.1)


def test_intervals_bands_and_references_are_drawn():
    plain = figures.bars({"a": 1.0}, "Claim")
    assert figures.bars({"a": Interval(1.0, 0.5, 1.5)}, "Claim") != plain
    assert figures.bars({"a": [1.0, None, None]}, "Claim") == plain
    assert figures.bars({"a": Interval(1.0, math.nan, math.nan)}, "Claim") == plain
    lined = figures.bars({"a": 1.0}, "Claim", reference=0.5, reference_label="bar")
    assert colored(pixels(lined), theme.GREY).any()
    line = {"x": [1, 2, 3], "y": [1.0, 2.0, 4.0]}
    band = {**line, "low": [0, 1, 2], "high": [2, 3, 6]}
    assert figures.lines({"s": band}, "C") != figures.lines({"s": line}, "C")


def test_the_same_numbers_give_the_same_file():
    line = {"a": {"x": [1, 10, 100], "y": [1, 2, 3]}, "b": {"x": [1, 10], "y": [3, 2]}}
    draw = [figures.lines(line, "Claim", x_log=True, y_label="y") for _ in range(2)]
    assert draw[0] == draw[1]


def test_many_series_and_long_names_fit():
    names = [f"a rather long name of arm {n}" for n in range(8)]
    for png in (
        figures.bars({name: 1.0 + n for n, name in enumerate(names)}, "A long claim " * 12),
        figures.lines({name: {"x": [0, 1], "y": [n, n]} for n, name in enumerate(names)}, "C"),
    ):
        image = pixels(png)
        paper = colored(image, theme.PAPER)
        # Nothing runs over the edge: the outermost rows and columns are empty paper.
        assert paper[0].all()
        assert paper[-1].all()
        assert paper[:, 0].all()
        assert paper[:, -1].all()
        assert image.shape[1] / image.shape[0] < 3


def test_negative_and_missing_bars_do_not_raise():
    figures.bars({"a": Interval(-1.0, -2.0, 0.5), "b": math.nan}, "Claim")


def test_drawing_leaves_the_users_style_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.bars({"a": 1.0}, "Claim")
    assert dict(matplotlib.rcParams) == before
