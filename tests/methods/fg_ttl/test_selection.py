"""Oracles of the selector: brute force, hand cases, invariances, rounding, counts."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmsmith.methods.fg_ttl.selection import (
    future_gain,
    has_whole_windows,
    highest,
    select,
    volatility,
    window_sizes,
)


def brute_force(entropy, start, length, *, local_window=6, gamma=1.0, n_min=2, n_max=10, top_p=0.2,
                top_k=None, threshold=1e-3):  # fmt: skip
    """The selector for one row, position by position, from its definition."""
    h = entropy[:length]
    gains, windows = [], []
    for t in range(length):
        back, ahead = (local_window - 1) // 2, local_window // 2
        around = [h[min(max(i, 0), length - 1)] for i in range(t - back, t + ahead + 1)]
        n = round(gamma / (statistics.stdev(around) + 1e-6))
        n = min(max(n, n_min), n_max)
        windows.append(n)
        if t < start or t < n or t > length - n - 1:
            gains.append(-math.inf)
        else:
            gains.append(sum(h[t - n : t]) / n - sum(h[t + 1 : t + 1 + n]) / n)
    valid = [t for t in range(length) if gains[t] > -math.inf]
    count = len(valid) if top_k is None else min(top_k, len(valid))
    if top_k is None and valid:
        count = max(1, int(top_p * len(valid)))
    best = sorted(valid, key=lambda t: (-gains[t], t))[:count]
    return {t for t in best if h[t] > threshold}, gains, windows


rows = st.lists(
    st.tuples(
        st.lists(st.floats(0, 8).map(lambda x: round(x, 3)), min_size=1, max_size=40),
        st.integers(0, 45),
    ),
    min_size=1,
    max_size=4,
)


@given(
    rows=rows,
    padding=st.integers(0, 5),
    local_window=st.integers(2, 8),
    n=st.tuples(st.integers(1, 4), st.integers(0, 8)),
    top_p=st.sampled_from([0.1, 0.2, 0.5, 1.0]),
    top_k=st.sampled_from([None, None, 1, 3]),
    threshold=st.sampled_from([1e-3, 0.5, -1.0]),
)
def test_equals_brute_force(rows, padding, local_window, n, top_p, top_k, threshold):
    size = max(len(h) for h, _ in rows) + padding
    # What lies past a row's end is no number, and must not be seen.
    entropy = torch.full((len(rows), size), math.nan, dtype=torch.float64)
    for row, (h, _) in enumerate(rows):
        entropy[row, : len(h)] = torch.tensor(h, dtype=torch.float64)
    starts = torch.tensor([start for _, start in rows])
    lengths = torch.tensor([len(h) for h, _ in rows])
    settings = {"local_window": local_window, "n_min": n[0], "n_max": n[0] + n[1], "top_k": top_k}
    found = select(entropy, starts, lengths, top_p=top_p, entropy_threshold=threshold, **settings)
    assert not found.mask[entropy.isnan()].any()
    for row, (h, start) in enumerate(rows):
        _, gains, windows = brute_force(
            h, start, len(h), top_p=top_p, threshold=threshold, **settings
        )
        sure = [abs(1 / (s + 1e-6) % 1 - 0.5) > 1e-6 for s in _deviations(h, local_window)]
        if not all(sure):  # within rounding of a half, either window size is right
            continue
        assert found.window[row, : len(h)].tolist() == windows
        assert found.gain[row, : len(h)].tolist() == pytest.approx(gains, abs=1e-9)
        # Gains that are equal up to rounding may be taken in either order; compare by what counts.
        _check_choice(found, row, h, gains, top_p, top_k, threshold)


def _deviations(h, local_window):
    back, ahead = (local_window - 1) // 2, local_window // 2
    last = len(h) - 1
    return [
        statistics.stdev([h[min(max(i, 0), last)] for i in range(t - back, t + ahead + 1)])
        for t in range(len(h))
    ]


def _check_choice(found, row, h, gains, top_p, top_k, threshold):
    mine = found.gain[row, : len(h)].tolist()
    valid = [t for t in range(len(h)) if gains[t] > -math.inf]
    count = min(top_k or max(1, int(top_p * len(valid))), len(valid))
    best = sorted(valid, key=lambda t: (-mine[t], t))[:count]
    wanted = {t for t in best if h[t] > threshold}
    assert set(found.mask[row].nonzero()[:, 0].tolist()) == wanted


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9, 60])
def test_equal_entropies_have_the_longest_window_and_no_gain(length):
    entropy, starts = torch.full((1, length), 1.5), torch.tensor([0])
    found = select(entropy, starts, torch.tensor([length]))
    assert (found.window == 10).all()
    valid = found.gain > -math.inf
    assert valid.sum() == max(0, length - 20)
    assert (found.gain[valid].abs() < 1e-6).all()
    # Ties are taken from the front.
    assert found.mask[0].nonzero()[:, 0].tolist() == list(range(10, 10 + int(0.2 * valid.sum())))


def test_a_prompt_without_an_answer_has_no_selection():
    found = select(torch.rand(2, 30), torch.tensor([30, 12]), torch.tensor([30, 12]))
    assert not found.mask.any()
    assert (found.gain == -math.inf).all()


def test_a_step_down_peaks_where_it_falls():
    entropy = torch.tensor([[2.0] * 20 + [0.0] * 20], dtype=torch.float64)
    lengths = torch.tensor([40])
    window = torch.full((1, 40), 3)
    gain = future_gain(entropy, window, lengths)[0]
    # Both windows are pure at the last high and at the first low position.
    assert gain.max() == 2.0 and gain[19] == gain[20] == 2.0
    assert gain[[17, 18, 21, 22]].tolist() == pytest.approx([2 / 3, 4 / 3, 4 / 3, 2 / 3])
    found = select(entropy, torch.tensor([5]), lengths, top_k=1, entropy_threshold=1e-3)
    assert found.mask[0].nonzero()[:, 0].tolist() == [19]


def test_gain_changes_sign_when_time_is_reversed():
    entropy = torch.rand(3, 25, dtype=torch.float64)
    window, lengths = torch.full((3, 25), 4), torch.full((3,), 25)
    forth = future_gain(entropy, window, lengths)
    back = future_gain(entropy.flip(1), window, lengths).flip(1)
    whole = has_whole_windows(window, lengths)
    torch.testing.assert_close(forth[whole], -back[whole])


@given(seed=st.integers(0, 999), shift=st.floats(-1, 5))
def test_a_constant_changes_nothing(seed, shift):
    entropy = torch.rand(2, 40, dtype=torch.float64, generator=torch.manual_seed(seed)) * 3
    starts, lengths = torch.tensor([3, 8]), torch.tensor([40, 31])
    one = select(entropy, starts, lengths, entropy_threshold=-torch.inf)
    two = select(entropy + shift, starts, lengths, entropy_threshold=-torch.inf)
    assert torch.equal(one.window, two.window) and torch.equal(one.mask, two.mask)
    torch.testing.assert_close(one.gain, two.gain)


def test_scaling_scales_the_gain_but_changes_windows():
    entropy = torch.rand(1, 40, dtype=torch.float64, generator=torch.manual_seed(0))
    lengths = torch.tensor([40])
    window = torch.full((1, 40), 5)
    torch.testing.assert_close(
        3 * future_gain(entropy, window, lengths), future_gain(3 * entropy, window, lengths)
    )
    small = window_sizes(volatility(0.2 * entropy, lengths))
    large = window_sizes(volatility(3 * entropy, lengths))
    assert (small >= large).all() and (small > large).any()


def test_halves_round_to_even():
    sigma = torch.tensor([1 / 2.5, 1 / 3.5, 1 / 4.5, 1 / 7.5], dtype=torch.float64) - 1e-6
    exact = 1 / (sigma + 1e-6)
    assert exact.tolist() == [2.5, 3.5, 4.5, 7.5]
    assert window_sizes(sigma).tolist() == [2, 4, 4, 8]


def test_bounds_of_the_window():
    sigma = torch.tensor([0.0, 0.05, 0.39, 0.4, 5.0])
    assert window_sizes(sigma).tolist() == [10, 10, 3, 2, 2]


def test_volatility_divides_by_one_less():
    entropy = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    found = volatility(entropy, torch.tensor([6]))[0]
    # Around position 2: 0 1 0 1 0 1, whose squared deviations add up to 1.5.
    assert found[2] == pytest.approx(math.sqrt(1.5 / 5))
    # Around position 0 the first value stands in twice: 0 0 0 1 0 1.
    assert found[0] == pytest.approx(statistics.stdev([0, 0, 0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("count", "wanted"), [(0, 0), (1, 1), (4, 1), (5, 1), (9, 1), (10, 2), (14, 2), (15, 3)]
)
def test_the_share_is_rounded_down_but_at_least_one(count, wanted):
    eligible = torch.zeros(1, 20, dtype=torch.bool)
    eligible[:, 2 : 2 + count] = True
    assert highest(torch.rand(1, 20), eligible).sum() == wanted


def test_equal_scores_go_to_the_earlier_position():
    score = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    chosen = highest(score, torch.ones(1, 5, dtype=torch.bool), top_k=2)
    assert chosen.tolist() == [[False, True, True, False, False]]


def test_what_is_certain_is_dropped_after_the_cut():
    # The highest gain is at a position of no entropy: it takes the only place, and is dropped.
    entropy = torch.tensor([[3.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.5, 0.5]])
    kept = select(entropy, torch.tensor([3]), torch.tensor([8]), top_k=1, n_max=2)
    assert not kept.mask.any()
    kept = select(
        entropy, torch.tensor([3]), torch.tensor([8]), top_k=1, n_max=2, entropy_threshold=-1.0
    )
    assert kept.mask.sum() == 1


def test_negative_gains_are_chosen_when_there_is_nothing_else():
    entropy = torch.linspace(0.5, 3.0, 12)[None]
    found = select(entropy, torch.tensor([0]), torch.tensor([12]))
    assert found.mask.any() and (found.gain[found.mask] < 0).all()


def test_a_row_does_not_depend_on_its_neighbours():
    entropy = torch.rand(4, 50, generator=torch.manual_seed(3)) * 3
    starts, lengths = torch.tensor([4, 9, 1, 20]), torch.tensor([50, 33, 12, 41])
    together = select(entropy, starts, lengths)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        alone = select(entropy[row : row + 1, :length], start[None], length[None])
        assert torch.equal(together.mask[row, :length], alone.mask[0])
        assert torch.equal(together.gain[row, :length], alone.gain[0])


def test_without_whole_windows_every_position_of_the_answer_counts():
    entropy = torch.rand(1, 12)
    found = select(entropy, torch.tensor([2]), torch.tensor([10]), top_p=1.0,
                   entropy_threshold=-1.0, whole_windows=False)  # fmt: skip
    assert found.mask[0].nonzero()[:, 0].tolist() == list(range(2, 10))
    assert found.gain[found.mask].isfinite().all()
