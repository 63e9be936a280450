"""Figures as PNG: bars with intervals and lines with bands, the claim as the title.

Not for: computing what is drawn.

One solid light ground, so that a figure reads the same on a dark page as on a light one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lmsmith.display.tables import number
from lmsmith.display.theme import GREY, INK, PAPER, RULE, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS_PER_INCH = 160
TITLE_WIDTH = 66

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


def bars(
    data: Mapping[str, Any],
    title: str,
    *,
    y_label: str = "",
    reference: float | None = None,
    reference_label: str = "",
) -> bytes:
    """Bars with their intervals, as PNG.

    Args:
        data: `{category: {series: value}}`, or `{name: value}` for single bars. A value is a
            number, `(value, low, high)`, or anything with these three attributes.
        title: The claim.
        y_label: What is drawn, with its unit.
        reference: Height of a dashed line, such as a bar to be met.
        reference_label: What the line is.
    """
    nested = {
        name: value if isinstance(value, Mapping) else {"": value} for name, value in data.items()
    }
    series = list(dict.fromkeys(name for values in nested.values() for name in values))
    width = 0.8 / len(series) if len(series) > 1 else 0.6
    inches = max(5.2, min(11.0, 1.6 + 0.62 * len(nested) * len(series)))
    with _canvas(title, inches) as canvas:
        axes = canvas.axes
        axes.grid(axis="x", visible=False)
        points = [
            _point(values[name]) for name in series for values in nested.values() if name in values
        ]
        places = _label_places([value for value, _, _ in points])
        for rank, name in enumerate(series):
            color = SERIES[rank % len(SERIES)]
            for place, values in enumerate(nested.values()):
                if name not in values:
                    continue
                value, low, high = _point(values[name])
                x = place + (rank - (len(series) - 1) / 2) * width
                axes.bar(x, value, width * 0.88, color=color, label=name or None)
                if math.isfinite(low) and math.isfinite(high):
                    axes.vlines(x, low, high, color=INK, linewidth=1.4)
                above = not value < 0
                ends = [end for end in (value, high if above else low) if math.isfinite(end)]
                axes.annotate(
                    number(value, places),
                    (x, (max if above else min)(ends, default=0.0)),
                    xytext=(0, 3 if above else -3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if above else "top",
                    fontsize=9,
                )
        letters = max(5, int((inches - 1.0) / len(nested) / 0.09) - 1) if nested else 0
        axes.set_xticks(range(len(nested)), [fill(name, letters) for name in nested])
        axes.set_ylabel(y_label)
        axes.margins(y=0.12)
        if any(value < 0 for value, _, _ in points):
            axes.axhline(0, color=INK, linewidth=1)
        _reference(axes, reference, reference_label)
        _legend(canvas.figure, axes)
        return canvas.png()


def lines(
    data: Mapping[str, Mapping[str, Sequence[float]]],
    title: str,
    *,
    x_label: str = "",
    y_label: str = "",
    reference: float | None = None,
    reference_label: str = "",
    x_log: bool = False,
    y_log: bool = False,
) -> bytes:
    """Lines with their bands, as PNG.

    Args:
        data: `{series: {"x": ..., "y": ..., "low": ..., "high": ...}}`; the band is optional.
        title: The claim.
        x_label: What runs to the right, with its unit.
        y_label: What runs up, with its unit.
        reference: Height of a dashed line, such as a bar to be met.
        reference_label: What the line is.
        x_log: Whether x is on a logarithmic scale.
        y_log: Whether y is on a logarithmic scale.
    """
    with _canvas(title, 7.2) as canvas:
        axes = canvas.axes
        for rank, (name, line) in enumerate(data.items()):
            color = SERIES[rank % len(SERIES)]
            marker = "o" if len(line["x"]) <= 24 else ""
            # A second round through the colours is told apart by its dashes.
            style = "-" if rank < len(SERIES) else "--"
            axes.plot(
                line["x"],
                line["y"],
                color=color,
                linewidth=2,
                linestyle=style,
                marker=marker,
                markersize=4.5,
                label=name,
            )
            if "low" in line and "high" in line:
                axes.fill_between(
                    line["x"], line["low"], line["high"], color=color, alpha=0.18, linewidth=0
                )
        if x_log:
            axes.set_xscale("log")
        if y_log:
            axes.set_yscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        _reference(axes, reference, reference_label)
        if len(data) > 1:
            _legend(canvas.figure, axes)
        return canvas.png()


class _canvas:
    """A figure in our style; the style holds inside the `with` block only."""

    def __init__(self, title: str, width: float) -> None:
        self.title, self.width = title, width

    def __enter__(self) -> _canvas:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        self._style = matplotlib.rc_context(_STYLE)
        self._style.__enter__()
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
        self.figure = Figure(figsize=(self.width, 4.3), dpi=DOTS_PER_INCH, layout=layout)
        FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_subplot()
        self.axes.set_title(
            fill(self.title, int(TITLE_WIDTH * self.width / 7.2)),
            loc="left",
            fontsize=12.5,
            fontweight="bold",
            pad=12,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._style.__exit__(None, None, None)

    def png(self) -> bytes:
        blob = io.BytesIO()
        # Without the library's version in it, the same numbers give the same file.
        self.figure.savefig(blob, format="png", metadata={"Software": None})
        return blob.getvalue()


def _reference(axes: Axes, height: float | None, label: str) -> None:
    if height is None:
        return
    axes.axhline(height, color=GREY, linewidth=1.4, linestyle=(0, (4, 3)))
    axes.annotate(
        label,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9.5,
        color=INK,
    )


def _legend(figure: Figure, axes: Axes) -> None:
    """One entry a series, under the axes, where it never hides what is drawn."""
    handles, names = axes.get_legend_handles_labels()
    entries = dict(zip(names, handles, strict=True))
    if not entries:
        return
    inches = 0.6 + 0.09 * max(map(len, entries))  # of one entry: its mark and its letters
    columns = max(1, min(len(entries), int(0.95 * figure.get_figwidth() / inches)))
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)


def _point(value: Any) -> tuple[float, float, float]:
    """Value and interval of a bar; ends that are missing are not a number."""
    if hasattr(value, "low"):
        return float(value.value), float(value.low), float(value.high)
    if isinstance(value, Sequence):
        middle, low, high = (math.nan if v is None else float(v) for v in value)
        return middle, low, high
    return float(value), math.nan, math.nan


def _label_places(values: Sequence[float]) -> int:
    """Decimals that give the largest bar three figures."""
    largest = max((abs(v) for v in values if math.isfinite(v) and v), default=1.0)
    if all(v == int(v) for v in values if math.isfinite(v)):
        return 0
    return max(0, 2 - math.floor(math.log10(largest)))
