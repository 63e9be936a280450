"""Means, differences and ratios over items, each with an interval that says how it was made.

Not for: choosing what to compare (`bench`) or drawing it (`lmsmith.display`).

Every statistic here is a function of sums over items (a mean is a sum of values over a sum of
weights), so one bootstrap serves all: draw items with replacement, add their columns up, apply
the function. Items that are not independent, such as one question asked in five orders, are
drawn together as a group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Statistic = Literal["difference", "ratio"]

# Entries of one index batch; bounds the memory of a bootstrap to some tens of megabytes.
_BATCH_ENTRIES = 1_000_000
_NORMAL_975 = 1.959963984540054


@dataclass(frozen=True)
class Interval:
    """A measured value and the range that holds the true one at the stated level.

    Attributes:
        value: The statistic on the items themselves.
        low: Lower end; not a number when there are fewer than two independent items.
        high: Upper end, likewise.
        kind: How the ends were made: `bootstrap`, `wilson`, or `none`.
        level: Probability that intervals made this way hold the true value.
    """

    value: float
    low: float
    high: float
    kind: str = "bootstrap"
    level: float = 0.95

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON can hold it: what is not finite becomes `None`."""
        ends = {"value": self.value, "low": self.low, "high": self.high}
        return {k: v if np.isfinite(v) else None for k, v in ends.items()} | {"kind": self.kind}


def mean_interval(
    values: npt.ArrayLike,
    *,
    weights: npt.ArrayLike | None = None,
    groups: Sequence[Hashable] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean over items with a 95 % interval.

    Scores that are all 0 or 1 get Wilson's interval, because a bootstrap of an all-right or
    all-wrong list has no width. Everything else gets the percentile bootstrap.

    Args:
        values: One number an item, `[items]`.
        weights: What each item counts, `[items]`; bits a byte is the mean of an item's bits a
            byte weighted by its bytes.
        groups: A label an item; items with one label are drawn together.
        resamples: Bootstrap resamples.
        seed: Seed of the resampling.

    Raises:
        ValueError: No items, or lengths that differ.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference";
        Efron and Tibshirani 1993, chapter 13.
    """
    columns = _columns(weights, values)
    single = weights is None and groups is None
    if single and np.isin(columns[:, 1], (0.0, 1.0)).all():
        return _wilson(columns[:, 1])
    return _bootstrap(columns, lambda s: s[:, 1] / s[:, 0], groups, resamples, seed)


def paired_bootstrap(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    statistic: Statistic = "difference",
    *,
    weights: npt.ArrayLike | None = None,
    groups: Sequence[Hashable] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Compare two arms measured on the same items.

    `difference` is mean(a) - mean(b); `ratio` is sum(a) / sum(b), which is not the mean of the
    items' ratios. The percentile bootstrap draws whole items, so what both arms share cancels.

    Args:
        a: One number an item under the one arm, `[items]`.
        b: The same items in the same order under the other arm, `[items]`.
        statistic: `difference` or `ratio`.
        weights: What each item counts, `[items]`.
        groups: A label an item; items with one label are drawn together.
        resamples: Bootstrap resamples.
        seed: Seed of the resampling.

    Raises:
        ValueError: No items, lengths that differ, or an unknown statistic.
    """
    columns = _columns(weights, a, b)
    if statistic == "difference":
        return _bootstrap(columns, lambda s: (s[:, 1] - s[:, 2]) / s[:, 0], groups, resamples, seed)
    if statistic == "ratio":
        return _bootstrap(columns, lambda s: s[:, 1] / s[:, 2], groups, resamples, seed)
    raise ValueError(f"statistic is 'difference' or 'ratio', not {statistic!r}")


def _columns(weights: npt.ArrayLike | None, *arms: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Weights and weighted values side by side, `[items, 1 + arms]`."""
    values = [np.asarray(arm, dtype=np.float64) for arm in arms]
    weight = np.ones_like(values[0]) if weights is None else np.asarray(weights, dtype=np.float64)
    shapes = {array.shape for array in (weight, *values)}
    if len(shapes) != 1 or weight.ndim != 1:
        raise ValueError(f"arms and weights need one number an item each, got shapes {shapes}")
    if not len(weight):
        raise ValueError("no items to average")
    return np.stack([weight, *(weight * value for value in values)], axis=1)


def _bootstrap(
    columns: npt.NDArray[np.float64],
    statistic: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    groups: Sequence[Hashable] | None,
    resamples: int,
    seed: int,
) -> Interval:
    """Percentile interval of `statistic`, a function of column sums `[resamples, columns]`."""
    if groups is not None:
        columns = _group_sums(columns, groups)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(columns.sum(axis=0, keepdims=True))[0])
        if len(columns) < 2:
            return Interval(value, np.nan, np.nan, kind="none")
        drawn = statistic(_resampled_sums(columns, resamples, seed))
    drawn = drawn[~np.isnan(drawn)]  # 0/0: a resample in which the ratio does not exist
    if not len(drawn) or np.isnan(value):
        return Interval(value, np.nan, np.nan, kind="none")
    # An order statistic, not an interpolation: a resample may divide by zero and be infinite.
    low, high = np.quantile(drawn, (0.025, 0.975), method="inverted_cdf")
    return Interval(value, float(low), float(high))


def _group_sums(
    columns: npt.NDArray[np.float64], groups: Sequence[Hashable]
) -> npt.NDArray[np.float64]:
    """Add up the rows that share a label, `[labels, columns]`."""
    if len(groups) != len(columns):
        raise ValueError(f"{len(groups)} group labels for {len(columns)} items")
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(group, len(numbers)) for group in groups]
    sums = np.zeros((len(numbers), columns.shape[1]))
    np.add.at(sums, index, columns)
    return sums


def _resampled_sums(
    columns: npt.NDArray[np.float64], resamples: int, seed: int
) -> npt.NDArray[np.float64]:
    """Column sums of items drawn with replacement, `[resamples, columns]`.

    Equal columns give equal sums to the last bit, so an arm against itself is exactly 0 or 1.
    """
    rng = np.random.default_rng(seed)
    items = len(columns)
    sums = np.empty((resamples, columns.shape[1]))
    step = max(1, _BATCH_ENTRIES // items)
    for start in range(0, resamples, step):
        stop = min(start + step, resamples)
        index = rng.integers(0, items, (stop - start, items), dtype=np.int32)
        for column in range(columns.shape[1]):
            sums[start:stop, column] = columns[:, column][index].sum(axis=1)
    return sums


def _wilson(values: npt.NDArray[np.float64]) -> Interval:
    """Wilson's score interval of a proportion."""
    n, share, z = len(values), float(values.mean()), _NORMAL_975
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # The formula reaches 0 and 1 only up to rounding.
    low, high = min(centre - half, share), max(centre + half, share)
    return Interval(share, float(low), float(high), kind="wilson")
