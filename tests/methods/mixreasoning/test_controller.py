"""Algorithm 1 on scripted scores: golden traces, invariants, budgets."""

import math
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmsmith.errors import ConfigError
from lmsmith.methods.mixreasoning.controller import Controller, Mode, Rule

LOW, HIGH = 10.0, 12.0
SCORES = st.lists(st.floats(5, 17), min_size=1, max_size=300)
WINDOWS = st.integers(1, 9)


def replay(rule, scores, max_kept=None, max_generated=None):
    """Run a controller over scores; the answer, as (position drawn, mode), and what happened."""
    controller = Controller(rule, max_kept, max_generated)
    answer, happened = [], []
    for place, score in enumerate(scores):
        if controller.done:
            break
        before = controller.mode
        drop = controller.observe(score)
        if drop is None:
            if controller.mode is not before:
                happened.append((place, "brief"))
            controller.emit()
            answer.append((place, controller.mode))
        else:
            happened.append((place, f"think, drop {drop}"))
            gone = answer[len(answer) - drop :]
            assert all(mode is Mode.CONCISE for _, mode in gone)
            del answer[len(answer) - drop :]
        assert controller.kept == len(answer)
    return controller, answer, happened


def literal(low, high, m, scores):
    """Algorithm 1 as it is printed, with positions from 1; the answer and modes at each step."""
    mode, d, t = "think", 0, 1
    buffer: deque[float] = deque(maxlen=m)
    y: dict[int, int] = {}
    modes = []
    for place, c in enumerate(scores):
        buffer.append(c)
        mean = sum(buffer) / len(buffer)
        if mode == "concise" and d >= m and mean < low:
            mode, d = "think", 0
            new = max(1, t - m + 1)
            for position in range(new, t):
                del y[position]
            t = new
            modes.append(mode)
            continue
        if mode == "think" and d >= m and mean > high:
            mode, d = "concise", 0
        modes.append(mode)
        y[t] = place
        t += 1
        d += 1
    return [y[position] for position in sorted(y)], modes


@given(SCORES, WINDOWS)
def test_equal_to_the_algorithm_as_printed(scores, m):
    _, answer, _ = replay(Rule.paper(LOW, HIGH, m), scores)
    assert [place for place, _ in answer] == literal(LOW, HIGH, m, scores)[0]


@given(SCORES, WINDOWS)
def test_mean_is_the_brute_force_trailing_mean(scores, m):
    controller = Controller(Rule(-math.inf, math.inf, m, m, m, m - 1))
    for place, score in enumerate(scores):
        controller.observe(score)
        tail = scores[max(0, place + 1 - m) : place + 1]
        assert controller.mean == pytest.approx(sum(tail) / len(tail), abs=1e-12)
        controller.emit()


def test_golden_trace():
    """m = 3: think 3, brief 3, doubt, drop 2 and think 3, brief again."""
    scores = [13, 13, 13, 13, 13, 13, 4, 13, 13, 13, 13]
    _, answer, happened = replay(Rule.paper(LOW, HIGH, 3), scores)
    # At 6 the window is 13, 13, 4: a mean of 10, which is not below 10.
    assert happened == [(3, "brief")]
    scores[6] = 3.9
    _, answer, happened = replay(Rule.paper(LOW, HIGH, 3), scores)
    assert happened == [(3, "brief"), (6, "think, drop 2"), (10, "brief")]
    assert [place for place, _ in answer] == [0, 1, 2, 3, 7, 8, 9, 10]
    assert "".join(mode[0] for _, mode in answer) == "tttctttc"


def test_a_threshold_that_is_met_exactly_changes_nothing():
    rule = Rule.paper(LOW, HIGH, 2)
    assert replay(rule, [HIGH] * 9)[2] == []
    assert replay(rule, [13.0] * 4 + [LOW] * 9)[2] == [(2, "brief")]


def test_dwell_is_m_and_not_one_less():
    rule = Rule.paper(LOW, HIGH, 4)
    assert replay(rule, [20] * 4)[2] == []
    assert replay(rule, [20] * 5)[2] == [(4, "brief")]
    assert replay(rule, [20] * 5 + [0] * 3)[2] == [(4, "brief")]
    assert replay(rule, [20] * 5 + [0] * 4)[2] == [(4, "brief"), (8, "think, drop 3")]


def test_a_window_of_one_drops_nothing():
    controller, _, happened = replay(Rule.paper(LOW, HIGH, 1), [13, 13, 9, 13, 13, 9])
    assert happened == [(1, "brief"), (2, "think, drop 0"), (4, "brief"), (5, "think, drop 0")]
    assert controller.discarded == 0


