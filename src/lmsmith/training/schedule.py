"""The course of the learning rate, a pure function of the step, so there is nothing to save."""

from __future__ import annotations

import math

from lmsmith.training.settings import TrainSettings


def learning_rate(step: int, total: int, settings: TrainSettings) -> float:
    """The learning rate of a step.

    The warm-up rises linearly and gives the first step a rate above zero; the fall reaches
    `final_rate` one step after the last one, so no step is wasted on a rate of zero.

    Args:
        step: The step, from 0.
        total: Steps in all.
        settings: Peak, schedule, shares of warm-up and decay.
    """
    warmup = round(settings.warmup * total)
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    decay = total - warmup
    if settings.schedule == "wsd":
        decay = min(decay, round(settings.decay * total))
    # Share of the fall that is behind this step.
    fallen = max(0, step - (total - decay)) / max(1, decay)
    if settings.schedule == "constant":
        share = 1.0
    elif settings.schedule == "cosine":
        share = (1 + math.cos(math.pi * fallen)) / 2
    else:
        share = 1 - fallen
    if settings.schedule != "constant":
        share = settings.final_rate + (1 - settings.final_rate) * share
    return settings.learning_rate * share
