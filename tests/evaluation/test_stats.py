"""Intervals against simulation, closed forms and scipy."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmsmith.evaluation import stats
from lmsmith.evaluation.stats import Interval, mean_interval, paired_bootstrap

FEW = {"resamples": 400}
scores = st.lists(st.floats(0.01, 100), min_size=2, max_size=30)


def covered(draw, truth: float, trials: int = 400) -> float:
    rng = np.random.default_rng(7)
    return sum(truth in draw(rng) for _ in range(trials)) / trials


def test_mean_interval_holds_the_true_mean_as_often_as_it_says():
    share = covered(lambda rng: mean_interval(rng.gamma(2, 1, 120), **FEW), truth=2.0)
    assert 0.91 <= share <= 0.98


def test_wilson_interval_holds_a_small_true_share_as_often_as_it_says():
    share = covered(lambda rng: mean_interval(rng.random(60) < 0.05), truth=0.05)
    assert 0.92 <= share <= 1.0


@pytest.mark.parametrize(("statistic", "truth"), [("difference", -1.0), ("ratio", 0.5)])
def test_paired_bootstrap_holds_the_true_value_as_often_as_it_says(statistic, truth):
    def draw(rng):
        hard = rng.gamma(2, 1, 120)  # mean 2, shared by both arms
        return paired_bootstrap(
            hard / 2 + rng.normal(0, 0.3, 120), hard + rng.normal(0, 0.3, 120), statistic, **FEW
        )

    assert 0.91 <= covered(draw, truth) <= 0.98


def test_pairing_removes_what_both_arms_share():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 10, 200)
    a, b = hard + rng.normal(0, 0.1, 200), hard + 1 + rng.normal(0, 0.1, 200)
    paired = paired_bootstrap(a, b)
    alone = mean_interval(a)
    assert paired.high - paired.low < (alone.high - alone.low) / 20
    assert -1 in paired


def test_items_of_one_group_are_drawn_together():
    rng = np.random.default_rng(0)
    values = np.repeat(rng.normal(0, 1, 50), 20)  # 50 questions asked in 20 equal orders
    groups = np.repeat(np.arange(50), 20).tolist()
    once, grouped, naive = (
        mean_interval(values[::20]),
        mean_interval(values, groups=groups),
        mean_interval(values),
    )
    assert grouped.high - grouped.low == pytest.approx(once.high - once.low, rel=0.05)
    assert naive.high - naive.low < (grouped.high - grouped.low) / 3


@pytest.mark.parametrize("statistic", ["difference", "ratio"])
def test_agrees_with_scipy(statistic):
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    a, b = rng.gamma(2, 1, 80), rng.gamma(3, 1, 80)

    def statistic_of(x, y, axis=-1):
        if statistic == "ratio":
            return x.sum(axis) / y.sum(axis)
        return x.mean(axis) - y.mean(axis)

    theirs = scipy_stats.bootstrap(
        (a, b), statistic_of, paired=True, method="percentile", n_resamples=20_000, rng=rng
    ).confidence_interval
    ours = paired_bootstrap(a, b, statistic, resamples=20_000)
    tolerance = 0.03 * (theirs.high - theirs.low)
    assert ours.value == pytest.approx(statistic_of(a, b))
    assert ours.low == pytest.approx(theirs.low, abs=tolerance)
    assert ours.high == pytest.approx(theirs.high, abs=tolerance)


@given(scores)
@settings(max_examples=30, deadline=None)
def test_an_arm_against_itself_is_exactly_equal(values):
    assert paired_bootstrap(values, values, "ratio", **FEW) == Interval(1.0, 1.0, 1.0)
    assert paired_bootstrap(values, values, "difference", **FEW) == Interval(0.0, 0.0, 0.0)


@given(scores, st.sampled_from([0.25, 2.0, 8.0]))
@settings(max_examples=30, deadline=None)
def test_a_constant_factor_is_found_with_certainty(values, factor):
    ratio = paired_bootstrap(np.multiply(values, factor), values, "ratio", **FEW)
    assert ratio == Interval(factor, factor, factor)


@given(scores)
@settings(max_examples=30, deadline=None)
def test_equal_weights_change_nothing_and_a_seed_repeats(values):
    plain = mean_interval(values, **FEW)
    assert mean_interval(values, **FEW) == plain
    weighted = mean_interval(values, weights=[2.0] * len(values), **FEW)
    assert (weighted.low, weighted.high) == pytest.approx((plain.low, plain.high))
    assert min(values) - 1e-9 <= plain.low <= plain.high <= max(values) + 1e-9


def test_weighted_mean_is_total_over_total():
    bits, length = np.array([10.0, 90.0]), np.array([10.0, 30.0])
    assert mean_interval(bits / length, weights=length).value == pytest.approx(100 / 40)
    other = np.array([20.0, 100.0])
    ratio = paired_bootstrap(bits / length, other / length, "ratio", weights=length)
    assert ratio.value == pytest.approx(100 / 120)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_list_of_one_score_alone_has_an_interval_with_width(value):
    found = mean_interval([value] * 20)
    assert found.kind == "wilson"
    assert found.value == value
    assert found.high - found.low == pytest.approx(0.161, abs=0.001)  # z^2 / (n + z^2)


def test_a_single_item_has_no_interval():
    found = mean_interval([3.5])
    assert found.value == 3.5
    assert math.isnan(found.low)
    assert found.kind == "none"
    assert found.to_dict() == {"value": 3.5, "low": None, "high": None, "kind": "none"}


def test_a_baseline_of_zero_has_no_ratio_and_does_not_raise():
    nothing = paired_bootstrap([1.0, 2.0], [0.0, 0.0], "ratio", **FEW)
    assert nothing.to_dict()["value"] is None
    rare = paired_bootstrap([1.0, 1.0, 1.0], [0.0, 0.0, 1.0], "ratio", **FEW)
    assert rare.value == 3.0
    assert rare.to_dict()["high"] is None  # some resamples divide by zero


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="no items"):
        mean_interval([])
    with pytest.raises(ValueError, match="one number an item"):
        paired_bootstrap([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="group labels"):
        mean_interval([1.0, 2.0], groups=["a"])
    with pytest.raises(ValueError, match="'difference' or 'ratio'"):
        paired_bootstrap([1.0, 2.0], [1.0, 2.0], "quotient")  # type: ignore[arg-type]


def test_memory_stays_bounded_with_many_items():
    values = np.random.default_rng(0).random(200_000)
    tracemalloc.start()
    mean_interval(values, resamples=30)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6  # all draws at once would take 30 x 200,000 x 12 bytes = 72 MB


def test_resampling_does_not_depend_on_the_batch(monkeypatch):
    values = np.random.default_rng(0).random(100)
    whole = mean_interval(values, resamples=4000)
    monkeypatch.setattr(stats, "_BATCH_ENTRIES", 10_000)
    parts = mean_interval(values, resamples=4000)
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), abs=0.01)