@given(SCORES, WINDOWS)
def test_a_low_of_minus_infinity_never_thinks_again(scores, m):
    controller, _, _ = replay(Rule.paper(-math.inf, HIGH, m), scores)
    assert controller.to_think == 0 and controller.discarded == 0


@given(SCORES, WINDOWS)
def test_a_high_of_infinity_never_leaves_thinking(scores, m):
    controller, answer, _ = replay(Rule.paper(LOW, math.inf, m), scores)
    assert controller.mode is Mode.THINK and len(answer) == len(scores)


@given(SCORES, WINDOWS)
def test_the_fastest_alternation_is_bounded_by_dwell(scores, m):
    _, _, happened = replay(Rule.paper(math.inf, -math.inf, m), scores)
    places = [place for place, _ in happened]
    # m tokens, then to brief; m tokens more, then to think without a draw: m + 1 scores later.
    wanted, place = [], m
    while place < len(scores):
        wanted.append(place)
        place += m if len(wanted) % 2 else m + 1
    assert places == wanted


@given(SCORES, WINDOWS)
def test_invariants(scores, m):
    rule = Rule.paper(LOW, HIGH, m)
    controller = Controller(rule)
    since = len(scores)  # tokens since the last switch; none yet
    cycles = []  # kept length at each return to thinking
    for score in scores:
        mode, kept = controller.mode, controller.kept
        drop = controller.observe(score)
        if controller.mode is not mode:
            assert since >= m or controller.kept == since
            since = 0
        if drop is None:
            controller.emit()
            since += 1
        else:
            assert drop == m - 1 and controller.kept == kept - drop
            cycles.append(controller.kept)
    assert controller.discarded == (m - 1) * controller.to_think
    assert all(b - a >= m + 1 for a, b in pairwise(cycles))
    assert controller.generated == controller.kept + controller.discarded
    assert controller.generated <= 2 * controller.kept
    assert abs(controller.to_think - controller.to_concise) <= 1


@given(SCORES, WINDOWS)
def test_emptying_the_buffer_at_a_switch_changes_no_decision(scores, m):
    kept = Controller(Rule.paper(LOW, HIGH, m))
    emptied = Controller(Rule.paper(LOW, HIGH, m))
    for score in scores:
        mode = emptied.mode
        decisions = kept.observe(score), emptied.observe(score)
        assert decisions[0] == decisions[1] and kept.mode is emptied.mode
        if emptied.mode is not mode:
            emptied._scores.clear()
        if decisions[0] is None:
            kept.emit(), emptied.emit()


@given(SCORES, WINDOWS, st.integers(0, 12), st.integers(1, 6), st.integers(1, 6))
def test_nothing_called_safe_is_dropped_later(scores, window, rewind, think, brief):
    """What `retractable` does not cover stays, whatever comes."""
    controller = Controller(Rule(LOW, HIGH, window, think, brief, rewind))
    safe = 0
    for score in scores:
        if controller.observe(score) is None:
            controller.emit()
        assert controller.kept >= safe
        assert 0 <= controller.retractable <= controller.kept
        safe = max(safe, controller.kept - controller.retractable)


@given(SCORES, WINDOWS, st.integers(1, 60), st.integers(1, 60))
def test_both_budgets(scores, m, kept, generated):
    controller, _, _ = replay(Rule.paper(LOW, HIGH, m), scores * 5, kept, generated)
    assert controller.kept <= kept and controller.generated <= generated
    assert controller.done == (controller.kept == kept or controller.generated == generated)


def test_no_switch_where_none_is_allowed():
    controller = Controller(Rule.paper(LOW, HIGH, 1))
    for _ in range(5):
        assert controller.observe(20.0, may_switch=False) is None
        controller.emit()
    assert controller.mode is Mode.THINK
    controller.observe(20.0)
    assert controller.mode is Mode.CONCISE


def test_shares_and_fixed_modes():
    brief, _, _ = replay(Rule.fixed(Mode.CONCISE), [0.0] * 50)
    assert (brief.thought, brief.to_think, brief.retractable) == (0, 0, 0)
    mixed, answer, _ = replay(Rule.paper(LOW, HIGH, 3), [13, 13, 13, 13, 13, 13, 3, 13, 13, 13, 13])
    assert mixed.thought == sum(mode is Mode.THINK for _, mode in answer) == 6


@pytest.mark.parametrize("wrong", [{"low": math.nan}, {"window": 0}, {"rewind": -1}])
def test_impossible_rules(wrong):
    with pytest.raises(ConfigError):
        Rule(**({"low": 1.0, "high": 2.0} | wrong))
