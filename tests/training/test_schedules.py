"""The course of the learning rate, against its formulas."""

import math

import pytest

from lmsmith.errors import ConfigError
from lmsmith.training import TrainSettings
from lmsmith.training.schedule import learning_rate


def rates(total, **settings):
    chosen = TrainSettings(learning_rate=1.0, **settings)
    return [learning_rate(step, total, chosen) for step in range(total)]


def test_constant():
    assert rates(4, schedule="constant") == [1, 1, 1, 1]


def test_linear():
    assert rates(4, schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rates(4, schedule="linear", final_rate=0.5) == pytest.approx([1, 0.875, 0.75, 0.625])


def test_cosine():
    assert rates(4, schedule="cosine") == pytest.approx(
        [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    )


def test_wsd_stays_and_then_falls():
    assert rates(10, schedule="wsd", decay=0.4) == pytest.approx(
        [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_rises_linearly_from_above_zero_to_the_peak(schedule):
    found = rates(20, schedule=schedule, warmup=0.2)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(found) == 1.0 and min(found) > 0


def test_transformers_agrees_on_the_fall():
    import torch
    from transformers import get_scheduler

    for name in ("linear", "cosine"):
        parameter = torch.nn.Parameter(torch.zeros(1))
        theirs = get_scheduler(name, torch.optim.SGD([parameter], lr=1.0), 0, 12)
        for mine in rates(12, schedule=name):
            assert mine == pytest.approx(theirs.get_last_lr()[0])
            theirs.optimizer.step()
            theirs.step()


def test_contradictions_are_one_line():
    with pytest.raises(ConfigError, match="together more than all steps"):
        TrainSettings(schedule="wsd", warmup=0.5, decay=0.6)
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        TrainSettings(learning_rat=0.1)
